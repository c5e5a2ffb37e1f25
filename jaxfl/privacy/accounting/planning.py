"""Plans before a run: noise and limits for a budget, and the mechanism of least noise."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.progress import Progress

from jaxfl._support.checks import (
    at_least_0,
    check_count,
    check_delta,
    check_instance,
    checked,
    is_listed,
    show,
)
from jaxfl.privacy.accounting.accountants import failure_probability, least_epsilon
from jaxfl.privacy.accounting.calibration import (
    Exposure,
    check_budget,
    check_scales,
    needed_noise,
    planned_exposure,
    rough_noise,
)
from jaxfl.privacy.accounting.ledgers import Epsilon, tightest
from jaxfl.privacy.mechanisms import BandedNoise, BLTNoise, Mechanism, blt
from jaxfl.privacy.mechanisms.gaussian import MOST_NOISE
from jaxfl.privacy.sampling import (
    MOST_BINS,
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    MinSeparation,
    Poisson,
    limited,
)

Kind = Literal["poisson", "fixed size", "balls in bins", "any cohort", "banded", "separated", "blt"]
"""Kinds of mechanisms that `plan` compares.

The first three are independent noise under three samplers. "any cohort" is independent noise
without amplification, whoever takes part. "banded" is banded noise under cyclic Poisson sampling.
"separated" and "blt" are banded and buffered noise at minimum separation.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""All kinds of mechanisms, in the order of `Kind`."""

_CYCLES = (2, 4, 8, 16, 32, 64)
"""Numbers of groups that `plan` tries, which are the rounds of a cycle."""

_KNOWN: tuple[Kind, ...] = ("any cohort", "separated", "blt")
"""Kinds whose guarantee does not rest on random sampling, and thus holds under limits."""

_NONE: dict[str, Mechanism] = {}
"""Default of `plan`, which adds no mechanisms to the kinds."""

_BUFFERS = 3
"""Number of buffers of "blt"."""

_MOST_CORRELATED = 100_000
"""Most rounds for which `plan` tries correlated noise. Its error then takes a minute."""


class Plan(NamedTuple):
    """Mechanism for a deployment, its epsilon and its error."""

    kind: str
    """Kind of the mechanism, or the name of a mechanism of your own."""
    mechanism: Mechanism
    """Mechanism with a clip bound of 1. Set your bound by `dataclasses.replace`.

    Its sampler does not keep to `participations`, nor in "any cohort" to `separation`. A simulated
    run therefore states the epsilon of all participations that the sampler allows, which may be
    larger than the plan's.
    """
    clients: int
    """Number of clients, N."""
    rounds: int
    """Number of rounds, T."""
    delta: float
    """Failure probability of both bounds."""
    noise_multiplier: float
    """Standard deviation of the noise on a round's sum, over C times the largest weight."""
    pld: Epsilon
    """Smallest valid bound on epsilon."""
    rdp: Epsilon
    """Bound on epsilon by Rényi divergences alone."""
    error: float
    """Root mean square over rounds of the noise per model coordinate, over C.

    The model has the prefix sums of the noisy means.
    """
    stateful: bool = False
    """Whether clients keep a state."""
    participations: int | None = None
    """Most rounds of a client, as the server enforces it. None leaves it to the sampler."""
    separation: int | None = None
    """Fewest rounds from one participation of a client to its next, as the server enforces it.

    None leaves it to the sampler.
    """

    @property
    def epsilon(self) -> float:
        """The smaller of the two bounds."""
        return min(self.pld.value, self.rdp.value)

    @property
    def needs(self) -> tuple[str, ...]:
        """What the epsilon asks of the deployment, as keys of `jaxfl.privacy.sampling.NEEDS`."""
        sampling = self.mechanism.sampling
        found = limited(sampling, self.rounds, self.participations, self.separation).needs(
            self.stateful
        )
        if self.separation is not None and sampling.gap <= self.separation:
            # The server's limit keeps clients as far apart as groups would.
            found = tuple("limits" if need == "groups" else need for need in found)
        elif "limits" in found and sampling.gap > 1:
            # The other limit does not replace the sampler's groups.
            found = ("groups", *found)
        return found or ("nothing",)

    def over_delta(self, deltas: Sequence[float]) -> Float[np.ndarray, "n"]:
        """Return the epsilon at each of `deltas`, with the plan's noise and rounds."""
        return np.array([self._after(self.rounds, delta) for delta in deltas])

    def over_rounds(self, rounds: Sequence[int]) -> Float[np.ndarray, "n"]:
        """Return the epsilon after each number of `rounds`, with the plan's noise and delta."""
        return np.array([self._after(number, self.delta) for number in rounds])

    def _after(self, rounds: int, delta: float) -> float:
        limits: dict[str, Any] = {
            "participations": self.participations,
            "separation": self.separation,
        }
        return _epsilon(
            self.mechanism, self.clients, rounds, delta, stateful=self.stateful, **limits
        )


