"""FedRep and CENTAUR (DP-FedRep): a shared extractor, and heads that clients keep."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._support.checks import GAUSSIAN, checked, count_from_0, nonzero, show
from jaxfl.algorithms.server import Server, init_clients, init_server, server_step
from jaxfl.local.train import LocalSGD, LossTerm, fit_head
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms

PUBLISHED = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.01, momentum=0.9))
"""Optimizer of CENTAUR's published code, for the extractor and for the head."""


class Parts(NamedTuple):
    """Division of parameters into a part that clients share and a part that each client keeps."""

    cut: Callable[[Params], tuple[Params, Params]]
    """Function from initial parameters to the shared and the personal part."""
    join: Callable[[Params, Params], Params]
    """Function from the shared and the personal part to the parameters."""
    personal: Callable[[Params, Params], Params]
    """Function from the shared part, and parameters with another head, to the personal part."""
    decay: Number = 0.0
    """Weight decay of the personal part while a client fits it.

    The optimizer itself would decay the joined parameters.
    """


@checked(evaluation_epochs=count_from_0)
def fedrep(
    model: Model,
    *,
    local: LocalSGD = LocalSGD(optax.sgd(0.01, momentum=0.5), 10),
    head: LocalSGD = LocalSGD(optax.sgd(0.01, momentum=0.5), 10, 10),
    evaluation_epochs: int | None = None,
    parts: Parts | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    mechanism: Mechanism = Mechanism(denominator="participants"),
    terms: Terms = Terms(),
    name: str = "fedrep",
) -> Algorithm:
    r"""Build FedRep: a client fits its own head, then trains the extractor and sends its update.

    .. math::
        h_i \leftarrow \arg\min_h F_i(\phi^{t-1}, h), \qquad
        \Delta_i = \arg\min_\phi F_i(\phi, h_i) - \phi^{t-1}, \qquad
        \phi^t = \phi^{t-1} + \eta_g \, \mathrm{aggregate}(\Delta)

    Here :math:`\phi` is the extractor, and :math:`h_i` is the head of client i. A few epochs
    approach each minimum, and a head starts from where the client's last round ended. Before
    evaluation every client, participant or not, fits its head to the current extractor once more.
    No client keeps the result.

    Args:
        model: The network, of which `model.head` stays with the clients. If the head is empty,
            everything is shared.
        local: Training of the extractor by a client in one round.
        head: Training of the head by a client in one round, on features that are computed once. 0
            epochs leave the head unchanged.
        evaluation_epochs: Number of epochs in which a client fits the head before evaluation. None
            means the epochs of `head`.
        parts: Division of the parameters into a shared and a personal part. None means the
            extractor and the head.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        mechanism: Sampling, weights, clip bound and noise.
        terms: Delta and further parts of the privacy statement (see `Terms`).
        name: Name of the method in reports.

    Deviations from the paper: Weights are uniform, unless `mechanism.weights` holds public ones.
    References: Collins et al., Exploiting Shared Representations for Personalized Federated
        Learning, ICML 2021.

    Raises:
        ValueError: The model has no head to fit, or no layer outside its head.

    >>> from jaxfl.models import mlp
    >>> fedrep(mlp((8, 8, 1), 10, hidden=(16,))).name
    'fedrep'
    """
    before_evaluation = with_epochs(head, evaluation_epochs)
    if not model.head and (head.trains or before_evaluation.trains):
        raise ValueError(
            f"head must have 0 epochs for model={model.name!r}, which has no head to fit, got "
            f"{show(head)} with evaluation_epochs={evaluation_epochs!r}. Set both to 0 epochs."
        )
    if parts is None:
        check_extractor(model)
        parts = private_head(model)

    def fit(
        key: Key[Array, ""],
        server: Server,
        client: Params,
        data: ClientData,
        head: LocalSGD = before_evaluation,
    ) -> Params:
        params = parts.join(server.params, client)
        # Without a step, `fit_head` would still compute all features.
        if not head.trains:
            return params

        def decay(params: Params) -> Float[Array, ""]:
            weight = 0.5 * parts.decay
            personal = parts.personal(server.params, params)
            # The gradient of half the squared norm is the part itself, as for a weight decay.
            return weight * jnp.asarray(optax.tree.norm(personal, squared=True))

        penalty: LossTerm | None = None
        if nonzero(parts.decay):
            penalty = decay
        fitted, _ = fit_head(key, model, params, data, local=head, penalty=penalty)
        return fitted

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        # The head and the extractor have keys of their own, so their draws are independent.
        first, second = jax.random.split(key)
        fitted = fit(first, server, client, data, head)
        personal = parts.personal(server.params, fitted)

        def apply(shared: Params, x: Array, *key: Array) -> Array:
            # The personal part is a constant here, so only the shared part has a gradient.
            return model.apply(parts.join(shared, personal), x, *key)

        shared, info = local.train(second, model, server.params, data, apply=apply)
        return Message(optax.tree.sub(shared, server.params)), personal, info

    init = start_parts(model, parts, server_optimizer)
    server_update = functools.partial(server_step, server_optimizer)
    # `fit` personalizes too: the head is fitted to the last broadcast, and then discarded.
    return Algorithm(name, model, init, client_update, server_update, fit, mechanism, terms=terms)


