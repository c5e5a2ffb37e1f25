"""Models with an extra entry among their parameters, which clients set and nobody trains."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Key

from jaxfl._support.checks import key_of
from jaxfl._support.recipes import valid_recipe
from jaxfl.models.wrap import with_either
from jaxfl.types import Model, Params, Tree


def extended(
    model: Model,
    entry: str,
    start: Callable[[Key[Array, ""]], Tree],
    change: Callable[[Tree, Array, Array], Array],
) -> Model:
    """Return a model with an extra entry among its parameters that changes its outputs.

    The entry belongs to no layer, so that training does not touch it. Parameters without the entry
    give the outputs of the given model. The result has no `sum_grad_squared` and no `ghost_norms`.

    Args:
        model: The network.
        entry: Name of the entry among the parameters.
        start: Function of the key of the parameters that returns the entry in the result of `init`.
        change: Function of the entry, the given model's outputs, and their inputs that returns
            new outputs. The inputs are a prepared batch or, for `classify`, its features.

    Raises:
        ValueError: The parameters already have an entry of this name.
    """
    # Only the names are of interest, so no weights are computed.
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
            if entry not in params:
                return outputs
            return change(params[entry], outputs, x)

        return with_entry

    longer = model._replace(
        name=f"{model.name}_{entry}",
        init=init,
        # A model that cannot be split has None here, and keeps it.
        extract=model.extract and extract,
        classify=model.classify and changed(model.classify),
        apply=changed(model.apply),
        # The rules of the given model belong to its own outputs.
        sum_grad_squared=None,
        ghost_norms=None,
    )
    recipe = valid_recipe(model)
    # The builder makes the model without the entry, so the recipe notes the entry.
    if recipe is not None:
        recipe = recipe._replace(functions=longer.functions, without=(*recipe.without, entry))
    return longer._replace(recipe=recipe)


def outputs_of(model: Model) -> Any:
    """Return the shape and the dtype of a model's outputs for a batch of 2, without computing them.

    Raises:
        ValueError: The model has no `input_shape`, or does not take a batch of that shape.
    """
    if model.input_shape is None:
        raise ValueError(
            f"algorithm must have a model with an `input_shape`, got model={model.name!r}. "
            "Set it by model._replace(input_shape=...)."
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
            f"input_shape={model.input_shape!r}, got model={model.name!r}: "
            f"{str(group.exceptions[0]).removesuffix('.')}. Correct its input_shape."
        ) from None
