"""The contract that every algorithm fulfils."""

import functools
from collections.abc import Iterable
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from algorithms_table import ALGORITHMS, CLIP, MODEL, SEND_WEIGHTS, SIZES, small_clients

from jaxfl.algorithms import dp_fedavg, fedavg
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.accounting.ledgers import epsilon, planned_ledger
from jaxfl.privacy.clip import clip
from jaxfl.privacy.mechanisms import Mechanism, PrivateMask
from jaxfl.privacy.sampling import Full
from jaxfl.run.loop import Loop
from jaxfl.run.simulate import simulate
from jaxfl.types import Algorithm, Lists

KEY = jax.random.key(7)
ROUNDS = 3
WIDE = {"chunk": 4, "devices": 2}
"""Options of runs on two devices. Runs with the same clients share a program."""
USUAL = (
    "local_only",
    "dp_fedavg",
    "feddpa",
    "dp_pfeddsu",
    "adp_pfl_released",
    "padpfl",
    "pdp_fl_examples",
    "prior_corrected",
)
"""Methods whose tests are not slow. They have no communication, client states, public masks, a
memory, weights and noise by clients, private local steps, or an offset in the loss.
"""


def _rows(fast: Iterable[str]) -> pytest.MarkDecorator:
    """Return the mark of a test for each method. One worker has all tests of a method."""
    slow = {name: [] if name in fast else [pytest.mark.slow] for name in ALGORITHMS}
    rows = [
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *slow[name]])
        for name in ALGORITHMS
    ]
    return pytest.mark.parametrize("name", rows)


each, some = _rows(USUAL), _rows(["adp_pfl_released"])
"""Marks that run a test for each method. All but the named methods are slow tests."""


def test_methods_that_send_weights_say_so():
    assert {name for name, build in ALGORITHMS.items() if build().sends == "weights"} == {
        *SEND_WEIGHTS
    }


def run(algorithm, clients, *, rounds=ROUNDS, key=KEY, **options):
    return runner(algorithm, clients, **options)(clients, rounds, key)


def runner(algorithm, clients, *, chunk=1, devices=1):
    """Compile rounds for the shapes of `clients`, and return a function that runs up to ROUNDS."""
    devices = jax.devices()[:devices]
    population = place(clients, devices)
    step = compile_rounds(algorithm, population, chunk=chunk, segment=ROUNDS)

    def rounds_of(clients, rounds, key, cut=0):
        """Run rounds from a key. After `cut` rounds, if not 0, all states visit the host."""
        population = place(clients, devices)
        init_key, run_key, _ = jax.random.split(key, 3)
        left = initialize(init_key, run_key, algorithm, population)
        if cut:
            left = step.func(population.clients, run_key, 0, cut, *left)[:2]
            places = jax.tree.map(lambda leaf: leaf.sharding, left)
            left = jax.device_put(jax.device_get(left), places)
        center, states, records = step.func(population.clients, run_key, cut, rounds - cut, *left)
        states = jax.tree.map(lambda leaf: leaf[: clients.num_clients], states.tree())
        return jax.device_get((center.server, states, records))

    return rounds_of


@functools.cache
def method(name, z=1.0):
    """Return a method of the table, and its runner for the small clients."""
    algorithm = ALGORITHMS[name](z=z)
    return algorithm, runner(algorithm, small_clients())


def assert_close(a, b, tolerance=1e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b
    )


@each
def test_equals_the_plain_twin(name):
    (algorithm, run), clients = method(name), small_clients()
    server, states, _ = run(clients, ROUNDS, KEY)
    twin_server, twin_states, _ = reference.run(KEY, algorithm, clients, ROUNDS)
    assert_close(server, jax.device_get(twin_server))
    assert_close(states, jax.tree.map(lambda *leaves: np.stack(leaves), *twin_states))


@some
def test_chunk_devices_and_padding_change_nothing(name):
    algorithm, run_plainly = method(name)
    expected = run_plainly(small_clients(), ROUNDS, KEY)
    found = run(algorithm, small_clients(extra_padding=5), **WIDE)
    assert_close(expected[:2], found[:2])
    np.testing.assert_array_equal(expected[2].ledger.participants, found[2].ledger.participants)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"chunk": 4}, {"chunk": 100}, {"devices": 2}])
