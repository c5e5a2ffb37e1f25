"""The FedAvg family: local-only, FedAvg, FedProx, DP-FedAvg and DP-FedAvg-fb.

One recipe with four options: communicate or not, a penalty (a proximal term), a clip bound with noise, and a head
that is fine-tuned before evaluation (see `fine_tuned`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import at_least_0, check_noise, checked, nonzero, probability, up_to_infinity
from jaxfl.algorithms.fine_tuned import fine_tuned
from jaxfl.local.penalties import proximal
from jaxfl.local.train import GradientFn, LocalSGD, check_head
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.server import Server, init_clients, init_server, server_step
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms, Tree


@checked()
def local_only(
    model: Model, *, local: LocalSGD = LocalSGD(optax.sgd(0.05)), sampling: Sampling = Full()
) -> Algorithm:
    """Every client trains alone from the same public initialisation; nothing is sent, so epsilon is 0.

    Args:
        model: the network.
        local: how a client trains in a round.
        sampling: who trains in a round.

    >>> from jaxfl.models import mlp
    >>> local_only(mlp((8, 8, 1), 10, hidden=(16,))).mechanism.communicates
    False
    """

    def init(key: Key[Array, ""], number: int) -> tuple[Tree, Tree]:
        return (), init_clients(model.init(key), number)

    def client_update(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> tuple:
        del server
        params, info = local.train(key, model, client, data)
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
    penalty: Callable[[Params, Params], Float[Array, ""]] | None = None,
    gradient: Callable[[GradientFn], GradientFn] | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    mechanism: Mechanism = Mechanism(denominator="participants"),
    terms: Terms = Terms(),
    name: str = "fedavg",
) -> Algorithm:
    r"""FedAvg: :math:`\theta \leftarrow \theta + \eta_g \sum_i w_i \Delta_i / \sum_i w_i` over the participants.

    Args:
        model: the network.
        local: how a client trains in a round; a `DPSGD` protects its single examples.
        penalty: function of the client's parameters and the broadcast ones, whose value is added to the loss.
        gradient: what a local step makes of a batch's gradient, such as `jaxfl.local.sam.sam(0.5)`; None: nothing.
        server_optimizer: takes the negative aggregate as its gradient.
        mechanism: sampling, weights, clip and noise.
        terms: delta and further sentences of the privacy statement (see `Terms`).
        name: how reports call the method.

    Deviations from the paper: uniform weights unless `mechanism.weights` holds public ones.
    References: McMahan et al. 2017 (arXiv:1602.05629).

    >>> from jaxfl.models import mlp
    >>> fedavg(mlp((8, 8, 1), 10, hidden=(16,))).name
    'fedavg'
    """

    def init(key: Key[Array, ""], number: int) -> tuple[Server, Tree]:
        del number
        return init_server(model.init(key), server_optimizer), ()

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        pull = (lambda params: penalty(params, server.params)) if penalty else None
        params, info = local.train(key, model, server.params, data, penalty=pull, gradient=gradient)
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
def fedprox(model: Model, *, mu: Number = 0.01, **options: Any) -> Algorithm:
    r"""FedProx: FedAvg whose clients minimise :math:`F_i(w) + \frac{\mu}{2} \|w - w^t\|^2`.

    Args:
        model: the network.
        mu: weight of the proximal term.
        options: those of `fedavg`.

    References: Li et al. 2020 (arXiv:1812.06127), eq. 2.

    >>> from jaxfl.models import mlp
    >>> fedprox(mlp((8, 8, 1), 10, hidden=(16,)), mu=0.1).name
    'fedprox'
    """
    return fedavg(
        model,
        penalty=functools.partial(proximal, mu=mu) if nonzero(mu) else None,
        name="fedprox",
        **options,
    )


@checked(clip=up_to_infinity, noise_multiplier=check_noise, delta=probability)
def dp_fedavg(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    delta: float | None = None,
    **options: Any,
) -> Algorithm:
    r"""DP-FedAvg: clipped updates, Gaussian noise on their sum, a fixed denominator.

    .. math:: \theta \leftarrow \theta + \frac{\eta_g}{q N}
        \Big( \sum_{i \in \Omega_t} \mathrm{clip}_C(\Delta_i) + N(0, z^2 C^2 I) \Big)

    Args:
        model: the network.
        clip: C, L2 bound on a client's whole update.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).
        options: those of `fedavg`.

    Guarantee: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts.
    References: McMahan et al. 2018 (arXiv:1710.06963).

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> dp_fedavg(mlp((8, 8, 1), 10), clip=0.5, noise_multiplier=1.0, sampling=Poisson(0.1)).mechanism.clip
    0.5
    """
    mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling)
    return fedavg(model, mechanism=mechanism, terms=Terms(delta), name="dp_fedavg", **options)


@checked(clip=up_to_infinity, noise_multiplier=check_noise)
def dp_fedavg_fb(
    model: Model,
    *,
    clip: Number = math.inf,
    noise_multiplier: Number = 0.0,
    sampling: Sampling = Full(),
    head: LocalSGD = LocalSGD(optax.sgd(0.01), epochs=15),
    **options: Any,
) -> Algorithm:
    """DP-FedAvg whose clients are evaluated with a head fine-tuned on their own data (frozen base).

    The fine-tuned copy is used for evaluation only: what is sent equals DP-FedAvg's, so the guarantee does too.

    Args:
        model: the network, with a head.
        clip: as in `dp_fedavg`.
        noise_multiplier: as in `dp_fedavg`.
        sampling: as in `dp_fedavg`.
        head: how a client fine-tunes the head on its training examples.
        options: those of `dp_fedavg`.

    References: the DP-FedAvg-fb column of DP-pFedDSU; DP-FedAvg-ft in CENTAUR's code.

    >>> from jaxfl.models import mlp
    >>> dp_fedavg_fb(mlp((8, 8, 1), 10, hidden=(16,)), clip=1.0, noise_multiplier=1.0).name
    'dp_fedavg_fb'
    """
    check_head(model)
    base = dp_fedavg(
        model, clip=clip, noise_multiplier=noise_multiplier, sampling=sampling, **options
    )
    return fine_tuned(base, local=head, parts=model.head)._replace(name="dp_fedavg_fb")


def keeps_models(base: Algorithm, name: str, client_update: Callable[..., tuple]) -> Algorithm:
    """The method with clients that keep a model, from the server's first on, and are evaluated with it."""

    def init(key: Key[Array, ""], number: int) -> tuple[Server, Params]:
        server, _ = base.init(key, number)
        return server, init_clients(server.params, number)

    return base._replace(
        name=name,
        init=init,
        client_update=client_update,
        personalize=lambda key, server, client, data: client,
    )


def sends_weights(method: Algorithm) -> Algorithm:
    """The method with clients that send their weights, and a server that takes the mean of those for its own."""

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        message, client, info = method.client_update(key, server, client, data)
        return Message(optax.tree.add(server.params, message.update)), client, info

    def server_update(server: Server, aggregate: Params) -> Server:
        return server._replace(params=aggregate)

    return method._replace(
        client_update=client_update, server_update=server_update, sends="weights"
    )
