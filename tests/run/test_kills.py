"""Kills at random moments: every run that is started again leaves all files as one that nothing stopped.

This file is also the program that is killed. `JAXFL_KILLS` is the number of kills of each kind of run (default 1).
"""

import contextlib
import functools
import os
import pathlib
import random
import signal
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, small_clients
from jax.experimental import multihost_utils

from jaxfl import simulate, sweep
from jaxfl._support.files import write_arrays
from jaxfl.algorithms import fedrep
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Poisson
from jaxfl.report import layout
from jaxfl.run.loop import Loop

KINDS = ("device", "host", "sweep", "processes")
ROUNDS, KILLS = 24, int(os.environ.get("JAXFL_KILLS", "1"))
SETTING: dict[str, Any] = {"rounds": ROUNDS, "eval_every": 10, "progress": False}


def method(clip=CLIP):
    """Return FedRep with noise by round. In some rounds clients' noise prevents amplification."""
    client_noise = np.where(np.arange(ROUNDS) % 3 == 0, 3.0, 0.5)[:, None]
    noise: dict[str, Any] = {
        "noise_multiplier": tuple(np.geomspace(2, 6, ROUNDS)),
        "client_noise": client_noise,
    }
    return fedrep(
        MODEL,
        local=LocalSGD(optax.sgd(0.05), batch_size=4),
        mechanism=Mechanism(clip=clip, sampling=Poisson(0.3), **noise),
    )


def program(kind, folder):
    """Run, print every round, and write server and states into the folder of the reports."""
    patch = pytest.MonkeyPatch()
    patch.setattr("jaxfl.run.loop._SEGMENT_SECONDS", 0.0)
    patch.setattr("jaxfl.run.followers._CHECKPOINT_SECONDS", 0.1)
    record, folder = Loop._record, pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{jax.process_index()}.pid").write_text(str(os.getpid()))

    def say(run, *arguments):
        record(run, *arguments)
        print("round", run.done, flush=True)

    patch.setattr(Loop, "_record", say)
    key, clients = jax.random.key(3), small_clients()
    if kind == "sweep":
        results = sweep(key, method, {"clip": [0.1, CLIP]}, clients, folder=folder, **SETTING)
    else:
        store: Any = "host" if kind == "host" else "device"
        results = [simulate(key, method(), clients, folder=folder, states=store, **SETTING)]
    leaves = jax.tree.leaves(
        multihost_utils.process_allgather([result[:2] for result in results], tiled=True)
    )
    if jax.process_index() == 0:
        write_arrays(folder / "left.npz", {str(i): leaf for i, leaf in enumerate(leaves)})


def start(kind, folder):
    launcher = ["-m", "jaxfl", "launch", "--processes", "2"] if kind == "processes" else []
    command = [sys.executable, *launcher, __file__, kind, str(folder)]
    paths = os.pathsep.join(map(str, pathlib.Path(__file__).parents[1:3]))
    cache = str(jax.config.values["jax_compilation_cache_dir"])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_COMPILATION_CACHE_DIR": cache}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def killed(kind, folder, rng):
    """Start or resume a run, kill it at a random moment, and return whether it still ran."""
    for path in folder.glob("*.pid"):
        path.unlink()
    process = start(kind, folder)
    assert process.stdout is not None
    for _ in range(
        rng.randint(0, ROUNDS)
    ):  # then some way into what follows: a round, an evaluation, a checkpoint
        if not process.stdout.readline():
            break
    try:
        process.wait(rng.uniform(0, 0.3))
    except subprocess.TimeoutExpired:
        pids = (
            [int(path.read_text()) for path in folder.glob("*.pid")] if kind == "processes" else []
        )
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(rng.choice(pids) if pids else process.pid, signal.SIGKILL)
        process.communicate(timeout=120)
        return True
    assert process.returncode == 0, process.communicate()[1]
    process.communicate()
    return False


def finish(kind, folder):
    process = start(kind, folder)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error


@functools.cache
def files(folder):
    """Return the contents of a run's files by path and array. A picture only has to exist."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if (
            name.parts[0] in (layout.CHECKPOINTS, layout.STATES)
            or path.is_dir()
            or path.suffix == ".pid"
        ):
            continue
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                found |= {
                    f"{name}/{key}": (arrays[key].dtype, arrays[key].shape, arrays[key].tobytes())
                    for key in arrays
                }
        else:
            found[str(name)] = path.suffix == ".png" or path.read_bytes()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_leaves_the_files_of_one_that_was_not(kind, tmp_path):
    rng, kills, number = random.Random(kind), 0, 0
    finish(kind, tmp_path / "whole")
    whole = files(tmp_path / "whole")
    assert any("metrics.jsonl" in name for name in whole)
    while kills < KILLS:
        folder, number = tmp_path / str(number), number + 1
        while kills < KILLS and killed(kind, folder, rng):
            kills += 1
        finish(kind, folder)
        found = files(folder)
        assert [name for name in whole if found.get(name) != whole[name]] == [], (
            f"after {kills} kills of {kind!r}"
        )


if __name__ == "__main__":
    program(*sys.argv[1:])
