"""Whether the arguments of a run are valid, and algorithm, model and clients fit: nothing is compiled."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl._validate import (
    Check,
    check_array,
    check_callable,
    check_count,
    check_instance,
    check_key,
    key_of,
    show,
)
from jaxfl.data.load import check_inputs, check_targets
from jaxfl.local.train import restarted
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.tasks import Task
from jaxfl.types import (
    Algorithm,
    ClientData,
    Clients,
    Lists,
    Message,
    Model,
    StepNoise,
    Terms,
    Tree,
)

_LOG = logging.getLogger("jaxfl")

_PART = 4096
"""Rows of the store that are checked at once."""


def check_clients(name: str, value: Any) -> Clients:
    """Require clients whose arrays fit together, even after some were replaced."""
    clients = check_instance(name, value, (Clients,))
    for field, array in clients._asdict().items():
        if isinstance(array, list | tuple):
            raise TypeError(
                f"{name}.{field} must be an array, got {show(array)}. Convert it by `numpy.asarray`."
            )
    inputs = check_inputs(f"{name}.inputs", clients.inputs)
    checked: dict[str, Any] = {}
    check_targets(f"{name}.labels", clients.labels, len(inputs))
    number = None
    for split in ("train", "test"):
        lists = _check_lists(f"{name}.{split}", getattr(clients, split))
        size = check_array(f"{name}.{split}_size", getattr(clients, f"{split}_size"))
        number = len(lists) if number is None else number
        if len(lists) != number or not number:
            raise ValueError(
                f"{name}.{split} holds lists of {len(lists)} clients: give lists of {number or 1}"
            )
        if size.shape != (number,) or size.dtype.kind not in "iu":
            kind = f"{size.dtype} of shape {size.shape}"
            raise ValueError(f"{name}.{split}_size is {kind}: give [{number}] whole numbers")
        rows = lists.flat
        room = np.diff(lists.start, append=len(rows))
        if size.min() < 0 or (size > room).any():
            wanted = f"sizes from 0 to the numbers of rows in {name}.{split}"
            raise ValueError(f"{name}.{split}_size={size.min()} to {size.max()}: give {wanted}")
        if rows.size and (rows.min() < 0 or rows.max() >= len(inputs)):
            raise ValueError(
                f"{name}.{split}={rows.min()} to {rows.max()}: give rows from 0 to {len(inputs) - 1}"
            )
        checked |= {split: lists, f"{split}_size": size}
    shape = np.shape(clients.train.flat if isinstance(clients.train, Lists) else clients.train)
    if not shape[-1]:
        raise ValueError(f"{name}.train has shape {shape}: give room for at least one row")
    return clients._replace(**checked)


def _check_lists(name: str, value: Any) -> Lists:
    """Require lists of rows, or a matrix of rows with padding, and return lists."""
    if not isinstance(value, Lists):
        rows = check_array(name, value)
        if rows.ndim != 2 or rows.dtype.kind not in "iu":
            wanted = (
                "give jaxfl.types.Lists, or a matrix of whole numbers with a line for each client"
            )
            raise ValueError(f"{name} is {rows.dtype} of shape {rows.shape}: {wanted}")
        return Lists.of(rows)
    flat, start = (
        check_array(f"{name}.{field}", getattr(value, field)) for field in ("flat", "start")
    )
    for field, array in (("flat", flat), ("start", start)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(
                f"{name}.{field} is {array.dtype} of shape {array.shape}: give a vector of whole numbers"
            )
    if start.size and (start[0] < 0 or (np.diff(start, append=len(flat)) < 0).any()):
        raise ValueError(
            f"{name}.start={start.min()} to {start.max()}: give ascending positions in {name}.flat"
        )
    return Lists(flat, start)


def check_chunk(name: str, value: Any) -> Any:
    """Require a number of clients, or "auto"."""
    return value if isinstance(value, str) and value == "auto" else check_count(name, value)


def check_devices(name: str, value: Any) -> list[jax.Device]:
    """Require different devices."""
    if (
        isinstance(value, list | tuple)
        and value
        and all(isinstance(device, jax.Device) for device in value)
    ):
        if len(set(value)) == len(value):
            return list(value)
        raise ValueError(f"{name}={show(value)}: give each device once")
    raise TypeError(f"{name}={show(value)}: give a list of devices, for instance jax.devices()")


def check_one_key(name: str, value: Any) -> Key[Array, ""]:
    """Require a single key."""
    key = check_key(name, value)
    if key.ndim:
        raise ValueError(f"{name} has shape {key.shape}: give one key, or use `sweep`")
    return key


def check_values(name: str, value: Any) -> dict[str, list[float]]:
    """Require columns of numbers; the builder checks their values."""
    return check_columns(name, value, _numbers, "numbers")


def check_columns(name: str, value: Any, check: Check, kind: str) -> dict[str, list[Any]]:
    """Require columns by argument, each of which passes a check of its own."""
    if not isinstance(value, Mapping) or not all(isinstance(argument, str) for argument in value):
        wanted = f"columns of {kind} by argument, for instance {{'clip': [0.1, 1.0]}}"
        raise TypeError(f"{name}={show(value)}: give {wanted}")
    return {argument: check(f"{name}[{argument!r}]", column) for argument, column in value.items()}


def _numbers(name: str, column: Any) -> list[float]:
    array = check_array(name, column)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or np.any(np.isnan(array)):
        raise ValueError(f"{name}={show(column)}: give a vector of numbers")
    return [float(value) for value in array]


def check_algorithm(algorithm: Algorithm, clients: Clients, rounds: int) -> Tree:
    """Require that an algorithm's functions take and return what the engine expects, for these clients and rounds.

    Each function is traced once, for its shapes; returns those of an update.

    Raises:
        TypeError: a field of the algorithm has the wrong type.
        ValueError: names the function, and what it returns, or the two shapes that do not fit.
    """
    _check_fields(algorithm)
    algorithm.mechanism.check_fits(clients.number, rounds)
    if algorithm.dp_sgd is not None:
        check_instance("algorithm.dp_sgd", algorithm.dp_sgd, (DPSGD,)).check_fits(clients.number)
    key = jax.eval_shape(lambda: key_of(0))
    params = _check_model(algorithm.model, clients, key)
    server, states = _started(algorithm, clients, key)
    noise = (
        None if algorithm.dp_sgd is None else StepNoise(jax.ShapeDtypeStruct((), jnp.float32), key)
    )
    client = _of_one(states)
    data = _data_of_one(clients, noise)

    with restarted() as schedules:
        given = _trace("client_update", algorithm.client_update, key, server, client, data)
    if schedules:
        _warn_of_restarts(algorithm.name)
    message, after, info = _parts(
        "client_update", given, ("a Message", "the client's state", "info")
    )
    if not isinstance(message, Message):
        raise ValueError(
            f"client_update gives message={_kind(message)}: give a jaxfl.Message(update)"
        )
    for path, leaf in jax.tree.leaves_with_path(message.update):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            where = f"message.update{jax.tree_util.keystr(path)}"
            raise ValueError(f"client_update gives {where} of {leaf.dtype}: give floating numbers")
    if not isinstance(info, dict) or any(leaf.shape != () for leaf in info.values()):
        raise ValueError(f"client_update gives info={_kind(info)}: give a dict of single numbers")
    if wrong := [name for name in info if not isinstance(name, str) or not name.isidentifier()]:
        raise ValueError(
            f"client_update must give info by identifiers, got {wrong[0]!r}. Use letters, digits and _ in its names."
        )
    _check_same("client_update gives the client's state", after, client, "init makes one")

    stepped = _trace("server_update", algorithm.server_update, server, message.update)
    _check_same("server_update gives the server's state", stepped, server, "init makes one")
    _check_personal(algorithm, params, key, server, client, data)
    return message.update


def check_evaluation(algorithm: Algorithm, clients: Clients) -> tuple[Tree, Tree]:
    """Require that a method evaluates these clients, and return the shapes of their first states.

    Raises:
        TypeError: a field of the algorithm has the wrong type.
        ValueError: names the function, and what it returns, or the two shapes that do not fit.
    """
    _check_fields(algorithm)
    key = jax.eval_shape(lambda: key_of(0))
    params = _check_model(algorithm.model, clients, key)
    server, states = _started(algorithm, clients, key)
    _check_personal(algorithm, params, key, server, _of_one(states), _data_of_one(clients))
    return server, states


def check_state(name: str, value: Any, made: Tree) -> Tree:
    """Require arrays like those that `init` makes, of which the shapes are given."""
    remedy = "Give the state that a run of this method left, for these clients."
    try:
        shapes = jax.eval_shape(lambda: value)
    except TypeError:
        raise TypeError(f"{name} must be arrays, got {show(value)}. {remedy}") from None
    if jax.tree.structure(shapes) != jax.tree.structure(made):
        raise ValueError(
            f"{name} must be like {_kind(made)}, which init makes, got {_kind(shapes)}. {remedy}"
        )
    wanted = jax.tree.leaves(made)
    for (path, own), like in zip(jax.tree.leaves_with_path(shapes), wanted, strict=True):
        if (own.shape, own.dtype) != (like.shape, like.dtype):
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"{where} must be {_kind(like)}, which init makes, got {_kind(own)}. {remedy}"
            )
    return value


def _check_fields(algorithm: Algorithm) -> None:
    for name, kind in {"name": str, "model": Model, "mechanism": Mechanism, "terms": Terms}.items():
        check_instance(f"algorithm.{name}", getattr(algorithm, name), (kind,))
    for name in ("init", "client_update", "server_update", "personalize"):
        check_callable(f"algorithm.{name}", getattr(algorithm, name))


def _started(algorithm: Algorithm, clients: Clients, key: Any) -> tuple[Tree, Tree]:
    """Return the shapes of the first states of the server and the clients."""
    made = _trace("init", lambda key: algorithm.init(key, clients.number), key)
    server, states = _parts("init", made, ("the server's state", "client states"))
    for path, leaf in jax.tree.leaves_with_path(states):
        if leaf.shape[:1] != (clients.number,):
            where = f"client states{jax.tree_util.keystr(path)} of shape {leaf.shape}"
            raise ValueError(
                f"init gives {where}: give a row for each client, [{clients.number}, ...]"
            )
    return server, states


def _of_one(tree: Tree) -> Tree:
    """Return the shapes of one client's part."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def _data_of_one(clients: Clients, noise: StepNoise | None = None) -> ClientData:
    """Return the shapes of what one client sees."""
    shapes: Any = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, _canonical(leaf.dtype)), clients
    )
    size, start = _of_one((shapes.train_size, shapes.train.start))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    largest = max(1, int(np.max(clients.train_size)))
    store = shapes.inputs, shapes.labels, shapes.train.flat
    return ClientData(*store, size, number, noise, number, start, largest)


