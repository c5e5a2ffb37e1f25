"""Client updates per second on 1 to 8 CPU devices, and in several processes with a device each.

python -m benchmarks.scaling

Each number has a process of its own, or processes that `jaxfl launch` starts and whose sums go
through sockets. The measurements follow each other, so absolute values drift with the machine's
speed. A matrix product, measured in turn with the rounds, is therefore shown too. Runs with more
devices than cores show the cost of devices.
"""

import dataclasses
import pathlib

import tyro

from benchmarks.common import OUT, apart, chart, finish, from_zero, in_turn, medians, ratio
from benchmarks.workloads import (
    WORKLOADS,
    Name,
    algorithm_of,
    clients_of,
    compile_round,
    examples_of,
    matrix_product,
    round_flops,
)
from jaxfl._support.backend import cores
from jaxfl.engine.mesh import place


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workload: Name = "lenet"
    clients: int = 48
    """Number of clients. Choose a multiple of all numbers of devices to time no padding."""
    devices: tuple[int, ...] = (1, 2, 4, 8)
    processes: tuple[int, ...] = (2, 4)
    """Numbers of processes with one device each."""
    repeats: int = 7
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Time each number of devices and of processes, and print the clients per second."""
    rows = []
    for devices in config.devices:
        forced = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        figures = apart(measure, config.workload, config.clients, config.repeats, **forced)
        speedup = figures["clients_per_s"] / rows[0]["clients_per_s"] if rows else 1.0
        rows.append({"devices": devices, "processes": 1} | figures | {"speedup": speedup})
    for processes in config.processes:
        forced = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        figures = apart(
            measure, config.workload, config.clients, config.repeats, processes=processes, **forced
        )
        speedup = figures["clients_per_s"] / rows[0]["clients_per_s"]
        rows.append({"devices": processes, "processes": processes} | figures | {"speedup": speedup})
    single = [row for row in rows if row["processes"] == 1]
    headline = ", ".join(f"{row['devices']}: {row['clients_per_s']:.4g}" for row in single)
    headline = f"{config.workload}, cores: {cores()}, clients/s by devices: {headline}"
    if config.processes:
        apiece = ", ".join(
            f"{row['processes']}: {row['clients_per_s']:.4g}"
            for row in rows
            if row["processes"] > 1
        )
        headline += f"; by processes: {apiece}"
    figure, (axes,) = chart()
    counts = [row["devices"] for row in single]
    axes.plot(
        counts, [row["clients_per_s"] for row in single], marker="o", label="devices of one process"
    )
    several = [row for row in rows if row["processes"] > 1]
    if several:
        x, y = ([row[name] for row in several] for name in ("processes", "clients_per_s"))
        axes.plot(x, y, marker="s", label="processes of one device")
    line = [min(count, cores()) * rows[0]["clients_per_s"] / counts[0] for count in counts]
    axes.plot(counts, line, linestyle="--", color="grey", label=f"in proportion (cores: {cores()})")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, map(str, counts), minor=False)
    axes.set(xlabel="CPU devices", ylabel="clients per second", title=config.workload)
    from_zero(axes)
    axes.legend()
    finish(config, f"scaling_{config.workload}", headline, rows, figure)


def measure(workload: Name, clients: int, repeats: int) -> dict[str, float]:
    """Return figures of a round on all devices: seconds, speed, share of the peak, and memory."""
    work = dataclasses.replace(WORKLOADS[workload], clients=clients)
    population = place(clients_of(*examples_of(work)))
    product, flops = matrix_product(population)
    compiled = compile_round(algorithm_of(work), population, 1)
    seconds = in_turn({"round": compiled.run, "product": product}, repeats)
    middle = medians(seconds)
    return {
        "median_s": middle["round"],
        "clients_per_s": clients / middle["round"],
        "peak_gflop_per_s": flops / middle["product"] / 1e9,
        "share_of_peak": round_flops(work) / flops * ratio(seconds["product"], seconds["round"]),
        "temporary_mb": compiled.temporary_mb,
    }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
