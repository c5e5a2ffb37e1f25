"""Where the server and its clients start, and the server's optimizer step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxfl.types import Clients, Params, Tree


class Server(NamedTuple):
    """Global parameters and the state of the server's optimizer."""

    params: Params
    optimizer: Tree


def init_server(params: Params, optimizer: optax.GradientTransformation) -> Server:
    """Start from `params` with a fresh optimizer state."""
    return Server(params, optimizer.init(params))


def init_clients(params: Params, clients: Clients) -> Params:
    """Client states [C, ...] that all start from `params`."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (clients.number, *leaf.shape)), params)


def server_step(optimizer: optax.GradientTransformation, server: Server, aggregate: Tree) -> Server:
    r"""One optimizer step with the aggregated update as the negative gradient (FedOpt, Reddi et al. 2021).

    `optax.sgd(eta_g)` is :math:`\theta \leftarrow \theta + \eta_g \, \mathrm{aggregate}`.
    """
    updates, state = optimizer.update(optax.tree.scale(-1, aggregate), server.optimizer, server.params)
    return Server(optax.apply_updates(server.params, updates), state)
