"""Progress bars of runs."""

import contextlib
import contextvars
import datetime
import logging
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

_LOG = logging.getLogger("jaxfl")


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
"""Function `update(rounds_done, state, figures=None)` that moves a bar.

The text `state` stands behind the bar and `figures` below it. None keeps the last figures.
"""

_ONE_LINE: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"}
"""Options of a column whose text is cut where it would need a second line."""


class _Bar(Progress):
    """Bar with a line of figures below it, which fit a terminal of 80 columns.

    The time left follows from the pace of the work beyond `base`, which began at the time `since`.

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
        """Show the work that is done, and the time left.

        Args:
            done: Amount of work that is done, out of `total`.
            state: Text behind the bar.
            figures: Line below the bar. None keeps the last figures.
        """
        self.done = done
        if figures is not None:
            self.figures = figures
        # Before any work is done, the pace is not known.
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
"""Function from a run's rounds and restored rounds to its `Update`.

`SharedBar.part` sets it within its block. It is None if a run has a bar of its own.
"""


@contextlib.contextmanager
def progress_bar(name: str, rounds: int, show: bool, start: int = 0) -> Iterator[Update]:
    """Show the bar of a run, and yield the function that moves it.

    A run within a `SharedBar.part` moves the shared bar.

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
                if start:
                    state += f", from round {start}"
            bar.move(float(done), state, figures)

        update(start, "starting")
        yield update
        bar.move(bar.done, "finished")


class SharedBar:
    """Bar of several runs, whose unit of work is one client that trains in one round."""

    def __init__(self, bar: _Bar) -> None:
        self._bar = bar
        self._before = 0.0

    @contextlib.contextmanager
    def part(self, name: str, work: float) -> Iterator[None]:
        """Let a run within the block move the bar.

        Rounds that the run reads from its folder take no time.

        Args:
            name: Name of the run.
            work: Number of clients that the run trains, summed over its rounds.
        """

        def update_of_run(rounds: int, start: int) -> Update:
            def update(done: int, state: str, figures: str | None = None) -> None:
                shown = ": ".join(filter(None, [state, figures]))
                self._bar.move(self._before + work * done / rounds, name, shown)

            # Rounds from a folder take no time, so they must not count for the pace.
            self._bar.base += work * start / rounds
            update(start, "from its folder" if start else "starting")
            return update

        token = _SHARED.set(update_of_run)
        try:
            yield
        finally:
            _SHARED.reset(token)
        # A part that raised an error does not get here, and does not count.
        self._before += work
        self.say(name)

    def say(self, state: str) -> None:
        """Show a state between two runs, without figures."""
        self._bar.move(self._before, state, "")

    def skip(self, work: float) -> None:
        """Subtract work that is not needed from the total. Negative work adds to it."""
        self._bar.total -= work


@contextlib.contextmanager
def shared_bar(name: str, work: float, show: bool) -> Iterator[SharedBar]:
    """Show one bar for several runs, and yield it. Each run moves it within a `part`.

    Args:
        name: Name at the left of the bar.
        work: Number of clients that all runs train, summed over rounds.
        show: Whether the bar is shown.
    """
    with _Bar(name, work, show, lambda done, total: f"{done / total:.0%}") as bar:
        yield SharedBar(bar)
        bar.move(bar.done, "finished", "")


def shown_epsilon(rows: Sequence[Mapping[str, float | int]]) -> str:
    """Return the largest epsilon over runs as text for a bar.

    The epsilon protects an example, and not a client, if only the epsilon of examples is finite.

    Args:
        rows: Last row of metrics of each run.
    """
    client = max(row["epsilon"] for row in rows)
    # Rows lack this column without private local steps.
    example = max(row.get("epsilon_example", math.inf) for row in rows)
    if math.isinf(client) and math.isfinite(example):
        return f"epsilon {example:.3g} (example)"
    return f"epsilon {client:.3g}"
