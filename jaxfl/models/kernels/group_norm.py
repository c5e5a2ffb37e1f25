"""Group normalisation with a shortcut and ReLU as one function with its own differentiation rule.

Activations are batch-minor: (channels, H, W, batch). E is the mean over a group of channels of one
example, and dy the gradient before ReLU:

    z = (x - E[x]) g,   g = 1 / sqrt(E[x^2] - E[x]^2 + epsilon),
    y = relu(scale z + bias + shortcut),
    dx = g (scale dy - E[scale dy] - z E[scale dy z]).

Both passes take two sums per channel and example in one sweep, and then one multiply-add per
element. W and batch are one axis, so that XLA's CPU loops are long even if the batch is small.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float


class NormOptions(NamedTuple):
    """Options of a normalisation (see `jaxfl.models.layers.GroupNorm`)."""

    groups: int
    epsilon: float
    relu: bool
    sum_grad_squared: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def normalize(
    x: Array, shortcut: Array | None, scale: Array, bias: Array, options: NormOptions
) -> Array:
    """Return normalised maps (c, h, w, n) of x (c, h, w, n), with scale and bias (c,).

    A shortcut of the same shape is added before ReLU. None adds nothing.
    """
    return _forward(x, shortcut, scale, bias, options)[0]


def _forward(
    x: Array, shortcut: Array | None, scale: Array, bias: Array, options: NormOptions
) -> tuple[Array, tuple]:
    rows = _as_rows(x)
    mean, square = group_means(_sums(rows, rows * rows, x.shape), x.shape, options)
    # Rounding may leave a small variance below 0.
    variance = jnp.maximum(square - mean**2, 0)
    gain = lax.rsqrt(variance + options.epsilon)
    # scale z + bias is slope x + offset, which is one multiply-add.
    slope = gain * scale[:, None]
    both = jnp.stack([slope, bias[:, None] - mean * slope])
    slope, offset = _along_rows(both, x.shape)
    y = rows * slope + offset
    if shortcut is not None:
        y = y + _as_rows(shortcut)
    # Only the gradient of ReLU needs the output.
    output: Array | None = None
    if options.relu:
        y = jax.nn.relu(y)
        output = y
    return y.reshape(x.shape), (rows, shortcut, scale, mean, gain, output)


def _backward(
    options: NormOptions, saved: tuple, dy: Array
) -> tuple[Array, Array | None, Array, Array]:
    rows, shortcut, scale, mean, gain, y = saved
    shape = dy.shape
    dy = _as_rows(dy)
    if y is not None:
        dy = jnp.where(y > 0, dy, 0)
    d_bias, d_scale = _sums(dy, dy * rows, shape)
    # The sum of dy z follows from those of dy and dy x, because z = (x - mean) gain.
    d_scale = (d_scale - mean * d_bias) * gain
    scaled = jnp.stack([d_bias * scale[:, None], d_scale * scale[:, None]])
    level, slope = group_means(scaled, shape, options)
    # The formula of dx, sorted into a factor of dy, a factor of x and an offset.
    slope = slope * gain
    factor_of_dy = gain * scale[:, None]
    factor_of_x = -gain * slope
    added = gain * (slope * mean - level)
    factors = jnp.stack([factor_of_dy, factor_of_x, added])
    by_dy, by_x, offset = _along_rows(factors, shape)
    dx = (dy * by_dy + rows * by_x + offset).reshape(shape)
    if options.sum_grad_squared:
        # An example's gradient is summed over (H, W) by now, and then squared.
        d_scale = d_scale**2
        d_bias = d_bias**2
    d_shortcut: Array | None = None
    if shortcut is not None:
        d_shortcut = dy.reshape(shape)
    return dx, d_shortcut, d_scale.sum(1), d_bias.sum(1)


normalize.defvjp(_forward, _backward)


def _as_rows(x: Array) -> Array:
    """Return x (c, h, w, n) in the shape (c, h, w * n)."""
    return x.reshape(*x.shape[:2], -1)


def _sums(a: Array, b: Array, shape: tuple[int, ...]) -> Float[Array, "2 c n"]:
    """Return the sums of both arrays over (H, W) in one sweep.

    The sum over H comes first, because a sum over W would add only n numbers at a time.
    """

    def add(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return left[0] + right[0], left[1] + right[1]

    zero = jnp.zeros((), a.dtype)
    both = lax.reduce((a, b), (zero, zero), add, (1,))
    sums = jnp.stack(both)
    return sums.reshape(2, len(a), *shape[2:]).sum(2)


def group_means(sums: Array, shape: tuple[int, ...], options: NormOptions) -> Float[Array, "2 c n"]:
    """Return the mean over each channel's group, from two sums per channel and example.

    Args:
        sums: Sums over (H, W), [2, c, n].
        shape: Shape (c, h, w, n) of the maps.
        options: Options, with the number of groups.
    """
    channels, high, wide, batch = shape
    size = channels // options.groups
    means = sums.reshape(2, options.groups, size, batch).sum(2) / (size * high * wide)
    return jnp.repeat(means, size, axis=1)


def _along_rows(factors: Float[Array, "k c n"], shape: tuple[int, ...]) -> Float[Array, "k c 1 wn"]:
    """Return each factor repeated for every column, by a matrix product.

    XLA would fuse a plain repetition into every use, element by element.
    """
    copies = jnp.tile(jnp.eye(shape[3]), shape[2])
    # The default precision of accelerators would round the factors that this product copies.
    return jnp.matmul(factors, copies, precision="highest")[:, :, None]
