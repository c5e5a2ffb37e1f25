"""Compiled programs are kept in the cache folder: a second run of the same method and shapes compiles nothing.

`JAXFL_COMPILATION_CACHE=0` turns that off, and a cache of JAX that is set already (`JAX_COMPILATION_CACHE_DIR`) stands.
"""

import atexit
import contextlib
import errno
import hashlib
import logging
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxfl import files

_LOG = logging.getLogger("jaxfl")

_MOST_BYTES = 2**30

_MARKER = ".jaxfl"
"""Name of the file that marks a folder as made by `claim`. Nothing is removed from a folder without it."""

_PROCESSOR = re.compile("[0-9a-f]{16}")
"""Names that `_processor` gives."""

_PROGRAM = re.compile(r".+-[0-9a-f]{64}-(cache|atime)")
"""Names that JAX gives: the program's name, its key (SHA-256), and a suffix."""


_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
"""Name of JAX's event before it looks for a program in its cache, whose folder it makes afterwards."""


def keep() -> None:
    """Let JAX keep every program that it compiles, where a cache can be had. Nothing is written before the first."""
    if (
        jax.config.values["jax_compilation_cache_dir"] is not None
        or os.environ.get("JAXFL_COMPILATION_CACHE") == "0"
    ):
        return
    try:
        folder = files.cache_folder() / "programs"
    except OSError as error:
        _LOG.debug("compiled programs are not cached: %s", error)
        return
    own = str(folder / _processor())
    jax.config.update("jax_compilation_cache_dir", own)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def prepare(event: str, **_: str | int) -> None:
        if event != _ASKED or jax.config.values["jax_compilation_cache_dir"] != own:
            return
        try:
            claim(folder)
            os.makedirs(own, exist_ok=True)
            if not os.access(own, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "cannot be written", own)
        except OSError as error:  # JAX would warn of every program
            _LOG.debug("compiled programs are not cached: %s", error)
            jax.config.update("jax_compilation_cache_dir", None)

    jax.monitoring.register_event_listener(prepare)
    # JAX can bound the folder itself, but needs the package filelock, and reads the whole folder for every program.
    atexit.register(trim, folder, _MOST_BYTES)


def claim(folder: Path) -> None:
    """Make the folder and mark it. A folder that others have filled, or linked to, stays unmarked."""
    folder.mkdir(parents=True, exist_ok=True)
    if not folder.is_symlink() and not os.listdir(folder):
        os.close(files.open_regular(folder / _MARKER, os.O_WRONLY | os.O_CREAT))


def trim(folder: Path, most: int) -> None:
    """Remove the least recently used programs of a marked folder until the rest has at most `most` bytes."""
    try:
        if folder.is_symlink() or not files.is_regular(folder / _MARKER):
            return
        found = sorted(_programs(folder))
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if total <= most:
                return
            with contextlib.suppress(FileNotFoundError):  # another process trims too
                os.unlink(path)
            total -= size
    except OSError as error:
        _LOG.debug("%s is not trimmed: %s", folder, error)


def _programs(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Yield time of the last use, size and path of each file that JAX wrote. No link is followed."""
    for processor in os.scandir(folder):
        if processor.is_dir(follow_symlinks=False) and _PROCESSOR.fullmatch(processor.name):
            for file in os.scandir(processor.path):
                if file.is_file(follow_symlinks=False) and _PROGRAM.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):
                        stat = file.stat(follow_symlinks=False)
                        yield max(stat.st_atime, stat.st_mtime), stat.st_size, file.path


def _processor() -> str:
    """A name for processors that run the same programs, which JAX's own key does not cover."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(2**14).split("\n\n")[0].splitlines()  # the first core
        names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        facts = [line for line in first if line.split(":")[0].strip() in names]
    except OSError:
        facts = [platform.processor()]
    return hashlib.sha256(repr((platform.machine(), facts)).encode()).hexdigest()[:16]
