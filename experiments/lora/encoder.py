"""A classifier on all-MiniLM-L6-v2, which takes tokens or the input of a later layer."""

import flax.linen as nn
from jax import Array
from jaxtyping import Float

from jaxfl.data.minilm import LAYERS, Embeddings, Layer


class Classifier(nn.Module):
    """The encoder from a first layer on, the mean over tokens, and a dense layer.

    All sequences of a batch have the same length, so there is no padding and no mask.

    Args:
        classes: K, number of classes.
        first: Index of the first layer, which takes the output of the layer before. 0 takes tokens.
    """

    classes: int
    first: int = 0

    def setup(self) -> None:
        """Make the layers from `first` on, and the embeddings if `first` is 0."""
        if not self.first:
            self.embeddings = Embeddings()
        self.layer = [Layer(name=f"layer_{i}") for i in range(self.first, LAYERS)]
        self.head = nn.Dense(self.classes)

    def extract(self, x: Array) -> Float[Array, "B d"]:
        """Return the features, which are the input of the head, from tokens or a layer's input."""
        x = x if self.first else self.embeddings(x)
        for layer in self.layer:
            x = layer(x)
        return x.mean(1)

    def classify(self, features: Float[Array, "B d"]) -> Float[Array, "B K"]:
        """Return the logits of features, by the head."""
        return self.head(features)

    def __call__(self, x: Array) -> Float[Array, "B K"]:
        """Return the logits of tokens, or of inputs of layer `first`."""
        return self.classify(self.extract(x))
