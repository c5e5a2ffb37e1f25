"""The epsilons of FedDPA's published noise, and its accuracy with published, honest and no noise.

python -m experiments.feddpa noise
python -m experiments.feddpa reference
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.common import (
    dirichlet_clients,
    evaluated,
    fine_tuned,
    model_for,
    number,
    percent,
    starred,
    stopped,
    sweep_each,
    trained_alone,
)
from experiments.study import Options, Result, Study, command, dated, markdown_table, signed, source
from jaxfl import LocalSGD, spread
from jaxfl.algorithms import dp_fedavg, feddpa_paper
from jaxfl.algorithms.feddpa import paper_epsilon, paper_noise_multiplier
from jaxfl.data import Dataset, hold_out, load
from jaxfl.privacy import Full, Mechanism, calibrate, epsilon, planned_ledger
from jaxfl.types import Algorithm, ClientData, Clients, Model, Params

SIZES = {"CIFAR-10": 50_000, "SVHN": 73_257}
"""Number of training examples of each dataset."""
TUNING = 100
"""Seed of tuning runs. Results have other seeds."""
NO_CLIP = 1e6
"""Clip bound that is longer than any update."""
POINTS = 4
"""Number of tuning points of each private method."""
RANGES = {"rate": (3e-4, 3e-3), "clip": (1e-3, 0.5)}
"""Ranges of rates and clip bounds for tuning, equal for both private methods."""


class Setting(NamedTuple):
    """Settings of the published code, except for the network and the examples."""

    data: str = "cifar10"
    model: str = "lenet"
    clients: int = 10
    examples: int = 10_000
    """Number of training examples of all clients together."""
    rule_examples: int = 50_000
    """Number of examples by which the published rule sets its noise: the full training set."""
    rounds: int = 15
    alpha: float = 100.0
    batch_size: int = 16
    epochs: int = 2
    """Passes in each of FedDPA's two stages.

    The other methods, and the last update before a test, take as many passes as both stages.
    """
    alone: int = 15
    """Greatest number of rounds for clients that train alone. A round has one stage's passes."""
    learning_rate: float = 1e-3
    clip: float = 0.5
    epsilon: float = 1.0
    claimed_delta: float = 0.1
    """Delta of the published rule."""
    delta: float = 1e-5
    """Delta of honest epsilons."""

    @property
    def rule(self) -> dict[str, Any]:
        """Return the arguments of the published rule, except for delta."""
        numbers = {"batch_size": self.batch_size, "epochs": self.epochs, "rounds": self.rounds}
        return {"examples": self.rule_examples, "rate": 1.0} | numbers


