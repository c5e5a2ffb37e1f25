"""The local training loop that all methods share."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Key

from jaxfl._support.checks import check_key, checked, count_from_0
from jaxfl.local.lanes import begin, hold, longest
from jaxfl.local.masks import keep
from jaxfl.local.optimizers import (
    Decay,
    Mask,
    decayed,
    first_state,
    trainable_of,
    weights_to_keep,
)
from jaxfl.local.sums import computed
from jaxfl.types import ClientData, Model, Params, Tree

STEP = "local_step"
"""Name of the `jax.named_scope` around one local step."""

_BLOCK_EXAMPLES = 128
"""Approximate number of examples that are gathered and laid out at once, in whole batches.

It is so small that a small client among large ones stays cheap.
"""

LossTerm: TypeAlias = Callable[[Params], Float[Array, ""]]
"""Function from parameters to a term that is added to the loss."""
BatchLoss: TypeAlias = Callable[[Any, Array, Float[Array, "B"]], Float[Array, ""]]
"""Function from a batch's outputs, labels and weights to its mean loss. Padding has weight 0."""
Apply: TypeAlias = Callable[[Params, Array, Key[Array, ""]], Any]
"""Function from parameters, a prepared batch, and a key for layers that draw, to outputs."""
GradientFn: TypeAlias = Callable[[Params], tuple[Float[Array, ""], Tree]]
"""Function from parameters to a value and its gradient."""


