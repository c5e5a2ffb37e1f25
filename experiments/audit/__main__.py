"""Audits of honest statements and of published claims, with epsilons from above and from below.

python -m experiments.audit honest
python -m experiments.audit published

The task is digits, with a network of one hidden layer. Bounds from below have 95% confidence, so on
average at most one run of twenty refutes a true statement. A claim that every run refutes is very
likely false.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from experiments.common import versions
from experiments.study import Options, Result, Study, command, dated, markdown_table
from jaxfl import LocalSGD, sweep
from jaxfl._support.backend import compile_quickly
from jaxfl.algorithms import (
    adp_pfl_paper,
    centaur,
    dp_fedavg,
    dp_pfeddsu_paper,
    feddpa,
    feddpa_paper,
    padpfl_paper,
    pdp_fl_paper,
)
from jaxfl.algorithms.feddpa import paper_noise_multiplier
from jaxfl.algorithms.pdp_fl import Budgets
from jaxfl.data import iid, load, make_clients, matching
from jaxfl.models import mlp
from jaxfl.privacy import (
    AdaptiveClip,
    BallsInBins,
    BandedNoise,
    Canaries,
    CyclicPoisson,
    Full,
    Mechanism,
    Poisson,
    calibrate,
    paper_noise,
    round_budgets,
)
from jaxfl.types import Algorithm, Clients

CLIENTS, ROUNDS, CLIP, DELTA = 40, 20, 0.5, 1e-5
FEDDPA_DELTA = 0.1
"""Delta of the published code, for which its rule gives the noise."""
CANARIES = {"honest": 1000, "published": 8000}
MODEL = mlp((8, 8, 1), 10, hidden=(1024,))
LOCAL = LocalSGD(optax.sgd(0.1), batch_size=8)


def honest() -> dict[str, tuple[Algorithm, int]]:
    """Return methods with an honest statement by name, and the number of runs of each."""
    run: dict[str, Any] = {"clients": CLIENTS, "rounds": ROUNDS}

    def noisy(target: float, mechanism: Mechanism) -> Mechanism:
        z = calibrate(target, mechanism=mechanism, **run)
        return dataclasses.replace(mechanism, noise_multiplier=z)

    plain: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 1.0}
    base = dp_fedavg(MODEL, local=LOCAL, sampling=Full(), **plain)

    def by(target: float, mechanism: Mechanism, method: Algorithm = base) -> Algorithm:
        return method._replace(mechanism=noisy(target, mechanism))

    private: dict[str, Any] = {"local": LOCAL, "sampling": Full()} | plain
    poisson = Mechanism(sampling=Poisson(0.25), **plain)
    cyclic = BandedNoise(bands=4, sampling=CyclicPoisson(0.1, 4), **plain)
    return {
        "DP-FedAvg, every client in all rounds": (by(1.0, Mechanism(**plain)), 100),
        "DP-FedAvg, Poisson sampling": (by(4.0, poisson), 100),
        "DP-FedAvg, noise on a grid": (by(4.0, dataclasses.replace(poisson, noise="grid")), 20),
        "DP-FedAvg, adaptive clipping": (
            by(4.0, AdaptiveClip(bit_noise=8.0, sampling=Poisson(0.25), **plain)),
            20,
        ),
        "DP-FedAvg, four bands, cyclic Poisson": (by(4.0, cyclic), 20),
        "DP-FedAvg, balls in bins": (by(4.0, Mechanism(sampling=BallsInBins(4), **plain)), 20),
        "FedDPA": (by(4.0, poisson, feddpa(MODEL, **private)), 20),
        "CENTAUR": (by(4.0, poisson, centaur(MODEL, **private | {"head": LOCAL})), 20),
    }


def published(clients: Clients) -> dict[str, tuple[Algorithm, int]]:
    """Return methods as printed, by name, and the number of runs of each.

    Each paper's own rule gives the noise for a claimed epsilon of 1. DP-pFedDSU's rule leaves a
    constant open, so its noise is calibrated.
    """
    smallest, number = int(np.min(clients.train_size)), int(np.sum(clients.train_size))
    shared: dict[str, Any] = {"local": LOCAL, "sampling": Full(), "clip": CLIP, "delta": DELTA}
    rule: dict[str, Any] = {
        "examples": number,
        "batch_size": 8,
        "epochs": 2,
        "rounds": ROUNDS,
        "rate": 1.0,
    }
    sigma = paper_noise_multiplier(1.0, delta=FEDDPA_DELTA, **rule)
    z = calibrate(1.0, clients=CLIENTS, rounds=ROUNDS, delta=DELTA)
    budgets = round_budgets(1.0, ROUNDS)
    asked = Budgets(np.full(CLIENTS, 1.0), np.ones(CLIENTS))
    return {
        "FedDPA, noise by example and step": (
            feddpa_paper(
                MODEL, noise_multiplier=sigma, clients=CLIENTS, claim=1.0,
                **shared | {"delta": FEDDPA_DELTA}), 3),
        "DP-pFedDSU, noise on the private mask": (
            dp_pfeddsu_paper(MODEL, noise_multiplier=z, clients=CLIENTS, claim=1.0, **shared), 3),
        "ADP-PFL, sensitivity C/m": (
            adp_pfl_paper(
                MODEL, noise=paper_noise(budgets, delta=DELTA) / CLIENTS, sensitivity="C",
                claim=1.0, **shared), 3),
        "PADPFL, sensitivity 2C/m": (
            padpfl_paper(MODEL, epsilon=1.0, smallest=smallest, rounds=ROUNDS, **shared), 3),
        "PDP-FL, sensitivity 2C/m": (
            pdp_fl_paper(MODEL, budgets=asked, epsilon_max=1.0, smallest=smallest, **shared), 3),
    }  # fmt: skip


def clients() -> Clients:
    """Make clients that share all of digits evenly."""
    data = load("digits")
    lists = iid(data.train_labels, CLIENTS, seed=0)
    return make_clients(data, lists, matching(lists, data.train_labels, data.test_labels, seed=0))


def run(part: str, options: Options) -> Result:
    """Audit every method of a part, "honest" or "published", with its own number of seeds."""
    # Otherwise most of the time would be spent in the compiler.
    compile_quickly()
    everybody = clients()
    methods, canaries = honest() if part == "honest" else published(everybody), CANARIES[part]
    if options.smoke:
        methods, canaries = {name: (method, 1) for name, (method, _) in methods.items()}, 100
    rows = {}
    for name, (method, count) in methods.items():
        rows[name] = audit(method, everybody, count, canaries)
        print(f"{name}: {rows[name]}", flush=True)
    return {
        "setting": {
            "clients": CLIENTS,
            "rounds": ROUNDS,
            "clip": CLIP,
            "canaries": canaries,
            "data": "digits",
        },
        "seeds": list(range(max(count for _, count in methods.values()))),
        "methods": rows,
        "versions": versions("jax", "jaxfl", "jax-privacy", "dp-accounting"),
    }


def audit(method: Algorithm, everybody: Clients, count: int, canaries: int) -> dict[str, Any]:
    """Audit a method once for each of the seeds 0 to `count` - 1, in one program.

    Up to three further runs have no canaries, and show what canaries cost in accuracy.

    Args:
        method: The method.
        everybody: Clients of all runs.
        count: Number of seeds.
        canaries: Number of canaries in a run.
    """
    keys = jax.vmap(jax.random.key)(np.arange(count))
    build: Callable[..., Algorithm] = lambda: method  # noqa: E731
    options: dict[str, Any] = {"eval_every": ROUNDS, "progress": False, "audit": Canaries(canaries)}
    results = sweep(keys, build, {}, everybody, rounds=ROUNDS, **options)
    alone = sweep(
        keys[: min(count, 3)], build, {}, everybody, rounds=ROUNDS, **options | {"audit": None}
    )
    statement = results[0].statement
    claim = statement["claim"]
    return {
        "delta": statement["delta"],
        "stated": statement["honest"]["aggregate"]["epsilon"],
        "reason": statement["honest"]["aggregate"]["reason"],
        "claimed": None if claim is None else claim["epsilon"],
        "at_least": [round(result.statement["audit"]["at_least"], 4) for result in results],
        "estimate": [round(result.statement["audit"]["estimate"], 4) for result in results],
        "accuracy": [round(float(result.metrics[-1]["accuracy"]), 4) for result in results[:3]],
        "accuracy_without": [round(float(result.metrics[-1]["accuracy"]), 4) for result in alone],
    }


def markdown(result: Result) -> str:
    """Return the README's text for the part that a result belongs to."""
    text = TEXT[result["study"]].format(**result["setting"])
    return f"{text}\n\n{table(result)}\n\n{dated(result)}; {result['seconds']} seconds."


