"""Any network, traced and evaluated again with its convolutions and pooling in the project's own formulation.

The network is written as usual, by whatever library. Its trace is run operation by operation:

- A convolution becomes batch-minor, with the bias, ReLU and 2x2 max-pool that follow it, if nothing else reads what
  lies between: see `jaxfl.models._convolution`, and `_windows` for strides, distances and groups.
- What follows elementwise, pooling, and sums over axes stay batch-minor. Axes are moved back where an operation needs
  them in order, mostly before the first dense layer.

For GPUs all stays as it lies, and convolutions and 2x2 max-pools are those of `jaxfl.models._plain`, which has
vectorised clients side by side. All else is evaluated as traced.
"""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Literal

from jaxfl.backend import Form, backend
from jaxfl.models import _convolution, _windows
from jaxfl.models._plain import PACKED, convolve_grouped, max_pool
from jaxfl.models._plain import Options as PlainOptions

FORMS: tuple[Form, ...] = ("winograd", "im2col", "grouped", "packed")
"""Those that networks of others are computed in."""


def in_form(function: Callable[..., Any], form: Form | None) -> Callable[..., Any]:
    """The function with the same values, to rounding, and its convolutions and pooling in a form.

    Args:
        function: of pytrees of arrays.
        form: one of `FORMS`, see `jaxfl.models.layers`; any other is the function itself. None: the backend's.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        own = backend().convolution if form is None else form
        if own not in FORMS:
            return function(*args)
        # A new function each time: JAX would keep the trace, which what intercepts Flax's methods must change.
        closed, shapes = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)(*args)  # noqa: PLW0108
        outputs = _evaluate(closed, own)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return call


class _Moved(NamedTuple):
    """An array whose axes lie in another order: `order[i]` is the one at place i."""

    array: Array
    order: tuple[int, ...]


class _Convolution(NamedTuple):
    """A convolution that waits for what follows it: batch-minor maps, a kernel (*sizes, c / groups, f), its options."""

    x: Array
    kernel: Array
    params: dict[str, Any]
    filtered: bool
    order: tuple[int, ...]
    bias: Array | None = None
    relu: bool = False
    pool: bool = False


_Value: TypeAlias = Any
"""An array, or one of the two above."""


def _evaluate(closed: ClosedJaxpr, form: Form) -> Callable[..., list[Any]]:
    return lambda *inputs: [_array(value) for value in _run(closed, inputs, form)]


def _run(closed: ClosedJaxpr, inputs: Sequence[_Value], form: Form) -> list[_Value]:
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *inputs), strict=True))
    atoms = (
        *itertools.chain.from_iterable(equation.invars for equation in jaxpr.eqns),
        *jaxpr.outvars,
    )
    reads = collections.Counter(atom for atom in atoms if not isinstance(atom, Literal))

    def read(atom: Any) -> _Value:
        if isinstance(atom, Literal):
            return atom.val
        if reads[atom] > 1:
            values[atom] = _forced(values[atom])
        return values[atom]

    for equation in jaxpr.eqns:
        with equation.ctx.manager:
            outputs = _apply(equation, [read(atom) for atom in equation.invars], form)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, inputs: list[_Value], form: Form) -> Sequence[_Value]:
    name, params = equation.primitive.name, equation.params
    if name == "jit":
        return _run(params["jaxpr"], inputs, form)
    if form in ("grouped", "packed"):
        if (found := _side_by_side(equation, inputs, form)) is not None:
            return [found]
    elif name == "conv_general_dilated" and _is_covered(equation):
        return [_waiting(inputs[0], inputs[1], params, form == "winograd")]
    elif inputs and isinstance(inputs[0], _Convolution) and (more := _absorbed(equation, *inputs)):
        return [more]
    elif name in ("reduce_window_max", "reduce_window_sum") and _is_window(equation):
        return [_pooled(_forced(inputs[0]), equation)]
    inputs = [_forced(value) for value in inputs]
    if (
        place := next((value.order for value in inputs if isinstance(value, _Moved)), None)
    ) is not None:
        moved = _in_place(equation, inputs, place)
        if moved is not None:
            return [moved]
    arrays = [_array(value) for value in inputs]
    if name in ("checkpoint", "remat2"):
        inner = _evaluate(ClosedJaxpr(params["jaxpr"], ()), form)
        return jax.checkpoint(inner, prevent_cse=params["prevent_cse"], policy=params["policy"])(
            *arrays
        )
    if name in ("scan", "while", "cond"):
        rewritten = functools.partial(_rewritten, form=form)
        params = {key: jax.tree.map(rewritten, value) for key, value in params.items()}
    return _bind(equation, arrays, params)


def _bind(equation: Any, arrays: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    primitive = equation.primitive
    outputs = primitive.bind(*arrays, **primitive.get_bind_params(params))
    return outputs if primitive.multiple_results else [outputs]


def _rewritten(value: Any, form: Form) -> Any:
    return (
        jax.make_jaxpr(_evaluate(value, form))(*value.in_avals)
        if isinstance(value, ClosedJaxpr)
        else value
    )


def _forced(value: _Value) -> _Value:
    return _Moved(_convolve(value), value.order) if isinstance(value, _Convolution) else value


def _array(value: _Value) -> Any:
    """With its axes in order."""
    value = _forced(value)
    return value.array.transpose(np.argsort(value.order)) if isinstance(value, _Moved) else value


def _in_order(value: _Value, order: Sequence[int]) -> Any:
    """With its axes in some order; a number has none."""
    value = _forced(value)
    if isinstance(value, _Moved) and value.order == tuple(order):
        return value.array
    array = _array(value)
    if not jnp.ndim(array):
        return array
    if array.dtype == bool and order[-1] == 0 and len(array) <= _SMALL_BATCH:
        return _batch_minor(array).transpose(
            [axis - 1 if axis else array.ndim - 1 for axis in order]
        )
    return array.transpose(order)


def _batch_minor(mask: Array) -> Array:
    """(n, ...) -> (..., n) by a product with the identity.

    A transposition becomes part of every loop that reads the mask, and misses the cache in each of them.
    """
    n, *sides = mask.shape
    moved = lax.dot_general(
        mask.reshape(n, -1).astype(jnp.float32), jnp.eye(n), (((0,), (0,)), ((), ()))
    )
    return (moved > 0.5).reshape(*sides, n)


# What is computed for vectorised clients side by side


def _side_by_side(equation: Any, inputs: Sequence[Any], form: Form) -> Array | None:
    """A convolution with a square kernel, or a max-pool, that `jaxfl.models._plain` has."""
    name, params = equation.primitive.name, equation.params
    if name == "reduce_window_max" and _is_pooling(equation, range(len(params["padding"]))):
        return max_pool(inputs[0])
    if name != "conv_general_dilated" or not _is_covered(equation):
        return None
    (batch, channel, *spatial), (out, in_, *sizes), (examples, features, *maps) = params[
        "dimension_numbers"
    ]
    x, kernel = inputs[0].transpose(batch, *spatial, channel), inputs[1].transpose(*sizes, in_, out)
    side, stride = len(kernel), params["window_strides"][0]
    apart = {*params["lhs_dilation"], *params["rhs_dilation"], params["feature_group_count"]} != {1}
    if (
        apart
        or kernel.shape[:-2] != (side, side)
        or params["window_strides"] != (stride, stride)
        or stride > 2
    ):
        return None
    ends, around = params["padding"], {*itertools.chain(*params["padding"])}
    zeros = ends[0][0] if len(around) == 1 and 0 <= ends[0][0] < side else 0
    if around != {zeros}:
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *((*two, 0) for two in ends), (0, 0, 0)])
    if side == 1:
        x, stride = x[:, ::stride, ::stride], 1
    own = PlainOptions(zeros, stride, params["precision"], PACKED if form == "packed" else 1)
    return convolve_grouped(x, kernel, own).transpose(np.argsort((examples, *maps, features)))


# What waits with a convolution


def _is_covered(equation: Any) -> bool:
    params, dtype = equation.params, equation.outvars[0].aval.dtype
    same = all(atom.aval.dtype == dtype for atom in equation.invars) and jnp.issubdtype(
        dtype, jnp.floating
    )
    return same and params["batch_group_count"] == 1 and equation.outvars[0].aval.size > 0


def _waiting(x: _Value, kernel: _Value, params: dict[str, Any], filtered: bool) -> _Convolution:
    (batch, channel, *spatial), (out, in_, *sizes), (examples, features, *maps) = params[
        "dimension_numbers"
    ]
    x = _in_order(x, (channel, *spatial, batch))
    return _Convolution(
        x, _in_order(kernel, (*sizes, in_, out)), params, filtered, (features, *maps, examples)
    )


def _absorbed(equation: Any, waiting: _Convolution, *others: _Value) -> _Convolution | None:
    """With the operation too, if it is a bias, ReLU or pooling that a convolution does itself."""
    name, after = equation.primitive.name, waiting.relu or waiting.pool
    if name == "add" and waiting.bias is None and not after:
        shape = jnp.shape(_array(others[0]))
        sides = [1] * len(waiting.order)
        sides[waiting.order[0]] = waiting.kernel.shape[-1]
        return (
            waiting._replace(bias=_array(others[0]).reshape(-1)) if shape == tuple(sides) else None
        )
    if name == "custom_jvp_call" and _is_relu(equation):
        return waiting._replace(relu=True)
    if (
        name == "reduce_window_max"
        and not waiting.pool
        and _is_plain(waiting)
        and _is_pooling(equation, waiting.order)
    ):
        return waiting._replace(pool=True)
    return None


def _is_relu(equation: Any) -> bool:
    """Whether this is `jax.nn.relu`, by its derivative."""
    x = equation.invars[0].aval
    return len(equation.invars) == 1 and _derivative(
        lambda x: _bind(equation, [x], equation.params)[0], x
    ) == (_derivative(jax.nn.relu, x))


def _derivative(function: Callable[[Array], Array], x: Any) -> str:
    return str(jax.make_jaxpr(lambda x, t: jax.jvp(function, (x,), (t,)))(x, x))


def _is_plain(waiting: _Convolution) -> bool:
    """Whether `jaxfl.models._convolution` has it: one or two axes, taps side by side, one group."""
    params, sizes = waiting.params, waiting.kernel.shape[:-2]
    steps = (
        *params["window_strides"],
        *params["rhs_dilation"],
        *params["lhs_dilation"],
        params["feature_group_count"],
    )
    zeros = min(itertools.chain(*params["padding"]))
    return len(sizes) in (1, 2) and math.prod(sizes) > 1 and set(steps) == {1} and zeros >= 0


def _convolve(waiting: _Convolution) -> Array:
    x, kernel, params = waiting.x, waiting.kernel, waiting.params
    precision, features = params["precision"], kernel.shape[-1]
    if _is_plain(waiting):
        exact = precision is None or set(precision) == {lax.Precision.HIGHEST}
        filtered = waiting.filtered and exact and x.dtype == jnp.float32
        bias = jnp.zeros(features, x.dtype) if waiting.bias is None else waiting.bias
        padding = tuple(params["padding"])
        line = len(padding) == 1
        if line:
            x, kernel, padding = x[:, None], kernel[None], ((0, 0), *padding)
        options = _convolution.Options(
            padding, waiting.relu, waiting.pool, False, False, filtered, precision
        )
        y = _convolution.convolve(x, kernel, bias, options)
        return y[:, 0] if line else y
    ends = [
        (*zeros, d - 1) for zeros, d in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *ends, (0, 0, 0)])
    strides, groups = params["window_strides"], params["feature_group_count"]
    window = _windows.Window(strides, params["rhs_dilation"], groups, precision)
    y = _windows.convolve(x, kernel, window)
    y = y if waiting.bias is None else y + waiting.bias.reshape(-1, *(1,) * (y.ndim - 1))
    return jax.nn.relu(y) if waiting.relu else y


# What is done with axes in another order


def _is_window(equation: Any) -> bool:
    params, dtype = equation.params, equation.outvars[0].aval.dtype
    near = {*params["base_dilation"], *params["window_dilation"]} == {1}
    return (
        near
        and jnp.issubdtype(dtype, jnp.floating)
        and math.prod(params["window_dimensions"]) <= _MOST_TAPS
    )


def _is_pooling(equation: Any, order: Sequence[int]) -> bool:
    """Whether windows are 2x2, side by side, on the two axes in the middle of an order."""
    params = equation.params
    windows = [
        [params[key][axis] for axis in order] for key in ("window_dimensions", "window_strides")
    ]
    return _is_window(equation) and windows == [[1, 2, 2, 1]] * 2 and not np.any(params["padding"])


def _pooled(value: _Value, equation: Any) -> _Value:
    params = equation.params
    order = value.order if isinstance(value, _Moved) else tuple(range(jnp.ndim(value)))
    x = _in_order(value, order)
    sizes, strides, padding = (
        tuple(params[key][axis] for axis in order)
        for key in ("window_dimensions", "window_strides", "padding")
    )
    highest = equation.primitive.name == "reduce_window_max"
    x = lax.pad(x, jnp.array(-jnp.inf if highest else 0, x.dtype), [(*ends, 0) for ends in padding])
    return _Moved((_windows.max_pool if highest else _windows.sum_pool)(x, sizes, strides), order)


_SMALL_BATCH = 512
"""The identity's cost grows with its square; up to here it was measured to be the lesser."""
_MOST_TAPS = 64
"""A slice each; beyond, XLA's own pooling."""
_ELEMENTWISE = frozenset([
    "abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "cosh", "div", "eq",
    "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "rem", "round",
    "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
])  # fmt: skip
_REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"))
_BY_AXIS = {"slice": ("start_indices", "limit_indices", "strides"), "pad": ("padding_config",)}