def _check_kinds(name: str, value: Any) -> tuple[Kind, ...]:
    known = is_listed(value) and all(isinstance(kind, str) and kind in KINDS for kind in value)
    if not known:
        raise ValueError(
            f"{name} must be some of {', '.join(map(repr, KINDS))}, got {show(value)}. "
            "Give a tuple of these names."
        )
    # A kind that is named twice is compared once.
    return tuple(dict.fromkeys(value))


def _check_mechanisms(name: str, value: Any) -> dict[str, Mechanism]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(
            f"{name} must be a dict from names to mechanisms, got {show(value)}. "
            "Give for instance {'mine': mechanism}."
        )
    clashing = [key for key in value if key in KINDS]
    if clashing:
        raise ValueError(
            f"{name} must have other names than the kinds {KINDS}, got {show(value)} with "
            f"{clashing}. Give other names."
        )
    return {
        key: check_instance(f"{name}[{key!r}]", own, (Mechanism,)) for key, own in value.items()
    }


def _check_multiplier(name: str, value: Any) -> float:
    noise = at_least_0(name, value)
    if noise > MOST_NOISE:
        raise ValueError(
            f"{name} must be at most {MOST_NOISE:g}, got {show(value)}. Give less noise."
        )
    return noise


@checked(
    epsilon=check_budget,
    noise_multiplier=_check_multiplier,
    delta=check_delta,
    kinds=_check_kinds,
    mechanisms=_check_mechanisms,
)
def plan(
    *,
    clients: int,
    cohort: int,
    rounds: int,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    kinds: Sequence[Kind] = KINDS,
    mechanisms: Mapping[str, Mechanism] = _NONE,
    stateful: bool = False,
    participations: int | None = None,
    separation: int | None = None,
    progress: bool = False,
) -> list[Plan]:
    r"""Return the best plan of each kind of mechanism, least noise on the model first.

    The model has the prefix sums of the rounds' noisy means. With independent noise their root mean
    square is :math:`\frac{z}{m} \sqrt{(T + 1) / 2}` clip bounds per coordinate. With a strategy S
    of correlated noise it is :math:`\frac{z}{m} \|A S^{-1}\|_F / \sqrt{T}`
    (`jaxfl.privacy.mechanisms.correlated`). Clipping, heterogeneity and the server's optimizer are
    ignored.

    The order does not say which mechanism a deployment can run. `Plan.needs` does: most deployments
    cannot keep cohorts secret, and then only kinds that need "groups", "limits" or "nothing" count.

    Args:
        clients: N, the number of clients.
        cohort: m, the mean number of participants of a round.
        rounds: T, the number of rounds.
        epsilon: Budget, which determines the noise. None if `noise_multiplier` is given.
        noise_multiplier: z, which determines epsilon. None if `epsilon` is given.
        delta: Failure probability. None stands for min(1e-5, 1 / (10 N)).
        kinds: Kinds to compare. Empty if only `mechanisms` count. "banded" takes the best of
            the cycles of 2, 4, 8, 16, 32 and 64 rounds that fit in the run, and whose groups hold a
            cohort. Give another cycle as one of `mechanisms`. "separated" also tries the most
            groups that fit. Correlated noise is left out beyond 100,000 rounds.
        mechanisms: Further mechanisms by name, such as one of your own, each with its sampler,
            whose cohorts must have m participants on average. Their clip bounds and noise
            multipliers are not read. The noise that they leave follows from `Mechanism.error`.
        stateful: Whether clients keep a state from round to round (see `epsilon`).
        participations: k, the most rounds of a client, which the server enforces. None leaves it to
            the sampler. A limit, also that of `separation`, leaves only the kinds "any cohort",
            "separated" and "blt". The others rest on independent draws, which a limit makes
            dependent (see `calibrate`).
        separation: b, the fewest rounds from one participation of a client to its next, which the
            server enforces. None leaves it to the sampler.
        progress: Whether to show a bar on the terminal's standard error.

    Raises:
        ValueError: Both or neither of `epsilon` and `noise_multiplier` are given, the cohort does
            not fit the clients or the limits, or no kind fits. Or a mechanism of `mechanisms` has
            other cohorts, an error of 0 or infinity, or noise that its multiplier does not set.

    >>> best, *others = plan(
    ...     clients=100_000, cohort=1000, rounds=100, epsilon=8.0, kinds=("poisson", "separated")
    ... )
    >>> best.kind, round(best.noise_multiplier, 3), round(best.epsilon, 2)
    ('separated', 1.039, 8.0)
    """
    check_count("cohort", cohort, most=clients)
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            f"epsilon or noise_multiplier must be given, and not both, got epsilon={epsilon!r} and "
            f"noise_multiplier={noise_multiplier!r}. Give one of the two."
        )
    delta = failure_probability(delta, clients)
    limits: dict[str, Any] = {"participations": participations, "separation": separation}
    # Either limit makes draws dependent, and leaves only the kinds that rely on no draw.
    has_limits = participations is not None or separation is not None
    if separation is not None and separation * cohort > clients:
        raise ValueError(
            f"separation must be at most {clients // cohort}, as often as cohorts of {cohort} fit "
            f"in {clients} clients, got {separation}. Give a smaller separation or cohort."
        )
    # A client takes part so often on average, rounded up.
    average = -(-rounds * cohort // clients)
    if participations is not None and participations < average:
        raise ValueError(
            f"participations must be at least {average}, because {rounds} rounds of {cohort} of "
            f"{clients} clients need as many on average, got {participations}. "
            "Give a larger limit, a smaller cohort or fewer rounds."
        )

    def error(mechanism: Mechanism, z: float) -> float:
        """Return the error of a plan with multiplier z (`Plan.error`)."""
        weights = mechanism.weight_table
        # Noise is in multiples of the largest weight, and the denominator has the mean weight.
        share = np.max(weights.max(axis=1) / weights.mean(axis=1))
        return float(z * share / mechanism.sampling.expected(clients) * mechanism.error(rounds))

    def exposed(mechanism: Mechanism) -> Exposure:
        return planned_exposure(mechanism, clients, rounds, stateful=stateful, **limits)

    def promised(mechanism: Mechanism) -> float:
        """Return the approximate error of a mechanism with the noise that the budget needs.

        Without a budget, return the error with a multiplier of 1.
        """
        if epsilon is None:
            return error(mechanism, 1.0)
        return error(mechanism, rough_noise(exposed(mechanism), epsilon, delta))

    def needed(mechanism: Mechanism) -> float:
        """Return the noise multiplier that is given or that the budget needs."""
        if epsilon is None:
            # Without a budget the multiplier is given, and is never None here.
            return float(noise_multiplier or 0.0)
        return needed_noise(exposed(mechanism), epsilon, delta, "pld")

    def beaten(mechanism: Mechanism, least: float) -> bool:
        """Return whether the mechanism exceeds a given budget if its error is to be `least`."""
        if epsilon is None:
            return False
        # The error is proportional to the noise, so this factor on it gives the error `least`.
        enough = exposed(mechanism).scaled(least / error(mechanism, 1.0))
        return least_epsilon(enough.view, "pld", delta, enough.repeats) > epsilon

    def best(
        mechanisms: Sequence[Mechanism], step: Callable[[], None]
    ) -> tuple[Mechanism, float] | None:
        """Return the mechanism of least error and its noise, or None if there are no mechanisms.

        Mechanisms that promise the least error are tried first.
        """
        found = None
        least = math.inf
        for mechanism in sorted(mechanisms, key=promised):
            # One epsilon shows that a mechanism is no better. Its noise takes a search over many.
            if found is None or not beaten(mechanism, least):
                z = needed(mechanism)
                if error(mechanism, z) < least:
                    found = (mechanism, z)
                    least = error(mechanism, z)
            step()
        return found

    def priced(kind: str, mechanism: Mechanism, z: float) -> Plan:
        bounds = exposed(mechanism).scaled(z).epsilons(clients, delta)
        return Plan(
            kind=kind,
            mechanism=dataclasses.replace(mechanism, noise_multiplier=z),
            clients=clients,
            rounds=rounds,
            delta=delta,
            noise_multiplier=z,
            pld=tightest(bounds),
            rdp=bounds["rdp"],
            error=error(mechanism, z),
            stateful=stateful,
            **limits,
        )

    compared: list[Kind] = [kind for kind in kinds if not has_limits or kind in _KNOWN]
    candidates: dict[str, list[Mechanism]] = {
        kind: _candidates(kind, clients, cohort, rounds, participations, separation)
        for kind in compared
    }
    for name, own in mechanisms.items():
        _check_fits_plan(f"mechanisms[{name!r}]", own, clients, cohort, rounds, exposed)
        candidates[name] = [dataclasses.replace(own, clip=1.0, noise_multiplier=1.0)]
    # The mechanisms of a kind compete for the least error, and only the best one gets both bounds.
    with _planning_bar(sum(map(len, candidates.values())), progress) as step:
        found = {kind: best(mechanisms, step) for kind, mechanisms in candidates.items()}
        plans = [priced(kind, *chosen) for kind, chosen in found.items() if chosen is not None]
    if not plans:
        under = ""
        if has_limits:
            under = f" under participations={participations}, separation={separation}"
        raise ValueError(
            f"kinds must have one that fits cohort={cohort} of clients={clients}{under}, "
            f"got {kinds!r}. Give other kinds, for instance 'any cohort'."
        )
    return sorted(plans, key=_error)


@contextlib.contextmanager
def _planning_bar(steps: int, show: bool) -> Iterator[Callable[[], None]]:
    """Show a bar on the terminal's standard error, and yield a function that moves it."""
    console = Console(stderr=True)
    # A file that collects the standard error gets no bar.
    hidden = not (show and console.is_terminal)
    with Progress(console=console, transient=True, disable=hidden) as bar:
        line = bar.add_task("mechanisms", total=steps)
        yield lambda: bar.advance(line)


def _check_fits_plan(
    name: str,
    mechanism: Mechanism,
    clients: int,
    cohort: int,
    rounds: int,
    exposed: Callable[[Mechanism], Exposure],
) -> None:
    """Require the plan's mean cohort size, a finite error, and noise that the multiplier sets."""
    error = float(mechanism.error(rounds))
    if not 0 < error < math.inf:
        raise ValueError(
            f"{name}.error({rounds}) must be a finite number above 0, got {error}. "
            "Return the root mean square of the noise in the model, over z C."
        )
    expected = mechanism.sampling.expected(clients)
    if abs(expected - cohort) > 1:
        raise ValueError(
            f"{name}.sampling must draw {cohort} clients on average, the cohort of the plan, "
            f"got {mechanism.sampling!r}, which draws {expected:.6g}. "
            "Give another sampler or cohort."
        )
    check_scales(
        name,
        mechanism,
        lambda z: exposed(dataclasses.replace(mechanism, clip=1.0, noise_multiplier=z)),
    )


@checked(noise_multiplier=_check_multiplier, delta=check_delta)
def most_rounds(
    epsilon: float,
    *,
    noise_multiplier: float,
    clients: int,
    cohort: int,
    delta: float | None = None,
    most: int = 100_000,
) -> int:
    """Return the largest number of rounds within a budget, or 0 if one is too many.

    Cohorts are drawn by Poisson sampling.

    Args:
        epsilon: Budget for one client against an observer of sums, under zero-out adjacency.
        noise_multiplier: z, std of the noise on the sum, divided by the clip bound.
        clients: N, the number of clients.
        cohort: Expected number of participants of a round.
        delta: Failure probability. None stands for min(1e-5, 1 / (10 N)).
        most: Largest number of rounds that the search tries. It is returned if it is within the
            budget.

    Raises:
        ValueError: `cohort` is above `clients`.

    >>> most_rounds(2.0, noise_multiplier=1.0, clients=10_000, cohort=100)
    1202
    """
    rate = check_count("cohort", cohort, most=clients) / clients
    mechanism = Mechanism(clip=1.0, noise_multiplier=noise_multiplier, sampling=Poisson(rate))
    return _largest(lambda rounds: _epsilon(mechanism, clients, rounds, delta) <= epsilon, most)


@checked(noise_multiplier=_check_multiplier, delta=check_delta)
def largest_cohort(
    epsilon: float,
    *,
    noise_multiplier: float,
    clients: int,
    rounds: int,
    delta: float | None = None,
) -> int:
    """Return the largest expected cohort within a budget, or 0 if one client is too many.

    Cohorts are drawn by Poisson sampling.

    Args:
        epsilon: Budget for one client against an observer of sums.
        noise_multiplier: z, std of the noise on the sum, divided by the clip bound.
        clients: N, the number of clients.
        rounds: T, the number of rounds.
        delta: Failure probability. None stands for min(1e-5, 1 / (10 N)).

    >>> largest_cohort(2.0, noise_multiplier=1.0, clients=10_000, rounds=1000)
    108
    """
    check_count("rounds", rounds)

    def within(cohort: int) -> bool:
        sampling = Poisson(cohort / clients)
        mechanism = Mechanism(clip=1.0, noise_multiplier=noise_multiplier, sampling=sampling)
        return _epsilon(mechanism, clients, rounds, delta) <= epsilon

    return _largest(within, check_count("clients", clients))


def _epsilon(
    mechanism: Mechanism, clients: int, rounds: int, delta: float | None, **options: Any
) -> float:
    exposure = planned_exposure(mechanism, clients, rounds, **options)
    bounds = exposure.epsilons(clients, failure_probability(delta, clients))
    return tightest(bounds).value


def _candidates(
    kind: Kind,
    clients: int,
    cohort: int,
    rounds: int,
    participations: int | None,
    separation: int | None,
) -> list[Mechanism]:
    """Return the mechanisms of a kind that fit, with clip and multiplier 1."""
    base: dict[str, Any] = {"clip": 1.0, "noise_multiplier": 1.0}
    cycles = [b for b in _CYCLES if b <= rounds and b * cohort <= clients]
    if kind == "poisson":
        return [Mechanism(**base, sampling=Poisson(cohort / clients))]
    if kind == "fixed size":
        return [Mechanism(**base, sampling=FixedSize(cohort))]
    if kind == "balls in bins":
        bins = round(clients / cohort)
        if bins > MOST_BINS:
            return []
        return [Mechanism(**base, sampling=BallsInBins(bins))]
    if kind == "any cohort":
        return [Mechanism(**base, sampling=MinSeparation(cohort, separation=1))]
    if rounds > _MOST_CORRELATED:
        return []
    if kind == "banded":
        rate = cohort / clients
        return [BandedNoise(**base, bands=b, sampling=CyclicPoisson(rate, b)) for b in cycles]
    # More groups would be too small for a cohort, or would not all get a turn.
    widest = min(rounds, clients // cohort)
    if kind == "blt":
        gap = separation or widest
        numbers = blt(_BUFFERS, rounds, gap, participations)._asdict()
        return [BLTNoise(**base, **numbers, sampling=MinSeparation(cohort, separation=gap))]
    if separation is None:
        gaps = sorted({*cycles, widest})
        return [
            BandedNoise(**base, bands=b, sampling=MinSeparation(cohort, separation=b)) for b in gaps
        ]
    # The limit fixes the groups, so candidates differ in their numbers of bands alone.
    bands = {1, min(rounds, separation), *(b for b in _CYCLES if b <= rounds)}
    sampling = MinSeparation(cohort, separation=separation)
    return [BandedNoise(**base, bands=b, sampling=sampling) for b in sorted(bands)]


def _error(candidate: Plan) -> float:
    return candidate.error


def _largest(within: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` for which `within` is true, or 0 if there is none.

    `within` must be true up to some number, and false beyond it.
    """
    # Doubling finds a number that is too large in few steps, whatever `most` is.
    high = 1
    while high < most and within(high):
        high = min(2 * high, most)
    if within(high):
        return high
    # From here on `low` meets the condition, or is 0, and `high` does not meet it.
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if within(middle):
            low = middle
        else:
            high = middle
    return low
