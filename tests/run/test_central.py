"""Scores of the global model on a central test set."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, MODEL, small_clients

from jaxfl import LocalSGD, simulate, sweep, write_report
from jaxfl.algorithms import dp_fedavg, fedprox, ifca
from jaxfl.data import load, make_clients
from jaxfl.models import mlp
from jaxfl.privacy import Poisson
from jaxfl.tasks import Task, average

DIGITS = load("digits")
CLIENTS = small_clients()
LOCAL = LocalSGD(optax.sgd(0.3), 4)
QUIET = {"rounds": 4, "eval_every": 2, "progress": False}


def private():
    return dp_fedavg(MODEL, clip=1.0, noise_multiplier=0.5, sampling=Poisson(0.6), local=LOCAL)


def by_hand(result):
    """Return accuracy and mean loss on the test digits, from the model's own outputs."""
    outputs = result.model()(DIGITS.test_inputs)
    losses = jax.device_get(MODEL.task.loss(jnp.asarray(outputs), jnp.asarray(DIGITS.test_labels)))
    return np.mean(outputs.argmax(-1) == DIGITS.test_labels), losses.mean()


@pytest.mark.parametrize("name", ["dp_fedavg", "mixed", "ditto"])
def test_the_score_is_that_of_the_global_model(name):
    result = simulate(3, ALGORITHMS[name](), CLIENTS, central=DIGITS, **QUIET)
    accuracy, loss = by_hand(result)
    last = result.metrics[-1]
    assert last["central_accuracy"] == pytest.approx(accuracy)
    assert last["central_loss"] == pytest.approx(loss, rel=1e-4)
    assert [list(row) for row in result.metrics] == [list(last)] * 2
    without = simulate(3, ALGORITHMS[name](), CLIENTS, **QUIET)
    # The test set changes nothing else.
    kept = [
        {n: v for n, v in row.items() if not n.startswith("central_")} for row in result.metrics
    ]
    assert kept == without.metrics
    jax.tree.map(np.testing.assert_array_equal, result.server, without.server)


def test_a_run_that_was_stopped_has_the_same_scores_and_names_another_test_set(tmp_path):
    whole = simulate(1, private(), CLIENTS, central=DIGITS, **QUIET)
    folder = tmp_path / "run"

    def stop(rows):
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        simulate(1, private(), CLIENTS, central=DIGITS, folder=folder, callbacks=[stop], **QUIET)
    again = simulate(1, private(), CLIENTS, central=DIGITS, folder=folder, **QUIET)
    assert again.restored == 2
    assert again.metrics == whole.metrics
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["central_accuracy"] == whole.metrics[-1]["central_accuracy"]
    page = write_report(folder).read_text()
    assert "on the central test set" in page
    assert "global model, central test set" in page
    other = DIGITS._replace(test_labels=np.roll(DIGITS.test_labels, 1))
    with pytest.raises(ValueError, match="What differs: labels of the central test set"):
        simulate(1, private(), CLIENTS, central=other, folder=folder, **QUIET)


def test_clients_without_tests_are_no_warning_where_the_server_has_some(caplog):
    untested = CLIENTS._replace(test_size=np.zeros_like(CLIENTS.test_size))
    result = simulate(1, private(), untested, central=DIGITS, **QUIET)
    assert result.metrics[-1]["central_accuracy"] == pytest.approx(by_hand(result)[0])
    assert not [record for record in caplog.records if "test example" in record.getMessage()]


def test_public_reports_keep_the_score_because_the_examples_are_the_servers():
    result = simulate(1, private(), CLIENTS, central=DIGITS, report="public", **QUIET)
    assert result.metrics[-1]["central_accuracy"] == pytest.approx(by_hand(result)[0])
    assert "update_norm" not in result.metrics[-1]


def test_points_of_a_sweep_are_scored_each(tmp_path):
    def build(mu):
        return fedprox(MODEL, mu=mu, local=LOCAL)

    values = {"mu": [0.0, 3.0]}
    results = sweep(0, build, values, CLIENTS, central=DIGITS, folder=tmp_path, **QUIET)
    scores = [result.metrics[-1]["central_accuracy"] for result in results]
    assert scores == pytest.approx([by_hand(result)[0] for result in results])
    assert scores[0] != scores[1]


def test_names_of_central_scores_are_taken():
    score = average(lambda outputs, labels: outputs[:, 0])
    with pytest.raises(ValueError, match=r"must not begin with 'central_'.* got 'central_loss'"):
        Task("own", MODEL.task.loss, {"central_loss": score})
    method = private()

    def client_update(key, server, client, data):
        message, client, info = method.client_update(key, server, client, data)
        return message, client, info | {"central_rate": info["loss"]}

    with pytest.raises(ValueError, match=r"got \['central_rate'\] from client_update"):
        simulate(0, method._replace(client_update=client_update), CLIENTS, **QUIET)


def test_clients_need_no_test_examples(tmp_path):
    rows = [np.arange(20 * i, 20 * i + 20) for i in range(5)]
    clients = make_clients(DIGITS, rows, [[]] * 5)
    result = simulate(0, private(), clients, central=DIGITS, folder=tmp_path, **QUIET)
    assert math.isnan(result.metrics[-1]["accuracy"])
    assert result.metrics[-1]["central_accuracy"] == pytest.approx(by_hand(result)[0])
    assert "on the central test set" in write_report(tmp_path).read_text()


@pytest.mark.parametrize(
    ("method", "data", "words"),
    [
        (
            lambda: ifca(MODEL, clusters=2, local=LOCAL),
            DIGITS,
            "central must be None for method='ifca', which has no global model: one part",
        ),
        (
            private,
            DIGITS._replace(test_inputs=DIGITS.test_inputs[:0], test_labels=DIGITS.test_labels[:0]),
            "central must have test examples, got 'digits' without any",
        ),
        (
            private,
            DIGITS._replace(test_labels=DIGITS.test_labels + 1, classes=11),
            r"central must have examples for the method's network, .*central.labels up to 10",
        ),
        (
            lambda: dp_fedavg(
                mlp((8, 8, 1), 10, hidden=()), clip=1.0, noise_multiplier=1.0, sampling=Poisson(0.5)
            ),
            (
                DIGITS.train_inputs[:, :7],
                DIGITS.train_labels,
                DIGITS.test_inputs[:, :7],
                DIGITS.test_labels,
            ),
            r"central must have examples .* shape \(7, 8, 1\), the shape of central.inputs",
        ),
    ],
)
def test_what_does_not_fit_raises_before_the_first_round(method, data, words):
    with pytest.raises(ValueError, match=words):
        simulate(0, method(), CLIENTS, central=data, **QUIET)
