"""Which coordinates are personal and which are shared."""

import jax
import jax.numpy as jnp

from jaxfl.types import Tree


def fisher_mask(fisher: Tree, threshold: float) -> Tree:
    r"""Personal coordinates :math:`M_1 = [\hat F \ge \tau]` of a per-layer normalised Fisher diagonal (FedDPA, eq. 6).

    >>> fisher_mask({"w": jnp.array([0.0, 0.25, 1.0])}, 0.4)
    {'w': Array([False, False,  True], dtype=bool)}
    """
    return jax.tree.map(lambda f: f >= threshold, fisher)


def merge(mask: Tree, inside: Tree, outside: Tree) -> Tree:
    r""":math:`M \odot a + (1 - M) \odot b`, without arithmetic on either."""
    return jax.tree.map(jnp.where, mask, inside, outside)
