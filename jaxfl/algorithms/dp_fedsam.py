"""DP-FedSAM: DP-FedAvg whose clients take sharpness-aware steps."""

import optax

from jaxfl._support.checks import GAUSSIAN, at_least_0, checked, nonzero
from jaxfl.algorithms.fedavg import GradientRule, Penalty, dp_fedavg
from jaxfl.local.sam import sam
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.sampling import Sampling
from jaxfl.types import Algorithm, Model, Number


@checked(**GAUSSIAN, radius=at_least_0)
def dp_fedsam(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    radius: Number = 0.5,
    local: LocalSGD = LocalSGD(optax.sgd(0.05)),
    penalty: Penalty | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build DP-FedSAM, which looks for flat minima, because clipping and noise harm them less.

    .. math:: w \leftarrow w - \eta \nabla F_i(w + \rho \, g / \|g\|_2), \qquad g = \nabla F_i(w)

    A local step takes both gradients on the same batch, and twice the time of a plain step. All
    else is as in DP-FedAvg.

    Args:
        model: The network.
        clip: C, the L2 bound on a client's full update.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        radius: :math:`\rho`. With 0 the method is DP-FedAvg.
        local: Local training of a client in one round. A step reads its batch twice, so that it
            cannot be a `DPSGD`.
        penalty: Function of the client's parameters and the broadcast ones, whose value is added to
            the loss. None adds nothing.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy under zero-out adjacency, for the observer of sums and
        broadcasts, by the Gaussian mechanism on the clipped sum, whose sensitivity is C. Local
        steps play no part in this guarantee, which is that of DP-FedAvg.
    Deviations from the paper: One norm bounds the full update. The published code clips each tensor
        to C, and therefore the full update to C times the root of the number of tensors. Weights
        are uniform, not data sizes. The denominator qN is fixed.
    References: Shi et al., Make Landscape Flatter in Differentially Private Federated Learning,
        CVPR 2023.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> dp_fedsam(mlp((8, 8, 1), 10), clip=0.2, noise_multiplier=0.95, sampling=Poisson(0.1)).name
    'dp_fedsam'
    """
    gradient: GradientRule | None = None
    # Without an ascent, a step needs one gradient and not two.
    if nonzero(radius):
        gradient = sam(radius)
    method = dp_fedavg(
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
    return method._replace(name="dp_fedsam")
