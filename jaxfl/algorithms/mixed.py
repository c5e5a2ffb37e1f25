"""Predictions mixed of a client's own model and a method's, around any method."""

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

from jaxfl._validate import check_count, checked
from jaxfl.local.sums import summed
from jaxfl.local.train import LocalSGD
from jaxfl.models.extended import extended
from jaxfl.types import Algorithm, ClientData, Params, Tree

Mix: TypeAlias = Callable[[Array, Array, Array], Array]
"""From the own model's weight, its outputs, and the method's outputs, to mixed ones."""

_ENTRY = "mixture"
"""What a client's parameters have beside the layers."""

_INIT, _TRAINING, _FOLDS = range(2**31 + 13, 2**31 + 16)


class Mixture(NamedTuple):
    """A client's own model, and the weight of its predictions."""

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
    r"""Mix a method's predictions with those of a model that each client trains alone.

    .. math::
        p_i(y | x) = \lambda_i \, p(y | x; v_i) + (1 - \lambda_i) \, p(y | x; \theta_i)

    :math:`v_i` is trained from a random start on the client's examples, and :math:`\theta_i` is the
    method's model for the client. The weight is the best of 0, 0.1, ..., 1 for examples left out:

    .. math::
        \lambda_i = \arg\min_\lambda \sum_k \sum_{(x, y) \in D_{ik}}
            - \log \big( \lambda \, p(y | x; v_i^{-k})
            + (1 - \lambda) \, p(y | x; \theta_i^{-k}) \big)

    :math:`v_i^{-k}` and :math:`\theta_i^{-k}` are made in the same way without the examples
    :math:`D_{ik}` of fold k. Folds are drawn; in a classification they divide each class as evenly
    as can be, and the only example of a class is in no fold, because no model would know the class
    without it. A client without an example in a fold has the method's predictions.

    At each evaluation every client trains `folds` + 1 models, and nothing of them is kept.

    Args:
        algorithm: any method for a classification, a next token, or a regression, of which outputs
            are mixed, and weighed by the squared error.
        local: how a client trains its own model, with as many epochs as training alone takes.
        folds: number of parts of a client's examples, each of which is left out once.
        pick: whether the weight is 0 or 1: each client picks one of the two models.

    Guarantee: the method's, whose messages are sent; for each client against all others (joint
        privacy): its own model and the weight depend on its own data. Publishing them voids this.
    Deviations from the paper: the method does not train for the mixture, as Mansour et al. and
        APFL do. kNN-Per mixes with neighbours in place of a model. What a method's clients keep
        from rounds, such as a personal model, has seen the examples of all folds: weights lean
        towards it.
    References: Mansour et al., Three Approaches for Personalization with Applications to Federated
        Learning, 2020 (arXiv:2002.10619); Deng, Kamani, Mahdavi, Adaptive Personalized Federated
        Learning, 2020 (arXiv:2003.13461); Marfoq et al., Personalized Federated Learning through
        Local Memorization, ICML 2022 (arXiv:2111.09360).

    Raises:
        ValueError: the task is another one.

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
    weights = np.array([0.0, 1.0] if pick else np.arange(11) / 10, np.float32)

    def layers_from(key: Key[Array, ""]) -> Params:
        params = model.init(key)
        return {name: params[name] for name in model.layers}

    def losses_of(own: Params, shared: Params, data: ClientData) -> Float[Array, "W"]:
        """Return the sum of losses over a client's examples, by weight."""

        def of_batch(x: Array, labels: Array, real: Bool[Array, "B"]) -> Float[Array, "W"]:
            outputs = model.apply(own, x)
            method_outputs = model.apply(shared, x)

            def loss(weight: Float[Array, ""]) -> Float[Array, ""]:
                losses = model.task.loss(mix(weight, outputs, method_outputs), labels)
                return jnp.sum(jnp.where(real, losses, 0))

            return jax.vmap(loss)(jnp.asarray(weights))

        return summed(model, data, of_batch)

    def personalize(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> Params:
        start = layers_from(jax.random.fold_in(key, _INIT))
        fold = _folds(jax.random.fold_in(key, _FOLDS), data, folds, by_class=by_class)

        def fit(data: ClientData) -> tuple[Params, Params]:
            own, _ = local.train(jax.random.fold_in(key, _TRAINING), model, start, data)
            return own, algorithm.personalize(key, server, client, data)

        def leave_out(number: Int[Array, ""], carry: tuple) -> tuple:
            """Train without one fold; the last number is no fold's, and leaves nothing out."""
            *_, losses = carry
            kept, left = _divided(data, fold == number)
            own, shared = fit(kept)
            return own, shared, losses + losses_of(own, shared, left)

        shapes = jax.eval_shape(fit, data)
        unfitted = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        carry = (*unfitted, jnp.zeros(len(weights)))
        own, shared, losses = lax.fori_loop(0, folds + 1, leave_out, carry)
        best = jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses))
        return {**shared, _ENTRY: Mixture(own, jnp.asarray(weights)[best])}

    def change(mixture: Mixture, outputs: Array, x: Array) -> Array:
        return mix(mixture.weight, model.apply(mixture.own, x), outputs)

    def unmixed(key: Key[Array, ""]) -> Mixture:
        return Mixture(layers_from(key), jnp.zeros(()))

    # Of features no own model makes outputs.
    whole = extended(model, _ENTRY, unmixed, change)._replace(extract=None, classify=None)
    return algorithm._replace(name=f"mixed({algorithm.name})", model=whole, personalize=personalize)


