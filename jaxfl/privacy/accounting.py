"""From ledger to epsilon by observer; planned ledgers, progress, and calibration."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxfl._validate import check_fraction, check_numbers, checked, probability, show
from jaxfl.lazy import dp_accounting
from jaxfl.privacy import accountants
from jaxfl.privacy.accountants import Accountant, failure_probability, least_epsilon
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.observers import Observer, View, plain_view
from jaxfl.privacy.sampling import Full, Poisson, Sampling
from jaxfl.types import Ledger, Terms

Unit = Literal["client", "example"]
BOTH: tuple[Accountant, ...] = ("pld", "rdp")
_FULL = Full()


def check_ledger(name: str, value: Any) -> Ledger:
    """Require a ledger whose tables fit one another."""
    if not isinstance(value, Ledger):
        raise TypeError(f"{name}={show(value)}: give a Ledger, of a run or from jaxfl.privacy.planned_ledger")
    shape = np.shape(value.participants)
    if len(shape) != 2:
        raise ValueError(f"{name}.participants has shape {shape}: give [T, C]")
    fits = {"client_noise": (shape[0], (1, shape[1])), "weights": (shape[0], (1, shape[1]))}
    for field, (rounds, clients) in fits.items():
        axes = np.shape(getattr(value, field))
        if len(axes) != 2 or axes[0] != rounds or axes[1] not in clients:
            raise ValueError(f"{name}.{field} has shape {axes}: give [{rounds}, {clients[1]}] or [{rounds}, 1]")
    for field in ("server_noise", "noise_multiplier"):
        if np.shape(getattr(value, field)) != shape[:1]:
            raise ValueError(f"{name}.{field} has shape {np.shape(getattr(value, field))}: give [{shape[0]}]")
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
    options = {"observer": observer, "delta": delta, "one_round": one_round, "unit": unit, "stateful": stateful}
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
    view = mechanism.view(ledger, observer, replaced=unit == "example" and observer != "upload", one_round=one_round)
    if unit == "example":
        view = accountants.worst_client(view)
    if stateful:
        view = _of_states(view)
    if accountants.trivial(view):
        return dict.fromkeys(by, _trivial(view, clients))
    parts = list(accountants.worst_rounds(view)) if one_round else [view]
    return {accountant: _worst(parts, accountant, delta, clients) for accountant in by}


def _of_states(view: View) -> View:
    """Drop amplification that requires stateless clients."""
    return view._replace(amplified=None) if view.amplified is not None and view.amplified.stateless else view


def _trivial(view: View, clients: int) -> Epsilon:
    """Epsilon of a view that needs no accountant."""
    per_client = np.where((view.multiplier == 0).any(axis=0), math.inf, 0.0)
    per_client = np.array(np.broadcast_to(per_client, clients))
    value = float(per_client.max())
    return Epsilon(value, per_client, "none", view.silent) if value else Epsilon(value, per_client, view.theorem, None)


def _worst(parts: Sequence[View], accountant: Accountant, delta: float, clients: int) -> Epsilon:
    """Each client's largest epsilon over several views, by one accountant."""
    bounds = [accountants.bound(part, accountant, delta) for part in parts]
    per_client = np.array(np.broadcast_to(np.maximum.reduce([bound.values for bound in bounds]), clients))
    value = float(per_client.max())
    if math.isinf(value):
        return Epsilon(value, per_client, "none", parts[0].silent)
    return Epsilon(value, per_client, max(bounds, key=lambda bound: bound.values.max()).theorem, None)


