r"""Epsilon of what an observer sees, by dp-accounting: Rényi divergences (RDP) or privacy loss distributions (PLD).

Where rounds or clients have too many distinct multipliers, these are rounded down, which never lowers epsilon.

**Replace-one under Poisson sampling.** A client participates with probability q, whatever its data. A round then
follows :math:`P_u = (1-q) N(r, \sigma^2) + q N(r + u, \sigma^2)` for its update u, and :math:`P_v` for a replacement v,
where r is the other clients' sum, :math:`\|u\|, \|v\| \le C`. For every :math:`\alpha \ge 0`,

.. math:: H_\alpha(P_u \| P_v) \le H_\alpha(P_{+C} \| P_{-C}) \qquad \text{(in one dimension, } r = 0).

Proof: for :math:`\alpha < 1`, :math:`H_\alpha(P \| Q) = 1 - \alpha + \alpha H_{1/\alpha}(Q \| P)`. Otherwise let
:math:`r = 0` and :math:`\sigma = 1`, let the event A attain the left side, and :math:`N_u(A) = \Phi(-c)`. Among events
of this probability under N_u, a half-space has the least under another mean, :math:`\Phi(-c - \text{distance})`
(Neyman-Pearson), and the means 0 and v are at most C and 2C away:

.. math:: P_u(A) - \alpha P_v(A) = q N_u(A) - (\alpha - 1)(1 - q) N_0(A) - \alpha q N_v(A)
    \le q \Phi(-c) - (\alpha - 1)(1 - q) \Phi(-c - C) - \alpha q \Phi(-c - 2C),

which equals that difference for the half-line :math:`x \ge c + C` under :math:`P_{\pm C}`. So this pair dominates every
round, given the past and the other clients' coins and noise, and so does its adaptive composition (Zhu, Dong, Wang,
Optimal Accounting of Differential Privacy via Characteristic Function, AISTATS 2022). Clients may be stateful: mixtures
over states obey the same bound. PLD accounting has this pair as `REPLACE_ONE`; its Rényi divergence is integrated here.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
from jaxtyping import Float, Int

from jaxfl.lazy import dp_accounting
from jaxfl.privacy.observers import View

Accountant = Literal["pld", "rdp"]
Levels = tuple[tuple[float, int], ...]
"""Distinct finite multipliers and how often each occurs."""

ORDERS = [*range(2, 65), 76, 91, 108, 128, 152, 181, 215, 256, 512, 1024]
"""Rényi orders under sampling: integers, as the series may diverge at fractional orders; few, as an order costs as many
terms. The last digits of an epsilon depend on them."""

_LEAST_ON_GRID = 1e-3
"""Less noise than this under sampling is accounted for by RDP: its losses, of up to 500,000, fit no grid."""

MOST_ROUGH = 32
"""The highest order of rough searches: the best order of most budgets is lower."""

_MOST_COMPOSED = 10**6
"""More sampled rounds than these are accounted for by RDP alone: their PLD needs too fine a grid."""

_PLAIN_ORDERS = (
    1 + np.geomspace(0.01, 1e5, 256)
).tolist()  # without sampling: a closed form at every order

_MOST_TOTALS, _MOST_LEVELS, _MOST_AMPLIFIED, _MOST_WORK = (
    256,
    64,
    8,
    64,
)  # a total costs 1 ms, a level 15 to 300

LEAST = 1e-60
"""Smaller noise multipliers count as none: accountants take their inverse squares."""

_remember = functools.lru_cache(
    maxsize=4096
)  # runs that differ only by seed share their accounting


def default_delta(clients: int | None) -> float:
    """Smaller of 1e-5 and 1 / (10 C), since 1 / C allows publishing one client outright; None: up to 10,000 clients.

    >>> default_delta(100), default_delta(1_000_000)
    (1e-05, 1e-07)
    """
    return 1e-5 if clients is None else min(1e-5, 1 / (10 * clients))


def failure_probability(delta: float | None, clients: int | None) -> float:
    """The given delta, or the default for so many clients."""
    return default_delta(clients) if delta is None else delta


def trivial(view: View) -> bool:
    """Whether every client is fully exposed or not at all, which needs no accountant."""
    return bool(np.all((view.multiplier == 0) | (view.multiplier == math.inf)))


class Bound(NamedTuple):
    """Epsilon of each client, and its theorem."""

    values: Float[np.ndarray, "#C"]
    theorem: str


def bound(
    view: View, accountant: Accountant, delta: float, repeats: int = 1, grid: float = 1.0
) -> Bound:
    """The smallest epsilon that the accountant proves for `repeats` such views.

    A `grid` above 1 is for searches: losses lie on a grid so many times as wide, and under sampling the lowest Rényi
    orders alone are tried. The epsilon is valid, and larger.
    """
    kinds, kind_of_client = _group_clients(view)
    if repeats * int(view.hidden.sum()) > _MOST_COMPOSED:
        accountant = "rdp"
    most = ORDERS[-1] if grid == 1 else MOST_ROUGH

    def evaluate(kind: Float[np.ndarray, "R"]) -> float:
        plain, sampled = float(kind[0]), kind[1:]
        if accountant == "rdp":
            return rdp_epsilon(plain, sampled, view.rate, delta, repeats, view.replaced, most)
        return pld_epsilon(plain, sampled, view.rate, delta, repeats, view.replaced, grid)

    values = np.array([evaluate(kind) for kind in kinds.T])
    worst = _least_noise(kinds)
    if worst is not None:  # more noise never costs more, but its grid may be coarser
        values = np.minimum(values, values[worst])
    direct = Bound(values[kind_of_client], f"{view.theorem}; {accountant.upper()}")
    if view.amplified is None or accountant == "pld":
        return direct
    levels = _levels(round_down(view.amplified.multiplier, _MOST_AMPLIFIED))
    spent = np.sum(
        [count * view.amplified.divergences(level, most=most) for level, count in levels], axis=0
    )
    value = float(
        dp_accounting.rdp.compute_epsilon(orders_up_to(most), (repeats * spent).tolist(), delta)[0]
    )
    if direct.values.max() <= value:
        return direct
    return Bound(np.minimum(direct.values, value), f"{view.amplified.theorem}; RDP")


def least_epsilon(
    view: View, accountant: Accountant, delta: float, repeats: int = 1, grid: float = 1.0
) -> float:
    """The smallest valid epsilon of the worst client ("pld": also where only RDP has the theorem)."""
    names: list[Accountant] = (
        ["pld", "rdp"] if accountant == "pld" and view.amplified is not None else [accountant]
    )
    return min(float(bound(view, name, delta, repeats, grid).values.max()) for name in names)


def worst_rounds(view: View) -> Iterator[View]:
    """The worst client's worst round among amplified rounds, and among the others."""
    for hidden in np.unique(view.hidden):
        least = view.multiplier[view.hidden == hidden].min(keepdims=True)
        amplified = view.amplified
        if amplified is not None:
            amplified = amplified._replace(multiplier=amplified.multiplier.min(keepdims=True))
        yield view._replace(multiplier=least, hidden=np.array([hidden]), amplified=amplified)


