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

from jaxfl.engine.mesh import Population, by_capacity, data_of
from jaxfl.engine.states import States
from jaxfl.privacy.audit import audited_aggregate, draw_canaries
from jaxfl.privacy.clip import clip
from jaxfl.privacy.dp_sgd import trainings
from jaxfl.privacy.mechanisms.gaussian import Cohort, Participant, Total
from jaxfl.privacy.noise import CLIENT, PRIVATE_STEPS, derive
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
        total, states = _cohort(algorithm, chunk, keys, index, slots, total, center, states, local)
        # `add_up` sums over devices once a round, because `psum` has no carries for `Wide`.
        return jax.tree.map(lambda leaf: leaf[None], total), states

    by_client = P("clients")
    # Algorithms start loops from constants, which `check_vma` considers replicated.
    add_on_devices = jax.shard_map(
        add,
        mesh=population.mesh,
        in_specs=(by_client, by_client, P(), by_client, population.layout),
        out_specs=by_client,
        check_vma=False,
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
    mechanism = algorithm.mechanism
    numbers = cohort.numbers
    total = add_up(total)
    scores = center.scores
    if algorithm.audit is None:
        aggregate, std, memory = mechanism.aggregate(
            keys.noise, center.memory, cohort, total.contributions, mesh
        )
    else:
        aggregate, std, memory, scores = audited_aggregate(
            mechanism, keys.noise, center.memory, scores, cohort, total.contributions, mesh
        )
    # The step reads nothing of the clients but the aggregate, so it costs no further privacy.
    stepped = algorithm.server_update(center.server, aggregate)

    # An update in single precision would widen parameters in half precision.
    def in_old_dtype(new: Array, old: Array) -> Array:
        if new.dtype == old.dtype:
            return new
        return new.astype(old.dtype)

    server = jax.tree.map(in_old_dtype, stepped, center.server)
    # The server stays as it is after an empty cohort, which this denominator reveals anyway.
    if mechanism.denominator == "participants":
        server = jax.tree.map(
            lambda a, b: jnp.where(total.contributions.weight > 0, a, b), server, center.server
        )
    # If nobody informs, all sums of infos are 0, and so are their means.
    informing = jnp.maximum(total.informing, 1)
    info = {name: value / informing for name, value in total.info.items()}
    info["participants"] = total.participants
    ledger = Ledger(
        cohort.sampled,
        numbers.client_noise,
        numbers.weights,
        std,
        numbers.noise_multiplier,
        _example_noise(algorithm),
        cohort.notes,
    )
    center = Center(server, memory, scores)
    return center, Records(ledger, info, total.nonfinite, _all_finite(server))


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
    algorithm: Algorithm,
    chunk: int,
    keys: Keys,
    index: Int[Array, ""],
    slots: _Slots,
    total: Sums | None,
    center: Center,
    states: States,
    population: Population,
) -> tuple[Sums, States]:
    """Add one device's participants to its sums, `chunk` at a time, and return its client states.

    The population's clients are those on the device. The length of the loop follows the number of
    participants.
    """
    representation = algorithm.mechanism.representation
    count = slots.ids.shape[0]
    most = algorithm.mechanism.sampling.most(population.num_clients)
    chunk = min(chunk, count, useful_lanes(algorithm.mechanism.sampling, population))
    chunks = -(-jnp.sum(slots.sampled) // chunk)
    padded = -(-count // chunk) * chunk
    # The length must be static, so places without a participant hold `count`, which is no slot.
    (order,) = jnp.nonzero(slots.sampled, size=padded, fill_value=count)
    # A chunk runs until its largest client is done, so clients are sorted by size.
    if chunk > 1 and population.size is None:
        # Padding has the size -1, so clients without examples come before the padding.
        size = jnp.asarray(population.clients.train_size).at[order].get(mode="fill", fill_value=-1)
        order = order[jnp.argsort(-size)]

    # Under `jit`, the shapes, the check of private steps and the loop share one trace.
    @functools.partial(jax.jit, inline=True)
    def client(slot: Int[Array, ""], states: States) -> tuple[Sums, Tree, Tree]:
        share, state = _participant(algorithm, keys, index, slots, slot, center, states, population)
        contributions = share.contributions
        # Rows are placed by their client's rank. They are not added up.
        share = share._replace(contributions=contributions._replace(rows=()))
        return share, contributions.rows, state

    # A single client has no batch axis, because an axis of length 1 makes matrix products slow.
    of_chunk: Callable[..., tuple[Sums, Tree, Tree]] = client
    lanes: tuple[int, ...] = ()
    if chunk > 1:
        of_chunk = jax.vmap(client, (0, None))
        lanes = (chunk,)

    def body(i: Int[Array, ""], carry: tuple) -> tuple:
        part, rows, states = carry
        slot = order[i] if chunk == 1 else lax.dynamic_slice(order, (i * chunk,), (chunk,))
        added, row, state = of_chunk(slot, states)
        rank = slots.rank.at[slot].get(mode="fill", fill_value=most)
        # Each rank is on one device only, so `finish_round` joins the rows by a sum.
        rows = jax.tree.map(lambda all_, new: all_.at[rank].set(new, mode="drop"), rows, row)
        return optax.tree.add(part, added), rows, states.put(slot, state)

    def settle(part: Sums) -> Sums:
        if chunk == 1:
            part = jax.tree.map(lambda leaf: leaf[None], part)
        # Lanes are settled before they are added, so that each float of a noisy sum holds at
        # most eight clients.
        settled = representation.settle(part.contributions.update)
        return add_up(part._replace(contributions=part.contributions._replace(update=settled)))

    # One trace of a client gives the shapes of the sums, and shows its private steps.
    program, (shapes, row, _) = jax.make_jaxpr(client, return_shape=True)(
        jnp.zeros((), order.dtype), states
    )
    _check_private_steps(algorithm, program.jaxpr)
    zero = jax.tree.map(lambda leaf: jnp.zeros((*lanes, *leaf.shape), leaf.dtype), shapes)
    if total is None:
        rows = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape), leaf.dtype), row)
        # The compiler would add up the constants of `settle(zero)`, for as long as a minute.
        settled = jax.eval_shape(settle, zero)
        sums = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), settled)
    else:
        rows = total.contributions.rows
        sums = total._replace(contributions=total.contributions._replace(rows=()))

    # Without a limit, a single sum takes all chunks.
    length = representation.chunks_per_sum or max(len(order), 1)

    def block(b: Int[Array, ""], carry: tuple) -> tuple:
        sums, *others = carry
        end = jnp.minimum((b + 1) * length, chunks)
        part, rows, states = lax.fori_loop(b * length, end, body, (zero, *others))
        return add(sums, settle(part)), rows, states

    # Chunks are added up lane by lane within a block, and blocks in the numbers of `settle`.
    sums, rows, states = lax.fori_loop(0, -(-chunks // length), block, (sums, rows, states))
    return sums._replace(contributions=sums.contributions._replace(rows=rows)), states


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
    algorithm: Algorithm,
    keys: Keys,
    index: Int[Array, ""],
    slots: _Slots,
    slot: Int[Array, ""],
    center: Center,
    states: States,
    population: Population,
) -> tuple[Sums, Tree]:
    """Return one client's share of the sums, and its new state. Padding contributes zero.

    A client whose update is dropped contributes only its noise, and keeps its old state.
    """
    mechanism = algorithm.mechanism
    server, memory, _ = center
    real = slot < slots.ids.shape[0]
    # A padding slot reads the device's last client, because JAX clips an index beyond the end. It
    # has no examples, so nobody waits for its training.
    client_id = slots.ids[slot]
    train_size = jnp.where(real, population.clients.train_size[slot], 0)
    size: Any = population.size
    if size is None:
        size = train_size
    # Padding has the weight 0, so that nothing that it computes changes a sum.
    weight = jnp.where(real, slots.weights[slot], 0.0)
    scale = jnp.where(real, slots.scale[slot], 0.0)
    old = states[slot]
    private = algorithm.dp_sgd is not None
    noise = None
    if private:
        # The batches of private steps must be as secret as the noise, so both have its stream.
        noise = StepNoise(slots.example_noise[slot], derive(keys.noise, PRIVATE_STEPS, client_id))

    def updated(capacity: int) -> tuple[Message, Tree, dict[str, Array]]:
        data = data_of(population.clients, slot, client_id, capacity, noise, index, size)
        key = derive(keys.clients, CLIENT, client_id)
        message, state, info = algorithm.client_update(key, server, old, data)
        # The names are known while JAX traces, so a compiled round has no check.
        _check_names(algorithm, info)
        return message, state, info

    message, new, info = by_capacity(population.capacities, train_size, updated)

    bound = mechanism.update_bound(memory)
    update, norm = clip(message.update, bound)
    finite_state = _all_finite(new)
    # The joint norm is finite only if all numbers of the update are.
    finite = jnp.isfinite(norm)
    # Private steps do not protect a state, so the state must not decide whether an update is sent.
    if not private:
        finite &= finite_state

    def finite_or_zero(leaf: Array) -> Array:
        if _is_float(leaf):
            return jnp.where(finite, leaf, 0)
        return leaf

    bounded = Message(update, message.extra)
    sent = jax.tree.map(finite_or_zero, bounded)
    new = jax.tree.map(lambda a, b: jnp.where(finite & finite_state, a, b), new, old)
    # A dropped update keeps its client's noise, which the accountant counts.
    contribution = mechanism.contribute(
        keys.noise, memory, Participant(client_id, slots.noise[slot]), sent, norm
    )
    update = mechanism.representation.in_units(
        contribution.update, contribution.norm, mechanism.contribution_bound(memory), scale
    )
    # The clients' noise is independent, so its variances add up in the sum.
    variance = (weight * slots.noise[slot]) ** 2
    client_total = Total(update, variance=variance, weight=weight, rows=contribution.row)
    info = info | {"update_norm": norm, "clipped": (norm > bound).astype(jnp.float32)}
    informs = finite & finite_state & real
    info = {name: jnp.where(informs, value, 0.0) for name, value in info.items()}
    return Sums(
        client_total,
        info,
        informing=informs.astype(jnp.float32),
        participants=real.astype(jnp.float32),
        nonfinite=(real & ~finite).astype(jnp.int32),
    ), new


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
