"""Runs of a candidate: which of its points share a program, their noise, and their newcomers."""

import contextlib
import functools
import logging
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl._support.checks import check_accepts, check_instance, key_of, show
from jaxfl.engine.chunk import out_of_memory
from jaxfl.engine.evaluate import PerClient, summarize
from jaxfl.engine.program import Points, over_points
from jaxfl.privacy.accounting.calibration import calibrate
from jaxfl.privacy.dropouts import with_dropouts
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.run.bars import SharedBar
from jaxfl.run.candidates import Candidate, is_json_value, texts_of
from jaxfl.run.check import check_algorithm, check_evaluation, check_mechanism, state_shapes
from jaxfl.run.evaluate import scores_of
from jaxfl.run.recorder import Result
from jaxfl.run.simulate import names_of_points, noisy, sweep
from jaxfl.types import Algorithm, Clients

_LOG = logging.getLogger("jaxfl")

Split: TypeAlias = tuple[Clients, Clients | None]
"""Clients who take part, and newcomers, if there are any."""

Finished: TypeAlias = tuple[Result | None, str]
"""Result and folder of a point.

The result has no model and no client states. It is None if the point does not fit in memory. The
path of the folder is relative to the folder of the comparison, and empty without one.
"""

_STATE_BYTES = 2**30
"""Largest number of bytes of clients' states in one program of several points."""


class PointToRun(NamedTuple):
    """Point of a candidate with its noise."""

    index: int
    """Index of the point in the candidate's columns."""
    values: dict[str, Any]
    """Arguments of the builder, with the noise multiplier if the method takes noise."""


class Training(NamedTuple):
    """Clients, seed and rounds of runs that differ in their points."""

    clients: Clients
    seed: int
    rounds: int
    every: int = 0
    """Number of rounds between evaluations. 0 evaluates after the last round only."""
    newcomers: Clients | None = None
    """Clients who take no part, if there are any. Each point serves them after its last round."""


