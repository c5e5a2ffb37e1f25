from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients
from reference import torch_sgd

from jaxfl import simulate
from jaxfl.algorithms import dp_fedavg, ppsgd, ppsgd_centaur
from jaxfl.local.train import LocalSGD, fit_head
from jaxfl.privacy import Full, Poisson
from jaxfl.tasks import cross_entropy, mean, one_hot_error

KEY = jax.random.key(17)
PRIVATE: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
WHOLE = 16  # every client's examples in one batch: no order


def run(algorithm, rounds=3):
    return simulate(KEY, algorithm, small_clients(), rounds=rounds, progress=False)


def start(algorithm):
    return algorithm.init(jax.random.split(KEY, 3)[0], len(SIZES))


def first(states):
    return jax.tree.map(lambda leaf: leaf[0], states)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), a, b)


@pytest.mark.slow
def test_without_personal_steps_it_is_dp_fedsgd():
    steps: dict[str, Any] = {"batch_size": 4, "loss": cross_entropy}
    found = run(
        ppsgd(MODEL, server_learning_rate=0.3, personal_learning_rate=0.0, **steps, **PRIVATE)
    )
    local = LocalSGD(optax.sgd(1.0), 4, steps=1)
    sgd = dp_fedavg(MODEL, local=local, server_optimizer=optax.sgd(0.3), **PRIVATE)
    assert_close(found.server.params, run(sgd).server.params)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(found.states))


@pytest.mark.slow
def test_without_server_steps_personal_heads_train_alone():
    options: dict[str, Any] = {
        "batch_size": WHOLE,
        "personal_learning_rate": 0.2,
        "loss": cross_entropy,
    }
    algorithm = ppsgd(MODEL, server_learning_rate=0.0, **options, **PRIVATE | {"sampling": Full()})
    result = run(algorithm)
    server, _ = start(algorithm)
    assert_same(result.server.params, server.params)
    alone, _ = fit_head(
        KEY, MODEL, server.params, client_data(), local=LocalSGD(optax.sgd(0.2), WHOLE, 3)
    )
    assert_close(
        first(result.states), {"head": optax.tree.sub(alone["head"], server.params["head"])}
    )


def test_both_heads_receive_the_same_gradient_before_clipping():
    algorithm = ppsgd(MODEL, personal_learning_rate=1.0, **PRIVATE | {"clip": 1e-3})
    server, states = start(algorithm)
    message, personal, _ = algorithm.client_update(KEY, server, first(states), client_data())
    assert_close(message.update["head"], personal["head"])
    assert optax.tree.norm(personal) > 0.01  # not clipped


def test_it_sends_the_gradient_of_the_sum_of_heads():
    algorithm = ppsgd(MODEL, batch_size=WHOLE, personal_learning_rate=0.5, **PRIVATE)
    server, states = start(algorithm)
    theta = jax.tree.map(lambda leaf: leaf + 0.1, first(states))
    data = client_data()
    inputs, labels = data.take(jnp.arange(data.size))
    x = MODEL.prepare(inputs)

    def objective(params):
        both = MODEL.apply(params, x), MODEL.apply({**params, **theta}, x)
        logits = both[0] + both[1]
        return jnp.mean((logits - (np.eye(10)[labels] - 0.1)) ** 2)

    gradient = jax.grad(objective)(server.params)
    message, moved, _ = algorithm.client_update(KEY, server, theta, data)
    assert_close(message.update, optax.tree.scale(-1, gradient))
    assert_close(
        moved["head"], jax.tree.map(lambda t, g: t - 0.5 * g, theta["head"], gradient["head"])
    )
    added = algorithm.personalize(KEY, server, theta, data)
    assert_same(added["head"], optax.tree.add(server.params["head"], theta["head"]))


def test_one_hot_error_by_hand():
    logits, labels = jnp.array([[0.9, -0.1], [0.4, 0.9], [7.0, 7.0]]), jnp.array([0, 1, 0])
    assert mean(one_hot_error(logits, labels), jnp.array([1.0, 1.0, 0.0])) == pytest.approx(
        0.25 / 4, rel=1e-5
    )
    assert mean(one_hot_error(logits, labels), jnp.zeros(3)) == 0


LOCAL = LocalSGD(optax.sgd(0.2), 4, 2)
PLAIN: dict[str, Any] = {"head": LocalSGD(optax.sgd(0.1), 4), "head_decay": 0.0}


