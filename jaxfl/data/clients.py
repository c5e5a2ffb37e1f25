"""Clients: index lists -> one example store and padded rows; its layout over devices."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from jaxfl._validate import check_arrays, check_counts, check_fraction, checked, count_from_0, show
from jaxfl.data.load import Dataset, check_rows, from_arrays
from jaxfl.types import Clients


def _check_data(name: str, value: Any) -> Dataset:
    """Require a dataset whose arrays fit, also where some were replaced; or those arrays."""
    if isinstance(value, Dataset):
        return from_arrays(*value[:4], classes=value.classes or None, name=value.name)
    if isinstance(value, tuple | list) and len(value) == 4:
        return from_arrays(*value)
    raise TypeError(f"{name}={show(value)}: give a Dataset, or train inputs and labels, test inputs and labels")


@checked(data=_check_data, train_lists=check_arrays, test_lists=check_arrays)
def make_clients(
    data: Dataset | tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    train_lists: Sequence[Sequence[int] | np.ndarray],
    test_lists: Sequence[Sequence[int] | np.ndarray],
) -> Clients:
    """Put all examples into one store, training examples first, and give each client its rows.

    The examples are stored once, in their dtype; a client costs only its padded rows. A client may have
    no examples. Test lists may overlap, training lists may not: an example has one owner.

    Args:
        data: A dataset, or arrays (train inputs, train labels, test inputs, test labels).
        train_lists: Rows of the training examples, one array per client.
        test_lists: Rows of the test examples, one array per client.

    Returns:
        Host arrays: store of D = n + m examples, rows [C, N] and [C, M] padded with 0, sizes [C].

    Raises:
        ValueError: Numbers of lists that differ; lists that are not vectors of whole numbers, go beyond the
            data, or repeat a row; no training examples at all.

    Example:
        >>> from jaxfl.data import iid, load, matching
        >>> digits = load("digits")
        >>> train = iid(digits.train_labels, 100, seed=0)
        >>> test = matching(train, digits.train_labels, digits.test_labels, seed=0)
        >>> clients = make_clients(digits, train, test)
        >>> clients.train.shape, clients.inputs.shape, int(clients.test_size.sum())
        ((100, 15), (1797, 8, 8, 1), 359)
    """
    dataset: Any = data
    if len(train_lists) != len(test_lists) or not len(train_lists):
        raise ValueError(
            f"{len(train_lists)} train_lists and {len(test_lists)} test_lists: give one of each per client"
        )
    offset = len(dataset.train_labels)
    train, train_size = _pad("train_lists", train_lists, offset)
    test, test_size = _pad("test_lists", test_lists, len(dataset.test_labels))
    _check_owners(train, train_size)
    inputs = np.concatenate([dataset.train_inputs, dataset.test_inputs])
    labels = np.concatenate([dataset.train_labels, dataset.test_labels])
    test = np.where(_real(test, test_size), test + np.int32(offset), np.int32(0))
    return Clients(inputs=inputs, labels=labels, train=train, train_size=train_size, test=test, test_size=test_size)


@checked(share=functools.partial(check_fraction, one=False), seed=count_from_0)
def hold_out(clients: Clients, share: float = 0.2, *, seed: int | None = None) -> Clients:
    """Clients whose test examples are a share of their training examples, which they then do not train on.

    For tuning, where their own test examples are to stay out of reach, and for clients that have none. A client keeps
    at least one example to train on, and has at least one to be tested on, unless it has a single one.

    Args:
        clients: C of them.
        share: of each client's training examples, rounded.
        seed: of the choice; None: the last ones of each client, in the order of its rows.

    >>> data = np.zeros((6, 2), np.float32), np.arange(6), np.zeros((0, 2), np.float32), np.zeros(0, int)
    >>> tuning = hold_out(make_clients(data, [[0, 1, 2, 3, 4], [5]], [[], []]), 0.4, seed=0)
    >>> tuning.train_size.tolist(), tuning.test_size.tolist()
    ([3, 1], [2, 0])
    """
    train, size = np.asarray(clients.train), np.asarray(clients.train_size)
    real = _real(train, size)
    shuffled = train
    if seed is not None:
        order = np.argsort(np.where(real, np.random.default_rng(seed).random(train.shape), 2.0), axis=1)
        shuffled = np.take_along_axis(train, order, axis=1)  # real rows come first
    tested = np.minimum(np.maximum(np.rint(share * size).astype(np.int32), 1), np.maximum(size - 1, 0)).astype(np.int32)
    left = (size - tested).astype(np.int32)

    def rows(start: np.ndarray, count: np.ndarray) -> np.ndarray:
        columns = np.arange(max(1, count.max()))
        own = np.take_along_axis(shuffled, np.minimum(start[:, None] + columns, train.shape[1] - 1), axis=1)
        return np.where(columns < count[:, None], own, 0).astype(np.int32)

    train, test = rows(np.zeros_like(left), left), rows(left, tested)
    return clients._replace(train=train, train_size=left, test=test, test_size=tested)


@checked(own=functools.partial(check_counts, least=0))
def shard(clients: Clients, shards: int, own: Sequence[int] | None = None) -> Clients:
    """Lay clients out so that an equal split of each leading axis gives each device its own clients.

    Clients are padded to a multiple of `shards` with empty ones, and block b is the b-th run of
    `C / shards` clients. Block b of the store holds the examples these clients refer to, in their old
    order, padded with zeros to the length of the longest block; rows are local to the block. An example
    is copied once per block that refers to it, and not at all if no client does. With one shard
    the clients are returned unchanged.

    Args:
        clients: Clients over one store, as `make_clients` returns them.
        shards: Number of devices.
        own: Blocks to lay out, in this order (None: all): those of this process's devices. Only their examples are
            read.

    Raises:
        ValueError: `shards` is not a whole number of at least 1.

    Example:
        >>> inputs, labels = np.arange(8.0).reshape(4, 2), np.array([0, 1, 2, 3])
        >>> lists = [np.array([3]), np.array([0, 1])]
        >>> halves = shard(make_clients((inputs, labels, inputs[:0], labels[:0]), lists, [[], []]), 2)
        >>> halves.labels.tolist(), halves.train.tolist()
        ([3, 0, 0, 1], [[0, 0], [0, 1]])
    """
    if shards == 1:
        return clients
    inputs, labels, *fields = map(np.asarray, clients)
    padded = (np.pad(array, [(0, -len(array) % shards)] + [(0, 0)] * (array.ndim - 1)) for array in fields)
    blocks = list(zip(*(np.split(array, shards) for array in padded)))
    kept = [np.unique(np.concatenate([rows[_real(rows, size)] for rows, size in (b[:2], b[2:])])) for b in blocks]
    length = max(1, *map(len, kept))
    own = range(shards) if own is None else own
    store = np.zeros((len(own), length, *inputs.shape[1:]), inputs.dtype)
    names = np.zeros((len(own), length, *labels.shape[1:]), labels.dtype)
    for i, b in enumerate(own):
        store[i, : len(kept[b])], names[i, : len(kept[b])] = inputs[kept[b]], labels[kept[b]]

    def local(b: int, rows: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.where(_real(rows, size), np.searchsorted(kept[b], rows), 0).astype(np.int32), size

    parts = [local(b, *blocks[b][:2]) + local(b, *blocks[b][2:]) for b in own]
    rows_and_sizes = (np.concatenate(arrays) for arrays in zip(*parts))
    return Clients(store.reshape(-1, *inputs.shape[1:]), names.reshape(-1, *labels.shape[1:]), *rows_and_sizes)


@checked()
def describe(clients: Clients) -> dict[str, int | float]:
    """Number of clients, least, median and largest train and test sizes, and bytes of all arrays.

    Example:
        >>> data = np.zeros((3, 2), np.float32), np.array([0, 1, 0]), np.zeros((0, 2), np.float32), np.zeros(0, int)
        >>> describe(make_clients(data, [[0], [1, 2]], [[], []]))["train_median"]
        1.5
    """
    sizes = {"train": np.asarray(clients.train_size), "test": np.asarray(clients.test_size)}
    facts: dict[str, int | float] = {"clients": len(sizes["train"])}
    for split, size in sizes.items():
        facts |= {f"{split}_min": int(size.min()), f"{split}_median": float(np.median(size))}
        facts |= {f"{split}_max": int(size.max())}
    return facts | {"bytes": sum(int(array.nbytes) for array in clients)}


def _real(rows: np.ndarray, size: np.ndarray) -> Bool[np.ndarray, "C N"]:
    return np.arange(rows.shape[1]) < size[:, None]


def _pad(name: str, lists: Sequence[Any], length: int) -> tuple[Int32[np.ndarray, "C N"], Int32[np.ndarray, "C"]]:
    """Check the lists against data of that length and pad them with 0 to a width of at least 1."""
    arrays = check_rows(name, lists, length)
    size = np.array([len(rows) for rows in arrays], np.int32)
    flat = np.concatenate(arrays)
    client = np.repeat(np.arange(len(arrays)), size)
    order = np.lexsort((flat, client))
    twice = np.flatnonzero((np.diff(flat[order]) == 0) & (np.diff(client[order]) == 0))
    if twice.size:
        at = order[twice[0]]
        raise ValueError(f"{name}[{client[at]}] has row {flat[at]} twice: give each row once")
    padded = np.zeros((len(arrays), max(1, size.max())), np.int32)
    padded[_real(padded, size)] = flat
    return padded, size


def _check_owners(train: np.ndarray, size: np.ndarray) -> None:
    client, column = np.nonzero(_real(train, size))
    if not client.size:
        raise ValueError("train_lists are all empty: give at least one client an example")
    rows = train[client, column]
    order = np.argsort(rows, kind="stable")
    twice = np.flatnonzero(np.diff(rows[order]) == 0)
    if twice.size:
        first, second = order[twice[0] : twice[0] + 2]
        owners = f"train_lists[{client[first]}] and [{client[second]}]"
        raise ValueError(f"{owners} both have row {rows[first]}: give disjoint lists")
