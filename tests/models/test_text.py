"""Networks over tokens, compared with plain loops, and tests of causality."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from test_contract import KEY, ROUNDS, WIDE, assert_close, run

from jaxfl import LocalSGD
from jaxfl.algorithms import centaur
from jaxfl.data import by_owner, make_clients
from jaxfl.models import gru, transformer
from jaxfl.models.text import _ONE_HOT, _standardize
from jaxfl.privacy import Poisson

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 7, (3, 6)).astype(np.uint8)


def small(vocabulary=7, **options):
    return transformer(vocabulary, 6, width=8, blocks=2, heads=2, **options)


BUILDERS = {"gru": functools.partial(gru, 7, 6, width=4, embedding=3), "transformer": small}


def outputs_of(model, params, tokens):
    return np.asarray(jax.jit(model.apply)(params, model.prepare(jnp.asarray(tokens))))


def perturbed(model):
    """Draw parameters that are not 0 or 1, as many first parameters are."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: rng.normal(0.2, 0.4, leaf.shape).astype(leaf.dtype),
        jax.eval_shape(model.init, jax.random.key(0)),
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_outputs_follow_from_the_tokens_up_to_there(name):
    model = BUILDERS[name]()
    params = perturbed(model)
    before = outputs_of(model, params, TOKENS)
    assert before.shape == (3, 6, 7)
    changed = np.stack(
        [
            np.where(np.arange(6)[None] == position, (TOKENS + 1) % 7, TOKENS)
            for position in range(6)
        ]
    )
    after = outputs_of(model, params, changed.reshape(-1, 6)).reshape(6, 3, 6, 7)
    for position, moved in enumerate(np.abs(after - before).max(axis=(1, 3))):
        assert moved[:position].max(initial=0) < 1e-6
        assert moved[position:].min() > 1e-4


@pytest.mark.parametrize("name", BUILDERS)
def test_one_output_is_that_after_the_last_token(name):
    every, last = BUILDERS[name](), BUILDERS[name](every=False)
    params = perturbed(every)
    found = outputs_of(last, params, TOKENS)
    np.testing.assert_allclose(
        found, outputs_of(every, params, TOKENS)[:, -1], rtol=1e-5, atol=1e-5
    )
    assert (every.task.name, last.task.name) == ("next_token", "classification")


@pytest.mark.parametrize("name", BUILDERS)
def test_the_head_is_apart(name):
    model: Any = BUILDERS[name]()
    params, tokens = perturbed(model), jnp.asarray(TOKENS, jnp.int32)
    assert model.layers[-1:] == model.head == ("head",)
    split = jax.jit(lambda params, tokens: model.classify(params, model.extract(params, tokens)))
    np.testing.assert_allclose(
        split(params, tokens), outputs_of(model, params, TOKENS), rtol=1e-6, atol=1e-6
    )


def test_gru_equals_a_plain_loop():
    model = BUILDERS["gru"]()
    params = jax.tree.map(np.asarray, perturbed(model))
    recurrent, head = params["recurrent"], params["head"]
    w, b, u = recurrent["input"]["kernel"], recurrent["input"]["bias"], recurrent["recurrent"]

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    expected = np.zeros((3, 6, 7))
    for i, text in enumerate(TOKENS):
        state = np.zeros(4)
        for t, token in enumerate(text):
            x = params["embed"]["embedding"][token]
            reset = sigmoid(x @ w[:, :4] + b[:4] + state @ u[:, :4])
            keep = sigmoid(x @ w[:, 4:8] + b[4:8] + state @ u[:, 4:8])
            new = np.tanh(x @ w[:, 8:] + b[8:] + reset * (state @ u[:, 8:] + recurrent["offset"]))
            state = (1 - keep) * new + keep * state
            expected[i, t] = state @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(outputs_of(model, params, TOKENS), expected, rtol=1e-4, atol=1e-5)


def test_transformer_equals_one_of_flax_layers():
    model = small()
    params = perturbed(model)

    def norm(x, own):
        return nn.LayerNorm(use_fast_variance=False).apply({"params": own}, x)

    def dense(x, own):
        return x @ own["kernel"] + own["bias"][None, None]

    def split(x):
        return x.reshape(3, 6, 2, 4)

    def logits(params):
        x = params["embed"]["embedding"][TOKENS] + params["position"]["embedding"][None]
        for block in (params["block_0"], params["block_1"]):
            parts = jnp.split(
                dense(norm(x, block["attention_norm"]), block["attention"]), 3, axis=-1
            )
            mixed = nn.dot_product_attention(*map(split, parts), mask=nn.make_causal_mask(TOKENS))
            x = x + dense(mixed.reshape(x.shape), block["attention_out"])
            x = x + dense(
                nn.gelu(dense(norm(x, block["hidden_norm"]), block["hidden"])), block["hidden_out"]
            )
        return dense(norm(x, params["norm"]), params["head"])

    def loss(logits):
        return jnp.sum(jnp.sin(logits + jnp.arange(7.0)[None, None]))  # slopes of any sign

    np.testing.assert_allclose(
        outputs_of(model, params, TOKENS), jax.jit(logits)(params), rtol=1e-4, atol=1e-4
    )
    expected = jax.jit(jax.grad(lambda params: loss(logits(params))))(params)
    found = jax.jit(
        jax.grad(lambda params: loss(model.apply(params, jnp.asarray(TOKENS, jnp.int32))))
    )(params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3), expected, found
    )


def test_embeddings_are_the_same_in_large_vocabularies():
    large, few = small(_ONE_HOT + 1, outputs=7), small()
    params = perturbed(large)
    cut = {**params, "embed": {"embedding": params["embed"]["embedding"][:7]}}
    np.testing.assert_allclose(
        outputs_of(large, params, TOKENS), outputs_of(few, cut, TOKENS), rtol=1e-5, atol=1e-5
    )


def test_rows_are_standardized_with_their_slopes():
    x = jax.random.normal(jax.random.key(0), (5, 2, 3)) * 2 + 1

    def plain(x):
        centred = x - x.mean(0, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(0, keepdims=True) + 1e-6)

    slope = jax.random.normal(jax.random.key(1), x.shape)
    (found, back), (expected, back_plainly) = (jax.vjp(f, x) for f in (_standardize, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(back(slope)[0], back_plainly(slope)[0], rtol=1e-4, atol=1e-5)


def test_heads_divide_the_width():
    with pytest.raises(ValueError, match="heads must be a divisor of width=8, got 3"):
        transformer(width=8, heads=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_clients_with_heads_of_their_own_equal_their_plain_twin(name):
    text, labels = RNG.integers(0, 7, (40, 6)).astype(np.uint8), RNG.integers(-1, 7, (40, 6))
    owner = RNG.integers(0, 5, 40)
    clients = make_clients((text, labels, text, labels), *by_owner(owner, owner))
    local = LocalSGD(optax.sgd(0.1), batch_size=4)
    algorithm = centaur(
        BUILDERS[name](),
        local=local,
        head=local,
        clip=0.2,
        noise_multiplier=1.0,
        sampling=Poisson(0.6),
    )
    server, states, _ = run(algorithm, clients)
    twin_server, twin_states, _ = reference.run(KEY, algorithm, clients, ROUNDS)
    assert_close(server, jax.device_get(twin_server))
    assert_close(states, jax.tree.map(lambda *leaves: np.stack(leaves), *twin_states))
    assert_close((server, states), run(algorithm, clients, **WIDE)[:2])
