"""Wrappers of any method: FedBuff, lying clients, and those that change only evaluations."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import (
    ALGORITHMS,
    CLIP,
    MODEL,
    SEND_WEIGHTS,
    SIZES,
    client_data,
    small_clients,
)

from jaxfl import Candidate, LocalSGD, compare, simulate, sweep
from jaxfl.algorithms import (
    byzantine,
    dp_fedavg,
    fedavg,
    fedbuff,
    fine_tuned,
    matrix_scaled,
    mixed,
    prior_corrected,
)
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.privacy import Full, Krum, Mechanism, Median, TrimmedMean
from jaxfl.run.loop import Loop
from jaxfl.types import Message

KEY = jax.random.key(12)
RUN = {"rounds": 3, "progress": False}


def rounds_of(algorithm, rounds):
    population = place(small_clients(), jax.devices()[:1])
    step = compile_rounds(algorithm, population, chunk=1, segment=rounds)
    return jax.device_get(
        step(KEY, 0, rounds, *initialize(KEY, KEY, algorithm, population))[0].server
    )


@pytest.mark.parametrize("name", ["dp_fedavg", "pmtl_own"])
def test_without_staleness_it_is_the_method_itself(name):
    method = ALGORITHMS[name]()
    plain, buffered = (
        simulate(KEY, a, small_clients(), **RUN) for a in (method, fedbuff(method, staleness=0))
    )
    jax.tree.map(np.testing.assert_array_equal, plain.server, buffered.server.current)
    jax.tree.map(np.testing.assert_array_equal, plain.scores, buffered.scores)
    assert plain.statement["honest"] == buffered.statement["honest"]


def test_clients_start_from_old_broadcasts_and_count_less():
    """The server counts rounds, and clients send the count, so that the mean is known."""
    counting = fedavg(MODEL, mechanism=Mechanism(clip=1e6))._replace(
        init=lambda key, number: (jnp.zeros(2), ()),
        client_update=lambda key, server, client, data: (Message(server), client, {}),
        server_update=lambda server, aggregate: jnp.stack([server[0] + 1, aggregate[0]]),
    )
    staleness, rounds = 2, 200
    server = rounds_of(fedbuff(counting, staleness=staleness), rounds)
    assert server.known[:, 0].tolist() == [rounds, rounds - 1, rounds - 2]
    seen = server.current[1]
    # In the last round a client sends (t - 1 - age) / sqrt(1 + age).
    possible = [(rounds - 1 - age) / np.sqrt(1 + age) for age in range(staleness + 1)]
    assert min(possible) < seen < max(possible)
    assert seen == pytest.approx(
        np.mean(possible), rel=5 * np.std(possible) / np.mean(possible) / np.sqrt(11)
    )


def test_a_client_has_its_own_staleness():
    """The server counts rounds, and each client's staleness is given, so that no draw is needed."""
    counting = fedavg(MODEL, mechanism=Mechanism(clip=1e6))._replace(
        init=lambda key, number: (jnp.zeros(2), ()),
        client_update=lambda key, server, client, data: (Message(server), client, {}),
        server_update=lambda server, aggregate: jnp.stack([server[0] + 1, aggregate[0]]),
    )
    ages = np.arange(len(SIZES)) % 4
    server = rounds_of(fedbuff(counting, staleness=ages), 20)
    expected = np.mean((19 - ages) / np.sqrt(1 + ages))
    assert server.current[1] == pytest.approx(expected, rel=1e-5)
    assert len(server.known) == 4
    with pytest.raises(ValueError, match="staleness must be one number, or one for each of 11"):
        simulate(KEY, fedbuff(counting, staleness=ages[:3]), small_clients(), **RUN)


