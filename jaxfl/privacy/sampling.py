"""Samplers: who takes part in a round, and the privacy amplification of hiding it."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from jaxfl._support.checks import check_count, check_fraction, checked, traced
from jaxfl.privacy.accounting import accountants
from jaxfl.privacy.accounting.observers import (
    ROUNDING,
    Amplified,
    SumNoise,
    View,
    multiplier,
    plain_view,
)
from jaxfl.privacy.noise import random_bits
from jaxfl.types import Number


def coins(
    key: Key[Array, "*S"], count: int, rate: Number | Float[np.ndarray, "{count}"]
) -> Bool[Array, "{count}"]:
    """Draw `count` independent coins, each True with probability `rate` or its entry of `rate`.

    A rate is rounded down to a multiple of 2^-64, because a coin has 64 bits. A rate of 1 is exact
    if all coins have it, and otherwise loses 2^-64. A traced rate, even if it is 1, is replaced by
    the next float32 below.
    """
    if not traced(rate) and np.all(np.asarray(rate) == 1):
        return jnp.ones(count, bool)
    bits = random_bits(key, (count, 2))
    high, low = _rate_threshold(rate)
    first = bits[:, 0]
    second = bits[:, 1]
    # JAX has no 64-bit integers by default, so the two words are compared one after the other.
    return (first < high) | ((first == high) & (second < low))


def permutation(key: Key[Array, "*S"], count: int) -> Int[Array, "{count}"]:
    """Draw a uniformly random permutation of 0 to `count` - 1.

    With a key pair, each entry gets 64 random bits, by which entries are sorted. The probability
    that any two entries have equal bits is below count^2 2^-65.
    """
    if not key.ndim:
        return jax.random.permutation(key, count)
    bits = random_bits(key, (2, count))
    return jnp.lexsort((bits[0], bits[1])).astype(jnp.int32)


def _rate_threshold(rate: Number | Float[np.ndarray, "C"]) -> tuple[Any, Any]:
    """Return 2^64 times the rate, or each client's rate, rounded down to integers below 2^64.

    The two results are the high and the low 32 bits. A traced rate is replaced by the next float32
    below.
    """
    if traced(rate):
        # The next float below keeps a rate of 1 within 32 bits.
        scaled = jnp.nextafter(jnp.asarray(rate, jnp.float32), jnp.float32(0)) * 2.0**32
        high = jnp.floor(scaled)
        low = (scaled - high) * 2.0**32
        return high.astype(jnp.uint32), low.astype(jnp.uint32)
    # A rate of 1 among others loses 2^-64, because its threshold would need a 65th bit.
    scaled = [min(int(own * 2.0**64), 2**64 - 1) for own in np.ravel(rate).tolist()]
    words = np.array([divmod(own, 2**32) for own in scaled], np.uint32)
    high, low = words.T.reshape(2, *np.shape(rate))
    return high, low


NEEDS = {
    "hidden coins": "In every round the server draws each client by an independent secret coin, "
    "and no observer learns who took part.",
    "hidden draw": "In every round the server draws the cohort uniformly and anew, no observer "
    "learns who took part, and clients keep no state.",
    "each once": "Every client takes part exactly once in each epoch, in a round that is drawn "
    "uniformly and in secret.",
    "groups": "A public rule divides the clients into groups that take turns, so that a client's "
    "rounds are far apart. A group's members must be available in its rounds.",
    "limits": "The server enforces the stated limits on how often and how soon a client returns.",
    "nothing": "The guarantee holds whoever takes part, also if cohorts are known.",
}
"""Needs of samplers: by key, sentences on what an epsilon asks of a deployment."""


class Sampling:
    """Rule that draws the participants of each round.

    A sampler draws cohorts, and accounts for the amplification that comes from hiding them.
    """

    def expected(self, clients: int) -> float:
        """Return the mean number of participants of a round."""
        raise NotImplementedError

    def drawn(self, clients: int) -> float:
        """Return the mean number of drawn clients of a round, some of whom may drop out."""
        return self.expected(clients)

    def drawn_of(self, arrived: Bool[np.ndarray, "T C"]) -> Float[np.ndarray, "T"]:
        """Return the number of drawn clients in each round, none of whom drops out here.

        Args:
            arrived: Whether each client's update arrived, by round.
        """
        return arrived.sum(axis=1).astype(float)

    def usual_cohort(self, clients: int) -> float:
        """Return a number of participants that is rarely exceeded."""
        return self.expected(clients)

    def most(self, clients: int) -> int:
        """Return the largest number of participants."""
        return math.ceil(self.expected(clients))

    @property
    def fixed(self) -> bool:
        """Whether the number of participants is the same in all rounds."""
        return True

    @property
    def period(self) -> int:
        """Number of successive rounds that share a key."""
        return 1

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Draw the participants of round `index`, and return a mask of the clients.

        Args:
            key: Key of the round's `period`: a JAX key, or a pair under secret noise. `random_bits`
                takes both (see `jaxfl.privacy.noise`).
            clients: Number of clients.
            index: Index of the round.
        """
        raise NotImplementedError

    def possible(self, clients: int, rounds: int) -> Bool[np.ndarray, "T C"]:
        """Return who can take part, by round, as a table that may be read-only."""
        return np.broadcast_to(True, (rounds, clients))

    @property
    def gap(self) -> int:
        """Fewest rounds from one participation of a client to its next."""
        return 1

    def turns(self, clients: int, rounds: int) -> Bool[Any, "T C"]:
        """Return the table `possible`, or a `Turns`, which takes no memory until it is read."""
        return self.possible(clients, rounds)

    def sample_canaries(
        self, key: Key[Array, ""], clients: int, count: int, index: Int[Array, ""] | int
    ) -> tuple[Bool[Array, "K"], Float[Array, "#K"]]:
        """Return which of `count` canaries are drawn in round `index`, and with what probability.

        The probabilities have one entry for all canaries, or one for each. The clients' own cohort
        is unaffected.
        """
        drawn = self.sample(key, count, index)
        return drawn, jnp.full(1, self.expected(clients) / clients)

    def view(self, noise: SumNoise) -> View:
        """Return the view of an observer who learns sums with this noise, and no cohorts."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the sampler's entry in a privacy statement: its `kind` and its settings."""
        raise NotImplementedError

    def needs(self, stateful: bool = False) -> tuple[str, ...]:
        """Return what an epsilon under this sampler asks of a deployment, as keys of `NEEDS`.

        The tuple is empty if the epsilon holds whoever takes part.

        Args:
            stateful: Whether clients keep a state.
        """
        del stateful
        return ()

    def assumed(self, stateful: bool) -> dict[str, str]:
        """Return the assumptions of the amplification theorem, as sentences by their codes.

        Args:
            stateful: Whether clients keep a state.
        """
        del stateful
        return {}


