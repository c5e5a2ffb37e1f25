"""DP-pFedDSU: a shared extractor with sparse private updates, and heads that clients keep."""

import functools
from typing import Literal

import jax
import optax
from jax import Array, lax
from jaxtyping import Key, UInt32

from jaxfl._support.checks import (
    GAUSSIAN,
    at_least_0,
    check_fraction,
    checked,
    count_from_0,
    nonzero,
    traced,
    up_to_infinity,
)
from jaxfl.algorithms.fedrep import check_extractor, split_head, with_epochs
from jaxfl.algorithms.server import (
    Masks,
    SparseServer,
    init_clients,
    init_sparse,
    public_key,
    sparse_step,
)
from jaxfl.local.masks import keep, number_sent, random_masks, sparsify, top_k_masks
from jaxfl.local.penalties import check_bound, distance_to_bound
from jaxfl.local.train import LocalSGD, LossTerm, fit_head
from jaxfl.privacy.mechanisms import Mechanism, PrivateMask
from jaxfl.privacy.mechanisms.gaussian import noise_share
from jaxfl.privacy.sampling import Sampling
from jaxfl.types import (
    Algorithm,
    ClientData,
    Message,
    Model,
    Number,
    Params,
    Sparse,
    Terms,
    Tree,
)

_EXTRACTOR = LocalSGD(
    optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.01, momentum=0.9)), 100, 5
)
"""Default training of the extractor by a client in one round."""

_HEAD = LocalSGD(optax.sgd(0.01, momentum=0.9), 100, 15)
"""Default training of the head by a client in one round."""

_SPARSITY_CHECKS = {
    "evaluation_epochs": count_from_0,
    "density": check_fraction,
    "sparse_layers": count_from_0,
    "penalty_weight": at_least_0,
    **GAUSSIAN,
}
"""Checks of the arguments that both builders have."""


