"""Replace-one under Poisson sampling, compared with divergences by integration."""

import itertools
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from jaxfl.privacy.accounting import accountants
from jaxfl.privacy.accounting.accountants import ORDERS, replaced_divergences
from jaxfl.privacy.accounting.ledgers import epsilon, planned_ledger
from jaxfl.privacy.accounting.observers import View
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import BallsInBins, Poisson

RATES, MULTIPLIERS = st.floats(0.01, 0.99), st.floats(0.3, 4.0)


def density(points: np.ndarray, update: np.ndarray, rate: float, z: float) -> np.ndarray:
    """Return the density (1 - q) N(0, z^2) + q N(u, z^2) at points [..., d]."""
    here, moved = (
        np.prod(stats.norm.pdf(points - mean, scale=z), axis=-1) for mean in (0 * update, update)
    )
    return (1 - rate) * here + rate * moved


def hockey_stick(first, second, rate: float, z: float, alpha: float, steps: int) -> float:
    """Return the integral of max(0, P_u - alpha P_v), on a grid with `steps` points per axis."""
    axes = [np.linspace(-1 - 9 * z, 1 + 9 * z, steps)] * len(first)
    points = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    excess = density(points, np.asarray(first), rate, z) - alpha * density(
        points, np.asarray(second), rate, z
    )
    return float(np.maximum(excess, 0).sum() * (axes[0][1] - axes[0][0]) ** len(first))


@settings(max_examples=40, deadline=None)
@given(rate=RATES, z=MULTIPLIERS, alpha=st.floats(0.2, 30.0), data=st.data())
def test_opposite_updates_dominate_all_others(rate, z, alpha, data):
    worst = hockey_stick([1.0], [-1.0], rate, z, alpha, 4001)
    sizes, angle = st.floats(0, 1), data.draw(st.floats(0, math.pi))
    first, second = data.draw(sizes), data.draw(sizes)
    pair = [0.0, first], [second * math.sin(angle), second * math.cos(angle)]
    assert hockey_stick(*pair, rate, z, alpha, 301) <= worst + 1e-4  # in the plane


@settings(max_examples=10, deadline=None)
@given(rate=RATES, z=st.floats(0.5, 4.0), delta=st.sampled_from([1e-2, 1e-3, 1e-5]))
def test_pld_of_two_rounds_is_the_integral_over_both(rate, z, delta):
    m = Mechanism(clip=1.0, noise_multiplier=z, sampling=Poisson(rate))
    found = epsilon(planned_ledger(m, 3, 2), m, unit="example", delta=delta).value
    x = np.linspace(-1 - 9 * z, 1 + 9 * z, 1501)[:, None]
    up, down = (density(x, np.array([sign]), rate, z) for sign in (1.0, -1.0))

    def spent(value: float) -> float:
        excess = np.maximum(np.outer(up, up) - math.exp(value) * np.outer(down, down), 0)
        return float(excess.sum() * (x[1, 0] - x[0, 0]) ** 2)

    assert spent(found) <= delta * (1 + 1e-3)
    assert found == 0 or spent(0.99 * found - 2e-3) > delta


@pytest.mark.parametrize(
    ("rate", "z"), [(0.01, 0.8), (0.3, 2.0), (0.5, 0.5), (1e-4, 5.0), (0.9, 1.0)]
)
@pytest.mark.parametrize("order", [2, 5, 20, 64])
def test_divergences_are_integrals(rate, z, order):
    def logarithm(x: float) -> float:
        near, up, down = (-0.5 * ((x - mean) / z) ** 2 for mean in (0.0, 1.0, -1.0))
        first, second = (
            np.logaddexp(math.log1p(-rate) + near, math.log(rate) + far) for far in (up, down)
        )
        return order * first + (1 - order) * second

    ends = -3 - 12 * z, order + 12 * z
    parts = np.linspace(ends[0], ends[1], 400)
    peak = max(map(logarithm, parts))
    total = sum(
        integrate.quad(lambda x: math.exp(logarithm(x) - peak), a, b)[0]
        for a, b in itertools.pairwise(parts)
    )
    expected = (math.log(total / (z * math.sqrt(2 * math.pi))) + peak) / (order - 1)
    assert replaced_divergences(z, rate)[ORDERS.index(order)] == pytest.approx(
        expected, rel=1e-6, abs=1e-13
    )


