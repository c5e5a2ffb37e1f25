"""Clients on a mesh of devices: each device holds its own clients, with their examples or all examples."""

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

_SMALL = 512
"""Examples of the largest client up to which all clients have the same program."""

_MOST = 4
"""Capacities of a population, each of which takes time to compile."""

_OVERHEAD = 256
"""Positions whose padding costs as much as the start of a client does."""

_WORK = 4
"""Positions whose padding costs at most as much as one example does that is trained on."""


class Population(NamedTuple):
    """Clients on a device mesh: each device holds its own clients and, by `layout`, their examples or all examples.

    `frozen` are a model's frozen weights, the whole of them on every device. `size` is the number of training examples
    of every client, where all have as many: of vectorised ones none then waits for another, and loops have one length.
    `capacities` and `test_capacities` are the numbers of positions that the clients' programs are made for (see
    `capacities_of`).
    """

    clients: Clients
    number: int
    mesh: Mesh
    layout: P | Clients = P("clients")
    frozen: Tree = ()
    size: int | None = None
    capacities: tuple[int, ...] = ()
    test_capacities: tuple[int, ...] = ()


def mesh_of(clients: Clients, devices: list[jax.Device] | None) -> Mesh:
    """One axis `clients`: the devices (None: all of the default backend) by process, no more than there are clients."""
    ordered = sorted(devices or jax.devices(), key=lambda device: device.process_index)
    return Mesh(np.array(ordered[: max(1, clients.number)]), ("clients",))


def place(clients: Clients, devices: list[jax.Device] | None = None) -> Population:
    """Put clients on a mesh with one axis `clients`, each device with its own clients and their examples.

    Each of several processes places the clients of its own devices, and reads no other examples.

    Args:
        clients: host arrays, the same in all processes.
        devices: which devices to use; all of the default backend, of all processes, where None.

    Raises:
        ValueError: a process would have no clients.
    """
    mesh = mesh_of(clients, devices)
    devices = list(mesh.devices.flat)
    local = [b for b, device in enumerate(devices) if device.process_index == jax.process_index()]
    if len({device.process_index for device in devices}) < jax.process_count():
        raise ValueError(
            f"{len(devices)} devices for {clients.number} clients leave some of {jax.process_count()} processes "
            "without any: give devices of every process and more clients, or start fewer processes"
        )
    sharding = NamedSharding(mesh, P("clients"))

    def put(blocks: np.ndarray) -> Array:
        shape = (len(blocks) // len(local) * mesh.size, *blocks.shape[1:])
        shards = [
            jax.device_put(block, devices[b])
            for b, block in zip(local, np.split(blocks, len(local)))
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    placed = jax.tree.map(put, in_rows(shard(clients, mesh.size, local)))
    return sized(Population(placed, clients.number, mesh), clients)


def sized(population: Population, clients: Clients) -> Population:
    """Return the population with what its programs depend on of the clients' sizes, which are on the host."""
    trained, tested = (
        capacities_of(np.asarray(size)) for size in (clients.train_size, clients.test_size)
    )
    return population._replace(
        size=common_size(clients), capacities=trained, test_capacities=tested
    )


def common_size(clients: Clients) -> int | None:
    """The number of training examples of every client; None where they differ."""
    sizes = np.asarray(clients.train_size)
    return int(sizes[0]) if (sizes == sizes[0]).all() else None


def capacities_of(sizes: Int[np.ndarray, "C"]) -> tuple[int, ...]:
    """Return the numbers of positions that programs are made for, in ascending order.

    A client has the least one that holds its examples. What a program does by position, such as to put them in
    order, costs the client its padding. Each further program costs the time to compile it, so that there is one for all
    unless a further one saves a third of the estimated work of all clients.

    >>> capacities_of(np.array([3, 500, 40]))
    (500,)
    >>> capacities_of(np.array([3, 3, 50_000, 2, 1]))
    (3, 50000)
    """
    found = (max(1, int(sizes.max())),)
    ordered = np.sort(sizes)
    # The largest size of every half octave.
    octaves = np.ceil(2 * np.log2(np.maximum(ordered, 1)))
    candidates = [int(size) for size in ordered[np.flatnonzero(np.diff(octaves))] if size]

    def work(capacities: tuple[int, ...]) -> float:
        clients = np.diff(np.searchsorted(ordered, capacities, side="right"), prepend=0)
        return float(
            clients @ np.array(capacities)
            + _OVERHEAD * len(ordered)
            + _WORK * ordered.sum(dtype=np.int64)
        )

    while found[-1] > _SMALL and len(found) < _MOST and candidates:
        finer = min((tuple(sorted({*found, size})) for size in candidates), key=work)
        if 3 * work(finer) > 2 * work(found):
            break
        found = finer
    return found


def in_rows(clients: Clients) -> Clients:
    """The clients with their examples as devices hold them."""
    placed: Any = Rows.of(clients.inputs)
    return clients._replace(inputs=placed)


def everywhere(mesh: Mesh, tree: Tree) -> Tree:
    """Put the same arrays on all devices of a mesh."""
    sharding = NamedSharding(mesh, P())
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.jit(_same, out_shardings=sharding)(tree)  # `device_put` is for one process


def _same(tree: Tree) -> Tree:
    return tree


def by_capacity(
    capacities: tuple[int, ...], size: Int[Array, ""] | int, work: Callable[[int], Tree]
) -> Tree:
    """Return `work(capacity)` for the least capacity that holds a client's examples.

    The largest of vectorised clients decides, because all branches would be computed if the index differed by client.
    """
    if len(capacities) == 1:
        return work(capacities[0])
    level = jnp.sum(size > jnp.array(capacities[:-1]))
    return lax.switch(
        longest(level), [functools.partial(work, capacity) for capacity in capacities]
    )


def data_of(
    clients: Clients,
    slot: Int[Array, ""] | int,
    number: Int[Array, ""] | int,
    capacity: int,
    noise: StepNoise | None = None,
    index: Int[Array, ""] | int = 0,
    size: int | None = None,
) -> ClientData:
    """What the client in a slot sees, by its number among all, in the round of number `index`.

    `capacity` is its number of positions, at least its size. `size` is the population's: a constant, where vectorised
    clients would each have a number of their own.
    """
    own = clients.train_size[slot] if size is None else jnp.int32(size)
    shared, rows = (clients.inputs, clients.labels), clients.train
    return ClientData(*shared, rows.flat, own, number, noise, index, rows.start[slot], capacity)
