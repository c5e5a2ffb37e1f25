"""Methods beside each other at the same epsilons, each with the settings that suit it, over several seeds."""

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
    """A method as `compare` takes it.

    Args:
        build: keyword arguments to algorithm, as `jaxfl.sweep` has it. If it takes `noise_multiplier`, the method is
            run at every epsilon; otherwise, or if a partial has fixed it, once, as it is.
        points: columns of values to try, by argument of `build` (see `grid` and `spread`): numbers, or anything else
            that `build` takes, such as models. Points whose values decide a shape or a Python branch, such as batch
            sizes, epochs and models, are compiled in a program for each of these values, all others in one.
        rounds: its own number of rounds; None: the comparison's. A method that sends nothing stops at the round that
            is best on validation examples, so give it as many as it can use.
    """

    build: Callable[..., Algorithm]
    points: Mapping[str, Sequence[Any]] = {}
    rounds: int | None = None

    @property
    def private(self) -> bool:
        """Whether it takes noise, which a partial has not fixed."""
        fixed = self.build.keywords if isinstance(self.build, functools.partial) else {}
        return "noise_multiplier" in inspect.signature(self.build).parameters.keys() - fixed.keys()

    @property
    def number(self) -> int:
        """Number of points."""
        return len(next(iter(self.points.values()), (0,)))

    def point(self, index: int) -> dict[str, Any]:
        """The arguments of a point."""
        return {argument: column[index] for argument, column in self.points.items()}

    def at(self, index: int) -> Algorithm:
        """The algorithm of a point, with noise if it takes any."""
        return self.build(**self.point(index), **{"noise_multiplier": 1.0} if self.private else {})


def grid(**axes: Any) -> dict[str, list[Any]]:
    """All combinations of some values, as columns. SharedBar numbers stay whole numbers.

    >>> grid(rate=[0.1, 0.3], batch_size=[4, 8])
    {'rate': [0.1, 0.1, 0.3, 0.3], 'batch_size': [4, 8, 4, 8]}
    """
    columns = _check_columns("axes", axes)
    if empty := [name for name, axis in columns.items() if not axis]:
        raise ValueError(f"{empty[0]}={axes[empty[0]]!r}: give one value at least")
    points = itertools.product(*columns.values())
    return {name: list(column) for name, column in zip(columns, zip(*points), strict=True)}


@checked()
def spread(number: int, **axes: Any) -> dict[str, list[float]]:
    """Points that fill a box of positive numbers evenly on a logarithmic scale (Halton's sequence), as columns.

    With them, methods of one, two and three arguments get the same number of points. Points are rounded to six digits.
    Without this they could differ between processors in the last digits, and a comparison that was begun on one could
    not be resumed on another.

    >>> spread(3, rate=(0.01, 1.0), clip=(0.1, 10.0))
    {'rate': [0.1, 0.0316228, 0.316228], 'clip': [0.464159, 2.15443, 0.16681]}
    """
    for name, ends in check_values("axes", axes).items():
        if len(ends) != 2 or not 0 < ends[0] < ends[1] < math.inf:
            raise ValueError(
                f"{name}={show(axes[name])}: give two numbers above 0, the smaller one first"
            )
    if not axes:
        return {}
    low, high = np.log(list(axes.values())).T
    sequence = scipy.stats.qmc.Halton(len(axes), scramble=False).fast_forward(1)  # after the origin
    points = np.exp(low + sequence.random(number) * (high - low))
    return {
        name: [float(f"{value:.6g}") for value in column]
        for name, column in zip(axes, points.T, strict=True)
    }


def _check_columns(name: str, value: Any) -> dict[str, list[Any]]:
    """Require columns of values by argument, and return them with Python's numbers."""
    return check_columns(name, value, _check_column, "values")


