"""SCAFFOLD: local steps corrected by control variates."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._support.checks import GAUSSIAN, checked
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.algorithms.server import Server, init_clients
from jaxfl.local.train import GradientFn, LocalSGD
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Tree


class ScaffoldServer(NamedTuple):
    """Server state: parameters, the optimizer's state, and a control variate."""

    params: Params
    optimizer: Tree
    control: Params
    """c, an estimate of the mean of the clients' variates."""
    share: Float[Array, ""]
    """q, the expected cohort size over the number of clients."""


@checked(**GAUSSIAN)
def scaffold(
    model: Model,
    *,
    learning_rate: Number = 0.05,
    batch_size: int = 32,
    epochs: int = 1,
    steps: int | None = None,
    clip: Number = math.inf,
    noise_multiplier: Number = 0.0,
    sampling: Sampling = Full(),
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build SCAFFOLD, option II: local steps follow an estimate of the global gradient.

    A client takes K local steps from the server's x, and keeps a control variate :math:`c_i`:

    .. math::
        y &\leftarrow y - \eta \, (\nabla F_i(y) - c_i + c) \\
        c_i^+ &= c_i - c + \frac{x - y}{K \eta} \\
        x &\leftarrow x + \eta_g \, \mathrm{aggregate}(y - x) \\
        c &\leftarrow c + q \, \mathrm{aggregate}(c_i^+ - c_i)

    The aggregate divides by qN, the expected number of participants. The variate c therefore moves
    by the participants' sum over N.

    Args:
        model: The network.
        learning_rate: :math:`\eta`, the rate of a client's plain SGD.
        batch_size: Number of examples in a local step. The last batch of an epoch may be smaller.
        epochs: Number of passes over a client's examples in a round, unless `steps` is given.
        steps: K, the number of local steps in a round. None follows from `epochs`.
        clip: C, L2 bound on the joint norm of :math:`(y - x, c_i^+ - c_i)`. Infinity clips nothing,
            and allows no noise.
        noise_multiplier: z, std of the noise on the sum, in units of C (see
            `jaxfl.privacy.calibrate`).
        sampling: Rule that draws the participants of each round. The default draws all clients. If
            clients drop out, give `jaxfl.privacy.Dropouts` here, and not `availability` to a run.
        server_optimizer: Optimizer that takes the negative aggregate of :math:`y - x` as its
            gradient. The default adds the aggregate to x.
        delta: Failure probability of the statement. None stands for min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy with zero-out adjacency and sensitivity C, for the observer of
        sums and broadcasts, by one Gaussian mechanism for both halves of the message. Variates have
        joint privacy: each client is protected against all other clients, but its variate depends
        on its own data.
    Deviations from the paper: Weights are uniform. Under Poisson sampling the expected share of
        participants replaces the realised one. A client keeps its variate unclipped, so that with a
        finite clip or with noise, c is not the mean of all variates. Variates start at zero.
    References: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated
        Learning, ICML 2020 (arXiv:1910.06378), Algorithm 1.

    >>> from jaxfl.models import mlp
    >>> scaffold(mlp((8, 8, 1), 10), learning_rate=0.1, epochs=5).name
    'scaffold'
    """
    local = LocalSGD(optax.sgd(learning_rate), batch_size, epochs, steps)
    base = dp_fedavg(
        model,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        server_optimizer=server_optimizer,
        delta=delta,
    )

    def init(key: Key[Array, ""], num_clients: int) -> tuple[ScaffoldServer, Params]:
        plain, _ = base.init(key, num_clients)
        control = optax.tree.zeros_like(plain.params)
        share = jnp.asarray(sampling.expected(num_clients) / num_clients, jnp.float32)
        server = ScaffoldServer(plain.params, plain.optimizer, control, share)
        return server, init_clients(control, num_clients)

    def client_update(
        key: Key[Array, ""], server: ScaffoldServer, client: Params, data: ClientData
    ) -> tuple:
        # The correction c - c_i stays the same in all steps of a round.
        corrected = functools.partial(_plus, optax.tree.sub(server.control, client))
        params, info = local.train(key, model, server.params, data, gradient=corrected)
        update = optax.tree.sub(params, server.params)
        # K may depend on the client's number of examples, so training reports the steps.
        change = _variate_change(update, server.control, info["steps"], learning_rate)
        # Both halves are in one message, so the clip bounds their joint norm.
        return Message((update, change)), optax.tree.add(client, change), info

    def server_update(server: ScaffoldServer, aggregate: tuple[Params, Params]) -> ScaffoldServer:
        update, change = aggregate
        params, optimizer = base.server_update(Server(server.params, server.optimizer), update)

        def moved(control: Array, change: Array) -> Array:
            # The aggregate divides by qN, and the share q turns this into a division by N.
            return (control + server.share * change).astype(control.dtype)

        control = jax.tree.map(moved, server.control, change)
        return ScaffoldServer(params, optimizer, control, server.share)

    return base._replace(
        name="scaffold",
        init=init,
        client_update=client_update,
        server_update=server_update,
        reads_sampling=sampling,
    )


def _plus(correction: Tree, gradient_fn: GradientFn) -> GradientFn:
    """Return a function whose gradient is that of `gradient_fn` plus a correction."""

    def of_step(params: Params) -> tuple[Float[Array, ""], Tree]:
        value, slope = gradient_fn(params)
        return value, optax.tree.add(slope, correction)

    return of_step


def _variate_change(
    update: Params, control: Params, steps: Float[Array, ""], learning_rate: Number
) -> Params:
    """Return :math:`c_i^+ - c_i`, which is 0 for a client that took no steps.

    Args:
        update: y - x, the client's update.
        control: c, the variate of the server.
        steps: K, the number of steps.
        learning_rate: The rate of the steps.
    """
    length = learning_rate * jnp.maximum(steps, 1)

    # A client without examples takes no steps, and its variate stays as it is.
    def of_leaf(update: Array, control: Array) -> Array:
        # The update is y - x.
        return jnp.where(steps > 0, -update / length - control, 0).astype(control.dtype)

    return jax.tree.map(of_leaf, update, control)
