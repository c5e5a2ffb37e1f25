"""Limits of participation, compared with all schedules of a client and with closed forms."""

import functools
import itertools
import math
import tracemalloc

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    get_epsilon_gaussian,
    get_sigma_gaussian,
)
from dp_accounting.pld import PLDAccountant

from jaxfl.privacy import (
    AdaptiveClip,
    BallsInBins,
    BandedNoise,
    BLTNoise,
    CyclicPoisson,
    FixedSize,
    Full,
    Mechanism,
    MinSeparation,
    Poisson,
    calibrate,
    epsilon,
    plan,
    planned_ledger,
)
from jaxfl.privacy.accounting import accountants
from jaxfl.privacy.accounting.calibration import planned_exposure
from jaxfl.privacy.mechanisms.correlated import CorrelatedNoise, prefix_error, worst_exposure
from jaxfl.privacy.sampling import Turns

BANDED = functools.partial(BandedNoise, clip=1.0, noise_multiplier=3.0)
WIDE = (0.3, 0.05, 0.2, 0.02, 0.15, 0.1, 0.05, 0.08, 0.02)


def schedules(rounds, most, gap):
    """Yield each list of 1 to `most` rounds whose distances are at least `gap`."""
    for number in range(1, most + 1):
        for chosen in itertools.combinations(range(rounds), number):
            if all(later - earlier >= gap for earlier, later in itertools.pairwise(chosen)):
                yield list(chosen)


def toeplitz(coefficients, rounds):
    padded = np.r_[coefficients, np.zeros(rounds)]
    return np.sum([padded[k] * np.eye(rounds, k=-k) for k in range(rounds)], axis=0)


@pytest.mark.parametrize("seed", range(8))
def test_limits_charge_a_strategy_for_the_worst_of_all_schedules(seed):
    """The charge is exact for at most b bands or falling coefficients, and otherwise a bound."""
    rng = np.random.default_rng(seed)
    rounds, most, gap = int(rng.integers(3, 10)), int(rng.integers(1, 5)), int(rng.integers(1, 5))
    turns = Turns(1, rounds, gap, most)
    narrow = np.r_[1.0, rng.random(gap - 1)]
    falling = np.sort(rng.random(rounds))[::-1]
    for strategy, exact in ((narrow, True), (falling, True), (rng.random(rounds), False)):
        matrix = toeplitz(strategy, rounds)
        worst = max(
            np.linalg.norm(matrix[:, chosen].sum(axis=1)) for chosen in schedules(rounds, most, gap)
        )
        found = worst_exposure(np.r_[strategy, np.zeros(rounds)], turns)
        assert found >= worst * (1 - 1e-12)
        assert not exact or found == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_limits_charge_independent_noise_for_the_worst_of_all_schedules(seed):
    """The charge is at least the largest sum of inverse squares, and equal for equal noise."""
    rng = np.random.default_rng(seed)
    rounds, most, gap = 9, int(rng.integers(1, 4)), int(rng.integers(1, 4))
    limits = {"participations": most, "separation": gap}
    for noise in (tuple(rng.uniform(1, 3, rounds)), (2.0,) * rounds):
        mechanism = Mechanism(clip=1.0, noise_multiplier=noise)
        view, repeats = planned_exposure(mechanism, 5, rounds, **limits)
        spent = repeats * np.sum(view.multiplier**-2.0)
        inverse = np.array(noise) ** -2.0
        worst = max(inverse[chosen].sum() for chosen in schedules(rounds, most, gap))
        assert spent >= worst * (1 - 1e-12)
        if len(set(noise)) == 1:
            assert spent == pytest.approx(worst)
            alike = planned_exposure(Mechanism(clip=1.0, noise_multiplier=2.0), 5, rounds, **limits)
            assert alike.epsilons(5, 1e-5)["pld"].value == pytest.approx(
                get_epsilon_gaussian(worst**-0.5, 1e-5)
            )


def test_a_server_that_limits_participations_needs_the_square_root_of_their_number():
    """For at most b bands it is one Gaussian of z / (sqrt(k) |c|), for any sampler and any T."""
    limits = {"participations": 12, "separation": 8}
    norm = math.sqrt(1 + 0.5**2 + 0.25**2)
    for sampling in (
        Full(),
        Poisson(0.3),
        FixedSize(5),
        MinSeparation(5, separation=4),
        BallsInBins(3),
    ):
        banded = BandedNoise(clip=1.0, bands=3, coefficients=(0.5, 0.25), sampling=sampling)
        for mechanism, length in ((banded, norm), (Mechanism(clip=1.0, sampling=sampling), 1.0)):
            z = calibrate(2.0, clients=50, rounds=1000, delta=1e-6, mechanism=mechanism, **limits)
            assert 1.998 < get_epsilon_gaussian(z / (math.sqrt(12) * length), 1e-6) <= 2.0


def test_limits_that_the_sampler_keeps_anyway_change_nothing():
    options = {"clients": 100, "rounds": 40}
    for sampling in (Poisson(0.2), MinSeparation(5, separation=8)):
        kept = {"participations": 40, "separation": 1}
        assert calibrate(2.0, sampling=sampling, **options) == calibrate(
            2.0, sampling=sampling, **options, **kept
        )


