"""One round, and many rounds in one compiled program.

A round is: sample -> for each participant: client_update, clip, client noise -> weighted sum -> server
noise -> divide -> server_update. Only this file does it, for every algorithm.

Keys are derived by round, then purpose, then client id, so that neither chunk size, device count nor the
order of a cohort changes a client's randomness.
"""

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

from jaxfl.data.clients import shard
from jaxfl.local.masks import keep
from jaxfl.privacy.clip import clip
from jaxfl.privacy.mechanism import Release, RoundNoise, adapt, round_numbers, server_noise
from jaxfl.privacy.noise import add_gaussian
from jaxfl.types import Account, Algorithm, ClientData, Clients, Ledger, Message, Tree

_SAMPLE, _CLIENT, _CLIENT_NOISE, _SERVER_NOISE, _RELEASE = range(5)


class Population(NamedTuple):
    """Clients on a device mesh: each device holds its own clients and their examples."""

    clients: Clients
    number: int
    mesh: Mesh


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
    info: dict[str, Float[Array, "T"]]
    nonfinite: Int[Array, "T"]
    server_finite: Bool[Array, "T"]


class _Slots(NamedTuple):
    """Per client of one round, sharded like the clients."""

    ids: Int[Array, "C"]
    sampled: Bool[Array, "C"]
    weights: Float[Array, "C"]
    noise: Float[Array, "C"]
    cost: Float[Array, "C"]


class _Cohort(NamedTuple):
    """Sums over a cohort."""

    update: Tree
    variance: Float[Array, ""]
    weight: Float[Array, ""]
    info: dict[str, Float[Array, ""]]
    participants: Float[Array, ""]
    nonfinite: Int[Array, ""]


def place(clients: Clients, devices: list[jax.Device] | None = None) -> Population:
    """Put clients on a mesh with one axis `clients`, each device with its own clients and their examples.

    Of several processes, each puts the clients of its own devices there, and reads no other examples.

    Args:
        clients: host arrays, the same in all processes.
        devices: which devices to use; all of the default backend, of all processes, where None.

    Raises:
        ValueError: a process would have no clients.
    """
    devices = sorted(devices or jax.devices(), key=lambda device: device.process_index)[: max(1, clients.number)]
    mesh = Mesh(np.array(devices), ("clients",))
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