@checked(**_SPARSITY_CHECKS, backward_density=check_fraction)
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
    local: LocalSGD = _EXTRACTOR,
    head: LocalSGD = _HEAD,
    evaluation_epochs: int | None = None,
    delta: float | None = None,
) -> Algorithm:
    r"""Build DP-pFedDSU: reparameterised training (RT) and a dynamic adaptive norm penalty (DAN).

    In a round a client

    1. fits its own head on the frozen extractor,
    2. trains the extractor with the head frozen, where the forward pass takes
       :math:`\bar\theta = \theta \odot M` with a layerwise mask
       :math:`M = \mathrm{TopK}(|\theta|, S)` (6)-(8), on
       :math:`\mathrm{CE} + \frac{\lambda}{2} \big| \|(\theta - \theta^{t-1}) \odot M\|_2 - C \big|`
       (10),
    3. sends :math:`\Delta_i = (\theta - \theta^{t-1}) \odot M`.

    CE is the loss of the task, a cross-entropy by default. Before evaluation every client fits its
    head to the current extractor once more. No client keeps the result.

    Args:
        model: The network, of which `model.head` stays with the clients.
        sampling: The sampler, which draws the participants of each round.
        noise_multiplier: z, the standard deviation of the noise on the sum, divided by C (see
            `jaxfl.privacy.calibrate`).
        clip: C, the L2 bound on the update that a client sends. The penalty uses it too.
        density: S, the share of a sparse kernel that the mask keeps: max(1, ceil(S n)) of n
            weights, where ties go to the lower index.
        sparse_layers: Number of the extractor's layers with a kernel that are sparse, counted from
            the last. None means 4, or all if there are fewer.
        penalty_weight: :math:`\lambda`. With 0 there is no penalty.
        mask_source: Weights that the mask follows. "broadcast" means the server's weights, so that
            the mask is public and fixed for the round. "local_step" means the client's own weights
            at every local step. "public_random" is a control: a new random mask per round from a
            public key, which follows no weights.
        backward_density: Share of a sparse kernel that the backward pass moves and that is sent, at
            least `density`: the largest weights, or random ones with "public_random". None means
            `density`.
        local: Training of the extractor by a client in one round.
        head: Training of the head by a client in one round.
        evaluation_epochs: Number of epochs of the head's fit before evaluation. None means the
            epochs of `head`.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy under zero-out adjacency, with sensitivity C. A public mask
        follows from earlier noisy broadcasts, and noise off its support is dropped afterwards. With
        "local_step" the noise is on all weights. Heads have joint privacy: each client is protected
        against all other clients, but its head depends on its own data. Publishing heads voids the
        guarantee.
    Deviations from the paper: The update is :math:`(\theta - \theta^{t-1}) \odot M`. As printed,
        the update would send raw weights off the mask. The denominator qN is fixed. Norms in
        penalties have gradient 0 at 0. Models have GroupNorm. The server's learning rate is 1, as
        in the paper's experiments. The last k layers are sparse, as the text says, and not all
        layers from the k-th on (8). There are T rounds of :math:`\tau` steps, where the listing has
        T - 1 and :math:`\tau + 1`.
    References: Wang, Zhang, Gao, Luo, "Differential Privacy Personalized Federated Learning Based
        on Dynamically Sparsified Client Updates".

    Raises:
        ValueError: `backward_density` is below `density`, the extractor has fewer than
            `sparse_layers` layers with a kernel, or the model has no layer outside its head. The
            clip bound is infinite, and there is a penalty or noise.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Full
    >>> network = mlp((8, 8, 1), 10, hidden=(16,))
    >>> dp_pfeddsu(network, sampling=Full(), noise_multiplier=40.0).mechanism.clip
    0.01
    """
    sparse_layers = _check_layers(model, sparse_layers)
    wider: Number = density
    if backward_density is not None:
        wider = backward_density
    if not (traced(wider) or traced(density)) and wider < density:
        raise ValueError(
            f"backward_density must be at least density={density!r}, got {wider!r}. Raise it, or "
            "leave it out."
        )

    def masks(params: Params, public: UInt32[Array, "2"]) -> tuple[Tree, Tree]:
        layers = _sparse(model, params, sparse_layers)
        if mask_source == "public_random":
            # All clients derive the round's mask from the public key.
            select = functools.partial(random_masks, public_key(public), params, layers)
        else:
            # A mask is a constant of the gradient, even if it follows the trained weights.
            select = functools.partial(top_k_masks, lax.stop_gradient(params), layers)
        mask = select(density)
        support = mask
        # A sweep's traced numbers cannot be compared, so identity decides.
        if wider is not density:
            support = select(wider)
        return mask, support

    mechanism = Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling)
    method = _sparsified(
        model,
        mechanism,
        masks,
        penalty_weight,
        private=mask_source == "local_step",
        local=local,
        head=head,
        evaluation_epochs=evaluation_epochs,
    )
    sparse = _sparse_update(model, sparse_layers, wider, public=mask_source != "local_step")
    return method._replace(terms=Terms(delta), sparse=sparse)


