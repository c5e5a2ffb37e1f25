"""Epsilon of what an observer sees, by dp-accounting: Rényi divergences (RDP) or privacy loss distributions (PLD).

Where there are many kinds of rounds or clients, multipliers are rounded down, so that no epsilon is too small.
"""

import math
from collections.abc import Iterator
from typing import Literal

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from jaxtyping import Float, Int

from jaxfl.privacy.observers import View

Accountant = Literal["rdp", "pld"]

ORDERS = [*range(2, 65), 76, 91, 108, 128, 152, 181, 215, 256, 512, 1024]
"""Rényi orders under sampling: whole, because at fractional ones the sums may not converge; few, because an order
costs as many terms. The last digits of an epsilon depend on them."""

_PLAIN_ORDERS = (1 + np.geomspace(0.01, 1e5, 256)).tolist()  # without sampling: a closed form at every order

_MOST_TOTALS, _MOST_LEVELS, _MOST_SWAPPED, _MOST_WORK = 256, 64, 8, 64  # a total costs 1 ms, a level 15, a swap 300


def client_epsilons(view: View, accountant: Accountant, delta: float, repeats: int = 1) -> Float[np.ndarray, "#C"]:
    """Epsilon of each client when the view happens `repeats` times."""
    kinds, kind_of_client = _group_clients(view)
    evaluate = rdp_epsilon if accountant == "rdp" else pld_epsilon
    values = np.array([evaluate(float(kind[0]), kind[1:], view.rate, delta, repeats) for kind in kinds.T])
    if view.swapped is not None and accountant == "rdp":
        values = np.minimum(values, _swapped_epsilon(view, delta, repeats))
    return values[kind_of_client]


def worst_rounds(view: View) -> Iterator[View]:
    """The worst round of the worst client alone, of those that sampling amplifies and of those that it does not."""
    for hidden in np.unique(view.hidden):
        least = view.multiplier[view.hidden == hidden].min(keepdims=True)
        swapped = None if view.swapped is None else view.swapped.min(keepdims=True)
        yield view._replace(multiplier=least, hidden=np.array([hidden]), swapped=swapped)


def rdp_epsilon(plain: float, sampled: Float[np.ndarray, "R"], rate: float, delta: float, repeats: int = 1) -> float:
    """RDP epsilon under zero-out of one Gaussian and Poisson-sampled Gaussians."""
    accountant = rdp_accountant(sampled=sampled.size > 0)
    return float(accountant.compose(gaussians(plain, sampled, rate), repeats).get_epsilon(delta))


def pld_epsilon(plain: float, sampled: Float[np.ndarray, "R"], rate: float, delta: float, repeats: int = 1) -> float:
    """PLD epsilon under zero-out of one Gaussian and Poisson-sampled Gaussians; exact for the Gaussian alone."""
    if plain == 0 or not _levels(sampled):
        with np.errstate(divide="ignore"):  # it takes the logarithm of 0 where delta is far from reached
            return float(dp_accounting.get_epsilon_gaussian(plain / math.sqrt(repeats), delta))
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, _interval(plain, sampled, rate, repeats))
    return float(accountant.compose(gaussians(plain, sampled, rate), repeats).get_epsilon(delta))


def rdp_accountant(sampled: bool) -> RdpAccountant:
    """An empty accountant under zero-out."""
    return RdpAccountant(ORDERS if sampled else _PLAIN_ORDERS, NeighboringRelation.REPLACE_SPECIAL)


def gaussians(plain: float, sampled: Float[np.ndarray, "R"], rate: float) -> DpEvent:
    """One Gaussian, and a Poisson-sampled one per entry of `sampled`; multipliers of infinity are nothing."""
    events: list[DpEvent] = [GaussianDpEvent(plain)] if math.isfinite(plain) else []
    for level, count in _levels(sampled):
        events.append(
            dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(rate, GaussianDpEvent(level)), count)
        )
    return dp_accounting.ComposedDpEvent(events)


def total_multiplier(multiplier: Float[np.ndarray, "R *C"]) -> Float[np.ndarray, "*C"]:
    r"""All plain rounds are one Gaussian: :math:`z^{-2} = \sum_t z_t^{-2}`."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(np.sum(multiplier**-2.0, axis=0) ** -0.5)


def round_down(values: Float[np.ndarray, "..."], most: int = _MOST_LEVELS) -> Float[np.ndarray, "..."]:
    """Round down to at most `most` levels, besides 0 and infinity; the least stays exact."""
    finite = (values > 0) & (values < math.inf)
    if np.unique(values[finite]).size <= most:
        return values
    levels = np.geomspace(values[finite].min(), values[finite].max(), most)
    rounded = values.copy()
    rounded[finite] = levels[np.searchsorted(levels, values[finite] * (1 + 1e-9), side="right") - 1]
    return rounded


def _group_clients(view: View) -> tuple[Float[np.ndarray, "R K"], Int[np.ndarray, "#C"]]:
    """Distinct clients as columns (plain rounds in total, then each sampled round), and the column of each client.

    Where sampled rounds make them too many, one column that is at least as exposed as every client.
    """
    plain = round_down(total_multiplier(view.multiplier[~view.hidden]), _MOST_TOTALS)
    sampled = view.multiplier[view.hidden]
    kinds, kind_of_client = np.unique(np.vstack([plain, round_down(sampled)]), axis=1, return_inverse=True)
    if sum(len(_levels(kind[1:])) for kind in kinds.T) > _MOST_WORK:
        worst = np.r_[plain.min(), round_down(sampled.min(axis=1))]
        return worst[:, None], np.zeros(1, int)
    return kinds, kind_of_client.reshape(-1)


def _levels(values: Float[np.ndarray, "R"]) -> list[tuple[float, int]]:
    """Distinct finite values and how often each occurs."""
    levels, counts = np.unique(values[values < math.inf], return_counts=True)
    return list(zip(levels.tolist(), counts.tolist()))


def _interval(plain: float, sampled: Float[np.ndarray, "R"], rate: float, repeats: int) -> float:
    """Grid of the privacy loss: fine beside one round's loss, at most about a million points for the longest."""
    spread = rate / sampled[sampled < math.inf]
    total = math.sqrt(repeats * (np.sum(spread**2) + plain**-2.0))
    least = min(plain, sampled.min())
    longest = 10 / least + 0.5 / least**2
    return float(max(min(0.05 * math.sqrt(np.mean(spread**2)), 5e-4 * max(1.0, total)), longest / 1e6))


def _swapped_epsilon(view: View, delta: float, repeats: int) -> float:
    """RDP epsilon under replace-one of sampling without replacement; it bounds zero-out."""
    assert view.swapped is not None
    draws: list[DpEvent] = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.SampledWithoutReplacementDpEvent(*view.cohort, GaussianDpEvent(level)), count
        )
        for level, count in _levels(round_down(view.swapped, _MOST_SWAPPED))
    ]
    accountant = RdpAccountant(ORDERS, NeighboringRelation.REPLACE_ONE)
    return float(accountant.compose(dp_accounting.ComposedDpEvent(draws), repeats).get_epsilon(delta))
