"""Callbacks, which a run calls at each evaluation to log its metrics or to end early.

A callback takes its own copy of all rows of metrics so far, the newest last. It returns True to end
the run, and None or False otherwise. A resumed run first calls it with the rows that were read, so
that a run that has ended does not continue.

All callbacks are called at each evaluation, even if one of them raises. The run then raises the
first exception. A run of one process saves its results before. Only a KeyboardInterrupt that a
callback raises itself ends the run at once.

If a callback is a context manager too, the run enters it before the first round. The run leaves it
at the end, even after an error. A path that cannot be written therefore raises before any
computation, and files are closed at the end.
"""

import contextlib
import functools
import inspect
import io
import logging
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from csv import DictWriter
from typing import Any, Literal, TypeAlias

import jax

from jaxfl._support import files
from jaxfl._support.checks import check_callable, check_path, checked, is_listed, plain, show

__all__ = ["csv", "early_stopping", "epsilon_budget", "mlflow", "tensorboard", "wandb"]

_LOG = logging.getLogger("jaxfl")

EvaluationRow: TypeAlias = Mapping[str, float | int]
"""Metrics of one evaluation by name, with the number of rounds so far as `round`."""
Callback: TypeAlias = Callable[[list[EvaluationRow]], Any]
"""Function from all rows so far to True, to end the run, or to False or None."""
_Log: TypeAlias = Callable[[list[EvaluationRow]], None]
"""Function that logs the rows that it has not logged yet."""


def check_callbacks(name: str, value: Any) -> tuple[Callback, ...]:
    """Require a sequence of functions that take the rows, and return it as a tuple.

    Raises:
        TypeError: The value is no sequence of functions. Or one of them is async or a generator, or
            cannot be called with the rows as its only argument.
    """
    if callable(value) or not is_listed(value):
        raise TypeError(
            f"{name} must be a sequence of functions, got {show(value)}. Give a list [f]."
        )
    return tuple(_check_callback(f"{name}[{i}]", callback) for i, callback in enumerate(value))


def _check_callback(name: str, value: Any) -> Callback:
    """Require a function of the rows that is neither async nor a generator, and return it."""
    callback = check_callable(name, value)
    # A builder takes one argument too, so it would fail only at the first evaluation.
    builders = (csv, early_stopping, epsilon_budget, mlflow, tensorboard, wandb)
    if any(callback is builder for builder in builders):
        raise TypeError(
            f"{name} must be a callback, got the function {callback.__name__} that returns one. "
            f"Call it, as in {callback.__name__}(...)."
        )
    # An object may have an async function as its `__call__`.
    method = getattr(type(callback), "__call__", None)  # noqa: B004
    kinds = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(kind(function) for kind in kinds for function in (callback, method)):
        raise TypeError(
            f"{name} must run when it is called, got an async function or a generator, "
            f"{show(callback)}. Give a plain function."
        )
    try:
        # The empty list stands for the rows. Binding it does not call the function.
        inspect.signature(callback).bind([])
    except ValueError:
        # Some functions that are not written in Python have no signature.
        return callback
    except TypeError as error:
        raise TypeError(
            f"{name} must take one argument, the list of rows, got {show(callback)}: {error}. "
            "Give a function of the rows."
        ) from None
    return callback


@contextlib.contextmanager
def entered(callbacks: Sequence[Callback]) -> Iterator[None]:
    """Enter the callbacks that are context managers, and leave them at the end of the block."""
    with contextlib.ExitStack() as stack:
        for callback in callbacks:
            if isinstance(callback, contextlib.AbstractContextManager):
                # `enter_context` would let the callback suppress the exception that ends a run.
                callback.__enter__()
                stack.push(functools.partial(_leave, callback))
        yield


def _leave(callback: contextlib.AbstractContextManager, *error: Any) -> None:
    """Leave a callback. It cannot suppress an exception that ended the run."""
    callback.__exit__(*error)


