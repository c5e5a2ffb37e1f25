"""Numbers from closed forms and from fresh dp-accounting computations."""

import functools
import math
from typing import Any

import dp_accounting
import jax
import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfl.privacy.accounting.accountants import Accountant
from jaxfl.privacy.accounting.calibration import calibrate, calibrate_examples, calibrate_upload
from jaxfl.privacy.accounting.ledgers import (
    Epsilon,
    accountants,
    epsilon,
    epsilons,
    example_epsilon,
    planned_ledger,
    running_epsilon,
)
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism, PrivateMask
from jaxfl.privacy.sampling import CyclicPoisson, FixedSize, Full, MinSeparation, Poisson
from jaxfl.types import Ledger, Terms

ZERO_OUT = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE
BOTH = pytest.mark.parametrize("accountant", ["rdp", "pld"])


def mechanism(noise_multiplier=0.0, **fields) -> Mechanism:
    return Mechanism(clip=1.0, noise_multiplier=noise_multiplier, **fields)


def ledger(m: Mechanism, present: np.ndarray, dp_sgd: DPSGD | None = None) -> Ledger:
    """Return the ledger of a mechanism, in single precision, as the engine writes it."""
    planned = planned_ledger(m, present.shape[1], len(present), dp_sgd)
    s, w, z = (
        np.asarray(field, np.float32)
        for field in (planned.client_noise, planned.weights, planned.noise_multiplier)
    )
    added = (present * np.broadcast_to((w * s) ** 2, present.shape)).sum(axis=1)
    top_up = np.sqrt(np.maximum(0, (z * w.max(axis=1)) ** 2 - added))
    return Ledger(
        present, s, w, top_up, z, example_noise=np.asarray(planned.example_noise, np.float32)
    )


def spent(
    m: Mechanism, rounds: int, clients: int = 4, *, accountant: Accountant = "rdp", **options
) -> float:
    return epsilon(planned_ledger(m, clients, rounds), m, accountant=accountant, **options).value


def poisson(z, rate: float, **fields) -> Mechanism:
    return mechanism(
        z if np.ndim(z) == 0 else tuple(np.asarray(z).tolist()), sampling=Poisson(rate), **fields
    )


def poisson_event(rate: float, multipliers) -> dp_accounting.ComposedDpEvent:
    return dp_accounting.ComposedDpEvent(
        [
            dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(float(z)))
            for z in multipliers
        ]
    )


def by_pld(
    event: dp_accounting.DpEvent, count: int = 1, delta: float = 1e-5, interval: float = 5e-4
) -> float:
    return PLDAccountant(ZERO_OUT, interval).compose(event, count).get_epsilon(delta)


def meets(target: float, value: float) -> bool:
    return target * (1 - 1e-3) <= value <= target * (1 + 1e-9)


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
    assert spent(poisson(noise, rate), rounds) == pytest.approx(
        rdp, rel=1e-2
    )  # its last digits depend on the orders
    assert spent(poisson(noise, rate), rounds, accountant="pld") == pytest.approx(pld, rel=3e-4)


@pytest.mark.parametrize(
    ("rounds", "delta", "rate", "half", "one", "two"),
    [  # RDP and PLD at epsilon 0.5, 1 and 2
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
    ],
)
def test_calibrate_gives_the_reference_multipliers(rounds, delta, rate, half, one, two):
    options = {"clients": 20, "rounds": rounds, "sampling": Poisson(rate), "delta": delta}
    for target, row in zip((0.5, 1.0, 2.0), (half, one, two)):
        for pld, expected in enumerate(row):
            accountant = "pld" if pld else "rdp"
            if not pld or rate == 1 or target == 1:  # sampled PLDs are slow
                noise = calibrate(target, accountant=accountant, **options)
                assert noise == pytest.approx(expected, rel=6e-3)
                assert noise == float(f"{noise:.6g}")  # no digit that another processor has not
                assert meets(
                    target, spent(poisson(noise, rate), rounds, accountant=accountant, delta=delta)
                )


