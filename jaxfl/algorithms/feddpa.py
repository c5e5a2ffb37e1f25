"""FedDPA (DynamicPFL): Fisher-based dynamic personalization with adaptive constraints."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import (
    GAUSSIAN,
    at_least_0,
    check_fraction,
    checked,
    nonzero,
    probability,
    up_to_infinity,
)
from jaxfl.local.fisher import client_fisher, normalize_per_layer
from jaxfl.local.masks import fisher_mask, merge
from jaxfl.local.penalties import check_bound, distance, distance_to_bound, safe_norm
from jaxfl.local.train import LocalSGD, Penalty
from jaxfl.privacy.accounting import calibrate, running_epsilon
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.mechanisms.gaussian import noise_share
from jaxfl.privacy.sampling import Poisson, Sampling
from jaxfl.server import Server, init_clients, init_server, server_step
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms, Tree

_RULE = (
    "accounted per example and local step, with noise that is added once per round to whole clients"
)


_ARGUMENTS = {"threshold": at_least_0, "lambda1": at_least_0, "lambda2": at_least_0, **GAUSSIAN}
"""Checks of the arguments that both builders share."""


@checked(**_ARGUMENTS)
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
    r"""FedDPA: informative coordinates stay personal, the others are shared.

    Each client keeps a whole model :math:`w_i`. In a round it

    1. computes the layerwise normalised Fisher diagonal of its old model,
       :math:`F_j = \mathrm{mean}_x (\partial \log p(y|x) / \partial w_j)^2`, :math:`\hat F` by (5),
    2. splits: :math:`M_1 = [\hat F \ge \tau]` personal, :math:`M_2 = 1 - M_1` shared (6), and starts from
       :math:`w_i = M_1 \odot w_i^{t-1} + M_2 \odot w^{t-1}`,
    3. stage A trains the coordinates of :math:`M_1` on
       :math:`\mathrm{CE} + \frac{\lambda_1}{2} \|(w - w^{t-1}) \odot M_1\|`,
    4. stage B trains those of :math:`M_2` on
       :math:`\mathrm{CE} + \frac{\lambda_2}{2} \big| \|(w - w^{t-1}) \odot M_2\| - C \big|`,
    5. sends :math:`\Delta_i = w_i - w^{t-1}` on all coordinates; masks never leave the client.

    Args:
        model: the network.
        sampling: who takes part.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        clip: C, L2 bound on a client's whole update.
        threshold: tau; 0 makes everything personal, above 1 nothing.
        lambda1: weight of stage A's penalty.
        lambda2: weight of stage B's penalty.
        local: how a client trains in each of the two stages.
        evaluate: `stored`: a client's model after its last training; `adapt`: after one more local update
            from the current global model, of which nothing is sent.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).

    Guarantee: client-level, zero-out adjacency, sensitivity C: clipping covers the whole update and the noise is dense.
    Deviations from the paper: eq. (3-1) as printed enlarges updates; clipping divides. A tensor whose Fisher
        values are all equal is shared (the published code zeroes it). Uniform weights, not data sizes. No
        data augmentation, and incomplete batches are used. Norms in penalties have gradient 0 at 0.
    References: Yang, Huang, Ye, "Dynamic Personalized Federated Learning with Adaptive Differential Privacy",
        NeurIPS 2023.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> feddpa(mlp((8, 8, 1), 10), sampling=Poisson(0.1), noise_multiplier=1.0).mechanism.noise_multiplier
    1.0
    """
    mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling)
    method = _personalized(
        model, mechanism, threshold, (lambda1, lambda2), "active", local, evaluate
    )
    return method._replace(terms=Terms(delta))


@checked(**_ARGUMENTS, claim=up_to_infinity)
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
    r"""FedDPA as published: each client adds noise of std :math:`\sigma C / \sqrt{|M_t|}` (3-2) to its update.

    Args:
        model: the network.
        sampling: who takes part.
        noise_multiplier: sigma.
        clients: number of clients, for the expected :math:`|M_t|`.
        clip: C, L2 bound on a client's whole update.
        threshold: as in `feddpa`.
        lambda1: as in `feddpa`.
        lambda2: as in `feddpa`.
        reg: `active`: each penalty is one norm over the stage's own coordinates; `code`: the sum over tensors of norms
            over all coordinates, as in the published code.
        local: as in `feddpa`.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).
        claim: the epsilon that the paper's rule states for `noise_multiplier` at `delta` (see `paper_epsilon`).

    Guarantee: client-level, zero-out adjacency. The paper calibrates sigma for examples although noise is added once
        per round to whole clients; the statement gives the client-level epsilon of that noise beside the claim.
    Deviations from the paper: those of `feddpa`. The published code has the number of all clients for :math:`|M_t|`.
    References: as for `feddpa`.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import FixedSize
    >>> paper = feddpa_paper(mlp((8, 8, 1), 10), sampling=FixedSize(4), noise_multiplier=1.0, clients=10)
    >>> paper.mechanism.client_noise
    0.5
    """
    share = noise_share(noise_multiplier, sampling, clients)
    mechanism = Mechanism(clip=clip, client_noise=share, sampling=sampling)
    method = _personalized(model, mechanism, threshold, (lambda1, lambda2), reg, local, "stored")
    return method._replace(
        name="feddpa_paper", terms=Terms(delta, None if claim is None else (claim, _RULE))
    )


@checked(delta=probability, rate=check_fraction)
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
    r"""Sigma by the published code's rule, which accounts noise per example and step.

    RDP of Poisson sampling of examples at rate :math:`q B / n` over :math:`q T E n / B` steps, although noise is
    added T times, to clients. The claimed epsilon rests on this rule; it does not calibrate the added noise.

    Args:
        epsilon: the epsilon to claim.
        delta: its delta (0.1 in the published code).
        examples: n, training examples of all clients together.
        batch_size: B.
        epochs: E.
        rounds: T.
        rate: q, share of the clients in a round.

    >>> rule = dict(examples=50_000, batch_size=16, epochs=2, rounds=15, rate=1.0)
    >>> round(paper_noise_multiplier(1.0, delta=0.1, **rule), 2)
    0.51
    """
    steps, sampling = _paper_rule(examples, batch_size, epochs, rounds, rate)
    return calibrate(
        epsilon, clients=1, rounds=steps, sampling=sampling, delta=delta, accountant="rdp"
    )


@checked(delta=probability, rate=check_fraction)
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
    """The epsilon that the published code's rule states for a sigma: the inverse of `paper_noise_multiplier`."""
    steps, sampling = _paper_rule(examples, batch_size, epochs, rounds, rate)
    mechanism = Mechanism(clip=1.0, noise_multiplier=noise_multiplier, sampling=sampling)
    return running_epsilon(mechanism, 1, terms=Terms(delta))(steps).rdp


