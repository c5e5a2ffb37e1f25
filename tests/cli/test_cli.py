import io
import json
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest

import jaxfl
from jaxfl import privacy
from jaxfl.cli import main as cli
from jaxfl.cli import settings
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


def test_plan_takes_the_limits_of_a_server(monkeypatch, capsys):
    words = [
        "plan",
        "--clients",
        "2000",
        "--cohort",
        "100",
        "--rounds",
        "20",
        "--epsilon",
        "2",
        "--as-json",
    ]
    out = command(monkeypatch, capsys, *words, "--participations", "2", "--separation", "10")
    found = privacy.plan(
        clients=2000, cohort=100, rounds=20, epsilon=2.0, participations=2, separation=10
    )
    told = [row["noise multiplier"] for row in json.loads(out)["mechanisms"]]
    assert told == [each.noise_multiplier for each in found]


def test_plan_writes_a_page_for_a_review_board(monkeypatch, capsys, tmp_path):
    words = ["plan", "--clients", "2000", "--cohort", "100", "--rounds", "20", "--epsilon", "2"]
    page = tmp_path / "reviews" / "plan.html"
    kinds = ["--kinds", "fixed size", "separated"]
    table = command(monkeypatch, capsys, *words, *kinds, "--report", str(page))
    assert "hidden draw" in table
    assert "poisson" not in table
    found = privacy.plan(
        clients=2000, cohort=100, rounds=20, epsilon=2.0, kinds=("fixed size", "separated")
    )
    written = page.read_text(encoding="utf-8")
    assert jaxfl.write_plan(found, tmp_path / "own.html").read_text(encoding="utf-8") == written


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
    cli._print_table("Datasets", ("name", "where"), [("mnist", "/folder" * 20)])
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    assert "/folder" * 20 in "".join(told.partition("mnist")[2].split())


def test_the_version(monkeypatch, capsys):
    assert command(monkeypatch, capsys, "--version") == f"jaxfl {jaxfl.__version__}\n"


def test_the_doctor_has_a_figure(monkeypatch, capsys):
    monkeypatch.setattr(cli, "throughput", lambda: 1234.4)
    told = command(monkeypatch, capsys, "doctor")
    assert "1234 clients per second" in told
    assert "cpu" in told
    assert max(map(len, told.splitlines())) <= 80


SMALL: dict[str, Any] = {
    "population": settings.FederatedData(clients=12),
    "model": "mlp",
    "rounds": 2,
    "rate": 0.5,
}


@pytest.mark.parametrize("name", settings.METHODS)
def test_every_method_follows_its_settings(name):
    model = mlp((8, 8, 1), 10, hidden=(4,))
    method = settings.Run(method=name, clip=0.7, **SMALL).build(model)
    assert method.mechanism.sampling == (Full() if name == "local_only" else Poisson(0.5))
    if settings.private(name):
        noisy = settings.Run(method=name, epsilon=5.0, clip=0.7, **SMALL).build(model).mechanism
        assert (noisy.clip, method.mechanism.noise_multiplier) == (0.7, 0.0)
        assert noisy.noise_multiplier == privacy.calibrate(
            5.0, clients=12, rounds=2, sampling=Poisson(0.5)
        )
        assert (
            settings.private(name)
            == settings.Compare(methods=(name,), **SMALL).candidates(model)[name].private
        )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("method: [", "config must be a YAML file"),
        ("3", "got 3 in .* Choose from population, model"),
        ("metod: fedavg", "got 'metod' in .* Did you mean 'method'"),
        ("population: {client: 3}", "got 'client' in population of .* Did you mean 'clients'"),
        ("xyz: 1", "got 'xyz' in .* Choose from population, model"),
        ("method: fedavgg", "method must be one of .* got 'fedavgg'"),
        (
            "{method: fedavg, epsilon: 3}",
            "epsilon must be infinite for fedavg, which takes no noise, got 3",
        ),
        (
            "{method: ditto, options: {mu: 3}}",
            "options must name numbers of ditto, got 'mu'. Choose from penalty_weight",
        ),
        (
            "{method: ditto, options: {penalty: 3}}",
            "options must .* got 'penalty'. Did you mean 'penalty_weight'",
        ),
        (
            "{method: fedavg, options: {learning_rate: 3}}",
            "options must leave out 'learning_rate', which is a setting, got 3. Give --learning-rate.",
        ),
        ("options: {model: 3}", "options must name numbers of dp_fedavg_fb, got 'model'"),
        (
            "{epsilon: 3, options: {noise_multiplier: 3}}",
            "epsilon must be infinite with a noise_multiplier in options, got 3",
        ),
        ("options: 3", "options must be numbers by name, got 3"),
        ("options: {delta: x}", r"options\['delta'\] must be a number, got 'x'"),
        ("rounds: 2020-13-45", "rounds must be a whole number .* got '2020-13-45'"),
        ("rounds: !!timestamp x", "config must be a YAML file"),
        ("rounds: " + "5" * 5000, "config must .*5000 digits"),
        ("[" * 1000, "config must .*nests too deeply"),
        (
            "rounds: !!python/object/apply:os.getcwd []",
            "config must .*could not determine a constructor",
        ),
        ("rounds: 3\nrounds: 4", "config must .*'rounds' is there twice"),
        ("rounds: 1:30", "rounds must be a whole number .* got '1:30'"),
        ("model: no", "model must be one of .* got 'no'"),
    ],
)
def test_settings_that_do_not_fit_are_told(text, named, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        settings.read_settings(settings.Run, path).build(mlp((8, 8, 1), 10, hidden=(4,)))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("methods: fedavg", "methods must be a list of one or more values, got 'fedavg'"),
        ("methods: [fedavg, x]", r"methods\[1\] must be one of .* got 'x'"),
        ("epsilons: []", "epsilons must be a list of one or more values"),
        ("epsilons: [1, a]", r"epsilons\[1\] must be a finite number above 0, got 'a'"),
        (
            "clips: [1]",
            r"clips must be two finite numbers above 0, the smaller one first, got \(1,\)",
        ),
        ("methods: [fedavg, fedavg]", "methods must be different, got 'fedavg' twice"),
    ],
)
def test_settings_of_a_comparison_that_do_not_fit_are_named(text, named, tmp_path):
    path = tmp_path / "compare.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=named):
        settings.read_settings(settings.Compare, path)


