"""Natural clients: examples that have owners, such as writers or the roles of plays."""

import numpy as np
from jaxtyping import Shaped

from jaxfl._validate import checked, not_empty
from jaxfl.data.load import check_labels
from jaxfl.data.partition import Partition, lists_of


@checked(owner=not_empty(check_labels), test_owner=check_labels)
def by_owner(
    owner: Shaped[np.ndarray, "n"],
    test_owner: Shaped[np.ndarray, "m"] | None = None,
    *,
    least: int = 1,
) -> tuple[Partition, Partition]:
    """Make a client of every owner with at least `least` training examples, in order of owners.

    Args:
        owner: Owner `[n]` of each training example, whole numbers from 0.
        test_owner: Owner `[m]` of each test example. None gives no client test examples (see
            `jaxfl.data.hold_out`).
        least: Least number of training examples of a client. Owners with fewer are left out.

    Returns:
        Training rows and test rows, in ascending order. A client may have no test examples.

    Raises:
        ValueError: No owner has so many examples.

    Example:
        >>> train, test = by_owner([7, 2, 7, 7, 4], [2, 7, 2], least=1)
        >>> [rows.tolist() for rows in train], [rows.tolist() for rows in test]
        ([[1], [4], [0, 2, 3]], [[0, 2], [], [1]])
    """
    if test_owner is None:
        test_owner = np.zeros(0, np.int32)
    names, sizes = np.unique(owner, return_counts=True)
    kept = names[sizes >= least]
    if not len(kept):
        raise ValueError(
            f"least must be at most {sizes.max(initial=0)}, the number of examples of the largest "
            f"of {len(names)} owners, got {least}. Give a smaller number."
        )

    def rows_of(owner: np.ndarray) -> Partition:
        """Return the rows of each client. Examples of other owners are left out."""
        client = np.searchsorted(kept, owner)
        known = kept[np.minimum(client, len(kept) - 1)] == owner
        return lists_of(np.where(known, client, -1), len(kept))

    return rows_of(owner), rows_of(test_owner)
