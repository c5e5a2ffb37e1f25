"""Mechanisms with a memory, or with each participant's own update, for any algorithm."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, MECHANISMS, MODEL, SIZES, small_clients
from dp_accounting import get_epsilon_gaussian

from jaxfl import simulate, sweep
from jaxfl.algorithms import fedavg
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.privacy import (
    AdaptiveClip,
    BandedNoise,
    BLTNoise,
    CyclicPoisson,
    Extrapolated,
    Full,
    Krum,
    Mechanism,
    Median,
    MinSeparation,
    Poisson,
    PrivacyFilter,
    TrimmedMean,
    blt,
    calibrate,
    epsilon,
    planned_ledger,
)
from jaxfl.privacy.accounting.ledgers import running_epsilon
from jaxfl.privacy.mechanisms.correlated import exposures, prefix_error, rounding_error, square_root
from jaxfl.privacy.mechanisms.gaussian import Participant
from jaxfl.privacy.mechanisms.private_mask import PrivateMask
from jaxfl.types import Message

KEY = jax.random.key(2)
RUN: dict[str, Any] = {"rounds": 3, "eval_every": 3, "progress": False}
ROBUST = ("median", "trimmed mean", "krum")


def sends(update, mechanism, rounds, clients=None, devices=1):
    """Return the aggregates if client i sends the vector `update(i)`, the memory, and records."""
    base = fedavg(MODEL, mechanism=mechanism)
    shape = jax.eval_shape(update, jnp.int32(0))
    algorithm = base._replace(
        init=lambda key, number: (jnp.zeros((rounds, *shape.shape)), ()),
        client_update=lambda key, server, client, data: (Message(update(data.id)), client, {}),
        server_update=lambda server, aggregate: jnp.concatenate([server[1:], aggregate[None]]),
    )
    population = place(clients or small_clients(), jax.devices()[:devices])
    step = compile_rounds(algorithm, population, chunk=1, segment=rounds)
    center, _, records = jax.device_get(
        step(KEY, 0, rounds, *initialize(KEY, KEY, algorithm, population))
    )
    return center.server, center.memory, records


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dp_fedavg", "centaur", "feddpa"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_any_algorithm_on_both_stores(name, method):
    algorithm = ALGORITHMS[method]()._replace(mechanism=MECHANISMS[name])
    device, host = (
        simulate(KEY, algorithm, small_clients(), states=store, **RUN)
        for store in ("device", "host")
    )
    left = [(run.server, run.memory, run.scores, run.ledger) for run in (device, host)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *left)
    assert (device.statement["honest"]["aggregate"]["epsilon"] == "inf") == (name in ROBUST)


@pytest.mark.slow
def test_a_memory_is_swept_and_checkpointed(tmp_path):
    def build(clip, quantile):
        return fedavg(
            MODEL,
            mechanism=AdaptiveClip(
                clip=clip, noise_multiplier=1.0, quantile=quantile, bit_noise=2.0
            ),
        )

    runs = sweep(
        KEY,
        build,
        {"clip": [0.1, 0.3], "quantile": [0.5, 0.9]},
        small_clients(),
        paired_noise=True,
        **RUN,
    )
    alone = simulate(KEY, build(0.3, 0.9), small_clients(), folder=tmp_path, **RUN)
    bounds = [float(run.memory.clip) for run in (*runs, alone)]
    assert bounds[0] != bounds[1] == pytest.approx(bounds[2], rel=1e-5)
    read = simulate(KEY, build(0.3, 0.9), small_clients(), folder=tmp_path, **RUN)
    assert (read.restored, read.memory) == (3, alone.memory)
    np.testing.assert_allclose(alone.ledger.notes["clip"][0], 0.3, rtol=1e-6)


def test_a_clip_bound_finds_its_quantile():
    """Of norms 0.1 to 1.1, three quarters are below 0.85, up to one client of eleven."""
    direction = jnp.ones(50) / math.sqrt(50)
    mechanism = AdaptiveClip(clip=5.0, noise_multiplier=0.01, quantile=0.75, bit_noise=0.05)
    _, memory, records = sends(lambda i: 0.1 * (i + 1) * direction, mechanism, rounds=60)
    assert memory.clip == pytest.approx(0.85, abs=0.1)
    bounds = records.ledger.notes["clip"]
    np.testing.assert_allclose(bounds[1] / bounds[0], math.exp(-0.2 * (1 - 0.75)), rtol=0.01)


def test_update_and_bit_share_one_gaussian():
    """At z = 1 and sigma_b = 5 the update gets 1.00504, and the ledger charges 1."""
    mechanism = AdaptiveClip(clip=2.0, noise_multiplier=1.0, bit_noise=5.0, rate=0.0)
    aggregates, memory, records = sends(lambda i: jnp.zeros(20_000), mechanism, rounds=2)
    assert float(memory.scale) * 5 == pytest.approx(1.00504, abs=5e-6)
    assert aggregates.std() * len(SIZES) == pytest.approx(
        2 * 1.00504, rel=4 / math.sqrt(2 * aggregates.size)
    )
    plain = Mechanism(clip=2.0, noise_multiplier=1.0)
    for m in (mechanism, plain):
        stated = epsilon(jax.tree.map(np.asarray, records.ledger), m).value
        assert stated == pytest.approx(get_epsilon_gaussian(1 / math.sqrt(2), 1e-5), rel=1e-6)
    with pytest.raises(ValueError, match="the bits alone cost more"):
        AdaptiveClip(clip=1.0, noise_multiplier=2.0, bit_noise=1.0).init(KEY, dict, 10)
    few = AdaptiveClip(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"bit_noise must be above 0\.5, .* got 0\.5"):
        few.describe(planned_ledger(few, 10, 3))


def test_banded_noise_has_the_covariance_of_its_factorisation():
    """The noise is C^-1 xi, so its covariance over rounds is the inverse of C^T C."""
    bands, rounds, size = 3, 5, 40_000
    mechanism = BandedNoise(clip=0.5, noise_multiplier=2.0, bands=bands)
    aggregates, _, records = sends(lambda i: jnp.zeros(size), mechanism, rounds)
    noise = aggregates * len(SIZES) / (2.0 * 0.5)
    strategy = np.sum([c * np.eye(rounds, k=-k) for k, c in enumerate(square_root(bands))], axis=0)
    inverse = np.linalg.inv(strategy)
    np.testing.assert_allclose(np.cov(noise), inverse @ inverse.T, atol=5 * 1.5 / math.sqrt(size))
    # Of updates of bounded norm, equal ones move C x the most.
    exposure = float(np.linalg.norm(strategy.sum(axis=1)))
    signs = np.array(np.meshgrid(*[[-1, 1]] * rounds)).reshape(rounds, -1)
    assert np.linalg.norm(strategy @ signs, axis=0).max() == pytest.approx(exposure)
    stated = epsilon(jax.tree.map(np.asarray, records.ledger), mechanism)
    assert stated.value == pytest.approx(get_epsilon_gaussian(2.0 / exposure, 1e-5), rel=1e-6)
    running = running_epsilon(mechanism, len(SIZES))
    for done in (1, rounds):
        part = jax.tree.map(lambda leaf, done=done: np.asarray(leaf)[:done], records.ledger)
        assert running(done).rdp == pytest.approx(
            epsilon(part, mechanism, accountant="rdp").value, rel=1e-6
        )
    one_band = BandedNoise(clip=0.5, noise_multiplier=2.0, bands=1)
    plan = planned_ledger(one_band, 4, 5)
    assert (
        epsilon(plan, one_band).value
        == epsilon(plan, Mechanism(clip=0.5, noise_multiplier=2.0)).value
    )


def in_single_precision(coefficients, rounds):
    """Return the root mean square by which float32 changes the last round's fresh noise."""
    fresh = np.random.default_rng(0).standard_normal((rounds, 4000)).astype(np.float32)
    noise = np.zeros_like(fresh)
    for t in range(rounds):
        noise[t] = fresh[t]
        for k, factor in enumerate(np.asarray(coefficients, np.float32)[:t], start=1):
            noise[t] -= factor * noise[t - k]
    exact = [1.0, *coefficients]
    again = sum(exact[k] * np.float64(noise[-1 - k]) for k in range(min(len(exact), rounds)))
    return math.sqrt(np.mean((again - fresh[-1]) ** 2))


