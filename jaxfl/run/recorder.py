"""Records of a run on its host: rounds, evaluations, privacy cost, and reports in its folder."""

import functools
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxfl._support import files
from jaxfl._support.checks import check_path
from jaxfl.engine.evaluate import PerClient, summarize
from jaxfl.engine.round import Records
from jaxfl.models.saved import save_models
from jaxfl.models.trained import TrainedModel
from jaxfl.privacy.accounting.ledgers import first_rounds, planned_ledger, running_epsilon
from jaxfl.privacy.audit import Scores, audit_report, guesses_of
from jaxfl.privacy.statement import (
    privacy_statement,
    split_clients,
    with_audit,
    with_choice,
    without_clients,
)
from jaxfl.report import layout, plots
from jaxfl.run.health import remedy
from jaxfl.run.trained import (
    Origin,
    Snapshot,
    check_has_states,
    global_model,
    personal_model,
    personal_privacy,
)
from jaxfl.tasks import CENTRAL
from jaxfl.types import Algorithm, Clients, Ledger, Tree


class Result(NamedTuple):
    """Result of a run.

    `server` is the server's last state. `metrics` has one row per evaluation. Its columns
    `bytes_up` and `bytes_down` are the bytes that one participant sends and receives in one round
    (see `jaxfl.traffic`). `scores` has each client's scores [C] by name at the last evaluation, and
    `history` has [E, C] at all E evaluations. `states` [C, ...] are the clients' last states, on
    the host, or () if the run did not keep them. With several processes they stay on the devices,
    and include padding rows. `ledger` is what the accountant reads, and `statement` is the privacy
    statement, which is empty before the first round.
    """

    server: Tree
    states: Tree
    metrics: list[dict[str, float | int]]
    scores: PerClient
    history: PerClient
    ledger: Ledger
    statement: dict[str, Any]
    memory: Tree = ()
    """Memory of the mechanism after the last round."""
    restored: int = 0
    """Number of rounds that were read from the folder, and not computed by this call."""
    audit: Scores | None = None
    """Scores of the canaries, or None without an audit."""
    dropped: float = 0.0
    """Number of dropped updates, divided by that of updates of clients with training examples.

    Updates are dropped if they are not finite. The share is at most 1.
    """
    origin: Origin | None = None
    """Method, clients and key of the run, which `model` needs. None if no run made the result."""
    best: Snapshot | None = None
    """States after the best evaluation with `keep="best"`. None otherwise, or without a score."""

    def model(self, client: int | None = None) -> TrainedModel:
        r"""Return the trained model, which maps inputs to outputs and to predictions.

        The global model is the one that the server broadcasts. A client's own model has the weights
        with which the client is evaluated:

        .. math:: \mathrm{personalize}(\theta, c_i, D_i)

        Its scores are those of `scores`, up to rounding. With `keep="best"`, both models are those
        of the best evaluation instead of the last one, and so are their scores.

        Args:
            client: Number of a client, from 0. None returns the global model.

        Guarantee: The statement covers the global model, which follows from what its observer of
            noisy sums and broadcasts sees. No epsilon covers all that a client's own model depends
            on. Without private local steps it was fitted to the client's examples without noise,
            and with them the epsilon is for what clients send. `about["privacy"]` says so.

        Raises:
            ValueError: No client has this number, or the method has no global model, such as
                `ifca` with its clusters, `fedrep` with its heads, and `local_only`. Or several
                processes share the run and `client` is given. Or the result is not from `simulate`
                or `sweep`.

        >>> from jaxfl import simulate
        >>> from jaxfl.algorithms import dp_fedavg_fb
        >>> from jaxfl.data import iid, load, make_clients, matching
        >>> from jaxfl.models import mlp
        >>> from jaxfl.privacy import Full
        >>> digits = load("digits")
        >>> rows = iid(digits.train_labels, 20, seed=0)
        >>> tests = matching(rows, digits.train_labels, digits.test_labels, seed=0)
        >>> network = mlp((8, 8, 1), 10, hidden=(16,))
        >>> method = dp_fedavg_fb(network, clip=1.0, noise_multiplier=10.0, sampling=Full())
        >>> clients = make_clients(digits, rows, tests)
        >>> result = simulate(0, method, clients, rounds=1, progress=False)
        >>> result.model().about["privacy"]  # doctest: +ELLIPSIS
        "This model follows from what the statement's observer of ... sees. Epsilon 0.3..."
        >>> result.model(client=3).about["privacy"]  # doctest: +ELLIPSIS
        'This model was fitted to the examples of client 3 without noise. No epsilon covers it...'
        """
        origin = self._known_origin()
        last = Snapshot(self.server, self.states, len(self.ledger.participants))
        snapshot = self.best or last
        if client is None:
            return global_model(origin, snapshot, self.statement)
        return personal_model(origin, snapshot, client)

    def _known_origin(self) -> Origin:
        if self.origin is None:
            raise ValueError(
                "result must be from `simulate` or `sweep`, got one without an origin. Run the "
                "method to make its models."
            )
        return self.origin

    def save(
        self, path: str | os.PathLike, client: int | Literal["all"] | None = None
    ) -> pathlib.Path:
        """Write a trained model into a file of safetensors, and return its path.

        The file has the weights, and a JSON text in its header that says what they are: method,
        round, network, task, versions, and which epsilon covers them. Nothing is pickled.
        `jaxfl.load_model` reads it in another process.

        Args:
            path: The file, for instance "model.safetensors". An earlier file of this function is
                replaced, and nothing else is.
            client: Number of a client, from 0, whose own model is written. "all" writes the own
                models of all clients into one file. None writes the global model.

        Guarantee: As in `model`. The file of a global model has the privacy statement, without
            epsilons of single clients. The file of a client's own model says who may have it.

        Raises:
            ValueError: The path belongs to something else, or `model` raises the error.
        """
        path = pathlib.Path(check_path("path", path))
        if client == "all":
            origin = self._known_origin()
            check_has_states(client)
            models = [self.model(i) for i in range(origin.clients.num_clients)]
            privacy = personal_privacy(origin.algorithm, None)
            # What is said about the models of two clients differs in these entries only.
            about = models[0].about | {"client": "all", "privacy": privacy}
            save_models(path, models, about)
        else:
            model = self.model(client)
            save_models(path, [model], model.about)
        return path


