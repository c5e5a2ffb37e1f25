"""What a run calls at each evaluation: to log its rows elsewhere, or to end early.

A callback takes all rows of metrics so far, the newest last, which are its own copy. It returns True to end the run,
and None or False otherwise. Before a resumed run goes on, it is called with the rows that were read, so that a run
which had ended stays so.

All callbacks are called at each evaluation, even if one of them raises. What the run has computed is then saved, and
the first exception is raised.

A callback that is a context manager too is entered before the first round and left when the run ends, also when the
run fails. A path that cannot be written therefore raises before anything is computed, and files are closed at the end.
"""

import contextlib
import functools
import inspect
import io
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from csv import DictWriter
from typing import Any, Literal, TypeAlias

import jax

from jaxfl import files
from jaxfl._validate import check_callable, check_path, checked, plain, show

__all__ = ["csv", "early_stopping", "epsilon_budget", "mlflow", "tensorboard", "wandb"]

Row: TypeAlias = Mapping[str, float | int]
Callback: TypeAlias = Callable[[list[Row]], Any]
_Log: TypeAlias = Callable[[list[Row]], None]


def check_callbacks(name: str, value: Any) -> tuple[Callback, ...]:
    """Require a sequence of functions that take the rows and run when they are called."""
    if callable(value) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={show(value)}: give a list of functions")
    return tuple(_check_callback(f"{name}[{i}]", callback) for i, callback in enumerate(value))


def _check_callback(name: str, value: Any) -> Callback:
    callback = check_callable(name, value)
    method = getattr(type(callback), "__call__", None)  # noqa: B004 (the function, to look at)
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(kind(function) for kind in kinds for function in (callback, method)):
        raise TypeError(
            f"{name} must run when it is called, got an async function or a generator, {show(callback)}. "
            "Give a plain function."
        )
    try:
        inspect.signature(callback).bind([])
    except ValueError:  # Python knows no signature of some functions that are not written in Python
        return callback
    except TypeError as error:
        raise TypeError(
            f"{name} must take one argument, the list of rows, got {show(callback)}: {error}. "
            "Give a function of the rows."
        ) from None
    return callback


