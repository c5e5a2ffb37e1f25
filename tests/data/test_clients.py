import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfl.data import classes_per_client, describe, dirichlet, iid, load, make_clients, matching, shard
from jaxfl.types import Clients, Rows

EMPTY = np.zeros(0, np.int32)


def arrays(train=12, test=6):
    """Examples that all differ: input i is i in every place, test examples go on counting."""
    inputs = np.arange(train + test, dtype=np.uint8)[:, None, None, None] * np.ones((2, 2, 1), np.uint8)
    labels = np.arange(train + test) % 3
    return inputs[:train], labels[:train], inputs[train:], labels[train:]


def examples(clients: Clients, block=0, blocks=1):
    """What each client of a block reads, through the block's own part of every array."""
    inputs, labels, train, train_size, test, test_size = (np.split(np.asarray(a), blocks)[block] for a in clients)
    return [
        [(inputs[row].tolist(), labels[row].tolist()) for row in rows[:size]]
        for lists, sizes in ((train, train_size), (test, test_size))
        for rows, size in zip(lists, sizes, strict=True)
    ]


def test_every_client_reads_its_own_examples():
    data = arrays()
    train, test = [np.array([3, 0]), EMPTY, np.array([11])], [np.array([5]), np.array([0, 5, 2]), EMPTY]
    clients = make_clients(data, train, test)
    assert clients.inputs.dtype == np.uint8
    assert clients.train.shape == (3, 2)
    assert clients.test.shape == (3, 3)
    assert {a.dtype for a in clients[1:]} == {np.dtype(np.int32)}
    assert clients.train_size.tolist() == [2, 0, 1]
    assert clients.test_size.tolist() == [1, 3, 0]
    assert clients.train[2, 1] == 0
    assert clients.test[0, 1:].tolist() == [0, 0]
    for i in range(3):
        own = clients.train[i, : len(train[i])]
        assert np.array_equal(clients.inputs[own], data[0][train[i]])
        assert np.array_equal(clients.labels[own], data[1][train[i]])
        own = clients.test[i, : len(test[i])]
        assert np.array_equal(clients.inputs[own], data[2][test[i]])
        assert np.array_equal(clients.labels[own], data[3][test[i]])


def test_a_dataset_serves_as_well_as_arrays():
    digits = load("digits")
    train = iid(digits.train_labels, 10, seed=0)
    test = matching(train, digits.train_labels, digits.test_labels, seed=0)
    one, two = make_clients(digits, train, test), make_clients(digits[:4], train, test)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([[0]], [[0], [1]], "1 train_lists and 2 test_lists"),
        ([], [], "0 train_lists"),
        ([[0], [12]], [[], []], r"train_lists\[1\] has row 12: give rows from 0 to 11"),
        ([[0], [1]], [[], [-1]], r"test_lists\[1\] has row -1"),
        ([[0], [1]], [[6], []], r"test_lists\[0\] has row 6"),
        ([[0, 2], [1, 2]], [[], []], r"train_lists\[0\] and \[1\] both have row 2"),
        ([[0], [2, 1, 2]], [[], []], r"train_lists\[1\] has row 2 twice"),
        ([[0], [1]], [[3, 3], []], r"test_lists\[0\] has row 3 twice"),
        ([[], []], [[0], []], "train_lists are all empty"),
        ([[0.5]], [[]], r"train_lists\[0\] is float64"),
        ([np.zeros((2, 1), int)], [[]], r"train_lists\[0\] is int64 of shape \(2, 1\)"),
    ],
)
def test_wrong_lists_are_named(train, test, message):
    with pytest.raises(ValueError, match=message):
        make_clients(arrays(), [np.asarray(rows) for rows in train], [np.asarray(rows) for rows in test])


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_thousands_of_clients_cost_little_more_than_the_images(alpha):
    shape = (32, 32, 3)
    labels, test_labels = np.arange(50_000, dtype=np.int32) % 10, np.arange(10_000, dtype=np.int32) % 10
    data = np.zeros((50_000, *shape), np.uint8), labels, np.zeros((10_000, *shape), np.uint8), test_labels
    train = iid(labels, 5000, seed=0) if alpha is None else dirichlet(labels, 5000, alpha, seed=0)
    clients = make_clients(data, train, matching(train, labels, test_labels, seed=0))
    assert describe(clients)["bytes"] < 1.3 * sum(array.nbytes for array in data)
    halves = shard(clients, 2)
    assert describe(halves)["bytes"] < 1.3 * sum(array.nbytes for array in data)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(2, 5), st.booleans(), st.integers(0, 2**31))
