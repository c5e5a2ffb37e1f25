"""Epsilon of a ledger for each observer, planned ledgers, and running epsilons."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxfl._support.checks import check_delta, checked, show
from jaxfl.privacy.accounting import accountants
from jaxfl.privacy.accounting.accountants import Accountant, failure_probability
from jaxfl.privacy.accounting.observers import Observer, View
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.types import Ledger, Terms

Unit = Literal["client", "example"]
"""What an epsilon protects: all of a client's data, or one of its examples."""

BOTH: tuple[Accountant, ...] = ("pld", "rdp")
"""All accountants."""

_TINY = "the noise or delta is too small to account for"


def check_ledger(name: str, value: Any) -> Ledger:
    """Require a ledger whose tables of participants, noise and weights fit, and return it.

    Raises:
        TypeError: The value is no ledger.
        ValueError: The participants are no table [T, C], or another table does not fit them.
    """
    if not isinstance(value, Ledger):
        raise TypeError(
            f"{name} must be a Ledger, got {show(value)}. "
            "Give the ledger of a run, or one from jaxfl.privacy.planned_ledger."
        )
    shape = np.shape(value.participants)
    if len(shape) != 2:
        raise ValueError(
            f"{name}.participants must have shape [T, C], got {shape}. "
            "Give a row per round, and a column per client."
        )
    rounds, clients = shape
    for field in ("client_noise", "weights"):
        axes = np.shape(getattr(value, field))
        if axes not in ((rounds, clients), (rounds, 1)):
            raise ValueError(
                f"{name}.{field} must have shape [{rounds}, {clients}] or [{rounds}, 1], "
                f"got {axes}. Give a row per round."
            )
    # A single row may stand for all rounds here, as it does without private local steps.
    allowed = {(rows, columns) for rows in (1, rounds) for columns in (1, clients)}
    axes = np.shape(value.example_noise)
    if axes not in allowed:
        raise ValueError(
            f"{name}.example_noise must have shape [{rounds}, {clients}], or axes of length 1, got "
            f"{axes}. Give a row per round."
        )
    for field in ("server_noise", "noise_multiplier"):
        axes = np.shape(getattr(value, field))
        if axes != (rounds,):
            raise ValueError(
                f"{name}.{field} must have shape [{rounds}], got {axes}. Give a number per round."
            )
    return value


class Epsilon(NamedTuple):
    """Largest epsilon over clients, each client's own, the theorem, and why it is infinite.

    The theorem is that of the largest epsilon, or "none" if this is infinite. The reason is None if
    it is finite.
    """

    value: float
    per_client: Float[np.ndarray, "C"]
    theorem: str
    reason: str | None


