"""DP-FedSAM, Fed-SMP and BLUR + LUS, each of which is DP-FedAvg with one change."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients

from jaxfl import simulate
from jaxfl.algorithms import blur_lus, dp_fedavg, dp_fedsam, fed_smp
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import Poisson

KEY = jax.random.key(23)
PRIVATE: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
LOCAL: dict[str, Any] = {"local": LocalSGD(optax.sgd(0.2, momentum=0.5), 4, 2)}
KERNEL = 64 * 16  # weights of dense_0


def run(algorithm, rounds=3):
    return simulate(KEY, algorithm, small_clients(), rounds=rounds, progress=False)


def update_of(algorithm):
    server, _ = algorithm.init(KEY, len(SIZES))
    return server, algorithm.client_update(KEY, server, (), client_data())[0]


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "neutral"),
    [
        (dp_fedsam, {"radius": 0.0}),
        (fed_smp, {"density": 1.0}),
        (blur_lus, {"penalty_weight": 0.0, "density": 1.0}),
    ],
)
def test_without_its_change_it_is_dp_fedavg_bit_for_bit(method, neutral):
    found, expected = (
        run(method) for method in (method(MODEL, **neutral, **LOCAL, **PRIVATE), BASE)
    )
    assert_same(found.server.params, expected.server.params)
    other = run(method(MODEL, **LOCAL, **PRIVATE))
    assert not np.array_equal(
        other.server.params["head"]["kernel"], expected.server.params["head"]["kernel"]
    )
    assert other.statement["honest"] == expected.statement["honest"]


BASE = dp_fedavg(MODEL, **LOCAL, **PRIVATE)


def test_a_sharpness_aware_step_uses_the_gradient_uphill():
    algorithm = dp_fedsam(MODEL, radius=0.5, local=LocalSGD(optax.sgd(0.1), 16), **PRIVATE)
    server, message = update_of(algorithm)
    data = client_data()
    inputs, labels = data.take(jnp.arange(data.size))

    def objective(params):
        logits = MODEL.apply(params, MODEL.prepare(inputs))
        return MODEL.task.mean_loss(logits, labels, jnp.ones(len(labels)))

    g = jax.grad(objective)(server.params)
    norm = math.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(g)))
    uphill = jax.tree.map(lambda p, g: p + 0.5 * g / norm, server.params, g)
    expected = optax.tree.scale(-0.1, jax.grad(objective)(uphill))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        message.update,
        expected,
    )


@pytest.mark.slow
def test_off_the_public_mask_nothing_is_sent_or_moves():
    algorithm = fed_smp(MODEL, density=0.1, **LOCAL, **PRIVATE)
    server, message = update_of(algorithm)
    assert message.extra is None
    assert int(server.support["dense_0"]["kernel"].sum()) == math.ceil(0.1 * KERNEL)
    assert_same(
        jax.tree.map(lambda u, m: jnp.where(m, 0, u), message.update, server.support),
        zeros(message.update),
    )
    before, _ = algorithm.init(jax.random.split(KEY, 3)[0], len(SIZES))
    after = run(algorithm, rounds=1).server
    moved = jax.tree.map(lambda a, b: np.asarray(a) != np.asarray(b), before.params, after.params)
    assert_same(moved, before.support)
    assert not np.array_equal(
        before.support["dense_0"]["kernel"], after.support["dense_0"]["kernel"]
    )


def test_a_public_mask_does_not_hide_that_weights_are_lost():
    server, _ = fed_smp(MODEL, density=0.1, **PRIVATE).init(KEY, len(SIZES))
    off = tuple(np.argwhere(~np.asarray(server.support["dense_0"]["kernel"]))[0])

    def breaks_one(updates, state, params=None):
        updates = optax.tree.zeros_like(updates)
        updates["dense_0"]["kernel"] = updates["dense_0"]["kernel"].at[off].set(jnp.nan)
        return updates, state

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), breaks_one)
    _, message = update_of(fed_smp(MODEL, density=0.1, local=LocalSGD(optimizer, 4, 2), **PRIVATE))
    assert all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(message.update))


def zeros(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def test_the_least_of_an_update_is_not_sent():
    _, whole = update_of(dp_fedavg(MODEL, **LOCAL, **PRIVATE))
    _, message = update_of(blur_lus(MODEL, penalty_weight=0.0, density=0.25, **LOCAL, **PRIVATE))
    assert message.extra is None  # noise stays dense
    kernel, sent = (np.asarray(m.update["dense_0"]["kernel"]) for m in (whole, message))
    kept = sent != 0
    assert kept.sum() == math.ceil(0.25 * KERNEL)
    np.testing.assert_array_equal(sent[kept], kernel[kept])
    assert np.abs(kernel[kept]).min() >= np.abs(kernel[~kept]).max()
    assert_same(message.update["dense_0"]["bias"], whole.update["dense_0"]["bias"])


@pytest.mark.slow
def test_bounded_updates_are_shorter():
    norms = [
        float(
            optax.tree.norm(
                update_of(blur_lus(MODEL, penalty_weight=w, density=1.0, **LOCAL, **PRIVATE))[
                    1
                ].update
            )
        )
        for w in (0.0, 1.0, 3.0)
    ]
    assert CLIP < norms[2] < norms[1] < norms[0]


@pytest.mark.parametrize(
    ("method", "wrong", "name"),
    [
        (dp_fedsam, {"radius": -1.0}, r"^radius must be .* got -1\.0"),
        (fed_smp, {"density": 0.0}, r"density must be .* got 0\.0"),
        (blur_lus, {"density": 1.5}, r"density must be .* got 1\.5"),
        (blur_lus, {"penalty_weight": -1.0}, r"penalty_weight must be .* got -1\.0"),
        (blur_lus, {"clip": math.inf, "noise_multiplier": 0.0}, "finite clip"),
    ],
)
def test_wrong_arguments_name_themselves(method, wrong, name):
    with pytest.raises(ValueError, match=name):
        method(MODEL, **PRIVATE | wrong)
