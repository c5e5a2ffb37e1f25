"""What a run calls at each evaluation: to log its rows elsewhere, or to end early.

A callback takes all rows of metrics so far, the newest last; returning True ends the run. Before a resumed run goes on,
it is called with the rows that were read, so that a run which had ended stays so.
"""

import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax

from jaxfl import files
from jaxfl._validate import check_callable, check_path, checked, show

__all__ = ["csv", "early_stopping", "epsilon_budget", "mlflow", "tensorboard", "wandb"]

Row: TypeAlias = Mapping[str, float | int]
Callback: TypeAlias = Callable[[list[Row]], Any]


def check_callbacks(name: str, value: Any) -> tuple[Callback, ...]:
    """Require a sequence of functions."""
    if callable(value) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={show(value)}: give a list of functions")
    return tuple(check_callable(f"{name}[{i}]", callback) for i, callback in enumerate(value))


@checked()
def early_stopping(metric: str = "loss", *, patience: int = 3, mode: Literal["min", "max"] = "min") -> Callback:
    """End the run when a metric has had no better value for `patience` evaluations.

    What it looks at are scores of the clients' test examples: no epsilon covers the choice of the last round.

    >>> stop = early_stopping("accuracy", patience=2, mode="max")
    >>> [stop([{"accuracy": value} for value in (0.5, 0.7, 0.6, 0.7)][:n]) for n in (1, 2, 3, 4)]
    [False, False, False, True]
    """

    def callback(rows: list[Row]) -> bool:
        column = _column(rows, metric)
        values = [math.inf if math.isnan(value) else value if mode == "min" else -value for value in column]
        return len(values) - 1 - values.index(min(values)) >= patience

    return callback


@checked()
def epsilon_budget(epsilon: float) -> Callback:
    """End the run where another interval of the same length might take the row's `epsilon` beyond a budget.

    Renyi accounting of equal rounds is concave in their number: the next interval adds at most what the last one did.
    Where rounds differ (a schedule, an adaptive cohort), look at the statement.

    >>> stop = epsilon_budget(2.0)
    >>> stop([{"round": 10, "epsilon": 1.0}]), stop([{"round": 10, "epsilon": 1.0}, {"round": 20, "epsilon": 1.6}])
    (False, True)
    """

    def callback(rows: list[Row]) -> bool:
        spent = [0.0, *_column(rows, "epsilon")]
        return 2 * spent[-1] - spent[-2] > epsilon if math.isfinite(spent[-1]) else True

    return callback


@checked(path=check_path)
def csv(path: str | os.PathLike) -> Callback:
    """Keep all rows in a file of comma-separated values."""

    def write(rows: list[Row]) -> None:
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = [names, *([repr(row[name]) if name in row else "" for name in names] for row in rows)]
        with files.replacing(pathlib.Path(path)) as temporary:
            temporary.write_text("".join(",".join(line) + "\n" for line in lines))

    return _by_first(write)


@checked(folder=check_path)
def tensorboard(folder: str | os.PathLike) -> Callback:
    """Write event files (extra `[tb]`). A resumed run writes all of its rows again, and hides the earlier ones."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard() needs tensorboardX: pip install 'jaxfl[tb]'") from None
    writer: Any = None

    def log(row: Row) -> None:
        nonlocal writer
        writer = writer or SummaryWriter(str(folder), purge_step=int(row["round"]), flush_secs=1)  # and at the exit
        for name, value in _scalars(row).items():
            writer.add_scalar(name, value, row["round"])

    return _by_first(_rest(log))


def wandb(run: Any) -> Callback:
    """Log to a run of Weights & Biases, as `wandb.init(mode="offline")` returns it (extra `[wandb]`)."""
    if not callable(getattr(run, "log", None)):
        raise TypeError(f"run={show(run)}: give what wandb.init() returns")
    return _by_first(_rest(lambda row: run.log(_scalars(row), step=int(row["round"]))))


@checked()
def mlflow(library: Any, run_id: str | None = None) -> Callback:
    """Log to a run of MLflow (extra `[mlflow]`), the active one if none is named; `library` is `mlflow`, imported."""
    if not callable(getattr(library, "log_metrics", None)):
        raise TypeError(f"library={show(library)}: give the imported mlflow")
    return _by_first(_rest(lambda row: library.log_metrics(_scalars(row), int(row["round"]), run_id=run_id)))


def _column(rows: list[Row], name: str) -> list[float]:
    if name not in rows[-1]:
        raise ValueError(f"metric={name!r}: rows have {', '.join(rows[-1])}")
    return [float(row[name]) for row in rows]


def _scalars(row: Row) -> dict[str, float | int]:
    return {name: value for name, value in row.items() if name != "round"}


def _rest(log: Callable[[Row], None]) -> Callable[[list[Row]], None]:
    """Log each row once; all that were read, at the first call."""
    logged = 0

    def write(rows: list[Row]) -> None:
        nonlocal logged
        for row in rows[logged:]:
            log(row)
        logged = len(rows)

    return write


def _by_first(write: Callable[[list[Row]], None]) -> Callback:
    """Of several processes, the first one writes."""

    def callback(rows: list[Row]) -> None:
        if jax.process_index() == 0:
            write(rows)

    return callback
