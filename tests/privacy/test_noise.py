"""Noise, sums and coins at the precision that the accountant assumes."""

import dataclasses
import fractions
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import scipy.stats
from algorithms_table import ALGORITHMS, CLIP, MODEL, client_data, small_clients
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfl import simulate, sweep
from jaxfl.algorithms import dp_fedavg, fedavg
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.engine.round import add_participants, all_keys, draw
from jaxfl.engine.streamed import Stream
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import noise, sums
from jaxfl.privacy.clip import round_within
from jaxfl.privacy.dp_sgd import DPSGD, noisy_gradient
from jaxfl.privacy.mechanisms import Mechanism, PrivacyFilter
from jaxfl.privacy.sampling import Full, Poisson, coins
from jaxfl.types import ClientData, Clients, Lists, Message

KEY = jax.random.key(3)


def words(value, count):
    """Return a whole number as `count` words of 32 bits, the highest first."""
    return [value >> 32 * i & 0xFFFFFFFF for i in reversed(range(count))]


# Coins


@pytest.mark.parametrize("rate", [1e-8, 1e-6, 0.1, 0.5, 1 - 2**-53])
def test_a_coin_is_never_more_likely_than_stated(rate, monkeypatch):
    threshold = math.floor(fractions.Fraction(rate) * 2**64)
    drawn = np.array([words(threshold + i, 2) for i in (-2, -1, 0, 1)], np.uint32)
    monkeypatch.setattr("jax.random.bits", lambda *_, **__: jnp.asarray(drawn))
    assert Poisson(rate).sample(KEY, 4, 0).tolist() == [True, True, False, False]
    swept = jax.jit(lambda rate: coins(KEY, 4, rate))(rate)  # a float32 below it
    assert swept.tolist() == [False, False, False, False]
    nearly = np.array([words(int(threshold * (1 - 3e-7)), 2)], np.uint32)
    monkeypatch.setattr("jax.random.bits", lambda *_, **__: jnp.asarray(nearly))
    assert jax.jit(lambda rate: coins(KEY, 1, rate))(rate).tolist() == [True]


def test_a_sure_coin_is_sure():
    assert Poisson(1.0).sample(KEY, 1000, 0).all()


# Parameters in half precision


def is_gaussian(values, std):
    values = np.ravel(values)
    assert values.std() == pytest.approx(std, rel=4 / math.sqrt(2 * values.size))
    assert scipy.stats.kstest(values / std, "norm").pvalue > 1e-3
    assert np.abs(values).max() > 3.6 * std


def probe(update, mechanism, like=None, clients=None):
    """Return a method whose clients send `update(key, data)`. The server keeps the aggregate."""
    like, clients = jnp.zeros(()) if like is None else like, clients or small_clients()

    def init(key, num_clients):
        data = ClientData(clients.inputs, clients.labels, clients.train[0], clients.train_size[0])
        shapes = jax.eval_shape(update, key, data)
        return {
            "sum": jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes),
            "weights": like,
        }, ()

    return fedavg(MODEL, mechanism=mechanism)._replace(
        init=init,
        client_update=lambda key, server, client, data: (Message(update(key, data)), client, {}),
        server_update=lambda server, aggregate: {
            "sum": aggregate,
            "weights": server["weights"] + 0.5,
        },
    )


def aggregate(algorithm, clients=None, *, chunk=1, devices=1, key=KEY):
    """Return the server's state after the first round."""
    population = place(clients or small_clients(), jax.devices()[:devices])
    step = compile_rounds(algorithm, population, chunk=chunk, segment=1)
    return jax.device_get(step(key, 0, 1, *initialize(key, key, algorithm, population))[0].server)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("who", ["server", "clients"])
def test_noise_is_single_precision_whatever_the_parameters(dtype, who):
    mechanism = Mechanism(
        clip=0.5, noise_multiplier=2.0 * (who == "server"), client_noise=2.0 * (who == "clients")
    )
    algorithm = probe(
        lambda key, data: {"w": jnp.zeros(20_000, dtype)}, mechanism, jnp.ones(3, dtype)
    )
    server = aggregate(algorithm)
    std = 0.5 * 2 / 11 * (1 if who == "server" else math.sqrt(11))
    is_gaussian(server["sum"]["w"], std)
    assert len(np.unique(server["sum"]["w"])) > 19_000
    assert server["weights"].dtype == dtype
    np.testing.assert_array_equal(server["weights"].astype(np.float32), 1.5)


