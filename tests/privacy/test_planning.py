"""Plans, compared with the Gaussian's closed form and other accountants, and their texts."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    get_epsilon_gaussian,
)
from dp_accounting.pld import PLDAccountant

from jaxfl.privacy import (
    BallsInBins,
    BandedNoise,
    CyclicPoisson,
    FixedSize,
    Full,
    Mechanism,
    Median,
    MinSeparation,
    Poisson,
    PrivateMask,
    epsilon,
    largest_cohort,
    most_rounds,
    plan,
    planned_ledger,
)
from jaxfl.privacy.accounting.planning import KINDS
from jaxfl.privacy.sampling import NEEDS

SMALL = {"clients": 1000, "cohort": 50, "rounds": 60}


@pytest.fixture(scope="module")
def plans():
    return plan(**SMALL, epsilon=3.0)


def test_every_plan_keeps_the_budget_and_the_best_comes_first(plans):
    assert {each.kind for each in plans} == {*KINDS}
    assert [each.error for each in plans] == sorted(each.error for each in plans)
    for each in plans:
        assert 2.997 < each.epsilon <= 3.0
        assert each.pld.value <= each.rdp.value * (1 + 1e-9)
        assert each.delta == 1e-5
        stated = epsilon(planned_ledger(each.mechanism, 1000, 60), each.mechanism)
        assert stated.value == pytest.approx(each.epsilon)
        assert each.error == pytest.approx(each.noise_multiplier / 50 * each.mechanism.error(60))


def test_noise_on_the_model_is_that_of_prefix_sums():
    assert Mechanism().error(60) == pytest.approx(
        np.linalg.norm(np.tril(np.ones((60, 60)))) / math.sqrt(60)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["poisson", "fixed size"])
def test_with_a_plans_noise_epsilon_falls_with_delta_and_grows_with_rounds(plans, kind):
    (planned,) = [each for each in plans if each.kind == kind]

    def epsilon(**changes):
        deployment: dict[str, Any] = SMALL | changes
        noise_multiplier = planned.noise_multiplier
        (found,) = plan(**deployment, noise_multiplier=noise_multiplier, kinds=(kind,))
        return found.epsilon

    assert epsilon(delta=planned.delta) == pytest.approx(planned.epsilon)
    assert np.all(np.diff([epsilon(delta=delta) for delta in (1e-7, 1e-6, 1e-5)]) < 0)
    assert np.all(np.diff([epsilon(rounds=rounds) for rounds in (10, 30, 60)]) > 0)


def test_epsilon_of_a_multiplier_is_dp_accountings():
    (of_poisson,) = plan(**SMALL, noise_multiplier=2.0, kinds=("poisson",))
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(PoissonSampledDpEvent(0.05, GaussianDpEvent(2.0)), 60)
    assert of_poisson.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-2)
    assert of_poisson.noise_multiplier == 2.0


@pytest.mark.slow
def test_rounds_and_cohort_for_a_budget_are_the_largest():
    rounds = most_rounds(1.0, noise_multiplier=2.0, clients=1000, cohort=50)

    def at(cohort, rounds):
        mechanism = Mechanism(clip=1.0, noise_multiplier=2.0, sampling=Poisson(cohort / 1000))
        return epsilon(planned_ledger(mechanism, 1000, rounds), mechanism).value

    assert at(50, rounds) <= 1.0 < at(50, rounds + 1)
    cohort = largest_cohort(1.0, noise_multiplier=2.0, clients=1000, rounds=20)
    assert at(cohort, 20) <= 1.0 < at(cohort + 1, 20)
    assert most_rounds(0.01, noise_multiplier=0.5, clients=1000, cohort=50) == 0
    full = most_rounds(5.0, noise_multiplier=10.0, clients=50, cohort=50)
    assert (
        get_epsilon_gaussian(10 / math.sqrt(full), 1e-5)
        <= 5
        < get_epsilon_gaussian(10 / math.sqrt(full + 1), 1e-5)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deployment", "banded", "separated"),
    [
        ((1000, 50, 300, 2.0), 1.0, 1.24),
        ((10_000, 1000, 200, 8.0), 0.95, None),
        ((100_000, 1000, 1000, 2.0), 0.91, None),
        ((100_000, 1000, 1000, 8.0), 0.58, None),
    ],
)
def test_correlated_noise_is_for_large_populations(deployment, banded, separated):
    """The expected ratios to Poisson sampling at one epsilon are known to two digits."""
    names = dict(zip(("clients", "cohort", "rounds", "epsilon"), deployment))
    by_kind = {
        each.kind: each.error for each in plan(**names, kinds=("poisson", "banded", "separated"))
    }
    assert by_kind["banded"] / by_kind["poisson"] == pytest.approx(banded, abs=0.025)
    if separated:
        assert by_kind["separated"] / by_kind["poisson"] == pytest.approx(separated, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Give one of the two"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "Give one of the two"),
        ({"epsilon": 1.0, "kinds": ()}, r"got \(\)\. Give other kinds"),
        ({"epsilon": 1.0, "kinds": "poisson"}, "Give a tuple of these names"),
        ({"epsilon": 1.0, "cohort": 1001}, "cohort must be .* got 1001"),
        ({"epsilon": 1.0, "cohort": 600, "kinds": ("banded",)}, "one that fits cohort=600"),
        ({"epsilon": -1.0}, "epsilon must be .* got -1.0"),
        ({"epsilon": 1.0, "delta": 2.0}, "delta must be .* got 2.0"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(**SMALL | arguments)


def test_a_plan_for_clients_with_a_state_prices_them_everywhere():
    planned = functools.partial(
        plan, clients=1000, cohort=10, rounds=50, kinds=("fixed size",), stateful=True
    )
    (found,) = planned(epsilon=2.0)
    (again,) = planned(noise_multiplier=found.noise_multiplier)
    assert again.epsilon == pytest.approx(found.epsilon)


def test_more_bins_than_can_be_drawn_are_left_out():
    found = plan(
        clients=10**6, cohort=10, rounds=1, noise_multiplier=1.0, kinds=("poisson", "balls in bins")
    )
    assert [each.kind for each in found] == ["poisson"]


def test_needs_name_what_an_epsilon_rests_on(plans):
    needs = {each.kind: each.needs for each in plans}
    assert needs == {
        "poisson": ("hidden coins",),
        "fixed size": ("hidden draw",),
        "balls in bins": ("each once",),
        "any cohort": ("nothing",),
        "banded": ("hidden coins", "groups"),
        "separated": ("groups",),
        "blt": ("groups",),
    }
    known = {need for each in needs.values() for need in each} | {"limits"}
    assert known == {*NEEDS}


@pytest.mark.parametrize(
    "sampling",
    [
        Full(),
        Poisson(0.5),
        FixedSize(5),
        CyclicPoisson(0.1, 5),
        MinSeparation(2, separation=4),
        BallsInBins(2),
    ],
)
def test_a_sampler_without_needs_amplifies_nothing(sampling):
    """Without a hidden cohort the observer's view is that of plain Gaussians, and conversely."""
    mechanism = Mechanism(clip=1.0, noise_multiplier=2.0, sampling=sampling)
    for stateful in (False, True):
        view = mechanism.view(planned_ledger(mechanism, 10, 4), "aggregate")
        amplified = view.amplified
        if stateful and amplified is not None and amplified.stateless:
            amplified = None
        secret = {"hidden coins", "hidden draw", "each once"} & {*sampling.needs(stateful)}
        assert bool(secret) == bool(view.hidden.any() or amplified is not None)


