"""Comparisons of methods at the same epsilons, each with tuned settings, over several seeds."""

import functools
import logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np

from jaxfl._support.checks import (
    check_array,
    check_fraction,
    check_seeds,
    checked,
    count_from_0,
    is_listed,
    show,
)
from jaxfl.data.clients import hold_out, leave_out
from jaxfl.privacy.accounting.calibration import check_budget
from jaxfl.report.comparison import ALL_DROPPED, Comparison, Row
from jaxfl.report.layout import COMPARISON
from jaxfl.report.page import write_report
from jaxfl.run.bars import SharedBar, shared_bar
from jaxfl.run.candidate_runs import (
    CandidateRuns,
    Finished,
    Split,
    Training,
    common_task,
    prepared_runs,
)
from jaxfl.run.candidates import Candidate, check_methods
from jaxfl.run.check import check_clients
from jaxfl.run.flags import under_own_flags
from jaxfl.run.recorder import Result
from jaxfl.run.simulate import CHECKS, RunOptions
from jaxfl.types import Clients

_LOG = logging.getLogger("jaxfl")

_NO_MEMORY = "out of memory"
_NO_SCORE = "no score"

_TUNING_EVALUATIONS = 20
"""Largest number of rounds after which the tuning scores a method that sends nothing.

An `eval_every` among the options takes its place.
"""


def _check_epsilons(name: str, value: Any) -> tuple[float, ...]:
    if isinstance(value, np.ndarray | jax.Array):
        value = check_array(name, value).ravel().tolist()
    listed = is_listed(value) and len(value) > 0
    # NaN differs from itself, but its text does not.
    if not listed or len({*map(str, value)}) < len(value):
        raise TypeError(
            f"{name} must be different numbers above 0, got {show(value)}. "
            "Give for instance (1.0, 8.0, math.inf)."
        )
    if any(epsilon == 0 for epsilon in value):
        raise ValueError(
            f"{name} must be numbers above 0, got {show(value)}. "
            "Leave 0 out, because methods that send nothing have epsilon 0 anyway."
        )
    return tuple(
        math.inf if epsilon == math.inf else check_budget(f"{name}[{i}]", epsilon)
        for i, epsilon in enumerate(value)
    )


def _check_population(name: str, value: Any) -> Callable[[int], Clients]:
    if callable(value):
        return value
    # Callers get a function in any case, so that they need not distinguish the two.
    fixed = check_clients(name, value)
    return lambda seed: fixed


def _check_validation(name: str, value: Any) -> float | Callable[[int], Clients]:
    if callable(value) or isinstance(value, Clients):
        return _check_population(name, value)
    return check_fraction(name, value, one=False)


