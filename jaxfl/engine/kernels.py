"""What local steps cost, off the text of XLA's optimized program: kernels, bytes that they read and write, cycles."""

import math
import re
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from jaxfl.local.train import STEP


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
    count as often as they are known to run, and at least once. Other local steps in a loop around, such as another
    stage's, do not count.
    """
    computations = dict(_computations(text))
    loops = (op for operations in computations.values() for op in operations if op.kind == "while")
    bodies = {body for loop in loops for body in _inner(loop)}
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
    total, share, outer = (
        costs[inner],
        1.0,
        {one: name for name in computations for one in _runs(computations[name])},
    )
    stepping = {
        body for body in bodies if not {body, *_below(computations, body)}.isdisjoint(steps)
    }
    depth = _depth(computations[inner])
    for times in trips:
        share, depth = share / times, depth - 1
        around = outer.get(inner)
        if (
            around and _depth(computations[around]) == depth
        ):  # else the loop runs once and is none any more
            inner = around
            total = total.plus(_cost(computations, inner, without=stepping), share)
    return total


def _depth(operations: list[_Operation]) -> int:
    """How many loops of the source a computation is in: the least of its operations, some of which come from within."""
    return min((name.count("while/body") for op in operations if (name := _source(op))), default=0)


def _tagged(operation: _Operation) -> bool:
    return f"/{STEP}/" in _source(operation)


def _source(operation: _Operation) -> str:
    """Where in the source an operation comes from, as JAX names it; nothing where it does not."""
    found = re.search(r'op_name="([^"]*)"', operation.rest)
    return found[1] if found else ""


def _below(computations: dict[str, list[_Operation]], name: str) -> Iterator[str]:
    """The computations that one runs, as loops and branches."""
    for inner in _runs(computations[name]):
        yield from (inner, *_below(computations, inner))


def _runs(operations: list[_Operation]) -> Iterator[str]:
    return (inner for operation in operations for inner in _inner(operation))


def _cost(
    computations: dict[str, list[_Operation]], name: str, without: Set[str] = frozenset()
) -> Cost:
    """Of one run of a computation, loops and branches in it too, except some."""
    operations = computations[name]
    shapes, total = {operation.name: operation.shape for operation in operations}, Cost()
    for operation in operations:
        inner = _inner(operation)
        if not without.isdisjoint(inner):
            continue
        for one in inner:
            total = total.plus(_cost(computations, one), _times(computations, operation))
        if not inner and operation.kind not in _FREE and not operation.kind.endswith("-done"):
            total = total.plus(_kernel(computations, operation, shapes))
    return total


def _inner(operation: _Operation) -> list[str]:
    """The computations that a loop, a branch or a call runs."""
    if operation.kind not in ("while", "conditional", "call"):
        return []
    names = (
        _named(operation, role)
        for role in ("body", "to_apply", "true_computation", "false_computation")
    )
    return [name for name in names if name is not None]


def _named(operation: _Operation, role: str) -> str | None:
    """The computation that an operation has in a role."""
    found = re.search(rf"\b{role}=%?([\w.\-]+)", operation.rest)
    return found[1] if found else None


def _times(computations: dict[str, list[_Operation]], operation: _Operation) -> float:
    """How often a loop runs, where its condition compares with a constant; else once."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', operation.rest):
        return float(known[1])
    if (condition := _named(operation, "condition")) is None:
        return 1
    *_, last = inside = computations[condition]
    limits = [
        float(op.operands[0]) for op in inside if op.kind == "constant" and op.name in last.operands
    ]
    return limits[0] if limits and last.kind == "compare" else 1


def _kernel(
    computations: dict[str, list[_Operation]], operation: _Operation, shapes: dict[str, str]
) -> Cost:
    inside = computations.get(_named(operation, "calls") or "", [])
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
            operations.append(
                _Operation(
                    found[1], found[2], found[3], re.findall(r"%?([\w.\-]+)", arguments), rest
                )
            )


def _size(shape: str) -> float:
    """Bytes of an array, or of all arrays of a tuple."""
    return 1.0 * sum(
        _SIZES.get(kind, 4) * math.prod(int(length) for length in lengths.split(",") if length)
        for kind, lengths in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shape)
    )