def _check_rate(name: str, value: Any) -> Any:
    """Require a probability in (0, 1], and return it as a float.

    A traced number passes unchanged. For a number of clients, the error names `FixedSize`.
    """
    if not traced(value) and isinstance(value, int) and value > 1:
        raise ValueError(
            f"{name} must be a probability in (0, 1], got {value}. Give for instance 0.5, or "
            f"FixedSize({value}) for {value} clients in each round."
        )
    return check_fraction(name, value)


@checked(rate=_check_rate)
@dataclasses.dataclass(frozen=True)
class Poisson(Sampling):
    """Sampling of each client independently with probability `rate`.

    Args:
        rate: Probability of participation in a round, above 0 and at most 1.
    """

    rate: float

    def expected(self, clients: int) -> float:
        """Return the mean number of participants."""
        return self.rate * clients

    def usual_cohort(self, clients: int) -> float:
        """Return a size that few cohorts exceed, at least six standard deviations over the mean."""
        expected = self.expected(clients)
        return expected + 6 * math.sqrt(expected)

    def most(self, clients: int) -> int:
        """Return the number of clients."""
        return clients

    @property
    def fixed(self) -> bool:
        """Whether the rate is 1."""
        return self.rate == 1

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Draw the participants. Client i's coin depends on the key and on i alone."""
        del index
        return coins(key, clients, self.rate)

    def view(self, noise: SumNoise) -> View:
        """Return Gaussians, amplified by Poisson sampling if the rate is below 1.

        Only rounds whose sum hides the cohort are amplified. This takes a denominator and a noise
        that are the same for every cohort. If the clients' noise can exceed the server's floor, the
        variance of the sum reveals who took part, and the round counts in full.
        """
        if self.rate == 1:
            return _cohort_view(noise, noise.clients)
        return _sampled_view(noise, self.rate)

    def describe(self) -> dict[str, Any]:
        """Return the kind and the rate."""
        return {"kind": "poisson", "rate": float(self.rate)}

    def needs(self, stateful: bool = False) -> tuple[str, ...]:
        """Return the key "hidden coins", or no key if every client takes part."""
        del stateful
        return _coins_below_one(self.rate)


