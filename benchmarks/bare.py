"""Lower bounds for the engine: local SGD alone on prepared data, and the Fisher diagonal beside a gradient."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfl.backend import compiler_options
from jaxfl.engine import Population
from jaxfl.local.fisher import fisher_diagonal
from jaxfl.local.train import cross_entropy
from jaxfl.types import Model, Params


def bare_round(
    model: Model, population: Population, inputs: np.ndarray, labels: np.ndarray, batch_size: int, steps: int
) -> Callable[[], None]:
    """Every client's SGD steps on batches laid out beforehand, summed: no gather, clip, noise or ledger.

    Args:
        model: the network.
        population: names the devices.
        inputs: [C, N, H, W, channels] bytes.
        labels: [C, N].
        batch_size: B.
        steps: SGD steps per client.
    """
    mesh, count = population.mesh, len(labels)
    part = model.microbatch or batch_size
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
                return jax.grad(lambda p: cross_entropy(model.apply(p, x[i, j]), y[i, j], weights))(p)

            parts = x.shape[1]
            zero = jax.tree.map(jnp.zeros_like, p)
            total = (
                gradient(0)
                if parts == 1
                else lax.fori_loop(0, parts, lambda j, t: jax.tree.map(jnp.add, t, gradient(j)), zero)
            )
            return jax.tree.map(lambda a, g: a - 0.01 / parts * g, p, total)

        return lax.fori_loop(0, steps, step, params)

    def device(params: Params, x: Array, y: Array) -> Params:
        def client(i: Array, total: Params) -> Params:
            return jax.tree.map(jnp.add, total, local(params, x[i], y[i]))

        total = lax.fori_loop(0, len(x), client, jax.tree.map(jnp.zeros_like, params))
        return lax.psum(total, "clients")

    specs = (P(), P("clients"), P("clients"))
    sharded = jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    program = jax.jit(sharded, compiler_options=compiler_options(mesh))
    return lambda: jax.block_until_ready(program(params, x, y))


def fisher_cost(model: Model, inputs: np.ndarray, labels: np.ndarray, batch_size: int, repeats: int) -> float:
    """Median processor time of the exact Fisher diagonal over that of plain gradients, same batches, in turn."""
    batches = len(labels) // batch_size
    x = jax.vmap(model.prepare)(
        jnp.asarray(inputs)[: batches * batch_size].reshape(batches, batch_size, *inputs.shape[1:])
    )
    y = jnp.asarray(labels[: batches * batch_size].reshape(batches, batch_size))
    weights, params = jnp.ones(batch_size), model.init(jax.random.key(0))

    def total(one: Callable) -> Callable[[Params, Array, Array], Params]:
        def run(params: Params, x: Array, y: Array) -> Params:
            def step(sum_: Params, batch: tuple) -> tuple[Params, None]:
                return jax.tree.map(jnp.add, sum_, one(params, *batch)), None

            return lax.scan(step, jax.tree.map(jnp.zeros_like, params), (x, y))[0]

        return jax.jit(run)

    programs = {
        "fisher": total(lambda p, x, y: fisher_diagonal(model, p, x, y, weights)),
        "gradient": total(lambda p, x, y: jax.grad(lambda p: cross_entropy(model.apply(p, x), y, weights))(p)),
    }
    seconds = in_turn(
        {name: functools.partial(program, params, x, y) for name, program in programs.items()}, 3 * repeats
    )
    return seconds["fisher"] / seconds["gradient"]


def in_turn(programs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median processor seconds of each, taken in turn after one call to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats + 1):
        for name, program in programs.items():
            start = time.process_time()
            jax.block_until_ready(program())
            if repeat:
                seconds[name].append(time.process_time() - start)
    return {name: float(np.median(values)) for name, values in seconds.items()}
