"""Mixtures of a method's predictions and those of a client's own model, around any method."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Key

from jaxfl._support.checks import check_count, checked
from jaxfl.algorithms.ifca import index_of_least
from jaxfl.local.sums import summed
from jaxfl.local.train import LocalSGD
from jaxfl.models.extended import extended
from jaxfl.types import Algorithm, ClientData, Model, Params, Tree

Mix: TypeAlias = Callable[[Array, Array, Array], Array]
"""Function from the weight of the own model, its outputs and the method's outputs to mixed ones."""

_MIXTURE = "mixture"
"""Name of the entry of a client's parameters that holds its `Mixture`, next to the layers."""

_INIT = 2**31 + 13
"""Number that derives the key of the own model's start from a client's key."""

_TRAINING = 2**31 + 14
"""Number that derives the key of the own model's training."""

_FOLDS = 2**31 + 15
"""Number that derives the key that draws the folds."""


class Mixture(NamedTuple):
    """A client's own model, and the weight of this model's predictions."""

    own: Params
    weight: Any


@checked(folds=functools.partial(check_count, least=2))
def mixed(
    algorithm: Algorithm,
    *,
    local: LocalSGD = LocalSGD(optax.sgd(0.05), epochs=20),
    folds: int = 3,
    pick: bool = False,
) -> Algorithm:
    r"""Mix a method's predictions with those of a model that each client trains for itself.

    .. math::
        p_i(y | x) = \lambda_i \, p(y | x; v_i) + (1 - \lambda_i) \, p(y | x; \theta_i)

    The client trains its own model :math:`v_i` from a random start on its examples.
    :math:`\theta_i` is the method's model for the client. The weight is the one of 0, 0.1, ..., 1
    that gives the least loss on examples that are left out:

    .. math::
        \lambda_i = \arg\min_\lambda \sum_k \sum_{(x, y) \in D_{ik}}
            - \log \big( \lambda \, p(y | x; v_i^{-k})
            + (1 - \lambda) \, p(y | x; \theta_i^{-k}) \big)

    :math:`v_i^{-k}` and :math:`\theta_i^{-k}` are made in the same way without the examples
    :math:`D_{ik}` of fold k. Folds are random. If the task is a classification, they divide each
    class as evenly as possible. The only example of a class is in no fold, because no model would
    know the class without it. A client whose examples are in no fold has the method's predictions.

    At each evaluation every client trains `folds` + 1 models, and discards them afterwards.

    Args:
        algorithm: Any method for a classification, a next token, or a regression. Regressions
            mix outputs, and their weight minimises the squared error.
        local: Optimizer, batches and epochs of a client's own model. Give as many epochs as
            training without the method takes.
        folds: Number of parts of a client's examples. Each part is left out once.
        pick: Whether the only weights are 0 and 1, so that each client picks one of the two models.

    Guarantee: The guarantee of the method, which sends the same messages as without a mixture. Own
        models and weights have joint privacy: each client is protected against all other clients,
        but its model and weight depend on its own data. Publishing them voids the guarantee.
    Deviations from the paper: The method does not train for the mixture, as Mansour et al. and
        APFL do. kNN-Per mixes with neighbours, not with a model. A state that the method's clients
        keep between rounds, such as a personal model, has seen the examples of all folds. The
        weights then favour the method.
    References: Mansour et al., Three Approaches for Personalization with Applications to Federated
        Learning, 2020 (arXiv:2002.10619); Deng, Kamani, Mahdavi, Adaptive Personalized Federated
        Learning, 2020 (arXiv:2003.13461); Marfoq et al., Personalized Federated Learning through
        Local Memorization, ICML 2022 (arXiv:2111.09360).

    Raises:
        ValueError: The model's task is none of these three.

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.models import mlp
    >>> mixed(fedavg(mlp((8, 8, 1), 10, hidden=(16,))), folds=5).name
    'mixed(fedavg)'
    """
    model = algorithm.model
    if model.task.name not in _MIXTURES:
        raise ValueError(
            f"algorithm must be for one of the tasks {', '.join(_MIXTURES)}, got "
            f"model={model.name!r} with task={model.task.name!r}. "
            "Leave mixed out, or give the model another task."
        )
    by_class = model.task.name == "classification"
    mix = functools.partial(_mixture, _MIXTURES[model.task.name])
    weights = (np.arange(11) / 10).astype(np.float32)
    if pick:
        weights = np.array([0.0, 1.0], np.float32)

    def personalize(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> Params:
        start = _own_params(model, jax.random.fold_in(key, _INIT))
        fold = _folds(jax.random.fold_in(key, _FOLDS), data, folds, by_class=by_class)

        def fit(data: ClientData) -> tuple[Params, Params]:
            # All fits have one start and one key, so they differ in nothing but the examples.
            own, _ = local.train(jax.random.fold_in(key, _TRAINING), model, start, data)
            return own, algorithm.personalize(key, server, client, data)

        def leave_out(index: Int[Array, ""], carry: tuple) -> tuple:
            """Train without fold `index`, and add the losses on it. The last index has no fold."""
            *_, losses = carry
            # In the last pass `left_out` is empty, so it adds no loss.
            training, left_out = _divided(data, fold == index)
            pair = fit(training)
            return *pair, losses + _losses(model, mix, weights, pair, left_out)

        # The loop needs the shapes of its carry before the first fit.
        shapes = jax.eval_shape(fit, data)
        unfitted = optax.tree.zeros_like(shapes)
        carry = (*unfitted, jnp.zeros(len(weights)))
        # A loop holds the program of training once, and not once for each fold.
        own, shared, losses = lax.fori_loop(0, folds + 1, leave_out, carry)
        best = index_of_least(losses)
        return {**shared, _MIXTURE: Mixture(own, jnp.asarray(weights)[best])}

    def change(mixture: Mixture, outputs: Array, x: Array) -> Array:
        return mix(mixture.weight, model.apply(mixture.own, x), outputs)

    def unmixed(key: Key[Array, ""]) -> Mixture:
        # With the weight 0, the outputs are those of the method.
        return Mixture(_own_params(model, key), jnp.zeros(()))

    # The model cannot be split at its head, because the own model reads inputs, not features.
    mixture = extended(model, _MIXTURE, unmixed, change)._replace(extract=None, classify=None)
    name = f"mixed({algorithm.name})"
    return algorithm._replace(name=name, model=mixture, personalize=personalize)


def _own_params(model: Model, key: Key[Array, ""]) -> Params:
    """Draw parameters for a client's own model."""
    params = model.init(key)
    # An entry of a wrapper, such as a map of logits, is no part of the client's own model.
    return {name: params[name] for name in model.layers}


def _losses(
    model: Model,
    mix: Mix,
    weights: Float[np.ndarray, "W"],
    pair: tuple[Params, Params],
    data: ClientData,
) -> Float[Array, "W"]:
    """Return the sum of the losses of a client's examples for each weight of its own model.

    `pair` holds the client's own model and the method's model.
    """
    own, shared = pair

    def of_batch(x: Array, labels: Array, real: Bool[Array, "B"]) -> Float[Array, "W"]:
        outputs = model.apply(own, x)
        method_outputs = model.apply(shared, x)

        def loss(weight: Float[Array, ""]) -> Float[Array, ""]:
            losses = model.task.loss(mix(weight, outputs, method_outputs), labels)
            # A product with 0 would keep a NaN of padding.
            return jnp.sum(jnp.where(real, losses, 0))

        return jax.vmap(loss)(jnp.asarray(weights))

    return summed(model, data, of_batch)


def _folds(key: Key[Array, ""], data: ClientData, folds: int, *, by_class: bool) -> Int[Array, "N"]:
    """Return each position's fold, below `folds`. Padding and a class's only example have -1."""
    positions = jnp.arange(data.padded)
    real = positions < data.size
    drawn = jax.random.uniform(key, positions.shape)
    if not by_class:
        # Draws are below 1, so padding ranks last.
        rank = jnp.argsort(jnp.argsort(jnp.where(real, drawn, 2.0)))
        return jnp.where(real, rank % folds, -1)
    _, labels = data.take(positions)
    # The last key counts most: real positions come first, by class, and at random within one.
    order = jnp.lexsort((drawn, labels, ~real))
    ordered = jnp.where(real, labels[order].astype(jnp.int32), -1)
    # Neighbours have different folds, so each class is spread over the folds.
    fold = jnp.where(real & ~_is_alone(ordered), positions % folds, -1)
    return fold[jnp.argsort(order)]


def _is_alone(ordered: Int[Array, "N"]) -> Bool[Array, "N"]:
    """Return whether each of the ordered labels differs from its neighbours."""
    changes = ordered[1:] != ordered[:-1]
    edge = jnp.ones(1, bool)
    first = jnp.concatenate([edge, changes])
    last = jnp.concatenate([changes, edge])
    # An example that is both the first and the last of its class is the only one.
    return first & last


def _divided(data: ClientData, out: Bool[Array, "N"]) -> tuple[ClientData, ClientData]:
    """Return the client's data without some examples, and the data of these examples only.

    Args:
        data: The client.
        out: Whether the first data leave out the example of each position [N]. Examples keep their
            order.
    """
    real = jnp.arange(data.padded) < data.size
    # Remaining examples come first, then those that are left out, then padding.
    order = jnp.argsort(jnp.where(real, out, 2), stable=True)
    ordered = data.in_order(order)
    training_size = data.size - jnp.sum(out)
    training = dataclasses.replace(ordered, size=training_size)
    left_out = ordered.part(training_size, data.padded)
    return training, left_out


def _of_probabilities(weight: Float[Array, ""], own: Array, method: Array) -> Array:
    r"""Return :math:`\log(\lambda p + (1 - \lambda) q)` of two models' probabilities."""
    # Weights of 0 and 1 would give infinite logarithms. `_mixture` replaces their outputs.
    inside = jnp.clip(weight, 0.01, 0.99)
    first = jax.nn.log_softmax(own) + jnp.log(inside)
    second = jax.nn.log_softmax(method) + jnp.log1p(-inside)
    return jnp.logaddexp(first, second)


def _of_outputs(weight: Float[Array, ""], own: Array, method: Array) -> Array:
    r"""Return :math:`\lambda a + (1 - \lambda) b` of two models' outputs."""
    return weight * own + (1 - weight) * method


def _mixture(mix: Mix, weight: Float[Array, ""], own: Array, method: Array) -> Array:
    """Return mixed outputs, which are exactly one model's outputs if the other has no weight.

    The outputs of a model without weight may be NaN.
    """
    between = mix(weight, own.astype(jnp.float32), method.astype(jnp.float32))
    outputs = jnp.where(weight == 0, method, between.astype(method.dtype))
    return jnp.where(weight == 1, own, outputs)


_MIXTURES: dict[str, Mix] = {
    "classification": _of_probabilities,
    "next_token": _of_probabilities,
    "regression": _of_outputs,
}
"""Functions that mix outputs, by the name of the task."""