def mechanisms():
    for sampling in (
        Poisson(0.2), Full(), FixedSize(7), CyclicPoisson(0.05, 7), CyclicPoisson(0.125, 8), MinSeparation(3, separation=7),
        BallsInBins(6),
    ):  # fmt: skip
        yield Mechanism(clip=1.0, noise_multiplier=3.0, sampling=sampling)
        yield BANDED(bands=5, sampling=sampling)
        yield BANDED(bands=10, coefficients=WIDE, sampling=sampling)
        yield BLTNoise(
            clip=1.0, noise_multiplier=3.0, scales=(0.4, 0.1), decays=(0.5, 0.9), sampling=sampling
        )
    yield AdaptiveClip(clip=1.0, noise_multiplier=3.0, sampling=Poisson(0.2))
    yield Mechanism(
        clip=1.0,
        noise_multiplier=tuple(np.linspace(2, 4, 30)),
        sampling=MinSeparation(3, separation=7),
    )


@pytest.mark.parametrize("rounds", [4, 30])
def test_plans_agree_with_the_ledger_of_all_clients(rounds):
    for mechanism in mechanisms():
        if len(mechanism.noise_multiplier_table) not in (1, rounds):
            continue
        ledger = planned_ledger(mechanism, 60, rounds)
        assert isinstance(ledger.participants, np.ndarray)
        found = planned_exposure(mechanism, 60, rounds).epsilons(60, 1e-5)
        for accountant, bound in found.items():
            stated = epsilon(ledger, mechanism, accountant=accountant, delta=1e-5).value
            if accountant == "pld":
                bound = min(found.values(), key=lambda each: each.value)
            assert bound.value == pytest.approx(stated, rel=1e-9)


def test_ten_times_the_clients_in_ten_times_the_cohort_have_the_same_plan():
    kinds = ("poisson", "balls in bins", "banded", "separated")
    one, ten = (
        plan(
            clients=100 * times,
            cohort=10 * times,
            rounds=25,
            noise_multiplier=3.0,
            delta=1e-6,
            kinds=kinds,
        )
        for times in (1, 10)
    )
    for each, larger in zip(one, ten, strict=True):
        assert (each.kind, each.pld.value, each.rdp.value) == (
            larger.kind,
            larger.pld.value,
            larger.rdp.value,
        )
        assert each.error == pytest.approx(10 * larger.error)
    for sampling in (MinSeparation(2, separation=7), CyclicPoisson(0.02, 7), Poisson(0.1)):
        options = {"rounds": 45, "delta": 1e-6, "sampling": sampling}
        assert calibrate(2.0, clients=100, **options) == calibrate(2.0, clients=1000, **options)


def test_a_plan_for_millions_of_clients_takes_no_table_of_them():
    sampling = MinSeparation(5000, separation=24)
    mechanism = BandedNoise(clip=1.0, bands=24, sampling=sampling)
    tracemalloc.start()
    z = calibrate(2.0, clients=3_000_000, rounds=2000, delta=1e-8, mechanism=mechanism)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6
    # 84 participations, of which the last is cut short after 8 of the 24 rounds.
    square = np.cumprod(np.r_[1.0, [(2 * k - 1) / (2 * k) for k in range(1, 24)]]) ** 2
    length = math.sqrt(83 * square.sum() + square[:8].sum())
    assert 1.998 < get_epsilon_gaussian(z / length, 1e-8) <= 2.0


def test_billions_of_rounds_end_in_a_result_or_name_the_rounds():
    options = {"clients": 1000, "rounds": 10**9, "delta": 1e-6}
    z = calibrate(2.0, **options)
    assert 1.998 < get_epsilon_gaussian(z / math.sqrt(10**9), 1e-6) <= 2.0
    turns = calibrate(2.0, sampling=MinSeparation(5, separation=100), **options)
    assert turns == pytest.approx(z / 10, rel=1e-3)
    # Between the central limit, z sqrt(T) q, and RDP's usual excess over it.
    assert 1 < calibrate(2.0, sampling=Poisson(0.01), **options) / (z / 100) < 1.1
    mechanism = Mechanism(clip=1.0, noise_multiplier=z / 90, sampling=Poisson(0.01))
    assert (
        planned_exposure(mechanism, 1000, 10**9).epsilons(1000, 1e-6)["pld"].theorem.endswith("RDP")
    )
    with pytest.raises(ValueError, match="rounds must be at most 10000000 with correlated noise"):
        calibrate(2.0, mechanism=BandedNoise(clip=1.0, bands=4), **options)


def test_a_million_sampled_rounds_need_the_noise_of_the_central_limit():
    """If q sqrt(T) = 1, the limit is a Gaussian of multiplier s with s^-2 = exp(1 / z^2) - 1."""
    z = calibrate(2.0, clients=10**5, rounds=10**6, sampling=Poisson(1e-3), delta=1e-6)
    assert 1 < z / math.log1p(get_sigma_gaussian(2.0, 1e-6) ** -2.0) ** -0.5 < 1.002