def test_limits_are_what_a_plan_under_limits_needs():
    options = {"clients": 1000, "cohort": 20, "rounds": 60, "noise_multiplier": 4.0}
    kinds = ("any cohort", "separated", "poisson")
    by_separation = {each.kind: each.needs for each in plan(**options, kinds=kinds, separation=8)}
    assert by_separation == {"any cohort": ("limits",), "separated": ("limits",)}
    by_number = plan(**options, kinds=("separated",), participations=2)
    # 50 groups keep this limit by themselves in 60 rounds.
    assert by_number[0].needs == ("groups",)
    (whoever,) = plan(**options, kinds=("any cohort",), participations=9)
    assert whoever.epsilon == pytest.approx(get_epsilon_gaussian(4 / 3, whoever.delta), rel=1e-3)


def test_a_limit_leaves_enough_participations_for_the_cohorts():
    """1,200 participations of 1,000 clients are 1.2 of each."""
    options = {"clients": 1000, "cohort": 20, "rounds": 60, "epsilon": 4.0}
    with pytest.raises(ValueError, match=r"participations must be at least 2, because 60 rounds"):
        plan(**options, participations=1)
    assert plan(**options, participations=2)


def test_clients_with_a_state_gain_nothing_from_a_hidden_draw():
    options = {"clients": 1000, "cohort": 10, "rounds": 50, "noise_multiplier": 2.0}
    (found,) = plan(**options, kinds=("fixed size",), stateful=True)
    (whoever,) = plan(**options, kinds=("any cohort",))
    assert found.needs == ("nothing",)
    assert found.epsilon == pytest.approx(whoever.epsilon)


