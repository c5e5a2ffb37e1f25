"""Data frames: rows with numbers, names and gaps become inputs of a network."""

import logging
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Shaped

from jaxfl._support.checks import (
    check_fraction,
    check_numbers,
    checked,
    count_from_0,
    is_listed,
    show,
)
from jaxfl.data.load import Dataset, check_owners, from_arrays
from jaxfl.data.owners import places

Frame: TypeAlias = Mapping[str, Any]
"""Columns of a data frame by name, all of one length."""

_MOST_CATEGORIES = 100
"""Largest number of names in a column that need no list of `categories`.

A column with more of them is usually an identifier, or numbers that were read as text.
"""


class ColumnEncoding(NamedTuple):
    """Encoding of a frame's column: the inputs that it becomes, as `from_frame` describes them.

    If JSON can hold the categories, `json` can write `_asdict()`. `ColumnEncoding(**values)` makes
    an encoding of the same effect from the dict `values` that `json` reads back.
    """

    column: str
    """Name of the column."""
    categories: Sequence[Any] | None = None
    """Values that each become an input of 0 or 1. None stands for numbers or booleans."""
    bounds: tuple[float, float] | None = None
    """Lower and upper bound that become -1 and 1. None scales by `mean` and `deviation` instead."""
    mean: float = 0.0
    """Mean that is subtracted from a number if there are no bounds."""
    deviation: float = 1.0
    """Standard deviation by which the difference is then divided."""
    gaps: bool = False
    """Whether a further input is 1 where the column has a gap."""


class _Column(NamedTuple):
    """Column whose values are all of one kind, except gaps."""

    kind: Literal["number", "whole number", "flag", "name"]
    values: np.ndarray
    """Floats `[n]`, or names of dtype object. The values of gaps have no meaning."""
    missing: Bool[np.ndarray, "n"]
    """Whether each row is a gap."""


def _check_frame(name: str, value: Any) -> Frame:
    """Require a data frame, or columns by name, and return the columns by name."""
    if not _has_columns(value):
        raise TypeError(
            f"{name} must be a data frame or columns by name, got {show(value)}. "
            "Give a frame of pandas or polars, or for instance {'age': [41, 67], 'sick': [0, 1]}."
        )
    named: Any = value
    if not isinstance(value, Mapping):
        # A frame of polars iterates over its columns, and not over their names.
        named = value.columns
    columns = {column: _checked_column(name, value, column) for column in list(named)}
    lengths = {column: len(values) for column, values in columns.items()}
    # Without columns, the set is empty, and `min` is not called.
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        raise ValueError(
            f"{name} must have columns of one length, with at least one row, got {show(value)} of "
            f"lengths {show(lengths)}. Give one value for each row."
        )
    return columns


def _has_columns(value: Any) -> bool:
    return isinstance(value, Mapping) or hasattr(value, "columns")


def _checked_column(name: str, frame: Any, column: Any) -> Any:
    """Require a column with a length and a name of type str, and return its values."""
    if not isinstance(column, str):
        raise TypeError(
            f"{name} must have columns that are named by str, got {show(frame)} with the name "
            f"{column!r}. Rename them, for instance by frame.rename(columns=str)."
        )
    values = frame[column]
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise TypeError(
            f"{name}[{column!r}] must be a column, got {show(values)}. Give one value a row."
        )
    return values


def _check_test(name: str, value: Any) -> float | Frame:
    """Require a share in (0, 1) of the rows, or a frame of further rows, and return it."""
    if _has_columns(value):
        return _check_frame(name, value)
    if isinstance(value, numbers.Real):
        return check_fraction(name, value, one=False)
    raise TypeError(
        f"{name} must be a frame, or a share of the rows, got {show(value)}. Give for instance 0.2."
    )


def _check_input_names(name: str, value: Any) -> list[str]:
    """Require at least one name of a column, and return the names as a list."""
    if is_listed(value) and len(value) and all(isinstance(column, str) for column in value):
        return list(value)
    raise TypeError(
        f"{name} must be names of columns, got {show(value)}. Give for instance ['age', 'sex']."
    )


