"""Your own Flax module as a model."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Shaped

from jaxfl._validate import check_counts, check_layers, checked
from jaxfl.models.zoo import depth_order, normalize
from jaxfl.tasks import Task, classification
from jaxfl.types import Model


def scale_bytes(inputs: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
    """Bytes are images, normalised to [-1, 1]; other inputs go to the module unchanged."""
    return normalize(inputs) if inputs.dtype == jnp.uint8 else inputs


@checked(input_shape=functools.partial(check_counts, empty=False), head=check_layers)
def from_flax(
    module: nn.Module,
    input_shape: Sequence[int],
    *,
    head: Sequence[str] | None = None,
    name: str | None = None,
    prepare: Callable[[Array], Array] = scale_bytes,
    task: Task = classification(),
) -> Model:
    """Wrap a Flax linen module that maps a batch [B, *input_shape] to outputs [B, ...], logits [B, K] by default.

    Bytes are images, normalised to [-1, 1]; all other numbers, floats and tokens, are passed on unchanged. A
    module with methods `extract` (batch to features [B, F]) and `classify` (features to logits) has its head fitted on
    cached features; otherwise the head is trained through the whole network.

    Args:
        module: without batch statistics, dropout, or other collections than `params`.
        input_shape: shape of one example.
        head: names of the top-level layers that are the head (default: the last one).
        name: for reports (default: the module's class).
        prepare: from a stored batch to the module's input, for instance
            `lambda x: x.astype(jnp.int32)` for tokens that are stored as bytes.
        task: what the outputs are for (see `jaxfl.tasks`).

    Raises:
        ValueError: the module does not take a batch of that shape, keeps more than parameters, does not give [B, ...],
            or has no layer of a head's name.

    >>> network = nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(16), nn.relu, nn.Dense(10)])
    >>> model = from_flax(network, (8, 8, 1))
    >>> model.layers, model.head
    (('layers_1', 'layers_3'), ('layers_3',))
    """

    def made(key: Array, dtype: Any) -> Any:
        return module.init(key, prepare(jnp.zeros((2, *input_shape), dtype)))

    def init(key: Array) -> Any:
        return made(key, dtype)["params"]

    def call(method: str | None = None) -> Any:
        return lambda params, x, key=None: module.apply({"params": params}, x, method=method)

    kind = type(module).__name__
    dtype, variables = _first_taken(made, f"module={kind} does not take a batch of input_shape={input_shape!r}")
    if "params" not in variables:
        raise ValueError(f"module={kind} has no parameters: give one that can be trained")
    if kept := set(variables) - {"params"}:
        raise ValueError(f"module={kind} keeps {sorted(kept)}: use layers without state, GroupNorm for BatchNorm")
    batch = jax.eval_shape(prepare, jax.ShapeDtypeStruct((2, *input_shape), dtype))
    outputs = jax.eval_shape(call(), variables["params"], batch)
    if not outputs.shape or outputs.shape[0] != 2:
        raise ValueError(f"module={kind} maps a batch of 2 to {outputs.shape}: give outputs [B, ...]")
    layers = depth_order(init)
    head = layers[-1:] if head is None else tuple(head)
    if not head or not set(head) <= set(layers):
        raise ValueError(f"head={head!r}: name at least one of the module's layers {layers}")
    split = hasattr(module, "extract") and hasattr(module, "classify")
    extract, classify = (call(method) if split else None for method in ("extract", "classify"))
    model = Model(name or kind, init, prepare, extract, classify, call(), None, layers, head)
    return model._replace(input_shape=tuple(input_shape), task=task)


def _first_taken(made: Callable[[Array, Any], Any], refusal: str) -> tuple[Any, Any]:
    """The dtype that a module takes, and the shapes of its variables: embeddings of tokens take whole numbers."""
    errors = []
    for dtype in (jnp.float32, jnp.int32):
        try:
            return dtype, jax.eval_shape(lambda key, dtype=dtype: made(key, dtype), jax.random.key(0))
        except Exception as error:
            errors.append(error)
    raise ValueError(f"{refusal}: {errors[0]}") from errors[0]
