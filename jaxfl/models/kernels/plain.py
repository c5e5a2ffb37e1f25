"""JAX's own convolution, a grouped convolution for vectorised clients, and max-pooling.

A convolution of clients with kernels of their own is a grouped convolution. Vectorising the
gradient of its kernel instead gives a convolution with batch and channels exchanged. On a GPU, XLA
then copies all maps into that order first. cuDNN computes the gradient of a grouped convolution
without such copies.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int


class PlainOptions(NamedTuple):
    """Options of a convolution, the same for both spatial axes."""

    padding: int = 0
    """Number of zeros on each side."""
    stride: int = 1
    precision: Any = None
    """JAX's precision of products. None stands for JAX's default."""


def convolve_plain(
    x: Array, kernel: Array, options: PlainOptions = PlainOptions(), groups: int = 1
) -> Array:
    """Return maps (B, H2, W2, features) of x (B, H, W, channels).

    The kernel is (k, k, channels / groups, features).
    """
    pads = ((options.padding, options.padding),) * 2
    return lax.conv_general_dilated(
        x,
        kernel,
        (options.stride, options.stride),
        pads,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        precision=options.precision,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve_grouped(x: Array, kernel: Array, options: PlainOptions = PlainOptions()) -> Array:
    """Return the maps of `convolve_plain`, in reverse mode only, for vectorised clients.

    Maps and both gradients of all clients are grouped convolutions.
    """
    return _grouped_maps(x, kernel, options)


def _grouped_forward(x: Any, kernel: Any, options: PlainOptions) -> tuple[Array, tuple]:
    # Newer versions of JAX raise an error for `convolve_grouped` itself here in forward mode.
    return _grouped_maps(x.value, kernel.value, options), (x.value, kernel.value, x.perturbed)


def _grouped_backward(options: PlainOptions, saved: tuple, dy: Array) -> tuple[Array | None, Array]:
    x, kernel, perturbed = saved

    def to_inputs(kernels: Array, dys: Array) -> Array:
        if options.stride == 1:
            # The gradient is a convolution of dy, padded in full, with the kernel turned round.
            turned = kernels[:, ::-1, ::-1].swapaxes(3, 4)
            full = options._replace(padding=len(kernel) - 1 - options.padding)
            return _side_by_side(dys, turned, full)
        # XLA would put zeros between the pixels of `dys` for cuDNN, which makes them four times as
        # many. The convolution of blocks has no stride, so its transpose needs no zeros.
        like = jax.ShapeDtypeStruct((len(kernels), *x.shape), x.dtype)
        maps = functools.partial(_maps_of_blocks, kernels, options)
        (d_x,) = jax.linear_transpose(maps, like)(dys)
        return d_x

    def to_kernel(xs: Array, dys: Array) -> Array:
        like = jax.ShapeDtypeStruct((len(xs), *kernel.shape), kernel.dtype)
        transposed = jax.linear_transpose(lambda kernels: _side_by_side(xs, kernels, options), like)
        (d_kernel,) = transposed(dys)
        return d_kernel

    # The first layer's input needs no gradient.
    d_x: Array | None = None
    if perturbed:
        d_x = _bilinear(to_inputs)(kernel, dy)
    return d_x, _bilinear(to_kernel)(x, dy)


def _maps_of_blocks(kernels: Array, options: PlainOptions, xs: Array) -> Array:
    """Return the maps of `_side_by_side` for stride 2, by a convolution of blocks of stride 1."""

    def split(x: Array, kernel: Array) -> tuple[Array, Array]:
        # Blocks are batch-minor.
        return to_blocks(x.transpose(3, 1, 2, 0), kernel, options.padding)

    blocks, block_kernels = jax.vmap(split)(xs, kernels)
    blocks = blocks.transpose(0, 4, 2, 3, 1)
    # The blocks contain the padding.
    unpadded = options._replace(padding=0, stride=1)
    return _side_by_side(blocks, block_kernels, unpadded)


# With symbolic zeros, the forward rule learns whether x needs a gradient.
convolve_grouped.defvjp(_grouped_forward, _grouped_backward, symbolic_zeros=True)


def _grouped_maps(x: Array, kernel: Array, options: PlainOptions) -> Array:
    return _bilinear(functools.partial(_side_by_side, options=options))(x, kernel)


def to_blocks(x: Array, kernel: Array, padding: int) -> tuple[Array, Array]:
    """Return the input and the kernel of a convolution of stride 1 that equals one of stride 2.

    Blocks of 2x2 pixels become channels. The input is [4 channels, H2, W2, B], and the kernel is
    [h, h, 4 channels, features] with h = (k + 1) // 2.

    Args:
        x: Input [channels, H, W, B].
        kernel: Kernel [k, k, channels, features].
        padding: Number of zeros on each side, which the result contains.
    """
    return _blocks_of_pixels(x, len(kernel), padding), _blocks_of_taps(kernel)


def _blocks_of_pixels(x: Array, size: int, padding: int) -> Float[Array, "blocks H2 W2 B"]:
    """Return the input of `to_blocks` for a kernel of a size."""
    c, high, wide, n = x.shape
    half = (size + 1) // 2
    h, w = ((side + 2 * padding - size) // 2 + half for side in (high, wide))
    # A negative number makes `lax.pad` cut off rows or columns, which no window reads.
    pads = [
        (0, 0, 0),
        (padding, 2 * h - high - padding, 0),
        (padding, 2 * w - wide - padding, 0),
        (0, 0, 0),
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), pads)
    # The row and the column in a block become the first part of a channel's number.
    x = x.reshape(c, h, 2, w, 2, n)
    x = x.transpose(2, 4, 0, 1, 3, 5)
    return x.reshape(4 * c, h, w, n)


def _blocks_of_taps(kernel: Array) -> Float[Array, "h h blocks features"]:
    """Return the kernel of `to_blocks`."""
    size, _, c, f = kernel.shape
    half = (size + 1) // 2
    # A kernel of odd side gets a row and a column of zeros, so that it consists of blocks.
    missing = 2 * half - size
    kernel = jnp.pad(kernel, ((0, missing), (0, missing), (0, 0), (0, 0)))
    # Channels have the order of those of the input's blocks.
    kernel = kernel.reshape(half, 2, half, 2, c, f)
    kernel = kernel.transpose(0, 2, 1, 3, 4, 5)
    return kernel.reshape(half, half, 4 * c, f)


def _side_by_side(xs: Array, kernels: Array, options: PlainOptions) -> Array:
    """Return the maps of each client's inputs with its kernel, by one grouped convolution.

    The grouped convolution has the channels of all clients on one axis.

    Args:
        xs: Inputs [clients, B, H, W, channels].
        kernels: Kernels [clients, k, k, channels, features].
        options: Options of each convolution.
    """
    count, size, _, channels, features = kernels.shape
    inputs = jnp.moveaxis(xs, 0, -2)
    grouped = jnp.moveaxis(kernels, 0, -2).reshape(size, size, channels, count * features)
    inputs = inputs.reshape(*inputs.shape[:-2], -1)
    maps = convolve_plain(inputs, grouped, options, count)
    return jnp.moveaxis(maps.reshape(*maps.shape[:-1], count, features), -2, 0)


def _bilinear(together: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Return a bilinear function of one client's arrays.

    Args:
        together: The function for vectorised clients, whose arrays have a first axis of clients.
    """

    def alone(a: Array, b: Array) -> Array:
        return together(a[None], b[None])[0]

    vectorised = jax.custom_batching.custom_vmap(alone)

    @vectorised.def_vmap
    def _(_: int, batched: list[bool], *arrays: Array) -> tuple[Array, bool]:
        if all(batched):
            return together(*arrays), True
        # If clients share one argument, such as a kernel, plain `vmap` yields fewer operations.
        axes = [0 if mine else None for mine in batched]
        return jax.vmap(alone, axes)(*arrays), True

    # JAX differentiates `vectorised` in forward mode only, and this rule adds reverse mode.
    # The derivative of a bilinear f is f(da, b) + f(a, db).
    differentiable = jax.custom_jvp(vectorised)
    differentiable.defjvp(
        lambda at, by: (differentiable(*at), alone(by[0], at[1]) + alone(at[0], by[1]))
    )
    return differentiable


