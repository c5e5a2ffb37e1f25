"""Sharpness-aware steps, whose gradient is taken one step uphill."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float

from jaxfl._support.checks import at_least_0, checked
from jaxfl.local.train import GradientFn
from jaxfl.types import Number, Params, Tree


@checked(radius=at_least_0)
def sam(radius: Number) -> Callable[[GradientFn], GradientFn]:
    """Return an argument `gradient` of `jaxfl.local.train.train` for sharpness-aware steps.

    A step takes its gradient at the point that `ascend` returns. It reads its batch twice, and
    reports the loss at the parameters themselves.

    Args:
        radius: Length rho of the step to the point of the gradient, at least 0.
    """

    def of_step(gradient_fn: GradientFn) -> GradientFn:
        def sharp(params: Params) -> tuple[Float[Array, ""], Tree]:
            value, slope = gradient_fn(params)
            _, sharp_slope = gradient_fn(ascend(params, slope, radius))
            return value, sharp_slope

        return sharp

    return of_step


def ascend(params: Params, gradient: Tree, radius: Number) -> Params:
    r"""Return the point at which SAM takes its gradient, :math:`w + \rho \, g / \|g\|_2`.

    The norm is over all leaves of the tree together. The point is w if g = 0.

    References: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization,
        ICLR 2021, eq. 2.

    >>> ascend({"w": jnp.array([3.0, 4.0])}, {"w": jnp.array([3.0, 4.0])}, 0.5)
    {'w': Array([3.3, 4.4], dtype=float32)}
    """
    norm = jnp.asarray(optax.tree.norm(gradient))
    norm = jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)
    # g / norm comes first: for a gradient of 0, radius / norm may overflow, and its product is NaN.
    return jax.tree.map(lambda p, g: p + radius * (g / norm), params, gradient)