def _in_place(equation: Any, inputs: Sequence[_Value], order: tuple[int, ...]) -> _Moved | None:
    """The operation on arrays with their axes in that order, or None."""
    name, params, ranks = (
        equation.primitive.name,
        equation.params,
        {len(atom.aval.shape) for atom in equation.invars},
    )
    if not ranks <= {0, len(order)}:
        return None

    def bind(after: tuple[int, ...], **changes: Any) -> _Moved:
        return _Moved(
            _bind(equation, [_in_order(value, order) for value in inputs], {**params, **changes})[
                0
            ],
            after,
        )

    if name in _ELEMENTWISE:
        return bind(order)
    if name == "custom_jvp_call" and _is_relu(equation):
        return _Moved(jax.nn.relu(_in_order(inputs[0], order)), order)
    if name in _REDUCTIONS:
        left = [axis for axis in order if axis not in params["axes"]]
        return bind(
            tuple(np.argsort(np.argsort(left)).tolist()),
            axes=tuple(order.index(axis) for axis in params["axes"]),
        )
    if name in _BY_AXIS:
        moved = {
            key: params[key] and tuple(params[key][axis] for axis in order)
            for key in _BY_AXIS[name]
        }
        return bind(order, **moved)
    if name == "concatenate":
        return bind(order, dimension=order.index(params["dimension"]))
    if name == "transpose":
        return _Moved(
            _in_order(inputs[0], order), tuple(params["permutation"].index(axis) for axis in order)
        )
    if name == "reshape":
        return _split(_in_order(inputs[0], order), order, params["new_sizes"])
    return None


def _split(x: Array, order: tuple[int, ...], sizes: Sequence[int]) -> _Moved | None:
    """Reshaped, if each axis becomes one or several."""
    parts, left = [], list(enumerate(sizes))
    for side in [x.shape[order.index(axis)] for axis in range(x.ndim)]:
        part = [left.pop(0)] if left else []
        while left and math.prod(size for _, size in part) < side:
            part.append(left.pop(0))
        parts.append(part)
    if left or any(
        math.prod(size for _, size in part) != x.shape[order.index(a)]
        for a, part in enumerate(parts)
    ):
        return None
    moved = [axis for place in order for axis in parts[place]]
    return _Moved(x.reshape([size for _, size in moved]), tuple(axis for axis, _ in moved))
