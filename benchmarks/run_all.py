"""Most benchmarks, each in a process of its own, and a table of their results.

python -m benchmarks.run_all --quick

The benchmarks `whole_run`, `plan` and `accelerator` are left out, and so is `modules` without
`--vs`.
"""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.common import OUT
from benchmarks.workloads import WORKLOADS


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the command."""

    quick: bool = False
    """Whether to run fewer benchmarks, sizes and repeats."""
    vs: Literal["torch"] | None = None
    """Library whose equal loop is timed for comparison (extra `[bench]`)."""
    out: pathlib.Path = OUT
    """Folder for the tables as JSON, and for PNGs."""


def jobs(quick: bool, vs: str | None) -> dict[str, list[str]]:
    """Return the arguments after `python` of each benchmark, by the name of its files.

    Args:
        quick: Whether to leave out benchmarks, sizes and repeats.
        vs: Library whose equal loop is timed too. None stands for no library.
    """
    beside = ["--vs", vs] if vs else []
    options_of = {
        f"throughput_{name}": ["throughput", "--workload", name, *beside] for name in WORKLOADS
    }
    options_of |= {
        "chunks_lenet": ["chunks"],
        "memory_lenet": ["memory"],
        "scaling_lenet": ["scaling"],
        "population": ["population"],
        "compiling": ["compiling"],
        "waiting": ["waiting"],
        "round": ["round"],
    }
    if vs:
        options_of["modules"] = ["modules"]
    if quick:
        for name in WORKLOADS:
            options_of[f"throughput_{name}"] += ["--repeats", "5"]
        options_of["chunks_lenet"] += [
            "--population",
            "64",
            "--chunks",
            "1",
            "8",
            "32",
            "--cohorts",
            "16",
            "--repeats",
            "3",
        ]
        options_of["memory_lenet"] += [
            "--cohorts",
            "50",
            "2000",
            "--examples",
            "32",
            "--steps",
            "1",
        ]
        options_of["scaling_lenet"] += [
            "--devices",
            "1",
            "2",
            "8",
            "--processes",
            "2",
            "--repeats",
            "3",
        ]
        options_of["population"] += [
            "--populations",
            "2000",
            "100000",
            "--cohorts",
            "200",
            "--turns",
            "3",
        ]
        options_of["compiling"] += ["--workloads", "lenet", "mlp"]
        options_of["waiting"] += ["--turns", "1"]
        options_of["round"] += ["--workloads", "lenet", "feddpa", "--repeats", "5"]
    else:
        options_of |= {
            name: [name]
            for name in ("top_k", "leakage", "per_example", "sweep", "mechanisms", "lora")
        }
        options_of["text"] = ["text", *beside]
    return {
        name: ["-m", f"benchmarks.{module}", *options]
        for name, (module, *options) in options_of.items()
    }


def run(jobs: Mapping[str, Sequence[str]], out: pathlib.Path) -> int:
    """Run jobs one after the other, and print the result of each.

    Args:
        jobs: Arguments after `python` by name. A job writes a JSON file of this name into `out`,
            with the result's `headline`.
        out: Folder of the files.

    Returns:
        1 if a job failed or wrote no file, or else 0.
    """
    table, failed = Table("benchmark", "seconds", "result"), []
    for name, arguments in jobs.items():
        print(f"== {name}", flush=True)
        path = out / f"{name}.json"
        # An older result must not count as this one.
        path.unlink(missing_ok=True)
        start = time.monotonic()
        ended = subprocess.run(
            [sys.executable, *arguments, "--out", str(out)], check=False
        ).returncode
        result = f"failed, exit status {ended}"
        if ended == 0 and path.exists():
            result = json.loads(path.read_text())["headline"]
        else:
            failed.append(name)
        table.add_row(name, f"{time.monotonic() - start:.0f}", result)
    Console(width=150).print(table)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def main(config: Config) -> int:
    """Run the benchmarks of `jobs`, and return 1 if one failed, or else 0.

    Raises:
        ValueError: PyTorch is requested, but not installed.
    """
    if config.vs and importlib.util.find_spec("torch") is None:
        raise ValueError(
            f"vs must be left out without PyTorch, got {config.vs!r}. Run "
            "pip install -e '.[bench]', or leave out --vs."
        )
    if not config.vs:
        print("PyTorch is not compared. Give --vs torch to compare it (extra [bench]).")
    return run(jobs(config.quick, config.vs), config.out)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Config, description=__doc__)))