def test_updates_in_half_precision_are_clipped_in_single():
    update = lambda key, data: jnp.full(10_000, 3.0, jnp.bfloat16)  # noqa: E731 (its sum of squares stalls at 2,304)
    clipped = aggregate(probe(update, Mechanism(clip=1.0)))["sum"]
    assert np.linalg.norm(clipped) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("norms", [None, MODEL.ghost_norms])
def test_dp_sgd_in_half_precision_draws_single_precision_noise(norms):
    data, private = client_data(), DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.5, steps=1)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), MODEL.init(KEY))

    def step(key):
        return noisy_gradient(
            key, params, data, private, apply=MODEL.apply, prepare=MODEL.prepare, ghost_norms=norms,
            noise_multiplier=100.0, loss=lambda logits, labels, weights: 0.0 * jnp.sum(logits),
        )[1]  # fmt: skip

    drawn = jax.vmap(step)(jax.random.split(KEY, 20))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(drawn))
    flat = np.concatenate([np.ravel(leaf).astype(np.float32) for leaf in jax.tree.leaves(drawn)])
    std = 100 / (0.5 * int(data.size))
    assert flat.std() == pytest.approx(std, rel=0.02)
    assert np.abs(flat).max() > 3.6 * std


# Sums


def crowd(values):
    """Return clients with one example each, whose inputs are the values."""
    number = len(values)
    rows, nobody = np.arange(number, dtype=np.int32)[:, None], np.zeros(number, np.int32)
    train, test = Lists.of(rows), Lists.of(rows[:, :0])
    return Clients(
        values.astype(np.float32), nobody, train, np.ones(number, np.int32), test, nobody
    )


def change(algorithm, clients, neighbours, *, devices, chunk):
    """Return the norm of the difference between two exact sums, divided by the clip bound."""
    population = place(clients, jax.devices()[:devices])
    center, states = initialize(KEY, KEY, algorithm, population)
    ids = jnp.arange(clients.num_clients)

    @jax.jit
    def total(clients):
        cohort = draw(algorithm, len(ids), all_keys(KEY), jnp.int32(0), center)
        own = population._replace(clients=clients)
        shared = chunk, all_keys(KEY), jnp.int32(0), cohort
        return add_participants(algorithm, own, *shared, ids, None, center, states)[
            0
        ].contributions.update

    found = []
    for each in (clients, neighbours):
        update = jax.device_get(total(place(each, jax.devices()[:devices]).clients))
        rows = np.reshape(update.high, (devices, -1)).astype(object) * 2**32 + np.reshape(
            update.low, (devices, -1)
        )
        found.append(rows.sum(axis=0))
    return math.hypot(*(float(a - b) for a, b in zip(*found))) / 2**30


@pytest.mark.parametrize(("chunk", "power"), [(1, 18), (100, 11)])
def test_one_of_a_million_clients_changes_the_sum_by_its_clip_bound(chunk, power):
    """In single precision two such sums would differ by 3,718 or by 0.36 clip bounds."""
    own, below, step = (
        500_000,
        chunk * 2**power,
        2.0 ** (power - 24),
    )  # of a device; `step`: floats below the power
    turns = np.arange(own - below) // chunk
    one = np.concatenate([np.ones(below), np.where(turns % 2 == 0, 1.1 * step, -0.6 * step)])
    values = np.tile(one, 2)[:, None]
    neighbours = values.copy()
    neighbours[0] = 0
    mechanism, clients = Mechanism(clip=1.0, noise_multiplier=1.0), crowd(values)
    algorithm = probe(lambda key, data: data.take(jnp.int32(0))[0], mechanism, clients=clients)
    found = change(algorithm, clients, crowd(neighbours), devices=2, chunk=chunk)
    assert found == pytest.approx(1, abs=1e-5)


def test_the_most_noise_there_is_fits_the_sum():
    algorithm = probe(
        lambda key, data: jnp.zeros(20_000), Mechanism(clip=2.0, noise_multiplier=1e8)
    )
    is_gaussian(aggregate(algorithm)["sum"], 2e8 / 11)


