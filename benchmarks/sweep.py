"""Time of a sweep over DP-pFedDSU's lambda in one compiled program, relative to a run for each.

python -m benchmarks.sweep
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import tyro

from benchmarks.common import OUT, bars, finish
from jaxfl import LocalSGD, Result, simulate, sweep
from jaxfl.algorithms import dp_pfeddsu
from jaxfl.data import from_arrays, make_clients
from jaxfl.models import lenet_groupnorm
from jaxfl.privacy import Full


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark, with sizes of DP-pFedDSU for a CPU."""

    points: int = 7
    """Number of values of lambda."""
    clients: int = 20
    examples: int = 250
    rounds: int = 30
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Print the seconds to the last result of each way, including compilation."""
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 256, (config.clients * config.examples, 32, 32, 3), np.uint8)
    labels = rng.integers(0, 10, len(inputs))
    rows = np.split(np.arange(len(inputs)), config.clients)
    clients = make_clients(from_arrays(inputs, labels, inputs, labels, classes=10), rows, rows)
    values = {"penalty_weight": np.linspace(0.1, 0.7, config.points).tolist()}
    sgd = optax.sgd(0.01, momentum=0.9)
    build = functools.partial(
        dp_pfeddsu,
        lenet_groupnorm(),
        sampling=Full(),
        noise_multiplier=20.0,
        sparse_layers=2,
        local=LocalSGD(optax.chain(optax.add_decayed_weights(1e-4), sgd), 25),
        head=LocalSGD(sgd, 25, 15),
    )
    options: dict[str, Any] = {"rounds": config.rounds, "progress": False}
    key = jax.random.key(0)
    ways: dict[str, Callable[[], list[Result]]] = {
        "a run for each": lambda: [
            simulate(key, build(penalty_weight=weight), clients, **options)
            for weight in values["penalty_weight"]
        ],
        "sweep, one after the other": lambda: sweep(key, build, values, clients, **options),
        "sweep, vectorised": lambda: sweep(
            key, build, values, clients, batch=config.points, **options
        ),
    }
    seconds = {}
    for name, way in ways.items():
        jax.clear_caches()
        start = time.monotonic()
        way()
        seconds[name] = time.monotonic() - start
    first = seconds["a run for each"]
    rows = [
        {"way": name, "seconds": s, "of_a_run_for_each": s / first} for name, s in seconds.items()
    ]
    title = (
        f"{config.points} points, {config.clients} clients of {config.examples} examples, "
        f"{config.rounds} rounds"
    )
    headline = (
        f"one program takes {seconds['sweep, one after the other'] / first:.2f} of the time of a "
        "run for each"
    )
    finish(config, "sweep", headline, rows, bars(seconds, "seconds", title))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
