r"""Epsilon of composed Gaussian mechanisms, by Rényi divergences (RDP) and by privacy loss distributions (PLD).

Everything is in noise multipliers under zero-out: std of the noise over the largest change that one client's
absence makes. Infinity: the client risks nothing in that round.
"""

import functools
import math
from typing import NamedTuple

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from jaxtyping import Float, Int
from scipy import special

_QUADRATURE = 1 + np.geomspace(0.02, 12, 128)
_WHOLE = np.unique(np.r_[14:65, np.round(2.0 ** np.arange(6, 12.01, 0.25))]).astype(int)
ORDERS = np.r_[_QUADRATURE, _WHOLE]
"""Rényi orders. Sampled Gaussians take the first by quadrature and the whole ones by the exact finite sum."""

_SWAP_ORDERS = [*range(2, 33), 40, 48, 64, 96, 128, 512, 1024]
_RDP_LEVELS, _PLD_LEVELS, _PLD_COLUMNS = 512, 64, 8


class Rounds(NamedTuple):
    """Rounds of Gaussian mechanisms; axes of length 1 mean "the same for all clients".

    Args:
        plain: multipliers of rounds without amplification (participation counts as known, or is certain).
        sampled: multipliers of Poisson-sampled rounds, with rate `rate`.
        rate: probability of `sampled`.
        swapped: multipliers under replace-one of rounds that draw `cohort` without replacement: a second valid
            bound beside `plain`; None: it does not apply.
        cohort: number of clients, and how many of them `swapped` draws.
        repeats: how often each row happens.
    """

    plain: Float[np.ndarray, "R C1"]
    sampled: Float[np.ndarray, "R C2"]
    rate: float
    swapped: Float[np.ndarray, "R"] | None
    cohort: tuple[int, int]
    repeats: Int[np.ndarray, "R"]


def plain_rounds(multiplier: np.ndarray, repeats: np.ndarray | None = None) -> Rounds:
    """Rounds without amplification."""
    repeats = np.ones(len(multiplier), int) if repeats is None else repeats
    return Rounds(multiplier, np.full((len(multiplier), 1), math.inf), 1.0, None, (1, 1), repeats)


def rdp_epsilon(rounds: Rounds, delta: float) -> Float[np.ndarray, "C"]:
    r"""Epsilon from :math:`\min_\alpha D_\alpha + \log(1 - 1/\alpha) - \log(\delta \alpha)/(\alpha - 1)`.

    References: Mironov 2017 (Gaussian); Mironov, Talwar, Zhang 2019 (Poisson); Canonne, Kamath, Steinke 2020
        (conversion); Wang, Balle, Kasiviswanathan 2019 (without replacement).
    """
    levels, counts = _count_levels(rounds, _RDP_LEVELS)
    divergence = _plain_loss(rounds)[:, None] * ORDERS / 2
    if levels.size:
        divergence = divergence + counts @ np.stack([poisson_divergence(rounds.rate, level) for level in levels])
    values = from_divergence(divergence, delta)
    if rounds.swapped is not None:
        values = np.minimum(values, _swapped_epsilon(rounds.swapped, rounds, delta))
    return values


def pld_epsilon(rounds: Rounds, delta: float) -> Float[np.ndarray, "C"]:
    """Epsilon by privacy loss distributions: exact for plain Gaussians, a tight upper bound for sampled ones.

    More than a few kinds of clients under sampling share the bound of the one that dominates them all.

    References: Balle and Wang 2018 (Gaussian); Doroshenko et al. 2022 (connect the dots).
    """
    levels, counts = _count_levels(rounds, _PLD_LEVELS)
    loss = _plain_loss(rounds)
    if not levels.size:
        return _gaussian_epsilon(loss, delta)
    size = max(len(loss), len(counts))
    kinds = np.c_[np.broadcast_to(loss, size), np.broadcast_to(counts, (size, levels.size))]
    kinds, inverse = np.unique(kinds, axis=0, return_inverse=True)
    if len(kinds) > _PLD_COLUMNS:
        return np.broadcast_to(pld_epsilon(worst_client(rounds), delta), size)
    values = np.array([_composed_epsilon(kind[0], levels, kind[1:], rounds.rate, delta) for kind in kinds])
    return values[inverse.reshape(-1)]