@pytest.mark.parametrize(
    ("sigma", "delta", "total", "needed"),
    [
        (0.508, 0.1, 37.9, 4.21),
        (0.852, 1e-5, 29.0, 14.4),
        (0.487, 0.1, 40.9, 4.21),
        (0.487, 1e-5, 64.7, 14.4),
    ],
)
def test_noise_meant_for_examples_protects_clients_little(sigma, delta, total, needed):
    m = mechanism(client_noise=sigma / math.sqrt(10))
    assert spent(m, 15, clients=10, accountant="pld", delta=delta) == pytest.approx(total, rel=3e-3)
    assert total < spent(m, 15, clients=10, delta=delta) < 1.15 * total
    found = calibrate(1.0, clients=10, rounds=15, delta=delta, accountant="pld")
    assert found == pytest.approx(needed, rel=5e-3)


def test_delta_follows_from_the_number_of_clients():
    for clients, delta in ((100, 1e-5), (10**6, 1e-7)):
        run: dict[str, Any] = {"clients": clients, "rounds": 10}
        assert calibrate(1.0, **run) == calibrate(1.0, delta=delta, **run)
        one: dict[str, Any] = {"participations": 3}
        assert calibrate_upload(1.0, clients=clients, **one) == calibrate_upload(
            1.0, delta=delta, **one
        )
    m = mechanism(3.0)
    assert spent(m, 2, clients=10**6, accountant="pld") == pytest.approx(
        get_epsilon_gaussian(3 / math.sqrt(2), 1e-7)
    )
    assert running_epsilon(m, 10**6)(2).rdp == pytest.approx(spent(m, 2, clients=10**6), rel=1e-9)


def test_uploads_under_replace_one():
    for sigma, rounds, total in (
        (0.508, 15, 180),
        (0.852, 15, 79.4),
        (0.487, 15, 193),
        (8.34, 100, 12.5),
    ):
        found = spent(mechanism(client_noise=sigma), rounds, observer="upload", accountant="pld")
        assert found == pytest.approx(total, rel=5e-3)
    assert calibrate_upload(1.0, participations=100, accountant="pld") == pytest.approx(
        74.6, rel=1e-3
    )
    for accountant in ("rdp", "pld"):
        noise = calibrate_upload(3.0, participations=7, accountant=accountant)
        assert meets(
            3.0, spent(mechanism(client_noise=noise), 7, observer="upload", accountant=accountant)
        )


def test_calibrate_a_schedule():
    shares = np.array([0.097901, 0.142040, 0.245365, 0.514693])
    kappa = calibrate(1.0, clients=20, rounds=4, accountant="pld", shape=1 / shares)
    np.testing.assert_allclose(
        [kappa, *(kappa / shares)], [2.22238, 22.700, 15.646, 9.0575, 4.3179], rtol=1e-3
    )
    for delta, sigma in ((1e-5, 3.7306), (0.05, 1.3328)):  # one Gaussian
        assert calibrate(1.0, clients=3, rounds=1, delta=delta, accountant="pld") == pytest.approx(
            sigma, rel=1e-3
        )
    for accountant in ("rdp", "pld"):
        run: dict[str, Any] = {
            "clients": 20,
            "rounds": 4,
            "sampling": Poisson(0.5),
            "accountant": accountant,
        }
        kappa = calibrate(2.0, shape=1 / shares, **run)
        assert meets(2.0, spent(poisson(kappa / shares, 0.5), 4, accountant=accountant))


@pytest.mark.slow
def test_fixed_size_takes_the_better_of_two_bounds():
    """Cohorts of 10 of 20 need z = 40.5 by the plain bound, and 83.6 by sampling.

    Cohorts of 2 of 20 need 16.8 by sampling. Epsilon is 1 over 100 rounds.
    """
    options: dict[str, Any] = {"clients": 20, "rounds": 100, "accountant": "rdp"}
    plain = calibrate(1.0, **options)
    assert calibrate(1.0, sampling=FixedSize(10), **options) == pytest.approx(plain, rel=1e-3)
    assert calibrate(1.0, sampling=FixedSize(2), **options) == pytest.approx(16.8, rel=5e-3)
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        1000, 10, dp_accounting.GaussianDpEvent(1.5)
    )
    fresh = RdpAccountant(list(range(2, 65)), REPLACE_ONE).compose(event, 50).get_epsilon(1e-5)
    for noise in ({"noise_multiplier": 3.0}, {"client_noise": 3 / math.sqrt(10)}):
        m = mechanism(sampling=FixedSize(10), **noise)
        assert spent(m, 50, clients=1000) == pytest.approx(fresh, rel=1e-6)
        found = epsilons(planned_ledger(m, 1000, 50), m)
        assert found["pld"].value == pytest.approx(
            get_epsilon_gaussian(3 / math.sqrt(50), 1e-5), rel=1e-6
        )
        assert [own.theorem for own in found.values()] == [
            "Gaussian, zero-out; PLD",
            "sampling without replacement, replace-one; RDP",
        ]
        assert epsilon(planned_ledger(m, 1000, 50), m).theorem == found["rdp"].theorem


