"""PDP-FL: a privacy budget for each client, and noise by the server for a global budget."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float

from jaxfl._support.checks import (
    check_delta,
    check_fraction,
    check_numbers,
    checked,
    show,
    up_to_infinity,
)
from jaxfl.algorithms.fedavg import GradientRule, Penalty, fedavg, sends_weights
from jaxfl.algorithms.padpfl import nbafl_noise, sound_noise, sound_upload_noise
from jaxfl.algorithms.server import Server
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.accounting.accountants import Accountant, failure_probability, round_down
from jaxfl.privacy.accounting.calibration import calibrate_examples
from jaxfl.privacy.accounting.observers import Observer, View
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.mechanisms.gaussian import RoundNumbers, Total
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.types import Algorithm, Ledger, Model, Terms, Tree

TopUp: TypeAlias = Literal["variances", "mean_level", "level_sum"]
"""Rules for the server's noise (see `pdp_fl_paper`)."""


class Budgets(NamedTuple):
    """Budgets and levels of the clients."""

    epsilon: Float[np.ndarray, "C"]
    """Largest epsilon of each client after all rounds."""
    level: Float[np.ndarray, "C"]
    """Public level by which the mean weighs each client."""


def _steps(name: str, value: Any, length: int) -> tuple[float, ...]:
    steps = check_numbers(name, value)
    if len(steps) != length or np.any(np.diff(steps) < 0):
        raise ValueError(
            f"{name} must be {length} numbers in ascending order, got {show(value)}. "
            f"Give {length} sorted numbers."
        )
    return tuple(steps.tolist())


@checked(
    preferences=partial(check_numbers, negative=True),
    cuts=partial(_steps, length=2),
    levels=partial(_steps, length=3),
)
def personal_budgets(
    preferences: Float[np.ndarray, "C"],
    *,
    rule: Literal["logarithm", "level"] = "logarithm",
    base: float = 2.0,
    cuts: tuple[float, float] = (3.5, 6.5),
    levels: tuple[float, float, float] = (2.0, 5.0, 8.0),
    floor: float = 0.1,
) -> Budgets:
    r"""Return the budgets and levels that follow from preferences R.

    - "logarithm": The budget is :math:`\epsilon_k = R_k \log_2 \epsilon` (7). The level follows
      from the cut points between budgets.
    - "level", Algorithm 2: The level :math:`\epsilon'_k` is low if :math:`R_k` is below the low
      level, high if :math:`R_k` is above the high level, and mid otherwise. The budget is
      :math:`\epsilon_k = R_k \epsilon'_k`.

    Args:
        preferences: R, one number for each client. Larger numbers ask for less privacy.
        rule: Rule for budgets and levels, as above.
        base: Epsilon in (7) for "logarithm", above 1. The default 2 makes budgets equal preferences
            above the floor.
        cuts: Cut points of "logarithm": the least budgets of the levels mid and high.
        levels: The levels low, mid and high.
        floor: Least budget. Smaller and negative budgets are raised to the floor, which bounds the
            noise.

    Raises:
        ValueError: `base` is at most 1, or `cuts` or `levels` are not in ascending order.

    >>> personal_budgets(np.array([1.0, 2.0, -0.3]), base=8.0)
    Budgets(epsilon=array([3. , 6. , 0.1]), level=array([2., 5., 2.]))
    """
    if rule == "level":
        low, mid, high = levels
        # Algorithm 2 compares the preferences with the levels themselves.
        level = np.where(preferences < low, low, mid)
        level = np.where(preferences > high, high, level)
        return Budgets(np.maximum(floor, preferences * level), level)
    if not base > 1:
        raise ValueError(
            f"base must be above 1, got {base!r}. Give a larger number, because budgets are "
            "R log2(base)."
        )
    # Eq. (7) gives the budgets, whose places between the cut points give the levels.
    epsilon = np.maximum(floor, preferences * math.log2(base))
    cuts_reached = np.searchsorted(cuts, epsilon, side="right")
    return Budgets(epsilon, np.array(levels)[cuts_reached])


