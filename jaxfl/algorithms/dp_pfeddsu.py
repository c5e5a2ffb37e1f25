"""DP-pFedDSU: a shared extractor with sparse private updates, and heads that never leave their clients."""

import functools
from typing import Any, Literal

import jax
import optax
from jax import Array, lax
from jaxtyping import Key, UInt32

from jaxfl._validate import (
    at_least_0,
    check_fraction,
    check_noise,
    checked,
    count_from_0,
    nonzero,
    probability,
    traced,
    up_to_infinity,
)
from jaxfl.algorithms.fedrep import check_extractor, init_parts, private_head, split_head
from jaxfl.local.masks import keep, random_masks, sparsify, top_k_masks
from jaxfl.local.penalties import check_bound, distance_to_bound
from jaxfl.local.train import fit_head, train_model
from jaxfl.privacy.mechanism import Mechanism, Sampling, noise_share
from jaxfl.server import SparseServer, init_sparse, public_key, sparse_step
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Tree

_BROKEN = (
    "noise only on the support of each client's mask, which follows its private weights: neighbouring data may give "
    "another support, which the zeros show (delta = 1)"
)


@checked(
    noise_multiplier=check_noise,
    clip=up_to_infinity,
    density=check_fraction,
    backward_density=check_fraction,
    sparse_layers=count_from_0,
    weight=at_least_0,
    delta=probability,
    claim=up_to_infinity,
)
def dp_pfeddsu(
    model: Model,
    *,
    sampling: Sampling,
    noise_multiplier: Number,
    fidelity: Literal["sound", "paper"] = "sound",
    clients: int | None = None,
    clip: Number = 0.01,
    density: Number = 0.05,
    sparse_layers: int = 4,
    weight: Number = 0.2,
    mask_source: Literal["broadcast", "local_step", "public_random"] | None = None,
    backward_density: Number | None = None,
    outside: Literal["masked", "dense"] = "masked",
    penalty: Literal["two-sided", "hinge"] = "two-sided",
    optimizer: optax.GradientTransformation = optax.chain(
        optax.add_decayed_weights(1e-4), optax.sgd(0.01, momentum=0.9)
    ),
    batch_size: int = 100,
    epochs: int = 5,
    head_optimizer: optax.GradientTransformation = optax.sgd(0.01, momentum=0.9),
    head_epochs: int = 15,
    server_learning_rate: Number = 1.0,
    delta: float | None = None,
    claim: float | None = None,
) -> Algorithm:
    r"""DP-pFedDSU: reparameterised training (RT) with a dynamic adaptive norm penalty (DAN).

    In a round a client

    1. fits its own head on the frozen extractor,
    2. trains the extractor with the head frozen, forward on :math:`\bar\theta = \theta \odot M` with a layerwise mask
       :math:`M = \mathrm{TopK}(|\theta|, S)` (6)-(8), on
       :math:`\mathrm{CE} + \frac{\lambda}{2} \big| \|(\theta - \theta^{t-1}) \odot M\|_2 - C \big|` (10),
    3. sends :math:`\Delta_i = (\theta - \theta^{t-1}) \odot M`.

    For evaluation every client fits its head to the current extractor once more; nothing of that is kept.

    Args:
        model: the network; `model.head` stays with the clients.
        sampling: who takes part.
        noise_multiplier: `sound`: z, std of the noise on the sum over C; `paper`: sigma, each client adds std
            :math:`\sigma C / \sqrt{qN}` on its own mask.
        fidelity: which of the two.
        clients: number of clients, needed by `paper` for N.
        clip: C.
        density: S, the share of a sparse kernel that is kept; max(1, ceil(S n)) weights of n, ties to the lower index.
        sparse_layers: the last so many of the extractor's layers that have a kernel are sparse.
        weight: lambda.
        mask_source: whose weights the mask follows. "broadcast": the server's, public and fixed for the round (default
            of `sound`); "local_step": the client's own at every local step (default of `paper`); "public_random": none,
            a new random mask per round from a public key, the control.
        backward_density: share that the backward pass moves, at least `density` (default: the same): the largest
            weights, or for "public_random" more random ones.
        outside: forward pass while heads are fitted and for evaluation.
        penalty: "hinge" is :math:`\max(0, \cdot - C)` in place of the distance to C.
        optimizer: of the extractor, fresh in every round.
        batch_size: B, of both stages.
        epochs: passes over the client's examples for the extractor.
        head_optimizer: of the head, fresh in every round.
        head_epochs: passes for the head.
        server_learning_rate: :math:`\eta_g`.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).
        claim: the epsilon that the paper states for `noise_multiplier`.

    Guarantee: `sound` with public masks: client-level, zero-out adjacency, sensitivity C; the mask follows from
        earlier noisy broadcasts, and noise off its support is dropped afterwards. `sound` with "local_step": the same,
        with noise on all weights. `paper` with "local_step": none, since the noise's support is private.
        For each client against all others: its own head depends on its own data. Publishing heads voids it.
    Deviations from the paper: the update is :math:`(\theta - \theta^{t-1}) \odot M`; as printed it would send raw
        weights off the mask. A fixed denominator qN. Norms in penalties have gradient 0 at 0. GroupNorm in models.
    References: Wang, Zhang, Gao, Luo, "Differential Privacy Personalized Federated Learning Based on Dynamically
        Sparsified Client Updates".

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Full
    >>> network = mlp((8, 8, 1), 10, hidden=(16,))
    >>> dp_pfeddsu(network, sampling=Full(), noise_multiplier=40.0).mechanism.broken is None
    True
    >>> paper = dp_pfeddsu(network, sampling=Full(), noise_multiplier=40.0, fidelity="paper", clients=20)
    >>> paper.mechanism.broken.split(",")[0]
    "noise only on the support of each client's mask"
    """
    mask_source = mask_source or ("broadcast" if fidelity == "sound" else "local_step")
    wider = density if backward_density is None else backward_density
    if not (traced(wider) or traced(density)) and wider < density:
        raise ValueError(f"backward_density={wider!r}: give at least density={density!r}")
    check_bound(clip, "weight", weight)
    check_extractor(model)
    private = mask_source == "local_step"
    server_optimizer = optax.sgd(server_learning_rate)

    def masks(params: Params, public: UInt32[Array, "2"]) -> tuple[Tree, Tree]:
        """Forward mask and support of an extractor's weights."""
        kernels = [name for name in model.layers if any(leaf.ndim >= 2 for leaf in jax.tree.leaves(params.get(name)))]
        layers = kernels[max(0, len(kernels) - sparse_layers) :]
        if mask_source == "public_random":
            select = functools.partial(random_masks, public_key(public), params, layers)
        else:
            select = functools.partial(top_k_masks, lax.stop_gradient(params), layers)
        mask = select(density)
        return mask, mask if wider is density else select(wider)

    def view(server: SparseServer) -> Params:
        """The extractor as the clients see it while it is frozen."""
        return keep(server.mask, server.params) if outside == "masked" else server.params

    def fit(key: Key[Array, ""], server: SparseServer, client: Params, data: ClientData) -> Params:
        params = {**view(server), **client}
        return fit_head(key, model, params, data, optimizer=head_optimizer, batch_size=batch_size, epochs=head_epochs)[
            0
        ]

    def client_update(key: Key[Array, ""], server: SparseServer, client: Params, data: ClientData) -> tuple:
        first, second = jax.random.split(key)
        _, head = split_head(model, fit(first, server, client, data))

        def now(params: Params) -> tuple[Tree, Tree]:
            return masks(params, server.public) if private else (server.mask, server.support)

        def apply(params: Params, x: Array) -> Array:
            # The value of theta * M, and the gradient of all weights, of which the loop keeps the support's.
            kept = keep(now(params)[0], params)
            through = jax.tree.map(lambda p, k: p + lax.stop_gradient(k - p), params, kept)
            return model.apply({**through, **head}, x)

        def adaptive_norm(params: Params) -> Array:
            return distance_to_bound(params, server.params, now(params)[0], clip, weight, hinge=penalty == "hinge")

        extractor, info = train_model(
            second,
            model,
            server.params,
            data,
            apply=apply,
            optimizer=optimizer,
            batch_size=batch_size,
            epochs=epochs,
            mask=lambda params: now(params)[1],
            penalty=adaptive_norm if nonzero(weight) else None,
        )
        support = now(extractor)[1]
        update = sparsify(support, optax.tree.sub(extractor, server.params))
        return Message(update, support if private and fidelity == "paper" else None), head, info

    def init(key: Key[Array, ""], number: int) -> tuple[SparseServer, Params]:
        extractor, heads = init_parts(key, model, private_head(model), number)
        return init_sparse(key, extractor, server_optimizer, masks), heads

    def server_update(server: SparseServer, aggregate: Tree) -> SparseServer:
        if not private:  # the noise off a public support is dropped
            aggregate = keep(server.support, aggregate)
        return sparse_step(server_optimizer, server, aggregate, masks)

    claimed = None if claim is None else (claim, "as if the noise were on all weights, whoever's mask they are on")
    if fidelity == "paper":
        noise: dict[str, Any] = {"client_noise": noise_share(noise_multiplier, sampling, clients)}
    else:
        noise = {"noise_multiplier": noise_multiplier}
    broken = _BROKEN if private and fidelity == "paper" else None
    return Algorithm(
        name="dp_pfeddsu",
        model=model,
        init=init,
        client_update=client_update,
        server_update=server_update,
        personalize=fit,
        mechanism=Mechanism(clip=clip, sampling=sampling, delta=delta, claim=claimed, broken=broken, **noise),
    )
