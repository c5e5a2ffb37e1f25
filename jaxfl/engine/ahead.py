"""A round compiled for a chip that is not there: its memory, and what one local step moves and computes.

What a step moves is read off the compiler's optimized text (`jaxfl.engine.kernels`), what it computes off the trace.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfl._validate import check_choice, check_count, check_positive, checked, key_of
from jaxfl.chips import CHIPS, device_of
from jaxfl.engine.chunk import fitting
from jaxfl.engine.kernels import step_cost
from jaxfl.engine.mesh import Population, common_size, in_rows
from jaxfl.engine.program import compile_rounds, first_states
from jaxfl.local.train import STEP
from jaxfl.types import Algorithm, Clients, Tree


class Footprint(NamedTuple):
    """What a round needs of a chip; of all local steps of its method, the one that moves most bytes counts."""

    chip: str
    chunk: int
    kernels: float
    """Of a local step of all clients of a chunk together, with its share of the loops around it."""
    in_step: float
    """Those of the step itself."""
    bytes: float
    """Read and written by these, per client."""
    flops: float
    """Matrix products and convolutions of a local step of one client, a multiply-add as two."""
    memory: float
    """Bytes of temporary arrays per client of a chunk."""
    held: float
    """Bytes of examples, their rows, and states."""
    largest_chunk: int
    """That fits beside what is held."""
    expected_us: float
    """Per client-step, as the compiler counts cycles; NaN where it does not."""

    @property
    def bandwidth_us(self) -> float:
        """Per client-step, if all bytes went through memory at its full speed."""
        return 1e6 * self.bytes / CHIPS[self.chip].bandwidth

    @property
    def compute_us(self) -> float:
        """Per client-step, at the chip's peak."""
        return 1e6 * self.flops / CHIPS[self.chip].flops

    @property
    def microseconds(self) -> float:
        """Per client-step: what the compiler expects, else the larger of the two others, a bound from below."""
        return (
            max(self.bandwidth_us, self.compute_us)
            if math.isnan(self.expected_us)
            else self.expected_us
        )


def _check_trips(name: str, value: Any) -> tuple[float, ...]:
    return tuple(check_positive(f"{name}[{i}]", times) for i, times in enumerate(value))


@checked(
    chip=lambda name, value: check_choice(name, value, tuple(CHIPS)),
    chunk=check_count,
    trips=_check_trips,
)
def footprint(
    chip: str, algorithm: Algorithm, clients: Clients, *, chunk: int, trips: Sequence[float] = ()
) -> Footprint:
    """Compile a round of all clients for one chip, and read what it needs off the program.

    Args:
        chip: one of `jaxfl.chips.CHIPS`.
        algorithm: what a round does.
        clients: host arrays. Only the numbers of training examples are read, and shapes (`jax.ShapeDtypeStruct`) may
            stand for all others.
        chunk: clients vectorised at a time; halved where the chip's memory does not hold them.
        trips: how often the loop over local steps runs, and those around it, from the inside; a step then has its
            share of what they do besides. Of `LocalSGD`: steps in a block, blocks in an epoch, epochs.

    Raises:
        ValueError: the chip's compiler is not installed.
    """
    sheet, population = CHIPS[chip], described(clients, device_of(chip))
    arguments = _arguments(algorithm, population)
    rounds_of: Any = functools.partial(compile_rounds, algorithm, population, segment=1)
    program = fitting(lambda chunk: rounds_of(chunk=chunk), chunk, arguments, call=False)
    compiled: Any = program.step
    compiled, chunk = compiled.func, program.chunk
    text, each = compiled.as_text(), program.memory
    cost, alone = step_cost(text, trips), step_cost(text)
    held = compiled.memory_analysis().argument_size_in_bytes
    expected = 1e6 * cost.cycles / sheet.clock / chunk if cost.cycles else math.nan
    largest = int(max(0.0, sheet.memory - held) / max(1.0, each))
    flops = step_flops(algorithm, population)
    return Footprint(
        chip,
        chunk,
        cost.kernels,
        alone.kernels,
        cost.bytes / chunk,
        flops,
        each,
        held,
        largest,
        expected,
    )


def step_flops(algorithm: Algorithm, population: Population) -> float:
    """Operations of the matrix products and convolutions of a client's local step."""
    alone: Any = compile_rounds(algorithm, population, chunk=1, segment=1)
    traced = alone.func.trace(*alone.args, *_arguments(algorithm, population), **alone.keywords)
    return sum(products(traced.jaxpr.jaxpr, STEP))


def described(clients: Clients, device: jax.Device) -> Population:
    """Clients on a device that need not be there: shapes in place of arrays.

    All have the largest one's capacity, so that a program has each local step once.
    """
    mesh = Mesh(np.array([device]), ("clients",))
    shapes = _shapes(mesh, jax.eval_shape(in_rows, clients), P("clients"))
    largest = max(1, int(np.max(clients.train_size)))
    return Population(
        shapes, clients.number, mesh, size=common_size(clients), capacities=(largest,)
    )


def _shapes(mesh: Mesh, tree: Tree, spec: P) -> Tree:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def _arguments(algorithm: Algorithm, population: Population) -> tuple:
    """Shapes of a call's arguments besides the clients."""
    key, number = jax.eval_shape(lambda: (key_of(0), jax.numpy.int32(0)))
    start = functools.partial(first_states, algorithm, population=population)
    center, states = jax.eval_shape(start, key, key)
    shared = _shapes(population.mesh, (key, number, number, center), P())
    return *shared, _shapes(population.mesh, states, P("clients"))


def products(jaxpr: Any, scope: str = "", inside: bool = False) -> Iterator[float]:
    """Operations of each matrix product and convolution of a program, in order, a multiply-add as two.

    A loop's body counts once.

    Args:
        jaxpr: the program.
        scope: only those within `jax.named_scope` of this name.
        inside: whether the program is within it.
    """
    for equation in jaxpr.eqns:
        within = inside or scope in str(equation.source_info.name_stack)
        name, params = equation.primitive.name, equation.params
        if name in ("dot_general", "conv_general_dilated"):
            if within:
                yield _operations(
                    name,
                    params,
                    [v.aval.shape for v in equation.invars],
                    equation.outvars[0].aval.shape,
                )
            continue
        for value in jax.tree.leaves(
            tuple(params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from products(inner, scope, within)


def _operations(
    name: str, params: dict[str, Any], inputs: list[tuple[int, ...]], output: tuple[int, ...]
) -> float:
    if name == "dot_general":
        taps = math.prod(inputs[0][axis] for axis in params["dimension_numbers"][0][0])
    else:
        taps = math.prod(inputs[1]) // inputs[1][params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * taps * math.prod(output)
