"""Six methods at one target epsilon: digits, several hundred clients, about a minute on two cores.

python -m experiments.quickstart
"""

import dataclasses
import pathlib
from typing import Literal

import optax

from experiments.common import claiming, cli, compile_quickly, run_methods, seeds_of, show
from jaxfl import LocalSGD
from jaxfl._validate import check_fraction, checked, probability
from jaxfl.algorithms import dp_fedavg, dp_fedavg_fb, fedavg, feddpa, fedprox, local_only
from jaxfl.algorithms.feddpa import paper_epsilon
from jaxfl.data import classes_per_client, load, make_clients
from jaxfl.models import digits_cnn, mlp
from jaxfl.privacy import Mechanism, Poisson, calibrate, format_statement
from jaxfl.types import Algorithm, Clients


@checked(delta=probability, rate=check_fraction, seeds=seeds_of)
@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; every method sees the same clients, cohorts and number of rounds."""

    epsilon: float = 8.0
    """Target of the private methods, for the whole run, at client level."""
    delta: float = 1e-5
    clients: int = 300
    classes: int = 3
    """Digits that each client has."""
    rate: float = 0.3
    """Probability that a client takes part in a round."""
    rounds: int = 40
    clip: float = 1.0
    seeds: tuple[int, ...] = (0,)
    scale: Literal["smoke", "cpu"] = "cpu"
    """smoke: a few rounds of a small network and fewer clients, in seconds."""
    out: pathlib.Path = pathlib.Path("runs/quickstart")


def main(config: Config) -> None:
    """Run the six methods and compare them."""
    if config.scale == "smoke":
        config = dataclasses.replace(config, clients=60, rounds=3)
        compile_quickly()
    model = mlp((8, 8, 1), 10, hidden=(32,)) if config.scale == "smoke" else digits_cnn()
    sampling = Poisson(config.rate)
    z = calibrate(config.epsilon, clients=config.clients, rounds=config.rounds, sampling=sampling, delta=config.delta)
    local = LocalSGD(optax.sgd(0.1, momentum=0.9), 4, 3)
    private = {"clip": config.clip, "noise_multiplier": z, "sampling": sampling, "delta": config.delta}
    plain = Mechanism(sampling=sampling, denominator="participants")

    def dpa(clients: Clients) -> Algorithm:
        examples = int(clients.train_size.sum())
        rule = {"examples": examples, "batch_size": 4, "epochs": 2, "rounds": config.rounds, "rate": config.rate}
        claim = paper_epsilon(z, delta=config.delta, **rule)
        method = feddpa(model, evaluate="adapt", local=LocalSGD(optax.adam(5e-3), 4, 2), **private)
        return claiming(method, claim, "by the paper's rule, per example and local step")

    methods = {
        "local_only": lambda _: local_only(model, local=local),
        "fedavg": lambda _: fedavg(model, mechanism=plain, local=local),
        "fedprox": lambda _: fedprox(model, mu=0.1, mechanism=plain, local=local),
        "dp_fedavg": lambda _: dp_fedavg(model, local=local, **private),
        "dp_fedavg_fb": lambda _: dp_fedavg_fb(model, head=LocalSGD(optax.sgd(0.1), epochs=15), local=local, **private),
        "feddpa": dpa,
    }
    rows = run_methods(
        methods,
        lambda seed: digits_clients(config.clients, config.classes, seed),
        rounds=config.rounds,
        seeds=config.seeds,
        out=config.out,
        config=dataclasses.asdict(config),
    )
    show(
        f"digits, {config.clients} clients of {config.classes} classes, target epsilon {config.epsilon:g}",
        rows,
        config.out,
    )
    print("\nThe statement of feddpa:\n" + format_statement(rows[-1].statement))


def digits_clients(clients: int, classes: int, seed: int) -> Clients:
    """Digits split by class; a client is tested on all test examples of its own classes."""
    digits = load("digits")
    train, test = classes_per_client(digits.train_labels, digits.test_labels, clients, classes, seed=seed, test="all")
    return make_clients(digits, train, test)


if __name__ == "__main__":
    main(cli(Config, __doc__))
