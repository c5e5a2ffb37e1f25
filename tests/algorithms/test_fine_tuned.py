"""Clients that train before they are evaluated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, CLIP, MODEL, SIZES, client_data, small_clients

from jaxfl import LocalSGD, simulate
from jaxfl.algorithms import dp_fedavg, dp_fedavg_fb, fedavg, fedrep, fine_tuned, prior_corrected
from jaxfl.models import mlp
from jaxfl.privacy import Poisson

KEY = jax.random.key(21)
LINEAR = mlp((8, 8, 1), 10, hidden=())
RATE = 0.3
STEPS = 4
WHOLE = LocalSGD(optax.sgd(RATE), batch_size=16, epochs=STEPS)
"""Training whose steps take all examples of a client, so that their order does not matter."""


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), a, b)


def start_of(method):
    return method.init(KEY, len(SIZES))[0]


def descended(params, index, offset=0.0):
    """Return the weights after gradient descent of a softmax regression on a client, in NumPy."""
    clients = small_clients()
    rows = clients.train[index]
    x = np.asarray(LINEAR.prepare(jnp.asarray(clients.inputs[rows])), np.float64).reshape(
        len(rows), -1
    )
    targets = np.eye(10)[clients.labels[rows]]
    (layer,) = LINEAR.layers
    kernel = np.asarray(params[layer]["kernel"], np.float64)
    bias = np.asarray(params[layer]["bias"], np.float64)
    for _ in range(STEPS):
        logits = x @ kernel + bias + offset
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = (shares / shares.sum(axis=1, keepdims=True) - targets) / len(rows)
        kernel = kernel - RATE * x.T @ error
        bias = bias - RATE * error.sum(axis=0)
    return {layer: {"kernel": kernel, "bias": bias}}


def test_a_whole_model_descends_on_the_clients_own_loss():
    method = fine_tuned(fedavg(LINEAR), local=WHOLE)
    server = start_of(method)
    found = method.personalize(KEY, server, (), client_data(3))
    expected = descended(server.params, 3)
    assert_close(found, expected)
    assert not np.allclose(expected["head"]["kernel"], server.params["head"]["kernel"], atol=1e-3)


def test_inside_the_correction_a_model_descends_on_the_corrected_loss():
    method = fine_tuned(prior_corrected(fedavg(LINEAR), smoothing=0.5), local=WHOLE)
    server = start_of(method)
    found = method.personalize(KEY, server, (), client_data(3))
    clients = small_clients()
    counts = np.bincount(clients.labels[clients.train[3]], minlength=10) + 0.5
    offset = np.log(counts / counts.sum())
    layers = {name: found[name] for name in LINEAR.layers}
    expected = descended(server.params, 3, offset)
    assert_close(layers, expected)
    assert not np.allclose(
        expected["head"]["bias"], descended(server.params, 3)["head"]["bias"], atol=1e-2
    )


@pytest.mark.parametrize("parts", [None, ("dense_0",), ("head",), ("head", "dense_0")])
def test_only_named_parts_move_whatever_the_optimizer(parts):
    decaying = optax.chain(optax.add_decayed_weights(0.1), optax.adam(0.1))
    method = fine_tuned(
        prior_corrected(fedavg(MODEL)),
        local=LocalSGD(decaying, 4),
        parts=parts,
    )
    server = start_of(method)
    found = method.personalize(KEY, server, (), client_data())
    for name in MODEL.layers:
        same = jax.tree.leaves(jax.tree.map(np.array_equal, found[name], server.params[name]))
        assert all(same) == (parts is not None and name not in parts)
    untuned = prior_corrected(fedavg(MODEL)).personalize(KEY, server, (), client_data())
    np.testing.assert_array_equal(found["log_prior"], untuned["log_prior"])


def test_of_the_head_it_is_dp_fedavg_fb():
    head = LocalSGD(optax.sgd(0.1), 4, 2)
    private = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
    options = {"rounds": 2, "progress": False}
    tuned = fine_tuned(dp_fedavg(MODEL, **private), local=head, parts=MODEL.head)
    one = simulate(KEY, tuned, small_clients(), **options)
    other = simulate(KEY, dp_fedavg_fb(MODEL, head=head, **private), small_clients(), **options)
    assert_same(one.server, other.server)
    assert_same(one.scores, other.scores)
    assert one.statement == other.statement


@pytest.mark.parametrize("parts", [None, ("head",)])
def test_features_of_a_corrected_model_are_fitted_like_the_whole(parts):
    """A head is fitted on features that are computed once. Without a split all layers run."""
    base = prior_corrected(fedavg(MODEL), smoothing=0.2)
    unsplit = base._replace(model=base.model._replace(extract=None, classify=None))
    server = start_of(base)
    local = LocalSGD(optax.sgd(0.1), 4, 3)
    found, expected = (
        fine_tuned(method, local=local, parts=parts).personalize(KEY, server, (), client_data())
        for method in (base, unsplit)
    )
    assert_close(found, expected)


def test_a_client_without_examples_has_the_methods_model():
    method = fine_tuned(fedavg(MODEL), local=LocalSGD(optax.adam(0.1), 4))
    server = start_of(method)
    assert SIZES[2] == 0
    assert_same(method.personalize(KEY, server, (), client_data(2)), server.params)


def test_it_goes_on_from_the_methods_personal_model():
    base = fedrep(MODEL)
    own = jax.tree.map(lambda leaf: leaf[0] + 1.0, base.init(KEY, 2)[1])
    no_steps = LocalSGD(optax.sgd(0.1), epochs=0)
    fitted = fedrep(MODEL, evaluation_epochs=0)
    found = fine_tuned(fitted, local=no_steps).personalize(KEY, start_of(base), own, client_data())
    assert_same(found["head"], own["head"])


@pytest.mark.parametrize("parts", [("none",), ("head", "none"), ("log_prior",)])
def test_parts_are_layers(parts):
    with pytest.raises(
        ValueError, match=r"parts must be layers of model='mlp_log_prior', got '(none|log_prior)'"
    ):
        fine_tuned(prior_corrected(fedavg(MODEL)), parts=parts)


def test_methods_of_the_table_can_be_tuned():
    """Every method gives all layers of its model to evaluate."""
    for name, build in ALGORITHMS.items():
        method = build()
        shapes = jax.eval_shape(lambda method=method: method.model.init(KEY))
        assert set(method.model.layers) <= set(shapes), name
        assert jnp.issubdtype(jax.tree.leaves(shapes)[0].dtype, jnp.floating)