class Bench:
    """Clients, and the functions that run and test methods on them."""

    def __init__(self, setting: Setting, options: Options) -> None:
        self.setting, self.options = setting, options
        self.data: Dataset = load(setting.data)
        self.model: Model = model_for(setting.model, self.data)

    # The bench lives as long as the program, so the cache leaks nothing.
    @functools.cache  # noqa: B019
    def clients(self, seed: int) -> Clients:
        """Make Dirichlet clients over a random part of the training examples."""
        own = self.setting
        return dirichlet_clients(
            self.data, own.clients, own.alpha, seed=seed, minimum=5, examples=own.examples
        )

    @functools.cache  # noqa: B019
    def held_out(self, seed: int) -> Clients:
        """Make clients that are tested on a held-out fifth of their training examples."""
        return hold_out(self.clients(seed), 0.2, seed=seed)

    def passes(self, epochs: int, rate: Any) -> LocalSGD:
        """Return training by Adam for some epochs, with a new state of Adam in every round."""
        return LocalSGD(optax.adam(rate), self.setting.batch_size, epochs)

    def build(self, method: str, noise_multiplier: Any, clip: Any, rate: Any) -> Algorithm:
        """Build "FedDPA" or "DP-FedAvg", tested after one more local update from the global model.

        Nothing of this update is sent.
        """
        own, private = self.setting, {"sampling": Full(), "delta": self.setting.delta}
        stage, whole = self.passes(own.epochs, rate), self.passes(2 * own.epochs, rate)
        if method == "DP-FedAvg":
            base = dp_fedavg(
                self.model, clip=clip, noise_multiplier=noise_multiplier, local=whole, **private
            )
            return fine_tuned(base, whole)
        noise: dict[str, Any] = {
            "clip": clip,
            "noise_multiplier": noise_multiplier,
            "clients": own.clients,
        }
        base = feddpa_paper(self.model, reg="code", local=stage, **noise, **private)

        def personalize(key: jax.Array, server: Any, client: Params, data: ClientData) -> Params:
            return base.client_update(key, server, client, data)[1]

        return base._replace(personalize=personalize)

    def rows(
        self, method: str, names: Sequence[str], points: Mapping[str, Sequence[float]]
    ) -> list[dict[str, Any]]:
        """Return a row for each point, with accuracies before and after the last local update.

        Args:
            method: "FedDPA" or "DP-FedAvg".
            names: Name of each row.
            points: Columns of numbers by argument of `build`.

        Returns:
            Rows with `method`, the point's numbers, and the epsilons of `bounds` and the statement.
            The lists `before` and `after` have a number for each seed.
        """
        own, build = self.setting, functools.partial(self.build, method)
        run: dict[str, Any] = self.run | {"seeds": self.options.seeds}
        results = sweep_each(method, build, points, self.clients, **run)

        def globally(**point: Any) -> Any:
            shared = build(**point)
            return shared._replace(personalize=lambda key, server, *_: server.params)

        left = [
            [(result.server, result.states) for result in of_seed]
            for of_seed in zip(*results, strict=True)
        ]
        before = [
            evaluated(globally, points, self.clients(seed), seed, states)
            for seed, states in zip(self.options.seeds, left, strict=True)
        ]
        rows = []
        for index, (name, of_point) in enumerate(zip(names, results, strict=True)):
            row: dict[str, Any] = {"method": name} | {
                column: float(of[index]) for column, of in points.items()
            }
            row["before"] = [of_seed[index] for of_seed in before]
            row["after"] = [result.metrics[-1]["accuracy"] for result in of_point]
            row |= bounds(row["noise_multiplier"], own)
            stated = of_point[0].statement["honest"]
            row |= {
                "honest": float(stated["aggregate"]["epsilon"]),
                "upload": float(stated["upload"]["epsilon"]),
            }
            rows.append(row)
        return rows

    @property
    def run(self) -> dict[str, Any]:
        """Return the arguments of `sweep_each` that all runs share, except for the seeds."""
        own = self.setting
        facts: dict[str, Any] = {
            "rounds": own.rounds,
            "eval_every": own.rounds,
            "out": self.options.out,
        }
        facts |= {"devices": jax.devices()[:1], "chunk": 1, "progress": False}
        return facts | {"config": own._asdict()}

    def tuned(self, method: str, noise_multiplier: float) -> dict[str, Any]:
        """Return a method's row at the clip bound and rate that are best on held-out examples."""
        points = spread(POINTS, **RANGES)
        points = {
            name: column[: 2 if self.options.smoke else None] for name, column in points.items()
        }
        columns = points | {"noise_multiplier": [noise_multiplier] * len(points["rate"])}
        run: dict[str, Any] = self.run | {
            "seeds": (TUNING,),
            "config": self.setting._asdict() | {"tuning": True},
        }
        results = sweep_each(
            method, functools.partial(self.build, method), columns, self.held_out, **run
        )
        scores = [result.metrics[-1]["accuracy"] for (result,) in results]
        chosen = {name: column[int(np.argmax(scores))] for name, column in points.items()}
        point = {"noise_multiplier": [noise_multiplier]} | {
            name: [value] for name, value in chosen.items()
        }
        (row,) = self.rows(method, [f"{method}, honest noise, tuned"], point)
        return row | {"points": points, "validation": scores, "chosen": starred(chosen, points)}

    def floors(self) -> dict[str, dict[str, Any]]:
        """Return the references by name: `untrained` and `local-only`.

        The first is tested after a local update of the untrained network. The second trains at the
        rate and for the passes that are best on held-out examples.
        """
        untrained, own = [], self.setting
        points = {"noise_multiplier": [0.0], "clip": [NO_CLIP], "rate": [own.learning_rate]}
        build = functools.partial(self.build, "DP-FedAvg")
        for seed in self.options.seeds:
            first = build(0.0, NO_CLIP, own.learning_rate).init(jax.random.key(seed), own.clients)
            untrained += evaluated(build, points, self.clients(seed), seed, [first])
        rates = [3e-4, 1e-3, 3e-3][: 2 if self.options.smoke else None]
        rows, facts = trained_alone(
            self.model,
            functools.partial(self.passes, own.epochs),
            rates,
            self.clients,
            rounds=own.alone,
            seeds=self.options.seeds,
            tuning_seed=TUNING,
            out=self.options.out,
            config=own._asdict(),
        )
        chosen = starred(facts["chosen"], facts["points"])
        alone = facts | {"chosen": chosen, "after": [row["accuracy"] for row in rows]}
        return {"untrained": {"after": untrained}, "local-only": alone}


