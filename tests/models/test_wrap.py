import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import small_clients
from flax import nnx

from jaxfl.algorithms import dp_fedavg_fb, feddpa
from jaxfl.local.train import LocalSGD
from jaxfl.models.wrap import from_flax, from_nnx
from jaxfl.privacy.sampling import Full
from jaxfl.run.simulate import simulate


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), name="z_first")(x))
        return nn.Dense(10, name="a_last")(x.reshape(len(x), -1))


class Split(nn.Module):
    def setup(self):
        self.body, self.out = nn.Dense(8), nn.Dense(10)

    def extract(self, x):
        return nn.relu(self.body(x.reshape(len(x), -1)))

    def classify(self, features):
        return self.out(features)

    def __call__(self, x):
        return self.classify(self.extract(x))


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.BatchNorm(use_running_average=False)(x.reshape(len(x), -1)))


def test_layers_are_in_depth_order():
    model = from_flax(Net(), (8, 8, 1))
    assert model.layers == ("z_first", "a_last")
    assert model.head == ("a_last",)


@pytest.mark.slow
@pytest.mark.parametrize("module", [Net(), Split()])
def test_every_method_takes_it(module):
    model = from_flax(module, (8, 8, 1))
    for algorithm in (
        dp_fedavg_fb(
            model,
            head=LocalSGD(optax.sgd(0.01), epochs=1),
            local=LocalSGD(optax.sgd(0.05), batch_size=4),
        ),
        feddpa(
            model,
            sampling=Full(),
            noise_multiplier=0.0,
            local=LocalSGD(optax.sgd(0.05), batch_size=4, epochs=1),
        ),
    ):
        result = simulate(jax.random.key(0), algorithm, small_clients(), rounds=1, progress=False)
        assert np.isfinite(result.metrics[-1]["loss"])


@pytest.mark.slow
def test_head_is_fitted_alike_with_and_without_cached_features():
    split = from_flax(Split(), (8, 8, 1))
    whole = split._replace(extract=None, classify=None)
    clients, tuned = small_clients(), []
    for model in (split, whole):
        algorithm = dp_fedavg_fb(model, head=LocalSGD(optax.sgd(0.5), epochs=2, batch_size=4))
        tuned.append(
            simulate(jax.random.key(0), algorithm, clients, rounds=1, progress=False).scores
        )
    np.testing.assert_allclose(tuned[0]["loss"], tuned[1]["loss"], rtol=1e-4)


def test_bytes_are_normalised():
    model = from_flax(Net(), (8, 8, 1))
    np.testing.assert_allclose(
        model.prepare(jnp.array([[0, 255]], jnp.uint8)), [[-1, 1]], atol=1e-6
    )


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(4, use_bias=False)(x))


class Halves(nnx.Module):
    def __init__(self, rngs):
        self.z_first = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(256, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(8))
        self.a_last = nnx.Linear(8, 10, rngs=rngs)

    def extract(self, x):
        x = nnx.relu(self.z_first(x)).reshape(len(x), -1)
        for block in self.blocks:
            x = nnx.tanh(block(x))
        return x * self.gain[...][None]

    def classify(self, features):
        return self.a_last(self.dropout(features))

    def __call__(self, x):
        return self.classify(self.extract(x))


class Counted(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


def test_an_nnx_modules_layers_are_its_attributes_in_order():
    model = from_nnx(Halves, (8, 8, 1))
    assert model.layers == ("z_first", "blocks_0", "blocks_1", "gain", "a_last")
    assert model.head == ("a_last",)
    assert from_nnx(Halves, (8, 8, 1), head=("gain", "a_last")).head == ("gain", "a_last")


@pytest.mark.parametrize("given", [True, False])
def test_an_nnx_model_is_its_module(given):
    """Parameters come from a key, or from an instance for any key. The gradient is that of nnx."""
    instance, x = (
        Halves(nnx.Rngs(jax.random.key(3))),
        jax.random.normal(jax.random.key(0), (5, 8, 8, 1)),
    )
    instance.eval()
    model = from_nnx(instance if given else Halves, (8, 8, 1))
    params = model.init(jax.random.key(7 if given else 3))
    assert model.extract is not None
    assert model.classify is not None
    features = model.extract(params, x)
    head = {name: params[name] for name in model.head}
    for found in (
        model.apply(params, x),
        model.classify(params, features),
        model.classify(head, features),
    ):
        np.testing.assert_allclose(found, instance(x), rtol=1e-4, atol=1e-5)
    found = jax.jit(jax.grad(lambda params: jnp.sum(model.apply(params, x) ** 2)))(params)
    expected = nnx.grad(lambda module: jnp.sum(module(x) ** 2))(instance)
    for name, layer in (("z_first", expected["z_first"]), ("blocks_1", expected["blocks"][1])):
        np.testing.assert_allclose(
            found[name]["kernel"], layer["kernel"][...], rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize(
    "model", [from_flax(Dropped(), (3,)), from_nnx(Halves, (8, 8, 1))], ids=["linen", "nnx"]
)
def test_dropout_draws_in_training_alone_by_the_key(model):
    x = jnp.ones((64, *model.input_shape))
    params = model.init(jax.random.key(0))
    plain, again = model.apply(params, x), model.apply(params, x)
    first, same, other = (
        jax.jit(model.apply)(params, x, jax.random.key(number)) for number in (1, 1, 2)
    )
    np.testing.assert_array_equal(plain, again)
    np.testing.assert_array_equal(first, same)
    assert np.any(np.asarray(first) != np.asarray(other))
    if model.name == "Dropped":  # each number is dropped, or doubled
        share = np.mean(np.asarray(first) == 0)
        np.testing.assert_allclose(first[first != 0], 2 * plain[first != 0], rtol=1e-6)
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(first.size)


@pytest.mark.slow
def test_an_nnx_model_trains():
    clients = small_clients()
    algorithm = dp_fedavg_fb(
        from_nnx(Halves, (8, 8, 1)),
        head=LocalSGD(optax.sgd(0.1)),
        local=LocalSGD(optax.sgd(0.1), batch_size=4),
    )
    result = simulate(jax.random.key(0), algorithm, clients, rounds=2, progress=False)
    assert np.isfinite(result.metrics[-1]["loss"])


def test_modules_that_draw_or_keep_state_are_refused():
    for rate in (nn.Dropout(0.5), nn.Dropout(0.5, deterministic=False)):
        with pytest.raises(ValueError, match=r"must not draw in evaluation, .*`train`"):
            from_flax(nn.Sequential([nn.Dense(3), rate]), (4,))
    for module in (Counted, Counted(nnx.Rngs(0))):
        with pytest.raises(ValueError, match=r"BatchStat.*GroupNorm"):
            from_nnx(module, (4,))
    with pytest.raises(ValueError, match="module must have parameters"):
        from_nnx(lambda rngs: nnx.Dropout(0.5, rngs=rngs), (4,))
    with pytest.raises(TypeError, match=r"makes .*nnx.Module"):
        from_nnx(lambda rngs: 3, (4,))  # pyrefly: ignore[bad-argument-type]


def test_wrong_modules_say_what_to_do():
    with pytest.raises(ValueError, match="GroupNorm"):
        from_flax(Normalised(), (8, 8, 1))
    with pytest.raises(ValueError, match=r"head must name .*z_first"):
        from_flax(Net(), (8, 8, 1), head=("dense",))
    with pytest.raises(ValueError, match="outputs"):
        from_flax(nn.Sequential([nn.Dense(4), jnp.sum]), (8, 8, 1))
