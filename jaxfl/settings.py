"""Runs and comparisons as plain values, which a command line or a YAML file can give."""

import dataclasses
import difflib
import functools
import inspect
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import optax
import tyro

from jaxfl import algorithms, data, models
from jaxfl._validate import (
    Check,
    check_choice,
    check_fraction,
    check_positive,
    check_seeds,
    checked,
    count_from_0,
    show,
    up_to_infinity,
)
from jaxfl.data import Dataset
from jaxfl.local import LocalSGD
from jaxfl.privacy import Full, Mechanism, Poisson, Sampling, calibrate
from jaxfl.run.compare import Candidate, spread
from jaxfl.types import Algorithm, Clients, Model

METHODS = (
    "local_only", "fedavg", "fedprox", "fedrep", "dp_fedavg", "dp_fedavg_fb", "dp_fedsam",
    "fed_smp", "blur_lus", "dp_lg", "centaur", "fedrod", "ppsgd", "dp_pfeddsu", "feddpa", "pmtl",
    "pmtl_ft", "ditto", "apfl", "ifca", "pfedme", "per_fedavg", "scaffold",
)  # fmt: skip
"""Of `jaxfl.algorithms`, those that take a model, local steps, a sampler, a clip bound, and noise or none."""

_Data: Any = Literal[data.NAMES]  # pyrefly: ignore[invalid-literal]
_Method: Any = Literal[METHODS]  # pyrefly: ignore[not-a-type]
_Model = Literal["auto", "mlp", "lenet", "lenet_groupnorm", "feddpa_cnn", "digits_cnn", "resnet20"]
_Kind = TypeVar("_Kind")


def _each(check: Check, count: int | None = None) -> Check:
    """Return a check of sequences, of `count` values or of one at least, each of which `check` takes."""

    def check_all(name: str, value: Any) -> tuple:
        if not isinstance(value, tuple | list) or not value or len(value) != (count or len(value)):
            wanted = f"a list of {count} values" if count else "a list of one or more values"
            raise ValueError(f"{name} must be {wanted}, got {show(value)}.")
        return tuple(check(f"{name}[{index}]", item) for index, item in enumerate(value))

    return check_all


def _check_options(name: str, value: Any) -> dict[str, int | float]:
    """Require numbers by name. The method's builder checks their limits."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"{name} must be numbers by name, got {show(value)}. Give for instance {{alpha: 0.3}}."
        )
    return {key: _number(f"{name}, {key}", number) for key, number in value.items()}


def _number(name: str, value: Any) -> int | float:
    """Require a number, and return a whole one as `int`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name} must be a number, got {show(value)}. Give for instance 0.3.")
    return value


def parse_options(given: Collection[str]) -> dict[str, int | float]:
    """Return the numbers in words such as alpha=0.3, which are read like those of a file."""
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ValueError(
                f"option must be NAME=VALUE, got {show(word)}. Give for instance --option alpha=0.3."
            )
        if name in found:
            raise ValueError(
                f"option must name each number once, got {name!r} twice. Leave one of them out."
            )
        try:
            found[name] = _parse(value.encode())
        except Exception:  # as in `read`
            found[name] = value
    return _check_options("option", found)


def nearest(name: Any, known: Collection[str]) -> str:
    """Return the remedy for an unknown name: the known one that is spelled most like it, else all of them."""
    close = difflib.get_close_matches(str(name)[:100], known, 1, 0.65)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Give some of {', '.join(known)}." if known else "Leave it out: there is none."


@checked(alpha=up_to_infinity)
@dataclasses.dataclass(frozen=True)
class Population:
    """Which data, and how clients share them."""

    data: _Data = "digits"
    """Dataset; `jaxfl data` lists those that are here."""
    clients: int = 100
    """Number of clients, N."""
    partition: Literal["dirichlet", "classes", "iid"] = "dirichlet"
    """dirichlet: shares of labels with concentration alpha; classes: as many labels for each client; iid."""
    alpha: float = 0.5
    """Concentration of a dirichlet partition: the smaller, the fewer labels a client has."""
    classes: int = 2
    """Labels of a client in a classes partition."""

    def load(self) -> Dataset:
        """The data."""
        return data.load(self.data)

    def make(self, dataset: Dataset, seed: int) -> Clients:
        """Clients whose data a seed draws, each tested on labels like its own."""
        labels, others = dataset.train_labels, dataset.test_labels
        match self.partition:
            case "classes":
                parts = data.classes_per_client(
                    labels, others, self.clients, self.classes, seed=seed, test="all"
                )
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
    """Step size of SGD."""
    momentum: float = 0.9
    """Momentum of SGD, from 0 up to 1."""
    batch_size: int = 4
    """Examples in a batch."""
    epochs: int = 3
    """Passes over a client's examples in a round."""


@checked(rate=check_fraction)
@dataclasses.dataclass(frozen=True)
class Setting:
    """What runs and comparisons share."""

    population: Population = Population()
    model: _Model = "auto"
    """auto: digits_cnn for digits, lenet for other data."""
    rounds: int = 30
    """Number of rounds, T."""
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
        """A method of `METHODS`, with those of the given arguments that it takes."""
        batch_size, epochs = self.local.batch_size, self.local.epochs
        local = LocalSGD(
            optax.sgd(learning_rate, momentum=self.local.momentum or None), batch_size, epochs
        )
        offered = {
            "local": local, "sampling": Full() if name == "local_only" else self.sampling,
            "batch_size": batch_size, "epochs": epochs,
            "mechanism": Mechanism(sampling=self.sampling, denominator="participants"),
            "learning_rate": learning_rate, "server_learning_rate": learning_rate,
            "personal_learning_rate": learning_rate, "clip": 1.0, "noise_multiplier": 0.0,
        }  # fmt: skip
        build = getattr(algorithms, name)
        takes = inspect.signature(build).parameters
        passes_on = (
            {"local", *(("delta",) if private(name) else ("mechanism",))}
            if "options" in takes
            else set()
        )
        values = offered | given
        return build(
            model, **{key: value for key, value in values.items() if key in {*takes, *passes_on}}
        )


