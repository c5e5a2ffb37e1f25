"""Which coordinates are personal and which are shared, and which are kept."""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Key

from jaxfl.types import Params, Tree


def fisher_mask(fisher: Tree, threshold: float) -> Tree:
    r"""Personal coordinates :math:`M_1 = [\hat F \ge \tau]` of a per-layer normalised Fisher diagonal (FedDPA, eq. 6).

    >>> fisher_mask({"w": jnp.array([0.0, 0.25, 1.0])}, 0.4)
    {'w': Array([False, False,  True], dtype=bool)}
    """
    return jax.tree.map(lambda f: f >= threshold, fisher)


def merge(mask: Tree, inside: Tree, outside: Tree) -> Tree:
    r""":math:`M \odot a + (1 - M) \odot b`, without arithmetic on either."""
    return jax.tree.map(jnp.where, mask, inside, outside)


def keep(mask: Tree, tree: Tree) -> Tree:
    r""":math:`M \odot a`, and exactly 0 outside whatever stands there."""
    return jax.tree.map(lambda m, leaf: jnp.where(m, leaf, 0), mask, tree)


def top_k_mask(values: Float[Array, "*S"], count: int) -> Bool[Array, "*S"]:
    """Exactly `count` entries of largest magnitude; ties go to the lower index. For up to 2^24 values.

    The count-th largest magnitude is found bit by bit, since floats that are not negative are ordered like their bits;
    then the place up to which ties are kept. For many values that is at least twice as fast as `lax.top_k` on a CPU.

    >>> top_k_mask(jnp.array([0.1, -0.5, 0.3, 0.2]), 2)
    Array([False,  True,  True, False], dtype=bool)
    """
    bits = lax.bitcast_convert_type(jnp.abs(values).astype(jnp.float32), jnp.int32).ravel()
    threshold = _largest(31, lambda t: _number_of(bits >= t) >= count)
    ties, place = bits == threshold, jnp.arange(bits.size)
    room = count - _number_of(bits > threshold)
    end = _largest(bits.size.bit_length(), lambda end: _number_of(ties & (place < end)) <= room)
    return ((bits > threshold) | (ties & (place < end))).reshape(values.shape)


def _largest(bits: int, holds: Callable[[Array], Array]) -> Int[Array, ""]:
    """Largest whole number of so many bits for which a falling condition holds."""

    def raise_bit(i: Array, number: Array) -> Array:
        higher = number | (1 << (bits - 1 - i))
        return jnp.where(holds(higher), higher, number)

    return lax.fori_loop(0, bits, raise_bit, jnp.zeros((), jnp.int32))


def _number_of(mask: Bool[Array, "D"]) -> Float[Array, ""]:
    return jnp.sum(mask.astype(jnp.float32))  # whole up to 2^24, and twice as fast as whole numbers


def top_k_masks(params: Params, layers: Iterable[str], density: float) -> Tree:
    """Layerwise top-k: each kernel (two axes or more) of `layers` keeps its largest weights, all else is kept.

    Args:
        params: weights by layer.
        layers: names of the layers to sparsify.
        density: share S that is kept: max(1, ceil(S n)) of a kernel's n weights.
    """
    return _by_kernel(lambda kernel, kept, _: top_k_mask(kernel, kept), params, layers, density)


def random_masks(key: Key[Array, ""], params: Params, layers: Iterable[str], density: float) -> Tree:
    """As `top_k_masks`, of random weights in place of the largest."""

    def select(kernel: Array, kept: int, number: int) -> Array:
        return top_k_mask(jax.random.uniform(jax.random.fold_in(key, number), kernel.shape), kept)

    return _by_kernel(select, params, layers, density)


def _by_kernel(
    select: Callable[[Array, int, int], Array], params: Params, layers: Iterable[str], density: float
) -> Tree:
    sparse, leaves = frozenset(layers), jax.tree.leaves_with_path(params)
    masks = []
    for number, (path, leaf) in enumerate(leaves):
        if path[0].key in sparse and leaf.ndim >= 2:
            kept = max(1, math.ceil(density * leaf.size - 1e-9))  # 0.7 * 10 is 7.000000000000001
            masks.append(select(leaf, kept, number))
        else:
            masks.append(jnp.ones(leaf.shape, bool))
    return jax.tree.unflatten(jax.tree.structure(params), masks)
