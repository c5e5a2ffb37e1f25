import io
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from jaxfl.data import from_arrays, load

module = sys.modules["jaxfl.data.load"]


@pytest.fixture(autouse=True)
def own_folders(monkeypatch, tmp_path):
    """Keep tests from the user's folders and from the network."""
    monkeypatch.setenv("JAXFL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("JAXFL_DATA_DIR", raising=False)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)

    def refuse(*args):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def prepare(
    root,
    name,
    splits,
    *,
    version="1.0.0",
    classes=10,
    claim=None,
    shape=None,
    file_format="array_record",
):
    """Write a TFDS folder of PNG images, with two files for each {split: [(image, label), ...]}."""
    from array_record.python.array_record_module import ArrayRecordWriter
    from tensorflow_datasets.proto import tf_example_pb2

    protos: Any = tf_example_pb2
    folder, base, *config = Path(root) / name / version, *name.split("/")
    folder.mkdir(parents=True)
    shape = shape or next(iter(splits.values()))[0][0].shape
    module_name = "tensorflow_datasets.core.features."
    image = {
        "image": {
            "dtype": "uint8",
            "shape": {"dimensions": [str(n) for n in shape]},
            "encodingFormat": "png",
        }
    }
    label = {"classLabel": {"numClasses": str(classes)}}
    features = {
        "image": image | {"pythonClassName": module_name + "image_feature.Image"},
        "label": label | {"pythonClassName": module_name + "class_label_feature.ClassLabel"},
    }
    top = {
        "featuresDict": {"features": features},
        "pythonClassName": module_name + "features_dict.FeaturesDict",
    }
    (folder / "features.json").write_text(json.dumps(top))
    infos = []
    for split, records in splits.items():
        halves = [records[: len(records) // 2], records[len(records) // 2 :]]
        for i, half in enumerate(halves):
            writer = ArrayRecordWriter(
                str(folder / f"{base}-{split}.{file_format}-0000{i}-of-00002"), "group_size:1"
            )
            for pixels, number in half:
                png, example = io.BytesIO(), protos.Example()
                Image.fromarray(pixels.squeeze()).save(png, "PNG")
                example.features.feature["image"].bytes_list.value.append(png.getvalue())
                example.features.feature["label"].int64_list.value.append(number)
                writer.write(example.SerializeToString())
            writer.close()
        lengths = [str((claim or {}).get(split, len(half))) for half in halves]
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        infos.append(
            {"name": split, "shardLengths": lengths, "numBytes": "1", "filepathTemplate": template}
        )
    info = {"name": base, "version": version, "fileFormat": file_format, "splits": infos}
    (folder / "dataset_info.json").write_text(
        json.dumps(info | ({"configName": config[0]} if config else {}))
    )
    return folder


def examples(count, first=0, shape=(8, 6, 3), seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 256, shape).astype(np.uint8), first + i % 10) for i in range(count)]


def splits(**options):
    return {"train": examples(20, seed=1, **options), "test": examples(10, seed=2, **options)}


def test_prepared_examples_come_back_exactly(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(module, "_READ_ROWS", 7)
    wanted = splits()
    prepare(tmp_path, "cifar100", wanted, classes=100)
    for _ in ("files", "cache"):
        data = load("cifar100", tmp_path)
        assert data.name == "cifar100"
        assert data.classes == 100
        assert data.train_inputs.dtype == np.uint8
        assert data.train_labels.dtype == np.int32
        assert np.array_equal(data.train_inputs, [image for image, _ in wanted["train"]])
        assert np.array_equal(data.test_inputs, [image for image, _ in wanted["test"]])
        assert data.train_labels.tolist() == [label for _, label in wanted["train"]]
        assert data.test_labels.tolist() == [label for _, label in wanted["test"]]
    assert "OpenCV" not in "".join(capfd.readouterr())


def test_emnist_is_upright_and_its_letters_start_at_0(tmp_path):
    letters = splits(first=1, shape=(28, 28, 1))
    prepare(tmp_path, "emnist/letters", letters, classes=37)
    data = load("emnist/letters", tmp_path)
    assert data.classes == 26
    assert data.train_labels.tolist() == [label - 1 for _, label in letters["train"]]
    assert np.array_equal(
        data.test_inputs, [image.transpose(1, 0, 2) for image, _ in letters["test"]]
    )
    prepare(tmp_path, "emnist/digits", splits(shape=(28, 28, 1)))
    plain = load("emnist", tmp_path)
    assert plain.name == "emnist/digits"
    assert plain.train_labels.min() == 0


def test_highest_version_counts(tmp_path):
    for version, seed in (("3.10.0", 5), ("3.9.0", 6), ("3.10.0.incompleteX", 7)):
        prepare(
            tmp_path,
            "mnist",
            {"train": examples(6, seed=seed), "test": examples(4)},
            version=version,
        )
    assert np.array_equal(load("mnist", tmp_path).train_inputs[0], examples(6, seed=5)[0][0])


def test_folders_are_looked_up_in_order(tmp_path, monkeypatch):
    folders = [
        tmp_path / "home" / "tensorflow_datasets",
        tmp_path / "tfds",
        tmp_path / "jaxfl",
        tmp_path / "argument",
    ]
    for i, folder in enumerate(folders):
        prepare(folder, "mnist", {"train": examples(6, seed=i), "test": examples(4)})

    def found(data_dir=None):
        first = load("mnist", data_dir).train_inputs[0]
        return [np.array_equal(first, examples(1, seed=i)[0][0]) for i in range(4)].index(True)

    assert found() == 0
    monkeypatch.setenv("TFDS_DATA_DIR", str(folders[1]))
    assert found() == 1
    monkeypatch.setenv("JAXFL_DATA_DIR", str(folders[2]))
    assert found() == 2
    assert found(folders[3]) == 3


def test_absent_data_end_in_one_message_with_the_remedy(tmp_path):
    start = time.perf_counter()
    with pytest.raises(ValueError, match="hold a prepared copy of 'svhn_cropped'") as caught:
        load("svhn_cropped", tmp_path)
    assert time.perf_counter() - start < 5
    assert str(tmp_path / "svhn_cropped") in str(caught.value)
    remedy = f"tfds.builder('svhn_cropped', data_dir='{tmp_path}', file_format='array_record').download_and_prepare()"
    assert remedy in str(caught.value)
    with pytest.raises(ValueError, match=r"data_dir must .*home/tensorflow_datasets'"):
        load("emnist")
    with pytest.raises(ValueError, match=r"name must be one of 'digits', .* got 'imagenet'"):
        load("imagenet")


def cut(share):
    def damage(folder):
        file = folder / "mnist-test.array_record-00001-of-00002"
        os.truncate(file, int(file.stat().st_size * share))

    return damage


def overwrite(folder):
    file = folder / "mnist-test.array_record-00001-of-00002"
    content = bytearray(file.read_bytes())
    content[200:400] = bytes(200)
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut(0), "mnist-test.array_record-00001-of-00002 is truncated"),
        (cut(0.5), "mnist-test.array_record-00001-of-00002 is truncated"),
        (cut(0.999999), "mnist-test.array_record-00001-of-00002 is truncated"),
        (overwrite, "mnist-test.array_record-00001-of-00002"),
        (
            lambda folder: (folder / "mnist-train.array_record-00000-of-00002").unlink(),
            "00000-of-00002 is missing",
        ),
        (lambda folder: (folder / "features.json").unlink(), "must hold a usable copy"),
        (lambda folder: (folder / "dataset_info.json").write_text("{"), "JSON"),
        (lambda folder: (folder / "dataset_info.json").write_text("{}"), "must hold a usable copy"),
    ],
)
def test_damaged_copies_are_named(tmp_path, damage, message):
    folder = prepare(tmp_path, "mnist", splits())
    load("mnist", tmp_path)
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load("mnist", tmp_path)
    assert str(folder) in str(caught.value)
    assert "download_and_prepare" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"claim": {"test": 6}}, "holds 5 examples, dataset_info.json says 6"),
        ({"claim": {"train": 9}}, "holds 10 examples, dataset_info.json says 9"),
        ({"file_format": "tfrecord"}, "tfrecord format, not array_record"),
        (
            {"shape": (28, 28, 1)},
            r"example 0 is uint8 \(8, 6, 3\), dataset_info says uint8 \(28, 28, 1\)",
        ),
        ({"classes": 9}, "train_labels must be from 0 to classes - 1 = 8, got 9"),
    ],
)
def test_foreign_copies_are_named(tmp_path, options, message):
    prepare(tmp_path, "mnist", splits(), **options)
    with pytest.raises(ValueError, match=message):
        load("mnist", tmp_path)


