"""A round compiled for a chip that is not there: its memory, and what one local step moves and computes.

What a step costs is read off the compiler's optimized text: its kernels, the bytes that these read and write, and, on a
TPU, the cycles that its compiler expects.
"""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfl._validate import check_choice, check_count, check_positive, checked
from jaxfl.chips import CHIPS, device_of
from jaxfl.engine.mesh import Population, in_rows
from jaxfl.engine.program import compile_rounds, first_states
from jaxfl.local.train import STEP
from jaxfl.types import Algorithm, Clients, Tree


class Footprint(NamedTuple):
    """What a round needs of a chip; of all local steps of its method, the one that moves most bytes counts."""

    chip: str
    chunk: int
    kernels: float
    """Of a local step of all clients of a chunk together."""
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
        return max(self.bandwidth_us, self.compute_us) if math.isnan(self.expected_us) else self.expected_us


def _check_trips(name: str, value: Any) -> tuple[float, ...]:
    return tuple(check_positive(f"{name}[{i}]", times) for i, times in enumerate(value))


@checked(chip=lambda name, value: check_choice(name, value, tuple(CHIPS)), chunk=check_count, trips=_check_trips)
def footprint(
    chip: str, algorithm: Algorithm, clients: Clients, *, chunk: int, trips: Sequence[float] = ()
) -> Footprint:
    """Compile a round of all clients for one chip, and read what it needs off the program.

    Args:
        chip: one of `jaxfl.chips.CHIPS`.
        algorithm: what a round does.
        clients: host arrays, or their shapes (`jax.ShapeDtypeStruct`): nothing else is read.
        chunk: clients vectorised at a time; halved where the chip's memory does not hold them.
        trips: how often the loop over local steps runs, and those around it, from the inside; a step then has its
            share of what they do besides. Of `LocalSGD`: steps in a block, blocks in an epoch, epochs.

    Raises:
        ValueError: the chip's compiler is not installed.
    """
    sheet, population = CHIPS[chip], described(clients, device_of(chip))
    arguments = _arguments(algorithm, population)
    compiled = None
    while compiled is None:
        step: Any = compile_rounds(algorithm, population, chunk=chunk, segment=1)
        try:
            compiled = step.func.lower(*step.args, *arguments, **step.keywords).compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or chunk == 1:
                raise
            chunk //= 2
    alone: Any = compile_rounds(algorithm, population, chunk=1, segment=1)
    flops = sum(step_products(alone.func.trace(*alone.args, *arguments, **alone.keywords).jaxpr.jaxpr))
    memory, cost = compiled.memory_analysis(), step_cost(compiled.as_text(), trips)
    each, held = memory.temp_size_in_bytes / chunk, memory.argument_size_in_bytes
    expected = 1e6 * cost.cycles / sheet.clock / chunk if cost.cycles else math.nan
    largest = int(max(0.0, sheet.memory - held) / max(1.0, each))
    return Footprint(chip, chunk, cost.kernels, cost.bytes / chunk, flops, each, held, largest, expected)


def described(clients: Clients, device: jax.Device) -> Population:
    """Clients on a device that need not be there: shapes in place of arrays."""
    mesh = Mesh(np.array([device]), ("clients",))
    return Population(_shapes(mesh, jax.eval_shape(in_rows, clients), P("clients")), clients.number, mesh)


def _shapes(mesh: Mesh, tree: Tree, spec: P) -> Tree:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def _arguments(algorithm: Algorithm, population: Population) -> tuple:
    """Shapes of a call's arguments besides the clients."""
    key, number = jax.eval_shape(lambda: (jax.random.key(0), jax.numpy.int32(0)))
    start = functools.partial(first_states, algorithm, population=population)
    center, states = jax.eval_shape(start, key, key)
    shared = _shapes(population.mesh, (key, number, number, center), P())
    return *shared, _shapes(population.mesh, states, P("clients"))


def step_products(jaxpr: Any, inside: bool = False) -> Iterator[float]:
    """Operations of the products of a program's local steps, a multiply-add as two; a loop's body counts once."""
    for equation in jaxpr.eqns:
        within = inside or STEP in str(equation.source_info.name_stack)
        name, params = equation.primitive.name, equation.params
        if name in ("dot_general", "conv_general_dilated"):
            if within:
                yield _operations(name, params, [v.aval.shape for v in equation.invars], equation.outvars[0].aval.shape)
            continue
        for value in jax.tree.leaves(tuple(params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from step_products(inner, within)


def _operations(name: str, params: dict[str, Any], inputs: list[tuple[int, ...]], output: tuple[int, ...]) -> float:
    if name == "dot_general":
        taps = math.prod(inputs[0][axis] for axis in params["dimension_numbers"][0][0])
    else:
        taps = math.prod(inputs[1]) // inputs[1][params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * taps * math.prod(output)


class Cost(NamedTuple):
    """Of all clients of a chunk."""

    kernels: float = 0
    bytes: float = 0
    cycles: float = 0

    def plus(self, other: "Cost", times: float = 1) -> "Cost":
        """Added up."""
        return Cost(*(mine + times * its for mine, its in zip(self, other, strict=True)))


_SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8,
          "u64": 8, "f64": 8, "c64": 8}  # fmt: skip
"""Bytes of XLA's types; others have 4."""

_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
         "copy-start", "optimization-barrier"}  # fmt: skip
"""Operations that no kernel is for."""


class _Operation(NamedTuple):
    name: str
    shape: str
    kind: str
    operands: list[str]
    rest: str


