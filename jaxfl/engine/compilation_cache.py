"""Compiled programs are kept in the cache folder: a second run of the same method and shapes compiles nothing.

`JAXFL_COMPILATION_CACHE=0` turns that off, and a cache of JAX that is set already (`JAX_COMPILATION_CACHE_DIR`) stands.
"""

import atexit
import contextlib
import hashlib
import os
import platform
from pathlib import Path

import jax

from jaxfl.files import cache_folder

_MOST_BYTES = 2**30


def keep() -> None:
    """Let JAX keep every program that it compiles; nothing is written before the first."""
    if jax.config.values["jax_compilation_cache_dir"] is not None or os.environ.get("JAXFL_COMPILATION_CACHE") == "0":
        return
    folder = cache_folder() / "programs"
    jax.config.update("jax_compilation_cache_dir", str(folder / _processor()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # JAX can bound the folder itself, but needs the package filelock, and reads the whole folder for every program.
    atexit.register(trim, folder, _MOST_BYTES)


def trim(folder: Path, most: int) -> None:
    """Remove the least recently used files until the rest has at most `most` bytes."""
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process trims too
            stat = path.stat()
            if path.is_file():
                files.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= most:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size


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