@checked(**_SPARSITY_CHECKS, claim=up_to_infinity)
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
    local: LocalSGD = _EXTRACTOR,
    head: LocalSGD = _HEAD,
    evaluation_epochs: int | None = None,
    delta: float | None = None,
    claim: float | None = None,
) -> Algorithm:
    r"""Build DP-pFedDSU as published: private masks at every local step, and noise on them alone.

    The masks follow the clients' own weights.

    Args:
        model: The network, of which `model.head` stays with the clients.
        sampling: The sampler, which draws the participants of each round.
        noise_multiplier: :math:`\sigma`. Each client adds noise of std
            :math:`\sigma C / \sqrt{qN}` on its own mask, where qN is the expected number of
            participants.
        clients: N, the number of clients.
        clip: C, the L2 bound on the update that a client sends. The penalty uses it too.
        density: S, the share of a sparse kernel that the mask keeps, as in `dp_pfeddsu`.
        sparse_layers: Number of the extractor's layers with a kernel that are sparse, counted from
            the last. None means 4, or all if there are fewer.
        penalty_weight: :math:`\lambda`. With 0 there is no penalty.
        local: Training of the extractor by a client in one round.
        head: Training of the head by a client in one round.
        evaluation_epochs: Number of epochs of the head's fit before evaluation. None means the
            epochs of `head`.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.
        claim: The epsilon that the paper states for `noise_multiplier`. None means no claim.

    Guarantee: None, because the places of the noise reveal the client's mask, which follows from
        its data (see `PrivateMask`).
    Deviations from the paper: Those of `dp_pfeddsu`.
    References: Wang, Zhang, Gao, Luo, "Differential Privacy Personalized Federated Learning Based
        on Dynamically Sparsified Client Updates".

    Raises:
        ValueError: The extractor has fewer than `sparse_layers` layers with a kernel, or the model
            has no layer outside its head. The clip bound is infinite, and there is a penalty or
            noise.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Full
    >>> network = mlp((8, 8, 1), 10, hidden=(16,))
    >>> options = {"sampling": Full(), "noise_multiplier": 40.0, "clients": 20}
    >>> type(dp_pfeddsu_paper(network, **options).mechanism).__name__
    'PrivateMask'
    """
    sparse_layers = _check_layers(model, sparse_layers)

    def masks(params: Params, public: UInt32[Array, "2"]) -> tuple[Tree, Tree]:
        layers = _sparse(model, params, sparse_layers)
        # A mask is a constant of the gradient, though it follows the trained weights.
        mask = top_k_masks(lax.stop_gradient(params), layers, density)
        return mask, mask

    # On a coordinate in all masks, the shares of the expected cohort have the multiplier sigma.
    share = noise_share(noise_multiplier, sampling, clients)
    mechanism = PrivateMask(clip=clip, client_noise=share, sampling=sampling)
    method = _sparsified(
        model,
        mechanism,
        masks,
        penalty_weight,
        private=True,
        local=local,
        head=head,
        evaluation_epochs=evaluation_epochs,
    )
    rule = "assuming noise on all weights, regardless of the masks"
    claimed = None
    if claim is not None:
        claimed = (claim, rule)
    sparse = _sparse_update(model, sparse_layers, density, public=False)
    return method._replace(name="dp_pfeddsu_paper", terms=Terms(delta, claimed), sparse=sparse)


def _check_layers(model: Model, num_layers: int | None) -> int:
    """Return the number of layers that may be sparse, which is 4 for None.

    Raise an error if a given number exceeds the extractor's layers with a kernel.
    """
    if num_layers is None:
        return 4
    # Only the shapes count, so no weights are drawn.
    shapes = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    extractor = {name: shapes[name] for name in shapes.keys() - set(model.head)}
    most = len(_sparse(model, extractor, num_layers))
    if num_layers > most:
        raise ValueError(
            f"sparse_layers must be at most {most}, the number of layers with a kernel in the "
            f"extractor of {model.name}, got {num_layers}. Leave sparse_layers out for the last 4, "
            "or all if there are fewer."
        )
    return num_layers


def _sparse(model: Model, params: Params, num_layers: int) -> list[str]:
    """Return the names of the last `num_layers` layers of an extractor that have a kernel."""
    kernels = [
        name
        for name in model.layers
        if any(leaf.ndim >= 2 for leaf in jax.tree.leaves(params.get(name)))
    ]
    # A negative start would count from the end, and leave layers out.
    return kernels[max(0, len(kernels) - num_layers) :]


def _sparse_update(model: Model, num_layers: int, density: Number, *, public: bool) -> Sparse:
    """Return the count of the coordinates of an extractor that a client sends, as a `Sparse`."""

    def values(extractor: Params) -> Number:
        return number_sent(extractor, _sparse(model, extractor, num_layers), density)

    return Sparse(values, public)