@pytest.mark.parametrize(
    ("coefficients", "rounds"), [((0.9, 0.0, 1.5), 20), ((2.0,), 15), ((1.0,), 200)]
)
def test_the_rounding_of_correlated_noise_is_bounded(coefficients, rounds):
    found = in_single_precision(coefficients, rounds)
    bound = rounding_error(np.pad([1.0, *coefficients], (0, rounds))[:rounds], rounds)
    assert found <= bound <= 20 * found


def test_noise_that_single_precision_cannot_hold_is_refused():
    exploding = BandedNoise(clip=1.0, noise_multiplier=1.0, bands=4, coefficients=(0.9, 0.0, 1.5))
    exploding.check_fits(11, 10)  # a few rounds move it by 7e-6
    with pytest.raises(
        ValueError, match=r"coefficients=\(0.9, 0.0, 1.5\): the strategy's inverse grows"
    ):
        exploding.check_fits(11, 40)
    with pytest.raises(ValueError, match="float32 holds over 40 rounds"):
        simulate(
            KEY, fedavg(MODEL, mechanism=exploding), small_clients(), rounds=40, progress=False
        )
    slowly = BandedNoise(clip=1.0, noise_multiplier=1.0, bands=2, coefficients=(1.001,))
    slowly.check_fits(11, 1000)
    with pytest.raises(ValueError, match="100000 rounds"):
        slowly.check_fits(11, 100_000)
    with pytest.raises(ValueError, match=r"scales=\(3.0,\), decays=\(0.9,\)"):
        BLTNoise(clip=1.0, noise_multiplier=1.0, scales=(3.0,), decays=(0.9,)).check_fits(11, 100)


