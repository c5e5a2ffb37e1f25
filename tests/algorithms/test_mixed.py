"""Mixtures of the predictions of a local model and of a method."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import MODEL, SIZES, small_clients

from jaxfl import LocalSGD, simulate
from jaxfl.algorithms import dp_fedavg_fb, fedavg, mixed, prior_corrected
from jaxfl.algorithms.mixed import _FOLDS, _INIT, _TRAINING, _divided, _folds
from jaxfl.data import load, make_clients
from jaxfl.models import gru, mlp
from jaxfl.tasks import multi_label, regression
from jaxfl.types import ClientData

KEY = jax.random.key(23)
DIGITS = load("digits")
LOCAL = LocalSGD(optax.sgd(0.2), 4, 5)
INPUTS = DIGITS.test_inputs[:30]


def data_of(rows, padding=4, labels=DIGITS.train_labels):
    """Return a client with these rows of the digits, and with padding."""
    return ClientData(
        jnp.asarray(DIGITS.train_inputs),
        jnp.asarray(labels),
        jnp.asarray(np.pad(np.asarray(rows, int), (0, padding))),
        jnp.asarray(len(rows)),
    )


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def own_model(data):
    """Return the weights of the model that a client trains alone."""
    start = MODEL.init(jax.random.fold_in(KEY, _INIT))
    return LOCAL.train(jax.random.fold_in(KEY, _TRAINING), MODEL, start, data)[0]


def at_weight(method, params, weight):
    """Return the outputs of a mixture whose local model has the given weight."""
    mixture = params["mixture"]._replace(weight=jnp.float32(weight))
    x = method.model.prepare(jnp.asarray(INPUTS))
    return np.asarray(method.model.apply({**params, "mixture": mixture}, x))


@pytest.mark.parametrize("wrap", [lambda base: base, prior_corrected], ids=["plain", "corrected"])
def test_the_ends_are_the_two_models_and_between_are_their_mixtures(wrap):
    base = wrap(dp_fedavg_fb(MODEL, head=LOCAL))
    method = mixed(base, local=LOCAL)
    server, _ = method.init(KEY, 1)
    data = data_of(np.arange(40))
    params = method.personalize(KEY, server, (), data)
    x = MODEL.prepare(jnp.asarray(INPUTS))
    own = np.asarray(MODEL.apply(own_model(data), x))
    personal = base.personalize(KEY, server, (), data)
    shared = np.asarray(base.model.apply(personal, x))
    np.testing.assert_array_equal(at_weight(method, params, 0), shared)
    np.testing.assert_array_equal(at_weight(method, params, 1), own)
    for weight in (0.1, 0.7):
        expected = weight * np.exp(log_softmax(own)) + (1 - weight) * np.exp(log_softmax(shared))
        found = np.exp(log_softmax(at_weight(method, params, weight)))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("pick", [False, True])
@pytest.mark.parametrize("strength", [0.0, 0.6, 1.0])
def test_the_weight_has_the_least_loss_on_examples_left_out(pick, strength):
    """The method's model lies between a first model and one that is fitted to all examples."""
    rows = np.arange(40)
    data, folds = data_of(rows), 3
    good = LocalSGD(optax.sgd(0.2), 16, 40).train(KEY, MODEL, MODEL.init(KEY), data)[0]
    params = jax.tree.map(lambda a, b: strength * a + (1 - strength) * b, good, MODEL.init(KEY))
    method = mixed(fedavg(MODEL), local=LOCAL, folds=folds, pick=pick)
    server = method.init(KEY, 1)[0]._replace(params=params)
    found = float(method.personalize(KEY, server, (), data)["mixture"].weight)
    fold = np.asarray(_folds(jax.random.fold_in(KEY, _FOLDS), data, folds, by_class=True))[
        : len(rows)
    ]
    weights = np.array([0.0, 1.0]) if pick else np.arange(11) / 10
    losses = np.zeros(len(weights))
    for k in range(folds):
        own = own_model(data_of(rows[fold != k], padding=len(rows) + 4 - (fold != k).sum()))
        left = rows[fold == k]
        labels = DIGITS.train_labels[left]
        x = MODEL.prepare(jnp.asarray(DIGITS.train_inputs[left]))
        at = np.arange(len(labels)), labels
        p = np.exp(log_softmax(MODEL.apply(own, x)))[at]
        q = np.exp(log_softmax(MODEL.apply(params, x)))[at]
        losses += [-np.log(w * p + (1 - w) * q).sum() for w in weights]
    assert found == pytest.approx(weights[losses.argmin()])


