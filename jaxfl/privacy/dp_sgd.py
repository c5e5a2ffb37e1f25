"""DP-SGD in local steps: Poisson batches, per-example clipping, and noise on the sum."""

import dataclasses
import functools
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

from jaxfl._validate import check_fraction, check_noise, checked, key_of, traced
from jaxfl.local.lanes import begin, hold, longest
from jaxfl.local.train import (
    Apply,
    BatchLoss,
    Decay,
    GradientFn,
    Mask,
    Penalty,
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

_CHUNK = 16
_MARK = "private steps"
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


@checked(noise_multiplier=check_noise, rate=check_fraction)
@dataclasses.dataclass(frozen=True, eq=False)
class DPSGD:
    r"""Local training with example-level privacy (DP-SGD), in place of `jaxfl.LocalSGD`.

    .. math:: g = \frac{1}{q n} \Big( \sum_{j \in B} \mathrm{clip}_C(\nabla \ell_j) + N(0, z^2 C^2 I) \Big)

    where each of a client's n examples is in B with probability q, independently in every step.

    Args:
        clip: C, L2 bound on the gradient of one example.
        noise_multiplier: z, std of the noise on the sum over C; a number or `[1]` for all, or one per client `[C]` (see
            `jaxfl.privacy.calibrate_examples`).
        rate: q.
        steps: local steps per round.
        optimizer: any optax transformation, with a fresh state in every round.
        chunk: examples processed at once; changes speed and memory, not results. None: 16 if the model has gradient
            norms (`Model.ghost_norms`); else 1, fastest on a CPU.
        decay: as in `jaxfl.LocalSGD`; noise scales with the gradients, and epsilon is unchanged.

    The engine gives each client its noise, records it in the ledger, and rejects a `client_update` that makes no
    private steps, other ones, or trains by them twice, in a loop or under `jax.vmap`: the second time would have the
    noise and the batches of the first. `jax.jit`, `jax.checkpoint` and `jax.lax.cond` around them are fine.

    Guarantee: example-level, zero-out adjacency (an example's clipped gradient is replaced by zero, n is public), by
        the Poisson-sampled Gaussian mechanism composed over all steps; for every observer of the client's messages.
    References: Abadi et al., Deep Learning with Differential Privacy, CCS 2016.
    """

    clip: float
    noise_multiplier: float | np.ndarray
    rate: float
    steps: int
    optimizer: optax.GradientTransformation = optax.sgd(0.05)  # noqa: RUF009 (never written to)
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
        penalty: Penalty | None = None,
        loss: BatchLoss | None = None,
        gradient: Callable[[GradientFn], GradientFn] | None = None,
    ) -> tuple[Params, dict[str, Array]]:
        """As `jaxfl.LocalSGD.train`, by private steps; their number is `private_steps` of `info`.

        A mask or a penalty may depend only on public values and the parameters. The noise multiplier and key come from
        the engine (`data.noise`), which records the multiplier in the ledger; without `data.noise` they are the single
        multiplier given here, and `key`. `model.ghost_norms` serve only the model's own `apply`.
        """
        if gradient is not None:
            remedy = "it reads every batch twice, leave it out, or train by LocalSGD"
            raise ValueError(f"gradient={gradient!r} with DPSGD: {remedy}")
        drawing, own = jax.random.split(
            key
        )  # a layer's draws have nothing in common with batches and noise
        noise = data.noise or StepNoise(
            jnp.asarray(self.noise_multiplier, jnp.float32).reshape(()), own
        )
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
                loss_part = noisy(
                    derive(noise.key, i), params, data, self, drawing=jax.random.fold_in(drawing, i)
                )
                return optax.tree.add(
                    loss_part,
                    jax.value_and_grad(lambda params: penalty_of(penalty, params))(params),
                )

            return hold(i < total, descend(optimizer, of_batch, carry, mask=mask), carry)

        start = (begin(params), first_state(optimizer, params, self.decay), jnp.zeros(()))
        params, state, total_loss = lax.fori_loop(0, longest(total), step, start)
        params = weights_to_keep(state, params, mask, total)
        mark = self.mark if data.noise is not None else f"{self.mark}, without the engine's noise"
        total_loss = checkpoint_name(total_loss, mark)
        steps = total.astype(jnp.float32)
        return _without_derivative(params), {
            "loss": total_loss / jnp.maximum(total, 1),
            "steps": steps,
            "private_steps": steps,
        }

    @property
    def dp_sgd(self) -> "DPSGD":
        """These private steps."""
        return self

    @property
    def mark(self) -> str:
        """The name that these private steps leave in a traced program."""
        rate = f"traced {id(self.rate)}" if traced(self.rate) else repr(self.rate)
        return f"{_MARK}: rate {rate}, steps {self.steps}"

    @property
    def noise_table(self) -> Float64[np.ndarray, "#C"]:
        """Noise multiplier by client; one entry if it is shared."""
        return np.atleast_1d(np.asarray(self.noise_multiplier, np.float64))

    def check_fits(self, clients: int) -> None:
        """Require one noise multiplier per client, or one for all."""
        if len(self.noise_table) not in (1, clients):
            shape = self.noise_table.shape
            raise ValueError(
                f"dp_sgd.noise_multiplier has shape {shape}: it must fit {clients} clients"
            )


