"""Examples: named image datasets, or your own arrays.

Datasets other than `digits` are read from folders that TensorFlow Datasets (TFDS) prepared in its
array_record format. Reading needs neither TensorFlow nor a network; nothing is ever downloaded.
"""

import contextlib
import functools
import hashlib
import io
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Integer

from jaxfl._validate import check_array, check_choice, check_path, checked
from jaxfl.files import cache_folder, opened, replacing

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

_CACHE_FORMAT = 1
_BLOCK = 4096
_MOST_CLASSES = 2**24
"""Labels are counted by class, and outputs are one for each class; larger labels are other numbers by mistake."""


class Dataset(NamedTuple):
    """Training and test examples of one task.

    Labels `[n]` of whole numbers are classes, 0 to classes - 1; other labels, `[n]` of floating numbers or `[n, ...]`,
    have `classes` 0 and a model with another task (see `jaxfl.tasks`).
    """

    train_inputs: Integer[np.ndarray, "n ..."] | Float32[np.ndarray, "n ..."]
    train_labels: Int32[np.ndarray, "n ..."] | Float32[np.ndarray, "n ..."]
    test_inputs: Integer[np.ndarray, "m ..."] | Float32[np.ndarray, "m ..."]
    test_labels: Int32[np.ndarray, "m ..."] | Float32[np.ndarray, "m ..."]
    classes: int
    name: str
    owner: Int32[np.ndarray, "n"] | None = None
    """Of each training example, where they have natural ones (see `jaxfl.data.by_owner`)."""
    test_owner: Int32[np.ndarray, "m"] | None = None


def check_labels(
    name: str, labels: Any, length: int | None = None, classes: int | None = None
) -> Int32[np.ndarray, "n"]:
    """Require a vector of whole numbers from 0 (below `classes`), `length` of them; return it as int32."""
    labels = check_array(name, labels)
    if labels.ndim != 1 or (length is not None and len(labels) != length):
        wanted = (
            "one label per example"
            if length is None
            else f"one label for each of the {length} inputs"
        )
        raise ValueError(f"{name}.shape={labels.shape}: give {wanted}")
    if labels.size and not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{name}.dtype={labels.dtype}: give whole numbers, e.g. {name}.astype(np.int32)"
        )
    most = np.iinfo(np.int32).max if classes is None else classes - 1
    wrong = labels[(labels < 0) | (labels > most)]
    if len(wrong):
        limits = (
            "from 0, or floating numbers for a regression"
            if classes is None
            else f"from 0 to classes - 1 = {most}"
        )
        raise ValueError(f"{name} holds {wrong[0]}: give labels {limits}")
    return labels.astype(np.int32)


def check_targets(name: str, labels: Any, length: int | None = None) -> np.ndarray:
    """Require labels `[n]` of classes, or other finite numbers `[n, ...]`; return them in 32 bits."""
    labels = check_array(name, labels)
    if labels.ndim == 1 and labels.dtype.kind != "f":
        return check_labels(name, labels, length)
    if labels.ndim < 1 or 0 in labels.shape[1:] or (length is not None and len(labels) != length):
        raise ValueError(
            f"{name}.shape={labels.shape}: give one row for each of the {length} inputs"
        )
    labels = _in_32_bits(name, labels.astype(np.int32) if labels.dtype.kind == "b" else labels)
    return labels if labels.dtype.kind == "f" else labels.astype(np.int32, copy=False)


def check_inputs(name: str, inputs: Any) -> np.ndarray:
    """Require examples [n, ...] without empty axes, finite; return them in at most 32 bits."""
    inputs = check_array(name, inputs)
    if inputs.ndim < 2 or 0 in inputs.shape[1:]:
        raise ValueError(
            f"{name}.shape={inputs.shape}: give one row per example, [n, ...], of numbers"
        )
    return _in_32_bits(name, inputs)


