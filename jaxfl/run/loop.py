"""Loop of the host over the rounds of a run, and the base class of what follows it."""

import bisect
import functools
import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl.engine import processes
from jaxfl.engine.chunk import Program, attempt, half
from jaxfl.engine.evaluate import PerClient
from jaxfl.engine.interface import Engine
from jaxfl.engine.mesh import everywhere
from jaxfl.engine.round import Center, Records
from jaxfl.privacy.audit import Scores, model_in, with_final
from jaxfl.report import plots
from jaxfl.run.central import Central
from jaxfl.run.checkpoint import Checkpoints
from jaxfl.run.flags import scores_may_be_undefined
from jaxfl.run.kept import BestModels
from jaxfl.run.plan import RunPlan
from jaxfl.run.recorder import EvaluationSchedule, Journal, Recorded
from jaxfl.types import Tree

_SEGMENT_SECONDS = 10.0
"""Seconds that the rounds of one call should take, because progress and signals wait for them.

A call has at least one round, which may take longer.
"""

SEGMENT_ROUNDS = 16
"""Maximum number of rounds of one call.

It is a constant, so that the length of a run does not change the compiled program.
"""


class Follower:
    """Base class of objects whose hooks a loop calls. Its own hooks do nothing."""

    def begin(self, loop: "Loop") -> None:
        """React to a loop that starts, or resumes."""

    def compiling(self, loop: "Loop") -> None:
        """React to a loop that compiles its rounds, which may take a while."""

    def after_rounds(self, loop: "Loop", count: int, seconds: float) -> None:
        """React to the last `count` rounds, which took `seconds` and are recorded."""

    def after_evaluation(self, loop: "Loop", scores: Sequence[PerClient]) -> None:
        """React to the scores of all clients, by run or point, which are recorded."""

    def after_segment(self, loop: "Loop") -> None:
        """React to a finished call of the rounds, after the evaluation that may follow it."""


