"""Networks in the library's formulation, whose values and gradients equal the originals."""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxfl._support.backend import Form
from jaxfl.models.rewrite import in_form


def both(function, *arguments, form: Form = "winograd", around=lambda function: function):
    """Return outputs and gradients in the form and in the original, both within `around`."""

    def gradient(function):
        def total(*arguments):
            outputs = function(*arguments)
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(outputs)), outputs

        (_, outputs), slopes = jax.jit(
            jax.value_and_grad(total, tuple(range(len(arguments))), has_aux=True)
        )(*arguments)
        return outputs, slopes

    return gradient(around(in_form(function, form))), gradient(around(function))


def assert_close(found, expected, tolerance=2e-5):
    """Require equal shapes and dtypes, and equal numbers up to another order of their sums.

    The tolerance is relative to the largest absolute value of `expected`. The default allows for
    the form "winograd", whose rounding errors are ten times those of other forms.
    """

    def compare(found, expected):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        largest = float(jnp.max(jnp.abs(expected), initial=0))
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * (largest + 1e-3))

    jax.tree.map(compare, found, expected)


def random(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def convolution_of(draw):
    """Draw a convolution with random options, and the shape of its input."""
    axes = draw(st.integers(1, 3))
    sizes = st.tuples(*[st.integers(1, 5 if axes < 3 else 3)] * axes)
    steps = st.tuples(*[st.integers(1, 3)] * axes)
    kernel, dilation = draw(sizes), draw(steps)
    pads = st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 3))] * axes)
    names = ["SAME", "VALID", "CIRCULAR", "REFLECT", *(["CAUSAL"] if axes == 1 else [])]
    padding = draw(st.one_of(st.sampled_from(names), pads, st.integers(0, 2)))
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    channels, features = groups * draw(st.integers(1, 4)), groups * draw(st.integers(1, 3))
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    spatial = [draw(st.integers(r, r + 6)) for r in reach]
    layer = nn.Conv(
        features,
        kernel,
        strides=draw(steps),
        padding=padding,
        input_dilation=1 if isinstance(padding, str) else draw(st.one_of(st.just(1), steps)),
        kernel_dilation=dilation,
        feature_group_count=groups,
        use_bias=draw(st.booleans()),
        mask=random((*kernel, channels // groups, features), 3) > 0
        if draw(st.booleans())
        else None,
    )
    return layer, (draw(st.integers(1, 4)), *spatial, channels)


@pytest.mark.slow
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_convolutions_with_any_options_equal_lax(data):
    layer, shape = convolution_of(data.draw)
    x = random(shape)
    params = layer.init(jax.random.key(1), x)
    relu = data.draw(st.booleans())

    def network(params, x):
        y: Any = layer.apply(params, x)
        return nn.relu(y) if relu else y

    assert_close(
        *both(
            network,
            params,
            x,
            form=data.draw(st.sampled_from(["winograd", "im2col", "grouped"])),
        )
    )


OPTIONS = [
    ({"features": 6, "kernel_size": (3, 3), "padding": "VALID"}, (3, 9, 8, 8)),
    ({"features": 4, "kernel_size": (5, 2), "use_bias": False}, (2, 9, 7, 3)),
    ({"features": 4, "kernel_size": (3, 3), "strides": 2, "padding": 1}, (3, 8, 7, 2)),
    ({"features": 4, "kernel_size": (1, 1), "strides": (1, 3)}, (3, 4, 7, 2)),
    ({"features": 6, "kernel_size": (3,), "padding": "CAUSAL", "kernel_dilation": 2}, (3, 11, 2)),
    ({"features": 2, "kernel_size": (5,), "padding": "CIRCULAR"}, (3, 11, 8)),
    ({"features": 2, "kernel_size": (2, 3, 2), "strides": (1, 2, 1)}, (2, 4, 5, 3, 2)),
    ({"features": 6, "kernel_size": (3, 3), "strides": 2, "feature_group_count": 6}, (3, 7, 7, 6)),
    ({"features": 12, "kernel_size": (3, 3), "feature_group_count": 6}, (3, 5, 7, 6)),
    (
        {
            "features": 4,
            "kernel_size": (3, 3),
            "feature_group_count": 2,
            "input_dilation": 2,
            "padding": 1,
        },
        (3, 5, 4, 4),
    ),
    (
        {
            "features": 4,
            "kernel_size": (3, 3),
            "padding": ((2, 0), (0, 1)),
            "kernel_dilation": (2, 1),
        },
        (3, 7, 4, 4),
    ),
]


SQUARE = [
    ({"features": 4, "kernel_size": (4, 4)}, (3, 9, 8, 2)),
    ({"features": 4, "kernel_size": (3, 3), "strides": 2}, (3, 8, 7, 2)),
    ({"features": 4, "kernel_size": (1, 1), "strides": 2, "padding": 1}, (3, 8, 7, 2)),
]


@pytest.mark.parametrize(
    ("options", "shape", "form"),
    [
        *((*one, "winograd") for one in OPTIONS[:4]),
        *(pytest.param(*one, "winograd", marks=pytest.mark.slow) for one in OPTIONS[4:]),
        *((*one, "grouped") for one in (*OPTIONS[:4], *SQUARE)),
        *(pytest.param(*one, "grouped", marks=pytest.mark.slow) for one in OPTIONS[4:]),
    ],
)
def test_some_convolutions_equal_lax_for_clients_side_by_side(options, shape, form):
    layer, clients = nn.Conv(**options), 2
    x = random((clients, *shape))
    params = jax.vmap(layer.init, (0, None))(jax.random.split(jax.random.key(1), clients), x[0])
    assert_close(*both(layer.apply, params, x, form=form, around=jax.vmap))


def torch_options(options):
    renamed = {"strides": "stride", "kernel_dilation": "dilation", "feature_group_count": "groups"}
    return {renamed[key]: value for key, value in options.items() if key in renamed}


@pytest.mark.parametrize(
    "options",
    [
        {"features": 6, "kernel_size": (3, 3), "padding": 1},
        {"features": 6, "kernel_size": (5, 3), "padding": ((2, 2), (0, 0)), "strides": (2, 1)},
        {
            "features": 8,
            "kernel_size": (3, 3),
            "padding": 2,
            "kernel_dilation": 2,
            "feature_group_count": 4,
        },
        {
            "features": 4,
            "kernel_size": (3, 3),
            "padding": 1,
            "strides": 2,
            "feature_group_count": 4,
        },
    ],
)
def test_convolutions_and_pooling_equal_pytorch(options):
    torch = pytest.importorskip("torch")
    layer, x = nn.Conv(**options), random((3, 9, 9, 4))
    params: Any = layer.init(jax.random.key(1), x)["params"]

    def network(params, x):
        y: Any = layer.apply({"params": params}, x)
        return nn.max_pool(nn.relu(y), (3, 3), (2, 2), padding=((1, 1), (1, 1)))

    outputs, (d_params, dx) = both(network, params, x)[0]
    kernel, bias, inputs = (
        torch.tensor(np.array(array), requires_grad=True)
        for array in (
            params["kernel"].transpose(3, 2, 0, 1),
            params["bias"],
            x.transpose(0, 3, 1, 2),
        )
    )
    padding = options["padding"]
    padding = padding if isinstance(padding, int) else [before for before, _ in padding]
    y = torch.nn.functional.conv2d(inputs, kernel, bias, padding=padding, **torch_options(options))
    y = torch.nn.functional.max_pool2d(y.relu(), 3, 2, 1)
    y.sin().sum().backward()
    expected = {"kernel": kernel.grad.numpy().transpose(2, 3, 1, 0), "bias": bias.grad.numpy()}
    assert_close(outputs, y.detach().numpy().transpose(0, 2, 3, 1))
    assert_close((d_params, dx), (expected, inputs.grad.numpy().transpose(0, 2, 3, 1)))


POOLS = [
    functools.partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2)),
    functools.partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2), padding="SAME"),
    functools.partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2), padding="SAME"),
    functools.partial(nn.max_pool, window_shape=(2, 3), strides=(1, 3)),
    functools.partial(nn.max_pool, window_shape=(3, 2), strides=(3, 2)),
    functools.partial(nn.avg_pool, window_shape=(2, 2), strides=(2, 2)),
    functools.partial(
        nn.avg_pool, window_shape=(3, 3), strides=(1, 2), padding="SAME", count_include_pad=False
    ),
]


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: f"{pool.func.__name__} {pool.keywords}")
@pytest.mark.parametrize(
    ("before", "form"),
    [("convolution", "winograd"), ("nothing", "winograd"), ("nothing", "grouped")],
)
def test_pooling_equals_lax(pool, before, form):
    layer, x = nn.Conv(3, (3, 3)), random((2, 9, 8, 3))
    params = layer.init(jax.random.key(1), x)

    def network(params, x):
        y: Any = layer.apply(params, x)
        return pool(nn.relu(y) if before == "convolution" else x)

    assert_close(*both(network, params, x, form=form))


