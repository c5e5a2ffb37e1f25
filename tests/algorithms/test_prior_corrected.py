"""Predictions by a client's own counts of labels."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, MODEL, SIZES, client_data, small_clients

from jaxfl import LocalSGD, membership, simulate, sweep
from jaxfl.algorithms import dp_fedavg, fedavg, mixed, prior_corrected
from jaxfl.data import classes_per_client, load, make_clients
from jaxfl.models import from_flax, mlp
from jaxfl.privacy import DPSGD, Full, Mechanism, Poisson
from jaxfl.run.check import check_algorithm
from jaxfl.tasks import cross_entropy, multi_label, regression
from jaxfl.types import ClientData

KEY = jax.random.key(22)
LINEAR = mlp((8, 8, 1), 10, hidden=())
DIGITS = load("digits")
RUN = {"rounds": 2, "progress": False}


def strong(seed=0):
    """Random weights whose logits differ by hundreds."""
    params = MODEL.init(jax.random.key(seed))
    return jax.tree.map(lambda leaf: 30 * jax.random.normal(KEY, leaf.shape), params)


def own_data(rows):
    """A client with these rows of the digits."""
    rows = np.asarray(rows)
    return ClientData(
        jnp.asarray(DIGITS.train_inputs),
        jnp.asarray(DIGITS.train_labels),
        jnp.asarray(np.pad(rows, (0, 5))),
        jnp.asarray(len(rows)),
    )


def rows_of(counts):
    """The first rows of the digits with so many examples of each class."""
    labels = DIGITS.train_labels
    return np.concatenate([np.flatnonzero(labels == k)[:count] for k, count in enumerate(counts)])


def outputs_of(method, params, data, inputs):
    server = method.init(KEY, 1)[0]._replace(params=params)
    personal = method.personalize(KEY, server, (), data)
    return np.asarray(method.model.apply(personal, method.model.prepare(jnp.asarray(inputs))))


def assert_close(a, b, rtol=1e-4, atol=1e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), a, b)


def softmax(logits):
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 2.0])
def test_probabilities_are_weighed_by_the_clients_shares(smoothing):
    counts = np.array([4, 0, 1, 7, 0, 0, 2, 0, 0, 1])
    params, inputs = MODEL.init(KEY), DIGITS.test_inputs[:20]
    plain = softmax(np.asarray(MODEL.apply(params, MODEL.prepare(jnp.asarray(inputs))), np.float64))
    expected = plain * (counts + smoothing) / (counts.sum() + 10 * smoothing)
    expected /= expected.sum(axis=1, keepdims=True)
    method = prior_corrected(fedavg(MODEL), smoothing=smoothing)
    found = softmax(outputs_of(method, params, own_data(rows_of(counts)), inputs).astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1 / 3])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_equal_counts_change_no_bit(smoothing, count):
    params, inputs = MODEL.init(KEY), DIGITS.test_inputs[:20]
    plain = np.asarray(MODEL.apply(params, MODEL.prepare(jnp.asarray(inputs))))
    data = own_data(rows_of([count] * 10).astype(int))
    found = outputs_of(prior_corrected(fedavg(MODEL), smoothing=smoothing), params, data, inputs)
    np.testing.assert_array_equal(found, plain)


def test_without_smoothing_no_absent_class_is_predicted():
    params, inputs = strong(), DIGITS.test_inputs
    plain = np.asarray(MODEL.apply(params, MODEL.prepare(jnp.asarray(inputs))))
    assert np.ptp(plain) > 1e3
    clients = small_clients()
    for index, size in enumerate(SIZES):
        if not size:
            continue
        own = np.unique(clients.labels[clients.train[index]])
        found = outputs_of(prior_corrected(fedavg(MODEL), smoothing=0.0), params, client_data(index), inputs)
        predicted = found.argmax(axis=1)
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(predicted, own[plain[:, own].argmax(axis=1)])


def test_smoothing_lets_a_sure_model_predict_an_absent_class():
    params, inputs = strong(), DIGITS.test_inputs
    found = outputs_of(prior_corrected(fedavg(MODEL), smoothing=0.1), params, client_data(5), inputs)
    assert SIZES[5] == 1
    assert len(np.unique(found.argmax(axis=1))) > 1


def test_a_restricted_client_trains_without_nan():
    """Padding has label 0, which the restriction rules out for most."""
    base = fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), 4))
    method = prior_corrected(base, smoothing=0.0, train=True)
    result = simulate(KEY, method, small_clients(), **RUN)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.server))
    assert all(math.isfinite(row["train_loss"]) for row in result.metrics)


def test_local_steps_descend_on_the_corrected_loss():
    """One step on all of a client's examples, by NumPy."""
    rate, smoothing = 0.5, 0.3
    method = prior_corrected(
        fedavg(LINEAR, local=LocalSGD(optax.sgd(rate), 16)),
        smoothing=smoothing,
        train=True,
    )
    server, _ = method.init(KEY, 1)
    found = method.client_update(KEY, server, (), client_data(3))[0].update["head"]
    clients = small_clients()
    rows = clients.train[3]
    x = np.asarray(LINEAR.prepare(jnp.asarray(clients.inputs[rows])), np.float64).reshape(len(rows), -1)
    labels = clients.labels[rows]
    shares = np.bincount(labels, minlength=10) + smoothing
    kernel = np.asarray(server.params["head"]["kernel"], np.float64)
    logits = x @ kernel + np.asarray(server.params["head"]["bias"]) + np.log(shares / shares.sum())
    error = (softmax(logits) - np.eye(10)[labels]) / len(rows)
    np.testing.assert_allclose(found["kernel"], -rate * x.T @ error, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["bias"], -rate * error.sum(axis=0), rtol=1e-4, atol=1e-6)


