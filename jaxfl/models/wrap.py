"""Models from your own Flax modules, linen or nnx."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array
from jax.extend import core
from jaxtyping import Shaped

from jaxfl._support.backend import Form
from jaxfl._support.checks import check_counts, check_layers, checked, key_of, show
from jaxfl._support.lazy import nnx
from jaxfl.models.layers import as_floats
from jaxfl.models.rewrite import in_form
from jaxfl.models.tables import tables_of
from jaxfl.models.zoo import depth_order
from jaxfl.tasks import Task, classification
from jaxfl.types import Model, Params

T = TypeVar("T")


def scale_bytes(inputs: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
    """Scale bytes, which are pictures, to [-1, 1], and return other inputs unchanged."""
    if inputs.dtype == jnp.uint8:
        return as_floats(inputs)
    return inputs


@checked(input_shape=functools.partial(check_counts, empty=False), head=check_layers)
def from_flax(
    module: nn.Module,
    input_shape: Sequence[int],
    *,
    head: Sequence[str] | None = None,
    name: str | None = None,
    prepare: Callable[[Array], Array] = scale_bytes,
    task: Task = classification(),
    form: Form | None = None,
    vocabulary: int | None = None,
) -> Model:
    """Wrap a Flax linen module that maps a batch `[B, *input_shape]` to outputs `[B, ...]`.

    Outputs are logits `[B, K]` by default. Bytes are pictures, which are scaled to [-1, 1]. All
    other numbers, floats and tokens, reach the module unchanged.

    A module may have the methods `extract` (batch to features [B, F]) and `classify` (features to
    logits). Methods that train the head alone then compute the features once. Otherwise they train
    the head through the full network.

    Dropout and other random layers draw in training only. A module with such layers needs an
    argument `train`, `training` or `deterministic` in its call, and in `extract` and `classify` if
    these draw.

    Args:
        module: The module. It has no batch statistics, and no collections other than `params`.
        input_shape: Shape of one example.
        head: Names of the top-level layers that form the head. The default is the last one.
        name: Name of the model in reports. The default is the module's class.
        prepare: Function from a stored batch to the module's input, for instance
            `lambda x: x.astype(jnp.int32)` for tokens that are stored as bytes.
        task: Task of the outputs (see `jaxfl.tasks`).
        form: Form of convolutions and pooling (see `jaxfl.models.layers`). "winograd" suits CPUs.
            On GPUs "im2col" suits networks that pool, and "grouped" suits residual networks with
            square kernels. Any other form evaluates the module as it is. The default is "winograd"
            on a CPU and "im2col" on a GPU. On a TPU it evaluates the module as it is.
        vocabulary: Number of rows of the table that the inputs index. A run raises a ValueError for
            inputs outside [0, vocabulary). The default is the number of rows of the smallest table
            that the traced program indexes by its unchanged inputs, if there is one.

    Raises:
        ValueError: The module does not take a batch of this shape, or does not return [B, ...]. It
            has no parameters, keeps more than parameters, or draws in evaluation. `head` is empty,
            or has a name that no layer has.

    >>> def flat(x):
    ...     return x.reshape(len(x), -1)
    >>> network = nn.Sequential([flat, nn.Dense(16), nn.relu, nn.Dense(10)])
    >>> model = from_flax(network, (8, 8, 1))
    >>> model.layers, model.head
    (('layers_1', 'layers_3'), ('layers_3',))
    """

    def variables(key: Array, batch: Array) -> Any:
        # Nothing draws in evaluation, so the parameters need no other stream.
        mode: dict[str, Any] = _mode(module, "__call__", None)
        return module.init(key, batch, **mode)

    def call(method: str, params: Params, x: Array, key: Array | None) -> Any:
        # Flax derives all other streams from this one.
        rngs: dict[str, Array] | None = None
        if key is not None:
            rngs = {"params": key}
        mode = _mode(module, method, key)
        return module.apply({"params": params}, x, method=method, rngs=rngs, **mode)

    return _checked_model(
        _PureModule(module, variables, call),
        tuple(input_shape),
        head=head,
        name=name,
        prepare=prepare,
        task=task,
        form=form,
        vocabulary=vocabulary,
    )


def _check_nnx(name: str, value: Any) -> Any:
    if not isinstance(value, nnx.Module) and not callable(value):
        raise TypeError(
            f"{name} must be an nnx.Module, or a function of nnx.Rngs that returns one, got "
            f"{show(value)}. Give one, for instance lambda rngs: Net(10, rngs=rngs)."
        )
    return value


@checked(
    module=_check_nnx, input_shape=functools.partial(check_counts, empty=False), head=check_layers
)
def from_nnx(
    module: Any,
    input_shape: Sequence[int],
    *,
    head: Sequence[str] | None = None,
    name: str | None = None,
    prepare: Callable[[Array], Array] = scale_bytes,
    task: Task = classification(),
    form: Form | None = None,
    vocabulary: int | None = None,
) -> Model:
    """Wrap a Flax nnx module that maps a batch `[B, *input_shape]` to outputs `[B, ...]`.

    The layers are the module's attributes with parameters, in the order in which `__init__` sets
    them. Each layer of a list is a layer of its own, for instance `layers_0`. The module draws in
    training only, because `module.train()` and `module.eval()` switch dropout. See `from_flax` for
    the scaling of bytes, and for the methods `extract` and `classify`.

    Args:
        module: Function of `nnx.Rngs`, such as `lambda rngs: Net(10, rngs=rngs)`, whose
            parameters a run draws from its key. Or an instance, whose own parameters start every
            run. The module has no variables other than `nnx.Param` and the streams of `nnx.Rngs`.
        input_shape: Shape of one example.
        head: Names of the layers that form the head. The default is the last one.
        name: Name of the model in reports. The default is the module's class.
        prepare: Function from a stored batch to the module's input. The default scales bytes to
            [-1, 1].
        task: Task of the outputs (see `jaxfl.tasks`).
        form: Form of convolutions and pooling (see `from_flax`). The default suits the devices.
        vocabulary: Number of rows of the table that the inputs index. The default is found in
            the traced program (see `from_flax`).

    Raises:
        TypeError: `module` is neither an `nnx.Module` nor a function that returns one.
        ValueError: The module does not take a batch of this shape, or does not return [B, ...]. It
            has no parameters, keeps more than parameters, or draws in evaluation. `head` is empty,
            or has a name that no layer has.

    >>> def network(rngs):
    ...     return nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs))
    >>> model = from_nnx(network, (4,))
    >>> model.layers, model.head
    (('layers_0', 'layers_1'), ('layers_1',))
    """
    instance: Any = module
    if not isinstance(module, nnx.Module):
        # Only the structure is read here, because `variables` draws the parameters of each key.
        instance = nnx.eval_shape(lambda: _instance(module, nnx.Rngs(0)))
    graph, own, rest = nnx.split(instance, nnx.Param, ...)
    shapes = [
        (path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        for path, leaf in nnx.to_flat_state(own)
    ]
    # Variables other than parameters, which `_checked_model` does not accept.
    others = {
        type(leaf).__name__: leaf
        for _, leaf in nnx.to_flat_state(rest)
        if not isinstance(leaf, nnx.RngState)
    }

    def variables(key: Array, _batch: Array) -> Any:
        params = _params_in_order(_instance(module, nnx.Rngs(key)))
        # A module without parameters lacks the collection, as in Flax linen.
        if not params:
            return others
        return {"params": params} | others

    def call(method: str, params: Params, x: Array, key: Array | None) -> Array:
        flat = flatten_dict(params)
        # A head gets only its own parameters. Shapes stand for the others, which it does not read.
        values = [flat.get(_names_of_path(path), shape) for path, shape in shapes]
        params_state = jax.tree.unflatten(jax.tree.structure(own), values)
        merged = nnx.merge(graph, params_state, _new_streams(rest, key))
        if key is None:
            merged.eval()
        else:
            merged.train()
        return getattr(merged, method)(x, **_mode(merged, method, key))

    return _checked_model(
        _PureModule(instance, variables, call),
        tuple(input_shape),
        head=head,
        name=name,
        prepare=prepare,
        task=task,
        form=form,
        vocabulary=vocabulary,
    )


def _instance(module: Any, rngs: Any) -> Any:
    """Return an nnx module, or what a function of nnx.Rngs makes if it is one.

    Raises:
        TypeError: The function makes something else.
    """
    instance = module
    if not isinstance(module, nnx.Module):
        instance = module(rngs)
    if not isinstance(instance, nnx.Module):
        raise TypeError(
            f"module must be a function of nnx.Rngs that returns a module, got {show(module)}, "
            f"which makes {show(instance)}. Return an nnx.Module."
        )
    return instance


def _params_in_order(instance: Any) -> dict[str, Any]:
    """Return the parameters of an nnx module by layers, in the order in which they were set."""
    # A flat state is sorted by names, and layers are in the order in which `__init__` set them.
    attributes = list(vars(instance))
    leaves = nnx.to_flat_state(nnx.state(instance, nnx.Param))
    leaves = sorted(leaves, key=lambda leaf: attributes.index(leaf[0][0]))
    flat = {_names_of_path(path): variable[...] for path, variable in leaves}
    return unflatten_dict(flat)


def _names_of_path(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the path of an nnx parameter as names, which lead through a tree of parameters.

    An attribute that is a list and a position in it become one name, such as `layers_0`.
    """
    if len(path) > 1 and isinstance(path[1], int):
        path = (f"{path[0]}_{path[1]}", *path[2:])
    return tuple(map(str, path))


