"""Models in which some layers train while the others keep given weights."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl._support.checks import check_layers, checked, key_of, show
from jaxfl._support.recipes import with_recipe
from jaxfl.types import Model, Params, Tree


class _Given:
    """Map from original arrays, by `id`, to their substitutes.

    JAX stores this object in its caches and compares it by identity, so that no program gets
    another program's arrays.
    """

    def __init__(self, own: Tree, arrays: Tree) -> None:
        own_leaves = jax.tree.leaves(own)
        pairs = zip(own_leaves, jax.tree.leaves(arrays), strict=True)
        self.arrays = {id(leaf): array for leaf, array in pairs}
        self.originals = own_leaves
        """The original arrays, which stay alive so that their ids stay unique."""

    def clear(self) -> None:
        """Release the arrays, because JAX's caches would keep them alive."""
        self.arrays = {}
        self.originals = []


_GIVEN = jax.make_user_context(None)
"""The substitutes for frozen weights, or None. The key of JAX's caches of traces contains them."""

_FUNCTIONS = ("extract", "classify", "apply", "sum_grad_squared")
"""Fields of a model whose values are functions of parameters and inputs, or None."""


@contextlib.contextmanager
def given(own: Tree, arrays: Tree) -> Iterator[None]:
    """Let networks read other arrays than a model's own frozen weights, within a `with` block.

    A program that takes frozen weights as an argument is the same for all weights. Constant weights
    would be compiled into the program, at several times their memory, and stay in it.

    Args:
        own: Frozen weights (`Model.frozen`).
        arrays: Substitutes, a tree of the same structure.
    """
    if not jax.tree.leaves(own):
        # Programs without frozen weights share what JAX has traced of its own functions.
        with _GIVEN(None):
            yield
        return
    stand_ins = _Given(own, arrays)
    try:
        with _GIVEN(stand_ins):
            yield
    finally:
        stand_ins.clear()


def current(own: Tree) -> Tree:
    """Return the substitutes that `given` has set for frozen weights, or the weights themselves.

    Args:
        own: Frozen weights, the same array objects that `given` got.
    """
    stand_ins = _GIVEN.value
    if stand_ins is None:
        return own
    # Frozen weights of any other model are not in the map, and stay.
    return jax.tree.map(lambda leaf: stand_ins.arrays.get(id(leaf), leaf), own)


@checked(train=check_layers)
@with_recipe
def frozen(model: Model, params: Params, *, train: Sequence[str] | None = None) -> Model:
    """Return a model in which some layers train and the others keep the given weights.

    Frozen layers are not among the parameters, so they are not sent, clipped or noised, and
    clients share them. Frozen weights must be public, or the owners of the data that they were
    trained on must consent, because no epsilon covers these data.

    Args:
        model: The network.
        params: Weights of all its layers. Layers that train start from them.
        train: Names of the layers that train. The default is the head.

    Raises:
        ValueError: The weights do not have the model's shapes, the model has frozen weights
            already, a layer does not exist, or no layer would train.

    >>> from jaxfl.models import mlp
    >>> base = mlp((8, 8, 1), hidden=(16,))
    >>> model = frozen(base, base.init(jax.random.key(0)))
    >>> model.layers, sum(leaf.size for leaf in jax.tree.leaves(model.frozen))
    (('head',), 1040)
    """
    params = check_params(model, params)
    train = layers_of(model, train)
    if not train:
        raise ValueError(
            f"train must name at least one layer, got {train!r}. Choose from {model.layers}."
        )
    start = {name: params[name] for name in train}
    fixed = {name: params[name] for name in params if name not in train}
    part = rebuilt(model, "frozen", start, fixed, _with_fixed)
    # Squares of gradients do not depend on which other parameters have a gradient. Norms of
    # gradients do.
    return part._replace(ghost_norms=None)


def rebuilt(
    model: Model, kind: str, start: Params, fixed: Tree, network: Callable[[Callable], Callable]
) -> Model:
    """Return a model with other parameters, and with frozen weights.

    The caller must replace `ghost_norms`, which the result keeps unchanged.

    Args:
        model: The network.
        kind: Suffix of the new model's name.
        start: The new model's parameters at the start, by the names of layers of the model.
        fixed: The new model's frozen weights.
        network: Function that turns each of the model's functions, of parameters and inputs, into
            one of new parameters, frozen weights and inputs.
    """

    def of(function: Callable | None) -> Callable | None:
        if function is None:
            return None

        # JAX's caches know a function by its identity, so it is built once and not at each call.
        built = network(function)

        @functools.wraps(function)
        def call(params: Params, *inputs: Any) -> Any:
            # A program that is traced later may get other weights by `given`.
            return built(params, current(fixed), *inputs)

        return call

    layers = tuple(name for name in model.layers if name in start)
    head = tuple(name for name in model.head if name in start)
    functions: dict[str, Any] = {name: of(getattr(model, name)) for name in _FUNCTIONS}
    return model._replace(
        name=f"{model.name}_{kind}",
        init=lambda key: jax.tree.map(jnp.asarray, {name: start[name] for name in layers}),
        **functions,
        layers=layers,
        head=head,
        frozen=fixed,
    )


def _with_fixed(function: Callable) -> Callable:
    return lambda params, fixed, *inputs: function({**fixed, **params}, *inputs)


def check_params(model: Model, params: Any) -> Params:
    """Require weights with the shapes of a model's parameters, and return them as JAX arrays.

    Raises:
        ValueError: The weights have other shapes, or the model has frozen weights already.
    """
    if model.frozen:
        raise ValueError(
            f"model must have no frozen weights, got model={model.name!r} with some. Give the "
            "network from before `frozen` or `lora`."
        )
    # The arrays must have the same paths first, so that shapes can be compared path by path.
    found = _shapes_by_path(params)
    wanted = _shapes_by_path(jax.eval_shape(lambda: model.init(key_of(0))))
    if other := sorted(found.keys() ^ wanted.keys()):
        raise ValueError(
            f"params must have the arrays of model={model.name!r}, got {show(params)}, and only "
            f"one of the two has {other[0]}. Give weights of this model."
        )
    for path, shape in wanted.items():
        if found[path] != shape:
            raise ValueError(
                f"params{path} must have shape {shape}, got {found[path]}. Give weights of "
                f"model={model.name!r}."
            )
    return jax.tree.map(jnp.asarray, params)


def layers_of(model: Model, train: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the layers that train, by default those of the head.

    Raises:
        ValueError: The model has no layer of a given name.
    """
    names = model.head
    if train is not None:
        names = tuple(train)
    if unknown := [name for name in names if name not in model.layers]:
        raise ValueError(
            f"train must name layers of model={model.name!r}, got {unknown[0]!r} in {names!r}. "
            f"Choose from {model.layers}."
        )
    return names


def _shapes_by_path(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a tree's arrays by their paths."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.shape(leaf) for path, leaf in leaves}