@checked(ledger=check_ledger, delta=probability)
def example_epsilon(
    ledger: Ledger, dp_sgd: DPSGD | None, *, accountant: Accountant = "pld", delta: float | None = None
) -> Epsilon:
    """Example-level epsilon of each client, composed over the local steps of its rounds.

    Messages are post-processing of these steps, so the epsilon holds for both observers; later noise and hidden cohorts
    get no credit.

    Args:
        ledger: the rounds as they happened, or as planned; a client's least noise counts for all its rounds.
        dp_sgd: the steps, whose noise is read from the ledger; None: there are none.
        accountant: "pld", or "rdp".
        delta: failure probability; None: min(1e-5, 1 / (10 C)) for C clients.

    Guarantee: example-level, zero-out; an example belongs to one client. With more than 64 kinds of clients, every
        client counts as participating as often as the most frequent one.

    >>> steps = DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.1, steps=10)
    >>> run = planned_ledger(Mechanism(), clients=4, rounds=10, dp_sgd=steps)
    >>> round(example_epsilon(run, steps, accountant="pld").value, 2)
    7.05
    """
    clients = ledger.participants.shape[1]
    delta = failure_probability(delta, clients)
    check_fraction("delta", delta, one=False)
    if dp_sgd is None:
        return no_epsilon(clients, "examples are not clipped one by one")
    rounds = np.asarray(ledger.participants, bool).sum(axis=0)
    used = np.where(ledger.participants, ledger.example_noise, math.inf).min(axis=0, initial=math.inf)
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
        return Epsilon(worst, per_client, "none", "local steps add no noise")
    theorem = f"Poisson-sampled Gaussian, rate {dp_sgd.rate:g}, zero-out, {dp_sgd.steps} steps per round"
    return Epsilon(worst, per_client, f"{theorem}; {accountant.upper()}", None)


@checked()
def planned_ledger(mechanism: Mechanism, clients: int, rounds: int, dp_sgd: DPSGD | None = None) -> Ledger:
    """Worst-case ledger of a planned run: every client participates in every round it can.

    Noise set by released numbers is planned with everyone's full budget share.
    """
    plan = mechanism.planned(clients, rounds)
    if dp_sgd is None:
        return plan
    dp_sgd.check_fits(clients)
    noise = dp_sgd.noise_table
    return plan._replace(example_noise=np.broadcast_to(noise, (rounds, len(noise))))


@checked()
def running_epsilon(mechanism: Mechanism, clients: int, *, terms: Terms = Terms()) -> Callable[[int], float]:
    """Build a function from rounds done to the aggregate RDP epsilon so far, cheap enough for a progress bar.

    An upper bound on `epsilon`: it skips the second bound of fixed-size sampling. Bitwise a function of the number of
    rounds alone, whatever the earlier calls.

    >>> spent = running_epsilon(Mechanism(clip=1.0, noise_multiplier=10.0), clients=4)
    >>> spent(0), round(spent(100), 2)
    (0.0, 4.73)
    """
    if terms.broken is not None and mechanism.communicates:
        return lambda done: math.inf if done else 0.0
    delta = failure_probability(terms.delta, clients)
    tables = mechanism.client_noise_table, mechanism.weight_table, mechanism.noise_multiplier_table
    known = max(len(table) for table in tables)
    view = mechanism.view(mechanism.planned(clients, known), "aggregate")
    if view.whole or view.grows:

        @functools.cache
        def of_run(rounds: int) -> float:
            whole = view if rounds == known else mechanism.view(mechanism.planned(clients, rounds), "aggregate")
            return _trivial(whole, clients).value if accountants.trivial(whole) else least_epsilon(whole, "rdp", delta)

        return lambda done: of_run(done if view.grows and known == 1 else known) if done else 0.0
    multiplier, hidden = view.multiplier.min(axis=1), view.hidden
    multiplier[hidden] = accountants.round_down(multiplier[hidden])

    def curve(plain: float, sampled: Float[np.ndarray, "R"]) -> Float[np.ndarray, "orders"]:
        accountant = accountants.rdp_accountant(sampled=bool(hidden.any()))
        return accountant.compose(accountants.gaussians(plain, sampled, view.rate)).rdp

    of_level = functools.cache(lambda level: curve(math.inf, np.array([level])))
    orders = accountants.rdp_accountant(sampled=bool(hidden.any())).orders

    def spent(done: int) -> float:
        if known > 1 and done > known:
            raise ValueError(f"done={done!r}: the mechanism's schedule has {known} rounds")
        rows = np.arange(done) % known
        plain, sampled = multiplier[rows[~hidden[rows]]], multiplier[rows[hidden[rows]]]
        total = curve(float(accountants.total_multiplier(plain)), np.empty(0))
        # The order, and so the last digit, depends on the rounds alone.
        for level, count in zip(*np.unique(sampled[sampled < math.inf], return_counts=True), strict=True):
            total += count * of_level(float(level))
        return float(dp_accounting.rdp.compute_epsilon(orders, total, delta)[0])  # pyrefly: ignore[bad-argument-type]

    return spent


