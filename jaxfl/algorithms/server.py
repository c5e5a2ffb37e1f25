"""First states of server and clients, and the server's step, with or without public masks.

Most methods that send updates take an optax transformation as `server_optimizer`, but not
`optax.contrib.schedule_free`. `fedadam`, `fedyogi` and `fedadagrad` are adaptive ones.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Key, UInt32

from jaxfl._support.checks import check_fraction, checked
from jaxfl.local.optimizers import schedule_free
from jaxfl.types import Number, Params, Tree

_momentum = functools.partial(check_fraction, zero=True, one=False)


class Server(NamedTuple):
    """Global parameters and the state of the server's optimizer."""

    params: Params
    optimizer: Tree


class SparseServer(NamedTuple):
    """A server with the round's masks, which it broadcasts, and a public key for random masks."""

    params: Params
    optimizer: Tree
    mask: Tree
    """Coordinates that the forward pass keeps."""
    support: Tree
    """Coordinates that are trained and sent."""
    public: UInt32[Array, "2"]
    """Key data from which `public_key` derives the round's public key."""


Masks = Callable[[Params, UInt32[Array, "2"]], tuple[Tree, Tree]]
"""Function from the broadcast parameters and `SparseServer.public` to the mask and the support."""


def init_server(params: Params, optimizer: optax.GradientTransformation) -> Server:
    """Return a server with `params` and a fresh optimizer state.

    Raises:
        ValueError: The optimizer is `optax.contrib.schedule_free`, which does not evaluate the
            weights that it steps.
    """
    state = optimizer.init(params)
    if schedule_free(state):
        raise ValueError(
            "server_optimizer must step the weights that clients are evaluated with, got "
            "optax.contrib.schedule_free. Give the server optax.sgd(1.0), and "
            "optax.contrib.schedule_free to LocalSGD."
        )
    return Server(params, state)


