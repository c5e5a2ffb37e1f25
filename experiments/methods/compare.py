"""Ditto, APFL, pFedMe, Per-FedAvg, SCAFFOLD and adaptive servers beside FedAvg and local training, on Fashion-MNIST.

python -m experiments.methods.compare --task personal
python -m experiments.methods.compare --task shared
python -m experiments.methods.compare --render

Every method gets the same number of points; one training run of each is scored on validation examples that no run
trains on. The best point trains anew for every seed and meets the test examples once.
"""

import dataclasses
import datetime
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax

from experiments.common import (
    cli,
    compile_quickly,
    percent,
    seeds_of,
    split_clients,
    starred,
    stoppable,
    versions,
)
from jaxfl import Candidate, LocalSGD, grid, simulate, sweep
from jaxfl._validate import checked
from jaxfl.algorithms import (
    apfl,
    ditto,
    dp_fedavg_fb,
    fedadagrad,
    fedadam,
    fedavg,
    fedyogi,
    local_only,
    per_fedavg,
    pfedme,
    scaffold,
)
from jaxfl.data import Dataset, classes_per_client, iid, load
from jaxfl.models import mlp
from jaxfl.privacy import FixedSize, Mechanism
from jaxfl.types import Algorithm, Clients, Model

HERE = pathlib.Path(__file__).parent
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
NO_LIMIT: dict[str, Any] = {"clip": float("inf"), "noise_multiplier": 0.0}


class Setting(NamedTuple):
    """A task."""

    clients: int
    classes: int
    """Of each client."""
    examples: int
    """Of each client, to train on."""
    validation: int
    test: int
    """Of each client; those of all together are drawn from the whole test set in the shared task."""
    hidden: tuple[int, ...]
    cohort: int
    batch_size: int
    epochs: int
    rounds: int
    eval_every: int
    target: float | None = None
    """An accuracy whose first round is told."""


SETTINGS = {
    "personal": Setting(
        clients=20, classes=3, examples=40, validation=20, test=300, hidden=(64,), cohort=20, batch_size=10, epochs=5,
        rounds=40, eval_every=40,
    ),
    "shared": Setting(
        clients=50, classes=2, examples=100, validation=20, test=200, hidden=(), cohort=10, batch_size=10, epochs=5,
        rounds=100, eval_every=2, target=0.75,
    ),
}  # fmt: skip
TUNING_SEED = 100


def personal_methods(model: Model, setting: Setting) -> dict[str, Candidate]:
    """Methods whose clients are evaluated with a model of their own, and two that have one kind of model."""
    sampling, size, epochs = FixedSize(setting.cohort), setting.batch_size, setting.epochs
    shared = {"sampling": sampling}

    def local(rate: float) -> LocalSGD:
        return LocalSGD(optax.sgd(rate), size, epochs)

    rates = (0.01, 0.03, 0.1)
    return {
        "local-only": Candidate(lambda rate: local_only(model, local=local(rate), sampling=sampling), grid(rate=RATES)),
        "FedAvg": Candidate(
            lambda rate: fedavg(model, local=local(rate), mechanism=Mechanism(sampling=sampling)), grid(rate=RATES)
        ),
        "FedAvg, head fine-tuned": Candidate(
            lambda rate, head: dp_fedavg_fb(
                model, local=local(rate), head=LocalSGD(optax.sgd(head), size, epochs), **NO_LIMIT, **shared
            ),
            grid(rate=rates, head=(0.01, 0.1)),
        ),
        "Ditto": Candidate(
            lambda rate, penalty: ditto(
                model, penalty_weight=penalty, local=local(rate), personal=local(rate), **shared
            ),
            grid(rate=rates, penalty=(0.1, 1.0)),
        ),
        "APFL": Candidate(
            lambda rate, alpha_rate: apfl(model, alpha_learning_rate=alpha_rate, local=local(rate), **shared),
            grid(rate=rates, alpha_rate=(0.0, 0.1)),
        ),
        "pFedMe": Candidate(
            lambda penalty, step: pfedme(
                model, penalty_weight=penalty, inner_learning_rate=0.03, local=local(step / penalty), **shared
            ),
            grid(penalty=(5.0, 15.0), step=(0.1, 0.3, 1.0)),
        ),
        "Per-FedAvg": Candidate(
            lambda rate, inner: per_fedavg(
                model,
                inner_learning_rate=inner,
                local=local(rate),
                personal=LocalSGD(optax.sgd(inner), size, epochs),
                **shared,
            ),
            grid(rate=rates, inner=(0.01, 0.1)),
        ),
    }


