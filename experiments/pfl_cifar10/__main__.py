"""pfl-research's CIFAR-10 benchmark: 1,000 clients of 50 examples, 50 of them in a round, one model for all.

python -m experiments.pfl_cifar10 iid
python -m experiments.pfl_cifar10 dirichlet
"""

import functools
import time
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

from experiments.common import number, percent
from experiments.pfl_cifar10.network import Pfl
from experiments.study import Options, Result, Study, command, draw_curves, markdown_table, source
from jaxfl import LocalSGD, simulate
from jaxfl.algorithms import fedavg
from jaxfl.data import Dataset, dirichlet, iid, load, make_clients
from jaxfl.models import from_flax
from jaxfl.privacy import Extrapolated, FixedSize, Mechanism, Poisson, calibrate
from jaxfl.run.report import run_folder
from jaxfl.types import Clients, Terms

Partition = Literal["iid", "dirichlet"]


class Setting(NamedTuple):
    """The benchmark's, but for the rounds: it has twice as many with noise and with heterogeneous clients."""

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
    """Of the deployment whose noise is scaled down to this run."""
    deployed_cohort: int = 1000
    deployed_noise: float = 0.609
    """For a stated epsilon of 2."""
    epsilons: tuple[float, ...] = (2.0, 8.0)
    every: int = 50


def mechanisms(setting: Setting) -> dict[str, Mechanism]:
    """Without noise, with the deployment's, and with what these clients need."""
    sampling = Poisson(setting.cohort / setting.clients)
    private: dict[str, Any] = {"clip": setting.clip, "sampling": sampling}
    found: dict[str, Mechanism] = {
        "no clip, no noise": Mechanism(sampling=FixedSize(setting.cohort)),
        "clip, no noise": Mechanism(**private),
        "the deployment's noise": Extrapolated(
            noise_multiplier=setting.deployed_noise,
            cohort=setting.deployed_cohort,
            population=setting.population,
            delta=setting.delta,
            **private,
        ),
    }
    for epsilon in reversed(setting.epsilons):
        numbers = {"clients": setting.clients, "rounds": setting.rounds, "delta": setting.delta}
        z = calibrate(epsilon, sampling=sampling, **numbers)
        found[f"ε = {epsilon:g} for these clients"] = Mechanism(noise_multiplier=z, **private)
    return found


def clients_of(data: Dataset, partition: Partition, setting: Setting, seed: int) -> Clients:
    """Clients of as many examples each, or of Dirichlet proportions of classes; the test set is dealt out to them.

    One model serves all, so that its accuracy over all their test examples is that on the whole test set.
    """
    if partition == "iid":
        train = iid(data.train_labels, setting.clients, seed=seed, size=setting.examples)
    else:
        train = dirichlet(data.train_labels, setting.clients, setting.alpha, seed=seed, minimum=1)
    return make_clients(data, train, iid(data.test_labels, setting.clients, seed=seed))


def run(partition: Partition, options: Options) -> Result:
    """A row for each mechanism; a row that was not stopped on its way has its time."""
    setting = Setting()
    if options.smoke:
        setting = Setting(clients=20, examples=20, cohort=5, rounds=4, every=2, deployed_cohort=100)
    data = load("digits" if options.smoke else "cifar10")
    model = from_flax(Pfl(), data.train_inputs.shape[1:], name="pfl_cnn")
    local = LocalSGD(optax.sgd(setting.learning_rate), setting.batch_size)
    clients = {seed: clients_of(data, partition, setting, seed) for seed in options.seeds}
    rows = {}
    for name, mechanism in mechanisms(setting).items():
        algorithm = fedavg(model, local=local, mechanism=mechanism, terms=Terms(setting.delta), name=name)
        results, seconds = [], []
        for seed, own in clients.items():
            folder = run_folder(options.out, f"{partition}, {name}", setting._asdict(), seed)
            began = time.monotonic()
            result = simulate(
                jax.random.key(seed),
                algorithm,
                own,
                rounds=setting.rounds,
                eval_every=setting.every,
                folder=folder,
                progress=False,
            )
            seconds.append(None if result.restored else round(time.monotonic() - began))
            results.append(result)
            print(f"{partition}, {name}, seed {seed}: {result.metrics[-1]['accuracy_examples']:.3f}", flush=True)
        statement = results[0].statement
        rows[name] = {
            "noise_multiplier": float(np.max(statement["noise_multiplier"]["max"])),
            "epsilon": statement["honest"]["aggregate"]["epsilon"],
            "rounds": [row["round"] for row in results[0].metrics],
            "accuracy_by_round": [[row["accuracy_examples"] for row in result.metrics] for result in results],
            "clipped": [result.metrics[-1]["clipped"] for result in results],
            "seconds": seconds,
        }
    return {"partition": partition, "setting": setting._asdict(), "rows": rows}


def markdown(result: Result) -> str:
    """Accuracy at the end by mechanism."""
    lines = []
    for name, row in result["rows"].items():
        last = [curve[-1] for curve in row["accuracy_by_round"]]
        minutes = [seconds / 60 for seconds in row["seconds"] if seconds is not None]
        epsilon = float(row["epsilon"])
        lines.append(
            (
                name,
                percent(last),
                number(epsilon) if epsilon < 1e4 else f"{epsilon:.2g}",
                f"{row['noise_multiplier']:.3g}",
                f"{np.mean(minutes):.0f}" if minutes else "–",
            )
        )
    setting = result["setting"]
    head = ("", "accuracy on the test set, %", f"ε of this run, δ = {setting['delta']:g}", "z", "minutes")
    text = "{clients:,} clients, {rounds:,} rounds, cohorts of {cohort}, clip {clip}.".format(**setting)
    return f"{text}\n\n{markdown_table(head, lines)}\n\n{source(result)}"


STUDIES = {
    partition: Study(functools.partial(run, partition), markdown, draw_curves, minutes=700)
    for partition in ("iid", "dirichlet")
}

if __name__ == "__main__":
    command("pfl_cifar10", __doc__, STUDIES)
