from typing import Any

import jax
import numpy as np
import optax
import pytest
import reference
from algorithms_table import CLIP, MODEL, SIZES, client_data, small_clients

from jaxfl import simulate
from jaxfl.algorithms import dp_fedavg, scaffold
from jaxfl.algorithms.scaffold import ScaffoldServer
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import Dropouts, FixedSize, Full, Mechanism, Poisson

KEY = jax.random.key(31)
PRIVATE: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
RATE, STEPS, CLIENTS = 0.3, 4, 4
WHOLE: dict[str, Any] = {"learning_rate": RATE, "batch_size": 16, "steps": STEPS}
"""Options of SCAFFOLD whose batches have all examples of a client."""


def run(algorithm, clients=None, rounds=3, **options):
    found = clients or small_clients()
    return simulate(KEY, algorithm, found, rounds=rounds, progress=False, **options)


def assert_close(a, b, **tolerance):
    options: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-6} | tolerance
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **options), a, b)


def test_variates_of_zero_are_fedavg():
    algorithm = scaffold(MODEL, learning_rate=0.2, batch_size=4, epochs=2)
    server, states = algorithm.init(KEY, len(SIZES))
    own = jax.tree.map(lambda leaf: leaf[0], states)
    plain = dp_fedavg(
        MODEL,
        clip=1.0,
        noise_multiplier=0.0,
        sampling=Full(),
        local=LocalSGD(optax.sgd(0.2), 4, epochs=2),
    )
    message, _, _ = algorithm.client_update(KEY, server, own, client_data())
    expected, _, _ = plain.client_update(KEY, plain.init(KEY, len(SIZES))[0], (), client_data())
    jax.tree.map(np.testing.assert_array_equal, message.update[0], expected.update)


@pytest.mark.parametrize("sampling", [Full(), FixedSize(2)])
def test_equals_algorithm_1_in_numpy(sampling):
    clients = small_clients(SIZES[3 : 3 + CLIENTS])
    algorithm = scaffold(MODEL, sampling=sampling, **WHOLE)
    found = run(algorithm, clients, rounds=4)
    start, _ = algorithm.init(jax.random.split(KEY, 3)[0], CLIENTS)
    x = reference.double(start.params)
    c, own = reference.add(x, -1, x), [reference.add(x, -1, x) for _ in range(CLIENTS)]
    gradients = [_gradient(clients, i) for i in range(CLIENTS)]
    for cohort in np.asarray(found.ledger.participants):
        chosen, moves, changes = np.flatnonzero(cohort), [], []
        for i in chosen:
            y = x
            for _ in range(STEPS):
                y = jax.tree.map(
                    lambda y, g, ci, c: y - RATE * (g - ci + c), y, gradients[i](y), own[i], c
                )
            new = jax.tree.map(
                lambda ci, c, x, y: ci - c + (x - y) / (STEPS * RATE), own[i], c, x, y
            )
            moves.append(reference.add(y, -1, x))
            changes.append(reference.add(new, -1, own[i]))
            own[i] = new
        share = len(chosen) / CLIENTS
        x, c = reference.add(x, 1, mean(moves)), reference.add(c, share, mean(changes))
    assert_close(found.server.params, x)
    assert_close(found.server.control, c)
    assert_close(found.states, jax.tree.map(lambda *leaves: np.stack(leaves), *own))
    assert_close(found.server.control, jax.tree.map(lambda leaf: leaf.mean(0), found.states))


def test_the_control_variate_is_the_clients_mean_where_clients_drop_out():
    clients = small_clients(SIZES[3 : 3 + CLIENTS])
    dropped = Dropouts(FixedSize(2), 0.5)
    found = run(scaffold(MODEL, sampling=dropped, **WHOLE), clients, rounds=6)
    assert 0 < np.asarray(found.ledger.participants).sum() < 12
    assert_close(found.server.control, jax.tree.map(lambda leaf: leaf.mean(0), found.states))
    method = scaffold(MODEL, sampling=FixedSize(2), **WHOLE)
    with pytest.raises(ValueError, match=r"must draw cohorts by the sampling .* got Dropouts\("):
        run(method, clients, rounds=1, availability=0.5)
    full = Mechanism(sampling=Full())
    with pytest.raises(ValueError, match=r"FixedSize\(size=2\), got Full\(\)\. Build the method"):
        run(method._replace(mechanism=full), clients, rounds=1)


