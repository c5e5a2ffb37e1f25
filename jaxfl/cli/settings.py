"""Settings of runs and comparisons as plain values, for a command line or a YAML file."""

import dataclasses
import functools
import inspect
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import optax
import tyro

from jaxfl import algorithms, data, models
from jaxfl._support.checks import (
    Check,
    check_choice,
    check_count,
    check_fraction,
    check_positive,
    checked,
    nearest,
    show,
    up_to_infinity,
)
from jaxfl.data import Dataset
from jaxfl.data.load import find_prepared
from jaxfl.local import LocalSGD
from jaxfl.privacy import Full, Mechanism, Poisson, Sampling, calibrate
from jaxfl.run.candidates import Candidate, spread
from jaxfl.types import Algorithm, Clients, Model

_Data: Any = Literal[data.NAMES]  # pyrefly: ignore[invalid-literal]
_Model = Literal["auto", "mlp", "lenet", "lenet_groupnorm", "feddpa_cnn", "digits_cnn", "resnet20"]
_Kind = TypeVar("_Kind")


check_seed: Check = functools.partial(check_count, least=0, most=2**32 - 1)
"""Check of the seed of a run, from which its key is made."""


def _each(check: Check, example: str) -> Check:
    """Return a check of lists of different values, which checks each and returns a tuple.

    Args:
        check: Check of one value.
        example: Values that the error's remedy names.
    """

    def check_all(name: str, value: Any) -> tuple:
        if not isinstance(value, tuple | list) or not value:
            raise ValueError(
                f"{name} must be a list of one or more values, got {show(value)}. "
                f"Give for instance {example}."
            )
        values = tuple(check(f"{name}[{index}]", item) for index, item in enumerate(value))
        if repeated := [item for item in values if values.count(item) > 1]:
            raise ValueError(
                f"{name} must be different, got {show(repeated[0])} twice. Give each value once."
            )
        return values

    return check_all


def _check_ends(name: str, value: Any) -> tuple[float, float]:
    """Require two finite numbers above 0, the smaller one first, and return them as a tuple."""
    # Python cannot compare text with numbers, so the entries are checked before their order.
    numbers = isinstance(value, tuple | list) and all(map(_is_number, value))
    if not numbers or len(value) != 2 or not 0 < value[0] < value[1] < math.inf:
        raise ValueError(
            f"{name} must be two finite numbers above 0, the smaller one first, got {show(value)}. "
            "Give for instance 0.03 and 0.3."
        )
    return float(value[0]), float(value[1])


