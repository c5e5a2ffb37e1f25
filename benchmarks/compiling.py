"""Seconds to compile each workload's round, and from the start of a process to its first round.

python -m benchmarks.compiling

Each measurement has a process of its own. The first is cold, with an empty persistent compilation
cache (`jax_compilation_cache_dir`). The second is warm, with the cache that the first has filled.
`imports` starts with the process. `data` makes the data and places them on the devices. `start`
chooses the chunk, and initialises server and clients. `compile` traces the round, and compiles it
or reads it from the cache. `round` runs the round.
"""

import dataclasses
import pathlib
import time

import jax
import tyro

from benchmarks.common import OUT, apart, chart, cold_and_warm, finish
from benchmarks.workloads import (
    WORKLOADS,
    Name,
    algorithm_of,
    clients_of,
    compile_round,
    examples_of,
    usual_chunk,
)
from jaxfl.engine.mesh import place

PARTS = ("imports", "data", "start", "compile", "round")


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workloads: tuple[Name, ...] = tuple(WORKLOADS)
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Time each workload with a cold and a warm cache, each time in a new process."""
    rows = []
    for workload in config.workloads:
        measured = cold_and_warm(
            lambda name=workload, **cache: apart(measure, name, time.time(), **cache)
        )
        for state, seconds in measured.items():
            total = {
                "total": sum(seconds.values()),
                "start_to_round": sum(seconds[p] for p in PARTS[2:]),
            }
            rows.append({"workload": workload, "cache": state} | seconds | total)
    cold, warm = rows[:2]
    headline = (
        f"{cold['workload']}: compiles in {cold['compile']:.2g} s; with a warm cache "
        f"{warm['compile']:.2g} s, and {warm['start_to_round']:.2g} s from placed data to the end "
        "of the first round"
    )
    figure, (axes,) = chart(9, 1.2 + 0.35 * len(rows))
    names, left = [f"{row['workload']}, {row['cache']}" for row in rows], [0.0] * len(rows)
    for part in PARTS:
        values = [row[part] for row in rows]
        axes.barh(names, values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="seconds from the start of the process", title="to the end of the first round")
    figure.legend(loc="outside right upper")
    finish(config, "compiling", headline, rows, figure)


def measure(workload: Name, begun: float) -> dict[str, float]:
    """Return the seconds of each of `PARTS` in this process.

    Args:
        workload: Name of the workload.
        begun: Value of `time.time` at which the process was started.
    """
    ends = [begun, time.time()]
    work = WORKLOADS[workload]
    population = place(clients_of(*examples_of(work)))
    jax.block_until_ready(population.clients)
    ends.append(time.time())
    program = compile_round(
        algorithm_of(work), population, usual_chunk(algorithm_of(work), population)
    )
    ends += [time.time() - program.compile_s, time.time()]
    program.run()
    ends.append(time.time())
    return {
        part: after - before for part, before, after in zip(PARTS, ends, ends[1:], strict=False)
    }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
