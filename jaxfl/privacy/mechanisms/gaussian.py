"""The mechanism: how updates are bounded, noised and averaged, and what that guarantees.

`Mechanism` is the Gaussian mechanism. Another mechanism is a subclass in a file of its own that
replaces some of its hooks. The main ones are:

- `init` returns the memory before the first round.
- `draw` draws the participants of a round.
- `contribute` returns what a participant adds to the sum. The engine has bounded its update.
- `aggregate` returns the noisy mean, the std of the server's noise, and the memory of the next
  round.
- `view` returns what an observer of the ledger learns, next to the code of the noise that it
  accounts for.

The engine carries the memory with the server's state through both stores, sweeps, checkpoints and
several processes.
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

from jaxfl._support.checks import (
    Check,
    check_count,
    check_noise,
    check_numbers,
    checked,
    show,
    traced,
    up_to_infinity,
)
from jaxfl.privacy.accounting.observers import (
    Observer,
    View,
    brought,
    one_gaussian,
    sum_noise,
    upload_view,
)
from jaxfl.privacy.noise import CLIENT_NOISE, SAMPLE, SERVER_NOISE, add_gaussian, derive
from jaxfl.privacy.representation import Floats, Grid, Integers
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.privacy.sums import narrow
from jaxfl.types import Ledger, Message, Number, Tree

MOST_NOISE = 1e8
"""Largest noise multiplier or client noise. More noise would exceed the 64 bits of a sum."""

_SMALL = 2.0**-63
"""Smallest positive number that single precision must square."""

_LARGE = 2.0**50
"""Largest number that single precision must square.

Single precision holds squares of numbers from `_SMALL` to this one, products of any two, and sums
of 10^7 of these.
"""

_LEAST_CLIP = 1e-10
"""Smallest clip bound. Smaller ones clip nothing: squared coordinates of longer updates vanish."""


class RoundNumbers(NamedTuple):
    """Public numbers of the mechanism in one round: z, s, w and the expected denominator."""

    noise_multiplier: Float[Array, ""]
    client_noise: Float[Array, "#C"]
    weights: Float[Array, "#C"]
    denominator: Float[Array, ""]


class Cohort(NamedTuple):
    """Participants of a round, the round's numbers, and the mechanism's notes for the ledger."""

    sampled: Bool[Array, "C"]
    """Whether each client takes part."""
    numbers: RoundNumbers
    notes: dict[str, Float[Array, ""]] = {}  # noqa: RUF012 (never written to)
    canaries: Any = None
    """Canaries of an audit that are drawn too (`jaxfl.privacy.audit.Drawn`)."""


class Participant(NamedTuple):
    """Participant of a round, for `Mechanism.contribute`."""

    client_id: Int[Array, ""]
    """Index of the client among all clients."""
    noise: Float[Array, ""]
    """Std of the noise that the participant adds, divided by the clip bound."""


class Contribution(NamedTuple):
    """What a participant adds to the sum, and what it hands in separately."""

    update: Tree
    """Arrays that are weighted and added up, with the client's noise."""
    norm: Float[Array, ""]
    """Norm of `update` before noise, or a bound on it. NaN if the client's update had a NaN."""
    row: Tree = ()
    """Arrays that reach `aggregate` as they are, one row for each participant."""


class Total(NamedTuple):
    """Sum of all that the participants of a round send."""

    update: Tree
    """Sum of weighted contributions, in the numbers of `Mechanism.representation`."""
    variance: Float[Array, ""]
    """Variance of the clients' noise on the sum, over the squared clip bound."""
    weight: Float[Array, ""]
    """Sum of the participants' weights."""
    rows: Tree
    """Row of each participant, [most, ...], ordered by client.

    `most` is the sampler's largest cohort. Rows beyond the participants are zero.
    """


FIELDS: dict[str, Check] = {
    "clip": up_to_infinity,
    "noise_multiplier": check_noise,
    "client_noise": functools.partial(check_noise, axes=(0, 1, 2)),
    "weights": functools.partial(check_numbers, axes=(1, 2), zero=True),
}
"""Checks of the fields of all mechanisms, by the name of the field."""


