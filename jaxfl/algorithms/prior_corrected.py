"""Correction of predictions by how often a client has each class, around any method."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Key

from jaxfl._support.checks import at_least_0, check_fraction, checked, nonzero
from jaxfl.models.extended import extended, outputs_of
from jaxfl.privacy.clip import clip
from jaxfl.privacy.mechanisms import BandedNoise, BLTNoise, Extrapolated, Mechanism
from jaxfl.tasks import changed_logits
from jaxfl.types import Algorithm, ClientData, Model, Number, Params, Tree

_LOG_PRIOR = "log_prior"
"""Name of the entry of a client's parameters that holds its offset, next to the layers."""

_NEVER = -1e30
"""Offset of a class that is ruled out.

It is finite, so that the loss of a padding example times its weight 0 is 0.
"""

_LEAST = 0.1
"""Least released share of a class, relative to a uniform share. Noise may leave less than this."""

_SUMS = (Mechanism, BandedNoise, BLTNoise, Extrapolated)
"""Mechanisms that sum messages of any structure, which are clipped to a bound that clients know."""


class Counted(NamedTuple):
    """State of the wrapped method's server, and sums of the released shares of classes."""

    method: Tree
    total: Float[Array, "K"]
    """Sum over rounds of the released shares of classes, in the scale of the messages."""
    squares: Float[Array, ""]
    """Sum over rounds of the squared norm of the released shares."""
    rounds: Float[Array, ""]
    """Number of rounds in the sums."""


