"""Datasets of Hugging Face's package `datasets`, without any download."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfl._support.checks import checked, show
from jaxfl.data.load import Dataset, check_owners, from_arrays


def _check_splits(name: str, value: Any) -> dict[str, Any]:
    """Require a dataset with columns, or a mapping of splits, and return splits by name.

    A single dataset is the split "train".
    """
    splits: dict[str, Any] = {"train": value}
    # An empty mapping has no split to check, so it fails below as a dataset without columns.
    if isinstance(value, Mapping) and len(value) > 0:
        splits = dict(value)
    for split in splits.values():
        if not hasattr(split, "column_names") or not hasattr(split, "__getitem__"):
            raise TypeError(
                f"{name} must be a datasets.Dataset, or a DatasetDict of splits, got {show(value)}."
                " Give for instance datasets.load_from_disk(folder)."
            )
    return splits


@checked(dataset=_check_splits)
def from_huggingface(
    dataset: Any,
    *,
    owner: str,
    input: str,
    label: str,
    train: str = "train",
    test: str = "test",
) -> Dataset:
    """Make a dataset of a `datasets.Dataset` whose examples have owners.

    Nothing is downloaded: `datasets.load_from_disk`, or a dataset that is already in memory, is
    enough.

    Args:
        dataset: A `datasets.Dataset`, or a `DatasetDict` of splits. A single dataset has training
            examples only (see `hold_out`).
        owner: Name of the column with owners, names or whole numbers.
        input: Name of the column with inputs: pictures of one size, numbers, or lists of numbers of
            one length.
        label: Name of the column with labels. Labels that are names are numbered in alphabetical
            order, over both splits.
        train: Name of the training split.
        test: Name of the test split. A `DatasetDict` without it gives no test examples.

    Raises:
        ValueError: The training split or a column does not exist, the training split is empty,
            inputs are not numbers or differ in shape, or a label is None.
        TypeError: `dataset` is not a dataset, inputs are texts, or an owner is missing.

    >>> class Stored(dict):
    ...     column_names = property(list)
    >>> stored = Stored(writer=["a", "b"], pixels=[[0.5], [1.0]], digit=[3, 1])
    >>> from_huggingface(
    ...     {"train": stored}, owner="writer", input="pixels", label="digit"
    ... ).train_labels
    array([3, 1], dtype=int32)
    """
    columns = {"owner": owner, "input": input, "label": label}
    parts = _filled_parts(dataset, train, test, columns)
    # A column of recent versions of `datasets` is a lazy object, which `list` reads.
    inputs = [_input_array(input, list(part[input])) for part in parts]
    owners = [check_owners("owner", list(part[owner])) for part in parts]
    labels = _label_arrays(label, [list(part[label]) for part in parts])
    # Without tests, empty arrays have the dtypes and shapes of the training examples.
    if len(parts) == 1:
        for found in (inputs, owners, labels):
            found.append(found[0][:0])
    return from_arrays(
        inputs[0],
        labels[0],
        inputs[1],
        labels[1],
        name="datasets",
        owner=owners[0],
        test_owner=owners[1],
    )


def _filled_parts(
    splits: Mapping[str, Any], train: str, test: str, columns: Mapping[str, str]
) -> list[Any]:
    """Return the training split, and the test split if it has examples.

    Args:
        splits: Splits by name.
        train: Name of the training split.
        test: Name of the test split.
        columns: Names of the columns, by argument of `from_huggingface`.
    """
    choices = f"Choose from {', '.join(map(repr, splits))}."
    if train not in splits:
        raise ValueError(f"train must be the name of a split, got {train!r}. {choices}")
    parts = [splits[name] for name in (train, test) if name in splits]
    for name, column in columns.items():
        for part in parts:
            _check_column_exists(name, column, part.column_names)
    owner = columns["owner"]
    if not len(splits[train][owner]):
        raise ValueError(
            f"train must be the name of a split with examples, got {train!r} without any. {choices}"
        )
    # An empty split of tests is as good as none.
    return [part for part in parts if len(part[owner])]


def _check_column_exists(name: str, column: str, known: list[str]) -> None:
    if column not in known:
        raise ValueError(
            f"{name} must name a column of the dataset, got {column!r}. "
            f"Choose from {', '.join(map(repr, known))}."
        )


def _input_array(name: str, values: list[Any]) -> np.ndarray:
    """Return inputs as an array [n, ...] of float32, whole numbers or booleans.

    Pictures without channels, and single numbers, get a last axis of length 1.

    Raises:
        TypeError: The inputs are texts.
        ValueError: The inputs are no numbers, or differ in shape.
    """
    if values and isinstance(values[0], str):
        raise TypeError(
            f"input must name a column of pictures or numbers, got {name!r} with texts such as "
            f"{show(values[0])}. Cut them into tokens, by jaxfl.data.minilm_tokens or from_lists."
        )
    arrays = [np.asarray(value) for value in values]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 or any(array.dtype.kind not in "biuf" for array in arrays):
        raise ValueError(
            f"input must name a column of pictures or numbers of one shape, got {name!r} with "
            f"shapes {sorted(shapes)[:3]}. Resize pictures, or give lists of tokens to from_lists."
        )
    stacked = np.stack(arrays)
    # A picture of one colour has no axis of channels, and a number no axis of features.
    if stacked.ndim in (1, 3):
        stacked = stacked[..., None]
    if stacked.dtype.kind == "f":
        return stacked.astype(np.float32)
    return stacked


def _label_arrays(name: str, parts: list[list[Any]]) -> list[np.ndarray]:
    """Return the labels of each split. Names become their positions in alphabetical order.

    The order is over the names of all splits.
    """
    values = [value for part in parts for value in part]
    if any(value is None for value in values):
        raise ValueError(
            f"label must have a value for each example, got {name!r} with None. "
            "Drop these examples, for instance by dataset.filter."
        )
    if values and all(isinstance(value, str) for value in values):
        number = {value: i for i, value in enumerate(sorted(set(values)))}
        return [np.array([number[value] for value in part], np.int32) for part in parts]
    return [np.asarray(part) for part in parts]
