import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import MODEL, SIZES, small_clients
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from jaxfl import simulate
from jaxfl.algorithms import dp_fedavg, fedavg, pdp_fl, pdp_fl_paper
from jaxfl.algorithms.pdp_fl import Budgets, personal_budgets, personal_examples
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import FixedSize, Full, Mechanism, Poisson
from jaxfl.privacy.accounting.ledgers import epsilon, example_epsilon, planned_ledger
from jaxfl.privacy.mechanisms.gaussian import Total, round_numbers, server_noise
from jaxfl.types import Lists

KEY = jax.random.key(6)
LOCAL: dict[str, Any] = {"local": LocalSGD(optax.sgd(0.1), 4)}
budgets_of = st.lists(st.floats(0.1, 100), min_size=2, max_size=6)


def budgets(asked, levels=None):
    return Budgets(
        np.asarray(asked, float),
        np.full(len(asked), 5.0) if levels is None else np.asarray(levels, float),
    )


def build(asked, levels=None, **options):
    defaults: dict[str, Any] = {"epsilon_max": 5.0, "rounds": 2, "clip": 1.0}
    return pdp_fl(MODEL, budgets=budgets(asked, levels), **defaults | LOCAL | options)


def published(asked, levels=None, **options):
    defaults: dict[str, Any] = {"epsilon_max": 5.0, "clip": 1.0, "smallest": 4}
    return pdp_fl_paper(MODEL, budgets=budgets(asked, levels), **defaults | LOCAL | options)


def printed(asked, **options):
    """Return noise in a round of all clients: of one client, and on the mean by all and server."""
    mechanism = published(asked, smallest=100, **options).mechanism
    numbers = round_numbers(mechanism, len(asked), jnp.int32(0))
    present = jnp.sum((numbers.weights * numbers.client_noise) ** 2)
    total = float(numbers.weights.sum())
    return (
        float(numbers.client_noise[0]),
        math.sqrt(float(present)) / total,
        float(server_noise(numbers, present)) / total,
    )


def test_budgets_by_equation_7():
    assert personal_budgets(np.array([1.0]), base=32.0).epsilon.tolist() == [5]
    assert personal_budgets(np.array([2.0]), base=8.0).epsilon.tolist() == [6]
    assert personal_budgets(np.array([1.0, 3.5, 6.0, 6.5, 9.0])).level.tolist() == [2, 5, 5, 8, 8]
    with pytest.raises(ValueError, match=r"base must be above 1, got 1\.0"):
        personal_budgets(np.array([1.0]), base=1.0)


def test_budgets_by_algorithm_2():
    found = personal_budgets(np.array([1.0, 2.0, 8.0, 9.0]), rule="level")
    assert found.level.tolist() == [2, 5, 5, 8]
    assert found.epsilon.tolist() == [2, 10, 40, 72]


def test_tiny_budgets_are_raised_to_the_floor():
    assert personal_budgets(np.array([-1.0, 0.01, 1.0]), floor=0.25).epsilon.tolist() == [
        0.25,
        0.25,
        1.0,
    ]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(8.0, (0.0121120, 0.0060560, 0.0)), (12.0, (0.0080747, 0.0040373, 0.0026781))],
)
def test_printed_noise(asked, expected):
    assert printed([asked] * 4) == pytest.approx(expected, rel=1e-4, abs=1e-8)


def by_levels(levels, epsilon_max, **options):
    """Return the server's noise on the mean by the rule of levels, if all clients take part."""
    method = published(
        [1.0] * len(levels), levels, smallest=100, epsilon_max=epsilon_max, **options
    )
    numbers = round_numbers(method.mechanism, len(levels), jnp.int32(0))
    total = Total(None, jnp.float32(0.0), jnp.float32(np.sum(levels)), None)
    return float(method.mechanism.top_up(numbers, total)) / np.sum(levels)


