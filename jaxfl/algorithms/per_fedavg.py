"""Per-FedAvg: a shared model that one local step makes personal."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Key

from jaxfl._support.checks import GAUSSIAN, at_least_0, checked
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.algorithms.server import Server
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params


@checked(inner_learning_rate=at_least_0, **GAUSSIAN)
def per_fedavg(
    model: Model,
    *,
    inner_learning_rate: Number = 0.01,
    local: LocalSGD = LocalSGD(optax.sgd(0.05)),
    personal: LocalSGD = LocalSGD(optax.sgd(0.01), steps=1),
    clip: Number = math.inf,
    noise_multiplier: Number = 0.0,
    sampling: Sampling = Full(),
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build first-order Per-FedAvg: FedAvg on :math:`F_i(w - \alpha \nabla F_i(w))`.

    .. math:: w \leftarrow w - \eta \nabla F_i(w - \alpha \nabla F_i(w; D); D')

    Here D is one half of a step's batch and D' the other half. A client is evaluated after it has
    trained :math:`w^t` on its own training examples.

    Args:
        model: The network.
        inner_learning_rate: :math:`\alpha`, the rate of the inner step. 0 gives FedAvg on half
            batches.
        local: Optimizer, batches and epochs of a client's training in a round. A batch of one
            example is both D and D'.
        personal: Optimizer, batches and epochs of a client's training before an evaluation. The
            paper takes one step of `optax.sgd(alpha)`.
        clip: C, L2 bound on a client's update. Infinity clips nothing, and allows no noise.
        noise_multiplier: z, std of the noise on the sum, in units of C (see
            `jaxfl.privacy.calibrate`).
        sampling: Rule that draws the participants of each round. The default draws all clients.
        server_optimizer: Optimizer that takes the negative aggregate as its gradient. The default
            adds the aggregate to the shared model.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: The guarantee of `dp_fedavg`. Personal models are made for evaluations, and are never
        sent.
    Deviations from the paper: The factor :math:`I - \alpha \nabla^2 F_i` is left out, as in the
        paper's variant "FO".
    References: Fallah, Mokhtari, Ozdaglar, Personalized Federated Learning with Theoretical
        Guarantees: A Model-Agnostic Meta-Learning Approach, NeurIPS 2020 (arXiv:2002.07948),
        Algorithm 1.

    >>> from jaxfl.models import mlp
    >>> per_fedavg(mlp((8, 8, 1), 10), inner_learning_rate=0.1).name
    'per_fedavg'
    """
    base = dp_fedavg(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        server_optimizer=server_optimizer,
        delta=delta,
    )

    def loss(batch: tuple, labels: Array, weights: Float[Array, "B"]) -> Float[Array, ""]:
        params, *inputs = batch

        def half_loss(params: Params, half: Float[Array, "B"]) -> Float[Array, ""]:
            return model.task.mean_loss(model.apply(params, *inputs), labels, half)

        first, second = _halves(weights)
        # First order: the inner step is a constant of the outer gradient.
        step = lax.stop_gradient(jax.grad(half_loss)(params, first))
        inner = optax.tree.add_scale(params, -inner_learning_rate, step)
        return half_loss(inner, second)

    def client_update(
        key: Key[Array, ""], server: Server, client: tuple, data: ClientData
    ) -> tuple:
        # A microbatch would take its own inner step.
        undivided = model._replace(microbatch=None)
        # The loss gets parameters and inputs, because it applies the model at two points.
        params, info = local.train(key, undivided, server.params, data, apply=_unapplied, loss=loss)
        return Message(optax.tree.sub(params, server.params)), client, info

    def personalize(key: Key[Array, ""], server: Server, client: tuple, data: ClientData) -> Params:
        params, _ = personal.train(key, model, server.params, data)
        return params

    return base._replace(name="per_fedavg", client_update=client_update, personalize=personalize)


def _unapplied(*arguments: Any) -> Any:
    """Return the arguments, as a model that applies nothing."""
    return arguments


def _halves(weights: Float[Array, "B"]) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
    """Return the weights of every other example of a batch, and those of the rest.

    Both halves are the example itself if there is only one.
    """
    first = jnp.where(jnp.arange(len(weights)) % 2 == 0, weights, 0)
    # A second half without examples would have no gradient.
    second = jnp.where(jnp.sum(weights) > 1, weights - first, first)
    return first, second
