"""Plans before a run: noise and limits for a budget, and the mechanism of least noise."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
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
    Sampling,
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

_UNIT: dict[str, Any] = {"clip": 1.0, "noise_multiplier": 1.0}
"""Clip bound and multiplier of all candidates of `plan`."""

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
    deployment = _Deployment(
        clients=clients,
        cohort=cohort,
        rounds=rounds,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=failure_probability(delta, clients),
        stateful=stateful,
        participations=participations,
        separation=separation,
    )
    deployment.check_limits()
    # Either limit makes draws dependent, and leaves only the kinds that rely on no draw.
    candidates: dict[str, list[Mechanism]] = {
        kind: deployment.candidates(kind)
        for kind in kinds
        if not deployment.has_limits or kind in _KNOWN
    }
    for name, own in mechanisms.items():
        deployment.check_fits(f"mechanisms[{name!r}]", own)
        candidates[name] = [dataclasses.replace(own, clip=1.0, noise_multiplier=1.0)]
    # The mechanisms of a kind compete for the least error, and only the best one gets both bounds.
    with _planning_bar(sum(map(len, candidates.values())), progress) as step:
        found = {kind: deployment.best(rivals, step) for kind, rivals in candidates.items()}
        plans = [
            deployment.priced(kind, *chosen) for kind, chosen in found.items() if chosen is not None
        ]
    if not plans:
        under = ""
        if deployment.has_limits:
            under = f" under participations={participations}, separation={separation}"
        raise ValueError(
            f"kinds must have one that fits cohort={cohort} of clients={clients}{under}, "
            f"got {kinds!r}. Give other kinds, for instance 'any cohort'."
        )
    return sorted(plans, key=lambda candidate: candidate.error)


@contextlib.contextmanager
def _planning_bar(steps: int, show: bool) -> Iterator[Callable[[], None]]:
    """Show a bar on the terminal's standard error, and yield a function that moves it."""
    console = Console(stderr=True)
    # A file that collects the standard error gets no bar.
    hidden = not (show and console.is_terminal)
    with Progress(console=console, transient=True, disable=hidden) as bar:
        line = bar.add_task("mechanisms", total=steps)
        yield lambda: bar.advance(line)