def _check_mapping(name: str, value: Any) -> dict[str, Any]:
    """Require a mapping from names of columns, and return it as a dict."""
    if isinstance(value, Mapping) and all(isinstance(column, str) for column in value):
        return dict(value)
    raise TypeError(
        f"{name} must map names of columns to what they hold, got {show(value)}. "
        "Give for instance {'age': (0, 110)} as bounds, {'sex': ['f', 'm']} as categories."
    )


def _check_limits(name: str, value: Any) -> dict[str, tuple[float, float]]:
    """Require a lower and a larger upper bound for each named column, and return the pairs."""
    found = {}
    for column, pair in _check_mapping(name, value).items():
        where = f"{name}[{column!r}]"
        low_high = check_numbers(where, pair, negative=True).tolist()
        if len(low_high) != 2 or low_high[0] >= low_high[1]:
            raise ValueError(
                f"{where} must be a lower and a larger upper bound, got {show(pair)}. "
                "Give for instance (0, 110)."
            )
        found[column] = tuple(low_high)
    return found


def _check_categories(name: str, value: Any) -> dict[str, list]:
    """Require one or more different categories for each named column, and return them as lists."""
    found = {}
    for column, values in _check_mapping(name, value).items():
        listed = values is not None and not isinstance(values, str) and hasattr(values, "__len__")
        categories = []
        if listed:
            categories = list(map(_plain_value, values))
        # Inputs have the text of their category in their names, so the texts must differ.
        if not categories or len(set(map(str, categories))) < len(categories):
            raise ValueError(
                f"{name}[{column!r}] must be different values of the column, got {show(values)}. "
                "Give for instance ['f', 'm']."
            )
        found[column] = categories
    return found


def _plain_value(value: Any) -> Any:
    """Return a scalar of NumPy as the Python value that it holds, and other values unchanged."""
    if isinstance(value, np.generic):
        return value.item()
    return value


