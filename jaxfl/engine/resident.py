"""Rounds and evaluations of clients whose states and examples are on the devices."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl.engine.chunk import Program, choose, halved
from jaxfl.engine.evaluate import PerClient, compile_evaluation
from jaxfl.engine.memo import described, key_of_method, remembered
from jaxfl.engine.mesh import Population, everywhere, place
from jaxfl.engine.program import Points, compile_init, compile_rounds, freeze
from jaxfl.engine.round import Keys, Records
from jaxfl.engine.states import States
from jaxfl.types import Algorithm, Clients, Tree


class Resident:
    """The state of one run, or of all points of a sweep, and the programs that advance it.

    `jaxfl.engine.streamed.Stream` does the same for more clients than the devices hold.

    Args:
        init_key: key of the first state.
        keys: streams of the rounds.
        algorithm: one algorithm, or the points of a sweep.
        clients: host arrays.
        devices: where to run (None: all devices).
        chunk: clients vectorised at a time; "auto": measured.
        segment: the largest number of rounds per call.
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
        self.init_key, self.algorithm = init_key, algorithm
        self.population = freeze(algorithm, place(clients, devices))
        self.keys = everywhere(self.population.mesh, keys)
        bare = described(self.population)
        key = (key_of_method(algorithm), bare)
        # What these functions hold must not be `self`, nor arrays: programs are kept beyond the run.
        self._init = remembered(("init", *key), lambda: compile_init(algorithm, bare))
        self._build = _program(
            ("rounds", segment, *key),
            lambda chunk: compile_rounds(algorithm, bare, chunk=chunk, segment=segment),
            self.population,
        )
        self._score = _program(
            ("evaluation", *key),
            lambda chunk: compile_evaluation(algorithm, bare, chunk=chunk),
            self.population,
        )
        self.begin(chunk)
        self.program: Program | None = None
        self._segment = segment

    def begin(self, chunk: int | Literal["auto"]) -> None:
        """Go back to the first state; the chunk is for the next compilation."""
        self.chunk = chunk
        self.center, self.states = self._init(self.init_key, self.keys.cohort)

    @property
    def stateful(self) -> bool:
        """Whether clients keep anything from round to round."""
        return bool(jax.tree.leaves(self.states))

    def record(self) -> Records:
        """Shapes of the records of one round of one run."""
        step = self._build(
            1 if self.chunk == "auto" else self.chunk
        )  # its trace serves the compilation too
        shapes = step.func.eval_shape(*step.args, *self._arguments(0, 1), **step.keywords)[2]  # pyrefly: ignore[missing-attribute]
        axes = 1 if isinstance(self.algorithm, Algorithm) else 2
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[axes:], leaf.dtype), shapes
        )

    def compile(self, facts: tuple[str, ...]) -> Program:
        """Choose the chunk, and compile for it; a remembered choice depends on `facts` besides shapes."""
        mesh = self.population.mesh
        most = self.population.clients.number // mesh.size
        self.program = choose(self._build, self.chunk, most, self._arguments(0, 1), mesh, facts)
        self._tested = self.program.chunk
        return self.program

    def programs(self, key: Key[Array, "*P"]) -> dict[str, list[Any]]:
        """Programs of rounds and of an evaluation with this key, traced one client, and one point, at a time."""
        step: Any = self._build(1)
        score: Any = self._score(1)
        if isinstance(self.algorithm, Points) and self.algorithm.batch is not None:
            algorithm = self.algorithm._replace(batch=None)
            step = compile_rounds(algorithm, self.population, chunk=1, segment=self._segment)
            score = compile_evaluation(algorithm, self.population, chunk=1)
        return {
            "round": [step.func.trace(*step.args, *self._arguments(0, 1), **step.keywords).jaxpr],
            "evaluation": [
                score.func.trace(*score.args, *self._scored(key, 0), **score.keywords).jaxpr
            ],
        }

    def rounds(self, start: int, count: int) -> Records:
        """Run `count` rounds from number `start`; return their records, on the host, in at least `count` rows."""
        assert self.program is not None
        arguments = self._arguments(start, count)
        with jax.transfer_guard("disallow"):
            self.center, self.states, records = self.program.step(*arguments)
        return jax.device_get(records)

    def evaluate(self, key: Key[Array, "*P"], last: int) -> PerClient:
        """Return the scores of all clients after round `last`, on the host."""

        def scores(chunk: int) -> PerClient:
            return jax.device_get(self._score(chunk)(*self._scored(key, last)))

        found, self._tested = halved(scores, self._tested)
        return found

    def saved(self) -> dict[str, Tree]:
        """What a checkpoint keeps."""
        return {"center": self.center, "states": self.states}

    def save(self, write: Callable[[], Any]) -> None:
        """Let `write` write a checkpoint."""
        write()

    def restore(self, saved: dict[str, Tree]) -> None:
        """Resume from what a checkpoint kept."""
        self.center, self.states = saved["center"], saved["states"]

    def all_states(self) -> Tree:
        """Client states [C, ...]: on the host, since leaves apart may not fit beside rows; of several processes, not.

        There they have rows of no client, too, as many as make the devices' parts equal.
        """
        if jax.process_count() > 1:
            return jax.jit(States.tree)(self.states)
        real = slice(self.population.number)
        real = real if isinstance(self.algorithm, Algorithm) else (slice(None), real)
        return jax.tree.map(lambda leaf: leaf[real], jax.device_get(self.states)).tree()

    def _arguments(self, start: int, count: int) -> tuple:
        """Arguments of a call; the numbers are on all devices, so that the call transfers nothing."""
        numbers = everywhere(self.population.mesh, (np.int32(start), np.int32(count)))
        return self.keys, *numbers, self.center, self.states

    def _scored(self, key: Key[Array, "*P"], last: int) -> tuple:
        """Return the arguments of an evaluation after round `last`."""
        return key, self.center.server, self.states, np.int32(last)


def _program(
    key: tuple[Hashable, ...], make: Callable[[int], functools.partial], population: Population
) -> Callable[[int], functools.partial]:
    """Return a function from a chunk to its remembered program, with the population's arrays.

    Args:
        key: what the program depends on besides the chunk.
        make: makes it for descriptions of arrays.
        population: its clients and frozen weights take the place of the descriptions.
    """

    @functools.cache  # a run of many evaluations asks for each of them
    def build(chunk: int) -> functools.partial:
        made = remembered((*key, chunk), functools.partial(make, chunk))
        return functools.partial(
            made.func, population.clients, *made.args[1:], frozen=population.frozen
        )

    return build
