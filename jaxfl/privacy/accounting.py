"""From ledger to epsilon by observer; planned ledgers, progress, and calibration."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxfl._validate import (
    check_fraction,
    check_numbers,
    check_positive,
    checked,
    probability,
    show,
)
from jaxfl.lazy import dp_accounting
from jaxfl.privacy import accountants
from jaxfl.privacy.accountants import Accountant, failure_probability, least_epsilon
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.observers import Observer, View, plain_view
from jaxfl.privacy.sampling import Full, Poisson, Sampling, limited
from jaxfl.types import Ledger, Terms

Unit = Literal["client", "example"]
BOTH: tuple[Accountant, ...] = ("pld", "rdp")
_FULL = Full()
_TINY = "the noise or delta is too small to account for"


_LEAST_BUDGET = 1e-8
_MOST_BUDGET = 1e5


def check_budget(name: str, value: Any) -> float:
    """Require an epsilon for which accountants find the noise in floating point."""
    budget = check_positive(name, value)
    if _LEAST_BUDGET <= budget <= _MOST_BUDGET:
        return budget
    raise ValueError(
        f"{name} must be from {_LEAST_BUDGET:g} to {_MOST_BUDGET:g}, got {show(value)}. "
        "Give an epsilon in that range; a larger one protects nobody, so leave the noise out."
    )


def check_ledger(name: str, value: Any) -> Ledger:
    """Require a ledger whose tables fit one another."""
    if not isinstance(value, Ledger):
        raise TypeError(
            f"{name}={show(value)}: give a Ledger, of a run or from jaxfl.privacy.planned_ledger"
        )
    shape = np.shape(value.participants)
    if len(shape) != 2:
        raise ValueError(f"{name}.participants has shape {shape}: give [T, C]")
    fits = {"client_noise": (shape[0], (1, shape[1])), "weights": (shape[0], (1, shape[1]))}
    for field, (rounds, clients) in fits.items():
        axes = np.shape(getattr(value, field))
        if len(axes) != 2 or axes[0] != rounds or axes[1] not in clients:
            raise ValueError(
                f"{name}.{field} has shape {axes}: give [{rounds}, {clients[1]}] or [{rounds}, 1]"
            )
    for field in ("server_noise", "noise_multiplier"):
        if np.shape(getattr(value, field)) != shape[:1]:
            raise ValueError(
                f"{name}.{field} has shape {np.shape(getattr(value, field))}: give [{shape[0]}]"
            )
    return value


class Epsilon(NamedTuple):
    """The largest epsilon over clients, every client's, its theorem, and the reason if it is infinite."""

    value: float
    per_client: Float[np.ndarray, "C"]
    theorem: str
    reason: str | None


@checked(ledger=check_ledger, delta=probability)
def epsilon(
    ledger: Ledger,
    mechanism: Mechanism,
    *,
    observer: Observer = "aggregate",
    accountant: Accountant = "pld",
    delta: float | None = None,
    one_round: bool = False,
    unit: Unit = "client",
    stateful: bool = False,
) -> Epsilon:
    """Account for a ledger.

    Args:
        ledger: the rounds as they happened, or as planned (`planned_ledger`).
        mechanism: clip bound, sampling and denominator; its noise is read from the ledger.
        observer: "aggregate" (noisy sums only), "upload" (every upload), or "client" (another client: the sums, and the
            noise that it added itself), see `jaxfl.privacy.observers`.
        accountant: "pld": the smallest valid bound, by RDP where only RDP has a theorem (sampling without replacement);
            or "rdp" alone.
        delta: failure probability; None: min(1e-5, 1 / (10 C)) for C clients.
        one_round: the worst client's worst round, for all clients, instead of all rounds.
        unit: "example": one of the client's examples is replaced by another. Without per-example clipping this may move
            the update across the whole clip ball: replace-one for all observers. Participation does not depend on the
            example, so sampling amplifies as it does for clients. All clients get the worst epsilon. For per-example
            clipping, see `example_epsilon`.
        stateful: clients keep a state. Sampling without replacement then has no proven amplification, since later
            updates of the clients drawn in its place may reveal a client's absence; Poisson sampling still has.

    Guarantee: for a client, or one of its examples (`unit`); zero-out of a client for the aggregate, replace-one for
        uploads; by the mechanism's `view`. Assumes that noise, weights and sampling depend on private data at most
        through releases under the mechanism's filter, and that clipping covers a client's whole update.

    >>> run = planned_ledger(Mechanism(clip=1.0, noise_multiplier=10.0), clients=4, rounds=100)
    >>> mechanism = Mechanism(clip=1.0, noise_multiplier=10.0)
    >>> [round(epsilon(run, mechanism, accountant=accountant).value, 2) for accountant in ("pld", "rdp")]
    [4.38, 4.73]
    """
    by = BOTH if accountant == "pld" else (accountant,)
    options = {
        "observer": observer,
        "delta": delta,
        "one_round": one_round,
        "unit": unit,
        "stateful": stateful,
    }
    return tightest(epsilons(ledger, mechanism, by=by, **options))


