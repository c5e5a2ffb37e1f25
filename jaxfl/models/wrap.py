"""Your own Flax module as a model."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from jaxfl.models.zoo import depth_order, normalize
from jaxfl.types import Model


def from_flax(
    module: nn.Module, input_shape: Sequence[int], *, head: Sequence[str] | None = None, name: str | None = None
) -> Model:
    """Wrap a Flax linen module that maps a batch [B, *input_shape] to logits [B, K].

    Bytes are normalised to [-1, 1]; floats are passed on as they are. A module with methods `extract` (batch to
    features [B, F]) and `classify` (features to logits) has its head fitted on cached features; for any other, the head
    is trained through the whole network.

    Args:
        module: without batch statistics, dropout, or other collections than `params`.
        input_shape: of one example.
        head: names of the top-level layers that are the head (default: the last one).
        name: for reports (default: the module's class).

    Raises:
        ValueError: the module keeps more than parameters, does not give [B, K], or has no layer of a head's name.

    >>> network = nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(16), nn.relu, nn.Dense(10)])
    >>> model = from_flax(network, (8, 8, 1))
    >>> model.layers, model.head
    (('layers_1', 'layers_3'), ('layers_3',))
    """

    def batch() -> Array:
        return jnp.zeros((2, *input_shape))

    def init(key: Array) -> Any:
        return module.init(key, batch())["params"]

    def call(method: str | None = None) -> Any:
        return lambda params, x: module.apply({"params": params}, x, method=method)

    kind = type(module).__name__
    kept = set(jax.eval_shape(lambda key: module.init(key, batch()), jax.random.key(0))) - {"params"}
    if kept:
        raise ValueError(f"module={kind} keeps {sorted(kept)}: use layers without state, GroupNorm for BatchNorm")
    logits = jax.eval_shape(lambda key: call()(init(key), batch()), jax.random.key(0))
    if len(logits.shape) != 2 or logits.shape[0] != 2:
        raise ValueError(f"module={kind} maps a batch of 2 to {logits.shape}: give logits [B, classes]")
    layers = depth_order(init)
    head = layers[-1:] if head is None else tuple(head)
    missing = [layer for layer in head if layer not in layers]
    if missing or not head:
        raise ValueError(f"head={head!r}: name at least one of the module's layers {layers}")
    split = hasattr(module, "extract") and hasattr(module, "classify")
    return Model(
        name=name or kind,
        init=init,
        prepare=normalize,
        extract=call("extract") if split else None,
        classify=call("classify") if split else None,
        apply=call(),
        squares=None,
        layers=layers,
        head=head,
    )