def test_divergences_where_the_closed_form_is_known():
    np.testing.assert_allclose(replaced_divergences(1.5, 1.0), 2 * np.array(ORDERS) / 1.5**2)
    # To the second order of q: half the order times the variance of (N(1) - N(-1)) / N(0).
    small = replaced_divergences(5.0, 1e-5)[:10]
    series = 1e-10 * (math.exp(1 / 25) - math.exp(-1 / 25)) * np.array(ORDERS[:10])
    np.testing.assert_allclose(small, series, rtol=5e-3)
    assert np.all(replaced_divergences(0.001, 0.5) == 2 * np.array(ORDERS) / 0.001**2)
    for z in (0.05, 0.3, 1.0, 20.0):
        for rate in (1e-6, 0.01, 0.5, 0.999):
            found = replaced_divergences(z, rate)
            assert np.all((found > 0) & (found <= 2 * np.array(ORDERS) / z**2))
            assert np.all(np.diff(found) > -1e-9)  # divergences grow with the order


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    rate=RATES,
    z=st.floats(0.4, 6.0),
    rounds=st.integers(1, 60),
    plain=st.sampled_from([math.inf, 3.0, 20.0]),
)
@example(rate=0.5, z=0.40234375, rounds=46, plain=math.inf)  # an epsilon of 711
def test_rdp_of_examples_is_above_their_pld(rate, z, rounds, plain):
    """Both are above zero-out, and below the epsilon without amplification."""
    numbers = plain, np.full(rounds, z), rate, 1e-5, 1
    for evaluate in (accountants.rdp_epsilon, accountants.pld_epsilon):
        whole = evaluate(*numbers[:2], 1.0, *numbers[3:], True)
        assert evaluate(*numbers, False) < evaluate(*numbers, True) <= whole * (1 + 1e-3)
    assert accountants.pld_epsilon(*numbers, True) <= accountants.rdp_epsilon(*numbers, True) * (
        1 + 1e-2
    )


@pytest.mark.parametrize(
    ("z", "rate"), [(0.02, 0.3), (0.3, 0.01), (1.0, 0.1), (1.0, 1.0), (30.0, 0.5), (200.0, 1e-3)]
)
def test_losses_are_the_librarys(z, rate):
    """On the same grid, the hockey sticks of a round and the epsilon of many rounds agree."""
    interval = max(0.05 * rate / z, (10 / z + 0.5 / z**2) / 1e4)
    relation = NeighboringRelation.REPLACE_SPECIAL
    library = privacy_loss_distribution.from_gaussian_mechanism(
        z, value_discretization_interval=interval, sampling_prob=rate, neighboring_relation=relation
    )
    losses = accountants._privacy_losses(z, rate, False, interval)
    ends = np.linspace(-3 * rate / z, 10 * rate / z, 30)
    found, wanted = (each.get_delta_for_epsilon(ends.tolist()) for each in (losses, library))
    np.testing.assert_allclose(found, wanted, atol=1e-13)
    many = [each.self_compose(50).get_epsilon_for_delta(1e-6) for each in (losses, library)]
    assert many[0] == pytest.approx(many[1], rel=1e-8)


@pytest.mark.parametrize(
    ("z", "rate", "rounds"),
    [(0.5, 0.5, 10), (1.0, 0.1, 100), (1.0, 0.5, 5), (3.0, 0.02, 300), (10.0, 0.5, 50)],
)
def test_a_grid_adds_to_an_epsilon_what_it_says(z, rate, rounds):
    """The grid adds h^2 / 12 s^2 for a spacing h of at most 0.05 s, compared with a finer grid."""
    found = accountants.pld_epsilon(math.inf, np.full(rounds, z), rate, 1e-5)
    interval = accountants._interval(math.inf, ((z, rounds),), rate, 1, 1.0)
    fine = privacy_loss_distribution.from_gaussian_mechanism(
        z,
        value_discretization_interval=interval / 8,
        sampling_prob=rate,
        neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
    )
    share = (interval * z / rate) ** 2 / 12
    assert share < 2.1e-4
    assert (
        1 - 1e-8 < found / fine.self_compose(rounds).get_epsilon_for_delta(1e-5) < 1 + 1.5 * share
    )


@pytest.mark.parametrize("rate", [1e-9, 1e-4, 0.3])
@pytest.mark.parametrize("z", [0.5, 1.0, 50.0, 1e6])
def test_divergences_of_sampling_are_their_polynomials(z, rate):
    """The first orders are short sums. Others equal the library's, if it has enough digits."""
    two, three = math.expm1(1 / z**2), math.expm1(3 / z**2)
    found = accountants.sampled_divergences(z, rate)
    assert found[0] == pytest.approx(math.log1p(rate**2 * two), rel=1e-12)
    assert found[1] == pytest.approx(
        math.log1p(3 * (1 - rate) * rate**2 * two + rate**3 * three) / 2, rel=1e-12
    )
    assert np.all(np.diff(found) >= -1e-12 * found[1:])  # divergences grow with the order
    library = RdpAccountant(ORDERS, NeighboringRelation.REPLACE_SPECIAL)
    library.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(z)))
    np.testing.assert_allclose(found, library.rdp, rtol=1e-9, atol=1e-13)