@checked(epochs=count_from_0)
@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Local training by minibatch steps over a client's own examples, with a fresh optimizer state.

    Args:
        optimizer: Any optax transformation. A schedule in it starts again in every round, because
            its state does. With `optax.contrib.schedule_free`, training returns the weights for
            evaluation, and `decay` must be None.
        batch_size: Number B of examples per step. The last batch of an epoch may be smaller.
        epochs: Number of passes over the client's examples, unless `steps` is given. 0 leaves the
            parameters unchanged.
        steps: Number of steps, however many passes they take. None trains for `epochs`.
        decay: Schedule as in optax, from a round's index (from 0) to a factor of all updates in
            that round. It scales the learning rate of SGD, with momentum or without. Training for
            an evaluation has the factor of the last round. None stands for a factor of 1.

    >>> halves = optax.exponential_decay(1.0, transition_steps=10, decay_rate=0.5)
    >>> LocalSGD(optax.sgd(0.1), decay=halves).batch_size
    32
    >>> LocalSGD(optax.sgd(0.1), batch_size=0)
    Traceback (most recent call last):
    ValueError: batch_size must be a whole number of at least 1, got 0. Give for instance 1.
    """

    optimizer: optax.GradientTransformation
    batch_size: int = 32
    epochs: int = 1
    steps: int | None = None
    decay: Decay | None = None

    def train(
        self,
        key: Key[Array, ""],
        model: Model,
        params: Params,
        data: ClientData,
        *,
        apply: Apply | None = None,
        mask: Mask = None,
        penalty: LossTerm | None = None,
        loss: BatchLoss | None = None,
        gradient: Callable[[GradientFn], GradientFn] | None = None,
    ) -> tuple[Params, dict[str, Array]]:
        """Train the parameters on a client's examples, by `jaxfl.local.train.train`.

        Args:
            key: Key for the order of the examples, and for layers that draw.
            model: Network that prepares the inputs.
            params: Parameters at the start.
            data: Examples of the client.
            apply: Function `apply(params, x, key)` that computes outputs of a prepared batch. None
                takes that of the model.
            mask: Trainable coordinates (bool, shaped like `params`), or a function from parameters
                to them. None trains all.
            penalty: Function `penalty(params)` whose value is added to the mean loss of every
                batch. To stay near a broadcast, let it close over the broadcast.
            loss: Function `loss(outputs, labels, weights)` that returns the mean loss of a batch.
                None takes that of the model's task.
            gradient: Change of each step's gradient, such as `jaxfl.local.sam.sam`. None changes
                nothing.

        Returns:
            The trained parameters, and a dict of the mean `loss` over all steps, penalty included,
            and the number of `steps`. A client without examples takes no step, and has the loss 0.
        """
        return train(
            key,
            params,
            data,
            local=self,
            apply=apply or model.apply,
            prepare=model.prepare,
            loss=loss or model.task.mean_loss,
            mask=mask,
            penalty=penalty,
            gradient=gradient,
            microbatch=model.largest_part,
        )

    @property
    def dp_sgd(self) -> None:
        """None, because these steps are not private (see `jaxfl.privacy.DPSGD`)."""
        return

    @property
    def trains(self) -> bool:
        """Whether local training takes any step."""
        return self.steps is not None or self.epochs > 0


@checked(key=check_key)
def train(
    key: Key[Array, ""],
    params: Params,
    data: ClientData,
    *,
    apply: Apply,
    prepare: Callable[[Array], Array],
    local: LocalSGD,
    loss: BatchLoss,
    mask: Mask = None,
    penalty: LossTerm | None = None,
    gradient: Callable[[GradientFn], GradientFn] | None = None,
    microbatch: int | None = None,
) -> tuple[Params, dict[str, Array]]:
    """Minimise a loss plus a penalty on one client's examples by minibatch steps.

    Every epoch visits each example once, in a fresh random order. The number of steps follows the
    client's own number of examples, unless `local.steps` is given. Training may end early once
    weights have become NaN.

    Args:
        key: Key for the order of the examples, and for layers that draw.
        params: Parameters at the start.
        data: Examples of the client. Padding is never visited.
        apply: Function that computes outputs of a prepared batch.
        prepare: Function that normalises and lays out a batch. It is called once per block of
            batches, outside the loop over steps.
        local: Optimizer, batch size, and number of epochs or steps.
        loss: Function from outputs, labels and weights to the mean loss of a batch.
        mask: Trainable coordinates (bool, shaped like `params`), or a function that gives them from
            the parameters at every step. All others keep their bits. None trains all coordinates.
        penalty: Function whose value is added to the mean loss of every batch. None adds nothing.
        gradient: Function from a batch's value and gradient to those of a step, such as
            `jaxfl.local.sam.sam`. None changes nothing.
        microbatch: Largest number of examples that go through `apply` at once. A batch's gradient
            is the sum over its parts. None takes all examples of a batch.

    Returns:
        The trained parameters, and a dict of the mean `loss` over all steps, penalty included, and
        the number of `steps`. A client without examples takes no step, and has the loss 0.

    Raises:
        ValueError: The optimizer is `optax.contrib.schedule_free` with a decay, or for a part of
            the parameters.
    """
    optimizer = decayed(local.optimizer, local.decay, data)
    layout = _layout_of(data.padded, local.batch_size, microbatch)
    batches = -(-data.size // layout.batch)
    total = _steps_of(local, data, batches)
    value_and_gradient = _penalised_gradient(apply, loss, penalty)

    def step(carry: tuple, key: Key[Array, ""], x: Array, labels: Array, weights: Array) -> tuple:
        of_batch = functools.partial(
            value_and_gradient, key=key, x=x, labels=labels, weights=weights
        )
        return descend(optimizer, of_batch, carry, mask=mask, gradient=gradient)

    def epoch(index: Int[Array, ""], carry: tuple) -> tuple:
        epoch_key = jax.random.fold_in(key, index)
        order = _epoch_order(epoch_key, data, layout)
        # The last epoch ends early if the number of steps is given.
        epoch_batches = jnp.minimum(batches, total - index * batches)
        examples_of = functools.partial(_block_of, data, prepare, layout, order)
        return _over_batches(step, carry, epoch_key, epoch_batches, layout, examples_of)

    start = (begin(params), first_state(optimizer, params, local.decay), jnp.zeros(()))
    epochs = longest(-(-total // jnp.maximum(batches, 1)))
    params, state, total_loss = lax.fori_loop(0, epochs, epoch, start)
    params = weights_to_keep(state, params, mask, total)
    return params, {"loss": total_loss / jnp.maximum(total, 1), "steps": total.astype(jnp.float32)}


class _Layout(NamedTuple):
    """Division of a client's positions into blocks of batches, and of batches into parts.

    It follows the padded length, which is static. Loops follow the client's own size.
    """

    batch: int
    """Number of examples of a batch."""
    part: int
    """Number of examples that go through the network at once. It divides that of a batch."""
    blocks: int
    per_block: int
    """Number of batches of a block, whose examples are gathered at once."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Axes [batches, parts, examples] of a block."""
        return self.per_block, self.batch // self.part, self.part


