"""Milliseconds per client of one round, by chunk and by cohort.

python -m benchmarks.chunks
"""

import dataclasses
import pathlib
from typing import Any

import tyro

from benchmarks.common import OUT, chart, finish, from_zero, in_turn, medians
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
from jaxfl.privacy import FixedSize


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workload: Name = "lenet"
    population: int = 200
    """Number of clients."""
    chunks: tuple[int, ...] = (1, 2, 8, 32, 128)
    """Chunks for rounds of all clients. Chunks larger than a device's clients are left out."""
    cohorts: tuple[int, ...] = (5, 20, 50, 100, 200)
    """Numbers of clients that a round draws, at the usual chunk."""
    repeats: int = 5
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Time rounds of all chunks and cohorts in turn, and print the milliseconds per client."""
    work = dataclasses.replace(WORKLOADS[config.workload], clients=config.population)
    population = place(clients_of(*examples_of(work)))
    per_device = population.num_slots // population.mesh.size
    usual = usual_chunk(algorithm_of(work), population)
    sizes = [(chunk, config.population) for chunk in config.chunks if chunk <= per_device]
    sizes += [(usual, cohort) for cohort in config.cohorts if (usual, cohort) not in sizes]
    rounds = {
        str(size): compile_round(algorithm_of(work, FixedSize(size[1])), population, size[0])
        for size in sizes
    }
    seconds = medians(
        in_turn({name: program.run for name, program in rounds.items()}, config.repeats)
    )
    rows = [
        {
            "chunk": chunk,
            "cohort": cohort,
            "median_s": seconds[str((chunk, cohort))],
            "ms_per_client": 1e3 * seconds[str((chunk, cohort))] / cohort,
            "temporary_mb": rounds[str((chunk, cohort))].temporary_mb,
        }
        for chunk, cohort in sizes
    ]
    best = min(
        (row for row in rows if row["cohort"] == config.population), key=lambda row: row["median_s"]
    )
    headline = (
        f"{config.workload}: best chunk {best['chunk']}, {best['ms_per_client']:.3g} ms per client"
    )
    figure, panels = chart(9, 3.5, panels=2)
    series: dict[str, list[dict[str, Any]]] = {
        "chunk": [row for row in rows if row["cohort"] == config.population],
        "cohort": sorted(
            (row for row in rows if row["chunk"] == usual), key=lambda row: row["cohort"]
        ),
    }
    titles = {"chunk": f"all {config.population} clients take part", "cohort": f"chunk {usual}"}
    for axes, (name, own_rows) in zip(panels, series.items(), strict=True):
        values = [row[name] for row in own_rows]
        axes.plot(values, [row["ms_per_client"] for row in own_rows], marker="o")
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, map(str, values), minor=False)
        from_zero(axes)
        axes.set(xlabel=name, ylabel="ms per client", title=f"{config.workload}, {titles[name]}")
    finish(config, f"chunks_{config.workload}", headline, rows, figure)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
