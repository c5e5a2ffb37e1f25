"""Convolution, bias, ReLU and 2x2 max-pool as one function with its own rule of differentiation.

Activations are batch-minor: (channels, H, W, batch). Every pass is one matrix product over stacked patches; the
rest is arranged so that XLA's CPU loops run once over long contiguous rows:

    y = W^T P,   dW = P dy^T,   dP = W dy,   with P (k k c, h w n), W (k k c, f), y (f, h w n).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Options(NamedTuple):
    """What a convolution does besides; see `jaxfl.models.layers.Convolution`."""

    padding: int
    relu: bool
    pool: bool
    blocks: bool
    squares: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def convolve(x: Array, kernel: Array, bias: Array, options: Options) -> Array:
    """Feature maps (f, h, w, n) of x (c, H, W, n), with a kernel (k, k, c, f)."""
    return _forward(x, kernel, bias, options)[0]


def _forward(x: Array, kernel: Array, bias: Array, options: Options) -> tuple[Array, Array, Array, Array]:
    """Output, patches, kernel as used, and where the output's gradient goes."""
    weights = _to_block_kernel(kernel) if options.blocks else kernel
    patches = _patches(x, weights.shape[0], options.padding)
    y = lax.dot_general(weights.reshape(-1, weights.shape[-1]), patches, (((0,), (0,)), ((), ())))
    y, route = _pool(y, options.blocks) if options.pool else (y, y)
    y = y + bias[:, None, None, None]
    if not options.relu:
        return y, patches, weights, route
    y = jax.nn.relu(y)
    return y, patches, weights, jnp.where(y > 0, route, _NOBODY) if options.pool else y > 0


def _forward_rule(x: Any, kernel: Any, bias: Any, options: Options) -> tuple[Array, tuple[Any, ...]]:
    y, patches, weights, route = _forward(x.value, kernel.value, bias.value, options)
    # The first layer's input is not differentiated: then there is no input gradient to compute.
    source = x.value if options.squares else patches
    return y, (source, kernel.value, weights if x.perturbed else None, route)


def _backward_rule(options: Options, residuals: tuple[Any, ...], dy: Array) -> tuple[Array | None, Array, Array]:
    source, kernel, weights, route = residuals
    if options.pool:
        d_bias = jnp.where(route < _NOBODY, dy, 0)
        lost = _size(kernel, options) - 1 - 2 * options.padding if options.squares else 0
        dy = _unpool(route, dy, options.blocks, (source.shape[1] - lost, source.shape[2] - lost))
    else:
        d_bias = dy = jnp.where(route, dy, 0) if options.relu else dy
    d_x = None if weights is None else _input_gradient(weights, dy, options.padding)
    if options.squares:
        return d_x, _kernel_squares(source, dy, kernel, options), (d_bias.sum((1, 2)) ** 2).sum(1)
    d_kernel = source.reshape(len(source), -1) @ dy.reshape(len(dy), -1).T
    d_kernel = _from_block_kernel(d_kernel, kernel.shape) if options.blocks else d_kernel.reshape(kernel.shape)
    return d_x, d_kernel, d_bias.sum((1, 2, 3))


convolve.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _size(kernel: Array, options: Options) -> int:
    """Side of the kernel as used: in blocks of two pixels, or in pixels."""
    return (len(kernel) + 1) // 2 if options.blocks else len(kernel)


