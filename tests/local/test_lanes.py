"""Loops of vectorised clients whose lengths differ."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxfl._support.backend import backend
from jaxfl.local.lanes import begin, hold, longest

BOUNDS = jnp.array([0, 3, 1])


def counted(longest, hold):
    """Return a function that counts the steps of a loop and adds up their indices."""

    def count(bound, start):
        def step(i, carry):
            steps, total = carry
            return hold(i < bound, (steps + 1, total + i), carry)

        return lax.fori_loop(0, longest(bound), step, (0, start))

    return count


count, plain = counted(longest, hold), counted(lambda bound: bound, lambda active, new, old: new)


def test_lanes_end_at_their_own_bounds():
    steps, totals = jax.vmap(count)(BOUNDS, jnp.array([5.0, 6.0, 7.0]))
    np.testing.assert_array_equal(steps, BOUNDS)
    np.testing.assert_array_equal(totals, [5, 6 + 0 + 1 + 2, 7])


@pytest.mark.parametrize(("function", "shape"), [(count, ()), (plain, (3,))])
def test_all_lanes_share_the_index(function, shape):
    program = jax.make_jaxpr(jax.vmap(function))(BOUNDS, jnp.zeros(3))
    (loop,) = (equation for equation in program.eqns if equation.primitive.name == "while")
    assert loop.outvars[0].aval.shape == shape


def operations(function):
    """Return the operations of a compiled program, without their places in the source."""
    # Since JAX 0.12, the loop has the bound twice until XLA optimises it.
    program = jax.jit(function).lower(2, 0.0).compile().as_text() or ""
    return re.findall(r"^ +\S+ = .*?(?=, metadata=|$)", program, re.MULTILINE)


def test_one_client_has_the_plain_program():
    assert operations(count) == operations(plain)
    assert len(operations(plain)) > 5


def test_lanes_of_lanes():
    bounds = jnp.array([[0, 3], [2, 1]])
    steps, totals = jax.vmap(jax.vmap(count))(bounds, jnp.zeros((2, 2)))
    np.testing.assert_array_equal(steps, bounds)
    np.testing.assert_array_equal(totals, [[0, 3], [1, 0]])
    by_outer = jax.vmap(lambda bound: jax.vmap(count, (None, 0))(bound, jnp.zeros(2))[0])(BOUNDS)
    np.testing.assert_array_equal(by_outer, np.repeat(BOUNDS[:, None], 2, 1))


def test_on_gpus_leaves_of_one_shape_are_written_together(monkeypatch):
    """The leaves read one array, because XLA requires this of one kernel. No number changes."""

    def run(step, *leaves):
        def add(i, carry):
            return hold(i < 3, tuple(leaf + step for leaf in carry), carry)

        return lax.fori_loop(0, longest(3), add, begin(leaves))

    def traced():  # anew: JAX keeps what it has traced of a function
        program = jax.jit(jax.vmap(run, (0, *[None] * 5))).trace(*arguments)
        return str(program.jaxpr), program.lower().compile()(*arguments)

    arguments = jnp.arange(2.0), *(jnp.full(3, float(i)) for i in range(4)), jnp.ones(1)
    program, expected = traced()
    assert "name=_where" not in program
    assert "optimization_barrier" not in program
    monkeypatch.setattr("jaxfl.local.lanes.backend", lambda: backend("gpu"))
    program, found = traced()
    assert program.count("name=_where") == 4
    jax.tree.map(np.testing.assert_array_equal, found, expected)
