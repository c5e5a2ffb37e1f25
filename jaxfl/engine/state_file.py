"""Client states on the host, in the rows of a memory-mapped file."""

import contextlib
import os
import pathlib
import shutil
import tempfile
import zlib
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int, UInt8, UInt32

from jaxfl._support import files
from jaxfl.types import Tree

ROWS = "rows.bin"
"""Name of the file of rows."""

_PART_BYTES = 2**25
"""Bytes of rows that are read into memory at once."""


class DamagedError(ValueError):
    """Error about a file of a run that is missing, or has changed since it was written."""


class Store:
    """Client states [C, ...] in a file with two places for each row.

    A row is written to the place that the last checkpoint does not need. A kill at any moment
    therefore leaves the rows of the last checkpoint intact. A checkpoint stores only the place of
    each row, 0 or 1 (`side`), and its checksum (`sums`). A row takes disk space twice only after
    both of its places were written.

    All rows are zeros until `start` makes the file, or `restore` finds it.

    Args:
        folder: Folder of the file, which is made with the file. None stands for a file without a
            name in the system's temporary folder, in which only the first places are used.
        like: Shapes and dtypes of client states [C, ...].
        num_clients: C, the number of clients.

    Raises:
        ValueError: There is too little space in the folder.
    """

    def __init__(self, folder: pathlib.Path | None, like: Tree, num_clients: int) -> None:
        self.num_clients = num_clients
        self.folder = folder
        leaves, self._structure = jax.tree.flatten(like)
        # A client's row is contiguous, so it takes few pages.
        fields = [(str(i), leaf.dtype, leaf.shape[1:]) for i, leaf in enumerate(leaves)]
        self._row = np.dtype(fields, align=True)
        self.bytes_per_client = self._row.itemsize
        self._check_space()
        zeros = np.zeros(self.bytes_per_client, np.uint8)
        # A broadcast zero takes no memory, whatever the number of clients.
        self._lay(np.broadcast_to(zeros, (2, num_clients, self.bytes_per_client)))
        self.side = np.zeros(num_clients, np.uint8)
        self.sums = np.zeros(num_clients, np.uint32)
        # Rows are written to the first place until they are committed for the first time.
        self.kept = np.ones(num_clients, np.uint8)

    def start(self) -> None:
        """Make the file with rows of zeros, in place of an earlier file.

        States without numbers need no file.
        """
        # An open map outlives its file's name, so a temporary file needs no clean-up.
        if self.folder is None:
            folder: Any = tempfile.TemporaryDirectory()
        else:
            folder = contextlib.nullcontext(self.folder)
        with folder as name:
            path = pathlib.Path(str(name)) / ROWS
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            self._map(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, "w+")

    def read(self, ids: Int[np.ndarray, "S"], of: Tree = None) -> Tree:
        """Return copies of some clients' rows, as a tree of arrays [S, ...].

        Args:
            ids: Indices of the clients.
            of: A part of the tree `files` to read. None stands for all of it.
        """
        side = self.side[ids]
        if of is None:
            of = self.files
        return jax.tree.map(lambda leaf: np.asarray(leaf[side, ids]), of)

    def write(self, ids: Int[np.ndarray, "S"], rows: Tree) -> None:
        """Replace some clients' rows.

        Args:
            ids: Indices of the clients, each of them once.
            rows: The new rows [S, ...].
        """
        # The last checkpoint may need the row in the other place.
        side = 1 - self.kept[ids]
        # The zeros fill the gaps of alignment, so equal states have equal checksums.
        new = np.zeros(len(ids), self._row)
        for name, leaf in zip(self._row.names or (), jax.tree.leaves(rows), strict=True):
            new[name] = leaf
        # Rows without numbers have no bytes to store.
        if new.dtype.itemsize:
            flat = new.view(np.uint8).reshape(len(ids), -1)
            self.bytes[side, ids] = flat
            self.sums[ids] = _checksums(flat)
        self.side[ids] = side

    def flush(self) -> None:
        """Write the mapped rows to disk, because the next checkpoint needs them there."""
        if isinstance(self.bytes, np.memmap):
            self.bytes.flush()

    def saved(self) -> dict[str, np.ndarray]:
        """Return the arrays that a checkpoint stores, as arguments of `restore` by name."""
        return {"side": self.side, "sums": self.sums}

    def commit(self) -> None:
        """Protect the present rows from `write`, because the last checkpoint needs them.

        A file without a folder has no checkpoints, so its rows are not protected.
        """
        if self.folder is not None:
            # Later writes change `side` in place.
            self.kept = self.side.copy()

    def restore(self, side: UInt8[np.ndarray, "C"], sums: UInt32[np.ndarray, "C"]) -> None:
        """Return to the rows of a checkpoint. The store must have a folder.

        Args:
            side: Place of each row.
            sums: Checksum of each row.

        Raises:
            DamagedError: The file is missing or has another size, or rows have changed since the
                checkpoint.
        """
        assert self.folder is not None
        self._map_existing(self.folder / ROWS)
        # Later writes change both arrays in place, so the store has copies of its own.
        self.side = np.array(side)
        self.sums = np.array(sums)
        self._check_rows()
        self.commit()

    def states(self) -> Tree:
        """Return all states [C, ...], mapped and read-only.

        The result shows the first place of each row. Rows in the second place are copied there,
        except those that have changed since the last checkpoint, because the checkpoint may need
        the rows that they would replace. A caller therefore saves a checkpoint first.
        """
        # Places are 0 and 1, so `&` finds the rows whose present and protected place is 1.
        moving = np.flatnonzero(self.side & self.kept)
        if self.bytes_per_client:
            for ids in self._parts(moving):
                self.bytes[0, ids] = self.bytes[1, ids]

        views = jax.tree.map(lambda leaf: leaf[0], self.files)
        for leaf in jax.tree.leaves(views):
            # A caller that wrote to the rows would invalidate their checksums.
            leaf.flags.writeable = False
        return views

    def _map_existing(self, path: pathlib.Path) -> None:
        """Map the file that an earlier process has written. States without numbers have no file.

        Raises:
            DamagedError: The file is missing or has another size.
        """
        if not self.bytes_per_client:
            return
        if files.kind(path) is None:
            raise DamagedError(f"{path} is missing")
        size = 2 * self.num_clients * self.bytes_per_client
        if not files.is_regular(path) or path.stat().st_size != size:
            raise DamagedError(f"{path} does not have {size} bytes")
        # A read-only file is mapped copy-on-write, so rows that `states` moves stay in memory.
        if os.access(path, os.W_OK):
            self._map(path, os.O_RDWR, "r+")
        else:
            self._map(path, os.O_RDONLY, "c")

    def _check_rows(self) -> None:
        """Require rows with their checksums, or raise a `DamagedError`."""
        parts = self._parts(np.arange(self.num_clients))
        sums_now = np.concatenate([_checksums(self.bytes[self.side[ids], ids]) for ids in parts])
        wrong = np.flatnonzero(sums_now != self.sums)
        if wrong.size:
            raise DamagedError(
                f"the states of {wrong.size} clients, the first of which is client {wrong[0]}, "
                "are damaged or of later rounds"
            )

    def _map(self, path: pathlib.Path, flags: int, mode: Literal["w+", "r+", "c"]) -> None:
        """Map the rows of a file. The file is closed again, because a map needs no descriptor.

        Args:
            path: The file.
            flags: Flags to open it with.
            mode: Mode of the map, as for `numpy.memmap`.
        """
        shape = (2, self.num_clients, self.bytes_per_client)
        if not self.bytes_per_client:
            # The system cannot map a file of 0 bytes.
            self._lay(np.zeros(shape, np.uint8))
            return
        with os.fdopen(files.open_regular(path, flags), "rb" if mode == "c" else "r+b") as file:
            self._lay(np.memmap(file, np.uint8, mode, shape=shape))

    def _lay(self, rows: UInt8[np.ndarray, "2 C bytes"]) -> None:
        """Set `bytes` to these rows, and `files` to views of them as a tree [2, C, ...]."""
        self.bytes = rows
        names = self._row.names or ()
        if self._row.itemsize:
            fields = rows.view(self._row)[..., 0]
        else:
            # NumPy cannot view bytes as rows of 0 bytes, but an array of such rows takes no memory.
            fields = np.zeros(rows.shape[:2], self._row)
        self.files = jax.tree.unflatten(self._structure, [fields[name] for name in names])

    def _parts(self, ids: Int[np.ndarray, "S"]) -> list[Int[np.ndarray, "_"]]:
        """Cut indices into parts with at most about 32 MiB of rows each."""
        return np.array_split(ids, 1 + len(ids) * self.bytes_per_client // _PART_BYTES)

    def _check_space(self) -> None:
        """Require enough space for all rows, in both places if there will be checkpoints."""
        folder = self.folder or pathlib.Path(tempfile.gettempdir())
        path = folder / ROWS
        needed = self.bytes_per_client * self.num_clients
        if self.folder:
            needed *= 2
        # The folder may not exist yet, but its disk is that of a folder above it.
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(there).free
        if self.folder and path.exists():
            # The new file replaces this one, which is sparse, so its blocks count and not its size.
            # Without a folder, the new file is in a temporary folder of its own.
            free += path.stat().st_blocks * 512
        if needed > free:
            raise ValueError(
                f"folder must have {needed / 2**30:.1f} GiB free for the states of "
                f"{self.num_clients} clients, got {str(folder)!r} with {free / 2**30:.1f}. "
                "Choose another `folder`, or without a folder set TMPDIR."
            )


def _checksums(rows: UInt8[np.ndarray, "S bytes"]) -> UInt32[np.ndarray, "S"]:
    """Return the checksum (CRC-32) of each row."""
    return np.fromiter(map(zlib.crc32, rows), np.uint32, len(rows))
