"""The mechanism: clip bound, noise, weights and sampling. The only source of these numbers.

The engine draws its noise and cohorts from a `Mechanism`, and the accountant reads the ledger that the
engine writes from the same fields.
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
from jaxtyping import Bool, Float, Int, Key

from jaxfl._validate import (
    at_least_0,
    check_count,
    check_fraction,
    check_noise,
    check_numbers,
    check_positive,
    checked,
    probability,
    show,
    traced,
    up_to_infinity,
)
from jaxfl.privacy.noise import STEPS, random_bits
from jaxfl.types import Account, Number

ROUNDING = 1e-4
"""Relative: the engine draws, adds up and records in single precision."""
_LEAST_ON_GRID = 0.01
_MOST_NOISE = 1e8

_SMALL, _LARGE = 2.0**-63, 2.0**50
"""Numbers between have squares, and products of two have values, that single precision holds, sums of 10^7 too."""
_LEAST_CLIP = 1e-10
"""Smaller bounds clip nothing: squares of the coordinates of an update that exceeds them vanish."""


def coins(key: Key[Array, "*S"], count: int, rate: Number) -> Bool[Array, "{count}"]:
    """Independent coins of 64 bits that show True with probability `rate`, rounded down to a multiple of 2^-64."""
    if not traced(rate) and rate == 1:
        return jnp.ones(count, bool)
    bits = random_bits(key, (count, 2))
    high, low = _threshold(rate)
    return (bits[:, 0] < high) | ((bits[:, 0] == high) & (bits[:, 1] < low))


def _threshold(rate: Number) -> tuple[Any, Any]:
    """A rate under 1 times 2^64, rounded down, in two words; of a sweep's rate, the next float below it."""
    if traced(rate):
        scaled = jnp.nextafter(jnp.asarray(rate, jnp.float32), jnp.float32(0)) * 2.0**32
        high = jnp.floor(scaled)
        return high.astype(jnp.uint32), ((scaled - high) * 2.0**32).astype(jnp.uint32)
    high, low = divmod(int(float(rate) * 2.0**64), 2**32)
    return np.uint32(high), np.uint32(low)


@checked(rate=check_fraction)
@dataclasses.dataclass(frozen=True)
class Poisson:
    """Each client takes part independently with probability `rate`."""

    rate: float

    def expected(self, clients: int) -> float:
        """Mean number of participants."""
        return self.rate * clients

    def sample(self, key: Key[Array, ""], clients: int) -> Bool[Array, "C"]:
        """Draw who takes part; client i's coin depends on the key and on i alone."""
        return coins(key, clients, self.rate)


@checked()
@dataclasses.dataclass(frozen=True)
class FixedSize:
    """`size` clients, uniformly without replacement."""

    size: int

    def expected(self, clients: int) -> float:
        """Number of participants."""
        check_count("size", self.size, most=clients)
        return float(self.size)

    def sample(self, key: Key[Array, ""], clients: int) -> Bool[Array, "C"]:
        """Draw who takes part."""
        rank = jax.random.permutation(key, clients)
        return rank < self.size


@dataclasses.dataclass(frozen=True)
class Full:
    """Every client takes part in every round."""

    def expected(self, clients: int) -> float:
        """Number of participants."""
        return float(clients)

    def sample(self, key: Key[Array, ""], clients: int) -> Bool[Array, "C"]:
        """All take part."""
        del key
        return jnp.ones(clients, bool)


Sampling = Poisson | FixedSize | Full


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


@checked(noise_multiplier=check_noise, rate=check_fraction)
@dataclasses.dataclass(frozen=True, eq=False)
class PerExample:
    r"""Local steps that bound and noise single examples (DP-SGD), in place of passes over a client's examples.

    .. math:: g = \frac{1}{q n} \Big( \sum_{j \in B} \mathrm{clip}_C(\nabla \ell_j) + N(0, z^2 C^2 I) \Big)

    where each of a client's n examples is in B with probability q, independently, anew in every step.

    Args:
        clip: C, L2 bound on the gradient of one example.
        noise_multiplier: z, std of the noise on the sum over C; a number or `[1]`, the same for all, or one per client
            `[C]` (see `jaxfl.privacy.calibrate_examples`).
        rate: q.
        steps: local steps per round.
        chunk: examples that are taken at once; changes speed and memory, not results. None: 16 where the model knows
            the norms of gradients (`Model.norms`); else 1, as a CPU likes it.

    The engine hands each client its noise, writes it into the ledger, and refuses a `client_update` that trains
    otherwise.

    Guarantee: example-level, zero-out adjacency (an example's clipped gradient is replaced by zero, n is public), by
        the Poisson-sampled Gaussian mechanism composed over all steps; for every observer of what the client sends.
    References: Abadi et al., Deep Learning with Differential Privacy, CCS 2016.
    """

    clip: float
    noise_multiplier: float | np.ndarray
    rate: float
    steps: int
    chunk: int | None = None

    def __post_init__(self) -> None:
        _check_clip("clip", self.clip)
        _extremes("noise_multiplier", np.asarray(self.noise_multiplier, np.float64))


