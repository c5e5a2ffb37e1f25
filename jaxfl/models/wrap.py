"""Your own Flax module, linen or nnx, as a model."""

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

from jaxfl._validate import check_counts, check_layers, checked, key_of, show
from jaxfl.backend import Form
from jaxfl.lazy import nnx
from jaxfl.models._rewrite import in_form
from jaxfl.models._tables import tables_of
from jaxfl.models.layers import as_floats
from jaxfl.models.zoo import depth_order
from jaxfl.tasks import Task, classification
from jaxfl.types import Model, Params

T = TypeVar("T")


def scale_bytes(inputs: Shaped[Array, "B ..."]) -> Shaped[Array, "B ..."]:
    """Bytes are images, normalised to [-1, 1]; other inputs go to the module unchanged."""
    return as_floats(inputs) if inputs.dtype == jnp.uint8 else inputs


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
    """Wrap a Flax linen module that maps a batch `[B, *input_shape]` to outputs `[B, ...]`, logits `[B, K]` by default.

    Bytes are images, normalised to [-1, 1]; all other numbers, floats and tokens, are passed on unchanged. A
    module with methods `extract` (batch to features [B, F]) and `classify` (features to logits) has its head fitted on
    cached features; otherwise the head is trained through the whole network. Dropout, and whatever else draws, does so
    in training only: a module that draws has an argument `train`, `training` or `deterministic` in its call, and in
    `extract` and `classify` where these draw.

    Args:
        module: without batch statistics, or other collections than `params`.
        input_shape: shape of one example.
        head: names of the top-level layers that are the head (default: the last one).
        name: for reports (default: the module's class).
        prepare: from a stored batch to the module's input, for instance
            `lambda x: x.astype(jnp.int32)` for tokens that are stored as bytes.
        task: what the outputs are for (see `jaxfl.tasks`).
        form: of convolutions and pooling: "winograd" or "im2col", for CPUs, and "grouped" or "packed", for GPUs, where
            square kernels have one; see `jaxfl.models.layers`. Any other, such as "lax", runs the module as it is.
            None: "winograd" on a CPU, where it is many times as fast, "grouped" on a GPU, "lax" on a TPU.
        vocabulary: number of rows of the table that the inputs index; a run refuses inputs outside [0, vocabulary).
            None: the size of the table that the traced program looks the inputs up in as they are, if there is one.

    Raises:
        ValueError: the module does not take a batch of that shape, keeps more than parameters, draws in evaluation,
            does not give [B, ...], or has no layer of a head's name.

    >>> network = nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(16), nn.relu, nn.Dense(10)])
    >>> model = from_flax(network, (8, 8, 1))
    >>> model.layers, model.head
    (('layers_1', 'layers_3'), ('layers_3',))
    """

    def variables(key: Array, batch: Array) -> Any:
        mode: dict[str, Any] = _mode(module, "__call__", None)
        return module.init(key, batch, **mode)

    def call(method: str, params: Params, x: Array, key: Array | None) -> Any:
        rngs = None if key is None else {"params": key}  # other streams derive from it
        return module.apply(
            {"params": params}, x, method=method, rngs=rngs, **_mode(module, method, key)
        )

    options = {
        "head": head,
        "name": name,
        "prepare": prepare,
        "task": task,
        "form": form,
        "vocabulary": vocabulary,
    }
    return _model(_Network(module, variables, call), tuple(input_shape), **options)


