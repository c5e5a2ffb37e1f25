"""Ctrl-C and SIGTERM: the first one asks a run to save and stop, the next one acts at once."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals whose handlers are replaced during a run."""

_NOTE = b"\nstopping after the rounds under way; Ctrl-C again stops at once\n"
"""Text that the first Ctrl-C shows on a terminal, because rounds may take seconds."""

_ONE_EVENT_SECONDS = 1.0
"""Seconds within which a SIGINT and a SIGTERM count as one signal."""


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], int]]:
    """Record the first signal, and yield a function that returns its number.

    Signals are SIGINT and SIGTERM. The function returns 0 before the first one. A second one
    restores the earlier handlers and raises a KeyboardInterrupt. It has no effect if it is of the
    other kind and follows the first one within a second. Handlers are also restored at the end of
    the block. If the block ends without an error, a recorded signal is sent again. Python handles
    signals in its main thread, so nothing is recorded in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    asked = 0
    since = 0.0
    previous = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, old in previous.items():
            # None stands for a handler that was set outside of Python, which cannot set it again.
            signal.signal(number, signal.SIG_DFL if old is None else old)

    def handler(number: int, frame: FrameType | None) -> None:
        # Another signal may come between any two lines, and a lock would then wait for itself.
        nonlocal asked, since
        if not asked:
            since = time.monotonic()
            asked = number
            if number == signal.SIGINT and sys.stderr.isatty():
                # A handler must not wait for the lock of a buffered stream.
                os.write(sys.stderr.fileno(), _NOTE)
        # A cluster may send SIGTERM to the launcher and to this process. The launcher then sends
        # SIGINT, which is no second request.
        elif number == asked or time.monotonic() - since > _ONE_EVENT_SECONDS:
            restore()
            raise KeyboardInterrupt

    try:
        for number in _SIGNALS:
            signal.signal(number, handler)
        yield lambda: asked
    finally:
        restore()
    # The restored handlers now do what they would have done without a run.
    if asked:
        signal.raise_signal(asked)


def stopped(number: int, text: str) -> KeyboardInterrupt:
    """Return the error that ends a run, and from which `exit_code` gets the signal.

    Args:
        number: Number of the signal. 0 stands for SIGINT.
        text: Message of the error.
    """
    error = KeyboardInterrupt(text)
    error.signal = number or signal.SIGINT  # pyrefly: ignore[missing-attribute]
    return error


def exit_code(error: KeyboardInterrupt) -> int:
    """Return 128 plus the signal, the exit code that shells use."""
    return 128 + getattr(error, "signal", signal.SIGINT)
