"""Networks of the papers and for small tests, and `build`, which makes one by its name."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Shaped

from jaxfl._support.backend import Form, Network, backend
from jaxfl._support.checks import check_choice, check_counts, checked, key_of, show
from jaxfl._support.recipes import with_recipe
from jaxfl.models.kernels.convolution import to_pairs
from jaxfl.models.layers import Classifier, Convolution, Dense, GroupNorm, as_floats
from jaxfl.types import Model

Shape = tuple[int, int, int]
"""Height, width and channels of a picture."""


def _as_vectors(inputs: Shaped[Array, "B ..."]) -> Float[Array, "B F"]:
    """Return inputs `as_floats`, with pictures as vectors in the order (channels, H, W)."""
    if inputs.ndim == 2:
        return as_floats(inputs)
    return as_floats(inputs).transpose(0, 3, 1, 2).reshape(len(inputs), -1)


def _bytes(inputs: Shaped[Array, "B H W C"]) -> Shaped[Array, "C H W B"]:
    """Return pictures with the batch as the last axis, in their dtype.

    Bytes stay bytes, because they take a quarter of the memory traffic of floats.
    """
    return inputs.transpose(3, 1, 2, 0)


def _picture_maps(
    inputs: Shaped[Array, "B H W C"], padding: int | None = None
) -> Float[Array, "maps H2 W2 B"]:
    """Return batch-minor maps of floats.

    Args:
        inputs: Pictures, as bytes or floats.
        padding: Number of zeros on each side, for a layer that reads pairs of columns as channels
            (`to_pairs`). None gives maps without pairs and without padding.
    """
    x = _bytes(inputs)
    if padding:
        # A byte of 0 means -1, so bytes are scaled before they are padded with zeros.
        sides = (padding, padding)
        x = jnp.pad(as_floats(x), ((0, 0), sides, sides, (0, 0)))
    if padding is not None:
        x = to_pairs(x)
    return as_floats(x)


class _Mlp(Classifier):
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


class _Cnn(Classifier):
    """A network of convolutions, dense layers with or without ReLU in between, and a head."""

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
        # Dense layers take one row of features for each example.
        x = x.reshape(-1, x.shape[-1]).T
        for layer in self.dense:
            x = layer(x)
            if self.relu:
                x = nn.relu(x)
        return x


class _NormLenet(Classifier):
    """A LeNet with GroupNorm after every hidden layer, before pooling and ReLU."""

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
            # ReLU commutes with the maximum, after which there are a quarter of the numbers.
            x = nn.relu(_maxima(norm(layer(x))))
        x = x.reshape(-1, x.shape[-1]).T
        for layer, norm in zip(self.dense, self.norm[2:], strict=True):
            # GroupNorm takes maps, here of a single pixel.
            maps = layer(x).T[:, None, None]
            x = nn.relu(norm(maps)[:, 0, 0].T)
        return x


def _maxima(x: Float[Array, "C H W B"]) -> Float[Array, "C H2 W2 B"]:
    """Return the largest number of each 2x2 window."""
    # A last odd row or column is in no window.
    high = x.shape[1] // 2 * 2
    wide = x.shape[2] // 2 * 2
    x = x[:, :high, :wide]
    rows = jnp.maximum(x[:, ::2], x[:, 1::2])
    return jnp.maximum(rows[:, :, ::2], rows[:, :, 1::2])


class _ResNet(Classifier):
    """A network of residual blocks of two 3x3 convolutions, each with GroupNorm.

    The shortcut of a block that halves the maps takes every second pixel, and pads channels with
    zeros.
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
        # The first convolution of each later stage halves the maps. Convolution 0 is in no block.
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
            missing = len(y) - len(x)
            strided = x[:, ::stride, ::stride]
            shortcut = jnp.pad(strided, ((0, missing), (0, 0), (0, 0), (0, 0)))
            x = self.norm[i + 1](y, shortcut)
        return x.mean((1, 2)).T