@dataclasses.dataclass(frozen=True, eq=False)
class Halved(Mechanism):
    """A user's mechanism, half of whose noise cancels in the model."""

    def error(self, rounds):
        return super().error(rounds) / 2


def test_a_mechanism_of_ones_own_leaves_the_error_that_it_states():
    own = Halved(sampling=Poisson(0.05), weights=np.array([1.0, 3.0] * 500))
    found = {
        each.kind: each
        for each in plan(**SMALL, epsilon=3.0, kinds=("poisson",), mechanisms={"mine": own})
    }
    mine, of_poisson = found["mine"], found["poisson"]
    assert mine.noise_multiplier == pytest.approx(of_poisson.noise_multiplier, rel=2e-3)
    # Half the noise, by the largest weight over the mean one.
    assert mine.error == pytest.approx(of_poisson.error / 2 * 1.5, rel=2e-3)
    assert isinstance(mine.mechanism, Halved)
    assert mine.needs == ("hidden coins",)
    banded = BandedNoise(bands=4, sampling=MinSeparation(50, separation=4))
    again, _ = plan(**SMALL, noise_multiplier=2.0, kinds=["poisson"], mechanisms={"bands": banded})
    assert again.kind == "bands"
    assert again.error == pytest.approx(2 / 50 * banded.error(60))
    (alone,) = plan(**SMALL, noise_multiplier=2.0, kinds=(), mechanisms={"bands": banded})
    assert alone.error == again.error


@dataclasses.dataclass(frozen=True, eq=False)
class Declares(Mechanism):
    """A user's mechanism that declares any error."""

    declared: float = 1.0

    def error(self, rounds):
        return self.declared


@pytest.mark.parametrize("declared", [-1.0, 0.0, math.nan, math.inf])
def test_an_error_that_ranks_nothing_is_an_error(declared):
    own = Declares(sampling=Poisson(0.05), declared=declared)
    with pytest.raises(
        ValueError, match=r"mechanisms\['mine'\].error\(60\) must be a finite number"
    ):
        plan(**SMALL, epsilon=3.0, kinds=("poisson",), mechanisms={"mine": own})


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (Mechanism(sampling=Poisson(0.5)), r"mechanisms\['mine'\].sampling must draw 50 clients"),
        (Median(clip=1.0, sampling=FixedSize(50)), "Median takes neither noise nor weights"),
        (
            PrivateMask(sampling=FixedSize(50)),
            r"mechanisms\['mine'\] must have an epsilon that follows from noise_multiplier",
        ),
        (
            Mechanism(clip=1.0, client_noise=1.0, sampling=FixedSize(50)),
            r"mechanisms\['mine'\] must have no noise by its clients",
        ),
    ],
)
def test_a_mechanism_that_fits_no_plan_is_refused(mechanism, message):
    with pytest.raises(ValueError, match=message):
        plan(**SMALL, epsilon=1.0, kinds=("poisson",), mechanisms={"mine": mechanism})
