"""Noise keys, and Gaussian noise shaped like an update: in single precision, or exact on a grid.

A key is a JAX key, or a pair whose streams are XORed: 128 secret bits.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.random import threefry2x32_p
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int, Key, UInt32

from jaxfl.types import Tree

SAMPLE, CLIENT, CLIENT_NOISE, SERVER_NOISE, RELEASE, CANARY, PRIVATE_STEPS = range(7)
"""Purposes of randomness: keys are derived by round, then purpose, then client, and nothing else."""

STEPS = 2**15
"""Std of the noise on a grid, in steps."""
_TAIL = 10.6
"""In stds: steps beyond have a probability below 2^-95."""


def derive(key: Key[Array, "*S"], *numbers: Int[Array, ""] | int) -> Key[Array, "*S"]:
    """Fold numbers such as round, purpose and client into a key; a pair yields a pair."""
    for number in numbers:
        key = (
            jax.vmap(jax.random.fold_in, (0, None))(key, number)
            if key.ndim
            else jax.random.fold_in(key, number)
        )
    return key


def random_bits(key: Key[Array, "*S"], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """32 random bits per entry; a key pair's are predictable only from both keys."""
    if not key.ndim:
        return jax.random.bits(key, shape, jnp.uint32)
    return jax.random.bits(key[0], shape, jnp.uint32) ^ jax.random.bits(key[1], shape, jnp.uint32)


def random_pairs(key: Key[Array, "*S"], count: int) -> UInt32[Array, "2 count"]:
    """64 random bits for each of `count` entries, in the time of 32: Threefry's blocks have two words."""
    if key.ndim:
        return random_pairs(key[0], count) ^ random_pairs(key[1], count)
    words = jax.random.bits(key, (2,), jnp.uint32)
    index = jnp.arange(count, dtype=jnp.uint32)
    return jnp.stack(
        threefry2x32_p.bind(
            *jnp.broadcast_to(words[:, None], (2, count)), jnp.zeros_like(index), index
        )
    )


def normal(key: Key[Array, "*S"], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Standard normal draws; a key pair's by inversion as in `jax.random.normal`."""
    if not key.ndim:
        return jax.random.normal(key, shape, jnp.float32)
    uniform = (random_bits(key, shape) >> 9).astype(jnp.float32)
    return np.float32(2**0.5) * lax.erf_inv((uniform + 0.5) * np.float32(2**-22) - 1)


def single(key: Key[Array, "*S"]) -> Key[Array, ""]:
    """Merge a key pair into one key."""
    if not key.ndim:
        return key
    return jax.random.wrap_key_data(random_bits(key, (2,)), impl="threefry2x32")


def add_gaussian(key: Key[Array, "*S"], tree: Tree, std: Float[Array, ""]) -> Tree:
    """Add independent N(0, std^2) to every coordinate, in single precision whatever the tree's dtypes.

    `std` is absolute, not a ratio of the clip bound. One draw for the flattened tree: a draw per leaf would compile
    several times as long.
    """
    flat, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree))
    return unravel(flat + std.astype(jnp.float32) * normal(key, flat.shape))


