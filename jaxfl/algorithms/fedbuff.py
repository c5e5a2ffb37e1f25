"""FedBuff: a buffered asynchronous server, around any method that sends updates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Key

from jaxfl._support.checks import check_array, check_counts, checked, count_from_0
from jaxfl.algorithms.server import init_clients
from jaxfl.types import Algorithm, ClientData, Params, Tree

_STALENESS = 2**31 + 3
"""Number folded into a client's key to draw its staleness."""


class Versions(NamedTuple):
    """The server's current state, and its last S + 1 states, the current one included."""

    current: Tree
    known: Tree
    """States from which clients may train [S + 1, ...]. The first is `current`, the newest."""


def _check_staleness(name: str, value: Any) -> int | Int[np.ndarray, "C"]:
    if check_array(name, value).ndim == 0:
        return count_from_0(name, value)
    return np.array(check_counts(name, value, least=0, empty=False), np.int32)


@checked(staleness=_check_staleness)
def fedbuff(algorithm: Algorithm, *, staleness: int | Int[np.ndarray, "C"]) -> Algorithm:
    r"""Let the clients of a method train from a broadcast that is up to S rounds old.

    .. math::
        \tau_i \sim \mathrm{uniform}\{0, \dots, S\}, \qquad
        \Delta_i = \frac{1}{\sqrt{1 + \tau_i}} \, \mathrm{update}(\theta^{t - \tau_i}), \qquad
        \theta^{t+1} = \mathrm{server}(\theta^t, \mathrm{aggregate}(\Delta))

    A round is one full buffer of updates. The simulation draws staleness, or takes it from the
    speeds of clients: if the server takes a step every p seconds, and client i needs
    :math:`s_i` seconds, then :math:`\tau_i = \lceil s_i / p \rceil - 1` (see `jaxfl.Clock`). The
    server keeps S + 1 states.

    Args:
        algorithm: A method whose clients send updates, not weights, because stale starts bias
            weights.
        staleness: S, in rounds, or the staleness of each client `[C]`, whose largest is S. With 0
            the method is unchanged.

    Guarantee: The method's guarantee, for the observer of sums and broadcasts, because updates are
        clipped after scaling, and a client's staleness concerns its own update alone. The sampler
        says which clients fill a buffer. Poisson sampling and fixed sizes amplify only if a
        deployment draws its cohorts in this way.
    Deviations from the paper: The buffer's size is the sampler's cohort. Staleness is uniform, or
        each client's own. If a method has a mask for each round, what a stale client sends off the
        current mask is lost.
    References: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS
        2022 (arXiv:2106.06639).

    Raises:
        ValueError: The method sends weights. When a run starts: staleness is neither one number nor
            one for each client.

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.models import mlp
    >>> fedbuff(fedavg(mlp((8, 8, 1), 10, hidden=(16,))), staleness=3).name
    'fedbuff(fedavg)'
    """
    if algorithm.sends == "weights":
        raise ValueError(
            f"algorithm must send updates, got {algorithm.name!r}, which sends weights. "
            "Choose a method that sends updates, because stale starts bias weights."
        )

    oldest = int(np.max(staleness))
    by_client = np.ndim(staleness) == 1

    def init(key: Key[Array, ""], num_clients: int) -> tuple[Versions, Tree]:
        if by_client and np.size(staleness) != num_clients:
            raise ValueError(
                f"staleness must be one number, or one for each of {num_clients} clients, got "
                f"{np.size(staleness)} numbers. Give one for each client."
            )
        server, clients = algorithm.init(key, num_clients)
        # Clients of the first rounds have no older state than the first one.
        return Versions(server, init_clients(server, oldest + 1)), clients

    def age_of(key: Key[Array, ""], client_id: Any) -> Int[Array, ""]:
        if by_client:
            return jnp.asarray(staleness)[client_id]
        # The key is the client's own, so clients draw independently of each other.
        return jax.random.randint(jax.random.fold_in(key, _STALENESS), (), 0, oldest + 1)

    def client_update(
        key: Key[Array, ""], server: Versions, client: Tree, data: ClientData
    ) -> tuple:
        age = age_of(key, data.id)
        old = jax.tree.map(lambda leaf: leaf[age], server.known)
        message, client, info = algorithm.client_update(key, old, client, data)
        # The engine clips after this scaling, so the sensitivity of the sum stays the same.
        scaled = jax.tree.map(lambda leaf: leaf / jnp.sqrt(1.0 + age), message.update)
        return message._replace(update=scaled), client, info

    def server_update(server: Versions, aggregate: Tree) -> Versions:
        current = algorithm.server_update(server.current, aggregate)
        # The oldest state is dropped, so that S + 1 states remain.
        known = jax.tree.map(_prepended, current, server.known)
        return Versions(current, known)

    def personalize(
        key: Key[Array, ""], server: Versions, client: Tree, data: ClientData
    ) -> Params:
        # An evaluation has no delay, so it takes the newest state.
        return algorithm.personalize(key, server.current, client, data)

    return algorithm._replace(
        name=f"fedbuff({algorithm.name})",
        init=init,
        client_update=client_update,
        server_update=server_update,
        personalize=personalize,
    )


def _prepended(new: Array, old: Array) -> Array:
    """Return an array with a new first entry, and without its last one."""
    return jnp.concatenate([new[None], old[:-1]])
