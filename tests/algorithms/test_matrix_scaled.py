"""Maps from a shared model's logits to a client's own classes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
from algorithms_table import ALGORITHMS, MODEL, client_data, small_clients

from jaxfl import LocalSGD, simulate
from jaxfl.algorithms import dp_fedavg, fedavg, matrix_scaled, prior_corrected
from jaxfl.algorithms.matrix_scaled import fit_map
from jaxfl.data import load
from jaxfl.models import mlp
from jaxfl.privacy import Poisson
from jaxfl.run.check import check_algorithm
from jaxfl.tasks import regression
from jaxfl.types import ClientData

KEY = jax.random.key(31)
LINEAR = mlp((8, 8, 1), 10, hidden=())
DIGITS = load("digits")
EXAMPLES = 40


def softmax(logits):
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def drawn(examples=EXAMPLES, classes=3, seed=0):
    """Return logits `[1, N, K]`, and labels: mostly the class after that of the largest logit."""
    generator = np.random.default_rng(seed)
    logits = 2 * generator.standard_normal((1, examples, classes)).astype(np.float32)
    labels = (logits.argmax(-1) + 1) % classes
    labels[0, :5] = 0
    return jnp.asarray(logits), jnp.asarray(labels)


def fitted(logits, labels, real=None, penalty=4.0, steps=3000):
    real = jnp.ones(labels.shape, bool) if real is None else real
    return fit_map(logits, labels, real, penalty=penalty, steps=steps)


def own_data(rows, labels=DIGITS.train_labels):
    rows = np.asarray(rows)
    return ClientData(
        jnp.asarray(DIGITS.train_inputs),
        jnp.asarray(labels),
        jnp.asarray(np.pad(rows, (0, 5))),
        jnp.asarray(len(rows)),
    )


@pytest.mark.parametrize("penalty", [0.5, 4.0, 100.0])
def test_the_map_is_the_minimum_that_another_optimizer_finds(penalty):
    logits, labels = drawn()
    z, y = np.asarray(logits[0], np.float64), np.asarray(labels[0])

    def objective(flat):
        matrix, offset = flat[:9].reshape(3, 3), flat[9:]
        shares = softmax(z @ matrix + offset)
        apart = np.sum((matrix - np.eye(3)) ** 2) + np.sum(offset**2) / 30
        return -np.log(shares[np.arange(len(y)), y]).sum() + penalty / 2 * apart

    start = np.concatenate([np.eye(3).ravel(), np.zeros(3)])
    expected = scipy.optimize.minimize(objective, start, options={"gtol": 1e-9}).x
    found = fitted(logits, labels, penalty=penalty)
    np.testing.assert_allclose(found.matrix.ravel(), expected[:9], atol=2e-3)
    np.testing.assert_allclose(found.offset, expected[9:], atol=2e-3)


def test_steps_never_overshoot_however_large_the_logits():
    """The step size is below 1 / curvature, so that one step always lowers the objective."""
    logits, labels = drawn()
    for scale in (0.01, 1.0, 100.0):
        losses = []
        for steps in (0, 1):
            found = fitted(scale * logits, labels, penalty=1e-3, steps=steps)
            shares = jax.nn.log_softmax(found(scale * logits[0]))
            losses.append(-float(jnp.take_along_axis(shares, labels[0][:, None], 1).sum()))
        assert losses[1] < losses[0]


def test_padding_and_blocks_change_nothing():
    logits, labels = drawn()
    whole = fitted(logits, labels, steps=30)
    blocks = jnp.concatenate([logits.reshape(4, 10, 3), jnp.full((2, 10, 3), 7.0)])
    padded = jnp.concatenate([labels.reshape(4, 10), jnp.zeros((2, 10), int)])
    real = jnp.arange(60).reshape(6, 10) < EXAMPLES
    found = fitted(blocks, padded, real, steps=30)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, whole)


def test_a_client_without_examples_has_the_identity():
    logits, labels = drawn()
    found = fitted(logits, labels, jnp.zeros(labels.shape, bool), steps=20)
    np.testing.assert_array_equal(found.matrix, np.eye(3))
    np.testing.assert_array_equal(found.offset, np.zeros(3))


def test_an_endless_penalty_leaves_the_methods_predictions():
    clients = small_clients()
    base = fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), 4))
    plain, scaled = (
        simulate(KEY, method, clients, rounds=2, progress=False)
        for method in (base, matrix_scaled(base, penalty=1e9))
    )
    np.testing.assert_allclose(scaled.scores["loss"], plain.scores["loss"], rtol=1e-5)


def test_a_client_that_renames_its_classes_translates_them():
    """A shared model that knows the digits serves a client that calls each digit by the next."""
    base = fedavg(LINEAR, local=LocalSGD(optax.sgd(0.1), 16, epochs=40))
    data = own_data(np.arange(1000, 1400))
    server, _ = base.init(KEY, 1)
    update = base.client_update(KEY, server, (), data)[0].update
    server = server._replace(params=optax.tree.add(server.params, update))
    renamed = own_data(np.arange(100), (np.asarray(DIGITS.train_labels) + 1) % 10)
    method = matrix_scaled(base, penalty=1.0, steps=100)
    personal = jax.jit(method.personalize)(KEY, server, (), renamed)
    inputs = LINEAR.prepare(jnp.asarray(DIGITS.test_inputs))
    truth = (np.asarray(DIGITS.test_labels) + 1) % 10
    scores = [
        float((np.asarray(model.apply(params, inputs)).argmax(-1) == truth).mean())
        for model, params in ((LINEAR, server.params), (method.model, personal))
    ]
    assert scores[0] < 0.1
    assert scores[1] > 0.8


def test_local_steps_descend_through_the_map():
    """A step on all of a client's examples is the same in NumPy."""
    rate = 0.5
    method = matrix_scaled(fedavg(LINEAR, local=LocalSGD(optax.sgd(rate), 16)), train=2.0, steps=9)
    server, _ = method.init(KEY, 1)
    found = method.client_update(KEY, server, (), client_data(3))[0].update["head"]
    clients = small_clients()
    rows = clients.train[3]
    x = np.asarray(LINEAR.prepare(jnp.asarray(clients.inputs[rows]))).reshape(len(rows), -1)
    labels = clients.labels[rows]
    kernel, bias = (np.asarray(server.params["head"][name]) for name in ("kernel", "bias"))
    logits = x @ kernel + bias
    own = fit_map(
        jnp.asarray(logits)[None],
        jnp.asarray(labels)[None],
        jnp.ones((1, len(rows)), bool),
        penalty=2.0,
        steps=9,
    )
    matrix = np.asarray(own.matrix)
    assert np.abs(matrix - np.eye(10)).max() > 0.01
    shares = softmax(logits @ matrix + np.asarray(own.offset))
    error = (shares - np.eye(10)[labels]) / len(rows)
    np.testing.assert_allclose(
        found["kernel"], -rate * x.T @ error @ matrix.T, rtol=1e-3, atol=1e-6
    )
    np.testing.assert_allclose(
        found["bias"], -rate * (error @ matrix.T).sum(0), rtol=1e-3, atol=1e-6
    )


