"""Convolution, bias, ReLU and 2x2 max-pool as one function with its own differentiation rule.

Activations are batch-minor: (channels, H, W, batch). A pass is one batch of matrix products over
the points p of a filter. There are patches P (k c, tiles w n), weights U (k c, f) and products
M (f, tiles w n):

    M_p = U_p^T P_p,   dU_p = P_p dM_p^T,   dP_p = U_p dM_p.

The patches hold the columns of the kernel, and minimal filtering covers its rows. A tile of m
output rows y needs m + k - 1 products (the points) instead of m k,

    y = A^T [(G u) * (B x)],   x of m + k - 1 rows, u the k taps,

which about halves both operations and patches. Where filtering does not pay, there is only one
point, and the patches also hold the rows of the kernel. The same holds where products are rounded
to less than float32, because filtering loses two digits.

This layout lets XLA's CPU loops run once over long contiguous rows.

References:
    Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Padding = tuple[tuple[int, int], tuple[int, int]]
"""Numbers of zeros before and after the rows, and before and after the columns."""


class ConvolutionOptions(NamedTuple):
    """Options of a convolution (see `jaxfl.models.layers.Convolution`)."""

    padding: Padding
    relu: bool
    pool: bool
    pairs: bool
    sum_grad_squared: bool
    filtered: bool
    """Whether minimal filtering is used where it pays."""
    precision: str | None
    """JAX's precision of the matrix products."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def convolve(x: Array, kernel: Array, bias: Array, options: ConvolutionOptions) -> Array:
    """Return feature maps (f, h, w, n) of x (c, H, W, n), a kernel (k, l, c, f) and a bias (f,).

    With `pairs`, x is (2c, H, W / 2, n). Only reverse mode is supported.
    """
    return _convolve_with_residuals(x, kernel, bias, options)[0]


def _convolve_with_residuals(
    x: Array, kernel: Array, bias: Array, options: ConvolutionOptions
) -> tuple[Array, Array, Array, Array]:
    """Return the output, the patches, the kernel by points, and the route of the gradient.

    The route of pooled maps is the place of each window's maximum, or `_NOBODY` where ReLU is
    inactive. The route of other maps says where ReLU is active.
    """
    plan = _plan(x, kernel, options)
    if options.pairs:
        kernel = _pair_kernel(kernel)
    weights = _to_points(kernel, plan)
    patches = _patches(x, plan, options.padding)
    # M_p = U_p^T P_p.
    products = lax.dot_general(
        weights, patches, (((1,), (1,)), ((0,), (0,))), precision=options.precision
    )
    products = products.reshape(*products.shape[:2], plan.tiles, plan.wide, -1)
    rows = _to_rows(products, plan)
    winner = None
    if options.pool:
        y, winner = _pool(rows, plan, options.pairs)
    else:
        y = _join_rows(rows, plan.high)
    # Bias and ReLU commute with a maximum, and pooled maps have a quarter of the numbers.
    y = y + bias[:, None, None, None]
    if options.relu:
        y = jax.nn.relu(y)
    # The backward pass needs the route and not y, which would take more memory.
    route = _route(y, winner, options.relu)
    return y, patches, weights, route


def _route(y: Array, winner: Array | None, relu: bool) -> Array:
    """Return the route of the gradient from outputs and, for pooled maps, places of the maxima."""
    if winner is None:
        return y > 0
    # Where ReLU is inactive, no place of the window gets the gradient.
    if relu:
        return jnp.where(y > 0, winner, _NOBODY)
    return winner


def _forward_rule(
    x: Any, kernel: Any, bias: Any, options: ConvolutionOptions
) -> tuple[Array, tuple[Any, ...]]:
    y, patches, weights, route = _convolve_with_residuals(
        x.value, kernel.value, bias.value, options
    )
    # The first layer's input needs no gradient, so the weights are not stored for it.
    kept: Array | None = None
    if x.perturbed:
        kept = weights
    return y, (x.value, kernel.value, patches, kept, route)


