"""pFedMe: personal models by the Moreau envelopes of the clients' losses."""

import dataclasses
import math

import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Int, Key

from jaxfl._validate import GAUSSIAN, checked
from jaxfl.algorithms.fedavg import dp_fedavg, keeps_models
from jaxfl.local.penalties import proximal
from jaxfl.local.train import GradientFn, LocalSGD, decayed
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.server import Server
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
    r"""pFedMe: FedAvg on Moreau envelopes, :math:`\min_\theta F_i(\theta) + \frac{\lambda}{2} \|\theta - w\|^2`.

    .. math::
        \theta_i \approx \arg\min_\theta F_i(\theta) + \frac{\lambda}{2} \|\theta - w_i\|^2, \qquad
        w_i \leftarrow w_i - \eta \lambda (w_i - \theta_i), \qquad
        w^{t+1} = w^t + \beta \, \mathrm{aggregate}(w_i - w^t)

    Each local step takes a batch, and K gradient steps on it for :math:`\theta_i`, from the previous :math:`\theta_i`,
    in a round's first step from :math:`w^t`. A client keeps the last :math:`\theta_i`, and is evaluated with it.

    Args:
        model: the network.
        penalty_weight: lambda; :math:`\eta \lambda` below 1 keeps :math:`w_i` between itself and :math:`\theta_i`.
        inner_learning_rate: of the steps for :math:`\theta_i`; stable below :math:`2 / \lambda`, at most.
        inner_steps: K.
        local: batches, and the optimizer of :math:`w_i`, whose gradient is :math:`\lambda (w_i - \theta_i)`.
        clip: C, L2 bound on a client's whole update.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        server_optimizer: takes the negative aggregate as its gradient; :math:`\beta` is the rate of `optax.sgd`.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).

    Guarantee: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts, by the Gaussian
        mechanism on the clipped sum; for each client against all others (joint privacy): its personal model depends on
        its own data. Publishing it voids this.
    Deviations from the paper: only participants train. :math:`\theta_i` takes K steps, not as many as an accuracy
        needs.
    References: Dinh, Tran, Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020
        (arXiv:2006.08848), Algorithm 1.

    >>> from jaxfl.models import mlp
    >>> pfedme(mlp((8, 8, 1), 10), penalty_weight=10.0, server_optimizer=optax.sgd(2.0)).name
    'pfedme'
    """
    private = {
        "clip": clip,
        "noise_multiplier": noise_multiplier,
        "sampling": sampling,
        "delta": delta,
    }
    base = dp_fedavg(model, server_optimizer=server_optimizer, **private)

    def apply(pair: tuple[Params, Params], x: Array, *key: Array) -> Array:
        return model.apply(pair[1], x, *key)

    def pull(pair: tuple[Params, Params]) -> Float[Array, ""]:
        return proximal(pair[1], lax.stop_gradient(pair[0]), penalty_weight)

    def envelope(gradient_fn: GradientFn) -> GradientFn:
        """Map (w, theta) to the envelope's gradient, and the step to the new theta."""

        def of_step(pair: tuple[Params, Params]) -> tuple[Float[Array, ""], Tree]:
            weights, start = pair

            def descend(i: Int[Array, ""], carry: tuple) -> tuple:
                value, (_, slope) = gradient_fn((weights, carry[1]))
                return value, optax.tree.add_scale(carry[1], -inner_learning_rate, slope)

            value, personal = lax.fori_loop(0, inner_steps, descend, (jnp.zeros(()), start))
            outer = optax.tree.scale(penalty_weight, optax.tree.sub(weights, personal))
            return value, (outer, optax.tree.sub(start, personal))

        return of_step

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        shared = decayed(local.optimizer, local.decay, data)
        optimizer = optax.partition(
            {"weights": shared, "personal": optax.scale(-1.0)}, ("weights", "personal")
        )
        outer = dataclasses.replace(local, optimizer=optimizer, decay=None)
        start = (server.params, server.params)
        (weights, personal), info = outer.train(
            key, model, start, data, apply=apply, penalty=pull, gradient=envelope
        )
        return Message(optax.tree.sub(weights, server.params)), personal, info

    return keeps_models(base, "pfedme", client_update)