def _layout_of(padded: int, batch_size: int, microbatch: int | None) -> _Layout:
    """Return the layout of `padded` positions, without parts if `microbatch` is None."""
    batch = min(batch_size, padded)
    # The part's size divides the batch, so parts need no padding.
    most = min(microbatch or batch, batch)
    part = next(n for n in range(most, 0, -1) if batch % n == 0)
    return _Layout(batch, part, *blocks_of(padded, batch))


def _steps_of(local: LocalSGD, data: ClientData, batches: Int[Array, ""]) -> Int[Array, ""]:
    """Return the number of steps, or 0 without examples. An epoch has `batches` steps."""
    has_examples = data.size > 0
    wanted_steps = local.epochs * batches if local.steps is None else local.steps
    return jnp.where(has_examples, wanted_steps, 0)


def _penalised_gradient(
    apply: Apply, loss: BatchLoss, penalty: LossTerm | None
) -> Callable[..., tuple[Float[Array, ""], Tree]]:
    """Return a function of parameters and a batch: value and gradient of loss plus penalty.

    The batch has axes [parts, part, ...].
    """

    def value_and_gradient(
        params: Params, key: Key[Array, ""], x: Array, labels: Array, weights: Array
    ) -> tuple[Float[Array, ""], Tree]:
        # The loss of a part is a mean, so each part counts by its share of the real examples.
        shares = jnp.sum(weights, axis=1) / jnp.maximum(jnp.sum(weights), 1.0)

        def loss_of(params: Params, i: Int[Array, ""] | int) -> Float[Array, ""]:
            share = shares[i]
            outputs = apply(params, x[i], jax.random.fold_in(key, i))
            return share * loss(outputs, labels[i], weights[i])

        def penalised_loss(params: Params) -> Float[Array, ""]:
            return loss_of(params, 0) + penalty_of(penalty, params)

        # Without parts, a single backward pass serves both the loss and the penalty.
        if len(x) == 1:
            return jax.value_and_grad(penalised_loss)(params)

        def add(i: Int[Array, ""], total: tuple) -> tuple:
            return optax.tree.add(total, jax.value_and_grad(loss_of)(params, i))

        # The penalty counts once for a batch, and not once for each part.
        start = jax.value_and_grad(functools.partial(penalty_of, penalty))(params)
        return lax.fori_loop(0, len(x), add, start)

    return value_and_gradient


def _epoch_order(key: Key[Array, ""], data: ClientData, layout: _Layout) -> Int[Array, "N"]:
    """Return the order of an epoch's positions, padded to whole blocks."""
    padded = data.padded
    order = _shuffle(key, padded, data.size)
    # Positions that fill the last block read example 0 with the weight 0.
    return jnp.pad(order, (0, layout.blocks * layout.per_block * layout.batch - padded))


def _block_of(
    data: ClientData,
    prepare: Callable[[Array], Array],
    layout: _Layout,
    order: Int[Array, "N"],
    block_index: Int[Array, ""],
) -> tuple[Array, Array, Array]:
    """Return the prepared inputs, labels and weights of a block, with the axes of the layout."""
    count = layout.per_block * layout.batch
    start = block_index * layout.per_block * layout.batch
    positions = (start + jnp.arange(count)).reshape(layout.shape)
    chosen = lax.dynamic_slice(order, (start,), (count,)).reshape(layout.shape)
    inputs, labels = data.take(chosen)
    x = jax.vmap(jax.vmap(prepare))(inputs)
    # Real examples come first in the order, so a position below the size is a real one.
    return x, labels, (positions < data.size).astype(jnp.float32)