@checked(
    frame=_check_frame,
    inputs=_check_input_names,
    test=_check_test,
    seed=count_from_0,
    bounds=_check_limits,
    categories=_check_categories,
)
def from_frame(
    frame: Any,
    *,
    label: str,
    owner: str | None = None,
    inputs: Sequence[str] | None = None,
    test: Any | None = None,
    seed: int = 0,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    name: str = "frame",
) -> Dataset:
    r"""Make a dataset of the rows of a data frame, for instance of a CSV file.

    Each column becomes one or more inputs of float32. `Dataset.columns` names them, and
    `Dataset.encoding` lets `encode_frame` do the same with further rows.

    - Numbers x become :math:`(x - \mu) / \sigma`, with the mean and the standard deviation of the
      column's training rows, or with 1 if this deviation is 0. With `bounds` (l, u) they become
      :math:`2 (\min(\max(x, l), u) - l) / (u - l) - 1`.
    - Booleans become 0 and 1.
    - Names, such as "ward 3", become one input of 0 or 1 for each different name of the training
      rows. A name that only test rows have becomes zeros, which is logged.
    - Gaps (NaN, None, an empty name) become 0. A further input is 1 where the column has a gap. A
      column without gaps has no such input, unless it is in `bounds` or `categories`.

    A label is a class if it is a boolean, a name or a whole number, and a number to predict if it
    is a floating number. Names are numbered in alphabetical order.

    Args:
        frame: Frame of pandas or polars, or a dict of columns.
        label: Name of the column with the labels.
        owner: Name of the column with the owners, such as hospitals, for `by_owner`. None leaves
            owners out.
        inputs: Names of the columns that become inputs. None takes all but `label` and `owner`.
        test: Test rows: another frame with these columns, or a share in (0, 1). The share of each
            owner's rows, rounded, is drawn at random: at least one row if there are several, and
            never all. None makes no test rows.
        seed: Seed of the draw.
        bounds: Lower and upper bound of input columns of numbers.
        categories: Values of columns, in the order of their inputs, or of the label's classes. Any
            column may be listed, numbers too. Other values become zeros, and are logged.
        name: Name of the dataset in reports.

    Guarantee:
        No epsilon covers means, standard deviations and categories, nor which columns have gaps:
        they follow from the private rows of all owners. Columns in `bounds` and `categories`
        reveal nothing in this way if their bounds and categories are public knowledge, such as the
        limits of an age.

    Raises:
        ValueError: A column does not exist, or has dates, infinite numbers or values of several
            kinds. Columns differ in length, or have no rows. No column is left for inputs, or two
            columns have inputs of one name. A label is missing, is a whole number below 0, or is
            not among its `categories`. A column has more than 100 names without `categories`, or
            has `bounds` although it has names or `categories`.
        TypeError: `frame` has no columns, an owner is missing, or an argument has the wrong type.

    Example:
        >>> frame = {
        ...     "clinic": ["a", "b", "a", "b"],
        ...     "age": [40.0, None, 60.0, 50.0],
        ...     "ward": ["x", "y", "y", "x"],
        ...     "sick": [False, True, True, False],
        ... }
        >>> data = from_frame(frame, label="sick", owner="clinic", bounds={"age": (0, 100)})
        >>> data.columns, data.owner.tolist()
        (('age', 'age missing', 'ward=x', 'ward=y'), ['a', 'b', 'a', 'b'])
        >>> data.train_inputs[2:].tolist()
        [[0.20000000298023224, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
    """
    bounds = bounds or {}
    categories = categories or {}
    _check_known("label", [label], frame)
    inputs = inputs or _other_columns(frame, label, owner)
    _check_known("inputs", inputs, frame)
    _check_known("bounds", bounds, inputs)
    _check_known("categories", categories, [*inputs, label])
    rows = _read_rows(frame, test, [*inputs, label], owner, seed)
    # Test rows change no mean, deviation or category, but gaps of theirs add an input.
    encoding = [
        _encoding_of(column, rows.columns[column], rows.trained, bounds, categories)
        for column in inputs
    ]
    encoded = _encode_columns(encoding, rows.columns)
    values = _as_inputs(encoded)
    labels = _labels(label, rows.columns[label], categories.get(label))
    data = from_arrays(
        values[rows.trained],
        labels[rows.trained],
        values[~rows.trained],
        labels[~rows.trained],
        name=name,
        owner=rows.owner,
        test_owner=rows.test_owner,
    )
    return data._replace(columns=tuple(encoded), encoding=tuple(encoding))


def _check_encoding(name: str, value: Any) -> tuple[ColumnEncoding, ...]:
    """Require at least one `ColumnEncoding`, and return all of them as a tuple."""
    if is_listed(value) and len(value) and all(isinstance(own, ColumnEncoding) for own in value):
        return tuple(value)
    raise TypeError(
        f"{name} must be encodings of columns, got {show(value)}. "
        "Give the `encoding` of a dataset from jaxfl.data.from_frame."
    )


@checked(frame=_check_frame, encoding=_check_encoding)
def encode_frame(frame: Any, encoding: Sequence[ColumnEncoding]) -> Float32[np.ndarray, "n F"]:
    """Return the inputs of further rows, such as new patients, for a model that has been trained.

    The rows need no label. They are encoded as the rows of `from_frame` were: with the same bounds,
    means, standard deviations and categories. A name that is none of the categories becomes zeros,
    which is logged. A gap becomes 0, even in a column that had no gaps in `from_frame`.

    Args:
        frame: Frame of pandas or polars, or a dict of columns. Columns that are not in the encoding
            are ignored.
        encoding: `Dataset.encoding` of the dataset with which the model was trained.

    Raises:
        ValueError: A column is missing, has dates or infinite numbers, or has names where the
            encoding has numbers, or the reverse. Columns differ in length, or have no rows.
        TypeError: `frame` has no columns, or `encoding` is not a sequence of `ColumnEncoding`.

    >>> data = from_frame({"age": [40.0, 60.0], "sick": [0, 1]}, label="sick")
    >>> encode_frame({"age": [50.0, 60.0]}, data.encoding).tolist()
    [[0.0], [1.0]]
    """
    names = [own.column for own in encoding]
    remedy = "Add the column, with None in every row if it is not known."
    _check_complete("frame", frame, names, "encoding", remedy)
    columns = _read_columns("frame", frame, names)
    for own in encoding:
        _check_kind(own, columns[own.column])
    return _as_inputs(_encode_columns(encoding, columns))


