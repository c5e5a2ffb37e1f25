"""Noise keys, and noise shaped like an update: Gaussian in single precision, or whole steps.

A key is a JAX key, or a pair of keys whose streams are XORed, which has 128 secret bits.
"""

import fractions
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

SAMPLE, CLIENT, CLIENT_NOISE, SERVER_NOISE, RELEASE, CANARY, PRIVATE_STEPS, DROPOUT = range(8)
"""Purposes of randomness.

Keys are derived by round, or by the sampler's period, then by purpose, and then by client if each
client has a key of its own. A purpose may derive further keys, such as one for each local step.
"""

STEPS = 2**15
"""Std of rounded Gaussian noise on a grid, in steps. It is the most that `Skellam` allows."""

_TAIL = 10.6
"""Largest noise on a grid, in stds. Each step beyond it has a probability below 2^-95."""


def derive(key: Key[Array, "*S"], *numbers: Int[Array, ""] | int) -> Key[Array, "*S"]:
    """Return a key into which numbers such as round, purpose and client are folded, in order.

    A key pair yields a key pair.
    """
    for number in numbers:
        # A pair is an array of two keys, and a single key has no axis.
        if key.ndim:
            key = jax.vmap(jax.random.fold_in, (0, None))(key, number)
        else:
            key = jax.random.fold_in(key, number)
    return key


def random_bits(key: Key[Array, "*S"], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Return an array of the given shape, with 32 random bits in each entry.

    The bits of a key pair are predictable only from both keys.
    """
    if not key.ndim:
        return jax.random.bits(key, shape, jnp.uint32)
    first = jax.random.bits(key[0], shape, jnp.uint32)
    second = jax.random.bits(key[1], shape, jnp.uint32)
    return first ^ second


def random_pairs(key: Key[Array, "*S"], count: int) -> UInt32[Array, "2 count"]:
    """Return two words of 32 random bits for each of `count` entries, in the time of one word.

    A block of Threefry has two words, and each entry takes one block.
    """
    if key.ndim:
        return random_pairs(key[0], count) ^ random_pairs(key[1], count)
    words = jax.random.bits(key, (2,), jnp.uint32)
    index = jnp.arange(count, dtype=jnp.uint32)
    # Counters are the pairs (0, i), so no two entries share a block.
    keys = jnp.broadcast_to(words[:, None], (2, count))
    return jnp.stack(threefry2x32_p.bind(*keys, jnp.zeros_like(index), index))


def normal(key: Key[Array, "*S"], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Return float32 draws of a standard normal variable.

    A key pair draws them by inversion, as `jax.random.normal` does.
    """
    if not key.ndim:
        return jax.random.normal(key, shape, jnp.float32)
    uniform = (random_bits(key, shape) >> 9).astype(jnp.float32)
    # The half keeps the argument exact, symmetric and off -1, where `erf_inv` is infinite.
    centred = (uniform + 0.5) * np.float32(2**-22) - 1
    return np.float32(2**0.5) * lax.erf_inv(centred)


def single(key: Key[Array, "*S"]) -> Key[Array, ""]:
    """Return one key of 64 bits that a key pair yields, or a single key as it is."""
    if not key.ndim:
        return key
    return jax.random.wrap_key_data(random_bits(key, (2,)), impl="threefry2x32")


def add_gaussian(key: Key[Array, "*S"], tree: Tree, std: Float[Array, ""]) -> Tree:
    """Return a tree in float32, with independent N(0, std^2) added to every coordinate.

    There is one draw for the flattened tree, because a draw per leaf would compile several times as
    long.

    Args:
        key: Key of the noise.
        tree: Arrays of any dtype.
        std: Absolute std, not a ratio of the clip bound.
    """
    flat, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree))
    # A std in double precision would promote the result.
    return unravel(flat + std.astype(jnp.float32) * normal(key, flat.shape))


