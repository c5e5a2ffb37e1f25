"""Several processes, whose results equal those of one process, even after a stop.

This file is also the program that they run.
"""

import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, MODEL, TOGETHER, small_clients
from jax.experimental import multihost_utils

from jaxfl import evaluate, membership, simulate, sweep
from jaxfl._support import files
from jaxfl._support.backend import backend
from jaxfl.algorithms import ditto, fedprox
from jaxfl.cli import launch
from jaxfl.data import load, shard
from jaxfl.engine.mesh import place
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import Canaries
from jaxfl.run.loop import Loop

KEY = jax.random.key(3)


def results(**options):
    """Return the leaves of a run's results, with the clients of all processes."""
    run = simulate(
        KEY,
        ALGORITHMS["adp_pfl_public"](),
        small_clients(),
        rounds=3,
        eval_every=1,
        progress=False,
        **options,
    )
    gathered = multihost_utils.process_allgather(run.states, tiled=True)
    states = [np.asarray(leaf)[: len(run.scores["loss"])] for leaf in jax.tree.leaves(gathered)]
    losses = [row["train_loss"] for row in run.metrics]
    return [
        *jax.tree.leaves(run.server),
        *states,
        *run.history.values(),
        run.ledger.participants,
        losses,
    ]


def sweep_results(**options):
    method = functools.partial(fedprox, MODEL, local=LocalSGD(optax.sgd(0.05), batch_size=4))
    runs = sweep(
        KEY, method, {"mu": [0.0, 1.0]}, small_clients(), rounds=1, progress=False, **options
    )
    return [leaf for run in runs for leaf in (*jax.tree.leaves(run.server), run.scores["loss"])]


def each_mechanism(run):
    """Yield names and arrays of the results of each method of `TOGETHER`, and of canaries."""
    options = {"rounds": 3, "eval_every": 3, "progress": False}
    runs = {name: run(build, **options) for name, build in TOGETHER.items()}
    runs["audit"] = run(TOGETHER["adaptive clip"], audit=Canaries(20), **options)
    for name, left in runs.items():
        epsilons = [
            left.statement["honest"][observer]["epsilon"] for observer in ("aggregate", "upload")
        ]
        parts = (
            left.server,
            left.memory,
            left.ledger,
            left.scores,
            left.audit,
            np.array(epsilons, float),
        )
        for i, leaf in enumerate(jax.tree.leaves(parts)):
            yield f"{name}, {i}", leaf


def swept(build, **options):
    return sweep(KEY, build, {"clip": [0.1, 0.2]}, small_clients(), paired_noise=True, **options)[1]


def alone(build, **options):
    return simulate(KEY, build(0.2), small_clients(), devices=jax.devices()[:1], **options)


def write(folder, found):
    if jax.process_index() == 0:
        files.write_arrays(pathlib.Path(folder) / "found.npz", found)


def edges(folder):
    """Require errors about what processes cannot do, and the scores of what they can."""
    process = jax.process_index()
    clients = small_clients()
    options = {"rounds": 1, "progress": False}
    differs = "settings must be equal in all processes, got"
    with pytest.raises(ValueError, match=f"{differs} chunk '1' in process 0"):
        simulate(KEY, fedprox(MODEL), clients, chunk=1 + process, **options)
    with pytest.raises(ValueError, match=f"{differs} folder 'one' in process 0"):
        simulate(KEY, fedprox(MODEL), clients, folder=None if process else folder, **options)
    personal = simulate(KEY, ditto(MODEL), clients, **options)
    _, scores = evaluate(ditto(MODEL), personal, clients)
    np.testing.assert_allclose(scores["loss"], personal.scores["loss"], rtol=1e-5)
    with pytest.raises(ValueError, match=r"client must be None where 2 .* got 'all'"):
        personal.save(f"{folder}/models", client="all")
    with pytest.raises(ValueError, match="result must be of one process for 'ditto'"):
        membership(0, ditto(MODEL), personal, clients, of="personal")
    digits = load("digits")
    shared = simulate(KEY, fedprox(MODEL), clients, central=digits, **options)
    row, _ = evaluate(fedprox(MODEL), shared, digits)
    assert row["accuracy"] == pytest.approx(shared.metrics[-1]["central_accuracy"])


