"""Aggregates that a few clients cannot move far. None has a finite epsilon."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Key

from jaxfl._validate import at_least_0, check_count, checked, count_from_0
from jaxfl.privacy.mechanisms.gaussian import FIELDS, Cohort, Mechanism, Participant, Total
from jaxfl.privacy.observers import Observer, View, one_gaussian
from jaxfl.types import Ledger, Message, Tree


class Robust(Mechanism):
    """An aggregate of the rows of all participants: each clipped update is kept until the end of the round.

    It holds as many updates as the sampler may draw. A round without participants changes nothing.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noisy or self.weights is not None:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier!r}, client_noise={self.client_noise!r}, "
                f"weights={self.weights!r}: {type(self).__name__} takes neither noise nor weights, leave them out"
            )

    def combine(self, rows: Tree, present: Bool[Array, "R"], count: Int[Array, ""]) -> Tree:
        """Combine the updates of `count` participants, which come first; at least one."""
        raise NotImplementedError

    def insert(self, memory: Tree, update: Tree, count: Float[Array, ""]) -> Tree:
        """Nothing is summed."""
        raise ValueError(
            f"audit with {type(self).__name__}: it adds nothing up, and has no epsilon; leave audit out"
        )

    def contribute(
        self,
        key: Key[Array, "*S"],
        memory: Tree,
        client: Participant,
        sent: Message,
        norm: Float[Array, ""],
    ) -> tuple[Tree, Tree]:
        """A row, and nothing in the sum."""
        update, _ = super().contribute(key, memory, client, sent, norm)
        return (), update

    def aggregate(
        self, key: Key[Array, "*S"], memory: Tree, cohort: Cohort, total: Total, mesh: Mesh
    ) -> tuple[Tree, Float[Array, ""], Tree]:
        """What `combine` makes of the rows."""
        del key, mesh
        count = jnp.sum(cohort.sampled)
        present = jnp.arange(len(jax.tree.leaves(total.rows)[0])) < count
        combined = self.combine(total.rows, present, jnp.maximum(count, 1))
        return (
            jax.tree.map(lambda leaf: jnp.where(count > 0, leaf, 0.0), combined),
            jnp.zeros(()),
            memory,
        )

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """No protection."""
        view = super().view(ledger, observer, replaced=replaced, one_round=one_round)
        reason = f"{type(self).__name__}: how far one client moves it depends on the others, and it has no noise"
        return view if view.whole else one_gaussian(0.0, "none", reason)


@checked(**FIELDS)
@dataclasses.dataclass(frozen=True, eq=False)
class Median(Robust):
    """The median of the participants' updates, coordinate by coordinate.

    Guarantee: none.
    Source: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.
    """

    def combine(self, rows: Tree, present: Bool[Array, "R"], count: Int[Array, ""]) -> Tree:
        """The mean of middle values."""
        middle = _ordered(
            rows, present, lambda ordered: ordered[(count - 1) // 2] + ordered[count // 2]
        )
        return jax.tree.map(lambda leaf: 0.5 * leaf, middle)


@checked(**FIELDS, share=at_least_0)
@dataclasses.dataclass(frozen=True, eq=False)
class TrimmedMean(Robust):
    r"""The mean without the :math:`\lfloor \beta n \rfloor` smallest and largest, coordinate by coordinate.

    Args:
        share: :math:`\beta`, below a half.

    Guarantee: none.
    Source: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share >= 0.5:
            raise ValueError(f"share={self.share!r}: give less than a half, else nothing is left")

    def combine(self, rows: Tree, present: Bool[Array, "R"], count: Int[Array, ""]) -> Tree:
        """The trimmed mean."""
        cut = jnp.floor(self.share * count + 1e-6).astype(count.dtype)
        rank = jnp.arange(len(present))
        kept = (rank >= cut) & (rank < count - cut)

        def mean(ordered: Float[Array, "R *S"]) -> Float[Array, "*S"]:
            return jnp.sum(jnp.where(_column(kept, ordered), ordered, 0.0), axis=0) / (
                count - 2 * cut
            )

        return _ordered(rows, present, mean)


@checked(**FIELDS, byzantine=count_from_0, keep=check_count)
@dataclasses.dataclass(frozen=True, eq=False)
class Krum(Robust):
    r"""The mean of the `keep` updates with the least score: the squared distances to their n - f - 2 nearest others.

    `keep` of 1 is Krum, more is Multi-Krum. The paper's bound asks for :math:`n > 2 f + 2`; with fewer participants the
    score is the distance to the nearest.

    Args:
        byzantine: f, how many of a round's participants may lie.
        keep: m, at most the participants of a round.

    Guarantee: none.
    Source: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017.
    """

    byzantine: int = 1
    keep: int = 1

    def combine(self, rows: Tree, present: Bool[Array, "R"], count: Int[Array, ""]) -> Tree:
        """Average the best updates."""
        flat = jnp.concatenate(
            [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(rows)], axis=1
        )
        # By differences: |a|^2 + |b|^2 - 2 a b loses the digits of close updates.
        distances = jax.lax.map(lambda row: jnp.sum((flat - row[None]) ** 2, axis=1), flat)
        other = present[None] & ~jnp.eye(len(flat), dtype=bool)
        nearest = jnp.sort(jnp.where(other, distances, jnp.inf), axis=1)
        counted = (jnp.arange(len(flat)) < jnp.maximum(count - self.byzantine - 2, 1))[None]
        score = jnp.sum(jnp.where(counted & jnp.isfinite(nearest), nearest, 0.0), axis=1)
        rank = jnp.argsort(jnp.argsort(jnp.where(present, score, jnp.inf)))
        kept = present & (rank < self.keep)
        return jax.tree.map(
            lambda leaf: jnp.sum(jnp.where(_column(kept, leaf), leaf, 0.0), axis=0) / jnp.sum(kept),
            rows,
        )


def _ordered(rows: Tree, present: Bool[Array, "R"], use: Callable[[Array], Array]) -> Tree:
    """Apply `use` to each coordinate's values, ascending, with infinity beyond the participants."""
    return jax.tree.map(
        lambda leaf: use(jnp.sort(jnp.where(_column(present, leaf), leaf, jnp.inf), axis=0)), rows
    )


def _column(values: Array, like: Array) -> Array:
    return values.reshape(-1, *[1] * (like.ndim - 1))
