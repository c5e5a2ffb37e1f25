"""Scores of clients and of central test sets, by what a run left or by a trained model."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jaxtyping import Key

from jaxfl._support.backend import of_devices
from jaxfl._support.checks import check_count, checked, key_of
from jaxfl.data.clients import check_data
from jaxfl.data.load import Dataset
from jaxfl.engine.chunk import halved
from jaxfl.engine.evaluate import PerClient, compile_evaluation, summarize
from jaxfl.engine.mesh import Population, everywhere, mesh_of, place
from jaxfl.engine.program import Points, compile_states, freeze
from jaxfl.models.trained import TrainedModel
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.run.central import central_client
from jaxfl.run.check import (
    check_clients,
    check_devices,
    check_evaluation,
    check_examples,
    check_one_key,
    check_state,
)
from jaxfl.run.flags import scores_may_be_undefined, under_own_flags
from jaxfl.run.recorder import Result
from jaxfl.run.trained import on_one_device, shared_params
from jaxfl.types import Algorithm, Clients, Message, Tree

_CLIENTS_AT_ONCE = 32
"""Chunk in place of "auto", because measuring takes longer than a single evaluation."""


def _check_tested(name: str, value: Any) -> Clients | Dataset:
    """Require clients, or a central test set, and return `Clients` or a `Dataset`."""
    # Clients are a tuple too, by their class.
    if isinstance(value, Dataset | tuple) and not isinstance(value, Clients):
        return check_data(name, value)
    return check_clients(name, value)


class _Evaluation(NamedTuple):
    """Arguments from which an evaluation computes its scores."""

    method: Algorithm
    server: Tree
    states: Tree
    """States of the clients. None makes first states."""
    key: Key[Array, ""]
    """Key of the run."""
    rounds: int
    """Number of rounds of the run."""
    frozen: Tree = None
    """Frozen weights. None stands for those of the method's model."""


@under_own_flags
@checked(
    key=check_one_key,
    clients=_check_tested,
    rounds=functools.partial(check_count, most=2**31 - 1),
    devices=check_devices,
)
def evaluate(
    algorithm: Algorithm | None,
    server: Any,
    clients: Clients | Dataset | tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    *,
    key: Key[Array, ""] | int | None = None,
    states: Any = None,
    rounds: int | None = None,
    chunk: int | None = None,
    devices: list[jax.Device] | None = None,
) -> tuple[dict[str, float], PerClient]:
    r"""Score clients, also newcomers, or a central test set, by what a run left, or by one model.

    .. math:: s_i = \mathrm{metric}(\mathrm{personalize}(\theta, c_i, D_i); T_i)

    :math:`s_i` is the score of client i, :math:`\theta` is the server's state, :math:`c_i` is the
    client's own state, and :math:`T_i` are its test examples. :math:`D_i` are its training
    examples, for methods that train before evaluation. Newcomers have the first states, which
    `init` makes. In this way a method serves clients who join after training. Methods whose clients
    keep a model between rounds, such as `ditto`, serve newcomers badly: their first model is
    untrained.

    The run's own clients have the scores of its last evaluation, up to rounding. A central test set
    is scored by the global model, and a trained model scores everything by its own weights.

    Args:
        algorithm: The method that was run. None is enough with a trained model.
        server: A run's `Result`, a `TrainedModel`, or the state of a server.
        clients: Any C clients whose examples have the shape of the run's examples. Or a dataset, or
            its four arrays, whose test examples are a central test set.
        key: Key, or a seed, from which first states and training before evaluation follow. None
            takes the run's key, and is an error for the state of a server.
        states: States of these clients [C, ...]. None takes those of the result if the clients are
            the run's own, and otherwise makes first states.
        rounds: Number of rounds of the run, for learning rates that follow the rounds. None takes
            the result's number, or 1.
        chunk: Number of clients vectorised at a time on each device. None stands for 1 on a CPU,
            512 on a GPU and 32 on a TPU.
        devices: Devices that compute the scores. None stands for all devices.

    Returns:
        A row of metrics over clients, and each client's scores [C] by name, in the metrics' units.
        A client without test examples has NaN. A central test set is one client.

    Raises:
        ValueError: A state does not have the shapes that the method makes for these clients, or
            the model does not fit them. Or the key or the algorithm is None where it is needed. Or
            a central test set needs a global model, and the method has none.
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
    >>> row, scores = evaluate(method, result, unseen)
    >>> len(scores["accuracy"]), bool(abs(row["accuracy"] - scores["accuracy"].mean()) < 1e-6)
    (2, True)
    >>> central, _ = evaluate(method, result, digits)
    >>> right = result.model().predict(digits.test_inputs) == digits.test_labels
    >>> bool(abs(central["accuracy"] - right.mean()) < 1e-6)
    True
    """
    # `checked` has replaced a seed by its key, and four arrays by a dataset.
    assert isinstance(key, Array | None)
    assert isinstance(clients, Clients | Dataset)
    tested = clients if isinstance(clients, Clients) else central_client("clients", clients)
    if isinstance(server, TrainedModel):
        evaluation = _of_model(server, tested)
    else:
        evaluation = _of_run(algorithm, server, tested, key, states, rounds)
        # No client of the run owns a central test set, so the global model scores it.
        if tested is clients:
            _check_states(evaluation, tested)
        else:
            evaluation = _of_global_model(evaluation, tested)
    scores = scores_of(
        evaluation.key,
        evaluation.method,
        evaluation.server,
        tested,
        rounds=evaluation.rounds,
        states=evaluation.states,
        chunk=chunk,
        devices=devices,
        frozen=evaluation.frozen,
    )
    sizes = np.asarray(tested.test_size)
    row = summarize(scores, sizes, evaluation.method.model.task.metrics)
    return row, scores


