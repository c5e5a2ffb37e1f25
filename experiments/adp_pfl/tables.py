"""Tables of ADP-PFL: methods at several epsilons, run, tested as the global model and as local ones, and shown."""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.adp_pfl.setting import (
    HONEST,
    Reading,
    Setting,
    baseline,
    budgets_of,
    builder,
    least_noise,
    released,
    run_config,
    split,
    start,
    tested_locally,
)
from experiments.common import (
    Row,
    model_for,
    number,
    percent,
    round_seconds,
    row_of,
    run_each,
    show,
    sweep_each,
    sweep_folder,
)
from jaxfl import Result
from jaxfl.data import Dataset
from jaxfl.engine import processes
from jaxfl.engine.evaluate import compile_evaluation, summarize
from jaxfl.engine.mesh import place
from jaxfl.engine.program import Points
from jaxfl.files import write_json
from jaxfl.run.report import run_folder
from jaxfl.tasks import classification
from jaxfl.types import Algorithm, Clients, Model


class Entry(NamedTuple):
    """A method at several epsilons: one line of a plot, and one compiled program where its noise can be swept."""

    method: str
    reading: Reading | None = None
    """Where its noise comes from; None: there is none."""
    epsilons: tuple[float, ...] = (0.0,)
    percentiles: tuple[float, ...] = ()
    """Of the mask; empty: the setting's."""

    @property
    def points(self) -> list[tuple[float, float]]:
        """Epsilons and percentiles of the rows; a percentile that is not asked for is nan."""
        return list(itertools.product(self.epsilons, self.percentiles or (math.nan,)))

    def names(self) -> list[str]:
        """Of the rows."""
        if self.reading is None:
            return [self.method]
        rows = ({"ε": epsilon, "percentile": percentile} for epsilon, percentile in self.points)
        return [", ".join([self.method, *(f"{k} = {v:g}" for k, v in row.items() if v == v)]) for row in rows]


class Line(NamedTuple):
    """The rows of an entry."""

    entry: Entry
    rows: list[Row]


LOCAL, PLAIN = Entry("local-only"), Entry("FedAvg, no noise")
RELEASED = "ADP-PFL, released risks"


def run(
    name: str,
    description: str | None,
    entries: Callable[[Setting], Sequence[Entry]],
    populations: Callable[[Setting], Sequence[int]] = lambda setting: [setting.clients],
) -> None:
    """Read the command line, run all entries for each number of clients, and print and write tables and plots.

    Args:
        name: folder of the tables; runs are kept beside all tables' folders and shared by them.
        description: help of the command.
        entries: the methods.
        populations: numbers of clients.
    """
    config, setting, data, seeds = start(description)
    model = model_for(setting.model, data)
    settings = [dataclasses.replace(setting, clients=clients) for clients in populations(setting)]
    if config.scale != "smoke":
        seconds = sum(_seconds(entries(scaled), model, scaled, data, seeds) for scaled in settings)
        print(f"about {seconds / 3600:.1f} hours in all, the test of local models included", flush=True)
    for scaled in settings:
        common: dict[str, Any] = {
            "make": functools.cache(partial(split, data, scaled)),
            "rounds": scaled.rounds,
            "eval_every": math.ceil(scaled.rounds / scaled.evaluations),
            "seeds": seeds,
            "out": config.out / "runs",
            "config": run_config(scaled, data),
        }
        lines = [Line(entry, _rows(entry, model, scaled, common)) for entry in entries(scaled)]
        title = f"{data.name}, {config.scale}: {scaled.clients} clients, {scaled.rounds} rounds"
        folder = config.out / name / config.scale / data.name / f"N={scaled.clients}"
        report(title, lines, folder)


