"""The mechanism: how updates are bounded, noised and averaged, and what that guarantees.

`Mechanism` is the Gaussian mechanism, and its methods are the hooks that the engine calls: another mechanism is a
subclass in a file of its own that replaces some of them. In a round,

    memory -> draw -> for each participant: bound, contribute -> sum -> aggregate -> aggregate, memory

where the memory is the mechanism's state. The engine carries it beside the server's state through both stores, sweeps,
checkpoints and several processes. `view` says what an observer of the ledger learns, next to the code of the noise it
accounts for.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Key

from jaxfl._validate import (
    Check,
    check_count,
    check_noise,
    check_numbers,
    checked,
    show,
    traced,
    up_to_infinity,
)
from jaxfl.privacy.clip import clip, round_within
from jaxfl.privacy.noise import (
    CLIENT_NOISE,
    SAMPLE,
    SERVER_NOISE,
    STEPS,
    add_gaussian,
    add_grid_noise,
    derive,
)
from jaxfl.privacy.observers import Observer, View, brought, one_gaussian, sum_noise, upload_view
from jaxfl.privacy.sampling import FixedSize, Full, MinSeparation, Sampling
from jaxfl.privacy.sums import add, narrow, widen
from jaxfl.types import Ledger, Message, Number, Tree

_LEAST_ON_GRID = 0.01
_MOST_NOISE = 1e8

_SMALL, _LARGE = 2.0**-63, 2.0**50
"""Single precision holds squares of numbers between, products of any two, and sums of 10^7 of these."""
_LEAST_CLIP = 1e-10
"""Smaller bounds clip nothing: the squared coordinates of longer updates vanish."""


class RoundNumbers(NamedTuple):
    """The mechanism's public numbers in one round."""

    noise_multiplier: Float[Array, ""]
    client_noise: Float[Array, "#C"]
    weights: Float[Array, "#C"]
    denominator: Float[Array, ""]


class Cohort(NamedTuple):
    """Who takes part in a round, the round's numbers, and what the mechanism notes in the ledger."""

    sampled: Bool[Array, "C"]
    numbers: RoundNumbers
    notes: dict[str, Float[Array, ""]] = {}  # noqa: RUF012 (never written to)
    carried: Tree = ()
    """From the mechanism's `draw` to its `aggregate`."""


class Participant(NamedTuple):
    """A participant, as the mechanism sees it."""

    number: Int[Array, ""]
    """The client's number."""
    noise: Float[Array, ""]
    """Std of its noise over C."""


class Total(NamedTuple):
    """What the participants of a round send."""

    update: Tree
    """Sum of weighted contributions, in units of `Mechanism.unit`; integers under noise."""
    variance: Float[Array, ""]
    """Of the clients' noise on the sum, over C^2."""
    weight: Float[Array, ""]
    rows: Tree
    """A row per participant, [most, ...] ordered by number; zeros beyond."""


FIELDS: dict[str, Check] = {
    "clip": up_to_infinity,
    "noise_multiplier": check_noise,
    "client_noise": functools.partial(check_noise, axes=(0, 1, 2)),
    "weights": functools.partial(check_numbers, axes=(1, 2), zero=True),
}
"""Checks of the fields of all mechanisms."""


