"""Cache of the programs of recent runs, for further runs of the same method and shapes.

Without this module, each run would trace and compile functions of its own. That takes most of the
time of a short run.
"""

import collections
import dataclasses
import dis
import enum
import functools
import hashlib
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
M = TypeVar("M", Algorithm, Points)

_MOST_PROGRAMS = 40
"""Number of values that are cached, the most recently used ones.

A run has about six programs. Small programs take ten megabytes each.
"""

_FIXED_PACKAGES = frozenset(
    [
        *("builtins", "collections", "contextlib", "dataclasses", "enum", "functools"),
        *("itertools", "math", "operator", "typing"),
        *("flax", "jax", "jaxfl", "jaxlib", "jaxtyping", "numpy", "optax"),
    ]
)
"""Top-level packages whose functions and classes do not change during a process."""

_OTHER_WAYS = frozenset({"__import__", "eval", "exec", "getattr", "globals", "locals", "vars"})
"""Functions by which code may read globals that its names do not show."""

_DECORATED = (type(jax.jit(len)), jax.custom_jvp, jax.custom_vjp, type(functools.cache(len)))
"""Classes of the functions that decorators return."""

_LARGEST_COMPARED = 2**24
"""Bytes of the largest NumPy array that is compared by its numbers.

A value with a larger array is compared by identity.
"""

_EMPTY = object()
"""Stand-in for the content of a variable that is not set yet."""

_KEPT: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()
_LOCK = threading.Lock()


class Same:
    """Key of objects that are compared by identity, one by one.

    The key keeps the objects alive, so that no other object gets their identity.
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
    # Threads compile programs side by side, so none holds the lock meanwhile.
    value = make()
    with _LOCK:
        # Two threads may make a value for the same key. The later value replaces the earlier one.
        _KEPT[key_with_flags] = value
        while len(_KEPT) > _MOST_PROGRAMS:
            # The first entry is the one that was not used for the longest time.
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

    Arguments that `key_of_value` cannot compare by what they hold count by their identity.
    The keys of two `Points` are equal if their values and batches are equal too. A builder that may
    change gives a new key for each sweep.
    """
    if not isinstance(method, Points):
        return key_of_value(tuple(method))
    build = key_of_value(method.build)
    if isinstance(build, Same):
        # Each sweep calls the builder anew, which may read something else than before.
        return build, Same(method.values), method.batch
    values = tuple((name, column.tobytes()) for name, column in sorted(method.values.items()))
    return build, values, method.batch


def first_made(method: M) -> M:
    """Return the first method with the same `key_of_method`, whose functions JAX may have traced.

    It is the given method if the cache has no equal one.
    """
    key = key_of_method(method)
    first = remembered(("method", key), lambda: method)
    if first is not method and key_of_method(first) != key:
        # An array or a dict in it has changed since, and its functions would be traced with that.
        forget()
        return remembered(("method", key), lambda: method)
    return first


def key_of_value(value: Any) -> Hashable:
    """Return a key that is equal for values that were made in the same way.

    Two functions that one builder returned for equal arguments are an example.

    Functions are compared by their code, and by what their defaults and closures hold. Functions
    of other packages than the project and its libraries are also compared by the globals that they
    read. Tuples, dicts, NumPy arrays of at most 16 MiB, and frozen dataclasses of the project and
    its libraries are compared by what they hold.

    A value that holds anything that may change, such as a list or an object of the user's own
    class, is compared by identity: no key shows whether it has changed. So is a function that
    imports something, or reads globals by other ways than their names. Libraries are taken as
    they were when they were imported.

    >>> def scaled(factor):
    ...     return lambda x: factor * x
    >>> doubled, again, tripled = (key_of_value(scaled(factor)) for factor in (2.0, 2.0, 3.0))
    >>> doubled == again, doubled == tripled
    (True, False)
    """
    try:
        return _key_of_part(value, {})
    except (_MayChangeError, RecursionError):
        if type(value) is tuple:
            return Same(*value)
        return Same(value)


class _MayChangeError(Exception):
    """Something that has no key, because it may change."""