def ask(callbacks: Sequence[Callback], rows: Sequence[EvaluationRow]) -> bool:
    """Call all callbacks, each with its own copy of the rows, and return whether one ends the run.

    Raises:
        TypeError: A callback returned a value that is neither None nor a bool.
        Exception: The exception of the first callback that failed, with a note for each further
            one. It may also be a SystemExit.
    """
    answers: list[bool] = []
    errors: list[BaseException] = []
    for i, callback in enumerate(callbacks):
        try:
            own_rows: list[EvaluationRow] = [dict(row) for row in rows]
            answers.append(_answer(f"callbacks[{i}]", callback(own_rows)))
        # A KeyboardInterrupt is no failure of a callback, and therefore ends the loop at once.
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
    """Return a callback's answer as a bool, where None is False. Other types raise an error."""
    # A comparison of numbers of NumPy or JAX gives a bool of theirs.
    python_value = plain(value)
    if python_value is None or isinstance(python_value, bool):
        return bool(python_value)
    if inspect.iscoroutine(value):
        # Otherwise Python warns that the coroutine was never awaited.
        value.close()
    raise TypeError(
        f"{name} must return None or a bool, got {show(value)}. "
        "Return True to end the run, and nothing otherwise."
    )


@checked()
def early_stopping(
    metric: str = "loss", *, patience: int = 3, mode: Literal["min", "max"] = "min"
) -> Callback:
    """Return a callback that ends the run after `patience` evaluations without a better value.

    The metric, for instance a score on the clients' test examples, decides which round is the last.
    No epsilon covers this choice. NaN counts as the worst value. The callback raises a ValueError
    at an evaluation whose row lacks the metric.

    Args:
        metric: Name of the metric.
        patience: Number of evaluations without a better value.
        mode: "min" if lower values are better, "max" if higher ones are.

    >>> stop = early_stopping("accuracy", patience=2, mode="max")
    >>> [stop([{"accuracy": value} for value in (0.5, 0.7, 0.6, 0.7)][:n]) for n in (1, 2, 3, 4)]
    [False, False, False, True]
    """

    def callback(rows: list[EvaluationRow]) -> bool:
        losses = _metric_values(rows, metric)
        if mode == "max":
            losses = [-value for value in losses]
        # Comparisons with NaN are false, so `min` would depend on the place of a NaN.
        losses = [math.inf if math.isnan(loss) else loss for loss in losses]
        # An equal value is no better one, so the first of several equal values is the best.
        evaluations_since_best = len(losses) - 1 - losses.index(min(losses))
        return evaluations_since_best >= patience

    return callback


class EpsilonBudget:
    """Callback that ends the run before an epsilon of its rows would exceed a limit.

    Args:
        limit: The budget.
        column: Name of the epsilon in the rows.
        what: The protected unit and the observer, in words.
    """

    def __init__(self, limit: float, column: str, what: str) -> None:
        self.limit = limit
        self.column = column
        self.what = what
        self._ahead: Callable[[int], Mapping[str, float]] | None = None

    def begin(self, ahead: Callable[[int], Mapping[str, float]], done: int) -> None:
        """Check the first interval of a new or resumed run, and keep `ahead` for the later ones.

        Args:
            ahead: Function from a number of rounds to the epsilons at the next evaluation, by
                column.
            done: Number of rounds so far.

        Raises:
            ValueError: The run has no finite epsilon in `column`, or the first interval of a new
                run spends more than the limit.
        """
        self._ahead = ahead
        first = self._finite(ahead(done).get(self.column))
        if not done and first > self.limit:
            raise ValueError(
                f"epsilon must be at least {first:.6g}, which the rounds until the first "
                f"evaluation cost, got {self.limit:g}. Give a larger epsilon, evaluate after fewer "
                "rounds, or add more noise."
            )

    def __call__(self, rows: list[EvaluationRow]) -> bool:
        """Return whether the epsilon may exceed the limit by the next evaluation.

        Rows without the column are left out. Before any run, the next interval counts as much as
        the last one.

        Raises:
            ValueError: No row has the column, or its newest value is not finite.
        """
        known = [row[self.column] for row in rows if row.get(self.column) is not None]
        spent = self._finite(known[-1] if known else None)
        # A new run never exceeds the limit, but the earlier part of a resumed one may have.
        if spent > self.limit:
            _LOG.warning(
                "the run has spent epsilon %.3g already, above the budget of %.3g",
                spent,
                self.limit,
            )
        if self._ahead is not None:
            return self._ahead(int(rows[-1]["round"]))[self.column] > self.limit
        before = 0.0
        if len(known) > 1:
            before = known[-2]
        return 2 * spent - before > self.limit

    def _finite(self, value: float | None) -> float:
        """Return an epsilon of the run, or raise an error if it is None or not finite."""
        if value is None or not math.isfinite(value):
            raise ValueError(
                "epsilon_budget() must be for an observer and a unit that the run protects, got "
                f"{self.what}, which has no finite epsilon. Give another observer= or unit=, or "
                "give the method a larger noise_multiplier."
            )
        return value


