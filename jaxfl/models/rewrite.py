"""Evaluation of any network with its convolutions and pooling in the project's own form.

The network may come from any library. Its trace is evaluated operation by operation:

- A convolution of floating numbers becomes batch-minor (`kernels.convolution`, or `kernels.windows`
  for what the former does not cover, such as strides, dilation and groups). It includes the bias
  and ReLU that follow it, and in `kernels.convolution` the 2x2 max-pool, if no other operation
  reads an intermediate result.
- Elementwise operations, pooling, and sums over axes that follow stay batch-minor. Axes move back
  before an operation that needs them in order, mostly the first dense layer.

This holds for the forms "winograd" and "im2col". In the form "grouped", all axes keep their order.
Convolutions and 2x2 max-pools are then those of `jaxfl.models.kernels.plain`, where it covers them,
and all other operations are evaluated as traced.
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
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxfl._support.backend import Form, backend
from jaxfl.models.kernels import convolution, windows
from jaxfl.models.kernels.plain import PlainOptions, convolve_grouped, max_pool_2x2

FORMS: tuple[Form, ...] = ("winograd", "im2col", "grouped")
"""Forms that a network from any library can be evaluated in."""


def in_form(function: Callable[..., Any], form: Form | None) -> Callable[..., Any]:
    """Return a function with the same values, up to rounding, whose convolutions are in a form.

    The returned function takes its arguments by position only. A form of `FORMS` supports only
    reverse-mode differentiation of convolutions and pooling.

    Args:
        function: Function of pytrees of arrays.
        form: One of `FORMS` (see `jaxfl.models.layers`), for convolutions and pooling. Any other
            form evaluates the function as it is. None takes the backend's form of usual networks.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        # The form is chosen at each call, because a later one may be traced for another platform.
        own = form
        if own is None:
            own = backend().forms["usual"]
        if own not in FORMS:
            return function(*args)
        # JAX caches traces by function. The new function makes it trace again, because interceptors
        # of Flax's methods may have changed.
        trace = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)  # noqa: PLW0108
        closed, shapes = trace(*args)
        outputs = _evaluate(closed, own)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return call


class _Moved(NamedTuple):
    """Array whose axes are in another order than traced, with axis `order[i]` at position i."""

    array: Array
    order: tuple[int, ...]


class _Convolution(NamedTuple):
    """Convolution that is not computed yet, because it may include the operations that follow."""

    x: Array
    """Batch-minor maps."""
    kernel: Array
    """The kernel (*sizes, c / groups, f)."""
    params: dict[str, Any]
    """Parameters of the traced operation."""
    filtered: bool
    """Whether minimal filtering is used where it pays (see `kernels.convolution`)."""
    order: tuple[int, ...]
    """Order of the result's axes, as in `_Moved`."""
    bias: Array | None = None
    relu: bool = False
    pool: bool = False


_Value: TypeAlias = Any
"""An array, a `_Moved` or a `_Convolution`."""


def _evaluate(closed: ClosedJaxpr, form: Form) -> Callable[..., list[Any]]:
    return lambda *inputs: [_array(value) for value in _interpret(closed, inputs, form)]


def _interpret(closed: ClosedJaxpr, inputs: Sequence[_Value], form: Form) -> list[_Value]:
    jaxpr = closed.jaxpr
    variables = (*jaxpr.constvars, *jaxpr.invars)
    values = dict(zip(variables, (*closed.consts, *inputs), strict=True))
    reads = _reads(jaxpr)

    def read(atom: Any) -> _Value:
        if isinstance(atom, Literal):
            return atom.val
        # Several operations read this convolution, so it cannot include one of them.
        if reads[atom] > 1:
            values[atom] = _forced(values[atom])
        return values[atom]

    for equation in jaxpr.eqns:
        # The context sets the options under which the operation was traced.
        with equation.ctx.manager:
            outputs = _apply(equation, [read(atom) for atom in equation.invars], form)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _reads(jaxpr: Jaxpr) -> collections.Counter[Any]:
    """Return how often each variable of a program is read."""
    # A result of the program counts as read, because the caller gets it.
    operands = itertools.chain.from_iterable(equation.invars for equation in jaxpr.eqns)
    atoms = (*operands, *jaxpr.outvars)
    return collections.Counter(atom for atom in atoms if not isinstance(atom, Literal))