def _check_options(name: str, value: Any) -> dict[str, int | float]:
    """Require numbers by name, and return them. The method's builder checks their limits."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"{name} must be numbers by name, got {show(value)}. Give for instance {{alpha: 0.3}}."
        )
    return {key: _check_number(f"{name}[{key!r}]", number) for key, number in value.items()}


def _check_number(name: str, value: Any) -> int | float:
    """Require a number that is not NaN, and return it unchanged."""
    if not _is_number(value):
        raise ValueError(f"{name} must be a number, got {show(value)}. Give for instance 0.3.")
    return value


def _is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, and not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def find_dataset(name: str) -> str | None:
    """Return in words where a dataset is, or None if it is not on this machine."""
    if name == "digits":
        return "in the package"
    try:
        return str(find_prepared(name, None))
    except ValueError:
        return None


def parse_options(words: Collection[str]) -> dict[str, int | float]:
    """Return the numbers in words such as alpha=0.3, by name, read like values of a YAML file.

    Raises:
        ValueError: A word has another form, its value is no number, or a name occurs twice.
    """
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ValueError(
                f"option must be NAME=VALUE, got {show(word)}. "
                "Give for instance --option alpha=0.3."
            )
        if name in found:
            raise ValueError(
                f"option must name each number once, got {name!r} twice. Leave one of them out."
            )
        try:
            found[name] = _parse(value.encode())
        except Exception:
            # The parser's constructors raise errors of any kind. The check below names the value.
            found[name] = value
    return _check_options("option", found)


@checked(alpha=up_to_infinity)
@dataclasses.dataclass(frozen=True)
class FederatedData:
    """Data, and their partition among clients."""

    data: _Data = "digits"
    """Dataset. `jaxfl data` shows which datasets are on this machine."""
    clients: int = 100
    """Number of clients, N."""
    partition: Literal["dirichlet", "classes", "iid"] = "dirichlet"
    """dirichlet: shares of labels by alpha. classes: equally many labels each. iid: at random."""
    alpha: float = 0.5
    """Concentration of a dirichlet partition. Smaller values give a client fewer labels."""
    classes: int = 2
    """Labels of a client in a classes partition."""

    def load(self) -> Dataset:
        """Load the dataset from this machine.

        Raises:
            ValueError: The dataset is not on this machine, or its copy cannot be read.
        """
        if find_dataset(self.data) is None:
            raise ValueError(
                f"data must be on this machine, got {self.data!r}, which is not. "
                f"`jaxfl data {self.data}` shows how to get it."
            )
        return data.load(self.data)

    def make(self, dataset: Dataset, seed: int) -> Clients:
        """Return clients whose examples the seed draws from the dataset by `partition`.

        Each client is tested on labels like those that it is trained on.

        Raises:
            ValueError: The dataset has too few classes or examples for these settings.
        """
        labels = dataset.train_labels
        others = dataset.test_labels
        match self.partition:
            case "classes":
                check_count("classes", self.classes, most=dataset.classes)
                parts = data.classes_per_client(
                    labels, others, self.clients, self.classes, seed=seed, test="all"
                )
                return data.make_clients(dataset, *parts)
            case "iid":
                train = data.iid(labels, self.clients, seed=seed)
            case _:
                # Every client gets at least two examples, which limits the number of clients.
                check_count("clients", self.clients, most=len(labels) // 2)
                train = data.dirichlet(labels, self.clients, self.alpha, seed=seed, minimum=2)
        return data.make_clients(dataset, train, data.matching(train, labels, others, seed=seed))


@checked(momentum=functools.partial(check_fraction, zero=True, one=False))
@dataclasses.dataclass(frozen=True)
class Local:
    """Local SGD of a client in a round."""

    learning_rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 0.1
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
    """Settings that runs and comparisons share."""

    population: FederatedData = FederatedData()
    model: _Model = "auto"
    """auto: digits_cnn for digits, lenet for other data."""
    rounds: int = 30
    """Number of rounds, T."""
    rate: float = 0.2
    """Probability that a client takes part in a round. 1: all clients in every round."""
    local: Local = Local()

    @property
    def sampling(self) -> Sampling:
        """Sampler that draws the participants of a round."""
        if self.rate == 1:
            return Full()
        return Poisson(self.rate)

    def network(self, dataset: Dataset) -> Model:
        """Return the model for a dataset.

        Raises:
            ValueError: The model does not fit the shape of the dataset's examples.
        """
        name = self.model
        if name == "auto":
            name = "digits_cnn" if dataset.name == "digits" else "lenet"
        shape = dataset.train_inputs.shape[1:]
        try:
            return models.build(name, shape, dataset.classes)
        except ValueError as error:
            # Errors have the form "NAME must ..., got ...". Only the rule makes sense here, because
            # the user gave the name of a model and no shape.
            rule = str(error).partition(", got")[0]
            raise ValueError(
                f"model must fit examples of shape {shape}, got {name!r}, whose {rule}. "
                "Choose another model, such as 'mlp', or other data."
            ) from None

    def algorithm(self, name: str, model: Model, learning_rate: Any, **given: Any) -> Algorithm:
        """Build a method from the settings, and from the further arguments `given`.

        Args:
            name: One of `METHODS`.
            model: The network.
            learning_rate: Step size of SGD.
            given: Further arguments, which replace settings of the same name. Settings and further
                arguments that the method does not take are ignored.
        """
        build = getattr(algorithms, name)
        parameters = set(inspect.signature(build).parameters)
        values = self.offered(name, learning_rate) | given
        return build(model, **{key: value for key, value in values.items() if key in parameters})

    def offered(self, name: str, learning_rate: Any) -> dict[str, Any]:
        """Return the arguments that these settings offer to a method, by name.

        A method takes only some of them.
        """
        batch_size = self.local.batch_size
        epochs = self.local.epochs
        # With a momentum of 0, Optax would still keep a state as large as the weights.
        sgd = optax.sgd(learning_rate, momentum=self.local.momentum or None)
        sampling = self.sampling
        # Clients of `local_only` send nothing, so all of them may train in every round.
        if name == "local_only":
            sampling = Full()
        return {
            "local": LocalSGD(sgd, batch_size, epochs),
            "sampling": sampling,
            "batch_size": batch_size,
            "epochs": epochs,
            "mechanism": Mechanism(sampling=self.sampling, denominator="participants"),
            "learning_rate": learning_rate,
            "server_learning_rate": learning_rate,
            "personal_learning_rate": learning_rate,
            "clip": 1.0,
            "noise_multiplier": 0.0,
        }


_OFFERED = Setting().offered("fedavg", 0.1).keys()
"""Names of the arguments that settings offer to methods."""


def _takes_settings(name: str) -> bool:
    """Return whether a builder's first argument is a model, and settings offer all it requires."""
    first, *others = inspect.signature(getattr(algorithms, name)).parameters.values()
    needed = {each.name for each in others if each.default is each.empty}
    return first.name == "model" and needed <= _OFFERED


