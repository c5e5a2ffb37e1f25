"""Networks that compute at a lower precision than that of their weights."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxfl._support.checks import checked
from jaxfl._support.recipes import with_recipe
from jaxfl.types import Model

Precision = Literal["float32", "tf32", "bfloat16"]
"""Names of the precisions of `with_precision`."""

_PRODUCTS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": None}
"""JAX's name for the precision of matrix products. None stands for JAX's default."""


@checked()
@with_recipe
def with_precision(model: Model, precision: Precision) -> Model:
    """Return a model whose network computes at a precision, in training and evaluation.

    Weights stay in float32, and so do gradients, the optimizer, updates, clipping, noise and sums.
    Private steps on single examples clip each gradient after its rounding. Below float32 the result
    has no `ghost_norms`, because these would be norms of differently rounded gradients. Fisher
    information (`sum_grad_squared`) is computed as before.

    Args:
        model: Any network.
        precision: One of three names. "float32" computes matrix products in float32, unlike the
            default of accelerators. "tf32" computes them with 10 bits of mantissa on GPUs that have
            TensorFloat-32, and in float32 on CPUs. "bfloat16" converts the network's weights and
            activations to bfloat16, and its outputs and features to float32.

    Raises:
        ValueError: `precision` is "bfloat16", and the model has frozen weights, which would not be
            converted.

    >>> from jaxfl.models import mlp
    >>> with_precision(mlp((8, 8, 1)), "bfloat16").name
    'mlp_bfloat16'
    """
    if precision == "bfloat16" and jax.tree.leaves(model.frozen):
        raise ValueError(
            f"model must have no frozen weights for bfloat16, got model={model.name!r} with some. "
            "Apply with_precision first, and freeze its result."
        )

    def at(network: Callable[..., Array]) -> Callable[..., Array]:
        @functools.wraps(network)
        def call(params: Any, x: Array, *key: Array) -> Array:
            # JAX reads the precision while it traces the network, so the context must be open then.
            with jax.default_matmul_precision(_PRODUCTS[precision]):
                if precision != "bfloat16":
                    return network(params, x, *key)
                lowered = jax.tree.map(_lowered, (params, x))
                # The loss, and all that follows, is computed in float32.
                return network(*lowered, *key).astype(jnp.float32)

        return call

    ghost_norms = model.ghost_norms
    if precision != "float32":
        ghost_norms = None
    return model._replace(
        name=f"{model.name}_{precision}",
        extract=model.extract and at(model.extract),
        classify=model.classify and at(model.classify),
        apply=at(model.apply),
        ghost_norms=ghost_norms,
    )


def _lowered(leaf: Array) -> Array:
    """Return floating numbers as bfloat16, and other numbers unchanged."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.astype(jnp.bfloat16)
    # Tokens stay integers, because bfloat16 cannot represent 257.
    return leaf
