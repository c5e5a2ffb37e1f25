import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms_table import small_clients

from jaxfl import simulate
from jaxfl.algorithms import dp_prototypes, dp_ridge
from jaxfl.data import iid, load, make_clients, matching
from jaxfl.data.clients import rows_of
from jaxfl.engine.mesh import data_of, in_rows
from jaxfl.models import digits_cnn, from_flax, lenet, mlp, resnet20
from jaxfl.privacy import calibrate
from jaxfl.tasks import regression

LINEAR = mlp((8, 8, 1), 10, hidden=())
EXACT = {"clip": 100.0, "noise_multiplier": 0.0}
"""Options of methods that neither clip nor add noise."""
RADIUS = 3.0
BUILDERS = pytest.mark.parametrize("build", [dp_ridge, dp_prototypes])


def run(method, clients, rounds=1):
    return simulate(0, method, clients, rounds=rounds, progress=False)


def examples(clients):
    """Return each client's clipped features and one-hot labels, in float64."""
    found = []
    for client in range(clients.num_clients):
        rows = rows_of(clients.train, clients.train_size[[client]], [client])
        # The network takes no empty batch, and one client has no examples.
        batch = jnp.asarray(clients.inputs[rows if len(rows) else [0]])
        x = np.asarray(LINEAR.prepare(batch), np.float64).reshape(-1, 64)[: len(rows)]
        length = np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30)
        found.append((x * np.minimum(1, RADIUS / length), np.eye(10)[clients.labels[rows]]))
    return found


def with_bias(x):
    return np.concatenate([x, np.full((len(x), 1), RADIUS)], axis=1)


def ridge_of(pairs, ridge):
    """Solve the ridge regression whose clients count equally."""
    second, cross = np.zeros((65, 65)), np.zeros((65, 10))
    for x, hot in pairs:
        second += with_bias(x).T @ with_bias(x) / max(len(x), 1) / len(pairs)
        cross += with_bias(x).T @ hot / max(len(x), 1) / len(pairs)
    return np.linalg.solve(second + ridge * np.eye(65), cross)


@pytest.mark.parametrize("rounds", [1, 3])
def test_ridge_without_noise_is_numpys(rounds):
    clients = small_clients()
    method = dp_ridge(LINEAR, radius=RADIUS, ridge=0.1, scale=2.0, **EXACT)
    head = run(method, clients, rounds).server.params["head"]
    wanted = ridge_of(examples(clients), 0.1)
    np.testing.assert_allclose(head["kernel"], 2 * wanted[:-1], atol=2e-4)
    np.testing.assert_allclose(head["bias"], 2 * RADIUS * wanted[-1], atol=2e-4)


def personal_head(method, clients, client):
    """Return the head with which a client is evaluated after one round."""
    result = run(method, clients)
    data = data_of(in_rows(clients), client, client, 9)
    return method.personalize(jax.random.key(0), result.server, (), data)["head"]


def test_personal_ridge_is_pulled_towards_the_servers():
    clients = small_clients()
    method = dp_ridge(LINEAR, radius=RADIUS, ridge=0.1, personal=2.0, **EXACT)
    pairs = examples(clients)
    shared = ridge_of(pairs, 0.1)
    x, hot = pairs[3]
    second = with_bias(x).T @ with_bias(x) + 2 * np.eye(65)
    wanted = np.linalg.solve(second, with_bias(x).T @ hot + 2 * shared)
    head = personal_head(method, clients, 3)
    np.testing.assert_allclose(head["kernel"], 10 * wanted[:-1], atol=1e-3)
    np.testing.assert_allclose(head["bias"], 10 * RADIUS * wanted[-1], atol=1e-3)


def test_prototypes_without_noise_are_numpys():
    clients = small_clients()
    method = dp_prototypes(LINEAR, radius=RADIUS, personal=2.0, least_share=1e-6, **EXACT)
    pairs = examples(clients)
    sums = sum(hot.T @ x / max(len(x), 1) for x, hot in pairs)
    shares = sum(hot.sum(axis=0) / max(len(x), 1) for x, hot in pairs)
    shared = sums / np.maximum(shares, 1e-6 * len(pairs))[:, None]
    head = run(method, clients).server.params["head"]
    np.testing.assert_allclose(head["kernel"], 10 * shared.T, atol=1e-4)
    x, hot = pairs[3]
    own = (hot.T @ x + 2 * shared) / (hot.sum(axis=0) + 2)[:, None]
    head = personal_head(method, clients, 3)
    np.testing.assert_allclose(head["kernel"], 10 * own.T, atol=1e-4)
    np.testing.assert_allclose(head["bias"], -5 * (own**2).sum(axis=1), atol=1e-3)


