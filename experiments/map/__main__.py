"""The map: methods at the same honest epsilons, with 100 to 10,000 clients, each tuned alike.

python -m experiments.map cifar10_1000_2
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.common import fine_tuned, number, percent, starred, validation_curve
from experiments.study import Options, Result, Study, command, dated, listed, markdown_table, part, rounded
from jaxfl import Candidate, Comparison, LocalSGD, compare, spread
from jaxfl.algorithms import centaur, ditto, dp_fedavg, dp_fedavg_fb, dp_pfeddsu, feddpa, local_only, pmtl, ppsgd
from jaxfl.data import Dataset, classes_per_client, load, make_clients
from jaxfl.local.train import fit_head
from jaxfl.models import lenet, mlp
from jaxfl.privacy import Mechanism, Poisson, Sampling, plan
from jaxfl.run import plots
from jaxfl.run.report import run_folder
from jaxfl.types import Algorithm, ClientData, Clients, Model, Params

EPSILONS = (1.0, 8.0, math.inf)
TUNING_SEED = 100
MANY = 10_000
"""Clients with so few examples, 5 and one of a class, that a network is tuned on other ones."""
CLIPS, WEIGHTS, STEP_RATES = (0.1, 3.0), (0.01, 1.0), (0.3, 5.0)
"""Of updates; of distances to the shared model; of a single step in a round."""


class Rates(NamedTuple):
    """Of training from the start, of a head, and of training further."""

    start: tuple[float, float]
    head: tuple[float, float]
    further: tuple[float, float]


PERCEPTRON = Rates((0.01, 0.5), (0.003, 0.3), (0.003, 0.3))
LENET = Rates((0.03, 0.5), (0.03, 0.5), (0.01, 0.3))


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
    features: bool
    """Whether networks see random features, and are perceptrons, or pictures, and are LeNets."""
    rounds: int = 50
    alone: int = 150
    """Passes of clients that train alone, at most."""
    points: int = 6
    final_passes: int = 5
    """Passes before the test, of all that is fine-tuned or kept; in CENTAUR and DP-pFedDSU in a round too."""
    personal_passes: int = 2
    """Passes of Ditto's and MR-MTL's own models in a round."""
    width: int = 64
    """Units of the perceptron."""


def cell_of(data: str, clients: int, classes: int) -> Cell:
    """Cohorts of 20, 100 and 1,000, batches of 10 unless a client has 5 examples.

    On CIFAR-10 networks see random features: LeNets would take several times as long.
    """
    share, batch_size, test = {100: (0.2, 10, 100), 1000: (0.1, 10, 10), 10_000: (0.1, 3, 2)}[clients]
    cell = Cell(data, clients, classes, share, batch_size, test, features=data == "cifar10")
    return cell._replace(alone=90, points=10) if cell.features else cell


def clients_of(data: Dataset, cell: Cell, seed: int) -> Clients:
    """Clients of a few classes each, tested on examples of those; the seed draws who has what.

    Where no training example can be spared for tuning, it is tested on half of the data's test examples, runs on the
    other.
    """
    train, test = classes_per_client(
        data.train_labels, data.test_labels, cell.clients, cell.classes, seed=seed, test="all"
    )
    generator = np.random.default_rng(seed)
    if cell.clients >= MANY:
        test = [own[own % 2 == (seed == TUNING_SEED)] for own in test]
    return make_clients(data, train, [generator.permutation(own)[: cell.test] for own in test])


def methods(model: Model, cell: Cell) -> dict[str, Candidate]:
    """Every method with as many points, over its rate, its clip bound and one number of its own."""
    sampling, space = Poisson(cell.share), functools.partial(spread, cell.points)
    rates = PERCEPTRON if cell.features else LENET
    last, kept = cell.final_passes, cell.personal_passes

    def local(rate: float, epochs: int = 1) -> LocalSGD:
        return LocalSGD(optax.sgd(rate), cell.batch_size, epochs)

    def private(build: Any, arguments: Any, **axes: tuple[float, float]) -> Candidate:
        """A method whose builder takes a rate's local training, a clip bound and the noise."""

        def at(noise_multiplier: float, rate: float, clip: float, **own: float) -> Algorithm:
            options = {"clip": clip, "noise_multiplier": noise_multiplier, "sampling": sampling}
            return build(model, **options, **arguments(rate, **own))

        return Candidate(at, space(**{"rate": rates.start, "clip": CLIPS} | axes))

    def free(rate: float) -> Algorithm:
        return dp_fedavg(model, clip=math.inf, noise_multiplier=0.0, sampling=sampling, local=local(rate))

    found = {
        "local-only": Candidate(lambda rate: local_only(model, local=local(rate)), space(rate=rates.start), cell.alone),
        "FedAvg": Candidate(free, space(rate=rates.start)),
        "FedAvg, fine-tuned": Candidate(
            lambda rate, tuning: fine_tuned(free(rate), local(tuning, last)),
            space(rate=rates.start, tuning=rates.further),
        ),
        "DP-FedAvg": private(dp_fedavg, lambda rate: {"local": local(rate)}),
        "DP-FedAvg, fine-tuned": private(
            lambda model, tuning, **options: fine_tuned(dp_fedavg(model, **options), tuning),
            lambda rate, tuning: {"local": local(rate), "tuning": local(tuning, last)},
            tuning=rates.further,
        ),
        "DP-FedAvg-fb": private(
            dp_fedavg_fb, lambda rate, head: {"local": local(rate), "head": local(head, last)}, head=rates.head
        ),
        "Ditto": private(
            lambda model, penalty_weight, local, **options: fine_tuned(
                ditto(model, penalty_weight=penalty_weight, personal=again(local, kept), local=local, **options),
                again(local, last),
                penalty_weight,
            ),
            lambda rate, penalty_weight: {"local": local(rate), "penalty_weight": penalty_weight},
            penalty_weight=WEIGHTS,
        ),
        "MR-MTL": private(
            lambda model, penalty_weight, local, **options: fine_tuned(
                pmtl(model, penalty_weight=penalty_weight, local=again(local, kept), **options),
                again(local, last),
                penalty_weight,
            ),
            lambda rate, penalty_weight: {"local": local(rate), "penalty_weight": penalty_weight},
            penalty_weight=WEIGHTS,
        ),
        "CENTAUR": private(
            centaur, lambda rate, head: {"local": local(rate), "head": local(head, last)}, head=rates.head
        ),
        "PPSGD": private(
            lambda model, tuning, **options: head_tuned(ppsgd(model, **options), tuning),
            lambda rate, personal, head: {
                "batch_size": min(50, 50_000 // cell.clients), "server_learning_rate": rate,
                "personal_learning_rate": personal, "loss": None, "tuning": local(head, last),
            },
            rate=STEP_RATES,
            personal=STEP_RATES,
            head=rates.head,
        ),
        "FedDPA": private(
            lambda model, local, **options: feddpa(model, local=local, **options)._replace(
                personalize=feddpa(model, local=again(local, last), **options).personalize
            ),
            lambda rate, threshold: {"local": local(rate), "threshold": threshold, "evaluate": "adapt"},
            threshold=(0.1, 0.9),
        ),
        "DP-pFedDSU": private(
            dp_pfeddsu,
            lambda rate, density: {"local": local(rate), "head": local(rate, last), "density": density},
            density=(0.05, 0.5),
        ),
    }  # fmt: skip
    if cell.clients >= MANY:
        cohort = round(cell.share * cell.clients)
        best, *_ = plan(clients=cell.clients, cohort=cohort, rounds=cell.rounds, epsilon=8.0, kinds=("banded",))
        found["DP-FedAvg, banded noise"] = private(banded, lambda rate: {"local": local(rate), "base": best.mechanism})
    return found


def again(local: LocalSGD, epochs: int) -> LocalSGD:
    """The same steps, for some passes."""
    return dataclasses.replace(local, epochs=epochs)


def head_tuned(base: Algorithm, local: LocalSGD) -> Algorithm:
    """The method, evaluated after each client has trained its head alone on its own data."""

    def personalize(key: jax.Array, server: Any, client: Any, data: ClientData) -> Params:
        return fit_head(key, base.model, base.personalize(key, server, client, data), data, local=local)[0]

    return base._replace(personalize=personalize)


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
        "linear, local-only": Candidate(
            lambda rate: local_only(model, local=local(rate)), space(rate=PERCEPTRON.start), cell.alone
        ),
        "linear, DP-FedAvg": Candidate(federated, space(rate=PERCEPTRON.start, clip=CLIPS)),
    }


