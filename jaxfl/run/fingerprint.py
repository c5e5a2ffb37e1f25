"""Fingerprint of a run: facts about its programs, constants, clients' arrays, numbers and versions.

A run's folder holds the run's fingerprint. Names of compiled functions, addresses, the order of
work in a process, and settings that change only speed and memory are not part of it.
"""

import dataclasses
import enum
import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Key

from jaxfl._support.backend import backend
from jaxfl.data.clients import packed
from jaxfl.engine.memo import first_made, key_of_method, remembered
from jaxfl.engine.program import Points, over_points
from jaxfl.report.facts import in_words
from jaxfl.types import Algorithm, Clients, Model, Terms, Tree

_HASHED_FUNCTIONS = ("init", "client_update", "server_update", "personalize")
"""Functions of an algorithm, each of which has a hash of its own."""

_CONSTANTS = "constants"
"""Code of the fact that has the hash of the constants of all programs."""

_PROGRAMS = (_CONSTANTS, "round", "evaluation")
"""Codes of hashes that follow from other facts. Messages name them if nothing else differs."""

_VERSIONED_PACKAGES = ("jaxfl", "jax", "jaxlib")
"""Packages whose version affects results."""

_LONG = 16
"""Largest number of entries of an array that facts hold in full. A longer array has a hash."""

FORMAT = 3
"""Version of the facts, which is the fact `format`. Runs of different versions differ.

Version 2 hashed the clients' rows without padding. Version 3 named facts by codes.
"""

_NAMES = ("name", "debug_info")
"""Parameters of operations that affect no result."""

Facts = dict[str, Any]
"""JSON values by their codes, which are stable. A hash is `{"sha256": ...}`."""


def marked(method: Any) -> Any:
    """Return the algorithm or points with functions that leave their names in traces.

    Equal methods give the same object, so that JAX finds its functions in its cache.
    """
    first = first_made(method)
    return remembered(("marked", key_of_method(first)), lambda: _marked(first))


def _marked(method: Any) -> Any:
    if isinstance(method, Points):
        return method._replace(build=lambda **values: _marked(method.build(**values)))
    named = {name: jax.named_scope(name)(getattr(method, name)) for name in _HASHED_FUNCTIONS}
    return method._replace(**named)


def start(method: Algorithm | Points, clients: Clients, key: Key[jax.Array, "*P"]) -> Any:
    """Return the jaxpr of the program that makes the first states, one point at a time."""
    if isinstance(method, Points):
        # A batch changes speed only, so it must not change the hash.
        method = method._replace(batch=None)

    def init(clients: Clients, key: Key[jax.Array, "*P"]) -> tuple[Tree, Tree]:
        init_of_points = over_points(
            lambda algorithm, key: algorithm.init(key, clients.num_clients), method
        )
        return init_of_points(key)

    return jax.jit(init).trace(clients, key).jaxpr


def of_programs(programs: Mapping[str, Sequence[Any]]) -> Facts:
    """Return hashes of each of the algorithm's functions, of the rest of "round" and "evaluation".

    A further hash covers all constants. No hash covers computation outside JAX
    (`jax.pure_callback`).

    Args:
        programs: Closed jaxprs of a `marked` method, by "init", "round" and "evaluation".
    """
    hashes: dict[str, Any] = {}
    for name, parts in programs.items():
        texts = [_of_jaxpr(part.jaxpr, part.consts, hashes) for part in parts]
        hashes.setdefault(name, hashlib.sha256()).update(" ".join(texts).encode())
    names = [name for name in (*_HASHED_FUNCTIONS, *_PROGRAMS) if name in hashes]
    return {name: {"sha256": hashes[name].hexdigest()} for name in names}


def of_clients(clients: Clients) -> Facts:
    """Return the number of clients and hashes of their arrays. Padding of rows does not count."""
    train = packed(clients.train, np.asarray(clients.train_size))
    test = packed(clients.test, np.asarray(clients.test_size))
    arrays = clients._asdict() | {"train": train.flat, "test": test.flat}
    return {"clients": clients.num_clients} | of_arrays("clients", arrays)


def of_arrays(name: str, arrays: Mapping[str, Any]) -> Facts:
    """Return a hash of each array, under the code `name.part`.

    Args:
        name: First part of the codes.
        arrays: Arrays by the second part of their codes.
    """
    return {f"{name}.{part}": {"sha256": _of_array(array)} for part, array in arrays.items()}


def of_frozen(model: Model) -> Facts:
    """Return a hash of the frozen weights, or no facts if the model has none.

    The programs take frozen weights as an argument, so that their own hashes do not cover them.
    """
    leaves = jax.tree.leaves_with_path(model.frozen)
    if not leaves:
        return {}
    text = " ".join(f"{jax.tree_util.keystr(path)} {_of_array(leaf)}" for path, leaf in leaves)
    return {"model.frozen": {"sha256": hashlib.sha256(text.encode()).hexdigest()}}