class CandidateRuns:
    """Runs of a method, whose points are built and checked.

    Args:
        name: Name of the method.
        method: Candidate of the method.
        algorithms: Algorithm of each point, with a noise multiplier of 1 if the method takes any.
        fixed: Arguments that are constants of a program, so that each of their values needs a
            program of its own. All other arguments are open: they are inputs of the program.
        rounds: Number of rounds of the method's longest run.
        root: Folder of the comparison. None writes nothing.
        options: Options of all runs, as in `RunOptions`.
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
        """Noise multiplier by epsilon, for each number of clients. `calibrate` adds them."""
        self.texts = {argument: texts_of(column) for argument, column in method.points.items()}

    @property
    def algorithm(self) -> Algorithm:
        """Algorithm of the first point."""
        return self.algorithms[0]

    @property
    def sends_nothing(self) -> bool:
        """Whether clients send nothing, so that rounds cost no privacy."""
        return not self.algorithm.mechanism.communicates

    @property
    def tuned(self) -> bool:
        """Whether tuning has a choice: of a point, or of a round if clients send nothing."""
        return self.method.num_points > 1 or self.sends_nothing

    @property
    def public(self) -> bool:
        """Whether reports leave out what follows from private data without noise."""
        return self.options.get("report") == "public"

    @property
    def all_points(self) -> list[PointToRun]:
        """All points, with a noise multiplier of 1 if the method takes any."""
        return [self.point(index, 1.0) for index in range(self.method.num_points)]

    @property
    def columns(self) -> dict[str, list[Any]]:
        """Column of each argument over all points, as JSON."""
        shown = [self.shown(index) for index in range(self.method.num_points)]
        return {argument: [point[argument] for point in shown] for argument in self.method.points}

    def point(self, index: int, noise_multiplier: float) -> PointToRun:
        """Return a point with its noise, if the method takes any."""
        values = self.method.point(index)
        if self.method.private:
            values = values | {"noise_multiplier": noise_multiplier}
        return PointToRun(index, values)

    def shown(self, index: int) -> dict[str, Any]:
        """Return the arguments of a point as JSON, with texts for other values."""
        point = self.method.point(index)
        return {
            argument: value if is_json_value(value) else self.texts[argument][index]
            for argument, value in point.items()
        }

    def trained(self, clients: int, rounds: int, points: int) -> float:
        """Return the expected number of clients that train, summed over rounds and points.

        Args:
            clients: Number of clients.
            rounds: Number of rounds of each point.
            points: Number of points.
        """
        return float(self.algorithm.mechanism.sampling.expected(clients) * rounds * points)

    def work(self, held_out: int, parted: Iterable[Split], epsilons: int) -> float:
        """Return how many clients the tuning and the final runs train (see `trained`).

        Args:
            held_out: Number of the tuning's clients.
            parted: Participants and newcomers of each seed.
            epsilons: Number of target epsilons.
        """
        # A method that takes no noise has one level, at the epsilon infinity.
        levels = 1
        if self.method.private:
            levels = epsilons
        tuning = 0.0
        if self.tuned:
            tuning = self.trained(held_out, self.rounds, levels * self.method.num_points)
        return tuning + sum(self.work_of_seed(*parts, self.rounds, levels) for parts in parted)

    def work_of_seed(
        self,
        participants: Clients,
        newcomers: Clients | None,
        rounds: int,
        points: int,
    ) -> float:
        """Return how many clients the final runs of a seed train (see `trained`).

        Newcomers count if clients send nothing, because they then train alone.
        """
        work = self.trained(participants.num_clients, rounds, points)
        if newcomers is None or not self.sends_nothing:
            return work
        return work + self.trained(newcomers.num_clients, rounds, points)

    def calibrate(self, numbers: Iterable[int], epsilons: Sequence[float]) -> None:
        """Add the noise multiplier of each epsilon to `levels`, for some numbers of clients.

        A method that takes no noise has the epsilon infinity alone, with the multiplier 0.

        Raises:
            ValueError: Points differ in epsilon at one noise multiplier, or an epsilon is out of
                reach. The message names the method.
        """
        for clients in numbers:
            levels = {math.inf: 0.0}
            if self.method.private:
                options = self._noise(clients)
                # All points have the same noise, so an error names the method alone.
                with _naming(self.name, {}):
                    levels = {epsilon: _noise_of(epsilon, options) for epsilon in epsilons}
            self.levels[clients] = levels

    def _noise(self, clients: int) -> dict[str, Any]:
        """Return the arguments of `jaxfl.privacy.calibrate`, which all points must share.

        Raises:
            ValueError: Points differ in epsilon at one noise multiplier.
        """
        delta = self.algorithm.terms.delta
        # Equal numbers give equal epsilons, so no epsilon need be computed here.
        exposed = [_exposed(one.mechanism, clients, self.rounds) for one in self.algorithms]
        other_delta = any(algorithm.terms.delta != delta for algorithm in self.algorithms)
        if other_delta or any(not np.array_equal(one, exposed[0]) for one in exposed):
            raise ValueError(
                f"methods[{self.name!r}].points must have the same epsilon at one noise "
                f"multiplier, got {show(self.method.points)} with different epsilons. Give a "
                "candidate for each value that changes epsilon, such as each sampling rate."
            )
        availability = self.options.get("availability", 1.0)
        return {
            "clients": clients,
            "rounds": self.rounds,
            "mechanism": with_dropouts(self.algorithm.mechanism, availability),
            "stateful": any(state_shapes(one, clients) for one in self.algorithms),
            "delta": delta,
        }

    def check_newcomers(self, newcomers: Sequence[Clients]) -> None:
        """Require that every program can train or evaluate these clients. Nothing is compiled.

        Newcomers train if clients send nothing. Otherwise they are only evaluated.
        """
        different = _different(newcomers)
        for group in self.groups(self.all_points).values():
            # Points of a group differ only in numbers, so their functions have the same shapes.
            algorithm = self.algorithms[group[0]]
            for clients in different:
                with _naming(self.name, self.method.point(group[0])):
                    if self.sends_nothing:
                        check_algorithm(algorithm, clients, self.rounds)
                    else:
                        check_evaluation(algorithm, clients)

    def check_group(self, group: Sequence[int], clients: Clients) -> None:
        """Require that the points of one program can train these clients. Nothing is compiled."""
        first, *others = group
        with _naming(self.name, self.method.point(first)):
            update = check_algorithm(self.algorithms[first], clients, self.rounds)
        # The others differ only in numbers, for which a mechanism may still raise an error.
        for index in others:
            with _naming(self.name, self.method.point(index)):
                check_mechanism(self.algorithms[index], clients, update)

    def check_clips(self, group: Sequence[int]) -> None:
        """Require finite clip bounds of the points of one program if it adds noise."""
        unclipped = [i for i in group if math.isinf(self.algorithms[i].mechanism.clip)]
        if unclipped and noisy(self.program([self.point(index, 1.0) for index in group])):
            raise ValueError(
                f"{_where(self.name, self.method.point(unclipped[0]))}: clip must be finite with "
                "noise, which is in multiples of it, got clip=inf. Give a large number, or a "
                "candidate that takes no noise_multiplier."
            )

    def final(
        self, bar: SharedBar, points: Sequence[PointToRun], training: Training
    ) -> list[Finished]:
        """Run the chosen points of a seed, and add the newcomers' score to the last row of metrics.

        The score is `unseen` in each result's row.

        Args:
            bar: Progress bar of the comparison.
            points: The chosen points.
            training: Participants, newcomers, seed and rounds of the runs.
        """
        name = f"seed={training.seed}"
        newcomers = training.newcomers
        if newcomers is None or not self.sends_nothing:
            return self.run(bar, points, name, training)
        training = training._replace(newcomers=None)
        found = self.run(bar, points, name, training)
        # Participants share nothing with newcomers here, who therefore train in a run of their own.
        training = training._replace(clients=newcomers)
        alone = self.run(bar, points, f"{name}, unseen", training)
        headline = self.algorithm.model.task.headline
        scored: list[Finished] = []
        for (result, folder), (own, _) in zip(found, alone, strict=True):
            score = math.nan
            if own is not None:
                score = own.metrics[-1][headline]
            if result is not None:
                result = _with_unseen(result, score)
            scored.append((result, folder))
        return scored

    def groups(self, points: Sequence[PointToRun]) -> dict[str, list[int]]:
        """Return the positions in `points` that share a program, by a text of its fixed arguments.

        The text is a part of the folder's name. It is empty without fixed arguments.
        """
        found: dict[str, list[int]] = {}
        fixed = [name for name in self.method.points if name in self.fixed]
        for position, (index, values) in enumerate(points):
            # Values such as models may have no hash, so texts name the groups.
            texts = [f"{name}={self.texts[name][index]}" for name in fixed]
            if "noise_multiplier" in self.fixed & values.keys():
                texts.append(f"noise_multiplier={values['noise_multiplier']}")
            found.setdefault(", ".join(texts), []).append(position)
        return found

    def run(
        self, bar: SharedBar, points: Sequence[PointToRun], name: str, training: Training
    ) -> list[Finished]:
        """Run the points, as many of them in one program as arguments and memory allow.

        Args:
            bar: Progress bar of the comparison.
            points: The points.
            name: Beginning of the folders' names.
            training: Clients, seed and rounds of the runs.

        Returns:
            A result and a folder for each point.
        """
        results: list[Finished] = [(None, "")] * len(points)
        clients = training.clients.num_clients
        for text, group in self.groups(points).items():
            waiting = self._parts(group, points[group[0]], clients)
            while waiting:
                part = waiting.pop(0)
                of_group = ""
                if len(part) < len(group):
                    of_group = f"points {part[0]} to {part[-1]}"
                label = ", ".join(filter(None, [name, text, of_group]))
                work = self.trained(clients, training.rounds, len(part))
                with bar.part(f"{self.name}: {label}", work):
                    found = self._run_unless_too_large(
                        [points[i] for i in part], part, label, training
                    )
                if found is None and len(part) > 1:
                    # The halves train the same clients again.
                    bar.skip(-work)
                    waiting[:0] = _in_parts(part, 2)
                # A part without results waits again in halves, or its only point is left out.
                for position, result in zip(part, found or [], strict=False):
                    results[position] = result
        return results

    def _parts(self, group: Sequence[int], first: PointToRun, clients: int) -> list[list[int]]:
        """Return the positions of a group in parts whose client states fit `_STATE_BYTES`."""
        states = state_shapes(self.algorithms[first.index], clients)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in states)
        # A method without states has size 0, and all of its points fit.
        at_once = max(1, _STATE_BYTES // max(1, size))
        return _in_parts(group, math.ceil(len(group) / at_once))

    def _run_unless_too_large(
        self,
        points: Sequence[PointToRun],
        numbers: Sequence[int],
        label: str,
        training: Training,
    ) -> list[Finished] | None:
        """Run points in one program, and return their results and folders, as `run` does.

        Args:
            points: The points of the program.
            numbers: Position of each point among the points of all programs.
            label: Name of the program's folder.
            training: Clients, seed and rounds of the runs.

        Returns:
            Results and folders, or None if the program does not fit in memory.
        """
        points_text = _points_text([self.shown(index) for index, _ in points])
        which = f"methods[{self.name!r}], {label}, {points_text}"
        folder: pathlib.Path | None = None
        if self.root is not None:
            folder = self.root / self.name / label
        try:
            found = self._run_together(points, numbers, folder, training)
        except KeyboardInterrupt as stop:
            # The message says which of the many runs would resume.
            stop.args = (f"{which}: {stop}",)
            raise
        except Exception as error:
            # All processes would have to halve the points, and the others may have no error.
            if jax.process_count() > 1 or not out_of_memory(error):
                error.add_note(f"raised by {which}")
                raise
            step = "the point is left out"
            if len(points) > 1:
                step = "half of the points run at a time"
            cause, _, _ = str(error).partition("\n")
            _LOG.warning("%s: does not fit in memory, so %s: %s", which, step, cause)
            return None
        # Nothing needs the servers from here on, but results may stay in memory for long.
        without_server = [result._replace(server=()) for result in found]
        return list(zip(without_server, self._paths(folder, points), strict=True))

    def _run_together(
        self,
        points: Sequence[PointToRun],
        numbers: Sequence[int],
        folder: pathlib.Path | None,
        training: Training,
    ) -> list[Result]:
        """Run points in one program, score their newcomers, and return the results."""
        found = sweep(
            # Points of several programs have one key, and their numbers make their noise differ.
            _keys(training.seed, points),
            self.build(points[0].values),
            self.open(points),
            training.clients,
            rounds=training.rounds,
            folder=folder,
            # No table needs the clients' states.
            keep_states=False,
            numbers=numbers,
            **{"eval_every": training.every or training.rounds} | self.options,
        )
        if training.newcomers is None:
            return found
        scores = self._newcomers_scores(training.newcomers, found, points, training)
        task = self.algorithm.model.task
        sizes = np.asarray(training.newcomers.test_size)
        served = []
        for position, result in enumerate(found):
            own = {name: values[position] for name, values in scores.items()}
            row = summarize(own, sizes, task.metrics)
            served.append(_with_unseen(result, row[task.headline]))
        return served

    def _newcomers_scores(
        self,
        newcomers: Clients,
        results: Sequence[Result],
        points: Sequence[PointToRun],
        training: Training,
    ) -> PerClient:
        """Return the newcomers' scores [P, C] by the results of a program's P points."""
        servers = jax.device_get([result.server for result in results])
        # The points of a program share the shapes of their servers.
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *servers)
        keys = _keys(training.seed, points)
        options = {name: self.options.get(name) for name in ("chunk", "devices")}
        rounds = training.rounds
        return scores_of(keys, self.program(points), stacked, newcomers, rounds=rounds, **options)

    def _paths(self, folder: pathlib.Path | None, points: Sequence[PointToRun]) -> list[str]:
        """Return the path of each point's folder in the comparison's, or "" without a folder."""
        if folder is None or self.root is None:
            return [""] * len(points)
        names = names_of_points(self.open(points), len(points))
        return [(folder / name).relative_to(self.root).as_posix() for name in names]

    def program(self, points: Sequence[PointToRun]) -> Points:
        """Return the points as those of one program, whose inputs are the open arguments."""
        return Points(self.build(points[0].values), _floats(self.open(points)))

    def build(self, values: Mapping[str, Any]) -> Callable[..., Algorithm]:
        """Return the method's builder with a point's fixed arguments bound to their values."""
        fixed = {name: value for name, value in values.items() if name in self.fixed}
        if not fixed:
            return self.method.build
        return functools.partial(self.method.build, **fixed)

    def open(self, points: Sequence[PointToRun]) -> dict[str, list[float]]:
        """Return the column of numbers of each open argument."""
        names = [name for name in points[0].values if name not in self.fixed]
        return {name: [float(point.values[name]) for point in points] for name in names}


def _in_parts(positions: Sequence[int], count: int) -> list[list[int]]:
    """Return the positions in `count` parts of nearly equal length."""
    return [part.tolist() for part in np.array_split(positions, count)]


def _keys(seed: int, points: Sequence[PointToRun]) -> Key[Array, "P"]:
    """Return the key of a seed for each point."""
    return jnp.broadcast_to(key_of(seed), (len(points),))


def _with_unseen(result: Result, score: float) -> Result:
    """Return a result whose last row of metrics has the newcomers' score as `unseen`."""
    *earlier, last = result.metrics
    return result._replace(metrics=[*earlier, last | {"unseen": score}])


