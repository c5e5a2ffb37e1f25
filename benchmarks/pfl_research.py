"""Rounds of pfl-research's CIFAR-10 benchmark by pfl-research itself, as in its documentation.

python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.pfl_research 20
"""

import json
import sys
import time
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.pytorch import pfl_cnn

CLIENTS, COHORT, EXAMPLES, BATCH_SIZE, RATE = 1000, 50, 50, 10, 0.1


class Network(nn.Module):
    """The benchmark's network with the two methods that pfl-research needs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = pfl_cnn((32, 32, 3))

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        return F.cross_entropy(self.network(inputs), labels)

    def metrics(self, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return no metrics, because only training is timed."""
        return {}


class Clock(TrainingProcessCallback):
    """A callback that records when each round ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Record the time at the end of a round, and let the training continue."""
        self.times.append(time.perf_counter())
        return False, Metrics()


def seconds_of(rounds: int) -> list[float]:
    """Return the seconds of each of `rounds` rounds, after one round to warm up.

    Images and labels are random, because speed does not depend on their content.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.rand((CLIENTS, EXAMPLES, 3, 32, 32), generator=generator)
    labels = torch.randint(0, 10, (CLIENTS, EXAMPLES), generator=generator)
    users = [
        PyTorchTensorDataset((x, y), user_id=str(i)) for i, (x, y) in enumerate(zip(images, labels))
    ]
    network = Network()
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    # The samplers draw from this generator, equally in all processes.
    np.random.seed(0)  # noqa: NPY002
    dataset = FederatedDataset(users.__getitem__, get_user_sampler("random", range(CLIENTS)))
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=rounds + 1,
            train_cohort_size=COHORT,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=dataset, val_data=dataset),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH_SIZE
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    return np.diff(clock.times).tolist()


if __name__ == "__main__":
    seconds = seconds_of(int(sys.argv[1]))
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(json.dumps(seconds))
