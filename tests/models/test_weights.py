"""Models that start from given weights."""

import jax
import numpy as np
import optax
import pytest
from algorithms_table import small_clients

from jaxfl import LocalSGD, load_model, simulate
from jaxfl.algorithms import fedavg
from jaxfl.models import frozen, mlp, with_weights

BASE = mlp((8, 8, 1), 10, hidden=(6,))
RNG = np.random.default_rng(0)
WEIGHTS = {
    "dense_0": {"kernel": RNG.normal(size=(64, 6)), "bias": RNG.normal(size=6)},
    "head": {"kernel": RNG.normal(size=(6, 10)), "bias": np.zeros(10)},
}
CLIENTS = small_clients()


def run(model, rate=0.0, **options):
    """Run one round of FedAvg. At a rate of 0 the clients do not change the weights."""
    method = fedavg(model, local=LocalSGD(optax.sgd(rate), 4))
    return simulate(0, method, CLIENTS, rounds=1, progress=False, **options)


def test_a_run_starts_from_the_weights_for_any_key():
    model = with_weights(BASE, WEIGHTS)
    for seed in (0, 1):
        jax.tree.map(
            lambda own, given: np.testing.assert_array_equal(own, np.float32(given)),
            model.init(jax.random.key(seed)),
            WEIGHTS,
        )
    trained = run(model).model().params
    jax.tree.map(
        lambda own, given: np.testing.assert_allclose(own, given, rtol=1e-6), trained, WEIGHTS
    )
    assert model.layers == BASE.layers
    assert model.name == BASE.name
    assert np.abs(run(model, rate=0.1).model().params["head"]["bias"]).max() > 0


def test_weights_are_a_part_of_what_a_run_is(tmp_path):
    run(with_weights(BASE, WEIGHTS), folder=tmp_path)
    assert run(with_weights(BASE, WEIGHTS), folder=tmp_path).restored == 1
    other = WEIGHTS | {"head": {"kernel": np.ones((6, 10)), "bias": np.zeros(10)}}
    with pytest.raises(ValueError, match="another run"):
        run(with_weights(BASE, other), folder=tmp_path)


def test_a_saved_model_names_the_network_alone(tmp_path):
    result = run(with_weights(BASE, WEIGHTS), rate=0.1)
    path = result.save(tmp_path / "model.safetensors")
    loaded = load_model(path)
    inputs = CLIENTS.inputs[:20]
    np.testing.assert_array_equal(loaded(inputs), result.model()(inputs))
    assert loaded.model.name == "mlp"


def test_weights_that_do_not_fit_are_an_error_with_the_path():
    turned = WEIGHTS | {"head": {"kernel": WEIGHTS["head"]["kernel"].T, "bias": np.zeros(10)}}
    words = r"params\['head'\]\['kernel'\] must have shape \(6, 10\), got \(10, 6\)"
    with pytest.raises(ValueError, match=words):
        with_weights(BASE, turned)
    lost = WEIGHTS | {"head": {"kernel": np.full((6, 10), np.nan), "bias": np.zeros(10)}}
    with pytest.raises(ValueError, match=r"params\['head'\]\['kernel'\] must be finite"):
        with_weights(BASE, lost)
    with pytest.raises(ValueError, match=r"only one of the two has \['head'\]"):
        with_weights(BASE, {"dense_0": WEIGHTS["dense_0"]})
    with pytest.raises(ValueError, match="model must have no frozen weights"):
        with_weights(frozen(BASE, WEIGHTS), WEIGHTS)


def test_tensors_of_a_state_dict_are_taken():
    torch = pytest.importorskip("torch")
    tensors = jax.tree.map(torch.tensor, WEIGHTS)
    found = with_weights(BASE, tensors).init(jax.random.key(0))
    np.testing.assert_allclose(found["head"]["kernel"], WEIGHTS["head"]["kernel"], rtol=1e-6)
