r"""Jacobian leakage risk: how strongly what a client sends depends on its inputs.

Of an example (x, y), the Jacobian of the loss's gradient and its risk (ADP-PFL, eq. 7 and 8 with p = 2):

.. math::
    J(x) = \frac{\partial}{\partial x} \left[ \frac{\partial \ell(x, y, \theta)}{\partial \theta} \right],
    \qquad R(x) = \|J(x)\|_F.

J has a row per parameter and a column per input: exact computations are for small models and tests. All work with all
forms of a convolution: they differentiate gradients, and a gradient of the fast form is ordinary code.

Inputs are those after `Model.prepare`: normalised.
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

from jaxfl._validate import check_choice, check_count, check_key, checked
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
    r"""Mean risk of a client's own examples, block by block; a function of private data, like any other statistic.

    In a trained model few examples dominate the mean, and the risk of each grows with :math:`w = 1 - p(y|x)`. If there
    are too many, M are drawn in proportion to w, which takes a forward pass over all:
    :math:`\frac1N \sum_n R_n` is estimated by :math:`\frac{\sum_n w_n}{N} \frac1M \sum_m R_m / w_m`, without bias.

    Args:
        key: choice of examples, and probes.
        model: the network.
        params: its parameters.
        data: the client's rows; padding is ignored.
        probes: P of `probe_risk`.
        examples: M, how many are drawn from a client that has more; None: all are taken.
        batch_size: examples per block, which share their probes: errors of small blocks average out, large blocks draw
            fewer probes.
        reading: "gradient" is `probe_risk`, "output" is `output_risk` (all examples are equally likely to be drawn).

    Returns:
        The mean; 0 for a client without examples.
    """
    padded = data.padded
    most = min(padded, examples or padded)
    batch, number = min(batch_size, most), jnp.minimum(data.size, most)
    drawing, probing = jax.random.split(key)
    chosen, factors = jnp.arange(padded), jnp.ones(padded)
    if most < padded:
        weights = factors if reading == "output" else _doubts(model, params, data)
        drawn, weighted = _draw(
            drawing, jnp.where(chosen < data.size, weights, 0.0), most, data.size
        )
        few = data.size <= most
        chosen, factors = jnp.where(few, chosen[:most], drawn), jnp.where(few, 1.0, weighted)
    chosen, factors = (jnp.pad(a, (0, -most % batch)) for a in (chosen, factors))

    def block(i: Int[Array, ""], total: Float[Array, ""]) -> Float[Array, ""]:
        positions, factor = (
            lax.dynamic_slice_in_dim(a, i * batch, batch) for a in (chosen, factors)
        )
        inputs, labels = data.take(positions)
        if reading == "output":
            risks = output_risk(model, params, inputs)
        else:
            risks = probe_risk(
                jax.random.fold_in(probing, i), model, params, inputs, labels, probes
            )
        return total + jnp.sum(
            jnp.where(i * batch + jnp.arange(batch) < number, factor * risks, 0.0)
        )

    total = lax.fori_loop(0, longest(-(-number // batch)), block, jnp.zeros(()))
    return total / jnp.maximum(number, 1)


def probe_risk(
    key: Key[Array, ""],
    model: Model,
    params: Params,
    inputs: Shaped[Array, "B ..."],
    labels: Shaped[Array, "B ..."],
    probes: int,
) -> Float[Array, "B"]:
    r"""Risk of each example, estimated without bias in its square.

    .. math::
        \hat R(x)^2 = \|J(x) u\|^2 + \frac{1}{P-S} \sum_{p=S+1}^P \|(I - u u^\top) J(x)^\top v_p\|^2,
        \qquad S = \min(\lfloor P / 2 \rfloor, 4),

    v random signs: exact along the unit vector u, the leading direction of the first S :math:`J(x)^\top v_p`, and
    estimated by the other probes across it. Few directions dominate a classifier's Jacobian, often one. Probes alone,
    :math:`\frac1P \sum_p \|J^\top v_p\|^2`, are then off by a third at P = 4, and equally for the examples of a batch.
    The root is too small by an eighth of its square's relative variance, to second order: with two or more probes
    across, this is estimated and added.

    :math:`J^\top v = \nabla_x \langle \nabla_\theta \ell, v \rangle` is the derivative of :math:`\nabla_x \ell` along v
    in the parameters: one forward pass and one input gradient, and their derivatives once per probe, for all examples
    together. :math:`J u` is the derivative of each example's gradient along its own u.

    Args:
        key: the probes, the same for all examples of the batch: their errors are then correlated.
        model: the network.
        params: its parameters.
        inputs: stored examples.
        labels: theirs.
        probes: P; with 1 the square is :math:`\|J^\top v\|^2`.

    References: Hutchinson 1990, A Stochastic Estimator of the Trace of the Influence Matrix; Meyer, Musco, Musco and
        Woodruff 2021, Hutch++: Optimal Stochastic Trace Estimation. Normal numbers would do as well as signs, but
        drawing them would take as long as the derivatives.
    """
    x, axis = _prepared(model, inputs)

    def slope(params: Params) -> Array:
        return jax.grad(lambda x: jnp.sum(_losses(model, params, x, labels)))(x)

    derivative = jax.linearize(slope, params)[1]

    def probe(i: Int[Array, ""]) -> Float[Array, "B N"]:
        return _flat(derivative(_signs(jax.random.fold_in(key, i), params)), axis)

    searching = max(1, min(probes // 2, 4))
    first = lax.map(probe, jnp.arange(searching))
    if probes == 1:
        return jnp.linalg.norm(first[0], axis=1)
    leading = jnp.linalg.eigh(jnp.einsum("sbn,tbn->bst", first, first))[1][:, :, -1]
    direction = jnp.einsum("bs,sbn->bn", leading, first)
    size = jnp.linalg.norm(direction, axis=1, keepdims=True)
    unit = direction / jnp.where(size > 0, size, 1.0)

    def across(i: Int[Array, ""]) -> Float[Array, "B"]:
        along = probe(i)
        return jnp.maximum(jnp.sum(along**2, axis=1) - jnp.sum(along * unit, axis=1) ** 2, 0.0)

    def gain(x: Array, label: Array, unit: Float[Array, "N"]) -> Float[Array, ""]:
        tangent = jax.jvp(_gradient(model, params, label, axis), (x,), (unit.reshape(x.shape),))[1]
        return jnp.asarray(optax.tree.norm(tangent, squared=True))

    gains = jax.vmap(gain, (axis, 0, 0))(x, labels, unit)
    rests = lax.map(across, jnp.arange(searching, probes))
    square = gains + jnp.mean(rests, axis=0)
    if len(rests) == 1:
        return jnp.sqrt(square)
    relative = jnp.var(rests, axis=0, ddof=1) / len(rests) / jnp.where(square > 0, square, 1.0) ** 2
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
    """Risk of each example by its whole Jacobian, one example after the other.

    Args:
        model: the network.
        params: its parameters.
        inputs: stored examples.
        labels: theirs.
        by: "columns": `chunk` derivatives of the gradient along inputs at a time; "jacrev": the definition, the whole
            Jacobian in memory (d x inputs: 19 GB for LeNet).
        chunk: columns at a time.

    >>> from jaxfl.models import mlp
    >>> model = mlp((1, 1, 2), 3, hidden=())
    >>> example = model.init(jax.random.key(0)), jnp.ones((1, 1, 1, 2)), jnp.array([0])
    >>> bool(jnp.allclose(exact_risk(model, *example, by="columns"), exact_risk(model, *example, by="jacrev")))
    True
    """
    check_choice("by", by, ("columns", "jacrev"))
    check_count("chunk", chunk)
    x, axis = _prepared(model, inputs)
    square = (
        functools.partial(_square_by_columns, chunk=chunk)
        if by == "columns"
        else _square_by_definition
    )

    def risk(example: tuple[Array, Array]) -> Float[Array, ""]:
        return jnp.sqrt(square(_gradient(model, params, example[1], axis), example[0]))

    return lax.map(risk, (jnp.moveaxis(x, axis, 0), labels))


def output_risk(model: Model, params: Params, inputs: Shaped[Array, "B ..."]) -> Float[Array, "B"]:
    r"""Eq. 8 read for "the k-th output": :math:`\frac1K \sum_k \|\partial f_k(x) / \partial x\|_2` of K outputs f.

    Args:
        model: the network.
        params: its parameters.
        inputs: stored examples.
    """
    x, axis = _prepared(model, inputs)
    outputs, pull = jax.vjp(lambda x: model.apply(params, x).reshape(len(inputs), -1), x)

    def add(total: Float[Array, "B"], seed: Float[Array, "K"]) -> tuple[Float[Array, "B"], None]:
        (slope,) = pull(jnp.broadcast_to(seed, outputs.shape))
        return total + jnp.linalg.norm(_flat(slope, axis), axis=1), None

    return lax.scan(add, jnp.zeros(len(outputs)), jnp.eye(outputs.shape[1]))[0] / outputs.shape[1]


def _doubts(model: Model, params: Params, data: ClientData) -> Float[Array, "N"]:
    """1 - exp(-loss) of each row, block by block: 1 - p(y|x) of a classification."""
    batch = min(data.padded, 64)  # forward passes alone can take larger batches than derivatives

    def block(i: Int[Array, ""], doubts: Float[Array, "N2"]) -> Float[Array, "N2"]:
        inputs, labels = data.take(i * batch + jnp.arange(batch))
        losses = _losses(model, params, model.prepare(inputs), labels)
        return lax.dynamic_update_slice(doubts, -jnp.expm1(-losses), (i * batch,))

    blocks = longest(-(-data.size // batch))
    return lax.fori_loop(0, blocks, block, jnp.zeros(data.padded + -data.padded % batch))[
        : data.padded
    ]


def _draw(
    key: Key[Array, ""], weights: Float[Array, "N"], count: int, size: Int[Array | np.ndarray, ""]
) -> tuple[Int[Array, "M"], Float[Array, "M"]]:
    """Systematic sampling: positions, expected in proportion to their weights, and factors for a mean over them."""
    order = jnp.argsort(
        weights, descending=True
    )  # similar neighbours: each kind is drawn in proportion
    ends = jnp.cumsum(weights[order])
    marks = (jnp.arange(count) + jax.random.uniform(key)) * (ends[-1] / count)
    drawn = order[
        jnp.minimum(jnp.searchsorted(ends, marks, side="right"), jnp.maximum(size - 1, 0))
    ]
    doubts = weights[drawn]
    return drawn, jnp.where(
        doubts > 0, ends[-1] / jnp.maximum(size, 1) / jnp.where(doubts > 0, doubts, 1.0), 0.0
    )


def _square_by_columns(
    gradient: Callable[[Array], Params], x: Array, chunk: int
) -> Float[Array, ""]:
    """Sum over inputs of the squared derivatives of the gradient along them."""

    def column(i: Int[Array, ""]) -> Float[Array, ""]:
        unit = (jnp.arange(x.size) == i).astype(x.dtype).reshape(x.shape)
        return jnp.asarray(optax.tree.norm(jax.jvp(gradient, (x,), (unit,))[1], squared=True))

    return jnp.sum(lax.map(column, jnp.arange(x.size), batch_size=min(chunk, x.size)))


def _square_by_definition(gradient: Callable[[Array], Params], x: Array) -> Float[Array, ""]:
    return jnp.asarray(optax.tree.norm(jax.jacrev(gradient)(x), squared=True))


def _signs(key: Key[Array, ""], like: Params) -> Params:
    """A tree of independent 1 and -1, each from one random bit."""
    flat, unravel = ravel_pytree(like)
    words = jax.random.bits(key, (-(-flat.size // 32), 1), jnp.uint32)
    bits = (words >> jnp.arange(32, dtype=jnp.uint32)[None]) & 1
    return unravel(2 * bits.ravel()[: flat.size].astype(flat.dtype) - 1)


def _gradient(model: Model, params: Params, label: Array, axis: int) -> Callable[[Array], Params]:
    """The loss's gradient as a function of one input."""
    return lambda x: jax.grad(
        lambda p: _losses(model, p, jnp.expand_dims(x, axis), label[None])[0]
    )(params)


def _losses(
    model: Model, params: Params, x: Array, labels: Shaped[Array, "B ..."]
) -> Float[Array, "B"]:
    return model.task.loss(model.apply(params, x), labels)


def _flat(x: Array, axis: int) -> Float[Array, "B N"]:
    """A row per example; examples lie along `axis`."""
    return jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)


def _prepared(model: Model, inputs: Shaped[Array, "B ..."]) -> tuple[Array, int]:
    """A batch laid out for the network, and the axis along which its examples lie."""
    x = model.prepare(inputs)
    more = jax.eval_shape(
        model.prepare, jax.ShapeDtypeStruct((len(inputs) + 1, *inputs.shape[1:]), inputs.dtype)
    )
    return x, next(i for i, (a, b) in enumerate(zip(x.shape, more.shape)) if a != b)
