"""Footprint of a round that is compiled for an absent chip: its memory, and a local step's cost.

`tools.footprint.hlo` reads the kernels and bytes of a step from XLA's optimised text. The trace of
the program gives the operations of a step.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfl._support.checks import check_choice, check_count, check_positive, checked, key_of
from jaxfl.engine.chunk import fitting
from jaxfl.engine.mesh import Population, common_size, in_rows
from jaxfl.engine.program import compile_rounds, first_states
from jaxfl.local.train import STEP
from jaxfl.types import Algorithm, Clients, Tree
from tools.footprint.chips import CHIPS, device_of
from tools.footprint.hlo import step_cost


class Footprint(NamedTuple):
    """Estimated resources of a round.

    Kernels, bytes and cycles are those of the local step that moves the most bytes.
    """

    chip: str
    chunk: int
    kernels: float
    """Kernels per local step of a chunk, with the step's share of the enclosing loops."""
    in_step: float
    """Kernels per local step of a chunk, without the enclosing loops."""
    bytes: float
    """Bytes that `kernels` read and write, per client."""
    flops: float
    """Operations in matrix products and convolutions, see `step_flops`."""
    memory: float
    """Bytes of temporary arrays per client of a chunk."""
    held: float
    """Bytes of the program's arguments: examples, their row numbers, and states."""
    largest_chunk: int
    """Largest chunk whose temporary arrays fit in the memory that the arguments leave."""
    expected_us: float
    """Microseconds per client-step by the compiler's count of cycles. NaN if it counts none."""

    @property
    def bandwidth_us(self) -> float:
        """Return the microseconds per client-step if all bytes moved at the memory's full speed."""
        return 1e6 * self.bytes / CHIPS[self.chip].bandwidth

    @property
    def compute_us(self) -> float:
        """Return the microseconds per client-step at the peak rate in `Chip.flops`."""
        return 1e6 * self.flops / CHIPS[self.chip].flops

    @property
    def microseconds(self) -> float:
        """Return the compiler's estimate per client-step, or a lower bound if there is none.

        The bound is the larger one of `bandwidth_us` and `compute_us`. It holds for products in the
        precision of `Chip.flops`.
        """
        if math.isnan(self.expected_us):
            return max(self.bandwidth_us, self.compute_us)
        return self.expected_us


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
    """Compile a round of all clients for one chip, and read its resources from the program.

    Args:
        chip: Name of a chip in `tools.footprint.chips.CHIPS`.
        algorithm: The method whose round is compiled.
        clients: Host arrays. Only the numbers of training examples are read. All other arrays may
            be shapes (`jax.ShapeDtypeStruct`).
        chunk: Number of clients vectorised at a time. It is halved until the chip's memory holds
            the program.
        trips: Numbers of iterations of the loop over local steps and of the loops around it, from
            the inside. A step then gets its share of the other work in these loops. `LocalSGD` has
            steps in a block, blocks in an epoch, and epochs. The default counts the step alone.

    Raises:
        ValueError: The chip's compiler is not installed or does not start, or an argument is
            malformed.
    """
    sheet = CHIPS[chip]
    population = abstract_population(clients, device_of(chip))
    arguments = _arguments(algorithm, population)

    def build(chunk: int) -> functools.partial:
        return compile_rounds(algorithm, population, chunk=chunk, segment=1)

    program = fitting(build, chunk, arguments, call=False)
    step: Any = program.step
    compiled = step.func
    text = compiled.as_text()
    cost = step_cost(text, trips)
    alone = step_cost(text)
    held = compiled.memory_analysis().argument_size_in_bytes
    expected = math.nan
    if cost.cycles:
        expected = 1e6 * cost.cycles / sheet.clock / program.chunk
    flops = step_flops(algorithm, population)
    return Footprint(
        chip=chip,
        chunk=program.chunk,
        kernels=cost.kernels,
        in_step=alone.kernels,
        bytes=cost.bytes / program.chunk,
        flops=flops,
        memory=program.memory,
        held=held,
        largest_chunk=int(max(0.0, sheet.memory - held) / max(1.0, program.memory)),
        expected_us=expected,
    )


def step_flops(algorithm: Algorithm, population: Population) -> float:
    """Return the operations in matrix products and convolutions of one client's local step.

    A multiply-add counts as two. If the program has several local steps, such as those of two
    stages, the result is their sum.
    """
    alone: Any = compile_rounds(algorithm, population, chunk=1, segment=1)
    traced = alone.func.trace(*alone.args, *_arguments(algorithm, population), **alone.keywords)
    return sum(products(traced.jaxpr.jaxpr, STEP))


def abstract_population(clients: Clients, device: jax.Device) -> Population:
    """Return the clients as a population of shapes, without data, on a device that may be absent.

    All clients have the capacity of the largest one. A program then has one loop of local steps,
    where clients of different capacities would have one loop each.
    """
    mesh = Mesh(np.array([device]), ("clients",))
    shapes = _placed_shapes(mesh, jax.eval_shape(in_rows, clients), P("clients"))
    largest = max(1, int(np.max(clients.train_size)))
    return Population(
        shapes, clients.num_clients, mesh, size=common_size(clients), capacities=(largest,)
    )


def _placed_shapes(mesh: Mesh, tree: Tree, spec: P) -> Tree:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def _arguments(algorithm: Algorithm, population: Population) -> tuple:
    """Return the shapes of the arguments of a round, without the clients."""
    key, number = jax.eval_shape(lambda: (key_of(0), jax.numpy.int32(0)))
    start = functools.partial(first_states, algorithm, population=population)
    center, states = jax.eval_shape(start, key, key)
    shared = _placed_shapes(population.mesh, (key, number, number, center), P())
    return *shared, _placed_shapes(population.mesh, states, P("clients"))


def products(jaxpr: Any, scope: str = "", inside: bool = False) -> Iterator[float]:
    """Yield the operations of each matrix product and convolution of a program, in order.

    A multiply-add counts as two operations. The body of a loop counts once.

    Args:
        jaxpr: The program.
        scope: Name of a `jax.named_scope`. Only products within the scope count. The default counts
            all products.
        inside: Whether the program itself lies within the scope.
    """
    for equation in jaxpr.eqns:
        within = inside or scope in str(equation.source_info.name_stack)
        name = equation.primitive.name
        params = equation.params
        if name in ("dot_general", "conv_general_dilated"):
            if within:
                inputs = [variable.aval.shape for variable in equation.invars]
                yield _product_flops(name, params, inputs, equation.outvars[0].aval.shape)
            continue
        parts = jax.tree.leaves(tuple(params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns"))
        for part in parts:
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from products(inner, scope, within)


def _product_flops(
    name: str, params: dict[str, Any], inputs: list[tuple[int, ...]], output: tuple[int, ...]
) -> float:
    """Return the operations of a matrix product or a convolution. A multiply-add counts as two.

    Args:
        name: Name of the primitive: "dot_general" or "conv_general_dilated".
        params: Parameters of the primitive.
        inputs: Shapes of the operands.
        output: Shape of the result.
    """
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        taps = math.prod(inputs[0][axis] for axis in contracted)
    else:
        kernel = inputs[1]
        features_axis = params["dimension_numbers"].rhs_spec[0]
        taps = math.prod(kernel) // kernel[features_axis]
    return 2.0 * taps * math.prod(output)
