"""PPSGD: a shared model plus a personal head that is added to the shared one."""

from collections.abc import Callable
from typing import Any, Literal

import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import at_least_0, check_noise, check_positive, checked, probability, up_to_infinity
from jaxfl.algorithms.fedrep import Parts, centaur, init_parts, split_head
from jaxfl.local.train import squared_error, train_model
from jaxfl.privacy.mechanism import Mechanism, Sampling
from jaxfl.server import Server, init_server, server_step
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params


@checked(clip=up_to_infinity, noise_multiplier=check_noise, delta=probability)
def ppsgd(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    variant: Literal["original", "centaur"] = "original",
    delta: float | None = None,
    **options: Any,
) -> Algorithm:
    r"""PPSGD: logits :math:`\phi(x) (w + \theta_i)`, with :math:`\theta_i = 0` at first, private to its client.

    "original" takes one gradient step per round, :math:`(g_\phi, g_w, g_\theta)` on one batch, where
    :math:`g_w = g_\theta`:

    .. math::
        (\phi, w) \leftarrow (\phi, w) - \eta_w \, \mathrm{aggregate}(g_\phi, g_w), \qquad
        \theta_i \leftarrow \theta_i - \eta_\theta \, g_\theta

    "centaur" is the variant of CENTAUR's experiments: FedRep with :math:`\theta_i` in place of the head and
    :math:`(\phi, w)` in place of the extractor; :math:`\theta_i` is fitted for one epoch in a round, and for 15 on a
    copy before evaluation, by the published optimizer: SGD at 0.1, momentum 0.9, weight decay 1e-4 of
    :math:`\theta_i` alone.

    Args:
        model: the network, with a head.
        clip: C, L2 bound on a client's :math:`(\phi, w)` jointly: its gradient ("original") or update ("centaur").
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        variant: "original" or "centaur".
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).
        options: "original": `batch_size` (10), `server_learning_rate` :math:`\eta_w` (0.1), `personal_learning_rate`
            :math:`\eta_\theta` (0.1; the published code multiplies its own by the number of participants), and `loss`
            of logits, labels and weights (`jaxfl.local.train.squared_error`). "centaur": those of `centaur`, of which
            `head_optimizer`, `head_epochs` (1) and `evaluation_epochs` (15) are of :math:`\theta_i`, and
            `head_decay` (1e-4), its weight decay.

    Guarantee: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts, by the Gaussian
        mechanism on the clipped sum; for each client against all others (joint privacy): its own head depends on its
        own data. Publishing heads voids it.
    Deviations from the paper: a fixed denominator qN and true sampling. Heads have a bias. Heads are added as
        parameters, which for heads of one linear layer adds their logits. CENTAUR's own heads start at random.
    References: Bietti et al., Personalization Improves Privacy-Accuracy Tradeoffs in Federated Learning, ICML 2022;
        Shen et al., Share Your Representation Only, ICLR 2023 ("centaur").

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> ppsgd(mlp((8, 8, 1), 10), clip=1.0, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'ppsgd'
    """
    if not model.head:
        raise ValueError(f"model={model.name!r} has no head: name one, to which clients add their own")
    if variant == "original":
        mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling, delta=delta)
        return _one_step(model, mechanism, **options)
    mechanism = {"clip": clip, "noise_multiplier": noise_multiplier, "sampling": sampling, "delta": delta}
    return _of_centaur(model, mechanism, **options)


def added_head(model: Model, decay: Number = 0.0) -> Parts:
    """Everything is shared, and a personal head, zero at first, is added to the shared one."""

    def join(shared: Params, personal: Params) -> Params:
        return {**shared, **optax.tree.add(split_head(model, shared)[1], personal)}

    return Parts(
        cut=lambda params: (params, optax.tree.zeros_like(split_head(model, params)[1])),
        join=join,
        own=lambda shared, params: optax.tree.sub(split_head(model, params)[1], split_head(model, shared)[1]),
        decay=decay,
    )


def _of_centaur(
    model: Model,
    mechanism: dict[str, Any],
    *,
    head_optimizer: optax.GradientTransformation = optax.sgd(0.1, momentum=0.9),
    head_decay: Number = 1e-4,
    head_epochs: int = 1,
    evaluation_epochs: int = 15,
    **options: Any,
) -> Algorithm:
    check_positive("head_decay", head_decay, zero=True)
    heads = {"head_optimizer": head_optimizer, "head_epochs": head_epochs, "evaluation_epochs": evaluation_epochs}
    return centaur(model, parts=added_head(model, head_decay), **mechanism, **heads, **options)._replace(name="ppsgd")


@checked(server_learning_rate=at_least_0, personal_learning_rate=at_least_0)
def _one_step(
    model: Model,
    mechanism: Mechanism,
    *,
    batch_size: int = 10,
    server_learning_rate: Number = 0.1,
    personal_learning_rate: Number = 0.1,
    loss: Callable[[Array, Array, Array], Float[Array, ""]] = squared_error,
) -> Algorithm:
    parts = added_head(model)
    server_optimizer = optax.sgd(server_learning_rate)

    def init(key: Key[Array, ""], number: int) -> tuple[Server, Params]:
        shared, personal = init_parts(key, model, parts, number)
        return init_server(shared, server_optimizer), personal

    def client_update(key: Key[Array, ""], server: Server, client: Params, data: ClientData) -> tuple:
        before = (server.params, client)
        after, info = train_model(
            key,
            model,
            before,
            data,
            apply=lambda both, x: model.apply(parts.join(*both), x),
            optimizer=optax.sgd(1.0),
            batch_size=batch_size,
            steps=1,
            loss=loss,
        )
        shared, personal = optax.tree.sub(after, before)  # the negative gradient
        return Message(shared), optax.tree.add_scale(client, personal_learning_rate, personal), info

    return Algorithm(
        name="ppsgd",
        model=model,
        init=init,
        client_update=client_update,
        server_update=lambda server, aggregate: server_step(server_optimizer, server, aggregate),
        personalize=lambda key, server, client, data: parts.join(server.params, client),
        mechanism=mechanism,
    )