def bounds(noise_multiplier: float, setting: Setting) -> dict[str, Any]:
    """Return a noise multiplier's epsilons for clients by PLD, and the rule's claim.

    `honest` and `same_delta` are zero-out for an observer of sums, at `delta` and at
    `claimed_delta`. `replace_one` is for an observer of sums, and `upload` for one of uploads, both
    at `delta`. Without noise all are infinite, and `replace_one` is missing.
    """
    if noise_multiplier == 0:
        return {"honest": math.inf, "same_delta": math.inf, "upload": math.inf, "claim": math.inf}
    mechanism = Mechanism(
        clip=setting.clip,
        client_noise=noise_multiplier / math.sqrt(setting.clients),
        sampling=Full(),
    )
    ledger = planned_ledger(mechanism, setting.clients, setting.rounds)
    at = {"honest": setting.delta, "same_delta": setting.claimed_delta}
    found: dict[str, Any] = {
        name: epsilon(ledger, mechanism, delta=delta).value for name, delta in at.items()
    }
    found["replace_one"] = epsilon(ledger, mechanism, delta=setting.delta, unit="example").value
    found["upload"] = epsilon(ledger, mechanism, delta=setting.delta, observer="upload").value
    return found | {
        "claim": paper_epsilon(noise_multiplier, delta=setting.claimed_delta, **setting.rule)
    }


def needed(setting: Setting, delta: float) -> float:
    """Return the noise multiplier that keeps the claimed epsilon at `delta`, by the accountant."""
    run: dict[str, Any] = {"clients": setting.clients, "rounds": setting.rounds, "sampling": Full()}
    return calibrate(setting.epsilon, delta=delta, **run)


def noise(options: Options) -> Result:
    """Return the published rule's claims and its noise's epsilons, from the accountants alone."""
    rows = []
    for name, examples in SIZES.items():
        for delta in (0.1, 1e-5):
            setting = Setting(rule_examples=examples, claimed_delta=delta)
            sigma = paper_noise_multiplier(setting.epsilon, delta=delta, **setting.rule)
            facts = {
                "data": name,
                "claimed_delta": delta,
                "sigma": sigma,
                "needed": needed(setting, delta),
            }
            rows.append(facts | bounds(sigma, setting))
    return {
        "setting": Setting()._asdict(),
        "rows": rows,
        "needed": needed(Setting(), Setting().delta),
    }


def noise_markdown(result: Result) -> str:
    """Return the table of claims and honest epsilons."""
    own = result["setting"]
    head = ["data", "δ of the rule", "σ", "claimed ε", "ε, same δ", f"ε, δ = {own['delta']:g}"]
    head += ["replace-one", "uploads", f"σ that keeps ε = {own['epsilon']:g}, same δ"]
    lines = [
        [row["data"], f"{row['claimed_delta']:g}", f"{row['sigma']:.3f}"]
        + [number(row[name]) for name in ("claim", "same_delta", "honest", "replace_one", "upload")]
        + [f"{row['needed']:.3g}"]
        for row in result["rows"]
    ]
    text = (
        "All {clients} clients take part in each of {rounds} rounds, with batches of {batch_size} "
    )
    text += (
        'and {epochs} passes per stage. Epsilons are client-level, by PLD. The columns "same δ" '
    )
    text += 'and "δ = {delta:g}" are zero-out, for an observer of sums. The columns "replace-one" '
    text += 'and "uploads" are replace-one with δ = {delta:g}, for an observer of sums and one of '
    text += "uploads. "
    text += (
        f"Epsilon {own['epsilon']:g} with δ = {own['delta']:g} needs σ = {result['needed']:.3g}."
    )
    table = markdown_table(head, lines)
    return "\n\n".join([table, text.format(**own), f"{dated(result)}."])


