"""Examples: named image datasets, or your own arrays.

Datasets other than `digits` are read from folders that TensorFlow Datasets (TFDS) prepared in its
array_record format. Reading needs neither TensorFlow nor a network, and downloads nothing.
"""

import contextlib
import functools
import hashlib
import io
import numbers
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Int32, Integer, Shaped

from jaxfl._support.checks import check_array, check_choice, check_path, checked, show
from jaxfl._support.files import cache_folder, opened, replacing

EMNIST = tuple(
    f"emnist/{config}"
    for config in ("digits", "balanced", "letters", "byclass", "bymerge", "mnist")
)
NAMES = (
    "digits",
    "mnist",
    "fashion_mnist",
    "cifar10",
    "cifar100",
    "svhn_cropped",
    "emnist",
    *EMNIST,
)
"""Names of the datasets that `load` reads."""

_CACHE_FORMAT = 1
"""Version of the format of cached arrays, part of their key."""

_READ_ROWS = 4096
"""Number of examples that are checked or decoded at a time."""

_MOST_CLASSES = 2**24
"""Largest number of classes that labels may imply.

Larger labels are other numbers by mistake: each class would need an output and a count.
"""


class Dataset(NamedTuple):
    """Training and test examples of one task.

    Labels `[n]` of whole numbers are classes, from 0 to classes - 1. Other labels are floating
    numbers `[n]`, or floating or whole numbers `[n, ...]`. Their `classes` is 0, and they need a
    model of a task other than classification (see `jaxfl.tasks`).
    """

    train_inputs: Integer[np.ndarray, "n ..."] | Float32[np.ndarray, "n ..."]
    train_labels: Int32[np.ndarray, "n ..."] | Float32[np.ndarray, "n ..."]
    test_inputs: Integer[np.ndarray, "m ..."] | Float32[np.ndarray, "m ..."]
    test_labels: Int32[np.ndarray, "m ..."] | Float32[np.ndarray, "m ..."]
    classes: int
    name: str
    owner: Shaped[np.ndarray, "n"] | None = None
    """Owner of each training example, if examples have natural owners (`jaxfl.data.by_owner`)."""
    test_owner: Shaped[np.ndarray, "m"] | None = None
    """Owner of each test example."""
    columns: tuple[str, ...] = ()
    """Names of the inputs, if they come from a data frame (`jaxfl.data.from_frame`)."""
    encoding: tuple[Any, ...] = ()
    """Encoding of each column of inputs, by which `encode_frame` encodes further rows."""


def check_labels(
    name: str, labels: Any, length: int | None = None, classes: int | None = None
) -> Int32[np.ndarray, "n"]:
    """Require a vector of whole numbers from 0, and return it as int32.

    Args:
        name: Name of the argument, for errors.
        labels: Labels of classes, or other whole numbers such as owners.
        length: Number of labels. None accepts any number.
        classes: Number of classes. Every label must be below it. None accepts any label up to the
            largest number of int32.
    """
    labels = check_array(name, labels)
    if labels.ndim != 1 or (length is not None and len(labels) != length):
        numbers = "whole numbers"
        if length is not None:
            numbers = f"{length} whole numbers"
        raise ValueError(
            f"{name} must be a vector of {numbers}, got shape {labels.shape}. "
            "Give one number for each example."
        )
    # NumPy makes floats of an empty list.
    if labels.size and not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{name} must be whole numbers, got {labels.dtype}. "
            f"Convert them, for instance by {name}.astype(np.int32)."
        )
    most = np.iinfo(np.int32).max
    if classes is not None:
        most = classes - 1
    wrong = labels[(labels < 0) | (labels > most)]
    if len(wrong):
        if classes is None:
            limits = f"from 0 to {most}"
            remedy = "Number them from 0, or give floating numbers if they are no classes."
        else:
            limits = f"from 0 to classes - 1 = {most}"
            remedy = "Number the classes from 0, or give a larger `classes`."
        raise ValueError(f"{name} must be {limits}, got {wrong[0]}. {remedy}")
    return labels.astype(np.int32)


