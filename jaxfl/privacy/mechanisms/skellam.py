"""Discrete noise on a grid that clients add, for sums by secure aggregation."""

import dataclasses
import fractions
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import Float, Int, Key, UInt32

from jaxfl._support.checks import check_count, check_fraction, checked, show, traced
from jaxfl.privacy.accounting.observers import Observer, SumNoise, View, one_gaussian, upload_view
from jaxfl.privacy.mechanisms.gaussian import (
    FIELDS,
    Cohort,
    Contribution,
    Mechanism,
    Participant,
    Total,
)
from jaxfl.privacy.noise import (
    CLIENT_NOISE,
    STEPS,
    derive,
    draw_skellam,
    skellam_tail,
    skellam_thresholds,
)
from jaxfl.privacy.representation import Shared, SharedGrid, wrapped
from jaxfl.types import Ledger, Message, Number, Tree

_ROUNDED = 1e-6
"""Relative error of the bound on a norm in single precision, which the accountant charges."""

_WRAPS = math.log(1e-9)
"""Logarithm of the largest probability with which a coordinate of a sum may wrap."""

_share_below_1 = functools.partial(check_fraction, zero=True, one=False)


class Shares(NamedTuple):
    """Memory of `Skellam`, which stays the same over rounds."""

    thresholds: UInt32[Array, "3 n"]
    """Distribution of a share (`skellam_thresholds`)."""
    least: Float[Array, ""]
    """n, the number of shares whose sum has the planned noise."""


