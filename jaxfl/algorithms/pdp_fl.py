"""PDP-FL: every client has a privacy budget of its own; the server tops noise up to a global one."""

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

from jaxfl._validate import (
    check_fraction,
    check_numbers,
    checked,
    probability,
    show,
    up_to_infinity,
)
from jaxfl.algorithms.fedavg import fedavg, sends_weights
from jaxfl.algorithms.padpfl import nbafl_noise, sound_noise, sound_upload_noise
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.accountants import Accountant, failure_probability, round_down
from jaxfl.privacy.accounting import calibrate_examples
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.mechanisms.gaussian import RoundNumbers, Total
from jaxfl.privacy.observers import Observer, View
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.server import Server
from jaxfl.types import Algorithm, Ledger, Model, Terms, Tree

TopUp: TypeAlias = Literal["variances", "mean_level", "level_sum"]


class Budgets(NamedTuple):
    """What clients ask for: epsilon for the whole run, and the public level that weights them."""

    epsilon: Float[np.ndarray, "C"]
    level: Float[np.ndarray, "C"]


def _steps(name: str, value: Any, length: int) -> tuple[float, ...]:
    steps = check_numbers(name, value)
    if len(steps) != length or np.any(np.diff(steps) < 0):
        raise ValueError(f"{name}={show(value)}: give {length} numbers in ascending order")
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
    r"""Turn preferences R into budgets, and those into levels.

    - "logarithm": :math:`\epsilon_k = R_k \log_2 \epsilon` (7), with a level by the cut points between budgets;
    - "level", Algorithm 2: :math:`\epsilon'_k` is low where R_k < low, high where R_k > high, else mid, and
      :math:`\epsilon_k = R_k \epsilon'_k`.

    Args:
        preferences: R; larger is less private.
        rule: as above.
        base: epsilon in (7), above 1; at 2 a budget equals the preference.
        cuts: "logarithm": budgets from which the level is mid, and high.
        levels: low, mid, high.
        floor: the least budget; smaller and negative ones are raised to it, which bounds the largest noise.

    >>> personal_budgets(np.array([1.0, 2.0, -0.3]), base=8.0)
    Budgets(epsilon=array([3. , 6. , 0.1]), level=array([2., 5., 2.]))
    """
    table = np.array(levels)
    if rule == "level":
        level = table[np.where(preferences < levels[0], 0, np.where(preferences > levels[2], 2, 1))]
        return Budgets(np.maximum(floor, preferences * level), level)
    if not base > 1:
        raise ValueError(f"base={base!r}: budgets are R log2(base), so give a number above 1")
    epsilon = np.maximum(floor, preferences * math.log2(base))
    return Budgets(epsilon, table[np.searchsorted(cuts, epsilon, side="right")])


def _check_budgets(name: str, value: Any) -> Budgets:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError(f"{name}={show(value)}: give Budgets, from `personal_budgets` or your own")
    asked, level = (
        check_numbers("budgets.epsilon", value[0], infinite=True),
        check_numbers("budgets.level", value[1]),
    )
    if asked.shape != level.shape:
        raise ValueError(
            f"{name}={show(value)}: {len(asked)} epsilons, {len(level)} levels, give one of each per client"
        )
    return Budgets(asked, level)


@checked(budgets=_check_budgets, epsilon_max=up_to_infinity, clip=up_to_infinity, delta=probability)
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
    **options: Any,
) -> Algorithm:
    r"""PDP-FL: personal noise at the clients, a weighted mean by level, and the server's noise on top.

    .. math::
        w^{t+1} = w^t + \sum_{k \in \Omega_t} a_k (\mathrm{clip}_C(w_k - w^t) + N(0, \sigma_k^2)) + N(0, \sigma_D^2), \\
        a_k = \frac{\epsilon'_k}{\sum_{j \in \Omega_t} \epsilon'_j}, \qquad
        \sigma_D^2 = \max\Big(0, \sigma_A^2 - \sum_k a_k^2 \sigma_k^2\Big)

    The accountant gives :math:`\sigma_k` for :math:`\epsilon_k` after T uploads, and :math:`\sigma_A` for
    :math:`\epsilon_{max}` after T rounds.

    Args:
        model: the network.
        budgets: from `personal_budgets`, or your own; public, independent of data.
        epsilon_max: global budget; infinity: no noise by the server.
        rounds: T; a run may be shorter.
        clip: C, L2 bound on a client's update.
        sampling: who takes part.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: for the calibration; "rdp" asks for more noise than "pld".
        options: those of `fedavg`; a `DPSGD` as `local` protects single examples, as the paper means to (see
            `personal_examples`). Infinite `budgets` and `epsilon_max` then leave all noise to it.

    Guarantee: client-level. Uploads: replace-one, sensitivity 2C; no client's epsilon exceeds its budget, however often
        it takes part. Sums and broadcasts: zero-out, sensitivity :math:`a_k C`, by the Gaussian mechanism composed over
        the rounds, without amplification. The statement has each client's epsilon.
    Deviations from the paper: updates are sent, not weights. Equal data shares. The server tops up by variances; (20)
        takes the clients' noise for N times weaker than a mean of N has it, and Algorithm 3 compares a sum of levels
        with a budget. Line 13 of Algorithm 2 drops c. There are at most 64 kinds of budgets, rounded down.
    References: Yin, Qu, Federated Learning Algorithm Based on Personalized Differential Privacy, Journal of Computer
        Applications 2022.

    >>> from jaxfl.models import mlp
    >>> asked = personal_budgets(np.array([1.0, 5.0, 9.0]))
    >>> method = pdp_fl(mlp((8, 8, 1), 10), budgets=asked, epsilon_max=5.0, rounds=2, clip=1.0)
    >>> method.mechanism.client_noise.round(1).tolist(), method.mechanism.weights.tolist()
    ([[10.6, 2.5, 1.5]], [2.0, 5.0, 8.0])
    """
    delta = failure_probability(delta, budgets.epsilon.size)
    noise = _by_kind(
        budgets.epsilon, lambda budget: sound_upload_noise(budget, rounds, delta, accountant)
    )
    z = sound_noise(epsilon_max, rounds, delta, accountant)
    mechanism = _by_level(budgets, sampling, clip, z, noise)
    return fedavg(model, mechanism=mechanism, terms=Terms(delta), name="pdp_fl", **options)