def features_of(data: Dataset, *, filters: int = 64, width: int = 6, seed: int = 0) -> Dataset:
    """The dataset seen through random filters: patches without their mean, ReLU, means over quarters of the picture.

    The filters come from a public seed, and an example's features from the example alone: each quarter's have mean 0,
    and all of them norm 10.
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
        means -= means.mean(-1, keepdims=True)
        return 10 * means / jnp.sqrt((means**2).sum((1, 2, 3), keepdims=True))

    def all_of(images: np.ndarray) -> np.ndarray:
        return np.concatenate([seen(images[i : i + 500]) for i in range(0, len(images), 500)])

    return data._replace(train_inputs=all_of(data.train_inputs), test_inputs=all_of(data.test_inputs))


def compared(
    candidates: Mapping[str, Candidate],
    clients: Callable[[int], Clients],
    cell: Cell,
    options: Options,
) -> Comparison:
    """Compare methods one by one; what a method's runs left behind, gigabytes of models, goes when it is done.

    What is done lies in `results/<cell>/`, so that a place on the map can be made in parts.
    """
    given: dict[str, Any] = {"epsilons": EPSILONS, "seeds": options.seeds, "rounds": cell.rounds}
    validation = clients if cell.clients >= MANY else 0.2
    parts = []
    for name, candidate in candidates.items():
        facts = cell._asdict() | given | {"alone": candidate.rounds, "points": candidate.points}
        facts |= {"tuning": "half of the test examples"} if callable(validation) else {}

        def make(name: str = name, candidate: Candidate = candidate, facts: Any = facts) -> Result:
            folder = run_folder(options.out, f"{name_of(cell)}, {name}", rounded(facts), TUNING_SEED)
            found = compare(
                {name: candidate},
                clients,
                tuning_seed=TUNING_SEED,
                folder=folder,
                devices=jax.devices()[:1],
                chunk=1,
                progress=False,
                validation=validation,
                **given,
            )
            shutil.rmtree(folder)
            return {"comparison": found._asdict()}

        parts.append(Comparison(**part("map", name_of(cell), name, facts, make, options)["comparison"]))
        print(parts[-1].to_markdown(), flush=True)
    rows, tuning = ([row for found in parts for row in getattr(found, field)] for field in ("rows", "tuning"))
    return parts[0]._replace(rows=rows, tuning=tuning)


def run(cell: Cell, options: Options) -> Result:
    """Compare the methods at a place."""
    if options.smoke:
        cell = cell._replace(data="digits", clients=40, batch_size=8, rounds=3, alone=3, points=2, features=True)
    pictures = load(cell.data)
    features = features_of(pictures)
    data = features if cell.features else pictures
    shape = data.train_inputs.shape[1:]
    model = mlp(shape, data.classes, hidden=(cell.width,)) if cell.features else lenet(shape, data.classes)
    found = compared(methods(model, cell), functools.partial(clients_of, data, cell), cell, options)
    linear = on_features(features.train_inputs.shape[1:], data.classes, cell)
    also = compared(linear, functools.partial(clients_of, features, cell), cell, options)
    found = found._replace(rows=found.rows + also.rows, tuning=found.tuning + also.tuning)
    return {"cell": cell._asdict(), "comparison": found._asdict()}


def name_of(cell: Cell) -> str:
    """Of its study."""
    return f"{cell.data}_{cell.clients}_{cell.classes}"


def markdown(result: Result) -> str:
    """What the README says of a place."""
    cell, found = result["cell"], Comparison(**result["comparison"])
    network = f"a perceptron of {cell['width']} units on random features" if cell["features"] else "LeNet"
    text = TEXT.format(**cell, cohort=round(cell["share"] * cell["clients"]), network=network)
    return "\n\n".join([text, table(found), settings(found), stops(found, cell), f"{found.protocol} {dated(result)}."])


TEXT = """{clients:,} clients with {classes} classes of {data} each, tested on {test} examples of those. {rounds} rounds
with {cohort:,} of the clients expected in each, batches of {batch_size}. The network is {network}; "linear"
is a linear model of the features.

