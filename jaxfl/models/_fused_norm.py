"""Group normalisation with a shortcut and ReLU in one GPU kernel each way.

Maps lie as cuDNN's grouped convolutions take them, [B, H W, channels of all clients]. A program (128 threads) goes over
the pixels of one example and one group of one client's channels some at a time: twice for the moments, then to write,
so that all but the first time they come from the cache. Backwards it goes through a client's examples one after the
other, and adds up what the scale and the bias get.
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
from jaxfl.models._group_norm import Options

_TILE = 64, 8
"""Pixels and channels that a program's threads hold as one array, or whole numbers of these."""
_NUMBERS = 2048
"""At a time: 16 of each array for a thread."""


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
    def rows(self) -> int:
        """Pixels at a time."""
        tiles = max(1, _NUMBERS // (_TILE[0] * self.size))
        return _TILE[0] * max(n for n in range(1, tiles + 1) if self.pixels % (n * _TILE[0]) == 0)

    @property
    def numbers(self) -> int:
        """Of a group, in an example."""
        return self.pixels * self.size


def is_fused(x: Array, options: Options) -> bool:
    """Whether maps [channels, H, W, B] consist of whole tiles."""
    layer = _layer(x, None, options)
    return layer.pixels % _TILE[0] == 0 and layer.size % _TILE[1] == 0


def normalize_fused(
    x: Array, shortcut: Array | None, scale: Array, bias: Array, options: Options
) -> Array:
    """As `jaxfl.models._group_norm.normalize`, in reverse mode only."""
    layer, last = _layer(x, shortcut, options), x.transpose(3, 1, 2, 0).shape
    maps = (
        array.transpose(3, 1, 2, 0).reshape(layer.maps)
        for array in (x, shortcut)
        if array is not None
    )
    return _normalized(tuple(maps), scale, bias, layer).reshape(last).transpose(3, 1, 2, 0)


def _layer(x: Array, shortcut: Array | None, options: Options) -> _Layer:
    channels, high, wide, batch = x.shape
    return _Layer(batch, high * wide, channels, shortcut is not None, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalized(maps: tuple[Array, ...], scale: Array, bias: Array, layer: _Layer) -> Array:
    """Maps [B, H W, channels] of such ones, and of a shortcut."""
    return _of_clients(_forward, layer, [layer.maps[:2]], layer.maps[:1])(*maps, scale, bias)[0]


def _forward_rule(
    maps: tuple[Array, ...], scale: Array, bias: Array, layer: _Layer
) -> tuple[Array, tuple]:
    y = _normalized(maps, scale, bias, layer)
    return y, (maps[0], scale, y)


def _backward_rule(
    layer: _Layer, saved: tuple, dy: Array
) -> tuple[tuple[Array, ...], Array, Array]:
    x, scale, y = saved
    changes = [layer.maps[:2]] * (1 + layer.shortcut)
    # Both vectors' gradients in one array: XLA then adds them to the parameters in one kernel.
    *changes, vectors = _of_clients(_backward, layer, [*changes, (2,)])(x, y, dy, scale)
    return tuple(changes), vectors[0], vectors[1]


_normalized.defvjp(_forward_rule, _backward_rule)


def _of_clients(
    kernel: Callable[..., None],
    layer: _Layer,
    leading: list[tuple[int, ...]],
    grid: tuple[int, ...] = (),
) -> Callable[..., tuple[Array, ...]]:
    """A kernel as a function of one client's arrays, whose last axis are channels: those of all clients side by side.

    Args:
        kernel: of the layer, a place in the grid, arrays and results.
        layer: sizes.
        leading: each result's axes before the channels.
        grid: programs for each group.
    """

    def of(clients: int, *arrays: Array) -> tuple[Array, ...]:
        out = [
            jax.ShapeDtypeStruct((*shape, clients * layer.channels), jnp.float32)
            for shape in leading
        ]
        programs = *grid, clients * layer.options.groups
        return tuple(launch(functools.partial(kernel, layer), programs, out)(*arrays))

    @custom_vmap
    def alone(*arrays: Array) -> tuple[Array, ...]:
        return of(1, *arrays)

    @alone.def_vmap
    def _(
        size: int, batched: list[bool], *arrays: Array
    ) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        together = (
            jnp.moveaxis(a, 0, -2).reshape(*a.shape[1:-1], -1)
            for a in by_lane(size, batched, arrays)
        )
        found = of(size, *together)
        split = (a.reshape(*a.shape[:-1], size, layer.channels) for a in found)
        return tuple(jnp.moveaxis(a, -2, 0) for a in split), (True,) * len(found)

    return alone


def _channels(layer: _Layer, group: Any) -> Any:
    """Where a group's lie."""
    return pl.ds(group * layer.size, layer.size)


def _place(layer: _Layer, example: Any, step: Any, group: Any) -> tuple[Any, ...]:
    """Where some pixels of a group lie in maps."""
    return example, pl.ds(step * layer.rows, layer.rows), _channels(layer, group)


def _read(array: Any, *place: Any, vector: bool = False) -> Array:
    """A part of an array in registers, as those of other arrays lie; a vector once for each pixel."""
    if not on_gpu():
        return array[place]
    from jax.experimental.pallas import mosaic_gpu

    layout = mosaic_gpu.Layout.WGMMA
    index = (
        [None] if "idx" in inspect.signature(mosaic_gpu.load).parameters else []
    )  # newer jax has none
    return mosaic_gpu.load(
        array.at[place], *index, layout=layout.reduce(0) if vector else layout, optimized=False
    )


def _write(array: Any, place: tuple[Any, ...], value: Array) -> None:
    """Its counterpart."""
    if on_gpu():
        from jax.experimental.pallas import mosaic_gpu

        if hasattr(
            mosaic_gpu, "store"
        ):  # newer jax asks whether fewer than 32 numbers may lie side by side
            mosaic_gpu.store(array.at[place], value, optimized=False)
            return
    array[place] = value


def _vector(layer: _Layer, array: Any, group: Any) -> Array:
    """A group's numbers of a vector, for each pixel."""
    part = _read(array, _channels(layer, group), vector=True)
    return lax.broadcast_in_dim(part, (layer.rows, layer.size), (1,))


def _sum(tile: Array) -> Array:
    """Of all: a kernel adds along one axis at a time."""
    return jnp.sum(jnp.sum(tile, 1), 0)


def _over(layer: _Layer, add: Callable[[Any, Any], Any], start: Any) -> Any:
    """What is carried over all pixels."""
    return lax.fori_loop(0, layer.pixels // layer.rows, add, start)


def _moments(layer: _Layer, x: Any, example: Any, group: Any, zeros: Array) -> tuple[Array, Array]:
    """Mean, and 1 / sqrt(var + epsilon), of an example's group."""

    def read(step: Any) -> Array:
        return _read(x, *_place(layer, example, step, group))

    mean = _sum(_over(layer, lambda step, sums: sums + read(step), zeros)) / layer.numbers

    def add(step: Any, sums: Array) -> Array:
        centred = read(step) - mean
        return sums + centred * centred

    return mean, lax.rsqrt(_sum(_over(layer, add, zeros)) / layer.numbers + layer.options.epsilon)


def _forward(layer: _Layer, at: list[Any], x: Any, *others: Any) -> None:
    *shortcut, scale, bias, y = others
    example, group = at
    slope, offset = (_vector(layer, of, group) for of in (scale, bias))
    mean, gain = _moments(layer, x, example, group, zeros_like(slope))

    def write(step: Any, carry: None) -> None:
        place = _place(layer, example, step, group)
        maps = (_read(x, *place) - mean) * gain * slope + offset
        for other in shortcut:
            maps = maps + _read(other, *place)
        maps = (
            jnp.where(maps <= 0, 0.0, maps) if layer.options.relu else maps
        )  # a maximum would hide NaN
        _write(y, place, maps)

    _over(layer, write, None)


def _backward(
    layer: _Layer, at: list[Any], x: Any, y: Any, dy: Any, scale: Any, d_x: Any, *others: Any
) -> None:
    *d_shortcut, d_vectors = others
    (group,) = at
    slope = _vector(layer, scale, group)
    none = zeros_like(slope)

    def example(i: Any, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        mean, gain = _moments(layer, x, i, group, none)

        def read(step: Any) -> tuple[Any, Array, Array]:
            """Place, standardised maps, and the gradient before ReLU."""
            place = _place(layer, i, step, group)
            change = _read(dy, *place)
            change = jnp.where(_read(y, *place) > 0, change, 0.0) if layer.options.relu else change
            return place, (_read(x, *place) - mean) * gain, change

        def add(step: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            _, z, change = read(step)
            return sums[0] + change * z, sums[1] + change

        of_scale, of_bias = _over(layer, add, (none, none))
        along, level = (_sum(of * slope) / layer.numbers for of in (of_scale, of_bias))

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
