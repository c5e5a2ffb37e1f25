"""IFCA: several shared models, and clients that choose the one with the least loss."""

import math

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from jaxfl._support.checks import GAUSSIAN, check_count, checked
from jaxfl.algorithms.server import Server, init_server, server_step
from jaxfl.local.sums import summed
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms, Tree


@checked(clusters=check_count, **GAUSSIAN)
def ifca(
    model: Model,
    *,
    clusters: int = 4,
    local: LocalSGD = LocalSGD(optax.sgd(0.05)),
    clip: Number = math.inf,
    noise_multiplier: Number = 0.0,
    sampling: Sampling = Full(),
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build IFCA: k shared models, each trained by the clients for which its loss is the least.

    .. math::
        j_i = \arg\min_j F_i(\theta_j), \qquad
        \theta_j \leftarrow \theta_j + \frac{\eta_g k}{q N} \Big(
            \sum_{i \in \Omega_t : j_i = j} \mathrm{clip}_C(\Delta_i) + N(0, z^2 C^2 I) \Big)

    A message holds an update for every model. All of them but one are 0, so that the message has
    the norm of one update. The guarantee therefore covers the choice too. At an evaluation each
    client chooses again. Clients keep nothing between rounds.

    Args:
        model: The network. Each of the k models starts from its own random draw.
        clusters: k, the number of models.
        local: Optimizer, batches and epochs with which a client trains its model in a round.
        clip: C, L2 bound on a client's update. Infinity clips nothing, and allows no noise.
        noise_multiplier: z, std of the noise on the sum, in units of C (see
            `jaxfl.privacy.calibrate`).
        sampling: Rule that draws the participants of each round. The default draws all clients.
        server_optimizer: Optimizer that takes the negative aggregate of all k models as its
            gradient. The default adds the aggregate to the models.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy with zero-out adjacency and sensitivity C, for the observer of
        sums and broadcasts. Choices have joint privacy: each client is protected against all other
        clients, but its choice depends on its own data. Publishing choices voids the guarantee.
    Deviations from the paper: Updates are clipped and noised. The sum of a cluster is divided by
        the number of clients that a round expects in it if all clusters are equally large. The
        paper divides by the number of clients that chose it. All layers belong to a cluster. The
        paper can also share some layers.
    References: Ghosh, Chung, Yin, Ramchandran, An Efficient Framework for Clustered Federated
        Learning, NeurIPS 2020 (arXiv:2006.04088), Algorithm 1 with model averaging.

    >>> from jaxfl.models import mlp
    >>> ifca(mlp((8, 8, 1), 10, hidden=(16,)), clusters=2).name
    'ifca'
    """

    def init(key: Key[Array, ""], num_clients: int) -> tuple[Server, Tree]:
        del num_clients
        # Equal models would have equal losses, and all clients would choose the first one.
        several = jax.vmap(model.init)(jax.random.split(key, clusters))
        return init_server(several, server_optimizer), ()

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        chosen = _cluster_of(model, server.params, data)
        start = _one_of(server.params, chosen)
        params, info = local.train(key, model, start, data)
        update = optax.tree.sub(params, start)
        others = optax.tree.zeros_like(server.params)
        message = jax.tree.map(lambda leaf, own: leaf.at[chosen].set(own), others, update)
        return Message(message), client, info

    def server_update(server: Server, aggregate: Tree) -> Server:
        # The mechanism divides by all expected participants, of which a cluster has a k-th part.
        return server_step(server_optimizer, server, optax.tree.scale(clusters, aggregate))

    def personalize(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> Params:
        del key, client
        return _one_of(server.params, _cluster_of(model, server.params, data))

    return Algorithm(
        name="ifca",
        model=model,
        init=init,
        client_update=client_update,
        server_update=server_update,
        personalize=personalize,
        mechanism=Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling),
        terms=Terms(delta),
    )


def _cluster_of(model: Model, several: Params, data: ClientData) -> Int[Array, ""]:
    """Return the index of the model with the least loss on a client's examples."""

    def losses(x: Array, labels: Array, real: Bool[Array, "B"]) -> Float[Array, "k"]:
        outputs = jax.vmap(lambda params: model.apply(params, x))(several)
        own = jax.vmap(lambda outputs: model.task.loss(outputs, labels))(outputs)
        # A product with 0 would keep a NaN of padding.
        return jnp.sum(jnp.where(real, own, 0), axis=1)

    return index_of_least(summed(model, data, losses))


def index_of_least(losses: Float[Array, "n"]) -> Int[Array, ""]:
    """Return the index of the least loss, where NaN counts as infinite."""
    # `argmin` would choose a NaN.
    return jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses))


def _one_of(several: Params, index: Int[Array, ""]) -> Params:
    """Return the model at `index` of several models that are stacked along the first axis."""
    return jax.tree.map(lambda leaf: leaf[index], several)
