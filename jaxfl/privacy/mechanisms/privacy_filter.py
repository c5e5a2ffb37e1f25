"""Client noise that follows from released numbers, and a filter of spent budgets (ADP-PFL)."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Key

from jaxfl._support.checks import at_least_0, check_positive, checked, up_to_infinity
from jaxfl.privacy.accounting.observers import (
    ROUNDING,
    Observer,
    View,
    one_gaussian,
    shown_by,
    upload_costs,
)
from jaxfl.privacy.mechanisms.gaussian import (
    FIELDS,
    Cohort,
    Contribution,
    Mechanism,
    Participant,
    Total,
    extremes,
    topped_up,
)
from jaxfl.privacy.noise import RELEASE, add_gaussian, derive
from jaxfl.types import Ledger, Message, Tree

_THEOREM = (
    "fully adaptive composition of all that a client sends, by a Rényi filter (Feldman and Zrnic "
    "2021) or one of Gaussian privacy (Smith and Thakurta 2022), replace-one, which bounds "
    "zero-out of the sums too"
)


@checked(low=at_least_0, high=up_to_infinity, noise=at_least_0)
@dataclasses.dataclass(frozen=True)
class Release:
    """Number that each participant releases, and the client noise that all numbers set.

    Client i's number is clipped to [low, high], gets noise of std r times high - low, and is
    clipped again. It is public from then on, and 0 before the first release. In every round the
    client adds noise :math:`s_{t,i} = s_t / f_i`, where f are the `shares` of the numbers that were
    public before the round.

    Args:
        shares: Function from the numbers `[C]` to each client's share of the round's budget `[C]`.
        low: Least number, above 0 if there is noise.
        high: Greatest number, finite if there is noise.
        noise: r, std over high - low.

    Raises:
        ValueError: `high` is not above `low`, or there is noise and `low` is 0 or `high` infinite.
    """

    shares: Callable[[Float[Array, "C"]], Float[Array, "C"]] = dataclasses.field(repr=False)
    low: float = 0.0
    high: float = math.inf
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_positive("low", self.low, zero=self.noise == 0)
        check_positive("high", self.high, infinite=self.noise == 0)
        if self.high <= self.low:
            raise ValueError(
                f"high must be above low={self.low!r}, got {self.high!r}. Give a larger number."
            )
        extremes("noise", np.asarray(self.noise, np.float64))


class Accounts(NamedTuple):
    """Public account of each client."""

    released: Float[Array, "C"]
    """Last released number, or 0 if there is none yet."""
    spent: Float[Array, "C"]
    """Sum of the inverse square multipliers of all messages. Without a filter it stays 0."""


@checked(**FIELDS, least_total=at_least_0)
@dataclasses.dataclass(frozen=True, eq=False)
class PrivacyFilter(Mechanism):
    r"""Noised uploads, until a client has spent its budget.

    A client takes part only while :math:`\sum_k m_k^{-2} \le m^{-2}` over the multipliers
    :math:`m_k` of all that it sends: s / 2 for an update, under replace-one, and r for a released
    number. Each cost is known in advance, from earlier releases, so the sum is bounded whatever is
    released.

    Args:
        least_total: m, the least multiplier of all that a client sends. 0 stops nobody. There is
            then no guarantee with a release, and that of `Mechanism` without one.
        release: Number that each participant releases in addition to its update (`Message.extra`),
            which sets the client noise. None releases no number.

    All other arguments are those of `Mechanism`.

    Raises:
        ValueError: `noise` is "grid", or there is a filter and the release has no noise.

    Guarantee: Replace-one for the observer of uploads, and so zero-out for that of sums. The
        epsilon is that of one Gaussian with multiplier m, by fully adaptive composition.
    References: ADP-PFL, eq. 12; Feldman and Zrnic, Individual Privacy Accounting via a Rényi
        Filter, NeurIPS 2021; Smith and Thakurta, Fully Adaptive Composition for Gaussian
        Differential Privacy, 2022.
    """

    least_total: float = 0.0
    release: Release | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise == "grid":
            raise ValueError(
                f"noise must be 'float' for {type(self).__name__}, whose clients add the noise, "
                f"got {self.noise!r}. Give noise='float'."
            )
        extremes("least_total", np.asarray(self.least_total, np.float64))
        if self.least_total and self.release is not None and not self.release.noise:
            raise ValueError(
                "release must have noise with least_total, because noise that follows from private "
                f"numbers needs noise on them, got release={self.release!r}, "
                f"least_total={self.least_total!r}. Give the release noise, or least_total=0."
            )

    @property
    def fixed_cohort(self) -> bool:
        """Whether the number of participants is fixed. A filter that stops clients varies it."""
        return super().fixed_cohort and not self.least_total

    def init(self, key: Key[Array, "*S"], update: Callable[[], Tree], clients: int) -> Accounts:
        """Return accounts with nothing released and nothing spent."""
        del key, update
        return Accounts(jnp.zeros(clients), jnp.zeros(clients))

    def draw(
        self, key: Key[Array, "*S"], memory: Accounts, index: Int[Array, ""], clients: int
    ) -> Cohort:
        """Draw clients, and return those that can afford the round.

        With a release their noise follows from past releases. Without a filter all can afford it.
        """
        drawn = super().draw(key, memory, index, clients)
        sampled = drawn.sampled
        numbers = drawn.numbers
        notes = drawn.notes
        if self.release is not None:
            # Shares read only numbers that are public already, so this noise reveals no more.
            noise = numbers.client_noise / self.release.shares(memory.released)
            numbers = numbers._replace(client_noise=noise)
            notes = {"release_noise": jnp.float32(self.release.noise)}
        if self.least_total:
            # The engine adds costs in single precision, and `_check` in double precision.
            budget = self.least_total**-2 * (1 - ROUNDING)
            sampled &= memory.spent + self._costs(numbers.client_noise) <= budget
        return Cohort(sampled, numbers, notes)

    def contribute(
        self,
        key: Key[Array, "*S"],
        memory: Accounts,
        client: Participant,
        sent: Message,
        norm: Float[Array, ""],
    ) -> Contribution:
        """Return the noised update and, with a release, the released number as `row`.

        The number is clipped, gets the release's noise, and is clipped again.

        Raises:
            ValueError: The message has a number without a release, or none with one.
        """
        number = sent.extra
        release = self.release
        if (number is None) != (release is None):
            raise ValueError(
                "message.extra must be a number if there is a release, and None if there is none, "
                f"got {number!r} with release={release!r}. Send a number exactly if it is released."
            )
        contribution = super().contribute(key, memory, client, sent._replace(extra=None), norm)
        if release is None:
            return contribution
        # A number that is not finite counts as the least one, which hides that it was not.
        number = jnp.where(jnp.isfinite(number), number, release.low)
        number = jnp.clip(number, release.low, release.high)
        if release.noise:
            std = jnp.float32(release.noise * (release.high - release.low))
            noisy = add_gaussian(derive(key, RELEASE, client.client_id), number, std)
            # Clipping after the noise is post-processing.
            number = jnp.clip(noisy, release.low, release.high)
        return contribution._replace(row=number)

    def aggregate(
        self, key: Key[Array, "*S"], memory: Accounts, cohort: Cohort, total: Total, mesh: Mesh
    ) -> tuple[Tree, Float[Array, ""], Accounts]:
        """Return the aggregate, the std of the server's noise, and the accounts after the round."""
        aggregate, std, _ = super().aggregate(key, memory, cohort, total, mesh)
        released, spent = memory
        if self.release is not None:
            # Rows are in the order of clients. `set` drops an index behind the last client.
            clients = jnp.nonzero(cohort.sampled, size=len(total.rows), fill_value=len(released))[0]
            released = released.at[clients].set(total.rows, mode="drop")
        # Costs follow from cohort and noise alone, whatever the updates were.
        if self.least_total:
            spent = spent + jnp.where(cohort.sampled, self._costs(cohort.numbers.client_noise), 0.0)
        return aggregate, std, Accounts(released, spent)

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """Return the filter's bound for every observer, because sums follow from uploads.

        For single rounds it is the view of a client's messages. Without a filter it is the view of
        `Mechanism`, or no bound if numbers are released.

        Raises:
            ValueError: A client's messages in the ledger exceed the filter's bound.
        """
        view = super().view(ledger, observer, replaced=replaced, one_round=one_round)
        # Such a view covers the entire run already: nothing is sent, or nothing is bounded.
        if view.whole:
            return view
        if not self.least_total:
            if self.release is None:
                return view
            reason = (
                "the clients' noise follows from private numbers, and no filter bounds what it "
                "spends"
            )
            return one_gaussian(0.0, "none", reason)
        self._check(ledger)
        if one_round:
            return shown_by(
                ledger, _release_costs(ledger), "Gaussian, replace-one (multiplier s/2)"
            )
        return one_gaussian(self.least_total, _THEOREM, "a filter that stops nobody")

    def planned(self, clients: int, rounds: int) -> Ledger:
        """Return a ledger with the rounds that each client can afford, or all without a filter.

        Every client has its full share of the budget.
        """
        plan = super().planned(clients, rounds)
        if self.release is not None:
            plan = plan._replace(notes={"release_noise": np.full(rounds, self.release.noise)})
        if not self.least_total:
            return plan
        return topped_up(plan._replace(participants=self._affordable(plan)))

    def describe(self, ledger: Ledger) -> list[str]:
        """Return a list of one sentence on filter and release, or an empty one without a filter."""
        del ledger
        if not self.least_total:
            return []
        text = (
            "filter: all that a client sends adds up to a multiplier of at least "
            f"{self.least_total:.4g}"
        )
        if self.release is not None:
            text += f", and released numbers have noise {self.release.noise:.4g} times their range"
        return [text]

    def _costs(self, noise: Float[Array, "#C"]) -> Float[Array, "#C"]:
        """Return the inverse square multipliers of an upload and a released number, summed."""
        of_release = 0.0
        if self.release is not None:
            of_release = self.release.noise**-2
        return (2 / noise) ** 2 + of_release

    def _affordable(self, ledger: Ledger) -> Bool[np.ndarray, "T C"]:
        """Return a table of those participants of a ledger that the filter admits."""
        present = np.asarray(ledger.participants, bool).copy()
        with np.errstate(divide="ignore", invalid="ignore"):
            costs = np.broadcast_to(upload_costs(ledger, _release_costs(ledger)), present.shape)
            budget = np.float64(self.least_total) ** -2.0 * (1 - ROUNDING)
            spent = np.zeros(present.shape[1])
            # What a client can afford depends on its earlier rounds.
            for row, cost in zip(present, costs):
                row &= spent + cost <= budget
                spent += np.where(row, cost, 0.0)
        return present

    def _check(self, ledger: Ledger) -> None:
        """Require that each client's messages compose to a multiplier of at least `least_total`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            costs = upload_costs(ledger, _release_costs(ledger))
            spent = np.where(ledger.participants, costs, 0.0).sum(axis=0)
            over = spent > np.float64(self.least_total) ** -2.0
        if over.any():
            client = int(np.argmax(spent))
            raise ValueError(
                f"least_total must bound all that a client sends, got {self.least_total!r}, but "
                f"all that client {client} sent adds up to {spent[client] ** -0.5:.6g}. "
                "Give the least_total of the run, or leave the client out of its last rounds."
            )


def _release_costs(ledger: Ledger) -> Float[np.ndarray, "#T"]:
    """Return the inverse square multipliers of released numbers, or 0 if there are none."""
    # Without a release the noise counts as infinite, whose inverse square is 0.
    return np.asarray(ledger.notes.get("release_noise", [math.inf]), np.float64) ** -2.0
