"""A map of a client's own from the shared model's logits to its classes, around any method."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Key

from jaxfl._support.checks import checked
from jaxfl.algorithms.prior_corrected import check_trains_by_clients, classes_of, update_through
from jaxfl.local.lanes import longest
from jaxfl.local.sums import computed
from jaxfl.models.extended import extended
from jaxfl.types import Algorithm, ClientData, Model, Number, Params, Tree

_LOGITS_MAP = "logits_map"
"""Name of the entry of a client's parameters that holds its map, next to the layers."""

_BLOCK = 128
"""Number of examples whose logits are computed at once."""

_CONSTANT = 30**0.5
"""Constant input of the fit, whose weights times this number are the offset.

The penalty of the offset is therefore 1/30 of the matrix's.
Clients differ more often in how frequent their classes are than in what the classes mean.
"""


class LogitsMap(NamedTuple):
    """A linear map of logits: logits times `matrix`, plus `offset`."""

    matrix: Float[Array, "K K"]
    offset: Float[Array, "K"]

    def __call__(self, logits: Float[Array, "B K"]) -> Float[Array, "B K"]:
        """Return the mapped logits, in the dtype of `logits`."""
        matrix, offset = (leaf.astype(logits.dtype) for leaf in self)
        return logits @ matrix + offset[None]


