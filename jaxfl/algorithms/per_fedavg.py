"""Per-FedAvg: a shared model one step from every personal one."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Key

from jaxfl._validate import GAUSSIAN, at_least_0, checked
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.server import Server
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
    r"""Per-FedAvg, first order: FedAvg on :math:`F_i(w - \alpha \nabla F_i(w))`.

    .. math:: w \leftarrow w - \eta \nabla F_i(w - \alpha \nabla F_i(w; D); D')

    where D is one half of a step's batch and D' the other. A client is evaluated after it has trained :math:`w^t` on
    its own training examples.

    Args:
        model: the network.
        inner_learning_rate: alpha; 0 is FedAvg on half batches.
        local: how a client trains in a round; a batch of one example is both D and D'.
        personal: how a client trains before evaluation; the paper's is one step of `optax.sgd(alpha)`.
        clip: as in `dp_fedavg`.
        noise_multiplier: as in `dp_fedavg`.
        sampling: as in `dp_fedavg`.
        server_optimizer: takes the negative aggregate as its gradient.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).

    Guarantee: `dp_fedavg`'s; personal models are made for evaluation and never sent.
    Deviations from the paper: the factor :math:`I - \alpha \nabla^2 F_i` is left out, as in its "FO".
    References: Fallah, Mokhtari, Ozdaglar, Personalized Federated Learning with Theoretical Guarantees: A
        Model-Agnostic Meta-Learning Approach, NeurIPS 2020 (arXiv:2002.07948), Algorithm 1.

    >>> from jaxfl.models import mlp
    >>> per_fedavg(mlp((8, 8, 1), 10), inner_learning_rate=0.1).name
    'per_fedavg'
    """
    private = {
        "clip": clip,
        "noise_multiplier": noise_multiplier,
        "sampling": sampling,
        "delta": delta,
    }
    base = dp_fedavg(model, server_optimizer=server_optimizer, **private)

    def unapplied(*arguments: Any) -> Any:
        return arguments

    def loss(batch: tuple, labels: Array, weights: Float[Array, "B"]) -> Float[Array, ""]:
        params, *rest = batch

        def half_loss(params: Params, part: Float[Array, "B"]) -> Float[Array, ""]:
            return model.task.mean_loss(model.apply(params, *rest), labels, part)

        first = jnp.where(jnp.arange(len(weights)) % 2 == 0, weights, 0)
        second = jnp.where(jnp.sum(weights) > 1, weights - first, first)
        step = lax.stop_gradient(jax.grad(half_loss)(params, first))
        return half_loss(optax.tree.add_scale(params, -inner_learning_rate, step), second)

    def client_update(
        key: Key[Array, ""], server: Server, client: tuple, data: ClientData
    ) -> tuple:
        whole = model._replace(microbatch=None)  # a microbatch would take its own inner step
        params, info = local.train(key, whole, server.params, data, apply=unapplied, loss=loss)
        return Message(optax.tree.sub(params, server.params)), client, info

    def personalize(key: Key[Array, ""], server: Server, client: tuple, data: ClientData) -> Params:
        return personal.train(key, model, server.params, data)[0]

    return base._replace(name="per_fedavg", client_update=client_update, personalize=personalize)