def _check_budgets(name: str, value: Any) -> Budgets:
    """Require epsilons, which may be infinite, and finite levels, and return them as `Budgets`."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(
            f"{name} must be Budgets, got {show(value)}. Make them by personal_budgets, or give "
            "Budgets(epsilon, level)."
        )
    epsilon = check_numbers("budgets.epsilon", value[0], infinite=True)
    level = check_numbers("budgets.level", value[1])
    if epsilon.shape != level.shape:
        raise ValueError(
            f"{name} must have as many epsilons as levels, got {len(epsilon)} and {len(level)} in "
            f"{show(value)}. Give one of each for every client."
        )
    return Budgets(epsilon, level)


@checked(budgets=_check_budgets, epsilon_max=up_to_infinity, clip=up_to_infinity, delta=check_delta)
def pdp_fl(
    model: Model,
    *,
    budgets: Budgets,
    epsilon_max: float,
    rounds: int,
    clip: float,
    sampling: Sampling = Full(),
    delta: float | None = None,
    accountant: Accountant = "pld",
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
    penalty: Penalty | None = None,
    gradient: GradientRule | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> Algorithm:
    r"""Build PDP-FL: clients add noise for their own budgets, and the server for a global one.

    The aggregate is a mean in which levels :math:`\epsilon'` are the weights:

    .. math::
        w^{t+1} &= w^t + \sum_{k \in \Omega_t} a_k (\mathrm{clip}_C(w_k - w^t) + N(0, \sigma_k^2))
            + N(0, \sigma_D^2) \\
        a_k &= \frac{\epsilon'_k}{\sum_{j \in \Omega_t} \epsilon'_j} \\
        \sigma_D^2 &= \max\Big(0, \sigma_A^2 - \sum_k a_k^2 \sigma_k^2\Big)

    The accountant gives :math:`\sigma_k` for :math:`\epsilon_k` after T uploads, and
    :math:`\sigma_A` for :math:`\epsilon_{max}` after T rounds.

    Args:
        model: The network.
        budgets: Budgets and levels, from `personal_budgets` or your own. They must be public and
            independent of data.
        epsilon_max: Global budget. Infinity means no noise by the server.
        rounds: T, the number of rounds. A run may be shorter.
        clip: C, L2 bound on a client's update.
        sampling: Rule that draws the participants of each round. The default draws all clients.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.
        accountant: Accountant of the calibration. "rdp" asks for more noise than "pld".
        local: Local training of a client in one round. A `DPSGD` protects single examples, as the
            paper intends (see `personal_examples`). If `budgets` and `epsilon_max` are infinite,
            the `DPSGD` adds all noise.
        penalty: Function of the client's parameters and the broadcast ones, whose value is added to
            the loss. None adds nothing.
        gradient: Function that changes how a local step computes its gradient, such as
            `jaxfl.local.sam.sam(0.5)`. None takes the gradient of the batch.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.

    Guarantee: Client-level privacy. Uploads have replace-one adjacency and sensitivity 2C. No
        client's epsilon exceeds its budget, however often the client takes part. Sums and
        broadcasts have zero-out adjacency and sensitivity :math:`a_k C`, by the Gaussian mechanism
        composed over the rounds, without amplification. The statement has each client's epsilon.
    Deviations from the paper: Clients send updates, not weights. Data shares are equal. The server
        tops up by variances. Equation (20) takes the clients' noise for N times weaker than in a
        mean of N. Algorithm 3 compares a sum of levels with a budget. Line 13 of Algorithm 2 drops
        c. Budgets are rounded down to at most 64 kinds.
    References: Yin, Qu, Federated Learning Algorithm Based on Personalized Differential Privacy,
        Journal of Computer Applications 2022.

    >>> from jaxfl.models import mlp
    >>> asked = personal_budgets(np.array([1.0, 5.0, 9.0]))
    >>> method = pdp_fl(mlp((8, 8, 1), 10), budgets=asked, epsilon_max=5.0, rounds=2, clip=1.0)
    >>> method.mechanism.client_noise.round(1).tolist(), method.mechanism.weights.tolist()
    ([[10.6, 2.5, 1.5]], [2.0, 5.0, 8.0])
    """
    delta = failure_probability(delta, budgets.epsilon.size)

    def noise_of(budget: float) -> float:
        return sound_upload_noise(budget, rounds, delta, accountant)

    noise = _by_kind(budgets.epsilon, noise_of)
    z = sound_noise(epsilon_max, rounds, delta, accountant)
    mechanism = _by_level(budgets, sampling, clip, z, noise)
    return fedavg(
        model,
        local=local,
        penalty=penalty,
        gradient=gradient,
        server_optimizer=server_optimizer,
        mechanism=mechanism,
        terms=Terms(delta),
        name="pdp_fl",
    )


@checked(budgets=_check_budgets, epsilon_max=up_to_infinity, clip=up_to_infinity, delta=check_delta)
def pdp_fl_paper(
    model: Model,
    *,
    budgets: Budgets,
    epsilon_max: float,
    clip: float,
    smallest: int,
    aggregation: Literal["normalised", "printed"] = "normalised",
    top_up: TopUp = "variances",
    sampling: Sampling = Full(),
    delta: float | None = None,
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
) -> Algorithm:
    r"""Build PDP-FL as published: clients send weights, with noise for the sensitivity 2C/m.

    .. math::
        w^{t+1} &= \sum_{k \in \Omega_t} a_k (\mathrm{clip}_C(w_k) + N(0, \sigma_k^2))
            + N(0, \sigma_D^2) \\
        \sigma_k &= \frac{2 c C}{m \epsilon_k} \; (15) \\
        \sigma_A &= \frac{2 c C \max a}{m \epsilon_{max}} \; (19)

    `top_up` chooses the rule for the server's noise. The noise may follow from variances,
    :math:`\sigma_D^2 = \max(0, \sigma_A^2 - \sum_k a_k^2 \sigma_k^2)`. It may also follow from
    levels, by Algorithm 3's test and (20), with n participants:

    .. math:: \sigma_D = \frac{2 c C}{m n} \sqrt{\max(0, \epsilon_{max}^{-2} - \epsilon^{-2})}

    LDP-Fed, as read here, has one budget for all clients and an infinite `epsilon_max`. Infinite
    `budgets` give GDP-FL, with the server's noise :math:`2 c C / (m n \epsilon_{max})`.

    Args:
        model: The network.
        budgets: Budgets and levels, from `personal_budgets` or your own (see `pdp_fl`).
        epsilon_max: Global budget that the rule claims for one round. Infinity means no noise by
            the server.
        clip: C, L2 bound on a client's weights.
        smallest: m, the number of examples of the smallest client.
        aggregation: "normalised" is the mean above. "printed" divides the clients' mean by n, as in
            Algorithm 3, for n participants. The server's noise comes after the mean, and is not
            divided. `sampling` must fix n.
        top_up: "variances" is the first rule above. "mean_level" and "level_sum" are (20), whose
            :math:`\epsilon` is the mean or (line 2) the sum of the participants' levels. There is
            no noise if :math:`\epsilon` is at most `epsilon_max`. `sampling` must fix n.
        sampling: Rule that draws the participants of each round. The default draws all clients.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.
        local: Optimizer, batches and epochs of a client's training in a round. A `DPSGD` protects
            single examples.

    Guarantee: Client-level privacy, as far as the published noise gives it. The statement has each
        client's honest epsilon and the claim. The paper composes no rounds, claims the sensitivity
        2C/m (see `padpfl_paper`), and uses :math:`c / \epsilon` outside its range of validity.
        Noise by levels varies with the cohort, and the least such noise counts.
    Deviations from the paper: The deviations of `pdp_fl` apply, except for sent updates and
        rounded budgets. N of (19) and (20) is the number of participants, as in (4). The test
        "eps < eps" is read as epsilon < epsilon_max.
    References: Yin, Qu, Federated Learning Algorithm Based on Personalized Differential Privacy,
        Journal of Computer Applications 2022. LDP-Fed: Truex et al., EdgeSys 2020.

    Raises:
        ValueError: `aggregation` or `top_up` needs a `sampling` that fixes n.

    >>> from jaxfl.models import mlp
    >>> asked = personal_budgets(np.array([1.0, 5.0, 9.0]))
    >>> model = mlp((8, 8, 1), 10)
    >>> method = pdp_fl_paper(model, budgets=asked, epsilon_max=5.0, clip=1.0, smallest=600)
    >>> method.terms.claim[0]
    5.0
    """
    asked = budgets.epsilon
    delta = failure_probability(delta, asked.size)
    if not sampling.fixed and (aggregation == "printed" or top_up != "variances"):
        raise ValueError(
            f"sampling must fix the number of participants with aggregation={aggregation!r} and "
            f"top_up={top_up!r}, got {sampling!r}. Give Full() or FixedSize(n)."
        )
    participants = 1.0
    if sampling.fixed:
        participants = sampling.expected(len(asked))
    divisor = 1.0
    # Algorithm 3 divides the clients' mean by n again.
    if aggregation == "printed":
        divisor = participants

    def noise_of(budget: float) -> float:
        return float(nbafl_noise(float(budget), delta=delta, smallest=smallest))

    # The server divides the aggregate, and with it its own noise, by `divisor`.
    z = noise_of(epsilon_max) * divisor
    noise = np.array([noise_of(budget) for budget in asked])
    rule = _level_rule(top_up, z, participants, epsilon_max)
    mechanism = _by_level(budgets, sampling, clip, z, noise, rule)
    why = (
        "sensitivity 2C/m of weights to an example, without composition of rounds, and "
        f"{asked.min():.3g} to {asked.max():.3g} for single clients"
    )
    claim = min(float(epsilon_max), float(asked.max()))
    terms = Terms(delta, (claim, why))
    base = fedavg(model, local=local, mechanism=mechanism, terms=terms, name="pdp_fl_paper")
    method = sends_weights(base)
    if aggregation == "normalised":
        return method

    def server_update(server: Server, aggregate: Tree) -> Server:
        return method.server_update(server, optax.tree.scale(1 / divisor, aggregate))

    return method._replace(server_update=server_update)


@checked(epsilon=check_numbers, rate=check_fraction, delta=check_delta)
def personal_examples(
    epsilon: Float[np.ndarray, "C"],
    *,
    clip: float,
    rate: float,
    steps: int,
    rounds: int,
    optimizer: optax.GradientTransformation = optax.sgd(0.05),
    examples: int | None = None,
    delta: float | None = None,
    accountant: Accountant = "pld",
) -> DPSGD:
    """Return local steps that keep the examples of each client within the client's own budget.

    Each client has its own noise multiplier [C]. The budget holds however often the client takes
    part.

    Args:
        epsilon: Finite budget of each client [C], for one example after all rounds, under zero-out
            adjacency.
        clip: L2 bound on the gradient of one example.
        rate: Probability that an example is in a batch.
        steps: Number of local steps per round.
        rounds: T, the number of rounds.
        optimizer: Optimizer of the local steps.
        examples: Number of training examples of all clients together, for the default delta. None
            gives a delta of 1e-5, which suits up to 10,000 examples.
        delta: Failure probability. None stands for min(1e-5, 1 / (10 n)) for n examples.
        accountant: Accountant of the calibration. "rdp" asks for more noise than "pld", and takes
            less time.

    Raises:
        ValueError: `epsilon` is not a vector of finite numbers above 0.

    >>> private = personal_examples(np.array([1.0, 8.0]), clip=1.0, rate=0.1, steps=10, rounds=2)
    >>> private.noise_multiplier.round(2).tolist()
    [2.1, 0.68]
    """

    def noise_of(budget: float) -> float:
        return calibrate_examples(
            budget,
            rate=rate,
            steps=steps,
            participations=rounds,
            examples=examples,
            delta=delta,
            accountant=accountant,
        )

    noise = _by_kind(np.asarray(epsilon), noise_of)
    return DPSGD(clip=clip, noise_multiplier=noise, rate=rate, steps=steps, optimizer=optimizer)


class LevelNoise(NamedTuple):
    r"""Rule for the server's noise, by the participants' levels.

    Args:
        scale: :math:`2 c / (m n)`, std of the noise on the mean at epsilon 1, in units of C.
        participants: Divisor of the sum of levels that gives :math:`\epsilon`: n, or 1.
        epsilon_max: Global budget in Algorithm 3's test.
    """

    scale: float
    participants: float
    epsilon_max: float

    def std(self, level_sum: Float[Array, ""] | float) -> Float[Array, ""]:
        """Return the std of the noise on the weighted sum, in units of C.

        The std grows with the sum of the participants' levels.
        """
        # Eq. (20) gives the noise on the mean, which times the sum of levels is that on the sum.
        missing = self.epsilon_max**-2 - (self.participants / level_sum) ** 2
        return self.scale * level_sum * jnp.sqrt(jnp.maximum(0.0, missing))


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseByLevel(Mechanism):
    """Mechanism that adds noise by the participants' levels.

    `noise_multiplier` is the least noise of any cohort.
    """

    rule: LevelNoise = LevelNoise(0.0, 1.0, math.inf)  # noqa: RUF009 (immutable)

    def top_up(self, numbers: RoundNumbers, total: Total) -> Float[Array, ""]:
        """Return the std over C of the noise, from the sum of the cohort's levels (its weights)."""
        del numbers
        return self.rule.std(total.weight)

    @property
    def server_noisy(self) -> bool:
        """True, because a cohort may get noise even if another one gets none."""
        return True

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """Return the view of `Mechanism`, without amplification if the clients' noise differs.

        The server does not top different noise up to one level, so the sum shows who takes part.
        """
        view = super().view(ledger, observer, replaced=replaced, one_round=one_round)
        noise = self.client_noise_table
        if (noise == noise[:, :1]).all():
            return view
        return view._replace(amplified=None)