@checked()
def matrix_scaled(
    algorithm: Algorithm,
    *,
    penalty: Number = 40.0,
    train: Number | None = None,
    steps: int = 20,
) -> Algorithm:
    r"""Give each client a linear map of its own from a method's logits to its classes.

    .. math::
        p_i(y | x) = \mathrm{softmax}(z(x) A_i + b_i)_y

    Here :math:`z(x)` are the K logits of the model with which the method would evaluate the client.
    The map :math:`(A_i, b_i)` is fitted to the client's training examples, and stays close to the
    identity:

    .. math::
        (A_i, b_i) = \arg\min_{A, b} \sum_{(x, y) \in D_i} - \log \mathrm{softmax}(z(x) A + b)_y
            + \frac{\lambda}{2} \Big( |A - I|_F^2 + \frac{|b|^2}{30} \Big)

    The offset learns how frequent the client's classes are, as `prior_corrected` does from counts.
    The matrix also learns classes that mean something else on this client, for instance because
    two clients name the same things differently. The fit takes `steps` steps of Nesterov's method
    with the step size 1 / L, where :math:`L = \lambda + \frac{1}{2} \big| \sum_x u u^T \big|_F`
    with :math:`u = (z(x), \sqrt{30})` bounds the curvature in :math:`(A, b / \sqrt{30})`.

    Args:
        algorithm: Any method for a classification. Methods that share a model gain the most.
        penalty: :math:`\lambda`, in examples: a client with many more examples than this has a map
            that fits them closely, and a client with far fewer has almost the method's predictions.
        train: Penalty of maps in rounds, in examples. Each participant then fits a map to the model
            with which the method would evaluate it, and local training applies the map to logits.
            The shared logits learn what clients can translate, even where their classes mean
            different things. None leaves rounds as they are.
        steps: Number of steps of a fit.

    Guarantee: The guarantee of the method, with the same mechanism and epsilon. Maps stay with
        their clients. If `train` is given, a client's update depends on its map, and the mechanism
        clips the update as before. Maps have joint privacy: each client is protected against all
        other clients, but its map depends on its own data. Publishing maps voids the guarantee.
    Deviations from the paper: Guo et al. fit one map after training to calibrate one model, and
        Kull et al. penalise entries off the diagonal and offsets. Here each client has a map, which
        is penalised towards the identity, and training may know it.
    References: Guo, Pleiss, Sun, Weinberger, On Calibration of Modern Neural Networks, ICML 2017
        (arXiv:1706.04599), section 4.2; Kull et al., Beyond Temperature Scaling, NeurIPS 2019
        (arXiv:1910.12656). The use in rounds is the project's own.

    Raises:
        ValueError: The task is not a classification, or the outputs are not one logit for each
            class. `train` comes with private local steps, or with a method that has its own loss.

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.models import mlp
    >>> matrix_scaled(fedavg(mlp((8, 8, 1), 10, hidden=(16,)))).name
    'matrix_scaled(fedavg)'
    """
    model = algorithm.model
    classes = classes_of("algorithm", model)
    if train is not None:
        check_trains_by_clients(algorithm, train=train)

    def fit(
        key: Key[Array, ""], server: Tree, client: Tree, data: ClientData, penalty: Number
    ) -> tuple[Params, LogitsMap]:
        params = algorithm.personalize(key, server, client, data)
        logits, labels, real = _logits(model, params, data, classes)
        return params, fit_map(logits, labels, real, penalty=penalty, steps=steps)

    def personalize(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> Params:
        params, found = fit(key, server, client, data, penalty)
        return {**params, _LOGITS_MAP: found}

    def client_update(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> tuple:
        assert train is not None
        _, found = fit(key, server, client, data, train)
        return update_through(found, algorithm, key, server, client, data)

    def start(key: Key[Array, ""]) -> LogitsMap:
        del key
        return LogitsMap(jnp.eye(classes), jnp.zeros(classes))

    def change(found: LogitsMap, logits: Array, x: Array) -> Float[Array, "B K"]:
        del x
        return found(logits)

    updated = algorithm.client_update
    if train is not None:
        updated = client_update
    return algorithm._replace(
        name=f"matrix_scaled({algorithm.name})",
        model=extended(model, _LOGITS_MAP, start, change),
        client_update=updated,
        personalize=personalize,
    )


def fit_map(
    logits: Float[Array, "M B K"],
    labels: Int[Array, "M B"],
    real: Bool[Array, "M B"],
    *,
    penalty: Number,
    steps: int,
) -> LogitsMap:
    r"""Fit a linear map from logits to labels, close to the identity.

    .. math::
        \min_{A, b} \sum_{x} - \log \mathrm{softmax}(z(x) A + b)_y
            + \frac{\lambda}{2} \Big( |A - I|_F^2 + \frac{|b|^2}{30} \Big)

    Args:
        logits: z, the logits of M blocks of B examples.
        labels: y, the labels.
        real: Whether a position holds an example rather than padding, which comes last. Padding
            does not count.
        penalty: :math:`\lambda`.
        steps: Number of steps of Nesterov's method.

    Returns:
        The fitted map, a function from logits [B, K] to logits [B, K].

    >>> logits = jnp.array([[[2.0, 0.0], [0.0, 2.0]]])  # two sure predictions, both wrong
    >>> labels, real = jnp.array([[1, 0]]), jnp.ones((1, 2), bool)
    >>> fit_map(logits, labels, real, penalty=0.01, steps=200)(logits[0]).argmax(-1)
    Array([1, 0], dtype=int32)
    """
    blocks, batch, classes = logits.shape
    # Padding comes last, so blocks that hold nothing else are left out.
    used = longest(-(-jnp.sum(real) // batch))
    inputs = _with_constant(logits, real)
    rows = inputs.reshape(blocks * batch, classes + 1)
    # The labels' part of the gradient is the same in all steps.
    labelled = rows.T @ jax.nn.one_hot(labels.reshape(-1), classes)
    # The Hessian of -log softmax is at most 1/2.
    curvature = penalty + jnp.linalg.norm(rows.T @ rows) / 2
    # The last row is that of the constant input, whose weights start at 0.
    identity = jnp.eye(classes + 1, classes)

    def gradient(weights: Float[Array, "I K"]) -> Float[Array, "I K"]:
        def add(block: Int[Array, ""] | int, total: Array) -> Array:
            shares = jax.nn.softmax(inputs[block] @ weights)
            return total + inputs[block].T @ shares

        start = penalty * (weights - identity) - labelled
        if blocks == 1:
            # A loop of one pass costs more than the pass.
            return add(0, start)
        return lax.fori_loop(0, used, add, start)

    weights = _descended(gradient, identity, curvature, steps)
    return LogitsMap(matrix=weights[:classes], offset=_CONSTANT * weights[classes])


def _with_constant(
    logits: Float[Array, "M B K"], real: Bool[Array, "M B"]
) -> Float[Array, "M B I"]:
    """Return logits with the constant input, and zeros for padding."""
    constant = jnp.full((*real.shape, 1), _CONSTANT)
    inputs = jnp.concatenate([logits, constant], axis=-1)
    # Rows of zeros add nothing to the sums of the fit, whatever labels padding has.
    return jnp.where(real[..., None], inputs, 0)


def _descended(
    gradient: Callable[[Array], Array], start: Array, curvature: Float[Array, ""], steps: int
) -> Array:
    """Return the weights after some steps of Nesterov's method.

    Args:
        gradient: Gradient of a convex function.
        start: Weights before the first step.
        curvature: L, bound on the curvature of the function.
        steps: Number of steps.
    """

    def step(index: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        before, ahead = carry
        # The step is 1 / L, and the momentum k / (k + 3) is Nesterov's for convex functions.
        after = ahead - gradient(ahead) / curvature
        momentum = index / (index + 3.0)
        return after, after + momentum * (after - before)

    weights, _ = lax.fori_loop(0, steps, step, (start, start))
    return weights


def _logits(
    model: Model, params: Params, data: ClientData, classes: int
) -> tuple[Float[Array, "M B K"], Int[Array, "M B"], Bool[Array, "M B"]]:
    """Return logits and labels of a client by block, and which positions hold an example."""
    batch = min(_BLOCK, data.padded)
    logits = computed(model, data, functools.partial(model.apply, params), batch=batch)
    positions = jnp.arange(len(logits)).reshape(-1, batch)
    _, labels = data.take(positions)
    by_block = logits.reshape(*positions.shape, classes)
    return by_block, labels, positions < data.size