@pytest.mark.parametrize("form", ["winograd", "grouped"])
def test_ties_go_to_the_first_as_in_lax(form):
    x = jnp.round(random((4, 8, 6, 3)))
    for sizes, strides in (((2, 2), (2, 2)), ((3, 3), (2, 1))):
        weights = jnp.arange(1.0, 1 + nn.max_pool(x, sizes, strides).size)

        def total(x, sizes=sizes, strides=strides, weights=weights):
            return nn.max_pool(x, sizes, strides).reshape(-1) @ weights

        np.testing.assert_array_equal(jax.grad(in_form(total, form))(x), jax.grad(total)(x))


def relu_with_another_slope():
    @jax.custom_jvp
    def relu(x):
        return jnp.maximum(x, 0)

    relu.defjvps(lambda t, _, x: 3 * t)
    return relu


def shared(conv, x):
    """Return a feature map plus its ReLU, so that the map is read twice."""
    y = conv(x)
    return y + nn.relu(y)


def shortcut(conv, x):
    y = nn.relu(conv(x))[:, ::2, ::2]
    y = jnp.pad(y, ((0, 0), (0, 0), (1, 0), (0, 3)))
    return jnp.concatenate([y, -y], axis=3).swapaxes(1, 3)


def normalised(conv, x):
    return nn.GroupNorm(2).apply(
        {"params": {"scale": jnp.arange(1.0, 5), "bias": jnp.ones(4)}}, nn.relu(conv(x))
    )


