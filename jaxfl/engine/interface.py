"""Interface through which a run advances its clients, wherever their states are held."""

from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

from jax import Array
from jaxtyping import Key

from jaxfl.engine.chunk import Program, nothing
from jaxfl.engine.evaluate import PerClient
from jaxfl.engine.mesh import Population
from jaxfl.engine.round import Center, Records
from jaxfl.types import Tree


# Tests check the types of arguments at run time.
@runtime_checkable
class Engine(Protocol):
    """State of one run, or of all points of a sweep, and the programs that advance it.

    `jaxfl.engine.resident.Resident` holds the client states on the devices, and
    `jaxfl.engine.streamed.Stream` holds them on the host. Their results are equal up to
    rounding.
    """

    population: Population
    chunk: int | Literal["auto"]
    """Number of clients vectorised at a time on each device, for the next compilation."""
    center: Center
    """States of the server and of the mechanism."""

    @property
    def stateful(self) -> bool:
        """Return whether clients keep a state between rounds."""
        ...

    def begin(self, chunk: int | Literal["auto"]) -> None:
        """Return to the state before round 0, and set the chunk for the next compilation."""
        ...

    def record(self) -> Records:
        """Return the shapes of the records of one round of one run, without leading axes."""
        ...

    def programs(self, key: Key[Array, "*P"]) -> dict[str, list[Any]]:
        """Return the jaxprs of "round", and of "evaluation" with this key, as lists by name.

        The programs have a chunk of 1, and run the points of a sweep one after the other.
        """
        ...

    def compile(
        self, facts: tuple[str, ...], meanwhile: Callable[[int], None] = nothing
    ) -> Program:
        """Choose the chunk, and compile the program of rounds for it.

        Args:
            facts: Everything that a cached choice depends on in addition to shapes and devices.
            meanwhile: Function of the chunk to call while XLA compiles, unless it is measured.
        """
        ...

    def prepare_evaluation(self, key: Key[Array, "*P"], chunk: int) -> None:
        """Compile the program of evaluations with such a key before the first one, if possible."""
        ...

    def rounds(self, start: int, count: int) -> Records:
        """Run `count` rounds from round `start`, and return their records on the host.

        The records have at least `count` rows, and a leading axis P for points.

        Args:
            start: Index of the first round, from 0.
            count: Number of rounds, from 1 to the engine's largest number per call.
        """
        ...

    def evaluate(self, key: Key[Array, "*P"], last: int) -> PerClient:
        """Return the scores of all clients on the host, with a leading axis P for points.

        Args:
            key: Key of the evaluation, or of each point.
            last: Index of the last round, from 0.
        """
        ...

    def saved(self) -> dict[str, Tree]:
        """Return the state that a checkpoint stores, with the names "center" and "states"."""
        ...

    def save(self, write: Callable[[], Any]) -> None:
        """Write the files that a checkpoint needs, then call `write`, which writes the rest."""
        ...

    def restore(self, saved: dict[str, Tree]) -> None:
        """Replace the present state by one that `saved` returned."""
        ...

    def all_states(self) -> Tree:
        """Return the client states [C, ...] as host arrays, with a leading axis P for points.

        With several processes, the states are on the devices, and include padding clients.
        """
        ...
