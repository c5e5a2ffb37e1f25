"""Ctrl-C and SIGTERM: the first one asks a run to save and stop, the next one acts at once."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], int]]:
    """Turn the first signal into a number that the function returns (0: none yet); each further one interrupts.

    Handlers are restored at the end; a signal that is still pending then is sent again. Python handles signals
    in its main thread: elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    asked, previous = 0, {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, old in previous.items():
            signal.signal(
                number, signal.SIG_DFL if old is None else old
            )  # None: a handler that Python cannot set

    def handler(number: int, frame: FrameType | None) -> None:
        # Another signal may come between any two lines: a plain variable, since a lock would wait for itself.
        nonlocal asked
        if asked:
            restore()
            raise KeyboardInterrupt
        asked = number

    try:
        for number in _SIGNALS:
            signal.signal(number, handler)
        yield lambda: asked
    finally:
        restore()
    if asked:
        signal.raise_signal(asked)


def stopped(number: int, text: str) -> KeyboardInterrupt:
    """The error that ends a run; the process exits with the code of the signal (see `exit_code`)."""
    error = KeyboardInterrupt(text)
    error.signal = number or signal.SIGINT  # pyrefly: ignore[missing-attribute]
    return error


def exit_code(error: KeyboardInterrupt) -> int:
    """128 plus the signal, as in shells."""
    return 128 + getattr(error, "signal", signal.SIGINT)
