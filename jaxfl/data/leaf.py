"""Data of LEAF, the benchmark of federated learning, as its scripts write them."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from jaxfl._support.checks import check_path, checked, show
from jaxfl.data.load import Dataset, from_arrays

LEAF_CHARACTERS = (
    "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
)
"""The 80 characters of LEAF's Shakespeare, in the order of their numbers."""

_SPACE = LEAF_CHARACTERS.index(" ")
_SIDE = 28
"""Height and width of FEMNIST's pictures, in pixels."""


class _Split(NamedTuple):
    """Examples of all users of a split: an input, a label and an owner for each example."""

    inputs: list[Any]
    labels: list[Any]
    owner: list[str]


@checked(folder=check_path)
def from_leaf(folder: str | os.PathLike[str]) -> Dataset:
    """Read a task of LEAF from the JSON files that its scripts wrote, with users as owners.

    The folder has subfolders `train` and `test`, as `preprocess.sh` leaves them in `data`. Without
    `train`, the JSON files of the folder itself are training examples. Without `test`, there are no
    test examples.

    - FEMNIST: 784 numbers become a picture `[28, 28, 1]` of float32, and classes are labels.
    - Shakespeare: texts of L characters become numbers `[L]`, which are positions in
      `jaxfl.data.leaf.LEAF_CHARACTERS`. The character that follows is the class. Unknown
      characters count as spaces. A model is for instance `gru(80, 80, every=False)`.
    - Other lists of numbers, such as those of the synthetic task, become vectors.

    Args:
        folder: Folder of the data.

    Raises:
        ValueError: There is no JSON file, a file is not LEAF's, or inputs or labels are words or
            differ in length.

    References:
        Caldas et al. 2019, "LEAF: a benchmark for federated settings" (arXiv:1812.01097).
    """
    root = Path(folder)
    train_folder = root
    if (root / "train").is_dir():
        train_folder = root / "train"
    train = _read_leaf_split(train_folder)
    test = _Split([], [], [])
    if (root / "test").is_dir():
        test = _read_leaf_split(root / "test")
    count = len(train.labels)
    # Both splits are converted as one, so that they get the same form.
    inputs = _inputs(str(folder), train.inputs + test.inputs)
    labels = _classes(str(folder), train.labels + test.labels)
    return from_arrays(
        inputs[:count],
        labels[:count],
        inputs[count:],
        labels[count:],
        name=root.name or "leaf",
        owner=np.array(train.owner, np.str_),
        test_owner=np.array(test.owner, np.str_),
    )


def _read_leaf_split(folder: Path) -> _Split:
    """Return the examples of all JSON files of a folder, in the order of the files' names."""
    # The order of `glob` depends on the file system.
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(
            f"folder must have JSON files of LEAF, got {str(folder)!r} without one. "
            "Run LEAF's preprocess.sh, and give its folder `data`."
        )
    found = _Split([], [], [])
    for file in files:
        for user, examples in _users(file).items():
            found.inputs.extend(examples["x"])
            found.labels.extend(examples["y"])
            found.owner.extend([user] * len(examples["y"]))
    return found


def _users(file: Path) -> dict[str, Any]:
    """Return the examples of a file's users by name: a dict of inputs `x` and labels `y`.

    Raises:
        ValueError: The file is not LEAF's, or has no users.
    """
    users = _user_data(file)
    if not users:
        raise ValueError(
            f"folder must have JSON files of LEAF, got {str(file)!r} without a label for each "
            "input of the users in `user_data`. Write the file again by LEAF's scripts."
        )
    return users


def _user_data(file: Path) -> dict[str, Any]:
    """Return the examples of a file's users by name, or an empty dict if the file is not LEAF's."""
    # The file may hold any JSON, or none.
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        users = json.loads(file.read_text(encoding="utf-8"))["user_data"]
        if all(len(own["x"]) == len(own["y"]) for own in users.values()):
            return users
    return {}


def _inputs(folder: str, values: list[Any]) -> np.ndarray:
    """Return inputs as an array [n, ...]: numbers of characters for texts, otherwise numbers.

    Args:
        folder: Folder of the data, for errors.
        values: Inputs of all examples.
    """
    if values and all(isinstance(value, str) for value in values):
        return _of_one_shape(folder, [_characters(value) for value in values])
    return _as_pictures(_of_one_shape(folder, values))


def _as_pictures(inputs: np.ndarray) -> np.ndarray:
    # LEAF does not say which task a file is of, but no other one has as many numbers as FEMNIST.
    if inputs.shape[1:] != (_SIDE**2,):
        return inputs
    return inputs.astype(np.float32).reshape(-1, _SIDE, _SIDE, 1)


def _of_one_shape(folder: str, values: list[Any]) -> np.ndarray:
    array = _array_or_none(values)
    if array is None:
        raise ValueError(
            f"folder must have inputs of numbers, or texts, of one length, got {folder!r} with "
            f"inputs such as {show(values[:1])}. Read words yourself, and give their tokens to "
            "from_lists."
        )
    return array


def _array_or_none(values: list[Any]) -> np.ndarray | None:
    """Return values as an array of numbers, or None if they are no numbers or differ in length."""
    try:
        array = np.array(values)
    except ValueError:
        # NumPy makes no array of lists that differ in length.
        return None
    if array.dtype.kind not in "iuf":
        return None
    return array


def _classes(folder: str, values: list[Any]) -> Shaped[np.ndarray, "n"]:
    """Return labels as numbers. Labels of one character each become numbers of characters."""
    if values and all(isinstance(value, str) and len(value) == 1 for value in values):
        return _characters("".join(values))
    return _of_one_shape(folder, values)


def _characters(text: str) -> Shaped[np.ndarray, "L"]:
    """Return the position of each character in `LEAF_CHARACTERS`, or that of the space."""
    found = [LEAF_CHARACTERS.find(character) for character in text]
    return np.array([_SPACE if number < 0 else number for number in found], np.int32)