def shared_methods(model: Model, setting: Setting) -> dict[str, Candidate]:
    """Methods for one model of all."""
    sampling, size, epochs = FixedSize(setting.cohort), setting.batch_size, setting.epochs

    def averaged(rate: float, optimizer: optax.GradientTransformation) -> Algorithm:
        local, mechanism = LocalSGD(optax.sgd(rate), size, epochs), Mechanism(sampling=sampling)
        return fedavg(model, local=local, mechanism=mechanism, server_optimizer=optimizer)

    def adaptive(optimizer: Callable[[float], optax.GradientTransformation]) -> Candidate:
        return Candidate(
            lambda rate, server: averaged(rate, optimizer(server)), grid(rate=(0.01, 0.1), server=(0.01, 0.03, 0.1))
        )

    def controlled(rate: float) -> Algorithm:
        return scaffold(model, learning_rate=rate, batch_size=size, epochs=epochs, sampling=sampling)

    return {
        "local-only": Candidate(
            lambda rate: local_only(model, local=LocalSGD(optax.sgd(rate), size, epochs), sampling=sampling),
            grid(rate=RATES),
        ),
        "FedAvg": Candidate(lambda rate: averaged(rate, optax.sgd(1.0)), grid(rate=RATES)),
        "SCAFFOLD": Candidate(controlled, grid(rate=RATES)),
        "FedAdam": adaptive(fedadam),
        "FedYogi": adaptive(fedyogi),
        "FedAdagrad": adaptive(fedadagrad),
    }


METHODS = {"personal": personal_methods, "shared": shared_methods}


def clients_of(data: Dataset, task: str, setting: Setting, seed: int, *, held_out: bool) -> Clients:
    """Clients of a few classes each; tested on held-out examples of their training splits, or on test examples.

    In the personal task those are of the client's own classes, in the shared task of all.
    """
    generator = np.random.default_rng(seed)
    train, test = classes_per_client(
        data.train_labels, data.test_labels, setting.clients, setting.classes, seed=seed, test="all"
    )
    rows = [generator.permutation(own)[: setting.examples + setting.validation] for own in train]
    if task == "shared":
        test = iid(data.test_labels, setting.clients, seed=seed)
    test = [generator.permutation(own)[: setting.test] for own in test]
    return split_clients(data, rows, test, setting.examples, held_out=held_out)


def score(task: str, metrics: Sequence[Mapping[str, float]]) -> float:
    """What a point is chosen by: accuracy at the end, or its mean over the curve where speed counts."""
    values = [row["accuracy_examples" if task == "shared" else "accuracy"] for row in metrics]
    return float(np.mean(values)) if task == "shared" else float(values[-1])


@checked(seeds=seeds_of)
@dataclasses.dataclass(frozen=True)
class Config:
    """Which task."""

    task: Literal["personal", "shared"] = "personal"
    scale: Literal["smoke", "cpu"] = "cpu"
    """smoke: two points of each method on digits, in seconds; writes nothing."""
    seeds: tuple[int, ...] = (0, 1, 2)
    render: bool = False
    """Only write the README anew from the results that are there."""


