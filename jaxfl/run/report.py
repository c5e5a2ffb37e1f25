"""The run folder, progress, and curves."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxfl.files import replacing, write_json

_LOG = logging.getLogger("jaxfl")

CONFIG, METRICS, PER_CLIENT, PRIVACY, CURVES, AUDIT, CHECKPOINTS, STATES, NOISE_KEY = (
    "config.json", "metrics.jsonl", "per_client.npz", "privacy.json", "curves.png", "audit.npz", "ckpt", "states",
    "noise.key",
)  # fmt: skip


def run_folder(root: str | os.PathLike, method: str, config: Any, seed: int) -> pathlib.Path:
    """Make `<root>/<method>/<hash>/seed=<n>/` with `config.json`; the hash is of the configuration without the seed.

    Args:
        root: folder of all runs.
        method: name of the algorithm; a folder's name.
        config: a frozen dataclass or a mapping, of JSON values, paths, arrays, and dataclasses of such.
        seed: seed of this run.

    Raises:
        ValueError: a name that leads elsewhere, a seed that is not a whole number, or a value of another kind.
    """
    if not isinstance(method, str) or method in ("", ".", "..") or re.search(r"[/\\\x00-\x1f]", method):
        raise ValueError(f"method={method!r}: give the name of a folder, without a slash")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ValueError(f"seed={seed!r}: give a whole number")
    values = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)
    values.pop("seed", None)
    text = json.dumps({"method": method} | values, sort_keys=True, default=_json)
    folder = pathlib.Path(root) / method / hashlib.sha256(text.encode()).hexdigest()[:10] / f"seed={seed}"
    folder.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0 and os.access(folder, os.W_OK):
        write_json(folder / CONFIG, json.loads(text) | {"seed": int(seed)})
    return folder


def clear(folder: pathlib.Path, points: bool) -> None:
    """Remove the client states and reports of a run, or of a sweep's points, which have numbered subfolders."""
    if jax.process_index() != 0:
        return
    shutil.rmtree(folder / STATES, ignore_errors=True)
    (folder / NOISE_KEY).unlink(missing_ok=True)
    for run in [path for path in folder.glob("[0-9]*") if path.is_dir()] if points else [folder]:
        for name in (METRICS, PER_CLIENT, PRIVACY, CURVES, AUDIT):
            (run / name).unlink(missing_ok=True)
        if points and not any(run.iterdir()):
            run.rmdir()


def tell(text: str, shown: bool) -> None:
    """Print a text where progress is shown; otherwise log it."""
    if shown:
        rich.console.Console().print(text, highlight=False, markup=False, soft_wrap=True)
    else:
        _LOG.info("%s", text)


def draw_curves(path: pathlib.Path, title: str, rows: list[dict[str, Any]], headline: str = "accuracy") -> None:
    """The headline metric over clients, training loss, and epsilon so far, by round, as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rounds = np.array([row["round"] for row in rows])

    def column(name: str) -> np.ndarray:
        return np.array([row.get(name, math.nan) for row in rows], float)

    figure = Figure(figsize=(12, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    score, loss, epsilon = figure.subplots(1, 3)
    mean, spread, worst = (column(f"{headline}{suffix}") for suffix in ("", "_std", "_worst10"))
    share = not np.any((np.append(mean, worst) < 0) | (np.append(mean, worst) > 1))
    high = np.minimum(mean + spread, 1 if share else math.inf)
    score.fill_between(rounds, mean - spread, high, alpha=0.2, label="± std over clients")
    score.plot(rounds, mean, marker=".", label="mean over clients")
    score.plot(rounds, worst, marker=".", label="worst 10% of clients")
    score.set(title=title, xlabel="round", ylabel=f"test {headline}", ylim=(0, 1) if share else None)
    score.legend()
    if np.isfinite(column("train_loss")).any():
        loss.plot(rounds, column("train_loss"), marker=".", label="train, participants")
    loss.plot(rounds, column("loss"), marker=".", label="test, all clients")
    loss.set(xlabel="round", ylabel="loss")
    loss.legend()
    if np.isfinite(column("epsilon")).any():
        epsilon.plot(rounds, column("epsilon"), marker=".")
    else:
        epsilon.text(0.5, 0.5, "no finite epsilon", ha="center", transform=epsilon.transAxes)
    epsilon.set(xlabel="round", ylabel="epsilon so far (RDP, aggregate)")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Of Okabe and Ito: told apart by colour-blind readers too."""
