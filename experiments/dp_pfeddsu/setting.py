"""What the tables of DP-pFedDSU share: the paper's setting, its scales, the methods, and how a table is run."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import optax

from experiments.common import (
    HEADER,
    Row,
    Scale,
    cells,
    cli,
    model_for,
    percent,
    round_seconds,
    run_methods,
    run_sweep,
    seeds_of,
    show,
)
from jaxfl import LocalSGD
from jaxfl._validate import check_counts, checked
from jaxfl.algorithms import (
    centaur,
    dp_fedavg_fb,
    dp_pfeddsu,
    dp_pfeddsu_paper,
    local_only,
    pmtl_ft,
    ppsgd_centaur,
)
from jaxfl.data import Dataset, classes_per_client, load, make_clients
from jaxfl.privacy import Full, Poisson, calibrate
from jaxfl.types import Algorithm, Clients, Model

Data = Literal["cifar10", "cifar100", "emnist", "fashion_mnist", "mnist", "digits"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """The paper's setting for CIFAR-10; what it leaves open (batch, momentum, decay, delta, q = 1) is CENTAUR's."""

    model: str = "resnet20"
    clients: int = 20
    rate: float = 1.0
    """Share of the clients in a round (Poisson), or 1: all."""
    rounds: int = 100
    examples: int | None = None
    """Training examples per client, at most (None: all that it has)."""
    batch_size: int = 100
    epochs: int = 5
    """Passes for the extractor; for DP-FedAvg-fb, for the whole network."""
    head_epochs: int = 15
    local_epochs: int = 5
    """Passes of local-only in each round; they cost no privacy, so that there may be more."""
    learning_rate: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float = 0.01
    density: float = 0.05
    sparse_layers: int = 4
    layer_sweep: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    penalty_weight: float = 0.2
    mean_weight: float = 2.0
    """Of PMTL-FT's penalty: lambda = 1 in CENTAUR's experiments, where it is not halved."""
    delta: float = 1e-5


PAPER: dict[Data, Setting] = {
    "cifar10": Setting(),
    "cifar100": Setting(clients=100),
    "emnist": Setting(rounds=50),
    "fashion_mnist": Setting(rounds=50),
    "mnist": Setting(rounds=50),
    "digits": Setting(),
}
# Four layers with a kernel before the head: the two sparse ones hold most of the weights, as ResNet's four do.
_LENET: dict[str, Any] = {"model": "lenet_groupnorm", "sparse_layers": 2, "layer_sweep": (1, 2, 3, 4), "epochs": 1}
CHANGES: dict[Scale, dict[str, Any]] = {
    "smoke": _LENET | {"clients": 10, "rounds": 2, "head_epochs": 1, "local_epochs": 1, "layer_sweep": (1, 2)},
    "cpu": _LENET | {"rounds": 30, "examples": 250, "batch_size": 25, "local_epochs": 2},
    "paper": {},
    # Updates of norm 0.01 could not move the extractor, noise or not; the ratio to the noise stays.
    "large": _LENET
    | {"clients": 1000, "rate": 0.1, "rounds": 50, "examples": 50, "batch_size": 10, "clip": 0.5, "local_epochs": 5},
}


@checked(classes=check_counts, seeds=seeds_of)
@dataclasses.dataclass(frozen=True)
class Config:
    """Which data, how much of it, how often."""

    dataset: Data = "cifar10"
    classes: tuple[int, ...] = ()
    """Classes per client, a table for each (default: the paper's)."""
    scale: Scale = "cpu"
    """smoke: seconds, on digits; cpu: LeNet with GroupNorm, 30 rounds, 250 examples per client; paper: as published;
    large: 1,000 clients of 50 examples, a tenth of them per round."""
    seeds: tuple[int, ...] = (0, 1, 2)
    out: pathlib.Path = pathlib.Path("runs/dp_pfeddsu")


class Entry(NamedTuple):
    """A row of a table: a method, its target epsilon (None: no noise), and options that differ from the setting's.

    Where numbers are swept, a row for each of their values, all in one compiled program.
    """

    method: str
    epsilon: float | None = 1.0
    options: Mapping[str, Any] = {}
    swept: Mapping[str, Sequence[float]] = {}

    @property
    def name(self) -> str:
        """Names the run folder as well: the same row of two tables is run once."""
        target = {} if self.epsilon is None else {"ε": self.epsilon}
        return ", ".join([self.method, *(f"{k} = {v:g}" for k, v in {**self.options, **target}.items())])

    @property
    def points(self) -> int:
        """Number of rows."""
        return len(next(iter(self.swept.values()))) if self.swept else 1

    def first(self) -> dict[str, float]:
        """The swept values of the first row."""
        return {name: values[0] for name, values in self.swept.items()}


class Shown(NamedTuple):
    """One table that was printed."""

    folder: pathlib.Path
    title: str
    rows: list[Row]


LOCAL = Entry("local-only", None)
SOUND = ("DP-FedAvg-fb", "PPSGD", "PMTL-FT", "CENTAUR", "DP-pFedDSU")
METHODS = (*SOUND, "DP-pFedDSU as printed")
"""All that add noise."""


def builder(entry: Entry, model: Model, setting: Setting) -> Callable[..., Algorithm]:
    """The method of a row, its noise calibrated to its epsilon over all rounds; takes what is swept."""
    sampling = Full() if setting.rate == 1 else Poisson(setting.rate)
    z = 0.0
    if entry.epsilon is not None:
        numbers = {"clients": setting.clients, "rounds": setting.rounds, "delta": setting.delta}
        z = calibrate(entry.epsilon, sampling=sampling, accountant="rdp", **numbers)
    sgd = optax.sgd(setting.learning_rate, momentum=setting.momentum)
    decayed = optax.chain(optax.add_decayed_weights(setting.weight_decay), sgd)
    private = {"clip": setting.clip, "noise_multiplier": z, "sampling": sampling, "delta": setting.delta}
    local = LocalSGD(decayed, setting.batch_size, setting.epochs)
    added = LocalSGD(optax.sgd(0.1, momentum=0.9), setting.batch_size)
    tuned = {"local": local, "head": LocalSGD(sgd, setting.batch_size, setting.head_epochs)} | private
    sparse = {"density": setting.density, "sparse_layers": setting.sparse_layers}
    sparse |= {"penalty_weight": setting.penalty_weight} | tuned
    alone = {"local": dataclasses.replace(local, epochs=setting.local_epochs), "sampling": sampling}
    methods: dict[str, tuple[Callable[..., Algorithm], dict[str, Any]]] = {
        "local-only": (local_only, alone),
        "DP-FedAvg-fb": (dp_fedavg_fb, tuned),
        "PPSGD": (ppsgd_centaur, tuned | {"head": added, "evaluation_epochs": setting.head_epochs}),
        "PMTL-FT": (pmtl_ft, {"penalty_weight": setting.mean_weight} | tuned),
        "CENTAUR": (centaur, tuned),
        "DP-pFedDSU": (dp_pfeddsu, sparse),
        "DP-pFedDSU as printed": (dp_pfeddsu_paper, {"clients": setting.clients, "claim": entry.epsilon} | sparse),
    }
    build, options = methods[entry.method]
    return partial(build, model, **options | dict(entry.options))


def split(data: Dataset, setting: Setting, classes: int, seed: int) -> Clients:
    """Clients of some classes each, tested on disjoint examples of the same classes."""
    train, test = classes_per_client(data.train_labels, data.test_labels, setting.clients, classes, seed=seed)
    if setting.examples is not None:
        rng = np.random.default_rng(seed)
        train = [np.sort(rng.permutation(rows)[: setting.examples]) for rows in train]
    return make_clients(data, train, test)


def run(
    table: str,
    description: str | None,
    classes: Mapping[Data, tuple[int, ...]],
    entries: Callable[[Setting], Sequence[Entry]],
    *,
    scale: Scale = "cpu",
) -> list[Shown]:
    """Read the command line, run all rows for each number of classes, and print and write the tables.

    Args:
        table: folder of the tables; runs are kept beside all tables' folders and shared by them.
        description: help of the command.
        classes: the paper's numbers of classes per client by dataset; others take those of CIFAR-10.
        entries: the rows.
        scale: what the command takes by default.
    """
    config = cli(Config, description, default=Config(scale=scale))
    name: Data = "digits" if config.scale == "smoke" else config.dataset
    setting = dataclasses.replace(PAPER[name], **CHANGES[config.scale])
    seeds, counts = config.seeds, config.classes or classes.get(name, classes["cifar10"])
    if config.scale == "smoke":
        seeds, counts = seeds[:1], counts[:1]
    data = load(name)
    model = model_for(setting.model, data)
    rows = entries(setting)
    builders = {entry.name: builder(entry, model, setting) for entry in rows}
    if config.scale in ("paper", "large"):
        clients = split(data, setting, counts[0], seeds[0])
        by_method = {entry.method: entry for entry in rows}
        seconds = {method: round_seconds(builders[e.name](**e.first()), clients) for method, e in by_method.items()}
        total = sum(seconds[entry.method] * entry.points for entry in rows)
        hours = total * setting.rounds * len(counts) * len(seeds) / 3600
        each = ", ".join(f"{method} {value:.1f}" for method, value in seconds.items())
        print(f"about {hours:.1f} hours in all, and evaluations; seconds per round: {each}", flush=True)
    shown = []
    for count in counts:
        common: dict[str, Any] = {
            "make": functools.cache(partial(split, data, setting, count)),
            "rounds": setting.rounds,
            "seeds": seeds,
            "out": config.out / "runs",
            "config": dataclasses.asdict(setting) | {"dataset": data.name, "classes": count},
        }
        results = []
        for entry in rows:
            build = builders[entry.name]
            if entry.swept:
                results += run_sweep(entry.name, build, entry.swept, **common)
            else:
                results += run_methods({entry.name: lambda _, build=build: build()}, **common)
        title = f"{data.name}, {config.scale}: {setting.clients} clients of {count} classes, {setting.rounds} rounds"
        shown.append(Shown(config.out / table / config.scale / data.name / f"s={count}", title, results))
        show(title, results, shown[-1].folder)
    _summarize(shown)
    return shown


def _summarize(shown: Sequence[Shown]) -> None:
    """Methods by classes per client, as the paper prints them: mean accuracy and, in brackets, the worst 10%."""
    names = ["method", *(table.folder.name.replace("=", " = ") for table in shown), HEADER[4]]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for rows in zip(*(table.rows for table in shown), strict=True):
        scores = (f"{percent(row.mean)} ({percent(row.worst10)})" for row in rows)
        lines.append("| " + " | ".join([rows[0].method, *scores, cells(rows[0])[4]]) + " |")
    text = "\n".join(lines) + "\n"
    print(f"accuracy % (worst 10 % of clients)\n\n{text}")
    (shown[0].folder.parent / "summary.md").write_text(text)