def _check_column(name: str, value: Any) -> list[Any]:
    if isinstance(value, np.ndarray | jax.Array):
        array = check_array(name, value)
        if array.ndim != 1:
            raise ValueError(f"{name}={show(value)}: give a vector of numbers, or a list")
        value = array.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={show(value)}: give a list of values")
    column = [plain(item) for item in value]
    if any(
        isinstance(item, complex) or (isinstance(item, float) and math.isnan(item))
        for item in column
    ):
        raise ValueError(f"{name}={show(value)}: give real numbers, not NaN, or other values")
    return column


def _check_methods(name: str, value: Any) -> dict[str, Candidate]:
    if not isinstance(value, Mapping) or not value:
        raise TypeError(
            f"{name}={show(value)}: give candidates by name, for instance {{'DP-FedAvg': Candidate(build)}}"
        )
    taken = {_name_in_folder(file): f"{file!r}, a file of a comparison or a run" for file in FILES}
    for method in value:
        _check_name(name, method, value)
        if (other := taken.get(_name_in_folder(method))) is not None:
            raise ValueError(
                f"{name} must have names of their own, got {method!r} and {other}, which may be the same in a folder. "
                "Choose another name."
            )
        taken[_name_in_folder(method)] = repr(method)
    return {
        method: _check_candidate(f"{name}[{method!r}]", candidate)
        for method, candidate in value.items()
    }


def _name_in_folder(name: str) -> str:
    """Return what equal names have in common for any file system: some ignore case, or how accents are written."""
    return unicodedata.normalize("NFKC", name).casefold()


