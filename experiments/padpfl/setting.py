"""What the figures of PADPFL share: the four scenarios, the ways to weight clients, and how a figure is run."""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Key

from experiments.common import Method, Row, cli, plot_metric, run_methods, seeds_of, show
from jaxfl import LocalSGD
from jaxfl._validate import checked
from jaxfl.algorithms import padpfl, padpfl_paper
from jaxfl.algorithms.padpfl import convergence_bound
from jaxfl.data import Dataset, by_sizes, corrupt_clients, load, make_clients, matching
from jaxfl.models import mlp
from jaxfl.privacy import DPSGD, calibrate_examples
from jaxfl.types import Algorithm, ClientData, Clients, Tree

Scale = Literal["smoke", "paper"]


class Scenario(NamedTuple):
    """Three parts of clients, and the impact factors to compare."""

    shares: tuple[float, float, float]
    """Of the clients, by part."""
    sizes: tuple[float, float, float]
    """Examples of each client of a part, over the setting's."""
    densities: tuple[float, float, float]
    """Of salt-and-pepper noise, by part."""
    ways: tuple[str, ...]
    """"0-1-2": factors 0, p, 2p of the parts' clients; ">" separates the halves of the run."""
    best: str
    later: tuple[float, float, float] | None = None
    """Densities in the second half of the run."""


_THIRDS = (1 / 3, 1 / 3, 1 / 3)
SCENARIOS = {
    1: Scenario(_THIRDS, (1, 1, 1), (0.5, 0.2, 0.0), ("1-1-1", "0-1-2", "1-2-3", "0-0-1", "2-1-0"), "0-1-2"),
    2: Scenario(
        (1 / 3, 1 / 2, 1 / 6), (1, 1, 1), (0.5, 0.1, 0.0), ("1-1-1", "0-2-1", "0-1-2", "0-1-1", "0-0-1"), "0-2-1"
    ),
    3: Scenario(_THIRDS, (0.5, 1, 2), (0.0, 0.0, 0.0), ("1-1-1", "1-2-4", "4-2-1"), "1-2-4"),
    4: Scenario(
        _THIRDS, (1, 1, 1), (0.5, 0.2, 0.05), ("1-1-1", "0-1-2", "0-1-2>2-1-0"), "0-1-2>2-1-0", (0.05, 0.2, 0.5)
    ),
}
"""Table I; its numbers are lost, these are ours. Ways are those the text names, and neighbours of them."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Ours, where the paper's numbers are lost; protection levels and delta are NbAFL's."""

    clients: int = 30
    examples: int = 100
    rounds: int = 30
    hidden: int = 32
    learning_rate: float = 0.1
    batch_size: int = 10
    epochs: int = 2
    mu: float = 0.01
    clip: float = 5.0
    """Of weights, whose norm is about 3.3 at first."""
    levels: tuple[float, float] = (50.0, 100.0)
    """The epsilons that the paper's rule claims."""
    exposures: int = 1
    claimed_delta: float = 0.01
    update_clip: float = 1.0
    """Of updates, in the sound twin."""
    example_epsilon: float = 8.0
    """Target for single examples, with steps of DP-SGD."""
    example_clip: float = 1.0
    delta: float = 1e-5


SCALES: dict[Scale, Setting] = {
    "smoke": Setting(clients=6, examples=30, rounds=2, hidden=16),
    "paper": Setting(),
}


