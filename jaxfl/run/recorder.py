"""One run as its host sees it: records of rounds and evaluations, the privacy cost, and reports in its folder."""

import functools
import math
import operator
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfl import files
from jaxfl.engine.evaluate import PerClient, summarize
from jaxfl.engine.round import Records
from jaxfl.privacy.accounting import first_rounds, planned_ledger, running_epsilon
from jaxfl.privacy.audit import Scores, audit_report, told
from jaxfl.privacy.statement import privacy_statement, split_clients, with_audit, without_clients
from jaxfl.run import plots, report
from jaxfl.run.health import remedy
from jaxfl.types import Algorithm, Clients, Ledger, Tree


class Result(NamedTuple):
    """The outcome of a run.

    `metrics` has one row per evaluation; `scores` are per client at the last one, `history` at all of them. `states`
    [C, ...] are on the host; those of several processes stay on their devices, with rows that fill these up.
    """

    server: Tree
    states: Tree
    metrics: list[dict[str, float | int]]
    scores: PerClient
    history: PerClient
    ledger: Ledger
    statement: dict[str, Any]
    memory: Tree = ()
    """The mechanism's memory after the last round."""
    restored: int = 0
    """Rounds read from the folder, not computed by this call."""
    audit: Scores | None = None
    """Of the canaries, where there were any."""
    dropped: float = 0.0
    """Share of the updates of clients with training examples that were not finite, and did not count."""


class Plan(NamedTuple):
    """How many rounds a run has, after which of them all clients are evaluated, and whether their states then stay."""

    rounds: int
    evaluations: list[int]
    states: bool = True


class Recorded(NamedTuple):
    """Host arrays that grow with the run: by round, and by evaluation."""

    records: Records
    scores: PerClient


