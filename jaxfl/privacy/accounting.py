"""Ledger to epsilon, for two observers; planning, progress, and calibration to a target."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import dp_accounting
import numpy as np
from dp_accounting.rdp import compute_epsilon
from jaxtyping import Float

from jaxfl._validate import check_fraction, check_numbers, checked, probability, show
from jaxfl.privacy import accountants
from jaxfl.privacy.accountants import Accountant, least_epsilon
from jaxfl.privacy.mechanism import Full, Mechanism, Poisson, Sampling, default_delta
from jaxfl.privacy.observers import (
    OPEN_UPLOADS,
    View,
    affordable,
    aggregate_view,
    check_filter,
    plain_view,
    upload_view,
)
from jaxfl.types import Ledger

Observer = Literal["aggregate", "upload", "client"]
Unit = Literal["client", "example"]
BOTH: tuple[Accountant, ...] = ("pld", "rdp")
_FULL = Full()
_FILTERS: dict[Accountant, str] = {
    "rdp": "a Rényi filter (Feldman and Zrnic 2021)",
    "pld": "a filter of Gaussian privacy (Smith and Thakurta 2022)",
}


def check_ledger(name: str, value: Any) -> Ledger:
    """Require a ledger of rounds and clients whose tables fit."""
    if not isinstance(value, Ledger):
        raise TypeError(f"{name}={show(value)}: give a Ledger, of a run or from jaxfl.privacy.planned_ledger")
    shape = np.shape(value.participants)
    if len(shape) != 2:
        raise ValueError(f"{name}.participants has shape {shape}: give [T, C]")
    fits = {"client_noise": (shape[0], (1, shape[1])), "weights": (shape[0], (1, shape[1]))}
    for field, (rounds, clients) in fits.items():
        found = np.shape(getattr(value, field))
        if len(found) != 2 or found[0] != rounds or found[1] not in clients:
            raise ValueError(f"{name}.{field} has shape {found}: give [{rounds}, {clients[1]}] or [{rounds}, 1]")
    for field in ("server_noise", "noise_multiplier"):
        if np.shape(getattr(value, field)) != shape[:1]:
            raise ValueError(f"{name}.{field} has shape {np.shape(getattr(value, field))}: give [{shape[0]}]")
    return value


class Epsilon(NamedTuple):
    """The largest epsilon over clients, each client's own, the bound it rests on, and why it is infinite."""

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
    """Compose what the engine did.

    Args:
        ledger: the rounds as they happened, or as planned (`planned_ledger`).
        mechanism: clip bound, sampling and denominator; its noise is read from the ledger.
        observer: "aggregate" (noisy sums only), "upload" (every upload), or "client" (another client: the sums, and the
            noise that it added itself), see `jaxfl.privacy.observers`.
        accountant: "pld": the smallest valid bound, RDP's where only RDP has a theorem that makes it so (sampling
            without replacement); or "rdp" alone.
        delta: failure probability; None: the mechanism's.
        one_round: the worst round of the worst client alone, for all clients, in place of all rounds.
        unit: "example": one of the client's examples is replaced by another. Without clipping of examples that may
            change the whole update, from one end of the clip's ball to the other: replace-one for all observers.
            Whether the client takes part does not depend on it, so that sampling amplifies as it does for clients. All
            clients get the epsilon of the worst. Examples that are clipped one by one have `example_epsilon`.
        stateful: clients keep a state. Sampling without replacement then amplifies nothing that is proven, since later
            updates of those who took a client's place may tell of its absence; Poisson sampling still does.

    Guarantee: of a client, or of one of its examples (`unit`); zero-out of a client for the aggregate, replace-one for
        the uploads. Assumes that noise, weights and sampling do not depend on private data, or only through what was
        released under the mechanism's filter, and that the clip covers a client's whole update.

    >>> run = planned_ledger(Mechanism(clip=1.0, noise_multiplier=10.0), clients=4, rounds=100)
    >>> mechanism = Mechanism(clip=1.0, noise_multiplier=10.0)
    >>> [round(epsilon(run, mechanism, accountant=accountant).value, 2) for accountant in ("pld", "rdp")]
    [4.38, 4.73]
    """
    asked = BOTH if accountant == "pld" else (accountant,)
    options = {"observer": observer, "delta": delta, "one_round": one_round, "unit": unit, "stateful": stateful}
    return tightest(epsilons(ledger, mechanism, by=asked, **options))


