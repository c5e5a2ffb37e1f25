import functools
import json
import os
import pathlib
import re
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

from jaxfl.algorithms import ditto, dp_fedavg, fedavg, fedprox
from jaxfl.engine.resident import Resident
from jaxfl.engine.streamed import Stream
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Full, Poisson
from jaxfl.report import layout
from jaxfl.run.folder import run_folder
from jaxfl.run.loop import Loop
from jaxfl.run.simulate import simulate, sweep
from jaxfl.types import Lists

KEY = jax.random.key(1)


def quiet(*args, **options):
    defaults: dict[str, Any] = {"progress": False, "rounds": 2}
    return simulate(KEY, *args, **defaults | options)


def test_run_folder_has_everything(tmp_path):
    folder = run_folder(tmp_path, "dp_fedavg", {"clip": 0.3}, seed=4)
    result = quiet(ALGORITHMS["dp_fedavg"](), small_clients(), folder=folder, eval_every=1)
    assert folder.parent.parent == tmp_path / "dp_fedavg"
    assert folder.name == "seed=4"
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "metrics.jsonl", "per_client.npz", "privacy.json", "curves.png", "ckpt", ".lock",
    }  # fmt: skip
    assert json.loads((folder / "config.json").read_text()) == {
        "method": "dp_fedavg",
        "clip": 0.3,
        "seed": 4,
    }
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[-1]["accuracy"] == pytest.approx(result.metrics[-1]["accuracy"])
    saved = np.load(folder / "per_client.npz")
    assert saved["accuracy"].shape == (2, 11)
    np.testing.assert_array_equal(saved["accuracy"][-1], result.scores["accuracy"])
    privacy = json.loads((folder / "privacy.json").read_text())
    assert privacy["honest"]["aggregate"]["rdp"]["total"] == rows[-1]["epsilon_rdp"]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_another_run_in_the_folder_is_refused(tmp_path):
    quiet(ALGORITHMS["fedavg"](), small_clients(), folder=tmp_path)
    with pytest.raises(ValueError, match="method fedavg, not fedprox"):
        quiet(ALGORITHMS["fedprox"](), small_clients(), folder=tmp_path)
    with pytest.raises(ValueError, match="key"):
        simulate(
            jax.random.key(2),
            ALGORITHMS["fedavg"](),
            small_clients(),
            rounds=2,
            folder=tmp_path,
            progress=False,
        )


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    first = quiet(ALGORITHMS["fedavg"](), small_clients(), folder=tmp_path)
    monkeypatch.setattr("jaxfl.run.loop.Loop._evaluate", None)
    again = quiet(ALGORITHMS["fedavg"](), small_clients(), folder=tmp_path)
    assert first.metrics == again.metrics
    np.testing.assert_array_equal(first.scores["accuracy"], again.scores["accuracy"])


def test_nonfinite_server_stops_with_the_round_and_keeps_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxfl.run.followers._CHECKPOINT_SECONDS", -1.0)
    base = fedavg(
        MODEL,
        local=LocalSGD(optax.sgd(0.1)),
        server_optimizer=optax.sgd(lambda step: jnp.where(jnp.less(step, 2), 1.0, jnp.inf)),
    )
    with pytest.raises(FloatingPointError, match=r"round 3.*learning rate"):
        quiet(base, small_clients(), rounds=6, eval_every=1, folder=tmp_path)
    steps = sorted(int(p.name) for p in (tmp_path / "ckpt").iterdir() if p.name.isdigit())
    assert steps[-1] == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


DIVERGING = fedavg(
    MODEL, local=LocalSGD(optax.sgd(lambda step: jnp.inf)), mechanism=Mechanism(sampling=Full())
)


def test_updates_that_were_dropped_are_told_at_the_end(caplog):
    quiet(ALGORITHMS["fedavg"](), small_clients())
    assert not caplog.records
    quiet(DIVERGING, small_clients())
    assert (
        "fedavg: 20 of 22 updates were not finite and were dropped" in caplog.text
    )  # one client has no examples


def test_what_private_steps_send_does_not_follow_from_a_state():
    """A personal model that overflows must not remove the noised update."""
    local = DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.5, steps=2)
    private = {"clip": 1.0, "noise_multiplier": 1.0, "sampling": Full()}
    method = ditto(
        MODEL, local=local, personal=LocalSGD(optax.sgd(jnp.inf)), penalty_weight=0.1, **private
    )
    result = quiet(method, small_clients((4, 3, 5)), rounds=1, eval_every=1)
    assert result.metrics[0]["nonfinite"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.states))


