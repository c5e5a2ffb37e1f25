"""Tasks: losses and metrics, compared with scikit-learn and NumPy, and runs of each task."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from sklearn import metrics as sk
from test_contract import KEY as KEY_OF_RUNS
from test_contract import ROUNDS, assert_close, run

import jaxfl
from jaxfl import callbacks, tasks
from jaxfl.algorithms import dp_fedavg, dp_fedavg_fb, fedavg, feddpa
from jaxfl.data import from_arrays, iid, make_clients
from jaxfl.local.train import LocalSGD
from jaxfl.models import from_flax, gru
from jaxfl.privacy import DPSGD, Poisson
from jaxfl.privacy.accounting.ledgers import epsilon, planned_ledger
from jaxfl.run.check import check_algorithm

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def score(metric, outputs, labels, batches=3):
    """Return a metric over batches, each of which is padded with an example that must not count."""
    total = None
    for o, y in zip(np.array_split(outputs, batches), np.array_split(labels, batches), strict=True):
        o, y = np.concatenate([o, np.full_like(o[:1], np.nan)]), np.concatenate([y, y[:1]])
        sums = metric.sums(
            jnp.asarray(o), jnp.asarray(y), (jnp.arange(len(y)) < len(y) - 1).astype(jnp.float32)
        )
        total = metric.merge(jax.tree.map(jnp.zeros_like, sums) if total is None else total, sums)
    return float(metric.value(total))


def test_classification_as_scikit_learn():
    outputs, labels = RNG.normal(size=(60, 4)).astype(np.float32), RNG.integers(0, 3, 60)
    task = tasks.classification("accuracy", "f1", "auc")
    predicted, p = outputs.argmax(1), np.asarray(jax.nn.softmax(outputs))
    assert score(task.metrics["accuracy"], outputs, labels) == pytest.approx(
        sk.accuracy_score(labels, predicted)
    )
    expected = sk.f1_score(labels, predicted, average="macro")
    assert score(task.metrics["f1"], outputs, labels) == pytest.approx(expected)
    areas = [
        sk.roc_auc_score(labels == k, p[:, k]) for k in range(3)
    ]  # the fourth class does not occur
    assert score(task.metrics["auc"], outputs, labels) == pytest.approx(np.mean(areas), rel=1e-6)
    assert task.loss(jnp.asarray(outputs), jnp.asarray(labels)) == pytest.approx(
        -np.log(p[np.arange(60), labels]), rel=1e-5
    )


def test_multi_label_as_scikit_learn():
    outputs, labels = RNG.normal(size=(60, 3)).astype(np.float32), RNG.integers(0, 2, (60, 3))
    task = tasks.multi_label()
    assert score(task.metrics["f1"], outputs, labels) == pytest.approx(
        sk.f1_score(labels, outputs > 0, average="macro")
    )
    assert score(task.metrics["accuracy"], outputs, labels) == pytest.approx(
        np.mean((outputs > 0) == labels)
    )
    expected = sk.roc_auc_score(labels, outputs, average="macro")
    assert score(task.metrics["auc"], outputs, labels) == pytest.approx(expected, rel=1e-6)
    assert float(task.loss(jnp.asarray(outputs), jnp.asarray(labels))[0]) == pytest.approx(
        sk.log_loss(labels[0], 1 / (1 + np.exp(-outputs[0])))
    )


@pytest.mark.parametrize("shape", [(60,), (60, 2)])
def test_regression_as_scikit_learn(shape):
    labels = RNG.normal(3, 2, size=shape).astype(np.float32)
    outputs = (labels + RNG.normal(size=shape).astype(np.float32)).reshape(60, -1)
    task, flat = tasks.regression(), labels.reshape(60, -1)
    assert score(task.metrics["mse"], outputs, labels) == pytest.approx(
        sk.mean_squared_error(flat, outputs), rel=1e-5
    )
    assert score(task.metrics["mae"], outputs, labels) == pytest.approx(
        sk.mean_absolute_error(flat, outputs), rel=1e-5
    )
    expected = sk.r2_score(flat, outputs, multioutput="variance_weighted")
    assert score(task.metrics["r2"], outputs, labels) == pytest.approx(expected, rel=1e-4)


def test_next_token_by_hand():
    p = np.array([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]] * 3, np.float32)
    labels = np.array([[0, 1, -1], [1, -1, -1], [2, 2, 2]])
    task = tasks.next_token()
    right, losses = 3 / 6, -np.log([0.5, 0.8, 0.25, 0.25, 0.1, 0.6])
    assert score(task.metrics["accuracy"], np.log(p), labels) == pytest.approx(right)
    assert score(task.metrics["perplexity"], np.log(p), labels) == pytest.approx(
        np.exp(losses.mean()), rel=1e-5
    )
    expected = [losses[:2].mean(), losses[2], losses[3:].mean()]
    np.testing.assert_allclose(task.loss(jnp.log(p), jnp.asarray(labels)), expected, rtol=1e-5)
    assert task.loss(jnp.log(p[:1]), jnp.full((1, 3), -1))[0] == 0


def test_metrics_that_are_not_defined_are_left_out():
    task = tasks.classification("accuracy", "auc")
    outputs = RNG.normal(size=(9, 2)).astype(np.float32)
    assert np.isnan(score(task.metrics["auc"], outputs, np.zeros(9, int)))
    assert np.isnan(score(tasks.regression().metrics["r2"], outputs[:, 0], np.ones(9)))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("size", [2, 37, 200])
def test_areas_are_exact_with_ties_and_in_any_batches(classes, size):
    outputs = RNG.normal(size=(7, classes)).astype(np.float32)[RNG.integers(0, 7, size)]
    labels = np.arange(size) % classes
    p = np.asarray(jax.nn.softmax(outputs.astype(np.float64)), np.float64).round(9)
    seen = np.unique(labels)
    expected = np.mean([sk.roc_auc_score(labels == k, p[:, k]) for k in seen])
    metric = tasks.classification("auc", exact=200).metrics["auc"]
    for batch in (size, 8, 64):
        assert in_batches(metric, outputs, labels, batch) == pytest.approx(expected, rel=1e-6)


def in_batches(metric, outputs, labels, batch):
    """Return a metric over padded batches, from zeros as in an evaluation."""
    total = None
    for start in range(0, len(labels), batch):
        own = outputs[start : start + batch], labels[start : start + batch]
        padding = batch - len(own[1])
        weights = np.pad(np.ones(len(own[1]), np.float32), (0, padding))
        x, y = (
            np.pad(own[0], ((0, padding), (0, 0)), constant_values=9),
            np.pad(own[1], (0, padding)),
        )
        sums = metric.sums(jnp.asarray(x), jnp.asarray(y), jnp.asarray(weights))
        total = jax.tree.map(jnp.zeros_like, sums) if total is None else total
        total = metric.merge(total, sums)
    return float(metric.value(total))


def test_areas_of_probabilities_that_round_to_one_are_exact():
    outputs = np.array(
        [[30.0, 0.0, 1.0], [40.0, 0.0, 1.0], [50.0, 0.0, 1.0], [0.0, 30.0, 1.0]], np.float32
    )
    labels = np.array([1, 0, 0, 1])
    metric = tasks.classification("auc").metrics["auc"]
    assert in_batches(metric, outputs, labels, 4) == 1.0


def test_areas_of_more_examples_than_are_kept_are_near():
    # Draws that other tests move would be those of a curve that is exact once in a while.
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(300, 2)).astype(np.float32)
    labels = rng.integers(0, 2, 300)
    expected = sk.roc_auc_score(labels, outputs[:, 1] - outputs[:, 0])
    near = in_batches(tasks.classification("auc", exact=299).metrics["auc"], outputs, labels, 64)
    assert near == pytest.approx(expected, abs=0.005)
    assert near != pytest.approx(expected, rel=1e-6)


def test_class_weights_are_factors_of_the_loss():
    outputs, labels = RNG.normal(size=(20, 3)).astype(np.float32), RNG.integers(0, 3, 20)
    weights: Any = np.array([1.0, 2.0, 5.0])
    plain, weighted = tasks.classification(), tasks.classification(class_weights=weights)
    given = jnp.asarray(outputs), jnp.asarray(labels)
    np.testing.assert_allclose(
        weighted.loss(*given), plain.loss(*given) * weights[labels], rtol=1e-6
    )
    with pytest.raises(ValueError, match="output for each of 3 class_weights, got 4 outputs"):
        weighted.check(jax.ShapeDtypeStruct((2, 4), jnp.float32), labels)


def test_intervals_of_areas_solve_their_equation():
    area, m, n = (
        np.array([0.5, 0.9, 1.0, np.nan]),
        np.array([10, 20, 30, 4]),
        np.array([10, 80, 5, 4]),
    )
    low, high = tasks.auc_interval(area, m, n, level=0.9)
    for theta in (low, high[:2]):
        x = theta[: len(theta)]
        k = (m[: len(x)] + n[: len(x)]) / 2 - 1
        variance = x * (1 - x) * (1 + k * (1 - x) / (2 - x) + k * x / (1 + x)) / (m * n)[: len(x)]
        np.testing.assert_allclose((area[: len(x)] - x) ** 2, 1.6448536**2 * variance, rtol=1e-5)
    assert np.all(low[:3] < area[:3])
    assert high[2] == 1
    assert np.isnan([low[3], high[3]]).all()


def test_intervals_have_the_true_area_as_often_as_they_say():
    truth, found = 0.8, []
    for _ in range(400):
        positive, negative = RNG.exponential(truth / (1 - truth), 40), RNG.exponential(1, 40)
        area = (positive[:, None] > negative).mean()
        low, high = tasks.auc_interval(area, 40, 40)
        found.append(low <= truth <= high)
    assert 0.92 < np.mean(found) < 0.985


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tasks.classification(exact=0), "exact must be a whole number from 1 to 65535, got 0"),
        (lambda: tasks.classification(exact=True), "exact must be a whole number from 1 to 65535, got True"),
        (lambda: tasks.multi_label(exact=70_000), "exact must be .* got 70000"),
        (lambda: tasks.classification(class_weights=(1, 0)), "class_weights must be .* above 0"),
        (lambda: tasks.classification(class_weights=BAD), "class_weights must be .* got 'ab'"),
        (lambda: tasks.auc_interval(0.5, 1, 1, level=1), "level must be .* got 1"),
        (lambda: tasks.auc_interval(0.5, 1, 1, level=BAD), "level must be .* got 'ab'"),
        (lambda: tasks.classification(class_weights=NO_VECTOR), "class_weights must be .* got 2.0"),
        (lambda: tasks.classification(class_weights=RAGGED), r"class_weights must be .* got \[\[1.0"),
        (lambda: tasks.auc_interval(np.array([np.nan, 0.5]), np.array([0, 0]), 5), r"positive must be at least 1 .* got array\(\[0, 0\]\)"),
        (lambda: tasks.auc_interval(np.array([1.5, 0.5]), 5, 5), r"auc must have areas in \[0, 1\], got array\(\[1.5"),
    ],
)  # fmt: skip
def test_numbers_of_a_task_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()


BAD: Any = "ab"
NO_VECTOR: Any = 2.0
RAGGED: Any = [[1.0], [1.0, 2.0]]


class Tokens(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(nn.Embed(5, 4)(x))


def slow(name):
    """Mark a case as slow."""
    return pytest.param(name, marks=pytest.mark.slow)


def data_of(name):
    """Return a model and clients of a task."""
    n = 64
    x = RNG.normal(size=(n, 6)).astype(np.float32)
    if name == "regression":
        labels, task, module = x @ RNG.normal(size=6), tasks.regression(), nn.Dense(1)
    elif name == "multi_label":
        labels, task, module = (
            (x @ RNG.normal(size=(6, 3)) > 0).astype(int),
            tasks.multi_label(),
            nn.Dense(3),
        )
    else:
        x = RNG.integers(0, 5, (n, 7))
        labels, task, module = (x + 1) % 5, tasks.next_token(), Tokens()
    data = from_arrays(x[:48], labels[:48], x[48:], labels[48:])
    clients = make_clients(
        data, iid(data.train_labels, 6, seed=0), iid(data.test_labels, 6, seed=0)
    )
    return from_flax(module, x.shape[1:], task=task), clients


@pytest.mark.parametrize("name", ["regression", slow("multi_label"), slow("next_token")])
def test_a_run_learns_and_reports_its_own_metrics(name, tmp_path):
    model, clients = data_of(name)
    algorithm = fedavg(model, local=jaxfl.LocalSGD(optax.sgd(0.3), batch_size=4, epochs=2))
    result = jaxfl.simulate(
        KEY, algorithm, clients, rounds=6, eval_every=1, folder=tmp_path, progress=False
    )
    first, last, headline = result.metrics[0], result.metrics[-1], model.task.headline
    assert last["loss"] < 0.8 * first["loss"]
    assert tasks.columns(model.task) < last.keys()
    lower = model.task.metrics[headline].lower_is_better
    assert (
        last[headline] == last[f"{headline}_worst10"]
        or (last[f"{headline}_worst10"] > last[headline]) == lower
    )
    saved = np.load(tmp_path / "per_client.npz")
    assert {"loss", *model.task.metrics} < set(saved.files)
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.parametrize("name", [slow("regression"), slow("multi_label"), "next_token"])
def test_private_steps_and_fisher_take_any_task(name):
    model, clients = data_of(name)
    private = DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.5, steps=2)
    result = jaxfl.simulate(
        KEY, dp_fedavg_fb(model, local=private), clients, rounds=1, progress=False
    )
    assert np.isfinite(result.metrics[-1]["loss"])


@pytest.mark.parametrize(
    ("labels", "task", "module", "words"),
    [
        (
            np.arange(64) % 4,
            tasks.classification(),
            nn.Dense(3),
            "got 3 outputs for clients.labels up to 3",
        ),
        (np.ones(64), tasks.classification(), nn.Dense(3), "whole number"),
        (np.ones((64, 2)), tasks.regression(), nn.Dense(3), "outputs of the labels' shape"),
        (np.full((64, 3), 2), tasks.multi_label(), nn.Dense(3), "clients.labels of 0 and 1"),
        (np.ones((64, 2), int), tasks.multi_label(), nn.Dense(3), "labels"),
        (np.ones((64, 2), int), tasks.next_token(), nn.Dense(3), "logits"),
    ],
)
def test_outputs_that_do_not_cover_the_labels_are_refused(labels, task, module, words):
    x = np.ones((64, 6), np.float32)
    data = from_arrays(x, labels, x[:8], labels[:8])
    clients = make_clients(
        data, iid(data.train_labels, 2, seed=0), iid(data.test_labels, 2, seed=0)
    )
    with pytest.raises(ValueError, match=words):
        jaxfl.simulate(
            KEY, fedavg(from_flax(module, (6,), task=task)), clients, rounds=1, progress=False
        )


def own(**changes: Any):
    good: dict[str, Any] = {
        "loss": lambda o, y: (o[:, 0] - y) ** 2,
        "metrics": {"error": tasks.average(lambda o, y: abs(o[:, 0] - y))},
    }
    return lambda: jaxfl.Task("own", **(good | changes))


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (own(loss=lambda o, y: jnp.mean(o)), "one loss per example"),
        (own(metrics={"error": jaxfl.Metric(lambda o, y, w: (o[:, 0], w))}), "single number"),
    ],
)
def test_a_task_of_your_own_is_checked(task, words):
    _, clients = data_of("regression")
    model = from_flax(nn.Dense(1), (6,), task=task())
    with pytest.raises((ValueError, TypeError), match=words):
        jaxfl.simulate(KEY, fedavg(model), clients, rounds=1, progress=False)


ERROR = tasks.average(lambda o, y: o[:, 0])


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"loss": ERROR}, "reports have 'loss' already"),
        ({"epsilon": ERROR}, "reports have 'epsilon' already"),
        ({"test_size": ERROR}, "reports have 'test_size' already"),
        ({"error": ERROR, "error_std": ERROR}, "reports have 'error_std' already"),
        ({"error": ERROR, "error_examples": ERROR}, "reports have 'error_examples' already"),
        ({"top 5": ERROR}, "identifier, got 'top 5'"),
        ({3: ERROR}, "identifier, got 3|Type-check"),  # annotations are checked first in tests
        ({"error": lambda o, y: o[:, 0]}, "must be a Metric|Type-check"),
        ({}, "metrics must have at least one metric by name, got {}"),
    ],
)
def test_metrics_are_checked_where_a_task_is_made(metrics, words):
    with pytest.raises((ValueError, TypeError), match=words):
        own(metrics=metrics)()


def test_losses_and_scores_are_functions():
    wrong: Any = "mse"
    with pytest.raises(TypeError, match=r"loss must be a function of .*, got 'mse'|Type-check"):
        tasks.Task("own", wrong, {"error": ERROR})
    with pytest.raises(TypeError, match=r"score must be a function of .*, got 'mse'|Type-check"):
        tasks.average(wrong)


def test_any_identifier_is_a_name_of_a_metric_in_every_report(tmp_path):
    names = ("file", "allow_pickle", "args", "path", "self")
    task = own(metrics=dict.fromkeys(names, ERROR))()
    _, clients = data_of("regression")
    method = fedavg(from_flax(nn.Dense(1), (6,), task=task))
    log = callbacks.csv(tmp_path / "rows.csv")
    result = jaxfl.simulate(
        KEY, method, clients, rounds=1, progress=False, folder=tmp_path / "run", callbacks=[log]
    )
    with np.load(tmp_path / "run" / "per_client.npz") as written:
        for name in names:
            np.testing.assert_array_equal(written[name], result.history[name])
    assert (
        (tmp_path / "rows.csv")
        .read_text()
        .startswith("round,file,file_std,file_worst10,file_examples,allow_pickle")
    )


def test_infos_of_a_method_are_named_by_identifiers():
    _, clients = data_of("regression")
    method = fedavg(from_flax(nn.Dense(1), (6,), task=own()()))

    def update(*arguments):
        message, state, info = method.client_update(*arguments)
        return message, state, info | {"a/b": info["loss"]}

    with pytest.raises(ValueError, match="info by identifiers, got 'a/b'"):
        jaxfl.simulate(
            KEY, method._replace(client_update=update), clients, rounds=1, progress=False
        )


@pytest.mark.parametrize(
    ("mean", "std"),
    [(0.0, 1.0), (288.0, 5.0), (1000.0, 1.0), (30_000.0, 50.0), (48.85, 0.01), (1.7e9, 1e6)],
)
@pytest.mark.parametrize("batches", [1, 40])
def test_r2_keeps_its_digits_where_targets_lie_far_from_0(mean, std, batches):
    rng = np.random.default_rng(3)
    labels = (mean + std * rng.normal(size=1000)).astype(np.float32)
    outputs = (labels + 0.3 * std * rng.normal(size=1000)).astype(np.float32)
    found = score(tasks.regression("r2").metrics["r2"], outputs[:, None], labels, batches)
    assert found == pytest.approx(
        sk.r2_score(labels.astype(float), outputs.astype(float)), abs=2e-4
    )


@pytest.mark.parametrize(("mean", "std"), [(1e6, 0.5), (1e8, 8.0)])
def test_r2_does_not_drift_over_batches(mean, std):
    """At these means single precision has steps of 0.06 and 8, so a mean may lie between two."""
    rng = np.random.default_rng(5)
    labels = (mean + std * rng.normal(size=1000)).astype(np.float32)
    outputs = (labels + 0.3 * std * rng.normal(size=1000)).astype(np.float32)
    found = score(tasks.regression("r2").metrics["r2"], outputs[:, None], labels, 50)
    assert found == pytest.approx(
        sk.r2_score(labels.astype(float), outputs.astype(float)), abs=2e-4
    )


@pytest.mark.parametrize("value", [0.1, 0.7, 3.0, 1000.1, 2012.0])
def test_r2_of_equal_targets_is_not_defined(value):
    labels = np.full(133, value, np.float32)
    assert np.isnan(score(tasks.regression("r2").metrics["r2"], labels[:, None] + 0.1, labels))


def test_r2_of_several_columns_is_that_of_all_errors_over_all_spreads():
    rng = np.random.default_rng(4)
    labels = np.array([[5.0, -2000.0]]) + rng.normal(size=(60, 2)) * np.array([[1.0, 3.0]])
    outputs = labels + rng.normal(size=(60, 2))
    expected = 1 - np.sum((outputs - labels) ** 2) / np.sum((labels - labels.mean(0)) ** 2)
    found = score(
        tasks.regression("r2").metrics["r2"], outputs.astype(np.float32), labels.astype(np.float32)
    )
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_r2_of_a_run_is_scikit_learns():
    x = np.random.default_rng(5).normal(size=(300, 2)).astype(np.float32)
    labels = (2000 + x[:, 0]).astype(np.float32)
    rows = [np.arange(100), np.arange(100, 300)]  # two and four batches of an evaluation
    clients = make_clients((x, labels, x, labels), rows, rows)
    model = from_flax(Far(), (2,), task=tasks.regression("r2"))
    result = jaxfl.simulate(
        KEY, fedavg(model, local=LocalSGD(optax.sgd(0.0))), clients, rounds=1, progress=False
    )
    outputs = 2000 + 0.5 * x[:, 0]
    expected = [sk.r2_score(labels[own], outputs[own]) for own in rows]
    np.testing.assert_allclose(result.scores["r2"], expected, atol=1e-3)


class Far(nn.Module):
    """A network whose outputs follow half of the target, at a distance of 2000."""

    @nn.compact
    def __call__(self, x):
        return 2000 + 0.5 * x[:, :1] + self.param("bias", nn.initializers.zeros, (1, 1))


def test_a_merge_that_changes_the_sums_is_refused():
    _, clients = data_of("regression")
    metric = jaxfl.Metric(
        lambda o, y, w: jnp.sum(w), lambda total: total, merge=lambda a, b: (a, b)
    )
    task = own(metrics={"error": metric})()
    with pytest.raises(ValueError, match=r"metrics\['error'\].merge must return sums"):
        jaxfl.simulate(KEY, fedavg(from_flax(nn.Dense(1), (6,), task=task)), clients, rounds=1)


def test_a_negative_label_of_tokens_gets_the_advice_that_fits():
    tokens = np.ones((8, 6), np.int32)
    labels = np.where(np.arange(6)[None] < 4, tokens, -100)
    clients = make_clients((tokens, labels, tokens[:0], labels[:0]), [np.arange(8)], [[]])
    with pytest.raises(ValueError, match=r"got -100.*task=jaxfl.tasks.next_token\(ignore=-100\)"):
        jaxfl.simulate(KEY, fedavg(gru(7, 6)), clients, rounds=1, progress=False)
    model = gru(7, 6, embedding=2, width=2)._replace(task=tasks.next_token(ignore=-100))
    check_algorithm(fedavg(model), clients, rounds=1)


@pytest.mark.parametrize(
    "make", [tasks.classification, tasks.multi_label, tasks.regression, tasks.next_token]
)
@pytest.mark.parametrize("name", ["loss", ""])
def test_unknown_metrics_are_refused(make, name):
    with pytest.raises(ValueError, match="metrics must be among"):
        make(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("regression", "feddpa"),
        ("multi_label", "feddpa"),
        ("next_token", "feddpa"),
        ("next_token", "dp_sgd"),
    ],
)
def test_the_contract_holds_for_other_tasks(name, method):
    """Results equal the plain twin's for any chunk, devices and store, with ledger and epsilon."""
    model, clients = data_of(name)
    if method == "feddpa":  # Fisher information of each client's own examples, and client states
        local = jaxfl.LocalSGD(optax.sgd(0.1), batch_size=4)
        algorithm = feddpa(
            model, sampling=Poisson(0.6), noise_multiplier=1.0, clip=0.2, local=local
        )
    else:
        private = DPSGD(clip=0.5, noise_multiplier=1.0, rate=0.5, steps=2)
        algorithm = dp_fedavg(
            model, local=private, clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.6)
        )
    server, states, records = run(algorithm, clients)
    twin_server, twin_states, _ = reference.run(KEY_OF_RUNS, algorithm, clients, ROUNDS)
    assert_close(server, jax.device_get(twin_server))
    assert_close(states, jax.tree.map(lambda *leaves: np.stack(leaves), *twin_states))
    assert_close((server, states), run(algorithm, clients, chunk=4, devices=2)[:2])
    options = {"rounds": ROUNDS, "progress": False, "devices": jax.devices()[:1]}
    stores = [
        jaxfl.simulate(KEY, algorithm, clients, states=states, **options)
        for states in ("device", "host")
    ]
    assert_close(stores[0].server, stores[1].server)
    assert stores[0].statement == stores[1].statement
    planned = epsilon(
        planned_ledger(algorithm.mechanism, clients.num_clients, ROUNDS), algorithm.mechanism
    ).value
    assert stores[0].statement["honest"]["aggregate"]["epsilon"] == pytest.approx(planned)
    assert records.ledger.participants.any()


def test_one_metric_twice_raises_an_error():
    with pytest.raises(ValueError, match="metrics must be distinct"):
        tasks.classification("accuracy", "accuracy")