class EvaluationSchedule(NamedTuple):
    """Number of rounds of a run, and the rounds of its evaluations."""

    rounds: int
    evaluations: list[int]
    """Numbers of the rounds after which all clients are evaluated."""
    states: bool = True
    """Whether the clients' states stay after the last round."""


class Recorded(NamedTuple):
    """Host arrays of a run, with zeros for rounds and evaluations that are yet to come."""

    records: Records
    """Records with a leading axis for the rounds."""
    scores: PerClient
    """Scores [E, C] of all clients at all E evaluations, by name."""
    central: dict[str, np.ndarray]
    """Scores [E] of the global model on a central test set, by name. Empty without such a set."""


class Journal:
    """Records of a run, which `finish` turns into a privacy statement and reports.

    Args:
        algorithm: Algorithm of the run.
        clients: All clients of the run.
        plan: Plan of the run.
        record: Shapes of the records of one round.
        folder: Folder of the reports. None writes nothing.
        public: Whether reports leave out what follows from private data without noise.
        facts: Arguments `randomness`, `paired` and `stateful` of `privacy_statement`.
        pictures: Whether the reports have curves.
        central: Whether the global model is scored on a central test set.
        best: Whether the best round is chosen by test scores.
        traffic: Columns of all rows about the bytes of a participant.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        clients: Clients,
        plan: EvaluationSchedule,
        record: Records,
        folder: pathlib.Path | None,
        *,
        public: bool = False,
        facts: Mapping[str, Any] | None = None,
        pictures: bool = True,
        central: bool = False,
        best: bool = False,
        traffic: Mapping[str, int] | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.plan = plan
        self.folder = folder
        self.public = public
        self.pictures = pictures and folder is not None
        self.central = central
        self.best = best
        self.traffic = dict(traffic or {})
        self.clients = clients
        self.num_clients = clients.num_clients
        self.test_size = np.asarray(clients.test_size)
        self.trains = np.asarray(clients.train_size) > 0
        self.facts = _known_facts(algorithm, clients) | dict(facts or {})
        """Arguments of `privacy_statement`."""
        # Only these facts change an epsilon.
        names = {"dp_sgd", "examples", "terms", "stateful"}
        shared = {name: fact for name, fact in self.facts.items() if name in names}
        self.spent = running_epsilon(algorithm.mechanism, clients.num_clients, **shared)
        self.task = algorithm.model.task
        self.one = record
        self.recorded = self.blank(plan)
        self.metrics: list[dict[str, float | int]] = []
        self.written = 0
        """Number of rows in the folder that this journal wrote."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def evaluations(self) -> list[int]:
        """Numbers of the rounds after which all clients are evaluated."""
        return self.plan.evaluations

    def blank(self, plan: EvaluationSchedule) -> Recorded:
        """Return zeros with room for the records of all rounds and evaluations of a plan."""
        records = jax.tree.map(
            lambda leaf: np.zeros((plan.rounds, *leaf.shape), leaf.dtype), self.one
        )
        evaluations = len(plan.evaluations)
        names = ("loss", *self.task.metrics)
        scores = {name: np.zeros((evaluations, self.num_clients), np.float32) for name in names}
        central_names = ()
        if self.central:
            central_names = names
        central = {name: np.zeros(evaluations, np.float32) for name in central_names}
        return Recorded(records, scores, central)

    def record(self, records: Records, done: int, count: int) -> None:
        """Add the records of the `count` rounds after round `done`. Further records are padding."""
        _put_rows(self.recorded.records, records, done, count)

    def require_finite(self, start: int, done: int) -> None:
        """Raise if the server's state was not finite after one of the rounds start + 1 to `done`.

        Raises:
            FloatingPointError: The state was not finite. The message has the round and a remedy.
        """
        broken = np.flatnonzero(~self.recorded.records.server_finite[start:done])
        if broken.size:
            # The later rounds start from the state of the first broken one.
            round_ = start + int(broken[0]) + 1
            raise FloatingPointError(
                f"the server's state turned non-finite in round {round_}: "
                f"{remedy([self.algorithm], self.clients)}"
            )

    def evaluated(self, index: int, scores: PerClient, central: PerClient | None = None) -> None:
        """Add the scores of the evaluation with this index, and write its row of metrics.

        Args:
            index: Index of the evaluation.
            scores: Scores [C] of all clients.
            central: Scores of the global model on the central test set, if the run has such a set.
        """
        for name, all_ in self.recorded.scores.items():
            all_[index] = scores[name]
        for name, value in (central or {}).items():
            self.recorded.central[name][index] = value
        self.metrics.append(self._row(index))
        if self.folder is not None:
            self._keep(self.folder / layout.METRICS)

    def _keep(self, path: pathlib.Path) -> None:
        """Append the last row to the file, or write all rows if the file lacks earlier ones."""
        if self.written and self.written == len(self.metrics) - 1 and files.is_regular(path):
            files.append_metrics(path, self.metrics[-1])
        else:
            files.write_metrics(path, self.metrics)
        self.written = len(self.metrics)

    def restore(self, recorded: Recorded, done: int, schedule: EvaluationSchedule) -> None:
        """Resume from the records of a checkpoint.

        Args:
            recorded: Records of the checkpoint.
            done: Number of rounds after which the checkpoint was made.
            schedule: Plan of the checkpoint, with at most as many rounds as this run's.
        """
        # An extended run keeps its past evaluations, and follows its own plan from here on.
        past = [r for r in schedule.evaluations if r <= done]
        future = [r for r in self.plan.evaluations if r > done]
        self.plan = self.plan._replace(evaluations=[*past, *future])
        self.recorded = self.blank(self.plan)
        # The stored arrays have room for the stored plan, so only finished entries are copied.
        _put_rows(self.recorded.records, recorded.records, 0, done)
        _put_rows(self.recorded.scores, recorded.scores, 0, len(past))
        _put_rows(self.recorded.central, recorded.central, 0, len(past))
        # Rows follow from the records, so checkpoints do not hold them.
        self.metrics = [self._row(i) for i in range(len(past))]
        # The file may have other rows than the checkpoint, so the next row writes it anew.
        self.written = 0

    def finish(self, done: int, canaries: Scores | None = None) -> Result:
        """Account for the finished rounds, write the reports, and return the result.

        `server` and `states` of this result are None.

        Args:
            done: Number of finished rounds.
            canaries: Scores of the canaries of an audit.
        """
        ledger = jax.tree.map(lambda leaf: leaf[:done], self.recorded.records.ledger)
        # The last evaluation up to `done` may have failed, so the number comes from the rows.
        evaluations = len(self.metrics)
        history = jax.tree.map(lambda leaf: leaf[:evaluations], self.recorded.scores)
        scores = jax.tree.map(_last_row, history)
        # Without a round there is no statement that could have an audit.
        if not done:
            canaries = None
        statement = self._statement(done, canaries)
        if self.folder is not None:
            self._write(self.folder, history, ledger, statement)
            if canaries is not None:
                files.write_arrays(self.folder / layout.AUDIT, guesses_of(canaries))
        return Result(
            server=None,
            states=None,
            metrics=self.metrics,
            scores=scores,
            history=history,
            ledger=ledger,
            statement=statement,
            audit=canaries,
            dropped=self._dropped(ledger, done),
        )

    def _statement(self, done: int, canaries: Scores | None) -> dict[str, Any]:
        """Return the privacy statement of the finished rounds, which is empty without any."""
        if not done:
            return {}
        accounted = self._accounted(done)
        mechanism = self.algorithm.mechanism
        statement = privacy_statement(accounted, mechanism, self.num_clients, **self.facts)
        if self.public:
            # Epsilons by client would show how often each of them took part.
            statement = without_clients(statement)
        if self.best:
            statement = with_choice(statement)
        if canaries is None:
            return statement
        return with_audit(statement, audit_report(canaries, statement["delta"]))

    def _dropped(self, ledger: Ledger, done: int) -> float:
        """Return the share of dropped updates (see `Result.dropped`), or 0 without any updates."""
        participations = int(ledger.participants.sum(0)[self.trains].sum())
        dropped = int(self.recorded.records.nonfinite[:done].sum())
        if not participations:
            return 0.0
        # Updates of clients without examples may be dropped too, so the ratio may exceed 1.
        return min(1.0, dropped / participations)

    def _row(self, index: int) -> dict[str, float | int]:
        """Return the row of metrics of an evaluation.

        The row has scores over clients, epsilons, bytes, and the means of the records of the rounds
        since the previous row. A public report has no such means.
        """
        done = self.evaluations[index]
        scores = jax.tree.map(lambda leaf: leaf[index], self.recorded.scores)
        row: dict[str, float | int] = {"round": done}
        row |= summarize(scores, self.test_size, self.task.metrics)
        central = self.recorded.central.items()
        row |= {f"{CENTRAL}{name}": float(values[index]) for name, values in central}
        if not self.public:
            start = 0
            if index:
                start = self.evaluations[index - 1]
            row |= _means(jax.tree.map(lambda leaf: leaf[start:done], self.recorded.records))
        return row | self.epsilons(self._accounted(done)) | self.traffic

    def epsilons(self, ledger: Ledger) -> dict[str, float]:
        """Return the epsilons of a ledger's rounds, by column (see `layout.COLUMNS`)."""
        spent = self.spent(ledger)
        columns = {"epsilon": spent.epsilon, "epsilon_rdp": spent.rdp}
        if spent.upload is not None:
            columns["epsilon_upload"] = spent.upload
        if spent.example is not None:
            columns["epsilon_example"] = spent.example
        return columns

    def ahead(self, done: int) -> dict[str, float]:
        """Return a forecast of the columns of `epsilons` at the first evaluation after `done`.

        It assumes that every client takes part in every round in which it can.
        """
        # After the last evaluation, the forecast has no further rounds.
        last = next((r for r in self.evaluations if r > done), done)
        past = self._accounted(done)
        plan = first_rounds(self._planned, last)
        if not done:
            return self.epsilons(plan)
        return self.epsilons(_continued(past, plan, done, last))

    def _accounted(self, done: int) -> Ledger:
        """Return the ledger of the first rounds, as planned if the report is public."""
        ledger = self.recorded.records.ledger
        # The rounds as they happened show who was drawn how often.
        if self.public:
            ledger = self._planned
        return first_rounds(ledger, done)

    @functools.cached_property
    def _planned(self) -> Ledger:
        """Ledger of all rounds as planned, in single precision as the engine records it."""
        algorithm = self.algorithm
        plan = planned_ledger(
            algorithm.mechanism, self.num_clients, self.plan.rounds, algorithm.dp_sgd
        )
        # Participants are not converted: booleans take a quarter of the memory of floats.
        numbers = plan._replace(participants=np.zeros(()))
        single = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), numbers)
        return single._replace(participants=plan.participants)

    def _write(
        self, folder: pathlib.Path, history: PerClient, ledger: Ledger, statement: dict[str, Any]
    ) -> None:
        files.write_metrics(folder / layout.METRICS, self.metrics)
        statement, epsilons = split_clients(statement)
        arrays: dict[str, Any] = {"test_size": self.test_size} | epsilons
        if not self.public:
            arrays["participations"] = ledger.participants.sum(0)
        if self.metrics:
            rounds = np.array([row["round"] for row in self.metrics])
            arrays = history | arrays | {"round": rounds}
            if self.pictures:
                plots.draw_curves(
                    folder / layout.CURVES, self.algorithm.name, self.metrics, self.task.headline
                )
        if self.metrics or statement:
            files.write_arrays(folder / layout.PER_CLIENT, arrays)
        if statement:
            # A statement has infinity as a text, because JSON has no such number.
            files.write_json(folder / layout.PRIVACY, statement, allow_nan=False)