def test_broken_data_are_refused_at_the_start():
    clients = small_clients()
    inputs = np.array(clients.inputs, np.float32)
    inputs[clients.train[3][0]] = np.nan
    with pytest.raises(
        ValueError, match=rf"clients\.inputs must be finite, got NaN .* row {clients.train[3][0]}\."
    ):
        quiet(ALGORITHMS["fedprox"](), clients._replace(inputs=inputs))


def test_a_run_whose_updates_are_all_dropped_stops(tmp_path):
    everyone = small_clients((4, 3, 5))
    with pytest.raises(
        FloatingPointError, match=r"3 of 3 updates were .* dropped: lower the learning rate, or"
    ):
        quiet(DIVERGING, everyone, folder=tmp_path)


def test_clients_without_tests_are_fine(tmp_path, caplog):
    clients = small_clients()
    untested = clients._replace(
        test=Lists.of([[]] * clients.num_clients), test_size=np.zeros_like(clients.test_size)
    )
    result = quiet(ALGORITHMS["fedprox"](), untested, folder=tmp_path, progress=True)
    assert [r.getMessage() for r in caplog.records] == [
        "fedprox: no client has a test example, so scores are not known. Give test rows to "
        "make_clients, or a dataset as `central`"
    ]
    assert np.isnan(result.metrics[-1]["accuracy"])
    assert result.metrics[-1]["train_loss"] > 0
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (row["accuracy"], row["loss"], row["round"]) == (None, None, 2)
    assert (tmp_path / "curves.png").exists()


def test_a_public_report_holds_scores_and_epsilon_alone(tmp_path):
    names = {"round", "accuracy", "accuracy_std", "accuracy_worst10", "accuracy_examples", "loss"}
    names |= {"epsilon", "epsilon_rdp", "bytes_up", "bytes_down"}
    alone = quiet(
        ALGORITHMS["fedprox"](), small_clients(), folder=tmp_path / "alone", report="public"
    )
    build = functools.partial(fedprox, MODEL, local=LocalSGD(optax.sgd(0.05), batch_size=4))
    options: dict[str, Any] = {
        "rounds": 1,
        "progress": False,
        "report": "public",
        "folder": tmp_path / "sweep",
    }
    (point,) = sweep(KEY, build, {"mu": [0.5]}, small_clients(), **options)
    for result, folder in ((alone, tmp_path / "alone"), (point, tmp_path / "sweep" / "0_mu=0.5")):
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert all(row.keys() == names for row in (*result.metrics, *rows))
        with np.load(folder / "per_client.npz") as arrays:
            assert "participations" not in arrays


@pytest.mark.parametrize("name", ["accuracy", "epsilon", "update_norm", "train_loss"])
def test_an_info_cannot_take_the_place_of_a_metric(name):
    base = ALGORITHMS["fedprox"]()

    def client_update(*given):
        message, client, info = base.client_update(*given)
        return message, client, info | {name: info["loss"]}

    with pytest.raises(
        ValueError, match=rf"got \['{name}'\] from client_update of 'fedprox'.*Choose other names"
    ):
        quiet(base._replace(client_update=client_update), small_clients())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rounds": 0}, "rounds must be .* got 0"),
        ({"eval_every": 0}, "eval_every must be .* got 0"),
        ({"chunk": 0}, "chunk must be .* got 0"),
    ],
)
def test_wrong_arguments_name_themselves(options, name):
    with pytest.raises(ValueError, match=name):
        quiet(ALGORITHMS["fedavg"](), small_clients(), **options)


SCRIPT = """
import sys, time
import conftest, jax
from jaxfl.cli.main import in_one_line
from test_simulation import OPTIONS, interruptible
from jaxfl.run import followers, loop
from jaxfl.run.loop import Loop
from jaxfl.run.simulate import simulate

loop._SEGMENT_SECONDS = 0.0
followers._CHECKPOINT_SECONDS = 0.3
record = Loop._record

def slowly(self, *args):
    time.sleep(0.2)
    record(self, *args)

Loop._record = slowly
sys.excepthook = in_one_line
simulate(jax.random.key(1), *interruptible(), folder=sys.argv[1], progress=False, **OPTIONS)
"""
OPTIONS = {"rounds": 60, "eval_every": 20}


def interruptible():
    algorithm = dp_fedavg(
        MODEL,
        clip=0.3,
        noise_multiplier=1.0,
        sampling=Poisson(0.6),
        local=LocalSGD(optax.sgd(0.05), batch_size=4, epochs=2),
    )
    return algorithm, small_clients()