def test_a_file_has_the_numbers_of_yaml_1_2(tmp_path):
    path = tmp_path / "run.yaml"
    text = "local: {learning_rate: 1e-2, momentum: 5E-1}\nepsilon: .inf\nrounds: 010\nclip: 1.5\noptions: {density: .5}"
    path.write_text(text)
    found = settings.read_settings(settings.Run, path)
    assert (found.local.learning_rate, found.local.momentum, found.epsilon) == (0.01, 0.5, math.inf)
    assert (found.rounds, found.clip, found.options) == (10, 1.5, {"density": 0.5})


def test_a_file_is_utf_8_whatever_the_locale_is(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "text_encoding", lambda *given: "ascii")
    path = tmp_path / "run.yaml"
    path.write_bytes("rounds: 7  # für die Prüfung\n".encode())
    assert settings.read_settings(settings.Run, path).rounds == 7
    path.write_bytes(b"rounds: 7  # \xe9\n")
    with pytest.raises(ValueError, match="config must be a YAML file"):
        settings.read_settings(settings.Run, path)


class _StopError(Exception):
    """An exception that ends a run before its first round."""


def asked(monkeypatch, *words):
    """Return the settings and the method of the run that a command line describes."""

    def stop(seed, algorithm, *given, **options):
        raise _StopError(algorithm)

    seen = []
    monkeypatch.setattr(cli, "run_folder", lambda out, method, setting, seed: seen.append(setting))
    monkeypatch.setattr(cli, "simulate", stop)
    monkeypatch.setattr(sys, "argv", ["jaxfl", "run", "--model", "mlp", *words])
    with pytest.raises(_StopError) as end:
        cli.main()
    return seen[0], end.value.args[0]


def test_options_replace_a_file(monkeypatch, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "{method: apfl, population: {alpha: 2.0}, options: {alpha: 0.3, alpha_learning_rate: 1e-2}}"
    )
    words = [
        "--config",
        str(path),
        "--local.epochs",
        "1",
        "--population.clients=7",
        "--rounds",
        "3",
    ]
    found, method = asked(
        monkeypatch, *words, "--option", "alpha=4e-1", "--option", "delta=1e-6", "--alpha", "0.7"
    )
    assert (found.local.epochs, found.population.clients, found.rounds) == (1, 7, 3)
    assert found.population.alpha == 0.7
    assert found.options == {"alpha": 0.4, "alpha_learning_rate": 0.01, "delta": 1e-6}
    assert (method.name, method.terms.delta) == ("apfl", 1e-6)


@pytest.mark.parametrize(("name", "value"), [("delta", 0.3), ("alpha", 0.3)])
def test_a_method_may_have_numbers_that_are_named_as_settings_are(
    monkeypatch, tmp_path, name, value
):
    path = tmp_path / "run.yaml"
    path.write_text(f"{{method: apfl, options: {{{name}: {value}}}}}")
    found, method = asked(monkeypatch, "--config", str(path))
    assert found.options == {name: value}
    assert found.population.alpha == 0.5
    assert {"delta": method.terms.delta, "alpha": 0.3}[name] == value