def most_exposed(view: View) -> View:
    """Return a view whose largest bounds are those of all clients, of one client where it is known which."""
    if view.multiplier.shape[1] == 1:
        return view
    if not view.hidden.any():
        least = total_multiplier(view.multiplier).min()
        return view._replace(multiplier=np.full((1, 1), least), hidden=np.zeros(1, bool))
    if not view.hidden.all():
        return view
    kinds, _ = _group_clients(view)
    return worst_client(view._replace(multiplier=kinds[1:]))


def worst_client(view: View) -> View:
    """The view of the client most exposed in every round; unchanged if there is none."""
    worst = _least_noise(view.multiplier)
    return view if worst is None else view._replace(multiplier=view.multiplier[:, [worst]])


def _least_noise(multiplier: Float[np.ndarray, "R C"]) -> int | None:
    """Return the column that has the least noise in every row, if there is one."""
    least = multiplier.min(axis=1, keepdims=True)
    everywhere = np.all(multiplier == least, axis=0)
    return int(np.argmax(everywhere)) if everywhere.any() else None


def rdp_epsilon(
    plain: float,
    sampled: Float[np.ndarray, "R"],
    rate: float,
    delta: float,
    repeats: int = 1,
    replaced: bool = False,
    most: int = ORDERS[-1],
) -> float:
    """RDP epsilon of one Gaussian and Poisson-sampled Gaussians, under zero-out or (`replaced`) replace-one.

    Under sampling, by orders up to `most`.
    """
    return _rdp_epsilon(plain, _levels(sampled), rate, delta, repeats, replaced, most)


