import math
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfl.data import (
    classes_per_client,
    describe,
    dirichlet,
    iid,
    load,
    make_clients,
    matching,
    shard,
)
from jaxfl.run.check import check_clients
from jaxfl.types import Clients, Rows

EMPTY = np.zeros(0, np.int32)


def arrays(train=12, test=6):
    """Return four arrays whose input i is i in every pixel. Test examples continue the count."""
    inputs = np.arange(train + test, dtype=np.uint8)[:, None, None, None] * np.ones(
        (2, 2, 1), np.uint8
    )
    labels = np.arange(train + test) % 3
    return inputs[:train], labels[:train], inputs[train:], labels[train:]


def examples(clients: Clients, block=0, blocks=1):
    """Return the (input, label) pairs that each client of a block reads from the block's arrays."""
    own = jax.tree.map(lambda array: np.split(np.asarray(array), blocks)[block], clients)
    return [
        [(own.inputs[row].tolist(), own.labels[row].tolist()) for row in rows[:size]]
        for lists, sizes in ((own.train, own.train_size), (own.test, own.test_size))
        for rows, size in zip(lists, sizes, strict=True)
    ]


def test_every_client_reads_its_own_examples():
    data = arrays()
    train, test = (
        [np.array([3, 0]), EMPTY, np.array([11])],
        [np.array([5]), np.array([0, 5, 2]), EMPTY],
    )
    clients = make_clients(data, train, test)
    assert clients.inputs.dtype == np.uint8
    assert {a.dtype for a in jax.tree.leaves(clients[1:])} == {np.dtype(np.int32)}
    assert clients.train_size.tolist() == [2, 0, 1]
    assert clients.test_size.tolist() == [1, 3, 0]
    for i in range(3):
        own = clients.train[i]
        assert len(own) == len(train[i])
        assert np.array_equal(clients.inputs[own], data[0][train[i]])
        assert np.array_equal(clients.labels[own], data[1][train[i]])
        own = clients.test[i]
        assert len(own) == len(test[i])
        assert np.array_equal(clients.inputs[own], data[2][test[i]])
        assert np.array_equal(clients.labels[own], data[3][test[i]])


def test_a_dataset_serves_as_well_as_arrays():
    digits = load("digits")
    train = iid(digits.train_labels, 10, seed=0)
    test = matching(train, digits.train_labels, digits.test_labels, seed=0)
    one, two = make_clients(digits, train, test), make_clients(digits[:4], train, test)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, one, two)))


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([[0]], [[0], [1]], "1 train_lists and 2 test_lists"),
        ([], [], "0 train_lists"),
        ([[0], [12]], [[], []], r"train_lists\[1\] must have rows from 0 to 11, got row 12"),
        ([[0], [1]], [[], [-1]], r"test_lists\[1\] must .* got row -1"),
        ([[0], [1]], [[6], []], r"test_lists\[0\] must .* got row 6"),
        ([[0, 2], [1, 2]], [[], []], r"got row 2 in train_lists\[0\] and \[1\]"),
        ([[0], [2, 1, 2]], [[], []], r"train_lists\[1\] must have each row once, got row 2 twice"),
        ([[0], [1]], [[3, 3], []], r"test_lists\[0\] must .* got row 3 twice"),
        ([[], []], [[0], []], "train_lists must have at least one row"),
        ([[0.5]], [[]], r"train_lists\[0\] must .* got float64"),
        ([np.zeros((2, 1), int)], [[]], r"train_lists\[0\] must .* got int64 of shape \(2, 1\)"),
    ],
)
def test_wrong_lists_are_named(train, test, message):
    with pytest.raises(ValueError, match=message):
        make_clients(
            arrays(), [np.asarray(rows) for rows in train], [np.asarray(rows) for rows in test]
        )


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_thousands_of_clients_cost_little_more_than_the_images(alpha):
    shape = (32, 32, 3)
    labels, test_labels = (
        np.arange(50_000, dtype=np.int32) % 10,
        np.arange(10_000, dtype=np.int32) % 10,
    )
    data = (
        np.zeros((50_000, *shape), np.uint8),
        labels,
        np.zeros((10_000, *shape), np.uint8),
        test_labels,
    )
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
    train = np.split(
        rng.permutation(40)[:30].astype(np.int32), np.sort(rng.integers(0, 31, count - 1))
    )
    test = [rng.permutation(20)[: rng.integers(0, 8)] for _ in range(count)]
    if not overlap:
        test = np.split(rng.permutation(20), np.sort(rng.integers(0, 21, count - 1)))
    clients = make_clients(data, train, test)
    parts = shard(clients, shards)
    assert all(len(array) % shards == 0 for array in jax.tree.leaves(parts))
    assert parts.num_clients == -(-count // shards) * shards
    assert (np.asarray(parts.train_size)[count:] == 0).all()
    assert (np.asarray(parts.test_size)[count:] == 0).all()
    whole, per_block = examples(clients), parts.num_clients // shards
    read = [examples(parts, block, shards) for block in range(shards)]
    assert [client for one in read for client in one[:per_block]][:count] == whole[:count]
    assert [client for one in read for client in one[per_block:]][:count] == whole[count:]
    referred = [
        sorted({repr(example): example for client in one for example in client}.values())
        for one in read
    ]
    length = max(1, *map(len, referred))
    padding = (np.zeros((2, 2, 1)).tolist(), 0)
    inputs, labels = (np.split(np.asarray(array), shards) for array in parts[:2])
    for own, names, expected in zip(inputs, labels, referred, strict=True):
        assert list(zip(own.tolist(), names.tolist(), strict=True)) == expected + [padding] * (
            length - len(expected)
        )


def test_blocks_share_a_test_example_by_copies():
    labels = np.arange(12) % 3
    train, test = classes_per_client(labels, labels[:6], 4, 3, seed=0, test="all")
    parts = shard(make_clients(arrays(12, 6), train, test), 4)
    # Each block: 3 training examples of its one client, and all 6 test examples.
    assert len(parts.inputs) == 4 * 9


def test_a_block_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"own must be indices of blocks below 2, got \(0, 2\)"):
        shard(make_clients(arrays(), [[0], [1]], [[], []]), 2, own=[0, 2])


