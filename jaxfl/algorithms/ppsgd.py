"""PPSGD: a shared model, and a personal head that is added to the shared head."""

import functools

import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._support.checks import GAUSSIAN, at_least_0, checked, count_from_0
from jaxfl.algorithms.fedrep import PUBLISHED, Parts, centaur, split_head, start_parts
from jaxfl.algorithms.server import Server, server_step
from jaxfl.local.train import LocalSGD, check_head
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Sampling
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
    r"""Build PPSGD: the shared head w and a client's own head :math:`\theta_i` are added.

    The logits are :math:`\phi(x) (w + \theta_i)`. Each :math:`\theta_i` is 0 at first, and stays
    with its client. A round's gradients :math:`g_\phi`, :math:`g_w` and :math:`g_\theta` come from
    one batch of each participant, where :math:`g_w = g_\theta`:

    .. math::
        (\phi, w) \leftarrow (\phi, w) - \eta_w \, \mathrm{aggregate}(g_\phi, g_w), \qquad
        \theta_i \leftarrow \theta_i - \eta_\theta \, g_\theta

    Args:
        model: The network, with a head.
        clip: C, L2 bound on the joint norm of a client's gradient of :math:`(\phi, w)`.
        noise_multiplier: z, std of the noise on the sum, in units of C (see
            `jaxfl.privacy.calibrate`).
        sampling: Rule that draws the participants of each round.
        batch_size: Number of examples in a client's batch.
        server_learning_rate: :math:`\eta_w`, the learning rate of the shared model.
        personal_learning_rate: :math:`\eta_\theta`, the learning rate of the personal heads. The
            published code multiplies its rate by the number of participants.
        loss: Function from a batch's outputs and labels to the loss of each example. None stands
            for the loss of the task.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy with zero-out adjacency and sensitivity C, for the observer of
        sums and broadcasts, by the Gaussian mechanism on the clipped sum. Heads have joint privacy:
        each client is protected against all other clients, but its head depends on its own data.
        Publishing heads voids the guarantee.
    Deviations from the paper: The denominator qN is fixed, and cohorts are sampled at random. Heads
        have a bias. Heads are added as parameters, which for heads of one linear layer adds their
        logits.
    References: Bietti et al., Personalization Improves Privacy-Accuracy Tradeoffs in Federated
        Learning, ICML 2022.

    Raises:
        ValueError: The model has no head, or the clip bound is infinite and there is noise.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> ppsgd(mlp((8, 8, 1), 10), clip=1.0, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'ppsgd'
    """
    parts = added_head(model)
    per_example = loss or model.task.loss
    # With the learning rate 1, a step's change of the parameters is the negative gradient.
    local = LocalSGD(optax.sgd(1.0), batch_size, steps=1)
    # The aggregate is a mean of negative gradients, so the server's rate is eta_w.
    server_optimizer = optax.sgd(server_learning_rate)

    def apply(both: tuple[Params, Params], x: Array, *key: Array) -> Array:
        return model.apply(parts.join(*both), x, *key)

    def batch_loss(outputs: Array, labels: Array, weights: Float[Array, "B"]) -> Float[Array, ""]:
        return mean(per_example(outputs, labels), weights)

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        before = (server.params, client)
        after, info = local.train(key, model, before, data, apply=apply, loss=batch_loss)
        shared_change, head_change = optax.tree.sub(after, before)
        # The head's own gradient stays on the client, so it is neither clipped nor noised.
        head = optax.tree.add_scale(client, personal_learning_rate, head_change)
        return Message(shared_change), head, info

    def personalize(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> Params:
        return parts.join(server.params, client)

    return Algorithm(
        name="ppsgd",
        model=model,
        init=start_parts(model, parts, server_optimizer),
        client_update=client_update,
        server_update=functools.partial(server_step, server_optimizer),
        personalize=personalize,
        mechanism=Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling),
        terms=Terms(delta),
    )


@checked(**GAUSSIAN, head_decay=at_least_0, evaluation_epochs=count_from_0)
def ppsgd_centaur(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    local: LocalSGD = LocalSGD(PUBLISHED, 100),
    head: LocalSGD = LocalSGD(optax.sgd(0.1, momentum=0.9), 100),
    head_decay: Number = 1e-4,
    evaluation_epochs: int = 15,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build PPSGD as in CENTAUR's experiments: FedRep's local epochs replace the gradient step.

    Each client keeps a head :math:`\theta_i`, which is added to the shared head w. The server
    averages the extractor :math:`\phi` and w.

    Args:
        model: The network, with a head.
        clip: C, L2 bound on the joint norm of the update of :math:`(\phi, w)`.
        noise_multiplier: z, std of the noise on the sum, in units of C (see
            `jaxfl.privacy.calibrate`).
        sampling: Rule that draws the participants of each round.
        local: Training of :math:`(\phi, w)` by a client in one round. The default is the published
            one, with weight decay 1e-4.
        head: Optimizer, batches and epochs with which a client fits :math:`\theta_i` in a round.
            The default is the published one.
        head_decay: Weight decay of :math:`\theta_i`. A decay in `head` would be on
            :math:`w + \theta_i`.
        evaluation_epochs: Number of epochs that fit a copy of :math:`\theta_i` before an
            evaluation.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: The guarantee of `centaur`.
    Deviations from the paper: The deviations of `ppsgd` apply. CENTAUR's own heads start at random.
    References: Shen et al., Share Your Representation Only, ICLR 2023.

    Raises:
        ValueError: The model has no head, or the clip bound is infinite and there is noise.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> private = {"clip": 1.0, "noise_multiplier": 1.0, "sampling": Poisson(0.1)}
    >>> ppsgd_centaur(mlp((8, 8, 1), 10), **private).name
    'ppsgd_centaur'
    """
    parts = added_head(model, head_decay)
    base = centaur(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        delta=delta,
        local=local,
        head=head,
        evaluation_epochs=evaluation_epochs,
        parts=parts,
        server_optimizer=server_optimizer,
    )
    return base._replace(name="ppsgd_centaur")


def added_head(model: Model, decay: Number = 0.0) -> Parts:
    """Build parts that share all layers, and add a personal head to the shared head.

    Personal heads are 0 at first.

    Args:
        model: The network, with a head.
        decay: Weight decay of the personal head while it is fitted.
    """
    check_head(model)

    def cut(params: Params) -> tuple[Params, Params]:
        _, head = split_head(model, params)
        return params, optax.tree.zeros_like(head)

    def join(shared: Params, personal: Params) -> Params:
        _, head = split_head(model, shared)
        return {**shared, **optax.tree.add(head, personal)}

    def personal(shared: Params, params: Params) -> Params:
        _, shared_head = split_head(model, shared)
        _, head = split_head(model, params)
        # A fitted head is the sum of both heads, so this inverts `join`.
        return optax.tree.sub(head, shared_head)

    return Parts(cut=cut, join=join, personal=personal, decay=decay)
