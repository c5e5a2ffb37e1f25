"""Who takes part in a round, and the privacy amplification of hiding it."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from jaxfl._validate import check_count, check_fraction, checked, traced
from jaxfl.privacy import accountants
from jaxfl.privacy.noise import random_bits
from jaxfl.privacy.observers import ROUNDING, Amplified, SumNoise, View, multiplier, plain_view
from jaxfl.types import Number


def coins(key: Key[Array, "*S"], count: int, rate: Number) -> Bool[Array, "{count}"]:
    """Independent 64-bit coins, True with probability `rate`, rounded down to a multiple of 2^-64."""
    if not traced(rate) and rate == 1:
        return jnp.ones(count, bool)
    bits = random_bits(key, (count, 2))
    high, low = _threshold(rate)
    return (bits[:, 0] < high) | ((bits[:, 0] == high) & (bits[:, 1] < low))


def permutation(key: Key[Array, "*S"], count: int) -> Int[Array, "{count}"]:
    """Draw a permutation. A key pair's sorts 64 bits, of which two agree with a probability below count^2 2^-65."""
    if not key.ndim:
        return jax.random.permutation(key, count)
    bits = random_bits(key, (2, count))
    return jnp.lexsort((bits[0], bits[1])).astype(jnp.int32)


def _threshold(rate: Number) -> tuple[Any, Any]:
    """A rate below 1, times 2^64, rounded down, as two words; of a traced rate, the next float below."""
    if traced(rate):
        scaled = jnp.nextafter(jnp.asarray(rate, jnp.float32), jnp.float32(0)) * 2.0**32
        high = jnp.floor(scaled)
        return high.astype(jnp.uint32), ((scaled - high) * 2.0**32).astype(jnp.uint32)
    high, low = divmod(int(float(rate) * 2.0**64), 2**32)
    return np.uint32(high), np.uint32(low)


class Sampling:
    """Who takes part in a round: a sampler's methods alone draw it and account for it."""

    def expected(self, clients: int) -> float:
        """Mean number of participants."""
        raise NotImplementedError

    def usual(self, clients: int) -> float:
        """A number of participants that is rarely exceeded."""
        return self.expected(clients)

    def most(self, clients: int) -> int:
        """The largest number of participants."""
        return math.ceil(self.expected(clients))

    @property
    def fixed(self) -> bool:
        """Whether the number of participants is the same in all rounds."""
        return True

    @property
    def period(self) -> int:
        """Successive rounds sharing a key."""
        return 1

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Draw who takes part in round `index`.

        The key is that of its `period`: a JAX key, or under secret noise a pair, of which `random_bits` takes both
        (see `jaxfl.privacy.noise`).
        """
        raise NotImplementedError

    def possible(self, clients: int, rounds: int) -> Bool[np.ndarray, "T C"]:
        """Who can take part, by round; read-only."""
        return np.broadcast_to(True, (rounds, clients))

    @property
    def gap(self) -> int:
        """The fewest rounds from one participation of a client to its next."""
        return 1

    def turns(self, clients: int, rounds: int) -> Bool[Any, "T C"]:
        """Return `possible`, in a form that takes no memory where the sampler has one."""
        return self.possible(clients, rounds)

    def beside(
        self, key: Key[Array, ""], clients: int, number: int, index: Int[Array, ""] | int
    ) -> tuple[Bool[Array, "K"], Float[Array, "#K"]]:
        """Participants among `number` extra clients, as frequent as the others, and their probability."""
        drawn = self.sample(key, number, index)
        return drawn, jnp.full(1, self.expected(clients) / clients)

    def view(self, noise: SumNoise) -> View:
        """What sums with this noise reveal if cohorts are unknown."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """The sampler in a privacy statement."""
        raise NotImplementedError

    def assumed(self, stateful: bool) -> list[str]:
        """Assumptions of the amplification theorem."""
        del stateful
        return []


@checked(rate=check_fraction)
@dataclasses.dataclass(frozen=True)
class Poisson(Sampling):
    """Each client takes part independently with probability `rate`."""

    rate: float

    def expected(self, clients: int) -> float:
        """Mean number of participants."""
        return self.rate * clients

    def usual(self, clients: int) -> float:
        """Six standard deviations above the mean."""
        expected = self.expected(clients)
        return expected + 6 * math.sqrt(expected)

    def most(self, clients: int) -> int:
        """All of them."""
        return clients

    @property
    def fixed(self) -> bool:
        """At a rate of 1 only."""
        return self.rate == 1

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Draw who takes part; client i's coin depends on the key and on i alone."""
        del index
        return coins(key, clients, self.rate)

    def view(self, noise: SumNoise) -> View:
        """Sampled Gaussians where the sum hides the cohort; elsewhere a client counts on the floor and its own noise.

        Amplification needs the same noise whatever the cohort: where the clients' noise can exceed the floor, the
        variance of the sum reveals who took part, and the round counts in full.
        """
        if self.rate == 1:
            return _cohort_view(noise, noise.clients)
        return _sampled_view(noise, self.rate)

    def describe(self) -> dict[str, Any]:
        """Kind and rate."""
        return {"kind": "poisson", "rate": float(self.rate)}


