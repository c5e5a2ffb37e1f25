"""Rounds of a gated recurrent unit, and of a small transformer compared with a PyTorch loop.

python -m benchmarks.text --vs torch
"""

import dataclasses
import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro

from benchmarks.common import OUT, bars, finish, in_turn, medians, ratio
from benchmarks.workloads import compile_round, matrix_product, products, usual_chunk
from jaxfl import LocalSGD
from jaxfl._support.backend import cores
from jaxfl.algorithms import dp_fedavg
from jaxfl.data import from_arrays, make_clients
from jaxfl.engine.mesh import place
from jaxfl.models import gru, transformer
from jaxfl.privacy import Full
from jaxfl.types import Model

VOCABULARY, LENGTH = 80, 128


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    models: tuple[Literal["transformer", "gru"], ...] = ("transformer", "gru")
    clients: int = 50
    steps: int = 5
    batch_size: int = 8
    chunk: int | None = None
    """Clients vectorised at a time on each device. None takes `usual_chunk`, 1 on a CPU."""
    repeats: int = 7
    """Number of timed rounds of each kind, taken in turn, at least 5."""
    vs: Literal["torch"] | None = None
    """Library whose loop of the transformer runs in turn, on its accelerator if it has one.

    This needs the extra `[bench]`.
    """
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Print the seconds of a round, the speed relative to PyTorch's, and the share of the peak.

    Raises:
        ValueError: `repeats` is below 5, or PyTorch is requested but not installed.
    """
    if config.repeats < 5:
        raise ValueError(
            f"repeats must be at least 5, got {config.repeats!r}. Give more, because medians of "
            "fewer vary too much."
        )
    if config.vs and importlib.util.find_spec("torch") is None:
        raise ValueError(
            f"vs must be left out without PyTorch, got {config.vs!r}. Run "
            "pip install -e '.[bench]', or leave out --vs."
        )
    rows: list[dict[str, Any]] = []
    shape = (config.clients, config.steps * config.batch_size, LENGTH)
    tokens, following = np.random.default_rng(0).integers(0, VOCABULARY, (2, *shape), np.int32)
    data = from_arrays(
        tokens.reshape(-1, LENGTH), following.reshape(-1, LENGTH), tokens[0, :0], following[0, :0]
    )
    own = list(np.arange(shape[0] * shape[1]).reshape(shape[:2]))
    population = place(make_clients(data, own, [[]] * config.clients))
    local = LocalSGD(optax.sgd(0.01), config.batch_size, steps=config.steps)
    product, product_flops = matrix_product(population)
    seconds: dict[str, dict[str, list[float]]] = {}
    for name in config.models:
        model = (
            transformer(VOCABULARY, LENGTH)
            if name == "transformer"
            else gru(VOCABULARY, LENGTH, width=128)
        )
        algorithm = dp_fedavg(model, clip=1.0, noise_multiplier=1.0, sampling=Full(), local=local)
        chunk = config.chunk or usual_chunk(algorithm, population)
        rounds: dict[str, Callable[[], Any]] = {
            "matrix product": product,
            "jaxfl": compile_round(algorithm, population, chunk).run,
        }
        if config.vs == "torch" and name == "transformer":
            rounds |= _torch_round(config, tokens, following)
        seconds[name] = in_turn(rounds, config.repeats)
        peak, typical = seconds[name].pop("matrix product"), medians(seconds[name])
        flops = 3 * config.clients * config.steps * config.batch_size * forward_flops(model)
        for kind, values in seconds[name].items():
            rows.append(
                {
                    "model": name,
                    "round": kind,
                    "seconds": typical[kind],
                    "million tokens/s": np.prod(shape) / typical[kind] / 1e6,
                    "% of peak": 100 * flops / product_flops * ratio(peak, values),
                    "jaxfl is faster by": ratio(values, seconds[name]["jaxfl"]),
                }
            )
    headline = ", ".join(
        f"{row['model']}: {row['million tokens/s']:.3f} million tokens/s"
        if row["round"] == "jaxfl"
        else f"{row['jaxfl is faster by']:.2f} x {row['round']}"
        for row in rows
    )
    speeds = {f"{row['model']}, {row['round']}": row["million tokens/s"] for row in rows}
    figure = bars(
        speeds, "million tokens per second", f"{config.clients} clients, {config.steps} steps"
    )
    finish(config, "text", headline, rows, figure, {"seconds": seconds})


def forward_flops(model: Model) -> float:
    """Return the floating-point operations of the matrix products in one example's forward pass.

    A multiply-add counts as two operations, and all attention scores count. A loop's body counts
    once for each position. The lookup of embeddings does not count.
    """
    params, tokens = jax.eval_shape(model.init, jax.random.key(0)), np.zeros((1, LENGTH), np.int32)
    forward = list(products(jax.make_jaxpr(model.apply)(params, tokens).jaxpr))
    if model.name == "transformer":
        return sum(forward[1:])
    return LENGTH * forward[1] + forward[2]


def _torch_round(
    config: Config, tokens: np.ndarray, following: np.ndarray
) -> dict[str, Callable[[], None]]:
    import torch

    from benchmarks import pytorch

    device = pytorch.best_device(cores())
    network = pytorch.Transformer(VOCABULARY, LENGTH).to(device)
    data = [torch.from_numpy(array.astype(np.int64)).to(device) for array in (tokens, following)]

    def run() -> None:
        pytorch.fedavg_round(network, *data, batch_size=config.batch_size, steps=config.steps)
        pytorch.wait(device)

    return {f"torch, {device}": run}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