@_remember
def _rdp_epsilon(
    plain: float,
    sampled: Levels,
    rate: float,
    delta: float,
    repeats: int,
    replaced: bool,
    most: int,
) -> float:
    if _vanishing(plain, sampled):
        return math.inf
    orders = orders_up_to(most) if sampled else _PLAIN_ORDERS
    spent = repeats * (np.array(orders) / (2 * (plain / 2 if replaced else plain) ** 2))
    for level, count in sampled:
        divergences = (
            replaced_divergences(level, rate)
            if replaced
            else sampled_divergences(level, rate, most)
        )
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
    """PLD epsilon of one Gaussian and Poisson-sampled Gaussians, under zero-out or (`replaced`) replace-one.

    Exact for the Gaussian alone. Losses lie on a grid `grid` times as wide as usual. Where they exceed any grid, the
    epsilon is the smaller of that by RDP and that of the Gaussians without sampling, which never adds to an epsilon.
    """
    levels = _levels(sampled)
    if _vanishing(plain, levels):
        return math.inf
    if not levels or levels[0][0] >= _LEAST_ON_GRID:
        # Exponentials of losses may exceed floating point, and delta the mass of the tails that a grid leaves out.
        with contextlib.suppress(OverflowError):
            value = _pld_epsilon(plain, levels, rate, delta, repeats, replaced, grid)
            if math.isfinite(value) or not levels:
                return value
    multipliers, counts = np.array(levels).T
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
    interval = grid * _interval(plain, sampled, rate, repeats, 2.0 if replaced else 1.0)
    parts = []
    for level, count in sampled:
        losses, times = _losses(level, rate, replaced, interval), repeats * count
        # The library takes as long for two times at once as for six one by one.
        parts += [losses] * times if times < 6 else [losses.self_compose(times)]
    if math.isfinite(plain):
        parts.append(_losses(plain / math.sqrt(repeats), 1.0, replaced, interval))
    total = functools.reduce(lambda first, second: first.compose(second), parts)
    return float(total.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=64)
def _losses(multiplier: float, rate: float, replaced: bool, interval: float) -> Any:
    """Return the privacy loss distribution of one sampled Gaussian, which serves every number of rounds."""
    library = dp_accounting.pld.privacy_loss_distribution
    if replaced:  # REPLACE_ONE doubles the sensitivity itself
        return library.from_gaussian_mechanism(
            multiplier,
            value_discretization_interval=interval,
            sampling_prob=rate,
            neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
        )
    directions = [1] if rate == 1 else [1, -1]
    return library.PrivacyLossDistribution(
        *[_on_grid(multiplier, rate, sign, interval) for sign in directions]
    )