def test_strategies_of_the_papers_hold_for_any_number_of_rounds():
    plain = {"clip": 1.0, "noise_multiplier": 1.0}
    banded = [BandedNoise(**plain, bands=bands) for bands in (1, 2, 8, 144, 3000)]
    prefixes = BandedNoise(**plain, bands=4, coefficients=(1.0, 1.0, 1.0))
    numbers = blt(2, 200, separation=20)
    buffered = BLTNoise(**plain, scales=numbers.scales, decays=numbers.decays)
    for mechanism in (*banded, prefixes, buffered):
        for rounds in (1, 2, 3, 1000, 5000, 100_000):
            mechanism.check_fits(11, rounds)


def test_a_client_that_never_takes_part_reveals_nothing_of_correlated_sums():
    participants = np.array([[True, False]] * 3)
    for noise, worst in ((0.0, math.inf), (2.0, None)):
        mechanism = BandedNoise(clip=1.0, noise_multiplier=noise, bands=2)
        ledger = planned_ledger(mechanism, 2, 3)._replace(participants=participants)
        found = epsilon(ledger, mechanism)
        assert found.per_client[1] == 0
        assert found.value == found.per_client[0] == (worst or found.value) > 0


def test_correlated_noise_is_charged_for_the_rounds_of_each_client():
    """The charge is compared with the norm of S x over all signs of x, for drawn cohorts."""
    rng = np.random.default_rng(0)
    present = rng.random((6, 9)) < 0.4
    present[:, 4] = False
    for mechanism in (
        BandedNoise(clip=1.0, noise_multiplier=3.0, bands=3),
        BLTNoise(clip=1.0, noise_multiplier=3.0),
    ):
        strategy = mechanism.strategy(6)
        matrix = np.sum([c * np.eye(6, k=-k) for k, c in enumerate(strategy)], axis=0)
        signs = np.array(np.meshgrid(*[[-1, 1]] * 6)).reshape(6, -1)
        moved = np.array(
            [
                np.linalg.norm(matrix @ (signs * column[:, None]), axis=0).max()
                for column in present.T
            ]
        )
        np.testing.assert_allclose(exposures(strategy, present), moved, rtol=1e-9, atol=1e-12)
        ledger = planned_ledger(mechanism, 9, 6)._replace(participants=present)
        stated = epsilon(ledger, mechanism).per_client
        gone = moved == 0
        assert gone.any()
        np.testing.assert_array_equal(stated[gone], 0)
        expected = [get_epsilon_gaussian(3.0 / m, 1e-5) for m in moved[~gone]]
        np.testing.assert_allclose(stated[~gone], expected, rtol=1e-6)
        error = np.linalg.norm(np.tril(np.ones((6, 6))) @ np.linalg.inv(matrix)) / math.sqrt(6)
        assert prefix_error(strategy) == pytest.approx(error)


