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
    """Client states [C, ...] as rows [C, d]: one matrix for each dtype among their leaves, or one for each leaf.

    A chunk's rows are read and written in one step each. Leaves apart are moved whole on a TPU, those of all clients,
    and the two innermost axes of each are padded there; on a CPU to join them takes longer than to keep them apart.
    """

    rows: dict[str, Any]
    structure: Any = dataclasses.field(metadata={"static": True})
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(metadata={"static": True})
    """The matrix and the shape of each leaf of one client."""

    @classmethod
    def of(cls, states: Tree, joined: bool = True) -> "States":
        """Arrays [C, ...]."""
        leaves, structure = jax.tree.flatten(states)
        names = [str(leaf.dtype) if joined else str(i) for i, leaf in enumerate(leaves)]
        shapes = tuple((name, leaf.shape[1:]) for name, leaf in zip(names, leaves, strict=True))
        return cls(_joined(names, leaves, 1), structure, shapes)

    def tree(self) -> Tree:
        """The states [C, ...] again; of rows with further leading axes, with these."""
        return self._split(self.rows)

    def __getitem__(self, slot: Int[Array, "..."] | int) -> Tree:
        return self._split({name: rows[slot] for name, rows in self.rows.items()})

    def put(self, slot: Int[Array, "..."], new: Tree) -> "States":
        """With the states of some clients replaced; a slot beyond the last is no client."""
        joined = _joined([name for name, _ in self.shapes], jax.tree.leaves(new), slot.ndim)
        rows = {
            name: rows.at[slot].set(joined[name], mode="drop") for name, rows in self.rows.items()
        }
        return dataclasses.replace(self, rows=rows)

    def _split(self, rows: dict[str, Any]) -> Tree:
        leaves, begun = [], dict.fromkeys(rows, 0)
        for name, shape in self.shapes:
            own, start = rows[name], begun[name]
            begun[name] = end = start + math.prod(shape)
            leaves.append(own[..., start:end].reshape(*own.shape[:-1], *shape))
        return jax.tree.unflatten(self.structure, leaves)


def _joined(names: list[str], leaves: list[Any], leading: int) -> dict[str, Array]:
    """Leaves with some leading axes as one array of these and a last one, for each name."""
    parts: dict[str, list[Any]] = {}
    for name, leaf in zip(names, leaves, strict=True):
        parts.setdefault(name, []).append(
            leaf.reshape(*leaf.shape[:leading], math.prod(leaf.shape[leading:]))
        )
    return {name: jnp.concatenate(flat, axis=-1) for name, flat in parts.items()}
