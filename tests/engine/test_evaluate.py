"""Scores by a result or a trained model, of clients, newcomers and a central test set."""

import jax
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, MODEL, small_clients

from jaxfl import TrainedModel, evaluate, simulate
from jaxfl.data import leave_out, load
from jaxfl.models import lora, mlp

DIGITS = load("digits")


@pytest.fixture(scope="module")
def parts():
    return leave_out(small_clients(), 0.3, seed=4)


@pytest.fixture(scope="module")
def result(parts):
    """Return the result of a run of APFL, whose clients keep models of their own."""
    return simulate(3, ALGORITHMS["apfl"](), parts[0], rounds=3, progress=False)


def scores_by_hand(model, clients):
    found = []
    for client in range(clients.num_clients):
        rows = clients.test[client][: clients.test_size[client]]
        found.append(np.mean(model.predict(clients.inputs[rows]) == clients.labels[rows]))
    return found


def test_a_result_brings_its_key_states_and_rounds(result, parts):
    method = ALGORITHMS["apfl"]()
    row, scores = evaluate(method, result, parts[0])
    jax.tree.map(np.testing.assert_array_equal, scores, dict(result.scores))
    assert row == {name: result.metrics[-1][name] for name in row}
    newcomers, _ = evaluate(method, result, parts[1])
    again, _ = evaluate(method, result.server, parts[1], key=3, rounds=3)
    assert newcomers == again


def test_a_trained_model_scores_clients_and_a_central_test_set_alone(result, parts):
    model = result.model(2)
    row, scores = evaluate(None, model, parts[1])
    by_hand = scores_by_hand(model, parts[1])
    assert scores["accuracy"] == pytest.approx(by_hand)
    assert row["accuracy"] == pytest.approx(np.mean(by_hand))
    arrays = (DIGITS.train_inputs, DIGITS.train_labels, DIGITS.test_inputs, DIGITS.test_labels)
    row, scores = evaluate(None, model, arrays)
    assert scores["accuracy"].shape == (1,)
    assert row["accuracy"] == pytest.approx(
        np.mean(model.predict(DIGITS.test_inputs) == DIGITS.test_labels)
    )


def test_a_central_test_set_is_scored_by_the_global_model(result):
    row, _ = evaluate(ALGORITHMS["apfl"](), result, DIGITS)
    by_hand = result.model().predict(DIGITS.test_inputs) == DIGITS.test_labels
    assert row["accuracy"] == pytest.approx(by_hand.mean())
    assert row["accuracy_std"] == 0


def test_frozen_weights_of_the_model_count_and_not_those_of_its_network(parts):
    base = mlp((8, 8, 1), 10, hidden=(8,))
    start = base.init(jax.random.key(0))
    network = lora(base, start, rank=2)
    params = network.init(jax.random.key(1))
    other = jax.tree.map(lambda leaf: leaf[::-1], network.frozen)
    models = [TrainedModel(network, params), TrainedModel(network, params, other)]
    found = [evaluate(None, model, parts[0])[1]["accuracy"] for model in models]
    assert found[1] == pytest.approx(scores_by_hand(models[1], parts[0]))
    assert not np.array_equal(*found)


def test_what_is_missing_or_does_not_fit_is_named(result, parts):
    method = ALGORITHMS["apfl"]()
    model = TrainedModel(mlp((4, 4, 1), 10), mlp((4, 4, 1), 10).init(jax.random.key(0)))
    lonely = ALGORITHMS["local_only"]()
    alone = simulate(0, lonely, parts[0], rounds=1, progress=False)
    for given, words in [
        ((method, result.server, parts[1]), "key must be the key or the seed of the run, got None"),
        ((None, result, parts[1]), "algorithm must be the method that was run, got None"),
        ((None, model, parts[1]), r"clients must have examples for the method's network"),
        (
            (lonely, alone, DIGITS),
            "clients must be clients for method='local_only', which has no global model",
        ),
        ((method, result, DIGITS._replace(test_inputs=DIGITS.test_inputs[:, :4])), "shape"),
    ]:
        with pytest.raises(ValueError, match=words):
            evaluate(*given)
    with pytest.raises(TypeError, match="clients must be"):
        evaluate(method, result, [DIGITS])
    assert MODEL.input_shape == (8, 8, 1)