def _check_shape(name: str, value: Any) -> Shape:
    shape = check_counts(name, value)
    if len(shape) != 3:
        raise ValueError(
            f"{name} must be (H, W, channels), got {show(value)}. Give three whole numbers."
        )
    return shape


def _check_vector_or_shape(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, int):
        raise TypeError(
            f"{name} must be a shape such as (8, 8, 1) or (64,), got {value!r}. "
            f"Give ({value},) for vectors of {value} numbers."
        )
    shape = check_counts(name, value)
    if len(shape) == 1:
        return shape
    return _check_shape(name, value)


@checked(input_shape=_check_vector_or_shape, hidden=check_counts)
@with_recipe
def mlp(
    input_shape: tuple[int, ...] = (28, 28, 1),
    classes: int = 10,
    hidden: Sequence[int] = (200, 200),
) -> Model:
    """Return a multilayer perceptron with ReLU.

    Args:
        input_shape: Shape of an example, (H, W, C) of pictures or (F,) of vectors such as
            features.
        classes: Number of logits.
        hidden: Widths of the hidden layers. An empty sequence gives a linear model.

    >>> model = mlp(hidden=(200, 200))
    >>> model.layers, model.head
    (('dense_0', 'dense_1', 'head'), ('head',))
    """
    twin = _Mlp(tuple(hidden), classes, ghost_norms=True)

    def network(_form: Form, sum_grad_squared: bool) -> nn.Module:
        return _Mlp(tuple(hidden), classes, sum_grad_squared)

    def ghost_norms(params: Any, x: Array, probe: Array) -> Any:
        # All layers get the same probe, so its gradient is the sum of their squared norms.
        probed = {name: {**layer, "probe": probe} for name, layer in params.items()}
        return twin.apply({"params": probed}, x)

    model = _model_by_form("mlp", network, lambda _form, x: _as_vectors(x), input_shape)
    return model._replace(ghost_norms=ghost_norms)


@checked(input_shape=_check_shape)
@with_recipe
def lenet(input_shape: Shape = (32, 32, 3), classes: int = 10, form: Form | None = None) -> Model:
    """Return LeNet: two 5x5 convolutions and dense layers of widths 120, 84 and `classes`.

    The convolutions have 6 and 16 channels, each with ReLU and 2x2 max-pool. There are 62,006
    parameters for 32x32x3 and 44,426 for 28x28x1 with 10 classes.

    Args:
        input_shape: Shape (H, W, C) of an example.
        classes: Number of logits.
        form: Form of convolutions (see `jaxfl.models.layers`). The default is that of the devices
            of a run. "lax" supports forward-mode differentiation.

    Raises:
        ValueError: The shape is so small that no pixel is left after the convolutions.

    >>> sum(a.size for a in jax.tree.leaves(lenet().init(jax.random.key(0))))
    62006
    """
    convolutions = [{"features": n, "size": 5} for n in (6, 16)]
    return _cnn("lenet", convolutions, (120, 84), input_shape, classes, form, kind="narrow")


@checked(input_shape=_check_shape)
@with_recipe
def lenet_groupnorm(
    input_shape: Shape = (32, 32, 3), classes: int = 10, groups: int = 2, form: Form | None = None
) -> Model:
    """Return LeNet with GroupNorm after every hidden layer.

    The scale of its features does not depend on that of the kernels before GroupNorm. Convolutions
    have no bias.

    Args:
        input_shape: Shape (H, W, C) of an example.
        classes: Number of logits.
        groups: Number of groups of GroupNorm, 1 or 2.
        form: Form of convolutions (see `lenet`). The default is that of the devices of a run.

    Raises:
        ValueError: `groups` is neither 1 nor 2, or the shape is so small that no pixel is left
            after the convolutions.

    >>> lenet_groupnorm().layers[:4]
    ('conv_0', 'norm_0', 'conv_1', 'norm_1')
    """
    network = functools.partial(_NormLenet, check_choice("groups", groups, (1, 2)), classes)
    return _model_by_form(
        "lenet_groupnorm", network, lambda _form, x: _picture_maps(x), input_shape, form
    )