def prepared_runs(
    name: str,
    method: Candidate,
    populations: Sequence[Clients],
    rounds: int,
    root: pathlib.Path | None,
    options: dict[str, Any],
) -> CandidateRuns:
    """Return the runs of a method, whose points are built, and checked for all clients.

    Nothing is compiled.

    Raises:
        ValueError: A point cannot be built or run. The message names the method and the point.
        TypeError: A point has the wrong type. The message names the method and the point.
    """
    rounds = method.rounds or rounds
    different = _different(populations)
    algorithms = []
    check_accepts(f"methods[{name!r}].build", method.build, method.points)
    for index in range(method.num_points):
        with _naming(name, method.point(index)):
            algorithms.append(check_instance("build(...)", method.at(index), (Algorithm,)))
    # A point must run with constants before tracing decides which of them can be inputs.
    with _naming(name, method.point(0)):
        check_algorithm(algorithms[0], different[0], rounds)
    fixed = _fixed(method, different[0], rounds)
    runs = CandidateRuns(name, method, algorithms, fixed, rounds, root, options)
    for group in runs.groups(runs.all_points).values():
        for clients in different:
            runs.check_group(group, clients)
        runs.check_clips(group)
    return runs


def _fixed(method: Candidate, clients: Clients, rounds: int) -> frozenset[str]:
    """Return the names of the fixed arguments (see `CandidateRuns`), by tracing the method."""
    values = method.point(0)
    if method.private:
        values = values | {"noise_multiplier": 1.0}
    # The noise multiplier has no column, but is a number too.
    numbers = [name for name in values if _is_numeric(method.points.get(name, [0.0]))]
    works = functools.partial(
        _can_be_open, values=values, build=method.build, clients=clients, rounds=rounds
    )
    open_names = numbers
    if numbers and not works(numbers):
        open_names = [name for name in numbers if works([name])]
        # Arguments that can be open one by one may still not be open together.
        if open_names and not works(open_names):
            open_names = []
    return frozenset(values.keys() - set(open_names))