@functools.cache
def whole():
    return quiet(*interruptible(), **OPTIONS)


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGINT],
        pytest.param([signal.SIGTERM], marks=pytest.mark.slow),
        pytest.param([signal.SIGINT, signal.SIGINT], marks=pytest.mark.slow),
    ],
)
def test_interrupted_process_resumes_bit_identically(numbers, tmp_path):
    paths = os.pathsep.join(map(str, pathlib.Path(__file__).parents[:3]))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "a")]
    environment = os.environ | {"PYTHONPATH": paths}
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not _steps(tmp_path / "a") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    for number in numbers:
        process.send_signal(number)
    _, error = process.communicate(timeout=120)
    stopped = _steps(tmp_path / "a")
    assert stopped, error.decode()
    assert max(stopped) < OPTIONS["rounds"], (
        "the process finished before it was stopped: nothing was tested"
    )
    if numbers == [signal.SIGKILL]:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + numbers[0]
        (line,) = error.decode().split("\n")[1:-1]
        assert re.fullmatch(
            r"stopped after round \d+ of 60; the same command resumes from (there|round \d+)", line
        )
        assert len(numbers) > 1 or line.endswith(
            f"after round {max(stopped)} of 60; the same command resumes from there"
        )
        assert (tmp_path / "a" / "privacy.json").exists()
    resumed = quiet(*interruptible(), folder=tmp_path / "a", **OPTIONS)
    for a, b in zip(jax.tree.leaves(resumed[:2]), jax.tree.leaves(whole()[:2])):
        np.testing.assert_array_equal(a, b)
    assert resumed.metrics == whole().metrics


def _steps(folder):
    return [int(p.name) for p in (folder / "ckpt").glob("*") if p.name.isdigit()]


@pytest.mark.slow
def test_a_run_stopped_after_every_round_leaves_the_files_of_one_that_was_not(
    tmp_path, monkeypatch
):
    client_noise = np.where(np.arange(6) % 3 == 0, 3.0, 0.5)[
        :, None
    ]  # in some rounds too much for amplification
    noise: dict[str, Any] = {
        "noise_multiplier": tuple(2 * 3.0 ** (np.arange(6) / 15)),
        "client_noise": client_noise,
    }
    mechanism = Mechanism(clip=0.3, sampling=Poisson(0.1), **noise)
    arguments: tuple[Any, ...] = (
        fedavg(MODEL, mechanism=mechanism, local=LocalSGD(optax.sgd(0.05), batch_size=4)),
        small_clients(),
    )
    options: dict[str, Any] = {"rounds": 6, "eval_every": 5}
    quiet(*arguments, folder=tmp_path / "whole", **options)
    record = Loop._record

    def stop(run, *given):
        record(run, *given)
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_record", stop)
        for done in range(1, 6):
            with pytest.raises(
                KeyboardInterrupt,
                match=f"after round {done} of 6; the same command resumes from the",
            ):
                quiet(*arguments, folder=tmp_path / "parts", **options)
    quiet(*arguments, folder=tmp_path / "parts", **options)
    for name in (layout.METRICS, layout.PRIVACY):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    with (
        np.load(tmp_path / "whole" / layout.PER_CLIENT) as one,
        np.load(tmp_path / "parts" / layout.PER_CLIENT) as two,
    ):
        assert set(one) == set(two)
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.slow
@pytest.mark.parametrize("store", ["device", "host"])
def test_an_interrupt_during_compilation_leaves_a_folder_to_start_in(store, tmp_path, monkeypatch):
    runner = {"device": Resident, "host": Stream}[store]

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "compile", interrupted)
        with pytest.raises(
            KeyboardInterrupt,
            match="stopped after round 0 of 2; the same command resumes from there",
        ):
            quiet(ALGORITHMS["fedrep"](), small_clients(), folder=tmp_path, states=store)
    assert (
        len(quiet(ALGORITHMS["fedrep"](), small_clients(), folder=tmp_path, states=store).metrics)
        == 2
    )


def test_without_a_folder_an_interrupt_says_that_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(
        Loop, "_record", lambda *_: signal.raise_signal(signal.SIGINT) or signal.raise_signal(2)
    )
    with pytest.raises(
        KeyboardInterrupt, match="stopped after round 0 of 2; nothing is kept without a folder"
    ):
        quiet(ALGORITHMS["fedavg"](), small_clients())


def test_poisson_cohorts_are_in_the_ledger():
    algorithm = fedavg(MODEL, mechanism=Mechanism(sampling=Poisson(0.5)))
    result = quiet(algorithm, small_clients(), rounds=40)
    assert result.ledger.participants.shape == (40, 11)
    assert result.ledger.participants.mean() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(440))


def test_a_seed_stands_for_its_key():
    clients, algorithm = small_clients(), fedavg(MODEL)
    by_key, by_seed = (
        simulate(key, algorithm, clients, rounds=1, progress=False)
        for key in (jax.random.key(3), np.int64(3))
    )
    assert all(map(np.array_equal, *map(jax.tree.leaves, (by_key.server, by_seed.server))))
