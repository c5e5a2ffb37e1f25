"""`compare`: its protocol, its tables, and its errors."""

import math
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
import scipy.stats
from algorithms_table import MODEL, small_clients
from comparisons import METHODS, SETTING, local, private, row

from jaxfl import Candidate, Comparison, LocalSGD, compare, grid, simulate, spread, sweep
from jaxfl.algorithms import dp_fedavg, fedavg, local_only
from jaxfl.data import hold_out
from jaxfl.models import mlp
from jaxfl.privacy import FixedSize, Full, Poisson
from jaxfl.run.recorder import Result
from jaxfl.tasks import classification
from jaxfl.types import Lists

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
    for i in range(clients.num_clients):
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
    assert all(map(np.array_equal, jax.tree.leaves(tuning), jax.tree.leaves(again)))
    assert not np.array_equal(tuning.test.flat, other.test.flat)


def test_what_has_no_pair_has_no_difference():
    rows = [row("A", 1.0, 0, 0.5), row("B", 8.0, 0, 0.5)]
    assert MADE._replace(rows=rows).differences("A") == []
    with pytest.raises(ValueError, match=r"got 'C'. Name one of A, B"):
        MADE._replace(rows=rows).differences("C")


def test_tables_and_differences():
    assert MADE.to_markdown().splitlines()[2:] == [
        "| A_1 | 0.550 ± 0.071 | 0.800 ± 0.000 |",
        "| local | – | 0.560 ± 0.014 |",
    ]
    assert r"A\_1 & 0.550 $\pm$ 0.071 & 0.800 $\pm$ 0.000 \\" in MADE.to_latex()
    tried = {"rate": [0.1, 0.2, 0.3], "momentum": [0.0, 0.5, 0.9]}
    tuning = {"epsilon": 1.0, "points": tried, "chosen": {"rate": 0.3, "momentum": 0.5}}
    at_an_end = MADE._replace(tuning=[{"method": "A_1"} | tuning]).to_markdown()
    assert "| A_1 | 0.550 ± 0.071 (rate at an end) | 0.800 ± 0.000 |" in at_an_end
    first, second = MADE.differences("local")
    gains = np.array([-0.05, 0.03])
    assert first["difference"] == pytest.approx(gains.mean())
    expected = scipy.stats.ttest_1samp(gains, 0).confidence_interval(0.95)
    assert (first["low"], first["high"]) == pytest.approx(tuple(expected))
    assert second["epsilon"] == math.inf
    with pytest.raises(ValueError, match=r"reference must be .* got 'none'"):
        MADE.differences("none")


def test_points_fill_a_box_whatever_their_number():
    points = np.log(list(spread(48, rate=(0.01, 1.0), clip=(0.1, 10.0)).values()))
    unit = (points - np.log([[0.01], [0.1]])) / np.log([[100.0], [100.0]])
    boxes = np.floor(unit * [[4], [3]] + 1e-5).astype(int)
    counts = np.unique(boxes, axis=1, return_counts=True)[1]
    assert counts.tolist() == [4] * 12  # any 2^i 3^j numbers of Halton's sequence in a row
    with pytest.raises(ValueError, match=r"rate must be .* got \(1.0, 0.1\)"):
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
        ({"methods": {}}, "methods must be"),
        ({"methods": {"a/b": METHODS["DP-FedAvg"]}}, "names that a folder"),
        ({"methods": {"a": private}}, "Candidate"),
        ({"methods": {"a": Candidate(private, {"rate": [0.1], "clip": [1.0, 2.0]})}}, "one length"),
        ({"methods": {"a": Candidate(private, {"clip": [1.0]}, 0)}}, "rounds must be .* got 0"),
        (
            {"methods": {"a": Candidate(private, {"noise_multiplier": [1.0]})}},
            "without noise_multiplier",
        ),
        ({"epsilons": (0.0,)}, "epsilons must be"),
        ({"epsilons": 8.0}, "epsilons must be"),
        ({"epsilons": (1.0, 1.0)}, "epsilons must be"),
        ({"seeds": ()}, "seeds must be"),
        ({"seeds": (0, 0)}, r"seeds must be different, got \(0, 0\)"),
        ({"seeds": (100,)}, "tuning_seed must not be .* got 100"),
        ({"validation": 0.0}, "validation must be"),
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
    run = simulate(
        100, local_only(MODEL, local=local(0.1)), others, rounds=3, eval_every=1, progress=False
    )
    scores = [column[1] for column in found.tuning[0]["scores"].values()]
    assert scores == pytest.approx([row["accuracy"] for row in run.metrics])
    assert "other clients" in found.protocol


