"""The one local training loop that all methods share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Key

from jaxfl._validate import at_least_0, check_key, checked, nonzero
from jaxfl.local.examples import noisy_gradient
from jaxfl.local.masks import keep
from jaxfl.privacy.mechanism import PerExample
from jaxfl.privacy.noise import derive
from jaxfl.types import ClientData, Model, Number, Params, StepNoise, Tree

_BLOCK_EXAMPLES = 128
"""Examples gathered and laid out at once: few enough that a small client among large ones does not pay for them."""


def cross_entropy(logits: Float[Array, "B K"], labels: Int[Array, "B"], weights: Float[Array, "B"]) -> Float[Array, ""]:
    """Mean cross-entropy over the examples of weight 1; those of weight 0 are padding."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def squared_error(logits: Float[Array, "B K"], labels: Int[Array, "B"], weights: Float[Array, "B"]) -> Float[Array, ""]:
    """Mean squared error to the targets 0.9 (the label) and -0.1 (others), over examples of weight 1 and classes."""
    losses = jnp.mean((logits - (jax.nn.one_hot(labels, logits.shape[-1]) - 0.1)) ** 2, axis=-1)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def ascend(params: Params, gradient: Tree, radius: Number) -> Params:
    r"""Where SAM takes its gradient: :math:`w + \rho \, g / \|g\|_2`, one norm over the whole tree; w where g = 0.

    References: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, ICLR 2021, eq. 2.

    >>> ascend({"w": jnp.array([3.0, 4.0])}, {"w": jnp.array([3.0, 4.0])}, 0.5)
    {'w': Array([3.3, 4.4], dtype=float32)}
    """
    norm = jnp.maximum(jnp.asarray(optax.tree.norm(gradient)), jnp.finfo(jnp.float32).tiny)
    return jax.tree.map(lambda p, g: p + radius * (g / norm), params, gradient)


