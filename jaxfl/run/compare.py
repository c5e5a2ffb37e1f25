"""Comparisons of methods at the same epsilons, each with tuned settings, over several seeds."""

import contextlib
import functools
import inspect
import itertools
import logging
import math
import os
import pathlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from jaxfl._validate import (
    check_array,
    check_callable,
    check_count,
    check_fraction,
    check_instance,
    check_seeds,
    checked,
    count_from_0,
    key_of,
    plain,
    show,
)
from jaxfl.data.clients import hold_out, leave_out
from jaxfl.engine.chunk import out_of_memory
from jaxfl.engine.evaluate import summarize
from jaxfl.engine.program import Points, over_points
from jaxfl.privacy.accounting import calibrate, check_budget
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.run.check import (
    check_algorithm,
    check_clients,
    check_columns,
    check_evaluation,
    check_mechanism,
    check_values,
)
from jaxfl.run.comparison import ALL_DROPPED, Comparison, Row
from jaxfl.run.evaluate import scores_of
from jaxfl.run.flags import under_own_flags
from jaxfl.run.page import write_report
from jaxfl.run.recorder import Result
from jaxfl.run.report import COMPARISON, FILES, SharedBar, shared_bar
from jaxfl.run.simulate import CHECKS, RunOptions, names_of_points, noisy, sweep
from jaxfl.types import Algorithm, Clients

_LOG = logging.getLogger("jaxfl")


class Candidate(NamedTuple):
    """Method of a comparison, with the points that tuning tries.

    Args:
        build: Function from keyword arguments to an algorithm, as in `jaxfl.sweep`. If it takes
            `noise_multiplier`, the method is run at every epsilon. Otherwise, or if a partial has
            fixed this argument, the method is run once.
        points: Columns of values to try, by argument of `build` (see `grid` and `spread`). Values
            are numbers, or anything else that `build` takes, such as models. One program runs all
            points whose values decide neither a shape nor a Python branch. Values that do, such as
            batch sizes, epochs and models, have a program each.
        rounds: Number of rounds of this method. None stands for the comparison's. A method that
            sends nothing stops at the round that is best on validation examples, so give it as many
            rounds as it can use.
    """

    build: Callable[..., Algorithm]
    points: Mapping[str, Sequence[Any]] = {}
    rounds: int | None = None

    @property
    def private(self) -> bool:
        """Whether the method takes noise, which no partial has fixed."""
        fixed = self.build.keywords if isinstance(self.build, functools.partial) else {}
        return "noise_multiplier" in inspect.signature(self.build).parameters.keys() - fixed.keys()

    @property
    def number(self) -> int:
        """Number of points that tuning tries."""
        # A method without columns has one point, which has no arguments.
        return len(next(iter(self.points.values()), (0,)))

    def point(self, index: int) -> dict[str, Any]:
        """Return the arguments of a point."""
        return {argument: column[index] for argument, column in self.points.items()}

    def at(self, index: int) -> Algorithm:
        """Return the algorithm of a point, with a noise multiplier of 1 if it takes noise."""
        noise = {"noise_multiplier": 1.0} if self.private else {}
        return self.build(**self.point(index), **noise)


def grid(**axes: Any) -> dict[str, list[Any]]:
    """Return all combinations of some values, as columns. Integers stay integers.

    Args:
        axes: Values of each argument.

    Raises:
        ValueError: An argument has no values, or has NaN or complex numbers.
        TypeError: The values of an argument are not a list.

    >>> grid(rate=[0.1, 0.3], batch_size=[4, 8])
    {'rate': [0.1, 0.1, 0.3, 0.3], 'batch_size': [4, 8, 4, 8]}
    """
    columns = _check_columns("axes", axes)
    if empty := [name for name, axis in columns.items() if not axis]:
        raise ValueError(
            f"{empty[0]} must have at least one value, got {axes[empty[0]]!r}. "
            "Add one value, or leave the argument out."
        )
    points = itertools.product(*columns.values())
    return {name: list(column) for name, column in zip(columns, zip(*points), strict=True)}


@checked()
def spread(number: int, **axes: Any) -> dict[str, list[float]]:
    """Return points that fill a box of positive numbers evenly, as columns.

    The scale is logarithmic, and the points are Halton's sequence. They give methods of one, two
    and three arguments the same number of points. Points are rounded to six digits. Otherwise they
    could differ between processors in the last digits. A comparison that was begun on one processor
    could then not be resumed on another.

    Args:
        number: Number of points.
        axes: Two ends above 0 of each argument, the smaller one first.

    >>> spread(3, rate=(0.01, 1.0), clip=(0.1, 10.0))
    {'rate': [0.1, 0.0316228, 0.316228], 'clip': [0.464159, 2.15443, 0.16681]}
    """
    for name, ends in check_values("axes", axes).items():
        if len(ends) != 2 or not 0 < ends[0] < ends[1] < math.inf:
            raise ValueError(
                f"{name} must be two finite numbers above 0, got {show(axes[name])}. "
                "Give the smaller one first."
            )
    if not axes:
        return {}
    low, high = np.log(list(axes.values())).T
    # The first point of the sequence is the origin, which is skipped.
    sequence = scipy.stats.qmc.Halton(len(axes), scramble=False).fast_forward(1)
    points = np.exp(low + sequence.random(number) * (high - low))
    columns = zip(axes, points.T, strict=True)
    return {name: [float(f"{value:.6g}") for value in column] for name, column in columns}


