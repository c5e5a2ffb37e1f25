"""Diagonal Fisher information, which shows what weights matter for a client's own examples."""

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
    """Return the sum over examples of squared gradients, F_j = sum_n w_n (d loss_n / d theta_j)^2.

    The loss is the task's, for instance -log p(y_n | x_n) for a classification.

    The sum is exact, and takes about the time of one gradient through `model.sum_grad_squared`. Its
    backward pass squares each layer's per-example gradients as it sums them. The gradients of a
    dense layer have rank one, so that their sum of squares is (h^2)^T (dy^2). A model without such
    a rule takes one gradient per example, a few at a time.

    Args:
        model: Network whose task gives the loss.
        params: Parameters at which gradients are taken.
        x: Inputs that went through `model.prepare`.
        labels: Labels of the inputs.
        weights: Weight of each example: 1, or 0 for padding.

    Returns:
        A tree like `params`. Divide it by the sum of weights for the mean.

    References:
        Yang et al., Dynamic Personalized Federated Learning with Adaptive Differential Privacy,
        NeurIPS 2023, eq. 4.
    """
    if model.sum_grad_squared is None:
        return _squares_one_by_one(model, params, x, labels, weights)
    network = model.sum_grad_squared

    # A per-example gradient is squared with its weight, 0 or 1, which squaring does not change.
    def weighted_loss(p: Params) -> Array:
        return jnp.sum(weights * model.task.loss(network(p, x), labels))

    return jax.grad(weighted_loss)(params)


def client_fisher(model: Model, params: Params, data: ClientData, batch_size: int = 32) -> Tree:
    """Return the mean over a client's own examples of squared per-example gradients.

    Args:
        model: Network whose task gives the loss.
        params: Parameters at which gradients are taken.
        data: Examples of the client.
        batch_size: Number of examples per block. The result does not depend on it.

    Returns:
        A tree like `params`, in single precision at least. A client without examples has zeros.
    """
    sum_of_squares = functools.partial(fisher_diagonal, model, params)
    return _mean_over(sum_of_squares, model, params, data, batch_size)


def squared_gradient(model: Model, params: Params, data: ClientData, batch_size: int = 32) -> Tree:
    """Return the square of the mean gradient over a client's own examples.

    This is equation 13 of ADP-PFL to the letter. It vanishes where the client's loss is least, even
    if the gradients of single examples are large there.

    Args:
        model: Network whose task gives the loss.
        params: Parameters at which gradients are taken.
        data: Examples of the client.
        batch_size: Number of examples per block. The result does not depend on it.
    """

    def gradient(x: Array, labels: Array, weights: Array) -> Tree:
        def weighted_loss(p: Params) -> Array:
            return jnp.sum(weights * model.task.loss(model.apply(p, x), labels))

        return jax.grad(weighted_loss)(params)

    return jax.tree.map(jnp.square, _mean_over(gradient, model, params, data, batch_size))


def _mean_over(
    sum_of: Callable[..., Tree], model: Model, params: Params, data: ClientData, batch_size: int
) -> Tree:
    """Return the mean over a client's examples, from the sums that `sum_of` returns for blocks.

    The arguments of `sum_of` are a block's inputs, labels and weights. The mean is 0 without
    examples.
    """
    batch_size = min(batch_size, data.padded)

    block = functools.partial(_weighted_block, model, data, batch_size)

    def step(
        i: Array, carry: tuple[Tree, tuple[Array, Array, Array]]
    ) -> tuple[Tree, tuple[Array, Array, Array]]:
        total, examples = carry
        total = jax.tree.map(jnp.add, total, sum_of(*examples))
        # The next block is prepared here and carried over the loop's boundary. XLA would otherwise
        # recompute the change of layout in every slice of the convolutions' patches.
        return total, block(i + 1)

    start = (_accurate_zeros(params), block(jnp.int32(0)))
    blocks = longest((data.size + batch_size - 1) // batch_size)
    total, _ = jax.lax.fori_loop(0, blocks, step, start)
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(data.size, 1), total)


