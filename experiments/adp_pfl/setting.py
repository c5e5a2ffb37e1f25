"""What the table and figures of ADP-PFL share: the paper's setting, its scales, the methods, and how they are run."""

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import optax
import tyro
from jax import Array
from jaxtyping import Float, Key
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.common import Row, model_for, number, percent, round_seconds, run_methods, run_sweep, show
from jaxfl.algorithms import adp_pfl, dp_lg, fedavg, local_only
from jaxfl.data import Dataset, label_share, load, make_clients
from jaxfl.local.train import train
from jaxfl.privacy import (
    FixedSize,
    Full,
    Mechanism,
    Poisson,
    calibrate,
    client_noise,
    fixed_budgets,
    paper_noise,
    round_budgets,
)
from jaxfl.types import Algorithm, ClientData, Clients, Model, Params, Tree

Scale = Literal["smoke", "cpu", "paper"]
Data = Literal["mnist", "fashion_mnist", "cifar10", "svhn_cropped", "digits"]
Reading = Literal["honest", "printed, summed", "printed, per round"]
HONEST: Reading = "honest"
"""Noise that costs epsilon over all rounds, for the observer of sums."""
SUMMED: Reading = "printed, summed"
"""The paper's noise for budgets of the rounds that add up to epsilon."""
PER_ROUND: Reading = "printed, per round"
"""The paper's noise for budgets of which the largest is epsilon: rounds are taken for parallel (theorem 2)."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """The paper's; what it leaves open (batch, clip, delta, beta) is ours."""

    model: str = "lenet"
    clients: int = 100
    large: int = 2000
    """Clients of the larger population, with the same examples in all."""
    share: float = 0.2
    """Of the labels, per client."""
    rate: float = 0.1
    """Of the clients, in a round."""
    rounds: int = 100
    evaluations: int = 5
    examples: int | None = None
    """Training examples per client, at most (None: all that it has)."""
    batch_size: int = 64
    epochs: int = 5
    learning_rate: float = 0.01
    momentum: float = 0.5
    clip: float = 1.0
    percentile: float = 80.0
    percentiles: tuple[float, ...] = (0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0)
    beta: float = 1.0
    risk_bounds: tuple[float, float] = (1.0, 4.0)
    """Of released risks; a guess after a look at four clients of MNIST without noise (0.8 to 6), not accounted for."""
    release_share: float = 0.1
    """Of the cost, for released risks."""
    delta: float = 1e-5
    tested: Literal["local", "global"] = "local"
    """The paper reports "the average accuracy of the local model": the global one after a client's own passes."""

    @property
    def cohort(self) -> int:
        """Participants in a round."""
        return max(1, round(self.rate * self.clients))


