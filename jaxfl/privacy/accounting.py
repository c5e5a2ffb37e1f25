"""Ledger to epsilon, for two observers; planning, progress, and calibration to a target."""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxfl._validate import check_choice, check_count, check_fraction, check_positive
from jaxfl.privacy import accountants
from jaxfl.privacy.accountants import Rounds, plain_rounds
from jaxfl.privacy.mechanism import Full, Mechanism, Sampling
from jaxfl.privacy.observers import aggregate_view, upload_view
from jaxfl.types import Ledger

Observer = Literal["aggregate", "upload"]
Accountant = Literal["rdp", "pld"]
_FULL = Full()


class Epsilon(NamedTuple):
    """The largest epsilon over clients, each client's own, the bound it rests on, and why it is infinite."""

    value: float
    per_client: Float[np.ndarray, "C"]
    theorem: str
    reason: str | None


def epsilon(
    ledger: Ledger,
    mechanism: Mechanism,
    *,
    observer: Observer = "aggregate",
    accountant: Accountant = "rdp",
    delta: float | None = None,
    one_round: bool = False,
) -> Epsilon:
    """Compose what the engine did.

    Args:
        ledger: the rounds as they happened, or as planned (`planned_ledger`).
        mechanism: clip bound, sampling and denominator; its noise is read from the ledger.
        observer: "aggregate" (noisy sums only) or "upload" (every upload), see `jaxfl.privacy.observers`.
        accountant: "rdp", or "pld" (tighter).
        delta: failure probability; None: the mechanism's.
        one_round: the worst single round alone, in place of all of them.

    Guarantee: client-level; zero-out for the aggregate, replace-one for the uploads. Assumes that noise, weights
        and sampling do not depend on private data, and that the clip covers a client's whole update.

    >>> run = planned_ledger(Mechanism(clip=1.0, noise_multiplier=10.0), clients=4, rounds=100)
    >>> round(epsilon(run, Mechanism(clip=1.0, noise_multiplier=10.0), accountant="pld").value, 3)
    4.377
    """
    check_choice("observer", observer, ("aggregate", "upload"))
    check_choice("accountant", accountant, ("rdp", "pld"))
    delta = mechanism.delta if delta is None else delta
    check_fraction("delta", delta, one=False)
    done, clients = ledger.participants.shape
    if not mechanism.communicates or not done:
        return Epsilon(0.0, np.zeros(clients), "nothing leaves the clients", None)
    if unbounded := _unbounded(mechanism):
        return Epsilon(math.inf, np.full(clients, math.inf), "none", unbounded)
    rounds, theorem, reason = (aggregate_view if observer == "aggregate" else upload_view)(ledger, mechanism)
    values = _evaluate(rounds, accountant, delta, one_round)
    per_client = np.array(np.broadcast_to(values, clients))
    worst = float(per_client.max())
    if math.isinf(worst):
        return Epsilon(worst, per_client, "none", reason)
    return Epsilon(worst, per_client, f"{theorem}; {accountant.upper()}", None)


def planned_ledger(mechanism: Mechanism, clients: int, rounds: int) -> Ledger:
    """The ledger of a run not yet made, at its worst: every client takes part in every round."""
    check_count("clients", clients)
    check_count("rounds", rounds)
    mechanism.check_fits(clients, rounds)
    noise, weights = (_rows(table, rounds) for table in (mechanism.client_noise_table, mechanism.weight_table))
    multiplier = _rows(mechanism.noise_multiplier_table, rounds)
    variance = (noise * weights) ** 2
    present = variance.sum(axis=1) * (clients if variance.shape[1] == 1 else 1)
    top_up = np.sqrt(np.maximum(0, (multiplier * weights.max(axis=1)) ** 2 - present))
    return Ledger(np.broadcast_to(True, (rounds, clients)), noise, weights, top_up, multiplier)


def running_epsilon(mechanism: Mechanism, clients: int) -> Callable[[int], float]:
    """Build a function from rounds done to the aggregate RDP epsilon so far, cheap enough for a progress bar.

    An upper bound of what `epsilon` will say: it skips the second bound that fixed-size sampling has.

    >>> spent = running_epsilon(Mechanism(clip=1.0, noise_multiplier=10.0), clients=4)
    >>> spent(0), round(spent(100), 2)
    (0.0, 4.73)
    """
    tables = mechanism.client_noise_table, mechanism.weight_table, mechanism.noise_multiplier_table
    known = max(len(table) for table in tables)
    if not mechanism.communicates or _unbounded(mechanism):
        return lambda done: math.inf if mechanism.communicates and done else 0.0
    rounds = aggregate_view(planned_ledger(mechanism, clients, known), mechanism)[0]
    total = np.cumsum(accountants.divergence_by_round(rounds), axis=0)

    def spent(done: int) -> float:
        if done == 0:
            return 0.0
        if known > 1 and done > known:
            raise ValueError(f"done={done!r}: the mechanism's schedule has {known} rounds")
        loss = total[done - 1] if known > 1 else done * total[0]
        return float(accountants.from_divergence(loss, mechanism.delta))

    return spent


