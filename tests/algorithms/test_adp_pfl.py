"""ADP-PFL and DP-LG: reductions to known methods, budgets that reach the noise, filters that stop clients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients
from dp_accounting import get_epsilon_gaussian

from jaxfl import simulate
from jaxfl.algorithms import adp_pfl, adp_pfl_paper, dp_fedavg, dp_lg, fedavg, local_only
from jaxfl.algorithms.adp_pfl import fisher_percentile, fisher_threshold, largest, random_share
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.local.fisher import client_fisher
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import FixedSize, Full, Mechanism, Poisson
from jaxfl.privacy.schedule import ClientNoise, client_noise, client_shares, fixed_budgets

KEY = jax.random.key(5)
LOCAL: dict[str, Any] = {"local": LocalSGD(optax.sgd(0.2, momentum=0.5), 4, 2)}
PRIVATE: dict[str, Any] = {"clip": CLIP, "sampling": Poisson(0.6), **LOCAL}


def run(algorithm, rounds=3, clients=None):
    return simulate(
        KEY, algorithm, clients or small_clients(), rounds=rounds, eval_every=rounds, progress=False
    )


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.server.params, b.server.params)


def by_size(key, model, params, data):
    """Return a client's risk as 1 plus its number of examples, which a test can compute."""
    return 1.0 + data.size


@pytest.mark.parametrize("threshold", [1.0, 2.0])
def test_a_threshold_that_no_information_is_above_is_refused(threshold):
    with pytest.raises(ValueError, match=f"threshold must be below 1, got {threshold:g}"):
        fisher_threshold(threshold)


@pytest.mark.slow
@pytest.mark.parametrize("everything", [{"mask": None}, {"mask": fisher_threshold(-1.0)}])
def test_without_masks_and_client_budgets_it_is_dp_fedavg_bit_for_bit(everything):
    expected = run(dp_fedavg(MODEL, noise_multiplier=1.0, **PRIVATE))
    found = run(adp_pfl(MODEL, noise=1.0, **everything, **PRIVATE))
    assert_same(found, expected)
    assert found.statement["honest"] == expected.statement["honest"]


@pytest.mark.slow
def test_without_noise_it_is_fedavg_with_clipping():
    mechanism = Mechanism(clip=CLIP, sampling=Poisson(0.6))
    assert_same(
        run(adp_pfl(MODEL, noise=0.0, mask=None, **PRIVATE)),
        run(fedavg(MODEL, mechanism=mechanism, **LOCAL)),
    )


@pytest.mark.slow
def test_weights_are_averaged_as_fedavg_does():
    options: dict[str, Any] = {
        "upload": "weights",
        "mask": None,
        "clip": 1e6,
        "noise": 0.0,
        "sensitivity": "C",
    }
    expected = run(
        fedavg(
            MODEL, mechanism=Mechanism(sampling=FixedSize(5), denominator="participants"), **LOCAL
        )
    )
    found = run(adp_pfl_paper(MODEL, sampling=FixedSize(5), **options, **LOCAL))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found.server.params,
        expected.server.params,
    )
    # A round without participants keeps the model.
    nobody = run(adp_pfl_paper(MODEL, sampling=Poisson(1e-9), **options, **LOCAL))
    assert all(leaf.any() for leaf in jax.tree.leaves(nobody.server.params))


@pytest.mark.slow
@pytest.mark.parametrize("mask", [fisher_percentile(99.0), random_share(99.0)])
def test_a_mask_does_not_hide_that_weights_are_lost(mask):
    def breaks_one(updates, state, params=None):
        return jax.tree.map(
            lambda leaf: jnp.zeros_like(leaf).at[..., -1].set(jnp.nan), updates
        ), state

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), breaks_one)
    algorithm = adp_pfl(
        MODEL, noise=1.0, mask=mask, **PRIVATE | {"local": LocalSGD(optimizer, 4, 2)}
    )
    server, _ = algorithm.init(KEY, len(SIZES))
    message, _, _ = algorithm.client_update(KEY, server, (), client_data())
    assert all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(message.update))


