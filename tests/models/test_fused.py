"""The interpreted fused kernel, compared with JAX's convolution and pooling, and its lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import small_clients
from jax import export

from jaxfl.algorithms import fedavg
from jaxfl.local.train import LocalSGD
from jaxfl.models.kernels import fused
from jaxfl.models.kernels.fused import convolve_pooled
from jaxfl.models.layers import Convolution, as_floats
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
    return [
        jax.random.normal(key, shape)
        for key, shape in zip(jax.random.split(KEY, 3), shapes, strict=True)
    ]


def value_and_gradients(layer, values, padding):
    maps, back = jax.vjp(lambda *values: layer(*values, padding), *values)
    return maps, back(jax.random.normal(KEY, maps.shape))


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5), a, b)


@pytest.mark.parametrize(
    ("shape", "padding"),
    [
        ((2, 7, 6, 1, 2, 3), 0),
        ((1, 4, 9, 32, 2, 2), 0),  # an input reaches into the next block of gradients
        pytest.param((3, 9, 11, 10, 3, 4), 1, marks=pytest.mark.slow),
        pytest.param((1, 12, 12, 4, 5, 6), 0, marks=pytest.mark.slow),
        pytest.param((2, 8, 8, 5, 5, 9), 2, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_equals_convolution_relu_and_pooling(shape, padding):
    values = arrays(*shape)
    assert_same(
        *(
            jax.jit(value_and_gradients, static_argnums=(0, 2))(f, values, padding)
            for f in (convolve_pooled, plain)
        )
    )


def test_the_first_of_equal_numbers_gets_the_gradient_and_zero_gets_none():
    x, kernel, _ = arrays(1, 6, 6, 2, 1, 2)
    values = jnp.round(x), jnp.ones_like(kernel), jnp.array([0.0, -1.0])
    assert_same(*(value_and_gradients(f, values, 0) for f in (convolve_pooled, plain)))


def test_not_a_number_shows():
    x, kernel, bias = arrays(1, 4, 4, 1, 1, 1)
    found = convolve_pooled(x.at[0, 1, 1, 0].set(jnp.nan), kernel, bias)
    np.testing.assert_array_equal(
        jnp.isnan(found), jnp.zeros(found.shape, bool).at[0, 0, 0, 0].set(True)
    )


def layered(layer, x, *weights, **parts):
    for kernel, bias in weights:
        x = layer(x, kernel, bias, 0, **{name: of.pop(0) for name, of in parts.items()})
    return x


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (
            (1, 14, 13, 32),
            (3, 3),
        ),  # short vectors: what is read beyond a block, and beyond the last one
        pytest.param((2, 11, 9, 3), (3, 2), marks=pytest.mark.slow),
        pytest.param((1, 15, 16, 1), (2, 2, 2), marks=pytest.mark.slow),
        pytest.param((3, 33, 37, 4), (5, 5), marks=pytest.mark.slow),
    ],
)
def test_a_layer_reads_what_another_one_wrote(shape, sizes):
    keys = jax.random.split(KEY, len(sizes) + 1)
    x, weights, channels = jax.random.normal(keys[-1], shape), [], shape[0]
    for key, size in zip(keys, sizes, strict=False):
        kernel = jax.random.normal(key, (size, size, channels, channels + 1))
        weights.append((kernel, jax.random.normal(key, (channels + 1,))))
        channels += 1

    def gradients(layer, **parts):
        maps, back = jax.vjp(lambda x, *weights: layered(layer, x, *weights, **parts), x, *weights)
        return maps, back(jax.random.normal(KEY, maps.shape))

    parts = [2**i for i in range(len(sizes))][::-1]
    assert_same(
        jax.jit(lambda: gradients(convolve_pooled, parts=parts))(),
        jax.jit(lambda: gradients(plain))(),
    )


def test_bytes_are_read_as_they_are():
    x, *weights = arrays(1, 10, 9, 3, 3, 2)
    pixels = jnp.uint8(jnp.clip(100 + 60 * x, 0, 255))

    def gradients(x):
        maps, back = jax.vjp(lambda *weights: convolve_pooled(x, *weights), *weights)
        return maps, back(jnp.ones(maps.shape))

    assert_same(*(jax.jit(gradients)(x) for x in (pixels, as_floats(pixels))))


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, 1])
def test_clients_may_use_it(padding):
    def run(form):
        layers = [{"features": 2, "size": 2, "padding": padding}, {"features": 3, "size": 2}]
        model = _cnn("tiny", layers, (), (8, 8, 1), 10, form)
        local, mechanism = LocalSGD(optax.sgd(0.1), 4), Mechanism(sampling=Full())
        algorithm = fedavg(model, local=local, mechanism=mechanism)
        return simulate(KEY, algorithm, small_clients(), rounds=1, chunk=3, progress=False)

    assert_same(run("pallas").server, run("lax").server)


@pytest.mark.parametrize(
    "shape", [(1, 28, 28, 32, 5, 6), pytest.param((6, 14, 14, 10, 5, 16), marks=pytest.mark.slow)]
)
def test_a_gpus_compiler_takes_it(shape, monkeypatch):
    monkeypatch.setattr(fused, "on_gpu", lambda: True)
    values = [jnp.stack([a, a]) for a in arrays(*shape)]
    program = jax.jit(jax.vmap(lambda *values: value_and_gradients(convolve_pooled, values, 0)))
    text = export.export(program, platforms=["cuda"])(*values).mlir_module()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3