![accuracy against epsilon]({data}_{clients}_{classes}.png)"""


def table(found: Comparison) -> str:
    """Accuracies by epsilon, the best first, and their differences to local training.

    What sends nothing meets every epsilon. Methods without privacy have one column, and come last.
    """
    epsilons = sorted({epsilon for _, epsilon in found.cells})
    silent = {row["method"] for row in found.rows if row["stated"] == 0}
    values: dict[tuple[str, float], list[float]] = {}
    gains: dict[tuple[str, float], str] = {}
    for row in found.rows:
        for epsilon in epsilons if row["method"] in silent else [row["epsilon"]]:
            values.setdefault((row["method"], epsilon), []).append(row[found.headline])
    for row in found.differences("local-only"):
        ends = "" if row["low"] is None else f" ({100 * row['low']:+.1f} to {100 * row['high']:+.1f})"
        for epsilon in epsilons if row["method"] in silent else [row["epsilon"]]:
            gains[row["method"], epsilon] = f"{100 * row['difference']:+.1f}{ends}"

    def place(method: str) -> tuple[float, float]:
        first = min(epsilon for name, epsilon in values if name == method)
        return first, -float(np.mean(values[method, first]))

    lines = [
        [
            method,
            *(percent(values[method, e]) if (method, e) in values else "–" for e in epsilons),
            *(gains.get((method, e), "–") for e in epsilons),
        ]
        for method in sorted(dict.fromkeys(method for method, _ in values), key=place)
    ]
    head = [f"{what}ε {number(e)}" for what in ("", "minus local-only, ") for e in epsilons]
    note = "Mean ± standard deviation over seeds; differences are paired by seed, with 95% intervals of Student's t."
    return f"{markdown_table(['accuracy %', *head], lines)}\n\n{note}"


def settings(found: Comparison) -> str:
    """The chosen points."""
    chosen = {(row["method"], row["epsilon"]): starred(row["chosen"], row["points"]) for row in found.tuning}
    epsilons = sorted({epsilon for _, epsilon in chosen})
    lines = [
        [method, *(chosen.get((method, epsilon), "–") for epsilon in epsilons)]
        for method in dict.fromkeys(method for method, _ in chosen)
    ]
    note = "A star marks the least or the largest of the values tried, beyond which there may be better."
    return f"{markdown_table(['chosen', *(f'ε {number(e)}' for e in epsilons)], lines)}\n\n{note}"


def stops(found: Comparison, cell: Mapping[str, Any]) -> str:
    """How the validation accuracy of clients that train alone went on, at their rate."""
    lines = []
    for row in found.tuning:
        if row["method"].endswith("local-only"):
            curve = ", ".join(f"{passes}: {100 * score:.1f}" for passes, score in validation_curve(row).items())
            end = "the last that was tried" if row["rounds"] == cell["alone"] else f"of at most {cell['alone']}"
            lines.append(f"{row['method']} stops after pass {row['rounds']}, {end}; validation % by pass: {curve}.")
    return "\n\n".join(lines)


def draw(result: Result, path: pathlib.Path) -> None:
    """Accuracy against epsilon."""
    Comparison(**result["comparison"]).plot(path.with_suffix(".png"))


FRONT = ("DP-FedAvg-fb", "DP-FedAvg, fine-tuned", "FedDPA", "PPSGD", "CENTAUR", "Ditto", "DP-pFedDSU", "DP-FedAvg")
"""Methods of the front page's picture, beside training alone."""


