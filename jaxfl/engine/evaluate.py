"""Scores of every client on its own test examples, by the parameters of `personalize`."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int, Key

from jaxfl.engine.mesh import Population, by_capacity, data_of, on_devices
from jaxfl.engine.program import Points, compile_for, over_points
from jaxfl.engine.states import States
from jaxfl.local.lanes import longest, zeros_of
from jaxfl.local.train import blocks_of
from jaxfl.tasks import Metric, average
from jaxfl.types import Algorithm, Clients, Model, Params, Tree

_EVALUATION_BATCH = 64
"""Largest number of test examples of a client in one forward pass."""


PerClient: TypeAlias = dict[str, Any]
"""Test loss and metrics of each client by name: arrays [C], or [E, C] for E evaluations.

For the P points of a sweep, the arrays are [P, C]. All scores of a client are NaN if the client has
no test examples, or if its loss is NaN: outputs that are not finite are no answer, even if they are
right by chance.
"""


def compile_evaluation(
    algorithm: Algorithm | Points, population: Population, *, chunk: int = 1
) -> functools.partial[PerClient]:
    """Return a program `(key, server, states, last=0) -> PerClient` that scores all clients.

    For `Points`, all arguments but `last` have a leading axis P.

    Args:
        algorithm: One algorithm, or the points of a sweep.
        population: The clients on their devices.
        chunk: Number of clients vectorised at a time on each device.

    Returns:
        The program. Its argument `last` is the index of the last round, for methods that train at
        evaluation.
    """

    def evaluate(
        clients: Clients,
        first: Any,
        key: Key[Array, "*P"],
        server: Tree,
        states: States,
        last: Any = 0,
    ) -> PerClient:
        def scores_of(
            algorithm: Algorithm, key: Key[Array, ""], server: Tree, states: States
        ) -> PerClient:
            def local(
                ids: Int[Array, "C"], server: Tree, states: States, clients: Clients
            ) -> PerClient:
                here = population._replace(clients=clients)

                def score(slot: Int[Array, ""]) -> PerClient:
                    return _client(algorithm, key, slot, ids[slot], server, states, here, last)

                return _in_chunks(score, here, chunk)

            by_client = P("clients")
            scores_on_devices = on_devices(
                local, population, by_client, P(), by_client, population.layout
            )
            # The clients may be a block of all clients, which begins with client `first`.
            ids = first + jnp.arange(clients.num_clients)
            scores = scores_on_devices(ids, server, states, clients)
            # Padding clients come last.
            return jax.tree.map(lambda leaf: leaf[: population.num_clients], scores)

        return over_points(scores_of, algorithm)(key, server, states)

    # Every process reads the scores of all clients.
    everywhere = NamedSharding(population.mesh, P())
    program = compile_for(algorithm, population, evaluate, out_shardings=everywhere)
    return functools.partial(program, population.clients, 0)


def _in_chunks(
    score: Callable[[Array], PerClient], population: Population, chunk: int
) -> PerClient:
    """Return the scores of all of a device's clients, with `chunk` vectorised at a time."""
    slots = jnp.arange(population.num_slots)
    # A batch axis of length 1 would make matrix products slow.
    if chunk == 1:
        return lax.map(score, slots)
    batch_size = min(chunk, len(slots))
    if max(len(population.capacities), len(population.test_capacities)) <= 1:
        return lax.map(score, slots, batch_size=batch_size)
    # A chunk runs until its largest client is done, so clients are sorted by size.
    order = jnp.lexsort((population.clients.test_size, population.clients.train_size))
    scores = lax.map(score, order, batch_size=batch_size)
    # The inverse permutation restores the order of the clients.
    return jax.tree.map(lambda leaf: leaf[jnp.argsort(order)], scores)


def _client(
    algorithm: Algorithm,
    key: Key[Array, ""],
    slot: Int[Array, ""],
    client_id: Int[Array, ""],
    server: Tree,
    states: States,
    population: Population,
    last: Any,
) -> PerClient:
    """Return the scores of one client, by the parameters that `personalize` gives it."""
    clients = population.clients

    def personal(capacity: int) -> Params:
        data = data_of(clients, slot, client_id, capacity, index=last, size=population.size)
        # The key follows from the client's index, so draws depend neither on chunk nor on devices.
        return algorithm.personalize(jax.random.fold_in(key, client_id), server, states[slot], data)

    params = by_capacity(population.capacities, clients.train_size[slot], personal)
    scores = functools.partial(_scores, algorithm.model, params, clients, slot)
    return by_capacity(population.test_capacities, clients.test_size[slot], scores)


