"""Masks of coordinates that are personal or shared, kept or dropped."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Bool, Float, Int, Key

from jaxfl._support.checks import traced
from jaxfl.types import Number, Params, Tree


def fisher_mask(fisher: Tree, threshold: Number) -> Tree:
    r"""Return the personal coordinates :math:`M_1 = [\hat F \ge \tau]` (FedDPA, eq. 6).

    The argument `fisher` is a Fisher diagonal, normalised by layer.

    >>> fisher_mask({"w": jnp.array([0.0, 0.25, 1.0])}, 0.4)
    {'w': Array([False, False,  True], dtype=bool)}
    """
    return jax.tree.map(lambda f: f >= threshold, fisher)


def merge(mask: Tree, inside: Tree, outside: Tree) -> Tree:
    r"""Return :math:`M \odot a + (1 - M) \odot b` of `inside` a and `outside` b, bit for bit."""
    return jax.tree.map(jnp.where, mask, inside, outside)


def keep(mask: Tree, tree: Tree) -> Tree:
    r"""Return :math:`M \odot a` for `tree` a. It is exactly 0 off the mask, even where a is NaN."""
    return jax.tree.map(lambda m, leaf: jnp.where(m, leaf, 0), mask, tree)


def sparsify(mask: Tree, sent: Tree) -> Tree:
    r"""Return :math:`M \odot a` for `sent` a, or NaN everywhere if the sum of a is not finite.

    The engine drops a client whose update is not finite. A mask might otherwise cut exactly the
    coordinates that are not finite.
    """
    # One sum suffices, because NaN and infinity persist in sums.
    lost = ~jnp.isfinite(optax.tree.sum(sent))
    return jax.tree.map(lambda leaf: jnp.where(lost, jnp.nan, leaf), keep(mask, sent))


def top_k_mask(values: Float[Array, "*S"], count: int | Array) -> Bool[Array, "*S"]:
    """Return the mask of exactly `count` entries of largest magnitude. Ties go to the lower index.

    The search finds a threshold that `count` magnitudes reach, or with ties the largest that at
    least `count` reach. Then it finds the position up to which ties are kept. It takes about a
    dozen passes over the values, of which there may be 2^24 at most.

    >>> top_k_mask(jnp.array([0.1, -0.5, 0.3, 0.2]), 2)
    Array([False,  True,  True, False], dtype=bool)
    """
    # The bits of floats from 0 up, read as integers, have the order of the floats.
    bits = lax.bitcast_convert_type(jnp.abs(values).astype(jnp.float32), jnp.int32).ravel()
    threshold, number = _threshold(bits, count)
    ties = bits == threshold
    position = jnp.arange(bits.size)
    room = count - _number_of(bits > threshold)
    length = bits.size.bit_length()

    def raise_bit(i: Array, end: Array) -> Array:
        # The position is found bit by bit, from the highest.
        further = end | (1 << (length - 1 - i))
        return jnp.where(_number_of(ties & (position < further)) <= room, further, end)

    tied = number > count
    # Without too many ties no bit is searched, and all of them are kept.
    steps = jnp.where(tied, length, 0)
    start = jnp.where(tied, 0, bits.size)
    end = lax.fori_loop(0, steps, raise_bit, start)
    return ((bits > threshold) | (ties & (position < end))).reshape(values.shape)


class _Search(NamedTuple):
    """State of the search for a threshold that `count` values reach."""

    low: Int[Array, ""]
    """Lower end of the interval, which at least `count` values reach."""
    high: Int[Array, ""]
    """Upper end of the interval, which fewer than `count` values reach."""
    over: Float[Array, ""]
    """By how much more values than `count` reach `low`."""
    under: Float[Array, ""]
    """By how much fewer values than `count` reach `high`."""
    last: Bool[Array, ""]
    """Whether at least `count` values reached the last guess."""
    stays: Float[Array, ""]
    """Factor of the end of the interval that stayed at the last guess."""
    turn: Int[Array, ""] | int


def _threshold(
    bits: Int[Array, "D"], count: int | Array
) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """Return a threshold of bits that `count` values reach, and the number of values that reach it.

    If ties prevent that, it is the largest threshold that at least `count` values reach. The search
    is regula falsi (Illinois) on the bits, which are ordered like the magnitudes and spread like
    their logarithms. Every fourth step halves the interval.
    """

    def searching(state: _Search) -> Bool[Array, ""]:
        return (state.over > 0) & (state.high - state.low > 1)

    over = jnp.asarray(bits.size - count, jnp.float32)
    under = jnp.asarray(count, jnp.float32)
    low = jnp.int32(0)
    high = jnp.max(bits) + 1
    # All values reach `low`, and none reaches `high`.
    start = _Search(low, high, over, under, jnp.bool(True), jnp.float32(1), 0)
    found = lax.while_loop(searching, functools.partial(_narrowed, bits, count), start)
    return found.low, found.over + count


def _narrowed(bits: Int[Array, "D"], count: int | Array, state: _Search) -> _Search:
    """Return the search after one more guess."""
    low, high, over, under, last, stays, turn = state
    # An end of the interval that stays counts less in the next guess.
    over_weight = jnp.where(last, over, over * stays)
    under_weight = jnp.where(last, under * stays, under)
    share = over_weight / (over_weight + under_weight)
    guess = jnp.where(turn % 4 == 3, 0.5, share) * (high - low).astype(jnp.float32)
    # A guess strictly inside narrows the interval in every pass.
    middle = low + jnp.clip(guess.astype(jnp.int32), 1, high - low - 1)
    excess = _number_of(bits >= middle) - count
    reached = excess >= 0
    return _Search(
        low=jnp.where(reached, middle, low),
        high=jnp.where(reached, high, middle),
        over=jnp.where(reached, excess, over),
        under=jnp.where(reached, under, -excess),
        last=reached,
        stays=jnp.where(reached == last, stays / 2, 1.0),
        turn=turn + 1,
    )


def _number_of(mask: Bool[Array, "D"]) -> Float[Array, ""]:
    # Single precision is exact up to 2^24, and its sum takes half the time of an integer sum.
    return jnp.sum(mask.astype(jnp.float32))


def top_k_masks(params: Params, layers: Iterable[str], density: Number) -> Tree:
    """Return masks that keep the largest weights of each kernel, and keep all other parameters.

    A kernel is a parameter of `layers` with two axes or more.

    Args:
        params: Weights by layer.
        layers: Names of the layers to sparsify.
        density: Share S of a kernel's n weights that is kept: max(1, ceil(S n)) of them.
    """
    return _by_kernel(lambda kernel, kept, _: top_k_mask(kernel, kept), params, layers, density)


def random_masks(
    key: Key[Array, ""], params: Params, layers: Iterable[str], density: Number
) -> Tree:
    """Return masks that keep as many weights as those of `top_k_masks`, drawn at random.

    Args:
        key: Key of the draw.
        params: Weights by layer.
        layers: Names of the layers to sparsify.
        density: Share S of a kernel's n weights that is kept: max(1, ceil(S n)) of them.
    """

    def select(kernel: Array, count: int | Array, leaf_index: int) -> Array:
        # The largest of independent uniform numbers lie at uniformly random places.
        drawn = jax.random.uniform(jax.random.fold_in(key, leaf_index), kernel.shape)
        return top_k_mask(drawn, count)

    return _by_kernel(select, params, layers, density)


def number_sent(params: Params, layers: Iterable[str], density: Number) -> Number:
    """Return how many coordinates the masks of `top_k_masks` and `random_masks` keep.

    >>> number_sent({"head": {"kernel": jnp.zeros((4, 5)), "bias": jnp.zeros(5)}}, ["head"], 0.1)
    7
    """
    sparse = frozenset(layers)
    total: Number = 0
    for path, leaf in jax.tree.leaves_with_path(params):
        count: int | Array = leaf.size
        if _is_kernel(path, leaf, sparse):
            count = _count_of(density, leaf.size)
        total = total + count
    return total


def top_percentile_mask(values: Tree, percentile: Number) -> Tree:
    """Return the mask of entries above a percentile of all magnitudes, over all tensors together.

    The percentile is interpolated between the two nearest magnitudes. If n magnitudes are distinct,
    n - 1 - floor((n - 1) percentile / 100) of them are above it. Ties go to the lower index.

    >>> top_percentile_mask({"a": jnp.arange(5.0), "b": jnp.arange(5.0, 10.0)}, 80.0)["b"]
    Array([False, False, False,  True,  True], dtype=bool)
    """
    flat, unravel = ravel_pytree(values)
    # Rounding may make a whole number a little too small, and more so in single precision.
    if traced(percentile):
        position = (flat.size - 1) * percentile / 100
        below = jnp.floor(position * (1 + 3e-7)).astype(jnp.int32)
    else:
        below = math.floor((flat.size - 1) * percentile / 100 + 1e-9)
    mask = top_k_mask(flat, flat.size - 1 - below)
    # `unravel` asks for the dtype of the flat values, so the mask passes through it as numbers.
    return jax.tree.map(lambda leaf: leaf > 0, unravel(mask.astype(flat.dtype)))


def _by_kernel(
    select: Callable[[Array, int | Array, int], Array],
    params: Params,
    layers: Iterable[str],
    density: Number,
) -> Tree:
    """Return masks of all parameters: by `select` for kernels of the layers, and True elsewhere.

    The arguments of `select` are a kernel, the number of weights to keep, and the kernel's index
    among the leaves of `params`.
    """
    sparse = frozenset(layers)
    masks = []
    for leaf_index, (path, leaf) in enumerate(jax.tree.leaves_with_path(params)):
        if _is_kernel(path, leaf, sparse):
            masks.append(select(leaf, _count_of(density, leaf.size), leaf_index))
        else:
            masks.append(jnp.ones(leaf.shape, bool))
    return jax.tree.unflatten(jax.tree.structure(params), masks)


def _is_kernel(path: tuple[Any, ...], leaf: Any, layers: frozenset[str]) -> bool:
    """Return whether a parameter belongs to one of `layers`, and has two axes or more."""
    return path[0].key in layers and leaf.ndim >= 2


def _count_of(density: Number, size: int) -> int | Array:
    """Return max(1, ceil(S n)), without a further weight for a rounding error of S n."""
    # For instance, 0.7 * 10 is 7.000000000000001.
    if traced(density):
        return jnp.maximum(1, jnp.ceil(density * size * (1 - 1e-6))).astype(jnp.int32)
    return max(1, math.ceil(density * size - 1e-9))
