"""Models of a run: the global one of its server, and those of single clients."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Key

from jaxfl._support.checks import check_count, key_of
from jaxfl.data.clients import in_lists
from jaxfl.engine.memo import described, key_of_method, remembered
from jaxfl.engine.mesh import (
    Population,
    capacities_of,
    common_size,
    data_of,
    everywhere,
    in_rows,
    mesh_of,
    sized,
)
from jaxfl.engine.program import Points, compile_for, freeze
from jaxfl.models.trained import TrainedModel
from jaxfl.privacy.statement import without_clients
from jaxfl.run.fingerprint import versions
from jaxfl.types import Algorithm, Clients, Lists, Model, Params, Tree

_PERSONAL = (
    "This model was fitted to the examples of client {} without noise. No epsilon covers it, so "
    "that only this client may have it."
)
_PERSONAL_MODELS = (
    "Each of these models was fitted to the examples of one client without noise. No epsilon "
    "covers them, so that each client may have only its own."
)
_BY_PRIVATE_STEPS = (
    " The private steps of clients have an epsilon for each example, which the statement gives for "
    "what clients send. It does not cover what else a client's own model depends on."
)

_PROMISE = (
    "This model follows from what the statement's observer of noisy sums and broadcasts sees. "
    "Epsilon {:.4g} at delta {:g} covers {}, over the whole run."
)
_NO_PROMISE = "No finite epsilon covers this model. The statement has the reason."
_UNTRAINED = "No round has trained this model, so it reveals nothing about any client."
_CHOSEN = " Test scores chose its round, and no epsilon covers a choice by clients' test examples."
_FROZEN = " No epsilon covers the data that its frozen weights were trained on."


@dataclasses.dataclass(frozen=True)
class Origin:
    """Method, clients and key from which models follow, in addition to the states of a run."""

    algorithm: Algorithm
    clients: Clients
    key: Key[Array, ""]
    """Key of the run."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """States of server and clients after round `round` of a run, or first states for 0."""

    server: Tree
    states: Tree
    round: int
    chosen: bool = False
    """Whether test scores chose the round."""


def shared_params(algorithm: Algorithm, server: Tree, needed: str) -> Params:
    """Return the weights of the global model from a server's state.

    They are the part of the state that has all layers of the network. If several parts have all
    layers, only one of them may have the name `params`, and is the global model. Entries that each
    client sets for itself are missing, and the network then ignores them (see
    `jaxfl.models.extended`).

    Args:
        algorithm: The method.
        server: State of its server.
        needed: Beginning of the error message, up to "for", such as "central must be None for".

    Raises:
        ValueError: The server's state has no such part, or several, because the method has no
            global model.
    """
    fits = functools.partial(_is_complete, algorithm.model)
    # A complete part is a leaf here, so no part inside it is found again.
    parts = jax.tree.leaves_with_path(server, is_leaf=fits)
    complete = [(path, part) for path, part in parts if fits(part)]
    named = [(path, part) for path, part in complete if _last_name(path) == "params"]
    found = named or complete
    if len(found) != 1:
        parts_found = "none"
        if found:
            parts_found = f"{len(found)} of them"
        raise ValueError(
            f"{needed} method={algorithm.name!r}, which has no global model: one part of its "
            f"server's state must have all layers of model={algorithm.model.name!r}, got "
            f"{parts_found}. Take a client's own model, by client=0 for instance. In a method of "
            "your own, name the part `params`."
        )
    return found[0][1]


def _last_name(path: tuple[Any, ...]) -> str:
    """Return the name of the field or the key that a path ends with, or "" without a name."""
    if not path:
        return ""
    last = path[-1]
    # A field of a NamedTuple has a name, and an entry of a dict has a key.
    return str(getattr(last, "name", getattr(last, "key", "")))


def _is_complete(model: Model, part: Tree) -> bool:
    """Return whether a part of a state has all layers of a network, and only its entries."""
    # These checks are quick, and spare most parts the trace of `init`.
    if not isinstance(part, Mapping) or not set(model.layers) <= part.keys():
        return False
    wanted = jax.eval_shape(lambda: model.init(key_of(0)))
    if not part.keys() <= wanted.keys():
        return False
    own = {name: wanted[name] for name in part}
    return jax.tree.map(jnp.shape, dict(part)) == jax.tree.map(jnp.shape, own)


def global_model(origin: Origin, snapshot: Snapshot, statement: dict[str, Any]) -> TrainedModel:
    """Return the model that all clients of a run share.

    Args:
        origin: Origin of the run's models.
        snapshot: States of the run.
        statement: Privacy statement of the run. It is empty before the first round.
    """
    needed = "client must be a client's index for"
    params = shared_params(origin.algorithm, snapshot.server, needed)
    # Epsilons by client would reveal how often each of them took part.
    about = _about(origin, snapshot, None)
    about["privacy"] = _covered(origin.algorithm.model, statement)
    if snapshot.chosen:
        about["privacy"] += _CHOSEN
    about["statement"] = without_clients(statement) or None
    return _model(origin, params, about)


def personal_model(origin: Origin, snapshot: Snapshot, client: Any) -> TrainedModel:
    """Return the model with which a client is evaluated after a round.

    Args:
        origin: Origin of the run's models.
        snapshot: States of the run.
        client: Index of the client, from 0.

    Raises:
        ValueError: No client has this index, or several processes share the run.
    """
    client = check_count("client", client, least=0, most=origin.clients.num_clients - 1)
    params = _personal(origin, snapshot, client)
    return _model(origin, params, _about(origin, snapshot, client))


def personal_privacy(algorithm: Algorithm, client: int | None) -> str:
    """Return sentences that say which epsilon covers a client's own model, and who may have it.

    Args:
        algorithm: The method.
        client: Index of the client. None stands for the models of all clients.
    """
    if algorithm.dp_sgd is not None:
        owner = f"Only client {client} may have this model."
        if client is None:
            owner = "Only a client may have its own model."
        return owner + _BY_PRIVATE_STEPS
    if client is None:
        return _PERSONAL_MODELS
    return _PERSONAL.format(client)


def _model(origin: Origin, params: Params, about: dict[str, Any]) -> TrainedModel:
    """Return a model whose weights lie on the default device, wherever the run had them."""
    here = jax.tree.map(jnp.asarray, jax.device_get(params))
    return TrainedModel(origin.algorithm.model, here, about=about)


def _about(origin: Origin, snapshot: Snapshot, client: int | None) -> dict[str, Any]:
    return {
        "method": origin.algorithm.name,
        "round": snapshot.round,
        "keep": "best" if snapshot.chosen else "last",
        "clients": origin.clients.num_clients,
        "inputs": str(origin.clients.inputs.dtype),
        "client": client,
        "privacy": personal_privacy(origin.algorithm, client),
        "statement": None,
        "versions": versions(),
    }


def _covered(model: Model, statement: dict[str, Any]) -> str:
    """Return which epsilon covers a global model, as a sentence."""
    frozen = ""
    if jax.tree.leaves(model.frozen):
        frozen = _FROZEN
    if not statement:
        return _UNTRAINED + frozen
    sums = statement["honest"]["aggregate"]["epsilon"]
    # A statement has infinity as a text.
    if sums != "inf":
        return _PROMISE.format(sums, statement["delta"], "all data of one client") + frozen
    # Without private local steps, this entry is None.
    examples = statement["examples"] or {"epsilon": "inf"}
    if examples["epsilon"] != "inf":
        epsilon = examples["epsilon"]
        return _PROMISE.format(epsilon, examples["delta"], "one example of a client") + frozen
    return _NO_PROMISE + frozen


def check_has_states(client: int | str) -> None:
    """Require a run of one process, which has the states of all clients, for a client's model.

    Args:
        client: Index of the client, or "all", for the error.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"client must be None where {jax.process_count()} processes share a run, because each "
            f"has the states of some clients only, got {client!r}. Repeat the run in one process."
        )


