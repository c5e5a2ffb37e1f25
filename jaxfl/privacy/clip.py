"""Clipping of an update or of an example's gradient by its norm, also with rounding to integers."""

import math

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Int, UInt32

from jaxfl._support.checks import traced
from jaxfl.types import Number, Tree


def clip(update: Tree, bound: Number) -> tuple[Tree, Float[Array, ""]]:
    r"""Scale an update to L2 norm at most C: :math:`v \min(1, C / \|v\|_2)`, and 0 stays 0.

    The norm of a finite update is at most C up to rounding.

    Args:
        update: Any pytree of arrays. The norm is joint over all of its leaves.
        bound: C. Infinity clips nothing.

    Returns:
        The clipped update and its norm before clipping, in single precision whatever the update's
        dtypes.

    >>> clip({"w": jnp.array([3.0, 4.0])}, 1.0)
    ({'w': Array([0.6, 0.8], dtype=float32)}, Array(5., dtype=float32))
    """
    # In half precision a sum of squares stalls, and the clipped update would be too long.
    update = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), update)
    norm = jnp.asarray(optax.tree.norm(update), jnp.float32)
    # This also keeps an infinite update as it is. Its factor, infinity over infinity, is NaN.
    if not traced(bound) and math.isinf(bound):
        return update, norm
    factor = jnp.minimum(1.0, bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda leaf: leaf * factor, update), norm


def round_within(
    update: Tree, norm: Float[Array, ""], scale: Float[Array, ""], radius: Float[Array, ""]
) -> Tree:
    r"""Round `scale` times an update to integers whose L2 norm is at most `radius`.

    The bound holds for every update. Rounding adds about :math:`d / 12` to the squared norm of d
    coordinates, with a standard deviation of about 0.6 radii. A long update is first scaled, so
    that its squared norm leaves room for :math:`d / 12` and four radii. If this does not suffice
    (if all coordinates end in .6, say), its norm is scaled to at most the radius less the worst
    case of rounding, :math:`\sqrt{d} / 2`, or to 0 if that is negative. The norm that decides is
    summed in integers, so that no float summation matters. For a radius above 2^15, the integers
    are shifted to 15 bits and rounded up, so that the sum of their squares fits 32 bits.

    Args:
        update: Finite float32 arrays.
        norm: Approximate norm of the update. The bound holds even if it is a third too small.
        scale: Steps per unit of the update.
        radius: Largest norm in steps, up to 2^30.

    Returns:
        The tree of the update with arrays of int32.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(update))
    half = 0.5 * size**0.5
    # Sums of squares must fit 31 bits. With noise as large as the clip bound, the radius is 2^15,
    # whose square fits without a shift. The factor keeps `frexp` from giving 2^15 the exponent 16.
    shift = jnp.maximum(jnp.frexp(radius * (1 - 2.0**-20))[1] - 15, 0)
    aim = jnp.sqrt(jnp.maximum(radius**2 - size / 12 - 4 * radius, radius**2 / 4))
    # The squares below round up, which lengthens the norm that decides.
    aim -= 1.2 * half * ((1 << shift) - 1)
    length = jnp.maximum(norm * scale, jnp.finfo(jnp.float32).tiny)
    # A short update is not made longer.
    factor = scale * jnp.clip(aim / length, 0.0, 1.0)

    squares = _sum_of_squares(_rounded(update, factor), shift)
    # The factor covers the rounding of conversion and root, which may shorten the length.
    length = jnp.sqrt(squares.astype(jnp.float32))
    length = length * (1 << shift) * (1 + 2.0**-20)
    # Unrounded, the update has at most `length + half` steps. Rounding adds at most `half`.
    shorter = factor * (1 - 2.0**-20) * jnp.maximum(radius - half, 0.0) / (length + half)
    return _rounded(update, jnp.where(length <= radius, factor, shorter))


def _rounded(update: Tree, factor: Float[Array, ""]) -> Tree:
    """Return `factor` times the update, with each coordinate rounded to an integer."""
    return jax.tree.map(lambda leaf: jnp.round(leaf * factor).astype(jnp.int32), update)


def _sum_of_squares(integers: Tree, shift: Int[Array, ""]) -> UInt32[Array, ""]:
    """Return the sum of the squares of integers, which are shifted and rounded up first."""

    def square(leaf: Array) -> UInt32[Array, ""]:
        short = ((jnp.abs(leaf) + (1 << shift) - 1) >> shift).astype(jnp.uint32)
        axes = tuple(range(leaf.ndim - 1))
        columns = jnp.sum(short**2, axis=axes, dtype=jnp.uint32)
        # Two sums are faster than one on a CPU. The barrier keeps XLA from merging them.
        return jnp.sum(lax.optimization_barrier(columns), dtype=jnp.uint32)

    return sum((square(leaf) for leaf in jax.tree.leaves(integers)), jnp.uint32(0))