def test_training_through_maps_costs_no_epsilon():
    clients = small_clients()
    private = {"clip": 0.5, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
    base = dp_fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), 4), **private)
    plain, through = (
        simulate(KEY, method, clients, rounds=3, progress=False)
        for method in (base, matrix_scaled(base, train=4.0))
    )
    assert plain.statement == through.statement
    assert not np.array_equal(
        np.asarray(plain.server.params["head"]["kernel"]),
        np.asarray(through.server.params["head"]["kernel"]),
    )


def test_a_correction_around_a_map_comes_after_it():
    """The loss of local steps is the loss by which the client is evaluated."""
    base = fedavg(LINEAR, local=LocalSGD(optax.sgd(0.0), 64))
    method = prior_corrected(matrix_scaled(base, penalty=2.0, train=2.0), train=True)
    server, _ = method.init(KEY, 1)
    data = own_data(np.arange(50))
    _, _, info = method.client_update(KEY, server, (), data)
    personal = method.personalize(KEY, server, (), data)
    inputs, labels = data.take(jnp.arange(50))
    logits = method.model.apply(personal, LINEAR.prepare(inputs))
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    assert float(info["loss"]) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("name", ["ppsgd", "dp_ridge"])
def test_a_method_with_a_loss_of_its_own_is_refused(name):
    method = matrix_scaled(ALGORITHMS[name](), train=1.0)
    with pytest.raises(ValueError, match="train must be left out for a method with a loss"):
        check_algorithm(method, small_clients(), 2)


def test_private_local_steps_are_refused():
    with pytest.raises(ValueError, match="train must be left out with private local steps"):
        matrix_scaled(ALGORITHMS["pdp_fl_examples"](), train=1.0)


def test_other_tasks_are_refused():
    with pytest.raises(ValueError, match="algorithm must be for a classification"):
        matrix_scaled(fedavg(MODEL._replace(task=regression())))
