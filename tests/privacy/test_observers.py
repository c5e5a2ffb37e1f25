"""Statements for small populations, compared with the true divergence over all cohorts."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfl.privacy.accounting.ledgers import epsilon, planned_ledger
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import FixedSize, Full, Poisson

DELTA = 1e-3


@pytest.mark.parametrize("sampling", [Full(), Poisson(0.5), FixedSize(2)])
def test_a_small_weight_is_charged_with_the_rounding_of_the_largest(sampling):
    """A client changes a sum by up to w C (1 + 2^-20) + 5.1e-6 C max w (`jaxfl.privacy.sums`)."""
    weights = np.array([1.0, 0.3, 1e-3, 1e-7, 0.0])
    m = Mechanism(clip=1.0, noise_multiplier=2.0, sampling=sampling, weights=weights)
    stated = m.view(planned_ledger(m, 5, 3), "aggregate").multiplier
    moved = weights[:4] * (1 + 2.0**-20) + 5.1e-6
    assert np.all(stated[:, :4] <= 2.0 / moved * (1 + 1e-5))
    np.testing.assert_allclose(stated[:, :3], 2.0 / weights[None, :3].repeat(3, axis=0), rtol=1e-2)
    assert np.all(stated[:, 0] == 2.0)  # equal weights are what they were
    assert np.all(np.isinf(stated[:, 4]))


def cohorts(sampling, clients: int) -> dict[tuple[int, ...], float]:
    """Return the probability of every cohort, a tuple of 0 and 1 for each client."""
    found = {}
    for coins in itertools.product((0, 1), repeat=clients):
        if isinstance(sampling, Poisson):
            found[coins] = math.prod(sampling.rate if coin else 1 - sampling.rate for coin in coins)
        elif sum(coins) == sampling.expected(clients):
            found[coins] = 1 / math.comb(clients, sum(coins))
    return found


def spent(
    m: Mechanism,
    updates: list[np.ndarray],
    value: float,
    attacker: int | None,
    available: np.ndarray | int = 1,
) -> float:
    """The larger delta at an epsilon of what two lists of updates show: sums, with the divisor where it varies.

    An attacker knows whether it took part, and takes its own noise off. Drawn clients who are not available add nothing.
    """
    weights, noise = m.weight_table[0], m.client_noise_table[0]
    clients = len(updates[0])
    weights, noise = np.broadcast_to(weights, clients), np.broadcast_to(noise, clients)
    shares, floor = (
        (weights * noise) ** 2,
        (float(m.noise_multiplier_table[0]) * weights.max()) ** 2,
    )
    x = np.linspace(
        -4 - 9 * math.sqrt(floor + shares.sum()), 4 + 9 * math.sqrt(floor + shares.sum()), 2001
    )
    seen: dict[Any, np.ndarray] = {}
    for coins, probability in cohorts(m.sampling, clients).items():
        took = np.array(coins) * available
        variance = max(floor, (took * shares).sum())
        known: tuple = (round(float(took @ weights), 9),) if m.denominator == "participants" else ()
        if attacker is not None:
            variance -= took[attacker] * shares[attacker]
            known += (coins[attacker],)
        means = np.array([[took @ (weights * u)] for u in updates])
        if variance < 1e-12:  # the same point mass for both
            assert means[0] == means[1]
            continue
        density = np.exp(-0.5 * (x - means) ** 2 / variance) / math.sqrt(2 * math.pi * variance)
        seen[known] = seen.get(known, 0) + probability * density
    pairs = [
        both
        for p, q in seen.values()
        for both in [(p - math.exp(value) * q, q - math.exp(value) * p)]
    ]
    return max(sum(np.maximum(pair[k], 0).sum() for pair in pairs) for k in (0, 1)) * (x[1] - x[0])


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    sampling=st.sampled_from(
        [Full(), FixedSize(1), FixedSize(2), FixedSize(3), Poisson(0.1), Poisson(0.4)]
    ),
    z=st.sampled_from([0.0, 1.0, 2.5, 6.0]),
    denominator=st.sampled_from(["expected", "participants"]),
    unit=st.sampled_from(["client", "example"]),
    observer=st.sampled_from(["aggregate", "client"]),
)
def test_stated_is_never_below_the_truth(data, sampling, z, denominator, unit, observer):
    clients = 4
    several = st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=clients, max_size=clients).map(
        np.array
    )
    same = st.sampled_from([0.0, 0.7, 1.5]).map(lambda s: np.full(clients, s))
    noise, weights = (
        data.draw(st.one_of(same, several)),
        data.draw(st.one_of(st.just(np.ones(clients)), several)),
    )
    m = Mechanism(
        clip=1.0,
        noise_multiplier=z,
        client_noise=noise[None],
        weights=weights,
        sampling=sampling,
        denominator=denominator,
    )
    found = epsilon(planned_ledger(m, clients, 1), m, unit=unit, observer=observer, delta=DELTA)
    if math.isinf(found.value):
        return
    others = np.array(
        data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=clients, max_size=clients))
    )
    for client in range(clients):
        first, second = others.copy(), others.copy()
        first[client], second[client] = 1.0, 0.0 if unit == "client" else -1.0
        for attacker in range(clients) if observer == "client" else (None,):
            if attacker != client:
                own = found.per_client[client]
                assert spent(m, [first, second], own, attacker) <= DELTA * (1 + 1e-3) + 1e-9


@pytest.mark.parametrize(
    ("m", "observer", "unit", "attacker"),
    [  # where the bound is tight, a little less would be false
        (Mechanism(1.0, 2.0, sampling=Poisson(0.4)), "aggregate", "client", None),
        (Mechanism(1.0, 2.0, sampling=Poisson(0.4)), "aggregate", "example", None),
        (Mechanism(1.0, 2.0), "aggregate", "example", None),
        (Mechanism(1.0, client_noise=2.0), "client", "client", 0),
        (Mechanism(1.0, 2.0, client_noise=0.8, sampling=Poisson(0.4)), "client", "example", 0),
    ],
)
def test_stated_is_the_truth_where_all_clients_are_alike(m, observer, unit, attacker):
    found = epsilon(planned_ledger(m, 4, 1), m, unit=unit, observer=observer, delta=DELTA).value
    pair = [np.array([0.0, 0.0, 0.0, last]) for last in (1.0, 0.0 if unit == "client" else -1.0)]
    truth = spent(m, pair, found, attacker)
    if attacker is None or isinstance(m.sampling, Full):
        assert truth == pytest.approx(DELTA, rel=2e-2)
    else:  # the attacker is away in 6 of 10 rounds
        assert 0.4 * DELTA * 0.98 <= truth <= DELTA


def test_one_client_alone_has_no_others():
    m = Mechanism(1.0, client_noise=2.0)
    assert (
        epsilon(planned_ledger(m, 1, 3), m, observer="client").value
        == epsilon(planned_ledger(m, 1, 3), m).value
    )


def test_nothing_is_left_where_one_client_adds_all_the_noise():
    m = Mechanism(1.0, 3.0, client_noise=np.array([[3.0, 0.0, 0.0]]), sampling=Poisson(0.2))
    found = epsilon(planned_ledger(m, 3, 2), m, observer="client")
    assert found.value == math.inf
    assert found.per_client[0] == math.inf or found.per_client[0] > 0
    assert epsilon(planned_ledger(m, 3, 2), m).value < 1.0
