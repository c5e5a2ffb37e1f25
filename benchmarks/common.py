"""Timing in turn, separate processes, facts of the machine, and results as table, JSON and PNG."""

import dataclasses
import datetime
import functools
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from jaxfl._support.backend import cores
from jaxfl._support.files import write_json

OUT = pathlib.Path("runs/benchmarks")
"""Default folder of a benchmark's files."""

Row = Mapping[str, Any]
"""A line of a table: values before formatting, by the names of the columns."""


def in_turn(
    programs: Mapping[str, Callable[[], Any]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time programs in `repeats` turns, after one call of each program to warm up.

    The programs take turns, because a machine's speed drifts.

    Args:
        programs: Functions without arguments, by name.
        repeats: Number of timed turns.
        clock: Function that returns seconds.

    Returns:
        The seconds of each program in each timed turn, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats + 1):
        for name, program in programs.items():
            # Threads of another library stop spinning meanwhile.
            time.sleep(0.05)
            start = clock()
            jax.block_until_ready(program())
            if repeat:
                seconds[name].append(clock() - start)
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median seconds of each program, by name."""
    return {name: float(np.median(values)) for name, values in seconds.items()}


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """Return the median over turns of `seconds` / `reference`.

    Drifts of the machine's speed cancel in a turn's ratio.
    """
    return float(np.median(np.array(seconds) / np.array(reference)))


def busy_clock() -> Callable[[], float]:
    """Return a clock of processor time on a CPU, and of wall time on an accelerator.

    Other processes hardly disturb processor time, but a processor only waits for an accelerator.
    """
    return time.process_time if jax.default_backend() == "cpu" else time.perf_counter


def apart(
    function: Callable[..., Any],
    *arguments: Any,
    processes: int = 1,
    timeout: float | None = None,
    **environment: str,
) -> Any:
    """Call a module-level function in a new process, and return its value.

    Args:
        function: Function from JSON values to a JSON value.
        arguments: Arguments of the function.
        processes: Number of processes that share the machine and all call the function. If there
            are several, `jaxfl launch` starts them, and the value is that of the first.
        timeout: Seconds after which the process is stopped. None sets no limit.
        environment: Environment variables, which add to those of this process or replace them.

    Raises:
        RuntimeError: The process failed. The message has the end of its error output.
        subprocess.TimeoutExpired: The process took too long.
    """
    # Only `__spec__` has the real name of a module that runs as `__main__`.
    module = function.__globals__["__spec__"].name
    launch = ["-m", "jaxfl", "launch", "--processes", str(processes)] if processes > 1 else []
    call = ["-m", __name__, module, function.__name__, json.dumps(arguments)]
    command = [sys.executable, *launch, *call]
    environment = os.environ | environment
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=timeout,
    )
    if done.returncode:
        words = done.stderr.strip()[-2000:]
        raise RuntimeError(
            f"{module}.{function.__name__}{arguments} ended with {done.returncode}: {words}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def cold_and_warm(call: Callable[..., Any]) -> dict[str, Any]:
    """Return a call's values with an empty compilation cache on disk, and with the filled cache.

    Args:
        call: Function that starts a process. Its keywords are environment variables.

    Returns:
        The values as `cold` and `warm`.
    """
    with tempfile.TemporaryDirectory() as folder:
        start = functools.partial(
            call,
            JAX_COMPILATION_CACHE_DIR=folder,
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        return {state: start() for state in ("cold", "warm")}


@functools.cache
def machine() -> dict[str, Any]:
    """Return facts of processor, system, JAX's devices and versions, by name.

    The call starts JAX's backend.
    """
    device, name = jax.devices()[0], platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists() and (line := re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text())):
        name = line[1]
    versions = {
        package: importlib.metadata.version(package) for package in ("jax", "jaxlib", "numpy")
    }
    here = {
        "cpu": name,
        "cores": cores(),
        "device": device.device_kind,
        "devices": jax.device_count(),
    }
    return here | {"system": platform.platform(), "python": platform.python_version()} | versions


def chart(width: float = 8, height: float = 4, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return an empty figure of a size in inches, and its panels from left to right."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def from_zero(axes: Axes) -> None:
    """Start the vertical axis at 0, with room above the data."""
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])


def bars(values: Mapping[str, float], label: str, title: str) -> Figure:
    """Return a figure with a horizontal bar for each value, the first on top.

    Args:
        values: Lengths of the bars by name. A bar shows both.
        label: Label of the horizontal axis.
        title: Title of the figure.
    """
    figure, (axes,) = chart(9, 1.4 + 0.35 * len(values))
    drawn = axes.barh(list(values), list(values.values()))
    axes.bar_label(
        drawn,
        [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values.values()],
        padding=3,
    )
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.set(xlabel=label, title=title)
    return figure


def finish(
    config: Any,
    name: str,
    headline: str,
    rows: Sequence[Row],
    figure: Figure,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Print the table of a benchmark, and write its JSON and PNG into `config.out`.

    Args:
        config: Resolved settings, a dataclass with the folder `out`.
        name: Name of the files.
        headline: Result in one line, which is also the table's title.
        rows: Rows of the table. The first one names the columns.
        figure: Figure with everything drawn.
        facts: Further values for the JSON.
    """
    table = Table(*rows[0], title=f"{name}: {headline}")
    for row in rows:
        table.add_row(
            *(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())
        )
    Console(width=150).print(table)
    settings = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    figures = {
        "headline": headline,
        "settings": settings,
        "machine": machine(),
        "rows": [dict(row) for row in rows],
    }
    figures["date"] = datetime.date.today().isoformat()
    config.out.mkdir(parents=True, exist_ok=True)
    write_json(config.out / f"{name}.json", figures | dict(facts or {}))
    figure.savefig(config.out / f"{name}.png", dpi=120)


if __name__ == "__main__":
    # `apart` starts this command.
    module, name, arguments = sys.argv[1:]
    print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(arguments))))