def _backward_rule(
    options: ConvolutionOptions, residuals: tuple[Any, ...], dy: Array
) -> tuple[Array | None, Array, Array]:
    x, kernel, patches, weights, route = residuals
    plan = _plan(x, kernel, options)
    # `d_bias` is the gradient of the maps before ReLU. Its sums over the maps come at the end.
    d_bias, rows = _before_relu(route, dy, plan, options)
    d_products = _from_rows(rows, plan)
    d_x = None
    if weights is not None:
        d_x = _input_gradient(weights, d_products, x.shape, plan, options)
    if not options.sum_grad_squared:
        d_kernel = _kernel_gradient(patches, d_products, kernel.shape, plan, options)
        return d_x, d_kernel, d_bias.sum((1, 2, 3))
    padded = _padded(x, plan, options.padding)
    odd = kernel.shape[1] % 2
    # A first layer then omits the unpooled gradient, which nothing else needs. Pairs of columns
    # need an odd kernel.
    if d_x is None and options.pool and odd:
        squares = _pooled_squares(padded, route, dy, kernel.shape, options.pairs)
    else:
        d_output = _batch_first(_join_rows(rows, plan.high))
        squares = _kernel_squares(padded, d_output, kernel.shape, options.pairs)
    # An example's gradient of the bias is a sum over its map, and is squared after this sum.
    return d_x, squares, (d_bias.sum((1, 2)) ** 2).sum(1)


# With symbolic zeros, the forward rule learns whether x needs a gradient.
convolve.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


class _Filter(NamedTuple):
    """Matrices A, G and B of a filter, for r = m + k - 1 rows of inputs.

    There are q = r points, or q = 1 for tiles of a single row (m = 1).
    """

    outputs: np.ndarray
    """A (q, m)."""
    taps: np.ndarray
    """G (r, k)."""
    inputs: np.ndarray
    """B (r, r)."""


class _Plan(NamedTuple):
    """Sizes of one convolution, and its filter. Maps are those before pooling."""

    high: int
    """Number of rows of the maps."""
    wide: int
    """Number of columns of the maps, or of pairs of columns."""
    tiles: int
    """Number of tiles that cover the rows."""
    rows: int
    """Number m of rows in a tile."""
    columns: int
    """Number of columns of the kernel, or of pairs of columns."""
    filter: _Filter


