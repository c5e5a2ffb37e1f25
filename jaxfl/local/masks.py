"""Masks of coordinates: personal or shared, kept or dropped."""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float, Int, Key

from jaxfl._validate import traced
from jaxfl.types import Number, Params, Tree


def fisher_mask(fisher: Tree, threshold: Number) -> Tree:
    r"""Personal coordinates :math:`M_1 = [\hat F \ge \tau]` of a per-layer normalised Fisher diagonal (FedDPA, eq. 6).

    >>> fisher_mask({"w": jnp.array([0.0, 0.25, 1.0])}, 0.4)
    {'w': Array([False, False,  True], dtype=bool)}
    """
    return jax.tree.map(lambda f: f >= threshold, fisher)


def merge(mask: Tree, inside: Tree, outside: Tree) -> Tree:
    r""":math:`M \odot a + (1 - M) \odot b`, without arithmetic on either."""
    return jax.tree.map(jnp.where, mask, inside, outside)


def keep(mask: Tree, tree: Tree) -> Tree:
    r""":math:`M \odot a`, exactly 0 outside whatever the values there."""
    return jax.tree.map(lambda m, leaf: jnp.where(m, leaf, 0), mask, tree)


def sparsify(mask: Tree, sent: Tree) -> Tree:
    r""":math:`M \odot a` of what a client sends; all NaN where `a` is not finite.

    The engine drops a client whose update is not finite, and a mask may cut just the coordinates that show it.
    """
    lost = ~jnp.isfinite(optax.tree.sum(sent))
    return jax.tree.map(lambda leaf: jnp.where(lost, jnp.nan, leaf), keep(mask, sent))


def top_k_mask(values: Float[Array, "*S"], count: int | Array) -> Bool[Array, "*S"]:
    """Exactly `count` entries of largest magnitude; ties go to the lower index. For up to 2^24 values.

    The search finds a threshold that `count` magnitudes reach, or with ties the largest that at least `count` reach;
    then the position up to which ties are kept. It takes about a dozen passes over the values.

    >>> top_k_mask(jnp.array([0.1, -0.5, 0.3, 0.2]), 2)
    Array([False,  True,  True, False], dtype=bool)
    """
    bits = lax.bitcast_convert_type(jnp.abs(values).astype(jnp.float32), jnp.int32).ravel()
    threshold, number = _threshold(bits, count)
    ties, position = bits == threshold, jnp.arange(bits.size)
    room = count - _number_of(bits > threshold)
    length = bits.size.bit_length()

    def raise_bit(i: Array, end: Array) -> Array:
        further = end | (1 << (length - 1 - i))
        return jnp.where(_number_of(ties & (position < further)) <= room, further, end)

    tied = number > count
    end = lax.fori_loop(0, jnp.where(tied, length, 0), raise_bit, jnp.where(tied, 0, bits.size))
    return ((bits > threshold) | (ties & (position < end))).reshape(values.shape)


def _threshold(
    bits: Int[Array, "D"], count: int | Array
) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """Bits that `count` values reach, or the largest that at least `count` reach, and how many do.

    By regula falsi (Illinois) on the bits, which are ordered like the magnitudes and spread like their logarithms;
    every fourth step halves the interval.
    """

    def searching(state: tuple) -> Bool[Array, ""]:
        low, high, over, *_ = state
        return (over > 0) & (high - low > 1)

    def narrow(state: tuple) -> tuple:
        # By how much the number of values that reach `low` exceeds `count`, and that of `high` falls short; and whether
        # the last guess was reached.
        low, high, over, under, last, stays, turn = state
        over_, under_ = jnp.where(last, over, over * stays), jnp.where(last, under * stays, under)
        share = over_ / (over_ + under_)
        guess = jnp.where(turn % 4 == 3, 0.5, share) * (high - low).astype(jnp.float32)
        middle = low + jnp.clip(guess.astype(jnp.int32), 1, high - low - 1)
        excess = _number_of(bits >= middle) - count
        reached = excess >= 0
        low, high = jnp.where(reached, middle, low), jnp.where(reached, high, middle)
        over, under = jnp.where(reached, excess, over), jnp.where(reached, under, -excess)
        stays = jnp.where(reached == last, stays / 2, 1.0)  # an end that stays counts less
        return low, high, over, under, reached, stays, turn + 1

    over, under = jnp.asarray(bits.size - count, jnp.float32), jnp.asarray(count, jnp.float32)
    start = (jnp.int32(0), jnp.max(bits) + 1, over, under, jnp.bool(True), jnp.float32(1), 0)
    low, _, over, *_ = lax.while_loop(searching, narrow, start)
    return low, over + count


