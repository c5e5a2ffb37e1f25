"""Predictions that are corrected by a client's own counts of labels."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import (
    ALGORITHMS,
    MECHANISMS,
    MODEL,
    SEND_WEIGHTS,
    SIZES,
    client_data,
    small_clients,
    untrained,
)

from jaxfl import LocalSGD, membership, simulate, sweep
from jaxfl.algorithms import dp_fedavg, fedavg, fedbuff, mixed, prior_corrected
from jaxfl.algorithms.prior_corrected import Counted, released_log_prior, with_shares
from jaxfl.data import classes_per_client, from_arrays, load, make_clients
from jaxfl.models import from_flax, mlp
from jaxfl.privacy import DPSGD, Full, Mechanism, Poisson
from jaxfl.privacy.clip import clip
from jaxfl.run.check import check_algorithm
from jaxfl.tasks import cross_entropy, multi_label, regression
from jaxfl.types import ClientData

KEY = jax.random.key(22)
LINEAR = mlp((8, 8, 1), 10, hidden=())
DIGITS = load("digits")
RUN = {"rounds": 2, "progress": False}


def strong(seed=0):
    """Return random weights whose logits differ by hundreds."""
    params = MODEL.init(jax.random.key(seed))
    return jax.tree.map(lambda leaf: 30 * jax.random.normal(KEY, leaf.shape), params)


def own_data(rows):
    """Return a client with these rows of the digits, and with five positions of padding."""
    rows = np.asarray(rows)
    return ClientData(
        jnp.asarray(DIGITS.train_inputs),
        jnp.asarray(DIGITS.train_labels),
        jnp.asarray(np.pad(rows, (0, 5))),
        jnp.asarray(len(rows)),
    )


def rows_of(counts):
    """Return the first training rows of the digits with `counts[k]` examples of each class k."""
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
    found = softmax(
        outputs_of(method, params, own_data(rows_of(counts)), inputs).astype(np.float64)
    )
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
        found = outputs_of(
            prior_corrected(fedavg(MODEL), smoothing=0.0), params, client_data(index), inputs
        )
        predicted = found.argmax(axis=1)
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(predicted, own[plain[:, own].argmax(axis=1)])


def test_smoothing_lets_a_sure_model_predict_an_absent_class():
    params, inputs = strong(), DIGITS.test_inputs
    found = outputs_of(
        prior_corrected(fedavg(MODEL), smoothing=0.1), params, client_data(5), inputs
    )
    assert SIZES[5] == 1
    assert len(np.unique(found.argmax(axis=1))) > 1


def test_a_restricted_client_trains_without_nan():
    """Padding has label 0, which most clients do not have."""
    base = fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), 4))
    method = prior_corrected(base, smoothing=0.0, train=True)
    result = simulate(KEY, method, small_clients(), **RUN)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.server))
    assert all(math.isfinite(row["train_loss"]) for row in result.metrics)


def test_local_steps_descend_on_the_corrected_loss():
    """A step on all of a client's examples is the same in NumPy."""
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
    x = np.asarray(LINEAR.prepare(jnp.asarray(clients.inputs[rows])), np.float64).reshape(
        len(rows), -1
    )
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
"""Methods with private local steps, in which a correction raises an error."""
TWICE = {"fine_tuned", "prior_corrected", "prior_corrected_released", "mixed"}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in REFUSED | TWICE])
def test_every_method_trains_by_the_corrected_loss_or_is_refused(name):
    method = prior_corrected(ALGORITHMS[name](), train=True)
    if name in LOSS_OF_ITS_OWN:
        with pytest.raises(
            ValueError, match="train must be left out for a method with a loss of its own"
        ):
            check_algorithm(method, small_clients(), 2)
    else:
        check_algorithm(method, small_clients(), 2)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_examples_that_are_protected_one_by_one_have_no_correction_in_training(name):
    assert prior_corrected(ALGORITHMS[name]()).dp_sgd is not None
    with pytest.raises(ValueError, match="train must be left out with private local steps"):
        prior_corrected(ALGORITHMS[name](), train=True)


def test_a_correction_in_private_steps_would_let_an_example_move_the_others():
    """Another label of one example changes the gradients of all, hence the error."""
    labels = np.array(DIGITS.train_labels)
    rows = rows_of([3, 3, 0, 0, 0, 0, 0, 0, 0, 0])
    changed = np.bincount(np.where(rows == rows[0], 5, labels[rows]), minlength=10)
    assert (np.bincount(labels[rows], minlength=10) != changed).sum() == 2