def _places(results: Mapping[str, Result]) -> list[tuple[Mapping[str, Any], Comparison]]:
    """Cells and comparisons in order of their clients."""
    known = [(result["cell"], Comparison(**result["comparison"])) for result in results.values()]
    return sorted(known, key=lambda place: (place[0]["data"], -place[0]["classes"], place[0]["clients"]))


def _title(cell: Mapping[str, Any]) -> str:
    return f"{cell['data']}, {cell['clients']:,} clients, {cell['classes']} classes each"


ALONE = ("local-only", "linear, local-only")
"""What each client can train alone."""


def answer(results: Mapping[str, Result]) -> str:
    """For the front page: at each place what clients reach alone, the best private methods, and how many are above it.

    Last what holds at all of them.
    """
    places = _places(results)
    picture = "![accuracy against epsilon](experiments/map/answer.png)\n"
    epsilons = sorted(_gains(places[0][1]))
    head = ["accuracy %", "trained alone", *(f"best at ε {number(epsilon)}" for epsilon in epsilons)]
    head.append(f"above, below at ε {number(epsilons[0])}")
    table = markdown_table(head, [_line(*place) for place in places])
    note = (
        "\nTrained alone: the better of a network and a linear model, each client on its own examples. Best: of the "
        "private methods on test examples, with the difference to that and its 95% interval, which allows for one "
        "method, not for all of them. Above, below: how many are so by their whole interval. Networks are perceptrons "
        "on random features of CIFAR-10, LeNets on Fashion-MNIST.\n"
    )
    by_clients, everywhere = _by_clients(places), _everywhere([found for _, found in places])
    return "\n".join([picture, table, note, by_clients, "", everywhere])