@checked(**FIELDS)
@dataclasses.dataclass(frozen=True, eq=False)
class Mechanism:
    r"""Gaussian mechanism: how updates are bounded, noised and summed.

    In round t, with clip bound C, weights :math:`w_i \ge 0` and participants :math:`\Omega_t`:

    .. math::
        S_t &= \sum_{i \in \Omega_t} w_i (\mathrm{clip}_C(\Delta_i) + N(0, s_{t,i}^2 C^2))
            + N(0, D_t^2 C^2), \\
        D_t^2 &= \max(0, (z_t \max_i w_i)^2 - \sum_{i \in \Omega_t} w_i^2 s_{t,i}^2)

    The server tops the clients' noise up to the multiplier :math:`z_t`. The aggregate is
    :math:`S_t` over the denominator.

    Args:
        clip: C, L2 bound on all of a client's update. Infinity does not clip.
        noise_multiplier: z, std of the noise on the sum, divided by C max w. A number, or one per
            round `[T]`.
        client_noise: s, std of the noise that each participant adds, over C. A number, `[T]`, or
            `[T or 1, C]`.
        sampling: Rule that draws the participants of each round. The default draws all clients.
        weights: Public weights `[C]`, or `[T, C]` by round. None gives each client a weight of 1.
        denominator: "expected" divides by the fixed `E|cohort| * mean(w)`. "participants" divides
            by the realised sum of weights. A client whose update is replaced by zero still
            counts in it, so epsilon stays finite. But this divisor reveals the cohort, so Poisson
            sampling amplifies nothing.
        communicates: Whether anything ever leaves a client. If not, epsilon is 0.
        noise: "float" draws in single precision. "grid", for the server's noise only, draws whole
            steps of a grid, exactly.

    Raises:
        ValueError: There is noise without a finite `clip`, a number is too small or too large for
            single precision, or clients add noise and `noise` is "grid".

    Guarantee: Client-level privacy under zero-out adjacency. The sensitivity of the sum is
        `C max w`. With noise, sums are exact whatever the number of clients and their order
        (`jaxfl.privacy.sums`). One client therefore changes them by no more, to a relative 1e-5 for
        up to a million coordinates. For clients of small weight, the accountant adds the rounding
        error of the largest weight.

        "float" is a Gaussian on paper only. Its draws end at 5.42 standard deviations, and are
        multiples of 2^-33 or so. The released numbers can reveal which of two datasets they come
        from, at any epsilon. No statement covers this (Mironov, On significance of the least
        significant bits for differential privacy, CCS 2012).

        "grid" covers it. A step is :math:`z C \max w / 2^{15}`. Each client's weighted update is
        rounded to whole steps such that its norm is still at most w C (`round_within`). Sums are
        integers modulo 2^32, as under secure aggregation, and so is the noise
        :math:`\mathrm{round}(N(0, 2^{30}))` (`add_grid_noise`). For whole x, x + round(N) = round(x
        + N). The modulus, the division by the denominator and single precision come after, so all
        is post-processing of the Gaussian mechanism, whose epsilon holds. Sums wrap beyond 65,536
        standard deviations, which does not affect privacy and does not happen. Noise in local steps
        (`DPSGD`) is unaffected. For a method whose builder makes the mechanism:
        `method._replace(mechanism=dataclasses.replace(method.mechanism, noise="grid"))`.
    References: Geyer et al. 2017; McMahan et al. 2018 (arXiv:1710.06963).
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
                f"clip must be finite with noise, which is in multiples of it, got {self.clip!r}. "
                "Give a finite number, or no noise."
            )
        self._check_single_precision()
        if self.noise == "grid":
            self._check_grid()

    def init(self, key: Key[Array, "*S"], update: Callable[[], Tree], clients: int) -> Tree:
        """Return the memory before the first round.

        Args:
            key: Key of the run's noise.
            update: Function that returns an update, for its shapes.
            clients: Number of clients.
        """
        del key, update, clients
        return ()

    def draw(
        self, key: Key[Array, "*S"], memory: Tree, index: Int[Array, ""], clients: int
    ) -> Cohort:
        """Draw the participants of a round, and return them with the round's numbers.

        Args:
            key: Key of the run's cohorts.
            memory: Memory of the mechanism.
            index: Index of the round.
            clients: Number of clients.
        """
        del memory
        # Rounds of a period share their key, so that a sampler can divide clients among them.
        cohort_key = derive(key, index // self.sampling.period, SAMPLE)
        sampled = self.sampling.sample(cohort_key, clients, index)
        return Cohort(sampled, round_numbers(self, clients, index))

    def update_bound(self, memory: Tree) -> Number:
        """Return the L2 bound to which the engine clips a client's update."""
        del memory
        return self.clip

    def contribution_bound(self, memory: Tree) -> Number:
        """Return C, the L2 bound on one client's contribution. Noise and sums are in its units."""
        return self.update_bound(memory)

    def contribute(
        self,
        key: Key[Array, "*S"],
        memory: Tree,
        client: Participant,
        sent: Message,
        norm: Float[Array, ""],
    ) -> Contribution:
        """Return a client's contribution to the sum, of norm at most C before noise.

        Args:
            key: Key of the round's noise, from which a client's key is derived by purpose and
                number.
            memory: Memory of the mechanism.
            client: Sender.
            sent: Bounded message of the client, with zeros if it was not finite.
            norm: Norm of the client's update before bounding.

        Raises:
            ValueError: The message has an `extra`, which this mechanism does not read.
        """
        if sent.extra is not None:
            raise ValueError(
                f"message.extra must be None for {type(self).__name__}, which takes an update "
                f"alone, got {type(sent.extra).__name__}. "
                "Give the algorithm a mechanism that reads extra, or leave extra out."
            )
        update = self.add_client_noise(key, memory, client, sent.update)
        return Contribution(update, jnp.minimum(norm, self.contribution_bound(memory)))

    def contribute_canaries(self, memory: Tree, update: Tree, count: Float[Array, ""]) -> Tree:
        """Return the contribution of `count` canaries to the sum.

        Their updates have maximal norm, and sum to `update`.
        """
        del memory, count
        return update

    def add_client_noise(
        self, key: Key[Array, "*S"], memory: Tree, client: Participant, update: Tree
    ) -> Tree:
        """Return the update with the client's noise.

        An update that was not finite, and is zero now, gets noise too, as accountants assume.
        """
        if not self.clients_noisy:
            return update
        std = client.noise * self.contribution_bound(memory)
        # The key follows the client's number, so noise does not depend on where it is drawn.
        return add_gaussian(derive(key, CLIENT_NOISE, client.client_id), update, std)

    def aggregate(
        self, key: Key[Array, "*S"], memory: Tree, cohort: Cohort, total: Total, mesh: Mesh
    ) -> tuple[Tree, Float[Array, ""], Tree]:
        """Return the round's aggregate, the std of the server's noise over C, and the next memory.

        Args:
            key: Key of the round's noise.
            memory: Memory of the mechanism.
            cohort: Participants of the round, and its numbers.
            total: Sum of all that the participants send.
            mesh: Mesh of devices, on which noise is drawn.
        """
        numbers = cohort.numbers
        update = total.update
        std = jnp.zeros(())
        unit = self.unit(memory, numbers)
        if self.server_noisy:
            std = self.top_up(numbers, total)
            # A std over C becomes one in the unit of the sum.
            absolute = std * self.contribution_bound(memory) / unit
            noise_key = derive(key, SERVER_NOISE)
            update, memory = self.add_server_noise(noise_key, memory, update, absolute, mesh)
        # Unit and divisor are one factor, so each coordinate is rounded once.
        share = unit / self.divisor(numbers, total.weight)
        return jax.tree.map(lambda leaf: leaf * share, narrow(update)), std, memory

    def top_up(self, numbers: RoundNumbers, total: Total) -> Float[Array, ""]:
        """Return the std over C of the noise that the server adds to the sum."""
        return server_noise(numbers, total.variance)

    def divisor(self, numbers: RoundNumbers, weight: Float[Array, ""]) -> Float[Array, ""]:
        """Return the denominator of the aggregate, given the realised sum of weights.

        If that sum is 0, as for an empty cohort, "participants" gives 1.
        """
        if self.denominator == "expected":
            return numbers.denominator
        return jnp.where(weight > 0, weight, 1.0)

    def add_server_noise(
        self, key: Key[Array, "*S"], memory: Tree, update: Tree, std: Float[Array, ""], mesh: Mesh
    ) -> tuple[Tree, Tree]:
        """Return the update with the server's noise, and the next memory.

        Args:
            key: Key of the noise.
            memory: Memory of the mechanism.
            update: Sum of contributions.
            std: Std of the noise, in the unit of the sum.
            mesh: Mesh of devices, on which noise is drawn.
        """
        return self.representation.add_noise(key, update, std, mesh), memory

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """Return what an observer learns about a client.

        Args:
            ledger: Rounds as they happened, or as planned.
            observer: Observer of sums, of uploads, or another client.
            replaced: Whether adjacency is replace-one, as it always is for uploads. The default is
                zero-out.
            one_round: Whether the view is for statements about single rounds.
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
        # A divisor by the participants would show how many they are, or their weights.
        noise = sum_noise(ledger, hides_cohort=fair, replaced=replaced, insider=insider)
        return self.sampling.view(noise)

    def planned(self, clients: int, rounds: int) -> Ledger:
        """Return the worst-case ledger of a planned run.

        Every client participates in every round it can. Under limits of a server, the ledger has
        only the most rounds of a client and their distance (`Turns`).

        Raises:
            ValueError: The mechanism does not fit the clients or the rounds (see `check_fits`).
        """
        self.check_fits(clients, rounds)
        noise = _row_per_round(self.client_noise_table, rounds)
        weights = _row_per_round(self.weight_table, rounds)
        multiplier = _row_per_round(self.noise_multiplier_table, rounds)
        turns = self.sampling.turns(clients, rounds)
        # The first multiplier stands for the server's noise, which `topped_up` replaces.
        return topped_up(Ledger(turns, noise, weights, multiplier, multiplier))

    def error(self, rounds: int) -> float:
        r"""Return the root mean square of the noise in the prefix sums of a run.

        Its unit is z C times the largest weight. It is :math:`\sqrt{(T + 1) / 2}` for independent
        noise. A mechanism of your own whose noise depends on earlier rounds overrides this.

        Args:
            rounds: T, the number of rounds.

        >>> round(Mechanism().error(7), 6)
        2.0
        """
        return math.sqrt((rounds + 1) / 2)

    def describe(self, ledger: Ledger) -> list[str]:
        """Return sentences of a privacy statement about this mechanism.

        They say what it adds to clip, noise, weights and sampling.
        """
        del ledger
        return []

    @property
    def representation(self) -> Floats:
        """Numbers of the sums: floats without noise, else 64-bit integers or steps of a grid."""
        if not self.noisy:
            return Floats()
        if self.noise == "grid":
            return Grid(self.noise_multiplier)
        return Integers()

    def unit(self, memory: Tree, numbers: RoundNumbers) -> Float[Array, ""]:
        """Return the unit of a round's sums, as `representation` defines it."""
        largest = self.contribution_bound(memory) * jnp.max(numbers.weights)
        return self.representation.unit(largest, numbers.noise_multiplier)

    def _check_single_precision(self) -> None:
        """Reject values that vanish or overflow in squares and products."""
        check_clip("clip", self.clip)
        # The noise of a round is in multiples of its largest weight, which alone may overflow.
        weights = extremes("weights", self.weight_table.max(axis=1))
        for name in ("noise_multiplier", "client_noise"):
            value = getattr(self, name)
            # A sweep's traced number has no value to check.
            if traced(value):
                continue
            # Products of the extremes bound the products of all numbers.
            on_sum = np.outer(extremes(name, np.asarray(value, np.float64)), weights)
            if np.max(value) > MOST_NOISE:
                raise ValueError(
                    f"{name} must be at most {MOST_NOISE:g}, got {show(value)}. Give less noise."
                )
            extremes(f"{name} times weights", on_sum)

    def _check_grid(self) -> None:
        if self.clients_noisy:
            raise ValueError(
                "client_noise must be 0 with noise='grid', because a sum of rounded Gaussians is "
                f"no rounded Gaussian, got {self.client_noise!r}. "
                "Let the server add all noise, or give noise='float'."
            )
        Grid(self.noise_multiplier)

    @property
    def noisy(self) -> bool:
        """Whether any noise is ever drawn. A sweep's traced number counts as noise."""
        return self.server_noisy or self.clients_noisy

    @property
    def server_noisy(self) -> bool:
        """Whether the sum has a floor of noise. A sweep's traced number counts as one."""
        return traced(self.noise_multiplier) or bool(np.any(np.asarray(self.noise_multiplier)))

    @property
    def fixed_cohort(self) -> bool:
        """Whether all rounds have the same number of participants."""
        return self.sampling.fixed

    @property
    def clients_noisy(self) -> bool:
        """Whether clients add noise. A sweep's traced number counts as noise."""
        return traced(self.client_noise) or bool(np.any(np.asarray(self.client_noise)))

    @property
    def coordinate_bits(self) -> int:
        """Bits of a coordinate that a client sends, in single precision or on a grid."""
        return 32

    @property
    def sparse(self) -> bool:
        """Whether a client's contribution is 0 wherever its update is."""
        return not self.clients_noisy

    @property
    def noise_multiplier_table(self) -> Float[np.ndarray | Array, "T"]:
        """Noise multiplier z by round, or one entry if it is a number."""
        return _in_double(self.noise_multiplier).reshape(-1)

    @property
    def client_noise_table(self) -> Float[np.ndarray | Array, "T C"]:
        """Client noise s by round and client. Axes that were not given have length 1."""
        value = _in_double(self.client_noise)
        # A number and a schedule by round hold for all clients.
        if value.ndim < 2:
            return value.reshape(-1, 1)
        return value

    @property
    def weight_table(self) -> Float[np.ndarray, "T C"]:
        """Weights w by round and client. Axes that were not given have length 1."""
        weights = np.ones(1)
        if self.weights is not None:
            weights = np.asarray(self.weights, np.float64)
        return np.atleast_2d(weights)

    def check_fits(self, clients: int, rounds: int) -> None:
        """Require tables that cover all rounds and clients, and a possible cohort.

        Some client must have a weight above 0 in each round.
        """
        check_count("clients", clients)
        check_count("rounds", rounds)
        # This raises an error if there are too few clients for a cohort.
        self.sampling.expected(clients)
        tables = {"client_noise": self.client_noise_table, "weights": self.weight_table}
        tables["noise_multiplier"] = self.noise_multiplier_table[:, None]
        for name, table in tables.items():
            if table.shape[0] not in (1, rounds) or table.shape[1] not in (1, clients):
                raise ValueError(
                    f"{name} must have 1 or {rounds} rows for {rounds} rounds, and 1 or {clients} "
                    f"columns for {clients} clients, got shape {table.shape}. Give one entry for "
                    "all, or one for each."
                )
        if not np.all(self.weight_table.max(axis=1) > 0):
            raise ValueError(
                f"weights must be above 0 for some client in every round, got {self.weights!r}. "
                "Give a positive weight."
            )


