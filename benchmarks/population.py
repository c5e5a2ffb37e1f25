"""Seconds per round and memory of streamed populations, compared with states on the device.

python -m benchmarks.population

Each case has a process of its own, and the processes take turns. Memory is the peak of a process
without pages of files, which the system drops if it needs room.
"""

import dataclasses
import multiprocessing
import multiprocessing.connection
import pathlib
import statistics
import tempfile
import threading
import time
from typing import Any

import jax
import numpy as np
import optax
import tyro
from matplotlib.figure import Figure

from benchmarks.common import OUT, chart, finish, from_zero
from jaxfl import LocalSGD
from jaxfl.algorithms import centaur
from jaxfl.data import load
from jaxfl.engine.resident import Resident
from jaxfl.engine.round import all_keys
from jaxfl.engine.streamed import Stream
from jaxfl.models import mlp
from jaxfl.privacy import Poisson
from jaxfl.types import Clients, Lists


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark: CENTAUR on digits with Poisson cohorts, a head on each client."""

    populations: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    """Streamed populations, with the first of `cohorts`. The first population also runs on the
    device."""
    cohorts: tuple[int, ...] = (1_000, 100, 10_000)
    """Expected numbers of participants in a round.

    The first one has all `populations`. The others have the second population, if there is one.
    """
    hidden: tuple[int, ...] = (200, 64)
    """Widths of the MLP. A head has 10 weights for each unit of the last layer, and 10 biases."""
    examples: int = 20
    """Number of training examples of a client."""
    rounds: int = 5
    """Number of rounds of a turn, which run without a pause."""
    turns: int = 7
    """Number of turns of every case. The cases alternate."""
    out: pathlib.Path = OUT


@dataclasses.dataclass(frozen=True)
class Case:
    """A case, which runs in a process of its own."""

    store: str
    """Place of the clients' states: "device", or "host" if they are streamed."""
    population: int
    cohort: int
    """Expected number of participants in a round."""


def main(config: Config) -> None:
    """Run the cases in turn, each in a process of its own, and print medians."""
    first, cohort = config.populations[0], config.cohorts[0]
    cases = [
        Case("device", first, cohort),
        *(Case("host", number, cohort) for number in config.populations),
    ]
    cases += [Case("host", config.populations[:2][-1], other) for other in config.cohorts[1:]]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for case in cases:
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, case, config), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
        # The process is ready now. Cases compile one after the other.
        here.recv()
    seconds: list[list[float]] = [[] for _ in cases]
    for _ in range(config.turns):
        for pipe, times in zip(pipes, seconds, strict=True):
            pipe.send("turn")
            times.append(pipe.recv())
    rows = []
    for case, pipe, process, times in zip(cases, pipes, processes, seconds, strict=True):
        pipe.send("stop")
        memory, states = pipe.recv()
        process.join()
        row = dataclasses.asdict(case) | {"seconds": statistics.median(times)}
        row |= {
            "over_device": statistics.median(a / b for a, b in zip(times, seconds[0], strict=True))
        }
        rows.append(row | {"memory_mb": memory / 1e6, "states_mb": states / 1e6})
    largest = rows[len(config.populations)]
    headline = (
        f"{largest['population']} clients streamed take {largest['over_device']:.2f} of the "
        f"seconds of {first} on the device, {largest['memory_mb']:.0f} MB against "
        f"{rows[0]['memory_mb']:.0f}"
    )
    finish(
        config,
        "population",
        headline,
        rows,
        draw(rows, len(config.populations)),
        {"seconds": seconds},
    )