def _personal(origin: Origin, snapshot: Snapshot, client: int) -> Params:
    """Return the weights with which a client is evaluated after a round."""
    check_has_states(client)
    clients = in_lists(origin.clients)
    sizes = np.asarray(clients.train_size)
    # Draws may depend on the number of positions, so the capacity is that of an evaluation.
    capacity = next(room for room in capacities_of(sizes) if room >= sizes[client])
    population = _alone(origin.algorithm, clients, client, capacity)
    program = _personal_program(origin.algorithm, population)
    state = jax.tree.map(lambda leaf: np.asarray(leaf[client]), snapshot.states)
    arguments = (
        jax.device_get(snapshot.server),
        state,
        np.int32(client),
        np.int32(snapshot.round - 1),
    )
    key = jax.random.fold_in(_evaluation_key(origin.key, snapshot.round), client)
    # The cached program was made for descriptions, so it gets the arrays here.
    return program.func(population.clients, key, *arguments, frozen=population.frozen)


def _evaluation_key(key: Key[Array, ""], rounds: int) -> Key[Array, ""]:
    """Return the key of a run's evaluation after `rounds` rounds, from the run's key."""
    _, _, eval_key = jax.random.split(key, 3)
    return jax.random.fold_in(eval_key, rounds)


def on_one_device(
    method: Algorithm | Points, clients: Clients, devices: Sequence[jax.Device] | None = None
) -> Population:
    """Return clients, with the frozen weights, on the first of this process's devices.

    Args:
        method: One algorithm, or the points of a sweep.
        clients: Host arrays.
        devices: Devices to choose from. None stands for all devices.
    """
    here = jax.process_index()
    # A process cannot put arrays on another process's devices.
    local = [device for device in devices or jax.devices() if device.process_index == here]
    mesh = mesh_of(clients, local[:1])
    placed = everywhere(mesh, in_rows(clients))
    return freeze(method, sized(Population(placed, clients.num_clients, mesh), clients))


