r"""Jacobian leakage risk, which measures how strongly a client's update depends on its inputs.

The risk of an example (x, y) is the norm of the Jacobian of the loss's gradient (ADP-PFL, eq. 7 and
8 with p = 2):

.. math::
    J(x) = \frac{\partial}{\partial x}
        \left[ \frac{\partial \ell(x, y, \theta)}{\partial \theta} \right],
    \qquad R(x) = \|J(x)\|_F.

J has a row per parameter and a column per input, so exact computations are for small models and
tests. The functions differentiate gradients, so a convolution must have a form whose gradient JAX
can differentiate: "winograd", "im2col", "lax", "grouped" or "blocks".

Inputs x are normalised: they have gone through `Model.prepare`.
"""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Int, Key, Shaped

from jaxfl._support.checks import check_choice, check_count, check_key, checked
from jaxfl.local.lanes import longest
from jaxfl.types import ClientData, Model, Params


@checked(key=check_key)
def client_risk(
    key: Key[Array, ""],
    model: Model,
    params: Params,
    data: ClientData,
    *,
    probes: int = 6,
    examples: int | None = 48,
    batch_size: int = 24,
    reading: Literal["gradient", "output"] = "gradient",
) -> Float[Array, ""]:
    r"""Return the mean risk of a client's own examples.

    The mean is a function of private data, like any other statistic of them.

    In a trained model few examples dominate the mean, and the risk of an example grows with
    :math:`w = 1 - p(y|x)`. If a client has more than M examples, M are drawn in proportion to w,
    which takes a forward pass over all N. Then
    :math:`\frac{\sum_n w_n}{N} \frac1M \sum_m R_m / w_m` estimates
    :math:`\frac1N \sum_n R_n` without bias.

    Args:
        key: Key of the drawn examples and of the probes.
        model: Network whose task gives the loss.
        params: Parameters at which the risk is taken.
        data: Examples of the client. Padding is ignored.
        probes: Number P of probes of `probe_risk`.
        examples: Number M of examples that are drawn from a client with more. None takes all.
        batch_size: Number of examples per block, which share their probes. Errors of small blocks
            average out, and large blocks draw fewer probes.
        reading: Definition of the risk. "gradient" is `probe_risk`, and "output" is `output_risk`,
            for which all examples are equally likely to be drawn.

    Returns:
        The mean, or 0 for a client without examples.
    """
    padded = data.padded
    most = min(padded, examples or padded)
    batch = min(batch_size, most)
    num_examples = jnp.minimum(data.size, most)
    drawing, probing = jax.random.split(key)
    chosen = jnp.arange(padded)
    factors = jnp.ones(padded)
    if most < padded:
        weights = factors
        if reading != "output":
            weights = _doubts(model, params, data)
        chosen, factors = _some_of(drawing, chosen, weights, most, data.size)

    def risks_of(i: Int[Array, ""], inputs: Array, labels: Array) -> Float[Array, "B"]:
        if reading == "output":
            return output_risk(model, params, inputs)
        return probe_risk(jax.random.fold_in(probing, i), model, params, inputs, labels, probes)

    return _weighted_mean(risks_of, data, chosen, factors, num_examples, batch)


