"""pFedMe: personal models from the Moreau envelopes of the clients' losses."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Int, Key

from jaxfl._support.checks import GAUSSIAN, checked
from jaxfl.algorithms.fedavg import dp_fedavg, keeps_models
from jaxfl.algorithms.server import Server
from jaxfl.local.optimizers import decayed
from jaxfl.local.penalties import proximal
from jaxfl.local.train import GradientFn, LocalSGD
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Tree


@checked(**GAUSSIAN)
def pfedme(
    model: Model,
    *,
    penalty_weight: Number = 15.0,
    inner_learning_rate: Number = 0.05,
    inner_steps: int = 5,
    local: LocalSGD = LocalSGD(optax.sgd(0.05)),
    clip: Number = math.inf,
    noise_multiplier: Number = 0.0,
    sampling: Sampling = Full(),
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build pFedMe: FedAvg on the Moreau envelopes of the clients' losses.

    The envelope at w is :math:`\min_\theta F_i(\theta) + \frac{\lambda}{2} \|\theta - w\|^2`. A
    client alternates the first two steps in a round, and the server takes the third:

    .. math::
        \theta_i &\approx \arg\min_\theta F_i(\theta) + \frac{\lambda}{2} \|\theta - w_i\|^2 \\
        w_i &\leftarrow w_i - \eta \lambda (w_i - \theta_i) \\
        w^{t+1} &= w^t + \beta \, \mathrm{aggregate}(w_i - w^t)

    Each local step takes a batch, and K gradient steps on this batch for :math:`\theta_i`. The K
    steps start at the previous :math:`\theta_i`, and in a round's first step at :math:`w^t`. A
    client keeps the last :math:`\theta_i`, and is evaluated with it.

    Args:
        model: The network.
        penalty_weight: :math:`\lambda`. Values of :math:`\eta \lambda` below 1 keep :math:`w_i`
            between its last value and :math:`\theta_i`.
        inner_learning_rate: Rate of the K steps for :math:`\theta_i`. The steps are stable only
            for rates below :math:`2 / \lambda`.
        inner_steps: K, the number of steps for :math:`\theta_i` in a local step.
        local: Batches and epochs of a client's training in a round, and the optimizer of
            :math:`w_i`. This optimizer's gradient is :math:`\lambda (w_i - \theta_i)`.
        clip: C, L2 bound on a client's update. Infinity clips nothing, and allows no noise.
        noise_multiplier: z, std of the noise on the sum, in units of C (see
            `jaxfl.privacy.calibrate`).
        sampling: Rule that draws the participants of each round. The default draws all clients.
        server_optimizer: Optimizer that takes the negative aggregate as its gradient. The rate of
            an `optax.sgd` is :math:`\beta`.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy with zero-out adjacency and sensitivity C, for the observer of
        sums and broadcasts, by the Gaussian mechanism on the clipped sum. Personal models have
        joint privacy: each client is protected against all other clients, but its model depends on
        its own data. Publishing personal models voids the guarantee.
    Deviations from the paper: Only participants train. :math:`\theta_i` takes K steps, not as many
        as a given accuracy needs.
    References: Dinh, Tran, Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS
        2020 (arXiv:2006.08848), Algorithm 1.

    >>> from jaxfl.models import mlp
    >>> pfedme(mlp((8, 8, 1), 10), penalty_weight=10.0, server_optimizer=optax.sgd(2.0)).name
    'pfedme'
    """
    base = dp_fedavg(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        server_optimizer=server_optimizer,
        delta=delta,
    )

    def apply(pair: tuple[Params, Params], x: Array, *key: Array) -> Array:
        # The loss is that of theta. Only the penalty brings in w.
        _, personal = pair
        return model.apply(personal, x, *key)

    def pull(pair: tuple[Params, Params]) -> Float[Array, ""]:
        weights, personal = pair
        # The gradient at w is that of the envelope, which `envelope` computes.
        return proximal(personal, lax.stop_gradient(weights), penalty_weight)

    envelope = functools.partial(
        _envelope,
        penalty_weight=penalty_weight,
        learning_rate=inner_learning_rate,
        steps=inner_steps,
    )

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        start = (server.params, server.params)
        (weights, personal), info = _envelope_training(local, data).train(
            key, model, start, data, apply=apply, penalty=pull, gradient=envelope
        )
        return Message(optax.tree.sub(weights, server.params)), personal, info

    return keeps_models(base, "pfedme", client_update)


def _envelope(
    gradient_fn: GradientFn, *, penalty_weight: Number, learning_rate: Number, steps: int
) -> GradientFn:
    """Return a function from (w, theta) to a value and two gradients.

    The first is the envelope's gradient at w. The second is the difference of the old theta and the
    new one, so that a step of rate 1 leads to the new theta.

    Args:
        gradient_fn: Gradient of the penalised loss.
        penalty_weight: Weight of the proximal term.
        learning_rate: Rate of the steps for theta.
        steps: Number of the steps for theta.
    """

    def of_step(pair: tuple[Params, Params]) -> tuple[Float[Array, ""], Tree]:
        weights, start = pair

        def descend(i: Int[Array, ""], carry: tuple) -> tuple:
            _, personal = carry
            value, (_, slope) = gradient_fn((weights, personal))
            # The carry keeps the value of the last step only, which is what training reports.
            return value, optax.tree.add_scale(personal, -learning_rate, slope)

        value, personal = lax.fori_loop(0, steps, descend, (jnp.zeros(()), start))
        outer = optax.tree.scale(penalty_weight, optax.tree.sub(weights, personal))
        return value, (outer, optax.tree.sub(start, personal))

    return of_step


def _envelope_training(local: LocalSGD, data: ClientData) -> LocalSGD:
    """Return a local training of (w, theta) by the two gradients of `_envelope`."""
    shared = decayed(local.optimizer, local.decay, data)
    labels = ("weights", "personal")
    # The rate -1 subtracts the difference, which moves theta to its new value.
    optimizer = optax.partition({"weights": shared, "personal": optax.scale(-1.0)}, labels)
    # The decay is in the optimizer already, because it must not scale the steps of theta.
    return dataclasses.replace(local, optimizer=optimizer, decay=None)
