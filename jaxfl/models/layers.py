"""Layers on batch-minor activations (channels, H, W, batch), fast on CPUs inside loops.

With few channels, every elementwise, pooling and slicing operation then runs over a batch of contiguous
floats, where channels-last would have only 6 to 32 of them. A convolution is one matrix product per pass
over stacked patches; its own rule of differentiation fuses bias, ReLU and pooling with it.

Each convolution has two forms that load the same parameters:

- "fast": a custom rule of differentiation, reverse mode only.
- "plain": `lax.conv_general_dilated` and `lax.reduce_window`, any mode of differentiation.

A layer with `squares=True` computes the same values, but its backward pass gives each parameter the sum over
examples of the *squared* per-example gradient, sum_n (d loss_n / d w)^2, where the loss is sum_n loss_n and
example n affects loss_n only. Such a layer must be used once in a network.
"""

import functools
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

Form = Literal["fast", "plain"]

# PyTorch's default: uniform in +-1/sqrt(fan_in), kernels and biases alike.
_kernel_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def _bias_init(fan_in: int) -> Any:
    """Uniform in +-1/sqrt(fan_in)."""
    bound = fan_in**-0.5
    return lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)


class Dense(nn.Module):
    """y = x W + b.

    Row-major, after the convolutions too: a product whose large left factor is transposed is up to nine times slower.

    Args:
        features: number of outputs.
        squares: see the module's docstring: (x^2)^T (dy^2), because a per-example gradient has rank one.
    """

    features: int
    squares: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B F"]) -> Float[Array, "B features"]:
        """Outputs."""
        kernel = self.param("kernel", _kernel_init, (x.shape[1], self.features))
        bias = self.param("bias", _bias_init(x.shape[1]), (self.features,))
        return (_dense_squares if self.squares else _dense)(x, kernel, bias)


def _dense(x: Array, kernel: Array, bias: Array) -> Array:
    return x @ kernel + bias[None]


@jax.custom_vjp
def _dense_squares(x: Array, kernel: Array, bias: Array) -> Array:
    return _dense(x, kernel, bias)


def _dense_squares_forward(x: Array, kernel: Array, bias: Array) -> tuple[Array, tuple[Array, Array]]:
    return _dense(x, kernel, bias), (x, kernel)


def _dense_squares_backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array, Array]:
    x, kernel = residuals
    return dy @ kernel.T, (x * x).T @ (dy * dy), (dy * dy).sum(0)


_dense_squares.defvjp(_dense_squares_forward, _dense_squares_backward)


class Convolution(nn.Module):
    """Convolution, bias, ReLU and 2x2 max-pool (stride 2; the first maximum wins) in one layer.

    Args:
        features: output channels.
        size: side k of the kernel (k, k, channels, features).
        padding: zeros on each side.
        relu: whether to apply ReLU.
        pool: whether to pool; a last odd row or column is dropped.
        blocks: the input comes from `to_blocks`, padded already (first layers with few channels).
        form: see the module's docstring.
        squares: see the module's docstring.
    """

    features: int
    size: int
    padding: int = 0
    relu: bool = True
    pool: bool = True
    blocks: bool = False
    form: Form = "fast"
    squares: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "channels H W B"]) -> Float[Array, "features H2 W2 B"]:
        """Feature maps."""
        channels = x.shape[0] // 4 if self.blocks else x.shape[0]
        shape = (self.size, self.size, channels, self.features)
        kernel = self.param("kernel", _kernel_init, shape)
        bias = self.param("bias", _bias_init(self.size**2 * channels), (self.features,))
        if self.form == "plain" and not self.squares:
            return _plain(x, kernel, bias, self.padding, self.relu, self.pool)
        return _fast(x, kernel, bias, _Options(self.padding, self.relu, self.pool, self.blocks, self.squares))