@checked(ledger=check_ledger, delta=check_delta)
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
    """Return the epsilon of a ledger.

    Args:
        ledger: Rounds as they happened, or as planned (`planned_ledger`).
        mechanism: Mechanism with the clip bound, the sampling and the denominator. Its noise is
            read from the ledger.
        observer: "aggregate" sees noisy sums only. "upload" sees every upload. "client" is another
            client, which sees the sums and knows the noise that it added itself. See
            `jaxfl.privacy.accounting.observers`.
        accountant: "pld" gives the smaller of the bounds by PLD and by RDP. RDP alone has theorems
            for Skellam noise and for some sampling, such as that without replacement. "rdp" uses
            RDP alone.
        delta: Failure probability. None stands for min(1e-5, 1 / (10 n)) with n clients.
        one_round: Whether the epsilon is that of the worst client's worst round, for all clients.
            The default accounts for all rounds.
        unit: "client" protects all of a client's data. "example" replaces one of the client's
            examples by another. Without per-example clipping this may replace the update by any
            other within the bound, so adjacency is replace-one for all observers. Participation
            does not depend on the example, so sampling amplifies as it does for clients. If one
            client has the least noise in every round, all clients get its epsilon. For per-example
            clipping, see `example_epsilon`.
        stateful: Whether clients keep a state. Sampling without replacement then has no proven
            amplification, because later updates of the clients that were drawn instead may reveal a
            client's absence. Poisson sampling still amplifies.

    Guarantee: Privacy of a client, or of one of its examples (`unit`), by the mechanism's `view`.
        Adjacency is zero-out of a client for the aggregate and for another client, and replace-one
        for uploads. Noise, weights and sampling are assumed to depend on private data at most
        through releases under the mechanism's filter. Clipping is assumed to cover a client's whole
        update.

    Raises:
        ValueError: The tables of the ledger do not fit one another, a round's noise is below its
            `noise_multiplier`, or delta is not in (0, 1).
        TypeError: `ledger` is no ledger.

    >>> run = planned_ledger(Mechanism(clip=1.0, noise_multiplier=10.0), clients=4, rounds=100)
    >>> mechanism = Mechanism(clip=1.0, noise_multiplier=10.0)
    >>> [round(epsilon(run, mechanism, accountant=name).value, 2) for name in ("pld", "rdp")]
    [4.38, 4.73]
    """
    by = BOTH
    if accountant != "pld":
        by = (accountant,)
    options = {
        "observer": observer,
        "delta": delta,
        "one_round": one_round,
        "unit": unit,
        "stateful": stateful,
    }
    return tightest(epsilons(ledger, mechanism, by=by, **options))


def tightest(bounds: Mapping[Any, Epsilon]) -> Epsilon:
    """Return the smallest bound, and the first one on ties."""
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
    """Return, by accountant, the epsilon that its theorems alone prove (see `bound`).

    Args:
        ledger: Rounds as they happened, or as planned.
        mechanism: Mechanism with the clip bound, the sampling and the denominator.
        observer: Observer, as in `epsilon`.
        by: Accountants.
        delta: Failure probability. None stands for min(1e-5, 1 / (10 n)) with n clients.
        one_round: Whether the epsilon is that of the worst client's worst round, as in `epsilon`.
        unit: Unit of protection, as in `epsilon`.
        stateful: Whether clients keep a state.
    """
    clients = ledger.participants.shape[1]
    delta = failure_probability(delta, clients)
    check_delta("delta", delta)
    view = _view(ledger, mechanism, observer, one_round=one_round, unit=unit, stateful=stateful)
    parts = [view]
    # A trivial view has the same largest epsilon for one round as for all.
    if one_round and not accountants.trivial(view):
        parts = list(accountants.worst_rounds(view))
    return bounds_of(parts, by, delta, clients)


def _view(
    ledger: Ledger,
    mechanism: Mechanism,
    observer: Observer,
    *,
    one_round: bool = False,
    unit: Unit = "client",
    stateful: bool = False,
) -> View:
    """Return what the observer learns about a unit.

    For an example it is the view of the client with the least noise in every round, if any.
    """
    # Views of uploads are under replace-one in any case.
    replaced = unit == "example" and observer != "upload"
    view = mechanism.view(ledger, observer, replaced=replaced, one_round=one_round)
    if unit == "example":
        view = accountants.worst_client(view)
    if stateful:
        return of_states(view)
    return view


def bounds_of(
    parts: Sequence[View], by: Sequence[Accountant], delta: float, clients: int, repeats: int = 1
) -> dict[Accountant, Epsilon]:
    """Return, by accountant, each client's largest epsilon over views that occur `repeats` times.

    An epsilon is not the sum over the views.
    """
    if accountants.trivial(parts[0]) and len(parts) == 1:
        return dict.fromkeys(by, _trivial(parts[0], clients))
    return {accountant: _worst(parts, accountant, delta, clients, repeats) for accountant in by}


def of_states(view: View) -> View:
    """Return the view for clients that keep a state.

    It has no amplification whose theorem requires stateless clients.
    """
    if view.amplified is not None and view.amplified.stateless:
        return view._replace(amplified=None)
    return view


