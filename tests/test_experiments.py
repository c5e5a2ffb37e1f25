import math
import signal
import types
from typing import Any

import pytest

from experiments import common, quickstart
from jaxfl.run import signals


@pytest.mark.parametrize("seeds", [(0, 0), (3, 1, 3), (), (-1,), (0.5,)])
def test_seeds_that_repeat_or_are_none_are_refused(seeds):
    with pytest.raises(ValueError, match=r"seeds=.*give"):
        quickstart.Config(seeds=seeds)


@pytest.mark.parametrize(
    ("stop", "code", "line"),
    [
        (signals.stopped(signal.SIGTERM, "stopped after round 3 of 9"), 143, "stopped after round 3 of 9"),
        (signals.stopped(signal.SIGINT, "stopped after round 3 of 9"), 130, "stopped after round 3 of 9"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_a_stop_is_one_line_and_its_exit_code(stop, code, line, capsys):
    @common.stoppable()
    def command():
        raise stop

    with pytest.raises(SystemExit) as end:
        command()
    assert end.value.code == code
    assert capsys.readouterr().err.strip() == line


def test_a_table_without_tests_has_dashes(tmp_path):
    names = ("accuracy", "accuracy_worst10", "accuracy_examples", "accuracy_std", "loss")
    metrics = [{"round": r} | dict.fromkeys(names, math.nan) for r in (1, 2)]
    bound = {"rdp": {"total": 1.0}, "pld": {"total": 1.0}}
    statement = {"honest": {"aggregate": bound, "upload": bound}, "claim": None, "examples": None}
    result: Any = types.SimpleNamespace(metrics=metrics, statement=statement)
    row = common.row_of("untested", [result, result])
    common.show("nothing to test", [row], tmp_path)
    assert "| untested | – | – | – | 1 / 1 | 1 | – |" in (tmp_path / "table.md").read_text()
