"""Models by name: the networks of the papers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Shaped

from jaxfl._validate import check_choice, check_counts, checked, key_of, show
from jaxfl.backend import Form, backend
from jaxfl.models._convolution import to_pairs
from jaxfl.models.layers import Convolution, Dense, GroupNorm, as_floats
from jaxfl.types import Model

Shape = tuple[int, int, int]


def _flat(inputs: Shaped[Array, "B ..."]) -> Float[Array, "B F"]:
    """Return rows of pictures in the order (channels, H, W), and vectors as they are."""
    if inputs.ndim == 2:
        return as_floats(inputs)
    return as_floats(inputs).transpose(0, 3, 1, 2).reshape(len(inputs), -1)


def _bytes(inputs: Shaped[Array, "B H W C"]) -> Shaped[Array, "C H W B"]:
    """Batch-minor, bytes as they are: a quarter of the memory to move."""
    return inputs.transpose(3, 1, 2, 0)


def _maps(
    inputs: Shaped[Array, "B H W C"], padding: int | None = None
) -> Float[Array, "maps H2 W2 B"]:
    """Batch-minor feature maps; with a padding, in pairs of columns."""
    x = _bytes(inputs)
    if padding:
        x = jnp.pad(as_floats(x), ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    return as_floats(x if padding is None else to_pairs(x))


class _Network(nn.Module):
    """A classifier that splits at its head: `classify(extract(x))`."""

    def classify(self, features: Array) -> Array:
        return self.head(features)

    def __call__(self, x: Array) -> Array:
        return self.classify(self.extract(x))


class _Mlp(_Network):
    widths: tuple[int, ...]
    classes: int
    sum_grad_squared: bool = False
    ghost_norms: bool = False

    def setup(self) -> None:
        modes = {"sum_grad_squared": self.sum_grad_squared, "ghost_norms": self.ghost_norms}
        self.dense = [Dense(n, **modes) for n in self.widths]
        self.head = Dense(self.classes, **modes)

    def extract(self, x: Array) -> Array:
        for layer in self.dense:
            x = nn.relu(layer(x))
        return x


class _Cnn(_Network):
    """Convolutions, dense layers with or without ReLU in between, a head."""

    convolutions: tuple[Mapping[str, Any], ...]
    widths: tuple[int, ...]
    classes: int
    relu: bool = True
    form: Form = "winograd"
    sum_grad_squared: bool = False

    def setup(self) -> None:
        modes = {"form": self.form, "sum_grad_squared": self.sum_grad_squared}
        self.conv = [Convolution(**options, **modes) for options in self.convolutions]
        self.dense = [Dense(n, sum_grad_squared=self.sum_grad_squared) for n in self.widths]
        self.head = Dense(self.classes, sum_grad_squared=self.sum_grad_squared)

    def extract(self, x: Array) -> Array:
        for layer in self.conv:
            x = layer(x)
        x = x.reshape(-1, x.shape[-1]).T
        for layer in self.dense:
            x = nn.relu(layer(x)) if self.relu else layer(x)
        return x


class _NormLenet(_Network):
    """LeNet with GroupNorm after every hidden layer, before pooling and ReLU."""

    groups: int
    classes: int
    form: Form = "winograd"
    sum_grad_squared: bool = False

    def setup(self) -> None:
        modes = {"form": self.form, "sum_grad_squared": self.sum_grad_squared}
        self.conv = [
            Convolution(n, 5, relu=False, pool=False, bias=False, **modes) for n in (6, 16)
        ]
        self.dense = [Dense(n, sum_grad_squared=self.sum_grad_squared) for n in (120, 84)]
        self.norm = [GroupNorm(self.groups, **modes) for _ in range(4)]
        self.head = Dense(self.classes, sum_grad_squared=self.sum_grad_squared)

    def extract(self, x: Array) -> Array:
        for layer, norm in zip(self.conv, self.norm[:2], strict=True):
            x = norm(layer(x))
            x = x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
            rows = jnp.maximum(x[:, ::2], x[:, 1::2])
            x = nn.relu(jnp.maximum(rows[:, :, ::2], rows[:, :, 1::2]))
        x = x.reshape(-1, x.shape[-1]).T
        for layer, norm in zip(self.dense, self.norm[2:], strict=True):
            x = nn.relu(norm(layer(x).T[:, None, None])[:, 0, 0].T)
        return x


class _ResNet(_Network):
    """Residual blocks of two 3x3 convolutions, each with GroupNorm.

    Where a block halves the maps, its shortcut takes every second pixel and pads channels with zeros.
    """

    widths: tuple[int, ...]
    blocks: int
    groups: int
    classes: int
    form: Form = "winograd"
    sum_grad_squared: bool = False

    def setup(self) -> None:
        modes = {"form": self.form, "sum_grad_squared": self.sum_grad_squared}
        convolution = functools.partial(
            Convolution, size=3, padding=1, relu=False, pool=False, bias=False, **modes
        )
        widths = (self.widths[0], *(width for width in self.widths for _ in range(2 * self.blocks)))
        halve = {1 + 2 * self.blocks * stage for stage in range(1, len(self.widths))}
        self.conv = [
            convolution(features=f, stride=2 if i in halve else 1) for i, f in enumerate(widths)
        ]
        self.norm = [GroupNorm(self.groups, relu=True, **modes) for _ in widths]
        self.head = Dense(self.classes, sum_grad_squared=self.sum_grad_squared)

    def extract(self, x: Array) -> Array:
        x = self.norm[0](self.conv[0](x))
        for i in range(1, len(self.conv), 2):
            y = self.conv[i + 1](self.norm[i](self.conv[i](x)))
            stride = self.conv[i].stride
            shortcut = jnp.pad(
                x[:, ::stride, ::stride], ((0, len(y) - len(x)), (0, 0), (0, 0), (0, 0))
            )
            x = self.norm[i + 1](y, shortcut)
        return x.mean((1, 2)).T


def _check_shape(name: str, value: Any) -> Shape:
    shape = check_counts(name, value)
    if len(shape) != 3:
        raise ValueError(f"{name}={show(value)}: give (H, W, channels)")
    return shape


def _check_vector_or_shape(name: str, value: Any) -> tuple[int, ...]:
    shape = check_counts(name, value)
    return shape if len(shape) == 1 else _check_shape(name, value)


@checked(input_shape=_check_vector_or_shape, hidden=check_counts)
def mlp(
    input_shape: tuple[int, ...] = (28, 28, 1),
    classes: int = 10,
    hidden: Sequence[int] = (200, 200),
) -> Model:
    """Multilayer perceptron with ReLU, of pictures (H, W, C) or vectors (F,) such as features.

    >>> model = mlp(hidden=(200, 200))
    >>> model.layers, model.head
    (('dense_0', 'dense_1', 'head'), ('head',))
    """
    twin = _Mlp(tuple(hidden), classes, ghost_norms=True)

    def network(_form: Form, sum_grad_squared: bool) -> nn.Module:
        return _Mlp(tuple(hidden), classes, sum_grad_squared)

    def ghost_norms(params: Any, x: Array, probe: Array) -> Any:
        probed = {name: {**layer, "probe": probe} for name, layer in params.items()}
        return twin.apply({"params": probed}, x)

    return _model("mlp", network, lambda _form, x: _flat(x), input_shape)._replace(
        ghost_norms=ghost_norms
    )


@checked(input_shape=_check_shape)
def lenet(input_shape: Shape = (32, 32, 3), classes: int = 10, form: Form | None = None) -> Model:
    """LeNet: two 5x5 convolutions (6 and 16 channels, ReLU, 2x2 max-pool), dense 120, 84 and `classes`.

    62,006 parameters for 32x32x3 and 44,426 for 28x28x1 with 10 classes.

    Args:
        input_shape: (H, W, C).
        classes: number of logits.
        form: of convolutions (see `jaxfl.models.layers`): "lax" if forward-mode differentiation is needed; None:
            the best for the devices of a run.

    >>> sum(a.size for a in jax.tree.leaves(lenet().init(jax.random.key(0))))
    62006
    """
    convolutions = [{"features": n, "size": 5} for n in (6, 16)]
    return _cnn("lenet", convolutions, (120, 84), input_shape, classes, form)


@checked(input_shape=_check_shape)
def lenet_groupnorm(
    input_shape: Shape = (32, 32, 3), classes: int = 10, groups: int = 2, form: Form | None = None
) -> Model:
    """LeNet with GroupNorm after every hidden layer: its features keep their scale whatever the weights.

    Convolutions have no bias.

    Args:
        input_shape: (H, W, C).
        classes: number of logits.
        groups: number of groups of GroupNorm, 1 or 2.
        form: as for `lenet`.

    >>> lenet_groupnorm().layers[:4]
    ('conv_0', 'norm_0', 'conv_1', 'norm_1')
    """
    network = functools.partial(_NormLenet, check_choice("groups", groups, (1, 2)), classes)
    return _model("lenet_groupnorm", network, lambda _form, x: _maps(x), input_shape, form)


_FEDDPA_CLASSES = {
    "cifar10": 10, "cifar100": 100, "svhn_cropped": 10, "mnist": 10, "fashion_mnist": 10, "emnist": 62, "femnist": 62,
}  # fmt: skip


@checked(dataset=functools.partial(check_choice, choices=tuple(_FEDDPA_CLASSES)))
def feddpa_cnn(
    dataset: str = "cifar10", classes: int | None = None, form: Form | None = None
) -> Model:
    """FedDPA's network for a dataset, as in its published code.

    - cifar10, cifar100 (32x32x3): three 3x3 convolutions with 16, 32, 32 channels and padding 1, each with ReLU
      and 2x2 max-pool; dense 512, 128 and `classes` with ReLU between (512 features enter).
    - svhn_cropped (32x32x3): 3x3 convolutions 32 (ReLU) and 64 (ReLU, pool), dense 128 (ReLU) and `classes`.
    - mnist, fashion_mnist, emnist, femnist (28x28x1): 3x3 convolutions 32 (no ReLU) and 64 (ReLU, pool), dense
      128 (no ReLU) and `classes`.

    Args:
        dataset: name, as above.
        classes: number of logits (default: the dataset's: 10, 100 for cifar100, 62 for emnist and femnist).
        form: as for `lenet`.

    Deviations: the published networks name dropout layers, but the code's Fisher pass switches them to evaluation
    and nothing switches back, so no unit is ever dropped: there are none here.

    References:
        Yang et al., Dynamic Personalized Federated Learning with Adaptive Differential Privacy, NeurIPS 2023.
    """
    classes = _FEDDPA_CLASSES[dataset] if classes is None else classes
    if dataset in ("cifar10", "cifar100"):
        convolutions = [{"features": n, "size": 3, "padding": 1} for n in (16, 32, 32)]
        return _cnn("feddpa_cnn", convolutions, (512, 128), (32, 32, 3), classes, form)
    colour = dataset == "svhn_cropped"
    convolutions = [
        {"features": 32, "size": 3, "relu": colour, "pool": False},
        {"features": 64, "size": 3},
    ]
    shape = (32, 32, 3) if colour else (28, 28, 1)
    return _cnn("feddpa_cnn", convolutions, (128,), shape, classes, form, relu=colour)


@checked(input_shape=_check_shape)
def digits_cnn(
    input_shape: Shape = (8, 8, 1), classes: int = 10, form: Form | None = None
) -> Model:
    """Small network for 8x8 digits: two 3x3 convolutions (8 and 16 channels, padding 1, pool), dense 32."""
    convolutions = [{"features": n, "size": 3, "padding": 1} for n in (8, 16)]
    return _cnn("digits_cnn", convolutions, (32,), input_shape, classes, form)


@checked(input_shape=_check_shape)
def resnet20(
    input_shape: Shape = (32, 32, 3), classes: int = 10, groups: int = 2, form: Form | None = None
) -> Model:
    """ResNet20: a 3x3 convolution, 3 stages of 3 residual blocks with 16, 32 and 64 channels, mean, `classes`.

    The later stages begin with stride 2. 269,072 parameters without the head, for 3 channels.

    Args:
        input_shape: (H, W, C).
        classes: number of logits.
        groups: of GroupNorm, which replaces BatchNorm, whose running statistics would leave a client unclipped.
        form: as for `lenet`.

    References:
        He et al., Deep Residual Learning for Image Recognition, CVPR 2016 (section 4.2, option A).
        Hsieh et al., The Non-IID Data Quagmire of Decentralized Machine Learning, ICML 2020 (GroupNorm with 2 groups).
    """
    if 16 % groups:
        raise ValueError(f"groups={groups!r}: give a divisor of the 16 channels of the first stage")
    network = functools.partial(_ResNet, (16, 32, 64), 3, groups, classes)
    return _model("resnet20", network, lambda _form, x: _maps(x), input_shape, form)._replace(
        microbatch="auto"
    )


@checked(input_shape=_check_shape)
def build(name: str, input_shape: Shape, classes: int) -> Model:
    """The model of that name for inputs of a shape.

    Names: "mlp", "lenet", "lenet_groupnorm", "feddpa_cnn", "digits_cnn", "resnet20".

    >>> build("lenet", (28, 28, 1), 10).name
    'lenet'
    """
    builders: dict[str, Callable[..., Model]] = {
        "mlp": mlp, "lenet": lenet, "lenet_groupnorm": lenet_groupnorm, "feddpa_cnn": _feddpa_by_shape,
        "digits_cnn": digits_cnn, "resnet20": resnet20,
    }  # fmt: skip
    return builders[check_choice("name", name, tuple(builders))](input_shape, classes)


def _feddpa_by_shape(input_shape: Shape, classes: int) -> Model:
    shape = check_choice("input_shape", input_shape, ((32, 32, 3), (28, 28, 1)))
    return feddpa_cnn("cifar10" if shape == (32, 32, 3) else "mnist", classes)


def _cnn(
    name: str,
    convolutions: list[dict[str, Any]],
    widths: tuple[int, ...],
    input_shape: Shape,
    classes: int,
    form: Form | None,
    relu: bool = True,
) -> Model:
    # A product with few outputs is slow: pairs of columns double them, for (k + 1) / k times the operations.
    first, padding = convolutions[0], convolutions[0].get("padding", 0)
    pairs = [{**first, "padding": 0, "pairs": True}, *convolutions[1:]]
    joined = _joined(convolutions)

    def paired(form: Form) -> bool:
        return form == "winograd" and first["size"] >= 5 and input_shape[1] % 2 == 0

    def network(form: Form, sum_grad_squared: bool) -> nn.Module:
        layers = tuple(pairs if paired(form) else joined if form == "pallas" else convolutions)
        return _Cnn(layers, widths, classes, relu, form, sum_grad_squared)

    def prepare(form: Form, inputs: Array) -> Array:
        if form == "pallas" and inputs.dtype == jnp.uint8:
            return _bytes(inputs)
        return _maps(inputs, padding if paired(form) else None)

    return _model(name, network, prepare, input_shape, form)


def _joined(convolutions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, each of the fused ones told what the next one takes, if that has no padding."""
    joined, parts = [], 1
    for options in reversed(convolutions):
        fused = Convolution(**options, form="pallas").fused
        joined.insert(0, options | {"parts": parts if fused else 1})
        parts = 2 * joined[0]["parts"] if fused and not options.get("padding") else 1
    return joined


def _model(
    name: str,
    network: Callable[[Form, bool], nn.Module],
    layout: Callable[[Form, Array], Array],
    shape: tuple[int, ...],
    form: Form | None = None,
) -> Model:
    """A model of networks by form, with or without squares of gradients; None: the form of the devices of a run."""

    def chosen() -> Form:
        return backend().convolution if form is None else form

    def prepare(inputs: Array) -> Array:
        return layout(chosen(), inputs)

    def init(key: Array) -> Any:
        return network(chosen(), False).init(key, prepare(jnp.zeros((1, *shape))))["params"]

    def apply(method: str, squares: bool, params: Any, x: Array, _key: Array | None = None) -> Any:
        return network(chosen(), squares).apply({"params": params}, x, method=method)

    if _empty(init):
        raise ValueError(
            f"input_shape={shape!r}: nothing is left of it after the convolutions of {name}, give a larger one"
        )
    layers = depth_order(init)
    return Model(
        name=name,
        init=init,
        prepare=prepare,
        extract=functools.partial(apply, "extract", False),
        classify=functools.partial(apply, "classify", False),
        apply=functools.partial(apply, "__call__", False),
        sum_grad_squared=functools.partial(apply, "__call__", True),
        layers=layers,
        head=layers[-1:],
        input_shape=shape,
    )


def _empty(init: Callable[[Array], Any]) -> bool:
    """Return whether a layer gets nothing, which some initializers divide by."""
    try:
        params = jax.eval_shape(lambda: init(key_of(0)))
    except ZeroDivisionError:
        return True
    return any(0 in leaf.shape for leaf in jax.tree.leaves(params))


def depth_order(init: Callable[[Array], Any]) -> tuple[str, ...]:
    """Names of the top-level parameters in order of creation: a dict that went through JAX is sorted."""
    names: list[str] = []
    jax.eval_shape(lambda: names.extend(init(key_of(0))))
    return tuple(names)
