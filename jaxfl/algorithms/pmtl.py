"""PMTL, PMTL-FT and MR-MTL: personal models that stay near the mean of all models."""

import math
from typing import Literal

import jax
import optax
from jax import Array
from jaxtyping import Key

from jaxfl._support.checks import (
    GAUSSIAN,
    at_least_0,
    check_delta,
    checked,
)
from jaxfl.algorithms.fedavg import (
    GradientRule,
    dp_fedavg,
    dp_fedavg_fb,
    keeps_models,
    proximal_penalty,
    pull_to,
)
from jaxfl.algorithms.server import Server
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params

_COPY = 2**31 + 7
"""Number that derives the key of the second copy's training from a client's key."""


@checked(**GAUSSIAN, penalty_weight=at_least_0)
def pmtl(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    penalty_weight: Number = 1.0,
    start: Literal["own", "broadcast"] = "own",
    send: Literal["difference", "step", "copy"] = "difference",
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build PMTL: private mean-regularised multi-task learning.

    The objective is :math:`\min \sum_i F_i(w_i) + \frac{\lambda}{2} \|w_i - w\|^2`. Clients
    approach their own minimum in a round, and the server adds the aggregate:

    .. math::
        w_i \approx \arg\min_v F_i(v) + \frac{\lambda}{2} \|v - w^t\|^2, \qquad
        \Delta_i = w_i - w^t, \qquad
        w^{t+1} = w^t + \eta_g \, \mathrm{aggregate}(\Delta)

    A client keeps :math:`w_i`, the weights with which it is evaluated.

    Args:
        model: The network.
        clip: C, L2 bound on a client's update.
        noise_multiplier: z, std of the noise on the sum, in units of C (see
            `jaxfl.privacy.calibrate`).
        sampling: Rule that draws the participants of each round.
        penalty_weight: :math:`\lambda`. 0 with `start="broadcast"` makes clients send the same
            updates as in DP-FedAvg.
        start: Weights from which local training starts: the client's "own" weights, or the
            "broadcast" weights.
        send: Update that a client sends. "difference" is :math:`\Delta_i`. "step" is the change by
            local training. "copy" is the update of a second copy of :math:`w^t`, trained without
            the penalty, as in the published code. The copy doubles the work, and excludes a
            `DPSGD`.
        local: Optimizer, batches and epochs of a client's training in a round. A `DPSGD` also
            protects single examples.
        server_optimizer: Optimizer that takes the negative aggregate as its gradient. The default
            adds the aggregate to w.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy with zero-out adjacency and sensitivity C, for the observer of
        sums and broadcasts, by the Gaussian mechanism on the clipped sum. Personal weights have
        joint privacy: each client is protected against all other clients, but its weights depend on
        its own data. Publishing personal weights voids the guarantee.
    Deviations from the paper: Weights of clients are uniform, not data sizes. The denominator qN is
        fixed.
    References: Hu, Wu, Smith, Private Multi-Task Learning: Formulation and Applications to
        Federated Learning, TMLR 2023.

    Raises:
        ValueError: `send` is "copy" with a `DPSGD`, or the clip bound is infinite and there is
            noise.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> pmtl(mlp((8, 8, 1), 10), clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'pmtl'
    """
    if send == "copy" and isinstance(local, DPSGD):
        raise ValueError(
            f"send must be 'difference' or 'step' with private local steps, got {send!r} with "
            f"{local=}. Choose another send, or give a LocalSGD: a copy trains twice, and a DPSGD "
            "accounts for one training."
        )
    penalty = proximal_penalty(penalty_weight)
    base = dp_fedavg(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        local=local,
        server_optimizer=server_optimizer,
        delta=delta,
    )

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        pull = pull_to(server.params, penalty)
        first = server.params
        if start == "own":
            first = client
        params, info = local.train(key, model, first, data, penalty=pull)
        origin = server.params
        # A step leaves out how far the client's own start was from the broadcast.
        if send == "step":
            origin = first
        sent = params
        # The copy starts from the broadcast, so the update has nothing of the client's own model.
        if send == "copy":
            sent, _ = local.train(jax.random.fold_in(key, _COPY), model, server.params, data)
        # The client keeps w_i, whatever it sends.
        return Message(optax.tree.sub(sent, origin)), params, info

    return keeps_models(base, "pmtl", client_update)


@checked(**GAUSSIAN, penalty_weight=at_least_0)
def pmtl_ft(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    penalty_weight: Number = 1.0,
    head: LocalSGD = LocalSGD(optax.sgd(0.01), epochs=15),
    local: LocalSGD | DPSGD = LocalSGD(optax.sgd(0.05)),
    gradient: GradientRule | None = None,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build PMTL-FT: clients train from :math:`w^t`, and are evaluated with fine-tuned heads.

    Local training has the penalty of `pmtl`. Clients keep nothing between rounds.

    Args:
        model: The network, with a head.
        clip: C, L2 bound on a client's update.
        noise_multiplier: z, std of the noise on the sum, in units of C (see
            `jaxfl.privacy.calibrate`).
        sampling: Rule that draws the participants of each round.
        penalty_weight: :math:`\lambda` of `pmtl`. 0 gives `dp_fedavg_fb`.
        head: Training of the head by a client before evaluation.
        local: Local training of a client in one round. A `DPSGD` protects single examples.
        gradient: Function that changes how a local step computes its gradient, such as
            `jaxfl.local.sam.sam(0.5)`. None takes the gradient of the batch.
        server_optimizer: Optimizer of the server, whose gradient is the negative aggregate.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: The guarantee of `dp_fedavg_fb`.
    Deviations from the paper: CENTAUR's PMTL-FT has the penalty :math:`\lambda \|w - w^t\|^2` with
        :math:`\lambda = 1` and 5 epochs, which is `penalty_weight=2`. The published code computes
        the penalty from detached tensors, so that it has no gradient. That code is therefore
        DP-FedAvg with a fine-tuned head (`penalty_weight=0`). Here the penalty has its gradient.
    References: Shen et al., Share Your Representation Only, ICLR 2023.

    Raises:
        ValueError: The model has no head, or the clip bound is infinite and there is noise.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> pmtl_ft(mlp((8, 8, 1), 10), clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'pmtl_ft'
    """
    base = dp_fedavg_fb(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        head=head,
        local=local,
        penalty=proximal_penalty(penalty_weight),
        gradient=gradient,
        server_optimizer=server_optimizer,
        delta=delta,
    )
    return base._replace(name="pmtl_ft")


@checked(penalty_weight=at_least_0, delta=check_delta)
def mr_mtl(
    model: Model,
    *,
    local: LocalSGD | DPSGD,
    penalty_weight: Number = 1.0,
    sampling: Sampling = Full(),
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build MR-MTL: mean-regularised multi-task learning of silos with private local steps.

    A silo protects its single examples by DP-SGD, which starts from its :math:`w_i`:

    .. math::
        w_i \approx \arg\min_v F_i(v) + \frac{\lambda}{2} \|v - w^t\|^2, \qquad
        w^{t+1} = \mathrm{mean}(w_i)

    A silo keeps :math:`w_i`, the weights with which it is evaluated. The method is `pmtl` with the
    privacy in local steps, and without clip or noise for the updates of silos.

    Args:
        model: The network.
        local: A `jaxfl.privacy.DPSGD`. A `LocalSGD` makes nothing private.
        penalty_weight: :math:`\lambda`. 0 gives local training. Larger values keep all :math:`w_i`
            closer to FedAvg's model.
        sampling: Rule that draws the silos of each round. The default draws all silos.
        server_optimizer: Optimizer that takes the negative mean of :math:`w_i - w^t` as its
            gradient. The default, `optax.sgd(1.0)`, sets w to the mean of :math:`w_i` if all
            silos take part.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 n)) for n
            training examples of all silos.

    Guarantee: Example-level privacy with zero-out adjacency, by the steps of `local`, for every
        observer of what silos send, also of their :math:`w_i`. The paper calls it silo-specific
        example-level privacy. The penalty reads only weights that follow from sent updates. A silo
        as a unit has no epsilon.
    Deviations from the paper: Weights of silos are uniform. The denominator qN is fixed.
    References: Liu, Hu, Wu, Smith, On Privacy and Personalization in Cross-Silo Federated Learning,
        NeurIPS 2022 (arXiv:2206.07902).

    >>> from jaxfl.models import mlp
    >>> private = DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.1, steps=5)
    >>> mr_mtl(mlp((8, 8, 1), 10), local=private).name
    'mr_mtl'
    """
    base = pmtl(
        model,
        # Privacy comes from the steps of `local`, so updates need neither a bound nor noise.
        clip=math.inf,
        noise_multiplier=0.0,
        sampling=sampling,
        penalty_weight=penalty_weight,
        local=local,
        server_optimizer=server_optimizer,
        delta=delta,
    )
    return base._replace(name="mr_mtl")