def tightest(bounds: Mapping[Any, Epsilon]) -> Epsilon:
    """The smallest bound; the first on ties."""
    return min(bounds.values(), key=lambda bound: bound.value)


def epsilons(
    ledger: Ledger,
    mechanism: Mechanism,
    *,
    observer: Observer = "aggregate",
    by: Sequence[Accountant] = BOTH,
    delta: float | None = None,
    one_round: bool = False,
    unit: Unit = "client",
    stateful: bool = False,
) -> dict[Accountant, Epsilon]:
    """`epsilon` by the theorems of each accountant alone."""
    clients = ledger.participants.shape[1]
    delta = failure_probability(delta, clients)
    check_fraction("delta", delta, one=False)
    view = _view(ledger, mechanism, observer, one_round=one_round, unit=unit, stateful=stateful)
    parts = (
        [view]
        if accountants.trivial(view) or not one_round
        else list(accountants.worst_rounds(view))
    )
    return _bounds(parts, by, delta, clients)


def _view(
    ledger: Ledger,
    mechanism: Mechanism,
    observer: Observer,
    *,
    one_round: bool = False,
    unit: Unit = "client",
    stateful: bool = False,
) -> View:
    """Return what an observer learns about a unit."""
    view = mechanism.view(
        ledger, observer, replaced=unit == "example" and observer != "upload", one_round=one_round
    )
    if unit == "example":
        view = accountants.worst_client(view)
    return _of_states(view) if stateful else view


def _bounds(
    parts: Sequence[View], by: Sequence[Accountant], delta: float, clients: int, repeats: int = 1
) -> dict[Accountant, Epsilon]:
    """Return each accountant's largest epsilons over several views, each repeated."""
    if accountants.trivial(parts[0]) and len(parts) == 1:
        return dict.fromkeys(by, _trivial(parts[0], clients))
    return {accountant: _worst(parts, accountant, delta, clients, repeats) for accountant in by}


def _of_states(view: View) -> View:
    """Drop amplification that requires stateless clients."""
    return (
        view._replace(amplified=None)
        if view.amplified is not None and view.amplified.stateless
        else view
    )


def _trivial(view: View, clients: int) -> Epsilon:
    """Epsilon of a view that needs no accountant."""
    per_client = np.where((view.multiplier == 0).any(axis=0), math.inf, 0.0)
    per_client = np.array(np.broadcast_to(per_client, clients))
    value = float(per_client.max())
    return (
        Epsilon(value, per_client, "none", view.silent)
        if value
        else Epsilon(value, per_client, view.theorem, None)
    )


