"""Aggregates that a few clients cannot move far."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Key

from jaxfl._validate import checked
from jaxfl.privacy.mechanisms.gaussian import FIELDS, Cohort, Mechanism, Participant, Total
from jaxfl.privacy.observers import Observer, View, one_gaussian
from jaxfl.types import Ledger, Message, Tree


@checked(**FIELDS)
@dataclasses.dataclass(frozen=True, eq=False)
class Median(Mechanism):
    """The median of the participants' updates, coordinate by coordinate; 0 in a round without participants.

    Each clipped update is kept until the end of the round: memory for as many as the sampler may draw.

    Guarantee: none: how far one client moves a median depends on the updates of the others. Noise is refused.
    Source: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noisy or self.weights is not None:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier!r}, client_noise={self.client_noise!r}, "
                f"weights={self.weights!r}: a median takes neither noise nor weights, leave them out"
            )

    def contribute(
        self, key: Key[Array, "*S"], memory: Tree, own: Participant, sent: Message, norm: Float[Array, ""]
    ) -> tuple[Tree, Tree]:
        """A row, and nothing in the sum."""
        update, _ = super().contribute(key, memory, own, sent, norm)
        return (), update

    def aggregate(
        self, key: Key[Array, "*S"], memory: Tree, cohort: Cohort, total: Total, mesh: Mesh
    ) -> tuple[Tree, Float[Array, ""], Tree]:
        """The median of the rows."""
        del key, mesh
        count = jnp.sum(cohort.sampled)

        def median(rows: Float[Array, "R *S"]) -> Float[Array, "*S"]:
            present = (jnp.arange(len(rows)) < count).reshape(-1, *[1] * (rows.ndim - 1))
            ordered = jnp.sort(jnp.where(present, rows, jnp.inf), axis=0)
            middle = ordered[jnp.maximum(count - 1, 0) // 2] + ordered[count // 2]
            return jnp.where(count > 0, 0.5 * middle, 0.0)

        return jax.tree.map(median, total.rows), jnp.zeros(()), memory

    def view(self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False) -> View:
        """No protection."""
        view = super().view(ledger, observer, replaced=replaced, one_round=one_round)
        return view if view.whole else one_gaussian(0.0, "none", "a median is released without noise")