METHODS = tuple(filter(_takes_settings, algorithms.__all__))
"""Names of the builders in `jaxfl.algorithms` that `Setting.algorithm` can call."""

_Method: Any = Literal[METHODS]  # pyrefly: ignore[not-a-type]


def numbers(name: str) -> list[str]:
    """Return the names of a method's arguments whose annotation allows an int or a float."""
    hints = get_type_hints(getattr(algorithms, name))
    return [key for key, hint in hints.items() if {int, float} & {hint, *get_args(hint)}]


def private(name: str) -> bool:
    """Return whether the builder of this name takes a `noise_multiplier`."""
    return "noise_multiplier" in inspect.signature(getattr(algorithms, name)).parameters


@checked(
    rate=check_fraction,
    epsilon=up_to_infinity,
    clip=up_to_infinity,
    options=_check_options,
    seed=check_seed,
)
@dataclasses.dataclass(frozen=True)
class Run(Setting):
    """Settings of one run of a method."""

    method: _Method = "dp_fedavg_fb"
    """Builder of `jaxfl.algorithms`."""
    epsilon: float = math.inf
    """Target at client level for all rounds together. Infinity: noise by options only."""
    clip: float = 1.0
    """L2 bound on a client's update, if the method clips."""
    # The parser must not make an option of each number, because `alpha` is one of the population's.
    options: tyro.conf.SuppressFixed[tyro.conf.Fixed[Mapping[str, int | float]]] = (
        dataclasses.field(default_factory=dict)
    )
    """Other numbers of the method, by name."""
    seed: int = 0
    """Seed of the data's partition and of the run."""

    def build(self, model: Model) -> Algorithm:
        """Build the method with these settings, with the least noise for a finite epsilon.

        Raises:
            ValueError: The method takes no noise and epsilon is finite, options have an unknown
                name or that of a setting, or both epsilon and noise_multiplier are given.
        """
        noisy = private(self.method)
        limited = math.isfinite(self.epsilon)
        # Clients of `local_only` send nothing, so its epsilon is 0 and within any limit.
        if limited and not noisy and self.method != "local_only":
            raise ValueError(
                f"epsilon must be infinite for {self.method}, which takes no noise, got "
                f"{self.epsilon:g}. Leave epsilon out."
            )
        options: dict[str, Any] = {"learning_rate": self.local.learning_rate, "clip": self.clip}
        # Options by name must not replace a setting that has an option of its own.
        known = numbers(self.method)
        for name in self.options:
            if name in options:
                raise ValueError(
                    f"options must leave out {name!r}, which is a setting, got "
                    f"{self.options[name]}. Give --{name.replace('_', '-')}."
                )
            if name not in known:
                raise ValueError(
                    f"options must name numbers of {self.method}, got {name!r}. "
                    f"{nearest(name, known)}"
                )
        if limited and noisy:
            if "noise_multiplier" in self.options:
                raise ValueError(
                    "epsilon must be infinite with a noise_multiplier in options, got "
                    f"{self.epsilon:g}. Leave one of the two out."
                )
            options["noise_multiplier"] = calibrate(
                self.epsilon,
                clients=self.population.clients,
                rounds=self.rounds,
                sampling=self.sampling,
                delta=self.options.get("delta"),
            )
        return self.algorithm(self.method, model, **options | dict(self.options))


@checked(
    rate=check_fraction,
    methods=_each(functools.partial(check_choice, choices=METHODS), "fedavg and dp_fedavg"),
    epsilons=_each(check_positive, "1 and 8"),
    learning_rates=_check_ends,
    clips=_check_ends,
    seeds=_each(check_seed, "0 and 1"),
)
@dataclasses.dataclass(frozen=True)
class Compare(Setting):
    """Settings of a comparison of methods, whose learning rates and clip bounds are tuned."""

    methods: tuple[_Method, ...] = ("local_only", "fedavg", "dp_fedavg", "dp_fedavg_fb")
    """Builders of `jaxfl.algorithms`."""
    epsilons: tuple[float, ...] = (1.0, 8.0)
    """Targets of the private methods at client level, for all rounds together."""
    points: int = 4
    """Settings that each method tries at each epsilon."""
    learning_rates: tuple[float, float] = (0.03, 0.3)
    """Least and greatest of the learning rates that may be tried."""
    clips: tuple[float, float] = (0.1, 3.0)
    """Least and greatest of the clip bounds that private methods may try."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs at the best setting."""

    def candidates(self, model: Model) -> dict[str, Candidate]:
        """Return the candidate of each method by its name, with the points that tuning tries.

        Raises:
            ValueError: A learning rate is given, which the points would replace.
        """
        # A learning rate that equals the default counts as left out.
        given = self.local.learning_rate
        if given != Local().learning_rate:
            raise ValueError(
                f"learning_rate must be left out of a comparison, which tunes it, got {given:g}. "
                "Give its two ends as learning_rates."
            )
        found = {}
        for name in self.methods:
            build = functools.partial(self.algorithm, name, model)
            axes = {"learning_rate": self.learning_rates}
            if private(name):
                # The noise follows from each epsilon, so it is no axis of the tuning.
                build = functools.partial(_with_noise, build)
                axes["clip"] = self.clips
            found[name] = Candidate(build, spread(self.points, **axes))
        return found


