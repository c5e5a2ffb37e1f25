"""Views of an observer of a ledger: Gaussian mechanisms, round by round.

- "upload": The server sees every upload and every cohort. A client that hides its data still
  uploads, so adjacency is replace-one, and the sensitivity is 2C. The multiplier is
  :math:`s_{t,i} / 2` in the client's rounds, where s is the client's noise over C. Cohorts do not
  depend on data, so the guarantee may condition on the cohorts that were drawn.
- "aggregate": Only the noisy sums are seen. Cohorts are hidden, unless the denominator shows them.
  Zero-out replaces the client's clipped update by 0. Its coin and its noise stay. Replace-one
  replaces the update by any other one. For noise that is independent over rounds and not Skellam
  noise, the guarantee does not depend on the coins drawn.
- "client": Another client, which sees the sums, and knows its own coins and noise.

Samplers account for amplification by hidden cohorts (`jaxfl.privacy.sampling`).
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from jaxfl.types import Ledger

Observer = Literal["aggregate", "upload", "client"]
"""Names of the observers that the docstring of this module describes."""

OPEN_UPLOADS = "the server sees uploads without noise"
"""Reason why uploads have no finite epsilon."""

ROUNDING = 1e-4
"""Relative tolerance of noise, which the engine draws, adds up and records in float32."""

_SUMMED = 6e-6
"""Most that rounding adds to a client's change of a sum, over C max w (`jaxfl.privacy.sums`)."""

_ENOUGH = 1e100
"""Largest multiplier, so that its square is finite. Larger ones are cut to it, which is safe."""


class Amplified(NamedTuple):
    """Rounds whose amplification only Rényi divergences account for."""

    multiplier: Float[np.ndarray, "T"]
    """Std of the noise over the sensitivity, by round or by entry of the view."""
    divergences: Callable[..., Float[np.ndarray, "orders"]]
    """Function from one such multiplier to the divergences at `accountants.ORDERS`.

    An argument `most` leaves out higher orders.
    """
    theorem: str
    stateless: bool = False
    """Whether the theorem holds only if clients keep no state."""


class View(NamedTuple):
    """Gaussian mechanisms by round and client.

    A multiplier is the std of the noise over the sensitivity to one client.

    Args:
        multiplier: Multiplier by round and client. Infinity exposes nothing.
        hidden: Whether the cohort of each round is hidden, so that Poisson sampling at `rate`
            amplifies.
        rate: Probability of participation in a hidden round.
        theorem: Theorem that proves the epsilon.
        why_infinite: Reason to give if epsilon is infinite.
        replaced: Whether accountants double the sensitivity, because replace-one may turn an update
            into its opposite. False for uploads, whose multipliers already include the factor.
        amplified: A second valid bound, by Rényi divergences alone. None if there is none.
        whole: Whether the single entry covers all rounds of the ledger.
        grows: Whether entries are not one per round, so that more rounds need another view.
        turn: Number of rounds that an entry covers, read only if `grows`. 0 means that a single
            entry covers all rounds.
        variance: Least variance of the noise in squared steps, if it is Skellam noise on a grid.
            Infinity stands for Gaussian noise.
    """

    multiplier: Float[np.ndarray, "T #C"]
    hidden: Bool[np.ndarray, "T"]
    rate: float
    theorem: str
    why_infinite: str
    replaced: bool = False
    amplified: Amplified | None = None
    whole: bool = False
    grows: bool = False
    turn: int = 1
    variance: float = math.inf

    def scaled(self, factor: float) -> "View":
        """Return the view with `factor` times the noise."""
        amplified = self.amplified
        if amplified is not None:
            amplified = amplified._replace(multiplier=factor * amplified.multiplier)
        return self._replace(multiplier=factor * self.multiplier, amplified=amplified)


class SumNoise(NamedTuple):
    """Noise on the sums of a ledger for one kind of observer, as variances over C^2.

    C is the clip bound. A client of weight w moves a sum by at most w C.
    """

    clients: int
    clients_add: Float[np.ndarray, "T #C"]
    """Noise of each client if it participates."""
    weights: Float[np.ndarray, "T #C"]
    floor: Float[np.ndarray, "T"]
    """Least total, to which the server tops the clients' noise up."""
    above: Float[np.ndarray, "T #C"]
    """Floor against the observer, which subtracts its own noise if it is a client."""
    hides_cohort: bool
    """Whether the denominator hides the cohort."""
    replaced: bool
    insider: bool
    """Whether the observer is another client."""

    @property
    def adjacency(self) -> str:
        """Name of the adjacency, replace-one or zero-out."""
        if self.replaced:
            return "replace-one"
        return "zero-out"


def plain_view(
    multiplier: Float[np.ndarray, "T #C"], theorem: str, why_infinite: str = "no noise on the sum"
) -> View:
    """Return the view of rounds without amplification."""
    return View(multiplier, np.zeros(len(multiplier), bool), 1.0, theorem, why_infinite)


def one_gaussian(value: float, theorem: str, why_infinite: str) -> View:
    """Return the view of all rounds of a run as one Gaussian mechanism of the multiplier `value`.

    0 means no noise at all. Infinity means that nothing is seen.
    """
    return plain_view(np.full((1, 1), value), theorem, why_infinite)._replace(whole=True)


