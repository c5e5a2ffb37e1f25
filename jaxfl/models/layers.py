"""Layers on batch-minor activations (channels, H, W, batch), which are fast on CPUs inside loops.

Networks with few channels gain most. Every elementwise, pooling and slicing operation then runs
over a batch of contiguous floats. In channels-last layouts of such networks, only the 6 to 32
channels are contiguous.
Flattening gives the order (channels, H, W), which is PyTorch's.

A convolution has six forms, which load the same parameters:

- "winograd": for CPUs. It saves operations by minimal filtering where that pays, and supports
  reverse mode only, by a differentiation rule of its own. Below float32 precision it becomes
  "im2col".
- "im2col": for GPUs. It is "winograd" without filtering, with one matrix product per pass.
- "lax": `lax.conv_general_dilated`, channels last, in any mode of differentiation.
- "grouped": for residual networks on GPUs. It is "lax", but the gradients of vectorised clients are
  those of one grouped convolution (`kernels.plain`), in reverse mode only.
- "blocks": for TPUs. It is "lax", but layers with pooling take a block of 2x2 pixels as one pixel.
  The four places of a pooling window are channels. For kernels of side k, this takes
  ((k + 1) / k)^2 times the operations, at a quarter of the positions, each with four times the
  channels.
- "pallas": for few channels on GPUs. A float32 layer with ReLU and pooling is one program forward
  and at most two backward (`kernels.fused`), if its stride is 1 and its kernel's side is at most
  `kernels.LARGEST_FUSED`. Any other layer is "grouped". This form supports reverse mode only. Other
  devices interpret the programs, which is slow. A first layer without padding reads bytes
  unconverted.

A group normalisation has two implementations. The forms "winograd" and "im2col" take a batch-minor
one (`kernels.group_norm`), which supports reverse mode only. The other forms take JAX's own
operations.

A layer with `sum_grad_squared=True` has the same values and another backward pass, in reverse mode
only. Each parameter gets the sum over examples of the *squared* per-example gradient,
sum_n (d loss_n / d w)^2. The loss must be a sum_n loss_n in which each example affects its own term
only. A network must use such a layer only once. In every form except "winograd", such a convolution
is computed as in "im2col". Such a normalisation takes the batch-minor implementation in all forms.
"""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Shaped

from jaxfl._support.backend import Form
from jaxfl.models.kernels import LARGEST_FUSED
from jaxfl.models.kernels.convolution import ConvolutionOptions, convolve
from jaxfl.models.kernels.group_norm import NormOptions, group_means, normalize
from jaxfl.models.kernels.plain import (
    PlainOptions,
    convolve_grouped,
    convolve_plain,
    max_pool_2x2,
    to_blocks,
    window_maximum,
)

PLAIN: tuple[Form, ...] = ("lax", "grouped", "blocks", "pallas")
"""Forms that compute layers by JAX's own operations wherever no fused kernel applies.

Layers with `sum_grad_squared` are an exception (see the module's docstring).
"""

# PyTorch's default: kernels and biases are uniform in +-1/sqrt(fan_in).
_kernel_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def _bias_init(fan_in: int) -> Callable[[Array, tuple[int, ...]], Array]:
    bound = fan_in**-0.5
    return lambda key, shape: jax.random.uniform(
        key, shape, jnp.float32, minval=-bound, maxval=bound
    )


def as_floats(inputs: Shaped[Array, "B ..."]) -> Float[Array, "B ..."]:
    """Scale bytes to (x / 255 - 0.5) / 0.5, and return floating numbers as float32.

    Raises:
        TypeError: The inputs are neither bytes nor floating numbers.
    """
    if inputs.dtype == jnp.uint8:
        # This is (x / 255 - 0.5) / 0.5 by one multiplication and one subtraction.
        return inputs.astype(jnp.float32) * (2 / 255) - 1
    if not jnp.issubdtype(inputs.dtype, jnp.floating):
        raise TypeError(
            f"inputs must be bytes or floating numbers, got {inputs.dtype}. Convert the images "
            "by inputs.astype(np.float32), for instance."
        )
    return inputs.astype(jnp.float32)


class Classifier(nn.Module):
    """Network `classify(extract(x))`, split at `head`. Subclasses add `extract` and `head`."""

    def classify(self, features: Array) -> Array:
        """Return the outputs of a batch from its features."""
        return self.head(features)

    def __call__(self, x: Array) -> Array:
        """Return the outputs of a batch."""
        return self.classify(self.extract(x))


