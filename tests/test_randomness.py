"""Whose randomness a run uses, who can know it, and what the noise of private local steps is."""

import stat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, SIZES, small_clients

from jaxfl import simulate, sweep
from jaxfl.algorithms import dp_fedavg, fedavg
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.engine.round import all_keys
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.accounting import example_epsilon
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.noise import normal, random_bits
from jaxfl.privacy.sampling import Full, Poisson
from jaxfl.run.simulate import _Run
from jaxfl.types import ClientData

KEY = jax.random.key(3)
QUIET: dict[str, Any] = {"rounds": 2, "progress": False}


def still(noise_multiplier=1.0):
    """Nothing is learnt: what moves is noise."""
    return dp_fedavg(
        MODEL,
        clip=CLIP,
        noise_multiplier=noise_multiplier,
        sampling=Full(),
        local=LocalSGD(optax.sgd(0.0), batch_size=9),
    )


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def moved(result):
    start = initialize(jax.random.split(KEY, 3)[0], KEY, still(), place(small_clients()))[0].server
    return flat(result.server.params) - flat(start.params)


def test_points_of_one_key_share_their_noise_only_when_asked_to():
    values = {"noise_multiplier": [1.0, 2.0]}
    one, two = (moved(own) for own in sweep(KEY, still, values, small_clients(), paired_noise=True, **QUIET))
    np.testing.assert_allclose(2 * one - two, 0, atol=1e-5)  # which is the clean update
    alone = moved(simulate(KEY, still(), small_clients(), **QUIET))
    np.testing.assert_allclose(one, alone, atol=1e-6)
    one, two = (moved(own) for own in sweep(KEY, still, values, small_clients(), **QUIET))
    np.testing.assert_allclose(one, alone, atol=1e-6)
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / len(one) ** 0.5


@pytest.mark.slow
def test_points_share_cohorts_and_points_of_own_keys_are_their_runs():
    def build(noise_multiplier):
        return dp_fedavg(
            MODEL,
            clip=CLIP,
            noise_multiplier=noise_multiplier,
            sampling=Poisson(0.5),
            local=LocalSGD(optax.sgd(0.05), batch_size=9),
        )

    one, two = sweep(KEY, build, {"noise_multiplier": [1.0, 2.0]}, small_clients(), **QUIET)
    np.testing.assert_array_equal(one.ledger.participants, two.ledger.participants)
    keys = jax.random.split(KEY, 2)
    for key, own in zip(keys, sweep(keys, lambda: build(1.0), {}, small_clients(), **QUIET)):
        alone = simulate(key, build(1.0), small_clients(), **QUIET)
        np.testing.assert_allclose(flat(own.server.params), flat(alone.server.params), atol=1e-5)


@pytest.mark.slow
def test_secret_noise_is_new_in_every_run_and_kept_for_its_owner(tmp_path):
    algorithm = still()
    one, two = (
        simulate(KEY, algorithm, small_clients(), folder=tmp_path / name, secret_noise=True, **QUIET) for name in "ab"
    )
    assert abs(np.corrcoef(moved(one), moved(two))[0, 1]) < 4 / len(moved(one)) ** 0.5
    assert moved(one).std() == pytest.approx(2**0.5 * CLIP / len(SIZES), rel=0.1)
    path = tmp_path / "a" / "noise.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = path.read_bytes()
    assert len(secret) == 16
    words = [str(word).encode() for word in np.frombuffer(secret, np.uint32)]
    for other in (tmp_path / "a").rglob("*"):
        if other.is_file() and other != path:
            content = other.read_bytes()
            assert secret not in content
            assert not any(word in content for word in words)


def test_secret_cohorts_do_not_follow_the_key():
    algorithm = dp_fedavg(
        MODEL, clip=CLIP, noise_multiplier=1.0, sampling=Poisson(0.5), local=LocalSGD(optax.sgd(0.05), batch_size=9)
    )
    found = [simulate(KEY, algorithm, small_clients(), secret_noise=True, rounds=12, progress=False) for _ in range(2)]
    one, two = (result.ledger.participants for result in found)
    assert not np.array_equal(one, two)  # equal with probability 2**-132


@pytest.mark.slow
@pytest.mark.parametrize("store", ["device", "host"])
def test_a_run_of_secret_noise_goes_on_bit_identically(tmp_path, store, monkeypatch):
    algorithm, clients, options = still(), small_clients(), {"rounds": 4, "eval_every": 1, "progress": False}
    whole = simulate(KEY, algorithm, clients, folder=tmp_path / "a", states=store, secret_noise=True, **options)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "noise.key").write_bytes((tmp_path / "a" / "noise.key").read_bytes())
    monkeypatch.setattr("jaxfl.run.simulate._CHECKPOINT_SECONDS", -1.0)
    original = _Run._evaluate
    with monkeypatch.context() as patch:

        def evaluate(self):
            original(self)
            if self.done == 3:
                raise RuntimeError("killed")

        patch.setattr(_Run, "_evaluate", evaluate)
        with pytest.raises(RuntimeError, match="killed"):
            simulate(KEY, algorithm, clients, folder=tmp_path / "b", states=store, secret_noise=True, **options)
    resumed = simulate(KEY, algorithm, clients, folder=tmp_path / "b", states=store, secret_noise=True, **options)
    np.testing.assert_array_equal(flat(whole.server), flat(resumed.server))


