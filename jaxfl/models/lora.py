"""A pretrained network that is adapted by matrices of low rank (LoRA)."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxfl._validate import check_count, check_layers, check_positive, checked, key_of
from jaxfl.models.frozen import check_params, layers_of, rebuilt
from jaxfl.models.layers import Dense, FirstAxisDense
from jaxfl.models.wrap import with_either
from jaxfl.types import Model, Params, Tree


class _Kernel(NamedTuple):
    """A matrix of a network: the axes of its layer's input that it contracts, and the shapes of its two sides."""

    axes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    first: bool = False
    """Whether the layer's outputs have their features in the first axis, not in the last ones."""


Path = tuple[str, ...]
_DENSE = (nn.Dense, nn.DenseGeneral, Dense, FirstAxisDense)
_Context = nn.module.InterceptorContext
_TRACE = jax.make_user_context(None)


@contextlib.contextmanager
def _intercepted(interceptor: Callable) -> Iterator[None]:
    """Let calls of Flax's methods go through a function, also in what JAX traced before: its caches know of none."""
    with nn.intercept_methods(interceptor), _TRACE(object()):
        yield


@checked(where=check_layers, train=check_layers, seed=functools.partial(check_count, least=0))
def lora(
    model: Model,
    params: Params,
    *,
    rank: int,
    where: Sequence[str] | None = None,
    alpha: float | None = None,
    train: Sequence[str] | None = None,
    train_a: bool = False,
    seed: int = 0,
) -> Model:
    r"""The model with frozen weights, and an adapter of low rank beside its dense layers.

    .. math:: y = x W + b + \frac{\alpha}{r} (x A) B, \qquad A \in R^{m \times r}, \; B \in R^{r \times n}

    The parameters are the B, zeros at the start, where the model is the given one, and the layers of `train`. A is
    drawn once from N(0, 1/m) by a public seed and frozen, so that a layer is linear in what is trained: the mean of
    clients' updates is the update of the mean, and noise on B is noise A N on the weights, without the products of
    noises that a trained A adds. x W and x A are one product for all clients that are vectorised.

    Args:
        model: a network of Flax linen, of the zoo or from `from_flax`.
        params: its weights, for instance pretrained ones.
        rank: r, of every adapter.
        where: names of the layers with an adapter, anywhere in their path, such as ("query", "value"); None: all dense
            layers (`nn.Dense`, `nn.DenseGeneral`, those of the zoo), attention included, besides those of `train`.
        alpha: strength of the adapters; None: r, so that they are added as they are.
        train: names of the top-level layers that train in full, from their given weights on (default: the head).
        train_a: whether A is trained too.
        seed: public; of A.

    Guarantee: as the method's, for adapters and layers of `train`. No epsilon covers what the frozen weights were
        trained on; A follows from the seed and reveals nothing.
    Deviations from the paper: A is frozen unless `train_a`, as in FFA-LoRA.
    References: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022; Sun et al., Improving LoRA in
        Privacy-preserving Federated Learning, ICLR 2024 (FFA-LoRA).

    Raises:
        ValueError: the weights are not the model's; no dense layer is of these names, or one of them is no dense layer.

    >>> from jaxfl.models import mlp
    >>> base = mlp((8, 8, 1), hidden=(16,))
    >>> model = lora(base, base.init(jax.random.key(0)), rank=2)
    >>> jax.tree.map(jnp.shape, model.init(jax.random.key(0))["dense_0"])
    {'b': (2, 16)}
    >>> model.layers, model.head
    (('dense_0', 'head'), ('head',))
    """
    params, train = check_params(model, params), layers_of(model, train)
    scale = 1.0 if alpha is None else check_positive("alpha", alpha) / rank
    kernels = _chosen(model, params, where, train)
    keys = jax.random.split(key_of(seed), len(kernels))
    a = {
        path: _random(key, kernel, rank)
        for key, (path, kernel) in zip(keys, kernels.items(), strict=True)
    }
    b = {path: jnp.zeros((rank, *kernel.outputs)) for path, kernel in kernels.items()}
    adapters = {
        path: {"a": a[path], "b": b[path]} if train_a else {"b": b[path]} for path in kernels
    }
    start = _nested(adapters) | {name: params[name] for name in train}
    base = {name: params[name] for name in params if name not in train}
    fixed = (base, {} if train_a else a)

    def network(function: Callable) -> Callable:
        @functools.partial(jax.jit, inline=True)
        def call(params: Params, fixed: Tree, *inputs: Any) -> Any:
            base, a = fixed

            def adapt(
                call: Callable, args: tuple, kwargs: dict[str, Any], context: _Context
            ) -> Any:
                path, y = context.module.path, call(*args, **kwargs)
                if path not in kernels or context.method_name != "__call__":
                    return y
                own = functools.reduce(lambda tree, name: tree[name], path, params)
                x = _input(args, kwargs).astype(y.dtype)
                return y + scale * _low_rank(x, own.get("a", a.get(path)), own["b"], kernels[path])

            with _intercepted(adapt):
                return function(base | {name: params[name] for name in train}, *inputs)

        return call

    return rebuilt(model, f"lora_{rank}", start, fixed, network)._replace(
        sum_grad_squared=None, ghost_norms=None
    )


