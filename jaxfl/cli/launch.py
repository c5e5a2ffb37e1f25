"""Run one program as several processes that share its work. The program itself needs no change.

On one machine:
  python -m jaxfl launch --processes 2 -m experiments.quickstart
On each of two machines:
  python -m jaxfl launch --coordinator HOST:PORT --processes 2 --process 0 run.py
If JAX detects the cluster:
  srun python -m jaxfl launch run.py

Under Slurm and Open MPI, the tasks of a node share its GPUs equally, and the number of GPUs of each
task is printed. If one process fails, the others end too. The same command then resumes each run
from its last checkpoint.
"""

import argparse
import contextlib
import hashlib
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
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax

# JAX has no public way to ask which cluster it detects.
from jax._src.clusters import ClusterEnv

from jaxfl._support.backend import COUNT_FLAG, cores, visible_gpus
from jaxfl.engine.processes import agree
from jaxfl.run import signals
from jaxfl.run.flags import configure

_HEARTBEAT_SECONDS = 30
"""Seconds after which a process that does not respond counts as lost."""

_SHUTDOWN_SECONDS = 7 * 24 * 3600
"""Seconds that a finished process waits for the others, such as one that writes results.

JAX's default of 300 ends the others after that time. Lost processes are noticed all the same.
"""

_GRACE_SECONDS = 10.0
"""Seconds for the other processes to notice a failure and report, before they are killed."""

_ONE_PRESS_SECONDS = 0.1
"""Seconds within which signals count as one, because a terminal and a wrapper may both send it."""

_STOPPED = (-signal.SIGINT, 128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGKILL)
"""Exit codes of a process that a signal to the launcher may have stopped."""

_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
"""Environment variable with the address at which process 0 listens."""


_AGAIN = (
    "Start all processes again with the same command, so that each run resumes from its last "
    "checkpoint, if it has one."
)
"""Remedy after processes have stopped or failed."""


class _Stop(NamedTuple):
    """A signal to the launcher, and its `time.monotonic()`."""

    time: float
    number: int


def main(arguments: list[str]) -> int:
    """Run a program as several processes that share its work, and report the first failure.

    Ctrl-C (or SIGTERM) lets a run save and stop, and a second one kills it. The processes end when
    the launcher does, whatever ends it.

    Args:
        arguments: Words of the command line after `jaxfl launch`.

    Returns:
        The exit code of the process that failed first, or 0 if none failed. It is 128 plus the
        signal if a signal ended or stopped that process. If a signal to the launcher did so, it is
        128 plus the first such signal.

    Raises:
        SystemExit: Options are wrong or incompatible, or ask for help. The code is 2, after one
            line about them, or 0 after the help.
    """
    configure()
    parser = _parser()
    options = parser.parse_args(arguments)
    wrong = _wrong(options)
    if wrong:
        parser.error(wrong)

    # Without a number of processes, a cluster must have started this task.
    devices = None
    if options.processes is None:
        try:
            devices = _devices()
        except ValueError as error:
            parser.error(str(error))

    alone = options.coordinator is None and options.processes is not None
    # Nothing is written to the pipe. It ends with this process, and the other processes end then.
    read_end, write_end = os.pipe()
    with open(read_end, "rb"), open(write_end, "wb"), _stops() as stops:
        number, code = _wait(_start(options, alone, devices, read_end), stops)
    if code and stops and code in _STOPPED:
        code = -stops[0].number
        print(f"\nstopped by {signal.Signals(-code).name}. {_AGAIN}", file=sys.stderr)
    elif code:
        name = "the process of this machine"
        if number is not None:
            name = f"process {number} of {options.processes}"
        failure = f"{name} {_failure_in_words(code)}, and no other process can continue without it."
        if not alone:
            failure += " If a process of another machine ended before it, that one is the cause."
        print(f"\n{failure} {_AGAIN}", file=sys.stderr)
    if code < 0:
        # Shells report a signal in this way.
        return 128 - code
    return code


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    # The description holds the usage, so an error is one line.
    parser = argparse.ArgumentParser(
        "python -m jaxfl launch",
        usage=argparse.SUPPRESS,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--processes",
        type=int,
        help="number of processes in all; this machine starts all of them without --process",
    )
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="address and free port of process 0's machine"
    )
    parser.add_argument(
        "--process", type=int, help="index of the process that this machine starts, from 0"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="module to run, and its arguments"
    )
    parser.add_argument(
        "file", nargs=argparse.REMAINDER, help="file to run without -m, and its arguments"
    )
    return parser


