"""One round, for every algorithm and every mechanism.

A round is: draw -> for each participant: client_update, bound, contribute -> sum -> aggregate -> server_update. Only
this file runs it. Keys are derived by round, then purpose, then client, so that neither chunk size, device count nor
the order of a cohort changes a client's randomness.
"""

import functools
import math
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
from jaxfl.privacy.dp_sgd import trainings
from jaxfl.privacy.mechanisms.gaussian import Cohort, Participant, Total
from jaxfl.privacy.noise import CLIENT, PRIVATE_STEPS, derive
from jaxfl.privacy.sums import add, add_up, widen
from jaxfl.tasks import RESERVED, columns
from jaxfl.types import Algorithm, Clients, Ledger, Message, StepNoise, Tree

_BLOCK = 8
"""Chunks whose clients are added up in single precision, lane by lane, before the exact sum (see `sums`)."""


class Keys(NamedTuple):
    """A run's streams of randomness; each is a key, or 128 secret bits (see `jaxfl.privacy.noise`)."""

    clients: Key[Array, ""]
    """For the clients' own draws, such as the order of their examples."""
    cohort: Key[Array, "*S"]
    """Who takes part."""
    noise: Key[Array, "*S"]
    """All noise, and the batches of private local steps."""

    def at(self, index: Int[Array, ""]) -> "Keys":
        """The streams of one round."""
        return Keys(*(derive(key, index) for key in self))


class Center(NamedTuple):
    """What all clients share: the server's state, and the mechanism's memory."""

    server: Tree
    memory: Tree


class Records(NamedTuple):
    """What a segment of rounds reports: its ledger, means over participants, and health flags."""

    ledger: Ledger
    info: dict[str, Float[Any, "T"]]
    nonfinite: Int[Any, "T"]
    server_finite: Bool[Any, "T"]


class _Slots(NamedTuple):
    """Numbers of each client in memory, sharded like the clients."""

    ids: Int[Array, "S"]
    sampled: Bool[Array, "S"]
    rank: Int[Array, "S"]
    """Position among the participants, in the order of their numbers."""
    weights: Float[Array, "S"]
    scale: Float[Array, "S"]
    noise: Float[Array, "S"]
    example_noise: Float[Array, "S"]


class Sums(NamedTuple):
    """Sums over participants; outside `shard_map` each leaf has a leading axis of devices."""

    given: Total
    """What the mechanism gets."""
    info: dict[str, Float[Array, ""]]
    participants: Float[Array, ""]
    nonfinite: Int[Array, ""]


def all_keys(key: Key[Array, "*P"]) -> Keys:
    """One key for all streams, whose purposes keep them apart."""
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
    """A round whose clients are all in memory; the keys are the run's."""
    cohort = draw(algorithm, population.number, keys, index, center)
    keys = keys.at(index)
    ids = jnp.arange(population.clients.number)
    total, states = add_participants(
        algorithm, population, chunk, keys, index, cohort, ids, None, center, states
    )
    center, records = finish_round(algorithm, population.mesh, keys, cohort, total, center)
    return center, states, records


def draw(
    algorithm: Algorithm, count: int, keys: Keys, index: Int[Array, ""], center: Center
) -> Cohort:
    """A round's cohort of all `count` clients; the keys are the run's."""
    return algorithm.mechanism.draw(keys.cohort, center.memory, index, count)


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
    """Add the population's participants to `total`, and return their states, the new ones in place.

    `ids` numbers the clients of the population's and the states' rows: all clients, or a part of them; a number of C
    or more is no client. `total=None` starts from zero.
    """

    def add(
        total: Sums | None, slots: _Slots, center: Center, states: States, clients: Clients
    ) -> tuple[Sums, States]:
        total = jax.tree.map(lambda leaf: leaf[0], total)
        local = population._replace(clients=clients)
        total, states = _cohort(algorithm, chunk, keys, index, slots, total, center, states, local)
        return jax.tree.map(lambda leaf: leaf[None], total), states

    by_client = P("clients")
    return jax.shard_map(
        add,
        mesh=population.mesh,
        in_specs=(by_client, by_client, P(), by_client, population.layout),
        out_specs=by_client,
        check_vma=False,  # algorithms start loops from constants, which the check considers replicated
    )(total, _slots(algorithm, cohort, ids, center), center, states, population.clients)


