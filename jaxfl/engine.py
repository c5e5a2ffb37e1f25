"""One round, and many rounds in one compiled program.

A round is: sample -> for each participant: client_update, clip, client noise -> weighted sum -> server
noise -> divide -> server_update. Only this file does it, for every algorithm.

Keys are derived by round, then purpose, then client id, so that neither chunk size, device count nor the
order of a cohort changes a client's randomness.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Int, Key

from jaxfl.backend import compiler_options
from jaxfl.data.clients import shard
from jaxfl.local.masks import keep
from jaxfl.privacy.clip import clip, round_within
from jaxfl.privacy.mechanism import Mechanism, Release, RoundNoise, adapt, round_numbers, server_noise, sum_unit
from jaxfl.privacy.noise import add_gaussian, add_grid_noise, derive, single
from jaxfl.privacy.sums import add, add_up, narrow, widen
from jaxfl.types import Account, Algorithm, ClientData, Clients, Ledger, Message, StepNoise, Tree

_SAMPLE, _CLIENT, _CLIENT_NOISE, _SERVER_NOISE, _RELEASE = range(5)
_BLOCK = 8
"""Chunks whose clients are added up in single precision, place by place, before the exact sum (see `sums`)."""

_RESERVED = {
    "round", "accuracy", "accuracy_std", "accuracy_worst10", "accuracy_examples", "epsilon",
    "participants", "nonfinite", "update_norm", "clipped", "train_loss",
}  # fmt: skip
"""What a row of metrics holds besides an algorithm's own infos; its `loss` is shown as `train_loss`."""


class Keys(NamedTuple):
    """A run's streams of randomness; each a key, or 128 secret bits (see `jaxfl.privacy.noise`)."""

    clients: Key[Array, ""]
    """What clients draw by themselves, such as the order of their examples."""
    cohort: Key[Array, "*S"]
    """Who takes part."""
    noise: Key[Array, "*S"]
    """All noise, and the batches of private local steps."""

    def at(self, index: Int[Array, ""]) -> "Keys":
        """Those of a round."""
        return Keys(*(derive(key, index) for key in self))


class Population(NamedTuple):
    """Clients on a device mesh: each device holds its own clients and, by `layout`, their examples or all of them."""

    clients: Clients
    number: int
    mesh: Mesh
    layout: P | Clients = P("clients")


class Points(NamedTuple):
    """Runs of one method that differ in numbers: a sweep's values are arguments of its one compiled program.

    `build` makes the algorithm of a point from its values, whose leaves have a leading axis P; `batch` points are
    vectorised at a time (None: one after the other, as plain code).
    """

    build: Callable[..., Algorithm]
    values: dict[str, Float[np.ndarray, "P"]]
    batch: int | None = None


class Records(NamedTuple):
    """What a segment of rounds reports: its ledger, means over participants, and health flags."""

    ledger: Ledger
    info: dict[str, Float[Any, "T"]]
    nonfinite: Int[Any, "T"]
    server_finite: Bool[Any, "T"]


class Draw(NamedTuple):
    """Who takes part in a round, the round's numbers, and what taking part adds to each account."""

    sampled: Bool[Array, "C"]
    numbers: RoundNoise
    cost: Float[Array, "#C"]


class _Slots(NamedTuple):
    """Per client that is at hand, sharded like the clients."""

    ids: Int[Array, "S"]
    sampled: Bool[Array, "S"]
    weights: Float[Array, "S"]
    scale: Float[Array, "S"]
    noise: Float[Array, "S"]
    example_noise: Float[Array, "S"]
    cost: Float[Array, "S"]


class Sums(NamedTuple):
    """Sums over participants; outside of `shard_map` each leaf has a leading axis of devices."""

    update: Tree
    """In units of `sum_unit`; under noise whole numbers."""
    variance: Float[Array, ""]
    weight: Float[Array, ""]
    info: dict[str, Float[Array, ""]]
    participants: Float[Array, ""]
    nonfinite: Int[Array, ""]


def mesh_of(clients: Clients, devices: list[jax.Device] | None) -> Mesh:
    """One axis `clients`: the devices (None: all of the default backend) by process, no more than there are clients."""
    found = sorted(devices or jax.devices(), key=lambda device: device.process_index)
    return Mesh(np.array(found[: max(1, clients.number)]), ("clients",))