def _new_streams(streams: Any, key: Array | None) -> Any:
    """Return new values of nnx's streams for a trace.

    Args:
        streams: State of the streams.
        key: Key of all streams, or None in evaluation.
    """
    # The old streams could not count their uses within the trace.
    leaves = enumerate(jax.tree.leaves(streams))
    new = [_stream(key, number, leaf) for number, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(streams), new)


def _stream(key: Array | None, number: int, leaf: Any) -> Array:
    """Return a new value of one leaf of nnx's streams.

    A leaf is the key of a stream, or the number of times that the stream was used.

    Args:
        key: Key of all streams. None stands for a fixed key, in evaluation.
        number: Number of the leaf, from which its own key is derived.
        leaf: The leaf, of which only shape and dtype are read. A count becomes 0.
    """
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.zeros(leaf.shape, leaf.dtype)
    if key is None:
        key = key_of(0)
    key = jax.random.fold_in(key, number)
    # A stream may hold an array of keys, for instance after `nnx.split_rngs`.
    if leaf.shape:
        return jax.random.split(key, leaf.shape)
    return key


class _PureModule(NamedTuple):
    """Module of any kind as pure functions."""

    module: Any
    """The module itself, for its name and its methods' signatures."""
    variables: Callable[[Array, Array], Any]
    """Function from a key and a batch to the module's variables by collections."""
    call: Callable[[str, Params, Array, Array | None], Array]
    """Function from a method's name, parameters, a batch and a key to the method's result.

    The key is None in evaluation.
    """