def _low_rank(x: Array, a: Array, b: Array, kernel: _Kernel) -> Array:
    """(x A) B, with the axes of x that stay in front, or behind where the layer has its features first."""
    x = jnp.tensordot(x, a.astype(x.dtype), (kernel.axes, tuple(range(len(kernel.axes)))))
    y = jnp.tensordot(x, b.astype(x.dtype), 1)
    return jnp.moveaxis(y, -1, 0) if kernel.first else y


def _input(args: tuple, kwargs: dict[str, Any]) -> Array:
    """The only input of a dense layer, by position or by name."""
    return (*args, *kwargs.values())[0]


def _random(key: Array, kernel: _Kernel, rank: int) -> Float[Array, "*m r"]:
    values = jax.random.normal(key, (*kernel.inputs, rank))
    return values / values[..., 0].size ** 0.5


def _nested(adapters: Mapping[Path, Any]) -> dict[str, Any]:
    """As a tree, like the parameters of the layers."""
    tree: dict[str, Any] = {}
    for path, adapter in adapters.items():
        functools.reduce(lambda tree, name: tree.setdefault(name, {}), path[:-1], tree)[
            path[-1]
        ] = adapter
    return tree


def _chosen(
    model: Model, params: Params, where: Sequence[str] | None, train: Sequence[str]
) -> dict[Path, _Kernel]:
    """The dense layers that get an adapter, in the order of their calls."""
    found = {
        path: kernel for path, kernel in _kernels(model, params).items() if path[0] not in train
    }
    if where is None:
        chosen = found
    else:
        chosen = {path: kernel for path, kernel in found.items() if set(path) & set(where)}
        if missing := [name for name in where if not any(name in path for path in chosen)]:
            names = sorted({name for path in found for name in path})
            raise ValueError(
                f"where={where!r}: {missing[0]!r} is in the path of no dense layer, but these are: {names}"
            )
    if not chosen:
        raise ValueError(
            f"model={model.name!r} has no dense layer besides train={train!r}: nothing would be adapted"
        )
    return chosen


def _kernels(model: Model, params: Params) -> dict[Path, _Kernel]:
    """The dense layers of a network, by a look at its calls."""
    found: dict[Path, _Kernel] = {}

    def see(call: Callable, args: tuple, kwargs: dict[str, Any], context: _Context) -> Any:
        module, y = context.module, call(*args, **kwargs)
        if context.method_name != "__call__" or not isinstance(module, _DENSE):
            return y
        x, axes = _input(args, kwargs), getattr(module, "axis", -1)
        axes = tuple(
            axis % x.ndim - x.ndim for axis in ((axes,) if isinstance(axes, int) else axes)
        )
        inputs = tuple(x.shape[axis] for axis in axes)
        first = isinstance(module, FirstAxisDense)
        outputs = y.shape[:1] if first else y.shape[x.ndim - len(axes) :]
        kernel = functools.reduce(lambda tree, name: tree.get(name, {}), module.path, params).get(
            "kernel"
        )
        # Others are shared out over batches, or over the turns of a loop.
        if module.path and jnp.shape(kernel) == (*inputs, *outputs):
            found[module.path] = _Kernel(axes, inputs, outputs, first)
        return y

    def look(dtype: Any, shape: tuple[int, ...]) -> None:
        batch = jax.ShapeDtypeStruct((2, *shape), dtype)
        with _intercepted(see):
            jax.eval_shape(lambda x: model.apply(params, model.prepare(x)), batch)

    shape = model.input_shape
    if shape is None:
        raise ValueError(f"model={model.name!r} has no input_shape: give it that of an example")
    try:
        with_either(functools.partial(look, shape=shape))
    except ExceptionGroup as group:
        refusal = f"model={model.name!r} takes no batch of input_shape={model.input_shape!r}"
        raise ValueError(f"{refusal}: {group.exceptions[0]}") from None
    return found
