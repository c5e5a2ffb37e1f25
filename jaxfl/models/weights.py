"""Models that start from given weights, for instance from those of another framework."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl._support.checks import checked, show
from jaxfl._support.recipes import valid_recipe
from jaxfl.models.frozen import check_params
from jaxfl.types import Model, Params


@checked()
def with_weights(model: Model, params: Params) -> Model:
    """Return a model whose runs start from given weights instead of random ones.

    All layers train. To train only some of them, use `frozen` or `lora` instead, which take the
    weights themselves. A method that draws several models, such as `ifca`, needs random weights,
    because equal models stay equal.

    No epsilon covers the data on which the weights were trained.

    Args:
        model: The network.
        params: Weights of all its layers, as `model.init` returns them. A kernel of Flax has
            axes (height, width, inputs, outputs) if it is a convolution's, and (inputs, outputs) if
            it is a dense layer's. Kernels of PyTorch have other orders.

    Raises:
        ValueError: The weights do not have the model's shapes, or are not finite. The model has
            frozen weights already.

    >>> from jaxfl.models import mlp
    >>> base = mlp((8, 8, 1), hidden=(16,))
    >>> weights = {
    ...     "dense_0": {"kernel": np.ones((64, 16)), "bias": np.zeros(16)},
    ...     "head": {"kernel": np.ones((16, 10)), "bias": np.zeros(10)},
    ... }
    >>> float(with_weights(base, weights).init(jax.random.key(0))["head"]["kernel"].sum())
    160.0
    """
    params = check_params(model, params)
    # A run would take NaN at its start for training that diverged.
    for path, leaf in jax.tree.leaves_with_path(params):
        if not np.isfinite(leaf).all():
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} must be finite, got {show(leaf)} with NaN or "
                "infinite numbers. Give the weights of a run that did not diverge."
            )
    start = {name: jax.tree.map(_as_float, params[name]) for name in model.layers}
    started = model._replace(init=lambda key: start)
    if (recipe := valid_recipe(model)) is None:
        return started
    # The network is that of the recipe. A file has weights of its own in place of the first ones.
    return started._replace(recipe=recipe._replace(functions=started.functions))


def _as_float(leaf: jax.Array) -> jax.Array:
    """Return weights in float32, the precision in which all models train."""
    return jnp.asarray(leaf, jnp.float32)