def tightest(found: Mapping[Any, Epsilon]) -> Epsilon:
    """The one of the least value; the first of equal ones."""
    return min(found.values(), key=lambda own: own.value)


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
    done, clients = ledger.participants.shape
    delta = mechanism.failure_probability(clients) if delta is None else delta
    check_fraction("delta", delta, one=False)
    if not mechanism.communicates or not done:
        return dict.fromkeys(by, Epsilon(0.0, np.zeros(clients), "nothing leaves the clients", None))
    if unbounded := _unbounded(mechanism):
        return dict.fromkeys(by, _infinite(clients, unbounded))
    if mechanism.least_total is not None:
        check_filter(ledger, mechanism.least_total)
        if not one_round:
            return {own: _filtered(mechanism.least_total, clients, own, delta) for own in by}
    # Under a filter the sums count as the uploads that they are made of.
    sums = observer != "upload" and mechanism.least_total is None
    if not sums and not np.any(ledger.client_noise):  # at once, without an array of rounds and a million clients
        infinite = np.where(np.any(ledger.participants, axis=0), math.inf, 0.0)
        return dict.fromkeys(by, Epsilon(float(infinite.max()), infinite, "none", OPEN_UPLOADS))
    if sums:
        view = aggregate_view(ledger, mechanism, replaced=unit == "example", insider=observer == "client")
        view = accountants.worst_client(view) if unit == "example" else view
        view = view._replace(swapped=None) if stateful else view
    else:
        view = upload_view(ledger, mechanism)
    parts = list(accountants.worst_rounds(view)) if one_round else [view]
    return {own: _worst(parts, own, delta, clients) for own in by}


def _worst(parts: Sequence[View], accountant: Accountant, delta: float, clients: int) -> Epsilon:
    """The largest of an accountant's epsilons of several views, for each client."""
    found = [accountants.bound(part, accountant, delta) for part in parts]
    per_client = np.array(np.broadcast_to(np.maximum.reduce([own.values for own in found]), clients))
    value = float(per_client.max())
    if math.isinf(value):
        return Epsilon(value, per_client, "none", parts[0].silent)
    return Epsilon(value, per_client, max(found, key=lambda own: own.values.max()).theorem, None)


@checked(ledger=check_ledger, delta=probability)
def example_epsilon(
    ledger: Ledger, mechanism: Mechanism, *, accountant: Accountant = "pld", delta: float | None = None
) -> Epsilon:
    """Compose the local steps of the rounds in which each client took part, for the examples of that client.

    What is sent follows from these steps, so the epsilon holds for both observers; noise that is added later, and
    cohorts that are hidden, are given no credit.

    Args:
        ledger: the rounds as they happened, or as planned; of a client's rounds the one of least noise counts for all.
        mechanism: names the steps (`examples`); their noise is read from the ledger.
        accountant: "pld", or "rdp".
        delta: failure probability; None: the mechanism's.

    Guarantee: example-level, zero-out; an example has one owner. Where there are more than 64 kinds of clients, every
        client counts as having taken part as often as the most frequent one.

    >>> from jaxfl.privacy.mechanism import PerExample
    >>> run = Mechanism(examples=PerExample(clip=1.0, noise_multiplier=1.0, rate=0.1, steps=10))
    >>> round(example_epsilon(planned_ledger(run, clients=4, rounds=10), run, accountant="pld").value, 2)
    7.05
    """
    private, clients = mechanism.examples, ledger.participants.shape[1]
    delta = mechanism.failure_probability(clients) if delta is None else delta
    check_fraction("delta", delta, one=False)
    if private is None:
        return _infinite(clients, "examples are not clipped one by one")
    rounds = np.asarray(ledger.participants, bool).sum(axis=0)
    used = np.where(ledger.participants, ledger.example_noise, math.inf).min(axis=0, initial=math.inf)
    noise = accountants.round_down(np.where(rounds > 0, used, 0.0))
    kinds, kind_of_client = np.unique(np.stack([noise, rounds]), axis=1, return_inverse=True)
    if kinds.shape[1] > 64:
        kinds, kind_of_client = np.unique(
            np.stack([noise, np.full(clients, rounds.max())]), axis=1, return_inverse=True
        )
    evaluate = accountants.rdp_epsilon if accountant == "rdp" else accountants.pld_epsilon

    def of_kind(z: float, count: float) -> float:
        if not z or not count:
            return math.inf if count else 0.0
        return evaluate(math.inf, np.array([z]), private.rate, delta, int(count) * private.steps)

    own = np.array([of_kind(*kind) for kind in kinds.T])[kind_of_client.reshape(-1)]
    worst = float(own.max())
    if math.isinf(worst):
        return Epsilon(worst, own, "none", "local steps add no noise")
    theorem = f"Poisson-sampled Gaussian, rate {private.rate:g}, zero-out, {private.steps} steps per round"
    return Epsilon(worst, own, f"{theorem}; {accountant.upper()}", None)


