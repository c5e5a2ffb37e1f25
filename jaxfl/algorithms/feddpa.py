"""FedDPA (DynamicPFL): Fisher-based dynamic personalization with adaptive constraints."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._support.checks import (
    GAUSSIAN,
    at_least_0,
    check_delta,
    check_fraction,
    checked,
    nonzero,
    up_to_infinity,
)
from jaxfl.algorithms.server import Server, init_clients, init_server, server_step
from jaxfl.local.fisher import client_fisher, normalize_per_layer
from jaxfl.local.masks import fisher_mask, merge
from jaxfl.local.penalties import check_bound, distance, distance_to_bound, safe_norm
from jaxfl.local.train import LocalSGD, LossTerm
from jaxfl.privacy.accounting.calibration import calibrate
from jaxfl.privacy.accounting.ledgers import running_epsilon
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.mechanisms.gaussian import noise_share
from jaxfl.privacy.sampling import Poisson, Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms, Tree

_RULE = (
    "accounted per example and local step, although noise is added once per round to the update of "
    "a client"
)
"""Rule behind the epsilon that the paper claims."""

_FISHER_CHECKS = {"threshold": at_least_0, "lambda1": at_least_0, "lambda2": at_least_0, **GAUSSIAN}
"""Checks of the arguments that both builders have."""


@checked(**_FISHER_CHECKS)
def feddpa(
    model: Model,
    *,
    sampling: Sampling,
    noise_multiplier: Number,
    clip: Number = 0.5,
    threshold: Number = 0.4,
    lambda1: Number = 0.1,
    lambda2: Number = 0.05,
    local: LocalSGD = LocalSGD(optax.adam(1e-3), 16, 2),
    evaluate: Literal["stored", "adapt"] = "stored",
    delta: float | None = None,
) -> Algorithm:
    r"""Build FedDPA: coordinates of large Fisher information stay personal, others are shared.

    Each client keeps a full model :math:`w_i`. In a round it

    1. computes the Fisher diagonal of its old model,
       :math:`F_j = \mathrm{mean}_x (\partial \log p(y|x) / \partial w_j)^2`, and normalises the
       diagonal layer by layer to :math:`\hat F` (5),
    2. splits the coordinates into personal :math:`M_1 = [\hat F \ge \tau]` and shared
       :math:`M_2 = 1 - M_1` (6), and starts from
       :math:`w_i = M_1 \odot w_i^{t-1} + M_2 \odot w^{t-1}`,
    3. trains the coordinates of :math:`M_1` in stage A on
       :math:`\mathrm{CE} + \frac{\lambda_1}{2} \|(w - w^{t-1}) \odot M_1\|`,
    4. trains the coordinates of :math:`M_2` in stage B on
       :math:`\mathrm{CE} + \frac{\lambda_2}{2} \big| \|(w - w^{t-1}) \odot M_2\| - C \big|`,
    5. sends :math:`\Delta_i = w_i - w^{t-1}` on all coordinates. Masks never leave the client.

    CE is the loss of the task, a cross-entropy by default.

    Args:
        model: The network.
        sampling: The sampler, which draws the participants of each round.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        clip: C, the L2 bound on a client's full update, which is also in stage B's penalty.
        threshold: :math:`\tau`. With 0 every coordinate is personal, and above 1 none is.
        lambda1: :math:`\lambda_1`, the weight of stage A's penalty.
        lambda2: :math:`\lambda_2`, the weight of stage B's penalty.
        local: Local training of a client in each of the two stages.
        evaluate: Model with which a client is evaluated. "stored" is its model after its last
            training. "adapt" is the result of one more local update with the current global
            model, of which nothing is sent.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy under zero-out adjacency, with sensitivity C, because clipping
        covers the full update and the noise is on all coordinates.
    Deviations from the paper: Clipping divides, whereas eq. (3-1) as printed enlarges updates. A
        tensor whose Fisher values are all equal is shared (the published code zeroes it). Weights
        are uniform, not data sizes. There is no data augmentation, and incomplete batches are used.
        Norms in penalties have gradient 0 at 0.
    References: Yang, Huang, Ye, "Dynamic Personalized Federated Learning with Adaptive Differential
        Privacy", NeurIPS 2023.

    Raises:
        ValueError: The clip bound is infinite, and there is noise or :math:`\lambda_2` is not 0.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> private = feddpa(mlp((8, 8, 1), 10), sampling=Poisson(0.1), noise_multiplier=1.0)
    >>> private.mechanism.noise_multiplier
    1.0
    """
    mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling)
    lambdas = (lambda1, lambda2)
    method = _personalized(model, mechanism, threshold, lambdas, "active", local, evaluate)
    return method._replace(terms=Terms(delta))


@checked(**_FISHER_CHECKS, claim=up_to_infinity)
def feddpa_paper(
    model: Model,
    *,
    sampling: Sampling,
    noise_multiplier: Number,
    clients: int,
    clip: Number = 0.5,
    threshold: Number = 0.4,
    lambda1: Number = 0.1,
    lambda2: Number = 0.05,
    reg: Literal["active", "code"] = "active",
    local: LocalSGD = LocalSGD(optax.adam(1e-3), 16, 2),
    delta: float | None = None,
    claim: float | None = None,
) -> Algorithm:
    r"""Build FedDPA as published: each client adds noise to its own update.

    The noise of a client has std :math:`\sigma C / \sqrt{|M_t|}` (3-2).

    Args:
        model: The network.
        sampling: The sampler, which draws the participants of each round.
        noise_multiplier: :math:`\sigma`.
        clients: Number of clients, which gives the expected :math:`|M_t|`.
        clip: C, the L2 bound on a client's full update, which is also in stage B's penalty.
        threshold: :math:`\tau`. With 0 every coordinate is personal, and above 1 none is.
        lambda1: :math:`\lambda_1`, the weight of stage A's penalty.
        lambda2: :math:`\lambda_2`, the weight of stage B's penalty.
        reg: Form of the penalties. "active" takes one norm over the stage's own coordinates. "code"
            takes the sum over tensors of norms over all coordinates, as in the published code.
        local: Local training of a client in each of the two stages.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.
        claim: The epsilon that the paper's rule states for `noise_multiplier` at `delta` (see
            `paper_epsilon`). None means no claim.

    Guarantee: Client-level privacy under zero-out adjacency. The paper calibrates :math:`\sigma`
        for examples, although noise is added once per round to all of a client's data. The
        statement has the client-level epsilon of that noise next to the claim.
    Deviations from the paper: Those of `feddpa`. The published code has the number of all clients
        for :math:`|M_t|`.
    References: Yang, Huang, Ye, "Dynamic Personalized Federated Learning with Adaptive Differential
        Privacy", NeurIPS 2023.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import FixedSize
    >>> options = {"sampling": FixedSize(4), "noise_multiplier": 1.0, "clients": 10}
    >>> feddpa_paper(mlp((8, 8, 1), 10), **options).mechanism.client_noise
    0.5
    """
    # In the sum over the expected cohort, these shares have the multiplier sigma.
    share = noise_share(noise_multiplier, sampling, clients)
    mechanism = Mechanism(clip=clip, client_noise=share, sampling=sampling)
    lambdas = (lambda1, lambda2)
    method = _personalized(model, mechanism, threshold, lambdas, reg, local, "stored")
    claimed = None
    if claim is not None:
        claimed = (claim, _RULE)
    return method._replace(name="feddpa_paper", terms=Terms(delta, claimed))


@checked(delta=check_delta, rate=check_fraction)
def paper_noise_multiplier(
    epsilon: float,
    *,
    delta: float,
    examples: int,
    batch_size: int,
    epochs: int,
    rounds: int,
    rate: float,
) -> float:
    r"""Return :math:`\sigma` by the published code's rule, which accounts per example and step.

    The rule is RDP of Poisson sampling of examples at rate :math:`q B / n` over
    :math:`q T E n / B` steps, although noise is added T times, to clients. The claimed epsilon
    rests on this rule, which does not calibrate the added noise.

    Args:
        epsilon: The epsilon to claim.
        delta: The delta of the claim (0.1 in the published code).
        examples: n, the number of training examples of all clients together.
        batch_size: B, the number of examples in a batch.
        epochs: E, the local epochs of a round.
        rounds: T, the number of rounds.
        rate: q, the share of the clients in a round.

    >>> rule = dict(examples=50_000, batch_size=16, epochs=2, rounds=15, rate=1.0)
    >>> round(paper_noise_multiplier(1.0, delta=0.1, **rule), 2)
    0.51
    """
    steps, sampling = _paper_rule(examples, batch_size, epochs, rounds, rate)
    return calibrate(
        epsilon, clients=1, rounds=steps, sampling=sampling, delta=delta, accountant="rdp"
    )


@checked(delta=check_delta, rate=check_fraction)
def paper_epsilon(
    noise_multiplier: float,
    *,
    delta: float,
    examples: int,
    batch_size: int,
    epochs: int,
    rounds: int,
    rate: float,
) -> float:
    r"""Return the epsilon that the published code's rule states for a :math:`\sigma`.

    The function is the inverse of `paper_noise_multiplier`.

    Args:
        noise_multiplier: :math:`\sigma`.
        delta: The delta of the claim (0.1 in the published code).
        examples: n, the number of training examples of all clients together.
        batch_size: B, the number of examples in a batch.
        epochs: E, the local epochs of a round.
        rounds: T, the number of rounds.
        rate: q, the share of the clients in a round.
    """
    steps, sampling = _paper_rule(examples, batch_size, epochs, rounds, rate)
    mechanism = Mechanism(clip=1.0, noise_multiplier=noise_multiplier, sampling=sampling)
    return running_epsilon(mechanism, 1, terms=Terms(delta))(steps).rdp


def _paper_rule(
    examples: int, batch_size: int, epochs: int, rounds: int, rate: float
) -> tuple[int, Poisson]:
    """Return the number of steps that the published rule counts, and the sampler of examples.

    The rule counts :math:`q T E n / B` steps for all rounds, each with a Poisson sample of examples
    at rate :math:`q B / n`.
    """
    steps = max(1, int(rate * rounds * epochs * examples / batch_size))
    # A batch size may exceed the number of examples, but a rate must not exceed 1.
    return steps, Poisson(min(1.0, rate * batch_size / examples))


def _personalized(
    model: Model,
    mechanism: Mechanism,
    threshold: Number,
    lambdas: tuple[Number, Number],
    reg: str,
    local: LocalSGD,
    evaluate: str,
) -> Algorithm:
    """Build `feddpa` with the given mechanism, which decides whether clients add the noise.

    `lambdas` are the weights of the penalties of stages A and B, whose form is `reg`.
    """
    # Only the penalty of stage B compares a norm with the clip bound.
    _, lambda2 = lambdas
    check_bound(mechanism.clip, "lambda2", lambda2)
    server_optimizer = optax.sgd(1.0)

    def local_update(key: Key[Array, ""], server: Server, old: Params, data: ClientData) -> tuple:
        # Step 1: the Fisher information of the client's old model decides, by (5).
        fisher = client_fisher(model, old, data)
        personal = fisher_mask(normalize_per_layer(fisher), threshold)
        # Step 2: personal and shared coordinates are complements, by (6).
        shared = jax.tree.map(jnp.logical_not, personal)
        first, second = jax.random.split(key)
        penalty_a, penalty_b = _penalties(
            reg, server.params, personal, shared, lambdas, mechanism.clip
        )
        params = merge(personal, old, server.params)
        # Step 3: stage A trains the personal coordinates.
        params, _ = local.train(first, model, params, data, mask=personal, penalty=penalty_a)
        # Step 4: stage B trains the shared coordinates of the result of stage A.
        params, info = local.train(second, model, params, data, mask=shared, penalty=penalty_b)
        count = sum(leaf.size for leaf in jax.tree.leaves(personal))
        return params, info | {"personal": optax.tree.sum(personal) / count}

    def init(key: Key[Array, ""], num_clients: int) -> tuple[Server, Params]:
        params = model.init(key)
        return init_server(params, server_optimizer), init_clients(params, num_clients)

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        params, info = local_update(key, server, client, data)
        # Step 5: all coordinates are sent, so the message has no mask.
        return Message(optax.tree.sub(params, server.params)), params, info

    def personalize(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> Params:
        if evaluate == "stored":
            return client
        adapted, _ = local_update(key, server, client, data)
        return adapted

    server_update = functools.partial(server_step, server_optimizer)
    return Algorithm("feddpa", model, init, client_update, server_update, personalize, mechanism)


def _penalties(
    reg: str,
    center: Params,
    personal: Tree,
    shared: Tree,
    lambdas: tuple[Number, Number],
    bound: Number,
) -> tuple[LossTerm | None, LossTerm | None]:
    """Return the penalties of stages A and B, or None where their weight is 0."""
    lambda1, lambda2 = lambdas

    def by_tensor(params: Params) -> Float[Array, ""]:
        # The published code takes a norm of each tensor, and leaves the masks out.
        difference = optax.tree.sub(params, center)
        norms = [safe_norm(leaf) for leaf in jax.tree.leaves(difference)]
        return jnp.sum(jnp.stack(norms))

    def stage_a(params: Params) -> Float[Array, ""]:
        if reg == "active":
            return distance(params, center, personal, lambda1)
        return 0.5 * lambda1 * by_tensor(params)

    def stage_b(params: Params) -> Float[Array, ""]:
        if reg == "active":
            return distance_to_bound(params, center, shared, bound, lambda2)
        return 0.5 * lambda2 * jnp.abs(by_tensor(params) - bound)

    penalty_a: LossTerm | None = None
    penalty_b: LossTerm | None = None
    if nonzero(lambda1):
        penalty_a = stage_a
    if nonzero(lambda2):
        penalty_b = stage_b
    return penalty_a, penalty_b
