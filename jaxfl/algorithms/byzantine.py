"""Clients that lie to the server, around any method."""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Key

from jaxfl._support.checks import at_least_0, check_counts, checked, show
from jaxfl.types import Algorithm, ClientData, Tree

_LIE = 2**31 + 5
"""Number folded into a client's key for the noise that it sends."""


@checked(liars=functools.partial(check_counts, least=0), scale=at_least_0)
def byzantine(
    algorithm: Algorithm,
    liars: Sequence[int] | np.ndarray,
    *,
    attack: Literal["sign", "noise"] = "sign",
    scale: float = 1.0,
) -> Algorithm:
    r"""Let some clients of a method send a false update.

    A liar with the update :math:`\Delta_i` sends :math:`-s \Delta_i` ("sign") or Gaussian noise
    :math:`s \, N(0, I)` ("noise"). Liars train and are evaluated like other clients, and the
    mechanism bounds their updates as usual. `jaxfl.data.flip_labels` poisons the data instead.

    Args:
        algorithm: Any method.
        liars: Indices of the clients that lie, from 0.
        attack: Kind of the false update.
        scale: s, the factor of the false update.

    Guarantee: The method's guarantee, for honest clients.
    References: Blanchard et al. 2017 (noise); Li et al., RSA, AAAI 2019 (sign flipping).

    Raises:
        ValueError: An index of `liars` is below 0. When a run starts: an index is of no client.

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.models import mlp
    >>> byzantine(fedavg(mlp((8, 8, 1), 10, hidden=(16,))), [0, 7]).name
    'fedavg'
    """
    # `np.unique` sorts, so `init` finds the largest index at the end.
    indices = np.unique(np.asarray(liars, np.int32))

    def init(key: Key[Array, ""], num_clients: int) -> tuple[Tree, Tree]:
        if indices.size and indices[-1] >= num_clients:
            raise ValueError(
                f"liars must be indices of the {num_clients} clients, got {show(liars)}. "
                f"Give whole numbers from 0 to {num_clients - 1}."
            )
        return algorithm.init(key, num_clients)

    def client_update(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> tuple:
        message, client, info = algorithm.client_update(key, server, client, data)
        lying = jnp.any(jnp.asarray(indices) == data.id)
        lie = optax.tree.scale(-scale, message.update)
        if attack == "noise":
            lie = _random_like(jax.random.fold_in(key, _LIE), message.update, scale)
        # All clients have one program, which selects by the client's index.
        sent = optax.tree.where(lying, lie, message.update)
        return message._replace(update=sent), client, info

    return algorithm._replace(init=init, client_update=client_update)


def _random_like(key: Key[Array, ""], update: Tree, std: float) -> Tree:
    """Draw Gaussian noise in the shapes and dtypes of an update."""
    leaves, structure = jax.tree.flatten(update)
    keys = jax.random.split(key, max(len(leaves), 1))
    noise = [
        std * jax.random.normal(leaf_key, leaf.shape, leaf.dtype)
        for leaf_key, leaf in zip(keys, leaves)
    ]
    return jax.tree.unflatten(structure, noise)
