"""Candidates of a comparison: methods, and the points of each that tuning tries."""

import functools
import inspect
import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy

from jaxfl._support.checks import (
    check_array,
    check_callable,
    check_count,
    check_instance,
    checked,
    is_listed,
    plain,
    show,
)
from jaxfl.report.layout import FILES
from jaxfl.run.check import check_columns, check_values
from jaxfl.types import Algorithm


class Candidate(NamedTuple):
    """Method of a comparison, with the points that tuning tries.

    Args:
        build: Function from keyword arguments to an algorithm, as in `jaxfl.sweep`. If it takes
            `noise_multiplier`, the method is run at every epsilon. Otherwise, or if a partial has
            fixed this argument, the method is run at the target infinity alone.
        points: Columns of values to try, by argument of `build` (see `grid` and `spread`). Values
            are numbers, or anything else that `build` takes, such as models. One program runs all
            points whose values decide neither a shape nor a Python branch. Values that do, such as
            batch sizes, epochs and models, have a program each.
        rounds: Number of rounds of this method, all of which a method that sends something runs.
            None stands for the comparison's. A method that sends nothing stops at the round that is
            best on validation examples, so give it as many rounds as it can use.
    """

    build: Callable[..., Algorithm]
    points: Mapping[str, Sequence[Any]] = {}
    rounds: int | None = None

    @property
    def private(self) -> bool:
        """Whether the method takes noise, which no partial has fixed."""
        names = set(inspect.signature(self.build).parameters)
        # The signature of a partial still has the arguments that it fixes by name.
        if isinstance(self.build, functools.partial):
            names.difference_update(self.build.keywords)
        return "noise_multiplier" in names

    @property
    def num_points(self) -> int:
        """Number of points that tuning tries. Without columns there is one, without arguments."""
        # A method without columns has one point, which has no arguments.
        return len(next(iter(self.points.values()), (0,)))

    def point(self, index: int) -> dict[str, Any]:
        """Return the arguments of the point at an index, by name."""
        return {argument: column[index] for argument, column in self.points.items()}

    def at(self, index: int) -> Algorithm:
        """Return the algorithm of a point, with a noise multiplier of 1 if it takes noise."""
        if self.private:
            return self.build(**self.point(index), noise_multiplier=1.0)
        return self.build(**self.point(index))


def grid(**axes: Any) -> dict[str, list[Any]]:
    """Return all combinations of some values, as a column by argument. Integers stay integers.

    The last argument varies fastest.

    Args:
        axes: Values of each argument.

    Raises:
        ValueError: An argument has no values, has NaN or complex numbers, or is an array that is no
            vector.
        TypeError: The values of an argument are not a list.

    >>> grid(rate=[0.1, 0.3], batch_size=[4, 8])
    {'rate': [0.1, 0.1, 0.3, 0.3], 'batch_size': [4, 8, 4, 8]}
    """
    columns = _check_columns("axes", axes)
    if empty := [name for name, axis in columns.items() if not axis]:
        raise ValueError(
            f"{empty[0]} must have at least one value, got {axes[empty[0]]!r}. "
            "Add one value, or leave the argument out."
        )
    # The product comes as points, and is turned into columns.
    points = itertools.product(*columns.values())
    return {name: list(column) for name, column in zip(columns, zip(*points), strict=True)}


@checked()
def spread(num_points: int, **axes: Any) -> dict[str, list[float]]:
    """Return points that fill a box of positive numbers evenly, as columns.

    The scale is logarithmic, and the points are Halton's sequence. They give methods of one, two
    and three arguments the same number of points. Points are rounded to six digits. Otherwise they
    could differ between processors in the last digits. A comparison that was begun on one processor
    could then not be resumed on another.

    Args:
        num_points: Number of points.
        axes: Two ends above 0 of each argument, the smaller one first.

    Raises:
        ValueError: An argument does not have two finite ends above 0, the smaller one first.

    >>> spread(3, rate=(0.01, 1.0), clip=(0.1, 10.0))
    {'rate': [0.1, 0.0316228, 0.316228], 'clip': [0.464159, 2.15443, 0.16681]}
    """
    for name, ends in check_values("axes", axes).items():
        if len(ends) != 2 or not 0 < ends[0] < ends[1] < math.inf:
            raise ValueError(
                f"{name} must be two finite numbers above 0, the smaller one first, "
                f"got {show(axes[name])}. Give for instance (0.03, 0.3)."
            )
    if not axes:
        return {}
    low, high = np.log(list(axes.values())).T
    # The first point of the sequence is the origin, which is skipped.
    sequence = scipy.stats.qmc.Halton(len(axes), scramble=False).fast_forward(1)
    # Points are drawn between logarithms, which makes the scale logarithmic.
    points = np.exp(low + sequence.random(num_points) * (high - low))
    columns = zip(axes, points.T, strict=True)
    return {name: [float(f"{value:.6g}") for value in column] for name, column in columns}


