"""The sources of a run's randomness, the secrets in them, and the noise of private steps."""

import functools
import os
import pathlib
import resource
import shutil
import stat
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, MODEL, SIZES, small_clients
from flax import nnx

from jaxfl import simulate, sweep
from jaxfl._support.checks import check_key
from jaxfl.algorithms import dp_fedavg, fedavg
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.engine.round import all_keys
from jaxfl.local.train import LocalSGD
from jaxfl.models import from_flax, from_nnx
from jaxfl.privacy.accounting.ledgers import example_epsilon
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.noise import normal, random_bits
from jaxfl.privacy.sampling import (
    BallsInBins,
    CyclicPoisson,
    FixedSize,
    Full,
    MinSeparation,
    Poisson,
)
from jaxfl.run.loop import Loop
from jaxfl.run.randomness import SecretBits, Streams, check_apart
from jaxfl.types import ClientData

KEY = jax.random.key(3)
QUIET: dict[str, Any] = {"rounds": 2, "progress": False}


def still(noise_multiplier=1.0):
    """Return DP-FedAvg with a rate of 0, so that only noise moves the model."""
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
    one, two = (
        moved(own) for own in sweep(KEY, still, values, small_clients(), paired_noise=True, **QUIET)
    )
    np.testing.assert_allclose(2 * one - two, 0, atol=1e-5)  # which is the clean update
    alone = moved(simulate(KEY, still(), small_clients(), **QUIET))
    np.testing.assert_allclose(one, alone, atol=1e-6)
    one, two = (moved(own) for own in sweep(KEY, still, values, small_clients(), **QUIET))
    np.testing.assert_allclose(one, alone, atol=1e-6)
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / len(one) ** 0.5


def test_points_of_one_key_draw_cohorts_and_noise_of_their_own():
    mechanism, twice = Mechanism(sampling=Poisson(0.5)), jnp.stack([KEY, KEY])

    def cohorts(paired):
        streams = Streams(secret=False, paired=paired)
        keys = streams.keys(twice, streams.bits(twice, None))
        np.testing.assert_array_equal(jax.random.key_data(keys.clients), jax.random.key_data(twice))
        return [
            np.asarray(mechanism.draw(key, (), jnp.int32(4), 4000).sampled) for key in keys.cohort
        ]

    alone = np.asarray(mechanism.draw(KEY, (), jnp.int32(4), 4000).sampled)
    one, two = cohorts(paired=False)
    np.testing.assert_array_equal(one, alone)
    assert np.mean(one & two) == pytest.approx(
        0.25, abs=4 * (0.25 * 0.75 / 4000) ** 0.5
    )  # as independent coins
    for own in cohorts(paired=True):
        np.testing.assert_array_equal(own, alone)


def test_parts_of_a_sweep_have_the_cohorts_and_the_noise_of_the_whole():
    """Parts that all began at 0 would share cohorts and noise, so epsilons would not add up."""
    keys = jnp.stack([KEY, KEY, KEY])
    whole = Streams(secret=False).keys(keys, SecretBits(0, None))
    part = Streams(secret=False, numbers=(2, 1)).keys(keys[:2], SecretBits(0, None))
    data = np.asarray(jax.random.key_data(whole.noise))
    assert len(np.unique(data, axis=0)) == 3
    np.testing.assert_array_equal(jax.random.key_data(part.noise), data[[2, 1]])
    np.testing.assert_array_equal(jax.random.key_data(part.cohort), data[[2, 1]])
    with pytest.raises(
        ValueError, match="numbers must have one entry for each of the 1 points, got 2"
    ):
        sweep(
            KEY, lambda mu: fedavg(MODEL), {"mu": [0.1]}, small_clients(), rounds=1, numbers=[0, 1]
        )


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([1, 1], r"must differ for points of one key, got \[1, 1\]"),
        ([0, 2**40], "must be at most 4294967295, got 1099511627776"),
    ],
)
def test_points_that_would_share_their_noise_are_refused(numbers, words):
    with pytest.raises(ValueError, match=f"numbers {words}"):
        sweep(
            KEY,
            lambda mu: fedavg(MODEL),
            {"mu": [0.1, 0.2]},
            small_clients(),
            rounds=1,
            numbers=numbers,
        )


def test_points_of_other_keys_may_have_one_number():
    check_apart(jax.random.split(KEY), [1, 1])


