"""Layers on batch-minor activations (channels, H, W, batch), fast on CPUs inside loops.

With few channels every elementwise, pooling and slicing operation then runs over a batch of contiguous floats,
where channels-last would have only 6 to 32 of them. Flattening gives the order (channels, H, W), as in PyTorch.

A convolution has seven forms that load the same parameters:

- "winograd": matrix products by minimal filtering, with its own differentiation rule, reverse mode only. Below
  float32 precision it is the next form.
- "im2col": the same without the filtering, in one matrix product per pass.
- "lax": `lax.conv_general_dilated`, channels last, any mode of differentiation.
- "grouped": for GPUs: the same, but the gradients of vectorised clients are those of one grouped convolution
  (`_plain`), reverse mode only.
- "packed": for GPUs: as "grouped", but up to 8 clients share a group of the convolution, which has their kernels on its
  diagonal: 8 times the operations, in matrix products that fill the tensor cores.
- "blocks": for TPUs: as "lax", but a layer with pooling takes blocks of 2x2 pixels as one, and has the four places of a
  pooling window as channels. ((k + 1) / k)^2 times the operations, and a quarter of the positions, four times as full.
- "pallas": for GPUs: float32 layers with ReLU and pooling are one kernel each way (`_fused`), others are as
  "grouped". Reverse mode only; interpreted, and slow, on other devices. The first one may take bytes as they are.

A group normalisation has three: batch-minor for "winograd" and "im2col", one kernel each way for "pallas" (groups of 8
channels or a multiple, and 64 pixels, `_fused_norm`), both in reverse mode only, and JAX's own for the others.

A layer with `sum_grad_squared=True` has the same values, but its backward pass gives each parameter the sum over
examples of the *squared* per-example gradient, sum_n (d loss_n / d w)^2, for a loss sum_n loss_n in which each example
affects its own term only. Such a layer must be used once in a network.
"""

from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Shaped

from jaxfl.backend import Form
from jaxfl.models._convolution import Options, convolve
from jaxfl.models._group_norm import Options as NormOptions
from jaxfl.models._group_norm import group_means, normalize
from jaxfl.models._plain import (
    PACKED,
    convolve_grouped,
    convolve_plain,
    largest,
    max_pool,
    to_blocks,
)
from jaxfl.models._plain import Options as PlainOptions

PLAIN: tuple[Form, ...] = ("lax", "grouped", "packed", "blocks", "pallas")
"""Forms whose maps are computed as JAX would, where they are not fused."""

LARGEST_FUSED = 9
"""Side of a kernel of `_fused`, whose maps have margins for it."""

# PyTorch's default: uniform in +-1/sqrt(fan_in), kernels and biases alike.
_kernel_init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def _bias_init(fan_in: int) -> Callable[[Array, tuple[int, ...]], Array]:
    bound = fan_in**-0.5
    return lambda key, shape: jax.random.uniform(
        key, shape, jnp.float32, minval=-bound, maxval=bound
    )


def as_floats(inputs: Shaped[Array, "B ..."]) -> Float[Array, "B ..."]:
    """(x / 255 - 0.5) / 0.5 for bytes; floats are kept."""
    if inputs.dtype == jnp.uint8:
        return inputs.astype(jnp.float32) * (2 / 255) - 1
    if not jnp.issubdtype(inputs.dtype, jnp.floating):
        raise TypeError(
            f"inputs.dtype={inputs.dtype}: images are bytes or floating numbers, give those"
        )
    return inputs.astype(jnp.float32)


