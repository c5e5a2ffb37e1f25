import signal
import sys
import threading

import pytest

from jaxfl.run import signals

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers():
    """Check that each test restores the signal handlers."""
    before = [signal.signal(number, lambda *_: None) for number in BOTH]
    ours = [signal.getsignal(number) for number in BOTH]
    yield
    found = [signal.getsignal(number) for number in BOTH]
    for number, old in zip(BOTH, before, strict=True):
        signal.signal(number, old)
    assert found == ours


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_is_told_and_the_second_acts_at_once(number):
    with signals.deferred() as asked:
        assert asked() == 0
        signal.raise_signal(number)
        assert asked() == number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


@pytest.mark.parametrize(("first", "other"), [BOTH, BOTH[::-1]])
def test_the_other_signal_is_a_second_request_only_after_a_second(first, other, monkeypatch):
    """Slurm sends SIGTERM to a launcher and to its processes, and the launcher sends them SIGINT."""
    now = 7.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    with signals.deferred() as asked:
        signal.raise_signal(first)
        now += 0.9
        signal.raise_signal(other)
        assert asked() == first
        now += 0.2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(other)


def test_a_second_signal_anywhere_in_the_handler_or_at_the_end_neither_hangs_nor_is_lost():
    """Sent again at each instruction that Python runs on the first one's behalf, in one run after the other."""
    # Python 3.12 traces instructions only if a frame has asked before `settrace`.
    sys._getframe().f_trace_opcodes = True
    step, reached = 0, True
    while reached:
        left, reached = step, False

        def trace(frame, event, argument):
            nonlocal left, reached
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left == -1:
                    reached = True
                    signal.raise_signal(signal.SIGINT)
            return trace

        outcome = None
        try:
            with signals.deferred() as asked:
                sys.settrace(trace)
                signal.raise_signal(signal.SIGINT)
                outcome = asked()
        except KeyboardInterrupt:
            outcome = "interrupted"
        finally:
            sys.settrace(None)
        assert outcome in ("interrupted", signal.SIGINT)
        step += 1
    assert step > 50


def test_a_signal_that_nobody_acted_on_is_sent_again():
    with signals.deferred() as outer:
        with signals.deferred() as inner:
            signal.raise_signal(signal.SIGTERM)
            assert (inner(), outer()) == (signal.SIGTERM, 0)
        assert outer() == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt), signals.deferred():
            signal.raise_signal(signal.SIGTERM)


def test_an_error_within_puts_handlers_back():
    with pytest.raises(ZeroDivisionError), signals.deferred() as asked:
        _ = 1 / asked()


def test_other_threads_are_left_alone():
    found = []

    def work():
        with signals.deferred() as asked:
            found.append((asked(), signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(0, before)]


def test_exit_codes_are_those_of_shells():
    assert [signals.exit_code(signals.stopped(number, "")) for number in (*BOTH, 0)] == [
        130,
        143,
        130,
    ]
    assert signals.exit_code(KeyboardInterrupt()) == 130
    assert str(signals.stopped(signal.SIGTERM, "stopped after round 3")) == "stopped after round 3"
