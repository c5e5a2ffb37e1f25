"""FedBuff: a buffered asynchronous server, around any method that sends updates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Key

from jaxfl._validate import checked, count_from_0
from jaxfl.server import init_clients
from jaxfl.types import Algorithm, ClientData, Params, Tree

_STALENESS = 2**31 + 3


class Versions(NamedTuple):
    """The server's state, and the states clients may train from, newest first [S + 1, ...]."""

    current: Tree
    known: Tree


@checked(staleness=count_from_0)
def fedbuff(algorithm: Algorithm, *, staleness: int) -> Algorithm:
    r"""Clients train from a broadcast that is up to S rounds old; a round is one full buffer of updates.

    .. math::
        \tau_i \sim \mathrm{uniform}\{0, \dots, S\}, \qquad
        \Delta_i = \frac{1}{\sqrt{1 + \tau_i}} \, \mathrm{update}(\theta^{t - \tau_i}), \qquad
        \theta^{t+1} = \mathrm{server}(\theta^t, \mathrm{aggregate}(\Delta))

    The simulation draws staleness; in a deployment it comes from clients' different speeds. The server keeps S + 1
    states.

    Args:
        algorithm: a method whose clients send updates, not weights: stale starts bias these.
        staleness: S; 0 is the method itself.

    Guarantee: the method's, for the observer of sums and broadcasts: updates are clipped after scaling, and staleness
        does not depend on data. The sampler says who fills a buffer: Poisson sampling and fixed sizes amplify only if a
        deployment draws its cohorts so.
    Deviations from the paper: the buffer's size is the sampler's cohort. Staleness is uniform. Where a method has
        a mask for each round, what a stale client sends off the current one is lost.
    References: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022
        (arXiv:2106.06639).

    Raises:
        ValueError: a method that sends weights.

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.models import mlp
    >>> fedbuff(fedavg(mlp((8, 8, 1), 10, hidden=(16,))), staleness=3).name
    'fedbuff(fedavg)'
    """
    if algorithm.sends == "weights":
        raise ValueError(
            f"algorithm={algorithm.name!r} sends weights, which stale starts bias: give one for updates"
        )

    def init(key: Key[Array, ""], number: int) -> tuple[Versions, Tree]:
        server, clients = algorithm.init(key, number)
        return Versions(server, init_clients(server, staleness + 1)), clients

    def client_update(
        key: Key[Array, ""], server: Versions, client: Tree, data: ClientData
    ) -> tuple:
        age = jax.random.randint(jax.random.fold_in(key, _STALENESS), (), 0, staleness + 1)
        old = jax.tree.map(lambda leaf: leaf[age], server.known)
        message, client, info = algorithm.client_update(key, old, client, data)
        scaled = jax.tree.map(lambda leaf: leaf / jnp.sqrt(1.0 + age), message.update)
        return message._replace(update=scaled), client, info

    def server_update(server: Versions, aggregate: Tree) -> Versions:
        current = algorithm.server_update(server.current, aggregate)
        known = jax.tree.map(
            lambda new, old: jnp.concatenate([new[None], old[:-1]]), current, server.known
        )
        return Versions(current, known)

    def personalize(
        key: Key[Array, ""], server: Versions, client: Tree, data: ClientData
    ) -> Params:
        return algorithm.personalize(key, server.current, client, data)

    return algorithm._replace(
        name=f"fedbuff({algorithm.name})",
        init=init,
        client_update=client_update,
        server_update=server_update,
        personalize=personalize,
    )
