"""The launcher: whom it starts, whom it blames, and that nobody outlives it.

This file is also the program that its processes run; two of them take a few seconds to meet.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest
from jax._src import distributed
from jax._src.clusters import ClusterEnv

from jaxfl.cli import launch
from jaxfl.engine import processes

LAUNCH = [sys.executable, "-m", "jaxfl", "launch"]


def program(what, *arguments):
    """Run one of the launched processes, with the behaviour `what`."""
    process = distributed.global_state.process_id
    if what == "fail":  # where facts differ; process 1 first
        processes.agree({"same": "for all"})
        with pytest.raises(
            ValueError,
            match=r"must be equal in all processes, got data '0' in process 0 and '1' in process 1\. Start",
        ):
            processes.agree({"same": "for all", "data": str(process)})
        if process == 1:
            sys.exit(7)
    sys.stderr.write(f"process {process} is here\n")
    try:
        time.sleep(30)
    except KeyboardInterrupt:
        sys.stderr.write(f"process {process} saves\n")
        raise
    sys.stderr.write(f"process {process} is still at work\n")


class Child(subprocess.Popen):
    """A process that ends after some signals, or at once if it needs none."""

    def __init__(self, *arguments, signals=0, **options):
        self.left, self.options, self.got, self.end = signals, options, [], threading.Event()
        self.pid = 0
        if not signals:
            self.end.set()

    def wait(self, timeout=None):
        self.end.wait()
        return -self.got[-1] if self.got else 0

    def send_signal(self, sig):
        self.got.append(sig)
        self.left -= 1
        if not self.left:
            self.end.set()

    def kill(self):
        if not self.end.is_set():
            self.left = 1
            self.send_signal(signal.SIGKILL)


def python(code):
    return subprocess.Popen([sys.executable, "-S", "-E", "-c", f"import os, signal, sys; {code}"])


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


HERE = ["--processes", "2", "--process", "0", __file__]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "program must be given"),
        (["-m"], "program must be given"),
        (["nosuchfile.py"], "file must exist, got 'nosuchfile.py'"),
        (["-m", "nosuchmodule.x"], "-m must name an installed module, got 'nosuchmodule.x'"),
        (["--processes", "x", __file__], "invalid int value: 'x'"),
        (["--processes", "0", __file__], "processes must be a whole number of at least 1, got 0"),
        (
            ["--process", "1", __file__],
            "processes must be given alone, or with coordinator and process, got ['process']",
        ),
        (
            ["--coordinator", "a:1", "--processes", "2", "--process", "2", __file__],
            "process must be from 0 to 1, got 2",
        ),
        (
            ["--coordinator", "a", *HERE],
            "coordinator must be HOST:PORT with a port from 1 to 65535, got 'a'",
        ),
        (
            ["--coordinator", "a:b", *HERE],
            "coordinator must be HOST:PORT with a port from 1 to 65535, got 'a:b'",
        ),
        (
            ["--coordinator", ":1", *HERE],
            "coordinator must be HOST:PORT with a port from 1 to 65535, got ':1'",
        ),
        (
            ["--coordinator", "::1:5", *HERE],
            "coordinator must be HOST:PORT with a port from 1 to 65535, got '::1:5'",
        ),
        (["--coordinator", "127.0.0.1:0", *HERE], "port from 1 to 65535"),
        (["--coordinator", "127.0.0.1:65536", *HERE], "port from 1 to 65535"),
        (["--coordinator", "192.0.2.1:5", *HERE], "address and a free port of process 0's machine"),
    ],
)
def test_wrong_options_are_one_line(options, words, capsys):
    with pytest.raises(SystemExit) as end:
        launch.main(options)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


NOT_IN_A_CLUSTER = (
    "SLURM_",
    "OMPI_",
    "CUDA_VISIBLE",
    "ROCR_VISIBLE",
    "HIP_VISIBLE",
    "JAX_PLATFORMS",
    "JAX_LOCAL",
)


def slurm(tasks, task, nodes=1, **more):
    """Return Slurm's variables in a task, on a node with `tasks` tasks."""
    named = {
        "JOB_ID": "7",
        "STEP_NODELIST": "n[1-9]",
        "NTASKS": tasks * nodes,
        "PROCID": task,
        "LOCALID": task,
    }
    return {
        f"SLURM_{name}": str(value)
        for name, value in (named | {"STEP_NUM_NODES": nodes} | more).items()
    }


