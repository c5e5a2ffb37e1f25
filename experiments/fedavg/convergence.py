"""FedAvg without privacy on real data, accuracy on the whole test set by round.

python -m experiments.fedavg.convergence --task mnist
python -m experiments.fedavg.convergence --task cifar10
"""

import dataclasses
import pathlib
from typing import Literal

import jax
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from experiments.common import Scale, cli, model_for, percent, seeds_of
from jaxfl import LocalSGD, simulate
from jaxfl._validate import checked
from jaxfl.algorithms import fedavg
from jaxfl.data import classes_per_client, iid, load, make_clients, matching
from jaxfl.privacy import FixedSize, Mechanism
from jaxfl.run.report import run_folder
from jaxfl.types import Clients


@dataclasses.dataclass(frozen=True)
class Setting:
    """One task: LeNet, plain SGD, a cohort of fixed size."""

    clients: int
    classes: int | None
    """Classes per client; None: iid."""
    cohort: int
    epochs: int
    learning_rate: float
    rounds: int
    batch_size: int = 10


TASKS = {
    "mnist": Setting(clients=100, classes=2, cohort=10, epochs=5, learning_rate=0.05, rounds=100),
    "cifar10": Setting(clients=1000, classes=None, cohort=50, epochs=1, learning_rate=0.1, rounds=300),
}
ROUNDS: dict[Scale, int | None] = {"smoke": 3, "cpu": None, "paper": 1500, "large": 3000}


@checked(seeds=seeds_of)
@dataclasses.dataclass(frozen=True)
class Config:
    """Which task, how long, how often."""

    task: Literal["mnist", "cifar10"] = "mnist"
    scale: Scale = "cpu"
    """smoke: seconds, on digits; cpu: 100 rounds of mnist or 300 of cifar10; paper: 1,500; large: 3,000."""
    seeds: tuple[int, ...] = (0, 1, 2)
    out: pathlib.Path = pathlib.Path("runs/fedavg/convergence")


def main(config: Config) -> None:
    """Run the task for every seed and print accuracy by round."""
    setting = TASKS[config.task]
    setting = dataclasses.replace(setting, rounds=ROUNDS[config.scale] or setting.rounds)
    data = load("digits" if config.scale == "smoke" else config.task)
    if config.scale == "smoke":
        setting = dataclasses.replace(setting, clients=50, cohort=5)
    seeds = config.seeds[:1] if config.scale == "smoke" else config.seeds
    algorithm = fedavg(
        model_for("lenet", data),
        local=LocalSGD(optax.sgd(setting.learning_rate), setting.batch_size, setting.epochs),
        mechanism=Mechanism(sampling=FixedSize(setting.cohort), denominator="participants"),
    )

    def make(seed: int) -> Clients:
        if setting.classes is not None:
            parts = classes_per_client(data.train_labels, data.test_labels, setting.clients, setting.classes, seed=seed)
            return make_clients(data, *parts)
        train = iid(data.train_labels, setting.clients, seed=seed)
        return make_clients(data, train, matching(train, data.train_labels, data.test_labels, seed=seed))

    settings = dataclasses.asdict(setting) | {"dataset": data.name, "scale": config.scale}
    runs = []
    for seed in seeds:
        folder = run_folder(config.out, data.name, settings, seed)
        every = max(1, setting.rounds // 20)
        result = simulate(
            jax.random.key(seed), algorithm, make(seed), rounds=setting.rounds, eval_every=every, folder=folder
        )
        runs.append({int(row["round"]): row["accuracy_examples"] for row in result.metrics})
        print(f"seed {seed}: curves in {folder}")
    table = Table("round", "accuracy on the whole test set %", title=f"{data.name}, FedAvg, {len(seeds)} seeds")
    for number in runs[0]:
        table.add_row(str(number), percent([run[number] for run in runs]))
    Console().print(table)
    best = [max(run.values()) for run in runs]
    at = [max(run, key=run.__getitem__) for run in runs]
    print(f"last round: {percent([run[max(run)] for run in runs])}; best round: {percent(best)} (rounds {at})")
    print(f"first evaluated round at 95%: {[next((r for r, a in run.items() if a >= 0.95), None) for run in runs]}")
    print(f"median over seeds: {100 * np.median([run[max(run)] for run in runs]):.1f}")


if __name__ == "__main__":
    main(cli(Config, __doc__))
