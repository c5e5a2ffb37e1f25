r"""What an observer of a ledger sees: Gaussian mechanisms round by round.

- "upload": the server sees every upload and who took part. A client that hides its data still uploads, so the
  statement is replace-one, sensitivity 2C: multiplier :math:`s_{t,i} / 2` in the rounds the client took part in.
  Cohorts do not depend on data, so the statement may be made for the cohorts that were drawn.
- "aggregate": only the noisy sums are seen; who took part is hidden. Zero-out: the client's clipped update is
  replaced by 0, its coin and its noise stay. Replace-one: by any other update. Nothing here depends on the coins that
  were drawn.
- "client": another client, which sees the sums, and knows its own coins and the noise that it added itself.
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
        replaced: the absent update turns into its opposite, not into nothing: replace-one, twice the change.
        swapped: multipliers under replace-one of rounds that draw `cohort` without replacement, a second valid
            bound of either; None: it does not apply.
        cohort: number of clients, and how many of them `swapped` draws.
    """

    multiplier: Float[np.ndarray, "T #C"]
    hidden: Bool[np.ndarray, "T"]
    rate: float
    theorem: str
    silent: str
    replaced: bool = False
    swapped: Float[np.ndarray, "T"] | None = None
    cohort: tuple[int, int] = (1, 1)
    swapping: str = "sampling without replacement, replace-one"

    def scaled(self, factor: float) -> "View":
        """The view with `factor` times the noise."""
        swapped = None if self.swapped is None else factor * self.swapped
        return self._replace(multiplier=factor * self.multiplier, swapped=swapped)


def plain_view(multiplier: Float[np.ndarray, "T #C"], theorem: str, silent: str = "no noise on the sum") -> View:
    """Rounds without amplification."""
    return View(multiplier, np.zeros(len(multiplier), bool), 1.0, theorem, silent)


def aggregate_view(ledger: Ledger, mechanism: Mechanism, *, replaced: bool = False, insider: bool = False) -> View:
    r"""What the sums show: multipliers :math:`\sqrt{\max((z \max w)^2, \text{clients' noise})} / w_i`.

    Amplification by sampling needs noise that is the same whatever the cohort: where the clients' noise can
    exceed the floor, the variance of the sum tells who took part, and the round counts in full.

    Args:
        ledger: the rounds.
        mechanism: sampling and denominator.
        replaced: replace-one, in place of zero-out.
        insider: whoever looks is a client, and subtracts the noise that it added: at most the largest of the others'.
    """
    noise, weights, floor = _variances(ledger)
    clients, sampling = ledger.participants.shape[1], mechanism.sampling
    insider, adjacency = insider and clients > 1, "replace-one" if replaced else "zero-out"
    above, fair = floor[:, None], mechanism.denominator == "expected"
    if insider:
        above = above - _largest_other(noise) * (1 + 1e-9)  # nothing is left where one client adds all
    if isinstance(sampling, Poisson) and sampling.rate < 1:
        least = np.maximum(above, noise)
        hidden = (_most(noise, clients, clients) <= floor * (1 + ROUNDING)) & (least.min(axis=1) > 0) & fair
        view = _poisson_view(_multiplier(least, weights), hidden, sampling.rate, fair, adjacency)
        return view._replace(replaced=replaced)
    company = sampling.size if isinstance(sampling, FixedSize) else clients
    least = np.maximum(above, _least(noise, max(company - insider, 1), clients))
    view = plain_view(_multiplier(least, weights), f"Gaussian, {adjacency}")._replace(replaced=replaced)
    fair |= bool(np.all(weights == weights[:, :1]))
    steady = _most(noise, company, clients) <= floor * (1 + ROUNDING)
    even = noise.max(axis=1) <= noise.min(axis=1) * (1 + ROUNDING)
    if company < clients - insider and fair and np.all((steady | even) & (least.min(axis=1) > 0)):
        swapped = np.sqrt(least.min(axis=1)) / (2 * weights.max(axis=1))
        return view._replace(swapped=swapped, cohort=(clients - insider, company))
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


def _poisson_view(multiplier: np.ndarray, hidden: np.ndarray, rate: float, fair: bool, adjacency: str) -> View:
    """Sampled Gaussians where the sum hides the cohort; elsewhere a client counts on the floor and its own noise."""
    theorem = f"Poisson-sampled Gaussian, rate {rate:g}, {adjacency}"
    silent = "no noise on the sum"
    if not hidden.all():
        why = "the clients' noise can exceed the floor" if fair else "the denominator shows the cohort"
        rest = f"; {theorem} in {int(hidden.sum())} other rounds" if hidden.any() else ""
        theorem = f"Gaussian without amplification, {adjacency}, because {why}{rest}"
        silent = "no noise on the sum: under Poisson sampling a client can count only on the server's and its own"
    return View(multiplier, hidden, float(rate), theorem, silent)


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


def _largest_other(noise: np.ndarray) -> np.ndarray:
    """For each client, the most that one of the others adds."""
    if noise.shape[1] == 1:
        return noise
    ordered = np.sort(noise, axis=1)
    return np.where(noise < ordered[:, -1:], ordered[:, -1:], ordered[:, -2:-1])


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