@checked()
def epsilon_budget(
    epsilon: float,
    *,
    observer: Literal["aggregate", "upload"] = "aggregate",
    unit: Literal["client", "example"] = "client",
) -> Callback:
    """Return a callback that ends the run before an interval that would exceed a budget.

    An interval is the rounds from one evaluation to the next. The epsilons are those of the privacy
    statement, by its accountant. The cost of the next interval assumes that every client takes part
    in every round that it can. Outside of a run, the next interval counts as much as the last one.
    A run without a finite epsilon for the observer and the unit raises a ValueError before its
    first round. So does a new run whose first interval exceeds the budget. If a resumed run has
    exceeded the budget already, the callback logs a warning and ends it.

    Args:
        epsilon: The budget.
        observer: "aggregate" sees noisy sums and broadcasts. "upload" sees every upload, and needs
            noise from the clients.
        unit: "client" protects all data of a client. "example" protects one example, by private
            local steps (`DPSGD`). The epsilon of an example holds against both observers.

    >>> stop = epsilon_budget(2.0)
    >>> rows = [{"round": 10, "epsilon": 1.0}, {"round": 20, "epsilon": 1.6}]
    >>> stop(rows[:1]), stop(rows)
    (False, True)
    """
    seen = {"aggregate": "sums", "upload": "uploads"}[observer]
    what = f"one {unit} against an observer of {seen}"
    if unit == "example":
        column = "epsilon_example"
    else:
        column = {"aggregate": "epsilon", "upload": "epsilon_upload"}[observer]
    return EpsilonBudget(epsilon, column, what)


@checked(path=check_path)
def csv(path: str | os.PathLike) -> Callback:
    """Return a callback that writes all rows to a file of comma-separated values.

    A missing folder is made. The rows of a run replace those of an earlier run in the file.

    Args:
        path: The file, for instance "metrics.csv". It must be missing, empty, or a file of rows.
            A run raises an OSError before its first round if the path is a folder or a link, or if
            it cannot be written, and a ValueError if the file holds something else.
    """
    file = pathlib.Path(path)

    @contextlib.contextmanager
    def started() -> Iterator[_Log]:
        earlier = _earlier_rows(file)
        # A copy replaces the file, as in later writes. A path that cannot be written therefore
        # raises before the first round.
        with files.replacing(file) as temporary:
            temporary.write_bytes(earlier)
        yield _csv_log(file)

    return _Logger(started)


def _earlier_rows(file: pathlib.Path) -> bytes:
    """Make the folder of a file of rows, and return what an earlier run has written into the file.

    Raises:
        OSError: The path is a folder, a link or a device, or its folder cannot be made.
        ValueError: The file holds something else, which the rows would replace.
    """
    remedy = "Give the path of a new file."
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(
            f"path must be in a folder, got {str(file)!r}, and {error.filename!r} is a file. "
            f"{remedy}"
        ) from None
    found = files.kind(file)
    if found is None:
        return b""
    # A link may lead to a file of somebody else, and a rename would replace the link itself.
    if found != "a regular file":
        raise files.IrregularError(
            f"path must be a regular file, got {str(file)!r}, which is {found}. {remedy}"
        )
    earlier = files.read(file)
    if earlier and not earlier.startswith(b"round"):
        raise ValueError(
            f"path must be a file that csv() wrote, got {str(file)!r}, whose first line does not "
            f"begin with 'round'. {remedy}"
        )
    return earlier


def _csv_log(file: pathlib.Path) -> _Log:
    """Return a function that adds the rows of one run to a file. Its first call replaces the file.

    A row with a new name replaces the file too, because the header changes.
    """
    names: list[str] = []
    written = 0

    def write(rows: list[EvaluationRow]) -> None:
        nonlocal names, written
        # The caller gives all rows, of which the first `written` are in the file.
        new = rows[written:]
        found = list(dict.fromkeys(name for row in new for name in row))
        # Rows are appended only under the same header, and to a file that is still there.
        if written and set(found) <= set(names) and files.is_regular(file):
            files.append_text(file, _csv_text(new, names, head=False))
        else:
            names = list(dict.fromkeys([*names, *found]))
            with files.replacing(file) as temporary:
                temporary.write_bytes(_csv_text(rows, names, head=True).encode())
        written = len(rows)

    return write