@BUILDERS
def test_a_client_without_examples_has_the_servers_head(build):
    clients = small_clients()
    method = build(LINEAR, radius=RADIUS, **EXACT)
    head = personal_head(method, clients, 2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3),
        head,
        run(method, clients).server.params["head"],
    )


@BUILDERS
def test_statistics_are_no_longer_than_the_docstring_says(build):
    """Statistics of one class, with features of full length, reach the docstring's bound."""
    radius = 0.5
    model = from_flax_linear()
    inputs = np.full((4, 9), 10.0, np.float32)
    labels = np.zeros(4, int)
    clients = make_clients((inputs, labels, inputs[:0], labels[:0]), [[0, 1], [2, 3]], [[], []])
    longest = radius * (np.sqrt(4 * radius**2 + 2) if build is dp_ridge else np.sqrt(2))
    for clip, dropped in [(1.001 * longest, 0.0), (0.99 * longest, 1.0)]:
        method = build(model, radius=radius, clip=clip, noise_multiplier=0.0)
        assert run(method, clients).metrics[-1]["clipped"] == dropped


def from_flax_linear():
    class Linear(nn.Module):
        def setup(self):
            self.head = nn.Dense(3)

        def extract(self, x):
            return x

        def classify(self, x):
            return self.head(x)

        def __call__(self, x):
            return self.classify(self.extract(x))

    return from_flax(Linear(), (9,))


@pytest.fixture(scope="module")
def digits():
    data = load("digits")
    lists = iid(data.train_labels, 100, seed=0)
    return make_clients(data, lists, matching(lists, data.train_labels, data.test_labels, seed=0))


@BUILDERS
def test_one_private_release_beats_chance_by_far(build, digits):
    z = calibrate(8.0, clients=100, rounds=1)
    method = (
        build(LINEAR, radius=4.0, clip=2.0, noise_multiplier=z, ridge=0.5)
        if build is dp_ridge
        else build(LINEAR, radius=4.0, clip=2.0, noise_multiplier=z)
    )
    result = run(method, digits)
    assert result.metrics[-1]["accuracy"] > 0.5
    assert result.metrics[-1]["epsilon"] == pytest.approx(8.0, rel=1e-3)


def test_noise_cannot_outweigh_the_ridge(digits):
    """The inverse of a matrix without negative eigenvalues plus the ridge is at most 1 / ridge."""
    method = dp_ridge(LINEAR, clip=0.01, noise_multiplier=200.0, ridge=0.1, scale=1.0, radius=1.0)
    server = run(method, digits).server
    weights = np.concatenate([server.params["head"]["kernel"], server.params["head"]["bias"][None]])
    assert np.linalg.eigvalsh(np.asarray(server.total["second"])).min() < -0.1
    assert np.linalg.norm(weights) <= np.linalg.norm(server.total["cross"]) / 0.1


@BUILDERS
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            mlp((8, 8, 1), 10)._replace(task=regression()),
            "model.task must be classification, got 'regression'",
        ),
        (lenet()._replace(head=("dense_1", "head")), "model must end with one dense layer"),
        (lenet()._replace(head=("conv_0",)), "model must end with one dense layer"),
        (lenet()._replace(extract=None), "model must end with one dense layer"),
        (lenet()._replace(head=()), "has no head"),
    ],
)
def test_other_models_raise_an_error(build, model, message):
    with pytest.raises(ValueError, match=message):
        build(model, clip=1.0, noise_multiplier=1.0)


@BUILDERS
@pytest.mark.parametrize("change", [lambda x: -x, lambda x: 2 * x, nn.relu, lambda x: x[:, ::-1]])
def test_a_head_that_sees_other_features_raises_an_error(build, change):
    class Changed(nn.Module):
        def setup(self):
            self.head = nn.Dense(3)

        def extract(self, x):
            return x

        def classify(self, x):
            return self.head(change(x))

        def __call__(self, x):
            return self.classify(self.extract(x))

    with pytest.raises(ValueError, match="model must end with one dense layer"):
        build(from_flax(Changed(), (9,)), clip=1.0, noise_multiplier=1.0)


@pytest.mark.parametrize("model", [LINEAR, lenet(), mlp((8, 8, 1), 10), resnet20(), digits_cnn()])
def test_networks_of_the_zoo_end_with_a_dense_layer(model):
    assert dp_ridge(model, clip=1.0, noise_multiplier=1.0).name == "dp_ridge"