def _wrong(options: argparse.Namespace) -> str | None:
    """Return an error about the options with its remedy, or None if they are right."""
    names = ("processes", "coordinator", "process")
    given_options = [name for name in names if getattr(options, name) is not None]
    if not (options.module or options.file):
        return "program must be given, got none. Give a file, or -m and a module."
    if options.file and not os.path.exists(options.file[0]):
        return f"file must exist, got {options.file[0]!r}. Give a file, or -m and a module."
    # A search for the whole name would import the packages that hold the module.
    top = options.module and options.module[0].partition(".")[0]
    if options.module and not (top and find_spec(top)):
        return (
            f"-m must name an installed module, got {options.module[0]!r}. "
            "Install it, or give another module."
        )
    if given_options not in ([], ["processes"], [*names]):
        return (
            f"processes must be given alone, or with coordinator and process, got {given_options}. "
            "Give processes, all three, or none of them."
        )
    if given_options and options.processes < 1:
        return (
            f"processes must be a whole number of at least 1, got {options.processes}. "
            "Give for instance 2."
        )
    if given_options and (options.process or 0) not in range(options.processes):
        return (
            f"process must be from 0 to {options.processes - 1}, got {options.process}. "
            "Number the processes from 0."
        )
    if options.coordinator is None:
        return None
    return _unreachable(options.coordinator, bind=options.process == 0)


def _devices() -> list[int] | None:
    """Return the indices of this task's GPUs in a cluster, or None to leave the choice to JAX.

    JAX gives a task of Slurm or Open MPI one GPU, so that other GPUs of the node would idle. None
    is for nodes without GPUs, for other clusters, and for users who have set JAX_LOCAL_DEVICE_IDS.
    Under Slurm and Open MPI, a node's first task prints how many devices each task has, unless the
    user has set this variable.

    Raises:
        ValueError: No cluster is detected, or not the one that started this task. The node's tasks
            cannot share its GPUs equally, or Slurm's variables do not fit together.
    """
    cluster = _cluster()
    if cluster not in ("slurm", "ompi") or "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    if cluster == "slurm":
        tasks, task = _slurm_task()
    else:
        tasks, task = _open_mpi_task()
    seen = visible_gpus()
    found = 0
    if seen:
        # Slurm may hide the GPUs of other tasks from this one, and its variable counts all.
        found = max(seen, int(os.environ.get("SLURM_GPUS_ON_NODE", "0")))
    if seen * tasks == found:
        # The cluster has given each task its own GPUs.
        mine = list(range(seen))
    elif seen == found and found % tasks == 0:
        each = found // tasks
        mine = list(range(task * each, (task + 1) * each))
    else:
        raise ValueError(
            f"tasks must share the node's GPUs equally, got {tasks} tasks for {found} GPUs, of "
            f"which this task sees {seen}. Start one task per node that sees all GPUs, or one task "
            "per GPU."
        )
    if task == 0:
        devices = _devices_in_words(len(mine), found)
        print(f"{platform.node()}: tasks: {tasks}, each with {devices}", file=sys.stderr)
    return mine or None