def _mode(module: Any, method: str, key: Array | None) -> dict[str, bool]:
    """Return the method's arguments that switch between training and evaluation, by name.

    Args:
        module: The module.
        method: Name of the method.
        key: Key in training, or None in evaluation.
    """
    names = inspect.signature(getattr(module, method)).parameters
    train = key is not None
    values = {"train": train, "training": train, "deterministic": not train}
    return {name: value for name, value in values.items() if name in names}


def _checked_model(
    network: _PureModule,
    input_shape: tuple[int, ...],
    *,
    head: Sequence[str] | None,
    name: str | None,
    prepare: Callable[[Array], Array],
    task: Task,
    form: Form | None,
    vocabulary: int | None,
) -> Model:
    """Return the model of a network, or raise a ValueError as in `from_flax`."""
    kind = type(network.module).__name__

    def method(method: str) -> Callable[..., Array]:
        function = in_form(functools.partial(network.call, method), form)
        return lambda params, x, key=None: function(params, x, key)

    def variables_and_outputs(key: Array, inputs: Array) -> tuple[Any, Any]:
        """Return variables, and outputs if the variables are parameters only."""
        batch = prepare(inputs)
        variables = network.variables(key, batch)
        outputs = None
        if set(variables) == {"params"}:
            outputs = network.call("__call__", variables["params"], batch, None)
        return variables, outputs

    dtype, program, variables, outputs = _first_taken(variables_and_outputs, kind, input_shape)
    _check_variables(kind, variables, outputs)

    def init(key: Array) -> Params:
        batch = prepare(jnp.zeros((2, *input_shape), dtype))
        return network.variables(key, batch)["params"]

    layers = depth_order(init)
    # A model is split by both methods or not at all.
    extract: Callable[..., Array] | None = None
    classify: Callable[..., Array] | None = None
    if hasattr(network.module, "extract") and hasattr(network.module, "classify"):
        extract = method("extract")
        classify = method("classify")
    if vocabulary is None:
        # Inputs must lie in each of the tables that they index.
        vocabulary = min(tables_of(program), default=None)
    return Model(
        name=name or kind,
        init=init,
        prepare=prepare,
        extract=extract,
        classify=classify,
        apply=method("__call__"),
        sum_grad_squared=None,
        layers=layers,
        head=_head_of(layers, head),
        input_shape=input_shape,
        task=task,
        vocabulary=vocabulary,
    )


