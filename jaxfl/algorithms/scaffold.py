"""SCAFFOLD: local steps corrected by control variates."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import GAUSSIAN, checked
from jaxfl.algorithms.fedavg import dp_fedavg
from jaxfl.local.train import GradientFn, LocalSGD
from jaxfl.privacy.sampling import Full, Sampling
from jaxfl.server import Server, init_clients
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Tree


class ScaffoldServer(NamedTuple):
    """A server with its control variate."""

    params: Params
    optimizer: Tree
    control: Params
    """c, the mean of the clients' variates."""
    share: Float[Array, ""]
    """q, the expected share of clients in a cohort."""


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
    r"""SCAFFOLD, option II: a client's K local steps from x follow an estimate of the global gradient.

    .. math::
        y \leftarrow y - \eta \, (\nabla F_i(y) - c_i + c), \qquad
        c_i^+ = c_i - c + \frac{x - y}{K \eta}, \qquad
        x \leftarrow x + \eta_g \, \mathrm{aggregate}(y - x), \qquad
        c \leftarrow c + q \, \mathrm{aggregate}(c_i^+ - c_i)

    The aggregate divides by qN, the expected number of participants: c moves by their sum over N.

    Args:
        model: the network.
        learning_rate: :math:`\eta` of plain SGD.
        batch_size: as in `jaxfl.LocalSGD`.
        epochs: as in `jaxfl.LocalSGD`.
        steps: as in `jaxfl.LocalSGD`.
        clip: C, L2 bound on :math:`(y - x, c_i^+ - c_i)` jointly.
        noise_multiplier: z, std of the noise on the sum over C (see `jaxfl.privacy.calibrate`).
        sampling: who takes part.
        server_optimizer: takes the negative aggregate of :math:`y - x` as its gradient.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).

    Guarantee: client-level, zero-out adjacency, sensitivity C, for the observer of sums and broadcasts, by one Gaussian
        mechanism for both halves of the message; for each client against all others (joint privacy): its own variate
        depends on its own data.
    Deviations from the paper: uniform weights; under Poisson sampling the expected share of participants replaces the
        realised one. A client keeps its variate unclipped: with a finite clip or noise, c is not the mean of all.
        Variates start at zero.
    References: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020
        (arXiv:1910.06378), Algorithm 1.

    >>> from jaxfl.models import mlp
    >>> scaffold(mlp((8, 8, 1), 10), learning_rate=0.1, epochs=5).name
    'scaffold'
    """
    local = LocalSGD(optax.sgd(learning_rate), batch_size, epochs, steps)
    private = {
        "clip": clip,
        "noise_multiplier": noise_multiplier,
        "sampling": sampling,
        "delta": delta,
    }
    base = dp_fedavg(model, server_optimizer=server_optimizer, **private)

    def init(key: Key[Array, ""], number: int) -> tuple[ScaffoldServer, Params]:
        server, _ = base.init(key, number)
        control = optax.tree.zeros_like(server.params)
        share = jnp.asarray(sampling.expected(number) / number, jnp.float32)
        return ScaffoldServer(server.params, server.optimizer, control, share), init_clients(
            control, number
        )

    def client_update(
        key: Key[Array, ""], server: ScaffoldServer, client: Params, data: ClientData
    ) -> tuple:
        correction = optax.tree.sub(server.control, client)

        def corrected(gradient_fn: GradientFn) -> GradientFn:
            def of_step(params: Params) -> tuple[Float[Array, ""], Tree]:
                value, slope = gradient_fn(params)
                return value, optax.tree.add(slope, correction)

            return of_step

        params, info = local.train(key, model, server.params, data, gradient=corrected)
        update, taken = optax.tree.sub(params, server.params), info["steps"]
        length = learning_rate * jnp.maximum(taken, 1)
        changed = lambda u, c: jnp.where(taken > 0, -u / length - c, 0).astype(c.dtype)  # noqa: E731
        change = jax.tree.map(changed, update, server.control)
        return Message((update, change)), optax.tree.add(client, change), info

    def server_update(server: ScaffoldServer, aggregate: tuple[Params, Params]) -> ScaffoldServer:
        update, change = aggregate
        params, state = base.server_update(Server(server.params, server.optimizer), update)
        control = jax.tree.map(
            lambda c, d: (c + server.share * d).astype(c.dtype), server.control, change
        )
        return ScaffoldServer(params, state, control, server.share)

    return base._replace(
        name="scaffold", init=init, client_update=client_update, server_update=server_update
    )