@under_own_flags
@checked(
    **CHECKS | {"clients": _check_population},
    methods=check_methods,
    epsilons=_check_epsilons,
    seeds=check_seeds,
    validation=_check_validation,
    tuning_seed=count_from_0,
    unseen=functools.partial(check_fraction, zero=True, one=False),
)
def compare(
    methods: Mapping[str, Candidate],
    clients: Clients | Callable[[int], Clients],
    *,
    rounds: int,
    epsilons: Sequence[float] = (math.inf,),
    seeds: Sequence[int] = (0, 1, 2),
    validation: float | Clients | Callable[[int], Clients] = 0.2,
    tuning_seed: int = 100,
    unseen: float = 0.0,
    folder: str | os.PathLike | None = None,
    **options: Unpack[RunOptions],
) -> Comparison:
    """Tune every method at every epsilon on validation examples, and run the best point over seeds.

    All methods follow the same protocol:

    1. Each point is trained once at each epsilon, with the tuning seed. Its score is the headline
       metric on validation examples. These examples are held out of each client's training split,
       or belong to other clients (see `validation`). A method with a single point is not tuned,
       unless it sends nothing.
    2. The best point is run with every seed, on all training examples. The test examples are scored
       after its last round.

    Epsilon does not cover the tuning. The noise is the least that reaches the epsilon, by
    `jaxfl.privacy.calibrate`. Tuning scores a method that sends nothing in at most twenty of its
    rounds, unless `eval_every` is given, and the final runs stop at the best of these rounds.

    Tuning runs all points and epsilons of a method in one program, and so do the final runs of each
    seed. Values that decide a shape or a Python branch have a program each. If the clients' states
    do not fit in memory, fewer points share a program. A single point that does not fit is left
    out, and the table says so. With several processes, an error ends the comparison instead.

    Every point of every method is built and checked before the first round of any method. A point
    is never chosen if it has no score, or if all of its updates were dropped because they were not
    finite.

    Put baselines among the methods, such as `local_only`, a fine-tuned model, or
    `partial(dp_fedavg, ..., clip=math.inf, noise_multiplier=0.0)`.

    Args:
        methods: Candidates by name. Give all of them the same number of points.
        clients: Clients of all seeds, or a function from a seed to its clients, which should draw
            the partition.
        rounds: T, the number of rounds.
        epsilons: Targets of methods with noise. Infinity means no noise.
        seeds: Seeds of the final runs.
        validation: Share in (0, 1) of each client's training examples that tuning holds out. Or
            separate clients, or a function from a seed to them, whom tuning trains and tests. Give
            separate clients if clients have few examples, because holding out can remove a class.
        tuning_seed: Seed of the tuning, which must not be among `seeds`.
        unseen: Share in [0, 1) of the clients who take no part. Each seed leaves out the same
            clients for all methods. Only the others train, choose points, and count for noise. Rows
            then have `unseen`, the headline metric of the left-out clients on their own test
            examples. A method serves them by its `personalize`, which gets the server's last state,
            a first client state from `init`, and their training examples (see `evaluate`). Methods
            whose clients keep a model between rounds, such as `ditto`, `mr_mtl`, `apfl`, `pfedme`
            and `dp_lg`, serve them badly, because their first model is untrained. If a method sends
            nothing, the left-out clients train alone for the chosen rounds. If all seeds have the
            same clients, tuning and other seeds may train clients whom one seed leaves out.
        folder: Folder of the comparison. Every run has a folder in it, from which it is resumed. A
            later call may have other seeds and further methods, and reuses the runs that stay. A
            method with noise needs another folder for other epsilons. `comparison.json` has the
            result, and `report.html` shows it (see `write_report`). Clients' states do not stay
            there. None writes nothing.
        options: Options of the runs (see `RunOptions`). `progress` shows one bar for all runs.

    Raises:
        ValueError: An argument does not fit, or the tuning seed is among the seeds. Or a point
            cannot be built or run, or no example is held out to choose a point.
        TypeError: An argument, or a point, has the wrong type.
    """
    _check_tuning_seed(tuning_seed, seeds)
    root: pathlib.Path | None = None
    if folder is not None:
        root = pathlib.Path(folder)
    assert callable(clients)
    population = _population(clients, validation, seeds, tuning_seed, unseen)
    # One bar shows all runs, so no run has a bar of its own.
    shared: dict[str, Any] = {**options, "progress": False}
    runs = [
        prepared_runs(name, method, population.trained, rounds, root, shared)
        for name, method in methods.items()
    ]
    task = common_task(runs)
    for of_method in runs:
        of_method.check_newcomers(population.newcomers)
    if any(one.tuned for one in runs):
        _check_validated(population.held_out, validation)
    shown = options.get("progress", True) and jax.process_index() == 0
    tables = _compared(runs, population, epsilons, tuning_seed, shown)
    comparison = Comparison(
        rows=tables.rows,
        tuning=tables.tuning,
        headline=task.headline,
        lower_is_better=task.lower_is_better,
        protocol=_protocol(methods, population.scored, seeds, tuning_seed, unseen),
        missing=tables.missing,
    )
    if root is not None and jax.process_index() == 0:
        comparison.save(root / COMPARISON)
        write_report(root)
    return comparison


def _check_tuning_seed(tuning_seed: int, seeds: Sequence[int]) -> None:
    """Require a seed of the tuning that is none of the final runs' seeds."""
    if tuning_seed in seeds:
        raise ValueError(
            f"tuning_seed must not be among seeds={show(seeds)}, got {tuning_seed}. "
            "Give other seeds, or another tuning_seed."
        )


class _Population(NamedTuple):
    """Clients of a comparison."""

    held_out: Clients
    """Clients of the tuning, whose test examples score the points."""
    by_seed: dict[int, Split]
    """Participants and newcomers of each seed of the final runs."""
    scored: str
    """Name of the examples that score the points, for a caption."""

    @property
    def trained(self) -> list[Clients]:
        """Clients of the tuning, then the participants of each seed."""
        return [self.held_out, *(participants for participants, _ in self.by_seed.values())]

    @property
    def newcomers(self) -> list[Clients]:
        """Newcomers of each seed that has any."""
        return [later for _, later in self.by_seed.values() if later is not None]