_MARKERS = "osD^vPX*"


def draw_comparison(
    path: pathlib.Path, series: Mapping[str, Mapping[float, tuple[float, float]]], headline: str, sends: Collection[str]
) -> None:
    """A metric against epsilon, each method a curve of means with bars of one standard deviation over seeds.

    A method without noise is a horizontal line, dotted where it sends nothing. At most eight curves share a panel;
    every panel has all lines. Labels follow the curves' order at their right end.

    Args:
        path: its suffix is the format.
        series: for each method, (mean, standard deviation) by epsilon.
        headline: name of the metric.
        sends: methods that send something.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    finite = sorted({e for points in series.values() for e in points if math.isfinite(e)})
    places = {e: i for i, e in enumerate([*finite, math.inf])}
    curves = [name for name, points in series.items() if any(map(math.isfinite, points))]
    lines = [name for name in series if name not in curves]
    panels = [curves[i : i + 8] for i in range(0, len(curves), 8)] or [[]]
    figure = Figure(figsize=(4.5 * len(panels), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, names in zip(np.atleast_1d(figure.subplots(1, len(panels), sharey=True)), panels, strict=True):
        ends = []
        for i, name in enumerate(names):
            points = sorted(series[name].items())
            x, (mean, spread) = [places[e] for e, _ in points], zip(*(value for _, value in points), strict=True)
            style = {"color": _COLORS[i], "marker": _MARKERS[i], "markersize": 4, "capsize": 2, "linewidth": 1.2}
            axes.errorbar(x, mean, np.nan_to_num(spread), label=name, **style)
            ends.append((mean[-1], name))
        for i, name in enumerate(lines):
            ((mean, _),) = series[name].values()
            dash = "--" if name in sends else ":"
            axes.axhline(mean, color=str(0.25 + 0.15 * (i % 4)), linestyle=dash, linewidth=1.2, label=name)
            ends.append((mean, name))
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        order = [name for _, name in sorted(ends, key=lambda end: -np.nan_to_num(end[0]))]
        axes.legend([handles[name] for name in order], order, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        axes.set_xticks(list(places.values()), ["∞" if math.isinf(e) else f"{e:g}" for e in places])
        axes.set(xlabel="epsilon", xlim=(-0.3, len(places) - 0.7))
        axes.grid(alpha=0.25)
    figure.axes[0].set_ylabel(f"{headline}, mean ± std over seeds")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=160, format=path.suffix.removeprefix(".") or "png")


@contextlib.contextmanager
def progress_bar(name: str, rounds: int, show: bool) -> Iterator[Callable[[int, str], None]]:
    """A bar that `update(rounds_done, text)` moves."""
    bar, done, left = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    columns = (TextColumn(name), bar, done, left, TextColumn("{task.fields[text]}"))
    with Progress(*columns, disable=not show) as progress:
        task = progress.add_task(name, total=rounds, text="compiling")
        yield lambda done, text: progress.update(task, completed=done, text=text)


def _json(value: Any) -> Any:
    """Values that JSON lacks, in full: configurations that differ must not look alike."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        array = np.asarray(value)
        if array.size <= 1000:
            return array.tolist()
        digest = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
        return {"sha256": digest, "shape": array.shape, "dtype": array.dtype.name}
    raise ValueError(f"config holds {value!r}: give numbers, texts, arrays, paths, dataclasses, or lists of them")