@pytest.mark.slow
def test_fixed_size_needs_no_more_noise_by_pld():
    """Only RDP has a theorem. Without its bound PLD would need 18 times the noise."""
    for size, clients in ((10, 1000), (10, 20)):
        run: dict[str, Any] = {"clients": clients, "rounds": 50, "sampling": FixedSize(size)}
        both = [calibrate(1.0, accountant=accountant, **run) for accountant in ("pld", "rdp")]
        assert both[0] <= both[1] * (1 + 1e-3)
        m = mechanism(both[0], sampling=FixedSize(size))
        assert meets(1.0, spent(m, 50, clients=clients, accountant="pld"))


def test_sampling_without_replacement_amplifies_nothing_for_clients_with_a_state():
    m = mechanism(3.0, sampling=FixedSize(10))
    exact = get_epsilon_gaussian(3 / math.sqrt(50), 1e-5)
    assert spent(m, 50, clients=1000, accountant="pld", stateful=True) == pytest.approx(
        exact, rel=1e-6
    )
    m = poisson(3.0, 0.01)
    assert spent(m, 5, stateful=True) == spent(m, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_ledger_equals_a_fresh_computation(seed):
    """The first k rounds equal k new events in the opposite order, also in single precision."""
    rng = np.random.default_rng(seed)
    rate, z = rng.uniform(0.05, 0.5), rng.uniform(2, 6, 12)
    m = poisson(z, rate, client_noise=0.1)
    record, running = (
        ledger(m, rng.random((12, 30)) < rate),
        running_epsilon(m, 30, terms=Terms(delta=1e-6)),
    )
    for done in (1, 12, 4):
        part, event = (
            jax.tree.map(lambda field, done=done: field[:done], record),
            poisson_event(rate, z[:done][::-1]),
        )
        fresh = RdpAccountant(list(range(2, 65)), ZERO_OUT).compose(event).get_epsilon(1e-6)
        rdp = epsilon(part, m, accountant="rdp", delta=1e-6).value
        assert fresh * (1 - 5e-3) <= rdp <= fresh * (1 + 1e-6)
        assert epsilon(part, m, delta=1e-6).value == pytest.approx(
            by_pld(event, delta=1e-6), rel=1e-3
        )
        assert running(done).rdp == pytest.approx(rdp, rel=1e-6)
    assert (
        epsilon(jax.tree.map(lambda field: field[:0], record), m).value == running(0).epsilon == 0
    )


def test_rounds_with_and_without_amplification_compose():
    """Client noise of 3 on 4 clients exceeds the floor in two rounds of four."""
    m = poisson(2.0, 0.1, client_noise=np.array([[0.5], [3.0], [0.5], [3.0]]))
    event = dp_accounting.ComposedDpEvent(
        [poisson_event(0.1, [2, 2]), *[dp_accounting.GaussianDpEvent(3.0)] * 2]
    )
    assert spent(m, 4, accountant="pld") == pytest.approx(by_pld(event), rel=1e-3)
    fresh = RdpAccountant(accountants.ORDERS, ZERO_OUT).compose(event).get_epsilon(1e-5)
    assert [spent(m, 4), running_epsilon(m, 4)(4).rdp] == pytest.approx([fresh, fresh], rel=1e-9)


@BOTH
def test_monotone(accountant):
    def value(z=2.0, q=0.1, rounds=20, **options):
        return spent(poisson(z, q), rounds, **({"accountant": accountant} | options))

    for unit in ("client", "example"):
        own = functools.partial(value, unit=unit)
        assert own(z=1.5) > own() > own(z=3.0) > 0
        assert own(q=0.05) < own() < own(q=0.2) < own(q=1.0)
        assert own(rounds=10) < own() < own(rounds=40)
        assert own() >= value()
    for options in ({}, {"z": 0.8}, {"z": 20.0, "q": 0.7}, {"q": 0.01, "rounds": 1}):
        assert value(accountant="pld", **options) <= value(accountant="rdp", **options)
    assert value(z=(4.0, 1.5, 3.0), rounds=3, one_round=True) == pytest.approx(
        value(z=1.5, rounds=1), rel=1e-3
    )


def test_tiny_and_huge_epsilons():
    for z, rounds in ((1000.0, 100), (3000.0, 1), (0.01, 1)):
        exact = spent(mechanism(z), rounds, accountant="pld")
        assert exact < spent(mechanism(z), rounds) < 1.4 * exact
    fresh = by_pld(poisson_event(1e-3, [5.0]), 1500, interval=1e-6)
    assert spent(poisson(5.0, 1e-3), 1500, accountant="pld") == pytest.approx(fresh, rel=3e-3)
    assert fresh < spent(poisson(5.0, 1e-3), 1500) < 1.5 * fresh


@pytest.mark.slow
@BOTH
def test_many_kinds_of_rounds_stay_upper_bounds(accountant):
    """The bound lies between schedules of 35 levels with slightly more and slightly less noise."""
    z = np.geomspace(2, 16, 700)
    schedules = np.repeat(z[19::20], 20), z, np.repeat(z[::20], 20)
    more, found, less = (
        spent(poisson(noise, 0.02), 700, accountant=accountant) for noise in schedules
    )
    assert more < found < less < 1.2 * more


def test_running_epsilon():
    for m in (poisson(2.0, 0.1), mechanism(client_noise=1.0, weights=np.array([1.0, 2, 1, 1]))):
        running = running_epsilon(m, 4)
        assert running(0).epsilon == running(0).rdp == 0
        for done in (30, 10):
            assert running(done).rdp == pytest.approx(spent(m, done), rel=1e-9)
            tightest = min(
                spent(m, done, observer=who, accountant="pld") for who in ("aggregate", "upload")
            )
            assert running(done).epsilon == pytest.approx(tightest, rel=1e-9)
    assert running_epsilon(Mechanism(), 4)(1).epsilon == math.inf


def test_running_epsilon_follows_from_the_round_alone():
    """It is equal to the bit after any earlier calls, with and without amplified rounds."""
    client_noise = np.where(np.arange(16) % 3 == 0, 3.0, 0.5)[:, None]
    m = poisson(np.geomspace(2, 6, 16), 0.1, client_noise=client_noise)
    rounds = list(range(1, 9))
    alone = [running_epsilon(m, 4)(done) for done in rounds]
    for order in (rounds, rounds[::-1], [8, 3, 3, 5, *rounds]):
        asked = running_epsilon(m, 4)
        found = {done: asked(done) for done in order}
        assert [found[done] for done in rounds] == alone


def test_running_epsilon_accounts_for_the_most_exposed_client_alone(monkeypatch):
    """There is one distribution of losses, and the epsilon of all clients is equal to the bit."""
    m = poisson(2.0, 0.2, weights=np.linspace(0.5, 1.0, 40))
    evaluate, asked = accountants._pld_epsilon, []
    monkeypatch.setattr(
        accountants, "_pld_epsilon", lambda *given: asked.append(given) or evaluate(*given)
    )
    found = running_epsilon(m, 40)(6)
    assert len(asked) == 1
    assert found.epsilon == epsilon(planned_ledger(m, 40, 6), m).value
    assert found.rdp == epsilon(planned_ledger(m, 40, 6), m, accountant="rdp").value


def test_many_kinds_of_clients_stay_upper_bounds():
    noise = np.geomspace(1, 9, 600)
    m = mechanism(client_noise=noise[None])
    found = epsilon(planned_ledger(m, 600, 2), m, observer="upload", accountant="pld")
    for i in (0, 1, 100, 599):
        exact = get_epsilon_gaussian(noise[i] / 2 / math.sqrt(2), 1e-5)
        assert exact * (1 - 1e-6) <= found.per_client[i] <= 1.02 * exact
    m = poisson((2.0, 3.0, 4.0), 0.1, weights=1 / noise[:100])
    found = epsilon(planned_ledger(m, 100, 3), m, accountant="rdp")
    assert (
        found.per_client.min()
        == found.value
        == pytest.approx(spent(poisson((2.0, 3.0, 4.0), 0.1), 3), rel=1e-9)
    )


@BOTH
def test_uploads_count_the_rounds_a_client_took_part_in(accountant):
    rng = np.random.default_rng(1)
    noise, present = rng.uniform(1, 4, (6, 5)), rng.random((6, 5)) < 0.5
    present[:, 4] = False
    m = mechanism(client_noise=noise, sampling=Poisson(0.5))
    found = epsilon(ledger(m, present), m, observer="upload", accountant=accountant)
    for i in range(4):
        exact = get_epsilon_gaussian((4 / noise[present[:, i], i] ** 2).sum() ** -0.5, 1e-5)
        assert (
            exact * (1 - 1e-5)
            <= found.per_client[i]
            <= exact * (1 + 1e-5 if accountant == "pld" else 1.15)
        )
    assert found.per_client[4] == 0
    assert found.value == found.per_client.max()
    loud = mechanism(client_noise=np.where(np.arange(5) == 0, 0, noise), sampling=Poisson(0.5))
    without = epsilon(ledger(loud, present), loud, observer="upload", accountant=accountant)
    assert without.value == without.per_client[0] == math.inf
    np.testing.assert_array_equal(without.per_client[1:], found.per_client[1:])


@BOTH
@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_smaller_weights_are_better_protected(accountant, rate):
    weights = np.array([0.3, 0.1, 0.0, 0.2])
    m = poisson(2.0, rate, weights=weights)
    found = epsilon(planned_ledger(m, 4, 10), m, accountant=accountant).per_client
    alone = [
        spent(poisson(2 * 0.3 / w, rate), 10, accountant=accountant) if w else 0 for w in weights
    ]
    np.testing.assert_allclose(found, alone, rtol=1e-3)


@pytest.mark.parametrize(
    ("fields", "multipliers"),
    [  # weights dilute: sigma sqrt(sum p^2 / N) / max p is 0.42328 sigma here, and sigma for equal weights
        (
            {"client_noise": 2 / math.sqrt(10), "weights": np.array([0.3, 0.2] + [0.0625] * 8)},
            [0.42328 * 2],
        ),
        ({"client_noise": 2 / math.sqrt(10), "weights": np.full(10, 0.1)}, [2] * 10),
        # fixed size: the quietest company; Poisson: its own noise
        (
            {"client_noise": np.array([[1.0, 2, 3, 4]]), "sampling": FixedSize(2)},
            np.sqrt([1 + 4, 4 + 1, 9 + 1, 16 + 1]),
        ),
        ({"client_noise": 3.0, "sampling": Poisson(0.5)}, [3] * 6),
    ],
)
def test_noise_that_clients_add(fields, multipliers):
    m = mechanism(**fields)
    found = epsilon(
        planned_ledger(m, max(len(multipliers), m.weight_table.shape[1]), 1), m, accountant="pld"
    )
    expected = [get_epsilon_gaussian(float(z), 1e-5) for z in multipliers]
    np.testing.assert_allclose(found.per_client[: len(expected)], expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("m", "equal", "theorem"),
    [  # amplified only where the cohort cannot be told from the noise: at zC/sqrt(qN) each, large ones are noisier
        (
            poisson(2.0, 0.1, client_noise=2 / math.sqrt(50)),
            poisson(2.0, 0.1),
            "Poisson-sampled Gaussian, rate 0.1",
        ),
        (
            poisson(2.0, 0.1, client_noise=2 / math.sqrt(5)),
            mechanism(2.0),
            "because the clients' noise can exceed",
        ),
        (
            poisson(2.0, 0.1, denominator="participants"),
            mechanism(2.0),
            "because the denominator shows the cohort",
        ),
        (
            mechanism(2.0, sampling=FixedSize(5), denominator="participants"),
            mechanism(2.0),
            "Gaussian, zero-out",
        ),
    ],
)
def test_amplification(m, equal, theorem):
    found = epsilons(planned_ledger(m, 50, 10), m)["pld"]
    assert theorem in found.theorem
    assert found.value == pytest.approx(spent(equal, 10, clients=50, accountant="pld"), rel=1e-9)
    if m.sampling == FixedSize(5):
        assert spent(m, 10, clients=50) < spent(equal, 10, clients=50)


@pytest.mark.parametrize(
    ("sampling", "z"), [(Poisson(0.4), 2.0), (Poisson(0.4), 0.0), (FixedSize(2), 2.0)]
)
def test_aggregate_does_not_depend_on_the_coins_drawn(sampling, z):
    m = mechanism(
        z, client_noise=np.random.default_rng(3).uniform(0.1, 0.9, (1, 6)), sampling=sampling
    )
    values = [
        epsilon(ledger(m, np.roll(np.eye(6, dtype=bool), k, 0)[:4]), m).value for k in range(3)
    ]
    assert values == pytest.approx([epsilon(planned_ledger(m, 6, 4), m).value] * 3, rel=1e-6)


@BOTH
@pytest.mark.parametrize(
    ("m", "observer", "reason"),
    [
        (Mechanism(), "aggregate", "not clipped"),
        (Mechanism(), "upload", "not clipped"),
        (mechanism(0.0), "aggregate", "no noise on the sum"),
        (mechanism(0.0, sampling=FixedSize(2)), "aggregate", "no noise on the sum"),
        (poisson(0.0, 0.1), "aggregate", "no noise on the sum"),
        (mechanism((1.0, 0.0, 1.0)), "aggregate", "no noise on the sum"),
        (poisson((1.0, 0.0, 1.0), 0.1), "aggregate", "no noise on the sum"),
        (mechanism(1.0), "upload", "without noise"),
        (PrivateMask(clip=1.0, client_noise=1.0), "aggregate", "the support of each client's mask"),
        (PrivateMask(clip=1.0, client_noise=1.0), "upload", "the support of each client's mask"),
    ],
)
def test_no_finite_epsilon(m, observer, reason, accountant):
    for one_round in (False, True):
        found = epsilon(
            planned_ledger(m, 4, 3),
            m,
            observer=observer,
            accountant=accountant,
            one_round=one_round,
        )
        assert (found.value, found.theorem) == (math.inf, "none")
        assert reason in str(found.reason)


def test_nothing_leaves_the_clients():
    m = Mechanism(communicates=False)
    assert spent(m, 3) == spent(m, 3, observer="upload") == running_epsilon(m, 4)(10).epsilon == 0


def test_pld_is_asked_for_replace_one_of_sampled_examples_alone(monkeypatch):
    """PLD doubles the sensitivity itself, which gives 9.9973, not 4.3772. RDP does not."""
    event = dp_accounting.GaussianDpEvent(10)
    for relation, pld in ((ZERO_OUT, 4.3772), (REPLACE_ONE, 9.9973)):
        assert PLDAccountant(relation).compose(event, 100).get_epsilon(1e-5) == pytest.approx(
            pld, rel=1e-4
        )
        assert RdpAccountant(None, relation).compose(event, 100).get_epsilon(1e-5) == pytest.approx(
            4.7285, rel=1e-4
        )
    asked = set()
    accountants._pld_epsilon.cache_clear()

    made = accountants._privacy_losses

    def asking(multiplier, rate, replaced, interval):
        asked.add(replaced)
        return made(multiplier, rate, replaced, interval)

    monkeypatch.setattr(accountants, "_privacy_losses", asking)
    for sampling in (Full(), FixedSize(2), Poisson(0.5)):
        for observer in ("aggregate", "upload"):
            m = mechanism(3.0, client_noise=1.0, sampling=sampling)
            spent(m, 2, observer=observer, accountant="pld")
    assert asked == {False}
    for sampling in (Full(), FixedSize(2), Poisson(0.5)):
        spent(
            mechanism(3.0, client_noise=1.0, sampling=sampling), 2, accountant="pld", unit="example"
        )
    assert asked == {False, True}


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    target=st.floats(0.05, 20),
    sampling=st.sampled_from([Full(), Poisson(0.03), Poisson(0.5), FixedSize(3)]),
    rounds=st.integers(1, 200),
)
def test_calibrate_meets_the_target(target, sampling, rounds):
    noise = calibrate(target, clients=40, rounds=rounds, sampling=sampling, accountant="rdp")
    assert meets(target, spent(mechanism(noise, sampling=sampling), rounds, clients=40))