@checked()
@dataclasses.dataclass(frozen=True)
class FixedSize(Sampling):
    """`size` clients, uniformly without replacement."""

    size: int

    def expected(self, clients: int) -> float:
        """Number of participants."""
        check_count("size", self.size, most=clients)
        return float(self.size)

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Draw who takes part."""
        del index
        return permutation(key, clients) < self.size

    def beside(
        self, key: Key[Array, ""], clients: int, number: int, index: Int[Array, ""] | int
    ) -> tuple[Bool[Array, "K"], Float[Array, "#K"]]:
        """By coins of the same rate; the others' cohort is unaffected."""
        return Poisson(self.size / clients).beside(key, clients, number, index)

    def view(self, noise: SumNoise) -> View:
        """Gaussians, and amplification under replace-one where clients keep no state."""
        return _cohort_view(noise, self.size)

    def describe(self) -> dict[str, Any]:
        """Kind and size."""
        return {"kind": "fixed size", "size": self.size}

    def assumed(self, stateful: bool) -> list[str]:
        """That clients keep no state."""
        if stateful:
            return []
        return [
            "clients keep no state from one round to the next, where sampling without replacement amplifies"
        ]


@dataclasses.dataclass(frozen=True)
class Full(Sampling):
    """Every client takes part in every round."""

    def expected(self, clients: int) -> float:
        """Number of participants."""
        return float(clients)

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """All take part."""
        del key, index
        return jnp.ones(clients, bool)

    def view(self, noise: SumNoise) -> View:
        """Gaussians."""
        return _cohort_view(noise, noise.clients)

    def describe(self) -> dict[str, Any]:
        """Kind."""
        return {"kind": "full"}