def local_accuracy(
    folder: pathlib.Path, tested: Algorithm | Points, clients: Clients, seed: int, results: Sequence[Result]
) -> list[float]:
    """Mean accuracy over clients of what a run, or each point of a sweep, left behind; kept in its folder."""
    path = folder / "local.json"
    known = json.loads(path.read_text()) if path.exists() else []
    if processes.largest(not known)[0]:  # all processes test, or none
        key = jax.random.fold_in(jax.random.key(seed), 3)  # a run takes 0 to 2
        left = [(key, result.server, result.states) for result in results]
        arguments = left[0] if isinstance(tested, Algorithm) else jax.tree.map(lambda *leaves: jnp.stack(leaves), *left)
        scores = compile_evaluation(tested, place(clients))(*arguments)
        metrics, sizes = classification().metrics, np.asarray(clients.test_size)
        rows = {name: np.atleast_2d(values) for name, values in scores.items()}
        of_each = ({name: values[p] for name, values in rows.items()} for p in range(len(results)))
        known = [summarize(score, sizes, metrics)["accuracy"] for score in of_each]
        if jax.process_index() == 0:
            write_json(path, known)
    return known


def report(title: str, lines: Sequence[Line], folder: pathlib.Path) -> None:
    """A table with curves for each reading, a summary of all by epsilon or percentile, and a plot of it."""
    readings = list(dict.fromkeys(line.entry.reading for line in lines if line.entry.reading is not None))
    for reading in readings:
        rows = [row for line in lines if line.entry.reading in (None, reading) for row in line.rows]
        show(f"{title}; {reading}", rows, folder / reading.replace(", ", "_").replace(" ", "_"))
    text = "\n".join(_summary(reading, lines) for reading in readings)
    text = f"{title}: accuracy % of local models (of the global one) [honest ε: aggregate RDP, upload]\n\n{text}"
    if jax.process_index() == 0:
        print(text)
        (folder / "summary.md").write_text(text)
        _plot(folder / "accuracy.png", title, readings, lines)


def _rows(entry: Entry, model: Model, setting: Setting, common: dict[str, Any]) -> list[Row]:
    """Run an entry, and test its local models at the end."""
    make, out, config, seeds = (common[name] for name in ("make", "out", "config", "seeds"))
    if entry.reading is None or entry.method == RELEASED:
        rows = []
        for name, method in _single(entry, model, setting).items():
            (results,) = run_each({name: lambda _, method=method: method}, **common).values()
            tested = tested_locally(method, setting)
            local = [
                local_accuracy(run_folder(out, name, config, seed), tested, make(seed), seed, [result])[0]
                for seed, result in zip(seeds, results, strict=True)
            ]
            rows.append(row_of(name, results)._replace(local=local))
        return rows
    build, values = builder(entry.method, entry.reading, model, setting), swept(entry, setting)
    # Figures give one method several names: its runs are kept under one.
    plain = entry.method == "Fisher" or (entry.method, entry.reading) == ("ADP-PFL", HONEST)
    kept = f"{'round-level' if plain else entry.method}, {entry.reading}"
    results = sweep_each(kept, build, values, **common)
    columns = {name: np.asarray(column, np.float32) for name, column in values.items()}
    tested = Points(lambda **point: tested_locally(build(**point), setting), columns)
    folders = [sweep_folder(out, kept, values, config, seed) for seed in seeds]
    local = [
        local_accuracy(folder, tested, make(seed), seed, of_seed)
        for folder, seed, of_seed in zip(folders, seeds, zip(*results, strict=True), strict=True)
    ]
    rows = [row_of(name, of_point) for name, of_point in zip(entry.names(), results, strict=True)]
    return [row._replace(local=list(of_point)) for row, of_point in zip(rows, zip(*local, strict=True), strict=True)]


def _single(entry: Entry, model: Model, setting: Setting) -> dict[str, Algorithm]:
    """Algorithms that are no points of a sweep, by name."""
    if entry.reading is None:
        return {entry.method: baseline(entry.method, model, setting)}
    return {
        name: released(epsilon, model, setting) for name, epsilon in zip(entry.names(), entry.epsilons, strict=True)
    }


def swept(entry: Entry, setting: Setting) -> dict[str, list[float]]:
    """Columns of numbers, a row for each point."""
    budgets = budgets_of(entry.method, setting)
    scales = {epsilon: least_noise(entry.reading or HONEST, epsilon, budgets, setting) for epsilon in entry.epsilons}
    values = {"epsilon": [e for e, _ in entry.points], "scale": [scales[e] for e, _ in entry.points]}
    return values | ({"percentile": [p for _, p in entry.points]} if entry.percentiles else {})