CHANGES: dict[Scale, dict[str, Any]] = {
    "smoke": {"clients": 10, "large": 20, "rate": 0.3, "rounds": 4, "evaluations": 2, "epochs": 1, "batch_size": 16}
    | {"percentiles": (0.0, 80.0)},
    "cpu": {"rounds": 40, "examples": 200, "batch_size": 32},
    "paper": {},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Which data, how much of it, how often."""

    dataset: Data = "mnist"
    scale: Scale = "cpu"
    """smoke: seconds, on digits; cpu: 40 rounds, at most 200 examples per client; paper: as published."""
    seeds: tuple[int, ...] = (0, 1, 2)
    tested: Literal["local", "global"] = "local"
    """Which model is tested on the clients' data: the global one after a client's own passes, or as it is."""
    out: pathlib.Path = pathlib.Path("runs/adp_pfl")


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
BUDGETS = ("fixed", "round-level")
"""ADP-PFL with budgets by round alone."""
RELEASED = "ADP-PFL, released risks"
_OPTIONS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "round-level": {},
    "ADP-PFL": {},
    "DP-FedAvg": {"mask": None},
    "Fisher": {"mask": "fisher"},
    "top-k": {"mask": "top_k"},
    "random": {"mask": "random"},
}
_FIXED = ("fixed", "DP-FedAvg", "DP-LG")
"""Methods that give all rounds the same budget."""


def start(description: str | None) -> tuple[Config, Setting, Dataset, tuple[int, ...]]:
    """Read the command line: what is asked for, the setting, its data, and the seeds."""
    config = tyro.cli(Config, description=description)
    setting = dataclasses.replace(Setting(tested=config.tested), **CHANGES[config.scale])
    smoke = config.scale == "smoke"
    return config, setting, load("digits" if smoke else config.dataset), config.seeds[:1] if smoke else config.seeds


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
        seconds = sum(_seconds(entries(one), model, one, data, seeds) for one in settings)
        print(f"about {seconds / 3600:.1f} hours in all, evaluations of local models included", flush=True)
    for one in settings:
        common: dict[str, Any] = {
            "make": functools.cache(partial(split, data, one)),
            "rounds": one.rounds,
            "eval_every": math.ceil(one.rounds / one.evaluations),
            "seeds": seeds,
            "out": config.out / "runs",
            "config": run_config(one, data),
        }
        lines = [Line(entry, _rows(entry, model, one, common)) for entry in entries(one)]
        title = f"{data.name}, {config.scale}: {one.clients} clients, {one.rounds} rounds, {one.tested} models"
        folder = config.out / name / config.scale / data.name / f"N={one.clients}, {one.tested}"
        report(title, lines, folder)


def run_config(setting: Setting, data: Dataset) -> dict[str, Any]:
    """What decides a run; not what only other commands read."""
    values = dataclasses.asdict(setting) | {"dataset": data.name}
    return {key: value for key, value in values.items() if key not in ("large", "percentiles")}


def split(data: Dataset, setting: Setting, seed: int) -> Clients:
    """Clients with a share of the labels each, tested on disjoint examples of the same labels."""
    labels = {"labels": data.train_labels, "test_labels": data.test_labels}
    train_lists, test = label_share(clients=setting.clients, share=setting.share, seed=seed, **labels)
    if setting.examples is not None:
        rng = np.random.default_rng(seed)
        train_lists = [np.sort(rng.permutation(rows)[: setting.examples]) for rows in train_lists]
    return make_clients(data, train_lists, test)


def local_options(setting: Setting) -> dict[str, Any]:
    """A client's passes over its examples."""
    sgd = optax.sgd(setting.learning_rate, momentum=setting.momentum)
    return {"optimizer": sgd, "batch_size": setting.batch_size, "epochs": setting.epochs}


def private_options(setting: Setting) -> dict[str, Any]:
    """What all variants of ADP-PFL share."""
    return {"clip": setting.clip, "percentile": setting.percentile, "delta": setting.delta} | local_options(setting)


def budgets_of(method: str, setting: Setting) -> Float[np.ndarray, "T"]:
    """Budgets of the rounds that add up to 1."""
    if method in _FIXED:
        return fixed_budgets(1.0, setting.rounds)
    return round_budgets(1.0, setting.rounds, beta=setting.beta)


def least_noise(reading: Reading, epsilon: float, budgets: Float[np.ndarray, "T"], setting: Setting) -> float:
    """Std over the clip bound in the round of the largest budget: on the sum (honest), or of each client (printed)."""
    if reading == HONEST:
        numbers = {"clients": setting.clients, "rounds": setting.rounds, "delta": setting.delta}
        sampling = Full() if setting.rate == 1 else Poisson(setting.rate)
        return calibrate(epsilon, sampling=sampling, shape=budgets.max() / budgets, **numbers)
    scaled = epsilon * budgets / (1.0 if reading == SUMMED else budgets.max())
    return float(paper_noise(scaled, delta=setting.delta).min())


def builder(method: str, reading: Reading | None, model: Model, setting: Setting) -> Callable[..., Algorithm]:
    """Keyword arguments `epsilon` (claimed or kept), `scale` (see `least_noise`) and `percentile` to algorithm."""
    budgets = budgets_of(method, setting)
    shape, printed = budgets.max() / budgets, reading != HONEST
    # Sound noise is amplified by Poisson sampling; that of clients is counted in sums of a known number of them.
    sampling = Full() if setting.rate == 1 else FixedSize(setting.cohort) if printed else Poisson(setting.rate)

    def build(epsilon: float, scale: Any = 0.0, **values: Any) -> Algorithm:
        claim = epsilon if printed and isinstance(epsilon, float) else None  # of no use to a compiled program
        if method == "DP-LG":
            private: dict[str, Any] = {"clip": setting.clip, "delta": setting.delta} | local_options(setting)
            algorithm = dp_lg(model, noise_multiplier=scale, sampling=sampling, **private)
            if printed:
                stated = None if claim is None else (claim, "as in ADP-PFL")
                added = {"noise_multiplier": 0.0, "client_noise": scale, "claim": stated}
                algorithm = algorithm._replace(mechanism=dataclasses.replace(algorithm.mechanism, **added))
            return algorithm
        options: dict[str, Any] = private_options(setting) | _OPTIONS[method] | values
        if printed:
            risks = "private" if method == "ADP-PFL" else None
            options |= {"fidelity": "paper", "risks": risks, "claim": claim}
        return adp_pfl(model, sampling=sampling, noise=scale * shape, **options)

    return lambda **values: test_as_asked(build(**values), model, setting)


def released(epsilon: float, model: Model, setting: Setting) -> Algorithm:
    """ADP-PFL whose clients release their risks with noise, and are stopped before they have spent epsilon."""
    plan = client_noise(
        budgets_of("ADP-PFL", setting),
        epsilon,
        participation=setting.rate,
        release_share=setting.release_share,
        delta=setting.delta,
    )
    sampling = Full() if setting.rate == 1 else FixedSize(setting.cohort)
    private: dict[str, Any] = {"risks": "private", "risk_bounds": setting.risk_bounds} | private_options(setting)
    return test_as_asked(adp_pfl(model, sampling=sampling, noise=plan, **private), model, setting)


def baseline(method: str, model: Model, setting: Setting) -> Algorithm:
    """A method without noise."""
    if method == LOCAL.method:
        return local_only(model, sampling=FixedSize(setting.cohort), **local_options(setting))
    mechanism = Mechanism(sampling=FixedSize(setting.cohort), denominator="participants", delta=setting.delta)
    return test_as_asked(fedavg(model, mechanism=mechanism, **local_options(setting)), model, setting)


def test_as_asked(method: Algorithm, model: Model, setting: Setting) -> Algorithm:
    """The method, tested after further passes of each client over its own examples, which nobody sees."""
    if setting.tested == "global":
        return method

    def personalize(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> Params:
        params = method.personalize(key, server, client, data)
        network = {"apply": model.apply, "prepare": model.prepare, "microbatch": model.microbatch}
        return train(key, params, data, **network, **local_options(setting))[0]

    return method._replace(personalize=personalize)


def report(title: str, lines: Sequence[Line], folder: pathlib.Path) -> None:
    """A table with curves for each reading, a summary of all by epsilon or percentile, and a plot of it."""
    readings = list(dict.fromkeys(line.entry.reading for line in lines if line.entry.reading is not None))
    for reading in readings:
        rows = [row for line in lines if line.entry.reading in (None, reading) for row in line.rows]
        show(f"{title}; {reading}", rows, folder / reading.replace(", ", "_").replace(" ", "_"))
    text = "\n".join(_summary(reading, lines) for reading in readings)
    print(f"{title}: accuracy % [honest ε: aggregate RDP, upload]\n\n{text}")
    (folder / "summary.md").write_text(f"{title}: accuracy % [honest ε: aggregate RDP, upload]\n\n{text}")
    _plot(folder / "accuracy.png", title, readings, lines)


def _rows(entry: Entry, model: Model, setting: Setting, common: dict[str, Any]) -> list[Row]:
    """Run an entry."""
    if entry.reading is None:
        algorithm = baseline(entry.method, model, setting)
        return run_methods({entry.method: lambda _: algorithm}, **common)
    if entry.method == RELEASED:
        made = {f"{entry.method}, ε = {epsilon:g}": released(epsilon, model, setting) for epsilon in entry.epsilons}
        return run_methods({name: lambda _, one=one: one for name, one in made.items()}, **common)
    build = builder(entry.method, entry.reading, model, setting)
    # Figures give one method several names: its runs are kept under one.
    plain = entry.method == "Fisher" or (entry.method, entry.reading) == ("ADP-PFL", HONEST)
    kept = "round-level" if plain else entry.method
    rows = run_sweep(f"{kept}, {entry.reading}", build, swept(entry, setting), **common)
    return [row._replace(method=name) for name, row in zip(entry.names(), rows, strict=True)]


def swept(entry: Entry, setting: Setting) -> dict[str, list[float]]:
    """Columns of numbers, a row for each point."""
    budgets = budgets_of(entry.method, setting)
    scales = {epsilon: least_noise(entry.reading or HONEST, epsilon, budgets, setting) for epsilon in entry.epsilons}
    values = {"epsilon": [e for e, _ in entry.points], "scale": [scales[e] for e, _ in entry.points]}
    return values | ({"percentile": [p for _, p in entry.points]} if entry.percentiles else {})


def _seconds(entries: Sequence[Entry], model: Model, setting: Setting, data: Dataset, seeds: Sequence[int]) -> float:
    """How long all will take: every evaluation of local models is a training of all clients."""
    clients, total = split(data, setting, seeds[0]), 0.0
    rounds = setting.rounds + (setting.evaluations / setting.rate if setting.tested == "local" else 0)
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
    own = [line for line in lines if line.entry.reading == reading]
    columns = list(dict.fromkeys(_position(point) for line in own for point in line.entry.points))
    symbol = "percentile" if any(line.entry.percentiles for line in own) else "ε"
    text = [f"| {reading} | " + " | ".join(f"{symbol} = {column:g}" for column in columns) + " |"]
    text.append("|" + "---|" * (len(columns) + 1))
    for line in own:
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
    return f"{percent(row.mean)} [{', '.join(number(honest[who]['rdp']['total']) for who in ('aggregate', 'upload'))}]"


def _plot(path: pathlib.Path, title: str, readings: Sequence[Reading], lines: Sequence[Line]) -> None:
    """Accuracy at the end by epsilon or percentile, a panel per reading; mean over seeds, bars: least to largest."""
    figure = Figure(figsize=(1 + 4.5 * len(readings), 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(readings), sharey=True, squeeze=False)[0]
    for axes, reading in zip(panels, readings, strict=True):
        for line in lines:
            scores = np.array([row.mean for row in line.rows])
            mean = scores.mean(axis=1)
            if line.entry.reading is None:
                style = "--" if line.entry == LOCAL else ":"
                axes.axhline(mean[0], color="gray", linestyle=style, label=line.entry.method)
            elif line.entry.reading == reading:
                bars = np.abs(np.stack([scores.min(axis=1), scores.max(axis=1)]) - mean)
                places = [_position(point) for point in line.entry.points]
                axes.errorbar(places, mean, bars, marker="o", capsize=2, label=line.entry.method)
        swept_over = any(line.entry.percentiles for line in lines)
        claimed = "ε" if reading == HONEST else "claimed ε"
        axes.set(title=reading, xlabel="percentile" if swept_over else claimed, ylim=(-0.02, 1.02))
        axes.legend(fontsize="small")
    panels[0].set(ylabel="mean accuracy over clients")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")
