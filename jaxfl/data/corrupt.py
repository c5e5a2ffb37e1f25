"""Corruption of data, so that some clients have worse data than others."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float32, Shaped

from jaxfl._support.checks import (
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
    """Require inputs of uint8 or finite floating numbers, and return them in their dtype."""
    inputs = check_array(name, value)
    if inputs.dtype != np.uint8 and not np.issubdtype(inputs.dtype, np.floating):
        raise ValueError(
            f"{name} must be bytes or floating numbers, got {inputs.dtype}. "
            "Convert them, for instance by inputs.astype(np.float32)."
        )
    check_inputs(name, inputs)
    return inputs


def _check_densities(name: str, value: Any) -> list[float]:
    """Require one or several probabilities in [0, 1], and return them as a list."""
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

    A pixel of an image `[H, W, C]` is all channels of one position. In inputs of any other shape it
    is one value. Black and white are 0 and 255 in uint8 inputs, and the least and the largest value
    of all `inputs` in floating ones.

    Which pixels of a row become black or white depends only on the seed, the row's number, the
    shape of an input, and the density. A higher density corrupts all pixels that a lower one
    corrupts, in the same way.

    Args:
        inputs: Inputs `[D, ...]`, uint8 or floating. They are not changed.
        rows: Row numbers of the inputs to corrupt.
        density: Expected fraction of corrupted pixels, in [0, 1].
        seed: Seed of the noise.

    Returns:
        A copy of `inputs` with the rows corrupted.

    Raises:
        ValueError: The density is outside [0, 1], or a row is no whole number, is outside the
            inputs, or is given twice. Inputs are neither uint8 nor finite floating numbers.

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
        inputs: Inputs `[D, ...]`, uint8 or floating. They are not changed.
        lists: Row numbers of each client's inputs. The lists are disjoint.
        densities: Density in [0, 1] of each client, the expected fraction of corrupted pixels.
        seed: Seed of the noise, which does not depend on the order of the clients.

    Returns:
        A copy of `inputs` with the clients' rows corrupted.

    Raises:
        ValueError: There are no clients, or more or fewer densities than clients. A density is
            outside [0, 1]. A row is no whole number, is outside the inputs, or is in the lists
            twice. Inputs are neither uint8 nor finite floating numbers.

    Example:
        >>> gray = np.full((2, 8, 8, 1), 100, np.uint8)
        >>> noisy = corrupt_clients(gray, [np.array([0]), np.array([1])], [0.5, 0.0], seed=0)
        >>> bool((noisy[0] == gray[0]).all()), bool((noisy[1] == gray[1]).all())
        (False, True)
    """
    if len(densities) != len(lists):
        raise ValueError(
            f"densities must have one number for each of the {len(lists)} clients, got "
            f"{show(densities)}. Give as many densities as lists."
        )
    lists = check_rows("lists", lists, len(inputs))
    rows = np.concatenate([np.zeros(0, np.int64), *lists])
    _check_disjoint(rows)
    # Without examples, the inputs would have no least and no largest value.
    if not len(rows):
        return inputs.copy()
    black, white = _black_and_white(inputs)
    pixels = inputs.shape[1:]
    if inputs.ndim == 4:
        # All channels of a pixel change together.
        pixels = inputs.shape[1:3]
    noisy = inputs.copy()
    sizes = [len(own_rows) for own_rows in lists]
    # The rows are in the order of their clients, so each density repeats for its own rows.
    for row, density in zip(rows, np.repeat(np.asarray(densities, float), sizes)):
        if density:
            level = _drawn_levels(seed, row, pixels)
            # The number of a pixel is the same for all densities (see `salt_and_pepper`).
            noisy[row, level < density / 2] = black
            noisy[row, level >= 1 - density / 2] = white
    return noisy


def _drawn_levels(seed: int, row: int, pixels: tuple[int, ...]) -> Float32[np.ndarray, "..."]:
    """Draw a number in [0, 1) for each pixel of a row."""
    # Each row has a stream of its own, because the row is the counter's high word.
    bits = np.random.Philox(key=seed, counter=int(row) << 192)
    return np.random.Generator(bits).random(pixels, np.float32)


def _check_disjoint(rows: np.ndarray) -> None:
    """Require different rows in the lists of all clients together."""
    different_rows, counts = np.unique(rows, return_counts=True)
    if len(different_rows) < len(rows):
        raise ValueError(
            f"lists must be disjoint, got row {different_rows[counts > 1][0]} twice. "
            "Leave it out of all lists but one."
        )


def _black_and_white(inputs: np.ndarray) -> tuple[Any, Any]:
    """Return the values of black and white pixels, as `salt_and_pepper` describes them."""
    if inputs.dtype == np.uint8:
        return 0, 255
    return inputs.min(), inputs.max()


@checked(labels=not_empty(check_labels), rows=check_array)
def flip_labels(labels: np.ndarray, rows: np.ndarray, *, classes: int) -> np.ndarray:
    """Return labels `[D]` of int32 in which class k of the given rows has become K - 1 - k.

    The labels of dishonest clients may be flipped in this way.

    Args:
        labels: Class labels `[D]`. They are not changed.
        rows: Row numbers of the labels to flip, for instance those of some clients.
        classes: Number K of classes.

    Raises:
        ValueError: A label or a row is no whole number or is outside its range, or there are no
            labels.

    Example:
        >>> flip_labels(np.array([0, 1, 9]), np.array([0, 1]), classes=10).tolist()
        [9, 8, 9]
    """
    check_labels("labels", labels, classes=classes)
    (rows,) = check_rows("rows", [rows], len(labels))
    flipped = np.array(labels)
    flipped[rows] = classes - 1 - flipped[rows]
    return flipped
