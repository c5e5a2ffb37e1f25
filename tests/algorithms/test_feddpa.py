import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, SIZES, client_data

from jaxfl.algorithms import fedavg, feddpa, feddpa_paper, local_only
from jaxfl.algorithms.feddpa import paper_epsilon, paper_noise_multiplier
from jaxfl.local.fisher import client_fisher, normalize_per_layer
from jaxfl.local.masks import fisher_mask
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import FixedSize, Full, Poisson
from jaxfl.privacy.accounting.ledgers import epsilon, planned_ledger

KEY = jax.random.key(2)
ADAM = LocalSGD(optax.adam(1e-3), 4, 2)
CIFAR: dict[str, Any] = {
    "examples": 50_000,
    "batch_size": 16,
    "epochs": 2,
    "rounds": 15,
    "rate": 1.0,
}


def build(**options):
    defaults: dict[str, Any] = {
        "sampling": Full(),
        "noise_multiplier": 0.0,
        "clip": CLIP,
        "local": ADAM,
    }
    return feddpa(MODEL, **defaults | options)


def printed(**options):
    defaults: dict[str, Any] = {
        "sampling": Full(),
        "noise_multiplier": 0.0,
        "clip": CLIP,
        "local": ADAM,
    }
    return feddpa_paper(MODEL, **defaults | {"clients": len(SIZES)} | options)


def moved(algorithm):
    """Return a server, a client that differs everywhere, and its message, state and info."""
    server, _ = algorithm.init(KEY, len(SIZES))
    client = jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(KEY, leaf.shape), server.params
    )
    message, after, info = algorithm.client_update(KEY, server, client, client_data())
    return server, client, message, after, info


@pytest.mark.slow
def test_noise_of_each_round_may_be_a_sequence():
    given = printed(noise_multiplier=(1.0, 2.0)).mechanism.client_noise
    each = [printed(noise_multiplier=z).mechanism.client_noise for z in (1.0, 2.0)]
    np.testing.assert_allclose(given, each)


def test_above_one_everything_is_shared_and_it_is_fedavg():
    algorithm = build(threshold=1.1, lambda2=0.0)
    server, _, message, _, info = moved(algorithm)
    plain = fedavg(MODEL, local=ADAM)
    expected, *_ = plain.client_update(jax.random.split(KEY)[1], server, (), client_data())
    jax.tree.map(np.testing.assert_array_equal, message.update, expected.update)
    assert info["personal"] == 0


def test_at_zero_everything_is_personal_and_it_is_local_training():
    algorithm = build(threshold=0.0, lambda1=0.0)
    server, client, message, after, info = moved(algorithm)
    alone = local_only(MODEL, local=ADAM)
    expected = alone.client_update(jax.random.split(KEY)[0], (), client, client_data())[1]
    jax.tree.map(np.testing.assert_array_equal, after, expected)
    jax.tree.map(
        lambda u, a, s: np.testing.assert_array_equal(u, a - s),
        message.update,
        after,
        server.params,
    )
    assert info["personal"] == 1


@pytest.mark.parametrize("reg", ["active", pytest.param("code", marks=pytest.mark.slow)])
def test_stages_touch_only_their_own_coordinates(reg):
    # Two runs that differ in stage B's penalty only agree on the personal part, bit for bit.
    one, other = (
        printed(reg=reg, threshold=0.3, lambda2=0.05),
        printed(reg=reg, threshold=0.3, lambda2=5.0),
    )
    server, client, _, a, info = moved(one)
    b = moved(other)[3]
    personal = fisher_mask(
        normalize_per_layer(client_fisher(MODEL, client, client_data(), batch_size=4)), 0.3
    )
    assert 0 < info["personal"] < 1
    for mask, x, y in zip(*map(jax.tree.leaves, (personal, a, b))):
        np.testing.assert_array_equal(np.where(mask, x, 0), np.where(mask, y, 0))
    assert any(not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b))))
    # A frozen optimizer leaves the merge: personal coordinates the client's, shared ones the server's.
    merged = moved(printed(reg=reg, threshold=0.3, local=LocalSGD(optax.sgd(0.0), 4)))[3]
    for mask, m, c, s in zip(*map(jax.tree.leaves, (personal, merged, client, server.params))):
        np.testing.assert_array_equal(m, np.where(mask, c, s))


def test_the_published_clients_are_those_of_the_sound_method():
    sound, paper = (build(), printed())
    (_, _, a, x, _), (_, _, b, y, _) = moved(sound), moved(paper)
    jax.tree.map(np.testing.assert_array_equal, (a.update, x), (b.update, y))
    assert (sound.name, paper.name) == ("feddpa", "feddpa_paper")


def test_adapted_evaluation_is_one_more_local_update():
    algorithm = build(evaluate="adapt")
    server, client, _, after, _ = moved(algorithm)
    jax.tree.map(
        np.testing.assert_array_equal,
        algorithm.personalize(KEY, server, client, client_data()),
        after,
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        build().personalize(KEY, server, client, client_data()),
        client,
    )


def test_first_round_has_finite_gradients():
    # Client and server start equal: both norms are 0 where they are differentiated.
    algorithm = build()
    server, states = algorithm.init(KEY, len(SIZES))
    message, *_ = algorithm.client_update(
        KEY, server, jax.tree.map(lambda leaf: leaf[0], states), client_data()
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(message.update))


@pytest.mark.slow
def test_stage_b_pulls_the_norm_to_the_bound():
    norms = {}
    for weight in (0.0, 50.0):
        algorithm = build(
            threshold=1.1, lambda2=weight, clip=0.2, local=LocalSGD(optax.sgd(0.01), 4, 30)
        )
        norms[weight] = float(optax.tree.norm(moved(algorithm)[2].update))
    assert abs(norms[50.0] - 0.2) < 0.3 * abs(norms[0.0] - 0.2)


@pytest.mark.parametrize(
    ("delta", "examples", "sigma"),
    [(0.1, 50_000, 0.508), (1e-5, 50_000, 0.852), (0.1, 73_257, 0.487)],
)
def test_published_noise(delta, examples, sigma):
    rule = CIFAR | {"examples": examples}
    found = paper_noise_multiplier(1.0, delta=delta, **rule)
    assert found == pytest.approx(sigma, rel=0.01)
    assert paper_epsilon(found, delta=delta, **rule) == pytest.approx(1.0, rel=2e-3)


def test_published_noise_is_far_from_the_claim():
    algorithm = printed(clients=10, noise_multiplier=0.508, delta=0.1, claim=1.0)
    ledger = planned_ledger(algorithm.mechanism, 10, 15)
    assert epsilon(ledger, algorithm.mechanism, accountant="pld", delta=0.1).value == pytest.approx(
        37.9, rel=2e-3
    )
    assert algorithm.mechanism.client_noise == pytest.approx(0.508 / math.sqrt(10))


def test_paper_noise_is_shared_by_the_participants():
    mechanism = printed(sampling=FixedSize(4), noise_multiplier=1.0).mechanism
    assert mechanism.client_noise == 0.5
    assert mechanism.noise_multiplier == 0


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"threshold": -0.1}, "threshold must be .* got -0.1"),
        ({"clip": math.inf}, "clip=inf"),
        (
            {"sampling": Poisson(0.5), "noise_multiplier": -1.0},
            "noise_multiplier must be .* got -1.0",
        ),
    ],
)
def test_wrong_arguments_name_themselves(wrong, name):
    with pytest.raises(ValueError, match=name):
        build(**wrong)