def test_separation_costs_the_square_root_of_the_rounds():
    """Rounds at a distance of b cost z / (sqrt(k) |c|), for any sampler of a fixed size."""
    mechanism = BandedNoise(
        clip=1.0, noise_multiplier=4.0, bands=5, sampling=MinSeparation(2, separation=5)
    )
    norm = np.linalg.norm(square_root(5))
    stated = epsilon(planned_ledger(mechanism, 20, 15), mechanism).value
    last = float(np.linalg.norm(np.tile(square_root(5), 3)))
    assert last == pytest.approx(math.sqrt(3) * norm)
    assert stated == pytest.approx(get_epsilon_gaussian(4.0 / last, 1e-5), rel=1e-6)


def test_cyclic_poisson_amplifies_bands():
    """A client's turns are Poisson-sampled Gaussians with the multiplier z / |c|."""
    sampling, norm = CyclicPoisson(0.01, 4), float(np.linalg.norm(square_root(4)))
    banded = BandedNoise(clip=1.0, noise_multiplier=2.0 * norm, bands=4, sampling=sampling)
    turns = Mechanism(clip=1.0, noise_multiplier=2.0, sampling=Poisson(0.04))
    for accountant in ("pld", "rdp"):
        alike = [
            epsilon(planned_ledger(m, 100, r), m, accountant=accountant).value
            for m, r in ((banded, 40), (turns, 10))
        ]
        assert alike[0] == pytest.approx(alike[1], rel=1e-6)
    wide = BandedNoise(clip=1.0, noise_multiplier=2.0, bands=5, sampling=sampling)
    assert (
        "matrix factorisation" in epsilon(planned_ledger(wide, 100, 40), wide).theorem
    )  # not amplified
    z = calibrate(1.5, clients=100, rounds=40, mechanism=banded)
    reached = BandedNoise(clip=1.0, noise_multiplier=z, bands=4, sampling=sampling)
    assert 1.498 < epsilon(planned_ledger(reached, 100, 40), reached).value <= 1.5


@pytest.mark.parametrize(
    "mechanism", [BLTNoise(clip=1.0, noise_multiplier=1.0, scales=(0.3, 0.1), decays=(0.5, 0.9))]
)
def test_blt_noise_has_the_covariance_of_its_factorisation(mechanism):
    rounds, size = 6, 40_000
    aggregates, memory, _ = sends(lambda i: jnp.zeros(size), mechanism, rounds)
    strategy = np.r_[1.0, [0.3 * 0.5**k + 0.1 * 0.9**k for k in range(rounds - 1)]]
    matrix = np.sum([c * np.eye(rounds, k=-k) for k, c in enumerate(strategy)], axis=0)
    inverse = np.linalg.inv(matrix)
    np.testing.assert_allclose(
        np.cov(aggregates * len(SIZES)), inverse @ inverse.T, atol=5 * 1.5 / math.sqrt(size)
    )
    assert jax.tree.leaves(memory)[0].shape == (2, size)


def test_blt_beats_what_it_contains():
    numbers = blt(3, 300, separation=60)
    turns = (np.arange(300) % 60 == 0)[:, None]
    strategy = BLTNoise(
        clip=1.0, noise_multiplier=1.0, scales=numbers.scales, decays=numbers.decays
    ).strategy(300)
    cost = [
        prefix_error(s) * exposures(s, turns)[0]
        for s in (strategy, square_root(300), np.eye(300)[0])
    ]
    assert cost[0] < min(cost[1:])


