"""Client states in rows: none is lost, and each client reads and writes only its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.engine.states import States

C = 5


def some_states():
    generator = np.random.default_rng(0)
    return {
        "kernel": generator.normal(size=(C, 3, 2)).astype(np.float32),
        "count": generator.integers(0, 9, C, np.int32),
        "half": jnp.asarray(generator.normal(size=(C, 4)), jnp.bfloat16),
        "bias": generator.normal(size=C).astype(np.float32),
        "nothing": np.zeros((C, 0), np.float32),
        "mask": (generator.random((C, 2)) < 0.5, ()),
    }


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)


def test_a_client_has_one_row_of_each_dtype():
    rows = States.of(some_states()).rows
    assert {name: leaf.shape for name, leaf in rows.items()} == {
        "float32": (C, 7), "int32": (C, 1), "bfloat16": (C, 4), "bool": (C, 2)
    }  # fmt: skip
    assert_same(States.of(some_states()).tree(), some_states())


def test_or_one_of_each_array():
    apart = States.of(some_states(), joined=False)
    assert [leaf.shape[1] for leaf in apart.rows.values()] == [1, 1, 4, 6, 2, 0]
    new = jax.tree.map(lambda leaf: leaf[0], some_states())
    expected = jax.tree.map(lambda leaf: jnp.asarray(leaf).at[3].set(leaf[0]), some_states())
    assert_same(jax.jit(States.put)(apart, jnp.int32(3), new).tree(), expected)


@pytest.mark.parametrize("slot", [3, np.array([4, 0]), np.array([[1, 2], [2, 4]])])
def test_rows_are_read_as_leaves_would_be(slot):
    found = jax.jit(lambda states, slot: states[slot])(States.of(some_states()), jnp.asarray(slot))
    assert_same(found, jax.tree.map(lambda leaf: leaf[slot], some_states()))


def test_each_lane_reads_its_own_row():
    slots = jnp.array([3, 0, 2])
    assert_same(
        jax.vmap(States.of(some_states()).__getitem__)(slots),
        jax.tree.map(lambda leaf: leaf[slots], some_states()),
    )


@pytest.mark.parametrize("slot", [2, C, [3, 0], [C, 1]])
def test_rows_are_written_as_leaves_would_be_and_those_of_no_client_nowhere(slot):
    slot = jnp.asarray(slot)
    new = jax.tree.map(
        lambda leaf: (jnp.asarray(leaf)[slot % 4] + 1).astype(leaf.dtype), some_states()
    )
    found = jax.jit(States.put)(States.of(some_states()), slot, new)
    written = lambda leaf, value: jnp.asarray(leaf).at[slot].set(value, mode="drop")  # noqa: E731
    assert_same(found.tree(), jax.tree.map(written, some_states(), new))


def test_points_of_a_sweep_have_a_further_axis():
    points = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), some_states())
    assert_same(jax.lax.map(States.of, points).tree(), points)


def test_a_method_without_states_has_no_rows():
    assert not jax.tree.leaves(States.of(()))
    assert States.of(()).put(jnp.int32(0), ()).tree() == ()


def test_keys_are_a_row_too():
    keys = jax.random.split(jax.random.key(0), C)
    found = States.of({"key": keys}).put(jnp.int32(1), {"key": keys[0]}).tree()["key"]
    assert (
        jax.random.key_data(found).tolist() == jax.random.key_data(keys.at[1].set(keys[0])).tolist()
    )
