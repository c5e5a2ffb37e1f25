"""Clients that drop out: they are drawn, and their updates never arrive."""

import dataclasses
from typing import Any

import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from jaxfl._support.checks import check_numbers, checked, show
from jaxfl.privacy.accounting.observers import SumNoise, View
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.noise import DROPOUT, derive
from jaxfl.privacy.sampling import Sampling, coins


def check_availability(name: str, value: Any) -> float | Float[np.ndarray, "C"]:
    """Require one probability in (0, 1] for all clients, or one for each, and return the value.

    One number is returned as a float, and several as a float64 array `[C]`.
    """
    array = check_numbers(name, value, axes=(0, 1))
    if np.max(array) > 1:
        raise ValueError(
            f"{name} must be at most 1, because it is a probability, got {show(value)}. "
            "Give for instance 0.8."
        )
    if array.ndim:
        return array
    return float(array)


@checked(availability=check_availability)
@dataclasses.dataclass(frozen=True, eq=False)
class Dropouts(Sampling):
    r"""Sampling of clients of whom some drop out: their updates of the round never arrive.

    Client i, once the inner sampler has drawn it, returns its update with probability
    :math:`a_i`, independently in each round. The expected cohort, and with it the denominator, is
    that of the returned updates. A mean over clients of equal availability is therefore unbiased.

    Args:
        sampling: Rule that draws the clients of each round.
        availability: :math:`a`, a probability in (0, 1], or one for each client `[C]`. If
            `sampling` is a `Dropouts` already, its probabilities are multiplied by these.

    Guarantee: The epsilon counts every drawn client as one that returns, so that it is an upper
        bound. It holds for any fixed choice of the rounds in which each client is available. The
        choice must depend neither on data nor on the draws. A client adds nothing in its other
        rounds. The sums are then those of the inner sampler after post-processing: the client's
        part is replaced by zero, as in the neighbouring run. The noise must not depend on who
        returns, and it does not if the server adds all of it. If clients add noise, a client counts
        on the larger of the server's noise and its own, because all others may drop out, and
        nothing is amplified. `Skellam` counts the shares of noise that arrived in each round.
    """

    sampling: Sampling
    availability: float | Float[np.ndarray, "C"]

    def __post_init__(self) -> None:
        inner = self.sampling
        if isinstance(inner, Dropouts):
            # Two layers would throw the same coins. One with the product has the law of both.
            object.__setattr__(self, "sampling", inner.sampling)
            object.__setattr__(self, "availability", inner.availability * self.availability)

    def expected(self, clients: int) -> float:
        """Return the mean number of clients whose updates arrive.

        Raises:
            ValueError: There are several probabilities, but not one for each client.
        """
        count = np.size(self.availability)
        if count not in (1, clients):
            raise ValueError(
                f"availability must have one probability, or one for each of {clients} clients, "
                f"got {count}. Give one for each client."
            )
        return self.sampling.expected(clients) * self.mean

    def drawn(self, clients: int) -> float:
        """Return the mean number of drawn clients, including those who drop out."""
        return self.sampling.drawn(clients)

    def drawn_of(self, arrived: Bool[np.ndarray, "T C"]) -> Float[np.ndarray, "T"]:
        """Return the number of drawn clients by round.

        It is estimated from who arrived if the inner sampler's cohorts vary in size.
        """
        clients = arrived.shape[1]
        if self.sampling.fixed:
            return np.full(len(arrived), self.drawn(clients))
        # An arrival of probability a stands for 1 / a draws, which makes the estimate unbiased.
        return arrived @ (1 / np.broadcast_to(self.availability, clients))

    @property
    def mean(self) -> float:
        """Mean availability of the clients."""
        return float(np.mean(self.availability))

    def usual_cohort(self, clients: int) -> float:
        """Return a number of drawn clients that is rarely exceeded."""
        return self.sampling.usual_cohort(clients)

    def most(self, clients: int) -> int:
        """Return the largest number of drawn clients."""
        return self.sampling.most(clients)

    @property
    def fixed(self) -> bool:
        """False, because the number of updates that arrive may vary."""
        return False

    @property
    def period(self) -> int:
        """Period of the inner sampler. Clients drop out anew in each round of a period."""
        return self.sampling.period

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Draw the clients whose updates arrive."""
        drawn = self.sampling.sample(key, clients, index)
        # The rounds of a period share their key.
        return drawn & coins(derive(key, DROPOUT, index), clients, self.availability)

    def possible(self, clients: int, rounds: int) -> Bool[np.ndarray, "T C"]:
        """Return who can be drawn, by round."""
        return self.sampling.possible(clients, rounds)

    @property
    def gap(self) -> int:
        """Gap of the inner sampler."""
        return self.sampling.gap

    def turns(self, clients: int, rounds: int) -> Bool[Any, "T C"]:
        """Return the turns of the inner sampler."""
        return self.sampling.turns(clients, rounds)

    def sample_canaries(
        self, key: Key[Array, ""], clients: int, count: int, index: Int[Array, ""] | int
    ) -> tuple[Bool[Array, "K"], Float[Array, "#K"]]:
        """Draw canaries who never drop out, and are therefore the most exposed."""
        return self.sampling.sample_canaries(key, clients, count, index)

    def view(self, noise: SumNoise) -> View:
        """Return the inner sampler's view.

        If clients add noise, no client counts on another's, and nothing is amplified.
        """
        if not noise.clients_add.any():
            return self.sampling.view(noise)
        # Only the server and the client itself are sure to add noise to a sum with its update.
        alone = noise._replace(
            above=np.maximum(noise.above, noise.clients_add),
            clients_add=np.zeros_like(noise.clients_add),
            hides_cohort=False,
        )
        return self.sampling.view(alone)._replace(
            amplified=None,
            theorem=f"Gaussian, {noise.adjacency}, of the server's noise or the client's own, "
            "because others may drop out",
        )

    def describe(self) -> dict[str, Any]:
        """Return the inner sampler's entry, and the mean availability in words."""
        share = f"{100 * self.mean:.4g}%"
        return {**self.sampling.describe(), "availability": f"of whom {share} return"}

    def needs(self, stateful: bool = False) -> tuple[str, ...]:
        """Return what the inner sampler needs."""
        return self.sampling.needs(stateful)

    def assumed(self, stateful: bool) -> dict[str, str]:
        """Return the inner sampler's assumptions, and that dropouts depend on nothing private."""
        return self.sampling.assumed(stateful) | {
            "independent_dropouts": "whether a drawn client's update arrives depends neither on "
            "data nor on the draw, and an update that does not arrive is seen by nobody; epsilon "
            "counts every drawn client as one that returns, and is an upper bound"
        }


def with_dropouts(mechanism: Mechanism, availability: float | np.ndarray) -> Mechanism:
    """Return a mechanism whose clients drop out (`Dropouts`).

    The mechanism stays as it is if every availability is 1, or if clients send nothing.
    """
    if np.all(np.asarray(availability) == 1) or not mechanism.communicates:
        return mechanism
    return dataclasses.replace(mechanism, sampling=Dropouts(mechanism.sampling, availability))
