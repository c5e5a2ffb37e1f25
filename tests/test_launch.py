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

import pytest
from jax._src import distributed

from jaxfl import launch
from jaxfl.engine import processes

LAUNCH = [sys.executable, "-m", "jaxfl.launch"]


def program(what, *arguments):
    """Of one process."""
    process = distributed.global_state.process_id
    if what == "fail":  # where facts differ; process 1 first
        processes.agree({"same": "for all"})
        with pytest.raises(ValueError, match=r"^data differs by process: '0' in 0; '1' in 1: start the same run"):
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
    """A process that ends with a signal once it was sent so many, or at once with an exit code."""

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
        ([], "program is missing"),
        (["-m"], "program is missing"),
        (["nosuchfile.py"], "file='nosuchfile.py' does not exist"),
        (["-m", "nosuchmodule.x"], "-m nosuchmodule.x: no such module"),
        (["--processes", "x", __file__], "invalid int value: 'x'"),
        (["--processes", "0", __file__], "processes=0"),
        (["--process", "1", __file__], "['process'] alone"),
        (["--coordinator", "a:1", "--processes", "2", "--process", "2", __file__], "process=2"),
        (["--coordinator", "a", *HERE], "coordinator='a': give HOST:PORT"),
        (["--coordinator", "a:b", *HERE], "coordinator='a:b': give HOST:PORT"),
        (["--coordinator", ":1", *HERE], "coordinator=':1': give HOST:PORT"),
        (["--coordinator", "::1:5", *HERE], "coordinator='::1:5': give HOST:PORT"),
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


def test_a_port_that_another_run_listens_at_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(SystemExit):
        launch.main(["--coordinator", f"127.0.0.1:{other.getsockname()[1]}", *HERE])
    assert "Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize("own", [None, "0.0.0.0:5"])
def test_the_coordinator_binds_to_the_address_given(monkeypatch, own):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **options: started.append(Child(**options)) or started[-1])
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    if own:
        monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", own)
    address = f"127.0.0.1:{free_port()}"
    assert launch.main(["--coordinator", address, *HERE]) == 0
    assert [child.options["env"]["JAX_COORDINATOR_BIND_ADDRESS"] for child in started] == [own or address]


def test_the_first_that_failed_is_named():
    first = python("sys.exit(7)")
    # The other fails as soon as the first one was waited for.
    code = f"\nwhile True:\n  try: os.kill({first.pid}, 0)\n  except ProcessLookupError: sys.exit(1)"
    assert launch._wait({0: python(code), 1: first}, []) == (1, 7)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="the system does not tell who is stopped")
def test_a_stopped_process_is_blamed_for_the_one_that_waited_for_it(monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 0.0)
    stopped = python("os.kill(os.getpid(), signal.SIGSTOP)")
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    assert launch._wait({0: python("os.kill(os.getpid(), signal.SIGABRT)"), 1: stopped}, []) == (1, -signal.SIGSTOP)
    assert "no sign of life" in launch._how(-signal.SIGSTOP)


@pytest.mark.parametrize(
    ("times", "sent"),
    [((0.0,) * 50, [signal.SIGINT]), ((0.0, 1.0), [signal.SIGINT, signal.SIGKILL])],
)
def test_signals_reach_processes_once_and_a_second_press_kills(times, sent):
    one, other = Child(signals=len(sent)), Child(signals=len(sent))
    stops = [launch._Stop(at, signal.SIGTERM) for at in times]
    assert launch._wait({0: one, 1: other}, stops)[1] == -sent[-1]
    assert one.got == other.got == sent


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
    """Start this file; what its processes say is a pipe that ends with the last of them."""
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
    assert "stopped by SIGINT: start all processes again" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.xdist_group("hosts")
def test_a_process_of_another_run_changes_nothing(start):
    meet = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process"]
    both = [start(*meet, "0", __file__, "work", "seed 0"), start(*meet, "1", __file__, "work", "seed 1")]
    for launcher in both:
        said = launcher.stderr.read()
        assert launcher.wait() == 1
        assert "program differs by process" in said
        assert "is here" not in said


if __name__ == "__main__":
    program(*sys.argv[1:])
