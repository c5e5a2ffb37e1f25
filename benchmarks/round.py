"""Time of each part of a round, and of an evaluation.

python -m benchmarks.round

A compiled round is timed in turn with each of its parts. A part has a program of its own with the
round's shapes. Parts of the clients' work run on the round's devices in a loop over clients like
the engine's. The loop sums over clients, so that the compiler drops nothing:

- sampling: Draw and list a cohort of all clients.
- gather: Run the local training loop (order, gather, layout of batches) with a model that only adds
  its inputs.
- Fisher, masks (FedDPA): Compute the Fisher diagonal of every client's weights, then normalise,
  compare and merge.
- local steps: Run `client_update` of every client, minus gather, Fisher and masks.
- clip: Clip an update per client.
- noise: Draw noise once and add it to the sum, at the server.
- rest: The remaining time of the round. It has sums over clients and devices, health checks, client
  states, ledger, and server step. It also has the difference between parts alone and together, so
  it may be negative.

The evaluation of all clients is timed too, as a share of the round. So is bare local training (see
`benchmarks.bare`), except for FedDPA.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from jax import Array
from jax.sharding import PartitionSpec as P

from benchmarks.bare import bare_round, sum_over_clients
from benchmarks.common import OUT, chart, finish, in_turn, medians
from benchmarks.workloads import (
    WORKLOADS,
    Name,
    Workload,
    algorithm_of,
    clients_of,
    compile_round,
    examples_of,
    usual_chunk,
)
from jaxfl.engine.evaluate import compile_evaluation
from jaxfl.engine.mesh import Population, data_of, place
from jaxfl.engine.program import initialize
from jaxfl.engine.states import States
from jaxfl.local.fisher import client_fisher, normalize_per_layer
from jaxfl.local.masks import fisher_mask, merge
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import FixedSize
from jaxfl.privacy.clip import clip
from jaxfl.privacy.noise import add_gaussian
from jaxfl.types import Algorithm, Clients, Tree


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    workloads: tuple[Name, ...] = tuple(WORKLOADS)
    tests: int = 100
    """Number of test examples of each client."""
    repeats: int = 7
    out: pathlib.Path = OUT


def main(config: Config) -> None:
    """Time each workload's parts in turn, and print their milliseconds and shares of a round."""
    rows = [row for name in config.workloads for row in _split(name, config)]
    first = {row["part"]: row["percent"] for row in rows if row["workload"] == config.workloads[0]}
    over = (
        f"{100 * (100 / first['bare training'] - 1):+.1f}% over bare training, "
        if "bare training" in first
        else ""
    )
    headline = f"{config.workloads[0]}: {over}evaluation {first['evaluation']:.1f}% of a round"
    figure, (axes,) = chart(10, 1.6 + 0.45 * len(config.workloads))
    left = dict.fromkeys(config.workloads, 0.0)
    for part in ("sampling", "gather", "local steps", "Fisher", "masks", "clip", "noise", "rest"):
        shares = {row["workload"]: max(0.0, row["percent"]) for row in rows if row["part"] == part}
        axes.barh(
            list(shares), list(shares.values()), left=[left[name] for name in shares], label=part
        )
        left |= {name: left[name] + share for name, share in shares.items()}
    axes.invert_yaxis()
    axes.axvline(100, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="% of a whole round", title="parts of a round, each timed alone")
    figure.legend(loc="outside right upper")
    finish(config, "round", headline, rows, figure)