def _trivial(view: View, clients: int) -> Epsilon:
    """Return the epsilon of a view whose multipliers are all 0 or infinite."""
    per_client = np.where((view.multiplier == 0).any(axis=0), math.inf, 0.0)
    # The copy can be written to, unlike a broadcast array.
    per_client = np.array(np.broadcast_to(per_client, clients))
    value = float(per_client.max())
    if value:
        return Epsilon(value, per_client, "none", view.why_infinite)
    return Epsilon(value, per_client, view.theorem, None)


def _worst(
    parts: Sequence[View], accountant: Accountant, delta: float, clients: int, repeats: int = 1
) -> Epsilon:
    """Return each client's largest epsilon over several repeated views, by one accountant."""
    bounds = [accountants.bound(part, accountant, delta, repeats) for part in parts]
    largest = np.maximum.reduce([bound.values for bound in bounds])
    per_client = np.array(np.broadcast_to(largest, clients))
    value = float(per_client.max())
    if math.isinf(value):
        reason = parts[0].why_infinite
        if all(np.all(part.multiplier > 0) for part in parts):
            reason = _TINY
        return Epsilon(value, per_client, "none", reason)
    worst = max(bounds, key=lambda bound: bound.values.max())
    return Epsilon(value, per_client, worst.theorem, None)


@checked(ledger=check_ledger, delta=check_delta)
def example_epsilon(
    ledger: Ledger,
    dp_sgd: DPSGD | None,
    *,
    accountant: Accountant = "pld",
    delta: float | None = None,
    examples: int | None = None,
) -> Epsilon:
    """Return the example-level epsilon of each client, composed over all of its local steps.

    Messages are post-processing of these steps, so the epsilon holds for every observer. Noise that
    is added after the local steps does not lower the epsilon, nor do cohorts that the observer does
    not know.

    Args:
        ledger: Rounds as they happened, or as planned. A client's least noise counts for all its
            rounds.
        dp_sgd: Private local steps, whose noise is read from the ledger. None stands for local
            steps without privacy, whose epsilon is infinite.
        accountant: "pld" or "rdp".
        delta: Failure probability. None stands for min(1e-5, 1 / (10 N)) with N examples.
        examples: N, the number of training examples of all clients together, which is public. None
            stands for the number of clients.

    Guarantee: Example-level privacy under zero-out adjacency. An example belongs to one client.
        With more than 64 kinds of clients, every client that ever participates counts as
        participating as often as the most frequent one, and as having the largest rate.

    >>> steps = DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.1, steps=10)
    >>> run = planned_ledger(Mechanism(), clients=4, rounds=10, dp_sgd=steps)
    >>> round(example_epsilon(run, steps, accountant="pld").value, 2)
    7.05
    """
    clients = ledger.participants.shape[1]
    if examples is None:
        examples = clients
    delta = failure_probability(delta, examples)
    check_delta("delta", delta)
    if dp_sgd is None:
        return no_epsilon(clients, "examples are not clipped one by one")
    # Clients with equal noise, rate and rounds share one epsilon, which is computed once.
    kinds, kind_of_client = _example_kinds(ledger, dp_sgd)
    evaluate = accountants.rdp_epsilon if accountant == "rdp" else accountants.pld_epsilon

    def of_kind(z: float, rate: float, count: float) -> float:
        # A client that never takes part costs nothing, whatever its noise.
        if not count:
            return 0.0
        if not z:
            return math.inf
        return evaluate(math.inf, np.array([z]), rate, delta, int(count) * dp_sgd.steps)

    per_client = np.array([of_kind(*kind) for kind in kinds.T])[kind_of_client]
    worst = float(per_client.max())
    if math.isinf(worst):
        noises, _, counts = kinds
        reason = "local steps add no noise"
        if noises[counts > 0].all():
            reason = _TINY
        return Epsilon(worst, per_client, "none", reason)
    rates = dp_sgd.rate_table
    # The keys of a dict are distinct, so equal rates are named once.
    rate = " to ".join(f"{rate:g}" for rate in dict.fromkeys([rates.min(), rates.max()]))
    theorem = f"Poisson-sampled Gaussian, rate {rate}, zero-out, {dp_sgd.steps} steps per round"
    return Epsilon(worst, per_client, f"{theorem}; {accountant.upper()}", None)


