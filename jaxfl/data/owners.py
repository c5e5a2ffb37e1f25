"""Natural clients: examples that have owners, such as writers or the roles of plays."""

import numpy as np
from jaxtyping import Shaped

from jaxfl._validate import checked, not_empty
from jaxfl.data.load import check_labels
from jaxfl.data.partition import Rows, lists_of


@checked(owner=not_empty(check_labels), test_owner=check_labels)
def by_owner(
    owner: Shaped[np.ndarray, "n"],
    test_owner: Shaped[np.ndarray, "m"] | None = None,
    *,
    least: int = 1,
) -> tuple[Rows, Rows]:
    """Make a client of every owner with at least `least` training examples, in the order of their numbers.

    Args:
        owner: `[n]` owner of each training example, whole numbers from 0.
        test_owner: `[m]` owner of each test example; None: nobody has any (see
            `jaxfl.data.hold_out`).
        least: Training examples that a client has at least.

    Returns:
        Training rows and test rows, in ascending order; a client may have no test examples.

    Raises:
        ValueError: No owner has so many examples.

    Example:
        >>> train, test = by_owner([7, 2, 7, 7, 4], [2, 7, 2], least=1)
        >>> [rows.tolist() for rows in train], [rows.tolist() for rows in test]
        ([[1], [4], [0, 2, 3]], [[0, 2], [], [1]])
    """
    test_owner = np.zeros(0, np.int32) if test_owner is None else test_owner
    names, sizes = np.unique(owner, return_counts=True)
    kept = names[sizes >= least]
    if not len(kept):
        raise ValueError(
            f"least={least}: the largest of {len(names)} owners has {sizes.max(initial=0)}, give at most that"
        )

    def rows_of(owner: np.ndarray) -> Rows:
        client = np.searchsorted(kept, owner)
        known = kept[np.minimum(client, len(kept) - 1)] == owner
        return lists_of(np.where(known, client, -1), len(kept))

    return rows_of(owner), rows_of(test_owner)
