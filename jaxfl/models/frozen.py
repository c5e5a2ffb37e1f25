"""A model some of whose layers train while the others keep given weights."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl._validate import check_layers, checked, key_of, show
from jaxfl.types import Model, Params, Tree


class _Given:
    """Arrays that stand for others.

    JAX keeps this object in its caches, and compares it by identity: a program's arrays are no other program's.
    """

    def __init__(self, own: Tree, arrays: Tree) -> None:
        own_leaves = jax.tree.leaves(own)
        pairs = zip(own_leaves, jax.tree.leaves(arrays), strict=True)
        self.arrays = {id(leaf): array for leaf, array in pairs}
        self.kept = own_leaves
        """No other array gets the identity of one of these."""

    def clear(self) -> None:
        """Let go of the arrays, which JAX's caches would keep."""
        self.arrays, self.kept = {}, []


_GIVEN = jax.make_user_context(None)
_FUNCTIONS = ("extract", "classify", "apply", "sum_grad_squared")
"""Of a model, of parameters and inputs."""


@contextlib.contextmanager
def given(own: Tree, arrays: Tree) -> Iterator[None]:
    """Within it, networks read `arrays` in place of a model's own frozen weights (`Model.frozen`).

    A program that takes them as an argument is the same for all weights. As its constants, they would be compiled into
    it, at several times their memory, and kept with it.
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
    """The weights to compute with: what the program was given for `own`, or else those."""
    stand_ins = _GIVEN.value
    if stand_ins is None:
        return own
    return jax.tree.map(lambda leaf: stand_ins.arrays.get(id(leaf), leaf), own)


@checked(train=check_layers)
def frozen(model: Model, params: Params, *, train: Sequence[str] | None = None) -> Model:
    """The model with some layers that train, from the given weights on, and others that keep theirs.

    Frozen layers are no parameters: they are not sent, clipped, noised or stored, and all clients that are vectorised
    share each of their matrix products. They must be public, or their owners' consent is needed: no epsilon covers
    what they were trained on.

    Args:
        model: the network.
        params: weights of all of its layers.
        train: names of the layers that train (default: the head).

    Raises:
        ValueError: the weights are not the model's, or a layer does not exist; nothing would train.

    >>> from jaxfl.models import mlp
    >>> base = mlp((8, 8, 1), hidden=(16,))
    >>> model = frozen(base, base.init(jax.random.key(0)))
    >>> model.layers, sum(leaf.size for leaf in jax.tree.leaves(model.frozen))
    (('head',), 1040)
    """
    params, train = check_params(model, params), layers_of(model, train)
    if not train:
        raise ValueError(f"train={train!r}: name at least one of the layers {model.layers}")
    start = {name: params[name] for name in train}
    fixed = {name: params[name] for name in params if name not in train}
    part = rebuilt(model, "frozen", start, fixed, _joined)
    # Squares of gradients do not depend on what else has a gradient; their norms do.
    return part._replace(ghost_norms=None)


def rebuilt(
    model: Model, kind: str, start: Params, fixed: Tree, network: Callable[[Callable], Callable]
) -> Model:
    """The model with other parameters, and with frozen weights.

    Args:
        model: the network.
        kind: for its name.
        start: its parameters at the start, by layers of the model.
        fixed: its frozen weights.
        network: makes of each of the model's functions the same one of parameters, frozen weights and inputs.
    """

    def of(function: Callable | None) -> Callable | None:
        if function is None:
            return None

        built = network(function)

        @functools.wraps(function)
        def call(params: Params, *inputs: Any) -> Any:
            return built(params, current(fixed), *inputs)

        return call

    layers = tuple(name for name in model.layers if name in start)
    functions: dict[str, Any] = {name: of(getattr(model, name)) for name in _FUNCTIONS}
    return model._replace(
        name=f"{model.name}_{kind}",
        init=lambda key: jax.tree.map(jnp.asarray, {name: start[name] for name in layers}),
        **functions,
        layers=layers,
        head=tuple(name for name in model.head if name in start),
        frozen=fixed,
    )


def _joined(function: Callable) -> Callable:
    return lambda params, fixed, *inputs: function({**fixed, **params}, *inputs)


def check_params(model: Model, params: Any) -> Params:
    """Require weights of the model's shapes."""
    if model.frozen:
        raise ValueError(
            f"model={model.name!r} has frozen weights already: give the model that they belong to"
        )
    shapes = [
        {
            jax.tree_util.keystr(path): np.shape(leaf)
            for path, leaf in jax.tree.leaves_with_path(tree)
        }
        for tree in (params, jax.eval_shape(lambda: model.init(key_of(0))))
    ]
    found, wanted = shapes
    if other := sorted(found.keys() ^ wanted.keys()):
        raise ValueError(
            f"params={show(params)}: give weights of model={model.name!r}; only one of the two has {other[0]}"
        )
    for path, shape in wanted.items():
        if found[path] != shape:
            raise ValueError(f"params{path} has shape {found[path]}: give weights of shape {shape}")
    return jax.tree.map(jnp.asarray, params)


def layers_of(model: Model, train: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the layers that train; those of the head where None."""
    names = model.head if train is None else tuple(train)
    if unknown := [name for name in names if name not in model.layers]:
        raise ValueError(f"train={names!r}: {unknown[0]!r} is none of the layers {model.layers}")
    return names