def _with_noise(build: Callable[..., Algorithm], noise_multiplier: Any, **given: Any) -> Algorithm:
    """Build a method whose signature shows that it takes noise, as `Candidate` requires."""
    return build(noise_multiplier=noise_multiplier, **given)


def read_settings(kind: type[_Kind], path: str | os.PathLike) -> _Kind:
    """Read settings from a YAML or JSON file. Settings that it leaves out have their defaults.

    Args:
        kind: Class of the settings.
        path: Path of the file.

    Raises:
        ValueError: The file cannot be read, or has an unknown setting or a wrong value.
    """
    where = repr(str(path))
    # A folder has no text, and a pipe might never end.
    if not os.path.isfile(path):
        raise ValueError(f"config must be a file, got {where}. Give the path of a YAML file.")
    try:
        values = _parse(pathlib.Path(path).read_bytes())
    except RecursionError:
        # Python's own text is about its limit, and not about the file.
        problem = "nests too deeply"
    except Exception as error:
        # The parser's constructors raise errors of any kind.
        problem = _first_problem(error)
    else:
        return _settings_from(kind, values, where)
    raise ValueError(
        f"config must be a YAML file of settings, got {where} ({problem}). Correct the file."
    )


def _first_problem(error: Exception) -> str:
    """Return what is wrong with a YAML text, and the number of its line, if the error has it."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())[:300]
    return f"line {mark.line + 1}: {getattr(error, 'problem', None)}"


_SCALARS = {
    "merge": "<<",
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    # The first pattern that matches decides, and that of floats matches whole numbers too.
    "int": r"[-+]?[0-9]+",
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
    ),
}
"""Patterns of the scalars of YAML 1.2, and YAML 1.1's merge key, by tag.

PyYAML reads YAML 1.1, where 1e-2 is no number, and `no` is no word.
"""


def _parse(text: bytes) -> Any:
    """Return the values in a YAML text of UTF-8 bytes, by the rules of YAML 1.2.

    The parser may raise errors of any kind.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader, with the scalars of YAML 1.2."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            # PyYAML would keep the last one of equal keys, and say nothing.
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            if repeated := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{repeated[0]!r} is there twice")
            return super().construct_mapping(node, deep)

    # The class of PyYAML has resolvers of YAML 1.1.
    Loader.yaml_implicit_resolvers = {}
    for name, pattern in _SCALARS.items():
        expression = re.compile(f"(?:{pattern})$")
        # None means that the pattern is tried for scalars with any first letter.
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", expression, None)
    # PyYAML would read 010 as an octal number.
    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
    return yaml.load(text, Loader)


def _settings_from(kind: type, values: Any, where: str) -> Any:
    """Return settings of a class with values from a file.

    Args:
        kind: The class.
        values: Values of its fields, by name.
        where: Place of the values, for error messages.
    """
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    # The parser returns None for an empty file.
    if values is None:
        raise ValueError(
            f"config must have settings by name, got none in {where}. Write for instance rounds: 3."
        )
    if not isinstance(values, Mapping):
        raise ValueError(
            f"config must have settings by name, got {show(values)} in {where}. "
            f"Choose from {', '.join(fields)}."
        )
    for name in values:
        if name not in fields:
            raise ValueError(
                f"config must have known settings, got {show(name)} in {where}. "
                f"{nearest(name, fields)}"
            )
    # The class itself checks the values, once they have the types of Python.
    fields_read = {
        name: _value(fields[name], value, f"{name} of {where}") for name, value in values.items()
    }
    return kind(**fields_read)


def _value(default: Any, value: Any, where: str) -> Any:
    """Return the value of a field from its value in a file.

    A mapping becomes settings if the field has settings of its own. A list becomes a tuple, and the
    text "inf" infinity.

    Args:
        default: Default of the field.
        value: Value in the file.
        where: Place of the value, for error messages.
    """
    if dataclasses.is_dataclass(default):
        return _settings_from(type(default), value, where)
    if isinstance(value, list):
        return tuple(value)
    if value == "inf":
        return math.inf
    return value
