"""Many rounds in one compiled program, of one algorithm or of all points of a sweep."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int, Key

from jaxfl.backend import compiler_options, of_mesh, traced_for
from jaxfl.engine.mesh import Population, data_of, everywhere
from jaxfl.engine.round import Center, Keys, Records, all_keys, one_round
from jaxfl.engine.states import States
from jaxfl.models.frozen import given
from jaxfl.privacy.noise import derive
from jaxfl.types import Algorithm, Clients, StepNoise, Tree

_MEMORY = 2**31 + 1
"""No round has this number: the key of a mechanism's first memory is derived apart from the rounds' keys."""

_QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options of programs that run once: compiling them well would take longer than running them."""

_NOT_KNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class Points(NamedTuple):
    """Runs of one method that differ in numbers: a sweep's values are arguments of its one compiled program.

    `build` makes the algorithm of a point from its values, whose leaves have a leading axis P; `batch` points are
    vectorised at a time (None: one after the other, as plain code).
    """

    build: Callable[..., Algorithm]
    values: dict[str, Float[np.ndarray, "P"]]
    batch: int | None = None


def initialize(
    key: Key[Array, "*P"],
    memory_key: Key[Array, "..."],
    algorithm: Algorithm | Points,
    population: Population,
) -> tuple[Center, States]:
    """Server state and mechanism memory, replicated, and client states, on the devices of their clients."""
    return compile_init(algorithm, population)(key, memory_key)


def compile_init(
    algorithm: Algorithm | Points, population: Population
) -> Callable[[Any, Any], tuple[Center, States]]:
    """Return the program of `initialize`, which reads no arrays of the population."""
    init = over_points(functools.partial(first_states, population=population), algorithm)
    shardings = _shardings(algorithm, population)
    return jax.jit(init, out_shardings=shardings, compiler_options=_QUICK)


def compile_states(
    algorithm: Algorithm | Points, population: Population
) -> Callable[[Any, Any], States]:
    """Return the program `(key, states) -> States` of client states on their devices.

    They are the given ones [C, ...], or what `init` makes with the key where `states` is None.
    """

    def placed(algorithm: Algorithm, key: Key[Array, ""], states: Tree) -> States:
        if states is None:
            _, states = algorithm.init(key, population.number)
        return states_in_rows(_filled(states, population), population)

    _, by_client = _shardings(algorithm, population)
    return jax.jit(over_points(placed, algorithm), out_shardings=by_client, compiler_options=_QUICK)


def _filled(states: Tree, population: Population) -> Tree:
    """Return client states [C, ...] with further rows, nobody's, that fill up the mesh."""
    extra = population.clients.number - population.number
    if not extra:
        return states
    return jax.tree.map(
        lambda leaf: jnp.concatenate([leaf, jnp.repeat(leaf[-1:], extra, axis=0)]), states
    )


def first_states(
    algorithm: Algorithm, key: Key[Array, ""], memory_key: Key[Array, "*S"], population: Population
) -> tuple[Center, States]:
    """First states of the server, the mechanism and the clients of one run; the second key is for its cohorts."""
    server, states = algorithm.init(key, population.number)
    states = _filled(states, population)
    largest = population.capacities[-1]

    def sent(clients: Clients) -> Tree:
        client = jax.tree.map(lambda leaf: leaf[0], states)
        noise = None if algorithm.dp_sgd is None else StepNoise(jnp.zeros(()), key)
        return algorithm.client_update(key, server, client, data_of(clients, 0, 0, largest, noise))[
            0
        ].update

    shapes = functools.partial(jax.eval_shape, sent, population.clients)  # of a client's update
    memory = algorithm.mechanism.init(derive(memory_key, _MEMORY), shapes, population.number)
    return Center(server, memory), states_in_rows(states, population)


def states_in_rows(states: Tree, population: Population) -> States:
    """Client states as the population's devices hold them."""
    return States.of(states, of_mesh(population.mesh).joined)


def _shardings(
    algorithm: Algorithm | Points, population: Population
) -> tuple[NamedSharding, NamedSharding]:
    """Shardings of what every process reads, such as the server, and of client states."""
    by_client = P("clients") if isinstance(algorithm, Algorithm) else P(None, "clients")
    return NamedSharding(population.mesh, P()), NamedSharding(population.mesh, by_client)


