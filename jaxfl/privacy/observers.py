r"""What an observer of a ledger sees: Gaussian mechanisms round by round.

- "upload": the server sees every upload and who took part. A client that hides its data still uploads, so the
  statement is replace-one, sensitivity 2C: multiplier :math:`s_{t,i} / 2` in the rounds the client took part in.
  Cohorts do not depend on data, so the statement may be made for the cohorts that were drawn.
- "aggregate": only the noisy sums are seen; who took part is hidden. Zero-out: the client's clipped update is
  replaced by 0, its coin and its noise stay. Nothing here depends on the coins that were drawn.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxfl.privacy.mechanism import ROUNDING, FixedSize, Mechanism, Poisson
from jaxfl.types import Ledger

OPEN_UPLOADS = "the server sees uploads without noise"
_ENOUGH = 1e100
"""Larger multipliers are taken for this one, which is the more cautious: accountants square them."""


class View(NamedTuple):
    """Gaussian mechanisms by round and client; multipliers are std over the change that one client's absence makes.

    Args:
        multiplier: by round and client; infinity where the client risks nothing.
        hidden: rounds whose cohort is hidden: amplified by Poisson sampling at `rate`.
        rate: probability of taking part.
        theorem: what the epsilon rests on.
        silent: why it is infinite where it is.
        swapped: multipliers under replace-one of rounds that draw `cohort` without replacement, a second valid
            bound; None: it does not apply.
        cohort: number of clients, and how many of them `swapped` draws.
    """

    multiplier: Float[np.ndarray, "T #C"]
    hidden: Bool[np.ndarray, "T"]
    rate: float
    theorem: str
    silent: str
    swapped: Float[np.ndarray, "T"] | None = None
    cohort: tuple[int, int] = (1, 1)

    def scaled(self, factor: float) -> "View":
        """The view with `factor` times the noise."""
        swapped = None if self.swapped is None else factor * self.swapped
        return self._replace(multiplier=factor * self.multiplier, swapped=swapped)


def plain_view(multiplier: Float[np.ndarray, "T #C"], theorem: str, silent: str = "no noise on the sum") -> View:
    """Rounds without amplification."""
    return View(multiplier, np.zeros(len(multiplier), bool), 1.0, theorem, silent)


def aggregate_view(ledger: Ledger, mechanism: Mechanism) -> View:
    r"""What the sums show: multipliers :math:`\sqrt{\max((z \max w)^2, \text{clients' noise})} / w_i`.

    Amplification by sampling needs noise that is the same whatever the cohort: where the clients' noise can
    exceed the floor, the variance of the sum tells who took part, and the round counts in full.
    """
    noise, weights, floor = _variances(ledger)
    clients, sampling = ledger.participants.shape[1], mechanism.sampling
    if isinstance(sampling, Poisson) and sampling.rate < 1:
        return _poisson_view(noise, weights, floor, clients, sampling.rate, mechanism.denominator == "expected")
    company = sampling.size if isinstance(sampling, FixedSize) else clients
    least = np.maximum(floor[:, None], _least(noise, company, clients))
    view = plain_view(_multiplier(least, weights), "Gaussian, zero-out")
    fair = mechanism.denominator == "expected" or bool(np.all(weights == weights[:, :1]))
    steady = _most(noise, company, clients) <= floor * (1 + ROUNDING)
    even = noise.max(axis=1) <= noise.min(axis=1) * (1 + ROUNDING)
    if company < clients and fair and np.all((steady | even) & (least.min(axis=1) > 0)):
        swapped = np.sqrt(least.min(axis=1)) / (2 * weights.max(axis=1))
        theorem = "smaller of: Gaussian, zero-out; sampling without replacement, replace-one (RDP only)"
        return view._replace(swapped=swapped, cohort=(clients, company), theorem=theorem)
    return view


def upload_view(ledger: Ledger, mechanism: Mechanism) -> View:
    """What each upload shows: multiplier s/2 in the rounds that a client took part in, and r of a released number."""
    del mechanism
    present = np.asarray(ledger.participants, bool)
    with np.errstate(divide="ignore"):
        multiplier = np.where(present, _costs(ledger) ** -0.5, math.inf)
    theorem = "Gaussian, replace-one (multiplier s/2), over the rounds that a client took part in"
    return plain_view(multiplier, theorem, OPEN_UPLOADS)


def affordable(ledger: Ledger, least_total: float) -> Bool[np.ndarray, "T C"]:
    """Who of a ledger's participants takes part under a filter (see `Mechanism.least_total`)."""
    present = np.asarray(ledger.participants, bool).copy()
    with np.errstate(divide="ignore", invalid="ignore"):
        costs = np.broadcast_to(_costs(ledger), present.shape)
        budget = np.float64(least_total) ** -2.0 * (1 - ROUNDING)
        spent = np.zeros(present.shape[1])
        for row, cost in zip(present, costs):
            row &= spent + cost <= budget
            spent += np.where(row, cost, 0.0)
    return present


