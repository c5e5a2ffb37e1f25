from typing import Any

import jax
import numpy as np
import optax
import pytest
import reference
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients

from jaxfl import simulate
from jaxfl.algorithms import ditto, dp_fedavg, local_only
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import Poisson

KEY = jax.random.key(29)
PRIVATE: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
LOCAL: dict[str, Any] = {"local": LocalSGD(optax.sgd(0.2), 4, 2)}
PERSONAL = LocalSGD(optax.sgd(0.1, momentum=0.5), 4, 3)


def run(algorithm, rounds=3):
    return simulate(KEY, algorithm, small_clients(), rounds=rounds, progress=False)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_what_is_sent_and_accounted_is_dp_fedavgs_to_the_bit():
    found, expected = (
        run(ditto(MODEL, personal=PERSONAL, **LOCAL, **PRIVATE)),
        run(dp_fedavg(MODEL, **LOCAL, **PRIVATE)),
    )
    assert_same(found.server, expected.server)
    assert_same(found.ledger, expected.ledger)
    assert found.statement["honest"]["aggregate"] == expected.statement["honest"]["aggregate"]


@pytest.mark.slow
def test_without_penalty_it_is_local_training_to_the_bit():
    found = run(ditto(MODEL, penalty_weight=0.0, personal=PERSONAL, **LOCAL, **PRIVATE))
    expected = run(local_only(MODEL, local=PERSONAL, sampling=PRIVATE["sampling"]))
    assert_same(found.states, expected.states)
    assert_same(found.scores, expected.scores)


def test_a_huge_penalty_holds_the_personal_model_at_the_broadcast_one():
    rate = 1e-6
    algorithm = ditto(
        MODEL, penalty_weight=1 / rate, personal=LocalSGD(optax.sgd(rate), 16, steps=4)
    )
    server, _ = algorithm.init(KEY, len(SIZES))
    away = jax.tree.map(lambda leaf: leaf + 0.1, server.params)
    _, kept, _ = algorithm.client_update(KEY, server, away, client_data())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), kept, server.params)


def test_equals_the_papers_steps_in_numpy():
    algorithm = ditto(
        MODEL, penalty_weight=2.0, personal=LocalSGD(optax.sgd(0.1), 16, steps=5), **LOCAL
    )
    server, _ = algorithm.init(KEY, len(SIZES))
    own = jax.tree.map(lambda leaf: leaf * 1.5, server.params)
    _, found, _ = algorithm.client_update(KEY, server, own, client_data())
    v, w, gradient = (
        reference.double(own),
        reference.double(server.params),
        reference.whole_gradient(client_data()),
    )
    for _ in range(5):
        v = jax.tree.map(lambda v, g, w: v - 0.1 * (g + 2.0 * (v - w)), v, gradient(v), w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, v)
    assert_same(algorithm.personalize(KEY, server, found, client_data()), found)


def test_wrong_arguments_name_themselves():
    with pytest.raises(ValueError, match=r"penalty_weight must be .* got -1\.0"):
        ditto(MODEL, penalty_weight=-1.0)