def sum_noise(
    ledger: Ledger, *, hides_cohort: bool, replaced: bool = False, insider: bool = False
) -> SumNoise:
    """Return the noise on the sums of a ledger.

    Args:
        ledger: Rounds as they happened, or as planned.
        hides_cohort: Whether the denominator hides the cohort.
        replaced: Whether adjacency is replace-one. The default is zero-out.
        insider: Whether the observer is a client, which subtracts its own noise. Against each
            client, that is at most the largest noise of another.

    Raises:
        ValueError: The recorded noise of a round is below its floor, `noise_multiplier` times the
            largest weight.
    """
    weights = np.asarray(ledger.weights, np.float64)
    noise = np.square(weights * np.asarray(ledger.client_noise, np.float64))
    floor = np.square(np.asarray(ledger.noise_multiplier, np.float64) * weights.max(axis=1))
    added = np.square(np.asarray(ledger.server_noise, np.float64))
    recorded = brought(ledger.participants, noise) + added
    _check_floor(ledger, recorded, floor)
    clients = ledger.participants.shape[1]
    above = floor[:, None]
    insider = insider and clients > 1
    if insider:
        # An insider knows its own noise, which is the largest one at worst.
        # The factor keeps rounding from leaving too much noise.
        above = above - _largest_other(noise) * (1 + 1e-9)
    return SumNoise(clients, noise, weights, floor, above, hides_cohort, replaced, insider)


def _check_floor(
    ledger: Ledger,
    recorded: Float[np.ndarray, "T"],
    floor: Float[np.ndarray, "T"],
) -> None:
    """Require recorded variances that reach the floor in every round."""
    short = recorded < floor * (1 - ROUNDING)
    if short.any():
        round_ = int(np.argmax(short))
        raise ValueError(
            "server_noise must top the clients' noise up to noise_multiplier, got "
            f"{float(ledger.server_noise[round_])!r} in round {round_} with "
            f"noise_multiplier={float(ledger.noise_multiplier[round_])!r}. "
            "Record the noise that was drawn."
        )


def brought(
    participants: Bool[Any, "T C"], noise: Float[np.ndarray, "T #C"]
) -> Float[np.ndarray, "T"]:
    """Return, for each round, the sum of its participants' variances `noise`."""
    # A plan may have `Turns` as participants, which take memory, or raise an error, once read.
    if not np.any(noise):
        return np.zeros(len(noise))
    return np.einsum("tc,tc->t", participants, np.broadcast_to(noise, participants.shape))


def upload_view(ledger: Ledger) -> View:
    """Return the view of every upload of each client: multiplier s/2 in the client's rounds.

    s is `Ledger.client_noise`.
    """
    return shown_by(
        ledger,
        0.0,
        "Gaussian, replace-one (multiplier s/2), over the rounds that a client took part in",
    )


def shown_by(ledger: Ledger, release: Float[np.ndarray, "#T"] | float, theorem: str) -> View:
    """Return the view of uploads, each with a released number, as one Gaussian per round.

    If no client adds noise, a single entry covers all rounds.

    Args:
        ledger: Rounds as they happened, or as planned.
        release: Inverse square multiplier of the released number, by round or for all rounds. 0 if
            there is none.
        theorem: Theorem that proves the epsilon.
    """
    present = np.asarray(ledger.participants, bool)
    if not np.any(ledger.client_noise):
        # One row serves, which saves a table of rounds by perhaps a million clients.
        exposed = np.where(present.any(axis=0), 0.0, math.inf)
        return plain_view(exposed[None], theorem, OPEN_UPLOADS)
    # A cost of 0 gives the multiplier infinity, and an infinite one, without noise, gives 0.
    with np.errstate(divide="ignore"):
        multiplier = np.where(present, upload_costs(ledger, release) ** -0.5, math.inf)
    return plain_view(multiplier, theorem, OPEN_UPLOADS)


def upload_costs(
    ledger: Ledger, release: Float[np.ndarray, "#T"] | float = 0.0
) -> Float[np.ndarray, "T #C"]:
    """Return the sum of two inverse square multipliers: of an upload, and of a release with it.

    The upload's multiplier is s/2, as replace-one adjacency asks. The second term is `release`.
    """
    with np.errstate(divide="ignore"):
        uploads = (np.asarray(ledger.client_noise, np.float64) / 2) ** -2.0
    return uploads + np.reshape(np.asarray(release, np.float64), (-1, 1))


def multiplier(variance: np.ndarray, weights: np.ndarray) -> Float[np.ndarray, "T #C"]:
    """Return the std over the sensitivity to each client, or infinity if its weight is 0.

    A sum's rounding error grows with the largest weight, and is added to every smaller weight. For
    the largest weight the error is below a relative 1e-5.
    """
    largest = weights.max(axis=1, keepdims=True)
    weights = np.where(weights > 0, weights + _SUMMED * (largest - weights), 0.0)
    # `where` computes the quotients by weights of 0 too, which it then leaves out.
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.where(weights > 0, np.minimum(np.sqrt(variance) / weights, _ENOUGH), math.inf)


def _largest_other(noise: np.ndarray) -> np.ndarray:
    """Return, for each client, the largest noise of another. A single column holds for all."""
    if noise.shape[1] == 1:
        return noise
    ordered = np.sort(noise, axis=1)
    largest = ordered[:, -1:]
    # If several clients have the largest noise, the second largest equals it.
    second = ordered[:, -2:-1]
    return np.where(noise < largest, largest, second)
