"""Seconds that a user waits for the calls of a short run, with a cold and a warm cache on disk.

python -m benchmarks.waiting

The first run is that of README's example. It has 30 rounds of DP-FedAvg with a correction, with 100
clients of handwritten digits. Then the same process runs it with another seed, with a method that
was built again from equal arguments, and with another learning rate. `mlp` and `mlp_again` are two
rounds of FedAvg. `calibrate` finds the noise of a further deployment. All of these are wall time.

A turn has two processes. The first has an empty persistent compilation cache
(`jax_compilation_cache_dir`), and the second has the cache that the first has filled. The table has
medians over the turns.
"""

import dataclasses
import functools
import pathlib
import time

import optax
import tyro

import jaxfl
from benchmarks.common import OUT, apart, bars, cold_and_warm, finish, medians
from jaxfl import LocalSGD, algorithms, data, models, privacy


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    turns: int = 3
    """Number of turns, each with a cold and a warm cache."""
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Time the calls in new processes with a cold and a warm cache, and print medians."""
    turns = [cold_and_warm(functools.partial(apart, measure)) for _ in range(config.turns)]
    seconds = {
        state: medians({call: [turn[state][call] for turn in turns] for call in turns[0][state]})
        for state in turns[0]
    }
    cold = seconds["cold"]
    warm = seconds["warm"]
    headline = (
        f"a first run takes {cold['first']:.2g} s, and {warm['first']:.2g} s if an earlier process "
        f"compiled it; another seed {warm['another_seed']:.2g} s"
    )
    drawn = {
        f"{call}, {state}": value
        for state, measured in seconds.items()
        for call, value in measured.items()
    }
    rows = [{"cache": state} | measured for state, measured in seconds.items()]
    finish(config, "waiting", headline, rows, bars(drawn, "seconds", "what a user waits for"))


def measure() -> dict[str, float]:
    """Return the seconds of each call by name, in the order of the calls."""
    jaxfl.configure()
    digits = data.load("digits")
    rows = data.classes_per_client(digits.train_labels, digits.test_labels, 100, 3, seed=0)
    clients = data.make_clients(digits, *rows)
    sampling = privacy.Poisson(0.2)
    calibrate = functools.partial(privacy.calibrate, 8.0, rounds=30, sampling=sampling)
    noise = calibrate(clients=100)

    def method(rate: float) -> jaxfl.Algorithm:
        local = LocalSGD(optax.sgd(rate), batch_size=4, epochs=3)
        model = models.mlp((8, 8, 1), 10, hidden=())
        shared = algorithms.dp_fedavg(
            model, local=local, clip=1.0, noise_multiplier=noise, sampling=sampling
        )
        return algorithms.prior_corrected(shared)

    def run(seed: int, algorithm: jaxfl.Algorithm, rounds: int = 30) -> None:
        jaxfl.simulate(seed, algorithm, clients, rounds=rounds, progress=False)

    first = method(0.3)
    mlp = algorithms.fedavg(models.mlp((8, 8, 1), 10))
    calls = {
        "first": lambda: run(0, first),
        "another_seed": lambda: run(1, first),
        "built_again": lambda: run(0, method(0.3)),
        "another_rate": lambda: run(0, method(0.2)),
        "mlp": lambda: run(0, mlp, rounds=2),
        "mlp_again": lambda: run(1, mlp, rounds=2),
        "calibrate": lambda: calibrate(clients=200),
    }
    seconds = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        seconds[name] = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