class Journal:
    """A run's records so far; `finish` accounts for them, and states what it is `told` about the randomness.

    `record` has the shapes of one round's. `pictures` says whether the reports have curves.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: Clients,
        plan: Plan,
        record: Records,
        folder: pathlib.Path | None,
        *,
        public: bool = False,
        told: Mapping[str, Any] | None = None,
        pictures: bool = True,
    ) -> None:
        self.algorithm, self.plan, self.folder, self.public = algorithm, plan, folder, public
        self.pictures = pictures
        self.clients = clients
        self.test_size, self.number = np.asarray(clients.test_size), clients.number
        self.trains = np.asarray(clients.train_size) > 0
        examples = int(np.sum(np.asarray(clients.train_size), dtype=np.int64))
        self.told: dict[str, Any] = {
            "dp_sgd": algorithm.dp_sgd,
            "examples": examples,
            "terms": algorithm.terms,
            **(told or {}),
        }
        shared = {
            name: self.told[name]
            for name in ("dp_sgd", "examples", "terms", "stateful")
            if name in self.told
        }
        self.spent = running_epsilon(algorithm.mechanism, clients.number, **shared)
        self.task, self.one = algorithm.model.task, record
        self.recorded = self.blank(plan)
        self.metrics: list[dict[str, float | int]] = []
        self.written = 0
        """Rows in the folder that this journal wrote."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def evaluations(self) -> list[int]:
        """Numbers of the rounds after which all clients are evaluated."""
        return self.plan.evaluations

    def blank(self, plan: Plan) -> Recorded:
        """Room for the records of all rounds and evaluations of a plan."""
        records = jax.tree.map(
            lambda leaf: np.zeros((plan.rounds, *leaf.shape), leaf.dtype), self.one
        )
        shape = len(plan.evaluations), self.number
        return Recorded(
            records, {name: np.zeros(shape, np.float32) for name in ("loss", *self.task.metrics)}
        )

    def record(self, records: Records, done: int, count: int) -> None:
        """Keep a segment's records."""

        def put(all_: np.ndarray, segment: np.ndarray) -> None:
            all_[done : done + count] = segment[:count]

        jax.tree.map(put, self.recorded.records, records)

    def require_finite(self, start: int, done: int) -> None:
        """Raise if the server's state was broken in one of these rounds."""
        broken = np.flatnonzero(~self.recorded.records.server_finite[start:done])
        if broken.size:
            number = start + int(broken[0]) + 1
            raise FloatingPointError(
                f"the server's state turned non-finite in round {number}: {remedy([self.algorithm], self.clients)}"
            )

    def evaluated(self, index: int, scores: PerClient) -> None:
        """Keep the scores of an evaluation."""
        for name, all_ in self.recorded.scores.items():
            all_[index] = scores[name]
        self.metrics.append(self._row(index))
        if self.folder is not None:
            self._keep(self.folder / report.METRICS)

    def _keep(self, path: pathlib.Path) -> None:
        """Append the last row to the file that this journal wrote; write all of them where there is no such file."""
        if self.written and self.written == len(self.metrics) - 1 and files.is_regular(path):
            files.append_metrics(path, self.metrics[-1])
        else:
            files.write_metrics(path, self.metrics)
        self.written = len(self.metrics)

    def restore(self, recorded: Recorded, done: int, made: Plan) -> None:
        """Resume from what a checkpoint of `done` rounds holds, of a plan of as many rounds or fewer."""
        past = [r for r in made.evaluations if r <= done]
        self.plan = Plan(self.plan.rounds, [*past, *(r for r in self.plan.evaluations if r > done)])
        self.recorded = self.blank(self.plan)

        def put(count: int, mine: Tree, stored: Tree) -> None:
            jax.tree.map(
                lambda all_, rows: operator.setitem(all_, slice(count), rows[:count]), mine, stored
            )

        put(done, self.recorded.records, recorded.records)
        put(len(past), self.recorded.scores, recorded.scores)
        self.metrics = [self._row(i) for i in range(len(past))]
        self.written = 0

    def finish(self, done: int, memory: Tree) -> Result:
        """Account for the finished rounds and write the reports; the result has no server and states yet.

        Args:
            done: rounds.
            memory: the mechanism's; under an audit it holds the canaries' scores.
        """
        ledger = jax.tree.map(lambda leaf: leaf[:done], self.recorded.records.ledger)
        made = len(self.metrics)  # the last one planned up to `done` may have failed
        history = jax.tree.map(lambda leaf: leaf[:made], self.recorded.scores)
        scores = jax.tree.map(
            lambda leaf: leaf[-1] if made else np.full(self.number, np.nan), history
        )
        mechanism = self.algorithm.mechanism
        statement = (
            privacy_statement(self._accounted(done), mechanism, self.number, **self.told)
            if done
            else {}
        )
        if self.public and statement:
            statement = without_clients(statement)
        canaries = memory if done and isinstance(memory, Scores) else None
        if canaries is not None:
            statement = with_audit(statement, audit_report(canaries, statement["delta"]))
        if self.folder is not None:
            self._write(self.folder, history, ledger, statement)
            if canaries is not None:
                files.write_arrays(self.folder / report.AUDIT, told(canaries))
        dropped = self._dropped(ledger, done)
        return Result(
            None,
            None,
            self.metrics,
            scores,
            history,
            ledger,
            statement,
            audit=canaries,
            dropped=dropped,
        )

    def _dropped(self, ledger: Ledger, done: int) -> float:
        """Return the share of the updates that were dropped, of clients who have an example to train on."""
        made = int(ledger.participants.sum(0)[self.trains].sum())
        dropped = int(self.recorded.records.nonfinite[:done].sum())
        return min(1.0, dropped / made) if made else 0.0

    def _row(self, index: int) -> dict[str, float | int]:
        """One row of metrics: scores of all clients, and what the rounds since the previous row report."""
        done = self.evaluations[index]
        scores = jax.tree.map(lambda leaf: leaf[index], self.recorded.scores)
        row: dict[str, float | int] = {"round": done} | summarize(
            scores, self.test_size, self.task.metrics
        )
        if not self.public:
            since = slice(self.evaluations[index - 1] if index else 0, done)
            row |= _means(jax.tree.map(lambda leaf: leaf[since], self.recorded.records))
        return row | self.epsilons(self._accounted(done))

    def epsilons(self, ledger: Ledger) -> dict[str, float]:
        """Return the columns of a row that say what some rounds cost (see `report.COLUMNS`)."""
        spent = self.spent(ledger)
        columns = {"epsilon": spent.epsilon, "epsilon_rdp": spent.rdp}
        columns |= {} if spent.upload is None else {"epsilon_upload": spent.upload}
        return columns | ({} if spent.example is None else {"epsilon_example": spent.example})

    def ahead(self, done: int) -> dict[str, float]:
        """Return these columns at the next evaluation, if every client takes part in every round that it can."""
        last = next((r for r in self.evaluations if r > done), done)
        past = self._accounted(done)
        if not done:
            return self.epsilons(first_rounds(self._planned, last))
        plan = first_rounds(self._planned, last)

        def joined(made: np.ndarray, planned: np.ndarray) -> np.ndarray:
            shape = np.broadcast_shapes(made.shape[1:], planned.shape[1:])
            rest = np.broadcast_to(planned, (last, *planned.shape[1:]))[done:]
            parts = [np.broadcast_to(part, (len(part), *shape)) for part in (made, rest)]
            return np.concatenate(parts).astype(made.dtype)

        notes = {
            name: joined(note, plan.notes[name])
            for name, note in past.notes.items()
            if name in plan.notes
        }
        fields: dict[str, Any] = {
            name: joined(np.asarray(getattr(past, name)), np.asarray(getattr(plan, name)))
            for name in Ledger._fields
            if name != "notes"
        }
        return self.epsilons(Ledger(**fields, notes=notes))

    def _accounted(self, done: int) -> Ledger:
        """Return the first rounds as they happened, or, for a public report, as they were planned."""
        return first_rounds(self._planned if self.public else self.recorded.records.ledger, done)

    @functools.cached_property
    def _planned(self) -> Ledger:
        """All rounds of the plan in single precision, as the engine records them."""
        algorithm = self.algorithm
        plan = planned_ledger(algorithm.mechanism, self.number, self.plan.rounds, algorithm.dp_sgd)
        single = jax.tree.map(
            lambda leaf: np.asarray(leaf, np.float32), plan._replace(participants=np.zeros(()))
        )
        return single._replace(participants=plan.participants)

    def _write(
        self, folder: pathlib.Path, history: PerClient, ledger: Ledger, statement: dict[str, Any]
    ) -> None:
        files.write_metrics(folder / report.METRICS, self.metrics)
        statement, epsilons = split_clients(statement)
        arrays: dict[str, Any] = {"test_size": self.test_size} | epsilons
        if not self.public:
            arrays["participations"] = ledger.participants.sum(0)
        if self.metrics:
            arrays = history | arrays | {"round": np.array([row["round"] for row in self.metrics])}
            if self.pictures:
                plots.draw_curves(
                    folder / report.CURVES, self.algorithm.name, self.metrics, self.task.headline
                )
        if self.metrics or statement:
            files.write_arrays(folder / report.PER_CLIENT, arrays)
        if statement:
            files.write_json(folder / report.PRIVACY, statement, allow_nan=False)


def _means(records: Records) -> dict[str, float | int]:
    """Means over rounds of means over participants, without rounds in which no update counted."""
    participants = records.info["participants"]
    counted = participants > records.nonfinite
    means = {
        f"train_{name}" if name == "loss" else name: float(values[counted].mean())
        if counted.any()
        else math.nan
        for name, values in records.info.items()
    }
    return means | {
        "participants": float(participants.mean()),
        "nonfinite": int(records.nonfinite.sum()),
    }
