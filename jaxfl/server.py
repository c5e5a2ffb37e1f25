"""First states of server and clients, and the server's optimizer step, with or without public masks.

Adaptive optimizers of the server are transformations of optax; what sends updates takes any as `server_optimizer`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax import Array
from jaxtyping import Key, UInt32

from jaxfl._validate import check_fraction, checked
from jaxfl.types import Number, Params, Tree

_momentum = functools.partial(check_fraction, zero=True, one=False)


class Server(NamedTuple):
    """Global parameters and the state of the server's optimizer."""

    params: Params
    optimizer: Tree


class SparseServer(NamedTuple):
    """A server, the masks that it broadcasts, and the data of the public key for random masks."""

    params: Params
    optimizer: Tree
    mask: Tree
    """Coordinates that the forward pass keeps."""
    support: Tree
    """Coordinates that are trained and sent."""
    public: UInt32[Array, "2"]


Masks = Callable[[Params, UInt32[Array, "2"]], tuple[Tree, Tree]]
"""Forward mask and support of a round, from the broadcast parameters and the data of its public key."""


def init_server(params: Params, optimizer: optax.GradientTransformation) -> Server:
    """Start from `params` with a fresh optimizer state.

    Raises:
        ValueError: an optimizer whose steps do not end at the weights to evaluate.
    """
    state = optimizer.init(params)
    if schedule_free(state):
        raise ValueError(
            "server_optimizer must step the weights that clients are evaluated with, got optax.contrib.schedule_free. "
            "Give the server optax.sgd(1.0), and optax.contrib.schedule_free to LocalSGD."
        )
    return Server(params, state)


def states_of(state: Tree, wanted: Callable[[Any], bool]) -> list[Any]:
    """Return the wanted parts of an optimizer's state."""
    return [part for part in jax.tree.leaves(state, is_leaf=wanted) if wanted(part)]


def schedule_free(state: Tree) -> list[Any]:
    """Return the states of `optax.contrib.schedule_free` in an optimizer's state."""
    return states_of(state, lambda part: isinstance(part, optax.contrib.ScheduleFreeState))