@checked()
def planned_ledger(mechanism: Mechanism, clients: int, rounds: int) -> Ledger:
    """The ledger of a run not yet made, at its worst: every client takes part in every round that it can afford.

    Where noise follows from released numbers: with the full share of the budget for everyone.
    """
    mechanism.check_fits(clients, rounds)
    noise, weights = (_rows(table, rounds) for table in (mechanism.client_noise_table, mechanism.weight_table))
    multiplier = _rows(mechanism.noise_multiplier_table, rounds)
    variance = (noise * weights) ** 2
    present = variance.sum(axis=1) * (clients if variance.shape[1] == 1 else 1)
    top_up = np.sqrt(np.maximum(0, (multiplier * weights.max(axis=1)) ** 2 - present))
    released = np.full(rounds, math.inf if mechanism.release is None else mechanism.release.noise)
    examples = _rows(mechanism.example_noise_table, rounds)
    plan = Ledger(np.broadcast_to(True, (rounds, clients)), noise, weights, top_up, multiplier, released, examples)
    if mechanism.least_total is None:
        return plan
    return plan._replace(participants=affordable(plan, mechanism.least_total))


@checked()
def running_epsilon(mechanism: Mechanism, clients: int) -> Callable[[int], float]:
    """Build a function from rounds done to the aggregate RDP epsilon so far, cheap enough for a progress bar.

    An upper bound of what `epsilon` will say: it skips the second bound that fixed-size sampling has. To the last bit a
    function of the rounds alone, whatever it was asked before.

    >>> spent = running_epsilon(Mechanism(clip=1.0, noise_multiplier=10.0), clients=4)
    >>> spent(0), round(spent(100), 2)
    (0.0, 4.73)
    """
    if not mechanism.communicates or _unbounded(mechanism):
        return lambda done: math.inf if mechanism.communicates and done else 0.0
    delta = mechanism.failure_probability(clients)
    if mechanism.least_total is not None:
        limit = _filtered(mechanism.least_total, clients, "rdp", delta).value
        return lambda done: limit if done else 0.0
    tables = mechanism.client_noise_table, mechanism.weight_table, mechanism.noise_multiplier_table
    known = max(len(table) for table in tables)
    view = aggregate_view(planned_ledger(mechanism, clients, known), mechanism)
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
        # In an order that follows from the rounds alone, so that the last digit does too.
        for level, count in zip(*np.unique(sampled[sampled < math.inf], return_counts=True), strict=True):
            total += count * of_level(float(level))
        return float(compute_epsilon(orders, total, delta)[0])  # pyrefly: ignore[bad-argument-type]

    return spent


