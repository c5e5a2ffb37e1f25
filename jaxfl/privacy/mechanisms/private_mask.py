"""Noise on the support of a private mask alone, as DP-pFedDSU publishes it: no finite epsilon."""

import dataclasses

from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import checked
from jaxfl.local.masks import keep
from jaxfl.privacy.mechanisms.gaussian import FIELDS, Mechanism, Participant
from jaxfl.privacy.observers import Observer, View, one_gaussian
from jaxfl.types import Ledger, Message, Tree

_BROKEN = (
    "noise only on the support of each client's mask, which follows its private weights: neighbouring data may give "
    "another support, which the zeros show (delta = 1)"
)


@checked(**FIELDS)
@dataclasses.dataclass(frozen=True, eq=False)
class PrivateMask(Mechanism):
    r"""Update and noise on a private mask: :math:`M_i \odot (\mathrm{clip}_C(\Delta_i) + N(0, s^2 C^2))`.

    The mask comes as `Message.extra`, shaped like the update.

    Guarantee: none, whatever the noise, since the support leaks data.
    Source: DP-pFedDSU, as published.
    """

    def contribute(
        self,
        key: Key[Array, "*S"],
        memory: Tree,
        client: Participant,
        sent: Message,
        norm: Float[Array, ""],
    ) -> tuple[Tree, Tree]:
        """The noised update on the mask."""
        del norm
        if sent.extra is None:
            raise ValueError(
                "message.extra=None: a private mask is missing, give one, or another mechanism"
            )
        return keep(sent.extra, self.add_client_noise(key, memory, client, sent.update)), ()

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """No protection at all."""
        del ledger, observer, replaced, one_round
        return one_gaussian(0.0, "none", _BROKEN)