_FEDDPA_CLASSES = {
    "cifar10": 10,
    "cifar100": 100,
    "svhn_cropped": 10,
    "mnist": 10,
    "fashion_mnist": 10,
    "emnist": 62,
    "femnist": 62,
}
"""Number of classes of each dataset that FedDPA's code has a network for."""


@checked(dataset=functools.partial(check_choice, choices=tuple(_FEDDPA_CLASSES)))
@with_recipe
def feddpa_cnn(
    dataset: str = "cifar10", classes: int | None = None, form: Form | None = None
) -> Model:
    """Return FedDPA's network for a dataset, as in its published code.

    - cifar10, cifar100 (32x32x3): three 3x3 convolutions with 16, 32 and 32 channels and padding 1,
      each with ReLU and 2x2 max-pool. Dense layers of widths 512, 128 and `classes` follow, with
      ReLU between them. 512 features enter the first dense layer.
    - svhn_cropped (32x32x3): 3x3 convolutions with 32 (ReLU) and 64 (ReLU, pool) channels, then
      dense layers of widths 128 (ReLU) and `classes`.
    - mnist, fashion_mnist, emnist, femnist (28x28x1): 3x3 convolutions with 32 (no ReLU) and 64
      (ReLU, pool) channels, then dense layers of widths 128 (no ReLU) and `classes`.

    Args:
        dataset: Name of the dataset.
        classes: Number of logits. The default is the dataset's number of classes: 100 for
            cifar100, 62 for emnist and femnist, and 10 for the others.
        form: Form of convolutions (see `lenet`). The default is that of the devices of a run.

    Deviations from the paper: the published networks name dropout layers, and this one has none.
        The published code's Fisher pass switches dropout off and nothing switches it on again, so
        no unit is ever dropped.

    References:
        Yang et al., Dynamic Personalized Federated Learning with Adaptive Differential Privacy,
        NeurIPS 2023.
    """
    if classes is None:
        classes = _FEDDPA_CLASSES[dataset]
    if dataset in ("cifar10", "cifar100"):
        convolutions = [{"features": n, "size": 3, "padding": 1} for n in (16, 32, 32)]
        return _cnn("feddpa_cnn", convolutions, (512, 128), (32, 32, 3), classes, form)
    colour = dataset == "svhn_cropped"
    convolutions = [
        {"features": 32, "size": 3, "relu": colour, "pool": False},
        {"features": 64, "size": 3},
    ]
    shape = (28, 28, 1)
    if colour:
        shape = (32, 32, 3)
    return _cnn("feddpa_cnn", convolutions, (128,), shape, classes, form, relu=colour)


@checked(input_shape=_check_shape)
@with_recipe
def digits_cnn(
    input_shape: Shape = (8, 8, 1), classes: int = 10, form: Form | None = None
) -> Model:
    """Return a small network for 8x8 digits: two 3x3 convolutions and a dense layer of width 32.

    The convolutions have 8 and 16 channels, padding 1, ReLU and 2x2 max-pool.

    Args:
        input_shape: Shape (H, W, C) of an example.
        classes: Number of logits.
        form: Form of convolutions (see `lenet`). The default is that of the devices of a run.

    Raises:
        ValueError: The shape is so small that no pixel is left after the convolutions.
    """
    convolutions = [{"features": n, "size": 3, "padding": 1} for n in (8, 16)]
    return _cnn("digits_cnn", convolutions, (32,), input_shape, classes, form)


