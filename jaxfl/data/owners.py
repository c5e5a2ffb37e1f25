"""Natural clients: examples that have owners, such as writers or the roles of plays."""

from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxfl._validate import check_fraction, check_instance, checked, count_from_0
from jaxfl.data.load import Dataset, check_labels
from jaxfl.data.partition import Rows, lists_of

check_share = partial(check_fraction, one=False)


@checked(owner=check_labels, test_owner=check_labels)
def by_owner(
    owner: Shaped[np.ndarray, "n"], test_owner: Shaped[np.ndarray, "m"] | None = None, *, least: int = 1
) -> tuple[Rows, Rows]:
    """Make a client of every owner with at least `least` training examples, in the order of their numbers.

    Args:
        owner: `[n]` owner of each training example, whole numbers from 0.
        test_owner: `[m]` owner of each test example; None: nobody has any (see `hold_out`).
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


def _check_owned(name: str, value: Any) -> Dataset:
    data = check_instance(name, value, (Dataset,))
    if data.owner is None:
        raise ValueError(f"{name}.owner=None: give the owner of each example, from_arrays(..., owner=...)")
    return data


@checked(data=_check_owned, share=check_share, seed=count_from_0)
def hold_out(data: Dataset, share: float = 0.2, *, seed: int | None = None) -> Dataset:
    """Turn a share of each owner's training examples into its test examples; there are no others afterwards.

    An owner of n examples keeps n - floor(share n) of them, so at least one.

    Args:
        data: A dataset whose examples have owners; its own test examples are left out.
        share: Share of an owner's examples to test on, in (0, 1).
        seed: Draws them at random; None: the last ones, in the order in which they come, such as time.

    Raises:
        ValueError: Examples without owners, or a share that is not above 0 and below 1.

    Example:
        >>> from jaxfl.data import from_arrays
        >>> inputs, labels = np.arange(6.0)[:, None], np.zeros(6, int)
        >>> data = from_arrays(inputs, labels, inputs[:0], labels[:0], owner=[0, 1, 0, 0, 0, 1])
        >>> held = hold_out(data, 0.25)
        >>> held.train_inputs[:, 0].tolist(), held.test_inputs[:, 0].tolist(), held.test_owner.tolist()
        ([0.0, 1.0, 2.0, 3.0, 5.0], [4.0], [0])
    """
    owner: Any = data.owner
    order = np.arange(len(owner)) if seed is None else np.random.default_rng(seed).permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    sizes = np.unique(owner, return_counts=True)[1]
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    # A little more than share * n, which rounding may have left below a whole number.
    kept = np.repeat(sizes - np.floor(share * sizes * (1 + 1e-12)).astype(int), sizes)
    train, test = np.sort(order[rank < kept]), np.sort(order[rank >= kept])
    inputs, labels = data.train_inputs, data.train_labels
    return Dataset(
        inputs[train], labels[train], inputs[test], labels[test], data.classes, data.name, owner[train], owner[test]
    )
