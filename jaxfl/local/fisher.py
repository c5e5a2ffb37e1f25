"""Diagonal Fisher information: which weights matter for a client's own examples."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree
from jaxtyping import Float, Shaped

from jaxfl.local.lanes import longest
from jaxfl.types import ClientData, Model, Params, Tree


def fisher_diagonal(
    model: Model,
    params: Params,
    x: Shaped[Array, "..."],
    labels: Shaped[Array, "B ..."],
    weights: Float[Array, "B"],
) -> Tree:
    """Sum over examples of squared per-example gradients: F_j = sum_n w_n (d loss_n / d theta_j)^2.

    The loss is the task's: for a classification -log p(y_n | x_n).

    Exact, in about the time of one gradient: through `model.sum_grad_squared`, whose backward pass squares each layer's
    per-example gradients as it sums them (a dense layer's have rank one: (h^2)^T (dy^2)). A model without that
    rule takes one gradient per example, a few at a time.

    Args:
        model: the network.
        params: its parameters.
        x: examples that went through `model.prepare`.
        labels: theirs.
        weights: 1, or 0 for padding.

    Returns:
        A tree like `params`; divide by the sum of weights for the mean.

    References:
        Yang et al., Dynamic Personalized Federated Learning with Adaptive Differential Privacy, NeurIPS 2023, eq. 4.
    """
    if model.sum_grad_squared is None:
        return _one_by_one(model, params, x, labels, weights)
    # A per-example gradient is squared with its weight, 0 or 1, which squaring does not change.
    network = model.sum_grad_squared
    return jax.grad(lambda p: jnp.sum(weights * model.task.loss(network(p, x), labels)))(params)


def client_fisher(model: Model, params: Params, data: ClientData, batch_size: int = 32) -> Tree:
    """Mean over a client's own examples of squared per-example gradients, block by block.

    Args:
        model: the network.
        params: its parameters.
        data: the client's examples; only the first `size` rows are read.
        batch_size: examples per block; the result does not depend on it.

    Returns:
        A tree like `params`, in single precision at least; zeros for a client without examples.
    """
    return _mean_over(
        functools.partial(fisher_diagonal, model, params), model, params, data, batch_size
    )


def squared_gradient(model: Model, params: Params, data: ClientData, batch_size: int = 32) -> Tree:
    """Square of the mean gradient over a client's own examples: ADP-PFL's (13) to the letter.

    It vanishes where the client's loss is least, however much single examples pull.

    Args: as for `client_fisher`.
    """

    def gradient(x: Array, labels: Array, weights: Array) -> Tree:
        return jax.grad(lambda p: jnp.sum(weights * model.task.loss(model.apply(p, x), labels)))(
            params
        )

    return jax.tree.map(jnp.square, _mean_over(gradient, model, params, data, batch_size))


def _mean_over(
    sum_of: Callable[..., Tree], model: Model, params: Params, data: ClientData, batch_size: int
) -> Tree:
    """Mean over a client's examples of what `sum_of(inputs, labels, weights)` adds up over a block."""
    batch_size = min(batch_size, data.padded)

    def block(i: Array) -> tuple[Array, Array, Array]:
        positions = i * batch_size + jnp.arange(batch_size)
        inputs, labels = data.take(positions)
        return model.prepare(inputs), labels, (positions < data.size).astype(jnp.float32)

    def step(
        i: Array, carry: tuple[Tree, tuple[Array, Array, Array]]
    ) -> tuple[Tree, tuple[Array, Array, Array]]:
        total, examples = carry
        total = jax.tree.map(jnp.add, total, sum_of(*examples))
        # The next block is prepared here and carried: the loop boundary keeps XLA from recomputing the layout change
        # in every slice of the convolutions' patches.
        return total, block(i + 1)

    start = (_zeros(params), block(jnp.int32(0)))
    total, _ = jax.lax.fori_loop(
        0, longest((data.size + batch_size - 1) // batch_size), step, start
    )
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(data.size, 1), total)


def normalize_per_layer(fisher: Tree) -> Tree:
    """Min-max of each tensor to [0, 1]: (F - min F) / (max F - min F); a constant tensor becomes 0.

    References:
        Yang et al., NeurIPS 2023, eq. 5. The published code leaves 0/0 in a constant tensor.

    >>> normalize_per_layer({"w": jnp.array([1.0, 2.0, 5.0]), "b": jnp.array([3.0, 3.0])})["w"].tolist()
    [0.0, 0.25, 1.0]
    """

    def scale(leaf: Array) -> Array:
        low, high = leaf.min(), leaf.max()
        spread = high - low
        return jnp.where(spread > 0, (leaf - low) / jnp.where(spread > 0, spread, 1), 0)

    return jax.tree.map(scale, fisher)


def normalize_over_all(fisher: Tree) -> Tree:
    """Min-max over all tensors together to [0, 1] (ADP-PFL, eq. 14); a constant becomes 0."""
    flat, unravel = ravel_pytree(fisher)
    return unravel(normalize_per_layer(flat))


def _one_by_one(
    model: Model, params: Params, x: Array, labels: Array, weights: Array, chunk: int = 8
) -> Tree:
    """The same sum by vmap(grad) over chunks of examples."""
    chunk, axis = min(chunk, len(labels)), _batch_axis(model)

    def split(array: Array) -> Array:
        padded = jnp.pad(array, [(0, -len(labels) % chunk)] + [(0, 0)] * (array.ndim - 1))
        return padded.reshape(-1, chunk, *array.shape[1:])

    def loss(p: Params, x: Array, label: Array, weight: Array) -> Array:
        return weight * model.task.loss(model.apply(p, jnp.expand_dims(x, axis)), label[None])[0]

    def step(total: Tree, examples: tuple[Array, Array, Array]) -> tuple[Tree, None]:
        gradients = jax.vmap(functools.partial(jax.grad(loss), params))(*examples)
        return jax.tree.map(lambda t, g: t + (g * g).sum(0), total, gradients), None

    examples = jax.tree.map(split, (jnp.moveaxis(x, axis, 0), labels, weights))
    return jax.lax.scan(step, _zeros(params), examples)[0]


def _zeros(params: Params) -> Tree:
    """To add up in single precision, whatever the weights' own."""
    return jax.tree.map(
        lambda leaf: jnp.zeros_like(leaf, jnp.promote_types(leaf.dtype, jnp.float32)), params
    )


def _batch_axis(model: Model) -> int:
    """Where a prepared batch has its examples: first, unless the model's shape of an example tells otherwise."""
    if model.input_shape is None:
        return 0
    shapes = (jax.ShapeDtypeStruct((size, *model.input_shape), jnp.uint8) for size in (2, 3))
    sizes = zip(*(jax.eval_shape(model.prepare, batch).shape for batch in shapes), strict=True)
    return next(axis for axis, (two, three) in enumerate(sizes) if two != three)