@checked(delta=probability, shape=check_numbers)
def calibrate(
    epsilon: float,
    *,
    clients: int,
    rounds: int,
    sampling: Sampling = _FULL,
    delta: float | None = None,
    accountant: Accountant = "pld",
    shape: Sequence[float] | np.ndarray | None = None,
) -> float:
    """Find the smallest noise multiplier z whose aggregate epsilon after `rounds` is at most `epsilon`.

    Args:
        epsilon: target for the whole run; the result stays below it, by at most 0.1% where it can.
        clients: number of clients.
        rounds: T.
        sampling: who takes part.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: "pld": the smallest valid bound, see `epsilon`; or "rdp", which asks for more noise.
        shape: relative noise by round `[T]`; the result is then the factor that multiplies it.

    >>> round(calibrate(1.0, clients=20, rounds=100), 1)
    37.3
    """
    if shape is not None and len(shape) != rounds:
        raise ValueError(f"shape={show(shape)}: give {rounds} numbers above 0, one per round")
    scale = (1.0,) if shape is None else tuple(np.asarray(shape, float).tolist())
    mechanism = Mechanism(clip=1.0, noise_multiplier=scale, sampling=sampling, delta=delta)
    view = aggregate_view(planned_ledger(mechanism, clients, len(scale)), mechanism)
    delta = mechanism.failure_probability(clients)
    return _calibrate(view, epsilon, delta, accountant, rounds if shape is None else 1)


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
        participations: in how many rounds a client uploads, at most.
        clients: their number, which the default delta follows from; None: up to 10,000.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: "pld" (exact here), or "rdp", which asks for more noise.

    >>> round(calibrate_upload(1.0, participations=100), 1)
    74.6
    """
    delta = default_delta(clients) if delta is None else delta
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
    """Find the smallest noise multiplier of `PerExample` whose epsilon is at most `epsilon`.

    Args:
        epsilon: target for the whole run, of an example, zero-out.
        rate: probability of an example to be in a batch.
        steps: local steps per round.
        participations: in how many rounds a client takes part, at most.
        clients: their number, which the default delta follows from; None: up to 10,000.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: "pld", or "rdp", which asks for more noise.

    >>> round(calibrate_examples(7.05, rate=0.1, steps=10, participations=10), 2)
    1.0
    """
    delta = default_delta(clients) if delta is None else delta
    total = {"clients": 1, "rounds": steps * participations, "sampling": Poisson(rate)}
    return calibrate(epsilon, delta=delta, accountant=accountant, **total)


def _calibrate(view: View, target: float, delta: float, accountant: Accountant, repeats: int) -> float:
    """Find the factor on the view's noise whose epsilon is at most the target, and by at most 0.1% less."""
    if accountant == "rdp":  # what a Gaussian would need, as if sampling scaled it
        total = accountants.total_multiplier(view.multiplier.min(axis=1)) / math.sqrt(repeats)
        noise = view.rate * dp_accounting.get_sigma_gaussian(target, delta) / float(total)
    else:  # PLDs are slow far below the noise that is needed
        noise = _calibrate(view, target, delta, "rdp", repeats)
    low, above, high, below = 0.0, math.inf, math.inf, 0.0  # too little noise and its epsilon; enough, and its
    aim, attempt = target * (1 - 2e-4), 0
    while below < target * (1 - 5e-4) and high > low * (1 + 1e-6):
        value = least_epsilon(view.scaled(noise), accountant, delta, repeats)
        if value > target:
            low, above = noise, value
        else:
            high, below = noise, value
        attempt += 1
        if low == 0 or math.isinf(high):  # epsilon falls like a power of the noise
            noise *= min(max((value / aim) ** 0.8, 0.25), 4.0)
        else:  # a straight line in logarithms
            straight = attempt % 4 and below > 0 and math.isfinite(above)
            part = math.log(aim / below) / math.log(above / below) if straight else 0.5
            noise = high * (low / high) ** min(max(part, 0.02), 0.98)
    return high


def _filtered(least_total: float, clients: int, accountant: Accountant, delta: float) -> Epsilon:
    """What a filter promises to every client, whatever was sent and released."""
    view = plain_view(np.full((1, 1), least_total), "", "a filter that stops nobody")
    value = least_epsilon(view, accountant, delta)
    if math.isinf(value):
        return _infinite(clients, view.silent)
    theorem = (
        f"fully adaptive composition by {_FILTERS[accountant]} of all that a client sends, Gaussian, replace-one, "
        f"which bounds zero-out of the sums too; {accountant.upper()}"
    )
    return Epsilon(value, np.full(clients, value), theorem, None)


def _infinite(clients: int, reason: str) -> Epsilon:
    return Epsilon(math.inf, np.full(clients, math.inf), "none", reason)


def _unbounded(mechanism: Mechanism) -> str | None:
    """Why no noise could help."""
    return mechanism.broken or ("updates are not clipped" if math.isinf(mechanism.clip) else None)


def _rows(table: Any, rounds: int) -> np.ndarray:
    return np.broadcast_to(table, (rounds, *table.shape[1:]))
