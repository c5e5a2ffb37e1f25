"""Checks of a run's arguments, and of algorithm, model and clients together, without compiling."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl._support.checks import (
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
from jaxfl.local.optimizers import restarted
from jaxfl.models.tables import check_table_rows
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.run.fingerprint import of_value
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


def check_clients(name: str, value: Any) -> Clients:
    """Require clients whose arrays fit together, and return them with their rows as `Lists`.

    `make_clients` checks its arguments, but a caller may change its result by `_replace`. A
    ValueError or TypeError names the field that does not fit.
    """
    clients = check_instance(name, value, (Clients,))
    _check_arrays(name, clients)
    inputs = check_inputs(f"{name}.inputs", clients.inputs)
    check_targets(f"{name}.labels", clients.labels, len(inputs))
    checked: dict[str, Any] = {}
    num_clients = None
    for split in ("train", "test"):
        lists = _check_lists(f"{name}.{split}", getattr(clients, split))
        size = check_array(f"{name}.{split}_size", getattr(clients, f"{split}_size"))
        # The lists of the training examples say how many clients there are.
        if num_clients is None:
            num_clients = len(lists)
        _check_sizes(f"{name}.{split}", lists, size, num_clients)
        rows = lists.flat
        # JAX would read another row in place of one that does not exist.
        if rows.size and (rows.min() < 0 or rows.max() >= len(inputs)):
            raise ValueError(
                f"{name}.{split} must be rows from 0 to {len(inputs) - 1}, got {rows.min()} to "
                f"{rows.max()}. Give positions in {name}.inputs."
            )
        checked |= {split: lists, f"{split}_size": size}
    _check_room(f"{name}.train", clients.train)
    return clients._replace(**checked)


def _check_arrays(name: str, clients: Clients) -> None:
    """Require that no field is a Python list or tuple."""
    # The other checks would convert a list, but the run uses inputs and labels as they are.
    for field, array in clients._asdict().items():
        if isinstance(array, list | tuple):
            raise TypeError(
                f"{name}.{field} must be an array, got {show(array)}. "
                "Convert it by `numpy.asarray`."
            )


def _check_sizes(name: str, lists: Lists, size: np.ndarray, num_clients: int) -> None:
    """Require a list for each client, and a size that does not exceed the list."""
    if len(lists) != num_clients or not num_clients:
        raise ValueError(
            f"{name} must hold lists of {num_clients or 1} clients, got {len(lists)}. "
            "Give each client a list."
        )
    if size.shape != (num_clients,) or size.dtype.kind not in "iu":
        raise ValueError(
            f"{name}_size must be {num_clients} whole numbers, got {size.dtype} of "
            f"shape {size.shape}. Give each client a size."
        )
    # A list ends where the next one starts, and the last one ends with the rows.
    room = np.diff(lists.start, append=len(lists.flat))
    if size.min() < 0 or (size > room).any():
        raise ValueError(
            f"{name}_size must be from 0 to the number of rows in {name}, got "
            f"{size.min()} to {size.max()}. Correct the sizes, or give the clients more rows."
        )


def _check_room(name: str, value: Any) -> None:
    """Require `Lists`, or a matrix [C, n], with room for at least one row."""
    # `Lists.of` gives one entry even to a matrix [C, 0], so the matrix itself is asked.
    stored = value
    if isinstance(value, Lists):
        stored = value.flat
    shape = np.shape(stored)
    if not shape[-1]:
        raise ValueError(
            f"{name} must have room for at least one row, got shape {shape}. "
            "Give a client a training example."
        )


def _check_lists(name: str, value: Any) -> Lists:
    """Require `Lists` of rows, or a matrix [C, n] of rows with padding, and return `Lists`."""
    if not isinstance(value, Lists):
        rows = check_array(name, value)
        if rows.ndim != 2 or rows.dtype.kind not in "iu":
            raise ValueError(
                f"{name} must be jaxfl.types.Lists, or a matrix of whole numbers, got {rows.dtype} "
                f"of shape {rows.shape}. Give a line of rows for each client."
            )
        return Lists.of(rows)
    flat = check_array(f"{name}.flat", value.flat)
    start = check_array(f"{name}.start", value.start)
    for field, array in (("flat", flat), ("start", start)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(
                f"{name}.{field} must be a vector of whole numbers, got {array.dtype} of shape "
                f"{array.shape}. Convert it."
            )
    if start.size and (start[0] < 0 or (np.diff(start, append=len(flat)) < 0).any()):
        raise ValueError(
            f"{name}.start must be ascending positions in {name}.flat, got {start.min()} to "
            f"{start.max()}. Give the position of each client's first row."
        )
    return Lists(flat, start)


def check_chunk(name: str, value: Any) -> Any:
    """Require "auto", or a number of clients of at least 1, and return it."""
    if isinstance(value, str):
        if value == "auto":
            return value
        raise ValueError(
            f"{name} must be a number of clients, 'auto' or None, got {show(value)}. "
            "Give for instance 'auto'."
        )
    return check_count(name, value)


def check_devices(name: str, value: Any) -> list[jax.Device]:
    """Require a list of at least one device, each of which occurs once, and return the list."""
    listed = isinstance(value, list | tuple) and len(value) > 0
    if not listed or not all(isinstance(device, jax.Device) for device in value):
        raise TypeError(
            f"{name} must be a list of devices, got {show(value)}. Give for instance jax.devices()."
        )
    if len(set(value)) < len(value):
        raise ValueError(
            f"{name} must be different devices, got {show(value)}. Give each device once."
        )
    return list(value)


def check_one_key(name: str, value: Any) -> Key[Array, ""]:
    """Require a single key, or a seed, and return the key."""
    key = check_key(name, value)
    if key.ndim:
        raise ValueError(
            f"{name} must be a single key, got keys of shape {key.shape}. "
            "Give one key, or use `sweep`."
        )
    return key


def check_values(name: str, value: Any) -> dict[str, list[float]]:
    """Require columns of numbers by argument, and return them as lists of floats.

    NaN is an error. The builder checks the values further.
    """
    return check_columns(name, value, _check_numbers, "numbers")


def check_columns(name: str, value: Any, check: Check, kind: str) -> dict[str, list[Any]]:
    """Require columns by argument, and return what `check` makes of each column.

    Args:
        name: Name of the argument that has the columns.
        value: The columns by argument of a builder.
        check: Check of one column, which gets the column's name and value.
        kind: Name of the columns' values in the error message.
    """
    if not isinstance(value, Mapping) or not all(isinstance(argument, str) for argument in value):
        raise TypeError(
            f"{name} must be columns of {kind} by argument, got {show(value)}. "
            "Give for instance {'clip': [0.1, 1.0]}."
        )
    return {argument: check(f"{name}[{argument!r}]", column) for argument, column in value.items()}


def _check_numbers(name: str, column: Any) -> list[float]:
    array = check_array(name, column)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or np.any(np.isnan(array)):
        raise ValueError(
            f"{name} must be a vector of numbers, got {show(column)}. "
            "Give a list of numbers without NaN."
        )
    return [float(value) for value in array]


def check_algorithm(algorithm: Algorithm, clients: Clients, rounds: int) -> Tree:
    """Require an algorithm whose functions fit the engine, and return the shapes of an update.

    Each function is traced once for its shapes, with these clients.

    Raises:
        TypeError: A field of the algorithm has the wrong type.
        ValueError: A function fails, or returns another value or other shapes than the engine
            expects. The message names the function. Or the mechanism or the private steps do not
            fit the clients or the rounds.
    """
    _check_fields(algorithm)
    algorithm.mechanism.check_fits(clients.num_clients, rounds)
    if algorithm.dp_sgd is not None:
        check_instance("algorithm.dp_sgd", algorithm.dp_sgd, (DPSGD,)).check_fits(
            clients.num_clients
        )
    # Traces need the key's shape only.
    key = jax.eval_shape(lambda: key_of(0))
    params = _check_model(algorithm.model, clients, key)
    arguments = given_to_client(algorithm, clients)
    _, server, client, _ = arguments
    message, after, info = _traced_update(algorithm, arguments)
    _check_message(message)
    _check_info(info)
    _check_same("client_update", "the client's state", after, client, "init makes")

    # The aggregate of a round has the shapes of one client's update.
    stepped = _trace("server_update", algorithm.server_update, server, message.update)
    _check_same("server_update", "the server's state", stepped, server, "init makes")
    _check_personal(algorithm, params, *arguments)
    return message.update


def _traced_update(
    algorithm: Algorithm, arguments: tuple[Any, Tree, Tree, ClientData]
) -> tuple[Any, Tree, Any]:
    """Return the shapes of message, client's state and info that `client_update` returns."""
    # A schedule in a client's optimizer shows only while `client_update` is traced.
    with restarted() as schedules:
        returned = _trace("client_update", algorithm.client_update, *arguments)
    if schedules:
        _warn_of_restarts(algorithm.name)
    return _check_returned("client_update", returned, ("a Message", "the client's state", "info"))


