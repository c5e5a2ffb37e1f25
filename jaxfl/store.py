"""Client states on the host: rows of a memory-mapped file that a kill at any moment leaves whole."""

import contextlib
import pathlib
import shutil
import tempfile

import jax
import numpy as np
from jaxtyping import Int, Shaped, UInt8

from jaxfl.types import Tree

_ROWS = "rows.bin"


class Store:
    """Client states [C, ...] in a file with two places for each row, and `side`, which says in which one it is.

    A row is written to the place that the last checkpoint does not need. So a checkpoint needs no more than `side`, a
    byte per client, and a kill at any moment leaves the last one's rows as they were. Only rows that were written
    since the start take disk space twice.

    Args:
        folder: made if absent; None: a nameless file in the system's temporary folder, one place for each row.
        like: shapes and dtypes of client states [C, ...].
        number: C.

    Raises:
        ValueError: too little space in the folder.
    """

    def __init__(self, folder: pathlib.Path | None, like: Tree, number: int) -> None:
        self.number, self.folder = number, folder
        leaves, structure = jax.tree.flatten(like)
        # A client's row lies in one piece, so that it takes few pages.
        row = np.dtype([(str(i), leaf.dtype, leaf.shape[1:]) for i, leaf in enumerate(leaves)], align=True)
        self.bytes_per_client = row.itemsize
        # An open map outlives its file's name, so that a temporary file needs no cleaning up.
        with contextlib.nullcontext(folder) if folder is not None else tempfile.TemporaryDirectory() as name:
            path = pathlib.Path(name) / _ROWS
            path.parent.mkdir(parents=True, exist_ok=True)
            self.found = path.exists()
            if not self.found:
                self._check_space(path.parent)
            elif path.stat().st_size != 2 * number * row.itemsize:
                raise ValueError(f"folder={str(folder)!r} holds client states of another run: choose another folder")
            mode = "r+" if self.found else "w+"
            self.rows = np.memmap(path, row, mode, shape=(2, number)) if leaves else np.empty((2, number), row)
        self.files = jax.tree.unflatten(structure, [self.rows[str(i)] for i in range(len(leaves))])
        self.side = np.zeros(number, np.uint8)
        self.kept = np.ones(number, np.uint8)  # no checkpoint yet: rows are written to the first place

    def read(self, ids: Int[np.ndarray, "S"], of: Tree = None) -> Tree:
        """Copies of some clients' rows [S, ...], of all files or those `of`."""
        side = self.side[ids]
        return jax.tree.map(lambda leaf: np.asarray(leaf[side, ids]), self.files if of is None else of)

    def write(self, ids: Int[np.ndarray, "S"], rows: Tree) -> None:
        """Replace some clients' rows; each client is named once."""
        side = 1 - self.kept[ids]

        def put(leaf: np.memmap, new: Shaped[np.ndarray, "S ..."]) -> None:
            leaf[side, ids] = new

        jax.tree.map(put, self.files, rows)
        self.side[ids] = side

    def flush(self) -> None:
        """Bring the rows to the disk: before the checkpoint that needs them."""
        if isinstance(self.rows, np.memmap):
            self.rows.flush()

    def commit(self) -> None:
        """From here on keep the rows as they are now: after the checkpoint that needs them."""
        if self.folder is not None:
            self.kept = self.side.copy()

    def restore(self, side: UInt8[np.ndarray, "C"]) -> None:
        """Go back to the rows of a checkpoint; a ValueError where they are gone."""
        if not self.found and self.bytes_per_client:
            assert self.folder is not None
            (self.folder / _ROWS).unlink()  # another call would take these zeros for states
            raise ValueError(
                f"folder={str(self.folder)!r} lacks the client states of its run's checkpoint: put them back, or "
                "delete the run"
            )
        self.side = np.array(side)
        self.commit()

    def states(self) -> Tree:
        """All states [C, ...], mapped and read-only; a row that lies in the second place moves to the first.

        Rows that have changed since the last checkpoint do not move: it may need what they would replace.
        """
        moving = np.flatnonzero(self.side & self.kept)
        for ids in np.array_split(moving, 1 + len(moving) * self.bytes_per_client // 2**25):
            self.rows[0, ids] = self.rows[1, ids]

        def view(leaf: np.memmap) -> np.memmap:
            first = leaf[0]
            first.flags.writeable = False
            return first

        return jax.tree.map(view, self.files)

    def _check_space(self, folder: pathlib.Path) -> None:
        places = 1 if self.folder is None else 2
        needed, free = self.bytes_per_client * self.number * places, shutil.disk_usage(folder).free
        if needed > free:
            raise ValueError(
                f"folder={str(folder)!r} has {free / 2**30:.1f} GiB free, and the states of {self.number} clients need "
                f"{needed / 2**30:.1f}: choose another `folder` (without one: set TMPDIR)"
            )