def looped(conv, x):
    def step(y, _):
        return nn.tanh(conv(y)[..., :3]), y.mean()

    y, means = lax.scan(step, x, None, length=3)
    return lax.cond(means[0] > 0, conv, lambda y: 2 * conv(y), y)


NETWORKS = {
    "shared": shared,
    "shortcut": shortcut,
    "normalised": normalised,
    "in loops and branches": looped,
    "silu": lambda conv, x: nn.silu(conv(x)),
    "dropout": lambda conv, x: jnp.where(
        random((*x.shape[:3], 4), 5) > 0, nn.relu(conv(x)) / 0.5, 0
    ),
    "relu6 and dropout": lambda conv, x: jnp.where(
        random((*x.shape[:3], 4), 5) > 0, nn.relu6(conv(x)), 0
    ),
    "mean": lambda conv, x: nn.relu(conv(x)).mean((1, 2)),
    "max over channels": lambda conv, x: conv(x).max(-1),
    "recomputed": lambda conv, x: jax.checkpoint(lambda x: nn.relu(conv(x)))(x),
    "an own slope": lambda conv, x: relu_with_another_slope()(conv(x)),
    "relu after pooling": lambda conv, x: nn.relu(nn.max_pool(conv(x), (2, 2), (2, 2))),
    "bias twice": lambda conv, x: conv(x) + jnp.arange(4.0)[None, None, None],
    "bias of rows": lambda conv, x: conv(x) + jnp.arange(8.0)[None, :, None, None],
    "flattened": lambda conv, x: conv(x).reshape(len(x), -1) @ random((256, 3), 7),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "winograd") for name in NETWORKS),
        ("in loops and branches", "grouped"),
        ("recomputed", "grouped"),
    ],
)
def test_what_follows_a_convolution_keeps_its_values(name, form):
    layer, x = nn.Conv(4, (3, 3), use_bias=name != "bias of rows"), random((3, 8, 8, 3))
    params = layer.init(jax.random.key(1), x)
    assert_close(
        *both(lambda p, x: NETWORKS[name](lambda x: layer.apply(p, x), x), params, x, form=form)
    )


