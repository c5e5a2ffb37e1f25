"""Loops of clients that are vectorised, each a lane, although their lengths differ.

A loop whose bound differs by lane would, once vectorised, carry everything by lane: its index, so that each slice
becomes a gather, and a selection of the whole carry in every pass. With `longest`, all lanes go on until the last one
ends; `hold` keeps what a lane had when it ended, where a pass beyond its end would change it. Of one client, both do
nothing. What a loop begins with goes through `begin`.
"""

import collections

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jaxtyping import Bool, Shaped

from jaxfl.backend import backend
from jaxfl.types import Tree

_ALIKE = 4
"""So many leaves of one shape are updated together on a GPU."""


def begin(tree: Tree) -> Tree:
    """What a loop begins with."""
    # XLA for GPUs would keep the copies by lane for what reads the same later, such as an update's difference.
    return lax.optimization_barrier(tree) if backend().few_kernels else tree


@custom_vmap
def longest(bound: Shaped[Array, ""]) -> Shaped[Array, ""]:
    """A loop's bound, or whether it goes on: the largest of all lanes."""
    return bound


@longest.def_vmap
def _(_size: int, batched: list[bool], bound: Array) -> tuple[Array, bool]:
    return longest(jnp.max(bound, axis=0) if batched[0] else bound), False


@custom_vmap
def hold(active: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    """The new carry of a loop where a lane has not ended, its old one where it has."""
    del active, old
    return new


@hold.def_vmap
def _(size: int, batched: list[Tree], active: Array, new: Tree, old: Tree) -> tuple[Tree, Tree]:
    if not batched[0]:  # no lane has ended
        if backend().few_kernels:
            new = _together(jnp.full(size, active), batched[1], new, old)
        return hold(active, new, old), batched[1]

    def select(active: Array, new: Tree, old: Tree) -> Tree:
        return jax.tree.map(lambda a, b: jnp.where(active, a, b), new, old)

    axes = jax.tree.map(lambda lane: 0 if lane else None, batched)
    return jax.vmap(select, tuple(axes))(active, new, old), jax.tree.map(lambda _: True, batched[1])


def _together(active: Array, batched: Tree, new: Tree, old: Tree) -> Tree:
    """The new carry, where leaves of one shape all read one array: XLA for GPUs then writes them in one kernel."""
    alike = collections.Counter(leaf.shape for leaf in jax.tree.leaves(new))
    active = lax.optimization_barrier(active)

    def select(lane: bool, a: Array, b: Array) -> Array:
        here = active.reshape(-1, *[1] * (a.ndim - 1))
        return jnp.where(here, a, b) if lane and alike[a.shape] >= _ALIKE else a

    return jax.tree.map(select, batched, new, old)
