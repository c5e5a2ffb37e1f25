"""The progress of a run: a bar in two lines of 80 columns, and one bar for many runs."""

import io

import pytest
from algorithms_table import ALGORITHMS, small_clients
from rich.console import Console

from jaxfl import simulate
from jaxfl.run import bars as run_bars


@pytest.fixture
def bars(monkeypatch):
    """Return the list of all bars that are made."""
    made = []

    class Kept(run_bars._Bar):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(run_bars, "_Bar", Kept)
    return made


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(run_bars.time, "monotonic", lambda: now[0])
    return now


def lines(bar, width=80):
    """Return the lines that a terminal with `width` columns shows of a bar."""
    shown = io.StringIO()
    Console(width=width, file=shown).print(bar.get_renderable())
    return shown.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    "name", ["m", "dp_pfeddsu_paper, 16 points", "a method with a very long name " * 3]
)
@pytest.mark.parametrize(
    "figures",
    ["", "accuracy 0.5", "a metric with a long name 0.123 to 0.456, epsilon 12.3 (RDP), " * 2],
)
def test_a_bar_is_two_lines_and_cuts_no_number(name, figures, width, bars):
    with run_bars.progress_bar(name, 10_000, show=False) as told:
        told(0, "measuring the chunk")
        told(1234, "running", figures)
        first, second = lines(bars[0], width)
        assert max(len(first), len(second)) <= width
        assert "1234/10000" in first
        assert "running" in first
        assert first.startswith(name[:10].strip())
        assert second.strip()[:15] == figures[:15]


def test_a_bar_says_what_it_is_at(bars, clock):
    with run_bars.progress_bar("m", 200, False, 100) as told:
        (bar,) = bars
        told(100, "compiling")
        assert "100/200 compiling, from round 100 -:--:--" in lines(bar)[0]
        clock[0] += 60.0  # compiling is no measure of a round
        told(100, "running")
        clock[0] += 10.0
        told(110, "running", "accuracy 0.5")
        assert "110/200 running 0:01:30" in lines(bar)[0]
        told(120, "running")
        assert lines(bar)[1].strip() == "accuracy 0.5"  # until there is news
        told(200, "running")
    assert "200/200 finished" in lines(bar)[0]


def test_many_runs_share_a_bar_and_what_was_read_took_no_time(bars, clock):
    with run_bars.shared_bar("compare", 400.0, show=False) as whole:
        with whole.part("A: tuning", 100.0), run_bars.progress_bar("a", 10, True, 10):
            clock[0] += 3.0
        assert "25%" in lines(bars[0])[0]
        with whole.part("B: seed=0", 200.0), run_bars.progress_bar("b", 10, True, 5) as told:
            clock[0] += 20.0
            told(10, "running", "accuracy 0.5")
            first, second = lines(bars[0])
            assert "75%" in first
            assert "B: seed=0" in first
            assert first.endswith(
                "0:00:23"
            )  # 100 clients took 23 seconds with what was between, and 100 are left
            assert second.strip() == "running: accuracy 0.5"
        whole.skip(50.0)
        with whole.part("C", 50.0), run_bars.progress_bar("c", 2, True) as told:
            told(2, "running")
            assert "100%" in lines(bars[0])[0]
    assert len(bars) == 1
    with run_bars.progress_bar("alone", 2, show=False):
        assert len(bars) == 2


def test_a_run_moves_the_bar_of_the_whole_and_counts_clients(bars, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    clients, options = small_clients(), {"rounds": 3, "eval_every": 1}
    with run_bars.shared_bar("compare", 30.0, show=False) as whole, whole.part("local", 30.0):
        simulate(0, ALGORITHMS["local_only"](), clients, progress=False, **options)
        assert bars[0].done == 30.0
        assert "clients/s, chunk 1" in bars[0].figures
    assert not capsys.readouterr().out
    simulate(0, ALGORITHMS["local_only"](), clients, progress=True, **options)
    told = capsys.readouterr().out.splitlines()
    assert "3/3 finished" in told[0]
    assert "accuracy" in told[1]
    assert "clients/s" in told[1]
    assert max(map(len, told)) <= 80


def test_what_is_told_is_wrapped_between_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    path = "/a/folder/" + "x" * 90
    run_bars.tell(
        f"feddpa: round 3 of 3 read from {path}; nothing is computed, and this text goes on",
        shown=True,
    )
    told = capsys.readouterr().out.splitlines()
    assert f"{path};" in told
    assert all(len(line) <= 80 for line in told if path not in line)
