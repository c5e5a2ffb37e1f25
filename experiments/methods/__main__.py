"""Well-known methods on Fashion-MNIST, compared with FedAvg and local training.

python -m experiments.methods personal
python -m experiments.methods shared

The methods are Ditto, APFL, pFedMe, Per-FedAvg, SCAFFOLD and adaptive server optimizers. Every
method gets the same number of points. Each point trains once, and is scored on validation examples
that no run trains on. The best point then trains for every seed, and reads the test examples once.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.common import (
    choose,
    constant_scores,
    percent,
    run_each,
    split_clients,
    starred,
)
from experiments.study import Options, Result, Study, command, dated, listed, markdown_table, signed
from jaxfl import Candidate, LocalSGD, grid, sweep
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
from jaxfl.run.folder import run_folder
from jaxfl.types import Algorithm, Clients, Model

RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
NO_LIMIT: dict[str, Any] = {"clip": float("inf"), "noise_multiplier": 0.0}


class Setting(NamedTuple):
    """Settings of a task."""

    clients: int
    classes: int
    """Number of classes of each client."""
    examples: int
    """Number of training examples of each client."""
    validation: int
    """Number of validation examples of each client."""
    test: int
    """Number of test examples of each client. The shared task draws them from the full test set."""
    hidden: tuple[int, ...]
    cohort: int
    batch_size: int
    epochs: int
    rounds: int
    eval_every: int
    target: float | None = None
    """Accuracy whose first round the table shows."""


SETTINGS = {
    "personal": Setting(
        clients=20, classes=3, examples=40, validation=20, test=300, hidden=(64,), cohort=20,
        batch_size=10, epochs=5, rounds=40, eval_every=40,
    ),
    "shared": Setting(
        clients=50, classes=2, examples=100, validation=20, test=200, hidden=(), cohort=10,
        batch_size=10, epochs=5, rounds=100, eval_every=2, target=0.75,
    ),
}  # fmt: skip
TUNING_SEED = 100


def personal_methods(model: Model, setting: Setting) -> dict[str, Candidate]:
    """Return methods with personal models, and local-only and FedAvg as references, by name."""
    sampling, size, epochs = FixedSize(setting.cohort), setting.batch_size, setting.epochs
    shared = {"sampling": sampling}

    def local(rate: float) -> LocalSGD:
        return LocalSGD(optax.sgd(rate), size, epochs)

    rates = (0.01, 0.03, 0.1)
    return {
        "local-only": Candidate(
            lambda rate: local_only(model, local=local(rate), sampling=sampling), grid(rate=RATES)
        ),
        "FedAvg": Candidate(
            lambda rate: fedavg(model, local=local(rate), mechanism=Mechanism(sampling=sampling)),
            grid(rate=RATES),
        ),
        "FedAvg, head fine-tuned": Candidate(
            lambda rate, head: dp_fedavg_fb(
                model,
                local=local(rate),
                head=LocalSGD(optax.sgd(head), size, epochs),
                **NO_LIMIT,
                **shared,
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
            lambda rate, alpha_rate: apfl(
                model, alpha_learning_rate=alpha_rate, local=local(rate), **shared
            ),
            grid(rate=rates, alpha_rate=(0.0, 0.1)),
        ),
        "pFedMe": Candidate(
            lambda penalty, step: pfedme(
                model,
                penalty_weight=penalty,
                inner_learning_rate=0.03,
                local=local(step / penalty),
                **shared,
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
    """Return methods for one shared model, and local-only as a reference, by name."""
    sampling, size, epochs = FixedSize(setting.cohort), setting.batch_size, setting.epochs

    def averaged(rate: float, optimizer: optax.GradientTransformation) -> Algorithm:
        local, mechanism = LocalSGD(optax.sgd(rate), size, epochs), Mechanism(sampling=sampling)
        return fedavg(model, local=local, mechanism=mechanism, server_optimizer=optimizer)

    def adaptive(optimizer: Callable[[float], optax.GradientTransformation]) -> Candidate:
        return Candidate(
            lambda rate, server: averaged(rate, optimizer(server)),
            grid(rate=(0.01, 0.1), server=(0.01, 0.03, 0.1)),
        )

    def controlled(rate: float) -> Algorithm:
        return scaffold(
            model, learning_rate=rate, batch_size=size, epochs=epochs, sampling=sampling
        )

    return {
        "local-only": Candidate(
            lambda rate: local_only(
                model, local=LocalSGD(optax.sgd(rate), size, epochs), sampling=sampling
            ),
            grid(rate=RATES),
        ),
        "FedAvg": Candidate(lambda rate: averaged(rate, optax.sgd(1.0)), grid(rate=RATES)),
        "SCAFFOLD": Candidate(controlled, grid(rate=RATES)),
        "FedAdam": adaptive(fedadam),
        "FedYogi": adaptive(fedyogi),
        "FedAdagrad": adaptive(fedadagrad),
    }


METHODS = {"personal": personal_methods, "shared": shared_methods}
"""Function of each task that returns its methods."""


def clients_of(data: Dataset, task: str, setting: Setting, seed: int, *, held_out: bool) -> Clients:
    """Make clients of a few classes each.

    With `held_out` clients are tested on their validation examples. Otherwise test examples are of
    the client's own classes in the personal task, and of all classes in the shared task.
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