def _csv_text(rows: Sequence[EvaluationRow], names: Sequence[str], *, head: bool) -> str:
    """Return rows as comma-separated values, with or without the header."""
    text = io.StringIO()
    table = DictWriter(text, names, lineterminator="\n")
    if head:
        table.writeheader()
    table.writerows(rows)
    return text.getvalue()


@checked(folder=check_path)
def tensorboard(folder: str | os.PathLike) -> Callback:
    """Return a callback that writes event files for TensorBoard (extra `[tb]`).

    A run hides all rows that the folder held before. A resumed run writes all of its rows again.

    Args:
        folder: Folder of the event files, which `tensorboard --logdir` shows.

    Raises:
        ValueError: The package tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError(
            "tensorboard() must have the package tensorboardX, got none. "
            "Install it by `pip install 'jaxfl[tb]'`."
        ) from None

    @contextlib.contextmanager
    def started() -> Iterator[_Log]:
        with SummaryWriter(str(folder), purge_step=0, flush_secs=1) as writer:

            def log(row: EvaluationRow) -> None:
                for name, value in _scalars(row).items():
                    writer.add_scalar(name, value, row["round"])

            yield _rest(log)

    return _Logger(started)


def wandb(run: Any) -> Callback:
    """Return a callback that logs to a run of Weights & Biases (extra `[wandb]`).

    Args:
        run: The run, which for instance `wandb.init(mode="offline")` returns. It stays open, so
            that you can finish it yourself.

    Raises:
        TypeError: `run` has no method `log`.
    """
    if not callable(getattr(run, "log", None)):
        raise TypeError(
            f"run must be a run of Weights & Biases, got {show(run)}. "
            "Give the result of wandb.init()."
        )

    def log(row: EvaluationRow) -> None:
        run.log(_scalars(row), step=int(row["round"]))

    return _Logger(lambda: contextlib.nullcontext(_rest(log)))


@checked()
def mlflow(library: Any, run_id: str | None = None) -> Callback:
    """Return a callback that logs to a run of MLflow (extra `[mlflow]`).

    The run stays open, so that you can end it yourself.

    Args:
        library: The imported module `mlflow`.
        run_id: Id of the run. None stands for the active one, which MLflow starts if there is none.

    Raises:
        TypeError: `library` has no function `log_metrics`.
    """
    if not callable(getattr(library, "log_metrics", None)):
        raise TypeError(
            f"library must be the module mlflow, got {show(library)}. "
            "Give it after `import mlflow`."
        )

    def log(row: EvaluationRow) -> None:
        library.log_metrics(_scalars(row), int(row["round"]), run_id=run_id)

    return _Logger(lambda: contextlib.nullcontext(_rest(log)))


def _metric_values(rows: list[EvaluationRow], name: str) -> list[float]:
    """Return the values of a metric in all rows, or raise an error if the newest row lacks it."""
    if name not in rows[-1]:
        known = ", ".join(rows[-1])
        raise ValueError(f"metric must be one of {known}, got {name!r}. Choose one of these.")
    return [float(row[name]) for row in rows]


def _scalars(row: EvaluationRow) -> dict[str, float | int]:
    """Return the values of a row, without the number of rounds."""
    return {name: value for name, value in row.items() if name != "round"}


def _rest(log: Callable[[EvaluationRow], None]) -> _Log:
    """Return a function that logs each row once. Its first call logs all rows so far."""
    logged = 0

    def write(rows: list[EvaluationRow]) -> None:
        nonlocal logged
        for row in rows[logged:]:
            log(row)
        logged = len(rows)

    return write


class _Logger:
    """Callback that opens a log for each run, writes rows to it, and closes it.

    Only the first one of several processes does so.

    Args:
        started: Function that returns a context manager of the function that logs rows.
    """

    def __init__(self, started: Callable[[], contextlib.AbstractContextManager[_Log]]) -> None:
        self._started = started
        self._runs = contextlib.ExitStack()
        self._log: _Log | None = None

    def __enter__(self) -> "_Logger":
        if jax.process_index() == 0:
            self._log = self._runs.enter_context(self._started())
        return self

    def __exit__(self, *error: Any) -> bool | None:
        self._log = None
        # A stack is empty after its exit, so the callback can serve another run.
        return self._runs.__exit__(*error)

    def __call__(self, rows: list[EvaluationRow]) -> None:
        # A run does not enter a callback that a function of the user calls.
        if self._log is None:
            self.__enter__()
        # Only the first process has a log.
        if self._log is not None:
            self._log(rows)
