"""Records of how builders made models and tasks, so that a file can say how to make them again."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Recipe(NamedTuple):
    """Name of the builder of a model or a task, and the arguments that it got.

    Copies of the value with other fields keep the recipe. It is valid only for a copy that has the
    functions that the builder made.
    """

    builder: str
    arguments: dict[str, Any]
    functions: tuple[Any, ...]
    """Functions on which the value's results depend, as the builder made them."""
    without: tuple[str, ...] = ()
    """Entries of parameters for which the recipe is not valid (see `jaxfl.models.extended`)."""


def with_recipe(build: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap a builder so that the model or the task that it returns has a recipe."""
    signature = inspect.signature(build)

    @functools.wraps(build)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        value: Any = build(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        # Defaults may change in a later version.
        bound.apply_defaults()
        recipe = Recipe(build.__name__, dict(bound.arguments), value.functions)
        # A task is a dataclass, and a model is a named tuple.
        if dataclasses.is_dataclass(value):
            return dataclasses.replace(value, recipe=recipe)
        return value._replace(recipe=recipe)

    return call


def valid_recipe(value: Any) -> Recipe | None:
    """Return the recipe of a model or a task, or None without a valid recipe.

    A recipe is valid if the functions are still those that the builder made.
    """
    recipe = value.recipe
    if recipe is None:
        return None
    pairs = zip(recipe.functions, value.functions, strict=True)
    # Functions of equal code may close over other values, so only the same object counts.
    if not all(recorded is own for recorded, own in pairs):
        return None
    return recipe
