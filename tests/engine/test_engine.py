from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, small_clients

from jaxfl.algorithms import dp_fedavg, fedavg
from jaxfl.engine.evaluate import compile_evaluation, summarize
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import FixedSize, Full, Poisson
from jaxfl.tasks import classification
from jaxfl.types import Lists, Message

KEY = jax.random.key(5)


def start(algorithm, clients, *, devices=2, segment=4, chunk=1):
    population = place(clients, jax.devices()[:devices])
    step = compile_rounds(algorithm, population, chunk=chunk, segment=segment)
    return step, *initialize(KEY, KEY, algorithm, population)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_traces_once_for_all_calls():
    traces = 0
    base = fedavg(MODEL, mechanism=Mechanism(sampling=Poisson(0.5)))

    def counted(*args):
        nonlocal traces
        traces += 1
        return base.client_update(*args)

    step, center, states = start(base._replace(client_update=counted), small_clients())
    center, states, _ = step(KEY, 0, 3, center, states)
    first = traces
    center, states, _ = step(KEY, 3, 1, center, states)
    step(KEY, 4, 4, center, states)
    assert traces == first == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_methods_start_with_the_clients_that_there_are(devices):
    """11 clients on two devices leave one row without a client."""
    base = fedavg(MODEL)
    method = base._replace(
        init=lambda key, number: (base.init(key, number)[0], jnp.arange(number) / number)
    )
    _, _, states = start(method, small_clients(), devices=devices)
    np.testing.assert_allclose(states.tree()[:11], np.arange(11) / 11, rtol=1e-6)


def test_clients_of_one_size_wait_for_none():
    local = LocalSGD(optax.sgd(0.1), 4)
    algorithm = fedavg(MODEL, local=local, mechanism=Mechanism(sampling=Full()))
    known = place(small_clients((6,) * 4), jax.devices()[:1])
    assert known.size == 6
    assert place(small_clients((6, 5, 6, 6)), jax.devices()[:1]).size is None

    def run(population):
        arguments = KEY, 0, 2, *initialize(KEY, KEY, algorithm, population)
        step: Any = compile_rounds(algorithm, population, chunk=2, segment=2)
        return str(step.func.trace(*step.args, *arguments, **step.keywords).jaxpr), step(*arguments)

    (text, found), (longer, expected) = run(known), run(known._replace(size=None))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )
    assert longer.count("select_n") - text.count("select_n") >= len(
        jax.tree.leaves(found[0].server.params)
    )


def test_segments_equal_one_long_call():
    algorithm = dp_fedavg(
        MODEL,
        clip=CLIP,
        noise_multiplier=1.0,
        sampling=Poisson(0.5),
        local=LocalSGD(optax.sgd(0.05), batch_size=4),
    )
    step, center, states = start(algorithm, small_clients())
    once, *_ = step(KEY, 0, 4, center, states)
    step, center, states = start(algorithm, small_clients())
    center, states, _ = step(KEY, 0, 1, center, states)
    center, states, _ = step(KEY, 1, 3, center, states)
    np.testing.assert_array_equal(flat(once), flat(center))


def test_donates_its_state():
    step, center, states = start(fedavg(MODEL), small_clients())
    step(KEY, 0, 1, center, states)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(center))


def test_empty_rounds_still_add_noise():
    algorithm = dp_fedavg(MODEL, clip=CLIP, noise_multiplier=1.0, sampling=Poisson(1e-9))
    step, center, states = start(algorithm, small_clients())
    before = flat(center.server.params)
    center, _, records = step(KEY, 0, 1, center, states)
    noise = (flat(center.server.params) - before) * 1e-9 * 11
    assert not records.ledger.participants.any()
    assert noise.std() == pytest.approx(CLIP, rel=4 / np.sqrt(2 * noise.size))
    assert all(np.isfinite(value).all() for value in records.info.values())


def test_empty_rounds_without_noise_change_nothing():
    step, center, states = start(
        fedavg(MODEL, mechanism=Mechanism(sampling=Poisson(1e-9), denominator="participants")),
        small_clients(),
    )
    before = flat(center.server.params)
    center, *_ = step(KEY, 0, 2, center, states)
    np.testing.assert_array_equal(before, flat(center.server.params))


def poisoned(value):
    """Return FedAvg in which clients of 7 examples send an update that is not finite."""
    base = fedavg(
        MODEL,
        local=LocalSGD(optax.sgd(0.05), batch_size=4),
        mechanism=Mechanism(denominator="expected"),
    )

    def client_update(key, server, client, data):
        message, client, info = base.client_update(key, server, client, data)
        bad = jax.tree.map(lambda leaf: jnp.where(data.size == 7, value, leaf), message.update)
        return Message(bad), client, info

    return base._replace(client_update=client_update)


@pytest.mark.slow
@pytest.mark.parametrize(("value", "chunk"), [(jnp.nan, 1), (jnp.inf, 4), (3e38, 1)])
def test_nonfinite_updates_are_dropped_and_counted(value, chunk):
    clients = small_clients()
    step, center, states = start(poisoned(value), clients, chunk=chunk)
    center, _, records = step(KEY, 0, 2, center, states)
    assert list(records.nonfinite[:2]) == [1, 1]
    assert np.isfinite(flat(center)).all()
    absent = clients._replace(train_size=np.where(clients.train_size == 7, 0, clients.train_size))
    step, other, states = start(
        fedavg(MODEL, local=LocalSGD(optax.sgd(0.05), batch_size=4), mechanism=Mechanism()),
        absent,
        chunk=chunk,
    )
    other, *_ = step(KEY, 0, 2, other, states)
    np.testing.assert_allclose(
        flat(center.server.params), flat(other.server.params), rtol=1e-5, atol=1e-6
    )