class Loop:
    """State of a run, or of all points of a sweep, between calls of the compiled rounds.

    Args:
        plan: Plan of the run.
        engine: Rounds and evaluations on the devices.
        journals: Records of the run, or of each point.
        checkpoints: Checkpoints of the run. None writes and reads none.
        central: Test set on which the global model is scored, if there is one.
    """

    def __init__(
        self,
        plan: RunPlan,
        engine: Engine,
        journals: Sequence[Journal],
        checkpoints: Checkpoints | None,
        central: Central | None = None,
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.journals = journals
        self.checkpoints = checkpoints
        self.central = central
        self.best: BestModels | None = None
        self.program: Program | None = None
        # This comes from the plan, because a checkpoint without states does not say whether they
        # were dropped.
        self.keeps_states = plan.schedule(engine).states
        self.done = 0
        """Number of finished rounds."""
        self.restored = 0
        """Number of these rounds that were read from the folder."""
        self.saved = 0
        """Number of rounds of the newest checkpoint."""
        self.over = False
        """Whether a follower ends the run early."""
        self.signal = 0
        """Number of the signal that asks the run to stop, or 0."""
        self.first_models: list[np.ndarray | None] = []
        if plan.settings.audit is not None:
            # An audit compares the last model with the first one, which the first call donates.
            self.first_models = self.models()
        if plan.settings.keep == "best":
            journal = journals[0]
            tested = bool(journal.test_size.any())
            self.best = BestModels(journal.task, tested, self._servers(), self.states())

    @property
    def finished(self) -> bool:
        """Whether all planned rounds are done, which is False if a follower ended the run early."""
        return self.done == self.plan.settings.rounds

    @property
    def evaluations(self) -> list[int]:
        """Numbers of the rounds after which all clients are evaluated."""
        return self.journals[0].evaluations

    @property
    def previous_evaluation(self) -> int:
        """Round of the last evaluation before round `done`, or 0."""
        index = bisect.bisect_left(self.evaluations, self.done)
        if not index:
            return 0
        return self.evaluations[index - 1]

    @property
    def records(self) -> list[Records]:
        """Records of all rounds, of the run or of each point."""
        return [journal.recorded.records for journal in self.journals]

    def go(self, followers: Sequence[Follower], asked: Callable[[], int]) -> None:
        """Run, evaluate and save until all rounds are done, or until a follower ends the run.

        Args:
            followers: Followers of the loop, in the order of their calls.
            asked: Function that returns the number of the first signal, or 0 before it.

        Raises:
            KeyboardInterrupt: A signal asked the run to stop.
            FloatingPointError: The server's state of a single run is not finite, or a follower
                raised the error.
        """
        for follower in followers:
            follower.begin(self)
        # A callback may end the run in one process, and the others must then end it too.
        self.over = bool(processes.maximum(self.over)[0])
        # The pace is not known before the first call, which therefore has one round.
        pace = math.inf
        while not (self.finished or self.over):
            program = self._compiled(followers)
            # A call ends at the next evaluation at the latest.
            target = self.evaluations[bisect.bisect_right(self.evaluations, self.done)]
            in_time = max(1, _SEGMENT_SECONDS // pace)
            count = int(min(target - self.done, SEGMENT_ROUNDS, in_time))
            seconds = self._run_rounds(program, count)
            if seconds is None:
                continue
            for follower in followers:
                follower.after_rounds(self, count, seconds)
            if self.done == target:
                scores = self._evaluate()
                for follower in followers:
                    follower.after_evaluation(self, scores)
            # All processes must make the same next step, so they agree on what it follows from.
            pace, signal, over = processes.maximum(seconds / count, asked(), self.over)
            self.signal = int(signal)
            self.over = bool(over)
            for follower in followers:
                follower.after_segment(self)
            # The followers have seen the signal, so that one of them could save the run.
            if self.signal:
                raise KeyboardInterrupt

    def _run_rounds(self, program: Program, count: int) -> float | None:
        """Run and record the next `count` rounds, and return their seconds.

        None means that the devices had too little memory. The loop has then returned to its last
        checkpoint, with half the chunk.
        """
        call = functools.partial(self.engine.rounds, self.done, count)
        start = time.monotonic()
        records = attempt(call, program.chunk)
        if records is None:
            self._begin_again(half(program.chunk))
            return None
        seconds = time.monotonic() - start
        self._record(records, count)
        return seconds

    def _compiled(self, followers: Sequence[Follower]) -> Program:
        """Return the program of the rounds, which is compiled before the first of them."""
        if self.program is None:
            for follower in followers:
                follower.compiling(self)
            algorithm = self.plan.algorithms[0]
            # The best chunk depends on these names, in addition to shapes and devices.
            names = algorithm.name, algorithm.model.name, repr(algorithm.mechanism.sampling)
            self.program = self.engine.compile(names, self._prepare)
        return self.program

    def _prepare(self, chunk: int) -> None:
        """Compile and import what is needed after the first rounds of a chunk's program."""
        # Compilers of several processes may talk to one another, in an order that all must share.
        if jax.process_count() == 1:
            with scores_may_be_undefined():
                self.engine.prepare_evaluation(self._evaluation_keys(), chunk)
        if any(journal.pictures for journal in self.journals):
            plots.import_matplotlib()

    def _begin_again(self, chunk: int) -> None:
        """Return to the last checkpoint, or to the start, because a failed call loses its state.

        Args:
            chunk: Chunk of the program that is compiled next.
        """
        self.program = None
        self.engine.begin(chunk)
        # Records and best states are blank until a checkpoint fills them.
        for journal in self.journals:
            journal.restore(journal.blank(journal.plan), 0, journal.plan)
        if self.best is not None:
            self.best.kept = self.best.blank()
        self.done = 0
        if self.checkpoints is not None:
            self.done = self.checkpoints.restore(self._blank, self._take)

    def _record(self, records: Records, count: int) -> None:
        """Add the records of the next `count` rounds to the journals.

        Raises:
            FloatingPointError: The server's state of a single run is not finite. Points of a sweep
                continue, and their scores show the problem.
        """
        for journal, part in zip(self.journals, self.plan.split(records), strict=True):
            journal.record(part, self.done, count)
        if self.plan.points is None:
            self.journals[0].require_finite(self.done, self.done + count)
        self.done += count

    def _evaluate(self) -> list[PerClient]:
        """Evaluate all clients, add their scores to the journals, and return each run's scores."""
        keys = self._evaluation_keys()
        with scores_may_be_undefined():
            scores = self.plan.split(self.engine.evaluate(keys, self.done - 1))
            central = self._central_scores()
        index = bisect.bisect_left(self.evaluations, self.done)
        for journal, own, shared in zip(self.journals, scores, central, strict=True):
            journal.evaluated(index, own, shared)
        if self.best is not None:
            self._keep_best(self.best)
        return scores

    def _evaluation_keys(self) -> Key[Array, "*P"]:
        """Return the key of an evaluation after the last round, or that of each point."""
        _, _, eval_key = self.plan.keys
        # `jaxfl.evaluate` derives the same key from the run's key and the number of rounds.
        return self.plan.each(lambda key: jax.random.fold_in(key, self.done))(eval_key)

    def _keep_best(self, best: BestModels) -> None:
        """Copy the states of the runs whose last evaluation is their best one into `best`."""
        rows = [journal.metrics[-1] for journal in self.journals]
        better = best.better(rows)
        if not better:
            # Client states take long to fetch, so they stay where they are.
            return
        servers = self._servers()
        states = self.states()
        for i in better:
            best.keep(i, rows[i], servers[i], states[i])

    def _central_scores(self) -> list[PerClient]:
        """Return each run's scores on the central test set, which are empty without one."""
        if self.central is None:
            return [{}] * len(self.journals)
        _, _, eval_key = self.plan.keys
        return self.plan.split(self.central.evaluate(eval_key, self.engine.center.server))

    def save(self) -> None:
        """Write a checkpoint of the current round, if the run has a folder."""
        if self.checkpoints is None:
            return
        # States that are dropped at the end are needed to resume until then.
        keeps = self.keeps_states or not self.finished
        schedule = EvaluationSchedule(self.plan.settings.rounds, self.evaluations, keeps)
        state = self._state(schedule, [journal.recorded for journal in self.journals])
        # Client states on the host must be on disk before the checkpoint that names them.
        self.engine.save(functools.partial(self.checkpoints.save, self.done, state, schedule))
        self.saved = self.done

    def restore(self) -> None:
        """Resume from the newest intact checkpoint, if there is one."""
        assert self.checkpoints is not None
        self.done = self.checkpoints.restore(self._blank, self._take)
        self.restored = self.done
        self.saved = self.done

    def _take(self, done: int, state: dict[str, Tree], schedule: EvaluationSchedule) -> None:
        """Resume from a checkpoint's state (see `Checkpoints.restore`)."""
        self.engine.restore(state)
        if self.best is not None:
            self.best.kept = state["best"]
        for journal, recorded in zip(self.journals, state["recorded"], strict=True):
            journal.restore(recorded, done, schedule)

    def _blank(self, schedule: EvaluationSchedule) -> dict[str, Tree]:
        """Return a state with the shapes of this plan's checkpoints, into which one is read."""
        return self._state(schedule, [journal.blank(schedule) for journal in self.journals])

    def _state(self, schedule: EvaluationSchedule, recorded: list[Recorded]) -> dict[str, Tree]:
        """Return the state that a checkpoint holds.

        Args:
            schedule: Plan of the checkpoint, which says whether it holds client states.
            recorded: Records of the run, or of each point.
        """
        state = self.engine.saved()
        if not schedule.states:
            state = state | {"states": ()}
        if self.best is not None:
            state = state | {"best": self.best.kept}
        return state | {"recorded": recorded}

    def where(self) -> str:
        """Return in words where a run that stops now would resume."""
        if self.checkpoints is None:
            again = "nothing is kept without a folder"
        elif self.saved == self.done:
            again = "the same command resumes from there"
        elif self.saved:
            again = f"the same command resumes from round {self.saved}"
        else:
            again = "nothing is saved yet, so the same command starts from round 0"
        return f"stopped after round {self.done} of {self.plan.settings.rounds}; {again}"

    def models(self) -> list[np.ndarray | None]:
        """Return each run's model as a vector on the host, or None if the server holds no model."""
        return [model_in(server, self.plan.update) for server in self._servers()]

    def _servers(self) -> list[Tree]:
        """Return each run's state of the server, on the host."""
        return self.plan.split(jax.device_get(self.engine.center.server))

    def states(self) -> list[Tree]:
        """Return each run's client states, or empty trees if the run does not keep them."""
        if self.keeps_states:
            return self.plan.split(self.engine.all_states())
        return [()] * len(self.journals)

    def centers(self) -> list[Center]:
        """Return each run's `Center`, the state of server and mechanism, on the devices."""
        center = self.engine.center
        if self.plan.points is None or jax.process_count() > 1:
            return self.plan.split(center)
        # The host splits the arrays, because a device takes a millisecond for each point.
        own = self.plan.split(jax.device_get(center))
        return everywhere(self.engine.population.mesh, own)

    def canary_scores(self) -> list[Scores | None]:
        """Return each run's canary scores, on the host.

        They are None without an audit, or if an error has deleted the arrays.
        """
        center = self.engine.center
        audited = self.plan.settings.audit is not None
        if not audited or any(leaf.is_deleted() for leaf in jax.tree.leaves(center)):
            return [None] * len(self.journals)
        scores = self.plan.split(jax.device_get(center.scores))
        models = zip(self.first_models, self.models(), strict=True)
        return [with_final(own, *pair) for own, pair in zip(scores, models, strict=True)]
