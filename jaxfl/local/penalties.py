"""Penalties that local training adds to its loss, and a norm with a gradient at zero.

In the equations, w are the parameters `params`, w^t is `center`, M is `mask`, C is the clip bound
`bound`, and lambda is `penalty_weight`.
"""

import math

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float

from jaxfl._support.checks import nonzero, traced
from jaxfl.types import Number, Tree


def safe_norm(tree: Tree) -> Float[Array, ""]:
    r"""Return the joint L2 norm, whose gradient at 0 is 0. The plain norm has NaN there."""
    square = jnp.asarray(optax.tree.norm(tree, squared=True), jnp.float32)
    # The root has an infinite derivative at 0, which the inner `where` keeps out of the gradient.
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)


def proximal(params: Tree, center: Tree, mu: Number) -> Float[Array, ""]:
    r"""Return :math:`\frac{\mu}{2} \|w - w^t\|^2` (FedProx, Li et al. 2020, eq. 2)."""
    return 0.5 * mu * jnp.asarray(optax.tree.norm(optax.tree.sub(params, center), squared=True))


def distance(params: Tree, center: Tree, mask: Tree, penalty_weight: Number) -> Float[Array, ""]:
    r"""Return :math:`\frac{\lambda}{2} \|(w - w^t) \odot M\|_2`."""
    return 0.5 * penalty_weight * safe_norm(_masked_difference(params, center, mask))


def distance_to_bound(
    params: Tree, center: Tree, mask: Tree, bound: Number, penalty_weight: Number
) -> Float[Array, ""]:
    r"""Return :math:`\frac{\lambda}{2} \big| \|(w - w^t) \odot M\|_2 - C \big|`."""
    return (
        0.5 * penalty_weight * jnp.abs(safe_norm(_masked_difference(params, center, mask)) - bound)
    )


def excess(params: Tree, center: Tree, bound: Number, penalty_weight: Number) -> Float[Array, ""]:
    r"""Return :math:`\frac{\lambda}{2} \max(0, \|w - w^t\|^2 - C^2)` (BLUR, Cheng et al. 2022)."""
    square = jnp.asarray(optax.tree.norm(optax.tree.sub(params, center), squared=True))
    return 0.5 * penalty_weight * jnp.maximum(square - bound**2, 0.0)


def check_bound(clip: Number, name: str, penalty_weight: Number) -> None:
    """Require a finite clip bound C for a penalty that compares a norm with it.

    A weight of 0 needs no bound. `name` is the weight's argument in the error message.
    """
    if nonzero(penalty_weight) and not traced(clip) and math.isinf(clip):
        raise ValueError(
            f"clip must be finite with {name}={penalty_weight!r}, got clip={clip!r}. "
            f"Give a finite clip, or {name}=0: the penalty compares a norm with the clip bound."
        )


def _masked_difference(params: Tree, center: Tree, mask: Tree) -> Tree:
    return jax.tree.map(lambda p, c, m: jnp.where(m, p - c, 0.0), params, center, mask)
