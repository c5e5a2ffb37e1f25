"""Clients on a mesh of devices. Each device holds its clients' examples, or all examples."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from jaxfl.data.clients import shard
from jaxfl.local.lanes import longest
from jaxfl.types import ClientData, Clients, Rows, StepNoise, Tree

_SMALL_CLIENT = 512
"""Number of examples. If no client has more, all clients have the same program."""

_MOST_CAPACITIES = 4
"""Largest number of capacities of a population. Each of them takes time to compile."""

_OVERHEAD = 256
"""Cost of starting one client, as a number of padding positions that cost as much."""

_WORK = 4
"""Least cost of training on one example, as a number of padding positions that cost as much."""


class Population(NamedTuple):
    """Clients on a mesh of devices, and the facts that their programs depend on."""

    clients: Clients
    """The clients, with any padding clients that give each device equally many."""
    num_clients: int
    """Number of clients without padding."""
    mesh: Mesh
    layout: P | Clients = P("clients")
    """Sharding of `clients`. Each device holds its own clients' examples, or all examples."""
    frozen: Tree = ()
    """Frozen weights of the model, all of them on every device."""
    size: int | None = None
    """Number of training examples per client if all clients have equally many, else None.

    Equal sizes let vectorised clients share one loop length.
    """
    capacities: tuple[int, ...] = ()
    """Numbers of training positions that programs are made for (see `capacities_of`)."""
    test_capacities: tuple[int, ...] = ()
    """Numbers of test positions that programs are made for."""

    @property
    def num_slots(self) -> int:
        """Number of clients with the padding clients of `clients`."""
        return self.clients.num_clients


def mesh_of(clients: Clients, devices: list[jax.Device] | None) -> Mesh:
    """Return a mesh with one axis `clients`, on at most as many devices as there are clients.

    Args:
        clients: The clients, of whom only the number is read.
        devices: Devices of the mesh, which orders them by process. None stands for all devices of
            the default backend.
    """
    ordered = sorted(devices or jax.devices(), key=lambda device: device.process_index)
    return Mesh(np.array(ordered[: max(1, clients.num_clients)]), ("clients",))


def place(clients: Clients, devices: list[jax.Device] | None = None) -> Population:
    """Put clients on a mesh with one axis `clients`. Each device gets its own clients' examples.

    A process places the clients of its own devices, and reads no other examples.

    Args:
        clients: Host arrays, the same in all processes.
        devices: The devices to use. None stands for all devices of the default backend, in all
            processes.

    Raises:
        ValueError: A process has no device of the mesh, because `devices` leave it out, or because
            there are too few clients.
    """
    mesh = mesh_of(clients, devices)
    devices = list(mesh.devices.flat)
    if len({device.process_index for device in devices}) < jax.process_count():
        raise ValueError(
            f"devices must include one of each of {jax.process_count()} processes, got "
            f"{len(devices)} devices for {clients.num_clients} clients. Give devices of every "
            "process and more clients, or start fewer processes."
        )
    own = [b for b, device in enumerate(devices) if device.process_index == jax.process_index()]
    rows = in_rows(shard(clients, mesh.size, own))
    placed = jax.tree.map(functools.partial(_from_blocks, mesh, own), rows)
    return sized(Population(placed, clients.num_clients, mesh), clients)


