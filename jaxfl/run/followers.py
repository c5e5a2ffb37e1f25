"""Followers of a run's loop: warnings, callbacks, the progress bar, and regular checkpoints."""

import math
import time
from collections.abc import Sequence

import jax

from jaxfl.engine import processes
from jaxfl.engine.evaluate import PerClient
from jaxfl.run import bars
from jaxfl.run.callbacks import Callback, EpsilonBudget, ask
from jaxfl.run.health import Watch
from jaxfl.run.loop import Follower, Loop

_CHECKPOINT_SECONDS = 30.0
"""Time after which a run writes the next checkpoint, in seconds."""


class Health(Follower):
    """Warnings about what is not finite, which may also end a single run.

    Args:
        watch: Object that decides on the warnings.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._weights: list = []

    def begin(self, loop: Loop) -> None:
        """Keep the weights before the first round of a run that is new and has one process."""
        if loop.done == 0 and jax.process_count() == 1:
            # The first call of the rounds donates the weights, so this line reads them before.
            self._weights = loop.models()

    def after_rounds(self, loop: Loop, count: int, seconds: float) -> None:
        """Warn about dropped updates, and after round 1 if updates seem to be weights.

        Before an evaluation of a run that is no sweep, raise a FloatingPointError if all updates
        since the last evaluation were dropped, and no later one could be finite.
        """
        previous = loop.previous_evaluation
        self.watch.dropped(loop.records, previous, loop.done)
        # The first call has a single round, after which the server has moved by one step.
        if self._weights and loop.done == 1:
            lengths = [float(records.info["update_norm"][0]) for records in loop.records]
            self.watch.sent(self._weights, loop.models(), lengths)
        # No later round needs the weights, which take memory.
        self._weights = []
        # A run in which no update counts any more stops here, before it evaluates.
        if loop.plan.points is None and loop.done in loop.evaluations:
            self.watch.updates(loop.records[0], previous, loop.done)

    def after_evaluation(self, loop: Loop, scores: Sequence[PerClient]) -> None:
        """Warn about scores that are not finite."""
        self.watch.scores(scores, loop.done)


class Callbacks(Follower):
    """Callbacks of a run, which get all rows of metrics and may end the run.

    Args:
        callbacks: The callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = callbacks

    def begin(self, loop: Loop) -> None:
        """Start the budgets, and call all callbacks with the rows of a resumed run."""
        for budget in self.callbacks:
            # Only a single run has callbacks, so there is one journal.
            if isinstance(budget, EpsilonBudget):
                budget.begin(loop.journals[0].ahead, loop.done)
        if loop.journals[0].metrics:
            self._ask(loop)

    def after_evaluation(self, loop: Loop, scores: Sequence[PerClient]) -> None:
        """Call all callbacks with the new row."""
        self._ask(loop)

    def _ask(self, loop: Loop) -> None:
        """Call all callbacks. If one raises, save the run, unless there are several processes."""
        try:
            loop.over = ask(self.callbacks, loop.journals[0].metrics)
        # A callback may also end the program.
        except (Exception, SystemExit):
            # Other processes would not take part in writing a checkpoint.
            if jax.process_count() == 1:
                loop.save()
            raise


class Bar(Follower):
    """Progress bar of a run.

    Args:
        update: Function that moves the bar (see `bars.Update`).
    """

    def __init__(self, update: bars.Update) -> None:
        self.update = update
        self._rate = math.nan

    def compiling(self, loop: Loop) -> None:
        """Show that the chunk is measured, or that the program compiles."""
        state = "compiling"
        if loop.engine.chunk == "auto":
            state = "measuring the chunk"
        self.update(loop.done, state)

    def after_rounds(self, loop: Loop, count: int, seconds: float) -> None:
        """Measure how many clients trained per second in the last `count` rounds."""
        last = slice(loop.done - count, loop.done)
        trained = sum(records.info["participants"][last].sum() for records in loop.records)
        self._rate = trained / seconds

    def after_segment(self, loop: Loop) -> None:
        """Move the bar, and show the last headline metric and epsilon, the pace and the chunk."""
        figures = []
        rows = [journal.metrics[-1] for journal in loop.journals if journal.metrics]
        if rows:
            headline = loop.journals[0].task.headline
            if score := _as_range([row[headline] for row in rows]):
                figures.append(f"{headline} {score}")
            figures.append(bars.shown_epsilon(rows))
        digits = 1
        if self._rate >= 10:
            digits = 0
        figures.append(f"{self._rate:,.{digits}f} clients/s")
        if loop.program is not None:
            figures.append(f"chunk {loop.program.chunk}")
        self.update(loop.done, "running", ", ".join(figures))


def _as_range(values: Sequence[float]) -> str:
    """Return the range of the values that are not NaN as text.

    >>> _as_range([0.93, 0.88, math.nan]), _as_range([0.91]), _as_range([math.nan])
    ('0.880 to 0.930', '0.910', '')
    """
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    low = f"{min(known):.3f}"
    high = f"{max(known):.3f}"
    if low == high:
        return low
    return f"{low} to {high}"


class Saver(Follower):
    """Writer of checkpoints after segments of rounds.

    It writes one if the last one is half a minute old, and one when the run stops or finishes.
    """

    def __init__(self) -> None:
        self._saved_at = time.monotonic()

    def after_segment(self, loop: Loop) -> None:
        """Write a checkpoint if it is time for one, or if the run ends here."""
        seconds = time.monotonic() - self._saved_at
        # The clocks of processes differ, but all processes write a checkpoint together.
        (late,) = processes.maximum(seconds > _CHECKPOINT_SECONDS)
        if late or loop.signal or loop.over or loop.finished:
            loop.save()
            self._saved_at = time.monotonic()
