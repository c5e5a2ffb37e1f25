"""Loops of vectorised clients, called lanes here, whose lengths differ.

A vectorised loop whose bound differs by lane has an index for each lane, so that each slice becomes
a gather. It also selects between the old and the new carry in every pass. With `longest`, all lanes
run until the last one ends. Where a further pass would change a lane's result, `hold` keeps the
carry with which the lane ended. Both leave a loop of a single client unchanged. Wrap a loop's
initial carry in `begin`.
"""

import collections

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jaxtyping import Bool, Shaped

from jaxfl._support.backend import backend
from jaxfl.types import Tree

_LEAST_LEAVES = 4
"""Least number of leaves of one shape that are updated together on a GPU."""


def begin(tree: Tree) -> Tree:
    """Return a loop's initial carry, behind an optimisation barrier on GPUs."""
    # XLA for GPUs would otherwise keep copies by lane for later readers of the same values, such as
    # the difference that becomes an update.
    if backend().few_kernels:
        return lax.optimization_barrier(tree)
    return tree


def zeros_of(shapes: Tree, *leading: int) -> Tree:
    """Return zeros of these shapes and dtypes, with further leading axes, as a loop's carry."""
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), shapes)


@custom_vmap
def longest(bound: Shaped[Array, ""]) -> Shaped[Array, ""]:
    """Return the largest value of all lanes, for a loop's bound or for its condition.

    Outside of `jax.vmap` it is the value itself.
    """
    return bound


@longest.def_vmap
def _(_size: int, batched: list[bool], bound: Array) -> tuple[Array, bool]:
    if batched[0]:
        bound = jnp.max(bound, axis=0)
    # An outer `vmap`, such as that of a sweep's points, takes the largest value again.
    return longest(bound), False


@custom_vmap
def hold(active: Bool[Array, ""], new: Tree, old: Tree) -> Tree:
    """Return a loop's new carry for a lane that is still active, and its old one otherwise.

    Outside of `jax.vmap` it is always the new carry, because the loop's bound ends the loop.
    """
    del active, old
    return new


@hold.def_vmap
def _(size: int, batched: list[Tree], active: Array, new: Tree, old: Tree) -> tuple[Tree, Tree]:
    # The lanes share `active` if all of them have equally many steps.
    if not batched[0]:
        if backend().few_kernels:
            new = _together(jnp.full(size, active), batched[1], new, old)
        return hold(active, new, old), batched[1]

    def select(active: Array, new: Tree, old: Tree) -> Tree:
        return jax.tree.map(lambda a, b: jnp.where(active, a, b), new, old)

    axes = jax.tree.map(lambda lane: 0 if lane else None, batched)
    held = jax.vmap(select, tuple(axes))(active, new, old)
    # After a selection by lane, every leaf differs by lane.
    return held, jax.tree.map(lambda _: True, batched[1])


def _together(active: Array, batched: Tree, new: Tree, old: Tree) -> Tree:
    """Return the new carry, where leaves of a frequent shape select new or old by `active`.

    XLA for GPUs then writes all leaves of that shape in one kernel.
    """
    leaves_of_shape = collections.Counter(leaf.shape for leaf in jax.tree.leaves(new))
    active = lax.optimization_barrier(active)

    def select(lane: bool, a: Array, b: Array) -> Array:
        here = active.reshape(-1, *[1] * (a.ndim - 1))
        if lane and leaves_of_shape[a.shape] >= _LEAST_LEAVES:
            return jnp.where(here, a, b)
        return a

    return jax.tree.map(select, batched, new, old)