def _from_blocks(mesh: Mesh, own: list[int], blocks: np.ndarray) -> Array:
    """Return the array of all devices, of which this process has the blocks of its own devices."""
    # All blocks have one length, so each process knows the global shape from its own blocks.
    shape = (len(blocks) // len(own) * mesh.size, *blocks.shape[1:])
    shards = [
        jax.device_put(block, mesh.devices.flat[b])
        for b, block in zip(own, np.split(blocks, len(own)))
    ]
    sharding = NamedSharding(mesh, P("clients"))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def sized(population: Population, clients: Clients) -> Population:
    """Return the population with its common size and its capacities.

    Args:
        population: The clients on their devices.
        clients: The same clients, with their sizes on the host.
    """
    return population._replace(
        size=common_size(clients),
        capacities=capacities_of(np.asarray(clients.train_size)),
        test_capacities=capacities_of(np.asarray(clients.test_size)),
    )


def common_size(clients: Clients) -> int | None:
    """Return the number of training examples per client, or None if clients differ."""
    sizes = np.asarray(clients.train_size)
    if (sizes == sizes[0]).all():
        return int(sizes[0])
    return None


def capacities_of(sizes: Int[np.ndarray, "C"]) -> tuple[int, ...]:
    """Return the numbers of positions that programs are made for, in ascending order.

    A client runs the program with the smallest capacity that holds its examples. Some work of a
    program, such as ordering the examples, is done for padding too. Each further program takes time
    to compile, so it must save a third of the estimated work of all clients.

    >>> capacities_of(np.array([3, 500, 40]))
    (500,)
    >>> capacities_of(np.array([3, 3, 50_000, 2, 1]))
    (3, 50000)
    """
    # A capacity of 0 would ask for batches without examples.
    found = (max(1, int(sizes.max())),)
    ordered = np.sort(sizes)
    # Candidates are the largest sizes within each half octave.
    octaves = np.ceil(2 * np.log2(np.maximum(ordered, 1)))
    candidates = [int(size) for size in ordered[np.flatnonzero(np.diff(octaves))] if size]

    work = functools.partial(_estimated_work, ordered)
    while found[-1] > _SMALL_CLIENT and len(found) < _MOST_CAPACITIES and candidates:
        # Each pass tries the one further capacity that saves the most work.
        finer = min((tuple(sorted({*found, size})) for size in candidates), key=work)
        if 3 * work(finer) > 2 * work(found):
            break
        found = finer
    return found


def _estimated_work(ordered: Int[np.ndarray, "C"], capacities: tuple[int, ...]) -> float:
    """Return the estimated work of all clients, whose sizes are in ascending order."""
    clients = np.diff(np.searchsorted(ordered, capacities, side="right"), prepend=0)
    # Each client costs its capacity with padding, a fixed overhead, and its training.
    positions = clients @ np.array(capacities)
    overhead = _OVERHEAD * len(ordered)
    training = _WORK * ordered.sum(dtype=np.int64)
    return float(positions + overhead + training)


def in_rows(clients: Clients) -> Clients:
    """Return the clients with their inputs packed as `jaxfl.types.Rows`, as devices hold them."""
    placed: Any = Rows.of(clients.inputs)
    return clients._replace(inputs=placed)


def everywhere(mesh: Mesh, tree: Tree) -> Tree:
    """Return the arrays, replicated on all devices of a mesh."""
    sharding = NamedSharding(mesh, P())
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    # With several processes `device_put` would compare values of the hosts over the network, and
    # reject arrays that are on devices.
    return jax.jit(_same, out_shardings=sharding)(tree)


def _same(tree: Tree) -> Tree:
    return tree


def on_devices(
    work: Callable[..., Tree], population: Population, *layouts: P | Clients
) -> Callable[..., Tree]:
    """Return `work` as a function of arrays on all devices, where each device has its own part.

    Args:
        work: Function of one device's arrays. Its results have an axis of clients or devices.
        population: The clients on their devices.
        layouts: Sharding of each argument.
    """
    # Algorithms start loops from constants, which `check_vma` considers replicated.
    return jax.shard_map(
        work, mesh=population.mesh, in_specs=layouts, out_specs=P("clients"), check_vma=False
    )


def by_capacity(
    capacities: tuple[int, ...], size: Int[Array, ""] | int, work: Callable[[int], Tree]
) -> Tree:
    """Return `work(capacity)` for the smallest capacity that holds a client's examples.

    The largest of several vectorised clients decides. If the index differed by client, XLA would
    compute all branches.

    Args:
        capacities: Capacities in ascending order (see `capacities_of`).
        size: Number of the client's examples.
        work: Function of a capacity. Its results have the same shapes for all capacities.
    """
    if len(capacities) == 1:
        return work(capacities[0])
    # The number of capacities that are too small is the index of the first one that is not.
    level = jnp.sum(size > jnp.array(capacities[:-1]))
    branches = [functools.partial(work, capacity) for capacity in capacities]
    return lax.switch(longest(level), branches)


def data_of(
    clients: Clients,
    slot: Int[Array, ""] | int,
    client_id: Int[Array, ""] | int,
    capacity: int,
    noise: StepNoise | None = None,
    index: Int[Array, ""] | int = 0,
    size: Int[Array, ""] | int | None = None,
) -> ClientData:
    """Return the `ClientData` of one client in a round.

    Args:
        clients: The clients on the devices.
        slot: Position of the client among them.
        client_id: Index of the client among all clients.
        capacity: Number of positions of its data, at least its size.
        noise: Noise of its private local steps. None stands for no such steps.
        index: Index of the round, from 0.
        size: Number of the client's training examples. A constant (`Population.size`) gives
            vectorised clients one loop length. None reads the number from `clients`.
    """
    # If the size is given, the program reads none from the clients.
    own = clients.train_size[slot] if size is None else jnp.int32(size)
    rows = clients.train
    return ClientData(
        clients.inputs,
        clients.labels,
        rows.flat,
        own,
        client_id,
        noise,
        index,
        rows.start[slot],
        capacity,
    )