class _Tables(NamedTuple):
    """Tables of a comparison (see `Comparison`), to which each method adds its rows."""

    rows: list[Row]
    tuning: list[Row]
    missing: list[Row]


def _population(
    clients: Callable[[int], Clients],
    validation: float | Clients | Callable[[int], Clients],
    seeds: Sequence[int],
    tuning_seed: int,
    unseen: float,
) -> _Population:
    """Draw and check the clients of the tuning and of each seed, and leave out the newcomers."""

    def parts(drawn: Clients, seed: int) -> Split:
        if not unseen:
            return drawn, None
        return leave_out(drawn, unseen, seed=seed)

    if isinstance(validation, float):
        scored = f"{100 * validation:g}% of each client's training examples"
        drawn = check_clients(f"clients({tuning_seed})", clients(tuning_seed))
        # Tuning leaves out its own share of the clients, as each seed does.
        participants, _ = parts(drawn, tuning_seed)
        held_out = hold_out(participants, validation, seed=tuning_seed)
    else:
        assert callable(validation)
        scored = "other clients' test examples"
        drawn = check_clients("validation", validation(tuning_seed))
        held_out, _ = parts(drawn, tuning_seed)
    drawn_by_seed = {seed: check_clients(f"clients({seed})", clients(seed)) for seed in seeds}
    by_seed = {seed: parts(drawn, seed) for seed, drawn in drawn_by_seed.items()}
    return _Population(held_out, by_seed, scored)


def _check_validated(held_out: Clients, validation: Any) -> None:
    """Require that some client of the tuning has a test example to choose points by."""
    if np.asarray(held_out.test_size).any():
        return
    cause = "they have no test examples"
    if isinstance(validation, float):
        cause = "no client has two training examples"
    raise ValueError(
        f"validation must hold out an example to choose points by, got {show(validation)}, and "
        f"{cause}. Give other clients as `validation`, with test examples, or one point for "
        "each method."
    )


def _protocol(
    methods: Mapping[str, Candidate],
    scored: str,
    seeds: Sequence[int],
    tuning_seed: int,
    unseen: float,
) -> str:
    """Return the protocol in words, for a caption."""
    counts = sorted({method.num_points for method in methods.values()})
    points = " or ".join(map(str, counts))
    protocol = (
        f"{points} points of each method and epsilon, each tried once (seed {tuning_seed}) on "
        f"{scored}; the best over seeds {', '.join(map(str, seeds))}. No epsilon covers tuning."
    )
    if not unseen:
        return protocol
    return (
        f"{protocol} {100 * unseen:g}% of the clients, drawn by the seed, take no part. Their "
        "score is `unseen`: by the server's last state and a first state of their own, or after "
        "training alone where a method sends nothing."
    )


class _Choice(NamedTuple):
    """Choice of the tuning at an epsilon."""

    epsilon: float
    index: int | None
    """Index of the point, or None if no point may be chosen."""
    rounds: int
    """Number of rounds after which the point has its best score."""
    row: Row
    """Row of the choice in `Comparison.tuning`."""
    missing: list[Row]
    """Rows of the tuning's runs in `Comparison.missing`."""


def _compared(
    runs: Sequence[CandidateRuns],
    population: _Population,
    epsilons: Sequence[float],
    tuning_seed: int,
    shown: bool,
) -> _Tables:
    """Compare all methods behind one bar, and return the tables."""
    # The bar needs the work of all methods before the first of them runs.
    work = sum(
        one.work(population.held_out.num_clients, population.by_seed.values(), len(epsilons))
        for one in runs
    )
    tables = _Tables([], [], [])
    with shared_bar("compare", work, shown) as bar:
        # An epsilon may be out of reach, which must show before the first round of any method.
        for of_method in runs:
            bar.say(f"{of_method.name}: calibrating")
            of_method.calibrate({one.num_clients for one in population.trained}, epsilons)
        for of_method in runs:
            _compare_method(of_method, population, tuning_seed, bar, tables)
    return tables