def test_a_pair_of_keys_draws_gaussians_that_need_both():
    data = jnp.asarray([[[1, 2], [3, 4]], [[1, 2], [3, 5]], [[0, 2], [3, 4]]], jnp.uint32)
    pairs = jax.random.wrap_key_data(data, impl="threefry2x32")
    draws = np.stack([normal(pair, (20_000,)) for pair in pairs])
    np.testing.assert_allclose(np.cov(draws), np.eye(3), atol=4 / 20_000**0.5)
    bits = [np.asarray(random_bits(pair, (1000,))) for pair in pairs]
    assert not np.any([np.array_equal(bits[0], other) for other in bits[1:]])


def test_the_server_gets_the_aggregate_and_nothing_else():
    seen = []
    base = still()

    def server_update(*arguments):
        seen.append(jax.tree.structure(arguments))
        return base.server_update(*arguments)

    compile_and_run(base._replace(server_update=server_update))
    server, _ = base.init(KEY, len(SIZES))
    assert set(seen) == {jax.tree.structure((server, server.params))}


def compile_and_run(algorithm, rounds=1, **options):
    population = place(small_clients(), jax.devices()[:1])
    step = compile_rounds(algorithm, population, chunk=1, segment=rounds)
    center, states, records = step(all_keys(KEY), 0, rounds, *initialize(KEY, KEY, algorithm, population))
    return center.server, states.tree(), records


@pytest.mark.parametrize("sent", ["updates", "weights"])
def test_a_round_without_participants_leaves_the_server_where_the_denominator_shows_it(sent):
    from jaxfl.algorithms.fedavg import sends_weights

    mechanism = Mechanism(sampling=Poisson(1e-9), denominator="participants", clip=CLIP, noise_multiplier=1.0)
    method = fedavg(MODEL, mechanism=mechanism, server_optimizer=optax.sgd(1.0, momentum=0.9))
    method = method if sent == "updates" else sends_weights(method)
    before, _ = method.init(KEY, len(SIZES))
    after, _, records = compile_and_run(method)
    assert not records.ledger.participants.any()
    np.testing.assert_array_equal(flat(before), flat(after))


def test_a_client_sees_its_own_examples_and_zeros_beyond_them():
    store = jnp.arange(1.0, 13.0).reshape(6, 2)
    data = ClientData(store, jnp.arange(1, 7), jnp.array([4, 2, 0, 0]), jnp.int32(2))
    inputs, labels = data.take(jnp.array([[1, 0], [2, 3]]))
    np.testing.assert_array_equal(inputs, [[[5, 6], [9, 10]], [[0, 0], [0, 0]]])
    np.testing.assert_array_equal(labels, [[3, 5], [0, 0]])
    part = data.part(1, 2)
    np.testing.assert_array_equal(part.take(jnp.arange(2))[1], [3, 0])
    assert {name for name in vars(data) if not name.startswith("_")} == {"size", "id", "noise", "round"}


PRIVATE = DPSGD(clip=0.5, noise_multiplier=np.array([4.0]), rate=0.5, steps=1, optimizer=optax.sgd(1.0))


def test_one_multiplier_in_an_array_is_for_every_client():
    base = fedavg(MODEL, local=PRIVATE, mechanism=Mechanism())

    def client_update(key, server, client, data):
        message, client, info = base.client_update(key, server, client, data)
        return message, flat_update(message), info

    def flat_update(message):
        return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(message.update)])

    size = sum(leaf.size for leaf in jax.tree.leaves(MODEL.init(KEY)))
    own = base._replace(
        init=lambda key, number: (base.init(key, number)[0], jnp.zeros((number, size))), client_update=client_update
    )
    _, updates, records = compile_and_run(own)
    stds = np.asarray(updates).std(axis=1) * np.asarray(SIZES) * PRIVATE.rate
    for spread, examples in zip(stds, SIZES):
        if examples:  # clipped gradients of norm 0.5 in 1,210 coordinates are small beside 2
            assert spread == pytest.approx(4.0 * 0.5, rel=0.15)
    np.testing.assert_array_equal(records.ledger.example_noise, np.full((1, 1), 4.0))


def test_the_epsilon_of_examples_is_read_from_the_ledger():
    records = compile_and_run(fedavg(MODEL, local=PRIVATE, mechanism=Mechanism()), rounds=2)[2]
    ledger = jax.device_get(records.ledger)
    stated = example_epsilon(ledger, PRIVATE)
    assert np.isfinite(stated.value)
    half = ledger._replace(example_noise=np.array([[4.0], [2.0]]))
    assert example_epsilon(half, PRIVATE).value > stated.value
    none = ledger._replace(example_noise=np.zeros((2, 1)))
    assert np.isinf(example_epsilon(none, PRIVATE).value)


def test_plain_steps_under_private_ones_are_refused():
    base = fedavg(MODEL, local=PRIVATE, mechanism=Mechanism())
    plain = fedavg(MODEL, local=LocalSGD(optax.sgd(0.05), batch_size=4)).client_update
    with pytest.raises(ValueError, match=r"dp_sgd=DPSGD.*no private steps"):
        compile_and_run(base._replace(client_update=plain))
