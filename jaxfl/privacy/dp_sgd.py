"""DP-SGD in local steps: Poisson batches, per-example clipping, and noise on the sum."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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
from jaxfl.local.optimizers import Decay, Mask, decayed, first_state, weights_to_keep
from jaxfl.local.train import (
    Apply,
    BatchLoss,
    GradientFn,
    LossTerm,
    descend,
    penalty_of,
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
        noise = self._noise_for(data, own)
        noisy = functools.partial(
            noisy_gradient,
            apply=apply or model.apply,
            prepare=model.prepare,
            loss=loss or model.task.mean_loss,
            noise_multiplier=noise.multiplier,
            ghost_norms=model.ghost_norms if apply is None else None,
        )

        def gradient_at(i: Int[Array, ""], params: Params) -> tuple[Float[Array, ""], Tree]:
            step_key = derive(noise.key, i)
            step_drawing = jax.random.fold_in(drawing, i)
            loss_part = noisy(step_key, params, data, self, drawing=step_drawing)
            # The penalty reads no examples, so its gradient needs neither clipping nor noise.
            value_and_slope = jax.value_and_grad(lambda params: penalty_of(penalty, params))
            return optax.tree.add(loss_part, value_and_slope(params))

        params, total_loss, total = self._take_steps(gradient_at, params, data, mask)
        mark = self.mark
        if data.noise is None:
            # The engine rejects this name, because the ledger would record other noise.
            mark = f"{mark}, without the engine's noise"
        # The engine counts private steps by this name in the traced program (`trainings`).
        total_loss = checkpoint_name(total_loss, mark)
        steps = total.astype(jnp.float32)
        return _without_derivative(params), {
            "loss": total_loss / jnp.maximum(total, 1),
            "steps": steps,
            "private_steps": steps,
        }

    def _noise_for(self, data: ClientData, key: Key[Array, ""]) -> StepNoise:
        """Return the engine's noise, or without one this object's multiplier with `key`."""
        if data.noise is not None:
            return data.noise
        multiplier = jnp.asarray(self.noise_multiplier, jnp.float32).reshape(())
        return StepNoise(multiplier, key)

    def _take_steps(
        self,
        gradient_at: Callable[..., tuple[Float[Array, ""], Tree]],
        params: Params,
        data: ClientData,
        mask: Mask,
    ) -> tuple[Params, Float[Array, ""], Int[Array, ""]]:
        """Return the trained parameters, the sum of losses, and the number of steps.

        `gradient_at` is a function of a step's index and the parameters to loss and gradient.
        """
        # The size is traced, so a client without examples gets a number of steps, which is 0.
        total = jnp.where(data.size > 0, self.steps, 0)
        optimizer = decayed(self.optimizer, self.decay, data)

        def step(i: Int[Array, ""], carry: tuple) -> tuple:
            gradient = functools.partial(gradient_at, i)
            return hold(i < total, descend(optimizer, gradient, carry, mask=mask), carry)

        start = (begin(params), first_state(optimizer, params, self.decay), jnp.zeros(()))
        params, state, total_loss = lax.fori_loop(0, longest(total), step, start)
        return weights_to_keep(state, params, mask, total), total_loss, total

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
    for operation in program.eqns:
        for mark, count in _trainings_by(operation):
            found[mark] = found.get(mark, 0.0) + count
    return found


def _trainings_by(operation: core.JaxprEqn) -> Iterator[tuple[str, float]]:
    """Yield marks with how often an operation trains under each. A mark may occur repeatedly."""
    name = operation.primitive.name
    if name == "name" and operation.params["name"].startswith(_MARK):
        # The number under a mark has an entry for each repetition by `jax.vmap`.
        marker: Any = operation.invars[0]
        yield operation.params["name"], float(math.prod(marker.aval.shape))
    inner = [trainings(part) for part in _nested_programs(operation.params)]
    if name == "cond":
        # Only one of the branches runs.
        for mark in {mark for branch in inner for mark in branch}:
            yield mark, max(branch.get(mark, 0.0) for branch in inner)
        return
    for counts in inner:
        for mark, count in counts.items():
            yield mark, _most_runs(operation) * count


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
    default = 1
    if ghost_norms is not None:
        default = _EXAMPLES_AT_ONCE
    rate = dp_sgd.rate_of(data)
    batch = _draw_batch(batch_key, data, rate, min(dp_sgd.chunk or default, data.padded))
    losses = _ExampleLosses(apply, prepare, loss, ghost_norms, drawing)
    # Gradients, their clipping, sum and noise are in single precision, whatever the weights' dtype.
    precise = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    value, total = _clipped_sums(losses, precise, data, batch, dp_sgd.clip)
    total = add_gaussian(noise_key, total, jnp.asarray(noise_multiplier * dp_sgd.clip, jnp.float32))
    # The size of the drawn batch would reveal whether an example is in the batch.
    expected = rate * jnp.maximum(data.size, 1)
    mean = jax.tree.map(lambda leaf, old: (leaf / expected).astype(old.dtype), total, params)
    return value / jnp.maximum(batch.count, 1), mean


class _Batch(NamedTuple):
    """Batch of a client's examples, in chunks."""

    order: Int[Array, "P"]
    """Rows of the examples in the batch, and what fills up the last chunk."""
    count: Int[Array, ""]
    """Number of examples, without those that fill up the last chunk."""
    chunk: int
    """Number of examples processed at once."""