def test_equal_counts_change_no_local_step():
    base = fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), 4))
    server, _ = base.init(KEY, 1)
    data = own_data(rows_of([2] * 10))
    corrected = prior_corrected(base, train=True)
    found, expected = (m.client_update(KEY, server, (), data)[0].update for m in (corrected, base))
    assert_close(found, expected, rtol=1e-6, atol=1e-8)


def test_the_offset_ends_with_the_local_step():
    logits, labels = jnp.zeros((1, 10)), jnp.zeros(1, int)
    method = prior_corrected(fedavg(MODEL), train=True)
    server, _ = method.init(KEY, 1)
    method.client_update(KEY, server, (), client_data())
    method.personalize(KEY, server, (), client_data())
    assert float(cross_entropy(logits, labels)[0]) == pytest.approx(math.log(10))


LOSS_OF_ITS_OWN = {"ppsgd", "dp_ridge", "dp_prototypes"}
REFUSED = {"mr_mtl", "pdp_fl_examples"}
"""Methods of private local steps."""
TWICE = {"fine_tuned", "prior_corrected", "mixed"}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in REFUSED | TWICE])
def test_every_method_trains_by_the_corrected_loss_or_is_refused(name):
    method = prior_corrected(ALGORITHMS[name](), train=True)
    if name in LOSS_OF_ITS_OWN:
        with pytest.raises(ValueError, match="train must be False for a method with a loss of its own"):
            check_algorithm(method, small_clients(), 2)
    else:
        check_algorithm(method, small_clients(), 2)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_examples_that_are_protected_one_by_one_have_no_correction_in_training(name):
    assert prior_corrected(ALGORITHMS[name]()).dp_sgd is not None
    with pytest.raises(ValueError, match="train must be False with private local steps"):
        prior_corrected(ALGORITHMS[name](), train=True)


def test_a_correction_in_private_steps_would_let_an_example_move_the_others():
    """Why that is refused: another label of one example changes the gradients of all."""
    labels = np.array(DIGITS.train_labels)
    rows = rows_of([3, 3, 0, 0, 0, 0, 0, 0, 0, 0])
    changed = np.bincount(np.where(rows == rows[0], 5, labels[rows]), minlength=10)
    assert (np.bincount(labels[rows], minlength=10) != changed).sum() == 2


@pytest.mark.parametrize("name", sorted(TWICE))
def test_predictions_are_corrected_once(name):
    with pytest.raises(ValueError, match=r"without 'log_prior' among its parameters.*Wrap the method once"):
        prior_corrected(ALGORITHMS[name]())