def test_centaurs_variant_fits_its_head_by_the_published_optimizer():
    head = LocalSGD(optax.sgd(0.1, momentum=0.9), WHOLE, 4)
    algorithm = ppsgd_centaur(MODEL, head=head, local=LocalSGD(optax.sgd(0.2), WHOLE, 2), **PRIVATE)
    server, states = start(algorithm)
    before = jax.tree.map(lambda leaf: leaf + 1, first(states))["head"]
    data = client_data()
    inputs, labels = data.take(jnp.arange(data.size))
    x = MODEL.prepare(inputs)

    @jax.jit
    def slope(theta):
        def loss(theta):
            logits = MODEL.apply(
                {**server.params, "head": optax.tree.add(server.params["head"], theta)}, x
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return jax.grad(loss)(theta)

    theta = torch_sgd(before, slope, 4, learning_rate=0.1)  # of theta alone
    _, fitted, _ = jax.jit(algorithm.client_update)(KEY, server, {"head": before}, data)
    assert_close(optax.tree.sub(fitted["head"], before), optax.tree.sub(theta, before))


def test_centaurs_variant_fits_the_added_head_and_then_what_is_shared():
    algorithm = ppsgd_centaur(MODEL, local=LOCAL, **PLAIN, **PRIVATE)
    server, states = start(algorithm)
    theta = jax.tree.map(lambda leaf: leaf + 0.1, first(states))
    message, fitted, _ = algorithm.client_update(KEY, server, theta, client_data())
    keys, data = jax.random.split(KEY), client_data()
    sums = {**server.params, "head": optax.tree.add(server.params["head"], theta["head"])}
    tuned, _ = fit_head(keys[0], MODEL, sums, data, local=PLAIN["head"])
    assert_close(fitted["head"], optax.tree.sub(tuned["head"], server.params["head"]))
    # The gradient of the shared head is the one of the sum: training the sum in place moves it alike.
    whole, _ = LOCAL.train(keys[1], MODEL, tuned, data)
    assert_close(message.update, optax.tree.sub(whole, tuned))


@pytest.mark.slow
def test_centaurs_variant_with_still_heads_is_dp_fedavg():
    whole, still = LocalSGD(optax.sgd(0.2), WHOLE, 2), LocalSGD(optax.sgd(0.0), WHOLE)
    found = run(ppsgd_centaur(MODEL, head=still, evaluation_epochs=0, local=whole, **PRIVATE))
    expected = run(dp_fedavg(MODEL, local=whole, **PRIVATE))
    assert_close(found.server.params, expected.server.params)
    np.testing.assert_allclose(found.scores["loss"], expected.scores["loss"], rtol=1e-4)


def test_evaluation_tunes_a_copy_longer_than_a_round_does():
    algorithm = ppsgd_centaur(MODEL, local=LOCAL, **PLAIN, **PRIVATE)
    server, states = start(algorithm)
    tuned = algorithm.personalize(KEY, server, first(states), client_data())
    expected, _ = fit_head(
        KEY, MODEL, server.params, client_data(), local=LocalSGD(optax.sgd(0.1), 4, 15)
    )
    assert_close(tuned, expected)


@pytest.mark.parametrize(
    ("build", "wrong", "name"),
    [
        (ppsgd, {"server_learning_rate": -1.0}, r"server_learning_rate must be .* got -1\.0"),
        (ppsgd, {"personal_learning_rate": -1.0}, r"personal_learning_rate must be .* got -1\.0"),
        (ppsgd, {"batch_size": 0}, "batch_size must be .* got 0"),
        (ppsgd_centaur, {"evaluation_epochs": -1}, "evaluation_epochs must be .* got -1"),
        (ppsgd_centaur, {"head_decay": -1.0}, r"head_decay must be .* got -1\.0"),
    ],
)
def test_wrong_arguments_name_themselves(build, wrong, name):
    with pytest.raises(ValueError, match=name):
        build(MODEL, **PRIVATE, **wrong)


@pytest.mark.parametrize("build", [ppsgd, ppsgd_centaur])
def test_a_model_without_head_is_refused(build):
    with pytest.raises(ValueError, match="has no head"):
        build(MODEL._replace(head=()), **PRIVATE)