def _by_clients(places: Sequence[tuple[Mapping[str, Any], Comparison]]) -> str:
    """How many private methods are above training alone, by the number of clients and epsilon, at each place."""
    lines = []
    for clients in sorted({cell["clients"] for cell, _ in places}):
        here = [_gains(found) for cell, found in places if cell["clients"] == clients]
        counts = [
            f"ε {number(epsilon)}: {listed(f'{len(_above(of[epsilon]))} of {len(of[epsilon])}' for of in here)}"
            for epsilon in here[0]
        ]
        lines.append(f"- {clients:,} clients: {'; '.join(counts)}")
    head = "**Private methods above training alone**, by place in the table's order:"
    return "\n".join([head, "", *lines])


def _gains(found: Comparison) -> dict[float, list[dict[str, Any]]]:
    """By epsilon, private methods' differences to the better of what clients train alone, the largest first."""
    floor = _floor(found)
    private = {method for method, epsilon in found.cells if math.isfinite(epsilon)}
    rows = [row for row in found.differences(floor) if row["method"] in private]
    return {
        epsilon: sorted((row for row in rows if row["epsilon"] == epsilon), key=lambda row: -row["difference"])
        for epsilon in sorted({row["epsilon"] for row in rows})
    }


def _floor(found: Comparison) -> str:
    return max(ALONE, key=lambda method: found.mean(method, math.inf)[0])


def _above(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [row["method"] for row in rows if row["low"] > 0]


def _below(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [row["method"] for row in rows if row["high"] < 0]


def _line(cell: Mapping[str, Any], found: Comparison) -> list[str]:
    gains, floor = _gains(found), _floor(found)
    line = [_title(cell), percent([row[found.headline] for row in found.rows if row["method"] == floor])]
    for epsilon, (row, *_) in gains.items():
        mean, ends = found.mean(row["method"], epsilon)[0], f"{100 * row['low']:+.1f} to {100 * row['high']:+.1f}"
        line.append(f"{row['method']} {100 * mean:.1f} ({100 * row['difference']:+.1f}, {ends})")
    least = gains[min(gains)]
    return [*line, f"{len(_above(least))}, {len(_below(least))} of {len(least)}"]


def _everywhere(places: Sequence[Comparison]) -> str:
    """What holds at all places, by epsilon."""
    gains, lines = [_gains(found) for found in places], []
    for epsilon in gains[0]:
        shared = [
            [name for name in of(gains[0][epsilon]) if all(name in of(other[epsilon]) for other in gains)]
            for of in (lambda rows: [row["method"] for row in rows[:3]], _above, _below)
        ]
        best, above, below = map(_listed, shared)
        lines.append(
            f"ε {number(epsilon)}: always among the best three: {best}; above training alone: {above}; below: {below}."
        )
    return f"**At all {len(places)} places.** {' '.join(lines)}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name.replace(", ", " ") for name in names) or "none"


def draw_answer(results: Mapping[str, Result], path: pathlib.Path) -> None:
    """The places of CIFAR-10 with 5 classes, a panel for each number of clients."""
    shown = [(cell, found) for cell, found in _places(results) if (cell["data"], cell["classes"]) == ("cifar10", 5)]
    with plots.style():
        figure = plots.new_figure(min(plots.DOUBLE, 2.4 * len(shown) + 2.2), 2.7)
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False).ravel()
        for axes, (cell, found) in zip(panels, shown, strict=True):
            means = found.means()
            plots.against_epsilon(axes, {method: means[method] for method in (*FRONT, "local-only")}, FRONT)
            axes.set_title(f"{cell['clients']:,} clients")
        panels[0].set_ylabel("accuracy, mean ± std over seeds")
        plots.legend_beside(panels[-1])
    plots.save(figure, path)


STUDIES = {
    f"{data}_{clients}_{classes}": Study(
        functools.partial(run, cell_of(data, clients, classes)), markdown, draw, minutes=minutes
    )
    for data, (clients, minutes), classes in itertools.product(
        ("cifar10", "fashion_mnist"), {100: 300.0, 1000: 300.0, 10_000: 300.0}.items(), (2, 5)
    )
}
if __name__ == "__main__":
    command("map", __doc__, STUDIES)