@pytest.mark.parametrize(
    ("levels", "rule", "epsilon"),
    [
        ((2, 2, 2, 2), "mean_level", 2),  # case 1
        ((8, 8, 8, 8), "mean_level", 8),  # case 2
        ((2, 5, 8, 8), "mean_level", 5.75),
        ((5, 5, 5, 5), "mean_level", 5),
        ((2, 2, 2, 2), "level_sum", 8),
    ],
)
def test_noise_by_equation_20_and_the_test_of_algorithm_3(levels, rule, epsilon):
    # sigma_D = (2 c C / (m N)) sqrt(1/5^2 - 1/epsilon^2), and none where epsilon is not above 5.
    c = math.sqrt(2 * math.log(1.25e5))
    wanted = 2 * c / (100 * 4) * math.sqrt(1 / 25 - 1 / epsilon**2) if epsilon > 5 else 0.0
    assert by_levels(levels, 5.0, top_up=rule) == pytest.approx(wanted, rel=1e-5, abs=1e-12)


def test_equation_20_has_the_noise_of_the_oracle():
    # N = 4, C = 1, m = 100, epsilon_max = 5, delta = 1e-5: 0.0037820 at 8, 0.0044042 at 12.
    assert by_levels((8.0,) * 4, 5.0, top_up="mean_level") == pytest.approx(0.0037820, rel=1e-4)
    assert by_levels((12.0,) * 4, 5.0, top_up="mean_level") == pytest.approx(0.0044042, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["normalised", "printed"])
def test_the_noise_by_levels_is_drawn_recorded_and_counted(aggregation):
    levels = np.array([2.0, 2, 5, 8, 8, 8])
    options: dict[str, Any] = {
        "levels": levels,
        "aggregation": aggregation,
        "sampling": FixedSize(4),
    }
    clients = small_clients((4,) * 6)
    found = [
        run(published([8.0] * 6, epsilon_max=most, top_up="level_sum", **options), clients, 1)
        for most in (0.5, math.inf)
    ]
    noise = optax.tree.sub(
        found[0].server.params, found[1].server.params
    )  # the clients' own is in both
    flat = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(noise)])
    total = levels[found[0].ledger.participants[0]].sum()
    c = math.sqrt(2 * math.log(1.25e5))
    on_mean = 2 * c / (4 * 4) * math.sqrt(1 / 0.5**2 - 1 / total**2)
    assert flat.std() == pytest.approx(on_mean, rel=4 / math.sqrt(2 * flat.size))
    count = 4 if aggregation == "printed" else 1
    np.testing.assert_allclose(found[0].ledger.server_noise, count * on_mean * total, rtol=1e-5)
    # What counts is the cohort of the lowest levels: 2, 2, 5 and 8.
    least = 2 * c / (4 * 4) * math.sqrt(1 / 0.5**2 - 1 / 17**2) * 17 * count
    np.testing.assert_allclose(found[0].ledger.noise_multiplier, least / 8, rtol=1e-5)
    own = epsilon(
        found[0].ledger,
        published([8.0] * 6, epsilon_max=0.5, top_up="level_sum", **options).mechanism,
    )
    s, e = least / 8, own.per_client[-1]
    spent = norm.cdf(0.5 / s - e * s) - math.exp(e) * norm.cdf(
        -0.5 / s - e * s
    )  # Balle and Wang 2018
    assert spent == pytest.approx(1e-5, rel=0.01)


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=6))
@settings(deadline=None, max_examples=30)
def test_budgets_below_the_global_one_need_no_server(asked):
    assert printed(asked)[2] == 0


def test_weights_by_level():
    weights = build([1.0, 1.0, 1.0], (2, 5, 8)).mechanism.weight_table[0]
    np.testing.assert_allclose(weights / weights.sum(), [2 / 15, 1 / 3, 8 / 15])


def run(method, clients=None, rounds=2):
    return simulate(KEY, method, clients or small_clients(), rounds=rounds, progress=False)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Full(), FixedSize(4)])
def test_equal_levels_without_noise_are_fedavg(sampling):
    plain = fedavg(
        MODEL, mechanism=Mechanism(sampling=sampling, denominator="participants"), **LOCAL
    )
    free = {"epsilon_max": math.inf, "clip": math.inf, "sampling": sampling}
    close(run(build([math.inf] * len(SIZES), **free)).server, run(plain).server)


@pytest.mark.slow
def test_printed_coefficients_sum_to_one_over_the_participants():
    # Clients that all send the same weights: the mean is those weights, the printed one a fourth of them.
    clients = small_clients((4,) * 6)
    same = clients._replace(train=Lists.of([clients.train[0]] * 6))
    free: dict[str, Any] = {
        "epsilon_max": math.inf,
        "clip": math.inf,
        "local": LocalSGD(optax.sgd(0.1), 16),
    }
    free |= {"sampling": FixedSize(4), "levels": (2, 2, 5, 5, 8, 8)}
    found = [
        run(published([math.inf] * 6, aggregation=kind, **free), same, 1)
        for kind in ("normalised", "printed")
    ]
    close(found[1].server.params, optax.tree.scale(0.25, found[0].server.params))