def place(clients: Clients, devices: list[jax.Device] | None = None) -> Population:
    """Put clients on a mesh with one axis `clients`, each device with its own clients and their examples.

    Of several processes, each puts the clients of its own devices there, and reads no other examples.

    Args:
        clients: host arrays, the same in all processes.
        devices: which devices to use; all of the default backend, of all processes, where None.

    Raises:
        ValueError: a process would have no clients.
    """
    mesh = mesh_of(clients, devices)
    devices = list(mesh.devices.flat)
    own = [b for b, device in enumerate(devices) if device.process_index == jax.process_index()]
    if len({device.process_index for device in devices}) < jax.process_count():
        raise ValueError(
            f"{len(devices)} devices for {clients.number} clients leave some of {jax.process_count()} processes "
            "without any: give devices of every process and more clients, or start fewer processes"
        )
    sharding = NamedSharding(mesh, P("clients"))

    def put(blocks: np.ndarray) -> Array:
        shape = (len(blocks) // len(own) * mesh.size, *blocks.shape[1:])
        shards = [jax.device_put(block, devices[b]) for b, block in zip(own, np.split(blocks, len(own)))]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    return Population(jax.tree.map(put, shard(clients, mesh.size, own)), clients.number, mesh)


def all_keys(key: Key[Array, "*P"]) -> Keys:
    """One key for all streams, whose purposes keep them apart."""
    return Keys(key, key, key)


def initialize(key: Key[Array, "*P"], algorithm: Algorithm | Points, population: Population) -> tuple[Tree, Tree]:
    """Server state, replicated, and client states, on the devices of their clients."""
    quick = {"xla_backend_optimization_level": 0}  # it runs once: compiling well would take longer than running

    def init(key: Key[Array, "*P"]) -> tuple[Tree, Tree]:
        return over_points(lambda algorithm, key: algorithm.init(key, population.clients.number), algorithm)(key)

    shardings = _shardings(algorithm, population)
    return jax.jit(init, out_shardings=shardings, compiler_options=quick)(key)


def _shardings(algorithm: Algorithm | Points, population: Population) -> tuple[NamedSharding, NamedSharding]:
    """Of a server, and anything that every process reads; of client states."""
    by_client = P("clients") if isinstance(algorithm, Algorithm) else P(None, "clients")
    return NamedSharding(population.mesh, P()), NamedSharding(population.mesh, by_client)


def over_points(work: Callable[..., Tree], algorithm: Algorithm | Points) -> Callable[..., Tree]:
    """`work(algorithm, *arguments)` as a function of the arguments; for points, of theirs along a leading axis P."""
    if isinstance(algorithm, Algorithm):
        return functools.partial(work, algorithm)

    def one(point: tuple[dict[str, Array], tuple[Tree, ...]]) -> Tree:
        values, arguments = point
        try:
            built = algorithm.build(**values)
        except jax.errors.ConcretizationTypeError as error:
            raise ValueError(
                f"values={sorted(values)!r}: one of them decides a shape or a Python branch, which a program "
                "cannot leave open; run `simulate` for each of its values"
            ) from error
        return work(built, *arguments)

    values = {name: jnp.asarray(column, jnp.float32) for name, column in algorithm.values.items()}
    return lambda *arguments: lax.map(one, (values, arguments), batch_size=algorithm.batch)


def compile_rounds(
    algorithm: Algorithm | Points, population: Population, *, chunk: int, segment: int
) -> functools.partial[tuple[Tree, Tree, Records]]:
    """One program for up to `segment` rounds: `(keys, start, rounds, server, states) -> (server, states, records)`.

    `start` and `rounds` are dynamic, so one compilation serves a whole run; `server` and `states` are
    donated. Rows of the records beyond `rounds` are zero. Of `Points`, all but `start` and `rounds` have a leading
    axis P. A key in place of `Keys` is taken for all of them.

    Args:
        algorithm: what a round does.
        population: the clients on their devices.
        chunk: clients vectorised at a time on each device; memory grows with it, and not with the cohort.
        segment: the largest number of rounds per call.
    """

    def run(clients: Clients, keys: Any, start: Any, rounds: Any, server: Tree, states: Tree) -> tuple:
        keys = keys if isinstance(keys, Keys) else all_keys(keys)

        def rounds_of(algorithm: Algorithm, keys: Keys, server: Tree, states: Tree) -> tuple:
            @functools.partial(jax.jit, inline=True)  # traced once, for the shapes and for the loop
            def one_round(index: Int[Array, ""], server: Tree, states: Tree) -> tuple[Tree, Tree, Records]:
                own = population._replace(clients=clients)
                return _round(algorithm, own, chunk, keys.at(index), index, server, states)

            first = jnp.asarray(start, jnp.int32)
            shapes = jax.eval_shape(one_round, first, server, states)[2]
            records = jax.tree.map(lambda leaf: jnp.zeros((segment, *leaf.shape), leaf.dtype), shapes)

            def body(i: Int[Array, ""], carry: tuple) -> tuple:
                server, states, records = carry
                server, states, record = one_round(first + i, server, states)
                return server, states, jax.tree.map(lambda all_, one: all_.at[i].set(one), records, record)

            return lax.fori_loop(0, jnp.minimum(rounds, segment), body, (server, states, records))

        return over_points(rounds_of, algorithm)(keys, server, states)

    options = compiler_options(population.mesh)
    all_, own = _shardings(algorithm, population)
    program = jax.jit(
        run, donate_argnames=("server", "states"), out_shardings=(all_, own, all_), compiler_options=options
    )
    return functools.partial(program, population.clients)


def _round(
    algorithm: Algorithm,
    population: Population,
    chunk: int,
    keys: Keys,
    index: Int[Array, ""],
    server: Tree,
    states: Tree,
) -> tuple[Tree, Tree, Records]:
    account = account_of(algorithm, states)
    account = jax.tree.map(lambda leaf: leaf[: population.number], account)
    drawn = draw(algorithm, population.number, keys, index, account)
    ids = jnp.arange(population.clients.number)
    total, states = add_participants(algorithm, population, chunk, keys, drawn, ids, None, server, states)
    server, records = finish_round(algorithm, population.mesh, keys, drawn, total, server)
    return server, states, records


def account_of(algorithm: Algorithm, states: Tree) -> Account | None:
    """What a mechanism that follows from earlier rounds reads of the client states; None for any other."""
    if not algorithm.mechanism.adaptive:
        return None
    if not hasattr(states, "account"):
        raise ValueError("client states without a field `account`: start it with jaxfl.server.init_account")
    return states.account


def draw(algorithm: Algorithm, count: int, keys: Keys, index: Int[Array, ""], account: Account | None) -> Draw:
    """Sample a round's cohort from all `count` clients."""
    mechanism = algorithm.mechanism
    numbers = round_numbers(mechanism, count, index)
    sampled = mechanism.sampling.sample(single(derive(keys.cohort, _SAMPLE)), count)
    cost = jnp.zeros(1)
    if account is not None:
        numbers, cost, afford = adapt(mechanism, numbers, account)
        sampled &= afford
    return Draw(sampled, numbers, cost)


def add_participants(
    algorithm: Algorithm,
    population: Population,
    chunk: int,
    keys: Keys,
    drawn: Draw,
    ids: Int[Array, "S"],
    total: Sums | None,
    server: Tree,
    states: Tree,
) -> tuple[Sums, Tree]:
    """Add to `total` those of the population's clients that take part; also their states, the new ones in place.

    `ids` are the numbers of the clients that the population's and the states' rows belong to: all, or a part of them;
    a number of C or more is no client. None starts from zero.
    """

    def add(total: Sums | None, slots: _Slots, server: Tree, states: Tree, clients: Clients) -> tuple[Sums, Tree]:
        total = jax.tree.map(lambda leaf: leaf[0], total)
        total, states = _cohort(algorithm, chunk, keys, slots, total, server, states, clients)
        return jax.tree.map(lambda leaf: leaf[None], total), states

    by_client = P("clients")
    return jax.shard_map(
        add,
        mesh=population.mesh,
        in_specs=(by_client, by_client, P(), by_client, population.layout),
        out_specs=by_client,
        check_vma=False,  # algorithms start loops from constants, which the check takes for replicated
    )(total, _slots(algorithm.mechanism, drawn, ids), server, states, population.clients)


def finish_round(
    algorithm: Algorithm, mesh: Mesh, keys: Keys, drawn: Draw, total: Sums, server: Tree
) -> tuple[Tree, Records]:
    """Add up the devices' sums; then the server's noise, the division and the server's step."""
    mechanism, numbers = algorithm.mechanism, drawn.numbers
    total = add_up(total)
    update, std, unit = total.update, jnp.zeros(()), sum_unit(mechanism, numbers)
    if mechanism.server_noisy:
        std = server_noise(numbers, total.variance)
        update = _noised(mechanism, mesh, derive(keys.noise, _SERVER_NOISE), update, std * mechanism.clip / unit)
    realised = jnp.where(total.weight > 0, total.weight, 1.0)
    denominator = numbers.denominator if mechanism.denominator == "expected" else realised
    aggregate = jax.tree.map(lambda leaf: leaf * (unit / denominator), narrow(update))

    counted = jnp.maximum(total.participants - total.nonfinite, 1)
    info = {name: value / counted for name, value in total.info.items()} | {"participants": total.participants}
    # Parameters in half precision got an update in single precision.
    moved = jax.tree.map(_as, algorithm.server_update(server, aggregate), server)
    if mechanism.denominator == "participants":  # it shows an empty cohort anyway
        moved = jax.tree.map(lambda new, old: jnp.where(total.weight > 0, new, old), moved, server)
    server = moved
    released = jnp.float32(math.inf if mechanism.release is None else mechanism.release.noise)
    ledger = Ledger(
        drawn.sampled,
        numbers.client_noise,
        numbers.weights,
        std,
        numbers.noise_multiplier,
        released,
        numbers.example_noise,
    )
    return server, Records(ledger, info, total.nonfinite, _all_finite(server))


def _noised(mechanism: Mechanism, mesh: Mesh, key: Key[Array, "*S"], update: Tree, std: Float[Array, ""]) -> Tree:
    """The server's noise on a sum; `std` in the sum's unit. Exact up to what single precision draws."""
    if mechanism.noise == "grid":
        return add_grid_noise(key, update, mesh)
    zero = jax.tree.map(jnp.zeros_like, narrow(update))
    return add(update, widen(add_gaussian(key, zero, std)))


def _as(new: Array, old: Array) -> Array:
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _slots(mechanism: Mechanism, drawn: Draw, ids: Int[Array, "S"]) -> _Slots:
    """A round's numbers at these clients; those that only fill up the mesh never take part."""

    def at(values: Array) -> Array:
        rows = jnp.zeros_like(ids) if values.shape[0] == 1 else ids  # the same for all
        return values.at[rows].get(mode="fill", fill_value=0)

    sampled = drawn.sampled.at[ids].get(mode="fill", fill_value=False)
    numbers, weights = drawn.numbers, at(drawn.numbers.weights)
    scale = weights / sum_unit(mechanism, numbers)
    noise = at(numbers.client_noise), at(numbers.example_noise)
    return _Slots(ids, sampled, weights, scale, *noise, at(drawn.cost))


def _cohort(
    algorithm: Algorithm,
    chunk: int,
    keys: Keys,
    slots: _Slots,
    total: Sums | None,
    server: Tree,
    states: Tree,
    clients: Clients,
) -> tuple[Sums, Tree]:
    """Add one device's participants to its sums, `chunk` at a time; the loop's length follows their number."""
    own = slots.ids.shape[0]
    chunk = min(chunk, own)
    chunks = -(-jnp.sum(slots.sampled) // chunk)
    order = jnp.nonzero(slots.sampled, size=-(-own // chunk) * chunk, fill_value=own)[0]

    @functools.partial(jax.jit, inline=True)
    def one(slot: Int[Array, ""], states: Tree) -> tuple[Sums, Tree]:
        return _participant(algorithm, keys, slots, slot, server, states, clients)

    # Of one client, plain code: a batch axis of 1 would cost the fast matrix products.
    of_chunk = one if chunk == 1 else jax.vmap(one, (0, None))

    def body(i: Int[Array, ""], carry: tuple) -> tuple:
        part, states = carry
        slot = order[i] if chunk == 1 else lax.dynamic_slice(order, (i * chunk,), (chunk,))
        added, state = of_chunk(slot, states)
        states = jax.tree.map(lambda all_, new: all_.at[slot].set(new, mode="drop"), states, state)
        return optax.tree.add(part, added), states

    def settle(part: Sums) -> Sums:
        if chunk == 1:
            part = jax.tree.map(lambda leaf: leaf[None], part)
        exact = algorithm.mechanism.noisy and algorithm.mechanism.noise == "float"
        return add_up(part._replace(update=widen(part.update)) if exact else part)

    lanes = () if chunk == 1 else (chunk,)
    shapes, _ = jax.eval_shape(one, jnp.zeros((), order.dtype), states)
    zero = jax.tree.map(lambda leaf: jnp.zeros((*lanes, *leaf.shape), leaf.dtype), shapes)

    def block(b: Int[Array, ""], carry: tuple) -> tuple:
        total, states = carry
        part, states = lax.fori_loop(b * _BLOCK, jnp.minimum((b + 1) * _BLOCK, chunks), body, (zero, states))
        return add(total, settle(part)), states

    return lax.fori_loop(0, -(-chunks // _BLOCK), block, (settle(zero) if total is None else total, states))


def _participant(
    algorithm: Algorithm,
    keys: Keys,
    slots: _Slots,
    slot: Int[Array, ""],
    server: Tree,
    states: Tree,
    clients: Clients,
) -> tuple[Sums, Tree]:
    """One client's share of the sums, and its new state; a slot beyond the last one contributes zero."""
    mechanism = algorithm.mechanism
    real = slot < slots.ids.shape[0]
    ids, weight, scale = slots.ids[slot], *(jnp.where(real, x[slot], 0.0) for x in (slots.weights, slots.scale))
    old = jax.tree.map(lambda leaf: leaf[slot], states)
    data = ClientData(clients.inputs, clients.labels, clients.train[slot], clients.train_size[slot])
    client_key = derive(keys.clients, _CLIENT, ids)
    if mechanism.examples is not None:
        noise = StepNoise(slots.example_noise[slot], derive(keys.noise, _CLIENT, ids))
        data = dataclasses.replace(data, noise=noise)
    message, new, info = algorithm.client_update(client_key, server, old, data)
    if mechanism.examples is not None and "private_steps" not in info:
        raise ValueError(
            f"mechanism.examples={mechanism.examples!r}, but client_update of {algorithm.name!r} makes no private "
            "steps: give it to jaxfl.local.train.train as `private`, and return the info of that, or leave it out"
        )
    if message.mask is not None and mechanism.broken is None:
        raise ValueError(
            "message.mask is private, so the noise on it has no finite epsilon: say why in mechanism.broken"
        )

    update, norm = clip(message.update, mechanism.clip)
    finite = jnp.isfinite(norm) & _all_finite(new)
    update = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), update)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    if mechanism.clients_noisy:  # also on a dropped update: the accountant counts this noise
        update = add_gaussian(derive(keys.noise, _CLIENT_NOISE, ids), update, slots.noise[slot] * mechanism.clip)
    if message.mask is not None:
        update = keep(message.mask, update)
    if mechanism.adaptive:
        released = _released(
            derive(keys.noise, _RELEASE, ids), mechanism.release, message, old.account.released, finite
        )
        new = new._replace(account=Account(released, old.account.spent + slots.cost[slot]))

    if taken := _RESERVED & info.keys():
        raise ValueError(
            f"info={sorted(taken)} from client_update of {algorithm.name!r}: rows of metrics have these names already, "
            "choose others"
        )
    info = info | {"update_norm": norm, "clipped": (norm > mechanism.clip).astype(jnp.float32)}
    if mechanism.noise == "grid":
        mechanism.check_resolution(sum(leaf.size for leaf in jax.tree.leaves(update)))
        update = round_within(update, jnp.minimum(norm, mechanism.clip), scale, mechanism.clip * scale)
    else:
        update = jax.tree.map(lambda leaf: leaf * scale, update)
    share = Sums(
        update=update,
        variance=(weight * slots.noise[slot]) ** 2,
        weight=weight,
        info={name: jnp.where(finite & real, value, 0.0) for name, value in info.items()},
        participants=real.astype(jnp.float32),
        nonfinite=(real & ~finite).astype(jnp.int32),
    )
    return share, new


def _released(
    key: Key[Array, "*S"], release: Release | None, message: Message, old: Float[Array, ""], finite: Bool[Array, ""]
) -> Float[Array, ""]:
    """The number that everyone knows of a client after a round."""
    if release is None:
        return old
    if message.release is None:
        raise ValueError("message.release=None: mechanism.release announces a number, so send one")
    # Also for a dropped update: that it was dropped is not for everyone to know.
    sound = finite & jnp.isfinite(message.release)
    number = jnp.clip(jnp.where(sound, message.release, release.low), release.low, release.high)
    if release.noise:
        number = add_gaussian(key, number, jnp.float32(release.noise * (release.high - release.low)))
        number = jnp.clip(number, release.low, release.high)
    return number


def _all_finite(tree: Tree) -> Bool[Array, ""]:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in floats])) if floats else jnp.array(True)