def _check_kind(encoding: ColumnEncoding, column: _Column) -> None:
    """Require names where the encoding has names, and numbers where it has numbers."""
    named = any(isinstance(choice, str) for choice in encoding.categories or ())
    # A column of gaps has no kind of its own, and suits any encoding.
    if named != (column.kind == "name") and not column.missing.all():
        kinds = ("names", "numbers") if named else ("numbers", "names")
        raise ValueError(
            f"frame[{encoding.column!r}] must have {kinds[0]}, as the rows that were encoded "
            f"before, got {kinds[1]}. Convert the column."
        )


class _Rows(NamedTuple):
    """Rows for training and for tests together, as columns."""

    columns: dict[str, _Column]
    trained: Bool[np.ndarray, "n"]
    """Whether each row is for training. The other rows are for tests."""
    owner: Shaped[np.ndarray, "_"] | None
    """Owner of each training row, or None without owners."""
    test_owner: Shaped[np.ndarray, "_"] | None
    """Owner of each test row, or None without owners."""


def _read_rows(
    frame: Frame, test: float | Frame | None, names: list[str], owner: str | None, seed: int
) -> _Rows:
    """Read columns and owners, and decide which rows are for tests.

    Args:
        frame: Columns by name.
        test: Share of the rows to draw for tests, a frame of test rows, or None without tests.
        names: Names of the columns to read.
        owner: Name of the column of owners, or None.
        seed: Seed of the draw.
    """
    owners = _owners("frame", frame, owner)
    columns = _read_columns("frame", frame, names)
    num_rows = len(frame[names[0]])
    if isinstance(test, Mapping):
        remedy = "Add the column, or leave it out by `inputs`."
        _check_complete("test", test, names, "frame", remedy)
        further = _read_columns("test", test, names)
        columns = {name: _with_test(name, columns[name], further[name]) for name in names}
        # The rows of the test frame follow those for training.
        trained = np.arange(num_rows + len(test[names[0]])) < num_rows
        return _Rows(columns, trained, owners, _owners("test", test, owner))
    tested = np.zeros(num_rows, bool)
    if test is not None:
        tested = _drawn_for_tests(test, num_rows, owners, seed)
    if owners is None:
        return _Rows(columns, ~tested, None, None)
    return _Rows(columns, ~tested, owners[~tested], owners[tested])


def _other_columns(frame: Frame, label: str, owner: str | None) -> list[str]:
    """Return the columns that are neither label nor owner, of which there must be at least one."""
    found = [column for column in frame if column not in (label, owner)]
    if not found:
        raise ValueError(
            f"frame must have a column of inputs, besides label and owner, got only "
            f"{', '.join(map(repr, frame))}. Add a column."
        )
    return found


def _owners(name: str, frame: Frame, owner: str | None) -> Shaped[np.ndarray, "n"] | None:
    """Return the owners of a frame's rows, or None if no column has them."""
    if owner is None:
        return None
    _check_known("owner", [owner], frame)
    return check_owners(f"{name}[{owner!r}]", frame[owner])


def _check_known(name: str, columns: Any, known: Any) -> None:
    """Require that all names of columns are in `known`, or raise a ValueError."""
    for column in columns:
        if column not in known:
            raise ValueError(
                f"{name} must name columns of the frame, got {column!r}. "
                f"Choose from {', '.join(map(repr, known))}."
            )


def _check_complete(
    name: str, frame: Frame, columns: Iterable[str], known: str, remedy: str
) -> None:
    """Require columns in a frame of further rows.

    Args:
        name: Name of the argument with the frame, for errors.
        frame: The frame.
        columns: Names of the columns.
        known: Name of the argument that has these columns, for errors.
        remedy: Remedy of the error.
    """
    for column in columns:
        if column not in frame:
            raise ValueError(
                f"{name} must have the columns of {known}, got {show(frame)} without {column!r}. "
                f"{remedy}"
            )


