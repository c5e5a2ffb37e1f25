"""PDP-FL: every client has a privacy budget of its own; the server tops noise up to a global one."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import optax
from jaxtyping import Float

from jaxfl._validate import check_fraction, check_numbers, checked, probability, show, up_to_infinity
from jaxfl.algorithms.fedavg import fedavg, sends_weights
from jaxfl.algorithms.padpfl import paper_noise, sound_noise, sound_upload_noise
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.accountants import Accountant, failure_probability, round_down
from jaxfl.privacy.accounting import calibrate_examples
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.server import Server
from jaxfl.types import Algorithm, Model, Terms, Tree


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
    preferences=partial(check_numbers, negative=True), cuts=partial(_steps, length=2), levels=partial(_steps, length=3)
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
    asked, level = check_numbers("budgets.epsilon", value[0], infinite=True), check_numbers("budgets.level", value[1])
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
    noise = _by_kind(budgets.epsilon, lambda budget: sound_upload_noise(budget, rounds, delta, accountant))
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
    sampling: Sampling = Full(),
    delta: float | None = None,
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
) -> Algorithm:
    r"""PDP-FL as published: clients send weights, with noise for the sensitivity 2C/m.

    .. math::
        w^{t+1} = \sum_{k \in \Omega_t} a_k (\mathrm{clip}_C(w_k) + N(0, \sigma_k^2)) + N(0, \sigma_D^2), \qquad
        \sigma_k = \frac{2 c C}{m \epsilon_k} \; (15), \qquad \sigma_A = \frac{2 c C \max a}{m \epsilon_{max}} \; (19)

    LDP-Fed, as read here, is one budget for all and `epsilon_max` infinite.

    Args:
        model: the network.
        budgets: as in `pdp_fl`.
        epsilon_max: global budget that the rule claims for one round; infinity: no noise by the server.
        clip: C, L2 bound on a client's weights.
        smallest: m, examples of the smallest client.
        aggregation: "printed": as in Algorithm 3, the clients' mean with a further factor 1/n for n participants,
            whose number `sampling` must fix; the server's noise, which comes after the mean, has no such factor.
        sampling: who takes part.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        local: how a client trains in a round.

    Guarantee: client-level, what that noise gives; the statement has each client's honest epsilon and the claim. The
        paper composes nothing, claims the sensitivity 2C/m (see `padpfl_paper`), and uses :math:`c / \epsilon` beyond
        where it holds.
    Deviations from the paper: those of `pdp_fl`, but for what is sent and for the kinds of budgets.
    References: as for `pdp_fl`; LDP-Fed: Truex et al., EdgeSys 2020.

    >>> from jaxfl.models import mlp
    >>> asked = personal_budgets(np.array([1.0, 5.0, 9.0]))
    >>> pdp_fl_paper(mlp((8, 8, 1), 10), budgets=asked, epsilon_max=5.0, clip=1.0, smallest=600).terms.claim[0]
    5.0
    """
    asked = budgets.epsilon
    delta = failure_probability(delta, asked.size)
    if aggregation == "printed" and not sampling.fixed:
        raise ValueError(f"sampling={sampling!r} with aggregation='printed': 1/n needs Full() or FixedSize(n)")
    count = sampling.expected(len(asked)) if aggregation == "printed" else 1.0
    z, *noise = (paper_noise(float(e), delta=delta, smallest=smallest) for e in (epsilon_max, *asked))
    mechanism = _by_level(budgets, sampling, clip, z * count, np.array(noise))  # the server divides by the count
    rule = "sensitivity 2C/m of weights to an example, rounds not composed; "
    rule += f"each client's own is {asked.min():.3g} to {asked.max():.3g}"
    terms = Terms(delta, (min(float(epsilon_max), float(asked.max())), rule))
    base = fedavg(model, local=local, mechanism=mechanism, terms=terms, name="pdp_fl_paper")
    method = sends_weights(base)
    if aggregation == "normalised":
        return method

    def server_update(server: Server, aggregate: Tree) -> Server:
        return method.server_update(server, optax.tree.scale(1 / count, aggregate))

    return method._replace(server_update=server_update)


@checked(epsilon=partial(check_numbers, infinite=True), rate=check_fraction, delta=probability)
def personal_examples(
    epsilon: Float[np.ndarray, "C"],
    *,
    clip: float,
    rate: float,
    steps: int,
    rounds: int,
    optimizer: optax.GradientTransformation = optax.sgd(0.05),
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
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: "rdp" asks for more noise than "pld", and takes less time.

    >>> private = personal_examples(np.array([1.0, 8.0]), clip=1.0, rate=0.1, steps=10, rounds=2)
    >>> private.noise_multiplier.round(2).tolist()
    [2.1, 0.68]
    """
    run = {"rate": rate, "steps": steps, "participations": rounds, "clients": len(epsilon), "delta": delta}
    noise = _by_kind(np.asarray(epsilon), lambda budget: calibrate_examples(budget, accountant=accountant, **run))
    return DPSGD(clip=clip, noise_multiplier=noise, rate=rate, steps=steps, optimizer=optimizer)


def _by_level(
    budgets: Budgets, sampling: Sampling, clip: float, noise_multiplier: float, noise: Float[np.ndarray, "C"]
) -> Mechanism:
    """A mean by level of what clients send with noise of their own, topped up by the server."""
    added = {"noise_multiplier": noise_multiplier, "client_noise": noise[None]}
    return Mechanism(clip=clip, weights=budgets.level, sampling=sampling, denominator="participants", **added)


def _by_kind(budgets: Float[np.ndarray, "C"], noise_fn: Callable[[float], float]) -> Float[np.ndarray, "C"]:
    """Noise for each client, calibrated once for each kind of budget."""
    kinds, kind_of_client = np.unique(round_down(budgets), return_inverse=True)
    return np.array([noise_fn(float(kind)) for kind in kinds])[kind_of_client]
