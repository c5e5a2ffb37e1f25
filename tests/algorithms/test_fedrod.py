import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, client_data, small_clients

from jaxfl import simulate
from jaxfl.algorithms import fedrod
from jaxfl.data import classes_per_client, load, make_clients
from jaxfl.local.train import LocalSGD
from jaxfl.models import mlp
from jaxfl.privacy import Full, Poisson
from jaxfl.tasks import classification, regression

WHOLE = 16  # every client's examples in one batch: no order
LINEAR = mlp((8, 8, 1), 10, hidden=())
STEP = LocalSGD(optax.sgd(1.0), WHOLE, 1)
KEY = jax.random.key(5)


def softmax(logits):
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("class_weights", [None, tuple(range(1, 11))])
def test_one_step_of_a_linear_model_is_numpys(class_weights):
    """Both gradients are features times (probabilities - labels). One has the counts of classes."""
    model = LINEAR._replace(task=classification(class_weights=class_weights))
    method = fedrod(model, clip=1e6, noise_multiplier=0.0, sampling=Full(), local=STEP)
    data = client_data()
    server, _ = method.init(KEY, 1)
    rng = np.random.default_rng(0)
    personal = {"head": {"kernel": rng.normal(size=(64, 10)), "bias": rng.normal(size=10)}}
    personal = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), personal)
    message, after, _ = method.client_update(KEY, server, personal, data)

    inputs, labels = data.take(jnp.arange(int(data.size)))
    x = np.asarray(LINEAR.prepare(inputs), np.float64)
    hot = np.eye(10)[np.asarray(labels)]
    shared = jax.tree.map(np.float64, server.params["head"])
    own = jax.tree.map(np.float64, personal["head"])
    generic = x @ shared["kernel"] + shared["bias"]
    counted = hot.sum(axis=0) * np.exp(generic)
    balanced = counted / counted.sum(axis=1, keepdims=True)
    whole = softmax(generic + x @ own["kernel"] + own["bias"])
    moved = jax.tree.map(np.subtract, after["head"], personal["head"])
    weights = hot @ np.asarray(class_weights or np.ones(10))[:, None]
    for found, probabilities in ((message.update["head"], balanced), (moved, whole)):
        errors = weights * (hot - probabilities) / len(x)
        np.testing.assert_allclose(found["kernel"], x.T @ errors, atol=1e-5)
        np.testing.assert_allclose(found["bias"], errors.sum(axis=0), atol=1e-5)


def test_the_extractor_follows_the_balanced_loss_alone():
    """A client's personal head changes nothing of what it sends."""
    method = fedrod(MODEL, clip=1e6, noise_multiplier=0.0, sampling=Full(), local=STEP)
    server, _ = method.init(KEY, 1)
    zero = jax.tree.map(jnp.zeros_like, {"head": server.params["head"]})
    other = jax.tree.map(jnp.ones_like, zero)
    sent = [
        method.client_update(KEY, server, own, client_data())[0].update for own in (zero, other)
    ]
    jax.tree.map(np.testing.assert_array_equal, *sent)


def test_a_client_is_evaluated_with_both_heads():
    method = fedrod(MODEL, clip=CLIP, noise_multiplier=0.0, sampling=Poisson(0.6))
    result = simulate(KEY, method, small_clients(), rounds=2, progress=False)
    own = jax.tree.map(lambda leaf: leaf[0], result.states)
    params = method.personalize(KEY, result.server, own, client_data())
    both = result.server.params["head"]["kernel"] + own["head"]["kernel"]
    np.testing.assert_array_equal(params["head"]["kernel"], both)


@pytest.mark.slow
def test_personal_heads_help_where_classes_differ():
    data = load("digits")
    lists = classes_per_client(data.train_labels, data.test_labels, 60, 3, seed=0)
    clients = make_clients(data, *lists)
    local = LocalSGD(optax.sgd(0.1), 5, 2)
    method = fedrod(LINEAR, clip=1.0, noise_multiplier=0.0, sampling=Full(), local=local)
    personal = simulate(0, method, clients, rounds=10, progress=False).metrics[-1]["accuracy"]
    shared = method._replace(personalize=lambda key, server, client, data: server.params)
    generic = simulate(0, shared, clients, rounds=10, progress=False).metrics[-1]["accuracy"]
    assert personal > generic + 0.05
    assert generic > 0.5


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MODEL._replace(head=()), "has no head"),
        (MODEL._replace(task=regression()), "model must be for a classification"),
    ],
)
def test_other_models_raise_an_error(model, message):
    with pytest.raises(ValueError, match=message):
        fedrod(model, clip=1.0, noise_multiplier=1.0, sampling=Full())
