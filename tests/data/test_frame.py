"""Data frames, compared with scikit-learn, closed forms, and the same columns without pandas."""

import datetime
import json
import re
from typing import Any

import numpy as np
import pytest

from jaxfl.data import ColumnEncoding, by_owner, encode_frame, from_frame, make_clients

RNG = np.random.default_rng(0)
N = 60
AGE = RNG.normal(50, 10, N)
WARD = RNG.choice(["east", "north", "west"], N)
CLINIC = RNG.choice(["Aarau", "Bern", "Chur"], N)
SICK = RNG.random(N) < 0.3
FRAME = {"clinic": CLINIC, "age": AGE, "ward": WARD, "sick": SICK}


def test_columns_are_encoded_as_scikit_learn_encodes_them():
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    data = from_frame(FRAME, label="sick", owner="clinic", test=0.2)
    rows = [np.flatnonzero(age == AGE)[0] for age in _ages(data, "train")]
    trained = np.array(rows)
    tested = np.setdiff1d(np.arange(N), trained)
    scaler = preprocessing.StandardScaler().fit(AGE[trained, None])
    one_hot = preprocessing.OneHotEncoder(sparse_output=False).fit(WARD[trained, None])
    for found, rows in ((data.train_inputs, trained), (data.test_inputs, tested)):
        expected = [scaler.transform(AGE[rows, None]), one_hot.transform(WARD[rows, None])]
        np.testing.assert_allclose(found, np.concatenate(expected, axis=1), atol=1e-5)
    assert data.columns == ("age", "ward=east", "ward=north", "ward=west")
    np.testing.assert_array_equal(data.train_labels, SICK[trained])
    np.testing.assert_array_equal(data.owner, CLINIC[trained])
    np.testing.assert_array_equal(data.test_owner, CLINIC[tested])
    assert data.classes == 2


def _ages(data, split):
    """Return the ages of the training rows, by the draw that splits the rows of each clinic."""
    drawn = np.random.default_rng(0).random(N)
    for clinic in np.unique(CLINIC):
        rows = np.flatnonzero(clinic == CLINIC)
        count = max(1, round(0.2 * len(rows)))
        drawn[rows[np.argsort(drawn[rows])[:count]]] = -1
    assert len(data.test_labels) == (drawn < 0).sum()
    return AGE[drawn >= 0]


def test_each_owner_tests_its_share_and_keeps_a_row():
    owner = ["a"] * 10 + ["b"] * 2 + ["c"]
    frame = {"x": np.arange(13.0), "y": np.zeros(13, int), "who": owner}
    data: Any = from_frame(frame, label="y", owner="who", test=0.3, seed=1)
    counts = {name: list(data.test_owner).count(name) for name in "abc"}
    assert counts == {"a": 3, "b": 1, "c": 0}
    train, test = by_owner(data.owner, data.test_owner)
    clients = make_clients(data, train, test)
    assert clients.train_size.tolist() == [7, 1, 1]
    assert clients.test_size.tolist() == [3, 1, 0]
    other = from_frame(frame, label="y", owner="who", test=0.3, seed=2)
    assert other.test_inputs.tolist() != data.test_inputs.tolist()


def test_gaps_become_zeros_with_a_mark():
    frame = {
        "x": [1.0, None, 3.0, float("nan")],
        "on": [True, None, False, True],
        "name": ["b", "", None, "a"],
        "y": [0.5, 1.0, 2.0, 3.0],
    }
    data = from_frame(frame, label="y")
    assert data.columns == (
        "x",
        "x missing",
        "on",
        "on missing",
        "name=a",
        "name=b",
        "name missing",
    )
    np.testing.assert_array_equal(
        data.train_inputs.T,
        [
            [-1, 0, 1, 0], [0, 1, 0, 1],
            [1, 0, 0, 1], [0, 1, 0, 0],
            [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 1, 0],
        ],
    )  # fmt: skip
    assert data.classes == 0
    assert data.train_labels.dtype == np.float32


