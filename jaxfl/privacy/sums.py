r"""Exact sums, whatever the number and order of terms: 64-bit integers in two 32-bit words.

A sum of floats has no bounded sensitivity: two sums that differ in one client may drift apart by
rounding. For noise in single precision, the engine adds up blocks of b = 8 clients in single
precision, in units of :math:`2^{-30} C \max w`, for the clip bound C and the weights w. It rounds
the sums of blocks to integers, which this module adds up.

Client i is in one block. The rounding errors of the block's partial sums are u = 2^-24 times their
norms, so at most :math:`u (2 + \dots + b) C \max w`. They differ between neighbours by up to twice
that. The errors of the rounding to integers differ by up to :math:`\sqrt d`. So, for any number of
clients, the absence of client i changes the sum by at most
:math:`w_i C (1 + 2^{-20}) + (70 u + 2^{-30} \sqrt d) C \max w`. The second factor is 5.1e-6 for a
million coordinates.

The server's noise is added here too, so that the release is a rounding of the exact noisy sum. If
clients add noise, blocks sum noised updates.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int32, UInt32

from jaxfl.types import Tree


class Wide(NamedTuple):
    """Integers high * 2^32 + low, modulo 2^64, which JAX lacks without `jax_enable_x64`.

    A `Wide` replaces a leaf in a tree.
    """

    high: Int32[Array, "*S"]
    low: UInt32[Array, "*S"]


def widen(tree: Tree) -> Tree:
    """Return a tree with a `Wide` of each float32 leaf's values, rounded to integers.

    Magnitudes must be below 2^63.
    """

    def leaf(x: Float[Array, "*S"]) -> Wide:
        # The low word of -1 is 2^32 - 1, which single precision cannot represent.
        size = jnp.round(jnp.abs(x))
        high = jnp.floor(size * 2.0**-32)
        # The difference is exact: it drops the leading bits of a float of 24 bits.
        low = (size - high * 2.0**32).astype(jnp.uint32)
        return _with_sign(x < 0, Wide(high.astype(jnp.int32), low))

    return jax.tree.map(leaf, tree)


def narrow(tree: Tree) -> Tree:
    """Return the tree with each leaf, a `Wide` or an array, as one float32 array."""

    def leaf(x: Array | Wide) -> Float[Array, "*S"]:
        if not isinstance(x, Wide):
            return x.astype(jnp.float32)
        negative = x.high < 0
        # The words of -1 are -1 and 2^32 - 1, whose sum in single precision would be 0.
        size = _with_sign(negative, x)
        value = size.high.astype(jnp.float32) * 2.0**32 + size.low.astype(jnp.float32)
        return jnp.where(negative, -value, value)

    return jax.tree.map(leaf, tree, is_leaf=_is_wide)


def add(a: Tree, b: Tree) -> Tree:
    """Return the sum of two trees, leaf by leaf. It is exact modulo 2^64 for `Wide` leaves."""

    def leaf(a: Any, b: Any) -> Array | Wide:
        if _is_wide(a):
            return _add_wide(a, b)
        return a + b

    # A `Wide` is a tuple, into whose words the map would otherwise descend.
    return jax.tree.map(leaf, a, b, is_leaf=_is_wide)


def add_up(tree: Tree) -> Tree:
    """Return each leaf's sum over its leading axis, which is exact modulo 2^64 for a `Wide`."""

    def leaf(stack: Array | Wide) -> Array | Wide:
        if isinstance(stack, Wide):
            # `jnp.sum` would add up each word alone, without carries.
            zero = Wide(jnp.int32(0), jnp.uint32(0))
            return lax.reduce(stack, zero, _add_wide, (0,))
        return jnp.sum(stack, axis=0, dtype=stack.dtype)

    return jax.tree.map(leaf, tree, is_leaf=_is_wide)


def _add_wide(a: Wide, b: Wide) -> Wide:
    low = a.low + b.low
    # An unsigned sum has wrapped exactly if it is below one of its terms.
    carry = (low < b.low).astype(jnp.int32)
    return Wide(a.high + b.high + carry, low)


def _with_sign(negative: Array, x: Wide) -> Wide:
    """Return -x if `negative`, and otherwise x."""
    # Two's complement inverts all bits and adds 1, which reaches `high` only if `low` is 0.
    carry = (x.low == 0).astype(jnp.int32)
    high = jnp.where(negative, ~x.high + carry, x.high)
    low = jnp.where(negative, -x.low, x.low)
    return Wide(high, low)


def _is_wide(node: object) -> bool:
    return isinstance(node, Wide)
