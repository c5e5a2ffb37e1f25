import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.privacy.accounting.accountants import default_delta
from jaxfl.privacy.clip import clip
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism, PrivacyFilter
from jaxfl.privacy.mechanisms.gaussian import round_numbers, server_noise
from jaxfl.privacy.noise import add_gaussian
from jaxfl.privacy.sampling import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Full,
    MinSeparation,
    Poisson,
)


def test_clip_closed_forms():
    clipped, norm = clip({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, 1.0)
    assert norm == 5
    np.testing.assert_allclose([clipped["a"][0], clipped["b"][0]], [0.6, 0.8], rtol=1e-6)
    zero, norm = clip({"a": jnp.zeros(3)}, 1.0)
    assert norm == 0
    np.testing.assert_array_equal(zero["a"], np.zeros(3))
    np.testing.assert_array_equal(clip(jnp.array([0.3]), 1.0)[0], jnp.array([0.3]))
    np.testing.assert_array_equal(clip(jnp.array([30.0]), math.inf)[0], [30.0])


def test_clip_is_joint_over_tensors():
    clipped, _ = clip({"a": jnp.array([2.0]), "b": jnp.array([2.0])}, 2.0)
    np.testing.assert_allclose(clipped["a"], 2 / math.sqrt(2), rtol=1e-6)


def test_noise_moments():
    noisy = add_gaussian(
        jax.random.key(0), {"a": jnp.zeros(40_000), "b": jnp.ones((100, 400))}, jnp.float32(3.0)
    )
    for leaf, mean in ((noisy["a"], 0), (noisy["b"], 1)):
        assert float(leaf.mean()) == pytest.approx(mean, abs=4 * 3 / 200)
        assert float(leaf.std()) == pytest.approx(3, rel=4 / math.sqrt(80_000))
    assert abs(np.corrcoef(noisy["a"], noisy["b"].ravel())[0, 1]) < 4 / 200


def cohorts(sampling, clients, rounds):
    """Return the cohorts [rounds, clients] of a run, as a mechanism draws them."""
    mechanism = Mechanism(sampling=sampling)
    draw = jax.jit(lambda t: mechanism.draw(jax.random.key(5), (), t, clients).sampled)
    return np.stack([draw(t) for t in range(rounds)])


@pytest.mark.parametrize("sampling", [CyclicPoisson(0.05, 4), MinSeparation(30, separation=4)])
def test_rounds_of_a_client_are_separated(sampling):
    drawn = cohorts(sampling, 1001, 24)
    for client in drawn.T:
        assert np.all(np.diff(np.flatnonzero(client)) % 4 == 0)
    assert not np.any(drawn & ~sampling.possible(1001, 24))
    assert sampling.possible(1001, 24).sum(axis=0).tolist() == [6] * 1001
    sizes = drawn.sum(axis=1)
    if isinstance(sampling, MinSeparation):
        assert set(sizes) == {30}
    else:
        assert sizes.mean() == pytest.approx(50, abs=4 * math.sqrt(1001 * 0.05 * 0.8 / 24))
    share = (
        drawn[:4].any(axis=0).reshape(7, 143).mean(axis=1)
    )  # neighbours in number are not in one group
    assert share.std() < 0.06


def test_each_client_takes_part_once_an_epoch():
    drawn = cohorts(BallsInBins(6), 3000, 18)
    epochs = drawn.reshape(3, 6, 3000)
    np.testing.assert_array_equal(epochs.sum(axis=1), 1)
    bins = epochs.argmax(axis=1)
    counts = np.stack([np.bincount(own, minlength=6) for own in bins])
    np.testing.assert_allclose(counts, 500, atol=5 * math.sqrt(500 * 5 / 6))
    assert abs(np.corrcoef(bins[0], bins[1])[0, 1]) < 5 / math.sqrt(3000)  # epochs are independent


@pytest.mark.parametrize("sampling", [Poisson(0.3), FixedSize(300), Full()])
def test_samplers_draw_what_they_say(sampling):
    drawn = np.stack([sampling.sample(jax.random.key(i), 1000, 0) for i in range(20)])
    sizes = drawn.sum(axis=1)
    if isinstance(sampling, Poisson):
        assert sizes.mean() == pytest.approx(300, abs=4 * math.sqrt(1000 * 0.3 * 0.7 / 20))
        assert sizes.std() == pytest.approx(math.sqrt(210), rel=0.5)
        coins = drawn.mean(axis=0)  # independent and equally fair for every client
        assert coins.std() == pytest.approx(math.sqrt(0.21 / 20), rel=0.1)
        np.testing.assert_array_equal(sampling.sample(jax.random.key(0), 500, 0), drawn[0, :500])
    else:
        assert set(sizes) == {sampling.expected(1000)}
        assert isinstance(sampling, Full) or not np.array_equal(drawn[0], drawn[1])


def test_server_tops_up_to_the_target():
    mechanism = Mechanism(
        clip=2.0, noise_multiplier=3.0, client_noise=1.0, weights=np.array([1.0, 2.0])
    )
    numbers = round_numbers(mechanism, 2, jnp.int32(5))
    assert server_noise(numbers, jnp.float32(5.0)) == pytest.approx(math.sqrt(36 - 5))
    assert server_noise(numbers, jnp.float32(40.0)) == 0
    assert numbers.denominator == 3


def test_tables_by_round():
    mechanism = Mechanism(
        clip=1.0, noise_multiplier=(1.0, 2.0, 4.0), client_noise=np.array([0.1, 0.2, 0.3])
    )
    numbers = [round_numbers(mechanism, 7, jnp.int32(t)) for t in range(3)]
    assert [float(n.noise_multiplier) for n in numbers] == [1, 2, 4]
    np.testing.assert_allclose([n.client_noise[0] for n in numbers], [0.1, 0.2, 0.3], rtol=1e-6)
    assert float(round_numbers(Mechanism(sampling=Poisson(0.5)), 8, jnp.int32(0)).denominator) == 4


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"clip": 0.0}, "clip"),
        ({"clip": -1.0}, "clip"),
        ({"noise_multiplier": 1.0}, "clip"),
        ({"clip": 1.0, "noise_multiplier": -1.0}, "noise_multiplier"),
        ({"clip": 1.0, "noise_multiplier": math.nan}, "noise_multiplier"),
        ({"clip": 1.0, "client_noise": math.inf}, "client_noise"),
        (
            {"clip": 1.0, "noise_multiplier": 1e9},
            r"noise_multiplier must be at most 1e\+08, got 1000000000.0",
        ),
        ({"weights": np.array([-1.0])}, "weights"),
        # single precision squares these to 0 or infinity, and the ledger's check would tell after the last round
        (
            {"clip": 1.0, "noise_multiplier": 1e-30},
            "noise_multiplier must be 0 or from .* float32 squares it, got 1e-30",
        ),
        (
            {"clip": 1.0, "noise_multiplier": (1.0, 1e20)},
            r"noise_multiplier must be 0 or from .* got 1e\+20",
        ),
        ({"clip": 1.0, "client_noise": np.array([[1.0, 1e-25]])}, "client_noise must .* got 1e-25"),
        ({"weights": np.array([0.0, 1e-25])}, "weights must .* got 1e-25"),
        ({"weights": np.array([1.0, 1e30])}, r"weights must .* got 1e\+30"),
        (
            {"clip": 1.0, "noise_multiplier": 1e-12, "weights": np.full(2, 1e-12)},
            "noise_multiplier times weights must .* got 1e-24",
        ),
        ({"clip": 1e-20}, "clip must be from 1e-10 .* got 1e-20"),
        ({"clip": 1e30}, r"clip must be from .* got 1e\+30"),
    ],
)
def test_wrong_numbers_name_themselves(wrong, name):
    with pytest.raises(ValueError, match=name):
        Mechanism(**wrong)