@pytest.mark.slow
def test_the_servers_noise_is_added_after_the_printed_mean():
    # Algorithm 3: (1/n) sum_k a_k (w_k + N(0, sigma_k^2)) + N(0, sigma_D^2), sigma_D^2 = sigma_A^2 - what is there.
    levels = np.array([2.0, 2, 5, 5, 8, 8])
    options: dict[str, Any] = {"aggregation": "printed", "levels": levels}
    clients = small_clients((4,) * 6)
    found = [
        run(published([0.4] * 6, epsilon_max=most, **options), clients, 1)
        for most in (1.0, math.inf)
    ]
    noise = optax.tree.sub(
        found[0].server.params, found[1].server.params
    )  # the clients' own is in both
    flat = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(noise)])
    a, of_one = levels / levels.sum(), 2 * math.sqrt(2 * math.log(1.25 / 1e-5)) / 4
    present = np.sum((a * of_one / 0.4 / 6) ** 2)
    wanted = math.sqrt((of_one * a.max()) ** 2 - present)
    assert flat.std() == pytest.approx(wanted, rel=4 / math.sqrt(2 * flat.size))


@pytest.mark.slow
@given(
    budgets_of,
    st.floats(0.5, 50),
    st.sampled_from([Full(), Poisson(0.4), FixedSize(1)]),
    st.integers(1, 20),
)
@settings(deadline=None, max_examples=25)
def test_sound_never_exceeds_what_a_client_asked_for(asked, most, sampling, rounds):
    levels = personal_budgets(np.array(asked)).level
    mechanism = build(asked, levels, epsilon_max=most, sampling=sampling, rounds=rounds).mechanism
    ledger = planned_ledger(mechanism, len(asked), rounds)
    own = epsilon(ledger, mechanism, observer="upload").per_client
    assert np.all(own <= asked)
    assert np.all(own >= 0.99 * np.array(asked))
    aggregate = epsilon(ledger, mechanism).per_client
    assert np.all(aggregate <= most)
    assert np.all(aggregate <= asked)


@given(
    st.lists(
        st.tuples(st.floats(0.5, 20), st.sampled_from([2.0, 5.0, 8.0])), min_size=2, max_size=6
    )
)
@settings(deadline=None, max_examples=25)
def test_variance_is_the_larger_of_target_and_present(clients):
    asked, levels = (np.array(column) for column in zip(*clients))
    client, present, server = printed(asked, levels=levels)
    c = math.sqrt(2 * math.log(1.25e5))
    a, own = levels / levels.sum(), 2 * c / (100 * asked)
    target = 2 * c * a.max() / (100 * 5.0)
    assert client == pytest.approx(own[0], rel=1e-5)
    assert present == pytest.approx(math.sqrt(np.sum((a * own) ** 2)), rel=1e-5)
    assert present**2 + server**2 == pytest.approx(max(target**2, np.sum((a * own) ** 2)), rel=1e-4)


def test_examples_never_exceed_what_their_client_asked_for():
    asked = np.array([0.5, 2.0, 8.0])
    private = personal_examples(asked, clip=1.0, rate=0.05, steps=20, rounds=3)
    method = build([math.inf] * 3, epsilon_max=math.inf, local=private)
    assert method.dp_sgd is private
    spent = example_epsilon(planned_ledger(method.mechanism, 3, 3, private), private).per_client
    assert np.all((spent <= asked) & (spent > 0.99 * asked))


def test_examples_without_a_budget_are_refused():
    with pytest.raises(ValueError, match=r"epsilon must be a vector of finite numbers"):
        personal_examples(np.array([1.0, math.inf]), clip=1.0, rate=0.05, steps=20, rounds=3)


def test_many_kinds_of_budgets_are_rounded_down():
    asked = np.random.default_rng(0).uniform(1, 9, 200)
    mechanism = build(asked).mechanism
    assert 32 < len(np.unique(mechanism.client_noise)) <= 64
    own = epsilon(planned_ledger(mechanism, 200, 2), mechanism, observer="upload").per_client
    assert np.all((own <= asked) & (own > 0.93 * asked))


