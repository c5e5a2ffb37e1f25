"""The gradient of a DP-SGD step: a Poisson batch whose examples are clipped one by one, and noise on their sum."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Int, Key

from jaxfl.privacy.clip import clip
from jaxfl.privacy.mechanism import PerExample
from jaxfl.privacy.noise import add_gaussian
from jaxfl.types import ClientData, Params, Tree


def noisy_gradient(
    key: Key[Array, ""],
    params: Params,
    data: ClientData,
    private: PerExample,
    *,
    apply: Callable[[Params, Array], Float[Array, "B K"]],
    prepare: Callable[[Array], Array],
    loss: Callable[[Array, Array, Array], Float[Array, ""]],
    noise_multiplier: Float[Array, ""] | float,
) -> tuple[Float[Array, ""], Tree]:
    r"""Mean loss of a batch, and :math:`\frac{1}{q n} \big( \sum_{j \in B} \mathrm{clip}_C(\nabla \ell_j) +
    N(0, z^2 C^2 I) \big)`.

    Every example is in B with probability q, independently; B may be empty. Its examples are taken `private.chunk` at a
    time, so that the time follows the batch that was drawn, and nothing is truncated.

    Args:
        key: the batch and the noise.
        params: where the gradient is taken.
        data: the client's rows; padding is never drawn.
        private: C, q and the chunk.
        apply: logits of a prepared batch.
        prepare: normalises and lays out a batch.
        loss: of logits, labels and weights; called with one example.
        noise_multiplier: z, std of the noise on the sum over C.
    """  # noqa: D205
    batch_key, noise_key = jax.random.split(key)
    padded = data.rows.shape[0]
    chunk = min(private.chunk, padded)
    coins = jax.random.uniform(batch_key, (padded,)) < private.rate
    drawn = coins & (jnp.arange(padded) < data.size)
    count = jnp.sum(drawn)
    order = jnp.nonzero(drawn, size=-(-padded // chunk) * chunk, fill_value=0)[0]

    def one(position: Int[Array, ""], real: Array) -> tuple[Float[Array, ""], Tree]:
        row = data.rows[position]
        x, label = prepare(data.inputs[row][None]), data.labels[row][None]
        value, slope = jax.value_and_grad(lambda params: loss(apply(params, x), label, jnp.ones(1)))(params)
        clipped, _ = clip(slope, private.clip)
        return jax.tree.map(lambda leaf: jnp.where(real, leaf, 0), (value, clipped))

    def add(i: Int[Array, ""], total: tuple) -> tuple:
        if chunk == 1:  # plain code: a batch axis of 1 would cost the fast matrix products
            return optax.tree.add(total, one(order[i], jnp.bool_(True)))
        places = i * chunk + jnp.arange(chunk)
        each = jax.vmap(one)(lax.dynamic_slice(order, (i * chunk,), (chunk,)), places < count)
        return optax.tree.add(total, jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), each))

    zero = (jnp.zeros(()), optax.tree.zeros_like(params))
    value, total = lax.fori_loop(0, -(-count // chunk), add, zero)
    total = add_gaussian(noise_key, total, jnp.asarray(noise_multiplier * private.clip, jnp.float32))
    expected = private.rate * jnp.maximum(data.size, 1)
    return value / jnp.maximum(count, 1), optax.tree.scale(1 / expected, total)