def _worst(
    parts: Sequence[View], accountant: Accountant, delta: float, clients: int, repeats: int = 1
) -> Epsilon:
    """Each client's largest epsilon over several views, each repeated, by one accountant."""
    bounds = [accountants.bound(part, accountant, delta, repeats) for part in parts]
    per_client = np.array(
        np.broadcast_to(np.maximum.reduce([bound.values for bound in bounds]), clients)
    )
    value = float(per_client.max())
    if math.isinf(value):
        tiny = all(np.all(part.multiplier > 0) for part in parts)
        return Epsilon(value, per_client, "none", _TINY if tiny else parts[0].silent)
    return Epsilon(
        value, per_client, max(bounds, key=lambda bound: bound.values.max()).theorem, None
    )


@checked(ledger=check_ledger, delta=probability)
def example_epsilon(
    ledger: Ledger,
    dp_sgd: DPSGD | None,
    *,
    accountant: Accountant = "pld",
    delta: float | None = None,
    examples: int | None = None,
) -> Epsilon:
    """Example-level epsilon of each client, composed over the local steps of its rounds.

    Messages are post-processing of these steps, so the epsilon holds for both observers. Noise that is added after the
    local steps does not lower the epsilon, nor do cohorts that the observer does not know.

    Args:
        ledger: the rounds as they happened, or as planned; a client's least noise counts for all its rounds.
        dp_sgd: the steps, whose noise is read from the ledger; None: there are none.
        accountant: "pld", or "rdp".
        delta: failure probability; None: min(1e-5, 1 / (10 N)) for N examples.
        examples: N, training examples of all clients together, a public number; None: as many as clients.

    Guarantee: example-level, zero-out; an example belongs to one client. With more than 64 kinds of clients, every
        client counts as participating as often as the most frequent one.

    >>> steps = DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.1, steps=10)
    >>> run = planned_ledger(Mechanism(), clients=4, rounds=10, dp_sgd=steps)
    >>> round(example_epsilon(run, steps, accountant="pld").value, 2)
    7.05
    """
    clients = ledger.participants.shape[1]
    delta = failure_probability(delta, clients if examples is None else examples)
    check_fraction("delta", delta, one=False)
    if dp_sgd is None:
        return no_epsilon(clients, "examples are not clipped one by one")
    rounds = np.asarray(ledger.participants, bool).sum(axis=0)
    used = np.where(ledger.participants, ledger.example_noise, math.inf).min(
        axis=0, initial=math.inf
    )
    noise = accountants.round_down(np.where(rounds > 0, used, 0.0))
    kinds, kind_of_client = np.unique(np.stack([noise, rounds]), axis=1, return_inverse=True)
    if kinds.shape[1] > 64:
        pooled = np.stack([noise, np.full(clients, rounds.max())])
        kinds, kind_of_client = np.unique(pooled, axis=1, return_inverse=True)
    evaluate = accountants.rdp_epsilon if accountant == "rdp" else accountants.pld_epsilon

    def of_kind(z: float, count: float) -> float:
        if not z or not count:
            return math.inf if count else 0.0
        return evaluate(math.inf, np.array([z]), dp_sgd.rate, delta, int(count) * dp_sgd.steps)

    per_client = np.array([of_kind(*kind) for kind in kinds.T])[kind_of_client.reshape(-1)]
    worst = float(per_client.max())
    if math.isinf(worst):
        return Epsilon(
            worst, per_client, "none", _TINY if kinds[0].all() else "local steps add no noise"
        )
    theorem = (
        f"Poisson-sampled Gaussian, rate {dp_sgd.rate:g}, zero-out, {dp_sgd.steps} steps per round"
    )
    return Epsilon(worst, per_client, f"{theorem}; {accountant.upper()}", None)


