r"""Epsilon of a view, by Rényi divergences (RDP) or privacy loss distributions (PLD).

The library dp-accounting composes the losses, and turns losses and divergences into epsilons. If
rounds or clients have too many distinct multipliers, these are rounded down, which never lowers
epsilon.

**Replace-one under Poisson sampling.** A client participates with probability q, whatever its data.
A round then follows :math:`P_u = (1-q) N(r, \sigma^2) + q N(r + u, \sigma^2)` for its update u, and
:math:`P_v` for a replacement v. Here r is the sum of the other clients, and
:math:`\|u\|, \|v\| \le C`. For every :math:`\alpha \ge 0`,

.. math:: H_\alpha(P_u \| P_v) \le H_\alpha(P_{+C} \| P_{-C}) \qquad
    \text{(in one dimension, } r = 0).

Proof: For :math:`\alpha < 1`, :math:`H_\alpha(P \| Q) = 1 - \alpha + \alpha H_{1/\alpha}(Q \| P)`.
Otherwise let :math:`r = 0` and :math:`\sigma = 1`, let :math:`N_u = N(u, 1)`, let the event A
attain the left side, and let :math:`N_u(A) = \Phi(-c)`. Among events of this probability under
N_u, a half-space has the least probability under another mean,
:math:`\Phi(-c - \text{distance})` (Neyman-Pearson). The means 0 and v are at most C and 2C away:

.. math:: P_u(A) - \alpha P_v(A)
    = q N_u(A) - (\alpha - 1)(1 - q) N_0(A) - \alpha q N_v(A)
    \le q \Phi(-c) - (\alpha - 1)(1 - q) \Phi(-c - C) - \alpha q \Phi(-c - 2C),

which equals that difference for the half-line :math:`x \ge c + C` under :math:`P_{\pm C}`. So this
pair dominates every round, given the past and the other clients' coins and noise. Its adaptive
composition therefore dominates the run (Zhu, Dong, Wang, Optimal Accounting of Differential Privacy
via Characteristic Function, AISTATS 2022). Clients may keep a state, because mixtures over states
obey the same bound. PLD accounting has this pair as `REPLACE_ONE`. This module integrates the
pair's Rényi divergence.

**Skellam noise.** Let neighbouring integer vectors differ by at most :math:`\Delta_2` in L2 and
:math:`\Delta_1` in L1. With symmetric Skellam noise of variance :math:`\mu` on each coordinate,
their Rényi divergence for whole :math:`\alpha \ge 2` is at most

.. math:: \frac{\alpha \Delta_2^2}{2 \mu} + \min\Big(
    \frac{(2 \alpha - 1) \Delta_2^2 + 6 \Delta_1}{4 \mu^2}, \frac{3 \Delta_1}{2 \mu} \Big)

(Agarwal, Kairouz, Liu, The Skellam Mechanism for Differentially Private Federated Learning,
NeurIPS 2021, theorem 3.5). A whole number is at most its square, so
:math:`\Delta_1 \le \Delta_2^2`. With the multiplier :math:`z = \sqrt{\mu} / \Delta_2` the bound is
at most

.. math:: z^{-2} \Big( \frac{\alpha}{2}
    + \min\Big( \frac{2 \alpha + 5}{4 \mu}, \frac{3}{2} \Big) \Big),

whatever the number of coordinates. It decreases in :math:`\mu`, so the least variance serves all
rounds, and multipliers compose like those of Gaussians. PLD accounting has no such bound.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
from jaxtyping import Float, Int

from jaxfl._support.lazy import dp_accounting
from jaxfl.privacy.accounting.observers import Amplified, View

Accountant = Literal["pld", "rdp"]
"""Way of computing an epsilon: by privacy loss distributions, or by Rényi divergences."""
Levels = tuple[tuple[float, int], ...]
"""Distinct finite multipliers, and how often each of them occurs."""

ORDERS = [*range(2, 65), 76, 91, 108, 128, 152, 181, 215, 256, 512, 1024]
"""Rényi orders under sampling.

They are integers, because the series may diverge at fractional orders. They are few, because an
order costs as many terms as its number. The last digits of an epsilon depend on the orders.
"""

_LEAST_PLD_MULTIPLIER = 1e-3
"""Smallest multiplier under sampling that PLD accounts for. RDP accounts for smaller ones.

