"""Programs of recent runs, kept so that a further run of the same method traces and compiles nothing.

Without this module each run would trace and compile functions of its own, which takes most of a short run's time.
"""

import collections
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.engine.mesh import Population
from jaxfl.engine.program import Points
from jaxfl.types import Algorithm, Tree

T = TypeVar("T")

_MOST = 32
"""Programs that are kept, the most recent ones; a run has about five. Small ones take ten megabytes each."""

_KEPT: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
_LOCK = threading.Lock()


class Same:
    """Objects that are compared by identity, and kept so that no other object gets their identity."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._parts)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or len(self._parts) != len(other._parts):
            return False
        return all(one is two for one, two in zip(self._parts, other._parts, strict=True))


def remembered(key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
    """Return what `make` returned for this key and JAX's present flags, or call it."""
    whole = (*key, _flags())
    with _LOCK:
        if whole in _KEPT:
            _KEPT.move_to_end(whole)
            return _KEPT[whole]
    value = make()
    with _LOCK:
        _KEPT[whole] = value
        while len(_KEPT) > _MOST:
            _KEPT.popitem(last=False)
    return value


def forget() -> None:
    """Forget all programs."""
    with _LOCK:
        _KEPT.clear()


def clear_caches() -> None:
    """Free the memory of the methods that this process has run.

    A process keeps the programs of the last six methods or so, so that further runs of these trace nothing. Earlier
    ones go by themselves, except what JAX has traced for models with frozen weights: some megabytes for each method.
    This function frees all of it. It also calls `jax.clear_caches`, so that other functions under `jax.jit` are traced
    again when they are called.
    """
    forget()
    jax.clear_caches()


def key_of_method(method: Algorithm | Points) -> Hashable:
    """Return a key that is equal for the same functions and, of points, the same values."""
    if isinstance(method, Points):
        values = tuple((name, column.tobytes()) for name, column in sorted(method.values.items()))
        return Same(method.build), values, method.batch
    return Same(*method)


def described(population: Population) -> Population:
    """Return the population with descriptions in place of its arrays, which can be a key."""
    return population._replace(clients=jax.tree.map(_described, population.clients), frozen=())


def key_of_arrays(tree: Tree) -> Hashable:
    """Return a key of the shapes, kinds and places of some arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(map(_described, leaves))


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, int | float):
        leaf = jnp.asarray(leaf)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(
        np.shape(leaf), leaf.dtype, sharding=getattr(leaf, "sharding", None), weak_type=weak
    )


def _flags() -> Hashable:
    return tuple(sorted((name, str(value)) for name, value in jax.config.values.items()))
