"""JAX's own convolution, and one whose kernel gradients are, for vectorised clients, that of one grouped convolution.

A convolution of clients with kernels of their own is a grouped one. If the gradient of its kernel is vectorised
instead, it is a convolution with batch and channels exchanged, before which XLA copies all maps into that order on a
GPU; cuDNN has the gradient of a grouped convolution as it is.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Options(NamedTuple):
    """Zeros on each side, the stride, the precision of products."""

    padding: int = 0
    stride: int = 1
    precision: str | None = None


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
    return convolve_plain(x, kernel, options)


def _forward(x: Any, kernel: Any, options: Options) -> tuple[Array, tuple]:
    return convolve_plain(x.value, kernel.value, options), (x.value, kernel.value, x.perturbed)


def _backward(options: Options, saved: tuple, dy: Array) -> tuple[Array | None, Array]:
    x, kernel, perturbed = saved
    dx = _input_gradient(x, kernel, dy, options) if perturbed else None
    return dx, _kernel_gradient(x, dy, options, kernel.shape)


convolve_grouped.defvjp(_forward, _backward, symbolic_zeros=True)


def _input_gradient(like: Array, kernel: Array, dy: Array, options: Options) -> Array:
    return jax.linear_transpose(lambda x: convolve_plain(x, kernel, options), like)(dy)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _kernel_gradient(x: Array, dy: Array, options: Options, shape: tuple[int, ...]) -> Array:
    one = jax.custom_batching.custom_vmap(lambda x, dy: _transposed(x, dy, options, shape))

    @one.def_vmap
    def of_clients(count: int, batched: list[bool], *maps: Array) -> tuple[Array, bool]:
        """With the clients' channels side by side in the last axis."""
        own = (a if mine else jnp.broadcast_to(a, (count, *a.shape)) for a, mine in zip(maps, batched, strict=True))
        x, dy = (jnp.moveaxis(a, 0, -2).reshape(*a.shape[1:-1], -1) for a in own)
        gradient = _transposed(x, dy, options, (*shape[:-1], count * shape[-1]), count)
        return jnp.moveaxis(gradient.reshape(*shape[:-1], count, -1), -2, 0), True

    return one(x, dy)


@_kernel_gradient.defjvp
def _kernel_gradient_jvp(options: Options, shape: tuple[int, ...], maps: Any, changes: Any) -> tuple[Array, Array]:
    (x, dy), (x_change, dy_change) = maps, changes
    change = _transposed(x_change, dy, options, shape) + _transposed(x, dy_change, options, shape)
    return _kernel_gradient(x, dy, options, shape), change


def _transposed(x: Array, dy: Array, options: Options, shape: tuple[int, ...], groups: int = 1) -> Array:
    """The gradient of a kernel of a shape."""
    kernel = jax.ShapeDtypeStruct(shape, x.dtype)
    return jax.linear_transpose(lambda kernel: convolve_plain(x, kernel, options, groups), kernel)(dy)[0]
