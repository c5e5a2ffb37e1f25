"""Argument checks shared by all builders: a ValueError with name, value and remedy.

A sweep calls a builder with each value first, and then once more with a traced number in its place, which passes.
"""

import math
from collections.abc import Collection
from typing import Any

import jax


def traced(value: Any) -> bool:
    """Whether a number is an argument of the program that is being compiled."""
    return isinstance(value, jax.core.Tracer)


def nonzero(value: Any) -> bool:
    """Whether a number is, or may turn out to be, other than 0."""
    return traced(value) or bool(value)


def check_positive(name: str, value: Any, *, zero: bool = False, infinite: bool = False) -> None:
    """Require a real number above zero (or equal to it, where `zero`)."""
    if traced(value):
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if number and (value > 0 or (zero and value == 0)) and (infinite or math.isfinite(value)):
        return
    bound = "at least 0" if zero else "above 0"
    raise ValueError(f"{name}={value!r}: give a {'' if infinite else 'finite '}number {bound}")


def check_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> None:
    """Require a whole number in [least, most]."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and value >= least and (most is None or value <= most):
        return
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name}={value!r}: give a whole number {limits}")


def check_fraction(name: str, value: Any, *, zero: bool = False, one: bool = True) -> None:
    """Require a number in (0, 1], or [0, 1] where `zero`, or (0, 1) without `one`."""
    if traced(value):
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (0 < value < 1 or (zero and value == 0) or (one and value == 1)):
        return
    raise ValueError(f"{name}={value!r}: give a number in {'[' if zero else '('}0, 1{']' if one else ')'}")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Require one of the named choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")