def score(task: str, rows: Sequence[Mapping[str, float]]) -> list[float]:
    """Return a list of the one score by which a point is chosen, from the rows of its metrics.

    The score is the final accuracy. In the shared task it is the mean accuracy over the evaluated
    rounds, because speed counts.
    """
    values = [row[METRIC[task]] for row in rows]
    return [float(np.mean(values))] if task == "shared" else values[-1:]


METRIC = {"personal": "accuracy", "shared": "accuracy_examples"}
"""Metric of each task: a mean over clients, or over all test examples."""


def run(task: str, options: Options) -> Result:
    """Tune and run each method of a task, "personal" or "shared"."""
    setting = SETTINGS[task]
    if options.smoke:
        setting = setting._replace(
            clients=10, examples=20, validation=5, test=20, cohort=5, rounds=4, eval_every=2
        )
    data = load("digits" if options.smoke else "fashion_mnist")
    model = mlp(data.train_inputs.shape[1:], data.classes, hidden=setting.hidden)
    train: dict[str, Any] = {
        "rounds": setting.rounds,
        "eval_every": setting.eval_every,
        "progress": False,
    }
    train |= {"devices": jax.devices()[:1], "chunk": 1}
    tuning = clients_of(data, task, setting, TUNING_SEED, held_out=True)
    tested = {seed: clients_of(data, task, setting, seed, held_out=False) for seed in options.seeds}
    rows: dict[str, dict[str, Any]] = {}
    for name, method in METHODS[task](model, setting).items():
        points = {
            column: values[: 2 if options.smoke else None]
            for column, values in method.points.items()
        }
        config = {"task": task, "data": data.name, "setting": setting._asdict(), "points": points}
        folder, key = (
            run_folder(options.out, name, config, TUNING_SEED),
            jax.random.key(TUNING_SEED),
        )
        results = sweep(key, method.build, points, tuning, folder=folder, **train)
        best = choose(points, results, functools.partial(score, task))
        algorithm = method.build(**best.chosen)
        variants = {name: algorithm}
        if name == "pFedMe":
            variants["pFedMe, its shared model"] = algorithm._replace(
                personalize=lambda key, server, *_: server.params
            )
        finals = run_each(
            {variant: lambda _, built=built: built for variant, built in variants.items()},
            tested.__getitem__,
            seeds=options.seeds,
            out=options.out,
            config={**config, "chosen": best.chosen},
            **train,
        )
        for variant, runs in finals.items():
            rows[variant] = best.facts | {
                "accuracy": [[row[METRIC[task]] for row in result.metrics] for result in runs],
                "worst10": [result.metrics[-1]["accuracy_worst10"] for result in runs],
                "rounds": [int(row["round"]) for row in runs[0].metrics],
            }
            print(
                f"{variant}: {best.chosen}, {percent([a[-1] for a in rows[variant]['accuracy']])}",
                flush=True,
            )
    return {
        "data": data.name,
        "setting": setting._asdict(),
        "tuning_seed": TUNING_SEED,
        "largest_class": [constant_scores(clients)[1] for clients in tested.values()],
        "methods": rows,
    }


def markdown(result: Result) -> str:
    """Return the README's text for a task."""
    setting, study = result["setting"], result["study"]
    facts = {
        "data": result["data"],
        "tuning_seed": result["tuning_seed"],
        "seeds": listed(result["seeds"]),
    }
    facts["points"] = min(len(row["validation"]) for row in result["methods"].values())
    facts["width"] = (setting["hidden"] or [0])[0]
    texts = [text.format(**setting, **facts) for text in (TEXT[study], PROTOCOL)]
    end = f"{dated(result)}; {result['seconds']} seconds on one core."
    return "\n\n".join([*texts, table(result), verdicts(result), end])


