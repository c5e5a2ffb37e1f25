"""One round, for every algorithm and every mechanism.

The mechanism draws a cohort. Each participant runs `client_update`, its update is clipped, and the
mechanism makes its contribution. The mechanism aggregates the sum of the contributions, and
`server_update` takes the aggregate. Only this file runs a round.

Keys are derived by round, then by purpose, then by client. A client's randomness therefore depends
neither on the chunk, nor on the number of devices, nor on the order of the cohort.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.extend import core
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int, Key

from jaxfl.engine.mesh import Population, by_capacity, data_of, on_devices
from jaxfl.engine.states import States
from jaxfl.local.lanes import zeros_of
from jaxfl.privacy.audit import audited_aggregate, draw_canaries
from jaxfl.privacy.clip import clip
from jaxfl.privacy.dp_sgd import trainings
from jaxfl.privacy.mechanisms.gaussian import Cohort, Participant, Total
from jaxfl.privacy.noise import CLIENT, PRIVATE_STEPS, derive
from jaxfl.privacy.representation import Floats
from jaxfl.privacy.sampling import Sampling
from jaxfl.privacy.sums import add, add_up
from jaxfl.tasks import is_taken
from jaxfl.types import Algorithm, Clients, Ledger, Message, StepNoise, Tree


class Keys(NamedTuple):
    """A run's streams of randomness.

    Each stream is a key, or 128 secret bits (see `jaxfl.privacy.noise`).
    """

    clients: Key[Array, ""]
    """Stream of the clients' own draws, such as the order of their examples."""
    cohort: Key[Array, "*S"]
    """Stream by which the participants of each round are drawn."""
    noise: Key[Array, "*S"]
    """Stream of all noise, and of the batches of private local steps."""

    def at(self, index: Int[Array, ""]) -> "Keys":
        """Return the streams of the round with this index."""
        return Keys(*(derive(key, index) for key in self))


class Center(NamedTuple):
    """State that all clients share: the server's state, and the mechanism's memory."""

    server: Tree
    memory: Tree
    scores: Tree = ()
    """Scores of the canaries of an audit so far, or () without an audit."""


class Records(NamedTuple):
    """Numbers that the engine records in each of T rounds, or in one round without the axis T."""

    ledger: Ledger
    info: dict[str, Float[Any, "T"]]
    """Means over the participants whose updates and states are finite, by name.

    The entry `participants` is the number of all participants.
    """
    nonfinite: Int[Any, "T"]
    """Numbers of participants whose updates are dropped.

    An update is dropped if it is not finite. Without private local steps, it is also dropped if the
    client's new state is not finite.
    """
    server_finite: Bool[Any, "T"]
    """Whether all numbers of the server's state are finite after the round."""


class _Slots(NamedTuple):
    """A round's values of each client on the devices, sharded like the clients."""

    ids: Int[Array, "S"]
    """Index of the client among all clients."""
    sampled: Bool[Array, "S"]
    """Whether the client takes part in the round."""
    rank: Int[Array, "S"]
    """Position among the round's participants, which are ordered by index."""
    weights: Float[Array, "S"]
    scale: Float[Array, "S"]
    """The client's weight, divided by the unit of the sums (`Mechanism.unit`)."""
    noise: Float[Array, "S"]
    """Std of the noise that the client adds, divided by the clip bound."""
    example_noise: Float[Array, "S"]
    """Noise multiplier of the client's private local steps, or 0 without these."""


class _Round(NamedTuple):
    """What the participants of a round have in common."""

    algorithm: Algorithm
    population: Population
    """The clients on one device."""
    keys: Keys
    """Streams of the round."""
    index: Int[Array, ""]
    center: Center


class _Client(NamedTuple):
    """Values of the client in one slot."""

    slot: Int[Array, ""]
    real: Bool[Array, ""]
    """Whether the slot has a client. Otherwise it is padding."""
    id: Int[Array, ""]
    """Index of the client among all clients."""
    train_size: Int[Array, ""]
    weight: Float[Array, ""]
    scale: Float[Array, ""]
    """The weight, divided by the unit of the sums."""


