"""Natural clients: examples that have owners, such as writers or the roles of plays."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from jaxfl._support.checks import checked, not_empty
from jaxfl.data.load import check_owners
from jaxfl.data.partition import Partition, lists_of


@checked(owner=not_empty(check_owners), test_owner=check_owners)
def by_owner(
    owner: Shaped[np.ndarray, "n"] | Sequence[str] | Sequence[int],
    test_owner: Shaped[np.ndarray, "m"] | Sequence[str] | Sequence[int] | None = None,
    *,
    least: int = 1,
) -> tuple[Partition, Partition]:
    """Make a client of every owner with at least `least` training examples, in the owners' order.

    Names are in alphabetical order, and numbers in ascending order.

    Args:
        owner: Owner `[n]` of each training example: names, or whole numbers.
        test_owner: Owner `[m]` of each test example, of the same kind. None gives no client test
            examples (see `jaxfl.data.hold_out`).
        least: Least number of training examples of a client. Owners with fewer are left out.

    Returns:
        Training rows and test rows of each client, in ascending order. A client may have no test
        examples. The owner of the client with training rows `rows` is `owner[rows[0]]`.

    Raises:
        ValueError: No owner has `least` training examples, or owners of training examples are names
            and those of test examples numbers, or the reverse. Owners are not a vector.
        TypeError: An owner is missing, or the owners of one argument are neither all names nor all
            whole numbers.

    Example:
        >>> train, test = by_owner([7, 2, 7, 7, 4], [2, 7, 2], least=1)
        >>> [rows.tolist() for rows in train], [rows.tolist() for rows in test]
        ([[1], [4], [0, 2, 3]], [[0, 2], [], [1]])
        >>> train, _ = by_owner(["Bern", "Aarau", "Bern"])
        >>> [rows.tolist() for rows in train]
        [[1], [0, 2]]
    """
    train: Any = owner
    test: Any = test_owner
    # An empty list has no kind of its own, so it gets the kind of the training owners.
    if test is None or not len(test):
        test = train[:0]
    if (train.dtype.kind == "U") != (test.dtype.kind == "U"):
        raise ValueError(
            f"test_owner must be owners like {train[:1]} of owner, got {test[:1]}. "
            "Give names in both, or numbers in both."
        )
    names, sizes = np.unique(train, return_counts=True)
    large_enough = names[sizes >= least]
    if not len(large_enough):
        raise ValueError(
            f"least must be at most {sizes.max(initial=0)}, the number of examples of the largest "
            f"of {len(names)} owners, got {least}. Give a smaller least."
        )

    def rows_of(owner: np.ndarray) -> Partition:
        """Return the rows of each client. Examples of owners who are no clients are left out."""
        client = np.searchsorted(large_enough, owner)
        # An owner who is no client gets the place of another one, or a place behind all of them.
        known = large_enough[np.minimum(client, len(large_enough) - 1)] == owner
        return lists_of(np.where(known, client, -1), len(large_enough))

    return rows_of(train), rows_of(test)


def places(own: Int[np.ndarray, "n"], order: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """Return the place of each row, from 0, among the rows of its owner in `order`.

    Args:
        own: Number of each row's owner, from 0.
        order: All row numbers in ascending order of owners, so that an owner's rows are together.
    """
    size = np.bincount(own)
    found = np.empty(len(own), np.int64)
    # The position in `order` counts from the first row of the same owner.
    first = np.cumsum(size) - size
    found[order] = np.arange(len(own)) - np.repeat(first, size)
    return found