def table(result: Result) -> str:
    """Return the table with a line for each method, and one for constant predictions."""
    target = result["setting"]["target"]
    head = [
        "method",
        "accuracy %",
        "worst 10 % of clients" if target is None else f"rounds to {100 * target:.0f}%",
    ]
    head += ["least to largest, %", "validation %, chosen and worst point", "chosen"]
    lines = []
    for name, row in result["methods"].items():
        last = [curve[-1] for curve in row["accuracy"]]
        third = percent(row["worst10"])
        if target is not None:
            third = ", ".join(
                str(first_round(row["rounds"], curve, target) or "–") for curve in row["accuracy"]
            )
        spread = f"{100 * min(last):.1f} to {100 * max(last):.1f}"
        validation = f"{100 * max(row['validation']):.1f}, {100 * min(row['validation']):.1f}"
        lines.append(
            [name, percent(last), third, spread, validation, starred(row["chosen"], row["points"])]
        )
    lines.append(
        [
            "the largest class of a client",
            percent(result["largest_class"]),
            *["–"] * (len(head) - 2),
        ]
    )
    return markdown_table(head, lines)


def first_round(rounds: Sequence[int], curve: Sequence[float], target: float) -> int | None:
    """Return the first evaluated round of at least the target accuracy, or None."""
    return next(
        (number for number, value in zip(rounds, curve, strict=True) if value >= target), None
    )


CLAIMS = {
    "personal": (
        ("Ditto", "FedAvg", "Ditto is more accurate than FedAvg (Li et al. 2021)"),
        ("Ditto", "local-only", "and than local training"),
        ("APFL", "FedAvg", "APFL is more accurate than FedAvg (Deng et al. 2020)"),
        (
            "pFedMe",
            "pFedMe, its shared model",
            "pFedMe's personal models beat its shared one (Dinh et al. 2020)",
        ),
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
"""Orderings that the papers report: the better method, the other one, and the text."""


def verdicts(result: Result) -> str:
    """Return a table of whether each ordering is seen in every seed, in none, or in some."""
    lines, study = [], result["study"]
    for better, other, text in CLAIMS[study]:
        pairs = zip(*(result["methods"][name]["accuracy"] for name in (better, other)), strict=True)
        # Speed counts in the shared task, so the mean over the curve is compared, as in tuning.
        value = np.mean if study == "shared" else (lambda curve: curve[-1])
        gains = [float(value(a) - value(b)) for a, b in pairs]
        seen = "yes" if min(gains) > 0 else ("no" if max(gains) <= 0 else "not in every seed")
        lines.append([text, seen, signed(gains)])
    return markdown_table(["ordering", "seen here", "difference by seed, points"], lines)


TEXT = {
    "personal": """All {clients} clients take part in every round. Each has {classes} classes
and {examples} training examples. They train a network with one hidden layer of {width} for
{rounds} rounds of {epochs} epochs, in batches of {batch_size}, by plain SGD. A client is tested
on {test} test examples of its own classes, and the table has the mean over clients.""",
    "shared": """In every round {cohort} of {clients} clients take part. Each has {classes}
classes and {examples} training examples. They train a logistic regression, as in SCAFFOLD's
experiments, for {rounds} rounds of {epochs} epochs, in batches of {batch_size}, by plain SGD.
Accuracy is on the full test set, of which a local model knows {classes} classes. Points are
chosen, and orderings are decided, by the mean accuracy over the curve. The table has the last
round. SCAFFOLD sends twice as much in a round as the others. We moved all grids up once, after
a first run in which FedAvg's best rate was the largest.""",
}


PROTOCOL = """The data are {data}. Every method has {points} points. Each point runs once with
seed {tuning_seed}, and is scored on {validation} validation examples of each client that no run
trains on. The best point trains for seeds {seeds}, which draw clients and start. The table has
mean ± standard deviation over seeds. A star marks an end of the grid, beyond which better
points may lie."""

STUDIES = {
    task: Study(functools.partial(run, task), markdown, minutes=minutes)
    for task, minutes in {"personal": 5.0, "shared": 3.0}.items()
}

if __name__ == "__main__":
    command("methods", __doc__, STUDIES)