class Sums(NamedTuple):
    """Sums over the participants of a round.

    Outside of `shard_map`, each leaf has a leading axis of devices, over which `finish_round` sums.
    """

    contributions: Total
    """Sums for the mechanism."""
    info: dict[str, Float[Array, ""]]
    """Sum of each info over the participants whose infos count."""
    informing: Float[Array, ""]
    """Number of participants whose infos count: their updates and states are finite."""
    participants: Float[Array, ""]
    nonfinite: Int[Array, ""]


def all_keys(key: Key[Array, "*P"]) -> Keys:
    """Return streams with one key, whose draws differ because keys are derived by purpose."""
    return Keys(key, key, key)


def one_round(
    algorithm: Algorithm,
    population: Population,
    chunk: int,
    keys: Keys,
    index: Int[Array, ""],
    center: Center,
    states: States,
) -> tuple[Center, States, Records]:
    """Return the center, the client states and the records after a round.

    The devices hold all clients.

    Args:
        algorithm: The method that runs.
        population: All clients.
        chunk: Number of clients vectorised at a time on each device.
        keys: The streams of the run.
        index: Index of the round.
        center: The shared state before the round.
        states: States of all clients before the round.
    """
    # A sampler may draw once for several rounds, so `draw` gets the keys of the run.
    cohort = draw(algorithm, population.num_clients, keys, index, center)
    keys = keys.at(index)
    # Slots have the order of the clients, and those from C up are padding.
    ids = jnp.arange(population.num_slots)
    total, states = add_participants(
        algorithm, population, chunk, keys, index, cohort, ids, None, center, states
    )
    center, records = finish_round(algorithm, population.mesh, keys, cohort, total, center)
    return center, states, records


def draw(
    algorithm: Algorithm, count: int, keys: Keys, index: Int[Array, ""], center: Center
) -> Cohort:
    """Draw the cohort of round `index` from all `count` clients, by the streams of the run."""
    mechanism = algorithm.mechanism
    cohort = mechanism.draw(keys.cohort, center.memory, index, count)
    if algorithm.audit is None:
        return cohort
    # Canaries are drawn in addition, so the clients' cohort is that of a run without an audit.
    canaries = draw_canaries(algorithm.audit, keys.cohort, mechanism.sampling, index, count)
    return cohort._replace(canaries=canaries)


def add_participants(
    algorithm: Algorithm,
    population: Population,
    chunk: int,
    keys: Keys,
    index: Int[Array, ""],
    cohort: Cohort,
    ids: Int[Array, "S"],
    total: Sums | None,
    center: Center,
    states: States,
) -> tuple[Sums, States]:
    """Add the population's participants to the sums.

    Args:
        algorithm: The method that runs.
        population: All clients, or a part of them.
        chunk: Number of clients vectorised at a time on each device.
        keys: The streams of the round.
        index: Index of the round.
        cohort: The cohort of the round, of all clients.
        ids: Index of each client of the population among all clients. Indices >= C are padding.
        total: The sums so far. None stands for zero.
        center: The shared state.
        states: States of the population's clients.

    Returns:
        The new sums, and the states of the population's clients after the round.
    """

    def add(
        total: Sums | None, slots: _Slots, center: Center, states: States, clients: Clients
    ) -> tuple[Sums, States]:
        # On each device the axis of devices has length 1.
        total = jax.tree.map(lambda leaf: leaf[0], total)
        # The population holds the arrays of all devices, and `clients` those of this device.
        local = population._replace(clients=clients)
        shared = _Round(algorithm, local, keys, index, center)
        total, states = _cohort(shared, chunk, slots, total, states)
        # `add_up` sums over devices once a round, because `psum` has no carries for `Wide`.
        return jax.tree.map(lambda leaf: leaf[None], total), states

    by_client = P("clients")
    add_on_devices = on_devices(
        add, population, by_client, by_client, P(), by_client, population.layout
    )
    slots = _slots(algorithm, cohort, ids, center)
    return add_on_devices(total, slots, center, states, population.clients)


