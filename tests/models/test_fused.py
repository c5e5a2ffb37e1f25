"""The fused kernel, interpreted: against JAX's own convolution and pooling, and its way to a GPU's compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import small_clients
from jax import export

from jaxfl.algorithms import fedavg
from jaxfl.local.train import LocalSGD
from jaxfl.models import _fused
from jaxfl.models._fused import convolve_pooled
from jaxfl.models.layers import Convolution
from jaxfl.models.zoo import _cnn
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Full
from jaxfl.run.simulate import simulate

KEY = jax.random.key(3)


def plain(x, kernel, bias, padding):
    layer = Convolution(len(bias), len(kernel), padding=padding, form="lax")
    return layer.apply({"params": {"kernel": kernel, "bias": bias}}, x)


def arrays(channels, high, wide, batch, size, features):
    shapes = (channels, high, wide, batch), (size, size, channels, features), (features,)
    return [jax.random.normal(key, shape) for key, shape in zip(jax.random.split(KEY, 3), shapes, strict=True)]


def value_and_gradients(layer, values, padding):
    maps, back = jax.vjp(lambda *values: layer(*values, padding), *values)
    return maps, back(jax.random.normal(KEY, maps.shape))


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5), a, b)


@pytest.mark.parametrize(
    ("shape", "padding"),
    [
        ((2, 7, 6, 1, 2, 3), 0),
        pytest.param((3, 9, 11, 10, 3, 4), 1, marks=pytest.mark.slow),
        pytest.param((1, 12, 12, 4, 5, 6), 0, marks=pytest.mark.slow),
        pytest.param((2, 8, 8, 5, 5, 9), 2, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_equals_convolution_relu_and_pooling(shape, padding):
    values = arrays(*shape)
    assert_same(
        *(jax.jit(value_and_gradients, static_argnums=(0, 2))(f, values, padding) for f in (convolve_pooled, plain))
    )


def test_the_first_of_equal_numbers_gets_the_gradient_and_zero_gets_none():
    x, kernel, _ = arrays(1, 6, 6, 2, 1, 2)
    values = jnp.round(x), jnp.ones_like(kernel), jnp.array([0.0, -1.0])
    assert_same(*(value_and_gradients(f, values, 0) for f in (convolve_pooled, plain)))


def test_not_a_number_shows():
    x, *others = arrays(1, 4, 4, 1, 1, 1)
    found = convolve_pooled(x.at[0, 1, 1, 0].set(jnp.nan), *others, 0)
    np.testing.assert_array_equal(jnp.isnan(found), jnp.zeros(found.shape, bool).at[0, 0, 0, 0].set(True))


@pytest.mark.slow
def test_clients_may_use_it():
    def run(form):
        model = _cnn("tiny", [{"features": 2, "size": 2}], (), (8, 8, 1), 10, form)
        local, mechanism = LocalSGD(optax.sgd(0.1), 4), Mechanism(sampling=Full())
        algorithm = fedavg(model, local=local, mechanism=mechanism)
        return simulate(KEY, algorithm, small_clients(), rounds=1, chunk=3, progress=False)

    assert_same(run("pallas").server, run("lax").server)


@pytest.mark.parametrize("shape", [(1, 28, 28, 32, 5, 6), pytest.param((6, 14, 14, 10, 5, 16), marks=pytest.mark.slow)])
def test_a_gpus_compiler_takes_it(shape, monkeypatch):
    monkeypatch.setattr(_fused, "on_gpu", lambda: True)
    values = [jnp.stack([a, a]) for a in arrays(*shape)]
    program = jax.jit(jax.vmap(lambda *values: value_and_gradients(convolve_pooled, values, 0)))
    text = export.export(program, platforms=["cuda"])(*values).mlir_module()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3
