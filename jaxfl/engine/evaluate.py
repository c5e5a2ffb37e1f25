"""Accuracy of every client on its own test split, with the weights that `personalize` returns."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Key

from jaxfl.engine.mesh import Population, data_of
from jaxfl.engine.program import Points, compile_for, over_points
from jaxfl.local.train import blocks_of
from jaxfl.types import Algorithm, Clients, Tree

_BATCH = 64
"""Largest number of examples per forward pass; the loop over them follows the client's own size."""


class PerClient(NamedTuple):
    """Test accuracy and mean loss of each client.

    NaN for a client without test examples, and for one whose loss on one of them is NaN: outputs that are not finite
    are no answer, not even one that is right by chance.
    """

    accuracy: Float[Array | np.ndarray, "*E C"]
    loss: Float[Array | np.ndarray, "*E C"]


def compile_evaluation(
    algorithm: Algorithm | Points, population: Population, *, chunk: int = 1
) -> functools.partial[PerClient]:
    """One program `(key, server, states) -> PerClient` over all clients, `chunk` vectorised at a time per device.

    For `Points`, all have a leading axis P.
    """

    def evaluate(clients: Clients, first: Any, key: Key[Array, "*P"], server: Tree, states: Tree) -> PerClient:
        def scores_of(algorithm: Algorithm, key: Key[Array, ""], server: Tree, states: Tree) -> PerClient:
            def local(ids: Int[Array, "C"], server: Tree, states: Tree, clients: Clients) -> PerClient:
                def score(slot: Int[Array, ""]) -> PerClient:
                    return _client(algorithm, key, slot, ids[slot], server, states, clients)

                slots = jnp.arange(ids.shape[0])
                return lax.map(score, slots, batch_size=min(chunk, len(slots)) if chunk > 1 else None)

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

    everywhere = NamedSharding(population.mesh, P())  # every process reads the scores of all clients
    program = compile_for(algorithm, population, evaluate, out_shardings=everywhere)
    return functools.partial(program, population.clients, 0)


def _client(
    algorithm: Algorithm,
    key: Key[Array, ""],
    slot: Int[Array, ""],
    number: Int[Array, ""],
    server: Tree,
    states: Tree,
    clients: Clients,
) -> PerClient:
    model, size, data = algorithm.model, clients.test_size[slot], data_of(clients, slot, number)
    state = jax.tree.map(lambda leaf: leaf[slot], states)
    params = algorithm.personalize(jax.random.fold_in(key, number), server, state, data)
    width = max(1, clients.test.shape[1])
    batch = -(-width // -(-width // _BATCH))  # batches of one size, with little padding
    blocks, per_block = blocks_of(width, batch)
    shape = (blocks, per_block, batch)
    rows = jnp.pad(clients.test[slot], (0, math.prod(shape) - clients.test.shape[1])).reshape(shape)
    real = (jnp.arange(rows.size) < size).reshape(shape)

    def block(number: Int[Array, ""], carry: tuple) -> tuple:
        # Laid out ahead, as in training: in the inner loop XLA would fuse the layout change with the network.
        x, labels = jax.vmap(model.prepare)(clients.inputs[rows[number]]), clients.labels[rows[number]]

        def test(i: Int[Array, ""], carry: tuple) -> tuple:
            logits, tested = model.apply(params, x[i]), real[number, i]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[i])
            correct = (jnp.argmax(logits, axis=-1) == labels[i]) & tested
            return carry[0] + jnp.sum(correct, dtype=jnp.int32), carry[1] + jnp.sum(jnp.where(tested, losses, 0.0))

        return lax.fori_loop(0, jnp.minimum(per_block, batches - number * per_block), test, carry)

    batches, none = -(-size // batch), (jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))
    correct, loss = lax.fori_loop(0, -(-batches // per_block), block, none)
    known = jnp.where((size > 0) & ~jnp.isnan(loss), 1.0, jnp.nan)
    return PerClient(known * correct / jnp.maximum(size, 1), known * loss / jnp.maximum(size, 1))


def summarize(scores: PerClient, sizes: Int[np.ndarray, "C"]) -> dict[str, float]:
    """Unweighted mean, standard deviation and worst 10% over clients, and the mean over all test examples.

    Over clients with test examples; NaN if there are none. A model whose scores are not finite has accuracy 0, and
    makes the mean loss NaN. The worst 10% is the mean accuracy of the worst tenth of the clients (at least one).
    """
    tested = np.asarray(sizes) > 0
    if not tested.any():
        return dict.fromkeys(("accuracy", "accuracy_std", "accuracy_worst10", "accuracy_examples", "loss"), math.nan)
    by_client = np.nan_to_num(np.asarray(scores.accuracy, np.float64)[tested])
    accuracy, examples = np.sort(by_client), np.asarray(sizes, np.float64)[tested]
    return {
        "accuracy": float(accuracy.mean()),
        "accuracy_std": float(accuracy.std()),
        "accuracy_worst10": float(accuracy[: max(1, round(0.1 * accuracy.size))].mean()),
        "accuracy_examples": float(np.average(by_client, weights=examples)),
        "loss": float(np.asarray(scores.loss, np.float64)[tested].mean()),
    }
