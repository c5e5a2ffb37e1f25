"""Unseen clients: their draw, how methods serve them, and that no run reads their data."""

import math
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, MODEL, small_clients

import jaxfl.run.candidate_runs
from jaxfl import Candidate, Comparison, LocalSGD, compare, evaluate, simulate, sweep
from jaxfl.algorithms import ditto, dp_fedavg, fedavg, fine_tuned, local_only
from jaxfl.data import leave_out
from jaxfl.models import mlp
from jaxfl.privacy import FixedSize, Full

SHARE = 0.3
LOCAL = LocalSGD(optax.sgd(0.3), batch_size=4, epochs=2)
SETTING: dict[str, Any] = {"rounds": 2, "seeds": (0, 1), "progress": False}


def private(noise_multiplier):
    return dp_fedavg(
        MODEL, clip=1.0, noise_multiplier=noise_multiplier, sampling=Full(), local=LOCAL
    )


def alone(rate):
    return local_only(MODEL, local=LocalSGD(optax.sgd(rate), 4))


def rows_of(clients, split, client):
    return getattr(clients, split)[client][: getattr(clients, f"{split}_size")[client]]


def logits(params, inputs):
    """Return the logits of the tests' network, in NumPy."""
    hidden, head = (jax.device_get(params[name]) for name in MODEL.layers)
    x = np.asarray(MODEL.prepare(inputs), np.float64).reshape(len(inputs), -1)
    return np.maximum(x @ hidden["kernel"] + hidden["bias"], 0) @ head["kernel"] + head["bias"]


def accuracy(params, clients, client):
    rows = rows_of(clients, "test", client)
    return np.mean(logits(params, clients.inputs[rows]).argmax(-1) == clients.labels[rows])


def mean_accuracy(params, clients):
    """Return the mean over clients of accuracy, with a list of weights, or one for all."""
    own = params if isinstance(params, list) else [params] * clients.num_clients
    return np.mean([accuracy(one, clients, i) for i, one in enumerate(own)])


def test_each_client_is_in_one_part_with_its_own_rows():
    clients = small_clients()
    parts = leave_out(clients, SHARE, seed=4)
    assert [part.num_clients for part in parts] == [8, 3]  # a share of 0.3 of 11
    for split in ("train", "test"):
        found = [
            rows_of(part, split, i).tolist() for part in parts for i in range(part.num_clients)
        ]
        assert sorted(found) == sorted(
            rows_of(clients, split, i).tolist() for i in range(clients.num_clients)
        )
    assert [part.num_clients for part in leave_out(clients, 0.01, seed=4)] == [10, 1]
    assert [part.num_clients for part in leave_out(clients, 0.99, seed=4)] == [1, 10]


def test_the_choice_is_drawn_by_the_seed_alone_and_evenly():
    clients = small_clients((1,) * 10)
    first = [rows_of(leave_out(clients, 0.2, seed=seed)[1], "train", 0)[0] for seed in range(400)]
    again = [rows_of(leave_out(clients, 0.2, seed=seed)[1], "train", 0)[0] for seed in range(400)]
    assert first == again
    # The smaller of 2 of 10 numbers is i with probability (9 - i) / 45.
    counts = np.bincount(first, minlength=10)
    expected = 400 * (9 - np.arange(10)) / 45
    assert np.all(np.abs(counts - expected) <= 4 * np.sqrt(np.maximum(expected, 1)))
    numpys = [min(np.random.default_rng(seed).permutation(10)[:2]) for seed in range(400)]
    assert first != numpys  # a partition may have been drawn by them


def test_a_single_client_cannot_be_divided():
    with pytest.raises(ValueError, match="clients must be at least 2, got 1"):
        leave_out(small_clients((3,)), 0.5, seed=0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "centaur" else pytest.mark.slow)
        for name in ALGORITHMS
    ],
)
def test_with_a_runs_key_states_and_rounds_scores_are_those_of_its_last_evaluation(name):
    clients, algorithm = small_clients(), ALGORITHMS[name]()
    result = simulate(3, algorithm, clients, rounds=3, progress=False)
    row, scores = evaluate(algorithm, result.server, clients, key=3, states=result.states, rounds=3)
    for metric, values in result.scores.items():
        np.testing.assert_array_equal(scores[metric], values)
    assert row == {metric: value for metric, value in result.metrics[-1].items() if metric in row}