@checked(seeds=seeds_of)
@dataclasses.dataclass(frozen=True)
class Config:
    """How much, and how often."""

    scale: Scale = "paper"
    """smoke: seconds, on digits; paper: a subset of MNIST, 30 clients, 30 rounds."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    out: pathlib.Path = pathlib.Path("runs/padpfl")


def run(figure: int, description: str | None) -> None:
    """Read the command line and run figure 2, 4, 6 or 8 (no privacy) or 3, 5, 7 or 9 (private) of scenarios 1 to 4."""
    config = cli(Config, description)
    setting, number = SCALES[config.scale], figure // 2
    scenario, data = SCENARIOS[number], load("digits" if config.scale == "smoke" else "mnist")
    seeds = config.seeds[:1] if config.scale == "smoke" else config.seeds
    build = private_methods if figure % 2 else plain_methods
    rows = run_methods(
        build(scenario, setting, data),
        lambda seed: split(scenario, setting, data, seed),
        rounds=setting.rounds,
        seeds=seeds,
        out=config.out / "runs",
        config=dataclasses.asdict(setting) | {"dataset": data.name, "scenario": number},
        eval_every=max(1, setting.rounds // 10),
    )
    title = f"Figure {figure}: {data.name}, scenario {number}, {setting.clients} clients, {setting.rounds} rounds"
    folder = config.out / f"figure_{figure}" / config.scale
    show(title, rows, folder)
    plot_metric(folder / "loss.png", title, rows, "loss", "test loss")
    if figure % 2:
        _print_bound(rows[0], setting, scenario, data)


def plain_methods(scenario: Scenario, setting: Setting, data: Dataset) -> dict[str, Method]:
    """All ways to weight the clients, without noise."""
    return {
        way: _method(padpfl, scenario, setting, data, way, epsilon=math.inf, clip=math.inf, delta=setting.delta)
        for way in scenario.ways
    }


def private_methods(scenario: Scenario, setting: Setting, data: Dataset) -> dict[str, Method]:
    """The best way at both levels and equal factors at the weaker one, as printed; then two honest twins."""
    smallest = min(sizes(scenario, setting))
    printed: dict[str, Any] = {"smallest": smallest, "exposures": setting.exposures}
    printed |= {"clip": setting.clip, "delta": setting.claimed_delta}
    strong, weak = setting.levels
    steps = max(1, setting.epochs * smallest // setting.batch_size)
    rate = min(1.0, setting.batch_size / smallest)
    stated: dict[str, Any] = {"delta": setting.delta, "accountant": "rdp"}
    z = calibrate_examples(setting.example_epsilon, rate=rate, steps=steps, participations=setting.rounds, **stated)
    sgd = optax.sgd(setting.learning_rate)
    local = DPSGD(clip=setting.example_clip, noise_multiplier=z, rate=rate, steps=steps, optimizer=sgd)
    sound: dict[str, Any] = {"clip": setting.update_clip} | stated
    best = scenario.best
    rows: dict[str, tuple[Callable[..., Algorithm], str, dict[str, Any]]] = {
        f"{best}, claimed ε = {strong:g}": (padpfl_paper, best, printed | {"epsilon": strong}),
        f"{best}, claimed ε = {weak:g}": (padpfl_paper, best, printed | {"epsilon": weak}),
        f"1-1-1, claimed ε = {weak:g}": (padpfl_paper, "1-1-1", printed | {"epsilon": weak}),
        f"{best}, clients, ε = {strong:g}": (padpfl, best, sound | {"epsilon": strong}),
        f"{best}, examples, ε = {setting.example_epsilon:g}": (
            padpfl,
            best,
            sound | {"epsilon": math.inf, "clip": math.inf, "local": local},
        ),
    }
    return {name: _method(build, scenario, setting, data, way, **more) for name, (build, way, more) in rows.items()}


def sizes(scenario: Scenario, setting: Setting) -> list[int]:
    """Examples of every client."""
    return [max(1, round(setting.examples * scenario.sizes[part])) for part in _parts(scenario, setting)]


def impacts(scenario: Scenario, setting: Setting, way: str) -> np.ndarray:
    """Impact factors [C], or [T, C] of a way with two halves."""
    parts = _parts(scenario, setting)
    halves = [np.array([float(factor) for factor in half.split("-")])[parts] for half in way.split(">")]
    rows = [half / half.sum() for half in halves]
    return rows[0] if len(rows) == 1 else np.repeat(rows, _halves(setting.rounds), axis=0)


def split(scenario: Scenario, setting: Setting, data: Dataset, seed: int) -> Clients:
    """Clients of random examples, each part with its noise; with two halves, a copy of the examples for each."""
    lists = by_sizes(data.train_labels, sizes(scenario, setting), seed=seed)
    test = matching(lists, data.train_labels, data.test_labels, seed=seed)
    parts = _parts(scenario, setting)
    halves = [np.array(scenario.densities)[parts]]
    if scenario.later is not None:
        halves.append(np.array(scenario.later)[parts])
    inputs = [
        corrupt_clients(data.train_inputs, lists, densities.tolist(), seed=seed + 1000 * half)
        for half, densities in enumerate(halves)
    ]
    both = data._replace(
        train_inputs=np.concatenate(inputs), train_labels=np.concatenate([data.train_labels] * len(inputs))
    )
    offsets = len(data.train_labels) * np.arange(len(inputs))
    return make_clients(both, [np.concatenate([rows + offset for offset in offsets]) for rows in lists], test)


def change_half_way(method: Algorithm, at: int) -> Algorithm:
    """The same method, whose clients train on the first half of their rows before round `at`, and then on the other."""

    def init(key: Key[Array, ""], number: int) -> tuple[Tree, Tree]:
        server, states = method.init(key, number)
        return (server, jnp.zeros((), jnp.int32)), states

    def client_update(key: Key[Array, ""], server: Tree, client: Tree, data: ClientData) -> tuple:
        half = data.padded // 2
        seen = dataclasses.replace(
            data.part(jnp.where(server[1] < at, 0, half), half), size=jnp.asarray(data.size) // 2
        )
        return method.client_update(key, server[0], client, seen)

    return method._replace(
        init=init,
        client_update=client_update,
        server_update=lambda server, aggregate: (method.server_update(server[0], aggregate), server[1] + 1),
        personalize=lambda key, server, client, data: method.personalize(key, server[0], client, data),
    )


def _method(
    build: Callable[..., Algorithm], scenario: Scenario, setting: Setting, data: Dataset, way: str, **options: Any
) -> Method:
    local = LocalSGD(optax.sgd(setting.learning_rate), setting.batch_size, setting.epochs)
    method = build(
        mlp(data.train_inputs.shape[1:], data.classes, hidden=(setting.hidden,)),
        rounds=setting.rounds,
        impacts=impacts(scenario, setting, way),
        mu=setting.mu,
        **{"local": local} | options,
    )
    if scenario.later is not None:
        method = change_half_way(method, _halves(setting.rounds)[0])
    return lambda _: method


def _parts(scenario: Scenario, setting: Setting) -> np.ndarray:
    """The part of every client."""
    ends = np.rint(np.cumsum(scenario.shares) * setting.clients).astype(int)
    return np.repeat(np.arange(3), np.diff(ends, prepend=0))


def _halves(rounds: int) -> tuple[int, int]:
    return rounds // 2, rounds - rounds // 2


def _print_bound(row: Row, setting: Setting, scenario: Scenario, data: Dataset) -> None:
    """What theorem 2 promises for the first row, with constants that favour it."""
    p = impacts(scenario, setting, scenario.best).max()
    scale = float(row.statement["noise_multiplier"]["max"]) * setting.clip * p
    constants = {"gap": math.log(10), "smoothness": 1.0, "dissimilarity": 1.0, "gradient": 1.0}
    gamma = float(np.mean([entry["gamma"] for metrics in row.metrics for entry in metrics]))
    parameters = (data.train_inputs[0].size + 1) * setting.hidden + (setting.hidden + 1) * data.classes
    bound = convergence_bound(
        np.full(setting.rounds, scale), parameters=parameters, mu=setting.mu, gamma=gamma, **constants
    )
    print(
        f"theorem 2 at mu {setting.mu:g}, measured gamma {gamma:.2g}, and rho = B = beta = 1: the loss may be up to "
        f"{bound[-1]:.3g} above its minimum after {setting.rounds} rounds; measured {row.metrics[0][-1]['loss']:.3g}"
    )
