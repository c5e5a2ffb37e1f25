"""Gaussian noise shaped like an update."""

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Key

from jaxfl.types import Tree


def add_gaussian(key: Key[Array, ""], tree: Tree, std: Float[Array, ""]) -> Tree:
    """Add independent N(0, std^2) to every coordinate; `std` is absolute, not a ratio of the clip bound.

    One draw for the flattened tree: a draw per leaf would compile several times as long.
    """
    flat, unravel = ravel_pytree(tree)
    return unravel(flat + std.astype(flat.dtype) * jax.random.normal(key, flat.shape, flat.dtype))
