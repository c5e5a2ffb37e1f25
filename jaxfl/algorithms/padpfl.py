"""PADPFL: clients weighted by impact factors, noise at the clients, topped up by the server."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import (
    at_least_0,
    check_numbers,
    check_positive,
    checked,
    key_of,
    probability,
    show,
    traced,
    up_to_infinity,
)
from jaxfl.algorithms.fedavg import fedprox, sends_weights
from jaxfl.local.penalties import proximal
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.accountants import Accountant, failure_probability
from jaxfl.privacy.accounting import calibrate, calibrate_upload
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.server import Server
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms, Tree

Impacts: TypeAlias = np.ndarray | Callable[[int], np.ndarray]
"""p as [C] or [T, C], or as a function of the round (from 0) that returns [C]."""


def _impacts(name: str, value: Any) -> Any:
    return value if callable(value) else check_numbers(name, value, axes=(1, 2), zero=True)


@checked(
    epsilon=up_to_infinity,
    clip=up_to_infinity,
    impacts=_impacts,
    upload_epsilon=up_to_infinity,
    mu=at_least_0,
    delta=probability,
)
def padpfl(
    model: Model,
    *,
    epsilon: float,
    rounds: int,
    clip: float,
    impacts: Impacts | None = None,
    upload_epsilon: float = math.inf,
    mu: float = 0.01,
    sampling: Sampling = Full(),
    delta: float | None = None,
    accountant: Accountant = "pld",
    **options: Any,
) -> Algorithm:
    r"""PADPFL: :math:`\min_w \sum_i p_i F_i(w)` with impact factors p that the server chooses.

    .. math::
        w_i \approx \arg\min_w F_i(w) + \frac{\mu}{2} \|w - w^t\|^2, \qquad
        w^{t+1} = w^t + \sum_i p_i (\mathrm{clip}_C(w_i - w^t) + N(0, \sigma_U^2)) + N(0, \sigma_D^2), \qquad
        \sigma_D^2 = \max\Big(0, \sigma_A^2 - \sum_i p_i^2 \sigma_U^2\Big)

    The accountant gives :math:`\sigma_A = z C \max_i p_i` for `epsilon` after T rounds, and :math:`\sigma_U = s C` for
    `upload_epsilon` after T uploads.

    `info["gamma"]` is the inexactness :math:`\|\nabla h(w_i)\| / \|\nabla h(w^t)\|` (4) on all of a client's examples,
    :math:`h(w) = F_i(w) + \frac{\mu}{2} \|w - w^t\|^2`: two gradients more per round, and reported without noise.

    Args:
        model: the network.
        epsilon: target for the whole run; infinity: no noise.
        rounds: T; a run may be shorter, unless `impacts` change by round.
        clip: C, L2 bound on a client's update.
        impacts: p, at least 0 and of sum 1 in every round, public; None: 1/N each. The share of absent clients goes to
            those present, in proportion.
        upload_epsilon: target for the upload observer; infinity: clients add no noise.
        mu: weight of the proximal term.
        sampling: who takes part.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)), of up to 10,000 without `impacts`.
        accountant: for the calibration; "rdp" asks for more noise than "pld".
        options: those of `fedavg`; a `DPSGD` as `local` protects single examples, as the paper means to.

    Guarantee: client-level. Sums and broadcasts: zero-out, sensitivity :math:`C \max_i p_i`, by the Gaussian mechanism,
        composed over the rounds; without amplification, since the redistributed shares show the cohort. Where factors
        change, the noise is what the most exposed client needs. Uploads: replace-one, sensitivity 2C; finite only with
        an `upload_epsilon`.
    Deviations from the paper: updates are sent, not weights. Its formulas are reconstructed from the text around them.
        mu is not readable.
    References: Talaei, Izadi, Enhancing Federated Learning with Adaptive Differential Privacy and Priority-Based
        Aggregation, arXiv:2406.18491.

    >>> from jaxfl.models import mlp
    >>> p = np.array([0.5, 0.3, 0.2])
    >>> padpfl(mlp((8, 8, 1), 10), epsilon=8.0, rounds=10, clip=1.0, impacts=p).mechanism.weights.tolist()
    [0.5, 0.3, 0.2]
    """
    weights, delta = _weights(impacts, rounds, delta)
    z = sound_noise(epsilon, rounds, delta, accountant) * (
        1.0 if weights is None else _exposure(weights)
    )
    s = sound_upload_noise(upload_epsilon, rounds, delta, accountant)
    mechanism = Mechanism(
        clip=clip,
        noise_multiplier=z,
        client_noise=s,
        weights=weights,
        sampling=sampling,
        denominator="participants",
    )
    base = fedprox(model, mu=mu, mechanism=mechanism, terms=Terms(delta), **options)
    return _with_inexactness(base, mu)._replace(name="padpfl")


@checked(
    epsilon=up_to_infinity, clip=up_to_infinity, impacts=_impacts, mu=at_least_0, delta=probability
)
def padpfl_paper(
    model: Model,
    *,
    epsilon: Number,
    rounds: int,
    clip: float,
    smallest: int,
    impacts: Impacts | None = None,
    exposures: int = 1,
    mu: float = 0.01,
    sampling: Sampling = Full(),
    delta: float | None = None,
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
) -> Algorithm:
    r"""PADPFL as published: clients send weights, with noise for the sensitivity 2C/m; with equal factors NbAFL.

    .. math::
        w^{t+1} = \sum_i p_i (\mathrm{clip}_C(w_i) + N(0, \sigma_U^2)) + N(0, \sigma_D^2), \qquad
        \sigma_U = \frac{2 c C L}{m \epsilon} \; (8), \qquad \sigma_A = \frac{2 c C T \max_i p_i}{m \epsilon}

    so that :math:`\sigma_D` of `padpfl` is (13).

    Args:
        model: the network.
        epsilon: what the rule claims; infinity: no noise.
        rounds: T; a run may be shorter, unless `impacts` change by round.
        clip: C, L2 bound on a client's weights.
        smallest: m, examples of the smallest client.
        impacts: as in `padpfl`.
        exposures: L, how many of a client's uploads are seen.
        mu: weight of the proximal term.
        sampling: who takes part; a cohort whose factors are all 0 leaves the server as it was.
        delta: failure probability; None: min(1e-5, 1 / (10 clients)), of up to 10,000 without `impacts`.
        local: how a client trains in a round.

    Guarantee: client-level, what that noise gives; the statement has the honest epsilon and the claim. The paper's
        sensitivity 2C/m takes trained weights for a mean of per-example minimisers: one example can move them by 2C, so
        no smaller epsilon is known for an example than for an upload. Its L < T contradicts a server that sees all T
        uploads.
    Deviations from the paper: its formulas are reconstructed from the text around them. mu is not readable.
    References: as for `padpfl`; NbAFL: Wei et al., Federated Learning with Differential Privacy, IEEE Transactions on
        Information Forensics and Security 2020.

    >>> from jaxfl.models import mlp
    >>> padpfl_paper(mlp((8, 8, 1), 10), epsilon=50.0, rounds=10, clip=5.0, smallest=100).terms.claim[0]
    50.0
    """
    weights, delta = _weights(impacts, rounds, delta)
    s, z = (
        nbafl_noise(epsilon, delta=delta, smallest=smallest, times=times)
        for times in (exposures, rounds)
    )
    mechanism = Mechanism(
        clip=clip,
        noise_multiplier=z,
        client_noise=s,
        weights=weights,
        sampling=sampling,
        denominator="participants",
    )
    rule = (
        f"sensitivity 2C/m of weights to an example, T={rounds} broadcasts, L={exposures} uploads"
    )
    claim = None if traced(epsilon) or math.isinf(epsilon) else (float(epsilon), rule)
    terms = Terms(delta, claim)
    base = fedprox(model, mu=mu, local=local, mechanism=mechanism, terms=terms)
    return sends_weights(_with_inexactness(base, mu))._replace(name="padpfl_paper")


@checked(epsilon=up_to_infinity, delta=probability)
def nbafl_noise(epsilon: Number, *, delta: float, smallest: int, times: int = 1) -> Number:
    r"""Std over C by the rule of PADPFL, NbAFL and PDP-FL: :math:`2 c k / (m \epsilon)`, with
    :math:`c = \sqrt{2 \ln(1.25 / \delta)}`.

    Args:
        epsilon: the epsilon to claim; infinity: no noise.
        delta: its delta.
        smallest: m, examples of the smallest client.
        times: k, how often the noisy value is seen (1: rounds are not composed).

    >>> round(nbafl_noise(1.0, delta=0.01, smallest=100), 7)
    0.0621502
    """  # noqa: D205
    return 2 * math.sqrt(2 * math.log(1.25 / delta)) * times / (smallest * epsilon)


def sound_noise(epsilon: float, rounds: int, delta: float, accountant: Accountant) -> float:
    """Multiplier of the noise on the sum for an epsilon after all rounds, without amplification; 0 for infinity."""
    options = {"clients": 1, "rounds": rounds, "delta": delta, "accountant": accountant}
    return 0.0 if math.isinf(epsilon) else calibrate(epsilon, **options)


def sound_upload_noise(epsilon: float, rounds: int, delta: float, accountant: Accountant) -> float:
    """Std over C of a client's own noise for an epsilon after an upload in every round; 0 for infinity."""
    options = {"participations": rounds, "delta": delta, "accountant": accountant}
    return 0.0 if math.isinf(epsilon) else calibrate_upload(epsilon, **options)


