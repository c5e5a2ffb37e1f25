"""Convolution, bias, ReLU and 2x2 max-pool in one GPU kernel forward, and at most two backward.

The maps before the pooling never reach memory. Lanes are columns and examples, and weights are
scalars, so that an operation on few channels costs no more than on many. There is no matrix
product, no patch, and no padding to tiles. One program (128 threads) of the forward kernel computes
one line of pooled maps for some features. Its sums for the four places of all windows stay in
registers, where the maximum is taken. Backward, one kernel makes the gradients of the weights and
of the bias. Another one makes the input's gradient, which a first layer does not need.

Columns are stored by their remainder. The columns that a place or a tap needs, for all windows, are
then neighbours in memory. The divisor is 2 for a single layer, 4 if the next layer reads the
result, and so on (`Maps`). A layer computes each residue class of its pooled columns (a part)
separately.

`route` has the place of each window's maximum: 2 dy + dx (0 to 3), or 4 where ReLU is inactive. It
packs the places of several features into the bits of one integer.

The clients of a chunk are the first axis of the grid.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl

from jaxfl._support.backend import on_gpu
from jaxfl.models.kernels import LARGEST_FUSED

_PLACES = ((0, 0), (0, 1), (1, 0), (1, 1))
"""Row dy and column dx of each place in a window."""

_DEAD = len(_PLACES)
"""Place in a route where ReLU is inactive, so that no place gets the gradient."""

_BITS = 3
"""Bits of a route's integer for the place of one feature."""

_PER_WORD = 8
"""Largest number of features whose places one integer of a route holds."""

_THREADS = 128
"""Number of threads of a program."""

_REGISTERS = 96
"""Number of registers of a thread that its sums may take."""


class _Lines(NamedTuple):
    """Layout of a line: blocks of columns, between two margins.

    A block has the `stride` columns of one channel and one remainder. Both sizes are multiples of
    the step in which kernels read. Kernels may read beyond a block, by at most the margin, for
    columns whose results are dropped.
    """

    margin: int
    """Number of columns in front of the first block, and behind the last one."""
    stride: int
    """Number of columns in a block."""

    def at(self, block: Any) -> Any:
        """Return the column at which a block begins."""
        return self.margin + block * self.stride

    def columns(self, block: Any) -> Any:
        """Return a slice of the columns of a block."""
        return pl.ds(self.at(block), self.stride)

    def length(self, blocks: int) -> int:
        """Return the number of columns of a line with this number of blocks and both margins."""
        return self.at(blocks) + self.margin


