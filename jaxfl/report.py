"""The run folder, progress, and curves."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import rich.progress

CONFIG, METRICS, PER_CLIENT, PRIVACY, CURVES, CHECKPOINTS, STATES, NOISE_KEY = (
    "config.json", "metrics.jsonl", "per_client.npz", "privacy.json", "curves.png", "ckpt", "states", "noise.key",
)  # fmt: skip


def run_folder(root: str | os.PathLike, method: str, config: Any, seed: int) -> pathlib.Path:
    """Make `<root>/<method>/<hash>/seed=<n>/` with `config.json`; the hash is of the configuration without the seed.

    Args:
        root: folder of all runs.
        method: name of the algorithm.
        config: a frozen dataclass or a mapping of JSON values.
        seed: of this run.
    """
    values = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)
    values.pop("seed", None)
    text = json.dumps({"method": method} | values, sort_keys=True, default=str)
    folder = pathlib.Path(root) / method / hashlib.sha256(text.encode()).hexdigest()[:10] / f"seed={seed}"
    folder.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        write_json(folder / CONFIG, json.loads(text) | {"seed": seed})
    return folder


def write_json(path: pathlib.Path, value: Any, *, allow_nan: bool = True) -> None:
    """Write JSON atomically: a reader sees the old file or the new one, never half of one."""
    with _replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, allow_nan=allow_nan) + "\n")


def write_metrics(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    """Write all rows as JSON lines, atomically; a value that is not finite becomes null."""
    with _replacing(path) as temporary:
        temporary.write_text("".join(json.dumps({k: _plain(v) for k, v in row.items()}) + "\n" for row in rows))


def write_arrays(path: pathlib.Path, arrays: Mapping[str, Any]) -> None:
    """Write named arrays as one .npz, atomically."""
    with _replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **{name: np.asarray(value) for name, value in arrays.items()})


def draw_curves(path: pathlib.Path, title: str, rows: list[dict[str, Any]]) -> None:
    """Accuracy over clients, training loss, and epsilon so far, by round, as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rounds = np.array([row["round"] for row in rows])

    def column(name: str) -> np.ndarray:
        return np.array([row.get(name, math.nan) for row in rows], float)

    figure = Figure(figsize=(12, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    accuracy, loss, epsilon = figure.subplots(1, 3)
    mean, spread = column("accuracy"), column("accuracy_std")
    accuracy.fill_between(rounds, mean - spread, np.minimum(mean + spread, 1), alpha=0.2, label="± std over clients")
    accuracy.plot(rounds, mean, marker=".", label="mean over clients")
    accuracy.plot(rounds, column("accuracy_worst10"), marker=".", label="worst 10% of clients")
    accuracy.set(title=title, xlabel="round", ylabel="test accuracy", ylim=(0, 1))
    accuracy.legend()
    if np.isfinite(column("train_loss")).any():
        loss.plot(rounds, column("train_loss"), marker=".", label="train, participants")
    loss.plot(rounds, column("loss"), marker=".", label="test, all clients")
    loss.set(xlabel="round", ylabel="loss")
    loss.legend()
    values = column("epsilon")
    if np.isfinite(values).any():
        epsilon.plot(rounds, values, marker=".")
    else:
        epsilon.text(0.5, 0.5, "no finite epsilon", ha="center", transform=epsilon.transAxes)
    epsilon.set(xlabel="round", ylabel="epsilon so far (RDP, aggregate)")
    with _replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


@contextlib.contextmanager
def progress_bar(name: str, rounds: int, show: bool) -> Iterator[Callable[[int, str], None]]:
    """A bar that `update(rounds_done, text)` moves."""
    columns = (
        rich.progress.TextColumn(name),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("{task.fields[text]}"),
    )
    with rich.progress.Progress(*columns, disable=not show) as progress:
        task = progress.add_task(name, total=rounds, text="compiling")
        yield lambda done, text: progress.update(task, completed=done, text=text)


@contextlib.contextmanager
def tensorboard_writer(folder: pathlib.Path | None, wanted: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that logs one row of metrics; does nothing unless wanted.

    Raises:
        ValueError: wanted, but there is no folder, or tensorboardX is not installed.
    """
    if not wanted:
        yield lambda row: None
        return
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard=True needs tensorboardX: pip install 'jaxfl[tb]'") from None
    if folder is None:
        raise ValueError("tensorboard=True with folder=None: give the run a folder")
    if jax.process_index() != 0:
        yield lambda row: None
        return
    with SummaryWriter(str(folder)) as writer:

        def log(row: dict[str, Any]) -> None:
            for name in row.keys() - {"round"}:
                writer.add_scalar(name, row[name], row["round"])

        yield log


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary file beside `path` that takes its place when the block ends well."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(handle)
    temporary = pathlib.Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
