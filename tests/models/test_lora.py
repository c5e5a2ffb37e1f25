"""Frozen weights and adapters: their values, their programs, and methods that train them."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from algorithms_table import small_clients

from jaxfl import simulate, sweep
from jaxfl.algorithms import centaur, dp_fedavg, feddpa
from jaxfl.data import make_clients
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, freeze, initialize
from jaxfl.local.fisher import fisher_diagonal
from jaxfl.local.train import LocalSGD
from jaxfl.models import from_flax, frozen, gru, lora, mlp, transformer, with_precision
from jaxfl.models.frozen import given
from jaxfl.privacy.sampling import Poisson

KEY, CLIP = jax.random.key(7), 0.2


class Encoder(nn.Module):
    """A dense layer, attention and a head. All widths differ, so that shapes identify matrices."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(14, name="embed")(x.reshape(len(x), 4, 16))
        attention: Any = nn.MultiHeadDotProductAttention(
            num_heads=2, qkv_features=22, name="attention"
        )
        x = x + attention(nn.LayerNorm()(x))
        return nn.Dense(10, name="head")(nn.tanh(x.mean(1)))


BASE = from_flax(Encoder(), (8, 8, 1))
WEIGHTS = BASE.init(jax.random.key(0))
ADAPTED = lora(BASE, WEIGHTS, rank=2)
SMALL = lora(
    mlp((8, 8, 1), hidden=(16,)), mlp((8, 8, 1), hidden=(16,)).init(jax.random.key(0)), rank=2
)
X = jax.random.normal(jax.random.key(1), (6, 8, 8, 1))
LABELS = jnp.arange(6)
KERNELS = {
    "embed": (16, 14),
    "query": (14, 2, 11),
    "key": (14, 2, 11),
    "value": (14, 2, 11),
    "out": (2, 11, 14),
}


def moved(params, size=0.3):
    """Return parameters with noise added, as if after some training."""
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    return unravel(flat + size * jax.random.normal(jax.random.key(2), flat.shape))


def merged(model, params, scale):
    """Return the base's weights plus scale A B, which make the same network without adapters."""
    base, drawn = model.frozen

    def add(path, tree):
        if not isinstance(tree, dict):
            return tree
        own = functools.reduce(lambda tree, name: tree.get(name, {}), path, params)
        result = {name: add((*path, name), part) for name, part in tree.items()}
        if "b" in own:
            result["kernel"] += scale * np.tensordot(own.get("a", drawn.get(path)), own["b"], 1)
        return result

    return add((), base) | {name: params[name] for name in params if name not in base}