def _known_facts(algorithm: Algorithm, clients: Clients) -> dict[str, Any]:
    """Return the arguments of `privacy_statement` that follow from method and clients."""
    examples = int(np.sum(np.asarray(clients.train_size), dtype=np.int64))
    return {
        "dp_sgd": algorithm.dp_sgd,
        # Clients may have no training example at all.
        "examples": examples or None,
        "terms": algorithm.terms,
    }


def _last_row(rows: np.ndarray) -> np.ndarray:
    """Return the last row of an array, or NaN for each entry if the array has no rows."""
    if not len(rows):
        return np.full(rows.shape[1:], np.nan)
    return rows[-1]


def _put_rows(arrays: Tree, rows: Tree, start: int, count: int) -> None:
    """Put the first `count` rows of each array into the array of the same place, from `start`."""

    def put(all_: np.ndarray, segment: np.ndarray) -> None:
        all_[start : start + count] = segment[:count]

    jax.tree.map(put, arrays, rows)


def _continued(past: Ledger, plan: Ledger, done: int, last: int) -> Ledger:
    """Return the ledger of `done` past rounds and of the planned ones up to round `last`."""
    joined = functools.partial(_joined, done=done, last=last)
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
    return Ledger(**fields, notes=notes)


def _joined(past: np.ndarray, planned: np.ndarray, done: int, last: int) -> np.ndarray:
    """Return a field of `_continued`, with a row for each round."""
    # One of the two may have one entry for all clients, and the plan one for all rounds.
    shape = np.broadcast_shapes(past.shape[1:], planned.shape[1:])
    rest = np.broadcast_to(planned, (last, *planned.shape[1:]))[done:]
    parts = [np.broadcast_to(part, (len(part), *shape)) for part in (past, rest)]
    return np.concatenate(parts).astype(past.dtype)


def _means(records: Records) -> dict[str, float | int]:
    """Return the columns of a row that follow from the records of some rounds.

    Columns are means over rounds of means over participants. Rounds in which no update counted are
    left out, except from the mean number of participants. `nonfinite` counts dropped updates.
    """
    participants = records.info["participants"]
    # A round counts if at least one of its updates was finite.
    counted = participants > records.nonfinite
    means: dict[str, float | int] = {}
    for name, values in records.info.items():
        column = name
        # The name `loss` belongs to the loss on test examples.
        if name == "loss":
            column = "train_loss"
        means[column] = float(values[counted].mean()) if counted.any() else math.nan
    means["participants"] = float(participants.mean())
    means["nonfinite"] = int(records.nonfinite.sum())
    return means
