"""First states of server and clients, and the server's optimizer step, with or without public masks."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Key, UInt32

from jaxfl.types import Params, Tree


class Server(NamedTuple):
    """Global parameters and the state of the server's optimizer."""

    params: Params
    optimizer: Tree


class SparseServer(NamedTuple):
    """A server, the masks that it broadcasts, and the data of the public key for random masks."""

    params: Params
    optimizer: Tree
    mask: Tree
    """Coordinates that the forward pass keeps."""
    support: Tree
    """Coordinates that are trained and sent."""
    public: UInt32[Array, "2"]


Masks = Callable[[Params, UInt32[Array, "2"]], tuple[Tree, Tree]]
"""Forward mask and support of a round, from the broadcast parameters and the data of its public key."""


def init_server(params: Params, optimizer: optax.GradientTransformation) -> Server:
    """Start from `params` with a fresh optimizer state."""
    return Server(params, optimizer.init(params))


def init_clients(params: Params, number: int) -> Params:
    """Client states [C, ...] that all start from `params`."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (number, *leaf.shape)), params)


def server_step(optimizer: optax.GradientTransformation, server: Server, aggregate: Tree) -> Server:
    r"""One optimizer step with the aggregated update as the negative gradient (FedOpt, Reddi et al. 2021).

    `optax.sgd(eta_g)` is :math:`\theta \leftarrow \theta + \eta_g \, \mathrm{aggregate}`.
    """
    updates, state = optimizer.update(optax.tree.scale(-1, aggregate), server.optimizer, server.params)
    return Server(optax.apply_updates(server.params, updates), state)


def init_sparse(
    key: Key[Array, ""], params: Params, optimizer: optax.GradientTransformation, masks: Masks
) -> SparseServer:
    """Start from `params`, with a public key and the first round's masks."""
    public = jax.random.bits(jax.random.fold_in(key, 1), (2,), jnp.uint32)
    return SparseServer(*init_server(params, optimizer), *masks(params, public), public)


def sparse_step(
    optimizer: optax.GradientTransformation, server: SparseServer, aggregate: Tree, masks: Masks
) -> SparseServer:
    """`server_step`, and the next round's public key and masks."""
    params, state = server_step(optimizer, Server(server.params, server.optimizer), aggregate)
    public = jax.random.key_data(_split(server.public)[1])
    return SparseServer(params, state, *masks(params, public), public)


def public_key(public: UInt32[Array, "2"]) -> Key[Array, ""]:
    """This round's public key."""
    return _split(public)[0]


def _split(public: UInt32[Array, "2"]) -> Key[Array, "2"]:
    """This round's key, and the next round's."""
    return jax.random.split(jax.random.wrap_key_data(public, impl="threefry2x32"))