@pytest.mark.parametrize(
    ("target", "rate", "rounds"), [(0.5, 0.3, 20), (8.0, 0.2, 30), (3.0, 0.02, 300)]
)
def test_sampled_noise_is_found_with_few_evaluations(monkeypatch, target, rate, rounds):
    """The result is within 0.1% of the target, and most evaluations are on wide grids."""
    grids = []
    evaluate = accountants._pld_epsilon
    monkeypatch.setattr(
        accountants, "_pld_epsilon", lambda *given: grids.append(given[-1]) or evaluate(*given)
    )
    z = calibrate(target, clients=200, rounds=rounds, sampling=Poisson(rate))
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, 2e-4)
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), rounds)
    assert target * 0.999 < accountant.get_epsilon(1e-5) < target * (1 + 2e-4)
    assert grids.count(1.0) <= 2


@pytest.mark.parametrize(("target", "delta"), [(0.01, 1e-5), (0.1, 1e-8)])
def test_budgets_that_few_orders_cannot_prove_are_spent(target, delta):
    """The first guess is the central limit, which is near. The test has a finer grid."""
    z = calibrate(target, clients=200, rounds=100, sampling=Poisson(0.1), delta=delta)
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, 0.01 * 0.1 / z)
    accountant.compose(PoissonSampledDpEvent(0.1, GaussianDpEvent(z)), 100)
    assert target * 0.998 < accountant.get_epsilon(delta) < target


@pytest.mark.parametrize("budget", [1e308, 1e-300, 1e6])
def test_budgets_beyond_floating_point_are_refused_by_name(budget):
    with pytest.raises(ValueError, match="epsilon must be from 1e-08 to 100000"):
        calibrate(budget, clients=10, rounds=10)
    with pytest.raises(ValueError, match="epsilon must be from"):
        plan(clients=10, cohort=1, rounds=10, epsilon=budget)


def test_noise_that_protects_nobody_has_a_plan():
    """Exponentials of the privacy losses overflow, so Rényi divergences give the epsilon.

    A divergence of order a is at most a / (2 z^2) for each round. The bound here has a = 2, and
    adds 1% for delta.
    """
    (found,) = plan(clients=100, cohort=10, rounds=10, noise_multiplier=1e-9, kinds=("poisson",))
    assert 1e17 < found.epsilon <= 10 * 2 / (2 * 1e-18) * 1.01


def test_limited_plans_compare_what_needs_no_coins():
    found = plan(
        clients=10_000,
        cohort=100,
        rounds=60,
        epsilon=2.0,
        delta=1e-6,
        participations=3,
        separation=10,
    )
    by_kind = {each.kind: each for each in found}
    independent = by_kind.pop("any cohort")
    assert set(by_kind) == {"separated", "blt"}
    spent = get_epsilon_gaussian(independent.noise_multiplier / math.sqrt(3), 1e-6)
    assert spent == pytest.approx(independent.epsilon, rel=1e-6)
    for each in by_kind.values():
        assert 1.998 < each.epsilon <= 2.0
        assert (each.participations, each.separation) == (3, 10)
        assert isinstance(each.mechanism, CorrelatedNoise)
        strategy = each.mechanism.strategy(60)
        matrix = toeplitz(strategy, 60)
        exposed = float(np.linalg.norm(matrix[:, [0, 10, 20]].sum(axis=1)))
        assert get_epsilon_gaussian(each.noise_multiplier / exposed, 1e-6) == pytest.approx(
            each.epsilon, rel=1e-6
        )
        assert each.error == pytest.approx(each.noise_multiplier / 100 * prefix_error(strategy))
    often = plan(
        clients=10_000,
        cohort=100,
        rounds=60,
        epsilon=2.0,
        delta=1e-6,
        kinds=("separated",),
        separation=10,
    )
    assert by_kind["separated"].error < often[0].error
    with pytest.raises(ValueError, match="separation must be at most 100"):
        plan(clients=10_000, cohort=100, rounds=60, epsilon=2.0, separation=101)
    with pytest.raises(ValueError, match="under participations=3"):
        plan(
            clients=10_000, cohort=100, rounds=60, epsilon=2.0, participations=3, kinds=("poisson",)
        )


def test_turns_are_the_samplers_table():
    for sampling in (MinSeparation(2, separation=5), CyclicPoisson(0.1, 4)):
        turns = sampling.turns(23, 17)
        np.testing.assert_array_equal(np.asarray(turns), sampling.possible(23, 17))
        assert turns.most == sampling.possible(23, 17).sum(axis=0).max()
    with pytest.raises(ValueError, match="participations and separation must be None"):
        np.asarray(Turns(5, 10, 2, 3))


def test_a_cohort_that_no_group_holds_is_refused_with_the_reason():
    with pytest.raises(
        ValueError, match="at most 2083, the clients in each of 144 groups of 300000 clients"
    ):
        MinSeparation(5000, separation=144).expected(300_000)
