"""What an encoder is: a fixed public network that maps a picture or a text to numbers."""

from collections.abc import Callable
from typing import NamedTuple

from jax import Array
from jaxtyping import Float

from jaxfl.types import Params


class Encoder(NamedTuple):
    """A fixed public network that maps a picture, or the tokens of a text, to numbers.

    Features are cached by name and version, so change the version with anything that changes them.
    """

    name: str
    """For reports, and for the cache."""
    version: str
    """Of the weights and of what is computed with them."""
    width: int
    """F, number of features."""
    load: Callable[[], Params]
    """Return the weights. It is called only where features are not in the cache."""
    apply: Callable[[Params, Array], Float[Array, "B F"]]
    """Compute features of pictures `[B, H, W, 3]` of numbers from 0 to 255, or of tokens `[B, L]`."""
    tokens: int = 0
    """Number of tokens that the encoder of a text knows. 0 stands for an encoder of pictures."""
    longest: int = 0
    """Largest length L of an encoder of texts."""