def _cluster() -> str:
    """Return JAX's name of the cluster that it would join, or raise a ValueError."""
    # JAX joins the first kind that is present, and skips those that a user has to name.
    clusters = [
        kind
        for kind in ClusterEnv._cluster_types
        if not kind.opt_in_only_method and kind.is_env_present()
    ]
    if _open_mpi_5() and not (clusters and clusters[0].name == "ompi" and find_spec("mpi4py")):
        raise ValueError(
            "coordinator must be given under Open MPI 5, unless JAX is at least 0.12 and has "
            f"mpi4py, got none with JAX {jax.__version__}. Give --coordinator HOST:PORT, "
            "--processes $OMPI_COMM_WORLD_SIZE and --process $OMPI_COMM_WORLD_RANK."
        )
    if not clusters:
        raise ValueError(
            "processes must be given outside of a cluster, got none. Give --processes to start "
            "that many on this machine, or start the command on each node by srun or mpirun."
        )
    return clusters[0].name


def _devices_in_words(mine: int, gpus: int) -> str:
    """Return in words how many devices a task has: `mine` of the node's GPUs, or CPU devices."""
    if gpus:
        return f"{mine} of {gpus} GPUs"
    cpus = jax.config.values["jax_num_cpu_devices"]
    if cpus < 1:
        # XLA_FLAGS may have the number.
        return "its CPU devices"
    return f"{cpus} CPU devices"


_SLURM = (
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NUM_NODES",
    "SLURM_NTASKS",
    "SLURM_NODEID",
    "SLURM_LOCALID",
)
"""Slurm's variables that describe a task."""


def _slurm_task() -> tuple[int, int]:
    """Return the number of this node's tasks, and the index of this task among them.

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
    """Return the result of `_slurm_task`, or raise a ValueError or a LookupError."""
    # For example, 4(x2),3 stands for two nodes with 4 tasks and one with 3.
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    by_node = [int(tasks) for tasks, nodes in runs for _ in range(int(nodes or 1))]
    if not by_node:
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
        by_node = [-(-int(os.environ["SLURM_NTASKS"]) // nodes)] * nodes
    return by_node[int(os.environ.get("SLURM_NODEID", "0"))], int(os.environ["SLURM_LOCALID"])


def _open_mpi_5() -> bool:
    """Return whether Open MPI 5 or newer started this task.

    JAX would take such a task within a Slurm job for one that Slurm started.
    """
    # Older ones have the address of their daemon.
    return "OMPI_COMM_WORLD_SIZE" in os.environ and "OMPI_MCA_orte_hnp_uri" not in os.environ


def _open_mpi_task() -> tuple[int, int]:
    """Return the number of this node's tasks, and the index of this task among them."""
    tasks = int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    task = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    return tasks, task


def _unreachable(coordinator: str, bind: bool) -> str | None:
    """Return an error about the coordinator's form, address or port, or None if none is found.

    Args:
        coordinator: HOST:PORT.
        bind: Whether process 0 starts here, so that its port must be free. The port is not tried if
            JAX_COORDINATOR_BIND_ADDRESS is set.
    """
    parts = re.fullmatch(r"(\[[^\s\[\]/]+\]|[^\s\[\]/:]+):([0-9]{1,5})", coordinator)
    if not parts or not 0 < int(parts[2]) < 2**16:
        return (
            f"coordinator must be HOST:PORT with a port from 1 to 65535, got {coordinator!r}. "
            "Give for instance 10.0.0.1:8476."
        )
    try:
        host = parts[1].strip("[]")
        found = socket.getaddrinfo(host, parts[2], type=socket.SOCK_STREAM)
        family, kind, _, _, address = found[0]
        if bind and _BIND not in os.environ:
            # JAX would share a port at which another run listens, and mix the processes of both.
            # At an address of another machine it would crash.
            with socket.socket(family, kind) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", error)
        return (
            "coordinator must be an address and a free port of process 0's machine, got "
            f"{coordinator!r} ({why}). Choose another address or port."
        )
    return None


