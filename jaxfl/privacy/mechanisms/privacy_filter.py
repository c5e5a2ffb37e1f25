"""Client noise set by released numbers, and a filter that stops clients with a spent budget (ADP-PFL)."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Key

from jaxfl._validate import at_least_0, check_positive, checked, up_to_infinity
from jaxfl.privacy.mechanisms.gaussian import (
    FIELDS,
    Cohort,
    Mechanism,
    Participant,
    Total,
    extremes,
    topped_up,
)
from jaxfl.privacy.noise import RELEASE, add_gaussian, derive
from jaxfl.privacy.observers import ROUNDING, Observer, View, one_gaussian, shown_by, upload_costs
from jaxfl.types import Ledger, Message, Tree

_THEOREM = (
    "fully adaptive composition of all that a client sends, by a Rényi filter (Feldman and Zrnic 2021) or one of "
    "Gaussian privacy (Smith and Thakurta 2022), replace-one, which bounds zero-out of the sums too"
)


@checked(low=at_least_0, high=up_to_infinity, noise=at_least_0)
@dataclasses.dataclass(frozen=True)
class Release:
    r"""A number that each participant releases, and the client noise set by all numbers.

    Client i's number, clipped to [low, high], with noise of std r times high - low, clipped again, is public from then
    on; before the first it is 0. From the next round on the client adds noise :math:`s_{t,i} = s_t / f_i`, with f the
    `shares` of all numbers.

    Args:
        shares: from the numbers `[C]` to the share of the round's budget that each client gets `[C]`.
        low: least number, above 0.
        high: greatest number; with noise, finite.
        noise: r, std over high - low.
    """

    shares: Callable[[Float[Array, "C"]], Float[Array, "C"]] = dataclasses.field(repr=False)
    low: float = 0.0
    high: float = math.inf
    noise: float = 0.0

    def __post_init__(self) -> None:
        check_positive("low", self.low, zero=self.noise == 0)
        check_positive("high", self.high, infinite=self.noise == 0)
        if self.high <= self.low:
            raise ValueError(f"high={self.high!r}: give a number above low={self.low!r}")
        extremes("noise", np.asarray(self.noise, np.float64))


class Accounts(NamedTuple):
    """Each client's public account."""

    released: Float[Array, "C"]
    """The last released number; 0: none yet."""
    spent: Float[Array, "C"]
    """Sum of the inverse square multipliers of all messages."""


