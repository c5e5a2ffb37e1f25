"""Flax modules of a user, compared with an equal PyTorch loop and with the library's networks.

python -m benchmarks.modules
"""

import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import optax
import tyro
from flax import nnx

from benchmarks.common import OUT, bars, cores, finish, in_turn, medians, ratio
from benchmarks.throughput import torch_tensors
from benchmarks.workloads import Workload, clients_of, compile_round, examples_of
from experiments.pfl_cifar10.network import Pfl
from jaxfl import LocalSGD
from jaxfl.algorithms import dp_fedavg
from jaxfl.engine.mesh import place
from jaxfl.models import feddpa_cnn, from_flax, from_nnx, lenet
from jaxfl.privacy import Full
from jaxfl.types import Model

SHAPE = (32, 32, 3)


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the benchmark."""

    networks: tuple[str, ...] = ("pfl", "lenet", "feddpa", "resnet", "mobile")
    clients: int = 50
    steps: int = 5
    batch_size: int = 10
    repeats: int = 7
    """Timed rounds of each kind, taken in turn."""
    out: pathlib.Path = OUT


class NnxPfl(nnx.Module):
    """The network of pfl-research's CIFAR-10 benchmark in nnx."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(3, 32, (3, 3), padding="VALID", rngs=rngs)
        self.second = nnx.Conv(32, 64, (3, 3), padding="VALID", rngs=rngs)
        self.dense, self.head = nnx.Linear(12544, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)
        self.drop_maps, self.drop_features = (
            nnx.Dropout(0.25, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits `[B, K]` for images `[B, H, W, channels]`."""
        x = nnx.relu(self.second(nnx.relu(self.first(x))))
        x = self.drop_maps(nnx.max_pool(x, (2, 2), (2, 2)))
        return self.head(self.drop_features(nnx.relu(self.dense(x.reshape(len(x), -1)))))


class Cnn(nn.Module):
    """Convolutions with ReLU and 2x2 max-pool, then dense layers and a head.

    Args:
        convolutions: Channels of each convolution.
        size: Width and height of the kernels.
        padding: Padding of the convolutions.
        widths: Units of each dense layer before the head.
    """

    convolutions: Sequence[int]
    size: int
    padding: str
    widths: Sequence[int]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits `[B, K]` for images `[B, H, W, channels]`."""
        for features in self.convolutions:
            x = nn.relu(nn.Conv(features, (self.size, self.size), padding=self.padding)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class ResNet(nn.Module):
    """Three residual blocks with GroupNorm.

    The shortcuts of the later two blocks are 1x1 convolutions of stride 2.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits `[B, K]` for images `[B, H, W, channels]`."""
        convolution = functools.partial(nn.Conv, kernel_size=(3, 3), padding=1, use_bias=False)
        x = nn.relu(nn.GroupNorm(2)(convolution(16)(x)))
        for features, stride in RESIDUAL:
            y = nn.relu(nn.GroupNorm(2)(convolution(features, strides=stride)(x)))
            y = nn.GroupNorm(2)(convolution(features)(y))
            if stride > 1:
                x = nn.GroupNorm(2)(nn.Conv(features, (1, 1), stride, use_bias=False)(x))
            x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


class Mobile(nn.Module):
    """A 3x3 convolution, then alternating depthwise 3x3 and pointwise 1x1 convolutions."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits `[B, K]` for images `[B, H, W, channels]`."""
        x = nn.relu(nn.Conv(16, (3, 3), 2, padding=1)(x))
        for features, stride in SEPARABLE:
            channels = x.shape[-1]
            x = nn.relu(
                nn.Conv(channels, (3, 3), stride, padding=1, feature_group_count=channels)(x)
            )
            x = nn.relu(nn.Conv(features, (1, 1))(x))
        return nn.Dense(10)(x.mean((1, 2)))


RESIDUAL = ((16, 1), (32, 2), (64, 2))
"""Channels and stride of each block of `ResNet`."""
SEPARABLE = ((32, 1), (64, 2), (64, 1), (128, 2))
"""Channels and stride of each pair of convolutions of `Mobile`."""


def models(network: str) -> dict[str, Model]:
    """Return the Flax module as a model, and the models that it is compared with, by kind.

    The kind is "linen", or "nnx" for the Flax module in nnx, or "ready" for the library's own
    network. Only "pfl" has the second kind, and only "lenet" and "feddpa" have the third.
    """
    wrapped: dict[str, Callable[[], dict[str, Model]]] = {
        "pfl": lambda: {"linen": from_flax(Pfl(), SHAPE), "nnx": from_nnx(NnxPfl, SHAPE)},
        "lenet": lambda: {
            "linen": from_flax(Cnn((6, 16), 5, "VALID", (120, 84)), SHAPE),
            "ready": lenet(),
        },
        "feddpa": lambda: {
            "linen": from_flax(Cnn((16, 32, 32), 3, "SAME", (512, 128)), SHAPE),
            "ready": feddpa_cnn(),
        },
        "resnet": lambda: {"linen": from_flax(ResNet(), SHAPE)},
        "mobile": lambda: {"linen": from_flax(Mobile(), SHAPE)},
    }
    return wrapped[network]()


def torch_network(network: str) -> Any:
    """Return the named network as a PyTorch module."""
    from torch import nn as tnn

    from benchmarks import pytorch

    def normalised(channels: int, features: int, size: int, stride: int = 1) -> list[Any]:
        convolution = tnn.Conv2d(channels, features, size, stride, size // 2, bias=False)
        return [convolution, tnn.GroupNorm(2, features)]

    def residual(channels: int, features: int, stride: int) -> Any:
        path = [
            *normalised(channels, features, 3, stride),
            tnn.ReLU(),
            *normalised(features, features, 3),
        ]
        short = normalised(channels, features, 1, stride) if stride > 1 else []
        return pytorch.Residual(tnn.Sequential(*path), tnn.Sequential(*short))

    def separable(channels: int, features: int, stride: int) -> list[Any]:
        depthwise = tnn.Conv2d(channels, channels, 3, stride, 1, groups=channels)
        return [depthwise, tnn.ReLU(), tnn.Conv2d(channels, features, 1), tnn.ReLU()]

    def resnet() -> list[Any]:
        blocks = [residual(c, f, s) for c, (f, s) in zip((16, 16, 32), RESIDUAL, strict=True)]
        return [
            *normalised(3, 16, 3),
            tnn.ReLU(),
            *blocks,
            tnn.AdaptiveAvgPool2d(1),
            tnn.Flatten(),
            tnn.Linear(64, 10),
        ]

    def mobile() -> list[Any]:
        channels = (16, *(features for features, _ in SEPARABLE))
        layers = [
            layer
            for c, (f, s) in zip(channels, SEPARABLE, strict=False)
            for layer in separable(c, f, s)
        ]
        ends = [tnn.AdaptiveAvgPool2d(1), tnn.Flatten(), tnn.Linear(channels[-1], 10)]
        return [tnn.Conv2d(3, 16, 3, 2, 1), tnn.ReLU(), *layers, *ends]

    if network in ("pfl", "lenet", "feddpa"):
        return pytorch.NETWORKS[
            {"pfl": "pfl_cnn", "lenet": "lenet", "feddpa": "feddpa_cnn"}[network]
        ](SHAPE)
    return tnn.Sequential(*{"resnet": resnet, "mobile": mobile}[network]())


def rounds_of(network: str, config: Config) -> dict[str, Callable[[], Any]]:
    """Return a call of a DP-FedAvg round by PyTorch and by each kind of `models`."""
    from benchmarks import pytorch

    work = Workload(
        network,
        SHAPE,
        config.clients,
        config.steps * config.batch_size,
        config.batch_size,
        config.steps,
    )
    inputs, labels = examples_of(work)
    population = place(clients_of(inputs, labels), jax.devices())
    local = LocalSGD(optax.sgd(0.01), config.batch_size, steps=config.steps)
    module, data = torch_network(network), torch_tensors(inputs, labels)
    steps = {"batch_size": config.batch_size, "steps": config.steps}
    rounds: dict[str, Callable[[], Any]] = {
        "torch": lambda: pytorch.fedavg_round(module, *data, **steps)
    }
    for kind, model in models(network).items():
        algorithm = dp_fedavg(model, clip=1.0, local=local, noise_multiplier=1.0, sampling=Full())
        rounds[kind] = compile_round(algorithm, population, 1).run
    return rounds


def main(config: Config) -> None:
    """Time the rounds of each network in turn, and print their speeds relative to PyTorch.

    Raises:
        ValueError: `repeats` is below 5, or PyTorch is not installed.
    """
    if config.repeats < 5:
        raise ValueError(
            f"repeats must be at least 5, got {config.repeats!r}. Give more, because medians of "
            "fewer vary too much."
        )
    if importlib.util.find_spec("torch") is None:
        raise ValueError("PyTorch must be installed, got none. Run pip install -e '.[bench]'.")
    from benchmarks import pytorch

    pytorch.best_device(cores())
    rows, seconds = [], {}
    for network in config.networks:
        seconds[network] = times = in_turn(rounds_of(network, config), config.repeats)
        for kind, median in medians(times).items():
            row = {"network": network, "kind": kind, "median_s": median}
            row |= {"client_steps_per_s": config.clients * config.steps / median}
            row |= {"over_torch": ratio(times["torch"], times[kind])}
            ready = times.get("ready")
            rows.append(row | {"over_ready": ratio(ready, times[kind]) if ready else None})
    speeds = {
        f"{row['network']}, {row['kind']}": row["over_torch"]
        for row in rows
        if row["kind"] != "torch"
    }
    headline = ", ".join(f"{name} {times:.2f}" for name, times in speeds.items()) + " x PyTorch"
    figure = bars(speeds, "times PyTorch's speed", "Flax modules as they are written")
    finish(config, "modules", headline, rows, figure, {"seconds": seconds})


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
