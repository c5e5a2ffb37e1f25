"""A clip bound that follows a quantile of the updates' norms, by one noisy bit per client."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int, Key

from jaxfl._support.checks import at_least_0, check_fraction, checked, show, traced
from jaxfl.privacy.mechanisms.gaussian import (
    FIELDS,
    Cohort,
    Contribution,
    Mechanism,
    Participant,
    Total,
)
from jaxfl.types import Ledger, Message, Number, Tree


class ClipState(NamedTuple):
    """Clip bound C of the next round, and the scale of its bit over C, which stays the same."""

    clip: Float[Array, ""]
    scale: Float[Array, ""]


@checked(**FIELDS, quantile=check_fraction, rate=at_least_0)
@dataclasses.dataclass(frozen=True, eq=False)
class AdaptiveClip(Mechanism):
    r"""Clip to :math:`C_t`, which moves towards the quantile :math:`\gamma` of the updates' norms.

    .. math::
        b_i &= [\|\Delta_i\| \le C_t], \\
        \bar b &= \frac{1}{qN} \Big( \sum_i (b_i - \tfrac12) + N(0, \sigma_b^2) \Big) + \tfrac12, \\
        C_{t+1} &= C_t e^{-\eta (\bar b - \gamma)}

    Here :math:`q N` is the denominator, by default the expected cohort. A client contributes its
    clipped update and :math:`\kappa (b_i - 1/2)` as one vector, whose joint bound is
    :math:`C_t \sqrt{1 + \kappa^2 / (4 C_t^2)}`. One Gaussian of multiplier z on it adds noise of
    :math:`z_\Delta C_t` on the update and :math:`\sigma_b` on the bits, with
    :math:`z_\Delta = (z^{-2} - (2 \sigma_b)^{-2})^{-1/2}` and
    :math:`\kappa = z_\Delta C_t / \sigma_b`. Without that noise :math:`\kappa` is :math:`C_t`.

    Args:
        clip: :math:`C_1`, the bound of the first round.
        noise_multiplier: z of update and bits together, one number, which the ledger charges.
        quantile: :math:`\gamma`, the target share of updates within the bound.
        rate: :math:`\eta`, the step size of the bound.
        bit_noise: :math:`\sigma_b`, std on the sum of bits, above z / 2. None stands for a 20th of
            the expected cohort.

    All other arguments are those of `Mechanism`.

    Raises:
        ValueError: `clip` is infinite, or the multiplier differs by round.

    Guarantee: The guarantee of `Mechanism`, by the Gaussian mechanism on update and bit together.
        Bounds are post-processing.
    References: Andrew et al., Differentially Private Learning with Adaptive Clipping, NeurIPS 2021
        (arXiv:1905.03871).
    """

    quantile: Number = 0.5
    rate: Number = 0.2
    bit_noise: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        open_ended = not traced(self.clip) and self.clip == float("inf")
        if self.noise_multiplier_table.size > 1 or open_ended:
            raise ValueError(
                f"clip must be finite and noise_multiplier one number, got clip={self.clip!r}, "
                f"noise_multiplier={show(self.noise_multiplier)}. "
                "Give a finite first bound, and one multiplier for all rounds."
            )

    def init(self, key: Key[Array, "*S"], update: Callable[[], Tree], clients: int) -> ClipState:
        """Return the bound of the first round, and the scale of the bit over it.

        Raises:
            ValueError: `bit_noise` is at most half the noise multiplier. A traced multiplier is not
                checked.
        """
        del key, update
        if not self.server_noisy:
            return ClipState(jnp.float32(self.clip), jnp.float32(1.0))
        on_update, bits = self._split(clients)
        # A point of a sweep may have no noise, which hides no bit: any scale serves.
        scale = jnp.where(on_update > 0, on_update / bits, 1.0)
        return ClipState(jnp.float32(self.clip), scale.astype(jnp.float32))

    def draw(
        self, key: Key[Array, "*S"], memory: ClipState, index: Int[Array, ""], clients: int
    ) -> Cohort:
        """Draw the cohort, and return it with the round's bound as the note `clip`."""
        return super().draw(key, memory, index, clients)._replace(notes={"clip": memory.clip})

    def update_bound(self, memory: ClipState) -> Float[Array, ""]:
        """Return the bound of this round."""
        return memory.clip

    def contribution_bound(self, memory: ClipState) -> Float[Array, ""]:
        """Return the joint bound of update and bit."""
        return memory.clip * jnp.sqrt(1 + memory.scale**2 / 4)

    def contribute(
        self,
        key: Key[Array, "*S"],
        memory: ClipState,
        client: Participant,
        sent: Message,
        norm: Float[Array, ""],
    ) -> Contribution:
        """Return a contribution of update and scaled bit, with a bound on their joint norm."""
        # This is kappa (b - 1/2), because `scale` is kappa over C.
        bit = memory.scale * memory.clip * ((norm <= memory.clip) - jnp.float32(0.5))
        sent = sent._replace(update={"update": sent.update, "bit": bit})
        # A bit of 0 or 1 has the same norm, and the engine has clipped the update to C.
        joint = jnp.hypot(jnp.minimum(norm, memory.clip), 0.5 * memory.scale * memory.clip)
        return super().contribute(key, memory, client, sent, joint)

    def contribute_canaries(self, memory: ClipState, update: Tree, count: Float[Array, ""]) -> Tree:
        """Return the canaries' updates and bits. Each bit is 1, because norms equal the bound."""
        return {"update": update, "bit": count * memory.scale * memory.clip * 0.5}

    def aggregate(
        self, key: Key[Array, "*S"], memory: ClipState, cohort: Cohort, total: Total, mesh: Mesh
    ) -> tuple[Tree, Float[Array, ""], ClipState]:
        """Return the noisy mean update, the std of the noise over the joint bound, and the memory.

        The memory has the next round's bound.
        """
        noisy, std, _ = super().aggregate(key, memory, cohort, total, mesh)
        # The shift by 1/2 is undone. Noise may take this share of norms within C out of [0, 1].
        below = noisy["bit"] / (memory.scale * memory.clip) + 0.5
        moved = memory.clip * jnp.exp(-self.rate * (below - self.quantile))
        return noisy["update"], std, memory._replace(clip=moved)

    def describe(self, ledger: Ledger) -> list[str]:
        """Return sentences on how the bound moves, and how updates and bits share the noise."""
        found = ledger.notes.get("clip", np.zeros(0))
        # A planned ledger has no such note, because the bound follows from updates.
        seen = ""
        if len(found):
            seen = f", here from {np.min(found):.4g} to {np.max(found):.4g}"
        lines = [
            f"adaptive clip: {float(self.clip):.4g} in the first round, then towards quantile "
            f"{float(self.quantile):g} of the updates' norms, by one noisy bit of each "
            f"participant{seen}"
        ]
        if self.server_noisy:
            on_update, bits = self._split(ledger.participants.shape[1])
            z = float(self.noise_multiplier_table[0])
            lines.append(
                f"noise multiplier {z:.4g} covers update and bit together: updates get "
                f"{on_update:.4g} times the round's clip, and the sum of bits gets a "
                f"std of {bits:.4g}"
            )
        return lines

    def _split(self, clients: int) -> tuple[Any, float]:
        """Return the multiplier that z leaves for updates, and the std on the sum of bits.

        Raises:
            ValueError: The std on the sum of bits is at most half the noise multiplier.
        """
        z = self.noise_multiplier_table[0]
        bits = self.bit_noise or self.sampling.expected(clients) / 20
        if not traced(z) and z >= 2 * bits:
            raise ValueError(
                f"bit_noise must be above {z / 2:g}, because the bits alone cost more than the "
                f"noise allows, got {bits:g} with noise_multiplier={z:g}. Give more bit_noise."
            )
        # The inverse squares of the multipliers of update and bit add up to that of z.
        return (z**-2 - (2 * bits) ** -2) ** -0.5, bits
