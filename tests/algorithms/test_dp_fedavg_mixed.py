"""The map's recipe sends DP-FedAvg's messages, and each client combines the parts of the recipe."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import MODEL, small_clients

from jaxfl import LocalSGD, simulate
from jaxfl.algorithms import (
    dp_fedavg,
    dp_fedavg_mixed,
    fine_tuned,
    matrix_scaled,
    mixed,
    prior_corrected,
)
from jaxfl.data import load
from jaxfl.privacy import Poisson
from jaxfl.types import ClientData

KEY = jax.random.key(5)

PRIVATE: dict[str, Any] = {"clip": 0.5, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
LOCAL = LocalSGD(optax.sgd(0.1), 4)
TUNING = LocalSGD(optax.sgd(0.05), 4, 2)
ALONE = LocalSGD(optax.sgd(0.2), 4, 5)


def recipe(**changed):
    options: dict[str, Any] = {"local": LOCAL, "tuning": TUNING, "alone": ALONE} | PRIVATE | changed
    return dp_fedavg_mixed(MODEL, **options)


def base(train):
    """Return DP-FedAvg, which trains through maps of logits unless the penalty `train` is None."""
    plain = dp_fedavg(MODEL, local=LOCAL, **PRIVATE)
    return plain if train is None else matrix_scaled(plain, penalty=4.0, train=train)


@pytest.mark.parametrize("train", [None, 20.0])
def test_what_is_sent_is_dp_fedavgs_to_the_bit(train):
    clients = small_clients()
    found, expected = (
        simulate(0, method, clients, rounds=3, progress=False)
        for method in (recipe(train=train), base(train))
    )
    for own, theirs in zip(*map(jax.tree.leaves, (found.server, expected.server)), strict=True):
        np.testing.assert_array_equal(own, theirs)
    epsilons = [result.statement["honest"]["aggregate"]["epsilon"] for result in (found, expected)]
    assert epsilons[0] == epsilons[1]


def adapted(penalty, smoothing):
    """Return DP-FedAvg with a map of logits, or else a correction, or else as it is."""
    if penalty is not None:
        return matrix_scaled(base(None), penalty=penalty)
    return base(None) if smoothing is None else prior_corrected(base(None), smoothing=smoothing)


@pytest.mark.parametrize(
    ("penalty", "smoothing"),
    [(4.0, None), (None, 0.5), (None, None)],
    ids=["map", "shares", "none"],
)
def test_clients_adapt_by_a_map_or_by_their_shares_or_not(penalty, smoothing):
    clients = small_clients()
    own = recipe(train=None, penalty=penalty, smoothing=smoothing)
    parts = mixed(fine_tuned(adapted(penalty, smoothing), local=TUNING), local=ALONE)
    found, expected = (
        simulate(0, method, clients, rounds=2, progress=False) for method in (own, parts)
    )
    np.testing.assert_array_equal(found.scores["loss"], expected.scores["loss"])


def test_a_map_and_shares_of_classes_are_not_combined():
    with pytest.raises(
        ValueError, match=r"smoothing must be None if there is a penalty.*got .*0.1"
    ):
        recipe(smoothing=0.1)


def test_a_useless_shared_model_leaves_the_clients_own():
    method = recipe(tuning=LocalSGD(optax.sgd(1e-4), 4))
    server, _ = method.init(KEY, 1)
    noise = jax.random.split(KEY, len(jax.tree.leaves(server.params)))
    leaves, structure = jax.tree.flatten(server.params)
    drawn = [
        100 * jax.random.normal(key, leaf.shape) for key, leaf in zip(noise, leaves, strict=True)
    ]
    server = server._replace(params=jax.tree.unflatten(structure, drawn))
    data = load("digits")
    rows = jnp.arange(60)
    client = ClientData(
        jnp.asarray(data.train_inputs), jnp.asarray(data.train_labels), rows, jnp.asarray(60)
    )
    params = jax.jit(method.personalize)(KEY, server, (), client)
    assert float(params["mixture"].weight) >= 0.9
