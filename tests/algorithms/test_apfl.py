from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients

from jaxfl import simulate
from jaxfl.algorithms import apfl, dp_fedavg, local_only
from jaxfl.algorithms.apfl import Own
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import Poisson

KEY = jax.random.key(37)
PRIVATE: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
LOCAL: dict[str, Any] = {"local": LocalSGD(optax.sgd(0.1, momentum=0.5), 4, 2)}


def run(algorithm, rounds=3):
    return simulate(KEY, algorithm, small_clients(), rounds=rounds, progress=False)


def assert_close(a, b, **tolerance):
    options: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6} | tolerance
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **options), a, b)


@pytest.mark.slow
def test_what_is_sent_and_accounted_is_dp_fedavgs():
    found = run(apfl(MODEL, alpha_learning_rate=0.5, **LOCAL, **PRIVATE))
    expected = run(dp_fedavg(MODEL, **LOCAL, **PRIVATE))
    assert_close(found.server, expected.server)
    assert found.statement["honest"]["aggregate"] == expected.statement["honest"]["aggregate"]
    rows = found.metrics[-1], expected.metrics[-1]
    assert rows[0]["train_loss"] == pytest.approx(rows[1]["train_loss"], rel=1e-5)


@pytest.mark.slow
def test_all_personal_is_local_training():
    found = run(apfl(MODEL, alpha=1.0, **LOCAL, **PRIVATE))
    expected = run(local_only(MODEL, sampling=PRIVATE["sampling"], **LOCAL))
    assert_close(found.states.params, expected.states)
    np.testing.assert_array_equal(found.states.alpha, 1)


def test_all_shared_is_fedavg():
    algorithm = apfl(MODEL, alpha=0.0, **LOCAL)
    server, states = algorithm.init(KEY, len(SIZES))
    own = jax.tree.map(lambda leaf: leaf[0] + (leaf.ndim > 1), states)
    _, after, _ = algorithm.client_update(KEY, server, own, client_data())
    jax.tree.map(np.testing.assert_array_equal, after, own)
    jax.tree.map(
        np.testing.assert_array_equal,
        algorithm.personalize(KEY, server, own, client_data()),
        server.params,
    )


@pytest.mark.parametrize("rate", [0.0, 0.05, 100.0])
def test_equals_the_papers_steps_in_numpy(rate):
    algorithm = apfl(
        MODEL, alpha=0.3, alpha_learning_rate=rate, local=LocalSGD(optax.sgd(0.1), 16, steps=4)
    )
    server, _ = algorithm.init(KEY, len(SIZES))
    own = Own(jax.tree.map(lambda leaf: leaf * 1.5 + 0.01, server.params), jnp.float32(0.3))
    message, found, _ = algorithm.client_update(KEY, server, own, client_data())
    v, start = reference.double(own.params), reference.double(server.params)
    w, alpha, path, gradient = start, 0.3, [], reference.whole_gradient(client_data())
    for _ in range(4):
        g = gradient(mix(alpha, v, w))
        slope = sum(
            float((g * (v - w)).sum())
            for g, v, w in zip(*map(jax.tree.leaves, (g, v, w)), strict=True)
        )
        w_next = jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient(w))
        v = reference.add(v, -0.1 * alpha, g)
        w, alpha = w_next, min(1.0, max(0.0, alpha - rate * slope))
        path.append(alpha)
    assert_close(message.update, optax.tree.sub(w, start), rtol=1e-4)
    assert_close(found, Own(v, np.float64(alpha)), rtol=1e-4)
    assert_close(
        algorithm.personalize(KEY, server, found, client_data()), mix(alpha, v, start), rtol=1e-4
    )
    assert {0.0: path == [0.3] * 4, 0.05: 0.3 not in path, 100.0: {0.0, 1.0} & {*path}}[rate]


def mix(alpha, v, w):
    return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, v, w)


def test_wrong_arguments_name_themselves():
    with pytest.raises(ValueError, match=r"alpha must be .* got 1\.5"):
        apfl(MODEL, alpha=1.5)