def _check_columns(name: str, value: Any) -> dict[str, list[Any]]:
    """Require columns of values by argument, and return them with numbers of Python."""
    return check_columns(name, value, _check_column, "values")


def _check_column(name: str, value: Any) -> list[Any]:
    if isinstance(value, np.ndarray | jax.Array):
        array = check_array(name, value)
        if array.ndim != 1:
            raise ValueError(f"{name} must be a vector, got {show(value)}. Give a list of values.")
        value = array.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(
            f"{name} must be a list of values, got {show(value)}. Give a list, even of one value."
        )
    column = [plain(item) for item in value]
    for item in column:
        if isinstance(item, complex) or (isinstance(item, float) and math.isnan(item)):
            raise ValueError(
                f"{name} must not have NaN or complex numbers, got {show(value)}. "
                "Give real numbers, or other values."
            )
    return column


def _check_methods(name: str, value: Any) -> dict[str, Candidate]:
    if not isinstance(value, Mapping) or not value:
        raise TypeError(
            f"{name} must be candidates by name, got {show(value)}. "
            "Give for instance {'DP-FedAvg': Candidate(build)}."
        )
    taken = {_name_in_folder(file): f"{file!r}, a file of a comparison or a run" for file in FILES}
    for method in value:
        _check_name(name, method, value)
        if (other := taken.get(_name_in_folder(method))) is not None:
            raise ValueError(
                f"{name} must have different names, got {method!r} and {other}, which may be the "
                "same in a folder. Choose another name."
            )
        taken[_name_in_folder(method)] = repr(method)
    return {
        method: _check_candidate(f"{name}[{method!r}]", candidate)
        for method, candidate in value.items()
    }


def _name_in_folder(name: str) -> str:
    """Return a name without case and forms of accents, which some file systems ignore."""
    return unicodedata.normalize("NFKC", name).casefold()


