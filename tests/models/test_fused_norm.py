"""The fused group normalisation, interpreted: against the CPU's rule, and its way to a GPU's compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.models import _fused, _fused_norm
from jaxfl.models._fused_norm import normalize_fused
from jaxfl.models._group_norm import NormOptions, normalize
from jaxfl.models.layers import GroupNorm

KEY = jax.random.key(5)


def arrays(clients, channels, high, wide, batch, shortcut):
    maps, *vectors = (
        (clients, channels, high, wide, batch),
        (clients, channels),
        (clients, channels),
    )
    x, added, change, scale, bias = (
        jax.random.normal(key, shape)
        for key, shape in zip(jax.random.split(KEY, 5), (maps, maps, maps, *vectors))
    )
    return 3 * x + 1, added if shortcut else None, scale, bias, change


def client(values, i):
    return jax.tree.map(lambda leaf: leaf[i], values)


def value_and_gradients(rule, options):
    def of_one(*values):
        *inputs, change = values
        maps, back = jax.vjp(lambda *inputs: rule(*inputs, options), *inputs)
        return maps, back(change)

    return of_one


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), a, b)


@pytest.mark.parametrize(
    ("shape", "groups", "relu"),
    [
        ((2, 16, 16, 24, 2, True), 2, True),  # pixels in two parts
        ((1, 8, 8, 8, 3, False), 1, False),
        pytest.param((3, 16, 32, 32, 2, True), 2, True, marks=pytest.mark.slow),  # in four
        pytest.param((2, 24, 40, 8, 1, False), 1, True, marks=pytest.mark.slow),
    ],
)
def test_equals_the_rule_for_cpus_with_its_gradients(shape, groups, relu):
    values, options = arrays(*shape), NormOptions(groups, 1e-5, relu, False)
    assert_same(
        *(
            jax.jit(jax.vmap(value_and_gradients(f, options)))(*values)
            for f in (normalize_fused, normalize)
        )
    )


def test_one_client_and_parameters_that_clients_share():
    *maps, scale, bias, change = arrays(2, 8, 8, 8, 2, True)
    alone = value_and_gradients(normalize_fused, NormOptions(1, 1e-5, True, False))
    shared = jax.vmap(alone, (0, 0, None, None, 0))(*maps, scale[0], bias[0], change)
    for i in range(2):
        assert_same(client(shared, i), alone(*client(maps, i), scale[0], bias[0], change[i]))


def test_moments_of_numbers_far_from_zero():
    x = 1000 + jax.random.normal(KEY, (8, 8, 8, 1))
    y = normalize_fused(x, None, jnp.ones(8), jnp.zeros(8), NormOptions(1, 0.0, False, False))
    expected = np.asarray(x, np.float64)
    np.testing.assert_allclose(y, (expected - expected.mean()) / expected.std(), atol=1e-3)


def test_not_a_number_shows():
    x = jnp.ones((8, 8, 8, 2)).at[3, 1, 1, 1].set(jnp.nan)
    y = normalize_fused(x, None, jnp.ones(8), jnp.zeros(8), NormOptions(1, 1e-5, True, False))
    np.testing.assert_array_equal(jnp.isnan(y).all((0, 1, 2)), [False, True])


@pytest.mark.parametrize("channels", [16, 12])  # 6 channels a group are no whole tile
def test_a_layer_takes_it_where_its_maps_are_whole_tiles(channels, monkeypatch):
    for module in (_fused, _fused_norm):
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    layer = GroupNorm(2, relu=True, form="pallas")
    x, vector = (
        jax.ShapeDtypeStruct((2, *shape), jnp.float32)
        for shape in ((channels, 8, 8, 3), (channels,))
    )

    def total(scale, bias, x):
        return jnp.sum(jnp.asarray(layer.apply({"params": {"scale": scale, "bias": bias}}, x)))

    gradient = jax.jit(jax.vmap(jax.grad(total, (0, 1, 2)))).trace(vector, vector, x)
    text = gradient.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == (2 if channels == 16 else 0)