@jax.custom_jvp
def _without_derivative(params: Params) -> Params:
    """Return parameters whose derivative is an error: noise is a constant, so a derivative would be exact."""
    return params


@_without_derivative.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    raise ValueError(
        "private steps must not be differentiated: their noise is a constant, and the derivative by the data or the "
        "parameters would have none. Differentiate a loss before the steps, or train by LocalSGD."
    )


def trainings(program: core.Jaxpr) -> dict[str, float]:
    """Count by mark how often a traced program trains by private steps, at most: infinitely often in an open loop.

    A mark is on the sum of losses, a single number. Whatever part of a training `jax.vmap` repeats, it repeats the sum.
    """
    found: dict[str, float] = {}

    def add(times: float, counts: dict[str, float]) -> None:
        for mark, count in counts.items():
            found[mark] = found.get(mark, 0.0) + times * count

    for operation in program.eqns:
        name = operation.primitive.name
        inner = [trainings(part) for part in _programs(operation.params)]
        if name == "name" and operation.params["name"].startswith(_MARK):
            marked: Any = operation.invars[0]
            add(1.0, {operation.params["name"]: float(math.prod(marked.aval.shape))})
        elif name == "cond":  # only one of its branches runs
            marks = {mark for branch in inner for mark in branch}
            add(1.0, {mark: max(branch.get(mark, 0.0) for branch in inner) for mark in marks})
        else:
            for counts in inner:
                add(_times(operation), counts)
    return found


def _times(operation: core.JaxprEqn) -> float:
    """Return how often an operation runs the program inside it, at most."""
    name = operation.primitive.name
    if name == "scan":
        return float(operation.params["length"])
    return 1.0 if name in _ONCE else math.inf


