"""Files of a run's folder, and progress bars."""

import contextlib
import contextvars
import dataclasses
import datetime
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from jaxfl.engine.state_file import ROWS
from jaxfl.files import kind, leftovers, write_json

_LOG = logging.getLogger("jaxfl")

CONFIG = "config.json"
METRICS = "metrics.jsonl"
PER_CLIENT = "per_client.npz"
PRIVACY = "privacy.json"
CURVES = "curves.png"
AUDIT = "audit.npz"
CHECKPOINTS = "ckpt"
STATES = "states"
NOISE_KEY = "noise.key"
PRINTED = "curves.pdf"
PAGE = "report.html"
COMPARISON = "comparison.json"

_REPORTS = (METRICS, PER_CLIENT, PRIVACY, CURVES, AUDIT, PRINTED, PAGE)
"""Names of the files that a run, or each point of a sweep, reports in."""

FILES = (*_REPORTS, CONFIG, CHECKPOINTS, STATES, NOISE_KEY, COMPARISON)
"""Names that the folders of runs and comparisons use."""

_POINT_FOLDER = re.compile(r"[0-9]{1,9}(_[^\W\d]\w*=[^/]+)*")
"""Names of the folders of a sweep's points: their number, then values by argument."""

COLUMNS = {
    "epsilon": (
        "one client's epsilon so far, against an observer of noisy sums and broadcasts, as in the "
        "privacy statement"
    ),
    "epsilon_rdp": (
        "the same epsilon by Rényi divergences only, which is no smaller unless uploads bound it"
    ),
    "epsilon_upload": (
        "one client's epsilon so far, against an observer of every upload and every cohort"
    ),
    "epsilon_example": (
        "one example's epsilon so far, by private local steps, against either observer"
    ),
    "bytes_up": "bytes that a participant sends in a round",
    "bytes_down": "bytes that a participant receives in a round",
}
"""Columns of `metrics` with costs: epsilons so far by the statement's bounds, and bytes."""


def shown_epsilon(rows: Sequence[Mapping[str, float | int]]) -> str:
    """Return the largest epsilon over runs as text for a bar.

    The epsilon is the one of an example if only this one is finite.
    """
    client = max(row["epsilon"] for row in rows)
    example = max(row.get("epsilon_example", math.inf) for row in rows)
    if math.isinf(client) and math.isfinite(example):
        return f"epsilon {example:.3g} (example)"
    return f"epsilon {client:.3g}"


def run_folder(root: str | os.PathLike, method: str, config: Any, seed: int) -> pathlib.Path:
    """Create `<root>/<method>/<hash>/seed=<n>/` with `config.json`, and return its path.

    The hash is the hash of the configuration without the seed.

    Args:
        root: Folder of all runs.
        method: Name of the algorithm, which must be the name of a folder.
        config: A frozen dataclass or a mapping. Its values are JSON values, paths, arrays, or
            dataclasses of these.
        seed: Seed of this run.

    Raises:
        ValueError: The method's name leads to another folder, the seed is not a whole number, or a
            value has another type.
    """
    named = isinstance(method, str) and method not in ("", ".", "..")
    if not named or re.search(r"[/\\\x00-\x1f]", method):
        raise ValueError(
            f"method must be the name of a folder, got {method!r}. Leave out slashes and control "
            "characters."
        )
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ValueError(f"seed must be a whole number, got {seed!r}. Give for instance 0.")
    values = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)
    values.pop("seed", None)
    text = json.dumps({"method": method} | values, sort_keys=True, default=_as_json)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    folder = pathlib.Path(root) / method / digest / f"seed={seed}"
    folder.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0 and os.access(folder, os.W_OK):
        write_json(folder / CONFIG, json.loads(text) | {"seed": int(seed)})
    return folder


def check_names(folder: pathlib.Path, runs: Sequence[pathlib.Path]) -> None:
    """Require that a run or a sweep can write its files without following a link.

    Args:
        folder: Folder of the run or the sweep.
        runs: Folder of the run, or of each point of the sweep.

    Raises:
        ValueError: A link or a file has the name of a folder, or a folder has the name of a file.
    """
    folders = [folder / CHECKPOINTS, folder / STATES, *(run for run in runs if run != folder)]
    for path in folders:
        if (found := kind(path)) not in (None, "a folder"):
            raise ValueError(
                f"{str(path)!r} must be a folder, got {found}. Remove it, or choose another folder."
            )
    reports = [run / name for run in runs for name in _REPORTS]
    for path in (folder / NOISE_KEY, *reports):
        if kind(path) == "a folder":
            raise ValueError(
                f"{str(path)!r} must be a file, got a folder. Remove it, or choose another folder."
            )


def clear(folder: pathlib.Path, points: bool) -> None:
    """Remove client states, secret bits and reports, but no files with other names.

    Args:
        folder: Folder of the run or the sweep.
        points: Whether the reports are those of a sweep's points.
    """
    if jax.process_index() != 0:
        return
    runs = points_of(folder) if points else [folder]
    reports = [run / name for run in runs for name in _REPORTS]
    for path in (folder / NOISE_KEY, *reports):
        for own in (path, *leftovers(path)):
            own.unlink(missing_ok=True)
    (folder / STATES / ROWS).unlink(missing_ok=True)
    for own in (folder / STATES, *(runs if points else ())):
        # The folder may be missing, or may hold other files.
        with contextlib.suppress(OSError):
            own.rmdir()


def points_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of a sweep's points in their order, without links."""
    points = [
        path
        for path in folder.iterdir()
        if _POINT_FOLDER.fullmatch(path.name) and kind(path) == "a folder"
    ]
    return sorted(points, key=lambda path: int(path.name.split("_")[0]))