def _of_model(trained: TrainedModel, tested: Clients) -> _Evaluation:
    """Return the evaluation of all clients by one model, whose weights are the server's state."""
    # No round calls this method. Its server's state is the model, and so are all personal models.
    method = Algorithm(
        name="trained",
        model=trained.model,
        init=lambda key, number: (trained.params, ()),
        client_update=lambda key, server, client, data: (Message(server), client, {}),
        server_update=lambda server, aggregate: server,
        personalize=lambda key, server, client, data: server,
        mechanism=Mechanism(),
    )
    check_examples("clients", method, tested)
    return _Evaluation(method, trained.params, (), key_of(0), 1, trained.frozen)


def _of_run(
    algorithm: Algorithm | None,
    server: Any,
    tested: Clients,
    key: Key[Array, ""] | None,
    states: Any,
    rounds: int | None,
) -> _Evaluation:
    """Return the evaluation by what a run left. Missing arguments are those of its result."""
    if algorithm is None:
        raise ValueError(
            "algorithm must be the method that was run, got None, which is for a `TrainedModel`. "
            "Give the method."
        )
    if isinstance(server, Result):
        origin = server.origin
        if key is None and origin is not None:
            key = origin.key
        if states is None and origin is not None and _are_same_clients(tested, origin.clients):
            states = _without_padding(server.states, tested.num_clients)
        rounds = rounds or len(server.ledger.participants)
        server = server.server
    if key is None:
        raise ValueError(
            "key must be the key or the seed of the run, got None. Give it, or give the run's "
            "result as `server`."
        )
    # Without a number of rounds, learning rates are those of the first round.
    return _Evaluation(algorithm, server, states, key, rounds or 1)


def _without_padding(states: Tree, number: int) -> Tree:
    """Return client states [C, ...] without the rows of padding that several processes keep."""
    if jax.process_count() == 1:
        return states
    # Each process holds other clients, so the processes gather all of them.
    gathered = multihost_utils.process_allgather(states, tiled=True)
    return jax.tree.map(lambda leaf: leaf[:number], gathered)