def test_one_shard_changes_nothing():
    clients = make_clients(arrays(), [np.array([1, 2])], [np.array([0])])
    one = shard(clients, 1)
    assert jax.tree.all(jax.tree.map(np.array_equal, clients, one))
    assert np.shares_memory(one.inputs, clients.inputs)
    with pytest.raises(ValueError, match=r"shards must be .* got 0"):
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
        local = jax.tree.map(lambda array, own=device: array.addressable_shards[own].data, placed)
        assert examples(local) == own


def test_describe():
    clients = make_clients(
        arrays(), [np.array([0, 1, 2]), EMPTY, np.array([3])], [EMPTY, EMPTY, np.array([1])]
    )
    # For each client, two sizes and two starts.
    store, rows = 18 * 4 + 18 * 4, 4 * (4 + 1 + 3 * (2 + 2))
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


def peak_of(call):
    """Return the peak of bytes that a call allocates in NumPy and Python, and its result."""
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8])
def test_examples_of_a_memory_map_are_copied_once_at_most(tmp_path, dtype):
    store = np.lib.format.open_memmap(tmp_path / "inputs.npy", "w+", dtype, (20_000, 32, 16))
    store[:] = np.arange(16)
    inputs, labels = np.load(tmp_path / "inputs.npy", mmap_mode="r"), np.zeros(20_000, np.int32)
    rows = [*np.arange(20_000).reshape(10, -1)]
    bytes_read, clients = peak_of(
        lambda: make_clients((inputs, labels, inputs[:0], labels[:0]), rows, [[]] * 10)
    )
    assert bytes_read < 0.3 * inputs.nbytes + 2**21  # rows and labels, and parts that are checked
    assert np.shares_memory(clients.inputs, inputs)
    tests = inputs[:5_000], labels[:5_000]
    own = [*np.arange(5_000).reshape(10, -1)]
    bytes_read, clients = peak_of(lambda: make_clients((inputs, labels, *tests), rows, own))
    assert bytes_read < 1.3 * clients.inputs.nbytes + 2**21
    assert np.array_equal(clients.inputs[20_000:], tests[0])


def test_examples_that_are_not_finite_are_counted_in_every_part():
    inputs = np.zeros((10_000, 2), np.float32)
    inputs[[5_000, 9_999], 1] = np.nan
    data = inputs, np.zeros(10_000, int), inputs[:0], np.zeros(0, int)
    with pytest.raises(ValueError, match="NaN or infinite values in 2 rows, first in row 5000"):
        make_clients(data, [[0]], [[]])


@pytest.mark.parametrize("field", range(4))
def test_masked_arrays_are_refused_wherever_examples_come_in(field):
    data: Any = [*arrays()]
    data[field] = np.ma.masked_equal(data[field], 1)
    with pytest.raises(TypeError, match=r"must be a plain array, got a masked array.*filled"):
        make_clients(tuple(data), [[0]], [[0]])


def test_a_partition_by_name_is_an_error_that_makes_a_list_of_it():
    lists: Any = {"0": [0], "1": [1, 2]}
    with pytest.raises(TypeError, match=r"got \{.*Give list\(train_lists.values\(\)\)"):
        make_clients(arrays(), lists)
    assert make_clients(arrays(), [*lists.values()]).train_size.tolist() == [1, 2]


def test_masked_rows_of_clients_are_refused():
    rows = np.ma.masked_equal(np.array([[0, 1], [2, 3]]), 3)
    both: Any = (rows, [*rows])
    for given_rows in both:
        with pytest.raises(
            TypeError, match=r"train_lists\[0\] must be a plain array, got a masked array"
        ):
            make_clients(arrays(), given_rows, [[], []])
    with pytest.raises(TypeError, match="labels must be a plain array"):
        iid(np.ma.masked_equal(np.array([0, 1, 0, 1]), 1), 2, seed=0)
    with pytest.raises(TypeError, match=r"inputs must be a plain array"):
        check_clients(
            "clients",
            make_clients(arrays(), [[0]], [[0]])._replace(inputs=np.ma.masked_less(arrays()[0], 3)),
        )


def test_names_of_numpys_text_type_are_no_numbers():
    names = np.array(["anna", "ben"], np.dtypes.StringDType())
    with pytest.raises(TypeError, match=r"labels must be an array of numbers.*Number the names"):
        iid(names, 2, seed=0)