@checked(key=check_key, sam_radius=at_least_0)
def train(
    key: Key[Array, ""],
    params: Params,
    data: ClientData,
    *,
    apply: Callable[[Params, Array], Float[Array, "B K"]],
    prepare: Callable[[Array], Array],
    optimizer: optax.GradientTransformation,
    batch_size: int,
    epochs: int = 1,
    steps: int | None = None,
    mask: Tree | Callable[[Params], Tree] = None,
    penalty: Callable[[Params], Float[Array, ""]] | None = None,
    loss: Callable[[Array, Array, Array], Float[Array, ""]] = cross_entropy,
    sam_radius: Number = 0.0,
    microbatch: int | None = None,
    private: PerExample | None = None,
    norms: Callable[[Params, Array, Float[Array, "B"]], Float[Array, "B K"]] | None = None,
) -> tuple[Params, dict[str, Array]]:
    r"""Minimise a loss plus a penalty on one client's examples by minibatch steps.

    Every epoch visits the client's examples once, in a fresh random order, in batches of `batch_size`
    whose last one may be smaller; the number of steps follows the client's own size. Weights that have turned NaN take
    no further blocks of batches. With `private`, steps are those of DP-SGD instead: each on a Poisson batch of its own.

    Args:
        key: order of the examples.
        params: where training starts.
        data: the client's rows; padding is never visited.
        apply: logits of a prepared batch.
        prepare: normalises and lays out a batch; called per block of batches, outside the loop over steps.
        optimizer: any optax transformation, with a fresh state.
        batch_size: B.
        epochs: passes over the client's examples, unless `steps` is given.
        steps: number of steps, however many passes they take.
        mask: trainable coordinates (bool, shaped like params), or how they follow from the parameters at every step;
            others keep their bits.
        penalty: added to the mean loss of every batch.
        loss: of logits, labels and weights of a batch, 0 for padding: a mean over the others.
        sam_radius: rho of sharpness-aware steps, whose gradient is taken at `ascend` of the parameters; 0: plain steps.
        microbatch: how many examples go through `apply` at once, at most (None: the whole batch): a batch's gradient is
            the sum of its parts'.
        private: clips every example's gradient and adds noise, in its own number of steps on batches of its own; what a
            mask or a penalty reads must then be public, or follow from the parameters alone. How much noise, and its
            key, are the engine's (`data.noise`), which writes them into the ledger; without it `key` and the one
            multiplier of `private` are taken.
        norms: of the model that `apply` is of; makes private steps faster.

    Returns:
        The trained parameters, and the mean loss over all steps with the number of steps; also `private_steps`, where
        they were private.
    """
    if private is not None and nonzero(sam_radius):
        raise ValueError(f"sam_radius={sam_radius!r} reads every batch twice: give 0 where examples are private")
    padded = data.padded
    batch = min(batch_size, padded)
    blocks, per_block = blocks_of(padded, batch)
    part = next(n for n in range(min(microbatch or batch, batch), 0, -1) if batch % n == 0)
    shape = (per_block, batch // part, part)
    batches = -(-data.size // batch)
    total = jnp.where(data.size > 0, epochs * batches if steps is None else steps, 0)

    def rest(params: Params) -> Float[Array, ""]:
        return jnp.zeros(()) if penalty is None else penalty(params)

    def gradient(params: Params, x: Array, labels: Array, weights: Array) -> tuple[Float[Array, ""], Tree]:
        """Value and gradient of the loss and the penalty; the batch is in parts [parts, part, ...]."""
        share = jnp.sum(weights, axis=1) / jnp.maximum(jnp.sum(weights), 1.0)

        def loss_of(params: Params, i: Int[Array, ""] | int) -> Float[Array, ""]:
            return share[i] * loss(apply(params, x[i]), labels[i], weights[i])

        if len(x) == 1:
            return jax.value_and_grad(lambda params: loss_of(params, 0) + rest(params))(params)

        def add(i: Int[Array, ""], total: tuple) -> tuple:
            return optax.tree.add(total, jax.value_and_grad(loss_of)(params, i))

        return lax.fori_loop(0, len(x), add, jax.value_and_grad(rest)(params))

    def descend(gradient_fn: Callable[[Params], tuple[Array, Tree]], carry: tuple) -> tuple:
        params, state, total_loss = carry
        trainable = mask(params) if callable(mask) else mask

        def select(tree: Tree) -> Tree:
            return tree if trainable is None else keep(trainable, tree)

        value, slope = gradient_fn(params)
        if nonzero(sam_radius):
            slope = gradient_fn(ascend(params, select(slope), sam_radius))[1]
        updates, state = optimizer.update(select(slope), state, params)
        updates = select(updates)  # weight decay and momentum would move masked coordinates too
        return optax.apply_updates(params, updates), state, total_loss + value

    def step(x: Array, labels: Array, weights: Array, carry: tuple) -> tuple:
        return descend(lambda params: gradient(params, x, labels, weights), carry)

    def epoch(index: Int[Array, ""], carry: tuple) -> tuple:
        order = _shuffle(jax.random.fold_in(key, index), padded, data.size)
        order = jnp.pad(order, (0, blocks * per_block * batch - padded))
        here = jnp.minimum(batches, total - index * batches)

        def goes_on(progress: tuple) -> Bool[Array, ""]:
            number, carry = progress
            return (number * per_block < here) & ~_lost(carry[0])

        def block(progress: tuple) -> tuple:
            number, carry = progress
            start = number * per_block * batch
            positions = (start + jnp.arange(per_block * batch)).reshape(shape)
            inputs, labels = data.take(lax.dynamic_slice(order, (start,), (per_block * batch,)).reshape(shape))
            x = jax.vmap(jax.vmap(prepare))(inputs)
            weights = (positions < data.size).astype(jnp.float32)
            return number + 1, lax.fori_loop(
                0,
                jnp.minimum(per_block, here - number * per_block),
                lambda i, carry: step(x[i], labels[i], weights[i], carry),
                carry,
            )

        return lax.while_loop(goes_on, block, (0, carry))[1]

    start = (params, optimizer.init(params), jnp.zeros(()))
    if private is not None:
        noise = data.noise or StepNoise(jnp.asarray(private.noise_multiplier, jnp.float32).reshape(()), key)
        options: dict[str, Any] = {"apply": apply, "prepare": prepare, "loss": loss, "norms": norms}
        total = jnp.where(data.size > 0, private.steps, 0)

        def private_step(i: Int[Array, ""], carry: tuple) -> tuple:
            def noisy(params: Params) -> tuple[Array, Tree]:
                step_key = derive(noise.key, i)
                loss_part = noisy_gradient(
                    step_key, params, data, private, noise_multiplier=noise.multiplier, **options
                )
                return optax.tree.add(loss_part, jax.value_and_grad(rest)(params))

            return descend(noisy, carry)

        params, _, total_loss = lax.fori_loop(0, total, private_step, start)
    else:
        passes = -(-total // jnp.maximum(batches, 1))
        params, _, total_loss = lax.fori_loop(0, passes, epoch, start)
    steps_made = total.astype(jnp.float32)
    info = {"loss": total_loss / jnp.maximum(total, 1), "steps": steps_made}
    return params, info if private is None else info | {"private_steps": steps_made}


def train_model(
    key: Key[Array, ""],
    model: Model,
    params: Params,
    data: ClientData,
    *,
    apply: Callable[[Params, Array], Float[Array, "B K"]] | None = None,
    **options: Any,
) -> tuple[Params, dict[str, Array]]:
    """`train` on batches as the model takes them, through its own `apply` or another one around it.

    Args:
        key: order of the examples.
        model: prepares batches and names the microbatch.
        params: where training starts: the model's, or what `apply` takes.
        data: the client's rows.
        apply: logits of a prepared batch (None: the model's).
        options: the others of `train`.
    """
    own = {"apply": apply or model.apply, "prepare": model.prepare, "microbatch": model.microbatch}
    return train(key, params, data, **own, **options)


def fit_head(
    key: Key[Array, ""], model: Model, params: Params, data: ClientData, **options: Any
) -> tuple[Params, dict[str, Array]]:
    """Train the head alone, on features that the frozen extractor computes once where the model can be split.

    Args:
        key: order of the examples.
        model: names the head and splits `apply` into `extract` and `classify`.
        params: all parameters; the extractor's keep their bits.
        data: the client's rows.
        options: `optimizer`, `batch_size`, `epochs` or `steps`, `penalty` of `train`.
    """
    extract, classify = model.extract, model.classify
    if extract is None or classify is None:
        mask = {name: jax.tree.map(lambda _, own=name in model.head: own, params[name]) for name in params}
        return train_model(key, model, params, data, mask=mask, **options)
    batch = min(_BLOCK_EXAMPLES // 2, data.padded)
    positions = jnp.arange(data.padded + -data.padded % batch)

    def block(start: Int[Array, ""]) -> Float[Array, "B F"]:
        return extract(params, model.prepare(data.take(start + jnp.arange(batch))[0]))

    def put(i: Int[Array, ""], features: Float[Array, "N F"]) -> Float[Array, "N F"]:
        return lax.dynamic_update_slice(features, block(i * batch), (i * batch, 0))

    shape = jax.eval_shape(block, jnp.zeros((), jnp.int32))
    features = lax.fori_loop(0, -(-data.size // batch), put, jnp.zeros((len(positions), shape.shape[1]), shape.dtype))
    own = ClientData(features, data.take(positions)[1], positions[: data.padded], data.size)
    head = {name: params[name] for name in model.head}
    head, info = train(key, head, own, apply=classify, prepare=lambda x: x, **options)
    return {**params, **head}, info


def blocks_of(padded: int, batch: int) -> tuple[int, int]:
    """How many blocks, and batches in each, cover so many examples: a block is gathered and laid out at once."""
    batches = -(-padded // batch)
    blocks = max(1, round(batches * batch / _BLOCK_EXAMPLES))
    per_block = -(-batches // blocks)
    return -(-batches // per_block), per_block


def _lost(params: Params) -> Bool[Array, ""]:
    """Whether the first numbers of the leaves add up to NaN: no step mends it. Reading all would take time."""
    return jnp.isnan(sum(leaf.reshape(-1)[0] for leaf in jax.tree.leaves(params) if leaf.size))


def _shuffle(key: Key[Array, ""], padded: int, size: Int[Array | np.ndarray, ""]) -> Int[Array, "N"]:
    """Real positions in random order, then the padding; does not depend on how much padding there is."""
    positions = jnp.arange(padded, dtype=jnp.uint32)
    # 23 random bits. A real position that draws the padding's place still comes first: ties are in order of positions.
    places = jnp.where(positions < size, jax.random.bits(key, (padded,), jnp.uint32) >> 9, 2**23 - 1)
    if padded > 2**9:
        return jnp.argsort(places).astype(jnp.int32)
    # The same order, in a sixth of the time: single numbers, the place above 9 bits of the position.
    return (jnp.sort(places << 9 | positions) & 2**9 - 1).astype(jnp.int32)
