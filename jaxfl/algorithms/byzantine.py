"""Clients that lie to the server, around any method."""

import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl._validate import at_least_0, check_counts, checked, show
from jaxfl.types import Algorithm, ClientData, Tree

_LIE = 2**31 + 5


@checked(liars=functools.partial(check_counts, least=0), scale=at_least_0)
def byzantine(
    algorithm: Algorithm,
    liars: Sequence[int] | np.ndarray,
    *,
    attack: Literal["sign", "noise"] = "sign",
    scale: float = 1.0,
) -> Algorithm:
    r"""Some clients send :math:`-s \Delta_i` ("sign") or :math:`s \, N(0, I)` ("noise") in place of their update.

    They train and are evaluated as before; the mechanism bounds their updates as usual. For data poisoning, see
    `jaxfl.data.flip_labels`.

    Args:
        algorithm: any method.
        liars: indices of the clients that lie, from 0.
        attack: what they send.
        scale: s.

    Guarantee: the method's, for honest clients.
    References: Blanchard et al. 2017 (noise); Li et al., RSA, AAAI 2019 (sign flipping).

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.models import mlp
    >>> byzantine(fedavg(mlp((8, 8, 1), 10, hidden=(16,))), [0, 7]).name
    'fedavg'
    """
    numbers = np.unique(np.asarray(liars, np.int32))

    def init(key: Key[Array, ""], number: int) -> tuple[Tree, Tree]:
        if numbers.size and numbers[-1] >= number:
            raise ValueError(
                f"liars={show(liars)}: give numbers of the {number} clients, from 0 to {number - 1}"
            )
        return algorithm.init(key, number)

    def client_update(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> tuple:
        message, client, info = algorithm.client_update(key, server, client, data)
        lying = jnp.any(jnp.asarray(numbers) == data.id)
        leaves, structure = jax.tree.flatten(message.update)
        lie = [-scale * leaf for leaf in leaves]
        if attack == "noise":
            keys = jax.random.split(jax.random.fold_in(key, _LIE), max(len(leaves), 1))
            lie = [
                scale * jax.random.normal(leaf_key, leaf.shape, leaf.dtype)
                for leaf_key, leaf in zip(keys, leaves)
            ]
        sent = [jnp.where(lying, false, leaf) for false, leaf in zip(lie, leaves)]
        return message._replace(update=jax.tree.unflatten(structure, sent)), client, info

    return algorithm._replace(init=init, client_update=client_update)