def test_noise_is_that_of_the_clients_who_are_run():
    private = {
        "DP-FedAvg": Candidate(
            partial(dp_fedavg, MODEL, clip=1.0, sampling=FixedSize(2), local=local(0.1))
        )
    }
    many = small_clients((4,) * 20)
    found = compare(
        private,
        small_clients(),
        validation=many,
        rounds=2,
        epsilons=(1.0,),
        seeds=(0,),
        progress=False,
    )
    assert found.rows[0]["stated"] == pytest.approx(1.0, rel=2e-3)


def test_noise_is_that_of_each_seeds_clients():
    private = {
        "DP-FedAvg": Candidate(
            partial(dp_fedavg, MODEL, clip=1.0, sampling=FixedSize(2), local=local(0.1))
        )
    }
    many, few = small_clients((4,) * 20), small_clients()
    options = SETTING | {"epsilons": (1.0,)}
    found = compare(private, lambda seed: few if seed else many, **options)
    assert [row["stated"] for row in found.rows] == pytest.approx([1.0, 1.0], rel=2e-3)


def test_points_of_other_epsilons_are_no_points():
    def build(rate, noise_multiplier):
        return dp_fedavg(MODEL, clip=1.0, noise_multiplier=noise_multiplier, sampling=Poisson(rate))

    with pytest.raises(ValueError, match=r"methods\['a'\].points must .* different epsilons"):
        compare({"a": Candidate(build, {"rate": [0.1, 0.5]})}, small_clients(), **SETTING)


def test_a_point_that_diverges_loses_and_stops_nothing(monkeypatch):
    monkeypatch.setattr("jaxfl.run.candidate_runs._STATE_BYTES", 1)  # a program for each point
    methods = {
        "local-only": Candidate(
            lambda rate: local_only(MODEL, local=local(rate)), {"rate": [1e25, 0.1]}
        )
    }
    found = compare(methods, small_clients(), rounds=2, seeds=(0,), progress=False)
    assert found.rows[0]["chosen"] == {"rate": 0.1}
    assert found.tuning[0]["dropped"] == [1.0, 0.0]


def test_a_partial_that_fixes_the_noise_is_run_once():
    free = partial(
        dp_fedavg, MODEL, sampling=Full(), clip=math.inf, noise_multiplier=0.0, local=local(0.1)
    )
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
    chosen = next(
        row for row in found.tuning if row["method"] == "DP-FedAvg" and math.isinf(row["epsilon"])
    )["chosen"]
    # It is the second point of its seed's program, and its draws differ from those of the first.
    (alone,) = sweep(
        jax.random.key(1)[None],
        private,
        {name: [value] for name, value in chosen.items()} | {"noise_multiplier": [0.0]},
        clients,
        rounds=2,
        numbers=(1,),
        progress=False,
    )
    own = next(
        r
        for r in found.rows
        if r["method"] == "DP-FedAvg" and math.isinf(r["epsilon"]) and r["seed"] == 1
    )
    assert own["loss"] == pytest.approx(alone.metrics[-1]["loss"], rel=1e-4)
    assert compare(METHODS, clients, folder=tmp_path, **SETTING) == found
    assert Comparison.load(tmp_path / "comparison.json") == found


def one_example_each():
    clients = small_clients()
    size = np.ones_like(clients.train_size)
    rows = np.arange(clients.num_clients).reshape(-1, 1)
    return clients._replace(train=Lists.of(rows), train_size=size)


def result(accuracy, *, dropped=0.0, rounds=(1,)):
    """Return a result, made by hand, of a run that sends nothing."""
    rows: list[dict[str, Any]] = [
        {"round": number, "accuracy": accuracy, "epsilon": 0.0} for number in rounds
    ]
    ledger: Any = None
    return Result((), (), rows, {}, {}, ledger, {"communicates": False}, dropped=dropped)


def swept(monkeypatch, outcome):
    """Let `outcome(rate, seed)` make the results of sweeps, and return each sweep's columns."""
    calls = []

    def fake(key, build, values, clients, **options):
        calls.append(dict(values))
        found = [
            outcome(rate, int(jax.random.key_data(k)[-1]))
            for rate, k in zip(values["rate"], key, strict=True)
        ]
        if errors := [one for one in found if isinstance(one, Exception)]:
            raise errors[0]
        return found

    monkeypatch.setattr("jaxfl.run.candidate_runs.sweep", fake)
    return calls