def over_points(work: Callable[..., Tree], algorithm: Algorithm | Points) -> Callable[..., Tree]:
    """`work(algorithm, *arguments)` as a function of the arguments; for points, with a leading axis P."""
    if isinstance(algorithm, Algorithm):
        return functools.partial(work, algorithm)

    def of_point(point: tuple[dict[str, Array], tuple[Tree, ...]]) -> Tree:
        values, arguments = point
        try:
            built = algorithm.build(**values)
        except _NOT_KNOWN as error:
            raise ValueError(
                f"values={sorted(values)!r}: one of them decides a shape or a Python branch, which a program "
                "cannot leave open; run `simulate` for each of its values"
            ) from error
        return work(built, *arguments)

    values = {name: jnp.asarray(column, jnp.float32) for name, column in algorithm.values.items()}
    return lambda *arguments: lax.map(of_point, (values, arguments), batch_size=algorithm.batch)


def compile_rounds(
    algorithm: Algorithm | Points, population: Population, *, chunk: int, segment: int
) -> functools.partial[tuple[Center, States, Records]]:
    """One program for up to `segment` rounds: `(keys, start, rounds, center, states) -> (center, states, records)`.

    `start` and `rounds` are dynamic, so one compilation serves a whole run; `center` and `states` are
    donated. Rows of the records beyond `rounds` are zero. Of `Points`, all but `start` and `rounds` have a leading
    axis P. A single key in place of `Keys` serves all streams.

    Args:
        algorithm: what a round does.
        population: the clients on their devices.
        chunk: clients vectorised at a time on each device; memory grows with the chunk, not with the cohort.
        segment: the largest number of rounds per call.
    """

    def run(
        clients: Clients, keys: Any, start: Any, rounds: Any, center: Center, states: States
    ) -> tuple:
        keys = keys if isinstance(keys, Keys) else all_keys(keys)

        def rounds_of(algorithm: Algorithm, keys: Keys, center: Center, states: States) -> tuple:
            @functools.partial(jax.jit, inline=True)  # traced once, for the shapes and for the loop
            def step(
                index: Int[Array, ""], center: Center, states: States
            ) -> tuple[Center, States, Records]:
                placed = population._replace(clients=clients)
                return one_round(algorithm, placed, chunk, keys, index, center, states)

            first = jnp.asarray(start, jnp.int32)
            shapes = jax.eval_shape(step, first, center, states)[2]
            records = jax.tree.map(
                lambda leaf: jnp.zeros((segment, *leaf.shape), leaf.dtype), shapes
            )

            def body(i: Int[Array, ""], carry: tuple) -> tuple:
                center, states, records = carry
                center, states, record = step(first + i, center, states)
                return (
                    center,
                    states,
                    jax.tree.map(lambda all_, new: all_.at[i].set(new), records, record),
                )

            return lax.fori_loop(0, jnp.minimum(rounds, segment), body, (center, states, records))

        return over_points(rounds_of, algorithm)(keys, center, states)

    shared, by_client = _shardings(algorithm, population)
    shardings = (shared, by_client, shared)
    program = compile_for(
        algorithm, population, run, donate_argnames=("center", "states"), out_shardings=shardings
    )
    return functools.partial(program, population.clients)


def compile_for(
    algorithm: Algorithm | Points, population: Population, work: Callable[..., Tree], **options: Any
) -> functools.partial:
    """`jax.jit(work)` for the population's devices, with its frozen weights as a further argument."""
    options["compiler_options"] = compiler_options(population.mesh)

    @functools.wraps(work)
    def run(*arguments: Any, frozen: Tree = ()) -> Tree:
        with (
            traced_for(population.mesh),
            given(_frozen_of(algorithm) if jax.tree.leaves(frozen) else (), frozen),
        ):
            return work(*arguments)

    return functools.partial(jax.jit(run, **options), frozen=population.frozen)


def freeze(algorithm: Algorithm | Points, population: Population) -> Population:
    """The population with the model's frozen weights on each of its devices."""
    return population._replace(frozen=everywhere(population.mesh, _frozen_of(algorithm)))


def _frozen_of(algorithm: Algorithm | Points) -> Tree:
    """The frozen weights of the model; those of all points are the same."""
    if isinstance(algorithm, Points):
        algorithm = algorithm.build(
            **{name: float(column[0]) for name, column in algorithm.values.items()}
        )
    return algorithm.model.frozen
