"""Sums and values over all examples of a client, block by block."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Bool, Int, Shaped

from jaxfl.local.lanes import longest, zeros_of
from jaxfl.types import ClientData, Model, Tree

_EXAMPLES_PER_SUM = 128
"""Number of examples that are summed at once."""


def summed(
    model: Model,
    data: ClientData,
    of_batch: Callable[[Array, Array, Bool[Array, "B"]], Tree],
) -> Tree:
    """Return the sum of a function over a client's examples, block by block, or zeros without any.

    Args:
        model: Network that prepares the inputs.
        data: Examples of the client.
        of_batch: Function that returns a tree of sums over a batch. Its arguments are prepared
            inputs [B, ...], labels [B, ...], and a mask [B] of the examples that are not padding.

    >>> from jaxfl.models import mlp
    >>> inputs, labels = jnp.ones((3, 2)), jnp.array([1, 0, 1])
    >>> data = ClientData(inputs, labels, jnp.arange(3), jnp.array(2))
    >>> ones = lambda x, labels, real: jnp.sum(jnp.where(real, labels, 0))
    >>> summed(mlp((2,), 2), data, ones)
    Array(1, dtype=int32)
    """
    batch = min(_EXAMPLES_PER_SUM, data.padded)

    def of_block(block_index: Int[Array, ""] | int) -> Tree:
        positions = block_index * batch + jnp.arange(batch)
        inputs, labels = data.take(positions)
        return of_batch(model.prepare(inputs), labels, positions < data.size)

    def add(block_index: Int[Array, ""], total: Tree) -> Tree:
        return optax.tree.add(total, of_block(block_index))

    # A loop's sum needs its shapes first, and a client without examples has a sum of 0, too.
    shapes = jax.eval_shape(lambda: of_block(0))
    nothing = zeros_of(shapes)
    blocks = longest(-(-data.size // batch))
    return lax.fori_loop(0, blocks, add, nothing)


def computed(
    model: Model, data: ClientData, of_inputs: Callable[[Array], Array], *, batch: int
) -> Shaped[Array, "N ..."]:
    """Return a function's values for a client's positions, block by block.

    The number N of positions is that of the client, rounded up to full blocks. Padding has zeros,
    or the values of inputs of 0.

    Args:
        model: Network that prepares the inputs.
        data: Examples of the client.
        of_inputs: Function of prepared inputs [B, ...] that returns values [B, ...].
        batch: Number B of examples in a block.
    """

    def block(start: Int[Array, ""]) -> Shaped[Array, "B ..."]:
        inputs, _ = data.take(start + jnp.arange(batch))
        return of_inputs(model.prepare(inputs))

    def put(i: Int[Array, ""], values: Shaped[Array, "N ..."]) -> Shaped[Array, "N ..."]:
        return lax.dynamic_update_slice_in_dim(values, block(i * batch), i * batch, axis=0)

    shape = jax.eval_shape(block, jnp.zeros((), jnp.int32))
    positions = data.padded + -data.padded % batch
    # Blocks beyond the last one that is computed keep these zeros.
    values = jnp.zeros((positions, *shape.shape[1:]), shape.dtype)
    return lax.fori_loop(0, longest(-(-data.size // batch)), put, values)
