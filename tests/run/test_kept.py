"""States of the best evaluation, which test scores choose."""

import jax
import numpy as np
import optax
import pytest
from algorithms_table import MODEL, small_clients

from jaxfl import LocalSGD, evaluate, simulate, sweep
from jaxfl.algorithms import ditto, dp_fedavg, fedprox
from jaxfl.data import load, make_clients
from jaxfl.models import mlp
from jaxfl.privacy import Poisson
from jaxfl.run.kept import BestModels
from jaxfl.tasks import regression

DIGITS = load("digits")
CLIENTS = small_clients()
LOCAL = LocalSGD(optax.sgd(0.3), 4)
KEEP = {"rounds": 6, "eval_every": 1, "progress": False, "keep": "best"}


def noisy():
    """Return a method whose noise makes scores rise and fall."""
    options = {"clip": 1.0, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
    return ditto(MODEL, personal=LOCAL, local=LOCAL, **options)


def test_the_kept_models_have_the_best_row_and_everything_else_is_the_last_rounds():
    result = simulate(2, noisy(), CLIENTS, central=DIGITS, **KEEP)
    scores = [row["accuracy"] for row in result.metrics]
    best = int(np.argmax(scores))
    assert result.best.round == best + 1 < 6
    row, _ = evaluate(
        noisy(), result.best.server, CLIENTS, key=2, states=result.best.states, rounds=best + 1
    )
    assert row["accuracy"] == scores[best]
    model = result.model()
    assert (model.about["round"], model.about["keep"]) == (best + 1, "best")
    right = np.mean(model.predict(DIGITS.test_inputs) == DIGITS.test_labels)
    assert right == pytest.approx(result.metrics[best]["central_accuracy"])
    assert "no epsilon covers a choice by clients' test examples" in model.about["privacy"]
    assert "round_chosen_by_scores" in result.statement["warnings"]
    last = simulate(2, noisy(), CLIENTS, central=DIGITS, **KEEP | {"keep": "last"})
    jax.tree.map(np.testing.assert_array_equal, result.server, last.server)
    assert result.metrics == last.metrics
    assert last.best is None
    assert last.model().about["round"] == 6
    assert "round_chosen_by_scores" not in last.statement["warnings"]


def test_a_run_that_was_stopped_keeps_the_same_bits(tmp_path):
    whole = simulate(2, noisy(), CLIENTS, **KEEP)

    def stop(rows):
        if len(rows) == whole.best.round + 1:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        simulate(2, noisy(), CLIENTS, folder=tmp_path, callbacks=[stop], **KEEP)
    for _ in range(2):
        again = simulate(2, noisy(), CLIENTS, folder=tmp_path, **KEEP)
        assert again.best.round == whole.best.round < again.restored + 1
        kept = (whole.best.server, whole.best.states)
        jax.tree.map(np.testing.assert_array_equal, (again.best.server, again.best.states), kept)
    with pytest.raises(ValueError, match=r"What differs: the model that is kept \(`keep`\)"):
        simulate(2, noisy(), CLIENTS, folder=tmp_path, **KEEP | {"keep": "last"})


def test_each_point_of_a_sweep_keeps_its_own():
    results = sweep(
        0,
        lambda mu: fedprox(MODEL, mu=mu, local=LocalSGD(optax.sgd(2.0), 4)),
        {"mu": [0.0, 1.0]},
        CLIENTS,
        central=DIGITS,
        **KEEP,
    )
    for result in results:
        scores = [row["accuracy"] for row in result.metrics]
        assert result.best.round == np.argmax(scores) + 1
        right = np.mean(result.model().predict(DIGITS.test_inputs) == DIGITS.test_labels)
        row = result.metrics[result.best.round - 1]
        assert right == pytest.approx(row["central_accuracy"])


def test_without_tests_of_clients_the_central_score_decides():
    rows = [np.arange(20 * i, 20 * i + 20) for i in range(5)]
    clients = make_clients(DIGITS, rows, [[]] * 5)
    method = dp_fedavg(MODEL, clip=1.0, noise_multiplier=1.0, sampling=Poisson(0.6), local=LOCAL)
    result = simulate(1, method, clients, central=DIGITS, **KEEP)
    scores = [row["central_accuracy"] for row in result.metrics]
    assert result.best.round == np.argmax(scores) + 1
    unknown = simulate(1, method, clients, **KEEP | {"rounds": 2})
    assert unknown.best is None
    assert unknown.model().about["keep"] == "last"


def test_the_first_of_equal_scores_counts_and_lower_may_be_better():
    task = regression("mse")
    best = BestModels(task, True, [np.zeros(2)], [()])
    for index, score in enumerate([np.nan, 3.0, 1.0, 1.0, np.inf, 2.0]):
        # The global model's score is on another scale, so it must not stand in for an unknown one.
        row = {"round": index + 1, "mse": score, "central_mse": 0.0}
        for i in best.better([row]):
            best.keep(i, row, np.full(2, index), ())
    (kept,) = best.snapshots()
    assert kept is not None
    assert kept.round == 3
    np.testing.assert_array_equal(kept.server, [2, 2])


def test_states_that_lie_in_files_are_not_copied():
    with pytest.raises(ValueError, match="keep must be 'last' with states='host'"):
        simulate(2, noisy(), CLIENTS, states="host", **KEEP)
    free = dp_fedavg(
        mlp((8, 8, 1), 10, hidden=()), clip=1.0, noise_multiplier=1.0, sampling=Poisson(0.6)
    )
    result = simulate(2, free, CLIENTS, states="host", **KEEP | {"rounds": 2})
    assert result.best.round in (1, 2)