def _apply(equation: Any, inputs: list[_Value], form: Form) -> Sequence[_Value]:
    if equation.primitive.name == "jit":
        # The inner program is evaluated in place, so its convolutions can include what follows it.
        return _interpret(equation.params["jaxpr"], inputs, form)
    maps = _apply_to_maps(equation, inputs, form)
    if maps is not None:
        return [maps]
    # From here on, all convolutions are computed.
    inputs = [_forced(value) for value in inputs]
    orders = [value.order for value in inputs if isinstance(value, _Moved)]
    if orders:
        moved = _in_same_order(equation, inputs, orders[0])
        if moved is not None:
            return [moved]
    return _apply_as_traced(equation, [_array(value) for value in inputs], form)


def _apply_to_maps(equation: Any, inputs: list[_Value], form: Form) -> _Value | None:
    """Return the result of a convolution, or of an operation that may follow it, in a form.

    Return None for any other operation.
    """
    name = equation.primitive.name
    # In this form no operation is included in a convolution, and axes keep their order.
    if form == "grouped":
        return _by_grouping(equation, inputs)
    if name == "conv_general_dilated" and _is_covered(equation):
        return _waiting(inputs[0], inputs[1], equation.params, form == "winograd")
    if inputs and isinstance(inputs[0], _Convolution) and (more := _absorbed(equation, *inputs)):
        return more
    if name in ("reduce_window_max", "reduce_window_sum") and _is_window(equation):
        return _pool_in_order(_forced(inputs[0]), equation)
    return None


def _apply_as_traced(equation: Any, arrays: list[Any], form: Form) -> Sequence[Any]:
    """Return the results of an operation as it was traced, with its inner programs in a form."""
    name = equation.primitive.name
    params = equation.params
    if name in ("checkpoint", "remat2"):
        # The program of a checkpoint has no constants, because they are among its operands.
        inner = _evaluate(ClosedJaxpr(params["jaxpr"], ()), form)
        prevent_cse = params["prevent_cse"]
        return jax.checkpoint(inner, prevent_cse=prevent_cse, policy=params["policy"])(*arrays)
    if name in ("scan", "while", "cond"):
        # The bodies and branches are among the parameters.
        rewritten = functools.partial(_rewritten, form=form)
        params = {key: jax.tree.map(rewritten, value) for key, value in params.items()}
    return _bind(equation, arrays, params)


