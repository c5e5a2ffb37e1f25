"""Convolution and pooling with windows of any kind, as slices with their own differentiation rules.

This covers what `kernels.convolution` does not, by the same idea. Activations are batch-minor
(channels, *spatial, batch), so that each tap t of a window is a slice x_t of long contiguous rows.
All taps are the patches P of one batch of products,

    Y = K^T P,   dK = P dY^T,   dP = K dY.

If each channel has a kernel of its own, there are no matrices to multiply, and Y = sum_t k_t x_t.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class Window(NamedTuple):
    """Options of a convolution. Strides and dilation have one number for each spatial axis."""

    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    """Distance between neighbouring taps on each axis."""
    groups: int
    """Number of groups of channels."""
    precision: Any
    """JAX's precision of products."""


def convolve_windows(x: Array, kernel: Array, window: Window) -> Array:
    """Return maps `(f, *out, n)` of x `(c, *spatial, n)` and a kernel `(*sizes, c / groups, f)`.

    There is no padding.
    """
    kernel_of_each_channel = len(x) == kernel.shape[-1] == window.groups
    if kernel_of_each_channel:
        return _by_channel(x, kernel, window)
    return _by_products(x, kernel, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _by_products(x: Array, kernel: Array, window: Window) -> Array:
    return _products(x, kernel, window)[0]


def _products(x: Array, kernel: Array, window: Window) -> tuple[Array, Array, Array]:
    """Return the output, patches (groups, taps c / groups, out n), and the kernel by groups."""
    taps = [tap.reshape(window.groups, -1, *tap.shape[1:]) for tap in _taps(x, kernel, window)]
    out = taps[0].shape[2:]
    patches = jnp.stack(taps, 1).reshape(window.groups, -1, math.prod(out))
    weights = jnp.moveaxis(kernel.reshape(patches.shape[1], window.groups, -1), 1, 0)
    # Y = K^T P, for each group.
    over_patches = (((1,), (1,)), ((0,), (0,)))
    y = lax.dot_general(weights, patches, over_patches, precision=window.precision)
    return y.reshape(-1, *out), patches, weights


def _products_forward(x: Any, kernel: Any, window: Window) -> tuple[Array, tuple]:
    y, patches, weights = _products(x.value, kernel.value, window)
    return y, (patches, weights if x.perturbed else None, x.value.shape, kernel.value.shape)


def _products_backward(window: Window, saved: tuple, dy: Array) -> tuple[Array | None, Array]:
    patches, weights, shape, kernel_shape = saved
    *sizes, _, _ = kernel_shape
    columns = dy.reshape(window.groups, -1, patches.shape[2])
    # dK = P dY^T.
    over_positions = (((2,), (2,)), ((0,), (0,)))
    d_kernel = lax.dot_general(patches, columns, over_positions, precision=window.precision)
    d_kernel = jnp.moveaxis(d_kernel, 0, 1).reshape(kernel_shape)
    # The first layer's input needs no gradient.
    if weights is None:
        return None, d_kernel
    # dP = K dY.
    over_features = (((2,), (1,)), ((0,), (0,)))
    d = lax.dot_general(weights, columns, over_features, precision=window.precision)
    d = d.reshape(window.groups, *sizes, -1, *dy.shape[1:])
    return _from_taps(d, shape, window), d_kernel


def _from_taps(d: Array, shape: tuple[int, ...], window: Window) -> Array:
    """Return the gradient of x of a shape from that of its taps `(groups, *sizes, c, *out)`.

    The channels are those of a group, and the last axis of `out` is the batch.
    """
    # One axis at a time keeps the terms few.
    for axis in reversed(range(len(window.strides))):
        terms = []
        for i in range(d.shape[1 + axis]):
            start = i * window.dilation[axis]
            place = _Place(start, window.strides[axis], shape[1 + axis])
            # The kernel's axes that are left come before the channels and those of the maps.
            tap = jnp.take(d, i, 1 + axis)
            terms.append(_dilate(tap, 2 + 2 * axis, place))
        d = functools.reduce(jnp.add, terms)
    return d.reshape(shape)


# With symbolic zeros, the forward rule learns whether x needs a gradient.
_by_products.defvjp(_products_forward, _products_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _by_channel(x: Array, kernel: Array, window: Window) -> Array:
    taps = _taps(x, kernel, window)
    return _weighted_sum(kernel.reshape(-1, len(x)), taps)


def _channel_forward(x: Any, kernel: Any, window: Window) -> tuple[Array, tuple]:
    return _by_channel(x.value, kernel.value, window), (x.value, kernel.value, x.perturbed)


def _channel_backward(window: Window, saved: tuple, dy: Array) -> tuple[Array | None, Array]:
    x, kernel, perturbed = saved
    products = [tap * dy for tap in _taps(x, kernel, window)]
    # The batch is summed last, because the sum would otherwise add only n numbers at a time.
    axes = tuple(range(1, x.ndim - 1))
    zeros = [jnp.zeros((), dy.dtype)] * len(products)
    # The name of this function is a part of programs, and so of a run's fingerprint.
    sums = lax.reduce(
        products, zeros, lambda a, b: [p + q for p, q in zip(a, b, strict=True)], axes
    )
    d_kernel = jnp.stack([s.sum(1) for s in sums]).reshape(kernel.shape)
    # The first layer's input needs no gradient.
    if not perturbed:
        return None, d_kernel
    return _turned_convolution(dy, kernel, x.shape, window), d_kernel


_by_channel.defvjp(_channel_forward, _channel_backward, symbolic_zeros=True)


def _turned_convolution(
    dy: Array,
    kernel: Array,
    shape: tuple[int, ...],
    window: Window,
) -> Array:
    """Return the gradient of an input x from that of its maps, for a kernel of each channel.

    It is a convolution of dy, spread by the strides, with the kernel turned round.

    Args:
        dy: Gradient of the maps.
        kernel: The kernel.
        shape: Shape of x.
        window: Options of the convolution of x.
    """
    # The kernel's shape ends with channels and features, which `zip` leaves out.
    reach = [d * (k - 1) for d, k in zip(window.dilation, kernel.shape, strict=False)]
    for axis, (before, stride) in enumerate(zip(reach, window.strides, strict=True), 1):
        dy = _dilate(dy, axis, _Place(before, stride, shape[axis] + before))
    turned = kernel.reshape(-1, shape[0])[::-1]
    unstrided = window._replace(strides=(1,) * len(reach))
    return _weighted_sum(turned, _taps(dy, kernel, unstrided))


def _weighted_sum(weights: Array, taps: Sequence[Array]) -> Array:
    terms = [
        w.reshape(-1, *(1,) * (tap.ndim - 1)) * tap for w, tap in zip(weights, taps, strict=True)
    ]
    return functools.reduce(jnp.add, terms)


def _taps(x: Array, kernel: Array, window: Window) -> list[Array]:
    sizes = kernel.shape[:-2]
    return slices(x, (1, *sizes, 1), (1, *window.strides, 1), (1, *window.dilation, 1))


def slices(
    x: Array, sizes: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> list[Array]:
    """Return an array for each place in a window, with the place's elements of all windows.

    Places are in reading order, with the last axis fastest.

    Args:
        x: Array of any shape.
        sizes: Size of a window on each axis of x, in places.
        strides: Distance between windows on each axis.
        dilation: Distance between places on each axis.
    """
    reach = [d * (size - 1) for d, size in zip(dilation, sizes, strict=True)]
    parts = []
    for place in itertools.product(*map(range, sizes)):
        start = [d * i for d, i in zip(dilation, place, strict=True)]
        stop = [side - r + s for side, r, s in zip(x.shape, reach, start, strict=True)]
        parts.append(lax.slice(x, start, stop, strides))
    return parts


class _Place(NamedTuple):
    """Positions of elements on an axis of a given size."""

    start: int
    """Position of the first element."""
    stride: int
    """Distance between neighbouring elements."""
    size: int
    """Length of the axis."""


def _dilate(x: Array, axis: int, place: _Place) -> Array:
    """Return x with its elements placed on an axis, with zeros around and between them."""
    before, stride, size = place
    config = [(0, 0, 0)] * x.ndim
    config[axis] = before, size - before - (x.shape[axis] - 1) * stride - 1, stride - 1
    return lax.pad(x, jnp.zeros((), x.dtype), config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def max_pool(x: Array, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return the maximum of each window, without padding.

    The first maximum of a window gets the gradient. Only reverse mode is supported.

    Args:
        x: Array of any shape.
        sizes: Size of a window on each axis.
        strides: Distance between windows on each axis.
    """
    return functools.reduce(jnp.maximum, slices(x, sizes, strides, (1,) * x.ndim))


def _max_forward(x: Array, sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Array, tuple]:
    first, *others = slices(x, sizes, strides, (1,) * x.ndim)
    y = first
    # int8 holds numbers up to 127.
    kind: Any = jnp.int8
    if len(others) > 127:
        kind = jnp.int32
    winner = jnp.zeros(first.shape, kind)
    for number, part in enumerate(others, 1):
        # An equal number does not replace the first one.
        winner = jnp.where(part > y, winner.dtype.type(number), winner)
        y = jnp.maximum(y, part)
    return y, (winner, x.shape)


def _max_backward(
    sizes: tuple[int, ...], strides: tuple[int, ...], saved: tuple, dy: Array
) -> tuple[Array]:
    winner, shape = saved
    # Windows that do not overlap give each element at most one gradient, so nothing is summed.
    if sizes == strides:
        return (_to_winners(winner, dy, sizes, shape),)
    terms = []
    for number, place in enumerate(itertools.product(*map(range, sizes))):
        term = jnp.where(winner == number, dy, 0)
        for axis in range(dy.ndim):
            term = _dilate(term, axis, _Place(place[axis], strides[axis], shape[axis]))
        terms.append(term)
    return (functools.reduce(jnp.add, terms),)


def _to_winners(
    winner: Array,
    dy: Array,
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
) -> Array:
    """Return the gradient of an input of a shape, from that of windows that do not overlap.

    Each number of `dy` goes to the place of its window's largest number, which is in `winner`.
    """
    # Places in windows have axes of their own, as in `_within`.
    sides = [side for size in sizes for side in (1, size)]
    number = np.arange(math.prod(sizes)).reshape(sides)
    wins = _within(winner) == number.astype(winner.dtype)
    dx = jnp.where(wins, _within(dy), 0)
    covered = [out * size for out, size in zip(dy.shape, sizes, strict=True)]
    dx = dx.reshape(covered)
    # No window has the last elements of an axis that the sizes do not divide.
    ends = [(0, side - end, 0) for side, end in zip(shape, covered, strict=True)]
    return lax.pad(dx, jnp.zeros((), dy.dtype), ends)


def _within(x: Array) -> Array:
    """Return x with an axis of length 1 after each axis, for the places in windows."""
    return x.reshape([side for length in x.shape for side in (length, 1)])


max_pool.defvjp(_max_forward, _max_backward)


def sum_pool(x: Array, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return the sum of each window, without padding (see `max_pool` for the arguments)."""
    if sizes != strides:
        return functools.reduce(jnp.add, slices(x, sizes, strides, (1,) * x.ndim))
    # Windows do not overlap here, so a reshape gives their places axes of their own.
    out = [side // size for side, size in zip(x.shape, sizes, strict=True)]
    ends = [count * size for count, size in zip(out, sizes, strict=True)]
    covered = lax.slice(x, [0] * x.ndim, ends)
    sides = [side for pair in zip(out, sizes, strict=True) for side in pair]
    return covered.reshape(sides).sum(tuple(range(1, 2 * x.ndim, 2)))