def _draw_batch(
    key: Key[Array, "*S"],
    data: ClientData,
    rate: Any,
    chunk: int,
) -> _Batch:
    """Return a batch that has each example with probability `rate`, independently."""
    padded = data.padded
    # Shapes are static, so padding has coins too, which never count.
    drawn = coins(key, padded, rate) & (jnp.arange(padded) < data.size)
    count = jnp.sum(drawn)
    # Row 0 fills up the last chunk, and `_clipped_sums` leaves these copies out.
    order = jnp.nonzero(drawn, size=-(-padded // chunk) * chunk, fill_value=0)[0]
    return _Batch(order, count, chunk)


class _ExampleLosses(NamedTuple):
    """Losses of single examples. The arguments of `noisy_gradient` have the same names."""

    apply: Callable
    prepare: Callable[[Array], Array]
    loss: BatchLoss
    ghost_norms: Callable[[Params, Array, Float[Array, "B"]], Array] | None
    drawing: Key[Array, ""] | None

    def of(
        self,
        params: Params,
        x: Array,
        labels: Array,
        *keys: Array,
    ) -> Float[Array, "B"]:
        """Return the loss of each example of a prepared chunk."""

        # `loss` is a mean over a batch, so each example is a batch of its own.
        def of_row(row: Array, label: Array) -> Float[Array, ""]:
            return self.loss(row[None], label[None], jnp.ones(1))

        return jax.vmap(of_row)(self.apply(params, x, *keys), labels)

    def squared_norms(self, params: Params, x: Array, labels: Array) -> Float[Array, "B"]:
        """Return the squared gradient norm of each example of a prepared chunk."""

        def probed(probe: Array) -> Float[Array, ""]:
            def outputs(params: Params, x: Array) -> Array:
                assert self.ghost_norms is not None
                return self.ghost_norms(params, x, probe)

            return jnp.sum(self._replace(apply=outputs).of(params, x, labels))

        # By the rules of the layers, the gradient by the probe holds squared gradient norms.
        return jax.grad(probed)(jnp.zeros(len(labels)))

    def keys_at(self, positions: Int[Array, "B"]) -> Key[Array, "B"]:
        """Return a key for the layers of each example, by its position in the batch."""
        layers_key = self.drawing
        if layers_key is None:
            # No layer draws, so any key serves.
            layers_key = key_of(0)
        # Keys follow positions in the batch, so the size of a chunk changes no draw.
        return jax.vmap(jax.random.fold_in, (None, 0))(layers_key, positions)


def _clipped_sums(
    losses: _ExampleLosses,
    params: Params,
    data: ClientData,
    batch: _Batch,
    bound: float,
) -> tuple[Float[Array, ""], Tree]:
    """Return the sums of a batch's losses and of its clipped gradients, chunk by chunk."""
    chunk = batch.chunk

    def add(i: Int[Array, ""], total: tuple) -> tuple:
        positions = i * chunk + jnp.arange(chunk)
        inputs, labels = data.take(lax.dynamic_slice(batch.order, (i * chunk,), (chunk,)))
        # The comparison leaves out copies in the last chunk.
        rows = inputs, labels, positions < batch.count
        if losses.ghost_norms is None:
            keys = losses.keys_at(positions)
            return optax.tree.add(total, _clipped_one_by_one(losses, params, (*rows, keys), bound))
        # An accelerator's TensorFloat-32 would round norms and gradients differently.
        with jax.default_matmul_precision("float32"):
            return optax.tree.add(total, _clipped_by_norms(losses, params, rows, bound))

    zero = (jnp.zeros(()), optax.tree.zeros_like(params))
    return lax.fori_loop(0, longest(-(-batch.count // chunk)), add, zero)


def _clipped_one_by_one(
    losses: _ExampleLosses,
    params: Params,
    rows: tuple,
    bound: float,
) -> tuple:
    """Return a chunk's sums of losses and of clipped gradients, by one gradient per example.

    Copies in the last chunk, and examples whose gradient is not finite, add nothing.
    """

    def of_example(inputs: Array, label: Array, real: Array, key: Array) -> tuple:
        x = losses.prepare(inputs[None])

        def loss_of(params: Params) -> Float[Array, ""]:
            return losses.of(params, x, label[None], key)[0]

        value, slope = jax.value_and_grad(loss_of)(params)
        clipped, norm = clip(slope, bound)
        counts = real & jnp.isfinite(norm)
        # A product by 0 would keep a NaN.
        return jax.tree.map(lambda leaf: jnp.where(counts, leaf, 0), (value, clipped))

    # A batch axis of 1 would make matrix products slow.
    if len(rows[1]) == 1:
        return of_example(*(leaf[0] for leaf in rows))
    parts = jax.vmap(of_example)(*rows)
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), parts)


def _clipped_by_norms(
    losses: _ExampleLosses,
    params: Params,
    rows: tuple,
    bound: float,
) -> tuple:
    """Return the sums of `_clipped_one_by_one`, by gradient norms.

    The sum of clipped gradients is one gradient of the losses, weighted by clipping factors.
    """
    inputs, labels, real = rows
    squares = losses.squared_norms(params, losses.prepare(inputs), labels)
    counts = real & jnp.isfinite(squares)
    factor = jnp.where(counts, _clipping_factor(squares, bound), 0.0)
    # A factor of 0 does not remove an infinite gradient, because 0 times infinity is NaN.
    column = counts.reshape(-1, *[1] * (inputs.ndim - 1))
    x = losses.prepare(jnp.where(column, inputs, 0))

    def weighted(params: Params) -> tuple[Float[Array, ""], Float[Array, "B"]]:
        values = losses.of(params, x, labels)
        return jnp.sum(factor * values), values

    slope, values = jax.grad(weighted, has_aux=True)(params)
    return jnp.sum(jnp.where(counts, values, 0.0)), slope


def _clipping_factor(squares: Float[Array, "B"], bound: float) -> Float[Array, "B"]:
    """Return the factors that clip gradients of the given squared norms."""
    # A square of 0, or below 0 by rounding, has no finite inverse root.
    positive = jnp.maximum(squares, jnp.finfo(jnp.float32).tiny)
    return jnp.minimum(1.0, bound * lax.rsqrt(positive))
