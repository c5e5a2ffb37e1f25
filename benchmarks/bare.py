"""Local SGD on prepared data, a lower bound for the engine, and the cost of a Fisher diagonal."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import busy_clock, in_turn, medians
from jaxfl._support.backend import compiler_options
from jaxfl.engine.mesh import Population
from jaxfl.local.fisher import fisher_diagonal
from jaxfl.types import Model, Params, Tree


def bare_round(
    model: Model,
    population: Population,
    inputs: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    steps: int,
    chunk: int = 1,
) -> Callable[[], None]:
    """Return a call that runs and sums every client's SGD steps on batches prepared beforehand.

    There is no gather, clip, noise or ledger.

    Args:
        model: The network.
        population: Clients on their devices.
        inputs: Images `[C, N, H, W, channels]` as bytes.
        labels: Labels `[C, N]`.
        batch_size: B, examples of a step.
        steps: SGD steps per client.
        chunk: Clients vectorised at a time on each device.
    """
    mesh, count = population.mesh, len(labels)
    part = model.largest_part or batch_size
    order = np.arange(steps * batch_size).reshape(steps, -1, part) % labels.shape[1]
    fill = -count % mesh.size
    inputs, labels = (np.concatenate([a, a[:fill]]) for a in (inputs, labels))
    x = jax.jit(jax.vmap(jax.vmap(jax.vmap(model.prepare))))(inputs[:, order])
    x, y = jax.device_put((x, labels[:, order]), NamedSharding(mesh, P("clients")))
    params = jax.device_put(model.init(jax.random.key(0)), NamedSharding(mesh, P()))
    weights = jnp.ones(part)

    def local(params: Params, x: Array, y: Array) -> Params:
        def step(i: Array, p: Params) -> Params:
            def gradient(j: Array | int) -> Params:
                return jax.grad(
                    lambda p: model.task.mean_loss(model.apply(p, x[i, j]), y[i, j], weights)
                )(p)

            parts = x.shape[1]
            zero = jax.tree.map(jnp.zeros_like, p)
            total = (
                gradient(0)
                if parts == 1
                else lax.fori_loop(
                    0, parts, lambda j, t: jax.tree.map(jnp.add, t, gradient(j)), zero
                )
            )
            return jax.tree.map(lambda a, g: a - 0.01 / parts * g, p, total)

        return lax.fori_loop(0, steps, step, params)

    specs = (P(), P("clients"), P("clients"))
    program = sum_over_clients(
        lambda i, params, x, y: local(params, x[i], y[i]), population, specs, chunk
    )
    return lambda: jax.block_until_ready(program(params, x, y))


def sum_over_clients(
    client_fn: Callable[..., Tree], population: Population, specs: tuple[P, ...], chunk: int
) -> Callable[..., Tree]:
    """Return a program that sums `client_fn` over all slots, in a loop like the engine's.

    The sum matters only as work: slots of padding count, and so do repetitions in a last chunk.

    Args:
        client_fn: Function of `(slot, *arguments)`. `slot` counts the clients of its device.
        population: Clients on their devices.
        specs: Sharding of each argument.
        chunk: Clients vectorised at a time on each device. A partial last chunk repeats its
            last client, and costs as much as a full one.
    """
    mesh = population.mesh
    slots_per_device = population.num_slots // mesh.size

    def device(*arguments: Tree) -> Tree:
        def add(i: Array, total: Tree) -> Tree:
            if chunk == 1:
                # The engine also runs plain code in this case.
                return jax.tree.map(jnp.add, total, client_fn(i, *arguments))
            slots = jnp.minimum(i * chunk + jnp.arange(chunk), slots_per_device - 1)
            parts = jax.vmap(lambda slot: client_fn(slot, *arguments))(slots)
            return jax.tree.map(lambda t, leaf: t + leaf.sum(0), total, parts)

        shapes = jax.eval_shape(client_fn, jnp.int32(0), *arguments)
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return lax.psum(lax.fori_loop(0, -(-slots_per_device // chunk), add, zero), "clients")

    sharded = jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(sharded, compiler_options=compiler_options(mesh))


def fisher_cost(
    model: Model, inputs: np.ndarray, labels: np.ndarray, batch_size: int, repeats: int
) -> float:
    """Return the median time of the exact Fisher diagonal, relative to plain gradients.

    Both take turns on the same batches. On a CPU, processor time is measured.

    Args:
        model: The network.
        inputs: Images `[N, H, W, channels]` of one client.
        labels: Labels `[N]`.
        batch_size: Number of examples of a batch. A partial last batch is left out.
        repeats: A third of the number of turns.
    """
    batches = len(labels) // batch_size
    x = jax.vmap(model.prepare)(
        jnp.asarray(inputs)[: batches * batch_size].reshape(batches, batch_size, *inputs.shape[1:])
    )
    y = jnp.asarray(labels[: batches * batch_size].reshape(batches, batch_size))
    weights, params = jnp.ones(batch_size), model.init(jax.random.key(0))

    def total(gradient_fn: Callable) -> Callable[[Params, Array, Array], Params]:
        def run(params: Params, x: Array, y: Array) -> Params:
            def step(sum_: Params, batch: tuple) -> tuple[Params, None]:
                return jax.tree.map(jnp.add, sum_, gradient_fn(params, *batch)), None

            return lax.scan(step, jax.tree.map(jnp.zeros_like, params), (x, y))[0]

        return jax.jit(run)

    programs = {
        "fisher": total(lambda p, x, y: fisher_diagonal(model, p, x, y, weights)),
        "gradient": total(
            lambda p, x, y: jax.grad(lambda p: model.task.mean_loss(model.apply(p, x), y, weights))(
                p
            )
        ),
    }
    calls = {name: functools.partial(program, params, x, y) for name, program in programs.items()}
    seconds = medians(in_turn(calls, 3 * repeats, busy_clock()))
    return seconds["fisher"] / seconds["gradient"]
