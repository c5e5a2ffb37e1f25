"""The FedAvg family: local-only, FedAvg, FedProx, DP-FedAvg and DP-FedAvg-fb.

One recipe with four options: communicate or not, a penalty (a proximal term), a clip bound with noise, and a head
that is fine-tuned before evaluation.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import at_least_0, check_noise, checked, nonzero, probability, show, up_to_infinity
from jaxfl.local.penalties import proximal
from jaxfl.local.train import fit_head, train_model
from jaxfl.privacy.mechanism import Full, Mechanism, Sampling
from jaxfl.server import Server, init_clients, init_server, server_step
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Tree


@checked()
def local_only(
    model: Model,
    *,
    optimizer: optax.GradientTransformation = optax.sgd(0.05),
    batch_size: int = 32,
    epochs: int = 1,
    steps: int | None = None,
    sampling: Sampling = Full(),
) -> Algorithm:
    """Every client trains alone from the same public initialisation; nothing is sent, so epsilon is 0.

    Args:
        model: the network.
        optimizer: local optimizer, fresh in every round.
        batch_size: B.
        epochs: local passes per round, unless `steps` is given.
        steps: local steps per round.
        sampling: who trains in a round.

    >>> from jaxfl.models import mlp
    >>> local_only(mlp((8, 8, 1), 10, hidden=(16,))).mechanism.communicates
    False
    """

    def init(key: Key[Array, ""], number: int) -> tuple[Tree, Tree]:
        return (), init_clients(model.init(key), number)

    def client_update(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> tuple:
        del server
        params, info = train_model(
            key,
            model,
            client,
            data,
            optimizer=optimizer,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
        )
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


@checked(sam_radius=at_least_0)
def fedavg(
    model: Model,
    *,
    optimizer: optax.GradientTransformation = optax.sgd(0.05),
    batch_size: int = 32,
    epochs: int = 1,
    steps: int | None = None,
    penalty: Callable[[Params, Params], Float[Array, ""]] | None = None,
    sam_radius: Number = 0.0,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    mechanism: Mechanism = Mechanism(denominator="participants"),
    name: str = "fedavg",
) -> Algorithm:
    r"""FedAvg: :math:`\theta \leftarrow \theta + \eta_g \sum_i w_i \Delta_i / \sum_i w_i` over the participants.

    Args:
        model: the network.
        optimizer: local optimizer, fresh in every round.
        batch_size: B.
        epochs: local passes per round, unless `steps` is given.
        steps: local steps per round.
        penalty: of a client's parameters and the broadcast ones, added to the loss.
        sam_radius: rho of sharpness-aware local steps (see `jaxfl.local.train.ascend`); 0: plain ones.
        server_optimizer: takes the negative aggregate as its gradient.
        mechanism: sampling, weights, clip and noise.
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
        params, info = train_model(
            key,
            model,
            server.params,
            data,
            optimizer=optimizer,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            penalty=(lambda params: penalty(params, server.params)) if penalty else None,
            sam_radius=sam_radius,
            private=mechanism.examples,
            norms=model.norms,
        )
        return Message(optax.tree.sub(params, server.params)), client, info

    return Algorithm(
        name=name,
        model=model,
        init=init,
        client_update=client_update,
        server_update=lambda server, aggregate: server_step(server_optimizer, server, aggregate),
        personalize=lambda key, server, client, data: server.params,
        mechanism=mechanism,
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
    return fedavg(model, penalty=functools.partial(proximal, mu=mu) if nonzero(mu) else None, name="fedprox", **options)


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
    mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling, delta=delta)
    return fedavg(model, mechanism=mechanism, name="dp_fedavg", **options)


@checked(clip=up_to_infinity, noise_multiplier=check_noise)
def dp_fedavg_fb(
    model: Model,
    *,
    clip: Number = math.inf,
    noise_multiplier: Number = 0.0,
    sampling: Sampling = Full(),
    head_optimizer: optax.GradientTransformation = optax.sgd(0.01),
    head_epochs: int = 15,
    head_batch_size: int = 32,
    **options: Any,
) -> Algorithm:
    """DP-FedAvg whose clients are evaluated with a head fine-tuned on their own data (frozen base).

    The fine-tuned copy is used for evaluation only: what is sent equals DP-FedAvg's, so the guarantee does too.

    Args:
        model: the network, with a head.
        clip: as in `dp_fedavg`.
        noise_multiplier: as in `dp_fedavg`.
        sampling: as in `dp_fedavg`.
        head_optimizer: optimizer of the fine-tuning.
        head_epochs: its passes over the client's training examples.
        head_batch_size: its batch size.
        options: those of `dp_fedavg`.

    References: the DP-FedAvg-fb column of DP-pFedDSU; DP-FedAvg-ft in CENTAUR's code.

    >>> from jaxfl.models import mlp
    >>> dp_fedavg_fb(mlp((8, 8, 1), 10, hidden=(16,)), clip=1.0, noise_multiplier=1.0).name
    'dp_fedavg_fb'
    """
    base = dp_fedavg(model, clip=clip, noise_multiplier=noise_multiplier, sampling=sampling, **options)

    def personalize(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> Params:
        del client
        params, _ = fit_head(
            key, model, server.params, data, optimizer=head_optimizer, batch_size=head_batch_size, epochs=head_epochs
        )
        return params

    return base._replace(name="dp_fedavg_fb", personalize=personalize)


def refuse_server_optimizer(options: Mapping[str, Any], why: str) -> None:
    """Where clients send weights, their mean is the server's next state, and no optimizer makes a step."""
    if options.get("server_optimizer") is not None:
        value = show(options["server_optimizer"])
        raise ValueError(
            f"server_optimizer={value} with {why}: the mean of the weights is taken as it is, leave it out"
        )


def sends_weights(method: Algorithm) -> Algorithm:
    """The same method whose clients send their weights, and whose server takes the mean of those for its own."""

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        message, client, info = method.client_update(key, server, client, data)
        return Message(optax.tree.add(server.params, message.update)), client, info

    return method._replace(
        client_update=client_update, server_update=lambda server, aggregate: server._replace(params=aggregate)
    )
