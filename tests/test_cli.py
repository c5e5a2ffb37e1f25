import json
import os
import subprocess
import sys

import pytest

import jaxfl
from jaxfl import cli, privacy


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["jaxfl", *words])
    monkeypatch.setenv("COLUMNS", "80")
    cli.main()
    return capsys.readouterr().out


def test_plan_prints_what_plan_finds(monkeypatch, capsys):
    words = ["plan", "--clients", "2000", "--cohort", "100", "--rounds", "20", "--epsilon", "2"]
    found = privacy.plan(clients=2000, cohort=100, rounds=20, epsilon=2.0)
    told = json.loads(command(monkeypatch, capsys, *words, "--as-json"))
    assert [row["mechanism"] for row in told["mechanisms"]] == [row.kind for row in found]
    assert told["mechanisms"][0]["noise multiplier"] == pytest.approx(found[0].noise_multiplier)
    assert told["delta"] == found[0].delta
    table = command(monkeypatch, capsys, *words)
    assert f"{found[0].noise_multiplier:.4g}" in table
    assert max(map(len, table.splitlines())) <= 80


def test_data_that_are_absent_are_told_how_to_get(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAXFL_DATA_DIR", str(tmp_path))
    listed = command(monkeypatch, capsys, "data")
    assert "in the package" in listed
    assert listed.count("absent") == len(jaxfl.data.NAMES) - 1
    assert max(map(len, listed.splitlines())) <= 80
    with pytest.raises(ValueError, match="download_and_prepare"):
        command(monkeypatch, capsys, "data", "mnist")


def test_long_paths_are_folded_and_not_cut(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    cli._show("Datasets", ("name", "where"), [("mnist", "/folder" * 20)])
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    assert "/folder" * 20 in "".join(told.partition("mnist")[2].split())


def test_the_version(monkeypatch, capsys):
    assert command(monkeypatch, capsys, "--version") == f"jaxfl {jaxfl.__version__}\n"


def test_the_doctor_has_a_figure(monkeypatch, capsys):
    monkeypatch.setattr(cli, "throughput", lambda: 1234.4)
    told = command(monkeypatch, capsys, "doctor")
    assert "1234 clients a second" in told
    assert "cpu" in told
    assert max(map(len, told.splitlines())) <= 80


@pytest.mark.slow
def test_clients_are_counted_after_compilation():
    assert cli.throughput(seconds=0.5) > 1


@pytest.mark.slow
def test_errors_in_the_shell_are_one_line(tmp_path):
    code = "import sys; from jaxfl.cli import main; sys.argv = ['jaxfl', 'data', 'mnist']; main()"
    environment = {**os.environ, "JAXFL_DATA_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: data_dir=")
    assert "Traceback" not in done.stderr