def open_mpi(tasks, task):
    """Return Open MPI's variables in a task, on one of two nodes with `tasks` tasks each."""
    world = {"SIZE": 2 * tasks, "RANK": task, "LOCAL_SIZE": tasks, "LOCAL_RANK": task}
    uri = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}
    return uri | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in world.items()}


def open_mpi_5(tasks, task):
    """Return the variables of Open MPI 5, which has no `orte` daemon."""
    variables = open_mpi(tasks, task) | {"OMPI_VERSION": "5.0.11"}
    return {name: value for name, value in variables.items() if "orte" not in name}


@pytest.fixture
def cluster(monkeypatch):
    """Set a cluster's variables, and the GPUs that a task sees."""
    for name in os.environ:
        if name.startswith(NOT_IN_A_CLUSTER):
            monkeypatch.delenv(name)
    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", None)

    def enter(variables, gpus=None):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        if gpus is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)

    yield enter
    jax.config.update("jax_platforms", before)


FOUR = "0,1,2,3"


@pytest.mark.parametrize(
    ("variables", "gpus", "mine", "told"),
    [
        (slurm(1, 0, nodes=2), FOUR, [0, 1, 2, 3], "tasks: 1, each with 4 of 4 GPUs"),
        (slurm(1, 0, GPUS_ON_NODE=4), FOUR, [0, 1, 2, 3], "tasks: 1, each with 4 of 4 GPUs"),
        (slurm(4, 2), FOUR, [2], ""),
        (slurm(2, 1, nodes=2, STEP_TASKS_PER_NODE="2(x2)"), FOUR, [2, 3], ""),
        (
            slurm(2, 0, STEP_TASKS_PER_NODE="4(x2),2", NODEID=2),
            "GPU-a1,GPU-b2",
            [0],
            "tasks: 2, each with 1 of 2 GPUs",
        ),
        (slurm(4, 3, GPUS_ON_NODE=4), "0", [0], ""),
        (open_mpi(1, 0), FOUR, [0, 1, 2, 3], "tasks: 1, each with 4 of 4 GPUs"),
        (open_mpi(2, 1), FOUR, [2, 3], ""),
    ],
)
def test_the_tasks_of_a_node_use_all_of_its_gpus(cluster, capsys, variables, gpus, mine, told):
    cluster(variables, gpus)
    assert launch._devices() == mine
    said = capsys.readouterr().err
    assert said.partition(": ")[2].strip() == told
    # What JAX makes of it; left to itself it takes one.
    found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, mine, None, None)
    assert found[3] == mine
    alone = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, None)
    assert len(alone[3] or ()) == 1


def test_gpus_that_no_task_would_use_are_an_error(cluster, capsys):
    for variables, gpus in (
        (slurm(3, 0), FOUR),
        (slurm(1, 0, GPUS_ON_NODE=4), "0"),
        (open_mpi(8, 0), FOUR),
    ):
        cluster(variables, gpus)
        with pytest.raises(SystemExit) as end:
            launch.main([__file__])
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert "4 GPUs" in said
        assert "Start one task per node that sees all GPUs, or one task per GPU." in said
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    "wrong", [{"NODEID": 7}, {"LOCALID": "z"}, {"STEP_TASKS_PER_NODE": "many", "NTASKS": "x"}]
)
def test_variables_that_do_not_fit_are_named(wrong, cluster, capsys):
    cluster(slurm(2, 0) | {f"SLURM_{name}": str(value) for name, value in wrong.items()}, FOUR)
    with pytest.raises(SystemExit) as end:
        launch.main([__file__])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "Slurm's variables must describe this task, got SLURM_" in said
    assert said.count("\n") == 1


