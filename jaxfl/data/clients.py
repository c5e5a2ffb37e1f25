"""Clients: one store of examples, the rows of each client in it, and their layout on devices."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float64, Int, Int32

from jaxfl._support.checks import (
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
"""Entropy that is added to a seed for the draw of clients that are left out."""


def check_data(name: str, value: Any) -> Dataset:
    """Require a dataset or its four arrays, and return a `Dataset` without owners and columns.

    Raises:
        ValueError: The arrays do not fit together.
        TypeError: The value is neither a dataset nor four arrays.
    """
    if isinstance(value, Dataset):
        # The arrays are checked again, because `_replace` may have given the dataset others.
        return from_arrays(*value[:4], classes=value.classes or None, name=value.name)
    if isinstance(value, tuple | list) and len(value) == 4:
        return from_arrays(*value)
    raise TypeError(
        f"{name} must be a Dataset or four arrays, got {show(value)}. "
        "Give train inputs and labels, test inputs and labels. "
        "jaxfl.data.from_frame makes a Dataset of a data frame."
    )


@checked(data=check_data, train_lists=check_arrays, test_lists=check_arrays)
def make_clients(
    data: Dataset | tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    train_lists: Sequence[Sequence[int] | np.ndarray],
    test_lists: Sequence[Sequence[int] | np.ndarray] | None = None,
) -> Clients:
    """Put all examples into one store, training examples first, and give each client its rows.

    The store is a copy of the examples, with at most 32 bits a number. Without test examples,
    inputs that need no conversion are not copied: the store has the given array itself, which must
    then stay unchanged, and may be a memory map. A client adds only its row numbers to memory.

    A client may have no examples. Test lists may overlap, but training lists may not, because a
    training example has one owner.

    Args:
        data: A dataset, or arrays (train inputs, train labels, test inputs, test labels).
        train_lists: Rows of the training examples, one array per client.
        test_lists: Rows of the test examples, one array per client. None gives no client test
            examples (see `hold_out`).

    Returns:
        C clients as host arrays: a store of all training and test examples, lists of the clients'
        rows, and sizes [C].

    Raises:
        ValueError: The numbers of lists differ, or no list has a training example. A list is not a
            vector of whole numbers, goes beyond the data, or repeats a row. Two training lists
            share a row. The arrays of `data` do not fit together.
        TypeError: `data` is neither a dataset nor four arrays, or lists are no sequences of arrays.

    Example:
        >>> from jaxfl.data import iid, load, matching
        >>> digits = load("digits")
        >>> train = iid(digits.train_labels, 100, seed=0)
        >>> test = matching(train, digits.train_labels, digits.test_labels, seed=0)
        >>> clients = make_clients(digits, train, test)
        >>> clients.train[0].shape, clients.inputs.shape, int(clients.test_size.sum())
        ((15,), (1797, 8, 8, 1), 359)
    """
    # The decorator has made a `Dataset` of the argument.
    dataset: Any = data
    if test_lists is None:
        test_lists = [np.zeros(0, np.int32)] * len(train_lists)
    if len(train_lists) != len(test_lists) or not len(train_lists):
        raise ValueError(
            "train_lists and test_lists must have a list for each client, got "
            f"{len(train_lists)} train_lists and {len(test_lists)} test_lists. "
            "Give one of each for every client."
        )
    offset = len(dataset.train_labels)
    train, train_size = _joined_lists("train_lists", train_lists, offset)
    test, test_size = _joined_lists("test_lists", test_lists, len(dataset.test_labels))
    _check_owners(train, train_size)
    inputs = _stacked(dataset.train_inputs, dataset.test_inputs)
    labels = _stacked(dataset.train_labels, dataset.test_labels)
    trained = Lists.cut(train, train_size)
    # Test examples follow the training examples in the store.
    tested = Lists.cut(test + np.int32(offset), test_size)
    return Clients(inputs, labels, trained, train_size, tested, test_size)


def _clients_in_lists(name: str, value: Any) -> Clients:
    """Require clients, and return them with their rows as lists."""
    return in_lists(check_instance(name, value, (Clients,)))


def in_lists(clients: Clients) -> Clients:
    """Return the clients with their rows as `Lists`.

    A contiguous matrix of rows on the host is not copied.
    """

    def lists_of(rows: Any) -> Lists:
        if isinstance(rows, Lists):
            return rows
        return Lists.of(rows)

    return clients._replace(train=lists_of(clients.train), test=lists_of(clients.test))


def rows_of(
    lists: Lists, size: Int[np.ndarray, "c"], clients: Any = slice(None)
) -> Int[np.ndarray, "r"]:
    """Return the row numbers of some clients, one client after the other, without padding.

    The result is a view if these row numbers are already consecutive in the lists. A file that is
    mapped into memory then stays on disk.

    Args:
        lists: Lists of row numbers on the host.
        size: Number of rows of each of these clients.
        clients: Index of the clients in an array of all clients. The default takes all of them.
    """
    start = np.asarray(lists.start)[clients]
    # The sizes are of 32 bits, and their sum may exceed this.
    end = np.cumsum(size, dtype=np.int64)
    total = 0
    if len(end):
        total = int(end[-1])
    # The difference between a row number's position in the lists and its position in the result.
    shift = np.repeat(start - (end - size), size)
    flat = np.asarray(lists.flat)
    if not total:
        return flat[:0]
    # Consecutive lists are one slice of `flat`, and a slice copies nothing.
    if (shift == shift[0]).all():
        first = int(shift[0])
        return flat[first : first + total]
    return flat[np.arange(total) + shift]


def packed(lists: Lists, size: Int[np.ndarray, "C"]) -> Lists:
    """Return the lists without their padding.

    Args:
        lists: Lists of row numbers on the host.
        size: Number of rows of each client.
    """
    # A conversion without a copy keeps a mapped file on disk.
    return Lists.cut(rows_of(lists, size).astype(np.int32, copy=False), size)


@checked(
    clients=_clients_in_lists, share=functools.partial(check_fraction, one=False), seed=count_from_0
)
def hold_out(clients: Clients, share: float = 0.2, *, seed: int | None = None) -> Clients:
    """Return clients that are tested on a share of their training examples.

    The clients no longer train on this share, and their own test examples are left out. Use the
    result for tuning, so that test examples stay unseen, or if clients have no test examples. A
    client with two training examples or more holds out at least one of them, and keeps at least
    one. A client with fewer holds out none.

    Args:
        clients: Clients whose training examples are divided.
        share: Share in (0, 1) of each client's training examples to hold out, rounded.
        seed: Seed of the draw. None holds out the last examples of each client, in the order of
            its rows.

    >>> inputs, labels = np.zeros((6, 2), np.float32), np.arange(6)
    >>> data = inputs, labels, inputs[:0], labels[:0]
    >>> clients = make_clients(data, [[0, 1, 2, 3, 4], [5]], [[], []])
    >>> tuning = hold_out(clients, 0.4, seed=0)
    >>> tuning.train_size.tolist(), tuning.test_size.tolist()
    ([3, 1], [2, 0])
    """
    size = np.asarray(clients.train_size, np.int32)
    rows = rows_of(clients.train, size)
    if seed is not None:
        # Each client has its rows in random order, of which it holds out the last ones.
        order = np.lexsort((_draws(seed, size), _client_of_row(size)))
        rows = rows[order]
    wanted = np.maximum(np.rint(share * size).astype(np.int32), 1)
    tested = np.minimum(wanted, np.maximum(size - 1, 0)).astype(np.int32)
    left = (size - tested).astype(np.int32)
    # The first rows of each client stay in training.
    in_training = _position_in_list(size) < np.repeat(left, size)
    train = Lists.cut(rows[in_training], left)
    test = Lists.cut(rows[~in_training], tested)
    return clients._replace(train=train, train_size=left, test=test, test_size=tested)


@checked(
    clients=_clients_in_lists, share=functools.partial(check_fraction, one=False), seed=count_from_0
)
def leave_out(clients: Clients, share: float = 0.1, *, seed: int) -> tuple[Clients, Clients]:
    """Divide clients into participants and a drawn share of clients that are left out.

    The second part gives scores of clients that a run has never seen (see `jaxfl.evaluate`). Both
    parts keep the clients' order and share the store of all examples, which is not copied.

    Args:
        clients: Clients to divide, at least two.
        share: Share in (0, 1) of the clients to leave out, rounded. Each part has at least one
            client.
        seed: Seed of the draw.

    Returns:
        The participants, and the clients that are left out.

    Raises:
        ValueError: There is a single client.

    >>> inputs, labels = np.zeros((5, 2), np.float32), np.arange(5)
    >>> data = inputs, labels, inputs[:0], labels[:0]
    >>> clients = make_clients(data, [[0, 1], [2], [3], [4]], [[], [], [], []])
    >>> participants, unseen = leave_out(clients, 0.25, seed=0)
    >>> participants.num_clients, unseen.num_clients
    (3, 1)
    """
    num_clients = clients.num_clients
    if num_clients < 2:
        raise ValueError(f"clients must be at least 2, got {num_clients}. Give more clients.")
    count = min(max(1, round(share * num_clients)), num_clients - 1)
    # The seed alone may have drawn the partition, and this draw must not depend on that one.
    drawn = np.random.default_rng([seed, _LEFT_OUT]).permutation(num_clients)
    participants = _some(clients, np.sort(drawn[count:]))
    left_out = _some(clients, np.sort(drawn[:count]))
    return participants, left_out


def _some(clients: Clients, chosen_clients: Int[np.ndarray, "c"]) -> Clients:
    """Return the clients of these indices, in this order, with the same store of examples."""
    found: dict[str, Any] = {}
    for split in ("train", "test"):
        size = np.asarray(getattr(clients, f"{split}_size"))[chosen_clients]
        rows = rows_of(getattr(clients, split), size, chosen_clients)
        found[split] = Lists.cut(rows.astype(np.int32, copy=False), size)
        found[f"{split}_size"] = size
    return clients._replace(**found)


def _client_of_row(size: Int[np.ndarray, "C"]) -> Int[np.ndarray, "R"]:
    """Return the client of each row, if the rows of one client follow those of another."""
    return np.repeat(np.arange(len(size)), size)


def _position_in_list(size: Int[np.ndarray, "C"]) -> Int[np.ndarray, "R"]:
    """Return the position of each row in the list of its client, from 0."""
    # The sizes are of 32 bits, and their sum may exceed this.
    start = np.cumsum(size, dtype=np.int64) - size
    return np.arange(size.sum()) - np.repeat(start, size)


def _draws(seed: int, size: Int[np.ndarray, "C"]) -> Float64[np.ndarray, "R"]:
    """Draw a number in [0, 1) for each of R examples, client by client.

    The numbers are those of a matrix [C, max size] of draws, without padding. A client's draws
    therefore depend on the seed, on its index, and on the largest size of all clients.
    """
    generator = np.random.default_rng(seed)
    widest = int(size.max())
    found = []
    for own in size.tolist():
        found.append(generator.random(own))
        # The numbers of padding are skipped, so the time grows with the examples only.
        generator.bit_generator.advance(widest - own)  # pyrefly: ignore[missing-attribute]
    return np.concatenate(found)


@checked(clients=_clients_in_lists, own=functools.partial(check_counts, least=0))
def shard(clients: Clients, shards: int, own: Sequence[int] | None = None) -> Clients:
    """Return clients whose arrays split into equal blocks on the first axis, one for each device.

    Each device then gets its own clients with their examples.

    Empty clients are added up to a multiple of `shards`. Block b is then the b-th run of
    `C / shards` clients. Block b of the store holds the examples of these clients, in their old
    order, with zeros up to the length of the longest block. Lists are padded in the same way, and
    their rows and starts are local to the block.

    An example is copied once for each block whose clients have it, and not at all if no client has
    it. With one shard, the store is not copied, and lists lose their padding.

    Args:
        clients: Clients with one store, for instance from `make_clients`.
        shards: Number of devices.
        own: Indices of the blocks to lay out, in this order, such as the blocks of this process's
            devices. Only examples of these blocks are read. None lays out all blocks, and so does
            any value with one shard.

    Raises:
        ValueError: `shards` is not a whole number of at least 1.

    Example:
        >>> inputs, labels = np.arange(8.0).reshape(4, 2), np.array([0, 1, 2, 3])
        >>> lists = [np.array([3]), np.array([0, 1])]
        >>> clients = make_clients((inputs, labels, inputs[:0], labels[:0]), lists, [[], []])
        >>> halves = shard(clients, 2)
        >>> halves.labels.tolist(), halves.train.flat.tolist(), halves.train.start.tolist()
        ([3, 0, 0, 1], [0, 0, 0, 1], [0, 0])
    """
    if own is not None and max(own, default=0) >= shards:
        raise ValueError(
            f"own must be indices of blocks below {shards}, got {show(own)}. Leave out the others."
        )
    splits = [
        (clients.train, np.asarray(clients.train_size)),
        (clients.test, np.asarray(clients.test_size)),
    ]
    if shards == 1:
        train, test = (packed(lists, size) for lists, size in splits)
        return clients._replace(train=train, test=test)
    # The last blocks may have fewer clients, or none, and get empty ones below.
    per_block = -(-clients.num_clients // shards)
    of_block = [slice(b * per_block, (b + 1) * per_block) for b in range(shards)]
    rows = [[rows_of(lists, size[part], part) for part in of_block] for lists, size in splits]
    # A row that is in several lists of a block is stored there once.
    block_rows = [np.unique(np.concatenate(both)) for both in zip(*rows, strict=True)]
    # A block without examples has one row, because JAX cannot index an empty array.
    length = max(1, *map(len, block_rows))
    if own is None:
        own = range(shards)
    own_rows = [block_rows[b] for b in own]
    inputs = _blocks_of_store(clients.inputs, own_rows, length)
    labels = _blocks_of_store(clients.labels, own_rows, length)
    found: list[Any] = []
    for of_split, (_, size) in zip(rows, splits, strict=True):
        # The empty clients that fill the last blocks have the size 0.
        sizes = np.pad(size, (0, shards * per_block - len(size))).reshape(shards, per_block)
        own_sizes = [sizes[b] for b in own]
        # The longest of all blocks decides, so that all processes have arrays of one shape.
        room = max(map(len, of_split))
        local = [_local_rows(of_split[b], block_rows[b]) for b in own]
        found += [blocks_of_lists(local, own_sizes, room), np.concatenate(own_sizes)]
    return Clients(inputs, labels, *found)


def _local_rows(rows: np.ndarray, block_rows: np.ndarray) -> np.ndarray:
    """Return the numbers of rows within their block, which has the rows `block_rows`."""
    # The rows of a block are sorted and complete, so a row is found at its local number.
    return np.searchsorted(block_rows, rows)


def _blocks_of_store(store: Any, rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Return the rows of each block, with zeros up to `length` rows, one block after the other."""
    array = np.asarray(store)
    # A shorter block keeps zeros at its end.
    blocks = np.zeros((len(rows), length, *array.shape[1:]), array.dtype)
    for block, own in zip(blocks, rows, strict=True):
        block[: len(own)] = array[own]
    return blocks.reshape(-1, *array.shape[1:])