def _failure_in_words(code: int) -> str:
    """Return how a process failed, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    if -code in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
        return f"does not respond, because {name} stopped it"
    if -code == signal.SIGABRT:
        return f"was ended by {name}, as JAX does if another process is lost"
    return f"was ended by {name}"


@contextlib.contextmanager
def _stops() -> Iterator[list[_Stop]]:
    """Yield the list of signals so far that ask for an end.

    Signals are only recorded, so that any number of them is harmless.
    """
    stops: list[_Stop] = []

    def note(number: int, frame: Any) -> None:
        # There is no lock, because the handler may interrupt itself.
        stops.append(_Stop(time.monotonic(), number))

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stops
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _start(
    options: argparse.Namespace, alone: bool, devices: list[int] | None, alive: int
) -> dict[int | None, subprocess.Popen]:
    """Start this machine's processes, and return them by number, which is None if JAX detects it.

    Args:
        options: Options of the command line.
        alone: Whether this machine starts all processes. It starts one of them otherwise.
        devices: Indices of the process's GPUs. None leaves the choice to JAX.
        alive: Read end of a pipe that ends with this process.
    """
    program = options.file
    if options.module:
        program = ["-m", *options.module]
    coordinator = options.coordinator
    numbers = [options.process]
    run = ""
    if alone:
        coordinator = f"127.0.0.1:{_free_port()}"
        numbers = list(range(options.processes))
        run = secrets.token_hex(8)
    environment = _environment(coordinator, options.processes, alone)
    children = {}
    for number in numbers:
        join = f"_join({coordinator!r}, {options.processes}, {number}, {devices}, {run!r}, {alive})"
        command = [sys.executable, "-c", f"from jaxfl.cli.launch import _join; {join}", *program]
        # All processes print the same, so only one of them is shown.
        shown = None
        if number != numbers[0]:
            shown = subprocess.DEVNULL
        # A process has a group of its own, so that Ctrl-C reaches it once, through this process.
        children[number] = subprocess.Popen(
            command, env=environment, stdout=shown, process_group=0, pass_fds=[alive]
        )
    return children


def _environment(coordinator: str | None, processes: int, alone: bool) -> dict[str, str]:
    """Return the environment variables of processes that `_start` starts.

    Args:
        coordinator: HOST:PORT. None if JAX detects it.
        processes: Number of processes.
        alone: Whether this machine starts all processes.
    """
    environment = os.environ.copy()
    if coordinator is None:
        # JAX takes the address from the cluster.
        return environment
    if not alone:
        # Without this address, process 0 would listen at all interfaces.
        environment.setdefault(_BIND, coordinator)
        return environment
    # This address is the loopback one, so no other machine can reach the port.
    environment[_BIND] = coordinator
    # The processes share the cores, unless the user has set a number of devices.
    if COUNT_FLAG not in environment.get("XLA_FLAGS", ""):
        share = max(1, min(16, cores() // processes))
        environment.setdefault("JAX_NUM_CPU_DEVICES", str(share))
    return environment


def _wait(
    children: dict[int | None, subprocess.Popen], stops: list[_Stop]
) -> tuple[int | None, int]:
    """Wait for all processes, and return the number and exit code of the first that failed.

    The code is 0 if none failed, and negative if a signal ended or stopped the process.
    """
    ended = _exits(children)
    first: tuple[int | None, int] = (None, 0)
    deadline = math.inf
    interrupted = False
    running = len(children)
    while running:
        with contextlib.suppress(queue.Empty):
            # The timeout lets this thread look at signals and at the deadline.
            number, code = ended.get(timeout=0.05)
            running -= 1
            if code and not first[1]:
                first = (number, code)
                if code == -signal.SIGABRT:
                    first = _stopped(children) or first
                deadline = time.monotonic() + _GRACE_SECONDS
        if stops and not interrupted:
            # The first signal lets each process save and stop.
            interrupted = True
            for child in children.values():
                child.send_signal(signal.SIGINT)
        pressed_twice = stops and stops[-1].time - stops[0].time > _ONE_PRESS_SECONDS
        # A failure leaves the others some time to end, and a second signal leaves none.
        if time.monotonic() > deadline or pressed_twice:
            for child in children.values():
                child.kill()
    return first


def _exits(children: dict[int | None, subprocess.Popen]) -> queue.SimpleQueue:
    """Return a queue that gets the number and exit code of each process when the process ends."""
    ended: queue.SimpleQueue = queue.SimpleQueue()
    # Each process has a thread, so that the queue has the order of events.
    for number, child in children.items():
        threading.Thread(
            target=lambda n=number, c=child: ended.put((n, c.wait())), daemon=True
        ).start()
    return ended


def _stopped(children: dict[int | None, subprocess.Popen]) -> tuple[int | None, int] | None:
    """Return the number and negative signal of a suspended process, or None if none is known.

    A suspended process is the cause if JAX ends the others, which wait for it.
    """
    # Python before 3.13 has no `waitid` on macOS.
    if not hasattr(os, "waitid"):
        return None
    for number, child in children.items():
        # A process that has ended cannot be asked.
        with contextlib.suppress(ChildProcessError):
            status = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
            if status:
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
    """Join the other processes through JAX, and run the program in `sys.argv`.

    Args:
        coordinator: HOST:PORT. None if JAX detects it.
        processes: Number of processes. None if JAX detects it.
        process: Number of this process. None if JAX detects it.
        devices: Indices of its GPUs among those of the node. None leaves the choice to JAX.
        run: Secret of this run's processes if one launcher starts them all, or "".
        launcher: Read end of a pipe that ends with the launcher.
    """
    # From here on, the process ends with its launcher, even while JAX waits for others.
    threading.Thread(target=_end_after, args=(launcher,), daemon=True).start()
    configure()
    # While this process waits for the others, there is nothing to save.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    options: dict[str, Any] = {}
    if coordinator is not None:
        # JAX would otherwise take the local devices from the variables of any cluster around it.
        options["cluster_detection_method"] = "deactivate"
    if devices is not None:
        options["local_device_ids"] = devices
    options["heartbeat_timeout_seconds"] = _HEARTBEAT_SECONDS
    options["shutdown_timeout_seconds"] = _SHUTDOWN_SECONDS
    jax.distributed.initialize(coordinator, processes, process, **options)
    # From here on, Ctrl-C lets the program save.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = _run_program(run, processes, process)
    sys.stdout.flush()
    if code:
        # The other processes end when process 0 does, so it lets them report first.
        if not process:
            time.sleep(2)
        # A regular exit would wait for processes that wait for this one.
        os._exit(code)


def _end_after(launcher: int) -> None:
    """Wait until the launcher's pipe ends, and then kill this process and its process group."""
    os.read(launcher, 1)
    # The launcher made the group for this process, so the signal hits nobody else.
    os.killpg(0, signal.SIGKILL)


