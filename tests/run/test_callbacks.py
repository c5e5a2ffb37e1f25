"""Callbacks of runs at each evaluation, and runs that continue beyond their end."""

import csv
import functools
import gc
import importlib.util
import io
import math
import os
import pathlib
import threading
import types
from typing import Any

import jax
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, small_clients

from jaxfl import callbacks, simulate
from jaxfl._support import files
from jaxfl.report import layout
from jaxfl.run.callbacks import ask, check_callbacks, entered

KEY = jax.random.key(1)


def run(folder=None, rounds=4, name="dp_fedavg", **options):
    defaults = {"eval_every": 1, "progress": False}
    return simulate(
        KEY, ALGORITHMS[name](), small_clients(), rounds=rounds, folder=folder, **defaults | options
    )


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
        assert np.load(tmp_path / layout.PER_CLIENT)["round"].tolist() == [2, 3, 4, 6]


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


def test_a_budget_is_never_exceeded_and_used_up():
    whole = [row["epsilon"] for row in run().metrics]
    for budget, rounds in (
        (whole[0], 1),
        (0.5 * sum(whole[1:3]), 2),
        (whole[-1], 4),
        (2 * whole[-1], 4),
    ):
        rows = run(callbacks=[callbacks.epsilon_budget(budget)]).metrics
        assert len(rows) == rounds
        assert rows[-1]["epsilon"] <= budget


@pytest.mark.parametrize(
    ("name", "budget", "message"),
    [
        (
            "fedavg",
            callbacks.epsilon_budget(100.0),
            "one client against an observer of sums, which has no finite epsilon",
        ),
        (
            "dp_fedavg",
            callbacks.epsilon_budget(9.0, observer="upload"),
            "one client against an observer of uploads",
        ),
        (
            "dp_fedavg",
            callbacks.epsilon_budget(9.0, unit="example"),
            "one example against an observer of sums",
        ),
        (
            "dp_fedavg",
            callbacks.epsilon_budget(1e-3),
            r"epsilon must be at least [\d.]+, which .*got 0.001. Give",
        ),
    ],
)
def test_a_budget_that_no_round_can_keep_is_refused_before_the_first(
    name, budget, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, name=name, callbacks=[budget, lambda rows: pytest.fail("a round was made")])


def test_a_budget_reads_rows_of_older_folders():
    stop = callbacks.epsilon_budget(2.0, unit="example")
    rows: list[Any] = [
        {"round": 1, "epsilon": None},
        {"round": 2, "epsilon_example": 1.0},
        {"round": 3, "epsilon_example": 1.4},
    ]
    assert not stop(rows)
    with pytest.raises(ValueError, match="one example against"):
        stop(rows[:1])


def test_a_metric_that_rows_lack_is_named():
    with pytest.raises(ValueError, match=r"metric must be one of round, accuracy.*got 'f1'"):
        run(callbacks=[callbacks.early_stopping("f1")])


def test_csv_has_the_rows(tmp_path):
    path = tmp_path / "rows.csv"
    result = run(callbacks=[callbacks.csv(path)])
    head, *lines = [line.split(",") for line in path.read_text().splitlines()]
    assert [dict(zip(head, map(float, line), strict=True)) for line in lines] == [
        {name: float(value) for name, value in row.items()} for row in result.metrics
    ]


def events(folder):
    """Return the values of a folder's events by round and name."""
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
        scalars = {
            (row["round"], key): value
            for row in rows
            for key, value in row.items()
            if key != "round"
        }
        assert events(tmp_path / name) == pytest.approx(scalars, rel=1e-6)


def test_wandb_gets_the_rows():
    logged = {}
    result = run(
        callbacks=[
            callbacks.wandb(types.SimpleNamespace(log=lambda row, step: logged.update({step: row})))
        ]
    )
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
    assert [(m.step, m.value) for m in history] == [
        (row["round"], row["accuracy"]) for row in result.metrics
    ]


def failing(rows):
    raise OSError("disk full")