@pytest.mark.parametrize("name", sorted(TWICE))
def test_predictions_are_corrected_once(name):
    with pytest.raises(
        ValueError, match=r"without 'log_prior' among its parameters.*Wrap the method once"
    ):
        prior_corrected(ALGORITHMS[name]())


def test_other_tasks_are_refused():
    for task in (regression(), multi_label()):
        with pytest.raises(
            ValueError, match="algorithm must be for a classification, got model='mlp' with task="
        ):
            prior_corrected(fedavg(MODEL._replace(task=task)))


def test_a_model_must_say_its_inputs():
    with pytest.raises(ValueError, match="algorithm must have a model with an `input_shape`"):
        prior_corrected(fedavg(MODEL._replace(input_shape=None)))
    with pytest.raises(ValueError, match=r"takes a batch of its input_shape=\(9, 9, 1\)"):
        prior_corrected(fedavg(MODEL._replace(input_shape=(9, 9, 1))))
    tokens = MODEL._replace(apply=lambda params, x, *key: jnp.zeros((2, 3, 10)))
    with pytest.raises(
        ValueError, match=r"must have a model with logits \[B, K\], got \(2, 3, 10\)"
    ):
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
    """With two known classes of ten, even a guess is right half of the time."""
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
    methods: dict[str, Any] = {
        "plain": base,
        "corrected": prior_corrected(base),
        "mixed": mixed(base, local=local),
    }
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
    plain, corrected = (
        simulate(KEY, m, small_clients(), **RUN) for m in (base, prior_corrected(base))
    )
    jax.tree.map(np.testing.assert_array_equal, plain.server, corrected.server)
    assert plain.statement == corrected.statement


W = 0.2
"""Share of the clip bound that the counts of labels get."""


def label_shares(clients):
    """Return each client's shares of classes `[C, K]`. They are 0 without examples."""
    counts = [
        np.bincount(clients.labels[clients.train[index][:size]], minlength=10)
        for index, size in enumerate(clients.train_size)
    ]
    return np.array(counts) / np.maximum(clients.train_size, 1)[:, None]


@pytest.mark.parametrize("bound", [1e-3, 1e3, math.inf])
def test_without_noise_the_released_shares_are_the_mean_of_all_clients(bound):
    """This holds even if the clip bound shortens every update."""
    clients = small_clients()
    local = LocalSGD(optax.sgd(0.1), 4)
    base = fedavg(MODEL, local=local, mechanism=Mechanism(clip=bound))
    result = simulate(KEY, prior_corrected(base, released=W), clients, **RUN)
    assert isinstance(result.server, Counted)
    clipped = [row["clipped"] for row in result.metrics]
    assert max(clipped) == 0 if bound > 1 else min(clipped) > 0.8
    unit = W * (1 if math.isinf(bound) else bound)
    found = np.asarray(result.server.total) / (RUN["rounds"] * unit)
    np.testing.assert_allclose(found, label_shares(clients).mean(axis=0), rtol=1e-4)


def test_without_a_bound_the_shared_model_is_the_methods():
    base = fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), 4))
    methods = base, prior_corrected(base, released=W)
    plain, released = (simulate(KEY, method, small_clients(), **RUN) for method in methods)
    jax.tree.map(np.testing.assert_array_equal, plain.server, released.server.method)


def counted(rounds):
    """Return the server's state after rounds that released these shares of classes."""
    rounds = np.reshape(np.asarray(rounds, np.float32), (-1, 10))
    total = jnp.asarray(rounds.sum(axis=0))
    return Counted((), total, jnp.sum(jnp.asarray(rounds) ** 2), jnp.float32(len(rounds)))


