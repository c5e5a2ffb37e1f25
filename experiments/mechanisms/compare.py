"""Independent against banded noise with 10,000 clients, and fixed against adaptive clip bounds on CIFAR-10.

python -m experiments.mechanisms.compare --task noise
python -m experiments.mechanisms.compare --task clip
python -m experiments.mechanisms.compare --render

Both mechanisms get the same points at the same epsilon; each point trains once and is scored on validation examples
that no run trains on. The best point trains anew for every seed and meets the test examples once.
"""

import dataclasses
import datetime
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
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
from jaxfl._validate import check_path, checked
from jaxfl.algorithms import fedavg, local_only
from jaxfl.data import Dataset, iid, load
from jaxfl.models import lenet, mlp
from jaxfl.privacy import AdaptiveClip, Mechanism, Poisson, plan
from jaxfl.privacy.planning import Plan
from jaxfl.run.report import run_folder
from jaxfl.types import Algorithm, Clients, Model

HERE = pathlib.Path(__file__).parent
TUNING_SEED = 100
EPSILONS = (2.0, 8.0)


class Setting(NamedTuple):
    """A task."""

    data: str
    clients: int
    examples: int
    """Of each client, to train on."""
    validation: int
    cohort: int
    batch_size: int
    steps: int
    rounds: int
    rates: tuple[float, ...]
    clips: tuple[float, ...]
    quantiles: tuple[float, ...]
    """In place of `clips` where the bound adapts."""
    free_rates: tuple[float, ...]
    """Where nothing is clipped."""
    alone: int
    """Clients that train alone."""
    alone_steps: int
    """Between two scores of theirs."""


SETTINGS = {
    "noise": Setting(
        data="fashion_mnist", clients=10_000, examples=5, validation=1, cohort=1000, batch_size=5, steps=2, rounds=200,
        rates=(0.1, 0.3), clips=(0.3, 1.0, 3.0), quantiles=(), free_rates=(0.1, 0.3, 1.0), alone=1000, alone_steps=5,
    ),
    "clip": Setting(
        data="cifar10", clients=1000, examples=40, validation=10, cohort=200, batch_size=10, steps=2, rounds=30,
        rates=(0.1, 0.3, 1.0), clips=(0.3, 0.7, 1.5), quantiles=(0.1, 0.5, 0.9), free_rates=(0.1, 0.3, 1.0),
        alone=25, alone_steps=20,
    ),
}  # fmt: skip


class Cell(NamedTuple):
    """A line of the table: what is tuned, and what it adds to the model."""

    method: Candidate
    epsilon: float = math.inf
    noise: Plan | None = None


def cells(task: str, model: Model, setting: Setting) -> dict[str, Cell]:
    """Both mechanisms at every epsilon, and two ceilings."""
    found: dict[str, Cell] = {}
    fixed = grid(rate=setting.rates, clip=setting.clips)
    numbers: dict[str, Any] = {"clients": setting.clients, "cohort": setting.cohort, "rounds": setting.rounds}

    def averaged(rate: float, mechanism: Mechanism) -> Algorithm:
        return fedavg(
            model, local=LocalSGD(optax.sgd(rate), setting.batch_size, steps=setting.steps), mechanism=mechanism
        )

    def clipped(mechanism: Mechanism) -> Candidate:
        return Candidate(lambda rate, clip: averaged(rate, dataclasses.replace(mechanism, clip=clip)), fixed)

    for epsilon in EPSILONS:
        (independent,) = plan(**numbers, epsilon=epsilon, kinds=("poisson",))
        if task == "noise":
            banded, *_ = plan(**numbers, epsilon=epsilon, kinds=("banded", "separated"))
            for name, best in (("independent noise", independent), ("banded noise", banded)):
                found[f"{name}, ε {epsilon:g}"] = Cell(clipped(best.mechanism), epsilon, best)
            continue
        adaptive = AdaptiveClip(
            clip=0.1, noise_multiplier=independent.noise_multiplier, sampling=Poisson(setting.cohort / setting.clients)
        )
        found[f"fixed clip, ε {epsilon:g}"] = Cell(clipped(independent.mechanism), epsilon, independent)
        method = Candidate(
            lambda rate, quantile, adaptive=adaptive: averaged(rate, dataclasses.replace(adaptive, quantile=quantile)),
            grid(rate=setting.rates, quantile=setting.quantiles),
        )
        found[f"adaptive clip, ε {epsilon:g}"] = Cell(method, epsilon, independent)
    free = Mechanism(sampling=Poisson(setting.cohort / setting.clients))
    near = {
        "noise": {"rate": setting.rates, "clip": setting.clips[-1:]},
        "clip": {"rate": setting.rates[1:2], "clip": setting.clips},
    }
    found["no noise"] = Cell(clipped(free)._replace(points=grid(**near[task])))
    found["no noise, no clip"] = Cell(Candidate(lambda rate: averaged(rate, free), grid(rate=setting.free_rates)))
    return found