@pytest.mark.slow
def test_points_have_their_own_cohorts_and_points_of_own_keys_are_their_runs():
    def build(noise_multiplier):
        return dp_fedavg(
            MODEL,
            clip=CLIP,
            noise_multiplier=noise_multiplier,
            sampling=Poisson(0.5),
            local=LocalSGD(optax.sgd(0.05), batch_size=9),
        )

    one, two = sweep(KEY, build, {"noise_multiplier": [1.0, 2.0]}, small_clients(), **QUIET)
    assert not np.array_equal(
        one.ledger.participants, two.ledger.participants
    )  # equal with probability 2**-22
    values = {"noise_multiplier": [1.0, 2.0]}
    one, two = sweep(KEY, build, values, small_clients(), paired_noise=True, **QUIET)
    np.testing.assert_array_equal(one.ledger.participants, two.ledger.participants)
    assert one.statement["paired"]
    assert two.statement["paired"]
    keys = jax.random.split(KEY, 2)
    for key, own in zip(keys, sweep(keys, lambda: build(1.0), {}, small_clients(), **QUIET)):
        alone = simulate(key, build(1.0), small_clients(), **QUIET)
        np.testing.assert_allclose(flat(own.server.params), flat(alone.server.params), atol=1e-5)


@pytest.mark.slow
def test_secret_noise_is_new_in_every_run_and_kept_for_its_owner(tmp_path):
    algorithm = still()
    one, two = (
        simulate(
            KEY, algorithm, small_clients(), folder=tmp_path / name, secret_noise=True, **QUIET
        )
        for name in "ab"
    )
    assert abs(np.corrcoef(moved(one), moved(two))[0, 1]) < 4 / len(moved(one)) ** 0.5
    assert moved(one).std() == pytest.approx(2**0.5 * CLIP / len(SIZES), rel=0.1)
    path = tmp_path / "a" / "noise.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = path.read_bytes()
    assert len(secret) == 16 + 32  # the digest of run and folder
    secret = secret[:16]
    words = [str(word).encode() for word in np.frombuffer(secret, np.uint32)]
    for other in (tmp_path / "a").rglob("*"):
        if other.is_file() and other != path:
            content = other.read_bytes()
            assert secret not in content
            assert not any(word in content for word in words)


