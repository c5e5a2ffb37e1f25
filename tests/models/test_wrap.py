import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import small_clients

from jaxfl.algorithms import dp_fedavg_fb, feddpa
from jaxfl.local.train import LocalSGD
from jaxfl.models.wrap import from_flax
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
        dp_fedavg_fb(model, head=LocalSGD(optax.sgd(0.01), epochs=1), local=LocalSGD(optax.sgd(0.05), batch_size=4)),
        feddpa(model, sampling=Full(), noise_multiplier=0.0, local=LocalSGD(optax.sgd(0.05), batch_size=4, epochs=1)),
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
        tuned.append(simulate(jax.random.key(0), algorithm, clients, rounds=1, progress=False).scores)
    np.testing.assert_allclose(tuned[0]["loss"], tuned[1]["loss"], rtol=1e-4)


def test_bytes_are_normalised():
    model = from_flax(Net(), (8, 8, 1))
    np.testing.assert_allclose(model.prepare(jnp.array([[0, 255]], jnp.uint8)), [[-1, 1]], atol=1e-6)


def test_wrong_modules_say_what_to_do():
    with pytest.raises(ValueError, match="GroupNorm"):
        from_flax(Normalised(), (8, 8, 1))
    with pytest.raises(ValueError, match=r"head=.*z_first"):
        from_flax(Net(), (8, 8, 1), head=("dense",))
    with pytest.raises(ValueError, match="outputs"):
        from_flax(nn.Sequential([nn.Dense(4), jnp.sum]), (8, 8, 1))