def _folds(key: Key[Array, ""], data: ClientData, folds: int, *, by_class: bool) -> Int[Array, "N"]:
    """Return each position's fold, or -1 where it has none: padding, the only one of a class."""
    positions = jnp.arange(data.padded)
    real = positions < data.size
    drawn = jax.random.uniform(key, positions.shape)
    if not by_class:
        rank = jnp.argsort(jnp.argsort(jnp.where(real, drawn, 2.0)))
        return jnp.where(real, rank % folds, -1)
    _, labels = data.take(positions)
    order = jnp.lexsort((drawn, labels, ~real))
    ordered = jnp.where(real, labels[order].astype(jnp.int32), -1)
    other = ordered[1:] != ordered[:-1]
    edge = jnp.ones(1, bool)
    first = jnp.concatenate([edge, other])
    last = jnp.concatenate([other, edge])
    fold = jnp.where(real & ~(first & last), positions % folds, -1)
    return fold[jnp.argsort(order)]


def _divided(data: ClientData, out: Bool[Array, "N"]) -> tuple[ClientData, ClientData]:
    """Return the client without some of its examples, in their order, and with those alone."""
    real = jnp.arange(data.padded) < data.size
    order = jnp.argsort(jnp.where(real, out, 2), stable=True)
    whole = data.in_order(order)
    kept = data.size - jnp.sum(out)
    return dataclasses.replace(whole, size=kept), whole.part(kept, data.padded)


def _of_probabilities(weight: Float[Array, ""], own: Array, method: Array) -> Array:
    r"""Return :math:`\log(\lambda p + (1 - \lambda) q)` of two models' probabilities."""
    inside = jnp.clip(weight, 0.01, 0.99)  # the ends have no logarithm
    first = jax.nn.log_softmax(own) + jnp.log(inside)
    second = jax.nn.log_softmax(method) + jnp.log1p(-inside)
    return jnp.logaddexp(first, second)


def _of_outputs(weight: Float[Array, ""], own: Array, method: Array) -> Array:
    r"""Return :math:`\lambda a + (1 - \lambda) b` of two models' outputs."""
    return weight * own + (1 - weight) * method


def _mixture(mix: Mix, weight: Float[Array, ""], own: Array, method: Array) -> Array:
    """Return mixed outputs: exactly one model's where the other has no weight, and may be NaN."""
    between = mix(weight, own.astype(jnp.float32), method.astype(jnp.float32))
    outputs = jnp.where(weight == 0, method, between.astype(method.dtype))
    return jnp.where(weight == 1, own, outputs)


_MIXTURES: dict[str, Mix] = {
    "classification": _of_probabilities,
    "next_token": _of_probabilities,
    "regression": _of_outputs,
}
"""By task, how outputs are mixed."""
