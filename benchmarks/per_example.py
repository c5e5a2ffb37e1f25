"""Cost of a step of DP-SGD, which clips every example's gradient, relative to a plain step.

python -m benchmarks.per_example
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from benchmarks.common import OUT, bars, busy_clock, finish, in_turn, medians
from jaxfl import LocalSGD
from jaxfl.data import from_arrays, make_clients
from jaxfl.models import build
from jaxfl.privacy import DPSGD
from jaxfl.types import ClientData


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    models: tuple[str, ...] = ("mlp", "lenet")
    batch_size: int = 32
    """Number of examples of a plain step, and the expected number of a private step."""
    steps: int = 20
    chunks: tuple[int, ...] = (1, 4, 8, 16, 32)
    repeats: int = 5
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Print the milliseconds of a plain step, and the cost of a private step in plain ones."""
    rows = []
    for name in config.models:
        plain = {"plain": _client(name, config, None)}
        private = {f"chunk {chunk}": _client(name, config, chunk) for chunk in config.chunks}
        seconds = medians(in_turn(plain | private, config.repeats, busy_clock()))
        base = seconds["plain"]
        rows += [
            {
                "model": name,
                "step": way,
                "ms_per_step": 1e3 * s / config.steps,
                "plain_steps": s / base,
            }
            for way, s in seconds.items()
        ]
    private_rows = [row for row in rows if row["step"] != "plain"]
    best = {
        name: min(row["plain_steps"] for row in private_rows if row["model"] == name)
        for name in config.models
    }
    headline = "a private step takes " + ", ".join(
        f"{cost:.1f} plain ones ({name})" for name, cost in best.items()
    )
    values = {f"{row['model']}, {row['step']}": row["plain_steps"] for row in private_rows}
    title = f"private steps, batch {config.batch_size}"
    finish(
        config,
        "per_example",
        headline,
        rows,
        bars(values, "plain steps of as many examples", title),
    )


def _client(name: str, config: Config, chunk: int | None) -> Callable[[], Any]:
    """Return a call of one client's local steps on random bytes.

    Args:
        name: Name of the model.
        config: Options of the benchmark.
        chunk: Number of examples that a private step vectorises at a time. None takes plain steps.
    """
    rng, shape = np.random.default_rng(0), (28, 28, 1)
    inputs = rng.integers(0, 256, (20 * config.batch_size, *shape), np.uint8)
    data = from_arrays(
        inputs, rng.integers(0, 10, len(inputs)), inputs[:0], np.zeros(0, np.int64), classes=10
    )
    model = build(name, shape, 10)
    clients = jax.tree.map(jnp.asarray, make_clients(data, [np.arange(len(inputs))], [[]]))
    rows = ClientData(clients.inputs, clients.labels, clients.train[0], clients.train_size[0])
    sgd = optax.sgd(0.01)
    if chunk is None:
        local = LocalSGD(sgd, config.batch_size, steps=config.steps)
    else:
        local = DPSGD(
            1.0, noise_multiplier=1.0, rate=1 / 20, steps=config.steps, optimizer=sgd, chunk=chunk
        )
    program = jax.jit(lambda key, params: local.train(key, model, params, rows)[0])
    params = model.init(jax.random.key(0))
    return lambda: program(jax.random.key(1), params)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
