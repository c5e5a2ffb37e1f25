"""FedAvg without privacy on real data, with its accuracy on the full test set by round.

python -m experiments.fedavg mnist
"""

from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.common import model_for, percent, run_each
from experiments.study import (
    Options,
    Result,
    Study,
    command,
    draw_curves,
    listed,
    markdown_table,
    source,
)
from jaxfl import LocalSGD
from jaxfl.algorithms import fedavg
from jaxfl.data import classes_per_client, load, make_clients
from jaxfl.privacy import FixedSize, Mechanism
from jaxfl.types import Clients


class Setting(NamedTuple):
    """Settings of a run of LeNet with plain SGD and cohorts of fixed size."""

    data: str = "mnist"
    clients: int = 100
    classes: int = 2
    """Number of classes of each client."""
    cohort: int = 10
    epochs: int = 5
    learning_rate: float = 0.05
    batch_size: int = 10
    rounds: int = 100
    every: int = 5
    target: float = 0.95


def mnist(options: Options) -> Result:
    """Run FedAvg for every seed, and return its accuracy on all test examples by round."""
    setting = Setting()
    if options.smoke:
        setting = setting._replace(data="digits", clients=50, cohort=5, rounds=3, every=1)
    data = load(setting.data)
    algorithm = fedavg(
        model_for("lenet", data),
        local=LocalSGD(optax.sgd(setting.learning_rate), setting.batch_size, setting.epochs),
        mechanism=Mechanism(sampling=FixedSize(setting.cohort), denominator="participants"),
    )

    def clients(seed: int) -> Clients:
        return make_clients(
            data,
            *classes_per_client(
                data.train_labels, data.test_labels, setting.clients, setting.classes, seed=seed
            ),
        )

    run: dict[str, Any] = {
        "devices": jax.devices()[:1],
        "chunk": 1,
        "progress": False,
        "config": setting._asdict(),
    }
    run |= {
        "rounds": setting.rounds,
        "eval_every": setting.every,
        "seeds": options.seeds,
        "out": options.out,
    }
    ((name, results),) = run_each({"FedAvg": lambda _: algorithm}, clients, **run).items()
    row = {
        "rounds": [int(entry["round"]) for entry in results[0].metrics],
        "accuracy_by_round": [
            [entry["accuracy_examples"] for entry in result.metrics] for result in results
        ],
    }
    return {"setting": setting._asdict(), "rows": {name: row}}


def markdown(result: Result) -> str:
    """Return the picture, some of its points, and the first round that reaches the target."""
    own, (row,) = result["setting"], result["rows"].values()
    curves = np.array(row["accuracy_by_round"])
    shown = sorted(
        {0, 1, *range(3, len(row["rounds"]), 4), len(row["rounds"]) - 1}
        & {*range(len(row["rounds"]))}
    )
    table = markdown_table(
        ["round", *(str(row["rounds"][index]) for index in shown)],
        [["accuracy %", *(percent(curves[:, index].tolist()) for index in shown)]],
    )
    reached = [
        next((at for at, value in zip(row["rounds"], curve) if value >= own["target"]), "–")
        for curve in curves
    ]
    text = (
        "Setting: {data}, {clients} clients of {classes} classes each, {cohort} clients in a "
        "round, {epochs} passes in batches of {batch_size}, rate {learning_rate:g}. The full test "
        "set is tested."
    )
    first = (
        f"First evaluated round of at least {100 * own['target']:g}%, by seed: {listed(reached)}."
    )
    return "\n\n".join(
        ["![Accuracy by round](mnist.png)", table, text.format(**own), first, source(result)]
    )


STUDIES = {"mnist": Study(mnist, markdown, draw_curves, minutes=8)}

if __name__ == "__main__":
    command("fedavg", __doc__, STUDIES)