def _seconds(entries: Sequence[Entry], model: Model, setting: Setting, data: Dataset, seeds: Sequence[int]) -> float:
    """How long all will take: testing local models is a training of all clients."""
    clients, total = split(data, setting, seeds[0]), 0.0
    rounds = setting.rounds + 1 / setting.rate
    known: dict[str, float] = {}
    for entry in entries:
        # Of ADP-PFL the printed form alone measures risks; else the noise changes little.
        kind = f"{entry.method}, {entry.reading}" if entry.method == "ADP-PFL" else entry.method
        if kind not in known:
            known[kind] = round_seconds(_first(entry, model, setting), clients)
        total += known[kind] * rounds * len(entry.points) * len(seeds)
    each = ", ".join(f"{kind} {value:.1f}" for kind, value in known.items())
    print(f"{setting.clients} clients, seconds per round: {each}", flush=True)
    return total


def _first(entry: Entry, model: Model, setting: Setting) -> Algorithm:
    """The algorithm of an entry's first row."""
    if entry.reading is None:
        return baseline(entry.method, model, setting)
    if entry.method == RELEASED:
        return released(entry.epsilons[0], model, setting)
    values = {name: column[0] for name, column in swept(entry, setting).items()}
    return builder(entry.method, entry.reading, model, setting)(**values)


def _summary(reading: Reading, lines: Sequence[Line]) -> str:
    """Accuracies of a reading: a line per method, a column per epsilon, or per percentile."""
    shown = [line for line in lines if line.entry.reading == reading]
    columns = list(dict.fromkeys(_position(point) for line in shown for point in line.entry.points))
    symbol = "percentile" if any(line.entry.percentiles for line in shown) else "ε"
    text = [f"| {reading} | " + " | ".join(f"{symbol} = {column:g}" for column in columns) + " |"]
    text.append("|" + "---|" * (len(columns) + 1))
    for line in shown:
        places = {_position(point): _cell(row) for point, row in zip(line.entry.points, line.rows, strict=True)}
        text.append(f"| {line.entry.method} | " + " | ".join(places.get(c, "") for c in columns) + " |")
    for line in lines:
        if line.entry.reading is None:
            cell = _cell(line.rows[0])
            text.append(f"| {line.entry.method} | " + " | ".join([cell] * len(columns)) + " |")
    return "\n".join(text) + "\n"


def _position(point: tuple[float, float]) -> float:
    """Where a row lies: at its percentile, where one is asked for, else at its epsilon."""
    epsilon, percentile = point
    return epsilon if math.isnan(percentile) else percentile


def _cell(row: Row) -> str:
    honest = row.statement["honest"]
    epsilons = ", ".join(number(honest[who]["rdp"]["total"]) for who in ("aggregate", "upload"))
    return f"{percent(row.local)} ({percent(row.mean)}) [{epsilons}]"


def _plot(path: pathlib.Path, title: str, readings: Sequence[Reading], lines: Sequence[Line]) -> None:
    """Accuracy at the end by epsilon or percentile, of local models above, of the global one below.

    A column per reading; mean over seeds, bars: least to largest.
    """
    figure = Figure(figsize=(1 + 4.5 * len(readings), 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(readings), sharex="col", sharey=True, squeeze=False)
    swept_over = any(line.entry.percentiles for line in lines)
    for (row, tested), (column, reading) in itertools.product(enumerate(("local", "global")), enumerate(readings)):
        axes = panels[row, column]
        for line in lines:
            scores = np.array([row.local if tested == "local" else row.mean for row in line.rows])
            mean = scores.mean(axis=1)
            if line.entry.reading is None:
                style = "--" if line.entry == LOCAL else ":"
                axes.axhline(mean[0], color="gray", linestyle=style, label=line.entry.method)
            elif line.entry.reading == reading:
                bars = np.abs(np.stack([scores.min(axis=1), scores.max(axis=1)]) - mean)
                places = [_position(point) for point in line.entry.points]
                axes.errorbar(places, mean, bars, marker="o", capsize=2, label=line.entry.method)
        axes.set(title=f"{reading}: {tested} model", ylim=(-0.02, 1.02))
        axes.legend(fontsize="small")
        panels[1, column].set(xlabel="percentile" if swept_over else "ε" if reading == HONEST else "claimed ε")
    for axes in panels[:, 0]:
        axes.set(ylabel="mean accuracy over clients")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")
