"""pfl-research's CIFAR-10 benchmark, with 1,000 clients, cohorts of 50, and one shared model.

python -m experiments.pfl_cifar10 iid
python -m experiments.pfl_cifar10 dirichlet
"""

import functools
import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.common import number, percent
from experiments.pfl_cifar10.network import Pfl
from experiments.study import (
    Options,
    Result,
    Study,
    command,
    draw_curves,
    markdown_table,
    part,
    source,
)
from jaxfl import LocalSGD, simulate
from jaxfl.algorithms import fedavg
from jaxfl.data import Dataset, dirichlet_by_client, iid, load, make_clients
from jaxfl.models import from_flax
from jaxfl.privacy import Extrapolated, FixedSize, Mechanism, Poisson, calibrate
from jaxfl.run.folder import run_folder
from jaxfl.types import Algorithm, Clients, Model, Terms

Partition = Literal["iid", "dirichlet"]


class Setting(NamedTuple):
    """Settings of the benchmark, except for the rounds.

    The benchmark has twice as many rounds with noise and with heterogeneous clients.
    """

    clients: int = 1000
    examples: int = 50
    alpha: float = 0.1
    cohort: int = 50
    rounds: int = 1500
    batch_size: int = 10
    learning_rate: float = 0.1
    clip: float = 0.4
    delta: float = 1e-6
    population: int = 1_000_000
    """Number of clients of the deployment whose noise is scaled down to this run."""
    deployed_cohort: int = 1000
    deployed_noise: float = 0.609
    """Noise multiplier of the deployment, for a stated epsilon of 2."""
    epsilon: float = 8.0
    """Target epsilon of the thousand simulated clients."""
    every: int = 50


def mechanisms(setting: Setting) -> dict[str, Mechanism]:
    """Return the mechanism of each row, by the row's name.

    A row has neither clip nor noise, the deployment's noise, the noise for `epsilon` with these
    clients, or the clip bound alone.
    """
    sampling = Poisson(setting.cohort / setting.clients)
    private: dict[str, Any] = {"clip": setting.clip, "sampling": sampling}
    found: dict[str, Mechanism] = {
        "no clip, no noise": Mechanism(sampling=FixedSize(setting.cohort)),
        "the deployment's noise": Extrapolated(
            noise_multiplier=setting.deployed_noise,
            cohort=setting.deployed_cohort,
            population=setting.population,
            delta=setting.delta,
            **private,
        ),
    }
    numbers = {"clients": setting.clients, "rounds": setting.rounds, "delta": setting.delta}
    z = calibrate(setting.epsilon, sampling=sampling, **numbers)
    found[f"ε = {setting.epsilon:g} for these clients"] = Mechanism(noise_multiplier=z, **private)
    return found | {"clip, no noise": Mechanism(**private)}


def clients_of(data: Dataset, partition: Partition, setting: Setting, seed: int) -> Clients:
    """Make clients with equally many training examples, drawn at random or by Dirichlet mixes.

    Test examples are dealt at random. All clients share one model, so its accuracy over their test
    examples is the accuracy on the full test set.
    """
    dealt: dict[str, Any] = {"clients": setting.clients, "size": setting.examples, "seed": seed}
    if partition == "iid":
        train = iid(data.train_labels, **dealt)
    else:
        train = dirichlet_by_client(data.train_labels, alpha=setting.alpha, **dealt)
    return make_clients(data, train, iid(data.test_labels, setting.clients, seed=seed))


def network(data: Dataset) -> Model:
    """Build the network, with channels standardised over the training set."""
    mean, deviation = (
        of(data.train_inputs, axis=(0, 1, 2)).astype(np.float32) for of in (np.mean, np.std)
    )

    def standardised(x: jax.Array) -> jax.Array:
        return (x.astype(jnp.float32) - mean) / deviation

    return from_flax(Pfl(), data.train_inputs.shape[1:], name="pfl_cnn", prepare=standardised)


def run(partition: Partition, options: Options) -> Result:
    """Run each mechanism for every seed, and return its row. Each run is stored when it is done."""
    setting = Setting()
    if options.smoke:
        setting = Setting(clients=20, examples=20, cohort=5, rounds=4, every=2, deployed_cohort=100)
    data = load("digits" if options.smoke else "cifar10")
    model = network(data)
    local = LocalSGD(optax.sgd(setting.learning_rate), setting.batch_size)
    rows = {}
    for name, mechanism in mechanisms(setting).items():
        algorithm = fedavg(
            model, local=local, mechanism=mechanism, terms=Terms(setting.delta), name=name
        )
        runs = []
        for seed in options.seeds:
            facts = setting._asdict() | {"partition": partition, "mechanism": name, "seed": seed}
            make = functools.partial(run_one, algorithm, data, partition, setting, seed, options)
            runs.append(
                part("pfl_cifar10", partition, f"{name}, seed {seed}", facts, make, options)
            )
        rows[name] = {key: runs[0][key] for key in ("noise_multiplier", "epsilon", "rounds")} | {
            key: [one[key] for one in runs] for key in ("accuracy_by_round", "clipped", "seconds")
        }
    return {"partition": partition, "setting": setting._asdict(), "rows": rows}


def run_one(
    algorithm: Algorithm,
    data: Dataset,
    partition: Partition,
    setting: Setting,
    seed: int,
    options: Options,
) -> Result:
    """Run one seed of a row. `seconds` is None if the run was resumed."""
    folder = run_folder(options.out, f"{partition}, {algorithm.name}", setting._asdict(), seed)
    began = time.monotonic()
    result = simulate(
        jax.random.key(seed),
        algorithm,
        clients_of(data, partition, setting, seed),
        rounds=setting.rounds,
        eval_every=setting.every,
        folder=folder,
        progress=False,
    )
    seconds = None if result.restored else round(time.monotonic() - began)
    print(
        f"{partition}, {algorithm.name}, seed {seed}: "
        f"{result.metrics[-1]['accuracy_examples']:.3f}",
        flush=True,
    )
    return {
        "noise_multiplier": float(np.max(result.statement["noise_multiplier"]["max"])),
        "epsilon": result.statement["honest"]["aggregate"]["epsilon"],
        "rounds": [row["round"] for row in result.metrics],
        "accuracy_by_round": [row["accuracy_examples"] for row in result.metrics],
        "clipped": result.metrics[-1]["clipped"],
        "seconds": seconds,
    }


def markdown(result: Result) -> str:
    """Return the table of final accuracies by mechanism."""
    lines = []
    for name, row in result["rows"].items():
        last = [curve[-1] for curve in row["accuracy_by_round"]]
        minutes = [seconds / 60 for seconds in row["seconds"] if seconds is not None]
        lines.append(
            (
                name,
                percent(last),
                number(float(row["epsilon"])),
                f"{row['noise_multiplier']:.3g}",
                f"{np.mean(minutes):.0f}" if minutes else "–",
            )
        )
    setting = result["setting"]
    head = (
        "",
        "accuracy on the test set, %",
        f"ε of this run, δ = {setting['delta']:g}",
        "z",
        "minutes",
    )
    text = "Setting: {clients:,} clients, {rounds:,} rounds, cohorts of {cohort}, clip {clip}."
    text = text.format(**setting)
    return f"{text}\n\n{markdown_table(head, lines)}\n\n{source(result)}"


STUDIES = {
    partition: Study(functools.partial(run, partition), markdown, draw_curves, minutes=550)
    for partition in ("iid", "dirichlet")
}

if __name__ == "__main__":
    command("pfl_cifar10", __doc__, STUDIES)