def test_infos_are_means_over_clients_whose_states_are_finite():
    """A state does not decide whether an update by private steps is sent, but its infos do not count."""
    local = DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.5, steps=2)
    base = dp_fedavg(MODEL, clip=CLIP, noise_multiplier=0.0, sampling=Full(), local=local)

    def client_update(key, server, client, data):
        del client
        message, _, info = base.client_update(key, server, (), data)
        return message, jnp.where(data.size == 7, jnp.nan, 1.0), info | {"one": jnp.float32(1)}

    method = base._replace(
        init=lambda key, number: (base.init(key, number)[0], jnp.zeros(number)),
        client_update=client_update,
    )
    step, center, states = start(method, small_clients())
    *_, records = step(KEY, 0, 2, center, states)
    assert list(records.nonfinite[:2]) == [0, 0]
    np.testing.assert_array_equal(records.info["one"][:2], 1.0)


def test_temporary_memory_does_not_grow_with_the_cohort():
    def temporary(count):
        clients = small_clients((9,) * count)
        algorithm = dp_fedavg(
            MODEL,
            clip=CLIP,
            noise_multiplier=1.0,
            sampling=Full(),
            local=LocalSGD(optax.sgd(0.05), batch_size=4),
        )
        step, center, states = start(algorithm, clients, devices=1, segment=1)
        lowered = step.func.lower(*step.args, KEY, 0, 1, center, states)  # pyrefly: ignore[missing-attribute]
        return lowered.compile().memory_analysis().temp_size_in_bytes

    parameters = 4 * 1210
    assert temporary(70) - temporary(10) < parameters  # 60 more clients, less than one more update


@pytest.mark.parametrize("sampling", [Poisson(0.4), FixedSize(5), Full()])
def test_the_cohort_is_the_samplers_draw(sampling):
    algorithm = fedavg(MODEL, mechanism=Mechanism(sampling=sampling))
    step, center, states = start(algorithm, small_clients())
    records = step(KEY, 0, 4, center, states)[2]
    for t in range(4):
        key = jax.random.fold_in(jax.random.fold_in(KEY, t), 0)
        np.testing.assert_array_equal(records.ledger.participants[t], sampling.sample(key, 11, t))
    np.testing.assert_array_equal(records.info["participants"], records.ledger.participants.sum(1))


def test_client_state_moves_only_with_participation():
    from jaxfl.algorithms import local_only

    step, center, states = start(local_only(MODEL, sampling=FixedSize(4)), small_clients())
    before = jax.device_get(states)
    _, after, records = step(KEY, 0, 1, center, states)
    moved = np.any(
        [
            np.any(np.reshape(a != b, (len(a), -1)), axis=1)
            for a, b in zip(*map(jax.tree.leaves, (before, jax.device_get(after))))
        ],
        axis=0,
    )
    expected = records.ledger.participants[0] & (small_clients().train_size > 0)
    np.testing.assert_array_equal(moved[:11], expected)


@pytest.mark.parametrize("tests", [None, 300])
def test_evaluation_equals_a_plain_loop(tests):
    clients = small_clients()
    if tests:  # several blocks of batches, the last of them broken
        rows = (
            np.random.default_rng(0)
            .integers(len(clients.labels), size=(clients.num_clients, tests))
            .astype(np.int32)
        )
        sizes = np.resize(np.array([300, 0, 1, 60, 61, 180, 299], np.int32), clients.num_clients)
        clients = clients._replace(test=Lists.of(rows), test_size=sizes)
    algorithm = fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), epochs=3))
    population = place(clients)
    (server, *_), states = initialize(KEY, KEY, algorithm, population)
    scores = compile_evaluation(algorithm, population)(KEY, server, states)
    chunked = compile_evaluation(algorithm, population, chunk=4)(KEY, server, states)
    logits = MODEL.apply(server.params, MODEL.prepare(jnp.asarray(clients.inputs)))
    hits = np.argmax(logits, axis=1) == clients.labels
    losses = np.asarray(
        optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(clients.labels))
    )
    for i in range(clients.num_clients):
        rows = clients.test[i][: clients.test_size[i]]
        if len(rows) == 0:
            assert np.isnan(scores["accuracy"][i])
            continue
        assert scores["accuracy"][i] == pytest.approx(hits[rows].mean())
        assert chunked["accuracy"][i] == pytest.approx(hits[rows].mean())
        assert scores["loss"][i] == pytest.approx(losses[rows].mean(), rel=1e-4)


def test_summary():
    accuracy = np.array([0.1, 0.9, np.nan, *[0.5] * 18], np.float32)
    sizes = np.array([10, 30, 0, *[10] * 18])
    row = summarize({"accuracy": accuracy, "loss": accuracy}, sizes, classification().metrics)
    assert row["accuracy"] == pytest.approx(0.5)
    assert row["accuracy_worst10"] == pytest.approx((0.1 + 0.5) / 2)
    assert row["accuracy_examples"] == pytest.approx((1 + 27 + 90) / 220)
    assert row["accuracy_std"] == pytest.approx(np.sqrt(2 * 0.16 / 20))
