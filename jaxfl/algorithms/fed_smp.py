"""Fed-SMP: sparse updates on a random mask that is public, and noise on that mask alone."""

from typing import Any

import optax
from jax import Array
from jaxtyping import Key, UInt32

from jaxfl._validate import check_fraction, check_noise, checked, up_to_infinity
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.local.masks import keep, random_masks, sparsify
from jaxfl.privacy.sampling import Sampling
from jaxfl.server import Server, SparseServer, init_sparse, public_key, sparse_step
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Tree


@checked(clip=up_to_infinity, noise_multiplier=check_noise, density=check_fraction)
def fed_smp(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    density: Number = 0.1,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    **options: Any,
) -> Algorithm:
    r"""Fed-SMP with random sparsification: one mask per round for all clients, from a public key.

    .. math:: \theta \leftarrow \theta + \frac{\eta_g}{q N} M^t \odot
        \Big( \sum_{i \in \Omega_t} \mathrm{clip}_C(M^t \odot \Delta_i) + N(0, z^2 C^2 I) \Big)

    Clients train all weights; a shorter update is clipped less, and fewer weights are noised.

    Args:
        model: the network.
        clip: C, L2 bound on a client's sparse update.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        density: share of each kernel's weights that is sent; max(1, ceil(S n)) of n. Biases and scales are sent whole.
        server_optimizer: takes the negative aggregate as its gradient; with momentum, weights off this round's mask
            move too.
        options: those of `dp_fedavg`.

    Guarantee: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts, by the Gaussian
        mechanism on the clipped sum: the mask depends on no data, and noise off it is dropped afterwards.
    Deviations from the paper: the mask is random layer by layer, not over all weights; updates are not scaled up by
        the inverse density (`server_optimizer` can do that); noise is added to the sum, not in shares by clients.
    References: Hu, Guo, Gong, Federated Learning with Sparsified Model Perturbation: Improving Accuracy under
        Client-Level Differential Privacy, IEEE Transactions on Mobile Computing 2024 (arXiv:2202.07178).

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> fed_smp(mlp((8, 8, 1), 10), clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'fed_smp'
    """
    base = dp_fedavg(
        model, clip=clip, noise_multiplier=noise_multiplier, sampling=sampling, **options
    )

    def masks(params: Params, public: UInt32[Array, "2"]) -> tuple[Tree, Tree]:
        return (), random_masks(public_key(public), params, model.layers, density)

    def init(key: Key[Array, ""], number: int) -> tuple[SparseServer, Tree]:
        return init_sparse(key, model.init(key), server_optimizer, masks), ()

    def client_update(
        key: Key[Array, ""], server: SparseServer, client: Tree, data: ClientData
    ) -> tuple:
        message, client, info = base.client_update(
            key, Server(server.params, server.optimizer), client, data
        )
        return Message(sparsify(server.support, message.update)), client, info

    def server_update(server: SparseServer, aggregate: Tree) -> SparseServer:
        return sparse_step(server_optimizer, server, keep(server.support, aggregate), masks)

    return base._replace(
        name="fed_smp", init=init, client_update=client_update, server_update=server_update
    )