def _read_columns(name: str, frame: Frame, columns: Iterable[str]) -> dict[str, _Column]:
    """Return the columns by name, of a frame whose errors have the name `name`."""
    # An error has the column as the caller would write it.
    return {column: _read_column(f"{name}[{column!r}]", frame[column]) for column in columns}


def _read_column(where: str, column: Any) -> _Column:
    """Return a column with its kind and its gaps.

    Args:
        where: Name of the column, for errors.
        column: Values of the column.

    Raises:
        ValueError: Values are of several kinds or of an unknown one, or infinite.
    """
    if _is_categorical(column):
        # The numbers of a categorical column are names of its categories.
        column = [value if _is_missing(value) else str(value) for value in column]
    values = _as_array(column)
    if values.ndim != 1:
        raise ValueError(
            f"{where} must be a vector, got shape {values.shape}. Give each column a name of its "
            "own, and one value for each row."
        )
    if values.dtype.kind in "biuf":
        kinds: dict[str, Any] = {"b": "flag", "f": "number"}
        # Of these kinds, only floats have gaps, and `_Column` holds all numbers as floats.
        floats = values.astype(np.float64)
        column = _Column(kinds.get(values.dtype.kind, "whole number"), floats, np.isnan(floats))
    else:
        column = _read_objects(where, values.astype(object))
    if column.kind != "name":
        _check_finite(where, column.values)
    return column


def _check_finite(where: str, values: Float[np.ndarray, "n"]) -> None:
    if np.isinf(values).any():
        raise ValueError(
            f"{where} must have finite numbers, got infinity. Put None where a value is not known."
        )


def _as_array(column: Any) -> np.ndarray:
    if isinstance(column, list | tuple):
        # NumPy would make names of numbers where both are in a list.
        return np.array(column, object)
    if hasattr(column, "to_numpy"):
        return np.asarray(column.to_numpy())
    return np.asarray(column)


def _is_categorical(column: Any) -> bool:
    return getattr(getattr(column, "dtype", None), "categories", None) is not None


def _read_objects(where: str, values: Shaped[np.ndarray, "n"]) -> _Column:
    """Return a column of Python objects with its kind and its gaps (see `_read_column`)."""
    missing = np.array([_is_missing(value) for value in values], bool)
    known = values[~missing]
    if _all_of(known, str):
        return _Column("name", values, missing)
    for value in known:
        # Booleans of NumPy are no `numbers.Real`, unlike its numbers and Python's booleans.
        if not isinstance(value, numbers.Real | np.bool_):
            raise ValueError(
                f"{where} must have numbers, booleans or names, and only one of these kinds, got "
                f"{show(value)}. Convert the column, for instance dates to days, or leave it out "
                "by `inputs`."
            )
        try:
            float(value)
        except OverflowError:
            # Whole numbers of Python have any size.
            raise ValueError(
                f"{where} must have numbers below 1.8e308, got a larger one. Scale the column, or "
                "leave it out by `inputs`."
            ) from None
    floats = np.full(len(values), math.nan)
    floats[~missing] = known.astype(np.float64)
    # Python's booleans are integers too, so this test comes before that of integers.
    if _all_of(known, bool | np.bool_):
        return _Column("flag", floats, missing)
    if _all_of(known, numbers.Integral):
        return _Column("whole number", floats, missing)
    return _Column("number", floats, missing)


def _all_of(values: Shaped[np.ndarray, "n"], kind: Any) -> bool:
    """Return whether there are values, and all of them are of a kind."""
    return bool(len(values)) and all(isinstance(value, kind) for value in values)


def _is_missing(value: Any) -> bool:
    """Return whether a value stands for a gap: None, NaN, an empty name, or pandas' NA or NaT."""
    # A comparison with pandas.NA has no truth value, so its type identifies it.
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, float | np.floating):
        return bool(np.isnan(value))
    return isinstance(value, str) and not value