def max_pool_2x2(y: Float[Array, "B H W features"]) -> Float[Array, "B H2 W2 features"]:
    """Return the largest number of each 2x2 window, without a last odd row or column."""
    n, high, wide, features = y.shape
    even = y[:, : high // 2 * 2, : wide // 2 * 2]
    windows = even.reshape(n, high // 2, 2, wide // 2, 2, features)
    return window_maximum(windows, (2, 4))[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def window_maximum(
    windows: Float[Array, "..."], axes: tuple[int, ...]
) -> tuple[Float[Array, "B H2 W2 features"], Int[Array, "B H2 W2 features"]]:
    """Return the largest number of each window, and its place, 0 to 3.

    The first one of equal numbers wins, and NaN wins over all. This is one kernel in any layout of
    the result, and so is its gradient. `lax.reduce_window` and its gradient write the maps four
    times.

    Args:
        windows: Maps with the four places of a window on axes of their own.
        axes: Axes of the places.
    """

    # The name of this function is a part of programs, and so of a run's fingerprint.
    def better(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        a, i = one
        b, j = other
        equal = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
        wins = (a > b) | (jnp.isnan(a) & ~jnp.isnan(b)) | (equal & (i < j))
        return jnp.where(wins, a, b), jnp.where(wins, i, j)

    places = jnp.broadcast_to(_places(windows, axes), windows.shape)
    # Place 4 is above all others, so a real place wins in a window of -inf only.
    start = (jnp.array(-jnp.inf, windows.dtype), jnp.int8(4))
    return lax.reduce((windows, places), start, better, axes)


@window_maximum.defjvp
def _largest_jvp(axes: tuple[int, ...], windows: tuple[Array], changes: tuple[Array]) -> tuple:
    most, place = window_maximum(windows[0], axes)
    chosen = jnp.expand_dims(place, axes) == _places(windows[0], axes)
    # One place of each window is chosen, so at most one term of the sum is not 0.
    moved = jnp.where(chosen, changes[0], 0).sum(axes)
    # JAX wants tangents of the type float0 for whole numbers, such as places.
    return (most, place), (moved, np.zeros(place.shape, jax.dtypes.float0))


def _places(windows: Array, axes: tuple[int, ...]) -> Int[np.ndarray, "..."]:
    """Return the numbers 0 to 3, in reading order, on the axes of places. Others have length 1."""
    sides = [1] * windows.ndim
    for axis in axes:
        sides[axis] = windows.shape[axis]
    return np.arange(4, dtype=np.int8).reshape(sides)