def test_public_bounds_and_categories_make_an_encoding_that_no_row_changes():
    public = {"bounds": {"age": (0, 100)}, "categories": {"ward": ["x", "y"], "n": [1, 2]}}
    columns = ("age", "age missing", "ward=x", "ward=y", "ward missing", "n=1", "n=2", "n missing")
    first = {"age": [25.0, 120.0], "ward": ["x", "z"], "n": [2, 3], "y": [0, 1]}
    other = {"age": [25.0, None], "ward": ["x", None], "n": [2, None], "y": [0, 1]}
    data = from_frame(first, label="y", **public)
    assert data.columns == columns
    np.testing.assert_array_equal(
        data.train_inputs, [[-0.5, 0, 1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    )
    changed = from_frame(other, label="y", **public)
    assert changed.columns == columns
    np.testing.assert_array_equal(changed.train_inputs[0], data.train_inputs[0])


def test_statistics_are_those_of_training_rows():
    frame = {"x": [0.0, 2.0, 2.0, 4.0], "name": ["a", "b", "a", "b"], "y": [0, 1, 0, 1]}
    test = {"x": [1000.0, 2.0], "name": ["c", "a"], "y": [1, 1]}
    data = from_frame(frame, label="y", test=test)
    np.testing.assert_allclose(data.train_inputs[:, 0], np.array([-2, 0, 0, 2]) / np.sqrt(2))
    np.testing.assert_allclose(data.test_inputs, [[998 / np.sqrt(2), 0, 0], [0, 1, 0]])
    alone = from_frame(frame, label="y")
    np.testing.assert_array_equal(data.train_inputs, alone.train_inputs)


def test_further_rows_are_encoded_as_those_of_the_dataset():
    frame = {
        "x": [1.0, None, 4.0, 2.0],
        "n": [3, 5, 5, 8],
        "on": [True, None, False, True],
        "age": [40.0, 60.0, None, 200.0],
        "name": ["b", "", None, "a"],
        "grade": [1, 2, 3, 2],
        "y": [0.5, 1.0, 2.0, 3.0],
    }
    bounds, categories = {"age": (0, 100)}, {"grade": [1, 2, 3]}
    data = from_frame(frame, label="y", test=0.5, bounds=bounds, categories=categories)
    text = json.dumps([own._asdict() for own in data.encoding])
    read = [ColumnEncoding(**own) for own in json.loads(text)]
    of_all = np.concatenate([data.train_inputs, data.test_inputs])
    unlabelled = {name: frame[name] for name in frame if name != "y"}
    for encoding in (data.encoding, read):
        found = encode_frame(unlabelled, encoding)
        assert found.dtype == np.float32
        labels = np.concatenate([data.train_labels, data.test_labels])
        order = [frame["y"].index(label) for label in labels]
        np.testing.assert_array_equal(found[order], of_all)
        new = {name: [None] for name in unlabelled} | {"name": ["c"], "n": [8]}
        row = dict(zip(data.columns, encode_frame(new, encoding)[0].tolist(), strict=True))
        numbers = [
            n for n, label in zip(frame["n"], frame["y"], strict=True) if label in data.train_labels
        ]
        assert row.pop("n") == pytest.approx((8 - np.mean(numbers)) / np.std(numbers))
        marked = {name for name, value in row.items() if value}
        assert marked == {"x missing", "on missing", "age missing", "grade missing"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"age": ["old"]}, r"frame\['age'\] must have numbers, as .* got names"),
        ({"ward": [3]}, r"frame\['ward'\] must have names, as .* got numbers"),
        ({"ward": [[1, 2]]}, "must be a vector"),
    ],
)
def test_further_rows_have_the_same_kinds(change, message):
    encoding = from_frame(FRAME, label="sick", owner="clinic").encoding
    row = {"age": [50.0], "ward": ["east"]}
    with pytest.raises(ValueError, match=message):
        encode_frame(row | change, encoding)
    with pytest.raises(
        ValueError, match=r"frame must have the columns of encoding.*without 'ward'"
    ):
        encode_frame({"age": [50.0]}, encoding)


def test_labels_are_numbered_by_name_or_by_the_given_order():
    frame = {"x": [0.0, 1.0, 2.0], "y": ["no", "yes", "no"], "stars": [1, 5, 3]}
    assert from_frame(frame, label="y", inputs=["x"]).train_labels.tolist() == [0, 1, 0]
    order = {"y": ["yes", "no"]}
    found = from_frame(frame, label="y", inputs=["x"], categories=order)
    assert found.train_labels.tolist() == [1, 0, 1]
    assert from_frame(frame, label="stars", inputs=["x"]).classes == 6
    five = from_frame(frame, label="stars", inputs=["x"], categories={"stars": range(1, 6)})
    assert five.train_labels.tolist() == [0, 4, 2]