def finish_round(
    algorithm: Algorithm, mesh: Mesh, keys: Keys, cohort: Cohort, total: Sums, center: Center
) -> tuple[Center, Records]:
    """Add up the devices' sums; then the mechanism's noise and division, and the server's step."""
    mechanism, numbers = algorithm.mechanism, cohort.numbers
    total = add_up(total)
    aggregate, std, memory = mechanism.aggregate(
        keys.noise, center.memory, cohort, total.given, mesh
    )
    # An update in single precision would widen parameters in half precision.
    stepped = algorithm.server_update(center.server, aggregate)
    server = jax.tree.map(
        lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), stepped, center.server
    )
    if mechanism.denominator == "participants":  # which shows an empty cohort anyway
        server = jax.tree.map(
            lambda a, b: jnp.where(total.given.weight > 0, a, b), server, center.server
        )
    counted = jnp.maximum(total.participants - total.nonfinite, 1)
    info = {name: value / counted for name, value in total.info.items()} | {
        "participants": total.participants
    }
    noise = (std, numbers.noise_multiplier, _example_noise(algorithm))
    ledger = Ledger(cohort.sampled, numbers.client_noise, numbers.weights, *noise, cohort.notes)
    return Center(server, memory), Records(ledger, info, total.nonfinite, _all_finite(server))


def _example_noise(algorithm: Algorithm) -> Float[Array, "#C"]:
    """Noise of private local steps by client; 0 without them."""
    return (
        jnp.zeros(1)
        if algorithm.dp_sgd is None
        else jnp.asarray(algorithm.dp_sgd.noise_table, jnp.float32)
    )