def initialize(key: Key[Array, "*P"], algorithm: Algorithm | Points, population: Population) -> tuple[Tree, Tree]:
    """Server state, replicated, and client states, on the devices of their clients."""
    quick = {"xla_backend_optimization_level": 0}  # it runs once: compiling well would take longer than running

    def init(clients: Clients, key: Key[Array, "*P"]) -> tuple[Tree, Tree]:
        return over_points(lambda algorithm, key: algorithm.init(key, clients), algorithm)(key)

    return jax.jit(init, out_shardings=_shardings(algorithm, population), compiler_options=quick)(
        population.clients, key
    )


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
    """One program for up to `segment` rounds: `(key, start, rounds, server, states) -> (server, states, records)`.

    `start` and `rounds` are dynamic, so one compilation serves a whole run; `server` and `states` are
    donated. Rows of the records beyond `rounds` are zero. Of `Points`, all but `start` and `rounds` have a leading
    axis P.

    Args:
        algorithm: what a round does.
        population: the clients on their devices.
        chunk: clients vectorised at a time on each device; memory grows with it, and not with the cohort.
        segment: the largest number of rounds per call.
    """

    def run(clients: Clients, key: Key[Array, "*P"], start: Any, rounds: Any, server: Tree, states: Tree) -> tuple:
        def rounds_of(algorithm: Algorithm, key: Key[Array, ""], server: Tree, states: Tree) -> tuple:
            def one_round(index: Int[Array, ""], server: Tree, states: Tree) -> tuple[Tree, Tree, Records]:
                round_key = jax.random.fold_in(key, index)
                return _round(algorithm, population._replace(clients=clients), chunk, round_key, index, server, states)

            first = jnp.asarray(start, jnp.int32)
            shapes = jax.eval_shape(one_round, first, server, states)[2]
            records = jax.tree.map(lambda leaf: jnp.zeros((segment, *leaf.shape), leaf.dtype), shapes)

            def body(i: Int[Array, ""], carry: tuple) -> tuple:
                server, states, records = carry
                server, states, record = one_round(first + i, server, states)
                return server, states, jax.tree.map(lambda all_, one: all_.at[i].set(one), records, record)

            return lax.fori_loop(0, jnp.minimum(rounds, segment), body, (server, states, records))

        return over_points(rounds_of, algorithm)(key, server, states)

    options = compiler_options(population.mesh)
    all_, own = _shardings(algorithm, population)
    program = jax.jit(
        run, donate_argnames=("server", "states"), out_shardings=(all_, own, all_), compiler_options=options
    )
    return functools.partial(program, population.clients)


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """What XLA's defaults leave to be had on a CPU: a FedDPA round on two cores takes 0.8 of the time.

    Where each core is a device of its own, threads within an operation would only disturb the others.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    wide = {"xla_cpu_prefer_vector_width": 512}  # where the processor has such vectors
    alone = {"xla_cpu_multi_thread_eigen": False, "xla_disable_hlo_passes": "cpu-parallel-task-assigner"}
    return wide | alone if mesh.size > 1 else wide


def _round(
    algorithm: Algorithm,
    population: Population,
    chunk: int,
    key: Key[Array, ""],
    index: Int[Array, ""],
    server: Tree,
    states: Tree,
) -> tuple[Tree, Tree, Records]:
    mechanism, count = algorithm.mechanism, population.number
    numbers = round_numbers(mechanism, count, index)
    sampled = mechanism.sampling.sample(jax.random.fold_in(key, _SAMPLE), count)
    cost = jnp.zeros(count)
    if mechanism.adaptive:
        if not hasattr(states, "account"):
            raise ValueError("client states without a field `account`: start it with jaxfl.server.init_account")
        account = jax.tree.map(lambda leaf: leaf[:count], states.account)
        numbers, cost, afford = adapt(mechanism, numbers, account)
        sampled &= afford
    slots = _slots(numbers, sampled, cost, population.clients.number)

    def cohort(slots: _Slots, server: Tree, states: Tree, clients: Clients) -> tuple[_Cohort, Tree]:
        total, states = _cohort(algorithm, chunk, key, slots, server, states, clients)
        return lax.psum(total, "clients"), states

    by_client = P("clients")
    total, states = jax.shard_map(
        cohort,
        mesh=population.mesh,
        in_specs=(by_client, P(), by_client, by_client),
        out_specs=(P(), by_client),
        check_vma=False,  # algorithms start loops from constants, which the check takes for replicated
    )(slots, server, states, population.clients)

    update, std = total.update, jnp.zeros(())
    if mechanism.server_noisy:
        std = server_noise(numbers, total.variance)
        update = add_gaussian(jax.random.fold_in(key, _SERVER_NOISE), update, std * mechanism.clip)
    realised = jnp.where(total.weight > 0, total.weight, 1.0)
    denominator = numbers.denominator if mechanism.denominator == "expected" else realised
    aggregate = jax.tree.map(lambda leaf: leaf / denominator.astype(leaf.dtype), update)

    counted = jnp.maximum(total.participants - total.nonfinite, 1)
    info = {name: value / counted for name, value in total.info.items()} | {"participants": total.participants}
    server = algorithm.server_update(server, aggregate, info)
    released = jnp.float32(math.inf if mechanism.release is None else mechanism.release.noise)
    ledger = Ledger(sampled, numbers.client_noise, numbers.weights, std, numbers.noise_multiplier, released)
    return server, states, Records(ledger, info, total.nonfinite, _all_finite(server))


def _slots(numbers: RoundNoise, sampled: Bool[Array, "C"], cost: Float[Array, "C"], padded: int) -> _Slots:
    """Spread a round's numbers over clients; the empty clients that fill up the mesh never take part."""
    count = sampled.shape[0]

    def spread(values: Array) -> Array:
        return jnp.pad(jnp.broadcast_to(values, (count,)), (0, padded - count))

    per_client = sampled, numbers.weights, numbers.client_noise, cost
    return _Slots(jnp.arange(padded), *(spread(values) for values in per_client))


