import pathlib
import re

import jax
import numpy as np
import pytest

from jaxfl import simulate
from jaxfl.algorithms import fedavg

KEY = jax.random.key(0)

README = pathlib.Path(__file__).parent.parent / "README.md"

BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(block):
    names = {}
    exec(compile(block, str(README), "exec"), names)
    return names


@pytest.mark.slow
def test_the_example_runs(tmp_path, monkeypatch, capsys):
    assert len([line for line in BLOCKS[0].splitlines() if line]) <= 15
    monkeypatch.chdir(tmp_path)
    run(BLOCKS[0].replace("Poisson(0.2), 30", "Poisson(0.2), 2").replace("200", "20"))
    printed = capsys.readouterr().out
    assert re.search(r"epsilon \d", printed)
    assert (tmp_path / "runs/example/privacy.json").exists()
    assert len((tmp_path / "runs/example/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_plan_keeps_its_budget(capsys):
    smaller = {"clients=10_000": "clients=400", "cohort=500": "cohort=20", "rounds=100": "rounds=20", "100]": "20]"}
    block = BLOCKS[1]
    for number, small in smaller.items():
        block = block.replace(number, small)
    best = run(block)["best"]
    assert 1.99 < best.epsilon <= 2.0
    assert best.kind in capsys.readouterr().out


@pytest.mark.slow
def test_data_task_models_and_method_of_ones_own_run():
    assert len([line for line in BLOCKS[2].splitlines() if line]) < 60
    names = run(BLOCKS[2])
    assert names["result"].metrics[-1]["near"] > 0.45
    result = simulate(KEY, fedavg(names["other"]), names["clients"], rounds=1, progress=False)
    assert np.isfinite(result.metrics[-1]["loss"])
    assert len(BLOCKS) == 3  # each is run here


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", README.read_text()))
def test_links_lead_somewhere(link):
    assert (README.parent / link).exists()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(jaxfl/[\w/]+\.py)`", README.read_text()))))
def test_files_exist(path):
    assert (README.parent / path).exists()
