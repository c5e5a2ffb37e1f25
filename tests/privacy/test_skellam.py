"""Distributed Skellam noise: distribution, epsilon, sums and dropouts, compared with twins."""

import dataclasses
import fractions
import math
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
from algorithms_table import SIZES, small_clients, untrained
from test_mechanisms import sends

from jaxfl import simulate, sweep
from jaxfl.privacy import (
    Dropouts,
    FixedSize,
    Full,
    Mechanism,
    MinSeparation,
    Poisson,
    Skellam,
    calibrate,
    epsilon,
    planned_ledger,
    privacy_statement,
)
from jaxfl.privacy.accounting.accountants import rdp_epsilon
from jaxfl.privacy.noise import draw_skellam, skellam_tail, skellam_thresholds
from jaxfl.privacy.representation import Shared, SharedGrid, wrapped

BASE = {"clip": 0.5, "noise_multiplier": 2.0}


def log_masses(variance, last):
    """Return log P(X = k) for k from -last to last, by Bessel functions in 30 digits."""
    with mpmath.workdps(30):
        half = [float(mpmath.log(mpmath.besseli(k, variance)) - variance) for k in range(last + 1)]
    return np.array([*half[:0:-1], *half])


def exact_divergence(variance, shift, order):
    """Return the Rényi divergence of a shifted Skellam variable from the unshifted one."""
    last = 40 + int(20 * math.sqrt(variance)) + order * shift
    masses = log_masses(variance, last + shift)
    unmoved = masses[shift : len(masses) - shift]
    moved = masses[: len(unmoved)]
    return float(np.logaddexp.reduce(order * moved - (order - 1) * unmoved)) / (order - 1)


def exact_epsilon(variance, shift, delta):
    """Return the least epsilon of a Skellam variable against its shift, by privacy losses."""
    last = 40 + int(20 * math.sqrt(variance))
    masses = log_masses(variance, last + shift)
    unmoved, moved = masses[shift : len(masses) - shift], masses[: len(masses) - 2 * shift]
    losses = moved - unmoved

    def excess(value):
        above = losses > value
        return np.sum(np.exp(moved[above]) * -np.expm1(value - losses[above])) - delta

    found: Any = scipy.optimize.brentq(excess, 0.0, losses.max())
    return found


def gaussian_epsilon(z):
    """Return a Gaussian's epsilon by Rényi divergences of whole orders, as the theorem needs."""
    orders = np.arange(2, 400)
    return dp_accounting.rdp.compute_epsilon(orders.tolist(), (orders / (2 * z**2)).tolist(), 1e-5)[
        0
    ]


# Distribution


