"""The local training loop that all methods share."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Key

from jaxfl._validate import check_key, checked, count_from_0
from jaxfl.local.lanes import begin, hold, longest
from jaxfl.local.masks import keep
from jaxfl.server import schedule_free, states_of
from jaxfl.types import ClientData, Model, Params, Tree

STEP = "local_step"
"""By this name a compiled program shows what is part of one."""

_RESTARTED: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar(
    "restarted", default=None
)

_BLOCK_EXAMPLES = 128
"""Examples gathered and laid out at once: few enough that a small client among large ones stays cheap."""

Mask: TypeAlias = Tree | Callable[[Params], Tree]
Penalty: TypeAlias = Callable[[Params], Float[Array, ""]]
BatchLoss: TypeAlias = Callable[[Any, Array, Float[Array, "B"]], Float[Array, ""]]
"""From a batch's outputs, labels and weights, 0 for padding, to a mean over the other examples."""
Apply: TypeAlias = Callable[[Params, Array, Key[Array, ""]], Any]
"""From parameters, a prepared batch, and a key for layers that draw, to outputs."""
Decay: TypeAlias = Callable[[Any], Any]
"""From the number of a round to a factor of its updates."""
GradientFn: TypeAlias = Callable[[Params], tuple[Float[Array, ""], Tree]]
"""From parameters to a value and its gradient."""


