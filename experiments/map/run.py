"""The map: methods at the same honest epsilons, with 100 to 10,000 clients, each tuned alike.

python -m experiments.map.run --data cifar10 --clients 1000 --classes 2
"""

import dataclasses
import datetime
import functools
import json
import math
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.common import cli, compile_quickly, seeds_of, stoppable, versions
from jaxfl import Candidate, Comparison, LocalSGD, compare, spread
from jaxfl._validate import check_path, checked
from jaxfl.algorithms import centaur, ditto, dp_fedavg, dp_fedavg_fb, dp_pfeddsu, feddpa, local_only, pmtl, ppsgd
from jaxfl.data import Dataset, classes_per_client, load, make_clients
from jaxfl.local.penalties import proximal
from jaxfl.models import lenet, mlp
from jaxfl.privacy import Mechanism, Poisson, Sampling, plan
from jaxfl.types import Algorithm, ClientData, Clients, Model, Params

HERE = pathlib.Path(__file__).parent
EPSILONS = (1.0, 8.0, math.inf)
RATES, CLIPS, WEIGHTS = (0.01, 0.3), (0.03, 3.0), (0.01, 1.0)


class Cell(NamedTuple):
    """A place on the map; a round's cohort passes its examples once."""

    data: str
    clients: int
    classes: int
    """Of each client."""
    share: float
    """Of the clients, expected in a round."""
    batch_size: int
    test: int
    """Examples that each client is tested on, all of its own classes."""
    rounds: int = 50
    alone: int = 30
    """Passes of clients that train alone, at most."""
    points: int = 6


def cell_of(data: str, clients: int, classes: int) -> Cell:
    """Cohorts of 20, 100 and 1,000, batches of 10 unless a client has 5 examples."""
    share, batch_size, test = {100: (0.2, 10, 100), 1000: (0.1, 10, 10), 10_000: (0.1, 3, 2)}[clients]
    return Cell(data, clients, classes, share, batch_size, test)


def clients_of(data: Dataset, cell: Cell, seed: int) -> Clients:
    """Clients of a few classes each, tested on examples of those; the seed draws who has what."""
    train, test = classes_per_client(
        data.train_labels, data.test_labels, cell.clients, cell.classes, seed=seed, test="all"
    )
    generator = np.random.default_rng(seed)
    return make_clients(data, train, [generator.permutation(own)[: cell.test] for own in test])