@checked()
def planned_ledger(
    mechanism: Mechanism, clients: int, rounds: int, dp_sgd: DPSGD | None = None
) -> Ledger:
    """Worst-case ledger of a planned run: every client participates in every round it can.

    Noise set by released numbers is planned with everyone's full budget share.
    """
    plan = mechanism.planned(clients, rounds)
    plan = plan._replace(participants=np.asarray(plan.participants, bool))
    if dp_sgd is None:
        return plan
    dp_sgd.check_fits(clients)
    noise = dp_sgd.noise_table
    return plan._replace(example_noise=np.broadcast_to(noise, (rounds, len(noise))))


class Spent(NamedTuple):
    """Epsilons of a run so far. `None` marks an observer or a unit that the run does not protect."""

    epsilon: float
    """One client against an observer of sums: the tightest valid bound, the headline of the statement."""
    rdp: float
    """The same by Rényi divergences alone."""
    upload: float | None = None
    """One client against an observer of uploads, where clients add noise."""
    example: float | None = None
    """One example, where local steps are private."""


@checked()
def running_epsilon(
    mechanism: Mechanism,
    clients: int,
    *,
    terms: Terms = Terms(),
    dp_sgd: DPSGD | None = None,
    examples: int | None = None,
    stateful: bool = False,
) -> Callable[[int | Ledger], Spent]:
    """Build a function from the rounds so far to their epsilons, as `privacy_statement` states them.

    The rounds are a ledger, or a number of planned ones. The result is bitwise a function of these rounds alone,
    whatever the earlier calls. It is cheap enough for every evaluation: one round's losses are computed once.

    Args:
        mechanism: the run's.
        clients: number of clients.
        terms: delta, and the reason if no epsilon exists.
        dp_sgd: the private local steps, None: there are none.
        examples: training examples of all clients, for the default delta of one example.
        stateful: clients keep a state, see `epsilon`.

    >>> spent = running_epsilon(Mechanism(clip=1.0, noise_multiplier=10.0), clients=4)
    >>> [round(value, 2) for value in spent(100)[:2]], spent(0).epsilon
    ([4.38, 4.73], 0.0)
    """
    delta = failure_probability(terms.delta, clients)
    tables = mechanism.client_noise_table, mechanism.weight_table, mechanism.noise_multiplier_table
    known = max(len(table) for table in tables)

    def planned(done: int) -> Ledger:
        if known > 1 and done > known:
            raise ValueError(f"done={done!r}: the mechanism's schedule has {known} rounds")
        return first_rounds(
            planned_ledger(mechanism, clients, known if known > 1 else max(done, 1), dp_sgd), done
        )

    def client(ledger: Ledger, observer: Observer) -> dict[Accountant, float]:
        if not len(ledger.participants):
            return dict.fromkeys(BOTH, 0.0)
        if terms.broken is not None:
            return dict.fromkeys(BOTH, math.inf)
        view = accountants.most_exposed(_view(ledger, mechanism, observer, stateful=stateful))
        bounds = _bounds([view], BOTH, delta, view.multiplier.shape[1])
        return {accountant: bound.value for accountant, bound in bounds.items()}

    def example(ledger: Ledger) -> float:
        if not len(ledger.participants):
            return 0.0
        options = {"delta": terms.delta, "examples": examples}
        return min(
            example_epsilon(ledger, dp_sgd, accountant=name, **options).value for name in BOTH
        )

    def spent(rounds: int | Ledger) -> Spent:
        ledger = rounds if isinstance(rounds, Ledger) else planned(rounds)
        sums = client(ledger, "aggregate")
        upload = min(client(ledger, "upload").values()) if mechanism.clients_noisy else None
        least = min([*sums.values(), *([] if upload is None else [upload])])
        return Spent(least, sums["rdp"], upload, None if dp_sgd is None else example(ledger))

    return spent


def first_rounds(ledger: Ledger, done: int) -> Ledger:
    """Return the first rounds of a ledger, whose arrays may stand for all rounds."""
    rounds = len(ledger.participants)

    def part(leaf: np.ndarray) -> np.ndarray:
        return leaf[:done] if len(leaf) == rounds else leaf

    fields: dict[str, Any] = {
        name: part(np.asarray(leaf)) for name, leaf in ledger._asdict().items() if name != "notes"
    }
    return Ledger(**fields, notes={name: part(note) for name, note in ledger.notes.items()})