@pytest.mark.slow
def test_an_update_from_an_old_model_is_the_methods_own():
    method = dp_fedavg(
        MODEL, clip=CLIP, noise_multiplier=1.0, sampling=Full(), local=LocalSGD(optax.sgd(0.1), 4)
    )
    buffered = fedbuff(method, staleness=1)
    server, clients = buffered.init(KEY, 2)
    old = jax.tree.map(lambda leaf: leaf + 0.1, server.current)
    server = server._replace(
        known=jax.tree.map(lambda a, b: jnp.stack([a, b]), server.current, old)
    )
    found = [
        buffered.client_update(jax.random.key(i), server, clients, client_data())[0].update
        for i in range(8)
    ]
    starts = (server.current, old)
    expected = [
        [method.client_update(jax.random.key(i), s, (), client_data())[0].update for s in starts]
        for i in range(8)
    ]
    ages = []
    for update, options in zip(found, expected, strict=True):
        near = []
        for age, option in enumerate(options):
            apart = jax.tree.map(
                lambda a, b, age=age: float(jnp.abs(a - b / np.sqrt(1 + age)).max()), update, option
            )
            near.append(max(jax.tree.leaves(apart)))
        assert min(near) < 1e-6 < max(near)
        ages.append(int(np.argmin(near)))
    assert set(ages) == {0, 1}


@pytest.mark.parametrize("name", SEND_WEIGHTS)
def test_weights_are_not_buffered(name):
    with pytest.raises(ValueError, match="sends weights"):
        fedbuff(ALGORITHMS[name](), staleness=1)


def test_liars_are_clients():
    liars = byzantine(fedavg(MODEL), [0, len(SIZES)])
    with pytest.raises(
        ValueError,
        match=rf"liars must be indices of the {len(SIZES)} clients, got \(0, 11\)\. Give .* 0 to 10",
    ):
        simulate(KEY, liars, small_clients(), **RUN)


def test_liars_send_the_opposite_or_noise_and_others_are_as_ever():
    method = fedavg(MODEL, mechanism=Mechanism(clip=100.0), local=LocalSGD(optax.sgd(0.1), 4))
    server, client = method.init(KEY, 2)
    honest = method.client_update(KEY, server, client, client_data(3))[0].update
    for attack in ("sign", "noise"):
        lying = byzantine(method, [3, 5], attack=attack, scale=2.0)
        told = lying.client_update(KEY, server, client, dataclasses.replace(client_data(3), id=3))[
            0
        ].update
        truthful = lying.client_update(
            KEY, server, client, dataclasses.replace(client_data(3), id=4)
        )[0].update
        jax.tree.map(np.testing.assert_array_equal, truthful, honest)
        if attack == "sign":
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, -2 * b), told, honest)
        else:
            flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(told)])
            assert flat.std() == pytest.approx(2, rel=0.1)


@pytest.mark.slow
def test_robust_aggregates_survive_liars_that_break_a_mean():
    """Three of eleven clients send -20 times their update."""
    reached = {}
    for name, mechanism in {
        "mean": Mechanism(clip=1e3, sampling=Full()),
        "median": Median(clip=1e3),
        "trimmed": TrimmedMean(clip=1e3, share=0.3),
        "krum": Krum(clip=1e3, byzantine=3, keep=5),
    }.items():
        method = fedavg(MODEL, mechanism=mechanism, local=LocalSGD(optax.sgd(0.2), 4, 2))
        liars = byzantine(method, [0, 3, 8], attack="sign", scale=20.0)
        result = simulate(KEY, liars, small_clients(), rounds=10, progress=False)
        reached[name] = float(np.nanmean(result.scores["loss"]))
    assert reached["mean"] > 3 * max(reached["median"], reached["trimmed"], reached["krum"])


QUICK = LocalSGD(optax.sgd(0.1), 4)


def assert_near(a, b, rtol=1e-4):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-5), a, b)


