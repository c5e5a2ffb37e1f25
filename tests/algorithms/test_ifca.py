import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, client_data, small_clients

from jaxfl import simulate
from jaxfl.algorithms import dp_fedavg, ifca
from jaxfl.algorithms.server import Server
from jaxfl.data import load, make_clients
from jaxfl.local.train import LocalSGD
from jaxfl.models import mlp
from jaxfl.privacy import Full, Poisson

LINEAR = mlp((8, 8, 1), 10, hidden=())
STEP = LocalSGD(optax.sgd(1.0), 16, 1)
KEY = jax.random.key(5)


def models(number, scale=1.0):
    """Return linear models of NumPy's draws, stacked."""
    rng = np.random.default_rng(1)
    drawn = {"kernel": rng.normal(size=(number, 64, 10)), "bias": rng.normal(size=(number, 10))}
    return {"head": {name: jnp.asarray(scale * leaf, jnp.float32) for name, leaf in drawn.items()}}


def log_softmax(logits):
    return (
        logits
        - logits.max(1, keepdims=True)
        - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))[:, None]
    )


def test_a_client_trains_the_model_that_numpy_finds_best_and_no_other():
    method = ifca(LINEAR, clusters=4, local=STEP)
    data = client_data()
    several = models(4)
    message, _, _ = method.client_update(KEY, Server(several, ()), (), data)

    inputs, labels = data.take(jnp.arange(int(data.size)))
    x = np.asarray(LINEAR.prepare(inputs), np.float64)
    hot = np.eye(10)[np.asarray(labels)]
    kernels, biases = (np.asarray(several["head"][name], np.float64) for name in ("kernel", "bias"))
    logs = [log_softmax(x @ kernel + bias) for kernel, bias in zip(kernels, biases, strict=True)]
    losses = [-(hot * own).sum(1).mean() for own in logs]
    best = int(np.argmin(losses))
    assert best != 0  # The first model would also be chosen by a method that does not compare.
    errors = (hot - np.exp(logs[best])) / len(x)
    sent = message.update["head"]
    np.testing.assert_allclose(sent["kernel"][best], x.T @ errors, atol=1e-5)
    np.testing.assert_allclose(sent["bias"][best], errors.sum(0), atol=1e-5)
    others = [number for number in range(4) if number != best]
    assert not np.any(sent["kernel"][jnp.array(others)])
    assert not np.any(sent["bias"][jnp.array(others)])
    chosen = method.personalize(KEY, Server(several, ()), (), data)
    np.testing.assert_array_equal(chosen["head"]["kernel"], several["head"]["kernel"][best])


def test_padding_chooses_no_model():
    """A client without examples has losses of 0 for all models, whatever is in its padding."""
    empty = dataclasses.replace(client_data(), size=jnp.array(0))
    method = ifca(LINEAR, clusters=3, local=STEP)
    for several in (models(3), jax.tree.map(lambda leaf: leaf[::-1], models(3))):
        chosen = method.personalize(KEY, Server(several, ()), (), empty)
        np.testing.assert_array_equal(chosen["head"]["kernel"], several["head"]["kernel"][0])


def test_a_model_of_nan_is_chosen_last():
    several = models(3)
    several["head"]["bias"] = several["head"]["bias"].at[0].set(jnp.nan)
    chosen = ifca(LINEAR, clusters=3, local=STEP).personalize(
        KEY, Server(several, ()), (), client_data()
    )
    assert np.all(np.isfinite(chosen["head"]["bias"]))


def test_the_servers_step_divides_by_the_clients_that_it_expects_in_a_cluster():
    """With 8 participants and 4 models, a model moves by the sum of its clients' updates / 2."""
    method = ifca(LINEAR, clusters=4, local=STEP)
    several = models(4)
    total = models(4, scale=3.0)
    optimizer = optax.sgd(1.0).init(several)
    after = method.server_update(
        Server(several, optimizer), jax.tree.map(lambda leaf: leaf / 8, total)
    )
    expected = jax.tree.map(lambda start, whole: start + whole / 2, several, total)
    for own, theirs in zip(jax.tree.leaves(after.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, theirs, rtol=1e-5, atol=1e-5)


def test_one_cluster_is_dp_fedavg_from_the_same_start():
    options = {"local": LocalSGD(optax.sgd(0.1), 4, 2), "clip": CLIP, "sampling": Poisson(0.6)}
    one = ifca(MODEL, clusters=1, noise_multiplier=0.0, **options)
    usual = dp_fedavg(MODEL, noise_multiplier=0.0, **options)

    def init(key, num_clients):
        server, clients = one.init(key, num_clients)
        return Server(
            jax.tree.map(lambda leaf: leaf[0], server.params), optax.sgd(1.0).init({})
        ), clients

    results = [
        simulate(0, own, small_clients(), rounds=3, progress=False)
        for own in (one, usual._replace(init=init))
    ]
    for name in ("accuracy", "loss"):
        np.testing.assert_allclose(*(result.scores[name] for result in results), rtol=1e-5)


@pytest.mark.slow
def test_groups_with_other_names_of_classes_get_models_of_their_own():
    data = load("digits")
    order = np.random.default_rng(1).permutation(10)

    def renamed(labels):
        found = labels.copy()
        found[1::2] = order[labels[1::2]]
        return found

    data = data._replace(
        train_labels=renamed(data.train_labels), test_labels=renamed(data.test_labels)
    )

    def dealt(examples):
        groups = [np.arange(examples)[group::2] for group in range(2)]
        return [rows for group in groups for rows in np.array_split(group, 20)]

    clients = make_clients(data, dealt(len(data.train_labels)), dealt(len(data.test_labels)))
    options = {
        "local": LocalSGD(optax.sgd(0.1), 5, 2),
        "clip": 1.0,
        "noise_multiplier": 0.0,
        "sampling": Full(),
    }
    usual, clustered = (
        simulate(0, method, clients, rounds=20, progress=False).metrics[-1]["accuracy"]
        for method in (dp_fedavg(LINEAR, **options), ifca(LINEAR, clusters=2, **options))
    )
    assert clustered > usual + 0.2
    assert clustered > 0.8