def _check_nnx(name: str, value: Any) -> Any:
    if not isinstance(value, nnx.Module) and not callable(value):
        raise TypeError(
            f"{name}={show(value)}: give an nnx.Module, or a function of nnx.Rngs that makes one"
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
    """Wrap a Flax nnx module, as `from_flax` does a linen one.

    Its layers are its attributes with parameters, in the order in which `__init__` sets them; each layer of a list is
    one, `layers_0` for instance. It draws in training only: `module.train()` and `module.eval()` switch dropout.

    Args:
        module: a function of `nnx.Rngs`, such as `lambda rngs: Net(10, rngs=rngs)`, whose parameters a run draws by its
            key; or an instance, whose own parameters every run starts from. It keeps nothing but `nnx.Param`.
        input_shape: as for `from_flax`, like the other arguments.
        head: names of layers.
        name: for reports.
        prepare: from a stored batch to the module's input.
        task: what the outputs are for.
        form: of convolutions and pooling.
        vocabulary: number of rows of the table that the inputs index; None: found as by `from_flax`.

    Raises:
        ValueError: as `from_flax`.

    >>> model = from_nnx(lambda rngs: nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)), (4,))
    >>> model.layers, model.head
    (('layers_0', 'layers_1'), ('layers_1',))
    """

    def make(rngs: nnx.Rngs) -> Any:
        made = module if isinstance(module, nnx.Module) else module(rngs)
        if not isinstance(made, nnx.Module):
            raise TypeError(
                f"module={show(module)} makes {show(made)}: give a function of nnx.Rngs to an nnx.Module"
            )
        return made

    instance: Any = (
        module if isinstance(module, nnx.Module) else nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    )
    graph, own, rest = nnx.split(instance, nnx.Param, ...)
    shapes = [
        (path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        for path, leaf in nnx.to_flat_state(own)
    ]
    kept = {
        type(leaf).__name__: leaf
        for _, leaf in nnx.to_flat_state(rest)
        if not isinstance(leaf, nnx.RngState)
    }

    def variables(key: Array, _batch: Array) -> Any:
        made = make(nnx.Rngs(key))
        attributes, leaves = list(vars(made)), nnx.to_flat_state(nnx.state(made, nnx.Param))
        leaves = sorted(leaves, key=lambda leaf: attributes.index(leaf[0][0]))
        params = {_named(path): variable[...] for path, variable in leaves}
        return ({"params": unflatten_dict(params)} if params else {}) | kept

    def call(method: str, params: Params, x: Array, key: Array | None) -> Array:
        flat = flatten_dict(params)
        # A head gets its own parameters alone: the others are shapes, which nothing can compute with.
        values = [flat.get(_named(path), shape) for path, shape in shapes]
        streams = [_stream(key, number, leaf) for number, leaf in enumerate(jax.tree.leaves(rest))]
        # New variables: those of `rest` could not count within this trace.
        states = (
            jax.tree.unflatten(jax.tree.structure(tree), new)
            for tree, new in ((own, values), (rest, streams))
        )
        merged = nnx.merge(graph, *states)
        merged.eval() if key is None else merged.train()
        return getattr(merged, method)(x, **_mode(merged, method, key))

    options = {
        "head": head,
        "name": name,
        "prepare": prepare,
        "task": task,
        "form": form,
        "vocabulary": vocabulary,
    }
    return _model(_Network(instance, variables, call), tuple(input_shape), **options)


def _named(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Of an nnx parameter: a layer of a list at the top is one of the model's."""
    if len(path) > 1 and isinstance(path[1], int):
        path = (f"{path[0]}_{path[1]}", *path[2:])
    return tuple(map(str, path))


def _stream(key: Array | None, number: int, leaf: Any) -> Array:
    """A new value of one leaf of nnx's streams: a key, or how often it was used."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.zeros(leaf.shape, leaf.dtype)
    key = jax.random.fold_in(key_of(0) if key is None else key, number)
    return jax.random.split(key, leaf.shape) if leaf.shape else key


class _Network(NamedTuple):
    """A module, its variables by collections for a key and a batch, and one of its methods as a pure function."""

    module: Any
    variables: Callable[[Array, Array], Any]
    call: Callable[[str, Params, Array, Array | None], Array]


def _mode(module: Any, method: str, key: Array | None) -> dict[str, bool]:
    """The argument that says whether this is training, where a method has one."""
    names = inspect.signature(getattr(module, method)).parameters
    values = {"train": key is not None, "training": key is not None, "deterministic": key is None}
    return {name: value for name, value in values.items() if name in names}


def _model(
    network: _Network,
    input_shape: tuple[int, ...],
    *,
    head: Sequence[str] | None,
    name: str | None,
    prepare: Callable[[Array], Array],
    task: Task,
    form: Form | None,
    vocabulary: int | None,
) -> Model:
    kind = type(network.module).__name__

    def method(method: str) -> Callable[..., Array]:
        function = in_form(functools.partial(network.call, method), form)
        return lambda params, x, key=None: function(params, x, key)

    def made(key: Array, inputs: Array) -> tuple[Any, Any]:
        """Variables, and outputs where there are parameters alone."""
        batch = prepare(inputs)
        variables = network.variables(key, batch)
        outputs = (
            network.call("__call__", variables["params"], batch, None)
            if set(variables) == {"params"}
            else None
        )
        return variables, outputs

    dtype, program, variables, outputs = _first_taken(made, kind, input_shape)
    if "params" not in variables:
        raise ValueError(f"module={kind} has no parameters: give one that can be trained")
    if kept := set(variables) - {"params"}:
        raise ValueError(
            f"module={kind} keeps {sorted(kept)}: use layers without state, GroupNorm for BatchNorm"
        )
    if not outputs.shape or outputs.shape[0] != 2:
        raise ValueError(
            f"module={kind} maps a batch of 2 to {outputs.shape}: give outputs [B, ...]"
        )

    def init(key: Array) -> Params:
        return network.variables(key, prepare(jnp.zeros((2, *input_shape), dtype)))["params"]

    layers = depth_order(init)
    head = layers[-1:] if head is None else tuple(head)
    if not head or not set(head) <= set(layers):
        raise ValueError(f"head={head!r}: name at least one of the module's layers {layers}")
    split = hasattr(network.module, "extract") and hasattr(network.module, "classify")
    extract, classify = (method(part) if split else None for part in ("extract", "classify"))
    model = Model(
        name or kind, init, prepare, extract, classify, method("__call__"), None, layers, head
    )
    if vocabulary is None:
        vocabulary = min(tables_of(program), default=None)
    return model._replace(input_shape=input_shape, task=task, vocabulary=vocabulary)


def with_either(look: Callable[[Any], T]) -> tuple[Any, T]:
    """The dtype that inputs may have, floats or, for embeddings of tokens, whole numbers; and what a look at it gives.

    Raises:
        ExceptionGroup: neither fits.
    """
    errors = []
    for dtype in (jnp.float32, jnp.int32):
        try:
            return dtype, look(dtype)
        except Exception as error:
            errors.append(error)
    raise ExceptionGroup("inputs are neither floats nor whole numbers", errors)


def _first_taken(
    made: Callable[[Array, Array], Any], kind: str, input_shape: tuple[int, ...]
) -> tuple[Any, core.ClosedJaxpr, Any, Any]:
    """Return the dtype that a module takes, and the traced program and the shapes of what it makes of a batch."""

    def trace(dtype: Any) -> tuple[core.ClosedJaxpr, Any]:
        batch = jax.ShapeDtypeStruct((2, *input_shape), dtype)
        return jax.make_jaxpr(lambda inputs: made(key_of(0), inputs), return_shape=True)(batch)

    try:
        dtype, (program, (variables, outputs)) = with_either(trace)
        return dtype, program, variables, outputs
    except ExceptionGroup as group:
        errors = group.exceptions
    if any(
        isinstance(error, flax.errors.InvalidRngError) or "deterministic" in str(error)
        for error in errors
    ):
        remedy = "give its call an argument `train`, `training` or `deterministic` that switches this off"
        raise ValueError(f"module={kind} draws in evaluation too: {remedy}") from errors[0]
    refusal = f"module={kind} does not take a batch of input_shape={input_shape!r}"
    raise ValueError(f"{refusal}: {errors[0]}") from errors[0]