class Convolution(nn.Module):
    """Convolution, bias, ReLU and 2x2 max-pool (stride 2; the first maximum wins) in one layer.

    Args:
        features: output channels.
        size: side k of the kernel (k, k, channels, features).
        padding: zeros on each side.
        relu: whether to apply ReLU.
        pool: whether to pool; a last odd row or column is dropped.
        stride: 1, or 2 without pooling.
        bias: whether to add one.
        pairs: the input went through `_convolution.to_pairs` (fast form; an odd kernel, no further padding, pooling).
        parts: where this layer and those that follow are fused, what the next one takes (see `_fused.convolve_pooled`).
        form: one of `jaxfl.backend.Form`, see the module's docstring.
        sum_grad_squared: see the module's docstring.
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
        """Whether it is a kernel of ours."""
        pooled = self.relu and self.pool and self.stride == 1 and self.size <= LARGEST_FUSED
        return self.form == "pallas" and pooled and not self.sum_grad_squared

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Feature maps [features, H2, W2, B] of maps [channels, H, W, B]; between fused layers, `_fused.Maps`."""
        channels, padding = x.shape[0] // 2 if self.pairs else x.shape[0], self.padding
        shape = (self.size, self.size, channels, self.features)
        kernel = self.param("kernel", _kernel_init, shape)
        bias = jnp.zeros(self.features, kernel.dtype)
        if self.bias:
            bias = self.param("bias", _bias_init(self.size**2 * channels), (self.features,))
        if (
            self.is_initializing()
        ):  # parameters follow from shapes; tracing the maps would take most of the time
            sides = x.shape[1], x.shape[2] * (2 if self.pairs else 1)
            sides = [max(0, (side + 2 * padding - self.size) // self.stride + 1) for side in sides]
            return jnp.zeros(
                (self.features, *(side // (2 if self.pool else 1) for side in sides), x.shape[3])
            )
        fused = self.fused and kernel.dtype == jnp.float32
        if x.dtype == jnp.uint8 and (not fused or padding):
            x = as_floats(x).astype(kernel.dtype)
        # The backward pass is traced outside the caller's precision context: it takes the precision from here.
        precision = jax.config.jax_default_matmul_precision  # pyrefly: ignore[missing-attribute]
        if self.form in PLAIN and not self.sum_grad_squared:
            if fused:
                from jaxfl.models._fused import convolve_pooled  # Pallas takes long to import

                return convolve_pooled(x, kernel, bias, padding, self.parts)
            if self.form == "blocks" and self.pool:
                y = largest(_blocks(x, kernel, padding), (3,))[0]
            else:
                plain = convolve_plain if self.form in ("lax", "blocks") else convolve_grouped
                own = PlainOptions(
                    padding, self.stride, precision, PACKED if self.form == "packed" else 1
                )
                y = plain(x.transpose(3, 1, 2, 0), kernel, own)
                y = max_pool(y) if self.pool else y
            y = y + bias[None, None, None]
            return (nn.relu(y) if self.relu else y).transpose(3, 1, 2, 0)
        if self.stride == 2:
            x, kernel, padding = *to_blocks(x, kernel, padding), 0
        filtered = (
            self.form == "winograd"
            and x.dtype == jnp.float32
            and precision in (None, "float32", "highest")
        )
        precision = "highest" if filtered else precision
        sides = ((padding, padding), (padding, padding))
        options = Options(
            sides, self.relu, self.pool, self.pairs, self.sum_grad_squared, filtered, precision
        )
        return convolve(x, kernel, bias, options)


def _blocks(x: Array, kernel: Array, padding: int) -> Float[Array, "B H2 W2 4 features"]:
    """Maps by window and place in it: each place is a kernel shifted by a pixel, of one convolution with stride 2."""
    shifts = [((i, 1 - i), (j, 1 - j), (0, 0), (0, 0)) for i in range(2) for j in range(2)]
    kernels = jnp.concatenate([jnp.pad(kernel, shift) for shift in shifts], 3)
    x, kernels = to_blocks(x, kernels, padding)
    y = convolve_plain(x.transpose(3, 1, 2, 0), kernels)
    return y.reshape(*y.shape[:3], 4, -1)


class Dense(nn.Module):
    """y = x W + b.

    Row-major, after convolutions too: a product with a large transposed left factor can be nine times slower.

    Args:
        features: number of outputs.
        sum_grad_squared: see the module's docstring. A per-example gradient has rank one: (x^2)^T (dy^2).
        ghost_norms: takes a further parameter `probe` [B], whose gradient is each example's squared gradient norm,
            (|x|^2 + 1) |dy|^2; the other parameters then have none.
    """

    features: int
    sum_grad_squared: bool = False
    ghost_norms: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B F"]) -> Float[Array, "B features"]:
        """Outputs."""
        kernel = self.param("kernel", _kernel_init, (x.shape[1], self.features))
        bias = self.param("bias", _bias_init(x.shape[1]), (self.features,))
        if self.ghost_norms:
            return _dense_norms(
                x, kernel, bias, self.param("probe", nn.initializers.zeros, (x.shape[0],))
            )
        return (_dense_squares if self.sum_grad_squared else _dense)(x, kernel, bias)


def _dense(x: Array, kernel: Array, bias: Array, *probe: Array) -> Array:
    return x @ kernel + bias[None]


def _dense_forward(x: Array, kernel: Array, *others: Array) -> tuple[Array, tuple[Array, Array]]:
    return _dense(x, kernel, *others), (x, kernel)


def _norms_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array, Array, Array]:
    x, kernel = saved
    norms = ((x**2).sum(1) + 1) * (dy**2).sum(1)
    return dy @ kernel.T, jnp.zeros_like(kernel), jnp.zeros(dy.shape[1]), norms


_dense_squares, _dense_norms = jax.custom_vjp(_dense), jax.custom_vjp(_dense)
_dense_squares.defvjp(
    _dense_forward, lambda saved, dy: (dy @ saved[1].T, (saved[0] ** 2).T @ dy**2, (dy**2).sum(0))
)
_dense_norms.defvjp(_dense_forward, _norms_backward)


class FirstAxisDense(nn.Module):
    """A dense layer over the first axis of three, for feature-major activations.

    Args:
        features: number of outputs.
    """

    features: int
    axis = 0

    @nn.compact
    def __call__(self, x: Float[Array, "F B L"]) -> Float[Array, "features B L"]:
        """Outputs."""
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[0], self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        # Two axes: of more, XLA makes copies.
        return (kernel.T @ x.reshape(len(x), -1)).reshape(-1, *x.shape[1:]) + bias[:, None, None]


class GroupNorm(nn.Module):
    """y = (x - mean) / sqrt(var + epsilon) * scale + bias, with moments per example and group of channels.

    Args:
        groups: number of groups of consecutive channels; it divides their number.
        epsilon: added to the variance.
        relu: whether to apply ReLU, after a shortcut is added.
        form: see the module's docstring.
        sum_grad_squared: see the module's docstring.

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
        """Normalised maps, plus a shortcut."""
        scale = self.param("scale", nn.initializers.ones, (len(x),))
        bias = self.param("bias", nn.initializers.zeros, (len(x),))
        if self.is_initializing():
            return x
        options = NormOptions(self.groups, self.epsilon, self.relu, self.sum_grad_squared)
        apply = _plain_norm if self.form in PLAIN and not self.sum_grad_squared else normalize
        if self.form == "pallas" and apply is _plain_norm:
            from jaxfl.models._fused_norm import (
                is_fused,
                normalize_fused,
            )  # Pallas takes long to import

            apply = normalize_fused if is_fused(x, options) else apply
        # Moments lose too many digits below float32.
        arrays = (x, shortcut, scale, bias)
        maps, shortcut, scale, bias = jax.tree.map(lambda array: array.astype(jnp.float32), arrays)
        return apply(maps, shortcut, scale, bias, options).astype(x.dtype)


def _plain_norm(
    x: Array, shortcut: Array | None, scale: Array, bias: Array, options: NormOptions
) -> Array:
    """By two factors of each channel and example, from two sums: so are its derivatives."""
    sums = _at_once(x.sum((1, 2)), (x * x).sum((1, 2)))
    mean, square = group_means(jnp.stack(sums), x.shape, options)
    slope = lax.rsqrt(jnp.maximum(square - mean**2, 0) + options.epsilon) * scale[:, None]
    offset = _to_sum(bias[:, None] - mean * slope)
    y = x * slope[:, None, None] + offset[:, None, None]
    if shortcut is None:
        return nn.relu(y) if options.relu else y
    y = y + shortcut
    return _relu(y) if options.relu else y


@jax.custom_jvp
def _at_once(*sums: Array) -> tuple[Array, ...]:
    """The same, before any of them is used: XLA then takes them in one kernel, which reads the maps once."""
    return lax.optimization_barrier(sums)


@jax.custom_jvp
def _to_sum(offset: Array) -> Array:
    """The same; of its gradient, a sum over maps, XLA makes further sums, and does not sum maps again."""
    return offset


_at_once.defjvp(lambda sums, changes: (_at_once(*sums), changes))
_to_sum.defjvp(lambda offset, change: (_to_sum(*offset), lax.optimization_barrier(change[0])))


@jax.custom_jvp
def _relu(x: Array) -> Array:
    return jnp.maximum(x, 0)


@_relu.defjvp
def _relu_jvp(x: tuple[Array], change: tuple[Array]) -> tuple[Array, Array]:
    """By the sign of its value, which the next layer reads too: XLA would read again what that was made of."""
    y = lax.optimization_barrier(_relu(x[0]))
    return y, jnp.where(y > 0, change[0], 0)
