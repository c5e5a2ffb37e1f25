"""The run folder, and progress."""

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

CONFIG, METRICS, PER_CLIENT, PRIVACY, CURVES, AUDIT, CHECKPOINTS, STATES, NOISE_KEY = (
    "config.json", "metrics.jsonl", "per_client.npz", "privacy.json", "curves.png", "audit.npz", "ckpt", "states",
    "noise.key",
)  # fmt: skip
PRINTED, PAGE, COMPARISON = "curves.pdf", "report.html", "comparison.json"
_REPORTS = (METRICS, PER_CLIENT, PRIVACY, CURVES, AUDIT, PRINTED, PAGE)

_POINT = re.compile(r"[0-9]{1,9}(_[^\W\d]\w*=[^/]+)*")
"""Names of the folders of a sweep's points: their number, then values by argument."""

FILES = (
    CONFIG, METRICS, PER_CLIENT, PRIVACY, CURVES, AUDIT, CHECKPOINTS, STATES, NOISE_KEY, PRINTED, PAGE, COMPARISON,
)  # fmt: skip
"""Names that the folders of runs and comparisons use."""

COLUMNS = {
    "epsilon": "one client's epsilon so far, against an observer of noisy sums and broadcasts: the statement's",
    "epsilon_rdp": "the same by Rényi divergences alone, which is no smaller unless uploads bound it",
    "epsilon_upload": "one client's epsilon so far, against an observer of every upload and every cohort",
    "epsilon_example": "one example's epsilon so far, by private local steps, against either observer",
}
"""Columns of `metrics` that say what the rounds so far cost, each by the bounds of the privacy statement."""