@checked(epochs=count_from_0)
@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """How a client trains: minibatch steps over its own examples, by an optimizer with a fresh state.

    Args:
        optimizer: any optax transformation. A schedule in it starts again in every round, because its state does. Of
            `optax.contrib.schedule_free`, the weights for evaluation are kept.
        batch_size: B; the last batch of an epoch may be smaller.
        epochs: passes over the client's examples, unless `steps` is given; 0 leaves the parameters as they are.
        steps: number of steps, however many passes they take.
        decay: a schedule as of optax, from a round's number (from 0) to a factor of all updates in that round. It
            scales the learning rate of SGD, with momentum or without. Training for an evaluation has the factor of the
            last round.

    >>> LocalSGD(optax.sgd(0.1), decay=optax.exponential_decay(1.0, transition_steps=10, decay_rate=0.5)).batch_size
    32
    >>> LocalSGD(optax.sgd(0.1), batch_size=0)
    Traceback (most recent call last):
    ValueError: batch_size=0: give a whole number of at least 1
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
        penalty: Penalty | None = None,
        loss: BatchLoss | None = None,
        gradient: Callable[[GradientFn], GradientFn] | None = None,
    ) -> tuple[Params, dict[str, Array]]:
        """`train` on batches of the model's inputs, through its own `apply` and its task's loss, or others."""
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
        """No private steps (see `jaxfl.privacy.DPSGD`)."""
        return

    @property
    def trains(self) -> bool:
        """Whether it takes any step."""
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
    penalty: Penalty | None = None,
    gradient: Callable[[GradientFn], GradientFn] | None = None,
    microbatch: int | None = None,
) -> tuple[Params, dict[str, Array]]:
    """Minimise a loss plus a penalty on one client's examples by minibatch steps.

    Every epoch visits each example once, in a fresh random order; the number of steps follows the client's own size.
    Once weights have turned NaN, no further block of batches is trained.

    Args:
        key: order of the examples, and what layers draw.
        params: where training starts.
        data: the client's rows; padding is never visited.
        apply: outputs of a prepared batch.
        prepare: normalises and lays out a batch; called per block of batches, outside the loop over steps.
        local: optimizer, batch size, and how long.
        loss: of outputs, labels and weights.
        mask: trainable coordinates (bool, shaped like params), or a function of the parameters that gives them at
            every step; all others keep their bits.
        penalty: added to the mean loss of every batch.
        gradient: from a batch's value and gradient to those of a step, such as `jaxfl.local.sam.sam` (None: the same).
        microbatch: largest number of examples through `apply` at once (None: the whole batch): a batch's gradient is
            the sum over its parts.

    Returns:
        The trained parameters, and the mean loss over all steps with the number of steps.
    """
    padded, optimizer = data.padded, decayed(local.optimizer, local.decay, data)
    batch = min(local.batch_size, padded)
    blocks, per_block = blocks_of(padded, batch)
    part = next(n for n in range(min(microbatch or batch, batch), 0, -1) if batch % n == 0)
    shape = (per_block, batch // part, part)
    batches = -(-data.size // batch)
    total = jnp.where(
        data.size > 0, local.epochs * batches if local.steps is None else local.steps, 0
    )

    def value_and_gradient(
        params: Params, key: Key[Array, ""], x: Array, labels: Array, weights: Array
    ) -> tuple[Float[Array, ""], Tree]:
        """Value and gradient of loss plus penalty; the batch is in parts [parts, part, ...]."""
        share = jnp.sum(weights, axis=1) / jnp.maximum(jnp.sum(weights), 1.0)

        def loss_of(params: Params, i: Int[Array, ""] | int) -> Float[Array, ""]:
            return share[i] * loss(
                apply(params, x[i], jax.random.fold_in(key, i)), labels[i], weights[i]
            )

        if len(x) == 1:
            return jax.value_and_grad(
                lambda params: loss_of(params, 0) + penalty_of(penalty, params)
            )(params)

        def add(i: Int[Array, ""], total: tuple) -> tuple:
            return optax.tree.add(total, jax.value_and_grad(loss_of)(params, i))

        return lax.fori_loop(
            0, len(x), add, jax.value_and_grad(lambda params: penalty_of(penalty, params))(params)
        )

    def epoch(index: Int[Array, ""], carry: tuple) -> tuple:
        epoch_key = jax.random.fold_in(key, index)
        order = _shuffle(epoch_key, padded, data.size)
        order = jnp.pad(order, (0, blocks * per_block * batch - padded))
        here = jnp.minimum(batches, total - index * batches)

        def goes_on(progress: tuple) -> Bool[Array, ""]:
            number, carry = progress
            return longest((number * per_block < here) & ~_lost(carry[0]))

        def block(progress: tuple) -> tuple:
            number, carry = progress
            start = number * per_block * batch
            positions = (start + jnp.arange(per_block * batch)).reshape(shape)
            inputs, labels = data.take(
                lax.dynamic_slice(order, (start,), (per_block * batch,)).reshape(shape)
            )
            x = jax.vmap(jax.vmap(prepare))(inputs)
            weights = (positions < data.size).astype(jnp.float32)

            def step(i: Int[Array, ""], carry: tuple) -> tuple:
                drawing = jax.random.fold_in(epoch_key, number * per_block + i)
                batch = {"key": drawing, "x": x[i], "labels": labels[i], "weights": weights[i]}
                of_batch = functools.partial(value_and_gradient, **batch)
                new = descend(optimizer, of_batch, carry, mask=mask, gradient=gradient)
                return hold(number * per_block + i < here, new, carry)

            steps = longest(jnp.minimum(per_block, here - number * per_block))
            return number + 1, lax.fori_loop(0, steps, step, carry)

        return lax.while_loop(goes_on, block, (0, carry))[1]

    start = (begin(params), first_state(optimizer, params, local.decay), jnp.zeros(()))
    params, state, total_loss = lax.fori_loop(
        0, longest(-(-total // jnp.maximum(batches, 1))), epoch, start
    )
    params = weights_to_keep(state, params, mask, total)
    return params, {"loss": total_loss / jnp.maximum(total, 1), "steps": total.astype(jnp.float32)}


def check_head(model: Model) -> None:
    """Require a head."""
    if not model.head:
        raise ValueError(
            f"model={model.name!r} has no head: give a model whose `head` names its last layers"
        )


def fit_head(
    key: Key[Array, ""],
    model: Model,
    params: Params,
    data: ClientData,
    *,
    local: LocalSGD,
    penalty: Penalty | None = None,
) -> tuple[Params, dict[str, Array]]:
    """Train the head alone, on features that the frozen extractor computes once if the model can be split.

    Args:
        key: order of the examples.
        model: names the head and splits `apply` into `extract` and `classify`.
        params: all parameters; the extractor's keep their bits.
        data: the client's rows.
        local: optimizer, batch size, and how long.
        penalty: of the parameters (only the head's if the model can be split).
    """
    extract, classify = model.extract, model.classify
    if extract is None or classify is None:
        mask = {
            name: jax.tree.map(lambda _, kept=name in model.head: kept, params[name])
            for name in params
        }
        return local.train(key, model, params, data, mask=mask, penalty=penalty)
    batch = min(_BLOCK_EXAMPLES // 2, data.padded)
    positions = jnp.arange(data.padded + -data.padded % batch)

    def block(start: Int[Array, ""]) -> Float[Array, "B ..."]:
        return extract(params, model.prepare(data.take(start + jnp.arange(batch))[0]))

    def put(i: Int[Array, ""], features: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        return lax.dynamic_update_slice_in_dim(features, block(i * batch), i * batch, axis=0)

    shape = jax.eval_shape(block, jnp.zeros((), jnp.int32))
    features = jnp.zeros((len(positions), *shape.shape[1:]), shape.dtype)
    features = lax.fori_loop(0, longest(-(-data.size // batch)), put, features)
    rows = ClientData(
        features, data.take(positions)[1], positions[: data.padded], data.size, round=data.round
    )
    head = {name: params[name] for name in model.head}
    beside = {name: params[name] for name in params if name not in model.layers}

    def apply(head: Params, features: Array, *key: Array) -> Array:
        return classify({**head, **beside}, features, *key)

    options: dict[str, Any] = {"local": local, "penalty": penalty, "loss": model.task.mean_loss}
    head, info = train(key, head, rows, apply=apply, prepare=lambda x: x, **options)
    return {**params, **head}, info


def fit_layers(
    key: Key[Array, ""],
    model: Model,
    params: Params,
    data: ClientData,
    *,
    local: LocalSGD,
    layers: Collection[str],
) -> Params:
    """Train some layers alone: the optimizer sees no others, which keep their bits.

    Args:
        key: order of the examples, and what layers draw.
        model: names its layers.
        params: all parameters, also those that are no layer's.
        data: the client's rows.
        local: optimizer, batch size, and how long.
        layers: names of the layers; those of the head are fitted as `fit_head` does it.
    """
    if set(layers) == set(model.head):
        return fit_head(key, model, params, data, local=local)[0]

    def apply(own: Params, x: Array, *key: Array) -> Array:
        return model.apply({**params, **own}, x, *key)

    own, _ = local.train(key, model, {name: params[name] for name in layers}, data, apply=apply)
    return {**params, **own}


def decayed(
    optimizer: optax.GradientTransformation, decay: Decay | None, data: ClientData
) -> optax.GradientTransformation:
    """An optimizer as it is in the client's round."""
    return optimizer if decay is None else optax.chain(optimizer, optax.scale(decay(data.round)))


@contextlib.contextmanager
def restarted() -> Iterator[list[optax.GradientTransformation]]:
    """Collect the optimizers with a schedule of their own whose training is traced inside."""
    found: list[optax.GradientTransformation] = []
    token = _RESTARTED.set(found)
    try:
        yield found
    finally:
        _RESTARTED.reset(token)


def first_state(
    optimizer: optax.GradientTransformation, params: Params, decay: Decay | None
) -> Tree:
    """Return an optimizer's state at the start of a round."""
    state = optimizer.init(params)
    if decay is not None and schedule_free(state):
        raise ValueError(
            f"decay must be None with optax.contrib.schedule_free, got {decay!r}. Leave decay out: the steps' average "
            "takes the place of a schedule."
        )
    found = _RESTARTED.get()
    if found is not None and states_of(state, _has_schedule):
        found.append(optimizer)
    return state


def weights_to_keep(state: Tree, params: Params, mask: Mask, steps: Int[Array, ""]) -> Params:
    """Return the weights that training ends with: those for evaluation of `optax.contrib.schedule_free`.

    The steps of any other optimizer end where they should. Masked coordinates keep their bits.
    """
    free = schedule_free(state)
    if not free:
        return params
    if len(free) > 1 or jax.tree.structure(free[0].z) != jax.tree.structure(params):
        raise ValueError(
            "optimizer must apply optax.contrib.schedule_free to all parameters at once, got one of a part of them. "
            "Give another optimizer, such as optax.sgd(0.1)."
        )
    averages = optax.contrib.schedule_free_eval_params(free[0], params)
    trainable = mask(params) if callable(mask) else mask
    if trainable is None:
        trainable = jax.tree.map(lambda leaf: True, params)

    def chosen(trained: Any, average: Array, last: Array) -> Array:
        return jnp.where(jnp.asarray(trained) & (steps > 0), average.astype(last.dtype), last)

    return jax.tree.map(chosen, trainable, averages, params)


def _has_schedule(state: Any) -> bool:
    """Return whether a part of an optimizer's state counts the steps of a schedule."""
    injected = getattr(state, "hyperparams_states", {})  # of `optax.inject_hyperparams`
    return isinstance(state, optax.ScaleByScheduleState) or bool(injected)


@jax.named_scope(STEP)
def descend(
    optimizer: optax.GradientTransformation,
    gradient_fn: GradientFn,
    carry: tuple,
    *,
    mask: Mask = None,
    gradient: Callable[[GradientFn], GradientFn] | None = None,
) -> tuple:
    """One step of an optimizer from parameters, its state and the sum of losses so far (see `train`)."""
    params, state, total_loss = carry
    trainable = mask(params) if callable(mask) else mask

    def select(tree: Tree) -> Tree:
        return tree if trainable is None else keep(trainable, tree)

    def selected(params: Params) -> tuple[Float[Array, ""], Tree]:
        value, slope = gradient_fn(params)
        return value, select(slope)

    value, slope = selected(params) if gradient is None else gradient(selected)(params)
    updates, state = optimizer.update(slope, state, params)
    updates = select(updates)  # weight decay and momentum would move masked coordinates too
    return optax.apply_updates(params, updates), state, total_loss + value


def penalty_of(penalty: Penalty | None, params: Params) -> Float[Array, ""]:
    """The penalty, or 0 where there is none."""
    return jnp.zeros(()) if penalty is None else penalty(params)


def blocks_of(padded: int, batch: int) -> tuple[int, int]:
    """Numbers of blocks, and of batches per block, that cover `padded` examples; a block is gathered at once."""
    batches = -(-padded // batch)
    blocks = max(1, round(batches * batch / _BLOCK_EXAMPLES))
    per_block = -(-batches // blocks)
    return -(-batches // per_block), per_block


def _lost(params: Params) -> Bool[Array, ""]:
    """Whether the first numbers of the leaves add up to NaN, which no step mends; reading all would take time."""
    return jnp.isnan(sum(leaf.reshape(-1)[0] for leaf in jax.tree.leaves(params) if leaf.size))


def _shuffle(
    key: Key[Array, ""], padded: int, size: Int[Array | np.ndarray, ""]
) -> Int[Array, "N"]:
    """Real positions in random order, then the padding; does not depend on how much padding there is."""
    positions = jnp.arange(padded, dtype=jnp.uint32)
    # 23 random bits. A real position that draws the padding's rank still comes first: ties are in order of positions.
    ranks = jnp.where(positions < size, jax.random.bits(key, (padded,), jnp.uint32) >> 9, 2**23 - 1)
    if padded > 2**9:
        return jnp.argsort(ranks).astype(jnp.int32)
    # The same order, in a sixth of the time: single numbers, the rank above 9 bits of the position.
    return (jnp.sort(ranks << 9 | positions) & 2**9 - 1).astype(jnp.int32)