def _weighted_mean(
    risks_of: Callable[..., Float[Array, "B"]],
    data: ClientData,
    chosen: Int[Array, "M"],
    factors: Float[Array, "M"],
    count: Int[Array, ""],
    batch: int,
) -> Float[Array, ""]:
    """Return the mean of factor times risk over the first `count` of the chosen positions.

    Args:
        risks_of: Function of a block's index, inputs and labels that returns their risks.
        data: Examples of the client.
        chosen: Positions of examples.
        factors: Factor of each of these positions.
        count: Number of positions that count.
        batch: Number B of examples in a block.
    """
    # Position 0 fills up the last block, and does not count.
    padding = (0, -len(chosen) % batch)
    chosen = jnp.pad(chosen, padding)
    factors = jnp.pad(factors, padding)

    def block(i: Int[Array, ""], total: Float[Array, ""]) -> Float[Array, ""]:
        positions = lax.dynamic_slice_in_dim(chosen, i * batch, batch)
        factor = lax.dynamic_slice_in_dim(factors, i * batch, batch)
        inputs, labels = data.take(positions)
        risks = risks_of(i, inputs, labels)
        counts = i * batch + jnp.arange(batch) < count
        return total + jnp.sum(jnp.where(counts, factor * risks, 0.0))

    total = lax.fori_loop(0, longest(-(-count // batch)), block, jnp.zeros(()))
    return total / jnp.maximum(count, 1)


def _some_of(
    key: Key[Array, ""],
    positions: Int[Array, "N"],
    weights: Float[Array, "N"],
    most: int,
    size: Int[Array | np.ndarray, ""],
) -> tuple[Int[Array, "M"], Float[Array, "M"]]:
    """Return M = `most` drawn positions and their factors, or all of a small client's examples.

    Args:
        key: Key of the draw.
        positions: The positions 0 to N - 1.
        weights: Weight of each position, at least 0.
        most: M, from 1 to N.
        size: Number of the client's examples. Later positions are padding.
    """
    real_weights = jnp.where(positions < size, weights, 0.0)
    drawn, factors = _draw(key, real_weights, most, size)
    # The size is traced, so the draw is made for small clients too, which then take everything.
    few = size <= most
    return jnp.where(few, positions[:most], drawn), jnp.where(few, 1.0, factors)


def probe_risk(
    key: Key[Array, ""],
    model: Model,
    params: Params,
    inputs: Shaped[Array, "B ..."],
    labels: Shaped[Array, "B ..."],
    probes: int,
) -> Float[Array, "B"]:
    r"""Return an estimate of each example's risk, the root of an unbiased estimate of its square.

    .. math::
        \hat R(x)^2 = \|J(x) u\|^2
            + \frac{1}{P-S} \sum_{p=S+1}^P \|(I - u u^\top) J(x)^\top v_p\|^2,
        \qquad S = \min(\lfloor P / 2 \rfloor, 4),

    where v are random signs, and the unit vector u is the leading direction of the first S
    :math:`J(x)^\top v_p`. The estimate is exact along u, and the other probes estimate the rest,
    across u. Few directions dominate a classifier's Jacobian, often one. Probes alone,
    :math:`\frac1P \sum_p \|J^\top v_p\|^2`, are then off by a third at P = 4, and by the same
    factor for all examples of a batch. The root is too small by an eighth of its square's relative
    variance, to second order. With two or more probes across u, this bias is estimated and removed.

    :math:`J^\top v = \nabla_x \langle \nabla_\theta \ell, v \rangle` is the derivative of
    :math:`\nabla_x \ell` along v in the parameters. It takes one forward pass and one input
    gradient, and their derivatives once per probe, for all examples together. :math:`J u` is the
    derivative of each example's gradient along its own u.

    Args:
        key: Key of the probes, which all examples of the batch share. Their errors are correlated.
        model: Network whose task gives the loss.
        params: Parameters at which the risk is taken.
        inputs: Inputs from the store, before `Model.prepare`.
        labels: Labels of the inputs.
        probes: Number P of probes. With 1 the square is :math:`\|J^\top v\|^2`.

    References: Hutchinson 1990, A Stochastic Estimator of the Trace of the Influence Matrix; Meyer,
        Musco, Musco and Woodruff 2021, Hutch++: Optimal Stochastic Trace Estimation. Normal numbers
        would do as well as signs, but drawing them would take as long as the derivatives.
    """
    x, axis = _prepared_batch(model, inputs)

    def slope(params: Params) -> Array:
        # Each loss depends on its own input only, so one gradient has a row per example.
        return jax.grad(lambda x: jnp.sum(_example_losses(model, params, x, labels)))(x)

    _, derivative = jax.linearize(slope, params)

    def probe(i: Int[Array, ""]) -> Float[Array, "B N"]:
        return _example_rows(derivative(_random_signs(jax.random.fold_in(key, i), params)), axis)

    searching = max(1, min(probes // 2, 4))
    first = lax.map(probe, jnp.arange(searching))
    if probes == 1:
        return jnp.linalg.norm(first[0], axis=1)
    unit = _leading_directions(first)

    def across(i: Int[Array, ""]) -> Float[Array, "B"]:
        along = probe(i)
        # Rounding may leave a difference below 0.
        squares = jnp.sum(along**2, axis=1)
        along_unit = jnp.sum(along * unit, axis=1)
        return jnp.maximum(squares - along_unit**2, 0.0)

    gains = _squares_along(model, params, x, labels, unit, axis)
    rests = lax.map(across, jnp.arange(searching, probes))
    square = gains + jnp.mean(rests, axis=0)
    return _unbiased_root(square, rests)


def _leading_directions(rows: Float[Array, "S B N"]) -> Float[Array, "B N"]:
    """Return the leading direction of S rows of each example, of length 1."""
    # The estimate lies in the span of few rows, so their small Gram matrix suffices.
    _, eigenvectors = jnp.linalg.eigh(jnp.einsum("sbn,tbn->bst", rows, rows))
    # `eigh` returns eigenvalues in ascending order.
    leading = eigenvectors[:, :, -1]
    direction = jnp.einsum("bs,sbn->bn", leading, rows)
    size = jnp.linalg.norm(direction, axis=1, keepdims=True)
    # A Jacobian of 0 has no direction, and keeps the vector 0.
    return direction / jnp.where(size > 0, size, 1.0)


def _squares_along(
    model: Model, params: Params, x: Array, labels: Array, units: Float[Array, "B N"], axis: int
) -> Float[Array, "B"]:
    r"""Return :math:`\|J(x) u\|^2` of each example, whose own direction u is in `units`."""

    def square(x: Array, label: Array, unit: Float[Array, "N"]) -> Float[Array, ""]:
        gradient = _gradient(model, params, label, axis)
        _, tangent = jax.jvp(gradient, (x,), (unit.reshape(x.shape),))
        return jnp.asarray(optax.tree.norm(tangent, squared=True))

    return jax.vmap(square, (axis, 0, 0))(x, labels, units)


def _unbiased_root(square: Float[Array, "B"], samples: Float[Array, "P B"]) -> Float[Array, "B"]:
    """Return the root of an estimate that has the mean of `samples` as its random part.

    With two or more samples, its bias is estimated and removed.
    """
    if len(samples) == 1:
        return jnp.sqrt(square)
    variance = jnp.var(samples, axis=0, ddof=1) / len(samples)
    relative = variance / jnp.where(square > 0, square, 1.0) ** 2
    return jnp.sqrt(square) * (1 + relative / 8)


def exact_risk(
    model: Model,
    params: Params,
    inputs: Shaped[Array, "B ..."],
    labels: Shaped[Array, "B ..."],
    *,
    by: Literal["columns", "jacrev"] = "columns",
    chunk: int = 16,
) -> Float[Array, "B"]:
    """Return the risk of each example by its full Jacobian, one example after the other.

    Args:
        model: Network whose task gives the loss.
        params: Parameters at which the risk is taken.
        inputs: Inputs from the store, before `Model.prepare`.
        labels: Labels of the inputs.
        by: Way of the computation. "columns" takes `chunk` derivatives of the gradient along inputs
            at a time. "jacrev" is the definition, with the full Jacobian in memory: d x inputs
            numbers, or 19 GB for LeNet.
        chunk: Number of columns at a time.

    >>> from jaxfl.models import mlp
    >>> model = mlp((1, 1, 2), 3, hidden=())
    >>> example = model.init(jax.random.key(0)), jnp.ones((1, 1, 1, 2)), jnp.array([0])
    >>> by_columns = exact_risk(model, *example, by="columns")
    >>> by_definition = exact_risk(model, *example, by="jacrev")
    >>> bool(jnp.allclose(by_columns, by_definition))
    True
    """
    check_choice("by", by, ("columns", "jacrev"))
    check_count("chunk", chunk)
    x, axis = _prepared_batch(model, inputs)
    if by == "columns":
        square: Callable[..., Array] = functools.partial(_square_by_columns, chunk=chunk)
    else:
        square = _square_by_definition

    def risk(example: tuple[Array, Array]) -> Float[Array, ""]:
        x_of_one, label = example
        return jnp.sqrt(square(_gradient(model, params, label, axis), x_of_one))

    return lax.map(risk, (jnp.moveaxis(x, axis, 0), labels))


def output_risk(model: Model, params: Params, inputs: Shaped[Array, "B ..."]) -> Float[Array, "B"]:
    r"""Return :math:`\frac1K \sum_k \|\partial f_k(x) / \partial x\|_2` of K outputs f.

    This is equation 8 of ADP-PFL, read for "the k-th output".

    Args:
        model: Network with the outputs f.
        params: Parameters at which the risk is taken.
        inputs: Inputs from the store, before `Model.prepare`.
    """
    x, axis = _prepared_batch(model, inputs)
    outputs, pull = jax.vjp(lambda x: model.apply(params, x).reshape(len(inputs), -1), x)

    def add(total: Float[Array, "B"], seed: Float[Array, "K"]) -> tuple[Float[Array, "B"], None]:
        # Outputs depend on their own example alone, so one pullback serves the whole batch.
        (slope,) = pull(jnp.broadcast_to(seed, outputs.shape))
        return total + jnp.linalg.norm(_example_rows(slope, axis), axis=1), None

    total, _ = lax.scan(add, jnp.zeros(len(outputs)), jnp.eye(outputs.shape[1]))
    return total / outputs.shape[1]


def _doubts(model: Model, params: Params, data: ClientData) -> Float[Array, "N"]:
    """Return 1 - exp(-loss) of each position, for instance 1 - p(y|x) for a classification."""
    # Forward passes alone can take larger batches than derivatives.
    batch = min(data.padded, 64)

    def block(i: Int[Array, ""], doubts: Float[Array, "N2"]) -> Float[Array, "N2"]:
        inputs, labels = data.take(i * batch + jnp.arange(batch))
        losses = _example_losses(model, params, model.prepare(inputs), labels)
        return lax.dynamic_update_slice(doubts, -jnp.expm1(-losses), (i * batch,))

    blocks = longest(-(-data.size // batch))
    nothing = jnp.zeros(data.padded + -data.padded % batch)
    doubts = lax.fori_loop(0, blocks, block, nothing)
    return doubts[: data.padded]


def _draw(
    key: Key[Array, ""], weights: Float[Array, "N"], count: int, size: Int[Array | np.ndarray, ""]
) -> tuple[Int[Array, "M"], Float[Array, "M"]]:
    """Draw M = `count` of `size` positions, in proportion to their weights.

    The sampling is systematic. The second result has a factor for each drawn position. The mean of
    factor times value over the drawn positions estimates the mean of all values without bias.
    """
    # Similar weights are neighbours in this order, so each kind of weight is drawn in proportion.
    order = jnp.argsort(weights, descending=True)
    ends = jnp.cumsum(weights[order])
    marks = (jnp.arange(count) + jax.random.uniform(key)) * (ends[-1] / count)
    ranks = jnp.searchsorted(ends, marks, side="right")
    # Rounding may put the last mark at the end of the sums, behind the rank of any example.
    drawn = order[jnp.minimum(ranks, jnp.maximum(size - 1, 0))]
    doubts = weights[drawn]
    positive = doubts > 0
    # `where` computes both branches below, so a weight of 0 divides by 1.
    factors = ends[-1] / jnp.maximum(size, 1) / jnp.where(doubts > 0, doubts, 1.0)
    return drawn, jnp.where(positive, factors, 0.0)


def _square_by_columns(
    gradient: Callable[[Array], Params], x: Array, chunk: int
) -> Float[Array, ""]:
    """Return the squared norm of a gradient's Jacobian, `chunk` columns at a time."""

    def column(i: Int[Array, ""]) -> Float[Array, ""]:
        unit = (jnp.arange(x.size) == i).astype(x.dtype).reshape(x.shape)
        # A derivative along one input is one column of the Jacobian.
        _, tangent = jax.jvp(gradient, (x,), (unit,))
        return jnp.asarray(optax.tree.norm(tangent, squared=True))

    columns = lax.map(column, jnp.arange(x.size), batch_size=min(chunk, x.size))
    return jnp.sum(columns)


def _square_by_definition(gradient: Callable[[Array], Params], x: Array) -> Float[Array, ""]:
    return jnp.asarray(optax.tree.norm(jax.jacrev(gradient)(x), squared=True))


def _random_signs(key: Key[Array, ""], like: Params) -> Params:
    """Return a tree of independent 1 and -1, each from one random bit."""
    flat, unravel = ravel_pytree(like)
    words = jax.random.bits(key, (-(-flat.size // 32), 1), jnp.uint32)
    bits = (words >> jnp.arange(32, dtype=jnp.uint32)[None]) & 1
    return unravel(2 * bits.ravel()[: flat.size].astype(flat.dtype) - 1)


def _gradient(model: Model, params: Params, label: Array, axis: int) -> Callable[[Array], Params]:
    """Return the loss's gradient by the parameters, as a function of one prepared input.

    The input has no batch axis. The function inserts it as `axis`.
    """

    def gradient(x: Array) -> Params:
        def loss(p: Params) -> Array:
            return _example_losses(model, p, jnp.expand_dims(x, axis), label[None])[0]

        return jax.grad(loss)(params)

    return gradient


def _example_losses(
    model: Model, params: Params, x: Array, labels: Shaped[Array, "B ..."]
) -> Float[Array, "B"]:
    return model.task.loss(model.apply(params, x), labels)


def _example_rows(x: Array, axis: int) -> Float[Array, "B N"]:
    """Return one row per example of an array whose examples lie along `axis`."""
    return jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)


def _prepared_batch(model: Model, inputs: Shaped[Array, "B ..."]) -> tuple[Array, int]:
    """Return a batch laid out for the network, and the axis along which its examples lie."""
    x = model.prepare(inputs)
    one_more = jax.ShapeDtypeStruct((len(inputs) + 1, *inputs.shape[1:]), inputs.dtype)
    # Only shapes are computed here.
    longer = jax.eval_shape(model.prepare, one_more).shape
    # The axis of examples is the one that grows with their number.
    lengths = enumerate(zip(x.shape, longer))
    return x, next(axis for axis, (length, of_more) in lengths if length != of_more)
