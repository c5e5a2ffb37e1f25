"""Pretrained networks that are adapted by matrices of low rank (LoRA)."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxfl._support.checks import check_count, check_layers, check_positive, checked, key_of
from jaxfl._support.recipes import with_recipe
from jaxfl.models.frozen import check_params, layers_of, rebuilt
from jaxfl.models.layers import Dense, FirstAxisDense
from jaxfl.models.wrap import with_either
from jaxfl.types import Model, Params, Tree


class _Kernel(NamedTuple):
    """Axes and sizes of a dense layer's kernel, as a matrix from inputs to outputs."""

    axes: tuple[int, ...]
    """Axes of the layer's input that the kernel contracts, counted from the end."""
    inputs: tuple[int, ...]
    """Sizes of these axes."""
    outputs: tuple[int, ...]
    """Sizes of the axes that the kernel adds."""
    first: bool = False
    """Whether the layer's outputs have their features on the first axis, not on the last ones."""


Path = tuple[str, ...]
"""Names that lead to a layer among the parameters."""

_ADAPTABLE_LAYERS = (nn.Dense, nn.DenseGeneral, Dense, FirstAxisDense)
"""Classes of layers that may have an adapter."""

_Context = nn.module.InterceptorContext

_TRACE = jax.make_user_context(None)
"""Object in the key of JAX's caches of traces. A new object makes JAX trace again."""


@contextlib.contextmanager
def _intercepted(interceptor: Callable) -> Iterator[None]:
    """Call Flax's methods through an interceptor, within a `with` block.

    The keys of JAX's caches of traces do not contain interceptors, so a new object in these keys
    makes JAX trace again.
    """
    with nn.intercept_methods(interceptor), _TRACE(object()):
        yield


@checked(where=check_layers, train=check_layers, seed=functools.partial(check_count, least=0))
@with_recipe
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
    r"""Return a model with frozen weights and trained adapters of low rank on its dense layers.

    .. math::
        y = x W + b + \frac{\alpha}{r} (x A) B, \qquad
        A \in R^{m \times r}, \; B \in R^{r \times n}

    Here x has the m inputs and y the n outputs of a dense layer with the given kernel W and bias b.
    The parameters are the matrices B and the layers of `train`. Each B starts at zero, where the
    model equals the given one. A is drawn once from N(0, 1/m) by a public seed, and is frozen
    unless `train_a` is set. With a frozen A, a layer is linear in its adapter, so that the mean of
    the clients' B gives the mean of their changes of the weights. Noise N on B is then noise A N on
    the weights, without the products of noises that a trained A would add.

    Args:
        model: Network of Flax linen, from the zoo or from `from_flax`.
        params: The network's weights, for instance pretrained ones.
        rank: r, the rank of every adapter.
        where: Names of the layers that get an adapter, such as ("query", "value"). A name may be
            anywhere in a layer's path. The default is all dense layers (`nn.Dense`,
            `nn.DenseGeneral` and those of the zoo, attention included) except those of `train`.
        alpha: Strength of the adapters, above 0. None stands for r, which adds the adapters without
            a factor.
        train: Names of the top-level layers that train in full, from the given weights. The default
            is the head.
        train_a: Whether A is trained and sent too.
        seed: Public seed of A.

    Guarantee: The method's epsilon covers adapters and layers of `train`. No epsilon covers the
        data that the frozen weights were trained on. A frozen A follows from the seed and reveals
        nothing.
    Deviations from the paper: A is frozen unless `train_a`, as in FFA-LoRA.
    References: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022; Sun et
        al., Improving LoRA in Privacy-preserving Federated Learning, ICLR 2024 (FFA-LoRA).

    Raises:
        ValueError: The weights do not have the model's shapes. The model has frozen weights
            already, has no `input_shape`, or takes no batch of this shape. A name of `where` is in
            the path of no dense layer outside `train`, or a layer of `train` does not exist. No
            dense layer would be adapted.

    >>> from jaxfl.models import mlp
    >>> base = mlp((8, 8, 1), hidden=(16,))
    >>> model = lora(base, base.init(jax.random.key(0)), rank=2)
    >>> jax.tree.map(jnp.shape, model.init(jax.random.key(0))["dense_0"])
    {'b': (2, 16)}
    >>> model.layers, model.head
    (('dense_0', 'head'), ('head',))
    """
    params = check_params(model, params)
    train = layers_of(model, train)
    scale = 1.0
    if alpha is not None:
        scale = check_positive("alpha", alpha) / rank
    kernels = _adapted_layers(model, params, where, train)
    a = _drawn(kernels, rank, seed)
    adapters: dict[Path, Params] = {}
    for path, kernel in kernels.items():
        adapters[path] = {"b": jnp.zeros((rank, *kernel.outputs))}
        if train_a:
            adapters[path] = {"a": a[path]} | adapters[path]
    # Layers of `train` have no adapters, so the names of these two parts differ.
    start = _nested(adapters) | {name: params[name] for name in train}
    base = {name: params[name] for name in params if name not in train}
    # A trained A is a parameter, and not frozen.
    fixed = (base, {} if train_a else a)

    def network(function: Callable) -> Callable:
        # Without `jit`, an eager call would trace each operation anew in `_intercepted`.
        @functools.partial(jax.jit, inline=True)
        def call(params: Params, fixed: Tree, *inputs: Any) -> Any:
            base, a = fixed

            def adapt(
                call: Callable, args: tuple, kwargs: dict[str, Any], context: _Context
            ) -> Any:
                path = context.module.path
                y = call(*args, **kwargs)
                # Flax calls the interceptor for all layers, and for their other methods too.
                if path not in kernels or context.method_name != "__call__":
                    return y
                adapter = functools.reduce(lambda tree, name: tree[name], path, params)
                x = _input(args, kwargs).astype(y.dtype)
                own_a = adapter.get("a", a.get(path))
                return y + scale * _low_rank(x, own_a, adapter["b"], kernels[path])

            with _intercepted(adapt):
                return function(base | {name: params[name] for name in train}, *inputs)

        return call

    adapted = rebuilt(model, f"lora_{rank}", start, fixed, network)
    # Backward passes of the zoo's layers give no squares and norms for adapters.
    return adapted._replace(sum_grad_squared=None, ghost_norms=None)