def worst_client(rounds: Rounds) -> Rounds:
    """One client at least as exposed as every client in every round."""
    return rounds._replace(
        plain=rounds.plain.min(axis=1, keepdims=True), sampled=rounds.sampled.min(axis=1, keepdims=True)
    )


def divergence_by_round(rounds: Rounds) -> Float[np.ndarray, "R A"]:
    """Rényi divergence of each row of `plain` and `sampled` for the worst client, at `ORDERS`."""
    worst = worst_client(rounds)
    plain = _inverse_square(worst.plain) * ORDERS / 2
    levels, index = _levels(worst.sampled[:, 0], _RDP_LEVELS)
    table = [poisson_divergence(rounds.rate, level) for level in levels]
    return plain + np.stack([*table, np.zeros(ORDERS.size)])[index]


@functools.lru_cache(maxsize=4096)
def poisson_divergence(rate: float, multiplier: float) -> Float[np.ndarray, "A"]:
    r"""Rényi divergence of one Poisson-sampled Gaussian at `ORDERS`.

    .. math:: (\alpha - 1) D_\alpha = \log E_{x \sim N(0, z^2)} [(1 - q + q e^{(2x - 1) / (2 z^2)})^\alpha]

    Whole orders above 13 are the finite sum; the others are integrated by the trapezoid rule, whose error
    falls like :math:`e^{-2 \pi a / h}` with the half-width :math:`a = \pi z^2` of analyticity.

    References: Mironov, Talwar, Zhang 2019 (arXiv:1908.10530), section 3.3.
    """
    if rate == 1:
        return ORDERS / (2 * multiplier**2)
    if multiplier < 0.05:  # the grid would be huge; sampling never hurts
        low = _QUADRATURE * (_QUADRATURE - 1) / (2 * multiplier**2)
    else:
        step = min(multiplier / 4, multiplier**2 / 2)
        x = np.arange(-15 * multiplier, _QUADRATURE[-1] + 15 * multiplier, step)
        ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * multiplier**2))
        weight = -(x**2) / (2 * multiplier**2) + math.log(step / multiplier) - math.log(2 * math.pi) / 2
        low = special.logsumexp(_QUADRATURE[:, None] * ratio + weight, axis=1)
    order, k, starts, choose = _finite_sum()
    exponent = k * (k - 1) / (2 * multiplier**2)
    terms = choose + k * math.log(rate) + (order - k) * math.log1p(-rate) + exponent + np.log(-np.expm1(-exponent))
    high = np.logaddexp(0, np.logaddexp.reduceat(terms, starts))
    return np.maximum(np.r_[low, high], 0) / (ORDERS - 1)


def from_divergence(divergence: Float[np.ndarray, "*R A"], delta: float) -> Float[np.ndarray, "*R"]:
    """Epsilon from Rényi divergences at `ORDERS` (as `dp_accounting.rdp.compute_epsilon`, for many rows)."""
    values = divergence + np.log1p(-1 / ORDERS) - np.log(delta * ORDERS) / (ORDERS - 1)
    values = np.where(delta**2 + np.expm1(-divergence) > 0, 0, values)
    return np.asarray(np.maximum(values.min(axis=-1), 0))