def _bind(equation: Any, arrays: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    primitive = equation.primitive
    outputs = primitive.bind(*arrays, **primitive.get_bind_params(params))
    if primitive.multiple_results:
        return outputs
    return [outputs]


def _rewritten(value: Any, form: Form) -> Any:
    """Return an inner program evaluated in a form, as a jaxpr, and any other value unchanged."""
    if isinstance(value, ClosedJaxpr):
        return jax.make_jaxpr(_evaluate(value, form))(*value.in_avals)
    return value


def _forced(value: _Value) -> _Value:
    """Return the computed `_Moved` of a `_Convolution`, and any other value unchanged."""
    if isinstance(value, _Convolution):
        return _Moved(_convolve(value), value.order)
    return value


def _array(value: _Value) -> Any:
    """Return a value as an array with its axes in the order of the trace."""
    value = _forced(value)
    if isinstance(value, _Moved):
        return value.array.transpose(np.argsort(value.order))
    return value


def _in_order(value: _Value, order: Sequence[int]) -> Any:
    """Return a value as an array with its axes in a given order, and a scalar unchanged."""
    value = _forced(value)
    if isinstance(value, _Moved) and value.order == tuple(order):
        return value.array
    array = _array(value)
    if not jnp.ndim(array):
        return array
    if array.dtype == bool and order[-1] == 0 and len(array) <= _SMALL_BATCH:
        # `_batch_minor` moves axis 0 to the end, and each other axis forward by one.
        last = array.ndim - 1
        return _batch_minor(array).transpose([axis - 1 if axis else last for axis in order])
    return array.transpose(order)


def _batch_minor(mask: Array) -> Array:
    """Transpose a mask (n, ...) to (..., n) by a product with the identity.

    A plain transposition becomes part of every loop that reads the mask, and misses the cache in
    each of them.
    """
    n, *sides = mask.shape
    rows = mask.reshape(n, -1).astype(jnp.float32)
    over_rows = (((0,), (0,)), ((), ()))
    moved = lax.dot_general(rows, jnp.eye(n), over_rows)
    return (moved > 0.5).reshape(*sides, n)


# Grouped convolutions of vectorised clients


def _by_grouping(equation: Any, inputs: Sequence[Any]) -> Array | None:
    """Return the result of a convolution or a max-pool by `jaxfl.models.kernels.plain`.

    Return None for all other operations, and for convolutions and max-pools that the module does
    not cover.
    """
    name = equation.primitive.name
    params = equation.params
    if name == "reduce_window_max" and _is_pooling(equation, range(len(params["padding"]))):
        return max_pool_2x2(inputs[0])
    if name == "conv_general_dilated" and _is_covered(equation):
        return _convolve_by_grouping(inputs[0], inputs[1], params)
    return None


def _convolve_by_grouping(x: Array, kernel: Array, params: dict[str, Any]) -> Array | None:
    """Return the maps of `convolve_grouped`, or None for a convolution that it does not cover."""
    lhs, rhs, out = params["dimension_numbers"]
    batch, channel, *spatial = lhs
    kernel_out, kernel_in, *sizes = rhs
    examples, features, *maps = out
    x = x.transpose(batch, *spatial, channel)
    kernel = kernel.transpose(*sizes, kernel_in, kernel_out)
    side = len(kernel)
    stride = params["window_strides"][0]
    square = kernel.shape[:-2] == (side, side) and params["window_strides"] == (stride, stride)
    dilation = {*params["lhs_dilation"], *params["rhs_dilation"]}
    # `PlainOptions` has one stride, and neither dilation nor groups.
    if not square or stride > 2 or {*dilation, params["feature_group_count"]} != {1}:
        return None
    x, zeros = _split_padding(x, params["padding"], side)
    # A kernel of one pixel with a stride reads every second pixel, which a slice does.
    if side == 1:
        x = x[:, ::stride, ::stride]
        stride = 1
    own = PlainOptions(zeros, stride, params["precision"])
    return convolve_grouped(x, kernel, own).transpose(np.argsort((examples, *maps, features)))


def _split_padding(x: Array, ends: Sequence[tuple[int, int]], side: int) -> tuple[Array, int]:
    """Return x with the padding that `convolve_grouped` cannot add, and the number that it adds.

    Args:
        x: Maps, channels last.
        ends: Padding of each spatial axis.
        side: Side of the kernel.
    """
    # The convolution itself pads by one number of zeros on all sides, smaller than the kernel.
    around = {*itertools.chain(*ends)}
    if len(around) == 1 and 0 <= ends[0][0] < side:
        return x, ends[0][0]
    config = [(0, 0, 0), *((*two, 0) for two in ends), (0, 0, 0)]
    x = lax.pad(x, jnp.zeros((), x.dtype), config)
    return x, 0


# Convolutions that include the operations that follow


def _is_covered(equation: Any) -> bool:
    result = equation.outvars[0].aval
    # A result may have another dtype than the operands, by `preferred_element_type`.
    same = all(atom.aval.dtype == result.dtype for atom in equation.invars)
    floating = jnp.issubdtype(result.dtype, jnp.floating)
    return same and floating and equation.params["batch_group_count"] == 1 and result.size > 0


def _waiting(x: _Value, kernel: _Value, params: dict[str, Any], filtered: bool) -> _Convolution:
    lhs, rhs, out = params["dimension_numbers"]
    batch, channel, *spatial = lhs
    kernel_out, kernel_in, *sizes = rhs
    examples, features, *maps = out
    x = _in_order(x, (channel, *spatial, batch))
    kernel = _in_order(kernel, (*sizes, kernel_in, kernel_out))
    return _Convolution(x, kernel, params, filtered, (features, *maps, examples))


def _absorbed(equation: Any, waiting: _Convolution, *others: _Value) -> _Convolution | None:
    """Return a convolution that includes the operation, a bias, ReLU or pooling.

    Return None if the convolution cannot include the operation.
    """
    name = equation.primitive.name
    if name == "add" and waiting.bias is None and not (waiting.relu or waiting.pool):
        shape = jnp.shape(_array(others[0]))
        sides = [1] * len(waiting.order)
        sides[waiting.order[0]] = waiting.kernel.shape[-1]
        # A bias has a number for each feature, and is broadcast along all other axes.
        if shape != tuple(sides):
            return None
        return waiting._replace(bias=_array(others[0]).reshape(-1))
    # ReLU commutes with the pool, so either may come first.
    if name == "custom_jvp_call" and _is_relu(equation):
        return waiting._replace(relu=True)
    pooling = name == "reduce_window_max" and not waiting.pool and _is_winograd(waiting)
    if pooling and _is_pooling(equation, waiting.order):
        return waiting._replace(pool=True)
    return None


def _is_relu(equation: Any) -> bool:
    """Return whether an operation is `jax.nn.relu`, by comparing the jaxprs of the derivatives."""
    x = equation.invars[0].aval
    if len(equation.invars) != 1:
        return False
    derivative = _derivative(lambda x: _bind(equation, [x], equation.params)[0], x)
    return derivative == _derivative(jax.nn.relu, x)


def _derivative(function: Callable[[Array], Array], x: Any) -> str:
    return str(jax.make_jaxpr(lambda x, t: jax.jvp(function, (x,), (t,)))(x, x))


def _is_winograd(waiting: _Convolution) -> bool:
    """Return whether `jaxfl.models.kernels.convolution` covers a convolution.

    It needs one or two axes, more than one tap, strides and dilation of 1, one group, and no
    negative padding.
    """
    params = waiting.params
    sizes = waiting.kernel.shape[:-2]
    steps = (
        *params["window_strides"],
        *params["rhs_dilation"],
        *params["lhs_dilation"],
        params["feature_group_count"],
    )
    zeros = min(itertools.chain(*params["padding"]))
    return len(sizes) in (1, 2) and math.prod(sizes) > 1 and set(steps) == {1} and zeros >= 0


def _convolve(waiting: _Convolution) -> Array:
    """Return the batch-minor maps of a convolution with its bias, ReLU and pooling."""
    if _is_winograd(waiting):
        return _convolve_with_rest(waiting)
    params = waiting.params
    # A dilated input has zeros between its elements, which `lax.pad` inserts.
    ends = [
        (*zeros, d - 1) for zeros, d in zip(params["padding"], params["lhs_dilation"], strict=True)
    ]
    x = waiting.x
    zero = jnp.zeros((), x.dtype)
    x = lax.pad(x, zero, [(0, 0, 0), *ends, (0, 0, 0)])
    window = windows.Window(
        params["window_strides"],
        params["rhs_dilation"],
        params["feature_group_count"],
        params["precision"],
    )
    y = windows.convolve_windows(x, waiting.kernel, window)
    if waiting.bias is not None:
        y = y + waiting.bias.reshape(-1, *(1,) * (y.ndim - 1))
    if waiting.relu:
        return jax.nn.relu(y)
    return y


def _convolve_with_rest(waiting: _Convolution) -> Array:
    """Return the maps of `_convolve` by `jaxfl.models.kernels.convolution`, in one function."""
    x = waiting.x
    kernel = waiting.kernel
    precision = waiting.params["precision"]
    # Filtering would multiply the rounding of a lower precision by about a hundred.
    exact = precision is None or set(precision) == {lax.Precision.HIGHEST}
    filtered = waiting.filtered and exact and x.dtype == jnp.float32
    bias = waiting.bias
    if bias is None:
        bias = jnp.zeros(kernel.shape[-1], x.dtype)
    padding = tuple(waiting.params["padding"])
    # A convolution over one axis is one over two axes, the first of which has length 1.
    line = len(padding) == 1
    if line:
        x = x[:, None]
        kernel = kernel[None]
        padding = ((0, 0), *padding)
    options = convolution.ConvolutionOptions(
        padding, waiting.relu, waiting.pool, False, False, filtered, precision
    )
    y = convolution.convolve(x, kernel, bias, options)
    if line:
        return y[:, 0]
    return y


# Operations on arrays whose axes are in another order


def _is_window(equation: Any) -> bool:
    """Return whether `kernels.windows` covers a pooling: floating, undilated, at most 64 taps."""
    params = equation.params
    undilated = {*params["base_dilation"], *params["window_dilation"]} == {1}
    floating = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)
    return undilated and floating and math.prod(params["window_dimensions"]) <= _MOST_TAPS


