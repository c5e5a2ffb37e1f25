r"""Noise that is correlated over rounds, so that more of it cancels in the model.

This is DP-FTRL, or matrix factorisation. The noise of all rounds is :math:`n = S^{-1} \xi` with
fresh :math:`\xi_t \sim N(0, z^2 C^2)`. The strategy S is a lower-triangular Toeplitz matrix of
coefficients :math:`1 = c_0, c_1, \dots \ge 0`. The server's model after t rounds has the prefix
sums of n. Over z C, their root mean square is :math:`\|A S^{-1}\|_F / \sqrt{T}`, where A has ones
on and below its diagonal, and T is the number of rounds.

Let x be the sums of the rounds without noise. A client that takes part in the rounds P moves
:math:`S x` by at most :math:`\|S \mathbf{1}_P\|_2` clip bounds. Equal updates are the worst within
the bound, because :math:`S^\top S` has no negative entry. The run is one Gaussian of multiplier
:math:`z / \|S \mathbf{1}_P\|_2`, exactly, even if P is known, for every data-independent sampler.
Under `CyclicPoisson` with at least as many groups as S has bands the run is amplified. The turns of
a client are then Poisson-sampled Gaussians of multiplier :math:`z / \|c\|_2`.

Limits say of a client's rounds only that they are at most k, each at least b after the last. If c
has at most b coefficients, the columns of S in P do not overlap, and the norm is at most
:math:`\sqrt{k} \|c\|_2`. If c does not increase, the norm is largest for P = {0, b, ..., (k - 1) b}
(Kalinin and Lampert, Banded Square Root Matrix Factorization for Differentially Private Model
Training, NeurIPS 2024, theorem 2). Any other c is at most its envelope :math:`\max_{i \ge j} c_i`,
which does not increase. The norm of the envelope is no smaller, because S has no negative entry.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Key, UInt8

from jaxfl._support.checks import check_count, check_numbers, checked, show
from jaxfl.privacy.accounting.observers import ROUNDING, Observer, View, one_gaussian
from jaxfl.privacy.mechanisms.gaussian import FIELDS, Mechanism
from jaxfl.privacy.noise import add_gaussian
from jaxfl.privacy.sampling import Turns
from jaxfl.privacy.sums import add, narrow
from jaxfl.types import Ledger, Tree

MOST_ROUNDS = 10**7
"""Most rounds of correlated noise, whose strategy has a number for each."""

_SEEN = 2048
"""Number of first rounds, from which the growth of noise in later rounds is extrapolated."""

_FAINT = 1e-24
"""Least share of the noise's energy that counts. Less is rounding of double precision."""


