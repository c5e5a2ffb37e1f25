"""Numbers in which a round's sums are made: floats, 64-bit integers, or whole steps of a grid.

The engine converts each contribution by `in_units`, and adds up those of `chunks_per_sum` chunks,
or of all. `settle` converts such a sum, which the engine then adds to the other sums. `encode`
converts what the server adds: noise, or the canaries of an audit.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Key

from jaxfl._support.checks import traced
from jaxfl.privacy.clip import round_within
from jaxfl.privacy.noise import STEPS, add_gaussian, add_grid_noise
from jaxfl.privacy.sums import add, narrow, widen
from jaxfl.types import Number, Tree

_LEAST_ON_GRID = 0.01
"""Smallest noise multiplier on a grid. Sums of finer steps could wrap."""


class Floats:
    """Single precision in units of 1, for sums without noise."""

    chunks_per_sum: int | None = 8
    """Number of chunks that are added up, lane by lane, before `settle`. None adds up all."""

    def unit(self, largest: Float[Array, ""], level: Float[Array, ""]) -> Float[Array, ""]:
        """Return the unit of the sums.

        Args:
            largest: C max w, the largest norm that a weighted contribution may have.
            level: z, the noise multiplier of the round.
        """
        del largest, level
        return jnp.ones(())

    def in_units(
        self, contribution: Tree, norm: Float[Array, ""], bound: Number, scale: Float[Array, ""]
    ) -> Tree:
        """Return a contribution times `scale`.

        Args:
            contribution: Arrays in single precision.
            norm: Norm of the contribution before noise, at most `bound`.
            bound: C, the bound on the norm of a contribution.
            scale: Weight of the client over the unit.
        """
        del norm, bound
        return jax.tree.map(lambda leaf: leaf * scale, contribution)

    def settle(self, part: Tree) -> Tree:
        """Return the sum of a few contributions, in the numbers in which such sums are added up."""
        return self.encode(part)

    def encode(self, values: Tree) -> Tree:
        """Return floats, which count units, as the numbers in which sums are added up."""
        return values

    def add_noise(
        self, key: Key[Array, "*S"], total: Tree, std: Float[Array, ""], mesh: Mesh
    ) -> Tree:
        """Return a sum with independent Gaussian noise on every coordinate.

        Args:
            key: Key of the noise.
            total: Sum of contributions.
            std: Standard deviation of the noise, in units.
            mesh: Mesh of devices, on which noise is drawn.
        """
        del mesh
        zero = jax.tree.map(jnp.zeros_like, narrow(total))
        # Noise joins the sum in the sum's own numbers, so integers are added up exactly.
        return add(total, self.encode(add_gaussian(key, zero, std)))


class Integers(Floats):
    """64-bit integers in units of 2^-30 C max w, for noise in single precision.

    `jaxfl.privacy.sums` bounds how far one client moves such a sum.
    """

    def unit(self, largest: Float[Array, ""], level: Float[Array, ""]) -> Float[Array, ""]:
        """Return 2^-30 C max w."""
        del level
        # A billion contributions of 2^30 units each add up to less than 2^63.
        return largest * 2.0**-30

    def encode(self, values: Tree) -> Tree:
        """Return values rounded to 64-bit integers."""
        return widen(values)


@dataclasses.dataclass(frozen=True)
class Grid(Floats):
    """32-bit integers in steps of length z C max w / `steps`, for exact noise.

    Args:
        levels: z of all rounds, at least 0.01, from which the length of a step follows.
        steps: Std of the noise, in steps.

    Raises:
        ValueError: A level is below 0.01.
    """

    levels: Any
    steps: int = STEPS

    remedy = "Give less noise, a smaller network, or noise='float'."

    # Whole steps add up exactly, so nothing must be settled in between.
    chunks_per_sum = None

    def __post_init__(self) -> None:
        least = self.levels
        if not traced(least) and np.min(np.asarray(least, np.float64)) < _LEAST_ON_GRID:
            raise ValueError(
                f"noise_multiplier must be at least {_LEAST_ON_GRID} in every round with "
                "noise='grid', because a step follows from the noise and sums of finer steps wrap, "
                f"got {least!r}. Give more noise, or noise='float'."
            )

    def unit(self, largest: Float[Array, ""], level: Float[Array, ""]) -> Float[Array, ""]:
        """Return the length of a step, which is z C max w / `steps`."""
        return largest * (level / self.steps)

    def in_units(
        self, contribution: Tree, norm: Float[Array, ""], bound: Number, scale: Float[Array, ""]
    ) -> Tree:
        """Return a contribution in integer steps, whose norm is at most `bound` times `scale`.

        Raise an error if the grid is too coarse for the contribution's number of coordinates.
        """
        self._check_resolution(sum(leaf.size for leaf in jax.tree.leaves(contribution)))
        return round_within(contribution, norm, scale, bound * scale)

    def settle(self, part: Tree) -> Tree:
        """Return `part` itself, which is in whole steps already."""
        return part

    def encode(self, values: Tree) -> Tree:
        """Return values rounded to whole steps."""
        return jax.tree.map(lambda leaf: jnp.round(leaf).astype(jnp.int32), values)

    def add_noise(
        self, key: Key[Array, "*S"], total: Tree, std: Float[Array, ""], mesh: Mesh
    ) -> Tree:
        """Return a sum with rounded Gaussian noise, whose std is 2^15 steps. `std` is not read."""
        # The length of a step follows from the std, so in steps the noise is always the same.
        del std
        return add_grid_noise(key, total, mesh)

    def _check_resolution(self, coordinates: int) -> None:
        """Require a step of at most sqrt(3 / d) times the longest contribution, for d coordinates.

        Most coordinates of an update would be shorter than a longer step.
        """
        # A traced level has no value to check. A coarse grid harms accuracy alone, because the norm
        # is bounded on any grid.
        if traced(self.levels):
            return
        most = self.steps * math.sqrt(3 / coordinates)
        if np.max(np.asarray(self.levels, np.float64)) > most:
            raise ValueError(
                f"noise_multiplier must be at most {most:.4g} with noise='grid' and {coordinates} "
                "coordinates, because a step would be longer than most coordinates of an update, "
                f"got {self.levels!r}. {self.remedy}"
            )


class Shared(NamedTuple):
    """Update of a client in single precision, and the client's share of the noise, in steps."""

    update: Tree
    share: Tree


class SharedGrid(Grid):
    """Grid on which each client adds a share of the noise to its rounded contribution."""

    remedy = "Give less noise, a smaller network, or more `steps`."

    def in_units(
        self, contribution: Tree, norm: Float[Array, ""], bound: Number, scale: Float[Array, ""]
    ) -> Tree:
        """Return a `Shared` contribution as one tree: the update in integer steps plus the share.

        The norm of the rounded update is at most `bound` times `scale`. Padding has a scale of 0,
        and adds nothing.
        """
        whole = super().in_units(contribution.update, norm, bound, scale)
        return jax.tree.map(
            lambda own, share: jnp.where(scale > 0, own + share, 0), whole, contribution.share
        )


def wrapped(tree: Tree, bits: int) -> Tree:
    """Return integers modulo 2^bits, from -2^(bits - 1) to below 2^(bits - 1)."""
    unused = 32 - bits
    # The right shift of signed integers fills up with the highest bit of the modulus, the sign.
    return jax.tree.map(lambda leaf: (leaf << unused) >> unused, tree)