def _is_pooling(equation: Any, order: Sequence[int]) -> bool:
    """Return whether windows are 2x2, without overlap or padding, on the middle two of four axes.

    Args:
        equation: The pooling.
        order: Axes of the input in the order of its array.
    """
    params = equation.params
    sizes = [params["window_dimensions"][axis] for axis in order]
    strides = [params["window_strides"][axis] for axis in order]
    two = sizes == strides == [1, 2, 2, 1]
    return _is_window(equation) and two and not np.any(params["padding"])


def _pool_in_order(value: _Value, equation: Any) -> _Value:
    """Return a `_Moved` pooled array, with its axes in the same order as those of the input."""
    params = equation.params
    order = value.order if isinstance(value, _Moved) else tuple(range(jnp.ndim(value)))
    x = _in_order(value, order)
    sizes, strides, padding = (
        tuple(params[key][axis] for axis in order)
        for key in ("window_dimensions", "window_strides", "padding")
    )
    # Padding has the number that changes neither a sum nor a maximum.
    pool: Callable[..., Array] = windows.sum_pool
    neutral = 0.0
    if equation.primitive.name == "reduce_window_max":
        pool = windows.max_pool
        neutral = -math.inf
    # `lax.pad` could also pad between the elements of an axis.
    edges = [(low, high, 0) for low, high in padding]
    x = lax.pad(x, jnp.array(neutral, x.dtype), edges)
    return _Moved(pool(x, sizes, strides), order)