class CorrelatedNoise(Mechanism):
    """Mechanism whose noise is correlated over rounds by a strategy S, and accounted for by S."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_multiplier_table.size > 1 or self.clients_noisy or self.noise == "grid":
            raise ValueError(
                "noise_multiplier must be one number, client_noise 0 and noise 'float' with "
                "correlated noise, which the server adds, got "
                f"noise_multiplier={show(self.noise_multiplier)}, "
                f"client_noise={show(self.client_noise)}, noise={self.noise!r}. "
                "Change them, or give a Mechanism of independent noise."
            )

    def strategy(self, rounds: int) -> Float[np.ndarray, "T"]:
        """Return the first `rounds` coefficients of S."""
        raise NotImplementedError

    def error(self, rounds: int) -> float:
        """Return the root mean square of the noise in the prefix sums (`prefix_error`)."""
        return prefix_error(self.strategy(rounds))

    @property
    def bands_at_most(self) -> int | float:
        """Largest number of nonzero coefficients, or infinity if there is no limit."""
        return math.inf

    def check_fits(self, clients: int, rounds: int) -> None:
        """Require at most `MOST_ROUNDS` rounds, tables that fit, and noise that float32 holds."""
        if rounds > MOST_ROUNDS:
            raise ValueError(
                f"rounds must be at most {MOST_ROUNDS} with correlated noise, whose strategy has "
                f"a number for each, got {rounds}. "
                "Give fewer rounds, or a Mechanism of independent noise."
            )
        super().check_fits(clients, rounds)
        error = rounding_error(self.strategy(min(rounds, _SEEN)), rounds)
        # A strategy that overflows may have an error of NaN, which must not pass either.
        if not error <= ROUNDING:
            inherited = {field.name for field in dataclasses.fields(Mechanism)}
            own = [field.name for field in dataclasses.fields(self) if field.name not in inherited]
            values = ", ".join(f"{name}={show(getattr(self, name))}" for name in own)
            raise ValueError(
                f"{' and '.join(own)} must leave noise that float32 holds over {rounds} rounds, "
                f"got {values}: the strategy's inverse grows, and rounding moves the noise by "
                f"{error:.2g} of its std. "
                "Give smaller numbers, those of `square_root` or `blt`, or fewer rounds."
            )

    def correlate(self, memory: Tree, fresh: Tree) -> tuple[Tree, Tree]:
        """Return a round's noise and the next memory, both over the noise's std.

        Args:
            memory: Memory of the mechanism.
            fresh: Independent noise of the round, over its std.
        """
        raise NotImplementedError

    def add_server_noise(
        self, key: Key[Array, "*S"], memory: Tree, update: Tree, std: Float[Array, ""], mesh: Mesh
    ) -> tuple[Tree, Tree]:
        """Return the update with the round's correlated noise, and the next memory.

        The memory holds noise divided by `std`.
        """
        del mesh
        # The memory needs the noise without the sum, so noise is drawn on zeros, with a std of 1.
        zero = jax.tree.map(jnp.zeros_like, narrow(update))
        fresh = add_gaussian(key, zero, jnp.ones(()))
        noise, memory = self.correlate(memory, fresh)
        scaled = jax.tree.map(lambda leaf: leaf * std, noise)
        return add(update, self.representation.encode(scaled)), memory

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """Return one Gaussian for the run, or the amplified turns of a client.

        With one band, for uploads, or if nothing is clipped or sent, it is the view of `Mechanism`.
        """
        view = super().view(ledger, observer, replaced=replaced, one_round=one_round)
        rounds = len(ledger.participants)
        if view.whole or observer == "upload" or self.bands_at_most == 1:
            return view
        strategy = self.strategy(rounds)
        norm = float(np.linalg.norm(strategy))
        # If the turns of a client do not overlap in S, each of them is a Gaussian of its own.
        if self.sampling.gap >= self.bands_at_most and view.hidden.all():
            return view.scaled(1 / norm)._replace(theorem=f"{view.theorem}, banded factorisation")
        exposure = np.full(1, norm)
        if not one_round:
            exposure = exposures(strategy, ledger.participants)
        return _whole_run(view, exposure, replaced)

    def describe(self, ledger: Ledger) -> list[str]:
        """Return a list of one sentence about the noise in the model."""
        rounds = max(1, len(ledger.participants))
        error = self.error(rounds)
        plain = prefix_error(np.ones(1), rounds)
        return [
            "correlated noise: its root mean square in the model is "
            f"{error / plain:.3g} times that of independent noise"
        ]


def _whole_run(view: View, exposure: Float[np.ndarray, "#C"], replaced: bool) -> View:
    """Return one Gaussian for the run, whose multiplier is divided by each client's exposure."""
    adjacency = "replace-one" if replaced else "zero-out"
    # A client that never takes part reveals nothing, even without noise.
    multiplier = np.full((1, len(exposure)), np.inf)
    np.divide(np.min(view.multiplier), exposure, out=multiplier, where=exposure[None] > 0)
    run = one_gaussian(0.0, f"Gaussian, {adjacency}, matrix factorisation", view.why_infinite)
    # The one entry covers all rounds, so a longer run needs another view.
    return run._replace(multiplier=multiplier, replaced=replaced, grows=True, turn=0)