def finish_round(
    algorithm: Algorithm, mesh: Mesh, keys: Keys, cohort: Cohort, total: Sums, center: Center
) -> tuple[Center, Records]:
    """Add up the devices' sums, aggregate them, and take the server's step.

    The mechanism's aggregate includes its noise and the division by the denominator.

    Args:
        algorithm: The method that runs.
        mesh: The devices.
        keys: The streams of the round.
        cohort: The cohort of the round.
        total: The devices' sums over all participants.
        center: The shared state before the round.

    Returns:
        The shared state after the round, and the round's records.
    """
    total = add_up(total)
    aggregate, std, memory, scores = _aggregated(
        algorithm, mesh, keys, cohort, total.contributions, center
    )
    server = _stepped(algorithm, center.server, aggregate, total.contributions.weight)
    # If nobody informs, all sums of infos are 0, and so are their means.
    informing = jnp.maximum(total.informing, 1)
    info = {name: value / informing for name, value in total.info.items()}
    info["participants"] = total.participants
    ledger = _ledger_of(algorithm, cohort, std)
    center = Center(server, memory, scores)
    return center, Records(ledger, info, total.nonfinite, _all_finite(server))


def _aggregated(
    algorithm: Algorithm, mesh: Mesh, keys: Keys, cohort: Cohort, total: Total, center: Center
) -> tuple[Tree, Float[Array, ""], Tree, Tree]:
    """Return the aggregate, its noise's std, and the next memory and scores of the center."""
    mechanism = algorithm.mechanism
    if algorithm.audit is None:
        found = mechanism.aggregate(keys.noise, center.memory, cohort, total, mesh)
        return *found, center.scores
    return audited_aggregate(
        mechanism, keys.noise, center.memory, center.scores, cohort, total, mesh
    )


def _stepped(algorithm: Algorithm, server: Tree, aggregate: Tree, weight: Float[Array, ""]) -> Tree:
    """Return the server's state after its step. `weight` is the sum of the cohort's weights."""
    # The step reads nothing of the clients but the aggregate, so it costs no further privacy.
    stepped = algorithm.server_update(server, aggregate)

    # An update in single precision would widen parameters in half precision.
    def in_old_dtype(new: Array, old: Array) -> Array:
        if new.dtype == old.dtype:
            return new
        return new.astype(old.dtype)

    stepped = jax.tree.map(in_old_dtype, stepped, server)
    if algorithm.mechanism.denominator != "participants":
        return stepped
    # The server stays as it is after an empty cohort, which this denominator reveals anyway.
    return jax.tree.map(lambda new, old: jnp.where(weight > 0, new, old), stepped, server)


def _ledger_of(algorithm: Algorithm, cohort: Cohort, std: Float[Array, ""]) -> Ledger:
    """Return the ledger of a round whose aggregate has noise of this std."""
    numbers = cohort.numbers
    return Ledger(
        cohort.sampled,
        numbers.client_noise,
        numbers.weights,
        std,
        numbers.noise_multiplier,
        _example_noise(algorithm),
        cohort.notes,
    )


def _example_noise(algorithm: Algorithm) -> Float[Array, "#C"]:
    """Return the noise multiplier of private local steps, [C] or one for all clients [1].

    It is 0 for a method without private local steps.
    """
    if algorithm.dp_sgd is None:
        return jnp.zeros(1)
    return jnp.asarray(algorithm.dp_sgd.noise_table, jnp.float32)


def _slots(algorithm: Algorithm, cohort: Cohort, ids: Int[Array, "S"], center: Center) -> _Slots:
    """Return a round's values of the clients `ids`. Padding (ids >= C) never takes part."""

    def at(values: Array) -> Array:
        rows = ids
        # A single value is the same for all clients.
        if values.shape[0] == 1:
            rows = jnp.zeros_like(ids)
        return values.at[rows].get(mode="fill", fill_value=0)

    numbers = cohort.numbers
    sampled = cohort.sampled.at[ids].get(mode="fill", fill_value=False)
    # Ranks count participants among all clients, so they depend neither on devices nor on blocks.
    rank = at(jnp.cumsum(cohort.sampled) - 1)
    weights = at(numbers.weights)
    return _Slots(
        ids=ids,
        sampled=sampled,
        rank=rank,
        weights=weights,
        scale=weights / algorithm.mechanism.unit(center.memory, numbers),
        noise=at(numbers.client_noise),
        example_noise=at(_example_noise(algorithm)),
    )


