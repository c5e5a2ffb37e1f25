"""Tables that a network looks up its inputs in, found in its traced program."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jax import Array
from jax.extend import core
from jaxtyping import Shaped

from jaxfl.types import Model

_PART = 4096
"""Number of examples that are checked at once."""

_KEEPS_VALUES = {
    "broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "expand_dims", "gather",
    "reshape", "slice", "squeeze", "transpose",
}  # fmt: skip
"""Operations whose result has only values of the first operand, perhaps of another dtype."""

_INNER_PROGRAMS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters of operations that hold an inner program, which gets the same operands."""


_Origin = Literal["input", "shifted"] | None
"""Relation of a value to the inputs: unchanged, with a number added, or neither (None)."""


def tables_of(program: core.ClosedJaxpr) -> list[int]:
    """Return the numbers of rows of the tables that a program indexes by its unchanged inputs."""
    tables, _ = _follow(program.jaxpr, ["input"] * len(program.jaxpr.invars))
    return tables


def check_table_rows(name: str, model: Model, inputs: Shaped[Array | np.ndarray, "D ..."]) -> None:
    """Require inputs that index a model's table to be whole numbers in [0, vocabulary).

    A model without a vocabulary takes any inputs.

    Args:
        name: Name of the inputs, for errors.
        model: Model, whose `vocabulary` is the number of rows of its table.
        inputs: Examples, which may be a file that is larger than memory.
    """
    if model.vocabulary is None:
        return
    # No number of this type is outside the table, so a file need not be read.
    if inputs.dtype.kind == "u" and np.iinfo(inputs.dtype).max < model.vocabulary:
        return
    for start in range(0, len(inputs), _PART):
        part = np.asarray(inputs[start : start + _PART])
        # NaN differs from its own floor, so it counts as outside.
        outside = (part < 0) | (part >= model.vocabulary) | (part != np.floor(part))
        if outside.any():
            row = start + int(np.argwhere(outside)[0][0])
            raise ValueError(
                f"{name} must be whole numbers in [0, {model.vocabulary}), the rows of the table "
                f"of model={model.name!r}, got {part[outside][0]} in row {row}. Correct the data, "
                "for instance by a token of its own for padding and for unknown words, or make the "
                "model for a larger vocabulary."
            )


def _follow(program: core.Jaxpr, origins: Sequence[_Origin]) -> tuple[list[int], list[_Origin]]:
    """Return the numbers of rows of the tables that inputs index, and the results' origins.

    Args:
        program: Traced program.
        origins: Origin of each of its inputs.
    """
    tables: list[int] = []
    known: dict[core.Var, _Origin] = dict(zip(program.invars, origins))

    def origin(value: core.Var | core.Literal) -> _Origin:
        if isinstance(value, core.Literal):
            return None
        return known.get(value)

    for operation in program.eqns:
        name = operation.primitive.name
        found = [origin(operand) for operand in operation.invars]
        if not any(found):
            continue
        inner = _inner_program(operation)
        if inner is not None:
            more, results = _follow(inner, found)
            tables += more
            known.update(zip(operation.outvars, results))
        elif name == "gather" and found == [None, "input"]:
            tables += _indexed_rows(operation)
        elif (result := _result_origin(name, found)) is not None:
            known[operation.outvars[0]] = result
    return tables, [origin(result) for result in program.outvars]


def _indexed_rows(operation: core.JaxprEqn) -> list[int]:
    """Return the number of rows of the table that a `gather` indexes, in a list.

    The list is empty if the indices are no row numbers.
    """
    # Row numbers index one axis. Indices of several axes together are no row numbers.
    axes = operation.params["dimension_numbers"].start_index_map
    table: Any = operation.invars[0].aval
    return [table.shape[axis] for axis in axes if len(axes) == 1]


def _result_origin(name: str, found: list[_Origin]) -> _Origin:
    """Return the origin of the result of an operation without an inner program.

    Args:
        name: Name of the operation.
        found: Origin of each operand.
    """
    if name in _KEEPS_VALUES:
        return found[0]
    if name == "add" and "input" in found:
        return "shifted"
    # Indexing in NumPy's way adds the number of rows to negative indices, and selects.
    if name == "select_n" and sorted(map(str, found[1:])) == ["input", "shifted"]:
        return "input"
    return None


def _inner_program(operation: core.JaxprEqn) -> core.Jaxpr | None:
    """Return the program inside an operation that takes the operation's operands, or None."""
    for name in _INNER_PROGRAMS:
        program = operation.params.get(name)
        if isinstance(program, core.ClosedJaxpr):
            program = program.jaxpr
        # The inner program takes the operands only if it has as many inputs.
        if isinstance(program, core.Jaxpr) and len(program.invars) == len(operation.invars):
            return program
    return None
