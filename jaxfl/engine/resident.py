"""Rounds and evaluations of clients whose states and examples are on the devices."""

import contextlib
import functools
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jaxtyping import Key
from typing_extensions import override

from jaxfl.engine.chunk import Program, choose, halved, nothing
from jaxfl.engine.evaluate import PerClient, compile_evaluation
from jaxfl.engine.interface import Engine
from jaxfl.engine.memo import described, key_of_method, remembered
from jaxfl.engine.mesh import Population, everywhere, place
from jaxfl.engine.program import Points, compile_init, compile_rounds, first_of, freeze
from jaxfl.engine.round import Keys, Records, useful_lanes
from jaxfl.engine.states import States
from jaxfl.types import Algorithm, Clients, Tree


class Resident(Engine):
    """Engine whose client states are on the devices.

    Args:
        init_key: Key of the first state.
        keys: Streams of randomness for the rounds.
        algorithm: One algorithm, or the points of a sweep.
        clients: Host arrays.
        devices: The devices to use. None stands for all devices.
        chunk: Number of clients vectorised at a time on each device. "auto" measures it.
        segment: Largest number of rounds per call.
    """

    def __init__(
        self,
        init_key: Key[Array, "*P"],
        keys: Keys,
        algorithm: Algorithm | Points,
        clients: Clients,
        devices: list[jax.Device] | None,
        chunk: int | Literal["auto"],
        segment: int,
    ) -> None:
        self.init_key = init_key
        self.algorithm = algorithm
        self.population = freeze(algorithm, place(clients, devices))
        self.keys = everywhere(self.population.mesh, keys)
        bare = described(self.population)
        key = (key_of_method(algorithm), bare)
        # The cache keeps these functions beyond the run, so they must not hold `self` or arrays.
        self._init = remembered(("init", *key), lambda: compile_init(algorithm, bare))
        self._build = cached_program(
            ("rounds", segment, *key),
            lambda chunk: compile_rounds(algorithm, bare, chunk=chunk, segment=segment),
            self.population,
        )
        self._score = cached_program(
            ("evaluation", *key),
            lambda chunk: compile_evaluation(algorithm, bare, chunk=chunk),
            self.population,
        )
        self.begin(chunk)
        self.program: Program | None = None
        self._segment = segment

    @override
    def begin(self, chunk: int | Literal["auto"]) -> None:
        self.chunk = chunk
        self.center, self.states = self._init(self.init_key, self.keys.cohort)

    @override
    @property
    def stateful(self) -> bool:
        return bool(jax.tree.leaves(self.states))

    @override
    def record(self) -> Records:
        chunk = self.chunk
        # All chunks have records of the same shapes.
        if chunk == "auto":
            chunk = 1
        # The compilation uses this trace too, if its chunk is the same.
        step: Any = self._build(chunk)
        arguments = self._arguments(0, 1)
        _, _, shapes = step.func.eval_shape(*step.args, *arguments, **step.keywords)
        # Rounds have an axis, and the points of a sweep have one before it.
        axes = 1
        if isinstance(self.algorithm, Points):
            axes = 2
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), shapes
        )

    @override
    def compile(
        self, facts: tuple[str, ...], meanwhile: Callable[[int], None] = nothing
    ) -> Program:
        mesh = self.population.mesh
        # Lanes beyond a device's clients or its usual participants would mostly stay empty.
        most = min(
            self.population.num_slots // mesh.size,
            useful_lanes(first_of(self.algorithm).mechanism.sampling, self.population),
        )
        arguments = self._arguments(0, 1)
        self.program = choose(self._build, self.chunk, most, arguments, mesh, facts, meanwhile)
        # Evaluations begin with this chunk too, and halve it if it does not fit.
        self._evaluated_chunk = self.program.chunk
        return self.program

    @override
    def prepare_evaluation(self, key: Key[Array, "*P"], chunk: int) -> None:
        arguments = self._evaluation_arguments(key, 0)
        # If memory does not suffice, the first evaluation meets the error again, and halves the
        # chunk. Otherwise an evaluation with this chunk finds the program in JAX's cache.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            score: Any = self._score(chunk)
            score.func.lower(*score.args, *arguments, **score.keywords).compile()

    @override
    def programs(self, key: Key[Array, "*P"]) -> dict[str, list[Any]]:
        step: Any = self._build(1)
        score: Any = self._score(1)
        # A run's fingerprint must not depend on how many points are vectorised.
        if isinstance(self.algorithm, Points) and self.algorithm.batch is not None:
            algorithm = self.algorithm._replace(batch=None)
            step = compile_rounds(algorithm, self.population, chunk=1, segment=self._segment)
            score = compile_evaluation(algorithm, self.population, chunk=1)
        arguments = self._arguments(0, 1)
        stepped = step.func.trace(*step.args, *arguments, **step.keywords)
        arguments = self._evaluation_arguments(key, 0)
        scored = score.func.trace(*score.args, *arguments, **score.keywords)
        return {"round": [stepped.jaxpr], "evaluation": [scored.jaxpr]}

    @override
    def rounds(self, start: int, count: int) -> Records:
        assert self.program is not None
        arguments = self._arguments(start, count)
        # A transfer in every call would slow a run without any sign, so JAX raises an error.
        with jax.transfer_guard("disallow"):
            self.center, self.states, records = self.program.step(*arguments)
        return jax.device_get(records)

    @override
    def evaluate(self, key: Key[Array, "*P"], last: int) -> PerClient:
        def scores(chunk: int) -> PerClient:
            arguments = self._evaluation_arguments(key, last)
            return jax.device_get(self._score(chunk)(*arguments))

        found, self._evaluated_chunk = halved(scores, self._evaluated_chunk)
        return found

    @override
    def saved(self) -> dict[str, Tree]:
        return {"center": self.center, "states": self.states}

    @override
    def save(self, write: Callable[[], Any]) -> None:
        write()

    @override
    def restore(self, saved: dict[str, Tree]) -> None:
        self.center = saved["center"]
        self.states = saved["states"]

    @override
    def all_states(self) -> Tree:
        """Return the client states [C, ...] as host arrays.

        The host unpacks the states, because packed and unpacked states together may not fit on the
        devices. With several processes, the states stay on the devices, and include the rows of
        padding clients. For points, a leading axis P comes first.
        """
        if jax.process_count() > 1:
            return jax.jit(States.tree)(self.states)
        # Padding clients come last on the axis of clients.
        real: Any = slice(self.population.num_clients)
        if not isinstance(self.algorithm, Algorithm):
            real = (slice(None), real)
        return jax.tree.map(lambda leaf: leaf[real], jax.device_get(self.states)).tree()

    def _arguments(self, start: int, count: int) -> tuple:
        """Return the arguments of `count` rounds from round `start` (see `compile_rounds`).

        All of them are on the devices already, so that the call transfers nothing.
        """
        numbers = everywhere(self.population.mesh, (np.int32(start), np.int32(count)))
        return self.keys, *numbers, self.center, self.states

    def _evaluation_arguments(self, key: Key[Array, "*P"], last: int) -> tuple:
        """Return the arguments of an evaluation after round `last` (see `compile_evaluation`)."""
        return key, self.center.server, self.states, np.int32(last)


def cached_program(
    key: tuple[Hashable, ...], make: Callable[[int], functools.partial], population: Population
) -> Callable[[int], functools.partial]:
    """Return a function from a chunk to its cached program, with the population's arrays.

    The program is a partial function, whose first argument is the population's clients.

    Args:
        key: Everything that the program depends on, except the chunk.
        make: Function from a chunk to the program for descriptions of arrays.
        population: The clients and the frozen weights, which replace the descriptions.
    """

    # Each evaluation of a run asks for the program.
    @functools.cache
    def build(chunk: int) -> functools.partial:
        program = remembered((*key, chunk), functools.partial(make, chunk))
        _, *others = program.args
        return functools.partial(
            program.func, population.clients, *others, frozen=population.frozen
        )

    return build
