"""`compare`: its protocol, its tables, and what it refuses."""

import math
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
import scipy.stats
from algorithms_table import MODEL, small_clients

from jaxfl import Candidate, Comparison, LocalSGD, compare, grid, simulate, spread
from jaxfl.algorithms import dp_fedavg, local_only
from jaxfl.data import hold_out
from jaxfl.privacy import FixedSize, Full, Poisson


def local(rate):
    return LocalSGD(optax.sgd(rate), batch_size=4, epochs=2)


def private(rate, clip, noise_multiplier):
    return dp_fedavg(MODEL, clip=clip, noise_multiplier=noise_multiplier, sampling=Poisson(0.5), local=local(rate))


METHODS = {
    "DP-FedAvg": Candidate(private, grid(rate=[0.01, 0.3], clip=[1.0])),
    "local-only": Candidate(lambda rate: local_only(MODEL, local=local(rate)), {"rate": [1e-6, 0.1]}, 3),
}
SETTING: dict[str, Any] = {"rounds": 2, "epsilons": (8.0, math.inf), "seeds": (0, 1), "progress": False}


def row(method, epsilon, seed, accuracy, stated: float | None = 1.0):
    return {"method": method, "epsilon": epsilon, "stated": stated, "seed": seed, "chosen": {}, "accuracy": accuracy}


MADE = Comparison(
    [
        *(row("A_1", 1.0, s, a) for s, a in enumerate((0.5, 0.6))),
        *(row("A_1", math.inf, s, a) for s, a in enumerate((0.8, 0.8))),
        *(row("local", math.inf, s, a, stated=0.0) for s, a in enumerate((0.55, 0.57))),
    ],
    [],
    "accuracy",
    False,
    "by hand",
)  # fmt: skip


def test_hold_out_parts_the_training_examples():
    clients = small_clients()
    tuning = hold_out(clients, 0.25, seed=3)
    for i in range(clients.number):
        train, test = tuning.train[i][: tuning.train_size[i]], tuning.test[i][: tuning.test_size[i]]
        own, size = clients.train[i][: clients.train_size[i]], int(clients.train_size[i])
        assert sorted([*train, *test]) == sorted(own)
        assert len(test) == (min(max(round(0.25 * size), 1), size - 1) if size > 1 else 0)
    last = hold_out(clients, 0.25)
    assert (
        last.test[0][: last.test_size[0]].tolist()
        == clients.train[0][: clients.train_size[0]][-last.test_size[0] :].tolist()
    )
    again, other = (hold_out(clients, 0.25, seed=seed) for seed in (3, 4))
    assert all(map(np.array_equal, tuning, again))
    assert not np.array_equal(tuning.test, other.test)


def test_what_has_no_pair_has_no_difference():
    rows = [row("A", 1.0, 0, 0.5), row("B", 8.0, 0, 0.5)]
    assert MADE._replace(rows=rows).differences("A") == []
    with pytest.raises(ValueError, match="reference='C': name one of A, B"):
        MADE._replace(rows=rows).differences("C")


def test_tables_and_differences():
    assert MADE.to_markdown().splitlines()[2:] == [
        "| A_1 | 0.550 ± 0.071 | 0.800 ± 0.000 |",
        "| local | – | 0.560 ± 0.014 |",
    ]
    assert r"A\_1 & 0.550 $\pm$ 0.071 & 0.800 $\pm$ 0.000 \\" in MADE.to_latex()
    first, second = MADE.differences("local")
    gains = np.array([-0.05, 0.03])
    assert first["difference"] == pytest.approx(gains.mean())
    expected = scipy.stats.ttest_1samp(gains, 0).confidence_interval(0.95)
    assert (first["low"], first["high"]) == pytest.approx(tuple(expected))
    assert second["epsilon"] == math.inf
    with pytest.raises(ValueError, match="reference='none'"):
        MADE.differences("none")


def test_points_fill_a_box_whatever_their_number():
    points = np.log(list(spread(48, rate=(0.01, 1.0), clip=(0.1, 10.0)).values()))
    unit = (points - np.log([[0.01], [0.1]])) / np.log([[100.0], [100.0]])
    boxes = np.floor(unit * [[4], [3]] + 1e-5).astype(int)
    counts = np.unique(boxes, axis=1, return_counts=True)[1]
    assert counts.tolist() == [4] * 12  # any 2^i 3^j numbers of Halton's sequence in a row
    with pytest.raises(ValueError, match=r"rate=\(1.0, 0.1\)"):
        spread(2, rate=(1.0, 0.1))


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plots_and_files(tmp_path, suffix):
    MADE.plot(tmp_path / f"plot.{suffix}")
    assert (tmp_path / f"plot.{suffix}").stat().st_size > 1000
    MADE.save(tmp_path / "made.json")
    assert Comparison.load(tmp_path / "made.json") == MADE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": {}}, "methods="),
        ({"methods": {"a/b": METHODS["DP-FedAvg"]}}, "names that a folder"),
        ({"methods": {"a": private}}, "Candidate"),
        ({"methods": {"a": Candidate(private, {"rate": [0.1], "clip": [1.0, 2.0]})}}, "one length"),
        ({"methods": {"a": Candidate(private, {"clip": [1.0]}, 0)}}, "rounds=0"),
        ({"methods": {"a": Candidate(private, {"noise_multiplier": [1.0]})}}, "without noise_multiplier"),
        ({"epsilons": (0.0,)}, "epsilons="),
        ({"epsilons": 8.0}, "epsilons="),
        ({"epsilons": (1.0, 1.0)}, "epsilons="),
        ({"seeds": ()}, "seeds="),
        ({"seeds": (0, 0)}, r"seeds=\(0, 0\): give each seed once"),
        ({"seeds": (100,)}, "tuning_seed=100"),
        ({"validation": 0.0}, "validation="),
    ],
)
def test_wrong_arguments_are_refused(changes, words):
    arguments = {"methods": METHODS, "clients": small_clients()} | SETTING | changes
    with pytest.raises((ValueError, TypeError), match=words):
        compare(arguments.pop("methods"), arguments.pop("clients"), **arguments)