def test_calibrate_takes_weights_by_round():
    weights = np.array([[0.5, 1.0], [1.0, 0.25], [1.0, 1.0]])
    run: dict[str, Any] = {"clients": 2, "rounds": 3, "accountant": "rdp"}
    noise = calibrate(2.0, mechanism=mechanism(1.0, weights=weights), **run)
    assert meets(2.0, spent(mechanism(noise, weights=weights), 3, clients=2, accountant="rdp"))
    assert calibrate(2.0, mechanism=mechanism(1.0, weights=np.ones((3, 2))), **run) == calibrate(
        2.0, **run
    )


PLAN = planned_ledger(mechanism(1.0), 2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: calibrate(0.0, clients=4, rounds=2),
            r"epsilon must be a finite number above 0, got 0.0",
        ),
        (
            lambda: calibrate(math.inf, clients=4, rounds=2),
            r"epsilon must be a finite number above 0, got inf",
        ),
        (
            lambda: calibrate(1.0, clients=4, rounds=2, delta=1.0),
            r"delta must be a number in \(0, 1\), got 1.0",
        ),
        (
            lambda: calibrate(1.0, clients=4, rounds=0),
            r"rounds must be a whole number of at least 1, got 0",
        ),
        (lambda: calibrate(1.0, clients=0, rounds=2), r"clients must be .* got 0"),
        (
            lambda: calibrate(1.0, clients=4, rounds=2, sampling=FixedSize(9)),
            r"size must be at most 4, the number of clients, got 9",
        ),
        (
            lambda: calibrate(1.0, clients=4, rounds=2, shape=[1.0, 0.0]),
            r"shape must .* numbers above 0, got",
        ),
        (
            lambda: calibrate(
                1.0, clients=2, rounds=4, mechanism=mechanism(1.0, weights=np.ones((3, 2)))
            ),
            r"mechanism\.weights must cover 1 or 4 rounds, got .* of 3 rounds",
        ),
        (lambda: calibrate_upload(1.0, participations=0), r"participations must be .* got 0"),
        (lambda: epsilon(PLAN, mechanism(1.0), delta=0.0), r"delta must be .* got 0.0"),
        (lambda: planned_ledger(mechanism(1.0), 0, 2), r"clients must be .* got 0"),
        (lambda: running_epsilon(mechanism((1.0, 2.0)), 4)(3), r"done must be at most 2, .* got 3"),
        (
            lambda: epsilon(PLAN._replace(server_noise=np.array([1.0, 0.5])), mechanism(1.0)),
            r"server_noise must .* got 0.5 in round 1 with noise_multiplier=1.0",
        ),
        (
            lambda: epsilon(PLAN._replace(example_noise=np.ones((3, 1))), mechanism(1.0)),
            r"ledger.example_noise must have shape \[2, 2\], or axes of length 1, got \(3, 1\)",
        ),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def private_steps(z=1.0, **options) -> DPSGD:
    defaults: dict[str, Any] = {"clip": 1.0, "noise_multiplier": z, "rate": 0.1, "steps": 5}
    return DPSGD(**defaults | options)


