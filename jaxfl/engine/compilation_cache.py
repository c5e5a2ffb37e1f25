"""Cache of compiled programs, so that a second run with the same method and shapes compiles none.

`JAXFL_COMPILATION_CACHE=0` turns the cache off. If JAX's own cache is set already
(`JAX_COMPILATION_CACHE_DIR`), JAX uses that one.
"""

import atexit
import contextlib
import errno
import functools
import hashlib
import logging
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxfl._support import files

_LOG = logging.getLogger("jaxfl")

_MOST_BYTES = 2**30
"""Largest number of bytes of programs that remain in the cache when a process ends."""

_MARKER = ".jaxfl"
"""Name of the file that marks a folder as made by `claim`.

Programs are removed only from folders with this file.
"""

_PROCESSOR = re.compile("[0-9a-f]{16}")
"""Pattern of the names that `_processor` returns."""

_PROGRAM = re.compile(r".+-[0-9a-f]{64}-(cache|atime)")
"""Pattern of JAX's file names: a program's name, its key (SHA-256), and a suffix."""


_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
"""Name of the event that JAX reports before it looks for a program in its cache.

JAX makes the cache's folder after this event.
"""


def enable() -> None:
    """Let JAX cache every program that it compiles, if the cache's folder can be written.

    Nothing changes if JAX has a cache already, or if `JAXFL_COMPILATION_CACHE` is 0. Nothing is
    written before JAX first looks for a program. When the process ends, the least recently used
    programs beyond 1 GiB are removed, if `claim` has marked the folder.
    """
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
    # Machines with other processors may share the user's folder.
    own = str(folder / _processor())
    jax.config.update("jax_compilation_cache_dir", own)
    # By default JAX caches only programs that take a second or more to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    jax.monitoring.register_event_listener(functools.partial(_make_folder, folder, own))
    # JAX could bound the folder itself, but would need the package filelock, and would read all of
    # the folder for every program.
    atexit.register(trim, folder, _MOST_BYTES)


def _make_folder(folder: Path, own: str, event: str, /, **_: str | int) -> None:
    """Make the cache's folder when JAX is about to look for a program, or turn the cache off.

    Args:
        folder: Folder of the programs for all processors.
        own: Folder of this processor's programs.
        event: Name of an event that JAX reports.
    """
    # The user's code may have given JAX another cache since.
    if event != _ASKED or jax.config.values["jax_compilation_cache_dir"] != own:
        return
    try:
        claim(folder)
        os.makedirs(own, exist_ok=True)
        # `makedirs` accepts a folder that exists, even if this user cannot write to it.
        if not os.access(own, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "cannot be written", own)
    except OSError as error:
        # Otherwise JAX would log a warning for every program.
        _LOG.debug("compiled programs are not cached: %s", error)
        jax.config.update("jax_compilation_cache_dir", None)


def claim(folder: Path) -> None:
    """Make the folder, and mark it as one from which `trim` may remove programs.

    A symbolic link, or a folder that already has files, gets no mark.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not folder.is_symlink() and not os.listdir(folder):
        os.close(files.open_regular(folder / _MARKER, os.O_WRONLY | os.O_CREAT))


def trim(folder: Path, most: int) -> None:
    """Remove programs from a marked folder until the rest has at most `most` bytes.

    The least recently used programs are removed first.
    """
    try:
        if folder.is_symlink() or not files.is_regular(folder / _MARKER):
            return
        # The tuples begin with the time of the last use, so the oldest file comes first.
        found = sorted(_cached_files(folder))
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if total <= most:
                return
            # Another process may trim the folder at the same time.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
    except OSError as error:
        # A cache that stays too large harms no result, so the process ends as usual.
        _LOG.debug("%s is not trimmed: %s", folder, error)


def _cached_files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Yield the time of the last use, the size and the path of each file that JAX wrote.

    Symbolic links are not followed.
    """
    for processor in os.scandir(folder):
        if not processor.is_dir(follow_symlinks=False) or not _PROCESSOR.fullmatch(processor.name):
            continue
        for file in os.scandir(processor.path):
            if not file.is_file(follow_symlinks=False) or not _PROGRAM.fullmatch(file.name):
                continue
            with contextlib.suppress(FileNotFoundError):
                stat = file.stat(follow_symlinks=False)
                # Some file systems do not record when a file is read.
                yield max(stat.st_atime, stat.st_mtime), stat.st_size, file.path


def _processor() -> str:
    """Return a name of 16 hexadecimal digits for the processors that can run the same programs.

    JAX's own key of a program does not include the processor.
    """
    try:
        with open("/proc/cpuinfo") as file:
            # Large machines list hundreds of cores, of which the first stands for all.
            cores = file.read(2**14).split("\n\n")
        first = cores[0].splitlines()
        # The first two names are those of x86, and the others those of ARM.
        names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
        facts = [line for line in first if line.split(":")[0].strip() in names]
    except OSError:
        facts = [platform.processor()]
    identity = repr((platform.machine(), facts))
    return hashlib.sha256(identity.encode()).hexdigest()[:16]
