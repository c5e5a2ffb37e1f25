"""Budgets and noise by closed forms, and filters against adversaries."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfl.privacy.accounting.ledgers import epsilon, planned_ledger, running_epsilon
from jaxfl.privacy.mechanisms import Mechanism, PrivacyFilter, Release
from jaxfl.privacy.mechanisms.gaussian import Total
from jaxfl.privacy.sampling import FixedSize, Full, Poisson
from jaxfl.privacy.schedule import (
    client_noise,
    client_shares,
    fixed_budgets,
    paper_noise,
    round_budgets,
    round_noise,
)
from jaxfl.privacy.statement import format_statement, privacy_statement
from jaxfl.types import Ledger

KEY = jax.random.key(0)
SCHEDULES = {
    "fixed": lambda rounds: fixed_budgets(2.0, rounds),
    "exact": lambda rounds: round_budgets(2.0, rounds, beta=1.5),
}


def test_round_budgets_by_hand():
    np.testing.assert_allclose(
        round_budgets(1.0, 4), [0.097901, 0.142040, 0.245365, 0.514693], atol=1e-6
    )
    np.testing.assert_allclose(round_budgets(1.0, 4, beta=0.0), 0.25)
    long = round_budgets(1.0, 100)
    assert (round(long[0], 5), round(long[-1], 4)) == (0.00368, 0.0306)
    assert np.all(np.diff(long) > 0)


@settings(max_examples=30, deadline=None)
@given(total=st.floats(0.01, 50), rounds=st.integers(1, 300), beta=st.floats(0, 6))
def test_budgets_add_up(total, rounds, beta):
    budgets = round_budgets(total, rounds, beta=beta)
    assert budgets.sum() == pytest.approx(total, rel=1e-9)
    assert np.all(budgets > 0)
    left = total - np.concatenate([[0], np.cumsum(budgets)[:-1]])
    assert np.all(budgets <= left / np.arange(rounds, 0, -1) * (1 + 1e-6))  # the cap (9)


def test_the_printed_schedule_overspends():
    np.testing.assert_allclose(
        round_budgets(1.0, 4, beta=0.0, form="printed"), [0.25, 0.5, 0.375, -0.5]
    )
    assert round_budgets(1.0, 100, beta=2.0, form="printed").sum() == pytest.approx(-15.3, abs=0.05)
    assert round_budgets(1.0, 100, beta=5.0, form="printed").sum() == pytest.approx(7522, abs=0.5)
    with pytest.raises(ValueError, match=r"budgets must be .*above 0, got .*-0\.5"):
        paper_noise(round_budgets(1.0, 4, beta=0.0, form="printed"))


def test_noise_of_a_schedule():
    z = round_noise(round_budgets(1.0, 4), 1.0, clients=20, sampling=Full(), accountant="pld")
    np.testing.assert_allclose(z, [22.700, 15.646, 9.0575, 4.3179], rtol=1e-3)
    z = round_noise(round_budgets(1.0, 100), 1.0, clients=20, sampling=Full(), accountant="pld")
    np.testing.assert_allclose([z[0], z[-1]], [123.44, 14.853], rtol=1e-3)
    z = round_noise(
        round_budgets(1.0, 100, beta=0.0), 1.0, clients=20, sampling=Full(), accountant="pld"
    )
    np.testing.assert_allclose(z, 37.306, rtol=1e-3)


def test_states_of_clients_need_more_noise_of_a_schedule():
    sampling = FixedSize(6)
    budgets = fixed_budgets(1.0, 20)
    for stateful in (False, True):
        z = round_noise(budgets, 1.0, clients=30, sampling=sampling, stateful=stateful)
        m = Mechanism(clip=1.0, noise_multiplier=z, sampling=sampling)
        found = epsilon(planned_ledger(m, 30, 20), m, stateful=True).value
        assert (0.99 < found <= 1) == stateful


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("sampling", "accountant"), [(Full(), "rdp"), (Full(), "pld"), (Poisson(0.1), "rdp")]
)
def test_every_schedule_composes_to_the_stated_epsilon(name, sampling, accountant):
    rounds = 8
    options = {"clients": 30, "sampling": sampling, "accountant": accountant}
    z = round_noise(SCHEDULES[name](rounds), 2.0, **options)
    m = Mechanism(clip=1.0, noise_multiplier=z, sampling=sampling)
    assert 1.99 < epsilon(planned_ledger(m, 30, rounds), m, accountant=accountant).value <= 2.0
    plan = client_noise(SCHEDULES[name](rounds), 2.0, participation=1.0, accountant=accountant)
    m = Mechanism(
        clip=1.0, client_noise=np.array(plan.noise)
    )  # not filtered: composed round by round
    found = epsilon(planned_ledger(m, 30, rounds), m, observer="upload", accountant=accountant)
    assert 1.99 < found.value <= 2.0


@pytest.mark.parametrize(
    ("rule", "single"), [("classic", math.sqrt(2 * math.log(1.25e5))), ("analytic", 3.7306)]
)
def test_published_rules_are_for_one_round(rule, single):
    noise = paper_noise(
        fixed_budgets(100.0, 100), rule=rule
    )  # the reading "epsilon in every round": 1 each
    np.testing.assert_allclose(noise, single, rtol=1e-4)
    m = Mechanism(clip=1.0, client_noise=noise)
    record = planned_ledger(m, 1, 100)
    assert epsilon(record, m, accountant="pld", one_round=True).value <= 1.0 + 1e-6
    total = epsilon(record, m, accountant="pld").value
    assert total == pytest.approx(get_epsilon_gaussian(single / 10, 1e-5), rel=1e-4)
    assert total > 10


@pytest.mark.parametrize("rule", ["classic", "analytic"])
def test_theorem_2_divides_the_variance_and_the_epsilon_is_that_of_the_noise(rule):
    budgets = round_budgets(50.0, 20)
    full, less = (paper_noise(budgets, rule=rule, sparsity=p) for p in (0.0, 0.8))
    np.testing.assert_allclose(less**2, 0.2 * full**2, rtol=1e-12)
    m = Mechanism(clip=1.0, client_noise=less)
    found = epsilon(planned_ledger(m, 1, 20), m, observer="upload", accountant="pld").value
    total = (2.0**2 / (0.2 * full**2)).sum() ** -0.5
    assert found == pytest.approx(get_epsilon_gaussian(total, 1e-5), rel=1e-4)


@pytest.mark.parametrize(
    ("present", "in_all", "zero_out", "replace_one"),
    [  # budgets that add up to 10; 10 in every round, in 10 rounds, and in 100
        (100, "sum", 0.93, 2.0),
        (10, "each", 48.4, 140),
        (100, "each", 300, 1027),
    ],
)
def test_honest_epsilon_of_the_published_scheme(present, in_all, zero_out, replace_one):
    budgets = round_budgets(10.0, 100) if in_all == "sum" else np.full(present, 10.0)
    m = Mechanism(clip=1.0, client_noise=paper_noise(budgets))
    record = planned_ledger(m, 1, present)
    assert epsilon(record, m, accountant="pld").value == pytest.approx(zero_out, rel=1e-2)
    assert epsilon(record, m, observer="upload", accountant="pld").value == pytest.approx(
        replace_one, rel=1e-2
    )


def test_shares_of_clients():
    np.testing.assert_allclose(
        0.1 * client_shares(jnp.array([1.0, 2.0, 4.0])), [0.1, 0.05, 0.025], rtol=1e-6
    )
    np.testing.assert_array_equal(client_shares(jnp.zeros(3)), [1, 1, 1])  # round 1
    np.testing.assert_allclose(client_shares(jnp.array([0.0, 2.0, 4.0])), [1, 1, 0.5])


def test_noise_of_clients_splits_the_cost():
    """In 4 of 8 rounds uploads cost 16 / s^2 and releases 4 / r^2, together the budget."""
    plan = client_noise(
        fixed_budgets(1.0, 8), 3.0, participation=0.5, release_share=0.25, accountant="pld"
    )
    single = get_sigma_gaussian(3.0, 1e-5)
    assert plan.least_total == pytest.approx(single, rel=2e-3)
    uploads, releases = 4 * 4 / plan.noise[0] ** 2, 4 / plan.release_noise**2
    assert releases / uploads == pytest.approx(1 / 3)
    assert (uploads + releases) ** -0.5 == pytest.approx(plan.least_total, rel=5e-4)
    assert get_epsilon_gaussian((uploads + releases) ** -0.5, 1e-5) <= 3.0
    assert client_noise(fixed_budgets(1.0, 8), 3.0, participation=0.5).release_noise == 0


def play(mechanism: Mechanism, releases: np.ndarray, coins: np.ndarray) -> Ledger:
    """Return the ledger of rounds without training, in which the filter stops clients."""
    rounds, clients = coins.shape
    accounts, key, mesh = mechanism.init(KEY, dict, clients), KEY, jax.make_mesh((1,), ("clients",))
    present, noises = [], []
    for t in range(rounds):
        cohort = mechanism.draw(key, accounts, jnp.int32(t), clients)
        took = np.asarray(coins[t] & cohort.sampled)
        rows = np.zeros(clients, np.float32)
        rows[: took.sum()] = releases[t][took]
        total = Total({}, jnp.zeros(()), jnp.float32(took.sum()), jnp.asarray(rows))
        _, _, accounts = mechanism.aggregate(
            key, accounts, cohort._replace(sampled=jnp.asarray(took)), total, mesh
        )
        present.append(took)
        noises.append(jnp.broadcast_to(cohort.numbers.client_noise, clients))
    planned = planned_ledger(mechanism, clients, rounds)
    noise = np.array(noises)
    server = np.sqrt(
        np.maximum(0, planned.noise_multiplier**2 - (np.array(present) * noise**2).sum(1))
    )
    return planned._replace(participants=np.array(present), client_noise=noise, server_noise=server)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_adversarial_risks_never_exceed_epsilon(data):
    """This holds for any releases and cohorts, and for shares above 1, which (12) never gives."""
    target, rounds, clients = 2.0, data.draw(st.integers(1, 25)), 3
    plan = client_noise(
        round_budgets(1.0, rounds, beta=data.draw(st.floats(0, 4))),
        target,
        participation=data.draw(st.floats(0.02, 1.0)),
        release_share=data.draw(st.floats(0.05, 0.9)),
        accountant="pld",
    )
    boost = data.draw(st.floats(0.3, 8.0))
    seed = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    releases = np.exp(seed.uniform(-9, 9, (rounds, clients))).astype(np.float32)
    coins = seed.random((rounds, clients)) < data.draw(st.floats(0.1, 1.0))
    release = Release(lambda r: boost * client_shares(r), 1e-6, 1e6, plan.release_noise)
    m = PrivacyFilter(
        clip=1.0, client_noise=np.array(plan.noise), release=release, least_total=plan.least_total
    )
    ledger = play(m, releases, coins)
    # Composed by hand, in double precision, from what was drawn.
    sent = ledger.participants * (
        4 / ledger.client_noise.astype(np.float64) ** 2 + plan.release_noise**-2.0
    )
    for spent in sent.sum(axis=0):
        assert spent == 0 or get_epsilon_gaussian(spent**-0.5, 1e-5) <= target
    for observer in ("upload", "aggregate"):
        stated = epsilon(ledger, m, observer=observer, accountant="pld")
        assert stated.value <= target * (1 + 1e-9)
        assert "Smith and Thakurta" in stated.theorem
    # And it stops nobody early: whoever was stopped could not have paid once more.
    costs = 4 / ledger.client_noise.astype(np.float64) ** 2 + plan.release_noise**-2.0
    stopped = coins & ~ledger.participants
    before = np.cumsum(sent, axis=0) - sent
    assert np.all((before + costs)[stopped] > (1 - 2e-4) * plan.least_total**-2)


def filtered(**fields) -> PrivacyFilter:
    release = Release(client_shares, 1.0, 2.0, noise=3.0)
    defaults: dict[str, Any] = {
        "clip": 1.0,
        "client_noise": 4.0,
        "release": release,
        "least_total": 1.0,
    }
    return PrivacyFilter(**defaults | fields)


def test_a_filter_states_what_it_promises_and_not_what_was_spent():
    m = filtered()
    ledger = play(
        m, np.ones((2, 3)), np.ones((2, 3), bool)
    )  # 2 of the 2.8 rounds that the budget buys
    assert ledger.participants.all()
    for accountant in ("rdp", "pld"):
        found = epsilon(ledger, m, accountant=accountant)
        assert "Feldman and Zrnic" in found.theorem
        assert found.theorem.endswith(accountant.upper())
        exact = get_epsilon_gaussian(1.0, 1e-5)
        assert (
            exact * (1 - 1e-6) <= found.value <= exact * (1 + 1e-6 if accountant == "pld" else 1.15)
        )
        exact = get_epsilon_gaussian((4 / 16 + 1 / 9) ** -0.5, 1e-5)
        for observer in ("upload", "aggregate"):
            alone = epsilon(
                ledger, m, observer=observer, accountant=accountant, one_round=True
            ).value
            assert exact * (1 - 1e-6) <= alone <= exact * (1.001 if accountant == "pld" else 1.15)
    running = running_epsilon(m, 3)
    assert [running(done).rdp for done in (0, 1, 9)] == [
        0,
        *[epsilon(ledger, m, accountant="rdp").value] * 2,
    ]
    text = " ".join(format_statement(privacy_statement(ledger, m, 3)).split())
    assert "Rényi filter" in text
    assert (
        "adds up to a multiplier of at least 1, and released numbers have noise 3 times their range"
        in text
    )
    assert "no finite epsilon" not in text


def test_a_filter_stops_a_client_for_good_where_it_must():
    m = filtered()
    assert planned_ledger(m, 3, 6).participants.sum(0).tolist() == [2, 2, 2]  # 0.361 a round, of 1
    late = play(m, np.ones((6, 3)), np.arange(6)[:, None] >= np.array([0, 4, 5]))
    assert late.participants.sum(0).tolist() == [2, 2, 1]
    quiet = play(m, np.array([[1.0, 2.0, 2.0]] * 9), np.ones((9, 3), bool))
    # Twice the risk is twice the noise after the first release: 0.361 + 3 * 0.174.
    assert quiet.participants.sum(0).tolist() == [2, 4, 4]
    np.testing.assert_allclose(quiet.client_noise[1], [4, 8, 8])


def test_a_ledger_that_the_filter_should_have_stopped_is_refused():
    m = filtered()
    ledger = planned_ledger(m, 3, 6)._replace(participants=np.ones((6, 3), bool))
    with pytest.raises(
        ValueError,
        match=r"least_total must .* got 1.0, but all that client 0 sent adds up to 0\.67",
    ):
        epsilon(ledger, m)


def test_a_filter_of_zero_stops_nobody_and_promises_nothing():
    m = filtered(least_total=0.0, client_noise=0.0)
    assert planned_ledger(m, 3, 6).participants.all()
    found = epsilon(planned_ledger(m, 3, 6), m)
    assert (found.value, found.theorem, found.reason) == (math.inf, "none", found.reason)
    assert "no filter bounds what it spends" in str(found.reason)


def test_public_budgets_with_a_filter_need_no_release():
    m = PrivacyFilter(clip=1.0, client_noise=np.array([[4.0, 8.0]]), least_total=1.0)
    assert planned_ledger(m, 2, 20).participants.sum(0).tolist() == [
        3,
        15,
    ]  # 1/4 and 1/16 a round: rounding costs one


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: round_budgets(0.0, 4), "epsilon must be .* got 0.0"),
        (lambda: round_budgets(1.0, 0), "rounds must be .* got 0"),
        (lambda: round_budgets(1.0, 4, beta=-1.0), "beta must be .* got -1.0"),
        (
            lambda: client_noise(fixed_budgets(1.0, 4), 1.0, participation=0.0),
            "participation must be .* got 0.0",
        ),
        (
            lambda: client_noise(fixed_budgets(1.0, 4), 1.0, participation=1.0, release_share=1.0),
            "release_share must be .* got 1.0",
        ),
        (
            lambda: round_noise(np.array([1.0, 0.0]), 1.0, clients=3, sampling=Full()),
            r"budgets must be .*above 0",
        ),
        (lambda: Release(client_shares, 0.0, 1.0, noise=1.0), "low must be .* got 0.0"),
        (lambda: Release(client_shares, 1.0, math.inf, noise=1.0), "high must be .* got inf"),
        (
            lambda: Release(client_shares, 2.0, 1.0, noise=1.0),
            "high must be above low=2.0, got 1.0",
        ),
        (
            lambda: filtered(release=Release(client_shares)),
            "noise that follows from private numbers needs",
        ),
        (lambda: filtered(least_total=-1.0), "least_total must be .* got -1.0"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