def no_epsilon(clients: int, reason: str) -> Epsilon:
    """Infinite epsilon of unprotected clients."""
    return Epsilon(math.inf, np.full(clients, math.inf), "none", reason)


class Exposure(NamedTuple):
    """What the sums of a planned run reveal of its most exposed client: so many times what one view reveals."""

    view: View
    repeats: int

    def scaled(self, factor: float) -> "Exposure":
        """Return it with `factor` times the noise."""
        return self._replace(view=self.view.scaled(factor))

    def epsilons(
        self, clients: int, delta: float, by: Sequence[Accountant] = BOTH
    ) -> dict[Accountant, Epsilon]:
        """Return the epsilon by each accountant; every client counts as the most exposed one."""
        found = _bounds([self.view], by, delta, self.view.multiplier.shape[1], self.repeats)
        return {
            accountant: worst._replace(per_client=np.broadcast_to(worst.value, clients))
            for accountant, worst in found.items()
        }


def planned_exposure(
    mechanism: Mechanism,
    clients: int,
    rounds: int,
    *,
    participations: int | None = None,
    separation: int | None = None,
    stateful: bool = False,
) -> Exposure:
    """Return what a planned run reveals, by rounds, rates, and most participations and least gap of a client.

    Rounds that are alike are accounted for once, so neither the number of clients nor that of rounds costs memory,
    unless noise or weights follow a schedule, or noise is correlated.

    Args:
        mechanism: with its noise and its sampler.
        clients: number of clients.
        rounds: T.
        participations: most rounds of a client, and
        separation: fewest rounds from one to the next, as a server enforces them; None: those of the sampler.
        stateful: clients keep a state, see `epsilon`.
    """
    mechanism = dataclasses.replace(
        mechanism, sampling=limited(mechanism.sampling, rounds, participations, separation)
    )
    tables = mechanism.client_noise_table, mechanism.weight_table, mechanism.noise_multiplier_table
    length = max(len(table) for table in tables)
    if length not in (1, rounds):
        mechanism.check_fits(clients, rounds)
    view = mechanism.view(mechanism.planned(clients, length), "aggregate")
    if view.grows and length < rounds:
        length = min(view.turn or rounds, rounds)
        view = mechanism.view(mechanism.planned(clients, length), "aggregate")
    repeats = -(-rounds // length)
    if participations is not None:
        repeats = min(repeats, participations)
    view = accountants.worst_client(_of_states(view) if stateful else view)
    return Exposure(view, repeats)


@checked(epsilon=check_budget, delta=probability, shape=check_numbers)
def calibrate(
    epsilon: float,
    *,
    clients: int,
    rounds: int,
    sampling: Sampling = _FULL,
    mechanism: Mechanism | None = None,
    delta: float | None = None,
    accountant: Accountant = "pld",
    shape: Sequence[float] | np.ndarray | None = None,
    stateful: bool = False,
    participations: int | None = None,
    separation: int | None = None,
) -> float:
    r"""Find the smallest noise multiplier z whose aggregate epsilon after `rounds` is at most `epsilon`.

    Args:
        epsilon: target for the whole run; the result stays below it, by at most 0.1% where possible.
        clients: number of clients.
        rounds: T.
        sampling: who takes part.
        mechanism: the mechanism to calibrate, whose sampler replaces `sampling`; None: the Gaussian mechanism. Its
            multiplier is not read.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: "pld": the smallest valid bound, see `epsilon`; or "rdp", which needs more noise.
        shape: relative noise by round `[T]`; the result is then a factor on it.
        stateful: clients keep a state, see `epsilon`; without, fixed-size sampling may need less noise.
        participations: k, the most rounds in which a client takes part, which the server of a deployment enforces;
            None: as many as the sampler and `separation` allow.
        separation: b, the fewest rounds from one participation of a client to its next, which the server enforces, if
            the sampler does not keep them anyway; None: the sampler's.

    Limits take the place of amplification by sampling (see `jaxfl.privacy.sampling.Limited`): the run is one Gaussian
    of multiplier :math:`z / \sqrt{k}` with independent noise, and :math:`z / (\sqrt{k} \|c\|_2)` with a strategy c of
    at most b bands (`jaxfl.privacy.mechanisms.correlated`).

    >>> round(calibrate(1.0, clients=20, rounds=100), 1)
    37.3
    >>> round(calibrate(1.0, clients=20, rounds=400, participations=100), 1)
    37.3
    """
    if shape is not None and len(shape) != rounds:
        raise ValueError(f"shape={show(shape)}: give {rounds} numbers above 0, one per round")
    scale = np.ones(1) if shape is None else np.asarray(shape, float)
    base = Mechanism(clip=1.0, sampling=sampling) if mechanism is None else mechanism
    if base.clients_noisy:
        raise ValueError(
            f"mechanism={base!r}: its clients add noise; give one whose server does, or calibrate_upload"
        )
    if (weighed := len(base.weight_table)) not in (1, rounds):
        raise ValueError(
            f"mechanism.weights={show(base.weights)}, of {weighed} rounds: give one, or {rounds}"
        )

    def exposed(factor: float) -> Exposure:
        noise = tuple((factor * scale).tolist())
        probe = dataclasses.replace(
            base, clip=1.0, noise_multiplier=noise if len(noise) > 1 else noise[0]
        )
        limits: dict[str, Any] = {"participations": participations, "separation": separation}
        return planned_exposure(probe, clients, rounds, stateful=stateful, **limits)

    exposure = exposed(1.0)
    view = exposure.view
    if accountants.trivial(view) or not np.allclose(
        exposed(2.0).view.multiplier, 2 * view.multiplier
    ):
        raise ValueError(
            f"mechanism={base!r}: its epsilon is not that of noise_multiplier ({view.silent})"
        )
    return needed_noise(exposure, epsilon, failure_probability(delta, clients), accountant)


@checked(epsilon=check_budget, delta=probability)
def calibrate_upload(
    epsilon: float,
    *,
    participations: int,
    clients: int | None = None,
    delta: float | None = None,
    accountant: Accountant = "pld",
) -> float:
    """Find the smallest client noise s (std over C) whose upload epsilon is at most `epsilon`.

    Args:
        epsilon: target for the whole run, replace-one.
        participations: most rounds in which a client uploads.
        clients: their number, for the default delta; None: up to 10,000.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: "pld" (exact here), or "rdp", which needs more noise.

    >>> round(calibrate_upload(1.0, participations=100), 1)
    74.6
    """
    delta = failure_probability(delta, clients)
    exposure = Exposure(plain_view(np.full((1, 1), 0.5), "Gaussian"), participations)
    return needed_noise(exposure, epsilon, delta, accountant)


@checked(epsilon=check_budget, rate=check_fraction, delta=probability)
def calibrate_examples(
    epsilon: float,
    *,
    rate: float,
    steps: int,
    participations: int,
    examples: int | None = None,
    delta: float | None = None,
    accountant: Accountant = "pld",
) -> float:
    """Find the smallest noise multiplier of `DPSGD` whose epsilon is at most `epsilon`.

    Args:
        epsilon: example-level target for the whole run, zero-out.
        rate: probability that an example is in a batch.
        steps: local steps per round.
        participations: most rounds in which a client participates.
        examples: training examples of all clients, for the default delta; None: up to 10,000.
        delta: failure probability; None: min(1e-5, 1 / (10 examples)).
        accountant: "pld", or "rdp", which needs more noise.

    >>> round(calibrate_examples(7.05, rate=0.1, steps=10, participations=10), 2)
    1.0
    """
    delta = failure_probability(delta, examples)
    total = {"clients": 1, "rounds": steps * participations, "sampling": Poisson(rate)}
    return calibrate(epsilon, delta=delta, accountant=accountant, **total)


def rough_noise(exposure: Exposure, target: float, delta: float) -> float:
    """Return about the noise factor whose epsilon is the target: by RDP, with few orders.

    Where these prove no epsilon so small, whatever the noise, by the central limit.
    """
    view, repeats = exposure
    total = accountants.total_multiplier(view.multiplier.min(axis=1)) / math.sqrt(repeats)
    gaussian = view.rate * dp_accounting.get_sigma_gaussian(target, delta) / float(total)
    order = accountants.MOST_ROUGH
    if target <= math.log1p(-1 / order) - math.log(delta * order) / (order - 1):
        return gaussian
    return _search(
        lambda noise: least_epsilon(view.scaled(noise), "rdp", delta, repeats, _WIDE),
        target,
        gaussian,
    )


def needed_noise(exposure: Exposure, target: float, delta: float, accountant: Accountant) -> float:
    """Return the noise factor whose epsilon is at most the target, and at most 0.1% below it."""
    view, repeats = exposure

    def spent(noise: float, grid: float = 1.0) -> float:
        return least_epsilon(view.scaled(noise), accountant, delta, repeats, grid)

    noise = rough_noise(exposure, target, delta)
    if accountant == "pld" and view.hidden.any():
        return _search(spent, target, _by_wide_grids(spent, target, noise), slack=3e-4)
    return _search(spent, target, noise)


_MOST_ATTEMPTS = 60
_WIDE = 16.0
"""Of the grids of losses on which noise is sought: an epsilon takes a tenth of the time."""


def _by_wide_grids(spent: Callable[[float, float], float], target: float, noise: float) -> float:
    """Return about the noise that spends the target.

    What a grid adds to epsilon is proportional to its squared width, so two widths say what there is without. Where it
    adds much, at very small budgets, the first guess is as good.
    """
    if spent(noise, _WIDE) > target:
        return noise
    noise = _search(lambda factor: spent(factor, _WIDE), target, noise)
    value = spent(noise, _WIDE)
    half = spent(noise, _WIDE / 2)
    excess = value / (half - (value - half) / 3)
    return _search(
        lambda factor: spent(factor, _WIDE), target * excess * (1 - 1e-4), noise, slack=2e-4
    )


def _search(
    spent: Callable[[float], float], target: float, noise: float, slack: float = 5e-4
) -> float:
    """Return noise near a first guess that spends the target, or less by a share of at most `slack`."""
    low, above, high, below = (
        0.0,
        math.inf,
        math.inf,
        0.0,
    )  # noise too small, its epsilon; enough, its epsilon
    aim, attempt = target * (1 - 0.4 * slack), 0
    while below < target * (1 - slack) and high > low * (1 + 2e-5) and attempt < _MOST_ATTEMPTS:
        noise = float(
            f"{noise:.6g}"
        )  # processors differ in the last digits, and so would runs' folders
        value = spent(noise)
        if value > target:
            low, above = noise, value
        else:
            high, below = noise, value
        attempt += 1
        if low == 0 or math.isinf(high):  # epsilon decays like a power of the noise
            noise *= min(max((value / aim) ** 0.8, 0.25), 4.0)
        else:  # log-linear interpolation, or bisection
            interpolate = attempt % 4 and below > 0 and math.isfinite(above)
            part = math.log(aim / below) / math.log(above / below) if interpolate else 0.5
            noise = high * (low / high) ** min(max(part, 0.02), 0.98)
    if math.isinf(high):
        raise ValueError(
            f"epsilon must be larger for this accountant, which proves no less than {above:.3g} with noise of "
            f"{low:.3g}, got {target:.6g}. Give a larger epsilon, or the accountant 'pld'."
        )
    return high