def blocks_of_lists(rows: Sequence[np.ndarray], sizes: Sequence[np.ndarray], length: int) -> Lists:
    """Return lists whose arrays split into blocks of equal lengths, one for each device.

    Args:
        rows: Row numbers in each block.
        sizes: Number of rows of each client, by block. All blocks have equally many clients.
        length: Number of rows for which each block has room.
    """
    flat = np.zeros((len(rows), max(1, length)), np.int32)
    for line, own in zip(flat, rows, strict=True):
        line[: len(own)] = own
    starts = [Lists.cut(own, size).start for own, size in zip(rows, sizes, strict=True)]
    return Lists(flat.reshape(-1), np.concatenate(starts).astype(np.int32))


@checked(clients=_clients_in_lists)
def describe(clients: Clients) -> dict[str, int | float]:
    """Return the number of clients, their least, median and largest sizes, and the arrays' bytes.

    The names are `clients`, `train_min`, `train_median`, `train_max`, the same with `test_`, and
    `bytes`. A size is a number of examples.

    Example:
        >>> inputs, labels = np.zeros((3, 2), np.float32), np.array([0, 1, 0])
        >>> data = inputs, labels, inputs[:0], labels[:0]
        >>> clients = make_clients(data, [[0], [1, 2]], [[], []])
        >>> describe(clients)["train_median"]
        1.5
    """
    sizes = {"train": np.asarray(clients.train_size), "test": np.asarray(clients.test_size)}
    facts: dict[str, int | float] = {"clients": len(sizes["train"])}
    for split, size in sizes.items():
        facts |= {f"{split}_min": int(size.min()), f"{split}_median": float(np.median(size))}
        facts |= {f"{split}_max": int(size.max())}
    return facts | {"bytes": sum(int(array.nbytes) for array in jax.tree.leaves(clients))}


