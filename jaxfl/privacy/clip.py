"""Clipping: one norm over the whole update."""

import math

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float

from jaxfl._validate import traced
from jaxfl.types import Number, Tree


def clip(update: Tree, bound: Number) -> tuple[Tree, Float[Array, ""]]:
    r"""Scale an update to L2 norm at most C: :math:`v \min(1, C / \|v\|_2)`, and 0 stays 0.

    Args:
        update: any pytree; the norm is joint over all of it.
        bound: C; infinity leaves the update as it is.

    Returns:
        The clipped update and its norm before clipping.

    >>> clip({"w": jnp.array([3.0, 4.0])}, 1.0)
    ({'w': Array([0.6, 0.8], dtype=float32)}, Array(5., dtype=float32))
    """
    norm = jnp.asarray(optax.tree.norm(update), jnp.float32)
    if not traced(bound) and math.isinf(bound):
        return update, norm
    factor = jnp.minimum(1.0, bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), update), norm