def _weighted_block(
    model: Model, data: ClientData, batch_size: int, i: Array
) -> tuple[Array, Array, Array]:
    """Return the prepared inputs, the labels and the weights of a block of examples."""
    positions = i * batch_size + jnp.arange(batch_size)
    inputs, labels = data.take(positions)
    return model.prepare(inputs), labels, (positions < data.size).astype(jnp.float32)


def normalize_per_layer(fisher: Tree) -> Tree:
    """Return each tensor scaled to [0, 1], (F - min F) / (max F - min F), or 0 if it is constant.

    References:
        Yang et al., NeurIPS 2023, eq. 5. The published code leaves 0/0 in a constant tensor.

    >>> fisher = {"w": jnp.array([1.0, 2.0, 5.0]), "b": jnp.array([3.0, 3.0])}
    >>> normalize_per_layer(fisher)["w"].tolist()
    [0.0, 0.25, 1.0]
    """

    def scale(leaf: Array) -> Array:
        low = leaf.min()
        high = leaf.max()
        spread = high - low
        # `where` computes both branches, so a constant tensor divides by 1.
        return jnp.where(spread > 0, (leaf - low) / jnp.where(spread > 0, spread, 1), 0)

    return jax.tree.map(scale, fisher)


def normalize_over_all(fisher: Tree) -> Tree:
    """Return all tensors scaled together to [0, 1] (ADP-PFL, eq. 14). Equal numbers become 0."""
    flat, unravel = ravel_pytree(fisher)
    # The flat vector counts as a single tensor.
    return unravel(normalize_per_layer(flat))


def _squares_one_by_one(
    model: Model, params: Params, x: Array, labels: Array, weights: Array, chunk: int = 8
) -> Tree:
    """Return the sum of `fisher_diagonal` by one gradient per example, a chunk at a time."""
    chunk = min(chunk, len(labels))
    axis = _batch_axis(model)

    def loss(p: Params, x: Array, label: Array, weight: Array) -> Array:
        return weight * model.task.loss(model.apply(p, jnp.expand_dims(x, axis)), label[None])[0]

    def step(total: Tree, examples: tuple[Array, Array, Array]) -> tuple[Tree, None]:
        gradients = jax.vmap(functools.partial(jax.grad(loss), params))(*examples)
        return jax.tree.map(lambda t, g: t + (g * g).sum(0), total, gradients), None

    arrays = (jnp.moveaxis(x, axis, 0), labels, weights)
    examples = jax.tree.map(functools.partial(_chunked, chunk), arrays)
    total, _ = jax.lax.scan(step, _accurate_zeros(params), examples)
    return total


def _chunked(chunk: int, array: Array) -> Array:
    """Return the array [B, ...] as chunks [B / chunk, chunk, ...]."""
    inner_axes = [(0, 0)] * (array.ndim - 1)
    # Examples that fill up the last chunk have the weight 0.
    padded = jnp.pad(array, [(0, -len(array) % chunk), *inner_axes])
    return padded.reshape(-1, chunk, *array.shape[1:])


def _accurate_zeros(params: Params) -> Tree:
    """Return zeros like the parameters, in single precision at least, so that sums are accurate."""

    def zeros(leaf: Array) -> Array:
        return jnp.zeros_like(leaf, jnp.promote_types(leaf.dtype, jnp.float32))

    return jax.tree.map(zeros, params)


def _batch_axis(model: Model) -> int:
    """Return the axis along which a prepared batch has its examples.

    It is the axis whose length differs between batches of two and three examples. A model that
    accepts inputs of any shape must have it first.
    """
    if model.input_shape is None:
        return 0
    batches = [jax.ShapeDtypeStruct((size, *model.input_shape), jnp.uint8) for size in (2, 3)]
    # Only shapes are computed here.
    two, three = (jax.eval_shape(model.prepare, batch).shape for batch in batches)
    lengths = zip(two, three, strict=True)
    return next(axis for axis, (of_two, of_three) in enumerate(lengths) if of_two != of_three)