def test_blocks_are_complete_and_hold_nothing_else(count, shards, overlap, seed):
    rng = np.random.default_rng(seed)
    data = arrays(40, 20)
    train = np.split(rng.permutation(40)[:30].astype(np.int32), np.sort(rng.integers(0, 31, count - 1)))
    test = [rng.permutation(20)[: rng.integers(0, 8)] for _ in range(count)]
    if not overlap:
        test = np.split(rng.permutation(20), np.sort(rng.integers(0, 21, count - 1)))
    clients = make_clients(data, train, test)
    parts = shard(clients, shards)
    assert all(len(array) % shards == 0 for array in parts)
    assert parts.number == -(-count // shards) * shards
    assert (np.asarray(parts.train_size)[count:] == 0).all()
    assert (np.asarray(parts.test_size)[count:] == 0).all()
    for rows, sizes in ((parts.train, parts.train_size), (parts.test, parts.test_size)):
        beyond = np.arange(rows.shape[1]) >= np.asarray(sizes)[:, None]
        assert (np.asarray(rows)[beyond] == 0).all()
    whole, per_block = examples(clients), parts.number // shards
    read = [examples(parts, block, shards) for block in range(shards)]
    assert [client for one in read for client in one[:per_block]][:count] == whole[:count]
    assert [client for one in read for client in one[per_block:]][:count] == whole[count:]
    referred = [sorted({repr(example): example for client in one for example in client}.values()) for one in read]
    length = max(1, *map(len, referred))
    padding = (np.zeros((2, 2, 1)).tolist(), 0)
    inputs, labels = (np.split(np.asarray(array), shards) for array in parts[:2])
    for own, names, expected in zip(inputs, labels, referred, strict=True):
        assert list(zip(own.tolist(), names.tolist(), strict=True)) == expected + [padding] * (length - len(expected))


def test_blocks_share_a_test_example_by_copies():
    labels = np.arange(12) % 3
    train, test = classes_per_client(labels, labels[:6], 4, 3, seed=0, test="all")
    parts = shard(make_clients(arrays(12, 6), train, test), 4)
    # Each block: 3 training examples of its one client, and all 6 test examples.
    assert len(parts.inputs) == 4 * 9


def test_one_shard_changes_nothing():
    clients = make_clients(arrays(), [np.array([1, 2])], [np.array([0])])
    assert all(one is two for one, two in zip(clients, shard(clients, 1), strict=True))
    with pytest.raises(ValueError, match="shards=0"):
        shard(clients, 0)


def test_an_even_split_gives_each_device_its_own_clients():
    train = [np.array([0, 1]), np.array([2]), np.array([7, 8, 9])]
    clients = make_clients(arrays(), train, [np.array([i]) for i in range(3)])
    devices = jax.devices()[:2]
    if len(devices) < 2:
        pytest.skip("needs two devices")
    mesh = Mesh(np.array(devices), ("clients",))
    placed = jax.device_put(shard(clients, 2), NamedSharding(mesh, PartitionSpec("clients")))
    whole = examples(clients)
    for device, own in enumerate((whole[0:2] + whole[3:5], [*whole[2:3], [], *whole[5:6], []])):
        local = Clients(*(array.addressable_shards[device].data for array in placed))
        assert examples(local) == own


def test_describe():
    clients = make_clients(arrays(), [np.array([0, 1, 2]), EMPTY, np.array([3])], [EMPTY, EMPTY, np.array([1])])
    store, rows = 18 * 4 + 18 * 4, 3 * 4 * (3 + 1 + 1 + 1)
    assert describe(clients) == {
        "clients": 3,
        "train_min": 0,
        "train_median": 1.0,
        "train_max": 3,
        "test_min": 0,
        "test_median": 0.0,
        "test_max": 1,
        "bytes": store + rows,
    }


@pytest.mark.parametrize("shape", [(), (3,), (2, 4, 3)])
def test_rows_are_indexed_like_the_array(shape):
    store = np.arange(5 * math.prod(shape)).reshape(5, *shape)
    for index in (jnp.int32(2), jnp.array([[4, 0], [1, 1]])):
        np.testing.assert_array_equal(Rows.of(store)[index], store[index])
    assert Rows.of(store).flat.shape == (5, math.prod(shape))
