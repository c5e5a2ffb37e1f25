"""Cache of the programs of recent runs, so that a run of the same method compiles nothing again.

Without this module, each run would trace and compile functions of its own. That takes most of the
time of a short run.
"""

import collections
import dataclasses
import functools
import threading
import types
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxfl.engine.mesh import Population
from jaxfl.engine.program import Points
from jaxfl.types import Algorithm, Tree

T = TypeVar("T")

_MOST = 40
"""Number of programs that are cached, the most recent ones.

A run has about six programs. Small ones take ten megabytes each.
"""

_SMALL = 4096
"""Bytes of the largest array that is compared by its numbers."""

_EMPTY = object()
"""Stand-in for the content of a variable that is not set yet."""

_KEPT: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
_LOCK = threading.Lock()


class Same:
    """Objects that are compared by identity.

    They are kept alive, so that no other object gets their identity.
    """

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._parts)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or len(self._parts) != len(other._parts):
            return False
        return all(one is two for one, two in zip(self._parts, other._parts, strict=True))


def remembered(key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
    """Return the cached value for this key and JAX's present flags, or make and cache it."""
    key_with_flags = (*key, _flags())
    with _LOCK:
        if key_with_flags in _KEPT:
            _KEPT.move_to_end(key_with_flags)
            return _KEPT[key_with_flags]
    value = make()
    with _LOCK:
        _KEPT[key_with_flags] = value
        while len(_KEPT) > _MOST:
            _KEPT.popitem(last=False)
    return value


def forget() -> None:
    """Empty the cache of programs."""
    with _LOCK:
        _KEPT.clear()


def clear_caches() -> None:
    """Free the memory of the methods that this process has run.

    A process caches the programs of about the last six methods, so that further runs of these trace
    nothing. Programs of earlier methods are dropped. However, JAX keeps its traces of models with
    frozen weights, which take some megabytes for each method.

    This function frees all of this memory. It also calls `jax.clear_caches`, so that other
    functions under `jax.jit` are traced again at their next call.
    """
    forget()
    jax.clear_caches()


def key_of_method(method: Algorithm | Points) -> Hashable:
    """Return a key that is equal for methods which were built from equal arguments.

    The keys of points are equal if their values are equal too.
    """
    if isinstance(method, Points):
        values = tuple((name, column.tobytes()) for name, column in sorted(method.values.items()))
        return key_of(method.build), values, method.batch
    return key_of(tuple(method))


def key_of(value: Any) -> Hashable:
    """Return a key that is equal for values that were made in the same way.

    Two functions that one builder returned for equal arguments are an example.

    Functions are compared by their code, and by what their defaults and closures hold. Tuples,
    dicts, frozen dataclasses and small NumPy arrays are compared by what they hold. Everything
    else, such as large arrays, lists and objects of other classes, is compared by identity.

    >>> def scaled(factor):
    ...     return lambda x: factor * x
    >>> key_of(scaled(2.0)) == key_of(scaled(2.0)), key_of(scaled(2.0)) == key_of(scaled(3.0))
    (True, False)
    """
    return _key_of(value, {})


def _key_of(value: Any, seen: dict[int, int]) -> Hashable:
    """Return the key of a value.

    Args:
        value: The value, or a part of it.
        seen: Positions of the functions met so far, by `id`.
    """
    kind = type(value)
    if kind in (bool, int, str, bytes, type(None)):
        return kind, value
    if kind in (float, complex):
        # The text distinguishes 0.0 from -0.0, and that of NaN equals itself.
        return kind, repr(value)

    def inside(part: Any) -> Hashable:
        return _key_of(part, seen)

    if kind is types.FunctionType:
        # A function that calls itself is met again.
        if id(value) in seen:
            return "again", seen[id(value)]
        seen[id(value)] = len(seen)
        # One code object makes all functions of one `def`. They differ in what they hold.
        cells = tuple(map(_content, value.__closure__ or ()))
        held = (value.__defaults__, value.__kwdefaults__, cells)
        return kind, value.__code__, Same(value.__globals__), inside(held)
    if kind is types.MethodType:
        return kind, inside((value.__func__, value.__self__))
    if kind is functools.partial:
        return kind, inside((value.func, value.args, value.keywords))
    if isinstance(value, tuple):
        return kind, tuple(map(inside, value))
    if kind is dict:
        return kind, tuple((inside(name), inside(part)) for name, part in value.items())
    if kind is jax.ShapeDtypeStruct:
        return kind, value
    if kind is np.ndarray and value.nbytes <= _SMALL and value.dtype != object:
        return kind, value.shape, value.dtype.str, value.tobytes()
    if _is_frozen(value):
        fields = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
        return kind, inside(fields)
    return Same(value)


def _content(cell: Any) -> Any:
    """Return the content of a closure's variable, or `_EMPTY` if it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _is_frozen(value: Any) -> bool:
    """Return whether an object's fields determine it: a frozen dataclass, or a Flax module."""
    if isinstance(value, nn.Module):
        return value.scope is None
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return False
    return type(value).__dataclass_params__.frozen


def described(population: Population) -> Population:
    """Return the population with descriptions instead of arrays, so that it can be a key."""
    return population._replace(clients=jax.tree.map(_described, population.clients), frozen=())


def key_of_arrays(tree: Tree) -> Hashable:
    """Return a key of the shapes, dtypes and devices of some arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(map(_described, leaves))


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, int | float):
        leaf = jnp.asarray(leaf)
    sharding = getattr(leaf, "sharding", None)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding, weak_type=weak)


def _flags() -> Hashable:
    """Return all flags of JAX, on which a program may depend."""
    return tuple(sorted((name, str(value)) for name, value in jax.config.values.items()))
