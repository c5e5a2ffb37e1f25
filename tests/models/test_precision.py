import functools

import algorithms_table
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, small_clients
from jax import lax
from jax.extend.core import jaxprs_in_params

from jaxfl.algorithms import dp_fedavg
from jaxfl.data import load
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.local.train import LocalSGD
from jaxfl.models import gru, lenet, mlp, transformer, with_precision
from jaxfl.privacy.sampling import Full
from jaxfl.run.check import check_algorithm
from jaxfl.types import ClientData

MODELS = {"mlp": functools.partial(mlp, (8, 8, 1)), "lenet": lenet}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_takes_weights_in_half_precision(name, monkeypatch):
    model = algorithms_table.MODEL

    def init(key):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.init(key))

    monkeypatch.setattr(algorithms_table, "MODEL", model._replace(init=init))
    check_algorithm(ALGORITHMS[name](), small_clients(), algorithms_table.ROUNDS)


def gradient_of(model, shape):
    """Return a function from parameters to value and gradient of a loss."""
    inputs = np.random.default_rng(0).integers(0, 256, (8, *shape), np.uint8)
    x, labels, weights = model.prepare(jnp.asarray(inputs)), jnp.arange(8), jnp.ones(8)
    return jax.value_and_grad(
        lambda params: model.task.mean_loss(model.apply(params, x), labels, weights)
    )


def shape_of(name):
    return (32, 32, 3) if name == "lenet" else (8, 8, 1)


@pytest.mark.parametrize("name", ["mlp", pytest.param("lenet", marks=pytest.mark.slow)])
def test_bfloat16_differs_by_its_rounding(name):
    """Numbers of a few layers are off by up to 2^-9. Minimal filtering would lose the rest."""
    model = MODELS[name]()
    params = model.init(jax.random.key(0))
    a, exact = jax.jit(gradient_of(model, shape_of(name)))(params)
    b, rounded = jax.jit(gradient_of(with_precision(model, "bfloat16"), shape_of(name)))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves((b, rounded))} == {jnp.dtype("float32")}
    assert a == pytest.approx(float(b), rel=0.01)
    off = optax.tree.norm(optax.tree.sub(exact, rounded)) / optax.tree.norm(exact)
    assert 2**-12 < float(jnp.asarray(off)) < 0.08


@pytest.mark.parametrize(
    "model", [transformer(512, length=4, width=8, heads=2), gru(512, length=4, width=8)]
)
def test_tokens_stay_whole_in_bfloat16(model):
    params, tokens = model.init(jax.random.key(0)), jnp.array([[257, 259, 3, 511]])
    exact, rounded = (
        one.apply(params, model.prepare(tokens))
        for one in (model, with_precision(model, "bfloat16"))
    )
    assert float(jnp.abs(exact - rounded).max()) < 0.03 * float(jnp.abs(exact).max())


@pytest.mark.parametrize(("precision", "expected"), [("tf32", "HIGH"), ("float32", "HIGHEST")])
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_all_products_of_both_passes_have_the_precision(name, precision, expected):
    model = with_precision(MODELS[name](), precision)
    params = jax.eval_shape(model.init, jax.random.key(0))
    found = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                found.append(equation.params["precision"])
            jax.tree.map(visit, list(jaxprs_in_params(equation.params)))

    visit(jax.make_jaxpr(gradient_of(model, shape_of(name)))(params).jaxpr)
    assert len(found) >= 6
    assert set(found) == {(lax.Precision[expected],) * 2}


@pytest.mark.slow
def test_training_in_bfloat16_reaches_the_same_loss():
    digits = load("digits")
    data = ClientData(
        jnp.asarray(digits.train_inputs),
        jnp.asarray(digits.train_labels),
        jnp.arange(400),
        jnp.int32(400),
    )

    def final(model):
        params = model.init(jax.random.key(0))
        local = LocalSGD(optax.sgd(0.1), 20, epochs=8)
        params, _ = jax.jit(lambda p: local.train(jax.random.key(1), model, p, data))(params)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        x = model.prepare(data._inputs[:400])
        return float(
            model.task.mean_loss(
                model.apply(params, x), jnp.asarray(data._labels[:400]), jnp.ones(400)
            )
        )

    model = MODELS["mlp"](hidden=(32,))
    exact, rounded = final(model), final(with_precision(model, "bfloat16"))
    assert exact < 0.5
    assert rounded == pytest.approx(exact, rel=0.02)


@pytest.mark.slow
def test_rounds_in_bfloat16_keep_float32_state():
    model = with_precision(MODELS["mlp"](hidden=(16,)), "bfloat16")
    algorithm = dp_fedavg(
        model,
        clip=0.3,
        noise_multiplier=1.0,
        sampling=Full(),
        local=LocalSGD(optax.sgd(0.05), batch_size=4),
    )
    clients = small_clients()
    population = place(clients)
    center, states = initialize(jax.random.key(0), jax.random.key(0), algorithm, population)
    data = ClientData(clients.inputs, clients.labels, clients.train[0], clients.train_size[0])
    client = states[0]
    message, *_ = jax.eval_shape(
        algorithm.client_update, jax.random.key(1), center.server, client, data
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(message.update)} == {jnp.dtype("float32")}
    step = compile_rounds(algorithm, population, chunk=1, segment=1)
    after = step(jax.random.key(1), 0, 1, center, states)[0].server.params
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype("float32")}
    low = jax.tree.map(
        lambda leaf: np.asarray(leaf, jnp.bfloat16).astype(np.float32), jax.device_get(after)
    )
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (after, low))))