def test_tuning_trains_and_tests_validation_clients():
    clients, others = small_clients(), hold_out(small_clients(), 0.4, seed=5)
    methods, options = {"local-only": METHODS["local-only"]}, SETTING | {"seeds": (0,)}
    found = compare(methods, clients, validation=lambda seed: others, **options)
    run = simulate(100, local_only(MODEL, local=local(0.1)), others, rounds=3, eval_every=1, progress=False)
    scores = [column[1] for column in found.tuning[0]["scores"].values()]
    assert scores == pytest.approx([row["accuracy"] for row in run.metrics])
    assert "other clients" in found.protocol


def test_noise_is_that_of_the_clients_who_are_run():
    private = {"DP-FedAvg": Candidate(partial(dp_fedavg, MODEL, clip=1.0, sampling=FixedSize(2), local=local(0.1)))}
    many = small_clients((4,) * 20)
    found = compare(private, small_clients(), validation=many, rounds=2, epsilons=(1.0,), seeds=(0,), progress=False)
    assert found.rows[0]["stated"] == pytest.approx(1.0, rel=2e-3)


def test_noise_is_that_of_each_seeds_clients():
    private = {"DP-FedAvg": Candidate(partial(dp_fedavg, MODEL, clip=1.0, sampling=FixedSize(2), local=local(0.1)))}
    many, few = small_clients((4,) * 20), small_clients()
    options = SETTING | {"epsilons": (1.0,)}
    found = compare(private, lambda seed: few if seed else many, **options)
    assert [row["stated"] for row in found.rows] == pytest.approx([1.0, 1.0], rel=2e-3)


def test_points_of_other_epsilons_are_no_points():
    def build(rate, noise_multiplier):
        return dp_fedavg(MODEL, clip=1.0, noise_multiplier=noise_multiplier, sampling=Poisson(rate))

    with pytest.raises(ValueError, match=r"methods\['a'\].points=.* different epsilons"):
        compare({"a": Candidate(build, {"rate": [0.1, 0.5]})}, small_clients(), **SETTING)


def test_a_point_that_diverges_loses_and_stops_nothing(monkeypatch):
    monkeypatch.setattr("jaxfl.run.compare._STATE_BYTES", 1)  # a program for each point
    methods = {"local-only": Candidate(lambda rate: local_only(MODEL, local=local(rate)), {"rate": [1e25, 0.1]})}
    found = compare(methods, small_clients(), rounds=2, seeds=(0,), progress=False)
    assert found.rows[0]["chosen"] == {"rate": 0.1}


def test_a_partial_that_fixes_the_noise_is_run_once():
    free = partial(dp_fedavg, MODEL, sampling=Full(), clip=math.inf, noise_multiplier=0.0, local=local(0.1))
    assert not Candidate(free).private
    found = compare({"free": Candidate(free)}, small_clients(), **SETTING | {"seeds": (0,)})
    assert found.cells == [("free", math.inf)]


@pytest.mark.slow
def test_the_best_point_is_run_with_every_seed_and_again_from_the_folder(tmp_path):
    clients = small_clients()
    found = compare(METHODS, clients, folder=tmp_path, **SETTING)
    assert found.cells == [("DP-FedAvg", 8.0), ("DP-FedAvg", math.inf), ("local-only", math.inf)]
    for tuned in found.tuning:
        scores = np.array(list(tuned["scores"].values()))  # by round and point
        at, best = np.unravel_index(np.argmax(scores.T.ravel()), scores.T.shape)[::-1]
        assert tuned["chosen"] == {name: column[best] for name, column in tuned["points"].items()}
        assert tuned["rounds"] == int(list(tuned["scores"])[at])
    assert [len(tuned["scores"]) for tuned in found.tuning] == [1, 1, 3]
    stated = {(row["method"], row["epsilon"]): row["stated"] for row in found.rows}
    assert 7.9 < stated["DP-FedAvg", 8.0] <= 8.0
    assert stated["local-only", math.inf] == 0
    assert stated["DP-FedAvg", math.inf] is None
    chosen = next(row for row in found.tuning if row["method"] == "DP-FedAvg" and math.isinf(row["epsilon"]))["chosen"]
    alone = simulate(jax.random.key(1), private(noise_multiplier=0.0, **chosen), clients, rounds=2, progress=False)
    own = next(r for r in found.rows if r["method"] == "DP-FedAvg" and math.isinf(r["epsilon"]) and r["seed"] == 1)
    assert own["loss"] == pytest.approx(alone.metrics[-1]["loss"], rel=1e-4)
    assert compare(METHODS, clients, folder=tmp_path, **SETTING) == found
    assert Comparison.load(tmp_path / "comparison.json") == found