@checked(rate=check_fraction, groups=check_count)
@dataclasses.dataclass(frozen=True)
class CyclicPoisson(Sampling):
    """Round t belongs to group t mod b: each of its clients takes part independently with probability `rate` times b.

    A public permutation splits the clients into b groups of about equal size. A client's rounds are at least b apart,
    as amplification of correlated noise with up to b bands requires.

    Args:
        rate: participation probability, averaged over rounds; at most 1 / b.
        groups: b.
    """

    rate: float
    groups: int

    def __post_init__(self) -> None:
        if not traced(self.rate) and self.rate * self.groups > 1 + 1e-9:
            raise ValueError(
                f"rate={self.rate!r}, groups={self.groups!r}: give a rate of at most {1 / self.groups}"
            )

    @property
    def turn_rate(self) -> float:
        """Probability of taking part in a round of the client's group."""
        return min(self.rate * self.groups, 1.0)

    def expected(self, clients: int) -> float:
        """Mean number of participants."""
        return self.rate * clients

    def usual(self, clients: int) -> float:
        """Six standard deviations above the mean."""
        return Poisson(self.rate).usual(clients)

    def most(self, clients: int) -> int:
        """The largest group."""
        return -(-clients // self.groups)

    @property
    def fixed(self) -> bool:
        """Numbers vary."""
        return False

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Draw from the round's group."""
        return coins(key, clients, self.turn_rate) & (
            jnp.asarray(_groups(clients, self.groups)) == index % self.groups
        )

    @property
    def gap(self) -> int:
        """The number of groups."""
        return self.groups

    def possible(self, clients: int, rounds: int) -> Bool[np.ndarray, "T C"]:
        """Each client in the rounds of its group."""
        return np.asarray(self.turns(clients, rounds))

    def turns(self, clients: int, rounds: int) -> Bool[Any, "T C"]:
        """Return the rounds of groups that take turns."""
        return Turns(clients, rounds, self.groups)

    def beside(
        self, key: Key[Array, ""], clients: int, number: int, index: Int[Array, ""] | int
    ) -> tuple[Bool[Array, "K"], Float[Array, "#K"]]:
        """Grouped likewise."""
        turn = jnp.asarray(_groups(number, self.groups)) == index % self.groups
        return coins(key, number, self.turn_rate) & turn, jnp.where(turn, self.turn_rate, 0.0)

    def view(self, noise: SumNoise) -> View:
        """As Poisson sampling at `turn_rate` in every b-th round, with the least noise of b rounds."""
        whole = _cohort_view(noise, noise.clients // self.groups)._replace(amplified=None)
        return _by_turn(
            _sampled_view(noise, self.turn_rate) if self.turn_rate < 1 else whole, self.groups
        )

    def describe(self) -> dict[str, Any]:
        """Kind, rate and groups."""
        return {"kind": "cyclic poisson", "rate": float(self.rate), "groups": self.groups}


@checked(size=check_count, separation=check_count)
@dataclasses.dataclass(frozen=True)
class MinSeparation(Sampling):
    """`size` clients of group t mod b, uniformly without replacement: a client's rounds are at least b apart.

    No guarantee relies on random cohorts: no amplification, and cohorts may be known. For correlated noise in
    deployments that cannot do Poisson sampling.

    Args:
        size: of a cohort; at most a group's.
        separation: b, the number of groups, formed by a public permutation of the clients.
    """

    size: int
    separation: int

    def expected(self, clients: int) -> float:
        """Number of participants."""
        most = clients // self.separation
        if self.size > most:
            raise ValueError(
                f"size must be at most {most}, the clients in each of {self.separation} groups of {clients} clients, "
                f"got {self.size}. Give a smaller size or separation."
            )
        return float(self.size)

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Draw from the round's group."""
        outside = jnp.asarray(_groups(clients, self.separation)) != index % self.separation
        places = permutation(key, clients) if key.ndim else jax.random.uniform(key, (clients,))
        order = jnp.argsort(jnp.where(outside, clients, places))
        return jnp.zeros(clients, bool).at[order[: self.size]].set(True)

    @property
    def gap(self) -> int:
        """The number of groups."""
        return self.separation

    def possible(self, clients: int, rounds: int) -> Bool[np.ndarray, "T C"]:
        """Each client in the rounds of its group."""
        return np.asarray(self.turns(clients, rounds))

    def turns(self, clients: int, rounds: int) -> Bool[Any, "T C"]:
        """Return the rounds of groups that take turns."""
        return Turns(clients, rounds, self.separation)

    def beside(
        self, key: Key[Array, ""], clients: int, number: int, index: Int[Array, ""] | int
    ) -> tuple[Bool[Array, "K"], Float[Array, "#K"]]:
        """Grouped likewise, by coins of the same rate."""
        return CyclicPoisson(self.size / clients, self.separation).beside(
            key, clients, number, index
        )

    def view(self, noise: SumNoise) -> View:
        """Gaussians, in every b-th round, with the least noise of b rounds."""
        return _by_turn(_cohort_view(noise, self.size)._replace(amplified=None), self.separation)

    def describe(self) -> dict[str, Any]:
        """Kind, size and separation."""
        return {"kind": "minimum separation", "size": self.size, "separation": self.separation}


MOST_BINS = 2**16
"""Of `BallsInBins`: products of two remainders then fit in 32 bits."""


@checked(bins=functools.partial(check_count, most=MOST_BINS))
@dataclasses.dataclass(frozen=True)
class BallsInBins(Sampling):
    """In each epoch of b rounds every client takes part once, in a uniformly drawn round.

    Args:
        bins: b, the rounds of an epoch.
    """

    bins: int

    def expected(self, clients: int) -> float:
        """Mean number of participants."""
        return clients / self.bins

    def usual(self, clients: int) -> float:
        """Six standard deviations above the mean."""
        return Poisson(1 / self.bins).usual(clients)

    def most(self, clients: int) -> int:
        """All of them."""
        return clients

    @property
    def fixed(self) -> bool:
        """With one bin only."""
        return self.bins == 1

    @property
    def period(self) -> int:
        """An epoch."""
        return self.bins

    def sample(
        self, key: Key[Array, "*S"], clients: int, index: Int[Array, ""] | int
    ) -> Bool[Array, "C"]:
        """Clients whose bin is the round; uniform to 2^-64."""
        bits = random_bits(key, (clients, 2))
        high = jnp.asarray(2**32 % self.bins, jnp.uint32)
        # (2^32 a + b) mod bins, in 32 bits.
        mixed = (bits[:, 0] % self.bins) * high % self.bins + bits[:, 1] % self.bins
        return mixed % self.bins == jnp.asarray(index % self.bins, jnp.uint32)

    def view(self, noise: SumNoise) -> View:
        """One Gaussian per epoch, amplified where sums hide the cohorts."""
        view = _by_turn(_cohort_view(noise, 1)._replace(amplified=None), self.bins)
        sampled = _sampled_view(noise, 1 / self.bins)
        if noise.replaced or not sampled.hidden.all():
            return view
        amplified = Amplified(
            multiplier=view.multiplier.min(axis=1),
            divergences=functools.partial(accountants.balls_in_bins, bins=self.bins),
            theorem=f"Gaussian in one of {self.bins} rounds, balls in bins, {noise.adjacency}",
        )
        return view._replace(amplified=amplified)

    def describe(self) -> dict[str, Any]:
        """Kind and bins."""
        return {"kind": "balls in bins", "bins": self.bins}


@functools.cache
def _groups(clients: int, groups: int) -> Int[np.ndarray, "C"]:
    """Each client's group, by a public permutation of the clients."""
    return np.random.default_rng(0).permutation(clients).astype(np.int32) % groups


class Turns:
    """Who can take part, [T, C], if groups of clients take turns: a table that exists only where somebody reads it.

    The accounting of a plan needs no more than the rounds of the client that is most exposed, those of the first group.

    Args:
        clients: C.
        rounds: T.
        gap: b, the number of groups; with `most`, only the fewest rounds from one participation to the next.
        most: the most rounds of a client, any that keep the gap; None: the client's own group says which.
    """

    def __init__(self, clients: int, rounds: int, gap: int, most: int | None = None) -> None:
        self.shape = (rounds, clients)
        self.dtype = np.dtype(bool)
        self.gap = gap
        self.known = most is None
        """Whether a client's rounds are known, not only their number and gap."""
        self.most = -(-rounds // gap) if most is None else min(most, -(-rounds // gap))
        """k, the most rounds of a client."""

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Lay the table out."""
        if not self.known:
            raise ValueError(
                "participations and separation must be None for a mechanism whose `view` reads who took part, since "
                "limits leave that open. Leave them out."
            )
        rounds, clients = self.shape
        return _groups(clients, self.gap) == np.arange(rounds)[:, None] % self.gap


@dataclasses.dataclass(frozen=True)
class Limited(Sampling):
    r"""Cohorts, in a plan, of a server that limits how often, and how soon again, a client takes part.

    Every participation counts in full, since a limit makes a client's coins depend on one another, which no theorem of
    amplification covers. With at most k participations, each at least b rounds after the last, independent noise is
    one Gaussian of multiplier :math:`(\sum_j z_j^{-2})^{-1/2}` over the k least :math:`z_j` among successive blocks of
    b rounds, each with its least noise: a block holds one participation at most.

    Args:
        sampling: the sampler that the server restrains.
        participations: k; None: as many as fit.
        separation: b.
    """

    sampling: Sampling
    participations: int | None
    separation: int

    def expected(self, clients: int) -> float:
        """Mean number of participants, by the sampler."""
        return self.sampling.expected(clients)

    @property
    def gap(self) -> int:
        """Fewest rounds from one participation of a client to its next."""
        return self.separation

    def turns(self, clients: int, rounds: int) -> Bool[Any, "T C"]:
        """Return what is known of a client's rounds: their number and gap."""
        return Turns(
            clients,
            rounds,
            self.separation,
            rounds if self.participations is None else self.participations,
        )

    def view(self, noise: SumNoise) -> View:
        """Gaussians: the least noise of each block of b rounds, and of these the k least."""
        view = _by_turn(_cohort_view(noise, 1)._replace(amplified=None), self.separation)
        if self.participations is None or self.participations >= len(view.multiplier):
            return view
        least = np.sort(view.multiplier, axis=0)[: self.participations]
        return view._replace(multiplier=least, hidden=view.hidden[: self.participations])


def limited(
    sampling: Sampling, rounds: int, participations: int | None, separation: int | None
) -> Sampling:
    """Return the sampler under limits; itself if it keeps them anyway."""
    gap = max(sampling.gap, separation or 1)
    free = participations is None or participations >= -(-rounds // gap)
    return sampling if free and gap == sampling.gap else Limited(sampling, participations, gap)


def _by_turn(view: View, length: int) -> View:
    """View of a client with at most one round in every `length`: the least noise of those rounds."""
    padded = -len(view.multiplier) % length
    multiplier = np.pad(view.multiplier, ((0, padded), (0, 0)), constant_values=math.inf)
    multiplier = multiplier.reshape(-1, length, multiplier.shape[1]).min(axis=1)
    hidden = np.pad(view.hidden, (0, padded), constant_values=True).reshape(-1, length)
    return view._replace(
        multiplier=multiplier, hidden=np.logical_and.reduce(hidden, axis=1), grows=True, turn=length
    )


def _sampled_view(noise: SumNoise, rate: float) -> View:
    """Poisson-sampled Gaussians where the sum hides the cohort; elsewhere the server's noise and the client's own."""
    least = np.maximum(noise.above, noise.clients_add)
    steady = _most(noise.clients_add, noise.clients, noise.clients) <= noise.floor * (1 + ROUNDING)
    hidden = steady & (least.min(axis=1) > 0) & noise.hides_cohort
    theorem = f"Poisson-sampled Gaussian, rate {rate:g}, {noise.adjacency}"
    silent = "no noise on the sum"
    if not hidden.all():
        why = (
            "the clients' noise can exceed the floor"
            if noise.hides_cohort
            else "the denominator shows the cohort"
        )
        rest = f"; {theorem} in {int(hidden.sum())} other rounds" if hidden.any() else ""
        theorem = f"Gaussian without amplification, {noise.adjacency}, because {why}{rest}"
        silent = "no noise on the sum: under Poisson sampling a client can count only on the server's and its own"
    return View(
        multiplier(least, noise.weights), hidden, float(rate), theorem, silent, noise.replaced
    )


def _cohort_view(noise: SumNoise, size: int) -> View:
    """Gaussians under a fixed cohort size: a client counts on the least noise of a cohort."""
    clients, adds, others = noise.clients, noise.clients_add, noise.clients - noise.insider
    least = np.maximum(noise.above, _least(adds, max(size - noise.insider, 1), clients))
    view = plain_view(multiplier(least, noise.weights), f"Gaussian, {noise.adjacency}")
    view = view._replace(replaced=noise.replaced)
    hides = noise.hides_cohort or bool(np.all(noise.weights == noise.weights[:, :1]))
    steady = _most(adds, size, clients) <= noise.floor * (1 + ROUNDING)
    even = adds.max(axis=1) <= adds.min(axis=1) * (1 + ROUNDING)
    if size < others and hides and np.all((steady | even) & (least.min(axis=1) > 0)):
        amplified = Amplified(
            multiplier=np.sqrt(least.min(axis=1)) / (2 * noise.weights.max(axis=1)),
            divergences=functools.partial(
                accountants.without_replacement, clients=others, size=size
            ),
            theorem="sampling without replacement, replace-one",
            stateless=True,
        )
        return view._replace(amplified=amplified)
    return view


def _least(noise: np.ndarray, company: int, clients: int) -> np.ndarray:
    """The least total noise of a cohort of `company` clients that contains client i."""
    if noise.shape[1] == 1:
        return noise * min(company, clients)
    ordered = np.sort(noise, axis=1)
    return ordered[:, : company - 1].sum(axis=1, keepdims=True) + np.maximum(
        noise, ordered[:, company - 1 : company]
    )


def _most(noise: np.ndarray, company: int, clients: int) -> np.ndarray:
    """The most total noise of a cohort of `company` clients."""
    if noise.shape[1] == 1:
        return noise[:, 0] * min(company, clients)
    return np.sort(noise, axis=1)[:, -company:].sum(axis=1)
