"""The methods and settings of a comparison that takes a second, and a builder of its rows."""

import math
from typing import Any

import optax
from algorithms_table import MODEL

from jaxfl import Candidate, LocalSGD, grid
from jaxfl.algorithms import dp_fedavg, local_only
from jaxfl.privacy import Poisson


def local(rate):
    return LocalSGD(optax.sgd(rate), batch_size=4, epochs=2)


def private(rate, clip, noise_multiplier):
    return dp_fedavg(
        MODEL,
        clip=clip,
        noise_multiplier=noise_multiplier,
        sampling=Poisson(0.5),
        local=local(rate),
    )


METHODS = {
    "DP-FedAvg": Candidate(private, grid(rate=[0.01, 0.3], clip=[1.0])),
    "local-only": Candidate(
        lambda rate: local_only(MODEL, local=local(rate)), {"rate": [1e-6, 0.1]}, 3
    ),
}
SETTING: dict[str, Any] = {
    "rounds": 2,
    "epsilons": (8.0, math.inf),
    "seeds": (0, 1),
    "progress": False,
}


def row(method, epsilon, seed, accuracy, stated: float | None = 1.0):
    return {
        "method": method,
        "epsilon": epsilon,
        "stated": stated,
        "seed": seed,
        "chosen": {},
        "accuracy": accuracy,
    }
