import functools
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxfl._support.backend import Form, backend
from jaxfl.models import build, digits_cnn, feddpa_cnn, lenet, lenet_groupnorm, mlp, resnet20
from jaxfl.models.layers import Convolution

MODELS = {
    "lenet": lenet,
    "lenet_groupnorm": lenet_groupnorm,
    "feddpa_cifar10": functools.partial(feddpa_cnn, "cifar10"),
    "feddpa_mnist": functools.partial(feddpa_cnn, "mnist"),
    "digits_cnn": digits_cnn,
    "odd": functools.partial(digits_cnn, (9, 7, 2)),
    "resnet20": functools.partial(resnet20, (9, 7, 2)),
}
SHAPES = {
    "feddpa_mnist": (28, 28, 1),
    "digits_cnn": (8, 8, 1),
    "odd": (9, 7, 2),
    "resnet20": (9, 7, 2),
}


def images(name, count=3, seed=0):
    shape = SHAPES.get(name, (32, 32, 3))
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8))


def parameters(model):
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


def test_published_sizes():
    assert parameters(lenet()) == 62_006
    assert parameters(lenet((28, 28, 1))) == 44_426
    assert parameters(lenet_groupnorm()) == 62_006 - 22 + 2 * (6 + 16 + 120 + 84)
    assert parameters(mlp()) == 784 * 200 + 200 + 200 * 200 + 200 + 2010
    convolutions = 3 * 9 * 16 + 16 + 16 * 9 * 32 + 32 + 32 * 9 * 32 + 32
    assert (
        parameters(feddpa_cnn("cifar10")) == convolutions + 512 * 512 + 512 + 512 * 128 + 128 + 1290
    )
    assert parameters(resnet20()) == 269_072 + 650
    assert (
        parameters(feddpa_cnn("svhn_cropped"))
        == 3 * 9 * 32 + 32 + 32 * 9 * 64 + 64 + 12_544 * 128 + 128 + 1290
    )
    for name, classes in (("mnist", 10), ("femnist", 62)):
        expected = 9 * 32 + 32 + 32 * 9 * 64 + 64 + 9216 * 128 + 128 + 129 * classes
        assert parameters(feddpa_cnn(name)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_forms_agree_in_values_and_gradients(name):
    fast, x = MODELS[name](), images(name)
    params = fast.init(jax.random.key(1))
    target = jax.random.normal(jax.random.key(2), (3, 10))

    def value(model):
        return jax.jit(
            jax.value_and_grad(lambda p: jnp.sum(model.apply(p, model.prepare(x)) * target))
        )(params)

    a, da = value(fast)
    for form in ("im2col", "lax", "grouped", "blocks"):
        b, db = value(MODELS[name](form=form))
        assert a == pytest.approx(float(b), rel=1e-4, abs=1e-4)
        jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-3, atol=1e-4), da, db)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "lenet_groupnorm", "feddpa_mnist", "resnet20"])
def test_a_model_without_a_form_has_the_backends(name, monkeypatch):
    make, x = MODELS[name], images(name)

    def operations(**form):
        model = make(**form)
        x_shape, params = (
            jax.eval_shape(f, a) for f, a in ((model.prepare, x), (model.init, jax.random.key(0)))
        )
        return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(model.apply)(params, x_shape)))

    expected = {form: operations(form=form) for form in get_args(Form)}
    own = {
        form: expected[form] for form in ("winograd", "im2col", "lax")
    }  # "pallas" is "lax" where nothing is fused
    assert len(set(own.values())) == 3
    assert {form: "conv_general_dilated" in text for form, text in own.items()} == {
        "winograd": False, "im2col": False, "lax": True,
    }  # fmt: skip
    for form in get_args(Form):
        record = backend("cpu")._replace(forms=dict.fromkeys(backend("cpu").forms, form))
        monkeypatch.setattr("jaxfl.models.zoo.backend", lambda record=record: record)
        assert operations() == expected[form]


@pytest.mark.parametrize("form", [pytest.param("winograd", marks=pytest.mark.slow), "grouped"])
def test_clients_vectorised_equal_a_loop(form):
    model, count = digits_cnn(form=form), 10
    params = jax.vmap(model.init)(jax.random.split(jax.random.key(0), count))
    x = jnp.stack([images("digits_cnn", seed=s) for s in range(count)])

    @jax.jit
    def gradient(p, x):
        return jax.grad(lambda p: jnp.sum(jnp.sin(model.apply(p, model.prepare(x)))))(p)

    together = jax.jit(jax.vmap(gradient))(params, x)
    for i in range(count):
        alone = gradient(jax.tree.map(lambda leaf, i=i: leaf[i], params), x[i])
        jax.tree.map(
            lambda t, a, i=i: np.testing.assert_allclose(t[i], a, rtol=1e-4, atol=1e-5),
            together,
            alone,
        )


@pytest.mark.slow
@pytest.mark.parametrize("model", [mlp((8, 8, 1)), digits_cnn()], ids=["mlp", "digits_cnn"])
def test_extract_and_classify_compose_to_apply(model):
    params, x = model.init(jax.random.key(0)), model.prepare(images("digits_cnn"))
    head = {name: params[name] for name in model.head}
    np.testing.assert_allclose(
        model.classify(head, model.extract(params, x)), model.apply(params, x), rtol=1e-6
    )


def test_flatten_order_is_channels_height_width():
    model, x = mlp((2, 3, 2), 4, hidden=()), jnp.arange(12.0).reshape(1, 2, 3, 2)
    np.testing.assert_array_equal(
        model.prepare(x)[0], np.arange(12).reshape(2, 3, 2).transpose(2, 0, 1).ravel()
    )