def round_numbers(mechanism: Mechanism, clients: int, index: Int[Array, ""]) -> RoundNumbers:
    """Return the mechanism's numbers in round `index`, which may be traced.

    They are rows of its tables, and the expected denominator. An index beyond a table takes the
    last row.
    """

    def row(table: np.ndarray | Array) -> Array:
        return jnp.asarray(table, jnp.float32)[jnp.minimum(index, table.shape[0] - 1)]

    weights = row(mechanism.weight_table)
    copies = 1
    if weights.shape[0] == 1:
        # One weight stands for that of each client.
        copies = clients
    total = jnp.sum(weights) * copies
    return RoundNumbers(
        noise_multiplier=row(mechanism.noise_multiplier_table),
        client_noise=row(mechanism.client_noise_table),
        weights=weights,
        denominator=total * (mechanism.sampling.expected(clients) / clients),
    )


def topped_up(ledger: Ledger) -> Ledger:
    """Return the ledger with the `server_noise` that tops the participants' noise up.

    The total then reaches `noise_multiplier` times the largest weight, or exceeds it without help.
    """
    added = (np.asarray(ledger.client_noise) * ledger.weights) ** 2
    present = brought(ledger.participants, added)
    floor = np.asarray(ledger.noise_multiplier) * ledger.weights.max(axis=1)
    return ledger._replace(server_noise=np.sqrt(np.maximum(0, floor**2 - present)))