def _plan(x: Array, kernel: Array, options: ConvolutionOptions) -> _Plan:
    size, columns, channels, _ = kernel.shape
    if options.pairs:
        columns = (columns + 1) // 2
    sides = zip(x.shape[1:3], options.padding, (size, columns), strict=True)
    high, wide = (side + sum(zeros) - k + 1 for side, zeros, k in sides)
    # The transforms cost more than the products that they save if channels or taps are few.
    # Larger tiles save more and lose more digits: 5 rows of a 5x5 kernel are off by about 5e-6 of
    # the largest value.
    rows = 1
    if options.filtered and (size == 5 or (size == 3 and channels >= 8)):
        rows = 4
        # Here 4 rows would waste a part of the last tile, and tiles of 5 rows are all full.
        if high % 5 == 0 and high % 4:
            rows = 5
    return _Plan(high, wide, -(-high // rows), rows, columns, _filter(rows, size))


@functools.cache
def _filter(rows: int, size: int) -> _Filter:
    """Return the filter for tiles of `rows` output rows and a kernel of `size` rows.

    It is the transpose of Toom-Cook multiplication, which multiplies polynomials by their values at
    q points. The last point is infinity. Tiles of a single row have all taps in one product.
    """
    if rows == 1:
        return _Filter(np.ones((1, 1)), np.eye(size), np.eye(size))
    points = np.array([0, 1, -1, 0.5, -0.5, 2, -2, 4])[: rows + size - 2]
    slopes, inputs = _lagrange(points)
    outputs = np.vander(points, rows, increasing=True)
    taps = np.vander(points, size, increasing=True) / slopes[:, None]
    # The row of the point at infinity.
    outputs = np.vstack((outputs, np.eye(1, rows, rows - 1)))
    taps = np.vstack((taps, np.eye(1, size, size - 1)))
    inputs = np.vstack((inputs, np.poly(points)[None, ::-1]))
    # The factors get similar sizes by powers of two, so nothing is rounded.
    ratios = abs(taps).max(1) / abs(inputs).max(1)
    scale = np.exp2(np.round(np.log2(ratios) / 2))[:, None]
    return _Filter(outputs, taps / scale, inputs * scale)


def _lagrange(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the divisors and the coefficients of Lagrange's polynomials of some points.

    Such a polynomial is a product of (x - other) / (point - other). Its coefficients are in
    ascending powers, with a last 0 for the power that only the point at infinity has.
    """
    slopes = []
    inputs = []
    for p, point in enumerate(points):
        others = np.delete(points, p)
        # The divisors scale the taps.
        slopes.append(np.prod(point - others))
        # The coefficients of the product of (x - other) are a row of the inputs.
        inputs.append(np.append(np.poly(others)[::-1], 0))
    return np.array(slopes), np.array(inputs)


def _combine(coefficients: np.ndarray, terms: Iterable[Array]) -> Array:
    """Return sum_i c_i t_i, without the terms of coefficient 0."""
    # Python's float, unlike NumPy's, does not promote the dtype of a term.
    weighted = zip(coefficients, terms, strict=True)
    return functools.reduce(jnp.add, [t if c == 1 else t * float(c) for c, t in weighted if c])


def _to_points(kernel: Array, plan: _Plan) -> Array:
    """Return G u (q, columns c, f) of a kernel u (k, columns, c, f)."""
    by_points = jnp.stack([_combine(g, kernel) for g in plan.filter.taps])
    return by_points.reshape(len(plan.filter.outputs), -1, kernel.shape[-1])


def _from_points(d: Array, plan: _Plan) -> Array:
    """Apply the transpose of `_to_points`: (q, columns c, f) -> (k, columns c, f)."""
    # For tiles of a single row, G is the identity.
    if plan.rows == 1:
        return d.reshape(len(plan.filter.taps), -1, d.shape[-1])
    return jnp.stack([_combine(g, d) for g in plan.filter.taps.T])


def _pair_kernel(kernel: Array) -> Array:
    """Return a kernel (k, (l + 1) / 2, 2c, 2f) for pairs of columns, from a kernel (k, l, c, f).

    It makes two neighbouring outputs of a row from pairs of inputs. The width l is odd.
    """
    size, columns, c, f = kernel.shape
    # The right output of a pair (j = 1) reads its inputs one column further to the right.
    places = [jnp.pad(kernel, ((0, 0), (j, 1 - j), (0, 0), (0, 0))) for j in range(2)]
    pairs = jnp.stack(places, 3)
    return pairs.reshape(size, (columns + 1) // 2, 2 * c, 2 * f)


def _unpair_kernel(d: Array, shape: tuple[int, ...]) -> Array:
    """Apply the transpose of `_pair_kernel`: (..., k, (l + 1) c, 2f) -> (..., k, l, c, f)."""
    _, columns, c, f = shape
    d = d.reshape(*d.shape[:-2], columns + 1, c, 2, f)
    return d[..., :-1, :, 0, :] + d[..., 1:, :, 1, :]


def _kernel_gradient(
    patches: Array,
    d_products: Array,
    shape: tuple[int, ...],
    plan: _Plan,
    options: ConvolutionOptions,
) -> Array:
    """Return the gradient of a kernel of a shape from that of the products."""
    # dU_p = P_p dM_p^T.
    d_weights = lax.dot_general(
        patches, d_products, (((2,), (2,)), ((0,), (0,))), precision=options.precision
    )
    d_kernel = _from_points(d_weights, plan)
    if options.pairs:
        return _unpair_kernel(d_kernel, shape)
    return d_kernel.reshape(shape)


def to_pairs(x: Array) -> Array:
    """Return maps (2c, h, w / 2, n) of x (c, h, w, n), whose pairs of columns become channels.

    The channels are in the order (column, channel).

    This suits a first layer with few channels and a wide kernel. It then computes both outputs of a
    row of a pooling window at once. The matrix products have twice the outputs and fewer patches,
    for (k + 1) / k times the operations.
    """
    c, h, w, n = x.shape
    by_pair = x.reshape(c, h, w // 2, 2, n)
    return by_pair.transpose(3, 0, 1, 2, 4).reshape(2 * c, h, w // 2, n)


def _padded(x: Array, plan: _Plan, padding: Padding) -> Array:
    """Return x with padding of zeros, and with more zeros below so that its rows fill the tiles."""
    # The tiles cover all rows of the maps, so `needed` has the padding below. `_to_tiles` cuts the
    # rows by a reshape, so their number is a multiple of a tile's.
    needed = (plan.tiles - 1) * plan.rows + len(plan.filter.inputs)
    high = -(-needed // plan.rows) * plan.rows
    (above, _), sides = padding
    below = high - x.shape[1] - above
    config = ((0, 0, 0), (above, below, 0), (*sides, 0), (0, 0, 0))
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _to_tiles(x: Array, plan: _Plan) -> list[Array]:
    """Return B x: for each point (or row of the kernel), a row (c, tiles, w n) of every tile.

    x is padded, and has the shape (c, H, w n).
    """
    x = x.reshape(len(x), -1, plan.rows, x.shape[2])
    # Tiles overlap: the last rows that a tile reads lie in the tiles after it.
    places = (divmod(i, plan.rows) for i in range(len(plan.filter.inputs)))
    rows = [x[:, tile : tile + plan.tiles, row] for tile, row in places]
    return [_combine(b, rows) for b in plan.filter.inputs]


def _patches(x: Array, plan: _Plan, padding: Padding) -> Array:
    """Return patches (q, columns c, tiles w n) of x (c, H, W, n)."""
    n = x.shape[3]
    x = _padded(x, plan, padding)
    x = jnp.stack(_to_tiles(x.reshape(*x.shape[:2], -1), plan))
    # The spare column in front is a pad, through which XLA does not fuse. It would otherwise fuse
    # the producer of x into every slice.
    unchanged = (0, 0, 0)
    in_front = (n, 0, 0)
    x = lax.pad(x, jnp.zeros((), x.dtype), (unchanged, unchanged, unchanged, in_front))
    patches = [x[..., (1 + j) * n : (1 + j + plan.wide) * n] for j in range(plan.columns)]
    points = len(plan.filter.outputs)
    return jnp.concatenate(patches, 1).reshape(points, -1, plan.tiles * plan.wide * n)


def _from_patches(d: Array, x_shape: tuple[int, ...], plan: _Plan, padding: Padding) -> Array:
    """Return the gradient of x (c, h, w, n) from the gradient d of its patches."""
    c, h, w, n = x_shape
    d = d.reshape(len(plan.filter.inputs), plan.columns, c, plan.tiles, -1)
    (above, _), (left, _) = padding
    none = (0, 0, 0)
    columns = []
    for j in range(plan.columns):
        # A negative number makes `lax.pad` cut off columns, here those of the padding.
        before = (j - left) * n
        ends = (none, none, none, (before, (w - plan.wide) * n - before, 0))
        columns.append(lax.pad(d[:, j], jnp.zeros((), d.dtype), ends))
    rows = _from_tiles(functools.reduce(jnp.add, columns), plan)
    return rows.reshape(c, -1, w, n)[:, above : above + h]


def _from_tiles(d: Array, plan: _Plan) -> Array:
    """Apply the transpose of `_to_tiles`: (r, c, tiles, w n) -> (c, tiles, rows, w n).

    The result has further tiles below, which the last tiles read.
    """
    # A row of x lies in its own tile, and at the end of the tiles before it.
    over = (len(plan.filter.inputs) - 1) // plan.rows
    d = jnp.pad(d, ((0, 0), (0, 0), (over, over), (0, 0)))
    rows = []
    for row in range(plan.rows):
        # The tile that is t tiles before reads this row as its own row number row + t plan.rows.
        taps = enumerate(plan.filter.inputs[:, row :: plan.rows].T)
        terms = [_combine(b, d[:, :, over - t : 2 * over - t + plan.tiles]) for t, b in taps]
        rows.append(functools.reduce(jnp.add, terms))
    return jnp.stack(rows, 2)


def _input_gradient(
    weights: Array,
    d_products: Array,
    shape: tuple[int, ...],
    plan: _Plan,
    options: ConvolutionOptions,
) -> Array:
    """Return the gradient of an input of a shape from that of the products."""
    # dP_p = U_p dM_p.
    d_patches = lax.dot_general(
        weights, d_products, (((2,), (1,)), ((0,), (0,))), precision=options.precision
    )
    return _from_patches(d_patches, shape, plan, options.padding)


def _to_rows(products: Array, plan: _Plan) -> list[Array]:
    """Return A^T M, a tile's rows (f, tiles, w, n), of products M (q, f, tiles, w, n)."""
    return [_combine(a, products) for a in plan.filter.outputs.T]


def _from_rows(rows: list[Array], plan: _Plan) -> Array:
    """Apply the transpose of `_to_rows`, which gives (q, f, tiles w n)."""
    points = jnp.stack([_combine(a, rows) for a in plan.filter.outputs])
    return points.reshape(*points.shape[:2], -1)


def _join_rows(rows: Sequence[Array], high: int) -> Array:
    """Return maps (f, high, w, n) from the rows (f, tiles, w, n) of every tile."""
    y = jnp.stack(rows, 2)
    return y.reshape(len(y), -1, *y.shape[3:])[:, :high]


def _split_rows(y: Array, rows: int, tiles: int) -> list[Array]:
    """Return the rows (f, tiles, w, n) of every tile from maps y, as `_join_rows` takes them.

    Args:
        y: Maps (f, h, w, n).
        rows: Number of rows of a tile.
        tiles: Number of tiles, which zeros fill below the maps.
    """
    missing = tiles * rows - y.shape[1]
    y = jnp.pad(y, ((0, 0), (0, missing), (0, 0), (0, 0)))
    y = y.reshape(len(y), tiles, rows, *y.shape[2:])
    return [y[:, :, i] for i in range(rows)]


def _kernel_squares(x: Array, dy: Array, shape: tuple[int, ...], pairs: bool) -> Array:
    """Return sum_n (P_n dY_n^T)^2, the sum over examples of squared gradients of the kernel.

    The input x (c, H, W, n) is padded, and dy is (n, f, h, w). The products need the batch first.
    Moving it there is slow, so x and dy are moved, not the patches. Patches hold the rows and
    columns of the kernel, because transforms to points would take longer than such small products.
    """
    x = _batch_first(x)
    n, f, high, wide = dy.shape
    columns = shape[1]
    if pairs:
        columns = (columns + 1) // 2
    x = jnp.concatenate([x[..., j : j + wide] for j in range(columns)], 1)
    # Copies of a map's rows are then one long copy.
    x = x.reshape(n, x.shape[1], -1)
    strips = [x[..., i * wide : (i + high) * wide] for i in range(shape[0])]
    patches = jnp.concatenate(strips, 1)
    gradients = jnp.einsum("nkl,nfl->nkf", patches, dy.reshape(n, f, -1))
    gradients = gradients.reshape(n, shape[0], -1, f)
    # A weight is in two places of a paired kernel. Its gradient is their sum, before the square.
    if pairs:
        gradients = _unpair_kernel(gradients, shape)
    return (gradients * gradients).sum(0).reshape(shape)


def _pooled_squares(x: Array, route: Array, g: Array, shape: tuple[int, ...], pairs: bool) -> Array:
    """Return `_kernel_squares` from the gradient g of pooled maps.

    This moves a quarter of the numbers. The positions of a window become channels and rows, which
    takes pairs of columns.
    """
    if not pairs:
        # The kernel's width is odd, so no pooling window reads the last one of an odd number of
        # columns.
        x = to_pairs(x[:, :, : x.shape[2] // 2 * 2])
    # `_batch_first` is a product, and floats hold the positions 0 to 4 exactly.
    route = _batch_first(route.astype(g.dtype))
    g = _batch_first(g)
    a, b, c, d = (jnp.where(route == position, g, 0) for position in range(4))
    # Left and right columns become channels, and upper and lower rows alternate.
    rows = [jnp.stack([a, c], 3), jnp.stack([b, d], 3)]
    dy = jnp.stack(rows, 1)
    _, high_g, wide_g, features = g.shape
    dy = dy.reshape(len(g), 2 * high_g, 2 * wide_g, features)
    return _kernel_squares(x, dy, shape, True)


def _batch_first(x: Array) -> Array:
    """Transpose (k, h, w, n) to (n, k, h, w) by a product with the identity.

    XLA's own transposition misses the cache each time.
    """
    k, h, w, n = x.shape
    # The default precision of accelerators would round the numbers that the identity copies.
    x = lax.dot_general(
        jnp.eye(n, dtype=x.dtype),
        x.reshape(-1, n),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )
    return x.reshape(n, k, h, w)


_NOBODY = 4
"""Route of a window where ReLU is inactive: none of its four places gets the gradient."""


def _pool(rows: list[Array], plan: _Plan, pairs: bool) -> tuple[Array, Array]:
    """Return the maximum of each 2x2 window, and the position of its first maximum, as int8.

    Positions are 0 to 3 in reading order. If tiles have an even number of rows, one loop computes
    pooled maps from rows, and writes nothing in between.
    """
    high = plan.high // 2
    # A window must not lie in two tiles, so rows are cut anew into pairs.
    if plan.rows % 2:
        rows = _split_rows(_join_rows(rows, 2 * high), 2, high)
    lines = zip(rows[::2], rows[1::2], strict=True)
    windows = [_windows(above, below, pairs) for above, below in lines]
    values, winners = zip(*windows, strict=True)
    return _join_rows(values, high), _join_rows(winners, high)


def _windows(above: Array, below: Array, pairs: bool) -> tuple[Array, Array]:
    """Return the maximum of each window, and its position, from the windows' upper and lower rows.

    With `pairs`, the first half of the channels holds the left columns of pairs, and the second
    half the right ones.
    """
    f, tiles, wide, n = above.shape
    if pairs:
        a, b = jnp.split(above, 2)
        c, d = jnp.split(below, 2)
    else:
        # A last odd column is in no window.
        paired = wide // 2 * 2
        columns = [row[:, :, :paired].reshape(f, tiles, -1, 2, n) for row in (above, below)]
        a, b, c, d = (row[:, :, :, side] for row in columns for side in range(2))
    above = jnp.maximum(a, b)
    below = jnp.maximum(c, d)
    # Of equal numbers, the first in reading order wins.
    winner = jnp.where(above >= below, jnp.where(a >= b, 0, 1), jnp.where(c >= d, 2, 3))
    return jnp.maximum(above, below), winner.astype(jnp.int8)


def _before_relu(
    route: Array, dy: Array, plan: _Plan, options: ConvolutionOptions
) -> tuple[Array, list[Array]]:
    """Return the gradient before ReLU, of pooled maps if there are any, and of all tiles' rows."""
    if options.pool:
        # Without ReLU, every window has a place that gets its gradient.
        d_pooled = jnp.where(route < _NOBODY, dy, 0)
        return d_pooled, _unpool(route, dy, plan, options.pairs)
    if options.relu:
        dy = jnp.where(route, dy, 0)
    return dy, _split_rows(dy, plan.rows, plan.tiles)


def _unpool(winner: Array, g: Array, plan: _Plan, pairs: bool) -> list[Array]:
    """Return the gradients of every tile's rows from the gradient g of pooled maps.

    Args:
        winner: Route of each window: the place that gets the gradient, or `_NOBODY`.
        g: Gradient of pooled maps (f, h, w, n).
        plan: Sizes of the convolution.
        pairs: Whether the maps have pairs of columns as channels.
    """
    # As in `_pool`, tiles of an odd number of rows give way to pairs of rows.
    odd = plan.rows % 2
    if odd:
        windows = 1
        tiles = g.shape[1]
    else:
        windows = plan.rows // 2
        tiles = plan.tiles
    places = _split_rows(winner, windows, tiles)
    slopes = _split_rows(g, windows, tiles)
    rows = []
    for place, slope in zip(places, slopes, strict=True):
        for left in (0, 2):
            sides = [jnp.where(place == left + side, slope, 0) for side in range(2)]
            rows.append(_join_columns(sides, plan.wide, pairs))
    if odd:
        return _split_rows(_join_rows(rows, plan.high), plan.rows, plan.tiles)
    return rows


def _join_columns(sides: list[Array], wide: int, pairs: bool) -> Array:
    """Return rows of maps from the left and the right columns of windows.

    Args:
        sides: Left and right columns, each (f, tiles, w, n).
        wide: Number of columns of the maps, or of pairs of columns.
        pairs: Whether the maps have pairs of columns as channels.
    """
    # Pairs have the left columns as their first channels.
    if pairs:
        row = jnp.concatenate(sides)
    else:
        f, tiles, _, n = sides[0].shape
        row = jnp.stack(sides, 3).reshape(f, tiles, -1, n)
    # A last odd column, which no window has, gets zeros.
    missing = wide - row.shape[2]
    return jnp.pad(row, ((0, 0), (0, 0), (0, missing), (0, 0)))