def mean(trees):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def _gradient(clients, i):
    rows = np.asarray(clients.train[i][: clients.train_size[i]])
    inputs, labels = np.asarray(clients.inputs)[rows], np.asarray(clients.labels)[rows]
    return lambda params: reference.numpy_gradient(params, inputs, labels)


def test_exact_variates_give_the_gradient_of_all():
    algorithm = scaffold(MODEL, **WHOLE | {"steps": 1})
    server, _ = algorithm.init(KEY, len(SIZES))
    data = [client_data(i) for i in (0, 4, 7)]
    each = [reference.whole_gradient(d)(reference.double(server.params)) for d in data]
    each = [jax.tree.map(lambda leaf: leaf.astype(np.float32), g) for g in each]
    everybody = mean(each)
    server = server._replace(control=everybody)
    for own, d in zip(each, data, strict=True):
        message, after, _ = algorithm.client_update(KEY, server, own, d)
        assert_close(message.update[0], optax.tree.scale(-RATE, everybody))
        assert_close(after, own, atol=1e-5)  # option II: of one step, the gradient at x itself


def test_a_client_without_examples_keeps_its_variate():
    algorithm = scaffold(MODEL, **WHOLE)
    server, _ = algorithm.init(KEY, len(SIZES))
    server = server._replace(control=jax.tree.map(lambda leaf: leaf + 1, server.control))
    own = jax.tree.map(lambda leaf: leaf + 0.5, server.params)
    message, after, _ = algorithm.client_update(KEY, server, own, client_data(2))
    assert not optax.tree.norm(message.update)
    jax.tree.map(np.testing.assert_array_equal, after, own)


@pytest.mark.slow
def test_one_clip_bounds_both_halves_of_what_a_client_sends():
    clients = small_clients()
    algorithm = scaffold(MODEL, **WHOLE, **PRIVATE | {"noise_multiplier": 0.0, "sampling": Full()})
    absent = clients._replace(
        train_size=np.where(np.arange(clients.num_clients) == 4, 0, clients.train_size)
    )
    one, other = run(algorithm, clients, 1).server, run(algorithm, absent, 1).server
    moved, changed = (
        float(optax.tree.norm(optax.tree.sub(getattr(one, f), getattr(other, f)))) for f in HALVES
    )
    assert moved > 0.01 * CLIP / clients.num_clients
    assert changed > 0.01 * CLIP / clients.num_clients
    assert np.hypot(moved, changed) * clients.num_clients == pytest.approx(CLIP, rel=1e-3)


HALVES = ("params", "control")


@pytest.mark.slow
def test_both_halves_get_the_noise_and_epsilon_is_dp_fedavgs():
    clients = small_clients()
    clients = clients._replace(train_size=np.zeros_like(clients.train_size))
    algorithm = scaffold(MODEL, **WHOLE, **PRIVATE)
    found = run(algorithm, clients, 1)
    start: ScaffoldServer = algorithm.init(jax.random.split(KEY, 3)[0], clients.num_clients)[0]
    expected = 0.6 * clients.num_clients
    share = {"params": expected, "control": clients.num_clients}
    for half in HALVES:
        noise = jax.tree.leaves(optax.tree.sub(getattr(found.server, half), getattr(start, half)))
        noise = np.concatenate([leaf.ravel() for leaf in noise]) * share[half]
        assert noise.std() == pytest.approx(CLIP, rel=4 / np.sqrt(2 * noise.size))
    plain = run(dp_fedavg(MODEL, **PRIVATE), clients, 1)
    assert found.statement["honest"]["aggregate"] == plain.statement["honest"]["aggregate"]


def test_wrong_arguments_name_themselves():
    with pytest.raises(ValueError, match=r"learning_rate must be .* got 0\.0"):
        scaffold(MODEL, learning_rate=0.0)
