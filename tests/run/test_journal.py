import json
import math
from typing import Any

import jax
import numpy as np
import pytest
from algorithms_table import MODEL, SIZES, small_clients

from jaxfl._support import files
from jaxfl.algorithms import dp_fedavg, fedavg
from jaxfl.engine.round import Records
from jaxfl.privacy import Full
from jaxfl.report import layout
from jaxfl.run.recorder import EvaluationSchedule, Journal
from jaxfl.types import Ledger

MAKE: Any = Records  # of host arrays, as a run reads them

C, ROUNDS = len(SIZES), [2, 4, 6]
PARTICIPANTS = np.array([3.0, 0, 0, 0, 2, 1], np.float32)
DROPPED = np.array([1, 0, 0, 0, 0, 1], np.int32)


def records():
    """Return six rounds. Rounds 2 to 4 have no participants, and round 6 drops its only update."""
    loss = np.array([2.5, 0, 0, 0, 1.5, 0], np.float32)
    one, flat = np.ones((6, 1), np.float32), np.zeros(6, np.float32)
    ledger = Ledger(np.arange(C) < PARTICIPANTS[:, None], 0 * one, one, flat, flat, 0 * one)
    info = {
        "loss": loss,
        "own": 2 * loss,
        "update_norm": 4 * loss,
        "clipped": flat,
        "participants": PARTICIPANTS,
    }
    return MAKE(ledger, info, DROPPED, np.ones(6, bool))