def _check_coefficients(name: str, value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    return _check_tuple(name, value)


def _check_tuple(name: str, value: Any) -> tuple[float, ...]:
    check_numbers(name, value, zero=True)
    return tuple(np.ravel(value).tolist())


def _check_decays(name: str, value: Any) -> tuple[float, ...]:
    decays = _check_tuple(name, value)
    if max(decays) >= 1:
        raise ValueError(f"{name} must be below 1, got {show(value)}. Give smaller numbers.")
    return decays


@checked(**FIELDS, bands=check_count, coefficients=_check_coefficients)
@dataclasses.dataclass(frozen=True, eq=False)
class BandedNoise(CorrelatedNoise):
    r"""Noise of a round less a weighted sum of the noises of the last b - 1 rounds.

    .. math:: n_t = \xi_t - \sum_{k=1}^{b-1} c_k n_{t-k}, \qquad \xi_t \sim N(0, z^2 C^2)

    The strategy has b coefficients. By default they are :math:`c_k = \binom{2k}{k} / 4^k`, the
    first ones of the Toeplitz square root of A, which has ones on and below its diagonal. The
    memory is the last b - 1 noises, so it is b - 1 times the size of an update.

    Args:
        noise_multiplier: z of the fresh noise, one number for all rounds. The server adds the
            noise.
        bands: b, the number of coefficients. 1 is independent noise.
        coefficients: c_1, ..., c_{b-1}, at least 0, for instance found by numerical optimisation.
            None stands for those of the square root.

    All other arguments are those of `Mechanism`.

    Raises:
        ValueError: The multiplier differs by round, clients add noise, `noise` is "grid", or there
            are not b - 1 coefficients.

    Guarantee: See `jaxfl.privacy.mechanisms.correlated`. For a client with rounds P the run is one
        Gaussian of multiplier :math:`z / \|S \mathbf{1}_P\|_2`. That is at least
        :math:`z / (\sqrt{k} \|c\|_2)` if the client's k rounds are at least b apart
        (`MinSeparation`). Under `CyclicPoisson` with b groups or more the run is amplified.
    References: Choquette-Choo et al., (Amplified) Banded Matrix Factorization, NeurIPS 2023;
        Fichtenberger et al., Constant Matters, ICML 2023 (coefficients).
    """

    bands: int = 8
    coefficients: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        coefficients = self.coefficients
        if coefficients is not None and len(coefficients) != self.bands - 1:
            raise ValueError(
                f"coefficients must be {self.bands - 1} numbers for {self.bands} bands, "
                f"got {coefficients!r}. Give {self.bands - 1} numbers, or other bands."
            )

    def strategy(self, rounds: int) -> Float[np.ndarray, "T"]:
        """Return the b coefficients, cut to `rounds` numbers or padded with zeros."""
        if self.coefficients is None:
            first = square_root(self.bands)
        else:
            first = np.r_[1.0, self.coefficients]
        return np.pad(first, (0, max(0, rounds - self.bands)))[:rounds]

    @property
    def bands_at_most(self) -> int | float:
        """Number of bands, b."""
        return self.bands

    def init(self, key: Key[Array, "*S"], update: Callable[[], Tree], clients: int) -> Tree:
        """Return noises of zero, which precede the first round."""
        del key, clients
        return jax.tree.map(lambda leaf: jnp.zeros((self.bands - 1, *leaf.shape)), update())

    def correlate(self, memory: Tree, fresh: Tree) -> tuple[Tree, Tree]:
        """Return the noise, and the last b - 1 noises with the newest first."""
        # The memory has the newest noise first, as c_1 belongs to it.
        before = jnp.asarray(self.strategy(self.bands)[1:], jnp.float32)
        noise = jax.tree.map(
            lambda leaf, past: leaf - jnp.tensordot(before, past, 1), fresh, memory
        )
        memory = jax.tree.map(
            lambda leaf, past: jnp.concatenate([leaf[None], past])[: len(past)], noise, memory
        )
        return noise, memory


@checked(**FIELDS, scales=_check_tuple, decays=_check_decays)
@dataclasses.dataclass(frozen=True, eq=False)
class BLTNoise(CorrelatedNoise):
    r"""Buffered linear Toeplitz noise, whose coefficients decay like sums of exponentials.

    .. math::
        c_k = \sum_i \omega_i \theta_i^{k-1} \text{ for } k \ge 1, \qquad
        n_t = \xi_t - \sum_i \omega_i s_{i,t}, \qquad s_{i,t+1} = \theta_i s_{i,t} + n_t

    The memory is one buffer s for each i, whatever the number of rounds. `blt` optimises scales and
    decays.

    Args:
        noise_multiplier: z of the fresh noise, one number for all rounds. The server adds the
            noise.
        scales: :math:`\omega`, at least 0, one per buffer.
        decays: :math:`\theta`, in [0, 1), one per buffer.

    All other arguments are those of `Mechanism`.

    Raises:
        ValueError: The multiplier differs by round, clients add noise, `noise` is "grid", or there
            are not as many scales as decays.

    Guarantee: The guarantee of `BandedNoise`, without amplification, because S has unbounded bands.
    References: Dvijotham et al., Efficient and Near-Optimal Noise Generation for Streaming
        Differential Privacy, FOCS 2024; McMahan et al., A Hassle-free Algorithm for Private
        Learning in Practice, 2024 (arXiv:2408.08868).
    """

    scales: tuple[float, ...] = (0.5,)
    decays: tuple[float, ...] = (0.75,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.scales) != len(self.decays):
            raise ValueError(
                "scales must have as many numbers as decays, got "
                f"scales={self.scales!r}, decays={self.decays!r}. "
                "Give one scale and one decay per buffer."
            )

    def strategy(self, rounds: int) -> Float[np.ndarray, "T"]:
        """Return the first `rounds` coefficients of S."""
        return _blt(np.asarray(self.scales), np.asarray(self.decays), rounds)

    def error(self, rounds: int) -> float:
        """Return `prefix_error`, computed from the buffers in time linear in the rounds."""
        above, below = _polynomial_ratio(np.asarray(self.scales), np.asarray(self.decays))
        return prefix_error(above, rounds, below)

    def init(self, key: Key[Array, "*S"], update: Callable[[], Tree], clients: int) -> Tree:
        """Return empty buffers for the first round."""
        del key, clients
        return jax.tree.map(lambda leaf: jnp.zeros((len(self.scales), *leaf.shape)), update())

    def correlate(self, memory: Tree, fresh: Tree) -> tuple[Tree, Tree]:
        """Return the noise, and the buffers of the next round."""
        scales = jnp.asarray(self.scales, jnp.float32)
        decays = jnp.asarray(self.decays, jnp.float32)
        noise = jax.tree.map(
            lambda leaf, buffers: leaf - jnp.tensordot(scales, buffers, 1), fresh, memory
        )

        def aged(buffers: Float[Array, "B *S"], leaf: Float[Array, "*S"]) -> Float[Array, "B *S"]:
            return decays.reshape(-1, *[1] * leaf.ndim) * buffers + leaf[None]

        return noise, jax.tree.map(aged, memory, noise)


class BLT(NamedTuple):
    """Scales and decays of `BLTNoise`."""

    scales: tuple[float, ...]
    decays: tuple[float, ...]


@checked(buffers=check_count, rounds=check_count, separation=check_count)
def blt(buffers: int, rounds: int, separation: int = 1, participations: int | None = None) -> BLT:
    """Return scales and decays for `BLTNoise` that leave little noise in the model.

    Nelder and Mead's method seeks a local optimum of the root mean square of the prefix sums' noise
    at one epsilon.

    Args:
        buffers: Number of buffers.
        rounds: Number of rounds.
        separation: Fewest rounds from one participation of a client to its next.
        participations: Most rounds in which a client takes part. None allows as many as
            `separation` does.

    >>> numbers = blt(2, 100, separation=100)
    >>> noise = BLTNoise(clip=1.0, noise_multiplier=1.0, **numbers._asdict())
    >>> strategy = noise.strategy(100)
    >>> best = square_root(100)
    >>> least = prefix_error(best) * np.linalg.norm(best)
    >>> bool(prefix_error(strategy) * np.linalg.norm(strategy) < 1.03 * least)
    True
    """
    turns = Turns(1, rounds, separation, participations)

    def numbers(point: Float[np.ndarray, "P"]) -> tuple[np.ndarray, np.ndarray]:
        # The search has no bounds. Every point gives scales of at most 1 and decays below 1.
        return np.exp(np.minimum(point[:buffers], 0.0)), scipy.special.expit(point[buffers:])

    def cost(point: Float[np.ndarray, "P"]) -> float:
        return _log_error(*numbers(point), turns)

    span = np.geomspace(0.5, max(1.0, rounds / 2), buffers)
    start_scales = np.log(0.4 / np.arange(1, buffers + 1) ** 2)
    # expit(log s) is s / (1 + s), so that a buffer begins with a memory of about s rounds.
    start = np.r_[start_scales, np.log(span)]
    options = {"maxiter": 400 * buffers, "fatol": 1e-6}
    best = scipy.optimize.minimize(cost, start, method="Nelder-Mead", options=options)
    scales, decays = numbers(best.x)
    return BLT(tuple(scales.tolist()), tuple(decays.tolist()))


def _log_error(
    scales: Float[np.ndarray, "B"],
    decays: Float[np.ndarray, "B"],
    turns: Turns,
) -> float:
    """Return the logarithm of the error of buffered noise at one epsilon."""
    rounds = len(turns)
    above, below = _polynomial_ratio(scales, decays)
    exposure = worst_exposure(_blt(scales, decays, rounds), turns)
    error = prefix_error(above, rounds, below) * exposure
    # A strategy that overflows is worse than all others.
    if not math.isfinite(error):
        return 1e9
    return math.log(error)


def exposures(
    strategy: Float[np.ndarray, "T"], participants: Bool[Any, "T C"]
) -> Float[np.ndarray, "#C"]:
    r"""Return the most clip bounds by which each client moves :math:`S x`, for the rounds' sums x.

    That is :math:`\|S \mathbf{1}_P\|_2` of the client's rounds P. The result is one number for all
    clients, the largest, if `participants` is a `Turns`, or repeats one column by a stride of 0.

    Args:
        strategy: Coefficients of S.
        participants: Who takes part, by round and client.

    >>> participants = np.array([[True, True], [False, True], [True, True]])
    >>> exposures(np.array([1.0, 0.5, 0.0]), participants).round(3).tolist()
    [1.5, 2.345]
    """
    rounds = len(participants)
    if isinstance(participants, Turns):
        return np.array([worst_exposure(strategy, participants)])
    # A stride of 0 repeats one client, as in a plan.
    if participants.strides[1] == 0:
        # Without the copy the stride would be 0 again, and the calls would never end.
        return exposures(strategy, participants[:, :1].copy())
    bits = np.ascontiguousarray(np.packbits(participants, axis=0).T)
    # Texts are sorted much faster than rows.
    # NumPy ignores zero bytes at the end of a text, which confuses no texts of equal length.
    texts = bits.view(f"S{bits.shape[1]}")[:, 0]
    _, first, kind_of_client = np.unique(texts, return_index=True, return_inverse=True)
    return _moves(strategy[:rounds], bits[first], rounds)[kind_of_client.reshape(-1)]


def _moves(
    strategy: Float[np.ndarray, "T"],
    patterns: UInt8[np.ndarray, "n bytes"],
    rounds: int,
) -> Float[np.ndarray, "n"]:
    """Return the result of `exposures` for rounds in packed bits, a row per client."""
    norms = np.empty(len(patterns))
    for start in range(0, len(patterns), 4096):
        # Blocks bound the memory of rows that are unpacked to double precision.
        block = patterns[start : start + 4096]
        rows = np.unpackbits(block, axis=1, count=rounds).astype(np.float64)
        moved = scipy.signal.fftconvolve(rows, strategy[None], axes=1)[:, :rounds]
        norms[start : start + 4096] = np.linalg.norm(moved, axis=1)
    # Clients with a round have at least 1. Smaller norms are rounding of clients without one.
    norms[norms < 0.5] = 0.0
    return norms


def rounding_error(strategy: Float[np.ndarray, "n"], rounds: int) -> float:
    r"""Return about how far single precision moves the fresh noise in the last of many rounds.

    The result is in stds of the fresh noise. Noise n_t is rounded by up to
    :math:`2^{-24} \sum_k c_k |n_{t-k}|`. The std of n_t is :math:`\|h\|` for the first t
    coefficients h of :math:`S^{-1}`. Together that is :math:`2^{-24} \|c\|_1 \|h\|`. For
    rounds beyond the given coefficients, :math:`\|h\|` is extrapolated from the last two quarters
    of h, and :math:`\|c\|_1` is not.

    Args:
        strategy: First coefficients of S.
        rounds: Number of rounds.

    >>> rounding_error(square_root(100), 10_000) < 1e-6
    True
    >>> rounding_error(np.array([1.0, 2.0, 0.0, 0.0]), 10**6)
    inf
    """
    known = min(len(strategy), rounds)
    quarter = max(1, known // 4)
    more = (rounds - known) / quarter
    impulse = np.r_[1.0, np.zeros(known - 1)]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        inverse = scipy.signal.lfilter([1.0], np.trim_zeros(strategy, "b"), impulse)
        squares = np.square(np.asarray(inverse))
        total = np.sum(squares)
        last = np.sum(squares[-quarter:])
        if more and not last < _FAINT * total:
            ratio = last / np.sum(squares[-2 * quarter : -quarter])
            # Further quarters form a geometric series.
            total += last * _powers(ratio, more)
        return float(2.0**-24 * np.sum(strategy) * np.sqrt(total))


def _powers(ratio: float, number: float) -> float:
    """Return the sum of the powers of a ratio, from the first on, by its closed form."""
    # The formula is 0 / 0 for a ratio of 1.
    if ratio == 1:
        return number
    return ratio * (ratio**number - 1) / (ratio - 1)


def worst_exposure(strategy: Float[np.ndarray, "T"], turns: Turns) -> float:
    r"""Return the largest :math:`\|S \mathbf{1}_P\|_2` of a client's rounds P, or an upper bound.

    If groups take turns, clients of the first group begin first. For other clients
    :math:`S \mathbf{1}_P` is the same, but later and cut at the last round, so its norm is no
    larger. Under limits, the result is the largest norm if the strategy has no more coefficients
    than the gap has rounds, or does not increase. Otherwise it is that of the least strategy above
    it that does not increase.

    Args:
        strategy: Coefficients of S.
        turns: What is known of a client's rounds.
    """
    rounds = len(turns)
    gap = turns.gap
    most = turns.most
    first = np.trim_zeros(strategy[:rounds], "b")
    # The end of the run may cut the effect of the last turn.
    last = rounds - (most - 1) * gap
    # Turns that do not overlap are orthogonal, so their squared norms add up.
    if len(first) <= gap:
        squares = (most - 1) * np.sum(first**2) + np.sum(first[:last] ** 2)
        return math.sqrt(squares)
    # This is the envelope of the module's docstring, which does not increase.
    if not turns.known:
        first = np.maximum.accumulate(first[::-1])[::-1]
    present = np.zeros(rounds)
    present[: most * gap : gap] = 1
    return float(np.linalg.norm(scipy.signal.fftconvolve(present, first)[:rounds]))


def prefix_error(
    strategy: Float[np.ndarray, "b"],
    rounds: int | None = None,
    over: Float[np.ndarray, "d"] | None = None,
) -> float:
    r"""Return the root mean square of the noise in the prefix sums, over z C.

    It is :math:`\|A S^{-1}\|_F / \sqrt{T}`. The coefficients of S may be those of a ratio of
    polynomials, `strategy` divided by `over`.

    Args:
        strategy: Coefficients of S, or of the ratio's numerator.
        rounds: T, the number of rounds. None stands for the number of coefficients.
        over: Coefficients of the ratio's denominator. None stands for 1.

    >>> round(prefix_error(np.ones(1), 3) ** 2, 6)
    2.0
    """
    if rounds is None:
        rounds = len(strategy)
    impulse = np.r_[1.0, np.zeros(rounds - 1)]
    numerator = over
    if numerator is None:
        numerator = np.ones(1)
    # The filter's response to an impulse is the first column of the inverse of S.
    inverse = scipy.signal.lfilter(numerator, np.trim_zeros(strategy, "b"), impulse)
    prefix = np.cumsum(inverse)
    # Coefficient k of the prefix sums is in T - k rows of the Toeplitz matrix.
    return math.sqrt(np.sum(prefix**2 * np.arange(rounds, 0, -1)) / rounds)


@functools.cache
def square_root(bands: int) -> Float[np.ndarray, "b"]:
    """Return the first `bands` coefficients of the Toeplitz square root of A.

    The matrix A of prefix sums has ones on and below its diagonal, and zeros above it.

    >>> square_root(4).tolist()
    [1.0, 0.5, 0.375, 0.3125]
    """
    k = np.arange(1, bands)
    # The factor is c_k over c_(k-1). The binomials themselves would overflow.
    return np.cumprod(np.r_[1.0, (2 * k - 1) / (2 * k)])


def _polynomial_ratio(
    scales: Float[np.ndarray, "B"], decays: Float[np.ndarray, "B"]
) -> tuple[np.ndarray, np.ndarray]:
    r"""Return polynomials p and q of x, from whose ratio a strategy and its inverse follow.

    .. math:: p / q = 1 + \sum_i \frac{\omega_i x}{1 - \theta_i x}

    The power series of p / q has the coefficients of the strategy, and that of q / p those of its
    inverse. The inverse therefore costs one step for each buffer in a round.

    Args:
        scales: :math:`\omega`, one for each of the B buffers.
        decays: :math:`\theta`, one for each buffer.
    """
    above = below = np.ones(1)
    for scale, decay in zip(scales, decays, strict=True):
        # Each buffer adds its fraction, over the common denominator.
        factor = np.array([1.0, -decay])
        above = np.convolve(above, factor)
        above[1:] += scale * below
        below = np.convolve(below, factor)
    return above, below


def _blt(
    scales: Float[np.ndarray, "B"], decays: Float[np.ndarray, "B"], rounds: int
) -> Float[np.ndarray, "T"]:
    # Powers of a decay may underflow to 0, which is close enough.
    with np.errstate(under="ignore"):
        return np.r_[1.0, scales @ decays[:, None] ** np.arange(rounds - 1)]