def test_weights_differ_by_how_good_the_shared_model_is():
    data = data_of(np.arange(40))
    good = LocalSGD(optax.sgd(0.2), 16, 40).train(
        KEY, MODEL, MODEL.init(KEY), data_of(np.arange(900))
    )[0]
    method = mixed(fedavg(MODEL), local=LOCAL)
    server, _ = method.init(KEY, 1)
    weights = [
        float(method.personalize(KEY, server._replace(params=params), (), data)["mixture"].weight)
        for params in (good, jax.tree.map(lambda leaf: 5 * leaf, MODEL.init(KEY)))
    ]
    assert weights[0] <= 0.3
    assert weights[1] >= 0.9


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_folds_divide_classes_evenly_and_leave_none_out_wholly(folds):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        rows = rng.choice(1000, rng.integers(1, 60), replace=False)
        labels = DIGITS.train_labels[rows]
        fold = np.asarray(_folds(jax.random.key(seed), data_of(rows), folds, by_class=True))
        assert (fold[len(rows) :] == -1).all()
        fold = fold[: len(rows)]
        for own in np.unique(labels):
            several = fold[labels == own]
            if len(several) == 1:
                assert several == -1
                continue
            sizes = np.bincount(several, minlength=folds)
            assert sizes.sum() == len(several)
            assert np.ptp(sizes) <= 1
            assert sizes.max() < len(several)


def test_folds_are_drawn():
    data = data_of(np.arange(60))
    one, other = (_folds(jax.random.key(seed), data, 3, by_class=True) for seed in (0, 1))
    assert not np.array_equal(one, other)
    plain = np.asarray(_folds(KEY, data, 3, by_class=False))
    assert np.bincount(plain[:60]).tolist() == [20, 20, 20]
    assert (plain[60:] == -1).all()


def test_a_client_is_divided_without_loss():
    rows = np.array([7, 3, 100, 42, 8, 9])
    data, out = data_of(rows), jnp.asarray([0, 1, 0, 0, 1, 0, 0, 0, 0, 0], bool)
    kept, left = _divided(data, out)
    assert (int(kept.size), int(left.size)) == (4, 2)
    inputs, labels = kept.take(jnp.arange(10))
    np.testing.assert_array_equal(labels[:4], DIGITS.train_labels[[7, 100, 42, 9]])
    np.testing.assert_array_equal(inputs[:4], DIGITS.train_inputs[[7, 100, 42, 9]])
    assert not np.any(labels[4:])
    assert not np.any(inputs[4:])
    np.testing.assert_array_equal(left.take(jnp.arange(10))[1][:2], DIGITS.train_labels[[3, 8]])
    whole, none = _divided(data, jnp.zeros(10, bool))
    assert int(none.size) == 0
    np.testing.assert_array_equal(whole.take(jnp.arange(6))[1], DIGITS.train_labels[rows])


@pytest.mark.parametrize("rows", [[], [5], [0, 1], [0, 1, 2]])
def test_a_client_without_two_examples_of_a_class_has_the_methods_predictions(rows):
    assert len(set(DIGITS.train_labels[rows])) == len(rows)
    method = mixed(fedavg(MODEL), local=LOCAL)
    server, _ = method.init(KEY, 1)
    params = method.personalize(KEY, server, (), data_of(rows))
    assert float(params["mixture"].weight) == 0
    x = MODEL.prepare(jnp.asarray(INPUTS))
    np.testing.assert_array_equal(method.model.apply(params, x), MODEL.apply(server.params, x))


def test_fewer_examples_than_folds():
    label = DIGITS.train_labels[0]
    rows = np.flatnonzero(DIGITS.train_labels == label)[:2]
    method = mixed(fedavg(MODEL), local=LOCAL, folds=5)
    server, _ = method.init(KEY, 1)
    params = method.personalize(KEY, server, (), data_of(rows))
    # Of one class alone, any local model beats a random one.
    assert float(params["mixture"].weight) == 1


