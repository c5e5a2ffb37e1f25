"""Parts of a benchmark, each in a process of its own, that take turns on one device.

Several parts can compile at the same time, because compiling needs processor cores and not the
device. A part that measures has the device to itself. Of the parts that wait, the earlier ones have
their turns first. If a part fails or takes too long, the others continue.
"""

import contextlib
import multiprocessing
import os
import pathlib
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple

Turn = Literal["compile", "measure"]
Found = dict[str, Any]
"""Values of a part by name. Without values there is `failed` or `missing`, with the reason."""


class Part(NamedTuple):
    """A module-level function that returns a dict, with its arguments."""

    function: Callable[..., Found]
    arguments: tuple = ()
    seconds: float = 240.0
    """Limit of the part's duration, without the time in which it waits for its turns."""


_PARENT: list[Connection] = []
"""Connection of a part's process to the process that gives turns. Empty in any other process."""


@contextlib.contextmanager
def turn(kind: Turn) -> Iterator[None]:
    """Hold a turn, which starts when no part measures.

    A turn to measure also waits until no part compiles. Both wait for earlier parts that asked
    before. Outside `run_parts` no turn waits.
    """
    for parent in _PARENT:
        parent.send(("asks", kind))
        parent.recv()
    try:
        yield
    finally:
        for parent in _PARENT:
            parent.send(("holds", None))


def run_parts(
    parts: Mapping[str, Part],
    keep: Callable[[str, Found], None],
    *,
    seconds: float,
    at_once: int,
) -> None:
    """Run parts in processes, started in their order, and pass each result to `keep` at once.

    Args:
        parts: The parts by name, the most useful first.
        keep: Function of the name of a part and of its result. If it raises, all parts end.
        seconds: Seconds after which no part continues. A part that did not end has `missing`.
        at_once: Number of parts that have a process at the same time.
    """
    begun = last = time.monotonic()
    waiting = dict(parts)
    running: list[_Process] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    name = next(iter(waiting))
                    path = pathlib.Path(folder, str(len(waiting)))
                    running.append(_Process(name, waiting.pop(name), path))
                for own in running:
                    own.read()
                now = time.monotonic()
                for own in running:
                    own.count(now - max(last, own.begun))
                last = now
                _give_turns(running)
                over = now - begun > seconds
                for own in running:
                    if over and own.found is None:
                        own.found = {"missing": "the time was over"}
                ended = [own for own in running if own.found is not None]
                running = [own for own in running if own.found is None]
                for own in ended:
                    keep(own.name, own.stop())
                for name in waiting if over else ():
                    keep(name, {"missing": "the time was over"})
                if over:
                    waiting = {}
                if running:
                    wait([own.connection for own in running], timeout=0.2)
        finally:
            for own in running:
                own.stop()


class _Process:
    """Process of a part, as the process that gives turns sees it."""

    def __init__(self, name: str, part: Part, output: pathlib.Path) -> None:
        self.name = name
        self.part = part
        self.output = output
        """File of what the process prints."""
        self.asks: Turn | None = None
        """Turn that the process waits for."""
        self.holds: Turn | None = None
        """Turn that the process has."""
        self.found: Found | None = None
        """Result of the part. None as long as there is none."""
        self.used = 0.0
        """Seconds without waiting for turns."""
        self.begun = time.monotonic()
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        arguments = (os.getpid(), other, str(output), part)
        self.process = context.Process(target=_run_part, args=arguments)
        self.process.start()
        # The end of the process then ends the connection.
        other.close()

    def read(self) -> None:
        """Read what the process has sent, and set `found` if it has ended."""
        ended = not self.process.is_alive()
        try:
            while self.connection.poll():
                name, value = self.connection.recv()
                setattr(self, name, value)
        except (EOFError, OSError):
            ended = True
        if ended and self.found is None:
            self.process.join(1.0)
            code = self.process.exitcode
            words = self.output.read_text(errors="replace").strip().splitlines()
            reason = f": {words[-1][-500:]}" if words else ""
            self.found = {"failed": f"the process ended with {code}{reason}"}
        if self.found is not None and not isinstance(self.found, dict):
            self.found = {"failed": f"the part returned {self.found!r}, and no dict"}

    def count(self, seconds: float) -> None:
        """Count seconds against the part's limit, unless the part waits for its turn.

        A part beyond its limit gets a `failed` result.
        """
        if self.asks is None:
            self.used += seconds
        if self.used > self.part.seconds and self.found is None:
            self.found = {"failed": f"the part took more than {self.part.seconds:g} s"}

    def give(self) -> None:
        """Give the process the turn that it asks for."""
        self.holds = self.asks
        self.asks = None
        # If the process has ended, `read` finds out.
        with contextlib.suppress(OSError):
            self.connection.send("go")

    def stop(self) -> Found:
        """End the process and all that it started, and return its result.

        `part_s` is the number of seconds since the part was started.
        """
        assert self.process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join(5.0)
        self.connection.close()
        return (self.found or {}) | {"part_s": round(time.monotonic() - self.begun, 1)}


def _give_turns(running: Sequence[_Process]) -> None:
    """Give turns in the order of the parts, so that no later part overtakes one that waits."""
    for own in running:
        if own.asks is None:
            continue
        held = {other.holds for other in running} - {None}
        if "measure" in held or (own.asks == "measure" and held):
            return
        own.give()


def _run_part(parent: int, connection: Connection, output: str, part: Part) -> None:
    """Run a part in its own process, and send the result.

    Args:
        parent: Number of the process that gives turns. If that process ends, this one ends too.
        connection: Connection to that process.
        output: File of what this process prints.
        part: The part.
    """
    # The group has whatever the part starts, so that all of it can be ended.
    os.setsid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _PARENT.append(connection)
    connection.send(("found", part.function(*part.arguments)))


def _end_with(parent: int) -> None:
    """End this process group when the process that gives turns has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)
