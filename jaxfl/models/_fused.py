"""Convolution, bias, ReLU and 2x2 max-pool in one GPU kernel each way: maps before the pooling never reach memory.

Lanes are columns and examples, weights are scalars, so that a few channels cost no more than many: there is no matrix
product, no patch, and nothing is padded to a tile. One program (128 threads) computes one line of pooled maps for some
features. Its sums over the four places of all windows stay in registers, where the largest is taken.

Columns are kept apart by parity, and lines two by two: the places (dy, dx) of neighbouring windows are then neighbours
in memory. `x` is [clients, line pairs, channels, 4 * wide, batch], with column j of line parity q and column parity s
at (2q + s) * wide + j. Pooled maps are [clients, lines, features, across, batch], and `route` has the place of each
window's largest number, 2 dy + dx, or 4 where ReLU gives 0, of several features in the bits of one number.

The clients of a chunk are the first axis of the grid.
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

from jaxfl.backend import on_gpu

_PLACES = ((0, 0), (0, 1), (1, 0), (1, 1))
_DEAD, _BITS, _PER_WORD = len(_PLACES), 3, 8
_THREADS, _REGISTERS = 128, 96
"""Of a program; of a thread, for its sums."""


class _Shape(NamedTuple):
    """Of a layer: kernel side, and lines and columns of its pooled maps, the latter padded to whole warps."""

    size: int
    lines: int
    across: int
    wide: int

    @property
    def reach(self) -> int:
        """How many line pairs beyond its own a window reaches into."""
        return self.size // 2


def _shape(x: tuple[int, ...], size: int, padding: int) -> tuple[_Shape, int]:
    """For inputs of this shape; and the batch, padded to whole vectors."""
    _, high, wide, batch = x
    batch = 8 * math.ceil(batch / 8)
    step = _THREADS // math.gcd(_THREADS, batch)
    lines, columns = ((side + 2 * padding - size + 1) // 2 for side in (high, wide))
    across = step * math.ceil(columns / step)
    return _Shape(size, lines, across, step * math.ceil((across + size // 2) / step)), batch


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def convolve_pooled(x: Array, kernel: Array, bias: Array, padding: int) -> Array:
    """Max over 2x2 of relu(x * kernel + bias); reverse mode only.

    Args:
        x: [channels, H, W, B], float32.
        kernel: [k, k, channels, features].
        bias: [features].
        padding: zeros on each side.

    Returns:
        [features, (H + 2 padding - k + 1) // 2, (W + 2 padding - k + 1) // 2, B].
    """
    return _forward_rule(x, kernel, bias, padding)[0]


def _forward_rule(x: Array, kernel: Array, bias: Array, padding: int) -> tuple[Array, tuple]:
    pairs, shape = _to_pairs(x, len(kernel), padding)
    pooled, route = _call(_forward, shape)(pairs, kernel, bias)
    columns = (x.shape[2] + 2 * padding - len(kernel) + 1) // 2
    return pooled.transpose(1, 0, 2, 3)[:, :, :columns, : x.shape[3]], (pairs, route, kernel, x)


def _backward_rule(padding: int, saved: tuple, dy: Array) -> tuple[Array, Array, Array]:
    pairs, route, kernel, x = saved
    shape, batch = _shape(x.shape, len(kernel), padding)

    def widened(maps: Array) -> Array:
        """With columns from -reach on, as far as windows of inputs reach."""
        return jnp.pad(maps, [(0, 0), (0, 0), (shape.reach, shape.wide - maps.shape[2]), (0, batch - maps.shape[3])])

    route, grad = widened(route), widened(dy.transpose(1, 0, 2, 3))
    inputs = _call(_to_inputs, shape)(route, grad, kernel)
    kernels, biases = _call(_to_weights, shape)(route, grad, pairs)
    return _from_pairs(inputs, x.shape, padding), kernels, biases[0, 0]


convolve_pooled.defvjp(_forward_rule, _backward_rule)


def _to_pairs(x: Array, size: int, padding: int) -> tuple[Array, _Shape]:
    """`x` [C, H, W, B] as [H/2, C, 4 wide, B], see the module."""
    channels, high, wide, batch = x.shape
    shape, whole = _shape(x.shape, size, padding)
    lines, columns = 2 * (shape.lines + shape.reach), 2 * shape.wide
    ends = [(0, 0), (padding, lines - high - padding), (padding, columns - wide - padding), (0, whole - batch)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(*end, 0) for end in ends])
    x = x.reshape(channels, lines // 2, 2, shape.wide, 2, whole).transpose(1, 0, 2, 4, 3, 5)
    return x.reshape(lines // 2, channels, 4 * shape.wide, whole), shape


def _from_pairs(pairs: Array, shape: tuple[int, ...], padding: int) -> Array:
    """What `_to_pairs` was given, from its result."""
    channels, high, wide, batch = shape
    lines, _, columns, whole = pairs.shape
    x = pairs.reshape(lines, channels, 2, 2, columns // 4, whole).transpose(1, 0, 2, 4, 3, 5)
    x = x.reshape(channels, 2 * lines, columns // 2, whole)
    short = [max(0, padding + need - have) for need, have in zip((high, wide), x.shape[1:3], strict=True)]
    x = jnp.pad(x, [(0, 0), (0, short[0]), (0, short[1]), (0, 0)])
    return x[:, padding : padding + high, padding : padding + wide, :batch]


def _call(work: Callable[..., tuple], shape: _Shape) -> Callable[..., Any]:
    """A kernel as a function of one client's arrays; vectorised, clients are an axis of its grid."""

    @custom_vmap
    def of_clients(*arrays: Array) -> Any:
        body, grid, results = work(shape, *arrays)
        out = [jax.ShapeDtypeStruct((len(arrays[0]), *of), kind) for of, kind in results]
        return tuple(_launch(body, (len(arrays[0]), *grid), out)(*arrays))

    @of_clients.def_vmap
    def _(size: int, batched: list[bool], *arrays: Array) -> tuple[Any, Any]:
        whole = [a if b else jnp.broadcast_to(a, (size, *a.shape)) for a, b in zip(arrays, batched, strict=True)]
        found = of_clients(*(a.reshape(size * a.shape[1], *a.shape[2:]) for a in whole))
        return tuple(a.reshape(size, -1, *a.shape[1:]) for a in found), (True,) * len(found)

    def of_one(*arrays: Array) -> Any:
        found = [a[0] for a in of_clients(*(a[None] for a in arrays))]
        return found[0] if len(found) == 1 else tuple(found)

    return of_one


def _launch(body: Callable[..., None], grid: tuple[int, ...], out: list[jax.ShapeDtypeStruct]) -> Callable[..., Any]:
    """`body(place in the grid, *arrays, *results)` for all of the grid; arrays stay in the device's memory."""
    if not on_gpu():
        numbers = lambda: [pl.program_id(axis) for axis in range(len(grid))]  # noqa: E731
        return pl.pallas_call(lambda *refs: body(numbers(), *refs), out, grid=grid, interpret=True)
    from jax.experimental.pallas import mosaic_gpu

    names = tuple(f"axis{axis}" for axis in range(len(grid)))
    numbers = lambda: [lax.axis_index(name) for name in names]  # noqa: E731
    params = mosaic_gpu.CompilerParams(lowering_semantics=mosaic_gpu.LoweringSemantics.Lane)  # newer jax has another
    work = lambda *refs: body(numbers(), *refs)  # noqa: E731
    return mosaic_gpu.kernel(work, out_type=out, grid=grid, grid_names=names, compiler_params=params)


def _tile(features: int, sums: int, lanes: int) -> int:
    """The most features, a divisor of all, whose sums (each of `lanes` numbers) a program's registers hold."""
    most = min(_PER_WORD, max(1, _REGISTERS * _THREADS // (sums * lanes)))
    return max(size for size in range(1, features + 1) if features % size == 0 and size <= most)


def _zeros(read: Array) -> Array:
    """Zeros that lie in registers as what was read does: sums of a loop cannot begin as one number for all lanes."""
    return jnp.where(read == read, 0.0, 0.0)


def _place_of(route: Any, client: Any, line: Any, feature: Any, columns: Any, tile: int) -> Array:
    """Places of a feature's windows, for a kernel."""
    word = route[client, line, feature // tile, columns, :]
    return lax.shift_right_logical(word, jnp.full(word.shape, _BITS * (feature % tile), jnp.int32)) & (2**_BITS - 1)


def _forward(shape: _Shape, x: Array, kernel: Array, bias: Array) -> tuple:
    """Pooled maps and routes; a program for each line and some features."""
    (*_, channels, features), batch = kernel.shape, x.shape[-1]
    tile = _tile(features, len(_PLACES), shape.across * batch)

    def body(at: list[Any], x: Any, kernel: Any, bias: Any, pooled: Any, route: Any) -> None:
        client, line, word = at
        first = word * tile

        def channel(c: Any, sums: list[Array]) -> list[Array]:
            sums = sums.copy()
            for u in range(shape.size + 1):
                for v in range(shape.size + 1):
                    start = (2 * (u % 2) + v % 2) * shape.wide + v // 2
                    seen = x[client, line + u // 2, c, pl.ds(start, shape.across), :]
                    for place, (dy, dx) in enumerate(_PLACES):
                        if 0 <= u - dy < shape.size and 0 <= v - dx < shape.size:
                            for f in range(tile):
                                weight = kernel[client, u - dy, v - dx, c, first + f]
                                sums[place * tile + f] = sums[place * tile + f] + seen * weight
            return sums

        zero = _zeros(x[client, line, 0, pl.ds(0, shape.across), :])
        sums = lax.fori_loop(0, channels, channel, [zero] * (len(_PLACES) * tile))
        routes = jnp.zeros(zero.shape, jnp.int32)
        for f in range(tile):
            best, where = sums[f], jnp.zeros(zero.shape, jnp.int32)
            for place in range(1, len(_PLACES)):
                other = sums[place * tile + f]
                stays = (best >= other) | (best != best)  # the first one wins, and NaN over all
                best = jnp.where(stays, best, other)
                where = jnp.where(stays, where, jnp.full(zero.shape, place, jnp.int32))
            best = best + bias[client, first + f]
            pooled[client, line, first + f] = jnp.where(best <= 0, zero, best)
            where = jnp.where(best > 0, where, jnp.full(zero.shape, _DEAD, jnp.int32))
            routes = routes | (where << _BITS * f)
        route[client, line, word] = routes

    pooled, routes = ((shape.lines, count, shape.across, batch) for count in (features, features // tile))
    return body, (shape.lines, features // tile), [(pooled, jnp.float32), (routes, jnp.int32)]


def _to_weights(shape: _Shape, route: Array, grad: Array, x: Array) -> tuple:
    """The kernel's gradient and the bias's, the latter once for each program of as many features.

    A program is for a line of the kernel, a channel and some features, over all lines of maps.
    """
    channels, batch, features = x.shape[2], x.shape[-1], grad.shape[2]
    tile, in_word = _tile(features, shape.size + 1, shape.across * batch), features // route.shape[2]

    def body(at: list[Any], route: Any, grad: Any, x: Any, kernel: Any, bias: Any) -> None:
        client, a, c, part = at
        first = part * tile
        zero, columns = _zeros(x[client, 0, c, pl.ds(0, shape.across), :]), pl.ds(shape.reach, shape.across)

        def line(i: Any, sums: list[Array]) -> list[Array]:
            sums = sums.copy()
            winners = [_place_of(route, client, i, first + f, columns, in_word) for f in range(tile)]
            grads = [grad[client, i, first + f, columns, :] for f in range(tile)]
            for f, (winner, g) in enumerate(zip(winners, grads)):
                sums[shape.size * tile + f] = sums[shape.size * tile + f] + jnp.where(winner == _DEAD, zero, g)
            for dy in range(2):
                u = a + dy
                sent = [[jnp.where(w == 2 * dy + dx, g, zero) for w, g in zip(winners, grads)] for dx in range(2)]
                for v in range(shape.size + 1):
                    start = (2 * (u % 2) + v % 2) * shape.wide + v // 2
                    seen = x[client, i + u // 2, c, pl.ds(start, shape.across), :]
                    for dx in range(2):
                        if 0 <= v - dx < shape.size:
                            for f in range(tile):
                                at = (v - dx) * tile + f
                                sums[at] = sums[at] + seen * sent[dx][f]
            return sums

        sums = lax.fori_loop(0, shape.lines, line, [zero] * ((shape.size + 1) * tile))
        for b in range(shape.size):
            for f in range(tile):
                kernel[client, a, b, c, first + f] = jnp.sum(sums[b * tile + f])
        for f in range(tile):
            bias[client, a, c, first + f] = jnp.sum(sums[shape.size * tile + f])

    kernels, biases = (shape.size, shape.size, channels, features), (shape.size, channels, features)
    return body, (shape.size, channels, features // tile), [(kernels, jnp.float32), (biases, jnp.float32)]


def _to_inputs(shape: _Shape, route: Array, grad: Array, kernel: Array) -> tuple:
    """The gradient of `x`; a program for a line pair and some channels."""
    (*_, channels, features), batch, reach = kernel.shape, grad.shape[-1], shape.reach
    tile, in_word = _tile(channels, len(_PLACES), shape.wide * batch), features // route.shape[2]

    def body(at: list[Any], route: Any, grad: Any, kernel: Any, x: Any) -> None:
        client, pair, part = at
        first = part * tile
        zero = _zeros(grad[client, 0, 0, pl.ds(0, shape.wide), :])

        def feature(f: Any, sums: list[Array]) -> list[Array]:
            sums = sums.copy()
            for up in range(reach + 1):
                line = jnp.clip(pair - up, 0, shape.lines - 1)
                beyond = line != pair - up
                for left in range(reach + 1):
                    columns = pl.ds(reach - left, shape.wide)
                    winner = _place_of(route, client, line, f, columns, in_word)
                    change = grad[client, line, f, columns, :]
                    for place, (dy, dx) in enumerate(_PLACES):
                        sent = jnp.where(winner == jnp.where(beyond, -1, place), change, zero)
                        for parity, (q, s) in enumerate(_PLACES):
                            a, b = 2 * up + q - dy, 2 * left + s - dx
                            if 0 <= a < shape.size and 0 <= b < shape.size:
                                for c in range(tile):
                                    at = parity * tile + c
                                    sums[at] = sums[at] + sent * kernel[client, a, b, first + c, f]
            return sums

        sums = lax.fori_loop(0, features, feature, [zero] * (len(_PLACES) * tile))
        for parity in range(len(_PLACES)):
            for c in range(tile):
                x[client, pair, first + c, pl.ds(parity * shape.wide, shape.wide), :] = sums[parity * tile + c]

    pairs = shape.lines + reach
    return body, (pairs, channels // tile), [((pairs, channels, 4 * shape.wide, batch), jnp.float32)]
