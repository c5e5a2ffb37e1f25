"""Encoders: fixed public networks that map a picture or a text to numbers."""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array
from jaxtyping import Float

from jaxfl.types import Params


class Encoder(NamedTuple):
    """Fixed public network that maps a picture, or the tokens of a text, to F features.

    Features are cached by inputs, size of pictures, name, version and width. Give another version
    after any change that affects features.
    """

    name: str
    """Name of the encoder in reports and in the cache."""
    version: str
    """Version of the weights and of the computation with them."""
    width: int
    """Number F of features."""
    load: Callable[[], Params]
    """Function that returns the weights. It is called only if features are not in the cache."""
    apply: Callable[[Params, Array], Float[Array, "B F"]]
    """Function that computes the features of a batch.

    The batch holds pictures `[B, H, W, 3]` of numbers from 0 to 255, or tokens `[B, L]`.
    """
    tokens: int = 0
    """Number of tokens that an encoder of texts knows. 0 stands for an encoder of pictures."""
    longest: int = 0
    """Largest length L of a text's tokens. An encoder of pictures has 0."""