def _on_grid(multiplier: float, rate: float, sign: int, interval: float) -> Any:
    r"""Return the losses of a sampled Gaussian against an unmoved one (sign 1), or the other way round (-1).

    The library's `from_gaussian_mechanism` gives the same, but inverts the loss in a loop over the grid, which takes
    ten times as long. The loss at x is :math:`\log(1 - q + q e^u)` with :math:`u = (-x - 1/2) / z^2`.
    """
    mechanisms = dp_accounting.pld.privacy_loss_mechanism
    kind = mechanisms.AdjacencyType.REMOVE if sign > 0 else mechanisms.AdjacencyType.ADD
    losses = mechanisms.GaussianPrivacyLoss(multiplier, sampling_prob=rate, adjacency_type=kind)
    bounds = losses.connect_dots_bounds()
    lowest, highest = (
        math.floor(bounds.epsilon_lower / interval),
        math.ceil(bounds.epsilon_upper / interval),
    )
    epsilons = interval * np.arange(lowest, highest + 1)
    with np.errstate(divide="ignore"):
        least = np.log1p(-rate)
        inside = sign * epsilons > least
        loss = sign * epsilons[inside]
        unsampled = loss - math.log(rate) + np.log(-np.expm1(least - loss))
    deltas = -np.expm1(np.minimum(epsilons, 0.0))
    x = -sign * (0.5 + multiplier**2 * unsampled)
    deltas[inside] = losses.mu_upper_cdf(x) - np.exp(epsilons[inside] + losses.mu_lower_log_cdf(x))
    pmf = dp_accounting.pld.pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        interval, lowest, highest, np.clip(deltas, 0.0, 1.0)
    )
    # The library takes the size of a sparse one to the power of the rounds, a number of up to a million digits.
    return pmf.to_dense_pmf()


def _gaussian_epsilon(plain: float, delta: float, repeats: int, replaced: bool) -> float:
    """Return the exact epsilon of one Gaussian, `repeats` times."""
    with np.errstate(divide="ignore"):  # it takes log(0) where delta is far from reached
        single = plain / (2 if replaced else 1) / math.sqrt(repeats)
        return float(dp_accounting.get_epsilon_gaussian(single, delta))


def _vanishing(plain: float, sampled: Levels) -> bool:
    """Whether some noise is too small for the squares that accountants need."""
    return min([plain, *(level for level, _ in sampled)]) < LEAST


@_remember
def sampled_divergences(
    multiplier: float, rate: float, most: int = ORDERS[-1]
) -> Float[np.ndarray, "orders"]:
    r"""Return the Rényi divergences of a Poisson-sampled Gaussian at the orders up to `most`, under zero-out.

    .. math:: (a - 1) D_a = \log \sum_k \binom{a}{k} (1 - q)^{a - k} q^k e^{k (k - 1) / 2 z^2}

    (Mironov, Talwar and Zhang, Rényi Differential Privacy of the Sampled Gaussian Mechanism, 2019). The library's value
    of it may round to 0 and below, so that large noise would cost nothing: here 1, the sum without exponentials, is
    taken out of the sum, which leaves all digits.
    """
    orders = orders_up_to(most)
    if rate == 1:
        return np.array(orders) / (2 * multiplier**2)
    divergences = np.empty(len(orders))
    for i, order in enumerate(orders):
        k = np.arange(2, order + 1)
        binomial = (
            math.lgamma(order + 1)
            - scipy.special.gammaln(k + 1)
            - scipy.special.gammaln(order - k + 1)
        )
        chance = binomial + (order - k) * math.log1p(-rate) + k * math.log(rate)
        exponent = k * (k - 1) / (2 * multiplier**2)
        excess = _log_sum(chance + exponent + np.log(-np.expm1(-exponent)))
        divergences[i] = np.logaddexp(0.0, excess) / (order - 1)
    return divergences


def orders_up_to(most: int) -> list[int]:
    """Return the Rényi orders up to one."""
    return [order for order in ORDERS if order <= most]


