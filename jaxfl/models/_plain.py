"""JAX's own convolution, one that computes vectorised clients side by side, kernel gradients too, and max-pooling.

A convolution of clients with kernels of their own is a grouped one. If the gradient of its kernel is vectorised
instead, it is a convolution with batch and channels exchanged, before which XLA copies all maps into that order on a
GPU; cuDNN has the gradient of a grouped convolution as it is. Several clients can share a group, with their kernels on
the diagonal of one that is zero elsewhere: as many times the operations, in matrix products as many times as wide.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

PACKED = 8
"""Clients that share a group of a "packed" convolution, at most."""


class Options(NamedTuple):
    """Zeros on each side, the stride, the precision of products, and how many clients share a group at most."""

    padding: int = 0
    stride: int = 1
    precision: Any = None
    packed: int = 1


def convolve_plain(x: Array, kernel: Array, options: Options = Options(), groups: int = 1) -> Array:
    """Maps (B, H2, W2, features) of x (B, H, W, channels) and a kernel (k, k, channels, features)."""
    pads, layout = ((options.padding, options.padding),) * 2, ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (options.stride, options.stride), pads,
        dimension_numbers=layout, feature_group_count=groups, precision=options.precision,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve_grouped(x: Array, kernel: Array, options: Options = Options()) -> Array:
    """The same, in reverse mode only."""
    return _maps(x, kernel, options)


def _forward(x: Any, kernel: Any, options: Options) -> tuple[Array, tuple]:
    return _maps(x.value, kernel.value, options), (x.value, kernel.value, x.perturbed)


def _backward(options: Options, saved: tuple, dy: Array) -> tuple[Array | None, Array]:
    x, kernel, perturbed = saved

    def to_inputs(kernels: Array, dys: Array) -> Array:
        if options.stride == 1:
            turned = kernels[:, ::-1, ::-1].swapaxes(3, 4)
            return _side_by_side(
                dys, turned, options._replace(padding=len(kernel) - 1 - options.padding)
            )

        def maps(xs: Array) -> Array:
            """Without a stride: XLA would put zeros between the pixels of `dys`, four times as many, for cuDNN."""
            split = jax.vmap(
                lambda x, kernel: to_blocks(x.transpose(3, 1, 2, 0), kernel, options.padding)
            )
            blocks, theirs = split(xs, kernels)
            return _side_by_side(
                blocks.transpose(0, 4, 2, 3, 1), theirs, options._replace(padding=0, stride=1)
            )

        return jax.linear_transpose(maps, jax.ShapeDtypeStruct((len(kernels), *x.shape), x.dtype))(
            dys
        )[0]

    def to_kernel(xs: Array, dys: Array) -> Array:
        like = jax.ShapeDtypeStruct((len(xs), *kernel.shape), kernel.dtype)
        return jax.linear_transpose(lambda kernels: _side_by_side(xs, kernels, options), like)(dys)[
            0
        ]

    return _bilinear(to_inputs)(kernel, dy) if perturbed else None, _bilinear(to_kernel)(x, dy)


convolve_grouped.defvjp(_forward, _backward, symbolic_zeros=True)


def _maps(x: Array, kernel: Array, options: Options) -> Array:
    return _bilinear(functools.partial(_side_by_side, options=options))(x, kernel)


def to_blocks(x: Array, kernel: Array, padding: int) -> tuple[Array, Array]:
    """A convolution of stride 2 as one of stride 1: blocks of 2x2 pixels become channels, and so does the kernel.

    Args:
        x: [channels, H, W, B].
        kernel: [k, k, channels, features].
        padding: zeros on each side.
    """
    (c, high, wide, n), (size, _, _, f) = x.shape, kernel.shape
    half = -(-size // 2)
    h, w = ((side + 2 * padding - size) // 2 + half for side in (high, wide))
    pads = [
        (0, 0, 0),
        (padding, 2 * h - high - padding, 0),
        (padding, 2 * w - wide - padding, 0),
        (0, 0, 0),
    ]
    x = lax.pad(x, jnp.zeros((), x.dtype), pads)
    x = x.reshape(c, h, 2, w, 2, n).transpose(2, 4, 0, 1, 3, 5).reshape(4 * c, h, w, n)
    kernel = jnp.pad(kernel, ((0, 2 * half - size), (0, 2 * half - size), (0, 0), (0, 0)))
    kernel = (
        kernel.reshape(half, 2, half, 2, c, f)
        .transpose(0, 2, 1, 3, 4, 5)
        .reshape(half, half, 4 * c, f)
    )
    return x, kernel


def _side_by_side(xs: Array, kernels: Array, options: Options) -> Array:
    """Maps of each client's inputs with its kernel, from the clients' channels side by side in the last axis."""
    (count, size, _, channels, features), inputs = kernels.shape, jnp.moveaxis(xs, 0, -2)
    packed = max(some for some in range(1, options.packed + 1) if count % some == 0)
    diagonal = jnp.eye(packed, dtype=kernels.dtype).reshape(1, packed, 1, 1, packed, 1, 1)
    grouped = kernels.reshape(-1, packed, size, size, 1, channels, features) * diagonal
    grouped = jnp.moveaxis(grouped, (0, 1), (-3, -2)).reshape(
        size, size, packed * channels, count * features
    )
    maps = convolve_plain(inputs.reshape(*inputs.shape[:-2], -1), grouped, options, count // packed)
    return jnp.moveaxis(maps.reshape(*maps.shape[:-1], count, features), -2, 0)


def _bilinear(together: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """A bilinear function of one client from that of several, which it is where clients are vectorised."""

    def alone(a: Array, b: Array) -> Array:
        return together(a[None], b[None])[0]

    vectorised = jax.custom_batching.custom_vmap(alone)

    @vectorised.def_vmap
    def _(_: int, batched: list[bool], *arrays: Array) -> tuple[Array, bool]:
        """What one of the two has alone, as a kernel that examples share, JAX folds into fewer operations itself."""
        return (
            together if all(batched) else jax.vmap(alone, [0 if mine else None for mine in batched])
        )(*arrays), True

    differentiable = jax.custom_jvp(vectorised)  # in both modes, of which `vectorised` has one
    differentiable.defjvp(
        lambda at, by: (differentiable(*at), alone(by[0], at[1]) + alone(at[0], by[1]))
    )
    return differentiable


def max_pool(y: Float[Array, "B H W features"]) -> Float[Array, "B H2 W2 features"]:
    """The largest number of each window of 2x2, without a last odd row or column."""
    n, high, wide, features = y.shape
    windows = y[:, : high // 2 * 2, : wide // 2 * 2].reshape(
        n, high // 2, 2, wide // 2, 2, features
    )
    return largest(windows, (2, 4))[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def largest(
    windows: Float[Array, "..."], axes: tuple[int, ...]
) -> tuple[Float[Array, "B H2 W2 features"], Int[Array, "B H2 W2 features"]]:
    """The largest number of each window, and its place; the first one wins, and NaN over all.

    One kernel, whatever the layout of its result, as is that of the gradient: `lax.reduce_window` and its gradient
    write the maps four times.

    Args:
        windows: maps by window.
        axes: those of a window's four places.
    """

    def better(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        (a, i), (b, j) = one, other
        equal = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
        wins = (a > b) | (jnp.isnan(a) & ~jnp.isnan(b)) | (equal & (i < j))
        return jnp.where(wins, a, b), jnp.where(wins, i, j)

    places = jnp.broadcast_to(_places(windows, axes), windows.shape)
    return lax.reduce(
        (windows, places), (jnp.array(-jnp.inf, windows.dtype), jnp.int8(4)), better, axes
    )


@largest.defjvp
def _largest_jvp(axes: tuple[int, ...], windows: tuple[Array], changes: tuple[Array]) -> tuple:
    most, place = largest(windows[0], axes)
    chosen = jnp.expand_dims(place, axes) == _places(windows[0], axes)
    moved = jnp.where(chosen, changes[0], 0).sum(axes)
    return (most, place), (moved, np.zeros(place.shape, jax.dtypes.float0))


def _places(windows: Array, axes: tuple[int, ...]) -> Int[np.ndarray, "..."]:
    """0 to 3, in reading order, on the axes of places."""
    return np.arange(4, dtype=np.int8).reshape(
        [side if i in axes else 1 for i, side in enumerate(windows.shape)]
    )