def test_statement_has_every_clients_epsilon():
    asked = np.linspace(2, 20, len(SIZES))
    upload = run(build(asked)).statement["honest"]["upload"]["pld"]
    np.testing.assert_array_less(upload["per_client"]["values"], asked)
    assert upload["per_client"]["max"] == max(upload["per_client"]["values"]) == upload["total"]
    assert upload["per_client"]["median"] == upload["per_client"]["values"][5]


def test_paper_is_far_from_its_claim():
    method, smaller = (published([asked] * 4, smallest=600) for asked in (8.0, 4.0))
    mechanism = method.mechanism
    assert (method.terms.claim or (0,))[0] == 5
    assert (smaller.terms.claim or (0,))[0] == 4
    assert mechanism.noise_multiplier_table[0] / 2 == pytest.approx(
        0.0016, rel=0.02
    )  # an example, replaced, moves 2C
    assert epsilon(planned_ledger(mechanism, 4, 2), mechanism, observer="upload").value > 1e5


@pytest.mark.slow
def test_one_budget_and_no_server_is_ldp_fed():
    ldp = build([8.0] * len(SIZES), epsilon_max=math.inf)
    s = float(ldp.mechanism.client_noise_table[0, 0])
    plain = fedavg(
        MODEL, mechanism=Mechanism(clip=1.0, client_noise=s, denominator="participants"), **LOCAL
    )
    close(run(ldp).server, run(plain).server)


@pytest.mark.slow
def test_geyers_method_is_dp_fedavg_with_a_fixed_cohort():
    # w += (sum clip + N(0, z^2 C^2)) / m: the draws are the engine's, so they are recovered from two amounts of noise.
    gdp = [
        run(
            dp_fedavg(MODEL, clip=0.3, noise_multiplier=z, sampling=FixedSize(4), **LOCAL), rounds=1
        )
        for z in (0.0, 2.0)
    ]
    noise = optax.tree.sub(gdp[1].server.params, gdp[0].server.params)
    flat = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(noise)])
    assert flat.std() == pytest.approx(2 * 0.3 / 4, rel=4 / math.sqrt(2 * flat.size))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"asked": [0.0, 1.0]}, "budgets.epsilon must be"),
        ({"asked": [1.0], "levels": [1.0, 2.0]}, "budgets must have as many"),
        ({"epsilon_max": 0.0}, "epsilon_max must be .* got 0.0"),
        ({"rounds": 0}, "rounds must be .* got 0"),
    ],
)
def test_wrong_arguments_name_themselves(wrong, name):
    with pytest.raises(ValueError, match=name):
        build(**{"asked": [1.0, 2.0]} | wrong)


@pytest.mark.parametrize(
    "option", [{"aggregation": "printed"}, {"top_up": "mean_level"}, {"top_up": "level_sum"}]
)
def test_what_divides_by_n_needs_a_number_of_participants(option):
    with pytest.raises(ValueError, match=r"sampling must .*got Poisson.*FixedSize"):
        published([1.0, 2.0], sampling=Poisson(0.5), **option)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"preferences": np.array([np.nan])}, "preferences must be"),
        ({"floor": 0.0}, "floor must be .* got 0.0"),
        ({"cuts": (6.0, 3.0)}, r"cuts must be .*\(6.0, 3.0\)"),
    ],
)
def test_wrong_preferences_name_themselves(wrong, name):
    with pytest.raises(ValueError, match=name):
        personal_budgets(**{"preferences": np.ones(2)} | wrong)


def test_noise_that_shows_the_cohort_is_not_amplified():
    """The server adds its noise by levels to the noise of the participants."""
    rule: dict[str, Any] = {
        "epsilon_max": 5.0,
        "smallest": 1,
        "top_up": "level_sum",
        "sampling": FixedSize(10),
        "clip": 1.0,
    }

    def theorem(asked):
        method = pdp_fl_paper(MODEL, budgets=Budgets(np.array(asked), np.full(100, 8.0)), **rule)
        ledger = planned_ledger(method.mechanism, 100, 5)
        return epsilon(ledger, method.mechanism, accountant="rdp").theorem

    assert "without replacement" not in theorem([16.0] * 50 + [4e6] * 50)
