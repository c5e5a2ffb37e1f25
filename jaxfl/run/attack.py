"""Membership attacks on single clients after a run: which examples did a client train on?"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jaxtyping import Float, Int, Key

from jaxfl._support.checks import checked
from jaxfl.data.clients import shard
from jaxfl.engine.mesh import by_capacity, capacities_of, data_of
from jaxfl.privacy.clip import clip
from jaxfl.privacy.mechanisms.gaussian import Participant
from jaxfl.privacy.noise import CLIENT, PRIVATE_STEPS, derive
from jaxfl.run.check import check_clients, check_one_key
from jaxfl.run.flags import under_own_flags
from jaxfl.run.recorder import Result
from jaxfl.types import Algorithm, ClientData, Clients, Message, Params, StepNoise, Tree

_EXAMPLES_PER_PASS = 64
"""Number of examples in each forward pass."""

Losses: TypeAlias = dict[str, Float[Array, "_"]]
"""Losses of the examples of all clients, one client after the other, by split."""


class Membership(NamedTuple):
    """Success of a threshold on the loss that separates a client's training and test examples.

    Args:
        auc: Area under the ROC curve, pooled over clients. Guessing gives 0.5. It is NaN if there
            are no training examples or no test examples.
        tpr: Share of training examples that are identified at a false-positive rate of at most 1%
            on the test examples. It is NaN in the same cases.
        auc_by_client: Area under the ROC curve of each client [C]. It is NaN for a client without
            training examples or without test examples.
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

    "personal" attacks the model that the client is evaluated with. "upload" attacks the model that
    the server can make of one more upload: the broadcast parameters plus the client's update. The
    update is bounded, and has the client's own noise of the last round on all coordinates. Both
    splits should come from one distribution, so that the gap between them is what the model
    reveals.

    Args:
        key: Key, or a seed, of the attacked client's local training and noise.
        algorithm: The method that was run.
        result: Result of the run.
        clients: The clients of the run, with their training and test examples.
        of: Model that is attacked. "upload" suits methods that send updates of the parameters that
            they broadcast.

    Returns:
        Success over all clients and for each client (see `Membership`).

    Raises:
        ValueError: `of` is "upload", but the method sends weights, or no update of all parameters.
            Or several processes share a run whose clients keep states.

    References: Yeom et al., Privacy Risk in Machine Learning, CSF 2018; Carlini et al., Membership
        Inference Attacks From First Principles, S&P 2022 (the rate at 1%).
    """
    _check_attackable(algorithm, result, of)
    sizes = {"train": np.asarray(clients.train_size), "test": np.asarray(clients.test_size)}
    capacities = capacities_of(sizes["train"])
    # With one shard, lists lose their padding, so the losses of clients follow one another.
    clients, states = jax.tree.map(jnp.asarray, (shard(clients, 1), result.states))
    run = _AttackedRun(algorithm, result._replace(states=states), clients, capacities)
    params_of_client = run.personal
    if of == "upload":
        params_of_client = run.uploaded

    def add(index: Int[Array, ""], found: Losses) -> Losses:
        params = params_of_client(index, jax.random.fold_in(key, index))
        return {split: run.with_losses(found[split], split, index, params) for split in found}

    def all_losses() -> Losses:
        found = {
            # JAX would shift a last block that does not fit towards the front, over other losses.
            split: jnp.zeros(size.sum() + _EXAMPLES_PER_PASS, jnp.float32)
            for split, size in sizes.items()
        }
        return lax.fori_loop(0, clients.num_clients, add, found)

    return _success(jax.device_get(jax.jit(all_losses)()), sizes)


def _check_attackable(algorithm: Algorithm, result: Result, of: str) -> None:
    """Require a model that the attack can make, and client states of one process."""
    if of == "upload" and algorithm.sends == "weights":
        raise ValueError(
            f"of must be 'personal' for {algorithm.name!r}, which sends weights and no update, "
            f"got {of!r}. Give of='personal'."
        )
    if jax.process_count() > 1 and jax.tree.leaves(result.states):
        raise ValueError(
            f"result must be of one process for {algorithm.name!r}, whose clients keep states, got "
            f"that of {jax.process_count()} processes. Repeat the run in one process."
        )


class _AttackedRun(NamedTuple):
    """Run whose clients are attacked, with its arrays on the device."""

    algorithm: Algorithm
    result: Result
    clients: Clients
    capacities: tuple[int, ...]
    """Capacities of the clients' training examples (see `capacities_of`)."""

    def personal(self, index: Int[Array, ""], key: Key[Array, ""]) -> Params:
        """Return the model that a client is evaluated with."""

        def model(state: Tree, data: ClientData) -> Params:
            return self.algorithm.personalize(key, self.result.server, state, data)

        return self._computed(index, None, model)

    def uploaded(self, index: Int[Array, ""], key: Key[Array, ""]) -> Params:
        """Return the model that the server can make of one more upload of a client."""
        algorithm = self.algorithm
        noise = None
        if algorithm.dp_sgd is not None:
            multiplier = _own_entry(jnp.asarray(algorithm.dp_sgd.noise_table, jnp.float32), index)
            noise = StepNoise(multiplier, derive(key, PRIVATE_STEPS, index))

        def message(state: Tree, data: ClientData) -> Message:
            client_key = derive(key, CLIENT, index)
            return algorithm.client_update(client_key, self.result.server, state, data)[0]

        update = self._computed(index, noise, message).update
        broadcast = getattr(self.result.server, "params", None)
        if jax.tree.structure(update) != jax.tree.structure(broadcast):
            raise ValueError(
                f"of must be 'personal' for {algorithm.name!r}, which sends no update of all "
                "parameters, got 'upload'. Give of='personal'."
            )
        return optax.tree.add(broadcast, self._released(update, index, key))

    def _released(self, update: Tree, index: Int[Array, ""], key: Key[Array, ""]) -> Tree:
        """Return a client's update as the server gets it."""
        mechanism = self.algorithm.mechanism
        memory = self.result.memory
        # The attacker sees what a client sends: a bounded update with the client's own noise.
        bounded, _ = clip(update, mechanism.update_bound(memory))
        noise_std = jnp.asarray(mechanism.client_noise_table, jnp.float32)[-1]
        sender = Participant(index, _own_entry(noise_std, index))
        return mechanism.add_client_noise(key, memory, sender, bounded)

    def _computed(
        self,
        index: Int[Array, ""],
        noise: StepNoise | None,
        work: Callable[[Tree, ClientData], Tree],
    ) -> Tree:
        """Return what `work` computes from a client's state and training examples."""
        state = jax.tree.map(lambda leaf: leaf[index], self.result.states)
        # The clients' models follow from the `decay` of the last round.
        last = max(len(self.result.ledger.participants) - 1, 0)

        def of_capacity(capacity: int) -> Tree:
            return work(state, data_of(self.clients, index, index, capacity, noise, last))

        return by_capacity(self.capacities, self.clients.train_size[index], of_capacity)

    def with_losses(
        self, found: Float[Array, "_"], split: str, index: Int[Array, ""], params: Params
    ) -> Float[Array, "_"]:
        """Return a split's losses with those of one client's examples filled in."""
        clients = self.clients
        model = self.algorithm.model
        lists = getattr(clients, split)
        size = getattr(clients, f"{split}_size")[index]
        start = lists.start[index]

        def block(i: Int[Array, ""], found: Float[Array, "_"]) -> Float[Array, "_"]:
            # Positions behind the client's own read any row, and only fill the block.
            positions = i * _EXAMPLES_PER_PASS + jnp.arange(_EXAMPLES_PER_PASS)
            rows = lists.flat[jnp.where(positions < size, start + positions, 0)]
            outputs = model.apply(params, model.prepare(clients.inputs[rows]))
            losses = model.task.loss(outputs, clients.labels[rows])
            # The next client overwrites the padding's losses behind the client's own.
            return lax.dynamic_update_slice(found, losses, (start + i * _EXAMPLES_PER_PASS,))

        return lax.fori_loop(0, -(-size // _EXAMPLES_PER_PASS), block, found)


def _own_entry(table: Float[Array, "#C"], index: Int[Array, ""]) -> Float[Array, ""]:
    """Return a client's entry of a table with one entry, or with one for each client."""
    # A single entry holds for all clients.
    if len(table) == 1:
        return table[0]
    return table[index]


def _success(
    found: dict[str, Float[np.ndarray, "_"]], sizes: dict[str, Int[np.ndarray, "C"]]
) -> Membership:
    """Return the success of the threshold, over all clients and for each client."""
    # The losses of clients follow one another, with padding behind the last.
    losses = {split: found[split][: size.sum()] for split, size in sizes.items()}
    of_each = {
        split: np.split(losses[split], np.cumsum(size)[:-1]) for split, size in sizes.items()
    }
    by_client = [_auc(*own) for own in zip(of_each["train"], of_each["test"], strict=True)]
    inside = losses["train"]
    outside = losses["test"]
    return Membership(_auc(inside, outside), _tpr(inside, outside), np.array(by_client))


def _auc(inside: Float[np.ndarray, "n"], outside: Float[np.ndarray, "m"]) -> float:
    """Return the probability that a member has less loss than a nonmember. Ties count 1/2.

    The result is NaN if one of the two groups is empty.

    Args:
        inside: Losses of members.
        outside: Losses of nonmembers.
    """
    if not len(inside) or not len(outside):
        return float("nan")
    ordered = np.sort(outside)
    # The nonmembers between the two positions have equal loss, and count by half.
    left = np.searchsorted(ordered, inside, "left")
    right = np.searchsorted(ordered, inside, "right")
    above = len(ordered) - (left + right) / 2
    return float(above.mean() / len(ordered))


def _tpr(
    inside: Float[np.ndarray, "n"], outside: Float[np.ndarray, "m"], rate: float = 0.01
) -> float:
    """Return the share of members whose loss is below a threshold, or NaN for an empty group.

    At most a share `rate` of the nonmembers is below the threshold.

    Args:
        inside: Losses of members.
        outside: Losses of nonmembers.
        rate: False-positive rate of the threshold.
    """
    if not len(inside) or not len(outside):
        return float("nan")
    # The comparison is strict, so ties with the threshold do not raise the rate.
    return float(np.mean(inside < np.sort(outside)[int(rate * len(outside))]))
