"""What the table and figures of ADP-PFL share: the paper's setting, its scales, the methods, and how they are run."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Key

from experiments.common import claiming, cli, seeds_of
from jaxfl import LocalSGD
from jaxfl._validate import checked
from jaxfl.algorithms import adp_pfl, adp_pfl_paper, dp_lg, fedavg, local_only
from jaxfl.algorithms.adp_pfl import MaskFn, fisher_percentile, largest, random_share
from jaxfl.data import Dataset, label_share, load, make_clients
from jaxfl.privacy import (
    FixedSize,
    Full,
    Mechanism,
    Poisson,
    calibrate,
    client_noise,
    fixed_budgets,
    paper_noise,
    round_budgets,
)
from jaxfl.types import Algorithm, ClientData, Clients, Model, Params, Terms, Tree

Scale = Literal["smoke", "cpu", "paper"]
Data = Literal["mnist", "fashion_mnist", "cifar10", "svhn_cropped", "digits"]
Reading = Literal["honest", "printed, summed", "printed, per round"]
HONEST: Reading = "honest"
"""Noise that costs epsilon over all rounds, for the observer of sums."""
SUMMED: Reading = "printed, summed"
"""The paper's noise for budgets of the rounds that add up to epsilon."""
PER_ROUND: Reading = "printed, per round"
"""The paper's noise for budgets of which the largest is epsilon: rounds are taken for parallel (theorem 2)."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """The paper's; what it leaves open (batch, clip, delta, beta) is ours."""

    model: str = "lenet"
    clients: int = 100
    large: int = 2000
    """Clients of the larger population, with the same examples in all."""
    share: float = 0.2
    """Of the labels, per client."""
    rate: float = 0.1
    """Of the clients, in a round."""
    rounds: int = 100
    evaluations: int = 10
    examples: int | None = None
    """Training examples per client, at most (None: all that it has)."""
    batch_size: int = 64
    epochs: int = 5
    learning_rate: float = 0.01
    momentum: float = 0.5
    clip: float = 1.0
    percentile: float = 80.0
    percentiles: tuple[float, ...] = (0.0, 40.0, 60.0, 80.0, 90.0)
    beta: float = 1.0
    risk_bounds: tuple[float, float] = (1.0, 4.0)
    """Of released risks; a guess after a look at four clients of MNIST without noise (0.8 to 6), not accounted for."""
    release_share: float = 0.1
    """Of the cost, for released risks."""
    delta: float = 1e-5

    @property
    def cohort(self) -> int:
        """Participants in a round."""
        return max(1, round(self.rate * self.clients))


CHANGES: dict[Scale, dict[str, Any]] = {
    "smoke": {"clients": 10, "large": 20, "rate": 0.3, "rounds": 4, "evaluations": 2, "epochs": 1, "batch_size": 16}
    | {"percentiles": (0.0, 80.0)},
    "cpu": {"rounds": 40, "examples": 200, "batch_size": 32},
    "paper": {},
}


@checked(seeds=seeds_of)
@dataclasses.dataclass(frozen=True)
class Config:
    """Which data, how much of it, how often."""

    dataset: Data = "mnist"
    scale: Scale = "cpu"
    """smoke: seconds, on digits; cpu: 40 rounds, at most 200 examples per client; paper: as published."""
    seeds: tuple[int, ...] = (0, 1, 2)
    out: pathlib.Path = pathlib.Path("runs/adp_pfl")


HONEST_EPSILONS, FEW_EPSILONS = (1.0, 3.0, 6.0, 9.0), (1.0, 9.0)
"""Of honest noise: of the methods that matter most, and of the others."""
BUDGETS = ("fixed", "round-level")
"""ADP-PFL with budgets by round alone."""
_MASKS: dict[str, Callable[[Any], MaskFn | None]] = {
    "DP-FedAvg": lambda percentile: None,
    "top-k": largest,
    "random": random_share,
}
"""By method; all others keep coordinates of large Fisher information."""
NOISE_ALONE = "DP-LG, noise alone"
"""DP-LG's noise on a shared head that learns nothing: what its noise does to the personal layers, without sharing."""
_FIXED = ("fixed", "DP-FedAvg", "DP-LG", NOISE_ALONE)
"""Methods that give all rounds the same budget."""


def start(description: str | None) -> tuple[Config, Setting, Dataset, tuple[int, ...]]:
    """Read the command line: what is asked for, the setting, its data, and the seeds."""
    config = cli(Config, description)
    setting = dataclasses.replace(Setting(), **CHANGES[config.scale])
    smoke = config.scale == "smoke"
    return config, setting, load("digits" if smoke else config.dataset), config.seeds[:1] if smoke else config.seeds


def run_config(setting: Setting, data: Dataset) -> dict[str, Any]:
    """What decides a run; not what only other commands read."""
    values = dataclasses.asdict(setting) | {"dataset": data.name}
    return {key: value for key, value in values.items() if key not in ("large", "percentiles")}