def no_sweep(monkeypatch):
    def fails(*arguments, **options):
        raise AssertionError("a round was run")

    monkeypatch.setattr("jaxfl.run.candidate_runs.sweep", fails)


def alone(rate):
    return local_only(MODEL, local=local(rate))


ALONE = Candidate(alone, {"rate": [0.1, 0.2]}, 1)


def raises(rate):
    return {0.1: alone(rate)}[rate]


def other_shape(rate):
    model = MODEL if rate == 0.1 else mlp((5, 5, 1), 10, hidden=(3,))
    return local_only(model, local=LocalSGD(optax.sgd(rate), batch_size=int(10 * rate)))


def other_metric(rate):
    model = MODEL._replace(task=classification("f1"))
    return local_only(model, local=local(rate))


def other_epsilon(rate, noise_multiplier):
    return dp_fedavg(
        MODEL, clip=1.0, noise_multiplier=noise_multiplier, sampling=Poisson(rate), local=local(0.1)
    )


def either(rate):
    return (
        alone(rate)
        if rate == 0.1
        else fedavg(MODEL, local=LocalSGD(optax.sgd(rate), batch_size=int(10 * rate)))
    )


@pytest.mark.parametrize(
    ("build", "points", "words"),
    [
        (raises, {"rate": [0.1, 0.5]}, r"methods\['late'\] at \(rate=0.5\): KeyError: 0.5"),
        (
            lambda rate: None,
            {"rate": [0.1]},
            r"methods\['late'\] at \(rate=0.1\): (build\(...\) must be of type Algorithm, got None|Type-check)",
        ),
        (
            alone,
            {"rates": [0.1]},
            r"^rates must be an argument of methods\['late'\].build\(\), .*'rate'",
        ),
        (
            private,
            {"rate": [0.1, 0.1], "clip": [1.0, -1.0]},
            r"at \(rate=0.1, clip=-1.0\): clip must be a number above 0, got -1.0",
        ),
        (
            private,
            {"rate": [0.1, 0.1], "clip": [1.0, np.inf]},
            r"at \(rate=0.1, clip=inf\): clip must be finite with noise",
        ),
        (
            other_shape,
            {"rate": [0.1, 0.5]},
            r"at \(rate=0.5\): model must .* got model='mlp' for shape \(5, 5, 1\)",
        ),
        (
            other_metric,
            {"rate": [0.1]},
            r"at \(rate=0.1\): methods must be scored by the same metric, got 'f1'",
        ),
        (
            either,
            {"rate": [0.1, 0.5]},
            r"at \(rate=0.5\): points must all send updates or all send none",
        ),
        (
            other_epsilon,
            {"rate": [0.1, 0.5]},
            r"methods\['late'\].points must .*different epsilons",
        ),
    ],
)
def test_faults_of_a_later_candidate_are_found_before_the_first_round(
    build, points, words, monkeypatch
):
    no_sweep(monkeypatch)
    with pytest.raises((ValueError, TypeError), match=words):
        compare({"first": ALONE, "late": Candidate(build, points)}, small_clients(), **SETTING)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["comparison.json"], "'comparison.json', a file of a comparison"),
        (["Report.HTML"], "'report.html', a file of a comparison"),
        (["config.json"], "a file of"),
        (["Ckpt"], "a file of"),
        (["A", "a"], "got 'a' and 'A'"),
        (["\u00e9", "e\u0301"], "Choose another name"),
        ([".lock"], "does not begin with a dot"),
        ([".."], "does not begin with a dot"),
        (["a/b"], "without slashes"),
        (["a\0"], "control characters"),
        ([""], "that a folder can have"),
        (["a" * 300], "200 bytes"),
        ([3], "that a folder can have, got 3"),
    ],
)
def test_names_that_a_folder_cannot_hold_beside_our_files_are_refused(names, words):
    with pytest.raises(ValueError, match=words):
        compare(dict.fromkeys(names, ALONE), small_clients(), **SETTING)


def test_clients_who_can_hold_nothing_out_cannot_choose_a_point(monkeypatch):
    no_sweep(monkeypatch)
    options = SETTING | {"epsilons": (math.inf,)}
    with pytest.raises(
        ValueError,
        match=r"validation must hold out .* got 0.2, .*Give other clients as `validation`",
    ):
        compare({"a": ALONE}, one_example_each(), **options)
    untested = small_clients()
    untested = untested._replace(test_size=np.zeros_like(untested.test_size))
    with pytest.raises(ValueError, match=r"they have no test examples"):
        compare({"a": ALONE}, small_clients(), validation=untested, **options)