class _Deployment(NamedTuple):
    """Deployment that needs a mechanism. The arguments of `plan` have the same names."""

    clients: int
    cohort: int
    rounds: int
    epsilon: float | None
    noise_multiplier: float | None
    delta: float
    stateful: bool
    participations: int | None
    separation: int | None

    @property
    def has_limits(self) -> bool:
        """Whether the server enforces a limit on how often or how soon a client returns."""
        return self.participations is not None or self.separation is not None

    def check_limits(self) -> None:
        """Require limits under which the cohorts of all rounds can be filled."""
        separation = self.separation
        # More groups would not all hold a cohort.
        most = self.clients // self.cohort
        if separation is not None and separation > most:
            raise ValueError(
                f"separation must be at most {most}, as often as cohorts of {self.cohort} fit "
                f"in {self.clients} clients, got {separation}. Give a smaller separation or cohort."
            )
        # A client takes part so often on average, rounded up.
        average = -(-self.rounds * self.cohort // self.clients)
        if self.participations is not None and self.participations < average:
            raise ValueError(
                f"participations must be at least {average}, because {self.rounds} rounds of "
                f"{self.cohort} of {self.clients} clients need as many on average, got "
                f"{self.participations}. Give a larger limit, a smaller cohort or fewer rounds."
            )

    def check_fits(self, name: str, mechanism: Mechanism) -> None:
        """Require the mean cohort size, a finite error, and noise that the multiplier sets."""
        error = float(mechanism.error(self.rounds))
        if not 0 < error < math.inf:
            raise ValueError(
                f"{name}.error({self.rounds}) must be a finite number above 0, got {error}. "
                "Return the root mean square of the noise in the model, over z C."
            )
        expected = mechanism.sampling.expected(self.clients)
        if abs(expected - self.cohort) > 1:
            raise ValueError(
                f"{name}.sampling must draw {self.cohort} clients on average, the cohort of the "
                f"plan, got {mechanism.sampling!r}, which draws {expected:.6g}. "
                "Give another sampler or cohort."
            )
        check_scales(
            name,
            mechanism,
            lambda z: self.exposed(dataclasses.replace(mechanism, clip=1.0, noise_multiplier=z)),
        )

    def candidates(self, kind: Kind) -> list[Mechanism]:
        """Return the mechanisms of a kind that fit, with clip and multiplier 1."""
        correlated = {"banded": self._banded, "separated": self._separated, "blt": self._blt}
        if kind not in correlated:
            return [Mechanism(**_UNIT, sampling=sampling) for sampling in self._samplers(kind)]
        # The error of correlated noise would take minutes for more rounds.
        if self.rounds > _MOST_CORRELATED:
            return []
        return correlated[kind]()

    def _samplers(self, kind: Kind) -> list[Sampling]:
        """Return the sampler of a kind of independent noise, as a list, or [] if none fits."""
        if kind == "poisson":
            return [Poisson(self.cohort / self.clients)]
        if kind == "fixed size":
            return [FixedSize(self.cohort)]
        if kind == "any cohort":
            return [MinSeparation(self.cohort, separation=1)]
        # The kind that is left is "balls in bins".
        bins = round(self.clients / self.cohort)
        if bins > MOST_BINS:
            return []
        return [BallsInBins(bins)]

    def _banded(self) -> list[Mechanism]:
        rate = self.cohort / self.clients
        return [
            BandedNoise(**_UNIT, bands=b, sampling=CyclicPoisson(rate, b)) for b in self._cycles()
        ]

    def _separated(self) -> list[Mechanism]:
        if self.separation is None:
            return [self._bands(b, b) for b in sorted({*self._cycles(), self._widest()})]
        # The limit fixes the groups, so candidates differ in their numbers of bands alone.
        fitting = (b for b in _CYCLES if b <= self.rounds)
        bands = {1, min(self.rounds, self.separation), *fitting}
        return [self._bands(b, self.separation) for b in sorted(bands)]

    def _bands(self, bands: int, gap: int) -> Mechanism:
        return BandedNoise(
            **_UNIT, bands=bands, sampling=MinSeparation(self.cohort, separation=gap)
        )

    def _blt(self) -> list[Mechanism]:
        # Without a limit, the largest gap leaves clients the fewest rounds.
        gap = self.separation or self._widest()
        numbers = blt(_BUFFERS, self.rounds, gap, self.participations)._asdict()
        return [BLTNoise(**_UNIT, **numbers, sampling=MinSeparation(self.cohort, separation=gap))]

    def _cycles(self) -> list[int]:
        """Return the cycles that fit in the run, and whose groups hold a cohort."""
        return [b for b in _CYCLES if b <= self.rounds and b * self.cohort <= self.clients]

    def _widest(self) -> int:
        # More groups would be too small for a cohort, or would not all get a turn.
        return min(self.rounds, self.clients // self.cohort)

    def best(
        self,
        mechanisms: Sequence[Mechanism],
        step: Callable[[], None],
    ) -> tuple[Mechanism, float] | None:
        """Return the mechanism of least error and its noise, or None if there are no mechanisms.

        Mechanisms that promise the least error are tried first.
        """
        found = None
        least = math.inf
        for mechanism in sorted(mechanisms, key=self.promised):
            # One epsilon shows that a mechanism is no better. Its noise takes a search over many.
            if found is None or not self.beaten(mechanism, least):
                z = self.needed(mechanism)
                error = self.error(mechanism, z)
                if error < least:
                    found = (mechanism, z)
                    least = error
            step()
        return found

    def promised(self, mechanism: Mechanism) -> float:
        """Return the approximate error of a mechanism with the noise that the budget needs.

        Without a budget, return the error with a multiplier of 1.
        """
        if self.epsilon is None:
            return self.error(mechanism, 1.0)
        noise = rough_noise(self.exposed(mechanism), self.epsilon, self.delta)
        return self.error(mechanism, noise)

    def beaten(self, mechanism: Mechanism, least: float) -> bool:
        """Return whether the mechanism exceeds a given budget if its error is to be `least`."""
        if self.epsilon is None:
            return False
        # The error is proportional to the noise, so this factor on it gives the error `least`.
        enough = self.exposed(mechanism).scaled(least / self.error(mechanism, 1.0))
        return least_epsilon(enough.view, "pld", self.delta, enough.repeats) > self.epsilon

    def needed(self, mechanism: Mechanism) -> float:
        """Return the noise multiplier that is given or that the budget needs."""
        if self.epsilon is None:
            # Without a budget the multiplier is given, and is never None here.
            return float(self.noise_multiplier or 0.0)
        return needed_noise(self.exposed(mechanism), self.epsilon, self.delta, "pld")

    def error(self, mechanism: Mechanism, z: float) -> float:
        """Return the error of a plan with multiplier z (`Plan.error`)."""
        weights = mechanism.weight_table
        # Noise is in multiples of the largest weight, and the denominator has the mean weight.
        share = np.max(weights.max(axis=1) / weights.mean(axis=1))
        expected = mechanism.sampling.expected(self.clients)
        return float(z * share / expected * mechanism.error(self.rounds))

    def exposed(self, mechanism: Mechanism) -> Exposure:
        """Return what the run reveals of its most exposed client (`planned_exposure`)."""
        return planned_exposure(
            mechanism,
            self.clients,
            self.rounds,
            participations=self.participations,
            separation=self.separation,
            stateful=self.stateful,
        )

    def priced(self, kind: str, mechanism: Mechanism, z: float) -> Plan:
        """Return the plan of a mechanism with multiplier z."""
        bounds = self.exposed(mechanism).scaled(z).epsilons(self.clients, self.delta)
        return Plan(
            kind=kind,
            mechanism=dataclasses.replace(mechanism, noise_multiplier=z),
            clients=self.clients,
            rounds=self.rounds,
            delta=self.delta,
            noise_multiplier=z,
            pld=tightest(bounds),
            rdp=bounds["rdp"],
            error=self.error(mechanism, z),
            stateful=self.stateful,
            participations=self.participations,
            separation=self.separation,
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