SAMPLERS = {
    "poisson": Poisson(0.1),
    "fixed size": FixedSize(10),
    "cyclic": CyclicPoisson(0.1, 2),
    "separated": MinSeparation(10, separation=2),
    "bins": BallsInBins(4),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_secret_cohort_needs_both_keys(name):
    """The draws of a pair are XORs. For a key with itself they are zeros."""
    mechanism, data = Mechanism(sampling=SAMPLERS[name]), jax.random.bits(KEY, (4, 2), jnp.uint32)

    def cohort(*words):
        pair = jax.random.wrap_key_data(jnp.stack(words), impl="threefry2x32")
        return tuple(np.flatnonzero(mechanism.draw(pair, (), jnp.int32(0), 100).sampled))

    able = np.flatnonzero(SAMPLERS[name].possible(100, 1)[0])
    first = (
        able[:10] if name in ("fixed size", "separated") else able
    )  # zeros are below any rate, and all alike
    assert {cohort(data[i], data[i]) for i in range(4)} == {tuple(first)}
    assert len({cohort(data[0], data[1]), cohort(data[0], data[2]), cohort(data[3], data[1])}) == 3
    assert cohort(data[0], data[1]) == cohort(data[1], data[0])


def test_secret_cohorts_of_a_size_are_uniform():
    pairs = jax.random.wrap_key_data(
        jax.random.bits(KEY, (4000, 2, 2), jnp.uint32), impl="threefry2x32"
    )
    for sampling, rate in ((FixedSize(3), 3 / 12), (MinSeparation(3, separation=2), 3 / 6)):
        drawn = np.asarray(jax.vmap(lambda pair, own=sampling: own.sample(pair, 12, 0))(pairs))
        assert np.all(drawn.sum(axis=1) == 3)
        often = drawn.mean(axis=0)
        often = often[often > 0]  # of the round's group
        assert len(often) == round(3 / rate)
        np.testing.assert_allclose(often, rate, atol=4.5 * (rate * (1 - rate) / 4000) ** 0.5)


def test_secret_cohorts_do_not_follow_the_key():
    algorithm = dp_fedavg(
        MODEL,
        clip=CLIP,
        noise_multiplier=1.0,
        sampling=Poisson(0.5),
        local=LocalSGD(optax.sgd(0.05), batch_size=9),
    )
    found = [
        simulate(KEY, algorithm, small_clients(), secret_noise=True, rounds=12, progress=False)
        for _ in range(2)
    ]
    one, two = (result.ledger.participants for result in found)
    assert not np.array_equal(one, two)  # equal with probability 2**-132


@pytest.mark.slow
@pytest.mark.parametrize("store", ["device", "host"])
def test_a_run_of_secret_noise_goes_on_bit_identically(tmp_path, store, monkeypatch):
    algorithm, clients, options = (
        still(),
        small_clients(),
        {"rounds": 4, "eval_every": 1, "progress": False},
    )
    monkeypatch.setattr("jaxfl.run.randomness.secrets.token_bytes", lambda size: b"7" * size)
    whole = simulate(
        KEY, algorithm, clients, folder=tmp_path / "a", states=store, secret_noise=True, **options
    )
    monkeypatch.setattr("jaxfl.run.followers._CHECKPOINT_SECONDS", -1.0)
    original = Loop._evaluate
    with monkeypatch.context() as patch:

        def evaluate(self):
            scores = original(self)
            if self.done == 3:
                raise RuntimeError("killed")
            return scores

        patch.setattr(Loop, "_evaluate", evaluate)
        with pytest.raises(RuntimeError, match="killed"):
            simulate(
                KEY,
                algorithm,
                clients,
                folder=tmp_path / "b",
                states=store,
                secret_noise=True,
                **options,
            )
    monkeypatch.setattr("jaxfl.run.randomness.secrets.token_bytes", lambda size: b"8" * size)
    resumed = simulate(
        KEY, algorithm, clients, folder=tmp_path / "b", states=store, secret_noise=True, **options
    )
    np.testing.assert_array_equal(flat(whole.server), flat(resumed.server))


RUN = {"method": "mine"}


def secret_bits(folder, count=1, run=RUN):
    """Return the secret bits of a run that begins in a folder, as read again."""
    SecretBits(count, folder / "noise.key").begin(run)
    return SecretBits(count, folder / "noise.key").words


def spoilt(path, how, tmp_path):
    """Put something else in the place of a file of secret bits."""
    content = path.read_bytes()
    if how == "mode":
        path.chmod(0o640)
        return
    path.unlink()
    if how in ("link", "dangling link"):
        target = tmp_path / "elsewhere"
        path.symlink_to(target)
        if how == "link":
            target.write_bytes(content)
            target.chmod(0o600)
    elif how == "fifo":
        os.mkfifo(path, 0o600)
    elif how == "folder":
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "short": content[:-1], "zeros": bytes(len(content))}[how])
        path.chmod(0o600)


@pytest.mark.parametrize(
    ("how", "refused"),
    [
        ("mode", "open to its owner alone, got mode 0640.*chmod 600"),
        ("link", "regular file, got a symbolic link"),
        ("dangling link", "regular file, got a symbolic link"),
        ("fifo", "regular file, got a fifo"),
        ("folder", "regular file, got a folder"),
        ("empty", "secret bits of 1 runs, got 0 bytes"),
        ("short", "secret bits of 1 runs, got 47 bytes"),
        ("zeros", "random bits, got only zeros"),
    ],
)
def test_secret_bits_that_others_may_know_are_refused_by_name(how, refused, tmp_path):
    secret_bits(tmp_path)
    path = tmp_path / "noise.key"
    spoilt(path, how, tmp_path)
    with pytest.raises(ValueError, match=rf"noise\.key.*{refused}.*resume='never'"):
        SecretBits(1, path)


def test_secret_bits_of_another_user_are_refused(tmp_path, monkeypatch):
    secret_bits(tmp_path)
    user = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: user + 1)
    with pytest.raises(ValueError, match=rf"must belong to user {user + 1}, got user {user}\."):
        SecretBits(1, tmp_path / "noise.key")
    new = tmp_path / "new"
    new.mkdir()
    with pytest.raises(
        ValueError, match="must belong"
    ):  # a file system that changes owners is no place for bits
        secret_bits(new)
    assert list(new.iterdir()) == []