@checked(input_shape=_check_shape)
@with_recipe
def resnet20(
    input_shape: Shape = (32, 32, 3), classes: int = 10, groups: int = 2, form: Form | None = None
) -> Model:
    """Return ResNet20: a 3x3 convolution, 3 stages of 3 residual blocks, a mean, and a head.

    The stages have 16, 32 and 64 channels, and the later ones begin with stride 2. There are
    269,072 parameters without the head, for 3 channels. The mean is over pixels.

    Args:
        input_shape: Shape (H, W, C) of an example.
        classes: Number of logits.
        groups: Number of groups of GroupNorm, a divisor of 16. GroupNorm replaces BatchNorm,
            whose running statistics a client would send without clipping.
        form: Form of convolutions (see `lenet`). The default is that of the devices of a run.

    Raises:
        ValueError: `groups` does not divide 16.

    References:
        He et al., Deep Residual Learning for Image Recognition, CVPR 2016 (section 4.2, option A).
        Hsieh et al., The Non-IID Data Quagmire of Decentralized Machine Learning, ICML 2020
        (GroupNorm with 2 groups).
    """
    if 16 % groups:
        raise ValueError(
            f"groups must be a divisor of the 16 channels of the first stage, got {groups!r}. "
            "Choose 1, 2, 4, 8 or 16."
        )
    network = functools.partial(_ResNet, (16, 32, 64), 3, groups, classes)
    model = _model_by_form(
        "resnet20", network, lambda _form, x: _picture_maps(x), input_shape, form, "residual"
    )
    # The maps of a batch exceed a processor's caches, so a pass takes fewer examples there.
    return model._replace(microbatch="auto")


@checked(input_shape=_check_vector_or_shape)
def build(name: str, input_shape: tuple[int, ...], classes: int) -> Model:
    """Return the model of a name for inputs of a shape.

    Args:
        name: "mlp", "lenet", "lenet_groupnorm", "feddpa_cnn", "digits_cnn" or "resnet20".
        input_shape: Shape (H, W, C) of an example. "mlp" also takes (F,), of F numbers, and
            "feddpa_cnn" takes only (32, 32, 3) and (28, 28, 1).
        classes: Number of logits.

    Raises:
        ValueError: The name is unknown, or the network does not take the shape.

    >>> build("lenet", (28, 28, 1), 10).name
    'lenet'
    """
    builders: dict[str, Callable[..., Model]] = {
        "mlp": mlp,
        "lenet": lenet,
        "lenet_groupnorm": lenet_groupnorm,
        "feddpa_cnn": _feddpa_by_shape,
        "digits_cnn": digits_cnn,
        "resnet20": resnet20,
    }
    builder = builders[check_choice("name", name, tuple(builders))]
    return builder(input_shape, classes)


def _feddpa_by_shape(input_shape: Shape, classes: int) -> Model:
    shape = check_choice("input_shape", input_shape, ((32, 32, 3), (28, 28, 1)))
    dataset = "mnist"
    if shape == (32, 32, 3):
        dataset = "cifar10"
    return feddpa_cnn(dataset, classes)


def _cnn(
    name: str,
    convolutions: list[dict[str, Any]],
    widths: tuple[int, ...],
    input_shape: Shape,
    classes: int,
    form: Form | None,
    relu: bool = True,
    kind: Network = "usual",
) -> Model:
    """Return a model of convolutions, dense layers of some widths, and a head.

    Args:
        name: Name of the model.
        convolutions: Options of each `Convolution`, except its form.
        widths: Numbers of outputs of the dense layers.
        input_shape: Shape (H, W, C) of an example.
        classes: Number of logits.
        form: Form of convolutions. None takes that of the devices of a run.
        relu: Whether ReLU follows each dense layer.
        kind: Kind of network, for the default form.
    """
    # A product with few outputs is slow. Pairs of columns double them, for (k + 1) / k times the
    # operations.
    first = convolutions[0]
    padding = first.get("padding", 0)
    # Tuples, so that a network that is built again is known to be the same.
    plain = tuple(convolutions)
    pairs = ({**first, "padding": 0, "pairs": True}, *convolutions[1:])
    joined = tuple(_with_parts(convolutions))

    def paired(form: Form) -> bool:
        return form == "winograd" and first["size"] >= 5 and input_shape[1] % 2 == 0

    def network(form: Form, sum_grad_squared: bool) -> nn.Module:
        if paired(form):
            layers = pairs
        elif form == "pallas":
            layers = joined
        else:
            layers = plain
        return _Cnn(layers, widths, classes, relu, form, sum_grad_squared)

    def prepare(form: Form, inputs: Array) -> Array:
        # The first layer converts bytes itself, which the fused kernel does as it reads them.
        if form == "pallas" and inputs.dtype == jnp.uint8:
            return _bytes(inputs)
        if paired(form):
            return _picture_maps(inputs, padding)
        return _picture_maps(inputs)

    return _model_by_form(name, network, prepare, input_shape, form, kind)