@_remember
def replaced_divergences(multiplier: float, rate: float) -> Float[np.ndarray, "orders"]:
    r"""Rényi divergences :math:`D_a(P_{+1} \| P_{-1})`, :math:`P_{\pm 1} = (1-q) N(0, z^2) + q N(\pm 1, z^2)`.

    By the trapezoidal rule with step h, whose error decays like :math:`e^{-2 \pi y / h}` for an integrand analytic
    within y of the real line: :math:`P_{-1}` has no zero within :math:`\pi z^2`, and steps of :math:`z^2 / 25` and
    :math:`z / 6` leave less than rounding error, which is added. Orders that need too many steps get the unsampled
    divergence, :math:`2 a / z^2`, which is no smaller (quasi-convexity).
    """
    z, q = multiplier, rate
    divergences = 2 * np.array(ORDERS) / z**2
    if q == 1:
        return divergences
    step = min(z / 6, z**2 / 25)
    for i, order in enumerate(ORDERS):
        first, last = -14 * z - 1, order + 14 * z  # the integrand's peaks lie from 0 to the order
        if (last - first) / step > 2e5:
            break
        x = np.arange(first, last, step)
        up, down = ((sign * x - 0.5) / z**2 for sign in (1, -1))
        below = _log_mixture(down, q)
        exponent = order * (_log_mixture(up, q) - below) + below - 0.5 * (x / z) ** 2
        most = exponent.max()
        total = most + math.log(np.exp(exponent - most).sum() * step / (z * math.sqrt(2 * math.pi)))
        divergences[i] = min(
            (max(total, 0.0) + 3e-14 * (1 + abs(total))) / (order - 1), divergences[i]
        )
    return divergences


def _log_mixture(u: Float[np.ndarray, "x"], rate: float) -> Float[np.ndarray, "x"]:
    """log(1 - q + q exp(u)), to full precision for small q."""
    small = np.log1p(rate * np.expm1(np.minimum(u, 30.0)))
    return np.where(u < 30, small, np.logaddexp(math.log1p(-rate), math.log(rate) + u))