@stoppable()
def main(config: Config) -> None:
    """Tune, run, write the results and render the README."""
    if not config.render:
        result = run(config)
        if config.scale == "smoke":
            print(table(result))
            return
        (HERE / "results" / f"{config.task}.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "README.md").write_text(render())
    print(HERE / "README.md")


def run(config: Config) -> dict[str, Any]:
    """Everything that the README says of a task."""
    setting, seeds, began = SETTINGS[config.task], config.seeds, time.monotonic()
    if config.scale == "smoke":
        compile_quickly()
        setting = setting._replace(clients=10, examples=20, validation=5, test=20, cohort=5, rounds=4, eval_every=2)
        seeds = seeds[:1]
    data = load("digits" if config.scale == "smoke" else "fashion_mnist")
    model = mlp(data.train_inputs.shape[1:], data.classes, hidden=setting.hidden)
    options = {"rounds": setting.rounds, "eval_every": setting.eval_every, "devices": jax.devices()[:1], "chunk": 1}
    options["progress"] = False
    tuning = clients_of(data, config.task, setting, TUNING_SEED, held_out=True)
    tested = {seed: clients_of(data, config.task, setting, seed, held_out=False) for seed in seeds}
    rows: dict[str, dict[str, Any]] = {}
    for name, method in METHODS[config.task](model, setting).items():
        points = method.points
        if config.scale == "smoke":
            points = {column: values[:2] for column, values in points.items()}
        results = sweep(jax.random.key(TUNING_SEED), method.build, points, tuning, **options)
        scores = [score(config.task, result.metrics) for result in results]
        best = int(np.argmax(np.nan_to_num(scores, nan=-1.0)))
        chosen = {column: values[best] for column, values in points.items()}
        algorithm = method.build(**chosen)
        variants = {name: algorithm}
        if name == "pFedMe":
            variants["pFedMe, its shared model"] = algorithm._replace(personalize=lambda key, server, *_: server.params)
        for variant, built in variants.items():
            runs = [simulate(jax.random.key(seed), built, tested[seed], **options).metrics for seed in seeds]
            rows[variant] = {
                "points": points,
                "validation": scores,
                "chosen": chosen,
                "accuracy": [[row[METRIC[config.task]] for row in metrics] for metrics in runs],
                "worst10": [metrics[-1]["accuracy_worst10"] for metrics in runs],
                "rounds": [int(row["round"]) for row in runs[0]],
            }
            print(f"{variant}: {chosen}, {percent([a[-1] for a in rows[variant]['accuracy']])}", flush=True)
    return {
        "task": config.task,
        "data": data.name,
        "setting": setting._asdict(),
        "tuning_seed": TUNING_SEED,
        "seeds": list(seeds),
        "largest_class": [largest_class(tested[seed]) for seed in seeds],
        "methods": rows,
        "versions": versions("jaxfl", "jax", "jaxlib", "optax", "numpy"),
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - began),
    }


METRIC = {"personal": "accuracy", "shared": "accuracy_examples"}


def largest_class(clients: Clients) -> float:
    """Mean test accuracy of clients that always answer with the class that most of their training examples have."""
    labels, found = np.asarray(clients.labels), []
    for i in range(clients.number):
        train = labels[clients.train[i][: clients.train_size[i]]]
        found.append(np.mean(labels[clients.test[i][: clients.test_size[i]]] == np.bincount(train).argmax()))
    return float(np.mean(found))