def _alone(algorithm: Algorithm, clients: Clients, client: int, capacity: int) -> Population:
    """Return one client on one device, with `capacity` positions for its training examples."""
    one = on_one_device(algorithm, _one_client(clients, client, capacity))
    # All clients of a capacity share one program, as in an evaluation.
    return one._replace(size=common_size(clients), capacities=(capacity,))


def _personal_program(algorithm: Algorithm, population: Population) -> functools.partial[Params]:
    """Return the cached program of `_compile_personal`."""
    # The cache outlives the run, so it must not hold the run's arrays.
    bare = described(population)
    key = ("personal", key_of_method(algorithm), bare)
    return remembered(key, lambda: _compile_personal(algorithm, bare))


def _one_client(clients: Clients, client: int, capacity: int) -> Clients:
    """Return one client with its own store, with `capacity` training rows and no test rows."""
    rows = clients.train[client][: clients.train_size[client]]
    # Padding copies the first example of the store, which `ClientData.take` replaces by zeros.
    padded = np.zeros(capacity, np.int32)
    padded[: len(rows)] = rows
    none = Lists.of([[]])
    return Clients(
        inputs=np.asarray(clients.inputs[padded]),
        labels=np.asarray(clients.labels[padded]),
        train=Lists.of([np.arange(capacity)]),
        train_size=np.array([len(rows)], np.int32),
        test=none,
        test_size=np.zeros(1, np.int32),
    )


def _compile_personal(algorithm: Algorithm, population: Population) -> functools.partial[Params]:
    """Return the program `(clients, key, server, state, client, last) -> params` of one client.

    Args:
        algorithm: The method.
        population: A population of one client, with one capacity.
    """

    def fit(
        clients: Clients,
        key: Key[Array, ""],
        server: Tree,
        state: Tree,
        client: Int[Array, ""],
        last: Int[Array, ""],
    ) -> Params:
        (capacity,) = population.capacities
        # The client lies in slot 0, but keeps its index among all clients.
        data = data_of(clients, 0, client, capacity, index=last, size=population.size)
        return algorithm.personalize(key, server, state, data)

    return compile_for(algorithm, population, fit)
