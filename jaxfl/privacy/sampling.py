"""Who takes part in a round, and how much hiding it amplifies: the sampler and its amplification in one place."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Key

from jaxfl._validate import check_count, check_fraction, checked, traced
from jaxfl.privacy.noise import random_bits
from jaxfl.privacy.observers import ROUNDING, SumNoise, View, multiplier, plain_view
from jaxfl.types import Number


def coins(key: Key[Array, "*S"], count: int, rate: Number) -> Bool[Array, "{count}"]:
    """Independent coins of 64 bits that show True with probability `rate`, rounded down to a multiple of 2^-64."""
    if not traced(rate) and rate == 1:
        return jnp.ones(count, bool)
    bits = random_bits(key, (count, 2))
    high, low = _threshold(rate)
    return (bits[:, 0] < high) | ((bits[:, 0] == high) & (bits[:, 1] < low))


def _threshold(rate: Number) -> tuple[Any, Any]:
    """A rate under 1 times 2^64, rounded down, in two words; of a sweep's rate, the next float below it."""
    if traced(rate):
        scaled = jnp.nextafter(jnp.asarray(rate, jnp.float32), jnp.float32(0)) * 2.0**32
        high = jnp.floor(scaled)
        return high.astype(jnp.uint32), ((scaled - high) * 2.0**32).astype(jnp.uint32)
    high, low = divmod(int(float(rate) * 2.0**64), 2**32)
    return np.uint32(high), np.uint32(low)


class Sampling:
    """Who takes part in a round. A sampler is drawn, and accounted for, by its own methods alone."""

    def expected(self, clients: int) -> float:
        """Mean number of participants."""
        raise NotImplementedError

    def usual(self, clients: int) -> float:
        """A number of participants that is hardly ever exceeded."""
        return self.expected(clients)

    def most(self, clients: int) -> int:
        """The largest number of participants."""
        return math.ceil(self.expected(clients))

    @property
    def fixed(self) -> bool:
        """Whether the number of participants is the same in all rounds."""
        return True

    def sample(self, key: Key[Array, ""], clients: int) -> Bool[Array, "C"]:
        """Draw who takes part."""
        raise NotImplementedError

    def view(self, noise: SumNoise) -> View:
        """What sums with this noise show to who does not know the cohorts."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """The sampler in a privacy statement."""
        raise NotImplementedError

    def assumed(self, stateful: bool) -> list[str]:
        """What the amplification rests on besides the theorem."""
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

    def sample(self, key: Key[Array, ""], clients: int) -> Bool[Array, "C"]:
        """Draw who takes part; client i's coin depends on the key and on i alone."""
        return coins(key, clients, self.rate)

    def view(self, noise: SumNoise) -> View:
        """Sampled Gaussians where the sum hides the cohort; elsewhere a client counts on the floor and its own noise.

        Amplification needs noise that is the same whatever the cohort: where the clients' noise can exceed the floor,
        the variance of the sum tells who took part, and the round counts in full.
        """
        if self.rate == 1:
            return _cohort_view(noise, noise.clients)
        least = np.maximum(noise.above, noise.clients_add)
        steady = _most(noise.clients_add, noise.clients, noise.clients) <= noise.floor * (1 + ROUNDING)
        hidden = steady & (least.min(axis=1) > 0) & noise.hides_cohort
        theorem = f"Poisson-sampled Gaussian, rate {self.rate:g}, {noise.adjacency}"
        silent = "no noise on the sum"
        if not hidden.all():
            why = (
                "the clients' noise can exceed the floor" if noise.hides_cohort else "the denominator shows the cohort"
            )
            rest = f"; {theorem} in {int(hidden.sum())} other rounds" if hidden.any() else ""
            theorem = f"Gaussian without amplification, {noise.adjacency}, because {why}{rest}"
            silent = "no noise on the sum: under Poisson sampling a client can count only on the server's and its own"
        return View(multiplier(least, noise.weights), hidden, float(self.rate), theorem, silent, noise.replaced)

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

    def sample(self, key: Key[Array, ""], clients: int) -> Bool[Array, "C"]:
        """Draw who takes part."""
        rank = jax.random.permutation(key, clients)
        return rank < self.size

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
        return ["clients keep no state from one round to the next, where sampling without replacement amplifies"]


@dataclasses.dataclass(frozen=True)
class Full(Sampling):
    """Every client takes part in every round."""

    def expected(self, clients: int) -> float:
        """Number of participants."""
        return float(clients)

    def sample(self, key: Key[Array, ""], clients: int) -> Bool[Array, "C"]:
        """All take part."""
        del key
        return jnp.ones(clients, bool)

    def view(self, noise: SumNoise) -> View:
        """Gaussians."""
        return _cohort_view(noise, noise.clients)

    def describe(self) -> dict[str, Any]:
        """Kind."""
        return {"kind": "full"}


def _cohort_view(noise: SumNoise, size: int) -> View:
    """Gaussians where cohorts have a fixed size: a client counts on the least noise that such a cohort adds."""
    clients, adds, others = noise.clients, noise.clients_add, noise.clients - noise.insider
    least = np.maximum(noise.above, _least(adds, max(size - noise.insider, 1), clients))
    view = plain_view(multiplier(least, noise.weights), f"Gaussian, {noise.adjacency}")
    view = view._replace(replaced=noise.replaced)
    hides = noise.hides_cohort or bool(np.all(noise.weights == noise.weights[:, :1]))
    steady = _most(adds, size, clients) <= noise.floor * (1 + ROUNDING)
    even = adds.max(axis=1) <= adds.min(axis=1) * (1 + ROUNDING)
    if size < others and hides and np.all((steady | even) & (least.min(axis=1) > 0)):
        swapped = np.sqrt(least.min(axis=1)) / (2 * noise.weights.max(axis=1))
        return view._replace(swapped=swapped, cohort=(others, size))
    return view


def _least(noise: np.ndarray, company: int, clients: int) -> np.ndarray:
    """The least total noise of a cohort of `company` clients that contains client i."""
    if noise.shape[1] == 1:
        return noise * min(company, clients)
    ordered = np.sort(noise, axis=1)
    return ordered[:, : company - 1].sum(axis=1, keepdims=True) + np.maximum(noise, ordered[:, company - 1 : company])


def _most(noise: np.ndarray, company: int, clients: int) -> np.ndarray:
    """The most total noise of a cohort of `company` clients."""
    if noise.shape[1] == 1:
        return noise[:, 0] * min(company, clients)
    return np.sort(noise, axis=1)[:, -company:].sum(axis=1)