def step_cost(text: str, trips: Sequence[float] = ()) -> Cost:
    """Of the largest loop body that is a local step, off the text of an optimized program; of loops around it a share.

    A kernel is an operation outside fusions; it reads its operands and writes its result. Of an operand that it only
    slices or gathers from, and of a result that it only updates in place, what is touched counts. Loops in a step
    count as often as they are known to run, and at least once.
    """
    computations = dict(_computations(text))
    bodies = {
        match[1]
        for operations in computations.values()
        for operation in operations
        if operation.kind == "while" and (match := re.search(r"body=%?([\w.\-]+)", operation.rest))
    }
    steps = [name for name in bodies if any(_tagged(op) and op.kind not in _FREE for op in computations[name])]
    nested = {inner for name in steps for inner in _below(computations, name)}
    costs = {name: _cost(computations, name) for name in steps if name not in nested}
    if not costs:
        return Cost()
    inner = max(costs, key=lambda name: costs[name].bytes)
    total, share, outer = costs[inner], 1.0, {one: name for name in computations for one in _runs(computations[name])}
    for times in trips:
        share, inside = share / times, inner
        inner = outer[inner]
        total = total.plus(_cost(computations, inner, without=inside), share)
    return total


def _tagged(operation: _Operation) -> bool:
    name = re.search(r'op_name="([^"]*)"', operation.rest)
    return bool(name and f"/{STEP}/" in name[1])


def _below(computations: dict[str, list[_Operation]], name: str) -> Iterator[str]:
    """The computations that one runs, as loops and branches."""
    for inner in _runs(computations[name]):
        yield from (inner, *_below(computations, inner))


def _runs(operations: list[_Operation]) -> Iterator[str]:
    return (inner for operation in operations for inner in _inner(operation))


def _cost(computations: dict[str, list[_Operation]], name: str, without: str = "") -> Cost:
    """Of one run of a computation, loops and branches in it too, except one."""
    operations = computations[name]
    shapes, total = {operation.name: operation.shape for operation in operations}, Cost()
    for operation in operations:
        inner = _inner(operation)
        if without in inner:
            continue
        if inner:
            times = _times(computations, operation)
            total = functools.reduce(lambda total, one: total.plus(_cost(computations, one), times), inner, total)
        elif operation.kind not in _FREE and not operation.kind.endswith("-done"):
            total = total.plus(_kernel(computations, operation, shapes))
    return total


def _inner(operation: _Operation) -> list[str]:
    """The computations that a loop, a branch or a call runs."""
    if operation.kind not in ("while", "conditional", "call"):
        return []
    return re.findall(r"(?:body|to_apply|true_computation|false_computation)=%?([\w.\-]+)", operation.rest)


def _times(computations: dict[str, list[_Operation]], operation: _Operation) -> float:
    """How often a loop runs, where its condition compares with a constant; else once."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', operation.rest):
        return float(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", operation.rest)
    if not condition:
        return 1
    *_, last = inside = computations[condition[1]]
    limits = [float(op.operands[0]) for op in inside if op.kind == "constant" and op.name in last.operands]
    return limits[0] if limits and last.kind == "compare" else 1


def _kernel(computations: dict[str, list[_Operation]], operation: _Operation, shapes: dict[str, str]) -> Cost:
    called = re.search(r"calls=%?([\w.\-]+)", operation.rest)
    inside = computations.get(called[1], []) if called else []
    read = [_size(shapes.get(operand, "")) for operand in operation.operands]
    written = _size(operation.shape)
    if operation.kind in ("dynamic-slice", "gather"):
        read = [written]
    elif operation.kind == "dynamic-update-slice":
        read, written = [], 2 * _size(shapes.get(operation.operands[1], ""))
    parameters = {op.name: int(op.operands[0]) for op in inside if op.kind == "parameter"}
    local = {op.name: op.shape for op in inside}
    for name, index in parameters.items():
        users = list(_users(inside, name))
        if {op.kind for op, _ in users} <= {"dynamic-slice", "gather"} and all(
            op.operands[0] == at for op, at in users
        ):
            read[index] = min(read[index], sum(_size(op.shape) for op, _ in users))
        elif all(op.kind == "dynamic-update-slice" and op.operands[0] == at for op, at in users):
            written += sum(_size(local[op.operands[1]]) for op, _ in users) - read[index]
            read[index] = 0
    cycles = re.search(r'"estimated_cycles":"(\d+)"', operation.rest)
    return Cost(1, sum(read) + max(0.0, written), float(cycles[1]) if cycles else 0)


def _users(operations: list[_Operation], name: str) -> Iterator[tuple[_Operation, str]]:
    """What reads a value, with the name it has there: another one behind changes of shape."""
    for operation in operations:
        if name in operation.operands:
            if operation.kind in ("bitcast", "reshape"):
                yield from _users(operations, operation.name)
            else:
                yield operation, name


def _computations(text: str) -> Iterator[tuple[str, list[_Operation]]]:
    """Computations of a program by name."""
    name, operations = "", []
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name, operations = head[1], []
        elif line == "}":
            yield name, operations
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", line):
            arguments, _, rest = found[4].partition(")")
            operations.append(_Operation(found[1], found[2], found[3], re.findall(r"%?([\w.\-]+)", arguments), rest))


def _size(shape: str) -> float:
    """Bytes of an array, or of all arrays of a tuple."""
    return 1.0 * sum(
        _SIZES.get(kind, 4) * math.prod(int(length) for length in lengths.split(",") if length)
        for kind, lengths in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shape)
    )