def _check_message(message: Any) -> None:
    """Require a `Message` whose update has floating numbers."""
    if not isinstance(message, Message):
        raise ValueError(
            f"client_update must return a jaxfl.Message first, got {_tree_text(message)}. "
            "Return jaxfl.Message(update)."
        )
    # Clipping scales an update, and noise is added to it, so its numbers cannot be whole.
    for path, leaf in jax.tree.leaves_with_path(message.update):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            where = f"message.update{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"client_update must return floating numbers in {where}, got {leaf.dtype}. "
                "Convert them to float32."
            )


def _check_info(info: Any) -> None:
    """Require single numbers by identifiers."""
    # The engine averages each entry over the participants.
    if not isinstance(info, dict) or any(leaf.shape != () for leaf in info.values()):
        raise ValueError(
            f"client_update must return info as a dict of single numbers, got {_tree_text(info)}. "
            "Give each number the shape ()."
        )
    # The names become columns of the metrics.
    if wrong := [name for name in info if not isinstance(name, str) or not name.isidentifier()]:
        raise ValueError(
            f"client_update must give info by identifiers, got {wrong[0]!r}. "
            "Use letters, digits and _ in its names."
        )


def check_evaluation(algorithm: Algorithm, clients: Clients) -> tuple[Tree, Tree]:
    """Require that a method can evaluate these clients.

    Returns:
        The shapes of the first states of the server and the clients.

    Raises:
        TypeError: A field of the algorithm has the wrong type.
        ValueError: A function fails, or returns another value or other shapes than the engine
            expects. The message names the function.
    """
    _check_fields(algorithm)
    key = jax.eval_shape(lambda: key_of(0))
    params = _check_model(algorithm.model, clients, key)
    server, states = _started(algorithm, clients, key)
    _check_personal(algorithm, params, key, server, _of_one(states), _data_of_one(clients))
    return server, states