def _programs(value: Any) -> Iterator[core.Jaxpr]:
    """Yield the programs inside a parameter of an operation."""
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _programs(part)


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
    r"""Mean loss of a batch, and :math:`\frac{1}{q n} \big( \sum_{j \in B} \mathrm{clip}_C(\nabla \ell_j) +
    N(0, z^2 C^2 I) \big)`.

    Every example is in B with probability q, independently; B may be empty. Its examples are processed `dp_sgd.chunk`
    at a time: run time follows the drawn batch, which is never truncated. An example with a non-finite gradient
    contributes nothing, lest the engine drop the client's whole update.

    Args:
        key: of batch and noise.
        params: where the gradient is taken.
        data: the client's rows; padding is never drawn.
        dp_sgd: C, q and the chunk.
        apply: outputs of a prepared batch.
        prepare: normalises and lays out a batch.
        loss: of outputs, labels and weights; called with one example.
        noise_multiplier: z, std of the noise on the sum over C.
        ghost_norms: `Model.ghost_norms`: two gradients of the batch in place of one per example, of a model that draws
            nothing.
        drawing: key for layers that draw, for each example its own.

    References: Goodfellow, Efficient Per-Example Gradient Computations, 2015 (norms of dense layers).
    """  # noqa: D205
    batch_key, noise_key = (derive(key, purpose) for purpose in range(2))
    padded = data.padded
    chunk = min(dp_sgd.chunk or (1 if ghost_norms is None else _CHUNK), padded)
    drawn = coins(batch_key, padded, dp_sgd.rate) & (jnp.arange(padded) < data.size)
    count = jnp.sum(drawn)
    order = jnp.nonzero(drawn, size=-(-padded // chunk) * chunk, fill_value=0)[0]

    def losses(
        apply: Callable, params: Params, x: Array, labels: Array, *key: Array
    ) -> Float[Array, "B"]:
        return jax.vmap(lambda row, label: loss(row[None], label[None], jnp.ones(1)))(
            apply(params, x, *key), labels
        )

    losses_fn = functools.partial(losses, apply)

    def squares(params: Params, x: Array, labels: Array) -> Float[Array, "B"]:
        assert ghost_norms is not None

        def probed(probe: Array) -> Float[Array, ""]:
            def outputs(params: Params, x: Array) -> Array:
                return ghost_norms(params, x, probe)

            return jnp.sum(losses(outputs, params, x, labels))

        return jax.grad(probed)(jnp.zeros(len(labels)))

    def add(i: Int[Array, ""], total: tuple) -> tuple:
        positions = i * chunk + jnp.arange(chunk)
        inputs, labels = data.take(lax.dynamic_slice(order, (i * chunk,), (chunk,)))
        batch = inputs, labels, positions < count
        if ghost_norms is None:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(
                key_of(0) if drawing is None else drawing, positions
            )
            return optax.tree.add(
                total, _one_by_one(losses_fn, prepare, params, (*batch, keys), dp_sgd.clip)
            )
        # An accelerator's TensorFloat-32 would round norms and gradients differently.
        with jax.default_matmul_precision("float32"):
            return optax.tree.add(
                total, _by_norms(squares, losses_fn, prepare, params, batch, dp_sgd.clip)
            )

    # Gradients, their clipping, sum and noise are in single precision, whatever the weights' dtype.
    original, params = params, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    zero = (jnp.zeros(()), optax.tree.zeros_like(params))
    value, total = lax.fori_loop(0, longest(-(-count // chunk)), add, zero)
    total = add_gaussian(noise_key, total, jnp.asarray(noise_multiplier * dp_sgd.clip, jnp.float32))
    expected = dp_sgd.rate * jnp.maximum(data.size, 1)
    mean = jax.tree.map(lambda leaf, old: (leaf / expected).astype(old.dtype), total, original)
    return value / jnp.maximum(count, 1), mean


def _one_by_one(
    losses_fn: Callable, prepare: Callable, params: Params, batch: tuple, bound: float
) -> tuple:
    """Sums of losses and clipped gradients, by per-example gradients."""

    def of_example(
        inputs: Array, label: Array, real: Array, key: Array
    ) -> tuple[Float[Array, ""], Tree]:
        x = prepare(inputs[None])
        value, slope = jax.value_and_grad(lambda params: losses_fn(params, x, label[None], key)[0])(
            params
        )
        clipped, norm = clip(slope, bound)
        return jax.tree.map(
            lambda leaf: jnp.where(real & jnp.isfinite(norm), leaf, 0), (value, clipped)
        )

    if len(batch[1]) == 1:  # plain code: with a batch axis of 1, matrix products would be slow
        return of_example(*(leaf[0] for leaf in batch))
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), jax.vmap(of_example)(*batch))


def _by_norms(
    squares_fn: Callable,
    losses_fn: Callable,
    prepare: Callable,
    params: Params,
    batch: tuple,
    bound: float,
) -> tuple:
    """The same sums, as one gradient of the losses weighted by clipping factors."""
    inputs, labels, real = batch
    squares = squares_fn(params, prepare(inputs), labels)
    counts = real & jnp.isfinite(squares)
    factor = jnp.minimum(1.0, bound * lax.rsqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny)))
    factor = jnp.where(counts, factor, 0.0)
    x = prepare(
        jnp.where(counts.reshape(-1, *[1] * (inputs.ndim - 1)), inputs, 0)
    )  # 0 times infinity is NaN

    def weighted(params: Params) -> tuple[Float[Array, ""], Float[Array, "B"]]:
        losses = losses_fn(params, x, labels)
        return jnp.sum(factor * losses), losses

    slope, losses = jax.grad(weighted, has_aux=True)(params)
    return jnp.sum(jnp.where(counts, losses, 0.0)), slope
