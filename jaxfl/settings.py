"""Runs and comparisons as plain values, which a command line or a YAML file can give."""

import dataclasses
import functools
import inspect
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import optax

from jaxfl import algorithms, data, models
from jaxfl._validate import check_fraction, check_seeds, checked, count_from_0, show, up_to_infinity
from jaxfl.data import Dataset
from jaxfl.local import LocalSGD
from jaxfl.privacy import Full, Mechanism, Poisson, Sampling, calibrate
from jaxfl.run.compare import Candidate, spread
from jaxfl.types import Algorithm, Clients, Model

METHODS = (
    "local_only", "fedavg", "fedprox", "fedrep", "dp_fedavg", "dp_fedavg_fb", "dp_fedsam", "fed_smp", "blur_lus",
    "dp_lg", "centaur", "ppsgd", "dp_pfeddsu", "feddpa", "pmtl", "pmtl_ft", "ditto", "apfl", "pfedme", "per_fedavg",
    "scaffold",
)  # fmt: skip
"""Of `jaxfl.algorithms`, those that take a model, local steps, a sampler, a clip bound, and noise or none."""

_Data: Any = Literal[data.NAMES]  # pyrefly: ignore[invalid-literal]
_Method: Any = Literal[METHODS]  # pyrefly: ignore[not-a-type]
_Model = Literal["auto", "mlp", "lenet", "lenet_groupnorm", "feddpa_cnn", "digits_cnn", "resnet20"]
_Kind = TypeVar("_Kind")


def _any(name: str, value: Any) -> Any:
    """What another function checks."""
    return value


@checked(alpha=up_to_infinity)
@dataclasses.dataclass(frozen=True)
class Population:
    """Which data, and how clients share them."""

    data: _Data = "digits"
    clients: int = 100
    partition: Literal["dirichlet", "classes", "iid"] = "dirichlet"
    """dirichlet: shares of labels with concentration alpha; classes: as many labels for each client; iid."""
    alpha: float = 0.5
    classes: int = 2

    def load(self) -> Dataset:
        """The data."""
        return data.load(self.data)

    def make(self, dataset: Dataset, seed: int) -> Clients:
        """Clients whose data a seed draws, each tested on labels like its own."""
        labels, others = dataset.train_labels, dataset.test_labels
        match self.partition:
            case "classes":
                parts = data.classes_per_client(labels, others, self.clients, self.classes, seed=seed, test="all")
                return data.make_clients(dataset, *parts)
            case "iid":
                train = data.iid(labels, self.clients, seed=seed)
            case _:
                train = data.dirichlet(labels, self.clients, self.alpha, seed=seed, minimum=2)
        return data.make_clients(dataset, train, data.matching(train, labels, others, seed=seed))


@checked(momentum=functools.partial(check_fraction, zero=True, one=False))
@dataclasses.dataclass(frozen=True)
class Local:
    """SGD by a client in a round."""

    learning_rate: float = 0.1
    momentum: float = 0.9
    batch_size: int = 4
    epochs: int = 3


@checked(rate=check_fraction)
@dataclasses.dataclass(frozen=True)
class Setting:
    """What runs and comparisons share."""

    population: Population = Population()
    model: _Model = "auto"
    """auto: digits_cnn for digits, lenet for other data."""
    rounds: int = 30
    rate: float = 0.2
    """Probability that a client takes part in a round; 1: all of them in every round."""
    local: Local = Local()

    @property
    def sampling(self) -> Sampling:
        """Who takes part."""
        return Full() if self.rate == 1 else Poisson(self.rate)

    def network(self, dataset: Dataset) -> Model:
        """The model for a dataset."""
        fitting = "digits_cnn" if dataset.name == "digits" else "lenet"
        name = fitting if self.model == "auto" else self.model
        return models.build(name, dataset.train_inputs.shape[1:], dataset.classes)

    def algorithm(self, name: str, model: Model, learning_rate: Any, **given: Any) -> Algorithm:
        """A method of `METHODS`, with those of the given arguments that it takes.

        Raises:
            ValueError: an argument that is no setting of all methods, and not one of this.
        """
        batch_size, epochs = self.local.batch_size, self.local.epochs
        local = LocalSGD(optax.sgd(learning_rate, momentum=self.local.momentum or None), batch_size, epochs)
        offered = {
            "local": local, "sampling": Full() if name == "local_only" else self.sampling,
            "batch_size": batch_size, "epochs": epochs,
            "mechanism": Mechanism(sampling=self.sampling, denominator="participants"),
            "learning_rate": learning_rate, "server_learning_rate": learning_rate,
            "personal_learning_rate": learning_rate, "clip": 1.0, "noise_multiplier": 0.0,
        }  # fmt: skip
        build = getattr(algorithms, name)
        takes = inspect.signature(build).parameters
        passes_on = {"local", *(() if private(name) else ("mechanism",))} if "options" in takes else set()
        if unknown := sorted(given.keys() - offered.keys() - takes.keys()):
            own = ", ".join(sorted(takes.keys() - offered.keys() - {"model", "options", "delta"})) or "none"
            raise ValueError(f"options={unknown[0]!r}: {name} has no such number; it has {own}")
        return build(model, **{key: value for key, value in (offered | given).items() if key in {*takes, *passes_on}})