def _slots(algorithm: Algorithm, cohort: Cohort, ids: Int[Array, "S"], center: Center) -> _Slots:
    """A round's numbers at these clients; those that only fill up the mesh never take part."""

    def at(values: Array) -> Array:
        rows = jnp.zeros_like(ids) if values.shape[0] == 1 else ids  # the same for all
        return values.at[rows].get(mode="fill", fill_value=0)

    sampled = cohort.sampled.at[ids].get(mode="fill", fill_value=False)
    rank, numbers, weights = (
        at(jnp.cumsum(cohort.sampled) - 1),
        cohort.numbers,
        at(cohort.numbers.weights),
    )
    scale = weights / algorithm.mechanism.unit(center.memory, numbers)
    return _Slots(
        ids, sampled, rank, weights, scale, at(numbers.client_noise), at(_example_noise(algorithm))
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
    """Add one device's participants to its sums, `chunk` at a time; the loop's length follows their number.

    The population's clients are those on the device.
    """
    count, most = slots.ids.shape[0], algorithm.mechanism.sampling.most(population.number)
    chunk = min(chunk, count)
    chunks = -(-jnp.sum(slots.sampled) // chunk)
    order = jnp.nonzero(slots.sampled, size=-(-count // chunk) * chunk, fill_value=count)[0]
    if (
        chunk > 1 and population.size is None
    ):  # they go on until the largest one ends: those of like size together
        size = jnp.asarray(population.clients.train_size).at[order].get(mode="fill", fill_value=-1)
        order = order[jnp.argsort(-size)]

    @functools.partial(jax.jit, inline=True)
    def client(slot: Int[Array, ""], states: States) -> tuple[Sums, Tree, Tree]:
        share, state = _participant(algorithm, keys, index, slots, slot, center, states, population)
        return share._replace(given=share.given._replace(rows=())), share.given.rows, state

    # One client is plain code: with a batch axis of 1, matrix products would be slow.
    of_chunk = client if chunk == 1 else jax.vmap(client, (0, None))

    def body(i: Int[Array, ""], carry: tuple) -> tuple:
        part, rows, states = carry
        slot = order[i] if chunk == 1 else lax.dynamic_slice(order, (i * chunk,), (chunk,))
        added, row, state = of_chunk(slot, states)
        rank = slots.rank.at[slot].get(mode="fill", fill_value=most)
        rows = jax.tree.map(lambda all_, new: all_.at[rank].set(new, mode="drop"), rows, row)
        return optax.tree.add(part, added), rows, states.put(slot, state)

    def settle(part: Sums) -> Sums:
        part = jax.tree.map(lambda leaf: leaf[None], part) if chunk == 1 else part
        if algorithm.mechanism.exact:
            part = part._replace(given=part.given._replace(update=widen(part.given.update)))
        return add_up(part)

    lanes = () if chunk == 1 else (chunk,)
    program, (shapes, row, _) = jax.make_jaxpr(client, return_shape=True)(
        jnp.zeros((), order.dtype), states
    )
    _check_private_steps(algorithm, program.jaxpr)
    zero = jax.tree.map(lambda leaf: jnp.zeros((*lanes, *leaf.shape), leaf.dtype), shapes)
    if total is None:
        rows = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape), leaf.dtype), row)
        # Not `settle(zero)`: the compiler would add up constants, for as long as a minute.
        sums = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(settle, zero)
        )
    else:
        rows, sums = total.given.rows, total._replace(given=total.given._replace(rows=()))

    # Whole steps of a grid add up exactly in one block.
    length = max(len(order), 1) if algorithm.mechanism.noise == "grid" else _BLOCK

    def block(b: Int[Array, ""], carry: tuple) -> tuple:
        sums, *others = carry
        end = jnp.minimum((b + 1) * length, chunks)
        part, rows, states = lax.fori_loop(b * length, end, body, (zero, *others))
        return add(sums, settle(part)), rows, states

    sums, rows, states = lax.fori_loop(0, -(-chunks // length), block, (sums, rows, states))
    return sums._replace(given=sums.given._replace(rows=rows)), states


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
    """One client's share of the sums, and its new state; a slot beyond the last contributes zero."""
    mechanism, (server, memory) = algorithm.mechanism, center
    real = slot < slots.ids.shape[0]
    number, weight, scale = (
        slots.ids[slot],
        *(jnp.where(real, x[slot], 0.0) for x in (slots.weights, slots.scale)),
    )
    old = states[slot]
    private = algorithm.dp_sgd is not None
    noise = (
        StepNoise(slots.example_noise[slot], derive(keys.noise, PRIVATE_STEPS, number))
        if private
        else None
    )

    def updated(capacity: int) -> tuple[Message, Tree, dict[str, Array]]:
        data = data_of(population.clients, slot, number, capacity, noise, index, population.size)
        given = algorithm.client_update(derive(keys.clients, CLIENT, number), server, old, data)
        _check_names(algorithm, given[2])
        return given

    message, new, info = by_capacity(
        population.capacities, population.clients.train_size[slot], updated
    )

    update, norm, bound = mechanism.bound(memory, message.update)
    kept = _all_finite(new)
    finite = jnp.isfinite(norm)
    if (
        not private
    ):  # private steps do not cover a state, so that it decides nothing about what is sent
        finite &= kept
    bounded = Message(update, message.extra)
    sent = jax.tree.map(
        lambda leaf: jnp.where(finite, leaf, 0) if _is_float(leaf) else leaf, bounded
    )
    new = jax.tree.map(lambda a, b: jnp.where(finite & kept, a, b), new, old)
    contribution, row = mechanism.contribute(
        keys.noise, memory, Participant(number, slots.noise[slot]), sent, norm
    )
    update = mechanism.in_units(memory, contribution, norm, scale)
    given = Total(update, variance=(weight * slots.noise[slot]) ** 2, weight=weight, rows=row)
    info = info | {"update_norm": norm, "clipped": (norm > bound).astype(jnp.float32)}
    info = {name: jnp.where(finite & kept & real, value, 0.0) for name, value in info.items()}
    return Sums(given, info, real.astype(jnp.float32), (real & ~finite).astype(jnp.int32)), new


def _check_private_steps(algorithm: Algorithm, client: core.Jaxpr) -> None:
    """Require that the program of a client makes the private steps that are accounted, once."""
    stated = algorithm.dp_sgd
    if stated is None:
        return
    found = trainings(client)
    wrong = "" if found else "makes no private steps"
    times = found.get(stated.mark, 0.0)
    if times > 1:
        wrong = (
            f"trains by private steps {'in a loop' if math.isinf(times) else f'{times:.0f} times'}"
        )
    if found.keys() - {stated.mark}:
        wrong = "makes other private steps, or takes their noise from elsewhere than the data that it is given"
    if wrong:
        raise ValueError(
            f"dp_sgd={stated!r}, but client_update of {algorithm.name!r} {wrong}: train by its `train`, once in a "
            "round, outside loops and `jax.vmap`, or leave it out; for longer training give more `steps`"
        )


def _check_names(algorithm: Algorithm, info: dict[str, Array]) -> None:
    """Require infos of other names than the engine's."""
    if taken := (RESERVED | columns(algorithm.model.task) - {"loss"}) & info.keys():
        raise ValueError(
            f"info={sorted(taken)} from client_update of {algorithm.name!r}: rows of metrics have these names already, "
            "choose others"
        )


def _is_float(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _all_finite(tree: Tree) -> Bool[Array, ""]:
    floats = [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]
    return (
        jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats]))
        if floats
        else jnp.array(True)
    )
