"""Clients that drop out: how often, the mean that results, and the true epsilon."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms_table import SAMPLERS, SIZES, small_clients
from test_mechanisms import sends
from test_observers import DELTA, spent

from jaxfl.privacy import (
    Dropouts,
    FixedSize,
    Full,
    Mechanism,
    Poisson,
    Skellam,
    epsilon,
    planned_ledger,
)
from jaxfl.privacy.dropouts import with_dropouts
from jaxfl.privacy.noise import SAMPLE, derive

C = len(SIZES)
KEYS = {"seed": jax.random.key(7), "secret": jax.random.split(jax.random.key(7))}


def drawn(sampling, key, rounds):
    """Draw the cohorts of some rounds, with the keys that a mechanism gives its sampler."""

    def cohort(index):
        return sampling.sample(derive(key, index // sampling.period, SAMPLE), C, index)

    return np.asarray(jax.lax.map(cohort, jnp.arange(rounds)))


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_drawn_clients_return_with_their_own_probability(sampler, kind):
    sampling = SAMPLERS[sampler]
    availability = np.linspace(0.2, 1.0, C)
    rounds = 2000
    all_of = drawn(sampling, KEYS[kind], rounds)
    returned = drawn(Dropouts(sampling, availability), KEYS[kind], rounds)
    assert not np.any(returned & ~all_of)
    count = all_of.sum(axis=0)
    spread = np.sqrt(count * availability * (1 - availability))
    assert np.all(np.abs(returned.sum(axis=0) - count * availability) <= 5 * spread)
    # One round does not follow from the round before, also within an epoch of balls in bins.
    both = all_of[1:] & all_of[:-1]
    if both[:, 0].sum() > 100:
        twice = (returned[1:] & returned[:-1])[:, 0].sum() / both[:, 0].sum()
        assert twice == pytest.approx(0.2**2, abs=0.03)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_mean_divides_by_the_expected_number_of_updates(sampler):
    """Every client sends ones, so that the aggregate is the cohort over the denominator."""
    sampling = SAMPLERS[sampler]
    mechanism = Mechanism(clip=10.0, sampling=Dropouts(sampling, 0.75))
    aggregates, _, records = sends(lambda i: jnp.ones(2), mechanism, rounds=40)
    count = records.ledger.participants.sum(axis=1)
    expected = count / (0.75 * sampling.expected(C))
    np.testing.assert_allclose(aggregates[:, 0], expected, rtol=1e-5)
    assert aggregates.mean() == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("replaced", ["client", "example"])
@pytest.mark.parametrize("observer", ["aggregate", "client"])
@pytest.mark.parametrize(("z", "own"), [(1.0, 0.0), (1.0, 1.5), (2.0, 0.7), (0.0, 1.5)])
@pytest.mark.parametrize("sampling", [Full(), FixedSize(2), Poisson(0.4)])
def test_stated_is_never_below_the_truth_whoever_is_available(sampling, z, own, observer, replaced):
    """The truth is over all cohorts of three clients, for each set of available clients."""
    dropouts = Dropouts(sampling, 0.5)
    m = Mechanism(1.0, z, client_noise=own, sampling=dropouts)
    value = epsilon(planned_ledger(m, 3, 1), m, unit=replaced, observer=observer, delta=DELTA).value
    drawn_alike = dataclasses.replace(m, sampling=sampling)
    pair = [np.array([last, 1.0, -1.0]) for last in (1.0, 0.0 if replaced == "client" else -1.0)]
    for available in itertools.product((0, 1), repeat=3):
        attackers = (1, 2) if observer == "client" else (None,)
        for attacker in attackers:
            truth = spent(drawn_alike, pair, value, attacker, np.array(available))
            assert truth <= DELTA * (1 + 1e-3) + 1e-9


def test_the_noise_of_others_does_not_count():
    """Three clients share a noise of 1.2. If two drop out, a third of its variance is left."""
    shares = Mechanism(1.0, client_noise=1.2 / np.sqrt(3), sampling=Full())
    planned = epsilon(planned_ledger(shares, 3, 1), shares, delta=DELTA).value
    pair = [np.array([last, 0.0, 0.0]) for last in (1.0, 0.0)]
    assert spent(shares, pair, planned, None) == pytest.approx(DELTA, rel=2e-2)
    assert spent(shares, pair, planned, None, np.array([1, 0, 0])) > 10 * DELTA
    lossy = with_dropouts(shares, 0.8)
    own = epsilon(planned_ledger(lossy, 3, 1), lossy, delta=DELTA)
    assert spent(shares, pair, own.value, None, np.array([1, 0, 0])) == pytest.approx(
        DELTA, rel=2e-2
    )
    assert "others may drop out" in own.theorem


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_noise_of_the_server_has_the_epsilon_of_all_drawn_clients(sampler):
    plain = Mechanism(1.0, 2.0, sampling=SAMPLERS[sampler])
    lossy = with_dropouts(plain, np.linspace(0.5, 1.0, C))
    found = [epsilon(planned_ledger(m, C, 12), m) for m in (plain, lossy)]
    assert found[0].value == found[1].value
    assert found[0].theorem == found[1].theorem


def test_nothing_changes_where_all_return_or_nothing_is_sent():
    plain = Mechanism(1.0, 2.0)
    silent = Mechanism(communicates=False)
    assert with_dropouts(plain, 1.0) is plain
    assert with_dropouts(plain, np.ones(C)) is plain
    assert with_dropouts(silent, 0.5) is silent


def test_shares_are_calibrated_for_the_drawn_clients():
    """A margin of a fifth covers an availability of 0.8, and is not counted twice."""
    for sampling in (FixedSize(10), Dropouts(FixedSize(10), 0.8)):
        skellam = Skellam(clip=1.0, noise_multiplier=2.0, sampling=sampling, dropout=0.2)
        assert skellam.fewest_shares(50) == 8


def test_two_layers_of_dropouts_have_the_product_of_their_probabilities():
    own = np.linspace(0.2, 1.0, C)
    once = Dropouts(Full(), own)
    twice = with_dropouts(Mechanism(1.0, 2.0, sampling=once), 0.5).sampling
    assert isinstance(twice, Dropouts)
    assert twice.sampling == Full()
    np.testing.assert_array_equal(twice.availability, own / 2)
    returned = drawn(twice, KEYS["seed"], 2000).mean(axis=0)
    assert np.all(np.abs(returned - own / 2) <= 5 * np.sqrt(own / 2 * (1 - own / 2) / 2000))
    assert twice.expected(C) == pytest.approx(0.5 * own.sum())


def test_an_availability_fits_the_clients():
    lossy = Mechanism(1.0, 2.0, sampling=Dropouts(Full(), np.full(3, 0.5)))
    with pytest.raises(ValueError, match=r"availability must have one probability, or .* 11 clien"):
        planned_ledger(lossy, len(small_clients().train), 2)
