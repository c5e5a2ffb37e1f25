import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients
from reference import torch_sgd

from jaxfl import simulate
from jaxfl.algorithms import centaur, dp_fedavg, dp_fedavg_fb, dp_lg, fedrep, pmtl_ft
from jaxfl.local.train import LocalSGD, fit_head
from jaxfl.models import mlp
from jaxfl.privacy import DPSGD, Full, Mechanism, Poisson

KEY = jax.random.key(5)
HEAD = LocalSGD(optax.sgd(0.3), 4, 2)
OPTIONS: dict[str, Any] = {"local": LocalSGD(optax.sgd(0.2), 4), "head": HEAD}


def start(algorithm):
    server, heads = algorithm.init(KEY, len(SIZES))
    return server, jax.tree.map(lambda leaf: leaf[0], heads)


def test_one_round_of_a_client_is_head_then_extractor():
    local = LocalSGD(optax.sgd(0.2), 4, 2)
    algorithm = fedrep(MODEL, **OPTIONS | {"local": local})
    server, head = start(algorithm)
    message, fitted, _ = algorithm.client_update(KEY, server, head, client_data())
    first, second = jax.random.split(KEY)
    data = client_data()
    params, _ = fit_head(first, MODEL, {**server.params, **head}, data, local=HEAD)
    jax.tree.map(np.testing.assert_array_equal, fitted, {"head": params["head"]})
    # The same extractor steps, by a mask over all parameters.
    mask = {
        name: jax.tree.map(lambda _, moves=name != "head": moves, params[name]) for name in params
    }
    whole, _ = local.train(second, MODEL, params, data, mask=mask)
    expected = {"dense_0": optax.tree.sub(whole["dense_0"], server.params["dense_0"])}
    assert set(message.update) == {"dense_0"}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        message.update,
        expected,
    )


@pytest.mark.slow
def test_evaluation_refits_the_head_of_every_client_and_keeps_nothing():
    algorithm = fedrep(MODEL, **OPTIONS)
    server, head = start(algorithm)
    params = algorithm.personalize(KEY, server, head, client_data())
    jax.tree.map(np.testing.assert_array_equal, {"dense_0": params["dense_0"]}, server.params)
    assert not np.array_equal(params["head"]["kernel"], head["head"]["kernel"])
    idle = fedrep(MODEL, mechanism=Mechanism(sampling=Poisson(1e-9)), **OPTIONS)
    result = simulate(KEY, idle, small_clients(), rounds=2, progress=False)
    kept = jax.tree.map(lambda leaf: leaf[0], result.states)
    jax.tree.map(np.testing.assert_array_equal, kept, start_heads(idle, result))


def start_heads(algorithm, result):
    """Return the first client's head before the first round."""
    init_key = jax.random.split(KEY, 3)[0]
    return jax.tree.map(lambda leaf: leaf[0], algorithm.init(init_key, len(SIZES))[1])


@pytest.mark.slow
def test_centaur_without_privacy_is_fedrep():
    private = centaur(MODEL, clip=float("inf"), noise_multiplier=0.0, sampling=Full(), **OPTIONS)
    plain = fedrep(
        MODEL, mechanism=Mechanism(sampling=Full(), denominator="participants"), **OPTIONS
    )
    a, b = (
        simulate(KEY, one, small_clients(), rounds=2, progress=False) for one in (private, plain)
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), a.server, b.server
    )


def test_centaur_fits_its_head_by_the_published_optimizer():
    # A client's nine examples are one batch, so 15 passes are 15 steps.
    algorithm = centaur(MODEL, clip=CLIP, noise_multiplier=1.0, sampling=Full())
    server, head = start(algorithm)
    data = client_data()
    inputs, labels = data.take(jnp.arange(data.size))
    x = MODEL.prepare(inputs)

    @jax.jit
    @jax.grad
    def gradient_of(head):
        logits = MODEL.apply({**server.params, **head}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    _, fitted, _ = jax.jit(algorithm.client_update)(KEY, server, head, data)
    expected = torch_sgd(head, gradient_of, 15, learning_rate=0.01)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), fitted, expected
    )


@pytest.mark.slow
def test_centaurs_statement_is_the_gaussians():
    algorithm = centaur(MODEL, clip=CLIP, noise_multiplier=40.5, sampling=Full(), **OPTIONS)
    statement = simulate(KEY, algorithm, small_clients(), rounds=2, progress=False).statement
    assert statement["honest"]["upload"]["rdp"]["total"] == "inf"
    assert 0 < statement["honest"]["aggregate"]["pld"]["total"] < 0.2


@pytest.mark.slow
def test_centaur_with_everything_shared_is_dp_fedavg():
    # Whole-client batches: the two draw the order of examples from different keys.
    options = {"local": LocalSGD(optax.sgd(0.2), 16, 2)}
    private: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
    shared = centaur(
        MODEL._replace(head=()), head=LocalSGD(optax.sgd(0.1), epochs=0), **options, **private
    )
    a, b = (
        simulate(KEY, one, small_clients(), rounds=3, progress=False)
        for one in (shared, dp_fedavg(MODEL, **options, **private))
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a.server, b.server
    )
    np.testing.assert_allclose(a.scores["loss"], b.scores["loss"], rtol=1e-5)


def test_without_head_epochs_heads_stay():
    algorithm = fedrep(MODEL, **OPTIONS | {"head": LocalSGD(optax.sgd(0.1), epochs=0)})
    server, head = start(algorithm)
    jax.tree.map(
        np.testing.assert_array_equal,
        algorithm.client_update(KEY, server, head, client_data())[1],
        head,
    )


def test_evaluation_may_take_other_passes_than_a_round():
    algorithm = fedrep(MODEL, evaluation_epochs=5, **OPTIONS)
    server, head = start(algorithm)
    found = algorithm.personalize(KEY, server, head, client_data())
    expected, _ = fit_head(
        KEY,
        MODEL,
        {**server.params, **head},
        client_data(),
        local=dataclasses.replace(HEAD, epochs=5),
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(("epochs", "evaluation_epochs"), [(1, None), (0, 2)])
def test_no_head_cannot_be_fitted(epochs, evaluation_epochs):
    head = LocalSGD(optax.sgd(0.1), epochs=epochs)
    with pytest.raises(ValueError, match=r"head must have 0 epochs .*Set both to 0 epochs"):
        fedrep(MODEL._replace(head=()), head=head, evaluation_epochs=evaluation_epochs)


@pytest.mark.parametrize("name", ["local", "head"])
def test_private_steps_are_refused(name):
    private: Any = DPSGD(clip=0.5, noise_multiplier=1.0, rate=0.4, steps=2)
    with pytest.raises(TypeError, match=rf"{name} must be .*Give a jaxfl.LocalSGD"):
        fedrep(MODEL, **{name: private})


def test_a_model_that_is_all_head_is_refused():
    with pytest.raises(ValueError, match="model must have a layer outside its head, got 'mlp'"):
        fedrep(mlp((8, 8, 1), 10, hidden=()))


@pytest.mark.parametrize("build", [dp_lg, dp_fedavg_fb, pmtl_ft])
def test_a_model_without_a_head_has_none_to_share_or_fit(build):
    with pytest.raises(ValueError, match="has no head"):
        build(MODEL._replace(head=()), clip=1.0, noise_multiplier=1.0, sampling=Full())