def _example_kinds(
    ledger: Ledger,
    dp_sgd: DPSGD,
) -> tuple[Float[np.ndarray, "3 K"], Int[np.ndarray, "C"]]:
    """Return distinct columns of noise, rate and rounds, and the column of each client."""
    clients = ledger.participants.shape[1]
    rounds = np.asarray(ledger.participants, bool).sum(axis=0)
    # A client's noise in rounds without it must not count as its least.
    noise_by_round = np.where(ledger.participants, ledger.example_noise, math.inf)
    least_noise = noise_by_round.min(axis=0, initial=math.inf)
    noise = accountants.round_down(np.where(rounds > 0, least_noise, 0.0))
    rates = np.broadcast_to(dp_sgd.rate_table, clients)
    kinds, kind_of_client = _distinct_columns(noise, rates, rounds)
    if kinds.shape[1] > 64:
        # More noise, a smaller rate and fewer rounds only lower epsilon.
        most_rounds = np.where(rounds > 0, rounds.max(), 0)
        return _distinct_columns(noise, np.full(clients, rates.max()), most_rounds)
    return kinds, kind_of_client


def _distinct_columns(
    *rows: np.ndarray,
) -> tuple[Float[np.ndarray, "R K"], Int[np.ndarray, "C"]]:
    table = np.stack(rows)
    columns, column_of_client = np.unique(table, axis=1, return_inverse=True)
    # NumPy 2.0 gives the inverse more than one axis.
    return columns, column_of_client.reshape(-1)


@checked()
def planned_ledger(
    mechanism: Mechanism, clients: int, rounds: int, dp_sgd: DPSGD | None = None
) -> Ledger:
    """Return the worst-case ledger of a planned run.

    Every client participates in every round it can. Noise that follows from released numbers is
    planned as if each client had its full share of the budget.

    Args:
        mechanism: Mechanism of the run.
        clients: Number of clients.
        rounds: Number of rounds.
        dp_sgd: Private local steps. None if there are none.
    """
    plan = mechanism.planned(clients, rounds)
    # A plan may have a `Turns` in place of the table, which NumPy builds here.
    plan = plan._replace(participants=np.asarray(plan.participants, bool))
    if dp_sgd is None:
        return plan
    dp_sgd.check_fits(clients)
    noise = dp_sgd.noise_table
    return plan._replace(example_noise=np.broadcast_to(noise, (rounds, len(noise))))


