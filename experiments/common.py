"""What experiments share: methods x seeds, tables, and plots of several methods."""

import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxfl import Result, simulate, sweep
from jaxfl._validate import check_counts
from jaxfl.cli import command_line
from jaxfl.data import Dataset, dirichlet, make_clients, matching
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.models import build, digits_cnn
from jaxfl.privacy import Full
from jaxfl.run import plots
from jaxfl.run.report import run_folder
from jaxfl.types import Algorithm, Clients, Model

Scale = Literal["smoke", "cpu", "paper", "large"]
Method = Callable[[Clients], Algorithm]
cli = command_line


def seeds_of(name: str, value: Any) -> tuple[int, ...]:
    """Check of a configuration's seeds."""
    seeds = check_counts(name, value, least=0, empty=False)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{name}={value!r}: give at least one seed, and each of them once")
    return seeds


def at_an_end(value: float, tried: Sequence[float]) -> bool:
    """Whether a wider grid might have had a better value; of two values, each is at an end."""
    return len(set(tried)) > 2 and value in (min(tried), max(tried))


def starred(chosen: Mapping[str, float], points: Mapping[str, Sequence[float]]) -> str:
    """A chosen point, with a star for each number at an end of its grid."""
    return ", ".join(f"{name} {value:.3g}{'*' * at_an_end(value, points[name])}" for name, value in chosen.items())


class Choice(NamedTuple):
    """What a method's points gave on validation examples, and the best of them."""

    points: Mapping[str, Sequence[float]]
    validation: list[float]
    """The score of each point at the best round."""
    chosen: dict[str, float]
    rounds: int
    result: Result
    """Of the best point."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a study's result keeps of it."""
        return {"points": dict(self.points), "validation": self.validation, "chosen": self.chosen}


def accuracies(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """A score of every evaluated round."""
    return [row["accuracy"] for row in rows]


def choose(
    points: Mapping[str, Sequence[float]],
    results: Sequence[Result],
    score: Callable[[Sequence[Mapping[str, float]]], Sequence[float]] = accuracies,
) -> Choice:
    """The best point of a sweep and its best round.

    Args:
        points: columns of numbers.
        results: of each point, on validation examples.
        score: rows of metrics to a number for each of the last of them; with several, the best one is the last round.
    """
    scores = np.array([score(result.metrics) for result in results], float)
    best, at = divmod(int(np.argmax(np.nan_to_num(scores, nan=-1.0))), scores.shape[1])
    chosen = {name: column[best] for name, column in points.items()}
    rounds = results[best].metrics[at - scores.shape[1]]["round"]
    return Choice(points, scores[:, at].tolist(), chosen, int(rounds), results[best])


def split_clients(
    data: Dataset, rows: Sequence[np.ndarray], test: Sequence[np.ndarray], examples: int, *, held_out: bool
) -> Clients:
    """Clients that train on the first `examples` of their rows, tested on the rest of those or on test examples."""
    if held_out:
        data = data._replace(test_inputs=data.train_inputs, test_labels=data.train_labels)
        test = [own[examples:] for own in rows]
    return make_clients(data, [own[:examples] for own in rows], test)


def versions(*packages: str) -> dict[str, str]:
    """Of what a result depends on."""
    return {name: importlib.metadata.version(name) for name in packages}


class Row(NamedTuple):
    """One method of a table: accuracies over seeds, and its privacy statement (the same for all seeds)."""

    method: str
    mean: list[float]
    worst10: list[float]
    best: list[float]
    statement: dict[str, Any]
    metrics: list[list[dict[str, float | int]]]
    local: Sequence[float] = ()
    """Mean accuracy of local models at the end, where they are tested too."""


def compile_quickly() -> None:
    """Let programs of this process be compiled in a third of the time, and run slowly: for smoke scales, on a CPU.

    Call it before JAX starts.
    """
    quick = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}"


def model_for(name: str, dataset: Dataset) -> Model:
    """The named model for a dataset; digits are too small for any but their own."""
    if dataset.name == "digits":
        return digits_cnn()
    return build(name, dataset.train_inputs.shape[1:], dataset.classes)


def dirichlet_clients(
    dataset: Dataset, clients: int, alpha: float, *, seed: int, minimum: int, examples: int | None = None
) -> Clients:
    """Dirichlet clients over a random part of the training examples (None: all), with matching test splits."""
    if examples is not None and examples < len(dataset.train_labels):
        rows = np.random.default_rng(seed).permutation(len(dataset.train_labels))[:examples]
        dataset = dataset._replace(train_inputs=dataset.train_inputs[rows], train_labels=dataset.train_labels[rows])
    lists = dirichlet(dataset.train_labels, clients, alpha, seed=seed, minimum=minimum)
    return make_clients(dataset, lists, matching(lists, dataset.train_labels, dataset.test_labels, seed=seed))


