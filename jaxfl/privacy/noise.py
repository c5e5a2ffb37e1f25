"""Gaussian noise shaped like an update."""

import jax
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl.types import Tree


def add_gaussian(key: Key[Array, ""], tree: Tree, std: Float[Array, ""]) -> Tree:
    """Add independent N(0, std^2) to every coordinate; `std` is absolute, not a ratio of the clip bound."""
    noise = optax.tree.random_like(key, tree, jax.random.normal)
    return jax.tree.map(lambda leaf, n: leaf + std.astype(leaf.dtype) * n, tree, noise)