def of_key(key: Key[jax.Array, "*P"]) -> Facts:
    """Return a hash of the key, which reveals the key only to someone who guesses it."""
    return {"key": {"sha256": _of_array(key)}}


def of_terms(name: str, terms: Terms) -> Facts:
    """Return the numbers of a statement's terms, but not its prose, which may be reworded."""
    claimed = None
    if terms.claim is not None:
        claimed = terms.claim[0]
    facts = of_value(f"{name}.delta", terms.delta) | of_value(f"{name}.claim", claimed)
    return facts | {f"{name}.broken": terms.broken is not None}


def of_value(name: str, value: Any) -> Facts:
    """Return all numbers and texts of a mechanism or of private steps, by field.

    The codes are `name.field`, and a hash stands for an array of more than 16 entries. Functions
    have no facts, because they are part of the programs.
    """
    fields = _fields_of(value)
    if fields is not None:
        facts: Facts = {name: type(value).__name__}
        for field, part in fields.items():
            facts |= of_value(f"{name}.{field}", part)
        return facts
    if callable(value):
        return {}
    if value is None or isinstance(value, str):
        return {name: value}
    if isinstance(value, tuple) and any(isinstance(part, str) for part in value):
        return {name: [str(part) for part in value]}
    array = np.asarray(value)
    if array.size > _LONG:
        return {name: {"sha256": _of_array(array)}}
    return {name: array.tolist()}


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass or of a NamedTuple by name, or None for other values."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return value._asdict()
    return None


def of_versions(mesh: Mesh) -> Facts:
    """Return what affects results besides programs and data.

    These are versions of packages, the kind and number of devices, and settings of JAX.
    """
    device = mesh.devices.flat[0]
    devices = {"format": FORMAT, "device": device.device_kind, "devices": mesh.size}
    names = ("jax_enable_x64", "jax_threefry_partitionable")
    settings = {name: getattr(jax.config, name) for name in names}
    return versions() | devices | settings


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect results, by name of the package."""
    return {name: _version(name) for name in _VERSIONED_PACKAGES}


def differences(stored: Facts, current: Facts) -> list[str]:
    """Return a text for each fact that differs, with the stored value before the current one.

    Programs are named only if nothing else differs, because they follow from the other facts.
    """
    names = _differing(stored, current)
    return [_difference(name, stored.get(name), current.get(name)) for name in names]


def how_to_resume(stored: Facts, current: Facts) -> str:
    """Return a sentence on how to resume the stored run, or "" if it cannot be resumed.

    A run can be resumed if only its length differs, or only versions and the number of devices.
    """
    names = set(_differing(stored, current))
    if "rounds" in names and names <= {"rounds", "evaluations"}:
        return f"To read or resume it, give rounds={stored['rounds']}"
    if not names <= {*_VERSIONED_PACKAGES, "devices"}:
        return ""
    parts = []
    if packages := [f"{name}=={stored[name]}" for name in _VERSIONED_PACKAGES if name in names]:
        parts.append(f"install {' '.join(packages)}")
    if "devices" in names:
        split = backend(str(current.get("device"))).devices is not None
        parts.append(_on_devices(stored["devices"], split))
    return f"To resume it, {' and '.join(parts)}" if parts else ""


def _on_devices(num_devices: int, split: bool) -> str:
    """Return in words how to run on a number of devices.

    Args:
        num_devices: Number of devices.
        split: Whether JAX can split this kind of device into several.
    """
    if jax.process_count() > 1:
        return f"start processes with {num_devices} devices in all"
    ways = []
    if split:
        ways.append(f"set JAX_NUM_CPU_DEVICES={num_devices} before Python starts")
    if num_devices <= jax.device_count():
        ways.append(f"give devices=jax.devices()[:{num_devices}]")
    return " or ".join(ways) or f"run it on {num_devices} devices"


def _differing(stored: Facts, current: Facts) -> list[str]:
    """Return the codes of facts that differ, without facts that follow from others."""
    # Some facts have the value None, so None cannot stand for a missing fact.
    missing = object()
    causes: list[str] = []
    parts: list[str] = []
    programs: list[str] = []
    for name in current | stored:
        if stored.get(name, missing) == current.get(name, missing):
            continue
        if name in _PROGRAMS:
            programs.append(name)
        elif name in _HASHED_FUNCTIONS:
            parts.append(name)
        else:
            causes.append(name)
    return causes or parts or programs


def _difference(name: str, stored: Any, current: Any) -> str:
    words = in_words(name)
    # Hashes say nothing to a reader.
    if isinstance(stored, dict) or isinstance(current, dict):
        return words
    return f"{words} {_shortened(stored)}, not {_shortened(current)}"


def _shortened(value: Any) -> str:
    if isinstance(value, list) and len(value) > 8:
        first = ", ".join(map(str, value[:3]))
        return f"[{first}, ..., {value[-1]}]"
    text = str(value)
    if len(text) <= 80:
        return text
    return f"{text[:76]} ..."


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _of_array(value: Any) -> str:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        kind = str(value.dtype)
        array = np.asarray(jax.random.key_data(value))
    else:
        kind = ""
        array = np.asarray(value)
    digest = hashlib.sha256(f"{kind} {array.dtype.name} {array.shape}".encode())
    # NumPy exports no buffer of bfloat16, and a view as bytes needs at least one axis.
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _of_jaxpr(jaxpr: Any, consts: Any, parts: dict[str, Any] | None) -> str:
    """Return the hash of a program, or of the operations that belong to none of its named parts.

    Variables are numbered in the order in which they appear. Each part has its own numbers, so that
    its hash does not depend on other parts.

    Args:
        jaxpr: The program.
        consts: Values of its constants.
        parts: Hashes by name, which are updated with the named parts and the constants. None hashes
            the program as one part, with its constants.
    """
    constants = _constants_of(jaxpr, consts, parts)
    numbers: dict[str | None, dict[Any, int]] = {}
    rest = hashlib.sha256()

    def name(part: str | None, atom: Any) -> str:
        # The short text of a type does not say whether the type is weak.
        aval = f"{atom.aval.str_short()}{'~' * getattr(atom.aval, 'weak_type', False)}"
        if isinstance(atom, core.Literal):
            return f"{_of_value(atom.val, None)}:{aval}"
        if atom in constants:
            return constants[atom]
        ids = numbers.setdefault(part, {})
        return f"{ids.setdefault(atom, len(ids))}:{aval}"

    def line(part: str | None, *texts: str) -> None:
        digest = rest
        if part is not None and parts is not None:
            digest = parts.setdefault(part, hashlib.sha256())
        digest.update(("\t".join(texts) + "\n").encode())

    # Inputs come first, so that their order gives them their numbers.
    line(None, *(name(None, var) for var in jaxpr.invars))
    for eqn in jaxpr.eqns:
        part = None
        if parts is not None:
            part = _part(eqn)
        # Programs inside an operation that belongs to no part may hold parts themselves.
        params = _of_value(eqn.params, parts if part is None else None)
        inputs = [name(part, var) for var in eqn.invars]
        outputs = [name(part, var) for var in eqn.outvars]
        line(part, eqn.primitive.name, params, *inputs, "->", *outputs)
    line(None, *(name(None, var) for var in jaxpr.outvars))
    return rest.hexdigest()


def _constants_of(jaxpr: Any, consts: Any, parts: dict[str, Any] | None) -> dict[Any, str]:
    """Return the texts of a program's constants by variable, or add the texts to `parts`."""
    # Constants count by their values, and those of a whole run in a hash of their own.
    texts = {}
    for var, value in zip(jaxpr.constvars, consts, strict=True):
        text = _of_value(value, None)
        if parts is None:
            texts[var] = text
        else:
            parts.setdefault(_CONSTANTS, hashlib.sha256()).update(text.encode())
    return texts


