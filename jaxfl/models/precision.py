"""Networks at lower precision than their weights."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jaxfl._validate import checked
from jaxfl.types import Model

Precision = Literal["float32", "tf32", "bfloat16"]

_PRODUCTS = {"float32": "float32", "tf32": "tensorfloat32", "bfloat16": None}


@checked()
def with_precision(model: Model, precision: Precision) -> Model:
    """The model with its network computed at a precision, in training and evaluation.

    Weights stay in float32, as do gradients, optimizer, updates, clipping, noise and sums. Private steps on single
    examples clip each gradient as computed: below float32, `ghost_norms` would be norms of differently rounded
    gradients, so they are dropped. Fisher information (`sum_grad_squared`) is computed as before.

    Args:
        model: any.
        precision: "float32": matrix products in float32, not the default of accelerators; "tf32": with 10 bits of
            mantissa where the accelerator has TensorFloat-32, elsewhere as "float32"; "bfloat16":
            weights and activations of the network in bfloat16, logits and features returned in float32.

    Raises:
        ValueError: the model has frozen weights, which bfloat16 would not reach.

    >>> from jaxfl.models import mlp
    >>> with_precision(mlp((8, 8, 1)), "bfloat16").name
    'mlp_bfloat16'
    """
    if precision == "bfloat16" and jax.tree.leaves(model.frozen):
        raise ValueError(
            f"model={model.name!r} has frozen weights: apply with_precision first, and freeze then"
        )

    def at(network: Callable[..., Array]) -> Callable[..., Array]:
        @functools.wraps(network)
        def call(params: Any, x: Array, *key: Array) -> Array:
            with jax.default_matmul_precision(_PRODUCTS[precision]):
                if precision != "bfloat16":
                    return network(params, x, *key)
                return network(*jax.tree.map(_lowered, (params, x)), *key).astype(jnp.float32)

        return call

    return model._replace(
        name=f"{model.name}_{precision}",
        extract=model.extract and at(model.extract),
        classify=model.classify and at(model.classify),
        apply=at(model.apply),
        ghost_norms=model.ghost_norms if precision == "float32" else None,
    )


def _lowered(leaf: Array) -> Array:
    """Tokens stay whole: bfloat16 has no 257."""
    return leaf.astype(jnp.bfloat16) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