def _split(name: Name, config: Config) -> list[dict[str, Any]]:
    work = WORKLOADS[name]
    inputs, labels = examples_of(work)
    population = place(clients_of(inputs, labels, config.tests))
    algorithm = algorithm_of(work, FixedSize(work.clients))
    chunk = usual_chunk(algorithm, population)
    key = jax.random.key(0)
    center, states = initialize(key, key, algorithm, population)
    server = center.server
    programs = _parts(work, algorithm, population, chunk, server, states)
    programs["whole round"] = compile_round(algorithm, population, chunk).run
    evaluate = compile_evaluation(algorithm, population, chunk=chunk)
    programs["evaluation"] = lambda: evaluate(key, server, states)
    if not work.feddpa:
        steps = (work.batch_size, work.steps, chunk)
        programs["bare training"] = bare_round(algorithm.model, population, inputs, labels, *steps)
    seconds = medians(in_turn(programs, config.repeats))
    whole, inner = (
        seconds["whole round"],
        [part for part in ("gather", "Fisher", "masks") if part in seconds],
    )
    seconds["local steps"] = seconds.pop("client_update") - sum(seconds[part] for part in inner)
    parts = ("sampling", *inner, "local steps", "clip", "noise")
    seconds["rest"] = whole - sum(seconds[part] for part in parts)
    beside = [part for part in ("whole round", "bare training", "evaluation") if part in seconds]
    return [
        {
            "workload": name,
            "part": part,
            "ms": 1e3 * seconds[part],
            "percent": 100 * seconds[part] / whole,
        }
        for part in (*parts, "rest", *beside)
    ]


def _parts(
    work: Workload,
    algorithm: Algorithm,
    population: Population,
    chunk: int,
    server: Any,
    states: States,
) -> dict[str, Callable[[], Any]]:
    """Return a call of each part by name, with the round's shapes.

    Instead of the local steps there is `client_update`, which includes other parts.
    """
    key, model, mechanism = jax.random.key(0), algorithm.model, algorithm.mechanism
    clients, by_client = population.clients, P("clients")

    def of_clients(work_fn: Callable[..., Tree]) -> Callable[[], Tree]:
        program = sum_over_clients(work_fn, population, (P(), by_client, by_client), chunk)
        return lambda: program(server, states, clients)

    def sampling(key: Array) -> Array:
        sampled = mechanism.sampling.sample(key, population.num_clients, 0)
        return jnp.nonzero(sampled, size=population.num_clients, fill_value=population.num_clients)[
            0
        ]

    def client_update(slot: Array, server: Any, states: States, clients: Clients) -> Tree:
        client_key, data = (
            jax.random.fold_in(key, slot),
            data_of(clients, slot, slot, work.examples),
        )
        return algorithm.client_update(client_key, server, states[slot], data)[0].update

    def gather(slot: Array, server: Any, states: States, clients: Clients) -> Tree:
        def apply(params: Array, x: Array, _key: Array) -> Array:
            return jnp.broadcast_to(
                params + 1e-9 * x.sum(), (model.largest_part or work.batch_size, params.size)
            )

        local = LocalSGD(optax.sgd(0.01), work.batch_size, steps=work.steps)
        data = data_of(clients, slot, slot, work.examples)
        return local.train(jax.random.fold_in(key, slot), model, jnp.zeros(10), data, apply=apply)[
            0
        ]

    def fisher(slot: Array, server: Any, states: States, clients: Clients) -> Tree:
        return client_fisher(model, states[slot], data_of(clients, slot, slot, work.examples))

    def masks(slot: Array, server: Any, states: States, clients: Clients) -> Tree:
        old = states[slot]
        personal = fisher_mask(normalize_per_layer(jax.tree.map(jnp.square, old)), 0.4)
        return merge(personal, old, server.params)

    def clipped(slot: Array, server: Any, states: States, clients: Clients) -> Tree:
        # The update differs by client, so that the compiler cannot move it out of the loop.
        update = jax.tree.map(lambda leaf: leaf * (1 + slot), server.params)
        return clip(update, mechanism.clip)[0]

    draw, noise = jax.jit(sampling), jax.jit(add_gaussian)
    programs = {
        "sampling": lambda: draw(key),
        "client_update": of_clients(client_update),
        "gather": of_clients(gather),
        "clip": of_clients(clipped),
        "noise": lambda: noise(key, server.params, jnp.float32(1)),
    }
    return programs | (
        {"Fisher": of_clients(fisher), "masks": of_clients(masks)} if work.feddpa else {}
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
