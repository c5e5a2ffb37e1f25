"""Comparisons of independent and banded noise, and of fixed and adaptive clip bounds.

python -m experiments.mechanisms noise
python -m experiments.mechanisms clip

Both mechanisms get equally many points at the same epsilon. Each point trains once, and is scored
on validation examples that no run trains on. The best point then trains for every seed, and reads
the test examples once.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.common import choose, percent, run_each, split_clients, starred, versions
from experiments.study import (
    PACKAGES,
    Options,
    Result,
    Study,
    command,
    dated,
    listed,
    markdown_table,
    signed,
)
from jaxfl import Candidate, LocalSGD, grid, sweep
from jaxfl.algorithms import fedavg, local_only
from jaxfl.data import Dataset, iid, load
from jaxfl.models import lenet, mlp
from jaxfl.privacy import AdaptiveClip, Mechanism, Poisson, plan
from jaxfl.privacy.accounting.planning import Plan
from jaxfl.run.folder import run_folder
from jaxfl.types import Algorithm, Clients, Model

TUNING_SEED = 100
EPSILONS = (2.0, 8.0)


class Setting(NamedTuple):
    """Settings of a task."""

    data: str
    clients: int
    examples: int
    """Number of training examples of each client."""
    validation: int
    """Number of validation examples of each client."""
    cohort: int
    """Expected number of participants in a round."""
    batch_size: int
    steps: int
    rounds: int
    rates: tuple[float, ...]
    clips: tuple[float, ...]
    quantiles: tuple[float, ...]
    """Quantiles to try instead of `clips` if the bound adapts."""
    free_rates: tuple[float, ...]
    """Learning rates to try if nothing is clipped."""
    alone: int
    """Number of clients that train alone."""
    alone_steps: int
    """Local steps between two evaluations of clients that train alone."""


SETTINGS = {
    "noise": Setting(
        data="fashion_mnist", clients=10_000, examples=5, validation=1, cohort=1000, batch_size=5,
        steps=2, rounds=200, rates=(0.1, 0.3), clips=(0.3, 1.0, 3.0), quantiles=(),
        free_rates=(0.1, 0.3, 1.0), alone=1000, alone_steps=5,
    ),
    "clip": Setting(
        data="cifar10", clients=1000, examples=40, validation=10, cohort=200, batch_size=10,
        steps=2, rounds=30, rates=(0.1, 0.3, 1.0), clips=(0.3, 0.7, 1.5),
        quantiles=(0.1, 0.5, 0.9), free_rates=(0.1, 0.3, 1.0), alone=25, alone_steps=20,
    ),
}  # fmt: skip


class Cell(NamedTuple):
    """A line of the table: the tuned method, its epsilon, and the plan of its noise."""

    method: Candidate
    epsilon: float = math.inf
    noise: Plan | None = None


def cells(task: str, model: Model, setting: Setting) -> dict[str, Cell]:
    """Return a task's lines by name: both mechanisms at each epsilon, and two without noise."""
    found: dict[str, Cell] = {}
    fixed = grid(rate=setting.rates, clip=setting.clips)
    numbers: dict[str, Any] = {
        "clients": setting.clients,
        "cohort": setting.cohort,
        "rounds": setting.rounds,
    }

    def averaged(rate: float, mechanism: Mechanism) -> Algorithm:
        return fedavg(
            model,
            local=LocalSGD(optax.sgd(rate), setting.batch_size, steps=setting.steps),
            mechanism=mechanism,
        )

    def clipped(mechanism: Mechanism) -> Candidate:
        return Candidate(
            lambda rate, clip: averaged(rate, dataclasses.replace(mechanism, clip=clip)), fixed
        )

    for epsilon in EPSILONS:
        (independent,) = plan(**numbers, epsilon=epsilon, kinds=("poisson",))
        if task == "noise":
            banded, *_ = plan(**numbers, epsilon=epsilon, kinds=("banded", "separated"))
            for name, best in (("independent noise", independent), ("banded noise", banded)):
                found[f"{name}, ε {epsilon:g}"] = Cell(clipped(best.mechanism), epsilon, best)
            continue
        adaptive = AdaptiveClip(
            clip=0.1,
            noise_multiplier=independent.noise_multiplier,
            sampling=Poisson(setting.cohort / setting.clients),
        )
        found[f"fixed clip, ε {epsilon:g}"] = Cell(
            clipped(independent.mechanism), epsilon, independent
        )
        method = Candidate(
            lambda rate, quantile, adaptive=adaptive: averaged(
                rate, dataclasses.replace(adaptive, quantile=quantile)
            ),
            grid(rate=setting.rates, quantile=setting.quantiles),
        )
        found[f"adaptive clip, ε {epsilon:g}"] = Cell(method, epsilon, independent)
    free = Mechanism(sampling=Poisson(setting.cohort / setting.clients))
    near = {
        "noise": {"rate": setting.rates, "clip": setting.clips[-1:]},
        "clip": {"rate": setting.rates[1:2], "clip": setting.clips},
    }
    found["no noise"] = Cell(clipped(free)._replace(points=grid(**near[task])))
    found["no noise, no clip"] = Cell(
        Candidate(lambda rate: averaged(rate, free), grid(rate=setting.free_rates))
    )
    return found