@pytest.mark.parametrize(
    "options",
    [
        {"train_a": True, "alpha": 4.0},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"where": ("query", "out"), "train": ()}, marks=pytest.mark.slow),
    ],
)
def test_a_model_with_adapters_is_the_base_with_merged_weights(options):
    model = lora(BASE, WEIGHTS, rank=2, **options)
    start = model.init(KEY)
    np.testing.assert_array_equal(model.apply(start, X), BASE.apply(WEIGHTS, X))
    params = moved(start)
    expected = BASE.apply(merged(model, params, options.get("alpha", 2.0) / 2), X)
    found = model.apply(params, X)
    assert abs(found - BASE.apply(WEIGHTS, X)).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_gradient_is_the_full_one_between_the_factors():
    """The gradient dB is s A^T dW. That of the head is unchanged."""
    model = lora(BASE, WEIGHTS, rank=3, alpha=1.5)
    params = moved(model.init(KEY))

    def loss(network, x):
        return lambda params: network.task.mean_loss(network.apply(params, x), LABELS, jnp.ones(6))

    full = jax.jit(jax.grad(loss(BASE, X)))(merged(model, params, 0.5))
    found = jax.jit(jax.grad(loss(model, X)))(params)
    a = model.frozen[1]["attention", "out"]
    np.testing.assert_allclose(
        found["attention"]["out"]["b"],
        0.5 * np.tensordot(a, full["attention"]["out"]["kernel"], ((0, 1), (0, 1))),
        rtol=1e-4,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        found["head"]["kernel"], full["head"]["kernel"], rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_a_network_that_was_traced_before_gets_its_adapters():
    traced = jax.jit(BASE.apply)
    model = lora(
        BASE._replace(apply=lambda params, x, key=None: traced(params, x)), WEIGHTS, rank=2
    )
    traced(WEIGHTS, X)
    for params in (model.init(KEY), moved(model.init(KEY)), moved(model.init(KEY), 0.1)):
        np.testing.assert_allclose(
            model.apply(params, X), ADAPTED.apply(params, X), rtol=1e-5, atol=1e-6
        )


def test_adapters_are_layers():
    model, params = ADAPTED, ADAPTED.init(KEY)
    assert model.layers == ("embed", "attention", "head")
    assert model.head == ("head",)
    shapes = {name: leaf["b"].shape for name, leaf in params["attention"].items()} | {
        "embed": (2, 14)
    }
    assert shapes == {
        name: (2, *kernel[(2 if name == "out" else 1) :]) for name, kernel in KERNELS.items()
    }
    x, params = SMALL.prepare(X), moved(SMALL.init(KEY))
    assert SMALL.extract
    assert SMALL.classify
    np.testing.assert_array_equal(
        SMALL.classify(params, SMALL.extract(params, x)), SMALL.apply(params, x)
    )


def test_a_is_public_and_its_columns_have_norm_one():
    drawn = [lora(BASE, WEIGHTS, rank=64, seed=seed).frozen[1]["embed",] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert abs(drawn[0] - drawn[2]).max() > 0.1
    assert float((drawn[0] ** 2).sum(0).mean()) == pytest.approx(1, abs=5 * (2 / 16 / 64) ** 0.5)


@pytest.mark.slow
def test_frozen_layers_are_no_parameters():
    base = mlp((8, 8, 1), hidden=(16,))
    weights = base.init(KEY)
    model = frozen(base, weights, train=("dense_0",))
    x, params = model.prepare(X), {"dense_0": moved(weights["dense_0"])}
    assert model.layers == ("dense_0",)
    assert not model.head
    np.testing.assert_array_equal(model.apply(params, x), base.apply(weights | params, x))
    squares = fisher_diagonal(model, params, x, LABELS, jnp.ones(6))
    expected = fisher_diagonal(base, weights | params, x, LABELS, jnp.ones(6))
    np.testing.assert_allclose(
        squares["dense_0"]["kernel"], expected["dense_0"]["kernel"], rtol=1e-5
    )


@pytest.mark.slow
def test_fisher_information_of_adapters_is_that_of_single_examples():
    model, params = SMALL, moved(SMALL.init(KEY))
    x = model.prepare(X)

    def gradient(x, label):
        return jax.grad(lambda p: model.task.loss(model.apply(p, x[None]), label[None])[0])(params)

    singles = [gradient(*pair)["dense_0"]["b"] ** 2 for pair in zip(x, LABELS, strict=True)]
    found = fisher_diagonal(model, params, x, LABELS, jnp.ones(6))["dense_0"]["b"]
    np.testing.assert_allclose(found, sum(singles), rtol=1e-4, atol=1e-8)


def test_a_program_reads_the_weights_that_it_is_given():
    model = frozen(BASE, WEIGHTS)
    other = BASE.init(jax.random.key(9))
    apply = jax.jit(model.apply)
    head = {"head": WEIGHTS["head"]}
    mine = apply(head, X)
    fixed = {name: other[name] for name in model.frozen}
    with given(model.frozen, fixed):
        found = apply(head, X)
    np.testing.assert_allclose(found, BASE.apply({**other, **head}, X), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(apply(head, X), mine)


def methods(model):
    """Return builders of methods that share all, a part, or a Fisher mask of a model, by name."""
    local = LocalSGD(optax.sgd(0.1), 4)
    private = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6), "local": local}
    return {
        "dp_fedavg": lambda: dp_fedavg(model, **private),
        "centaur": lambda: centaur(model, head=LocalSGD(optax.sgd(0.1), 4, 2), **private),
        "feddpa": lambda: feddpa(model, **private),
    }


def test_the_base_is_one_matrix_product_for_all_clients_and_no_constant():
    """In the program: matrices of the base are factors of products without a batch axis, and no client has a copy."""
    algorithm, count = methods(ADAPTED)["dp_fedavg"](), 37
    lanes = 32  # two standard deviations above 0.6 * 37
    population = freeze(algorithm, place(small_clients((2,) * count), jax.devices()[:1]))
    step = compile_rounds(algorithm, population, chunk=count, segment=1)
    left = initialize(KEY, KEY, algorithm, population)
    text = step.func.lower(*step.args, KEY, 0, 1, *left, **step.keywords).as_text()  # pyrefly: ignore
    assert 'dense<"0x' not in text, "constants of more than a few numbers"
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    for shape in set(KERNELS.values()):
        kernel = f"tensor<{'x'.join(map(str, shape))}xf32>"
        assert f"{lanes}x{kernel[7:]}" not in text, "a copy for each client"
        with_base = [line for line in products if kernel in line.split(" : ")[1].split(" -> ")[0]]
        forward = 3 if shape == KERNELS["query"] else 1
        # Each once forward, once backward, which the first layer is spared.
        assert len(with_base) == forward * (1 if shape == KERNELS["embed"] else 2), shape
        assert not any("batching_dims" in line for line in with_base)
        assert all(f"tensor<{lanes}x2x4x" in line for line in with_base), (
            "the inputs of all clients"
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "options"),
    [
        ("dp_fedavg", ADAPTED, {"chunk": 1}),
        ("centaur", ADAPTED, {"states": "host"}),
        ("feddpa", SMALL, {"chunk": 4, "devices": jax.devices()[:2]}),
    ],
)
def test_methods_train_adapters_as_the_plain_twin_does(name, model, options):
    algorithm, clients = methods(model)[name](), small_clients()
    result = simulate(
        KEY,
        algorithm,
        clients,
        rounds=2,
        progress=False,
        **{"devices": jax.devices()[:1]} | options,
    )
    server, states, _ = reference.run(KEY, algorithm, clients, 2)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, jax.device_get(result.server), jax.device_get(server))
    found = jax.tree.map(lambda leaf: leaf[: clients.num_clients], jax.device_get(result.states))
    jax.tree.map(close, found, jax.tree.map(lambda *leaves: np.stack(leaves), *states))