def clients_of(data: Dataset, setting: Setting, seed: int, *, held_out: bool) -> Clients:
    """Clients of equally many random examples, tested on held-out ones of their own or on test examples."""
    rows, test = (iid(labels, setting.clients, seed=seed) for labels in (data.train_labels, data.test_labels))
    rows = [own[: setting.examples + setting.validation] for own in rows]
    return split_clients(data, rows, test, setting.examples, held_out=held_out)


@checked(seeds=seeds_of, ceilings=seeds_of, out=check_path)
@dataclasses.dataclass(frozen=True)
class Config:
    """Which task."""

    task: Literal["noise", "clip"] = "noise"
    scale: Literal["smoke", "cpu"] = "cpu"
    """smoke: two points of each on digits, in seconds; writes no results."""
    seeds: tuple[int, ...] = (0, 1, 2)
    ceilings: tuple[int, ...] = (0,)
    """Seeds of runs without noise, and of clients that train alone."""
    out: pathlib.Path = pathlib.Path("runs/mechanisms")
    """Folders of the runs, which a stopped command goes on with."""
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
    setting = SETTINGS[config.task]
    if config.scale == "smoke":
        compile_quickly()
        setting = setting._replace(
            data="digits", clients=60, examples=15, validation=5, cohort=30, rounds=8, alone=10,
            rates=(0.1, 0.3), clips=(0.3, 1.0), quantiles=(0.5, 0.9), free_rates=(0.1, 0.3),
        )  # fmt: skip
    data = load(setting.data)
    shape, small = data.train_inputs.shape[1:], config.task == "noise" or config.scale == "smoke"
    model = mlp(shape, data.classes, hidden=(64,)) if small else lenet(shape, data.classes)
    options: dict[str, Any] = {"devices": jax.devices()[:1], "chunk": 1, "progress": False}
    facts = {"task": config.task, "setting": setting._asdict(), "versions": versions(*PACKAGES)}

    def tuned(
        name: str, method: Candidate, setting: Setting, seeds: Sequence[int], rounds: int, every: int
    ) -> dict[str, Any]:
        """The best point and round on validation examples, then runs of that for the seeds."""
        folders = {**facts, "points": method.points}
        train, tests = {"eval_every": every, **options}, {}
        tuning = clients_of(data, setting, TUNING_SEED, held_out=True)
        folder = run_folder(config.out, name, folders, TUNING_SEED)
        results = sweep(
            jax.random.key(TUNING_SEED), method.build, method.points, tuning, rounds=rounds, folder=folder, **train
        )
        scores = np.array([[row["accuracy"] for row in result.metrics] for result in results])
        best, at = divmod(int(np.argmax(np.nan_to_num(scores, nan=-1.0))), scores.shape[1])
        chosen = {column: values[best] for column, values in method.points.items()}
        last = results[best].metrics[at]["round"]
        print(f"{name}: {chosen}, {last} rounds, validation {scores[:, at].round(3).tolist()}", flush=True)
        for seed in seeds:
            clients = clients_of(data, setting, seed, held_out=False)
            folder = run_folder(config.out, name, {**folders, "chosen": chosen, "rounds": last}, seed)
            tests[seed] = simulate(
                jax.random.key(seed),
                method.build(**chosen),
                clients,
                rounds=last,
                folder=folder,
                **train | {"eval_every": last},
            )
        bounds = [result.ledger.notes.get("clip") for result in tests.values()]
        return {
            "points": method.points,
            "validation": scores[:, at].tolist(),
            "chosen": chosen,
            "rounds": last,
            "seeds": list(seeds),
            "accuracy": [result.metrics[-1]["accuracy"] for result in tests.values()],
            "clip_at_the_end": [float(bound[-1]) for bound in bounds if bound is not None],
            "epsilon": tests[seeds[0]].statement["honest"]["aggregate"]["epsilon"],
        }

    rows = {}
    for name, cell in cells(config.task, model, setting).items():
        seeds = config.ceilings if math.isinf(cell.epsilon) else config.seeds
        rows[name] = tuned(name, cell.method, setting, seeds, setting.rounds, setting.rounds)
        if cell.noise is not None:
            rows[name] |= told(cell.noise)
        print(f"{name}: {percent(rows[name]['accuracy'])}", flush=True)
    alone = Candidate(
        lambda rate: local_only(model, local=LocalSGD(optax.sgd(rate), setting.batch_size, steps=setting.alone_steps)),
        grid(rate=setting.free_rates),
    )
    rows["local-only"] = tuned("local-only", alone, setting._replace(clients=setting.alone), config.ceilings, 20, 1)
    return {
        **facts,
        "setting": setting._asdict(),
        "tuning_seed": TUNING_SEED,
        "chance": 1 / data.classes,
        "rows": rows,
        "date": datetime.date.today().isoformat(),
    }