def test_a_callback_cannot_change_the_rows_of_the_run_or_of_others():
    def spoils(rows):
        rows[-1].clear()
        rows.append({"round": 99})

    rows = [{"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.25}]
    seen = []
    assert not ask([spoils, seen.append], rows)
    assert rows == [{"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.25}]
    assert seen == [rows]


def test_all_are_called_even_if_some_raise_and_the_first_error_names_the_others():
    called = []

    def other(rows):
        called.append("other")
        raise KeyError("loss")

    with pytest.raises(OSError, match="disk full") as found:
        ask(
            [
                failing,
                lambda rows: called.append("between"),
                other,
                lambda rows: called.append("last"),
            ],
            [],
        )
    assert called == ["between", "other", "last"]
    notes = " ".join(found.value.__notes__)
    assert "callbacks[0]" in notes
    assert "callbacks[2]: KeyError: 'loss'" in notes


@pytest.mark.parametrize("true", [True, np.True_, np.array(True), jax.numpy.array(True)])
def test_a_bool_of_numpy_or_jax_is_a_bool(true):
    assert ask([lambda rows: None, lambda rows: true], [])
    assert not ask([lambda rows: ~true if true is not True else False], [])


async def later(rows):
    return True


@pytest.mark.parametrize("value", ["False", 1, 0, [], {}, np.zeros(2, bool), 0.0])
def test_what_is_no_bool_is_named(value):
    with pytest.raises(
        TypeError, match=r"callbacks\[1\] must return None or a bool, got .*Return True to end"
    ):
        ask([lambda rows: None, lambda rows: value], [])


def test_a_coroutine_is_no_answer_and_leaves_no_warning():
    with pytest.raises(TypeError, match="None or a bool, got <coroutine"):
        ask([later], [])


class Later:
    async def __call__(self, rows):
        return True


def yields(rows):
    yield True


@pytest.mark.parametrize("callback", [later, Later(), functools.partial(later), yields])
def test_functions_that_do_not_run_when_called_are_refused_at_the_start(callback):
    with pytest.raises(TypeError, match=r"callbacks\[0\] must run when it is called"):
        check_callbacks("callbacks", [callback])


@pytest.mark.parametrize("callback", [lambda: None, lambda rows, more: None, lambda *, rows: None])
def test_functions_of_other_arguments_are_refused_at_the_start(callback):
    with pytest.raises(TypeError, match=r"callbacks\[0\] must take one argument"):
        check_callbacks("callbacks", [callback])
    assert check_callbacks("callbacks", [print, lambda rows, more=0: None, callbacks.csv("a")])


def test_paths_that_cannot_be_written_end_a_run_before_its_first_round(tmp_path):
    (tmp_path / "file").touch()
    seen = []
    logs = [callbacks.csv(tmp_path), callbacks.csv(tmp_path / "file" / "rows.csv")]
    if importlib.util.find_spec("tensorboardX"):
        logs.append(callbacks.tensorboard(tmp_path / "file" / "events"))
    for log in logs:
        with pytest.raises(OSError, match=str(tmp_path)), entered([log]):
            seen.append(log)
    assert not seen


def test_a_run_opens_its_callbacks_before_the_first_round_and_closes_them_when_it_fails(tmp_path):
    events: list[Any] = []

    class Log:
        def __enter__(self):
            events.append("open")

        def __exit__(self, *error):
            events.append(error[0])

        def __call__(self, rows):
            events.append(len(rows))

    with pytest.raises(OSError, match="disk full"):
        run(rounds=2, callbacks=[failing, Log()])
    assert events == ["open", 1, OSError]
    (tmp_path / "rows").mkdir()
    with pytest.raises(OSError, match="rows"):
        run(rounds=2, callbacks=[Log(), callbacks.csv(tmp_path / "rows")])
    assert events[3:] == ["open", files.IrregularError]


def test_csv_quotes_and_makes_its_folder(tmp_path):
    path = tmp_path / "a" / "b" / "rows.csv"
    rows = [{"round": 1, 'a,"b"\n': 0.5}, {"round": 2, "later": math.nan}]
    log = callbacks.csv(path)
    with entered([log]):
        assert path.read_bytes() == b""
        ask([log], rows)
    with path.open(newline="") as file:
        head, *lines = csv.reader(file)
    assert head == ["round", 'a,"b"\n', "later"]
    assert lines == [["1", "0.5", ""], ["2", "", "nan"]]
    with entered([log]):
        assert path.read_text().startswith(
            "round"
        )  # an earlier file stays until the first evaluation


def test_csv_leaves_links_and_files_of_others_as_they_are(tmp_path):
    theirs, link = tmp_path / "theirs.txt", tmp_path / "link.csv"
    theirs.write_text("a list\n")
    link.symlink_to(theirs)
    with (
        pytest.raises(files.IrregularError, match="which is a symbolic link"),
        entered([callbacks.csv(link)]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="first line does not begin"),
        entered([callbacks.csv(theirs)]),
    ):
        pass
    with (
        pytest.raises(NotADirectoryError, match="in a folder, got"),
        entered([callbacks.csv(theirs / "a.csv")]),
    ):
        pass
    assert link.is_symlink()
    assert theirs.read_text() == "a list\n"
    assert sorted(tmp_path.iterdir()) == [link, theirs]


def test_a_builder_in_place_of_its_callback_is_refused():
    with pytest.raises(
        TypeError, match=r"callbacks\[0\] must be a callback, .* as in csv\(\.\.\.\)"
    ):
        check_callbacks("callbacks", [callbacks.csv])


def test_a_budget_that_is_overspent_already_is_warned_of(caplog):
    stop = callbacks.epsilon_budget(1.0)
    assert stop([{"round": 10, "epsilon": 4.28}])
    assert "spent epsilon 4.28 already, above the budget of 1" in caplog.text


def test_csv_appends_a_row_and_starts_over_at_a_new_column(tmp_path, monkeypatch):
    """A file of thousands of rows is not rewritten for each further row."""
    path, texts = tmp_path / "rows.csv", []
    append = files.append_text
    monkeypatch.setattr(
        files, "append_text", lambda *given: texts.append(given[1]) or append(*given)
    )
    rows = [{"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.25}, {"round": 3, "later": 1.0}]
    log = callbacks.csv(path)
    with entered([log]):
        for count in (1, 2, 3):
            ask([log], rows[:count])
    assert texts == ["2,0.25\n"]
    assert path.read_text() == "round,loss,later\n1,0.5,\n2,0.25,\n3,,1.0\n"
    path.unlink()
    with entered([log]):
        ask([log], rows[:1])
        path.unlink()
        ask([log], rows[:2])
    assert path.read_text() == "round,loss\n1,0.5\n2,0.25\n"


def test_a_logger_serves_one_run_after_another():
    logged = []
    log = callbacks.wandb(types.SimpleNamespace(log=lambda row, step: logged.append(step)))
    for _ in range(2):
        with entered([log]):
            ask([log], [{"round": 1}])
            ask([log], [{"round": 1}, {"round": 2}])
    assert logged == [1, 2, 1, 2]


def test_tensorboard_leaves_no_thread_and_no_open_file(tmp_path):
    pytest.importorskip("tensorboardX")
    before = set(threading.enumerate())
    log = callbacks.tensorboard(tmp_path)
    with pytest.raises(OSError, match="disk full"), entered([log]):
        ask([log, failing], [{"round": 1, "loss": 0.5}])
    gc.collect()  # which closes the queue of the writer
    for thread in set(threading.enumerate()) - before:
        thread.join(5.0)
        assert not thread.is_alive()
    links = [
        os.readlink(path) for path in pathlib.Path("/proc/self/fd").iterdir() if path.is_symlink()
    ]
    assert not [link for link in links if link.startswith(str(tmp_path))]
    assert events(tmp_path) == {(1, "loss"): 0.5}


def test_a_callback_cannot_hide_what_ended_a_run():
    class Hiding:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return True

        def __call__(self, rows):
            raise KeyError("of the callback")

    with pytest.raises(KeyError, match="of the callback"):
        run(rounds=1, callbacks=[Hiding()])


def test_an_exit_asked_for_by_a_callback_loses_no_round(tmp_path):
    def leave(rows):
        raise SystemExit(3)

    called = []
    with pytest.raises(SystemExit, match="3"):
        run(tmp_path, rounds=2, callbacks=[leave, lambda rows: called.append(len(rows))])
    assert called == [1]
    assert (tmp_path / "ckpt" / "1" / "manifest.json").exists()


def test_a_fifo_in_the_place_of_a_table_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "rows.csv")
    with pytest.raises(
        OSError, match=r"must be a regular file, got '.*rows\.csv', which is a fifo"
    ):
        run(rounds=1, callbacks=[callbacks.csv(tmp_path / "rows.csv")])


def test_a_text_that_a_disk_takes_in_parts_is_appended_as_one(tmp_path, monkeypatch):
    class Short(io.FileIO):
        def write(self, text):
            return super().write(text[:3])

    path = tmp_path / "rows.csv"
    path.write_text("1,0.5\n")
    monkeypatch.setattr(files.os, "fdopen", lambda number, *_, **__: Short(number, "wb"))
    files.append_text(path, "2,0.25\n3,0.125\n")
    monkeypatch.undo()
    assert path.read_text() == "1,0.5\n2,0.25\n3,0.125\n"