def impact_table(impacts: Impacts, rounds: int) -> Float[np.ndarray, "..."]:
    """Impact factors [C] or [T, C] of which every row is at least 0 and sums to 1.

    >>> impact_table(lambda t: np.array([0.5, 0.5]) if t < 1 else np.array([0.0, 1.0]), 2).tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """
    table = _impacts(
        "impacts", [impacts(t) for t in range(rounds)] if callable(impacts) else impacts
    )
    rows = np.atleast_2d(table)
    if len(rows) not in (1, rounds):
        raise ValueError(f"impacts has {len(rows)} rounds: give 1 or {rounds}")
    totals = rows.sum(axis=1)
    worst = np.argmax(np.abs(totals - 1))
    if np.abs(totals[worst] - 1) > 1e-6:
        raise ValueError(
            f"impacts={show(table)} sum to {totals[worst]:g} in round {worst}: divide them by their sum"
        )
    return table


def convergence_bound(
    noise: Float[np.ndarray, "T"],
    *,
    parameters: int,
    gap: float,
    smoothness: float,
    mu: float,
    gamma: float,
    dissimilarity: float,
    gradient: float,
    convexity: float = 0.0,
    changes: Float[np.ndarray, "T"] | None = None,
    spread: float = 0.0,
) -> Float[np.ndarray, "T1"]:
    r"""Bound on :math:`E[F(w^t) - F(w^*)]` for t = 0..T, in the manner of theorems 2 and 3.

    One round of FedProx whose clients are :math:`\gamma`-inexact, with aggregated noise n:

    .. math::
        E[F(w^{t+1}) - F(w^t)] \le \lambda_2 \|\nabla F\|^2 + \lambda_1 \|\nabla F\| E\|n\| + \lambda_0 E\|n\|^2, \\
        \lambda_2 = -\frac{1 - \gamma B}{\mu} + \frac{\rho B (1 + \gamma)}{\mu^2}
            + \frac{\rho B^2 (1 + \gamma)^2}{2 \mu^2}, \qquad
        \lambda_1 = 1 + \frac{\rho B (1 + \gamma)}{\mu}, \qquad \lambda_0 = \frac{\rho}{2}

    Where :math:`\lambda_2 < 0`, :math:`\|\nabla F\|^2 \ge 2 l (F - F^*)` makes the gap contract by
    :math:`1 + 2 l \lambda_2`; elsewhere, and without l, it drifts: :math:`\Theta + k_2 T + k_1 T^2 / \epsilon
    + k_0 T^3 / \epsilon^2`, since :math:`E\|n\| \propto T / \epsilon`. A change of p moves the objective by at most
    half of :math:`\|\Delta p\|_1` times the spread of the clients' losses, and its minimum too.

    Args:
        noise: std of each coordinate of the aggregate in every round, clients' and server's together.
        parameters: d.
        gap: :math:`\Theta = F(w^0) - F(w^*)`.
        smoothness: :math:`\rho`, Lipschitz constant of each :math:`\nabla F_i`, which is convex.
        mu: weight of the proximal term.
        gamma: inexactness of the clients.
        dissimilarity: B, with :math:`\sum_i p_i \|\nabla F_i\|^2 \le B^2 \|\nabla F\|^2`.
        gradient: :math:`\beta`, bound on :math:`\|\nabla F\|`.
        convexity: l of the Polyak-Lojasiewicz inequality; 0: none is assumed.
        changes: :math:`\|p^{t+1} - p^t\|_1` after every round; None: fixed factors (theorem 2).
        spread: largest difference between two clients' losses at one w.

    Deviations from the paper: the formulas of (23), (46), (52) and (69) are missing from the available text; the bounds
        here follow its steps (26) to (39). Expectations over noise that is independent of the round would drop
        :math:`\lambda_1`. Theorem 3 there bounds the change of p otherwise.

    >>> constants = dict(gap=1.0, smoothness=1.0, mu=4.0, gamma=0.0, dissimilarity=1.0, gradient=1.0, convexity=1.0)
    >>> convergence_bound(np.zeros(2), parameters=3, **constants).round(4).tolist()
    [1.0, 0.6875, 0.4727]
    """
    for name, value in {"smoothness": smoothness, "mu": mu}.items():
        check_positive(name, value)
    others = {
        "gap": gap,
        "gamma": gamma,
        "dissimilarity": dissimilarity,
        "gradient": gradient,
        "spread": spread,
    }
    for name, value in {**others, "convexity": convexity}.items():
        check_positive(name, value, zero=True)
    reach = (
        dissimilarity * (1 + gamma) / mu
    )  # a client moves by at most this times the gradient, on average
    quadratic = (
        -(1 - gamma * dissimilarity) / mu + smoothness * reach / mu + smoothness * reach**2 / 2
    )
    linear = 1 + smoothness * reach
    moved = spread * (np.zeros(len(noise)) if changes is None else np.asarray(changes))
    norm = np.sqrt(parameters) * np.asarray(noise, np.float64)
    added = (
        linear * gradient * norm
        + smoothness / 2 * norm**2
        + moved
        + max(quadratic, 0) * gradient**2
    )
    bound = [gap]
    for term in added:
        bound.append(max(0.0, 1 + 2 * convexity * min(quadratic, 0)) * bound[-1] + term)
    return np.array(bound)