def _lines(wide: int, split: int, batch: int) -> _Lines:
    """Return the layout of lines of maps.

    Args:
        wide: Number of columns of the maps.
        split: Number of remainders by which the columns are stored.
        batch: Padded number of examples.
    """
    # Lanes are columns times examples. Those of a step are a multiple of a program's threads.
    step = _THREADS // math.gcd(_THREADS, batch)
    # A window reads at most half the largest kernel beyond a block (`_ConvolutionLayer.reach`).
    margin = step * math.ceil(LARGEST_FUSED // 2 / step)
    stride = step * math.ceil(math.ceil(wide / split) / step)
    return _Lines(margin, stride)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Maps:
    """Maps [channels, H, W, B] as kernels read and write them: [lines, columns of all channels, B].

    The number of lines is even, and the batch is a multiple of 8. Column j of channel c is column
    j // split of block `split * c + j % split`.
    """

    flat: Any
    """Array [lines, columns of all channels, B] of floats or bytes, with all padding."""
    shape: tuple[int, int, int, int] = dataclasses.field(metadata={"static": True})
    """Shape [channels, H, W, B] without paddings."""
    split: int = dataclasses.field(metadata={"static": True})
    """Number of remainders by which columns are stored."""

    @classmethod
    def of(cls, x: Array, split: int) -> "Maps":
        """Return maps of an array [channels, H, W, B] of floating numbers or bytes."""
        channels, high, wide, batch = x.shape
        padded_batch = 8 * math.ceil(batch / 8)
        lines = _lines(wide, split, padded_batch)
        ends = [(0, 0), (0, high % 2), (0, split * lines.stride - wide), (0, padded_batch - batch)]
        x = jnp.pad(x, ends)
        # Column j becomes (j // split, j % split), and then the remainder comes first.
        x = x.reshape(channels, high + high % 2, lines.stride, split, padded_batch)
        x = x.transpose(1, 0, 3, 2, 4)
        x = x.reshape(len(x), channels * split * lines.stride, padded_batch)
        flat = jnp.pad(x, [(0, 0), (lines.margin, lines.margin), (0, 0)])
        return cls(flat, (channels, high, wide, batch), split)

    @property
    def lines(self) -> _Lines:
        """Layout of the columns in a line of `flat`."""
        return _lines(self.shape[2], self.split, self.flat.shape[-1])

    @property
    def dtype(self) -> Any:
        """Type of the numbers in `flat`."""
        return self.flat.dtype

    def array(self) -> Array:
        """Return the maps as an array [channels, H, W, B]."""
        channels, high, wide, batch = self.shape
        margin, stride = self.lines
        x = self.flat[:, margin : margin + channels * self.split * stride]
        x = x.reshape(len(x), channels, self.split, stride, -1)
        x = x.transpose(1, 0, 3, 2, 4)
        x = x.reshape(channels, x.shape[1], self.split * stride, -1)
        return x[:, :high, :wide, :batch]


def convolve_pooled(
    x: Array | Maps, kernel: Array, bias: Array, padding: int = 0, parts: int = 1
) -> Any:
    """Return the maximum over 2x2 windows of relu(x * kernel + bias), where * is a convolution.

    Only reverse mode is supported.

    Args:
        x: Array [channels, H, W, B] of float32, or of bytes b, which mean 2 b / 255 - 1. Or
            `Maps` from the previous layer, whose columns are stored by 2 * parts remainders.
        kernel: Kernel [k, k, channels, features], with k of at most `LARGEST_FUSED`.
        bias: Bias [features].
        padding: Number of zeros on each side. It is 0 for bytes, and ignored for `Maps`.
        parts: Number of remainders by which the result's columns are stored, for the next
            layer. 1 returns an array. If x is `Maps`, it is half of their number of remainders.

    Returns:
        Pooled maps [features, (H + 2 padding - k + 1) // 2, (W + 2 padding - k + 1) // 2, B]. They
        are an array for one part, and `Maps` for more.
    """
    if not isinstance(x, Maps):
        padded = jnp.pad(x, [(0, 0), (padding, padding), (padding, padding), (0, 0)])
        x = Maps.of(padded, 2 * parts)
    size, features = kernel.shape[1:4:2]
    layer = _ConvolutionLayer(x.shape, x.flat.shape[-1], x.split, size, features)
    shape = (layer.features, layer.high, layer.wide, x.shape[3])
    maps = Maps(_pooled(x.flat, kernel, bias, layer), shape, layer.parts)
    if layer.parts > 1:
        return maps
    return maps.array()


class _ConvolutionLayer(NamedTuple):
    """Sizes of a layer, of its input and of its kernel."""

    shape: tuple[int, int, int, int]
    """Shape [channels, H, W, B] of the input, with its padding and without that of `Maps`."""
    batch: int
    """Padded number of examples, a multiple of 8."""
    split: int
    """Number of remainders by which columns of the input are stored."""
    size: int
    """Side k of the kernel."""
    features: int
    """Number of output channels."""

    @property
    def parts(self) -> int:
        """Number of remainders by which pooled columns are stored."""
        return self.split // 2

    @property
    def high(self) -> int:
        """Number of pooled lines."""
        return (self.shape[1] - self.size + 1) // 2

    @property
    def wide(self) -> int:
        """Number of pooled columns."""
        return (self.shape[2] - self.size + 1) // 2

    @property
    def taps(self) -> range:
        """Columns that one window of each part reads, counted from the first part's window."""
        return range(self.split + self.size - 1)

    @property
    def reach(self) -> int:
        """Number of columns that `taps` extend beyond the first one of a block."""
        return self.taps[-1] // self.split

    @property
    def read(self) -> _Lines:
        """Layout of the input's lines."""
        return _lines(self.shape[2], self.split, self.batch)

    @property
    def written(self) -> _Lines:
        """Layout of the lines of pooled maps and routes."""
        return _lines(self.wide, self.parts, self.batch)

    def result(self, blocks: int, kind: Any = jnp.float32) -> tuple[tuple[int, ...], Any]:
        """Return shape and type of pooled maps or routes with this number of blocks in a line."""
        lines = self.high + self.high % 2
        return (lines, self.written.length(blocks), self.batch), kind


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _pooled(x: Array, kernel: Array, bias: Array, layer: _ConvolutionLayer) -> Array:
    return _call(_to_pooled, layer)(x, kernel, bias)[0]


def _pooled_forward(
    x: Any, kernel: Any, bias: Any, layer: _ConvolutionLayer
) -> tuple[Array, tuple]:
    pooled, route = _call(_to_pooled, layer)(x.value, kernel.value, bias.value)
    # The first layer's input needs no gradient, so the kernel is not stored for it.
    return pooled, (x.value, kernel.value if x.perturbed else None, route)


def _pooled_backward(
    layer: _ConvolutionLayer, saved: tuple, dy: Array
) -> tuple[Array | None, Array, Array]:
    x, kernel, route = saved
    # All copies of the bias's gradient are equal, so the first one serves.
    kernels, biases = _call(_to_weights, layer)(route, dy, x)
    if kernel is None:
        return None, kernels, biases[0, 0]
    columns = math.ceil(layer.wide / layer.parts)
    lines = layer.written
    needed = max(layer.read.stride, columns + layer.reach)
    # Gradients that the next layer wrote have no zeros around their blocks. Neighbouring blocks may
    # also be nearer to each other than the windows of an input's column reach.
    if layer.parts > 1 or lines.stride < needed:
        lines = _Lines(layer.read.margin, needed)
        route = _further_apart(route, layer.written, lines, columns)
        dy = _further_apart(dy, layer.written, lines, columns)
    inputs = _call(functools.partial(_to_inputs, lines), layer)(route, dy, kernel)
    return inputs, kernels, biases[0, 0]


# With symbolic zeros, the forward rule learns whether x needs a gradient.
_pooled.defvjp(_pooled_forward, _pooled_backward, symbolic_zeros=True)


def _further_apart(maps: Array, old: _Lines, new: _Lines, columns: int) -> Array:
    """Return maps in a new layout, with zeros around each block.

    Args:
        maps: Pooled maps or routes in the old layout.
        old: The old layout.
        new: The new layout, with longer blocks.
        columns: Number of columns of each block that have values.
    """
    batch = maps.shape[-1]
    blocks = maps[:, old.margin : -old.margin]
    blocks = blocks.reshape(len(maps), -1, old.stride, batch)
    blocks = blocks[:, :, :columns]
    missing = new.stride - columns
    blocks = jnp.pad(blocks, [(0, 0), (0, 0), (0, missing), (0, 0)])
    lines = blocks.reshape(len(maps), -1, batch)
    return jnp.pad(lines, [(0, 0), (new.margin, new.margin), (0, 0)])


def _call(work: Callable[..., tuple], layer: _ConvolutionLayer) -> Callable[..., Any]:
    """Return a kernel as a function of one client's arrays.

    Vectorised clients are an axis of the kernel's grid.

    Args:
        work: Function of the layer and of arrays [clients, ...]. It returns the kernel's body,
            the grid of one client, and the shape and type of each result for one client.
        layer: The sizes.
    """

    @custom_vmap
    def of_clients(*arrays: Array) -> Any:
        body, grid, results = work(layer, *arrays)
        clients = len(arrays[0])
        out = [jax.ShapeDtypeStruct((clients, *shape), kind) for shape, kind in results]
        return tuple(launch(body, (clients, *grid), out)(*arrays))

    @of_clients.def_vmap
    def _(size: int, batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
        lanes = by_lane(size, batched, arrays)
        # The clients of this `vmap` join those that the arrays have already.
        results = of_clients(*(a.reshape(size * a.shape[1], *a.shape[2:]) for a in lanes))
        split = tuple(a.reshape(size, -1, *a.shape[1:]) for a in results)
        return split, (True,) * len(results)

    def of_one(*arrays: Array) -> Any:
        results = [a[0] for a in of_clients(*(a[None] for a in arrays))]
        if len(results) == 1:
            return results[0]
        return tuple(results)

    return of_one


def by_lane(size: int, batched: Sequence[bool], arrays: Sequence[Array]) -> list[Array]:
    """Return arrays that all have a first axis of vectorised clients.

    Args:
        size: Number of vectorised clients.
        batched: Whether each array has the axis already.
        arrays: The arrays. An array without the axis is shared, and is repeated along it.
    """
    return [
        a if b else jnp.broadcast_to(a, (size, *a.shape))
        for a, b in zip(arrays, batched, strict=True)
    ]


def launch(
    body: Callable[..., None], grid: tuple[int, ...], out: list[jax.ShapeDtypeStruct]
) -> Callable[..., Any]:
    """Return a function of arrays that runs a kernel's body at each place of a grid.

    Args:
        body: Function of the place in the grid, and of references to arrays and results in the
            device's memory. It writes the results.
        grid: Number of programs on each axis.
        out: Shape and type of each result.
    """
    if not on_gpu():

        def interpreted_place() -> list[Any]:
            return [pl.program_id(axis) for axis in range(len(grid))]

        work = lambda *refs: body(interpreted_place(), *refs)  # noqa: E731
        return pl.pallas_call(work, out, grid=grid, interpret=True)
    from jax.experimental.pallas import mosaic_gpu

    names = tuple(f"axis{axis}" for axis in range(len(grid)))

    def place() -> list[Any]:
        return [lax.axis_index(name) for name in names]

    # Newer versions of JAX have another default.
    params = mosaic_gpu.CompilerParams(lowering_semantics=mosaic_gpu.LoweringSemantics.Lane)
    work = lambda *refs: body(place(), *refs)  # noqa: E731
    return mosaic_gpu.kernel(
        work, out_type=out, grid=grid, grid_names=names, compiler_params=params
    )


def _tile(features: int, sums: int, lanes: int) -> int:
    """Return the largest divisor of `features`, up to `_PER_WORD`, whose sums fit the registers.

    If the sums of a single feature do not fit, the result is 1.

    Args:
        features: Number of all features.
        sums: Number of sums for each feature.
        lanes: Number of values in a sum.
    """
    most = min(_PER_WORD, max(1, _REGISTERS * _THREADS // (sums * lanes)))
    return max(size for size in range(1, features + 1) if features % size == 0 and size <= most)


def _in_word(layer: _ConvolutionLayer) -> int:
    """Return the number of features that one forward program computes.

    One integer of a route holds the places of the same features.
    """
    sums = len(_PLACES) * layer.parts
    return _tile(layer.features, sums, layer.written.stride * layer.batch)


def zeros_like(read: Array) -> Array:
    """Return zeros with the register layout of an array that was read.

    A loop's sums need this layout from the start, so they cannot begin as one scalar.
    """
    return jnp.where(read == read, 0.0, 0.0)


def _seen(
    layer: _ConvolutionLayer, x: Any, client: Any, line: Any, channel: Any, tap: int
) -> Array:
    """Return the input column that a tap reads, for all windows, with bytes as floats.

    Args:
        layer: The layer.
        x: Reference to the inputs of all clients.
        client: Index of the client.
        line: Line of the input.
        channel: Channel of the input.
        tap: One of `layer.taps`.
    """
    # The remainder of a tap's column chooses the block, and its quotient the place there.
    start = layer.read.at(channel * layer.split + tap % layer.split) + tap // layer.split
    read = x[client, line, pl.ds(start, layer.written.stride), :]
    if read.dtype == jnp.uint8:
        # The scale is that of `jaxfl.models.layers.as_floats`.
        return read.astype(jnp.float32) * (2 / 255) - 1
    return read


def _place_of(word: Array, feature: Any) -> Array:
    """Return the places of a feature's windows from a route's integers.

    Args:
        word: The integers, one for each window.
        feature: Position of the feature among those of the integer.
    """
    shift = jnp.full(word.shape, _BITS * feature, jnp.int32)
    return lax.shift_right_logical(word, shift) & (2**_BITS - 1)


def _weights_at(layer: _ConvolutionLayer, u: int, v: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield where one input of a window enters the convolution.

    Args:
        layer: The layer.
        u: The input's row, counted from the top of the window.
        v: The input's column, counted from the left of the first part's window.

    Yields:
        The part of the pooled columns, the place in the window of 2x2 outputs, and the row and the
        column of the kernel's weight that multiplies the input there.
    """
    for part in range(layer.parts):
        for place, (dy, dx) in enumerate(_PLACES):
            row = u - dy
            column = v - 2 * part - dx
            if 0 <= row < layer.size and 0 <= column < layer.size:
                yield part, place, row, column


def _to_pooled(layer: _ConvolutionLayer, x: Array, kernel: Array, bias: Array) -> tuple:
    """Return body, grid and results (see `_call`) of the kernel of pooled maps and routes.

    A program handles a line and some features.
    """
    features = layer.features
    parts = layer.parts
    written = layer.written
    tile = _in_word(layer)

    def body(at: list[Any], x: Any, kernel: Any, bias: Any, pooled: Any, route: Any) -> None:
        client, line, word = at
        first = word * tile
        # Only the layout of this read matters. Its values become zeros.
        zero = zeros_like(_seen(layer, x, client, line, 0, 0))
        sums = _convolved(layer, (client, line, first), x, kernel, zero)
        for part in range(parts):
            # The sums of a part come by place and feature.
            count = len(_PLACES) * tile
            of_part = sums[part * count : (part + 1) * count]
            routes = jnp.zeros(zero.shape, jnp.int32)
            for f in range(tile):
                best, where = _winning(of_part[f::tile])
                # The bias is the same for all places, so it is added to their maximum only.
                best = best + bias[client, first + f]
                columns = written.columns((first + f) * parts + part)
                # A maximum might hide NaN.
                pooled[client, line, columns, :] = jnp.where(best <= 0, zero, best)
                where = jnp.where(best > 0, where, jnp.full(zero.shape, _DEAD, jnp.int32))
                routes = routes | (where << _BITS * f)
            route[client, line, written.columns(word * parts + part), :] = routes
        # The last windows of the next layer read this margin and multiply it by zero, so it must be
        # finite.
        end = pl.ds(written.at(features * parts), written.margin)
        pooled[client, line, end, :] = zeros_like(pooled[client, line, end, :])

    results = [layer.result(features * parts), layer.result(features // tile * parts, jnp.int32)]
    return body, (layer.high, features // tile), results


def _convolved(
    layer: _ConvolutionLayer,
    at: tuple[Any, Any, Any],
    x: Any,
    kernel: Any,
    zero: Array,
) -> list[Array]:
    """Return the sums of a program of `_to_pooled`, by part, place and feature.

    Args:
        layer: The layer.
        at: Client, line and first feature of the program.
        x: Reference to the inputs of all clients.
        kernel: Reference to the kernels of all clients.
        zero: Zeros for a sum's start.
    """
    client, line, first = at
    tile = _in_word(layer)

    def channel(c: Any, sums: list[Array]) -> list[Array]:
        sums = sums.copy()
        # An input that was read is added to all sums of a window that it enters.
        for u in range(layer.size + 1):
            for v in layer.taps:
                seen = _seen(layer, x, client, 2 * line + u, c, v)
                for part, place, a, b in _weights_at(layer, u, v):
                    for f in range(tile):
                        i = (part * len(_PLACES) + place) * tile + f
                        weight = kernel[client, a, b, c, first + f]
                        sums[i] = sums[i] + seen * weight
        return sums

    start = [zero] * (layer.parts * len(_PLACES) * tile)
    return lax.fori_loop(0, layer.shape[0], channel, start)


def _winning(places: Sequence[Array]) -> tuple[Array, Array]:
    """Return the largest of the sums at a window's places, and its place."""
    best = places[0]
    where = jnp.zeros(best.shape, jnp.int32)
    for place, other in enumerate(places[1:], 1):
        # The first maximum wins, and NaN wins over all.
        stays = (best >= other) | (best != best)
        best = jnp.where(stays, best, other)
        where = jnp.where(stays, where, jnp.full(best.shape, place, jnp.int32))
    return best, where


def _to_weights(layer: _ConvolutionLayer, route: Array, grad: Array, x: Array) -> tuple:
    """Return body, grid and results (see `_call`) of the kernel of both parameters' gradients.

    A program handles a line of the convolution's kernel, a channel and some features, over all
    lines of maps. Each program also writes the gradient of its features' biases, so that there are
    equal copies for each line of the kernel and each channel.
    """
    # The sizes of the arrays follow from the layer.
    del route, grad, x
    size = layer.size
    channels = layer.shape[0]
    features = layer.features
    parts = layer.parts
    written = layer.written
    in_word = _in_word(layer)
    tile = _tile(features, size + 1, written.stride * layer.batch)

    def body(at: list[Any], route: Any, grad: Any, x: Any, kernel: Any, bias: Any) -> None:
        client, a, c, group = at
        first = group * tile
        zero = zeros_like(_seen(layer, x, client, 0, c, 0))

        def sent_from(i: Any, part: int, f: int) -> tuple[Array, Array]:
            """Return the winning places of a part of line i, and the gradients that they get."""
            words = written.columns((first + f) // in_word * parts + part)
            word = route[client, i, words, :]
            columns = written.columns((first + f) * parts + part)
            change = grad[client, i, columns, :]
            return _place_of(word, (first + f) % in_word), change

        def line(i: Any, sums: _Sums) -> _Sums:
            kernels, biases = sums
            windows = [[sent_from(i, part, f) for f in range(tile)] for part in range(parts)]
            biases = _bias_sums(biases, windows, zero)

            def seen(dy: int, v: int) -> Array:
                return _seen(layer, x, client, 2 * i + a + dy, c, v)

            return _kernel_sums(layer, kernels, windows, seen, zero), biases

        start = [zero] * (size * tile), [zero] * tile
        kernels, biases = lax.fori_loop(0, layer.high, line, start)
        for b in range(size):
            for f in range(tile):
                kernel[client, a, b, c, first + f] = jnp.sum(kernels[b * tile + f])
        for f in range(tile):
            bias[client, a, c, first + f] = jnp.sum(biases[f])

    kernels = ((size, size, channels, features), jnp.float32)
    biases = ((size, channels, features), jnp.float32)
    return body, (size, channels, features // tile), [kernels, biases]


_Sums: TypeAlias = tuple[list[Array], list[Array]]
"""Sums of gradients of a kernel line, by column and feature, and of biases, by feature."""

_Windows: TypeAlias = list[list[tuple[Array, Array]]]
"""Winning places of windows, and the gradients that they get, by part and feature."""


def _bias_sums(sums: list[Array], windows: _Windows, zero: Array) -> list[Array]:
    """Return the sums of the biases' gradients by feature, with those of further windows."""
    sums = sums.copy()
    for own in windows:
        for f, (winner, change) in enumerate(own):
            # Where ReLU is inactive, the bias gets no gradient.
            alive = jnp.where(winner == _DEAD, zero, change)
            sums[f] = sums[f] + alive
    return sums


def _kernel_sums(
    layer: _ConvolutionLayer,
    sums: list[Array],
    windows: _Windows,
    seen: Callable[[int, int], Array],
    zero: Array,
) -> list[Array]:
    """Return the sums of a kernel line's gradients, with those of further windows.

    Args:
        layer: The layer.
        sums: Sums by the kernel's column and feature.
        windows: The windows.
        seen: Function of a place's row and of a tap that returns the inputs there.
        zero: Gradient of the places that do not win.
    """
    sums = sums.copy()
    tile = len(windows[0])
    for dy in range(2):
        # Gradients of the places in row dy, by part, column dx and feature.
        sent = [
            [
                [jnp.where(winner == 2 * dy + dx, change, zero) for winner, change in own]
                for dx in range(2)
            ]
            for own in windows
        ]
        for v in layer.taps:
            inputs = seen(dy, v)
            for part, dx in itertools.product(range(layer.parts), range(2)):
                b = v - 2 * part - dx
                if 0 <= b < layer.size:
                    for f in range(tile):
                        total = sums[b * tile + f]
                        sums[b * tile + f] = total + inputs * sent[part][dx][f]
    return sums


def _to_inputs(
    given: _Lines, layer: _ConvolutionLayer, route: Array, grad: Array, kernel: Array
) -> tuple:
    """Return body, grid and results (see `_call`) of the kernel of the input's gradient.

    A program handles a pair of lines and some channels. `given` is the layout of the lines of
    `route` and `grad`.
    """
    del route, grad, kernel
    channels, high, *_ = layer.shape
    split = layer.split
    parts = layer.parts
    read = layer.read
    in_word = _in_word(layer)
    tile = _tile(channels, 2 * split, read.stride * layer.batch)

    def body(at: list[Any], route: Any, grad: Any, kernel: Any, x: Any) -> None:
        client, pair, group = at
        first = group * tile
        zero = zeros_like(grad[client, 0, pl.ds(0, read.stride), :])

        def feature(f: Any, sums: list[Array]) -> list[Array]:
            sums = sums.copy()
            # Lines 2 pair and 2 pair + 1 of the input enter the windows of the lines pair - up.
            for up in range(layer.size // 2 + 1):
                # A line beyond the maps is clipped, and no place of it sends a gradient.
                line = jnp.clip(pair - up, 0, layer.high - 1)
                beyond = line != pair - up
                for left, part in itertools.product(range(layer.reach + 1), range(parts)):
                    words = pl.ds(given.at(f // in_word * parts + part) - left, read.stride)
                    winner = _place_of(route[client, line, words, :], f % in_word)
                    columns = pl.ds(given.at(f * parts + part) - left, read.stride)
                    change = grad[client, line, columns, :]
                    for place, (dy, dx) in enumerate(_PLACES):
                        sent = jnp.where(winner == jnp.where(beyond, -1, place), change, zero)
                        row = 2 * up - dy
                        column = split * left - 2 * part - dx
                        for q, r, a, b in _gathered_inputs(layer, row, column):
                            for c in range(tile):
                                i = (q * split + r) * tile + c
                                weight = kernel[client, a, b, first + c, f]
                                sums[i] = sums[i] + sent * weight
            return sums

        sums = lax.fori_loop(0, layer.features, feature, [zero] * (2 * split * tile))
        places = itertools.product(range(2), range(split), range(tile))
        for total, (q, r, c) in zip(sums, places, strict=True):
            columns = read.columns((first + c) * split + r)
            x[client, 2 * pair + q, columns, :] = total

    pairs = (high + 1) // 2
    flat = (2 * pairs, read.length(channels * split), layer.batch)
    return body, (pairs, channels // tile), [(flat, jnp.float32)]


def _gathered_inputs(
    layer: _ConvolutionLayer, row: int, column: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield which of a pair of lines and of the remainders of columns a place's gradient reaches.

    Args:
        layer: The layer.
        row: The kernel's row of the weight for the first line, within the kernel or beyond.
        column: The kernel's column of the weight for the first remainder, within it or beyond.

    Yields:
        The line of the pair, the remainder, and the row and the column of the kernel's weight.
    """
    for q in range(2):
        for r in range(layer.split):
            # Each further line or remainder is one weight further.
            a = row + q
            b = column + r
            if 0 <= a < layer.size and 0 <= b < layer.size:
                yield q, r, a, b
