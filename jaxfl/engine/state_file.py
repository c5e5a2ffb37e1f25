"""Client states on the host: rows of a memory-mapped file that a kill at any moment leaves whole."""

import contextlib
import os
import pathlib
import shutil
import tempfile
import zlib
from typing import Literal

import jax
import numpy as np
from jaxtyping import Int, UInt8, UInt32

from jaxfl import files
from jaxfl.types import Tree

ROWS = "rows.bin"
_PART_BYTES = 2**25


class DamagedError(ValueError):
    """Files differ from what was written."""


class Store:
    """Client states [C, ...] in a file with two places for each row, and `side`, which says where the row is.

    A row is written to the place that the last checkpoint does not need. So a checkpoint holds only `side`, a byte per
    client, and a checksum (CRC-32) of each row; a kill at any moment leaves the rows of the last checkpoint intact.
    Only rows that were written since the start take disk space twice.

    All rows are zeros until `start` makes the file, or `restore` finds it.

    Args:
        folder: made with the file; None: a nameless file in the system's temporary folder, one place for each row.
        like: shapes and dtypes of client states [C, ...].
        number: C.

    Raises:
        ValueError: too little space in the folder.
    """

    def __init__(self, folder: pathlib.Path | None, like: Tree, number: int) -> None:
        self.number, self.folder = number, folder
        leaves, self._structure = jax.tree.flatten(like)
        # A client's row is contiguous, so that it takes few pages.
        self._row = np.dtype(
            [(str(i), leaf.dtype, leaf.shape[1:]) for i, leaf in enumerate(leaves)], align=True
        )
        self.bytes_per_client = self._row.itemsize
        self._check_space()
        self._lay(
            np.broadcast_to(
                np.zeros(self.bytes_per_client, np.uint8), (2, number, self.bytes_per_client)
            )
        )
        self.side, self.sums = np.zeros(number, np.uint8), np.zeros(number, np.uint32)
        self.kept = np.ones(
            number, np.uint8
        )  # no checkpoint yet: rows are written to the first place

    def start(self) -> None:
        """Make the file, in place of any other."""
        # An open map outlives its file's name: a temporary file needs no clean-up.
        temporary = self.folder is None
        with (
            tempfile.TemporaryDirectory()
            if temporary
            else contextlib.nullcontext(self.folder) as name
        ):
            path = pathlib.Path(str(name)) / ROWS
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            self._map(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, "w+")

    def read(self, ids: Int[np.ndarray, "S"], of: Tree = None) -> Tree:
        """Copies of some clients' rows [S, ...], from all files or from `of`."""
        side = self.side[ids]
        return jax.tree.map(
            lambda leaf: np.asarray(leaf[side, ids]), self.files if of is None else of
        )

    def write(self, ids: Int[np.ndarray, "S"], rows: Tree) -> None:
        """Replace some clients' rows; each client is named once."""
        side = 1 - self.kept[ids]
        new = np.zeros(len(ids), self._row)
        for name, leaf in zip(self._row.names or (), jax.tree.leaves(rows), strict=True):
            new[name] = leaf
        if new.dtype.itemsize:
            self.bytes[side, ids] = flat = new.view(np.uint8).reshape(len(ids), -1)
            self.sums[ids] = _sums(flat)
        self.side[ids] = side

    def flush(self) -> None:
        """Write the rows to disk, before the checkpoint that needs them."""
        if isinstance(self.bytes, np.memmap):
            self.bytes.flush()

    def saved(self) -> dict[str, np.ndarray]:
        """What a checkpoint keeps."""
        return {"side": self.side, "sums": self.sums}

    def commit(self) -> None:
        """Keep the present rows from here on, after the checkpoint that needs them."""
        if self.folder is not None:
            self.kept = self.side.copy()

    def restore(self, side: UInt8[np.ndarray, "C"], sums: UInt32[np.ndarray, "C"]) -> None:
        """Go back to the rows of a checkpoint; `DamagedError` if they have changed."""
        assert self.folder is not None
        path, size = self.folder / ROWS, 2 * self.number * self.bytes_per_client
        if self.bytes_per_client:
            if files.kind(path) is None:
                raise DamagedError(f"{path} is missing")
            if not files.is_regular(path) or path.stat().st_size != size:
                raise DamagedError(f"{path} has not {size} bytes")
            # A read-only file is mapped copy-on-write: rows that move (see `states`) stay in memory.
            if os.access(path, os.W_OK):
                self._map(path, os.O_RDWR, "r+")
            else:
                self._map(path, os.O_RDONLY, "c")
        self.side, self.sums = np.array(side), np.array(sums)
        parts = self._parts(np.arange(self.number))
        sums_now = np.concatenate([_sums(self.bytes[self.side[ids], ids]) for ids in parts])
        wrong = np.flatnonzero(sums_now != self.sums)
        if wrong.size:
            named = f"{wrong.size} clients, of client {wrong[0]} first"
            raise DamagedError(f"the states of {named}, are damaged or of later rounds")
        self.commit()

    def states(self) -> Tree:
        """All states [C, ...], mapped and read-only; a row that lies in the second place moves to the first.

        Rows that have changed since the last checkpoint do not move: it may need what they would replace.
        """
        moving = np.flatnonzero(self.side & self.kept)
        for ids in self._parts(moving) if self.bytes_per_client else ():
            self.bytes[0, ids] = self.bytes[1, ids]

        views = jax.tree.map(lambda leaf: leaf[0], self.files)
        for leaf in jax.tree.leaves(views):
            leaf.flags.writeable = False
        return views

    def _map(self, path: pathlib.Path, flags: int, mode: Literal["w+", "r+", "c"]) -> None:
        """Map the rows of a file that is opened with these flags, and closed: a map needs no descriptor."""
        shape = (2, self.number, self.bytes_per_client)
        if not self.bytes_per_client:
            self._lay(np.zeros(shape, np.uint8))
            return
        with os.fdopen(files.open_regular(path, flags), "rb" if mode == "c" else "r+b") as file:
            self._lay(np.memmap(file, np.uint8, mode, shape=shape))

    def _lay(self, rows: UInt8[np.ndarray, "2 C bytes"]) -> None:
        self.bytes, names = rows, self._row.names or ()
        fields = rows.view(self._row)[..., 0] if names else rows
        self.files = jax.tree.unflatten(self._structure, [fields[name] for name in names])

    def _parts(self, ids: Int[np.ndarray, "S"]) -> list[Int[np.ndarray, "_"]]:
        """Pieces that fit in memory."""
        return np.array_split(ids, 1 + len(ids) * self.bytes_per_client // _PART_BYTES)

    def _check_space(self) -> None:
        folder = self.folder or pathlib.Path(tempfile.gettempdir())
        needed, path = (
            self.bytes_per_client * self.number * (2 if self.folder else 1),
            folder / ROWS,
        )
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(there).free + (path.stat().st_blocks * 512 if path.exists() else 0)
        if needed > free:
            raise ValueError(
                f"folder={str(folder)!r} has {free / 2**30:.1f} GiB free, and the states of {self.number} clients need "
                f"{needed / 2**30:.1f}: choose another `folder` (without one: set TMPDIR)"
            )


def _sums(rows: UInt8[np.ndarray, "S bytes"]) -> UInt32[np.ndarray, "S"]:
    return np.fromiter(map(zlib.crc32, rows), np.uint32, len(rows))