def split(data: Dataset, setting: Setting, seed: int) -> Clients:
    """Clients with a share of the labels each, tested on disjoint examples of the same labels."""
    labels = {"labels": data.train_labels, "test_labels": data.test_labels}
    train_lists, test = label_share(clients=setting.clients, share=setting.share, seed=seed, **labels)
    if setting.examples is not None:
        rng = np.random.default_rng(seed)
        train_lists = [np.sort(rng.permutation(rows)[: setting.examples]) for rows in train_lists]
    return make_clients(data, train_lists, test)


def passes(setting: Setting) -> LocalSGD:
    """A client's passes over its examples."""
    sgd = optax.sgd(setting.learning_rate, momentum=setting.momentum)
    return LocalSGD(sgd, setting.batch_size, setting.epochs)


def private_options(setting: Setting) -> dict[str, Any]:
    """What all variants of ADP-PFL share."""
    mask = fisher_percentile(setting.percentile)
    return {"clip": setting.clip, "mask": mask, "delta": setting.delta, "local": passes(setting)}


def budgets_of(method: str, setting: Setting) -> Float[np.ndarray, "T"]:
    """Budgets of the rounds that add up to 1."""
    if method in _FIXED:
        return fixed_budgets(1.0, setting.rounds)
    return round_budgets(1.0, setting.rounds, beta=setting.beta)


def least_noise(reading: Reading, epsilon: float, budgets: Float[np.ndarray, "T"], setting: Setting) -> float:
    """Std over the clip bound in the round of the largest budget: on the sum (honest), or of each client (printed)."""
    if reading == HONEST:
        numbers = {"clients": setting.clients, "rounds": setting.rounds, "delta": setting.delta}
        sampling = Full() if setting.rate == 1 else Poisson(setting.rate)
        return calibrate(epsilon, sampling=sampling, shape=budgets.max() / budgets, accountant="rdp", **numbers)
    scaled = epsilon * budgets / (1.0 if reading == SUMMED else budgets.max())
    return float(paper_noise(scaled, delta=setting.delta).min())


def builder(method: str, reading: Reading | None, model: Model, setting: Setting) -> Callable[..., Algorithm]:
    """Keyword arguments `epsilon` (claimed or kept), `scale` (see `least_noise`) and `percentile` to algorithm."""
    masks = _MASKS.get(method, fisher_percentile)
    budgets = budgets_of(method, setting)
    shape, printed = budgets.max() / budgets, reading != HONEST
    # Sound noise is amplified by Poisson sampling; that of clients is counted in sums of a known number of them.
    sampling = Full() if setting.rate == 1 else FixedSize(setting.cohort) if printed else Poisson(setting.rate)

    def build(epsilon: float, scale: Any = 0.0, percentile: Any = setting.percentile) -> Algorithm:
        claim = epsilon if printed and isinstance(epsilon, float) else None  # of no use to a compiled program
        if method in ("DP-LG", NOISE_ALONE):
            share = 1e-6 if method == NOISE_ALONE else 1.0  # of the clip bound, for updates
            private: dict[str, Any] = {"clip": setting.clip * share, "delta": setting.delta, "local": passes(setting)}
            noise = scale / share
            algorithm = dp_lg(model, noise_multiplier=noise, sampling=sampling, **private)
            if printed:
                added = dataclasses.replace(algorithm.mechanism, noise_multiplier=0.0, client_noise=noise)
                algorithm = algorithm._replace(mechanism=added)
            return algorithm if claim is None else claiming(algorithm, claim, "as in ADP-PFL")
        options: dict[str, Any] = private_options(setting) | {"sampling": sampling, "mask": masks(percentile)}
        if not printed:
            return adp_pfl(model, noise=scale * shape, **options)
        risks: Any = "private" if method == "ADP-PFL" else None
        return adp_pfl_paper(model, noise=scale * shape, risks=risks, claim=claim, **options)

    return build


def released(epsilon: float, model: Model, setting: Setting) -> Algorithm:
    """ADP-PFL whose clients release their risks with noise, and are stopped before they have spent epsilon."""
    plan = client_noise(
        budgets_of("ADP-PFL", setting),
        epsilon,
        participation=setting.rate,
        release_share=setting.release_share,
        delta=setting.delta,
        accountant="rdp",
    )
    sampling = Full() if setting.rate == 1 else FixedSize(setting.cohort)
    private: dict[str, Any] = {"risks": "private", "risk_bounds": setting.risk_bounds} | private_options(setting)
    return adp_pfl(model, sampling=sampling, noise=plan, **private)


def baseline(method: str, model: Model, setting: Setting) -> Algorithm:
    """A method without noise."""
    if method == "local-only":
        return local_only(model, sampling=FixedSize(setting.cohort), local=passes(setting))
    mechanism = Mechanism(sampling=FixedSize(setting.cohort), denominator="participants")
    return fedavg(model, mechanism=mechanism, terms=Terms(setting.delta), local=passes(setting))


def tested_locally(method: Algorithm, setting: Setting) -> Algorithm:
    """The method, tested after further passes of each client over its own examples, which nobody sees."""

    def personalize(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> Params:
        params = method.personalize(key, server, client, data)
        return passes(setting).train(key, method.model, params, data)[0]

    return method._replace(personalize=personalize)