@checked()
@dataclasses.dataclass(frozen=True)
class FixedSize(Sampling):
    """Sampling of `size` clients, uniformly without replacement.

    Args:
        size: Number of participants of a round.
    """

    size: int

    def expected(self, clients: int) -> float:
        """Return `size`, or raise an error if there are fewer clients."""
        _check_holds(self.size, clients)
        return float(self.size)

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Draw `size` clients, uniformly without replacement."""
        del index
        # The numbers below `size` fall on a uniformly random set of that many clients.
        return permutation(key, clients) < self.size

    def sample_canaries(
        self, key: Key[Array, ""], clients: int, count: int, index: Int[Array, ""] | int
    ) -> tuple[Bool[Array, "K"], Float[Array, "#K"]]:
        """Draw canaries by independent coins of probability `size` / `clients`."""
        return Poisson(self.size / clients).sample_canaries(key, clients, count, index)

    def view(self, noise: SumNoise) -> View:
        """Return Gaussians, with amplification under replace-one as a second bound if it is proven.

        The amplification holds only if clients keep no state.
        """
        return _cohort_view(noise, self.size)

    def describe(self) -> dict[str, Any]:
        """Return the kind and the size."""
        return {"kind": "fixed size", "size": self.size}

    def needs(self, stateful: bool = False) -> tuple[str, ...]:
        """Return the key "hidden draw", or no key if clients keep a state.

        With a state, epsilon is not amplified, and the draw need not be hidden.
        """
        if stateful:
            return ()
        return ("hidden draw",)

    def assumed(self, stateful: bool) -> dict[str, str]:
        """Return the assumption that clients keep no state, or none if they keep one."""
        if stateful:
            return {}
        return {
            "stateless_clients": "clients keep no state from one round to the next, as "
            "amplification by sampling without replacement requires"
        }


@dataclasses.dataclass(frozen=True)
class Full(Sampling):
    """Sampling of every client in every round."""

    def expected(self, clients: int) -> float:
        """Return the number of clients."""
        return float(clients)

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Return a cohort of all clients."""
        del key, index
        return jnp.ones(clients, bool)

    def view(self, noise: SumNoise) -> View:
        """Return a view of Gaussian noise without amplification."""
        return _cohort_view(noise, noise.clients)

    def describe(self) -> dict[str, Any]:
        """Return the kind of the sampler."""
        return {"kind": "full"}