def no_epsilon(clients: int, reason: str) -> Epsilon:
    """Infinite epsilon of unprotected clients."""
    return Epsilon(math.inf, np.full(clients, math.inf), "none", reason)


@checked(delta=probability, shape=check_numbers)
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
) -> float:
    """Find the smallest noise multiplier z whose aggregate epsilon after `rounds` is at most `epsilon`.

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

    >>> round(calibrate(1.0, clients=20, rounds=100), 1)
    37.3
    """
    if shape is not None and len(shape) != rounds:
        raise ValueError(f"shape={show(shape)}: give {rounds} numbers above 0, one per round")
    scale = (1.0,) if shape is None else tuple(np.asarray(shape, float).tolist())
    base = Mechanism(clip=1.0, sampling=sampling) if mechanism is None else mechanism
    if base.clients_noisy:
        raise ValueError(f"mechanism={base!r}: its clients add noise; give one whose server does, or calibrate_upload")
    if (weighed := len(base.weight_table)) not in (1, rounds):
        raise ValueError(f"mechanism.weights={show(base.weights)}, of {weighed} rounds: give one, or {rounds}")

    def planned(factor: float, rounds: int) -> View:
        noise = tuple(factor * value for value in scale)
        probe = dataclasses.replace(base, clip=1.0, noise_multiplier=noise if len(noise) > 1 else noise[0])
        return probe.view(probe.planned(clients, rounds), "aggregate")

    length = max(len(scale), len(base.weight_table))
    view = planned(1.0, length)
    if view.grows and length < rounds:
        length = rounds
        view = planned(1.0, length)
    if accountants.trivial(view) or not np.allclose(planned(2.0, length).multiplier, 2 * view.multiplier):
        raise ValueError(f"mechanism={base!r}: its epsilon is not that of noise_multiplier ({view.silent})")
    view = accountants.worst_client(_of_states(view) if stateful else view)
    return _calibrate(view, epsilon, failure_probability(delta, clients), accountant, rounds // length)


@checked(delta=probability)
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
    return _calibrate(plain_view(np.full((1, 1), 0.5), "Gaussian"), epsilon, delta, accountant, participations)


@checked(rate=check_fraction, delta=probability)
def calibrate_examples(
    epsilon: float,
    *,
    rate: float,
    steps: int,
    participations: int,
    clients: int | None = None,
    delta: float | None = None,
    accountant: Accountant = "pld",
) -> float:
    """Find the smallest noise multiplier of `DPSGD` whose epsilon is at most `epsilon`.

    Args:
        epsilon: example-level target for the whole run, zero-out.
        rate: probability that an example is in a batch.
        steps: local steps per round.
        participations: most rounds in which a client participates.
        clients: their number, for the default delta; None: up to 10,000.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: "pld", or "rdp", which needs more noise.

    >>> round(calibrate_examples(7.05, rate=0.1, steps=10, participations=10), 2)
    1.0
    """
    delta = failure_probability(delta, clients)
    total = {"clients": 1, "rounds": steps * participations, "sampling": Poisson(rate)}
    return calibrate(epsilon, delta=delta, accountant=accountant, **total)


def _calibrate(view: View, target: float, delta: float, accountant: Accountant, repeats: int) -> float:
    """Find the noise factor whose epsilon is at most the target, and at most 0.1% below it."""
    if accountant == "rdp":  # start from a Gaussian's noise times the rate
        total = accountants.total_multiplier(view.multiplier.min(axis=1)) / math.sqrt(repeats)
        noise = view.rate * dp_accounting.get_sigma_gaussian(target, delta) / float(total)
    else:  # start from RDP's: PLDs are slow far below the noise needed
        noise = _calibrate(view, target, delta, "rdp", repeats)
    low, above, high, below = 0.0, math.inf, math.inf, 0.0  # noise too small, its epsilon; enough, its epsilon
    aim, attempt = target * (1 - 2e-4), 0
    while below < target * (1 - 5e-4) and high > low * (1 + 2e-5):
        noise = float(f"{noise:.6g}")  # processors differ in the last digits, and so would runs' folders
        value = least_epsilon(view.scaled(noise), accountant, delta, repeats)
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
    return high