def _with_parts(convolutions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of convolutions with `parts`, the layout in which a layer writes columns.

    A fused layer writes the parts that the next layer reads. A layer reads more than one part only
    if it is fused and has no padding.
    """
    joined = []
    # No layer follows the last one, which writes its columns in order. The loop begins there.
    wanted = 1
    for options in reversed(convolutions):
        fused = Convolution(**options, form="pallas").fused
        parts = 1
        if fused:
            parts = wanted
        joined.insert(0, options | {"parts": parts})
        wanted = 1
        if fused and not options.get("padding"):
            # Pooling joins two columns into one, so a layer reads twice the parts that it writes.
            wanted = 2 * parts
    return joined


def _model_by_form(
    name: str,
    network: Callable[[Form, bool], nn.Module],
    layout: Callable[[Form, Array], Array],
    shape: tuple[int, ...],
    form: Form | None = None,
    kind: Network = "usual",
) -> Model:
    """Return a model of networks that depend on the form.

    Args:
        name: Name of the model.
        network: Function of the form, and of whether gradients are sums of squares, that returns
            a module.
        layout: Function of the form and a stored batch that returns the module's input.
        shape: Shape of an example.
        form: Form of convolutions. The default is that of the devices of a run.
        kind: Kind of network, for the default form.

    Raises:
        ValueError: A layer gets no input for this shape.
    """

    # A model serves devices of all kinds, so its form is chosen whenever a program is traced.
    def chosen() -> Form:
        if form is None:
            return backend().forms[kind]
        return form

    def prepare(inputs: Array) -> Array:
        return layout(chosen(), inputs)

    def init(key: Array) -> Any:
        # Parameters follow from shapes, so one example of zeros serves.
        example = prepare(jnp.zeros((1, *shape)))
        return network(chosen(), False).init(key, example)["params"]

    # Training gives a key to every network. These networks draw nothing.
    def apply(method: str, squares: bool, params: Any, x: Array, _key: Array | None = None) -> Any:
        return network(chosen(), squares).apply({"params": params}, x, method=method)

    if _empty(init):
        raise ValueError(
            f"input_shape must leave a pixel after the convolutions of {name}, got {shape!r}. Give "
            "a larger height and width."
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
        # A network calls its head last, so the head's parameters are made last.
        head=layers[-1:],
        input_shape=shape,
    )


def _empty(init: Callable[[Array], Any]) -> bool:
    """Return whether a layer has no inputs, so that a parameter is empty or `init` divides by 0."""
    try:
        params = jax.eval_shape(lambda: init(key_of(0)))
    except ZeroDivisionError:
        return True
    return any(0 in leaf.shape for leaf in jax.tree.leaves(params))


def depth_order(init: Callable[[Array], Any]) -> tuple[str, ...]:
    """Return the names of the top-level parameters in the order of their creation.

    JAX sorts the dicts that it returns, so the names are recorded during a trace.
    """
    names: list[str] = []
    jax.eval_shape(lambda: names.extend(init(key_of(0))))
    return tuple(names)
