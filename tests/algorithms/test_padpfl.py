import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import MODEL, SIZES, client_data, small_clients
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxfl import simulate, sweep
from jaxfl.algorithms import fedavg, fedprox, padpfl, padpfl_paper
from jaxfl.algorithms.padpfl import convergence_bound, impact_table, nbafl_noise
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import FixedSize, Mechanism
from jaxfl.privacy.accounting.ledgers import epsilon, planned_ledger
from jaxfl.privacy.mechanisms.gaussian import round_numbers, server_noise
from jaxfl.types import Lists

KEY = jax.random.key(5)
LOCAL: dict[str, Any] = {"local": LocalSGD(optax.sgd(0.1), 4)}
impact_factors = st.lists(st.floats(0, 1), min_size=2, max_size=8).filter(lambda p: sum(p) > 0.1)


def build(**options):
    defaults: dict[str, Any] = {"epsilon": math.inf, "rounds": 3, "clip": math.inf, "mu": 0.0}
    return padpfl(MODEL, **defaults | LOCAL | options)


def published(**options):
    defaults: dict[str, Any] = {
        "epsilon": math.inf,
        "rounds": 3,
        "clip": math.inf,
        "mu": 0.0,
        "smallest": 10,
    }
    return padpfl_paper(MODEL, **defaults | LOCAL | options)


def printed(p, **options):
    """Return the paper's sigma_U, and sigma_D of a round with all clients, times the clip bound."""
    defaults: dict[str, Any] = {"clip": 1.0, "epsilon": 1.0, "delta": 0.01, "smallest": 100}
    mechanism = published(impacts=np.asarray(p), **defaults | options).mechanism
    numbers = round_numbers(mechanism, len(p), jnp.int32(0))
    present = jnp.sum((numbers.weights * numbers.client_noise) ** 2)
    return mechanism.clip * float(numbers.client_noise[0]), mechanism.clip * float(
        server_noise(numbers, present)
    )


@pytest.mark.slow
def test_a_sweep_of_claimed_epsilons_has_the_noise_and_the_claim_of_each():
    def method(epsilon):
        return published(epsilon=epsilon, clip=1.0, delta=0.01, rounds=2)

    found = sweep(
        KEY,
        method,
        {"epsilon": [5.0, 50.0]},
        small_clients(),
        rounds=2,
        paired_noise=True,
        progress=False,
    )
    for result, target in zip(found, (5.0, 50.0), strict=True):
        alone = simulate(KEY, method(target), small_clients(), rounds=2, progress=False)
        np.testing.assert_allclose(result.ledger.client_noise, alone.ledger.client_noise, rtol=1e-6)
        np.testing.assert_allclose(result.ledger.server_noise, alone.ledger.server_noise, rtol=1e-5)
        assert result.statement["claim"] == alone.statement["claim"]
        assert result.statement["claim"]["epsilon"] == target


def test_constant_of_the_gaussian_mechanism():
    for delta, c in ((1e-5, 4.844805), (1e-2, 3.107511)):
        assert nbafl_noise(1.0, delta=delta, smallest=2) == pytest.approx(c, rel=1e-6)


@pytest.mark.parametrize(
    ("p", "rounds", "sigma_u", "sigma_d"),
    [
        ([0.25] * 4, 10, 0.0621502, 0.1522363),
        ([0.25] * 4, 2, 0.0621502, 0.0),  # at the threshold T = L sqrt(N)
        ([0.5, 0.3, 0.2], 1, 0.0621502, 0.0),
        ([0.5, 0.3, 0.2], 2, 0.0621502, 0.0489371),
    ],
)
def test_printed_noise(p, rounds, sigma_u, sigma_d):
    assert printed(p, rounds=rounds) == pytest.approx((sigma_u, sigma_d), rel=1e-5, abs=1e-7)


@given(impact_factors)
@settings(deadline=None, max_examples=30)
def test_as_many_exposures_as_rounds_need_no_server(p):
    assert printed(np.array(p) / sum(p), rounds=6, exposures=6)[1] == 0


@given(impact_factors, st.floats(0, 5).map(lambda s: round(s, 6)), st.floats(0.1, 5))
@settings(deadline=None, max_examples=50)
def test_variance_is_the_larger_of_target_and_present(p, s, z):
    p = np.array(p) / sum(p)
    mechanism = Mechanism(
        clip=2.0, noise_multiplier=z, client_noise=s, weights=p, denominator="participants"
    )
    numbers = round_numbers(mechanism, len(p), jnp.int32(0))
    present = float(np.sum((p * s) ** 2))
    total = present + float(server_noise(numbers, jnp.float32(present))) ** 2
    assert total == pytest.approx(max((z * p.max()) ** 2, present), rel=1e-4)


