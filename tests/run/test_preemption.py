"""A job that its cluster preempts saves, and resumes when it starts again.

This file is also the program of the tasks. Slurm's variables stand for Slurm, from which JAX takes
the coordinator and the numbers.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, small_clients

from jaxfl import simulate
from jaxfl._support.files import write_arrays
from jaxfl.run.loop import Loop

ROUNDS, TASKS = 30, 2


def left_by(**options):
    run = simulate(
        jax.random.key(3),
        ALGORITHMS["fedavg"](),
        small_clients(),
        rounds=ROUNDS,
        eval_every=ROUNDS,
        progress=False,
        **options,
    )
    return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(run.server))}


def program(folder):
    """Run slowly, and print each round and the number of this process."""
    patch = pytest.MonkeyPatch()
    patch.setattr("jaxfl.run.loop._SEGMENT_SECONDS", 0.0)
    record = Loop._record

    def say(run, *arguments):
        record(run, *arguments)
        print("round", run.done, os.getpid(), flush=True)
        time.sleep(0.2)

    patch.setattr(Loop, "_record", say)
    found = left_by(folder=folder)
    if jax.process_index() == 0:
        write_arrays(pathlib.Path(folder) / "left.npz", found)


def start(folder, task, job):
    """Start one task as srun does, on a node of that name."""
    variables = {
        "JOB_ID": job,
        "STEP_NODELIST": "localhost",
        "STEP_NUM_NODES": 1,
        "NTASKS": TASKS,
        "PROCID": task,
        "LOCALID": task,
    }
    roots = map(str, pathlib.Path(__file__).parents[1:3])
    environment = os.environ | {f"SLURM_{name}": str(value) for name, value in variables.items()}
    environment |= {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": os.pathsep.join(roots)}
    command = [sys.executable, "-m", "jaxfl", "launch", __file__, str(folder)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def first_round(lines):
    """Return the first round that a task printed, and the number of its process."""
    # JAX prints lines of its own.
    found = next(line for line in lines if line.startswith("round "))
    return tuple(map(int, found.split()[1:]))


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_a_job_whose_processes_all_get_sigterm_saves_and_resumes(tmp_path):
    # JAX makes the port of the number.
    job = random.randrange(4096)
    tasks = [start(tmp_path, task, job) for task in range(TASKS)]
    programs = [first_round(task.stdout)[1] for task in tasks]
    # Without cgroups, Slurm sends the signal to the launchers and to their processes.
    for process in (*programs, *(task.pid for task in tasks)):
        os.kill(process, signal.SIGTERM)
    for task in tasks:
        said = task.communicate()[1]
        assert task.returncode == 128 + signal.SIGTERM, said
        assert f"of {ROUNDS}; the same command resumes from there" in said
        assert "stopped by SIGTERM" in said

    first = []
    for task in [start(tmp_path, task, job + 4096) for task in range(TASKS)]:
        printed, said = task.communicate()
        assert task.returncode == 0, said
        first.append(first_round(printed.splitlines())[0])
    assert first[0] == first[1] > 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["round"] == ROUNDS
    wanted = left_by(devices=jax.devices()[:1])
    with np.load(tmp_path / "left.npz") as found:
        for name, leaf in wanted.items():
            np.testing.assert_allclose(found[name], leaf, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    program(*sys.argv[1:])