def _key_of_part(value: Any, seen: dict[int, int]) -> Hashable:
    """Return the key of a value.

    Args:
        value: The value, or a part of it.
        seen: Positions of the functions found so far, by `id`. New functions are added.

    Raises:
        _MayChangeError: The value holds something that may change.
    """
    kind = type(value)
    # The numbers 1 and True are equal and have one hash, so the key names the class.
    if kind in (bool, int, str, bytes, type(None), jax.ShapeDtypeStruct):
        return kind, value
    if kind in (float, complex):
        # The text distinguishes 0.0 from -0.0, and that of NaN equals itself.
        return kind, repr(value)
    if kind is types.FunctionType:
        return _key_of_function(value, seen)
    # The bytes of an array of objects are addresses, which say nothing about its content.
    if kind is np.ndarray and not value.dtype.hasobject and value.nbytes <= _LARGEST_COMPARED:
        return kind, value.shape, value.dtype, hashlib.sha256(value.tobytes()).digest()
    parts = _parts_of(value)
    if parts is not None:
        return kind, tuple(_key_of_part(part, seen) for part in parts)
    if _never_changes(value):
        return Same(value)
    raise _MayChangeError


def _key_of_function(function: types.FunctionType, seen: dict[int, int]) -> Hashable:
    """Return the key of a function, as `_key_of_part` does."""
    # A function that calls itself is met again.
    if id(function) in seen:
        return "again", seen[id(function)]
    seen[id(function)] = len(seen)
    # Equal code reads other globals in another module.
    module = Same(function.__globals__)
    return types.FunctionType, function.__code__, module, _key_of_part(_contents(function), seen)


def _parts_of(value: Any) -> tuple | None:
    """Return the values by which a value is compared, or None if no values determine it."""
    kind = type(value)
    if kind is types.MethodType:
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, tuple) and (kind is tuple or _is_of_library(kind)):
        return tuple(value)
    if kind is dict:
        return tuple(value.items())
    if _is_of_library(kind) and _is_frozen(value):
        return tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    return None


def _contents(function: types.FunctionType) -> tuple:
    """Return a function's defaults, attributes and closure, and the globals that it reads.

    One code object makes all functions of one `def`. They differ in their defaults and closures.
    Globals count only in the user's own modules, which may set them anew between two runs.

    Raises:
        _MayChangeError: A function of the user's own module reads globals by other ways.
    """
    cells = tuple(map(_content, function.__closure__ or ()))
    contents = (function.__defaults__, function.__kwdefaults__, function.__dict__, cells)
    known = function.__globals__
    # A function says of itself which module it is from, which `functools.wraps` copies.
    if str(known.get("__name__")).partition(".")[0] in _FIXED_PACKAGES:
        return contents
    read = _names_read(function.__code__)
    if read & _OTHER_WAYS:
        raise _MayChangeError
    return (*contents, {name: known[name] for name in sorted(read) if name in known})


def _names_read(code: types.CodeType) -> set[str]:
    """Return the names that a function's code reads, with the names in functions inside it.

    An import adds the name `__import__`.
    """
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    imports = any(step.opname == "IMPORT_NAME" for step in dis.get_instructions(code))
    # `co_names` has the names of attributes too, which at most make a key stricter.
    own = set(code.co_names)
    if imports:
        own.add("__import__")
    return own.union(*map(_names_read, inner))


def _content(cell: Any) -> Any:
    """Return the content of a closure's variable, or `_EMPTY` if it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _is_of_library(value: Any) -> bool:
    """Return whether a function, a class or a module is the project's or a library's."""
    module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(module).partition(".")[0] in _FIXED_PACKAGES


def _is_frozen(value: Any) -> bool:
    """Return whether an object's fields determine it: a frozen dataclass or unbound Flax module."""
    if isinstance(value, nn.Module):
        return value.scope is None
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return False
    return type(value).__dataclass_params__.frozen


def _never_changes(value: Any) -> bool:
    """Return whether a value is known to be immutable, so that its identity stands for it."""
    if isinstance(value, jax.Array | np.dtype | np.ufunc | enum.Enum | types.BuiltinFunctionType):
        return True
    if type(value) is object:
        return True
    # An object of a library's class may hold a user's function. These classes name its module.
    named = isinstance(value, (type, types.ModuleType, *_DECORATED))
    return named and _is_of_library(value)


def described(population: Population) -> Population:
    """Return the population with shapes, dtypes and shardings in place of its clients' arrays.

    It has no frozen weights. Such a population can be a part of a key.
    """
    return population._replace(clients=jax.tree.map(_described, population.clients), frozen=())


def key_of_arrays(tree: Tree) -> Hashable:
    """Return a key of a tree's structure, and of its arrays' shapes, dtypes and shardings."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(map(_described, leaves))


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, int | float):
        leaf = jnp.asarray(leaf)
    sharding = getattr(leaf, "sharding", None)
    # A weak type changes the dtypes of results, and so the program.
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding, weak_type=weak)


def _flags() -> Hashable:
    """Return all flags of JAX, on which a program may depend."""
    return tuple(sorted((name, str(value)) for name, value in jax.config.values.items()))