def tell(text: str, shown: bool) -> None:
    """Print a text if progress is shown, and log it otherwise."""
    if shown:
        console = Console()
        lines = textwrap.wrap(text, console.width, break_long_words=False, break_on_hyphens=False)
        # Rich would break long paths without `soft_wrap`.
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    else:
        _LOG.info("%s", text)


Update: TypeAlias = Callable[..., None]
"""Progress function `update(rounds_done, state, figures=None)`. None keeps the last figures."""

_ONE_LINE: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"}
"""Options of a column whose text is cut where it would need a second line."""


class _Bar(Progress):
    """Bar with a line of figures below it, which fit a terminal of 80 columns.

    The time left follows from the pace since the time `since`, when `base` of the work was done.

    Args:
        name: Name at the left of the bar.
        total: Amount of work in any unit.
        show: Whether the bar is shown.
        count: Function from the work done and the total to a text.
    """

    def __init__(
        self, name: str, total: float, show: bool, count: Callable[[float, float], str]
    ) -> None:
        columns = (
            TextColumn(
                "{task.description}", markup=False, table_column=Column(max_width=24, **_ONE_LINE)
            ),
            BarColumn(None, table_column=Column(ratio=1, min_width=8)),
            TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True)),
            TextColumn(
                "{task.fields[state]}", markup=False, table_column=Column(max_width=30, **_ONE_LINE)
            ),
            TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
        )
        # The base class may draw the bar before it returns.
        self.total = total
        self.count = count
        self.figures = ""
        super().__init__(*columns, disable=not show, expand=True)
        self.done = 0.0
        self.base = 0.0
        self.since = time.monotonic()
        self.line = self.add_task(name, total=total, count="", state="", left="")

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yield the bar, then the figures."""
        yield from super().get_renderables()
        yield Text(f"  {self.figures}", **_ONE_LINE)

    def move(self, done: float, state: str, figures: str | None = None) -> None:
        """Show the work that is done, and the time left. None keeps the last figures."""
        self.done = done
        if figures is not None:
            self.figures = figures
        left = "-:--:--"
        if done > self.base:
            pace = (time.monotonic() - self.since) / (done - self.base)
            left = str(datetime.timedelta(seconds=round(pace * (self.total - done))))
        self.update(
            self.line,
            total=self.total,
            completed=done,
            count=self.count(done, self.total),
            state=state,
            left=left,
        )


_SHARED: contextvars.ContextVar[Callable[[int, int], Update] | None] = contextvars.ContextVar(
    "shared", default=None
)
"""Function that `shared_bar` sets, from a run's rounds and restored rounds to its `Update`."""


@contextlib.contextmanager
def progress_bar(name: str, rounds: int, show: bool, start: int = 0) -> Iterator[Update]:
    """Show the bar of a run, and yield the function that moves it.

    A run within `shared_bar` moves the shared bar.

    Args:
        name: Name of the run.
        rounds: Number of all rounds.
        show: Whether the bar is shown.
        start: Number of rounds that were read from a folder.
    """
    if (update_of_run := _SHARED.get()) is not None:
        yield update_of_run(rounds, start)
        return
    with _Bar(name, float(rounds), show, lambda done, total: f"{done:.0f}/{total:.0f}") as bar:

        def update(done: int, state: str, figures: str | None = None) -> None:
            # The work before the first round has another pace.
            if done == start:
                bar.base = float(done)
                bar.since = time.monotonic()
                state += f", from round {start}" if start else ""
            bar.move(float(done), state, figures)

        update(start, "starting")
        yield update
        bar.move(bar.done, "finished")


class SharedBar:
    """Bar of several runs, which measures work in trained clients."""

    def __init__(self, bar: _Bar) -> None:
        self._bar = bar
        self._before = 0.0

    @contextlib.contextmanager
    def part(self, name: str, work: float) -> Iterator[None]:
        """Let a run within the block move the bar.

        Rounds that the run reads from its folder take no time.

        Args:
            name: Name of the run.
            work: Number of clients that the run trains in all of its rounds.
        """

        def update_of_run(rounds: int, start: int) -> Update:
            def update(done: int, state: str, figures: str | None = None) -> None:
                shown = ": ".join(filter(None, [state, figures]))
                self._bar.move(self._before + work * done / rounds, name, shown)

            self._bar.base += work * start / rounds
            update(start, "from its folder" if start else "starting")
            return update

        token = _SHARED.set(update_of_run)
        try:
            yield
        finally:
            _SHARED.reset(token)
        self._before += work
        self.say(name)

    def say(self, state: str) -> None:
        """Show what is done between two runs."""
        self._bar.move(self._before, state, "")

    def skip(self, work: float) -> None:
        """Subtract clients that need no training from the total."""
        self._bar.total -= work


@contextlib.contextmanager
def shared_bar(name: str, work: float, show: bool) -> Iterator[SharedBar]:
    """Show one bar for runs that train `work` clients together, each within a `part`."""
    with _Bar(name, work, show, lambda done, total: f"{done / total:.0%}") as bar:
        yield SharedBar(bar)
        bar.move(bar.done, "finished", "")


def _as_json(value: Any) -> Any:
    """Return a value that JSON lacks as JSON, so that configurations that differ look different."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__} | fields
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        array = np.asarray(value)
        if array.size <= 1000:
            return array.tolist()
        digest = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
        return {"sha256": digest, "shape": array.shape, "dtype": array.dtype.name}
    raise ValueError(
        f"config must hold numbers, texts, arrays, paths, dataclasses, or lists of these, got "
        f"{value!r}. Convert the value."
    )