def test_whole_numbers_of_a_method_stay_whole(monkeypatch):
    found, method = asked(monkeypatch, "--method", "pfedme", "--option", "inner_steps=3")
    assert found.options == {"inner_steps": 3}
    assert method.name == "pfedme"


def exit_code():
    """Run the command with the hook of a process for errors, and return the exit code."""
    try:
        cli.main()
    except Exception as error:
        with pytest.raises(SystemExit) as end:
            sys.excepthook(type(error), error, error.__traceback__)
        return end.value.code
    except SystemExit as end:
        return end.code
    return 0


def test_values_with_a_comma_between_them_get_a_hint(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxfl", "compare", "--methods", "ditto,fedavg"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert exit_code() == 2
    assert capsys.readouterr().err.endswith(". Separate values by spaces.\n")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "command must be given, got none. Choose from quickstart, run"),
        (["runn"], "command must be one of quickstart, run, compare"),
        (["run", "--rounds"], "rounds must have a value, got none. Write it after"),
        (["run", "--method", "fedavgg"], "method must be one of its choices, got 'fedavgg'. Did you mean 'fedavg'?"),
        (["run", "--rounds", "x"], "rounds must be a whole number, got 'x'. Write"),
        (["run", "--learning-rate", "x"], "learning-rate must be a number, got 'x'. Give"),
        (["run", "--rounds", "5" * 5000], "--rounds: Exceeds the limit"),
        (["run", "--rounds", "0"], "rounds must be a whole number of at least 1, got 0"),
        (["run", "--lr", "x"], "learning-rate must be a number, got 'x'. Give"),
        (["run", "--learning-rat", "1"], "option must be known to the command, got '--learning-rat'. Did you mean --learning-rate?"),
        (["run", "--learning-rate", "0"], "learning_rate must be a finite number above 0, got 0.0"),
        (["run", "--roundz", "3"], "option must be known to the command, got '--roundz'. Did you mean --rounds?"),
        (["run", "--option", "delta"], "option must be NAME=VALUE, got 'delta'"),
        (["run", "--option", "delta=x"], "option['delta'] must be a number, got 'x'"),
        (["run", "--option", "delta=[["], "option['delta'] must be a number, got '[['"),
        (["run", "--option", "alpha=1", "--option", "alpha=2"], "option must name each number once, got 'alpha' twice"),
        (["run", "--method", "fedavg", "--option", "rate=1"], "options must name numbers of fedavg, got 'rate'. Leave"),
        (["run", "--config", "a.yaml", "--config", "b.yaml"], "config must be given once, got ['a.yaml', 'b.yaml']"),
        (["run", "--out", "/proc/x"], "path must be usable, got /proc/x"),
        (["compare", "--learning-rates", "0.1"], "learning-rates must have 2 values, got fewer. Write"),
        (["report"], "folder must be given, got none."),
        (["plan", "--clients", "9"], "--cohort, --rounds must be given, got none."),
        (["run", "--partition", "classes", "--classes", "11"], "classes must be a whole number from 1 to 10, got 11."),
        (["run", "--clients", "100000"], "clients must be a whole number from 1 to "),
        (["run", "--option", "clip=2", "--clip", "3"], "options must leave out 'clip', which is a setting, got 2. Give --clip."),
        (["run", "--option", "=3"], "option must be NAME=VALUE, got '=3'"),
        (["run", "--config", "/no/such/file"], "config must be a file, got '/no/such/file'. Give"),
        (["plan", "--clients", "5" * 5000, "--cohort", "9", "--rounds", "9"], "--clients: Exceeds the limit"),
        (["plan", "--clients", "1" + "0" * 21, "--cohort", "9", "--rounds", "9"], "clients must be a whole number from 1 to 1000000000000, got 1" + "0" * 21),
        (["data", "x"], "name must be one of 'all'"),
        (["data", "mnist", "digits"], "words must be options or their values, got 'digits'. Leave out"),
        (["run", "--data", "cifar10"], "data must be on this machine, got 'cifar10', which is not. `jaxfl data cifar10`"),
        (["compare", "--clips", "1", "2", "3"], "words must be options or their values, got '3'."),
        (["compare", "--clips", "3", "1"], "clips must be two finite numbers above 0, the smaller one first, got (3.0, 1.0)."),
        (["compare", "--epsilons", "8", "eight"], "epsilons must be values of its type, got ['8', 'eight']."),
        (["compare", "--learning-rates", "a", "b"], "learning-rates must be values of its type, got ['a', 'b']."),
        (["compare", "--method", "fedavg"], "option must be known to the command, got '--method'. Did you mean --methods?"),
        (["doctor", "--out", "x"], "option must be known to the command, got '--out'. Options are listed"),
        (["report", "--folder", "x"], "folder must be given, got none. Write it after the command."),
        (["compare", "--lr", "0.2"], "learning_rate must be left out of a comparison, which tunes it, got 0.2."),
        (["run", "--seed", str(2**32)], "seed must be a whole number from 0 to 4294967295, got 4294967296."),
        (["run", "--model", "lenet"], "model must fit examples of shape (8, 8, 1), got 'lenet', whose input_shape"),
        (["run", "--config", "/proc"], "config must be a file, got '/proc'. Give the path"),
        (["run", "--config", ""], "config must be a file, got ''. Give the path"),
        (["run", "--method", "fedavg,ditto"], "method must be one of its choices, got 'fedavg,ditto'. Did you"),
        (["plan", "--clients", "9", "--cohort", "2", "--rounds", "9", "--noise-multiplier", "1e300"], "noise_multiplier must be at most 1e+08, got 1e+300."),
        (["compare", "--methods"], "methods must be a list of one or more values, got (). Give for instance fedavg and dp"),
        (["compare", "--seeds"], "seeds must"),
        (["plan", "--clients", "9", "--cohort", "2", "--rounds", "9", "--epsilon", "1", "--kinds"], "kinds must"),
        (["report", "/no/such/file"], "folder must be the folder of a run, a sweep or a comparison, got '/no/such/file'"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path, words, named):
    monkeypatch.setenv("JAXFL_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["jaxfl", *words])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert exit_code() == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"error: {named}")
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert len(told.err) < 700


@pytest.mark.parametrize(
    "name", ["quickstart", "run", "compare", "plan", "data", "report", "doctor"]
)
def test_every_option_has_a_text(monkeypatch, capsys, name):
    # No text is longer than a line here, so every line of a text begins it.
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as end:
        cli.parse([name, "--help"])
    assert end.value.code == 0
    told = re.sub("[\u2500-\u257f]", "", capsys.readouterr().out)
    assert "dummy" not in told
    lines = [line.strip() for line in told.splitlines()]
    assert not [line for line in lines if re.match(r"[a-z]+ .*[.)]$", line)]
    words = re.sub(r"\(default[^()]*(\([^()]*\))?[^()]*\)|\{[^}]*\}|\[.*\]|\b[A-Z]{3,}\b", "", told)
    assert not re.findall(r"--[a-z][\w-]*[|, ]*\n *(?=-|$|\n)", words)


@pytest.mark.parametrize("joined", [False, True])
def test_a_run_takes_a_file_and_options(monkeypatch, capsys, tmp_path, joined):
    path = tmp_path / "run.yaml"
    path.write_text(
        "{method: ditto, population: {clients: 12, partition: iid}, model: mlp, rounds: 5, epsilon: 8}"
    )
    file = [f"--config={path}"] if joined else ["--config", str(path)]
    words = ["run", *file, "--rounds", "2", "--out", str(tmp_path / "runs")]
    told = command(monkeypatch, capsys, *words)
    (folder,) = (tmp_path / "runs" / "ditto").glob("*/seed=0")
    stated = json.loads((folder / "privacy.json").read_text())
    assert (stated["clients"], stated["rounds"]) == (12, 2)
    assert stated["honest"]["aggregate"]["epsilon"] == pytest.approx(8.0, rel=0.01)
    assert (
        f"accuracy {json.loads((folder / 'metrics.jsonl').read_text().splitlines()[-1])['accuracy']:.3f}"
        in told
    )


@pytest.mark.slow
def test_a_comparison_from_the_shell(monkeypatch, capsys, tmp_path):
    words = [
        "--methods",
        "local_only",
        "dp_fedavg",
        "--epsilons",
        "2",
        "8",
        "--clients",
        "12",
        "--model",
        "mlp",
    ]
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
    code = (
        "import sys; from jaxfl.cli.main import main; sys.argv = ['jaxfl', 'data', 'mnist']; main()"
    )
    environment = {**os.environ, "JAXFL_DATA_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: data_dir must hold a prepared copy of")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_reader_that_has_gone_is_no_error():
    read, write = os.pipe()
    os.close(read)
    program = [
        sys.executable,
        "-c",
        "from jaxfl.cli.main import main; main()",
        "run",
        "--help",
    ]
    ended = subprocess.run(program, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")
