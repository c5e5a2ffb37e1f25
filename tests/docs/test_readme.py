import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

README = pathlib.Path(__file__).parents[2] / "README.md"

BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120
    (example,) = BLOCKS
    assert len([line for line in example.splitlines() if line]) <= 12


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_example_prints_what_the_readme_says(tmp_path, devices):
    accuracy, epsilon = printed_by(BLOCKS[0], tmp_path, devices)
    stated = re.search(
        r"prints an accuracy of (\d\.\d+), at an epsilon of (\d+)\.", README.read_text()
    )
    assert stated is not None
    assert f"{accuracy:.{len(stated[1]) - 2}f}" == stated[1]
    assert float(stated[2]) - 0.01 < epsilon <= float(stated[2])
    statement = json.loads((tmp_path / "runs/first/privacy.json").read_text())
    assert statement["honest"]["aggregate"]["epsilon"] == epsilon
    assert len((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()) == 10


@pytest.mark.slow
def test_the_example_without_the_correction_is_as_the_readme_says(tmp_path):
    plain = BLOCKS[0].replace("algorithms.prior_corrected(shared)", "shared")
    assert plain != BLOCKS[0]
    accuracy, _ = printed_by(plain, tmp_path, 2)
    stated = re.search(r"accuracy is (\d\.\d+) without `prior_corrected`", README.read_text())
    assert stated is not None
    assert f"{accuracy:.2f}" == stated[1]


def printed_by(block, folder, devices):
    """Run a program as a user does, and return the accuracy and the epsilon that it prints."""
    # This process compiles in other ways (see `conftest.py`).
    ours = {"XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(README.parent)}
    program = folder / "example.py"
    program.write_text(block)
    command = [sys.executable, str(program)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    numbers = re.search(r"^(0\.\d+) (\d+\.\d+)$", done.stdout, re.MULTILINE)
    assert numbers is not None
    return float(numbers[1]), float(numbers[2])


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`(jaxfl/[\w/]+\.py)`", README.read_text())))
)
def test_files_exist(path):
    assert (README.parent / path).exists()