def test_extrapolated_noise_is_the_means_of_the_deployment():
    """The noise on the mean is z C / m', and the run's epsilon is that of z m / m'."""
    mechanism = Extrapolated(clip=0.5, noise_multiplier=2.0, cohort=110, population=1100)
    aggregates, _, records = sends(lambda i: jnp.zeros(40_000), mechanism, rounds=2)
    assert aggregates.std() == pytest.approx(
        2.0 * 0.5 / 110, rel=4 / math.sqrt(2 * aggregates.size)
    )
    ledger = jax.tree.map(np.asarray, records.ledger)
    stated = epsilon(ledger, mechanism).value
    assert stated == pytest.approx(get_epsilon_gaussian(0.2 / math.sqrt(2), 1e-5), rel=1e-5)
    assert running_epsilon(mechanism, len(SIZES))(2).rdp == pytest.approx(
        epsilon(ledger, mechanism, accountant="rdp").value
    )
    deployed = Mechanism(clip=0.5, noise_multiplier=2.0, sampling=Poisson(0.1))
    there = epsilon(planned_ledger(deployed, 1100, 2), deployed, delta=1e-5).value
    assert f"not of this run: epsilon {there:.4g} (delta 1e-05" in mechanism.describe(ledger)[0]


def test_the_public_cifar_10_workload_states_two_epsilons():
    """A z of 0.609 with cohorts of 1,000 is 0.0305 with the simulated cohorts of 50."""
    mechanism = Extrapolated(clip=0.4, noise_multiplier=0.609, sampling=Poisson(0.05), delta=1e-6)
    plan = planned_ledger(mechanism, 1000, 1500)
    np.testing.assert_allclose(plan.noise_multiplier, 0.03045)
    stated = float(mechanism.describe(plan)[0].split("epsilon ")[1].split()[0])
    assert stated == pytest.approx(2.0, abs=0.5)  # by their accountant: 2


@pytest.mark.parametrize("devices", [1, 2])
def test_trimmed_mean_of_those_who_take_part(devices):
    updates = np.asarray(jax.random.normal(KEY, (len(SIZES), 7)))
    mechanism = TrimmedMean(clip=100.0, sampling=Poisson(0.7), share=0.25)
    aggregates, _, records = sends(
        lambda i: jnp.asarray(updates)[i], mechanism, rounds=4, devices=devices
    )
    for aggregate, present in zip(aggregates, records.ledger.participants, strict=True):
        ordered, cut = np.sort(updates[present], axis=0), int(0.25 * present.sum())
        np.testing.assert_allclose(
            aggregate, ordered[cut : len(ordered) - cut].mean(axis=0), rtol=2e-6, atol=1e-6
        )


@pytest.mark.parametrize("keep", [1, 3])
def test_krum_drops_liars(keep):
    """Scores equal the paper's in NumPy. Three of eleven lie, and none of these is chosen."""
    rng = np.random.default_rng(1)
    updates = rng.normal(size=(len(SIZES), 6)).astype(np.float32) + 5
    liars = [1, 4, 8]
    updates[liars] = -80
    mechanism = Krum(clip=1e4, byzantine=3, keep=keep)
    aggregates, _, _ = sends(lambda i: jnp.asarray(updates)[i], mechanism, rounds=1)
    apart = ((updates[:, None] - updates[None]) ** 2).sum(axis=2)
    score = np.sort(apart, axis=1)[:, 1 : 1 + len(SIZES) - 3 - 2].sum(axis=1)
    chosen = np.argsort(score)[:keep]
    assert not set(chosen) & set(liars)
    np.testing.assert_allclose(aggregates[0], updates[chosen].mean(axis=0), rtol=1e-5)


