"""Clipping: one norm over the whole update, also where it is rounded to whole numbers."""

import math

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, UInt32

from jaxfl._validate import traced
from jaxfl.types import Number, Tree


def clip(update: Tree, bound: Number) -> tuple[Tree, Float[Array, ""]]:
    r"""Scale an update to L2 norm at most C: :math:`v \min(1, C / \|v\|_2)`, and 0 stays 0.

    Args:
        update: any pytree; the norm is joint over all of it.
        bound: C; infinity leaves the update as it is.

    Returns:
        The clipped update and its norm before clipping, in single precision whatever the update's dtypes.

    >>> clip({"w": jnp.array([3.0, 4.0])}, 1.0)
    ({'w': Array([0.6, 0.8], dtype=float32)}, Array(5., dtype=float32))
    """
    update = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), update)
    norm = jnp.asarray(optax.tree.norm(update), jnp.float32)
    if not traced(bound) and math.isinf(bound):
        return update, norm
    factor = jnp.minimum(1.0, bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda leaf: leaf * factor, update), norm


def round_within(update: Tree, norm: Float[Array, ""], scale: Float[Array, ""], radius: Float[Array, ""]) -> Tree:
    r"""Round `scale` times an update to whole numbers whose L2 norm is at most `radius`, whatever the update.

    Rounding adds :math:`d / 12` to the squared norm of d coordinates, give or take a radius. An update that would come
    out longer is scaled to what leaves room for that; where this is not enough (all coordinates end in .6, say), it is
    scaled down by 2^-12, 2^-11, and so on. The norm is checked afterwards, in whole numbers that are cut to 16 bits,
    rounded up, and whose squares so fit 32: nothing rests on how a sum is rounded.

    Args:
        update: finite float32 arrays.
        norm: of the update, about; the bound holds all the same if it is wrong by a half.
        scale: steps per unit of the update.
        radius: in steps, up to 2^30.

    Returns:
        int32 arrays.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(update))
    shift = jnp.maximum(jnp.frexp(radius)[1] - 15, 0)
    aim = jnp.sqrt(jnp.maximum(radius**2 - size / 12 - 4 * radius, radius**2 / 4))
    aim -= 0.6 * size**0.5 * ((1 << shift) - 1)  # rounding up
    most = scale * jnp.clip(aim / jnp.maximum(norm * scale, jnp.finfo(jnp.float32).tiny), 0.0, 1.0)
    bound = jnp.floor((radius * 0.5**shift) ** 2 * (1 - 2.0**-20)).astype(jnp.uint32)

    def rounded(cut: Float[Array, ""]) -> Tree:
        factor = jnp.where(cut < 1, most * (1 - cut), 0.0)
        return jax.tree.map(lambda leaf: jnp.round(leaf * factor).astype(jnp.int32), update)

    def square(leaf: Array) -> UInt32[Array, ""]:
        short = ((jnp.abs(leaf) + (1 << shift) - 1) >> shift).astype(jnp.uint32)
        columns = jnp.sum(short**2, axis=tuple(range(leaf.ndim - 1)), dtype=jnp.uint32)
        return jnp.sum(lax.optimization_barrier(columns), dtype=jnp.uint32)  # faster than one sum, on a CPU

    def too_long(cut: Float[Array, ""]) -> Array:
        return sum((square(leaf) for leaf in jax.tree.leaves(rounded(cut))), jnp.uint32(0)) > bound

    return rounded(lax.while_loop(too_long, lambda cut: jnp.maximum(2 * cut, 2.0**-12), jnp.zeros(())))