@pytest.mark.parametrize("form", ["winograd", "grouped"])
def test_channels_may_come_first(form):
    kernel, bias, x = random((5, 3, 3, 3)), random((5, 1, 1), 1), random((2, 3, 8, 8), 2)

    def network(kernel, bias, x):
        y = nn.relu(lax.conv(x, kernel, (1, 1), "SAME") + bias[None])
        return lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")

    assert_close(*both(network, kernel, bias, x, form=form))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_halves_stay_halves(dtype):
    layer, x = nn.Conv(4, (3, 3), dtype=dtype), random((3, 8, 8, 3))
    params = layer.init(jax.random.key(1), x)
    assert_close(*both(layer.apply, params, x), tolerance=50 * float(jnp.finfo(dtype).eps))


def test_the_form_of_choice_leaves_no_convolution_of_lax():
    layer, x = nn.Conv(4, (3, 3), strides=2), random((3, 8, 8, 3))
    params = layer.init(jax.random.key(1), x)
    names = {
        form: str(jax.make_jaxpr(in_form(layer.apply, form))(params, x))
        for form in ("winograd", "lax")
    }
    assert "conv_general_dilated" not in names["winograd"]
    assert "conv_general_dilated" in names["lax"]


def test_clients_convolutions_can_be_grouped_and_pooling_is_no_window_of_lax():
    layer, x = nn.Conv(4, (3, 3)), random((2, 3, 8, 8, 3))
    params = jax.vmap(layer.init, (0, None))(jax.random.split(jax.random.key(1)), x[0])

    def network(params, x):
        return nn.max_pool(nn.relu(jnp.asarray(layer.apply(params, x))), (2, 2), (2, 2)).sum()

    def program(form):
        own = in_form(network, form)
        return str(jax.make_jaxpr(jax.vmap(jax.grad(own, (0, 1))))(params, x))

    assert "conv_general_dilated" not in program(None)
    grouped = program("grouped")
    assert grouped.count("feature_group_count=2") == 2  # forward, and by the maps
    assert grouped.count("batch_group_count=2") == 1  # by the kernel
    assert not {"reduce_window", "select_and_scatter"} & set(re.findall(r"\w+", grouped))


def test_a_convolution_that_is_read_twice_is_computed_once():
    layer, x = nn.Conv(4, (3, 3)), random((3, 8, 8, 3))
    params = layer.init(jax.random.key(1), x)
    program = jax.make_jaxpr(
        in_form(lambda p, x: shared(lambda x: layer.apply(p, x), x), "im2col")
    )(params, x)
    assert str(program).count(" dot_general[") == 1


def test_nnx_layers_are_covered_too():
    layer, x = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0)), random((3, 8, 8, 3))
    graph, state = nnx.split(layer)
    assert_close(*both(lambda state, x: nn.relu(nnx.merge(graph, state)(x)), state, x))