def _is_numeric(column: Sequence[Any]) -> bool:
    """Return whether all values of a column are numbers, and no booleans."""
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in column)


def _can_be_open(
    names: Sequence[str],
    values: Mapping[str, Any],
    build: Callable[..., Algorithm],
    clients: Clients,
    rounds: int,
) -> bool:
    """Return whether the named arguments can be inputs of a program, by tracing the method."""
    fixed = {name: value for name, value in values.items() if name not in names}
    columns = _floats({name: [values[name]] for name in names})
    points = Points(functools.partial(build, **fixed), columns)
    traced = functools.partial(_traced, clients=clients, rounds=rounds)
    # Open arguments are inputs of the compiled program. Any error means that these cannot be open,
    # because all was well without them.
    with contextlib.suppress(Exception):
        jax.eval_shape(over_points(traced, points))
        return True
    return False


def _traced(algorithm: Algorithm, clients: Clients, rounds: int) -> Array:
    """Trace an algorithm in a round, except for the sums over clients, and return a 0."""
    update = check_algorithm(algorithm, clients, rounds)
    memory = algorithm.mechanism.init(key_of(0), lambda: update, clients.num_clients)
    # A sampler may need its numbers as constants, for instance the size of a cohort.
    algorithm.mechanism.draw(key_of(0), memory, jnp.int32(0), clients.num_clients)
    return jnp.zeros(())


