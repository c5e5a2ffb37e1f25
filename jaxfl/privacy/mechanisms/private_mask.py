"""Noise on the support of a private mask alone, as DP-pFedDSU publishes it: no finite epsilon."""

import dataclasses

from jax import Array
from jaxtyping import Float, Key

from jaxfl._support.checks import checked
from jaxfl.local.masks import keep
from jaxfl.privacy.accounting.observers import Observer, View, one_gaussian
from jaxfl.privacy.mechanisms.gaussian import FIELDS, Contribution, Mechanism, Participant
from jaxfl.types import Ledger, Message, Tree

_REVEALED_SUPPORT = (
    "noise is only on the support of each client's mask, which follows from its private weights: "
    "neighbouring data may give another support, which the zeros reveal (delta = 1)"
)


@checked(**FIELDS)
@dataclasses.dataclass(frozen=True, eq=False)
class PrivateMask(Mechanism):
    r"""Update and noise on a private mask.

    .. math:: M_i \odot (\mathrm{clip}_C(\Delta_i) + N(0, s^2 C^2))

    The mask is `Message.extra`, and has the update's shapes.

    Guarantee: None, whatever the noise, because the support leaks data.
    References: DP-pFedDSU, as published.
    """

    def contribute(
        self,
        key: Key[Array, "*S"],
        memory: Tree,
        client: Participant,
        sent: Message,
        norm: Float[Array, ""],
    ) -> Contribution:
        """Return the noised update, set to zero off the mask. Without a mask, raise an error."""
        if sent.extra is None:
            raise ValueError(
                "message.extra must be a private mask, got None. "
                "Return Message(update, mask), or give the algorithm another mechanism."
            )
        contribution = super().contribute(key, memory, client, sent._replace(extra=None), norm)
        return contribution._replace(update=keep(sent.extra, contribution.update))

    @property
    def sparse(self) -> bool:
        """True, because the noise is on the mask alone."""
        return True

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """Return a view without any protection."""
        del ledger, observer, replaced, one_round
        return one_gaussian(0.0, "none", _REVEALED_SUPPORT)
