"""Run one program as several processes that share its work; the program itself needs no change.

On one machine:                 python -m jaxfl.launch --processes 2 -m experiments.quickstart
On each of two machines:        python -m jaxfl.launch --coordinator HOST:PORT --processes 2 --process 0 run.py
Where JAX detects the cluster:  srun python -m jaxfl.launch run.py

In a cluster, the tasks of a node share all of its GPUs, whose number is printed.
When one process ends early, so do the others, and the same command resumes from the last checkpoints.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import math
import os
import pathlib
import platform
import queue
import re
import runpy
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax._src.clusters import ClusterEnv  # JAX has no public way to ask which cluster it detects

from jaxfl.backend import COUNT_FLAG, cores, visible_gpus
from jaxfl.engine.processes import agree
from jaxfl.run import signals

_HEARTBEAT_SECONDS = 30
"""A process without a sign of life for this long is lost."""

_GRACE_SECONDS = 10.0
"""Time for the others to notice and report where they are, before they are killed."""

_ONE_PRESS_SECONDS = 0.1
"""Signals closer together count as one: a terminal and a wrapper may both send it."""

_BIND = "JAX_COORDINATOR_BIND_ADDRESS"


class _Stop(NamedTuple):
    """A signal to the launcher."""

    time: float
    number: int


def main(arguments: list[str] | None = None) -> int:
    """Start this machine's processes, wait for all of them, and say which one failed first.

    Ctrl-C (or SIGTERM) lets a run save and stop; a second one kills. However the launcher ends, its processes do too.

    Returns:
        The exit code of the process that failed first, 128 plus the signal if one ended or stopped it; 0 if none
        failed. 128 plus the launcher's own signal, if that is why they ended.

    Raises:
        SystemExit: with code 2 after one line about options that are wrong or incompatible.
    """
    # The description holds the usage, so that an error is one line.
    parser = argparse.ArgumentParser(
        "python -m jaxfl.launch",
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--processes", type=int, help="how many in all; on this machine, unless --process is given"
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address and free port of process 0's machine"
    )
    parser.add_argument("--process", type=int, help="which one this machine starts, from 0")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="module to run, and its arguments"
    )
    parser.add_argument(
        "file", nargs=argparse.REMAINDER, help="or a file to run, and its arguments"
    )
    options = parser.parse_args(arguments)
    if wrong := _wrong(options):
        parser.error(wrong)

    devices = None
    if options.processes is None:
        try:
            devices = _devices()
        except ValueError as error:
            parser.error(str(error))

    alone = options.coordinator is None and options.processes is not None
    alive, held = (
        os.pipe()
    )  # nothing is written: the pipe ends with this process, and so do the others
    with open(alive, "rb"), open(held, "wb"), _stops() as stops:
        number, code = _wait(_start(options, alone, devices, alive), stops)
    again = "start all processes again with the same command, and each run goes on from its last checkpoint"
    if code and stops and code in (-signal.SIGINT, 128 + signal.SIGINT, -signal.SIGKILL):
        code = -stops[0].number
        print(f"\nstopped by {signal.Signals(-code).name}: {again}", file=sys.stderr)
    elif code:
        name = (
            "the process of this machine"
            if number is None
            else f"process {number} of {options.processes}"
        )
        elsewhere = (
            "" if alone else "; if one of another machine ended before it, that one is the cause"
        )
        print(
            f"\n{name} {_how(code)}; no other goes on without it{elsewhere}: {again}",
            file=sys.stderr,
        )
    return code if code >= 0 else 128 - code


def _wrong(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, and the remedy."""
    names = ("processes", "coordinator", "process")
    given = [name for name in names if getattr(options, name) is not None]
    if not (options.module or options.file):
        return "program is missing: give a file, or -m and a module"
    if options.file and not os.path.exists(options.file[0]):
        return f"file={options.file[0]!r} does not exist: give a file, or -m and a module"
    top = options.module and options.module[0].partition(".")[0]
    if options.module and not (top and importlib.util.find_spec(top)):
        return f"-m {options.module[0]}: no such module"
    if given not in ([], ["processes"], [*names]):
        return f"{given} alone: give processes, or all of processes, coordinator and process, or none of them"
    if given and options.processes < 1:
        return f"processes={options.processes}: give a whole number of at least 1"
    if given and (options.process or 0) not in range(options.processes):
        return f"processes={options.processes}, process={options.process}: give process from 0 to processes - 1"
    return (
        _unreachable(options.coordinator, bind=options.process == 0)
        if options.coordinator is not None
        else None
    )


