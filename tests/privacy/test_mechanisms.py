"""Mechanisms that remember, or need each participant's own update, with any algorithm and on both stores."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, MODEL, SIZES, small_clients
from dp_accounting import get_epsilon_gaussian

from jaxfl import simulate, sweep
from jaxfl.algorithms import fedavg
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.privacy import Full, Mechanism, Poisson, epsilon, planned_ledger
from jaxfl.privacy.accounting import running_epsilon
from jaxfl.privacy.mechanisms import AdaptiveClip, BandedNoise, Median
from jaxfl.privacy.mechanisms.correlated import coefficients
from jaxfl.types import Message

KEY = jax.random.key(2)
RUN: dict[str, Any] = {"rounds": 3, "eval_every": 3, "progress": False}
MECHANISMS = {
    "adaptive clip": AdaptiveClip(clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.6), bit_noise=2.0),
    "banded noise": BandedNoise(clip=0.2, noise_multiplier=1.0, bands=2),
    "median": Median(clip=0.2, sampling=Poisson(0.6)),
}


def sends(update, mechanism, rounds, clients=None, devices=1):
    """Aggregates of some rounds in which client i sends `update(i)`, a vector, and the last memory."""
    base = fedavg(MODEL, mechanism=mechanism)
    shape = jax.eval_shape(update, jnp.int32(0))
    algorithm = base._replace(
        init=lambda key, number: (jnp.zeros((rounds, *shape.shape)), ()),
        client_update=lambda key, server, client, data: (Message(update(data.id)), client, {}),
        server_update=lambda server, aggregate: jnp.concatenate([server[1:], aggregate[None]]),
    )
    population = place(clients or small_clients(), jax.devices()[:devices])
    step = compile_rounds(algorithm, population, chunk=1, segment=rounds)
    center, _, records = jax.device_get(step(KEY, 0, rounds, *initialize(KEY, KEY, algorithm, population)))
    return center.server, center.memory, records


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dp_fedavg", "centaur", "feddpa"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_any_algorithm_on_both_stores(name, method):
    algorithm = ALGORITHMS[method]()._replace(mechanism=MECHANISMS[name])
    device, host = (simulate(KEY, algorithm, small_clients(), states=store, **RUN) for store in ("device", "host"))
    left = [(run.server, run.memory, run.scores, run.ledger) for run in (device, host)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *left)
    assert (device.statement["honest"]["aggregate"]["epsilon"] == "inf") == (name == "median")


@pytest.mark.slow
def test_a_memory_is_swept_and_checkpointed(tmp_path):
    def build(clip):
        return fedavg(MODEL, mechanism=AdaptiveClip(clip=clip, noise_multiplier=1.0, bit_noise=2.0))

    runs = sweep(KEY, build, {"clip": [0.1, 0.3]}, small_clients(), paired_noise=True, **RUN)
    alone = simulate(KEY, build(0.3), small_clients(), folder=tmp_path, **RUN)
    bounds = [float(run.memory.clip) for run in (*runs, alone)]
    assert bounds[0] != bounds[1] == pytest.approx(bounds[2], rel=1e-5)
    read = simulate(KEY, build(0.3), small_clients(), folder=tmp_path, **RUN)
    assert (read.restored, read.memory) == (3, alone.memory)
    np.testing.assert_allclose(alone.ledger.notes["clip"][0], 0.3, rtol=1e-6)


def test_a_clip_bound_finds_its_quantile():
    """Norms 0.1 to 1.1: three quarters are below 0.85, give or take one client of eleven."""
    direction = jnp.ones(50) / math.sqrt(50)
    mechanism = AdaptiveClip(clip=5.0, noise_multiplier=0.01, quantile=0.75, bit_noise=0.05)
    _, memory, records = sends(lambda i: 0.1 * (i + 1) * direction, mechanism, rounds=60)
    assert memory.clip == pytest.approx(0.85, abs=0.1)
    bounds = records.ledger.notes["clip"]
    np.testing.assert_allclose(bounds[1] / bounds[0], math.exp(-0.2 * (1 - 0.75)), rtol=0.01)


def test_update_and_bit_share_one_gaussian():
    """z = 1, sigma_b = 5: 1.00504 on the update, and the ledger charges 1."""
    mechanism = AdaptiveClip(clip=2.0, noise_multiplier=1.0, bit_noise=5.0, rate=0.0)
    aggregates, memory, records = sends(lambda i: jnp.zeros(20_000), mechanism, rounds=2)
    assert float(memory.scale) * 5 == pytest.approx(1.00504, abs=5e-6)
    assert aggregates.std() * len(SIZES) == pytest.approx(2 * 1.00504, rel=4 / math.sqrt(2 * aggregates.size))
    plain = Mechanism(clip=2.0, noise_multiplier=1.0)
    for m in (mechanism, plain):
        stated = epsilon(jax.tree.map(np.asarray, records.ledger), m).value
        assert stated == pytest.approx(get_epsilon_gaussian(1 / math.sqrt(2), 1e-5), rel=1e-6)
    with pytest.raises(ValueError, match="the bits alone cost more"):
        AdaptiveClip(clip=1.0, noise_multiplier=2.0, bit_noise=1.0).init(KEY, dict, 10)


def test_banded_noise_has_the_covariance_of_its_factorisation():
    """Noise is C^-1 xi: its covariance over rounds is the inverse of C^T C."""
    bands, rounds, size = 3, 5, 40_000
    mechanism = BandedNoise(clip=0.5, noise_multiplier=2.0, bands=bands)
    aggregates, _, records = sends(lambda i: jnp.zeros(size), mechanism, rounds)
    noise = aggregates * len(SIZES) / (2.0 * 0.5)
    strategy = np.sum([c * np.eye(rounds, k=-k) for k, c in enumerate(coefficients(bands))], axis=0)
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
        assert running(done) == pytest.approx(epsilon(part, mechanism, accountant="rdp").value, rel=1e-6)
    one_band = BandedNoise(clip=0.5, noise_multiplier=2.0, bands=1)
    plan = planned_ledger(one_band, 4, 5)
    assert epsilon(plan, one_band).value == epsilon(plan, Mechanism(clip=0.5, noise_multiplier=2.0)).value
    sampled = BandedNoise(clip=0.5, noise_multiplier=2.0, sampling=Poisson(0.5))
    assert "no accounting" in str(epsilon(planned_ledger(sampled, 4, 5), sampled).reason)


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
    assert (stated.value, stated.reason) == (math.inf, "a median is released without noise")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdaptiveClip(noise_multiplier=0.0), "give a finite first bound"),
        (lambda: AdaptiveClip(clip=1.0, noise_multiplier=(1.0, 2.0)), "one multiplier for all rounds"),
        (lambda: AdaptiveClip(clip=1.0, quantile=1.5), "quantile=1.5"),
        (lambda: BandedNoise(clip=1.0, noise_multiplier=1.0, bands=0), "bands=0"),
        (lambda: BandedNoise(clip=1.0, client_noise=1.0), "correlated noise is the server's"),
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

    with pytest.raises(ValueError, match=r"message\.extra.*Mechanism takes an update alone"):
        simulate(KEY, base._replace(client_update=client_update), small_clients(), **RUN)
