import json
import math
import signal
import types
from typing import Any

import numpy as np
import pytest

from experiments import common, quickstart
from experiments.adp_pfl import __main__ as adp_pfl
from experiments.adp_pfl.setting import Bench
from experiments.audit import table as audits
from experiments.mechanisms import compare as mechanisms
from experiments.methods import compare
from experiments.study import Options
from jaxfl.data import load
from jaxfl.models import mlp
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


def test_the_readme_of_the_methods_has_the_numbers_of_its_results():
    results = sorted(path.stem for path in (compare.HERE / "results").glob("*.json"))
    assert results == sorted(compare.SETTINGS)
    assert (compare.HERE / "README.md").read_text() == compare.render()


def test_the_readme_of_the_audits_has_the_numbers_of_its_results():
    assert (audits.HERE / "README.md").read_text() == audits.render()
    honest = json.loads((audits.HERE / "results" / "honest.json").read_text())["methods"]
    published = json.loads((audits.HERE / "results" / "published.json").read_text())
    assert audits.table(published) in (audits.HERE.parent.parent / "README.md").read_text()
    assert sum(len(row["at_least"]) for row in honest.values()) == 320
    for row in honest.values():
        beyond = sum(bound > row["stated"] for bound in row["at_least"])
        assert beyond <= 1 + 0.05 * len(row["at_least"])


def test_the_readme_of_the_mechanisms_has_the_numbers_of_its_results():
    assert (mechanisms.HERE / "README.md").read_text() == mechanisms.render()


@pytest.mark.parametrize("task", mechanisms.SETTINGS)
def test_mechanisms_are_tuned_with_equal_budgets_at_equal_epsilon(task):
    result = json.loads((mechanisms.HERE / "results" / f"{task}.json").read_text())
    setting = result["setting"]
    for epsilon in mechanisms.EPSILONS:
        rows = [result["rows"][f"{name}, ε {epsilon:g}"] for name in mechanisms.PAIRS[task]]
        assert len({len(row["validation"]) for row in rows}) == 1
        for row in rows:
            assert len(row["seeds"]) == len(row["accuracy"]) == 3
            assert 0.98 * epsilon < row["epsilon"] <= epsilon
            if row["bands"] == 1:
                error = row["noise_multiplier"] / setting["cohort"] * math.sqrt((setting["rounds"] + 1) / 2)
                assert row["error"] == pytest.approx(error)


@pytest.mark.parametrize("task", compare.SETTINGS)
def test_methods_are_tuned_with_equal_budgets(task):
    setting = compare.SETTINGS[task]
    methods = compare.METHODS[task](mlp((8, 8, 1), 10, hidden=setting.hidden), setting)
    assert {len(column) for method in methods.values() for column in method.points.values()} == {6}


def test_validation_and_test_examples_are_never_trained_on():
    setting = compare.SETTINGS["shared"]._replace(clients=10, examples=20, validation=5, test=20)
    digits = load("digits")
    held_out, tested = (compare.clients_of(digits, "shared", setting, 0, held_out=held) for held in (True, False))
    np.testing.assert_array_equal(*(np.asarray(c.inputs)[c.train] for c in (held_out, tested)))
    train, test = (np.asarray(held_out.inputs)[rows].reshape(-1, 64) for rows in (held_out.train, held_out.test))
    assert held_out.test_size.tolist() == [5] * 10
    assert not {row.tobytes() for row in train} & {row.tobytes() for row in test}


def test_adp_pfl_compares_schedules_of_one_total_and_holds_validation_examples_out():
    bench = Bench("mnist", Options(scale="smoke", seeds=(0,)))
    noise = {name: bench.published(name)(2.0).mechanism.client_noise for name in adp_pfl.SCHEDULES}
    rule, m = math.sqrt(2 * math.log(1.25e5)), bench.setting.cohort
    for of_rounds in noise.values():
        assert (rule / (m * of_rounds)).mean() == pytest.approx(2.0)
    assert np.ptp(noise["fixed"]) == 0 < np.ptp(noise["round-level"])
    assert adp_pfl.thinner(80.0) == pytest.approx(math.sqrt(0.2))
    held_out, tested = bench.held_out(3), bench.clients(3)
    for trained, own, size, all_of in zip(held_out.train, held_out.test, held_out.test_size, tested.train, strict=True):
        assert {*own[:size]} <= {*all_of} - {*trained}
