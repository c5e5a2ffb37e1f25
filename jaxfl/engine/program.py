"""Compiled programs of many rounds, for one algorithm or for all points of a sweep."""

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

from jaxfl._support.backend import compiler_options, of_mesh, traced_for
from jaxfl.engine.mesh import Population, data_of, everywhere
from jaxfl.engine.round import Center, Keys, Records, all_keys, one_round
from jaxfl.engine.states import States
from jaxfl.local.lanes import zeros_of
from jaxfl.models.frozen import given
from jaxfl.privacy.audit import first_scores
from jaxfl.privacy.noise import derive
from jaxfl.types import Algorithm, Clients, StepNoise, Tree

_MEMORY = 2**31 + 1
"""Round index reserved for the mechanism's initial memory. It lies above every real round."""

QUICK = {"xla_backend_optimization_level": 0}
"""Compiler options of programs that run once, for which optimising takes more than it saves."""

_NOT_KNOWN = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""Errors of JAX about a value that is known only when the program runs."""


class Points(NamedTuple):
    """Runs of one method that differ in numbers, which are arguments of one compiled program."""

    build: Callable[..., Algorithm]
    """Function from a point's values to its algorithm."""
    values: dict[str, Float[np.ndarray, "P"]]
    """Values of all P points, by the argument's name."""
    batch: int | None = None
    """Number of points vectorised at a time. None runs one after the other, unvectorised."""


def initialize(
    key: Key[Array, "*P"],
    memory_key: Key[Array, "..."],
    algorithm: Algorithm | Points,
    population: Population,
) -> tuple[Center, States]:
    """Return the first center, replicated, and the first client states on their devices.

    Args:
        key: Key of the first state.
        memory_key: Stream of the cohorts, from which the key of the mechanism's memory follows.
        algorithm: One algorithm, or the points of a sweep.
        population: The clients on their devices.
    """
    return compile_init(algorithm, population)(key, memory_key)


def compile_init(
    algorithm: Algorithm | Points, population: Population
) -> Callable[[Any, Any], tuple[Center, States]]:
    """Return the program `(key, memory_key) -> (center, states)` of `initialize`.

    It reads only shapes of the population, and no arrays.
    """
    init = over_points(functools.partial(first_states, population=population), algorithm)
    shardings = _shardings(algorithm, population)
    return jax.jit(init, out_shardings=shardings, compiler_options=QUICK)


def compile_states(
    algorithm: Algorithm | Points, population: Population
) -> Callable[[Any, Any], States]:
    """Return the program `(key, states) -> States` that puts client states on their devices.

    It places the given states [C, ...]. If `states` is None, it places the states that `init` makes
    with the key. For `Points`, both arguments have a leading axis P.
    """

    def placed(algorithm: Algorithm, key: Key[Array, ""], states: Tree) -> States:
        if states is None:
            _, states = algorithm.init(key, population.num_clients)
        return states_in_rows(_padded_states(states, population), population)

    _, by_client = _shardings(algorithm, population)
    return jax.jit(over_points(placed, algorithm), out_shardings=by_client, compiler_options=QUICK)


def _padded_states(states: Tree, population: Population) -> Tree:
    """Return client states [C, ...] padded to `num_slots` rows by copies of the last row."""
    # Padding clients never take part, so any states of the right shapes serve them.
    extra = population.num_slots - population.num_clients
    if not extra:
        return states
    return jax.tree.map(
        lambda leaf: jnp.concatenate([leaf, jnp.repeat(leaf[-1:], extra, axis=0)]), states
    )


def first_states(
    algorithm: Algorithm, key: Key[Array, ""], memory_key: Key[Array, "*S"], population: Population
) -> tuple[Center, States]:
    """Return the first states of the server, the mechanism and the clients of one run.

    Args:
        algorithm: The method that runs.
        key: Key of the first state.
        memory_key: Stream of the cohorts, from which the key of the mechanism's memory follows.
        population: The clients on their devices.
    """
    server, states = algorithm.init(key, population.num_clients)
    states = _padded_states(states, population)
    largest = population.capacities[-1]

    def sent(clients: Clients) -> Tree:
        client = jax.tree.map(lambda leaf: leaf[0], states)
        noise = None
        # Only shapes are computed, so the values of the noise do not matter.
        if algorithm.dp_sgd is not None:
            noise = StepNoise(jnp.zeros(()), key)
        data = data_of(clients, 0, 0, largest, noise)
        message, *_ = algorithm.client_update(key, server, client, data)
        return message.update

    # This is a function, because most mechanisms have no memory and need no trace of an update.
    update_shapes = functools.partial(jax.eval_shape, sent, population.clients)
    memory_key = derive(memory_key, _MEMORY)
    memory = algorithm.mechanism.init(memory_key, update_shapes, population.num_clients)
    scores: Tree = ()
    if algorithm.audit is not None:
        scores = first_scores(algorithm.audit, memory_key)
    return Center(server, memory, scores), states_in_rows(states, population)


def states_in_rows(states: Tree, population: Population) -> States:
    """Return client states [C, ...] as rows, in the layout for the population's devices."""
    return States.of(states, of_mesh(population.mesh).joined)


def _shardings(
    algorithm: Algorithm | Points, population: Population
) -> tuple[NamedSharding, NamedSharding]:
    """Return the shardings of arrays that every process reads, and of client states."""
    by_client = P("clients")
    # The states of a sweep have a leading axis of points, and every device holds all points.
    if isinstance(algorithm, Points):
        by_client = P(None, "clients")
    return NamedSharding(population.mesh, P()), NamedSharding(population.mesh, by_client)


