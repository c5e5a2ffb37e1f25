"""Scenarios, impact factors and clients of PADPFL's studies."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Key

from jaxfl import LocalSGD
from jaxfl.data import Dataset, classes_per_client, corrupt_clients, iid, make_clients
from jaxfl.types import Algorithm, ClientData, Clients, Number, Tree


class Scenario(NamedTuple):
    """Three parts of the clients, how their data differ, and ways to weight them."""

    best: str
    """Best way to weight clients. "0-1-2" stands for the factors 0, p and 2p of the three parts.

    A ">" separates the halves of the run.
    """
    others: tuple[str, ...] = ("1-1-1",)
    """Ways that the paper compares with the best one."""
    shares: tuple[float, float, float] = (1 / 3, 1 / 3, 1 / 3)
    """Share of the clients in each part."""
    sizes: tuple[float, float, float] = (1, 1, 1)
    """Number of examples of each client of a part, divided by that of the setting."""
    densities: tuple[float, float, float] = (1, 0.5, 0)
    """Density of salt-and-pepper noise in each part, divided by the severe density."""
    later: tuple[float, float, float] | None = None
    """Densities in the second half of the run."""


SCENARIOS = {
    1: Scenario("0-1-2"),
    2: Scenario("0-2-1", shares=(1 / 3, 1 / 2, 1 / 6), densities=(1, 0.2, 0)),
    3: Scenario("1-2-4", sizes=(0.5, 1, 2), densities=(0, 0, 0)),
    4: Scenario("0-1-2>2-1-0", ("1-1-1", "0-1-2"), densities=(1, 0.5, 0.1), later=(0.1, 0.5, 1)),
    5: Scenario("0-1-2", densities=(1, 0.8, 0)),
}
"""Scenarios of table I with our numbers. Scenario 5 is 1 with more noise on the middle part."""


class Setting(NamedTuple):
    """Settings of the studies. Levels and claimed delta are NbAFL's, and the rest is ours."""

    data: str = "mnist"
    clients: int = 30
    examples: int = 100
    rounds: int = 20
    full_batch: bool = True
    """Whether a step uses all of a client's examples, as in the paper. Otherwise it uses 10."""
    epochs: int = 3
    learning_rate: float = 0.1
    hidden: int = 32
    mu: float = 0.01
    clip: float = 5.0
    """Clip bound of weights, whose norm is about 3.3 at first."""
    claimed_delta: float = 0.01
    """Delta of runs with published noise."""
    delta: float = 1e-5
    """Delta of runs with honest noise."""

    def sized(self, *, smoke: bool) -> "Setting":
        """Return these settings, or small ones for a smoke run."""
        return (
            self._replace(data="digits", clients=6, examples=30, rounds=2, hidden=16)
            if smoke
            else self
        )

    def local(self, scenario: Scenario) -> LocalSGD:
        """Return a client's training in a round. Full batches have the largest client's size."""
        batch = max(sizes(scenario, self)) if self.full_batch else 10
        return LocalSGD(optax.sgd(self.learning_rate), batch, self.epochs)


def sizes(scenario: Scenario, setting: Setting) -> list[int]:
    """Return the number of training examples of each client, at least 1."""
    return [
        max(1, round(setting.examples * scenario.sizes[part])) for part in _parts(scenario, setting)
    ]


def impacts(scenario: Scenario, setting: Setting, way: str) -> np.ndarray:
    """Return the impact factors `[C]`, or `[T, C]` if the way has two halves.

    The factors of a round sum to 1.
    """
    parts = _parts(scenario, setting)
    halves = [
        np.array([float(factor) for factor in half.split("-")])[parts] for half in way.split(">")
    ]
    rows = [half / half.sum() for half in halves]
    first = setting.rounds // 2
    return rows[0] if len(rows) == 1 else np.repeat(rows, (first, setting.rounds - first), axis=0)


def split(
    scenario: Scenario,
    setting: Setting,
    data: Dataset,
    densities: Sequence[float],
    classes: int | None,
    seed: int,
    *,
    held_out: bool = False,
) -> Clients:
    """Make clients with a copy of their examples for each severe density and each half of the run.

    A client's rows have the copies one after the other, by density and then by half. A scenario
    whose data do not change has one copy for each density.

    Test examples are dealt at random, so that the mean over clients is the mean over the test set.

    Args:
        scenario: Parts of the clients.
        setting: Settings of the study.
        data: Examples of all clients.
        densities: Severe densities of salt-and-pepper noise.
        classes: Number of classes of a client. None stands for identical distributions.
        seed: Seed of the partition and of the noise.
        held_out: Whether the test examples are at most 5,000 training examples that no client has.
    """
    generator, count = np.random.default_rng(seed), setting.clients
    if classes is None:
        deal = iid(data.train_labels, count, seed=seed)
    else:
        deal, _ = classes_per_client(data.train_labels, data.test_labels, count, classes, seed=seed)
    own = [
        generator.permutation(rows)[:size]
        for rows, size in zip(deal, sizes(scenario, setting), strict=True)
    ]
    used = np.concatenate(own)
    if held_out:
        spare = generator.permutation(np.setdiff1d(np.arange(len(data.train_labels)), used))[:5000]
        data = data._replace(
            test_inputs=data.train_inputs[spare], test_labels=data.train_labels[spare]
        )
    inputs, labels = data.train_inputs[used], data.train_labels[used]
    lists = np.split(np.arange(len(used)), np.cumsum([len(rows) for rows in own])[:-1])
    halves = (
        [scenario.densities] if scenario.later is None else [scenario.densities, scenario.later]
    )
    copies = [
        corrupt_clients(
            inputs,
            lists,
            (density * np.array(half))[_parts(scenario, setting)].tolist(),
            seed=seed + 1000 * number,
        )
        for density in densities
        for number, half in enumerate(halves)
    ]
    every = data._replace(
        train_inputs=np.concatenate(copies), train_labels=np.tile(labels, len(copies))
    )
    offsets = len(used) * np.arange(len(copies))
    rows = [np.concatenate([rows + offset for offset in offsets]) for rows in lists]
    return make_clients(every, rows, iid(data.test_labels, count, seed=seed))


def on_copy(
    method: Algorithm, scenario: Scenario, setting: Setting, index: Number, densities: int
) -> Algorithm:
    """Return the method, trained on one density's copy of the examples (see `split`).

    If data change during the run, the second half of the rounds uses the second copy.

    Args:
        method: The method.
        scenario: Scenario of the clients.
        setting: Settings of the study.
        index: Index of the density, which a sweep may vary.
        densities: Number of densities.
    """
    halves, at = (1, setting.rounds) if scenario.later is None else (2, setting.rounds // 2)

    def client_update(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> tuple:
        length = data.padded // (densities * halves)
        number = jnp.asarray(index, jnp.int32) * halves + (data.round >= at)
        return method.client_update(key, server, client, data.part(number * length, length))

    return method._replace(client_update=client_update)


def _parts(scenario: Scenario, setting: Setting) -> np.ndarray:
    """Return the part of each client: 0, 1 or 2."""
    ends = np.rint(np.cumsum(scenario.shares) * setting.clients).astype(int)
    return np.repeat(np.arange(3), np.diff(ends, prepend=0))
