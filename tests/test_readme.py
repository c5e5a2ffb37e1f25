import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

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
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_example_prints_what_the_readme_says(tmp_path, devices):
    stated = re.search(
        r"prints an accuracy of (\d\.\d+), at an epsilon of (\d+)\.", README.read_text()
    )
    assert stated is not None
    # As a user runs it: this process compiles in other ways (see `conftest.py`).
    ours = {"XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(README.parent)}
    program = tmp_path / "example.py"
    program.write_text(BLOCKS[0])
    command = [sys.executable, str(program)]
    printed = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout
    accuracy = re.search(r"^0\.\d+$", printed, re.MULTILINE)  # a progress bar comes first
    assert accuracy is not None
    assert f"{float(accuracy[0]):.{len(stated[1]) - 2}f}" == stated[1]
    epsilon = json.loads((tmp_path / "runs/example/privacy.json").read_text())["honest"][
        "aggregate"
    ]["epsilon"]
    assert float(stated[2]) - 0.01 < epsilon <= float(stated[2])


@pytest.mark.slow
def test_the_plan_keeps_its_budget(capsys):
    smaller = {
        "clients=10_000": "clients=400",
        "cohort=500": "cohort=20",
        "rounds=100": "rounds=20",
    }
    block = BLOCKS[1]
    for number, small in smaller.items():
        block = block.replace(number, small)
    best = run(block)["best"]
    assert len(BLOCKS) == 2  # each is run here
    assert 1.99 < best.epsilon <= 2.0
    assert best.kind in capsys.readouterr().out


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", README.read_text()))
def test_links_lead_somewhere(link):
    assert (README.parent / link).exists()


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`(jaxfl/[\w/]+\.py)`", README.read_text())))
)
def test_files_exist(path):
    assert (README.parent / path).exists()