def _cohort(
    algorithm: Algorithm, chunk: int, key: Key[Array, ""], slots: _Slots, server: Tree, states: Tree, clients: Clients
) -> tuple[_Cohort, Tree]:
    """Sum one device's participants, `chunk` at a time; the loop's length follows their number."""
    own = slots.ids.shape[0]
    chunk = min(chunk, own)
    participants = jnp.sum(slots.sampled)
    order = jnp.nonzero(slots.sampled, size=-(-own // chunk) * chunk, fill_value=own)[0]

    def one(slot: Int[Array, ""], states: Tree) -> tuple[_Cohort, Tree]:
        return _participant(algorithm, key, slots, slot, server, states, clients)

    shapes, _ = jax.eval_shape(one, jnp.zeros((), order.dtype), states)
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def body(i: Int[Array, ""], carry: tuple) -> tuple:
        total, states = carry
        if chunk == 1:  # plain code: a batch axis of 1 would cost the fast matrix products
            slot = order[i]
            added, state = one(slot, states)
        else:
            slot = lax.dynamic_slice(order, (i * chunk,), (chunk,))
            added, state = jax.vmap(one, (0, None))(slot, states)
            added = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), added)
        states = jax.tree.map(lambda all_, new: all_.at[slot].set(new, mode="drop"), states, state)
        return optax.tree.add(total, added), states

    return lax.fori_loop(0, -(-participants // chunk), body, (zero, states))


def _participant(
    algorithm: Algorithm,
    key: Key[Array, ""],
    slots: _Slots,
    slot: Int[Array, ""],
    server: Tree,
    states: Tree,
    clients: Clients,
) -> tuple[_Cohort, Tree]:
    """One client's share of the sums, and its new state; a slot beyond the last one contributes zero."""
    mechanism = algorithm.mechanism
    real = slot < slots.ids.shape[0]
    ids, weight = slots.ids[slot], jnp.where(real, slots.weights[slot], 0.0)
    old = jax.tree.map(lambda leaf: leaf[slot], states)
    data = ClientData(clients.inputs, clients.labels, clients.train[slot], clients.train_size[slot])
    client_key = jax.random.fold_in(jax.random.fold_in(key, _CLIENT), ids)
    message, new, info = algorithm.client_update(client_key, server, old, data)
    if message.mask is not None and mechanism.broken is None:
        raise ValueError(
            "message.mask is private, so the noise on it has no finite epsilon: say why in mechanism.broken"
        )

    update, norm = clip(message.update, mechanism.clip)
    finite = jnp.isfinite(norm) & _all_finite(new)
    update = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), update)
    new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    if mechanism.clients_noisy:  # also on a dropped update: the accountant counts this noise
        noise_key = jax.random.fold_in(jax.random.fold_in(key, _CLIENT_NOISE), ids)
        update = add_gaussian(noise_key, update, slots.noise[slot] * mechanism.clip)
    if message.mask is not None:
        update = keep(message.mask, update)
    if mechanism.adaptive:
        release_key = jax.random.fold_in(jax.random.fold_in(key, _RELEASE), ids)
        released = _released(release_key, mechanism.release, message, old.account.released, finite)
        new = new._replace(account=Account(released, old.account.spent + slots.cost[slot]))

    info = info | {"update_norm": norm, "clipped": (norm > mechanism.clip).astype(jnp.float32)}
    share = _Cohort(
        update=jax.tree.map(lambda leaf: leaf * weight.astype(leaf.dtype), update),
        variance=(weight * slots.noise[slot]) ** 2,
        weight=weight,
        info={name: jnp.where(finite & real, value, 0.0) for name, value in info.items()},
        participants=real.astype(jnp.float32),
        nonfinite=(real & ~finite).astype(jnp.int32),
    )
    return share, new


def _released(
    key: Key[Array, ""], release: Release | None, message: Message, old: Float[Array, ""], finite: Bool[Array, ""]
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