def test_a_clip_at_the_limit_clips():
    """The least clip bound holds to 1e-5 of its value, and smaller bounds raise an error."""
    update = jnp.full(10_000, 1e-10)
    clipped, _ = clip(update, 1e-10)
    assert np.linalg.norm(np.asarray(clipped, np.float64)) == pytest.approx(1e-10, rel=1e-5)
    with pytest.raises(ValueError, match=r"clip must be from 1e-10 .* got 1e-11"):
        DPSGD(clip=1e-11, noise_multiplier=1.0, rate=0.1, steps=1)
    with pytest.raises(ValueError, match=r"noise_multiplier must .* got 1e-30"):
        DPSGD(clip=1.0, noise_multiplier=1e-30, rate=0.1, steps=1)


def test_tiny_weights_beside_others_are_fine():
    Mechanism(clip=1.0, noise_multiplier=1.0, client_noise=1.0, weights=np.array([1.0, 1e-30]))


def test_a_filter_whose_square_vanishes_is_refused():
    with pytest.raises(ValueError, match=r"least_total must .* got 1e-25"):
        PrivacyFilter(clip=1.0, client_noise=1.0, least_total=1e-25)


def test_default_delta():
    assert [default_delta(n) for n in (1, 10_000, 20_000, 10**6)] == [1e-5, 1e-5, 5e-6, 1e-7]


@pytest.mark.parametrize(("sampling", "value"), [(Poisson, 0.0), (Poisson, 1.5), (FixedSize, 0)])
def test_wrong_sampling(sampling, value):
    with pytest.raises(ValueError, match=repr(value)):
        sampling(value)


def test_tables_must_fit_the_run():
    with pytest.raises(ValueError, match=r"size must be .* got 20"):
        Mechanism(sampling=FixedSize(20)).check_fits(10, 5)
    with pytest.raises(ValueError, match="weights"):
        Mechanism(weights=np.ones(3)).check_fits(10, 5)
    with pytest.raises(ValueError, match="noise_multiplier"):
        Mechanism(clip=1.0, noise_multiplier=(1.0, 2.0)).check_fits(10, 5)
