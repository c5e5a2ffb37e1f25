import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

import jaxfl
from jaxfl import cli, privacy, settings
from jaxfl.engine.ahead import Footprint
from jaxfl.models import mlp
from jaxfl.privacy import Full, Poisson


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


def test_plan_for_a_chip_prints_its_footprint(monkeypatch, capsys, tmp_path):
    seen = {}

    def footprint(chip, algorithm, clients, *, chunk, trips):
        seen.update(chip=chip, method=algorithm.name, clients=clients.number, chunk=chunk, trips=trips)
        return Footprint(chip, chunk, 12.5, 9, 2e6, 3e6, 4e6, 5e9, 1000, math.nan)

    monkeypatch.setattr(cli, "footprint", footprint)
    config = tmp_path / "run.yaml"
    config.write_text("method: fedavg\npopulation: {clients: 20, partition: iid}\nlocal: {batch_size: 8, epochs: 3}\n")
    words = ["plan", "--device", "h100", "--chunk", "64", "--config", str(config)]
    told = command(monkeypatch, capsys, *words)
    # 72 of the digits each: 9 batches of 8 in one block, 3 times.
    assert seen == {"chip": "h100", "method": "fedavg", "clients": 20, "chunk": 64, "trips": (9, 1, 3)}
    assert max(map(len, told.splitlines())) <= 80
    found = json.loads(command(monkeypatch, capsys, *words, "--as-json"))
    assert found["MB moved, per client"] == 2
    assert found["us as its compiler expects"] is None
    with pytest.raises(ValueError, match="cohort=None: give --cohort, or the --device"):
        command(monkeypatch, capsys, "plan", "--clients", "20")


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


SMALL: dict[str, Any] = {"population": settings.Population(clients=12), "model": "mlp", "rounds": 2, "rate": 0.5}


@pytest.mark.parametrize("name", settings.METHODS)
def test_every_method_follows_its_settings(name):
    model = mlp((8, 8, 1), 10, hidden=(4,))
    method = settings.Run(method=name, clip=0.7, **SMALL).build(model)
    assert method.mechanism.sampling == (Full() if name == "local_only" else Poisson(0.5))
    if settings.private(name):
        noisy = settings.Run(method=name, epsilon=5.0, clip=0.7, **SMALL).build(model).mechanism
        assert (noisy.clip, method.mechanism.noise_multiplier) == (0.7, 0.0)
        assert noisy.noise_multiplier == privacy.calibrate(5.0, clients=12, rounds=2, sampling=Poisson(0.5))
        assert settings.private(name) == settings.Compare(methods=(name,), **SMALL).candidates(model)[name].private


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("method: [", "config=.*give a YAML file"),
        ("3", "has 3: give some of population, model"),
        ("metod: fedavg", "has 'metod': give some of"),
        ("population: {client: 3}", "population, has 'client': give some of data, clients"),
        ("method: fedavgg", "method='fedavgg': choose one of"),
        ("{method: fedavg, epsilon: 3}", "epsilon=3: fedavg has no noise"),
        ("{method: ditto, options: {mu: 3}}", "options='mu': ditto has no such number; it has penalty_weight"),
    ],
)
def test_settings_that_do_not_fit_are_told(text, named, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        settings.read(settings.Run, path).build(mlp((8, 8, 1), 10, hidden=(4,)))


@pytest.mark.parametrize("joined", [False, True])
def test_a_run_takes_a_file_and_options(monkeypatch, capsys, tmp_path, joined):
    path = tmp_path / "run.yaml"
    path.write_text("{method: ditto, population: {clients: 12, partition: iid}, model: mlp, rounds: 5, epsilon: 8}")
    file = [f"--config={path}"] if joined else ["--config", str(path)]
    words = ["run", *file, "--rounds", "2", "--out", str(tmp_path / "runs")]
    told = command(monkeypatch, capsys, *words)
    (folder,) = (tmp_path / "runs" / "ditto").glob("*/seed=0")
    stated = json.loads((folder / "privacy.json").read_text())
    assert (stated["clients"], stated["rounds"]) == (12, 2)
    assert stated["honest"]["aggregate"]["epsilon"] == pytest.approx(8.0, rel=0.01)
    assert f"accuracy {json.loads((folder / 'metrics.jsonl').read_text().splitlines()[-1])['accuracy']:.3f}" in told


@pytest.mark.slow
def test_a_comparison_from_the_shell(monkeypatch, capsys, tmp_path):
    words = ["--methods", "local_only", "dp_fedavg", "--epsilons", "2", "8", "--clients", "12", "--model", "mlp"]
    more = ["--rounds", "2", "--points", "2", "--seeds", "0", "--out", str(tmp_path)]
    told = command(monkeypatch, capsys, "compare", *words, *more)
    found = jaxfl.Comparison.load(tmp_path / "comparison.json")
    assert found.cells == [("local_only", math.inf), ("dp_fedavg", 2.0), ("dp_fedavg", 8.0)]
    assert found.to_markdown() in told


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


@pytest.mark.slow
def test_a_reader_that_has_gone_is_no_error():
    read, write = os.pipe()
    os.close(read)
    program = [sys.executable, "-c", "from jaxfl.cli import main; main()", "run", "--help"]
    ended = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")
