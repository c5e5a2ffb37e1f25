"""BLUR + LUS: local updates that are kept short and made sparse before they are clipped."""

import functools
from typing import Any

from jax import Array
from jaxtyping import Key

from jaxfl._validate import (
    at_least_0,
    check_fraction,
    check_noise,
    checked,
    nonzero,
    up_to_infinity,
)
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.local.masks import sparsify, top_k_masks
from jaxfl.local.penalties import check_bound, excess
from jaxfl.privacy.sampling import Sampling
from jaxfl.server import Server
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Tree


@checked(
    clip=up_to_infinity,
    noise_multiplier=check_noise,
    penalty_weight=at_least_0,
    density=check_fraction,
)
def blur_lus(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    penalty_weight: Number = 0.1,
    density: Number = 0.5,
    **options: Any,
) -> Algorithm:
    r"""DP-FedAvg with bounded local update regularisation (BLUR) and local update sparsification (LUS).

    .. math::
        w_i \approx \arg\min_w F_i(w) + \frac{\lambda}{2} \max(0, \|w - w^t\|^2 - C^2), \qquad
        \Delta_i = (w_i - w^t) \odot \mathrm{TopK}(|w_i - w^t|, c)

    Args:
        model: the network.
        clip: C, of the penalty and of clipping.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        penalty_weight: lambda; 0: no penalty.
        density: c, the share of a kernel's update that is kept, layer by layer: its largest entries, ties to the lower
            index. Biases and scales are kept whole. 1: all.
        options: those of `dp_fedavg`.

    Guarantee: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts, by the Gaussian
        mechanism on the clipped sum. The masks are private, so the noise is on all weights, and no mask is sent.
    Deviations from the paper: formulas were not checked against it; importance is the update's magnitude. A fixed
        denominator qN.
    References: Cheng et al., Differentially Private Federated Learning with Local Regularization and Sparsification,
        CVPR 2022.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> blur_lus(mlp((8, 8, 1), 10), clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'blur_lus'
    """
    check_bound(clip, "penalty_weight", penalty_weight)
    penalty = (
        functools.partial(excess, bound=clip, penalty_weight=penalty_weight)
        if nonzero(penalty_weight)
        else None
    )
    private = {"clip": clip, "noise_multiplier": noise_multiplier, "sampling": sampling}
    base = dp_fedavg(model, penalty=penalty, **private, **options)

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        message, client, info = base.client_update(key, server, client, data)
        return (
            Message(sparsify(top_k_masks(message.update, model.layers, density), message.update)),
            client,
            info,
        )

    return base._replace(name="blur_lus", client_update=client_update)