def _stacked(train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Return both arrays joined, or `train` itself if there are no test examples."""
    # The first array may be a file that is larger than memory.
    if not len(test):
        return train
    return np.concatenate([train, test])


def _joined_lists(
    name: str, lists: Sequence[Any], length: int
) -> tuple[Int32[np.ndarray, "R"], Int32[np.ndarray, "C"]]:
    """Return the rows of all lists, one list after the other, and the lists' sizes.

    Raises:
        ValueError: A list is not a vector of rows from 0 to `length` - 1, or has a row twice.
    """
    arrays = check_rows(name, lists, length)
    size = np.array([len(rows) for rows in arrays], np.int32)
    flat = np.concatenate(arrays)
    client = _client_of_row(size)
    # Equal rows of a client are neighbours in this order.
    order = np.lexsort((flat, client))
    same_row = np.diff(flat[order]) == 0
    same_client = np.diff(client[order]) == 0
    twice = np.flatnonzero(same_row & same_client)
    if twice.size:
        at = order[twice[0]]
        raise ValueError(
            f"{name}[{client[at]}] must have each row once, got row {flat[at]} twice. "
            "Leave out the repeated row."
        )
    return flat, size


def _check_owners(rows: np.ndarray, size: np.ndarray) -> None:
    """Require at least one training row, and no row in the lists of two clients.

    Args:
        rows: Training rows of all clients, one client after the other.
        size: Number of rows of each client.
    """
    if not rows.size:
        raise ValueError(
            "train_lists must have at least one row, got empty lists only. "
            "Give at least one client an example."
        )
    client = _client_of_row(size)
    # A stable sort keeps equal rows in the order of their clients, which the error names.
    order = np.argsort(rows, kind="stable")
    twice = np.flatnonzero(np.diff(rows[order]) == 0)
    if twice.size:
        first, second = order[twice[0] : twice[0] + 2]
        raise ValueError(
            f"train_lists must be disjoint, got row {rows[first]} in "
            f"train_lists[{client[first]}] and [{client[second]}]. Leave it out of one of them."
        )