def _low_rank(x: Array, a: Array, b: Array, kernel: _Kernel) -> Array:
    """Return (x A) B, with the axes of the layer's own outputs.

    Args:
        x: Inputs of the layer.
        a: Matrix A, of shape `(*inputs, r)`.
        b: Matrix B, of shape `(r, *outputs)`.
        kernel: The layer's kernel.
    """
    contracted = tuple(range(len(kernel.axes)))
    x = jnp.tensordot(x, a.astype(x.dtype), (kernel.axes, contracted))
    y = jnp.tensordot(x, b.astype(x.dtype), 1)
    if kernel.first:
        return jnp.moveaxis(y, -1, 0)
    return y


def _input(args: tuple, kwargs: dict[str, Any]) -> Array:
    """Return the only input of a dense layer, which may come by position or by name."""
    return (*args, *kwargs.values())[0]


def _drawn(kernels: Mapping[Path, _Kernel], rank: int, seed: int) -> dict[Path, Array]:
    """Draw the matrix A of each kernel."""
    # Each A has a key of its own. Equal arguments give equal matrices, because the order of the
    # layers is that of their calls.
    keys = jax.random.split(key_of(seed), len(kernels))
    a = {}
    for key, (path, kernel) in zip(keys, kernels.items(), strict=True):
        a[path] = _random(key, kernel, rank)
    return a


def _random(key: Array, kernel: _Kernel, rank: int) -> Float[Array, "*m r"]:
    """Draw a matrix A from N(0, 1/m), where m is the number of the layer's inputs."""
    values = jax.random.normal(key, (*kernel.inputs, rank))
    return values / values[..., 0].size ** 0.5


def _nested(adapters: Mapping[Path, Any]) -> dict[str, Any]:
    """Return adapters as nested dicts by the names in their paths."""
    tree: dict[str, Any] = {}
    for path, adapter in adapters.items():
        *parents, last = path
        parent = functools.reduce(lambda tree, name: tree.setdefault(name, {}), parents, tree)
        parent[last] = adapter
    return tree


