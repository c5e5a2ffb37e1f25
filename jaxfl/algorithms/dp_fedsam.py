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
    r"""DP-FedSAM: flat minima are harmed less by clipping and noise.

    .. math:: w \leftarrow w - \eta \nabla F_i(w + \rho \, g / \|g\|_2), \qquad g = \nabla F_i(w)

    both gradients on the same batch; then as DP-FedAvg. A step takes twice the time of a plain one.

    Args:
        model: the network.
        clip: C, L2 bound on a client's whole update.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        radius: rho; 0 is DP-FedAvg.
        options: those of `dp_fedavg`; `local` a `LocalSGD`, since a step reads its batch twice.

    Guarantee: DP-FedAvg's: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts,
        by the Gaussian mechanism on the clipped sum; local steps play no part in it.
    Deviations from the paper: the published code clips each tensor to C, so a whole update to C times the root of
        their number; here one norm bounds all. Uniform weights, not data sizes. A fixed denominator qN.
    References: Shi et al., Make Landscape Flatter in Differentially Private Federated Learning, CVPR 2023.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> dp_fedsam(mlp((8, 8, 1), 10), clip=0.2, noise_multiplier=0.95, sampling=Poisson(0.1)).name
    'dp_fedsam'
    """
    private = {"clip": clip, "noise_multiplier": noise_multiplier, "sampling": sampling}
    gradient = sam(radius) if nonzero(radius) else None
    return dp_fedavg(model, gradient=gradient, **private, **options)._replace(name="dp_fedsam")