def _kernel_squares(x: Array, dy: Array, kernel: Array, options: Options) -> Array:
    """sum_n (P_n dy_n^T)^2: each example's gradient, squared and summed.

    The products need the batch first. Moving it there is slow, so it is done to x and not to the patches; these are
    then shifts of whole images (h w), where dy is 0 in the columns that a shift carries into the next row.
    """
    size, pad = _size(kernel, options), options.padding
    x = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    n, high, wide = dy.shape[3], dy.shape[1], x.shape[2]
    length = -(-high * wide // 16) * 16  # whole vectors
    span = (size - 1) * wide + length
    x = jnp.pad(_batch_first(x), ((0, 0), (0, 0), (0, max(0, span + size - 1 - x.shape[1] * wide))))
    dy = jnp.pad(_batch_first(dy).reshape(n, len(dy), high, -1), ((0, 0), (0, 0), (0, 0), (0, size - 1)))
    dy = jnp.pad(dy.reshape(n, dy.shape[1], -1), ((0, 0), (0, 0), (0, length - high * wide)))
    columns = jnp.concatenate([x[:, :, j : span + j] for j in range(size)], 1)
    patches = jnp.concatenate([columns[:, :, i * wide : i * wide + length] for i in range(size)], 1)
    gradients = jnp.einsum("nkm,nfm->nkf", patches, dy)
    if options.blocks:
        gradients = jax.vmap(functools.partial(_from_block_kernel, shape=kernel.shape))(gradients)
    return (gradients * gradients).sum(0).reshape(kernel.shape)


def _batch_first(x: Array) -> Array:
    """(k, h, w, n) -> (n, k, h w), by a product with the identity: XLA's transposition misses the cache every time."""
    k, h, w, n = x.shape
    x = lax.dot_general(jnp.eye(n), x.reshape(-1, n), (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
    return x.reshape(n, k, h * w)


def _input_gradient(weights: Array, dy: Array, padding: int) -> Array:
    size, _, channels, features = weights.shape
    d_patches = weights.reshape(-1, features) @ dy.reshape(features, -1)
    return _from_patches(d_patches.reshape(size, size, channels, *dy.shape[1:]), padding)


def _patches(x: Array, size: int, padding: int) -> Array:
    """(c, h, w, n) -> (size size c, h', w', n), kernel rows before columns, h' = h + 2 padding - size + 1.

    In two stages of few slices each, since XLA fuses a stack of few slices into one pass and a stack of many into
    two; and over flat rows (w n), since its loops are fast over long runs.
    """
    c, h, w, n = x.shape
    high, wide = h + 2 * padding - size + 1, w + 2 * padding - size + 1
    # Without padding a spare column in front: what made x would be fused into every slice, but not through a pad.
    front = max(padding, 1)
    config = ((0, 0, 0), (padding, padding, 0), (front, padding, 0), (0, 0, 0))
    x = lax.pad(x, jnp.zeros((), x.dtype), config).reshape(c, h + 2 * padding, -1)
    starts = [(front - padding + j) * n for j in range(size)]
    columns = jnp.concatenate([x[:, :, start : start + wide * n] for start in starts])
    return jnp.concatenate([columns[:, i : i + high] for i in range(size)]).reshape(-1, high, wide, n)


def _from_patches(d: Array, padding: int) -> Array:
    """Transpose of `_patches`: for each kernel row one pass, which sums its columns and adds in place."""
    size, _, c, h, w, n = d.shape
    high, wide = h + size - 1 - 2 * padding, w + size - 1 - 2 * padding
    d = d.reshape(size, size, c, h, w * n)
    zero = jnp.zeros((), d.dtype)
    x = jnp.zeros((c, high, wide * n), d.dtype)
    for i in range(size):
        # Output row r took input row r + i - padding; the rows outside were padding.
        first, last = max(0, padding - i), min(h, high + padding - i)
        columns = [
            lax.pad(d[i, j, :, first:last], zero, ((0, 0, 0), (0, 0, 0), (before * n, (wide - w - before) * n, 0)))
            for j, before in enumerate(range(-padding, size - padding))
        ]
        start = first + i - padding
        x = lax.dynamic_update_slice(x, x[:, start : start + last - first] + sum(columns), (0, start, 0))
    return x.reshape(c, high, wide, n)


_NOBODY = 4


def _pool(y: Array, blocks: bool) -> tuple[Array, Array]:
    """Maximum of each 2x2 window, and the place (0 to 3, in reading order) of its first maximum in one byte."""
    if blocks:
        a, b, c, d = y.reshape(4, -1, *y.shape[1:])
    else:
        f, h, w, n = y.shape
        y = y[:, : h // 2 * 2, : w // 2 * 2].reshape(f, h // 2, 2, w // 2, 2, n)
        a, b, c, d = y[:, :, 0, :, 0], y[:, :, 0, :, 1], y[:, :, 1, :, 0], y[:, :, 1, :, 1]
    above, below = jnp.maximum(a, b), jnp.maximum(c, d)
    winner = jnp.where(above >= below, jnp.where(a >= b, 0, 1), jnp.where(c >= d, 2, 3))
    return jnp.maximum(above, below), winner.astype(jnp.int8)


def _unpool(winner: Array, g: Array, blocks: bool, shape: tuple[int, ...]) -> Array:
    """Transpose of `_pool`, to maps of a shape (h, w)."""
    a, b, c, d = (jnp.where(winner == place, g, 0) for place in range(4))
    if blocks:
        return jnp.concatenate((a, b, c, d))
    f, h, w, n = g.shape
    y = jnp.stack([jnp.stack([a, b], 3), jnp.stack([c, d], 3)], 2).reshape(f, 2 * h, 2 * w, n)
    spare = (shape[0] - 2 * h, shape[1] - 2 * w)
    return jnp.pad(y, ((0, 0), (0, spare[0]), (0, spare[1]), (0, 0))) if any(spare) else y


def _to_block_kernel(kernel: Array) -> Array:
    """(k, k, c, f) -> (b, b, 4c, 4f), b = (k + 1) / 2: a 2x2 block of outputs from blocks of inputs.

    The kernel stands at each of the four outputs' places in a window of k + 1 pixels.
    """
    size, _, c, f = kernel.shape
    b = (size + 1) // 2
    places = [jnp.pad(kernel, ((i, 1 - i), (j, 1 - j), (0, 0), (0, 0))) for i in range(2) for j in range(2)]
    window = jnp.stack(places, 3).reshape(b, 2, b, 2, c, 4 * f)
    return window.transpose(0, 2, 1, 3, 4, 5).reshape(b, b, 4 * c, 4 * f)


def _from_block_kernel(d: Array, shape: tuple[int, ...]) -> Array:
    """Transpose of `_to_block_kernel`."""
    size, _, c, f = shape
    b = (size + 1) // 2
    d = d.reshape(b, b, 2, 2, c, 4, f).transpose(0, 2, 1, 3, 4, 5, 6).reshape(size + 1, size + 1, c, 4, f)
    return d[:-1, :-1, :, 0] + d[:-1, 1:, :, 1] + d[1:, :-1, :, 2] + d[1:, 1:, :, 3]