@contextlib.contextmanager
def opened(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Enter the callbacks that are context managers, and leave them however the block ends."""
    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, contextlib.AbstractContextManager):
                callback.__enter__()
                stack.push(functools.partial(_leave, callback))
        yield


def _leave(callback: contextlib.AbstractContextManager, *error: Any) -> None:
    """Leave a callback, which cannot suppress what ended the run."""
    callback.__exit__(*error)


def ask(callbacks: Sequence[Callback], rows: Sequence[Row]) -> bool:
    """Return whether a callback ends the run, after all were called, each with its own copy of the rows.

    Raises:
        TypeError: a callback returned something else than None or a bool.
        Exception: what the first callback that failed raised, with a note for each further one.
    """
    answers: list[bool] = []
    errors: list[BaseException] = []
    for i, callback in enumerate(callbacks):
        try:
            answers.append(_answer(f"callbacks[{i}]", callback([dict(row) for row in rows])))
        except (Exception, SystemExit) as error:
            error.add_note(f"raised by callbacks[{i}]")
            errors.append(error)
    if errors:
        first, *others = errors
        for error in others:
            first.add_note(f"{'; '.join(error.__notes__)}: {type(error).__name__}: {error}")
        raise first
    return any(answers)


def _answer(name: str, value: Any) -> bool:
    """Require None or a bool."""
    given = plain(value)
    if given is None or isinstance(given, bool):
        return bool(given)
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns that nobody awaits it
    raise TypeError(
        f"{name} must return None or a bool, got {show(value)}. Return True to end the run, and nothing otherwise."
    )


@checked()
def early_stopping(
    metric: str = "loss", *, patience: int = 3, mode: Literal["min", "max"] = "min"
) -> Callback:
    """End the run when a metric has had no better value for `patience` evaluations.

    What it looks at are scores of the clients' test examples: no epsilon covers the choice of the last round.

    >>> stop = early_stopping("accuracy", patience=2, mode="max")
    >>> [stop([{"accuracy": value} for value in (0.5, 0.7, 0.6, 0.7)][:n]) for n in (1, 2, 3, 4)]
    [False, False, False, True]
    """

    def callback(rows: list[Row]) -> bool:
        column = _column(rows, metric)
        values = [
            math.inf if math.isnan(value) else value if mode == "min" else -value
            for value in column
        ]
        return len(values) - 1 - values.index(min(values)) >= patience

    return callback


class EpsilonBudget:
    """A callback that ends the run before an interval that takes a column of its rows beyond a limit."""

    def __init__(self, limit: float, column: str, what: str) -> None:
        self.limit, self.column, self.what = limit, column, what
        self._ahead: Callable[[int], Mapping[str, float]] | None = None

    def begin(self, ahead: Callable[[int], Mapping[str, float]], done: int) -> None:
        """Take what a run would cost at the evaluation after some rounds, and look at the next one.

        Raises:
            ValueError: the run has no such epsilon, or the first interval spends more than the limit.
        """
        self._ahead = ahead
        first = self._finite(ahead(done).get(self.column))
        if not done and first > self.limit:
            raise ValueError(
                f"epsilon must be at least {first:.6g}, which the rounds until the first evaluation cost, got "
                f"{self.limit:g}. Lower eval_every, or add noise."
            )

    def __call__(self, rows: list[Row]) -> bool:
        """Whether the next interval may exceed the limit; rows without the column count as nothing."""
        known = [row[self.column] for row in rows if row.get(self.column) is not None]
        spent = self._finite(known[-1] if known else None)
        if self._ahead is not None:
            return self._ahead(int(rows[-1]["round"]))[self.column] > self.limit
        before = known[-2] if len(known) > 1 else 0.0
        return 2 * spent - before > self.limit

    def _finite(self, value: float | None) -> float:
        if value is None or not math.isfinite(value):
            raise ValueError(
                f"epsilon_budget() must be for an observer and a unit that the run protects, got {self.what}, whose "
                "epsilon is infinite. Give another observer or unit, or add noise."
            )
        return value


@checked()
def epsilon_budget(
    epsilon: float,
    *,
    observer: Literal["aggregate", "upload"] = "aggregate",
    unit: Literal["client", "example"] = "client",
) -> Callback:
    """End the run before an interval between evaluations that would exceed a budget.

    Epsilons are those of the privacy statement, by its accountant. The next interval is planned: every client takes
    part in every round that it can. A run that protects no such unit raises an error before its first round.

    Args:
        epsilon: the budget.
        observer: "aggregate" sees noisy sums and broadcasts, "upload" every upload, which needs noise of the clients.
        unit: "client": all data of a client. "example": one example, by private local steps (`DPSGD`), whose epsilon
            holds against both observers.

    >>> stop = epsilon_budget(2.0)  # of rows alone, as here, the next interval costs at most what the last one did
    >>> stop([{"round": 10, "epsilon": 1.0}]), stop([{"round": 10, "epsilon": 1.0}, {"round": 20, "epsilon": 1.6}])
    (False, True)
    """
    column = {"aggregate": "epsilon", "upload": "epsilon_upload"}[observer]
    what = f"one {unit} against an observer of {'uploads' if observer == 'upload' else 'sums'}"
    return EpsilonBudget(epsilon, column if unit == "client" else "epsilon_example", what)


@checked(path=check_path)
def csv(path: str | os.PathLike) -> Callback:
    """Keep all rows in a file of comma-separated values, whose folder is made where it is missing."""
    file = pathlib.Path(path)

    def of_run() -> _Log:
        names: list[str] = []
        written = 0

        def text_of(rows: Sequence[Row], head: bool) -> str:
            text = io.StringIO()
            table = DictWriter(text, names, lineterminator="\n")
            if head:
                table.writeheader()
            table.writerows(rows)
            return text.getvalue()

        def write(rows: list[Row]) -> None:
            nonlocal names, written
            new = rows[written:]
            found = list(dict.fromkeys(name for row in new for name in row))
            if written and set(found) <= set(names) and files.is_regular(file):
                files.append_text(file, text_of(new, head=False))
            else:
                names = list(dict.fromkeys([*names, *found]))
                with files.replacing(file) as temporary:
                    temporary.write_bytes(text_of(rows, head=True).encode())
            written = len(rows)

        return write

    @contextlib.contextmanager
    def started() -> Iterator[_Log]:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Replaces the file by a copy, as later writes do: a path that cannot be written shows before the first round.
        target = file.resolve()
        earlier = b"" if files.kind(target) is None else files.read(target)
        with files.replacing(file) as temporary:
            temporary.write_bytes(earlier)
        yield of_run()

    return _Logger(started)


@checked(folder=check_path)
def tensorboard(folder: str | os.PathLike) -> Callback:
    """Write event files (extra `[tb]`). A resumed run writes all of its rows again, and hides the earlier ones."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError("tensorboard() needs tensorboardX: pip install 'jaxfl[tb]'") from None

    @contextlib.contextmanager
    def started() -> Iterator[_Log]:
        with SummaryWriter(str(folder), purge_step=0, flush_secs=1) as writer:

            def log(row: Row) -> None:
                for name, value in _scalars(row).items():
                    writer.add_scalar(name, value, row["round"])

            yield _rest(log)

    return _Logger(started)


def wandb(run: Any) -> Callback:
    """Log to a run of Weights & Biases, as `wandb.init(mode="offline")` returns it (extra `[wandb]`).

    The run of Weights & Biases stays open: finish it yourself.
    """
    if not callable(getattr(run, "log", None)):
        raise TypeError(f"run={show(run)}: give what wandb.init() returns")

    def log(row: Row) -> None:
        run.log(_scalars(row), step=int(row["round"]))

    return _Logger(lambda: contextlib.nullcontext(_rest(log)))


@checked()
def mlflow(library: Any, run_id: str | None = None) -> Callback:
    """Log to a run of MLflow (extra `[mlflow]`), the active one if none is named; `library` is `mlflow`, imported.

    The run of MLflow stays open: end it yourself.
    """
    if not callable(getattr(library, "log_metrics", None)):
        raise TypeError(f"library={show(library)}: give the imported mlflow")

    def log(row: Row) -> None:
        library.log_metrics(_scalars(row), int(row["round"]), run_id=run_id)

    return _Logger(lambda: contextlib.nullcontext(_rest(log)))


def _column(rows: list[Row], name: str) -> list[float]:
    if name not in rows[-1]:
        raise ValueError(f"metric={name!r}: rows have {', '.join(rows[-1])}")
    return [float(row[name]) for row in rows]


def _scalars(row: Row) -> dict[str, float | int]:
    return {name: value for name, value in row.items() if name != "round"}


def _rest(log: Callable[[Row], None]) -> _Log:
    """Return a function that logs each row once; at its first call, all rows that were read."""
    logged = 0

    def write(rows: list[Row]) -> None:
        nonlocal logged
        for row in rows[logged:]:
            log(row)
        logged = len(rows)

    return write


class _Logger:
    """A callback that opens something for each run, logs rows to it, and closes it.

    Of several processes, only the first one does.

    Args:
        started: makes a context manager of the function that logs rows.
    """

    def __init__(self, started: Callable[[], contextlib.AbstractContextManager[_Log]]) -> None:
        self._started, self._runs = started, contextlib.ExitStack()
        self._log: _Log | None = None

    def __enter__(self) -> "_Logger":
        if jax.process_index() == 0:
            self._log = self._runs.enter_context(self._started())
        return self

    def __exit__(self, *error: Any) -> bool | None:
        self._log = None
        return self._runs.__exit__(*error)

    def __call__(self, rows: list[Row]) -> None:
        if self._log is None:  # within a function of the user's, which no run opens
            self.__enter__()
        if self._log is not None:
            self._log(rows)
