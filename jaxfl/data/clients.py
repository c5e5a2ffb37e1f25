"""Clients: index lists -> one example store and the clients' rows; its layout over devices."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float64, Int, Int32

from jaxfl._validate import (
    check_arrays,
    check_counts,
    check_fraction,
    check_instance,
    checked,
    count_from_0,
    show,
)
from jaxfl.data.load import Dataset, check_rows, from_arrays
from jaxfl.types import Clients, Lists

_LEFT_OUT = 2**31 + 17
"""Entropy, added to a seed, of the choice of clients who take no part."""


def _check_data(name: str, value: Any) -> Dataset:
    """Require a dataset whose arrays fit, also where some were replaced; or those arrays."""
    if isinstance(value, Dataset):
        return from_arrays(*value[:4], classes=value.classes or None, name=value.name)
    if isinstance(value, tuple | list) and len(value) == 4:
        return from_arrays(*value)
    raise TypeError(
        f"{name}={show(value)}: give a Dataset, or train inputs and labels, test inputs and labels"
    )


@checked(data=_check_data, train_lists=check_arrays, test_lists=check_arrays)
def make_clients(
    data: Dataset | tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    train_lists: Sequence[Sequence[int] | np.ndarray],
    test_lists: Sequence[Sequence[int] | np.ndarray],
) -> Clients:
    """Put all examples into one store, training examples first, and give each client its rows.

    The examples are stored once, in their dtype, as a copy. Without test examples the store is the given array itself,
    which must then stay as it is, and may be a memory map. A client adds only its row numbers to memory. A client may
    have no examples. Test lists may overlap, training lists may not: an example has one owner.

    Args:
        data: A dataset, or arrays (train inputs, train labels, test inputs, test labels).
        train_lists: Rows of the training examples, one array per client.
        test_lists: Rows of the test examples, one array per client.

    Returns:
        Host arrays: a store of all training and test examples, lists of the clients' rows, sizes [C].

    Raises:
        ValueError: Numbers of lists that differ; lists that are not vectors of whole numbers, go beyond the
            data, or repeat a row; no training examples at all.

    Example:
        >>> from jaxfl.data import iid, load, matching
        >>> digits = load("digits")
        >>> train = iid(digits.train_labels, 100, seed=0)
        >>> test = matching(train, digits.train_labels, digits.test_labels, seed=0)
        >>> clients = make_clients(digits, train, test)
        >>> clients.train[0].shape, clients.inputs.shape, int(clients.test_size.sum())
        ((15,), (1797, 8, 8, 1), 359)
    """
    dataset: Any = data
    if len(train_lists) != len(test_lists) or not len(train_lists):
        raise ValueError(
            f"{len(train_lists)} train_lists and {len(test_lists)} test_lists: give one of each per client"
        )
    offset = len(dataset.train_labels)
    train, train_size = _joined("train_lists", train_lists, offset)
    test, test_size = _joined("test_lists", test_lists, len(dataset.test_labels))
    _check_owners(train, train_size)
    inputs = _stacked(dataset.train_inputs, dataset.test_inputs)
    labels = _stacked(dataset.train_labels, dataset.test_labels)
    trained = Lists.cut(train, train_size)
    tested = Lists.cut(test + np.int32(offset), test_size)
    return Clients(inputs, labels, trained, train_size, tested, test_size)


def _check_lists(name: str, value: Any) -> Clients:
    """Require clients, and return them with lists in place of matrices of rows."""
    return in_lists(check_instance(name, value, (Clients,)))


def in_lists(clients: Clients) -> Clients:
    """Return the clients with lists in place of matrices of rows, without a copy."""
    train, test = (
        rows if isinstance(rows, Lists) else Lists.of(rows)
        for rows in (clients.train, clients.test)
    )
    return clients._replace(train=train, test=test)


def rows_of(
    lists: Lists, size: Int[np.ndarray, "c"], clients: Any = slice(None)
) -> Int[np.ndarray, "r"]:
    """Return the row numbers of some clients (by default all), one client after the other, without padding.

    They are a view where they are already like this, which matters for a file that is mapped into memory.

    Args:
        lists: On the host.
        size: How many row numbers each of these clients has.
        clients: Which clients, as an index of an array.
    """
    start = np.asarray(lists.start)[clients]
    end = np.cumsum(size, dtype=np.int64)
    total = int(end[-1]) if len(end) else 0
    moved = np.repeat(start - (end - size), size)
    if not total or (moved == moved[0]).all():
        first = int(moved[0]) if total else 0
        return np.asarray(lists.flat)[first : first + total]
    return np.asarray(lists.flat)[np.arange(total) + moved]


def packed(lists: Lists, size: Int[np.ndarray, "C"]) -> Lists:
    """Return the lists without padding."""
    return Lists.cut(rows_of(lists, size).astype(np.int32, copy=False), size)


@checked(
    clients=_check_lists, share=functools.partial(check_fraction, one=False), seed=count_from_0
)
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
    size = np.asarray(clients.train_size, np.int32)
    rows = rows_of(clients.train, size)
    if seed is not None:
        rows = rows[np.lexsort((_draws(seed, size), np.repeat(np.arange(len(size)), size)))]
    tested = np.minimum(
        np.maximum(np.rint(share * size).astype(np.int32), 1), np.maximum(size - 1, 0)
    ).astype(np.int32)
    left = (size - tested).astype(np.int32)
    position = np.arange(len(rows)) - np.repeat(np.cumsum(size, dtype=np.int64) - size, size)
    kept = position < np.repeat(left, size)
    train, test = Lists.cut(rows[kept], left), Lists.cut(rows[~kept], tested)
    return clients._replace(train=train, train_size=left, test=test, test_size=tested)


@checked(
    clients=_check_lists, share=functools.partial(check_fraction, one=False), seed=count_from_0
)
def leave_out(clients: Clients, share: float = 0.1, *, seed: int) -> tuple[Clients, Clients]:
    """Divide clients into those who take part, and a drawn share of them who join after training.

    The second part serves for scores of clients whom a run has never seen (see `jaxfl.evaluate`). Both parts keep the
    clients' order and the store of all examples, which is not copied.

    Args:
        clients: C of them.
        share: of the clients, rounded; at least one client is in each part.
        seed: of the choice.

    Raises:
        ValueError: there is a single client.

    >>> inputs, labels = np.zeros((5, 2), np.float32), np.arange(5)
    >>> data = inputs, labels, inputs[:0], labels[:0]
    >>> clients = make_clients(data, [[0, 1], [2], [3], [4]], [[], [], [], []])
    >>> participants, unseen = leave_out(clients, 0.25, seed=0)
    >>> participants.number, unseen.number
    (3, 1)
    """
    number = clients.number
    if number < 2:
        raise ValueError(f"clients must be two at least, got {number}. Give more clients.")
    count = min(max(1, round(share * number)), number - 1)
    # `default_rng(seed)` may have drawn the partition, of which the choice must not depend.
    drawn = np.random.default_rng([seed, _LEFT_OUT]).permutation(number)
    participants = _some(clients, np.sort(drawn[count:]))
    left_out = _some(clients, np.sort(drawn[:count]))
    return participants, left_out


def _some(clients: Clients, kept: Int[np.ndarray, "c"]) -> Clients:
    """Return some of the clients, over the same store."""
    found: dict[str, Any] = {}
    for split in ("train", "test"):
        size = np.asarray(getattr(clients, f"{split}_size"))[kept]
        rows = rows_of(getattr(clients, split), size, kept)
        found[split] = Lists.cut(rows.astype(np.int32, copy=False), size)
        found[f"{split}_size"] = size
    return clients._replace(**found)


def _draws(seed: int, size: Int[np.ndarray, "C"]) -> Float64[np.ndarray, "R"]:
    """Draw a number for each example: those that a matrix [C, max N] of numbers would have at their places."""
    generator = np.random.default_rng(seed)
    widest = int(size.max())
    found = []
    for own in size.tolist():
        found.append(generator.random(own))
        # The numbers of the padding are skipped, not drawn, so that the time follows the examples.
        generator.bit_generator.advance(widest - own)  # pyrefly: ignore[missing-attribute]
    return np.concatenate(found)


@checked(clients=_check_lists, own=functools.partial(check_counts, least=0))
def shard(clients: Clients, shards: int, own: Sequence[int] | None = None) -> Clients:
    """Lay clients out so that an equal split of each leading axis gives each device its own clients.

    Clients are padded to a multiple of `shards` with empty ones, and block b is the b-th run of
    `C / shards` clients. Block b of the store holds the examples these clients refer to, in their old
    order, padded with zeros to the length of the longest block. Lists are padded likewise, and their rows and
    starts are local to the block. An example is copied once per block that refers to it, and not at all if no client
    does. With one shard, the store is not copied, and lists lose their padding.

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
        >>> halves.labels.tolist(), halves.train.flat.tolist(), halves.train.start.tolist()
        ([3, 0, 0, 1], [0, 0, 0, 1], [0, 0])
    """
    splits = [
        (clients.train, np.asarray(clients.train_size)),
        (clients.test, np.asarray(clients.test_size)),
    ]
    if shards == 1:
        train, test = (packed(lists, size) for lists, size in splits)
        return clients._replace(train=train, test=test)
    inputs, labels = np.asarray(clients.inputs), np.asarray(clients.labels)
    per_block = -(-clients.number // shards)
    of_block = [slice(b * per_block, (b + 1) * per_block) for b in range(shards)]
    rows = [[rows_of(lists, size[part], part) for part in of_block] for lists, size in splits]
    kept = [np.unique(np.concatenate(both)) for both in zip(*rows, strict=True)]
    length = max(1, *map(len, kept))
    own = range(shards) if own is None else own
    store = np.zeros((len(own), length, *inputs.shape[1:]), inputs.dtype)
    names = np.zeros((len(own), length, *labels.shape[1:]), labels.dtype)
    for i, b in enumerate(own):
        store[i, : len(kept[b])] = inputs[kept[b]]
        names[i, : len(kept[b])] = labels[kept[b]]

    def laid_out(rows: list[np.ndarray], size: np.ndarray) -> tuple[Lists, np.ndarray]:
        sizes = [np.pad(size[of_block[b]], (0, per_block - len(size[of_block[b]]))) for b in own]
        local = [np.searchsorted(kept[b], rows[b]) for b in own]
        return blocks_of_lists(local, sizes, max(map(len, rows))), np.concatenate(sizes)

    trained, tested = (
        laid_out(own_rows, size) for own_rows, (_, size) in zip(rows, splits, strict=True)
    )
    all_inputs = store.reshape(-1, *inputs.shape[1:])
    all_labels = names.reshape(-1, *labels.shape[1:])
    return Clients(all_inputs, all_labels, *trained, *tested)


def blocks_of_lists(rows: Sequence[np.ndarray], sizes: Sequence[np.ndarray], length: int) -> Lists:
    """Return lists whose arrays split into blocks of equal lengths, one for each device.

    Args:
        rows: The row numbers in each block.
        sizes: The clients' numbers of rows in each block, equally many clients in all.
        length: How many rows a block has room for.
    """
    flat = np.zeros((len(rows), max(1, length)), np.int32)
    for line, own in zip(flat, rows, strict=True):
        line[: len(own)] = own
    starts = [Lists.cut(own, size).start for own, size in zip(rows, sizes, strict=True)]
    return Lists(flat.reshape(-1), np.concatenate(starts).astype(np.int32))


@checked(clients=_check_lists)
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
    return facts | {"bytes": sum(int(array.nbytes) for array in jax.tree.leaves(clients))}


def _stacked(train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Return both arrays in one; without test examples the first itself, which may be a file larger than memory."""
    return np.concatenate([train, test]) if len(test) else train