def test_newcomers_train_before_evaluation_on_their_own_examples():
    """Newcomers take one step on all of their examples, at the rate of the last round."""
    clients, rate = small_clients(), 0.5
    participants, newcomers = leave_out(clients, SHARE, seed=2)
    base = fedavg(MODEL, local=LOCAL)
    method = fine_tuned(
        base, local=LocalSGD(optax.sgd(2 * rate), batch_size=64, decay=lambda t: 0.5**t)
    )
    result = simulate(0, method, participants, rounds=2, progress=False)
    _, scores = evaluate(method, result.server, newcomers, key=5, rounds=2)

    def loss(params, inputs, labels):
        own = MODEL.apply(params, MODEL.prepare(inputs))
        return optax.softmax_cross_entropy_with_integer_labels(own, labels).mean()

    for client in range(newcomers.num_clients):
        rows = rows_of(newcomers, "train", client)
        gradient = jax.grad(loss)(
            result.server.params, newcomers.inputs[rows], newcomers.labels[rows]
        )
        trained = jax.tree.map(
            lambda value, slope: value - rate * slope, result.server.params, gradient
        )
        assert scores["accuracy"][client] == pytest.approx(accuracy(trained, newcomers, client))
        tested = rows_of(newcomers, "test", client)
        expected = loss(trained, newcomers.inputs[tested], newcomers.labels[tested])
        assert scores["loss"][client] == pytest.approx(float(expected), rel=1e-4)


def test_newcomers_of_a_method_that_keeps_models_have_the_first_one():
    participants, newcomers = leave_out(small_clients(), SHARE, seed=2)
    method = ditto(MODEL, personal=LOCAL, local=LOCAL)
    result = simulate(7, method, participants, rounds=1, progress=False)
    _, first = method.init(jax.random.split(jax.random.key(7), 3)[0], newcomers.num_clients)
    row, _ = evaluate(method, result.server, newcomers, key=7)
    untrained = [
        jax.tree.map(lambda leaf, i=i: leaf[i], first) for i in range(newcomers.num_clients)
    ]
    assert row["accuracy"] == pytest.approx(mean_accuracy(untrained, newcomers))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"server": ()},
            r"server must be like Server\(.*, which init makes, got \(\). Give the state that",
        ),
        ({"server": mlp}, "server must be arrays, got <function"),
        ({"states": ()}, r"states must be like .*, which init makes, got \(\)"),
        (
            {"states": "of ten"},
            r"states\['.*'\] must be float32\(11, .*, which init makes, got float32\(10, ",
        ),
        ({"rounds": 0}, "rounds must be .* got 0"),
        (
            {"clients": small_clients()._replace(labels=small_clients().labels + 1)},
            "clients.labels up to 10",
        ),
    ],
)
def test_what_does_not_fit_raises_before_anything_compiles(changes, words, monkeypatch):
    def fails(*arguments, **options):
        raise AssertionError("it was placed")

    monkeypatch.setattr("jaxfl.run.evaluate.place", fails)
    method = ditto(MODEL)
    server, _ = method.init(jax.random.key(0), 11)
    if changes.get("states") == "of ten":
        changes = {"states": method.init(jax.random.key(0), 10)[1]}
    arguments = {"server": server, "clients": small_clients(), "key": 0} | changes
    with pytest.raises((TypeError, ValueError), match=words):
        evaluate(method, **arguments)


def test_the_models_must_have_the_shapes_of_the_method():
    server, _ = fedavg(mlp((8, 8, 1), 10, hidden=(5,))).init(jax.random.key(0), 11)
    with pytest.raises(
        ValueError,
        match=r"server.params.* must be float32\(16,\), which init makes, got float32\(5,",
    ):
        evaluate(fedavg(MODEL), server, small_clients(), key=0)


