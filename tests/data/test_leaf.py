"""Files in LEAF's format, and datasets of the package `datasets`."""

import json
from typing import Any

import numpy as np
import pytest

from jaxfl.data import by_owner, from_huggingface, from_leaf
from jaxfl.data.leaf import LEAF_CHARACTERS


def write(folder, users, name="all_data_0.json"):
    folder.mkdir(parents=True, exist_ok=True)
    counts = [len(own["y"]) for own in users.values()]
    whole = {"users": list(users), "num_samples": counts, "user_data": users}
    (folder / name).write_text(json.dumps(whole))


def test_femnist_becomes_pictures_with_writers(tmp_path):
    pixels = np.arange(784) / 784
    write(tmp_path / "train", {"f0_1": {"x": [pixels.tolist()] * 2, "y": [3, 61]}})
    write(tmp_path / "train", {"f0_2": {"x": [[1.0] * 784], "y": [0]}}, "all_data_1.json")
    write(tmp_path / "test", {"f0_2": {"x": [[0.0] * 784], "y": [5]}})
    data: Any = from_leaf(tmp_path)
    assert data.train_inputs.shape == (3, 28, 28, 1)
    np.testing.assert_allclose(data.train_inputs[0].reshape(-1), pixels, atol=1e-6)
    assert data.train_labels.tolist() == [3, 61, 0]
    assert data.classes == 62
    train, test = by_owner(data.owner, data.test_owner)
    assert [rows.tolist() for rows in train] == [[0, 1], [2]]
    assert [rows.tolist() for rows in test] == [[], [0]]


def test_shakespeare_becomes_numbers_of_characters(tmp_path):
    write(tmp_path, {"PLAY_ROLE": {"x": ["To be", "o be~"], "y": [",", " "]}})
    data = from_leaf(tmp_path)
    read = ["".join(LEAF_CHARACTERS[i] for i in row) for row in data.train_inputs]
    assert read == ["To be", "o be "]
    assert [LEAF_CHARACTERS[i] for i in data.train_labels] == [",", " "]
    assert len(LEAF_CHARACTERS) == 80
    assert not len(data.test_labels)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "without a label for each input"),
        ("[]", "without a label for each input"),
        ('{"user_data": {"a": {"x": [[1]], "y": []}}}', "without a label for each input"),
        ('{"user_data": {"a": {"x": [["w", "v"]], "y": [1]}}}', "give their tokens to from_lists"),
    ],
)
def test_other_files_are_named_with_a_remedy(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        from_leaf(tmp_path)


def test_a_folder_without_files_says_how_to_make_them(tmp_path):
    with pytest.raises(ValueError, match=r"got .* without one. Run LEAF's preprocess.sh"):
        from_leaf(tmp_path)


def test_datasets_on_disk_become_pictures_with_owners(tmp_path):
    datasets = pytest.importorskip("datasets")
    images = pytest.importorskip("PIL.Image")
    pixels = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3)
    columns = {
        "who": ["b", "a", "b", "c"],
        "image": [images.fromarray(picture) for picture in pixels],
        "kind": ["dog", "cat", "dog", "owl"],
    }
    features = datasets.Features(
        {
            "who": datasets.Value("string"),
            "image": datasets.Image(),
            "kind": datasets.Value("string"),
        }
    )
    whole = datasets.Dataset.from_dict(columns, features=features)
    splits = datasets.DatasetDict({"train": whole.select([0, 1, 2]), "test": whole.select([3])})
    splits.save_to_disk(str(tmp_path))
    stored = datasets.load_from_disk(str(tmp_path))
    data = from_huggingface(stored, owner="who", input="image", label="kind")
    np.testing.assert_array_equal(data.train_inputs[..., 0], pixels[:3])
    assert data.train_inputs.dtype == np.uint8
    assert data.train_labels.tolist() == [1, 0, 1]
    assert data.test_labels.tolist() == [2]
    assert data.owner is not None
    assert data.owner.tolist() == ["b", "a", "b"]
    single = from_huggingface(stored["train"], owner="who", input="image", label="kind")
    assert not len(single.test_labels)


def test_an_empty_split_of_tests_is_as_good_as_none():
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"who": [1, 2], "x": [0.5, 1.5], "y": [0, 1]})
    splits = {"train": whole, "test": whole.select([])}
    data = from_huggingface(splits, owner="who", input="x", label="y")
    assert data.train_labels.tolist() == [0, 1]
    assert data.test_inputs.shape == (0, 1)
    with pytest.raises(ValueError, match=r"a split with examples, got 'test' without any. Choose"):
        from_huggingface(splits, train="test", owner="who", input="x", label="y")


def test_single_numbers_and_pictures_of_one_colour_get_an_axis():
    datasets = pytest.importorskip("datasets")
    pixels = np.arange(12.0).reshape(3, 2, 2) / 12
    for single, picture in (([0.5, 1.5, 2.5], pixels), ([0, 1, 2], pixels > 0.5)):
        columns = {"who": ["a", "b", "b"], "y": [0, 1, 1]}
        whole = datasets.Dataset.from_dict(
            columns | {"single": single, "picture": np.asarray(picture).tolist()}
        )
        numbers = from_huggingface(whole, owner="who", input="single", label="y")
        assert np.asarray(numbers.train_inputs).tolist() == [[value] for value in single]
        pictures = from_huggingface(whole, owner="who", input="picture", label="y")
        np.testing.assert_allclose(pictures.train_inputs[..., 0], picture, rtol=1e-6)


def test_texts_and_lists_of_several_lengths_name_what_reads_them():
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"who": [1], "text": ["to be"], "y": [0]})
    with pytest.raises(
        TypeError, match=r"got 'text' with texts such as 'to be'.*minilm_tokens or from_lists"
    ):
        from_huggingface(whole, owner="who", input="text", label="y")
    with pytest.raises(ValueError, match="owner must name a column of the dataset, got 'user'"):
        from_huggingface(whole, owner="user", input="text", label="y")
    ragged = datasets.Dataset.from_dict({"who": [1, 2], "x": [[1], [1, 2]], "y": [0, 1]})
    with pytest.raises(ValueError, match=r"input must name .* of one shape, got 'x' with shapes"):
        from_huggingface(ragged, owner="who", input="x", label="y")
