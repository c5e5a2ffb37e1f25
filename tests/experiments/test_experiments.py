import json
import math
import signal
import sys
import types
from typing import Any

import numpy as np
import pytest

from experiments import common, render, study
from experiments.adp_pfl import __main__ as adp_pfl
from experiments.adp_pfl.setting import Bench
from experiments.mechanisms import __main__ as mechanisms
from experiments.methods import __main__ as methods
from experiments.study import Options
from jaxfl.cli.main import in_one_line
from jaxfl.data import load
from jaxfl.models import mlp
from jaxfl.run import signals


def result_of(package, name):
    return json.loads((study.HERE / package / "results" / f"{name}.json").read_text())


@pytest.mark.parametrize("seeds", [(0, 0), (3, 1, 3), (), (-1,), (0.5,)])
def test_seeds_that_repeat_or_are_none_are_refused(seeds):
    with pytest.raises(ValueError, match=r"seeds must be .* Give"):
        Options(seeds=seeds)


@pytest.mark.parametrize(
    ("stop", "code", "line"),
    [
        (
            signals.stopped(signal.SIGTERM, "stopped after round 3 of 9"),
            143,
            "stopped after round 3 of 9",
        ),
        (
            signals.stopped(signal.SIGINT, "stopped after round 3 of 9"),
            130,
            "stopped after round 3 of 9",
        ),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_a_stop_is_one_line_and_its_exit_code(stop, code, line, capsys):
    with pytest.raises(SystemExit) as end:
        in_one_line(type(stop), stop, None)
    assert end.value.code == code
    assert capsys.readouterr().err.strip() == line


def test_an_accuracy_that_is_not_known_is_a_dash():
    assert common.percent([math.nan, 0.5]) == "–"
    assert common.percent([0.5, 0.7]) == "60.0 ± 14.1"


TOY = {
    "one": study.Study(
        lambda options: {"seen": list(options.seeds)}, lambda result: f"seen: {result['seen']}"
    )
}


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """Make a package with one study, its result, and a README with a place for it."""
    monkeypatch.setattr(study, "HERE", tmp_path)
    (tmp_path / "toy/results").mkdir(parents=True)
    (tmp_path / "toy/results/one.json").write_text('{"seen": [7]}')
    (tmp_path / "toy/README.md").write_text("Before\n<!-- one --><!-- /one -->\nafter\n")
    return tmp_path / "toy"


def test_a_readme_is_made_of_results(toy):
    study.render("toy", TOY)
    assert (
        toy / "README.md"
    ).read_text() == "Before\n<!-- one -->\nseen: [7]\n<!-- /one -->\nafter\n"
    assert study.render("toy", TOY, check=True) == []


@pytest.mark.parametrize("text", ["Before\nafter\n", "<!-- one --><!-- /one -->" * 2])
def test_a_result_has_one_place(toy, text):
    (toy / "README.md").write_text(text)
    with pytest.raises(
        ValueError,
        match=r"must have one place for 'one', got [02]\. Write <!-- one --><!-- /one --> once",
    ):
        study.render("toy", TOY)


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_place_has_a_result(toy, name):
    (toy / "README.md").write_text(f"<!-- {name} -->99.9<!-- /{name} -->")
    (toy / "results/one.json").unlink()
    with pytest.raises(
        ValueError, match=f"got none for '{name}'\\. Run `python -m experiments.toy {name}`"
    ):
        study.render("toy", TOY)


@pytest.mark.parametrize(
    ("file", "old", "new"), [("results/one.json", "7", "8"), ("README.md", "7", "8")]
)
def test_a_stale_readme_is_found_and_left_alone(toy, file, old, new, monkeypatch, capsys):
    study.render("toy", TOY)
    (toy / file).write_text((toy / file).read_text().replace(old, new))
    before = (toy / "README.md").read_text()
    monkeypatch.setattr(render, "all_studies", lambda: {"toy": TOY})
    with pytest.raises(SystemExit, match="not up to date"):
        render.main(render.Config(check=True))
    assert capsys.readouterr().out == f"{toy / 'README.md'}\n"
    assert (toy / "README.md").read_text() == before


@pytest.mark.parametrize("scale", ["smoke", "paper"])
def test_a_command_writes_its_result_unless_it_only_smokes(toy, scale, monkeypatch, capsys):
    monkeypatch.setattr(study, "compile_quickly", lambda: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "argv", ["toy", "one", "--scale", scale, "--seeds", "3", "4"])
    before = {path: path.read_bytes() for path in toy.rglob("*.*")}
    study.command("toy", None, TOY)
    after = {path: path.read_bytes() for path in toy.rglob("*.*")}
    if scale == "smoke":
        assert after == before
        assert "seen: [3]" in capsys.readouterr().out
    else:
        result = json.loads((toy / "results/one.json").read_text())
        assert (result["study"], result["seen"], result["seeds"]) == ("one", [3, 4], [3, 4])
        assert {*result} == {"study", "seen", "seeds", "versions", "date", "seconds"}
        assert "seen: [3, 4]" in (toy / "README.md").read_text()


def test_all_readmes_have_the_numbers_of_their_results(capsys):
    packages = study.all_studies()
    assert {"audit", "lora", "map", "mechanisms", "methods", "text"} <= {*packages}
    render.main(render.Config(check=True))
    for package, studies in packages.items():
        results = {path.stem for path in (study.HERE / package / "results").glob("*.json")}
        assert results <= {*studies}, f"results of no study in {package}"


def test_the_best_point_has_the_best_round_and_no_nan():
    curves = [[0.1, 0.4, 0.3], [0.2, math.nan, 0.35]]
    results: Any = [
        types.SimpleNamespace(
            metrics=[{"round": 10 * r, "accuracy": value} for r, value in enumerate(curve, 1)]
        )
        for curve in curves
    ]
    points = {"rate": [1.0, 2.0], "clip": [3.0, 4.0]}
    best = common.choose(points, results)
    assert (best.chosen, best.rounds, best.result) == ({"rate": 1.0, "clip": 3.0}, 20, results[0])
    np.testing.assert_array_equal(best.validation, [0.4, math.nan])
    best = common.choose(points, results, lambda rows: [rows[-1]["accuracy"]])
    assert (best.chosen, best.rounds, best.validation) == (
        {"rate": 2.0, "clip": 4.0},
        30,
        [0.3, 0.35],
    )


@pytest.mark.parametrize("scale", ["smoke", "paper"])
def test_a_part_is_made_once_for_its_facts(scale, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "HERE", tmp_path / "kept")
    options, made = Options(scale=scale, out=tmp_path / "runs"), []

    def part(rate):
        return study.part(
            "some",
            "table",
            "row",
            {"rate": rate},
            lambda: made.append(rate) or {"score": rate},
            options,
        )

    assert [part(rate)["score"] for rate in (0.1, 0.1 + 1e-9, 0.2)] == [0.1, 0.1, 0.2]
    assert made == [0.1, 0.2]
    (path,) = tmp_path.rglob("*.json")
    assert path.parent == tmp_path / (
        "runs/table" if scale == "smoke" else "kept/some/results/table"
    )
    kept = json.loads(path.read_text())
    assert kept["date"]
    assert kept["versions"].keys() == {*study.PACKAGES}


def test_few_honest_statements_are_refuted():
    rows = result_of("audit", "honest")["methods"]
    assert sum(len(row["at_least"]) for row in rows.values()) == 320
    for row in rows.values():
        beyond = sum(bound > row["stated"] for bound in row["at_least"])
        assert beyond <= 1 + 0.05 * len(row["at_least"])


@pytest.mark.parametrize("task", mechanisms.SETTINGS)
def test_mechanisms_are_tuned_with_equal_budgets_at_equal_epsilon(task):
    result = result_of("mechanisms", task)
    setting = result["setting"]
    for epsilon in mechanisms.EPSILONS:
        rows = [result["rows"][f"{name}, ε {epsilon:g}"] for name in mechanisms.PAIRS[task]]
        assert len({len(row["validation"]) for row in rows}) == 1
        for row in rows:
            assert len(row["seeds"]) == len(row["accuracy"]) == 3
            assert 0.98 * epsilon < row["epsilon"] <= epsilon
            if row["bands"] == 1:
                error = (
                    row["noise_multiplier"]
                    / setting["cohort"]
                    * math.sqrt((setting["rounds"] + 1) / 2)
                )
                assert row["error"] == pytest.approx(error)


@pytest.mark.parametrize("task", methods.SETTINGS)
def test_methods_are_tuned_with_equal_budgets(task):
    setting = methods.SETTINGS[task]
    candidates = methods.METHODS[task](mlp((8, 8, 1), 10, hidden=setting.hidden), setting)
    assert {len(column) for method in candidates.values() for column in method.points.values()} == {
        6
    }


def test_validation_and_test_examples_are_never_trained_on():
    setting = methods.SETTINGS["shared"]._replace(clients=10, examples=20, validation=5, test=20)
    digits = load("digits")
    held_out, tested = (
        methods.clients_of(digits, "shared", setting, 0, held_out=held) for held in (True, False)
    )
    np.testing.assert_array_equal(*(np.asarray(c.inputs)[c.train.flat] for c in (held_out, tested)))
    train, test = (
        np.asarray(held_out.inputs)[rows.flat].reshape(-1, 64)
        for rows in (held_out.train, held_out.test)
    )
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
    for trained, own, size, all_of in zip(
        held_out.train, held_out.test, held_out.test_size, tested.train, strict=True
    ):
        assert {*own[:size]} <= {*all_of} - {*trained}


def adp_rows(fixed, round_level, dropped=0.0):
    cells = {"fixed": fixed, "round-level": round_level, adp_pfl.DEAF: (0.5, 0.5, 0.5)}
    rows = [
        {"method": name, "epsilon": epsilon, "local": [score], "global": [0.1], "dropped": dropped}
        for name, scores in cells.items()
        for epsilon, score in zip(adp_pfl.EPSILONS, scores, strict=True)
    ]
    floors: dict[str, dict] = {name: {"local": [0.5]} for name in adp_pfl.FLOORS}
    floors["alone"] |= {"learning_rate": 0.1, "passes": 5, "validation": {"5": 0.5}}
    setting = {
        "data": "mnist",
        "clients": 2,
        "examples": 100,
        "cohort": 1,
        "rounds": 1,
        "epochs": 5,
        "batch_size": 40,
    }
    return {
        "rows": rows,
        "floors": floors,
        "setting": setting,
        "seeds": [0],
        "date": "",
        "versions": {},
    }


@pytest.mark.parametrize(
    ("fixed", "round_level", "verdict"),
    [
        ((0.52, 0.93, 0.98), (0.55, 0.95, 0.99), "the table is reproduced within 4.1 points (within 4.1 points; "),
        ((0.30, 0.50, 0.70), (0.40, 0.60, 0.80), "the ordering is reproduced (within 42.2 points; 15 of 15 orderings)"),
        (
            (0.52, 0.93, 0.98), (0.55, 0.55, 0.98),
            "the table is not reproduced (within 38.4 points; 12 of 15 orderings), because of round-level at ε 6: "
            "its global model ends at 10.0. The other schedule is within 4.1",
        ),
    ],
)  # fmt: skip
def test_adp_pfls_table_names_why_it_is_not_the_papers(fixed, round_level, verdict):
    assert f"Verdict: {verdict}" in adp_pfl.table_2_markdown(adp_rows(fixed, round_level))
    told = adp_pfl.table_2_markdown(adp_rows(fixed, round_level, dropped=0.2))
    assert ("at ε 6: it diverges, 20% of its updates are not finite" in told) == (
        "global model" in verdict
    )


def test_a_claim_that_does_not_hold_has_a_reason():
    assert (
        adp_pfl.verdict({"a above b": True}, "of c")
        == "Verdict: the ordering is reproduced (a above b: yes)."
    )
    claims = {"a above b": True, "b above c": False}
    assert (
        adp_pfl.verdict(claims, "of c")
        == "Verdict: the ordering is not reproduced, because of c (a above b: yes; b above c: no)."
    )