@checked(rate=check_fraction, groups=check_count)
@dataclasses.dataclass(frozen=True)
class CyclicPoisson(Sampling):
    """Sampling of groups that take turns, by independent coins within the group of a round.

    Round t belongs to group t mod b. Each client of the group takes part with probability `rate`
    times b. A public permutation splits the clients into b groups of about equal size. A client's
    rounds are at least b apart, as amplification of correlated noise with up to b bands requires.

    Args:
        rate: Probability of participation, averaged over rounds, at most 1 / b.
        groups: b, the number of groups.

    Raises:
        ValueError: `rate` exceeds 1 / b by more than rounding.
    """

    rate: float
    groups: int

    def __post_init__(self) -> None:
        if not traced(self.rate) and self.rate * self.groups > 1 + 1e-9:
            raise ValueError(
                f"rate must be at most {1 / self.groups} with groups={self.groups!r}, "
                f"got {self.rate!r}. Give a smaller rate, or fewer groups."
            )

    @property
    def turn_rate(self) -> float:
        """Probability of participation in a round of the client's group."""
        # The product may exceed 1 by rounding, which `__post_init__` allows.
        return min(self.rate * self.groups, 1.0)

    def expected(self, clients: int) -> float:
        """Return the number of participants, averaged over draws and over the groups' turns."""
        return self.rate * clients

    def usual_cohort(self, clients: int) -> float:
        """Return a size that few cohorts exceed, at least six standard deviations over the mean."""
        return Poisson(self.rate).usual_cohort(clients)

    def most(self, clients: int) -> int:
        """Return the size of the largest group."""
        return -(-clients // self.groups)

    @property
    def fixed(self) -> bool:
        """False, because cohorts may vary in size."""
        return False

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Draw from the round's group, by coins of probability `turn_rate`."""
        # All clients have coins, so that a coin depends on the key and on the client alone.
        turn = jnp.asarray(_groups(clients, self.groups)) == index % self.groups
        return coins(key, clients, self.turn_rate) & turn

    @property
    def gap(self) -> int:
        """Number of groups that take turns."""
        return self.groups

    def possible(self, clients: int, rounds: int) -> Bool[np.ndarray, "T C"]:
        """Return a table with each client in the rounds of its group."""
        return np.asarray(self.turns(clients, rounds))

    def turns(self, clients: int, rounds: int) -> Bool[Any, "T C"]:
        """Return `possible` as a table that is built when it is read."""
        return Turns(clients, rounds, self.groups)

    def sample_canaries(
        self, key: Key[Array, ""], clients: int, count: int, index: Int[Array, ""] | int
    ) -> tuple[Bool[Array, "K"], Float[Array, "#K"]]:
        """Draw canaries, which form b groups of their own, by coins of the same probability.

        The probability is 0 for canaries outside the round's group.
        """
        turn = jnp.asarray(_groups(count, self.groups)) == index % self.groups
        return coins(key, count, self.turn_rate) & turn, jnp.where(turn, self.turn_rate, 0.0)

    def view(self, noise: SumNoise) -> View:
        """Return one Gaussian for every b rounds, with the least noise of the b.

        It is amplified by Poisson sampling at `turn_rate` if that is below 1 and all sums of the b
        rounds hide their cohorts.
        """
        # The smallest group has the least noise. Groups are public, so nothing is amplified.
        view = _cohort_view(noise, noise.clients // self.groups)._replace(amplified=None)
        if self.turn_rate < 1:
            view = _sampled_view(noise, self.turn_rate)
        return _by_turn(view, self.groups)

    def describe(self) -> dict[str, Any]:
        """Return the kind, the rate and the groups."""
        return {"kind": "cyclic poisson", "rate": float(self.rate), "groups": self.groups}

    def needs(self, stateful: bool = False) -> tuple[str, ...]:
        """Return "hidden coins" if `turn_rate` is below 1, and "groups" if there are several."""
        del stateful
        return (*_coins_below_one(self.turn_rate), *_groups_above_one(self.groups))


@checked(size=check_count, separation=check_count)
@dataclasses.dataclass(frozen=True)
class MinSeparation(Sampling):
    """Sampling of `size` clients of group t mod b, uniformly without replacement.

    A client's rounds are at least b apart. No guarantee relies on random cohorts: there is no
    amplification, and cohorts may be known. This sampler is for correlated noise in deployments
    that cannot do Poisson sampling.

    Args:
        size: Number of participants of a round, at most the number of clients in each group.
        separation: b, the number of groups, which a public permutation of the clients forms.
    """

    size: int
    # If it were given by position, nobody would notice that it and the size were swapped.
    separation: int = dataclasses.field(kw_only=True)

    def expected(self, clients: int) -> float:
        """Return `size`, or raise an error if a group has fewer clients."""
        most = clients // self.separation
        if self.size > most:
            raise ValueError(
                f"size must be at most {most}, the clients in each of {self.separation} groups of "
                f"{clients} clients, got {self.size}. Give a smaller size or separation."
            )
        return float(self.size)

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Draw `size` clients from the round's group."""
        outside = jnp.asarray(_groups(clients, self.separation)) != index % self.separation
        places = permutation(key, clients) if key.ndim else jax.random.uniform(key, (clients,))
        # Places are below the number of clients, so clients of other groups come last.
        order = jnp.argsort(jnp.where(outside, clients, places))
        return jnp.zeros(clients, bool).at[order[: self.size]].set(True)

    @property
    def gap(self) -> int:
        """Number of groups that take turns."""
        return self.separation

    def possible(self, clients: int, rounds: int) -> Bool[np.ndarray, "T C"]:
        """Return a table with each client in the rounds of its group."""
        return np.asarray(self.turns(clients, rounds))

    def turns(self, clients: int, rounds: int) -> Bool[Any, "T C"]:
        """Return `possible` as a table that is built when it is read."""
        return Turns(clients, rounds, self.separation)

    def sample_canaries(
        self, key: Key[Array, ""], clients: int, count: int, index: Int[Array, ""] | int
    ) -> tuple[Bool[Array, "K"], Float[Array, "#K"]]:
        """Draw canaries as `CyclicPoisson` does, by coins of mean rate `size` / `clients`."""
        by_coins = CyclicPoisson(self.size / clients, self.separation)
        return by_coins.sample_canaries(key, clients, count, index)

    def view(self, noise: SumNoise) -> View:
        """Return one Gaussian for every b rounds, with the least noise of the b."""
        return _by_turn(_cohort_view(noise, self.size)._replace(amplified=None), self.separation)

    def describe(self) -> dict[str, Any]:
        """Return the kind, the size and the separation."""
        return {"kind": "minimum separation", "size": self.size, "separation": self.separation}

    def needs(self, stateful: bool = False) -> tuple[str, ...]:
        """Return the key "groups", or no key if there is only one group."""
        del stateful
        return _groups_above_one(self.separation)


MOST_BINS = 2**16
"""Most bins of `BallsInBins`. Products of two remainders then fit in 32 bits."""


@checked(bins=functools.partial(check_count, most=MOST_BINS))
@dataclasses.dataclass(frozen=True)
class BallsInBins(Sampling):
    """Sampling of every client once in each epoch of b rounds, in a uniformly drawn round.

    Args:
        bins: b, the number of rounds of an epoch.
    """

    bins: int

    def expected(self, clients: int) -> float:
        """Return the mean number of participants."""
        return clients / self.bins

    def usual_cohort(self, clients: int) -> float:
        """Return a size that few cohorts exceed, at least six standard deviations over the mean."""
        return Poisson(1 / self.bins).usual_cohort(clients)

    def most(self, clients: int) -> int:
        """Return the number of clients."""
        return clients

    @property
    def fixed(self) -> bool:
        """Whether there is a single bin."""
        return self.bins == 1

    @property
    def period(self) -> int:
        """Number of rounds of an epoch."""
        return self.bins

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Return the clients whose bin is `index` mod b. Bins are uniform to 2^-64."""
        bits = random_bits(key, (clients, 2))
        high = jnp.asarray(2**32 % self.bins, jnp.uint32)
        # The bin is (2^32 a + b) mod bins of the two words a and b, computed in 32 bits.
        mixed = (bits[:, 0] % self.bins) * high % self.bins + bits[:, 1] % self.bins
        return mixed % self.bins == jnp.asarray(index % self.bins, jnp.uint32)

    def view(self, noise: SumNoise) -> View:
        """Return one Gaussian per epoch.

        Under zero-out, an amplified bound is added if all sums hide their cohorts.
        """
        view = _by_turn(_cohort_view(noise, 1)._replace(amplified=None), self.bins)
        sampled = _sampled_view(noise, 1 / self.bins)
        if noise.replaced or not sampled.hidden.all():
            return view
        amplified = Amplified(
            # These divergences serve all clients, so the client of least noise counts.
            multiplier=view.multiplier.min(axis=1),
            divergences=functools.partial(accountants.balls_in_bins, bins=self.bins),
            theorem=f"Gaussian in one of {self.bins} rounds, balls in bins, {noise.adjacency}",
        )
        return view._replace(amplified=amplified)

    def describe(self) -> dict[str, Any]:
        """Return the kind and the bins."""
        return {"kind": "balls in bins", "bins": self.bins}

    def needs(self, stateful: bool = False) -> tuple[str, ...]:
        """Return the key "each once"."""
        del stateful
        return ("each once",)


def _check_holds(size: int, clients: int) -> None:
    """Require at least `size` clients."""
    if size > clients:
        raise ValueError(
            f"size must be at most {clients}, the number of clients, got {size}. "
            "Give a smaller size, or more clients."
        )


def _coins_below_one(rate: Number) -> tuple[str, ...]:
    if rate < 1:
        return ("hidden coins",)
    return ()


def _groups_above_one(groups: int) -> tuple[str, ...]:
    if groups > 1:
        return ("groups",)
    return ()


@functools.cache
def _groups(clients: int, groups: int) -> Int[np.ndarray, "C"]:
    """Return each client's group, from 0, by a public permutation of the clients."""
    # Groups are public, so a fixed seed serves. Every plan and every run must find the same ones.
    return np.random.default_rng(0).permutation(clients).astype(np.int32) % groups


class Turns:
    """Table [T, C] of who can take part if groups take turns, built only when it is read.

    The accounting of a plan needs no more than the rounds of the client that is most exposed, which
    are those of the first group.

    Args:
        clients: C, the number of clients.
        rounds: T, the number of rounds.
        gap: b, the number of groups. With `most` it is only the fewest rounds from one
            participation to the next.
        most: Most rounds of a client, which may be any that keep the gap. None stands for the
            rounds of the client's own group.
    """

    def __init__(self, clients: int, rounds: int, gap: int, most: int | None = None) -> None:
        self.shape = (rounds, clients)
        self.dtype = np.dtype(bool)
        self.gap = gap
        self.known = most is None
        """Whether a client's rounds are known, not only their number and gap."""
        turns = -(-rounds // gap)
        if most is not None:
            turns = min(most, turns)
        self.most = turns
        """k, the most rounds of a client."""

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the table as an array, or raise an error if only limits are known."""
        if not self.known:
            raise ValueError(
                "participations and separation must be None for a mechanism whose `view` reads who "
                f"took part, got at most {self.most} rounds of a client, {self.gap} apart. "
                "Leave both out."
            )
        rounds, clients = self.shape
        return _groups(clients, self.gap) == np.arange(rounds)[:, None] % self.gap


@dataclasses.dataclass(frozen=True)
class Limited(Sampling):
    r"""Sampling, in a plan, by a server that limits how often and how soon clients return.

    Every participation counts in full. A limit makes a client's coins depend on one another, which
    no theorem of amplification covers. With at most k participations, each at least b rounds after
    the last, independent noise is one Gaussian of multiplier :math:`(\sum_j z_j^{-2})^{-1/2}`. Here
    the rounds are divided into blocks of b, each of which holds one participation at most. Block j
    has its least multiplier :math:`z_j`, and the sum is over the k least of them.

    Args:
        sampling: Sampler that the server restrains.
        participations: k, the most participations of a client. None allows as many as fit.
        separation: b, the fewest rounds from one participation to the next.
    """

    sampling: Sampling
    participations: int | None
    separation: int

    def expected(self, clients: int) -> float:
        """Return the sampler's mean number of participants."""
        return self.sampling.expected(clients)

    @property
    def gap(self) -> int:
        """Fewest rounds from one participation of a client to its next."""
        return self.separation

    def turns(self, clients: int, rounds: int) -> Bool[Any, "T C"]:
        """Return a `Turns` that knows the most rounds of a client and their gap, but no table."""
        # Without a limit any number of rounds that keeps the gap is possible.
        most = self.participations
        if most is None:
            most = rounds
        return Turns(clients, rounds, self.separation, most)

    def needs(self, stateful: bool = False) -> tuple[str, ...]:
        """Return the key "limits", because the server must enforce them."""
        del stateful
        return ("limits",)

    def view(self, noise: SumNoise) -> View:
        """Return Gaussians with the k least multipliers of blocks of b rounds.

        Each block has its least noise.
        """
        view = _by_turn(_cohort_view(noise, 1)._replace(amplified=None), self.separation)
        if self.participations is None or self.participations >= len(view.multiplier):
            return view
        # No block of this view is hidden, so sorting need not reorder `hidden`.
        least = np.sort(view.multiplier, axis=0)[: self.participations]
        return view._replace(multiplier=least, hidden=view.hidden[: self.participations])


def limited(
    sampling: Sampling, rounds: int, participations: int | None, separation: int | None
) -> Sampling:
    """Return the sampler under limits, or the sampler itself if its `gap` implies them.

    A limit of None does not restrict. `rounds` is the number of rounds of the plan. The other
    arguments are those of `Limited`.
    """
    gap = max(sampling.gap, separation or 1)
    # As many participations as fit into the rounds are no limit.
    free = participations is None or participations >= -(-rounds // gap)
    if free and gap == sampling.gap:
        return sampling
    return Limited(sampling, participations, gap)


def _by_turn(view: View, length: int) -> View:
    """Return the view of a client with at most one round in every `length` rounds.

    That round has the least noise of these rounds.
    """
    padded = -len(view.multiplier) % length
    # Infinity and True change neither a least multiplier nor whether all rounds are hidden.
    multiplier = np.pad(view.multiplier, ((0, padded), (0, 0)), constant_values=math.inf)
    multiplier = multiplier.reshape(-1, length, multiplier.shape[1]).min(axis=1)
    hidden = np.pad(view.hidden, (0, padded), constant_values=True).reshape(-1, length)
    hidden = np.logical_and.reduce(hidden, axis=1)
    return view._replace(multiplier=multiplier, hidden=hidden, grows=True, turn=length)


def _sampled_view(noise: SumNoise, rate: float) -> View:
    """Return Gaussians that Poisson sampling amplifies in rounds whose sum hides the cohort.

    In all rounds, the noise is the larger of the server's floor and the client's own noise.
    """
    least = np.maximum(noise.above, noise.clients_add)
    # With at most this much noise by clients, the server tops all cohorts up to one variance.
    steady = _most(noise.clients_add, noise.clients, noise.clients) <= noise.floor * (1 + ROUNDING)
    hidden = steady & (least.min(axis=1) > 0) & noise.hides_cohort
    theorem = f"Poisson-sampled Gaussian, rate {rate:g}, {noise.adjacency}"
    why_infinite = "no noise on the sum"
    if not hidden.all():
        why = "the denominator shows the cohort"
        if noise.hides_cohort:
            why = "the clients' noise can exceed the floor"
        rest = ""
        if hidden.any():
            rest = f"; {theorem} in {int(hidden.sum())} other rounds"
        theorem = f"Gaussian without amplification, {noise.adjacency}, because {why}{rest}"
        why_infinite = (
            "no noise on the sum: under Poisson sampling a client can count only on the server's "
            "noise and its own"
        )
    ratio = multiplier(least, noise.weights)
    return View(ratio, hidden, float(rate), theorem, why_infinite, noise.replaced)


def _cohort_view(noise: SumNoise, size: int) -> View:
    """Return Gaussians for cohorts of `size` clients, and their amplification if it is proven.

    The noise is the larger of the server's floor and the least sum of a cohort's own noise.
    """
    others = noise.clients - noise.insider
    # An insider in the cohort knows its own noise, so one participant fewer adds noise.
    company = max(size - noise.insider, 1)
    least = np.maximum(noise.above, _least(noise.clients_add, company, noise.clients))
    view = plain_view(multiplier(least, noise.weights), f"Gaussian, {noise.adjacency}")
    view = view._replace(replaced=noise.replaced)
    # A cohort of all clients hides nobody, and without noise nothing is hidden.
    noisy = np.all(least.min(axis=1) > 0)
    if size >= others or not noisy or not _hides_draws(noise, size):
        return view
    amplified = Amplified(
        # Under replace-one an update may turn into its opposite, at twice the sensitivity.
        multiplier=np.sqrt(least.min(axis=1)) / (2 * noise.weights.max(axis=1)),
        divergences=functools.partial(accountants.without_replacement, clients=others, size=size),
        theorem="sampling without replacement, replace-one",
        stateless=True,
    )
    return view._replace(amplified=amplified)


def _hides_draws(noise: SumNoise, size: int) -> bool:
    """Return whether neither the divisor nor the variance of a sum depends on the cohort."""
    adds = noise.clients_add
    steady = _most(adds, size, noise.clients) <= noise.floor * (1 + ROUNDING)
    # Equal noise of all clients has the same variance on the sum, whoever takes part.
    even = adds.max(axis=1) <= adds.min(axis=1) * (1 + ROUNDING)
    # Equal weights of a cohort of fixed size have one sum, so the divisor reveals nothing.
    hides = noise.hides_cohort or bool(np.all(noise.weights == noise.weights[:, :1]))
    return hides and bool(np.all(steady | even))


def _least(noise: np.ndarray, company: int, clients: int) -> np.ndarray:
    """Return the least total noise of a cohort of `company` clients that contains client i.

    Noise is in variances, by round and by client i.
    """
    # A single column stands for all clients.
    if noise.shape[1] == 1:
        return noise * min(company, clients)
    ordered = np.sort(noise, axis=1)
    quietest = ordered[:, : company - 1].sum(axis=1, keepdims=True)
    # If client i is among the quietest itself, the next quietest client completes the cohort.
    return quietest + np.maximum(noise, ordered[:, company - 1 : company])


def _most(noise: np.ndarray, company: int, clients: int) -> np.ndarray:
    """Return the largest total noise, in variances by round, of a cohort of `company` clients."""
    if noise.shape[1] == 1:
        return noise[:, 0] * min(company, clients)
    return np.sort(noise, axis=1)[:, -company:].sum(axis=1)
