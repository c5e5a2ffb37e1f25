"""DP-pFedDSU: a shared extractor with sparse private updates, and heads that never leave their clients."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import optax
from jax import Array, lax
from jaxtyping import Key, UInt32

from jaxfl._validate import (
    GAUSSIAN,
    at_least_0,
    check_fraction,
    checked,
    count_from_0,
    nonzero,
    traced,
    up_to_infinity,
)
from jaxfl.algorithms.fedrep import check_extractor, split_head
from jaxfl.local.masks import keep, random_masks, sparsify, top_k_masks
from jaxfl.local.penalties import check_bound, distance_to_bound
from jaxfl.local.train import LocalSGD, fit_head
from jaxfl.privacy.mechanisms import Mechanism, PrivateMask
from jaxfl.privacy.mechanisms.gaussian import noise_share
from jaxfl.privacy.sampling import Sampling
from jaxfl.server import Masks, SparseServer, init_clients, init_sparse, public_key, sparse_step
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms, Tree

_EXTRACTOR = LocalSGD(
    optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.01, momentum=0.9)), 100, 5
)
_HEAD = LocalSGD(optax.sgd(0.01, momentum=0.9), 100, 15)


_ARGUMENTS = {
    "density": check_fraction,
    "sparse_layers": count_from_0,
    "penalty_weight": at_least_0,
    **GAUSSIAN,
}
"""Checks of the arguments that both builders share."""


@checked(**_ARGUMENTS, backward_density=check_fraction)
def dp_pfeddsu(
    model: Model,
    *,
    sampling: Sampling,
    noise_multiplier: Number,
    clip: Number = 0.01,
    density: Number = 0.05,
    sparse_layers: int | None = None,
    penalty_weight: Number = 0.2,
    mask_source: Literal["broadcast", "local_step", "public_random"] = "broadcast",
    backward_density: Number | None = None,
    delta: float | None = None,
    **options: Any,
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
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        clip: C, L2 bound on a client's whole update.
        density: S, the share of a sparse kernel that is kept; max(1, ceil(S n)) weights of n, ties to the lower index.
        sparse_layers: how many of the extractor's layers with a kernel are sparse, counted from the last. None: 4, or
            all of fewer.
        penalty_weight: lambda.
        mask_source: whose weights the mask follows. "broadcast": the server's, public and fixed for the round;
            "local_step": the client's own at every local step; "public_random": none, as a control: a new random mask
            per round from a public key.
        backward_density: share that the backward pass moves, at least `density` (default: the same): the largest
            weights, or for "public_random" more random ones.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).
        options: how a client trains the extractor in a round, `local`; how it fits its head, `head`; and for how many
            epochs before evaluation, `evaluation_epochs` (default: those of `head`).

    Guarantee: client-level, zero-out adjacency, sensitivity C. A public mask follows from earlier noisy broadcasts, and
        noise off its support is dropped afterwards; with "local_step" the noise is on all weights.
        For each client against all others: its own head depends on its own data. Publishing heads voids it.
    Deviations from the paper: the update is :math:`(\theta - \theta^{t-1}) \odot M`; as printed it would send raw
        weights off the mask. A fixed denominator qN. Norms in penalties have gradient 0 at 0. GroupNorm in models.
        The server's learning rate is 1, as in its experiments. The last k layers are sparse, as the text has it, not
        all from the k-th on (8). T rounds of tau steps, where its listing has T - 1 and tau + 1.
    References: Wang, Zhang, Gao, Luo, "Differential Privacy Personalized Federated Learning Based on Dynamically
        Sparsified Client Updates".

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Full
    >>> dp_pfeddsu(mlp((8, 8, 1), 10, hidden=(16,)), sampling=Full(), noise_multiplier=40.0).mechanism.clip
    0.01
    """
    sparse_layers = _check_layers(model, sparse_layers)
    wider = density if backward_density is None else backward_density
    if not (traced(wider) or traced(density)) and wider < density:
        raise ValueError(f"backward_density={wider!r}: give at least density={density!r}")

    def masks(params: Params, public: UInt32[Array, "2"]) -> tuple[Tree, Tree]:
        layers = _sparse(model, params, sparse_layers)
        if mask_source == "public_random":
            select = functools.partial(random_masks, public_key(public), params, layers)
        else:
            select = functools.partial(top_k_masks, lax.stop_gradient(params), layers)
        mask = select(density)
        return mask, mask if wider is density else select(wider)

    mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling)
    private = mask_source == "local_step"
    method = _sparsified(model, mechanism, masks, penalty_weight, private=private, **options)
    return method._replace(terms=Terms(delta))


