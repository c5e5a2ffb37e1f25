"""PPSGD: a shared model plus a personal head that is added to the shared one."""

import functools
from typing import Any

import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import GAUSSIAN, at_least_0, checked, count_from_0
from jaxfl.algorithms.fedrep import Parts, centaur, split_head, start_parts
from jaxfl.local.train import LocalSGD, check_head
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Sampling
from jaxfl.server import Server, server_step
from jaxfl.tasks import Loss, mean, one_hot_error
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms


@checked(**GAUSSIAN, server_learning_rate=at_least_0, personal_learning_rate=at_least_0)
def ppsgd(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    batch_size: int = 10,
    server_learning_rate: Number = 0.1,
    personal_learning_rate: Number = 0.1,
    loss: Loss | None = one_hot_error,
    delta: float | None = None,
) -> Algorithm:
    r"""PPSGD: logits :math:`\phi(x) (w + \theta_i)`, with :math:`\theta_i = 0` at first, private to its client.

    A round is one gradient step, :math:`(g_\phi, g_w, g_\theta)` on one batch, where :math:`g_w = g_\theta`:

    .. math::
        (\phi, w) \leftarrow (\phi, w) - \eta_w \, \mathrm{aggregate}(g_\phi, g_w), \qquad
        \theta_i \leftarrow \theta_i - \eta_\theta \, g_\theta

    Args:
        model: the network, with a head.
        clip: C, L2 bound on a client's gradient of :math:`(\phi, w)` jointly.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        batch_size: B.
        server_learning_rate: :math:`\eta_w`.
        personal_learning_rate: :math:`\eta_\theta`; the published code multiplies its rate by the number of
            participants.
        loss: of each example, from a batch's outputs and labels; None: the task's.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).

    Guarantee: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts, by the Gaussian
        mechanism on the clipped sum; for each client against all others (joint privacy): its own head depends on its
        own data. Publishing heads voids it.
    Deviations from the paper: a fixed denominator qN and true sampling. Heads have a bias. Heads are added as
        parameters, which for heads of one linear layer adds their logits.
    References: Bietti et al., Personalization Improves Privacy-Accuracy Tradeoffs in Federated Learning, ICML 2022.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> ppsgd(mlp((8, 8, 1), 10), clip=1.0, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'ppsgd'
    """
    parts = added_head(model)
    local, server_optimizer = (
        LocalSGD(optax.sgd(1.0), batch_size, steps=1),
        optax.sgd(server_learning_rate),
    )

    def apply(both: tuple[Params, Params], x: Array, *key: Array) -> Array:
        return model.apply(parts.join(*both), x, *key)

    def batch_loss(outputs: Array, labels: Array, weights: Float[Array, "B"]) -> Float[Array, ""]:
        return mean((loss or model.task.loss)(outputs, labels), weights)

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        before = (server.params, client)
        after, info = local.train(key, model, before, data, apply=apply, loss=batch_loss)
        shared, personal = optax.tree.sub(after, before)  # the negative gradient
        return Message(shared), optax.tree.add_scale(client, personal_learning_rate, personal), info

    def personalize(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> Params:
        return parts.join(server.params, client)

    init, server_update = (
        start_parts(model, parts, server_optimizer),
        functools.partial(server_step, server_optimizer),
    )
    mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling)
    return Algorithm(
        "ppsgd",
        model,
        init,
        client_update,
        server_update,
        personalize,
        mechanism,
        terms=Terms(delta),
    )


@checked(head_decay=at_least_0, evaluation_epochs=count_from_0)
def ppsgd_centaur(
    model: Model,
    *,
    head: LocalSGD = LocalSGD(optax.sgd(0.1, momentum=0.9), 100),
    head_decay: Number = 1e-4,
    evaluation_epochs: int = 15,
    **options: Any,
) -> Algorithm:
    r"""Build PPSGD as CENTAUR's experiments have it: FedRep with local epochs in place of one gradient step.

    Each client keeps a head :math:`\theta_i`, which is added to the shared head w. The extractor :math:`\phi` and w are
    averaged.

    Args:
        model: the network, with a head.
        head: how :math:`\theta_i` is fitted in a round; by default as published.
        head_decay: weight decay of :math:`\theta_i` alone.
        evaluation_epochs: epochs for a copy of :math:`\theta_i` before evaluation.
        options: those of `centaur`; `clip` bounds the update of :math:`(\phi, w)` jointly.

    Guarantee: `centaur`'s.
    Deviations from the paper: those of `ppsgd`. CENTAUR's own heads start at random.
    References: Shen et al., Share Your Representation Only, ICLR 2023.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> ppsgd_centaur(mlp((8, 8, 1), 10), clip=1.0, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'ppsgd_centaur'
    """
    parts = added_head(model, head_decay)
    base = centaur(model, head=head, evaluation_epochs=evaluation_epochs, parts=parts, **options)
    return base._replace(name="ppsgd_centaur")


def added_head(model: Model, decay: Number = 0.0) -> Parts:
    """The whole model is shared, and a personal head, zero at first, is added to the shared head."""
    check_head(model)

    def join(shared: Params, personal: Params) -> Params:
        return {**shared, **optax.tree.add(split_head(model, shared)[1], personal)}

    return Parts(
        cut=lambda params: (params, optax.tree.zeros_like(split_head(model, params)[1])),
        join=join,
        personal=lambda shared, params: optax.tree.sub(
            split_head(model, params)[1], split_head(model, shared)[1]
        ),
        decay=decay,
    )