@checked(budgets=_check_budgets, epsilon_max=up_to_infinity, clip=up_to_infinity, delta=probability)
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
    r"""PDP-FL as published: clients send weights, with noise for the sensitivity 2C/m.

    .. math::
        w^{t+1} = \sum_{k \in \Omega_t} a_k (\mathrm{clip}_C(w_k) + N(0, \sigma_k^2)) + N(0, \sigma_D^2), \qquad
        \sigma_k = \frac{2 c C}{m \epsilon_k} \; (15), \qquad \sigma_A = \frac{2 c C \max a}{m \epsilon_{max}} \; (19)

    By `top_up`, the server's noise follows from variances, :math:`\sigma_D^2 = \max(0, \sigma_A^2 - \sum_k a_k^2
    \sigma_k^2)`, or from levels, by Algorithm 3's test and (20), with n participants:

    .. math:: \sigma_D = \frac{2 c C}{m n} \sqrt{\max(0, \epsilon_{max}^{-2} - \epsilon^{-2})}

    LDP-Fed, as read here, is one budget for all and `epsilon_max` infinite; infinite `budgets` leave GDP-FL, with the
    server's noise :math:`2 c C / (m n \epsilon_{max})`.

    Args:
        model: the network.
        budgets: as in `pdp_fl`.
        epsilon_max: global budget that the rule claims for one round; infinity: no noise by the server.
        clip: C, L2 bound on a client's weights.
        smallest: m, examples of the smallest client.
        aggregation: "printed": as in Algorithm 3, the clients' mean with a further factor 1/n for n participants,
            whose number `sampling` must fix; the server's noise, which comes after the mean, has no such factor.
        top_up: "variances": as above; "mean_level", "level_sum": (20), for the mean or (line 2) the sum of the
            participants' levels as epsilon, none where that is at most `epsilon_max`; `sampling` must fix n.
        sampling: who takes part.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        local: how a client trains in a round.

    Guarantee: client-level, what that noise gives; the statement has each client's honest epsilon and the claim. The
        paper composes nothing, claims the sensitivity 2C/m (see `padpfl_paper`), and uses :math:`c / \epsilon` beyond
        where it holds. Of noise by levels, which varies with the cohort, the least counts.
    Deviations from the paper: those of `pdp_fl`, but for what is sent and for the kinds of budgets. N of (19) and (20)
        is the number of participants, as in (4). The test's "eps < eps" is read as epsilon < epsilon_max.
    References: as for `pdp_fl`; LDP-Fed: Truex et al., EdgeSys 2020.

    >>> from jaxfl.models import mlp
    >>> asked = personal_budgets(np.array([1.0, 5.0, 9.0]))
    >>> pdp_fl_paper(mlp((8, 8, 1), 10), budgets=asked, epsilon_max=5.0, clip=1.0, smallest=600).terms.claim[0]
    5.0
    """
    asked = budgets.epsilon
    delta = failure_probability(delta, asked.size)
    if not sampling.fixed and (aggregation == "printed" or top_up != "variances"):
        which = f"aggregation={aggregation!r}, top_up={top_up!r}"
        raise ValueError(f"sampling={sampling!r} with {which}: 1/n needs Full() or FixedSize(n)")
    participants = sampling.expected(len(asked)) if sampling.fixed else 1.0
    count = participants if aggregation == "printed" else 1.0
    z, *noise = (
        float(nbafl_noise(float(e), delta=delta, smallest=smallest)) for e in (epsilon_max, *asked)
    )
    z *= count  # the server divides by it
    rule = None
    if top_up != "variances" and math.isfinite(epsilon_max):
        rule = LevelNoise(
            z * epsilon_max / participants,
            participants if top_up == "mean_level" else 1.0,
            epsilon_max,
        )
    mechanism = _by_level(budgets, sampling, clip, z, np.array(noise), rule)
    why = "sensitivity 2C/m of weights to an example, rounds not composed; "
    why += f"each client's own is {asked.min():.3g} to {asked.max():.3g}"
    terms = Terms(delta, (min(float(epsilon_max), float(asked.max())), why))
    base = fedavg(model, local=local, mechanism=mechanism, terms=terms, name="pdp_fl_paper")
    method = sends_weights(base)
    if aggregation == "normalised":
        return method

    def server_update(server: Server, aggregate: Tree) -> Server:
        return method.server_update(server, optax.tree.scale(1 / count, aggregate))

    return method._replace(server_update=server_update)