def test_probabilities_are_divided_by_the_released_shares():
    """A share that is too small, or below 0, counts as a tenth of 1 / 10."""
    counts = np.array([4, 0, 1, 7, 0, 0, 2, 0, 0, 1])
    shared = np.array([30, 20, 9, 9, 8, 8, 8, 8, 0.1, -0.1]) / 100
    params, inputs = MODEL.init(KEY), DIGITS.test_inputs[:20]
    plain = softmax(np.asarray(MODEL.apply(params, MODEL.prepare(jnp.asarray(inputs))), np.float64))
    expected = plain * (counts + 0.5) / np.maximum(shared, 0.01)
    expected /= expected.sum(axis=1, keepdims=True)
    base = fedavg(MODEL, mechanism=Mechanism(clip=3.0))
    method = prior_corrected(base, smoothing=0.5, released=W)
    start = method.init(KEY, 1)[0].method
    server = counted([3.0 * W * shared] * 2)._replace(method=start._replace(params=params))
    personal = method.personalize(KEY, server, (), own_data(rows_of(counts)))
    logits = method.model.apply(personal, method.model.prepare(jnp.asarray(inputs)))
    found = softmax(np.asarray(logits, np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


def test_noisy_shares_are_drawn_towards_uniform_ones():
    """The weight is the squared standard error of their mean over rounds, here in NumPy."""
    generator = np.random.default_rng(0)
    shares = 0.6 ** np.arange(10) * 0.4
    rounds = shares + 0.1 * generator.normal(size=(20, 10))
    mean = rounds.mean(axis=0)
    error = rounds.var(axis=0, ddof=1).sum() / 20
    trust = 1 - error / (10 * mean.var())
    assert 0.8 < trust < 0.98
    expected = np.log(np.maximum(trust * mean + (1 - trust) / 10, 0.01))
    found = released_log_prior(counted(0.5 * rounds), 0.5)
    np.testing.assert_allclose(found, expected - expected.max(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "rounds",
    [
        np.full((3, 10), 0.3),
        np.zeros((0, 10)),
        np.full((1, 10), -1.0),
        [10 * np.eye(10)[i] for i in range(9)],
    ],
    ids=["equal", "no round", "all below 0", "noise alone"],
)
def test_shares_that_say_nothing_change_no_bit(rounds):
    np.testing.assert_array_equal(released_log_prior(counted(rounds), W), np.zeros(10))


def test_clients_with_equally_many_of_each_class_change_no_prediction():
    by_class = rows_of([6] * 10).reshape(10, 6)
    rows = [by_class[:, :2].ravel(), by_class[:, 2:5].ravel(), by_class[:, 5]]
    clients = make_clients(DIGITS, rows, list(np.arange(30).reshape(3, 10)))
    base = fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), 4))
    methods = base, prior_corrected(base, released=W)
    plain, released = (simulate(KEY, method, clients, **RUN) for method in methods)
    assert np.ptp(released.server.total) == 0 < released.server.total[0]
    np.testing.assert_array_equal(plain.scores["loss"], released.scores["loss"])


@pytest.mark.parametrize("shares", [np.eye(10)[3], np.full(10, 0.1), np.zeros(10)])
@pytest.mark.parametrize("length", [0.0, 0.5, 0.99, 1.0, 1.5, 1e4])
def test_the_bound_holds_for_update_and_shares_together(length, shares):
    """The shares keep the length w C for any update, as the closed form says."""
    bound, share = 0.3, 0.9
    direction = np.array([[0.6, 0.0], [0.0, -0.8]])
    update = {"w": jnp.asarray(length * bound * direction, jnp.float32)}
    joint = with_shares(update, jnp.asarray(share * shares, jnp.float32), bound)
    np.testing.assert_array_equal(joint["update"]["w"], update["w"])
    sent, _ = clip(joint, bound)
    own = bound * math.sqrt(1 - share**2 * (shares**2).sum())
    expected = min(length * bound, own) * direction
    np.testing.assert_allclose(sent["shares"], bound * share * shares, rtol=1e-5)
    np.testing.assert_allclose(sent["update"]["w"], expected, rtol=1e-5)
    assert float(optax.tree.norm(sent)) <= bound * (1 + 1e-6)


def test_the_noise_on_released_shares_has_the_stated_std():
    rounds, z, bound = 4, 1.5, 0.3
    clients = small_clients()
    base = fedavg(LINEAR, mechanism=Mechanism(clip=bound, noise_multiplier=z))
    keys = jax.random.split(KEY, 30)
    options = {"rounds": rounds, "progress": False}
    results = sweep(keys, lambda: prior_corrected(base, released=W), {}, clients, **options)
    means = np.array([result.server.total for result in results]) / (rounds * W * bound)
    noise = means - label_shares(clients).mean(axis=0)
    expected = z / (W * len(SIZES) * math.sqrt(rounds))
    assert noise.std() == pytest.approx(expected, rel=4 / math.sqrt(2 * noise.size))
    assert abs(noise.mean()) < 4 * expected / math.sqrt(noise.size)
    squares = np.array([result.server.squares for result in results]) / (W * bound) ** 2
    errors = (squares / rounds - (means**2).sum(axis=1)) / (rounds - 1)
    assert errors.mean() == pytest.approx(10 * expected**2, rel=4 * math.sqrt(2 / (3 * noise.size)))