def methods(model: Model, cell: Cell) -> dict[str, Candidate]:
    """Every method with as many points, over its rate, its clip bound and one number of its own."""
    sampling, space = Poisson(cell.share), functools.partial(spread, cell.points)

    def local(rate: float, epochs: int = 1) -> LocalSGD:
        return LocalSGD(optax.sgd(rate), cell.batch_size, epochs)

    def private(build: Any, arguments: Any, **axes: tuple[float, float]) -> Candidate:
        """A method whose builder takes a rate's local training, a clip bound and the noise."""

        def at(noise_multiplier: float, rate: float, clip: float, **own: float) -> Algorithm:
            options = {"clip": clip, "noise_multiplier": noise_multiplier, "sampling": sampling}
            return build(model, **options, **arguments(rate, **own))

        return Candidate(at, space(rate=RATES, clip=CLIPS, **axes))

    def free(rate: float) -> Algorithm:
        return dp_fedavg(model, clip=math.inf, noise_multiplier=0.0, sampling=sampling, local=local(rate))

    found = {
        "local-only": Candidate(lambda rate: local_only(model, local=local(rate)), space(rate=RATES), cell.alone),
        "FedAvg": Candidate(free, space(rate=RATES)),
        "FedAvg, fine-tuned": Candidate(
            lambda rate, tuning: fine_tuned(free(rate), local(tuning, 5)), space(rate=RATES, tuning=RATES)
        ),
        "DP-FedAvg": private(dp_fedavg, lambda rate: {"local": local(rate)}),
        "DP-FedAvg, fine-tuned": private(
            lambda model, tuning, **options: fine_tuned(dp_fedavg(model, **options), tuning),
            lambda rate, tuning: {"local": local(rate), "tuning": local(tuning, 5)},
            tuning=RATES,
        ),
        "DP-FedAvg-fb": private(
            dp_fedavg_fb, lambda rate, head: {"local": local(rate), "head": local(head, 5)}, head=RATES
        ),
        "Ditto": private(
            lambda model, penalty_weight, local, **options: fine_tuned(
                ditto(model, penalty_weight=penalty_weight, personal=again(local, 2), local=local, **options),
                again(local, 5),
                penalty_weight,
            ),
            lambda rate, penalty_weight: {"local": local(rate), "penalty_weight": penalty_weight},
            penalty_weight=WEIGHTS,
        ),
        "MR-MTL": private(
            lambda model, penalty_weight, local, **options: fine_tuned(
                pmtl(model, penalty_weight=penalty_weight, local=again(local, 2), **options),
                again(local, 5),
                penalty_weight,
            ),
            lambda rate, penalty_weight: {"local": local(rate), "penalty_weight": penalty_weight},
            penalty_weight=WEIGHTS,
        ),
        "CENTAUR": private(centaur, lambda rate, head: {"local": local(rate), "head": local(head, 5)}, head=RATES),
        "PPSGD": private(
            ppsgd,
            lambda rate, personal: {
                "batch_size": min(50, 50_000 // cell.clients), "server_learning_rate": rate,
                "personal_learning_rate": personal, "loss": None,
            },
            personal=RATES,
        ),
        "FedDPA": private(
            feddpa,
            lambda rate, threshold: {"local": local(rate), "threshold": threshold, "evaluate": "adapt"},
            threshold=(0.1, 0.9),
        ),
        "DP-pFedDSU": private(
            dp_pfeddsu,
            lambda rate, density: {"local": local(rate), "head": local(rate, 5), "density": density},
            density=(0.05, 0.5),
        ),
    }  # fmt: skip
    if cell.clients >= 10_000:
        cohort = round(cell.share * cell.clients)
        best, *_ = plan(clients=cell.clients, cohort=cohort, rounds=cell.rounds, epsilon=8.0, kinds=("banded",))
        found["DP-FedAvg, banded noise"] = private(banded, lambda rate: {"local": local(rate), "base": best.mechanism})
    return found


def again(local: LocalSGD, epochs: int) -> LocalSGD:
    """The same steps, for some passes."""
    return dataclasses.replace(local, epochs=epochs)


def fine_tuned(base: Algorithm, local: LocalSGD, penalty_weight: float = 0.0) -> Algorithm:
    """The method, evaluated after each client has trained its whole model on its own data, near the server's or not."""

    def personalize(key: jax.Array, server: Any, client: Any, data: ClientData) -> Params:
        penalty = functools.partial(proximal, center=server.params, mu=penalty_weight)
        return local.train(key, base.model, base.personalize(key, server, client, data), data, penalty=penalty)[0]

    return base._replace(name=f"{base.name}, fine-tuned", personalize=personalize)


def banded(
    model: Model, *, clip: float, noise_multiplier: float, sampling: Sampling, local: LocalSGD, base: Mechanism
) -> Algorithm:
    """DP-FedAvg with the noise and the sampler of another mechanism."""
    method = dp_fedavg(model, clip=clip, noise_multiplier=noise_multiplier, sampling=sampling, local=local)
    mechanism = dataclasses.replace(base, clip=clip, noise_multiplier=noise_multiplier)
    return method._replace(name="dp_fedavg, banded", mechanism=mechanism)


def on_features(shape: tuple[int, int, int], classes: int, cell: Cell) -> dict[str, Candidate]:
    """A linear model of random features, by each client alone and by all together."""
    model, sampling = mlp(shape, classes, hidden=()), Poisson(cell.share)

    def local(rate: float) -> LocalSGD:
        return LocalSGD(optax.sgd(rate), cell.batch_size)

    def federated(noise_multiplier: float, rate: float, clip: float) -> Algorithm:
        private = {"clip": clip, "noise_multiplier": noise_multiplier, "sampling": sampling}
        return dp_fedavg(model, local=local(rate), **private)

    space = functools.partial(spread, cell.points)
    return {
        "random features, local-only": Candidate(
            lambda rate: local_only(model, local=local(rate)), space(rate=RATES), cell.alone
        ),
        "random features, DP-FedAvg": Candidate(federated, space(rate=RATES, clip=CLIPS)),
    }


def features_of(data: Dataset, *, filters: int = 128, width: int = 6, seed: int = 0) -> Dataset:
    """The dataset seen through random filters: patches without their mean, ReLU, means over quarters of the picture.

    The filters come from a public seed, and an example's features, of norm 10, from the example alone.
    """
    channels = data.train_inputs.shape[-1]
    bank = np.random.default_rng(seed).standard_normal((width, width, channels, filters)).astype(np.float32)
    bank -= bank.mean((0, 1, 2))
    bank /= np.sqrt((bank**2).sum((0, 1, 2)))

    @jax.jit
    def seen(images: jax.Array) -> jax.Array:
        rows = jax.lax.conv_general_dilated(
            images.astype(jnp.float32) / 255.0, bank, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        both = jnp.concatenate([jax.nn.relu(rows), jax.nn.relu(-rows)], -1)
        halves = [jnp.array_split(strip, 2, 2) for strip in jnp.array_split(both, 2, 1)]
        means = jnp.stack([jnp.stack([part.mean((1, 2)) for part in pair], 1) for pair in halves], 1)
        return 10 * means / jnp.linalg.norm(means, axis=(1, 2, 3), keepdims=True)

    def all_of(images: np.ndarray) -> np.ndarray:
        return np.concatenate([seen(images[i : i + 500]) for i in range(0, len(images), 500)])

    return data._replace(train_inputs=all_of(data.train_inputs), test_inputs=all_of(data.test_inputs))


def compared(
    candidates: Mapping[str, Candidate],
    clients: Callable[[int], Clients],
    folder: pathlib.Path,
    options: Mapping[str, Any],
) -> Comparison:
    """Compare methods one by one; what a method's runs left behind, gigabytes of models, goes when it is done."""
    parts = []
    for name, candidate in candidates.items():
        path = folder / f"{name}.json"
        if not path.exists():
            compare({name: candidate}, clients, folder=folder / name, **options).save(path)
            shutil.rmtree(folder / name)
        parts.append(Comparison.load(path))
        print(parts[-1].to_markdown(), flush=True)
    rows, tuning = ([row for part in parts for row in getattr(part, field)] for field in ("rows", "tuning"))
    return parts[0]._replace(rows=rows, tuning=tuning)


@checked(seeds=seeds_of, out=check_path)
@dataclasses.dataclass(frozen=True)
class Config:
    """Which place."""

    data: Literal["cifar10", "fashion_mnist", "digits"] = "cifar10"
    clients: Literal[100, 1000, 10_000] = 1000
    classes: int = 2
    scale: Literal["smoke", "cpu"] = "cpu"
    """smoke: two points of each method on digits, in minutes; writes no results."""
    seeds: tuple[int, ...] = (0, 1, 2)
    out: pathlib.Path = pathlib.Path("runs/map")
    """Folders of the runs, which a stopped command goes on with."""


@stoppable()
def main(config: Config) -> None:
    """Compare the methods at a place and write what came out."""
    began, seeds = time.monotonic(), config.seeds
    cell = cell_of(config.data, config.clients, config.classes)
    if config.scale == "smoke":
        compile_quickly()
        cell = cell._replace(data="digits", clients=40, batch_size=8, rounds=3, alone=3, points=2)
        seeds = seeds[:1]
    data = load(cell.data)
    shape = data.train_inputs.shape[1:]
    model = mlp(shape, data.classes, hidden=(16,)) if config.scale == "smoke" else lenet(shape, data.classes)
    options: dict[str, Any] = {"epsilons": EPSILONS, "seeds": seeds, "rounds": cell.rounds}
    options |= {"devices": jax.devices()[:1], "chunk": 1, "progress": False}
    folder = config.out / f"{cell.data}-{cell.clients}-{cell.classes}"
    found = compared(methods(model, cell), functools.partial(clients_of, data, cell), folder, options)
    if config.scale == "cpu":
        seen = features_of(data)
        linear = on_features(seen.train_inputs.shape[1:], data.classes, cell)
        also = compared(linear, functools.partial(clients_of, seen, cell), folder, options)
        found = found._replace(rows=found.rows + also.rows, tuning=found.tuning + also.tuning)
    print(found.to_markdown())
    if config.scale == "cpu":
        result = {
            "cell": cell._asdict(),
            "comparison": found._asdict(),
            "versions": versions("jaxfl", "jax", "jaxlib", "optax", "numpy", "dp-accounting"),
            "date": datetime.date.today().isoformat(),
            "seconds": round(time.monotonic() - began),
        }
        name = f"{cell.data}-{cell.clients}-{cell.classes}.json"
        (HERE / "results" / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(cli(Config, __doc__))
