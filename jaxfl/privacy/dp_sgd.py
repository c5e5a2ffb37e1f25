"""DP-SGD in local steps: Poisson batches, per-example clipping, and noise on the sum."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jaxtyping import Float, Float64, Int, Key

from jaxfl._support.checks import (
    check_fraction,
    check_noise,
    check_numbers,
    checked,
    is_listed,
    key_of,
    traced,
)
from jaxfl.local.lanes import begin, hold, longest
from jaxfl.local.train import (
    Apply,
    BatchLoss,
    Decay,
    GradientFn,
    LossTerm,
    Mask,
    decayed,
    descend,
    first_state,
    penalty_of,
    weights_to_keep,
)
from jaxfl.privacy.clip import clip
from jaxfl.privacy.mechanisms.gaussian import check_clip, extremes
from jaxfl.privacy.noise import add_gaussian, derive
from jaxfl.privacy.sampling import coins
from jaxfl.types import ClientData, Model, Params, StepNoise, Tree

_EXAMPLES_AT_ONCE = 16
"""Examples that a model with gradient norms processes at once by default."""

_MARK = "private steps"
"""Start of the name that private steps leave in a traced program."""

_ONCE = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
)
"""Operations that run the program inside them once."""


def _check_rates(name: str, value: Any) -> Any:
    """Require a rate in (0, 1], or one for each client, and return the rate or the array."""
    several = is_listed(value) or getattr(value, "ndim", 0) > 0
    if traced(value) or not several:
        return check_fraction(name, value)
    rates = check_numbers(name, value)
    if rates.max() > 1:
        raise ValueError(
            f"{name} must be numbers in (0, 1], got {rates.max()}. "
            "Give batch_size / examples, or 1 for clients with fewer examples."
        )
    return rates


@checked(noise_multiplier=check_noise, rate=_check_rates)
@dataclasses.dataclass(frozen=True, eq=False)
class DPSGD:
    r"""Local training with example-level privacy (DP-SGD), which replaces `jaxfl.LocalSGD`.

    .. math::
        g = \frac{1}{q n} \Big(
            \sum_{j \in B} \mathrm{clip}_C(\nabla \ell_j) + N(0, z^2 C^2 I) \Big)

    Each of a client's n examples is in the batch B with probability q, independently in every step.

    Args:
        clip: C, L2 bound on the gradient of one example.
        noise_multiplier: z, std of the noise on the sum, divided by C. A number or `[1]` for all
            clients, or one number per client `[C]` (see `jaxfl.privacy.calibrate_examples`).
        rate: q, the probability that an example is in a batch. A number or `[1]` for all clients,
            or one per client `[C]`. With a rate of B / n, where n is public, batches have B
            examples on average.
        steps: Local steps per round.
        optimizer: Any optax transformation, with a fresh state in every round.
        chunk: Number of examples processed at once. It changes speed and memory, and results only
            by rounding. None stands for 16 if the model's gradient norms (`Model.ghost_norms`) are
            used, and otherwise for 1, which is fastest on a CPU.
        decay: Function from the index of a round to a factor of its updates. Noise scales with the
            gradients, and epsilon is unchanged. None leaves updates as they are.

    The builders of the library pass their `DPSGD` to `Algorithm(dp_sgd=...)`, and so must a method
    of your own. The engine then gives each client its noise, and records the noise in the ledger.
    The engine rejects a `client_update` that makes no private steps, or steps of another rate, of
    another number, or with noise that is not the engine's. It also rejects a `client_update` that
    trains by them twice, in a loop or under `jax.vmap`, because the second training would have the
    noise and the batches of the first. `jax.jit`, `jax.checkpoint` and `jax.lax.cond` around a
    training are fine.

    Guarantee: Example-level privacy under zero-out adjacency: an example's clipped gradient is
        replaced by zero, and n is public. The Poisson-sampled Gaussian mechanism, composed over all
        steps, proves it for every observer of the client's messages.
    References: Abadi et al., Deep Learning with Differential Privacy, CCS 2016.
    """

    clip: float
    noise_multiplier: float | np.ndarray
    rate: float | np.ndarray
    steps: int
    optimizer: optax.GradientTransformation = optax.sgd(0.05)  # noqa: RUF009 (immutable)
    chunk: int | None = None
    decay: Decay | None = None

    def __post_init__(self) -> None:
        check_clip("clip", self.clip)
        extremes("noise_multiplier", np.asarray(self.noise_multiplier, np.float64))

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
        """Train by private steps, as `jaxfl.LocalSGD.train` does by plain ones.

        A mask or a penalty may depend only on public values and the parameters. The engine gives
        the noise multiplier and the key (`data.noise`), and records the multiplier in the ledger.
        Without `data.noise` the steps take this object's `noise_multiplier`, which must then be one
        number, and keys from `key`. `model.ghost_norms` serve only the model's own `apply`.

        Returns:
            The trained parameters, and a dict of the mean `loss` over all steps, penalty included,
            and their number, as `steps` and as `private_steps`. A client without examples takes no
            step, and has the loss 0.

        Raises:
            ValueError: `gradient` is given, because it would read every batch twice.
        """
        if gradient is not None:
            raise ValueError(
                "gradient must be None with DPSGD, because it reads every batch twice, "
                f"got {gradient!r}. Leave it out, or train by LocalSGD."
            )
        # Draws of layers, such as dropout, are independent of batches and noise.
        drawing, own = jax.random.split(key)
        noise = data.noise
        if noise is None:
            multiplier = jnp.asarray(self.noise_multiplier, jnp.float32).reshape(())
            noise = StepNoise(multiplier, own)
        # The size is traced, so a client without examples gets a number of steps, which is 0.
        total = jnp.where(data.size > 0, self.steps, 0)
        noisy = functools.partial(
            noisy_gradient,
            apply=apply or model.apply,
            prepare=model.prepare,
            loss=loss or model.task.mean_loss,
            noise_multiplier=noise.multiplier,
            ghost_norms=model.ghost_norms if apply is None else None,
        )
        optimizer = decayed(self.optimizer, self.decay, data)

        def step(i: Int[Array, ""], carry: tuple) -> tuple:
            def of_batch(params: Params) -> tuple[Float[Array, ""], Tree]:
                step_key = derive(noise.key, i)
                step_drawing = jax.random.fold_in(drawing, i)
                loss_part = noisy(step_key, params, data, self, drawing=step_drawing)
                # The penalty reads no examples, so its gradient needs neither clipping nor noise.
                value_and_slope = jax.value_and_grad(lambda params: penalty_of(penalty, params))
                return optax.tree.add(loss_part, value_and_slope(params))

            return hold(i < total, descend(optimizer, of_batch, carry, mask=mask), carry)

        start = (begin(params), first_state(optimizer, params, self.decay), jnp.zeros(()))
        params, state, total_loss = lax.fori_loop(0, longest(total), step, start)
        params = weights_to_keep(state, params, mask, total)
        mark = self.mark
        if data.noise is None:
            # The engine rejects this name, because the ledger would record other noise.
            mark = f"{self.mark}, without the engine's noise"
        # The engine counts private steps by this name in the traced program (`trainings`).
        total_loss = checkpoint_name(total_loss, mark)
        steps = total.astype(jnp.float32)
        return _without_derivative(params), {
            "loss": total_loss / jnp.maximum(total, 1),
            "steps": steps,
            "private_steps": steps,
        }

    @property
    def dp_sgd(self) -> "DPSGD":
        """This object itself, because its local steps are private."""
        return self

    @property
    def mark(self) -> str:
        """Name that these private steps leave in a traced program."""
        if traced(self.rate):
            # A traced rate has no value to hash, so the object itself identifies the rate.
            rate = f"traced {id(self.rate)}"
        else:
            # Rates by client may be a long table, for which a hash stands.
            rate = hashlib.sha256(self.rate_table.tobytes()).hexdigest()
        return f"{_MARK}: rate {rate}, steps {self.steps}"

    @property
    def rate_table(self) -> Float64[np.ndarray, "#C"]:
        """Rate by client, or a single entry that all clients share."""
        return np.atleast_1d(np.asarray(self.rate, np.float64))

    def rate_of(self, data: ClientData) -> Any:
        """Return q of the client whose data are given."""
        if traced(self.rate) or np.ndim(self.rate) == 0:
            return self.rate
        return jnp.asarray(self.rate_table, jnp.float32)[data.id]

    @property
    def noise_table(self) -> Float64[np.ndarray, "#C"]:
        """Noise multiplier by client, or a single entry that all clients share."""
        return np.atleast_1d(np.asarray(self.noise_multiplier, np.float64))

    def check_fits(self, clients: int) -> None:
        """Require one noise multiplier and one rate per client, or one for all."""
        for name, table in (("noise_multiplier", self.noise_table), ("rate", self.rate_table)):
            if len(table) not in (1, clients):
                raise ValueError(
                    f"dp_sgd.{name} must have one number for all {clients} clients, or one for "
                    f"each, got shape {table.shape}. Give 1 or {clients} numbers."
                )


@jax.custom_jvp
def _without_derivative(params: Params) -> Params:
    """Return the parameters, whose derivative raises an error.

    The noise is a constant, so a derivative would have no noise, and reveal the data.
    """
    return params


@_without_derivative.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    raise ValueError(
        "private steps must not be differentiated, got a derivative by the data or the parameters: "
        "their noise is a constant, so the derivative would have no noise. "
        "Differentiate a loss before the steps, or train by LocalSGD."
    )


def trainings(program: core.Jaxpr) -> dict[str, float]:
    """Return, for each mark (`DPSGD.mark`), how often at most a traced program trains under it.

    The count is infinite in a loop of unknown length, and in operations that run a program an
    unknown number of times. A mark is on the sum of losses, a single number. If `jax.vmap` repeats
    any part of a training, it repeats that sum too, which counts as often as it has entries.
    """
    found: dict[str, float] = {}

    def add(times: float, counts: dict[str, float]) -> None:
        for mark, count in counts.items():
            found[mark] = found.get(mark, 0.0) + times * count

    for operation in program.eqns:
        name = operation.primitive.name
        inner = [trainings(part) for part in _nested_programs(operation.params)]
        if name == "name" and operation.params["name"].startswith(_MARK):
            marker: Any = operation.invars[0]
            add(1.0, {operation.params["name"]: float(math.prod(marker.aval.shape))})
        elif name == "cond":
            # Only one of the branches runs.
            marks = {mark for branch in inner for mark in branch}
            add(1.0, {mark: max(branch.get(mark, 0.0) for branch in inner) for mark in marks})
        else:
            for counts in inner:
                add(_most_runs(operation), counts)
    return found


def _most_runs(operation: core.JaxprEqn) -> float:
    """Return how often at most an operation runs the program inside it, infinity if unknown."""
    name = operation.primitive.name
    if name == "scan":
        return float(operation.params["length"])
    if name in _ONCE:
        return 1.0
    return math.inf


def _nested_programs(value: Any) -> Iterator[core.Jaxpr]:
    """Yield the programs inside a parameter of an operation."""
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, dict):
        yield from _nested_programs(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _nested_programs(part)


def noisy_gradient(
    key: Key[Array, "*S"],
    params: Params,
    data: ClientData,
    dp_sgd: DPSGD,
    *,
    apply: Apply,
    prepare: Callable[[Array], Array],
    loss: BatchLoss,
    noise_multiplier: Float[Array, ""] | float,
    ghost_norms: Callable[[Params, Array, Float[Array, "B"]], Array] | None = None,
    drawing: Key[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Tree]:
    r"""Return the mean loss of a drawn batch, and the noisy gradient g.

    .. math::
        g =
        \frac{1}{q n} \Big( \sum_{j \in B} \mathrm{clip}_C(\nabla \ell_j) + N(0, z^2 C^2 I) \Big)

    Each of the client's n examples is in B with probability q, independently. B may be empty, and
    then has a mean loss of 0. The examples of B are processed `dp_sgd.chunk` at a time, so run time
    follows the drawn batch, which is never truncated. An example with a non-finite gradient
    adds nothing to either sum, so that the engine does not drop the client's update.

    Args:
        key: Key of batch and noise.
        params: Parameters at which the gradient is taken.
        data: Data of the client. Padding is never drawn.
        dp_sgd: C, q and the chunk.
        apply: Function that returns the outputs of a prepared batch.
        prepare: Function that normalises and lays out a batch.
        loss: Function of outputs, labels and weights, which is called with one example.
        noise_multiplier: z, std of the noise on the sum, divided by C.
        ghost_norms: `Model.ghost_norms`, for a model that draws nothing. Two gradients of the batch
            then replace one gradient per example. None takes one gradient per example.
        drawing: Key for layers that draw, from which each example gets a key of its own. None if
            no layer draws.

    References: Goodfellow, Efficient Per-Example Gradient Computations, 2015 (norms of dense
        layers).
    """
    batch_key = derive(key, 0)
    noise_key = derive(key, 1)
    padded = data.padded
    default = 1
    if ghost_norms is not None:
        default = _EXAMPLES_AT_ONCE
    chunk = min(dp_sgd.chunk or default, padded)
    rate = dp_sgd.rate_of(data)
    # Shapes are static, so padding has coins too, which never count.
    drawn = coins(batch_key, padded, rate) & (jnp.arange(padded) < data.size)
    count = jnp.sum(drawn)
    # Row 0 fills up the last chunk, and `positions < count` leaves these copies out.
    order = jnp.nonzero(drawn, size=-(-padded // chunk) * chunk, fill_value=0)[0]

    def losses(
        apply: Callable, params: Params, x: Array, labels: Array, *key: Array
    ) -> Float[Array, "B"]:
        # `loss` is a mean over a batch, so each example is a batch of its own.
        def of_row(row: Array, label: Array) -> Float[Array, ""]:
            return loss(row[None], label[None], jnp.ones(1))

        return jax.vmap(of_row)(apply(params, x, *key), labels)

    losses_fn = functools.partial(losses, apply)

    def squares(params: Params, x: Array, labels: Array) -> Float[Array, "B"]:
        assert ghost_norms is not None

        def probed(probe: Array) -> Float[Array, ""]:
            def outputs(params: Params, x: Array) -> Array:
                return ghost_norms(params, x, probe)

            return jnp.sum(losses(outputs, params, x, labels))

        # By the rules of the layers, the gradient by the probe holds squared gradient norms.
        return jax.grad(probed)(jnp.zeros(len(labels)))

    def add(i: Int[Array, ""], total: tuple) -> tuple:
        positions = i * chunk + jnp.arange(chunk)
        inputs, labels = data.take(lax.dynamic_slice(order, (i * chunk,), (chunk,)))
        batch = inputs, labels, positions < count
        if ghost_norms is None:
            layers_key = drawing
            if layers_key is None:
                # No layer draws, so any key serves.
                layers_key = key_of(0)
            # Keys follow positions in the batch, so the size of a chunk changes no draw.
            keys = jax.vmap(jax.random.fold_in, (None, 0))(layers_key, positions)
            part = _clipped_one_by_one(losses_fn, prepare, params, (*batch, keys), dp_sgd.clip)
            return optax.tree.add(total, part)
        # An accelerator's TensorFloat-32 would round norms and gradients differently.
        with jax.default_matmul_precision("float32"):
            part = _by_norms(squares, losses_fn, prepare, params, batch, dp_sgd.clip)
            return optax.tree.add(total, part)

    # Gradients, their clipping, sum and noise are in single precision, whatever the weights' dtype.
    original = params
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    zero = (jnp.zeros(()), optax.tree.zeros_like(params))
    value, total = lax.fori_loop(0, longest(-(-count // chunk)), add, zero)
    total = add_gaussian(noise_key, total, jnp.asarray(noise_multiplier * dp_sgd.clip, jnp.float32))
    # The size of the drawn batch would reveal whether an example is in the batch.
    expected = rate * jnp.maximum(data.size, 1)
    mean = jax.tree.map(lambda leaf, old: (leaf / expected).astype(old.dtype), total, original)
    return value / jnp.maximum(count, 1), mean


def _clipped_one_by_one(
    losses_fn: Callable, prepare: Callable, params: Params, batch: tuple, bound: float
) -> tuple:
    """Return a chunk's sums of losses and of clipped gradients, by one gradient per example.

    Copies in the last chunk, and examples whose gradient is not finite, add nothing.
    """

    def of_example(
        inputs: Array, label: Array, real: Array, key: Array
    ) -> tuple[Float[Array, ""], Tree]:
        x = prepare(inputs[None])

        def loss_of(params: Params) -> Float[Array, ""]:
            return losses_fn(params, x, label[None], key)[0]

        value, slope = jax.value_and_grad(loss_of)(params)
        clipped, norm = clip(slope, bound)
        counts = real & jnp.isfinite(norm)
        return jax.tree.map(lambda leaf: jnp.where(counts, leaf, 0), (value, clipped))

    # A batch axis of 1 would make matrix products slow.
    if len(batch[1]) == 1:
        return of_example(*(leaf[0] for leaf in batch))
    parts = jax.vmap(of_example)(*batch)
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), parts)


def _by_norms(
    squares_fn: Callable,
    losses_fn: Callable,
    prepare: Callable,
    params: Params,
    batch: tuple,
    bound: float,
) -> tuple:
    """Return the sums of `_clipped_one_by_one`, by gradient norms.

    The sum of clipped gradients is one gradient of the losses, weighted by clipping factors.
    """
    inputs, labels, real = batch
    squares = squares_fn(params, prepare(inputs), labels)
    counts = real & jnp.isfinite(squares)
    # A square of 0, or below 0 by rounding, has no finite inverse root.
    positive = jnp.maximum(squares, jnp.finfo(jnp.float32).tiny)
    factor = jnp.minimum(1.0, bound * lax.rsqrt(positive))
    factor = jnp.where(counts, factor, 0.0)
    # A factor of 0 does not remove an infinite gradient, because 0 times infinity is NaN.
    column = counts.reshape(-1, *[1] * (inputs.ndim - 1))
    x = prepare(jnp.where(column, inputs, 0))

    def weighted(params: Params) -> tuple[Float[Array, ""], Float[Array, "B"]]:
        losses = losses_fn(params, x, labels)
        return jnp.sum(factor * losses), losses

    slope, losses = jax.grad(weighted, has_aux=True)(params)
    return jnp.sum(jnp.where(counts, losses, 0.0)), slope