def test_other_tasks_are_refused():
    for task in (regression(), multi_label()):
        with pytest.raises(ValueError, match="algorithm must be for a classification, got model='mlp' with task="):
            prior_corrected(fedavg(MODEL._replace(task=task)))


def test_a_model_must_say_its_inputs():
    with pytest.raises(ValueError, match="algorithm must have a model with an `input_shape`"):
        prior_corrected(fedavg(MODEL._replace(input_shape=None)))
    with pytest.raises(ValueError, match=r"takes a batch of its input_shape=\(9, 9, 1\)"):
        prior_corrected(fedavg(MODEL._replace(input_shape=(9, 9, 1))))
    tokens = MODEL._replace(apply=lambda params, x, *key: jnp.zeros((2, 3, 10)))
    with pytest.raises(ValueError, match=r"must have a model with logits \[B, K\], got \(2, 3, 10\)"):
        prior_corrected(fedavg(tokens))


@pytest.mark.slow
def test_smoothing_of_a_sweep_is_that_of_single_runs():
    local = LocalSGD(optax.sgd(0.1), 4)

    def build(smoothing):
        return prior_corrected(fedavg(MODEL, local=local), smoothing=smoothing, train=True)

    values = [0.0, 0.5]
    swept = sweep(KEY, build, {"smoothing": values}, small_clients(), **RUN)
    for value, result in zip(values, swept, strict=True):
        alone = simulate(KEY, build(value), small_clients(), **RUN)
        assert_close(result.server, alone.server)
        assert_close(result.scores["loss"], alone.scores["loss"], rtol=1e-3)
    assert not np.allclose(swept[0].scores["loss"], swept[1].scores["loss"])


def test_private_predictions_gain_where_clients_have_few_classes():
    """Knowing two classes of ten lifts a noisy model by far: guessing is right half of the time."""
    base = dp_fedavg(
        LINEAR,
        clip=0.5,
        noise_multiplier=8.0,
        sampling=Full(),
        local=LocalSGD(optax.sgd(0.1), 4, 2),
    )
    labels, test_labels = DIGITS.train_labels, DIGITS.test_labels
    clients = make_clients(DIGITS, *classes_per_client(labels, test_labels, 40, 2, seed=0))
    options = {"rounds": 10, "progress": False}
    plain = simulate(KEY, base, clients, **options)
    corrected = simulate(KEY, prior_corrected(base, smoothing=0.0), clients, **options)
    jax.tree.map(np.testing.assert_array_equal, plain.server, corrected.server)
    assert corrected.statement == plain.statement
    assert corrected.metrics[-1]["accuracy"] > plain.metrics[-1]["accuracy"] + 0.15


@pytest.mark.slow
def test_what_an_upload_reveals_is_measured_on_the_methods_model():
    local = LocalSGD(optax.sgd(0.1), 4)
    base = fedavg(MODEL, local=local, mechanism=Mechanism(sampling=Poisson(0.6)))
    methods: dict[str, Any] = {"plain": base, "corrected": prior_corrected(base), "mixed": mixed(base, local=local)}
    found = {}
    for name, method in methods.items():
        result = simulate(KEY, method, small_clients(), **RUN)
        found[name] = membership(KEY, method, result, small_clients(), of="upload")
    for name in ("corrected", "mixed"):
        jax.tree.map(np.testing.assert_array_equal, found["plain"], found[name])


def test_a_model_of_flax_is_corrected_too():
    network = nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(10)])
    model = from_flax(network, (8, 8, 1), prepare=lambda x: x / 16)
    base = fedavg(model, local=LocalSGD(optax.sgd(0.1), 4))
    method = prior_corrected(base, smoothing=0.0, train=True)
    assert np.isfinite(simulate(KEY, method, small_clients(), **RUN).metrics[-1]["loss"])


def test_private_steps_are_corrected_at_the_evaluation():
    private: Any = DPSGD(clip=0.5, noise_multiplier=1.0, rate=0.4, steps=2)
    base = fedavg(MODEL, local=private)
    plain, corrected = (simulate(KEY, m, small_clients(), **RUN) for m in (base, prior_corrected(base)))
    jax.tree.map(np.testing.assert_array_equal, plain.server, corrected.server)
    assert plain.statement == corrected.statement
