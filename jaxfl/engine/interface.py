"""Interface through which a run advances its clients, wherever their states are held."""

from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

from jax import Array
from jaxtyping import Key

from jaxfl.engine.chunk import Program
from jaxfl.engine.evaluate import PerClient
from jaxfl.engine.mesh import Population
from jaxfl.engine.round import Center, Records
from jaxfl.types import Tree


# Tests check the types of arguments at run time.
@runtime_checkable
class Engine(Protocol):
    """State of one run, or of all points of a sweep, and the programs that advance it.

    `jaxfl.engine.resident.Resident` holds the client states on the devices, and
    `jaxfl.engine.streamed.Stream` holds them on the host. Both give the same results.
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
        """Return to the first state, and set the chunk for the next compilation."""
        ...

    def record(self) -> Records:
        """Return the shapes of the records of one round of one run."""
        ...

    def programs(self, key: Key[Array, "*P"]) -> dict[str, list[Any]]:
        """Return the traced programs of rounds, and of an evaluation with this key.

        The programs take as few clients at a time as possible, and one point of a sweep.
        """
        ...

    def compile(self, facts: tuple[str, ...]) -> Program:
        """Choose the chunk, and compile the program of rounds for it.

        Args:
            facts: Everything that a cached choice depends on in addition to shapes and devices.
        """
        ...

    def rounds(self, start: int, count: int) -> Records:
        """Run `count` rounds from round `start`, and return their records on the host.

        The records have at least `count` rows.
        """
        ...

    def evaluate(self, key: Key[Array, "*P"], last: int) -> PerClient:
        """Return the scores of all clients after round `last`, on the host."""
        ...

    def saved(self) -> dict[str, Tree]:
        """Return the state that a checkpoint stores."""
        ...

    def save(self, write: Callable[[], Any]) -> None:
        """Let `write` write a checkpoint, after everything that the checkpoint refers to."""
        ...

    def restore(self, saved: dict[str, Tree]) -> None:
        """Resume from the state that a checkpoint stored."""
        ...

    def all_states(self) -> Tree:
        """Return the client states [C, ...] as host arrays."""
        ...
