"""Convolution, bias, ReLU and 2x2 max-pool in one GPU kernel each way: maps before the pooling never reach memory.

Lanes are columns and examples, weights are scalars, so that a few channels cost no more than many: there is no matrix
product, no patch, and nothing is padded to a tile. One program (128 threads) computes one line of pooled maps for some
features. Its sums over the four places of all windows stay in registers, where the largest is taken.

Columns are kept apart by their remainder: those of all windows that a place or a tap falls on are then neighbours in
memory. By 2 for one layer, by 4 if the next one reads what it writes, and so on (`Maps`): of a layer's pooled columns
each of several parts is computed apart. `route` has the place of each window's largest number, 2 dy + dx, or 4 where
ReLU gives 0, of several features in the bits of one number.

The clients of a chunk are the first axis of the grid.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl

from jaxfl.backend import on_gpu
from jaxfl.models.layers import LARGEST_FUSED

_PLACES = ((0, 0), (0, 1), (1, 0), (1, 1))
_DEAD, _BITS, _PER_WORD = len(_PLACES), 3, 8
_THREADS, _REGISTERS = 128, 96
"""Of a program; of a thread, for its sums."""


class _Lines(NamedTuple):
    """How columns lie in a line: blocks of `stride` columns with one remainder each, and `margin` on both sides.

    Vectors begin at whole steps. Reading goes on beyond a block, for columns that do not count, as far as the margin.
    """

    margin: int
    stride: int

    def at(self, block: Any) -> Any:
        """Where a block begins."""
        return self.margin + block * self.stride

    def length(self, blocks: int) -> int:
        """Of a line."""
        return self.at(blocks) + self.margin


def _lines(wide: int, split: int, batch: int) -> _Lines:
    """Of maps with so many columns, kept apart by their remainder of `split`."""
    step = _THREADS // math.gcd(_THREADS, batch)
    return _Lines(
        step * math.ceil(LARGEST_FUSED // 2 / step),
        step * math.ceil(math.ceil(wide / split) / step),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Maps:
    """Maps [channels, H, W, B] as kernels read and write them: [lines, columns of all channels, batch].

    An even number of lines, a batch of whole vectors. Column j of channel c is column j // split of block
    `split * c + j % split`.
    """

    flat: Any
    shape: tuple[int, int, int, int] = dataclasses.field(metadata={"static": True})
    split: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, x: Array, split: int) -> "Maps":
        """Maps [channels, H, W, B], floating numbers or bytes."""
        channels, high, wide, batch = x.shape
        whole = 8 * math.ceil(batch / 8)
        lines = _lines(wide, split, whole)
        ends = [(0, 0), (0, high % 2), (0, split * lines.stride - wide), (0, whole - batch)]
        x = (
            jnp.pad(x, ends)
            .reshape(channels, high + high % 2, lines.stride, split, whole)
            .transpose(1, 0, 3, 2, 4)
        )
        x = x.reshape(len(x), channels * split * lines.stride, whole)
        return cls(
            jnp.pad(x, [(0, 0), (lines.margin, lines.margin), (0, 0)]),
            (channels, high, wide, batch),
            split,
        )

    @property
    def lines(self) -> _Lines:
        """How columns lie."""
        return _lines(self.shape[2], self.split, self.flat.shape[-1])

    @property
    def dtype(self) -> Any:
        """Of the numbers."""
        return self.flat.dtype

    def array(self) -> Array:
        """[channels, H, W, B]."""
        (channels, high, wide, batch), (margin, stride) = self.shape, self.lines
        x = self.flat[:, margin : margin + channels * self.split * stride]
        x = x.reshape(len(x), channels, self.split, stride, -1).transpose(1, 0, 3, 2, 4)
        return x.reshape(channels, x.shape[1], self.split * stride, -1)[:, :high, :wide, :batch]


def convolve_pooled(
    x: Array | Maps, kernel: Array, bias: Array, padding: int = 0, parts: int = 1
) -> Any:
    """Max over 2x2 of relu(x * kernel + bias); reverse mode only.

    Args:
        x: [channels, H, W, B], float32, or bytes b, which stand for 2 b / 255 - 1; or maps with columns kept apart by
            2 * parts. Bytes and maps have no padding.
        kernel: [k, k, channels, features].
        bias: [features].
        padding: zeros on each side.
        parts: 1; or what the next layer takes, as maps with columns kept apart by as many. Of maps it follows.

    Returns:
        [features, (H + 2 padding - k + 1) // 2, (W + 2 padding - k + 1) // 2, B].
    """
    if not isinstance(x, Maps):
        x = Maps.of(jnp.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)]), 2 * parts)
    layer = _Layer(x.shape, x.flat.shape[-1], x.split, *kernel.shape[1:4:2])
    maps = Maps(
        _pooled(x.flat, kernel, bias, layer),
        (layer.features, layer.high, layer.wide, x.shape[3]),
        layer.parts,
    )
    return maps if layer.parts > 1 else maps.array()


class _Layer(NamedTuple):
    """Sizes of a layer: its input [channels, H, W, B] with whole batches, and its kernel's."""

    shape: tuple[int, int, int, int]
    batch: int
    split: int
    size: int
    features: int

    @property
    def parts(self) -> int:
        """Remainders by which pooled columns are kept apart."""
        return self.split // 2

    @property
    def high(self) -> int:
        """Pooled lines."""
        return (self.shape[1] - self.size + 1) // 2

    @property
    def wide(self) -> int:
        """Pooled columns."""
        return (self.shape[2] - self.size + 1) // 2

    @property
    def taps(self) -> range:
        """Columns that a window of each part reads, from that of the first part on."""
        return range(self.split + self.size - 1)

    @property
    def reach(self) -> int:
        """Columns of a block that these go beyond its first one."""
        return self.taps[-1] // self.split

    @property
    def read(self) -> _Lines:
        """Of the input."""
        return _lines(self.shape[2], self.split, self.batch)

    @property
    def written(self) -> _Lines:
        """Of pooled maps and routes."""
        return _lines(self.wide, self.parts, self.batch)

    def result(self, blocks: int, kind: Any = jnp.float32) -> tuple[tuple[int, ...], Any]:
        """Shape of pooled maps, or routes, with so many blocks in a line."""
        return (self.high + self.high % 2, self.written.length(blocks), self.batch), kind


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _pooled(x: Array, kernel: Array, bias: Array, layer: _Layer) -> Array:
    return _call(_forward, layer)(x, kernel, bias)[0]


def _forward_rule(x: Any, kernel: Any, bias: Any, layer: _Layer) -> tuple[Array, tuple]:
    pooled, route = _call(_forward, layer)(x.value, kernel.value, bias.value)
    # The first layer's input is not differentiated: it needs no gradient.
    return pooled, (x.value, kernel.value if x.perturbed else None, route)


def _backward_rule(layer: _Layer, saved: tuple, dy: Array) -> tuple[Array | None, Array, Array]:
    x, kernel, route = saved
    kernels, biases = _call(_to_weights, layer)(route, dy, x)
    if kernel is None:
        return None, kernels, biases[0, 0]
    columns = math.ceil(layer.wide / layer.parts)
    lines, need = layer.written, max(layer.read.stride, columns + layer.reach)
    if layer.parts > 1 or lines.stride < need:
        # What the next layer wrote has no zeros around, and neighbouring blocks may be nearer than an input reaches.
        lines = _Lines(layer.read.margin, need)
        route, dy = (_further_apart(maps, layer.written, lines, columns) for maps in (route, dy))
    inputs = _call(functools.partial(_to_inputs, lines), layer)(route, dy, kernel)
    return inputs, kernels, biases[0, 0]


_pooled.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _further_apart(maps: Array, old: _Lines, new: _Lines, columns: int) -> Array:
    """The first columns of each block, with zeros all around."""
    blocks = maps[:, old.margin : -old.margin].reshape(len(maps), -1, old.stride, maps.shape[-1])[
        :, :, :columns
    ]
    blocks = jnp.pad(blocks, [(0, 0), (0, 0), (0, new.stride - columns), (0, 0)])
    return jnp.pad(
        blocks.reshape(len(maps), -1, maps.shape[-1]), [(0, 0), (new.margin, new.margin), (0, 0)]
    )


def _call(work: Callable[..., tuple], layer: _Layer) -> Callable[..., Any]:
    """A kernel as a function of one client's arrays; vectorised, clients are an axis of its grid."""

    @custom_vmap
    def of_clients(*arrays: Array) -> Any:
        body, grid, results = work(layer, *arrays)
        out = [jax.ShapeDtypeStruct((len(arrays[0]), *of), kind) for of, kind in results]
        return tuple(launch(body, (len(arrays[0]), *grid), out)(*arrays))

    @of_clients.def_vmap
    def _(size: int, batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
        found = of_clients(
            *(a.reshape(size * a.shape[1], *a.shape[2:]) for a in by_lane(size, batched, arrays))
        )
        return tuple(a.reshape(size, -1, *a.shape[1:]) for a in found), (True,) * len(found)

    def of_one(*arrays: Array) -> Any:
        found = [a[0] for a in of_clients(*(a[None] for a in arrays))]
        return found[0] if len(found) == 1 else tuple(found)

    return of_one


def by_lane(size: int, batched: Sequence[bool], arrays: Sequence[Array]) -> list[Array]:
    """Arrays of vectorised clients, with those that they share once for each."""
    return [
        a if b else jnp.broadcast_to(a, (size, *a.shape))
        for a, b in zip(arrays, batched, strict=True)
    ]


def launch(
    body: Callable[..., None], grid: tuple[int, ...], out: list[jax.ShapeDtypeStruct]
) -> Callable[..., Any]:
    """`body(place in the grid, *arrays, *results)` for all of the grid; arrays stay in the device's memory."""
    if not on_gpu():
        numbers = lambda: [pl.program_id(axis) for axis in range(len(grid))]  # noqa: E731
        return pl.pallas_call(lambda *refs: body(numbers(), *refs), out, grid=grid, interpret=True)
    from jax.experimental.pallas import mosaic_gpu

    names = tuple(f"axis{axis}" for axis in range(len(grid)))
    numbers = lambda: [lax.axis_index(name) for name in names]  # noqa: E731
    params = mosaic_gpu.CompilerParams(
        lowering_semantics=mosaic_gpu.LoweringSemantics.Lane
    )  # newer jax has another
    work = lambda *refs: body(numbers(), *refs)  # noqa: E731
    return mosaic_gpu.kernel(
        work, out_type=out, grid=grid, grid_names=names, compiler_params=params
    )


def _tile(features: int, sums: int, lanes: int) -> int:
    """The most features, a divisor of all, whose sums (each of `lanes` numbers) a program's registers hold."""
    most = min(_PER_WORD, max(1, _REGISTERS * _THREADS // (sums * lanes)))
    return max(size for size in range(1, features + 1) if features % size == 0 and size <= most)


def _in_word(layer: _Layer) -> int:
    """Features of a program, and of a route's numbers."""
    return _tile(layer.features, len(_PLACES) * layer.parts, layer.written.stride * layer.batch)


def zeros_like(read: Array) -> Array:
    """Zeros that lie in registers as what was read does: sums of a loop cannot begin as one number for all lanes."""
    return jnp.where(read == read, 0.0, 0.0)


def _seen(layer: _Layer, x: Any, client: Any, line: Any, channel: Any, tap: int) -> Array:
    """Of all windows the column that a tap reads."""
    start = layer.read.at(channel * layer.split + tap % layer.split) + tap // layer.split
    read = x[client, line, pl.ds(start, layer.written.stride), :]
    return read.astype(jnp.float32) * (2 / 255) - 1 if read.dtype == jnp.uint8 else read


def _place_of(word: Array, feature: Any) -> Array:
    """Places of a feature's windows, for a kernel."""
    return lax.shift_right_logical(word, jnp.full(word.shape, _BITS * feature, jnp.int32)) & (
        2**_BITS - 1
    )


def _forward(layer: _Layer, x: Array, kernel: Array, bias: Array) -> tuple:
    """Pooled maps and routes; a program for each line and some features."""
    channels, features, parts, written = layer.shape[0], layer.features, layer.parts, layer.written
    tile = _in_word(layer)

    def body(at: list[Any], x: Any, kernel: Any, bias: Any, pooled: Any, route: Any) -> None:
        client, line, word = at
        first = word * tile

        def channel(c: Any, sums: list[Array]) -> list[Array]:
            sums = sums.copy()
            for u in range(layer.size + 1):
                for v in layer.taps:
                    seen = _seen(layer, x, client, 2 * line + u, c, v)
                    for part in range(parts):
                        for place, (dy, dx) in enumerate(_PLACES):
                            a, b = u - dy, v - 2 * part - dx
                            if 0 <= a < layer.size and 0 <= b < layer.size:
                                for f in range(tile):
                                    i = (part * len(_PLACES) + place) * tile + f
                                    sums[i] = sums[i] + seen * kernel[client, a, b, c, first + f]
            return sums

        zero = zeros_like(_seen(layer, x, client, line, 0, 0))
        sums = lax.fori_loop(0, channels, channel, [zero] * (parts * len(_PLACES) * tile))
        for part in range(parts):
            routes = jnp.zeros(zero.shape, jnp.int32)
            for f in range(tile):
                start = part * len(_PLACES) * tile + f
                best, where = sums[start], jnp.zeros(zero.shape, jnp.int32)
                for place in range(1, len(_PLACES)):
                    other = sums[start + place * tile]
                    stays = (best >= other) | (best != best)  # the first one wins, and NaN over all
                    best = jnp.where(stays, best, other)
                    where = jnp.where(stays, where, jnp.full(zero.shape, place, jnp.int32))
                best = best + bias[client, first + f]
                columns = pl.ds(written.at((first + f) * parts + part), written.stride)
                pooled[client, line, columns, :] = jnp.where(best <= 0, zero, best)
                where = jnp.where(best > 0, where, jnp.full(zero.shape, _DEAD, jnp.int32))
                routes = routes | (where << _BITS * f)
            route[client, line, pl.ds(written.at(word * parts + part), written.stride), :] = routes
        # The next layer's last windows read beyond, and multiply by zero.
        end = pl.ds(written.at(features * parts), written.margin)
        pooled[client, line, end, :] = zeros_like(pooled[client, line, end, :])

    results = [layer.result(features * parts), layer.result(features // tile * parts, jnp.int32)]
    return body, (layer.high, features // tile), results


def _to_weights(layer: _Layer, route: Array, grad: Array, x: Array) -> tuple:
    """The kernel's gradient and the bias's, the latter once for each program of as many features.

    A program is for a line of the kernel, a channel and some features, over all lines of maps.
    """
    del route, grad, x
    size, channels, features, parts, written = (
        layer.size,
        layer.shape[0],
        layer.features,
        layer.parts,
        layer.written,
    )
    in_word, tile = _in_word(layer), _tile(features, size + 1, written.stride * layer.batch)

    def body(at: list[Any], route: Any, grad: Any, x: Any, kernel: Any, bias: Any) -> None:
        client, a, c, group = at
        first = group * tile
        zero = zeros_like(_seen(layer, x, client, 0, c, 0))

        def sent_from(i: Any, part: int, f: int) -> tuple[Array, Array]:
            """Places and gradients of a feature's windows."""
            word = route[
                client,
                i,
                pl.ds(written.at((first + f) // in_word * parts + part), written.stride),
                :,
            ]
            change = grad[
                client, i, pl.ds(written.at((first + f) * parts + part), written.stride), :
            ]
            return _place_of(word, (first + f) % in_word), change

        def line(i: Any, sums: list[Array]) -> list[Array]:
            sums = sums.copy()
            windows = [[sent_from(i, part, f) for f in range(tile)] for part in range(parts)]
            for own in windows:
                for f, (winner, change) in enumerate(own):
                    sums[size * tile + f] = sums[size * tile + f] + jnp.where(
                        winner == _DEAD, zero, change
                    )
            for dy in range(2):
                sent = [
                    [
                        [jnp.where(winner == 2 * dy + dx, change, zero) for winner, change in own]
                        for dx in range(2)
                    ]
                    for own in windows
                ]
                for v in layer.taps:
                    seen = _seen(layer, x, client, 2 * i + a + dy, c, v)
                    for part in range(parts):
                        for dx in range(2):
                            if 0 <= (b := v - 2 * part - dx) < size:
                                for f in range(tile):
                                    sums[b * tile + f] = (
                                        sums[b * tile + f] + seen * sent[part][dx][f]
                                    )
            return sums

        sums = lax.fori_loop(0, layer.high, line, [zero] * ((size + 1) * tile))
        for b in range(size):
            for f in range(tile):
                kernel[client, a, b, c, first + f] = jnp.sum(sums[b * tile + f])
        for f in range(tile):
            bias[client, a, c, first + f] = jnp.sum(sums[size * tile + f])

    kernels, biases = (size, size, channels, features), (size, channels, features)
    return body, (size, channels, features // tile), [(kernels, jnp.float32), (biases, jnp.float32)]


def _to_inputs(given: _Lines, layer: _Layer, route: Array, grad: Array, kernel: Array) -> tuple:
    """The gradient of `x`; a program for a pair of lines and some channels.

    `given`: how columns of `route` and `grad` lie.
    """
    del route, grad, kernel
    (channels, high, *_), size, split, parts, read = (
        layer.shape,
        layer.size,
        layer.split,
        layer.parts,
        layer.read,
    )
    in_word = _in_word(layer)
    tile = _tile(channels, 2 * split, read.stride * layer.batch)

    def body(at: list[Any], route: Any, grad: Any, kernel: Any, x: Any) -> None:
        client, pair, group = at
        first = group * tile
        zero = zeros_like(grad[client, 0, pl.ds(0, read.stride), :])

        def feature(f: Any, sums: list[Array]) -> list[Array]:
            sums = sums.copy()
            for up in range(size // 2 + 1):
                line = jnp.clip(pair - up, 0, layer.high - 1)
                beyond = line != pair - up
                for left in range(layer.reach + 1):
                    for part in range(parts):
                        word = pl.ds(given.at(f // in_word * parts + part) - left, read.stride)
                        winner = _place_of(route[client, line, word, :], f % in_word)
                        change = grad[
                            client, line, pl.ds(given.at(f * parts + part) - left, read.stride), :
                        ]
                        for place, (dy, dx) in enumerate(_PLACES):
                            sent = jnp.where(winner == jnp.where(beyond, -1, place), change, zero)
                            for q in range(2):
                                for r in range(split):
                                    a, b = 2 * up + q - dy, split * left + r - 2 * part - dx
                                    if 0 <= a < size and 0 <= b < size:
                                        for c in range(tile):
                                            i = (q * split + r) * tile + c
                                            sums[i] = (
                                                sums[i] + sent * kernel[client, a, b, first + c, f]
                                            )
            return sums

        sums = lax.fori_loop(0, layer.features, feature, [zero] * (2 * split * tile))
        for q in range(2):
            for r in range(split):
                for c in range(tile):
                    columns = pl.ds(read.at((first + c) * split + r), read.stride)
                    x[client, 2 * pair + q, columns, :] = sums[(q * split + r) * tile + c]

    pairs = (high + 1) // 2
    flat = 2 * pairs, read.length(channels * split), layer.batch
    return body, (pairs, channels // tile), [(flat, jnp.float32)]
