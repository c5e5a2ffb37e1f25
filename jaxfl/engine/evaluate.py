"""The task's metrics for every client on its own test split, with the weights that `personalize` returns."""

import functools
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int, Key

from jaxfl.engine.mesh import Population, by_capacity, data_of
from jaxfl.engine.program import Points, compile_for, over_points
from jaxfl.engine.states import States
from jaxfl.local.lanes import longest
from jaxfl.local.train import blocks_of
from jaxfl.tasks import Metric, average
from jaxfl.types import Algorithm, Clients, Model, Params, Tree

_BATCH = 64
"""Largest number of examples per forward pass; the loop over them follows the client's own size."""


PerClient: TypeAlias = dict[str, Any]
"""The test loss of each client, and its task's metrics: arrays [C], or [E, C] of all evaluations, by name.

NaN for a client without test examples, and for one whose loss on one of them is NaN: outputs that are not finite
are no answer, not even one that is right by chance.
"""


def compile_evaluation(
    algorithm: Algorithm | Points, population: Population, *, chunk: int = 1
) -> functools.partial[PerClient]:
    """One program `(key, server, states, last=0) -> PerClient` over all clients, `chunk` at a time per device.

    `last` is the number of the last round, for what trains at evaluation. For `Points`, all but `last` have a leading
    axis P.
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

                slots = jnp.arange(ids.shape[0])
                if chunk == 1:
                    return lax.map(score, slots)
                # Vectorised clients go on until the largest of them ends, so that those of like size go together.
                several = max(len(population.capacities), len(population.test_capacities)) > 1
                order = jnp.lexsort((clients.test_size, clients.train_size)) if several else slots
                scores = lax.map(score, order, batch_size=min(chunk, len(slots)))
                return (
                    jax.tree.map(lambda leaf: leaf[jnp.argsort(order)], scores)
                    if several
                    else scores
                )

            by_client = P("clients")
            scores = jax.shard_map(
                local,
                mesh=population.mesh,
                in_specs=(by_client, P(), by_client, population.layout),
                out_specs=by_client,
                check_vma=False,
            )(first + jnp.arange(clients.number), server, states, clients)
            return jax.tree.map(lambda leaf: leaf[: population.number], scores)

        return over_points(scores_of, algorithm)(key, server, states)

    everywhere = NamedSharding(
        population.mesh, P()
    )  # every process reads the scores of all clients
    program = compile_for(algorithm, population, evaluate, out_shardings=everywhere)
    return functools.partial(program, population.clients, 0)


def _client(
    algorithm: Algorithm,
    key: Key[Array, ""],
    slot: Int[Array, ""],
    number: Int[Array, ""],
    server: Tree,
    states: States,
    population: Population,
    last: Any,
) -> PerClient:
    clients, trained = population.clients, population.size

    def personal(capacity: int) -> Params:
        data = data_of(clients, slot, number, capacity, index=last, size=trained)
        return algorithm.personalize(jax.random.fold_in(key, number), server, states[slot], data)

    params = by_capacity(population.capacities, clients.train_size[slot], personal)
    tested = functools.partial(_tested, algorithm.model, params, clients, slot)
    return by_capacity(population.test_capacities, clients.test_size[slot], tested)


def _tested(
    model: Model, params: Params, clients: Clients, slot: Int[Array, ""], capacity: int
) -> PerClient:
    """Return the scores of some parameters on a client's test examples, at most `capacity` of them."""
    metrics, size = (
        {"loss": average(model.task.loss), **model.task.metrics},
        clients.test_size[slot],
    )
    batch = -(-capacity // -(-capacity // _BATCH))  # batches of one size, with little padding
    per_block = blocks_of(capacity, batch)[1]
    shape = (per_block, batch)

    def examples_of(number: Int[Array, ""] | int) -> tuple[Array, Array, Bool[Array, "b B"]]:
        positions = (number * per_block * batch + jnp.arange(per_block * batch)).reshape(shape)
        real = positions < size
        rows = jnp.where(
            real, clients.test.flat[jnp.where(real, clients.test.start[slot] + positions, 0)], 0
        )
        return clients.inputs[rows], clients.labels[rows], real

    def block(number: Int[Array, ""], sums: Tree) -> Tree:
        # Laid out ahead, as in training: in the inner loop XLA would fuse the layout change with the network.
        inputs, labels, real = examples_of(number)
        x = jax.vmap(model.prepare)(inputs)

        def test(i: Int[Array, ""], sums: Tree) -> Tree:
            own = sums_of(params, x[i], labels[i], real[i])
            return {name: metric.merge(sums[name], own[name]) for name, metric in metrics.items()}

        return lax.fori_loop(
            0, longest(jnp.minimum(per_block, batches - number * per_block)), test, sums
        )

    def sums_of(
        params: Params, x: Array, labels: Array, tested: Bool[Array, "B"]
    ) -> dict[str, Tree]:
        outputs, weights = model.apply(params, x), tested.astype(jnp.float32)
        return {name: metric.sums(outputs, labels, weights) for name, metric in metrics.items()}

    def first() -> dict[str, Tree]:
        inputs, labels, real = examples_of(0)
        return sums_of(params, model.prepare(inputs[0]), labels[0], real[0])

    shapes = jax.eval_shape(first)
    none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    batches = -(-size // batch)
    sums = lax.fori_loop(0, longest(-(-batches // per_block)), block, none)
    scores = {
        name: metric.value(sums[name]).astype(jnp.float32) for name, metric in metrics.items()
    }
    return jax.tree.map(
        lambda score: jnp.where((size > 0) & ~jnp.isnan(scores["loss"]), score, jnp.nan), scores
    )


def summarize(
    scores: PerClient, sizes: Int[np.ndarray, "C"], metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Unweighted mean, standard deviation and worst 10% over clients of each metric, and the mean loss.

    Over clients with test examples; NaN if there are none. A model whose loss is not finite counts as 0 where a metric
    should be high, and makes the mean NaN where it should be low. A client for which a metric is not defined is left
    out. The worst 10% is the mean of the worst tenth of the clients (at least one); `_examples` is the headline's
    mean over clients weighted by their test examples.
    """
    row: dict[str, float] = {}
    for name, metric in metrics.items():
        known = (np.asarray(sizes) > 0) & (np.isnan(scores["loss"]) | ~np.isnan(scores[name]))
        values, examples = (
            np.asarray(scores[name], np.float64)[known],
            np.asarray(sizes, np.float64)[known],
        )
        values = values if metric.lower_is_better else np.nan_to_num(values)
        ordered = np.sort(values)[:: -1 if metric.lower_is_better else 1]
        row[name] = _mean(values)
        row[f"{name}_std"] = float(values.std()) if values.size else math.nan
        row[f"{name}_worst10"] = _mean(ordered[: max(1, round(0.1 * values.size))])
        if name == next(iter(metrics)):
            row[f"{name}_examples"] = (
                float(np.average(values, weights=examples)) if values.size else math.nan
            )
    return row | {"loss": _mean(np.asarray(scores["loss"], np.float64)[np.asarray(sizes) > 0])}


def _mean(values: Float[np.ndarray, "n"]) -> float:
    return float(values.mean()) if values.size else math.nan
