"""Clients on a mesh of devices: each device holds its own clients, with their examples or all examples."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int

from jaxfl.data.clients import shard
from jaxfl.types import ClientData, Clients, Rows, StepNoise, Tree


class Population(NamedTuple):
    """Clients on a device mesh: each device holds its own clients and, by `layout`, their examples or all examples.

    `frozen` are a model's frozen weights, the whole of them on every device. `size` is the number of training examples
    of every client, where all have as many: of vectorised ones none then waits for another, and loops have one length.
    """

    clients: Clients
    number: int
    mesh: Mesh
    layout: P | Clients = P("clients")
    frozen: Tree = ()
    size: int | None = None


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
        shards = [jax.device_put(block, devices[b]) for b, block in zip(local, np.split(blocks, len(local)))]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    placed = jax.tree.map(put, in_rows(shard(clients, mesh.size, local)))
    return Population(placed, clients.number, mesh, size=common_size(clients))


def common_size(clients: Clients) -> int | None:
    """The number of training examples of every client; None where they differ, or are not known."""
    sizes = clients.train_size
    return int(sizes[0]) if isinstance(sizes, np.ndarray) and len(sizes) and (sizes == sizes[0]).all() else None


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


def data_of(
    clients: Clients,
    slot: Int[Array, ""] | int,
    number: Int[Array, ""] | int,
    noise: StepNoise | None = None,
    index: Int[Array, ""] | int = 0,
    size: int | None = None,
) -> ClientData:
    """What the client in a slot sees, by its number among all, in the round of number `index`.

    `size` is the population's: a constant, where vectorised clients would each have a number of their own.
    """
    own = clients.train_size[slot] if size is None else jnp.int32(size)
    return ClientData(clients.inputs, clients.labels, clients.train[slot], own, number, noise, index)