def _in_32_bits(name: str, values: np.ndarray) -> np.ndarray:
    """Finite numbers in at most 32 bits."""
    if np.issubdtype(values.dtype, np.integer):
        if values.dtype.itemsize < 4 or values.dtype == np.int32:
            return values
        for part in _parts(values):
            wide = part[(part < np.iinfo(np.int32).min) | (part > np.iinfo(np.int32).max)]
            if wide.size:
                raise ValueError(f"{name} holds {wide[0]}: give whole numbers of 32 bits")
        return values.astype(np.int32, copy=False)
    if not np.issubdtype(values.dtype, np.floating):
        raise ValueError(
            f"{name}.dtype={values.dtype}: give whole or floating numbers, e.g. {name}.astype(np.float32)"
        )
    with np.errstate(over="ignore"):
        values = values.astype(np.float32, copy=False)
    axes = tuple(range(1, values.ndim))
    bad = np.concatenate([~np.isfinite(part).all(axis=axes) for part in _parts(values)])
    if bad.any():
        raise ValueError(
            f"{name} has NaN or infinite values in {bad.sum()} rows, first row {bad.argmax()}: drop them"
        )
    return values


def _parts(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield consecutive rows of an array of any length, which may be a file that is larger than memory."""
    for start in range(0, max(1, len(values)), _BLOCK):
        yield values[start : start + _BLOCK]


def check_rows(name: str, lists: Sequence[np.ndarray], length: int) -> list[Int32[np.ndarray, "_"]]:
    """Require a vector of rows from 0 below `length` for each client; return them as int32."""
    for i, rows in enumerate(lists):
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise ValueError(
                f"{name}[{i}] is {rows.dtype} of shape {rows.shape}: give a vector of whole numbers"
            )
    flat = np.concatenate([np.zeros(0, np.int64), *(rows for rows in lists if rows.size)])
    wrong = flat[(flat < 0) | (flat >= length)]
    if wrong.size:
        i = next(i for i, rows in enumerate(lists) if np.any(rows == wrong[0]))
        raise ValueError(f"{name}[{i}] has row {wrong[0]}: give rows from 0 to {length - 1}")
    return [rows.astype(np.int32, copy=False) for rows in lists]


@checked(name=functools.partial(check_choice, choices=NAMES), data_dir=check_path)
def load(name: str, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Load a dataset by name; images are uint8 [n, H, W, C].

    `digits` (8x8x1, scaled from 0..16 to 0..255, one fixed stratified split) is
    always available. The others are TFDS folders `<data_dir>/<name>/<version>`; the highest version counts.
    `emnist` is `emnist/digits`. EMNIST images, which TFDS keeps transposed, are turned upright, and the
    labels of `emnist/letters`, which start at 1 there, start at 0.

    Decoded arrays are kept in a cache folder (`JAXFL_CACHE_DIR`, by default `~/.cache/jaxfl`) under a
    key of the name, the version, and the sizes and times of the source files.

    Args:
        name: One of `jaxfl.data.NAMES`.
        data_dir: Folder of prepared datasets; by default the environment's `JAXFL_DATA_DIR`, then
            `TFDS_DATA_DIR`, then TFDS's own default `~/tensorflow_datasets`.

    Raises:
        ValueError: Unknown name; no prepared copy in the folder (the message has the command that
            prepares one); or a copy that is damaged, short, or in another file format.

    Example:
        >>> digits = load("digits")
        >>> digits.train_inputs.shape, digits.test_inputs.shape, digits.classes
        ((1438, 8, 8, 1), (359, 8, 8, 1), 10)

    References:
        https://www.tensorflow.org/datasets/tfless_tfds
    """
    if name == "digits":
        return _digits()
    name = "emnist/digits" if name == "emnist" else name
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
    owner=check_labels,
    test_owner=check_labels,
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
        train_inputs: `[n, ...]` bytes (images), floating numbers (kept as float32), or other whole numbers (kept,
            in 32 bits at most).
        train_labels: `[n]` classes, integers from 0; or, for another task than classification, `[n]` floating numbers
            or `[n, ...]` of any numbers.
        test_inputs: `[m, ...]` with the dtype and example shape of `train_inputs`; m may be 0.
        test_labels: like `train_labels`.
        classes: Number of classes; by default the largest label plus one, and 0 where labels are not classes.
        name: Name of the dataset in reports.
        owner: `[n]` owner of each training example, integers from 0, for `by_owner`.
        test_owner: `[m]` owner of each test example.

    Raises:
        ValueError: Lengths, shapes or dtypes that do not fit, NaN or infinite inputs, labels out of range.

    Example:
        >>> inputs = np.zeros((4, 8, 8, 1), np.uint8)
        >>> from_arrays(inputs, np.array([0, 1, 2, 1]), inputs[:1], np.array([2])).classes
        3
    """
    for which, given, count in (
        ("owner", owner, len(train_labels)),
        ("test_owner", test_owner, len(test_labels)),
    ):
        if given is not None and len(given) != count:
            raise ValueError(
                f"{which}.shape={given.shape}: give one owner for each of the {count} labels"
            )
    if not len(train_inputs):
        raise ValueError(f"train_inputs has shape {train_inputs.shape}: give at least one example")
    example, other = (
        (str(train_inputs.dtype), train_inputs.shape[1:]),
        (str(test_inputs.dtype), test_inputs.shape[1:]),
    )
    if example != other:
        raise ValueError(
            f"test_inputs has examples {other}: give the dtype and shape of train_inputs, {example}"
        )
    if train_labels.ndim > 1 or train_labels.dtype.kind == "f":
        if classes:
            raise ValueError(
                f"classes={classes} with labels of {train_labels.dtype}: leave it out, or give classes"
            )
        train_labels = check_targets("train_labels", train_labels, len(train_inputs))
        test_labels = check_targets("test_labels", test_labels, len(test_inputs))
        kind, other = (
            (str(labels.dtype), labels.shape[1:]) for labels in (train_labels, test_labels)
        )
        if kind != other:
            raise ValueError(
                f"test_labels has rows {other}, and train_labels {kind}: give both of one dtype and shape; classes are "
                "whole numbers, e.g. train_labels.astype(np.int32)"
            )
        return Dataset(
            train_inputs, train_labels, test_inputs, test_labels, 0, name, owner, test_owner
        )
    train_labels = check_labels("train_labels", train_labels, len(train_inputs), classes)
    test_labels = check_labels("test_labels", test_labels, len(test_inputs), classes)
    largest = max(int(train_labels.max()), int(test_labels.max(initial=0)))
    if classes is None and largest >= _MOST_CLASSES:
        which = "train_labels" if train_labels.max() == largest else "test_labels"
        raise ValueError(
            f"{which} must be below {_MOST_CLASSES}, got {largest}. Number the classes from 0."
        )
    classes = classes or largest + 1
    return Dataset(
        train_inputs, train_labels, test_inputs, test_labels, classes, name, owner, test_owner
    )


def _digits() -> Dataset:
    """Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998 (CC BY 4.0): scikit-learn's part."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images = np.rint(file["images"] * (255 / 16)).astype(np.uint8)[..., None]
        labels = file["labels"].astype(np.int32)
    rng, is_test = np.random.default_rng(0), np.zeros(len(labels), bool)
    for k in range(10):
        rows = rng.permutation(np.flatnonzero(labels == k))
        is_test[rows[: round(len(rows) / 5)]] = True
    return Dataset(
        images[~is_test], labels[~is_test], images[is_test], labels[is_test], 10, "digits"
    )


def find_prepared(name: str, data_dir: str | os.PathLike[str] | None) -> Path:
    """The folder of the highest prepared version of `name`."""
    named = data_dir or os.environ.get("JAXFL_DATA_DIR") or os.environ.get("TFDS_DATA_DIR")
    given = named or "~/tensorflow_datasets"
    expanded = os.path.expanduser(given)
    if os.fspath(expanded).startswith("~"):
        raise ValueError(
            f"data_dir must be a folder, got {given!r} of a user without a home. Set JAXFL_DATA_DIR."
        )
    root = Path(expanded).absolute()
    versions = [info.parent for info in (root / name).glob("*/dataset_info.json")]
    versions = [folder for folder in versions if re.fullmatch(r"\d+\.\d+\.\d+", folder.name)]
    if not versions:
        raise ValueError(
            f"data_dir={str(root)!r}: no prepared copy of {name!r} (no {root / name}/<version>/dataset_info.json). "
            f"Give another data_dir, set JAXFL_DATA_DIR, or use 'digits', which needs no files. {_remedy(name, root)}"
        )
    return max(versions, key=lambda folder: tuple(map(int, folder.name.split("."))))


def _remedy(name: str, root: Path) -> str:
    code = f"tfds.builder({name!r}, data_dir={str(root)!r}, file_format='array_record').download_and_prepare()"
    return (
        "To prepare a copy, run this on a machine with internet (preparing needs TensorFlow, reading does not), then "
        f"copy the folder:\n    pip install tensorflow tensorflow-datasets array-record scipy\n"
        f'    python -c "import tensorflow_datasets as tfds; {code}"'
    )


def _read_prepared(name: str, folder: Path) -> dict[str, Any]:
    """Decode a TFDS folder, or say what is wrong with it."""
    try:
        import array_record  # noqa: F401
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ValueError(
            f"{folder}: reading it needs {error.name}: pip install 'jaxfl[data]'"
        ) from None
    try:
        builder = tfds.builder_from_directory(folder)
        file_format = builder.info.file_format and builder.info.file_format.value
        if file_format != "array_record":
            raise ValueError(f"its files are in {file_format} format, not array_record")
        arrays: dict[str, Any] = {}
        for split in ("train", "test"):
            arrays[f"{split}_inputs"], arrays[f"{split}_labels"] = _read_split(builder, split)
        arrays["classes"] = builder.info.features["label"].num_classes
        return _upright(name, arrays)
    except MemoryError:
        raise
    except Exception as error:
        root = folder.parents[name.count("/") + 1]
        raise ValueError(
            f"{folder}: not a usable copy of {name!r}: {error}. "
            f"Remove it, or give another data_dir. {_remedy(name, root)}"
        ) from error


def _read_split(builder: Any, split: str) -> tuple[np.ndarray, np.ndarray]:
    import tensorflow_datasets as tfds
    from PIL import Image

    if split not in builder.info.splits:
        raise ValueError(f"dataset_info.json lists no split {split!r}")
    files = builder.info.splits[split].file_instructions
    for file in files:
        _check_file(file.filename, file.examples_in_shard)
    # The images stay encoded here: decoding them below is faster, and TFDS does not warn about OpenCV.
    source = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    shape = builder.info.features["image"].shape
    inputs, labels = np.empty((len(source), *shape), np.uint8), np.empty(len(source), np.int32)
    try:
        for start in range(0, len(source), _BLOCK):
            records = source.__getitems__(range(start, min(start + _BLOCK, len(source))))
            for row, record in enumerate(records, start):
                image = np.asarray(Image.open(io.BytesIO(record["image"])))
                if image.dtype != np.uint8 or image.shape not in (shape, shape[:-1]):
                    raise ValueError(
                        f"example {row} is {image.dtype} {image.shape}, dataset_info says uint8 {shape}"
                    )
                inputs[row], labels[row] = image.reshape(shape), record["label"]
    except Exception as error:
        raise ValueError(
            f"cannot read {', '.join(str(file.filename) for file in files)}: {error}"
        ) from error
    return inputs, labels


def _check_file(path: str, expected: int) -> None:
    from array_record.python.array_record_module import ArrayRecordReader

    if not os.path.isfile(path):
        raise ValueError(f"file {path} is missing")
    try:
        with contextlib.closing(ArrayRecordReader(path)) as reader:
            count = reader.num_records()
    except Exception as error:
        raise ValueError(
            f"file {path} is truncated or not an array_record file ({error})"
        ) from error
    if count != expected:
        raise ValueError(f"file {path} holds {count} examples, dataset_info.json says {expected}")


def _upright(name: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """Undo the transposition and the label offset that TFDS keeps from EMNIST's files, and check the labels."""
    first = 1 if name == "emnist/letters" else 0
    # TFDS counts 37 classes of letters; the files hold 1 to 26.
    arrays["classes"] = 26 if first else arrays["classes"]
    for split in ("train", "test"):
        if name.startswith("emnist/"):
            arrays[f"{split}_inputs"] = np.ascontiguousarray(
                arrays[f"{split}_inputs"].swapaxes(1, 2)
            )
        labels = arrays[f"{split}_labels"] - first
        arrays[f"{split}_labels"] = check_labels(
            f"{split}_labels", labels, classes=arrays["classes"]
        )
    return arrays


def _cache_file(name: str, folder: Path) -> str:
    stats = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
    facts = (
        _CACHE_FORMAT,
        name,
        folder.name,
        [(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats],
    )
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return f"{name.replace('/', '-')}-{folder.name}-{key}.npz"


def _read_cache(cached: str) -> dict[str, Any] | None:
    """The cached arrays; None where there are none, or they are damaged (a zip file checks itself)."""
    try:
        with opened(cache_folder() / cached) as raw, np.load(raw) as file:
            return {field: file[field] for field in (*Dataset._fields[:4], "classes")}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error):
        return None


def _write_cache(cached: str, arrays: dict[str, Any]) -> None:
    """Write all or nothing; a folder that cannot be had or written is no error."""
    with contextlib.suppress(OSError):
        path = cache_folder() / cached
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)
