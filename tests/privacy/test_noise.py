"""Noise, sums and coins at the precision that the accountant takes for granted."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.privacy.mechanism import Poisson, coins

KEY = jax.random.key(3)


def words(value, count):
    """A whole number in words of 32 bits, the highest first."""
    return [value >> 32 * i & 0xFFFFFFFF for i in reversed(range(count))]


# Coins


@pytest.mark.parametrize("rate", [1e-8, 1e-6, 0.1, 0.5, 1 - 2**-53])
def test_a_coin_is_never_more_likely_than_stated(rate, monkeypatch):
    threshold = math.floor(fractions.Fraction(rate) * 2**64)
    drawn = np.array([words(threshold + i, 2) for i in (-2, -1, 0, 1)], np.uint32)
    monkeypatch.setattr("jax.random.bits", lambda *_, **__: jnp.asarray(drawn))
    assert Poisson(rate).sample(KEY, 4).tolist() == [True, True, False, False]
    swept = jax.jit(lambda rate: coins(KEY, 4, rate))(rate)  # a float32 below it
    assert swept.tolist() == [False, False, False, False]
    nearly = np.array([words(int(threshold * (1 - 3e-7)), 2)], np.uint32)
    monkeypatch.setattr("jax.random.bits", lambda *_, **__: jnp.asarray(nearly))
    assert jax.jit(lambda rate: coins(KEY, 1, rate))(rate).tolist() == [True]


def test_a_sure_coin_is_sure():
    assert Poisson(1.0).sample(KEY, 1000).all()
