"""Estimates of each workload's round on a chip that this machine lacks, from a compiled program.

python -m benchmarks.plan --chip h100

Bytes and kernels are those of the optimised program's local steps, with their share of the loops
around them. The kernels in the step itself are also counted separately. A TPU's compiler counts
cycles. For a GPU the time is the larger of bytes at the memory's full speed and operations at the
chip's peak in float32 without tensor cores, which JAX's default precision exceeds. Without a device
a compiler tunes nothing, so tiles may change on the device, and kernels and bytes change less. The
benchmark needs the chip's compiler: `pip install jaxfl[plan-tpu]` or `jaxfl[plan-gpu]`.

Earlier results in `--out` stay for workloads that are not requested. A row has the chunks that were
tried. With `--check`, results are compared with those in a folder, at the chunks chosen there. A
growth by more than a tenth raises an error.
"""

import dataclasses
import json
import pathlib
import time
from typing import Any

import jax
import numpy as np
import tyro

from benchmarks.common import OUT, apart, bars, finish
from benchmarks.workloads import WORKLOADS, Name, Workload, algorithm_of, model_of
from jaxfl._support.backend import Form
from jaxfl.local.train import blocks_of
from jaxfl.types import Clients, Lists
from tools.footprint.ahead import abstract_population, footprint, step_flops
from tools.footprint.chips import device_of, run_here

GROWTH = 1.1
"""Ratio of new to old values above which a check fails."""
CHECKED = ("kernels", "megabytes", "memory_mb", "microseconds")
"""Columns that a check compares."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    chip: str = "h100"
    """One of `tools.footprint.chips.CHIPS`."""
    workloads: tuple[Name, ...] = ("lenet", "mlp", "feddpa", "resnet20", "pfl_cnn")
    form: Form | None = None
    """Form of convolutions. None takes the chip's default."""
    chunks: tuple[int, ...] = (128,)
    """Clients vectorised at a time. The result is that of the chunk with the fastest step."""
    clients: int = 1000
    check: pathlib.Path | None = None
    """Folder with earlier results to compare with. None compares nothing."""
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Compile each workload for the chip in a process of its own, and print the estimates.

    Raises:
        ValueError: `check` lacks a result of a workload, or a value has grown by more than a tenth.
    """
    run_here()
    name = f"plan_{config.chip}" + (f"_{config.form}" if config.form else "")
    known: dict[str, dict[str, Any]] = (
        {} if config.check is None else _rows(config.check / f"{name}.json")
    )
    if config.check is not None and (
        missing := [work for work in config.workloads if work not in known]
    ):
        raise ValueError(
            f"check must have results of all workloads for {config.chip}, got {config.check} "
            f"without {missing[0]}. Leave out that workload."
        )
    rows: dict[str, dict[str, Any]] = {}
    for work in config.workloads:
        chunks = (known[work]["chunk"],) if work in known else config.chunks
        found = apart(
            measure, config.chip, work, config.form, chunks, config.clients, JAX_PLATFORMS="cpu"
        )
        rows[work] = {"workload": work} | found
    _check(rows, known)
    every = _rows(config.out / f"{name}.json") | rows
    whole = [every[work] for work in WORKLOADS if work in every]
    headline = (
        f"{config.chip}, planned: {whole[0]['workload']} {whole[0]['microseconds']:.3g} us a "
        "client-step"
    )
    drawn = {row["workload"]: row["microseconds"] for row in whole}
    figure = bars(
        drawn, "microseconds of a client's local step", f"compiled for {config.chip}, not run"
    )
    finish(config, name, headline, whole, figure)


def _rows(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a file by workload, or none if the file is missing."""
    return (
        {row["workload"]: row for row in json.loads(path.read_text())["rows"]}
        if path.exists()
        else {}
    )


def measure(
    chip: str, workload: Name, form: Form | None, chunks: tuple[int, ...], clients: int
) -> dict[str, Any]:
    """Return the estimates for the chunk with the fastest step, by column of the table."""
    work = WORKLOADS[workload]
    steps, blocks = blocks_of(work.examples, work.batch_size)[::-1]
    begun = time.perf_counter()
    trips = (steps, blocks, 2 if work.feddpa else 1)
    algorithm, population = algorithm_of(work, model=model_of(work, form)), shapes_of(work, clients)
    tried = (footprint(chip, algorithm, population, chunk=chunk, trips=trips) for chunk in chunks)
    found = min(tried, key=lambda one: one.microseconds)
    # The operations of a Pallas kernel do not appear as products of the program, but those of the
    # plain form do, and are as many.
    plain = algorithm_of(work, model=model_of(work, "lax"))
    operations = step_flops(plain, abstract_population(population, device_of(chip)))
    found = found._replace(flops=max(found.flops, operations))
    return {
        "chunk": found.chunk,
        "kernels": found.kernels,
        "in_step": found.in_step,
        "megabytes": found.bytes / 1e6,
        "megaflops": found.flops / 1e6,
        "bandwidth_us": found.bandwidth_us,
        "compute_us": found.compute_us,
        "microseconds": found.microseconds,
        "memory_mb": found.memory / 1e6,
        "held_mb": found.held / 1e6,
        "largest_chunk": found.largest_chunk,
        "tried": ", ".join(map(str, chunks)),
        "compile_s": time.perf_counter() - begun,
    }


def shapes_of(work: Workload, clients: int) -> Clients:
    """Return the clients of a workload as shapes, with data only for `train_size`."""
    count, struct = clients * work.examples, jax.ShapeDtypeStruct
    starts = struct((clients,), np.int32)
    arrays: list[Any] = [
        struct((count, *work.input_shape), np.uint8),
        struct((count,), np.int32),
        Lists(struct((count,), np.int32), starts),
        np.full(clients, work.examples, np.int32),
        Lists(struct((clients,), np.int32), starts),
        struct((clients,), np.int32),
    ]
    return Clients(*arrays)


def _check(rows: dict[str, dict[str, Any]], known: dict[str, dict[str, Any]]) -> None:
    """Require that the values in `CHECKED` have grown by at most a tenth since `known`."""
    for work in rows.keys() & known.keys():
        for name in CHECKED:
            old, new = known[work][name], rows[work][name]
            if new > GROWTH * old:
                raise ValueError(
                    f"{name} of {work} must be at most {GROWTH:g} times {old:.4g}, got {new:.4g}. "
                    "Find the cause, or commit the new results."
                )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