def _number_of(mask: Bool[Array, "D"]) -> Float[Array, ""]:
    return jnp.sum(mask.astype(jnp.float32))  # whole up to 2^24, and twice as fast as whole numbers


def top_k_masks(params: Params, layers: Iterable[str], density: Number) -> Tree:
    """Layerwise top-k: each kernel (two axes or more) of `layers` keeps its largest weights; the rest is kept whole.

    Args:
        params: weights by layer.
        layers: names of the layers to sparsify.
        density: share S that is kept: max(1, ceil(S n)) of a kernel's n weights.
    """
    return _by_kernel(lambda kernel, kept, _: top_k_mask(kernel, kept), params, layers, density)


def random_masks(
    key: Key[Array, ""], params: Params, layers: Iterable[str], density: Number
) -> Tree:
    """As `top_k_masks`, with random weights in place of the largest."""

    def select(kernel: Array, kept: int | Array, number: int) -> Array:
        return top_k_mask(jax.random.uniform(jax.random.fold_in(key, number), kernel.shape), kept)

    return _by_kernel(select, params, layers, density)


def top_percentile_mask(values: Tree, percentile: Number) -> Tree:
    """Entries above a percentile of all magnitudes, over all tensors together; ties as in `top_k_mask`.

    The percentile is interpolated between the two nearest magnitudes, so that of n distinct ones
    n - 1 - floor((n - 1) percentile / 100) are above it.

    >>> top_percentile_mask({"a": jnp.arange(5.0), "b": jnp.arange(5.0, 10.0)}, 80.0)["b"]
    Array([False, False, False,  True,  True], dtype=bool)
    """
    flat, unravel = ravel_pytree(values)
    if traced(percentile):  # single precision, where a whole number may come out a little too small
        below = jnp.floor((flat.size - 1) * percentile / 100 * (1 + 3e-7)).astype(jnp.int32)
    else:
        below = math.floor((flat.size - 1) * percentile / 100 + 1e-9)
    mask = top_k_mask(flat, flat.size - 1 - below)
    return jax.tree.map(lambda leaf: leaf > 0, unravel(mask.astype(flat.dtype)))


def _by_kernel(
    select: Callable[[Array, int | Array, int], Array],
    params: Params,
    layers: Iterable[str],
    density: Number,
) -> Tree:
    sparse, leaves = frozenset(layers), jax.tree.leaves_with_path(params)
    masks = []
    for number, (path, leaf) in enumerate(leaves):
        if path[0].key in sparse and leaf.ndim >= 2:
            masks.append(select(leaf, _kept(density, leaf.size), number))
        else:
            masks.append(jnp.ones(leaf.shape, bool))
    return jax.tree.unflatten(jax.tree.structure(params), masks)


def _kept(density: Number, size: int) -> int | Array:
    """max(1, ceil(S n)), where a rounding error of S n adds no weight: 0.7 * 10 is 7.000000000000001."""
    if traced(density):
        return jnp.maximum(1, jnp.ceil(density * size * (1 - 1e-6))).astype(jnp.int32)
    return max(1, math.ceil(density * size - 1e-9))
