"""Parts of a benchmark that fail in every way, and turns on a device."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types
from typing import Any

import pytest

from tools import turns
from tools.turns import Part, run_parts, turn


def returns(value: Any) -> Any:
    return value


def raises() -> Any:
    raise ValueError("no \udcff device")


def dies(number: int) -> Any:
    os.kill(os.getpid(), number)


def ends() -> Any:
    os._exit(0)


def prints() -> Any:
    os.write(1, b'{"fake": 1}\n\xff')
    return {"seconds": 1.0}


def sleeps(seconds: float = 60.0) -> Any:
    time.sleep(seconds)
    return {"seconds": seconds}


def leaves_a_child(path: str) -> Any:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pathlib.Path(path).write_text(str(child.pid))
    return {"seconds": 1.0}


def measures(path: str, name: str, seconds: float) -> Any:
    with turn("compile"), open(path, "a") as log:
        log.write(f"compile {name}\n")
    with turn("measure"):
        with open(path, "a") as log:
            log.write(f"begin {name}\n")
        time.sleep(seconds)
        with open(path, "a") as log:
            log.write(f"end {name}\n")
    return {"seconds": seconds}


def run(parts: dict[str, Part], *, seconds: float = 60.0, at_once: int = 2) -> dict[str, Any]:
    found: dict[str, Any] = {}
    run_parts(parts, found.__setitem__, seconds=seconds, at_once=at_once)
    return found


def alive(process: int) -> bool:
    """Return whether a process still runs after ten seconds. A zombie does not run."""
    # A killed process ends only when the system gives it its turn.
    for _ in range(100):
        try:
            if " Z " in pathlib.Path(f"/proc/{process}/stat").read_text():
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.1)
    return True


def test_whatever_ends_a_part_the_others_continue(tmp_path):
    parts = {
        "number": Part(returns, (3,)),
        "nothing": Part(returns, (None,)),
        "raises": Part(raises),
        "killed": Part(dies, (int(signal.SIGKILL),)),
        "crash": Part(dies, (int(signal.SIGSEGV),)),
        "silent": Part(ends),
        "slow": Part(sleeps, seconds=0.5),
        "garbage": Part(prints),
        "child": Part(leaves_a_child, (str(tmp_path / "pid"),)),
    }
    found = run(parts)
    reasons = {name: own.get("failed", "") for name, own in found.items()}
    assert set(found) == set(parts)
    assert reasons["number"] == "the part returned 3, and no dict"
    assert reasons["nothing"] == "the process ended with 0"
    assert "ended with 1: ValueError: no" in reasons["raises"]
    assert "ended with -9" in reasons["killed"]
    assert "ended with -11" in reasons["crash"]
    assert "ended with 0" in reasons["silent"]
    assert reasons["slow"] == "the part took more than 0.5 s"
    assert found["garbage"]["seconds"] == found["child"]["seconds"] == 1.0
    assert not alive(int((tmp_path / "pid").read_text()))


def test_one_part_measures_at_a_time(tmp_path):
    log = tmp_path / "log"
    found = run({name: Part(measures, (str(log), name, 0.3)) for name in "abc"}, at_once=3)
    assert [own.get("seconds") for own in found.values()] == [0.3] * 3
    lines = [line.split() for line in log.read_text().splitlines()]
    begun = [name for what, name in lines if what == "begin"]
    assert sorted(begun) == [*"abc"]
    for index, (what, name) in enumerate(lines):
        if what == "begin":
            assert lines[index + 1] == ["end", name]


def test_time_in_which_a_part_waits_for_its_turn_is_not_counted():
    own: Any = types.SimpleNamespace(
        asks="measure", used=0.0, part=Part(returns, seconds=5.0), found=None
    )
    turns._Process.count(own, 9.0)
    assert own.found is None
    own.asks = None
    turns._Process.count(own, 4.0)
    assert own.found is None
    turns._Process.count(own, 2.0)
    assert own.found == {"failed": "the part took more than 5 s"}


def test_earlier_parts_have_their_turn_first():
    class Own:
        def __init__(self, asks, holds=None):
            self.asks, self.holds = asks, holds

        def give(self):
            self.asks, self.holds = None, self.asks

    for states, expected in (
        (("compile", "compile", "measure"), ["compile", "compile", None]),
        (("measure", "compile"), ["measure", None]),
    ):
        own: Any = [Own(asks) for asks in states]
        turns._give_turns(own)
        assert [one.holds for one in own] == expected
    # A part that waits in order to measure lets no later part begin to compile.
    queue: Any = [Own("measure"), Own("compile"), Own(None, "compile")]
    turns._give_turns(queue)
    assert [one.holds for one in queue] == [None, None, "compile"]


def test_nothing_continues_after_the_time_is_over():
    begun = time.monotonic()
    found = run({"a": Part(sleeps), "b": Part(sleeps), "c": Part(sleeps)}, seconds=1.0)
    assert time.monotonic() - begun < 20
    assert [own["missing"] for own in found.values()] == ["the time was over"] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_part_outlives_the_benchmark(number, tmp_path):
    """After any stop of the benchmark, its results are written, and no process holds the device."""
    program = f"""
import json, os, pathlib, signal, sys
sys.path[:0] = {[str(pathlib.Path(__file__).parent), *sys.path]!r}
import test_turns
from tools.turns import Part, run_parts

if __name__ == "__main__":
    # A process that a shell starts in the background ignores SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    parts = {{"a": Part(test_turns.returns, ({{"seconds": 1.0}},)), "b": Part(test_turns.sleeps)}}
    folder = pathlib.Path({str(tmp_path)!r})

    def keep(name, found):
        (folder / name).write_text(json.dumps(found))
        children = pathlib.Path(f"/proc/{{os.getpid()}}/task/{{os.getpid()}}/children").read_text()
        (folder / "children").write_text(children)

    run_parts(parts, keep, seconds=60, at_once=2)
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    with open(tmp_path / "errors", "w") as errors:
        process = subprocess.Popen([sys.executable, str(script)], stderr=errors)
    for _ in range(600):
        if (tmp_path / "children").exists():
            break
        time.sleep(0.1)
    process.send_signal(number)
    process.wait(20)
    children = [int(child) for child in (tmp_path / "children").read_text().split()]
    for _ in range(100):
        if not any(map(alive, children)):
            break
        time.sleep(0.1)
    assert children
    assert not any(map(alive, children))
    assert json.loads((tmp_path / "a").read_text())["seconds"] == 1.0
