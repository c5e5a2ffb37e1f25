"""Updates that shrink by the round, in local training and in runs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients

from jaxfl import simulate, sweep
from jaxfl.algorithms import apfl, dp_fedavg, dp_fedavg_fb, fedavg, fedrep, pfedme
from jaxfl.local.optimizers import decayed
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import DPSGD, Full, Poisson
from jaxfl.run.check import _warn_of_restarts, check_algorithm

KEY = jax.random.key(53)
HALVES = optax.exponential_decay(1.0, transition_steps=1, decay_rate=0.5)
PRIVATE: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 0.0, "sampling": Poisson(0.6)}


def once(index):
    """Return the factor 1 in the first round, and 0 in all later ones."""
    return jnp.where(index < 1, 1.0, 0.0)


def run(algorithm, rounds=3, **options):
    return simulate(KEY, algorithm, small_clients(), rounds=rounds, progress=False, **options)


def assert_close(a, b, **tolerance):
    options: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7} | tolerance
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **options), a, b)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def steps_of(kind, rate, decay):
    if kind == "private":
        return DPSGD(
            clip=0.5,
            noise_multiplier=1.0,
            rate=0.5,
            steps=5,
            optimizer=optax.sgd(rate),
            decay=decay,
        )
    momentum = 0.9 if kind == "momentum" else None
    return LocalSGD(optax.sgd(rate, momentum=momentum), 4, 2, decay=decay)


@pytest.mark.parametrize("kind", ["plain", "momentum", "private"])
def test_a_round_has_the_decayed_rate(kind):
    params = MODEL.init(KEY)
    for index in (0, 3):
        data = dataclasses.replace(client_data(), round=index)
        found, _ = steps_of(kind, 0.4, HALVES).train(KEY, MODEL, params, data)
        expected, _ = steps_of(kind, 0.4 * 0.5**index, None).train(KEY, MODEL, params, data)
        assert_close(found, expected)
        assert not np.array_equal(found["head"]["bias"], params["head"]["bias"])


def test_without_decay_the_optimizer_is_the_same_object():
    optimizer = optax.sgd(0.1)
    assert decayed(optimizer, None, client_data()) is optimizer


@pytest.mark.slow
def test_a_head_is_fitted_at_the_decayed_rate():
    head = LocalSGD(optax.sgd(0.1), 4, 2, decay=once)
    algorithm = fedrep(MODEL, local=LocalSGD(optax.sgd(0.1), 4), head=head)
    server, states = algorithm.init(KEY, len(SIZES))
    own = jax.tree.map(lambda leaf: leaf[0], states)
    for index in (0, 1):
        _, kept, _ = algorithm.client_update(
            KEY, server, own, dataclasses.replace(client_data(), round=index)
        )
        assert np.array_equal(kept["head"]["bias"], own["head"]["bias"]) == (index == 1)


@pytest.mark.parametrize("build", [apfl, pfedme])
def test_only_what_has_the_optimizers_rate_decays(build):
    local = LocalSGD(optax.sgd(0.2), 4, 2)
    halved, half = (
        build(MODEL, local=part)
        for part in (
            dataclasses.replace(local, decay=HALVES),
            dataclasses.replace(local, optimizer=optax.sgd(0.1)),
        )
    )
    server, states = half.init(KEY, len(SIZES))
    own = jax.tree.map(lambda leaf: leaf[0], states)
    found = halved.client_update(KEY, server, own, dataclasses.replace(client_data(), round=1))
    assert_close(found, half.client_update(KEY, server, own, client_data()))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"states": "host"}])
@pytest.mark.parametrize("private", [False, True])
def test_every_kind_of_run_counts_its_rounds(options, private):
    decay = steps_of("private" if private else "plain", 0.2, once)
    algorithm = dp_fedavg(MODEL, local=decay, **PRIVATE)
    assert_same(run(algorithm, 3, **options).server, run(algorithm, 1, **options).server)


def points_of(build):
    """Run a sweep over the rate of a decay, whose points share the noise of single runs."""
    options = {"rounds": 3, "progress": False, "paired_noise": True}
    return sweep(KEY, build, {"rate": [0.25, 1.0]}, small_clients(), **options)


@pytest.mark.slow
def test_a_sweep_counts_its_rounds_too_and_may_vary_the_decay():
    def build(rate):
        return dp_fedavg(
            MODEL, local=LocalSGD(optax.sgd(0.2), 4, decay=lambda index: rate**index), **PRIVATE
        )

    points = points_of(build)
    for rate, point in zip((0.25, 1.0), points, strict=True):
        assert_close(point.server, run(build(rate)).server, rtol=1e-4, atol=1e-6)
    assert not np.array_equal(*(point.server.params["head"]["bias"] for point in points))


@pytest.mark.slow
def test_rounds_share_one_program():
    seen: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: seen.append(name))
    algorithm = dp_fedavg(
        MODEL, local=steps_of("plain", 0.2, HALVES), **PRIVATE | {"sampling": Full()}
    )
    counts = []
    for rounds in (1, 5):
        seen.clear()
        run(algorithm, rounds, eval_every=1)
        counts.append(sum(name.endswith("backend_compile_duration") for name in seen))
    assert counts[1] <= counts[0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"states": "host", "chunk": 4}])
def test_training_for_an_evaluation_has_the_factor_of_the_last_round(options):
    head = LocalSGD(optax.sgd(0.1), 4, 2)
    slowing = dp_fedavg_fb(MODEL, head=dataclasses.replace(head, decay=HALVES), **PRIVATE)
    for done, scores in enumerate(run(slowing, 2, eval_every=1, **options).history["loss"], 1):
        slower = LocalSGD(optax.sgd(0.1 * 0.5 ** (done - 1)), 4, 2)
        found = run(dp_fedavg_fb(MODEL, head=slower, **PRIVATE), done, eval_every=done).history[
            "loss"
        ][-1]
        assert_close(scores, found, rtol=1e-4)


@pytest.mark.slow
def test_a_point_of_a_sweep_is_evaluated_with_the_factor_of_the_last_round():
    def build(rate):
        head = LocalSGD(optax.sgd(0.1), 4, 2, decay=lambda index: rate**index)
        return dp_fedavg_fb(MODEL, head=head, **PRIVATE)

    points = points_of(build)
    for rate, point in zip((0.25, 1.0), points, strict=True):
        assert_close(point.scores, run(build(rate)).scores, rtol=1e-4)
    assert not np.array_equal(*(np.nan_to_num(point.scores["loss"]) for point in points))


FREE = optax.contrib.schedule_free_sgd(0.3)


def averaged(rounds, params, data):
    """Return the weights for evaluation after a step per round on all examples, by optax alone."""
    inputs, labels = data.take(jnp.arange(int(data.size)))
    x = MODEL.prepare(inputs)
    slope = jax.jit(
        jax.grad(lambda params: jnp.mean(MODEL.task.loss(MODEL.apply(params, x), labels)))
    )
    state = FREE.init(params)
    for _ in range(rounds):
        updates, state = FREE.update(slope(params), state, params)
        params = optax.apply_updates(params, updates)
    return optax.contrib.schedule_free_eval_params(state, params), params


ALL_AT_ONCE = {
    "plain": LocalSGD(FREE, 64, steps=5),
    "clipped": LocalSGD(optax.chain(optax.clip(1e3), FREE), 64, steps=5),
    "private": DPSGD(clip=1e3, noise_multiplier=0.0, rate=1.0, steps=5, optimizer=FREE),
}


@pytest.mark.parametrize("kind", ALL_AT_ONCE)
def test_schedule_free_training_ends_at_its_weights_for_evaluation(kind):
    params = MODEL.init(KEY)
    found, _ = ALL_AT_ONCE[kind].train(KEY, MODEL, params, client_data())
    expected, last = averaged(5, params, client_data())
    assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert float(optax.tree.norm(optax.tree.sub(expected, last))) > 1e-2


def test_schedule_free_training_keeps_the_bits_of_what_it_does_not_train():
    params = MODEL.init(KEY)
    mask = {
        name: jax.tree.map(lambda _, kept=name == "head": kept, params[name]) for name in params
    }
    found, _ = ALL_AT_ONCE["plain"].train(KEY, MODEL, params, client_data(), mask=mask)
    assert_same(found["dense_0"], params["dense_0"])
    assert not np.array_equal(found["head"]["bias"], params["head"]["bias"])
    nothing = dataclasses.replace(client_data(), size=jnp.int32(0))
    assert_same(ALL_AT_ONCE["plain"].train(KEY, MODEL, params, nothing)[0], params)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (
            lambda: fedavg(MODEL, local=LocalSGD(FREE, decay=HALVES)),
            "decay must be None with optax.contrib.schedule_f",
        ),
        (lambda: fedavg(MODEL, server_optimizer=FREE), "server_optimizer must step the weights"),
        (
            lambda: apfl(MODEL, local=LocalSGD(FREE), **PRIVATE),
            "schedule_free to all parameters at once",
        ),
    ],
)
def test_schedule_free_is_refused_where_its_weights_for_evaluation_would_be_lost(build, words):
    with pytest.raises(ValueError, match=words):
        check_algorithm(build(), small_clients(), rounds=1)


FALLS = optax.exponential_decay(0.1, 1, 0.5)
SCHEDULED = {
    "sgd": optax.sgd(FALLS),
    "chained": optax.chain(optax.clip(1.0), optax.adam(FALLS)),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=FALLS),
}


@pytest.mark.parametrize("kind", SCHEDULED)
def test_a_schedule_that_starts_again_in_every_round_is_named_once(kind, caplog):
    _warn_of_restarts.cache_clear()
    for _ in range(2):
        check_algorithm(fedavg(MODEL, local=LocalSGD(SCHEDULED[kind])), small_clients(), rounds=1)
    assert [record.getMessage() for record in caplog.records] == [
        "fedavg: the schedule in the clients' optimizer starts again in every round. Give a schedule over rounds as "
        "LocalSGD(decay=...)"
    ]


@pytest.mark.parametrize(
    "optimizer", [optax.adam(0.1), FREE, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)]
)
def test_optimizers_without_a_schedule_and_decay_are_not_named(optimizer, caplog):
    _warn_of_restarts.cache_clear()
    check_algorithm(fedavg(MODEL, local=LocalSGD(optimizer)), small_clients(), rounds=1)
    check_algorithm(
        fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), decay=FALLS)), small_clients(), rounds=1
    )
    assert not caplog.records


@pytest.mark.slow
def test_noise_in_the_ledger_does_not_follow_the_decay():
    found, expected = (
        run(dp_fedavg(MODEL, local=steps_of("private", 0.2, decay), **PRIVATE)).statement[
            "examples"
        ]
        for decay in (HALVES, None)
    )
    assert found == expected


def test_a_decay_that_is_no_function_is_refused():
    local: Any = 0.9
    with pytest.raises(TypeError, match=r"decay must be a function, got 0\.9"):
        LocalSGD(optax.sgd(0.1), decay=local)
