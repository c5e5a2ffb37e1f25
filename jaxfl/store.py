"""Client states on the host: rows of memory-mapped files that a kill at any moment leaves whole."""

import contextlib
import math
import pathlib
import shutil
import tempfile

import jax
import numpy as np
from jaxtyping import Int, Shaped, UInt8

from jaxfl.types import Tree


class Store:
    """Client states [C, ...] in files with two places for each row, and `side`, which says in which one it is.

    A row is written to the place that the last checkpoint does not need. So a checkpoint needs no more than `side`, a
    byte per client, and a kill at any moment leaves the last one's rows as they were. Only rows that were written
    since the start take disk space twice.

    Args:
        folder: made if absent; None: nameless files in the system's temporary folder, one place for each row.
        like: shapes and dtypes of client states [C, ...].
        number: C.

    Raises:
        ValueError: too little space in the folder.
    """

    def __init__(self, folder: pathlib.Path | None, like: Tree, number: int) -> None:
        self.number, self.folder = number, folder
        leaves, structure = jax.tree.flatten(like)
        self.bytes_per_client = sum(math.prod(leaf.shape[1:]) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
        # An open map outlives its file's name, so that a temporary file needs no cleaning up.
        with contextlib.nullcontext(folder) if folder is not None else tempfile.TemporaryDirectory() as name:
            place = pathlib.Path(name)
            place.mkdir(parents=True, exist_ok=True)
            paths = [place / f"{i}.bin" for i in range(len(leaves))]
            self.found = all(path.exists() for path in paths)
            if not self.found:
                self._check_space(place)
            self.files = jax.tree.unflatten(
                structure,
                [
                    np.memmap(path, leaf.dtype, "r+" if self.found else "w+", shape=(2, *leaf.shape))
                    for path, leaf in zip(paths, leaves, strict=True)
                ],
            )
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
        for leaf in jax.tree.leaves(self.files):
            leaf.flush()

    def commit(self) -> None:
        """From here on keep the rows as they are now: after the checkpoint that needs them."""
        if self.folder is not None:
            self.kept = self.side.copy()

    def restore(self, side: UInt8[np.ndarray, "C"]) -> None:
        """Go back to the rows of a checkpoint; a ValueError where they are gone."""
        if not self.found:
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
            jax.tree.map(lambda leaf, ids=ids: leaf[0].__setitem__(ids, leaf[1, ids]), self.files)

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
