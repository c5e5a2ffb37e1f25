r"""Budgets by round and by client (ADP-PFL, eq. 9-12), and the noise that follows from them.

Budgets that add up to epsilon are only the *shape* of a schedule: the Gaussian noise of round t is
:math:`z_t = \kappa / \epsilon^t`, and an accountant finds kappa.
"""

import functools
import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxfl._validate import at_least_0, check_fraction, check_numbers, checked, probability
from jaxfl.lazy import dp_accounting
from jaxfl.privacy.accountants import Accountant, failure_probability
from jaxfl.privacy.accounting import calibrate
from jaxfl.privacy.observers import ROUNDING
from jaxfl.privacy.sampling import Sampling


@checked()
def fixed_budgets(epsilon: float, rounds: int) -> Float[np.ndarray, "T"]:
    r"""Equal budgets: :math:`\epsilon^t = \epsilon / T`.

    >>> fixed_budgets(1.0, 4).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    return round_budgets(epsilon, rounds, beta=0.0)


@checked(beta=at_least_0)
def round_budgets(
    epsilon: float, rounds: int, *, beta: float = 1.0, form: Literal["exact", "printed"] = "exact"
) -> Float[np.ndarray, "T"]:
    r"""Budgets that grow with the rounds, each a share of the remainder.

    .. math::
        \epsilon_r = \epsilon - \sum_{s < t} \epsilon^s, \quad
        \alpha_t = -\beta \left(1 - (t/T)^2\right) \; (10), \quad
        \epsilon^t = e^{\alpha_t} \frac{\epsilon_r}{T - t + 1}

    Args:
        epsilon: the sum of all budgets.
        rounds: T.
        beta: how far early rounds stay below an even share; 0: even shares.
        form: "exact" as above; "printed": times t, as in (11), which breaks the cap (9) and in the last round asks for
            T times the remainder.

    Deviations from the paper: the factor t of (11) is left out. The budgets then add up to epsilon exactly, because the
        last round takes the remainder (:math:`\alpha_T = 0`).

    >>> round_budgets(1.0, 4).round(6).tolist()
    [0.097901, 0.14204, 0.245365, 0.514693]
    """
    left, budgets = epsilon, []
    for t in range(1, rounds + 1):
        cap = left / (rounds - t + 1)
        exact = math.exp(-beta * (1 - (t / rounds) ** 2)) * cap
        budgets.append(exact if form == "exact" else exact * t)
        left -= budgets[-1]
    return np.array(budgets)


def client_shares(risks: Float[Array | np.ndarray, "C"]) -> Float[Array, "C"]:
    r"""Share of the round's budget that each client gets: :math:`\epsilon_i^t / \epsilon^t = \min_j R_j / R_i` (12).

    Args:
        risks: positive; 0 if unknown, with share 1.

    >>> client_shares(jnp.array([1.0, 2.0, 4.0, 0.0]))
    Array([1.  , 0.5 , 0.25, 1.  ], dtype=float32)
    """
    known = risks > 0
    least = jnp.min(jnp.where(known, risks, jnp.inf))
    return jnp.where(known, least / jnp.where(known, risks, 1.0), 1.0)


@checked(budgets=check_numbers, delta=probability)
def round_noise(
    budgets: Float[np.ndarray, "T"],
    epsilon: float,
    *,
    clients: int,
    sampling: Sampling,
    delta: float | None = None,
    accountant: Accountant = "pld",
) -> tuple[float, ...]:
    r"""Noise multipliers :math:`z_t = \kappa / \epsilon^t` on the sum that spend epsilon (aggregate observer).

    Args:
        budgets: one per round; only their ratios count.
        epsilon: target for the whole run, zero-out.
        clients: number of clients.
        sampling: who takes part.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: "pld", or "rdp", which needs more noise.

    >>> from jaxfl.privacy import Full
    >>> noise = round_noise(fixed_budgets(1.0, 100), 1.0, clients=9, sampling=Full())
    >>> round(noise[0], 1), round(noise[99], 1)
    (37.3, 37.3)
    """
    shape = 1 / budgets
    options = {"clients": clients, "sampling": sampling, "delta": delta, "accountant": accountant}
    kappa = calibrate(epsilon, rounds=len(shape), shape=shape, **options)
    return tuple((kappa * shape).tolist())


class ClientNoise(NamedTuple):
    """Noise that clients add to updates, the filter's bound on their total, and the noise on released numbers."""

    noise: tuple[float, ...]
    """By round, std over the clip bound, for a client with the whole budget of the round."""
    least_total: float
    """See `jaxfl.privacy.PrivacyFilter`."""
    release_noise: float
    """Std over the range of the number; 0 where none is released."""


