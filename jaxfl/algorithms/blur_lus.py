"""BLUR + LUS: DP-FedAvg whose clients keep updates short and sparse before clipping."""

import functools

import optax
from jax import Array
from jaxtyping import Key

from jaxfl._support.checks import (
    GAUSSIAN,
    at_least_0,
    check_fraction,
    checked,
    nonzero,
)
from jaxfl.algorithms.fedavg import GradientRule, dp_fedavg
from jaxfl.algorithms.server import Server
from jaxfl.local.masks import number_sent, sparsify, top_k_masks
from jaxfl.local.penalties import check_bound, excess
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.sampling import Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Sparse, Tree


@checked(**GAUSSIAN, penalty_weight=at_least_0, density=check_fraction)
def blur_lus(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    penalty_weight: Number = 0.1,
    density: Number = 0.5,
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
    gradient: GradientRule | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build DP-FedAvg with bounded (BLUR) and sparsified (LUS) local updates.

    .. math::
        w_i &\approx \arg\min_w F_i(w) + \frac{\lambda}{2} \max(0, \|w - w^t\|^2 - C^2) \\
        \Delta_i &= (w_i - w^t) \odot \mathrm{TopK}(|w_i - w^t|, c)

    Args:
        model: The network.
        clip: C, the L2 bound on a client's full update, in the penalty and in clipping.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        penalty_weight: :math:`\lambda`. With 0 there is no penalty.
        density: c, the share of each kernel's update that is sent: its largest entries, where ties
            go to the lower index. Biases and scales are sent in full. With 1 everything is sent.
        local: Local training of a client in one round. A `DPSGD` protects single examples.
        gradient: Function that changes how a local step computes its gradient, such as
            `jaxfl.local.sam.sam(0.5)`. None takes the gradient of the batch.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy under zero-out adjacency, for the observer of sums and
        broadcasts, by the Gaussian mechanism on the clipped sum, whose sensitivity is C. The masks
        are private: no mask is sent, and the noise is on all weights.
    Deviations from the paper: The formulas were not checked against the paper. The importance of
        an entry is the update's magnitude. The denominator qN is fixed.
    References: Cheng et al., Differentially Private Federated Learning with Local Regularization
        and Sparsification, CVPR 2022.

    Raises:
        ValueError: The clip bound is infinite, and there is a penalty or noise.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> blur_lus(mlp((8, 8, 1), 10), clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'blur_lus'
    """
    check_bound(clip, "penalty_weight", penalty_weight)
    # BLUR: with the weight 0, no step computes the penalty.
    penalty = None
    if nonzero(penalty_weight):
        penalty = functools.partial(excess, bound=clip, penalty_weight=penalty_weight)
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

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        message, client, info = base.client_update(key, server, client, data)
        # LUS: small entries are cut before the engine clips, so they take no part in the norm.
        masks = top_k_masks(message.update, model.layers, density)
        return Message(sparsify(masks, message.update)), client, info

    # The places of the largest entries follow from data, so clients must send them, too.
    values = functools.partial(number_sent, layers=model.layers, density=density)
    return base._replace(
        name="blur_lus", client_update=client_update, sparse=Sparse(values, public=False)
    )
