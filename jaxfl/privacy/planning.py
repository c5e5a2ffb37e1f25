"""Before a run: noise and limits for a budget, and which mechanism leaves the least noise."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float

from jaxfl._validate import at_least_0, check_count, checked, probability, show
from jaxfl.privacy.accountants import failure_probability
from jaxfl.privacy.accounting import Epsilon, calibrate, epsilons, planned_ledger, tightest
from jaxfl.privacy.mechanisms import BandedNoise, BLTNoise, Mechanism, blt
from jaxfl.privacy.mechanisms.correlated import CorrelatedNoise, prefix_error
from jaxfl.privacy.sampling import MOST_BINS, BallsInBins, CyclicPoisson, FixedSize, MinSeparation, Poisson

Kind = Literal["poisson", "fixed size", "balls in bins", "banded", "separated", "blt"]
"""Independent noise under three samplers; banded noise under cyclic Poisson sampling; banded and buffered noise at
minimum separation."""
KINDS: tuple[Kind, ...] = get_args(Kind)
_CYCLES = (2, 4, 8, 16, 32, 64)
_BUFFERS = 3


class Plan(NamedTuple):
    """A mechanism for a deployment, its epsilon and error."""

    kind: Kind
    mechanism: Mechanism
    """With a clip bound of 1: set yours by `dataclasses.replace`."""
    clients: int
    rounds: int
    delta: float
    noise_multiplier: float
    pld: Epsilon
    """By the smallest valid bound."""
    rdp: Epsilon
    error: float
    """Root mean square over rounds of the noise per model coordinate, over C (prefix sums of the noisy means)."""
    stateful: bool = False
    """Whether clients keep a state."""

    @property
    def epsilon(self) -> float:
        """The smaller."""
        return min(self.pld.value, self.rdp.value)

    def over_delta(self, deltas: Sequence[float]) -> Float[np.ndarray, "n"]:
        """Epsilon at other deltas."""
        return np.array([_epsilon(self.mechanism, self.clients, self.rounds, d, self.stateful) for d in deltas])

    def over_rounds(self, rounds: Sequence[int]) -> Float[np.ndarray, "n"]:
        """Epsilon after other numbers of rounds."""
        return np.array([_epsilon(self.mechanism, self.clients, n, self.delta, self.stateful) for n in rounds])


def _check_kinds(name: str, value: Any) -> tuple[Kind, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value or any(k not in KINDS for k in value):
        raise ValueError(f"{name}={show(value)}: give some of {KINDS}")
    return tuple(dict.fromkeys(value))


@checked(noise_multiplier=at_least_0, delta=probability, kinds=_check_kinds)
def plan(
    *,
    clients: int,
    cohort: int,
    rounds: int,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    kinds: Sequence[Kind] = KINDS,
    stateful: bool = False,
) -> list[Plan]:
    r"""Compare mechanisms for a deployment, least noise on the model first.

    The model has the prefix sums of the rounds' noisy means: with independent noise their root mean square is
    :math:`\frac{z}{m} \sqrt{(T + 1) / 2}` clip bounds per coordinate, with a strategy S of correlated noise
    :math:`\frac{z}{m} \|A S^{-1}\|_F / \sqrt{T}`. Clipping, heterogeneity and the server's optimizer are ignored.

    Args:
        clients: N.
        cohort: m, mean number of participants of a round.
        rounds: T.
        epsilon: the budget, which determines the noise; or
        noise_multiplier: z, which determines epsilon.
        delta: failure probability; None: min(1e-5, 1 / (10 N)).
        kinds: what to compare; "banded" and "separated" take the best cycle of 2 to 64 rounds whose groups hold a
            cohort.
        stateful: clients keep a state from round to round, see `epsilon`.

    >>> best, *others = plan(clients=100_000, cohort=1000, rounds=100, epsilon=8.0, kinds=("poisson", "separated"))
    >>> best.kind, round(best.noise_multiplier, 3), round(best.epsilon, 2)
    ('separated', 1.039, 8.0)
    """
    check_count("cohort", cohort, most=clients)
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(f"epsilon={epsilon!r}, noise_multiplier={noise_multiplier!r}: give one of the two")
    delta = failure_probability(delta, clients)

    def priced(kind: Kind, mechanism: Mechanism) -> Plan:
        if epsilon is None:
            z = float(noise_multiplier or 0.0)
        else:
            budget: Any = {"clients": clients, "rounds": rounds, "delta": delta, "stateful": stateful}
            z = calibrate(epsilon, mechanism=mechanism, **budget)
        mechanism = dataclasses.replace(mechanism, noise_multiplier=z)
        ledger = planned_ledger(mechanism, clients, rounds)
        bounds = epsilons(ledger, mechanism, delta=delta, stateful=stateful)
        error = z / mechanism.sampling.expected(clients) * noise_error(mechanism, rounds)
        return Plan(kind, mechanism, clients, rounds, delta, z, tightest(bounds), bounds["rdp"], error, stateful)

    def best(kind: Kind) -> list[Plan]:
        plans = (priced(kind, mechanism) for mechanism in _candidates(kind, clients, cohort, rounds))
        return sorted(plans, key=_error)[:1]

    plans = sorted((candidate for kind in kinds for candidate in best(kind)), key=_error)
    if not plans:
        raise ValueError(f"kinds={kinds!r}: none fits cohort={cohort} of clients={clients}; give others")
    return plans


def noise_error(mechanism: Mechanism, rounds: int) -> float:
    """Root mean square of the noise in the prefix sums of a run, over z C.

    The square root of (T + 1) / 2 for independent noise.

    >>> round(noise_error(Mechanism(), 7), 6)
    2.0
    """
    correlated = isinstance(mechanism, CorrelatedNoise)
    return prefix_error(mechanism.strategy(rounds) if correlated else np.ones(1), rounds)


@checked(noise_multiplier=at_least_0, delta=probability)
def most_rounds(
    epsilon: float,
    *,
    noise_multiplier: float,
    clients: int,
    cohort: int,
    delta: float | None = None,
    most: int = 100_000,
) -> int:
    """The largest number of rounds within a budget, under Poisson sampling; 0 if one is too many.

    >>> most_rounds(2.0, noise_multiplier=1.0, clients=10_000, cohort=100)
    1202
    """
    rate = check_count("cohort", cohort, most=clients) / clients

    mechanism = Mechanism(clip=1.0, noise_multiplier=noise_multiplier, sampling=Poisson(rate))
    return _largest(lambda rounds: _epsilon(mechanism, clients, rounds, delta) <= epsilon, most)


@checked(noise_multiplier=at_least_0, delta=probability)
def largest_cohort(
    epsilon: float, *, noise_multiplier: float, clients: int, rounds: int, delta: float | None = None
) -> int:
    """The largest expected cohort within a budget, under Poisson sampling; 0 if one client is too many.

    >>> largest_cohort(2.0, noise_multiplier=1.0, clients=10_000, rounds=1000)
    108
    """
    check_count("rounds", rounds)

    def within(cohort: int) -> bool:
        mechanism = Mechanism(clip=1.0, noise_multiplier=noise_multiplier, sampling=Poisson(cohort / clients))
        return _epsilon(mechanism, clients, rounds, delta) <= epsilon

    return _largest(within, check_count("clients", clients))


def _epsilon(mechanism: Mechanism, clients: int, rounds: int, delta: float | None, stateful: bool = False) -> float:
    ledger = planned_ledger(mechanism, clients, rounds)
    return tightest(epsilons(ledger, mechanism, delta=delta, stateful=stateful)).value


def _candidates(kind: Kind, clients: int, cohort: int, rounds: int) -> list[Mechanism]:
    """Mechanisms of a kind that fit, with clip and multiplier 1."""
    base: dict[str, Any] = {"clip": 1.0, "noise_multiplier": 1.0}
    cycles = [b for b in _CYCLES if b <= rounds and b * cohort <= clients]
    if kind == "poisson":
        return [Mechanism(**base, sampling=Poisson(cohort / clients))]
    if kind == "fixed size":
        return [Mechanism(**base, sampling=FixedSize(cohort))]
    if kind == "balls in bins":
        bins = round(clients / cohort)
        return [Mechanism(**base, sampling=BallsInBins(bins))] if bins <= MOST_BINS else []
    if kind == "banded":
        return [BandedNoise(**base, bands=b, sampling=CyclicPoisson(cohort / clients, b)) for b in cycles]
    separations = sorted({*cycles, min(rounds, clients // cohort)})
    if kind == "separated":
        return [BandedNoise(**base, bands=b, sampling=MinSeparation(cohort, b)) for b in separations]
    b = separations[-1]
    return [BLTNoise(**base, **blt(_BUFFERS, rounds, b)._asdict(), sampling=MinSeparation(cohort, b))]


def _error(candidate: Plan) -> float:
    return candidate.error


def _largest(within: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that meets a monotone condition; 0: none does."""
    high = 1
    while high < most and within(high):
        high = min(2 * high, most)
    if within(high):
        return high
    low = high // 2  # within, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low