@checked(
    **FIELDS,
    steps=functools.partial(check_count, most=STEPS),
    bits=functools.partial(check_count, least=8, most=32),
    dropout=_share_below_1,
)
@dataclasses.dataclass(frozen=True, eq=False)
class Skellam(Mechanism):
    r"""Distributed Skellam mechanism: clients add shares of discrete noise, and sums are modular.

    In round t, with clip bound C, steps :math:`g_t = z_t C / s` and participants
    :math:`\Omega_t`:

    .. math::
        x_i &= \mathrm{round}(\mathrm{clip}_C(\Delta_i) / g_t), \quad
            \|x_i\|_2 \le C / g_t = s / z_t, \\
        S_t &= \sum_{i \in \Omega_t} x_i + \mathrm{Sk}(s^2 / n) \mod 2^b

    :math:`\mathrm{Sk}(\mu)` is the difference of two Poisson variables of mean :math:`\mu / 2`.
    Sums of independent ones are Skellam again, of the summed variance. With at least n shares the
    sum has a noise of s steps or more, which is :math:`z_t C`. The aggregate is :math:`g_t S_t`
    over the denominator, with :math:`S_t` read as a number from :math:`-2^{b-1}` to
    :math:`2^{b-1} - 1`. This is what secure aggregation computes, which hides everything but
    :math:`S_t`.

    Args:
        noise_multiplier: z, std of the noise on a sum of n shares over C. A number, or one per
            round `[T]`.
        noise: "grid".
        steps: s, std of the noise on a sum of n shares, in steps. More steps round updates less,
            and need more bits.
        bits: b, from 8 to 32. The modulus of sums is 2^b.
        dropout: Largest fraction of a mean cohort that may drop out without costing more than the
            planned epsilon. n is the mean number of drawn clients times (1 - dropout), rounded up.
            A larger value gives each share more noise. `Dropouts` lets clients of the simulation
            drop out.

    All other arguments are those of `Mechanism`.

    Raises:
        ValueError: `clip` is infinite, `noise` is "float", the multiplier is 0 in some round, or
            `client_noise` or `weights` are given.

    Guarantee: Client-level privacy under zero-out adjacency, by Rényi divergences
        (`accountants.py`). Each :math:`x_i` is shortened until its norm, summed in
        integers, is at most :math:`s / z_t` (`round_within`). So the L2 sensitivity of a sum is
        :math:`s / z_t`, and the L1 sensitivity at most its square, because a whole number is at
        most its square. A plan counts on n shares in each round. A run counts the shares of each
        round, which the ledger notes, and its epsilon is larger than planned if more clients drop
        out. Dropping out must not depend on data (see `Dropouts`). No theorem here amplifies the
        epsilon by sampling, because clients who do not take part add no share. Every client
        therefore counts as taking part in each round that the sampler allows it, of which
        `MinSeparation` leaves few. The modulus, the steps and the denominator are post-processing.
        `init` requires that a coordinate of a sum wraps with a probability of at most 1e-9,
        whatever the updates are, and the statement has the bound.
    Deviations from the paper: Updates are not rotated, and are rounded to the nearest step.
    References: Agarwal, Kairouz, Liu, The Skellam Mechanism for Differentially Private Federated
        Learning, NeurIPS 2021 (arXiv:2110.04995).
    """

    noise: Literal["float", "grid"] = "grid"
    steps: int = 4096
    bits: int = 32
    dropout: Number = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise != "grid" or np.any(self.client_noise) or self.weights is not None:
            raise ValueError(
                "noise must be 'grid', client_noise 0 and weights None for Skellam, whose shares "
                f"follow from noise_multiplier, got noise={self.noise!r}, "
                f"client_noise={show(self.client_noise)}, weights={show(self.weights)}. "
                "Leave them out."
            )

    def _check_grid(self) -> None:
        z = self.noise_multiplier
        if not traced(z) and not np.all(np.asarray(z) > 0):
            raise ValueError(
                "noise_multiplier must be above 0 in every round for Skellam, because a step "
                f"follows from the noise, got {show(z)}. Give noise, or a Mechanism without noise."
            )

    def fewest_shares(self, clients: int) -> int:
        """Return n, the number of shares that must arrive for the noise to be complete.

        Args:
            clients: Number of clients.

        Raises:
            ValueError: The sampler or the dropout is a number of a sweep.
        """
        expected = self.sampling.drawn(clients)
        if traced(expected) or traced(self.dropout):
            raise ValueError(
                "sampling and dropout must be the same for all points of a sweep with Skellam, "
                "because the distribution of a share follows from them, got "
                f"sampling={show(self.sampling)}, dropout={show(self.dropout)}. "
                "Sweep other numbers, or run the points one by one."
            )
        # A product that rounds to just above a whole number must not ask for one more share.
        return max(1, math.ceil((1 - self.dropout) * expected - 1e-9))

    def init(self, key: Key[Array, "*S"], update: Callable[[], Tree], clients: int) -> Shares:
        """Return the distribution of a share, and n.

        Raises:
            ValueError: A coordinate of a sum could wrap with a probability above 1e-9. This is not
                checked for a traced noise multiplier.
        """
        del key, update
        least = self.fewest_shares(clients)
        self._check_modulus(clients)
        # A fraction keeps the arithmetic of the distribution that of whole numbers.
        thresholds = skellam_thresholds(fractions.Fraction(self.steps**2, least))
        return Shares(jnp.asarray(thresholds), jnp.float32(least))

    def draw(
        self, key: Key[Array, "*S"], memory: Shares, index: Int[Array, ""], clients: int
    ) -> Cohort:
        r"""Draw the participants, and return them with their number as the note `shares`.

        The client noise is that of one share, :math:`z / \sqrt{n}`.
        """
        drawn = super().draw(key, memory, index, clients)
        noise = drawn.numbers.noise_multiplier / math.sqrt(self.fewest_shares(clients))
        numbers = drawn.numbers._replace(client_noise=noise.reshape(1))
        shares = jnp.sum(drawn.sampled.astype(jnp.float32))
        return drawn._replace(numbers=numbers, notes={"shares": shares})

    def contribute(
        self,
        key: Key[Array, "*S"],
        memory: Shares,
        client: Participant,
        sent: Message,
        norm: Float[Array, ""],
    ) -> Contribution:
        """Return the update and its share of noise as `Shared`, added after the rounding."""
        contribution = super().contribute(key, memory, client, sent, norm)
        # Noise in whole steps on a rounded update is exact. Rounding their sum would not be.
        share = _share(key, memory, client, sent.update)
        return contribution._replace(update=Shared(sent.update, share))

    def add_client_noise(
        self, key: Key[Array, "*S"], memory: Shares, client: Participant, update: Tree
    ) -> Tree:
        """Return the update with a client's share of noise, as an attacker on uploads sees it.

        A step has the length of a step in the last round.
        """
        level = jnp.asarray(self.noise_multiplier_table, jnp.float32)[-1]
        step = level * self.contribution_bound(memory) / self.steps
        share = _share(key, memory, client, update)
        return jax.tree.map(lambda leaf, noise: leaf + step * noise, update, share)

    def aggregate(
        self, key: Key[Array, "*S"], memory: Shares, cohort: Cohort, total: Total, mesh: Mesh
    ) -> tuple[Tree, Float[Array, ""], Shares]:
        """Return the decoded sum over the denominator, a std of 0, and the memory."""
        # The sum has wrapped at 2^32 already, which changes nothing modulo 2^bits.
        modular = total._replace(update=wrapped(total.update, self.bits))
        return super().aggregate(key, memory, cohort, modular, mesh)

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """Return the view of Skellam noise: of a round's shares, or of one share for uploads.

        Against another client a round has one share less, because that client knows its own. A
        single share counts, because it is that of the exposed client.
        """
        del one_round
        if not self.communicates or not len(ledger.participants):
            return one_gaussian(math.inf, "nothing leaves the clients", "")
        clients = ledger.participants.shape[1]
        of_share = self.steps**2 / self.fewest_shares(clients)
        if observer == "upload":
            theorem = "Skellam share, replace-one, over the rounds that a client took part in"
            return upload_view(ledger)._replace(theorem=theorem, variance=of_share)
        shares = _shares(ledger)
        insider = observer == "client"
        if insider:
            # The only share of a round is the exposed client's own, which nobody else knows.
            shares = np.maximum(shares - 1, np.minimum(shares, 1))
        noise = self._noise_of(shares, ledger, replaced, insider)
        view = self.sampling.view(noise)
        return view._replace(
            hidden=np.zeros_like(view.hidden),
            theorem=f"distributed Skellam, {noise.adjacency}",
            amplified=None,
            variance=of_share * shares.min(initial=math.inf, where=shares > 0),
        )

    def _noise_of(
        self,
        shares: Float[np.ndarray, "T"],
        ledger: Ledger,
        replaced: bool,
        insider: bool,
    ) -> SumNoise:
        """Return the noise on sums with the given numbers of shares."""
        clients = ledger.participants.shape[1]
        level = np.asarray(ledger.noise_multiplier, np.float64) * (1 - _ROUNDED)
        # Nobody is exposed in a round without participants.
        floor = np.where(shares > 0, level**2 * shares / self.fewest_shares(clients), math.inf)
        row = np.zeros((len(floor), 1))
        # The floor holds all shares, so clients count as adding nothing to it.
        return SumNoise(clients, row, row + 1, floor, floor[:, None], False, replaced, insider)

    def planned(self, clients: int, rounds: int) -> Ledger:
        """Return the worst-case ledger of a planned run, with n shares in each round."""
        plan = super().planned(clients, rounds)
        least = self.fewest_shares(clients)
        noise = np.asarray(plan.noise_multiplier)[:, None] / math.sqrt(least)
        notes = {"shares": np.full(rounds, float(least))}
        return plan._replace(client_noise=noise, server_noise=np.zeros(rounds), notes=notes)

    def describe(self, ledger: Ledger) -> list[str]:
        """Return sentences on the rounds' shares, the sensitivities, and the chance of a wrap.

        The list is empty for an empty ledger.
        """
        if not len(ledger.participants):
            return []
        clients = ledger.participants.shape[1]
        shares = _shares(ledger)
        levels = np.asarray(ledger.noise_multiplier, np.float64)
        longest = self.steps / levels.min()
        # The exponential may underflow, and a bound of 0 would be false.
        wraps = max(math.exp(self._log_wraps(clients, longest, self.bits)), 1e-300)
        lines = [
            f"distributed noise: each participant adds a Skellam share, and "
            f"{self.fewest_shares(clients)} shares have the noise multiplier; rounds had "
            f"{shares.min():.0f} to {shares.max():.0f} shares, and dropping out is assumed not to "
            "depend on data",
            f"integers: a client moves a sum by at most {longest:.6g} steps (L2) and "
            f"{longest**2:.6g} (L1), the noise of a round is {self.steps} steps by plan, and sums "
            f"are taken modulo 2^{self.bits}, so that a coordinate wraps with a probability of at "
            f"most {wraps:.1g}",
        ]
        return lines

    @property
    def representation(self) -> SharedGrid:
        """Whole steps, to which clients add their shares."""
        return SharedGrid(self.noise_multiplier, self.steps)

    @property
    def coordinate_bits(self) -> int:
        """Bits of the modulus."""
        return self.bits

    @property
    def server_noisy(self) -> bool:
        """False, because clients add all noise."""
        return False

    @property
    def clients_noisy(self) -> bool:
        """True, because clients add all noise."""
        return True

    def _check_modulus(self, clients: int) -> None:
        """Require enough bits that a coordinate wraps with a probability of at most 1e-9.

        A traced noise multiplier passes unchecked.
        """
        levels: Any = self.noise_multiplier
        if traced(levels):
            return
        longest = self.steps / float(np.min(np.asarray(levels, np.float64)))
        if self._log_wraps(clients, longest, self.bits) <= _WRAPS:
            return
        fit = [bits for bits in range(8, 33) if self._log_wraps(clients, longest, bits) <= _WRAPS]
        remedy = "Give fewer steps."
        if fit:
            remedy = f"Give bits={fit[0]}, or fewer steps."
        most = self.sampling.most(clients)
        raise ValueError(
            f"bits must hold sums of {most} participants, each of whom moves a coordinate by up to "
            f"{longest:.6g} steps, and their noise, got {self.bits} with steps={self.steps}. "
            f"{remedy}"
        )

    def _log_wraps(self, clients: int, longest: float, bits: int) -> float:
        """Return an upper bound on the log probability that a coordinate of a sum wraps.

        Args:
            clients: Number of clients.
            longest: Largest norm of an update, in steps.
            bits: Bits of the modulus.
        """
        most = self.sampling.most(clients)
        # Updates alone may take `most * longest` steps, and the noise has the rest of the range.
        room = 2 ** (bits - 1) - 1 - most * longest
        if room <= 0:
            return 0.0
        variance = most * self.steps**2 / self.fewest_shares(clients)
        # The noise may leave the range at either end.
        return min(0.0, math.log(2) + skellam_tail(room, variance))


def _share(key: Key[Array, "*S"], memory: Shares, client: Participant, update: Tree) -> Tree:
    """Return a client's share of the noise, in whole steps."""
    # Zeros of int32 keep the share in whole steps, whatever the dtype of the update.
    flat, unravel = ravel_pytree(
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.int32), update)
    )
    own = derive(key, CLIENT_NOISE, client.client_id)
    return unravel(draw_skellam(own, memory.thresholds, flat.size))


def _shares(ledger: Ledger) -> Float[np.ndarray, "T"]:
    """Return the number of noise shares in each round's sum."""
    if "shares" not in ledger.notes:
        raise ValueError(
            f"ledger must have the note 'shares' of Skellam noise, got notes {list(ledger.notes)}. "
            "Give the ledger of a run with this mechanism, or its planned one."
        )
    return np.asarray(ledger.notes["shares"], np.float64)
