"""Client updates per second of one federated round, compile time apart, beside an equal PyTorch loop.

python -m benchmarks.throughput --workload lenet --vs torch
"""

import dataclasses
import json
import os
import pathlib
import platform
import resource
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
import optax
import tyro

from benchmarks.bare import bare_round, fisher_cost
from jaxfl.algorithms import dp_fedavg, feddpa
from jaxfl.data import from_arrays, make_clients
from jaxfl.engine import Population, compile_rounds, initialize, place
from jaxfl.models import build
from jaxfl.privacy import Full
from jaxfl.types import Algorithm, Clients, Model


@dataclasses.dataclass(frozen=True)
class Workload:
    """One kind of round: every client takes `steps` SGD steps, or a whole FedDPA round."""

    model: str
    input_shape: tuple[int, int, int]
    clients: int
    examples: int
    batch_size: int
    steps: int


WORKLOADS = {
    "lenet": Workload("lenet", (32, 32, 3), clients=50, examples=320, batch_size=32, steps=10),
    "mlp": Workload("mlp", (28, 28, 1), clients=200, examples=320, batch_size=32, steps=10),
    "feddpa_cnn": Workload("feddpa_cnn", (32, 32, 3), clients=10, examples=128, batch_size=16, steps=32),
    "resnet20": Workload("resnet20", (32, 32, 3), clients=4, examples=96, batch_size=32, steps=3),
    "feddpa": Workload("feddpa_cnn", (32, 32, 3), clients=10, examples=128, batch_size=16, steps=32),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to time."""

    workload: Literal["lenet", "mlp", "feddpa_cnn", "resnet20", "feddpa"] = "lenet"
    clients: int | None = None
    """Number of clients (default: the workload's)."""
    chunk: int = 1
    """Clients vectorised at a time on each device."""
    devices: int | None = None
    """How many devices (default: all; on a CPU one per core)."""
    repeats: int = 7
    """Timed rounds of each kind, taken in turn; at least 5."""
    vs: Literal["torch"] | None = None
    """Also run an equal PyTorch loop in turn (extra `[bench]`)."""
    json: pathlib.Path | None = None
    """Write all figures there."""


def main(config: Config) -> dict[str, Any]:
    """Time the rounds in turn and print medians."""
    if config.repeats < 5:
        raise ValueError(f"repeats={config.repeats!r}: give at least 5, medians of fewer say little")
    work = WORKLOADS[config.workload]
    work = dataclasses.replace(work, clients=config.clients or work.clients)
    inputs, labels = _examples(work)
    model = build(work.model, work.input_shape, 10)
    algorithm = _algorithm(config.workload, work, model)
    population = place(_clients(work, inputs, labels), jax.devices()[: config.devices])
    run, compile_seconds, temporary = _compiled(algorithm, population, config.chunk)
    rounds: dict[str, Callable[[], None]] = {"jaxfl": run}
    if config.workload != "feddpa":
        rounds["bare local training"] = bare_round(model, population, inputs, labels, work.batch_size, work.steps)
    if config.vs == "torch":
        rounds["torch"] = _torch_round(config.workload, work, inputs, labels)
        if config.workload == "feddpa":
            rounds["torch, Fisher as published"] = _torch_round(config.workload, work, inputs, labels, published=True)
    seconds = _in_turn(rounds, config.repeats)
    if config.vs == "torch" and config.workload != "feddpa":
        seconds["torch, 2 processes"] = _torch_processes(work, inputs, labels, config.repeats)
    figures = {
        "workload": config.workload,
        "clients": work.clients,
        "steps": work.steps,
        "batch_size": work.batch_size,
        "chunk": config.chunk,
        "compile_s": compile_seconds,
        "temporary_mb": temporary,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "fisher_over_gradient": fisher_cost(model, inputs[0], labels[0], work.batch_size, config.repeats),
        "rounds": {name: _summary(values, work) for name, values in seconds.items()},
        "over_jaxfl": {name: _ratio(values, seconds["jaxfl"]) for name, values in seconds.items() if name != "jaxfl"},
        "machine": _machine(population),
    }
    _print(figures)
    if config.json is not None:
        config.json.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def _examples(work: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Random images [C, N, H, W, channels] as bytes, and labels [C, N]: speed does not depend on what they show."""
    rng = np.random.default_rng(0)
    shape = (work.clients, work.examples)
    return rng.integers(0, 256, (*shape, *work.input_shape), np.uint8), rng.integers(0, 10, shape).astype(np.int32)


def _clients(work: Workload, inputs: np.ndarray, labels: np.ndarray) -> Clients:
    train = inputs.reshape(-1, *work.input_shape), labels.reshape(-1)
    lists = list(np.arange(labels.size).reshape(labels.shape))
    return make_clients(from_arrays(*train, train[0][:0], train[1][:0], classes=10), lists, [[]] * work.clients)


def _algorithm(name: str, work: Workload, model: Model) -> Algorithm:
    private: dict[str, Any] = {"clip": 1.0, "noise_multiplier": 1.0, "sampling": Full(), "batch_size": work.batch_size}
    if name == "feddpa":
        return feddpa(model, **private | {"clip": 0.5})
    return dp_fedavg(model, optimizer=optax.sgd(0.01), steps=work.steps, **private)


def _compiled(algorithm: Algorithm, population: Population, chunk: int) -> tuple[Callable[[], None], float, float]:
    """A function that runs one round, the seconds that compiling took, and its temporary memory in MB."""
    key = jax.random.key(0)
    state = list(initialize(key, algorithm, population))
    step = compile_rounds(algorithm, population, chunk=chunk, segment=1)
    start = time.perf_counter()
    program = step.func.lower(*step.args, key, 0, 1, *state).compile()  # pyrefly: ignore[missing-attribute]
    seconds = time.perf_counter() - start
    done = 0

    def run() -> None:
        nonlocal done
        state[:] = program(*step.args, key, done, 1, *state)[:2]
        jax.block_until_ready(state)
        done += 1

    return run, seconds, program.memory_analysis().temp_size_in_bytes / 1e6


def _torch_round(
    name: str, work: Workload, inputs: np.ndarray, labels: np.ndarray, published: bool = False
) -> Callable[[], None]:
    import torch

    from benchmarks import pytorch

    torch.set_num_threads(os.cpu_count() or 1)
    network = pytorch.NETWORKS[work.model](work.input_shape)
    data = pytorch.tensors(_floats(inputs), labels)
    if name == "feddpa":
        personal = [[w.detach().clone() for w in network.parameters()] for _ in range(work.clients)]
        options: dict[str, Any] = {"batch_size": work.batch_size, "published": published}
        return lambda: pytorch.feddpa_round(network, personal, *data, **options)
    return lambda: pytorch.fedavg_round(network, *data, batch_size=work.batch_size, steps=work.steps)


def _torch_processes(work: Workload, inputs: np.ndarray, labels: np.ndarray, repeats: int) -> list[float]:
    from benchmarks import pytorch

    options = {"batch_size": work.batch_size, "steps": work.steps, "input_shape": work.input_shape}
    return pytorch.two_processes(work.model, _floats(inputs), labels, rounds=repeats, **options)


def _floats(inputs: np.ndarray) -> np.ndarray:
    """Normalised once, outside the timing, in PyTorch's favour."""
    return inputs.astype(np.float32) * np.float32(2 / 255) - 1


def _in_turn(rounds: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each kind of round: one to warm up, then `repeats` times all of them in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for repeat in range(repeats + 1):
        for name, run in rounds.items():
            time.sleep(0.05)  # the other library's threads stop spinning
            start = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _summary(seconds: list[float], work: Workload) -> dict[str, float]:
    median = float(np.median(seconds))
    return {
        "median_s": median,
        "min_s": min(seconds),
        "max_s": max(seconds),
        "clients_per_s": work.clients / median,
        "client_steps_per_s": work.clients * work.steps / median,
    }


def _ratio(seconds: list[float], own: list[float]) -> float:
    """Median over turns: the two kinds of round lie side by side in time, whatever the machine's speed then is."""
    return float(np.median(np.array(seconds) / np.array(own)))


def _machine(population: Population) -> dict[str, Any]:
    device = population.mesh.devices.flat[0]
    names = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "device": device.device_kind}
    return names | {"devices": population.mesh.size, "jax": jax.__version__, "python": platform.python_version()}


def _print(figures: dict[str, Any]) -> None:
    rounds = figures["rounds"]
    print(
        f"{figures['workload']}: {figures['clients']} clients, {figures['steps']} steps, batch {figures['batch_size']}"
    )
    print(f"  compile {figures['compile_s']:.2f} s, temporaries {figures['temporary_mb']:.0f} MB, "
          f"peak of the process {figures['peak_mb']:.0f} MB; {figures['machine']}")  # fmt: skip
    for name, row in rounds.items():
        print(f"  {name:26s} median {row['median_s']:.4f} s ({row['min_s']:.4f} to {row['max_s']:.4f}), "
              f"{row['clients_per_s']:.1f} clients/s, {row['client_steps_per_s']:.0f} client-steps/s")  # fmt: skip
    for name, ratio in figures["over_jaxfl"].items():
        if name.startswith("torch"):
            print(f"  ratio to {name}: {ratio:.2f}")
        else:
            print(f"  clip, noise, gather, ledger: {100 * (1 / ratio - 1):+.1f}%")
    print(f"  exact Fisher diagonal: {figures['fisher_over_gradient']:.2f} plain gradients")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