@pytest.fixture
def servers(monkeypatch):
    """Return a list with the number of clients and the server states of each sweep of `compare`."""
    found = []

    def recorded(key, build, values, clients, **options):
        results = sweep(key, build, values, clients, **options)
        found.append((clients.num_clients, jax.device_get([result.server for result in results])))
        return results

    monkeypatch.setattr(jaxfl.run.candidate_runs, "sweep", recorded)
    return found


@pytest.fixture(scope="module")
def clients():
    return small_clients()


def test_unseen_scores_are_those_of_an_evaluation_by_hand(clients, tmp_path):
    methods = {"private": Candidate(private), "alone": Candidate(alone, {"rate": [1e-6, 0.3]}, 3)}
    options = SETTING | {"epsilons": (5.0, math.inf), "unseen": SHARE, "folder": tmp_path}
    found = compare(methods, clients, **options)
    by_row = {(row["method"], row["epsilon"], row["seed"]): row for row in found.rows}
    assert len(by_row) == 6
    rounds = next(row["rounds"] for row in found.tuning if row["method"] == "alone")
    for seed in (0, 1):
        participants, newcomers = leave_out(clients, SHARE, seed=seed)
        result = simulate(seed, private(0.0), participants, rounds=2, progress=False)
        row = by_row["private", math.inf, seed]
        assert row["accuracy"] == pytest.approx(mean_accuracy(result.server.params, participants))
        assert row["unseen"] == pytest.approx(mean_accuracy(result.server.params, newcomers))
        # What sends nothing is the same with whomever it trains.
        lonely = simulate(seed, alone(0.3), newcomers, rounds=rounds, progress=False)
        row = by_row["alone", math.inf, seed]
        models = [
            jax.tree.map(lambda leaf, i=i: leaf[i], lonely.states)
            for i in range(newcomers.num_clients)
        ]
        assert row["chosen"] == {"rate": 0.3}
        assert row["unseen"] == pytest.approx(mean_accuracy(models, newcomers))
    assert compare(methods, clients, **options) == found
    shown = [by_row["private", 5.0, seed]["unseen"] for seed in (0, 1)]
    assert found.mean("private", 5.0, "unseen") == pytest.approx(
        (np.mean(shown), np.std(shown, ddof=1))
    )
    assert f"| private | {np.mean(shown):.3f} ± " in found.to_markdown("unseen")
    assert found.to_latex("unseen").splitlines()[2].startswith("unseen & 5")
    assert "30% of the clients, drawn by the seed, take no part" in found.protocol
    assert "<th>unseen clients</th>" in (tmp_path / "report.html").read_text()


def tuned(noise_multiplier):
    """Return a method whose clients train before evaluation, only after the second round."""
    given = {"clip": 1.0, "noise_multiplier": noise_multiplier, "sampling": Full()}
    steps = LocalSGD(optax.sgd(0.3), 4, epochs=20, decay=lambda index: 1.0 * (index == 1))
    return fine_tuned(ditto(MODEL, personal=LOCAL, local=LOCAL, **given), local=steps)


def with_heads(noise_multiplier):
    """Return a method whose clients keep heads, and fit them before evaluation."""
    return ALGORITHMS["centaur"](z=noise_multiplier)


@pytest.mark.parametrize("build", [tuned, with_heads])
def test_points_of_one_program_serve_as_each_does_alone(build, clients):
    options = SETTING | {"seeds": (3,), "epsilons": (5.0, math.inf), "unseen": SHARE}
    found = compare({"one": Candidate(build)}, clients, **options)
    participants, newcomers = leave_out(clients, SHARE, seed=3)
    result = simulate(3, build(0.0), participants, rounds=2, progress=False)
    row, _ = evaluate(build(0.0), result.server, newcomers, key=3, rounds=2)
    assert found.rows[1]["epsilon"] == math.inf
    assert found.rows[1]["unseen"] == pytest.approx(row["accuracy"])


