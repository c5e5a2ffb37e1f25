"""Which tables a network looks its inputs up in, read from the traced program."""

from collections.abc import Sequence
from typing import Any, Literal

from jax.extend import core

_KEEPS_VALUES = {
    "broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "expand_dims", "gather", "reshape", "slice",
    "squeeze", "transpose",
}  # fmt: skip
"""Operations whose results have no other values than their first operand."""

_PARTS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters of operations that run a program inside them, with the same operands."""


_Origin = Literal["input", "shifted"] | None
"""How a value comes from the inputs: unchanged, or with a number added."""


def tables_of(program: core.ClosedJaxpr) -> list[int]:
    """Return the sizes of the tables that a traced program looks its inputs up in, as the inputs are."""
    return _follow(program.jaxpr, ["input"] * len(program.jaxpr.invars))[0]


def _follow(program: core.Jaxpr, origins: Sequence[_Origin]) -> tuple[list[int], list[_Origin]]:
    """Return the tables that a program indexes by inputs of these origins, and the origins of its results."""
    tables: list[int] = []
    known: dict[core.Var, _Origin] = dict(zip(program.invars, origins))

    def origin(value: core.Var | core.Literal) -> _Origin:
        return None if isinstance(value, core.Literal) else known.get(value)

    for operation in program.eqns:
        name = operation.primitive.name
        found = [origin(operand) for operand in operation.invars]
        if not any(found):
            continue
        inner = _inner(operation)
        if inner is not None:
            more, results = _follow(inner, found)
            tables += more
            known.update(zip(operation.outvars, results))
        elif name == "gather" and found == [None, "input"]:
            axes = operation.params["dimension_numbers"].start_index_map
            table: Any = operation.invars[0].aval
            tables += [table.shape[axis] for axis in axes if len(axes) == 1]
        elif name in _KEEPS_VALUES:
            known[operation.outvars[0]] = found[0]
        elif name == "add" and "input" in found:
            known[operation.outvars[0]] = "shifted"
        elif name == "select_n" and sorted(map(str, found[1:])) == ["input", "shifted"]:
            known[operation.outvars[0]] = (
                "input"  # NumPy's negative indices, to which the number of rows is added
            )
    return tables, [origin(result) for result in program.outvars]


def _inner(operation: core.JaxprEqn) -> core.Jaxpr | None:
    """Return the program inside an operation that gets the operation's own operands."""
    for name in _PARTS:
        part = operation.params.get(name)
        program = part.jaxpr if isinstance(part, core.ClosedJaxpr) else part
        if isinstance(program, core.Jaxpr) and len(program.invars) == len(operation.invars):
            return program
    return None