def test_update_and_bit_keep_their_bound_on_the_grid():
    mechanism = AdaptiveClip(clip=2.0, noise_multiplier=1.0, bit_noise=2.0, noise="grid", rate=0.0)
    aggregates, _, _ = sends(lambda i: jnp.full(3000, 0.01 * (i + 1)), mechanism, rounds=1)
    updates = 0.01 * np.arange(1, len(SIZES) + 1)[:, None] * np.ones(3000)
    clipped = updates * np.minimum(1, 2 / np.linalg.norm(updates, axis=1, keepdims=True))
    noise = aggregates[0] * len(SIZES) - clipped.sum(axis=0)
    expected = 2 * (1 - 1 / 16) ** -0.5
    assert noise.std() == pytest.approx(expected, rel=4 / math.sqrt(2 * noise.size))
    assert abs(noise.mean()) < 5 * expected / math.sqrt(noise.size)


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (Median(clip=1.0), "takes neither noise nor weights"),
        (PrivacyFilter(clip=1.0, client_noise=1.0, least_total=3.0), "no noise by its clients"),
        (Mechanism(clip=1.0, communicates=False), "follows from noise_multiplier"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(mechanism, message):
    with pytest.raises(ValueError, match=message):
        calibrate(1.0, clients=10, rounds=10, mechanism=mechanism)


@pytest.mark.parametrize("devices", [1, 2])
def test_median_of_those_who_take_part(devices):
    updates = jax.random.normal(KEY, (len(SIZES), 7))
    mechanism = Median(clip=100.0, sampling=Poisson(0.5))
    aggregates, _, records = sends(lambda i: updates[i], mechanism, rounds=4, devices=devices)
    sizes = records.ledger.participants.sum(axis=1)
    assert {int(size) % 2 for size in sizes} == {0, 1}
    for aggregate, present in zip(aggregates, records.ledger.participants, strict=True):
        np.testing.assert_allclose(aggregate, np.median(updates[present], axis=0), rtol=1e-6)
    stated = epsilon(jax.tree.map(np.asarray, records.ledger), mechanism)
    assert stated.value == math.inf
    assert "Median: how far one client moves it" in str(stated.reason)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdaptiveClip(noise_multiplier=0.0), "Give a finite first bound"),
        (
            lambda: AdaptiveClip(clip=1.0, noise_multiplier=(1.0, 2.0)),
            "one multiplier for all rounds",
        ),
        (lambda: AdaptiveClip(clip=1.0, quantile=1.5), "quantile must be .* got 1.5"),
        (lambda: BandedNoise(clip=1.0, noise_multiplier=1.0, bands=0), "bands must be .* got 0"),
        (
            lambda: BandedNoise(clip=1.0, client_noise=1.0),
            "correlated noise, which the server adds",
        ),
        (
            lambda: BandedNoise(clip=1.0, bands=3, coefficients=(0.5,)),
            "must be 2 numbers for 3 bands",
        ),
        (lambda: BLTNoise(clip=1.0, scales=(0.5, 0.5)), "one scale and one decay per buffer"),
        (lambda: BLTNoise(clip=1.0, decays=(1.0,)), "decays must be below 1"),
        (lambda: TrimmedMean(clip=1.0, share=0.5), "less than a half"),
        (
            lambda: Extrapolated(clip=1.0, cohort=10, population=5),
            "a cohort of at most the population",
        ),
        (lambda: CyclicPoisson(0.5, 4), "rate must be at most 0.25"),
        (lambda: Median(clip=1.0, noise_multiplier=1.0), "takes neither noise nor weights"),
        (lambda: Median(weights=np.ones(3)), "takes neither noise nor weights"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_message_that_no_mechanism_reads_is_refused():
    base = fedavg(MODEL, mechanism=Mechanism(sampling=Full()))

    def client_update(key, server, client, data):
        message, client, info = base.client_update(key, server, client, data)
        return message._replace(extra=jnp.ones(())), client, info

    with pytest.raises(
        ValueError, match=r"message\.extra must be None for Mechanism, which takes an update"
    ):
        simulate(KEY, base._replace(client_update=client_update), small_clients(), **RUN)


def test_a_masked_update_on_a_grid_has_the_norm_of_a_clipped_one():
    mechanism = PrivateMask(clip=1.0, noise_multiplier=2.0, noise="grid")
    sent = Message(jnp.array([0.6, 0.8]), jnp.array([True, False]))
    client = Participant(jnp.int32(0), jnp.float32(0.0))
    made = mechanism.contribute(jax.random.key(0), (), client, sent, jnp.float32(5.0))
    assert float(made.norm) == 1.0
    np.testing.assert_array_equal(made.update, np.array([0.6, 0.0], np.float32))
