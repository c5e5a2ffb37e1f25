"""FedRoD: a shared model trained for balanced classes, and a personal head for each client."""

import functools

import jax.numpy as jnp
import optax
from jax import Array, lax
from jaxtyping import Float, Key

from jaxfl._support.checks import GAUSSIAN, checked
from jaxfl.algorithms.fedrep import start_parts
from jaxfl.algorithms.ppsgd import added_head
from jaxfl.algorithms.prior_corrected import classes_of, log_prior
from jaxfl.algorithms.server import Server, server_step
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.privacy.sampling import Sampling
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
    r"""Build FedRoD: a shared model for balanced classes, and a personal head for each client.

    The shared model has the logits :math:`g(x) = \phi(x) w`. Client i adds a head
    :math:`\theta_i`, so that its logits are :math:`g(x) + \phi(x) \theta_i`. A client with
    :math:`n_i(y)` examples of class y takes steps on the sum of two losses:

    .. math::
        L(\phi, w) &= - \log \frac{n_i(y) \, e^{g_y(x)}}{\sum_k n_i(k) \, e^{g_k(x)}} \\
        L(\theta_i) &= - \log \frac{e^{g_y(x) + \phi(x) \theta_{iy}}}
            {\sum_k e^{g_k(x) + \phi(x) \theta_{ik}}}

    The first loss is the balanced softmax. It trains the shared model as if the client had equally
    many examples of each class. The second loss trains only the personal head: neither
    :math:`\phi` nor w follows its gradient. Both are multiplied by the weight of class y if the
    task has `class_weights`.

    Args:
        model: A network for classification, with a head.
        clip: C, L2 bound on the joint norm of a client's update of :math:`(\phi, w)`.
        noise_multiplier: z, std of the noise on the sum, in units of C (see
            `jaxfl.privacy.calibrate`).
        sampling: Rule that draws the participants of each round.
        local: Optimizer, batches and epochs with which a client trains both parts in a round.
        server_optimizer: Optimizer that takes the negative aggregate as its gradient. The default
            adds the aggregate to the shared model.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy with zero-out adjacency and sensitivity C, for the observer of
        sums and broadcasts. Heads have joint privacy: each client is protected against all other
        clients, but its head depends on its own data. Publishing heads voids the guarantee.
    Deviations from the paper: Updates are clipped and noised, and their sum has a fixed
        denominator. Heads are added as parameters, which for heads of one linear layer adds their
        logits. The head is linear in the features. The paper also tries a hypernetwork.

    Raises:
        ValueError: The model has no head, or its task is not classification.

    References: Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image
        Classification, ICLR 2022 (arXiv:2107.00778), equations 5 to 8.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Poisson
    >>> fedrod(mlp((8, 8, 1), 10), clip=1.0, noise_multiplier=1.0, sampling=Poisson(0.1)).name
    'fedrod'
    """
    parts = added_head(model)
    classes = classes_of("model", model)

    def apply(both: tuple[Params, Params], x: Array, *key: Array) -> Float[Array, "B K2"]:
        shared, personal = both
        # The second loss trains the personal head alone.
        frozen = lax.stop_gradient(shared)
        generic = model.apply(shared, x, *key)
        own = model.apply(parts.join(frozen, personal), x, *key)
        # The loss gets these outputs as one array, which it splits again.
        return jnp.concatenate([generic, own], axis=-1)

    def client_update(
        key: Key[Array, ""], server: Server, client: Params, data: ClientData
    ) -> tuple:
        # The balanced softmax adds log n_i(k) to the logits. A common constant changes nothing.
        offset = log_prior(data, classes)

        def loss(outputs: Array, labels: Array, weights: Float[Array, "B"]) -> Float[Array, ""]:
            generic, own = jnp.split(outputs, 2, axis=-1)
            balanced = model.task.mean_loss(generic + offset[None], labels, weights)
            return balanced + model.task.mean_loss(own, labels, weights)

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