def check_state(name: str, value: Any, expected: Tree) -> Tree:
    """Require arrays with the structure, shapes and dtypes that `init` makes, and return them.

    Args:
        name: Name of the argument.
        value: The arrays that the caller gave.
        expected: The shapes that `init` makes.
    """
    remedy = "Give the state that a run of this method left, for these clients."
    try:
        shapes = jax.eval_shape(lambda state: state, value)
    # A Python integer of more bits than its dtype has overflows.
    except (TypeError, OverflowError):
        raise TypeError(f"{name} must be arrays, got {show(value)}. {remedy}") from None
    if jax.tree.structure(shapes) != jax.tree.structure(expected):
        raise ValueError(
            f"{name} must be like {_tree_text(expected)}, which init makes, got "
            f"{_tree_text(shapes)}. {remedy}"
        )
    wanted = jax.tree.leaves(expected)
    for (path, own), like in zip(jax.tree.leaves_with_path(shapes), wanted, strict=True):
        if (own.shape, own.dtype) != (like.shape, like.dtype):
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"{where} must be {_tree_text(like)}, which init makes, got {_tree_text(own)}. "
                f"{remedy}"
            )
    return value


def _check_fields(algorithm: Algorithm) -> None:
    for name, kind in {"name": str, "model": Model, "mechanism": Mechanism, "terms": Terms}.items():
        check_instance(f"algorithm.{name}", getattr(algorithm, name), (kind,))
    for name in ("init", "client_update", "server_update", "personalize"):
        check_callable(f"algorithm.{name}", getattr(algorithm, name))
    read = algorithm.reads_sampling
    drawn = algorithm.mechanism.sampling
    # `Dropouts` compares by identity, because it holds an array. Facts compare by value.
    if read is not None and of_value("", read) != of_value("", drawn):
        raise ValueError(
            f"algorithm.mechanism must draw cohorts by the sampling of which {algorithm.name!r} "
            f"reads numbers, {read!r}, got {drawn!r}. Build the method with the other sampling, "
            "for instance Dropouts(Full(), 0.8) in place of availability=0.8."
        )


def _started(algorithm: Algorithm, clients: Clients, key: Any) -> tuple[Tree, Tree]:
    """Return the shapes of the first states of the server and the clients."""
    returned = _trace("init", lambda key: algorithm.init(key, clients.num_clients), key)
    server, states = _check_returned("init", returned, ("the server's state", "client states"))
    for path, leaf in jax.tree.leaves_with_path(states):
        if leaf.shape[:1] != (clients.num_clients,):
            raise ValueError(
                f"init must return client states{jax.tree_util.keystr(path)} of shape "
                f"[{clients.num_clients}, ...], got {leaf.shape}. Give each client a row."
            )
    return server, states