@checked(**_ARGUMENTS, claim=up_to_infinity)
def dp_pfeddsu_paper(
    model: Model,
    *,
    sampling: Sampling,
    noise_multiplier: Number,
    clients: int,
    clip: Number = 0.01,
    density: Number = 0.05,
    sparse_layers: int | None = None,
    penalty_weight: Number = 0.2,
    delta: float | None = None,
    claim: float | None = None,
    **options: Any,
) -> Algorithm:
    r"""DP-pFedDSU as published: masks of the clients' own weights at every local step, and noise on those masks alone.

    Args:
        model: the network; `model.head` stays with the clients.
        sampling: who takes part.
        noise_multiplier: sigma; each client adds std :math:`\sigma C / \sqrt{qN}` on its own mask.
        clients: number of clients N.
        clip: C, L2 bound on a client's whole update.
        density: as in `dp_pfeddsu`.
        sparse_layers: as in `dp_pfeddsu`.
        penalty_weight: as in `dp_pfeddsu`.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).
        claim: the epsilon that the paper states for `noise_multiplier`.
        options: as in `dp_pfeddsu`.

    Guarantee: none, since the noise's support is private (see `PrivateMask`).
    Deviations from the paper: those of `dp_pfeddsu`.
    References: as for `dp_pfeddsu`.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Full
    >>> network = mlp((8, 8, 1), 10, hidden=(16,))
    >>> type(dp_pfeddsu_paper(network, sampling=Full(), noise_multiplier=40.0, clients=20).mechanism).__name__
    'PrivateMask'
    """
    sparse_layers = _check_layers(model, sparse_layers)

    def masks(params: Params, public: UInt32[Array, "2"]) -> tuple[Tree, Tree]:
        mask = top_k_masks(
            lax.stop_gradient(params), _sparse(model, params, sparse_layers), density
        )
        return mask, mask

    share = noise_share(noise_multiplier, sampling, clients)
    mechanism = PrivateMask(clip=clip, client_noise=share, sampling=sampling)
    method = _sparsified(model, mechanism, masks, penalty_weight, private=True, **options)
    rule = "as if the noise were on all weights, whoever's mask they are on"
    return method._replace(
        name="dp_pfeddsu_paper", terms=Terms(delta, None if claim is None else (claim, rule))
    )


def _check_layers(model: Model, number: int | None) -> int:
    """Return how many layers are sparse at most. A number that is given must fit the model."""
    if number is None:
        return 4
    shapes = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    extractor = {name: shapes[name] for name in shapes.keys() - set(model.head)}
    most = len(_sparse(model, extractor, number))
    if number > most:
        raise ValueError(
            f"sparse_layers must be at most {most}, the layers with a kernel in the extractor of {model.name}, "
            f"got {number}. Leave it out for 4, or all of fewer."
        )
    return number


def _sparse(model: Model, params: Params, number: int) -> list[str]:
    """The last `number` layers of an extractor that have a kernel."""
    kernels = [
        name
        for name in model.layers
        if any(leaf.ndim >= 2 for leaf in jax.tree.leaves(params.get(name)))
    ]
    return kernels[max(0, len(kernels) - number) :]


@checked(penalty_weight=at_least_0, evaluation_epochs=count_from_0)
def _sparsified(
    model: Model,
    mechanism: Mechanism,
    masks: Masks,
    penalty_weight: Number,
    *,
    private: bool,
    local: LocalSGD = _EXTRACTOR,
    head: LocalSGD = _HEAD,
    evaluation_epochs: int | None = None,
) -> Algorithm:
    """The clients and the server of both builders; `private` masks follow the clients' own weights."""
    before_evaluation = head
    if evaluation_epochs is not None:
        before_evaluation = dataclasses.replace(head, epochs=evaluation_epochs, steps=None)
    clip, server_optimizer = mechanism.clip, optax.sgd(1.0)
    check_bound(clip, "penalty_weight", penalty_weight)
    check_extractor(model)

    def fit(
        key: Key[Array, ""],
        server: SparseServer,
        client: Params,
        data: ClientData,
        head: LocalSGD = before_evaluation,
    ) -> Params:
        return fit_head(
            key, model, {**keep(server.mask, server.params), **client}, data, local=head
        )[0]

    def client_update(
        key: Key[Array, ""], server: SparseServer, client: Params, data: ClientData
    ) -> tuple:
        first, second = jax.random.split(key)
        _, fitted = split_head(model, fit(first, server, client, data, head))

        def now(params: Params) -> tuple[Tree, Tree]:
            return masks(params, server.public) if private else (server.mask, server.support)

        def apply(params: Params, x: Array, *key: Array) -> Array:
            # The value of theta * M, with gradients of all weights; the loop keeps those of the support.
            kept = keep(now(params)[0], params)
            through = jax.tree.map(lambda p, k: p + lax.stop_gradient(k - p), params, kept)
            return model.apply({**through, **fitted}, x, *key)

        def adaptive_norm(params: Params) -> Array:
            return distance_to_bound(params, server.params, now(params)[0], clip, penalty_weight)

        def support_of(params: Params) -> Tree:
            return now(params)[1]

        penalty = adaptive_norm if nonzero(penalty_weight) else None
        extractor, info = local.train(
            second, model, server.params, data, apply=apply, mask=support_of, penalty=penalty
        )
        support = support_of(extractor)
        update = sparsify(support, optax.tree.sub(extractor, server.params))
        return (
            Message(update, support if isinstance(mechanism, PrivateMask) else None),
            fitted,
            info,
        )

    def init(key: Key[Array, ""], number: int) -> tuple[SparseServer, Params]:
        extractor, head = split_head(model, model.init(key))
        return init_sparse(key, extractor, server_optimizer, masks), init_clients(head, number)

    def server_update(server: SparseServer, aggregate: Tree) -> SparseServer:
        if not private:  # the noise off a public support is dropped
            aggregate = keep(server.support, aggregate)
        return sparse_step(server_optimizer, server, aggregate, masks)

    return Algorithm("dp_pfeddsu", model, init, client_update, server_update, fit, mechanism)