def private(name: str) -> bool:
    """Whether a method takes noise."""
    return "noise_multiplier" in inspect.signature(getattr(algorithms, name)).parameters


@checked(rate=check_fraction, epsilon=up_to_infinity, clip=up_to_infinity, options=_any, seed=count_from_0)
@dataclasses.dataclass(frozen=True)
class Run(Setting):
    """One run of a method."""

    method: _Method = "dp_fedavg_fb"
    epsilon: float = math.inf
    """Target for clients over all rounds; infinity: no noise."""
    clip: float = 1.0
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Other numbers of the method, by name."""
    seed: int = 0

    def build(self, model: Model) -> Algorithm:
        """The method, with the least noise for its epsilon."""
        if not private(self.method) and math.isfinite(self.epsilon) and self.method != "local_only":
            raise ValueError(f"epsilon={self.epsilon:g}: {self.method} has no noise; leave epsilon out")
        given: dict[str, Any] = {"clip": self.clip, **self.options}
        if math.isfinite(self.epsilon) and private(self.method):
            clients = self.population.clients
            given["noise_multiplier"] = calibrate(
                self.epsilon,
                clients=clients,
                rounds=self.rounds,
                sampling=self.sampling,
                delta=self.options.get("delta"),
            )
        return self.algorithm(self.method, model, self.local.learning_rate, **given)


@checked(
    rate=check_fraction, methods=_any, epsilons=_any, learning_rates=_any, clips=_any,
    seeds=check_seeds,
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Compare(Setting):
    """Methods beside each other, each tuned over its learning rate and its clip bound."""

    methods: tuple[_Method, ...] = ("local_only", "fedavg", "dp_fedavg", "dp_fedavg_fb")
    epsilons: tuple[float, ...] = (1.0, 8.0)
    points: int = 4
    """Settings that each method tries at each epsilon."""
    learning_rates: tuple[float, float] = (0.03, 0.3)
    clips: tuple[float, float] = (0.1, 3.0)
    seeds: tuple[int, ...] = (0, 1, 2)

    def candidates(self, model: Model) -> dict[str, Candidate]:
        """The methods, and their points."""
        found = {}
        for name in self.methods:
            build, axes = functools.partial(self.algorithm, name, model), {"learning_rate": self.learning_rates}
            if private(name):
                build, axes = functools.partial(_with_noise, build), axes | {"clip": self.clips}
            found[name] = Candidate(build, spread(self.points, **axes))
        return found


def _with_noise(build: Callable[..., Algorithm], noise_multiplier: Any, **given: Any) -> Algorithm:
    """For `Candidate`, which asks a signature whether a method takes noise."""
    return build(noise_multiplier=noise_multiplier, **given)


def read(kind: type[_Kind], path: str | os.PathLike) -> _Kind:
    """Settings from a YAML or JSON file; what it leaves out has its default.

    Raises:
        ValueError: the file cannot be read, or names a setting that there is not.
    """
    import yaml

    try:
        values = yaml.safe_load(pathlib.Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        text = " ".join(str(error).split())
        raise ValueError(f"config={str(path)!r}: {text}; give a YAML file of settings") from None
    return _filled(kind, values, f"config={str(path)!r}")


def _filled(kind: type, values: Any, where: str) -> Any:
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    if not isinstance(values, Mapping) or (unknown := [name for name in values if name not in fields]):
        given = show(values) if not isinstance(values, Mapping) else repr(unknown[0])
        raise ValueError(f"{where} has {given}: give some of {', '.join(fields)}")
    return kind(**{
        name: _filled(type(fields[name]), value, f"{where}, {name},") if dataclasses.is_dataclass(fields[name])
        else tuple(value) if isinstance(value, list) else float(value) if value in (".inf", "inf") else value
        for name, value in values.items()
    })  # fmt: skip
