"""Aggregates that a few clients cannot move far. None has a finite epsilon."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Key

from jaxfl._support.checks import at_least_0, check_count, checked, count_from_0
from jaxfl.privacy.accounting.observers import Observer, View, one_gaussian
from jaxfl.privacy.mechanisms.gaussian import (
    FIELDS,
    Cohort,
    Contribution,
    Mechanism,
    Participant,
    Total,
)
from jaxfl.types import Ledger, Message, Tree


class Robust(Mechanism):
    """Mechanism that combines the clipped updates of all participants by `combine`, not by a sum.

    Each clipped update is kept until the end of the round, so memory holds as many updates as the
    sampler may draw. The aggregate of a round without participants is 0.

    Raises:
        ValueError: There is noise, or weights are given.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noisy or self.weights is not None:
            raise ValueError(
                "noise_multiplier and client_noise must be 0 and weights None, because "
                f"{type(self).__name__} takes neither noise nor weights, got "
                f"noise_multiplier={self.noise_multiplier!r}, client_noise={self.client_noise!r}, "
                f"weights={self.weights!r}. Leave them out."
            )

    def combine(self, rows: Tree, present: Bool[Array, "R"], count: Int[Array, ""]) -> Tree:
        """Return the aggregate of the participants' updates, with the shapes of one update.

        Args:
            rows: Updates [R, ...], of which those of the participants come first.
            present: Whether each row is that of a participant.
            count: Number of participants, at least one.
        """
        raise NotImplementedError

    def contribute_canaries(self, memory: Tree, update: Tree, count: Float[Array, ""]) -> Tree:
        """Raise an error, because nothing is summed."""
        raise ValueError(
            f"audit must be None for {type(self).__name__}, which adds nothing up and has no "
            "epsilon, got an audit. Give audit=None."
        )

    def contribute(
        self,
        key: Key[Array, "*S"],
        memory: Tree,
        client: Participant,
        sent: Message,
        norm: Float[Array, ""],
    ) -> Contribution:
        """Return the clipped update as `row`, and an empty tree for the sum."""
        contribution = super().contribute(key, memory, client, sent, norm)
        # Nothing joins the sum, so the norm of what joins it is 0.
        return Contribution((), jnp.zeros(()), row=contribution.update)

    def aggregate(
        self, key: Key[Array, "*S"], memory: Tree, cohort: Cohort, total: Total, mesh: Mesh
    ) -> tuple[Tree, Float[Array, ""], Tree]:
        """Return the combined rows, or zeros without participants, a std of 0, and the memory."""
        del key, mesh
        count = jnp.sum(cohort.sampled)
        # Rows of participants come first (`Total.rows`).
        present = jnp.arange(len(jax.tree.leaves(total.rows)[0])) < count
        # `combine` runs in rounds without participants too, and must not divide by 0.
        combined = self.combine(total.rows, present, jnp.maximum(count, 1))
        aggregate = jax.tree.map(lambda leaf: jnp.where(count > 0, leaf, 0.0), combined)
        return aggregate, jnp.zeros(()), memory

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """Return a view without any protection, unless nothing has left the clients."""
        view = super().view(ledger, observer, replaced=replaced, one_round=one_round)
        if view.whole:
            return view
        reason = (
            f"{type(self).__name__}: how far one client moves it depends on the others, and it has "
            "no noise"
        )
        return one_gaussian(0.0, "none", reason)


