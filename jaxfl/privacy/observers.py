r"""What an observer of a ledger sees: Gaussian mechanisms round by round.

- "upload": the server sees every upload and every cohort. A client that hides its data still uploads, so adjacency is
  replace-one, sensitivity 2C: multiplier :math:`s_{t,i} / 2` in the client's rounds. Cohorts do not depend on data, so
  the guarantee may condition on those drawn.
- "aggregate": only the noisy sums are seen; cohorts are hidden. Zero-out: the client's clipped update is replaced by 0,
  its coin and its noise stay. Replace-one: by any other update. Nothing depends on the coins drawn.
- "client": another client, which sees the sums, and knows its own coins and noise.

Samplers account for amplification by hidden cohorts (`jaxfl.privacy.sampling`).
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxfl.types import Ledger

Observer = Literal["aggregate", "upload", "client"]

OPEN_UPLOADS = "the server sees uploads without noise"
ROUNDING = 1e-4
"""Relative: the engine draws, adds up and records in single precision."""
_SUMMED = 6e-6
"""Bound on what rounding lets any client change a sum by, over C max w (see `jaxfl.privacy.sums`)."""
_ENOUGH = 1e100
"""Larger multipliers count as this one, which is conservative: accountants square them."""


class Amplified(NamedTuple):
    """Rounds whose amplification only Rényi divergences account for."""

    multiplier: Float[np.ndarray, "T"]
    divergences: Callable[..., Float[np.ndarray, "orders"]]
    """Of one round, by multiplier, at `accountants.ORDERS`; with `most`, at those orders up to `most`."""
    theorem: str
    stateless: bool = False
    """Holds only where clients keep no state."""


class View(NamedTuple):
    """Gaussian mechanisms by round and client; multipliers are std over the sensitivity to one client.

    Args:
        multiplier: by round and client; infinity where nothing is exposed.
        hidden: rounds whose cohort is hidden: amplified by Poisson sampling at `rate`.
        rate: participation probability.
        theorem: what proves the epsilon.
        silent: why epsilon may be infinite.
        replaced: replace-one: the update turns into its opposite, not zero, at twice the sensitivity.
        amplified: a second valid bound, by Rényi divergences alone, or None.
        whole: the single entry covers all rounds of the ledger.
        grows: entries are not one per round: more rounds need another view.
        turn: rounds that an entry covers; 0: a single entry covers all rounds.
    """

    multiplier: Float[np.ndarray, "T #C"]
    hidden: Bool[np.ndarray, "T"]
    rate: float
    theorem: str
    silent: str
    replaced: bool = False
    amplified: Amplified | None = None
    whole: bool = False
    grows: bool = False
    turn: int = 1

    def scaled(self, factor: float) -> "View":
        """The view with `factor` times the noise."""
        amplified = self.amplified
        if amplified is not None:
            amplified = amplified._replace(multiplier=factor * amplified.multiplier)
        return self._replace(multiplier=factor * self.multiplier, amplified=amplified)


class SumNoise(NamedTuple):
    """The noise on the sums of a ledger, as variances over C^2, for one kind of observer."""

    clients: int
    clients_add: Float[np.ndarray, "T #C"]
    """Each client's noise if it participates."""
    weights: Float[np.ndarray, "T #C"]
    floor: Float[np.ndarray, "T"]
    """The total the server tops up to."""
    above: Float[np.ndarray, "T #C"]
    """The floor left against a client, which subtracts its own noise."""
    hides_cohort: bool
    """Whether the denominator hides the cohort."""
    replaced: bool
    insider: bool
    """Whether the observer is a client."""

    @property
    def adjacency(self) -> str:
        """Its name."""
        return "replace-one" if self.replaced else "zero-out"


def plain_view(
    multiplier: Float[np.ndarray, "T #C"], theorem: str, silent: str = "no noise on the sum"
) -> View:
    """Rounds without amplification."""
    return View(multiplier, np.zeros(len(multiplier), bool), 1.0, theorem, silent)


def one_gaussian(value: float, theorem: str, silent: str) -> View:
    """All rounds of a run as one Gaussian mechanism; 0: no noise at all, infinity: nothing is seen."""
    return plain_view(np.full((1, 1), value), theorem, silent)._replace(whole=True)