def test_a_single_point_needs_no_examples_to_choose_it(monkeypatch):
    swept(monkeypatch, lambda rate, seed: result(0.5))
    single = Candidate(lambda rate: fedavg(MODEL, local=local(rate)), {"rate": [0.1]})
    assert compare({"a": single}, one_example_each(), **SETTING).mean("a", math.inf)[0] == 0.5


def test_a_point_without_a_score_or_without_updates_is_never_chosen(monkeypatch, caplog):
    outcomes = {
        0.1: result(math.nan),
        0.2: result(0.9, dropped=1.0),
        0.3: result(0.4, dropped=0.25),
        0.4: result(0.3),
    }
    swept(monkeypatch, lambda rate, seed: outcomes[rate])
    found = compare({"a": Candidate(alone, {"rate": [*outcomes]}, 1)}, small_clients(), **SETTING)
    assert found.tuning[0]["chosen"] == {"rate": 0.3}
    assert found.tuning[0]["dropped"] == [0.0, 1.0, 0.25, 0.0]
    assert found.to_markdown().splitlines()[-1] == "| a | 0.400 ± 0.000 (25% of updates dropped) |"
    for rate, reason in ((0.1, "no score"), (0.2, "all updates dropped")):
        methods = {"a": Candidate(alone, {"rate": [rate]}, 1), "b": ALONE}
        outcomes |= {0.1: outcomes[0.1] if rate == 0.1 else result(0.2)}
        found = compare(methods, small_clients(), **SETTING)
        assert (found.tuning[0]["chosen"], found.missing[0]["reason"]) == ({}, reason)
        assert f"| a | {reason} |" in found.to_markdown()
        assert "methods['a'] at epsilon=inf has no point to choose" in caplog.text


def test_a_run_whose_updates_were_all_dropped_has_no_place_in_the_ranking(monkeypatch):
    swept(monkeypatch, lambda rate, seed: result(0.1, dropped=float(rate == 0.2)))
    build = lambda rate: fedavg(MODEL, local=local(rate))  # noqa: E731
    methods = {
        name: Candidate(build, {"rate": [rate]}) for name, rate in (("good", 0.1), ("lost", 0.2))
    }
    found = compare(methods, small_clients(), **SETTING)
    assert found.to_markdown().splitlines()[-2:] == [
        "| good | 0.100 ± 0.000 |",
        "| lost | all updates dropped |",
    ]
    assert found.differences("good") == []
    assert math.isnan(found.mean("lost", math.inf)[0])
    with pytest.raises(ValueError, match="method must be a method of the comparison, got 'los'"):
        found.mean("los", math.inf)
    public = compare(methods, small_clients(), report="public", **SETTING)
    assert [row.get("dropped") for row in public.rows] == [None, None, 1.0, 1.0]


@pytest.mark.parametrize(
    "status", ["RESOURCE_EXHAUSTED", "INTERNAL: Error dispatching computation"]
)
def test_memory_that_ends_halves_the_points_and_then_leaves_one_out(
    status, monkeypatch, caplog, tmp_path
):
    short = jax.errors.JaxRuntimeError(f"{status}: Out of memory allocating 9 bytes.")
    together = []

    def fake(key, build, values, clients, **options):
        together.append(values["rate"])
        if len(values["rate"]) > 1 or values["rate"] == [0.3]:
            raise short
        if values["rate"] == [0.2] and int(jax.random.key_data(key)[0, -1]) == 1:
            raise MemoryError("Unable to allocate 9 GiB")
        return [result(values["rate"][0])]

    monkeypatch.setattr("jaxfl.run.candidate_runs.sweep", fake)
    methods = {
        "a": Candidate(alone, {"rate": [0.1, 0.2, 0.3]}, 1),
        "b": Candidate(alone, {"rate": [0.3]}, 1),
        "c": ALONE,
    }
    found = compare(methods, small_clients(), folder=tmp_path, **SETTING)
    assert together[:5] == [[0.1, 0.2, 0.3], [0.1, 0.2], [0.1], [0.2], [0.3]]
    assert [(row["method"], row["seed"]) for row in found.rows] == [("a", 0), ("c", 0)]
    assert found.to_markdown().splitlines()[-3:] == [
        "| a | 0.200 (1 of 2 seeds out of memory, 1 point out of memory) |",
        "| b | out of memory |",
        "| c | 0.200 (1 of 2 seeds out of memory) |",
    ]
    assert "methods['a'], tuning, points 2 to 2, (rate=0.3): does not fit in memory" in caplog.text
    assert Comparison.load(tmp_path / "comparison.json").missing == found.missing
    assert "out of memory" in (tmp_path / "report.html").read_text()