def _check_claim(name: str, value: Any) -> tuple[float, str]:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        return check_positive(f"{name}[0]", value[0], infinite=True), value[1]
    raise TypeError(f"{name}={show(value)}: give an epsilon and how it is claimed, for instance (1.0, 'one round')")


@checked(
    clip=up_to_infinity,
    noise_multiplier=check_noise,
    client_noise=functools.partial(check_noise, axes=(0, 1, 2)),
    weights=functools.partial(check_numbers, axes=(1, 2), zero=True),
    delta=probability,
    claim=_check_claim,
    least_total=at_least_0,
)
@dataclasses.dataclass(frozen=True, eq=False)
class Mechanism:
    r"""What leaves the clients, and how it is bounded and noised.

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
            sum of weights. A zeroed-out client keeps its coin, so that epsilon stays finite, but the divisor
            shows the cohort: under Poisson sampling nothing is amplified.
        communicates: False where nothing ever leaves a client (then epsilon is 0).
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 C)) of C clients.
        claim: the epsilon that the paper's own rule would state for these numbers, and how it gets there.
        broken: why no finite epsilon exists, where a published mechanism has none.
        release: a number that each participant releases besides its update, of which the clients' noise follows.
        least_total: m of a privacy filter. A client takes part only while :math:`\sum_k m_k^{-2} \le m^{-2}` over the
            multipliers of all that it ever sends: s / 2 of an update, under replace-one, and r of a released number.
            0 stops nobody.
        examples: how local steps protect single examples; None: they do not. For methods that pass it on to
            `jaxfl.local.train.train` (the FedAvg family).
        noise: "float" draws in single precision; "grid" (the server's noise only) draws whole steps of a grid, exactly.

    Guarantee: client-level privacy under zero-out adjacency; sensitivity of the sum `C max w`. With noise, sums are
        exact whatever the number of clients and their order (`jaxfl.privacy.sums`), so that this is what one client
        changes them by, to a relative 1e-5.

        "float" is a Gaussian on paper only. Its draws end at 5.42 standard deviations, are multiples of 2^-33 or so,
        and the released numbers can show which of two data sets they come from, at any epsilon; nothing that is stated
        covers this (Mironov, On significance of the least significant bits for differential privacy, CCS 2012).

        "grid" covers it. A step is :math:`z C \max w / 2^{15}`. Each client's weighted update is rounded to whole steps
        such that its norm is still at most w C (`round_within`), sums are whole numbers modulo 2^32, as under secure
        aggregation, and so is the noise :math:`\mathrm{round}(N(0, 2^{30}))` (`add_grid_noise`). For whole x,
        x + round(N) = round(x + N), and the modulus, the division by the denominator and single precision come after:
        all is post-processing of the Gaussian mechanism, whose epsilon holds. Sums wrap beyond 65,536 standard
        deviations, which is no matter for privacy and does not happen. Noise in local steps (`examples`) stays as it
        is. For a method whose builder makes the mechanism:
        `method._replace(mechanism=dataclasses.replace(method.mechanism, noise="grid"))`.
    Source: Geyer et al. 2017; McMahan et al. 2018 (arXiv:1710.06963).
    """

    clip: Number = math.inf
    noise_multiplier: Number | Float[Array, "T"] | tuple[float, ...] = 0.0
    client_noise: Number | Float[Array, "T"] | np.ndarray = 0.0
    sampling: Sampling = Full()
    weights: np.ndarray | None = None
    denominator: Literal["expected", "participants"] = "expected"
    communicates: bool = True
    delta: float | None = None
    claim: tuple[float, str] | None = None
    broken: str | None = None
    release: Release | None = None
    least_total: float | None = None
    examples: PerExample | None = None
    noise: Literal["float", "grid"] = "float"

    def __post_init__(self) -> None:
        if self.noisy and not traced(self.clip) and math.isinf(self.clip):
            raise ValueError(f"clip={self.clip!r} with noise: noise is in multiples of clip, so give a finite number")
        if self.release is not None and self.broken is None and (not self.release.noise or self.least_total is None):
            raise ValueError(
                f"release={self.release!r}, least_total={self.least_total!r}: noise that follows from private numbers "
                "needs noise on them and a filter; else say in broken why there is no finite epsilon"
            )
        self._check_single_precision()
        if self.noise == "grid":
            self._check_grid()

    def _check_single_precision(self) -> None:
        """Refuse what vanishes or overflows where the engine squares and multiplies it."""
        _check_clip("clip", self.clip)
        weights = _extremes("weights", self.weight_table.max(axis=1))  # smaller ones are given by the largest's noise
        for name in ("noise_multiplier", "client_noise"):
            if not traced(getattr(self, name)):
                on_sum = np.outer(_extremes(name, np.asarray(getattr(self, name), np.float64)), weights)
                if np.max(getattr(self, name)) > _MOST_NOISE:  # else it would stop at the ends of a sum's 64 bits
                    raise ValueError(f"{name}={show(getattr(self, name))}: give at most {_MOST_NOISE:g}")
                _extremes(f"{name} times weights", on_sum)
        if self.least_total is not None:
            _extremes("least_total", np.asarray(self.least_total, np.float64))
        if self.release is not None:
            _extremes("release.noise", np.asarray(self.release.noise, np.float64))

    def failure_probability(self, clients: int) -> float:
        """Delta: the one given, or the default for so many clients."""
        return default_delta(clients) if self.delta is None else self.delta

    def _check_grid(self) -> None:
        least = self.noise_multiplier
        if not traced(least) and np.min(np.asarray(least, np.float64)) < _LEAST_ON_GRID:
            raise ValueError(
                f"noise='grid' with noise_multiplier={least!r}: a step follows from the noise, and sums of such fine "
                f"ones wrap; give at least {_LEAST_ON_GRID} in every round, or noise='float'"
            )
        if self.clients_noisy or self.release is not None:
            raise ValueError(
                f"noise='grid' with client_noise={self.client_noise!r}, release={self.release!r}: a sum of rounded "
                "Gaussians is no rounded Gaussian; let the server add all noise, or give noise='float'"
            )

    def check_resolution(self, coordinates: int) -> None:
        """Require a grid on which updates of so many coordinates are more than zeros and ones."""
        if traced(self.noise_multiplier):  # the norm is bounded all the same
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
    def clients_noisy(self) -> bool:
        """Whether clients add noise."""
        return traced(self.client_noise) or bool(np.any(np.asarray(self.client_noise)))

    @property
    def noise_multiplier_table(self) -> Float[np.ndarray | Array, "T"]:
        """Noise multiplier z by round, one entry where it does not change."""
        return _numbers(self.noise_multiplier).reshape(-1)

    @property
    def client_noise_table(self) -> Float[np.ndarray | Array, "T C"]:
        """Client noise s by round and client, axes of length 1 where it does not change."""
        value = _numbers(self.client_noise)
        return value.reshape(-1, 1) if value.ndim < 2 else value

    @property
    def weight_table(self) -> Float[np.ndarray, "T C"]:
        """Weights w by round and client, axes of length 1 where it does not change."""
        return np.atleast_2d(np.ones(1) if self.weights is None else np.asarray(self.weights, np.float64))

    @property
    def example_noise_table(self) -> Float[np.ndarray, "1 C"]:
        """Noise multiplier of private local steps by client; 0 without them."""
        return np.atleast_2d(np.asarray(0.0 if self.examples is None else self.examples.noise_multiplier, np.float64))

    @property
    def adaptive(self) -> bool:
        """Whether the clients' noise or who takes part follows from earlier rounds."""
        return self.release is not None or self.least_total is not None

    def check_fits(self, clients: int, rounds: int) -> None:
        """Require tables that cover `rounds` rounds of `clients` clients, and a possible cohort."""
        check_count("clients", clients)
        check_count("rounds", rounds)
        self.sampling.expected(clients)
        tables = {"client_noise": self.client_noise_table, "weights": self.weight_table}
        tables["noise_multiplier"] = self.noise_multiplier_table[:, None]
        tables["examples.noise_multiplier"] = self.example_noise_table
        for name, table in tables.items():
            if table.shape[0] not in (1, rounds) or table.shape[1] not in (1, clients):
                raise ValueError(f"{name} has shape {table.shape}: it must fit {rounds} rounds and {clients} clients")
        if not np.all(self.weight_table.max(axis=1) > 0):
            raise ValueError(f"weights={self.weights!r}: every round needs a client with a weight above 0")