def clients_of(data: Dataset, setting: Setting, seed: int, *, held_out: bool) -> Clients:
    """Make clients with equally many random examples.

    With `held_out` clients are tested on their validation examples. Otherwise they are tested on
    test examples, which are dealt at random.
    """
    rows, test = (
        iid(labels, setting.clients, seed=seed) for labels in (data.train_labels, data.test_labels)
    )
    rows = [own[: setting.examples + setting.validation] for own in rows]
    return split_clients(data, rows, test, setting.examples, held_out=held_out)


def run(task: str, options: Options) -> Result:
    """Tune and run each line of a task, "noise" or "clip".

    References without noise, and clients that train alone, run for the first seed only.
    """
    setting = SETTINGS[task]
    if options.smoke:
        setting = setting._replace(
            data="digits", clients=60, examples=15, validation=5, cohort=30, rounds=4, alone=10,
            rates=(0.1, 0.3), clips=(0.3, 1.0), quantiles=(0.5, 0.9), free_rates=(0.1, 0.3),
        )  # fmt: skip
    data = load(setting.data)
    shape, small = data.train_inputs.shape[1:], task == "noise" or options.smoke
    model = mlp(shape, data.classes, hidden=(64,)) if small else lenet(shape, data.classes)
    facts = {"task": task, "setting": setting._asdict(), "versions": versions(*PACKAGES)}

    def tuned(
        name: str,
        method: Candidate,
        setting: Setting,
        seeds: Sequence[int],
        rounds: int,
        every: int,
    ) -> dict[str, Any]:
        """Choose the point and round that score best on validation examples, and run them.

        The result is a row with the choice, and with accuracies for `seeds`.
        """
        config = {**facts, "points": method.points}
        train: dict[str, Any] = {
            "eval_every": every,
            "devices": jax.devices()[:1],
            "chunk": 1,
            "progress": False,
        }
        tuning = clients_of(data, setting, TUNING_SEED, held_out=True)
        folder, key = (
            run_folder(options.out, name, config, TUNING_SEED),
            jax.random.key(TUNING_SEED),
        )
        results = sweep(
            key, method.build, method.points, tuning, rounds=rounds, folder=folder, **train
        )
        best = choose(method.points, results)
        print(
            f"{name}: {best.chosen}, {best.rounds} rounds, "
            f"validation {np.round(best.validation, 3)}",
            flush=True,
        )
        tests = run_each(
            {name: lambda _: method.build(**best.chosen)},
            lambda seed: clients_of(data, setting, seed, held_out=False),
            rounds=best.rounds,
            seeds=seeds,
            out=options.out,
            config={**config, "chosen": best.chosen, "rounds": best.rounds},
            **train | {"eval_every": best.rounds},
        )[name]
        bounds = [result.ledger.notes.get("clip") for result in tests]
        return best.facts | {
            "rounds": best.rounds,
            "seeds": list(seeds),
            "accuracy": [result.metrics[-1]["accuracy"] for result in tests],
            "clip_at_the_end": [float(bound[-1]) for bound in bounds if bound is not None],
            "epsilon": tests[0].statement["honest"]["aggregate"]["epsilon"],
        }

    rows = {}
    for name, cell in cells(task, model, setting).items():
        seeds = options.seeds[: 1 if math.isinf(cell.epsilon) else None]
        rows[name] = tuned(name, cell.method, setting, seeds, setting.rounds, setting.rounds)
        if cell.noise is not None:
            rows[name] |= told(cell.noise)
        print(f"{name}: {percent(rows[name]['accuracy'])}", flush=True)
    alone = Candidate(
        lambda rate: local_only(
            model, local=LocalSGD(optax.sgd(rate), setting.batch_size, steps=setting.alone_steps)
        ),
        grid(rate=setting.free_rates),
    )
    rows["local-only"] = tuned(
        "local-only", alone, setting._replace(clients=setting.alone), options.seeds[:1], 20, 1
    )
    return {
        "setting": setting._asdict(),
        "tuning_seed": TUNING_SEED,
        "chance": 1 / data.classes,
        "rows": rows,
    }


def told(noise: Plan) -> dict[str, Any]:
    """Return what a result stores of a plan: bands, sampling, noise and its error."""
    return {
        "kind": noise.kind,
        "bands": getattr(noise.mechanism, "bands", 1),
        "sampling": noise.mechanism.sampling.describe(),
        "noise_multiplier": noise.noise_multiplier,
        "delta": noise.delta,
        "error": noise.error,
    }


PAIRS = {"noise": ("banded noise", "independent noise"), "clip": ("adaptive clip", "fixed clip")}
"""Mechanisms of each task. The first one is compared with the second one."""