def test_wide_sums_are_those_of_whole_numbers():
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(700, 3)) * 2.0 ** rng.integers(-3, 55, (700, 3))).astype(np.float32)
    values[:4] = [
        [0, -1, 2**31],
        [-0.5, 1, -(2.0**32)],
        [1.5, -(2.0**31), 2.0**32],
        [2.5, 0, -(2.0**62)],
    ]
    total = jax.jit(lambda x: sums.add_up(sums.widen({"a": x})))(values)
    expected = [sum(int(v) for v in np.round(column.astype(np.float64))) for column in values.T]
    found = total["a"]
    assert [int(h) * 2**32 + int(v) for h, v in zip(found.high, found.low)] == expected
    np.testing.assert_allclose(sums.narrow(total)["a"], np.array(expected, float), rtol=2.0**-23)
    zero = sums.narrow(sums.add(total, sums.widen({"a": -sums.narrow(total)["a"]})))["a"]
    np.testing.assert_array_less(np.abs(zero), np.abs(np.array(expected, float)) * 2.0**-23)


# The grid's noise


def threshold(k):
    """Return 2^95 P(|X| >= k) as a whole number."""
    high, middle, low = noise._thresholds()[:, k]
    return (int(high) << 63) + (int(middle) >> 1 << 32) + int(low)


def test_thresholds_are_the_tails_of_a_rounded_gaussian():
    """Tails equal erfc to about 1e-16, and their differences equal single probabilities."""
    for k in (1, 2, 500, 20_000, 50_000, 100_000, 150_000, 190_000):
        expected = scipy.special.erfc((k - 0.5) / noise.STEPS / math.sqrt(2))
        assert threshold(k) / 2**95 == pytest.approx(expected, rel=3e-14)
    for k in (
        1,
        2,
        20_000,
        50_000,
        100_000,
        180_000,
    ):  # a density over 2^30 cells, by Simpson's rule
        x = (k + np.array([-0.5, 0, 0.5])) / noise.STEPS
        density = np.exp(-(x**2) / 2) * math.sqrt(2 / math.pi)
        expected = density @ [1, 4, 1] / 6 / noise.STEPS
        assert (threshold(k) - threshold(k + 1)) / 2**95 == pytest.approx(expected, rel=1e-14)
    zero = 1 - fractions.Fraction(threshold(1), 2**95)
    assert float(zero) == pytest.approx(math.erf(0.5 / noise.STEPS / math.sqrt(2)), rel=1e-15)
    sizes = [threshold(k) for k in range(1, 347_000, 997)]
    assert sizes == sorted(sizes, reverse=True)
    assert not np.any(noise._thresholds()[1, 1:] % 2)  # the last bit is the sign's


@pytest.mark.parametrize("guess", [None, 0.0, 1e9, jnp.nan])
def test_a_draw_depends_on_its_bits_alone(guess, monkeypatch):
    """Bits lie at thresholds or just below, where 63 bits do not decide, for any first guess."""
    if guess is not None:
        monkeypatch.setattr(noise, "_guess", lambda bits: jnp.full(bits.shape[1], guess))
    sizes = [1, 2, 77, 30_000, 65_536, 150_000, 250_000, 330_000]
    drawn = [
        (threshold(k) + below, k - (below >= 0))
        for k in sizes
        for below in (0, 1, -1, -2, 2**33, -(2**33))
    ]
    drawn = [(u, k) for u, k in drawn if threshold(k + 1) <= u < (threshold(k) if k else 2**95)]
    last = np.flatnonzero(noise._thresholds().any(axis=0))[-1]
    drawn += [(0, last), (2**95 - 1, 0), (2**95 - 2**40, 0)]
    assert len(drawn) > 40
    high, middle, low = np.array([words(u, 3) for u, _ in drawn], np.uint64).T
    first, second, third = high << 1 | middle >> 31, (middle & 0x7FFFFFFF) << 1, low
    signs = np.arange(len(drawn)) % 3 == 1
    bits = jnp.asarray(np.array([first, second + signs]), jnp.uint32)
    rest = lambda: jnp.asarray(third, jnp.uint32)  # noqa: E731
    found = jax.jit(lambda bits: noise._rounded_gaussian(bits, rest))(bits)
    assert found.tolist() == [-k if sign else k for (_, k), sign in zip(drawn, signs)]