def _check_personal(
    algorithm: Algorithm, params: Tree, key: Any, server: Tree, client: Tree, data: ClientData
) -> None:
    personal = _trace("personalize", algorithm.personalize, key, server, client, data)
    _check_same("personalize gives parameters", personal, params, "the model has some")


@functools.cache  # once for a method, however many runs of it there are
def _warn_of_restarts(name: str) -> None:
    if jax.process_index() == 0:
        _LOG.warning(
            "%s: the schedule in the clients' optimizer starts again in every round. Give a schedule over rounds as "
            "LocalSGD(decay=...)",
            name,
        )


def check_mechanism(algorithm: Algorithm, clients: Clients, update: Tree) -> None:
    """Require that a mechanism begins, for clients who send such an update."""
    begin = functools.partial(
        algorithm.mechanism.init, update=lambda: update, clients=clients.number
    )
    jax.eval_shape(lambda: begin(key_of(0)))


def _check_model(model: Model, clients: Clients, key: Any) -> Tree:
    """Shapes of the model's parameters, where it takes the clients' inputs and has an output for each label."""
    shape = clients.inputs.shape[1:]
    if model.input_shape is not None and tuple(shape) != model.input_shape:
        mismatch = (
            f"takes inputs of shape {model.input_shape}, and clients.inputs are of shape {shape}"
        )
        raise ValueError(f"model={model.name!r} {mismatch}: make the model for that shape")
    subject = f"model={model.name!r} with inputs {_canonical(clients.inputs.dtype)}{shape}"
    batch = jax.ShapeDtypeStruct((2, *shape), _canonical(clients.inputs.dtype))
    params = _trace(f"{subject}: init", model.init, key)
    outputs = _trace(
        subject, lambda params, x: model.apply(params, model.prepare(x)), params, batch
    )
    if not outputs.shape or outputs.shape[0] != 2:
        raise ValueError(f"{subject} maps a batch of 2 to {outputs.shape}: give outputs [B, ...]")
    _check_indices(model, clients)
    labels = np.asarray(clients.labels)
    check_instance("model.task", model.task, (Task,))
    try:
        model.task.check(outputs, labels)
    except ValueError as error:
        raise ValueError(f"{subject} {error}") from None
    _check_task(
        model.task, outputs, jax.ShapeDtypeStruct((2, *labels.shape[1:]), _canonical(labels.dtype))
    )
    return params