@pytest.mark.parametrize("mechanism", ["plain", "banded noise", "extrapolated"])
def test_released_shares_cost_no_epsilon(mechanism):
    base = untrained(MECHANISMS.get(mechanism, Mechanism(clip=0.2, noise_multiplier=1.0)))
    method = prior_corrected(base, released=W)
    assert method.mechanism is base.mechanism
    plain, released = (simulate(KEY, m, small_clients(), **RUN) for m in (base, method))
    assert released.statement == plain.statement
    assert 0 < plain.statement["honest"]["aggregate"]["epsilon"] < math.inf


UNCOVERED = {
    **dict.fromkeys(REFUSED, "private local steps"),
    **dict.fromkeys(SEND_WEIGHTS, "sends weights"),
    "local_only": "sends nothing",
    "dp_pfeddsu_paper": "with the mechanism PrivateMask",
    "adp_pfl_public": "with the mechanism PrivacyFilter",
    "adp_pfl_released": "with the mechanism PrivacyFilter",
    "adp_pfl_paper": "with the mechanism PrivacyFilter",
}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in TWICE])
def test_every_method_releases_shares_or_says_why_not(name):
    base = ALGORITHMS[name]()
    if name in UNCOVERED:
        words = f"released must be 0 .*{UNCOVERED[name]}.*Leave released out"
        with pytest.raises(ValueError, match=words):
            prior_corrected(base, released=W)
    else:
        check_algorithm(prior_corrected(base, released=W), small_clients(), 2)


@pytest.mark.parametrize("name", ["adaptive clip", "median", "krum"])
def test_mechanisms_that_do_more_than_add_up_release_no_shares(name):
    with pytest.raises(ValueError, match="released must be 0 with the mechanism"):
        prior_corrected(untrained(MECHANISMS[name]), released=W)


def test_training_with_the_correction_needs_no_released_shares():
    with pytest.raises(ValueError, match=r"released must be 0 with train.*got 0\.2 with algorithm"):
        prior_corrected(fedavg(MODEL), train=True, released=W)


def test_without_released_shares_all_but_the_evaluation_is_the_methods():
    base = fedavg(MODEL)
    method = prior_corrected(base, released=0.0)
    assert (method.init, method.client_update, method.server_update) == (
        base.init,
        base.client_update,
        base.server_update,
    )


@pytest.mark.slow
def test_released_shares_of_a_sweep_are_those_of_single_runs():
    """At 0 the shares are uniform, and nothing about labels is sent."""
    base = fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), 4), mechanism=Mechanism(clip=0.2))

    def build(released):
        return prior_corrected(base, released=released)

    values = [0.0, 0.2, 0.9]
    swept = sweep(KEY, build, {"released": values}, small_clients(), paired_noise=True, **RUN)
    for value, result in zip(values, swept, strict=True):
        alone = simulate(KEY, build(value), small_clients(), **RUN)
        assert_close(result.scores["loss"], alone.scores["loss"], rtol=1e-3)
    np.testing.assert_array_equal(swept[0].server.total, np.zeros(10))


def test_stale_clients_release_shares_too():
    base = untrained(Mechanism(clip=1e3))
    for method in (
        fedbuff(prior_corrected(base, released=W), staleness=1),
        prior_corrected(fedbuff(base, staleness=1), released=W),
    ):
        result = simulate(KEY, method, small_clients(), **RUN)
        assert np.isfinite(result.metrics[-1]["loss"])


def test_released_shares_help_where_some_classes_are_rare_everywhere():
    """A shared model already knows that they are rare. A client's shares would count it twice."""
    generator = np.random.default_rng(0)
    shares = generator.dirichlet(3 * 0.4 * 0.6 ** np.arange(10), 100)

    def drawn(labels):
        classes = [generator.choice(10, 10, p=own) for own in shares]
        return [[generator.choice(np.flatnonzero(labels == k)) for k in own] for own in classes]

    train, test = (np.ravel(drawn(labels)) for labels in (DIGITS.train_labels, DIGITS.test_labels))
    data = from_arrays(
        DIGITS.train_inputs[train],
        DIGITS.train_labels[train],
        DIGITS.test_inputs[test],
        DIGITS.test_labels[test],
    )
    rows = list(np.arange(1000).reshape(100, 10))
    clients = make_clients(data, rows, rows)
    local = LocalSGD(optax.sgd(0.5), 10, 5)
    base = dp_fedavg(LINEAR, clip=1.0, noise_multiplier=1.0, sampling=Full(), local=local)
    uniform, released = (
        simulate(
            KEY,
            prior_corrected(base, smoothing=1.0, released=share),
            clients,
            rounds=20,
            progress=False,
        ).metrics[-1]
        for share in (0.0, 0.3)
    )
    assert released["accuracy"] > uniform["accuracy"] + 0.01
    assert released["loss"] < 0.9 * uniform["loss"]
