"""PMTL, PMTL-FT and MR-MTL: clients that stay near the mean of all."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import GAUSSIAN, at_least_0, check_noise, checked, nonzero, up_to_infinity
from jaxfl.algorithms.fedavg import dp_fedavg, dp_fedavg_fb, keeps_models
from jaxfl.local.penalties import proximal
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.server import Server
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params

_COPY = 2**31 + 7


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
    r"""Private mean-regularised multi-task learning, :math:`\min \sum_i F_i(w_i) + \frac{\lambda}{2} \|w_i - w\|^2`.

    .. math::
        w_i \approx \arg\min_v F_i(v) + \frac{\lambda}{2} \|v - w^t\|^2, \qquad
        \Delta_i = w_i - w^t, \qquad
        w^{t+1} = w^t + \eta_g \, \mathrm{aggregate}(\Delta)

    A client keeps :math:`w_i`, the weights that it is evaluated with.

    Args:
        model: the network.
        clip: C, L2 bound on a client's whole update.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        penalty_weight: lambda; 0 with `start="broadcast"` sends what DP-FedAvg sends.
        start: local training goes on from the client's "own" weights, or from the "broadcast" ones.
        send: "difference": :math:`\Delta_i` as above; "step": what local training changed; "copy": the update of a
            second copy of :math:`w^t`, trained without the penalty, as in the published code, for twice the work.
        local: how a client trains in a round.
        server_optimizer: takes the negative aggregate as its gradient.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).

    Guarantee: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts, by the Gaussian
        mechanism on the clipped sum; for each client against all others (joint privacy): its own weights depend on its
        own data. Publishing them voids it.
    Deviations from the paper: uniform weights, not data sizes. A fixed denominator qN.
    References: Hu, Wu, Smith, Private Multi-Task Learning: Formulation and Applications to Federated Learning, TMLR
        2023.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> pmtl(mlp((8, 8, 1), 10), clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'pmtl'
    """
    if send == "copy" and isinstance(local, DPSGD):
        raise ValueError(
            f"{send=} trains twice, which {local=} accounts once: give a LocalSGD, or send 'difference'"
        )
    penalty = _penalty(penalty_weight)
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
        pull = (lambda params: penalty(params, server.params)) if penalty else None
        first = client if start == "own" else server.params
        params, info = local.train(key, model, first, data, penalty=pull)
        sent, origin = params, first if send == "step" else server.params
        if send == "copy":
            sent, _ = local.train(jax.random.fold_in(key, _COPY), model, server.params, data)
        return Message(optax.tree.sub(sent, origin)), params, info

    return keeps_models(base, "pmtl", client_update)


@checked(clip=up_to_infinity, noise_multiplier=check_noise, penalty_weight=at_least_0)
def pmtl_ft(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    penalty_weight: Number = 1.0,
    **options: Any,
) -> Algorithm:
    r"""PMTL-FT: a client keeps nothing, trains from :math:`w^t`, and is evaluated with it after fitting its head.

    Args:
        model: the network, with a head.
        clip: C, L2 bound on a client's whole update.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        penalty_weight: lambda of `pmtl`; 0 is DP-FedAvg-fb.
        options: those of `dp_fedavg_fb`.

    Guarantee: `dp_fedavg_fb`'s.
    Deviations from the paper: CENTAUR's PMTL-FT has the penalty :math:`\lambda \|w - w^t\|^2` (lambda = 1, 5 epochs:
        `penalty_weight=2`), but computes it from detached tensors: it has no gradient there, and that code is DP-FedAvg
        with a fine-tuned head (`penalty_weight=0`). Here the penalty has its gradient.
    References: Shen et al., Share Your Representation Only, ICLR 2023.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> pmtl_ft(mlp((8, 8, 1), 10), clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'pmtl_ft'
    """
    private = {"clip": clip, "noise_multiplier": noise_multiplier, "sampling": sampling}
    return dp_fedavg_fb(model, penalty=_penalty(penalty_weight), **private, **options)._replace(
        name="pmtl_ft"
    )


@checked(penalty_weight=at_least_0)
def mr_mtl(
    model: Model,
    *,
    local: LocalSGD | DPSGD,
    penalty_weight: Number = 1.0,
    sampling: Sampling = Full(),
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""MR-MTL: mean-regularised multi-task learning of silos that protect their single examples.

    .. math::
        w_i \approx \arg\min_v F_i(v) + \frac{\lambda}{2} \|v - w^t\|^2 \text{ by DP-SGD from } w_i, \qquad
        w^{t+1} = \mathrm{mean}(w_i)

    A silo keeps :math:`w_i`, the weights that it is evaluated with. It is `pmtl` with the privacy in local steps, and
    neither clip nor noise for whole clients.

    Args:
        model: the network.
        local: a `jaxfl.privacy.DPSGD`; with a `LocalSGD` nothing is private.
        penalty_weight: lambda; 0 is local training, and the larger, the nearer are all :math:`w_i` to FedAvg's model.
        sampling: which silos take part.
        server_optimizer: takes the negative mean of :math:`w_i - w^t` as its gradient; `optax.sgd(1.0)` is the mean.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).

    Guarantee: example-level, zero-out adjacency, for every observer of what silos send, also of their :math:`w_i`, by
        the steps of `local` (the paper's silo-specific example-level privacy): what the penalty reads follows from what
        was sent. No epsilon of a whole silo.
    Deviations from the paper: uniform weights; a fixed denominator qN.
    References: Liu, Hu, Wu, Smith, On Privacy and Personalization in Cross-Silo Federated Learning, NeurIPS 2022
        (arXiv:2206.07902).

    >>> from jaxfl.models import mlp
    >>> mr_mtl(mlp((8, 8, 1), 10), local=DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.1, steps=5)).name
    'mr_mtl'
    """
    base = pmtl(
        model,
        clip=math.inf,
        noise_multiplier=0.0,
        sampling=sampling,
        penalty_weight=penalty_weight,
        local=local,
        server_optimizer=server_optimizer,
        delta=delta,
    )
    return base._replace(name="mr_mtl")


def _penalty(penalty_weight: Number) -> Callable[[Params, Params], Float[Array, ""]] | None:
    return functools.partial(proximal, mu=penalty_weight) if nonzero(penalty_weight) else None
