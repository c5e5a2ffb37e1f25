"""Figure 4: the budget that is consumed until an accuracy is reached, with ten clients that are always there.

python -m experiments.adp_pfl.figure_4 --dataset mnist --scale paper
"""

import csv
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import dp_accounting
import jax
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.adp_pfl.setting import (
    HONEST,
    SUMMED,
    Reading,
    Setting,
    budgets_of,
    private_options,
    run_config,
    split,
    start,
    tested_locally,
)
from experiments.common import model_for, round_seconds, row_of, run_each, show
from jaxfl import Result
from jaxfl.algorithms import adp_pfl, adp_pfl_paper
from jaxfl.privacy import Full, client_noise, paper_noise
from jaxfl.types import Algorithm, Model

EPSILON = 1.0
METHODS = ("fixed", "round-level", "adaptive")
LEVELS = tuple(percent / 100 for percent in range(10, 100, 5))
MARKS = (0.47678, 0.5025)
"""Accuracies that the paper names, for CIFAR-10."""


class Reached(NamedTuple):
    """A row of the CSV: when a method first reached an accuracy, and what clients had then consumed.

    Means over the seeds that reached it; empty where none did.
    """

    method: str
    noise: str
    accuracy: float
    seeds: int
    round: float | None
    claimed_mean: float | None
    """By the paper's rule, sum over rounds, mean over clients; of the printed methods alone."""
    honest_mean: float | None
    """Epsilon of a client's uploads so far, replace-one, mean over clients."""
    honest_worst: float | None
    """The same of the client that consumed most."""


def build(method: str, reading: Reading, model: Model, setting: Setting) -> Algorithm:
    """A method whose clients add the noise: their uploads are what consumes their budgets."""
    budgets = EPSILON * budgets_of(method, setting)
    options: dict[str, Any] = private_options(setting) | {"sampling": Full()}
    adaptive = method == "adaptive"
    if reading != HONEST:
        noise = paper_noise(budgets, delta=setting.delta)
        risks: Any = "private" if adaptive else None
        return tested_locally(adp_pfl_paper(model, noise=noise, risks=risks, claim=EPSILON, **options), setting)
    share = setting.release_share if adaptive else 0.0
    stated: dict[str, Any] = {"delta": setting.delta, "accountant": "rdp"}
    options["noise"] = client_noise(budgets, EPSILON, participation=1.0, release_share=share, **stated)
    options |= {"risks": "private", "risk_bounds": setting.risk_bounds} if adaptive else {"risks": np.ones(1)}
    return tested_locally(adp_pfl(model, **options), setting)


def honest_spent(result: Result, delta: float) -> np.ndarray:
    """Epsilon of what each client has sent by the end of each round `[T, C]`: updates are one Gaussian in all.

    Infinite where noise follows from risks that the server is told without noise.
    """
    ledger = result.ledger
    if result.statement["honest"]["upload"]["rdp"]["total"] == "inf":
        return np.full(np.shape(ledger.participants), math.inf)
    cost = (2 / np.asarray(ledger.client_noise, float)) ** 2
    if "release_noise" in ledger.notes:
        cost = cost + np.asarray(ledger.notes["release_noise"], float)[:, None] ** -2.0
    total = np.cumsum(np.where(ledger.participants, cost, 0.0), axis=0)
    single = functools.cache(lambda m: dp_accounting.get_epsilon_gaussian(m, delta) if math.isfinite(m) else 0.0)
    with np.errstate(divide="ignore"):
        return np.vectorize(single)(total**-0.5)


def claimed_spent(result: Result, delta: float) -> np.ndarray:
    """Sum of the epsilons for which the classic rule gives the noise of each client and round `[T, C]`."""
    noise = np.broadcast_to(np.asarray(result.ledger.client_noise, float), np.shape(result.ledger.participants))
    return np.cumsum(np.where(result.ledger.participants, math.sqrt(2 * math.log(1.25 / delta)) / noise, 0.0), axis=0)