def server_noise(numbers: RoundNumbers, present: Float[Array, ""]) -> Float[Array, ""]:
    r"""Return the std over C that the server adds to the sum.

    .. math:: D = \sqrt{\max(0, (z \max_i w_i)^2 - \mathrm{present})}

    Args:
        numbers: Numbers of the round.
        present: Variance over C^2 that clients added.
    """
    # Clients may add more than the target. The server then adds nothing.
    target = numbers.noise_multiplier * jnp.max(numbers.weights)
    return jnp.sqrt(jnp.maximum(0.0, target**2 - present))


def noise_share(noise_multiplier: Any, sampling: Sampling, clients: int) -> Any:
    r"""Return the std over C that each client adds, so that a mean cohort's sum has multiplier z.

    It is :math:`z / \sqrt{qN}`, where qN is the expected cohort. A schedule gives one std per
    round.
    """
    # NumPy cannot convert a sweep's traced number, which division takes as it is.
    std = noise_multiplier
    if isinstance(noise_multiplier, list | tuple):
        std = np.asarray(noise_multiplier)
    return std / math.sqrt(sampling.expected(clients))


def check_clip(name: str, value: Number) -> None:
    """Require a clip bound that single precision can square, or infinity."""
    if not traced(value) and not _LEAST_CLIP <= value <= _LARGE and not math.isinf(value):
        raise ValueError(
            f"{name} must be from {_LEAST_CLIP:g} to {_LARGE:.3g}, because float32 squares it, "
            f"got {value!r}. Give a number in that range, or infinity."
        )


def extremes(name: str, values: np.ndarray) -> np.ndarray:
    """Return the smallest and the largest positive value, or an empty array if there is none.

    Raise an error if float32 cannot square them.
    """
    # Products with 0 are exact, so only positive numbers count.
    positive = values[values > 0]
    if not positive.size:
        return np.zeros(0)
    low = positive.min()
    high = positive.max()
    if low < _SMALL or high > _LARGE:
        wrong = high
        if low < _SMALL:
            wrong = low
        raise ValueError(
            f"{name} must be 0 or from {_SMALL:.3g} to {_LARGE:.3g}, because float32 squares it, "
            f"got {wrong:.4g}. Give numbers in that range."
        )
    return np.array([low, high])


def _in_double(value: Any) -> Any:
    """Return numbers in double precision on the host, where epsilon comes from.

    A sweep's traced number stays as it is.
    """
    if traced(value):
        return jnp.asarray(value)
    return np.asarray(value, np.float64)


def _row_per_round(table: Any, rounds: int) -> np.ndarray:
    # A view repeats one row without memory for each round.
    return np.broadcast_to(table, (rounds, *table.shape[1:]))