def _are_same_clients(clients: Clients, others: Clients) -> bool:
    """Return whether two populations have the same rows of the same store."""
    # A store may be large, so it is compared by identity, and the rows by their numbers.
    if clients.inputs is not others.inputs or clients.labels is not others.labels:
        return False
    rows = [(own.train, own.test, own.train_size, own.test_size) for own in (clients, others)]
    leaves = zip(*map(jax.tree.leaves, rows), strict=True)
    return all(np.array_equal(one, two) for one, two in leaves)


def _check_states(evaluation: _Evaluation, tested: Clients) -> None:
    """Require states of server and clients that have the shapes of the method's `init`."""
    first_server, first_states = check_evaluation(evaluation.method, tested)
    check_state("server", evaluation.server, first_server)
    if evaluation.states is not None:
        check_state("states", evaluation.states, first_states)


def _of_global_model(evaluation: _Evaluation, tested: Clients) -> _Evaluation:
    """Return the evaluation of a central test set by the global model alone."""
    needed = "clients must be clients for"
    method = evaluation.method
    first_server = check_examples("clients", method, tested)
    check_state("server", evaluation.server, first_server)
    params = shared_params(method, evaluation.server, needed)
    return evaluation._replace(
        method=method._replace(
            init=lambda key, number: (params, ()),
            personalize=lambda key, server, client, data: server,
        ),
        server=params,
        states=(),
    )


def _reaches_all_processes(clients: Clients, devices: list[jax.Device] | None) -> bool:
    """Return whether there are enough clients for a device of each process in `devices`."""

    def processes(used: Iterable[jax.Device]) -> set[int]:
        return {device.process_index for device in used}

    used = mesh_of(clients, devices).devices.flat
    return processes(used) == processes(devices or jax.devices())


def _placed(
    method: Algorithm | Points,
    clients: Clients,
    devices: list[jax.Device] | None,
    frozen: Tree,
) -> Population:
    """Return the clients on their devices, with the frozen weights, or by default the model's."""
    if _reaches_all_processes(clients, devices):
        population = freeze(method, place(clients, devices))
    else:
        # Each process then computes all scores.
        population = on_one_device(method, clients, devices)
    if frozen is None:
        return population
    return population._replace(frozen=everywhere(population.mesh, frozen))


def _keys_after(rounds: int, key: Key[Array, ""]) -> tuple[Key[Array, ""], Key[Array, ""]]:
    """Return a run's keys of its first states, and of its evaluation after some rounds."""
    # A run derives the key of its last evaluation in the same way.
    init_key, _, eval_key = jax.random.split(key, 3)
    return init_key, jax.random.fold_in(eval_key, rounds)


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
    frozen: Tree = None,
) -> PerClient:
    """Return the scores of all clients, on the host.

    The randomness is the one of a run's evaluation after `rounds` rounds.

    Args:
        key: Key of the run, or the key of each point [P].
        method: Algorithm of the run, or the points of a sweep.
        server: State of the server, with a leading axis P for points.
        clients: All clients of the run.
        rounds: Number of rounds of the run.
        states: States of the clients, with a leading axis P for points. None makes first states
            from the key.
        chunk: Number of clients vectorised at a time on each device, as in `evaluate`.
        devices: Devices that compute the scores. None stands for all devices.
        frozen: Frozen weights. None stands for those of the method's model.

    Returns:
        Scores [C] by name, with a leading axis P for points.
    """
    population = _placed(method, clients, devices, frozen)
    keys_of: Callable[..., Any] = functools.partial(_keys_after, rounds)
    if isinstance(method, Points):
        keys_of = jax.vmap(keys_of)
    init_key, eval_key = keys_of(key)
    own = compile_states(method, population)(init_key, states)
    # The server's state may lie on other devices than the clients do here.
    shared = everywhere(population.mesh, jax.device_get(server))

    def scores(chunk: int) -> PerClient:
        evaluation = compile_evaluation(method, population, chunk=chunk)
        return jax.device_get(evaluation(eval_key, shared, own, np.int32(rounds - 1)))

    size = chunk
    if size is None:
        size = of_devices(devices).chunk
    if size == "auto":
        size = _CLIENTS_AT_ONCE
    with scores_may_be_undefined():
        found, _ = halved(scores, size)
    return found