def _part(eqn: Any) -> str | None:
    """Return the name of the algorithm's function that an operation belongs to, or None."""
    names = (scope.name for scope in eqn.source_info.name_stack.stack)
    return next((name for name in names if name in _HASHED_FUNCTIONS), None)


def _of_value(value: Any, parts: dict[str, Any] | None) -> str:
    """Return a text with everything in a parameter or constant that affects a result.

    Args:
        value: The parameter or constant.
        parts: Hashes by name for programs inside the value, as in `_of_jaxpr`.
    """
    match value:
        case core.ClosedJaxpr():
            return _of_jaxpr(value.jaxpr, value.consts, parts)
        case core.Jaxpr():
            return _of_jaxpr(value, (), parts)
        case np.ndarray() | np.generic() | jax.Array():
            return _of_array(value)
        case Mapping():
            # Equal dicts may differ in their order.
            items = sorted(
                f"{k}: {_of_value(item, parts)}" for k, item in value.items() if k not in _NAMES
            )
            return f"{{{', '.join(items)}}}"
        case tuple() | list():
            return f"({', '.join(_of_value(item, parts) for item in value)})"
        case frozenset() | set():
            return f"({', '.join(sorted(_of_value(item, parts) for item in value))})"
        case NamedSharding():
            # The text has the number of devices, not their names.
            return f"{_of_value(value.mesh, parts)} {value.spec}"
        case Mesh() | AbstractMesh():
            return str(dict(value.shape))
        case enum.Enum():
            return str(value)
        case type():
            return value.__name__
        case Callable():
            # The text of a function has its address, which differs between processes.
            return getattr(value, "__qualname__", type(value).__name__)
    # Texts of other objects may have addresses too.
    return re.sub(r" at 0x[0-9a-f]+", "", f"{type(value).__name__} {value!r}")
