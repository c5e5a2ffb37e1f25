"""Numbers from closed forms, from fresh dp-accounting computations, and from integrals done here."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from jaxfl.privacy import accountants
from jaxfl.privacy.accounting import calibrate, calibrate_upload, epsilon, planned_ledger, running_epsilon
from jaxfl.privacy.mechanism import FixedSize, Full, Mechanism, Poisson
from jaxfl.types import Ledger

ZERO_OUT = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


def mechanism(noise_multiplier=0.0, **fields) -> Mechanism:
    return Mechanism(clip=1.0, noise_multiplier=noise_multiplier, **fields)


def ledger(m: Mechanism, present: np.ndarray) -> Ledger:
    """As the engine writes it, in single precision."""
    rounds = len(present)
    s, w, z = m.client_noise_table, m.weight_table, m.noise_multiplier_table
    s, w, z = np.tile(s, (rounds // len(s), 1)), np.tile(w, (rounds // len(w), 1)), np.tile(z, rounds // len(z))
    top_up = (z * w.max(axis=1)) ** 2 - (present * np.broadcast_to((w * s) ** 2, present.shape)).sum(axis=1)
    arrays = s, w, np.sqrt(np.maximum(0, top_up)), z
    return Ledger(present, *(array.astype(np.float32) for array in arrays))


def spent(m: Mechanism, rounds: int, clients: int = 4, **options) -> float:
    return epsilon(planned_ledger(m, clients, rounds), m, **options).value


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    return dp_accounting.get_epsilon_gaussian(multiplier, delta)


def poisson_event(rate: float, multipliers) -> dp_accounting.ComposedDpEvent:
    return dp_accounting.ComposedDpEvent(
        [dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(float(z))) for z in multipliers]
    )


@pytest.mark.parametrize(
    ("noise", "rate", "rounds", "rdp", "pld"),
    [
        (10.0, 1.0, 100, 4.7285, 4.3772),
        ((1.0, 2.0, 4.0), 1.0, 3, 5.53, 5.1274),
        ((2.0, 4.0, 8.0), 0.5, 3, 1.638, 1.460),
        (1.0, 0.1, 100, 7.904, 7.047),
        (1.0, 0.01, 1000, 2.101, 1.828),
    ],
)
def test_reference_epsilons(noise, rate, rounds, rdp, pld):
    m = mechanism(noise, sampling=Poisson(rate))
    assert spent(m, rounds) == pytest.approx(rdp, rel=2e-3)
    assert spent(m, rounds, accountant="pld") == pytest.approx(pld, rel=3e-4)


CALIBRATED = [  # rounds, delta, rate, then RDP and PLD at epsilon 0.5, 1 and 2
    (100, 1e-5, 0.1, (7.87, 7.22), (4.28, 3.94), (2.42, 2.25)),
    (100, 1e-5, 0.25, (19.3, 17.7), (10.3, 9.48), (5.56, 5.15)),
    (100, 1e-5, 0.5, (38.4, 35.3), (20.3, 18.7), (10.9, 10.1)),
    (100, 1e-5, 1.0, (76.7, 70.3), (40.5, 37.3), (21.5, 19.9)),
    (100, 1 / 20, 0.1, (2.72, 2.16), (1.82, 1.50), (1.25, 1.07)),
    (100, 1 / 20, 1.0, (25.7, 20.3), (16.3, 13.3), (10.1, 8.55)),
    (100, 1 / 100, 0.1, (3.92, 3.27), (2.39, 2.05), (1.52, 1.34)),
    (100, 1 / 100, 1.0, (37.7, 31.5), (22.0, 18.8), (12.8, 11.2)),
    (50, 1e-5, 0.1, (5.71, 5.23), (3.19, 2.93), (1.89, 1.75)),
    (50, 1e-5, 0.5, (27.3, 25.0), (14.5, 13.3), (7.75, 7.19)),
    (50, 1e-5, 1.0, (54.2, 49.7), (28.6, 26.4), (15.2, 14.1)),
    (50, 1 / 20, 1.0, (18.2, 14.4), (11.5, 9.42), (7.18, 6.04)),
]


@pytest.mark.parametrize(("rounds", "delta", "rate", "half", "one", "two"), CALIBRATED)
def test_calibrate_gives_the_reference_multipliers(rounds, delta, rate, half, one, two):
    def noise(target, accountant):
        return calibrate(target, clients=20, rounds=rounds, sampling=Poisson(rate), delta=delta, accountant=accountant)

    for target, (rdp, pld) in zip((0.5, 1.0, 2.0), (half, one, two)):
        assert noise(target, "rdp") == pytest.approx(rdp, rel=5e-3)
        if rate == 1 or target == 1:  # sampled PLDs are slow; their epsilons are tested above
            assert noise(target, "pld") == pytest.approx(pld, rel=5e-3)


@pytest.mark.parametrize(
    ("sigma", "delta", "total"),
    [(0.508, 0.1, 37.9), (0.852, 1e-5, 29.0), (0.487, 0.1, 40.9), (0.508, 1e-5, 60.7), (0.487, 1e-5, 64.7)],
)
def test_noise_meant_for_examples_protects_clients_little(sigma, delta, total):
    m = mechanism(client_noise=sigma / math.sqrt(10), delta=delta)
    assert spent(m, 15, clients=10, accountant="pld") == pytest.approx(total, rel=3e-3)
    assert spent(m, 15, clients=10) > total


@pytest.mark.parametrize(("delta", "needed"), [(0.1, 4.21), (1e-5, 14.4)])
def test_noise_that_clients_need(delta, needed):
    found = calibrate(1.0, clients=10, rounds=15, delta=delta, accountant="pld")
    assert found == pytest.approx(needed, rel=5e-3)


@pytest.mark.parametrize(("sigma", "total"), [(0.508, 180), (0.852, 79.4), (0.487, 193)])
def test_uploads_under_replace_one(sigma, total):
    m = mechanism(client_noise=sigma)
    assert spent(m, 15, observer="upload", accountant="pld") == pytest.approx(total, rel=5e-3)


def test_upload_calibration():
    assert calibrate_upload(1.0, participations=100, accountant="pld") == pytest.approx(74.6, rel=1e-3)
    noise = calibrate_upload(3.0, participations=7)
    assert 3 * (1 - 1e-3) <= spent(mechanism(client_noise=noise), 7, observer="upload") <= 3


def test_upload_at_unequal_bounds_of_replace_one():
    """z_loc = 8.34 over 100 rounds: 5.41 under zero-out, 12.5 under replace-one."""
    m = mechanism(client_noise=8.34)
    assert spent(m, 100, observer="upload", accountant="pld") == pytest.approx(12.5, rel=5e-3)
    assert gaussian_epsilon(0.834, 1e-5) == pytest.approx(5.41, rel=5e-3)


def test_analytic_gaussian():
    for delta, sigma in ((1e-5, 3.7306), (0.05, 1.3328)):
        assert calibrate(1.0, clients=3, rounds=1, delta=delta, accountant="pld") == pytest.approx(sigma, rel=1e-3)
    z, delta = 1.3, 1e-3
    found = spent(mechanism(z, delta=delta), 1, accountant="pld")

    def excess(x):
        return max(0.0, stats.norm.pdf(x, 1, z) - math.exp(found) * stats.norm.pdf(x, 0, z))

    assert integrate.quad(excess, 0, 20, points=[z * z * found + 0.5], limit=200)[0] == pytest.approx(delta, rel=1e-6)


def test_calibrate_a_shape():
    shares = np.array([0.097901, 0.142040, 0.245365, 0.514693])
    kappa = calibrate(1.0, clients=20, rounds=4, accountant="pld", shape=1 / shares)
    assert kappa == pytest.approx(2.22238, rel=1e-3)
    np.testing.assert_allclose(kappa / shares, [22.700, 15.646, 9.0575, 4.3179], rtol=1e-3)


def test_fixed_size_takes_the_better_of_two_bounds():
    """10 of 20: plain (40.5, not 83.6). 2 of 20: without replacement (16.8, not 40.5)."""
    plain = calibrate(1.0, clients=20, rounds=100)
    assert calibrate(1.0, clients=20, rounds=100, sampling=FixedSize(10)) == pytest.approx(plain, rel=1e-3)
    assert calibrate(1.0, clients=20, rounds=100, sampling=FixedSize(2)) == pytest.approx(16.8, rel=5e-3)


def test_fixed_size_equals_dp_accounting():
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, dp_accounting.GaussianDpEvent(1.5))
    fresh = RdpAccountant(list(range(2, 33)), REPLACE_ONE).compose(event, 50).get_epsilon(1e-5)
    by_server = mechanism(3.0, sampling=FixedSize(10))
    by_clients = mechanism(client_noise=3 / math.sqrt(10), sampling=FixedSize(10))
    for m in (by_server, by_clients):
        assert spent(m, 50, clients=1000) == pytest.approx(fresh, rel=1e-6)
        plain = gaussian_epsilon(3 / math.sqrt(50), 1e-5)
        assert spent(m, 50, clients=1000, accountant="pld") == pytest.approx(plain, rel=1e-6)


def test_poisson_divergence_equals_dp_accounting_at_whole_orders():
    whole = [a for a in accountants.ORDERS if a >= 14 and a == round(a)]
    for rate, z in ((0.01, 0.7), (0.1, 1.0), (0.5, 8.0), (1e-4, 5.0), (0.9, 40.0)):
        ours = accountants.poisson_divergence(rate, z)[-len(whole) :]
        # From one order alone, epsilon is the divergence plus a known constant.
        for order in (14, 64, 256):
            fresh = RdpAccountant([order], ZERO_OUT).compose(poisson_event(rate, [z])).get_epsilon(1e-300)
            constant = math.log1p(-1 / order) - math.log(1e-300 * order) / (order - 1)
            assert ours[whole.index(order)] == pytest.approx(fresh - constant, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize(("rate", "z"), [(0.1, 1.0), (0.01, 0.3), (0.5, 10.0), (0.3, 0.1)])
def test_poisson_divergence_at_fractional_orders_is_the_integral(rate, z):
    for index in (0, 60, 100):
        order = accountants.ORDERS[index]

        def density(x, order=order):
            ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * z * z))
            return np.exp(order * ratio + stats.norm.logpdf(x, 0, z) - scale)  # noqa: B023

        scale = order * (order - 1) / (2 * z * z)
        area = integrate.quad(density, -15 * z, order + 15 * z, points=[0, order], limit=500, epsrel=1e-11)[0]
        expected = (math.log(area) + scale) / (order - 1)
        assert accountants.poisson_divergence(rate, z)[index] == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_poisson_divergence_is_smooth_across_the_two_formulas():
    for rate, z in ((0.1, 1.0), (0.01, 5.0), (0.5, 0.04)):
        cumulant = accountants.poisson_divergence(rate, z) * (accountants.ORDERS - 1)
        slopes = np.diff(cumulant) / np.diff(accountants.ORDERS)
        assert np.all(np.diff(slopes) >= -1e-6 * np.abs(slopes[1:]))  # convex in the order


@pytest.mark.parametrize("seed", range(3))
def test_ledger_equals_a_fresh_computation(seed):
    rng = np.random.default_rng(seed)
    rate, z = rng.uniform(0.05, 0.5), tuple(rng.uniform(2, 6, 12).tolist())
    m = mechanism(z, sampling=Poisson(rate), client_noise=0.1, delta=1e-6)
    record = ledger(m, rng.random((12, 30)) < rate)
    fresh_rdp = RdpAccountant(list(range(2, 65)), ZERO_OUT).compose(poisson_event(rate, z)).get_epsilon(1e-6)
    fresh_pld = PLDAccountant(ZERO_OUT, 1e-3).compose(poisson_event(rate, z)).get_epsilon(1e-6)
    assert epsilon(record, m).value == pytest.approx(fresh_rdp, rel=5e-3)
    assert epsilon(record, m).value <= fresh_rdp * (1 + 1e-6)
    assert epsilon(record, m, accountant="pld").value == pytest.approx(fresh_pld, rel=1e-3)


def test_part_of_a_ledger_is_as_many_fresh_rounds():
    m = mechanism((3.0, 2.0, 5.0, 4.0), sampling=Poisson(0.2))
    record = ledger(m, np.random.default_rng(0).random((4, 8)) < 0.2)
    for done in range(1, 5):
        part = Ledger(*(field[:done] for field in record))
        fresh = PLDAccountant(ZERO_OUT, 5e-4).compose(poisson_event(0.2, (3.0, 2.0, 5.0, 4.0)[:done])).get_epsilon(1e-5)
        assert epsilon(part, m, accountant="pld").value == pytest.approx(fresh, rel=1e-3)
        assert running_epsilon(m, 8)(done) == pytest.approx(epsilon(part, m).value, rel=1e-6)
    assert epsilon(Ledger(*(field[:0] for field in record)), m).value == 0


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_order_of_rounds_does_not_matter(accountant):
    values = [
        spent(mechanism(z, sampling=Poisson(0.5)), 3, accountant=accountant) for z in ((2.0, 4.0, 8.0), (8.0, 2.0, 4.0))
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_monotone(accountant):
    def value(z=2.0, q=0.1, rounds=20):
        return spent(mechanism(z, sampling=Poisson(q)), rounds, accountant=accountant)

    assert value(z=1.5) > value() > value(z=3.0) > 0
    assert value(q=0.05) < value() < value(q=0.2) < value(q=1.0)
    assert value(rounds=10) < value() < value(rounds=40)


def test_tiny_and_huge_epsilons():
    small = mechanism(1000.0)
    assert spent(small, 100) == pytest.approx(spent(small, 100, accountant="pld"), rel=0.15)
    assert 0.03 < spent(small, 100) < 0.05
    rare = mechanism(5.0, sampling=Poisson(1e-3))
    fresh = PLDAccountant(ZERO_OUT, 1e-6).compose(poisson_event(1e-3, [5.0]), 1500).get_epsilon(1e-5)
    assert spent(rare, 1500, accountant="pld") == pytest.approx(fresh, rel=3e-3)
    assert fresh < spent(rare, 1500) < 1.5 * fresh
    weak = mechanism(0.01)
    assert spent(weak, 1) == pytest.approx(spent(weak, 1, accountant="pld"), rel=0.05)


def test_many_different_rounds_stay_upper_bounds():
    z = tuple(np.geomspace(2, 16, 700).tolist())
    m = mechanism(z, sampling=Poisson(0.02))
    grouped = np.repeat(np.geomspace(2, 16, 70)[:, None], 10, axis=1).ravel()  # about the same noise, few kinds
    near = spent(mechanism(tuple(grouped.tolist()), sampling=Poisson(0.02)), 700)
    assert spent(m, 700) == pytest.approx(near, rel=0.03)
    assert spent(m, 700, accountant="pld") <= spent(m, 700)


# Per client


def test_uploads_count_the_rounds_a_client_took_part_in():
    rng = np.random.default_rng(1)
    noise, present = rng.uniform(1, 4, (6, 5)), rng.random((6, 5)) < 0.5
    present[:, 4] = False
    m = mechanism(client_noise=noise, sampling=Poisson(0.5))
    for accountant in ("rdp", "pld"):
        found = epsilon(ledger(m, present), m, observer="upload", accountant=accountant)
        for i in range(4):
            single = (4 / noise[present[:, i], i] ** 2).sum() ** -0.5
            exact = gaussian_epsilon(single, 1e-5)
            assert found.per_client[i] == pytest.approx(exact, rel=1e-5 if accountant == "pld" else 0.15)
            assert found.per_client[i] >= exact * (1 - 1e-5)
        assert found.per_client[4] == 0
        assert found.value == found.per_client.max()


@pytest.mark.parametrize("sampling", [Full(), Poisson(0.2)])
def test_smaller_weights_are_better_protected(sampling):
    weights = np.array([0.3, 0.1, 0.0, 0.2])
    m = mechanism(2.0, weights=weights, sampling=sampling)
    for accountant in ("rdp", "pld"):
        found = epsilon(planned_ledger(m, 4, 10), m, accountant=accountant)
        for i in (0, 1, 3):
            alone = mechanism(2.0 * 0.3 / weights[i], sampling=sampling)
            assert found.per_client[i] == pytest.approx(spent(alone, 10, accountant=accountant), rel=1e-3)
        assert found.per_client[2] == 0


def test_weights_dilute_noise_that_clients_add():
    """Multiplier sigma sqrt(sum p^2 / N) / max p: 0.42328 sigma for this vector, sigma for equal weights."""
    p = np.array([0.3, 0.2] + [0.0625] * 8)
    m = mechanism(client_noise=2 / math.sqrt(10), weights=p)
    assert spent(m, 1, clients=10, accountant="pld") == pytest.approx(gaussian_epsilon(0.42328 * 2, 1e-5), rel=1e-4)
    equal = mechanism(client_noise=2 / math.sqrt(10), weights=np.full(10, 0.1))
    assert spent(equal, 1, clients=10, accountant="pld") == pytest.approx(gaussian_epsilon(2, 1e-5), rel=1e-6)


def test_unequal_noise_under_fixed_size_counts_on_the_quietest_company():
    m = mechanism(client_noise=np.array([[1.0, 2.0, 3.0, 4.0]]), sampling=FixedSize(2))
    found = epsilon(planned_ledger(m, 4, 1), m, accountant="pld").per_client
    expected = [gaussian_epsilon(math.sqrt(v), 1e-5) for v in (1 + 4, 4 + 1, 9 + 1, 16 + 1)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# Amplification only where the cohort cannot be told from the noise


def test_client_noise_below_the_floor_keeps_the_amplification():
    kept = mechanism(2.0, client_noise=2 / math.sqrt(50), sampling=Poisson(0.1))
    server = mechanism(2.0, sampling=Poisson(0.1))
    assert spent(kept, 10, clients=50) == spent(server, 10, clients=50)


def test_client_noise_above_the_floor_loses_the_amplification():
    """With zC/sqrt(qN) each, large cohorts are noisier than zC, and the variance shows who was there."""
    lost = mechanism(2.0, client_noise=2 / math.sqrt(5), sampling=Poisson(0.1))
    found = epsilon(planned_ledger(lost, 50, 10), lost, accountant="pld")
    assert found.value == pytest.approx(gaussian_epsilon(2 / math.sqrt(10), 1e-5), rel=1e-6)
    assert "can exceed the floor" in found.theorem


def test_variance_that_depends_on_the_coin_does_break_amplification():
    """The loss behind the rule above: at d coordinates a subset test tells variance 1.2 from 1."""
    q, z, d, loud = 0.1, 4.0, 4000, 1.2
    claimed = spent(mechanism(z, sampling=Poisson(q)), 1, accountant="pld")
    # Event: large norm (the client is in), and a positive first coordinate above t.
    present = stats.chi2.sf(1.1 * d / loud, d)
    absent = stats.chi2.sf(1.1 * d, d)
    t = 3 * z
    tail_with, tail_without = stats.norm.sf((t - 1) / (z * math.sqrt(loud))), stats.norm.sf(t / (z * math.sqrt(loud)))
    with_client = q * present * tail_with + (1 - q) * absent
    zeroed = q * present * tail_without + (1 - q) * absent
    assert with_client - math.exp(claimed) * zeroed > 1e-5
    assert with_client - math.exp(gaussian_epsilon(z, 1e-5)) * zeroed < 1e-5


def test_realised_denominator_loses_the_amplification():
    shown = mechanism(2.0, sampling=Poisson(0.1), denominator="participants")
    found = epsilon(planned_ledger(shown, 50, 10), shown, accountant="pld")
    assert found.value == pytest.approx(gaussian_epsilon(2 / math.sqrt(10), 1e-5), rel=1e-6)
    assert "denominator shows the cohort" in found.theorem
    same = mechanism(2.0, sampling=FixedSize(5), denominator="participants")
    fixed = mechanism(2.0, sampling=FixedSize(5))
    assert spent(same, 10, clients=50) == spent(fixed, 10, clients=50)


def test_poisson_with_client_noise_only_counts_on_its_own_noise():
    m = mechanism(client_noise=3.0, sampling=Poisson(0.5))
    for present in (np.ones((4, 6), bool), np.eye(6, dtype=bool)[:4]):
        found = epsilon(ledger(m, present), m, accountant="pld")
        assert found.value == pytest.approx(gaussian_epsilon(3 / math.sqrt(4), 1e-5), rel=1e-6)


def test_aggregate_does_not_depend_on_the_coins_drawn():
    rng = np.random.default_rng(3)
    for sampling in (Poisson(0.4), FixedSize(2)):
        m = mechanism(2.0, client_noise=rng.uniform(0.1, 0.9, (1, 6)), sampling=sampling)
        values = [epsilon(ledger(m, np.roll(np.eye(6, dtype=bool), k, 0)[:4]), m).value for k in range(3)]
        assert values == [epsilon(planned_ledger(m, 6, 4), m).value] * 3


# No finite epsilon, and zero


@pytest.mark.parametrize(
    ("m", "observer", "reason"),
    [
        (Mechanism(), "aggregate", "not clipped"),
        (Mechanism(), "upload", "not clipped"),
        (mechanism(0.0), "aggregate", "no noise on the sum"),
        (mechanism(0.0, sampling=FixedSize(2)), "aggregate", "no noise on the sum"),
        (mechanism(0.0, sampling=Poisson(0.1)), "aggregate", "no noise on the sum"),
        (mechanism((1.0, 0.0, 1.0)), "aggregate", "no noise on the sum"),
        (mechanism(1.0), "upload", "without noise"),
        (mechanism(1.0, broken="private mask on the noise"), "aggregate", "private mask on the noise"),
        (mechanism(client_noise=1.0, broken="private mask on the noise"), "upload", "private mask on the noise"),
    ],
)
def test_no_finite_epsilon(m, observer, reason):
    for accountant in ("rdp", "pld"):
        for one_round in (False, True):
            record = planned_ledger(m, 4, 3)
            found = epsilon(record, m, observer=observer, accountant=accountant, one_round=one_round)
            assert found.value == math.inf
            assert found.theorem == "none"
            assert reason in str(found.reason)


def test_some_clients_upload_without_noise():
    m = mechanism(client_noise=np.array([[0.0, 1.0]]))
    found = epsilon(planned_ledger(m, 2, 3), m, observer="upload", accountant="pld")
    assert found.value == math.inf
    assert found.per_client[1] == pytest.approx(gaussian_epsilon(0.5 / math.sqrt(3), 1e-5), rel=1e-6)


def test_nothing_leaves_the_clients():
    m = Mechanism(communicates=False)
    for observer in ("aggregate", "upload"):
        assert spent(m, 3, observer=observer) == 0
    assert running_epsilon(m, 4)(10) == 0


def test_one_round_alone():
    m = mechanism((4.0, 1.5, 3.0), sampling=Poisson(0.2))
    for accountant in ("rdp", "pld"):
        assert spent(m, 3, one_round=True, accountant=accountant) == pytest.approx(
            spent(mechanism(1.5, sampling=Poisson(0.2)), 1, accountant=accountant), rel=1e-3
        )


def test_running_epsilon():
    for m in (mechanism(2.0, sampling=Poisson(0.1)), mechanism(client_noise=1.0, weights=np.array([1.0, 2, 1, 1]))):
        running = running_epsilon(m, 4)
        assert running(0) == 0
        assert running(30) == pytest.approx(spent(m, 30), rel=1e-9)
    assert running_epsilon(Mechanism(), 4)(1) == math.inf
    with pytest.raises(ValueError, match=r"done=3: .* 2 rounds"):
        running_epsilon(mechanism((1.0, 2.0)), 4)(3)


def test_pld_is_never_asked_for_replace_one(monkeypatch):
    """There it would double the sensitivity itself: 9.9973 in place of 4.3772, and RDP would not."""
    event = dp_accounting.GaussianDpEvent(10)
    for relation, pld in ((ZERO_OUT, 4.3772), (REPLACE_ONE, 9.9973)):
        assert PLDAccountant(relation).compose(event, 100).get_epsilon(1e-5) == pytest.approx(pld, rel=1e-4)
        assert RdpAccountant(accountants.ORDERS, relation).compose(event, 100).get_epsilon(1e-5) == pytest.approx(
            4.7285, rel=1e-3
        )
    asked = []

    def accountant(relation, interval):
        asked.append(relation)
        return PLDAccountant(relation, interval)

    monkeypatch.setattr(accountants, "PLDAccountant", accountant)
    for sampling in (Full(), FixedSize(2), Poisson(0.5)):
        m = mechanism(3.0, client_noise=1.0, sampling=sampling)
        for observer in ("aggregate", "upload"):
            spent(m, 2, observer=observer, accountant="pld")
    assert asked == [ZERO_OUT]


# Properties


@settings(max_examples=12, deadline=None)
@given(
    z=st.floats(0.8, 20),
    rate=st.sampled_from([0.01, 0.2, 0.7, 1.0]),
    rounds=st.integers(1, 60),
    delta=st.sampled_from([1e-6, 1e-3]),
)
def test_pld_is_below_rdp(z, rate, rounds, delta):
    m = mechanism(z, sampling=Poisson(rate), delta=delta)
    assert spent(m, rounds, accountant="pld") <= spent(m, rounds) * (1 + 1e-3) + 1e-6


@settings(max_examples=12, deadline=None)
@given(
    target=st.floats(0.05, 20),
    sampling=st.sampled_from([Full(), Poisson(0.03), Poisson(0.5), FixedSize(30), FixedSize(3)]),
    rounds=st.integers(1, 200),
)
def test_calibrate_meets_the_target(target, sampling, rounds):
    noise = calibrate(target, clients=40, rounds=rounds, sampling=sampling)
    assert target * (1 - 1e-3) <= spent(mechanism(noise, sampling=sampling), rounds, clients=40) <= target * (1 + 1e-9)


def test_calibrate_by_pld_meets_the_target():
    noise = calibrate(0.3, clients=40, rounds=100, sampling=Poisson(0.01), accountant="pld")
    value = spent(mechanism(noise, sampling=Poisson(0.01)), 100, accountant="pld")
    assert 0.3 * (1 - 1e-3) <= value <= 0.3
    assert noise < calibrate(0.3, clients=40, rounds=100, sampling=Poisson(0.01))


# Arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epsilon": 0.0}, r"epsilon=0.0: give a finite number above 0"),
        ({"epsilon": math.inf}, r"epsilon=inf: give a finite number"),
        ({"delta": 1.0}, r"delta=1.0: give a number in \(0, 1\)"),
        ({"rounds": 0}, r"rounds=0: give a whole number of at least 1"),
        ({"clients": 0}, r"clients=0"),
        ({"sampling": FixedSize(9)}, r"size=9: give a whole number from 1 to 4"),
        ({"shape": [1.0, 0.0]}, r"shape=.* give 2 numbers above 0"),
    ],
)
def test_calibrate_checks_its_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        calibrate(**({"epsilon": 1.0, "clients": 4, "rounds": 2} | change))


def test_other_arguments_are_checked():
    m = mechanism(1.0)
    with pytest.raises(ValueError, match=r"participations=0"):
        calibrate_upload(1.0, participations=0)
    with pytest.raises(ValueError, match=r"delta=0.0"):
        epsilon(planned_ledger(m, 2, 2), m, delta=0.0)
    with pytest.raises(ValueError, match=r"clients=0"):
        planned_ledger(m, 0, 2)


def test_a_ledger_with_less_noise_than_it_states_is_refused():
    m = mechanism(1.0)
    record = planned_ledger(m, 2, 2)
    with pytest.raises(ValueError, match=r"server_noise=0.5 in round 1: .* below noise_multiplier=1.0"):
        epsilon(record._replace(server_noise=np.array([1.0, 0.5])), m)