def _compare_method(
    runs: CandidateRuns,
    population: _Population,
    tuning_seed: int,
    bar: SharedBar,
    tables: _Tables,
) -> None:
    """Tune a method, run the best point of each epsilon over all seeds, and add the rows.

    Args:
        runs: Runs of the method.
        population: Clients of the comparison.
        tuning_seed: Seed of the tuning.
        bar: Progress bar of the comparison.
        tables: Tables that get the rows.
    """
    named = {"method": runs.name}
    choices = _tuned(runs, population.held_out, tuning_seed, bar)
    tables.tuning.extend(named | choice.row for choice in choices)
    tables.missing.extend(named | lost for choice in choices for lost in choice.missing)
    chosen = [choice for choice in choices if choice.index is not None]
    for seed, parts in population.by_seed.items():
        results = _final_runs(runs, chosen, parts, seed, bar)
        for choice, (result, folder) in zip(chosen, results, strict=True):
            cell = named | {"epsilon": choice.epsilon}
            of_run = {"seed": seed, "chosen": choice.row["chosen"]}
            if result is None:
                tables.missing.append(cell | of_run | {"reason": _NO_MEMORY})
                continue
            row = cell | {"stated": _stated_epsilon(result.statement)} | of_run
            tables.rows.append(row | _row_of(result, folder, runs.public))


def _final_runs(
    runs: CandidateRuns, chosen: Sequence[_Choice], parts: Split, seed: int, bar: SharedBar
) -> list[Finished]:
    """Run the chosen points of all epsilons with one seed, and return results and folders."""
    participants, newcomers = parts
    # Choices differ in rounds only if nothing is sent, and then there is a single one.
    rounds = next((choice.rounds for choice in chosen), 0)
    # Seeds may differ in their numbers of participants, and each number has its own noise.
    levels = runs.levels[participants.num_clients]
    points = [
        runs.point(choice.index, levels[choice.epsilon])
        for choice in chosen
        if choice.index is not None
    ]
    # The plan had a run of all rounds for each epsilon.
    planned = runs.work_of_seed(*parts, runs.rounds, len(levels))
    bar.skip(planned - runs.work_of_seed(*parts, rounds, len(points)))
    return runs.final(bar, points, Training(participants, seed, rounds, newcomers=newcomers))


def _row_of(result: Result, folder: str, public: bool) -> Row:
    """Return a final run's columns: its last metrics, `dropped` and, with a folder, `run`."""
    row = dict(result.metrics[-1])
    # The epsilon of the metrics would replace the target.
    row.pop("epsilon", None)
    row |= _share_dropped(result, public)
    if not folder:
        return row
    return row | {"run": folder}


def _tuned(runs: CandidateRuns, clients: Clients, seed: int, bar: SharedBar) -> list[_Choice]:
    """Return the choice of the best point at each epsilon, with the scores of all points.

    A method that sends nothing also has a best round, because rounds cost it no privacy.

    Args:
        runs: Runs of the method.
        clients: Clients whose test examples score the points.
        seed: Seed of the tuning.
        bar: Progress bar of the comparison.
    """
    levels = runs.levels[clients.num_clients]
    if not runs.tuned:
        return [_only_choice(runs, epsilon) for epsilon in levels]
    rounds = runs.rounds
    num_points = runs.method.num_points
    # The points of all epsilons share programs. Those of one epsilon follow one another.
    points = [runs.point(index, level) for level in levels.values() for index in range(num_points)]
    # Rounds that cost privacy are scored only once, after the last of them.
    every = rounds
    if runs.sends_nothing:
        every = math.ceil(rounds / _TUNING_EVALUATIONS)
    found = runs.run(bar, points, "tuning", Training(clients, seed, rounds, every))
    results = [result for result, _ in found]
    numbers, scores = _scores_by_round(runs, results)
    choices = []
    for level, epsilon in enumerate(levels):
        own = slice(level * num_points, (level + 1) * num_points)
        choices.append(_best_point(runs, epsilon, results[own], scores[own], numbers))
    return choices


def _only_choice(runs: CandidateRuns, epsilon: float) -> _Choice:
    """Return the choice of the first point after all rounds, without any tuning."""
    rounds = runs.rounds
    return _Choice(epsilon, 0, rounds, _row_of_point(runs, epsilon, 0, rounds, {}), [])


