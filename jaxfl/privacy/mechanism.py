"""The mechanism: clip bound, noise, weights and sampling. The only source of these numbers.

The engine draws its noise and cohorts from a `Mechanism`, and the accountant reads the ledger that the
engine writes from the same fields.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Key

from jaxfl._validate import check_choice, check_count, check_fraction, check_positive


@dataclasses.dataclass(frozen=True)
class Poisson:
    """Each client takes part independently with probability `rate`."""

    rate: float

    def __post_init__(self) -> None:
        check_fraction("rate", self.rate)

    def expected(self, clients: int) -> float:
        """Mean number of participants."""
        return self.rate * clients

    def sample(self, key: Key[Array, ""], clients: int) -> Bool[Array, "C"]:
        """Draw who takes part; client i's coin depends on the key and on i alone."""
        return jax.random.uniform(key, (clients,)) < self.rate


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """`size` clients, uniformly without replacement."""

    size: int

    def __post_init__(self) -> None:
        check_count("size", self.size)

    def expected(self, clients: int) -> float:
        """Number of participants."""
        check_count("size", self.size, most=clients)
        return float(self.size)

    def sample(self, key: Key[Array, ""], clients: int) -> Bool[Array, "C"]:
        """Draw who takes part."""
        rank = jax.random.permutation(key, clients)
        return rank < self.size


@dataclasses.dataclass(frozen=True)
class Full:
    """Every client takes part in every round."""

    def expected(self, clients: int) -> float:
        """Number of participants."""
        return float(clients)

    def sample(self, key: Key[Array, ""], clients: int) -> Bool[Array, "C"]:
        """All take part."""
        del key
        return jnp.ones(clients, bool)


Sampling = Poisson | FixedSize | Full


@dataclasses.dataclass(frozen=True, eq=False)
class Mechanism:
    r"""What leaves the clients, and how it is bounded and noised.

    In round t, with clip bound C, weights :math:`w_i \ge 0` and participants :math:`\Omega_t`:

    .. math::
        S_t = \sum_{i \in \Omega_t} w_i (\mathrm{clip}_C(\Delta_i) + N(0, s_{t,i}^2 C^2)) + N(0, D_t^2 C^2),
        \qquad
        D_t^2 = \max(0, (z_t \max_i w_i)^2 - \sum_{i \in \Omega_t} w_i^2 s_{t,i}^2)

    so the server tops the clients' noise up to the multiplier :math:`z_t`, and the aggregate is
    :math:`S_t` over the denominator.

    Args:
        clip: L2 bound C on a client's whole update; infinity: not clipped.
        noise_multiplier: z, std of the noise on the sum over `C max w`; a number or one per round `[T]`.
        client_noise: s, std of the noise each participant adds over C; a number, `[T]`, or `[T or 1, C]`.
        sampling: who takes part.
        weights: public weights `[C]`; None: all 1.
        denominator: "expected" divides by the fixed `E|cohort| * mean(w)`; "participants" by the realised
            sum of weights, which has no accounted sensitivity under Poisson sampling.
        communicates: False where nothing ever leaves a client (then epsilon is 0).
        delta: failure probability of the statement.
        claim: the epsilon that the paper's own rule would state for these numbers, and how it gets there.
        broken: why no finite epsilon exists, where a published mechanism has none.

    Guarantee: client-level privacy under zero-out adjacency; sensitivity of the sum `C max w`.
    Source: Geyer et al. 2017; McMahan et al. 2018 (arXiv:1710.06963).
    """

    clip: float = math.inf
    noise_multiplier: float | tuple[float, ...] = 0.0
    client_noise: float | np.ndarray = 0.0
    sampling: Sampling = Full()
    weights: np.ndarray | None = None
    denominator: Literal["expected", "participants"] = "expected"
    communicates: bool = True
    delta: float = 1e-5
    claim: tuple[float, str] | None = None
    broken: str | None = None