PACKAGES = ("jaxfl", "jax", "jaxlib", "optax", "numpy", "dp-accounting")


def told(noise: Plan) -> dict[str, Any]:
    """What a plan says of the noise."""
    return {
        "kind": noise.kind,
        "bands": getattr(noise.mechanism, "bands", 1),
        "sampling": noise.mechanism.sampling.describe(),
        "noise_multiplier": noise.noise_multiplier,
        "delta": noise.delta,
        "error": noise.error,
    }


PAIRS = {"noise": ("banded noise", "independent noise"), "clip": ("adaptive clip", "fixed clip")}


def table(result: Mapping[str, Any]) -> str:
    """The rows of a task as Markdown."""
    lines = [HEADER, ("---",) * len(HEADER)]
    for name, row in result["rows"].items():
        noise = [f"{row['noise_multiplier']:.3g}", f"{row['error']:.3g}"] if "error" in row else ["–", "–"]
        if row.get("bands", 1) > 1:
            name += f": {row['bands']} bands, {row['sampling']['kind']} sampling"
        accuracy = row["accuracy"]
        spread = f"{100 * min(accuracy):.1f} to {100 * max(accuracy):.1f}" if len(accuracy) > 1 else "–"
        validation = f"{100 * max(row['validation']):.1f}, {100 * min(row['validation']):.1f}"
        chosen = starred(row["chosen"], row["points"])
        if row["clip_at_the_end"]:
            chosen += f"; clip {np.mean(row['clip_at_the_end']):.2g} at the end"
        if name == "local-only":
            chosen += f", {row['rounds']} times {result['setting']['alone_steps']} steps"
        lines.append((name, *noise, percent(accuracy), spread, validation, chosen))
    lines.append(("chance", "–", "–", f"{100 * result['chance']:.1f}", "–", "–", "–"))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


HEADER = ("", "z", "noise in the model, over C", "accuracy %", "least to largest, %",
          "validation %, chosen and worst point", "chosen")  # fmt: skip