@checked(**FIELDS, least_total=at_least_0)
@dataclasses.dataclass(frozen=True, eq=False)
class PrivacyFilter(Mechanism):
    r"""Noised uploads, until a client has spent its budget.

    A client takes part only while :math:`\sum_k m_k^{-2} \le m^{-2}` over the multipliers of all that it sends: s / 2
    for an update, under replace-one, and r for a released number. Each cost is known in advance, from earlier releases,
    so the sum is bounded whatever is released.

    Args:
        least_total: m; 0 stops nobody, and gives no guarantee.
        release: a number that each participant releases besides its update (`Message.extra`), which sets the client
            noise; None: none.

    Guarantee: replace-one for the observer of uploads, and so zero-out for that of sums: the epsilon of one Gaussian
        with multiplier m, by fully adaptive composition.
    Source: ADP-PFL, eq. 12; Feldman and Zrnic, Individual Privacy Accounting via a Rényi Filter, NeurIPS 2021; Smith
        and Thakurta, Fully Adaptive Composition for Gaussian Differential Privacy, 2022.
    """

    least_total: float = 0.0
    release: Release | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise == "grid":
            raise ValueError(
                f"noise='grid' with {type(self).__name__}: clients add the noise, give noise='float'"
            )
        extremes("least_total", np.asarray(self.least_total, np.float64))
        if self.least_total and self.release is not None and not self.release.noise:
            raise ValueError(
                f"release={self.release!r}, least_total={self.least_total!r}: noise that follows from private numbers "
                "needs noise on them"
            )

    @property
    def covers_canaries(self) -> bool:
        """Not where it stops clients, and their noise with them."""
        return super().covers_canaries and not self.least_total

    def init(self, key: Key[Array, "*S"], update: Callable[[], Tree], clients: int) -> Accounts:
        """Nothing released, nothing spent."""
        del key, update
        return Accounts(jnp.zeros(clients), jnp.zeros(clients))

    def draw(
        self, key: Key[Array, "*S"], memory: Accounts, index: Int[Array, ""], clients: int
    ) -> Cohort:
        """The drawn clients that can afford the round, with noise set by past releases."""
        drawn = super().draw(key, memory, index, clients)
        sampled, numbers, notes = drawn.sampled, drawn.numbers, drawn.notes
        if self.release is not None:
            noise = numbers.client_noise / self.release.shares(memory.released)
            numbers, notes = (
                numbers._replace(client_noise=noise),
                {"release_noise": jnp.float32(self.release.noise)},
            )
        if self.least_total:
            sampled &= memory.spent + self._costs(numbers.client_noise) <= self.least_total**-2 * (
                1 - ROUNDING
            )
        return Cohort(sampled, numbers, notes)

    def contribute(
        self,
        key: Key[Array, "*S"],
        memory: Accounts,
        client: Participant,
        sent: Message,
        norm: Float[Array, ""],
    ) -> tuple[Tree, Tree]:
        """The noised update, and the released number."""
        number, release = sent.extra, self.release
        if (number is None) != (release is None):
            raise ValueError(
                f"message.extra={number!r} with release={release!r}: send a number where it is released"
            )
        update, _ = super().contribute(key, memory, client, sent._replace(extra=None), norm)
        if release is None:
            return update, ()
        # A dropped update releases the least number, which hides that it was dropped.
        number = jnp.clip(
            jnp.where(jnp.isfinite(number), number, release.low), release.low, release.high
        )
        if release.noise:
            std = jnp.float32(release.noise * (release.high - release.low))
            number = jnp.clip(
                add_gaussian(derive(key, RELEASE, client.number), number, std),
                release.low,
                release.high,
            )
        return update, number

    def aggregate(
        self, key: Key[Array, "*S"], memory: Accounts, cohort: Cohort, total: Total, mesh: Mesh
    ) -> tuple[Tree, Float[Array, ""], Accounts]:
        """Also remember what the participants released and spent."""
        aggregate, std, _ = super().aggregate(key, memory, cohort, total, mesh)
        released, spent = memory
        if self.release is not None:
            clients = jnp.nonzero(cohort.sampled, size=len(total.rows), fill_value=len(released))[0]
            released = released.at[clients].set(total.rows, mode="drop")
        if self.least_total:
            spent = spent + jnp.where(cohort.sampled, self._costs(cohort.numbers.client_noise), 0.0)
        return aggregate, std, Accounts(released, spent)

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """The filter's bound, for every observer: sums count as their uploads."""
        view = super().view(ledger, observer, replaced=replaced, one_round=one_round)
        if view.whole:  # nothing is sent, or nothing is bounded
            return view
        if not self.least_total:
            reason = "the clients' noise follows from private numbers, and no filter bounds what it spends"
            return view if self.release is None else one_gaussian(0.0, "none", reason)
        self._check(ledger)
        if one_round:
            return shown_by(ledger, _beside(ledger), "Gaussian, replace-one (multiplier s/2)")
        return one_gaussian(self.least_total, _THEOREM, "a filter that stops nobody")

    def planned(self, clients: int, rounds: int) -> Ledger:
        """At most what each client can afford, with everyone's full budget share."""
        plan = super().planned(clients, rounds)
        if self.release is not None:
            plan = plan._replace(notes={"release_noise": np.full(rounds, self.release.noise)})
        return (
            topped_up(plan._replace(participants=self._affordable(plan)))
            if self.least_total
            else plan
        )

    def describe(self, ledger: Ledger) -> list[str]:
        """The filter and the noise on released numbers."""
        del ledger
        text = f"filter: all that a client sends adds up to a multiplier of at least {self.least_total:.4g}"
        if self.release is not None:
            text += f"; released numbers have noise {self.release.noise:.4g} of their range"
        return [text] if self.least_total else []

    def _costs(self, noise: Float[Array, "#C"]) -> Float[Array, "#C"]:
        """Inverse square multipliers of an upload and a released number, summed."""
        return (2 / noise) ** 2 + (0.0 if self.release is None else self.release.noise**-2)

    def _affordable(self, ledger: Ledger) -> Bool[np.ndarray, "T C"]:
        """A ledger's participants that the filter admits."""
        present = np.asarray(ledger.participants, bool).copy()
        with np.errstate(divide="ignore", invalid="ignore"):
            costs = np.broadcast_to(upload_costs(ledger, _beside(ledger)), present.shape)
            budget = np.float64(self.least_total) ** -2.0 * (1 - ROUNDING)
            spent = np.zeros(present.shape[1])
            for row, cost in zip(present, costs):
                row &= spent + cost <= budget
                spent += np.where(row, cost, 0.0)
        return present

    def _check(self, ledger: Ledger) -> None:
        """Require that each client's messages compose to a multiplier of at least `least_total`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            spent = np.where(ledger.participants, upload_costs(ledger, _beside(ledger)), 0.0).sum(
                axis=0
            )
            over = spent > np.float64(self.least_total) ** -2.0
        if over.any():
            client = int(np.argmax(spent))
            raise ValueError(
                f"least_total={self.least_total!r}, but all that client {client} sent adds up to "
                f"{spent[client] ** -0.5:.6g}: stop a client before that"
            )


def _beside(ledger: Ledger) -> Float[np.ndarray, "#T"]:
    """Inverse square multipliers of released numbers; 0 if there are none."""
    return np.asarray(ledger.notes.get("release_noise", [math.inf]), np.float64) ** -2.0
