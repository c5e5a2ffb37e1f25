import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms_table import small_clients

from jaxfl.local.fisher import client_fisher, fisher_diagonal, normalize_per_layer, squared_gradient
from jaxfl.models import digits_cnn, feddpa_cnn, lenet, lenet_groupnorm, mlp
from jaxfl.types import ClientData

MODELS = {
    "mlp": (mlp((8, 8, 1), hidden=(16,)), (8, 8, 1)),
    "digits_cnn": (digits_cnn(), (8, 8, 1)),
    "odd": (digits_cnn((9, 7, 2)), (9, 7, 2)),
    "lenet": (lenet((28, 28, 1)), (28, 28, 1)),
    "lenet_groupnorm": (lenet_groupnorm((28, 28, 1)), (28, 28, 1)),
    "feddpa_cifar10": (feddpa_cnn("cifar10"), (32, 32, 3)),
    "feddpa_mnist": (feddpa_cnn("mnist"), (28, 28, 1)),
}


SMALL = ("mlp", "odd", "lenet", "feddpa_mnist")


def by_example(model, params, images, labels):
    """Return the sum over examples of the squared gradient of log p(y|x)."""

    def log_p(params, image, label):
        return jax.nn.log_softmax(model.apply(params, model.prepare(image[None])))[0, label]

    gradient = jax.jit(jax.grad(log_p))
    squares = [jax.tree.map(jnp.square, gradient(params, i, y)) for i, y in zip(images, labels)]
    return jax.tree.map(lambda *leaves: sum(leaves), *squares)


def assert_close(found, expected, tolerance=1e-4):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(jnp.max(b)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SMALL else pytest.mark.slow) for name in MODELS]
)
def test_one_backward_pass_equals_a_loop_over_examples(name):
    model, shape = MODELS[name]
    rng = np.random.default_rng(0)
    images, labels = (
        jnp.asarray(rng.integers(0, 256, (4, *shape), np.uint8)),
        jnp.asarray([1, 0, 3, 3]),
    )
    params = model.init(jax.random.key(0))
    weights = jnp.array([1.0, 1.0, 0.0, 1.0])
    found = jax.jit(lambda p, x: fisher_diagonal(model, p, x, labels, weights))(
        params, model.prepare(images)
    )
    kept = jnp.array([0, 1, 3])
    assert_close(found, by_example(model, params, images[kept], labels[kept]))


@pytest.mark.parametrize(
    "model", [mlp((8, 8, 1), hidden=(16,)), digits_cnn()], ids=["examples first", "examples last"]
)
def test_without_a_rule_of_its_own_a_model_is_differentiated_by_example(model):
    rng = np.random.default_rng(0)
    images, labels = (
        jnp.asarray(rng.integers(0, 256, (11, 8, 8, 1), np.uint8)),
        jnp.asarray(rng.integers(0, 10, 11)),
    )
    params, weights = (
        model.init(jax.random.key(0)),
        jnp.asarray(rng.integers(0, 2, 11), jnp.float32),
    )
    expected = fisher_diagonal(model, params, model.prepare(images), labels, weights)
    found = fisher_diagonal(
        model._replace(sum_grad_squared=None), params, model.prepare(images), labels, weights
    )
    assert_close(found, expected)


@pytest.mark.parametrize("batch_size", [2, 4, 64])
def test_a_clients_mean_ignores_padding_and_blocks(batch_size):
    clients, model = small_clients(extra_padding=3), mlp((8, 8, 1), hidden=(16,))
    params = model.init(jax.random.key(0))
    rows = jnp.asarray(clients.train[0])  # with three more behind the client's own
    store, labels, size = (
        jnp.asarray(a) for a in (clients.inputs, clients.labels, clients.train_size[0])
    )
    found = client_fisher(
        model, params, ClientData(store, labels, rows, size), batch_size=batch_size
    )
    own = rows[: int(size)]
    expected = jax.tree.map(
        lambda leaf: leaf / int(size), by_example(model, params, store[own], labels[own])
    )
    assert_close(found, expected)


def test_the_square_of_the_mean_vanishes_where_examples_pull_apart():
    """One image has two labels of equal logits. Each gradient is 1/2, and their mean is 0."""
    model = mlp((2, 2, 1), 2, hidden=(3,))
    params = model.init(jax.random.key(0))
    params["head"] = jax.tree.map(jnp.zeros_like, params["head"])
    image = jnp.full((2, 2, 2, 1), 7, jnp.uint8)
    data = ClientData(image, jnp.array([0, 1]), jnp.array([0, 1]), jnp.int32(2))
    np.testing.assert_allclose(client_fisher(model, params, data)["head"]["bias"], 0.25, rtol=1e-6)
    for leaf in jax.tree.leaves(squared_gradient(model, params, data)):
        np.testing.assert_allclose(leaf, 0.0, atol=1e-12)


@pytest.mark.parametrize("batch_size", [2, 64])
def test_the_square_of_the_mean_is_that_of_the_mean_loss(batch_size):
    clients, model = small_clients(extra_padding=3), mlp((8, 8, 1), hidden=(16,))
    params = model.init(jax.random.key(0))
    store, labels = jnp.asarray(clients.inputs), jnp.asarray(clients.labels)
    data = ClientData(
        store, labels, jnp.asarray(clients.train[0]), jnp.asarray(clients.train_size[0])
    )
    own = jnp.asarray(clients.train[0])[: int(data.size)]

    def loss(params):
        return model.task.loss(model.apply(params, model.prepare(store[own])), labels[own]).mean()

    expected = jax.tree.map(jnp.square, jax.grad(loss)(params))
    assert_close(squared_gradient(model, params, data, batch_size=batch_size), expected)


def test_an_empty_client_has_no_information():
    clients, model = small_clients(), mlp((8, 8, 1), hidden=(16,))
    data = ClientData(
        jnp.asarray(clients.inputs), jnp.asarray(clients.labels), jnp.zeros(1, int), jnp.int32(0)
    )
    found = client_fisher(model, model.init(jax.random.key(0)), data)
    assert all(not leaf.any() for leaf in jax.tree.leaves(found))


def softmax_regression(shape):
    return mlp(shape, 2, hidden=()), {
        "head": {"kernel": jnp.zeros((int(np.prod(shape)), 2)), "bias": jnp.zeros(2)}
    }


def test_softmax_regression_closed_form():
    # At W = 0 each p is 1/2: d log p / dW = (onehot - 1/2) x.
    model, params = softmax_regression((1, 1, 2))
    x = model.prepare(jnp.array([[[[1.0, 2.0]]]]))
    found = fisher_diagonal(model, params, x, jnp.array([0]), jnp.ones(1))
    np.testing.assert_allclose(found["head"]["kernel"].T, [[0.25, 1.0], [0.25, 1.0]])


def test_mean_of_squares_and_not_square_of_mean():
    model, params = softmax_regression((1, 1, 1))
    x = model.prepare(jnp.ones((2, 1, 1, 1)))
    found = fisher_diagonal(model, params, x, jnp.array([0, 1]), jnp.ones(2))
    np.testing.assert_allclose(found["head"]["kernel"] / 2, [[0.25, 0.25]])


def test_normalised_by_layer():
    found = normalize_per_layer({"a": jnp.array([1.0, 2.0, 5.0]), "b": jnp.array([3.0, 3.0])})
    np.testing.assert_array_equal(found["a"], [0, 0.25, 1])
    np.testing.assert_array_equal(found["b"], [0, 0])
