"""Group normalisation with a shortcut and ReLU in one GPU kernel each way: maps are read once and written once.

A program (Triton) holds the pixels of one example and one group of one client's channels in registers: maps lie as
cuDNN's grouped convolutions take them, [B, H W, channels of all clients]. Backwards it goes through a client's examples
one after the other, and adds up what the scale and the bias get.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxfl.backend import on_gpu
from jaxfl.models._group_norm import Options

_MOST = 8192
"""Numbers of each array that a program holds."""
_PER_WARP = 1024
"""32 of each array for a thread: backwards, four arrays are at work."""


class _Layer(NamedTuple):
    """Sizes of one client's maps, and what is done with them."""

    batch: int
    pixels: int
    channels: int
    shortcut: bool
    options: Options

    @property
    def maps(self) -> tuple[int, int, int]:
        """As a program reads them."""
        return self.batch, self.pixels, self.channels

    @property
    def size(self) -> int:
        """Channels of a group."""
        return self.channels // self.options.groups

    @property
    def block(self) -> tuple[int, int]:
        """Powers of two that hold a group's pixels and channels."""
        return pl.next_power_of_2(self.pixels), pl.next_power_of_2(self.size)


def is_fused(x: Array, options: Options) -> bool:
    """Whether a program holds a group of maps [channels, H, W, B]."""
    return math.prod(_layer(x, None, options).block) <= _MOST


def normalize_fused(x: Array, shortcut: Array | None, scale: Array, bias: Array, options: Options) -> Array:
    """As `jaxfl.models._group_norm.normalize`, in reverse mode only."""
    layer, last = _layer(x, shortcut, options), x.transpose(3, 1, 2, 0).shape
    maps = (array.transpose(3, 1, 2, 0).reshape(layer.maps) for array in (x, shortcut) if array is not None)
    return _normalized(tuple(maps), scale, bias, layer).reshape(last).transpose(3, 1, 2, 0)


