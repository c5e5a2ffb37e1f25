import pathlib
import re

import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"


def test_the_example_runs(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"<!-- tested by .*? -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    code = blocks[0]
    assert len([line for line in code.splitlines() if line]) <= 15
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace("rounds = Poisson(0.2), 30", "rounds = Poisson(0.2), 2"), str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert re.search(r"epsilon \d", printed)
    assert (tmp_path / "runs/example/privacy.json").exists()


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)]+)\)", README.read_text()))
def test_links_lead_somewhere(link):
    assert (README.parent / link).exists()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(jaxfl/[\w/]+\.py)`", README.read_text()))))
def test_files_exist(path):
    assert (README.parent / path).exists()