class Spent(NamedTuple):
    """Epsilons of a run so far. None marks an observer or a unit that the run does not protect."""

    epsilon: float
    """Tightest valid bound for one client against an observer of sums: the statement's headline."""
    rdp: float
    """Bound for one client against the same observer, by Rényi divergences alone."""
    upload: float | None = None
    """Epsilon of one client against an observer of uploads, if clients add noise."""
    example: float | None = None
    """Epsilon of one example, if local steps are private."""


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
    """Build a function from the rounds so far to their epsilons.

    Its epsilons are those that `privacy_statement` states. The rounds are a ledger, or a number of
    planned ones, for which more than the mechanism's schedule has is an error. Epsilons are bitwise
    a function of these rounds alone, whatever the earlier calls. A call is cheap enough for every
    evaluation, because one round's losses are computed once.

    Args:
        mechanism: Mechanism of the run.
        clients: Number of clients.
        terms: Terms with delta, and the reason if no epsilon exists.
        dp_sgd: Private local steps. None if there are none.
        examples: Number of training examples of all clients, for the default delta of one example.
        stateful: Whether clients keep a state (see `epsilon`).

    >>> spent = running_epsilon(Mechanism(clip=1.0, noise_multiplier=10.0), clients=4)
    >>> [round(value, 2) for value in spent(100)[:2]], spent(0).epsilon
    ([4.38, 4.73], 0.0)
    """
    delta = failure_probability(terms.delta, clients)

    def client(ledger: Ledger, observer: Observer) -> dict[Accountant, float]:
        # Before the first round nothing has been revealed, by whatever method.
        if not len(ledger.participants):
            return dict.fromkeys(BOTH, 0.0)
        if terms.broken is not None:
            return dict.fromkeys(BOTH, math.inf)
        return _largest_epsilons(_view(ledger, mechanism, observer, stateful=stateful), delta)

    def example(ledger: Ledger) -> float:
        if not len(ledger.participants):
            return 0.0
        options = {"delta": terms.delta, "examples": examples}
        return min(
            example_epsilon(ledger, dp_sgd, accountant=name, **options).value for name in BOTH
        )

    def spent(rounds: int | Ledger) -> Spent:
        if isinstance(rounds, Ledger):
            ledger = rounds
        else:
            ledger = _planned_rounds(mechanism, clients, rounds, dp_sgd)
        sums = client(ledger, "aggregate")
        least = min(sums.values())
        upload = None
        if mechanism.clients_noisy:
            upload = min(client(ledger, "upload").values())
            # Sums are post-processing of uploads, so a bound of uploads holds for sums too.
            least = min(least, upload)
        of_example = None
        if dp_sgd is not None:
            of_example = example(ledger)
        return Spent(least, sums["rdp"], upload, of_example)

    return spent


def _largest_epsilons(view: View, delta: float) -> dict[Accountant, float]:
    # Only the largest epsilon is asked for, so the client that has it may stand for all.
    exposed = accountants.most_exposed(view)
    bounds = bounds_of([exposed], BOTH, delta, exposed.multiplier.shape[1])
    return {accountant: bound.value for accountant, bound in bounds.items()}


def _planned_rounds(mechanism: Mechanism, clients: int, done: int, dp_sgd: DPSGD | None) -> Ledger:
    """Return the ledger of the first `done` rounds of a plan, which may be none."""
    known = rounds_of_schedule(mechanism)
    if known > 1 and done > known:
        raise ValueError(
            f"done must be at most {known}, the rounds of the mechanism's schedule, "
            f"got {done!r}. Give fewer rounds."
        )
    # Tables of a schedule fit no fewer rounds, and a plan has at least one round.
    length = max(done, 1)
    if known > 1:
        length = known
    return first_rounds(planned_ledger(mechanism, clients, length, dp_sgd), done)


def rounds_of_schedule(mechanism: Mechanism) -> int:
    """Return the number of rounds for which the mechanism has numbers, or 1 for any number."""
    tables = mechanism.client_noise_table, mechanism.weight_table, mechanism.noise_multiplier_table
    return max(len(table) for table in tables)


def first_rounds(ledger: Ledger, done: int) -> Ledger:
    """Return the first `done` rounds of a ledger.

    In a ledger of several rounds, arrays that have one entry for all rounds stay as they are.
    """
    rounds = len(ledger.participants)

    def part(leaf: np.ndarray) -> np.ndarray:
        if len(leaf) == rounds:
            return leaf[:done]
        return leaf

    fields: dict[str, Any] = {
        name: part(np.asarray(leaf)) for name, leaf in ledger._asdict().items() if name != "notes"
    }
    notes = {name: part(note) for name, note in ledger.notes.items()}
    return Ledger(**fields, notes=notes)


def no_epsilon(clients: int, reason: str) -> Epsilon:
    """Return the infinite epsilon of unprotected clients, with the reason."""
    return Epsilon(math.inf, np.full(clients, math.inf), "none", reason)
