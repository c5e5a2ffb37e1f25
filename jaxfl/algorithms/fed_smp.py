"""Fed-SMP: sparse updates on a random public mask, and noise on this mask alone."""

import functools

import optax
from jax import Array
from jaxtyping import Key, UInt32

from jaxfl._support.checks import GAUSSIAN, check_fraction, checked
from jaxfl.algorithms.fedavg import GradientRule, Penalty, dp_fedavg
from jaxfl.algorithms.server import Server, SparseServer, init_sparse, public_key, sparse_step
from jaxfl.local.masks import keep, number_sent, random_masks, sparsify
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.sampling import Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Sparse, Tree


@checked(**GAUSSIAN, density=check_fraction)
def fed_smp(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    density: Number = 0.1,
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
    penalty: Penalty | None = None,
    gradient: GradientRule | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build Fed-SMP with one random mask per round, drawn from a public key for all clients.

    .. math:: \theta \leftarrow \theta + \frac{\eta_g}{q N} M^t \odot
        \Big( \sum_{i \in \Omega_t} \mathrm{clip}_C(M^t \odot \Delta_i) + N(0, z^2 C^2 I) \Big)

    Clients train all weights. Clipping shrinks a sparse update less, and fewer weights have noise.

    Args:
        model: The network.
        clip: C, the L2 bound on a client's sparse update.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        density: S, the share of each kernel's weights that is sent: max(1, ceil(S n)) of n. Biases
            and scales are sent in full.
        local: Local training of a client in one round. A `DPSGD` protects single examples.
        penalty: Function of the client's parameters and the broadcast ones, whose value is added to
            the loss. None adds nothing.
        gradient: Function that changes how a local step computes its gradient, such as
            `jaxfl.local.sam.sam(0.5)`. None takes the gradient of the batch.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate. With
            momentum, weights off this round's mask move too.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy under zero-out adjacency, for the observer of sums and
        broadcasts, by the Gaussian mechanism on the clipped sum, whose sensitivity is C. The mask
        depends on no data, and noise off the mask is dropped afterwards.
    Deviations from the paper: The mask is random layer by layer, not over all weights. Updates are
        not scaled up by the inverse density, which `server_optimizer` can do. Noise is added to the
        sum, not in shares by clients.
    References: Hu, Guo, Gong, Federated Learning with Sparsified Model Perturbation: Improving
        Accuracy under Client-Level Differential Privacy, IEEE Transactions on Mobile Computing 2024
        (arXiv:2202.07178).

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> fed_smp(mlp((8, 8, 1), 10), clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'fed_smp'
    """
    base = dp_fedavg(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        local=local,
        penalty=penalty,
        gradient=gradient,
        delta=delta,
    )

    def masks(params: Params, public: UInt32[Array, "2"]) -> tuple[Tree, Tree]:
        # Clients train all weights, so the forward pass has no mask.
        return (), random_masks(public_key(public), params, model.layers, density)

    def init(key: Key[Array, ""], num_clients: int) -> tuple[SparseServer, Tree]:
        return init_sparse(key, model.init(key), server_optimizer, masks), ()

    def client_update(
        key: Key[Array, ""], server: SparseServer, client: Tree, data: ClientData
    ) -> tuple:
        # The base trains as in DP-FedAvg, and knows no masks.
        dense = Server(server.params, server.optimizer)
        message, client, info = base.client_update(key, dense, client, data)
        return Message(sparsify(server.support, message.update)), client, info

    def server_update(server: SparseServer, aggregate: Tree) -> SparseServer:
        # The noise is on all coordinates. The mask is public, so dropping some costs no privacy.
        aggregate = keep(server.support, aggregate)
        return sparse_step(server_optimizer, server, aggregate, masks)

    values = functools.partial(number_sent, layers=model.layers, density=density)
    return base._replace(
        name="fed_smp",
        init=init,
        client_update=client_update,
        server_update=server_update,
        sparse=Sparse(values, public=True),
    )