def _joined(
    name: str, lists: Sequence[Any], length: int
) -> tuple[Int32[np.ndarray, "R"], Int32[np.ndarray, "C"]]:
    """Check the lists against data of that length, and return their rows one after the other, and their sizes."""
    arrays = check_rows(name, lists, length)
    size = np.array([len(rows) for rows in arrays], np.int32)
    flat = np.concatenate(arrays)
    client = np.repeat(np.arange(len(arrays)), size)
    order = np.lexsort((flat, client))
    twice = np.flatnonzero((np.diff(flat[order]) == 0) & (np.diff(client[order]) == 0))
    if twice.size:
        at = order[twice[0]]
        raise ValueError(f"{name}[{client[at]}] has row {flat[at]} twice: give each row once")
    return flat, size


def _check_owners(rows: np.ndarray, size: np.ndarray) -> None:
    if not rows.size:
        raise ValueError("train_lists are all empty: give at least one client an example")
    client = np.repeat(np.arange(len(size)), size)
    order = np.argsort(rows, kind="stable")
    twice = np.flatnonzero(np.diff(rows[order]) == 0)
    if twice.size:
        first, second = order[twice[0] : twice[0] + 2]
        owners = f"train_lists[{client[first]}] and [{client[second]}]"
        raise ValueError(f"{owners} both have row {rows[first]}: give disjoint lists")
