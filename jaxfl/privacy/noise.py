"""Keys of the noise, and Gaussian noise shaped like an update.

A key is one of JAX's, or a pair of them, whose streams are taken together: 128 secret bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Int, Key, UInt32

from jaxfl.types import Tree


def derive(key: Key[Array, "*S"], *numbers: Int[Array, ""] | int) -> Key[Array, "*S"]:
    """A key of its own for some numbers, such as round, purpose and client; of a secret pair, a pair."""
    for number in numbers:
        key = jax.vmap(jax.random.fold_in, (0, None))(key, number) if key.ndim else jax.random.fold_in(key, number)
    return key


def random_bits(key: Key[Array, "*S"], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """32 random bits for each place; those of a pair of keys can be told only by who knows both."""
    if not key.ndim:
        return jax.random.bits(key, shape, jnp.uint32)
    return jax.random.bits(key[0], shape, jnp.uint32) ^ jax.random.bits(key[1], shape, jnp.uint32)


def normal(key: Key[Array, "*S"], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Standard normal draws; of a pair of keys from the bits of both, by inversion as in `jax.random.normal`."""
    if not key.ndim:
        return jax.random.normal(key, shape)
    places = (random_bits(key, shape) >> 9).astype(jnp.float32)
    return np.float32(2**0.5) * lax.erf_inv((places + 0.5) * np.float32(2**-22) - 1)


def single(key: Key[Array, "*S"]) -> Key[Array, ""]:
    """One key that depends on both of a pair."""
    if not key.ndim:
        return key
    return jax.random.wrap_key_data(random_bits(key, (2,)), impl="threefry2x32")


def add_gaussian(key: Key[Array, "*S"], tree: Tree, std: Float[Array, ""]) -> Tree:
    """Add independent N(0, std^2) to every coordinate; `std` is absolute, not a ratio of the clip bound.

    One draw for the flattened tree: a draw per leaf would compile several times as long.
    """
    flat, unravel = ravel_pytree(tree)
    return unravel(flat + std.astype(flat.dtype) * normal(key, flat.shape).astype(flat.dtype))