def reached(method: str, reading: Reading, results: Sequence[Result], delta: float) -> list[Reached]:
    """What was consumed at the first evaluation that reached each level."""
    rows = []
    spent = [(honest_spent(result, delta), claimed_spent(result, delta)) for result in results]
    for level in sorted({*LEVELS, *MARKS}):
        reaching: list[tuple[float, ...]] = []
        for result, (honest, claimed) in zip(results, spent, strict=True):
            first = next((int(row["round"]) for row in result.metrics if row["accuracy"] >= level), None)
            if first is not None:
                by_client = honest[first - 1]
                reaching.append((first, claimed[first - 1].mean(), by_client.mean(), by_client.max()))
        mean = [float(value) for value in np.mean(reaching, axis=0)] if reaching else [None] * 4
        number, claim, *honest_epsilons = mean
        rows.append(
            Reached(
                method, reading, level, len(reaching), number, None if reading == HONEST else claim, *honest_epsilons
            )
        )
    return rows


def write_csv(path: pathlib.Path, rows: Sequence[Reached]) -> None:
    """All rows, with numbers to six digits."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Reached._fields)
        for row in rows:
            writer.writerow("" if v is None else f"{v:.6g}" if isinstance(v, float) else v for v in row)
    print(f"budget until an accuracy is reached: {path}")


def plot(path: pathlib.Path, title: str, rows: Sequence[Reached]) -> None:
    """Consumed budget by accuracy: claimed and honest of the printed methods, honest of the honest ones."""
    panels: list[tuple[str, Reading, Callable[[Reached], float | None]]] = [
        ("printed: claimed ε", SUMMED, lambda row: row.claimed_mean),
        ("printed: honest ε of uploads", SUMMED, lambda row: row.honest_mean),
        ("honest noise: ε of uploads", HONEST, lambda row: row.honest_mean),
    ]
    figure = Figure(figsize=(14, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (label, reading, value) in zip(figure.subplots(1, 3, sharex=True), panels, strict=True):
        for method in METHODS:
            of_method = [row for row in rows if (row.method, row.noise) == (method, reading) and row.seeds]
            points = [(row.accuracy, value(row)) for row in of_method]
            known = [(x, y) for x, y in points if y is not None and math.isfinite(y)]
            name = method if known else f"{method}: {'no finite ε' if of_method else 'none reached'}"
            axes.plot([x for x, _ in known], [y for _, y in known], marker=".", label=name)
        axes.set(title=label, xlabel="accuracy that is reached", ylabel="consumed by a client, mean", xlim=(0, 1))
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def main() -> None:
    """Run the three ways to allot budgets, printed and honest, and write table, CSV and plot."""
    config, setting, data, seeds = start(__doc__)
    clients = min(10, setting.clients)
    setting = dataclasses.replace(setting, clients=clients, rate=1.0, evaluations=math.ceil(setting.rounds / 2))
    model = model_for(setting.model, data)
    make = functools.cache(functools.partial(split, data, setting))
    entries: list[tuple[str, Reading]] = [(method, reading) for reading in (SUMMED, HONEST) for method in METHODS]
    built = {f"{method}, {reading}": build(method, reading, model, setting) for method, reading in entries}
    if config.scale != "smoke":
        rounds = setting.rounds + setting.evaluations
        seconds = sum(round_seconds(algorithm, make(seeds[0])) for algorithm in built.values()) * rounds * len(seeds)
        print(f"about {seconds / 3600:.1f} hours in all, evaluations of local models included", flush=True)
    results = run_each(
        {name: lambda _, algorithm=algorithm: algorithm for name, algorithm in built.items()},
        make,
        rounds=setting.rounds,
        eval_every=math.ceil(setting.rounds / setting.evaluations),
        seeds=seeds,
        out=config.out / "runs",
        config=run_config(setting, data),
    )
    title = f"{data.name}, {config.scale}: {clients} clients, always there, {setting.rounds} rounds, ε = {EPSILON:g}"
    folder = config.out / "figure_4" / config.scale / data.name
    show(title, [row_of(name, runs) for name, runs in results.items()], folder)
    rows = [row for entry, runs in zip(entries, results.values()) for row in reached(*entry, runs, setting.delta)]
    if jax.process_index() == 0:
        write_csv(folder / "figure_4.csv", rows)
        plot(folder / "figure_4.png", title, rows)


if __name__ == "__main__":
    main()