def check_owners(name: str, owners: Any) -> Shaped[np.ndarray, "n"]:
    """Require a vector of names, or of whole numbers of any size, and return it as an array.

    Numbers that int64 cannot hold stay Python integers, which are compared without rounding.
    """
    array = _as_objects(name, owners)
    if array.ndim != 1:
        raise ValueError(
            f"{name} must be a vector of names or of whole numbers, got {show(owners)}. "
            "Give one owner for each example."
        )
    # An array of one of these kinds has neither gaps nor a mixture of kinds.
    if array.dtype.kind in "iU":
        return array
    values = array.tolist()
    named = bool(values) and isinstance(values[0], str)
    kind: Any = numbers.Integral
    if named:
        kind = str
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, kind):
            raise TypeError(
                f"{name} must be all names, or all whole numbers, got {show(value)} in row {row}. "
                "Convert them, for instance all by str, and drop the rows without an owner."
            )
    if named:
        return np.array(values, np.str_)
    small = all(-(2**63) <= value < 2**63 for value in values)
    return np.array(values, np.int64 if small else object)


def _as_objects(name: str, values: Any) -> np.ndarray:
    """Return a list as an array of its objects, and any other value as an array without a mask."""
    if isinstance(values, list | tuple):
        # NumPy would make names of numbers where both are in a list.
        array = np.empty(len(values), object)
        array[:] = values
        return array
    return _without_mask(name, values)


def _without_mask(name: str, values: Any) -> np.ndarray:
    """Return a value as an array, which must have no masked entries."""
    if isinstance(values, np.ma.MaskedArray | jax.Array):
        return check_array(name, values)
    return np.asarray(values)


def check_targets(name: str, labels: Any, length: int | None = None) -> np.ndarray:
    """Require classes `[n]`, or other finite numbers `[n, ...]`, and return them in 32 bits."""
    labels = check_array(name, labels)
    labels = _without_booleans(labels, np.int32)
    if labels.ndim == 1 and labels.dtype.kind != "f":
        return check_labels(name, labels, length)
    if labels.ndim < 1 or 0 in labels.shape[1:] or (length is not None and len(labels) != length):
        examples = "example"
        if length is not None:
            examples = f"of the {length} inputs"
        raise ValueError(
            f"{name} must have one row of numbers for each {examples}, got shape {labels.shape}. "
            "Give labels [n] or [n, ...]."
        )
    labels = _in_32_bits(name, labels)
    if labels.dtype.kind == "f":
        return labels
    return labels.astype(np.int32, copy=False)


def check_inputs(name: str, inputs: Any) -> np.ndarray:
    """Require finite examples [n, ...] without empty axes, and return them in at most 32 bits."""
    inputs = check_array(name, inputs)
    if inputs.ndim < 2 or 0 in inputs.shape[1:]:
        raise ValueError(
            f"{name} must be examples [n, ...] without empty axes, got shape {inputs.shape}. "
            "Give one row of numbers for each example."
        )
    # Whole numbers of a byte would be pictures.
    return _in_32_bits(name, _without_booleans(inputs, np.float32))


