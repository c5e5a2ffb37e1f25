"""FedRoD: a shared model trained as if all classes were equally frequent, and a personal head on top."""

import functools

import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Key

from jaxfl._validate import GAUSSIAN, checked
from jaxfl.algorithms.fedrep import start_parts
from jaxfl.algorithms.ppsgd import added_head
from jaxfl.algorithms.prior_corrected import classes_of, log_prior
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Sampling
from jaxfl.server import Server, server_step
from jaxfl.tasks import cross_entropy, mean
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms


@checked(**GAUSSIAN)
def fedrod(
    model: Model,
    *,
    clip: Number,
    noise_multiplier: Number,
    sampling: Sampling,
    local: LocalSGD = LocalSGD(optax.sgd(0.05)),
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build FedRoD: logits :math:`g(x) = \phi(x) w` for all clients, and :math:`g(x) + \phi(x) \theta_i` for one.

    A client with :math:`n_i(y)` examples of class y takes steps on the sum of two losses:

    .. math::
        L(\phi, w) = - \log \frac{n_i(y) \, e^{g_y(x)}}{\sum_k n_i(k) \, e^{g_k(x)}}, \qquad
        L(\theta_i) = - \log \frac{e^{g_y(x) + \phi(x) \theta_{iy}}}{\sum_k e^{g_k(x) + \phi(x) \theta_{ik}}}

    The first is the balanced softmax, which trains the shared model as if the client had equally many examples of each
    class. The second trains the personal head alone: neither :math:`\phi` nor w follows its gradient.

    Args:
        model: A network for classification, with a head.
        clip: C, L2 bound on a client's update of :math:`(\phi, w)` jointly.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: Who takes part.
        local: How a client trains both in a round.
        server_optimizer: Takes the negative aggregate as its gradient.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 clients)).

    Guarantee: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts; for each client
        against all others (joint privacy): its own head depends on its own data. Publishing heads voids it.
    Deviations from the paper: Updates are clipped and noised, with a fixed denominator. Heads are added as parameters,
        which for heads of one linear layer adds their logits. The head is linear in the features, without the
        hypernetwork that the paper tries as well.

    Raises:
        ValueError: The model has no head, or its task is not classification.

    References: Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR
        2022 (arXiv:2107.00778), equations 5 to 8.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> fedrod(mlp((8, 8, 1), 10), clip=1.0, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'fedrod'
    """
    parts = added_head(model)
    classes = classes_of("model", model)

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        offset = log_prior(data, classes)

        def apply(both: tuple[Params, Params], x: Array, *key: Array) -> Float[Array, "B K2"]:
            shared, personal = both
            frozen = lax.stop_gradient(shared)
            generic = model.apply(shared, x, *key)
            own = model.apply(parts.join(frozen, personal), x, *key)
            return jnp.concatenate([generic, own], axis=-1)

        def loss(outputs: Array, labels: Array, weights: Float[Array, "B"]) -> Float[Array, ""]:
            generic, own = jnp.split(outputs, 2, axis=-1)
            balanced = mean(cross_entropy(generic + offset[None], labels), weights)
            return balanced + mean(cross_entropy(own, labels), weights)

        before = (server.params, client)
        (shared, personal), info = local.train(key, model, before, data, apply=apply, loss=loss)
        return Message(optax.tree.sub(shared, server.params)), personal, info

    def personalize(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> Params:
        del key, data
        return parts.join(server.params, client)

    return Algorithm(
        name="fedrod",
        model=model,
        init=start_parts(model, parts, server_optimizer),
        client_update=client_update,
        server_update=functools.partial(server_step, server_optimizer),
        personalize=personalize,
        mechanism=Mechanism(clip=clip, noise_multiplier=noise_multiplier, sampling=sampling),
        terms=Terms(delta),
    )
