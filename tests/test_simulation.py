import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, MODEL, small_clients

from jaxfl import report
from jaxfl.algorithms import dp_fedavg, fedavg
from jaxfl.privacy.mechanism import Full, Mechanism, Poisson
from jaxfl.simulation import simulate

KEY = jax.random.key(1)


def quiet(*args, **options):
    defaults: dict[str, Any] = {"progress": False, "rounds": 2}
    return simulate(KEY, *args, **defaults | options)


def test_run_folder_has_everything(tmp_path):
    folder = report.run_folder(tmp_path, "dp_fedavg", {"clip": 0.3}, seed=4)
    result = quiet(ALGORITHMS["dp_fedavg"](), small_clients(), folder=folder, eval_every=1)
    assert folder.parent.parent == tmp_path / "dp_fedavg"
    assert folder.name == "seed=4"
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "metrics.jsonl", "per_client.npz", "privacy.json", "curves.png", "ckpt", ".lock",
    }  # fmt: skip
    assert json.loads((folder / "config.json").read_text()) == {"method": "dp_fedavg", "clip": 0.3, "seed": 4}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[-1]["accuracy"] == pytest.approx(result.metrics[-1]["accuracy"])
    saved = np.load(folder / "per_client.npz")
    assert saved["accuracy"].shape == (2, 11)
    np.testing.assert_array_equal(saved["accuracy"][-1], result.scores.accuracy)
    privacy = json.loads((folder / "privacy.json").read_text())
    assert privacy["honest"]["aggregate"]["rdp"]["total"] == pytest.approx(rows[-1]["epsilon"], rel=1e-3)
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_gets_the_rows_of_the_metrics(tmp_path):
    from tensorboardX.proto.event_pb2 import Event  # pyrefly: ignore[missing-module-attribute]

    quiet(ALGORITHMS["fedavg"](), small_clients(), folder=tmp_path, eval_every=1, tensorboard=True)
    records, (path,) = [], tmp_path.glob("events.*")
    rest = path.read_bytes()
    while rest:  # length, its checksum, the record, its checksum
        length = int.from_bytes(rest[:8], "little")
        records.append(Event.FromString(rest[12 : 12 + length]))
        rest = rest[16 + length :]
    found = {(r.step, r.summary.value[0].tag): r.summary.value[0].simple_value for r in records if r.summary.value}
    for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        assert found[row["round"], "accuracy"] == pytest.approx(row["accuracy"], rel=1e-6)


def test_tensorboard_needs_a_folder():
    with pytest.raises(ValueError, match="folder=None"):
        quiet(ALGORITHMS["fedavg"](), small_clients(), tensorboard=True)


def test_another_run_in_the_folder_is_refused(tmp_path):
    quiet(ALGORITHMS["fedavg"](), small_clients(), folder=tmp_path)
    with pytest.raises(ValueError, match="method fedavg, not fedprox"):
        quiet(ALGORITHMS["fedprox"](), small_clients(), folder=tmp_path)
    with pytest.raises(ValueError, match="key"):
        simulate(jax.random.key(2), ALGORITHMS["fedavg"](), small_clients(), rounds=2, folder=tmp_path, progress=False)


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    first = quiet(ALGORITHMS["fedavg"](), small_clients(), folder=tmp_path)
    monkeypatch.setattr("jaxfl.simulation._Run._evaluate", None)
    again = quiet(ALGORITHMS["fedavg"](), small_clients(), folder=tmp_path)
    assert first.metrics == again.metrics
    np.testing.assert_array_equal(first.scores.accuracy, again.scores.accuracy)


def test_nonfinite_server_stops_with_the_round_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxfl.simulation._CHECKPOINT_SECONDS", -1.0)
    base = fedavg(
        MODEL,
        optimizer=optax.sgd(0.1),
        server_optimizer=optax.sgd(lambda step: jnp.where(jnp.less(step, 2), 1.0, jnp.inf)),
    )
    with pytest.raises(FloatingPointError, match=r"round 3.*learning rate"):
        quiet(base, small_clients(), rounds=6, eval_every=1, folder=tmp_path)
    steps = sorted(int(p.name) for p in (tmp_path / "ckpt").iterdir() if p.name.isdigit())
    assert steps[-1] == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_updates_that_were_dropped_are_told_at_the_end(caplog):
    quiet(ALGORITHMS["fedavg"](), small_clients())
    assert not caplog.records
    diverging = fedavg(MODEL, optimizer=optax.sgd(lambda step: jnp.inf), mechanism=Mechanism(sampling=Full()))
    quiet(diverging, small_clients())
    assert "fedavg: 20 of 22 updates were not finite and were dropped" in caplog.text  # one client has no examples


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"eval_every": 0}, "eval_every=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"tensorboard": True}, "tensorboard"),
    ],
)
def test_wrong_arguments_name_themselves(options, name):
    with pytest.raises(ValueError, match=name):
        quiet(ALGORITHMS["fedavg"](), small_clients(), **options)


SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[2])
import conftest, jax
from test_simulation import OPTIONS, interruptible
from jaxfl.simulation import _Run, simulate

simulation = sys.modules["jaxfl.simulation"]
simulation._SEGMENT_SECONDS, simulation._CHECKPOINT_SECONDS = 0.0, 0.3
record = _Run._record

def slowly(self, *args):
    time.sleep(0.2)
    record(self, *args)

_Run._record = slowly
simulate(jax.random.key(1), *interruptible(), folder=sys.argv[1], progress=False, **OPTIONS)
"""
OPTIONS = {"rounds": 60, "eval_every": 20}


def interruptible():
    algorithm = dp_fedavg(MODEL, clip=0.3, noise_multiplier=1.0, sampling=Poisson(0.6), batch_size=4, epochs=2)
    return algorithm, small_clients()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_process_resumes_bit_identically(number, tmp_path):
    here = pathlib.Path(__file__).parent
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "a"), str(here)]
    environment = os.environ | {"PYTHONPATH": str(here.parent)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not _steps(tmp_path / "a") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    stopped = _steps(tmp_path / "a")
    assert stopped, error.decode()
    assert max(stopped) < OPTIONS["rounds"], "the process finished before it was stopped: nothing was tested"
    if number == signal.SIGINT:
        assert b"KeyboardInterrupt" in error
        assert (tmp_path / "a" / "privacy.json").exists()
    resumed = quiet(*interruptible(), folder=tmp_path / "a", **OPTIONS)
    whole = quiet(*interruptible(), **OPTIONS)
    for a, b in zip(jax.tree.leaves(resumed[:2]), jax.tree.leaves(whole[:2])):
        np.testing.assert_array_equal(a, b)
    assert resumed.metrics == whole.metrics


def _steps(folder):
    return [int(p.name) for p in (folder / "ckpt").glob("*") if p.name.isdigit()]


def test_poisson_cohorts_are_in_the_ledger():
    algorithm = fedavg(MODEL, mechanism=Mechanism(sampling=Poisson(0.5)))
    result = quiet(algorithm, small_clients(), rounds=40)
    assert result.ledger.participants.shape == (40, 11)
    assert result.ledger.participants.mean() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(440))