_SMALL_BATCH = 512
"""Largest batch for `_batch_minor`, whose cost grows with its square. Up to here it was measured to
be cheaper than a plain transposition."""

_MOST_TAPS = 64
"""Largest window that `kernels.windows` pools, with a slice for each tap. XLA pools larger ones."""

_ELEMENTWISE = frozenset([
    "abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos",
    "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne",
    "neg", "nextafter", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign", "sin",
    "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
])  # fmt: skip
"""Operations that take arrays in any order of axes, if all have the same order."""

_REDUCTIONS = frozenset(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"))
"""Operations that remove the axes of their parameter `axes`."""

_BY_AXIS = {"slice": ("start_indices", "limit_indices", "strides"), "pad": ("padding_config",)}
"""Names of the parameters that have an entry for each axis, by operation."""


def _in_same_order(
    equation: Any, inputs: Sequence[_Value], order: tuple[int, ...]
) -> _Moved | None:
    """Return the result of an operation on inputs whose axes `order` permutes.

    The `order` of the result is that of the result's own axes. Return None for an operation that
    needs its axes as traced.
    """
    name = equation.primitive.name
    params = equation.params
    ranks = {len(atom.aval.shape) for atom in equation.invars}
    if not ranks <= {0, len(order)}:
        return None
    if name == "custom_jvp_call" and _is_relu(equation):
        return _Moved(jax.nn.relu(_in_order(inputs[0], order)), order)
    # A transposition moves nothing, because the new order says where its axes are.
    if name == "transpose":
        moved_order = tuple(params["permutation"].index(axis) for axis in order)
        return _Moved(_in_order(inputs[0], order), moved_order)
    if name == "reshape":
        return _split_axes(_in_order(inputs[0], order), order, params["new_sizes"])
    # All other operations are bound to arrays of one order.
    reordered = _reordered(name, params, order)
    if reordered is None:
        return None
    after, changes = reordered
    arrays = [_in_order(value, order) for value in inputs]
    (result,) = _bind(equation, arrays, {**params, **changes})
    return _Moved(result, after)


def _reordered(
    name: str,
    params: dict[str, Any],
    order: tuple[int, ...],
) -> tuple[tuple[int, ...], dict[str, Any]] | None:
    """Return the order of an operation's result, and the parameters that change with the order.

    Return None for an operation that needs its axes as traced.

    Args:
        name: Name of the operation.
        params: Parameters of the traced operation.
        order: Order of the inputs' axes.
    """
    if name in _ELEMENTWISE:
        return order, {}
    if name in _REDUCTIONS:
        left = [axis for axis in order if axis not in params["axes"]]
        # The result numbers its axes anew, without those that were removed.
        ranked = np.argsort(np.argsort(left)).tolist()
        axes = tuple(order.index(axis) for axis in params["axes"])
        return tuple(ranked), {"axes": axes}
    if name in _BY_AXIS:
        # The strides of a slice may be None.
        return order, {
            key: params[key] and tuple(params[key][axis] for axis in order)
            for key in _BY_AXIS[name]
        }
    if name == "concatenate":
        return order, {"dimension": order.index(params["dimension"])}
    return None


def _split_axes(x: Array, order: tuple[int, ...], sizes: Sequence[int]) -> _Moved | None:
    """Return an array after a reshape that turns each axis into one or several.

    Return None for any other reshape.

    Args:
        x: Array, with axis `order[i]` of the trace at position i.
        order: Order of the axes of x.
        sizes: New shape, with its axes in the order of the trace.
    """
    parts = []
    left = list(enumerate(sizes))
    sides = [x.shape[order.index(axis)] for axis in range(x.ndim)]
    for side in sides:
        # The new axes that make up an old one follow one another.
        part = []
        if left:
            part.append(left.pop(0))
        while left and math.prod(size for _, size in part) < side:
            part.append(left.pop(0))
        parts.append(part)
    products = [math.prod(size for _, size in part) for part in parts]
    if left or products != sides:
        return None
    moved = [axis for place in order for axis in parts[place]]
    return _Moved(x.reshape([size for _, size in moved]), tuple(axis for axis, _ in moved))