def check_filter(ledger: Ledger, least_total: float) -> None:
    """Require that all which each client sent adds up to a multiplier of at least `least_total`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        spent = np.where(ledger.participants, _costs(ledger), 0.0).sum(axis=0)
        over = spent > np.float64(least_total) ** -2.0
    if over.any():
        client = int(np.argmax(spent))
        raise ValueError(
            f"least_total={least_total!r}, but all that client {client} sent adds up to {spent[client] ** -0.5:.6g}: "
            "stop a client before that"
        )


def _costs(ledger: Ledger) -> Float[np.ndarray, "T #C"]:
    """Inverse squares of the multipliers of an upload under replace-one and of a released number, together."""
    with np.errstate(divide="ignore"):
        released = np.asarray(ledger.release_noise, np.float64)[:, None] ** -2.0
        return (np.asarray(ledger.client_noise, np.float64) / 2) ** -2.0 + released


def _poisson_view(
    noise: np.ndarray, weights: np.ndarray, floor: np.ndarray, clients: int, rate: float, fair: bool
) -> View:
    """Sampled Gaussians where the sum hides the cohort; elsewhere a client counts on the floor and its own noise."""
    hidden = (_most(noise, clients, clients) <= floor * (1 + ROUNDING)) & (floor > 0) & fair
    theorem = f"Poisson-sampled Gaussian, rate {rate:g}, zero-out"
    silent = "no noise on the sum"
    if not hidden.all():
        why = "the clients' noise can exceed the floor" if fair else "the denominator shows the cohort"
        rest = f"; {theorem} in {int(hidden.sum())} other rounds" if hidden.any() else ""
        theorem = f"Gaussian without amplification, zero-out, because {why}{rest}"
        silent = "no noise on the sum: under Poisson sampling a client can count only on the server's and its own"
    return View(_multiplier(np.maximum(floor[:, None], noise), weights), hidden, float(rate), theorem, silent)


def _multiplier(variance: np.ndarray, weights: np.ndarray) -> Float[np.ndarray, "T #C"]:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.where(weights > 0, np.minimum(np.sqrt(variance) / weights, _ENOUGH), math.inf)


def _variances(ledger: Ledger) -> tuple[Float[np.ndarray, "T C1"], Float[np.ndarray, "T C2"], Float[np.ndarray, "T"]]:
    """The clients' noise variances on the sum, weights, and floor, over C^2; the ledger must keep its own floor."""
    weights = np.asarray(ledger.weights, np.float64)
    noise = np.square(weights * np.asarray(ledger.client_noise, np.float64))
    floor = np.square(np.asarray(ledger.noise_multiplier, np.float64) * weights.max(axis=1))
    present = np.einsum("tc,tc->t", np.asarray(ledger.participants), np.broadcast_to(noise, ledger.participants.shape))
    recorded = present + np.square(np.asarray(ledger.server_noise, np.float64))
    short = recorded < floor * (1 - ROUNDING)
    if short.any():
        round_ = int(np.argmax(short))
        raise ValueError(
            f"server_noise={float(ledger.server_noise[round_])!r} in round {round_}: the recorded noise is below "
            f"noise_multiplier={float(ledger.noise_multiplier[round_])!r}; record the noise that was drawn"
        )
    return noise, weights, floor


def _least(noise: np.ndarray, company: int, clients: int) -> np.ndarray:
    """The least total noise of a cohort of `company` clients that contains client i."""
    if noise.shape[1] == 1:
        return noise * min(company, clients)
    ordered = np.sort(noise, axis=1)
    return ordered[:, : company - 1].sum(axis=1, keepdims=True) + np.maximum(noise, ordered[:, company - 1 : company])


def _most(noise: np.ndarray, company: int, clients: int) -> np.ndarray:
    """The most total noise of a cohort of `company` clients."""
    if noise.shape[1] == 1:
        return noise[:, 0] * min(company, clients)
    return np.sort(noise, axis=1)[:, -company:].sum(axis=1)