def _straight_through(mask: Tree, params: Params) -> Params:
    """Return masked parameters through which all parameters have gradients.

    The mask of the training loop keeps the gradients of the support, which may be larger.
    """
    masked_params = keep(mask, params)
    # The values are those of theta * M, because p + (k - p) is k.
    return jax.tree.map(lambda p, k: p + lax.stop_gradient(k - p), params, masked_params)


def _sparsified(
    model: Model,
    mechanism: Mechanism,
    masks: Masks,
    penalty_weight: Number,
    *,
    private: bool,
    local: LocalSGD,
    head: LocalSGD,
    evaluation_epochs: int | None,
) -> Algorithm:
    """Build the method that `dp_pfeddsu` and `dp_pfeddsu_paper` share.

    Args:
        model: The network.
        mechanism: Clip bound, noise and sampling.
        masks: Function from parameters and a public key to the forward mask and the support.
        penalty_weight: Weight of the penalty on the distance of a norm to the clip bound.
        private: Whether the masks follow the clients' own weights, and not the broadcast ones.
        local: Training of the extractor by a client in one round.
        head: Training of the head by a client in one round.
        evaluation_epochs: Number of epochs of the head's fit before evaluation. None means the
            epochs of `head`.
    """
    before_evaluation = with_epochs(head, evaluation_epochs)
    clip = mechanism.clip
    server_optimizer = optax.sgd(1.0)
    check_bound(clip, "penalty_weight", penalty_weight)
    check_extractor(model)

    def fit(
        key: Key[Array, ""],
        server: SparseServer,
        client: Params,
        data: ClientData,
        head: LocalSGD = before_evaluation,
    ) -> Params:
        # The head is fitted to features of the sparse extractor that the server broadcasts.
        params = {**keep(server.mask, server.params), **client}
        fitted, _ = fit_head(key, model, params, data, local=head)
        return fitted

    def client_update(
        key: Key[Array, ""], server: SparseServer, client: Params, data: ClientData
    ) -> tuple:
        # Step 1: the client fits its own head on the frozen extractor.
        first, second = jax.random.split(key)
        _, fitted = split_head(model, fit(first, server, client, data, head))

        def masks_of(params: Params) -> tuple[Tree, Tree]:
            if private:
                return masks(params, server.public)
            return server.mask, server.support

        def mask_of(params: Params) -> Tree:
            mask, _ = masks_of(params)
            return mask

        def support_of(params: Params) -> Tree:
            _, support = masks_of(params)
            return support

        def apply(params: Params, x: Array, *key: Array) -> Array:
            through = _straight_through(mask_of(params), params)
            return model.apply({**through, **fitted}, x, *key)

        def adaptive_norm(params: Params) -> Array:
            return distance_to_bound(params, server.params, mask_of(params), clip, penalty_weight)

        penalty: LossTerm | None = None
        if nonzero(penalty_weight):
            penalty = adaptive_norm
        # Step 2: the extractor trains with the head frozen, by (6) to (8) and (10).
        extractor, info = local.train(
            second, model, server.params, data, apply=apply, mask=support_of, penalty=penalty
        )
        # Step 3: the update on the support is sent. A private support follows the trained weights.
        support = support_of(extractor)
        update = sparsify(support, optax.tree.sub(extractor, server.params))
        extra = None
        # The published mechanism adds noise on the support alone, so it must know the support.
        if isinstance(mechanism, PrivateMask):
            extra = support
        return Message(update, extra), fitted, info

    def init(key: Key[Array, ""], num_clients: int) -> tuple[SparseServer, Params]:
        extractor, head = split_head(model, model.init(key))
        server = init_sparse(key, extractor, server_optimizer, masks)
        return server, init_clients(head, num_clients)

    def server_update(server: SparseServer, aggregate: Tree) -> SparseServer:
        # Dropping the noise off a public support costs no privacy.
        if not private:
            aggregate = keep(server.support, aggregate)
        return sparse_step(server_optimizer, server, aggregate, masks)

    return Algorithm("dp_pfeddsu", model, init, client_update, server_update, fit, mechanism)