def _with_test(name: str, train: _Column, test: _Column) -> _Column:
    """Return a column with training rows, then test rows.

    Its kind is that of the training rows, or of the test rows if those have gaps only.

    Raises:
        ValueError: Only one of `train` and `test` has names, and neither consists of gaps.
    """
    kinds = {train.kind, test.kind}
    if len(kinds) > 1 and "name" in kinds and not (train.missing.all() or test.missing.all()):
        raise ValueError(
            f"test[{name!r}] must have values like frame[{name!r}], each a {train.kind}, got each "
            f"a {test.kind}. Convert one of them."
        )
    values = np.concatenate([train.values, test.values])
    # A column of gaps has no kind of its own.
    kind = train.kind
    if train.missing.all():
        kind = test.kind
    return _Column(kind, values, np.concatenate([train.missing, test.missing]))


def _drawn_for_tests(
    share: float, number: int, owners: Shaped[np.ndarray, "n"] | None, seed: int
) -> Bool[np.ndarray, "n"]:
    """Return a mask of the rows that are drawn for tests, a share of each owner's rows.

    Every owner keeps a row for training. An owner of several rows has at least one test row.
    """
    own = np.zeros(number, np.int64)
    if owners is not None:
        own = np.unique(owners, return_inverse=True)[1]
    # Each owner has its rows in random order, of which the first ones are for tests.
    draws = np.random.default_rng(seed).random(number)
    order = np.lexsort((draws, own))
    size = np.bincount(own)
    # Every owner keeps a row for training, and one of several tests on a row.
    wanted = np.minimum(np.maximum(np.rint(share * size), 1), size - 1)
    return places(own, order) < wanted[own]


def _encoding_of(
    name: str,
    column: _Column,
    trained: Bool[np.ndarray, "n"],
    bounds: Mapping[str, tuple[float, float]],
    categories: Mapping[str, Sequence[Any]],
) -> ColumnEncoding:
    """Return a column's encoding, by the caller's bounds or categories, or by its training rows.

    Args:
        name: Name of the column.
        column: All rows of the column.
        trained: Whether each row is for training.
        bounds: Bounds of columns, by name.
        categories: Categories of columns, by name.
    """
    # The inputs of a column that the caller describes depend on no row.
    gaps = bool(column.missing.any()) or name in bounds or name in categories
    sample = column.values[trained & ~column.missing]
    if name in categories or column.kind == "name":
        _check_without_bounds(name, bounds)
        choices = categories.get(name) or _distinct("inputs", name, sample)
        return ColumnEncoding(name, categories=tuple(choices), gaps=gaps)
    if name in bounds:
        return ColumnEncoding(name, bounds=bounds[name], gaps=gaps)
    # A column without a single value in training rows has no mean.
    if column.kind == "flag" or not len(sample):
        return ColumnEncoding(name, gaps=gaps)
    # All values of a column may be equal, and a division by 0 would make them NaN.
    deviation = float(sample.std()) or 1.0
    return ColumnEncoding(name, mean=float(sample.mean()), deviation=deviation, gaps=gaps)


def _encode_columns(
    encoding: Sequence[ColumnEncoding], columns: Mapping[str, _Column]
) -> dict[str, np.ndarray]:
    """Return the inputs that columns become, by name.

    Raises:
        ValueError: Two of the inputs have one name.
    """
    found: dict[str, np.ndarray] = {}
    for own in encoding:
        for name, values in _inputs_of(own, columns[own.column]):
            if name in found:
                raise ValueError(
                    f"inputs must be columns whose inputs have different names, got {name!r} "
                    f"twice, also from {own.column!r}. Rename this column."
                )
            found[name] = values
    return found


def _as_inputs(encoded: Mapping[str, np.ndarray]) -> Float32[np.ndarray, "n F"]:
    return np.stack(list(encoded.values()), axis=1).astype(np.float32)