def test_no_rounding_makes_large_noise_free():
    """In the central limit delta at epsilon 0 is 2 F(m / 2) - 1, with m = q sqrt(T) / z = 1e-7."""
    m = Mechanism(clip=1.0, noise_multiplier=1e6, sampling=Poisson(1e-3))
    ledger = planned_ledger(m, 3, 10**4)
    assert 2 * stats.norm.cdf(0.5e-7) - 1 > 1e-9
    for accountant in ("pld", "rdp"):
        assert epsilon(ledger, m, accountant=accountant, delta=1e-9).value > 1e-7


def test_the_most_exposed_client_has_the_largest_epsilon():
    """Its noise is the least in all rounds, and other clients' epsilons are at most as large."""
    z = np.linspace(1.0, 1.001, 12)
    view = View(np.tile(z, (4, 1)), np.ones(4, bool), 0.1, "Poisson-sampled Gaussian", "none")
    for accountant in ("pld", "rdp"):
        values = accountants.bound(view, accountant, 1e-5).values
        alone = accountants.bound(accountants.most_exposed(view), accountant, 1e-5).values
        assert values[0] == values.max() == alone
        assert np.all(np.diff(values) <= 0)
    assert accountants.most_exposed(view).multiplier.shape == (4, 1)


def test_the_traps_of_replace_one():
    """Replace-one doubles the sensitivity of a plain round. For RDP the noise is halved."""
    none = np.zeros(0)
    pld = accountants.pld_epsilon(1.0, none, 1.0, 1e-5, 100, True)
    assert pld == pytest.approx(accountants.pld_epsilon(0.5, none, 1.0, 1e-5, 100), rel=1e-9)
    both = [
        accountants.rdp_epsilon(4.0, np.array([2.0]), rate, 1e-5, 3, True)
        for rate in (1.0, 1 - 1e-9)
    ]
    assert both[0] == pytest.approx(both[1], rel=1e-6)
    assert both[0] == pytest.approx(
        accountants.rdp_epsilon(2.0, np.array([1.0]), 1.0, 1e-5, 3), rel=1e-6
    )


@pytest.mark.parametrize(("z", "order"), [(0.7, 2), (1.0, 3), (2.0, 8)])
def test_balls_in_two_bins_are_integrals_over_both_rounds(z, order):
    """The divergences of (N(e_1) + N(e_2)) / 2 and N(0) are integrated on a grid in the plane."""
    x = np.linspace(-order - 10 * z, order + 10 * z, 3001)
    here, moved = stats.norm.pdf(x, 0, z), stats.norm.pdf(x, 1, z)
    absent = here[:, None] * here
    present = (moved[:, None] * here + here[:, None] * moved) / 2
    cell = (x[1] - x[0]) ** 2

    def divergence(first, second):
        with np.errstate(divide="ignore", invalid="ignore"):
            integrand = np.exp(order * np.log(first) + (1 - order) * np.log(second))
        return math.log(np.nansum(integrand) * cell) / (order - 1)

    expected = max(divergence(present, absent), divergence(absent, present))
    found = accountants.balls_in_bins(z, 2)[ORDERS.index(order)]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("z", [0.5, 1.0, 5.0])
def test_one_bin_is_a_gaussian_and_many_are_poisson_sampling(z):
    plain = np.array(ORDERS) / (2 * z**2)
    np.testing.assert_allclose(accountants.balls_in_bins(z, 1), plain, rtol=1e-9)
    assert np.all(accountants.balls_in_bins(z, 7) <= plain)
    many = accountants.balls_in_bins(z, 500)[0]
    sampled = 500 * accountants.sampled_divergences(z, 1 / 500)
    assert many == pytest.approx(sampled[0], rel=0.02 if z >= 1 else 0.3)


def test_balls_in_bins_are_stated_by_epoch():
    """The bound is RDP's, at most that of one Gaussian per epoch. A started epoch counts."""
    mechanism = Mechanism(clip=1.0, noise_multiplier=2.0, sampling=BallsInBins(50))
    of_run = [
        epsilon(planned_ledger(mechanism, 1000, rounds), mechanism) for rounds in (50, 51, 100)
    ]
    assert of_run[0].value < of_run[1].value == of_run[2].value
    assert "balls in bins, zero-out; RDP" in of_run[0].theorem
    once = Mechanism(clip=1.0, noise_multiplier=2.0)
    assert of_run[0].value < 0.2 * epsilon(planned_ledger(once, 1000, 1), once).value
    example = epsilon(planned_ledger(mechanism, 1000, 50), mechanism, unit="example").value
    assert example == pytest.approx(
        epsilon(planned_ledger(once, 1000, 1), once, unit="example").value
    )