def test_a_cluster_of_cpus_is_left_to_jax(cluster, capsys):
    cluster(slurm(2, 0), "")
    assert launch._devices() is None
    assert "tasks: 2, each with" in capsys.readouterr().err
    cluster(slurm(2, 0), FOUR)
    jax.config.update("jax_platforms", "cpu")
    assert launch._devices() is None


def test_a_choice_of_the_user_stays(cluster, monkeypatch):
    cluster(slurm(1, 0), FOUR)
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "1")
    assert launch._devices() is None


def test_without_a_cluster_one_line_says_so(cluster, capsys):
    with pytest.raises(SystemExit) as end:
        launch.main([__file__])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "processes must be given outside of a cluster, got none. Give --processes" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("allocation", "found"), [({}, None), (slurm(1, 0, nodes=2), None), (slurm(1, 0, nodes=2), 1)]
)
def test_open_mpi_5_needs_a_coordinator(allocation, found, cluster, capsys, monkeypatch):
    """This also holds with mpi4py, and in a Slurm job, whose variables describe other tasks."""
    types = [kind for kind in ClusterEnv._cluster_types if kind.name == "slurm"]
    monkeypatch.setattr(ClusterEnv, "_cluster_types", types)
    monkeypatch.setattr(launch, "find_spec", lambda name: found)
    cluster(allocation | open_mpi_5(2, 1), FOUR)
    with pytest.raises(SystemExit) as end:
        launch.main([__file__])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "coordinator must be given under Open MPI 5" in said
    assert "--process $OMPI_COMM_WORLD_RANK" in said
    assert said.count("\n") == 1


def test_a_newer_jax_detects_open_mpi_5(cluster, monkeypatch):
    class Detected:
        name = "ompi"
        opt_in_only_method = False
        is_env_present = staticmethod(lambda: True)

    monkeypatch.setattr(ClusterEnv, "_cluster_types", [Detected])
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    cluster(open_mpi_5(2, 1), FOUR)
    assert launch._devices() == [2, 3]


def test_a_process_joins_with_its_gpus(cluster, monkeypatch):
    cluster(slurm(2, 1), FOUR)
    started, joined = [], []
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **options: started.append(a[0]) or Child(**options)
    )
    assert launch.main([__file__]) == 0
    monkeypatch.setattr(launch, "_end_after", lambda launcher: None)
    monkeypatch.setattr(launch, "_run_program", lambda *given: 0)
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *given, **options: joined.append(options)
    )
    exec(started[0][2], {})
    assert joined[0]["local_device_ids"] == [2, 3]


def test_the_exit_code_of_a_programs_own_hook_stays(tmp_path, monkeypatch):
    path = tmp_path / "program.py"
    path.write_text("import sys\nsys.excepthook = lambda *error: sys.exit(5)\nraise ValueError\n")
    monkeypatch.setattr(sys, "argv", ["launch", str(path)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(launch, "agree", lambda facts: None)
    assert launch._run_program("", None, None) == 5


def test_a_port_that_another_run_listens_at_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit):
        launch.main(["--coordinator", f"127.0.0.1:{other.getsockname()[1]}", *HERE])
    assert "Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("own", [None, "0.0.0.0:5"])
def test_the_coordinator_binds_to_the_address_given(monkeypatch, own):
    started = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **options: started.append(Child(**options)) or started[-1]
    )
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    if own:
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", own)
    address = f"127.0.0.1:{free_port()}"
    assert launch.main(["--coordinator", address, *HERE]) == 0
    assert [child.options["env"]["JAX_COORDINATOR_BIND_ADDRESS"] for child in started] == [
        own or address
    ]


def test_the_first_that_failed_is_named():
    first = python("sys.exit(7)")
    # The other fails as soon as the first one was waited for.
    code = (
        f"\nwhile True:\n  try: os.kill({first.pid}, 0)\n  except ProcessLookupError: sys.exit(1)"
    )
    assert launch._wait({0: python(code), 1: first}, []) == (1, 7)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="the system does not tell who is stopped")
