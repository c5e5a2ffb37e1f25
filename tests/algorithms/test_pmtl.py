from typing import Any

import jax
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients

from jaxfl import simulate
from jaxfl.algorithms import dp_fedavg, dp_fedavg_fb, fedavg, fedprox, mr_mtl, pmtl, pmtl_ft
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import DPSGD, Full, Mechanism, Poisson

KEY = jax.random.key(19)
PRIVATE: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
LOCAL: dict[str, Any] = {"local": LocalSGD(optax.sgd(0.2), 4, 2)}


def run(algorithm, rounds=3, clients=None):
    return simulate(KEY, algorithm, clients or small_clients(), rounds=rounds, progress=False)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
def test_without_penalty_it_sends_what_dp_fedavg_sends():
    expected = run(dp_fedavg(MODEL, **LOCAL, **PRIVATE)).server
    assert_same(
        run(pmtl(MODEL, penalty_weight=0.0, start="broadcast", **LOCAL, **PRIVATE)).server, expected
    )


@pytest.mark.slow
def test_own_weights_start_like_the_broadcast_ones_and_then_differ():
    one, other = (pmtl(MODEL, start=start, **LOCAL, **PRIVATE) for start in ("own", "broadcast"))
    assert_same(run(one, rounds=1).server, run(other, rounds=1).server)
    pairs = zip(*map(jax.tree.leaves, (run(one).server, run(other).server)), strict=True)
    assert not any(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.slow
def test_pmtl_ft_without_penalty_is_dp_fedavg_fb():
    head = LocalSGD(optax.sgd(0.5), 4, 2)
    found = run(pmtl_ft(MODEL, penalty_weight=0.0, head=head, **LOCAL, **PRIVATE))
    expected = run(dp_fedavg_fb(MODEL, head=head, **LOCAL, **PRIVATE))
    assert_same(found.server, expected.server)
    assert_same(found.scores, expected.scores)


@pytest.mark.parametrize(
    ("build", "options"), [(pmtl, {"start": "own"}), (pmtl, {"start": "broadcast"}), (pmtl_ft, {})]
)
def test_the_penalty_has_its_gradient(build, options):
    algorithm, prox = (
        build(MODEL, penalty_weight=0.5, **options, **LOCAL, **PRIVATE),
        fedprox(MODEL, mu=0.5, **LOCAL),
    )
    server, _ = prox.init(KEY, len(SIZES))
    state = server.params if options else ()
    found, _, _ = algorithm.client_update(KEY, server, state, client_data())
    expected, _, _ = prox.client_update(KEY, server, (), client_data())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8),
        found.update,
        expected.update,
    )
    plain, _, _ = dp_fedavg(MODEL, **LOCAL, **PRIVATE).client_update(KEY, server, (), client_data())
    assert optax.tree.norm(found.update) < optax.tree.norm(plain.update)


def test_a_client_trains_on_from_its_own_weights_and_keeps_them():
    algorithm = pmtl(MODEL, **LOCAL, **PRIVATE)
    server, _ = algorithm.init(KEY, len(SIZES))
    own = jax.tree.map(lambda leaf: leaf + 0.1, server.params)
    still = pmtl(MODEL, local=LocalSGD(optax.sgd(0.0), 4, 2), **PRIVATE)
    message, kept, _ = still.client_update(KEY, server, own, client_data())
    assert_same(kept, own)
    assert_same(message.update, optax.tree.sub(own, server.params))
    assert_same(algorithm.personalize(KEY, server, own, client_data()), own)


@pytest.mark.parametrize("start", ["own", "broadcast"])
def test_what_is_sent(start):
    # Batches of all examples: no key matters.
    local = LocalSGD(optax.sgd(0.2), max(SIZES), 2)
    options: dict[str, Any] = {"start": start, "penalty_weight": 0.5, "local": local, **PRIVATE}
    server, _ = fedavg(MODEL).init(KEY, len(SIZES))
    own = jax.tree.map(lambda leaf: leaf + 0.1, server.params)

    def sent(algorithm):
        message, kept, _ = algorithm.client_update(KEY, server, own, client_data())
        return message.update, kept

    for send, origin in (
        ("difference", server.params),
        ("step", own if start == "own" else server.params),
    ):
        update, kept = sent(pmtl(MODEL, send=send, **options))
        assert_same(update, optax.tree.sub(kept, origin))
    update, also_kept = sent(pmtl(MODEL, send="copy", **options))
    assert_same(also_kept, kept)
    plain, _ = sent(dp_fedavg(MODEL, local=local, **PRIVATE))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), update, plain)