@checked(**FIELDS)
@dataclasses.dataclass(frozen=True, eq=False)
class Mechanism:
    r"""How updates are bounded, noised and summed.

    In round t, with clip bound C, weights :math:`w_i \ge 0` and participants :math:`\Omega_t`:

    .. math::
        S_t = \sum_{i \in \Omega_t} w_i (\mathrm{clip}_C(\Delta_i) + N(0, s_{t,i}^2 C^2)) + N(0, D_t^2 C^2),
        \qquad
        D_t^2 = \max(0, (z_t \max_i w_i)^2 - \sum_{i \in \Omega_t} w_i^2 s_{t,i}^2)

    so the server tops the clients' noise up to the multiplier :math:`z_t`, and the aggregate is
    :math:`S_t` over the denominator.

    Args:
        clip: L2 bound C on a client's whole update; infinity: not clipped.
        noise_multiplier: z, std of the noise on the sum over `C max w`; a number or one per round `[T]`.
        client_noise: s, std of the noise each participant adds over C; a number, `[T]`, or `[T or 1, C]`.
        sampling: who takes part.
        weights: public weights `[C]`; None: all 1.
        denominator: "expected" divides by the fixed `E|cohort| * mean(w)`; "participants" by the realised
            sum of weights. A zeroed-out client keeps its coin, so epsilon stays finite, but the divisor reveals the
            cohort: Poisson sampling amplifies nothing.
        communicates: False where nothing ever leaves a client (then epsilon is 0).
        noise: "float" draws in single precision; "grid" (the server's noise only) draws whole steps of a grid, exactly.

    Guarantee: client-level privacy under zero-out adjacency; sensitivity of the sum `C max w`. With noise, sums are
        exact whatever the number of clients and their order (`jaxfl.privacy.sums`), so one client changes them by no
        more, to a relative 1e-5 for up to a million coordinates. That holds for small weights too, whose clients the
        accountant charges with the rounding of the largest.

        "float" is a Gaussian on paper only. Its draws end at 5.42 standard deviations, are multiples of 2^-33 or so,
        and the released numbers can reveal which of two data sets they come from, at any epsilon; no statement covers
        this (Mironov, On significance of the least significant bits for differential privacy, CCS 2012).

        "grid" covers it. A step is :math:`z C \max w / 2^{15}`. Each client's weighted update is rounded to whole steps
        such that its norm is still at most w C (`round_within`), sums are integers modulo 2^32, as under secure
        aggregation, and so is the noise :math:`\mathrm{round}(N(0, 2^{30}))` (`add_grid_noise`). For whole x, x +
        round(N) = round(x + N), and the modulus, the division by the denominator and single precision come after: all
        is post-processing of the Gaussian mechanism, whose epsilon holds. Sums wrap beyond 65,536 standard deviations,
        which does not affect privacy and does not happen. Noise in local steps (`DPSGD`) is unaffected. For a method
        whose builder makes the mechanism:
        `method._replace(mechanism=dataclasses.replace(method.mechanism, noise="grid"))`.
    Source: Geyer et al. 2017; McMahan et al. 2018 (arXiv:1710.06963).
    """

    clip: Number = math.inf
    noise_multiplier: Number | Float[Array, "T"] | tuple[float, ...] = 0.0
    client_noise: Number | Float[Array, "T"] | np.ndarray = 0.0
    sampling: Sampling = Full()  # noqa: RUF009 (frozen)
    weights: np.ndarray | None = None
    denominator: Literal["expected", "participants"] = "expected"
    communicates: bool = True
    noise: Literal["float", "grid"] = "float"

    def __post_init__(self) -> None:
        if self.noisy and not traced(self.clip) and math.isinf(self.clip):
            raise ValueError(
                f"clip={self.clip!r} with noise, which is in multiples of it: give a finite number, or no noise"
            )
        self._check_single_precision()
        if self.noise == "grid":
            self._check_grid()

    def init(self, key: Key[Array, "*S"], update: Callable[[], Tree], clients: int) -> Tree:
        """The memory before the first round, from an update's shapes and the number of clients."""
        del key, update, clients
        return ()

    def draw(
        self, key: Key[Array, "*S"], memory: Tree, index: Int[Array, ""], clients: int
    ) -> Cohort:
        """Who takes part in round `index`, and its numbers; the key is that of the run's cohorts."""
        del memory
        cohort_key = derive(key, index // self.sampling.period, SAMPLE)
        sampled = self.sampling.sample(cohort_key, clients, index)
        return Cohort(sampled, round_numbers(self, clients, index))

    def contribution_bound(self, memory: Tree) -> Number:
        """C: L2 bound on what one client contributes; noise and sums are in its units."""
        del memory
        return self.clip

    def bound(self, memory: Tree, update: Tree) -> tuple[Tree, Float[Array, ""], Number]:
        """A client's bounded update, its norm before, and the bound."""
        bounded, norm = clip(update, self.contribution_bound(memory))
        return bounded, norm, self.contribution_bound(memory)

    def contribute(
        self,
        key: Key[Array, "*S"],
        memory: Tree,
        client: Participant,
        sent: Message,
        norm: Float[Array, ""],
    ) -> tuple[Tree, Tree]:
        """A client's contribution to the sum, of norm at most C, and its row.

        Args:
            key: of the round's noise; a client's is derived by purpose and number.
            memory: the mechanism's.
            client: the sender.
            sent: its bounded message; zeros if not finite.
            norm: of its update before bounding.
        """
        del norm
        if sent.extra is not None:
            raise ValueError(
                f"message.extra={type(sent.extra).__name__}: {type(self).__name__} takes an update alone; give the "
                "algorithm a mechanism that reads it, or leave it out"
            )
        return self.add_client_noise(key, memory, client, sent.update), ()

    def insert(self, memory: Tree, update: Tree, count: Float[Array, ""]) -> Tree:
        """Contribution of `count` extra clients, whose updates are longest and add up to `update`."""
        del memory, count
        return update

    def add_client_noise(
        self, key: Key[Array, "*S"], memory: Tree, client: Participant, update: Tree
    ) -> Tree:
        """Add a client's noise, also to a dropped update: the accountant counts it."""
        if not self.clients_noisy:
            return update
        std = client.noise * self.contribution_bound(memory)
        return add_gaussian(derive(key, CLIENT_NOISE, client.number), update, std)

    def aggregate(
        self, key: Key[Array, "*S"], memory: Tree, cohort: Cohort, total: Total, mesh: Mesh
    ) -> tuple[Tree, Float[Array, ""], Tree]:
        """The round's aggregate, the std of the server's noise over C, and the next memory."""
        numbers, update, std = cohort.numbers, total.update, jnp.zeros(())
        unit = self.unit(memory, numbers)
        if self.server_noisy:
            std = self.top_up(numbers, total)
            absolute = std * self.contribution_bound(memory) / unit
            update, memory = self.add_server_noise(
                derive(key, SERVER_NOISE), memory, update, absolute, mesh
            )
        share = unit / self.divisor(numbers, total.weight)
        return jax.tree.map(lambda leaf: leaf * share, narrow(update)), std, memory

    def top_up(self, numbers: RoundNumbers, total: Total) -> Float[Array, ""]:
        """Std over C that the server adds to the sum."""
        return server_noise(numbers, total.variance)

    def divisor(self, numbers: RoundNumbers, weight: Float[Array, ""]) -> Float[Array, ""]:
        """The denominator of the aggregate, given the realised sum of weights."""
        return (
            numbers.denominator
            if self.denominator == "expected"
            else jnp.where(weight > 0, weight, 1.0)
        )

    def add_server_noise(
        self, key: Key[Array, "*S"], memory: Tree, update: Tree, std: Float[Array, ""], mesh: Mesh
    ) -> tuple[Tree, Tree]:
        """Add the server's noise; `std` in the sum's unit. Exact up to single-precision draws."""
        if self.noise == "grid":
            return add_grid_noise(key, update, mesh), memory
        zero = jax.tree.map(jnp.zeros_like, narrow(update))
        return add(update, widen(add_gaussian(key, zero, std))), memory

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """What an observer learns about a client.

        Args:
            ledger: the rounds.
            observer: of sums, of uploads, or another client.
            replaced: replace-one, not zero-out; uploads always are.
            one_round: the view is for statements about single rounds.
        """
        del one_round
        if not self.communicates or not len(ledger.participants):
            return one_gaussian(math.inf, "nothing leaves the clients", "")
        if math.isinf(self.clip):
            return one_gaussian(0.0, "none", "updates are not clipped")
        if observer == "upload":
            return upload_view(ledger)
        fair = self.denominator == "expected"
        insider = observer == "client"
        return self.sampling.view(
            sum_noise(ledger, hides_cohort=fair, replaced=replaced, insider=insider)
        )

    def planned(self, clients: int, rounds: int) -> Ledger:
        """Worst-case ledger of a planned run: every client participates in every round it can."""
        self.check_fits(clients, rounds)
        noise, weights = (
            _rows(table, rounds) for table in (self.client_noise_table, self.weight_table)
        )
        multiplier = _rows(self.noise_multiplier_table, rounds)
        return topped_up(
            Ledger(self.sampling.turns(clients, rounds), noise, weights, multiplier, multiplier)
        )

    def describe(self, ledger: Ledger) -> list[str]:
        """Sentences of a privacy statement about what this mechanism adds to clip, noise, weights and sampling."""
        del ledger
        return []

    def unit(self, memory: Tree, numbers: RoundNumbers) -> Float[Array, ""]:
        """Unit of the sums: a grid step; else, with noise, 2^-30 of the bound."""
        if not self.noisy:
            return jnp.ones(())
        bound = self.contribution_bound(memory) * jnp.max(numbers.weights)
        return bound * (numbers.noise_multiplier / STEPS if self.noise == "grid" else 2.0**-30)

    def in_units(
        self, memory: Tree, contribution: Tree, norm: Float[Array, ""], scale: Float[Array, ""]
    ) -> Tree:
        """A contribution times `scale`; on the grid, in whole steps within the bound."""
        if self.noise == "float":
            return jax.tree.map(lambda leaf: leaf * scale, contribution)
        self._check_resolution(sum(leaf.size for leaf in jax.tree.leaves(contribution)))
        bound = self.contribution_bound(memory)
        return round_within(contribution, jnp.minimum(norm, bound), scale, bound * scale)

    @property
    def exact(self) -> bool:
        """Whether sums are 64-bit integers; those on the grid are integers already."""
        return self.noisy and self.noise == "float"

    def _check_single_precision(self) -> None:
        """Reject values that vanish or overflow in squares and products."""
        check_clip("clip", self.clip)
        weights = extremes(
            "weights", self.weight_table.max(axis=1)
        )  # smaller weights share the largest's noise
        for name in ("noise_multiplier", "client_noise"):
            if not traced(getattr(self, name)):
                on_sum = np.outer(
                    extremes(name, np.asarray(getattr(self, name), np.float64)), weights
                )
                if np.max(getattr(self, name)) > _MOST_NOISE:  # else noise exceeds a sum's 64 bits
                    raise ValueError(
                        f"{name}={show(getattr(self, name))}: give at most {_MOST_NOISE:g}"
                    )
                extremes(f"{name} times weights", on_sum)

    def _check_grid(self) -> None:
        if self.clients_noisy:
            raise ValueError(
                f"noise='grid' with client_noise={self.client_noise!r}: a sum of rounded Gaussians is no rounded "
                "Gaussian; let the server add all noise, or give noise='float'"
            )
        least = self.noise_multiplier
        if not traced(least) and np.min(np.asarray(least, np.float64)) < _LEAST_ON_GRID:
            raise ValueError(
                f"noise='grid' with noise_multiplier={least!r}: a step follows from the noise, and sums of such fine "
                f"ones wrap; give at least {_LEAST_ON_GRID} in every round, or noise='float'"
            )

    def _check_resolution(self, coordinates: int) -> None:
        """Require a grid finer than most updates of so many coordinates."""
        if traced(self.noise_multiplier):  # the norm is bounded anyway
            return
        most = STEPS * math.sqrt(3 / coordinates)
        if np.max(self.noise_multiplier_table) > most:
            raise ValueError(
                f"noise='grid' with noise_multiplier={self.noise_multiplier!r}: over {coordinates} coordinates a step "
                f"is longer than most of an update's; give at most {most:.4g}, a smaller network, or noise='float'"
            )

    @property
    def noisy(self) -> bool:
        """Whether any noise is ever drawn."""
        return self.server_noisy or self.clients_noisy

    @property
    def server_noisy(self) -> bool:
        """Whether the sum has a floor of noise."""
        return traced(self.noise_multiplier) or bool(np.any(np.asarray(self.noise_multiplier)))

    @property
    def covers_canaries(self) -> bool:
        """Whether clients that bring no noise get as much from a cohort as others count on."""
        return not self.clients_noisy or isinstance(self.sampling, Full | FixedSize | MinSeparation)

    @property
    def clients_noisy(self) -> bool:
        """Whether clients add noise."""
        return traced(self.client_noise) or bool(np.any(np.asarray(self.client_noise)))

    @property
    def noise_multiplier_table(self) -> Float[np.ndarray | Array, "T"]:
        """Noise multiplier z by round, one entry if constant."""
        return _numbers(self.noise_multiplier).reshape(-1)

    @property
    def client_noise_table(self) -> Float[np.ndarray | Array, "T C"]:
        """Client noise s by round and client, axes of length 1 where constant."""
        value = _numbers(self.client_noise)
        return value.reshape(-1, 1) if value.ndim < 2 else value

    @property
    def weight_table(self) -> Float[np.ndarray, "T C"]:
        """Weights w by round and client, axes of length 1 where constant."""
        return np.atleast_2d(
            np.ones(1) if self.weights is None else np.asarray(self.weights, np.float64)
        )

    def check_fits(self, clients: int, rounds: int) -> None:
        """Require tables that cover `rounds` rounds of `clients` clients, and a possible cohort."""
        check_count("clients", clients)
        check_count("rounds", rounds)
        self.sampling.expected(clients)
        tables = {"client_noise": self.client_noise_table, "weights": self.weight_table}
        tables["noise_multiplier"] = self.noise_multiplier_table[:, None]
        for name, table in tables.items():
            if table.shape[0] not in (1, rounds) or table.shape[1] not in (1, clients):
                raise ValueError(
                    f"{name} has shape {table.shape}: it must fit {rounds} rounds and {clients} clients"
                )
        if not np.all(self.weight_table.max(axis=1) > 0):
            raise ValueError(
                f"weights={self.weights!r}: every round needs a client with a weight above 0"
            )


def round_numbers(mechanism: Mechanism, clients: int, index: Int[Array, ""]) -> RoundNumbers:
    """Read the tables at one round (traced)."""

    def row(table: np.ndarray | Array) -> Array:
        return jnp.asarray(table, jnp.float32)[jnp.minimum(index, table.shape[0] - 1)]

    weights = row(mechanism.weight_table)
    total = jnp.sum(weights) * (clients if weights.shape[0] == 1 else 1)
    return RoundNumbers(
        noise_multiplier=row(mechanism.noise_multiplier_table),
        client_noise=row(mechanism.client_noise_table),
        weights=weights,
        denominator=total * (mechanism.sampling.expected(clients) / clients),
    )


def topped_up(ledger: Ledger) -> Ledger:
    """The ledger with the noise that the server adds where its participants bring theirs."""
    present = brought(ledger.participants, (np.asarray(ledger.client_noise) * ledger.weights) ** 2)
    floor = np.asarray(ledger.noise_multiplier) * ledger.weights.max(axis=1)
    return ledger._replace(server_noise=np.sqrt(np.maximum(0, floor**2 - present)))


def server_noise(numbers: RoundNumbers, present: Float[Array, ""]) -> Float[Array, ""]:
    r"""Std over C that the server adds to the sum, given the variance over C^2 that clients added.

    .. math:: D = \sqrt{\max(0, (z \max_i w_i)^2 - \mathrm{present})}
    """
    target = numbers.noise_multiplier * jnp.max(numbers.weights)
    return jnp.sqrt(jnp.maximum(0.0, target**2 - present))


def noise_share(noise_multiplier: Any, sampling: Sampling, clients: int) -> Any:
    r"""Std over C that each client adds, so that an expected cohort's sum has z: :math:`z / \sqrt{qN}`."""
    by_round = isinstance(noise_multiplier, list | tuple)
    std = np.asarray(noise_multiplier) if by_round else noise_multiplier
    return std / math.sqrt(sampling.expected(clients))


def check_clip(name: str, value: Number) -> None:
    """Require a clip bound that single precision can square."""
    if not traced(value) and not _LEAST_CLIP <= value <= _LARGE and not math.isinf(value):
        raise ValueError(
            f"{name}={value!r}: give a number from {_LEAST_CLIP:g} to {_LARGE:.3g}, as float32 squares it"
        )


def extremes(name: str, values: np.ndarray) -> np.ndarray:
    """Smallest and largest positive value, which single precision must be able to square."""
    positive = values[values > 0]
    if not positive.size:
        return np.zeros(0)
    low, high = positive.min(), positive.max()
    if low < _SMALL or high > _LARGE:
        wrong = low if low < _SMALL else high
        raise ValueError(
            f"{name}: {wrong:.4g} vanishes or overflows where float32 squares it; give 0, or numbers from {_SMALL:.3g} "
            f"to {_LARGE:.3g}"
        )
    return np.array([low, high])


def _numbers(value: Any) -> Any:
    """Double precision on the host, where epsilon comes from; a sweep's traced number as it is."""
    return jnp.asarray(value) if traced(value) else np.asarray(value, np.float64)


def _rows(table: Any, rounds: int) -> np.ndarray:
    return np.broadcast_to(table, (rounds, *table.shape[1:]))