def shown_epsilon(rows: Sequence[Mapping[str, float | int]]) -> str:
    """Return the largest epsilon over runs, for a bar: of one example where only that is finite."""
    client = max(row["epsilon"] for row in rows)
    example = max(row.get("epsilon_example", math.inf) for row in rows)
    if math.isinf(client) and math.isfinite(example):
        return f"epsilon {example:.3g} (example)"
    return f"epsilon {client:.3g}"


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
    if (
        not isinstance(method, str)
        or method in ("", ".", "..")
        or re.search(r"[/\\\x00-\x1f]", method)
    ):
        raise ValueError(f"method={method!r}: give the name of a folder, without a slash")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ValueError(f"seed={seed!r}: give a whole number")
    values = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)
    values.pop("seed", None)
    text = json.dumps({"method": method} | values, sort_keys=True, default=_json)
    folder = (
        pathlib.Path(root)
        / method
        / hashlib.sha256(text.encode()).hexdigest()[:10]
        / f"seed={seed}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0 and os.access(folder, os.W_OK):
        write_json(folder / CONFIG, json.loads(text) | {"seed": int(seed)})
    return folder


def check_names(folder: pathlib.Path, runs: Sequence[pathlib.Path]) -> None:
    """Require that a run, or a sweep with its runs' folders, can write its files without following a link.

    Raises:
        ValueError: a link or file has the name of a folder, or a folder that of a file.
    """
    folders = [folder / CHECKPOINTS, folder / STATES, *(run for run in runs if run != folder)]
    for path in folders:
        if (found := kind(path)) not in (None, "a folder"):
            raise ValueError(
                f"{str(path)!r} must be a folder, got {found}. Remove it, or choose another folder."
            )
    for path in (folder / NOISE_KEY, *(run / name for run in runs for name in _REPORTS)):
        if kind(path) == "a folder":
            raise ValueError(
                f"{str(path)!r} must be a file, got a folder. Remove it, or choose another folder."
            )


def clear(folder: pathlib.Path, points: bool) -> None:
    """Remove client states, secret bits and reports of a run, or of a sweep's points. Files of other names stay."""
    if jax.process_index() != 0:
        return
    runs = points_of(folder) if points else [folder]
    for path in (folder / NOISE_KEY, *(run / name for run in runs for name in _REPORTS)):
        for own in (path, *leftovers(path)):
            own.unlink(missing_ok=True)
    (folder / STATES / ROWS).unlink(missing_ok=True)
    for own in (folder / STATES, *(runs if points else ())):
        with contextlib.suppress(OSError):  # it is missing, or holds other files
            own.rmdir()


def points_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of a sweep's points, in their order. Links are left out."""
    points = [
        path
        for path in folder.iterdir()
        if _POINT.fullmatch(path.name) and kind(path) == "a folder"
    ]
    return sorted(points, key=lambda path: int(path.name.split("_")[0]))


def tell(text: str, shown: bool) -> None:
    """Print a text where progress is shown; otherwise log it."""
    if shown:
        console = Console()
        lines = textwrap.wrap(text, console.width, break_long_words=False, break_on_hyphens=False)
        console.print(
            "\n".join(lines), highlight=False, markup=False, soft_wrap=True
        )  # paths stay whole
    else:
        _LOG.info("%s", text)


Told: TypeAlias = Callable[..., None]
"""`told(done, state, figures=None)`: rounds done, what a run is at, and figures, which stay until there are others."""

_ONE_LINE: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"}


class _Bar(Progress):
    """A bar, and a line of figures below it, that fit a terminal of 80 columns.

    The time left follows from the pace since `since`, when `base` was done.
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
        self.whole, self.count, self.figures = total, count, ""
        super().__init__(*columns, disable=not show, expand=True)
        self.done, self.base, self.since = 0.0, 0.0, time.monotonic()
        self.line = self.add_task(name, total=total, count="", state="", left="")

    def get_renderables(self) -> Iterator[RenderableType]:
        """The bar, and the figures."""
        yield from super().get_renderables()
        yield Text(f"  {self.figures}", **_ONE_LINE)

    def tell(self, done: float, state: str, figures: str | None = None) -> None:
        """Move it."""
        self.done, self.figures = done, self.figures if figures is None else figures
        left = "-:--:--"
        if done > self.base:
            pace = (time.monotonic() - self.since) / (done - self.base)
            left = str(datetime.timedelta(seconds=round(pace * (self.whole - done))))
        self.update(
            self.line,
            total=self.whole,
            completed=done,
            count=self.count(done, self.whole),
            state=state,
            left=left,
        )


_WHOLE: contextvars.ContextVar[Callable[[int, int], Told] | None] = contextvars.ContextVar(
    "whole", default=None
)
"""Within `shared_bar`, what a run of some rounds, the first of them restored, tells how far it is."""


@contextlib.contextmanager
def progress_bar(name: str, rounds: int, show: bool, start: int = 0) -> Iterator[Told]:
    """A bar of a run that begins after round `start`; a part of a whole (see `shared_bar`) moves the bar of that."""
    if (part := _WHOLE.get()) is not None:
        yield part(rounds, start)
        return
    with _Bar(name, float(rounds), show, lambda done, whole: f"{done:.0f}/{whole:.0f}") as bar:

        def told(done: int, state: str, figures: str | None = None) -> None:
            if done == start:  # what comes before the first round has another pace
                bar.base, bar.since = float(done), time.monotonic()
                state += f", from round {start}" if start else ""
            bar.tell(float(done), state, figures)

        told(start, "starting")
        yield told
        bar.tell(bar.done, "finished")


class Whole:
    """Many runs, by the clients that they train."""

    def __init__(self, bar: _Bar) -> None:
        self._bar, self._before = bar, 0.0

    @contextlib.contextmanager
    def part(self, name: str, work: float) -> Iterator[None]:
        """A run that trains `work` clients in all; rounds that it reads from its folder take no time."""

        def of_run(rounds: int, start: int) -> Told:
            def told(done: int, state: str, figures: str | None = None) -> None:
                self._bar.tell(
                    self._before + work * done / rounds,
                    name,
                    ": ".join(filter(None, [state, figures])),
                )

            self._bar.base += work * start / rounds
            told(start, "from its folder" if start else "starting")
            return told

        token = _WHOLE.set(of_run)
        try:
            yield
        finally:
            _WHOLE.reset(token)
        self._before += work
        self.say(name)

    def say(self, state: str) -> None:
        """What is done between two runs."""
        self._bar.tell(self._before, state, "")

    def skip(self, work: float) -> None:
        """Clients that need not be trained after all."""
        self._bar.whole -= work


@contextlib.contextmanager
def shared_bar(name: str, work: float, show: bool) -> Iterator[Whole]:
    """One bar over runs that train `work` clients together, each within a `part`."""
    with _Bar(name, work, show, lambda done, whole: f"{done / whole:.0%}") as bar:
        yield Whole(bar)
        bar.tell(bar.done, "finished", "")


def _json(value: Any) -> Any:
    """Values that JSON lacks, in full: configurations that differ must not look alike."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | {
            f.name: getattr(value, f.name) for f in dataclasses.fields(value)
        }
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        array = np.asarray(value)
        if array.size <= 1000:
            return array.tolist()
        digest = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
        return {"sha256": digest, "shape": array.shape, "dtype": array.dtype.name}
    raise ValueError(
        f"config holds {value!r}: give numbers, texts, arrays, paths, dataclasses, or lists of them"
    )