def test_a_stopped_process_is_blamed_for_the_one_that_waited_for_it(monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.0)
    stopped = python("os.kill(os.getpid(), signal.SIGSTOP)")
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    assert launch._wait({0: python("os.kill(os.getpid(), signal.SIGABRT)"), 1: stopped}, []) == (
        1,
        -signal.SIGSTOP,
    )
    assert "does not respond" in launch._failure_in_words(-signal.SIGSTOP)


@pytest.mark.parametrize(
    ("times", "sent"),
    [((0.0,) * 50, [signal.SIGINT]), ((0.0, 1.0), [signal.SIGINT, signal.SIGKILL])],
)
def test_signals_reach_processes_once_and_a_second_press_kills(times, sent):
    one, other = Child(signals=len(sent)), Child(signals=len(sent))
    stops = [launch._Stop(at, signal.SIGTERM) for at in times]
    assert launch._wait({0: one, 1: other}, stops)[1] == -sent[-1]
    assert one.got == other.got == sent


@pytest.mark.parametrize("code", [128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGKILL])
def test_a_process_that_the_launchers_signal_stopped_did_not_fail(code, monkeypatch, capsys):
    stops = contextlib.nullcontext([launch._Stop(0.0, signal.SIGTERM)])
    monkeypatch.setattr(launch, "_stops", lambda: stops)
    monkeypatch.setattr(launch, "_start", lambda *arguments: {})
    monkeypatch.setattr(launch, "_wait", lambda *arguments: (0, code))
    assert launch.main(["--processes", "2", __file__]) == 128 + signal.SIGTERM
    said = capsys.readouterr().err
    assert "stopped by SIGTERM. Start all processes again" in said
    assert "ended with" not in said


def test_signals_are_only_noted():
    before = signal.getsignal(signal.SIGTERM)
    with launch._stops() as stops:
        for _ in range(100):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
    assert [stop.number for stop in stops] == [signal.SIGTERM, signal.SIGINT] * 100
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def start(monkeypatch):
    """Return a function that starts this file. Its error pipe ends with the last process."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    with contextlib.ExitStack() as stack:

        def run(*options):
            command = [*LAUNCH, *options]
            return stack.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))

        yield run


def wait_for_both(launcher):
    said = ""
    while said.count("is here") < 2:
        line = launcher.stderr.readline()
        assert line, said
        said += line


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_exit_codes_stay_and_facts_that_differ_are_named(monkeypatch, capfd):
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.0)
    assert launch.main(["--processes", "2", __file__, "fail"]) == 7
    said = capfd.readouterr().err
    assert "process 1 of 2 ended with exit code 7" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_no_process_outlives_its_launcher(start):
    launcher = start("--processes", "2", __file__, "work")
    wait_for_both(launcher)
    launcher.kill()
    assert "still at work" not in launcher.stderr.read()  # the pipe ends with its last writer
    launcher.wait()


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_any_number_of_signals_ends_all(start):
    launcher = start("--processes", "2", __file__, "work")
    wait_for_both(launcher)
    for _ in range(20):
        launcher.send_signal(signal.SIGINT)
    said = launcher.stderr.read()
    assert launcher.wait() == 128 + signal.SIGINT
    assert all(said.count(f"process {number} saves") == 1 for number in range(2))
    assert "stopped by SIGINT. Start all processes again" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_a_process_of_another_run_changes_nothing(start):
    meet = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process"]
    both = [
        start(*meet, "0", __file__, "work", "seed 0"),
        start(*meet, "1", __file__, "work", "seed 1"),
    ]
    for launcher in both:
        said = launcher.stderr.read()
        assert launcher.wait() == 1
        assert "settings must be equal in all processes, got program" in said
        assert "is here" not in said


if __name__ == "__main__":
    program(*sys.argv[1:])