def test_chunk_and_devices_change_nothing_alone(options):
    algorithm, run_plainly = method("feddpa")
    assert_close(
        run_plainly(small_clients(), ROUNDS, KEY)[:2],
        run(algorithm, small_clients(), **options)[:2],
    )


def test_order_of_clients_changes_nothing():
    # Whole-client batches and full participation leave no randomness that could follow a client's number.
    algorithm = fedavg(
        MODEL,
        local=LocalSGD(optax.sgd(0.05), batch_size=16, epochs=2),
        mechanism=Mechanism(sampling=Full()),
    )
    clients = small_clients()
    order = np.random.default_rng(0).permutation(clients.num_clients)
    permuted = clients._replace(
        train=Lists.of([clients.train[i] for i in order]),
        train_size=clients.train_size[order],
        test_size=clients.test_size[order],
    )
    assert_close(run(algorithm, clients)[0], run(algorithm, permuted)[0])


def test_infinite_clip_and_no_noise_is_the_plain_method():
    options = {"local": LocalSGD(optax.sgd(0.1), 4, epochs=2)}
    private = dp_fedavg(MODEL, clip=float("inf"), noise_multiplier=0.0, sampling=Full(), **options)
    plain = fedavg(
        MODEL, mechanism=Mechanism(sampling=Full(), denominator="participants"), **options
    )
    assert_close(run(private, small_clients())[0], run(plain, small_clients())[0])


@each
def test_neighbours_move_the_aggregate_by_at_most_the_sensitivity(name):
    # The noise is the same on both sides and goes, unless its place depends on private data.
    algorithm, run = method(name, z=0.0 if _follows_private_data(ALGORITHMS[name]()) else 1.0)
    mechanism, clients = algorithm.mechanism, small_clients()
    if not mechanism.communicates:
        pytest.skip("nothing is sent")
    if np.isinf(mechanism.clip):
        pytest.skip("single examples are protected, and no client's update is bounded")
    if mechanism.denominator == "participants" and not isinstance(mechanism.sampling, Full):
        pytest.skip("what another denominator changes is no sensitivity")
    absent = clients._replace(
        train_size=np.where(np.arange(clients.num_clients) == 4, 0, clients.train_size)
    )
    weights = mechanism.weight_table[0]
    denominator = (
        mechanism.sampling.expected(clients.num_clients)
        * weights.mean()
        / weights[4 % len(weights)]
    )
    for seed in range(20):  # until the client takes part
        key = jax.random.key(seed)
        one, _, records = run(clients, 1, key)
        if records.ledger.participants[0, 4]:
            break
    other = run(absent, 1, key)[0]
    moved = float(optax.tree.norm(optax.tree.sub(received(one), received(other)))) * denominator
    assert 0 < moved <= CLIP * (1 + 1e-4)


def received(server):
    """Return the part of a server to which it adds aggregates: parameters, a total, or both."""
    if hasattr(server, "method"):
        return received(server.method), server.total
    return getattr(server, "total", server.params)


def _follows_private_data(algorithm):
    return algorithm.terms.broken is not None or isinstance(algorithm.mechanism, PrivateMask)