def over_points(work: Callable[..., Tree], algorithm: Algorithm | Points) -> Callable[..., Tree]:
    """Return `work(algorithm, *arguments)` as a function of the arguments alone.

    For `Points`, the arguments and the result have a leading axis P. The function then raises a
    ValueError if a value decides a shape or a Python branch.
    """
    if isinstance(algorithm, Algorithm):
        return functools.partial(work, algorithm)

    def of_point(point: tuple[dict[str, Array], tuple[Tree, ...]]) -> Tree:
        values, arguments = point
        try:
            built = algorithm.build(**values)
        except _NOT_KNOWN as error:
            raise ValueError(
                "values must be numbers that decide no shape and no Python branch, got "
                f"{sorted(values)!r}. Run `simulate` for each of the values."
            ) from error
        return work(built, *arguments)

    # `lax.map` takes arrays only. The values that it gives to the method are tracers.
    values = {name: jnp.asarray(column, jnp.float32) for name, column in algorithm.values.items()}
    return lambda *arguments: lax.map(of_point, (values, arguments), batch_size=algorithm.batch)


def compile_rounds(
    algorithm: Algorithm | Points, population: Population, *, chunk: int, segment: int
) -> functools.partial[tuple[Center, States, Records]]:
    """Return a program `(keys, start, rounds, center, states) -> (center, states, records)`.

    It runs rounds `start` to `start + rounds - 1`, at most `segment` of them. Both numbers are
    dynamic, so that one compilation serves a run of any length. `center` and `states` are donated.
    Rows of the records beyond `rounds` are zero. A single key instead of `Keys` serves all streams.
    For `Points`, all arguments but `start` and `rounds`, and all results, have a leading axis P.

    Args:
        algorithm: One algorithm, or the points of a sweep.
        population: The clients on their devices.
        chunk: Number of clients vectorised at a time on each device. Memory grows with the chunk.
        segment: Largest number of rounds per call.
    """

    def run(
        clients: Clients, keys: Any, start: Any, rounds: Any, center: Center, states: States
    ) -> tuple:
        if not isinstance(keys, Keys):
            keys = all_keys(keys)

        def rounds_of(algorithm: Algorithm, keys: Keys, center: Center, states: States) -> tuple:
            # Under `jit`, the shapes and the loop share one trace.
            @functools.partial(jax.jit, inline=True)
            def step(
                index: Int[Array, ""], center: Center, states: States
            ) -> tuple[Center, States, Records]:
                placed = population._replace(clients=clients)
                return one_round(algorithm, placed, chunk, keys, index, center, states)

            first = jnp.asarray(start, jnp.int32)
            return _recorded(step, first, rounds, segment, center, states)

        return over_points(rounds_of, algorithm)(keys, center, states)

    shared, by_client = _shardings(algorithm, population)
    shardings = (shared, by_client, shared)
    # Donation spares a second copy of the states in memory.
    program = compile_for(
        algorithm, population, run, donate_argnames=("center", "states"), out_shardings=shardings
    )
    # Clients are an argument, so a cached program serves others of equal shapes.
    return functools.partial(program, population.clients)


def _recorded(
    step: Callable[..., tuple[Center, States, Records]],
    first: Int[Array, ""],
    rounds: Any,
    segment: int,
    center: Center,
    states: States,
) -> tuple[Center, States, Records]:
    """Run rounds by `step` from round `first`, with their records in the rows of `segment`."""
    # The loop writes rows into records, so it needs their shapes before its first round.
    _, _, shapes = jax.eval_shape(step, first, center, states)
    records = zeros_of(shapes, segment)

    def body(i: Int[Array, ""], carry: tuple) -> tuple:
        center, states, records = carry
        center, states, record = step(first + i, center, states)
        records = jax.tree.map(lambda all_, new: all_.at[i].set(new), records, record)
        return center, states, records

    return lax.fori_loop(0, jnp.minimum(rounds, segment), body, (center, states, records))


def compile_for(
    algorithm: Algorithm | Points, population: Population, work: Callable[..., Tree], **options: Any
) -> functools.partial:
    """Return `jax.jit(work)` for the population's devices, with frozen weights bound as `frozen`.

    Args:
        algorithm: One algorithm, or the points of a sweep.
        population: The clients on their devices.
        work: Function to compile.
        options: Further arguments of `jax.jit`.
    """
    options["compiler_options"] = compiler_options(population.mesh)

    # The wrapped function shows `jit` the names of arguments that may be donated.
    @functools.wraps(work)
    def run(*arguments: Any, frozen: Tree = ()) -> Tree:
        # `jit` traces this function later, so the function itself sets the platform.
        with traced_for(population.mesh):
            originals: Tree = ()
            if jax.tree.leaves(frozen):
                originals = _frozen_of(algorithm)
            with given(originals, frozen):
                return work(*arguments)

    return functools.partial(jax.jit(run, **options), frozen=population.frozen)


def freeze(algorithm: Algorithm | Points, population: Population) -> Population:
    """Return the population with the model's frozen weights on each of its devices."""
    return population._replace(frozen=everywhere(population.mesh, _frozen_of(algorithm)))


def _frozen_of(algorithm: Algorithm | Points) -> Tree:
    """Return the frozen weights of the model, which are the same for all points."""
    return first_of(algorithm).model.frozen


def first_of(algorithm: Algorithm | Points) -> Algorithm:
    """Return the algorithm, or that of the first point."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    values = {name: float(column[0]) for name, column in algorithm.values.items()}
    return algorithm.build(**values)