@checked(**GAUSSIAN, evaluation_epochs=count_from_0)
def centaur(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    delta: float | None = None,
    local: LocalSGD = LocalSGD(PUBLISHED, 100),
    head: LocalSGD = LocalSGD(PUBLISHED, 100, 15),
    evaluation_epochs: int | None = None,
    parts: Parts | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
) -> Algorithm:
    r"""Build CENTAUR (DP-FedRep): FedRep with clipped extractor updates and noise on their sum.

    Args:
        model: The network. Its head stays with the clients and needs no noise.
        clip: C, the L2 bound on a client's full extractor update.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        sampling: The sampler, which draws the participants of each round.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.
        local: Training of the extractor by a client in one round. The default is the published one,
            with weight decay 1e-4.
        head: Training of the head by a client in one round. The default is the published one, with
            the same decay.
        evaluation_epochs: Number of epochs of the head's fit before evaluation. None means the
            epochs of `head`.
        parts: Division into a shared and a personal part. None makes the head personal.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.

    Guarantee: Client-level privacy under zero-out adjacency, for the observer of sums and
        broadcasts, by the Gaussian mechanism on the clipped sum, whose sensitivity is C. Heads have
        joint privacy: each client is protected against all other clients, but its head depends on
        its own data. Publishing heads voids the guarantee.
    Deviations from the paper: The denominator qN is fixed and sampling is random. The published
        code splits the clients into disjoint groups.
    References: Shen et al., Share Your Representation Only: Guaranteed Improvement of the
        Privacy-Utility Tradeoff in Federated Learning, ICLR 2023.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Full
    >>> private = centaur(mlp((8, 8, 1), 10), clip=0.01, noise_multiplier=40.0, sampling=Full())
    >>> private.mechanism.clip
    0.01
    """
    mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling)
    return fedrep(
        model,
        local=local,
        head=head,
        evaluation_epochs=evaluation_epochs,
        parts=parts,
        server_optimizer=server_optimizer,
        mechanism=mechanism,
        terms=Terms(delta),
        name="centaur",
    )


def with_epochs(local: LocalSGD, epochs: int | None) -> LocalSGD:
    """Return a local training with another number of epochs, or unchanged if it is None."""
    if epochs is None:
        return local
    # `steps` would take the place of the epochs.
    return dataclasses.replace(local, epochs=epochs, steps=None)


def split_head(model: Model, params: Params) -> tuple[Params, Params]:
    """Return the parameters of the extractor, and those of the head."""
    extractor = {name: params[name] for name in params if name not in model.head}
    head = {name: params[name] for name in model.head}
    return extractor, head


def private_head(model: Model) -> Parts:
    """Return the division into a shared extractor and a personal head."""
    return Parts(
        cut=lambda params: split_head(model, params),
        join=lambda shared, personal: {**shared, **personal},
        personal=lambda shared, params: split_head(model, params)[1],
    )


def start_parts(model: Model, parts: Parts, optimizer: optax.GradientTransformation) -> Callable:
    """Return an `init` that gives the server the shared part, and all clients one personal part."""

    def init(key: Key[Array, ""], num_clients: int) -> tuple[Server, Params]:
        shared, personal = parts.cut(model.init(key))
        return init_server(shared, optimizer), init_clients(personal, num_clients)

    return init


def check_extractor(model: Model) -> None:
    """Require a layer outside the head."""
    if set(model.layers) <= set(model.head):
        raise ValueError(
            f"model must have a layer outside its head, got {model.name!r} with "
            f"head={model.head!r}. Give a model with more layers, or with a smaller head."
        )