def _check_name(name: str, method: Any, methods: Mapping[Any, Any]) -> None:
    """Require a name that a folder can have and that is not hidden."""
    allowed = isinstance(method, str) and re.fullmatch(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*", method)
    if not allowed or len(method.encode(errors="replace")) > 200:
        raise ValueError(
            f"{name} must have names that a folder can have, got {show(method)} in "
            f"{show(methods)}. Give at most 200 bytes of text without slashes and control "
            "characters, which does not begin with a dot."
        )


def _check_candidate(name: str, value: Any) -> Candidate:
    candidate = check_instance(name, value, (Candidate,))
    check_callable(f"{name}.build", candidate.build)
    if candidate.rounds is not None:
        check_count(f"{name}.rounds", candidate.rounds)
    points = _check_columns(f"{name}.points", candidate.points)
    lengths = {argument: len(column) for argument, column in points.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values() or "noise_multiplier" in points:
        raise ValueError(
            f"{name}.points must be columns of one length, without noise_multiplier, got columns "
            f"of {lengths}. Give each point a value in every column."
        )
    return candidate._replace(points=points)


def _check_epsilons(name: str, value: Any) -> tuple[float, ...]:
    if isinstance(value, np.ndarray | jax.Array):
        value = np.asarray(value).ravel().tolist()
    listed = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
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
        math.inf if epsilon == math.inf else check_budget(name, epsilon) for epsilon in value
    )


def _check_population(name: str, value: Any) -> Callable[[int], Clients]:
    if callable(value):
        return value
    fixed = check_clients(name, value)
    return lambda seed: fixed


def _check_validation(name: str, value: Any) -> float | Callable[[int], Clients]:
    if callable(value) or isinstance(value, Clients):
        return _check_population(name, value)
    return check_fraction(name, value, one=False)


@under_own_flags
@checked(
    **CHECKS | {"clients": _check_population},
    methods=_check_methods,
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

    1. Each point is trained once, with the tuning seed. Its score is the headline metric on
       validation examples. They are held out of each client's training split, or belong to other
       clients (see `validation`).
    2. The best point is run with every seed, on all training examples, and the test examples are
       read once.

    Epsilon does not cover the tuning. The noise is the least for its epsilon, by
    `jaxfl.privacy.calibrate`. A method that sends nothing is scored in twenty of its rounds, and
    stops at the best one.

    Tuning runs all points and epsilons of a method in one program, and so do the final runs of each
    seed. Values that decide a shape or a Python branch have a program each. If the clients' states
    do not fit in memory, fewer points share a program. A single point that does not fit is left
    out, and the table says so.

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
        validation: Share of each client's training examples that tuning holds out. Or separate
            clients, or a function from a seed to them, whom tuning trains and tests. Give separate
            clients if clients have few examples, because holding out can remove a class.
        tuning_seed: Seed of the tuning, which must not be among `seeds`.
        unseen: Share of the clients who take no part. Each seed draws the same ones for all
            methods. Only the others train, choose points, and count for noise. Rows then have
            `unseen`, the headline metric of the left-out clients on their own test examples. A
            method serves them by its `personalize`, which gets the server's last state, a first
            client state from `init`, and their training examples (see `evaluate`). Methods whose
            clients keep a model between rounds, such as `ditto`, `mr_mtl`, `apfl`, `pfedme` and
            `dp_lg`, serve them badly, because their first model is untrained. If a method sends
            nothing, the left-out clients train alone for the chosen rounds. If all seeds have the
            same clients, tuning and other seeds may train clients whom one seed leaves out.
        folder: Folder of the comparison. Every run has a folder in it, from which it is resumed.
            `comparison.json` has the result, and `report.html` shows it (see `write_report`).
            Clients' states do not stay there. None writes nothing.
        options: Options of the runs (see `RunOptions`). `progress` shows one bar for all runs.

    Raises:
        ValueError: An argument does not fit, or the tuning seed is among the seeds. Or a point
            cannot be built or run, or no example is held out to choose a point.
        TypeError: An argument, or a point, has the wrong type.
    """
    if tuning_seed in seeds:
        raise ValueError(
            f"tuning_seed must not be among seeds={show(seeds)}, got {tuning_seed}. "
            "Give another seed."
        )
    root = None if folder is None else pathlib.Path(folder)
    assert callable(clients)
    if isinstance(validation, float):
        scored = f"{100 * validation:g}% of each client's training examples"
        drawn = check_clients(f"clients({tuning_seed})", clients(tuning_seed))
        held_out, _ = _parted(drawn, unseen, tuning_seed)
        held_out = hold_out(held_out, validation, seed=tuning_seed)
    else:
        assert callable(validation)
        scored = "other clients' test examples"
        drawn = check_clients("validation", validation(tuning_seed))
        held_out, _ = _parted(drawn, unseen, tuning_seed)
    drawn_by_seed = {seed: check_clients(f"clients({seed})", clients(seed)) for seed in seeds}
    parted = {seed: _parted(drawn, unseen, seed) for seed, drawn in drawn_by_seed.items()}
    newcomers = [later for _, later in parted.values() if later is not None]
    shared: dict[str, Any] = {**options, "progress": False}
    populations = [held_out, *(participants for participants, _ in parted.values())]
    runs = [
        _prepared_runs(name, method, populations, rounds, root, shared)
        for name, method in methods.items()
    ]
    task = _common_task(runs)
    for of_method in runs:
        of_method.check_newcomers(newcomers)
    if any(one.tuned for one in runs) and not np.asarray(held_out.test_size).any():
        cause = "they have no test examples"
        if isinstance(validation, float):
            cause = "no client has two training examples"
        raise ValueError(
            f"validation must hold out an example to choose points by, got {show(validation)}, and "
            f"{cause}. Give other clients as `validation`, with test examples, or one point for "
            "each method."
        )
    rows: list[Row] = []
    tuning: list[Row] = []
    missing: list[Row] = []
    work = sum(one.work(held_out.number, parted.values(), len(epsilons)) for one in runs)
    shown = options.get("progress", True) and jax.process_index() == 0
    public = options.get("report") == "public"
    with shared_bar("compare", work, shown) as bar:
        # An epsilon may be out of reach, which must show before the first round of any method.
        for of_method in runs:
            bar.say(f"{of_method.name}: calibrating")
            for number in {one.number for one in populations}:
                of_method.levels[number] = _noise_levels(of_method, number, epsilons)
        for of_method in runs:
            named = {"method": of_method.name}
            choices = _tuned(of_method, held_out, tuning_seed, bar, public)
            tuning += [named | choice.row for choice in choices]
            missing += [named | lost for choice in choices for lost in choice.missing]
            live = [(choice, choice.index) for choice in choices if choice.index is not None]
            length = live[0][0].rounds if live else 0
            for seed, (own, later) in parted.items():
                levels = of_method.levels[own.number]
                points = [of_method.point(index, levels[choice.epsilon]) for choice, index in live]
                planned = of_method.work_of_seed(own, later, of_method.rounds, len(levels))
                bar.skip(planned - of_method.work_of_seed(own, later, length, len(live)))
                results = of_method.final(bar, points, own, later, seed, length)
                for (choice, _), (result, folder_of_run) in zip(live, results, strict=True):
                    cell = named | {"epsilon": choice.epsilon}
                    chosen = {"seed": seed, "chosen": choice.row["chosen"]}
                    if result is None:
                        missing.append(cell | chosen | {"reason": _NO_MEMORY})
                        continue
                    last = dict(result.metrics[-1])
                    # The epsilon of the metrics would replace the target.
                    last.pop("epsilon", None)
                    row = cell | {"stated": _stated_epsilon(result.statement)} | chosen | last
                    row |= _share_dropped(result, public)
                    if folder_of_run:
                        row["run"] = folder_of_run
                    rows.append(row)
    points_of = " or ".join(map(str, sorted({method.number for method in methods.values()})))
    protocol = (
        f"{points_of} points of each method and epsilon, each tried once (seed {tuning_seed}) on "
        f"{scored}; the best over seeds {', '.join(map(str, seeds))}. No epsilon covers tuning."
    )
    if unseen:
        protocol += (
            f" {100 * unseen:g}% of the clients, drawn by the seed, take no part. Their score is "
            "`unseen`: by the server's last state and a first state of their own, or after "
            "training alone where a method sends nothing."
        )
    lower_is_better = task.metrics[task.headline].lower_is_better
    comparison = Comparison(rows, tuning, task.headline, lower_is_better, protocol, missing)
    if root is not None and jax.process_index() == 0:
        comparison.save(root / COMPARISON)
        write_report(root)
    return comparison


_Parts: TypeAlias = tuple[Clients, Clients | None]
"""Clients who take part, and newcomers, if there are any."""

_STATE_BYTES = 2**30
"""Number of bytes of clients' states that one program holds at most."""

_NO_MEMORY = "out of memory"
_NO_SCORE = "no score"


class _Runs:
    """Runs of a method, whose points are built and checked.

    Args:
        name: Name of the method.
        method: Candidate of the method.
        algorithms: Algorithm of each point, with noise if the method takes any.
        fixed: Arguments whose values a program cannot leave open.
        rounds: Number of rounds of the method's longest run.
        root: Folder of the comparison. None writes nothing.
        options: Options of all runs.
    """

    def __init__(
        self,
        name: str,
        method: Candidate,
        algorithms: Sequence[Algorithm],
        fixed: frozenset[str],
        rounds: int,
        root: pathlib.Path | None,
        options: dict[str, Any],
    ) -> None:
        self.name = name
        self.method = method
        self.algorithms = algorithms
        self.fixed = fixed
        self.rounds = rounds
        self.root = root
        self.options = options
        self.levels: dict[int, dict[float, float]] = {}
        """Noise multiplier of each epsilon, by number of clients."""
        self.texts = {argument: _texts(column) for argument, column in method.points.items()}

    @property
    def algorithm(self) -> Algorithm:
        """Algorithm of the first point."""
        return self.algorithms[0]

    @property
    def silent(self) -> bool:
        """Whether the method sends nothing."""
        return not self.algorithm.mechanism.communicates

    @property
    def tuned(self) -> bool:
        """Whether tuning chooses a point, or a round because rounds cost no privacy."""
        return self.method.number > 1 or self.silent

    def point(self, index: int, noise_multiplier: float) -> tuple[int, dict[str, Any]]:
        """Return a point's index, and its arguments with noise if the method takes any."""
        noise = {"noise_multiplier": noise_multiplier} if self.method.private else {}
        return index, self.method.point(index) | noise

    def shown(self, index: int) -> dict[str, Any]:
        """Return the arguments of a point as JSON, with texts for other values."""
        point = self.method.point(index)
        return {
            argument: value if _is_json_value(value) else self.texts[argument][index]
            for argument, value in point.items()
        }

    def trained(self, clients: int, rounds: int, points: int) -> float:
        """Return how many clients all rounds of some points train together."""
        return float(self.algorithm.mechanism.sampling.expected(clients) * rounds * points)

    def work(self, held_out: int, parted: Iterable[_Parts], epsilons: int) -> float:
        """Return how many clients the tuning and the final runs train.

        Args:
            held_out: Number of the tuning's clients.
            parted: Participants and newcomers of each seed.
            epsilons: Number of targets.
        """
        levels = epsilons if self.method.private else 1
        tuning = 0.0
        if self.tuned:
            tuning = self.trained(held_out, self.rounds, levels * self.method.number)
        return tuning + sum(self.work_of_seed(*parts, self.rounds, levels) for parts in parted)

    def work_of_seed(
        self,
        participants: Clients,
        newcomers: Clients | None,
        rounds: int,
        points: int,
    ) -> float:
        """Return how many clients the final runs of a seed train."""
        work = self.trained(participants.number, rounds, points)
        if newcomers is None or not self.silent:
            return work
        return work + self.trained(newcomers.number, rounds, points)

    def check_newcomers(self, newcomers: Sequence[Clients]) -> None:
        """Require that every program can serve these clients. Nothing is compiled."""
        points = [self.point(index, 1.0) for index in range(self.method.number)]
        different = {_signature(clients): clients for clients in newcomers}.values()
        for group in self.groups(points).values():
            algorithm = self.algorithms[group[0]]
            for clients in different:
                with _naming(self.name, self.method.point(group[0])):
                    if self.silent:
                        check_algorithm(algorithm, clients, self.rounds)
                    else:
                        check_evaluation(algorithm, clients)

    def final(
        self,
        bar: SharedBar,
        points: Sequence[tuple[int, dict[str, Any]]],
        participants: Clients,
        newcomers: Clients | None,
        seed: int,
        rounds: int,
    ) -> list[tuple[Result | None, str]]:
        """Run the chosen points of a seed, and add the newcomers' score to last rows of metrics.

        Args:
            bar: Progress bar of the comparison.
            points: Indices and arguments of the chosen points.
            participants: Clients who take part.
            newcomers: Clients who take no part, if there are any.
            seed: Seed of the runs.
            rounds: Number of rounds.

        Returns:
            Results and folders, as in `run`.
        """
        name = f"seed={seed}"
        if newcomers is None or not self.silent:
            return self.run(bar, points, participants, seed, name, rounds, newcomers=newcomers)
        found = self.run(bar, points, participants, seed, name, rounds)
        alone = self.run(bar, points, newcomers, seed, f"{name}, unseen", rounds)
        headline = self.algorithm.model.task.headline
        scored = []
        for (result, folder), (own, _) in zip(found, alone, strict=True):
            score = math.nan if own is None else own.metrics[-1][headline]
            scored.append((None if result is None else _with_unseen(result, score), folder))
        return scored

    def states(self, clients: int, index: int = 0) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the client states of a point, none if clients keep no state."""
        _, states = jax.eval_shape(lambda: self.algorithms[index].init(key_of(0), clients))
        return jax.tree.leaves(states)

    def groups(self, points: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, list[int]]:
        """Return positions of the points that one program can hold, by the name of its folder."""
        found: dict[str, list[int]] = {}
        fixed = [name for name in self.method.points if name in self.fixed]
        for position, (index, values) in enumerate(points):
            texts = [f"{name}={self.texts[name][index]}" for name in fixed]
            if "noise_multiplier" in self.fixed & values.keys():
                texts.append(f"noise_multiplier={values['noise_multiplier']}")
            found.setdefault(", ".join(texts), []).append(position)
        return found

    def run(
        self,
        bar: SharedBar,
        points: Sequence[tuple[int, dict[str, Any]]],
        clients: Clients,
        seed: int,
        name: str,
        rounds: int,
        every: int = 0,
        newcomers: Clients | None = None,
    ) -> list[tuple[Result | None, str]]:
        """Run each point in as few programs as possible.

        Args:
            bar: Progress bar of the comparison.
            points: Indices and arguments of the points.
            clients: Clients of the runs.
            seed: Seed of the runs.
            name: Beginning of the folders' names.
            rounds: Number of rounds.
            every: Number of rounds between evaluations. 0 evaluates after the last round only.
            newcomers: Clients whom each point also serves, if there are any (see `final`).

        Returns:
            A result and a folder for each point. The result has no model and no client states. It
            is None if the point does not fit in memory. The path of the folder is relative to the
            folder of the comparison.
        """
        results: list[tuple[Result | None, str]] = [(None, "")] * len(points)
        for text, group in self.groups(points).items():
            states = self.states(clients.number, points[group[0]][0])
            size = sum(leaf.size * leaf.dtype.itemsize for leaf in states)
            at_once = max(1, _STATE_BYTES // max(1, size))
            count = math.ceil(len(group) / at_once)
            waiting = [part.tolist() for part in np.array_split(group, count)]
            while waiting:
                part = waiting.pop(0)
                of_group = "" if len(part) == len(group) else f"points {part[0]} to {part[-1]}"
                label = ", ".join(filter(None, [name, text, of_group]))
                work = self.trained(clients.number, rounds, len(part))
                with bar.part(f"{self.name}: {label}", work):
                    chosen = [points[i] for i in part]
                    found = self._sweep(
                        chosen, clients, seed, label, rounds, every, part, newcomers
                    )
                if found is None and len(part) > 1:
                    # The halves train the same clients again.
                    bar.skip(-work)
                    waiting[:0] = [half.tolist() for half in np.array_split(part, 2)]
                for position, result in zip(part, found or [], strict=False):
                    results[position] = result
        return results

    def _sweep(
        self,
        points: Sequence[tuple[int, dict[str, Any]]],
        clients: Clients,
        seed: int,
        label: str,
        rounds: int,
        every: int,
        numbers: Sequence[int],
        newcomers: Clients | None,
    ) -> list[tuple[Result | None, str]] | None:
        """Run points in one program, and return their results and folders, as `run` does.

        Args:
            points: Indices and arguments of the points.
            clients: Clients of the runs.
            seed: Seed of the runs.
            label: Name of the program's folder.
            rounds: Number of rounds.
            every: Number of rounds between evaluations, as in `run`.
            numbers: Number of each point among the points of all programs.
            newcomers: Clients whom each point also serves, if there are any.

        Returns:
            Results and folders, or None if the program does not fit in memory.
        """
        points_text = _points_text([self.shown(index) for index, _ in points])
        which = f"methods[{self.name!r}], {label}, {points_text}"
        folder = None if self.root is None else self.root / self.name / label
        try:
            columns = self.open([values for _, values in points])
            found = sweep(
                jnp.broadcast_to(key_of(seed), (len(points),)),
                self.build(points[0][1]),
                columns,
                clients,
                rounds=rounds,
                folder=folder,
                keep_states=False,
                numbers=numbers,
                **{"eval_every": every or rounds} | self.options,
            )
            if newcomers is not None:
                found = self._served(found, points, newcomers, seed, rounds)
        except Exception as error:
            if jax.process_count() > 1 or not out_of_memory(error):
                error.add_note(f"raised by {which}")
                raise
            step = "the point is left out"
            if len(points) > 1:
                step = "half of the points run at a time"
            cause, _, _ = str(error).partition("\n")
            _LOG.warning("%s: does not fit in memory, so %s: %s", which, step, cause)
            return None
        folders = [""] * len(points)
        if folder is not None and self.root is not None:
            names = names_of_points(columns, len(points))
            folders = [(folder / one).relative_to(self.root).as_posix() for one in names]
        without_server = [result._replace(server=()) for result in found]
        return list(zip(without_server, folders, strict=True))

    def _served(
        self,
        results: Sequence[Result],
        points: Sequence[tuple[int, dict[str, Any]]],
        newcomers: Clients,
        seed: int,
        rounds: int,
    ) -> list[Result]:
        """Return the results of one program, with the newcomers' score in last rows of metrics."""
        columns = self.open([values for _, values in points])
        method = Points(self.build(points[0][1]), _floats(columns))
        servers = jax.device_get([result.server for result in results])
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *servers)
        keys = jnp.broadcast_to(key_of(seed), (len(points),))
        options = {name: self.options.get(name) for name in ("chunk", "devices")}
        scores = scores_of(keys, method, stacked, newcomers, rounds=rounds, **options)
        task = self.algorithm.model.task
        sizes = np.asarray(newcomers.test_size)
        found = []
        for position, result in enumerate(results):
            own = {name: values[position] for name, values in scores.items()}
            row = summarize(own, sizes, task.metrics)
            found.append(_with_unseen(result, row[task.headline]))
        return found

    def build(self, values: Mapping[str, Any]) -> Callable[..., Algorithm]:
        """Return the builder with the values of a point that a program cannot leave open."""
        fixed = {name: value for name, value in values.items() if name in self.fixed}
        return functools.partial(self.method.build, **fixed) if fixed else self.method.build

    def open(self, points: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
        """Return columns of the values that a program leaves open."""
        names = [name for name in points[0] if name not in self.fixed]
        return {name: [float(values[name]) for values in points] for name in names}


def _parted(clients: Clients, unseen: float, seed: int) -> _Parts:
    """Return the clients who take part at a seed, and the newcomers, if there are any."""
    return leave_out(clients, unseen, seed=seed) if unseen else (clients, None)


def _with_unseen(result: Result, score: float) -> Result:
    """Return a result with the newcomers' score in the last row of metrics."""
    *earlier, last = result.metrics
    return result._replace(metrics=[*earlier, last | {"unseen": score}])


def _prepared_runs(
    name: str,
    method: Candidate,
    populations: Sequence[Clients],
    rounds: int,
    root: pathlib.Path | None,
    options: dict[str, Any],
) -> _Runs:
    """Build every point of a method, and check it for all clients. Nothing is compiled.

    Raises:
        ValueError: A point cannot be built or run. The message names the method and the point.
        TypeError: A point has the wrong type. The message names the method and the point.
    """
    rounds = method.rounds or rounds
    different = list({_signature(clients): clients for clients in populations}.values())
    algorithms = []
    for index in range(method.number):
        with _naming(name, method.point(index)):
            algorithms.append(check_instance("build(...)", method.at(index), (Algorithm,)))
    with _naming(name, method.point(0)):
        check_algorithm(algorithms[0], different[0], rounds)
    fixed = _fixed(method, different[0], rounds)
    runs = _Runs(name, method, algorithms, fixed, rounds, root, options)
    points = [runs.point(index, 1.0) for index in range(method.number)]
    for group in runs.groups(points).values():
        for clients in different:
            with _naming(name, method.point(group[0])):
                update = check_algorithm(algorithms[group[0]], clients, rounds)
            # The others differ only in numbers, for which a mechanism may still raise an error.
            for index in group[1:]:
                with _naming(name, method.point(index)):
                    check_mechanism(algorithms[index], clients, update)
        values = [points[index][1] for index in group]
        unclipped = [index for index in group if math.isinf(algorithms[index].mechanism.clip)]
        if unclipped and noisy(Points(runs.build(values[0]), _floats(runs.open(values)))):
            raise ValueError(
                f"{_where(name, method.point(unclipped[0]))}: clip must be finite with noise, "
                "which is in multiples of it, got clip=inf. Give a large number, or a candidate "
                "that takes no noise_multiplier."
            )
    return runs


def _fixed(method: Candidate, clients: Clients, rounds: int) -> frozenset[str]:
    """Return the arguments whose values a program cannot leave open, by tracing the method."""
    values = method.point(0) | ({"noise_multiplier": 1.0} if method.private else {})

    def numeric(column: Sequence[Any]) -> bool:
        return all(isinstance(one, int | float) and not isinstance(one, bool) for one in column)

    numbers = [name for name in values if numeric(method.points.get(name, [0.0]))]
    traced = functools.partial(_traced, clients=clients, rounds=rounds)

    def works(names: Sequence[str]) -> bool:
        fixed = {name: value for name, value in values.items() if name not in names}
        columns = _floats({name: [values[name]] for name in names})
        points = Points(functools.partial(method.build, **fixed), columns)
        # Any error means that these arguments cannot be open, because all was well without them.
        with contextlib.suppress(Exception):
            jax.eval_shape(over_points(traced, points))
            return True
        return False

    open_names = numbers
    if numbers and not works(numbers):
        open_names = [name for name in numbers if works([name])]
        open_names = open_names if open_names and works(open_names) else []
    return frozenset(values.keys() - set(open_names))


def _traced(algorithm: Algorithm, clients: Clients, rounds: int) -> jax.Array:
    """Trace an algorithm in a round, except for the sums over clients."""
    update = check_algorithm(algorithm, clients, rounds)
    memory = algorithm.mechanism.init(key_of(0), lambda: update, clients.number)
    algorithm.mechanism.draw(key_of(0), memory, jnp.int32(0), clients.number)
    return jnp.zeros(())


def _signature(clients: Clients) -> tuple:
    """Return the shapes, dtypes and labels that decide whether a model fits the clients."""
    inputs = clients.inputs
    labels = np.asarray(clients.labels)
    ends = (labels.min().item(), labels.max().item()) if labels.size else ()
    return (
        clients.number,
        inputs.shape[1:],
        str(inputs.dtype),
        labels.shape[1:],
        str(labels.dtype),
        ends,
    )


def _common_task(runs: Sequence[_Runs]) -> Any:
    """Return the task of all points, which must be scored by the same metric.

    Raises:
        ValueError: A point has another headline metric, or sends something although others of its
            method send nothing. The message names the point.
    """
    task = runs[0].algorithm.model.task
    for of_method in runs:
        for index, algorithm in enumerate(of_method.algorithms):
            where = _where(of_method.name, of_method.method.point(index))
            own = algorithm.model.task
            if own.headline != task.headline:
                raise ValueError(
                    f"{where}: methods must be scored by the same metric, got {own.headline!r} and "
                    f"{task.headline!r}. Give models whose tasks have one first metric."
                )
            if algorithm.mechanism.communicates == of_method.silent:
                raise ValueError(
                    f"{where}: points must all send updates or all send none, got both kinds. "
                    "Give a candidate for each kind."
                )
    return task


@contextlib.contextmanager
def _naming(name: str, point: Mapping[str, Any]) -> Iterator[None]:
    """Name the method and the point in errors of the block, as a TypeError or a ValueError."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, TypeError | ValueError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{_where(name, point)}: {text}") from error


def _where(name: str, point: Mapping[str, Any]) -> str:
    method = f"methods[{name!r}]"
    return f"{method} at {_points_text([point])}" if point else method


def _points_text(points: Sequence[Mapping[str, Any]]) -> str:
    """Return the first three points, and the number of the others, as text."""
    texts = []
    for point in points[:3]:
        arguments = ", ".join(f"{name}={show(value)}" for name, value in point.items())
        texts.append(f"({arguments})")
    text = ", ".join(texts)
    return f"{text} and {len(points) - 3} more points" if len(points) > 3 else text


def _floats(columns: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    return {name: np.asarray(column, np.float32) for name, column in columns.items()}


def _is_json_value(value: Any) -> bool:
    """Return whether JSON has such a value."""
    return value is None or isinstance(value, str | bool | int | float)


def _texts(column: Sequence[Any]) -> list[str]:
    """Return a text for each value, for folders and reports.

    Equal values have the same text, and different values have different texts.

    >>> _texts([4, 8, 4, "a/b", "a:b"])
    ['4', '8', '4', 'a-b', 'a-b 2']
    """
    texts: dict[Any, str] = {}
    for value in column:
        if _identity(value) in texts:
            continue
        given = value
        if not _is_json_value(value):
            given = getattr(value, "name", getattr(value, "__name__", type(value).__name__))
        first = text = re.sub(r"[^\w.+-]+", "-", str(given))[:60]
        again = 2
        while text in texts.values():
            text = f"{first} {again}"
            again += 1
        texts[_identity(value)] = text
    return [texts[_identity(value)] for value in column]


def _identity(value: Any) -> Any:
    """Return a key that is the same for equal values of JSON, or for the same other object."""
    return (type(value), value) if _is_json_value(value) else id(value)


def _noise_levels(runs: _Runs, clients: int, epsilons: Sequence[float]) -> dict[float, float]:
    """Return the noise multiplier of each epsilon.

    A method that takes no noise has one level, infinity.
    """
    if not runs.method.private:
        return {math.inf: 0.0}
    rounds = runs.rounds
    delta = runs.algorithm.terms.delta
    exposed = [_exposed(algorithm.mechanism, clients, rounds) for algorithm in runs.algorithms]
    other_delta = any(algorithm.terms.delta != delta for algorithm in runs.algorithms)
    if other_delta or any(not np.array_equal(one, exposed[0]) for one in exposed):
        raise ValueError(
            f"methods[{runs.name!r}].points must have the same epsilon at one noise multiplier, "
            f"got {show(runs.method.points)} with different epsilons. Give a candidate for each "
            "value that changes epsilon, such as each sampling rate."
        )
    stateful = any(runs.states(clients, index) for index in range(runs.method.number))
    options = {"mechanism": runs.algorithm.mechanism, "stateful": stateful, "delta": delta}
    levels: dict[float, float] = {}
    with _naming(runs.name, {}):
        for epsilon in epsilons:
            levels[epsilon] = 0.0
            if not math.isinf(epsilon):
                levels[epsilon] = calibrate(epsilon, clients=clients, rounds=rounds, **options)
    return levels


def _exposed(mechanism: Mechanism, clients: int, rounds: int) -> np.ndarray:
    """Return the numbers from which an epsilon follows.

    These are the multipliers of the sums, by round and client, and the amplification.
    """
    view = mechanism.view(mechanism.planned(clients, rounds), "aggregate")
    return np.column_stack([view.multiplier, view.hidden * view.rate])


class _Choice(NamedTuple):
    """Choice of the tuning at an epsilon."""

    epsilon: float
    index: int | None
    """Index of the point, or None if no point may be chosen."""
    rounds: int
    row: Row
    """Row of the choice in `Comparison.tuning`."""
    missing: list[Row]
    """Rows of the tuning's runs in `Comparison.missing`."""


def _tuned(runs: _Runs, clients: Clients, seed: int, bar: SharedBar, public: bool) -> list[_Choice]:
    """Return the best point at each epsilon, with the scores of all points.

    A method that sends nothing also has a best round, because rounds cost it no privacy.

    Args:
        runs: Runs of the method.
        clients: Clients whose test examples score the points.
        seed: Seed of the tuning.
        bar: Progress bar of the comparison.
        public: Whether the report is public.
    """
    method = runs.method
    rounds = runs.rounds
    silent = runs.silent
    levels = runs.levels[clients.number]
    task = runs.algorithm.model.task
    shown = [runs.shown(index) for index in range(method.number)]
    points = {argument: [point[argument] for point in shown] for argument in method.points}
    if not runs.tuned:
        facts = {"chosen": shown[0], "rounds": rounds, "points": points, "scores": {}}
        return [_Choice(epsilon, 0, rounds, {"epsilon": epsilon} | facts, []) for epsilon in levels]
    tried = [runs.point(index, z) for z in levels.values() for index in range(method.number)]
    every = math.ceil(rounds / 20) if silent else rounds
    found = runs.run(bar, tried, clients, seed, "tuning", rounds, every)
    results = [result for result, _ in found]
    # Only the last round may be chosen if rounds cost privacy.
    first = 0 if silent else -1
    rows_of_points = [[] if one is None else one.metrics[first:] for one in results]
    numbers = [int(row["round"]) for row in max(rows_of_points, key=len)] or [rounds]
    scores = np.full((len(results), len(numbers)), np.nan)
    for own, rows in zip(scores, rows_of_points, strict=True):
        own[: len(rows)] = [row[task.headline] for row in rows]
    sign = -1 if task.metrics[task.headline].lower_is_better else 1
    choices = []
    for level, (epsilon, own) in enumerate(zip(levels, np.split(scores, len(levels)), strict=True)):
        of_level = results[level * method.number : (level + 1) * method.number]
        dropped = np.array([0.0 if result is None else result.dropped for result in of_level])
        allowed = np.isfinite(own) & (dropped < 1)[:, None]
        utility = np.where(allowed, sign * own, -np.inf)
        best, at = np.unravel_index(np.argmax(utility), own.shape)
        missing = [
            {"epsilon": epsilon, "seed": None, "chosen": shown[index], "reason": _NO_MEMORY}
            for index, result in enumerate(of_level)
            if result is None
        ]
        row: Row = {
            "epsilon": epsilon,
            "chosen": shown[int(best)],
            "rounds": numbers[at],
            "points": points,
            "scores": dict(zip(map(str, numbers), own.T.tolist(), strict=True)),
        }
        if dropped.any() and not public:
            row["dropped"] = dropped.tolist()
        index = int(best)
        if not allowed.any():
            if (dropped == 1).any():
                reason = ALL_DROPPED
            elif missing:
                reason = _NO_MEMORY
            else:
                reason = _NO_SCORE
            missing.append({"epsilon": epsilon, "seed": None, "chosen": {}, "reason": reason})
            _LOG.warning(
                "methods[%r] at epsilon=%g has no point to choose: %s", runs.name, epsilon, reason
            )
            row["chosen"] = {}
            index = None
        choices.append(_Choice(epsilon, index, numbers[at], row, missing))
    return choices


def _share_dropped(result: Result, public: bool) -> Row:
    """Return the share of a run's updates that were dropped, if there are any.

    A public report has the share only if all updates were dropped.
    """
    known = result.dropped == 1 if public else result.dropped > 0
    return {"dropped": result.dropped} if known else {}


def _stated_epsilon(statement: Mapping[str, Any]) -> float | None:
    """Return the finite epsilon for the observer of sums, or None.

    A method that sends nothing has epsilon 0.
    """
    if not statement["communicates"]:
        return 0.0
    epsilon = float(statement["honest"]["aggregate"]["epsilon"])
    return epsilon if math.isfinite(epsilon) else None
