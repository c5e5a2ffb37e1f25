"""Rounds of private federated learning as an experienced PyTorch user would write them for a CPU.

The code has no data loader, no optimizer object if a fused update suffices, gradients directly from
autograd, and data in preallocated tensors in PyTorch's own layout. A round includes local training
of every client, joint clipping, accumulation, noise, average, and new server weights.
"""

import functools
import multiprocessing.connection
import multiprocessing.synchronize
import time

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Weights = list[Tensor]


class LeNet(nn.Module):
    """Two 5x5 convolutions (6, 16) with ReLU and 2x2 max-pool, then dense 120, 84, classes."""

    def __init__(self, input_shape: tuple[int, int, int] = (32, 32, 3), classes: int = 10) -> None:
        super().__init__()
        side = ((input_shape[0] - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(input_shape[2], 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.dense1 = nn.Linear(16 * side * side, 120)
        self.dense2 = nn.Linear(120, 84)
        self.head = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, K]` for images `[B, channels, H, W]`."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.dense1(x.flatten(1)))
        return self.head(F.relu(self.dense2(x)))


class Mlp(nn.Module):
    """Dense 200, 200, classes with ReLU."""

    def __init__(self, input_shape: tuple[int, int, int] = (28, 28, 1), classes: int = 10) -> None:
        super().__init__()
        self.dense1 = nn.Linear(int(np.prod(input_shape)), 200)
        self.dense2 = nn.Linear(200, 200)
        self.head = nn.Linear(200, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, K]` for images `[B, channels, H, W]`."""
        return self.head(F.relu(self.dense2(F.relu(self.dense1(x.flatten(1))))))


class FedDpaCifar(nn.Module):
    """FedDPA's network for CIFAR: three 3x3 convolutions with pooling, then dense layers.

    The convolutions have 16, 32 and 32 channels, and the dense layers 512, 128, classes.
    """

    def __init__(self, input_shape: tuple[int, int, int] = (32, 32, 3), classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_shape[2], 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1)
        self.dense1 = nn.Linear(32 * (input_shape[0] // 8) * (input_shape[1] // 8), 512)
        self.dense2 = nn.Linear(512, 128)
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, K]` for images `[B, channels, H, W]`."""
        for layer in (self.conv1, self.conv2, self.conv3):
            x = F.max_pool2d(F.relu(layer(x)), 2)
        x = F.relu(self.dense1(x.flatten(1)))
        return self.head(F.relu(self.dense2(x)))


class ResNet20(nn.Module):
    """A 3x3 convolution, 3 stages of 3 residual blocks with GroupNorm, a mean and a dense layer.

    The stages have 16, 32 and 64 channels.
    """

    def __init__(self, input_shape: tuple[int, int, int] = (32, 32, 3), classes: int = 10) -> None:
        super().__init__()
        sizes = [(input_shape[2], 16, 1)]
        for before, width in ((16, 16), (16, 32), (32, 64)):
            sizes += [(before, width, width // before)] + [(width, width, 1)] * 5
        self.conv = nn.ModuleList(
            nn.Conv2d(c, f, 3, stride, padding=1, bias=False) for c, f, stride in sizes
        )
        self.norm = nn.ModuleList(nn.GroupNorm(2, f) for _, f, _ in sizes)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, K]` for images `[B, channels, H, W]`."""
        x = F.relu(self.norm[0](self.conv[0](x)))
        for i in range(1, len(self.conv), 2):
            y = F.relu(self.norm[i](self.conv[i](x)))
            y = self.norm[i + 1](self.conv[i + 1](y))
            if y.shape != x.shape:
                x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, y.shape[1] - x.shape[1]))
            x = F.relu(y + x)
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    """A residual block, the ReLU of the sum of two paths."""

    def __init__(self, path: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.path, self.shortcut = path, shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's feature maps `[B, channels, H, W]`."""
        return F.relu(self.path(x) + self.shortcut(x))


class Transformer(nn.Module):
    """A causal transformer with token and position embeddings.

    Blocks have layer normalisation first, and GELU. A last normalisation and a head follow.
    """

    def __init__(
        self,
        vocabulary: int = 80,
        length: int = 128,
        width: int = 128,
        blocks: int = 4,
        heads: int = 4,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits `[B * L, vocabulary]` of all positions, for tokens `[B, L]`."""
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Block(nn.Module):
    """A block of attention, by PyTorch's own fused kernel, and two dense layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.hidden_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's outputs, which have the shape of its inputs."""
        batch, length, width = x.shape
        parts = (
            self.attention(self.norm1(x))
            .view(batch, length, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)
        x = x + self.attention_out(mixed.reshape(batch, length, width))
        return x + self.hidden_out(F.gelu(self.hidden(self.norm2(x)), approximate="tanh"))


def pfl_cnn(input_shape: tuple[int, int, int], classes: int = 10) -> nn.Module:
    """Build the CNN of pfl-research's CIFAR-10 benchmark, for images of (H, W, channels)."""
    height, width, channels = input_shape
    maps = [
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
    ]
    pixels = (height // 2 - 2) * (width // 2 - 2)
    dense = [nn.Linear(64 * pixels, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes)]
    return nn.Sequential(*maps, nn.Flatten(), *dense)


NETWORKS = {
    "lenet": LeNet,
    "mlp": Mlp,
    "feddpa_cnn": FedDpaCifar,
    "resnet20": ResNet20,
    "pfl_cnn": pfl_cnn,
    "femnist_cnn": functools.partial(pfl_cnn, classes=62),
}


def best_device(threads: int) -> str:
    """Return "cuda" if PyTorch can use a GPU by that name, and otherwise "cpu".

    The call also gives PyTorch `threads` threads on the CPU, and lets products on the GPU run in
    TF32, as JAX does by default.
    """
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    return "cuda" if torch.cuda.is_available() else "cpu"


def tensors(inputs: np.ndarray, labels: np.ndarray, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return inputs and labels as tensors, with channels before height and width.

    Args:
        inputs: Images `[C, N, H, W, channels]` in float32.
        labels: Labels `[C, N]`.
        device: Device of the tensors.
    """
    images = torch.from_numpy(
        np.ascontiguousarray(inputs.transpose(0, 1, 4, 2, 3), dtype=np.float32)
    )
    return images.to(device), torch.from_numpy(np.asarray(labels, dtype=np.int64)).to(device)


def wait(device: str) -> None:
    """Wait until the device "cuda" has finished its work. A CPU has nothing to wait for."""
    if device == "cuda":
        torch.cuda.synchronize()


def fedavg_round(
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    batch_size: int,
    steps: int,
    lr: float = 0.01,
    clip: float = 1.0,
    noise_multiplier: float = 1.0,
) -> None:
    """Run a round of DP-FedAvg over all clients, which updates the network in place.

    Args:
        network: Network with the server's weights.
        inputs: Images `[C, N, channels, H, W]`, or tokens `[C, N, L]`. If N is below
            `steps * batch_size`, batches start again.
        labels: Labels `[C, N]`, or `[C, N, L]` of all positions.
        batch_size: Examples per local step.
        steps: Local SGD steps per client.
        lr: Local learning rate.
        clip: Bound on the joint L2 norm of a client's update.
        noise_multiplier: Std of the noise on the sum, divided by `clip`.
    """
    local: Weights = list(network.parameters())
    server = [p.detach().clone() for p in local]
    total = [torch.zeros_like(p) for p in server]
    for x, y in zip(inputs, labels):
        _load(local, server)
        for i in range(steps):
            start = i * batch_size % (len(x) - batch_size + 1)
            loss = F.cross_entropy(
                network(x[start : start + batch_size]), y[start : start + batch_size].flatten()
            )
            gradients = list(torch.autograd.grad(loss, local))
            with torch.no_grad():
                torch._foreach_add_(local, gradients, alpha=-lr)
        _accumulate(total, local, server, clip)
    _finish(local, server, total, clip * noise_multiplier, len(inputs))


def vmapped_round(
    network: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    batch_size: int,
    steps: int,
    chunk: int,
    lr: float = 0.01,
    clip: float = 1.0,
    noise_multiplier: float = 1.0,
) -> None:
    """Run `fedavg_round` with `chunk` clients at a time, by `torch.func.vmap`.

    Other arguments are those of `fedavg_round`, except that inputs are images.
    """
    server = {name: weights.detach().clone() for name, weights in network.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(network, weights, (x,)), y)

    gradients = torch.func.vmap(torch.func.grad(loss), randomness="different")
    total = {name: torch.zeros_like(weights) for name, weights in server.items()}
    for first in range(0, len(inputs), chunk):
        x, y = inputs[first : first + chunk], labels[first : first + chunk]
        local = {
            name: weights.expand(len(x), *weights.shape).clone() for name, weights in server.items()
        }
        for i in range(steps):
            start = i * batch_size % (x.shape[1] - batch_size + 1)
            slopes = gradients(
                local, x[:, start : start + batch_size], y[:, start : start + batch_size]
            )
            for name, weights in local.items():
                weights.sub_(slopes[name], alpha=lr)
        moved = {name: weights - server[name] for name, weights in local.items()}
        norm = sum(change.flatten(1).square().sum(1) for change in moved.values()) ** 0.5
        factor = clip / norm.clamp(min=clip)
        for name, change in moved.items():
            total[name] += torch.einsum("c,c...->...", factor, change)
    weights, std = list(network.parameters()), clip * noise_multiplier
    _finish(weights, list(server.values()), list(total.values()), std, len(inputs))


def feddpa_round(
    network: nn.Module,
    personal: list[list[Tensor]],
    inputs: Tensor,
    labels: Tensor,
    *,
    batch_size: int = 16,
    epochs: int = 2,
    lr: float = 1e-3,
    threshold: float = 0.4,
    lambda1: float = 0.1,
    lambda2: float = 0.05,
    clip: float = 0.5,
    noise_multiplier: float = 1.0,
    published: bool = False,
) -> None:
    """Run a round of FedDPA over all clients, which updates network and personal weights in place.

    A client computes Fisher masks from its old personal weights. It then trains the personal part
    in stage A, and the shared part in stage B.

    Args:
        network: Network with the server's weights.
        personal: All weights of each client's own model.
        inputs: Images `[C, N, channels, H, W]`.
        labels: Labels `[C, N]`.
        batch_size: Examples per local step.
        epochs: Epochs of each stage.
        lr: Learning rate of Adam, whose state is new in each stage.
        threshold: Normalised Fisher information from which a weight is personal.
        lambda1: Weight of the personal part's distance to the server's weights, in stage A.
        lambda2: Weight of the distance of the shared update's norm to `clip`, in stage B.
        clip: Bound on the joint L2 norm of a client's update.
        noise_multiplier: Std of the noise on the sum, divided by `clip`.
        published: Whether to compute the Fisher diagonal as the published code does. Otherwise a
            faster way is taken.

    References:
        Yang et al., Dynamic Personalized Federated Learning with Adaptive Differential Privacy,
            NeurIPS 2023.
    """
    local: Weights = list(network.parameters())
    server = [p.detach().clone() for p in local]
    total = [torch.zeros_like(p) for p in server]
    for own, x, y in zip(personal, inputs, labels):
        _load(local, own)
        fisher = (
            published_fisher(network, x, y, batch_size)
            if published
            else fisher_diagonal(network, x, y)
        )
        masks = [f >= threshold for f in _normalize(fisher)]
        mine = [m.to(p.dtype) for m, p in zip(masks, server)]
        shared = [1 - m for m in mine]
        _load(local, [torch.where(m, w, s) for m, w, s in zip(masks, own, server)])
        for mask, strength, target in ((mine, lambda1, 0.0), (shared, lambda2, clip)):
            _adam_epochs(network, server, mask, x, y, batch_size, epochs, lr, strength, target)
        with torch.no_grad():
            torch._foreach_copy_(own, local)
        _accumulate(total, local, server, clip)
    _finish(local, server, total, clip * noise_multiplier, len(inputs))


def fisher_diagonal(network: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return the mean over examples of (d log p(y|x) / dw)^2 for each weight tensor.

    It takes one example at a time.
    """
    weights = list(network.parameters())
    total = [torch.zeros_like(w) for w in weights]
    for image, label in zip(x, y):
        log_p = F.log_softmax(network(image[None]), dim=1)[0, label]
        for sum_, gradient in zip(total, torch.autograd.grad(log_p, weights)):
            sum_.addcmul_(gradient, gradient)
    torch._foreach_div_(total, len(x))
    return total


def published_fisher(network: nn.Module, x: Tensor, y: Tensor, batch_size: int) -> list[Tensor]:
    """Return `fisher_diagonal` as FedDPA's published code computes it.

    The code runs a forward pass for each batch. For each example it runs a backward pass through
    the graph of the full batch, with gradients that could be differentiated again.
    """
    weights = list(network.parameters())
    total = [torch.zeros_like(w) for w in weights]
    for images, labels in zip(x.split(batch_size), y.split(batch_size)):
        log_p = F.log_softmax(network(images), dim=1)
        for own, label in zip(log_p, labels):
            gradients = torch.autograd.grad(
                own[label], weights, create_graph=True, retain_graph=True
            )
            for sum_, gradient in zip(total, gradients):
                sum_.add_(gradient.detach() ** 2)
    torch._foreach_div_(total, len(x))
    return total


def _adam_epochs(
    network: nn.Module,
    server: Weights,
    mask: Weights,
    x: Tensor,
    y: Tensor,
    batch_size: int,
    epochs: int,
    lr: float,
    strength: float,
    target: float,
) -> None:
    """Run masked Adam on cross-entropy + strength / 2 * | ||mask * (w - server)|| - target |.

    The network is updated in place. Masks are 1 where a weight moves, and 0 elsewhere.
    """
    local: Weights = list(network.parameters())
    optimizer = torch.optim.Adam(local, lr=lr)
    for start in list(range(0, len(x), batch_size)) * epochs:
        loss = F.cross_entropy(
            network(x[start : start + batch_size]), y[start : start + batch_size]
        )
        gradients = list(torch.autograd.grad(loss, local))
        with torch.no_grad():
            # The penalty's gradient in closed form is cheaper than its graph.
            moved = torch._foreach_mul(torch._foreach_sub(local, server), mask)
            norm = torch.stack(torch._foreach_norm(moved)).norm()
            if norm > 0:
                slope = float(strength / 2 * torch.sign(norm - target) / norm)
                torch._foreach_add_(gradients, moved, alpha=slope)
            torch._foreach_mul_(gradients, mask)
        for weight, gradient in zip(local, gradients):
            weight.grad = gradient
        optimizer.step()
    for weight in local:
        weight.grad = None


def _normalize(fisher: Weights) -> list[Tensor]:
    """Scale each tensor to [0, 1] by its least and largest value. A constant tensor becomes 0."""
    spans = [(f.min(), f.max()) for f in fisher]
    return [
        (f - low) / (high - low) if high > low else torch.zeros_like(f)
        for f, (low, high) in zip(fisher, spans)
    ]


def _load(local: Weights, weights: Weights) -> None:
    with torch.no_grad():
        torch._foreach_copy_(local, weights)


def _accumulate(total: Weights, local: Weights, server: Weights, clip: float) -> None:
    """Add one client's update to `total`, clipped by its joint L2 norm."""
    with torch.no_grad():
        update = torch._foreach_sub(local, server)
        norm = float(torch.stack(torch._foreach_norm(update)).norm())
        torch._foreach_add_(total, update, alpha=min(1.0, clip / max(norm, 1e-12)))


def _finish(local: Weights, server: Weights, total: Weights, std: float, count: int) -> None:
    """Write the server's weights plus the noisy average of `count` updates into `local`."""
    with torch.no_grad():
        for weight, old, sum_ in zip(local, server, total):
            weight.copy_(old + (sum_ + std * torch.randn_like(sum_)) / count)


def two_processes(
    name: str,
    inputs: np.ndarray,
    labels: np.ndarray,
    *,
    rounds: int = 5,
    input_shape: tuple[int, int, int],
    **options,
) -> list[float]:
    """Return the seconds of `fedavg_round` over two processes, each with half of the clients.

    Each process has one thread. The average over the two halves is left out, in PyTorch's favour.

    Args:
        name: Name of the network.
        inputs: Images `[C, N, H, W, channels]` in float32.
        labels: Labels `[C, N]`.
        rounds: Number of timed rounds, after one to warm up.
        input_shape: Shape (H, W, channels) for which the network is built.
        **options: Further arguments of `fedavg_round`.
    """
    context = torch.multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    half = len(inputs) // 2
    workers = [
        context.Process(
            target=_work,
            args=(name, input_shape, inputs[part], labels[part], rounds, barrier, options),
            daemon=True,
        )
        for part in (slice(half), slice(half, None))
    ]
    for worker in workers:
        worker.start()
    barrier.wait()
    seconds = []
    for _ in range(rounds):
        barrier.wait()
        start = time.perf_counter()
        barrier.wait()
        seconds.append(time.perf_counter() - start)
    for worker in workers:
        worker.join()
    return seconds


def _work(
    name: str,
    input_shape: tuple[int, int, int],
    inputs: np.ndarray,
    labels: np.ndarray,
    rounds: int,
    barrier: multiprocessing.synchronize.Barrier,
    options: dict,
) -> None:
    torch.set_num_threads(1)
    network = NETWORKS[name](input_shape)
    data = tensors(inputs, labels)
    fedavg_round(network, *data, **options)
    barrier.wait()
    for _ in range(rounds):
        barrier.wait()
        fedavg_round(network, *data, **options)
        barrier.wait()