def state_shapes(algorithm: Algorithm, clients: int) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the client states [C, ...] as a list, empty if clients keep none."""
    _, states = jax.eval_shape(lambda: algorithm.init(key_of(0), clients))
    return jax.tree.leaves(states)


def given_to_client(algorithm: Algorithm, clients: Clients) -> tuple[Any, Tree, Tree, ClientData]:
    """Return the shapes of the arguments of `client_update`: key, server, client and data."""
    key = jax.eval_shape(lambda: key_of(0))
    server, states = _started(algorithm, clients, key)
    noise = None
    if algorithm.dp_sgd is not None:
        noise = StepNoise(jax.ShapeDtypeStruct((), jnp.float32), key)
    return key, server, _of_one(states), _data_of_one(clients, noise)


def _of_one(tree: Tree) -> Tree:
    """Return the shapes without their first axis, which counts the clients."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def _data_of_one(clients: Clients, noise: StepNoise | None = None) -> ClientData:
    """Return one client's `ClientData` with shapes in place of arrays."""
    shapes: Any = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, _canonical(leaf.dtype)), clients
    )
    size, start = _of_one((shapes.train_size, shapes.train.start))
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    # Results have the same shapes for all capacities of a population, so the largest one serves.
    largest = max(1, int(np.max(clients.train_size)))
    store = shapes.inputs, shapes.labels, shapes.train.flat
    return ClientData(*store, size, scalar, noise, scalar, start, largest)


def _check_personal(
    algorithm: Algorithm, params: Tree, key: Any, server: Tree, client: Tree, data: ClientData
) -> None:
    personal = _trace("personalize", algorithm.personalize, key, server, client, data)
    _check_same("personalize", "parameters", personal, params, "the model has")


# The cache limits the warning to one for each method, for any number of runs.
@functools.cache
def _warn_of_restarts(name: str) -> None:
    if jax.process_index() == 0:
        _LOG.warning(
            "%s: the schedule in the clients' optimizer starts again in every round. "
            "Give a schedule over rounds as LocalSGD(decay=...)",
            name,
        )


def check_mechanism(algorithm: Algorithm, clients: Clients, update: Tree) -> None:
    """Require that a mechanism can make its first state for these clients and this update."""
    start = functools.partial(
        algorithm.mechanism.init, update=lambda: update, clients=clients.num_clients
    )
    jax.eval_shape(lambda: start(key_of(0)))


def check_examples(name: str, algorithm: Algorithm, clients: Clients) -> Tree:
    """Require examples that a method's network can score, and return shapes of its server's state.

    Args:
        name: Name of the argument that has the examples, for errors.
        algorithm: The method.
        clients: Clients that test these examples.
    """
    _check_fields(algorithm)
    key = jax.eval_shape(lambda: key_of(0))
    try:
        _check_model(algorithm.model, clients, key)
    except ValueError as error:
        # The check names fields of clients, but the caller gave examples under another name.
        reason = str(error).replace("clients.", f"{name}.")
        raise ValueError(
            f"{name} must have examples for the method's network, got others: {reason}"
        ) from error
    server, _ = _started(algorithm, clients, key)
    return server


def _check_model(model: Model, clients: Clients, key: Any) -> Tree:
    """Require a model for the clients' inputs and labels, and return its parameters' shapes."""
    shape = clients.inputs.shape[1:]
    if model.input_shape is not None and tuple(shape) != model.input_shape:
        raise ValueError(
            f"model must take inputs of shape {shape}, the shape of clients.inputs, got "
            f"model={model.name!r} for shape {model.input_shape}. Make the model for the clients."
        )
    batch = _batch_of_two(clients.inputs)
    subject = f"model={model.name!r} with inputs {batch.dtype}{shape}"
    params = _trace(f"{subject}: init", model.init, key)
    outputs = _trace(
        subject, lambda params, x: model.apply(params, model.prepare(x)), params, batch
    )
    if not outputs.shape or outputs.shape[0] != 2:
        raise ValueError(
            f"{subject} must map a batch of 2 to outputs [2, ...], got {outputs.shape}. "
            "Give each example its outputs."
        )
    check_table_rows("clients.inputs", model, clients.inputs)
    task = check_instance("model.task", model.task, (Task,))
    labels = np.asarray(clients.labels)
    try:
        task.check(outputs, labels)
    except ValueError as error:
        raise ValueError(f"{subject} {error}") from None
    _check_task(task, outputs, _batch_of_two(labels))
    return params


