"""Run one program as several processes that share its work; the program itself needs no change.

On one machine:                 python -m jaxfl.launch --processes 2 -m experiments.quickstart
On each of two machines:        python -m jaxfl.launch --coordinator HOST:PORT --processes 2 --process 0 run.py
Where JAX detects the cluster:  srun python -m jaxfl.launch run.py

When one process ends early, so do the others, and the same command goes on from the last checkpoints.
"""

import argparse
import math
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from typing import Any

import jax

from jaxfl.backend import cores

_HEARTBEAT_SECONDS = 30
"""A process that gives no sign of life for so long is lost."""

_GRACE_SECONDS = 10.0
"""For the others to notice and say where they were, before they are killed."""


def main(arguments: list[str] | None = None) -> int:
    """Start this machine's processes, wait for all of them, and say which one failed first.

    Ctrl-C (or SIGTERM) lets a run save and stop; a second one acts at once.

    Returns:
        The exit code of the process that failed first, 128 more than the signal if one ended it; 0 if none did.

    Raises:
        ValueError: options that do not go together.
    """
    parser = argparse.ArgumentParser(
        "python -m jaxfl.launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, help="how many in all; on this machine, unless --process is given")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="a free port of process 0's machine")
    parser.add_argument("--process", type=int, help="which one this machine starts, from 0")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="module to run, and its arguments")
    parser.add_argument("file", nargs=argparse.REMAINDER, help="or a file to run, and its arguments")
    options = parser.parse_args(arguments)
    if not (options.module or options.file):
        raise ValueError("program is missing: give a file, or -m and a module")
    given = [name for name in ("processes", "coordinator", "process") if getattr(options, name) is not None]
    if given not in ([], ["processes"], ["processes", "coordinator", "process"]):
        raise ValueError(
            f"{given} alone: give processes, or all of processes, coordinator and process, or none of them"
        )
    if given and (options.process or 0) not in range(options.processes):
        raise ValueError(
            f"processes={options.processes}, process={options.process}: give process from 0 to processes - 1"
        )

    children = _start(options, alone=given == ["processes"])
    number, code = _wait(children)
    if code:
        name = "the process of this machine" if number is None else f"process {number} of {options.processes}"
        how = f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
        again = "start all processes again with the same command, and each run goes on from its last checkpoint"
        print(f"\n{name} {how}; no other goes on without it: {again}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _start(options: argparse.Namespace, alone: bool) -> dict[int | None, subprocess.Popen]:
    """This machine's processes by their number: all where it is alone, else one."""
    program = ["-m", *options.module] if options.module else options.file
    environment, coordinator, numbers = os.environ.copy(), options.coordinator, [options.process]
    if alone:
        coordinator, numbers = f"127.0.0.1:{_free_port()}", list(range(options.processes))
        environment["JAX_COORDINATOR_BIND_ADDRESS"] = coordinator  # no other machine has to reach it
        share = min(16, cores() // options.processes)
        environment.setdefault("JAX_NUM_CPU_DEVICES", str(max(1, share)))
    children = {}
    for number in numbers:
        code = f"from jaxfl.launch import _join; _join({coordinator!r}, {options.processes}, {number})"
        command = [sys.executable, "-c", code, *program]
        shown = None if number == numbers[0] else subprocess.DEVNULL  # they all print the same
        # In a group of its own, so that Ctrl-C reaches it once, through this process.
        children[number] = subprocess.Popen(command, env=environment, stdout=shown, process_group=0)
    return children


def _wait(children: dict[int | None, subprocess.Popen]) -> tuple[int | None, int]:
    """Number and exit code of the process that failed first, once all have ended; code 0 if none failed."""
    stops = 0

    def stop(number: int, frame: Any) -> None:
        nonlocal stops
        stops += 1
        for child in children.values():
            child.send_signal(signal.SIGINT if stops == 1 else signal.SIGKILL)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    first, deadline, running = (None, 0), math.inf, True
    while running:
        time.sleep(0.05)
        codes = {number: child.poll() for number, child in children.items()}
        running, failed = None in codes.values(), {number: code for number, code in codes.items() if code}
        if failed and not first[1]:  # of those that ended together, signals before the errors that follow from them
            first = min(failed.items(), key=lambda item: item[1])
            deadline = time.monotonic() + _GRACE_SECONDS
        if time.monotonic() > deadline:
            for child in children.values():
                child.kill()
    for number, handler in previous.items():
        signal.signal(number, handler)
    return first


def _join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Become one of the processes, and run the program."""
    detect = None if coordinator is None else "deactivate"
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        cluster_detection_method=detect,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
    )
    try:
        if sys.argv[1] == "-m":
            sys.argv[:] = sys.argv[2:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = sys.argv[1:]
            sys.path[0] = str(pathlib.Path(sys.argv[0]).absolute().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        traceback.print_exc()
        sys.stdout.flush()
        if not process:  # without process 0 the others end at once: let them say why
            time.sleep(2)
        os._exit(1)  # a regular exit would wait for processes that wait for this one


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