def _check_indices(model: Model, clients: Clients) -> None:
    """Require inputs that index a table to be whole numbers that lie in the table."""
    if model.vocabulary is None:
        return
    if clients.inputs.dtype.kind == "u" and np.iinfo(clients.inputs.dtype).max < model.vocabulary:
        return
    for start in range(
        0, len(clients.inputs), _PART
    ):  # the store may be a file that is larger than memory
        part = np.asarray(clients.inputs[start : start + _PART])
        outside = (part < 0) | (part >= model.vocabulary) | (part != np.floor(part))
        if outside.any():
            row = start + int(np.argwhere(outside)[0][0])
            raise ValueError(
                f"clients.inputs must be whole numbers in [0, {model.vocabulary}), the rows of the table of "
                f"model={model.name!r}, got {part[outside][0]} in row {row}. Correct the data, for instance by a token "
                "of its own for padding and for unknown words, or make the model for a larger vocabulary."
            )


def _check_task(task: Task, outputs: Any, labels: Any) -> None:
    """Require a loss for each example, and metrics that are single numbers under names of their own."""
    if not task.metrics:
        raise ValueError(f"task={task.name!r} has no metrics: give one at least")
    losses = _trace(f"task={task.name!r}: loss", task.loss, outputs, labels)
    if losses.shape != (2,):
        raise ValueError(
            f"task={task.name!r}: loss gives {_kind(losses)} for a batch of 2: give one loss per example"
        )
    weights = jax.ShapeDtypeStruct((2,), jnp.float32)
    for name, metric in task.metrics.items():
        subject = f"task={task.name!r}: metrics[{name!r}]"
        sums = _trace(f"{subject}.sums", metric.sums, outputs, labels, weights)
        merged = _trace(f"{subject}.merge", metric.merge, sums, sums)
        _check_same(f"{subject}.merge gives sums", merged, sums, f"{subject}.sums gives some")
        value = _trace(f"{subject}.value", metric.value, sums)
        if value.shape != ():
            raise ValueError(f"{subject}.value gives {_kind(value)}: give a single number")