def init_clients(params: Params, number: int) -> Params:
    """Client states [C, ...] that all start from `params`."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (number, *leaf.shape)), params)


def server_step(optimizer: optax.GradientTransformation, server: Server, aggregate: Tree) -> Server:
    r"""One optimizer step with the aggregated update as the negative gradient (FedOpt, Reddi et al. 2021).

    `optax.sgd(eta_g)` is :math:`\theta \leftarrow \theta + \eta_g \, \mathrm{aggregate}`.
    """
    updates, state = optimizer.update(
        optax.tree.scale(-1, aggregate), server.optimizer, server.params
    )
    return Server(optax.apply_updates(server.params, updates), state)


@checked(beta1=_momentum, beta2=_momentum)
def fedadam(
    learning_rate: Number, beta1: Number = 0.9, beta2: Number = 0.99, tau: Number = 1e-3
) -> optax.GradientTransformation:
    r"""FedAdam, a `server_optimizer`: :math:`v_t = \beta_2 v_{t-1} + (1 - \beta_2) \Delta_t^2` for each coordinate.

    .. math:: m_t = \beta_1 m_{t-1} + (1 - \beta_1) \Delta_t, \qquad
        \theta_t = \theta_{t-1} + \eta \frac{m_t}{\sqrt{v_t} + \tau}, \qquad m_0 = 0, \quad v_0 = \tau^2

    of the aggregate :math:`\Delta_t`. Unlike `optax.adam`, it corrects no bias, and v starts at :math:`\tau^2`.

    Args:
        learning_rate: :math:`\eta`.
        beta1: momentum.
        beta2: memory of the squares.
        tau: adaptivity: the smaller, the more alike are the steps of all coordinates.

    Guarantee: a step is post-processing of the aggregate and costs no privacy; noise on it enters v, too.
    References: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv:2003.00295), Algorithm 2.

    >>> optimizer = fedadam(0.1, tau=1.0)
    >>> optimizer.update(jnp.array([-2.0]), optimizer.init(jnp.zeros(1)))[0].round(4)
    Array([0.0099], dtype=float32)
    """
    return _adaptive(learning_rate, beta1, tau, lambda v, square: beta2 * v + (1 - beta2) * square)


@checked(beta1=_momentum, beta2=_momentum)
def fedyogi(
    learning_rate: Number, beta1: Number = 0.9, beta2: Number = 0.99, tau: Number = 1e-3
) -> optax.GradientTransformation:
    r"""FedYogi: FedAdam with :math:`v_t = v_{t-1} - (1-\beta_2) \Delta_t^2 \, \mathrm{sign}(v_{t-1} - \Delta_t^2)`.

    Args:
        learning_rate: :math:`\eta`.
        beta1: momentum.
        beta2: how little of a square v moves by.
        tau: as in `fedadam`.

    References: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv:2003.00295), Algorithm 2.

    >>> optimizer = fedyogi(0.1, tau=1.0)
    >>> optimizer.update(jnp.array([-2.0]), optimizer.init(jnp.zeros(1)))[0].round(4)
    Array([0.0099], dtype=float32)
    """
    return _adaptive(
        learning_rate, beta1, tau, lambda v, square: v - (1 - beta2) * square * jnp.sign(v - square)
    )


@checked(beta1=_momentum)
def fedadagrad(
    learning_rate: Number, beta1: Number = 0.0, tau: Number = 1e-3
) -> optax.GradientTransformation:
    r"""FedAdagrad: FedAdam with :math:`v_t = v_{t-1} + \Delta_t^2`.

    Args:
        learning_rate: :math:`\eta`.
        beta1: momentum.
        tau: as in `fedadam`.

    References: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv:2003.00295), Algorithm 2.

    >>> optimizer = fedadagrad(0.1, tau=1.0)
    >>> optimizer.update(jnp.array([-2.0]), optimizer.init(jnp.zeros(1)))[0].round(4)
    Array([0.0618], dtype=float32)
    """
    return _adaptive(learning_rate, beta1, tau, jnp.add)


class _Moments(NamedTuple):
    first: Tree
    second: Tree


def _adaptive(
    learning_rate: Number, beta1: Number, tau: Number, second_fn: Callable[[Array, Array], Array]
) -> optax.GradientTransformation:
    """Algorithm 2, whose three methods differ in what becomes of v and the square of the aggregate."""

    def init(params: Params) -> _Moments:
        return _Moments(
            optax.tree.zeros_like(params),
            jax.tree.map(lambda leaf: jnp.full_like(leaf, tau**2), params),
        )

    def update(updates: Tree, state: Tree, params: Params | None = None) -> tuple[Tree, Tree]:
        del params
        first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.first, updates)
        second = jax.tree.map(lambda v, g: second_fn(v, g**2), state.second, updates)
        steps = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + tau), first, second)
        return steps, _Moments(first, second)

    return optax.GradientTransformation(init, update)


def init_sparse(
    key: Key[Array, ""], params: Params, optimizer: optax.GradientTransformation, masks: Masks
) -> SparseServer:
    """Start from `params`, with a public key and the first round's masks."""
    public = jax.random.bits(jax.random.fold_in(key, 1), (2,), jnp.uint32)
    return SparseServer(*init_server(params, optimizer), *masks(params, public), public)


def sparse_step(
    optimizer: optax.GradientTransformation, server: SparseServer, aggregate: Tree, masks: Masks
) -> SparseServer:
    """`server_step`, and the next round's public key and masks."""
    params, state = server_step(optimizer, Server(server.params, server.optimizer), aggregate)
    public = jax.random.key_data(_split(server.public)[1])
    return SparseServer(params, state, *masks(params, public), public)


def public_key(public: UInt32[Array, "2"]) -> Key[Array, ""]:
    """This round's public key."""
    return _split(public)[0]


def _split(public: UInt32[Array, "2"]) -> Key[Array, "2"]:
    """This round's key, and the next round's."""
    return jax.random.split(jax.random.wrap_key_data(public, impl="threefry2x32"))