def calibrate(
    epsilon: float,
    *,
    clients: int,
    rounds: int,
    sampling: Sampling = _FULL,
    delta: float = 1e-5,
    accountant: Accountant = "rdp",
    shape: Sequence[float] | np.ndarray | None = None,
) -> float:
    """Find the smallest noise multiplier z whose aggregate epsilon after `rounds` is at most `epsilon`.

    Args:
        epsilon: target for the whole run; the result stays below it, by at most 0.1% where it can.
        clients: number of clients.
        rounds: T.
        sampling: who takes part.
        delta: failure probability.
        accountant: "rdp", or "pld" (tighter, needs less noise).
        shape: relative noise by round `[T]`; the result is then the factor that multiplies it.

    >>> round(calibrate(1.0, clients=20, rounds=100, accountant="pld"), 1)
    37.3
    """
    check_count("rounds", rounds)
    if shape is not None and (np.shape(shape) != (rounds,) or not np.all(np.asarray(shape) > 0)):
        raise ValueError(f"shape={shape!r}: give {rounds} numbers above 0, one per round")
    scale, repeats = (np.ones(1), np.array([rounds])) if shape is None else (np.asarray(shape), np.ones(rounds, int))

    def spent(multiplier: float, by: Accountant) -> float:
        noise = tuple((multiplier * scale).tolist())
        mechanism = Mechanism(clip=1.0, noise_multiplier=noise, sampling=sampling, delta=delta)
        view = aggregate_view(planned_ledger(mechanism, clients, len(noise)), mechanism)[0]
        return float(np.max(_evaluate(view._replace(repeats=repeats), by, delta)))

    return _calibrate(epsilon, delta, accountant, spent, math.sqrt(rounds) / float(np.mean(scale)))


def calibrate_upload(
    epsilon: float, *, participations: int, delta: float = 1e-5, accountant: Accountant = "rdp"
) -> float:
    """Find the smallest client noise s (std over C) whose upload epsilon is at most `epsilon`.

    Args:
        epsilon: target for the whole run, replace-one.
        participations: in how many rounds a client uploads, at most.
        delta: failure probability.
        accountant: "rdp", or "pld" (tighter, needs less noise).

    >>> round(calibrate_upload(1.0, participations=100, accountant="pld"), 1)
    74.6
    """
    check_count("participations", participations)

    def spent(noise: float, by: Accountant) -> float:
        view = plain_rounds(np.full((1, 1), noise / 2), np.array([participations]))
        return float(np.max(_evaluate(view, by, delta)))

    return _calibrate(epsilon, delta, accountant, spent, math.sqrt(participations))


def _calibrate(
    target: float, delta: float, accountant: Accountant, spent: Callable[[float, Accountant], float], guess: float
) -> float:
    """Bracket by doubling, then interpolate or bisect; `enough` always meets the target."""
    check_positive("epsilon", target)
    check_fraction("delta", delta, one=False)
    check_choice("accountant", accountant, ("rdp", "pld"))
    if accountant == "pld":  # a cheap place to start; PLDs are slow far below it
        guess = _calibrate(target, delta, "rdp", spent, guess)
    enough = guess
    while spent(enough, accountant) > target:
        enough *= 2
    value, short = spent(enough, accountant), enough / 2
    while (above := spent(short, accountant)) <= target and short > 1e-6 * guess:
        value, enough, short = above, short, short / 2
    attempt = 0
    while value < target * (1 - 5e-4) and enough > short * (1 + 1e-6):
        attempt, part = attempt + 1, 0.5
        if attempt % 3 and value > 0 and math.isfinite(above):  # a straight line in logarithms
            part = math.log(target * (1 - 2e-4) / value) / math.log(above / value)
        middle = enough * (short / enough) ** min(max(part, 0.01), 0.99)
        now = spent(middle, accountant)
        if now <= target:
            enough, value = middle, now
        else:
            short, above = middle, now
    return enough


def _unbounded(mechanism: Mechanism) -> str | None:
    """Why no noise could help."""
    return mechanism.broken or ("updates are not clipped" if math.isinf(mechanism.clip) else None)


def _evaluate(rounds: Rounds, accountant: Accountant, delta: float, one_round: bool = False) -> np.ndarray:
    """Epsilon per client; with `one_round`, of the worst row alone."""
    curve = accountants.rdp_epsilon if accountant == "rdp" else accountants.pld_epsilon
    if not one_round:
        return curve(rounds, delta)
    swapped = None if rounds.swapped is None else rounds.swapped.min(keepdims=True)
    row = rounds._replace(
        plain=rounds.plain.min(axis=0, keepdims=True),
        sampled=rounds.sampled.min(axis=0, keepdims=True),
        swapped=swapped,
        repeats=np.ones(1, int),
    )
    nothing = np.full((1, 1), math.inf)
    plain, sampled = row._replace(sampled=nothing), row._replace(plain=nothing, swapped=None)
    return np.maximum(curve(plain, delta), curve(sampled, delta))


def _rows(table: np.ndarray, rounds: int) -> np.ndarray:
    return np.broadcast_to(table, (rounds, *table.shape[1:]))
