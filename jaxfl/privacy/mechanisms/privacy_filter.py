"""Clients' noise that follows from numbers they release, and a filter that stops who has spent the budget (ADP-PFL)."""

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
from jaxfl.privacy.mechanisms.gaussian import FIELDS, Cohort, Mechanism, Participant, Total, extremes
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
    r"""A number that each participant tells the server, and the clients' noise that follows from all of them.

    Client i's number, clipped to [low, high], with noise of std r times high - low, clipped again, is known to all
    from then on; before its first it is 0. From the next round on the client adds noise :math:`s_{t,i} = s_t / f_i`, f
    being the `shares` of all numbers.

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
    """What everyone knows of each client."""

    released: Float[Array, "C"]
    """The number that it released last; 0: none yet."""
    spent: Float[Array, "C"]
    """Sum of the inverse squares of the multipliers of all that it sent."""


@checked(**FIELDS, least_total=at_least_0)
@dataclasses.dataclass(frozen=True, eq=False)
class PrivacyFilter(Mechanism):
    r"""Uploads with the clients' own noise, until a client has spent its budget.

    A client takes part only while :math:`\sum_k m_k^{-2} \le m^{-2}` over the multipliers of all that it ever sends:
    s / 2 of an update, under replace-one, and r of a released number. Each cost is known before it is incurred, from
    what was released in earlier rounds, so that the sum is bounded whatever is released.

    Args:
        least_total: m; 0 stops nobody, and gives no guarantee.
        release: a number that each participant releases besides its update (`Message.extra`), of which the clients'
            noise follows; None: none.

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
            raise ValueError(f"noise='grid' with {type(self).__name__}: clients add the noise, give noise='float'")
        extremes("least_total", np.asarray(self.least_total, np.float64))
        if self.least_total and self.release is not None and not self.release.noise:
            raise ValueError(
                f"release={self.release!r}, least_total={self.least_total!r}: noise that follows from private numbers "
                "needs noise on them"
            )

    def init(self, key: Key[Array, "*S"], update: Callable[[], Tree], clients: int) -> Accounts:
        """Nothing released, nothing spent."""
        del key, update
        return Accounts(jnp.zeros(clients), jnp.zeros(clients))

    def draw(self, key: Key[Array, "*S"], memory: Accounts, index: Int[Array, ""], clients: int) -> Cohort:
        """Those who are drawn and can afford it; their noise follows from what was released."""
        drawn = super().draw(key, memory, index, clients)
        sampled, numbers, notes = drawn.sampled, drawn.numbers, drawn.notes
        if self.release is not None:
            noise = numbers.client_noise / self.release.shares(memory.released)
            numbers, notes = numbers._replace(client_noise=noise), {"release_noise": jnp.float32(self.release.noise)}
        if self.least_total:
            affords = memory.spent + self._costs(numbers.client_noise) <= self.least_total**-2 * (1 - ROUNDING)
            sampled &= affords
        return Cohort(sampled, numbers, notes)

    def contribute(
        self, key: Key[Array, "*S"], memory: Accounts, own: Participant, sent: Message, norm: Float[Array, ""]
    ) -> tuple[Tree, Tree]:
        """The noised update, and the released number."""
        number, release = sent.extra, self.release
        if (number is None) != (release is None):
            raise ValueError(f"message.extra={number!r} with release={release!r}: send a number where it is released")
        update, _ = super().contribute(key, memory, own, sent._replace(extra=None), norm)
        if release is None:
            return update, ()
        # Of a dropped update it is the least: that it was dropped is not for everyone to know.
        number = jnp.clip(jnp.where(jnp.isfinite(number), number, release.low), release.low, release.high)
        if release.noise:
            std = jnp.float32(release.noise * (release.high - release.low))
            number = jnp.clip(add_gaussian(derive(key, RELEASE, own.number), number, std), release.low, release.high)
        return update, number

    def aggregate(
        self, key: Key[Array, "*S"], memory: Accounts, cohort: Cohort, total: Total, mesh: Mesh
    ) -> tuple[Tree, Float[Array, ""], Accounts]:
        """The Gaussian mechanism's; what the participants released and spent is remembered."""
        aggregate, std, _ = super().aggregate(key, memory, cohort, total, mesh)
        released, spent = memory
        if self.release is not None:
            clients = jnp.nonzero(cohort.sampled, size=len(total.rows), fill_value=len(released))[0]
            released = released.at[clients].set(total.rows, mode="drop")
        if self.least_total:
            spent = spent + jnp.where(cohort.sampled, self._costs(cohort.numbers.client_noise), 0.0)
        return aggregate, std, Accounts(released, spent)

    def view(self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False) -> View:
        """The filter's own, for every observer: sums count as the uploads that they are made of."""
        view = super().view(ledger, observer, replaced=replaced, one_round=one_round)
        if view.whole:  # nothing is sent, or nothing is bounded
            return view
        if not self.least_total:
            stops_nobody = "the clients' noise follows from private numbers, and no filter bounds what it spends"
            return view if self.release is None else one_gaussian(0.0, "none", stops_nobody)
        self._check(ledger)
        if one_round:
            return shown_by(ledger, _beside(ledger), "Gaussian, replace-one (multiplier s/2)")
        return one_gaussian(self.least_total, _THEOREM, "a filter that stops nobody")

    def planned(self, clients: int, rounds: int) -> Ledger:
        """At most what each client can afford, with the full share of the budget for everyone."""
        plan = super().planned(clients, rounds)
        if self.release is not None:
            plan = plan._replace(notes={"release_noise": np.full(rounds, self.release.noise)})
        return plan._replace(participants=self._affordable(plan)) if self.least_total else plan

    def describe(self, ledger: Ledger) -> list[str]:
        """The filter and the noise on released numbers."""
        del ledger
        text = f"filter: all that a client sends adds up to a multiplier of at least {self.least_total:.4g}"
        if self.release is not None:
            text += f"; released numbers have noise {self.release.noise:.4g} of their range"
        return [text] if self.least_total else []

    def _costs(self, noise: Float[Array, "#C"]) -> Float[Array, "#C"]:
        """Inverse squares of the multipliers of an upload and of a released number, together."""
        return (2 / noise) ** 2 + (0.0 if self.release is None else self.release.noise**-2)

    def _affordable(self, ledger: Ledger) -> Bool[np.ndarray, "T C"]:
        """Who of a ledger's participants takes part under the filter."""
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
        """Require that all which each client sent adds up to a multiplier of at least `least_total`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            spent = np.where(ledger.participants, upload_costs(ledger, _beside(ledger)), 0.0).sum(axis=0)
            over = spent > np.float64(self.least_total) ** -2.0
        if over.any():
            client = int(np.argmax(spent))
            raise ValueError(
                f"least_total={self.least_total!r}, but all that client {client} sent adds up to "
                f"{spent[client] ** -0.5:.6g}: stop a client before that"
            )


def _beside(ledger: Ledger) -> Float[np.ndarray, "#T"]:
    """Inverse squares of the multipliers of released numbers; 0 where none are."""
    return np.asarray(ledger.notes.get("release_noise", [math.inf]), np.float64) ** -2.0