def _cohort(
    shared: _Round, chunk: int, slots: _Slots, total: Sums | None, states: States
) -> tuple[Sums, States]:
    """Add one device's participants to its sums, `chunk` at a time, and return its client states.

    The length of the loop follows the number of participants.
    """
    mechanism = shared.algorithm.mechanism
    representation = mechanism.representation
    most = mechanism.sampling.most(shared.population.num_clients)
    lanes = useful_lanes(mechanism.sampling, shared.population)
    chunk = min(chunk, slots.ids.shape[0], lanes)
    chunks = -(-jnp.sum(slots.sampled) // chunk)
    order = _order_of(slots, chunk, shared.population)

    # Under `jit`, the shapes, the check of private steps and the loop share one trace.
    @functools.partial(jax.jit, inline=True)
    def client(slot: Int[Array, ""], states: States) -> tuple[Sums, Tree, Tree]:
        share, state = _participant(shared, slots, slot, states)
        # Rows are placed by their client's rank. They are not added up.
        return _with_rows(share, ()), share.contributions.rows, state

    # One trace of a client gives the shapes of the sums, and shows its private steps.
    program, (shapes, row, _) = jax.make_jaxpr(client, return_shape=True)(
        jnp.zeros((), order.dtype), states
    )
    _check_private_steps(shared.algorithm, program.jaxpr)
    zero = zeros_of(shapes) if chunk == 1 else zeros_of(shapes, chunk)
    settle = functools.partial(_settled, representation, chunk)
    if total is None:
        rows = zeros_of(row, most)
        # The compiler would add up the constants of `settle(zero)`, for as long as a minute.
        sums = zeros_of(jax.eval_shape(settle, zero))
    else:
        rows = total.contributions.rows
        sums = _with_rows(total, ())

    # Without a limit, a single sum takes all chunks.
    length = representation.chunks_per_sum or max(len(order), 1)
    add_chunk = _chunk_adder(client, order, chunk, slots.rank, most)

    def block(b: Int[Array, ""], carry: tuple) -> tuple:
        sums, *others = carry
        end = jnp.minimum((b + 1) * length, chunks)
        part, rows, states = lax.fori_loop(b * length, end, add_chunk, (zero, *others))
        return add(sums, settle(part)), rows, states

    # Chunks are added up lane by lane within a block, and blocks in the numbers of `settle`.
    blocks = -(-chunks // length)
    sums, rows, states = lax.fori_loop(0, blocks, block, (sums, rows, states))
    return _with_rows(sums, rows), states


def _chunk_adder(
    client: Callable[..., tuple[Sums, Tree, Tree]],
    order: Int[Array, "N"],
    chunk: int,
    ranks: Int[Array, "S"],
    most: int,
) -> Callable[..., tuple]:
    """Return the body of a loop that adds the chunk i to sums, rows and states.

    Args:
        client: Function of a slot and the states that returns its share, row and new state.
        order: Slots of the participants.
        chunk: Number of clients vectorised at a time.
        ranks: Row of each slot.
        most: Number of rows.
    """
    # A single client has no batch axis, because an axis of length 1 makes matrix products slow.
    of_chunk = client
    if chunk > 1:
        of_chunk = jax.vmap(client, (0, None))

    def add_chunk(i: Int[Array, ""], carry: tuple) -> tuple:
        part, rows, states = carry
        slot = order[i] if chunk == 1 else lax.dynamic_slice(order, (i * chunk,), (chunk,))
        added, row, state = of_chunk(slot, states)
        rank = ranks.at[slot].get(mode="fill", fill_value=most)
        # Each rank is on one device only, so `finish_round` joins the rows by a sum.
        rows = jax.tree.map(lambda all_, new: all_.at[rank].set(new, mode="drop"), rows, row)
        return optax.tree.add(part, added), rows, states.put(slot, state)

    return add_chunk


def _order_of(slots: _Slots, chunk: int, population: Population) -> Int[Array, "N"]:
    """Return the slots of a device's participants in the order of their chunks, then padding."""
    count = slots.ids.shape[0]
    padded = -(-count // chunk) * chunk
    # The length must be static, so places without a participant hold `count`, which is no slot.
    (order,) = jnp.nonzero(slots.sampled, size=padded, fill_value=count)
    if chunk == 1 or population.size is not None:
        return order
    # A chunk runs until its largest client is done, so clients are sorted by size.
    # Padding has the size -1, so clients without examples come before the padding.
    size = jnp.asarray(population.clients.train_size).at[order].get(mode="fill", fill_value=-1)
    return order[jnp.argsort(-size)]


def _with_rows(sums: Sums, rows: Tree) -> Sums:
    """Return the sums with other rows of participants."""
    return sums._replace(contributions=sums.contributions._replace(rows=rows))


def _settled(representation: Floats, chunk: int, part: Sums) -> Sums:
    """Return the sum over the lanes of a chunk, in the numbers in which blocks are added up."""
    if chunk == 1:
        part = jax.tree.map(lambda leaf: leaf[None], part)
    # Lanes are settled before they are added, so that each float of a noisy sum holds at most eight
    # clients.
    settled = representation.settle(part.contributions.update)
    return add_up(part._replace(contributions=part.contributions._replace(update=settled)))


def useful_lanes(sampling: Sampling, population: Population) -> int:
    """Return the largest useful number of clients vectorised at a time on a device.

    It is the number of participants if a single device has a fixed number of them. Otherwise it is
    about two standard deviations above the mean number of a device's participants, so that a round
    rarely needs a second chunk. More lanes would mostly be empty, and cost as much.
    """
    devices = population.mesh.size
    lanes = sampling.expected(population.num_clients) / devices
    # The number of participants may also vary by device, even if the cohort's size is fixed.
    if not sampling.fixed or devices > 1:
        lanes += 2 * math.sqrt(lanes)
    return max(1, math.ceil(lanes))


def _participant(
    shared: _Round, slots: _Slots, slot: Int[Array, ""], states: States
) -> tuple[Sums, Tree]:
    """Return one client's share of the sums, and its new state. Padding contributes zero.

    A client whose update is dropped contributes only its noise, and keeps its old state.
    """
    algorithm = shared.algorithm
    client = _client_at(slot, slots, shared.population)
    old = states[slot]
    message, new, info = _updated(shared, client, slots, old)

    bound = algorithm.mechanism.update_bound(shared.center.memory)
    update, norm = clip(message.update, bound)
    finite_state = _all_finite(new)
    # The joint norm is finite only if all numbers of the update are.
    finite = jnp.isfinite(norm)
    # Private steps do not protect a state, so the state must not decide whether an update is sent.
    if algorithm.dp_sgd is None:
        finite &= finite_state
    sent = _zero_unless(finite, Message(update, message.extra))
    new = jax.tree.map(lambda a, b: jnp.where(finite & finite_state, a, b), new, old)
    contributions = _contributed(shared, client, slots, sent, norm)
    info = info | {"update_norm": norm, "clipped": (norm > bound).astype(jnp.float32)}
    informs = finite & finite_state & client.real
    info = {name: jnp.where(informs, value, 0.0) for name, value in info.items()}
    return Sums(
        contributions,
        info,
        informing=informs.astype(jnp.float32),
        participants=client.real.astype(jnp.float32),
        nonfinite=(client.real & ~finite).astype(jnp.int32),
    ), new


def _client_at(slot: Int[Array, ""], slots: _Slots, population: Population) -> _Client:
    """Return the values of a slot's client, or of padding if there is no such slot."""
    real = slot < slots.ids.shape[0]
    return _Client(
        slot,
        real,
        # Padding reads the device's last client, because JAX clips an index beyond the end.
        id=slots.ids[slot],
        # Padding has no examples, so nobody waits for its training.
        train_size=jnp.where(real, population.clients.train_size[slot], 0),
        # Padding has the weight 0, so that nothing that it computes changes a sum.
        weight=jnp.where(real, slots.weights[slot], 0.0),
        scale=jnp.where(real, slots.scale[slot], 0.0),
    )


def _updated(
    shared: _Round, client: _Client, slots: _Slots, old: Tree
) -> tuple[Message, Tree, dict[str, Array]]:
    """Return the results of `client_update` for a client with the state `old`."""
    algorithm, population, keys, index, center = shared
    noise = None
    if algorithm.dp_sgd is not None:
        # The batches of private steps must be as secret as the noise, so both have its stream.
        multiplier = slots.example_noise[client.slot]
        noise = StepNoise(multiplier, derive(keys.noise, PRIVATE_STEPS, client.id))
    size: Any = population.size
    if size is None:
        size = client.train_size

    def with_capacity(capacity: int) -> tuple[Message, Tree, dict[str, Array]]:
        data = data_of(population.clients, client.slot, client.id, capacity, noise, index, size)
        key = derive(keys.clients, CLIENT, client.id)
        message, state, info = algorithm.client_update(key, center.server, old, data)
        # The names are known while JAX traces, so a compiled round has no check.
        _check_names(algorithm, info)
        return message, state, info

    return by_capacity(population.capacities, client.train_size, with_capacity)


def _zero_unless(finite: Bool[Array, ""], message: Message) -> Message:
    """Return the message, with zeros in place of all floating numbers unless it is finite."""

    def finite_or_zero(leaf: Array) -> Array:
        if _is_float(leaf):
            return jnp.where(finite, leaf, 0)
        return leaf

    return jax.tree.map(finite_or_zero, message)


def _contributed(
    shared: _Round, client: _Client, slots: _Slots, sent: Message, norm: Float[Array, ""]
) -> Total:
    """Return a client's contribution, with its noise, as a sum over this client alone."""
    mechanism = shared.algorithm.mechanism
    memory = shared.center.memory
    # A dropped update keeps its client's noise, which the accountant counts.
    participant = Participant(client.id, slots.noise[client.slot])
    contribution = mechanism.contribute(shared.keys.noise, memory, participant, sent, norm)
    update = mechanism.representation.in_units(
        contribution.update, contribution.norm, mechanism.contribution_bound(memory), client.scale
    )
    # The clients' noise is independent, so its variances add up in the sum.
    variance = (client.weight * slots.noise[client.slot]) ** 2
    return Total(update, variance=variance, weight=client.weight, rows=contribution.row)


def _check_private_steps(algorithm: Algorithm, client: core.Jaxpr) -> None:
    """Require that a client's program makes exactly the accounted private steps, once.

    Args:
        algorithm: The method that runs.
        client: The program of one client.
    """
    stated = algorithm.dp_sgd
    found = trainings(client)
    if stated is None:
        if found:
            raise ValueError(
                f"dp_sgd must be given, because client_update of {algorithm.name!r} makes private "
                "steps, got None, without which no epsilon would count them. Give "
                "Algorithm(..., dp_sgd=...) the DPSGD that client_update trains by."
            )
        return
    wrong = ""
    if not found:
        wrong = "makes no private steps"
    # Epsilon follows from the engine's noise, and from the rate and the steps that a mark names.
    times = found.get(stated.mark, 0.0)
    if times > 1:
        how_often = f"{times:.0f} times"
        if math.isinf(times):
            how_often = "in a loop"
        wrong = f"trains by private steps {how_often}"
    if found.keys() - {stated.mark}:
        wrong = "makes other private steps, or takes their noise from elsewhere than its data"
    if wrong:
        raise ValueError(
            f"dp_sgd must describe the private steps of client_update, got {stated!r}, but "
            f"client_update of {algorithm.name!r} {wrong}. Train by the `train` of dp_sgd, once in "
            "a round, outside loops and `jax.vmap`, or leave dp_sgd out. Give more `steps` for "
            "longer training."
        )


def _check_names(algorithm: Algorithm, info: dict[str, Array]) -> None:
    """Require that a client's info has no names of the engine's metrics, or raise a ValueError."""
    reserved = [name for name in info if is_taken(algorithm.model.task, name)]
    if reserved:
        raise ValueError(
            "info must have other names than the engine's metrics, got "
            f"{sorted(reserved)} from client_update of {algorithm.name!r}. Choose other names."
        )


def _is_float(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _all_finite(tree: Tree) -> Bool[Array, ""]:
    """Return whether all floating numbers of a tree are finite."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]
    if not floats:
        return jnp.array(True)
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))