def add_grid_noise(key: Key[Array, "*S"], tree: Tree, mesh: Mesh) -> Tree:
    r"""Return integers plus :math:`X = \mathrm{round}(N(0, \sigma^2))` each, modulo 2^32.

    Every X is independent, with :math:`\sigma = 2^{15}`. It is drawn by inversion: 95 random bits,
    read as a fraction U, and a sign give the k with :math:`P(|X| > k) \le U < P(|X| \ge k)`. A
    float32 guess gives a threshold near U. Comparing the first 63 bits with this threshold and its
    neighbour usually proves the result. If it does not, all bits find k by bisection, so X depends
    on the bits alone, on every platform. The last 32 bits are read only if needed.

    Each probability is accurate to a relative 2^-50 and an absolute 2^-94 (see `_thresholds`). Over
    n coordinates in all rounds, the relative error adds at most :math:`2 n 2^{-50}` to epsilon. The
    absolute error is a total variation distance of at most :math:`n \cdot 350{,}000 \cdot 2^{-94}`,
    which adds :math:`(1 + e^\varepsilon)` times itself to delta. For 100,000 coordinates and 1,000
    rounds that is 2e-7 of epsilon, and 2e-15 times :math:`1 + e^\varepsilon` of delta.

    Args:
        key: Key of the noise.
        tree: Arrays of int32.
        mesh: Mesh of devices, each of which draws a part. The noise does not depend on their
            number.
    """
    flat, unravel = ravel_pytree(tree)
    # Devices draw equal parts. A draw depends on its index alone, so padding changes no draw.
    padded = -(-flat.size // mesh.size) * mesh.size

    def spread(bits: Array) -> Array:
        axes = P(*[None] * (bits.ndim - 1), *mesh.axis_names)
        return lax.with_sharding_constraint(bits, NamedSharding(mesh, axes))

    bits = spread(random_pairs(derive(key, 0), padded))

    def rest() -> Array:
        return spread(random_bits(derive(key, 1), (padded,)))

    return unravel(flat + _rounded_gaussian(bits, rest)[: flat.size])


def _rounded_gaussian(
    bits: UInt32[Array, "2 D"], rest: Callable[[], UInt32[Array, "D"]]
) -> Int[Array, "D"]:
    """Return X of `add_grid_noise` for each column of 63 bits and a sign.

    Args:
        bits: Two words of random bits for each coordinate. The lowest bit of the second one is
            the sign.
        rest: Function that draws the last 32 bits of each coordinate.
    """
    words = _thresholds()
    last = words.shape[1] - 1
    # The first two words of a threshold lie side by side, because they are read together.
    pairs = jnp.asarray(np.ravel(words[:2], order="F"))
    third = jnp.asarray(words[2])
    first = bits[0]
    second = bits[1] & np.uint32(0xFFFFFFFE)
    # Look-ups promise indices within the table, so both neighbours must lie in the table.
    guess = jnp.round(_guess(bits) + 0.5).astype(jnp.int32)
    nearest = jnp.clip(guess, 1, last - 1)
    # Without a barrier XLA computes indices and words anew for each look-up.
    nearest, first, second = lax.optimization_barrier((nearest, first, second))
    compare = functools.partial(_compare, pairs, first, second)
    magnitude, sure = _proven(compare, nearest)

    def search() -> Int[Array, "D"]:
        final = rest()

        def is_below(k: Int[Array, "D"]) -> Bool[Array, "D"]:
            below, above = compare(k)
            return below | (~above & (final < third[k]))

        # A sure coordinate has a bracket of width 1, which bisection leaves as it is.
        return _bisected(is_below, magnitude, jnp.where(sure, magnitude + 1, last))

    magnitude = lax.cond(jnp.all(sure), lambda: magnitude, search)
    return jnp.where(bits[1] % 2 == 1, -magnitude, magnitude)


def _compare(
    pairs: UInt32[Array, "m"],
    first: UInt32[Array, "D"],
    second: UInt32[Array, "D"],
    k: Int[Array, "D"],
) -> tuple[Bool[Array, "D"], Bool[Array, "D"]]:
    """Return whether U is below the k-th threshold, and whether it is above, by 63 bits."""
    high = pairs.at[2 * k].get(mode="promise_in_bounds")
    low = pairs.at[2 * k + 1].get(mode="promise_in_bounds")
    tied = first == high
    below = (first < high) | (tied & (second < low))
    above = (first > high) | (tied & (second > low))
    return below, above


def _proven(
    compare: Callable[[Array], tuple[Array, Array]],
    nearest: Int[Array, "D"],
) -> tuple[Int[Array, "D"], Bool[Array, "D"]]:
    """Return the magnitudes that a threshold near U and its neighbour prove, and which these are.

    Other magnitudes are 0.
    """
    below, above = compare(nearest)
    beyond_below, beyond_above = compare(jnp.where(below, nearest + 1, nearest - 1))
    # The magnitude is proven if U lies strictly between two neighbouring thresholds.
    sure = (below & beyond_above) | (above & beyond_below)
    # A bool counts as 0 or 1: k is `nearest` if U is below its threshold, and else one less.
    return jnp.where(sure, nearest - ~below, 0), sure


def _bisected(
    is_below: Callable[[Array], Array],
    low: Int[Array, "D"],
    high: Int[Array, "D"],
) -> Int[Array, "D"]:
    """Return the lower ends of brackets, once bisection has made all widths 1 (`_halve`)."""

    def wide(bracket: tuple[Array, Array]) -> Array:
        return jnp.any(bracket[1] - bracket[0] > 1)

    return lax.while_loop(wide, functools.partial(_halve, is_below), (low, high))[0]


def _halve(
    is_below: Callable[[Array], Array],
    bracket: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Return the half of a bracket in which U lies.

    `is_below` returns whether U is below the k-th threshold. Thresholds decrease with k.
    """
    # U is always below the threshold of `low`, and never below that of `high`.
    low, high = bracket
    middle = (low + high) // 2
    below = is_below(middle)
    return jnp.where(below, middle, low), jnp.where(below, high, middle)


def _guess(bits: UInt32[Array, "2 D"]) -> Float[Array, "D"]:
    """Return the approximate magnitude of N(0, STEPS^2) that is exceeded with probability U.

    U is the fraction of 64 bits that both rows of `bits` make. The polynomials are those of Giles,
    Approximating the erfinv function, 2010, evaluated at x = 1 - U. They get
    1 - x^2 from U itself, because 1 - U would lose a small U.
    """
    share = bits[0].astype(jnp.float32) * 2.0**-32 + bits[1].astype(jnp.float32) * 2.0**-64
    # The product is 1 - x^2.
    # The least share keeps w finite if all bits are 0.
    w = -jnp.log(jnp.maximum(share, 2.0**-64) * (2 - share))
    # Each `reduce` is Horner's rule. Giles shifts w for its centre, and the root of w for its tail.
    centre = functools.reduce(lambda value, c: value * (w - 2.5) + c, _GILES[0])
    tail = functools.reduce(lambda value, c: value * (jnp.sqrt(w) - 3) + c, _GILES[1])
    return math.sqrt(2) * STEPS * (1 - share) * jnp.where(w < 5, centre, tail)


_GILES = (
    (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
     -0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
    (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
     -0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)  # fmt: skip
"""Coefficients of the polynomials in the centre and in the tail, highest power first."""


@functools.cache
def _thresholds() -> UInt32[np.ndarray, "3 n"]:
    r"""Return :math:`2^{95} P(|X| \ge k)` by k, in words of 32, 31 and 32 bits, highest first.

    The second word is doubled. P(|X| = k) is the midpoint rule's :math:`2 \varphi(x) / \sigma` at
    :math:`x = k / \sigma` with its next term, :math:`1 + (x^2 - 1) / (24 \sigma^2)`. The term after
    that is below 1e-17. In double precision each probability is accurate to about 2^-51. Sums are
    then exact, in integers. Because of these errors the total misses 2^96 by a rest. The rest is
    spread over all k above 0, because k = 0 would bear it alone otherwise. The entry of k = 0 is
    above every U, and that after the last k is 0.
    """
    low, middle, high = _cumulated(_masses())
    first = np.full((3, 1), 2**32 - 1)
    end = np.zeros((3, 1))
    # From 2^96 P to 2^95 P, the lowest bit of the middle word moves to the top of the last one.
    words = np.stack([high, middle & ~1, (middle & 1) << 31 | low >> 1])
    return np.concatenate([first, words, end], axis=1).astype(np.uint32)


def _masses() -> Int[np.ndarray, "3 n"]:
    r"""Return :math:`2^{96} P(|X| = k)` by k above 0 (`_thresholds`), in words as of `_words`."""
    k = np.arange(1.0, _TAIL * STEPS)
    square = (k / STEPS) ** 2
    density = np.exp(-square / 2) * math.sqrt(2 / math.pi) / STEPS
    mass = density * (1 + (square - 1) / (24 * STEPS**2))
    # P(X = 0) has a closed form. The midpoint rule serves all k above 0.
    zero = math.erf(0.5 / STEPS / math.sqrt(2))
    words = _words(mass)
    total = sum(int(np.sum(word)) << 32 * i for i, word in enumerate(words))
    rest = 2**96 - round(zero * 2**96) - total
    # `_words` takes no negative numbers, so its result gets the sign of the rest.
    return words + int(math.copysign(1, rest)) * _words(mass * (abs(rest) / 2**96))


def _cumulated(words: Int[np.ndarray, "3 n"]) -> Int[np.ndarray, "3 n"]:
    """Return, for each integer in three words, the sum of itself and of all that follow."""
    # Fewer than 2^19 words of 32 bits are added up, so int64 holds each sum before its carry.
    sums = np.cumsum(words[:, ::-1], axis=1)[:, ::-1]
    # Carries move from the lowest word upwards.
    for i in range(2):
        # An arithmetic shift rounds down, so a word below 0 borrows from the next one.
        carry = sums[i] >> 32
        sums[i] -= carry << 32
        sums[i + 1] += carry
    return sums


def _words(share: Float[np.ndarray, "n"]) -> Int[np.ndarray, "3 n"]:
    """Return 2^96 times numbers in [0, 1), truncated to even integers.

    The integers are in three 32-bit words, lowest first.
    """
    # Scaling by powers of two and dropping leading bits are exact. Only `floor` truncates.
    high = np.floor(share * 2.0**32)
    rest = (share - high * 2.0**-32) * 2.0**32
    middle = np.floor(rest * 2.0**32)
    low = 2 * np.floor((rest - middle * 2.0**-32) * 2.0**63)
    return np.stack([low, middle, high]).astype(np.int64)


_UNLIKELY = 97 * math.log(2)
"""Largest -log of a probability that thresholds of 95 bits can hold, and a little more."""


def skellam_tail(size: float, variance: float) -> float:
    r"""Return Chernoff's bound on the logarithm of P(X >= size) for a symmetric Skellam X.

    .. math:: \log P(X \ge k) \le \sqrt{k^2 + \mu^2} - \mu - k \operatorname{asinh}(k / \mu)

    Args:
        size: k, at least 0.
        variance: :math:`\mu`, the variance of X.
    """
    return math.hypot(size, variance) - variance - size * math.asinh(size / variance)


@functools.lru_cache(maxsize=16)
def skellam_thresholds(variance: fractions.Fraction) -> UInt32[np.ndarray, "3 n"]:
    r"""Return :math:`2^{95} P(|X| \ge k)` by k for a symmetric Skellam X, in words of 32 bits.

    The highest word comes first, and the last one is doubled. :math:`P(X = k) = e^{-\mu} I_k(\mu)`,
    and :math:`I_{k-1} = I_{k+1} + 2 k I_k / \mu` downwards from a k that is too large to matter
    (Miller's algorithm). All terms are positive, and the arithmetic is that of whole numbers with
    96 bits or more. The error of a probability p is therefore at most 2^-50 p + 2^-94. The entry of
    k = 0 is 2^95 - 1, because 2^95 needs a 96th bit.

    Args:
        variance: :math:`\mu`, the variance of X.
    """
    last = 1
    # A few thresholds more than needed cost less than the search for the least number.
    while skellam_tail(last, float(variance)) > -_UNLIKELY:
        last = math.ceil(1.01 * last) + 1
    tails, total = _bessel_tails(variance, last)
    # Both signs have a tail, so 2^95 P(|X| >= k) is 2^96 times the share of one tail.
    thresholds = [2**95 - 1, *((tail << 96) // total for tail in reversed(tails))]
    words = [(t >> 63, (t >> 31) & 0xFFFFFFFF, (t & 0x7FFFFFFF) << 1) for t in thresholds]
    return np.array(words, np.uint32).T


def _bessel_tails(variance: fractions.Fraction, last: int) -> tuple[list[int], int]:
    r"""Return the sum of all :math:`I_j` from j = k on, and that over all whole j.

    The first sums are those of k from `last` down to 1. All share an unknown factor.
    """
    first = last + math.ceil(3 * math.sqrt(variance)) + 60
    above = 0
    here = 1 << 96
    tail = here
    tails = []
    for k in range(first, 0, -1):
        # Here `tail` is the sum of the terms of k and of all larger ones.
        if k <= last:
            tails.append(tail)
        below = above + 2 * k * variance.denominator * here // variance.numerator
        above = here
        here = below
        tail += here
    # The loop has added I_0, which occurs once. The others occur twice.
    return tails, 2 * tail - here


def draw_skellam(
    key: Key[Array, "*S"], thresholds: UInt32[Array, "3 n"], count: int
) -> Int[Array, "{count}"]:
    r"""Return independent draws of a symmetric Skellam integer X, by inversion.

    95 random bits, read as a fraction U, and a sign give the k with
    :math:`P(|X| > k) \le U < P(|X| \ge k)`. See `add_grid_noise` for what the errors of the
    probabilities cost.

    Args:
        key: Key of the noise.
        thresholds: Result of `skellam_thresholds`.
        count: Number of draws.
    """
    first, second, third = random_bits(key, (3, count))
    negative = third % 2 == 1
    third = third & np.uint32(0xFFFFFFFE)
    last = thresholds.shape[1]

    def is_below(k: Int[Array, "{count}"]) -> Bool[Array, "{count}"]:
        a, b, c = thresholds[:, k]
        return (first < a) | ((first == a) & ((second < b) | ((second == b) & (third < c))))

    # Every U is below the threshold of k = 0, and none is below the one after the last.
    start = jnp.zeros(count, jnp.int32), jnp.full(count, last, jnp.int32)
    # As many halvings reach a bracket of width 1 from any width up to `last`. It then stays.
    magnitude, _ = lax.fori_loop(
        0, last.bit_length(), lambda _, bracket: _halve(is_below, bracket), start
    )
    return jnp.where(negative, -magnitude, magnitude)
