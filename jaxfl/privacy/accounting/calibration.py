"""Noise for a target epsilon, found by bisection over an accountant's epsilon."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxfl._support.checks import (
    check_delta,
    check_fraction,
    check_numbers,
    check_positive,
    checked,
    show,
)
from jaxfl._support.lazy import dp_accounting
from jaxfl.privacy.accounting import accountants
from jaxfl.privacy.accounting.accountants import Accountant, failure_probability, least_epsilon
from jaxfl.privacy.accounting.ledgers import (
    BOTH,
    Epsilon,
    bounds_of,
    of_states,
    rounds_of_schedule,
)
from jaxfl.privacy.accounting.observers import View, plain_view
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Full, Poisson, Sampling, limited

_LEAST_BUDGET = 1e-8
"""Smallest epsilon for which noise can be calibrated."""

_MOST_BUDGET = 1e5
"""Largest epsilon for which noise can be calibrated."""


def check_budget(name: str, value: Any) -> float:
    """Require an epsilon from 1e-8 to 1e5, and return it as a float."""
    budget = check_positive(name, value)
    if _LEAST_BUDGET <= budget <= _MOST_BUDGET:
        return budget
    remedy = f"Give at least {_LEAST_BUDGET:g}."
    if budget > _MOST_BUDGET:
        remedy = f"Give at most {_MOST_BUDGET:g}. A larger epsilon protects nobody."
    raise ValueError(
        f"{name} must be from {_LEAST_BUDGET:g} to {_MOST_BUDGET:g}, got {show(value)}. {remedy}"
    )


class Exposure(NamedTuple):
    """View of a planned run, and the number of times that the run reveals it.

    The view is that of the client with the least noise in every round. If there is no such client,
    it is that of all clients.
    """

    view: View
    repeats: int

    def scaled(self, factor: float) -> "Exposure":
        """Return the exposure with `factor` times the noise."""
        return self._replace(view=self.view.scaled(factor))

    def epsilons(
        self, clients: int, delta: float, by: Sequence[Accountant] = BOTH
    ) -> dict[Accountant, Epsilon]:
        """Return the epsilon by each accountant. Every client counts as the most exposed one."""
        columns = self.view.multiplier.shape[1]
        found = bounds_of([self.view], by, delta, columns, self.repeats)
        return {
            accountant: worst._replace(per_client=np.broadcast_to(worst.value, clients))
            for accountant, worst in found.items()
        }


def planned_exposure(
    mechanism: Mechanism,
    clients: int,
    rounds: int,
    *,
    participations: int | None = None,
    separation: int | None = None,
    stateful: bool = False,
) -> Exposure:
    """Return what a planned run reveals of its most exposed client to an observer of sums.

    Equal rounds are accounted for once, so that many clients and rounds cost no memory. They do if
    noise or weights follow a schedule, or if noise is correlated.

    Args:
        mechanism: Mechanism with its noise and its sampler.
        clients: Number of clients.
        rounds: T, the number of rounds.
        participations: Most rounds of a client, as a server enforces it. None leaves it to the
            sampler.
        separation: Fewest rounds from one participation of a client to its next, as a server
            enforces it. None leaves it to the sampler.
        stateful: Whether clients keep a state (see `epsilon`).
    """
    sampling = limited(mechanism.sampling, rounds, participations, separation)
    mechanism = dataclasses.replace(mechanism, sampling=sampling)
    length = rounds_of_schedule(mechanism)
    if length not in (1, rounds):
        # The check raises the error that names the table.
        mechanism.check_fits(clients, rounds)
    view = mechanism.view(mechanism.planned(clients, length), "aggregate")
    # Entries that cover a turn of several rounds, or the run, need a plan of that length.
    if view.grows and length < rounds:
        length = min(view.turn or rounds, rounds)
        view = mechanism.view(mechanism.planned(clients, length), "aggregate")
    repeats = -(-rounds // length)
    # A client that takes part k times is exposed by k copies of the view at most.
    if participations is not None:
        repeats = min(repeats, participations)
    if stateful:
        view = of_states(view)
    return Exposure(accountants.worst_client(view), repeats)


@checked(epsilon=check_budget, delta=check_delta, shape=check_numbers)
def calibrate(
    epsilon: float,
    *,
    clients: int,
    rounds: int,
    sampling: Sampling = Full(),
    mechanism: Mechanism | None = None,
    delta: float | None = None,
    accountant: Accountant = "pld",
    shape: Sequence[float] | np.ndarray | None = None,
    stateful: bool = False,
    participations: int | None = None,
    separation: int | None = None,
) -> float:
    r"""Return the smallest noise multiplier z whose epsilon for sums is at most `epsilon`.

    Args:
        epsilon: Target for the run, from 1e-8 to 1e5. The result's epsilon does not exceed it, and
            falls short of it by at most 0.1% if possible.
        clients: Number of clients.
        rounds: T, the number of rounds.
        sampling: Rule that draws the participants of each round. The default draws all clients.
        mechanism: Mechanism to calibrate. Its sampler counts, and not `sampling`. Its multiplier is
            not read. None stands for the Gaussian mechanism.
        delta: Failure probability. None stands for min(1e-5, 1 / (10 clients)).
        accountant: "pld" gives the smallest valid bound (see `epsilon`). "rdp" needs more noise.
        shape: Relative noise by round `[T]`. The result is then a factor on it. None gives all
            rounds the same noise.
        stateful: Whether clients keep a state (see `epsilon`). If not, fixed-size sampling may need
            less noise.
        participations: k, the most rounds in which a client takes part, which the server of a
            deployment enforces. None allows as many as the sampler and `separation` do.
        separation: b, the fewest rounds from one participation of a client to its next, which the
            server enforces if the sampler does not. None leaves it to the sampler.

    Limits replace amplification by sampling (see `jaxfl.privacy.sampling.Limited`). With
    independent noise the run is one Gaussian of multiplier :math:`z / \sqrt{k}`. With a strategy c
    of at most b bands the multiplier is :math:`z / (\sqrt{k} \|c\|_2)`
    (`jaxfl.privacy.mechanisms.correlated`).

    Raises:
        ValueError: No noise reaches `epsilon` by this accountant, the mechanism's clients add
            noise, or its epsilon does not follow from its multiplier. Or `shape` or the mechanism's
            weights do not fit the rounds.

    >>> round(calibrate(1.0, clients=20, rounds=100), 1)
    37.3
    >>> round(calibrate(1.0, clients=20, rounds=400, participations=100), 1)
    37.3
    """
    scale = np.ones(1)
    if shape is not None:
        scale = np.asarray(shape, float)
        if len(scale) != rounds:
            raise ValueError(
                f"shape must have one number above 0 per round, got {show(shape)} for {rounds} "
                f"rounds. Give {rounds} numbers."
            )
    base = Mechanism(clip=1.0, sampling=sampling) if mechanism is None else mechanism
    weighed = len(base.weight_table)
    if weighed not in (1, rounds):
        raise ValueError(
            f"mechanism.weights must cover 1 or {rounds} rounds, got {show(base.weights)} "
            f"of {weighed} rounds. Give weights for each round, or the same ones for all."
        )

    def exposed(factor: float) -> Exposure:
        noise = tuple((factor * scale).tolist())
        multiplier = noise if len(noise) > 1 else noise[0]
        # Noise is in multiples of the clip bound, so any finite bound gives this epsilon.
        probe = dataclasses.replace(base, clip=1.0, noise_multiplier=multiplier)
        return planned_exposure(
            probe,
            clients,
            rounds,
            participations=participations,
            separation=separation,
            stateful=stateful,
        )

    exposure = check_scales("mechanism", base, exposed)
    return needed_noise(exposure, epsilon, failure_probability(delta, clients), accountant)


def check_scales(name: str, mechanism: Mechanism, exposed: Callable[[float], Exposure]) -> Exposure:
    """Require that only `noise_multiplier` sets a mechanism's noise, and return the exposure at 1.

    Args:
        name: Name of the argument that is the mechanism.
        mechanism: The mechanism.
        exposed: Function from a multiplier to the exposure of a run with this multiplier.
    """
    if np.any(mechanism.client_noise):
        raise ValueError(
            f"{name} must have no noise by its clients, got {mechanism!r}. "
            "Let the server add the noise, or use calibrate_upload."
        )
    exposure = exposed(1.0)
    view = exposure.view
    # Twice the noise must give twice the multipliers, else no factor on the noise can be found.
    scales = not accountants.trivial(view) and np.allclose(
        exposed(2.0).view.multiplier, 2 * view.multiplier
    )
    if not scales:
        raise ValueError(
            f"{name} must have an epsilon that follows from noise_multiplier, got "
            f"{mechanism!r} ({view.why_infinite}). "
            "Give a mechanism whose noise_multiplier sets its noise."
        )
    return exposure


@checked(epsilon=check_budget, delta=check_delta)
def calibrate_upload(
    epsilon: float,
    *,
    participations: int,
    clients: int | None = None,
    delta: float | None = None,
    accountant: Accountant = "pld",
) -> float:
    """Return the smallest client noise s whose epsilon for uploads is at most `epsilon`.

    The noise is a std over the clip bound.

    Args:
        epsilon: Target for the run under replace-one adjacency, from 1e-8 to 1e5.
        participations: Most rounds in which a client uploads.
        clients: Number of clients, for the default delta. None suits up to 10,000 clients.
        delta: Failure probability. None stands for min(1e-5, 1 / (10 clients)).
        accountant: "pld", which is exact here, or "rdp", which needs more noise.

    >>> round(calibrate_upload(1.0, participations=100), 1)
    74.6
    """
    delta = failure_probability(delta, clients)
    # Under replace-one the sensitivity is 2C, so noise of 1 has a multiplier of 0.5.
    exposure = Exposure(plain_view(np.full((1, 1), 0.5), "Gaussian"), participations)
    return needed_noise(exposure, epsilon, delta, accountant)


@checked(epsilon=check_budget, rate=check_fraction, delta=check_delta)
def calibrate_examples(
    epsilon: float,
    *,
    rate: float,
    steps: int,
    participations: int,
    examples: int | None = None,
    delta: float | None = None,
    accountant: Accountant = "pld",
) -> float:
    """Return the smallest noise multiplier of `DPSGD` whose epsilon is at most `epsilon`.

    Args:
        epsilon: Example-level target for the run under zero-out adjacency, from 1e-8 to 1e5.
        rate: Probability that an example is in a batch.
        steps: Local steps per round.
        participations: Most rounds in which a client participates.
        examples: Number of training examples of all clients, for the default delta. None suits up
            to 10,000 examples.
        delta: Failure probability. None stands for min(1e-5, 1 / (10 examples)).
        accountant: "pld", or "rdp", which needs more noise.

    Raises:
        ValueError: No noise reaches `epsilon` by this accountant.

    >>> round(calibrate_examples(7.05, rate=0.1, steps=10, participations=10), 2)
    1.0
    """
    delta = failure_probability(delta, examples)
    total = {"clients": 1, "rounds": steps * participations, "sampling": Poisson(rate)}
    return calibrate(epsilon, delta=delta, accountant=accountant, **total)


def rough_noise(exposure: Exposure, target: float, delta: float) -> float:
    """Return a factor on the exposure's noise whose epsilon is about the target.

    The central limit gives a first guess. RDP with orders up to `MOST_ROUGH` corrects it, unless
    these orders prove no epsilon as small as the target.
    """
    view, repeats = exposure
    total = accountants.total_multiplier(view.multiplier.min(axis=1)) / math.sqrt(repeats)
    # By the central limit, sampling at rate q lowers the needed noise to a share q.
    gaussian = view.rate * dp_accounting.get_sigma_gaussian(target, delta) / float(total)
    order = accountants.MOST_ROUGH
    # No noise has less than this epsilon in a rough search: it is that of a divergence of 0 at the
    # highest order.
    if target <= math.log1p(-1 / order) - math.log(delta * order) / (order - 1):
        return gaussian
    return _search(
        lambda noise: least_epsilon(view.scaled(noise), "rdp", delta, repeats, _WIDE),
        target,
        gaussian,
    )


def needed_noise(exposure: Exposure, target: float, delta: float, accountant: Accountant) -> float:
    """Return the factor on the exposure's noise for which epsilon is just within the target.

    Epsilon falls short of the target by at most 0.1% if possible. If no noise is found that reaches
    the target, raise an error.
    """
    view, repeats = exposure

    def spent(noise: float, grid: float = 1.0) -> float:
        return least_epsilon(view.scaled(noise), accountant, delta, repeats, grid)

    noise = rough_noise(exposure, target, delta)
    if accountant == "pld" and view.hidden.any():
        closer = _by_wide_grids(spent, target, noise)
        return _search(spent, target, closer, slack=3e-4)
    return _search(spent, target, noise)


_MOST_ATTEMPTS = 60
"""Most epsilons that a search computes."""

_WIDE = 16.0
"""Width of the grid of losses in searches, over the usual width. It takes a tenth of the time."""


def _by_wide_grids(spent: Callable[[float, float], float], target: float, noise: float) -> float:
    """Return the noise that spends about the target.

    A grid adds to epsilon in proportion to its squared width, so two widths give the epsilon
    without a grid. If a wide grid exceeds the target at the first guess `noise`, as at very small
    budgets, that guess is returned.
    """
    if spent(noise, _WIDE) > target:
        return noise
    noise = _search(lambda factor: spent(factor, _WIDE), target, noise)
    value = spent(noise, _WIDE)
    half = spent(noise, _WIDE / 2)
    # Half the width has a quarter of the error, which leaves this denominator without a grid.
    excess = value / (half - (value - half) / 3)
    aim = target * excess * (1 - 1e-4)
    return _search(lambda factor: spent(factor, _WIDE), aim, noise, slack=2e-4)


def _search(
    spent: Callable[[float], float], target: float, noise: float, slack: float = 5e-4
) -> float:
    """Return noise whose epsilon is the target or a little less.

    If no attempt reaches the target, raise an error.

    Args:
        spent: Function from noise to its epsilon.
        target: Largest epsilon.
        noise: First guess.
        slack: Largest share of the target that may be left, unless the search ends before, at a
            relative 2e-5 of the noise or after `_MOST_ATTEMPTS`.
    """
    too_small = 0.0
    epsilon_above = math.inf
    enough = math.inf
    epsilon_below = 0.0
    # An aim inside the allowed band leaves room on both sides for guesses that miss.
    aim = target * (1 - 0.4 * slack)
    attempt = 0
    while (
        epsilon_below < target * (1 - slack)
        and enough > too_small * (1 + 2e-5)
        and attempt < _MOST_ATTEMPTS
    ):
        # Processors differ in the last digits, and so would the noise of equal runs.
        noise = float(f"{noise:.6g}")
        value = spent(noise)
        if value > target:
            too_small = noise
            epsilon_above = value
        else:
            enough = noise
            epsilon_below = value
        attempt += 1
        if too_small == 0 or math.isinf(enough):
            # Epsilon decays like a power of the noise.
            noise *= min(max((value / aim) ** 0.8, 0.25), 4.0)
        else:
            part = 0.5
            # Every fourth step bisects, because interpolation alone may move one end only.
            if attempt % 4 and epsilon_below > 0 and math.isfinite(epsilon_above):
                # Interpolate log-linearly.
                part = math.log(aim / epsilon_below) / math.log(epsilon_above / epsilon_below)
            noise = enough * (too_small / enough) ** min(max(part, 0.02), 0.98)
    if math.isinf(enough):
        raise ValueError(
            f"epsilon must be larger for this accountant, which proves no less than "
            f"{epsilon_above:.3g} with noise of {too_small:.3g}, got {target:.6g}. "
            "Give a larger epsilon or sampling rate, or the accountant 'pld'."
        )
    return enough