def _adapted_layers(
    model: Model, params: Params, where: Sequence[str] | None, train: Sequence[str]
) -> dict[Path, _Kernel]:
    """Return the kernels of the dense layers that get an adapter, by path, in the order of calls.

    Args:
        model: The network.
        params: Weights of the network.
        where: Names of layers that get an adapter. None stands for all dense layers.
        train: Names of top-level layers that train in full, and get no adapter.

    Raises:
        ValueError: A name of `where` is in the path of no dense layer outside `train`, or no layer
            is left. The model has no `input_shape`, or takes no batch of this shape.
    """
    kernels = _kernels(model, params)
    found = {path: kernel for path, kernel in kernels.items() if path[0] not in train}
    if where is None:
        chosen = found
    else:
        chosen = {path: kernel for path, kernel in found.items() if set(path) & set(where)}
        if missing := [name for name in where if not any(name in path for path in chosen)]:
            names = sorted({name for path in found for name in path})
            raise ValueError(
                f"where must have names from the paths of dense layers, got {missing[0]!r} in "
                f"{where!r}. Choose from {names}."
            )
    if not chosen:
        remedy = "Give a network that has dense layers as its parts."
        if train:
            remedy = "Name fewer layers in `train`, such as train=()."
        raise ValueError(
            f"model must have a dense layer to adapt, got model={model.name!r} with "
            f"train={train!r} and where={where!r}. {remedy}"
        )
    return chosen


def _kernels(model: Model, params: Params) -> dict[Path, _Kernel]:
    """Return the kernels of a network's dense layers by path, in the order of their calls.

    Raises:
        ValueError: The model has no `input_shape`, or takes no batch of it.
    """
    found: dict[Path, _Kernel] = {}

    def see(call: Callable, args: tuple, kwargs: dict[str, Any], context: _Context) -> Any:
        module = context.module
        y = call(*args, **kwargs)
        if context.method_name != "__call__" or not isinstance(module, _ADAPTABLE_LAYERS):
            return y
        own = functools.reduce(lambda tree, name: tree.get(name, {}), module.path, params)
        kernel = own.get("kernel")
        # A network of a single layer has no path, and `params` may lack the parameters of a module
        # that another one calls by `apply`.
        if not module.path or kernel is None:
            return y
        seen = _kernel_of(module, _input(args, kwargs), y)
        # A kernel of another shape has axes for batches or for the iterations of a loop.
        if jnp.shape(kernel) == (*seen.inputs, *seen.outputs):
            found[module.path] = seen
        return y

    def look(dtype: Any, shape: tuple[int, ...]) -> None:
        batch = jax.ShapeDtypeStruct((2, *shape), dtype)
        # A trace calls all layers, so that nothing has to be computed to find them.
        with _intercepted(see):
            jax.eval_shape(lambda x: model.apply(params, model.prepare(x)), batch)

    shape = model.input_shape
    if shape is None:
        raise ValueError(
            f"model must have an `input_shape`, got model={model.name!r} without one. Set it by "
            "model._replace(input_shape=...)."
        )
    try:
        with_either(functools.partial(look, shape=shape))
    except ExceptionGroup as group:
        raise ValueError(
            f"model must take a batch of its input_shape={model.input_shape!r}, got "
            f"model={model.name!r}: {str(group.exceptions[0]).removesuffix('.')}. "
            "Correct its input_shape."
        ) from None
    return found


def _kernel_of(module: nn.Module, x: Array, y: Array) -> _Kernel:
    """Return the axes and sizes of the kernel by which a dense layer maps x to y."""
    # `nn.Dense` has no attribute `axis`, and contracts the last axis.
    axes = getattr(module, "axis", -1)
    if isinstance(axes, int):
        axes = (axes,)
    # Axes are counted from the end, so that a batch may have any axes.
    axes = tuple(axis % x.ndim - x.ndim for axis in axes)
    inputs = tuple(x.shape[axis] for axis in axes)
    first = isinstance(module, FirstAxisDense)
    outputs = y.shape[x.ndim - len(axes) :]
    if first:
        outputs = y.shape[:1]
    return _Kernel(axes, inputs, outputs, first)