@checked(**FIELDS)
@dataclasses.dataclass(frozen=True, eq=False)
class Median(Robust):
    """Median of the participants' updates, coordinate by coordinate.

    Raises:
        ValueError: There is noise, or weights are given.

    Guarantee: None.
    References: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical
        Rates, ICML 2018.
    """

    def combine(self, rows: Tree, present: Bool[Array, "R"], count: Int[Array, ""]) -> Tree:
        """Return the middle value of each coordinate, or the mean of two middle ones."""

        def middle_of(ordered: Float[Array, "R *S"]) -> Float[Array, "*S"]:
            return ordered[(count - 1) // 2] + ordered[count // 2]

        middle = _ordered(rows, present, middle_of)
        return jax.tree.map(lambda leaf: 0.5 * leaf, middle)


@checked(**FIELDS, share=at_least_0)
@dataclasses.dataclass(frozen=True, eq=False)
class TrimmedMean(Robust):
    r"""Mean of n values without the :math:`\lfloor \beta n \rfloor` smallest and as many largest.

    The values are those of the round's n participants, and are trimmed coordinate by coordinate.

    Args:
        share: :math:`\beta`, the share of values that is left out at each end, below a half.

    Raises:
        ValueError: `share` is a half or more, there is noise, or weights are given.

    Guarantee: None.
    References: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical
        Rates, ICML 2018.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share >= 0.5:
            raise ValueError(
                f"share must be less than a half, because nothing is left otherwise, "
                f"got {self.share!r}. Give a smaller share."
            )

    def combine(self, rows: Tree, present: Bool[Array, "R"], count: Int[Array, ""]) -> Tree:
        """Return the mean of each coordinate without its smallest and its largest values."""
        # A product that is a whole number on paper may round to just below.
        cut = jnp.floor(self.share * count + 1e-6).astype(count.dtype)
        rank = jnp.arange(len(present))
        included = (rank >= cut) & (rank < count - cut)

        def mean(ordered: Float[Array, "R *S"]) -> Float[Array, "*S"]:
            return _sum_of_rows(ordered, included) / (count - 2 * cut)

        return _ordered(rows, present, mean)


@checked(**FIELDS, byzantine=count_from_0, keep=check_count)
@dataclasses.dataclass(frozen=True, eq=False)
class Krum(Robust):
    """Mean of the `keep` updates with the least scores.

    In a round of n participants, the score of an update is the sum of the squared distances to its
    n - f - 2 nearest others. `keep` of 1 is Krum, and more is Multi-Krum. The paper's bound asks
    for :math:`n > 2 f + 2`. If n - f - 2 is below 1, the score is the squared distance to the
    nearest other update.

    Args:
        byzantine: f, the number of a round's participants that may lie.
        keep: m, the number of averaged updates. A round of fewer participants averages all.

    Raises:
        ValueError: There is noise, or weights are given.

    Guarantee: None.
    References: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient
        Descent, NeurIPS 2017.
    """

    byzantine: int = 1
    keep: int = 1

    def combine(self, rows: Tree, present: Bool[Array, "R"], count: Int[Array, ""]) -> Tree:
        """Return the mean of the updates with the least scores."""
        parts = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(rows)]
        distances = _squared_distances(jnp.concatenate(parts, axis=1))
        # No update is its own neighbour, and rows beyond the participants are nobody's.
        other = present[None] & ~jnp.eye(len(present), dtype=bool)
        nearest = jnp.sort(jnp.where(other, distances, jnp.inf), axis=1)
        # Distances ascend, so the first n - f - 2 columns are those of the nearest others.
        counted = (jnp.arange(len(present)) < jnp.maximum(count - self.byzantine - 2, 1))[None]
        score = jnp.sum(jnp.where(counted & jnp.isfinite(nearest), nearest, 0.0), axis=1)
        # Ranks are distinct, so equal scores let in no more than `keep` updates.
        rank = jnp.argsort(jnp.argsort(jnp.where(present, score, jnp.inf)))
        included = present & (rank < self.keep)

        def mean(leaf: Float[Array, "R *S"]) -> Float[Array, "*S"]:
            return _sum_of_rows(leaf, included) / jnp.sum(included)

        return jax.tree.map(mean, rows)


def _squared_distances(rows: Float[Array, "R D"]) -> Float[Array, "R R"]:
    """Return the squared distances of all pairs of rows."""

    def distances_to(row: Float[Array, "D"]) -> Float[Array, "R"]:
        # |a|^2 + |b|^2 - 2 a b would lose the digits of close updates.
        return jnp.sum((rows - row[None]) ** 2, axis=1)

    # All pairs of rows at once would have R^2 D differences in memory.
    return jax.lax.map(distances_to, rows)


def _sum_of_rows(
    leaf: Float[Array, "R *S"],
    included: Bool[Array, "R"],
) -> Float[Array, "*S"]:
    return jnp.sum(jnp.where(_column(included, leaf), leaf, 0.0), axis=0)


def _ordered(rows: Tree, present: Bool[Array, "R"], use: Callable[[Array], Array]) -> Tree:
    """Return the result of `use` for the ascending values of each coordinate.

    Rows beyond the participants count as infinity, and come last.
    """

    def leaf_of(leaf: Float[Array, "R *S"]) -> Float[Array, "*S"]:
        values = jnp.where(_column(present, leaf), leaf, jnp.inf)
        return use(jnp.sort(values, axis=0))

    return jax.tree.map(leaf_of, rows)


def _column(values: Array, like: Array) -> Array:
    return values.reshape(-1, *[1] * (like.ndim - 1))