def _without_booleans(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Return booleans as numbers of a dtype, and other values unchanged."""
    if values.dtype.kind != "b":
        return values
    return values.astype(dtype)


def _in_32_bits(name: str, values: np.ndarray) -> np.ndarray:
    """Require finite numbers, and return them in at most 32 bits."""
    if np.issubdtype(values.dtype, np.integer):
        return _whole_in_32_bits(name, values)
    if not np.issubdtype(values.dtype, np.floating):
        raise ValueError(
            f"{name} must be whole or floating numbers, got {values.dtype}. "
            f"Convert them, for instance by {name}.astype(np.float32)."
        )
    # Numbers beyond single precision become infinite, which is found below.
    with np.errstate(over="ignore"):
        values = values.astype(np.float32, copy=False)
    axes = tuple(range(1, values.ndim))
    blocks = _row_blocks(values)
    bad = np.concatenate([~np.isfinite(part).all(axis=axes) for part in blocks])
    if bad.any():
        raise ValueError(
            f"{name} must be finite, got NaN or infinite values in {bad.sum()} rows, first in row "
            f"{bad.argmax()}. Drop these rows, or mark gaps by jaxfl.data.from_frame."
        )
    return values


def _whole_in_32_bits(name: str, values: np.ndarray) -> np.ndarray:
    """Require whole numbers that int32 holds, and return them in at most 32 bits."""
    # Bytes stay bytes, because pictures of 32 bits would take four times the memory.
    if values.dtype.itemsize < 4 or values.dtype == np.int32:
        return values
    for part in _row_blocks(values):
        wide = part[(part < np.iinfo(np.int32).min) | (part > np.iinfo(np.int32).max)]
        if wide.size:
            raise ValueError(
                f"{name} must be whole numbers of 32 bits, got {wide[0]}. Give smaller numbers."
            )
    return values.astype(np.int32, copy=False)


def _row_blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield blocks of consecutive rows, because the array may be a file larger than memory."""
    # An empty array has one empty block, because `np.concatenate` needs at least one.
    for start in range(0, max(1, len(values)), _READ_ROWS):
        yield values[start : start + _READ_ROWS]


def check_rows(name: str, lists: Sequence[np.ndarray], length: int) -> list[Int32[np.ndarray, "_"]]:
    """Require a vector of row numbers below `length` for each client, and return them as int32."""
    for i, rows in enumerate(lists):
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise ValueError(
                f"{name}[{i}] must be a vector of whole numbers, got {rows.dtype} of shape "
                f"{rows.shape}. Give the row numbers of the examples."
            )
    # Empty lists are left out, because NumPy makes floats of them, and then of all rows.
    flat = np.concatenate([np.zeros(0, np.int64), *(rows for rows in lists if rows.size)])
    wrong = flat[(flat < 0) | (flat >= length)]
    if wrong.size:
        i = next(i for i, rows in enumerate(lists) if np.any(rows == wrong[0]))
        raise ValueError(
            f"{name}[{i}] must have rows from 0 to {length - 1}, got row {wrong[0]}. "
            "Leave out rows beyond the data."
        )
    return [rows.astype(np.int32, copy=False) for rows in lists]


@checked(name=functools.partial(check_choice, choices=NAMES), data_dir=check_path)
def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Load a dataset of images by name.

    Images are uint8 `[n, H, W, C]`. `digits` is always available: images 8x8x1, scaled from 0..16
    to 0..255, with one fixed stratified split. Other datasets are TFDS folders
    `<data_dir>/<name>/<version>`, of which the highest version is read.

    `emnist` is `emnist/digits`. TFDS keeps EMNIST images transposed, and here they are upright. The
    labels of `emnist/letters` start at 1 there, and here at 0.

    Decoded arrays are cached in a folder (`JAXFL_CACHE_DIR`, by default `~/.cache/jaxfl`) under a
    key of the name, the version, and the sizes and times of the source files.

    Args:
        name: Name of the dataset, one of `jaxfl.data.NAMES`.
        data_dir: Folder of prepared datasets. The default is the environment's `JAXFL_DATA_DIR`,
            then `TFDS_DATA_DIR`, then TFDS's own default `~/tensorflow_datasets`.

    Raises:
        ValueError: The name is unknown, a package that reads the files is missing, or the folder
            has no prepared copy, or a copy that is damaged, incomplete, or in another file format.
            If a package or a usable copy is missing, the message has the command that installs or
            prepares it.

    Example:
        >>> digits = load("digits")
        >>> digits.train_inputs.shape, digits.test_inputs.shape, digits.classes
        ((1438, 8, 8, 1), (359, 8, 8, 1), 10)

    References:
        https://www.tensorflow.org/datasets/tfless_tfds
    """
    if name == "digits":
        return _digits()
    if name == "emnist":
        name = "emnist/digits"
    folder = find_prepared(name, data_dir)
    cache = _cache_file(name, folder)
    arrays = _read_cache(cache)
    if arrays is None:
        arrays = _read_prepared(name, folder)
        _write_cache(cache, arrays)
    classes = int(arrays.pop("classes"))
    return Dataset(**arrays, classes=classes, name=name)


@checked(
    train_inputs=check_inputs,
    train_labels=check_targets,
    test_inputs=check_inputs,
    test_labels=check_targets,
    owner=check_owners,
    test_owner=check_owners,
)
def from_arrays(
    train_inputs: np.ndarray,
    train_labels: np.ndarray,
    test_inputs: np.ndarray,
    test_labels: np.ndarray,
    *,
    classes: int | None = None,
    name: str = "arrays",
    owner: np.ndarray | None = None,
    test_owner: np.ndarray | None = None,
) -> Dataset:
    """Make a dataset of your own arrays.

    Args:
        train_inputs: Training inputs `[n, ...]`: bytes (images), floating numbers, or other whole
            numbers. Floating numbers and booleans become float32, and whole numbers have 32 bits at
            most.
        train_labels: Classes `[n]`, whole numbers from 0. Labels of another task than
            classification are floating numbers `[n]`, or any numbers `[n, ...]`.
        test_inputs: Test inputs `[m, ...]` with the dtype and example shape of `train_inputs`. The
            number m may be 0.
        test_labels: Labels of the test inputs, with the dtype and shape of `train_labels`.
        classes: Number of classes. The default is the largest label plus one, and 0 if labels are
            not classes.
        name: Name of the dataset in reports.
        owner: Owner `[n]` of each training example, names or whole numbers, for `by_owner`. None
            stands for examples without owners.
        test_owner: Owner `[m]` of each test example, or None.

    Raises:
        ValueError: Lengths, shapes or dtypes do not fit, there is no training example, inputs are
            NaN or infinite, or labels are out of range. `classes` is given, and labels are not
            classes.
        TypeError: An array has no numbers, or an owner is neither a name nor a whole number.

    Example:
        >>> inputs = np.zeros((4, 8, 8, 1), np.uint8)
        >>> from_arrays(inputs, np.array([0, 1, 2, 1]), inputs[:1], np.array([2])).classes
        3
    """
    _check_owner("owner", owner, len(train_labels))
    _check_owner("test_owner", test_owner, len(test_labels))
    if not len(train_inputs):
        raise ValueError(
            f"train_inputs must have at least one example, got shape {train_inputs.shape}. "
            "Give the training examples."
        )
    train_kind = _kind_of_rows(train_inputs)
    test_kind = _kind_of_rows(test_inputs)
    if train_kind != test_kind:
        raise ValueError(
            f"test_inputs must have examples of the dtype and shape of train_inputs, {train_kind}, "
            f"got {test_kind}. Convert or reshape one of them."
        )
    # Floating numbers, and labels with several axes, are no classes.
    if train_labels.ndim > 1 or train_labels.dtype.kind == "f":
        if classes:
            raise ValueError(
                f"classes must be left out with labels of {train_labels.dtype}, got {classes}. "
                "Leave it out, or give whole numbers as labels."
            )
        train_labels = check_targets("train_labels", train_labels, len(train_inputs))
        test_labels = check_targets("test_labels", test_labels, len(test_inputs))
        _check_same_targets(train_labels, test_labels)
        classes = 0
    else:
        train_labels = check_labels("train_labels", train_labels, len(train_inputs), classes)
        test_labels = check_labels("test_labels", test_labels, len(test_inputs), classes)
        classes = classes or _number_of_classes(train_labels, test_labels)
    return Dataset(
        train_inputs, train_labels, test_inputs, test_labels, classes, name, owner, test_owner
    )


def _check_same_targets(train_labels: np.ndarray, test_labels: np.ndarray) -> None:
    """Require test labels with rows of the dtype and shape of training labels."""
    train_kind = _kind_of_rows(train_labels)
    test_kind = _kind_of_rows(test_labels)
    # One-hot rows would be numbers to predict, so the remedy names classes too.
    if train_kind != test_kind:
        raise ValueError(
            f"test_labels must have rows of the dtype and shape of train_labels, {train_kind}, "
            f"got {test_kind}. Convert one of them. Classes are whole numbers: give "
            "labels.astype(np.int32), or labels.argmax(1) of one-hot rows."
        )


def _number_of_classes(train_labels: np.ndarray, test_labels: np.ndarray) -> int:
    """Return the largest label plus one, which must be no more than `_MOST_CLASSES`."""
    # There may be no test labels, unlike training labels.
    largest = max(int(train_labels.max()), int(test_labels.max(initial=0)))
    if largest >= _MOST_CLASSES:
        which = "test_labels"
        if train_labels.max() == largest:
            which = "train_labels"
        raise ValueError(
            f"{which} must be below {_MOST_CLASSES}, got {largest}. Number the classes from 0."
        )
    return largest + 1


def _check_owner(name: str, owner: np.ndarray | None, count: int) -> None:
    """Require an owner for each label, if there are owners."""
    if owner is not None and len(owner) != count:
        raise ValueError(
            f"{name} must have one owner for each of the {count} labels, got shape {owner.shape}. "
            f"Give {count} names or whole numbers."
        )


def _kind_of_rows(array: np.ndarray) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape of a single row of an array."""
    return str(array.dtype), array.shape[1:]


def _digits() -> Dataset:
    """Return scikit-learn's part of the handwritten digits, with a fixed stratified split.

    References:
        Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (CC BY 4.0).
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images = np.rint(file["images"] * (255 / 16)).astype(np.uint8)[..., None]
        labels = file["labels"].astype(np.int32)
    # The split is a part of the dataset, so its seed is fixed.
    rng = np.random.default_rng(0)
    is_test = np.zeros(len(labels), bool)
    for k in range(10):
        # A fifth of each class is for tests.
        rows = rng.permutation(np.flatnonzero(labels == k))
        is_test[rows[: round(len(rows) / 5)]] = True
    return Dataset(
        images[~is_test], labels[~is_test], images[is_test], labels[is_test], 10, "digits"
    )


def find_prepared(name: str, data_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of the highest prepared version of `name`.

    Args:
        name: Name of the dataset, with its configuration if it has one.
        data_dir: Folder of prepared datasets. None stands for the default of `load`.

    Raises:
        ValueError: The folder has no prepared copy, or its path begins with the home of an unknown
            user.
    """
    named = data_dir or os.environ.get("JAXFL_DATA_DIR") or os.environ.get("TFDS_DATA_DIR")
    given = named or "~/tensorflow_datasets"
    # A home that is not known stays in the path as it was written.
    expanded = os.path.expanduser(given)
    if os.fspath(expanded).startswith("~"):
        raise ValueError(
            f"data_dir must be a folder, got {given!r} of a user without a home. "
            "Give an absolute path, or set JAXFL_DATA_DIR to one."
        )
    root = Path(expanded).absolute()
    versions = [info.parent for info in (root / name).glob("*/dataset_info.json")]
    # Folders of unfinished preparations have names of another form.
    versions = [folder for folder in versions if re.fullmatch(r"\d+\.\d+\.\d+", folder.name)]
    if not versions:
        raise ValueError(
            f"data_dir must hold a prepared copy of {name!r}, got {str(root)!r} without "
            f"{root / name}/<version>/dataset_info.json. Give another data_dir, set "
            f"JAXFL_DATA_DIR, or use 'digits', which needs no files. {_remedy(name, root)}"
        )
    # As texts, version 10.0.0 would come before version 9.0.0.
    return max(versions, key=lambda folder: tuple(map(int, folder.name.split("."))))


def _remedy(name: str, root: Path) -> str:
    """Return advice on how to prepare a copy of a dataset, with the commands."""
    builder = f"tfds.builder({name!r}, data_dir={str(root)!r}, file_format='array_record')"
    code = f"{builder}.download_and_prepare()"
    return (
        "To prepare a copy, run this on a machine with internet (preparing needs TensorFlow, "
        "reading does not), then copy the folder:\n"
        "    pip install tensorflow tensorflow-datasets array-record scipy\n"
        f'    python -c "import tensorflow_datasets as tfds; {code}"'
    )


def _read_prepared(name: str, folder: Path) -> dict[str, Any]:
    """Return the arrays of a TFDS folder and its number of classes, by the names in `Dataset`.

    Raises:
        ValueError: A package is missing, or the folder cannot be read. The message has the cause.
    """
    try:
        import array_record  # noqa: F401
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(
            f"data_dir must be read by the package {error.name}, got {folder} without it. "
            "Install it: pip install 'jaxfl[data]'."
        ) from None
    try:
        builder = tfds.builder_from_directory(folder)
        file_format = builder.info.file_format and builder.info.file_format.value
        if file_format != "array_record":
            raise _UnusableError(f"its files are in {file_format} format, not array_record")
        arrays: dict[str, Any] = {}
        for split in ("train", "test"):
            arrays[f"{split}_inputs"], arrays[f"{split}_labels"] = _read_split(builder, split)
        arrays["classes"] = builder.info.features["label"].num_classes
        return _upright(name, arrays)
    except MemoryError:
        # A lack of memory is no fault of the copy.
        raise
    except Exception as error:
        # A name with a configuration is a path of two folders.
        root = folder.parents[name.count("/") + 1]
        reason = str(error).removesuffix(".")
        raise ValueError(
            f"data_dir must hold a usable copy of {name!r}, got {folder}: {reason}. "
            f"Remove it, or give another data_dir. {_remedy(name, root)}"
        ) from error


class _UnusableError(Exception):
    """Reason why a prepared copy of a dataset is unusable, which completes an error about it."""


def _read_split(builder: Any, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the decoded images `[n, H, W, C]` of uint8, and the labels of a split."""
    import tensorflow_datasets as tfds
    from PIL import Image

    if split not in builder.info.splits:
        raise _UnusableError(f"dataset_info.json lists no split {split!r}")
    files = builder.info.splits[split].file_instructions
    for file in files:
        _check_file(file.filename, file.examples_in_shard)
    # The images stay encoded here, because decoding them below is faster, and because TFDS would
    # warn about OpenCV.
    source = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    shape = builder.info.features["image"].shape
    inputs = np.empty((len(source), *shape), np.uint8)
    labels = np.empty(len(source), np.int32)
    try:
        for row, record in enumerate(_records(source)):
            image = np.asarray(Image.open(io.BytesIO(record["image"])))
            _check_image(row, image, shape)
            inputs[row] = image.reshape(shape)
            labels[row] = record["label"]
    except Exception as error:
        names = ", ".join(str(file.filename) for file in files)
        raise _UnusableError(f"cannot read {names}: {error}") from error
    return inputs, labels


def _records(source: Any) -> Iterator[dict[str, Any]]:
    """Yield the records of a data source of TFDS."""
    # Records are read in blocks, so that few encoded images are in memory.
    for start in range(0, len(source), _READ_ROWS):
        yield from source.__getitems__(range(start, min(start + _READ_ROWS, len(source))))


def _check_image(row: int, image: np.ndarray, shape: tuple[int, ...]) -> None:
    """Require bytes of a shape in the decoded image of a row, or raise `_UnusableError`."""
    # A decoded image of one channel has no axis of channels.
    if image.dtype != np.uint8 or image.shape not in (shape, shape[:-1]):
        raise _UnusableError(
            f"example {row} is {image.dtype} {image.shape}, dataset_info says uint8 {shape}"
        )


def _check_file(path: str, expected: int) -> None:
    """Require a complete file with the expected number of examples, or raise `_UnusableError`."""
    from array_record.python.array_record_module import ArrayRecordReader

    if not os.path.isfile(path):
        raise _UnusableError(f"file {path} is missing")
    try:
        with contextlib.closing(ArrayRecordReader(path)) as reader:
            count = reader.num_records()
    except Exception as error:
        raise _UnusableError(
            f"file {path} is truncated or not an array_record file ({error})"
        ) from error
    if count != expected:
        raise _UnusableError(
            f"file {path} holds {count} examples, dataset_info.json says {expected}"
        )


def _upright(name: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """Turn EMNIST's images upright, count its labels from 0, and check the labels of any dataset.

    EMNIST's files have transposed images, and labels of letters from 1 to 26, for which TFDS counts
    37 classes. The dict `arrays` is changed and returned, with 26 `classes` for letters.
    """
    first = 0
    if name == "emnist/letters":
        first = 1
        # TFDS counts 37 classes of letters, but the files have labels from 1 to 26 only.
        arrays["classes"] = 26
    for split in ("train", "test"):
        images = f"{split}_inputs"
        if name.startswith("emnist/"):
            arrays[images] = np.ascontiguousarray(arrays[images].swapaxes(1, 2))
        labels = arrays[f"{split}_labels"] - first
        checked_labels = check_labels(f"{split}_labels", labels, classes=arrays["classes"])
        arrays[f"{split}_labels"] = checked_labels
    return arrays


def _cache_file(name: str, folder: Path) -> str:
    """Return the name of the cached arrays' file.

    It changes if the name, the size or the time of a file in the folder changes.
    """
    stats = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
    files = [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats]
    facts = (_CACHE_FORMAT, name, folder.name, files)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return f"{name.replace('/', '-')}-{folder.name}-{key}.npz"


def _read_cache(cached: str) -> dict[str, Any] | None:
    """Return the cached arrays, or None if their file is missing, damaged or incomplete."""
    try:
        with opened(cache_folder() / cached) as raw, np.load(raw) as file:
            return {field: file[field] for field in (*Dataset._fields[:4], "classes")}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
        # The source still has the data, so a cache that cannot be read is no error.
        return None


def _write_cache(cached: str, arrays: dict[str, Any]) -> None:
    """Write all arrays to the cache, or none if its folder cannot be made or written."""
    with contextlib.suppress(OSError):
        path = cache_folder() / cached
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