HEADER = (
    "method",
    "δ",
    "claimed",
    "from above",
    "from below: median, largest",
    "runs above claim, statement",
    "estimate",
    "accuracy % (without canaries)",
)


def table(result: Result) -> str:
    """Return the table with a line for each audited method."""
    lines = []
    for name, row in result["methods"].items():
        bounds, limits = np.array(row["at_least"]), (row["claimed"], row["stated"])
        beyond = [
            f"{np.sum(bounds > limit)} of {len(bounds)}" if isinstance(limit, float) else "–"
            for limit in limits
        ]
        accuracy, without = (
            f"{100 * float(np.mean(row[key])):.1f}" for key in ("accuracy", "accuracy_without")
        )
        claimed, stated = (
            "–" if limit is None else "none" if limit == "inf" else f"{limit:.3g}"
            for limit in limits
        )
        below, estimate = (
            f"{np.median(bounds):.2f}, {bounds.max():.2f}",
            f"{np.median(row['estimate']):.2f}",
        )
        lines.append(
            [
                name,
                f"{row['delta']:g}",
                claimed,
                stated,
                below,
                ", ".join(beyond),
                estimate,
                f"{accuracy} ({without})",
            ]
        )
    return markdown_table(HEADER, lines)


TEXT = {
    "honest": """The {clients} clients share all of {data} evenly. A run has {rounds} rounds
with clip bound {clip}, a network with one hidden layer, and {canaries} canaries. Epsilons are
client-level (zero-out), against an observer of all sums. A bound may exceed a true statement in
one run of twenty. A bound far below the statement proves nothing, because this many canaries
can prove only so much, however weak the noise.""",
    "published": """The clients are the same, with {canaries} canaries. Each method runs as
printed, with noise by the paper's rule for a claim of 1. The claim covers all rounds, except
that PDP-FL's rule counts one round. DP-pFedDSU's rule leaves a constant open, so its noise is
calibrated. Claim, theorem and bound have the same delta. PADPFL and PDP-FL claim an epsilon for
one example, and FedDPA's rule counts examples too. Canaries are clients, so a bound above a
claim refutes the claim for clients. "None" means that no theorem gives a finite epsilon.
Canaries are visible in the sum only, so an observer of single uploads, or of the zeros of a
private mask, can prove more. A claim that is not refuted here may still be false.""",
}

STUDIES = {
    part: Study(functools.partial(run, part), markdown, minutes=minutes)
    for part, minutes in {"honest": 8.0, "published": 3.0}.items()
}

if __name__ == "__main__":
    command("audit", __doc__, STUDIES)
