"""PMTL and PMTL-FT: clients that stay near the mean of all."""

import functools
from typing import Any, Literal

import optax
from jax import Array
from jaxtyping import Key

from jaxfl._validate import at_least_0, check_noise, checked, nonzero, probability, up_to_infinity
from jaxfl.algorithms.fedavg import dp_fedavg, dp_fedavg_fb
from jaxfl.local.penalties import proximal
from jaxfl.local.train import train_model
from jaxfl.privacy.mechanism import Sampling
from jaxfl.server import Server, init_clients
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params


@checked(clip=up_to_infinity, noise_multiplier=check_noise, weight=at_least_0, delta=probability)
def pmtl(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    weight: Number = 1.0,
    finetune: int | None = None,
    start: Literal["own", "broadcast"] = "own",
    optimizer: optax.GradientTransformation = optax.sgd(0.05),
    batch_size: int = 32,
    epochs: int = 1,
    steps: int | None = None,
    head_optimizer: optax.GradientTransformation = optax.sgd(0.01),
    head_batch_size: int = 32,
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Private mean-regularised multi-task learning, :math:`\min \sum_i F_i(w_i) + \frac{\lambda}{2} \|w_i - w\|^2`.

    .. math::
        w_i \approx \arg\min_v F_i(v) + \frac{\lambda}{2} \|v - w^t\|^2, \qquad
        \Delta_i = w_i - w^t, \qquad
        w^{t+1} = w^t + \eta_g \, \mathrm{aggregate}(\Delta)

    A client keeps :math:`w_i`, the weights that it is evaluated with. PMTL-FT (`finetune`) keeps nothing: every client
    trains from :math:`w^t`, and is evaluated with :math:`w^t` after fitting its head.

    Args:
        model: the network.
        clip: C, L2 bound on a client's whole update.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        weight: lambda; 0 with `start="broadcast"` or `finetune` sends what DP-FedAvg sends.
        finetune: head epochs before evaluation, for PMTL-FT; None: PMTL.
        start: PMTL's local training goes on from the client's "own" weights, or from the "broadcast" ones.
        optimizer: local optimizer, fresh in every round.
        batch_size: B.
        epochs: local passes per round, unless `steps` is given.
        steps: local steps per round.
        head_optimizer: optimizer of the fine-tuning.
        head_batch_size: its batch size.
        server_optimizer: takes the negative aggregate as its gradient.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).

    Guarantee: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts, by the Gaussian
        mechanism on the clipped sum; for each client against all others (joint privacy): its own weights depend on its
        own data. Publishing them voids it.
    Deviations from the paper: its published code sends the update of a second, global copy of the weights. CENTAUR's
        PMTL-FT has the penalty :math:`\lambda \|w - w^t\|^2` (lambda = 1, 5 epochs: `weight=2`), but computes it from
        detached tensors: it has no gradient there, and that code is DP-FedAvg with a fine-tuned head (`weight=0`). Here
        the penalty has its gradient. Uniform weights, not data sizes. A fixed denominator qN.
    References: Hu, Wu, Smith, Private Multi-Task Learning: Formulation and Applications to Federated Learning, TMLR
        2023; Shen et al., Share Your Representation Only, ICLR 2023 (PMTL-FT).

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> pmtl(mlp((8, 8, 1), 10), clip=0.2, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'pmtl'
    """
    penalty = functools.partial(proximal, mu=weight) if nonzero(weight) else None
    local: dict[str, Any] = {"optimizer": optimizer, "batch_size": batch_size, "epochs": epochs, "steps": steps}
    private = {"clip": clip, "noise_multiplier": noise_multiplier, "sampling": sampling, "delta": delta}
    shared: dict[str, Any] = {"penalty": penalty, "server_optimizer": server_optimizer, **local, **private}
    if finetune is not None:
        heads: dict[str, Any] = {"head_optimizer": head_optimizer, "head_batch_size": head_batch_size}
        return dp_fedavg_fb(model, head_epochs=finetune, **heads, **shared)._replace(name="pmtl")
    base = dp_fedavg(model, **shared)

    def init(key: Key[Array, ""], number: int) -> tuple[Server, Params]:
        server, _ = base.init(key, number)
        return server, init_clients(server.params, number)

    def client_update(key: Key[Array, ""], server: Server, client: Params, data: ClientData) -> tuple:
        params, info = train_model(
            key,
            model,
            client if start == "own" else server.params,
            data,
            penalty=(lambda params: penalty(params, server.params)) if penalty else None,
            **local,
        )
        return Message(optax.tree.sub(params, server.params)), params, info

    return base._replace(
        name="pmtl",
        init=init,
        client_update=client_update,
        personalize=lambda key, server, client, data: client,
    )