def test_secret_bits_belong_to_one_run_in_one_folder(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    words = secret_bits(one)
    np.testing.assert_array_equal(secret_bits(one), words)  # a death before the first checkpoint
    assert not np.array_equal(secret_bits(two), words)
    with pytest.raises(
        ValueError,
        match=r"another run or in another folder.*must not be used twice.*resume='never'",
    ):
        secret_bits(one, run={"method": "yours"})
    shutil.copy2(one / "noise.key", two / "noise.key")
    with pytest.raises(ValueError, match="another run or in another folder"):
        secret_bits(two)
    (two / "noise.key").write_bytes(
        b"7" * 16
    )  # of an earlier version: only a checkpoint says of what run
    SecretBits(1, two / "noise.key")
    with pytest.raises(ValueError, match="another run or in another folder"):
        secret_bits(two)
    with pytest.raises(ValueError, match="another run or in another folder"):
        secret_bits(one, count=3)


def test_a_disk_that_is_full_at_any_byte_leaves_a_folder_that_works_again(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in range(48):
        bits = SecretBits(1, tmp_path / "noise.key")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(OSError, match=r"must keep the secret bits.*Make room.*noise\.key"):
                bits.begin(RUN)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(tmp_path.iterdir()) == []
    secret_bits(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["noise.key"]


def test_a_kill_at_any_moment_leaves_a_folder_that_works_again(tmp_path, monkeypatch):
    monkeypatch.setattr(
        pathlib.Path, "unlink", lambda *_, **__: None
    )  # as a kill, which cleans nothing up
    path = tmp_path / "noise.key"
    for step in ("os.fsync", "os.link", "jaxfl._support.files._sync"):
        with monkeypatch.context() as patch:

            def killed(*_, **__):
                raise KeyboardInterrupt

            patch.setattr(step, killed)
            with pytest.raises(KeyboardInterrupt):
                SecretBits(1, path).begin(RUN)
        assert path.exists() == (
            step == "jaxfl._support.files._sync"
        )  # the name appears when all is written
    left = path.read_bytes()
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 4
    (tmp_path / "noise.key.mine").touch()
    secret_bits(tmp_path)
    assert path.read_bytes() == left
    assert sorted(other.name for other in tmp_path.iterdir()) == ["noise.key", "noise.key.mine"]


def short(folder, multiplier=1.0):
    options = {"rounds": 1, "progress": False, "secret_noise": True}
    return simulate(KEY, still(multiplier), small_clients(), folder=folder, **options)


def test_a_run_that_died_before_its_first_checkpoint_has_its_noise_again(tmp_path, monkeypatch):
    def die(*_):
        raise RuntimeError("died")

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "go", die)
        with pytest.raises(RuntimeError, match="died"):
            short(tmp_path)
    secret = (tmp_path / "noise.key").read_bytes()
    with pytest.raises(ValueError, match="another run or in another folder"):
        short(tmp_path, multiplier=2.0)
    short(tmp_path)
    assert (tmp_path / "noise.key").read_bytes() == secret


@pytest.mark.slow
def test_a_checkpoint_needs_the_secret_bits_whose_hash_it_has(tmp_path):
    folder, path = tmp_path / "moved", tmp_path / "moved" / "noise.key"
    short(tmp_path / "run")
    (tmp_path / "run").rename(folder)
    assert short(folder).restored == 1
    path.write_bytes(path.read_bytes()[:16])  # as earlier versions wrote it
    assert short(folder).restored == 1
    path.write_bytes(b"7" * 48)
    with pytest.raises(ValueError, match="What differs: the secret key of the noise"):
        short(folder)
    path.unlink()
    with pytest.raises(ValueError, match="What differs: the secret key of the noise"):
        short(folder)
    assert not path.exists()


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
    center, states, records = step(
        all_keys(KEY), 0, rounds, *initialize(KEY, KEY, algorithm, population)
    )
    return center.server, states.tree(), records


@pytest.mark.parametrize("sent", ["updates", "weights"])
def test_a_round_without_participants_leaves_the_server_where_the_denominator_shows_it(sent):
    from jaxfl.algorithms.fedavg import sends_weights

    mechanism = Mechanism(
        sampling=Poisson(1e-9), denominator="participants", clip=CLIP, noise_multiplier=1.0
    )
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
    assert {name for name in vars(data) if not name.startswith("_")} == {
        "size",
        "id",
        "noise",
        "round",
    }


PRIVATE = DPSGD(
    clip=0.5, noise_multiplier=np.array([4.0]), rate=0.5, steps=1, optimizer=optax.sgd(1.0)
)


def test_one_multiplier_in_an_array_is_for_every_client():
    base = fedavg(MODEL, local=PRIVATE, mechanism=Mechanism())

    def client_update(key, server, client, data):
        message, client, info = base.client_update(key, server, client, data)
        return message, flat_update(message), info

    def flat_update(message):
        return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(message.update)])

    size = sum(leaf.size for leaf in jax.tree.leaves(MODEL.init(KEY)))
    own = base._replace(
        init=lambda key, number: (base.init(key, number)[0], jnp.zeros((number, size))),
        client_update=client_update,
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
    with pytest.raises(ValueError, match=r"got DPSGD.*no private steps"):
        compile_and_run(base._replace(client_update=plain))


@pytest.fixture
def rbg():
    """Make another generator JAX's default for keys, as is common on accelerators."""
    before = jax.config.jax_default_prng_impl  # pyrefly: ignore[missing-attribute]
    jax.config.update("jax_default_prng_impl", "rbg")
    yield
    jax.config.update("jax_default_prng_impl", before)


DRAWS: dict[str, Any] = {
    "dropout": lambda: fedavg(from_flax(Dropped(), (8, 8, 1)), local=LocalSGD(optax.sgd(0.1), 4)),
    "dropout of nnx": lambda: fedavg(
        from_nnx(dropped, (8, 8, 1)), local=LocalSGD(optax.sgd(0.1), 4)
    ),
    "private steps": lambda: fedavg(
        MODEL, local=DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.5, steps=2)
    ),
}


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(6)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=not train)(x))