def _layer(x: Array, shortcut: Array | None, options: Options) -> _Layer:
    channels, high, wide, batch = x.shape
    return _Layer(batch, high * wide, channels, shortcut is not None, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalized(maps: tuple[Array, ...], scale: Array, bias: Array, layer: _Layer) -> Array:
    """Maps [B, H W, channels] of such ones, and of a shortcut."""
    return _of_clients(_forward, layer, [layer.maps[:2]], layer.maps[:1])(*maps, scale, bias)[0]


def _forward_rule(maps: tuple[Array, ...], scale: Array, bias: Array, layer: _Layer) -> tuple[Array, tuple]:
    y = _normalized(maps, scale, bias, layer)
    return y, (maps[0], scale, y)


def _backward_rule(layer: _Layer, saved: tuple, dy: Array) -> tuple[tuple[Array, ...], Array, Array]:
    x, scale, y = saved
    changes = [layer.maps[:2]] * (1 + layer.shortcut)
    # Both vectors' gradients in one array: XLA then adds them to the parameters in one kernel.
    *changes, vectors = _of_clients(_backward, layer, [*changes, (2,)])(x, y, dy, scale)
    return tuple(changes), vectors[0], vectors[1]


_normalized.defvjp(_forward_rule, _backward_rule)


def _of_clients(
    kernel: Callable[..., None], layer: _Layer, leading: list[tuple[int, ...]], grid: tuple[int, ...] = ()
) -> Callable[..., tuple[Array, ...]]:
    """A kernel as a function of one client's arrays, whose last axis are channels: those of all clients side by side.

    Args:
        kernel: of the layer, arrays and results.
        layer: sizes.
        leading: each result's axes before the channels.
        grid: programs for each group.
    """

    def of(clients: int, *arrays: Array) -> tuple[Array, ...]:
        out = [jax.ShapeDtypeStruct((*shape, clients * layer.channels), jnp.float32) for shape in leading]
        params = triton.CompilerParams(num_warps=max(1, math.prod(layer.block) // _PER_WARP), num_stages=1)
        body, programs = functools.partial(kernel, layer), (*grid, clients * layer.options.groups)
        call = pl.pallas_call(body, out, grid=programs, compiler_params=params, interpret=not on_gpu())
        return tuple(call(*arrays))

    @custom_vmap
    def alone(*arrays: Array) -> tuple[Array, ...]:
        return of(1, *arrays)

    @alone.def_vmap
    def _(size: int, batched: list[bool], *arrays: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        whole = (a if b else jnp.broadcast_to(a, (size, *a.shape)) for a, b in zip(arrays, batched, strict=True))
        found = of(size, *(jnp.moveaxis(a, 0, -2).reshape(*a.shape[1:-1], -1) for a in whole))
        split = (a.reshape(*a.shape[:-1], size, layer.channels) for a in found)
        return tuple(jnp.moveaxis(a, -2, 0) for a in split), (True,) * len(found)

    return alone


def _part(layer: _Layer, group: Any) -> tuple[Any, Any]:
    """Where a group's numbers lie in an example's maps, and which of the block's are any."""
    pixels, channels = layer.block
    real = lax.broadcasted_iota(jnp.int32, layer.block, 0) < layer.pixels
    real &= lax.broadcasted_iota(jnp.int32, layer.block, 1) < layer.size
    return (pl.ds(0, pixels), pl.ds(group * layer.size, channels)), real


def _standardized(layer: _Layer, x: Array, real: Array) -> tuple[Array, Array]:
    """(x - mean) / sqrt(var + epsilon), and the factor."""
    count = layer.pixels * layer.size
    centred = jnp.where(real, x - jnp.sum(x) / count, 0.0)
    gain = lax.rsqrt(jnp.sum(centred * centred) / count + layer.options.epsilon)
    return centred * gain, gain


def _forward(layer: _Layer, x: Any, *others: Any) -> None:
    *shortcut, scale, bias, y = others
    example, group = pl.program_id(0), pl.program_id(1)
    place, real = _part(layer, group)

    def read(maps: Any) -> Array:
        return triton.load(maps.at[(example, *place)], mask=real, other=0.0)

    def vector(of: Any) -> Array:
        return triton.load(of.at[place[1]], mask=jnp.arange(layer.block[1]) < layer.size, other=0.0)

    maps = _standardized(layer, read(x), real)[0] * vector(scale)[None] + vector(bias)[None]
    for other in shortcut:
        maps += read(other)
    if layer.options.relu:
        maps = jnp.where(maps <= 0, 0.0, maps)  # a maximum would hide NaN
    triton.store(y.at[(example, *place)], maps, mask=real)


def _backward(layer: _Layer, x: Any, y: Any, dy: Any, scale: Any, d_x: Any, *others: Any) -> None:
    *d_shortcut, d_vectors = others
    group = pl.program_id(0)
    place, real = _part(layer, group)
    count, channels = layer.pixels * layer.size, jnp.arange(layer.block[1]) < layer.size
    slope = triton.load(scale.at[place[1]], mask=channels, other=0.0)

    def example(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        def read(maps: Any) -> Array:
            return triton.load(maps.at[(i, *place)], mask=real, other=0.0)

        z, gain = _standardized(layer, read(x), real)
        change = jnp.where(read(y) > 0, read(dy), 0.0) if layer.options.relu else read(dy)
        for out in d_shortcut:
            triton.store(out.at[(i, *place)], change, mask=real)
        of_bias, of_scale = jnp.sum(change, 0), jnp.sum(change * z, 0)
        mean, along = jnp.sum(of_bias * slope) / count, jnp.sum(of_scale * slope) / count
        triton.store(d_x.at[(i, *place)], gain * (change * slope[None] - mean - z * along), mask=real)
        return sums[0] + of_scale, sums[1] + of_bias

    none = jnp.zeros(layer.block[1], jnp.float32)
    totals = lax.fori_loop(0, layer.batch, example, (none, none))
    for i, total in enumerate(totals):
        triton.store(d_vectors.at[pl.ds(i, 1), place[1]], total[None], mask=channels[None])