def test_missing_split_is_named(tmp_path):
    prepare(tmp_path, "mnist", {"train": examples(6)})
    with pytest.raises(ValueError, match="lists no split 'test'"):
        load("mnist", tmp_path)


def test_cache_is_read_instead_of_the_files_until_they_change(tmp_path, monkeypatch):
    folder = prepare(tmp_path, "mnist", splits())
    first = load("mnist", tmp_path)
    (cache,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_read_prepared", lambda *_: pytest.fail("the files were read"))
        again = load("mnist", tmp_path)
    assert all(np.array_equal(one, two) for one, two in zip(first[:4], again[:4], strict=True))
    again.train_inputs[:] = 0
    assert load("mnist", tmp_path).train_inputs.any()
    reads = []
    read = module._read_prepared
    monkeypatch.setattr(
        module, "_read_prepared", lambda *arguments: reads.append(1) or read(*arguments)
    )
    os.utime(folder / "mnist-test.array_record-00001-of-00002", (1, 1))
    load("mnist", tmp_path)
    assert reads == [1]
    assert len(list((tmp_path / "cache").iterdir())) == 2
    os.truncate(cache, cache.stat().st_size // 2)
    assert module._read_cache(cache.name) is None


def test_damaged_cache_is_replaced(tmp_path):
    prepare(tmp_path, "mnist", splits())
    first = load("mnist", tmp_path)
    (cache,) = (tmp_path / "cache").iterdir()
    content = bytearray(cache.read_bytes())
    content[1000] ^= 1
    cache.write_bytes(content)
    assert np.array_equal(load("mnist", tmp_path).train_inputs, first.train_inputs)
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".npz"]
    assert module._read_cache(cache.name) is not None


def test_unwritable_cache_is_no_error(tmp_path, monkeypatch):
    prepare(tmp_path, "mnist", splits())
    (tmp_path / "file").write_text("not a folder")
    for cache in (str(tmp_path / "file" / "cache"), "~no_such_user/cache"):
        monkeypatch.setenv("JAXFL_CACHE_DIR", cache)
        assert len(load("mnist", tmp_path).train_labels) == 20
    monkeypatch.setenv("JAXFL_CACHE_DIR", str(tmp_path / "cache"))

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert len(load("mnist", tmp_path).train_labels) == 20
    assert list((tmp_path / "cache").iterdir()) == []


def test_digits_are_all_there_and_stratified():
    source: Any = load_digits()
    data = load("digits")
    images = np.concatenate([data.train_inputs, data.test_inputs])[..., 0]
    assert images.shape == (1797, 8, 8)
    assert images.max() == 255
    both = [
        (image, label)
        for image, label in zip(images, np.r_[data.train_labels, data.test_labels], strict=True)
    ]
    ours = sorted((label, np.rint(image / 255 * 16).tolist()) for image, label in both)
    theirs = sorted(
        (label, image.tolist()) for image, label in zip(source.images, source.target, strict=True)
    )
    assert ours == theirs
    share = np.bincount(data.test_labels) / np.bincount(source.target)
    assert np.abs(share - 0.2).max() < 0.003
    assert all(
        np.array_equal(one, two) for one, two in zip(data[:4], load("digits")[:4], strict=True)
    )


@pytest.mark.slow
def test_import_reads_no_dataset_library():
    code = """if True:
        import sys
        import jaxfl.data
        heavy = {"tensorflow", "tensorflow_datasets", "array_record"} & set(sys.modules)
        assert not heavy, heavy"""
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


INPUTS, LABELS = np.zeros((4, 3, 3, 1), np.float64), np.array([0, 2, 1, 0])


def test_own_arrays():
    data = from_arrays(INPUTS, LABELS, INPUTS[:2], LABELS[:2], name="mine")
    assert data.train_inputs.dtype == data.test_inputs.dtype == np.float32
    assert data.train_labels.dtype == data.test_labels.dtype == np.int32
    assert data.name == "mine"
    assert data.classes == 3
    assert from_arrays(INPUTS, LABELS, INPUTS[:1], np.array([4])).classes == 5
    assert from_arrays(INPUTS, LABELS, INPUTS[:0], LABELS[:0], classes=7).classes == 7
    images = INPUTS.astype(np.uint8)
    assert from_arrays(images, LABELS, images, LABELS).train_inputs is images


def spoil(value):
    inputs = INPUTS.copy()
    inputs[2, 1, 1, 0] = value
    return inputs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train_labels": LABELS[:3]},
            r"train_labels must be a vector of 4 whole numbers, got shape \(3,\)",
        ),
        ({"test_labels": LABELS[:, None]}, r"test_labels must be .* got shape \(4, 1\)"),
        (
            {"train_labels": LABELS * 1.0},
            r"train_labels, \('float32', \(\)\), got .*astype\(np.int32\)",
        ),
        ({"train_labels": LABELS - 1}, "train_labels must be .* got -1"),
        (
            {"test_labels": LABELS + 1, "classes": 3},
            "test_labels must be from 0 to classes - 1 = 2, got 3",
        ),
        ({"train_labels": LABELS + 2**40}, "train_labels must be .* got 1099511627776"),
        ({"classes": 0}, "classes must be .* got 0"),
        (
            {"train_inputs": spoil(np.nan)},
            "train_inputs must be finite, got NaN or infinite values in 1 rows, first in row 2",
        ),
        ({"test_inputs": spoil(np.inf)}, "test_inputs must be finite, got NaN"),
        ({"train_inputs": spoil(1e300)}, "train_inputs must be finite"),
        ({"train_inputs": INPUTS.astype(np.complex64)}, "train_inputs must be .* got complex64"),
        (
            {"train_inputs": INPUTS.astype(np.int64) + 2**31},
            "train_inputs must be whole numbers of 32 bits, got 2147483648",
        ),
        ({"train_inputs": INPUTS[:, :0]}, r"train_inputs must be .* got shape \(4, 0, 3, 1\)"),
        ({"train_inputs": INPUTS[:, 0, 0, 0]}, r"train_inputs must be .* got shape \(4,\)"),
        (
            {"test_inputs": INPUTS[:, :2]},
            r"test_inputs must have .* got \('float32', \(2, 3, 1\)\)",
        ),
        ({"test_inputs": INPUTS.astype(np.uint8)}, "test_inputs must have examples of the dtype"),
        (
            {"train_inputs": INPUTS[:0], "train_labels": LABELS[:0]},
            r"train_inputs must have at least one example, got shape \(0, 3, 3, 1\)",
        ),
    ],
)
def test_wrong_arrays_are_named(change, message):
    arguments = {
        "train_inputs": INPUTS,
        "train_labels": LABELS,
        "test_inputs": INPUTS,
        "test_labels": LABELS,
    }
    with pytest.raises(ValueError, match=message):
        from_arrays(**(arguments | change))


def test_real_mnist_has_its_known_counts_and_moments(tfds_dir):
    data = load("mnist", tfds_dir)
    assert data.train_inputs.shape == (60_000, 28, 28, 1)
    assert np.bincount(data.train_labels).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    assert np.bincount(data.test_labels).tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    # The mean and standard deviation that everybody normalises MNIST with.
    assert data.train_inputs.mean() / 255 == pytest.approx(0.1307, abs=5e-5)
    assert data.train_inputs.std() / 255 == pytest.approx(0.3081, abs=5e-5)


def test_real_cifar10_has_its_known_counts_and_moments(tfds_dir):
    start = time.perf_counter()
    data = load("cifar10", tfds_dir)
    cold = time.perf_counter() - start
    assert np.bincount(data.train_labels).tolist() == [5000] * 10
    assert np.bincount(data.test_labels).tolist() == [1000] * 10
    means = data.train_inputs.mean((0, 1, 2)) / 255
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
    start = time.perf_counter()
    again = load("cifar10", tfds_dir)
    assert time.perf_counter() - start < cold / 3
    assert np.array_equal(again.train_inputs, data.train_inputs)
    assert np.array_equal(again.test_labels, data.test_labels)