def dropped(rngs):
    flatten = functools.partial(jax.numpy.reshape, shape=(-1, 64))
    return nnx.Sequential(flatten, nnx.Linear(64, 10, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_has_the_same_randomness_whatever_generator_jax_prefers(name, request):
    options: dict[str, Any] = QUIET | {"chunk": 4}
    expected = simulate(3, DRAWS[name](), small_clients(), **options).server.params
    request.getfixturevalue("rbg")
    for chunk in (1, 4):
        found = simulate(
            3, DRAWS[name](), small_clients(), **options | {"chunk": chunk}
        ).server.params
        np.testing.assert_allclose(flat(found), flat(expected), atol=1e-6)


@pytest.mark.slow
def test_a_seed_has_the_same_randomness_however_jax_cuts_it():
    expected = simulate(3, DRAWS["dropout"](), small_clients(), **QUIET).server.params
    with jax.threefry_partitionable(False):
        found = simulate(3, DRAWS["dropout"](), small_clients(), **QUIET).server.params
    np.testing.assert_array_equal(flat(found), flat(expected))


def test_a_key_file_of_another_size_is_not_read(tmp_path):
    path = tmp_path / "noise.key"
    path.touch(0o600)
    os.truncate(path, 2**40)  # a sparse file, which would fill the memory
    with pytest.raises(
        ValueError, match="must hold the secret bits of 1 runs, got 1099511627776 bytes"
    ):
        SecretBits(1, path)


def test_keys_of_other_generators_are_refused_by_name(rbg):
    for run in (simulate, functools.partial(sweep, values={"learning_rate": [0.1]})):
        with pytest.raises(
            ValueError, match="key must be a key of the generator threefry2x32, got one of rbg"
        ):
            run(jax.random.key(0), fedavg(MODEL), clients=small_clients(), rounds=1)
    with pytest.raises(ValueError, match="unsafe_rbg"):
        check_key("key", jax.random.key(0, impl="unsafe_rbg"))


def test_seeds_and_raw_keys_are_keys_of_threefry(rbg):
    expected = jax.random.key(7, impl="threefry2x32")
    for given in (7, np.uint32(7), jax.random.key_data(expected), expected):
        assert check_key("key", given) == expected


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("secret", [True, False])
def test_a_statement_says_when_points_share_their_noise(secret, equal):
    streams = Streams(secret, paired=True)
    one, two = jax.random.split(jax.random.key(0))
    key = jnp.stack([one, one if equal else two])
    noise = jax.random.key_data(streams.keys(key, streams.bits(key, None)).noise)
    shared = bool((noise[0] == noise[1]).all())
    assert shared == (secret or equal)
    assert streams.describe(key)["paired"] == shared
    assert not Streams(secret, paired=True).describe(one)["paired"]
