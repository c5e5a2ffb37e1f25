"""The page of a run, a sweep or a comparison, which is parsed element by element."""

import html.parser
import importlib.util
import json
import math
import os
import re
import shutil
from typing import Any

import numpy as np
import optax
import pytest
from algorithms_table import MODEL, SIZES, small_clients
from comparisons import METHODS, SETTING, row

import jaxfl
from jaxfl import Comparison, LocalSGD, simulate, sweep, write_report
from jaxfl.algorithms import dp_fedavg
from jaxfl.privacy import Full
from jaxfl.report import layout
from jaxfl.run.folder import run_folder


class Page(html.parser.HTMLParser):
    """A parsed page: its tables with all digits, and its texts by kind of element."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, path):
        super().__init__()
        self.tables, self.open, self.texts, self.addresses, self.ids = [], [], {}, [], []
        self.feed(path.read_text())
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.addresses += [
            value for name, value in given.items() if name in ("src", "href", "xlink:href")
        ]
        self.open += [tag] if tag not in self.VOID else []
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "data":
            self.tables[-1][-1][-1] = float(given["value"])

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)
        if {"td", "th"} & {*self.open[-2:]} and "data" not in self.open:
            self.tables[-1][-1][-1] += data

    def table(self, *head):
        """Return the bodies of the tables that begin with these columns."""
        return [rows[1:] for rows in self.tables if rows[0][: len(head)] == list(head)]


def lines(folder):
    return [json.loads(line) for line in (folder / layout.METRICS).read_text().splitlines()]


NAME = "a <b>\"&' $x_1$"
METHOD = dp_fedavg(
    MODEL, clip=1.0, noise_multiplier=3.0, sampling=Full(), local=LocalSGD(optax.sgd(0.1))
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    folder = run_folder(root, "m", {"rate": 0.1, "note": "<script>alert(1)</script>"}, 0)
    method = METHOD._replace(
        name=NAME, terms=METHOD.terms._replace(claim=(0.5, "a rule of <i>ours</i>"))
    )
    result = simulate(
        0, method, small_clients(), rounds=4, eval_every=2, folder=folder, progress=False
    )
    return folder, result, Page(write_report(folder))


def test_the_page_has_every_round_as_the_file_has_it(run):
    folder, _, page = run
    ((first, *rest),) = [
        [[*rows[0]], *rows[1:]] for rows in page.tables if rows[0][:1] == ["round"]
    ]
    for found, expected in zip(rest, lines(folder), strict=True):
        assert dict(zip(first, found, strict=True)) == expected


def test_the_page_has_every_client_the_worst_first(run):
    folder, _, page = run
    (found,) = page.table("client")
    assert sorted(line[0] for line in found) == list(range(len(SIZES)))
    with np.load(folder / layout.PER_CLIENT) as arrays:
        for client, accuracy, loss, size, rounds, *_ in found:
            assert (accuracy, loss) == (
                arrays["accuracy"][-1][int(client)],
                arrays["loss"][-1][int(client)],
            )
            assert (size, rounds) == (
                arrays["test_size"][int(client)],
                arrays["participations"][int(client)],
            )
    tested = [line[1] for line in found if line[3]]
    assert tested == sorted(tested)


def test_columns_of_the_user_stand_beside_each_clients_score(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    names = [f"ward <{i}>" for i in range(len(SIZES))]
    page = Page(write_report(folder, {"ward": names, "beds": np.arange(len(SIZES)) * 10}))
    (found,) = page.table("client", "ward", "beds")
    assert [line[1:3] for line in found] == [[f"ward <{int(i)}>", 10 * i] for i, *_ in found]
    with pytest.raises(ValueError, match=f"value for each of {len(SIZES)} clients .* got 1"):
        write_report(folder, {"ward": ["a"]})
    mistakes: list[Any] = [["a"], {"ward": "a"}, {1: names}, {"ward": [None] * len(SIZES)}]
    for wrong in mistakes:
        with pytest.raises(TypeError, match="columns must be lists of texts or numbers by name"):
            write_report(folder, wrong)
    for taken in ("client", "accuracy", "test examples", "rounds", "ε (aggregate)"):
        with pytest.raises(ValueError, match=f"of the run, .*got {re.escape(repr(taken))}. Rename"):
            write_report(folder, {taken: names})
    (folder / layout.PER_CLIENT).unlink()
    with pytest.raises(ValueError, match="each of 0 clients with scores"):
        write_report(folder, {"ward": names})


def test_the_page_says_who_is_protected_and_what_is_claimed(run):
    _, result, page = run
    (found,) = page.table("protects")
    honest = result.statement["honest"]
    stated = {(line[0], line[1]): [line[2], line[4]] for line in found}
    assert {line[3] for line in found} == {result.statement["delta"], "–"}
    aggregate = honest["aggregate"]
    assert stated["a client, all of its data", aggregate["sees"]] == [
        aggregate["epsilon"],
        aggregate["by"],
    ]
    assert stated["one example", aggregate["sees"]] == [
        aggregate["example"]["epsilon"],
        aggregate["example"]["by"],
    ]
    assert stated["a client, all of its data", honest["upload"]["sees"]] == [
        "∞",
        honest["upload"]["reason"],
    ]
    assert stated["claimed, not verified", "the paper's own rule"] == [0.5, "a rule of <i>ours</i>"]
    items = set(page.texts["li"])
    assert {*result.statement["not_covered"].values()} <= items


def test_names_are_escaped_and_nothing_is_loaded(run):
    folder, _, page = run
    assert page.texts["h1"] == page.texts["title"] == [NAME]
    assert {"script", "b", "i", "img", "link"}.isdisjoint(page.texts)
    assert any("<script>alert(1)</script>" in line for rows in page.tables for line in rows)
    assert "<script" not in (folder / layout.PAGE).read_text()
    assert all(address.startswith("#") for address in page.addresses)
    assert len(page.ids) == len({*page.ids})
    known = {f"#{name}" for name in page.ids}
    assert {*page.addresses} <= known


def test_the_page_says_how_it_was_run(run):
    _, _, page = run
    pairs = {line[0]: line[1] for rows in page.tables for line in rows if len(line) == 2}
    assert pairs["jaxfl"] == jaxfl.__version__
    assert pairs["model"] == MODEL.name
    assert (pairs["rate"], pairs["rounds"], pairs["mechanism.clip"]) == (0.1, 4.0, 1.0)


def test_pictures_are_on_the_page_and_beside_it(run):
    folder, _, page = run
    drawn = set(page.texts["text"])
    assert {
        "test accuracy",
        "loss",
        "ε so far (one client, sums)",
        "test accuracy of a client",
    } <= drawn
    assert (folder / layout.PRINTED).read_bytes().startswith(b"%PDF")


def test_a_run_that_is_not_finished_has_a_page_too(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "copy")
    for name in (layout.PER_CLIENT, layout.PRIVACY, layout.CONFIG):
        (folder / name).unlink()
    (folder / layout.METRICS).write_text(json.dumps(lines(folder)[0]) + "\n")
    page = Page(write_report(folder))
    assert any("2 of 4 rounds, not finished" in text for text in page.texts["p"])
    statement = json.loads((run[0] / layout.PRIVACY).read_text()) | {"rounds": 2}
    (folder / layout.PRIVACY).write_text(json.dumps(statement))  # as after Ctrl-C
    assert any(
        "2 of 4 rounds, not finished" in text for text in Page(write_report(folder)).texts["p"]
    )
    (folder / layout.PRIVACY).unlink()
    shutil.rmtree(folder / layout.CHECKPOINTS)
    assert Page(write_report(folder)).texts["h1"] == ["copy"]


def test_dropped_updates_are_told(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "copy")
    rows = [own | {"nonfinite": 3, "train_loss": None} for own in lines(folder)]
    (folder / layout.METRICS).write_text("".join(f"{json.dumps(own)}\n" for own in rows))
    page = Page(write_report(folder))
    assert any(text.startswith("6 updates were not finite") for text in page.texts["p"])


def test_warnings_are_sentences_also_from_an_older_statement(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "copy")
    statement = json.loads((folder / layout.PRIVACY).read_text())
    known = list(statement["warnings"].values())
    assert known
    assert set(known) <= set(run[2].texts["p"])
    older = statement | {"warnings": known}
    (folder / layout.PRIVACY).write_text(json.dumps(older))
    assert set(known) <= set(Page(write_report(folder)).texts["p"])


def test_an_audit_stands_beside_what_is_stated(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "copy")
    statement = json.loads((folder / layout.PRIVACY).read_text())
    audit = {"at_least": 0.25, "by": "one_run of sum", "estimate": 1.5, "canaries": 6}
    (folder / layout.PRIVACY).write_text(json.dumps(statement | {"audit": audit}))
    np.savez(folder / layout.AUDIT, taken=np.arange(6) % 2 == 0, sum=np.arange(6.0))
    page = Page(write_report(folder))
    (stated,) = page.table("protects")
    delta = run[1].statement["delta"]
    assert stated[-2][1:] == ["audited from below", 0.25, delta, "one_run of sum"]
    pairs = {line[0]: line[1] for rows in page.tables for line in rows if len(line) == 2}
    assert {name: pairs[name] for name in audit} == audit
    assert "score of a canary" in page.texts["text"]


def test_many_clients_are_listed_up_to_a_limit(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "copy")
    scores = np.linspace(1, 0, 3000, dtype=np.float32)
    scores[7] = np.nan
    sizes = np.ones(3000, np.int32)
    sizes[8] = 0
    np.savez(
        folder / layout.PER_CLIENT,
        accuracy=scores[None],
        loss=scores[None],
        round=[4],
        test_size=sizes,
    )
    page = Page(write_report(folder))
    worst, everyone = page.table("client", "accuracy", "loss", "test examples")
    assert [line[0] for line in everyone] == list(range(2999, 1999, -1))
    assert worst == everyone[:20]
    assert (folder / layout.PAGE).stat().st_size < 2**20


def test_a_sweep_gets_a_page_for_each_point(tmp_path):
    def build(rate):
        return METHOD._replace(name=f"at {NAME}")

    folder = tmp_path / "sweep"
    sweep(0, build, {"rate": [0.1] * 11}, small_clients(), rounds=1, folder=folder, progress=False)
    page = Page(write_report(folder))
    (found,) = page.table("point", "round", "accuracy")
    assert [line[0].partition("_")[0] for line in found] == [str(p) for p in range(11)]
    for line, link in zip(found, page.addresses, strict=True):
        assert link == f"{line[0]}/report.html"
        assert (folder / link).exists()
        assert line[2] == lines(folder / line[0])[-1]["accuracy"]
    simulate_again = sweep(
        0,
        build,
        {"rate": [0.1] * 11},
        small_clients(),
        rounds=1,
        folder=folder,
        progress=False,
        resume="never",
    )
    assert len(simulate_again) == 11
    assert not [*folder.glob("*/report.html")]


MADE = Comparison(
    [
        *(row("A <b>", 1.0, seed, accuracy) for seed, accuracy in enumerate((0.5, 0.6))),
        *(row("A <b>", math.inf, seed, accuracy, stated=None) for seed, accuracy in enumerate((0.8, 0.8))),
        *(row("local", math.inf, seed, accuracy, stated=0.0) for seed, accuracy in enumerate((0.55, 0.57))),
    ],
    [
        {"method": "A <b>", "epsilon": 1.0, "chosen": {"rate": 0.3}, "rounds": 2, "points": {"rate": [0.1, 0.2, 0.3]},
         "scores": {"2": [0.1, 0.2, 0.3]}},
    ],
    "accuracy",
    False,
    "by hand",
)  # fmt: skip


def test_a_comparison_has_its_table_its_differences_and_what_was_tried(tmp_path):
    MADE.save(tmp_path / layout.COMPARISON)
    page = Page(write_report(tmp_path))
    (results,) = page.table("method", "ε", "ε stated (sums)")
    infinite = {"∞": math.inf}
    for method, epsilon, _, mean, spread in results:
        assert (mean, spread) == MADE.mean(method, infinite.get(epsilon, epsilon))
    assert [line[2] for line in results] == [1.0, "–", 0.0]
    (differences,) = page.table("method", "ε", "accuracy − local")
    for line, expected in zip(differences, MADE.differences("local"), strict=True):
        assert line[2:] == [expected[key] for key in ("difference", "low", "high")]
    (tuned,) = page.table("method", "ε", "tried")
    assert tuned == [["A <b>", 1.0, "rate: 3 from 0.1 to 0.3", "rate 0.3*", 2.0]]
    (points,) = page.table("rate", "accuracy, round 2")
    assert points == [[0.1, 0.1], [0.2, 0.2], [0.3, 0.3]]
    (runs,) = page.table("method", "epsilon", "stated", "seed")
    assert len(runs) == len(MADE.rows)


def test_methods_of_an_epsilon_are_compared_with_one_that_has_no_noise(tmp_path):
    rows = [row("private", 1.0, seed, 0.5) for seed in (0, 1)]
    free = [row("free", math.inf, seed, 0.6, stated=None) for seed in (0, 1)]
    MADE._replace(rows=rows + free).save(tmp_path / layout.COMPARISON)
    (differences,) = Page(write_report(tmp_path)).table("method", "ε", "accuracy − free")
    assert [line[:2] for line in differences] == [["private", 1.0]]
    MADE._replace(rows=rows).save(tmp_path / layout.COMPARISON)
    assert not Page(write_report(tmp_path)).table("method", "ε", "accuracy − private")


def test_statements_are_those_of_their_seed_and_epsilon(tmp_path, run):
    statement = json.loads((run[0] / layout.PRIVACY).read_text())
    rows = [row("m", epsilon, 1, 0.5) for epsilon in (1.0, 8.0)]
    for point, own in enumerate(rows):
        own["run"] = f"m/seed=1/{point}_rate=0.1"
    MADE._replace(rows=rows).save(tmp_path / layout.COMPARISON)
    for seed in (1, 10):
        for point, epsilon in enumerate((1.0, 8.0)):
            folder = tmp_path / "m" / f"seed={seed}" / f"{point}_rate=0.1"
            folder.mkdir(parents=True)
            honest = statement["honest"] | {
                "aggregate": statement["honest"]["aggregate"] | {"epsilon": seed * epsilon}
            }
            (folder / layout.PRIVACY).write_text(json.dumps(statement | {"honest": honest}))
    page = Page(write_report(tmp_path))
    assert [rows[0][2] for rows in page.table("protects")] == [1.0, 8.0]
    outside = tmp_path / "m" / "seed=10"
    outside.mkdir(exist_ok=True)
    MADE._replace(rows=[rows[0] | {"run": "../seed=1/1_rate=0.1"}]).save(
        outside / layout.COMPARISON
    )
    assert not Page(write_report(outside)).table("protects")


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"folder must hold .*Give the folder of a run"):
        write_report(tmp_path)


@pytest.mark.slow
def test_compare_writes_its_page_with_each_methods_statement(tmp_path):
    found = jaxfl.compare(METHODS, small_clients(), folder=tmp_path, **SETTING)
    page = Page(tmp_path / layout.PAGE)
    told = page.texts["summary"]
    assert {"DP-FedAvg, ε 8", "DP-FedAvg, ε ∞", "local-only, ε ∞"} <= {*told}
    first, second, third = (rows[0] for rows in page.table("protects"))
    assert first[2] == found.rows[0]["stated"]
    assert second[2] == "∞"
    assert third[2] == 0


def test_without_matplotlib_a_run_and_its_page_have_no_pictures(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    algorithm = dp_fedavg(
        MODEL, clip=1.0, noise_multiplier=1.0, sampling=Full(), local=LocalSGD(optax.sgd(0.1), 4)
    )
    simulate(0, algorithm, small_clients(), rounds=1, folder=tmp_path)
    page = write_report(tmp_path).read_text()
    assert not {*tmp_path.glob("*.png"), *tmp_path.glob("*.pdf")}
    assert "<svg" not in page
    assert "pip install &#39;jaxfl[plot]&#39;" in page
    with pytest.raises(ValueError, match=r"pip install 'jaxfl\[plot\]'"):
        MADE.plot(tmp_path / "plot.png")


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_page_waits_for_no_file_and_needs_only_the_rows(kind, tmp_path):
    make = os.mkfifo if kind == "fifo" else os.mkdir
    (tmp_path / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.5}\n')
    (tmp_path / "ckpt" / "3").mkdir(parents=True)
    (tmp_path / "ckpt" / "3x").mkdir()
    (tmp_path / "ckpt" / "3x" / "manifest.json").write_text("{}")
    for name in (
        "privacy.json",
        "per_client.npz",
        "config.json",
        "comparison.json",
        "ckpt/3/manifest.json",
    ):
        make(tmp_path / name)
    assert Page(write_report(tmp_path)).table("round", "accuracy") == [[[1, 0.5]]]
    (tmp_path / "metrics.jsonl").unlink()
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"must hold metrics\.jsonl"):
        write_report(tmp_path)


DAMAGE = {
    "metrics.jsonl": ["", "[1]", "null", "[" * 100_000, "{"],
    "privacy.json": ["", "[]", "null", "[" * 100_000],
    "per_client.npz": ["", "text", "\0" * 100],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, text) for name, texts in DAMAGE.items() for text in texts]
)
def test_a_page_of_damaged_files_names_the_file(name, content, tmp_path):
    for file in DAMAGE:
        (tmp_path / file).write_text(
            "{}" if file == "privacy.json" else '{"round": 1, "loss": 0.5}\n'
        )
    (tmp_path / "per_client.npz").unlink()
    write_report(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name}' must .*run again with the same settings"):
        write_report(tmp_path)