def program(folder, *options):
    """Run one of the processes, and write its results into the folder.

    With the option "die" the run ends in its last round, and with "sweep" a sweep follows. With
    "mechanisms" only the methods of `TOGETHER` run, with "auto" only a round of measured chunk, and
    with "edges" what several processes do in another way than one.
    """
    if "edges" in options:
        edges(folder)
        return
    if "auto" in options:
        usual = backend("cpu")._replace(chunks=(1, 2, 4))
        pytest.MonkeyPatch().setattr("jaxfl.engine.chunk.of_mesh", lambda mesh: usual)
        options = {"rounds": 1, "chunk": "auto", "progress": False}
        run = simulate(KEY, fedprox(MODEL), small_clients(), **options)
        write(folder, {"weights": jax.tree.leaves(run.server)[0]})
        return
    if "mechanisms" in options:
        write(folder, dict(each_mechanism(swept)))
        return
    if "die" in options:
        patch = pytest.MonkeyPatch()
        patch.setattr("jaxfl.run.followers._CHECKPOINT_SECONDS", -1.0)
        record = Loop._record

        def die(run, *arguments):
            if run.done == 2 and jax.process_index() == jax.process_count() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            record(run, *arguments)

        patch.setattr(Loop, "_record", die)
    found = results(folder=folder)
    if "sweep" in options:
        found += sweep_results()
    write(folder, {str(i): leaf for i, leaf in enumerate(found)})


@pytest.fixture
def start(monkeypatch):
    """Run this file in some processes with some devices each."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, pathlib.Path(__file__).parents[1:3])))

    def run(processes, devices, *arguments):
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(devices))
        command = [__file__, *map(str, arguments)]
        if processes == 1:
            return subprocess.run([sys.executable, *command], check=False).returncode
        return launch.main(["--processes", str(processes), *command])

    return run


@functools.cache
def expected():
    """Return the results of one process with one device."""
    return results(devices=jax.devices()[:1])


def check_equal(folder, wanted):
    with np.load(folder / "found.npz") as found:
        assert len(found) == len(wanted)
        for name, leaf in zip(found, wanted):
            np.testing.assert_allclose(found[name], leaf, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_eight_devices_change_nothing(start, tmp_path):
    assert start(1, 8, tmp_path) == 0
    check_equal(tmp_path, expected())


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_a_lost_process_stops_the_others_and_other_processes_go_on(start, tmp_path, capfd):
    assert start(4, 1, tmp_path, "die") == 128 + signal.SIGKILL
    said = capfd.readouterr().err
    assert re.search(
        r"process 0 of 4 stopped after round [23]; the last checkpoint is .*/ckpt/2: start", said
    )
    assert re.search(r"process 3 of 4 was ended by SIGKILL.*same command", said)
    assert start(2, 2, tmp_path, "sweep") == 0
    assert "Traceback" not in capfd.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    check_equal(tmp_path, expected() + sweep_results(devices=jax.devices()[:1]))


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_every_mechanism_and_an_audit_in_a_sweep_of_two_processes(start, tmp_path):
    assert start(2, 1, tmp_path, "mechanisms") == 0
    with np.load(tmp_path / "found.npz") as found:
        wanted = dict(each_mechanism(alone))
        assert found.keys() == wanted.keys()
        for name, leaf in wanted.items():
            np.testing.assert_allclose(found[name], leaf, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.xdist_group("hosts")
def test_processes_disagree_in_words_and_evaluate_what_one_of_them_could(start, tmp_path):
    assert start(2, 1, tmp_path, "edges") == 0


@pytest.mark.xdist_group("hosts")
def test_processes_measure_chunks_together(start, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFL_CACHE_DIR", str(tmp_path / "cache"))
    assert start(2, 1, tmp_path, "auto") == 0
    assert len(list((tmp_path / "cache").glob("chunk-*.json"))) == 1


def test_a_process_reads_no_examples_of_others():
    clients = small_clients()
    whole = shard(clients, 4)
    rows = np.concatenate([[*clients.train[c], *clients.test[c]] for c in (3, 4, 5, 9, 10)])
    inputs = np.full_like(clients.inputs, 99)
    inputs[rows] = clients.inputs[rows]
    part = shard(clients._replace(inputs=inputs), 4, [1, 3])
    for all_, own in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        np.testing.assert_array_equal(np.concatenate([np.split(all_, 4)[b] for b in (1, 3)]), own)


def test_a_process_without_clients_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="2 devices for 11 clients"):
        place(small_clients(), jax.devices()[:2])


if __name__ == "__main__":
    program(*sys.argv[1:])
