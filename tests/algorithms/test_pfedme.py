from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients

from jaxfl import simulate
from jaxfl.algorithms import dp_fedavg, pfedme
from jaxfl.local.train import LocalSGD
from jaxfl.models import mlp
from jaxfl.privacy import Full, Poisson

KEY = jax.random.key(41)
PRIVATE: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}


def run(algorithm, rounds=3):
    return simulate(KEY, algorithm, small_clients(), rounds=rounds, progress=False)


def assert_close(a, b, **tolerance):
    options: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6} | tolerance
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **options), a, b)


def whole(rate, steps):
    """Return training whose batches have all examples of a client."""
    return LocalSGD(optax.sgd(rate), 16, steps=steps)


def update_of(algorithm):
    server, states = algorithm.init(KEY, len(SIZES))
    own = jax.tree.map(
        lambda leaf: leaf[0] + 0.1, states
    )  # of an earlier round: a round starts from the broadcast
    return server, *algorithm.client_update(KEY, server, own, client_data())


def test_equals_algorithm_1_in_numpy():
    weight, inner, outer = 4.0, 0.1, 0.05
    algorithm = pfedme(
        MODEL,
        penalty_weight=weight,
        inner_learning_rate=inner,
        inner_steps=3,
        local=whole(outer, steps=4),
    )
    server, message, found, _ = update_of(algorithm)
    start, gradient = reference.double(server.params), reference.whole_gradient(client_data())
    w = theta = start
    for _ in range(4):
        for _ in range(3):
            theta = jax.tree.map(
                lambda t, g, w: t - inner * (g + weight * (t - w)), theta, gradient(theta), w
            )
        w = jax.tree.map(lambda w, t: w - outer * weight * (w - t), w, theta)
    assert_close(message.update, optax.tree.sub(w, start))
    assert_close(found, theta)
    assert_close(algorithm.personalize(KEY, server, found, client_data()), theta)


def test_many_inner_steps_reach_the_proximal_point_and_the_outer_one_is_the_envelopes_gradient():
    # Of a linear model, whose envelope is smooth.
    weight, rate, data = 5.0, 0.02, client_data()
    algorithm = pfedme(
        mlp((8, 8, 1), 10, hidden=()),
        penalty_weight=weight,
        inner_learning_rate=0.03,
        inner_steps=500,
        local=whole(rate, steps=1),
    )
    server, message, theta, _ = update_of(algorithm)
    w, point = reference.double(server.params)["head"], reference.double(theta)["head"]
    inputs, labels = map(np.asarray, data.take(jnp.arange(data.size)))
    x = inputs.reshape(len(inputs), -1) * 2.0 / 255 - 1
    p = np.exp(x @ point["kernel"] + point["bias"])
    error = (p / p.sum(1, keepdims=True) - np.eye(10)[labels]) / len(labels)
    slope = {"kernel": x.T @ error, "bias": error.sum(0)}
    assert np.linalg.norm(slope["kernel"]) > 0.1
    assert_close(optax.tree.scale(weight, optax.tree.sub(w, point)), slope, atol=1e-5)  # stationary
    assert_close(message.update["head"], optax.tree.scale(-rate, slope))


def test_a_large_penalty_is_fedavg():
    weight = 200.0
    algorithm = pfedme(
        MODEL,
        penalty_weight=weight,
        inner_learning_rate=1 / weight,
        inner_steps=3,
        local=whole(0.1, steps=1),
    )
    update = update_of(algorithm)[1].update
    plain = dp_fedavg(
        MODEL, clip=1.0, noise_multiplier=0.0, sampling=Full(), local=whole(0.1, steps=1)
    )
    expected = plain.client_update(KEY, plain.init(KEY, len(SIZES))[0], (), client_data())[0].update
    assert optax.tree.norm(optax.tree.sub(update, expected)) < 0.02 * optax.tree.norm(expected)


@pytest.mark.slow
def test_beta_scales_the_servers_step():
    one, two = (
        run(pfedme(MODEL, server_optimizer=optax.sgd(beta)), rounds=1).server.params
        for beta in (1.0, 2.0)
    )
    start = pfedme(MODEL).init(jax.random.split(KEY, 3)[0], len(SIZES))[0].params
    assert_close(
        optax.tree.sub(two, start), optax.tree.scale(2.0, optax.tree.sub(one, start)), atol=1e-5
    )


@pytest.mark.slow
def test_epsilon_is_dp_fedavgs():
    found, expected = run(pfedme(MODEL, **PRIVATE)), run(dp_fedavg(MODEL, **PRIVATE))
    assert found.statement["honest"]["aggregate"] == expected.statement["honest"]["aggregate"]


def test_wrong_arguments_name_themselves():
    with pytest.raises(ValueError, match=r"penalty_weight must be .* got 0\.0"):
        pfedme(MODEL, penalty_weight=0.0)