def _devices() -> list[int] | None:
    """Return the indices of this task's GPUs in a cluster, and print how many the node's tasks have.

    JAX gives a task of Slurm or Open MPI one GPU, and the node's others would idle. None: JAX's choice, for a node
    without GPUs, or where a user or another cluster has chosen.

    Raises:
        ValueError: no cluster is detected, or the node has GPUs that no task would use.
    """
    clusters = [
        kind
        for kind in ClusterEnv._cluster_types
        if not kind.opt_in_only_method and kind.is_env_present()
    ]
    if not clusters:
        raise ValueError(
            "no cluster is detected. Give --processes to start that many on this machine, or start the command "
            "on each node by srun or mpirun."
        )
    if clusters[0].name not in ("slurm", "ompi") or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    tasks, task = _slurm_task() if clusters[0].name == "slurm" else _open_mpi_task()
    seen = visible_gpus()
    found = max(seen, int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))) if seen else 0
    if seen * tasks == found:  # the cluster has given each task its own
        mine = list(range(seen))
    elif seen == found and found % tasks == 0:
        each = found // tasks
        mine = list(range(task * each, (task + 1) * each))
    else:
        raise ValueError(
            f"{tasks} tasks on this node cannot share its {found} GPUs, of which this task sees {seen}. "
            "Start one task per node that sees all GPUs, or one task per GPU."
        )
    if task == 0:
        cpus = jax.config.values["jax_num_cpu_devices"]  # -1: XLA_FLAGS has it
        kind = (
            f"{len(mine)} of {found} GPUs"
            if found
            else "its CPU devices"
            if cpus < 1
            else f"{cpus} CPU devices"
        )
        print(f"{platform.node()}: tasks: {tasks}, each with {kind}", file=sys.stderr)
    return mine or None


_SLURM = (
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NTASKS",
    "SLURM_NODEID",
    "SLURM_LOCALID",
)


def _slurm_task() -> tuple[int, int]:
    """Return the number of this node's tasks, and which of these this one is.

    Raises:
        ValueError: Slurm's variables do not fit together.
    """
    try:
        return _read_slurm()
    except (ValueError, LookupError):
        found = ", ".join(f"{name}={os.environ[name]}" for name in _SLURM if name in os.environ)
        raise ValueError(
            f"Slurm's variables must describe this task, got {found}. Start the tasks by srun."
        ) from None


def _read_slurm() -> tuple[int, int]:
    # Such as 4(x2),3: two nodes with 4 tasks, and one with 3.
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    by_node = [int(tasks) for tasks, nodes in runs for _ in range(int(nodes or 1))]
    if not by_node:
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
        by_node = [-(-int(os.environ["SLURM_NTASKS"]) // nodes)] * nodes
    return by_node[int(os.environ.get("SLURM_NODEID", "0"))], int(os.environ["SLURM_LOCALID"])


def _open_mpi_task() -> tuple[int, int]:
    """Return the number of this node's tasks, and which of these this one is."""
    return int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"]), int(
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]
    )


def _unreachable(coordinator: str, bind: bool) -> str | None:
    """What keeps the processes from meeting at the coordinator."""
    parts = re.fullmatch(r"(\[[^\s\[\]/]+\]|[^\s\[\]/:]+):([0-9]{1,5})", coordinator)
    if not parts or not 0 < int(parts[2]) < 2**16:
        return f"coordinator={coordinator!r}: give HOST:PORT, with a port from 1 to 65535"
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            parts[1].strip("[]"), parts[2], type=socket.SOCK_STREAM
        )[0]
        if bind and _BIND not in os.environ:
            # JAX would share a port at which another run listens, and mix the processes of both; elsewhere it crashes.
            with socket.socket(family, kind) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", error)
        return f"coordinator={coordinator!r}: {why}: give an address and a free port of process 0's machine"
    return None