def _check_columns(name: str, value: Any) -> dict[str, list[Any]]:
    """Require columns of values by argument, and return them with numbers as Python's types."""
    return check_columns(name, value, _check_column, "values")


def _check_column(name: str, value: Any) -> list[Any]:
    if isinstance(value, np.ndarray | jax.Array):
        array = check_array(name, value)
        if array.ndim != 1:
            raise ValueError(f"{name} must be a vector, got {show(value)}. Give a list of values.")
        value = array.tolist()
    if not is_listed(value):
        raise TypeError(
            f"{name} must be a list of values, got {show(value)}. Give a list, even of one value."
        )
    # Numbers of NumPy become Python's own, which JSON can hold.
    column = [plain(item) for item in value]
    for item in column:
        if isinstance(item, complex) or (isinstance(item, float) and math.isnan(item)):
            raise ValueError(
                f"{name} must not have NaN or complex numbers, got {show(value)}. "
                "Give real numbers, or other values."
            )
    return column


def check_methods(name: str, value: Any) -> dict[str, Candidate]:
    """Require candidates by names that the folders of a comparison can have, and return them."""
    if not isinstance(value, Mapping) or not value:
        raise TypeError(
            f"{name} must be candidates by name, got {show(value)}. "
            "Give for instance {'DP-FedAvg': Candidate(build)}."
        )
    reserved = {
        _name_in_folder(file): f"{file!r}, a file of a comparison or a run" for file in FILES
    }
    for method in value:
        _check_name(name, method, value)
        if (other := reserved.get(_name_in_folder(method))) is not None:
            raise ValueError(
                f"{name} must have different names, got {method!r} and {other}, which may be the "
                "same in a folder. Choose another name."
            )
        # No later method may have this name, in any case or Unicode form.
        reserved[_name_in_folder(method)] = repr(method)
    return {
        method: _check_candidate(f"{name}[{method!r}]", candidate)
        for method, candidate in value.items()
    }


def _name_in_folder(name: str) -> str:
    """Return a name in one case and one Unicode form, because some file systems ignore these."""
    return unicodedata.normalize("NFKC", name).casefold()


def _check_name(name: str, method: Any, methods: Mapping[Any, Any]) -> None:
    """Require a name that a folder can have and that begins with no dot.

    Args:
        name: Name of the argument that has the methods.
        method: Name of a method.
        methods: All methods, for the error message.
    """
    allowed = isinstance(method, str) and re.fullmatch(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*", method)
    if not allowed or len(method.encode(errors="replace")) > 200:
        raise ValueError(
            f"{name} must have names that a folder can have, got {show(method)} in "
            f"{show(methods)}. Give at most 200 bytes of text without slashes and control "
            "characters, which does not begin with a dot."
        )


def _check_candidate(name: str, value: Any) -> Candidate:
    candidate = check_instance(name, value, (Candidate,))
    check_callable(f"{name}.build", candidate.build)
    if candidate.rounds is not None:
        check_count(f"{name}.rounds", candidate.rounds)
    points = _check_columns(f"{name}.points", candidate.points)
    lengths = {argument: len(column) for argument, column in points.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values() or "noise_multiplier" in points:
        raise ValueError(
            f"{name}.points must be columns of one length, without noise_multiplier, got columns "
            f"of {lengths}. Give each point a value in every column, and leave noise_multiplier to "
            "the epsilons of the comparison."
        )
    return candidate._replace(points=points)


def is_json_value(value: Any) -> bool:
    """Return whether a value is None, a text, a boolean or a real number."""
    return value is None or isinstance(value, str | bool | int | float)


def texts_of(column: Sequence[Any]) -> list[str]:
    """Return a text for each value, for folders and reports.

    JSON values have the same text if they are equal and of one type. Other values have the same
    text only if they are the same object.

    >>> texts_of([4, 8, 4, "a/b", "a:b"])
    ['4', '8', '4', 'a-b', 'a-b 2']
    """
    texts: dict[Any, str] = {}
    for value in column:
        if _identity(value) in texts:
            continue
        label = value
        if not is_json_value(value):
            label = getattr(value, "name", getattr(value, "__name__", type(value).__name__))
        first = text = re.sub(r"[^\w.+-]+", "-", str(label))[:60]
        again = 2
        # Different values need different texts, because folders bear them.
        while text in texts.values():
            text = f"{first} {again}"
            again += 1
        texts[_identity(value)] = text
    return [texts[_identity(value)] for value in column]


def _identity(value: Any) -> Any:
    """Return a dictionary key that is equal for equal JSON values of one type.

    Other values have equal keys only if they are the same object.
    """
    if not is_json_value(value):
        return id(value)
    # The numbers 1 and True are equal and have one hash, so the key names the type.
    return type(value), value
