import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfl.local.fisher import normalize_over_all
from jaxfl.local.masks import (
    keep,
    random_masks,
    sparsify,
    top_k_mask,
    top_k_masks,
    top_percentile_mask,
)

mask_of_top_k = jax.jit(top_k_mask, static_argnums=1)


def by_sorting(values, count):
    """Return the mask by its definition: a stable sort by falling magnitude."""
    mask = np.zeros(values.size, bool)
    mask[np.argsort(-np.abs(values.ravel()), kind="stable")[:count]] = True
    return mask.reshape(values.shape)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, -3e38, 1e-45, 7.25]),
        min_size=12,
        max_size=12,
    ),
    st.integers(1, 12),
)
def test_top_k_is_the_head_of_a_stable_sort(values, count):
    values = np.array(values, np.float32).reshape(3, 4)
    np.testing.assert_array_equal(mask_of_top_k(values, count), by_sorting(values, count))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_mask_does_not_hide_what_is_not_finite(value):
    tree = {"a": jnp.arange(4.0), "b": jnp.ones((2, 2))}
    mask = {"a": jnp.array([True, False, True, True]), "b": jnp.zeros((2, 2), bool)}
    jax.tree.map(np.testing.assert_array_equal, sparsify(mask, tree), keep(mask, tree))
    tree["a"] = tree["a"].at[1].set(value)
    assert all(jnp.isnan(leaf).all() for leaf in jax.tree.leaves(sparsify(mask, tree)))


def test_top_k_of_many_values_and_of_clients_together():
    values = np.random.default_rng(0).normal(size=(3, 50, 41)).astype(np.float32)
    found = jax.vmap(lambda v: top_k_mask(v, 103))(jnp.asarray(values))
    np.testing.assert_array_equal(found, np.stack([by_sorting(v, 103) for v in values]))


def test_equal_values_keep_the_first():
    np.testing.assert_array_equal(top_k_mask(jnp.ones(5), 2), [True, True, False, False, False])


PARAMS = {
    "first": {"kernel": jnp.arange(10.0).reshape(5, 2), "bias": jnp.zeros(2)},
    "last": {"kernel": -jnp.arange(20.0).reshape(2, 10), "bias": jnp.zeros(10)},
}


@pytest.mark.parametrize("density", [0.01, 0.05, 0.7, 1.0])
def test_only_kernels_of_named_layers_are_sparse(density):
    for masks in (
        top_k_masks(PARAMS, ["last"], density),
        random_masks(jax.random.key(0), PARAMS, ["last"], density),
    ):
        kept = jax.tree.map(lambda mask: int(mask.sum()), masks)
        assert kept["first"] == {"kernel": 10, "bias": 2}
        assert kept["last"] == {"kernel": max(1, math.ceil(20 * density)), "bias": 10}


def test_random_masks_follow_the_key_and_grow_with_the_density():
    one, same, other = (
        random_masks(jax.random.key(k), PARAMS, ["first", "last"], 0.3) for k in (0, 0, 1)
    )
    wider = random_masks(jax.random.key(0), PARAMS, ["first", "last"], 0.6)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, same))
    assert not jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, other))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a <= b).all()), one, wider))


def test_above_a_percentile_of_all_tensors():
    """The 80th percentile of the numbers 0 to 9 is 7.2."""
    fisher = {
        "a": jnp.array([3.0, 9.0, 1.0, 0.0]),
        "b": jnp.array([[8.0, 2.0, 7.0], [6.0, 5.0, 4.0]]),
    }
    found = top_percentile_mask(fisher, 80.0)
    np.testing.assert_array_equal(found["a"], [0, 1, 0, 0])
    np.testing.assert_array_equal(found["b"], [[1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("percentile", [0.0, 10.0, 50.0, 80.0, 99.9])
def test_as_many_as_numpy_finds_above_a_percentile(percentile):
    values = np.random.default_rng(0).normal(size=1001).astype(np.float32)
    found = top_percentile_mask(
        {"a": jnp.asarray(values[:300]), "b": jnp.asarray(values[300:])}, percentile
    )
    expected = np.abs(values) > np.percentile(np.abs(values), percentile)
    np.testing.assert_array_equal(np.r_[found["a"], found["b"]], expected)


@pytest.mark.parametrize("size", [11, 1001, pytest.param(62_006, marks=pytest.mark.slow)])
def test_a_percentile_of_a_sweep_keeps_as_many(size):
    values = jnp.asarray(np.random.default_rng(0).permutation(size), jnp.float32)
    kept = jax.jit(lambda percentile: top_percentile_mask(values, percentile).sum())
    for percentile in (0.0, 10.0, 30.0, 60.0, 70.0, 80.0, 90.0, 99.0):
        assert kept(percentile) == top_percentile_mask(values, percentile).sum()


def test_thresholds_of_fisher_information_scaled_over_all_tensors():
    fisher = normalize_over_all({"a": jnp.array([1.0, 2.0]), "b": jnp.array([5.0, 3.0])})
    np.testing.assert_array_equal(fisher["a"], [0, 0.25])
    np.testing.assert_array_equal(fisher["b"], [1, 0.5])
    assert not any(
        leaf.any()
        for leaf in jax.tree.leaves(normalize_over_all({"a": jnp.ones(2), "b": jnp.ones(3)}))
    )