@each
def test_noise_has_the_stated_std_on_the_stated_support(name):
    (algorithm, run), clients = method(name), small_clients()
    clients = clients._replace(
        train_size=np.zeros_like(clients.train_size)
    )  # no training: the aggregate is noise
    mechanism = algorithm.mechanism
    if not mechanism.noisy:
        pytest.skip("no noise")
    init_key, *_ = jax.random.split(KEY, 3)
    start, _ = algorithm.init(init_key, len(SIZES))
    server, _, records = run(clients, 1, KEY)
    mean = clip(start.params, CLIP)[0] if name in SEND_WEIGHTS else received(start)
    noise = np.concatenate(
        [v.ravel() for v in jax.tree.leaves(optax.tree.sub(received(server), mean))]
    )
    participants = records.ledger.participants[0]
    weights = np.broadcast_to(mechanism.weight_table[0], clients.num_clients)
    expected = mechanism.sampling.expected(clients.num_clients) * weights.mean()
    noise = noise * (
        weights[participants].sum() if mechanism.denominator == "participants" else expected
    )
    support = np.ones(noise.shape, bool)
    if hasattr(start, "support"):
        support = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(start.support)])
        assert 0 < support.sum() < 0.6 * support.size
    np.testing.assert_array_equal(noise != 0, support)
    noise = noise[support]
    client_variance = np.sum((participants * weights * mechanism.client_noise_table[0]) ** 2)
    floor = mechanism.noise_multiplier_table[0] * weights.max()
    std = CLIP * np.sqrt(max(client_variance, floor**2))
    assert std == pytest.approx(CLIP * weights.max(), rel=1e-3)  # some are calibrated to an epsilon
    assert noise.std() == pytest.approx(std, rel=4 / np.sqrt(2 * noise.size))
    assert abs(noise.mean()) < 4 * std / np.sqrt(noise.size)


@each
def test_rounds_may_be_cut_anywhere(name):
    (_, run), clients = method(name), small_clients()
    whole, parts = run(clients, ROUNDS, KEY), run(clients, ROUNDS, KEY, cut=1)
    jax.tree.map(np.testing.assert_array_equal, whole[:2], parts[:2])


@pytest.mark.parametrize(
    "name", [pytest.param("feddpa", marks=pytest.mark.slow), "adp_pfl_released"]
)
def test_resume_is_bit_identical(name, tmp_path, monkeypatch):
    algorithm, clients = ALGORITHMS[name](), small_clients(extra_padding=5)
    options = {
        "rounds": ROUNDS + 1,
        "eval_every": ROUNDS,
        "chunk": WIDE["chunk"],
        "progress": False,
    }
    whole = simulate(KEY, algorithm, clients, **options)
    monkeypatch.setattr("jaxfl.run.followers._CHECKPOINT_SECONDS", -1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_evaluate", _dies_in_round(ROUNDS + 1))
        with pytest.raises(RuntimeError, match="killed"):
            simulate(KEY, algorithm, clients, folder=tmp_path, **options)
    resumed = simulate(KEY, algorithm, clients, folder=tmp_path, **options)
    same = jax.tree.map(np.array_equal, whole[:2], resumed[:2])
    assert all(jax.tree.leaves(same))
    assert whole.metrics == resumed.metrics
    assert whole.statement == resumed.statement


def _dies_in_round(number):
    original = Loop._evaluate

    def evaluate(self):
        if self.done == number:
            raise RuntimeError("killed")
        return original(self)

    return evaluate


@each
def test_ledger_says_what_the_mechanism_planned(name):
    (algorithm, run), clients = method(name), small_clients()
    ledger = run(clients, ROUNDS, KEY)[2].ledger
    planned = planned_ledger(algorithm.mechanism, clients.num_clients, ROUNDS)
    np.testing.assert_allclose(ledger.noise_multiplier, planned.noise_multiplier, rtol=1e-6)
    if getattr(algorithm.mechanism, "release", None) is None:
        np.testing.assert_allclose(ledger.client_noise, planned.client_noise, rtol=1e-6)
    else:  # planned with the full share of the budget, which is the least noise
        assert np.all(ledger.client_noise >= planned.client_noise * (1 - 1e-6))
    found = epsilon(ledger, algorithm.mechanism).value
    assert found == pytest.approx(epsilon(planned, algorithm.mechanism).value, rel=1e-5)


def test_the_table_covers_every_algorithm():
    from jaxfl import algorithms

    covered = {ALGORITHMS[name]().name.partition("(")[0] for name in ALGORITHMS}
    hints = {name: get_type_hints(getattr(algorithms, name)) for name in algorithms.__all__}
    elsewhere = {"byzantine", "fedbuff"}  # what is sent is no longer the method's
    builders = {name for name, of in hints.items() if of["return"] is Algorithm} - elsewhere
    assert covered == builders
    assert len(SIZES) == small_clients().num_clients
    assert jnp.zeros(1).devices() <= set(jax.devices())
