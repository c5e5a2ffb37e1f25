"""Methods beside each other at the same epsilons, each with the settings that suit it, over several seeds."""

import functools
import inspect
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from jaxfl._validate import (
    at_least_0,
    check_count,
    check_fraction,
    check_instance,
    check_seeds,
    checked,
    count_from_0,
    show,
)
from jaxfl.data.clients import hold_out
from jaxfl.privacy.accounting import calibrate
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.run.check import check_clients, check_values
from jaxfl.run.comparison import Comparison, Row
from jaxfl.run.page import write_report
from jaxfl.run.recorder import Result
from jaxfl.run.report import COMPARISON, Whole, shared_bar
from jaxfl.run.simulate import CHECKS, RunOptions, sweep
from jaxfl.tasks import classification
from jaxfl.types import Algorithm, Clients


class Candidate(NamedTuple):
    """A method as `compare` takes it.

    Args:
        build: keyword arguments to algorithm, as `jaxfl.sweep` has it. If it takes `noise_multiplier`, the method is
            run at every epsilon; otherwise, or if a partial has fixed it, once, as it is.
        points: columns of numbers to try, by argument of `build` (see `grid` and `spread`).
        rounds: its own number of rounds; None: the comparison's. A method that sends nothing stops at the round that
            is best on validation examples, so give it as many as it can use.
    """

    build: Callable[..., Algorithm]
    points: Mapping[str, Sequence[float]] = {}
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

    def point(self, index: int) -> dict[str, float]:
        """The arguments of a point."""
        return {argument: float(column[index]) for argument, column in self.points.items()}

    def at(self, index: int) -> Algorithm:
        """The algorithm of a point, with noise if it takes any."""
        return self.build(**self.point(index), **{"noise_multiplier": 1.0} if self.private else {})


def grid(**axes: Any) -> dict[str, list[float]]:
    """All combinations of some numbers, as columns.

    >>> grid(rate=[0.1, 0.3], clip=[1.0, 2.0])
    {'rate': [0.1, 0.1, 0.3, 0.3], 'clip': [1.0, 2.0, 1.0, 2.0]}
    """
    if empty := [name for name, axis in check_values("axes", axes).items() if not axis]:
        raise ValueError(f"{empty[0]}={axes[empty[0]]!r}: give one number at least")
    columns = np.meshgrid(*axes.values(), indexing="ij")
    return {name: column.ravel().tolist() for name, column in zip(axes, columns, strict=True)}


@checked()
def spread(number: int, **axes: Any) -> dict[str, list[float]]:
    """Points that fill a box of positive numbers evenly on a logarithmic scale (Halton's sequence), as columns.

    With them, methods of one, two and three arguments get the same number of points. They have six digits, as the last
    ones differ between processors, on which a folder could then not be gone on with.

    >>> spread(3, rate=(0.01, 1.0), clip=(0.1, 10.0))
    {'rate': [0.1, 0.0316228, 0.316228], 'clip': [0.464159, 2.15443, 0.16681]}
    """
    for name, ends in check_values("axes", axes).items():
        if len(ends) != 2 or not 0 < ends[0] < ends[1] < math.inf:
            raise ValueError(f"{name}={show(axes[name])}: give two numbers above 0, the smaller one first")
    if not axes:
        return {}
    low, high = np.log(list(axes.values())).T
    sequence = scipy.stats.qmc.Halton(len(axes), scramble=False).fast_forward(1)  # after the origin
    points = np.exp(low + sequence.random(number) * (high - low))
    return {name: [float(f"{value:.6g}") for value in column] for name, column in zip(axes, points.T, strict=True)}