class Convolution(nn.Module):
    """A layer of a convolution, bias, ReLU and 2x2 max-pool.

    The pool has stride 2, and the first maximum of a window wins.

    Args:
        features: Number of output channels.
        size: Side k of the kernel (k, k, channels, features), in pixels.
        padding: Number of zeros on each side.
        relu: Whether to apply ReLU.
        pool: Whether to pool. A last odd row or column is dropped.
        stride: 1, or 2 without pooling.
        bias: Whether to add a bias.
        pairs: Whether the input has pairs of neighbouring columns as channels, which
            `kernels.convolution.to_pairs` makes. Pairs need the form "winograd" or "im2col", an odd
            `size`, no padding, and pooling.
        parts: Number of groups into which a fused layer sorts its pooled columns, by the
            remainder of their index. The next fused layer reads them in that order (see
            `kernels.fused.convolve_pooled`). 1 keeps the columns' order.
        form: How the layer is computed (see the module's docstring).
        sum_grad_squared: Whether gradients are sums of squared per-example gradients (see the
            module's docstring).
    """

    features: int
    size: int
    padding: int = 0
    relu: bool = True
    pool: bool = True
    stride: Literal[1, 2] = 1
    bias: bool = True
    pairs: bool = False
    parts: int = 1
    form: Form = "winograd"
    sum_grad_squared: bool = False

    @property
    def fused(self) -> bool:
        """Whether `kernels.fused` computes a float32 layer of these options."""
        pooled = self.relu and self.pool and self.stride == 1 and self.size <= LARGEST_FUSED
        return self.form == "pallas" and pooled and not self.sum_grad_squared

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Return maps [features, H2, W2, B] of maps [channels, H, W, B].

        A fused layer with more than one part returns `kernels.fused.Maps` instead of an array. The
        next fused layer takes them.
        """
        channels = x.shape[0]
        if self.pairs:
            channels = channels // 2
        padding = self.padding
        shape = (self.size, self.size, channels, self.features)
        kernel = self.param("kernel", _kernel_init, shape)
        # All computations below add a bias, so zeros stand for a missing one.
        bias = jnp.zeros(self.features, kernel.dtype)
        if self.bias:
            bias = self.param("bias", _bias_init(self.size**2 * channels), (self.features,))
        if self.is_initializing():
            # Parameters follow from shapes, and tracing the maps would take most of the time.
            return jnp.zeros(_maps_shape(self, x.shape))
        fused = self.fused and kernel.dtype == jnp.float32
        # A byte of 0 means -1, so bytes cannot be padded with zeros.
        if x.dtype == jnp.uint8 and (not fused or padding):
            x = as_floats(x).astype(kernel.dtype)
        if fused:
            # Pallas takes long to import.
            from jaxfl.models.kernels.fused import convolve_pooled

            return convolve_pooled(x, kernel, bias, padding, self.parts)
        if self.form in PLAIN and not self.sum_grad_squared:
            return _channels_last(self, x, kernel, bias)
        return _batch_last(self, x, kernel, bias)


def _precision() -> Any:
    """Return JAX's precision of products in the caller's context."""
    # JAX traces the backward pass outside of the caller's precision context, so the rule gets the
    # precision from here.
    return jax.config.jax_default_matmul_precision  # pyrefly: ignore[missing-attribute]


def _channels_last(layer: Convolution, x: Array, kernel: Array, bias: Array) -> Array:
    """Return the maps of a layer by JAX's own convolutions, or by one for clients together."""
    if layer.form == "blocks" and layer.pool:
        y, _ = window_maximum(_blocks(x, kernel, layer.padding), (3,))
    else:
        plain = convolve_plain if layer.form in ("lax", "blocks") else convolve_grouped
        options = PlainOptions(layer.padding, layer.stride, _precision())
        y = plain(x.transpose(3, 1, 2, 0), kernel, options)
        if layer.pool:
            y = max_pool_2x2(y)
    # Bias and ReLU commute with a maximum, so they come after the pool, on fewer numbers.
    y = y + bias[None, None, None]
    if layer.relu:
        y = nn.relu(y)
    return y.transpose(3, 1, 2, 0)