def test_grid_noise_is_a_rounded_gaussian():
    mesh = place(small_clients()).mesh
    drawn = jax.jit(
        lambda key: noise.add_grid_noise(key, {"a": jnp.zeros((3, 333_333), jnp.int32)}, mesh)
    )(KEY)["a"]
    values = np.ravel(drawn).astype(np.float64) / noise.STEPS
    assert drawn.dtype == jnp.int32
    assert values.std() == pytest.approx(1, rel=4 / math.sqrt(2e6))
    assert abs(values.mean()) < 4e-3
    edges = np.round(np.linspace(-4, 4, 161) * noise.STEPS) + 0.5
    share = np.diff(
        scipy.stats.norm.cdf(np.concatenate([[-np.inf], edges / noise.STEPS, [np.inf]]))
    )
    counts = np.histogram(drawn, np.concatenate([[-(2**31)], edges, [2**31]]))[0]
    assert scipy.stats.chisquare(counts, share / share.sum() * counts.sum()).pvalue > 1e-3
    fine = np.bincount(
        np.ravel(drawn) % 64
    )  # the low bits are even: no coarser grid is inside this one
    assert scipy.stats.chisquare(fine).pvalue > 1e-3


# Updates on the grid


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["normal", "equal", "halves", "one", "zero", "huge"]),
    st.floats(-5, 18),
    st.floats(0.67, 1.2),
)
def test_the_bound_holds_after_rounding(seed, kind, bits, norm):
    update = adversary(np.random.default_rng(seed), kind)
    radius = np.float32(2**bits)
    found = rounded(
        update, norm * np.linalg.norm(update), radius / max(1, np.linalg.norm(update)), radius
    )
    assert sum(int(n) ** 2 for n in found) <= float(radius) ** 2


def adversary(rng, kind):
    size = 300
    if kind == "normal":
        return rng.normal(size=size)
    if kind == "equal":
        return np.full(size, rng.uniform(0.5, 9))
    if kind == "halves":  # all are rounded up
        return rng.integers(0, 40, size) + 0.51
    if kind == "huge":
        return 1e18 * rng.normal(size=size)
    return np.eye(size)[0] * (kind == "one")


@jax.jit
def rounded(update, norm, scale, radius):
    half = {"a": update[:100].reshape(10, 10), "b": update[100:]}
    out = round_within(
        jax.tree.map(jnp.float32, half), jnp.float32(norm), jnp.float32(scale), jnp.float32(radius)
    )
    return jnp.concatenate([out["a"].ravel(), out["b"]])


def test_rounding_is_to_the_nearest_where_the_bound_allows():
    update = np.random.default_rng(0).normal(size=300)
    norm = np.linalg.norm(update)
    inside = rounded(update, norm, 1000.0, 1.01 * 1000 * norm)
    np.testing.assert_array_equal(inside, np.round(1000 * update.astype(np.float32)))
    at_bound = rounded(update, norm, 1000.0, 1000 * norm)
    assert np.linalg.norm(at_bound) == pytest.approx(1000 * norm, rel=3e-3)
    longest = np.asarray(
        rounded(update, norm, 1e6, 1e6 * norm)
    )  # 24 bits, of which the check reads 16
    assert np.linalg.norm(longest.astype(np.float64)) == pytest.approx(1e6 * norm, rel=1e-3)


# Rounds on the grid


GRID = Mechanism(clip=1.0, noise_multiplier=2.0, sampling=Poisson(0.7), noise="grid")


def whole(key, data):
    """Return an update of random scaled integers, which all programs compute equally to the bit."""
    bits = jax.random.bits(key, (40,), jnp.uint32) >> 12
    return {"a": bits[:30].reshape(5, 6) * 2.0**-24, "b": -(bits[30:] * 2.0**-25)}


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_grid_sums_are_bit_identical_across_chunks_devices_and_stores():
    mechanism = dataclasses.replace(GRID, weights=np.linspace(1, 3, 11), denominator="participants")
    algorithm = probe(whole, mechanism)
    expected = aggregate(algorithm)["sum"]
    for chunk, devices in ((4, 2), (100, 1)):
        equal(expected, aggregate(algorithm, chunk=chunk, devices=devices)["sum"])
    equal(expected, streamed(algorithm)["sum"])


@pytest.mark.slow
def test_a_round_on_the_grid_is_bit_identical_on_more_devices_and_in_the_host_store():
    algorithm = on_grid(ALGORITHMS["dp_fedavg"]())
    expected = aggregate(algorithm)
    equal(expected, aggregate(algorithm, devices=2))
    equal(expected, streamed(algorithm))