def differences(result: Mapping[str, Any]) -> str:
    """Of the two mechanisms, seed by seed."""
    (better, other), rows = PAIRS[result["task"]], result["rows"]
    lines = [f"| {better} minus {other}, points | by seed | mean | noise in the model |", "|---|---|---|---|"]
    for epsilon in EPSILONS:
        one, two = (rows[f"{name}, ε {epsilon:g}"] for name in (better, other))
        gains = 100 * (np.array(one["accuracy"]) - np.array(two["accuracy"]))
        ratio = f"{one['error'] / two['error']:.2f} times" if result["task"] == "noise" else "–"
        by_seed = ", ".join(f"{gain:+.1f}" for gain in gains)
        lines.append(f"| ε {epsilon:g} | {by_seed} | {gains.mean():+.1f} | {ratio} |")
    return "\n".join(lines)


def render() -> str:
    """The README, all of whose numbers are those of the result files."""
    parts = [INTRODUCTION]
    for task in SETTINGS:
        path = HERE / "results" / f"{task}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        rows, facts = result["rows"], {name: result[name] for name in ("tuning_seed", "date")}
        one, two = (rows[f"{name}, ε {EPSILONS[0]:g}"] for name in PAIRS[task])
        facts |= {"points": len(one["validation"]), "delta": two["delta"], "bound": PAIRS[task][0]}
        facts["seeds"] = ", ".join(map(str, one["seeds"]))
        facts["ceilings"] = ", ".join(map(str, rows["no noise"]["seeds"]))
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        parts += [TEXT[task].format(**result["setting"], **facts), PROTOCOL.format(**result["setting"], **facts)]
        parts += [table(result), differences(result), "{date}; {versions}.".format(**facts)]
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """# Mechanisms beside each other

`python -m experiments.mechanisms.compare --render` writes this from `results/*.json`.

```
TFDS_DATA_DIR=... python -m experiments.mechanisms.compare --task noise
TFDS_DATA_DIR=... python -m experiments.mechanisms.compare --task clip
```"""

TEXT = {
    "noise": """## Independent or banded noise, with {clients} clients

{data}; {examples} random training examples per client, a network with one hidden layer of 64. {rounds} rounds with
{cohort} of the clients expected in each, {steps} local steps on batches of {batch_size}. Independent noise is
Poisson-sampled; bands and their sampler are those that `plan` finds best for the budget. The noise in the model is
`plan`'s: the root mean square over rounds, per coordinate, in clip bounds. Clip bounds were tried from 0.1 to 1 at ε 2
first, and moved up since the largest was the best.""",
    "clip": """## A fixed or an adaptive clip bound, on CIFAR-10

{clients} clients with {examples} random training examples each, LeNet. {rounds} rounds with {cohort} of the clients
expected in each by Poisson sampling, {steps} local steps on batches of {batch_size}. The adaptive bound starts at 0.1,
has the paper's rate of 0.2, and a quantile that is tuned where the fixed bound is; z covers update and bit together.
The noise in the model is `plan`'s, in bounds that do not move: the root mean square over rounds, per coordinate. So few
rounds limit the accuracy more than the noise does: see the rows without. Bounds were tried from 0.05 to 0.5, and rates
from 0.03 to 0.3, for a fixed bound in 50 rounds at ε 2 first, and moved up since the
largest were the best.""",
}

PROTOCOL = """Client-level ε by zero-out, δ = {delta:g}. Both mechanisms have the same {points} points at each ε, each
tried once, with seed {tuning_seed}, on validation examples that no run trains on, {validation} per client; the best
trains for seeds {seeds}, which draw clients, start and noise. Without noise fewer points are tried, and the seeds are
{ceilings}. Local-only are {alone} clients of as many examples, for the best number of steps. Mean ± standard deviation
over seeds. A star marks an end of the grid, beyond which there may be better."""


if __name__ == "__main__":
    main(cli(Config, __doc__))
