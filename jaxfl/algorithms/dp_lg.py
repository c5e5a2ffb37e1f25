"""LG-FedAvg with differential privacy: a shared head, and extractors that clients keep."""

import functools

import optax
from jax import Array
from jaxtyping import Key

from jaxfl._support.checks import GAUSSIAN, checked
from jaxfl.algorithms.fedrep import check_extractor, split_head
from jaxfl.algorithms.server import Server, init_clients, init_server, server_step
from jaxfl.local.train import LocalSGD, check_head
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Params, Terms


@checked(**GAUSSIAN)
def dp_lg(
    model: Model,
    *,
    clip: float,
    noise_multiplier: float,
    sampling: Sampling,
    local: LocalSGD = LocalSGD(optax.sgd(0.01, momentum=0.5), 64, 5),
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build LG-FedAvg: a client trains its own extractor with the shared head, and sends the head.

    .. math::
        (\phi_i, h_i) &\leftarrow \arg\min F_i(\phi, h) \text{ from } (\phi_i, h^{t-1}) \\
        h^t &= h^{t-1} + \frac{\eta_g}{q N}
            \Big( \sum_{i} \mathrm{clip}_C(h_i - h^{t-1}) + N(0, z^2 C^2 I) \Big)

    **A guess**: the ADP-PFL paper compares with a "DP-LG" that it neither explains nor cites. This
    method is one reading.

    Args:
        model: The network. All layers except `model.head` stay with the clients.
        clip: C, the L2 bound on a client's head update.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        local: Local training of a client in one round.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy under zero-out adjacency, for the observer of sums and
        broadcasts, with sensitivity C. Extractors have joint privacy: each client is protected
        against all other clients, but its extractor depends on its own data. Publishing extractors
        voids the guarantee.
    Deviations from the paper: Weights are uniform, and all clients start from the same extractor.
    References: Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global
        Representations, 2020 (arXiv:2001.01523).

    Raises:
        ValueError: The model has no head, or no layer outside its head.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Full
    >>> network = mlp((8, 8, 1), 10, hidden=(16,))
    >>> dp_lg(network, clip=1.0, noise_multiplier=4.0, sampling=Full()).name
    'dp_lg'
    """
    check_head(model)
    check_extractor(model)

    def init(key: Key[Array, ""], num_clients: int) -> tuple[Server, Params]:
        extractor, head = split_head(model, model.init(key))
        return init_server(head, server_optimizer), init_clients(extractor, num_clients)

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        # Both parts train together, but only the head's change is clipped, noised and sent.
        params, info = local.train(key, model, {**client, **server.params}, data)
        extractor, head = split_head(model, params)
        return Message(optax.tree.sub(head, server.params)), extractor, info

    def personalize(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> Params:
        return {**client, **server.params}

    server_update = functools.partial(server_step, server_optimizer)
    mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling)
    return Algorithm(
        "dp_lg",
        model,
        init,
        client_update,
        server_update,
        personalize,
        mechanism,
        terms=Terms(delta),
    )
