"""Client states as devices hold them, packed into a row of numbers for each client."""

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
    """Client states [C, ...] as rows [C, d].

    There is one matrix of rows for each dtype among the leaves, or one for each leaf. With a matrix
    for each dtype, a chunk's rows are read and written in one step. A TPU needs this, because it
    would move each leaf of all clients, and pad its two innermost axes. On a CPU, packing the
    leaves takes longer than it saves.
    """

    rows: dict[str, Any]
    """Matrices by name: a dtype, or the position of a leaf."""
    structure: Any = dataclasses.field(metadata={"static": True})
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(metadata={"static": True})
    """For each leaf, the name of its matrix and its shape for one client."""

    @classmethod
    def of(cls, states: Tree, joined: bool = True) -> "States":
        """Pack client states into rows.

        Args:
            states: Arrays [C, ...].
            joined: Whether leaves of one dtype share a matrix.
        """
        leaves, structure = jax.tree.flatten(states)
        names = [str(i) for i in range(len(leaves))]
        if joined:
            names = [str(leaf.dtype) for leaf in leaves]
        shapes = tuple((name, leaf.shape[1:]) for name, leaf in zip(names, leaves, strict=True))
        return cls(_joined_leaves(names, leaves, 1), structure, shapes)

    def tree(self) -> Tree:
        """Return the states [C, ...], unpacked. Leading axes before C stay."""
        return self._split(self.rows)

    def __getitem__(self, slot: Int[Array, "..."] | int) -> Tree:
        return self._split({name: rows[slot] for name, rows in self.rows.items()})

    def put(self, slot: Int[Array, "..."], new: Tree) -> "States":
        """Return all states, with the new states `[*slot, ...]` of the clients at `slot`.

        Slots of C or more are padding, whose states are dropped.
        """
        names = [name for name, _ in self.shapes]
        joined = _joined_leaves(names, jax.tree.leaves(new), slot.ndim)
        rows = {
            name: rows.at[slot].set(joined[name], mode="drop") for name, rows in self.rows.items()
        }
        return dataclasses.replace(self, rows=rows)

    def _split(self, rows: dict[str, Any]) -> Tree:
        """Return the tree of states that some rows [..., d] hold."""
        leaves = []
        starts = dict.fromkeys(rows, 0)
        for name, shape in self.shapes:
            own = rows[name]
            start = starts[name]
            # Leaves lie in the rows of their matrix in the order of the tree.
            end = start + math.prod(shape)
            starts[name] = end
            leaves.append(own[..., start:end].reshape(*own.shape[:-1], *shape))
        return jax.tree.unflatten(self.structure, leaves)


def _joined_leaves(names: list[str], leaves: list[Any], leading: int) -> dict[str, Array]:
    """Return one array for each name, with some leading axes and one axis for all numbers.

    Args:
        names: Name of the array that each leaf becomes part of.
        leaves: The arrays to join.
        leading: Number of leading axes of the leaves that stay as they are.
    """
    parts: dict[str, list[Any]] = {}
    for name, leaf in zip(names, leaves, strict=True):
        # The length is given, because `reshape` cannot infer it if there are 0 clients.
        flat = leaf.reshape(*leaf.shape[:leading], math.prod(leaf.shape[leading:]))
        parts.setdefault(name, []).append(flat)
    return {name: jnp.concatenate(part, axis=-1) for name, part in parts.items()}
