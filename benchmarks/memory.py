"""Peak resident memory of rounds beyond the clients' data, by cohort and population, on Linux.

python -m benchmarks.memory

Each size has a process of its own. `peak_mb` is the peak of the entire process over two rounds,
including libraries. It is measured after the host copies of the data are freed. On a CPU,
`beyond_data_mb` is `peak_mb` minus the bytes of the clients' arrays on the devices. On an
accelerator it is `peak_mb`, because these arrays are not in the process's resident memory. The peak
of compilation is separate, because it would hide that of small rounds.
"""

import dataclasses
import gc
import pathlib
import re

import jax
import tyro

from benchmarks.common import OUT, apart, chart, finish, from_zero
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
    cohorts: tuple[int, ...] = (50, 200, 500, 1000, 2000)
    """Numbers of clients. Rounds have all clients, or as many as the smallest number."""
    examples: int = 64
    """Number of examples per client."""
    steps: int = 2
    """Number of local steps of a client."""
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Measure each population and cohort in a process of its own, and print the megabytes."""
    least = min(config.cohorts)
    sizes = [(size, size) for size in config.cohorts] + [
        (size, least) for size in config.cohorts if size > least
    ]
    options = (config.workload, config.examples, config.steps)
    rows = [
        {"population": population, "cohort": cohort} | apart(measure, *options, population, cohort)
        for population, cohort in sizes
    ]
    series = {
        "all clients take part": [row for row in rows if row["cohort"] == row["population"]],
        f"{least} clients take part": [row for row in rows if row["cohort"] == least],
    }
    whole = [row["beyond_data_mb"] for row in series["all clients take part"]]
    headline = (
        f"{config.workload}: {whole[-1] - whole[0]:+.0f} MB beyond the data from a cohort of "
        f"{least} to {max(config.cohorts)}"
    )
    figure, (axes,) = chart()
    for name, of_cohort in series.items():
        axes.plot(
            [row["population"] for row in of_cohort],
            [row["beyond_data_mb"] for row in of_cohort],
            marker="o",
            label=name,
        )
    axes.plot(
        config.cohorts,
        [row["data_mb"] for row in rows[: len(config.cohorts)]],
        "--",
        color="grey",
        label="data",
    )
    axes.set(
        xlabel="population",
        ylabel="MB",
        title=f"{config.workload}: peak of a round beyond the data",
    )
    from_zero(axes)
    axes.legend(loc="center right")
    finish(config, f"memory_{config.workload}", headline, rows, figure)


def measure(
    workload: Name, examples: int, steps: int, population: int, cohort: int
) -> dict[str, float | None]:
    """Return the megabytes of the data, of this process over two rounds, and of its first device.

    `device_peak_mb` is None if the first device does not report its peak.
    """
    work = dataclasses.replace(
        WORKLOADS[workload], clients=population, examples=examples, steps=steps
    )
    placed = place(clients_of(*examples_of(work)))
    jax.block_until_ready(placed.clients)
    data = sum(leaf.nbytes for leaf in jax.tree.leaves(placed.clients)) / 1e6
    gc.collect()
    _forget_peak()
    algorithm = algorithm_of(work, FixedSize(cohort))
    program = compile_round(algorithm, placed, usual_chunk(algorithm, placed))
    compiling = _peak()
    _forget_peak()
    program.run()
    program.run()
    peak = _peak()
    # An accelerator has memory of its own.
    held = data if jax.default_backend() == "cpu" else 0.0
    device = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "data_mb": data,
        "compiling_peak_mb": compiling,
        "peak_mb": peak,
        "beyond_data_mb": peak - held,
        "temporary_mb": program.temporary_mb,
        "device_peak_mb": None if device is None else device / 1e6,
    }


def _forget_peak() -> None:
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _peak() -> float:
    """Return the largest resident memory since the last `_forget_peak`, in MB."""
    line = re.search(r"VmHWM:\s*(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    assert line is not None
    return int(line[1]) * 1024 / 1e6


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
