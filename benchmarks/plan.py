"""What each workload's round needs of chips that are not there: compiled for them, not run.

python -m benchmarks.plan

Bytes and kernels are those of the optimized program's local steps, with their share of the loops around them. On a TPU
the compiler counts cycles; for a GPU a bound stands in their place, the larger of bytes at the memory's full speed and
operations at the chip's peak. Without a device a compiler tunes nothing: tiles may change there, kernels and bytes
less. Needs `pip install jaxfl[plan-tpu,plan-gpu]`; a chip whose compiler is absent is left out, with a word.

With `--check`, figures are compared with those in a folder, and a growth by more than a tenth ends with an error.
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
from benchmarks.workloads import WORKLOADS, Name, Workload, algorithm_of
from jaxfl.chips import CHIPS, run_here
from jaxfl.engine.ahead import footprint
from jaxfl.local.train import blocks_of
from jaxfl.types import Clients

GROWTH = 1.1
"""Beyond which a check fails."""
CHECKED = ("kernels", "megabytes", "memory_mb", "microseconds")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile."""

    chips: tuple[str, ...] = ("v5e", "h100")
    workloads: tuple[Name, ...] = ("lenet", "mlp", "feddpa", "resnet20")
    chunk: int = 128
    """Clients vectorised at a time."""
    clients: int = 10_000
    check: pathlib.Path | None = None
    """A folder with an earlier `plan.json`."""
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Compile each workload for each chip, in processes of their own."""
    run_here()
    rows: list[dict[str, Any]] = []
    for chip in config.chips:
        for workload in config.workloads:
            found = apart(measure, chip, workload, config.chunk, config.clients, JAX_PLATFORMS="cpu")
            if "error" in found:
                print(found["error"])
                break
            rows.append({"chip": chip, "workload": workload} | found)
    if not rows:
        raise ValueError(f"chips={config.chips!r}: none has its compiler here, pip install 'jaxfl[plan-tpu,plan-gpu]'")
    first = rows[0]
    headline = f"{first['workload']} on {first['chip']}: planned {first['microseconds']:.3g} us a client-step"
    drawn = {f"{row['workload']}, {row['chip']}": row["microseconds"] for row in rows}
    figure = bars(drawn, "microseconds of a client's local step, planned", "compiled, not run")
    if config.check is not None:
        _check(rows, json.loads((config.check / "plan.json").read_text())["rows"])
    finish(config, "plan", headline, rows, figure)


def measure(chip: str, workload: Name, chunk: int, clients: int) -> dict[str, Any]:
    """Figures of one program, or the error of a compiler that is not there."""
    work = WORKLOADS[workload]
    steps, blocks = blocks_of(work.examples, work.batch_size)[::-1]
    begun = time.perf_counter()
    try:
        trips = (steps, blocks, 2 if work.feddpa else 1)
        found = footprint(chip, algorithm_of(work), shapes_of(work, clients), chunk=chunk, trips=trips)
    except ValueError as error:
        if chip in CHIPS and "compiler" in str(error):
            return {"error": str(error)}
        raise
    return {
        "kernels": found.kernels,
        "megabytes": found.bytes / 1e6,
        "megaflops": found.flops / 1e6,
        "bandwidth_us": found.bandwidth_us,
        "compute_us": found.compute_us,
        "microseconds": found.microseconds,
        "memory_mb": found.memory / 1e6,
        "largest_chunk": found.largest_chunk,
        "compile_s": time.perf_counter() - begun,
    }


def shapes_of(work: Workload, clients: int) -> Clients:
    """Clients of a workload without their data."""
    count, width = clients * work.examples, work.examples
    struct = jax.ShapeDtypeStruct
    arrays: list[Any] = [
        struct((count, *work.input_shape), np.uint8), struct((count,), np.int32),
        struct((clients, width), np.int32), struct((clients,), np.int32),
        struct((clients, 1), np.int32), struct((clients,), np.int32),
    ]  # fmt: skip
    return Clients(*arrays)


def _check(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> None:
    """Require figures that have grown by a tenth at most."""
    known = {(row["chip"], row["workload"]): row for row in before}
    for row in rows:
        for name in CHECKED:
            old = known[row["chip"], row["workload"]][name]
            if row[name] > GROWTH * old:
                raise ValueError(
                    f"{name} of {row['workload']} on {row['chip']} has grown from {old:.4g} to {row[name]:.4g}: find "
                    "out why, or commit the new figures"
                )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
