"""APFL: a mixture of a personal and the shared model, whose weight each client may learn."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Key

from jaxfl._validate import GAUSSIAN, at_least_0, check_fraction, checked
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.local.train import LocalSGD, decayed
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.server import Server, init_clients
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Tree


class Own(NamedTuple):
    """A client's state."""

    params: Params
    alpha: Any


def _fraction(name: str, value: Any) -> Any:
    return check_fraction(name, value, zero=True)


@checked(
    alpha=_fraction,
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
    r"""APFL: a client is evaluated with :math:`\bar v = \alpha_i v_i + (1 - \alpha_i) w`, and sends w's update alone.

    A local step, from :math:`w = w^t` on, takes three gradients on one batch:

    .. math::
        w \leftarrow w - \eta \nabla F_i(w), \qquad
        v_i \leftarrow v_i - \eta \, \alpha_i \nabla F_i(\bar v), \qquad
        \alpha_i \leftarrow
            \mathrm{clip}_{[0, 1]} \big( \alpha_i - \eta_\alpha \langle \nabla F_i(\bar v), v_i - w \rangle \big)

    where :math:`\alpha_i \nabla F_i(\bar v)` is the gradient of :math:`F_i(\bar v)` in :math:`v_i`.

    Args:
        model: the network.
        alpha: the initial share of the personal model; 0 uses w alone.
        alpha_learning_rate: :math:`\eta_\alpha`; 0: alpha is fixed.
        local: how a client trains w and v in a round, each with the optimizer's own state.
        clip: C, L2 bound on the update of w.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        server_optimizer: takes the negative aggregate as its gradient.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).

    Guarantee: `dp_fedavg`'s, whose messages it sends; for each client against all others (joint privacy): v and alpha
        depend on its own data. Publishing them voids this.
    Deviations from the paper: uniform weights; alpha has a learning rate of its own. The published code adds 0.02 alpha
        to alpha's gradient.
    References: Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning, 2020 (arXiv:2003.13461), Algorithm 1.

    >>> from jaxfl.models import mlp
    >>> apfl(mlp((8, 8, 1), 10), alpha=0.25, alpha_learning_rate=0.1).name
    'apfl'
    """
    private = {
        "clip": clip,
        "noise_multiplier": noise_multiplier,
        "sampling": sampling,
        "delta": delta,
    }
    base = dp_fedavg(model, server_optimizer=server_optimizer, **private)

    def init(key: Key[Array, ""], number: int) -> tuple[Server, Own]:
        server, _ = base.init(key, number)
        return server, init_clients(Own(server.params, jnp.asarray(alpha, jnp.float32)), number)

    def apply(weights: tuple[Params, Own], x: Array, *key: Array) -> Any:
        shared, client = weights
        return model.apply(shared, x, *key), model.apply(
            _mix(client, lax.stop_gradient(shared)), x, *key
        )

    def both(
        outputs: tuple[Array, Array], labels: Array, weights: Float[Array, "B"]
    ) -> Float[Array, ""]:
        """The loss of w, with the gradients of both losses."""
        mixed = model.task.mean_loss(outputs[1], labels, weights)
        return model.task.mean_loss(outputs[0], labels, weights) + mixed - lax.stop_gradient(mixed)

    def client_update(key: Key[Array, ""], server: Server, client: Own, data: ClientData) -> tuple:
        weights, mixture = (
            decayed(local.optimizer, local.decay, data),
            _projected_sgd(alpha_learning_rate),
        )
        optimizer = optax.partition(
            {"weights": weights, "alpha": mixture}, ("weights", Own("weights", "alpha"))
        )
        training = dataclasses.replace(local, optimizer=optimizer, decay=None)
        (shared, client), info = training.train(
            key, model, (server.params, client), data, apply=apply, loss=both
        )
        return (
            Message(optax.tree.sub(shared, server.params)),
            client,
            info | {"alpha": client.alpha},
        )

    return base._replace(
        name="apfl",
        init=init,
        client_update=client_update,
        personalize=lambda key, server, client, data: _mix(client, server.params),
    )


def _mix(client: Own, shared: Params) -> Params:
    mixed = lambda v, w: (client.alpha * v + (1 - client.alpha) * w).astype(v.dtype)  # noqa: E731
    return jax.tree.map(mixed, client.params, shared)


def _projected_sgd(learning_rate: Number) -> optax.GradientTransformation:
    """Steps of SGD that end within [0, 1]."""

    def project(updates: Tree, params: Tree | None) -> Tree:
        return jax.tree.map(lambda u, p: jnp.clip(p + u, 0, 1) - p, updates, params)

    return optax.chain(optax.sgd(learning_rate), optax.stateless(project))
