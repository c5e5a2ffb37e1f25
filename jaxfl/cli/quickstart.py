"""Six methods on handwritten digits, three of them private at one target epsilon.

The quickstart takes one to two minutes on two cores.
"""

import dataclasses
import pathlib
from typing import Literal

import jax
import optax
import tyro
from rich.console import Console
from rich.table import Table

from jaxfl import algorithms
from jaxfl._support.backend import compile_quickly
from jaxfl._support.checks import (
    check_count,
    check_delta,
    check_fraction,
    checked,
)
from jaxfl.algorithms.feddpa import paper_epsilon
from jaxfl.cli import settings
from jaxfl.data import classes_per_client, load, make_clients
from jaxfl.local import LocalSGD
from jaxfl.models import digits_cnn, mlp
from jaxfl.privacy import Mechanism, Poisson, calibrate, format_statement
from jaxfl.run.folder import run_folder
from jaxfl.run.recorder import Result
from jaxfl.run.simulate import simulate
from jaxfl.types import Algorithm, Clients, Model


@checked(delta=check_delta, rate=check_fraction, seed=settings.check_seed)
@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the quickstart.

    Every method has the same clients and number of rounds. All methods that send updates have the
    same cohorts.
    """

    epsilon: float = 8.0
    """Target of the private methods for all rounds together, at client level."""
    delta: float = 1e-5
    """Failure probability of the target."""
    clients: int = 300
    """Number of clients, N."""
    classes: int = 3
    """Number of different digits of each client."""
    rate: float = 0.3
    """Probability that a client takes part in a round."""
    rounds: int = 40
    """Number of rounds, T."""
    clip: float = 1.0
    """L2 bound on a client's update."""
    seed: int = 0
    """Seed of the data's partition and of the runs."""
    scale: Literal["smoke", "full"] = "full"
    """smoke: a few rounds of a small network and fewer clients, for half a minute on one core."""
    out: pathlib.Path = pathlib.Path("runs/quickstart")
    """Folder of all runs. The same command resumes a run that was stopped."""


def main(config: tyro.conf.OmitArgPrefixes[Config] = Config()) -> None:
    """Run six methods on handwritten digits, and show the accuracy and epsilon of each."""
    if config.scale == "smoke":
        config = dataclasses.replace(config, clients=60, rounds=3)
        # The flags have no effect after JAX has started, so they are set before there is a model.
        compile_quickly()
        model = mlp((8, 8, 1), 10, hidden=(32,))
    else:
        model = digits_cnn()
    clients = digits_clients(config.clients, config.classes, config.seed)
    rows = []
    for algorithm in methods(config, model, int(clients.train_size.sum())):
        folder = run_folder(config.out, algorithm.name, config, config.seed)
        result = simulate(config.seed, algorithm, clients, rounds=config.rounds, folder=folder)
        rows.append((algorithm.name, result))
    # On several hosts, one process prints for all.
    if jax.process_index() == 0:
        data = f"digits, {config.clients} clients of {config.classes} classes"
        print_methods(rows, f"{data}, target epsilon {config.epsilon:g}")
        last_name, last_result = rows[-1]
        statement = format_statement(last_result.statement)
        print(f"\nThe statement of {last_name}:\n{statement}\n\nfolders: {config.out}")


def methods(config: Config, model: Model, examples: int) -> list[Algorithm]:
    """Return three methods without noise, and three private ones with the same noise.

    Args:
        config: The settings.
        model: The network.
        examples: Number of training examples of all clients, for the claim of FedDPA's paper.
    """
    # The private methods have the same sampler and rounds, so one multiplier serves all of them.
    sampling = Poisson(config.rate)
    z = calibrate(
        config.epsilon,
        clients=config.clients,
        rounds=config.rounds,
        sampling=sampling,
        delta=config.delta,
    )
    local = LocalSGD(optax.sgd(0.1, momentum=0.9), batch_size=4, epochs=3)
    head = LocalSGD(optax.sgd(0.1), epochs=15)
    private = {
        "clip": config.clip,
        "noise_multiplier": z,
        "sampling": sampling,
        "delta": config.delta,
    }
    # Methods without noise hide no cohort, so they may divide by their actual participants.
    plain = Mechanism(sampling=sampling, denominator="participants")
    adam = LocalSGD(optax.adam(5e-3), batch_size=4, epochs=2)
    feddpa = algorithms.feddpa(model, evaluate="adapt", local=adam, **private)
    claim = _paper_claim(config, z, examples)
    return [
        algorithms.local_only(model, local=local),
        algorithms.fedavg(model, mechanism=plain, local=local),
        algorithms.fedprox(model, mu=0.1, mechanism=plain, local=local),
        algorithms.dp_fedavg(model, local=local, **private),
        algorithms.dp_fedavg_fb(model, head=head, local=local, **private),
        feddpa._replace(terms=feddpa.terms._replace(claim=claim)),
    ]


def _paper_claim(config: Config, noise_multiplier: float, examples: int) -> tuple[float, str]:
    """Return the epsilon that FedDPA's paper would state for this noise, and the rule behind it."""
    # The paper counts single examples, so its epsilon is shown as a claim only.
    claimed = paper_epsilon(
        noise_multiplier,
        delta=config.delta,
        examples=examples,
        batch_size=4,
        epochs=2,
        rounds=config.rounds,
        rate=config.rate,
    )
    return claimed, "by the paper's rule, per example and local step"


def print_methods(rows: list[tuple[str, Result]], title: str) -> None:
    """Print a table of methods with their accuracy and epsilons."""
    table = Table(
        "method", "accuracy", "worst 10%", "ε of sums", "ε of uploads", "claimed", title=title
    )
    for name, result in rows:
        last = result.metrics[-1]
        honest = result.statement["honest"]
        claim = result.statement["claim"]
        scores = [f"{100 * last[metric]:.1f}%" for metric in ("accuracy", "accuracy_worst10")]
        bounds = [honest[observer]["epsilon"] for observer in ("aggregate", "upload")]
        # A statement holds JSON values, and JSON has no infinity.
        shown = ["∞" if bound == "inf" else f"{bound:.3g}" for bound in bounds]
        claimed = "–"
        if claim:
            claimed = f"{claim['epsilon']:.3g}"
        table.add_row(name, *scores, *shown, claimed)
    Console().print(table)


def digits_clients(clients: int, classes: int, seed: int) -> Clients:
    """Return clients with handwritten digits of a few classes each.

    A client is tested on all test examples of its own classes.

    Args:
        clients: Number of clients.
        classes: Number of different digits of each client.
        seed: Seed of the partition.
    """
    digits = load("digits")
    check_count("classes", classes, most=digits.classes)
    train, test = classes_per_client(
        digits.train_labels, digits.test_labels, clients, classes, seed=seed, test="all"
    )
    return make_clients(digits, train, test)
