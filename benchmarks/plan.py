"""What each workload's round needs of a chip that is not there: compiled for it, not run.

python -m benchmarks.plan --chip h100

Bytes and kernels are those of the optimized program's local steps, with their share of the loops around them; of the
kernels, those in the step itself are counted apart, too. On a TPU the compiler counts cycles; for a GPU a bound stands
in their place, the larger of bytes at the memory's full speed and operations at the chip's peak. Without a device a
compiler tunes nothing: tiles may change there, kernels and bytes less. Needs the chip's compiler:
`pip install jaxfl[plan-tpu]` or `jaxfl[plan-gpu]`.

Figures of workloads that `--out` has from before and that are not asked for stay there; a row says which chunks were
tried. With `--check`, figures are compared with those in a folder, at the chunks chosen there: a growth by over a
tenth ends with an error.
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
from jaxfl.backend import Form
from jaxfl.chips import device_of, run_here
from jaxfl.engine.ahead import described, footprint, step_flops
from jaxfl.local.train import blocks_of
from jaxfl.types import Clients, Lists

GROWTH = 1.1
"""Beyond which a check fails."""
CHECKED = ("kernels", "megabytes", "memory_mb", "microseconds")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile."""

    chip: str = "h100"
    """One of `jaxfl.chips.CHIPS`."""
    workloads: tuple[Name, ...] = ("lenet", "mlp", "feddpa", "resnet20", "pfl_cnn")
    form: Form | None = None
    """Of convolutions; None: the one that the chip gets by itself."""
    chunks: tuple[int, ...] = (128,)
    """Clients vectorised at a time: of several, the one whose step is the fastest."""
    clients: int = 1000
    check: pathlib.Path | None = None
    """A folder with earlier figures."""
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Compile each workload for each chip, in processes of their own."""
    run_here()
    name = f"plan_{config.chip}" + (f"_{config.form}" if config.form else "")
    known: dict[str, dict[str, Any]] = (
        {} if config.check is None else _rows(config.check / f"{name}.json")
    )
    if config.check is not None and (
        missing := [work for work in config.workloads if work not in known]
    ):
        raise ValueError(
            f"check={config.check} has no figures of {missing[0]} for {config.chip}: leave it out"
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
    headline = f"{config.chip}, planned: {whole[0]['workload']} {whole[0]['microseconds']:.3g} us a client-step"
    drawn = {row["workload"]: row["microseconds"] for row in whole}
    figure = bars(
        drawn, "microseconds of a client's local step", f"compiled for {config.chip}, not run"
    )
    finish(config, name, headline, whole, figure)


def _rows(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """By workload; none of a file that is not there."""
    return (
        {row["workload"]: row for row in json.loads(path.read_text())["rows"]}
        if path.exists()
        else {}
    )


def measure(
    chip: str, workload: Name, form: Form | None, chunks: tuple[int, ...], clients: int
) -> dict[str, Any]:
    """Figures of the program of the fastest chunk."""
    work = WORKLOADS[workload]
    steps, blocks = blocks_of(work.examples, work.batch_size)[::-1]
    begun = time.perf_counter()
    trips = (steps, blocks, 2 if work.feddpa else 1)
    algorithm, population = algorithm_of(work, model=model_of(work, form)), shapes_of(work, clients)
    tried = (footprint(chip, algorithm, population, chunk=chunk, trips=trips) for chunk in chunks)
    found = min(tried, key=lambda one: one.microseconds)
    if form == "pallas":  # a kernel's operations show in no product
        plain = algorithm_of(work, model=model_of(work, "lax"))
        found = found._replace(flops=step_flops(plain, described(population, device_of(chip))))
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
    """Clients of a workload without their data."""
    count, struct = clients * work.examples, jax.ShapeDtypeStruct
    starts = struct((clients,), np.int32)
    arrays: list[Any] = [
        struct((count, *work.input_shape), np.uint8), struct((count,), np.int32),
        Lists(struct((count,), np.int32), starts), np.full(clients, work.examples, np.int32),
        Lists(struct((clients,), np.int32), starts), struct((clients,), np.int32),
    ]  # fmt: skip
    return Clients(*arrays)


def _check(rows: dict[str, dict[str, Any]], known: dict[str, dict[str, Any]]) -> None:
    """Require figures that have grown by a tenth at most."""
    for work in rows.keys() & known.keys():
        for name in CHECKED:
            old, new = known[work][name], rows[work][name]
            if new > GROWTH * old:
                raise ValueError(
                    f"{name} of {work} has grown from {old:.4g} to {new:.4g}: find out why, or commit the new figures"
                )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