def _batch_of_two(examples: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a batch of two examples."""
    # A batch of 1 would not show whether a network keeps the axis of examples.
    return jax.ShapeDtypeStruct((2, *examples.shape[1:]), _canonical(examples.dtype))


def _check_task(task: Task, outputs: Any, labels: Any) -> None:
    """Require a loss for each example, and metrics whose value is a single number."""
    losses = _trace(f"task={task.name!r}: loss", task.loss, outputs, labels)
    if losses.shape != (2,):
        raise ValueError(
            f"task={task.name!r}: loss must return one loss per example, got {_tree_text(losses)} "
            "for a batch of 2. Leave out the mean over examples."
        )
    weights = jax.ShapeDtypeStruct((2,), jnp.float32)
    for name, metric in task.metrics.items():
        subject = f"task={task.name!r}: metrics[{name!r}]"
        sums = _trace(f"{subject}.sums", metric.sums, outputs, labels, weights)
        # An evaluation carries the sums through a loop, so merging must keep their shapes.
        merged = _trace(f"{subject}.merge", metric.merge, sums, sums)
        _check_same(f"{subject}.merge", "sums", merged, sums, f"{subject}.sums returns")
        value = _trace(f"{subject}.value", metric.value, sums)
        if value.shape != ():
            raise ValueError(
                f"{subject}.value must return a single number, got {_tree_text(value)}. "
                "Reduce it to the shape ()."
            )


def _canonical(dtype: Any) -> np.dtype:
    """Return the dtype that a run gives to arrays of `dtype`, which has at most 32 bits."""
    return jax.dtypes.canonicalize_dtype(dtype)


_OPTIMIZER_REMEDY = (
    "Give an optimizer whose step follows from gradients alone, such as optax.sgd or optax.adam: "
    "polyak_sgd, reduce_on_plateau and lbfgs also need the loss."
)


def _trace(name: str, function: Callable, *arguments: Any) -> Any:
    """Return the shapes that a function returns, or raise a ValueError that names the function."""
    try:
        return jax.eval_shape(function, *arguments)
    # The function may be the user's own, and may raise anything.
    except Exception as error:
        argument_texts = ", ".join(_tree_text(argument) for argument in arguments)
        raise ValueError(
            f"{name} must run, got {_cause(error)} It ran with {argument_texts}."
        ) from error


def _cause(error: Exception) -> str:
    """Return the kind and the message of an error, with a remedy if one is known."""
    cause = f"{type(error).__name__}: {str(error).removesuffix('.')}."
    # Optax gives no loss to an optimizer that needs one, which Python reports in these words.
    if "update_fn() missing" in cause:
        return f"{cause} {_OPTIMIZER_REMEDY}"
    return cause


def _check_returned(name: str, value: Any, parts: tuple[str, ...]) -> tuple:
    # A NamedTuple, such as a message alone, is no tuple of all results.
    if type(value) is tuple and len(value) == len(parts):
        return value
    raise ValueError(
        f"{name} must return a tuple of {', '.join(parts)}, got {_tree_text(value)}. "
        "Return them in this order."
    )


def _check_same(name: str, what: str, value: Tree, wanted: Tree, origin: str) -> None:
    """Require the same structure, and leaves of the same shapes and dtypes.

    Args:
        name: Name of the function that returned the value.
        what: What the function must return, in words.
        value: The shapes that were returned.
        wanted: The shapes that are required.
        origin: Source of the required shapes, as in "which init makes".
    """
    if jax.tree.structure(value) != jax.tree.structure(wanted):
        raise ValueError(
            f"{name} must return {what} like {_tree_text(wanted)}, which {origin}, got "
            f"{_tree_text(value)}. Keep the structure."
        )
    leaves = jax.tree.leaves_with_path(value)
    for (path, new), old in zip(leaves, jax.tree.leaves(wanted), strict=True):
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"{name} must return {what}{jax.tree_util.keystr(path)} as {_tree_text(old)}, "
                f"which {origin}, got {_tree_text(new)}. Keep shape and dtype."
            )


def _tree_text(tree: Tree) -> str:
    """Return a tree as text, with the dtype and shape of each leaf, cut after 300 characters."""

    def described(leaf: Any) -> Any:
        if hasattr(leaf, "dtype"):
            return _Text(f"{leaf.dtype}{leaf.shape}")
        return leaf

    text = str(jax.tree.map(described, tree))
    if len(text) <= 300:
        return text
    return f"{text[:300]}..."


class _Text(str):
    """Text that a printed tree shows without quotes."""

    __repr__ = str.__str__