def of_examples(steps: DPSGD | None, clients: int, rounds: int, **options) -> Epsilon:
    return example_epsilon(planned_ledger(Mechanism(), clients, rounds, steps), steps, **options)


@BOTH
def test_examples_are_composed_over_the_steps_of_their_clients_rounds(accountant):
    steps_of, present = private_steps(), np.zeros((20, 3), bool)
    present[:, 0], present[:7, 1] = True, True
    found = example_epsilon(ledger(Mechanism(), present, steps_of), steps_of, accountant=accountant)
    for client, steps in ((0, 100), (1, 35)):
        fresh = (
            RdpAccountant(accountants.ORDERS, ZERO_OUT)
            if accountant == "rdp"
            else PLDAccountant(ZERO_OUT)
        )
        fresh.compose(
            dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0)), steps
        )
        assert found.per_client[client] == pytest.approx(fresh.get_epsilon(1e-5), rel=2e-3)
    assert found.per_client[2] == 0
    assert (
        found.value
        == found.per_client[0]
        == pytest.approx({"rdp": 7.904, "pld": 7.047}[accountant], rel=1e-2)
    )


@BOTH
def test_whole_batches_are_plain_gaussians(accountant):
    found = of_examples(private_steps(10.0, rate=1.0), 2, 20, accountant=accountant)
    assert found.value == pytest.approx(4.3772 if accountant == "pld" else 4.7285, rel=2e-2)