def _check_variables(kind: str, variables: Any, outputs: Any) -> None:
    """Require parameters and no other variables, and outputs for a batch of 2.

    Args:
        kind: Name of the module's class.
        variables: Shapes of the module's variables, by collections.
        outputs: Shape of the module's outputs, or None if the module has other variables.
    """
    if "params" not in variables:
        raise ValueError(
            f"module must have parameters, got {kind} without any. Give one that can be trained."
        )
    if others := set(variables) - {"params"}:
        raise ValueError(
            f"module must keep nothing but parameters, got {kind} with {sorted(others)}. Use "
            "layers without state, such as GroupNorm instead of BatchNorm."
        )
    if not outputs.shape or outputs.shape[0] != 2:
        raise ValueError(
            f"module must map a batch of 2 to outputs [2, ...], got {kind} with outputs of shape "
            f"{outputs.shape}. Return one output for each example."
        )


def _head_of(layers: tuple[str, ...], head: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of a head's layers, by default the last one, or raise a ValueError."""
    # Layers are in the order of depth.
    if head is None:
        head = layers[-1:]
    names = tuple(head)
    if not names or not set(names) <= set(layers):
        raise ValueError(
            f"head must name one or more layers of the module, got {names!r}. Choose from {layers}."
        )
    return names


def with_either(look: Callable[[Any], T]) -> tuple[Any, T]:
    """Return the first dtype of inputs that a function takes, and the function's result.

    It tries float32, then int32 for embeddings of tokens.

    Args:
        look: Function of the dtype.

    Raises:
        ExceptionGroup: The function raises for both dtypes.
    """
    errors = []
    for dtype in (jnp.float32, jnp.int32):
        try:
            return dtype, look(dtype)
        except Exception as error:
            # A module may raise errors of any kind for inputs of the other dtype.
            errors.append(error)
    raise ExceptionGroup("inputs are neither floats nor whole numbers", errors)


def _first_taken(
    made: Callable[[Array, Array], Any], kind: str, input_shape: tuple[int, ...]
) -> tuple[Any, core.ClosedJaxpr, Any, Any]:
    """Return a module's input dtype, its traced program, and shapes of its variables and outputs.

    Args:
        made: Function of a key and inputs that returns variables and outputs.
        kind: Name of the module's class, for errors.
        input_shape: Shape of one example.

    Raises:
        ValueError: The module takes neither float32 nor int32 inputs of this shape.
    """

    def trace(dtype: Any) -> tuple[core.ClosedJaxpr, Any]:
        batch = jax.ShapeDtypeStruct((2, *input_shape), dtype)
        return jax.make_jaxpr(lambda inputs: made(key_of(0), inputs), return_shape=True)(batch)

    try:
        dtype, (program, (variables, outputs)) = with_either(trace)
        return dtype, program, variables, outputs
    except ExceptionGroup as group:
        errors = group.exceptions
    # Flax's own dropout asks for `deterministic`, and other layers that draw ask for a stream.
    if any(
        isinstance(error, flax.errors.InvalidRngError) or "deterministic" in str(error)
        for error in errors
    ):
        raise ValueError(
            f"module must not draw in evaluation, got {kind}, which does. Give its call an "
            "argument `train`, `training` or `deterministic` that switches this off."
        ) from errors[0]
    raise ValueError(
        f"module must take a batch of input_shape={input_shape!r}, got {kind}, which raised: "
        f"{errors[0]}. Correct the module or input_shape."
    ) from errors[0]