def default_delta(clients: int | None) -> float:
    """Smaller of 1e-5 and 1 / (10 C), since 1 / C allows publishing one client outright; None: up to 10,000 clients.

    >>> default_delta(100), default_delta(1_000_000)
    (1e-05, 1e-07)
    """
    return 1e-5 if clients is None else min(1e-5, 1 / (10 * clients))


def _check_clip(name: str, value: Number) -> None:
    if not traced(value) and not _LEAST_CLIP <= value <= _LARGE and not math.isinf(value):
        raise ValueError(f"{name}={value!r}: give a number from {_LEAST_CLIP:g} to {_LARGE:.3g}, as float32 squares it")


def _extremes(name: str, values: np.ndarray) -> np.ndarray:
    """Least and greatest of the values above 0, which single precision must be able to square."""
    found = values[values > 0]
    if not found.size:
        return np.zeros(0)
    low, high = found.min(), found.max()
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


def noise_share(noise_multiplier: Number, sampling: Sampling, clients: int | None) -> Number:
    r"""Std over C that each client adds, so that an expected cohort's sum has z: :math:`z / \sqrt{qN}`."""
    if clients is None:
        raise ValueError("clients=None: here each client adds its share of the noise, so give the number of clients")
    return noise_multiplier / math.sqrt(sampling.expected(clients))