def _check_methods(name: str, value: Any) -> dict[str, Candidate]:
    if not isinstance(value, Mapping) or not value:
        raise TypeError(
            f"{name}={show(value)}: give candidates by name, for instance {{'DP-FedAvg': Candidate(build)}}"
        )
    for method, candidate in value.items():
        if not isinstance(method, str) or not re.fullmatch(r"[^/\\\x00-\x1f]+", method) or method in (".", ".."):
            raise ValueError(f"{name}={show(value)}: give names that a folder can have, not {method!r}")
        check_instance(f"{name}[{method!r}]", candidate, (Candidate,))
        if candidate.rounds is not None:
            check_count(f"{name}[{method!r}].rounds", candidate.rounds)
        lengths = {len(column) for column in candidate.points.values()}
        if len(lengths) > 1 or 0 in lengths or "noise_multiplier" in candidate.points:
            columns = {argument: len(column) for argument, column in candidate.points.items()}
            raise ValueError(
                f"{name}[{method!r}].points={columns}: give columns of one length, without noise_multiplier"
            )
    return dict(value)


def _check_epsilons(name: str, value: Any) -> tuple[float, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value or len({*map(str, value)}) < len(value):
        raise TypeError(f"{name}={show(value)}: give different numbers above 0, for instance (1.0, 8.0, math.inf)")
    epsilons = tuple(math.inf if epsilon == math.inf else at_least_0(name, epsilon) for epsilon in value)
    if 0 in epsilons:
        raise ValueError(f"{name}={show(value)}: give numbers above 0; methods that send nothing have epsilon 0 anyway")
    return epsilons


def _check_population(name: str, value: Any) -> Callable[[int], Clients]:
    if callable(value):
        return value
    fixed = check_clients(name, value)
    return lambda seed: fixed


def _check_validation(name: str, value: Any) -> float | Callable[[int], Clients]:
    if callable(value) or isinstance(value, Clients):
        return _check_population(name, value)
    return check_fraction(name, value, one=False)


@checked(
    **CHECKS | {"clients": _check_population},
    methods=_check_methods,
    epsilons=_check_epsilons,
    seeds=check_seeds,
    validation=_check_validation,
    tuning_seed=count_from_0,
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
    folder: str | os.PathLike | None = None,
    **options: Unpack[RunOptions],
) -> Comparison:
    """Tune every method at every epsilon on validation examples, and run the best point over seeds.

    All methods go through the same protocol: (1) each point is trained once, with the tuning seed, and scored by the
    headline metric on examples held out of each client's training split, or on other ones (`validation`); (2) the best
    one is run with every seed, on all training examples, and the test examples are read once. Epsilon does not cover
    the tuning, as the protocol says.
    All points of a method and all epsilons go through one compiled program, where their clients' states fit in memory,
    and so does each seed. Noise is the least for its epsilon, by `jaxfl.privacy.calibrate`. A method that sends nothing
    is scored in twenty of its rounds, and stops at the best one.

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
        folder: every run has a folder in it and is resumed; `comparison.json` has the result, and `report.html` shows
            it (see `write_report`). Clients' states do not stay there. None writes nothing.
        options: of the runs, see `RunOptions`; `progress` shows one bar over all.

    Raises:
        ValueError: an argument does not fit; the tuning seed is among the seeds.
    """
    if tuning_seed in seeds:
        raise ValueError(f"tuning_seed={tuning_seed} is among seeds={show(seeds)}: give another one")
    root = None if folder is None else pathlib.Path(folder)
    assert callable(clients)
    if isinstance(validation, float):
        drawn, scored = clients(tuning_seed), f"{100 * validation:g}% of each client's training examples"
        held_out = hold_out(check_clients(f"clients({tuning_seed})", drawn), validation, seed=tuning_seed)
    else:
        assert callable(validation)
        held_out, scored = check_clients("validation", validation(tuning_seed)), "other clients' test examples"
    tested = {seed: check_clients(f"clients({seed})", clients(seed)) for seed in seeds}
    shared: dict[str, Any] = {**options, "progress": False}
    rows: list[Row] = []
    tuning: list[Row] = []
    runs = {name: _Runs(name, method, method.at(0), root, shared) for name, method in methods.items()}
    work = sum(
        at.work(held_out.number, [own.number for own in tested.values()], rounds, epsilons) for at in runs.values()
    )
    task = classification()
    with shared_bar("compare", work, options.get("progress", True) and jax.process_index() == 0) as bar:
        for name, at in runs.items():
            method, length, task = at.method, at.method.rounds or rounds, at.algorithm.model.task
            bar.say(f"{name}: calibrating")
            levels = _levels(at, held_out.number, length, epsilons)
            by_number = {held_out.number: levels}
            chosen = _tuned(at, held_out, length, levels, tuning_seed, bar)
            tuning += [{"method": name} | row for row in chosen]
            for seed, own in tested.items():
                columns = {argument: [row["chosen"][argument] for row in chosen] for argument in method.points}
                if own.number not in by_number:
                    by_number[own.number] = _levels(at, own.number, length, epsilons)
                columns |= _noise(method, by_number[own.number])
                bar.skip(at.trained(own.number, length - chosen[0]["rounds"], len(levels)))
                results = at.run(bar, columns, own, seed, f"seed={seed}", chosen[0]["rounds"])
                for row, result in zip(chosen, results, strict=True):
                    last = {key: value for key, value in result.metrics[-1].items() if key != "epsilon"}
                    facts = {"epsilon": row["epsilon"], "stated": _stated(result.statement), "seed": seed}
                    rows.append({"method": name} | facts | {"chosen": row["chosen"]} | last)
    points = " or ".join(map(str, sorted({method.number for method in methods.values()})))
    protocol = (
        f"{points} points of each method and epsilon, each tried once (seed {tuning_seed}) on {scored}; "
        f"the best over seeds {', '.join(map(str, seeds))}. No epsilon covers tuning."
    )
    comparison = Comparison(rows, tuning, task.headline, task.metrics[task.headline].lower_is_better, protocol)
    if root is not None and jax.process_index() == 0:
        comparison.save(root / COMPARISON)
        write_report(root)
    return comparison


_STATE_BYTES = 2**30
"""Of clients' states that one program holds."""


class _Runs(NamedTuple):
    """The runs of a method."""

    name: str
    method: Candidate
    algorithm: Algorithm
    """Its first point."""
    root: pathlib.Path | None
    options: dict[str, Any]

    @property
    def silent(self) -> bool:
        """Whether it sends nothing."""
        return not self.algorithm.mechanism.communicates

    @property
    def tuned(self) -> bool:
        """Whether there is anything to choose: a point, or a round where none costs privacy."""
        return self.method.number > 1 or self.silent

    def trained(self, clients: int, rounds: int, points: int) -> float:
        """How many clients some points train in all."""
        return float(self.algorithm.mechanism.sampling.expected(clients) * rounds * points)

    def work(self, held_out: int, tested: Sequence[int], rounds: int, epsilons: Sequence[float]) -> float:
        """How many clients tuning and the final runs train, from the clients of these."""
        levels, rounds = len(epsilons) if self.method.private else 1, self.method.rounds or rounds
        tuning = self.trained(held_out, rounds, levels * self.method.number) if self.tuned else 0.0
        return tuning + sum(self.trained(clients, rounds, levels) for clients in tested)

    def states(self, clients: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what clients keep; empty if they keep nothing."""
        _, states = jax.eval_shape(lambda key: self.algorithm.init(key, clients), jax.random.key(0))
        return jax.tree.leaves(states)

    def run(
        self,
        bar: Whole,
        columns: Mapping[str, Sequence[float]],
        clients: Clients,
        seed: int,
        name: str,
        rounds: int,
        every: int = 0,
    ) -> list[Result]:
        """One program for all columns, or for as many points as fit in memory; without models and clients' states."""
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in self.states(clients.number))
        count = len(next(iter(columns.values()), (0,)))
        groups = np.array_split(np.arange(count), math.ceil(count / max(1, _STATE_BYTES // max(1, size))))
        results: list[Result] = []
        for group in groups:
            part = name if len(groups) == 1 else f"{name}, points {group[0]} to {group[-1]}"
            with bar.part(f"{self.name}: {part}", self.trained(clients.number, rounds, len(group))):
                found = sweep(
                    jnp.broadcast_to(jax.random.key(seed), group.shape),
                    self.method.build,
                    {argument: [column[i] for i in group] for argument, column in columns.items()},
                    clients,
                    rounds=rounds,
                    folder=None if self.root is None else self.root / self.name / part,
                    keep_states=False,
                    **{"eval_every": every or rounds} | self.options,
                )
            results += [result._replace(server=()) for result in found]
        return results


def _levels(runs: _Runs, clients: int, rounds: int, epsilons: Sequence[float]) -> dict[float, float]:
    """The noise multiplier of each epsilon; no noise for a method that takes none."""
    if not runs.method.private:
        return {math.inf: 0.0}
    algorithm = runs.algorithm
    exposed = [_exposed(runs.method.at(p).mechanism, clients, rounds) for p in range(runs.method.number)]
    if any(not np.array_equal(one, exposed[0]) for one in exposed):
        raise ValueError(
            f"methods[{runs.name!r}].points={show(runs.method.points)}: at one noise multiplier they have different "
            "epsilons; give a candidate for each value of what decides that, such as the sampling rate"
        )
    options = {
        "mechanism": algorithm.mechanism,
        "stateful": bool(runs.states(clients)),
        "delta": algorithm.terms.delta,
    }
    return {
        epsilon: 0.0 if math.isinf(epsilon) else calibrate(epsilon, clients=clients, rounds=rounds, **options)
        for epsilon in epsilons
    }


def _exposed(mechanism: Mechanism, clients: int, rounds: int) -> np.ndarray:
    """What an epsilon follows from: multipliers of the sums, by round and client, and the amplification."""
    view = mechanism.view(mechanism.planned(clients, rounds), "aggregate")
    return np.column_stack([view.multiplier, view.hidden * view.rate])


def _noise(method: Candidate, levels: Mapping[float, float], times: int = 1) -> dict[str, list[float]]:
    """A column of noise multipliers, each several times; none for a method that takes none."""
    return {"noise_multiplier": [z for z in levels.values() for _ in range(times)]} if method.private else {}


def _tuned(
    runs: _Runs, clients: Clients, rounds: int, levels: Mapping[float, float], seed: int, bar: Whole
) -> list[Row]:
    """The best point at each epsilon, with the scores of all; also the best round, where none costs privacy."""
    method, task, silent = runs.method, runs.algorithm.model.task, runs.silent
    columns = {argument: list(column) * len(levels) for argument, column in method.points.items()}
    columns |= _noise(method, levels, method.number)
    points = {argument: list(column) for argument, column in method.points.items()}
    if not runs.tuned:
        return [
            {"epsilon": epsilon, "chosen": method.point(0), "rounds": rounds, "points": points, "scores": {}}
            for epsilon in levels
        ]
    results = runs.run(bar, columns, clients, seed, "tuning", rounds, math.ceil(rounds / 20) if silent else rounds)
    choices = [result.metrics if silent else result.metrics[-1:] for result in results]
    numbers = [int(row["round"]) for row in choices[0]]
    scores = np.array([[row[task.headline] for row in rows] for rows in choices], float)
    sign, found = -1 if task.metrics[task.headline].lower_is_better else 1, []
    for epsilon, own in zip(levels, np.split(scores, len(levels)), strict=True):
        best, at = np.unravel_index(np.argmax(np.nan_to_num(sign * own, nan=-np.inf)), own.shape)
        by_round = dict(zip(map(str, numbers), own.T.tolist(), strict=True))
        facts = {"epsilon": epsilon, "chosen": method.point(int(best)), "rounds": numbers[at]}
        found.append(facts | {"points": points, "scores": by_round})
    return found


def _stated(statement: Mapping[str, Any]) -> float | None:
    """Epsilon for the observer of sums: 0 of a method that sends nothing."""
    if not statement["communicates"]:
        return 0.0
    epsilon = float(statement["honest"]["aggregate"]["epsilon"])
    return epsilon if math.isfinite(epsilon) else None