def test_other_errors_name_the_candidate_and_the_points(monkeypatch):
    swept(monkeypatch, lambda rate, seed: RuntimeError("no"))
    with pytest.raises(RuntimeError) as found:
        compare({"a": ALONE}, small_clients(), **SETTING)
    assert "methods['a'], tuning, (rate=0.1), (rate=0.2)" in found.value.__notes__[-1]


def test_values_that_decide_shapes_are_compiled_apart(monkeypatch):
    made = []

    def build(rate, batch_size, model, noise_multiplier):
        made.append((rate, batch_size))
        private = LocalSGD(
            optax.sgd(rate), batch_size=batch_size, epochs=2 if batch_size > 2 else 1
        )
        return dp_fedavg(
            model, clip=1.0, noise_multiplier=noise_multiplier, sampling=Poisson(0.5), local=private
        )

    calls = swept(monkeypatch, lambda rate, seed: result(rate))
    wide = mlp((8, 8, 1), 10, hidden=(4,))
    points = grid(rate=[0.1, 0.3], batch_size=[2, 4], model=[MODEL, wide])
    found = compare(
        {"a": Candidate(build, points)}, small_clients(), **SETTING | {"epsilons": (8.0, math.inf)}
    )
    assert {type(size) for _, size in made if not isinstance(size, jax.core.Tracer)} == {int}
    tuning, final = calls[:4], calls[4:]
    for call in tuning:
        assert call["rate"] == [0.1, 0.3, 0.1, 0.3]
        assert call["noise_multiplier"] == [call["noise_multiplier"][0]] * 2 + [0.0] * 2
        assert call.keys() == {"rate", "noise_multiplier"}
    assert [call["rate"] for call in final] == [[0.3, 0.3]] * 2
    assert found.tuning[0]["chosen"] == {"rate": 0.3, "batch_size": 2, "model": "mlp"}
    assert found.tuning[0]["points"]["model"][:2] == ["mlp", "mlp 2"]
    assert found.tuning[0]["scores"]["1"] == [0.1] * 4 + [0.3] * 4


def test_numbers_that_a_program_leaves_open_share_one_as_before(monkeypatch):
    calls = swept(monkeypatch, lambda rate, seed: result(rate))
    candidate = Candidate(private, grid(rate=[0.1, 1], clip=[1.0, 2]))
    found = compare({"a": candidate}, small_clients(), **SETTING)
    assert len(calls) == 1 + len(SETTING["seeds"])
    assert calls[0]["rate"] == [0.1, 0.1, 1.0, 1.0] * 2
    assert found.tuning[0]["chosen"] == {"rate": 1, "clip": 1.0}


def test_grids_keep_whole_numbers_and_take_any_values():
    found = grid(rate=np.array([0.1, 0.3]), epochs=range(1, 3), noise=["grid", None])
    assert found["epochs"] == [1, 1, 2, 2] * 2
    assert {type(value) for value in found["epochs"]} == {int}
    assert found["rate"] == [0.1] * 4 + [0.3] * 4
    assert found["noise"] == ["grid", None] * 4
    for axis, words in (
        ([], "one value"),
        ("text", "list of values"),
        ([math.nan], "NaN"),
        (1, "list of values"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            grid(a=axis)


def test_differences_are_paired_by_seed_where_seeds_are_missing():
    rows = [
        row("A", 1.0, 1, 0.9),
        row("A", 1.0, 2, 0.5),
        row("B", 1.0, 0, 0.1),
        row("B", 1.0, 1, 0.4),
    ]
    (found,) = MADE._replace(rows=rows).differences("B")
    assert found["difference"] == pytest.approx(0.5)


@pytest.mark.slow
def test_a_point_of_another_batch_size_is_the_run_of_that_size():
    def build(batch_size):
        return local_only(MODEL, local=LocalSGD(optax.sgd(0.1), batch_size=batch_size))

    clients, others = small_clients(), hold_out(small_clients(), 0.4, seed=5)
    found = compare(
        {"a": Candidate(build, {"batch_size": [2, 5]}, 2)},
        clients,
        validation=others,
        **SETTING | {"seeds": (0,)},
    )
    for column, size in enumerate((2, 5)):
        run = simulate(100, build(size), others, rounds=2, eval_every=1, progress=False)
        scores = [by_point[column] for by_point in found.tuning[0]["scores"].values()]
        assert scores == pytest.approx([metrics["accuracy"] for metrics in run.metrics])
