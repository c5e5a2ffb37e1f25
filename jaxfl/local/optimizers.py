"""Optimizers of local training: their state at the start of a round, and the weights to keep."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import Array
from jaxtyping import Int

from jaxfl.types import ClientData, Params, Tree

_RESTARTED: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar(
    "restarted", default=None
)
"""Optimizers with a schedule, collected by `restarted`. None outside of it."""

Mask: TypeAlias = Tree | Callable[[Params], Tree]
"""Trainable coordinates, or a function from parameters to them. None trains all of them."""
Decay: TypeAlias = Callable[[Any], Any]
"""Function from the index of a round, from 0, to a factor of the round's updates."""


def decayed(
    optimizer: optax.GradientTransformation, decay: Decay | None, data: ClientData
) -> optax.GradientTransformation:
    """Return the optimizer, with updates scaled by the decay of the round `data.round`, if any."""
    if decay is None:
        return optimizer
    return optax.chain(optimizer, optax.scale(decay(data.round)))


@contextlib.contextmanager
def restarted() -> Iterator[list[optax.GradientTransformation]]:
    """Yield a list of the optimizers with a schedule for which the block calls `first_state`."""
    found: list[optax.GradientTransformation] = []
    token = _RESTARTED.set(found)
    try:
        yield found
    finally:
        _RESTARTED.reset(token)


def first_state(
    optimizer: optax.GradientTransformation, params: Params, decay: Decay | None
) -> Tree:
    """Return an optimizer's state at the start of a round.

    Raises:
        ValueError: There is a decay for `optax.contrib.schedule_free`.
    """
    state = optimizer.init(params)
    if decay is not None and schedule_free(state):
        raise ValueError(
            f"decay must be None with optax.contrib.schedule_free, got {decay!r}. "
            "Leave decay out: the steps' average takes the place of a schedule."
        )
    found = _RESTARTED.get()
    if found is not None and states_of(state, _has_schedule):
        found.append(optimizer)
    return state


def weights_to_keep(state: Tree, params: Params, mask: Mask, steps: Int[Array, ""]) -> Params:
    """Return the weights that training keeps.

    They are the last weights, or with `optax.contrib.schedule_free` its weights for evaluation.
    Coordinates that are not trainable keep their bits.

    Raises:
        ValueError: `optax.contrib.schedule_free` is applied to a part of the parameters only, or
            more than once.
    """
    free = schedule_free(state)
    if not free:
        return params
    if len(free) > 1 or jax.tree.structure(free[0].z) != jax.tree.structure(params):
        raise ValueError(
            "optimizer must apply optax.contrib.schedule_free to all parameters at once, got an "
            "optimizer for a part of them. Give another optimizer, such as optax.sgd(0.1)."
        )
    averages = optax.contrib.schedule_free_eval_params(free[0], params)
    trainable = trainable_of(mask, params)
    if trainable is None:
        trainable = jax.tree.map(lambda leaf: True, params)

    def chosen(trained: Any, average: Array, last: Array) -> Array:
        # Before a step both weights are equal, but the formula of the average rounds them.
        return jnp.where(jnp.asarray(trained) & (steps > 0), average.astype(last.dtype), last)

    return jax.tree.map(chosen, trainable, averages, params)


def _has_schedule(state: Any) -> bool:
    """Return whether a part of an optimizer's state counts the steps of a schedule."""
    # `optax.inject_hyperparams` keeps the states of schedules in an attribute of its own.
    injected = getattr(state, "hyperparams_states", {})
    return isinstance(state, optax.ScaleByScheduleState) or bool(injected)


def trainable_of(mask: Mask, params: Params) -> Tree:
    """Return the trainable coordinates at `params`, or None if all of them are."""
    if callable(mask):
        return mask(params)
    return mask


def states_of(state: Tree, wanted: Callable[[Any], bool]) -> list[Any]:
    """Return the parts of an optimizer's state for which `wanted` is true."""
    # The wanted parts count as leaves, because JAX would otherwise flatten them.
    return [part for part in jax.tree.leaves(state, is_leaf=wanted) if wanted(part)]


def schedule_free(state: Tree) -> list[Any]:
    """Return the states of `optax.contrib.schedule_free` in an optimizer's state."""
    return states_of(state, lambda part: isinstance(part, optax.contrib.ScheduleFreeState))
