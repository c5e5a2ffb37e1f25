"""The noise of a larger population on a simulated one."""

import dataclasses
import math

import numpy as np
from jax import Array
from jaxtyping import Int, Key

from jaxfl._validate import check_count, checked, probability
from jaxfl.privacy import accountants
from jaxfl.privacy.mechanisms.gaussian import FIELDS, Cohort, Mechanism
from jaxfl.types import Ledger, Tree


@checked(**FIELDS, cohort=check_count, population=check_count, delta=probability)
@dataclasses.dataclass(frozen=True, eq=False)
class Extrapolated(Mechanism):
    r"""The noise that a mean over a deployment's larger cohort would have, drawn on the mean of the simulated one.

    .. math:: \text{std of the mean} = \frac{z C}{m'}, \qquad \text{so the sum of } m \text{ has } z \frac{m}{m'}

    It predicts the accuracy of a deployment with similar clients and equally faint noise.

    Args:
        noise_multiplier: z, of the deployment.
        cohort: m', expected in a round of the deployment.
        population: clients of the deployment.
        delta: of the deployment; None: min(1e-5, 1 / (10 population)).

    Guarantee: that of this run's multiplier :math:`z m / m'`, which is weak; the statement lists the deployment's
        epsilon, by Poisson sampling at rate m' over the population, as that of another run.
    Source: the practice of pfl-research (Granqvist et al. 2024, arXiv:2404.06430) and of McMahan et al. 2018.
    """

    cohort: int = 1000
    population: int = 1_000_000
    delta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cohort > self.population or self.clients_noisy or self.noise == "grid":
            raise ValueError(
                f"cohort={self.cohort!r}, population={self.population!r}, client_noise={self.client_noise!r}, "
                f"noise={self.noise!r}: give a cohort of at most the population, and the server's noise, in 'float'"
            )

    def draw(
        self, key: Key[Array, "*S"], memory: Tree, index: Int[Array, ""], clients: int
    ) -> Cohort:
        """Scale the round's multiplier."""
        drawn = super().draw(key, memory, index, clients)
        scaled = drawn.numbers.noise_multiplier * self._share(clients)
        return drawn._replace(numbers=drawn.numbers._replace(noise_multiplier=scaled))

    def planned(self, clients: int, rounds: int) -> Ledger:
        """At the scaled multiplier."""
        plan, share = super().planned(clients, rounds), self._share(clients)
        return plan._replace(
            noise_multiplier=plan.noise_multiplier * share, server_noise=plan.server_noise * share
        )

    def describe(self, ledger: Ledger) -> list[str]:
        """The deployment's epsilon."""
        rounds, clients = np.shape(ledger.participants)
        if not rounds:
            return []
        levels = np.asarray(ledger.noise_multiplier, np.float64) / self._share(clients)
        delta = accountants.failure_probability(self.delta, self.population)
        rate = self.cohort / self.population
        value = math.inf
        if np.all(levels):
            value = accountants.pld_epsilon(math.inf, accountants.round_down(levels), rate, delta)
        return [
            f"extrapolated, not of this run: epsilon {value:.4g} (delta {delta:.2g}, PLD) in a population of "
            f"{self.population} with cohorts of {self.cohort} and noise multiplier {levels.min():.4g}"
        ]

    def _share(self, clients: int) -> float:
        return self.sampling.expected(clients) / self.cohort
