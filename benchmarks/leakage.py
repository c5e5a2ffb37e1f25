"""Cost and error of estimates of a LeNet client's Jacobian leakage risk.

python -m benchmarks.leakage
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array

from benchmarks.common import OUT, busy_clock, chart, finish, from_zero, in_turn, medians
from jaxfl import LocalSGD
from jaxfl.data import Dataset, load
from jaxfl.local.leakage import client_risk, exact_risk
from jaxfl.models import lenet
from jaxfl.types import ClientData, Model, Params


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    dataset: str = "mnist"
    """Dataset whose first training examples of classes 0 and 1 belong to the client."""
    examples: int = 500
    """Number of the client's examples."""
    probes: tuple[int, ...] = (1, 2, 4, 6, 8)
    """Numbers of probes of an estimate."""
    drawn: tuple[int, ...] = (48, 500)
    """Numbers of examples that an estimate draws."""
    seeds: int = 30
    """Number of estimates, whose relative root mean square error is reported."""
    repeats: int = 9
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Print costs relative to the client's 5 epochs, and relative errors of its mean risk."""
    data = load(config.dataset)
    shape = data.train_inputs.shape[1:]
    model = lenet(shape)
    client = _rows(data, np.flatnonzero(data.train_labels < 2)[: config.examples])
    start, training, many = (
        model.init(jax.random.key(0)),
        _training(model),
        _rows(data, np.arange(5000)),
    )
    everyone = training(training(start, many), many)
    weights = {"fresh": start, "global": everyone, "global, then local": training(everyone, client)}
    risks = {
        (drawn, probes): _risk(model, client, drawn, probes)
        for drawn, probes in itertools.product(config.drawn, config.probes)
    }
    programs = {
        str(knobs): lambda f=risk: f(jax.random.key(0), start) for knobs, risk in risks.items()
    }
    programs |= {"training": lambda: training(start, client)}
    seconds = medians(in_turn(programs, config.repeats, busy_clock()))
    # A convolution's fast form rounds one example differently from many, so its pooling breaks ties
    # of equal pixels differently. Exact values use the plain form, in which the first maximum wins.
    plain = lenet(shape, form="lax")
    inputs, labels = client.take(jnp.arange(client.padded))
    exact = jax.jit(lambda params: jnp.mean(exact_risk(plain, params, inputs, labels)))
    truth = {name: float(exact(params)) for name, params in weights.items()}
    rows = []
    for (drawn, probes), risk in risks.items():
        errors = {}
        for name, params in weights.items():
            estimates = np.array(
                [risk(jax.random.key(seed), params) for seed in range(config.seeds)]
            )
            errors[name] = 100 * float(np.sqrt(np.mean((estimates / truth[name] - 1) ** 2)))
        cost = seconds[str((drawn, probes))] / seconds["training"]
        rows.append({"examples": drawn, "probes": probes, "of_training": cost} | errors)
    figure, (axes,) = chart(11)
    for drawn, name in itertools.product(config.drawn, weights):
        drawn_rows = [row for row in rows if row["examples"] == drawn]
        style = "-" if drawn == config.drawn[0] else "--"
        axes.plot(
            [row["of_training"] for row in drawn_rows],
            [row[name] for row in drawn_rows],
            style,
            marker="o",
            label=f"{drawn} examples, {name}",
        )
    axes.set(
        xlabel="cost over that of 5 local epochs",
        ylabel="error of the mean risk, %",
        title="leakage risk",
    )
    from_zero(axes)
    figure.legend(fontsize="small", loc="outside right upper")
    least = min(rows, key=lambda row: row["of_training"])
    headline = (
        f"{least['examples']} examples, {least['probes']} probes: {least['of_training']:.2f} of "
        "training; errors in %"
    )
    finish(config, "leakage", headline, rows, figure)


def _rows(data: Dataset, rows: np.ndarray) -> ClientData:
    inputs, labels = jnp.asarray(data.train_inputs[rows]), jnp.asarray(data.train_labels[rows])
    return ClientData(inputs, labels, jnp.arange(len(rows)), jnp.int32(len(rows)))


def _training(model: Model) -> Callable[[Params, ClientData], Params]:
    local = LocalSGD(optax.sgd(0.01, momentum=0.5), 64, 5)

    def run(params: Params, data: ClientData) -> Params:
        return local.train(jax.random.key(1), model, params, data)[0]

    return jax.jit(run)


def _risk(
    model: Model, data: ClientData, drawn: int, probes: int
) -> Callable[[Array, Params], Array]:
    return jax.jit(
        lambda key, params: client_risk(key, model, params, data, examples=drawn, probes=probes)
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
