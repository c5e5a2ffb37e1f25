import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.local.masks import fisher_mask, merge
from jaxfl.local.penalties import distance, distance_to_bound, excess, proximal, safe_norm

ONES = {"w": jnp.array([True, True])}


def test_safe_norm_and_its_gradient_at_zero():
    assert safe_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0])}) == 5
    np.testing.assert_array_equal(jax.grad(safe_norm)(jnp.zeros(3)), np.zeros(3))
    np.testing.assert_allclose(jax.grad(safe_norm)(jnp.array([3.0, 4.0])), [0.6, 0.8], rtol=1e-6)


def test_proximal_gradient_is_mu_times_the_distance():
    center = {"w": jnp.array([1.0, -1.0])}
    w = {"w": jnp.array([4.0, 3.0])}
    np.testing.assert_allclose(jax.grad(proximal)(w, center, 0.5)["w"], [1.5, 2.0])
    assert proximal(center, center, 0.5) == 0


def test_distance_to_bound_pulls_from_both_sides():
    center = {"w": jnp.zeros(2)}
    far, at = {"w": jnp.array([3.0, 4.0])}, {"w": jnp.array([0.6, 0.8])}
    lam = 0.3
    assert distance_to_bound(far, center, ONES, 1.0, lam) == pytest.approx(2 * lam)
    np.testing.assert_allclose(
        jax.grad(distance_to_bound)(far, center, ONES, 1.0, lam)["w"],
        lam / 2 * np.array([0.6, 0.8]),
        rtol=1e-6,
    )
    assert distance_to_bound(at, center, ONES, 1.0, lam) == pytest.approx(0, abs=1e-7)
    assert distance_to_bound(center, center, ONES, 1.0, lam) == pytest.approx(lam / 2)
    np.testing.assert_array_equal(
        jax.grad(distance_to_bound)(center, center, ONES, 1.0, lam)["w"], [0, 0]
    )


def test_excess_is_felt_beyond_the_bound_alone():
    center = {"w": jnp.zeros(2)}
    far, inside, lam = {"w": jnp.array([3.0, 4.0])}, {"w": jnp.array([0.6, 0.7])}, 0.3
    assert excess(far, center, 1.0, lam) == pytest.approx(lam / 2 * 24)
    np.testing.assert_allclose(
        jax.grad(excess)(far, center, 1.0, lam)["w"], lam * np.array([3.0, 4.0]), rtol=1e-6
    )
    for params in (inside, center):
        assert excess(params, center, 1.0, lam) == 0
        np.testing.assert_array_equal(jax.grad(excess)(params, center, 1.0, lam)["w"], [0, 0])


def test_distance_counts_only_the_mask():
    center, w = {"w": jnp.zeros(2)}, {"w": jnp.array([3.0, 4.0])}
    assert distance(w, center, {"w": jnp.array([True, False])}, 2.0) == 3
    assert distance(w, center, {"w": jnp.array([False, False])}, 2.0) == 0


def test_fisher_mask_takes_the_threshold_in():
    fisher = {"w": jnp.array([0.0, 0.4, 1.0])}
    np.testing.assert_array_equal(fisher_mask(fisher, 0.4)["w"], [False, True, True])
    assert not fisher_mask(fisher, 1.1)["w"].any()
    assert fisher_mask(fisher, 0.0)["w"].all()


def test_merge_takes_bits_from_both():
    a, b = jnp.array([jnp.nan, 1.0]), jnp.array([2.0, jnp.inf])
    np.testing.assert_array_equal(merge(jnp.array([False, True]), a, b), [2.0, 1.0])