@pytest.mark.slow
def test_a_folder_keeps_adapters_only_and_knows_the_base(tmp_path):
    base = mlp((8, 8, 1), hidden=(300,))
    weights = base.init(KEY)

    def run(weights):
        method = methods(frozen(base, weights))["dp_fedavg"]()
        return simulate(KEY, method, small_clients(), rounds=1, progress=False, folder=tmp_path)

    first = run(weights)
    largest = max(path.stat().st_size for path in (tmp_path / "ckpt").rglob("*") if path.is_file())
    assert largest < weights["dense_0"]["kernel"].nbytes / 2
    assert run(weights).restored == 1
    assert jax.tree.map(jnp.shape, first.server.params) == {
        "head": {"bias": (10,), "kernel": (300, 10)}
    }
    other = jax.tree.map(lambda leaf: leaf.at[0].add(1e-3), weights["dense_0"])
    with pytest.raises(ValueError, match="frozen weights"):
        run(weights | {"dense_0": other})


@pytest.mark.slow
def test_a_sweep_trains_adapters_as_single_runs_do():
    build = functools.partial(dp_fedavg, SMALL, noise_multiplier=0.0, sampling=Poisson(0.6))
    options = {"rounds": 2, "progress": False, "devices": jax.devices()[:1]}
    points = sweep(KEY, build, {"clip": [0.1, 0.4]}, small_clients(), paired_noise=True, **options)
    alone = simulate(KEY, build(clip=0.4), small_clients(), **options)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, jax.device_get(points[1].server), jax.device_get(alone.server))


@pytest.mark.slow
def test_the_precision_of_a_base_is_that_of_its_adapters():
    low = lora(with_precision(BASE, "bfloat16"), WEIGHTS, rank=2)
    params = moved(low.init(KEY))
    found, exact = low.apply(params, X), ADAPTED.apply(params, X)
    assert 2**-12 < optax.tree.norm(found - exact) / optax.tree.norm(exact) < 0.05
    with pytest.raises(ValueError, match=r"frozen weights.*with_precision first"):
        with_precision(frozen(BASE, WEIGHTS), "bfloat16")