def _run_program(run: str, processes: int | None, process: int | None) -> int:
    """Run the program, and return its exit code.

    If the processes differ in program, versions, launcher or number, return 1 without running it.
    """
    module = sys.argv[1] == "-m"
    sys.argv[:] = sys.argv[2 if module else 1 :]
    facts = {"run": run, "processes": str(processes), "program": shlex.join(sys.argv)}
    try:
        # Processes of different programs would wait for each other, or exchange wrong arrays.
        agree(facts | _versions())
    except ValueError as differing:
        print(differing, file=sys.stderr)
        return 1
    try:
        _run_as_main(module)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            # The system keeps 8 bits of an exit code, so 256 is a success.
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        if str(stop) and not process:
            print(f"\n{stop}", file=sys.stderr)
        return signals.exit_code(stop)
    except Exception as error:
        try:
            # The program may have set its own hook.
            sys.excepthook(type(error), error, error.__traceback__)
        except SystemExit as end:
            if isinstance(end.code, int):
                return end.code
        return 1
    return 0


def _run_as_main(module: bool) -> None:
    """Run the module or the file in `sys.argv`, as Python would."""
    if module:
        # `alter_sys` makes the module's file the first argument, as `python -m` does.
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        # `python file.py` sets this path, and `runpy.run_path` does not.
        sys.path[0] = str(pathlib.Path(sys.argv[0]).absolute().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


def _versions() -> dict[str, str]:
    """Return the versions of Python and JAX, and a hash of this package's code, by name."""
    sources = sorted(pathlib.Path(__file__).parents[1].rglob("*.py"))
    code = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    return {"python": platform.python_version(), "jax": jax.__version__, "jaxfl's code": code[:12]}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