@pytest.mark.parametrize("mask", [fisher_percentile(80.0), largest(80.0), random_share(80.0)])
def test_a_client_sends_what_is_above_the_percentile(mask):
    algorithm = adp_pfl(MODEL, noise=1.0, mask=mask, **PRIVATE)
    server, _ = algorithm.init(KEY, len(SIZES))
    message, _, info = algorithm.client_update(KEY, server, (), client_data())
    size = sum(leaf.size for leaf in jax.tree.leaves(server.params))
    kept = size - 1 - int(0.8 * (size - 1))
    assert info["kept"] == pytest.approx(kept / size)
    assert 0 < sum(int((leaf != 0).sum()) for leaf in jax.tree.leaves(message.update)) <= kept
    assert message.extra is None  # noise on all coordinates


def test_a_threshold_is_of_the_trained_models_scaled_fisher_information():
    algorithm = adp_pfl(MODEL, noise=1.0, mask=fisher_threshold(0.05), **PRIVATE)
    server, _ = algorithm.init(KEY, len(SIZES))
    message, _, _ = algorithm.client_update(KEY, server, (), client_data())
    whole, _, _ = adp_pfl(MODEL, noise=1.0, mask=None, **PRIVATE).client_update(
        KEY, server, (), client_data()
    )
    fisher = client_fisher(MODEL, optax.tree.add(server.params, whole.update), client_data())
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(fisher)])
    kept = (flat - flat.min()) / (flat.max() - flat.min()) > 0.05
    sent, all_ = (
        np.concatenate([np.ravel(u) for u in jax.tree.leaves(m.update)]) for m in (message, whole)
    )
    assert 0 < kept.sum() < kept.size / 2
    np.testing.assert_array_equal(sent, np.where(kept, all_, 0))


@pytest.mark.slow
def test_public_risks_scale_each_clients_noise():
    risks = np.arange(1.0, 1.0 + len(SIZES))
    paper = adp_pfl_paper(MODEL, noise=(2.0, 1.0), sensitivity="C", risks=risks, **PRIVATE)
    plan = ClientNoise((2.0, 1.0), 0.1, 0.0)
    for algorithm in (paper, adp_pfl(MODEL, noise=plan, risks=risks, **PRIVATE)):
        result = run(algorithm, rounds=2)
        np.testing.assert_allclose(
            result.ledger.client_noise, np.array([[2.0], [1.0]]) * risks, rtol=1e-6
        )
        assert result.statement["honest"]["upload"]["rdp"]["reason"] is None


def test_published_client_budgets_follow_private_risks_and_have_no_epsilon():
    options: dict[str, Any] = {
        "sensitivity": "C",
        "risks": "private",
        "risk_fn": by_size,
        "claim": 3.0,
    }
    result = run(adp_pfl_paper(MODEL, noise=2.0, **options, **PRIVATE))
    took, noise = result.ledger.participants, result.ledger.client_noise
    np.testing.assert_array_equal(noise[0], 2.0)
    known = np.where(took[0], 1.0 + np.array(SIZES), 0.0)
    np.testing.assert_allclose(noise[1], 2.0 / client_shares(jnp.asarray(known)), rtol=1e-6)
    assert np.unique(noise[1]).size > 2
    np.testing.assert_array_equal(
        result.memory.released, np.where(took.any(0), 1.0 + np.array(SIZES), 0.0)
    )
    for seen in result.statement["honest"].values():
        assert seen["rdp"]["total"] == "inf"
        assert "exact function of its private data" in seen["rdp"]["reason"]
    assert result.statement["claim"]["epsilon"] == 3.0


@pytest.mark.slow
def test_sound_client_budgets_follow_released_risks_and_keep_the_epsilon():
    plan = client_noise(
        fixed_budgets(1.0, 12), 4.0, participation=0.4, release_share=0.8, accountant="rdp"
    )
    algorithm = adp_pfl(
        MODEL, noise=plan, risks="private", risk_bounds=(0.5, 4.0), risk_fn=by_size, **PRIVATE
    )
    result = run(algorithm, rounds=12)
    account, ledger = result.memory, result.ledger
    released = account.released
    assert np.all((released == 0) | ((released >= 0.5) & (released <= 4.0)))
    assert np.any((released > 0.5) & (released < 4.0))  # noise, and not only the bounds
    least = plan.noise[0]
    np.testing.assert_allclose(ledger.client_noise[0], least, rtol=1e-6)
    assert np.all(ledger.client_noise >= least * (1 - 1e-6))
    assert ledger.client_noise[-1].max() > 1.1 * least
    spent = (
        ledger.participants
        * (4.0 / ledger.client_noise.astype(np.float64) ** 2 + plan.release_noise**-2)
    ).sum(0)
    np.testing.assert_allclose(account.spent, spent, rtol=1e-5)
    assert spent.max() <= plan.least_total**-2
    for seen in result.statement["honest"].values():
        assert 3.9 < seen["rdp"]["total"] <= 4.0
        assert seen["pld"]["total"] < seen["rdp"]["total"]
        assert "Rényi filter" in seen["rdp"]["theorem"]