@pytest.mark.slow
@given(impact_factors, st.floats(0.5, 20), st.floats(20, 500))
@example([0.0, 0.0, 1.0, 2e-154], 1.0, 20.0)  # the square of that client's multiplier is no float
@settings(deadline=None, max_examples=20)
def test_sound_keeps_both_targets_for_any_factors(p, target, upload):
    table = np.stack([np.roll(p, t) for t in range(3)]) / sum(p)
    mechanism = build(clip=1.0, epsilon=target, upload_epsilon=upload, impacts=table).mechanism
    ledger = planned_ledger(mechanism, len(p), 3)
    assert epsilon(ledger, mechanism).value <= target
    assert 0.99 * upload <= epsilon(ledger, mechanism, observer="upload").value <= upload
    alone = build(clip=1.0, epsilon=target, impacts=table).mechanism
    assert 0.99 * target <= epsilon(planned_ledger(alone, len(p), 3), alone).value <= target


def test_paper_is_far_from_its_claim():
    method = published(clip=1.0, epsilon=50.0, delta=0.01, smallest=500, rounds=1)
    mechanism = method.mechanism
    assert mechanism.client_noise / 2 == pytest.approx(
        1.2e-4, rel=0.05
    )  # the true multiplier of one upload
    assert method.terms.claim is not None
    assert method.terms.claim[0] == 50
    assert (
        epsilon(planned_ledger(mechanism, 30, 1), mechanism, observer="upload", delta=0.01).value
        > 1e6
    )


def run(method, clients=None):
    return simulate(KEY, method, clients or small_clients(), rounds=3, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [build(), published(impacts=np.full(len(SIZES), 1 / len(SIZES)))]
)
def test_equal_factors_without_noise_are_fedavg(method):
    found, expected = run(method), run(fedavg(MODEL, **LOCAL))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found.server.params, expected.server.params)


@pytest.mark.slow
@given(
    st.lists(st.floats(0.01, 1), min_size=len(SIZES), max_size=len(SIZES)),
    st.integers(0, len(SIZES) - 1),
    st.sampled_from([(build, 0.3), (published, 4.0)]),
)
@settings(max_examples=2, deadline=None)
def test_a_client_without_impact_has_no_influence(factors, nobody, case):
    p = np.array(factors)
    p[nobody] = 0
    clients = small_clients()
    build, clip = case
    method = build(impacts=p / p.sum(), epsilon=8.0, clip=clip)
    other = clients._replace(
        train_size=np.where(np.arange(clients.num_clients) == nobody, 2, clients.train_size)
    )
    found = run(method)
    jax.tree.map(np.testing.assert_array_equal, found.server, run(method, other).server)
    assert found.statement["honest"]["aggregate"]["rdp"]["per_client"]["values"][nobody] == 0


@pytest.mark.slow
def test_the_share_of_absent_clients_goes_to_those_present():
    # Clients that all hold the same examples send the same weights, whoever takes part and whatever they weigh.
    clients = small_clients((4,) * 6)
    same = clients._replace(train=Lists.of([clients.train[0]] * 6))
    local = LocalSGD(optax.sgd(0.1), 16)
    uneven = published(
        impacts=np.array([0.5, 0.1, 0.1, 0.1, 0.1, 0.1]), sampling=FixedSize(2), local=local
    )
    found, expected = run(uneven, same), run(published(local=local), same)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found.server,
        expected.server,
    )


@pytest.mark.slow
def test_factors_may_change_by_round():
    half = np.zeros((3, len(SIZES)))
    half[0, 0], half[1:, 8] = 1, 1
    by_table, by_function = build(impacts=half), build(impacts=lambda t: half[t])
    jax.tree.map(np.testing.assert_array_equal, run(by_table).server, run(by_function).server)
    np.testing.assert_array_equal(by_function.mechanism.weight_table, half)
    only_first = run(build(impacts=half[0]))
    assert not np.array_equal(
        run(by_table).server.params["head"]["bias"], only_first.server.params["head"]["bias"]
    )


@pytest.mark.slow
def test_inexactness_is_the_ratio_of_gradients():
    local = LocalSGD(optax.sgd(0.1), 4, 2)
    method = build(mu=0.5, local=local)
    server, _ = method.init(KEY, len(SIZES))
    data = client_data()
    message, _, info = method.client_update(KEY, server, (), data)
    plain, _, _ = fedprox(MODEL, mu=0.5, local=local).client_update(KEY, server, (), data)
    jax.tree.map(np.testing.assert_array_equal, message.update, plain.update)
    inputs, labels = data.take(jnp.arange(data.size))
    x = MODEL.prepare(inputs)
    slope = jax.grad(
        lambda p: MODEL.task.mean_loss(MODEL.apply(p, x), labels, jnp.ones(len(labels)))
    )
    after = optax.tree.add(
        slope(optax.tree.add(server.params, message.update)), optax.tree.scale(0.5, message.update)
    )
    expected = optax.tree.norm(after) / optax.tree.norm(slope(server.params))
    assert info["gamma"] == pytest.approx(float(expected), rel=1e-4)
    still = build(mu=0.5, local=LocalSGD(optax.sgd(0.0), steps=1))
    assert still.client_update(KEY, server, (), data)[2]["gamma"] == 1
    assert method.client_update(KEY, server, (), client_data(2))[2]["gamma"] == 0  # no examples