def _how(code: int) -> str:
    """How a process failed."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    if -code in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        return f"gives no sign of life, stopped by {name}"
    return f"was ended by {name}" + (
        ", as by JAX where another is lost" if -code == signal.SIGABRT else ""
    )


@contextlib.contextmanager
def _stops() -> Iterator[list[_Stop]]:
    """The signals so far that ask for an end; they are only recorded, so that any number of them is harmless."""
    stops: list[_Stop] = []

    def note(number: int, frame: Any) -> None:
        stops.append(
            _Stop(time.monotonic(), number)
        )  # without a lock: the handler may interrupt itself

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stops
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _start(
    options: argparse.Namespace, alone: bool, devices: list[int] | None, alive: int
) -> dict[int | None, subprocess.Popen]:
    """This machine's processes by number: all if it is alone, otherwise one."""
    program = ["-m", *options.module] if options.module else options.file
    environment, coordinator, numbers, run = (
        os.environ.copy(),
        options.coordinator,
        [options.process],
        "",
    )
    if alone:
        coordinator, numbers, run = (
            f"127.0.0.1:{_free_port()}",
            list(range(options.processes)),
            secrets.token_hex(8),
        )
        environment[_BIND] = coordinator
        if COUNT_FLAG not in environment.get("XLA_FLAGS", ""):
            environment.setdefault(
                "JAX_NUM_CPU_DEVICES", str(max(1, min(16, cores() // options.processes)))
            )
    elif coordinator is not None:
        environment.setdefault(_BIND, coordinator)  # by default all interfaces
    children = {}
    for number in numbers:
        join = f"_join({coordinator!r}, {options.processes}, {number}, {devices}, {run!r}, {alive})"
        command = [sys.executable, "-c", f"from jaxfl.launch import _join; {join}", *program]
        shown = None if number == numbers[0] else subprocess.DEVNULL  # all print the same
        # In a group of its own, so that Ctrl-C reaches it once, through this process.
        children[number] = subprocess.Popen(
            command, env=environment, stdout=shown, process_group=0, pass_fds=[alive]
        )
    return children


def _wait(
    children: dict[int | None, subprocess.Popen], stops: list[_Stop]
) -> tuple[int | None, int]:
    """Number and exit code of the process that failed first, once all have ended; code 0 if none failed."""
    ended: queue.SimpleQueue = queue.SimpleQueue()
    for number, child in children.items():  # a thread each: they notice in the order of events
        threading.Thread(
            target=lambda n=number, c=child: ended.put((n, c.wait())), daemon=True
        ).start()
    first, deadline, told, running = (None, 0), math.inf, False, len(children)
    while running:
        with contextlib.suppress(queue.Empty):
            number, code = ended.get(timeout=0.05)
            running -= 1
            if code and not first[1]:
                first = (code == -signal.SIGABRT and _silent(children)) or (number, code)
                deadline = time.monotonic() + _GRACE_SECONDS
        if stops and not told:
            told = True
            for child in children.values():
                child.send_signal(signal.SIGINT)
        if time.monotonic() > deadline or (
            stops and stops[-1].time - stops[0].time > _ONE_PRESS_SECONDS
        ):
            for child in children.values():
                child.kill()
    return first


def _silent(children: dict[int | None, subprocess.Popen]) -> tuple[int | None, int] | None:
    """Number of a stopped process, and minus its signal: JAX ended another one that waited for it."""
    if not hasattr(os, "waitid"):  # macOS with Python before 3.13
        return None
    for number, child in children.items():
        with contextlib.suppress(ChildProcessError):  # it has ended
            if status := os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT):
                return number, -status.si_status
    return None


def _join(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    devices: list[int] | None,
    run: str,
    launcher: int,
) -> None:
    """Become one of the processes, and run the program.

    Args:
        coordinator: HOST:PORT, or None where JAX detects it.
        processes: how many.
        process: number of this one.
        devices: indices of its GPUs among those of the node, or None for all.
        run: a secret of this run's processes, if one launcher starts them all.
        launcher: a pipe that ends with the launcher.
    """
    threading.Thread(target=_end_after, args=(launcher,), daemon=True).start()
    signal.signal(
        signal.SIGINT, signal.SIG_DFL
    )  # there is nothing to save while the others are awaited
    options: dict[str, Any] = (
        {"cluster_detection_method": "deactivate"} if coordinator is not None else {}
    )
    if devices is not None:
        options["local_device_ids"] = devices
    jax.distributed.initialize(
        coordinator, processes, process, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS, **options
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = _run(run, processes, process)
    sys.stdout.flush()
    if code:
        time.sleep(
            0 if process else 2
        )  # without process 0 the others end at once: let them report first
        os._exit(code)  # a regular exit would wait for processes that wait for this one


def _end_after(launcher: int) -> None:
    """Kill this process and its children once the launcher has ended."""
    os.read(launcher, 1)
    os.killpg(0, signal.SIGKILL)


def _run(run: str, processes: int | None, process: int | None) -> int:
    """Run the program, if all processes run the same; its exit code."""
    module = sys.argv[1] == "-m"
    sys.argv[:] = sys.argv[2 if module else 1 :]
    try:
        agree(
            {
                "run": run,
                "processes": str(processes),
                "program": shlex.join(sys.argv),
                **_versions(),
            }
        )
    except ValueError as differing:
        print(differing, file=sys.stderr)
        return 1
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(pathlib.Path(sys.argv[0]).absolute().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        if str(stop) and not process:
            print(f"\n{stop}", file=sys.stderr)
        return signals.exit_code(stop)
    except Exception as error:
        try:
            sys.excepthook(
                type(error), error, error.__traceback__
            )  # the program may have set its own
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        return 1
    return 0


def _versions() -> dict[str, str]:
    """Versions of what computes besides the program."""
    sources = sorted(pathlib.Path(__file__).parent.rglob("*.py"))
    code = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return {"python": platform.python_version(), "jax": jax.__version__, "jaxfl's code": code[:12]}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