def streamed(algorithm):
    """Return the server's state after the first round, with client states on the host."""
    stream = Stream(KEY, all_keys(KEY), algorithm, small_clients(), None, 1, None)
    stream.compile(())
    stream.rounds(0, 1)
    return jax.device_get(stream.center.server)


def on_grid(algorithm):
    return algorithm._replace(mechanism=dataclasses.replace(algorithm.mechanism, noise="grid"))


def test_what_is_released_lies_on_one_grid_with_and_without_a_client():
    """Its digits do not reveal a client. In single precision they do, at any epsilon."""
    mechanism = Mechanism(clip=1.0, noise_multiplier=40.0, noise="grid")
    unit = np.float32(40 / noise.STEPS) / np.float32(11)
    update = lambda key, data: jnp.where(data.size == 7, 1.0, 0.3) * whole(key, data)["a"]  # noqa: E731
    for present in (1.0, 0.0):
        algorithm = probe(
            lambda key, data, p=present: jnp.where(data.size == 7, p, 1.0) * update(key, data),
            mechanism,
        )
        found = aggregate(algorithm)["sum"]
        steps = np.round(found / unit)
        np.testing.assert_array_equal(found, steps.astype(np.float32) * unit)
        assert steps.std() == pytest.approx(noise.STEPS, rel=0.6)


def test_grid_noise_has_the_stated_std():
    weights = np.linspace(0.5, 2, 11)
    algorithm = probe(
        lambda key, data: jnp.zeros(20_000), dataclasses.replace(GRID, weights=weights)
    )
    is_gaussian(aggregate(algorithm)["sum"], 2.0 * 2 / (0.7 * weights.sum()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp_pfeddsu", "centaur"])
def test_methods_run_on_the_grid(name):
    """A round is the same, up to its little noise."""
    plain = ALGORITHMS[name](z=0.02)
    found, expected = (aggregate(algorithm).params for algorithm in (on_grid(plain), plain))
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=0.03 * CLIP)


@pytest.mark.slow
def test_sweeps_and_schedules_run_on_the_grid():
    def build(clip, scale):
        base = dp_fedavg(
            MODEL,
            clip=clip,
            noise_multiplier=1.0,
            sampling=Full(),
            local=LocalSGD(optax.sgd(0.05), batch_size=4),
        )
        table = scale * jnp.array([1.0, 2.0])
        return on_grid(base._replace(mechanism=Mechanism(clip=clip, noise_multiplier=table)))

    options: dict[str, Any] = {"rounds": 2, "eval_every": 2, "progress": False}
    values = {"clip": [0.3, 0.1], "scale": [1.0, 2.0]}
    results = sweep(KEY, build, values, small_clients(), paired_noise=True, **options)
    for clip, scale, result in zip(*values.values(), results, strict=True):
        alone = simulate(KEY, build(clip, scale), small_clients(), **options)
        for a, b in zip(*(jax.tree.leaves(run.server) for run in (result, alone)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"noise_multiplier": 0.0}, r"noise_multiplier must be at least 0\.01 .* got 0\.0"),
        ({"noise_multiplier": (1.0, 0.0)}, r"noise_multiplier must .* got \(1\.0, 0\.0\)"),
        ({"client_noise": 1.0}, "client_noise must .*no rounded Gaussian, got 1.0"),
    ],
)
def test_what_no_grid_covers_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GRID, **wrong)


def test_noise_of_clients_alone_is_no_grid_for_its_own_reason():
    with pytest.raises(ValueError, match=r"no rounded Gaussian, got 1\.0. Let the server"):
        Mechanism(clip=1.0, noise="grid", client_noise=1.0)


def test_a_filter_takes_no_grid():
    with pytest.raises(ValueError, match=r"noise must be 'float' for PrivacyFilter, .* got 'grid'"):
        PrivacyFilter(clip=1.0, noise_multiplier=1.0, noise="grid")


def test_a_grid_too_coarse_for_the_network_is_refused():
    algorithm = on_grid(dp_fedavg(MODEL, clip=1.0, noise_multiplier=1700.0, sampling=Full()))
    with pytest.raises(
        ValueError,
        match=r"noise_multiplier must be at most 1632 .* 1210 coordinates, .* got 1700.0",
    ):
        aggregate(algorithm)