def record():
    """Return the shapes of one round's record."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), records())


def finished(folder, **options):
    journal = Journal(
        fedavg(MODEL), small_clients(), EvaluationSchedule(6, ROUNDS), record(), folder, **options
    )
    for index, done in enumerate(ROUNDS):
        part = MAKE(*(_cut(field, done) for field in records()))
        journal.record(part, done - 2, 2)
        accuracy = np.linspace(0, 1, C, dtype=np.float32)
        journal.evaluated(index, {"accuracy": accuracy, "loss": 1 + accuracy})
    return journal, journal.finish(6)


def _cut(field, done):
    if isinstance(field, dict):
        return {name: leaf[done - 2 : done] for name, leaf in field.items()}
    if isinstance(field, Ledger):
        return jax.tree.map(lambda leaf: leaf[done - 2 : done], field)
    return field[done - 2 : done]


def test_rounds_in_which_nothing_counted_are_no_part_of_a_mean(tmp_path):
    _, result = finished(tmp_path)
    first, empty, last = result.metrics
    for name, factor in (("train_loss", 1), ("own", 2), ("update_norm", 4)):
        assert (first[name], last[name]) == (2.5 * factor, 1.5 * factor)
        assert math.isnan(empty[name])
    assert [row["participants"] for row in result.metrics] == [1.5, 0, 1.5]
    assert [row["nonfinite"] for row in result.metrics] == [1, 0, 1]
    rows = [json.loads(line) for line in (tmp_path / layout.METRICS).read_text().splitlines()]
    assert rows[1]["train_loss"] is None
    assert "NaN" not in (tmp_path / layout.METRICS).read_text()


def test_public_reports_leave_out_exact_numbers(tmp_path):
    scores = {"round", "accuracy", "accuracy_std", "accuracy_worst10", "accuracy_examples", "loss"}
    scores |= {"epsilon", "epsilon_rdp"}
    _, result = finished(tmp_path, public=True)
    rows = [json.loads(line) for line in (tmp_path / layout.METRICS).read_text().splitlines()]
    assert all(row.keys() == scores for row in (*result.metrics, *rows))
    with np.load(tmp_path / layout.PER_CLIENT) as found:
        assert set(found) == {"accuracy", "loss", "round", "test_size"}
    _, result = finished(tmp_path)
    assert result.metrics[0].keys() == scores | set(records().info) - {"loss"} | {
        "train_loss",
        "nonfinite",
    }
    with np.load(tmp_path / layout.PER_CLIENT) as found:
        np.testing.assert_array_equal(found["participations"], records().ledger.participants.sum(0))


def test_epsilons_of_clients_are_arrays_before_the_first_evaluation_too(tmp_path):
    """A statement with a line for each of a million clients would be a large file."""
    journal = Journal(
        dp_fedavg(MODEL, clip=1.0, noise_multiplier=2.0, sampling=Full()),
        small_clients(),
        EvaluationSchedule(6, [6]),
        record(),
        tmp_path,
    )
    part = records()
    noise = np.full(6, 2.0, np.float32)
    ledger = part.ledger._replace(server_noise=noise, noise_multiplier=noise)
    journal.record(part._replace(ledger=ledger), 0, 2)
    statement = journal.finish(2).statement
    epsilons = statement["honest"]["upload"]["pld"]["per_client"]["values"]
    written = json.loads((tmp_path / layout.PRIVACY).read_text())
    assert written["honest"]["upload"]["pld"]["per_client"].keys() == {"min", "median", "max"}
    with np.load(tmp_path / layout.PER_CLIENT) as found:
        np.testing.assert_array_equal(found["epsilon_upload_pld"], list(map(float, epsilons)))


def test_a_row_is_appended_and_half_a_row_is_mended(tmp_path, monkeypatch):
    """A longer run writes no more for each row. The next row replaces a partial line."""
    calls, path = [], tmp_path / layout.METRICS
    write = files.write_metrics
    monkeypatch.setattr(
        files, "write_metrics", lambda *given: calls.append(len(given[1])) or write(*given)
    )
    journal, _ = finished(tmp_path)
    assert calls == [1, 3]  # the first row, and all at the end
    complete = path.read_bytes()
    path.write_bytes(complete[:-20])
    other = Journal(
        fedavg(MODEL), small_clients(), EvaluationSchedule(6, ROUNDS), record(), tmp_path
    )
    other.restore(journal.recorded, 4, EvaluationSchedule(6, ROUNDS))
    other.record(MAKE(*(_cut(field, 6) for field in records())), 4, 2)
    accuracy = np.linspace(0, 1, C, dtype=np.float32)
    other.evaluated(2, {"accuracy": accuracy, "loss": 1 + accuracy})
    assert path.read_bytes() == complete


def test_a_journal_that_goes_on_has_the_rows_it_had():
    journal, result = finished(None)
    other = Journal(fedavg(MODEL), small_clients(), EvaluationSchedule(6, ROUNDS), record(), None)
    other.restore(journal.recorded, 4, EvaluationSchedule(6, ROUNDS))
    assert [repr(row) for row in other.metrics] == [repr(row) for row in result.metrics[:2]]


def test_an_evaluation_that_failed_has_no_scores():
    """The rounds before the evaluation count, because the ledger has them."""
    journal = Journal(fedavg(MODEL), small_clients(), EvaluationSchedule(6, ROUNDS), record(), None)
    journal.record(MAKE(*(_cut(field, 2) for field in records())), 0, 2)
    journal.evaluated(0, {name: np.ones(C, np.float32) for name in ("accuracy", "loss")})
    journal.record(MAKE(*(_cut(field, 4) for field in records())), 2, 2)
    result = journal.finish(4)
    assert len(result.ledger.participants) == 4
    assert [len(rows) for rows in result.history.values()] == [1, 1]
    assert (result.scores["accuracy"] == 1).all()


def test_a_server_that_is_not_finite_is_told_with_its_round():
    journal = Journal(fedavg(MODEL), small_clients(), EvaluationSchedule(6, ROUNDS), record(), None)
    broken = records()._replace(server_finite=np.arange(6) < 3)
    journal.record(broken, 0, 6)
    journal.require_finite(0, 3)
    with pytest.raises(FloatingPointError, match=r"round 4: lower the learning rate"):
        journal.require_finite(2, 6)