@checked(
    smoothing=at_least_0,
    released=functools.partial(check_fraction, zero=True, one=False),
)
def prior_corrected(
    algorithm: Algorithm,
    *,
    smoothing: Number = 0.1,
    train: bool = False,
    released: Number = 0.0,
) -> Algorithm:
    r"""Correct a method's predictions by the shares of classes among each client's own examples.

    .. math::
        p_i(y | x) \propto p(y | x) \frac{\pi_i(y)}{\pi(y)}, \qquad
        \pi_i(y) = \frac{n_i(y) + s}{n_i + s K}

    Here :math:`n_i(y)` of a client's :math:`n_i` training examples are of class y, one of K. The
    correction adds the offset :math:`\log \pi_i(y) - \log \pi(y)` to the logits. The default is
    :math:`\pi(y) = 1 / K`. A client that has no examples, or equally many of each class, then has
    the method's predictions.

    If `released` w is above 0, :math:`\pi` comes from the labels of all clients. A participant with
    the shares :math:`h_i(y) = n_i(y) / n_i` and the update :math:`\Delta_i` sends one vector:

    .. math::
        (\Delta_i, \; w C h_i \max(1, |\Delta_i| / C_i)), \qquad
        C_i = C \sqrt{1 - w^2 |h_i|^2}

    The mechanism clips this vector to its bound C. The clipped vector is
    :math:`(\mathrm{clip}_{C_i}(\Delta_i), \, w C h_i)`. The mean r of the released shares over T
    rounds has noise of std :math:`z / (w \, q N \sqrt{T})`, if cohorts have qN clients and rounds
    have independent noise. The server shrinks r towards uniform shares by its squared standard
    error v, estimated from the rounds as if they were independent:

    .. math::
        \pi(y) &\propto \max \Big( \lambda r(y) + \frac{1 - \lambda}{K}, \; \frac{1}{10 K} \Big) \\
        \lambda &= \max \Big( 0, \; 1 - \frac{v}{\sum_k (r(k) - \bar r)^2} \Big)

    After one round v cannot be estimated, and is taken to be 0.

    Args:
        algorithm: Any method for a classification.
        smoothing: s, number of examples that are added to every class. 0 lets the client predict
            only its own classes. Every other class has probability 0, and a finite loss of 1e30.
        train: Whether local training adds the offset too, in rounds and before an evaluation. The
            shared model then learns what the counts of labels leave open (logit adjustment, or the
            restricted softmax with s = 0). False suits methods that evaluate a shared model. A
            model that is trained on the client's own examples knows its classes, and would be
            corrected twice.
        released: w, the largest norm of a client's shares over the clip bound, below 1. A larger
            w leaves less noise on the shares, but a tighter bound :math:`C_i` for the update. If
            the mechanism does not clip, the client sends :math:`(\Delta_i, w h_i)`. 0 sends
            nothing about labels.

    Guarantee: The guarantee of the method, with the same mechanism and epsilon. If `released` is 0,
        counts of labels stay with the client. Otherwise they are a part of its message, whose joint
        norm is at most C. Noise of the same multiplier covers the message, and pi is
        post-processing of the released sums. If `train` is True, the update depends on the counts,
        and the mechanism clips the update as before. Offsets have joint privacy: each client is
        protected against all other clients, but its offset depends on its own data. Publishing
        offsets voids the guarantee.
    Deviations from the paper: The default pi is uniform, as if the shared model had seen all
        classes equally often. The released count weighs clients as the mechanism does, not by their
        numbers of examples. FedRS scales the weights of missing classes. Here s = 0 rules these
        classes out.
    References: Saerens, Latinne, Decaestecker, Adjusting the Outputs of a Classifier to New a
        Priori Probabilities, Neural Computation 2002; Menon et al., Long-Tail Learning via Logit
        Adjustment, ICLR 2021; Li and Zhan, FedRS: Federated Learning with Restricted Softmax for
        Label Distribution Non-IID Data, KDD 2021.

    Raises:
        ValueError: The task is not a classification, or the outputs are not one logit for each
            class. `train` comes with private local steps, or with a method that has its own loss.
            `released` comes with `train`, with private local steps, or with a method that sends
            weights or nothing. `released` comes with a mechanism that does more than sum messages.

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.models import mlp
    >>> prior_corrected(fedavg(mlp((8, 8, 1), 10, hidden=(16,))), smoothing=0.0).name
    'prior_corrected(fedavg)'
    """
    if nonzero(released):
        _check_released(released, algorithm, train=train)
    model = algorithm.model
    classes = classes_of("algorithm", model)
    if train:
        check_trains_by_clients(algorithm, train=train)

    def offset_of(data: ClientData) -> Float[Array, "K"]:
        return log_prior(data, classes, smoothing)

    def start(key: Key[Array, ""]) -> Float[Array, "K"]:
        del key
        return jnp.zeros(classes)

    def add(offset: Float[Array, "K"], logits: Array, x: Array | None = None) -> Array:
        del x
        return logits + offset.astype(logits.dtype)[None]

    def personalize(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> Params:
        offset = offset_of(data)
        with_offset = functools.partial(add, offset)
        # With `train`, training before an evaluation has the offset as rounds have it.
        correction: contextlib.AbstractContextManager = contextlib.nullcontext()
        if train:
            correction = changed_logits(with_offset)
        with correction:
            params = algorithm.personalize(key, server, client, data)
        return {**params, _LOG_PRIOR: offset}

    def client_update(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> tuple:
        change = functools.partial(add, offset_of(data))
        return update_through(change, algorithm, key, server, client, data)

    update = algorithm.client_update
    if train:
        update = client_update
    corrected = algorithm._replace(
        name=f"prior_corrected({algorithm.name})",
        model=extended(model, _LOG_PRIOR, start, add),
        client_update=update,
        personalize=personalize,
    )
    if nonzero(released):
        return _releasing(corrected, released, classes)
    return corrected


def _releasing(corrected: Algorithm, released: Number, classes: int) -> Algorithm:
    """Return a corrected method whose clients also send their shares of classes.

    Args:
        corrected: The method, whose correction takes uniform shares for those of all clients.
        released: The argument of `prior_corrected`.
        classes: Number of classes.
    """
    bound = corrected.mechanism.clip

    def init(key: Key[Array, ""], num_clients: int) -> tuple[Counted, Tree]:
        method, clients = corrected.init(key, num_clients)
        server = Counted(
            method, total=jnp.zeros(classes), squares=jnp.zeros(()), rounds=jnp.zeros(())
        )
        return server, clients

    def client_update(
        key: Key[Array, ""], server: Counted, client: Tree, data: ClientData
    ) -> tuple:
        message, client, info = corrected.client_update(key, server.method, client, data)
        # A client without examples has shares of 0.
        shares = class_counts(data, classes) / jnp.maximum(data.size, 1)
        joint = with_shares(message.update, released * shares, bound)
        return message._replace(update=joint), client, info

    def server_update(server: Counted, aggregate: Tree) -> Counted:
        method = corrected.server_update(server.method, aggregate["update"])
        # The aggregate is what the mechanism releases, so pi costs no further privacy.
        shares = aggregate["shares"]
        # The squares later give the variance between rounds.
        squares = server.squares + jnp.sum(shares**2)
        total = server.total + shares
        return Counted(method, total, squares, server.rounds + 1)

    def personalize(key: Key[Array, ""], server: Counted, client: Tree, data: ClientData) -> Params:
        params = corrected.personalize(key, server.method, client, data)
        shared = released_log_prior(server, released * unit_of(bound))
        # This is the offset log pi_i - log pi. Common constants of either change no prediction.
        return {**params, _LOG_PRIOR: params[_LOG_PRIOR] - shared}

    return corrected._replace(
        init=init,
        client_update=client_update,
        server_update=server_update,
        personalize=personalize,
    )


def check_trains_by_clients(algorithm: Algorithm, *, train: Any) -> None:
    """Require a method without private local steps, before its training applies a change of logits.

    Args:
        algorithm: The method whose local training applies the change.
        train: Value of the argument `train`, for the error message.

    Raises:
        ValueError: The method has private local steps.
    """
    if algorithm.dp_sgd is not None:
        raise ValueError(
            f"train must be left out with private local steps, got {train!r} with "
            f"algorithm={algorithm.name!r}. Leave train out, because each example would "
            "change the gradients of the client's other examples, and no noise hides that."
        )


def update_through(
    function: Callable[[Array], Array],
    algorithm: Algorithm,
    key: Key[Array, ""],
    server: Tree,
    client: Tree,
    data: ClientData,
) -> tuple:
    """Return the result of `client_update` for a client whose loss applies `function` to logits.

    Args:
        function: Function from logits [B, K] to changed logits [B, K].
        algorithm: The method.
        key: Key of the client's update.
        server: State of the server.
        client: State of the client.
        data: Examples of the client.

    Raises:
        ValueError: The method trains by a loss that does not take the change.
    """
    with changed_logits(function) as change:
        updated = algorithm.client_update(key, server, client, data)
    if not change.applied:
        raise ValueError(
            f"train must be left out for a method with a loss of its own, got it with "
            f"algorithm={algorithm.name!r}. Leave train out, or give the method the task's "
            "loss, for instance by ppsgd(loss=None)."
        )
    return updated


def _check_released(released: Number, algorithm: Algorithm, *, train: bool) -> None:
    """Require a method whose mechanism covers shares of classes as a part of its messages.

    `released` is the argument of `prior_corrected`, for the error message.
    """
    mechanism = algorithm.mechanism
    if train:
        reason = "with train, whose shared model learns as if classes were equally frequent"
    elif algorithm.dp_sgd is not None:
        reason = "with private local steps, whose noise does not cover the shares"
    elif algorithm.sends == "weights":
        reason = "for a method that sends weights, which shares of the bound would distort"
    elif not mechanism.communicates:
        reason = "for a method that sends nothing"
    elif type(mechanism) not in _SUMS:
        kind = type(mechanism).__name__
        reason = f"with the mechanism {kind}, which does more than sum messages"
    else:
        return
    raise ValueError(
        f"released must be 0 {reason}, got {released} with algorithm={algorithm.name!r}. "
        "Leave released out."
    )


def with_shares(update: Tree, shares: Float[Array, "K"], bound: Number) -> Tree:
    r"""Return a message that holds an update and a client's shares of classes.

    After the message is clipped to the bound C, its shares are :math:`C h`, and its update is
    clipped to :math:`C \sqrt{1 - |h|^2}`.

    Args:
        update: Any tree of arrays.
        shares: h, a vector [K] with a norm below 1: the shares of classes times `released`.
        bound: C, the clip bound of the message. If it is infinite, nothing is clipped, and the
            factor of the shares is 1.

    >>> joint = with_shares({"w": jnp.array([30.0, 40.0])}, jnp.array([0.6, 0.0]), 2.0)
    >>> clip(joint, 2.0)[0]["shares"]
    Array([1.2, 0. ], dtype=float32)
    """
    # An infinite bound only measures the norm, in single precision.
    _, norm = clip(update, math.inf)
    # The norm of h is below 1, so the root is real and above 0.
    room = bound * jnp.sqrt(1 - jnp.sum(shares**2))
    # Clipping divides the message by this factor, which therefore cancels in the shares.
    excess = jnp.maximum(1, norm / room)
    return {"update": update, "shares": unit_of(bound) * shares * excess}


def unit_of(bound: Number) -> Float[Array, ""]:
    """Return the bound, or 1 if the bound is infinite."""
    # A sweep's bound is known only when the program runs, so `where` decides.
    return jnp.where(jnp.isinf(bound), 1.0, bound)


def classes_of(argument: str, model: Model) -> int:
    """Return the number of classes for which a model has logits.

    Args:
        argument: Name of the argument that holds the model, for error messages.
        model: The network.

    Raises:
        ValueError: The task is not a classification, or the outputs are not one logit for each
            class.
    """
    if model.task.name != "classification":
        raise ValueError(
            f"{argument} must be for a classification, got model={model.name!r} with "
            f"task={model.task.name!r}. Choose another method, because only classes have shares."
        )
    outputs = outputs_of(model)
    if len(outputs.shape) != 2:
        raise ValueError(
            f"{argument} must have a model with logits [B, K], got {outputs.shape} of "
            f"model={model.name!r} for a batch of 2. Give a network with one output for each class."
        )
    return outputs.shape[1]


def class_counts(data: ClientData, classes: int) -> Float[Array, "K"]:
    """Return the number of a client's examples of each class. Padding does not count."""
    positions = jnp.arange(data.padded)
    _, labels = data.take(positions)
    real = positions < data.size
    weights = real.astype(jnp.float32)
    # Padding has the label 0, but no weight.
    return jnp.bincount(labels.astype(jnp.int32), weights=weights, length=classes)


def log_prior(data: ClientData, classes: int, smoothing: Number = 0.0) -> Float[Array, "K"]:
    """Return the logarithms of a client's shares of classes, relative to the largest share.

    Without smoothing, a class without examples has a large negative number in place of minus
    infinity. A client without examples has zeros.

    Args:
        data: The client.
        classes: K, the number of classes.
        smoothing: Number of examples that are added to every class first.
    """
    return _log_over_largest(class_counts(data, classes) + smoothing)


def released_log_prior(server: Counted, unit: Number) -> Float[Array, "K"]:
    """Return the logarithms of pi relative to its largest entry, from released shares.

    Args:
        server: State of the server, with the sums of all rounds so far.
        unit: Factor with which clients send their shares, w C. A point of a sweep that sends no
            shares has 0.

    >>> after_one = Counted((), jnp.array([3.0, 1.5, -0.5]), jnp.array(11.5), jnp.array(1.0))
    >>> released_log_prior(after_one, 4.0).round(2)
    Array([ 0.  , -0.69, -3.11], dtype=float32)
    """
    classes = len(server.total)
    # Before the first round all sums are 0, so pi is uniform.
    rounds = jnp.maximum(server.rounds, 1)
    # Without released shares the scale is 0, so pi is uniform.
    scale = jnp.where(unit > 0, 1 / jnp.where(unit > 0, unit, 1), 0)
    mean = scale * server.total / rounds
    spread = scale**2 * server.squares / rounds - jnp.sum(mean**2)
    # This is v: the variance of a round's shares, estimated from T rounds, over T.
    error = jnp.maximum(spread, 0) / jnp.maximum(rounds - 1, 1)
    distance = jnp.sum((mean - jnp.mean(mean)) ** 2)
    # This is lambda, which is 0 if the shares differ by no more than their error.
    trust = jnp.where(distance > error, 1 - error / jnp.where(distance > 0, distance, 1), 0)
    shares = trust * mean + (1 - trust) / classes
    return _log_over_largest(jnp.maximum(shares, _LEAST / classes))


def _log_over_largest(counts: Float[Array, "K"]) -> Float[Array, "K"]:
    """Return the logarithms of counts, relative to the largest count.

    A common factor of all counts changes no prediction. This factor makes the logarithms exactly 0
    if all counts are equal, even if all counts are 0.
    """
    most = jnp.max(counts)
    shares = jnp.where(most > 0, counts / jnp.maximum(most, 1e-30), 1.0)
    return jnp.where(shares > 0, jnp.log(jnp.where(shares > 0, shares, 1.0)), _NEVER)