def quadratics(rng, clients=5, d=3):
    """Draw A [C, d, d] and c [C, d] of the losses (w - c_i)' A_i (w - c_i) / 2."""
    a = np.stack([np.diag(rng.uniform(0.5, 1.0, d)) for _ in range(clients)])
    c = rng.normal(size=(clients, d)) * 0.1 + 1.0
    return a, c


@pytest.mark.parametrize("std", [0.0, 0.02])
def test_bound_holds_on_quadratics(std):
    rng, mu, rounds, d = np.random.default_rng(0), 6.0, 40, 3
    a, c = quadratics(rng)
    p = np.full(len(a), 1 / len(a))
    best = np.linalg.solve(np.einsum("i,ijk->jk", p, a), np.einsum("i,ijk,ik->j", p, a, c))
    loss = lambda w: float(np.einsum("i,ij,ijk,ik->", p, w - c, a, w - c) / 2)  # noqa: E731
    slopes = lambda w: np.einsum("ijk,ik->ij", a, w - c)  # noqa: E731
    runs, dissimilarity, steepest = [], 1.0, 0.0
    for _ in range(50):
        w, gaps = np.zeros(d), []
        for _ in range(rounds + 1):
            gaps.append(loss(w) - loss(best))
            each = slopes(w)
            whole = p @ each
            dissimilarity = max(dissimilarity, math.sqrt(p @ (each**2).sum(1) / (whole @ whole)))
            steepest = max(steepest, float(np.linalg.norm(whole)))
            if (
                gaps[-1] < 0.05
            ):  # closer to the minimum no B exists: clients' gradients stay, the mean's goes
                break
            exact = np.linalg.solve(
                a + mu * np.eye(d), (np.einsum("ijk,ik->ij", a, c) + mu * w)[..., None]
            )[..., 0]
            w = p @ exact + std * rng.normal(size=d)
        runs.append(gaps)
    shortest = min(map(len, runs))
    mean = np.mean([gaps[:shortest] for gaps in runs], axis=0)
    bound = convergence_bound(
        np.full(shortest - 1, std),
        parameters=d,
        gap=mean[0],
        smoothness=1.0,
        mu=mu,
        gamma=0.0,
        dissimilarity=dissimilarity,
        gradient=steepest,
        convexity=0.5,
    )
    assert shortest > 3
    assert np.all(mean <= bound * (1 + 1e-9))
    if std == 0:
        assert bound[-1] < bound[0]


def test_bound_grows_as_stated_where_nothing_contracts():
    constants: dict[str, Any] = {
        "gap": 1.0,
        "smoothness": 1.0,
        "mu": 0.1,
        "gamma": 0.5,
        "dissimilarity": 1.5,
    }
    bound = functools.partial(convergence_bound, parameters=9, gradient=2.0, **constants)
    drift = bound(np.zeros(6))
    np.testing.assert_allclose(np.diff(drift), drift[1] - drift[0])
    assert drift[1] > drift[0]
    # lambda_1 = 1 + rho B (1 + gamma) / mu = 23.5, lambda_0 = 1/2, |n| = 3 std.
    np.testing.assert_allclose(np.diff(bound(np.full(6, 2.0)) - drift), 23.5 * 2 * 6 + 36 / 2)
    moved = bound(np.zeros(6), changes=np.array([0, 0, 0.5, 0, 0, 0]), spread=3.0)
    np.testing.assert_allclose(moved - drift, [0, 0, 0, 1.5, 1.5, 1.5, 1.5])


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"impacts": np.array([0.5, 0.6])}, "impacts must sum to 1 .* 1.1 in round 0 .* Divide"),
        ({"impacts": np.array([1.5, -0.5])}, "impacts must be .*at least 0"),
        ({"impacts": np.full((2, 4), 0.25)}, "impacts must have 1 or 3 rows, got 2 in"),
        (
            {"impacts": lambda t: np.array([1.0, 0.1 * t])},
            "impacts must sum to 1 .* 1.2 in round 2",
        ),
        ({"epsilon": 0.0}, "epsilon must be .* got 0.0"),
        ({"upload_epsilon": -1.0}, "upload_epsilon must be .* got -1.0"),
        ({"epsilon": 1.0}, "clip must be finite with noise"),
        ({"mu": -1.0}, "mu must be .* got -1.0"),
    ],
)
def test_wrong_arguments_name_themselves(wrong, name):
    with pytest.raises(ValueError, match=name):
        build(**wrong)
    assert impact_table(np.array([0.25, 0.75]), 7).shape == (2,)


@pytest.mark.parametrize("name", ["exposures", "smallest"])
def test_wrong_numbers_of_the_published_rule_name_themselves(name):
    with pytest.raises(ValueError, match=f"{name} must be .* got 0"):
        published(**{name: 0})