Losses at smaller ones exceed 500,000, and fit no grid.
"""

MOST_ROUGH = 32
"""Highest order of rough searches. The best order of most budgets is lower."""

_MOST_COMPOSED = 10**6
"""Most sampled rounds for which `bound` uses PLD. More would need too fine a grid."""

_PLAIN_ORDERS = (1 + np.geomspace(0.01, 1e5, 256)).tolist()
"""Rényi orders of a Gaussian without sampling, whose divergence has a closed form."""

_WHOLE_ORDERS = np.unique(np.rint(np.geomspace(2, 1e5, 256))).astype(int).tolist()
"""Rényi orders of Skellam noise, whose theorem holds for whole orders only."""

_MOST_TOTALS = 256
"""Most distinct totals of unsampled rounds. Each costs about 1 ms."""

_MOST_LEVELS = 64
"""Most distinct multipliers of sampled rounds. Each costs 15 to 300 ms."""

_MOST_AMPLIFIED = 8
"""Most distinct multipliers of rounds that only RDP can amplify."""

_MOST_WORK = 64
"""Most levels of all kinds of clients together. Beyond it one kind stands for all."""

_LEAST_NOISE = 1e-60
"""Smallest noise multiplier that counts as noise: accountants take inverse squares."""

# Runs that differ only by their seed share their accounting.
_remember = functools.lru_cache(maxsize=4096)


def default_delta(clients: int | None) -> float:
    """Return the smaller of 1e-5 and 1 / (10 n) for n clients, or 1e-5 if n is unknown.

    A delta of 1 / n would allow publishing one client outright. 1e-5 suits up to 10,000 clients.

    Args:
        clients: n, the number of clients. None if it is unknown.

    >>> default_delta(100), default_delta(1_000_000)
    (1e-05, 1e-07)
    """
    if clients is None:
        return 1e-5
    return min(1e-5, 1 / (10 * clients))


def failure_probability(delta: float | None, clients: int | None) -> float:
    """Return `delta`, or `default_delta(clients)` if `delta` is None."""
    if delta is None:
        return default_delta(clients)
    return delta


def trivial(view: View) -> bool:
    """Return whether each multiplier is 0 or infinite, so that no accountant is needed."""
    return bool(np.all((view.multiplier == 0) | (view.multiplier == math.inf)))


class EpsilonBound(NamedTuple):
    """Epsilon of each client, or one for all, and the theorem that proves the largest."""

    values: Float[np.ndarray, "#C"]
    theorem: str


def bound(
    view: View, accountant: Accountant, delta: float, repeats: int = 1, grid: float = 1.0
) -> EpsilonBound:
    """Return each client's smallest epsilon that the accountant proves for a repeated view.

    Args:
        view: Multipliers by round and client.
        accountant: "pld" or "rdp". For Skellam noise, and for more than a million sampled rounds,
            both stand for RDP.
        delta: Failure probability.
        repeats: Number of times that the view occurs in the run.
        grid: Width of the grid of losses, relative to the usual one. A value above 1 is for
            searches. "rdp" then tries only orders up to `MOST_ROUGH` under sampling. The epsilon is
            valid, and usually larger.
    """
    composed = repeats * int(view.hidden.sum())
    # A finite variance is that of Skellam noise, for which PLD accounting has no bound.
    if composed > _MOST_COMPOSED or math.isfinite(view.variance):
        accountant = "rdp"
    direct = _direct_bound(view, accountant, delta, repeats, grid)
    if view.amplified is None or accountant == "pld":
        return direct
    value = _amplified_epsilon(view.amplified, delta, repeats, _highest_order(grid))
    if direct.values.max() <= value:
        return direct
    return EpsilonBound(np.minimum(direct.values, value), f"{view.amplified.theorem}; RDP")


def _direct_bound(
    view: View,
    accountant: Accountant,
    delta: float,
    repeats: int,
    grid: float,
) -> EpsilonBound:
    """Return the result of `bound` from the multipliers alone, without `View.amplified`."""
    kinds, kind_of_client = _group_clients(view)

    def evaluate(kind: Float[np.ndarray, "R"]) -> float:
        plain = float(kind[0])
        sampled = kind[1:]
        if accountant == "rdp":
            return rdp_epsilon(
                plain,
                sampled,
                view.rate,
                delta,
                repeats,
                replaced=view.replaced,
                most=_highest_order(grid),
                variance=view.variance,
            )
        return pld_epsilon(plain, sampled, view.rate, delta, repeats, view.replaced, grid)

    values = np.array([evaluate(kind) for kind in kinds.T])
    worst = _least_noise(kinds)
    if worst is not None:
        # More noise never costs more, but the grid of its losses may be coarser.
        values = np.minimum(values, values[worst])
    return EpsilonBound(values[kind_of_client], f"{view.theorem}; {accountant.upper()}")


def _highest_order(grid: float) -> int:
    """Return the highest Rényi order under sampling, which is lower in a rough search."""
    # Searches use a grid above 1, and an order costs as many terms as its number.
    if grid == 1:
        return ORDERS[-1]
    return MOST_ROUGH


def _amplified_epsilon(amplified: Amplified, delta: float, repeats: int, most: int) -> float:
    """Return the RDP epsilon of amplified rounds that occur `repeats` times."""
    levels = _levels(round_down(amplified.multiplier, _MOST_AMPLIFIED))
    parts = [count * amplified.divergences(level, most=most) for level, count in levels]
    # At each order, the divergences of independent rounds add up.
    spent = repeats * np.sum(parts, axis=0)
    orders = orders_up_to(most)
    return float(dp_accounting.rdp.compute_epsilon(orders, spent.tolist(), delta)[0])


def least_epsilon(
    view: View, accountant: Accountant, delta: float, repeats: int = 1, grid: float = 1.0
) -> float:
    """Return the smallest epsilon of the worst client that the accountant proves.

    "pld" also tries RDP if the view has an amplification that only RDP can account for. Arguments
    are those of `bound`.
    """
    names: list[Accountant] = [accountant]
    if accountant == "pld" and view.amplified is not None:
        names = ["pld", "rdp"]
    return min(float(bound(view, name, delta, repeats, grid).values.max()) for name in names)


def worst_rounds(view: View) -> Iterator[View]:
    """Yield the view of the worst round with a known cohort, and of the worst with a hidden one.

    Each view has one round and one client, and the least multiplier of `View.amplified`, if any. A
    kind without rounds is left out.
    """
    for hidden in np.unique(view.hidden):
        least = view.multiplier[view.hidden == hidden].min(keepdims=True)
        amplified = view.amplified
        if amplified is not None:
            amplified = amplified._replace(multiplier=amplified.multiplier.min(keepdims=True))
        yield view._replace(multiplier=least, hidden=np.array([hidden]), amplified=amplified)


def most_exposed(view: View) -> View:
    """Return a view whose largest epsilon is that of `view`, by each accountant.

    It has a single client if all cohorts are known, or if all are hidden and one client has the
    least noise in every round.
    """
    if view.multiplier.shape[1] == 1:
        return view
    if not view.hidden.any():
        least = total_multiplier(view.multiplier).min()
        return view._replace(multiplier=np.full((1, 1), least), hidden=np.zeros(1, bool))
    if not view.hidden.all():
        return view
    kinds, _ = _group_clients(view)
    # The first row is the total of plain rounds, of which there are none here.
    return worst_client(view._replace(multiplier=kinds[1:]))


def worst_client(view: View) -> View:
    """Return the view of the client with the least noise in every round.

    If there is no such client, return the view itself.
    """
    worst = _least_noise(view.multiplier)
    if worst is None:
        return view
    return view._replace(multiplier=view.multiplier[:, [worst]])


def _least_noise(multiplier: Float[np.ndarray, "R C"]) -> int | None:
    """Return the column that has the least noise in every row, or None if there is none."""
    least = multiplier.min(axis=1, keepdims=True)
    everywhere = np.all(multiplier == least, axis=0)
    if not everywhere.any():
        return None
    return int(np.argmax(everywhere))


def rdp_epsilon(
    plain: float,
    sampled: Float[np.ndarray, "R"],
    rate: float,
    delta: float,
    repeats: int = 1,
    replaced: bool = False,
    most: int = ORDERS[-1],
    variance: float = math.inf,
) -> float:
    """Return the RDP epsilon of one Gaussian and of Poisson-sampled Gaussians together.

    It is infinite if a multiplier is below 1e-60.

    Args:
        plain: Multiplier of the Gaussian. Infinity leaves it out.
        sampled: Multiplier of each sampled Gaussian. Infinity leaves it out.
        rate: Probability of participation in a sampled Gaussian.
        delta: Failure probability.
        repeats: Number of times that all of these Gaussians occur.
        replaced: Whether adjacency is replace-one. The default is zero-out.
        most: Highest Rényi order under sampling.
        variance: Least variance, in squared steps, of Skellam noise in place of the Gaussian noise.
            Infinity stands for Gaussian noise.
    """
    return _rdp_epsilon(plain, _levels(sampled), rate, delta, repeats, replaced, most, variance)


@_remember
def _rdp_epsilon(
    plain: float,
    sampled: Levels,
    rate: float,
    delta: float,
    repeats: int,
    replaced: bool,
    most: int,
    variance: float = math.inf,
) -> float:
    if _vanishing(plain, sampled):
        return math.inf
    unsampled = plain / _change(replaced)
    if sampled:
        orders = orders_up_to(most)
    elif math.isinf(variance):
        orders = _PLAIN_ORDERS
    else:
        orders = _WHOLE_ORDERS
    order = np.array(orders)
    # The excess of Skellam noise is that of the module's docstring. Gaussian noise has none.
    excess = np.minimum((2 * order + 5) / (4 * variance), 1.5)
    spent = repeats * (order / 2 + excess) / unsampled**2
    for level, count in sampled:
        if replaced:
            # This function returns all orders. The slice below drops those above `most`.
            divergences = replaced_divergences(level, rate)
        else:
            divergences = sampled_divergences(level, rate, most)
        spent += repeats * count * divergences[: len(orders)]
    return float(dp_accounting.rdp.compute_epsilon(orders, spent.tolist(), delta)[0])


def pld_epsilon(
    plain: float,
    sampled: Float[np.ndarray, "R"],
    rate: float,
    delta: float,
    repeats: int = 1,
    replaced: bool = False,
    grid: float = 1.0,
) -> float:
    """Return the PLD epsilon of one Gaussian and of Poisson-sampled Gaussians together.

    The epsilon of the Gaussian alone is exact. If losses fit no grid, the epsilon is the smaller of
    two: the one by RDP, and the one of the Gaussians without sampling, because sampling never adds
    to an epsilon. It is infinite if a multiplier is below 1e-60.

    Args:
        plain: Multiplier of the Gaussian. Infinity leaves it out.
        sampled: Multiplier of each sampled Gaussian. Infinity leaves it out.
        rate: Probability of participation in a sampled Gaussian.
        delta: Failure probability.
        repeats: Number of times that all of these Gaussians occur.
        replaced: Whether adjacency is replace-one. The default is zero-out.
        grid: Width of the grid of losses, relative to the usual one.
    """
    levels = _levels(sampled)
    if _vanishing(plain, levels):
        return math.inf
    if not levels or levels[0][0] >= _LEAST_PLD_MULTIPLIER:
        # Exponentials of losses may overflow. A grid leaves out tails, whose mass may exceed delta,
        # and epsilon is then infinite.
        with contextlib.suppress(OverflowError):
            value = _pld_epsilon(plain, levels, rate, delta, repeats, replaced, grid)
            if math.isfinite(value) or not levels:
                return value
    multipliers, counts = np.array(levels).T
    # Without sampling all rounds are one Gaussian, whose inverse square multiplier is a sum.
    alone = float((plain**-2.0 + counts @ multipliers**-2.0) ** -0.5)
    by_orders = _rdp_epsilon(plain, levels, rate, delta, repeats, replaced, ORDERS[-1])
    return min(by_orders, _gaussian_epsilon(alone, delta, repeats, replaced))


@_remember
def _pld_epsilon(
    plain: float,
    sampled: Levels,
    rate: float,
    delta: float,
    repeats: int,
    replaced: bool,
    grid: float = 1.0,
) -> float:
    if not sampled:
        return _gaussian_epsilon(plain, delta, repeats, replaced)
    interval = grid * _interval(plain, sampled, rate, repeats, _change(replaced))
    parts = []
    for level, count in sampled:
        losses = _privacy_losses(level, rate, replaced, interval)
        times = repeats * count
        # One `self_compose` takes about as long as six `compose`, however few the copies are.
        if times < 6:
            parts += [losses] * times
        else:
            parts.append(losses.self_compose(times))
    if math.isfinite(plain):
        # Repeated Gaussians are one Gaussian, exactly, which needs no composition on the grid.
        parts.append(_privacy_losses(plain / math.sqrt(repeats), 1.0, replaced, interval))
    total = functools.reduce(lambda first, second: first.compose(second), parts)
    # If epsilon is about 709 or more, exp(-epsilon) underflows. The library divides by such masses,
    # and compares the infinite quotient as it should.
    with np.errstate(over="ignore"):
        return float(total.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=64)
def _privacy_losses(multiplier: float, rate: float, replaced: bool, interval: float) -> Any:
    """Return the privacy loss distribution of one sampled Gaussian, on a grid of losses.

    It is cached, because many numbers of rounds share a grid.
    """
    library = dp_accounting.pld.privacy_loss_distribution
    if replaced:
        # REPLACE_ONE doubles the sensitivity itself.
        return library.from_gaussian_mechanism(
            multiplier,
            value_discretization_interval=interval,
            sampling_prob=rate,
            neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
        )
    directions = [1, -1]
    if rate == 1:
        # Both directions of a plain Gaussian have the same losses.
        directions = [1]
    losses = [_on_grid(multiplier, rate, sign, interval) for sign in directions]
    return library.PrivacyLossDistribution(*losses)


def _on_grid(multiplier: float, rate: float, sign: int, interval: float) -> Any:
    r"""Return the probabilities of losses of a sampled Gaussian against an unmoved one, or reverse.

    The library's `from_gaussian_mechanism` gives the same losses. It inverts the loss in a loop
    over the grid, which takes ten times as long. For the sign 1 the loss at x is
    :math:`\log(1 - q + q e^u)` with :math:`u = (-x - 1/2) / z^2`. For -1 it is the negative of that
    loss at -x.

    Args:
        multiplier: z of the Gaussian.
        rate: q, the probability of participation.
        sign: 1 for the sampled Gaussian against the unmoved one, -1 for the reverse.
        interval: Spacing of the grid.
    """
    mechanisms = dp_accounting.pld.privacy_loss_mechanism
    kind = mechanisms.AdjacencyType.ADD
    if sign > 0:
        kind = mechanisms.AdjacencyType.REMOVE
    losses = mechanisms.GaussianPrivacyLoss(multiplier, sampling_prob=rate, adjacency_type=kind)
    bounds = losses.connect_dots_bounds()
    lowest = math.floor(bounds.epsilon_lower / interval)
    highest = math.ceil(bounds.epsilon_upper / interval)
    epsilons = interval * np.arange(lowest, highest + 1)
    # Rounding may move a probability a little below 0 or above 1.
    deltas = np.clip(_deltas_at(epsilons, losses, multiplier, rate, sign), 0.0, 1.0)
    pmf = dp_accounting.pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, lowest, highest, deltas
    )
    # For a sparse one the library computes its size to the power of the rounds, which may have a
    # million digits.
    return pmf.to_dense_pmf()


def _deltas_at(
    epsilons: Float[np.ndarray, "n"],
    losses: Any,
    multiplier: float,
    rate: float,
    sign: int,
) -> Float[np.ndarray, "n"]:
    """Return the failure probability at each epsilon, for the losses of `_on_grid`."""
    with np.errstate(divide="ignore"):
        # The loss, solved for u, is `unsampled`. No loss is as low as log(1 - q).
        least = np.log1p(-rate)
        inside = sign * epsilons > least
        loss = sign * epsilons[inside]
        unsampled = loss - math.log(rate) + np.log(-np.expm1(least - loss))
    # Where all losses exceed epsilon, delta is 1 - e^epsilon. Where none does, delta is 0.
    deltas = -np.expm1(np.minimum(epsilons, 0.0))
    x = -sign * (0.5 + multiplier**2 * unsampled)
    deltas[inside] = losses.mu_upper_cdf(x) - np.exp(epsilons[inside] + losses.mu_lower_log_cdf(x))
    return deltas


def _gaussian_epsilon(plain: float, delta: float, repeats: int, replaced: bool) -> float:
    """Return the exact epsilon of one Gaussian that occurs `repeats` times."""
    # The library takes log(0) if the failure probability is far below delta.
    with np.errstate(divide="ignore"):
        single = plain / _change(replaced) / math.sqrt(repeats)
        return float(dp_accounting.get_epsilon_gaussian(single, delta))


def _change(replaced: bool) -> float:
    """Return by how many clip bounds one client moves a sum: 2 under replace-one, otherwise 1."""
    if replaced:
        return 2.0
    return 1.0


def _vanishing(plain: float, sampled: Levels) -> bool:
    """Return whether some multiplier is too small for accountants, which square it."""
    return min([plain, *(level for level, _ in sampled)]) < _LEAST_NOISE


@_remember
def sampled_divergences(
    multiplier: float, rate: float, most: int = ORDERS[-1]
) -> Float[np.ndarray, "orders"]:
    r"""Return the zero-out Rényi divergences of a Poisson-sampled Gaussian.

    .. math:: (a - 1) D_a = \log \sum_k \binom{a}{k} (1 - q)^{a - k} q^k e^{k (k - 1) / 2 z^2}

    (Mironov, Talwar and Zhang, Rényi Differential Privacy of the Sampled Gaussian Mechanism, 2019).
    The library's value of this logarithm may round to 0 or below, so that large noise would cost
    nothing. Without its exponentials the sum is 1. Here this 1 is taken out of the sum, which keeps
    all digits.

    Args:
        multiplier: z of the Gaussian.
        rate: q, the probability of participation.
        most: Highest order. Divergences are those of all `ORDERS` up to it.
    """
    orders = orders_up_to(most)
    if rate == 1:
        return np.array(orders) / (2 * multiplier**2)
    divergences = np.empty(len(orders))
    for i, order in enumerate(orders):
        # The terms 0 and 1 have an exponent of 0, and thus no part in the excess over 1.
        k = np.arange(2, order + 1)
        binomial = (
            math.lgamma(order + 1)
            - scipy.special.gammaln(k + 1)
            - scipy.special.gammaln(order - k + 1)
        )
        chance = binomial + (order - k) * math.log1p(-rate) + k * math.log(rate)
        exponent = k * (k - 1) / (2 * multiplier**2)
        # Terms have the factor exp(exponent) - 1, in a form whose logarithm does not overflow.
        excess = _log_sum(chance + exponent + np.log(-np.expm1(-exponent)))
        divergences[i] = np.logaddexp(0.0, excess) / (order - 1)
    return divergences


def orders_up_to(most: int) -> list[int]:
    """Return those `ORDERS` that are at most `most`."""
    return [order for order in ORDERS if order <= most]


@_remember
def replaced_divergences(multiplier: float, rate: float) -> Float[np.ndarray, "orders"]:
    r"""Return the replace-one Rényi divergences of a Poisson-sampled Gaussian at all `ORDERS`.

    These are :math:`D_a(P_{+1} \| P_{-1})` with
    :math:`P_{\pm 1} = (1-q) N(0, z^2) + q N(\pm 1, z^2)`, by the trapezoidal rule with step h. Its
    error decays like :math:`e^{-2 \pi y / h}` for an integrand that is analytic within y of the
    real line. :math:`P_{-1}` has no zero within :math:`\pi z^2`. Steps of :math:`z^2 / 25` and
    :math:`z / 6` leave less than rounding error, which is added. Orders that need too many steps
    get the unsampled divergence, :math:`2 a / z^2`, which is no smaller (quasi-convexity).

    Args:
        multiplier: z of the Gaussian under zero-out. Replace-one doubles the sensitivity here.
        rate: q, the probability of participation.
    """
    z = multiplier
    divergences = 2 * np.array(ORDERS) / z**2
    if rate == 1:
        return divergences
    step = min(z / 6, z**2 / 25)
    for i, order in enumerate(ORDERS):
        # The integrand's peaks lie from 0 to the order.
        first = -14 * z - 1
        last = order + 14 * z
        # Higher orders need even more steps, so all of them keep the unsampled divergence.
        if (last - first) / step > 2e5:
            break
        total = _log_moment(order, np.arange(first, last, step), step, z, rate)
        rounded_up = max(total, 0.0) + 3e-14 * (1 + abs(total))
        divergences[i] = min(rounded_up / (order - 1), divergences[i])
    return divergences


def _log_moment(order: int, x: Float[np.ndarray, "x"], step: float, z: float, rate: float) -> float:
    """Return (a - 1) D_a of `replaced_divergences` before rounding up, by a sum over x."""
    up = (x - 0.5) / z**2
    down = (-x - 0.5) / z**2
    below = _log_mixture(down, rate)
    exponent = order * (_log_mixture(up, rate) - below) + below - 0.5 * (x / z) ** 2
    # The largest exponent leaves the sum, whose terms would otherwise overflow.
    most = exponent.max()
    scale = z * math.sqrt(2 * math.pi)
    return most + math.log(np.exp(exponent - most).sum() * step / scale)


def _log_mixture(u: Float[np.ndarray, "x"], rate: float) -> Float[np.ndarray, "x"]:
    """Return log(1 - q + q exp(u)) to full precision, also for small q."""
    # `where` computes both forms, and for large u this unused one would overflow.
    small = np.log1p(rate * np.expm1(np.minimum(u, 30.0)))
    large = np.logaddexp(math.log1p(-rate), math.log(rate) + u)
    return np.where(u < 30, small, large)


def total_multiplier(multiplier: Float[np.ndarray, "R *C"]) -> Float[np.ndarray, "*C"]:
    r"""Return the multiplier of unsampled rounds together: :math:`z^{-2} = \sum_t z_t^{-2}`."""
    # A multiplier of 0 has an infinite inverse square, and makes the total 0.
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(np.sum(multiplier**-2.0, axis=0) ** -0.5)


def round_down(
    values: Float[np.ndarray, "..."], most: int = _MOST_LEVELS
) -> Float[np.ndarray, "..."]:
    """Return the numbers, rounded down so that at most `most` positive finite ones differ.

    0 and infinity stay, and the smallest positive number stays exact.
    """
    finite = (values > 0) & (values < math.inf)
    if np.unique(values[finite]).size <= most:
        return values
    # The ends of `geomspace` are exact, so the smallest number stays as it is.
    levels = np.geomspace(values[finite].min(), values[finite].max(), most)
    rounded = values.copy()
    rounded[finite] = levels[np.searchsorted(levels, values[finite], side="right") - 1]
    return rounded


def _group_clients(view: View) -> tuple[Float[np.ndarray, "R K"], Int[np.ndarray, "#C"]]:
    """Return the distinct clients' multipliers as columns, and the column of each client.

    A column is the total of a client's plain rounds, then each of its sampled rounds. If columns
    have more than `_MOST_WORK` levels together, a single column replaces them. It is at least as
    exposed as every client.
    """
    plain = round_down(total_multiplier(view.multiplier[~view.hidden]), _MOST_TOTALS)
    sampled = view.multiplier[view.hidden]
    kinds, kind_of_client = np.unique(
        np.vstack([plain, round_down(sampled)]), axis=1, return_inverse=True
    )
    if sum(len(_levels(kind[1:])) for kind in kinds.T) > _MOST_WORK:
        worst = np.r_[plain.min(), round_down(sampled.min(axis=1))]
        return worst[:, None], np.zeros(1, int)
    # NumPy 2.0 gives the inverse more than one axis.
    return kinds, kind_of_client.reshape(-1)


def _levels(values: Float[np.ndarray, "R"]) -> Levels:
    levels, counts = np.unique(values[values < math.inf], return_counts=True)
    return tuple(zip(levels.tolist(), counts.tolist()))


def _interval(plain: float, sampled: Levels, rate: float, repeats: int, change: float) -> float:
    """Return the spacing of the grid of losses, for `_pld_epsilon`.

    It is small against the loss of one round, unless the losses of a round would then need more
    than about a million points. It follows the number of rounds in powers of 2, so that few grids
    serve all evaluations of a run. If the loss of a round has standard deviation s, a spacing of h
    adds about :math:`h^2 / 12 s^2` of an epsilon to it. That is 2e-4 for 0.05 s, the largest
    spacing otherwise, and 3e-5 for 0.02 s, below which little is gained.

    Args:
        plain: Multiplier of unsampled rounds together.
        sampled: Multipliers of sampled rounds, and how often each of them occurs.
        rate: Probability of participation in a sampled round.
        repeats: Number of times that all of these rounds occur.
        change: Sensitivity to one client, in clip bounds.
    """
    levels, counts = np.array(sampled).T
    plain = plain / change
    levels = levels / change
    spread = counts @ (rate / levels) ** 2
    # One bound on the spacing follows the deviation of all losses, rounded to a power of 2.
    total = math.sqrt(repeats * (spread + plain**-2.0))
    least = min(plain / math.sqrt(repeats), levels.min())
    longest = 10 / least + 0.5 / least**2
    scale = 2.0 ** math.floor(math.log2(max(1.0, total)))
    deviation = math.sqrt(spread / counts.sum())
    fine = 0.0
    # Squares of faint rates may underflow to 0, which has no logarithm.
    if deviation:
        fine = 2.0 ** math.floor(math.log2(0.02 * deviation))
    return float(max(fine, min(0.05 * deviation, 5e-4 * scale), longest / 1e6))


@_remember
def without_replacement(
    multiplier: float, clients: int, size: int, most: int = ORDERS[-1]
) -> Float[np.ndarray, "orders"]:
    """Return the replace-one Rényi divergences of a Gaussian on a sample without replacement.

    They also bound the zero-out ones.

    Args:
        multiplier: z of the Gaussian under replace-one.
        clients: Number of clients.
        size: Number of clients in the sample.
        most: Highest order. Divergences are those of all `ORDERS` up to it.
    """
    accountant = dp_accounting.rdp.RdpAccountant(
        orders_up_to(most), dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        clients, size, dp_accounting.GaussianDpEvent(multiplier)
    )
    return np.array(accountant.compose(event).rdp)


@_remember
def balls_in_bins(
    multiplier: float, bins: int, most: int = ORDERS[-1]
) -> Float[np.ndarray, "orders"]:
    r"""Return the zero-out Rényi divergences of b rounds, in one of which a client takes part.

    The round is drawn uniformly. Of the two directions, the larger divergence counts. The pair
    :math:`P = \frac{1}{b} \sum_j N(e_j, z^2 I)` and :math:`Q = N(0, z^2 I)` in b dimensions
    dominates (Chua et al., Balls-and-Bins Sampling for DP-SGD, AISTATS 2025). With
    :math:`L_j = dN(e_j) / dQ`, independent under Q,

    .. math::
        E_Q\Big[\Big(\frac{1}{b} \sum_j L_j\Big)^a\Big] &= \frac{a!}{b^a} [x^a]
            \Big( \sum_k \frac{e^{k (k-1) / 2 z^2}}{k!} x^k \Big)^b, \\
        E_Q\Big[\Big(\frac{1}{b} \sum_j L_j\Big)^{-s}\Big] &= \frac{b^s}{\Gamma(s)}
            \int_0^\infty t^{s-1} E[e^{-t L_1}]^b \, dt.

    The trapezoidal rule over log t and over the normal variable of L gives the integrals. Orders
    above 256 get the unsampled divergence, :math:`a / 2 z^2`, which is no smaller. So do orders
    whose integrand does not decay on the grid.

    Args:
        multiplier: z of the Gaussian.
        bins: b, the number of rounds.
        most: Highest order. Divergences are those of all `ORDERS` up to it.
    """
    orders = orders_up_to(most)
    divergences = np.array(orders) / (2 * multiplier**2)
    highest = max(order for order in orders if order <= 256)
    k = np.arange(highest + 1)
    term = k * (k - 1) / (2 * multiplier**2) - scipy.special.gammaln(k + 1)
    # The first expectation needs coefficient a of this power of a series.
    power = _log_power(term, bins)
    # The second one needs E[exp(-t L)] at each t = e^u of the outer integral.
    u = np.arange(-45.0, 60.0, 0.02) - math.log(bins)
    transform = _log_transform(multiplier, u)
    for i, order in enumerate(orders):
        if order > highest:
            break
        up = scipy.special.gammaln(order + 1) - order * math.log(bins) + power[order]
        # Rounding must not lower the bound, so a margin is added to the larger direction.
        larger = max(up, _log_inverse_moment(order - 1, u, transform, bins), 0.0)
        rounded_up = larger + 1e-10 * (1 + larger)
        divergences[i] = min(rounded_up / (order - 1), divergences[i])
    return divergences


def _log_transform(multiplier: float, u: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
    """Return the logarithm of E[exp(-t L_1)] of `balls_in_bins` at each t = e^u."""
    x = np.arange(-14.0, 14.0, min(0.05, multiplier / 10))
    # Weights are the logarithms of probabilities, which sum to 1.
    weight = -0.5 * x**2 - np.logaddexp.reduce(-0.5 * x**2)
    likelihood = np.exp(x / multiplier - 0.5 / multiplier**2)
    return np.array([_log_sum(weight - math.exp(v) * likelihood) for v in u])


def _log_inverse_moment(
    s: int,
    u: Float[np.ndarray, "n"],
    transform: Float[np.ndarray, "n"],
    bins: int,
) -> float:
    """Return the logarithm of the second expectation of `balls_in_bins`.

    It is infinite if the integrand does not decay on the grid of `u`.
    """
    exponent = s * u + bins * transform
    # If the integrand matters at either end of the grid, the sum lacks a part of it.
    if max(exponent[0], exponent[-1]) > exponent.max() - 40:
        return math.inf
    # The last term is the logarithm of the grid's step.
    return (
        s * math.log(bins)
        - scipy.special.gammaln(s)
        + np.logaddexp.reduce(exponent)
        + math.log(u[1] - u[0])
    )


def _log_sum(terms: Float[np.ndarray, "n"]) -> float:
    """Return the logarithm of a sum, given the logarithms of its terms."""
    largest = terms.max()
    return float(largest + math.log(np.exp(terms - largest).sum()))


def _log_power(term: Float[np.ndarray, "n"], power: int) -> Float[np.ndarray, "n"]:
    """Return the logarithms of the first coefficients of a power of a series.

    `term` has the logarithms of the series' own coefficients, and the result has as many.
    """

    def product(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        # Coefficient n of a product is the sum of a_i times b_(n - i) for i from 0 to n.
        terms = (a[: n + 1] + b[n::-1] for n in range(len(a)))
        return np.array([np.logaddexp.reduce(logs) for logs in terms])

    # Repeated squaring begins with the series 1, whose other coefficients are 0.
    result = np.r_[0.0, np.full(len(term) - 1, -math.inf)]
    while power:
        if power % 2:
            result = product(result, term)
        power //= 2
        # A last square would not be used, and costs as much as any product.
        if power:
            term = product(term, term)
    return result