def claiming(method: Algorithm, epsilon: float, rule: str) -> Algorithm:
    """The method, whose statement also has the epsilon that some rule would state for its noise."""
    return method._replace(terms=method.terms._replace(claim=(epsilon, rule)))


def run_methods(methods: Mapping[str, Method], make: Callable[[int], Clients], **options: Any) -> list[Row]:
    """A row of every method, of `run_each`'s results."""
    return [row_of(name, results) for name, results in run_each(methods, make, **options).items()]


def run_each(
    methods: Mapping[str, Method],
    make: Callable[[int], Clients],
    *,
    rounds: int,
    seeds: Sequence[int],
    out: pathlib.Path,
    config: Mapping[str, Any],
    eval_every: int | None = None,
    **options: Any,
) -> dict[str, list[Result]]:
    """Run every method on the same clients for every seed; each run has a folder of its own and resumes.

    Args:
        methods: by the name that tables show.
        make: clients of a seed.
        rounds: T.
        seeds: one run of each method per seed; the seed also draws the partition.
        out: root of the run folders.
        config: the resolved settings, written beside the results.
        eval_every: as in `simulate`, like all that follow.
        options: more of them.
    """
    clients, results = {seed: make(seed) for seed in seeds}, {}
    for name, builder in methods.items():
        results[name] = []
        for seed in seeds:
            algorithm = builder(clients[seed])._replace(name=name)
            folder = run_folder(out, name, config, seed)
            key = jax.random.key(seed)
            told = {"rounds": rounds, "eval_every": eval_every, "folder": folder, **options}
            results[name].append(simulate(key, algorithm, clients[seed], **told))
    return results


def run_sweep(
    method: str,
    build: Callable[..., Algorithm],
    values: Mapping[str, Sequence[float]],
    make: Callable[[int], Clients],
    **options: Any,
) -> list[Row]:
    """A row of each value, of `sweep_each`'s results."""
    results = sweep_each(method, build, values, make, **options)
    names = [", ".join([method, *(f"{name} = {value:g}" for name, value in point.items())]) for point in points(values)]
    return [row_of(name, of_point) for name, of_point in zip(names, results, strict=True)]


def sweep_each(
    method: str,
    build: Callable[..., Algorithm],
    values: Mapping[str, Sequence[float]],
    make: Callable[[int], Clients],
    *,
    rounds: int,
    seeds: Sequence[int],
    out: pathlib.Path,
    config: Mapping[str, Any],
    eval_every: int | None = None,
) -> list[list[Result]]:
    """Run a method with several values of its numbers on the same clients for every seed: by value, over seeds.

    Args:
        method: names the run folders.
        build: keyword arguments to algorithm.
        values: columns of numbers by argument.
        make: as in `run_each`, like all that follow.
        rounds: T.
        seeds: one sweep per seed.
        out: root of the run folders.
        config: the resolved settings.
        eval_every: as in `simulate`.
    """
    results = [
        sweep(
            jax.random.key(seed),
            build,
            values,
            make(seed),
            rounds=rounds,
            eval_every=eval_every,
            paired_noise=True,  # less noisy differences between points; nothing here is private
            folder=sweep_folder(out, method, values, config, seed),
        )
        for seed in seeds
    ]
    return [list(of_point) for of_point in zip(*results, strict=True)]


def sweep_folder(
    out: pathlib.Path, method: str, values: Mapping[str, Sequence[float]], config: Mapping[str, Any], seed: int
) -> pathlib.Path:
    """Where the sweep of a seed is kept."""
    return run_folder(out, f"{method} by {', '.join(values)}", {**config, "values": dict(values)}, seed)


