"""States of the round with the best test scores, of a run or of each point of a sweep."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from jaxfl.run.trained import Snapshot
from jaxfl.tasks import CENTRAL, Task
from jaxfl.types import Tree


def check_kept(stateful: bool, states: str) -> None:
    """Require a run whose best states can be kept in the memory of one process.

    Args:
        stateful: Whether clients keep a state between rounds.
        states: Place of the client states (see `simulate`).

    Raises:
        ValueError: Clients keep states that lie on the host, or several processes share the run.
    """
    if stateful and states == "host":
        raise ValueError(
            "keep must be 'last' with states='host' for a method whose clients keep a state, "
            "because the copy of all states may not fit in memory, got 'best'. Keep the states on "
            "the devices."
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"keep must be 'last' with several processes, got 'best' with {jax.process_count()}. "
            "Run one process."
        )


class Best(NamedTuple):
    """States after the best evaluation so far, as a checkpoint holds them."""

    score: Float[np.ndarray, "1"]
    """Score of the evaluation, with the opposite sign for a metric that is better if lower."""
    round: Int[np.ndarray, "1"]
    """Number of rounds before the evaluation, or 0 before the first known score."""
    server: Tree
    states: Tree


class BestModels:
    """The best states so far of all runs that advance together.

    The score is the headline metric's mean over clients, or the headline metric of a central test
    set if no client has test examples. A score of NaN never counts, and the first of equal scores
    does.

    Args:
        task: Task of the method.
        tested: Whether a client has test examples.
        server: First state of each run's server, on the host.
        states: First client states of each run, on the host.
    """

    def __init__(
        self, task: Task, tested: bool, server: Sequence[Tree], states: Sequence[Tree]
    ) -> None:
        self.column = task.headline
        if not tested:
            self.column = f"{CENTRAL}{task.headline}"
        self.lower_is_better = task.lower_is_better
        self._first = list(zip(server, states, strict=True))
        self.kept = self.blank()

    def blank(self) -> list[Best]:
        """Return each run's `Best` without a score: zeros for states, and minus infinity."""
        return [_without_score(server, states) for server, states in self._first]

    def better(self, rows: Sequence[dict[str, Any]]) -> list[int]:
        """Return the indices of the runs whose newest row has a better score than any before."""
        scores = [self._score(row) for row in rows]
        # NaN is not greater than any number, so it never counts.
        return [i for i, score in enumerate(scores) if score > self.kept[i].score[0]]

    def keep(self, index: int, row: dict[str, Any], server: Tree, states: Tree) -> None:
        """Replace the kept states of the run `index` by those after the evaluation of `row`."""
        score = np.array([self._score(row)], np.float32)
        number = np.array([row["round"]], np.int32)
        self.kept[index] = Best(score, number, server, states)

    def snapshots(self) -> list[Snapshot | None]:
        """Return each run's best states, or None if no score was known."""
        return [_as_snapshot(best) for best in self.kept]

    def _score(self, row: dict[str, Any]) -> float:
        """Return a row's score, in single precision as checkpoints hold it."""
        score = row.get(self.column, math.nan)
        if self.lower_is_better:
            score = -score
        # A resumed run must compare the same numbers as a run that was never stopped.
        return float(np.float32(score))


def _without_score(server: Tree, states: Tree) -> Best:
    """Return zeros with the shapes of some states, and minus infinity as their score."""
    # A checkpoint has the same arrays before and after the first score.
    zeros = jax.tree.map(lambda leaf: np.zeros_like(np.asarray(leaf)), (server, states))
    return Best(np.full(1, -np.inf, np.float32), np.zeros(1, np.int32), *zeros)


def _as_snapshot(best: Best) -> Snapshot | None:
    """Return a run's best states, or None if no score was known."""
    rounds = int(best.round[0])
    if not rounds:
        return None
    return Snapshot(best.server, best.states, rounds, chosen=True)