@pytest.mark.slow
def test_the_filter_stops_clients_in_the_engine():
    """The budget lasts for 3 of 8 rounds, and all clients would take part in each round."""
    plan = client_noise(fixed_budgets(1.0, 8), 4.0, participation=3 / 8, accountant="pld")
    options: dict[str, Any] = {
        **LOCAL,
        "clip": CLIP,
        "sampling": Full(),
        "risks": np.ones(len(SIZES)),
    }
    result = run(adp_pfl(MODEL, noise=plan, **options), rounds=8)
    np.testing.assert_array_equal(
        result.ledger.participants, np.arange(8)[:, None] < np.full(len(SIZES), 3)
    )
    assert 3.99 < result.statement["honest"]["upload"]["pld"]["total"] <= 4.0


def test_adaptive_rounds_compile_once():
    traces = 0

    def counted(*args):
        nonlocal traces
        traces += 1
        return by_size(*args)

    noise = ClientNoise((1.0,), 0.1, 2.0)
    algorithm = adp_pfl(
        MODEL, noise=noise, risks="private", risk_bounds=(1.0, 9.0), risk_fn=counted, **PRIVATE
    )
    population = place(small_clients())
    server, states = initialize(KEY, KEY, algorithm, population)
    step = compile_rounds(algorithm, population, chunk=1, segment=4)
    server, states, _ = step(KEY, 0, 2, server, states)
    first = traces
    step(KEY, 2, 4, server, states)
    assert traces == first > 0


def test_a_dropped_update_releases_the_least_risk():
    """The released risk has the usual noise, so that nobody learns of the dropped update."""
    noise = ClientNoise((1.0,), 1e-7, 1e-6)
    options: dict[str, Any] = {
        "risks": "private",
        "risk_bounds": (1.0, 9.0),
        **PRIVATE | {"sampling": Full()},
    }
    algorithm = adp_pfl(MODEL, noise=noise, risk_fn=lambda *_: jnp.float32(jnp.nan), **options)
    np.testing.assert_allclose(run(algorithm, rounds=1).memory.released, 1.0, atol=1e-4)


@pytest.mark.slow
def test_dp_lg_shares_the_head_and_nothing_else():
    result = run(dp_lg(MODEL, noise_multiplier=1.0, **PRIVATE))
    assert set(result.server.params) == {"head"}
    assert set(result.states) == {"dense_0"}


