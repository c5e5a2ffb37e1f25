r"""Budgets by round and by client (ADP-PFL, eq. 9-12), and the noise that follows from them.

Budgets that add up to epsilon are only the *shape* of a schedule. The noise multiplier of round t
is :math:`z_t = \kappa / \epsilon^t`, and an accountant finds kappa.
"""

import functools
import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxfl._support.checks import at_least_0, check_delta, check_fraction, check_numbers, checked
from jaxfl._support.lazy import dp_accounting
from jaxfl.privacy.accounting.accountants import Accountant, failure_probability
from jaxfl.privacy.accounting.calibration import calibrate
from jaxfl.privacy.accounting.observers import ROUNDING
from jaxfl.privacy.sampling import Sampling


@checked()
def fixed_budgets(epsilon: float, rounds: int) -> Float[np.ndarray, "T"]:
    r"""Return equal budgets: :math:`\epsilon^t = \epsilon / T`.

    Args:
        epsilon: Sum of all budgets.
        rounds: T, the number of rounds.

    >>> fixed_budgets(1.0, 4).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    return round_budgets(epsilon, rounds, beta=0.0)


@checked(beta=at_least_0)
def round_budgets(
    epsilon: float, rounds: int, *, beta: float = 1.0, form: Literal["exact", "printed"] = "exact"
) -> Float[np.ndarray, "T"]:
    r"""Return a budget for each round, which is a share of the remainder.

    In the exact form, budgets grow with the rounds if beta is above 0, and are equal otherwise.

    .. math::
        \epsilon_r = \epsilon - \sum_{s < t} \epsilon^s, \quad
        \alpha_t = -\beta \left(1 - (t/T)^2\right) \; (10), \quad
        \epsilon^t = e^{\alpha_t} \frac{\epsilon_r}{T - t + 1}

    Args:
        epsilon: Sum of all budgets in the exact form.
        rounds: T, the number of rounds.
        beta: :math:`\beta`, how far early rounds stay below an even share. 0 gives even shares.
        form: "exact" is the form above. "printed" multiplies by t, as (11) does. It breaks the cap
            (9), and asks for T times the remainder in the last round. The remainder, and so a
            later budget, may be negative.

    Deviations from the paper: The factor t of (11) is left out. The budgets then add up to epsilon
        exactly, because the last round takes the remainder (:math:`\alpha_T = 0`).

    >>> round_budgets(1.0, 4).round(6).tolist()
    [0.097901, 0.14204, 0.245365, 0.514693]
    """
    left = epsilon
    budgets = []
    for t in range(1, rounds + 1):
        # The cap (9) is an even share of the remainder.
        cap = left / (rounds - t + 1)
        budget = math.exp(-beta * (1 - (t / rounds) ** 2)) * cap
        if form == "printed":
            # (11) has this factor, which may break the cap.
            budget *= t
        budgets.append(budget)
        left -= budget
    return np.array(budgets)


def client_shares(risks: Float[Array | np.ndarray, "C"]) -> Float[Array, "C"]:
    r"""Return each client's share of the round's budget.

    The share is :math:`\epsilon_i^t / \epsilon^t = \min_j R_j / R_i` (12).

    Args:
        risks: Risk of each client, above 0. 0 marks an unknown risk, and gives a share of 1.

    >>> client_shares(jnp.array([1.0, 2.0, 4.0, 0.0]))
    Array([1.  , 0.5 , 0.25, 1.  ], dtype=float32)
    """
    known = risks > 0
    least = jnp.min(jnp.where(known, risks, jnp.inf))
    # `where` computes both branches, so unknown risks divide by 1 and not by 0.
    return jnp.where(known, least / jnp.where(known, risks, 1.0), 1.0)


@checked(budgets=check_numbers, delta=check_delta)
def round_noise(
    budgets: Float[np.ndarray, "T"],
    epsilon: float,
    *,
    clients: int,
    sampling: Sampling,
    delta: float | None = None,
    accountant: Accountant = "pld",
    stateful: bool = False,
) -> tuple[float, ...]:
    r"""Return each round's noise multiplier :math:`z_t = \kappa / \epsilon^t` that spends epsilon.

    The multiplier is the std of the noise on the sum, over the clip bound. Kappa is the least
    number for which the epsilon of one client against an observer of sums is at most `epsilon`.

    Args:
        budgets: Budget of each round, above 0. Only their ratios count.
        epsilon: Target for the whole run under zero-out adjacency, from 1e-8 to 1e5.
        clients: Number of clients.
        sampling: Rule that draws the participants of each round.
        delta: Failure probability. None stands for min(1e-5, 1 / (10 clients)).
        accountant: "pld", or "rdp", which needs more noise.
        stateful: Whether clients keep a state (see `epsilon`).

    Raises:
        ValueError: A budget is not above 0, or no noise reaches `epsilon` by this accountant.

    >>> from jaxfl.privacy import Full
    >>> noise = round_noise(fixed_budgets(1.0, 100), 1.0, clients=9, sampling=Full())
    >>> round(noise[0], 1), round(noise[99], 1)
    (37.3, 37.3)
    """
    shape = 1 / budgets
    # Kappa is the factor on this shape that calibration finds.
    kappa = calibrate(
        epsilon,
        clients=clients,
        rounds=len(shape),
        sampling=sampling,
        delta=delta,
        accountant=accountant,
        shape=shape,
        stateful=stateful,
    )
    return tuple((kappa * shape).tolist())


class ClientNoise(NamedTuple):
    """Noise on updates and on released numbers, and the bound at which a filter stops clients."""

    noise: tuple[float, ...]
    """Std over the clip bound by round, for a client with the full budget of the round."""
    least_total: float
    """`least_total` of `jaxfl.privacy.PrivacyFilter`.

    It is the least multiplier of all messages of a client together, as one Gaussian.
    """
    release_noise: float
    """Std over the range of the released number, or 0 if none is released."""


@checked(
    budgets=check_numbers,
    participation=check_fraction,
    release_share=functools.partial(check_fraction, zero=True, one=False),
    delta=check_delta,
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
    r"""Return clients' noise :math:`s_t = \kappa / \epsilon^t`, and the bound of an upload filter.

    The noise is planned for clients that participate in a share of the rounds with their full
    budget. With m the multiplier of one Gaussian that costs epsilon, a the share for releases, and
    r the noise on a released number over its range,

    .. math:: \pi \sum_t (2 / s_t)^2 = (1 - a) / m^2, \qquad \pi T / r^2 = a / m^2.

    The filter stops more frequent participants once they have spent epsilon, not before. A small
    epsilon drowns released numbers in noise: at 1, with a tenth of the cost over ten releases, r is
    37.

    Args:
        budgets: Budget of each round. Only their ratios count.
        epsilon: Target for the run of any client against the upload observer, under replace-one
            adjacency.
        participation: :math:`\pi`, the share of rounds to plan for. 1 means that no client is ever
            stopped.
        release_share: a, the share of the cost that goes to released numbers. 0 means that none are
            released.
        clients: Number of clients, for the default delta. None suits up to 10,000 clients.
        delta: Failure probability. None stands for min(1e-5, 1 / (10 clients)).
        accountant: "pld", or "rdp", which needs more noise.

    >>> plan = client_noise(fixed_budgets(1.0, 100), 1.0, participation=1.0)
    >>> round(plan.noise[0], 1), round(plan.least_total, 2)
    (74.6, 3.73)
    """
    delta = failure_probability(delta, clients)
    least_total = calibrate(epsilon, clients=1, rounds=1, delta=delta, accountant=accountant)
    # The filter rounds too, so the plan leaves it room.
    planned = least_total * math.sqrt(participation * (1 + 2 * ROUNDING))
    # These are the two equations of the docstring, solved for kappa and for r.
    kappa = 2 * planned * math.sqrt(np.sum(budgets**2) / (1 - release_share))
    release_noise = 0.0
    if release_share:
        release_noise = planned * math.sqrt(len(budgets) / release_share)
    return ClientNoise(tuple((kappa / budgets).tolist()), least_total, release_noise)


@checked(
    budgets=check_numbers,
    delta=check_delta,
    sparsity=functools.partial(check_fraction, zero=True, one=False),
)
def paper_noise(
    budgets: Float[np.ndarray, "T"],
    *,
    delta: float = 1e-5,
    rule: Literal["classic", "analytic"] = "classic",
    sparsity: float = 0.0,
) -> Float[np.ndarray, "T"]:
    r"""Return the noise (std over the sensitivity) by a published rule for single rounds.

    Args:
        budgets: Epsilon of each round, above 0.
        delta: Failure probability of each round.
        rule: "classic" is :math:`\sqrt{2 \ln(1.25 / \delta)} / \epsilon`, which is proven for an
            epsilon below 1, and invalid from an epsilon of about 8.4 (at delta 1e-5). "analytic" is
            the least noise that gives a Gaussian mechanism this epsilon.
        sparsity: p, the share of coordinates that a mask drops, for :math:`\sqrt{1 - p}` of the
            noise (ADP-PFL, theorem 2). 0 gives all of the noise.

    Guarantee: None for more than one round, and none with `sparsity`. Masks of neighbouring data
        keep other coordinates, so that the sensitivity does not shrink. Published claims use the
        noise for many rounds and with masks all the same.

    >>> paper_noise(np.array([0.5, 1.0])).round(3).tolist()
    [9.69, 4.845]
    """
    if rule == "classic":
        noise = math.sqrt(2 * math.log(1.25 / delta)) / budgets
    else:
        exact = dp_accounting.get_sigma_gaussian
        noise = np.array([exact(float(budget), delta) for budget in budgets])
    return math.sqrt(1 - sparsity) * noise