def points(values: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """The values of each point of a sweep, by argument."""
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def row_of(method: str, results: Sequence[Result]) -> Row:
    """A method's results over seeds, as a row."""
    final = [result.metrics[-1] for result in results]
    return Row(
        method=method,
        mean=[row["accuracy"] for row in final],
        worst10=[row["accuracy_worst10"] for row in final],
        best=[max(row["accuracy"] for row in result.metrics) for result in results],
        statement=results[0].statement,
        metrics=[result.metrics for result in results],
    )


def round_seconds(algorithm: Algorithm, clients: Clients) -> float:
    """A round's seconds, by a round of a client per device with a part of its examples, the second of two.

    Its time is proportional to them; the first round compiles.
    """
    number, examples = min(jax.device_count(), clients.number), min(200, clients.train.shape[1])
    sizes = np.minimum(clients.train_size[:number], examples)
    part = clients._replace(
        train=clients.train[:number, :examples],
        train_size=sizes,
        test=clients.test[:number],
        test_size=clients.test_size[:number],
    )
    expected = algorithm.mechanism.sampling.expected(clients.number) * np.mean(clients.train_size)
    algorithm = algorithm._replace(mechanism=dataclasses.replace(algorithm.mechanism, sampling=Full()))
    key, population, seconds = jax.random.key(0), place(part, None), 0.0
    center, states = initialize(key, key, algorithm, population)
    step = compile_rounds(algorithm, population, chunk=1, segment=1)
    for _ in range(2):
        start = time.monotonic()
        center, states, _ = jax.block_until_ready(step(key, 0, 1, center, states))
        seconds = time.monotonic() - start
    return seconds * float(expected / sizes.sum())


HEADER = ("method", "accuracy %", "worst 10 %", "best round %", "ε aggregate RDP / PLD", "ε upload", "ε claimed")


def cells(row: Row) -> tuple[str, ...]:
    """A row of a table: percentages as mean ± standard deviation over seeds, then epsilons."""
    honest, claim = row.statement["honest"], row.statement["claim"]
    aggregate, upload = honest["aggregate"], honest["upload"]
    return (
        row.method,
        percent(row.mean),
        percent(row.worst10),
        percent(row.best),
        f"{number(aggregate['rdp']['total'])} / {number(aggregate['pld']['total'])}",
        number(upload["rdp"]["total"]),
        "–" if claim is None else number(claim["epsilon"]),
    )


def _example(row: Row) -> str:
    """Epsilons of a single example, where local steps protect it."""
    bounds = row.statement["examples"]
    return f"{number(bounds['rdp']['total'])} / {number(bounds['pld']['total'])}" if bounds else "–"


def percent(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds, in percent; a dash where there was nothing to test."""
    if np.isnan(values).any():
        return "–"
    text = f"{100 * np.mean(values):.1f}"
    return text if len(values) == 1 else f"{text} ± {100 * np.std(values, ddof=1):.1f}"


def number(value: float | str) -> str:
    """An epsilon; infinity says that none is finite."""
    return "∞" if value == "inf" or (isinstance(value, float) and math.isinf(value)) else f"{value:.3g}"


def show(title: str, rows: Sequence[Row], out: pathlib.Path) -> None:
    """Print a table, and write it as Markdown and JSON, with one plot of all methods, into `out`; process 0 does."""
    if jax.process_index() != 0:
        return
    header, body = HEADER, [cells(row) for row in rows]
    if any(row.statement["examples"] for row in rows):
        header, body = (*header, "ε example"), [(*line, _example(row)) for line, row in zip(body, rows)]
    if any(row.local for row in rows):
        header, body = (*header, "local models %"), [(*line, percent(row.local)) for line, row in zip(body, rows)]
    table = Table(*header, title=title)
    for line in body:
        table.add_row(*line)
    Console(width=150).print(table)
    lines = ["| " + " | ".join(line) + " |" for line in (header, *body)]
    lines.insert(1, "|" + "---|" * len(header))
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(f"{title}\n\n" + "\n".join(lines) + "\n")
    (out / "table.json").write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    plot(out / "curves.png", title, rows)
    print(f"table and curves: {out}")


def plot_metric(path: pathlib.Path, title: str, rows: Sequence[Row], metric: str, label: str) -> None:
    """One metric by round, mean over seeds, band: least to largest; process 0 draws it."""
    if jax.process_index() != 0:
        return
    with plots.style():
        figure = plots.new_figure(plots.DOUBLE, 3.2)
        axes = figure.subplots()
        for index, row in enumerate(rows):
            _curve(axes, row, metric, index)
        axes.set(title=title, ylabel=label)
        plots.legend_beside(axes)
    plots.save(figure, path)
    print(f"{label}: {path}")


def plot(path: pathlib.Path, title: str, rows: Sequence[Row]) -> None:
    """Accuracy by round (mean over seeds, band: least to largest), and worst 10% against mean at the end."""
    with plots.style():
        figure = plots.new_figure(1.4 * plots.DOUBLE, 3.4)
        scatter, curves = figure.subplots(1, 2, width_ratios=(2, 3))
        for index, row in enumerate(rows):
            _curve(curves, row, "accuracy", index)
            scatter.plot(row.mean, row.worst10, **plots.series(index) | {"linestyle": ""})
        curves.set_ylabel("mean accuracy over clients")
        scatter.set(title=title, xlabel="mean accuracy over clients", ylabel="worst 10% of clients")
        plots.legend_beside(curves)
    plots.save(figure, path)


def _curve(axes: Any, row: Row, metric: str, index: int) -> None:
    values = np.array([[entry[metric] for entry in metrics] for metrics in row.metrics], float)
    plots.by_round(axes, [entry["round"] for entry in row.metrics[0]], values, row.method, index)