def _plain(x: Array, kernel: Array, bias: Array, padding: int, relu: bool, pool: bool) -> Array:
    pads = ((padding, padding), (padding, padding))
    y = lax.conv_general_dilated(x, kernel, (1, 1), pads, dimension_numbers=("CHWN", "HWIO", "CHWN"))
    y = y + _per_channel(bias)
    y = nn.relu(y) if relu else y
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") if pool else y


class _Options(NamedTuple):
    padding: int
    relu: bool
    pool: bool
    blocks: bool
    squares: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _fast(x: Array, kernel: Array, bias: Array, options: _Options) -> Array:
    return _convolve(x, kernel, bias, options)[0]


def _fast_forward(x: Any, kernel: Any, bias: Any, options: _Options) -> tuple[Array, tuple[Any, ...]]:
    y, patches, weights, saved = _convolve(x.value, kernel.value, bias.value, options)
    # A first layer's input is not differentiated: then there is no input gradient to compute.
    return y, (patches, kernel.value, weights if x.perturbed else None, saved)


def _convolve(x: Array, kernel: Array, bias: Array, options: _Options) -> tuple[Array, Array, Array, Any]:
    weights = _to_block_kernel(kernel) if options.blocks else kernel
    patches = _patches(x, weights.shape[0], options.padding)
    y = _contract(weights.reshape(-1, weights.shape[-1]), patches)
    if not options.pool:
        y = y + _per_channel(bias)
        y = nn.relu(y) if options.relu else y
        return y, patches, weights, y
    phases = _phases(y, options.blocks)
    pooled = _max4(*phases) + _per_channel(bias)
    pooled = nn.relu(pooled) if options.relu else pooled
    return pooled, patches, weights, (y, pooled)


def _fast_backward(options: _Options, residuals: tuple[Any, ...], dy: Array) -> tuple[Any, Array, Array]:
    patches, kernel, weights, saved = residuals
    if options.pool:
        y, pooled = saved
        dy = jnp.where(pooled > 0, dy, 0) if options.relu else dy
        d_bias = dy
        dy = _unpool(y, dy, options.blocks)
    else:
        dy = jnp.where(saved > 0, dy, 0) if options.relu else dy
        d_bias = dy
    if options.squares:
        return (
            None if weights is None else _input_gradient(weights, dy, options.padding),
            _kernel_squares(patches, dy, kernel, options.blocks),
            (d_bias.sum((1, 2)) ** 2).sum(1),
        )
    d_kernel = _contract_last(patches, dy)
    d_kernel = _from_block_kernel(d_kernel, kernel.shape) if options.blocks else d_kernel.reshape(kernel.shape)
    d_x = None if weights is None else _input_gradient(weights, dy, options.padding)
    return d_x, d_kernel, d_bias.sum((1, 2, 3))


_fast.defvjp(_fast_forward, _fast_backward, symbolic_zeros=True)


def _kernel_squares(patches: Array, dy: Array, kernel: Array, blocks: bool) -> Array:
    """sum_n (patches_n dy_n^T)^2: the per-example gradients, squared and summed."""
    rows, n = patches.shape[0], patches.shape[-1]
    per_example = lax.dot_general(
        patches.reshape(rows, -1, n), dy.reshape(dy.shape[0], -1, n), (((1,), (1,)), ((2,), (2,)))
    )
    if blocks:
        per_example = jax.vmap(functools.partial(_from_block_kernel, shape=kernel.shape))(per_example)
    return (per_example * per_example).sum(0).reshape(kernel.shape)


def _input_gradient(weights: Array, dy: Array, padding: int) -> Array:
    size, _, channels, features = weights.shape
    d_patches = weights.reshape(-1, features) @ dy.reshape(features, -1)
    return _from_patches(d_patches.reshape(size, size, channels, *dy.shape[1:]), padding)