def _inputs_of(
    encoding: ColumnEncoding, column: _Column
) -> Iterator[tuple[str, Shaped[np.ndarray, "n"]]]:
    """Yield the inputs that a column becomes, by name."""
    name = encoding.column
    if encoding.categories is None:
        # The values of gaps may be NaN, which no factor would make 0.
        yield name, np.where(column.missing, 0.0, _scaled(encoding, column.values))
    else:
        unlisted = ~column.missing
        for choice in encoding.categories:
            # The value of a gap, such as an empty name, might equal a category.
            chosen = ~column.missing & (column.values == choice)
            unlisted &= ~chosen
            yield f"{name}={choice}", chosen
        _warn_of_unlisted(name, column.values[unlisted])
    if encoding.gaps:
        yield f"{name} missing", column.missing


def _warn_of_unlisted(name: str, values: Shaped[np.ndarray, "n"]) -> None:
    """Log a warning if a column has values that are none of its categories."""
    if len(values):
        logging.getLogger("jaxfl").warning(
            "column %r has %d values that are none of its categories, such as %r. "
            "They become zeros",
            name,
            len(values),
            values[0],
        )


def _check_without_bounds(name: str, bounds: Mapping[str, Any]) -> None:
    if name in bounds:
        raise ValueError(
            f"bounds must be of columns of numbers that have no categories, got {name!r}. "
            "Give either its bounds or its categories."
        )


def _scaled(encoding: ColumnEncoding, values: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """Return the numbers of a column, clipped to bounds and scaled from -1 to 1.

    Without bounds, the mean is subtracted, and the result divided by the standard deviation.
    """
    if encoding.bounds is not None:
        low, high = encoding.bounds
        # Clipping is what makes the bounds hold for rows that nobody has seen.
        return 2 * (np.clip(values, low, high) - low) / (high - low) - 1
    return (values - encoding.mean) / encoding.deviation


def _distinct(argument: str, name: str, values: Shaped[np.ndarray, "n"]) -> list[str]:
    """Return the different names of a column, in alphabetical order.

    Args:
        argument: Argument of `from_frame` that chose the column, for errors.
        name: Name of the column.
        values: Values of the column that are no gaps.

    Raises:
        ValueError: There are more than 100 names.
    """
    found = sorted(set(values))
    if len(found) > _MOST_CATEGORIES:
        raise ValueError(
            f"{argument} must be numbers, or have at most {_MOST_CATEGORIES} different names, got "
            f"{name!r} with {len(found)}, such as {found[0]!r}. Convert numbers that were read as "
            "text, take another column, or list its `categories`."
        )
    return found


def _labels(name: str, column: _Column, classes: Sequence[Any] | None) -> Shaped[np.ndarray, "n"]:
    """Return a column of labels as whole numbers for classes, or as floating numbers.

    Args:
        name: Name of the column.
        column: Values of the column, without gaps.
        classes: The classes, in the order of their numbers. None sorts names, and leaves numbers as
            they are.
    """
    if column.missing.any():
        raise ValueError(
            f"label must have a value in every row, got {name!r} with {column.missing.sum()} gaps, "
            f"first in row {column.missing.argmax()}. Drop these rows."
        )
    if classes is None and column.kind == "name":
        classes = _distinct("label", name, column.values)
    if classes is not None:
        return _numbered(name, column.values, classes)
    # Floating numbers are no classes, but numbers to predict.
    if column.kind == "number":
        return column.values
    whole = column.values.astype(np.int64)
    # The kind is that of training rows.
    broken = column.values[whole != column.values]
    if len(broken):
        raise ValueError(
            f"label must have whole numbers in test rows, as in training rows, got {name!r} with "
            f"{broken[0]:g}. Give floating numbers in both, or classes in both."
        )
    return whole


def _numbered(
    name: str, values: Shaped[np.ndarray, "n"], classes: Sequence[Any]
) -> Int[np.ndarray, "n"]:
    """Return the position of each value among the classes, or raise a ValueError without one."""
    position = {choice: index for index, choice in enumerate(classes)}
    for value in values:
        _check_class(name, value, position)
    return np.array([*map(position.get, values)], np.int32)


def _check_class(name: str, value: Any, classes: Mapping[Any, int]) -> None:
    if value not in classes:
        raise ValueError(
            f"categories[{name!r}] must list all labels, got {value!r} besides "
            f"{', '.join(map(repr, classes))}. Add it, or drop its rows."
        )
