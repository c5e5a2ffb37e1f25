"""Ditto: personal models pulled towards a shared one, whose training ignores them."""

import functools
import math

import optax
from jax import Array
from jaxtyping import Key

from jaxfl._support.checks import GAUSSIAN, at_least_0, checked, nonzero
from jaxfl.algorithms.fedavg import GradientRule, Penalty, dp_fedavg, keeps_models
from jaxfl.algorithms.server import Server
from jaxfl.local.penalties import proximal
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.types import Algorithm, ClientData, Model, Number, Params


@checked(**GAUSSIAN, penalty_weight=at_least_0)
def ditto(
    model: Model,
    *,
    penalty_weight: Number = 1.0,
    personal: LocalSGD = LocalSGD(optax.sgd(0.05)),
    clip: Number = math.inf,
    noise_multiplier: Number = 0.0,
    sampling: Sampling = Full(),
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
    penalty: Penalty | None = None,
    gradient: GradientRule | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build Ditto: (private) FedAvg for w, and a personal model per client, which is never sent.

    .. math:: v_i \approx \arg\min_v F_i(v) + \frac{\lambda}{2} \|v - w^t\|^2

    A participant continues to train its :math:`v_i` from where its own last round ended. The
    client is evaluated with :math:`v_i`.

    Args:
        model: The network.
        penalty_weight: :math:`\lambda`. With 0, v is trained without w.
        personal: Local training of v in one round.
        clip: C, the L2 bound on the update of w. Infinity, the default, clips nothing, and allows
            no noise.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        local: Local training of w in one round. A `DPSGD` protects single examples.
        penalty: Function of the client's parameters and the broadcast ones, whose value is added to
            the loss of w. None adds nothing.
        gradient: Function that changes how a local step of w computes its gradient, such as
            `jaxfl.local.sam.sam(0.5)`. None takes the gradient of the batch.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: The guarantee of `dp_fedavg`, whose messages are bitwise the same. Personal models
        have joint privacy: each client is protected against all other clients, but its model
        depends on its own data. Publishing personal models voids the guarantee.
    Deviations from the paper: Weights are uniform. If the batch sizes agree, w and v take batches
        in the same order.
    References: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML
        2021 (arXiv:2012.04221), Algorithm 1.

    >>> from jaxfl.models import mlp
    >>> ditto(mlp((8, 8, 1), 10), penalty_weight=0.5).name
    'ditto'
    """
    base = dp_fedavg(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        local=local,
        penalty=penalty,
        gradient=gradient,
        server_optimizer=server_optimizer,
        delta=delta,
    )

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        # The same key, so that w and v see the same batches.
        message, _, info = base.client_update(key, server, (), data)
        pull = None
        if nonzero(penalty_weight):
            pull = functools.partial(proximal, center=server.params, mu=penalty_weight)
        trained, _ = personal.train(key, model, client, data, penalty=pull)
        # The message is that of w alone, so the training of v costs no privacy.
        return message, trained, info

    return keeps_models(base, "ditto", client_update)
