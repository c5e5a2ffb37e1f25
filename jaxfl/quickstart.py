"""Six methods at one target epsilon: digits, several hundred clients, about a minute on two cores."""

import dataclasses
import pathlib
from typing import Literal

import jax
import optax
import tyro
from rich.console import Console
from rich.table import Table

from jaxfl import algorithms
from jaxfl._validate import check_fraction, checked, count_from_0, probability
from jaxfl.algorithms.feddpa import paper_epsilon
from jaxfl.backend import compile_quickly
from jaxfl.data import classes_per_client, load, make_clients
from jaxfl.local import LocalSGD
from jaxfl.models import digits_cnn, mlp
from jaxfl.privacy import Mechanism, Poisson, calibrate, format_statement
from jaxfl.run.recorder import Result
from jaxfl.run.report import run_folder
from jaxfl.run.simulate import simulate
from jaxfl.types import Algorithm, Clients, Model


@checked(delta=probability, rate=check_fraction, seed=count_from_0)
@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; every method sees the same clients, cohorts and number of rounds."""

    epsilon: float = 8.0
    """Target of the private methods, for the whole run, at client level."""
    delta: float = 1e-5
    """Failure probability of the target."""
    clients: int = 300
    """Number of clients, N."""
    classes: int = 3
    """Digits that each client has."""
    rate: float = 0.3
    """Probability that a client takes part in a round."""
    rounds: int = 40
    """Number of rounds, T."""
    clip: float = 1.0
    """L2 bound on a client's update."""
    seed: int = 0
    """Seed of the data's partition and of the runs."""
    scale: Literal["smoke", "full"] = "full"
    """smoke: a few rounds of a small network and fewer clients, half a minute on one core."""
    out: pathlib.Path = pathlib.Path("runs/quickstart")
    """Folder of all runs; the same command resumes a run that was stopped."""


def main(config: tyro.conf.OmitArgPrefixes[Config] = Config()) -> None:
    """Run six methods on handwritten digits, and show what each reaches at which epsilon."""
    if config.scale == "smoke":
        config = dataclasses.replace(config, clients=60, rounds=3)
        compile_quickly()
    model = mlp((8, 8, 1), 10, hidden=(32,)) if config.scale == "smoke" else digits_cnn()
    clients = digits_clients(config.clients, config.classes, config.seed)
    rows = []
    for algorithm in methods(config, model, int(clients.train_size.sum())):
        folder = run_folder(config.out, algorithm.name, config, config.seed)
        result = simulate(config.seed, algorithm, clients, rounds=config.rounds, folder=folder)
        rows.append((algorithm.name, result))
    if jax.process_index() == 0:
        show(
            rows,
            f"digits, {config.clients} clients of {config.classes} classes, target epsilon {config.epsilon:g}",
        )
        print(
            f"\nThe statement of {rows[-1][0]}:\n{format_statement(rows[-1][1].statement)}\n\nfolders: {config.out}"
        )


def methods(config: Config, model: Model, examples: int) -> list[Algorithm]:
    """Three without privacy, and three with the same noise."""
    sampling = Poisson(config.rate)
    z = calibrate(
        config.epsilon,
        clients=config.clients,
        rounds=config.rounds,
        sampling=sampling,
        delta=config.delta,
    )
    local, head = LocalSGD(optax.sgd(0.1, momentum=0.9), 4, 3), LocalSGD(optax.sgd(0.1), epochs=15)
    private = {
        "clip": config.clip,
        "noise_multiplier": z,
        "sampling": sampling,
        "delta": config.delta,
    }
    plain = Mechanism(sampling=sampling, denominator="participants")
    rule = {
        "examples": examples,
        "batch_size": 4,
        "epochs": 2,
        "rounds": config.rounds,
        "rate": config.rate,
    }
    claim = (
        paper_epsilon(z, delta=config.delta, **rule),
        "by the paper's rule, per example and local step",
    )
    feddpa = algorithms.feddpa(
        model, evaluate="adapt", local=LocalSGD(optax.adam(5e-3), 4, 2), **private
    )
    return [
        algorithms.local_only(model, local=local),
        algorithms.fedavg(model, mechanism=plain, local=local),
        algorithms.fedprox(model, mu=0.1, mechanism=plain, local=local),
        algorithms.dp_fedavg(model, local=local, **private),
        algorithms.dp_fedavg_fb(model, head=head, local=local, **private),
        feddpa._replace(terms=feddpa.terms._replace(claim=claim)),
    ]


def show(rows: list[tuple[str, Result]], title: str) -> None:
    """A table of methods."""
    table = Table(
        "method", "accuracy", "worst 10%", "ε of sums", "ε of uploads", "claimed", title=title
    )
    for name, result in rows:
        last, honest, claim = (
            result.metrics[-1],
            result.statement["honest"],
            result.statement["claim"],
        )
        scores = [f"{100 * last[metric]:.1f}%" for metric in ("accuracy", "accuracy_worst10")]
        bounds = [honest[observer]["epsilon"] for observer in ("aggregate", "upload")]
        shown = ["∞" if bound == "inf" else f"{bound:.3g}" for bound in bounds]
        table.add_row(name, *scores, *shown, f"{claim['epsilon']:.3g}" if claim else "–")
    Console().print(table)


def digits_clients(clients: int, classes: int, seed: int) -> Clients:
    """Digits split by class; a client is tested on all test examples of its own classes."""
    digits = load("digits")
    train, test = classes_per_client(
        digits.train_labels, digits.test_labels, clients, classes, seed=seed, test="all"
    )
    return make_clients(digits, train, test)