def test_a_local_model_that_diverges_has_no_weight():
    method = mixed(fedavg(MODEL), local=LocalSGD(optax.sgd(1e30), 4, 5))
    server, _ = method.init(KEY, 1)
    params = method.personalize(KEY, server, (), data_of(np.arange(30)))
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params["mixture"].own))
    assert float(params["mixture"].weight) == 0
    x = MODEL.prepare(jnp.asarray(INPUTS))
    np.testing.assert_array_equal(method.model.apply(params, x), MODEL.apply(server.params, x))


def test_more_folds_trace_no_more():
    calls = []

    def traces(folds):
        def apply(params, x, *key):
            calls.append(folds)
            return MODEL.apply(params, x, *key)

        method = mixed(fedavg(MODEL._replace(apply=apply)), local=LOCAL, folds=folds)
        server, _ = method.init(KEY, 1)
        calls.clear()
        jax.eval_shape(lambda: method.personalize(KEY, server, (), data_of(np.arange(30))))
        return len(calls)

    assert traces(2) == traces(7) > 0


def test_vectorised_clients_are_single_ones():
    method = mixed(fedavg(MODEL, local=LOCAL), local=LOCAL)
    options = {"rounds": 1, "progress": False}
    one, several = (
        simulate(KEY, method, small_clients(), chunk=chunk, **options) for chunk in (1, 4)
    )
    np.testing.assert_allclose(one.scores["loss"], several.scores["loss"], rtol=1e-4, atol=1e-5)
    assert SIZES[2] == 0


def numbers():
    """Return targets of a regression: the mean pixel of each training picture, in [0, 1]."""
    targets = DIGITS.train_inputs.reshape(len(DIGITS.train_inputs), -1).mean(axis=1) / 16
    return targets.astype(np.float32)


def test_outputs_of_a_regression_are_mixed():
    model = mlp((8, 8, 1), 1, hidden=())._replace(task=regression())
    local = LocalSGD(optax.sgd(0.01), 8, 30)
    method = mixed(fedavg(model), local=local)
    server, _ = method.init(KEY, 1)
    data = data_of(np.arange(30), labels=numbers())
    params = method.personalize(KEY, server, (), data)
    x = model.prepare(jnp.asarray(INPUTS))
    own = np.asarray(model.apply(params["mixture"].own, x))
    shared = np.asarray(model.apply(server.params, x))
    for weight in (0.0, 0.3, 1.0):
        expected = weight * own + (1 - weight) * shared
        np.testing.assert_allclose(
            at_weight(method, params, weight), expected, rtol=1e-5, atol=1e-6
        )
    assert float(params["mixture"].weight) >= 0.8


def test_a_regression_runs():
    targets = numbers()
    data = (DIGITS.train_inputs, targets, DIGITS.train_inputs, targets)
    lists = [np.arange(20), np.arange(20, 50), np.arange(50, 51)]
    model = mlp((8, 8, 1), 1, hidden=())._replace(task=regression())
    clients = make_clients(data, lists, lists)
    result = simulate(KEY, mixed(fedavg(model), local=LOCAL), clients, rounds=1, progress=False)
    assert np.isfinite(result.scores["mse"]).all()


def test_probabilities_of_a_next_token_are_mixed():
    model = gru(5, length=4, embedding=2, width=3)
    tokens = jax.random.randint(KEY, (20, 5), 0, 5)
    data = ClientData(tokens[:, :-1], tokens[:, 1:], jnp.arange(20), jnp.asarray(18))
    method = mixed(fedavg(model), local=LOCAL)
    server, _ = method.init(KEY, 1)
    params = method.personalize(KEY, server, (), data)
    x = model.prepare(tokens[:, :-1])
    own = np.exp(log_softmax(model.apply(params["mixture"].own, x)))
    shared = np.exp(log_softmax(model.apply(server.params, x)))
    mixture = params["mixture"]._replace(weight=jnp.float32(0.4))
    found = method.model.apply({**params, "mixture": mixture}, x)
    np.testing.assert_allclose(np.exp(found), 0.4 * own + 0.6 * shared, rtol=1e-4, atol=1e-6)


def test_other_tasks_and_folds_are_refused():
    with pytest.raises(
        ValueError, match="algorithm must be for one of the tasks classification, next_token, reg"
    ):
        mixed(fedavg(MODEL._replace(task=multi_label())))
    with pytest.raises(ValueError, match=r"folds must be .* got 1"):
        mixed(fedavg(MODEL), folds=1)
    with pytest.raises(ValueError, match="without 'mixture' among its parameters"):
        mixed(mixed(fedavg(MODEL)))
