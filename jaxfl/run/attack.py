"""Attacks on single clients after a run: whose examples did they train on?"""

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Float, Int, Key

from jaxfl._validate import checked
from jaxfl.data.clients import shard
from jaxfl.engine.mesh import by_capacity, capacities_of, data_of
from jaxfl.privacy.mechanisms.gaussian import Participant
from jaxfl.privacy.noise import CLIENT, PRIVATE_STEPS, derive
from jaxfl.run.check import check_clients, check_one_key
from jaxfl.run.flags import under_own_flags
from jaxfl.run.recorder import Result
from jaxfl.types import Algorithm, Clients, Message, Params, StepNoise

_BATCH = 64
"""Examples per forward pass."""

Found: TypeAlias = dict[str, Float[Array, "_"]]
"""Losses of the rows of all clients, one client after the other, by split."""


class Membership(NamedTuple):
    """How well a threshold on the loss tells a client's training examples from its test examples.

    Args:
        auc: area under the ROC curve, pooled over clients; 0.5 is guessing.
        tpr: share of training examples identified at a false-positive rate of 1% on the test examples.
        auc_by_client: NaN where a client lacks either.
    """

    auc: float
    tpr: float
    auc_by_client: Float[np.ndarray, "C"]


@under_own_flags
@checked(key=check_one_key, clients=check_clients)
def membership(
    key: Key[Array, ""] | int,
    algorithm: Algorithm,
    result: Result,
    clients: Clients,
    *,
    of: Literal["personal", "upload"] = "upload",
) -> Membership:
    r"""Attack every client by the loss of its model on its own training and test examples.

    The model is what the client is evaluated with ("personal"), or what the server can make of one more upload
    ("upload"): the broadcast parameters plus the client's update, bounded and with the client's own noise on all
    coordinates, as the last round's table has it. Both splits should come from one distribution; the gap between them
    is then what the model reveals.

    Args:
        key: of the local training.
        algorithm: as it was run.
        result: of the run.
        clients: as in the run.
        of: what is attacked. "upload" is for methods that send updates of the parameters that they broadcast.

    Raises:
        ValueError: "upload" with a method that sends something else.

    References: Yeom et al., Privacy Risk in Machine Learning, CSF 2018; Carlini et al., Membership Inference Attacks
        From First Principles, S&P 2022 (the rate at 1%).
    """
    if of == "upload" and algorithm.sends == "weights":
        raise ValueError(
            f"{of=} with {algorithm.name!r}: it sends weights, no update of them; give 'personal'"
        )
    server, states, memory, mechanism = (
        result.server,
        result.states,
        result.memory,
        algorithm.mechanism,
    )
    model = algorithm.model
    sizes = {"train": np.asarray(clients.train_size), "test": np.asarray(clients.test_size)}
    capacities = capacities_of(sizes["train"])
    clients, states = jax.tree.map(jnp.asarray, (shard(clients, 1), states))
    broadcast = getattr(server, "params", None)
    last = max(
        len(result.ledger.participants) - 1, 0
    )  # the round whose `decay` the client's models have

    def uploaded(index: Int[Array, ""], key: Key[Array, ""]) -> Params:
        def own(table: Float[Array, "#C"]) -> Float[Array, ""]:
            return table[index if len(table) > 1 else 0]

        noise = None
        if algorithm.dp_sgd is not None:
            multiplier = own(jnp.asarray(algorithm.dp_sgd.noise_table, jnp.float32))
            noise = StepNoise(multiplier, derive(key, PRIVATE_STEPS, index))
        state = jax.tree.map(lambda leaf: leaf[index], states)

        def sent(capacity: int) -> Message:
            data = data_of(clients, index, index, capacity, noise, last)
            return algorithm.client_update(derive(key, CLIENT, index), server, state, data)[0]

        message = by_capacity(capacities, clients.train_size[index], sent)
        if jax.tree.structure(message.update) != jax.tree.structure(broadcast):
            raise ValueError(
                f"of={of!r} with {algorithm.name!r}: it sends no update of all parameters; give 'personal'"
            )
        bounded = mechanism.bound(memory, message.update)[0]
        noise_std = jnp.asarray(mechanism.client_noise_table, jnp.float32)[-1]
        sender = Participant(index, own(noise_std))
        return optax.tree.add(broadcast, mechanism.add_client_noise(key, memory, sender, bounded))

    def personal(index: Int[Array, ""], key: Key[Array, ""]) -> Params:
        state = jax.tree.map(lambda leaf: leaf[index], states)

        def params_of(capacity: int) -> Params:
            data = data_of(clients, index, index, capacity, index=last)
            return algorithm.personalize(key, server, state, data)

        return by_capacity(capacities, clients.train_size[index], params_of)

    def add(index: Int[Array, ""], found: Found) -> Found:
        params = (uploaded if of == "upload" else personal)(index, jax.random.fold_in(key, index))

        def losses(split: str) -> Float[Array, "R"]:
            lists, size = getattr(clients, split), getattr(clients, f"{split}_size")[index]
            start = lists.start[index]

            def block(i: Int[Array, ""], found: Float[Array, "R"]) -> Float[Array, "R"]:
                positions = i * _BATCH + jnp.arange(_BATCH)
                rows = lists.flat[jnp.where(positions < size, start + positions, 0)]
                outputs = model.apply(params, model.prepare(clients.inputs[rows]))
                losses = model.task.loss(outputs, clients.labels[rows])
                # The next client overwrites the padding's losses behind the client's own.
                return lax.dynamic_update_slice(found, losses, (start + i * _BATCH,))

            return lax.fori_loop(0, -(-size // _BATCH), block, found[split])

        return {split: losses(split) for split in found}

    def all_losses() -> Found:
        found = {
            split: jnp.zeros(size.sum() + _BATCH, jnp.float32) for split, size in sizes.items()
        }
        return lax.fori_loop(0, clients.number, add, found)

    found = jax.device_get(jax.jit(all_losses)())
    inside, outside = (found[split][: size.sum()] for split, size in sizes.items())
    ends = [np.cumsum(size)[:-1] for size in sizes.values()]
    by_client = [
        _auc(a, b)
        for a, b in zip(np.split(inside, ends[0]), np.split(outside, ends[1]), strict=True)
    ]
    return Membership(_auc(inside, outside), _tpr(inside, outside), np.array(by_client))


def _auc(inside: Float[np.ndarray, "n"], outside: Float[np.ndarray, "m"]) -> float:
    """P(member's loss < nonmember's); ties count a half."""
    if not len(inside) or not len(outside):
        return float("nan")
    ordered = np.sort(outside)
    above = (
        len(ordered)
        - (np.searchsorted(ordered, inside, "left") + np.searchsorted(ordered, inside, "right")) / 2
    )
    return float(above.mean() / len(ordered))


def _tpr(
    inside: Float[np.ndarray, "n"], outside: Float[np.ndarray, "m"], rate: float = 0.01
) -> float:
    """Share of members below the threshold that `rate` of the others are below."""
    if not len(inside) or not len(outside):
        return float("nan")
    return float(np.mean(inside < np.sort(outside)[int(rate * len(outside))]))