def serve(pipe: multiprocessing.connection.Connection, case: Case, config: Config) -> None:
    """Run turns in this process, and send the seconds per round of each through the pipe.

    The first turn is sent without a request. On "stop" the last message is the peak memory and the
    size of all clients' states, in bytes.

    Args:
        pipe: Connection to the process that requests turns.
        case: Case of this process.
        config: Options of the benchmark.
    """
    peak = [0]
    threading.Thread(target=watch, args=(peak,), daemon=True).start()
    model = mlp((8, 8, 1), 10, hidden=config.hidden)
    sgd = optax.sgd(0.01, momentum=0.9)
    algorithm = centaur(
        model,
        clip=0.1,
        noise_multiplier=1.0,
        sampling=Poisson(case.cohort / case.population),
        local=LocalSGD(optax.chain(optax.add_decayed_weights(1e-4), sgd), 10),
        head=LocalSGD(sgd, 10, 15),
    )
    clients, keys = make(case.population, config.examples), jax.random.split(jax.random.key(0))
    if case.store == "host":
        runner = Stream(keys[0], all_keys(keys[1]), algorithm, clients, None, 1, None)
        size = runner.store.bytes_per_client * case.population
    else:
        runner = Resident(keys[0], all_keys(keys[1]), algorithm, clients, None, 1, config.rounds)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.states))
    runner.compile(())
    done = 0
    while True:
        start = time.perf_counter()
        runner.rounds(done, config.rounds)
        pipe.send((time.perf_counter() - start) / config.rounds)
        done += config.rounds
        if pipe.recv() == "stop":
            pipe.send((peak[0], size))
            return


def make(number: int, examples: int) -> Clients:
    """Return `number` clients with `examples` random training examples of digits each.

    The first one is also the client's test example. The rows are in a temporary file.
    """
    digits, rng = load("digits"), np.random.default_rng(0)
    with tempfile.TemporaryFile() as file:
        train = np.memmap(file, np.int32, "w+", shape=(number, examples))
    for part in np.array_split(train, 1 + number // 10_000):
        part[:] = rng.integers(0, len(digits.train_labels), part.shape, np.int32)
    return Clients(
        inputs=digits.train_inputs,
        labels=digits.train_labels,
        train=Lists.of(train),
        train_size=np.full(number, examples, np.int32),
        test=Lists.of(train[:, :1]),
        test_size=np.ones(number, np.int32),
    )


def watch(peak: list[int]) -> None:
    """Write the peak of this process's memory in bytes into `peak[0]`, in an endless loop.

    Pages of files do not count, because the system can drop them.
    """
    status = pathlib.Path("/proc/self/status")
    while True:
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
        peak[0] = max(peak[0], int(line.split()[1]) * 1024)
        time.sleep(0.01)


def draw(rows: list[dict[str, Any]], populations: int) -> Figure:
    """Return a figure of seconds and memory by population, and of memory by cohort.

    Args:
        rows: Rows of `main`, the case on the device first.
        populations: Number of streamed populations.
    """
    by_population = rows[1 : 1 + populations]
    by_cohort = sorted(
        [by_population[:2][-1], *rows[1 + populations :]], key=lambda row: row["cohort"]
    )
    figure, (seconds, memory, cohorts) = chart(12, 3.4, panels=3)
    x = [row["population"] for row in by_population]
    seconds.plot(x, [row["seconds"] for row in by_population], "o-", label="streamed")
    seconds.axhline(rows[0]["seconds"], linestyle="--", label=f"{x[0]} on the device")
    seconds.set(xlabel="population", ylabel="seconds per round", xscale="log")
    memory.plot(x, [row["memory_mb"] for row in by_population], "o-", label="memory")
    memory.plot(x, [row["states_mb"] for row in by_population], "o-", label="states on the disk")
    memory.set(xlabel="population", ylabel="MB", xscale="log", yscale="log")
    cohorts.plot(
        [row["cohort"] for row in by_cohort], [row["memory_mb"] for row in by_cohort], "o-"
    )
    cohorts.set(xlabel="cohort", ylabel="memory, MB", xscale="log")
    for axes in (seconds, cohorts):
        from_zero(axes)
    for axes in (seconds, memory):
        axes.legend()
    return figure


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
