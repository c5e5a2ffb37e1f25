"""Single layers, compared with NumPy, and squared gradients, compared with a loop over examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl.models.kernels.convolution import to_pairs
from jaxfl.models.layers import Convolution, Dense, GroupNorm


def _assert_close(found, expected):
    """Check equality up to 1e-5 of the largest value, because minimal filtering rounds by it."""
    np.testing.assert_allclose(
        found, expected, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(expected)))
    )


def _per_example_squares(layer, params, x, batch_axis):
    """Return sum_n (d f_n / d w)^2 by a loop over examples, each of which has its own weight."""

    def loss(p, example, n):
        y = layer.apply({"params": p}, jnp.expand_dims(example, batch_axis))
        return jnp.sum(jnp.sin(y) * (n + 1.0))

    count = x.shape[batch_axis]
    gradient = jax.jit(jax.grad(loss))
    gradients = [gradient(params, jnp.take(x, n, batch_axis), n) for n in range(count)]
    return jax.tree.map(lambda *g: sum(a * a for a in g), *gradients)


def _squares(layer, params, x, batch_axis, first):
    """Return the layer's own sum of squares, as a `first` layer or with a gradient by its input."""
    weights = jnp.arange(1.0, x.shape[batch_axis] + 1)
    shape = [1] * x.ndim
    shape[batch_axis] = -1

    def loss(p, x):
        y = layer.clone(sum_grad_squared=True).apply({"params": p}, x)
        return jnp.sum(jnp.sin(y) * weights.reshape(shape))

    return jax.jit(jax.grad(loss, (0,) if first else (0, 1)))(params, x)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Convolution(4, 3), (2, 9, 8, 5)),
        (Convolution(4, 3, padding=1), (2, 7, 6, 5)),
        (Convolution(4, 5, padding=1, pool=False), (3, 6, 7, 4)),
        (Convolution(4, 3, relu=False), (2, 6, 6, 5)),
        (Convolution(3, 5, pairs=True), (4, 11, 6, 3)),
        (Convolution(2, 3), (8, 9, 6, 3)),
        (Convolution(2, 5), (2, 14, 9, 3)),
        (Convolution(4, 3, padding=1, stride=2, pool=False, bias=False), (8, 7, 6, 3)),
        (GroupNorm(2), (4, 3, 5, 6)),
        (GroupNorm(2, relu=True), (4, 3, 5, 6)),
        (Dense(3), (6, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("first", [True, False])
def test_squares_equal_a_loop_over_examples(layer, shape, first):
    batch_axis = 0 if len(shape) == 2 else 3
    x = jax.random.normal(jax.random.key(0), shape)
    params = layer.init(jax.random.key(1), x)["params"]
    got = _squares(layer, params, x, batch_axis, first)
    jax.tree.map(_assert_close, got, _per_example_squares(layer, params, x, batch_axis))


def _assert_forms_agree(fast, x):
    params = fast.init(jax.random.key(1), x)["params"]

    def both(layer):
        value = lambda p, x: jnp.sum(jnp.sin(layer.apply({"params": p}, x)))  # noqa: E731
        return jax.jit(jax.value_and_grad(value, (0, 1)))(params, x)

    for form in ("im2col", "lax", "grouped", "blocks"):
        jax.tree.map(_assert_close, both(fast), both(fast.clone(form=form)))


@pytest.mark.parametrize(
    ("size", "padding", "pool", "channels", "high"),
    [
        (3, 0, True, 8, 9),  # tiles of 4 rows, the last one broken
        (3, 1, True, 8, 14),
        (3, 1, False, 8, 8),  # whole tiles
        (3, 1, True, 3, 9),  # few channels: all taps in one product
        (5, 0, True, 3, 14),  # tiles of 5 rows
        (5, 2, False, 3, 9),
        (5, 0, True, 8, 12),
        (1, 0, True, 3, 9),
    ],
)
def test_gradients_equal_those_of_the_other_forms(size, padding, pool, channels, high):
    x = jax.random.normal(jax.random.key(0), (channels, high, 8, 4))
    fast = Convolution(5, size, padding=padding, pool=pool)
    _assert_forms_agree(fast, x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "padding", "high", "wide"),
    [(3, 1, 8, 8), (3, 1, 7, 6), (3, 0, 9, 8), (5, 2, 8, 7), (2, 0, 6, 7)],
)
def test_stride_2_equals_the_other_forms(size, padding, high, wide):
    x = jax.random.normal(jax.random.key(0), (3, high, wide, 4))
    fast = Convolution(5, size, padding=padding, stride=2, pool=False, bias=False)
    _assert_forms_agree(fast, x)


def test_pairs_equal_pixels():
    x = jax.random.normal(jax.random.key(0), (3, 12, 10, 4))
    pixels = Convolution(6, 5, padding=2)
    params = pixels.init(jax.random.key(1), x)["params"]

    def both(layer, x):
        return jax.jit(
            jax.value_and_grad(lambda p: jnp.sum(jnp.sin(layer.apply({"params": p}, x))))
        )(params)

    padded = jnp.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
    jax.tree.map(
        _assert_close, both(Convolution(6, 5, pairs=True), to_pairs(padded)), both(pixels, x)
    )


def _group_norm(relu):
    x = np.random.default_rng(0).normal(2.0, 3.0, (6, 4, 5, 3)).astype(np.float32)
    shortcut = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    params = {
        "scale": np.arange(1, 7, dtype=np.float32),
        "bias": np.linspace(-1, 1, 6, dtype=np.float32),
    }
    return GroupNorm(3, relu=relu), *jax.tree.map(jnp.asarray, (params, x, shortcut))


@pytest.mark.parametrize("relu", [False, True])
def test_group_norm_against_numpy(relu):
    layer, params, x, shortcut = _group_norm(relu)
    groups = x.reshape(3, 2, 4, 5, 3)
    mean, var = groups.mean((1, 2, 3), keepdims=True), groups.var((1, 2, 3), keepdims=True)
    scale, bias = (params[name][:, None, None, None] for name in ("scale", "bias"))
    expected = ((groups - mean) / np.sqrt(var + 1e-5)).reshape(x.shape) * scale + bias
    for added in (None, shortcut):
        total = expected if added is None else expected + added
        got = np.asarray(layer.apply({"params": params}, x, added))
        np.testing.assert_allclose(
            got, np.maximum(total, 0) if relu else total, rtol=1e-4, atol=1e-4
        )


def _gradients(layer, *values):
    total = lambda params, *maps: jnp.sum(jnp.sin(layer.apply({"params": params}, *maps)))  # noqa: E731
    return jax.jit(jax.grad(total, (0, 1, 2)))(*values)


@pytest.mark.parametrize("relu", [False, True])
def test_group_norms_gradients_are_those_of_automatic_differentiation(relu):
    layer, *values = _group_norm(relu)
    jax.tree.map(
        _assert_close, _gradients(layer, *values), _gradients(layer.clone(form="lax"), *values)
    )


def test_group_norms_gradients_have_the_type_of_their_values():
    layer, *values = _group_norm(relu=True)
    half = jax.tree.map(lambda value: value.astype(jnp.bfloat16), values)
    assert {leaf.dtype for leaf in jax.tree.leaves(_gradients(layer, *half))} == {
        jnp.dtype("bfloat16")
    }
