"""Files that are replaced as one, readers that accept no links, and the cache folder."""

import contextlib
import errno
import io
import json
import math
import os
import re
import secrets
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Windows has none of these flags. Without O_NONBLOCK, opening a fifo waits for its other end.
_FLAGS = ("O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")
_SAFE = sum(getattr(os, name, 0) for name in _FLAGS)
"""Flags of `os.open` that follow no links, and do not wait for the other end of a fifo."""

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
}


class IrregularError(OSError):
    """Error about a path that is a link, a folder, a fifo or a device, and no regular file."""


def cache_folder() -> Path:
    """Return `JAXFL_CACHE_DIR`, by default `~/.cache/jaxfl`, which may not exist yet.

    Raises:
        OSError: The path has no meaning, for instance because the user has no home.
    """
    # An empty variable counts as one that is not set.
    folder = Path(os.environ.get("JAXFL_CACHE_DIR") or "~/.cache/jaxfl")
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, f"{error} Set JAXFL_CACHE_DIR", str(folder)) from None


def kind(path: Path) -> str | None:
    """Return the kind of a path in words, such as "a regular file" or "a symbolic link".

    None stands for a path that does not exist.
    """
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        # The second error means that a file lies where the path has a folder.
        return None
    if stat.S_ISREG(mode):
        return "a regular file"
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file, and not a link to one."""
    return kind(path) == "a regular file"


def open_regular(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Return a descriptor of a regular file, without following links or waiting for fifos.

    Args:
        path: The file.
        flags: Flags of `os.open`.
        mode: Permissions of a file that is made, before the user's umask.

    Raises:
        IrregularError: The path is not a regular file.
        OSError: The file cannot be opened.
    """
    found = kind(path)
    # A path that does not exist is for `os.open` to make, if the flags ask for it, or to reject.
    if found in (None, "a regular file"):
        descriptor = os.open(path, flags | _SAFE, mode)
        # Another process may have replaced the file since the check of the path.
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        found = "another kind of file"
    raise IrregularError(f"{str(path)!r} must be a regular file, got {found}")


def opened(path: Path) -> io.BufferedReader:
    """Open a regular file to read its bytes (see `open_regular`)."""
    return os.fdopen(open_regular(path), "rb")


def read(path: Path) -> bytes:
    """Return the bytes of a regular file (see `open_regular`)."""
    with opened(path) as file:
        return file.read()


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read.

    The file appears when all bytes are on disk. A process that is stopped earlier leaves at most a
    `leftovers` file.

    Raises:
        FileExistsError: The path exists already.
        OSError: The disk is full, or cannot hold such a file.
    """
    temporary = _temporary(path)
    # The file has its permissions from the start, so nobody else can open it before a `chmod`.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link replaces nothing.
        os.link(temporary, path, follow_symlinks=False)
    finally:
        # After a link, the content stays under the file's own name.
        temporary.unlink(missing_ok=True)
    # The caller uses the secret from here on, so a crash must not undo the file's name.
    _sync(path.parent)


def leftovers(path: Path) -> list[Path]:
    """Return the temporary files for `path` in its folder, which killed processes may have left."""
    # The pattern is that of the names that `_temporary` makes.
    name = re.compile(rf"{re.escape(path.name)}\.[0-9a-f]{{16}}")
    return [
        other for other in path.parent.iterdir() if name.fullmatch(other.name) and is_regular(other)
    ]


def write_json(path: Path, value: Any, *, allow_nan: bool = True) -> None:
    """Write JSON atomically, so that a reader sees the old file or the new one.

    Args:
        path: The file.
        value: Value to write.
        allow_nan: Whether numbers that are not finite are written, as NaN and Infinity. Otherwise
            they raise a ValueError.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=allow_nan) + "\n")


def write_metrics(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows as JSON lines, atomically. Values that are not finite become null."""
    with replacing(path) as temporary:
        temporary.write_text("".join(map(_line, rows)))


def append_metrics(path: Path, row: dict[str, Any]) -> None:
    """Append one row to a file of `write_metrics`."""
    append_text(path, _line(row))


def append_text(path: Path, text: str) -> None:
    """Append a text to a regular file, in one system call if the disk has room.

    Raises:
        OSError: The file cannot be opened (see `open_regular`), or the disk is full.
    """
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND)
    rest = text.encode()
    # Without a buffer, every `write` is a system call of its own.
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        while rest:
            # A nearly full disk takes a part, and then raises an error.
            rest = rest[file.write(rest) :]


def write_arrays(path: Path, arrays: Mapping[str, Any], *, compress: bool = True) -> None:
    """Write named arrays as one .npz file, atomically and without pickled objects."""
    method = zipfile.ZIP_STORED
    if compress:
        method = zipfile.ZIP_DEFLATED
    # `np.savez` does not accept arrays with the names of its own arguments.
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w", method) as archive:
        for name, value in arrays.items():
            # The size is not known ahead, and a plain entry ends at 2 GiB.
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a file of `write_arrays`.

    Raises:
        OSError: The file cannot be opened (see `open_regular`).
        ValueError: The file is damaged, or holds something else.
    """
    damaged = f"{str(path)!r} must hold arrays, and is damaged"
    with opened(path) as raw:
        try:
            with zipfile.ZipFile(raw) as archive:
                # Checksums come first, because the header of a damaged array may ask for any
                # amount of memory.
                if archive.testzip() is not None:
                    raise ValueError(damaged)
            raw.seek(0)
            with np.load(raw, allow_pickle=False) as file:
                return {name: file[name] for name in file}
        # `zipfile` raises a RuntimeError for a password, and for an unknown method of compression.
        except (EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(damaged) from error


def recall_arrays(name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray] | None:
    """Return the finite float32 arrays of these shapes from a file in the cache folder.

    None stands for a missing or damaged file, or for a file with other arrays.

    Args:
        name: Path of the file within the cache folder.
        shapes: Shapes of the arrays by name.
    """
    try:
        found = read_arrays(cache_folder() / name)
        arrays = {key: found[key] for key in shapes}
    except (OSError, ValueError, KeyError):
        # The caller computes the arrays anew, so a damaged copy is no error.
        return None
    for key, array in arrays.items():
        if array.shape != shapes[key] or array.dtype != np.float32 or not np.isfinite(array).all():
            return None
    return arrays


def keep_arrays(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a file in the cache folder, atomically.

    Without a folder that can be written, nothing happens.
    """
    with contextlib.suppress(OSError):
        path = cache_folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_arrays(path, arrays, compress=False)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file, which replaces `path` if the block raises no error."""
    temporary = _temporary(path)
    # `touch` gives the permissions of the user's umask.
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        # A rename is atomic, because both names are in one folder.
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}")


def _sync(folder: Path) -> None:
    """Write the names in a folder to disk, if the system supports it."""
    # Windows cannot open a folder as a file.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(finite_or_none(row)) + "\n"


def finite_or_none(value: Any) -> Any:
    """Return a JSON value with None in place of numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite_or_none(own) for key, own in value.items()}
    if isinstance(value, list):
        return [finite_or_none(own) for own in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