class RoundNoise(NamedTuple):
    """The mechanism's numbers for one round, as the engine uses them."""

    noise_multiplier: Float[Array, ""]
    client_noise: Float[Array, "#C"]
    weights: Float[Array, "#C"]
    denominator: Float[Array, ""]
    example_noise: Float[Array, "#C"]


def round_numbers(mechanism: Mechanism, clients: int, round_: Int[Array, ""]) -> RoundNoise:
    """Read the tables at one round (traced)."""

    def row(table: np.ndarray | Array) -> Array:
        return jnp.asarray(table, jnp.float32)[jnp.minimum(round_, table.shape[0] - 1)]

    weights = row(mechanism.weight_table)
    total = jnp.sum(weights) * (clients if weights.shape[0] == 1 else 1)
    return RoundNoise(
        noise_multiplier=row(mechanism.noise_multiplier_table),
        client_noise=row(mechanism.client_noise_table),
        weights=weights,
        denominator=total * (mechanism.sampling.expected(clients) / clients),
        example_noise=row(mechanism.example_noise_table),
    )


def adapt(
    mechanism: Mechanism, numbers: RoundNoise, account: Account
) -> tuple[RoundNoise, Float[Array, "C"], Bool[Array, "C"]]:
    r"""This round's client noise, what it adds to each client's account, and who can still afford it.

    All of it follows from what was released in earlier rounds. The cost is the inverse square of a multiplier,
    :math:`(2 / s)^2 + 1 / r^2`: an update under replace-one and a released number.
    """
    noise, release = numbers.client_noise, mechanism.release
    if release is not None:
        noise = noise / release.shares(account.released)
    cost = jnp.zeros(account.spent.shape)
    if not mechanism.least_total:  # no filter: nothing is charged
        return numbers._replace(client_noise=noise), cost, cost == 0
    cost = cost + (2 / noise) ** 2
    if release is not None:
        cost = cost + release.noise**-2
    afford = account.spent + cost <= mechanism.least_total**-2 * (1 - ROUNDING)
    return numbers._replace(client_noise=noise), cost, afford


def sum_unit(mechanism: Mechanism, numbers: RoundNoise) -> Float[Array, ""]:
    """What sums of this mechanism count in: a step of the grid; else, with noise, a 2^30th of the clip bound."""
    if not mechanism.noisy:
        return jnp.ones(())
    bound = mechanism.clip * jnp.max(numbers.weights)
    return bound * (numbers.noise_multiplier / STEPS if mechanism.noise == "grid" else 2.0**-30)


def server_noise(numbers: RoundNoise, present: Float[Array, ""]) -> Float[Array, ""]:
    r"""Std over C that the server adds to the sum, given the variance over C^2 that clients added.

    .. math:: D = \sqrt{\max(0, (z \max_i w_i)^2 - \mathrm{present})}
    """
    target = numbers.noise_multiplier * jnp.max(numbers.weights)
    return jnp.sqrt(jnp.maximum(0.0, target**2 - present))