def table(result: Mapping[str, Any]) -> str:
    """The methods of a task as Markdown."""
    target = result["setting"]["target"]
    head = ["method", "accuracy %", "worst 10 % of clients" if target is None else f"rounds to {100 * target:.0f}%"]
    head += ["least to largest, %", "validation %, chosen and worst point", "chosen"]
    lines = [head, ["---"] * len(head)]
    for name, row in result["methods"].items():
        last = [curve[-1] for curve in row["accuracy"]]
        third = percent(row["worst10"])
        if target is not None:
            third = ", ".join(str(first_round(row["rounds"], curve, target) or "–") for curve in row["accuracy"])
        spread = f"{100 * min(last):.1f} to {100 * max(last):.1f}"
        validation = f"{100 * max(row['validation']):.1f}, {100 * min(row['validation']):.1f}"
        lines.append([name, percent(last), third, spread, validation, starred(row["chosen"], row["points"])])
    lines.append(["the largest class of a client", percent(result["largest_class"]), *["–"] * (len(head) - 2)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def first_round(rounds: Sequence[int], curve: Sequence[float], target: float) -> int | None:
    """The first evaluated round of at least that accuracy."""
    return next((number for number, value in zip(rounds, curve, strict=True) if value >= target), None)


CLAIMS = {
    "personal": (
        ("Ditto", "FedAvg", "Ditto is more accurate than FedAvg (Li et al. 2021)"),
        ("Ditto", "local-only", "and than local training"),
        ("APFL", "FedAvg", "APFL is more accurate than FedAvg (Deng et al. 2020)"),
        ("pFedMe", "pFedMe, its shared model", "pFedMe's personal models beat its shared one (Dinh et al. 2020)"),
        ("pFedMe", "local-only", "pFedMe beats local training"),
        ("Per-FedAvg", "FedAvg", "Per-FedAvg, after its steps, beats FedAvg (Fallah et al. 2020)"),
        ("Ditto", "FedAvg, head fine-tuned", "Ditto beats a fine-tuned head"),
    ),
    "shared": (
        ("SCAFFOLD", "FedAvg", "SCAFFOLD is ahead of FedAvg (Karimireddy et al. 2020)"),
        ("FedAdam", "FedAvg", "FedAdam is ahead of FedAvg (Reddi et al. 2021)"),
        ("FedYogi", "FedAvg", "FedYogi is ahead of FedAvg"),
        ("FedAdagrad", "FedAvg", "FedAdagrad is ahead of FedAvg"),
    ),
}
"""What the papers found, as pairs of the better and the other."""


def verdicts(result: Mapping[str, Any]) -> str:
    """Whether each ordering is seen here: in every seed, in none, or in some."""
    lines = []
    for better, other, text in CLAIMS[result["task"]]:
        pairs = zip(*(result["methods"][name]["accuracy"] for name in (better, other)), strict=True)
        # Where speed counts, the mean over the curve, as in tuning.
        value = np.mean if result["task"] == "shared" else (lambda curve: curve[-1])
        gains = [100 * float(value(a) - value(b)) for a, b in pairs]
        seen = "yes" if min(gains) > 0 else ("no" if max(gains) <= 0 else "not in every seed")
        lines.append(f"| {text} | {seen} | {', '.join(f'{gain:+.1f}' for gain in gains)} |")
    return "\n".join(["| ordering | seen here | difference by seed, points |", "|---|---|---|", *lines])


TEXT = {
    "personal": """## Personal models under label skew

{clients} clients with {classes} classes and {examples} training examples each, all in every round; a network with one
hidden layer of {width}; {rounds} rounds of {epochs} epochs, batches of {batch_size}, plain SGD. A client is tested on
{test} test examples of its own classes; the mean is over clients.""",
    "shared": """## One model for all, heterogeneous clients, many local steps

{clients} clients with {classes} classes and {examples} training examples each, {cohort} in every round; logistic
regression, as in SCAFFOLD's experiments; {rounds} rounds of {epochs} epochs, batches of {batch_size}, plain SGD.
Accuracy is on the whole test set, of which a local model knows {classes} classes. Points are chosen, and orderings
told, by the mean accuracy over the curve; the table has the last round. SCAFFOLD sends twice as much in a round as the
others. All grids were moved up once, after a first run in which FedAvg's best rate was the largest.""",
}


def render() -> str:
    """The README, all of whose numbers are those of the result files."""
    parts = [
        """# Methods users look for, on a small task

Do Ditto, APFL, pFedMe, Per-FedAvg, SCAFFOLD, FedAdam, FedYogi and FedAdagrad do here what their papers found? No
privacy: the epsilon is infinite. `python -m experiments.methods.compare --render` writes this from `results/*.json`.

```
TFDS_DATA_DIR=... python -m experiments.methods.compare --task personal
TFDS_DATA_DIR=... python -m experiments.methods.compare --task shared
```"""
    ]
    for task in SETTINGS:
        path = HERE / "results" / f"{task}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        setting = result["setting"]
        facts = {name: result[name] for name in ("data", "tuning_seed", "date", "seconds")}
        facts["points"] = min(len(row["validation"]) for row in result["methods"].values())
        facts["seeds"] = ", ".join(map(str, result["seeds"]))
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        facts["width"] = (setting["hidden"] or [0])[0]
        parts += [TEXT[task].format(**setting, **facts), PROTOCOL.format(**setting, **facts)]
        parts += [table(result), verdicts(result), "{date}; {versions}; {seconds} seconds on one core.".format(**facts)]
    return "\n\n".join(parts) + "\n"


PROTOCOL = """{data}. Every method has {points} points, each tried once, with seed {tuning_seed}, on {validation}
validation examples of each client that no run trains on; the best trains for seeds {seeds}, which draw clients and
start. Mean ± standard deviation over seeds. A star marks an end of the grid, beyond which there may be better."""


if __name__ == "__main__":
    main(cli(Config, __doc__))