def sum_noise(
    ledger: Ledger, *, hides_cohort: bool, replaced: bool = False, insider: bool = False
) -> SumNoise:
    """The noise on the sums of a ledger, which must keep its own floor.

    Args:
        ledger: the rounds.
        hides_cohort: the denominator hides the cohort.
        replaced: replace-one, in place of zero-out.
        insider: the observer is a client that subtracts its own noise: at most the largest of the others'.
    """
    weights = np.asarray(ledger.weights, np.float64)
    noise = np.square(weights * np.asarray(ledger.client_noise, np.float64))
    floor = np.square(np.asarray(ledger.noise_multiplier, np.float64) * weights.max(axis=1))
    recorded = brought(ledger.participants, noise) + np.square(
        np.asarray(ledger.server_noise, np.float64)
    )
    short = recorded < floor * (1 - ROUNDING)
    if short.any():
        round_ = int(np.argmax(short))
        raise ValueError(
            f"server_noise={float(ledger.server_noise[round_])!r} in round {round_}: the recorded noise is below "
            f"noise_multiplier={float(ledger.noise_multiplier[round_])!r}; record the noise that was drawn"
        )
    clients, above = ledger.participants.shape[1], floor[:, None]
    insider = insider and clients > 1
    if insider:
        above = above - _largest_other(noise) * (1 + 1e-9)  # 0 if one client adds all noise
    return SumNoise(clients, noise, weights, floor, above, hides_cohort, replaced, insider)


def brought(
    participants: Bool[Any, "T C"], noise: Float[np.ndarray, "T #C"]
) -> Float[np.ndarray, "T"]:
    """What the participants' noise, as variances, adds up to in each round."""
    if not np.any(noise):
        return np.zeros(len(noise))
    return np.einsum("tc,tc->t", participants, np.broadcast_to(noise, participants.shape))


def upload_view(ledger: Ledger) -> View:
    """Every upload of each client: multiplier s/2 in its rounds."""
    return shown_by(
        ledger,
        0.0,
        "Gaussian, replace-one (multiplier s/2), over the rounds that a client took part in",
    )


def shown_by(ledger: Ledger, beside: Float[np.ndarray, "#T"] | float, theorem: str) -> View:
    """Uploads and a release beside them, as one Gaussian per round; `beside`: inverse square multiplier."""
    present = np.asarray(ledger.participants, bool)
    if not np.any(ledger.client_noise):  # one row, not rounds by a million clients
        return plain_view(np.where(present.any(axis=0), 0.0, math.inf)[None], theorem, OPEN_UPLOADS)
    with np.errstate(divide="ignore"):
        multiplier = np.where(present, upload_costs(ledger, beside) ** -0.5, math.inf)
    return plain_view(multiplier, theorem, OPEN_UPLOADS)


def upload_costs(
    ledger: Ledger, beside: Float[np.ndarray, "#T"] | float = 0.0
) -> Float[np.ndarray, "T #C"]:
    """Inverse square multipliers of an upload under replace-one and of a release beside it, summed."""
    with np.errstate(divide="ignore"):
        uploads = (np.asarray(ledger.client_noise, np.float64) / 2) ** -2.0
    return uploads + np.reshape(np.asarray(beside, np.float64), (-1, 1))


def multiplier(variance: np.ndarray, weights: np.ndarray) -> Float[np.ndarray, "T #C"]:
    """Return the std over the sensitivity to each client.

    Rounding of a sum is in units of the largest weight. A smaller one is charged with it; for the largest it is below
    a relative 1e-5.
    """
    weights = np.where(
        weights > 0, weights + _SUMMED * (weights.max(axis=1, keepdims=True) - weights), 0.0
    )
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.where(weights > 0, np.minimum(np.sqrt(variance) / weights, _ENOUGH), math.inf)


def _largest_other(noise: np.ndarray) -> np.ndarray:
    """For each client, the largest noise of another."""
    if noise.shape[1] == 1:
        return noise
    ordered = np.sort(noise, axis=1)
    return np.where(noise < ordered[:, -1:], ordered[:, -1:], ordered[:, -2:-1])
