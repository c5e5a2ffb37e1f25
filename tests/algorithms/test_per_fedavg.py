from typing import Any

import jax
import numpy as np
import optax
import pytest
import reference
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients

from jaxfl import simulate
from jaxfl.algorithms import dp_fedavg, per_fedavg
from jaxfl.local.train import LocalSGD, _shuffle
from jaxfl.privacy import Poisson

KEY = jax.random.key(43)
PRIVATE: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}


def run(algorithm, rounds=3):
    return simulate(KEY, algorithm, small_clients(), rounds=rounds, progress=False)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), a, b)


def update_of(algorithm, data):
    server, _ = algorithm.init(KEY, len(SIZES))
    return server, algorithm.client_update(KEY, server, (), data)[0].update


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("client", [0, 5])
@pytest.mark.parametrize("microbatch", [None, 2])
def test_equals_the_papers_steps_in_numpy(rate, client, microbatch):
    # Client 5 has one example, which is both halves of a batch.
    data = client_data(client)
    algorithm = per_fedavg(
        MODEL._replace(microbatch=microbatch),
        inner_learning_rate=rate,
        local=LocalSGD(optax.sgd(0.1), 16, epochs=3),
    )
    server, update = update_of(algorithm, data)
    w = start = reference.double(server.params)
    for epoch in range(3):
        order = np.asarray(
            _shuffle(jax.random.fold_in(KEY, epoch), data.padded, np.asarray(data.size))
        )[: int(data.size)]
        rows = np.asarray(data._rows)[order]
        first, second = rows[::2], rows[1::2] if len(rows) > 1 else rows
        inputs, labels = np.asarray(data._inputs), np.asarray(data._labels)
        ahead = reference.numpy_gradient(w, inputs[first], labels[first])
        ahead = jax.tree.map(lambda w, g: w - rate * g, w, ahead)
        slope = reference.numpy_gradient(ahead, inputs[second], labels[second])
        w = jax.tree.map(lambda w, g: w - 0.1 * g, w, slope)
    assert_close(update, optax.tree.sub(w, start))


def test_a_client_is_evaluated_one_step_further():
    algorithm = per_fedavg(MODEL, personal=LocalSGD(optax.sgd(0.3), 16, steps=1))
    server, _ = algorithm.init(KEY, len(SIZES))
    w = reference.double(server.params)
    expected = jax.tree.map(lambda w, g: w - 0.3 * g, w, reference.whole_gradient(client_data())(w))
    assert_close(algorithm.personalize(KEY, server, (), client_data()), expected)


@pytest.mark.slow
def test_personal_steps_change_the_evaluation_and_not_the_transcript():
    one, other = (
        run(per_fedavg(MODEL, personal=LocalSGD(optax.sgd(rate), 4), **PRIVATE))
        for rate in (0.01, 0.5)
    )
    jax.tree.map(np.testing.assert_array_equal, one.server, other.server)
    assert not np.array_equal(one.scores["loss"], other.scores["loss"])
    expected = run(dp_fedavg(MODEL, **PRIVATE))
    assert one.statement["honest"]["aggregate"] == expected.statement["honest"]["aggregate"]


def test_wrong_arguments_name_themselves():
    with pytest.raises(ValueError, match=r"inner_learning_rate must be .* got -1\.0"):
        per_fedavg(MODEL, inner_learning_rate=-1.0)