def _batch_last(layer: Convolution, x: Array, kernel: Array, bias: Array) -> Array:
    """Return the maps of a layer by `kernels.convolution`."""
    padding = layer.padding
    # `convolve` has no strides, and a convolution of blocks needs none. The blocks only move
    # weights, so their squared gradients are those of the weights.
    if layer.stride == 2:
        x, kernel = to_blocks(x, kernel, padding)
        padding = 0
    precision = _precision()
    exact = precision in (None, "float32", "highest")
    filtered = layer.form == "winograd" and x.dtype == jnp.float32 and exact
    # Filtering loses two digits already, so its products must not be rounded further.
    if filtered:
        precision = "highest"
    options = ConvolutionOptions(
        ((padding, padding), (padding, padding)),
        layer.relu,
        layer.pool,
        layer.pairs,
        layer.sum_grad_squared,
        filtered,
        precision,
    )
    return convolve(x, kernel, bias, options)


def _maps_shape(layer: Convolution, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape [features, H2, W2, B] of a layer's maps.

    Args:
        layer: The layer.
        inputs: Shape [channels, H, W, B] of its inputs, with pairs of columns as channels.
    """
    _, high, wide, batch = inputs
    if layer.pairs:
        wide = 2 * wide
    sides = []
    for side in (high, wide):
        # A kernel larger than the picture leaves no pixel, which the builders of `zoo` report.
        unpooled = max(0, (side + 2 * layer.padding - layer.size) // layer.stride + 1)
        sides.append(unpooled // 2 if layer.pool else unpooled)
    return (layer.features, *sides, batch)


def _blocks(x: Array, kernel: Array, padding: int) -> Float[Array, "B H2 W2 4 features"]:
    """Return the maps at each pooling window's four places, without bias, before pooling.

    One convolution of stride 2 computes all places. It has a kernel for each place, shifted by the
    place's row and column.
    """
    shifts = [((i, 1 - i), (j, 1 - j), (0, 0), (0, 0)) for i in range(2) for j in range(2)]
    kernels = jnp.concatenate([jnp.pad(kernel, shift) for shift in shifts], 3)
    x, kernels = to_blocks(x, kernels, padding)
    y = convolve_plain(x.transpose(3, 1, 2, 0), kernels)
    return y.reshape(*y.shape[:3], 4, -1)


class Dense(nn.Module):
    """A dense layer, y = x W + b, on row-major inputs [B, F].

    Inputs are row-major after convolutions too, because a product with a large transposed left
    factor can be nine times slower.

    Args:
        features: Number of outputs.
        sum_grad_squared: Whether gradients are sums of squared per-example gradients (see the
            module's docstring). A per-example gradient has rank one, so W gets (x^2)^T (dy^2).
        ghost_norms: Whether there is a further parameter `probe` [B]. Its gradient is each
            example's squared gradient norm, `(|x|^2 + 1) |dy|^2`. Other parameters get zeros.
    """

    features: int
    sum_grad_squared: bool = False
    ghost_norms: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B F"]) -> Float[Array, "B features"]:
        """Return the outputs of a batch."""
        kernel = self.param("kernel", _kernel_init, (x.shape[1], self.features))
        bias = self.param("bias", _bias_init(x.shape[1]), (self.features,))
        if self.ghost_norms:
            probe = self.param("probe", nn.initializers.zeros, (x.shape[0],))
            return _dense_norms(x, kernel, bias, probe)
        if self.sum_grad_squared:
            return _dense_squares(x, kernel, bias)
        return _dense(x, kernel, bias)


def _dense(x: Array, kernel: Array, bias: Array, *probe: Array) -> Array:
    # Axes are explicit everywhere, because in the tests JAX raises an error for promoted ranks.
    return x @ kernel + bias[None]


def _dense_forward(x: Array, kernel: Array, *others: Array) -> tuple[Array, tuple[Array, Array]]:
    return _dense(x, kernel, *others), (x, kernel)


def _norms_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array, Array, Array]:
    x, kernel = saved
    norms = ((x**2).sum(1) + 1) * (dy**2).sum(1)
    return dy @ kernel.T, jnp.zeros_like(kernel), jnp.zeros(dy.shape[1]), norms


_dense_squares = jax.custom_vjp(_dense)
_dense_norms = jax.custom_vjp(_dense)
_dense_squares.defvjp(
    _dense_forward, lambda saved, dy: (dy @ saved[1].T, (saved[0] ** 2).T @ dy**2, (dy**2).sum(0))
)
_dense_norms.defvjp(_dense_forward, _norms_backward)


class FirstAxisDense(nn.Module):
    """A dense layer over the first of three axes, for activations with features on that axis.

    Args:
        features: Number of outputs.
    """

    features: int
    # `jaxfl.models.lora` reads the axis of the inputs under the name that `nn.DenseGeneral` has.
    axis = 0

    @nn.compact
    def __call__(self, x: Float[Array, "F B L"]) -> Float[Array, "features B L"]:
        """Return the outputs of each position."""
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[0], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        # The product has two axes, because XLA copies arrays with more of them.
        outputs = kernel.T @ x.reshape(len(x), -1)
        return outputs.reshape(-1, *x.shape[1:]) + bias[:, None, None]


class GroupNorm(nn.Module):
    """A group normalisation, y = (x - mean) / sqrt(var + epsilon) * scale + bias.

    Moments are per example and group of channels.

    Args:
        groups: Number of groups of consecutive channels, a divisor of the number of channels.
        epsilon: Number that is added to the variance.
        relu: Whether to apply ReLU, after a shortcut is added.
        form: How the layer is computed (see the module's docstring).
        sum_grad_squared: Whether gradients are sums of squared per-example gradients (see the
            module's docstring).

    References:
        Wu and He, Group Normalization, ECCV 2018.
    """

    groups: int
    epsilon: float = 1e-5
    relu: bool = False
    form: Form = "winograd"
    sum_grad_squared: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "channels H W B"],
        shortcut: Float[Array, "channels H W B"] | None = None,
    ) -> Float[Array, "channels H W B"]:
        """Return normalised maps in the dtype of x, with a shortcut added before ReLU if given."""
        scale = self.param("scale", nn.initializers.ones, (len(x),))
        bias = self.param("bias", nn.initializers.zeros, (len(x),))
        # Parameters follow from shapes, and normalised maps have the shape of x.
        if self.is_initializing():
            return x
        options = NormOptions(self.groups, self.epsilon, self.relu, self.sum_grad_squared)
        plain = self.form in PLAIN and not self.sum_grad_squared
        apply = _plain_norm if plain else normalize
        # Moments lose too many digits below float32. A missing shortcut is None, which JAX skips.
        arrays = (x, shortcut, scale, bias)
        maps, shortcut, scale, bias = jax.tree.map(lambda array: array.astype(jnp.float32), arrays)
        return apply(maps, shortcut, scale, bias, options).astype(x.dtype)


def _plain_norm(
    x: Array, shortcut: Array | None, scale: Array, bias: Array, options: NormOptions
) -> Array:
    """Return maps as `normalize` does, by a slope and an offset for each channel and example.

    Both follow from two sums over the maps. Derivatives then have the same structure.
    """
    total = x.sum((1, 2))
    sums = _at_once(total, (x * x).sum((1, 2)))
    mean, square = group_means(jnp.stack(sums), x.shape, options)
    # Rounding may leave a small variance below 0.
    variance = jnp.maximum(square - mean**2, 0)
    slope = lax.rsqrt(variance + options.epsilon) * scale[:, None]
    offset = _to_sum(bias[:, None] - mean * slope)
    y = x * slope[:, None, None] + offset[:, None, None]
    if shortcut is not None:
        y = y + shortcut
    if not options.relu:
        return y
    # Both forms of ReLU have the same values, and differ in what their gradients read.
    if shortcut is None:
        return nn.relu(y)
    return _relu(y)


@jax.custom_jvp
def _at_once(*sums: Array) -> tuple[Array, ...]:
    """Return sums unchanged, and force XLA to compute all of them in one kernel.

    This kernel reads the maps only once.
    """
    return lax.optimization_barrier(sums)


@jax.custom_jvp
def _to_sum(offset: Array) -> Array:
    """Return an offset unchanged, with a gradient that is materialised.

    The gradient is a sum over maps, which XLA then reuses instead of summing the maps again.
    """
    return offset


_at_once.defjvp(lambda sums, changes: (_at_once(*sums), changes))
_to_sum.defjvp(lambda offset, change: (_to_sum(*offset), lax.optimization_barrier(change[0])))


@jax.custom_jvp
def _relu(x: Array) -> Array:
    return jnp.maximum(x, 0)


@_relu.defjvp
def _relu_jvp(x: tuple[Array], change: tuple[Array]) -> tuple[Array, Array]:
    """Mask the change by the output, which is in memory for the next layer, not by the input.

    Without the barrier, XLA would compute the output again from its inputs.
    """
    y = lax.optimization_barrier(_relu(x[0]))
    return y, jnp.where(y > 0, change[0], 0)