@checked(epsilon=check_numbers, rate=check_fraction, delta=probability)
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
    """Local steps that keep every client's examples within the client's own budget, however often it takes part.

    Args:
        epsilon: budgets of the clients, for the whole run, of an example.
        clip: L2 bound on the gradient of one example.
        rate: probability that an example is in a batch.
        steps: local steps per round.
        rounds: T.
        optimizer: for the local steps.
        examples: training examples of all clients, for the default delta; None: up to 10,000.
        delta: failure probability; None: min(1e-5, 1 / (10 examples)).
        accountant: "rdp" asks for more noise than "pld", and takes less time.

    >>> private = personal_examples(np.array([1.0, 8.0]), clip=1.0, rate=0.1, steps=10, rounds=2)
    >>> private.noise_multiplier.round(2).tolist()
    [2.1, 0.68]
    """
    run = {
        "rate": rate,
        "steps": steps,
        "participations": rounds,
        "examples": examples,
        "delta": delta,
    }
    noise = _by_kind(
        np.asarray(epsilon), lambda budget: calibrate_examples(budget, accountant=accountant, **run)
    )
    return DPSGD(clip=clip, noise_multiplier=noise, rate=rate, steps=steps, optimizer=optimizer)


class LevelNoise(NamedTuple):
    r"""The server's noise by levels.

    Args:
        scale: :math:`2 c / (m n)`, std on the mean over C at epsilon 1.
        participants: what the sum of levels is divided by for :math:`\epsilon`.
        epsilon_max: of Algorithm 3's test.
    """

    scale: float
    participants: float
    epsilon_max: float

    def std(self, level_sum: Float[Array, ""] | float) -> Float[Array, ""]:
        """On the weighted sum, over C; it grows with the sum of the participants' levels."""
        missing = self.epsilon_max**-2 - (self.participants / level_sum) ** 2
        return self.scale * level_sum * jnp.sqrt(jnp.maximum(0.0, missing))


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseByLevel(Mechanism):
    """Adds noise by the participants' levels; `noise_multiplier` is the least that any cohort gets."""

    rule: LevelNoise = LevelNoise(0.0, 1.0, math.inf)  # noqa: RUF009 (immutable)

    def top_up(self, numbers: RoundNumbers, total: Total) -> Float[Array, ""]:
        """By the cohort's sum of levels, its weight."""
        del numbers
        return self.rule.std(total.weight)

    @property
    def server_noisy(self) -> bool:
        """Whether any cohort may get noise."""
        return True

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """Without amplification where clients' noise differs: it is not topped up, so that the sum shows who is in."""
        view = super().view(ledger, observer, replaced=replaced, one_round=one_round)
        noise = self.client_noise_table
        return view if (noise == noise[:, :1]).all() else view._replace(amplified=None)


def _by_level(
    budgets: Budgets,
    sampling: Sampling,
    clip: float,
    noise_multiplier: float,
    noise: Float[np.ndarray, "C"],
    rule: LevelNoise | None = None,
) -> Mechanism:
    """A mean by level of what clients send with noise of their own; the server tops it up, or adds noise by a rule."""
    levels = np.sort(budgets.level)
    shared: dict[str, Any] = {"clip": clip, "weights": budgets.level, "client_noise": noise[None]}
    shared |= {"sampling": sampling, "denominator": "participants"}
    if rule is None:
        return Mechanism(noise_multiplier=noise_multiplier, **shared)
    least = float(rule.std(levels[: int(sampling.expected(len(levels)))].sum()))
    return NoiseByLevel(noise_multiplier=least / levels[-1], rule=rule, **shared)


def _by_kind(
    budgets: Float[np.ndarray, "C"], noise_fn: Callable[[float], float]
) -> Float[np.ndarray, "C"]:
    """Noise for each client, calibrated once for each kind of budget."""
    kinds, kind_of_client = np.unique(round_down(budgets), return_inverse=True)
    return np.array([noise_fn(float(kind)) for kind in kinds])[kind_of_client]
