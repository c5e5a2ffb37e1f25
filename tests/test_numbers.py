"""Numbers of five algorithms that were committed once: results do not change with the code's shape.

This file is also the program that several processes run, and the one that writes the numbers: `python
tests/test_numbers.py --write`.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, small_clients
from jax.experimental import multihost_utils

from jaxfl import simulate, sweep
from jaxfl.cli import launch

PATH = pathlib.Path(__file__).with_name("numbers.json")
NAMES = ("feddpa", "dp_pfeddsu_paper", "adp_pfl_released", "padpfl", "pdp_fl_examples")
OTHERS = [name for name in NAMES if name != "dp_pfeddsu_paper"]
KEY = jax.random.key(11)
RUN = {"rounds": 4, "eval_every": 2, "progress": False}


@functools.cache
def committed():
    return json.loads(PATH.read_text())


def numbers(result):
    """Return a run's results in few numbers, with the clients of all processes."""
    states = (
        multihost_utils.process_allgather(result.states, tiled=True),
        jax.device_get(result.memory),
    )
    clients = len(result.scores["loss"])
    server = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.server)])
    square = sum(
        np.sum(np.reshape(leaf[:clients], (clients, -1)) ** 2.0, axis=1)
        for leaf in jax.tree.leaves(states)
    )
    honest = result.statement["honest"]
    return {
        "loss": result.history["loss"],
        "accuracy": result.history["accuracy"],
        "server": [*server[:: max(1, server.size // 24)], np.linalg.norm(server)],
        "states": np.sqrt(square),
        "participants": result.ledger.participants.sum(axis=1),
        "client_noise": result.ledger.client_noise.sum(axis=1),
        "server_noise": result.ledger.server_noise,
        "reported": [
            [row[name] for name in ("train_loss", "update_norm", "clipped")]
            for row in result.metrics
        ],
        "epsilon": [float(honest[observer]["epsilon"]) for observer in ("aggregate", "upload")],
    }


def check(name, found):
    for entry, wanted in committed()[name].items():
        np.testing.assert_allclose(
            np.asarray(found[entry], float), wanted, rtol=2e-5, atol=2e-6, err_msg=entry
        )


@pytest.mark.parametrize("store", ["device", pytest.param("host", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["dp_pfeddsu_paper", *[pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]]
)
def test_simulate(name, store):
    check(name, numbers(simulate(KEY, ALGORITHMS[name](), small_clients(), states=store, **RUN)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_sweep(name):
    """A sweep has two keys. The first key's numbers are those of the single run."""
    keys = jax.numpy.stack([KEY, jax.random.key(12)])
    first, second = sweep(keys, ALGORITHMS[name], {}, small_clients(), **RUN)
    check(name, numbers(first))
    assert not np.allclose(first.history["loss"], second.history["loss"])


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_two_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[1]))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    assert launch.main(["--processes", "2", __file__, str(tmp_path / "found.json")]) == 0
    for name, found in json.loads((tmp_path / "found.json").read_text()).items():
        check(name, found)


def main(path):
    """Write the numbers of all five algorithms, in one process or in several."""
    found = {
        name: numbers(simulate(KEY, ALGORITHMS[name](), small_clients(), **RUN)) for name in NAMES
    }
    if jax.process_index() == 0:
        lines = [f"{json.dumps(name)}: {{\n{_lines(own)}\n}}" for name, own in found.items()]
        pathlib.Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _lines(own):
    """Return the text of numbers with eight digits, a line for each entry."""
    rounded = {
        entry: np.vectorize(lambda x: float(f"{x:.8g}"))(np.asarray(value))
        for entry, value in own.items()
    }
    return ",\n".join(
        f" {json.dumps(entry)}: {json.dumps(value.tolist())}" for entry, value in rounded.items()
    )


if __name__ == "__main__":
    if sys.argv[1] == "--write":  # with the settings that tests have
        import conftest  # noqa: F401

        environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
        sys.exit(
            subprocess.run(
                [sys.executable, __file__, str(PATH)], env=environment, check=False
            ).returncode
        )
    main(sys.argv[1])