def numbers(name: str) -> list[str]:
    """Return the arguments of a method that are numbers."""
    hints = get_type_hints(getattr(algorithms, name))
    found = [key for key, hint in hints.items() if {int, float} & {hint, *get_args(hint)}]
    return [*found, "delta"] if private(name) and "delta" not in found else found


def private(name: str) -> bool:
    """Whether a method takes noise."""
    return "noise_multiplier" in inspect.signature(getattr(algorithms, name)).parameters


@checked(
    rate=check_fraction,
    epsilon=up_to_infinity,
    clip=up_to_infinity,
    options=_check_options,
    seed=count_from_0,
)
@dataclasses.dataclass(frozen=True)
class Run(Setting):
    """One run of a method."""

    method: _Method = "dp_fedavg_fb"
    """Builder of `jaxfl.algorithms`."""
    epsilon: float = math.inf
    """Target for clients over all rounds; infinity: no noise."""
    clip: float = 1.0
    """L2 bound on a client's update."""
    # Fixed for the parser: it would make an option of each number, and `alpha` is one of the population's.
    options: tyro.conf.SuppressFixed[tyro.conf.Fixed[Mapping[str, int | float]]] = (
        dataclasses.field(default_factory=dict)
    )
    """Other numbers of the method, by name."""
    seed: int = 0
    """Seed of the data's partition and of the run."""

    def build(self, model: Model) -> Algorithm:
        """The method, with the least noise for its epsilon."""
        if not private(self.method) and math.isfinite(self.epsilon) and self.method != "local_only":
            raise ValueError(
                f"epsilon={self.epsilon:g}: {self.method} has no noise; leave epsilon out"
            )
        for name in self.options:
            if name not in (known := numbers(self.method)):
                raise ValueError(
                    f"options={name!r}: {self.method} has no such number. {nearest(name, known)}"
                )
        given: dict[str, Any] = {"learning_rate": self.local.learning_rate, "clip": self.clip}
        if math.isfinite(self.epsilon) and private(self.method):
            if "noise_multiplier" in self.options:
                raise ValueError(
                    f"epsilon={self.epsilon:g} sets the noise_multiplier. Leave one of the two out."
                )
            clients = self.population.clients
            given["noise_multiplier"] = calibrate(
                self.epsilon,
                clients=clients,
                rounds=self.rounds,
                sampling=self.sampling,
                delta=self.options.get("delta"),
            )
        return self.algorithm(self.method, model, **given | dict(self.options))


@checked(
    rate=check_fraction, methods=_each(functools.partial(check_choice, choices=METHODS)),
    epsilons=_each(check_positive), learning_rates=_each(check_positive, 2), clips=_each(check_positive, 2),
    seeds=check_seeds,
)  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Compare(Setting):
    """Methods beside each other, each tuned over its learning rate and its clip bound."""

    methods: tuple[_Method, ...] = ("local_only", "fedavg", "dp_fedavg", "dp_fedavg_fb")
    """Builders of `jaxfl.algorithms`."""
    epsilons: tuple[float, ...] = (1.0, 8.0)
    """Targets of the private methods for clients over all rounds."""
    points: int = 4
    """Settings that each method tries at each epsilon."""
    learning_rates: tuple[float, float] = (0.03, 0.3)
    """Least and greatest learning rate that is tried."""
    clips: tuple[float, float] = (0.1, 3.0)
    """Least and greatest clip bound that is tried."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs at the best setting."""

    def candidates(self, model: Model) -> dict[str, Candidate]:
        """The methods, and their points."""
        found = {}
        for name in self.methods:
            build, axes = (
                functools.partial(self.algorithm, name, model),
                {"learning_rate": self.learning_rates},
            )
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
    where = f"config={str(path)!r}"
    try:
        values = _parse(pathlib.Path(path).read_bytes())
    except RecursionError:
        raise ValueError(f"{where} nests too deeply. Give a YAML file of settings.") from None
    except Exception as error:  # the parser lets errors of its constructors through, of any kind
        text = " ".join(str(error).split())[:300]
        raise ValueError(f"{where}: {text}; give a YAML file of settings") from None
    return _filled(kind, values, where)


_SCALARS = {
    "merge": "<<",
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
"""Scalars of YAML 1.2, where 1e-2 is a number and `no` a word, and YAML 1.1's merge key. PyYAML reads YAML 1.1."""


def _parse(text: bytes) -> Any:
    """Return the values in a YAML file. The bytes are UTF-8, whatever the locale is."""
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader, with the scalars of YAML 1.2."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if repeated := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{repeated[0]!r} is there twice")
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {}  # none of YAML 1.1's
    for name, pattern in _SCALARS.items():
        Loader.add_implicit_resolver(
            f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})$"), None
        )
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
    return yaml.load(text, Loader)


def _filled(kind: type, values: Any, where: str) -> Any:
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} has {show(values)}. Give some of {', '.join(fields)}.")
    for name in values:
        if name not in fields:
            raise ValueError(f"{where} has {show(name)}. {nearest(name, fields)}")
    return kind(
        **{name: _value(fields[name], value, f"{where}, {name},") for name, value in values.items()}
    )


def _value(default: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(default):
        return _filled(type(default), value, where)
    if isinstance(value, list):
        return tuple(value)
    return math.inf if value == "inf" else value
