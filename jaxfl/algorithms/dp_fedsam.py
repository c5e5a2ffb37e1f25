"""DP-FedSAM: DP-FedAvg whose clients take sharpness-aware steps."""

from typing import Any

from jaxfl._validate import at_least_0, check_noise, checked, nonzero, up_to_infinity
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.local.sam import sam
from jaxfl.privacy.sampling import Sampling
from jaxfl.types import Algorithm, Model, Number


@checked(clip=up_to_infinity, noise_multiplier=check_noise, radius=at_least_0)
def dp_fedsam(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    radius: Number = 0.5,
    **options: Any,
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
        options: Further arguments of `dp_fedavg`: `local`, `penalty`, `server_optimizer`, `delta`.
            `local` must be a `LocalSGD`, since a step reads its batch twice.

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
    private = {"clip": clip, "noise_multiplier": noise_multiplier, "sampling": sampling}
    gradient = sam(radius) if nonzero(radius) else None
    return dp_fedavg(model, gradient=gradient, **private, **options)._replace(name="dp_fedsam")
