"""What runs call at each evaluation, and runs that go on beyond their end."""

import time
import types

import jax
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, small_clients

from jaxfl import callbacks, simulate
from jaxfl.run import report

KEY = jax.random.key(1)


def run(folder=None, rounds=4, name="dp_fedavg", **options):
    defaults = {"eval_every": 1, "progress": False}
    return simulate(KEY, ALGORITHMS[name](), small_clients(), rounds=rounds, folder=folder, **defaults | options)


def same(a, b):
    assert a.metrics == b.metrics
    assert a.statement == b.statement
    jax.tree.map(
        np.testing.assert_array_equal,
        (a.server, a.states, a.history, a.ledger),
        (b.server, b.states, b.history, b.ledger),
    )


@pytest.mark.parametrize(("name", "states"), [("dp_fedavg", "device"), ("centaur", "host")])
def test_a_longer_run_goes_on_from_the_end_of_a_shorter_one(name, states, tmp_path):
    short = run(tmp_path, 3, name, states=states)
    longer = run(tmp_path, 5, name, states=states)
    assert (short.restored, longer.restored) == (0, 3)
    same(longer, run(None, 5, name, states=states))
    assert run(tmp_path, 5, name, states=states).restored == 5
    with pytest.raises(ValueError, match="rounds 5, not 3"):
        run(tmp_path, 3, name, states=states)


def test_evaluations_of_the_shorter_run_remain(tmp_path):
    every = {"eval_every": 2}
    run(tmp_path, 3, **every)
    found = run(tmp_path, 6, **every), run(tmp_path, 6, **every)
    for result in found:
        assert [row["round"] for row in result.metrics] == [2, 3, 4, 6]
        whole = {row["round"]: row for row in run(None, 6).metrics}
        assert all(row["loss"] == whole[row["round"]]["loss"] for row in result.metrics)
        assert np.load(tmp_path / report.PER_CLIENT)["round"].tolist() == [2, 3, 4, 6]


def test_a_run_that_was_stopped_early_stays_so_and_may_go_on(tmp_path):
    def at_2(rows):
        return rows[-1]["round"] >= 2

    early = run(tmp_path, callbacks=[at_2])
    assert [row["round"] for row in early.metrics] == [1, 2]
    same(early, run(None, 2))
    again = run(tmp_path, callbacks=[at_2])
    assert again.restored == 2
    same(again, early)
    same(run(tmp_path), run(None))


def test_all_are_called_with_all_rows_and_only_their_own_error_ends_a_run(tmp_path):
    seen = []

    def fails(rows):
        seen.append([row["round"] for row in rows])
        if len(seen) == 3:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run(tmp_path, callbacks=[lambda rows: None, fails])
    result = run(tmp_path, callbacks=[fails])
    assert seen == [[1], [1, 2], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4]]
    assert result.restored == 3


def test_a_budget_is_never_exceeded():
    whole = [row["epsilon"] for row in run().metrics]
    for budget in (*whole, 0.5 * sum(whole[1:3])):
        spent = run(callbacks=[callbacks.epsilon_budget(budget)]).metrics[-1]["epsilon"]
        assert spent <= max(budget, whole[0])  # the first interval is run anyway
    assert len(run(callbacks=[callbacks.epsilon_budget(2 * whole[-1])]).metrics) == 4
    assert len(run(name="fedavg", callbacks=[callbacks.epsilon_budget(100.0)]).metrics) == 1  # has no epsilon


def test_a_metric_that_rows_lack_is_named():
    with pytest.raises(ValueError, match="metric='f1': rows have round, accuracy"):
        run(callbacks=[callbacks.early_stopping("f1")])


def test_csv_has_the_rows(tmp_path):
    path = tmp_path / "rows.csv"
    result = run(callbacks=[callbacks.csv(path)])
    head, *lines = [line.split(",") for line in path.read_text().splitlines()]
    assert [dict(zip(head, map(float, line), strict=True)) for line in lines] == [
        {name: float(value) for name, value in row.items()} for row in result.metrics
    ]


def events(folder):
    """Values by round and name."""
    from tensorboardX.proto.event_pb2 import Event  # pyrefly: ignore[missing-module-attribute]

    found = {}
    for path in sorted(folder.glob("events.*")):
        rest = path.read_bytes()
        while rest:  # length, its checksum, the record, its checksum
            length = int.from_bytes(rest[:8], "little")
            event = Event.FromString(rest[12 : 12 + length])
            rest = rest[16 + length :]
            if event.summary.value:
                found[event.step, event.summary.value[0].tag] = event.summary.value[0].simple_value
    return found


def test_tensorboard_gets_the_rows(tmp_path):
    run(tmp_path / "run", 2, callbacks=[callbacks.tensorboard(tmp_path / "first")])
    result = run(tmp_path / "run", 4, callbacks=[callbacks.tensorboard(tmp_path / "second")])
    for name, rows in (("first", result.metrics[:2]), ("second", result.metrics)):
        scalars = {(row["round"], key): value for row in rows for key, value in row.items() if key != "round"}
        while len(events(tmp_path / name)) < len(scalars):  # they are written by a thread
            time.sleep(0.1)
        assert events(tmp_path / name) == pytest.approx(scalars, rel=1e-6)


def test_wandb_gets_the_rows():
    logged = {}
    result = run(callbacks=[callbacks.wandb(types.SimpleNamespace(log=lambda row, step: logged.update({step: row})))])
    assert [{"round": step} | row for step, row in logged.items()] == result.metrics


@pytest.mark.slow
def test_wandb_offline(tmp_path):
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=tmp_path, project="test") as logger:
        result = run(callbacks=[callbacks.wandb(logger)])
        logger.log({})  # which ends the last step
        assert logger.summary["accuracy"] == result.metrics[-1]["accuracy"]
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.slow
def test_mlflow_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as active:
        result = run(callbacks=[callbacks.mlflow(mlflow)])
    history = mlflow.MlflowClient().get_metric_history(active.info.run_id, "accuracy")
    assert [(m.step, m.value) for m in history] == [(row["round"], row["accuracy"]) for row in result.metrics]