def _weights(
    impacts: Impacts | None, rounds: int, delta: float | None
) -> tuple[Float[np.ndarray, "..."] | None, float]:
    """Impact factors as a table, and the delta for their number of clients."""
    weights = None if impacts is None else impact_table(impacts, rounds)
    return weights, failure_probability(delta, None if weights is None else weights.shape[-1])


def _with_inexactness(base: Algorithm, mu: float) -> Algorithm:
    """FedProx that reports the clients' inexactness."""

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        message, client, info = base.client_update(key, server, client, data)
        before = _slope(base.model, server.params, server.params, data, mu)
        after = _slope(
            base.model, optax.tree.add(server.params, message.update), server.params, data, mu
        )
        gamma = jnp.where(before > 0, after / jnp.where(before > 0, before, 1.0), 0.0)
        return Message(message.update), client, info | {"gamma": gamma}

    return base._replace(client_update=client_update)


def _exposure(weights: Float[np.ndarray, "..."]) -> float:
    r"""Noise that the most exposed client needs, relative to a client that has the largest factor in every round.

    Its loss adds up like :math:`\sum_t (p_{t,i} / \max_j p_{t,j})^2`.
    """
    rows = np.atleast_2d(weights)
    return float(np.sqrt(np.mean((rows / rows.max(axis=1, keepdims=True)) ** 2, axis=0).max()))


def _slope(
    model: Model, params: Params, center: Params, data: ClientData, mu: float
) -> Float[Array, ""]:
    """Norm of the gradient of a client's whole proximal objective: one plain step with all of its examples."""
    key = key_of(0)  # the order of a single batch
    whole = LocalSGD(optax.sgd(1.0), data.padded, steps=1)
    after, _ = whole.train(
        key, model, params, data, penalty=lambda params: proximal(params, center, mu)
    )
    return jnp.asarray(optax.tree.norm(optax.tree.sub(after, params)))
