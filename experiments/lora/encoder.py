"""A classifier on all-MiniLM-L6-v2, whole or from some layer on."""

import flax.linen as nn
from jax import Array
from jaxtyping import Float

from jaxfl.data.minilm import LAYERS, Embeddings, Layer


class Classifier(nn.Module):
    """The encoder, whole or from some layer on, the mean over tokens, and a dense layer.

    All sequences of a batch have one length: there is no padding, and no mask.

    Args:
        classes: K.
        first: The layer to begin with, whose input is what comes out of the layer before. 0 takes tokens.
    """

    classes: int
    first: int = 0

    def setup(self) -> None:
        """Make the layers."""
        if not self.first:
            self.embeddings = Embeddings()
        self.layer = [Layer(name=f"layer_{i}") for i in range(self.first, LAYERS)]
        self.head = nn.Dense(self.classes)

    def extract(self, x: Array) -> Float[Array, "B d"]:
        """Return what the head sees."""
        x = x if self.first else self.embeddings(x)
        for layer in self.layer:
            x = layer(x)
        return x.mean(1)

    def classify(self, features: Float[Array, "B d"]) -> Float[Array, "B K"]:
        """Return logits of features."""
        return self.head(features)

    def __call__(self, x: Array) -> Float[Array, "B K"]:
        """Return logits."""
        return self.classify(self.extract(x))