def init_clients(params: Params, num_clients: int) -> Params:
    """Return client states [C, ...] that all equal `params`."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_clients, *leaf.shape)), params)


def server_step(optimizer: optax.GradientTransformation, server: Server, aggregate: Tree) -> Server:
    r"""Return the server after an optimizer step along the aggregate (FedOpt, Reddi et al. 2021).

    The gradient of the step is the negative aggregate, so `optax.sgd(eta_g)` takes the step
    :math:`\theta \leftarrow \theta + \eta_g \, \mathrm{aggregate}`.
    """
    gradient = optax.tree.scale(-1, aggregate)
    updates, state = optimizer.update(gradient, server.optimizer, server.params)
    return Server(optax.apply_updates(server.params, updates), state)


@checked(beta1=_momentum, beta2=_momentum)
def fedadam(
    learning_rate: Number, beta1: Number = 0.9, beta2: Number = 0.99, tau: Number = 1e-3
) -> optax.GradientTransformation:
    r"""Build FedAdam, a `server_optimizer` that divides steps by root mean squares.

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) \Delta_t, \qquad
        v_t = \beta_2 v_{t-1} + (1 - \beta_2) \Delta_t^2, \qquad
        \theta_t = \theta_{t-1} + \eta \frac{m_t}{\sqrt{v_t} + \tau}

    Here :math:`\Delta_t` is the aggregate, :math:`m_0 = 0` and :math:`v_0 = \tau^2`. Every
    coordinate has its own m and v. Unlike `optax.adam`, FedAdam does not correct the bias.

    Args:
        learning_rate: :math:`\eta`, the learning rate.
        beta1: :math:`\beta_1`, the momentum.
        beta2: :math:`\beta_2`, the decay rate of the squares.
        tau: :math:`\tau`, the degree of adaptivity. A smaller value makes the steps of all
            coordinates more similar in size.

    Guarantee: A step is post-processing of the aggregate, so it costs no privacy. The noise on the
        aggregate also enters v.
    References: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv:2003.00295),
        Algorithm 2.

    >>> optimizer = fedadam(0.1, tau=1.0)
    >>> optimizer.update(jnp.array([-2.0]), optimizer.init(jnp.zeros(1)))[0].round(4)
    Array([0.0099], dtype=float32)
    """

    def second_fn(v: Array, square: Array) -> Array:
        return beta2 * v + (1 - beta2) * square

    return _adaptive(learning_rate, beta1, tau, second_fn)


@checked(beta1=_momentum, beta2=_momentum)
def fedyogi(
    learning_rate: Number, beta1: Number = 0.9, beta2: Number = 0.99, tau: Number = 1e-3
) -> optax.GradientTransformation:
    r"""Build FedYogi, which is `fedadam` with additive changes of v.

    .. math:: v_t = v_{t-1} - (1 - \beta_2) \Delta_t^2 \, \mathrm{sign}(v_{t-1} - \Delta_t^2)

    Args:
        learning_rate: :math:`\eta`, the learning rate.
        beta1: :math:`\beta_1`, the momentum.
        beta2: :math:`\beta_2`. A step moves v by the share :math:`1 - \beta_2` of a square.
        tau: :math:`\tau`, the degree of adaptivity (see `fedadam`).

    References: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv:2003.00295),
        Algorithm 2.

    >>> optimizer = fedyogi(0.1, tau=1.0)
    >>> optimizer.update(jnp.array([-2.0]), optimizer.init(jnp.zeros(1)))[0].round(4)
    Array([0.0099], dtype=float32)
    """

    def second_fn(v: Array, square: Array) -> Array:
        return v - (1 - beta2) * square * jnp.sign(v - square)

    return _adaptive(learning_rate, beta1, tau, second_fn)


@checked(beta1=_momentum)
def fedadagrad(
    learning_rate: Number, beta1: Number = 0.0, tau: Number = 1e-3
) -> optax.GradientTransformation:
    r"""Build FedAdagrad, which is `fedadam` with :math:`v_t = v_{t-1} + \Delta_t^2`.

    Args:
        learning_rate: :math:`\eta`, the learning rate.
        beta1: :math:`\beta_1`, the momentum.
        tau: :math:`\tau`, the degree of adaptivity (see `fedadam`).

    References: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (arXiv:2003.00295),
        Algorithm 2.

    >>> optimizer = fedadagrad(0.1, tau=1.0)
    >>> optimizer.update(jnp.array([-2.0]), optimizer.init(jnp.zeros(1)))[0].round(4)
    Array([0.0618], dtype=float32)
    """
    return _adaptive(learning_rate, beta1, tau, jnp.add)


class _Moments(NamedTuple):
    """Moments of an adaptive optimizer: m as `first`, and v as `second`, by coordinate."""

    first: Tree
    second: Tree


def _adaptive(
    learning_rate: Number, beta1: Number, tau: Number, second_fn: Callable[[Array, Array], Array]
) -> optax.GradientTransformation:
    """Build `fedadam` with another rule for v.

    `second_fn` maps v and the squared aggregate to the next v.
    """

    def init(params: Params) -> _Moments:
        first = optax.tree.zeros_like(params)
        second = jax.tree.map(lambda leaf: jnp.full_like(leaf, tau**2), params)
        return _Moments(first, second)

    def update(updates: Tree, state: Tree, params: Params | None = None) -> tuple[Tree, Tree]:
        del params
        first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.first, updates)
        second = jax.tree.map(lambda v, g: second_fn(v, g**2), state.second, updates)
        # The sign is that of optax: `first` averages gradients, which are negative aggregates.
        # No rule makes v negative, so the denominator is at least tau, which is above 0.
        steps = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + tau), first, second)
        return steps, _Moments(first, second)

    return optax.GradientTransformation(init, update)


def init_sparse(
    key: Key[Array, ""], params: Params, optimizer: optax.GradientTransformation, masks: Masks
) -> SparseServer:
    """Return a server with `params`, a public key and the first round's masks."""
    # Callers draw the weights by `key` itself, so public bits need a key of their own.
    public = jax.random.bits(jax.random.fold_in(key, 1), (2,), jnp.uint32)
    server = init_server(params, optimizer)
    mask, support = masks(params, public)
    return SparseServer(server.params, server.optimizer, mask, support, public)


def sparse_step(
    optimizer: optax.GradientTransformation, server: SparseServer, aggregate: Tree, masks: Masks
) -> SparseServer:
    """Return the server after a `server_step`, with the next round's public key and masks."""
    params, state = server_step(optimizer, Server(server.params, server.optimizer), aggregate)
    # A server's step does not get the round's number, so a chain of keys replaces it.
    public = jax.random.key_data(_this_and_next(server.public)[1])
    # Clients of the next round get these weights, so its masks may depend on them.
    mask, support = masks(params, public)
    return SparseServer(params, state, mask, support, public)


def public_key(public: UInt32[Array, "2"]) -> Key[Array, ""]:
    """Return the public key of the round that has the key data `public`."""
    return _this_and_next(public)[0]


def _this_and_next(public: UInt32[Array, "2"]) -> Key[Array, "2"]:
    """Return two keys [2] that follow from a round's key data: the round's, and the next one's."""
    # Two words of key data belong to this generator, whatever the default of JAX is.
    return jax.random.split(jax.random.wrap_key_data(public, impl="threefry2x32"))
