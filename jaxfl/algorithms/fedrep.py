"""A shared extractor, and heads that never leave their clients: FedRep, and CENTAUR (DP-FedRep)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import GAUSSIAN, checked, count_from_0, nonzero, show
from jaxfl.local.train import LocalSGD, fit_head
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Sampling
from jaxfl.server import Server, init_clients, init_server, server_step
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms

_PUBLISHED = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.01, momentum=0.9))
"""The optimizer that CENTAUR's published code has for the extractor and for the head."""


class Parts(NamedTuple):
    """How parameters consist of a part that all clients share and a part that each client keeps."""

    cut: Callable[[Params], tuple[Params, Params]]
    """Initial parameters -> shared, personal."""
    join: Callable[[Params, Params], Params]
    """Shared, personal -> parameters."""
    personal: Callable[[Params, Params], Params]
    """Shared, parameters with another head -> personal."""
    decay: Number = 0.0
    """Weight decay of the personal part while it is fitted; the optimizer itself would decay the joined parameters."""


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
    r"""FedRep: in a round a client first fits its own head, then trains the extractor, whose update alone is sent.

    .. math::
        h_i \leftarrow \arg\min_h F_i(\phi^{t-1}, h), \qquad
        \Delta_i = \arg\min_\phi F_i(\phi, h_i) - \phi^{t-1}, \qquad
        \phi^t = \phi^{t-1} + \eta_g \, \mathrm{aggregate}(\Delta)

    each minimum approached by some epochs, from where the last round ended. For evaluation every client,
    participant or not, fits its head to the current extractor once more; nothing of that is kept.

    Args:
        model: the network; `model.head` stays with the clients; if it is empty, everything is shared.
        local: how a client trains the extractor in a round.
        head: how it fits the head, on features that are computed once; 0 epochs leave the head unchanged.
        evaluation_epochs: epochs for the head before evaluation (default: those of `head`).
        parts: what is shared and what is kept (default: the extractor and the head).
        server_optimizer: takes the negative aggregate as its gradient.
        mechanism: sampling, weights, clip and noise.
        terms: what else the privacy statement says.
        name: name of the method in reports.

    Deviations from the paper: uniform weights unless `mechanism.weights` holds public ones.
    References: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021.

    >>> from jaxfl.models import mlp
    >>> fedrep(mlp((8, 8, 1), 10, hidden=(16,))).name
    'fedrep'
    """
    before_evaluation = head
    if evaluation_epochs is not None:
        before_evaluation = dataclasses.replace(head, epochs=evaluation_epochs, steps=None)
    if not model.head and (head.trains or before_evaluation.trains):
        raise ValueError(
            f"head={show(head)}, evaluation_epochs={evaluation_epochs!r}: model={model.name!r} has no head to fit, so "
            "give 0 epochs"
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
        if not head.trains:
            return params

        def decay(params: Params) -> Float[Array, ""]:
            return (
                0.5
                * parts.decay
                * jnp.asarray(optax.tree.norm(parts.personal(server.params, params), squared=True))
            )

        return fit_head(
            key, model, params, data, local=head, penalty=decay if nonzero(parts.decay) else None
        )[0]

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        first, second = jax.random.split(key)
        personal = parts.personal(server.params, fit(first, server, client, data, head))

        def apply(shared: Params, x: Array, *key: Array) -> Array:
            return model.apply(parts.join(shared, personal), x, *key)

        shared, info = local.train(second, model, server.params, data, apply=apply)
        return Message(optax.tree.sub(shared, server.params)), personal, info

    init, server_update = (
        start_parts(model, parts, server_optimizer),
        functools.partial(server_step, server_optimizer),
    )
    return Algorithm(name, model, init, client_update, server_update, fit, mechanism, terms=terms)


@checked(**GAUSSIAN)
def centaur(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    delta: float | None = None,
    local: LocalSGD = LocalSGD(_PUBLISHED, 100),
    head: LocalSGD = LocalSGD(_PUBLISHED, 100, 15),
    **options: Any,
) -> Algorithm:
    r"""CENTAUR, also DP-FedRep: FedRep with clipped extractor updates and Gaussian noise on their sum.

    Args:
        model: the network; its head stays with the clients and needs no noise.
        clip: C, L2 bound on a client's whole extractor update.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).
        local: as in `fedrep`; by default as published, with weight decay 1e-4.
        head: as in `fedrep`; by default as published, with the same decay.
        options: those of `fedrep`.

    Guarantee: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts; for each client
        against all others (joint privacy): its own head depends on its own data. Publishing heads voids it.
    Deviations from the paper: a fixed denominator qN and true sampling, where the published code splits the clients
        into disjoint groups.
    References: Shen et al., Share Your Representation Only: Guaranteed Improvement of the Privacy-Utility Tradeoff in
        Federated Learning, ICLR 2023.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Full
    >>> centaur(mlp((8, 8, 1), 10), clip=0.01, noise_multiplier=40.0, sampling=Full()).mechanism.clip
    0.01
    """
    mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling)
    return fedrep(
        model,
        local=local,
        head=head,
        mechanism=mechanism,
        terms=Terms(delta),
        name="centaur",
        **options,
    )


def split_head(model: Model, params: Params) -> tuple[Params, Params]:
    """Extractor and head of all parameters."""
    extractor = {name: params[name] for name in params if name not in model.head}
    return extractor, {name: params[name] for name in model.head}


def private_head(model: Model) -> Parts:
    """The extractor is shared, the head stays."""
    return Parts(
        cut=lambda params: split_head(model, params),
        join=lambda shared, personal: {**shared, **personal},
        personal=lambda shared, params: split_head(model, params)[1],
    )


def start_parts(model: Model, parts: Parts, optimizer: optax.GradientTransformation) -> Callable:
    """`init` of a server with the shared part, and clients with the same personal part."""

    def init(key: Key[Array, ""], number: int) -> tuple[Server, Params]:
        shared, personal = parts.cut(model.init(key))
        return init_server(shared, optimizer), init_clients(personal, number)

    return init


def check_extractor(model: Model) -> None:
    """Require a layer besides the head."""
    if set(model.layers) <= set(model.head):
        raise ValueError(
            f"model={model.name!r} has no layer besides its head {model.head!r}: nothing would be shared"
        )