def _row_of_point(
    runs: CandidateRuns,
    epsilon: float,
    index: int,
    rounds: int,
    scores: Mapping[str, Sequence[float]],
) -> Row:
    """Return the row of a chosen point in `Comparison.tuning`, with the scores of all points."""
    return {
        "epsilon": epsilon,
        "chosen": runs.shown(index),
        "rounds": rounds,
        "points": runs.columns,
        "scores": scores,
    }


def _scores_by_round(
    runs: CandidateRuns, results: Sequence[Result | None]
) -> tuple[list[int], np.ndarray]:
    """Return the numbers of rounds that may be chosen, and the scores [points, rounds] there."""
    # Only the last round may be chosen if rounds cost privacy.
    first = -1
    if runs.sends_nothing:
        first = 0
    tables = [[] if result is None else result.metrics[first:] for result in results]
    # A point that did not fit in memory has no rows, and all others have the same rounds.
    numbers = [int(row["round"]) for row in max(tables, key=len)] or [runs.rounds]
    # Without rows, the scores of a point stay NaN, so that it is never chosen.
    scores = np.full((len(results), len(numbers)), np.nan)
    headline = runs.algorithm.model.task.headline
    for own, rows in zip(scores, tables, strict=True):
        own[: len(rows)] = [row[headline] for row in rows]
    return numbers, scores


def _best_point(
    runs: CandidateRuns,
    epsilon: float,
    results: Sequence[Result | None],
    scores: np.ndarray,
    rounds: Sequence[int],
) -> _Choice:
    """Return the choice of the point with the best score at an epsilon.

    Args:
        runs: Runs of the method.
        epsilon: The epsilon.
        results: Result of each point. None stands for a point that does not fit in memory.
        scores: Scores [points, rounds].
        rounds: Numbers of rounds after which the points are scored.
    """
    dropped = np.array([0.0 if result is None else result.dropped for result in results])
    allowed = np.isfinite(scores) & (dropped < 1)[:, None]
    best, at = _place_of_best(scores, allowed, runs.algorithm.model.task.lower_is_better)
    blank = {"epsilon": epsilon, "seed": None}
    missing = [
        blank | {"chosen": runs.shown(index), "reason": _NO_MEMORY}
        for index, result in enumerate(results)
        if result is None
    ]
    by_round = dict(zip(map(str, rounds), scores.T.tolist(), strict=True))
    row = _row_of_point(runs, epsilon, best, rounds[at], by_round)
    if dropped.any() and not runs.public:
        row["dropped"] = dropped.tolist()
    if allowed.any():
        return _Choice(epsilon, best, rounds[at], row, missing)
    reason = _why_none(results)
    _LOG.warning("methods[%r] at epsilon=%g has no point to choose: %s", runs.name, epsilon, reason)
    missing.append(blank | {"chosen": {}, "reason": reason})
    return _Choice(epsilon, None, rounds[at], row | {"chosen": {}}, missing)


def _place_of_best(
    scores: np.ndarray, allowed: np.ndarray, lower_is_better: bool
) -> tuple[int, int]:
    """Return the positions of the best allowed score among the scores [points, rounds]."""
    sign = 1
    if lower_is_better:
        sign = -1
    utility = np.where(allowed, sign * scores, -np.inf)
    # Ties go to the first point, and then to its earliest round.
    best, at = np.unravel_index(np.argmax(utility), scores.shape)
    return int(best), int(at)


def _why_none(results: Sequence[Result | None]) -> str:
    """Return the reason why none of the points may be chosen."""
    # A point may have a score although all its updates were dropped, so this reason comes first.
    if any(result is not None and result.dropped == 1 for result in results):
        return ALL_DROPPED
    if any(result is None for result in results):
        return _NO_MEMORY
    return _NO_SCORE


def _share_dropped(result: Result, public: bool) -> Row:
    """Return `{"dropped": share}` of a run's dropped updates, or `{}` if none were dropped.

    A public report has the share only if all updates were dropped.
    """
    if not result.dropped or (public and result.dropped < 1):
        return {}
    return {"dropped": result.dropped}


def _stated_epsilon(statement: Mapping[str, Any]) -> float | None:
    """Return the epsilon for the observer "aggregate", or None if it is not finite.

    A method that sends nothing has epsilon 0.
    """
    if not statement["communicates"]:
        return 0.0
    epsilon = float(statement["honest"]["aggregate"]["epsilon"])
    if not math.isfinite(epsilon):
        return None
    return epsilon
