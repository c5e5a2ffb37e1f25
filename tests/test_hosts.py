"""Several processes: results of one, whatever their number and whatever stopped them.

This file is also the program that they run.
"""

import functools
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, MODEL, small_clients
from jax.experimental import multihost_utils

from jaxfl import launch, report, simulate, sweep
from jaxfl.algorithms import fedprox
from jaxfl.data import shard
from jaxfl.engine import place
from jaxfl.simulation import _Run

KEY = jax.random.key(3)


def results(method, **options):
    """Leaves of all that a run leaves behind, of all processes' clients."""
    run = simulate(KEY, ALGORITHMS[method](), small_clients(), rounds=3, eval_every=1, progress=False, **options)
    gathered = multihost_utils.process_allgather(run.states, tiled=True)
    states = [np.asarray(leaf)[: len(run.scores.loss)] for leaf in jax.tree.leaves(gathered)]
    losses = [row["train_loss"] for row in run.metrics]
    return [*jax.tree.leaves(run.server), *states, *run.history, run.ledger.participants, losses]


def sweep_results(**options):
    method = functools.partial(fedprox, MODEL, batch_size=4)
    runs = sweep(KEY, method, {"mu": [0.0, 1.0]}, small_clients(), rounds=1, progress=False, **options)
    return [leaf for run in runs for leaf in (*jax.tree.leaves(run.server), run.scores.loss)]


def program(method, folder, *options):
    """Of one process: run, and write what is left behind; `die` in the second round, `sweep` afterwards."""
    if "die" in options:
        simulation = sys.modules["jaxfl.simulation"]
        simulation._CHECKPOINT_SECONDS = -1.0
        record = _Run._record

        def die(run, *arguments):
            if run.done == 1 and jax.process_index() == jax.process_count() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            record(run, *arguments)

        _Run._record = die
    found = results(method, folder=folder)
    if "sweep" in options:
        found += sweep_results()
    if jax.process_index() == 0:
        report.write_arrays(pathlib.Path(folder) / "found.npz", {str(i): leaf for i, leaf in enumerate(found)})


@pytest.fixture
def start(monkeypatch):
    """Run this file in some processes with some devices each."""
    root = pathlib.Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(jax.config.jax_compilation_cache_dir))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

    def run(processes, devices, *arguments):
        monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(devices))
        command = [__file__, *map(str, arguments)]
        if processes == 1:
            return subprocess.run([sys.executable, *command], check=False).returncode
        return launch.main(["--processes", str(processes), *command])

    return run


def check_equal(folder, expected):
    with np.load(folder / "found.npz") as found:
        assert len(found) == len(expected)
        for name, leaf in zip(found, expected):
            np.testing.assert_allclose(found[name], leaf, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("processes", "devices", "method"), [(1, 8, "centaur"), (4, 1, "adp_pfl_released")])
def test_devices_and_processes_change_nothing(processes, devices, method, start, tmp_path):
    assert start(processes, devices, method, tmp_path) == 0
    check_equal(tmp_path, results(method, devices=jax.devices()[:1]))


def test_a_lost_process_stops_the_others_and_the_run_goes_on(start, tmp_path, capfd):
    assert start(2, 2, "centaur", tmp_path, "die") == 128 + signal.SIGKILL
    said = capfd.readouterr().err
    assert re.search(r"process 0 of 2 stopped after round [12]; the last checkpoint is .*/ckpt/1: start", said)
    assert re.search(r"process 1 of 2 was ended by SIGKILL.*same command", said)
    assert start(2, 2, "centaur", tmp_path, "sweep") == 0
    assert [row["round"] for row in map(eval, (tmp_path / "metrics.jsonl").read_text().splitlines())] == [1, 2, 3]
    one = jax.devices()[:1]
    check_equal(tmp_path, results("centaur", devices=one) + sweep_results(devices=one))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "program"),
        (["-m"], "program"),
        (["--processes", "0", "x"], "processes=0"),
        (["--process", "1", "x"], "process"),
        (["--coordinator", "a:1", "--processes", "2", "--process", "2", "x"], "process=2"),
    ],
)
def test_wrong_options_name_themselves(options, name):
    with pytest.raises(ValueError, match=name):
        launch.main(options)


def test_a_process_reads_no_examples_of_others():
    clients = small_clients()
    whole = shard(clients, 4)
    rows = np.concatenate([[*clients.train[c, : clients.train_size[c]], *clients.test[c]] for c in (3, 4, 5, 9, 10)])
    inputs = np.full_like(clients.inputs, 99)
    inputs[rows] = clients.inputs[rows]
    part = shard(clients._replace(inputs=inputs), 4, [1, 3])
    for all_, own in zip(whole, part):
        np.testing.assert_array_equal(np.concatenate([np.split(all_, 4)[b] for b in (1, 3)]), own)


def test_a_process_without_clients_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="2 devices for 11 clients"):
        place(small_clients(), jax.devices()[:2])


if __name__ == "__main__":
    program(*sys.argv[1:])
