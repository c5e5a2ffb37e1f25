"""The gradient of a DP-SGD step: a Poisson batch whose examples are clipped one by one, and noise on their sum."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Int, Key

from jaxfl.privacy.clip import clip
from jaxfl.privacy.mechanism import PerExample, coins
from jaxfl.privacy.noise import add_gaussian, derive
from jaxfl.types import ClientData, Params, Tree

_CHUNK = 16


def noisy_gradient(
    key: Key[Array, "*S"],
    params: Params,
    data: ClientData,
    private: PerExample,
    *,
    apply: Callable[[Params, Array], Float[Array, "B K"]],
    prepare: Callable[[Array], Array],
    loss: Callable[[Array, Array, Array], Float[Array, ""]],
    noise_multiplier: Float[Array, ""] | float,
    norms: Callable[[Params, Array, Float[Array, "B"]], Float[Array, "B K"]] | None = None,
) -> tuple[Float[Array, ""], Tree]:
    r"""Mean loss of a batch, and :math:`\frac{1}{q n} \big( \sum_{j \in B} \mathrm{clip}_C(\nabla \ell_j) +
    N(0, z^2 C^2 I) \big)`.

    Every example is in B with probability q, independently; B may be empty. Its examples are taken `private.chunk` at a
    time, so that the time follows the batch that was drawn, and nothing is truncated. One whose gradient is not finite
    contributes nothing: else the engine would drop the client's whole update for it.

    Args:
        key: the batch and the noise.
        params: where the gradient is taken.
        data: the client's rows; padding is never drawn.
        private: C, q and the chunk.
        apply: logits of a prepared batch.
        prepare: normalises and lays out a batch.
        loss: of logits, labels and weights; called with one example.
        noise_multiplier: z, std of the noise on the sum over C.
        norms: `Model.norms`: two gradients of the batch in place of one per example.

    References: Goodfellow, Efficient Per-Example Gradient Computations, 2015 (norms of dense layers).
    """  # noqa: D205
    batch_key, noise_key = (derive(key, purpose) for purpose in range(2))
    padded = data.padded
    chunk = min(private.chunk or (1 if norms is None else _CHUNK), padded)
    drawn = coins(batch_key, padded, private.rate) & (jnp.arange(padded) < data.size)
    count = jnp.sum(drawn)
    order = jnp.nonzero(drawn, size=-(-padded // chunk) * chunk, fill_value=0)[0]

    def losses(apply: Callable, params: Params, x: Array, labels: Array) -> Float[Array, "B"]:
        return jax.vmap(lambda one, label: loss(one[None], label[None], jnp.ones(1)))(apply(params, x), labels)

    def squares(params: Params, x: Array, labels: Array) -> Float[Array, "B"]:
        assert norms is not None
        probed = lambda probe: jnp.sum(losses(lambda params, x: norms(params, x, probe), params, x, labels))  # noqa: E731
        return jax.grad(probed)(jnp.zeros(len(labels)))

    losses_fn = functools.partial(losses, apply)
    if norms is None:
        clipped_sum = _one_by_one
    else:  # an accelerator's TensorFloat-32 would round norms and gradients differently
        clipped_sum = jax.default_matmul_precision("float32")(functools.partial(_by_norms, squares))

    def add(i: Int[Array, ""], total: tuple) -> tuple:
        inputs, labels = data.take(lax.dynamic_slice(order, (i * chunk,), (chunk,)))
        batch = inputs, labels, i * chunk + jnp.arange(chunk) < count
        return optax.tree.add(total, clipped_sum(losses_fn, prepare, params, batch, private.clip))

    # Gradients, their clipping, sum and noise are single precision, whatever the weights are in.
    dtypes, params = params, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    zero = (jnp.zeros(()), optax.tree.zeros_like(params))
    value, total = lax.fori_loop(0, -(-count // chunk), add, zero)
    total = add_gaussian(noise_key, total, jnp.asarray(noise_multiplier * private.clip, jnp.float32))
    expected = private.rate * jnp.maximum(data.size, 1)
    mean = jax.tree.map(lambda leaf, old: (leaf / expected).astype(old.dtype), total, dtypes)
    return value / jnp.maximum(count, 1), mean


def _one_by_one(losses_fn: Callable, prepare: Callable, params: Params, batch: tuple, bound: float) -> tuple:
    """Sums of losses and of clipped gradients: each gradient is made, clipped and added."""

    def one(inputs: Array, label: Array, real: Array) -> tuple[Float[Array, ""], Tree]:
        x = prepare(inputs[None])
        value, slope = jax.value_and_grad(lambda params: losses_fn(params, x, label[None])[0])(params)
        clipped, norm = clip(slope, bound)
        return jax.tree.map(lambda leaf: jnp.where(real & jnp.isfinite(norm), leaf, 0), (value, clipped))

    if len(batch[1]) == 1:  # plain code: a batch axis of 1 would cost the fast matrix products
        return one(*(leaf[0] for leaf in batch))
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), jax.vmap(one)(*batch))


def _by_norms(
    squares_fn: Callable, losses_fn: Callable, prepare: Callable, params: Params, batch: tuple, bound: float
) -> tuple:
    """The same sums as the gradient of the losses, each weighted by its clipping factor."""
    inputs, labels, real = batch
    squares = squares_fn(params, prepare(inputs), labels)
    counts = real & jnp.isfinite(squares)
    factor = jnp.minimum(1.0, bound * lax.rsqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny)))
    factor = jnp.where(counts, factor, 0.0)
    x = prepare(jnp.where(counts.reshape(-1, *[1] * (inputs.ndim - 1)), inputs, 0))  # 0 times infinity is no number

    def weighted(params: Params) -> tuple[Float[Array, ""], Float[Array, "B"]]:
        each = losses_fn(params, x, labels)
        return jnp.sum(factor * each), each

    slope, each = jax.grad(weighted, has_aux=True)(params)
    return jnp.sum(jnp.where(counts, each, 0.0)), slope