AROUND = {
    "fine_tuned": functools.partial(fine_tuned, local=QUICK),
    "prior_corrected": prior_corrected,
    "mixed": functools.partial(mixed, local=QUICK),
    "matrix_scaled": matrix_scaled,
    "mixed(prior_corrected)": lambda base: mixed(prior_corrected(base), local=QUICK),
    "fine_tuned(prior_corrected)": lambda base: fine_tuned(prior_corrected(base), local=QUICK),
    "mixed(fine_tuned(prior_corrected))": lambda base: mixed(
        fine_tuned(prior_corrected(base), local=QUICK), local=QUICK
    ),
    "prior_corrected(mixed)": lambda base: prior_corrected(mixed(base, local=QUICK), train=False),
}
"""Wrappers that leave the messages of a method as they are."""


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("method", ["dp_fedavg", pytest.param("pmtl_own", marks=pytest.mark.slow)])
def test_what_is_sent_and_its_epsilon_are_the_methods(name, method):
    base = ALGORITHMS[method]()
    plain, around = (simulate(KEY, a, small_clients(), **RUN) for a in (base, AROUND[name](base)))
    jax.tree.map(np.testing.assert_array_equal, plain.server, around.server)
    jax.tree.map(np.testing.assert_array_equal, plain.states, around.states)
    assert plain.statement == around.statement
    kept = method == "pmtl_own"  # by clients, who then may find it better than any mixture
    assert kept or not np.array_equal(plain.scores["loss"], around.scores["loss"])


NESTED = AROUND["mixed(fine_tuned(prior_corrected))"]


def nested(rate=0.1, noise_multiplier=1.0, smoothing=0.1):
    base = dp_fedavg(
        MODEL,
        clip=CLIP,
        noise_multiplier=noise_multiplier,
        sampling=Full(),
        local=LocalSGD(optax.sgd(rate), 4),
    )
    return mixed(
        fine_tuned(prior_corrected(base, smoothing=smoothing), local=LocalSGD(optax.sgd(rate), 4)),
        local=QUICK,
    )


def test_states_on_the_host_change_nothing():
    method = NESTED(ALGORITHMS["pmtl_own"]())
    near, far = (
        simulate(KEY, method, small_clients(), states=where, **RUN) for where in ("device", "host")
    )
    assert_near(near.server, far.server)
    assert_near(near.scores["loss"], far.scores["loss"])


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    options = RUN | {"eval_every": 1}
    method = nested()
    whole = simulate(KEY, method, small_clients(), **options)
    monkeypatch.setattr("jaxfl.run.followers._CHECKPOINT_SECONDS", -1.0)
    evaluate = Loop._evaluate

    def dies(self):
        if self.done == 2:
            raise RuntimeError("killed")
        return evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_evaluate", dies)
        with pytest.raises(RuntimeError, match="killed"):
            simulate(KEY, method, small_clients(), folder=tmp_path, **options)
    resumed = simulate(KEY, method, small_clients(), folder=tmp_path, **options)
    assert resumed.restored
    jax.tree.map(np.testing.assert_array_equal, whole.server, resumed.server)
    assert whole.metrics == resumed.metrics


@pytest.mark.slow
def test_points_of_a_sweep_are_single_runs():
    swept = sweep(
        KEY, nested, {"rate": [0.05, 0.2], "smoothing": [0.0, 1.0]}, small_clients(), **RUN
    )
    alone = simulate(KEY, nested(rate=0.05, smoothing=0.0), small_clients(), **RUN)
    assert_near(swept[0].server, alone.server)
    assert_near(swept[0].scores["loss"], alone.scores["loss"], rtol=1e-3)
    assert not np.allclose(swept[0].scores["loss"], swept[1].scores["loss"], equal_nan=True)


@pytest.mark.slow
def test_wrapped_methods_are_compared(tmp_path):
    methods = {
        "nested": Candidate(nested, {"rate": [0.05, 0.2]}),
        "corrected": Candidate(
            lambda smoothing: prior_corrected(fedavg(MODEL, local=QUICK), smoothing=smoothing),
            {"smoothing": [0.1, 1.0]},
        ),
    }
    options = {"rounds": 2, "seeds": (0, 1), "progress": False, "folder": tmp_path}
    options["epsilons"] = (2.0, math.inf)
    found = compare(methods, lambda seed: small_clients(shift=seed), **options)
    assert "nested" in found.to_markdown()
