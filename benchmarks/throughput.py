"""Client updates per second of a federated round without compilation, compared with PyTorch.

python -m benchmarks.throughput --workload lenet --vs torch
"""

import dataclasses
import importlib.util
import pathlib
import resource
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import tyro

from benchmarks.bare import bare_round, fisher_cost
from benchmarks.common import OUT, bars, cores, finish, in_turn, medians, ratio
from benchmarks.workloads import (
    WORKLOADS,
    Name,
    Workload,
    algorithm_of,
    clients_of,
    compile_round,
    examples_of,
    matrix_product,
    model_of,
    round_flops,
    usual_chunk,
)
from jaxfl.engine.mesh import place


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workload: Name = "lenet"
    clients: int | None = None
    """Number of clients. None takes that of the workload."""
    chunk: int | None = None
    """Clients vectorised at a time on each device. None takes `usual_chunk`, 1 on a CPU."""
    devices: int | None = None
    """Number of devices. None takes all, which on a CPU is one per core."""
    repeats: int = 7
    """Number of timed rounds of each kind, taken in turn, at least 5."""
    vs: Literal["torch"] | None = None
    """Library whose equal loop runs in turn (extra `[bench]`), on its accelerator if it has one."""
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Time the rounds in turn with a matrix product, and print medians and shares of its rate.

    PyTorch's rounds in two processes are timed after the turns.

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
    work = WORKLOADS[config.workload]
    work = dataclasses.replace(work, clients=config.clients or work.clients)
    inputs, labels = examples_of(work)
    population, model = (
        place(clients_of(inputs, labels), jax.devices()[: config.devices]),
        model_of(work),
    )
    chunk = config.chunk or usual_chunk(algorithm_of(work), population)
    compiled = compile_round(algorithm_of(work), population, chunk)
    product, product_flops = matrix_product(population)
    rounds: dict[str, Callable[[], Any]] = {"matrix product": product, "jaxfl": compiled.run}
    if not work.feddpa:
        steps = (work.batch_size, work.steps, chunk)
        rounds["bare local training"] = bare_round(model, population, inputs, labels, *steps)
    if config.vs == "torch":
        rounds |= _torch_rounds(work, inputs, labels)
    seconds = in_turn(rounds, config.repeats)
    peak = seconds.pop("matrix product")
    if "torch, cpu" in rounds and not work.feddpa:
        seconds["torch, 2 processes"] = _torch_processes(work, inputs, labels, config.repeats)
    ratios = {name: ratio(values, seconds["jaxfl"]) for name, values in seconds.items()}
    flops = round_flops(work)
    shares = {name: flops / product_flops * ratio(peak, values) for name, values in seconds.items()}
    rows = [
        {
            "round": name,
            "median_s": median,
            "min_s": min(seconds[name]),
            "max_s": max(seconds[name]),
            "clients_per_s": work.clients / median,
            "client_steps_per_s": work.clients * work.steps / median,
            "gflop_per_s": flops / median / 1e9,
            "share_of_peak": shares[name],
            "over_jaxfl": ratios[name],
        }
        for name, median in medians(seconds).items()
    ]
    facts = {
        "workload": dataclasses.asdict(work),
        "chunk": chunk,
        "compile_s": compiled.compile_s,
        "temporary_mb": compiled.temporary_mb,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "model_flops": flops,
        "peak_gflop_per_s": product_flops / medians({"": peak})[""] / 1e9,
        "fisher_over_gradient": fisher_cost(
            model, inputs[0], labels[0], work.batch_size, config.repeats
        ),
        "seconds": seconds,
    }
    print(
        f"{config.workload}: {work.clients} clients, {work.steps} steps, batch {work.batch_size}, "
        f"chunk {chunk}; compile {compiled.compile_s:.2f} s, temporaries "
        f"{compiled.temporary_mb:.0f} MB, peak of the process {facts['peak_mb']:.0f} MB; exact "
        f"Fisher diagonal: {facts['fisher_over_gradient']:.2f} plain gradients; matrix products: "
        f"{facts['peak_gflop_per_s']:.0f} GFLOP/s"
    )
    headline = (
        f"{rows[0]['clients_per_s']:.4g} clients/s, {100 * shares['jaxfl']:.0f}% of the "
        "matrix-product peak"
    )
    for name, times in ratios.items():
        if name == "bare local training":
            headline += f", {100 * (1 / times - 1):+.1f}% over bare training"
        elif name != "jaxfl":
            headline += f", {times:.2f} x {name}"
    speeds = {row["round"]: row["clients_per_s"] for row in rows}
    title = f"{config.workload}: {100 * shares['jaxfl']:.0f}% of the matrix-product peak"
    finish(
        config,
        f"throughput_{config.workload}",
        headline,
        rows,
        bars(speeds, "clients per second", title),
        facts,
    )


def _torch_rounds(
    work: Workload, inputs: np.ndarray, labels: np.ndarray
) -> dict[str, Callable[[], None]]:
    from benchmarks import pytorch

    device = pytorch.best_device(cores())
    data = torch_tensors(inputs, labels, device)

    def round_of(**options: Any) -> Callable[[], None]:
        network = pytorch.NETWORKS[work.model](work.input_shape).to(device)
        personal = [[w.detach().clone() for w in network.parameters()] for _ in range(work.clients)]

        def run() -> None:
            if work.feddpa:
                pytorch.feddpa_round(
                    network, personal, *data, batch_size=work.batch_size, **options
                )
            else:
                pytorch.fedavg_round(network, *data, batch_size=work.batch_size, steps=work.steps)
            pytorch.wait(device)

        return run

    rounds = {f"torch, {device}": round_of()}
    return (
        rounds | {f"torch, {device}, Fisher as published": round_of(published=True)}
        if work.feddpa
        else rounds
    )


def torch_tensors(inputs: np.ndarray, labels: np.ndarray, device: str = "cpu") -> tuple[Any, Any]:
    """Return normalised images `[C, N, channels, H, W]` and labels `[C, N]` as tensors."""
    from benchmarks import pytorch

    return pytorch.tensors(_floats(inputs), labels, device)


def _torch_processes(
    work: Workload, inputs: np.ndarray, labels: np.ndarray, repeats: int
) -> list[float]:
    from benchmarks import pytorch

    options = {"batch_size": work.batch_size, "steps": work.steps, "input_shape": work.input_shape}
    return pytorch.two_processes(work.model, _floats(inputs), labels, rounds=repeats, **options)


def _floats(inputs: np.ndarray) -> np.ndarray:
    """Return bytes scaled to [-1, 1]. This is outside the timing, in PyTorch's favour."""
    return inputs.astype(np.float32) * np.float32(2 / 255) - 1


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