@checked(
    budgets=check_numbers,
    participation=check_fraction,
    release_share=functools.partial(check_fraction, zero=True, one=False),
    delta=probability,
)
def client_noise(
    budgets: Float[np.ndarray, "T"],
    epsilon: float,
    *,
    participation: float,
    release_share: float = 0.0,
    clients: int | None = None,
    delta: float | None = None,
    accountant: Accountant = "pld",
) -> ClientNoise:
    r"""Noise :math:`s_t = \kappa / \epsilon^t` that clients add, and a filter for the upload observer.

    It is planned for clients that participate in a share of the rounds with their whole budget: with m the multiplier
    of one Gaussian that costs epsilon, and a the share for releases,

    .. math:: \pi \sum_t (2 / s_t)^2 = (1 - a) / m^2, \qquad \pi T / r^2 = a / m^2.

    The filter stops more frequent participants once they have spent epsilon, not before. A small epsilon drowns
    released numbers: at 1, with a tenth of the cost over ten releases, r is 40.

    Args:
        budgets: one per round; only their ratios count.
        epsilon: target for the whole run of any client, replace-one, for the upload observer.
        participation: :math:`\pi`, the share of rounds to plan for; 1: no client is ever stopped.
        release_share: a, the share of the cost that goes to released numbers; 0: none are released.
        clients: their number, for the default delta; None: up to 10,000.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: "pld", or "rdp", which needs more noise.

    >>> plan = client_noise(fixed_budgets(1.0, 100), 1.0, participation=1.0)
    >>> round(plan.noise[0], 1), round(plan.least_total, 2)
    (74.6, 3.73)
    """
    delta = failure_probability(delta, clients)
    least_total = calibrate(epsilon, clients=1, rounds=1, delta=delta, accountant=accountant)
    planned = least_total * math.sqrt(participation * (1 + 2 * ROUNDING))  # the filter rounds, too
    kappa = 2 * planned * math.sqrt(np.sum(budgets**2) / (1 - release_share))
    release_noise = planned * math.sqrt(len(budgets) / release_share) if release_share else 0.0
    return ClientNoise(tuple((kappa / budgets).tolist()), least_total, release_noise)


@checked(
    budgets=check_numbers,
    delta=probability,
    sparsity=functools.partial(check_fraction, zero=True, one=False),
)
def paper_noise(
    budgets: Float[np.ndarray, "T"],
    *,
    delta: float = 1e-5,
    rule: Literal["classic", "analytic"] = "classic",
    sparsity: float = 0.0,
) -> Float[np.ndarray, "T"]:
    r"""Noise (std over the sensitivity) that a published rule gives a single round.

    Args:
        budgets: epsilon of each round, above 0.
        delta: failure probability of each round.
        rule: "classic": :math:`\sqrt{2 \ln(1.25 / \delta)} / \epsilon`, proven below 1, invalid from about 8.4 (at
            delta 1e-5); "analytic": the exact Gaussian mechanism's.
        sparsity: p, the share of coordinates that a mask drops, for :math:`\sqrt{1 - p}` of the noise (ADP-PFL,
            theorem 2); 0: all of the noise.

    Guarantee: none for more than one round, and none with `sparsity`: masks of neighbouring data keep other
        coordinates, so that the sensitivity does not shrink. Published claims rest on both.

    >>> paper_noise(np.array([0.5, 1.0])).round(3).tolist()
    [9.69, 4.845]
    """
    if rule == "classic":
        noise = math.sqrt(2 * math.log(1.25 / delta)) / budgets
    else:
        noise = np.array(
            [dp_accounting.get_sigma_gaussian(float(budget), delta) for budget in budgets]
        )
    return math.sqrt(1 - sparsity) * noise
