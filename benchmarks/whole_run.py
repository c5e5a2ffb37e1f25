"""The 1,500 rounds of pfl-research's CIFAR-10 benchmark, compared with pfl-research itself.

pip install "torch==2.13.0" multiprocess dill prv-accountant && pip install --no-deps pfl==0.6.0
python -m benchmarks.whole_run

A few rounds of each library run in turn. There are 1,000 clients of 50 examples, and 50 of them
take part in a round. A client trains one pass in batches of 10, with the benchmark's CNN of 1.6
million parameters and dropout. There is no privacy. Only rounds are timed, without evaluations and
without the time before the first round. pfl-research runs in new processes: a single one with all
cores as threads, and one process per core with one thread each. Without `--no-deps` its
installation replaces dp-accounting by an older version than this library needs.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import optax
import tyro

from benchmarks.common import OUT, bars, cores, finish, ratio
from benchmarks.workloads import (
    WORKLOADS,
    clients_of,
    compile_round,
    examples_of,
    model_of,
    usual_chunk,
)
from jaxfl import LocalSGD
from jaxfl.algorithms import fedavg
from jaxfl.engine.mesh import place
from jaxfl.privacy import FixedSize, Mechanism


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    rounds: int = 10
    """Number of rounds of each library in a turn."""
    turns: int = 5
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Time rounds in turn, and print the minutes of 1,500 of them.

    Raises:
        SystemExit: pfl-research is not installed.
    """
    if importlib.util.find_spec("pfl") is None:
        raise SystemExit(f"pfl must be installed, got none. Run {__doc__.splitlines()[2]}.")
    from benchmarks import pfl_research as theirs

    work = dataclasses.replace(
        WORKLOADS["pfl_cnn"], clients=theirs.CLIENTS, examples=theirs.EXAMPLES
    )
    local = LocalSGD(optax.sgd(theirs.RATE), theirs.BATCH_SIZE)
    algorithm = fedavg(
        model_of(work), local=local, mechanism=Mechanism(sampling=FixedSize(theirs.COHORT))
    )
    population = place(clients_of(*examples_of(work)))
    ours = compile_round(algorithm, population, usual_chunk(algorithm, population))
    ours.run()

    names = {"pfl-research, one process": 1, f"pfl-research, {cores()} processes": cores()}
    turns: dict[str, list[float]] = {name: [] for name in ("jaxfl", *names)}
    for _ in range(config.turns):
        start = time.perf_counter()
        for _ in range(config.rounds):
            ours.run()
        turns["jaxfl"].append((time.perf_counter() - start) / config.rounds)
        for name, processes in names.items():
            turns[name].append(float(np.mean(_pfl_research(config.rounds, processes))))

    rows = [
        {
            "round of 50 clients": name,
            "median s": float(np.median(seconds)),
            "min s": min(seconds),
            "max s": max(seconds),
            "1,500 rounds, minutes": 1500 * float(np.median(seconds)) / 60,
            "over jaxfl": ratio(seconds, turns["jaxfl"]),
        }
        for name, seconds in turns.items()
    ]
    minutes = {row["round of 50 clients"]: row["1,500 rounds, minutes"] for row in rows}
    headline = f"jaxfl {rows[0]['1,500 rounds, minutes']:.0f} minutes; " + ", ".join(
        f"{row['round of 50 clients']} {row['over jaxfl']:.2f} x that" for row in rows[1:]
    )
    finish(config, "whole_run", headline, rows, bars(minutes, "minutes", "1,500 rounds"))


def _pfl_research(rounds: int, processes: int) -> list[float]:
    """Return the seconds of each of pfl-research's rounds, in processes that share the cores.

    Raises:
        RuntimeError: A process failed. The message has the end of the error output.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launch, "-m", "benchmarks.pfl_research", str(rounds)]
    environment = os.environ | {"OMP_NUM_THREADS": str(cores() // processes)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"pfl-research ended with {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
