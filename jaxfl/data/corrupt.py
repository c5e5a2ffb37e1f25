"""Corruption of inputs: some clients have worse data than others."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxfl._validate import (
    check_array,
    check_arrays,
    check_fraction,
    checked,
    count_from_0,
    not_empty,
    show,
)
from jaxfl.data.load import check_inputs, check_labels, check_rows


def _check_pixels(name: str, value: Any) -> np.ndarray:
    inputs = check_array(name, value)
    if inputs.dtype != np.uint8 and not np.issubdtype(inputs.dtype, np.floating):
        raise ValueError(f"{name}.dtype={inputs.dtype}: give bytes, or floating numbers")
    check_inputs(name, inputs)
    return inputs


def _check_densities(name: str, value: Any) -> list[float]:
    densities = np.atleast_1d(check_array(name, value))
    return [
        check_fraction(f"{name}[{i}]", density, zero=True) for i, density in enumerate(densities)
    ]


@checked(
    inputs=_check_pixels,
    rows=check_array,
    density=partial(check_fraction, zero=True),
    seed=count_from_0,
)
def salt_and_pepper(
    inputs: Shaped[np.ndarray, "D ..."], rows: np.ndarray, density: float, *, seed: int
) -> Shaped[np.ndarray, "D ..."]:
    """Set each pixel of the given rows to black or white, with probability density / 2 each.

    A pixel of an image `[H, W, C]` is all channels of one position; in inputs of any other shape it is one
    value. Black and white are 0 and 255 in uint8 inputs, and the least and the largest value of
    all `inputs` in floating ones.

    The noise of a row depends only on the seed and the row's number: not on the other rows, their order,
    or the other inputs. What one density corrupts, a higher density corrupts in the same way.

    Args:
        inputs: `[D, ...]` uint8 or floating; not changed.
        rows: Rows to corrupt.
        density: Expected fraction of corrupted pixels, in [0, 1].
        seed: Seed of the noise.

    Returns:
        A copy of `inputs` with the rows corrupted.

    Raises:
        ValueError: A density outside [0, 1], or rows outside the inputs.

    Example:
        >>> gray = np.full((3, 8, 8, 1), 100, np.uint8)
        >>> noisy = salt_and_pepper(gray, np.array([1]), 1.0, seed=0)
        >>> np.unique(noisy[1]).tolist(), np.unique(noisy[[0, 2]]).tolist()
        ([0, 255], [100])

    References:
        PADPFL (MNIST clients with severe, moderate and no salt-and-pepper noise).
    """
    return corrupt_clients(inputs, check_rows("rows", [rows], len(inputs)), [density], seed=seed)


@checked(
    inputs=_check_pixels,
    lists=not_empty(check_arrays),
    densities=_check_densities,
    seed=count_from_0,
)
def corrupt_clients(
    inputs: Shaped[np.ndarray, "D ..."],
    lists: Sequence[np.ndarray],
    densities: Sequence[float],
    *,
    seed: int,
) -> Shaped[np.ndarray, "D ..."]:
    """Corrupt the rows of each client with its own density, as `salt_and_pepper` does.

    Args:
        inputs: `[D, ...]` uint8 or floating; not changed.
        lists: Rows of each client, disjoint.
        densities: One density in [0, 1] per client.
        seed: Seed of the noise; the order of the clients does not matter.

    Raises:
        ValueError: Another number of densities than clients, a density outside [0, 1], rows outside the
            inputs or in two lists.

    Example:
        >>> gray = np.full((2, 8, 8, 1), 100, np.uint8)
        >>> noisy = corrupt_clients(gray, [np.array([0]), np.array([1])], [0.5, 0.0], seed=0)
        >>> bool((noisy[0] == gray[0]).all()), bool((noisy[1] == gray[1]).all())
        (False, True)
    """
    if len(densities) != len(lists):
        raise ValueError(
            f"densities={show(densities)}: give one for each of the {len(lists)} clients"
        )
    lists = check_rows("lists", lists, len(inputs))
    rows = np.concatenate([np.zeros(0, np.int64), *lists])
    if len(np.unique(rows)) < len(rows):
        raise ValueError("lists has rows that occur twice: give disjoint lists")
    low, high = (0, 255) if inputs.dtype == np.uint8 else (inputs.min(), inputs.max())
    pixels = inputs.shape[1:3] if inputs.ndim == 4 else inputs.shape[1:]
    noisy = inputs.copy()
    for row, density in zip(
        rows, np.repeat(np.asarray(densities, float), [len(rows) for rows in lists])
    ):
        if density:
            # A stream of its own: the row is the high word of the generator's counter.
            bits = np.random.Philox(key=seed, counter=int(row) << 192)
            level = np.random.Generator(bits).random(pixels, np.float32)
            noisy[row, level < density / 2] = low
            noisy[row, level >= 1 - density / 2] = high
    return noisy


@checked(labels=not_empty(check_labels), rows=check_array)
def flip_labels(labels: np.ndarray, rows: np.ndarray, *, classes: int) -> np.ndarray:
    """Labels whose given rows say K - 1 - k in place of k: clients that lie by their data.

    Args:
        labels: `[D]`; not changed.
        rows: to flip, such as those of some clients.
        classes: K.

    Raises:
        ValueError: labels or rows outside their range.

    Example:
        >>> flip_labels(np.array([0, 1, 9]), np.array([0, 1]), classes=10).tolist()
        [9, 8, 9]
    """
    check_labels("labels", labels, classes=classes)
    (rows,) = check_rows("rows", [rows], len(labels))
    flipped = np.array(labels)
    flipped[rows] = classes - 1 - flipped[rows]
    return flipped