def _canonical(dtype: Any) -> np.dtype:
    """The dtype that JAX gives 64-bit numbers in a run."""
    return jax.dtypes.canonicalize_dtype(dtype)


def _trace(name: str, function: Callable, *arguments: Any) -> Any:
    try:
        return jax.eval_shape(function, *arguments)
    except Exception as error:
        given = ", ".join(_kind(argument) for argument in arguments)
        raise ValueError(f"{name} fails, given {given}: {type(error).__name__}: {error}") from error


def _parts(name: str, value: Any, parts: tuple[str, ...]) -> tuple:
    if type(value) is tuple and len(value) == len(parts):
        return value
    raise ValueError(f"{name} gives {_kind(value)}: give a tuple of {', '.join(parts)}")


def _check_same(subject: str, given: Tree, wanted: Tree, origin: str) -> None:
    """Require the same structure, and leaves of the same shapes and kinds of numbers."""
    if jax.tree.structure(given) != jax.tree.structure(wanted):
        raise ValueError(
            f"{subject} like {_kind(given)}, and {origin} like {_kind(wanted)}: give the same structure"
        )
    for (path, new), old in zip(
        jax.tree.leaves_with_path(given), jax.tree.leaves(wanted), strict=True
    ):
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            given_leaf = f"{subject}{jax.tree_util.keystr(path)} of {new.dtype}{new.shape}"
            raise ValueError(f"{given_leaf}, and {origin} of {old.dtype}{old.shape}: give the same")


def _kind(tree: Tree) -> str:
    """A tree as text, with each leaf's dtype and shape in its place."""
    text = str(
        jax.tree.map(
            lambda leaf: _Text(f"{leaf.dtype}{leaf.shape}") if hasattr(leaf, "dtype") else leaf,
            tree,
        )
    )
    return text if len(text) <= 300 else f"{text[:300]}..."


class _Text(str):
    """Without quotes in a printed tree."""

    __repr__ = str.__str__
