"""Cost of local steps, read from the text of XLA's optimised program (HLO)."""

import math
import re
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple, TypeAlias

from jaxfl.local.train import STEP


class Cost(NamedTuple):
    """Cost of a piece of a program, for all clients of a chunk together."""

    kernels: float = 0
    bytes: float = 0
    """Bytes that the kernels read and write."""
    cycles: float = 0
    """Cycles that the compiler estimates. 0 if it estimates none."""

    def plus(self, other: "Cost", times: float = 1) -> "Cost":
        """Return this cost plus `times` the other cost."""
        return Cost(*(mine + times * its for mine, its in zip(self, other, strict=True)))


_SIZES = {
    "pred": 1,
    "s4": 0.5,
    "u4": 0.5,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s64": 8,
    "u64": 8,
    "f64": 8,
    "c64": 8,
}
"""Bytes of a number of XLA's types. Types that are not named have 4 bytes."""

_FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "copy-start",
    "optimization-barrier",
}
"""Operations that do not count as a kernel."""


class _Operation(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    kind: str
    operands: list[str]
    rest: str
    """Text after the operands: attributes and metadata."""


_Computations: TypeAlias = dict[str, list[_Operation]]
"""Operations of each computation of a program, by the computation's name."""


def step_cost(text: str, trips: Sequence[float] = ()) -> Cost:
    """Estimate the cost of one local step, plus its share of the enclosing loops.

    If the program has several local steps, such as those of two stages, the one that moves the most
    bytes counts. The other ones do not count as work of an enclosing loop.

    A kernel is an operation outside fusions. It reads its operands and writes its result. Sliced
    operands and results updated in place count only the bytes that are touched. Loops inside a step
    count as often as they are known to run, or else once. A program without a local step costs 0.

    Args:
        text: XLA's optimised text of the program.
        trips: Numbers of iterations of the loop over local steps and of the loops around it, from
            the inside. The default counts the step alone.
    """
    computations = dict(_parsed(text))
    loops = (op for operations in computations.values() for op in operations if op.kind == "while")
    bodies = {body for loop in loops for body in _inner_computations(loop)}
    steps = [
        name
        for name in bodies
        if any(_tagged(op) and op.kind not in _FREE for op in computations[name])
    ]
    nested = {inner for name in steps for inner in _below(computations, name)}
    costs = {name: _cost(computations, name) for name in steps if name not in nested}
    if not costs:
        return Cost()
    inner = max(costs, key=lambda name: costs[name].bytes)
    total = costs[inner]
    share = 1.0
    outer = {one: name for name in computations for one in _runs(computations[name])}
    stepping = {
        body for body in bodies if not {body, *_below(computations, body)}.isdisjoint(steps)
    }
    depth = _depth(computations[inner])
    for times in trips:
        share = share / times
        depth = depth - 1
        around = outer.get(inner)
        # XLA removes a loop that runs once. No computation then has the depth of its body.
        if around and _depth(computations[around]) == depth:
            inner = around
            total = total.plus(_cost(computations, inner, without=stepping), share)
    return total


def _depth(operations: list[_Operation]) -> int:
    """Return the number of loops of the source that a computation is in.

    This is the smallest depth among its operations, because XLA hoists some out of inner loops.
    """
    return min((name.count("while/body") for op in operations if (name := _source(op))), default=0)


def _tagged(operation: _Operation) -> bool:
    return f"/{STEP}/" in _source(operation)


def _source(operation: _Operation) -> str:
    """Return JAX's name of an operation's place in the source, or "" if there is no name."""
    found = re.search(r'op_name="([^"]*)"', operation.rest)
    return found[1] if found else ""


def _below(computations: _Computations, name: str) -> Iterator[str]:
    """Yield the names of computations that a computation runs, at any depth."""
    for inner in _runs(computations[name]):
        yield from (inner, *_below(computations, inner))


def _runs(operations: list[_Operation]) -> Iterator[str]:
    return (inner for operation in operations for inner in _inner_computations(operation))


def _cost(computations: _Computations, name: str, without: Set[str] = frozenset()) -> Cost:
    """Return the cost of one execution of a computation, with its loops and calls.

    Both branches of a conditional with two named branches count.
    Operations that run a computation in `without` do not count.
    """
    operations = computations[name]
    shapes = {operation.name: operation.shape for operation in operations}
    total = Cost()
    for operation in operations:
        inner = _inner_computations(operation)
        if not without.isdisjoint(inner):
            continue
        for one in inner:
            total = total.plus(_cost(computations, one), _trip_count(computations, operation))
        if not inner and operation.kind not in _FREE and not operation.kind.endswith("-done"):
            total = total.plus(_kernel(computations, operation, shapes))
    return total


def _inner_computations(operation: _Operation) -> list[str]:
    """Return the names of the computations that a loop, a conditional or a call runs.

    The condition of a loop and the numbered branches of a conditional are left out.
    """
    if operation.kind not in ("while", "conditional", "call"):
        return []
    roles = ("body", "to_apply", "true_computation", "false_computation")
    names = (_named_computation(operation, role) for role in roles)
    return [name for name in names if name is not None]


def _named_computation(operation: _Operation, role: str) -> str | None:
    """Return the computation that an operation names for a role, such as "body", or None."""
    found = re.search(rf"\b{role}=%?([\w.\-]+)", operation.rest)
    return found[1] if found else None


def _trip_count(computations: _Computations, operation: _Operation) -> float:
    """Return the number of times that a loop runs, or 1 if it is not known.

    The number is known if XLA states it, or if the loop's condition compares with a constant.
    In the second case the loop is taken to count from 0 by 1.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', operation.rest)
    if known:
        return float(known[1])
    condition = _named_computation(operation, "condition")
    if condition is None:
        return 1
    inside = computations[condition]
    last = inside[-1]
    limits = [
        float(op.operands[0]) for op in inside if op.kind == "constant" and op.name in last.operands
    ]
    return limits[0] if limits and last.kind == "compare" else 1


def _kernel(computations: _Computations, operation: _Operation, shapes: dict[str, str]) -> Cost:
    """Return the cost of one kernel.

    Args:
        computations: All computations of the program.
        operation: The operation that the kernel computes.
        shapes: Shapes of the kernel's operands, by name.
    """
    inside = computations.get(_named_computation(operation, "calls") or "", [])
    read = [_size(shapes.get(operand, "")) for operand in operation.operands]
    written = _size(operation.shape)
    if operation.kind in ("dynamic-slice", "gather"):
        read = [written]
    elif operation.kind == "dynamic-update-slice":
        read = []
        written = 2 * _size(shapes.get(operation.operands[1], ""))
    parameters = {op.name: int(op.operands[0]) for op in inside if op.kind == "parameter"}
    local = {op.name: op.shape for op in inside}
    for name, index in parameters.items():
        users = list(_users(inside, name))
        kinds = {op.kind for op, _ in users}
        is_source = all(op.operands[0] == at for op, at in users)
        if kinds <= {"dynamic-slice", "gather"} and is_source:
            read[index] = min(read[index], sum(_size(op.shape) for op, _ in users))
        elif kinds <= {"dynamic-update-slice"} and is_source:
            written += sum(_size(local[op.operands[1]]) for op, _ in users) - read[index]
            read[index] = 0
    found = re.search(r'"estimated_cycles":"(\d+)"', operation.rest)
    cycles = float(found[1]) if found else 0
    return Cost(1, sum(read) + max(0.0, written), cycles)


def _users(operations: list[_Operation], name: str) -> Iterator[tuple[_Operation, str]]:
    """Yield the operations that read a value, and the value's name in each of them.

    A change of shape gives the value another name.
    """
    for operation in operations:
        if name in operation.operands:
            if operation.kind in ("bitcast", "reshape"):
                yield from _users(operations, operation.name)
            else:
                yield operation, name


def _parsed(text: str) -> Iterator[tuple[str, list[_Operation]]]:
    """Yield the name and the operations of each computation in a program's text."""
    name = ""
    operations: list[_Operation] = []
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = head[1]
            operations = []
        elif line == "}":
            yield name, operations
        elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", line):
            result, shape, kind, arguments_and_rest = found.groups()
            arguments, _, rest = arguments_and_rest.partition(")")
            operands = re.findall(r"%?([\w.\-]+)", arguments)
            operations.append(_Operation(result, shape, kind, operands, rest))


def _size(shape: str) -> float:
    """Return the bytes of an array, or of all arrays of a tuple, from the text of its shape."""
    total = 0.0
    for kind, lengths in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shape):
        count = math.prod(int(length) for length in lengths.split(",") if length)
        total += _SIZES.get(kind, 4) * count
    return total