def _paper_rule(
    examples: int, batch_size: int, epochs: int, rounds: int, rate: float
) -> tuple[int, Poisson]:
    steps = max(1, int(rate * rounds * epochs * examples / batch_size))
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
    """The clients and the server of both builders, whoever adds the noise."""
    check_bound(mechanism.clip, "lambda2", lambdas[1])
    server_optimizer = optax.sgd(1.0)

    def local_update(key: Key[Array, ""], server: Server, old: Params, data: ClientData) -> tuple:
        personal = fisher_mask(normalize_per_layer(client_fisher(model, old, data)), threshold)
        shared = jax.tree.map(jnp.logical_not, personal)
        first, second = jax.random.split(key)
        penalty_a, penalty_b = _penalties(
            reg, server.params, personal, shared, lambdas, mechanism.clip
        )
        params = merge(personal, old, server.params)
        params, _ = local.train(first, model, params, data, mask=personal, penalty=penalty_a)
        params, info = local.train(second, model, params, data, mask=shared, penalty=penalty_b)
        count = sum(leaf.size for leaf in jax.tree.leaves(personal))
        return params, info | {"personal": optax.tree.sum(personal) / count}

    def init(key: Key[Array, ""], number: int) -> tuple[Server, Params]:
        params = model.init(key)
        return init_server(params, server_optimizer), init_clients(params, number)

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        params, info = local_update(key, server, client, data)
        return Message(optax.tree.sub(params, server.params)), params, info

    def personalize(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> Params:
        return client if evaluate == "stored" else local_update(key, server, client, data)[0]

    server_update = functools.partial(server_step, server_optimizer)
    return Algorithm("feddpa", model, init, client_update, server_update, personalize, mechanism)


def _penalties(
    reg: str,
    center: Params,
    personal: Tree,
    shared: Tree,
    lambdas: tuple[Number, Number],
    bound: Number,
) -> tuple[Penalty | None, Penalty | None]:
    lambda1, lambda2 = lambdas

    def by_tensor(params: Params) -> Float[Array, ""]:
        return jnp.sum(
            jnp.stack([safe_norm(leaf) for leaf in jax.tree.leaves(optax.tree.sub(params, center))])
        )

    def stage_a(params: Params) -> Float[Array, ""]:
        return (
            distance(params, center, personal, lambda1)
            if reg == "active"
            else 0.5 * lambda1 * by_tensor(params)
        )

    def stage_b(params: Params) -> Float[Array, ""]:
        if reg == "active":
            return distance_to_bound(params, center, shared, bound, lambda2)
        return 0.5 * lambda2 * jnp.abs(by_tensor(params) - bound)

    return stage_a if nonzero(lambda1) else None, stage_b if nonzero(lambda2) else None