def _level_rule(
    top_up: TopUp, noise_multiplier: float, participants: float, epsilon_max: float
) -> LevelNoise | None:
    """Return the rule by levels, or None if the server's noise follows from variances.

    Args:
        top_up: Choice of the rule, as in `pdp_fl_paper`.
        noise_multiplier: The server's noise at `epsilon_max`, if clients add none.
        participants: n, the number of participants.
        epsilon_max: Global budget. An infinite one needs no noise and no rule.
    """
    if top_up == "variances" or math.isinf(epsilon_max):
        return None
    # By (20), epsilon is the mean of the levels. By line 2 of Algorithm 3, it is their sum.
    level_divisor = participants if top_up == "mean_level" else 1.0
    # The noise is in proportion to 1 / epsilon, so this product is the noise at epsilon 1.
    return LevelNoise(noise_multiplier * epsilon_max / participants, level_divisor, epsilon_max)


def _by_level(
    budgets: Budgets,
    sampling: Sampling,
    clip: float,
    noise_multiplier: float,
    noise: Float[np.ndarray, "C"],
    rule: LevelNoise | None = None,
) -> Mechanism:
    """Build the mechanism of a mean by level, in which clients add noise of their own.

    The server tops this noise up to `noise_multiplier`, or adds noise by `rule`.
    """
    shared: dict[str, Any] = {
        "clip": clip,
        "weights": budgets.level,
        "client_noise": noise[None],
        "sampling": sampling,
        "denominator": "participants",
    }
    if rule is None:
        return Mechanism(noise_multiplier=noise_multiplier, **shared)
    levels = np.sort(budgets.level)
    # A rule comes with a sampler that fixes n, so the expected number is n itself.
    participants = int(sampling.expected(len(levels)))
    # The cohort with the lowest levels gets the least noise.
    least = float(rule.std(levels[:participants].sum()))
    # A noise multiplier is relative to C times the largest weight, and the weights are levels.
    return NoiseByLevel(noise_multiplier=least / levels[-1], rule=rule, **shared)


def _by_kind(
    budgets: Float[np.ndarray, "C"], noise_fn: Callable[[float], float]
) -> Float[np.ndarray, "C"]:
    """Return the noise of each client, calibrated for its budget.

    Budgets are first rounded down to at most 64 distinct values.
    """
    # Every kind is calibrated once, so few kinds save time. Rounding down only adds noise.
    kinds, kind_of_client = np.unique(round_down(budgets), return_inverse=True)
    noise = np.array([noise_fn(float(kind)) for kind in kinds])
    return noise[kind_of_client]
