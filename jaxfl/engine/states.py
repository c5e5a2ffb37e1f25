"""Client states as devices hold them: a row of numbers for each client."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from jaxfl.types import Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class States:
    """Client states [C, ...] as rows [C, d], one matrix for each dtype among their leaves.

    A chunk's rows are read and written in one step each. Leaves apart are moved whole on a TPU, those of all clients,
    and the two innermost axes of each are padded there.
    """

    rows: dict[str, Any]
    structure: Any = dataclasses.field(metadata={"static": True})
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(metadata={"static": True})
    """Dtype and shape of each leaf of one client."""

    @classmethod
    def of(cls, states: Tree) -> "States":
        """Arrays [C, ...]."""
        leaves, structure = jax.tree.flatten(states)
        return cls(_joined(leaves, 1), structure, tuple((str(leaf.dtype), leaf.shape[1:]) for leaf in leaves))

    def tree(self) -> Tree:
        """The states [C, ...] again; of rows with further leading axes, with these."""
        return self._split(self.rows)

    def __getitem__(self, slot: Int[Array, "..."] | int) -> Tree:
        return self._split({dtype: rows[slot] for dtype, rows in self.rows.items()})

    def put(self, slot: Int[Array, "..."], new: Tree) -> "States":
        """With the states of some clients replaced; a slot beyond the last is no client."""
        joined = _joined(jax.tree.leaves(new), slot.ndim)
        rows = {dtype: rows.at[slot].set(joined[dtype], mode="drop") for dtype, rows in self.rows.items()}
        return dataclasses.replace(self, rows=rows)

    def _split(self, rows: dict[str, Any]) -> Tree:
        leaves, begun = [], dict.fromkeys(rows, 0)
        for dtype, shape in self.shapes:
            own, start = rows[dtype], begun[dtype]
            begun[dtype] = end = start + math.prod(shape)
            leaves.append(own[..., start:end].reshape(*own.shape[:-1], *shape))
        return jax.tree.unflatten(self.structure, leaves)


def _joined(leaves: list[Any], leading: int) -> dict[str, Array]:
    """Leaves with some leading axes as one array of these and a last one, for each dtype."""
    by_dtype: dict[str, list[Any]] = {}
    for leaf in leaves:
        flat = leaf.reshape(*leaf.shape[:leading], math.prod(leaf.shape[leading:]))
        by_dtype.setdefault(str(leaf.dtype), []).append(flat)
    return {dtype: jnp.concatenate(flat, axis=-1) for dtype, flat in by_dtype.items()}