def _patches(x: Array, size: int, padding: int) -> Array:
    """(c, h, w, n) -> (size * size * c, h', w', n), kernel rows before columns, h' = h + 2 padding - size + 1.

    In two stages of few slices each, since XLA fuses a stack of few slices into one pass and a stack of many into
    two; and over flat rows (w * n), since its loops are fast over long contiguous runs.
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
    """Transpose of `_patches`: one pass per kernel row, which adds its columns and updates in place."""
    size, _, c, h, w, n = d.shape
    high, wide = h + size - 1 - 2 * padding, w + size - 1 - 2 * padding
    d = d.reshape(size, size, c, h, w * n)
    zero = jnp.zeros((), d.dtype)
    x = jnp.zeros((c, high, wide * n), d.dtype)
    for i in range(size):
        # Kernel row i of output row r is input row r + i - padding.
        first, last = max(0, padding - i), min(h, high + padding - i)
        columns = (
            lax.pad(
                d[i, j, :, first:last],
                zero,
                ((0, 0, 0), (0, 0, 0), ((j - padding) * n, (size - 1 - j - padding) * n, 0)),
            )
            for j in range(size)
        )
        start = first + i - padding
        x = lax.dynamic_update_slice(x, x[:, start : start + last - first] + sum(columns), (0, start, 0))
    return x.reshape(c, high, wide, n)


def to_blocks(x: Float[Array, "channels H W B"], padding: int) -> Float[Array, "channels4 H2 W2 B"]:
    """Space to depth: pad, then turn each 2x2 block of pixels into channels (row, column, channel)."""
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    c, h, w, n = x.shape
    x = x.reshape(c, h // 2, 2, w // 2, 2, n).transpose(2, 4, 0, 1, 3, 5)
    return x.reshape(4 * c, h // 2, w // 2, n)


def _to_block_kernel(kernel: Array) -> Array:
    """(k, k, c, f) -> (b, b, 4c, 4f), b = (k + 1) / 2: one 2x2 block of outputs from blocks of inputs.

    The kernel is shifted to each of the four outputs' places in a window of k + 1 pixels.
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


def _phases(y: Array, blocks: bool) -> tuple[Array, ...]:
    """The four elements of each 2x2 window, in reading order."""
    if blocks:
        return tuple(y.reshape(4, -1, *y.shape[1:]))
    c, h, w, n = y.shape
    y = y[:, : h // 2 * 2, : w // 2 * 2].reshape(c, h // 2, 2, w // 2, 2, n)
    return y[:, :, 0, :, 0], y[:, :, 0, :, 1], y[:, :, 1, :, 0], y[:, :, 1, :, 1]


def _unpool(y: Array, g: Array, blocks: bool) -> Array:
    """Gradient of the maximum: to the first maximum of each window."""
    a, b, c, d = _phases(y, blocks)
    top = _max4(a, b, c, d)
    first, second, third = a == top, b == top, c == top
    takes = (first, second & ~first, third & ~(first | second), ~(first | second | third))
    parts = [jnp.where(take, g, 0) for take in takes]
    if blocks:
        return jnp.concatenate(parts)
    rows = jnp.stack([jnp.stack(parts[:2], 3), jnp.stack(parts[2:], 3)], 2)
    f, h, w, n = g.shape
    rows = rows.reshape(f, 2 * h, 2 * w, n)
    spare = (y.shape[1] - 2 * h, y.shape[2] - 2 * w)
    return jnp.pad(rows, ((0, 0), (0, spare[0]), (0, spare[1]), (0, 0))) if any(spare) else rows


def _max4(a: Array, b: Array, c: Array, d: Array) -> Array:
    return jnp.maximum(jnp.maximum(a, b), jnp.maximum(c, d))


def _contract(a: Array, b: Array) -> Array:
    """Product a^T b over the first axes."""
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())))


def _contract_last(a: Array, b: Array) -> Array:
    """Product a b^T over all axes but the first."""
    return lax.dot_general(a.reshape(len(a), -1), b.reshape(len(b), -1), (((1,), (1,)), ((), ())))


def _per_channel(v: Array) -> Array:
    return v[:, None, None, None]