def reference(options: Options) -> Result:
    """Run FedDPA and DP-FedAvg with published, honest and no noise, and the references."""
    setting = Setting()
    if options.smoke:
        setting = setting._replace(data="digits", examples=400, rounds=2, epochs=1, alone=2)
    bench = Bench(setting, options)
    sigma = paper_noise_multiplier(setting.epsilon, delta=setting.claimed_delta, **setting.rule)
    z = needed(setting, setting.delta)
    names = ("published noise", "honest noise", "no noise")
    columns = {
        "noise_multiplier": [sigma, z, 0.0],
        "clip": [setting.clip] * 3,
        "rate": [setting.learning_rate] * 3,
    }
    rows = bench.rows("FedDPA", [f"FedDPA, {name}" for name in names], columns)
    columns["clip"] = [setting.clip, setting.clip, NO_CLIP]
    rows += bench.rows(
        "DP-FedAvg", [*(f"DP-FedAvg, {name}" for name in names[:2]), "FedAvg"], columns
    )
    rows += [bench.tuned(method, z) for method in ("FedDPA", "DP-FedAvg")]
    return {"setting": setting._asdict(), "floors": bench.floors(), "rows": rows}


def reference_markdown(result: Result) -> str:
    """Return the table of accuracies before and after the last local update, with epsilons."""
    own, floors = result["setting"], result["floors"]
    head = [
        "method",
        "global model %",
        "after a local update %",
        "C",
        "rate",
        "claimed ε",
        "ε, same δ",
    ]
    empty = [""] * 6
    alone = floors["local-only"]
    lines = [
        ["chance", "10.0", "10.0", *empty],
        ["an update of the untrained network", "", percent(floors["untrained"]["after"]), *empty],
        ["local-only", "", percent(alone["after"]), "", alone["chosen"], "", *["0"] * 3],
    ]
    for row in result["rows"]:
        numbers = [number(row[name]) for name in ("claim", "same_delta", "honest", "upload")]
        if not row["method"].startswith("FedDPA"):
            numbers[0] = "–"
        clip = "–" if row["clip"] == NO_CLIP else f"{row['clip']:.2g}"
        point = [clip, f"{row['rate']:.2g}"]
        lines.append(
            [row["method"], percent(row["before"]), percent(row["after"]), *point, *numbers]
        )
    text = "The data are {data} and the model is {model}. The {clients} clients have about {share} "
    text += "examples each, by Dirichlet({alpha:g}), and all take part in each of {rounds} rounds, "
    text += (
        "with batches of {batch_size}. Every method has {passes} local passes in a round, and as "
    )
    text += 'many before the test. The claim and "same δ" have δ = {claimed_delta:g}, and other '
    text += "columns δ = {delta:g}. Epsilons are client-level, by PLD."
    text = text.format(
        **own, share=f"{own['examples'] / own['clients']:,.0f}", passes=2 * own["epochs"]
    )
    chosen = "; ".join(
        f"{row['method']}: {row['chosen']}" for row in result["rows"] if "chosen" in row
    )
    tuned = f"The tuned rows have {POINTS} points each, scored on held-out examples (a "
    tuned += f"star marks an end of the points): {chosen}. No epsilon covers the choice."
    flat = stopped(alone["chosen"], alone["passes"], alone["validation"])
    found = {row["method"]: row for row in result["rows"]}
    gains = [
        f"{name} {signed(np.subtract(row['after'], alone['after']))}"
        for name, row in found.items()
        if "honest" in name or name == "FedAvg"
    ]
    above = f"Differences to local-only, points by seed: {'; '.join(gains)}."
    table = markdown_table([*head, f"ε, δ = {own['delta']:g}", "uploads"], lines)
    return "\n\n".join([table, text, tuned, flat, above, source(result)])


STUDIES = {
    "noise": Study(noise, noise_markdown, minutes=1),
    "reference": Study(reference, reference_markdown, minutes=60),
}

if __name__ == "__main__":
    command("feddpa", __doc__, STUDIES)
