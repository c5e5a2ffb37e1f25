import gc
import shutil
import weakref
from typing import Any

import jax
import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, MODEL, small_clients

from jaxfl.algorithms import fedavg
from jaxfl.engine.resident import Resident
from jaxfl.engine.round import all_keys
from jaxfl.engine.state_file import Store
from jaxfl.engine.states import States
from jaxfl.engine.streamed import Stream, place_examples
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Poisson
from jaxfl.run.checkpoint import Checkpoints
from jaxfl.run.simulate import simulate

KEY = jax.random.key(7)


def quiet(name, **options):
    defaults: dict[str, Any] = {"progress": False, "rounds": 4, "eval_every": 4}
    return simulate(KEY, ALGORITHMS[name](), small_clients(), **defaults | options)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_results_are_those_of_the_device_store(monkeypatch):
    name = "adp_pfl_released"  # with client states: `test_numbers`
    monkeypatch.setattr("jaxfl.engine.streamed._BLOCK_BYTES", 1)  # a client for each device
    device, host = quiet(name), quiet(name, states="host")
    present = device.ledger.participants
    # The first call is one round; the other three are streamed without a pause.
    assert (present[2:] & present[1:-1]).any(), "nobody is in two cohorts that follow each other"
    np.testing.assert_array_equal(present, host.ledger.participants)
    found = host.server, host.states, host.ledger, host.history
    expected = device.server, device.states, *device[5:3:-1]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


def test_compiles_once_whatever_the_cohort(monkeypatch):
    monkeypatch.setattr("jaxfl.engine.streamed._BLOCK_BYTES", 1)
    algorithm = fedavg(
        MODEL,
        local=LocalSGD(optax.sgd(0.05), batch_size=4),
        mechanism=Mechanism(sampling=Poisson(0.5)),
    )
    stream = Stream(KEY, all_keys(KEY), algorithm, small_clients(), None, 1, None)
    stream.compile(())  # of one block, ahead of time: it would refuse any other shape
    for start, count in ((0, 3), (3, 1), (4, 2)):
        assert len(stream.rounds(start, count).nonfinite) == count
    for program in (stream.draw, stream.finish):
        assert program._cache_size() == 1  # pyrefly: ignore[missing-attribute]


@pytest.mark.slow
def test_a_kill_between_any_two_steps_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """A copy of the files at any moment is what a kill at this moment leaves."""
    saved, kills = {}, []
    folder = tmp_path / "run"

    def watched(owner, name):
        plain = getattr(owner, name)

        def step(self, *args):
            if name == "save":
                rows = [store.read(np.arange(store.num_clients)) for store in stores]
                saved[args[0]] = jax.tree.map(np.copy, args[1]["states"]), rows[0]
            plain(self, *args)
            kills.append(tmp_path / f"{len(kills)}-{name}")
            shutil.copytree(folder, kills[-1])

        monkeypatch.setattr(owner, name, step)

    stores = []
    init = Store.__init__
    monkeypatch.setattr(
        Store, "__init__", lambda self, *args: (stores.append(self), init(self, *args))[1]
    )
    with monkeypatch.context() as patch:
        patch.setattr("jaxfl.run.followers._CHECKPOINT_SECONDS", -1.0)
        for owner, name in (
            (Store, "write"),
            (Store, "flush"),
            (Store, "commit"),
            (Checkpoints, "save"),
        ):
            watched(owner, name)
        whole = quiet("local_only", rounds=4, eval_every=1, states="host", folder=folder)
        monkeypatch.undo()
    assert {kill.name.split("-")[1] for kill in kills} == {"write", "flush", "commit", "save"}
    checked = set()
    for kill in kills:
        steps = [int(path.name) for path in (kill / "ckpt").glob("*") if path.name.isdigit()]
        if steps:
            states, rows = saved[max(steps)]
            store = Store(kill / "states", States.of(whole.states, joined=False), 11)
            store.restore(**states)
            equal(store.read(np.arange(11)), rows)
            checked.add((max(steps), kill.name.split("-")[1]))
    assert {(2, "save"), (2, "commit"), (2, "write"), (2, "flush"), (3, "save")} <= checked
    torn = next(
        kill for kill in kills if kill.name.endswith("flush") and (kill / "ckpt" / "2").exists()
    )
    equal(quiet("local_only", rounds=4, eval_every=1, states="host", folder=torn)[:2], whole[:2])


def test_rows_that_a_checkpoint_needs_do_not_move(tmp_path):
    like = {"head": jax.ShapeDtypeStruct((5, 2), np.float32)}
    store = Store(tmp_path, like, 5)
    store.start()
    store.write(np.arange(5), {"head": np.zeros((5, 2), np.float32)})
    store.commit()
    store.write(np.array([1, 3]), {"head": np.ones((2, 2), np.float32)})
    store.commit()
    saved = jax.tree.map(np.copy, store.saved())
    store.write(np.array([3, 4]), {"head": np.full((2, 2), 2, np.float32)})
    store.states()
    again = Store(tmp_path, like, 5)
    again.restore(**saved)
    assert again.read(np.arange(5))["head"][:, 0].tolist() == [0, 1, 0, 1, 0]
    assert again.states()["head"][:, 0].tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(ValueError, match="read-only"):
        again.states()["head"][0] = 1


def test_rows_of_clients_are_not_copied():
    clients = small_clients()
    kept = place_examples(clients).clients
    assert jax.tree.all(jax.tree.map(np.shares_memory, clients[2:], kept[2:]))


def test_wrong_stores_are_refused(tmp_path, monkeypatch):
    quiet("local_only", rounds=1, folder=tmp_path)
    with pytest.raises(ValueError, match="states device, not host"):
        quiet("local_only", rounds=1, folder=tmp_path, states="host")
    with monkeypatch.context() as patch:
        patch.setattr("jax.process_count", lambda: 2)
        with pytest.raises(ValueError, match=r"states must be 'device' with 2 processes"):
            quiet("local_only", states="host")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 0))
    with pytest.raises(ValueError, match=r"with 0\.0\. .*TMPDIR"):
        quiet("local_only", states="host")


@pytest.mark.parametrize("runner", [Resident, Stream])
def test_a_run_leaves_no_programs_behind(runner, monkeypatch):
    """They do not wait for the garbage collector. A process can map little machine code."""
    made, compile_ = [], runner.compile

    def watched(self, *arguments):
        made.append(weakref.ref(self))
        return compile_(self, *arguments)

    monkeypatch.setattr(runner, "compile", watched)
    gc.disable()
    quiet("local_only", rounds=1, eval_every=1, states="device" if runner is Resident else "host")
    left = made[0]()
    gc.enable()
    assert left is None