@functools.cache
def _finite_sum() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Order, k = 2..order, where each order starts, and log binomials, in one flat row."""
    order = np.repeat(_WHOLE, _WHOLE - 1)
    starts = np.r_[0, np.cumsum(_WHOLE - 1)[:-1]]
    k = np.arange(order.size) - np.repeat(starts, _WHOLE - 1) + 2
    choose = special.gammaln(order + 1) - special.gammaln(k + 1) - special.gammaln(order - k + 1)
    return order, k, starts, choose


def _inverse_square(multiplier: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return 1 / np.square(multiplier)


def _plain_loss(rounds: Rounds) -> Float[np.ndarray, "C"]:
    """All plain rounds are one Gaussian with this inverse squared multiplier."""
    return np.sum(_inverse_square(rounds.plain) * rounds.repeats[:, None], axis=0)


def _levels(values: Float[np.ndarray, "V"], most: int) -> tuple[Float[np.ndarray, "L"], Int[np.ndarray, "V"]]:
    """Distinct finite values, rounded down to `most` of them; and where each value went (infinity: L)."""
    finite = np.isfinite(values)
    levels = np.unique(values[finite])
    if levels.size > most:
        positive = levels[levels > 0]
        levels = np.unique(np.r_[levels[0], positive[0], np.geomspace(positive[0], positive[-1], most)[1:]])
    index = np.full(values.shape, levels.size)
    index[finite] = np.searchsorted(levels, values[finite], side="right") - 1
    return levels, index


def _count_levels(rounds: Rounds, most: int) -> tuple[Float[np.ndarray, "L"], Float[np.ndarray, "C L"]]:
    """Distinct sampled multipliers, and how often each client meets each."""
    rows, columns = rounds.sampled.shape
    levels, index = _levels(rounds.sampled.ravel(), most)
    flat = index + (levels.size + 1) * np.tile(np.arange(columns), rows)
    weights = np.repeat(rounds.repeats, columns)
    counts = np.bincount(flat, weights, minlength=columns * (levels.size + 1)).reshape(columns, -1)
    return levels, counts[:, : levels.size]


def _gaussian_epsilon(loss: Float[np.ndarray, "C"], delta: float) -> Float[np.ndarray, "C"]:
    """The exact epsilon of Gaussian mechanisms with multipliers `loss ** -0.5`."""
    with np.errstate(divide="ignore"):
        levels, index = _levels(loss**-0.5, _RDP_LEVELS)
        values = [dp_accounting.get_epsilon_gaussian(level, delta) if level else math.inf for level in levels]
    return np.array([*values, 0.0])[index]


def _composed_epsilon(
    loss: float, levels: Float[np.ndarray, "L"], counts: Float[np.ndarray, "L"], rate: float, delta: float
) -> float:
    """PLD epsilon of one Gaussian and Poisson-sampled Gaussians, under zero-out only."""
    if not math.isfinite(loss):
        return math.inf
    events: list[dp_accounting.DpEvent] = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(float(level))), int(count)
        )
        for level, count in zip(levels, counts)
        if count
    ]
    if loss > 0:
        events.append(dp_accounting.GaussianDpEvent(loss**-0.5))
    relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = PLDAccountant(relation, _interval(levels, counts, rate))
    return float(accountant.compose(dp_accounting.ComposedDpEvent(events)).get_epsilon(delta))


def _interval(levels: Float[np.ndarray, "L"], counts: Float[np.ndarray, "L"], rate: float) -> float:
    """Grid of the loss: fine beside one round's loss, coarse enough for a few million points."""
    spread = np.minimum(rate * np.sqrt(np.expm1(np.minimum(levels**-2.0, 50))), 1 / levels)
    total = max(1e-12, math.sqrt(np.sum(counts * spread**2)))
    typical = total / math.sqrt(max(1, np.sum(counts)))
    longest = np.logaddexp(0, math.log(rate) + 10 / levels[0] + 0.5 / levels[0] ** 2)
    return float(max(min(0.05 * typical, 5e-4 * max(1.0, total)), longest / 2e6))


def _swapped_epsilon(swapped: Float[np.ndarray, "R"], rounds: Rounds, delta: float) -> float:
    """RDP epsilon under replace-one of sampling without replacement; it bounds zero-out."""
    levels, index = _levels(swapped, _PLD_COLUMNS)
    counts = np.bincount(index, rounds.repeats, minlength=levels.size)
    if not levels.size or not levels[0]:
        return math.inf if levels.size else 0.0
    events: list[dp_accounting.DpEvent] = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.SampledWithoutReplacementDpEvent(*rounds.cohort, dp_accounting.GaussianDpEvent(float(z))),
            int(count),
        )
        for z, count in zip(levels, counts)
    ]
    accountant = RdpAccountant(_SWAP_ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    return float(accountant.compose(dp_accounting.ComposedDpEvent(events)).get_epsilon(delta))
