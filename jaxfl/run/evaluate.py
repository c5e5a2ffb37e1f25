"""Scores of clients by the state that a run left at the server."""

import functools
from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl._validate import check_count, checked
from jaxfl.backend import of_devices
from jaxfl.engine.chunk import halved
from jaxfl.engine.evaluate import PerClient, compile_evaluation, summarize
from jaxfl.engine.mesh import everywhere, place
from jaxfl.engine.program import Points, compile_states, freeze
from jaxfl.run.check import (
    check_clients,
    check_devices,
    check_evaluation,
    check_one_key,
    check_state,
)
from jaxfl.run.flags import scores_may_be_undefined, under_own_flags
from jaxfl.types import Algorithm, Clients, Tree

_CLIENTS_AT_ONCE = 32
"""Clients vectorised at a time on accelerators. A single evaluation is not worth a measurement."""


@under_own_flags
@checked(
    key=check_one_key,
    clients=check_clients,
    rounds=functools.partial(check_count, most=2**31 - 1),
    devices=check_devices,
)
def evaluate(
    algorithm: Algorithm,
    server: Any,
    clients: Clients,
    *,
    key: Key[Array, ""] | int,
    states: Any = None,
    rounds: int = 1,
    chunk: int | None = None,
    devices: list[jax.Device] | None = None,
) -> tuple[dict[str, float], PerClient]:
    r"""Evaluate clients, also newcomers, by the state that a run left at the server.

    .. math:: s_i = \mathrm{metric}(\mathrm{personalize}(\theta, c_i, D_i); T_i)

    :math:`\theta` is the server's state, :math:`c_i` the client's own, and :math:`T_i` are the
    client's test examples. :math:`D_i` are its training examples, for methods that train before
    evaluation. Without `states` clients have the first states, which `init` makes. A method serves
    clients who join after training in this way. The key, the states and the rounds of a run give
    the scores of its last evaluation.

    Methods whose clients keep a model from rounds, such as `ditto`, serve newcomers badly: their
    first model is untrained.

    Args:
        algorithm: The method that was run.
        server: State of the server, from the run's `Result`.
        clients: Any C clients whose examples have the shape of the run's examples.
        key: Key of the run, or a seed. First states and training before evaluation follow from it.
        states: States of these clients [C, ...], as in the run's `Result`. None makes first states.
        rounds: Number of rounds of the run, for learning rates that follow the rounds.
        chunk: Number of clients vectorised at a time on each device. None stands for 1 on a CPU,
            and for 32 elsewhere.
        devices: Devices that compute the scores. None stands for all devices.

    Returns:
        A row of metrics over clients, and each client's scores [C] by name, in the metrics' units.
        A client without test examples has NaN.

    Raises:
        ValueError: A state does not have the shapes that the method makes for these clients, or
            the model does not fit them.
        TypeError: An argument has the wrong type.

    >>> from jaxfl import simulate
    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.data import iid, leave_out, load, make_clients, matching
    >>> from jaxfl.models import mlp
    >>> digits = load("digits")
    >>> lists = iid(digits.train_labels, 20, seed=0)
    >>> tests = matching(lists, digits.train_labels, digits.test_labels, seed=0)
    >>> participants, unseen = leave_out(make_clients(digits, lists, tests), 0.1, seed=0)
    >>> method = fedavg(mlp((8, 8, 1), 10, hidden=(16,)))
    >>> result = simulate(0, method, participants, rounds=1, progress=False)
    >>> row, scores = evaluate(method, result.server, unseen, key=0)
    >>> len(scores["accuracy"]), bool(abs(row["accuracy"] - scores["accuracy"].mean()) < 1e-6)
    (2, True)
    """
    assert isinstance(key, Array)
    first_server, first_states = check_evaluation(algorithm, clients)
    check_state("server", server, first_server)
    if states is not None:
        check_state("states", states, first_states)
    given = {"states": states, "rounds": rounds, "chunk": chunk, "devices": devices}
    scores = scores_of(key, algorithm, server, clients, **given)
    sizes = np.asarray(clients.test_size)
    return summarize(scores, sizes, algorithm.model.task.metrics), scores


def scores_of(
    key: Key[Array, "*P"],
    method: Algorithm | Points,
    server: Tree,
    clients: Clients,
    *,
    rounds: int,
    states: Tree = None,
    chunk: Any = None,
    devices: list[jax.Device] | None = None,
) -> PerClient:
    """Return the scores of all clients, on the host.

    The randomness is the one of a run's evaluation after `rounds` rounds.

    Args:
        key: Key of the run, or the key of each point [P].
        method: Algorithm of the run, or the points of a sweep.
        server: State of the server, with a leading axis P for points.
        clients: The C clients.
        rounds: Number of rounds of the run.
        states: States of the clients, with a leading axis P for points. None makes first states.
        chunk: Number of clients vectorised at a time on each device, as in `evaluate`.
        devices: Devices that compute the scores. None stands for all devices.

    Returns:
        Scores [C] by name, with a leading axis P for points.
    """
    population = freeze(method, place(clients, devices))

    def keys_of(key: Key[Array, ""]) -> tuple[Key[Array, ""], Key[Array, ""]]:
        init_key, _, eval_key = jax.random.split(key, 3)
        return init_key, jax.random.fold_in(eval_key, rounds)

    each = jax.vmap(keys_of) if isinstance(method, Points) else keys_of
    init_key, eval_key = each(key)
    own = compile_states(method, population)(init_key, states)
    shared = everywhere(population.mesh, jax.device_get(server))

    def scores(chunk: int) -> PerClient:
        evaluation = compile_evaluation(method, population, chunk=chunk)
        return jax.device_get(evaluation(eval_key, shared, own, np.int32(rounds - 1)))

    size = of_devices(devices).chunk if chunk is None else chunk
    if size == "auto":
        size = _CLIENTS_AT_ONCE
    with scores_may_be_undefined():
        found, _ = halved(scores, size)
    return found