@pytest.mark.slow
def test_examples_of_clients_with_their_own_noise():
    own = of_examples(private_steps(np.array([1.0, 2.0, 4.0])), 3, 4).per_client
    np.testing.assert_allclose(
        own, [of_examples(private_steps(z), 3, 4).value for z in (1.0, 2.0, 4.0)]
    )
    bounds = of_examples(private_steps(np.geomspace(1, 4, 300)), 300, 4).per_client
    assert np.all(np.diff(bounds) <= 0)
    assert bounds[0] == own[0]


def test_examples_of_many_kinds_of_clients_count_as_those_of_the_most_frequent_one():
    clients = 70
    rounds_of_client = np.arange(clients)
    present = np.arange(clients)[:, None] < rounds_of_client
    steps_of = private_steps(10.0, steps=1)
    options: dict[str, Any] = {"accountant": "rdp", "delta": 1e-5}
    many = example_epsilon(ledger(Mechanism(), present, steps_of), steps_of, **options)
    most = of_examples(steps_of, 1, clients - 1, **options)
    assert many.per_client[0] == 0
    np.testing.assert_allclose(many.per_client[1:], most.value)


def test_examples_without_clip_or_noise_have_no_epsilon():
    for steps in (None, private_steps(0.0), private_steps(np.array([0.0, 1.0]))):
        found = of_examples(steps, 2, 1)
        assert math.isinf(found.value)
        assert found.reason is not None
    assert np.isfinite(found.per_client[1])  # the last one: a client that adds noise


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("target", [0.5, 8.0])
def test_calibrated_examples_stay_below_their_target(accountant, target):
    z = calibrate_examples(target, rate=0.1, steps=5, participations=4, accountant=accountant)
    found = of_examples(private_steps(z), 2, 4, accountant=accountant).value
    assert 0.998 * target <= found <= target


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"clip": 0.0}, "clip must be .* got 0.0"),
        ({"rate": 1.5}, "rate must be .* got 1.5"),
        ({"steps": 0}, "steps must be .* got 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be .* got -1.0"),
        ({"noise_multiplier": np.array([1.0, np.inf])}, "noise_multiplier must be"),
        ({"chunk": 0}, "chunk must be .* got 0"),
    ],
)
def test_wrong_steps_name_themselves(wrong, name):
    with pytest.raises(ValueError, match=name):
        private_steps(**wrong)


def test_own_noise_must_fit_the_clients():
    with pytest.raises(ValueError, match=r"dp_sgd\.noise_multiplier must have"):
        planned_ledger(Mechanism(), 4, 1, private_steps(np.ones(3)))


@pytest.mark.parametrize("sampling", [CyclicPoisson(0.1, 4), MinSeparation(2, separation=4)])
def test_a_plan_tops_up_what_those_who_can_take_part_bring(sampling):
    m = Mechanism(clip=1.0, noise_multiplier=1.0, client_noise=0.1, sampling=sampling)
    ledger = planned_ledger(m, 20, 8)
    np.testing.assert_allclose(ledger.server_noise**2 + 0.01 * ledger.participants.sum(axis=1), 1.0)
    assert 0 < epsilon(ledger, m).value < math.inf