def _different(populations: Sequence[Clients]) -> list[Clients]:
    """Return populations of different signatures."""
    # One check serves all populations of a signature.
    return list({_signature(clients): clients for clients in populations}.values())


def _signature(clients: Clients) -> tuple:
    """Return what decides whether a model fits.

    This is the number of clients, shapes, dtypes, and the least and the largest of all labels, and
    of inputs that are whole numbers.
    """
    inputs = np.asarray(clients.inputs)
    labels = np.asarray(clients.labels)
    signature = [clients.num_clients, _ends(labels)]
    # Whole numbers may index a table of the model, whose rows they must not exceed.
    if np.issubdtype(inputs.dtype, np.integer):
        signature.append(_ends(inputs))
    for array in (inputs, labels):
        signature += [array.shape[1:], str(array.dtype)]
    return tuple(signature)


def _ends(array: np.ndarray) -> tuple:
    """Return the least and the largest number of an array, or nothing for an empty one."""
    if not array.size:
        return ()
    return array.min().item(), array.max().item()


def common_task(runs: Sequence[CandidateRuns]) -> Any:
    """Return the task of the first point. All points must have its headline metric.

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
            if algorithm.mechanism.communicates == of_method.sends_nothing:
                raise ValueError(
                    f"{where}: points must all send updates or all send none, got both kinds. "
                    "Give a candidate for each kind."
                )
    return task


@contextlib.contextmanager
def _naming(name: str, point: Mapping[str, Any]) -> Iterator[None]:
    """Raise errors of the block with the method and the point in the message.

    A TypeError stays one, and every other exception becomes a ValueError.
    """
    try:
        yield
    except Exception as error:
        text = str(error)
        if not isinstance(error, TypeError | ValueError):
            text = f"{type(error).__name__}: {error}"
        kind: type[Exception] = ValueError
        if isinstance(error, TypeError):
            kind = TypeError
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


def _noise_of(epsilon: float, options: Mapping[str, Any]) -> float:
    """Return the noise multiplier of an epsilon, which is 0 for infinity."""
    return 0.0 if math.isinf(epsilon) else calibrate(epsilon, **options)


def _exposed(mechanism: Mechanism, clients: int, rounds: int) -> np.ndarray:
    """Return the numbers from which the epsilon for "aggregate" follows, with a row per round.

    The columns are the multiplier for each client (see `View`), then the rate of hidden cohorts.
    """
    view = mechanism.view(mechanism.planned(clients, rounds), "aggregate")
    return np.column_stack([view.multiplier, view.hidden * view.rate])