def markdown(result: Result) -> str:
    """Return the README's text for a task."""
    task, rows = result["study"], result["rows"]
    one, two = (rows[f"{name}, ε {EPSILONS[0]:g}"] for name in PAIRS[task])
    facts = {
        "points": len(one["validation"]),
        "delta": two["delta"],
        "tuning_seed": result["tuning_seed"],
    }
    facts |= {"seeds": listed(one["seeds"]), "ceilings": listed(rows["no noise"]["seeds"])}
    texts = [text.format(**result["setting"], **facts) for text in (TEXT[task], PROTOCOL)]
    return "\n\n".join([*texts, table(result), differences(result), f"{dated(result)}."])


def table(result: Result) -> str:
    """Return the table with the tuned row of each line, and chance."""
    lines = []
    for name, row in result["rows"].items():
        noise = (
            [f"{row['noise_multiplier']:.3g}", f"{row['error']:.3g}"]
            if "error" in row
            else ["–", "–"]
        )
        if row.get("bands", 1) > 1:
            name += f": {row['bands']} bands, {row['sampling']['kind']} sampling"
        accuracy = row["accuracy"]
        spread = (
            f"{100 * min(accuracy):.1f} to {100 * max(accuracy):.1f}" if len(accuracy) > 1 else "–"
        )
        validation = f"{100 * max(row['validation']):.1f}, {100 * min(row['validation']):.1f}"
        chosen = starred(row["chosen"], row["points"])
        if row["clip_at_the_end"]:
            chosen += f"; clip {np.mean(row['clip_at_the_end']):.2g} at the end"
        if name == "local-only":
            chosen += f", {row['rounds']} times {result['setting']['alone_steps']} steps"
        lines.append([name, *noise, percent(accuracy), spread, validation, chosen])
    return markdown_table(
        HEADER, [*lines, ["chance", "–", "–", f"{100 * result['chance']:.1f}", "–", "–", "–"]]
    )


HEADER = (
    "",
    "z",
    "noise in the model, over C",
    "accuracy %",
    "least to largest, %",
    "validation %, chosen and worst point",
    "chosen",
)


def differences(result: Result) -> str:
    """Return a table of the first mechanism's accuracy minus the second's, by epsilon and seed."""
    (better, other), rows, lines = PAIRS[result["study"]], result["rows"], []
    for epsilon in EPSILONS:
        one, two = (rows[f"{name}, ε {epsilon:g}"] for name in (better, other))
        gains = np.subtract(one["accuracy"], two["accuracy"])
        ratio = f"{one['error'] / two['error']:.2f} times" if result["study"] == "noise" else "–"
        lines.append([f"ε {epsilon:g}", signed(gains), signed([gains.mean()]), ratio])
    head = [f"{better} minus {other}, points", "by seed", "mean", "noise in the model"]
    return markdown_table(head, lines)


TEXT = {
    "noise": """The data are {data}. Each of {clients:,} clients has {examples} random training
examples, and the network has one hidden layer of 64. A run has {rounds} rounds with an expected
cohort of {cohort}, and {steps} local steps on batches of {batch_size}. Independent noise is
Poisson-sampled. The bands and their sampler are the ones that `plan` finds best for the budget.
The noise in the model comes from `plan`: it is the root mean square over rounds, per
coordinate, in units of the clip bound. Clip bounds were first 0.1 to 1, at ε 2. We moved them
up, because the largest was best.""",
    "clip": """The data are {data}. Each of {clients:,} clients has {examples} random training
examples, and the network is LeNet. A run has {rounds} rounds with an expected cohort of
{cohort} by Poisson sampling, and {steps} local steps on batches of {batch_size}. The adaptive
bound starts at 0.1 and has the paper's rate of 0.2. Its quantile is tuned, as the fixed bound
is. z covers update and bit together. The noise in the model comes from `plan`, for bounds that
do not move: it is the root mean square over rounds, per coordinate. The few rounds limit the
accuracy more than the noise does, as the rows without noise show. For a fixed bound in 50
rounds at ε 2, bounds were first 0.05 to 0.5, and rates 0.03 to 0.3. We moved both up, because
the largest were best.""",
}

PROTOCOL = """ε is client-level and zero-out, with δ = {delta:g}. Both mechanisms have {points}
points at each ε. Each point runs once with seed {tuning_seed}, and is scored on {validation}
validation examples per client that no run trains on. The best point trains for seeds {seeds},
which draw clients, start and noise. The rows without noise have fewer points, and their list of
seeds is {ceilings}. Local-only has {alone} clients with equally many examples, and the best
number of steps. The table has mean ± standard deviation over seeds. A star marks an end of the
grid, beyond which better points may lie."""


STUDIES = {
    task: Study(functools.partial(run, task), markdown, minutes=minutes)
    for task, minutes in {"noise": 40.0, "clip": 40.0}.items()
}

if __name__ == "__main__":
    command("mechanisms", __doc__, STUDIES)