def _scores(
    model: Model, params: Params, clients: Clients, slot: Int[Array, ""], capacity: int
) -> PerClient:
    """Return the loss and metrics of some parameters on a client's test examples, by name.

    Args:
        model: The model, whose task has the loss and the metrics.
        params: Parameters of the model.
        clients: The clients on the device.
        slot: Position of the client among them.
        capacity: Number of test positions, at least the client's number of test examples.
    """
    metrics = {"loss": average(model.task.loss), **model.task.metrics}
    size = clients.test_size[slot]
    # Batches have one size, and as little padding as possible.
    most_batches = -(-capacity // _EVALUATION_BATCH)
    batch = -(-capacity // most_batches)
    per_block = blocks_of(capacity, batch)[1]
    sums_of = functools.partial(_sums_of, model, metrics, params)

    def examples_of(block_index: Int[Array, ""] | int) -> tuple[Array, Array, Bool[Array, "b B"]]:
        positions = block_index * per_block * batch + jnp.arange(per_block * batch)
        return _test_examples(clients, slot, size, positions.reshape(per_block, batch))

    def block(block_index: Int[Array, ""], sums: Tree) -> Tree:
        # The inputs of a block are prepared before its loop, as in training. Inside the loop XLA
        # would fuse the change of layout with the network.
        inputs, labels, real = examples_of(block_index)
        x = jax.vmap(model.prepare)(inputs)

        def test(i: Int[Array, ""], sums: Tree) -> Tree:
            own = sums_of(x[i], labels[i], real[i])
            return {name: metric.merge(sums[name], own[name]) for name, metric in metrics.items()}

        left = jnp.minimum(per_block, batches - block_index * per_block)
        return lax.fori_loop(0, longest(left), test, sums)

    def first() -> dict[str, Tree]:
        inputs, labels, real = examples_of(0)
        return sums_of(model.prepare(inputs[0]), labels[0], real[0])

    # The loop needs the shapes of its sums first. A client without examples keeps the zeros.
    none = zeros_of(jax.eval_shape(first))
    batches = -(-size // batch)
    sums = lax.fori_loop(0, longest(-(-batches // per_block)), block, none)
    return _values_of(metrics, sums, size)


def _test_examples(
    clients: Clients, slot: Int[Array, ""], size: Int[Array, ""], positions: Int[Array, "b B"]
) -> tuple[Array, Array, Bool[Array, "b B"]]:
    """Return inputs and labels of a client's test positions, and which positions are no padding."""
    real = positions < size
    places = jnp.where(real, clients.test.start[slot] + positions, 0)
    # Padding reads row 0. Places behind the client's own hold other clients' rows, or none.
    rows = jnp.where(real, clients.test.flat[places], 0)
    return clients.inputs[rows], clients.labels[rows], real


def _sums_of(
    model: Model,
    metrics: Mapping[str, Metric],
    params: Params,
    x: Array,
    labels: Array,
    tested: Bool[Array, "B"],
) -> dict[str, Tree]:
    """Return the sums of each metric over the tested examples of a prepared batch."""
    outputs = model.apply(params, x)
    weights = tested.astype(jnp.float32)
    return {name: metric.sums(outputs, labels, weights) for name, metric in metrics.items()}


def _values_of(
    metrics: Mapping[str, Metric], sums: Mapping[str, Tree], size: Int[Array, ""]
) -> PerClient:
    """Return the scores from sums over `size` examples, or NaN if the loss is not known."""
    scores = {
        name: metric.value(sums[name]).astype(jnp.float32) for name, metric in metrics.items()
    }

    def known(score: Array) -> Array:
        return jnp.where((size > 0) & ~jnp.isnan(scores["loss"]), score, jnp.nan)

    return jax.tree.map(known, scores)


def summarize(
    scores: PerClient, sizes: Int[np.ndarray, "C"], metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Return statistics over clients of each metric, and the unweighted mean loss, by name.

    The statistics of a metric are its unweighted mean, its standard deviation (`_std`), and the
    mean of the worst tenth of the clients (`_worst10`). The worst tenth has at least one client.
    The first metric also has its mean weighted by the clients' test examples (`_examples`).

    The statistics are over clients with test examples, and NaN if there are none. A client for
    which a metric is not defined is left out. If a client's loss is NaN, its metric counts as 0 if
    higher values are better. If lower values are better, all statistics of the metric are NaN.
    """
    tested = np.asarray(sizes) > 0
    row: dict[str, float] = {}
    for name, metric in metrics.items():
        # A NaN score is a failure if the loss is NaN too, and otherwise not defined.
        defined = np.isnan(scores["loss"]) | ~np.isnan(scores[name])
        counted = tested & defined
        values = np.asarray(scores[name], np.float64)[counted]
        if not metric.lower_is_better:
            values = np.nan_to_num(values)
        row |= _statistics(name, values, metric.lower_is_better)
        if name == next(iter(metrics)):
            # All counted clients have test examples, so the weights do not sum to 0.
            examples = np.asarray(sizes, np.float64)[counted]
            row[f"{name}_examples"] = _mean_or_nan(values, examples)
    row["loss"] = _mean_or_nan(np.asarray(scores["loss"], np.float64)[tested])
    return row


def _statistics(
    name: str, values: Float[np.ndarray, "n"], lower_is_better: bool
) -> dict[str, float]:
    """Return the mean, the standard deviation and the mean of the worst tenth of some scores."""
    worst_first = np.sort(values)
    if lower_is_better:
        worst_first = worst_first[::-1]
    worst = worst_first[: max(1, round(0.1 * values.size))]
    deviation = math.nan
    # NumPy warns about statistics of an empty array.
    if values.size:
        deviation = float(values.std())
    return {
        name: _mean_or_nan(values),
        f"{name}_std": deviation,
        f"{name}_worst10": _mean_or_nan(worst),
    }


def _mean_or_nan(
    values: Float[np.ndarray, "n"], weights: Float[np.ndarray, "n"] | None = None
) -> float:
    """Return the mean, or NaN if there are no values."""
    if not values.size:
        return math.nan
    return float(np.average(values, weights=weights))