def total_multiplier(multiplier: Float[np.ndarray, "R *C"]) -> Float[np.ndarray, "*C"]:
    r"""Unsampled rounds compose to one Gaussian: :math:`z^{-2} = \sum_t z_t^{-2}`."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.asarray(np.sum(multiplier**-2.0, axis=0) ** -0.5)


def round_down(
    values: Float[np.ndarray, "..."], most: int = _MOST_LEVELS
) -> Float[np.ndarray, "..."]:
    """Round down to at most `most` levels, besides 0 and infinity; the minimum stays exact."""
    finite = (values > 0) & (values < math.inf)
    if np.unique(values[finite]).size <= most:
        return values
    levels = np.geomspace(values[finite].min(), values[finite].max(), most)
    rounded = values.copy()
    rounded[finite] = levels[np.searchsorted(levels, values[finite] * (1 + 1e-9), side="right") - 1]
    return rounded


def _group_clients(view: View) -> tuple[Float[np.ndarray, "R K"], Int[np.ndarray, "#C"]]:
    """Distinct clients as columns (plain rounds in total, then each sampled round), and the column of each client.

    If there are too many, one column at least as exposed as every client.
    """
    plain = round_down(total_multiplier(view.multiplier[~view.hidden]), _MOST_TOTALS)
    sampled = view.multiplier[view.hidden]
    kinds, kind_of_client = np.unique(
        np.vstack([plain, round_down(sampled)]), axis=1, return_inverse=True
    )
    if sum(len(_levels(kind[1:])) for kind in kinds.T) > _MOST_WORK:
        worst = np.r_[plain.min(), round_down(sampled.min(axis=1))]
        return worst[:, None], np.zeros(1, int)
    return kinds, kind_of_client.reshape(-1)


def _levels(values: Float[np.ndarray, "R"]) -> Levels:
    levels, counts = np.unique(values[values < math.inf], return_counts=True)
    return tuple(zip(levels.tolist(), counts.tolist()))


def _interval(plain: float, sampled: Levels, rate: float, repeats: int, change: float) -> float:
    """Return the grid's spacing: small against one round's loss, and at most about a million points.

    It follows the rounds in powers of 2, so that few grids serve all evaluations of a run. Where a round's loss has
    the standard deviation s, a spacing of h adds about :math:`h^2 / 12 s^2` of an epsilon to it: 2e-4 for 0.05 s, the
    most, and 3e-5 for 0.02 s, below which little is gained.
    """
    levels, counts = np.array(sampled).T
    plain, levels = plain / change, levels / change
    spread = counts @ (rate / levels) ** 2
    total = math.sqrt(repeats * (spread + plain**-2.0))
    least = min(plain / math.sqrt(repeats), levels.min())
    longest = 10 / least + 0.5 / least**2
    scale = 2.0 ** math.floor(math.log2(max(1.0, total)))
    deviation = math.sqrt(spread / counts.sum())
    fine = 2.0 ** math.floor(math.log2(0.02 * deviation)) if deviation else 0.0
    return float(max(fine, min(0.05 * deviation, 5e-4 * scale), longest / 1e6))


@_remember
def without_replacement(
    multiplier: float, clients: int, size: int, most: int = ORDERS[-1]
) -> Float[np.ndarray, "orders"]:
    """Replace-one Rényi divergences of a Gaussian on `size` of the clients; they bound the zero-out ones."""
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
    r"""Rényi divergences of a Gaussian in one uniformly drawn round of b, against none; the larger direction.

    The pair :math:`P = \frac{1}{b} \sum_j N(e_j, z^2 I)` and :math:`Q = N(0, z^2 I)` in b dimensions dominates (Chua et
    al., Balls-and-Bins Sampling for DP-SGD, AISTATS 2025). With :math:`L_j = dN(e_j) / dQ`, independent under Q,

    .. math::
        E_Q\Big[\Big(\frac{1}{b} \sum_j L_j\Big)^a\Big] = \frac{a!}{b^a} [x^a]
            \Big( \sum_k \frac{e^{k (k-1) / 2 z^2}}{k!} x^k \Big)^b, \qquad
        E_Q\Big[\Big(\frac{1}{b} \sum_j L_j\Big)^{-s}\Big] = \frac{b^s}{\Gamma(s)} \int_0^\infty t^{s-1}
            E[e^{-t L_1}]^b \, dt,

    the integrals by the trapezoidal rule over log t and the normal variable of L. Orders above 256, and those whose
    integrand does not decay on the grid, get the unsampled divergence, :math:`a / 2 z^2`, which is no smaller.
    """
    orders = orders_up_to(most)
    z, plain = multiplier, np.array(orders) / (2 * multiplier**2)
    highest = max(order for order in orders if order <= 256)
    k = np.arange(highest + 1)
    term = k * (k - 1) / (2 * z**2) - scipy.special.gammaln(k + 1)
    power = _log_power(term, bins)
    u = np.arange(-45.0, 60.0, 0.02) - math.log(bins)
    x = np.arange(-14.0, 14.0, min(0.05, z / 10))
    weight = -0.5 * x**2 - np.logaddexp.reduce(-0.5 * x**2)
    likelihood = np.exp(x / z - 0.5 / z**2)
    transform = np.array([_log_sum(weight - math.exp(v) * likelihood) for v in u])
    divergences = plain.copy()
    for i, order in enumerate(orders):
        if order > highest:
            break
        up = scipy.special.gammaln(order + 1) - order * math.log(bins) + power[order]
        s = order - 1
        exponent = s * u + bins * transform
        if max(exponent[0], exponent[-1]) > exponent.max() - 40:
            continue
        down = (
            s * math.log(bins)
            - scipy.special.gammaln(s)
            + np.logaddexp.reduce(exponent)
            + math.log(u[1] - u[0])
        )
        larger = max(up, down, 0.0)
        divergences[i] = min((larger + 1e-10 * (1 + larger)) / s, plain[i])
    return divergences


def _log_sum(terms: Float[np.ndarray, "n"]) -> float:
    """Return the logarithm of a sum, from those of its terms."""
    largest = terms.max()
    return float(largest + math.log(np.exp(terms - largest).sum()))


def _log_power(term: Float[np.ndarray, "n"], power: int) -> Float[np.ndarray, "n"]:
    """Log-coefficients of a power of a series, from those of the series."""

    def product(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        return np.array([np.logaddexp.reduce(a[: n + 1] + b[n::-1]) for n in range(len(a))])

    result = np.r_[0.0, np.full(len(term) - 1, -math.inf)]
    while power:
        if power % 2:
            result = product(result, term)
        power //= 2
        term = product(term, term) if power else term
    return result