def _over_batches(
    step: Callable[..., tuple],
    carry: tuple,
    key: Key[Array, ""],
    batches: Int[Array, ""],
    layout: _Layout,
    examples_of: Callable[[Any], tuple],
) -> tuple:
    """Return the carry after a step on each of an epoch's batches, block by block.

    Args:
        step: Function of the carry, a key, and a batch's inputs, labels and weights.
        carry: The carry before the epoch, whose first entry is the parameters.
        key: Key of the epoch.
        batches: Number of batches in the epoch.
        layout: Division of the client's positions.
        examples_of: Function from the index of a block to its inputs, labels and weights.
    """
    per_block = layout.per_block

    def unfinished(progress: tuple) -> Bool[Array, ""]:
        block_index, carry = progress
        return longest((block_index * per_block < batches) & ~_lost(carry[0]))

    def block(progress: tuple) -> tuple:
        block_index, carry = progress
        x, labels, weights = examples_of(block_index)

        def step_or_hold(i: Int[Array, ""], carry: tuple) -> tuple:
            batch_key = jax.random.fold_in(key, block_index * per_block + i)
            new = step(carry, batch_key, x[i], labels[i], weights[i])
            return hold(block_index * per_block + i < batches, new, carry)

        steps = longest(jnp.minimum(per_block, batches - block_index * per_block))
        return block_index + 1, lax.fori_loop(0, steps, step_or_hold, carry)

    _, carry = lax.while_loop(unfinished, block, (0, carry))
    return carry


def check_head(model: Model) -> None:
    """Require a model with a head."""
    if not model.head:
        raise ValueError(
            f"model must name the layers of its head, got model={model.name!r}, which has no head. "
            "Give a model whose `head` names its last layers."
        )


def fit_head(
    key: Key[Array, ""],
    model: Model,
    params: Params,
    data: ClientData,
    *,
    local: LocalSGD,
    penalty: LossTerm | None = None,
) -> tuple[Params, dict[str, Array]]:
    """Train the head alone, on features that the frozen extractor computes once.

    If the model cannot be split, the head trains through the full network.

    Args:
        key: Key for the order of the examples, and for layers that draw.
        model: Network that names the head, and splits `apply` into `extract` and `classify`.
        params: All parameters. Those of the extractor keep their bits.
        data: Examples of the client.
        local: Optimizer, batch size, and number of epochs or steps.
        penalty: Function whose value is added to the mean loss of every batch. It gets the head's
            parameters if the model can be split, and all parameters otherwise. None adds nothing.

    Returns:
        All parameters, and a dict of the mean `loss` over all steps, penalty included, and the
        number of `steps`.
    """
    extract = model.extract
    classify = model.classify
    # Without a split, a mask freezes the extractor, which then runs in every step.
    if extract is None or classify is None:
        mask = _head_mask(model, params)
        return local.train(key, model, params, data, mask=mask, penalty=penalty)
    head = {name: params[name] for name in model.head}
    # Wrappers of models keep entries of their own besides the layers.
    entries = {name: params[name] for name in params if name not in model.layers}

    def apply(head: Params, features: Array, *key: Array) -> Array:
        return classify({**head, **entries}, features, *key)

    head, info = train(
        key,
        head,
        _features_of(model, data, functools.partial(extract, params)),
        apply=apply,
        # `computed` has prepared the inputs that became features.
        prepare=lambda x: x,
        local=local,
        loss=model.task.mean_loss,
        penalty=penalty,
    )
    return {**params, **head}, info


def _head_mask(model: Model, params: Params) -> Tree:
    """Return the mask of the head's parameters."""

    def mask_of(name: str) -> Tree:
        in_head = name in model.head
        return jax.tree.map(lambda _: in_head, params[name])

    return {name: mask_of(name) for name in params}


