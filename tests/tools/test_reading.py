"""The counter of places that are hard to read."""

import importlib.util
import json
import pathlib
import sys
import textwrap

import pytest

PATH = pathlib.Path(__file__).parents[2] / "tools" / "reading.py"


@pytest.fixture
def reading(monkeypatch, tmp_path):
    """Return the module, for a project in an empty folder."""
    spec = importlib.util.spec_from_file_location("reading", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "reading", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "KEPT", tmp_path / "kept.json")
    return module


def counts(reading, folder, **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return reading.counted(reading.modules_of(folder))


GOOD = '''
    """Sums of two numbers."""

    def add(a, b):
        """Return the sum of two numbers.

        Raises:
            ValueError: a is negative.
        """
        # Negative numbers are debts, which nobody adds.
        if a < 0:
            raise ValueError(f"a must be at least 0, got {a}. Give another number.")
        return a + b
'''


def test_a_plain_module_has_nothing_to_mend(reading, tmp_path):
    figures, places = counts(reading, tmp_path, good=GOOD)
    assert not places
    assert figures["comments per 1,000 lines"] == round(1000 / 13, 1)
    assert figures["names in several modules"] == 0


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("a, b = 1, 2", "packed assignments"),
        (f"a = {'1' * 100}", "lines over 100 columns"),
        (
            'def f():\n    """Of the numbers that are there."""',
            "docstrings that open with a preposition",
        ),
        (
            'def f():\n    """The number of all clients."""',
            "docstrings of functions without a verb first",
        ),
        ('def f():\n    """Return it."""', "docstrings of fewer than four words"),
        ('def f():\n    """Return what was told to it."""', "avoided words in docstrings"),
        ('raise ValueError(f"x={1}: give a smaller number, please")', "errors of another form"),
        ("x = 1 if y else 2", "conditional expressions per 1,000 lines"),
    ],
)
def test_each_rule_counts_what_breaks_it(reading, tmp_path, line, name):
    before, _ = counts(reading, tmp_path, good=GOOD)
    after, _ = counts(reading, tmp_path, good=GOOD, bad=line)
    assert after[name] > before[name]


def test_a_property_and_a_class_need_no_verb(reading, tmp_path):
    text = '''
        class Clients:
            """The clients of one run."""

            @property
            def count(self):
                """The number of all clients."""
    '''
    figures, _ = counts(reading, tmp_path, bad=text)
    assert figures["docstrings of functions without a verb first"] == 0


def test_no_count_may_get_worse(reading, tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "good.py").write_text(textwrap.dedent(GOOD))
    monkeypatch.setattr("sys.argv", ["reading", "code", "--update"])
    reading.main()
    kept = json.loads((tmp_path / "kept.json").read_text())
    monkeypatch.setattr("sys.argv", ["reading", "code", "--check"])
    with pytest.raises(SystemExit) as ended:
        reading.main()
    assert ended.value.code is None
    (tmp_path / "code" / "bad.py").write_text("a, b = 1, 2\n")
    with pytest.raises(SystemExit, match="packed assignments: 1, and 0 before"):
        reading.main()
    better = {name: value + 1 for name, value in kept.items()}
    assert reading.worse(better, kept) == [
        f"comments per 1,000 lines: {kept['comments per 1,000 lines']:g}, and "
        f"{better['comments per 1,000 lines']:g} before. Mend the lines of this change."
    ]
