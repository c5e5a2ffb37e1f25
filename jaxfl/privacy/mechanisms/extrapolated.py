"""The noise of a deployment's larger population, added to a simulation of fewer clients."""

import dataclasses
import math

import numpy as np
from jax import Array
from jaxtyping import Int, Key

from jaxfl._support.checks import check_count, check_delta, checked
from jaxfl.privacy.accounting import accountants
from jaxfl.privacy.mechanisms.gaussian import FIELDS, Cohort, Mechanism
from jaxfl.types import Ledger, Tree


@checked(**FIELDS, cohort=check_count, population=check_count, delta=check_delta)
@dataclasses.dataclass(frozen=True, eq=False)
class Extrapolated(Mechanism):
    r"""Noise of a mean over a deployment's larger cohort, drawn on the mean of the simulated one.

    .. math::
        \text{std of the mean} = \frac{z C}{m'}, \qquad
        \text{so the sum of } m \text{ has } z \frac{m}{m'}

    Here m is the expected cohort of this run. The accuracy predicts that of a deployment with
    similar clients and equally faint noise on its mean.

    Args:
        noise_multiplier: z of the deployment.
        cohort: m', the expected number of participants of a round of the deployment.
        population: Number of clients of the deployment.
        delta: Failure probability of the deployment. None stands for min(1e-5, 1 / (10
            population)).

    All other arguments are those of `Mechanism`.

    Raises:
        ValueError: The cohort exceeds the population, clients add noise, or noise is 'grid'.

    Guarantee: The guarantee of this run's multiplier :math:`z m / m'`, which is weak. The statement
        lists the epsilon of the deployment, by Poisson sampling at rate m' over the population, as
        that of another run.
    References: The practice of pfl-research (Granqvist et al. 2024, arXiv:2404.06430) and of
        McMahan et al. 2018.
    """

    cohort: int = 1000
    population: int = 1_000_000
    delta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cohort > self.population or self.clients_noisy or self.noise == "grid":
            raise ValueError(
                "cohort must be at most population, client_noise 0 and noise 'float', got "
                f"cohort={self.cohort!r}, population={self.population!r}, "
                f"client_noise={self.client_noise!r}, noise={self.noise!r}. "
                "Give a cohort of at most the population, and let the server add the noise."
            )

    def draw(
        self, key: Key[Array, "*S"], memory: Tree, index: Int[Array, ""], clients: int
    ) -> Cohort:
        """Draw the cohort, and return it with the round's multiplier scaled by m / m'."""
        drawn = super().draw(key, memory, index, clients)
        scaled = drawn.numbers.noise_multiplier * self._share(clients)
        return drawn._replace(numbers=drawn.numbers._replace(noise_multiplier=scaled))

    def planned(self, clients: int, rounds: int) -> Ledger:
        """Return the planned ledger, with noise scaled by m / m'."""
        plan = super().planned(clients, rounds)
        share = self._share(clients)
        scaled = plan.noise_multiplier * share
        return plan._replace(noise_multiplier=scaled, server_noise=plan.server_noise * share)

    def describe(self, ledger: Ledger) -> list[str]:
        """Return a sentence with the deployment's epsilon, or none for an empty ledger."""
        rounds, clients = np.shape(ledger.participants)
        if not rounds:
            return []
        # The ledger has the noise of this run. The deployment has it before scaling.
        levels = np.asarray(ledger.noise_multiplier, np.float64) / self._share(clients)
        delta = accountants.failure_probability(self.delta, self.population)
        rate = self.cohort / self.population
        value = math.inf
        # A single round without noise leaves no finite epsilon.
        if np.all(levels):
            value = accountants.pld_epsilon(math.inf, accountants.round_down(levels), rate, delta)
        return [
            f"extrapolated, not of this run: epsilon {value:.4g} (delta {delta:.2g}, PLD) in a "
            f"population of {self.population} with cohorts of {self.cohort} and noise multiplier "
            f"{levels.min():.4g}"
        ]

    def _share(self, clients: int) -> float:
        return self.sampling.expected(clients) / self.cohort