def test_a_second_copy_is_not_trained_by_steps_that_are_accounted_once():
    with pytest.raises(
        ValueError,
        match=r"send must be .* got 'copy' with local=DPSGD\(.*\)\. Choose another send, or give a",
    ):
        pmtl(MODEL, send="copy", local=private_steps(), **PRIVATE)
    with pytest.raises(ValueError, match=r"send must be .* got 'all'"):
        pmtl(MODEL, send="all", **PRIVATE)  # pyrefly: ignore


FILLED = small_clients((9, 4, 7, 6))
"""Silos that all have examples, because a silo without examples keeps its first weights."""


def private_steps(rate=0.1, steps=4):
    return DPSGD(clip=0.5, noise_multiplier=0.8, rate=0.5, steps=steps, optimizer=optax.sgd(rate))


def test_mr_mtl_without_penalty_is_local_training_by_private_steps():
    algorithm = mr_mtl(MODEL, penalty_weight=0.0, local=private_steps())
    server, _ = algorithm.init(KEY, len(SIZES))
    own = jax.tree.map(lambda leaf: leaf + 0.1, server.params)
    message, kept, _ = algorithm.client_update(KEY, server, own, client_data())
    assert_same(kept, private_steps().train(KEY, MODEL, own, client_data())[0])
    assert_same(message.update, optax.tree.sub(kept, server.params))


def test_mr_mtls_penalty_draws_towards_the_broadcast_model():
    # In one step from w + 0.1, with the same noise, by eta lambda 0.1 more than without.
    kept = []
    for weight in (0.0, 2.0):
        algorithm = mr_mtl(MODEL, penalty_weight=weight, local=private_steps(0.25, steps=1))
        server, _ = algorithm.init(KEY, len(SIZES))
        own = jax.tree.map(lambda leaf: leaf + 0.1, server.params)
        kept.append(algorithm.client_update(KEY, server, own, client_data())[1])
    pulled = optax.tree.sub(kept[1], kept[0])
    jax.tree.map(
        lambda leaf: np.testing.assert_allclose(leaf, -0.25 * 2.0 * 0.1, rtol=1e-4), pulled
    )


@pytest.mark.slow
def test_mr_mtl_with_a_large_penalty_is_fedavg_by_private_steps():
    # At eta lambda = 1 a step ends at w - eta g: the mean moves as FedAvg's does with one step, up to eta.
    found, expected = (
        run(build, clients=FILLED)
        for build in (
            mr_mtl(MODEL, penalty_weight=1e4, local=private_steps(1e-4, steps=1)),
            fedavg(MODEL, local=private_steps(1e-4, steps=1), mechanism=Mechanism(sampling=Full())),
        )
    )
    start, _ = mr_mtl(MODEL, local=private_steps()).init(
        jax.random.split(KEY, 3)[0], FILLED.num_clients
    )
    moved, error = (
        optax.tree.sub(expected.server.params, other.params) for other in (start, found.server)
    )
    assert 0 < optax.tree.norm(error) < 0.05 * optax.tree.norm(moved)


def test_mr_mtls_shared_model_is_the_mean_and_its_epsilon_that_of_the_steps():
    found = run(mr_mtl(MODEL, penalty_weight=0.5, local=private_steps()), clients=FILLED)
    mean = jax.tree.map(lambda leaf: np.mean(leaf, axis=0), found.states)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        found.server.params,
        mean,
    )
    expected = run(fedavg(MODEL, local=private_steps()), clients=FILLED)
    assert found.statement["examples"] == expected.statement["examples"]
    assert found.statement["honest"]["aggregate"]["rdp"]["total"] in (np.inf, "inf")


@pytest.mark.parametrize("build", [pmtl, pmtl_ft])
def test_wrong_arguments_name_themselves(build):
    with pytest.raises(ValueError, match=r"penalty_weight must be .* got -1\.0"):
        build(MODEL, penalty_weight=-1.0, **PRIVATE)
