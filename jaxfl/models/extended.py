"""A model whose parameters have an entry beside its layers, which clients set and nobody trains."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Key

from jaxfl._validate import key_of
from jaxfl.models.wrap import with_either
from jaxfl.types import Model, Params, Tree


def extended(
    model: Model,
    entry: str,
    start: Callable[[Key[Array, ""]], Tree],
    change: Callable[[Tree, Array, Array], Array],
) -> Model:
    """Return the model with an entry beside its layers that changes its outputs.

    The entry belongs to no layer, so that whoever trains layers leaves it alone. Parameters without
    it are those of the given model, and have its outputs.

    Args:
        model: the network.
        entry: its name among the parameters.
        start: makes it, from the key of the parameters; only its shapes matter.
        change: makes outputs of the entry, the given model's outputs, and what these were made of:
            a prepared batch, or its features.

    Raises:
        ValueError: the parameters have an entry of that name already.
    """
    if entry in jax.eval_shape(lambda: model.init(key_of(0))):
        raise ValueError(
            f"algorithm must have a model without {entry!r} among its parameters, got "
            f"model={model.name!r}. Wrap the method once, or give the layer another name."
        )

    def plain(params: Params) -> Params:
        return {name: value for name, value in params.items() if name != entry}

    def init(key: Key[Array, ""]) -> Params:
        return {**model.init(key), entry: start(key)}

    def extract(params: Params, x: Array) -> Array:
        assert model.extract is not None
        return model.extract(plain(params), x)

    def changed(function: Callable[..., Array]) -> Callable[..., Array]:
        def with_entry(params: Params, x: Array, *key: Array) -> Array:
            outputs = function(plain(params), x, *key)
            return change(params[entry], outputs, x) if entry in params else outputs

        return with_entry

    return model._replace(
        name=f"{model.name}_{entry}",
        init=init,
        extract=model.extract and extract,
        classify=model.classify and changed(model.classify),
        apply=changed(model.apply),
        sum_grad_squared=None,
        ghost_norms=None,
    )


def outputs_of(model: Model) -> Any:
    """Return shape and type of the outputs for a batch of 2.

    Raises:
        ValueError: the model does not say what its inputs are, or does not take them.
    """
    if model.input_shape is None:
        raise ValueError(
            f"algorithm must have a model with an `input_shape`, got model={model.name!r}. "
            "Give the model one, by model._replace(input_shape=...)."
        )
    shape = (2, *model.input_shape)

    def outputs(dtype: Any) -> Array:
        x = model.prepare(jnp.zeros(shape, dtype))
        return model.apply(model.init(key_of(0)), x)

    try:
        return with_either(lambda dtype: jax.eval_shape(lambda: outputs(dtype)))[1]
    except ExceptionGroup as group:
        raise ValueError(
            f"algorithm must have a model that takes a batch of its "
            f"input_shape={model.input_shape!r}, got model={model.name!r}: {group.exceptions[0]}. "
            "Correct its input_shape."
        ) from None