def test_frames_of_pandas_give_what_their_columns_give():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(FRAME, index=RNG.permutation(N))
    frame["bed"] = pandas.array([None, *range(N - 1)], dtype="Int64")
    frame["urgent"] = pandas.array([None, *[True, False] * N][:N], dtype="boolean")
    frame["ward"] = frame["ward"].astype("category")
    frame.loc[frame.index[3], ["age", "ward"]] = None
    columns = {column: frame[column].tolist() for column in frame}
    found, expected = (
        from_frame(given, label="sick", owner="clinic", test=0.2) for given in (frame, columns)
    )
    assert found.encoding == expected.encoding
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert {"age missing", "ward missing", "bed missing", "urgent missing"} <= {*found.columns}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"day": [datetime.date(2020, 1, 1)] * 3}, "frame['day'] must have numbers.*days"),
        ({"x": [1.0, "a", 2.0]}, "frame['x'] must have numbers.*only one of these kinds, got 'a'"),
        ({"x": [1.0, np.inf, 2.0]}, "frame['x'] must have finite numbers"),
        ({"x": [1, 10**400, 2]}, "frame['x'] must have numbers below 1.8e308, got a larger one"),
        ({"x": [[1], [2, 3], []]}, "frame['x'] must have numbers.*only one of these kinds, got [1]"),
        ({"x": np.zeros((3, 2))}, "frame['x'] must be a vector, got shape (3, 2)"),
        ({"y": [0, None, 1]}, "label must have a value in every row, got 'y' with 1 gaps, first in row 1"),
        ({"who": ["a", None, "b"]}, "frame['who'] must be all names, or all whole numbers, got None in row 1"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_encoded_are_named_with_a_remedy(change, message):
    frame = {"x": [0.0, 1.0, 2.0], "y": [0, 1, 0], "who": [1, 2, 3]} | change
    pattern = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises((ValueError, TypeError), match=pattern):
        from_frame(frame, label="y", owner="who")


def test_identifiers_are_no_categories():
    frame = {"id": [f"p{i}" for i in range(101)], "y": [0] * 101}
    with pytest.raises(ValueError, match=r"inputs must .* 100 different names, got 'id' with 101"):
        from_frame(frame, label="y")
    with pytest.raises(ValueError, match=r"label must .* 100 different names, got 'id' with 101"):
        from_frame(frame, label="id")


def test_columns_whose_inputs_have_one_name_are_named():
    frame = {"ward": ["x", "y"], "ward=x": [7.0, 2.0], "y": [0, 1]}
    with pytest.raises(ValueError, match=r"got 'ward=x' twice, also from 'ward=x'. Rename"):
        from_frame(frame, label="y")
    gaps = {"age": [1.0, None], "age missing": [0, 1], "y": [0, 1]}
    with pytest.raises(ValueError, match=r"got 'age missing' twice, also from 'age missing'"):
        from_frame(gaps, label="y")


def test_values_that_are_no_categories_are_logged(caplog):
    frame = {"ward": ["x", "y", "z", None], "y": [0, 1, 0, 1]}
    data: Any = from_frame(frame, label="y", categories={"ward": ["x", "y"]})
    said = "column 'ward' has 1 values that are none of its categories, such as 'z'"
    assert said in caplog.text
    caplog.clear()
    encode_frame({"ward": ["x", "y", None]}, data.encoding)
    assert not caplog.text
    assert encode_frame({"ward": ["q", "z"]}, data.encoding).tolist() == [[0.0] * 3] * 2
    assert "has 2 values" in caplog.text


def test_labels_of_tests_are_whole_numbers_if_those_of_training_are():
    frame = {"x": [1.0, 2.0], "y": [0, 1]}
    with pytest.raises(ValueError, match=r"label must have whole numbers .* got 'y' with 0\.5"):
        from_frame(frame, label="y", test={"x": [1.0], "y": [0.5]})
    data: Any = from_frame(frame, label="y", test={"x": [1.0], "y": [1.0]})
    assert data.test_labels.tolist() == [1]


def test_a_frame_without_inputs_is_named():
    with pytest.raises(
        ValueError, match=r"frame must have a column of inputs.*got only 'y', 'who'"
    ):
        from_frame({"y": [0, 1], "who": [1, 2]}, label="y", owner="who")


def test_names_that_only_tests_have_become_zeros_where_training_rows_are_gaps():
    test = {"ward": ["east", None], "y": [0, 1]}
    data: Any = from_frame({"ward": [None, None], "y": [0, 1]}, label="y", test=test)
    assert data.columns == ("ward missing",)
    assert data.test_inputs.tolist() == [[0.0], [1.0]]
    known = {"ward": ["east"]}
    data = from_frame({"ward": [None, None], "y": [0, 1]}, label="y", test=test, categories=known)
    assert data.columns == ("ward=east", "ward missing")
    assert data.test_inputs.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_json_holds_categories_that_were_numbers_of_numpy():
    frame = {"ward": [1, 2, 2], "y": [0, 1, 1]}
    data: Any = from_frame(frame, label="y", categories={"ward": list(np.array([1, 2]))})
    stored = json.loads(json.dumps([encoding._asdict() for encoding in data.encoding]))
    restored = [ColumnEncoding(**values) for values in stored]
    np.testing.assert_array_equal(encode_frame(frame, restored), data.train_inputs)


def test_kinds_of_training_and_test_columns_agree():
    with pytest.raises(ValueError, match=r"test\['x'\] must have values like frame\['x'\]"):
        from_frame({"x": [1.0], "y": [0]}, label="y", test={"x": ["a"], "y": [0]})
    gaps = {"x": [None], "y": [0]}
    assert from_frame({"x": ["a"], "y": [0]}, label="y", test=gaps).test_inputs.tolist() == [[0, 1]]
