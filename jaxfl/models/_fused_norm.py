"""Group normalisation with a shortcut and ReLU in one GPU kernel each way.

Maps have the layout of cuDNN's grouped convolutions, [B, H W, channels of all clients]. A forward
program (128 threads) handles one example and one group of one client's channels. It passes over the
pixels three times, some at a time: twice for the moments, and once to write the result. Only the
first pass reads from memory, and the others read from the cache.

A backward program handles one group of one client's channels. It takes the examples one after the
other, and adds up the gradients of the scale and the bias.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl

from jaxfl.backend import on_gpu
from jaxfl.models._fused import by_lane, launch, zeros_like
from jaxfl.models._group_norm import NormOptions

_TILE = 64, 8
"""Pixels and channels of the smallest array in registers. Larger arrays have multiples of both."""

_NUMBERS = 2048
"""Numbers of each array that a program reads at a time, 16 for each thread."""


class _NormLayer(NamedTuple):
    """Sizes of one client's maps, and the options of their normalisation."""

    batch: int
    pixels: int
    channels: int
    shortcut: bool
    """Whether a shortcut is added."""
    options: NormOptions

    @property
    def maps(self) -> tuple[int, int, int]:
        """Shape of one client's maps in memory."""
        return self.batch, self.pixels, self.channels

    @property
    def size(self) -> int:
        """Number of channels in a group."""
        return self.channels // self.options.groups

    @property
    def rows(self) -> int:
        """Number of pixels that a program reads at a time, a divisor of `pixels`."""
        pixels, _ = _TILE
        most = max(1, _NUMBERS // (pixels * self.size))
        return pixels * max(n for n in range(1, most + 1) if self.pixels % (n * pixels) == 0)

    @property
    def numbers(self) -> int:
        """Number of values of a group in one example."""
        return self.pixels * self.size


def is_fused(x: Array, options: NormOptions) -> bool:
    """Return whether the kernels take maps [channels, H, W, B], which must divide into tiles."""
    layer = _layer(x, None, options)
    pixels, channels = _TILE
    return layer.pixels % pixels == 0 and layer.size % channels == 0


def normalize_fused(
    x: Array, shortcut: Array | None, scale: Array, bias: Array, options: NormOptions
) -> Array:
    """Return normalised maps [channels, H, W, B], in reverse mode only.

    Args:
        x: maps [channels, H, W, B], for which `is_fused` is true.
        shortcut: maps of the same shape, which are added to the result. None adds nothing.
        scale: the factor of each channel.
        bias: the offset of each channel.
        options: the options of the normalisation.
    """
    layer = _layer(x, shortcut, options)
    channels_last = x.transpose(3, 1, 2, 0).shape
    maps = (
        array.transpose(3, 1, 2, 0).reshape(layer.maps)
        for array in (x, shortcut)
        if array is not None
    )
    y = _normalized(tuple(maps), scale, bias, layer)
    return y.reshape(channels_last).transpose(3, 1, 2, 0)


def _layer(x: Array, shortcut: Array | None, options: NormOptions) -> _NormLayer:
    channels, high, wide, batch = x.shape
    return _NormLayer(batch, high * wide, channels, shortcut is not None, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalized(maps: tuple[Array, ...], scale: Array, bias: Array, layer: _NormLayer) -> Array:
    """Return normalised maps [B, H W, channels] of such maps, to which a shortcut is added."""
    normalize = _of_clients(_normalize_group, layer, [layer.maps[:2]], layer.maps[:1])
    return normalize(*maps, scale, bias)[0]


def _normalized_forward(
    maps: tuple[Array, ...], scale: Array, bias: Array, layer: _NormLayer
) -> tuple[Array, tuple]:
    y = _normalized(maps, scale, bias, layer)
    return y, (maps[0], scale, y)


def _normalized_backward(
    layer: _NormLayer, saved: tuple, dy: Array
) -> tuple[tuple[Array, ...], Array, Array]:
    x, scale, y = saved
    shapes = [layer.maps[:2]] * (1 + layer.shortcut)
    # Both vectors' gradients are in one array, so that XLA adds them to the parameters in one
    # kernel.
    differentiate = _of_clients(_differentiate_group, layer, [*shapes, (2,)])
    *changes, vectors = differentiate(x, y, dy, scale)
    return tuple(changes), vectors[0], vectors[1]


_normalized.defvjp(_normalized_forward, _normalized_backward)


def _of_clients(
    kernel: Callable[..., None],
    layer: _NormLayer,
    leading: list[tuple[int, ...]],
    grid: tuple[int, ...] = (),
) -> Callable[..., tuple[Array, ...]]:
    """Return a kernel as a function of one client's arrays, whose last axis has the channels.

    Vectorised clients have their channels next to each other on this axis.

    Args:
        kernel: a function of the layer, a place in the grid, the arrays and the results.
        layer: the sizes of one client.
        leading: the shape of each result without its last axis.
        grid: the axes of the grid before the last one, which has the groups of all clients. The
            default adds none.
    """

    def of(clients: int, *arrays: Array) -> tuple[Array, ...]:
        out = [
            jax.ShapeDtypeStruct((*shape, clients * layer.channels), jnp.float32)
            for shape in leading
        ]
        programs = (*grid, clients * layer.options.groups)
        return tuple(launch(functools.partial(kernel, layer), programs, out)(*arrays))

    @custom_vmap
    def alone(*arrays: Array) -> tuple[Array, ...]:
        return of(1, *arrays)

    @alone.def_vmap
    def _(
        size: int, batched: list[bool], *arrays: Array
    ) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        lanes = by_lane(size, batched, arrays)
        together = (jnp.moveaxis(a, 0, -2).reshape(*a.shape[1:-1], -1) for a in lanes)
        results = of(size, *together)
        split = (a.reshape(*a.shape[:-1], size, layer.channels) for a in results)
        return tuple(jnp.moveaxis(a, -2, 0) for a in split), (True,) * len(results)

    return alone


def _channels(layer: _NormLayer, group: Any) -> Any:
    """Return the slice of a group's channels."""
    return pl.ds(group * layer.size, layer.size)


def _place(layer: _NormLayer, example: Any, step: Any, group: Any) -> tuple[Any, ...]:
    """Return the index of an example, some of its pixels, and a group's channels in maps."""
    return example, pl.ds(step * layer.rows, layer.rows), _channels(layer, group)


def _load_part(array: Any, *place: Any, vector: bool = False) -> Array:
    """Load a part of an array into registers, in one layout for all arrays.

    The layout of a vector is that of the maps' channels, without their pixels.
    """
    if not on_gpu():
        return array[place]
    from jax.experimental.pallas import mosaic_gpu

    layout = mosaic_gpu.Layout.WGMMA
    layout = layout.reduce(0) if vector else layout
    # Newer versions of JAX have no argument `idx`.
    index = [None] if "idx" in inspect.signature(mosaic_gpu.load).parameters else []
    return mosaic_gpu.load(array.at[place], *index, layout=layout, optimized=False)


def _write(array: Any, place: tuple[Any, ...], value: Array) -> None:
    """Store a value from registers in a part of an array."""
    if on_gpu():
        from jax.experimental.pallas import mosaic_gpu

        # Newer versions of JAX store fewer than 32 neighbouring numbers only if not optimized.
        if hasattr(mosaic_gpu, "store"):
            mosaic_gpu.store(array.at[place], value, optimized=False)
            return
    array[place] = value


def _vector(layer: _NormLayer, array: Any, group: Any) -> Array:
    """Return a group's part of a vector, repeated for each pixel."""
    part = _load_part(array, _channels(layer, group), vector=True)
    return lax.broadcast_in_dim(part, (layer.rows, layer.size), (1,))


def _sum(tile: Array) -> Array:
    """Return the sum of all numbers."""
    # A kernel adds along one axis at a time.
    return jnp.sum(jnp.sum(tile, 1), 0)


def _over(layer: _NormLayer, add: Callable[[Any, Any], Any], start: Any) -> Any:
    """Return the carry of a loop over all pixels, some at a time."""
    return lax.fori_loop(0, layer.pixels // layer.rows, add, start)


def _moments(
    layer: _NormLayer, x: Any, example: Any, group: Any, zeros: Array
) -> tuple[Array, Array]:
    """Return the mean and 1 / sqrt(var + epsilon) of an example's group."""

    def read(step: Any) -> Array:
        return _load_part(x, *_place(layer, example, step, group))

    mean = _sum(_over(layer, lambda step, sums: sums + read(step), zeros)) / layer.numbers

    def add(step: Any, sums: Array) -> Array:
        centred = read(step) - mean
        return sums + centred * centred

    variance = _sum(_over(layer, add, zeros)) / layer.numbers
    return mean, lax.rsqrt(variance + layer.options.epsilon)


def _normalize_group(layer: _NormLayer, at: list[Any], x: Any, *others: Any) -> None:
    *shortcut, scale, bias, y = others
    example, group = at
    slope = _vector(layer, scale, group)
    offset = _vector(layer, bias, group)
    mean, gain = _moments(layer, x, example, group, zeros_like(slope))

    def write(step: Any, carry: None) -> None:
        place = _place(layer, example, step, group)
        maps = (_load_part(x, *place) - mean) * gain * slope + offset
        for other in shortcut:
            maps = maps + _load_part(other, *place)
        if layer.options.relu:
            # A maximum would hide NaN.
            maps = jnp.where(maps <= 0, 0.0, maps)
        _write(y, place, maps)

    _over(layer, write, None)


def _differentiate_group(
    layer: _NormLayer, at: list[Any], x: Any, y: Any, dy: Any, scale: Any, d_x: Any, *others: Any
) -> None:
    *d_shortcut, d_vectors = others
    (group,) = at
    slope = _vector(layer, scale, group)
    none = zeros_like(slope)

    def example(i: Any, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        mean, gain = _moments(layer, x, i, group, none)

        def read(step: Any) -> tuple[Any, Array, Array]:
            """Return the place, standardised maps, and the gradient before ReLU."""
            place = _place(layer, i, step, group)
            change = _load_part(dy, *place)
            if layer.options.relu:
                change = jnp.where(_load_part(y, *place) > 0, change, 0.0)
            return place, (_load_part(x, *place) - mean) * gain, change

        def add(step: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            _, z, change = read(step)
            return sums[0] + change * z, sums[1] + change

        of_scale, of_bias = _over(layer, add, (none, none))
        along = _sum(of_scale * slope) / layer.numbers
        level = _sum(of_bias * slope) / layer.numbers

        def write(step: Any, carry: None) -> None:
            place, z, change = read(step)
            for out in d_shortcut:
                _write(out, place, change)
            _write(d_x, place, gain * (change * slope - level - z * along))

        _over(layer, write, None)
        return totals[0] + of_scale, totals[1] + of_bias

    totals = lax.fori_loop(0, layer.batch, example, (none, none))
    for i, total in enumerate(totals):
        _write(d_vectors, (i, _channels(layer, group)), jnp.sum(total, 0))