@pytest.mark.parametrize("variance", [fractions.Fraction(1, 3), fractions.Fraction(250)])
def test_thresholds_are_those_of_bessel_functions(variance):
    words = skellam_thresholds(variance).astype(object)
    found = [int((a << 63) | (b << 31) | (c >> 1)) for a, b, c in words.T]
    with mpmath.workdps(60):
        mu = mpmath.mpf(variance.numerator) / variance.denominator
        masses = [mpmath.besseli(k, mu) * mpmath.exp(-mu) for k in range(len(found) + 60)]
        assert masses[len(found)] * 2**95 < 1
        for k in (1, 2, len(found) // 3, len(found) - 1):
            exact = 2 * mpmath.fsum(masses[k:]) * 2**95
            assert abs(found[k] - exact) <= exact * 2**-50 + 2
        for k in (3, 20, 90):
            log_tail = float(mpmath.log(mpmath.fsum(masses[k:]) if k < len(masses) else 0.0))
            assert log_tail <= skellam_tail(k, float(variance))


@pytest.mark.parametrize("pair", [False, True])
def test_shares_are_skellam_and_so_are_their_sums(pair):
    variance, shares, count = fractions.Fraction(9, 4), 8, 50_000
    thresholds = jnp.asarray(skellam_thresholds(variance))
    keys = jax.random.split(jax.random.key(1), (shares, 2) if pair else shares)
    draws = np.stack([draw_skellam(key, thresholds, count) for key in keys])
    for values, mu in ((draws[0], 2.25), (draws.sum(axis=0), 18.0)):
        size = np.arange(-40, 41)
        expected = count * scipy.special.ive(np.abs(size), mu)
        seen = np.array([np.sum(values == k) for k in size])
        common = expected > 20
        expected = np.r_[expected[common], expected[~common].sum()]
        seen = np.r_[seen[common], count - seen[common].sum()]
        chi = np.sum((seen - expected) ** 2 / np.maximum(expected, 1e-3))
        assert scipy.stats.chi2.sf(chi, len(seen) - 1) > 1e-3
    assert abs(np.corrcoef(draws).ravel()[1]) < 4 / math.sqrt(count)


# Epsilon


@pytest.mark.parametrize("variance", [0.5, 5.0, 100.0])
def test_the_theorem_bounds_exact_divergences(variance):
    """The bound also holds for two coordinates, whose divergences add up."""
    for shift in (1, 2, 7):
        for order in (2, 5, 20):
            exact = exact_divergence(variance, shift, order)
            square = shift**2
            theorem = order * square / (2 * variance) + min(
                ((2 * order - 1) * square + 6 * shift) / (4 * variance**2),
                1.5 * shift / variance,
            )
            charged = square / variance * (order / 2 + min((2 * order + 5) / (4 * variance), 1.5))
            assert exact <= theorem * (1 + 1e-9) <= charged * (1 + 2e-9)
            one = exact_divergence(variance, 1, order)
            assert exact + one <= (square + 1) / square * charged


@pytest.mark.parametrize(("steps", "z"), [(16, 2.0), (40, 1.0), (40, 8.0)])
def test_a_rounds_epsilon_is_just_above_the_exact_one(steps, z):
    mechanism = Skellam(clip=1.0, noise_multiplier=z, steps=steps, sampling=FixedSize(10))
    stated = epsilon(planned_ledger(mechanism, 100, 1), mechanism)
    exact = exact_epsilon(float(steps**2), round(steps / z), 1e-5)
    assert stated.theorem == "distributed Skellam, zero-out; RDP"
    gaussian = rdp_epsilon(z, np.zeros(0), 1.0, 1e-5)
    assert exact < stated.value < 1.01 * gaussian
    # Conversion from Rényi divergences loses this much for a Gaussian too.
    loss = gaussian / dp_accounting.get_epsilon_gaussian(z, 1e-5)
    assert stated.value / exact < 1.02 * loss


def test_rounds_compose_like_the_librarys_divergences():
    """The epsilon is the paper's formula, added up over rounds with their own shares."""
    rounds, steps, z, delta = 6, 64, 2.0, 1e-6
    mechanism = Skellam(
        clip=1.0, noise_multiplier=z, steps=steps, dropout=0.25, sampling=FixedSize(40)
    )
    shares = np.array([30, 31, 35, 40, 33, 30])
    ledger = planned_ledger(mechanism, 100, rounds)
    ledger = ledger._replace(notes={"shares": shares.astype(np.float32)})
    orders = np.arange(2, 400)
    variance = shares[:, None] * steps**2 / 30
    length = steps / z
    by_round = orders * length**2 / (2 * variance) + np.minimum(
        ((2 * orders - 1) * length**2 + 6 * length**2) / (4 * variance**2),
        1.5 * length**2 / variance,
    )
    expected, _ = dp_accounting.rdp.compute_epsilon(
        orders.tolist(), by_round.sum(axis=0).tolist(), delta
    )
    stated = epsilon(ledger, mechanism, delta=delta, accountant="rdp").value
    assert stated == pytest.approx(expected, rel=1e-3)
    assert stated >= expected * (1 - 1e-4)


def test_noise_is_calibrated_for_the_shares_that_a_plan_counts_on():
    sampling = MinSeparation(100, separation=20)
    mechanism = Skellam(**BASE, sampling=sampling, dropout=0.2)
    z = calibrate(2.0, clients=2000, rounds=60, mechanism=mechanism)
    gaussian = calibrate(2.0, clients=2000, rounds=60, sampling=sampling, accountant="rdp")
    assert z == pytest.approx(gaussian, rel=2e-3)
    fitted = dataclasses.replace(mechanism, noise_multiplier=z)
    stated = epsilon(planned_ledger(fitted, 2000, 60), fitted).value
    assert 1.998 < stated <= 2.0


@pytest.mark.parametrize("sampling", [Poisson(0.1), FixedSize(10), Full()])
def test_sampling_amplifies_nothing(sampling):
    mechanism = Skellam(**BASE, sampling=sampling)
    stated = epsilon(planned_ledger(mechanism, 100, 5), mechanism).value
    whole = gaussian_epsilon(2 / math.sqrt(5))
    assert stated == pytest.approx(whole, rel=1e-3)
    assert stated >= whole * (1 - 1e-6)


def test_a_round_of_nobody_exposes_nobody():
    mechanism = Skellam(**BASE, sampling=Poisson(0.1))
    ledger = planned_ledger(mechanism, 20, 2)
    alone = ledger._replace(notes={"shares": np.array([2.0, 0.0])})
    one = planned_ledger(mechanism, 20, 1)
    assert epsilon(alone, mechanism).value == pytest.approx(epsilon(one, mechanism).value)


def test_other_observers_count_fewer_shares():
    mechanism = Skellam(**BASE, sampling=FixedSize(10))
    ledger = planned_ledger(mechanism, 10, 1)
    for observer, z in (("client", 2 * math.sqrt(0.9)), ("upload", 2 / math.sqrt(10) / 2)):
        stated = epsilon(ledger, mechanism, observer=observer).value
        assert stated == pytest.approx(gaussian_epsilon(z), rel=1e-3)


# Sums


def test_sums_are_modular_and_lie_on_the_grid():
    assert wrapped(jnp.array([5, 127, 128, -129, 300]), 8).tolist() == [5, 127, -128, 127, 44]
    assert wrapped(jnp.array([2**31 - 1, -5]), 32).tolist() == [2**31 - 1, -5]
    size = 300
    mechanism = Skellam(**BASE, steps=256, bits=20)
    update = lambda i: jnp.sin(jnp.arange(size, dtype=jnp.float32) + i) * 0.02  # noqa: E731
    aggregates, memory, records = sends(update, mechanism, rounds=2)
    step = 2.0 * 0.5 / 256
    sums = aggregates * len(SIZES) / step
    np.testing.assert_allclose(sums, np.round(sums), atol=1e-3)
    exact = sum(np.round(np.asarray(update(i)) / step) for i in range(len(SIZES)))
    noise = np.round(sums) - exact
    assert noise.std() == pytest.approx(256, rel=4 / math.sqrt(2 * noise.size))
    assert abs(np.corrcoef(noise)[0, 1]) < 4 / math.sqrt(size)
    np.testing.assert_array_equal(records.ledger.notes["shares"], len(SIZES))
    np.testing.assert_allclose(records.ledger.client_noise, 2 / math.sqrt(len(SIZES)), rtol=1e-6)
    assert memory.least == len(SIZES)


@pytest.mark.parametrize("value", [0.6, 0.5, 1.49])
def test_no_rounding_lengthens_an_update(value):
    """If all coordinates end in .6, rounding to the nearest step would double the norm."""
    numbers = SharedGrid(2.0, 64)
    size, radius = 700, 32.0
    direction = jnp.full(size, value)
    norm = jnp.linalg.norm(direction)
    made = Shared(direction, jnp.zeros(size, jnp.int32))
    for length in (norm, jnp.float32(radius)):
        scaled = jax.tree.map(lambda leaf, f=length / norm: leaf * f, made.update)
        whole = numbers.in_units(made._replace(update=scaled), length, radius, jnp.float32(1.0))
        assert np.sum(np.asarray(whole, np.int64) ** 2) <= radius**2
    padding = numbers.in_units(made._replace(share=made.share + 3), norm, radius, jnp.float32(0.0))
    assert not np.any(padding)


def test_a_ledger_of_other_noise_is_named():
    ledger = planned_ledger(Mechanism(clip=1.0, noise_multiplier=1.0), 100, 3)
    skellam = Skellam(clip=1.0, noise_multiplier=1.0, steps=512, bits=20)
    with pytest.raises(ValueError, match=r"ledger must have the note 'shares' .* got notes \[\]"):
        epsilon(ledger, skellam)


def test_the_modulus_must_hold_the_largest_sum():
    deployment = {"noise_multiplier": 2.0, "clip": 1.0, "steps": 512, "sampling": FixedSize(1000)}
    # 1000 updates of 256 steps each, and noise of 512 steps, need 256,000 and some times 512.
    fits = Skellam(**deployment, bits=19)
    fits.init(jax.random.key(0), dict, 10_000)
    (line,) = [
        text
        for text in fits.describe(planned_ledger(fits, 10_000, 1))
        if "wraps with a probability" in text
    ]
    assert "256 steps (L2) and 65536 (L1)" in line
    with pytest.raises(ValueError, match=r"bits must hold sums of 1000 .* got 18.*Give bits=19"):
        Skellam(**deployment, bits=18).init(jax.random.key(0), dict, 10_000)
    many = dataclasses.replace(fits, sampling=Poisson(0.001), bits=32)
    with pytest.raises(ValueError, match="Give fewer steps"):
        many.init(jax.random.key(0), dict, 10**7)


# Dropouts


def test_a_fifth_that_drops_out_has_the_epsilon_that_is_true():
    margin = Skellam(**BASE, sampling=Dropouts(Full(), 0.8), dropout=0.2)
    update = lambda i: jnp.zeros(2000)  # noqa: E731
    aggregates, _, records = sends(update, margin, rounds=6)
    ledger = jax.tree.map(np.asarray, records.ledger)
    shares = ledger.participants.sum(axis=1)
    np.testing.assert_array_equal(ledger.notes["shares"], shares)
    assert 4 < shares.mean() < len(SIZES)
    # 11 clients less a fifth are 8.8, so 9 shares have the noise of two clip bounds.
    assert margin.fewest_shares(len(SIZES)) == 9
    for noise, count in zip(aggregates * 0.8 * len(SIZES), shares):
        expected = 2.0 * 0.5 * math.sqrt(count / 9)
        assert noise.std() == pytest.approx(expected, rel=4 / math.sqrt(2 * noise.size))
    true = epsilon(ledger, margin).value
    multiplier = (np.sum(9 / (4 * shares))) ** -0.5
    assert true == pytest.approx(gaussian_epsilon(multiplier), rel=1e-3)
    planned = epsilon(planned_ledger(margin, len(SIZES), 6), margin).value
    assert (true > planned) == (np.mean(9 / shares) > 1)
    without_margin = dataclasses.replace(margin, dropout=0.0)
    lost = epsilon(ledger._replace(notes={"shares": np.full(6, 9.0)}), without_margin).value
    kept = epsilon(ledger._replace(notes={"shares": np.full(6, 9.0)}), margin).value
    assert lost > 1.1 * kept == pytest.approx(1.1 * planned, rel=1e-3)


def test_a_statement_says_how_many_shares_there_were():
    mechanism = Skellam(**BASE, sampling=Dropouts(FixedSize(10), 0.9), dropout=0.2)
    statement = privacy_statement(planned_ledger(mechanism, 50, 3), mechanism, 50)
    text = " ".join(statement["details"])
    assert "8 shares have the noise multiplier; rounds had 8 to 8 shares" in text
    assert "modulo 2^32" in text
    assert statement["sampling"]["availability"] == "of whom 90% return"
    assert {"independent_dropouts", "honest_clients"} <= statement["assumed"].keys()


# Runs


def test_noise_and_clip_are_swept_and_dropout_is_not():
    clients = small_clients()

    def build(clip, z):
        return untrained(Skellam(clip=clip, noise_multiplier=z, dropout=0.2))

    options = {"rounds": 2, "progress": False}
    runs = sweep(
        0, build, {"clip": [0.1, 0.2], "z": [1.0, 4.0]}, clients, paired_noise=True, **options
    )
    alone = simulate(0, build(0.2, 4.0), clients, **options)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        runs[1].server,
        alone.server,
    )
    stated = [run.statement["honest"]["aggregate"]["epsilon"] for run in runs]
    assert stated[1] == pytest.approx(alone.statement["honest"]["aggregate"]["epsilon"])
    assert stated[0] > stated[1]
    with pytest.raises(ValueError, match="sampling and dropout must be the same for all points"):
        sweep(
            0,
            lambda dropout: untrained(Skellam(**BASE, dropout=dropout)),
            {"dropout": [0.1, 0.2]},
            clients,
            **options,
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"noise": "float"}, "noise must be 'grid'"),
        ({"client_noise": 1.0}, "client_noise 0"),
        ({"weights": np.ones(3)}, "weights None"),
        ({"noise_multiplier": (1.0, 0.0)}, "noise_multiplier must be above 0 in every round"),
        ({"steps": 2**15 + 1}, "steps must be"),
        ({"bits": 33}, "bits must be"),
        ({"dropout": 1.0}, "dropout must be"),
    ],
)
def test_what_is_no_distributed_noise_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Skellam(**BASE | wrong)


def test_a_step_longer_than_most_coordinates_is_refused():
    coarse = Skellam(**BASE, steps=16)
    with pytest.raises(ValueError, match="or more `steps`"):
        sends(lambda i: jnp.zeros(1000), coarse, rounds=1)
