"""Adapters of a frozen encoder with vectorised clients, compared with a loop of full models.

python -m benchmarks.lora
"""

import dataclasses
import pathlib

import jax
import numpy as np
import optax
import tyro

from benchmarks.common import OUT, bars, finish, in_turn, medians, ratio
from benchmarks.workloads import compile_round
from experiments.lora.encoder import Classifier
from jaxfl import LocalSGD
from jaxfl.algorithms import dp_fedavg
from jaxfl.data import from_arrays, make_clients
from jaxfl.data.minilm import LAYERS, VOCABULARY
from jaxfl.engine.mesh import place
from jaxfl.engine.program import freeze
from jaxfl.models import from_flax, lora
from jaxfl.privacy import Full
from jaxfl.types import Algorithm, Model


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark.

    The encoder has 22.7 million weights. They are random, because their values do not affect speed.
    """

    clients: int = 100
    batch: int = 4
    steps: int = 1
    length: int = 16
    """Number of tokens of an example."""
    rank: int = 4
    last: int = 2
    """Number of last layers with adapters in the second variant. In the first, all have them."""
    chunks: tuple[int, ...] = (100, 10, 1)
    """Clients vectorised at a time."""
    repeats: int = 5
    out: pathlib.Path = OUT


def algorithm_of(config: Config, model: Model) -> Algorithm:
    """Build DP-FedAvg of a model, with the local steps of the options and all clients."""
    local = LocalSGD(optax.sgd(0.01), config.batch, steps=config.steps)
    return dp_fedavg(model, clip=1.0, noise_multiplier=1.0, sampling=Full(), local=local)


def main(config: Config) -> None:
    """Print the seconds of rounds that train adapters or all weights, and their ratios."""
    generator, examples = np.random.default_rng(0), config.clients * config.batch
    tokens = generator.integers(0, VOCABULARY, (examples, config.length), np.int32)
    labels = generator.integers(0, 3, examples, np.int32)
    data = from_arrays(tokens, labels, tokens[:1], labels[:1], classes=3)
    clients = make_clients(
        data, list(np.arange(examples).reshape(-1, config.batch)), [[0]] * config.clients
    )
    full = from_flax(Classifier(3), (config.length,))
    weights = jax.jit(full.init)(jax.random.key(0))
    last = [f"layer_{i}" for i in range(LAYERS - config.last, LAYERS)]
    models = {
        "adapters": lora(full, weights, rank=config.rank),
        f"adapters of the last {config.last} layers": lora(
            full, weights, rank=config.rank, where=last
        ),
    }
    ways = {
        f"{name}, {chunk} client{'s' * (chunk > 1)} at a time": (model, chunk)
        for name, model in models.items()
        for chunk in config.chunks
    }
    ways["all weights, one client after the other"] = (full, 1)
    rounds = {}
    for way, (model, chunk) in ways.items():
        algorithm = algorithm_of(config, model)
        rounds[way] = compile_round(algorithm, freeze(algorithm, place(clients)), chunk)
    seconds = in_turn({way: program.run for way, program in rounds.items()}, config.repeats)
    typical, (*_, reference) = medians(seconds), ways
    times = {way: ratio(seconds[reference], seconds[way]) for way in ways}
    rows = [
        {
            "way": way,
            "seconds": typical[way],
            "times as fast": times[way],
            "temporary MB": rounds[way].temporary_mb,
        }
        for way in ways
    ]
    headline = ", ".join(f"{way} x{value:.2f}" for way, value in times.items() if way != reference)
    finish(config, "lora", headline, rows, bars(typical, "seconds", "a round"))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