def _features_of(model: Model, data: ClientData, extract: Callable[[Array], Array]) -> ClientData:
    """Return the client's data with features in place of inputs. No feature needs preparing."""
    batch = min(_BLOCK_EXAMPLES // 2, data.padded)
    features = computed(model, data, extract, batch=batch)
    positions = jnp.arange(len(features))
    _, labels = data.take(positions)
    return ClientData(features, labels, positions[: data.padded], data.size, round=data.round)


def fit_layers(
    key: Key[Array, ""],
    model: Model,
    params: Params,
    data: ClientData,
    *,
    local: LocalSGD,
    layers: Collection[str],
) -> Params:
    """Train the given layers alone. All other parameters keep their bits.

    Args:
        key: Key for the order of the examples, and for layers that draw.
        model: Network that names its layers.
        params: All parameters, also those that belong to no layer.
        data: Examples of the client.
        local: Optimizer, batch size, and number of epochs or steps.
        layers: Names of the layers to train. If they are the head's, `fit_head` trains them.

    Returns:
        All parameters.
    """
    if set(layers) == set(model.head):
        return fit_head(key, model, params, data, local=local)[0]

    def apply(own: Params, x: Array, *key: Array) -> Array:
        return model.apply({**params, **own}, x, *key)

    own, _ = local.train(key, model, {name: params[name] for name in layers}, data, apply=apply)
    return {**params, **own}


@jax.named_scope(STEP)
def descend(
    optimizer: optax.GradientTransformation,
    gradient_fn: GradientFn,
    carry: tuple,
    *,
    mask: Mask = None,
    gradient: Callable[[GradientFn], GradientFn] | None = None,
) -> tuple:
    """Take one step of an optimizer, as part of `train`.

    Args:
        optimizer: Optimizer of the step.
        gradient_fn: Function from parameters to a batch's value and gradient.
        carry: Parameters, the optimizer's state, and the sum of values so far.
        mask: Trainable coordinates, or a function from parameters to them. None trains all.
        gradient: Change of the step's gradient, such as `jaxfl.local.sam.sam`.

    Returns:
        The carry after the step.
    """
    params, state, total_loss = carry
    trainable = trainable_of(mask, params)

    def select(tree: Tree) -> Tree:
        if trainable is None:
            return tree
        return keep(trainable, tree)

    def selected(params: Params) -> tuple[Float[Array, ""], Tree]:
        value, slope = gradient_fn(params)
        return value, select(slope)

    # The selection is inside, so that SAM ascends along trainable coordinates only.
    of_step = selected
    if gradient is not None:
        of_step = gradient(selected)
    value, slope = of_step(params)
    updates, state = optimizer.update(slope, state, params)
    # Weight decay and momentum would also move coordinates that are not trainable.
    updates = select(updates)
    return optax.apply_updates(params, updates), state, total_loss + value


def penalty_of(penalty: LossTerm | None, params: Params) -> Float[Array, ""]:
    """Return the value of the penalty at `params`, or 0 if there is no penalty."""
    if penalty is None:
        return jnp.zeros(())
    return penalty(params)


def blocks_of(padded: int, batch: int) -> tuple[int, int]:
    """Return the numbers of blocks, and of batches per block, that cover `padded` examples.

    The examples of a block are gathered at once.
    """
    batches = -(-padded // batch)
    blocks = max(1, round(batches * batch / _BLOCK_EXAMPLES))
    per_block = -(-batches // blocks)
    return -(-batches // per_block), per_block


def _lost(params: Params) -> Bool[Array, ""]:
    """Return whether the first numbers of the leaves add up to NaN, after which no step helps."""
    # Reading all numbers would take time. A NaN that is missed only costs further steps.
    leaves = jax.tree.leaves(params)
    return jnp.isnan(sum(leaf.reshape(-1)[0] for leaf in leaves if leaf.size))


def _shuffle(
    key: Key[Array, ""], padded: int, size: Int[Array | np.ndarray, ""]
) -> Int[Array, "N"]:
    """Return the real positions in random order, and then the padding.

    The order does not depend on how much padding there is.
    """
    positions = jnp.arange(padded, dtype=jnp.uint32)
    real = positions < size
    # A real position that draws the padding's rank among 23 bits still comes before the padding,
    # because ties are in order of positions.
    drawn = jax.random.bits(key, (padded,), jnp.uint32) >> 9
    ranks = jnp.where(real, drawn, 2**23 - 1)
    if padded > 2**9:
        return jnp.argsort(ranks).astype(jnp.int32)
    # The same order takes a sixth of the time if single numbers are sorted: the rank, above 9 bits
    # of the position.
    return (jnp.sort(ranks << 9 | positions) & 2**9 - 1).astype(jnp.int32)