@pytest.mark.slow
def test_dp_lg_of_one_client_without_noise_trains_alone():
    clients = small_clients((9,))
    found = run(
        dp_lg(MODEL, noise_multiplier=0.0, **PRIVATE | {"clip": 1e6, "sampling": Full()}),
        clients=clients,
    )
    expected = run(local_only(MODEL, **LOCAL), clients=clients).states
    assert_close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    jax.tree.map(
        assert_close,
        found.server.params["head"],
        jax.tree.map(lambda leaf: leaf[0], expected["head"]),
    )
    jax.tree.map(assert_close, found.states["dense_0"], expected["dense_0"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"risks": np.array([1.0, 2.0])},
            r"noise must be the result of `client_noise` with risks, .*got 1.0 with",
        ),
        (
            {"risks": np.array([1.0, 0.0]), "noise": ClientNoise((1.0,), 1.0, 0.0)},
            "risks must be .* above 0",
        ),
        (
            {"noise": ClientNoise((1.0,), 1.0, 0.0)},
            "noise must be .* plain numbers without, got ClientNoise.*with risks=None",
        ),
        (
            {"risks": "private", "noise": ClientNoise((1.0,), 1.0, 1.0)},
            "risk_bounds must be .*got None with risks='private'",
        ),
        (
            {"risks": "private", "noise": ClientNoise((1.0,), 1.0, 0.0), "risk_bounds": (1.0, 2.0)},
            "needs noise on them",
        ),
        ({"risk_bounds": (1.0, 2.0)}, r"risk_bounds must be .*got \(1.0, 2.0\) with risks=None"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        adp_pfl(MODEL, **{"noise": 1.0} | options | PRIVATE)


def test_by_default_an_mth_of_the_noise_is_drawn_and_counted():
    """By (22) the mean of m participants has the sensitivity C/m. All take part in each round."""
    options: dict[str, Any] = {**PRIVATE, "sampling": FixedSize(len(SIZES)), "mask": None}
    found = run(adp_pfl_paper(MODEL, noise=(20.0, 10.0, 10.0), **options))
    m = len(SIZES)
    np.testing.assert_allclose(
        found.ledger.client_noise, np.array([[20.0], [10.0], [10.0]]) / m, rtol=1e-6
    )
    by_hand = run(
        adp_pfl_paper(MODEL, noise=np.array([20.0, 10.0, 10.0]) / m, sensitivity="C", **options)
    )
    assert_same(found, by_hand)
    total = (
        sum((2 * m / noise) ** 2 for noise in (20.0, 10.0, 10.0))
    ) ** -0.5  # replace-one moves an upload by 2C
    upload = found.statement["honest"]["upload"]["pld"]["total"]
    assert upload == pytest.approx(get_epsilon_gaussian(total, found.statement["delta"]), rel=1e-3)


def test_the_number_of_participants_must_be_known():
    with pytest.raises(
        ValueError, match=r"sampling must be .*got Poisson.*Give FixedSize\(m\), or sensitivity='C'"
    ):
        adp_pfl_paper(MODEL, noise=1.0, **PRIVATE)


@pytest.mark.slow
def test_weights_by_data_sizes_are_the_mechanisms():
    """By line 23 the mean over the participants is sum |D_i| w_i / |D|."""
    sizes = np.array(SIZES, float)
    method = adp_pfl_paper(
        MODEL, noise=0.0, sampling=FixedSize(5), upload="weights", mask=None, clip=1e6, **LOCAL
    )
    found = run(
        method._replace(mechanism=dataclasses.replace(method.mechanism, weights=sizes)), rounds=1
    )
    mechanism = Mechanism(sampling=FixedSize(5), weights=sizes, denominator="participants")
    expected = run(fedavg(MODEL, mechanism=mechanism, **LOCAL), rounds=1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found.server.params,
        expected.server.params,
    )


@pytest.mark.parametrize("build", [fisher_percentile, fisher_threshold])
def test_masks_may_square_the_mean_gradient_instead(build):
    """As (13) of ADP-PFL is printed, a mask keeps what has the largest squared mean gradient."""
    at = 50.0 if build is fisher_percentile else 0.05
    algorithm = adp_pfl(MODEL, noise=1.0, mask=build(at, square="mean"), **PRIVATE)
    server, _ = algorithm.init(KEY, len(SIZES))
    data = client_data()
    message, _, _ = algorithm.client_update(KEY, server, (), data)
    whole, _, _ = adp_pfl(MODEL, noise=1.0, mask=None, **PRIVATE).client_update(
        KEY, server, (), data
    )
    inputs, labels = data.take(jnp.arange(int(data.size)))

    def loss(params):
        return MODEL.task.loss(MODEL.apply(params, MODEL.prepare(inputs)), labels).mean()

    gradient = jax.grad(loss)(optax.tree.add(server.params, whole.update))
    square, sent, all_ = (
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
        for tree in (jax.tree.map(jnp.square, gradient), message.update, whole.update)
    )
    level = np.percentile(square, at) if build is fisher_percentile else square.max() * at
    sure = np.abs(square - level) > 1e-4 * level  # rounding decides the others
    assert 0 < (square > level).sum() < square.size
    np.testing.assert_array_equal(sent[sure], np.where(square > level, all_, 0)[sure])


@pytest.mark.parametrize("build", [fisher_percentile, fisher_threshold])
def test_a_square_of_nothing_else(build):
    with pytest.raises(ValueError, match=r"square must be .* got 'all'"):
        build(0.5, square="all")


@pytest.mark.parametrize("threshold", [1.0, 2.0])
def test_a_threshold_that_no_scaled_information_exceeds_is_an_error(threshold):
    with pytest.raises(ValueError, match="threshold must be below 1, got"):
        fisher_threshold(threshold)


@pytest.mark.parametrize("build", [fisher_percentile, largest, random_share])
def test_the_hundredth_percentile_keeps_nothing(build):
    with pytest.raises(ValueError, match=r"percentile must be in \[0, 100\), got 100\.0"):
        build(100.0)
