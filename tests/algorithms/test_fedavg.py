from typing import Any

import jax
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients

from jaxfl import simulate
from jaxfl.algorithms import dp_fedavg, dp_fedavg_fb, fedavg, fedprox, local_only
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import DPSGD, Mechanism, Poisson

KEY = jax.random.key(11)
HEAD = LocalSGD(optax.sgd(0.5), epochs=15)


def run(algorithm, clients=None, rounds=3):
    return simulate(KEY, algorithm, clients or small_clients(), rounds=rounds, progress=False)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_fedprox_without_its_term_is_fedavg():
    assert_same(run(fedprox(MODEL, mu=0.0)).server, run(fedavg(MODEL)).server)


def test_fedprox_adds_mu_times_the_distance_to_the_gradient():
    # With one example and batch 1, two steps: the second gradient has mu (w - w^t) more than FedAvg's.
    one, two = (LocalSGD(optax.sgd(0.1), 16, steps=steps) for steps in (1, 2))
    plain, prox = fedavg(MODEL, local=two), fedprox(MODEL, mu=0.5, local=two)
    server, _ = plain.init(KEY, len(SIZES))
    one, _ = fedavg(MODEL, local=one).client_update(KEY, server, (), client_data())[::2]
    two, _ = plain.client_update(KEY, server, (), client_data())[::2]
    found, _ = prox.client_update(KEY, server, (), client_data())[::2]
    expected = jax.tree.map(lambda two, one: two - 0.1 * 0.5 * one, two.update, one.update)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found.update, expected
    )


@pytest.mark.slow
def test_head_tuning_changes_the_evaluation_and_not_the_transcript():
    private = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
    plain, tuned = run(dp_fedavg(MODEL, **private)), run(dp_fedavg_fb(MODEL, head=HEAD, **private))
    assert_same(plain.server, tuned.server)
    assert not np.array_equal(plain.scores["loss"], tuned.scores["loss"])


def test_head_tuning_moves_only_the_head():
    algorithm = dp_fedavg_fb(MODEL, head=HEAD)
    server, _ = algorithm.init(KEY, len(SIZES))
    tuned = algorithm.personalize(KEY, server, (), client_data())
    for name in MODEL.layers:
        same = all(jax.tree.leaves(jax.tree.map(np.array_equal, tuned[name], server.params[name])))
        assert same == (name not in MODEL.head)


@pytest.mark.slow
def test_local_only_clients_do_not_see_each_other():
    clients = small_clients()
    changed = clients._replace(
        labels=np.where(np.arange(len(clients.labels)) == clients.train[4][0], 0, clients.labels)
    )
    assert clients.labels[clients.train[4][0]] != 0
    one, other = run(local_only(MODEL), clients).states, run(local_only(MODEL), changed).states
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
        differs = np.any(np.reshape(np.asarray(a) != np.asarray(b), (len(a), -1)), axis=1)
        assert not np.delete(differs, 4).any()


def test_local_only_spends_nothing():
    honest = run(local_only(MODEL)).statement["honest"]
    assert honest["aggregate"]["rdp"]["total"] == honest["upload"]["pld"]["total"] == 0


@pytest.mark.slow
def test_weights_by_size_are_the_published_average():
    # One full-batch step from the same point: the average weighted by size is the gradient step on all data.
    weights = Mechanism(weights=np.array(SIZES, float), denominator="participants")
    averaged = run(
        fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), 16), mechanism=weights), rounds=1
    ).server.params
    pooled = small_clients((sum(SIZES),))
    whole = run(
        fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), sum(SIZES))), pooled, rounds=1
    ).server.params
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), averaged, whole
    )


def test_private_steps_are_the_familys_alone():
    private: Any = DPSGD(clip=0.5, noise_multiplier=1.0, rate=0.4, steps=2)
    assert fedavg(MODEL, local=private).dp_sgd is private
    assert fedavg(MODEL).dp_sgd is None
    with pytest.raises(TypeError, match=r"local must be .*Give a jaxfl.LocalSGD"):
        local_only(MODEL, local=private)


def test_a_negative_proximal_weight_is_refused():
    with pytest.raises(ValueError, match=r"mu must be .* got -1\.0"):
        fedprox(MODEL, mu=-1.0)
