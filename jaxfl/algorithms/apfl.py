"""APFL: a mixture of a personal model and the shared one, whose weight a client may learn."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Key

from jaxfl._support.checks import GAUSSIAN, at_least_0, check_fraction, checked
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.algorithms.server import Server, init_clients
from jaxfl.local.optimizers import decayed
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Tree


class Own(NamedTuple):
    """State of a client: its personal model v, and the share alpha of v in the mixture."""

    params: Params
    alpha: Any


@checked(
    alpha=functools.partial(check_fraction, zero=True),
    alpha_learning_rate=at_least_0,
    **GAUSSIAN,
)
def apfl(
    model: Model,
    *,
    alpha: Number = 0.5,
    alpha_learning_rate: Number = 0.0,
    local: LocalSGD = LocalSGD(optax.sgd(0.05)),
    clip: Number = math.inf,
    noise_multiplier: Number = 0.0,
    sampling: Sampling = Full(),
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build APFL: clients mix a personal model with the shared one, and send the latter's update.

    Client i is evaluated with :math:`\bar v = \alpha_i v_i + (1 - \alpha_i) w`. Local steps start
    from :math:`w = w^t`. Each takes three gradients on one batch:

    .. math::
        w &\leftarrow w - \eta \nabla F_i(w) \\
        v_i &\leftarrow v_i - \eta \, \alpha_i \nabla F_i(\bar v) \\
        \alpha_i &\leftarrow \mathrm{clip}_{[0, 1]} \big( \alpha_i
            - \eta_\alpha \langle \nabla F_i(\bar v), v_i - w \rangle \big)

    Here :math:`\alpha_i \nabla F_i(\bar v)` is the gradient of :math:`F_i(\bar v)` in :math:`v_i`.

    Args:
        model: The network.
        alpha: Initial share of the personal model, in [0, 1]. With 0 the mixture starts as w.
        alpha_learning_rate: :math:`\eta_\alpha`. With 0, the default, alpha is fixed.
        local: Local training of w and v in one round. Each has an optimizer state of its own.
        clip: C, the L2 bound on the update of w. Infinity, the default, clips nothing, and allows
            no noise.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: The guarantee of `dp_fedavg`, whose messages are sent. Personal models v and shares
        alpha have joint privacy: each client is protected against all other clients, but its v and
        alpha depend on its own data. Publishing v or alpha voids the guarantee.
    Deviations from the paper: Weights are uniform, and alpha has a learning rate of its own. The
        published code adds 0.02 alpha to alpha's gradient.
    References: Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning, 2020
        (arXiv:2003.13461), Algorithm 1.

    >>> from jaxfl.models import mlp
    >>> apfl(mlp((8, 8, 1), 10), alpha=0.25, alpha_learning_rate=0.1).name
    'apfl'
    """
    base = dp_fedavg(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        server_optimizer=server_optimizer,
        delta=delta,
    )

    def init(key: Key[Array, ""], num_clients: int) -> tuple[Server, Own]:
        server, _ = base.init(key, num_clients)
        own = Own(server.params, jnp.asarray(alpha, jnp.float32))
        return server, init_clients(own, num_clients)

    def apply(weights: tuple[Params, Own], x: Array, *key: Array) -> Any:
        shared, client = weights
        outputs = model.apply(shared, x, *key)
        # The loss of the mixture trains v and alpha only, so w is trained as in FedAvg.
        mixture = _mix(client, lax.stop_gradient(shared))
        return outputs, model.apply(mixture, x, *key)

    def both(
        outputs: tuple[Array, Array], labels: Array, weights: Float[Array, "B"]
    ) -> Float[Array, ""]:
        """Return the value of the loss of w, with the gradient of this loss plus the mixture's."""
        shared_outputs, mixed_outputs = outputs
        mixed = model.task.mean_loss(mixed_outputs, labels, weights)
        shared = model.task.mean_loss(shared_outputs, labels, weights)
        return shared + mixed - lax.stop_gradient(mixed)

    def client_update(key: Key[Array, ""], server: Server, client: Own, data: ClientData) -> tuple:
        training = _mixture_training(local, alpha_learning_rate, data)
        (shared, client), info = training.train(
            key, model, (server.params, client), data, apply=apply, loss=both
        )
        message = Message(optax.tree.sub(shared, server.params))
        return message, client, info | {"alpha": client.alpha}

    return base._replace(
        name="apfl",
        init=init,
        client_update=client_update,
        personalize=lambda key, server, client, data: _mix(client, server.params),
    )


def _mixture_training(local: LocalSGD, alpha_learning_rate: Number, data: ClientData) -> LocalSGD:
    """Return a local training of w, v and alpha, in which alpha has a rate of its own."""
    optimizers: dict[Any, optax.GradientTransformation] = {
        "weights": decayed(local.optimizer, local.decay, data),
        "alpha": _projected_sgd(alpha_learning_rate),
    }
    # Alpha takes plain projected steps, whatever optimizer the weights have.
    optimizer = optax.partition(optimizers, ("weights", Own("weights", "alpha")))
    # The optimizer already has the round's decay.
    return dataclasses.replace(local, optimizer=optimizer, decay=None)


def _mix(client: Own, shared: Params) -> Params:
    """Return the mixture of a client's personal model and the shared one."""

    def mix(own: Array, shared: Array) -> Array:
        # An alpha in single precision would widen parameters in half precision.
        return (client.alpha * own + (1 - client.alpha) * shared).astype(own.dtype)

    return jax.tree.map(mix, client.params, shared)


def _projected_sgd(learning_rate: Number) -> optax.GradientTransformation:
    """Return SGD that keeps its parameters within [0, 1]."""

    def project(updates: Tree, params: Tree | None) -> Tree:
        # An optax update is added to the parameters, so it leads to the projected point.
        return jax.tree.map(lambda u, p: jnp.clip(p + u, 0, 1) - p, updates, params)

    return optax.chain(optax.sgd(learning_rate), optax.stateless(project))