def test_nothing_of_unseen_clients_reaches_training(clients, servers):
    """Other examples of unseen clients change their score, but no bit of the server's state."""
    _, newcomers = leave_out(clients, SHARE, seed=0)
    theirs = np.concatenate([newcomers.train.flat, newcomers.test.flat])
    inputs, labels = np.array(clients.inputs), np.array(clients.labels)
    inputs[theirs] = 255 - inputs[theirs]
    labels[theirs] = (labels[theirs] + 5) % 10
    methods = {"private": Candidate(private)}
    options = SETTING | {"rounds": 10, "seeds": (0,), "unseen": SHARE}
    found = compare(methods, clients, **options)
    other = compare(methods, clients._replace(inputs=inputs, labels=labels), **options)
    (number, first), (_, second) = servers
    assert number == 8
    jax.tree.map(np.testing.assert_array_equal, first, second)
    own, changed = ({**row, "unseen": None} for row in (found.rows[0], other.rows[0]))
    assert own == changed
    assert found.rows[0]["unseen"] != other.rows[0]["unseen"]


def test_noise_and_tuning_are_the_participants(clients, servers):
    """Two of 8 clients take part in a round. Two of 11 would need less noise."""
    build = partial(dp_fedavg, MODEL, sampling=FixedSize(2), local=LOCAL)
    methods = {"private": Candidate(build, {"clip": [0.5, 1.0]})}
    found = compare(methods, clients, epsilons=(1.0,), unseen=SHARE, **SETTING)
    assert [row["stated"] for row in found.rows] == pytest.approx([1.0, 1.0], rel=2e-3)
    assert [number for number, _ in servers] == [8, 8, 8]


def test_without_unseen_clients_nothing_changes(clients):
    methods = {"private": Candidate(private)}
    options = SETTING | {"seeds": (0,), "epsilons": (5.0,)}
    found = compare(methods, clients, **options)
    assert compare(methods, clients, unseen=0, **options) == found
    result = simulate(0, private(0.0), clients, rounds=2, progress=False)
    free = compare(methods, clients, **options | {"epsilons": (math.inf,)})
    assert free.rows[0]["accuracy"] == pytest.approx(result.metrics[-1]["accuracy"])
    assert "unseen" not in found.rows[0]
    assert "no part" not in found.protocol
    with pytest.raises(ValueError, match="column must be a column of numbers, got 'unseen'"):
        found.mean("private", 5.0, "unseen")


def test_clients_of_a_seed_and_validation_clients_are_divided_too(servers):
    methods = {"alone": Candidate(alone, {"rate": [0.1]}, 1)}

    def drawn(seed):
        return small_clients((5,) * (10 + 10 * seed))

    compare(methods, drawn, validation=small_clients((4,) * 20), unseen=0.2, **SETTING)
    assert [number for number, _ in servers] == [16, 8, 2, 16, 4]


def test_a_method_that_cannot_serve_newcomers_is_found_before_the_first_round(clients, monkeypatch):
    def build(rate):
        method = fedavg(MODEL, local=LocalSGD(optax.sgd(rate)))

        def init(key, num_clients):
            if num_clients < 4:
                raise ValueError(f"{num_clients} clients are too few")
            return method.init(key, num_clients)

        return method._replace(init=init)

    def fails(*arguments, **options):
        raise AssertionError("it ran")

    monkeypatch.setattr(jaxfl.run.candidate_runs, "sweep", fails)
    with pytest.raises(
        ValueError,
        match=r"methods\['late'\] at \(rate=0.1\): init must run, got .*3 clients are too few",
    ):
        compare({"late": Candidate(build, {"rate": [0.1, 0.2]})}, clients, unseen=SHARE, **SETTING)


def test_a_run_whose_updates_were_all_dropped_has_no_unseen_score():
    row = {
        "method": "a",
        "epsilon": 1.0,
        "stated": 1.0,
        "seed": 0,
        "chosen": {},
        "accuracy": 0.5,
        "unseen": 0.4,
    }
    found = Comparison([row | {"dropped": 1.0}], [], "accuracy", False, "by hand")
    assert math.isnan(found.mean("a", 1.0, "unseen")[0])