ONE_LAYER = from_flax(nn.Dense(3), (4,))
"""A network that is a dense layer itself, whose weights have no name of a layer."""


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: lora(BASE, WEIGHTS, rank=2, where=("quary",)),
            "where must have names from the paths of dense layers, got 'quary'.*'query'",
        ),
        (
            lambda: lora(BASE, WEIGHTS, rank=2, train=("tail",)),
            "train must name layers of model='Encoder', got 'tail'",
        ),
        (
            lambda: lora(BASE, WEIGHTS, rank=2, train=BASE.layers),
            "must have a dense layer to adapt",
        ),
        (
            lambda: lora(ONE_LAYER, ONE_LAYER.init(KEY), rank=2, train=()),
            r"with train=\(\) and where=None. Give a network that has dense layers as its parts",
        ),
        (
            lambda: lora(BASE, {"head": WEIGHTS["head"]}, rank=2),
            "params must have the arrays of model='Encoder'.*only one of the two has",
        ),
        (lambda: lora(ADAPTED, WEIGHTS, rank=2), "model must have no frozen weights"),
        (lambda: frozen(BASE, WEIGHTS, train=()), r"train must name at least one layer, got \(\)"),
        (
            lambda: lora(BASE._replace(input_shape=None), WEIGHTS, rank=2),
            "model must have an `input_shape`",
        ),
        (
            lambda: lora(BASE._replace(input_shape=(3,)), WEIGHTS, rank=2),
            "model must take a batch of its input_shape",
        ),
    ],
)
def test_what_does_not_fit_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_weights_of_another_shape_are_refused():
    wrong = jax.tree.map(lambda leaf: leaf[..., :9], WEIGHTS["head"])
    with pytest.raises(
        ValueError,
        match=r"params\['head'\]\['bias'\] must have shape \(10,\), got \(9,\)",
    ):
        frozen(BASE, WEIGHTS | {"head": wrong})


TOKENS = np.random.default_rng(3).integers(0, 7, (12, 6)).astype(np.int32)
TEXT = transformer(7, 6, width=8, blocks=1, heads=2)


def test_adapters_of_the_transformer_are_its_weights_with_their_product():
    weights = TEXT.init(jax.random.key(0))
    model = lora(TEXT, weights, rank=2)
    params = moved(model.init(KEY))
    block = model.frozen[0]["block_0"]
    assert {name for name in block if "kernel" in block[name]} == set(params["block_0"])
    x = jnp.asarray(TOKENS)
    expected = TEXT.apply(merged(model, params, 1.0), x)
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(expected, TEXT.apply(weights, x), atol=1e-2)


@pytest.mark.slow
def test_adapters_of_the_transformer_train_to_changes_of_their_rank():
    weights = TEXT.init(jax.random.key(0))
    model = lora(TEXT, weights, rank=2)
    labels = np.roll(TOKENS, -1, axis=1)
    rows = [*np.arange(12).reshape(3, 4)]
    clients = make_clients((TOKENS, labels, TOKENS, labels), rows, rows)
    method = dp_fedavg(
        model,
        clip=10.0,
        noise_multiplier=0.0,
        sampling=Poisson(1.0),
        local=LocalSGD(optax.adam(0.03), 4, 5),
    )
    result = simulate(KEY, method, clients, rounds=4, eval_every=1, progress=False)
    losses = [row["loss"] for row in result.metrics]
    assert losses[-1] < losses[0] - 0.1
    after = merged(model, result.server.params, 1.0)
    for layer in ("attention", "attention_out", "hidden", "hidden_out"):
        change = after["block_0"][layer]["kernel"] - weights["block_0"][layer]["kernel"]
        singular = np.linalg.svd(change, compute_uv=False)
        assert singular[1] > 1e-4 > 100 * singular[2]


def test_adapters_find_the_dense_layers_of_the_recurrent_network():
    base = gru(7, 6, width=4, embedding=3)
    assert set(lora(base, base.init(KEY), rank=1).init(KEY)) == {"recurrent", "head"}