def add_grid_noise(key: Key[Array, "*S"], tree: Tree, mesh: Mesh) -> Tree:
    r"""Add an independent :math:`X = \mathrm{round}(N(0, \sigma^2))` with :math:`\sigma = 2^{15}` to every integer.

    Modulo 2^32. X is drawn by inversion: 95 random bits U and a sign, and the k with
    :math:`P(|X| > k) \le U < P(|X| \ge k)`. A float32 guess gives the nearest threshold; the first 63 bits, compared
    with it and its neighbour, prove the result, else all bits find it by bisection, so X depends on the bits alone, on
    every platform. The last 32 are drawn only if needed.

    Each probability is accurate to a relative 2^-50 and an absolute 2^-94 (see `_thresholds`). Over n coordinates in
    all rounds, the first adds at most :math:`2 n 2^{-50}` to epsilon; the second is a total variation distance of at
    most :math:`n \cdot 350{,}000 \cdot 2^{-94}`, which adds :math:`(1 + e^\varepsilon)` times itself to delta. For
    100,000 coordinates and 1,000 rounds that is 2e-7 of epsilon, and 2e-15 times :math:`1 + e^\varepsilon` of delta.

    Args:
        key: of the noise.
        tree: int32 arrays.
        mesh: each device draws a part; the noise does not depend on their number.
    """
    flat, unravel = ravel_pytree(tree)
    padded = -(-flat.size // mesh.size) * mesh.size

    def spread(bits: Array) -> Array:
        return lax.with_sharding_constraint(
            bits, NamedSharding(mesh, P(*[None] * (bits.ndim - 1), *mesh.axis_names))
        )

    bits = spread(random_pairs(derive(key, 0), padded))
    rest = lambda: spread(random_bits(derive(key, 1), (padded,)))  # noqa: E731
    return unravel(flat + _rounded_gaussian(bits, rest)[: flat.size])


def _rounded_gaussian(
    bits: UInt32[Array, "2 D"], rest: Callable[[], UInt32[Array, "D"]]
) -> Int[Array, "D"]:
    """X for each column of 63 bits and a sign; `rest` draws the last 32."""
    words = _thresholds()
    last = words.shape[1] - 1
    pairs, third = jnp.asarray(np.ravel(words[:2], order="F")), jnp.asarray(words[2])
    first, second = bits[0], bits[1] & np.uint32(0xFFFFFFFE)

    def compare(k: Int[Array, "D"]) -> tuple[Bool[Array, "D"], Bool[Array, "D"]]:
        """Whether U is below, or above, the k-th threshold, by 63 bits."""
        high, low = (pairs.at[2 * k + word].get(mode="promise_in_bounds") for word in range(2))
        tied = first == high
        return (first < high) | (tied & (second < low)), (first > high) | (tied & (second > low))

    nearest = jnp.clip(jnp.round(_guess(bits) + 0.5).astype(jnp.int32), 1, last - 1)
    nearest, first, second = lax.optimization_barrier(
        (nearest, first, second)
    )  # else recomputed per look-up
    below, above = compare(nearest)
    beyond_below, beyond_above = compare(jnp.where(below, nearest + 1, nearest - 1))
    sure = (below & beyond_above) | (above & beyond_below)
    magnitude = jnp.where(sure, nearest - ~below, 0)

    def search() -> Int[Array, "D"]:
        final = rest()

        def halve(bracket: tuple[Array, Array]) -> tuple[Array, Array]:
            middle = (bracket[0] + bracket[1]) // 2
            below, above = compare(middle)
            below |= ~above & (final < third[middle])
            return jnp.where(below, middle, bracket[0]), jnp.where(below, bracket[1], middle)

        start = magnitude, jnp.where(sure, magnitude + 1, last)
        return lax.while_loop(lambda bracket: jnp.any(bracket[1] - bracket[0] > 1), halve, start)[0]

    magnitude = lax.cond(jnp.all(sure), lambda: magnitude, search)
    return jnp.where(bits[1] % 2 == 1, -magnitude, magnitude)


def _guess(bits: UInt32[Array, "2 D"]) -> Float[Array, "D"]:
    """Approximate magnitude of N(0, STEPS^2) exceeded with probability U.

    By the polynomials of Giles, Approximating the erfinv function, 2010, in the argument's distance from 1.
    """
    share = bits[0].astype(jnp.float32) * 2.0**-32 + bits[1].astype(jnp.float32) * 2.0**-64
    w = -jnp.log(jnp.maximum(share, 2.0**-64) * (2 - share))
    centre = functools.reduce(lambda value, c: value * (w - 2.5) + c, _GILES[0])
    tail = functools.reduce(lambda value, c: value * (jnp.sqrt(w) - 3) + c, _GILES[1])
    return math.sqrt(2) * STEPS * (1 - share) * jnp.where(w < 5, centre, tail)


_GILES = (
    (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
     0.246640727, 1.50140941),
    (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
     1.00167406, 2.83297682),
)  # fmt: skip


@functools.cache
def _thresholds() -> UInt32[np.ndarray, "3 n"]:
    r""":math:`2^{95} P(|X| \ge k)` by k, in words of 32, 31 and 32 bits from the highest; the second is doubled.

    P(|X| = k) is the midpoint rule's :math:`2 \varphi(x) / \sigma` at :math:`x = k / \sigma` with its next term,
    :math:`1 + (x^2 - 1) / (24 \sigma^2)`; the one after it is below 1e-17. In double precision each is accurate to
    about 2^-51; sums are then exact, in integers. What the errors leave of 2^96 is spread over all k, lest k = 0 bear
    it alone.
    """
    k = np.arange(1.0, _TAIL * STEPS)
    square = (k / STEPS) ** 2
    density = np.exp(-square / 2) * math.sqrt(2 / math.pi) / STEPS
    mass = density * (1 + (square - 1) / (24 * STEPS**2))
    zero = math.erf(0.5 / STEPS / math.sqrt(2))
    words = _words(mass)
    rest = (
        2**96
        - round(zero * 2**96)
        - sum(int(np.sum(word)) << 32 * i for i, word in enumerate(words))
    )
    words += int(math.copysign(1, rest)) * _words(mass * (abs(rest) / 2**96))
    cumulated = np.cumsum(words[:, ::-1], axis=1)[:, ::-1]
    for i in range(2):
        carry = cumulated[i] >> 32
        cumulated[i] -= carry << 32
        cumulated[i + 1] += carry
    first, end = np.full((3, 1), 2**32 - 1), np.zeros((3, 1))
    low, middle, high = cumulated
    words = np.stack([high, middle & ~1, (middle & 1) << 31 | low >> 1])
    return np.concatenate([first, words, end], axis=1).astype(np.uint32)


def _words(share: Float[np.ndarray, "n"]) -> Int[np.ndarray, "3 n"]:
    """2^96 times numbers in [0, 1), truncated to even integers: 32-bit words, lowest first."""
    high = np.floor(share * 2.0**32)
    rest = (share - high * 2.0**-32) * 2.0**32
    middle = np.floor(rest * 2.0**32)
    low = 2 * np.floor((rest - middle * 2.0**-32) * 2.0**63)
    return np.stack([low, middle, high]).astype(np.int64)