def test_vectors_are_taken_as_they_are():
    model, x = mlp((5,), 4, hidden=()), jnp.arange(10.0).reshape(2, 5)
    np.testing.assert_array_equal(model.prepare(x), x)
    params = model.init(jax.random.key(0))
    assert model.layers == model.head == ("head",)
    wanted = x @ params["head"]["kernel"] + params["head"]["bias"][None]
    np.testing.assert_allclose(model.apply(params, x), wanted, rtol=1e-6)


@pytest.mark.slow
def test_convolution_against_numpy():
    rng = np.random.default_rng(0)
    x, kernel, bias = (
        rng.normal(size=(2, 7, 6, 3)),
        rng.normal(size=(3, 3, 2, 4)),
        rng.normal(size=4),
    )
    params = {"params": {"kernel": jnp.float32(kernel), "bias": jnp.float32(bias)}}
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    expected = np.zeros((4, 7, 6, 3))
    for i, j in np.ndindex(7, 6):
        window = padded[:, i : i + 3, j : j + 3]
        expected[:, i, j] = np.einsum("chwn,hwcf->fn", window, kernel) + bias[:, None]
    expected = np.maximum(expected, 0)
    for pool in (False, True):
        for form in ("winograd", "im2col", "lax", "grouped", "blocks"):
            found = jnp.asarray(
                Convolution(4, 3, padding=1, pool=pool, form=form).apply(params, jnp.float32(x))
            )
            pooled = expected[:, :6].reshape(4, 3, 2, 3, 2, 3).max((2, 4)) if pool else expected
            np.testing.assert_allclose(found, pooled, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["winograd", "lax", "blocks"])
def test_the_first_maximum_of_a_tie_takes_the_gradient(form):
    layer = Convolution(1, 1, form=form)
    params = {"params": {"kernel": jnp.ones((1, 1, 1, 1)), "bias": jnp.zeros(1)}}
    gradient = jax.grad(lambda x: jnp.sum(jnp.asarray(layer.apply(params, x))))(
        jnp.ones((1, 4, 4, 1))
    )
    expected = np.zeros((4, 4))
    expected[::2, ::2] = 1
    np.testing.assert_array_equal(gradient[0, :, :, 0], expected)
    reference = jax.grad(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()
    )(jnp.ones((1, 4, 4, 1)))
    np.testing.assert_array_equal(gradient, reference)


def test_pooled_maps_that_are_no_number_or_infinite_stay_so():
    layer, params = (
        Convolution(1, 1, relu=False, form="lax"),
        {"kernel": jnp.ones((1, 1, 1, 1)), "bias": jnp.zeros(1)},
    )
    x = jnp.array([[1.0, np.nan, -np.inf, -np.inf], [2.0, 0.0, -np.inf, -np.inf]])
    found = layer.apply({"params": params}, x[None, :, :, None])
    np.testing.assert_array_equal(np.asarray(found).ravel(), [np.nan, -np.inf])


@pytest.mark.parametrize("form", ["lax", "grouped", "blocks"])
def test_pooling_has_second_derivatives(form):
    """They equal those of the plain maximum if no two numbers are equal."""
    params = Convolution(3, 3).init(jax.random.key(0), jnp.zeros((2, 8, 7, 4)))["params"]
    x = jax.random.normal(jax.random.key(1), (2, 8, 7, 4))

    def pooled(x):
        return Convolution(3, 3, form=form).apply({"params": params}, x)

    def plain(x):
        maps = jnp.asarray(Convolution(3, 3, pool=False, form="lax").apply({"params": params}, x))
        return maps[:, :6, :4].reshape(3, 3, 2, 2, 2, 4).max((2, 4))

    def curvature(network):
        slope = jax.grad(lambda x: jnp.sum(jnp.sin(network(x))))
        return jax.jit(jax.grad(lambda x: jnp.sum(slope(x) ** 2)))(x)

    np.testing.assert_allclose(curvature(pooled), curvature(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_plain_form_has_forward_mode():
    model, x = digits_cnn(form="lax"), images("digits_cnn")
    params = model.init(jax.random.key(0))
    tangent = jax.tree.map(jnp.ones_like, params)
    _, slope = jax.jvp(lambda p: model.apply(p, model.prepare(x)).sum(), (params,), (tangent,))
    gradient = jax.grad(lambda p: model.apply(p, model.prepare(x)).sum())(params)
    assert float(slope) == pytest.approx(
        float(sum(leaf.sum() for leaf in jax.tree.leaves(gradient))), rel=1e-3
    )


@pytest.mark.parametrize("make", [lenet, lenet_groupnorm])
def test_a_network_of_which_nothing_is_left_is_refused(make):
    """Two 5x5 convolutions and poolings leave one pixel of a side of 16, and none of 15."""
    make((16, 16, 1), 10)
    for size in (4, 15):
        with pytest.raises(ValueError, match=rf"input_shape must leave .*got \({size}, 16, 1\)"):
            make((size, 16, 1), 10)


def test_build_by_name():
    assert build("lenet", (28, 28, 1), 10).layers == lenet((28, 28, 1)).layers
    with pytest.raises(ValueError, match="'resnet'"):
        build("resnet", (32, 32, 3), 10)
    with pytest.raises(ValueError, match="input_shape"):
        build("feddpa_cnn", (8, 8, 1), 10)


@pytest.mark.parametrize("wrong", [{"input_shape": (28, 28, 0)}, {"classes": 0}, {"hidden": (0,)}])
def test_wrong_arguments_name_themselves(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        mlp(**wrong)
