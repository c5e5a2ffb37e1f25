"""PDP-FL: every client has a privacy budget of its own; the server tops noise up to a global one."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import optax
from jaxtyping import Float

from jaxfl._validate import check_fraction, check_numbers, checked, probability, show, up_to_infinity
from jaxfl.algorithms.fedavg import fedavg, refuse_server_optimizer, sends_weights
from jaxfl.algorithms.padpfl import paper_noise, sound_noise, sound_upload_noise
from jaxfl.privacy.accountants import Accountant, round_down
from jaxfl.privacy.accounting import calibrate_examples
from jaxfl.privacy.mechanism import Full, Mechanism, PerExample, Poisson, Sampling, default_delta
from jaxfl.server import Server
from jaxfl.types import Algorithm, Model, Tree


class Budgets(NamedTuple):
    """What clients ask for: epsilon for the whole run, and the level that they show and are weighted by."""

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
        rule: which of the two.
        base: epsilon in (7), above 1; at 2 a budget is the preference itself.
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
    fidelity: Literal["sound", "paper"] = "sound",
    aggregation: Literal["normalised", "printed"] = "normalised",
    smallest: int | None = None,
    sampling: Sampling = Full(),
    delta: float | None = None,
    accountant: Accountant = "pld",
    examples: PerExample | None = None,
    **options: Any,
) -> Algorithm:
    r"""PDP-FL: personal noise at the clients, a weighted mean by level, and the server's noise on top.

    .. math::
        w^{t+1} = \sum_{k \in \Omega_t} a_k (\mathrm{clip}_C(w_k) + N(0, \sigma_k^2)) + N(0, \sigma_D^2), \qquad
        a_k = \frac{\epsilon'_k}{\sum_{j \in \Omega_t} \epsilon'_j}, \qquad
        \sigma_D^2 = \max\Big(0, \sigma_A^2 - \sum_k a_k^2 \sigma_k^2\Big)

    `paper` sends weights, with :math:`\sigma_k = 2 c C / (m \epsilon_k)` (15) and
    :math:`\sigma_A = 2 c C \max a / (m \epsilon_{max})` (19). `sound` sends updates, and takes both from the
    accountant: :math:`\sigma_k` for :math:`\epsilon_k` after T uploads, :math:`\sigma_A` for
    :math:`\epsilon_{max}` after T rounds. LDP-Fed, as read here, is one budget for all and `epsilon_max` infinite.

    Args:
        model: the network.
        budgets: from `personal_budgets`, or your own; public, independent of data.
        epsilon_max: global budget (`paper`: what its rule claims for one round); infinity: no noise by the server.
        rounds: T; a run may be shorter.
        clip: C, L2 bound on what a client sends: its update (`paper`: its weights).
        fidelity: which of the two.
        aggregation: "printed": as Algorithm 3 has it, the clients' mean with a further factor 1/n for n participants,
            whose number `sampling` must fix; the server's noise, which comes after the mean, has no such factor.
        smallest: `paper`: m, examples of the smallest client.
        sampling: who takes part.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: `sound`: what the noise is calibrated with; "rdp" asks for more than "pld".
        examples: local steps that protect single examples, as the paper means to (see `personal_examples`); None: none.
            Infinite `budgets` and `epsilon_max` then leave them alone.
        options: those of `fedavg`; `server_optimizer` in `sound` only.

    Guarantee: client-level. Uploads: replace-one, sensitivity 2C; in `sound` no client's epsilon exceeds its budget,
        however often it takes part. Sums and broadcasts: zero-out, sensitivity :math:`a_k C`, by the Gaussian mechanism
        composed over the rounds, without amplification. The statement has each client's epsilon. The paper composes
        nothing, claims the sensitivity 2C/m (see `padpfl`), and uses :math:`c / \epsilon` beyond where it holds.
    Deviations from the paper: equal data shares. The server tops up by variances; (20) takes the clients' noise for
        N times weaker than a mean of N has it, and Algorithm 3 compares a sum of levels with a budget. Line 13 of
        Algorithm 2 drops c. In `sound` there are at most 64 kinds of budgets, rounded down.
    References: Yin, Qu, Federated Learning Algorithm Based on Personalized Differential Privacy, Journal of Computer
        Applications 2022; LDP-Fed: Truex et al., EdgeSys 2020.

    >>> from jaxfl.models import mlp
    >>> asked = personal_budgets(np.array([1.0, 5.0, 9.0]))
    >>> method = pdp_fl(mlp((8, 8, 1), 10), budgets=asked, epsilon_max=5.0, rounds=2, clip=1.0)
    >>> method.mechanism.client_noise.round(1).tolist(), method.mechanism.weights.tolist()
    ([[10.6, 2.5, 1.5]], [2.0, 5.0, 8.0])
    """
    asked, level = budgets
    delta = default_delta(asked.size) if delta is None else delta
    claim = None
    if fidelity == "paper":
        refuse_server_optimizer(options, f"fidelity={fidelity!r}")
        noise = np.array([paper_noise(float(e), delta=delta, smallest=smallest) for e in asked])
        z = paper_noise(epsilon_max, delta=delta, smallest=smallest)
        own = f"each client's own is {asked.min():.3g} to {asked.max():.3g}"
        rule = f"sensitivity 2C/m of weights to an example, rounds not composed; {own}"
        claim = min(float(epsilon_max), float(asked.max())), rule
    else:
        noise = _by_kind(asked, lambda e: sound_upload_noise(e, rounds, delta, accountant))
        z = sound_noise(epsilon_max, rounds, delta, accountant)
    if aggregation == "printed" and isinstance(sampling, Poisson):
        raise ValueError(f"sampling={sampling!r} with aggregation='printed': 1/n needs Full() or FixedSize(n)")
    count = sampling.expected(len(asked)) if aggregation == "printed" else 1.0
    mechanism = Mechanism(
        clip=clip,
        noise_multiplier=z * count,  # the division below takes the factor away again
        client_noise=noise[None],
        weights=level,
        sampling=sampling,
        denominator="participants",
        delta=delta,
        claim=claim,
        examples=examples,
    )
    method = fedavg(model, mechanism=mechanism, name="pdp_fl", **options)
    method = sends_weights(method) if fidelity == "paper" else method
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
    delta: float | None = None,
    accountant: Accountant = "pld",
) -> PerExample:
    """Local steps that keep every client's examples within the client's own budget, however often it takes part.

    Args:
        epsilon: budgets of the clients, for the whole run, of an example.
        clip: L2 bound on the gradient of one example.
        rate: probability of an example to be in a batch.
        steps: local steps per round.
        rounds: T.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)).
        accountant: "rdp" asks for more noise than "pld", and takes less time.

    >>> private = personal_examples(np.array([1.0, 8.0]), clip=1.0, rate=0.1, steps=10, rounds=2)
    >>> private.noise_multiplier.round(2).tolist()
    [2.1, 0.68]
    """
    run = {"rate": rate, "steps": steps, "participations": rounds, "clients": len(epsilon), "delta": delta}
    noise = _by_kind(np.asarray(epsilon), lambda budget: calibrate_examples(budget, accountant=accountant, **run))
    return PerExample(clip=clip, noise_multiplier=noise, rate=rate, steps=steps)


def _by_kind(budgets: Float[np.ndarray, "C"], noise_fn: Callable[[float], float]) -> Float[np.ndarray, "C"]:
    """Noise for each client, calibrated once for each kind of budget."""
    kinds, kind_of_client = np.unique(round_down(budgets), return_inverse=True)
    return np.array([noise_fn(float(kind)) for kind in kinds])[kind_of_client]
