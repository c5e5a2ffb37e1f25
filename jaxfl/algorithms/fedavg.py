"""The FedAvg family: local training, FedAvg, FedProx, DP-FedAvg and DP-FedAvg-fb.

The methods are one recipe with four options: communication, a penalty (the proximal term), a clip
bound with noise, and a head that clients fine-tune before evaluation (see `fine_tuned`).
"""

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._support.checks import (
    GAUSSIAN,
    at_least_0,
    checked,
    nonzero,
)
from jaxfl.algorithms.fine_tuned import fine_tuned
from jaxfl.algorithms.server import Server, init_clients, init_server, server_step
from jaxfl.local.penalties import proximal
from jaxfl.local.train import GradientFn, LocalSGD, LossTerm, check_head
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms, Tree

Penalty: TypeAlias = Callable[[Params, Params], Float[Array, ""]]
"""Function from a client's parameters and the broadcast ones to a term added to the loss."""

GradientRule: TypeAlias = Callable[[GradientFn], GradientFn]
"""Function that changes how a local step computes its gradient."""


@checked()
def local_only(
    model: Model, *, local: LocalSGD = LocalSGD(optax.sgd(0.05)), sampling: Sampling = Full()
) -> Algorithm:
    """Build local training: every client trains alone, from one public initialisation.

    Clients send nothing, so that the epsilon is 0. No epsilon covers the clients' models.

    Args:
        model: The network.
        local: Local training of a client in one round.
        sampling: The sampler, which draws the clients that train in each round.

    >>> from jaxfl.models import mlp
    >>> local_only(mlp((8, 8, 1), 10, hidden=(16,))).mechanism.communicates
    False
    """

    def init(key: Key[Array, ""], num_clients: int) -> tuple[Tree, Tree]:
        return (), init_clients(model.init(key), num_clients)

    def client_update(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> tuple:
        del server
        params, info = local.train(key, model, client, data)
        # Nothing is sent, so the update has no arrays.
        return Message(()), params, info

    return Algorithm(
        name="local_only",
        model=model,
        init=init,
        client_update=client_update,
        server_update=lambda server, aggregate: server,
        personalize=lambda key, server, client, data: client,
        mechanism=Mechanism(sampling=sampling, communicates=False),
    )


@checked()
def fedavg(
    model: Model,
    *,
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
    penalty: Penalty | None = None,
    gradient: GradientRule | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    mechanism: Mechanism = Mechanism(denominator="participants"),
    terms: Terms = Terms(),
    name: str = "fedavg",
) -> Algorithm:
    r"""Build FedAvg, whose server moves by the weighted mean of the participants' updates.

    .. math:: \theta \leftarrow \theta + \eta_g \frac{\sum_i w_i \Delta_i}{\sum_i w_i}

    Both sums are over the participants of a round, :math:`w_i` are the mechanism's weights, and
    :math:`\eta_g` is the server's learning rate. The default mechanism divides by the sum of the
    participants' weights, because it has `denominator="participants"`. A `Mechanism(...)` without
    this argument divides by the expected sum of weights.

    Args:
        model: The network.
        local: Local training of a client in one round. A `DPSGD` protects single examples.
        penalty: Function of the client's parameters and the broadcast ones, whose value is added to
            the loss. None adds nothing.
        gradient: Function that changes how a local step computes its gradient, such as
            `jaxfl.local.sam.sam(0.5)`. None takes the gradient of the batch.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        mechanism: Sampling, weights, clip bound and noise.
        terms: Delta and further parts of the privacy statement (see `Terms`).
        name: Name of the method in reports.

    Deviations from the paper: Weights are uniform, unless `mechanism.weights` holds public ones.
    References: McMahan et al. 2017 (arXiv:1602.05629).

    >>> from jaxfl.models import mlp
    >>> fedavg(mlp((8, 8, 1), 10, hidden=(16,))).name
    'fedavg'
    """

    def init(key: Key[Array, ""], num_clients: int) -> tuple[Server, Tree]:
        del num_clients
        return init_server(model.init(key), server_optimizer), ()

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        pull = pull_to(server.params, penalty)
        params, info = local.train(key, model, server.params, data, penalty=pull, gradient=gradient)
        # The server's optimizer steps along changes of weights, not along weights.
        return Message(optax.tree.sub(params, server.params)), client, info

    return Algorithm(
        name=name,
        model=model,
        init=init,
        client_update=client_update,
        server_update=lambda server, aggregate: server_step(server_optimizer, server, aggregate),
        personalize=lambda key, server, client, data: server.params,
        mechanism=mechanism,
        dp_sgd=local.dp_sgd,
        terms=terms,
    )


@checked(mu=at_least_0)
def fedprox(
    model: Model,
    *,
    mu: Number = 0.01,
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
    gradient: GradientRule | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    mechanism: Mechanism = Mechanism(denominator="participants"),
    terms: Terms = Terms(),
) -> Algorithm:
    r"""Build FedProx: clients minimise :math:`F_i(w) + \frac{\mu}{2} \|w - w^t\|^2`.

    All else is as in FedAvg.

    Args:
        model: The network.
        mu: :math:`\mu`, the weight of the proximal term. With 0 the method is FedAvg.
        local: Local training of a client in one round. A `DPSGD` protects single examples.
        gradient: Function that changes how a local step computes its gradient, such as
            `jaxfl.local.sam.sam(0.5)`. None takes the gradient of the batch.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        mechanism: Sampling, weights, clip bound and noise.
        terms: Delta and further parts of the privacy statement (see `Terms`).

    References: Li et al. 2020 (arXiv:1812.06127), eq. 2.

    >>> from jaxfl.models import mlp
    >>> fedprox(mlp((8, 8, 1), 10, hidden=(16,)), mu=0.1).name
    'fedprox'
    """
    return fedavg(
        model,
        local=local,
        penalty=proximal_penalty(mu),
        gradient=gradient,
        server_optimizer=server_optimizer,
        mechanism=mechanism,
        terms=terms,
        name="fedprox",
    )


@checked(**GAUSSIAN)
def dp_fedavg(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
    penalty: Penalty | None = None,
    gradient: GradientRule | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build DP-FedAvg: clipped updates, Gaussian noise on their sum, and a fixed denominator.

    .. math:: \theta \leftarrow \theta + \frac{\eta_g}{q N}
        \Big( \sum_{i \in \Omega_t} \mathrm{clip}_C(\Delta_i) + \mathcal{N}(0, z^2 C^2 I) \Big)

    There are N clients, of whom q N are expected in a round.

    Args:
        model: The network.
        clip: C, the L2 bound on a client's full update. Infinity clips nothing, and allows no
            noise.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        local: Local training of a client in one round. A `DPSGD` protects single examples.
        penalty: Function of the client's parameters and the broadcast ones, whose value is added to
            the loss. None adds nothing.
        gradient: Function that changes how a local step computes its gradient, such as
            `jaxfl.local.sam.sam(0.5)`. None takes the gradient of the batch.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy under zero-out adjacency, for the observer of sums and
        broadcasts. The clipped sum has sensitivity C.
    References: McMahan et al. 2018 (arXiv:1710.06963).

    Raises:
        ValueError: The clip bound is infinite, and there is noise.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> private = dp_fedavg(
    ...     mlp((8, 8, 1), 10), clip=0.5, noise_multiplier=1.0, sampling=Poisson(0.1)
    ... )
    >>> private.mechanism.clip
    0.5
    """
    # The default denominator is the expected qN, which says nothing about who takes part.
    mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling)
    return fedavg(
        model,
        local=local,
        penalty=penalty,
        gradient=gradient,
        server_optimizer=server_optimizer,
        mechanism=mechanism,
        terms=Terms(delta),
        name="dp_fedavg",
    )


@checked(**GAUSSIAN)
def dp_fedavg_fb(
    model: Model,
    *,
    clip: Number = math.inf,
    noise_multiplier: Number = 0.0,
    sampling: Sampling = Full(),
    head: LocalSGD = LocalSGD(optax.sgd(0.01), epochs=15),
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
    penalty: Penalty | None = None,
    gradient: GradientRule | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    """Build DP-FedAvg whose clients are evaluated with a head fine-tuned on their own data.

    Clients fine-tune a copy of the head with a frozen base before evaluation, and never send it.

    Args:
        model: The network, with a head.
        clip: C, the L2 bound on a client's full update. Infinity, the default, clips nothing, and
            allows no noise.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        head: Training of the head by a client before evaluation.
        local: Local training of a client in one round. A `DPSGD` protects single examples.
        penalty: Function of the client's parameters and the broadcast ones, whose value is added to
            the loss. None adds nothing.
        gradient: Function that changes how a local step computes its gradient, such as
            `jaxfl.local.sam.sam(0.5)`. None takes the gradient of the batch.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: The guarantee of `dp_fedavg`, whose messages are sent. Heads have joint privacy: each
        client is protected against all other clients, but its head depends on its own data.
        Publishing heads voids the guarantee.
    References: The DP-FedAvg-fb column of DP-pFedDSU; DP-FedAvg-ft in CENTAUR's code.

    Raises:
        ValueError: The model has no head, or the clip bound is infinite and there is noise.

    >>> from jaxfl.models import mlp
    >>> dp_fedavg_fb(mlp((8, 8, 1), 10, hidden=(16,)), clip=1.0, noise_multiplier=1.0).name
    'dp_fedavg_fb'
    """
    check_head(model)
    base = dp_fedavg(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        local=local,
        penalty=penalty,
        gradient=gradient,
        server_optimizer=server_optimizer,
        delta=delta,
    )
    return fine_tuned(base, local=head, parts=model.head)._replace(name="dp_fedavg_fb")


def proximal_penalty(mu: Number) -> Penalty | None:
    """Return the proximal term with the weight `mu`, or None if the weight is 0."""
    # With the weight 0, the steps are those of FedAvg and compute no penalty.
    if not nonzero(mu):
        return None
    return functools.partial(proximal, mu=mu)


def pull_to(center: Params, penalty: Penalty | None) -> LossTerm | None:
    """Return a penalty as a function of a client's parameters alone, or None without a penalty.

    Args:
        center: The broadcast parameters.
        penalty: Function of a client's parameters and the broadcast ones.
    """
    if penalty is None:
        return None

    def pull(params: Params) -> Float[Array, ""]:
        return penalty(params, center)

    return pull


def keeps_models(base: Algorithm, name: str, client_update: Callable[..., tuple]) -> Algorithm:
    """Return a method whose clients keep a model, and are evaluated with this model.

    Args:
        base: The method whose server, mechanism and terms stay.
        name: Name of the new method.
        client_update: Client update of the new method. A client's state is its model, which starts
            as the server's initial parameters.
    """

    def init(key: Key[Array, ""], num_clients: int) -> tuple[Server, Params]:
        server, _ = base.init(key, num_clients)
        return server, init_clients(server.params, num_clients)

    return base._replace(
        name=name,
        init=init,
        client_update=client_update,
        personalize=lambda key, server, client, data: client,
    )


def sends_weights(method: Algorithm) -> Algorithm:
    """Return a method whose clients send weights, and whose server keeps their aggregate.

    The server's optimizer takes no step.

    Args:
        method: A method whose clients send updates.
    """

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        message, client, info = method.client_update(key, server, client, data)
        # The engine clips what is sent, which is the full weights and not their change.
        return Message(optax.tree.add(server.params, message.update)), client, info

    def server_update(server: Server, aggregate: Params) -> Server:
        # A server optimizer takes an aggregate as a change of weights, so it has no use here.
        return server._replace(params=aggregate)

    return method._replace(
        client_update=client_update, server_update=server_update, sends="weights"
    )
