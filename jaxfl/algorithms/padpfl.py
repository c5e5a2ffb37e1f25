"""PADPFL: clients weighted by impact factors, with noise by the clients and by the server."""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._support.checks import (
    at_least_0,
    check_delta,
    check_numbers,
    check_positive,
    checked,
    key_of,
    show,
    traced,
    up_to_infinity,
)
from jaxfl.algorithms.fedavg import GradientRule, fedprox, sends_weights
from jaxfl.algorithms.server import Server
from jaxfl.local.penalties import proximal
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.accounting.accountants import Accountant, failure_probability
from jaxfl.privacy.accounting.calibration import calibrate, calibrate_upload
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms, Tree

Impacts: TypeAlias = np.ndarray | Callable[[int], np.ndarray]
"""Impact factors p [C] or [T, C], or a function from a round's index to factors [C]."""


def _impacts(name: str, value: Any) -> Any:
    """Require a function, or a vector or table of numbers of at least 0."""
    if callable(value):
        return value
    return check_numbers(name, value, axes=(1, 2), zero=True)


@checked(
    epsilon=up_to_infinity,
    clip=up_to_infinity,
    impacts=_impacts,
    upload_epsilon=up_to_infinity,
    mu=at_least_0,
    delta=check_delta,
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
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
    gradient: GradientRule | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> Algorithm:
    r"""Build PADPFL, which weighs clients by impact factors p and adds noise in two places.

    The objective is :math:`\min_w \sum_i p_i F_i(w)`, with factors that the server chooses:

    .. math::
        w_i &\approx \arg\min_w F_i(w) + \frac{\mu}{2} \|w - w^t\|^2 \\
        w^{t+1} &= w^t + \sum_i p_i (\mathrm{clip}_C(w_i - w^t) + N(0, \sigma_U^2))
            + N(0, \sigma_D^2) \\
        \sigma_D^2 &= \max\Big(0, \sigma_A^2 - \sum_i p_i^2 \sigma_U^2\Big)

    The accountant gives :math:`\sigma_A = z C \max_i p_i` for `epsilon` after T rounds, and
    :math:`\sigma_U = s C` for `upload_epsilon` after T uploads.

    `info["gamma"]` is a client's inexactness :math:`\|\nabla h(w_i)\| / \|\nabla h(w^t)\|` (4) on
    all of its examples, with :math:`h(w) = F_i(w) + \frac{\mu}{2} \|w - w^t\|^2`. The inexactness
    costs two further gradients per round, and is reported without noise.

    Args:
        model: The network.
        epsilon: Target of the run for sums and broadcasts. Infinity means no noise by the server.
        rounds: T, the number of rounds. A run may be shorter, unless `impacts` change by round.
        clip: C, L2 bound on a client's update.
        impacts: p, public factors [C], or [T, C] by round, or a function from a round's index to
            factors [C]. The factors of a round are at least 0 and sum to 1. None gives 1/N to each
            client. The share of absent clients goes to those present, in proportion.
        upload_epsilon: Target of the run for the upload observer. Infinity means no noise by
            clients.
        mu: :math:`\mu`, the weight of the proximal term.
        sampling: Rule that draws the participants of each round. The default draws all clients.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients. If `impacts` is None too, it is 1e-5, which suits up to 10,000 clients.
        accountant: Accountant of the calibration. "rdp" asks for more noise than "pld".
        local: Local training of a client in one round. A `DPSGD` protects single examples, as the
            paper intends.
        gradient: Function that changes how a local step computes its gradient, such as
            `jaxfl.local.sam.sam(0.5)`. None takes the gradient of the batch.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.

    Guarantee: Client-level privacy. Sums and broadcasts have zero-out adjacency and sensitivity
        :math:`C \max_i p_i`, by the Gaussian mechanism, composed over the rounds. Sampling does not
        amplify privacy, because the redistributed shares show the cohort. If factors change by
        round, the noise is the one that the most exposed client needs. Uploads have replace-one
        adjacency and sensitivity 2C. Their epsilon is finite only with an `upload_epsilon`.
    Deviations from the paper: Clients send updates, not weights. The paper's formulas are
        reconstructed from the text around them. The paper's value of mu is not readable.
    References: Talaei, Izadi, Enhancing Federated Learning with Adaptive Differential Privacy and
        Priority-Based Aggregation, arXiv:2406.18491.

    Raises:
        ValueError: `impacts` do not sum to 1 in every round, or are for another number of rounds.
            The clip bound is infinite, and there is noise.

    >>> from jaxfl.models import mlp
    >>> p = np.array([0.5, 0.3, 0.2])
    >>> method = padpfl(mlp((8, 8, 1), 10), epsilon=8.0, rounds=10, clip=1.0, impacts=p)
    >>> method.mechanism.weights.tolist()
    [0.5, 0.3, 0.2]
    """
    weights, delta = _impacts_and_delta(impacts, rounds, delta)
    z = sound_noise(epsilon, rounds, delta, accountant)
    if weights is not None:
        # The exposure is 1, unless the factors change by round.
        z *= _exposure(weights)
    # An upload can move by 2C, for which this std is calibrated.
    s = sound_upload_noise(upload_epsilon, rounds, delta, accountant)
    mechanism = Mechanism(
        clip=clip,
        noise_multiplier=z,
        client_noise=s,
        weights=weights,
        sampling=sampling,
        denominator="participants",
    )
    base = fedprox(
        model,
        mu=mu,
        local=local,
        gradient=gradient,
        server_optimizer=server_optimizer,
        mechanism=mechanism,
        terms=Terms(delta),
    )
    return _with_inexactness(base, mu)._replace(name="padpfl")


@checked(
    epsilon=up_to_infinity, clip=up_to_infinity, impacts=_impacts, mu=at_least_0, delta=check_delta
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
    r"""Build PADPFL as published: clients send weights, with noise for the sensitivity 2C/m.

    .. math::
        w^{t+1} &= \sum_i p_i (\mathrm{clip}_C(w_i) + N(0, \sigma_U^2)) + N(0, \sigma_D^2) \\
        \sigma_U &= \frac{2 c C L}{m \epsilon} \; (8) \\
        \sigma_A &= \frac{2 c C T \max_i p_i}{m \epsilon}

    Equation (13) is the :math:`\sigma_D` of `padpfl` with this :math:`\sigma_A`. The method with
    equal factors is NbAFL.

    Args:
        model: The network.
        epsilon: Epsilon that the paper's rule claims. Infinity means no noise.
        rounds: T, the number of rounds. A run may be shorter, unless `impacts` change by round.
        clip: C, L2 bound on a client's weights.
        smallest: m, the number of examples of the smallest client.
        impacts: p, public factors [C], or [T, C] by round, or a function from a round's index to
            factors [C] (see `padpfl`). None gives 1/N to each client.
        exposures: L, the number of a client's uploads that are seen.
        mu: :math:`\mu`, the weight of the proximal term.
        sampling: Rule that draws the participants of each round. The default draws all clients.
            A cohort whose factors are all 0 leaves the server unchanged.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients. If `impacts` is None too, it is 1e-5, which suits up to 10,000 clients.
        local: Optimizer, batches and epochs of a client's training in a round. A `DPSGD` protects
            single examples.

    Guarantee: Client-level privacy, as far as the published noise gives it. The statement has the
        honest epsilon and the claim. The paper's sensitivity 2C/m takes trained weights for a mean
        of per-example minimisers. One example can move the weights by 2C, so no smaller epsilon is
        known for an example than for an upload. The paper's L < T contradicts a server that sees
        all T uploads.
    Deviations from the paper: The formulas are reconstructed from the text around them. The paper's
        value of mu is not readable.
    References: Talaei, Izadi, Enhancing Federated Learning with Adaptive Differential Privacy and
        Priority-Based Aggregation, arXiv:2406.18491. NbAFL: Wei et al., Federated Learning with
        Differential Privacy, IEEE Transactions on Information Forensics and Security 2020.

    Raises:
        ValueError: `impacts` do not sum to 1 in every round, or are for another number of rounds.
            The clip bound is infinite, and there is noise.

    >>> from jaxfl.models import mlp
    >>> model = mlp((8, 8, 1), 10)
    >>> padpfl_paper(model, epsilon=50.0, rounds=10, clip=5.0, smallest=100).terms.claim[0]
    50.0
    """
    weights, delta = _impacts_and_delta(impacts, rounds, delta)
    # Eq. (8) counts L uploads, and sigma_A counts T broadcasts.
    s = nbafl_noise(epsilon, delta=delta, smallest=smallest, times=exposures)
    z = nbafl_noise(epsilon, delta=delta, smallest=smallest, times=rounds)
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
    # A sweep's traced epsilon has no value that a statement could name.
    claim = None
    if not traced(epsilon) and math.isfinite(epsilon):
        claim = (float(epsilon), rule)
    base = fedprox(model, mu=mu, local=local, mechanism=mechanism, terms=Terms(delta, claim))
    return sends_weights(_with_inexactness(base, mu))._replace(name="padpfl_paper")


@checked(epsilon=up_to_infinity, delta=check_delta)
def nbafl_noise(epsilon: Number, *, delta: float, smallest: int, times: int = 1) -> Number:
    r"""Return the std of the noise, in units of C, by the rule of PADPFL, NbAFL and PDP-FL.

    The rule is :math:`2 c k / (m \epsilon)`, with :math:`c = \sqrt{2 \ln(1.25 / \delta)}`.

    Args:
        epsilon: Epsilon to claim. Infinity means no noise.
        delta: :math:`\delta`, the failure probability of the claim.
        smallest: m, the number of examples of the smallest client.
        times: k, how often the noisy value is seen. The default 1 composes no rounds.

    >>> round(nbafl_noise(1.0, delta=0.01, smallest=100), 7)
    0.0621502
    """
    return 2 * math.sqrt(2 * math.log(1.25 / delta)) * times / (smallest * epsilon)


def sound_noise(epsilon: float, rounds: int, delta: float, accountant: Accountant) -> float:
    """Return the multiplier of the noise on the sum for an epsilon after all rounds.

    The multiplier assumes no amplification by sampling. An infinite epsilon has the multiplier 0.
    """
    if math.isinf(epsilon):
        return 0.0
    return calibrate(epsilon, clients=1, rounds=rounds, delta=delta, accountant=accountant)


def sound_upload_noise(epsilon: float, rounds: int, delta: float, accountant: Accountant) -> float:
    """Return the std, in units of C, of a client's noise for an epsilon after `rounds` uploads.

    An infinite epsilon has the std 0.
    """
    if math.isinf(epsilon):
        return 0.0
    return calibrate_upload(epsilon, participations=rounds, delta=delta, accountant=accountant)


def impact_table(impacts: Impacts, rounds: int) -> Float[np.ndarray, "..."]:
    """Return impact factors [C] or [T, C], whose rows are at least 0 and sum to 1.

    Args:
        impacts: The factors, or a function from a round's index to the round's factors.
        rounds: T, the number of rounds.

    Raises:
        ValueError: The factors are below 0, do not sum to 1, or are for another number of rounds.

    >>> impact_table(lambda t: np.array([0.5, 0.5]) if t < 1 else np.array([0.0, 1.0]), 2).tolist()
    [[0.5, 0.5], [0.0, 1.0]]
    """
    factors: Any = impacts
    if callable(impacts):
        factors = [impacts(t) for t in range(rounds)]
    table = _impacts("impacts", factors)
    rows = np.atleast_2d(table)
    if len(rows) not in (1, rounds):
        raise ValueError(
            f"impacts must have 1 or {rounds} rows, got {len(rows)} in {show(table)}. Give one row "
            "for all rounds, or one row for each round."
        )
    # Sums of floats are rounded, so a small error is allowed.
    totals = rows.sum(axis=1)
    worst = np.argmax(np.abs(totals - 1))
    if np.abs(totals[worst] - 1) > 1e-6:
        raise ValueError(
            f"impacts must sum to 1 in every round, got a sum of {totals[worst]:g} in round "
            f"{worst} of {show(table)}. Divide the factors of a round by their sum."
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
    r"""Return bounds on :math:`E[F(w^t) - F(w^*)]` for t = 0..T, as in theorems 2 and 3.

    One round of FedProx whose clients are :math:`\gamma`-inexact, with aggregated noise n, gives

    .. math::
        E[F(w^{t+1}) - F(w^t)] &\le \lambda_2 \|\nabla F\|^2 + \lambda_1 \|\nabla F\| E\|n\|
            + \lambda_0 E\|n\|^2 \\
        \lambda_2 &= -\frac{1 - \gamma B}{\mu} + \frac{\rho B (1 + \gamma)}{\mu^2}
            + \frac{\rho B^2 (1 + \gamma)^2}{2 \mu^2} \\
        \lambda_1 &= 1 + \frac{\rho B (1 + \gamma)}{\mu} \\
        \lambda_0 &= \frac{\rho}{2}

    If :math:`\lambda_2 < 0`, the inequality :math:`\|\nabla F\|^2 \ge 2 l (F - F^*)` makes the gap
    contract by :math:`1 + 2 l \lambda_2`. Otherwise, or without l, the gap drifts as
    :math:`\Theta + k_2 T + k_1 T^2 / \epsilon + k_0 T^3 / \epsilon^2`, because
    :math:`E\|n\| \propto T / \epsilon`. A change of p moves the objective by at most half of
    :math:`\|\Delta p\|_1` times the spread of the clients' losses. The same bound holds for the
    objective's minimum.

    Args:
        noise: Std of each coordinate of the aggregate in every round [T], with the noise of clients
            and server together.
        parameters: d, the number of parameters.
        gap: :math:`\Theta = F(w^0) - F(w^*)`.
        smoothness: :math:`\rho`, Lipschitz constant of each :math:`\nabla F_i`. Each :math:`F_i` is
            convex.
        mu: :math:`\mu`, the weight of the proximal term.
        gamma: :math:`\gamma`, the inexactness of the clients.
        dissimilarity: B, with :math:`\sum_i p_i \|\nabla F_i\|^2 \le B^2 \|\nabla F\|^2`.
        gradient: :math:`\beta`, bound on :math:`\|\nabla F\|`.
        convexity: l of the Polyak-Lojasiewicz inequality. The default 0 assumes nothing.
        changes: :math:`\|p^{t+1} - p^t\|_1` after every round [T]. None stands for fixed factors
            (theorem 2).
        spread: Largest difference between two clients' losses at one w.

    Deviations from the paper: The formulas of (23), (46), (52) and (69) are missing from the
        available text. The bounds here follow its steps (26) to (39). Expectations over noise that
        is independent of the round would drop :math:`\lambda_1`. The paper's theorem 3 bounds the
        change of p in another way.

    Raises:
        ValueError: `smoothness` or `mu` is not above 0, or another constant is below 0.

    >>> constants = dict(gap=1.0, smoothness=1.0, mu=4.0, gamma=0.0, dissimilarity=1.0)
    >>> constants |= dict(gradient=1.0, convexity=1.0)
    >>> convergence_bound(np.zeros(2), parameters=3, **constants).round(4).tolist()
    [1.0, 0.6875, 0.4727]
    """
    check_positive("smoothness", smoothness)
    check_positive("mu", mu)
    others = {
        "gap": gap,
        "gamma": gamma,
        "dissimilarity": dissimilarity,
        "gradient": gradient,
        "spread": spread,
        "convexity": convexity,
    }
    for name, value in others.items():
        check_positive(name, value, zero=True)
    quadratic, linear = _round_factors(smoothness, mu, gamma, dissimilarity)
    moves = np.zeros(())
    if changes is not None:
        moves = np.asarray(changes)
    # The mean norm of d numbers is at most the root of their mean squared norm.
    norm = np.sqrt(parameters) * np.asarray(noise, np.float64)
    # Lambda_0 is half the smoothness.
    by_noise = linear * gradient * norm + smoothness / 2 * norm**2
    # A change of p moves the objective and its minimum, each by at most half of this term.
    added = by_noise + spread * moves + max(quadratic, 0) * gradient**2
    # A positive lambda_2 is part of `added`, and does not contract the gap.
    contraction = max(0.0, 1 + 2 * convexity * min(quadratic, 0))
    bound = [gap]
    for term in added:
        bound.append(contraction * bound[-1] + term)
    return np.array(bound)


def _round_factors(
    smoothness: float, mu: float, gamma: float, dissimilarity: float
) -> tuple[float, float]:
    r"""Return :math:`\lambda_2` and :math:`\lambda_1` of `convergence_bound`."""
    # A client moves on average by at most this times the gradient.
    reach = dissimilarity * (1 + gamma) / mu
    # Lambda_2 is computed in two steps.
    descent = -(1 - gamma * dissimilarity) / mu
    quadratic = descent + smoothness * reach / mu + smoothness * reach**2 / 2
    linear = 1 + smoothness * reach
    return quadratic, linear


def _impacts_and_delta(
    impacts: Impacts | None, rounds: int, delta: float | None
) -> tuple[Float[np.ndarray, "..."] | None, float]:
    """Return impact factors as an array, and the delta for their number of clients."""
    if impacts is None:
        return None, failure_probability(delta, None)
    weights = impact_table(impacts, rounds)
    return weights, failure_probability(delta, weights.shape[-1])


def _with_inexactness(base: Algorithm, mu: float) -> Algorithm:
    """Return the method with `info["gamma"]`, each client's inexactness (see `padpfl`).

    It is 0 for a client whose gradient at the broadcast is 0.
    """

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        message, client, info = base.client_update(key, server, client, data)
        # Eq. (4) compares the gradients at w^t and at the trained weights.
        before = _slope(base.model, server.params, server.params, data, mu)
        trained = optax.tree.add(server.params, message.update)
        after = _slope(base.model, trained, server.params, data, mu)
        gamma = jnp.where(before > 0, after / jnp.where(before > 0, before, 1.0), 0.0)
        return Message(message.update), client, info | {"gamma": gamma}

    return base._replace(client_update=client_update)


def _exposure(weights: Float[np.ndarray, "..."]) -> float:
    r"""Return the factor on the noise that the most exposed client needs.

    The factor is 1 for a client that has the largest impact in every round. A client's privacy loss
    adds up like :math:`\sum_t (p_{t,i} / \max_j p_{t,j})^2`.
    """
    rows = np.atleast_2d(weights)
    relative = rows / rows.max(axis=1, keepdims=True)
    loss = np.mean(relative**2, axis=0)
    return float(np.sqrt(loss.max()))


def _slope(
    model: Model, params: Params, center: Params, data: ClientData, mu: float
) -> Float[Array, ""]:
    """Return the norm of the gradient, at `params`, of a client's loss with a proximal term.

    One plain step with all of the client's examples moves the parameters by the negative gradient.
    """
    # The key only orders the examples of the single batch.
    key = key_of(0)
    one_step = LocalSGD(optax.sgd(1.0), data.padded, steps=1)

    def pull(params: Params) -> Float[Array, ""]:
        return proximal(params, center, mu)

    after, _ = one_step.train(key, model, params, data, penalty=pull)
    return jnp.asarray(optax.tree.norm(optax.tree.sub(after, params)))