def _check_name(name: str, method: Any, methods: Mapping[Any, Any]) -> None:
    """Require a name that a folder can have, also one that is not hidden."""
    allowed = isinstance(method, str) and re.fullmatch(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*", method)
    if not allowed or len(method.encode(errors="replace")) > 200:
        raise ValueError(
            f"{name} must have names that a folder can have, got {show(method)} in {show(methods)}. Give at most 200 "
            "bytes of text without slashes and control characters, which does not begin with a dot."
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
            f"{name}.points={lengths}: give columns of one length, without noise_multiplier"
        )
    return candidate._replace(points=points)


def _check_epsilons(name: str, value: Any) -> tuple[float, ...]:
    if isinstance(value, np.ndarray | jax.Array):
        value = np.asarray(value).ravel().tolist()
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not value
        or len({*map(str, value)}) < len(value)
    ):
        raise TypeError(
            f"{name}={show(value)}: give different numbers above 0, for instance (1.0, 8.0, math.inf)"
        )
    if any(epsilon == 0 for epsilon in value):
        raise ValueError(
            f"{name}={show(value)}: give numbers above 0; methods that send nothing have epsilon 0 anyway"
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

    All methods go through the same protocol: (1) each point is trained once, with the tuning seed, and scored by the
    headline metric on examples held out of each client's training split, or on other ones (`validation`); (2) the best
    one is run with every seed, on all training examples, and the test examples are read once. Epsilon does not cover
    the tuning, as the protocol says.
    All points of a method and all epsilons go through one compiled program, where their clients' states fit in memory,
    and so does each seed; values that decide a shape or a Python branch have a program each. Noise is the least for its
    epsilon, by `jaxfl.privacy.calibrate`. A method that sends nothing is scored in twenty of its rounds, and stops at
    the best one.

    Every point of every method is built and checked before the first round of any. If memory ends, fewer points go
    through a program; a single point that does not fit is left out, and the table says so. A point without a score, or
    all of whose updates were dropped because they were not finite, is never chosen.

    Put baselines among the methods: `local_only`, `partial(dp_fedavg, ..., clip=math.inf, noise_multiplier=0.0)`, a
    fine-tuned model.

    Args:
        methods: by name; give each as many points.
        clients: the same for all seeds, or a function from a seed to its clients, which should draw the partition.
        rounds: T.
        epsilons: targets for methods with noise; infinity: without noise.
        seeds: of the final runs.
        validation: share of each client's training examples that tuning holds out; or clients, given like `clients`,
            whom tuning trains and tests in their place. If clients have a few examples only, give such ones: a client
            would be asked for the class whose only example was held out.
        tuning_seed: another one than `seeds`.
        unseen: share of the clients who take no part, drawn by each seed alike for all methods.
            Only the others train, choose points, and count for noise. Rows then have `unseen`, the
            headline metric of the left-out clients on their own test examples. A method serves
            them by its `personalize`, which gets the server's last state, a first client state
            from `init`, and their training examples (see `evaluate`). Methods whose clients keep a
            model from rounds serve them badly, such as `ditto`, `mr_mtl`, `apfl`, `pfedme` and
            `dp_lg`: nobody has trained their first model. If a method sends nothing, they train
            alone for the chosen rounds. Where all seeds have the same clients, tuning and other
            seeds may train those whom one seed leaves out.
        folder: every run has a folder in it and is resumed; `comparison.json` has the result, and `report.html` shows
            it (see `write_report`). Clients' states do not stay there. None writes nothing.
        options: of the runs, see `RunOptions`; `progress` shows one bar over all.

    Raises:
        ValueError: an argument does not fit; the tuning seed is among the seeds; a point cannot be built or run; no
            example is held out to choose a point by.
        TypeError: an argument, or a point, has the wrong type.
    """
    if tuning_seed in seeds:
        raise ValueError(
            f"tuning_seed={tuning_seed} is among seeds={show(seeds)}: give another one"
        )
    root = None if folder is None else pathlib.Path(folder)
    assert callable(clients)
    if isinstance(validation, float):
        drawn, scored = (
            clients(tuning_seed),
            f"{100 * validation:g}% of each client's training examples",
        )
        held_out, _ = _parted(check_clients(f"clients({tuning_seed})", drawn), unseen, tuning_seed)
        held_out = hold_out(held_out, validation, seed=tuning_seed)
    else:
        assert callable(validation)
        given = check_clients("validation", validation(tuning_seed))
        scored = "other clients' test examples"
        held_out, _ = _parted(given, unseen, tuning_seed)
    drawn_by_seed = {seed: check_clients(f"clients({seed})", clients(seed)) for seed in seeds}
    parted = {seed: _parted(drawn, unseen, seed) for seed, drawn in drawn_by_seed.items()}
    tested = {seed: participants for seed, (participants, _) in parted.items()}
    newcomers = [later for _, later in parted.values() if later is not None]
    shared: dict[str, Any] = {**options, "progress": False}
    populations = [held_out, *tested.values()]
    runs = [
        _prepared(name, method, populations, rounds, root, shared)
        for name, method in methods.items()
    ]
    task = _common_task(runs)
    for at in runs:
        at.check_newcomers(newcomers)
    if any(at.tuned for at in runs) and not np.asarray(held_out.test_size).any():
        cause = (
            "no client has two training examples"
            if isinstance(validation, float)
            else "they have no test examples"
        )
        raise ValueError(
            f"validation must hold out an example to choose points by, got {show(validation)}, and {cause}. Give other "
            "clients as `validation`, with test examples, or one point for each method."
        )
    rows: list[Row] = []
    tuning: list[Row] = []
    missing: list[Row] = []
    work = sum(at.work(held_out.number, parted.values(), len(epsilons)) for at in runs)
    public = options.get("report") == "public"
    with shared_bar(
        "compare", work, options.get("progress", True) and jax.process_index() == 0
    ) as bar:
        for at in runs:  # all of them before the first round of any: an epsilon may be out of reach
            bar.say(f"{at.name}: calibrating")
            at.levels |= {
                number: _levels(at, number, epsilons)
                for number in {one.number for one in populations}
            }
        for at in runs:
            choices = _tuned(at, held_out, tuning_seed, bar, public)
            tuning += [{"method": at.name} | choice.row for choice in choices]
            missing += [{"method": at.name} | lost for choice in choices for lost in choice.missing]
            live = [(choice, choice.index) for choice in choices if choice.index is not None]
            for seed, (own, later) in parted.items():
                levels = at.levels[own.number]
                length = live[0][0].rounds if live else 0
                points = [at.point(index, levels[choice.epsilon]) for choice, index in live]
                planned = at.work_of_seed(own, later, at.rounds, len(levels))
                bar.skip(planned - at.work_of_seed(own, later, length, len(live)))
                results = at.final(bar, points, own, later, seed, length)
                for (choice, _), (result, folder_of_run) in zip(live, results, strict=True):
                    facts = {"method": at.name, "epsilon": choice.epsilon}
                    chosen = {"seed": seed, "chosen": choice.row["chosen"]}
                    if result is None:
                        missing.append(facts | chosen | {"reason": _NO_MEMORY})
                        continue
                    last = {
                        key: value for key, value in result.metrics[-1].items() if key != "epsilon"
                    }
                    rows.append(facts | {"stated": _stated(result.statement)} | chosen | last)
                    rows[-1] |= _share_dropped(result, public) | (
                        {"run": folder_of_run} if folder_of_run else {}
                    )
    points_of = " or ".join(map(str, sorted({method.number for method in methods.values()})))
    protocol = (
        f"{points_of} points of each method and epsilon, each tried once (seed {tuning_seed}) on {scored}; "
        f"the best over seeds {', '.join(map(str, seeds))}. No epsilon covers tuning."
    )
    if unseen:
        protocol += (
            f" {100 * unseen:g}% of the clients, drawn by the seed, take no part. Their score is "
            "`unseen`: by the server's last state and a first state of their own, or after training "
            "alone where a method sends nothing."
        )
    lower_is_better = task.metrics[task.headline].lower_is_better
    comparison = Comparison(rows, tuning, task.headline, lower_is_better, protocol, missing)
    if root is not None and jax.process_index() == 0:
        comparison.save(root / COMPARISON)
        write_report(root)
    return comparison


_Parts: TypeAlias = tuple[Clients, Clients | None]
"""Who takes part, and newcomers."""

_STATE_BYTES = 2**30
"""Of clients' states that one program holds."""

_NO_MEMORY = "out of memory"
_NO_SCORE = "no score"


class _Runs:
    """The runs of a method, whose points are built and checked.

    Args:
        name: of the method.
        method: its candidate.
        algorithms: that of each point, with noise if the method takes any.
        fixed: arguments whose values a program cannot leave open.
        rounds: of its longest run.
        root: folder of the comparison.
        options: of all runs.
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
        self.name, self.method, self.algorithms, self.fixed = name, method, algorithms, fixed
        self.rounds, self.root, self.options = rounds, root, options
        self.levels: dict[int, dict[float, float]] = {}
        """By number of clients, the noise multiplier of each epsilon."""
        self.texts = {argument: _texts(column) for argument, column in method.points.items()}

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the first point."""
        return self.algorithms[0]

    @property
    def silent(self) -> bool:
        """Whether it sends nothing."""
        return not self.algorithm.mechanism.communicates

    @property
    def tuned(self) -> bool:
        """Whether there is anything to choose: a point, or a round where none costs privacy."""
        return self.method.number > 1 or self.silent

    def point(self, index: int, noise_multiplier: float) -> tuple[int, dict[str, Any]]:
        """Return the number of a point, and its arguments with noise if the method takes any."""
        noise = {"noise_multiplier": noise_multiplier} if self.method.private else {}
        return index, self.method.point(index) | noise

    def shown(self, index: int) -> dict[str, Any]:
        """Return the arguments of a point as JSON holds them."""
        point = self.method.point(index)
        return {
            argument: value if _is_plain(value) else self.texts[argument][index]
            for argument, value in point.items()
        }

    def trained(self, clients: int, rounds: int, points: int) -> float:
        """How many clients some points train in all."""
        return float(self.algorithm.mechanism.sampling.expected(clients) * rounds * points)

    def work(self, held_out: int, parted: Iterable[_Parts], epsilons: int) -> float:
        """How many clients tuning and the final runs train, from the clients of these."""
        levels = epsilons if self.method.private else 1
        tuning = (
            self.trained(held_out, self.rounds, levels * self.method.number) if self.tuned else 0.0
        )
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
        """Require that every program serves these clients; nothing is compiled."""
        points = [self.point(index, 1.0) for index in range(self.method.number)]
        different = {_kind(clients): clients for clients in newcomers}.values()
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
        """Run the chosen points of a seed; last rows of metrics have the newcomers' score."""
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
        """Shapes of what clients keep; empty if they keep nothing."""
        _, states = jax.eval_shape(lambda: self.algorithms[index].init(key_of(0), clients))
        return jax.tree.leaves(states)

    def groups(self, points: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, list[int]]:
        """Return positions of the points that one program can hold, by a text that a folder can have."""
        found: dict[str, list[int]] = {}
        for position, (index, values) in enumerate(points):
            texts = [
                f"{name}={self.texts[name][index]}"
                for name in self.method.points
                if name in self.fixed
            ]
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
        """Run each point in as few programs as possible, without models and clients' states in the results.

        Each point also serves newcomers, if there are any (see `final`).

        Returns:
            For each point its result, or None if memory did not hold it, and its folder below that of the comparison.
        """
        results: list[tuple[Result | None, str]] = [(None, "")] * len(points)
        for text, group in self.groups(points).items():
            size = sum(
                leaf.size * leaf.dtype.itemsize
                for leaf in self.states(clients.number, points[group[0]][0])
            )
            count = math.ceil(len(group) / max(1, _STATE_BYTES // max(1, size)))
            waiting = [part.tolist() for part in np.array_split(group, count)]
            while waiting:
                part = waiting.pop(0)
                parts = [
                    name,
                    text,
                    "" if len(part) == len(group) else f"points {part[0]} to {part[-1]}",
                ]
                label = ", ".join(filter(None, parts))
                work = self.trained(clients.number, rounds, len(part))
                with bar.part(f"{self.name}: {label}", work):
                    chosen = [points[i] for i in part]
                    found = self._sweep(
                        chosen, clients, seed, label, rounds, every, part, newcomers
                    )
                if found is None and len(part) > 1:
                    bar.skip(-work)  # it comes again
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
        """Run points in one program; None if memory does not hold it. Numbers are those among all points."""
        which = f"methods[{self.name!r}], {label}, {_points_text([self.shown(index) for index, _ in points])}"
        folder = None if self.root is None else self.root / self.name / label
        try:
            found = sweep(
                jnp.broadcast_to(key_of(seed), (len(points),)),
                self.build(points[0][1]),
                self.open([values for _, values in points]),
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
            step = (
                "half of the points run at a time" if len(points) > 1 else "the point is left out"
            )
            _LOG.warning(
                "%s: memory does not hold it, and %s: %s",
                which,
                step,
                str(error).partition("\n")[0],
            )
            return None
        folders = [""] * len(points)
        if folder is not None and self.root is not None:
            names = names_of_points(self.open([values for _, values in points]), len(points))
            folders = [(folder / one).relative_to(self.root).as_posix() for one in names]
        return [
            (result._replace(server=()), one) for result, one in zip(found, folders, strict=True)
        ]

    def _served(
        self,
        results: Sequence[Result],
        points: Sequence[tuple[int, dict[str, Any]]],
        newcomers: Clients,
        seed: int,
        rounds: int,
    ) -> list[Result]:
        """Return the results of one program; last rows of metrics have the newcomers' score."""
        columns = self.open([values for _, values in points])
        method = Points(self.build(points[0][1]), _floats(columns))
        servers = jax.device_get([result.server for result in results])
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *servers)
        keys = jnp.broadcast_to(key_of(seed), (len(points),))
        where = {name: self.options.get(name) for name in ("chunk", "devices")}
        scores = scores_of(keys, method, stacked, newcomers, rounds=rounds, **where)
        task = self.algorithm.model.task
        sizes = np.asarray(newcomers.test_size)
        found = []
        for position, result in enumerate(results):
            own = {name: values[position] for name, values in scores.items()}
            found.append(_with_unseen(result, summarize(own, sizes, task.metrics)[task.headline]))
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
    """Return who takes part at a seed, and the newcomers, if there are any."""
    return leave_out(clients, unseen, seed=seed) if unseen else (clients, None)


def _with_unseen(result: Result, score: float) -> Result:
    """Return a result whose last row of metrics has the newcomers' score."""
    *earlier, last = result.metrics
    return result._replace(metrics=[*earlier, last | {"unseen": score}])


def _prepared(
    name: str,
    method: Candidate,
    populations: Sequence[Clients],
    rounds: int,
    root: pathlib.Path | None,
    options: dict[str, Any],
) -> _Runs:
    """Build every point of a method and check it for all clients; nothing is compiled.

    Raises:
        ValueError: or TypeError; names the method and the point.
    """
    rounds = method.rounds or rounds
    different = list({_kind(clients): clients for clients in populations}.values())
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
            for index in group[
                1:
            ]:  # they differ only in numbers, which a mechanism may still refuse
                with _naming(name, method.point(index)):
                    check_mechanism(algorithms[index], clients, update)
        values = [points[index][1] for index in group]
        unclipped = [index for index in group if math.isinf(algorithms[index].mechanism.clip)]
        if unclipped and noisy(Points(runs.build(values[0]), _floats(runs.open(values)))):
            raise ValueError(
                f"{_where(name, method.point(unclipped[0]))}: clip=inf with noise, which is in multiples of it: "
                "give a large number, or a candidate that takes no noise_multiplier"
            )
    return runs


def _fixed(method: Candidate, clients: Clients, rounds: int) -> frozenset[str]:
    """Return the arguments whose values a program cannot leave open, by tracing the method."""
    values = method.point(0) | ({"noise_multiplier": 1.0} if method.private else {})
    numbers = [
        name
        for name in values
        if all(
            isinstance(item, int | float) and not isinstance(item, bool)
            for item in method.points.get(name, [0.0])
        )
    ]

    def works(names: Sequence[str]) -> bool:
        fixed = {name: value for name, value in values.items() if name not in names}
        points = Points(
            functools.partial(method.build, **fixed),
            _floats({name: [values[name]] for name in names}),
        )
        with contextlib.suppress(
            Exception
        ):  # whatever it is: without the argument left open all was well
            jax.eval_shape(
                over_points(functools.partial(_traced, clients=clients, rounds=rounds), points)
            )
            return True
        return False

    open_names = numbers
    if numbers and not works(numbers):
        open_names = [name for name in numbers if works([name])]
        open_names = open_names if open_names and works(open_names) else []
    return frozenset(values.keys() - set(open_names))


def _traced(algorithm: Algorithm, clients: Clients, rounds: int) -> jax.Array:
    """Trace what a round does with an algorithm, except that its sums are added."""
    update = check_algorithm(algorithm, clients, rounds)
    memory = algorithm.mechanism.init(key_of(0), lambda: update, clients.number)
    algorithm.mechanism.draw(key_of(0), memory, jnp.int32(0), clients.number)
    return jnp.zeros(())


def _kind(clients: Clients) -> tuple:
    """Return what decides whether a model fits the clients."""
    inputs, labels = clients.inputs, np.asarray(clients.labels)
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
        ValueError: names a point of another headline, or one that sends something where others send nothing.
    """
    task = runs[0].algorithm.model.task
    for at in runs:
        for index, algorithm in enumerate(at.algorithms):
            own = algorithm.model.task
            if own.headline != task.headline:
                raise ValueError(
                    f"{_where(at.name, at.method.point(index))}: methods must be scored by the same metric, got "
                    f"{own.headline!r} and {task.headline!r}. Give models whose tasks have one first metric."
                )
            if algorithm.mechanism.communicates == at.silent:
                raise ValueError(
                    f"{_where(at.name, at.method.point(index))}: points must all send updates or all send none. Give a "
                    "candidate for each kind."
                )
    return task


@contextlib.contextmanager
def _naming(name: str, point: Mapping[str, Any]) -> Iterator[None]:
    """Name the method and the point in what the block raises, as a TypeError or a ValueError."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, TypeError | ValueError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{_where(name, point)}: {text}") from error


def _where(name: str, point: Mapping[str, Any]) -> str:
    return f"methods[{name!r}]" + (f" at {_points_text([point])}" if point else "")


def _points_text(points: Sequence[Mapping[str, Any]]) -> str:
    """Return points as text, at most three."""
    texts = [
        "(" + ", ".join(f"{name}={show(value)}" for name, value in point.items()) + ")"
        for point in points[:3]
    ]
    return ", ".join(texts) + (f" and {len(points) - 3} more points" if len(points) > 3 else "")


def _floats(columns: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
    return {name: np.asarray(column, np.float32) for name, column in columns.items()}


def _is_plain(value: Any) -> bool:
    """Whether JSON has such a value."""
    return value is None or isinstance(value, str | bool | int | float)


def _texts(column: Sequence[Any]) -> list[str]:
    """Return a text for each value, for folders and reports: equal for the same value, different for others.

    >>> _texts([4, 8, 4, "a/b", "a:b"])
    ['4', '8', '4', 'a-b', 'a-b 2']
    """
    texts: dict[Any, str] = {}
    for value in column:
        if _identity(value) in texts:
            continue
        given = value
        if not _is_plain(value):
            given = getattr(value, "name", getattr(value, "__name__", type(value).__name__))
        first = text = re.sub(r"[^\w.+-]+", "-", str(given))[:60]
        again = 2
        while text in texts.values():
            text = f"{first} {again}"
            again += 1
        texts[_identity(value)] = text
    return [texts[_identity(value)] for value in column]


def _identity(value: Any) -> Any:
    return (type(value), value) if _is_plain(value) else id(value)


def _levels(runs: _Runs, clients: int, epsilons: Sequence[float]) -> dict[float, float]:
    """The noise multiplier of each epsilon; no noise for a method that takes none."""
    if not runs.method.private:
        return {math.inf: 0.0}
    rounds, delta = runs.rounds, runs.algorithm.terms.delta
    exposed = [_exposed(algorithm.mechanism, clients, rounds) for algorithm in runs.algorithms]
    other_delta = any(algorithm.terms.delta != delta for algorithm in runs.algorithms)
    if other_delta or any(not np.array_equal(one, exposed[0]) for one in exposed):
        raise ValueError(
            f"methods[{runs.name!r}].points={show(runs.method.points)}: at one noise multiplier they have different "
            "epsilons; give a candidate for each value of what decides that, such as the sampling rate"
        )
    stateful = any(runs.states(clients, index) for index in range(runs.method.number))
    options = {"mechanism": runs.algorithm.mechanism, "stateful": stateful, "delta": delta}
    with _naming(runs.name, {}):
        return {
            epsilon: 0.0
            if math.isinf(epsilon)
            else calibrate(epsilon, clients=clients, rounds=rounds, **options)
            for epsilon in epsilons
        }


def _exposed(mechanism: Mechanism, clients: int, rounds: int) -> np.ndarray:
    """What an epsilon follows from: multipliers of the sums, by round and client, and the amplification."""
    view = mechanism.view(mechanism.planned(clients, rounds), "aggregate")
    return np.column_stack([view.multiplier, view.hidden * view.rate])


class _Choice(NamedTuple):
    """What tuning chose at an epsilon."""

    epsilon: float
    index: int | None
    """Of the point; None if no point may be chosen."""
    rounds: int
    row: Row
    missing: list[Row]


def _tuned(runs: _Runs, clients: Clients, seed: int, bar: SharedBar, public: bool) -> list[_Choice]:
    """The best point at each epsilon, with the scores of all; also the best round, where none costs privacy."""
    method, rounds, silent, levels = (
        runs.method,
        runs.rounds,
        runs.silent,
        runs.levels[clients.number],
    )
    task = runs.algorithm.model.task
    shown = [runs.shown(index) for index in range(method.number)]
    points = {argument: [point[argument] for point in shown] for argument in method.points}
    if not runs.tuned:
        facts = {"chosen": shown[0], "rounds": rounds, "points": points, "scores": {}}
        return [_Choice(epsilon, 0, rounds, {"epsilon": epsilon} | facts, []) for epsilon in levels]
    tried = [runs.point(index, z) for z in levels.values() for index in range(method.number)]
    found = runs.run(
        bar, tried, clients, seed, "tuning", rounds, math.ceil(rounds / 20) if silent else rounds
    )
    results = [result for result, _ in found]
    choices = [
        [] if one is None else one.metrics if silent else one.metrics[-1:] for one in results
    ]
    numbers = [int(row["round"]) for row in max(choices, key=len)] or [rounds]
    scores = np.full((len(choices), len(numbers)), np.nan)
    for own, rows in zip(scores, choices, strict=True):
        own[: len(rows)] = [row[task.headline] for row in rows]
    sign = -1 if task.metrics[task.headline].lower_is_better else 1
    chosen = []
    for level, (epsilon, own) in enumerate(zip(levels, np.split(scores, len(levels)), strict=True)):
        of_level = results[level * method.number : (level + 1) * method.number]
        dropped = np.array([0.0 if result is None else result.dropped for result in of_level])
        allowed = np.isfinite(own) & (dropped < 1)[:, None]
        best, at = np.unravel_index(np.argmax(np.where(allowed, sign * own, -np.inf)), own.shape)
        missing = [
            {"epsilon": epsilon, "seed": None, "chosen": shown[index], "reason": _NO_MEMORY}
            for index, result in enumerate(of_level)
            if result is None
        ]
        by_round = dict(zip(map(str, numbers), own.T.tolist(), strict=True))
        facts: Row = {
            "epsilon": epsilon,
            "chosen": shown[int(best)],
            "rounds": numbers[at],
            "points": points,
        }
        facts["scores"] = by_round
        if dropped.any() and not public:
            facts["dropped"] = dropped.tolist()
        if not allowed.any():
            reason = ALL_DROPPED if (dropped == 1).any() else _NO_MEMORY if missing else _NO_SCORE
            missing = [*missing, {"epsilon": epsilon, "seed": None, "chosen": {}, "reason": reason}]
            _LOG.warning(
                "methods[%r] at epsilon=%g has no point to choose: %s", runs.name, epsilon, reason
            )
            facts["chosen"] = {}
        index = int(best) if allowed.any() else None
        chosen.append(_Choice(epsilon, index, numbers[at], facts, missing))
    return chosen


def _share_dropped(result: Result, public: bool) -> Row:
    """Return the share of a run's updates that were dropped, if any; a public report has it only where it is all."""
    known = result.dropped == 1 if public else result.dropped > 0
    return {"dropped": result.dropped} if known else {}


def _stated(statement: Mapping[str, Any]) -> float | None:
    """Epsilon for the observer of sums: 0 of a method that sends nothing."""
    if not statement["communicates"]:
        return 0.0
    epsilon = float(statement["honest"]["aggregate"]["epsilon"])
    return epsilon if math.isfinite(epsilon) else None
