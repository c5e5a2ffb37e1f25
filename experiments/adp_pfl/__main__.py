"""ADP-PFL's table and figures with published and honest noise, and with references.

python -m experiments.adp_pfl table_2
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dp_accounting
import numpy as np

from experiments.adp_pfl.setting import Bench, Row
from experiments.common import number, percent, run_each, starred, stopped
from experiments.study import (
    HERE,
    Options,
    Result,
    Study,
    agreement,
    command,
    markdown_table,
    signed,
    source,
    yes_or_no,
)
from jaxfl.algorithms.adp_pfl import fisher_percentile, largest, random_share
from jaxfl.privacy import paper_noise
from jaxfl.report import plots
from jaxfl.report.looks import looks

SCHEDULES = ("fixed", "round-level")
SUFFIXES = {"mnist": "", "fashion_mnist": "_fashion_mnist", "cifar10": "_cifar10"}
"""Suffixes of the studies' names by data set."""
EPSILONS, FIGURE_EPSILONS = (3.0, 6.0, 9.0), (1.0, 5.0, 10.0)
CLIPS = (0.01, 0.03, 0.1, 0.3, 1.0)
PERCENTILES = (0.0, 40.0, 60.0, 80.0, 90.0)
PRINTED = {
    "mnist": {"fixed": (56.142, 92.220, 98.104), "round-level": (56.968, 93.443, 98.576)},
    "fashion_mnist": {"fixed": (59.171, 89.035, 95.656), "round-level": (65.531, 93.534, 96.227)},
    "cifar10": {"fixed": (53.340, 72.725, 79.987), "round-level": (58.096, 73.240, 81.712)},
}
"""Table 2 of the paper: accuracy of local models in percent at `EPSILONS`."""
WHOLE = {"examples": 600, "batch_size": 100}
"""Changes for table 2: nearly all of a client's examples. The paper uses all of them."""
FLOORS = {
    "untrained": "five passes, untrained",
    "alone": "local-only",
    "without noise": "FedAvg without noise",
}
DEAF = "the fixed noise alone"
"""Method in which clients do not train, so that the server adds up nothing but noise."""
LEVELS = (0.3, 0.4, 0.47678, 0.5025, 0.6, 0.8, 0.9)
"""Accuracies of figure 4. The paper names the third and the fourth."""


def nothing(percentile: Any) -> None:
    """Return no mask, for any percentile."""
    del percentile


def thinner(percentile: float) -> float:
    """Return the factor in theorem 2 on the noise, for a mask that drops `percentile` %."""
    one = np.ones(1)
    return float((paper_noise(one, sparsity=percentile / 100) / paper_noise(one))[0])


def result_of(bench: Bench, rows: Sequence[Row]) -> dict[str, Any]:
    """Return a result with the bench's `setting`, its `floors` and the given `rows`."""
    return {"setting": dataclasses.asdict(bench.setting), "floors": bench.floors(), "rows": rows}


def table_2(data: str, options: Options) -> Result:
    """Run fixed and round-level budgets with the published noise, and that noise alone."""
    bench = Bench(data, options, **WHOLE)
    rows, values = [], {"epsilon": EPSILONS}
    for name in SCHEDULES:
        rows += bench.rows(f"published, {name}", bench.published(name), values, method=name)
    deaf = bench.published("fixed", nothing, local=bench.passes(epochs=0))
    return result_of(bench, rows + bench.rows(DEAF, deaf, values))


def honest(data: str, options: Options) -> Result:
    """Run both schedules with honest noise, each at its best clip bound."""
    bench = Bench(data, options)
    rows = [
        row
        for schedule in SCHEDULES
        for row in bench.tuned(
            schedule, bench.honest(schedule, bench.fisher), EPSILONS, CLIPS, schedule
        )
    ]
    return result_of(bench, rows)


def figure_3(options: Options) -> Result:
    """Run methods by epsilon, all with the published noise for the same total."""
    bench, values = Bench("mnist", options), {"epsilon": FIGURE_EPSILONS}
    rows = bench.rows("DP-FedAvg", bench.published("fixed", nothing), values)
    rows += bench.rows("ADP-PFL", bench.published("round-level", risks="private"), values)
    rows += bench.rows("DP-LG", bench.published_dp_lg, values)
    return result_of(bench, rows)


def figure_5(options: Options) -> Result:
    """Run masks with the noise of theorem 2, and variants that separate mask and noise."""
    bench, less = Bench("mnist", options), thinner(80.0)
    values, middle = (
        {"epsilon": FIGURE_EPSILONS, "thinner": [less] * 3},
        {"epsilon": [5.0], "thinner": [less]},
    )
    rows = []
    for name, mask in {
        "Fisher": fisher_percentile,
        "top-k": largest,
        "random": random_share,
    }.items():
        rows += bench.rows(name, bench.published("round-level", mask), values)
    rows += bench.rows("no mask, as little noise", bench.published("round-level", nothing), middle)
    for name, mask in {"no mask": nothing, "Fisher": fisher_percentile}.items():
        full = bench.published("round-level", mask)
        rows += bench.rows(f"{name}, all noise", full, {"epsilon": [5.0], "thinner": [1.0]})
    return result_of(bench, rows)


def figure_6(options: Options) -> Result:
    """Run percentiles of the mask at epsilon 5, with theorem 2's noise and with all noise."""
    bench = Bench("mnist", options)
    percentiles = PERCENTILES[::3] if options.smoke else PERCENTILES
    build, values = (
        bench.published("round-level"),
        {"epsilon": [5.0] * len(percentiles), "percentile": percentiles},
    )
    less = values | {"thinner": [thinner(percentile) for percentile in percentiles]}
    rows = bench.rows("noise of theorem 2", build, less) + bench.rows("all noise", build, values)
    return result_of(bench, rows)


def honest_figures(options: Options) -> Result:
    """Run the methods of figures 3, 5 and 6 with honest noise, each at its best clip bound."""
    bench, clips = Bench("mnist", options), (0.03, 0.1, 0.3)
    masks = {"DP-FedAvg": None, "Fisher": bench.fisher}
    rows = [
        row
        for name, mask in masks.items()
        for row in bench.tuned(name, bench.honest("fixed", mask), FIGURE_EPSILONS, clips)
    ]
    rows += bench.tuned("DP-LG", bench.honest_dp_lg, FIGURE_EPSILONS, clips)
    masks = {
        "top-k": largest(bench.setting.percentile),
        "random": random_share(bench.setting.percentile),
    }
    masks |= {f"Fisher, percentile {p:g}": fisher_percentile(p) for p in (40.0, 90.0)}
    for name, mask in masks.items():
        rows += bench.tuned(name, bench.honest("fixed", mask), (5.0,), clips)
    return result_of(bench, rows)


def figure_4(options: Options) -> Result:
    """Measure accuracy and consumed budget by round, for both schedules and adaptive budgets.

    All ten clients take part in every round, and budgets have mean epsilon 1. A claimed budget is a
    mean over clients, and an honest one is for the client with the least noise.
    """
    bench, rows = Bench("mnist", options, clients=10), []
    own = bench.setting
    one = float(paper_noise(np.ones(1), delta=own.delta)[0]) / own.cohort
    for name, schedule in {**dict(zip(SCHEDULES, SCHEDULES)), "adaptive": "round-level"}.items():
        build = bench.published(schedule, risks="private" if name == "adaptive" else None)
        tested = bench.tested_locally(build(1.0))
        run: dict[str, Any] = {
            "rounds": own.rounds,
            "seeds": bench.seeds,
            "out": options.out,
            "config": bench.config,
        }
        ((_, results),) = run_each(
            {name: lambda _, tested=tested: tested}, bench.clients, eval_every=2, **run
        ).items()
        curves = []
        for result in results:
            ledger = result.ledger
            noise = np.where(ledger.participants, ledger.client_noise, math.inf)
            claimed = np.cumsum(one / noise, axis=0).mean(axis=1)
            # All rounds together are one Gaussian, under replace-one.
            total = np.cumsum((2 / noise) ** 2, axis=0).max(axis=1)
            told = float(result.statement["honest"]["upload"]["epsilon"]) == math.inf
            at = [int(row["round"]) for row in result.metrics]
            seen = [
                math.inf
                if told
                else dp_accounting.get_epsilon_gaussian(total[r - 1] ** -0.5, own.delta)
                for r in at
            ]
            curve = {
                "local": [row["accuracy"] for row in result.metrics],
                "claimed": claimed[np.array(at) - 1].tolist(),
            }
            curves.append({"round": at, "honest": seen} | curve)
        rows.append(
            {"method": name, "local": [curve["local"][-1] for curve in curves], "curves": curves}
        )
    return result_of(bench, rows)


def lines_of(result: Result, column: str) -> list[list[str]]:
    """Return a line for each method: its name, and a cell for each value of `column`.

    References have the same cell for all values.
    """
    floors, rows = result["floors"], result["rows"]
    values = sorted({row[column] for row in rows})
    shown = {"chance of two labels": "50"} | {
        name: _cell(floors[floor]) for floor, name in FLOORS.items()
    }
    lines = [[method] + [text] * len(values) for method, text in shown.items()]
    for method in _names(rows):
        cells = {row[column]: _cell(row) for row in rows if row["method"] == method}
        lines.append([method] + [cells.get(value, "") for value in values])
    return lines


def _cell(row: Row) -> str:
    """Format accuracies "local (global) [epsilon of sums, epsilon of uploads]"."""
    text = percent(row["local"])
    text += f" ({percent(row['global'])})" if "global" in row else ""
    seen = [number(row[who]) for who in ("aggregate", "upload") if who in row]
    return text + (f" [{', '.join(seen)}]" if len(seen) == 2 and seen != ["∞", "∞"] else "")


def _flat(alone: Row) -> str:
    return stopped(
        f"learning rate {alone['learning_rate']:g}", alone["passes"], alone["validation"]
    )


def by_column(result: Result, column: str, *more: str) -> str:
    """Return the table by epsilon or percentile, with the text below it.

    Args:
        result: Result with a row for each cell.
        column: Entry of the rows that the table's columns show.
        more: Paragraphs between the table and the facts of the setting.
    """
    values = sorted({row[column] for row in result["rows"]})
    table = markdown_table(
        ["ε" if column == "epsilon" else column, *(f"{value:g}" for value in values)],
        lines_of(result, column),
    )
    lost = max(row["dropped"] for row in result["rows"])
    own = result["setting"]
    facts = (
        f"The data are {own['data']}. There are {own['clients']} clients with at most "
        f"{own['examples']} examples, and {own['cohort']} of them in each of {own['rounds']} "
        f"rounds. At most {100 * lost:.1f}% of a cell's updates were dropped because they were not "
        "finite."
    )
    return "\n\n".join([table, *more, facts, _flat(result["floors"]["alone"]), source(result)])


def table_2_markdown(result: Result) -> str:
    """Return the table, a table of the paper's numbers and these, and the verdict."""
    printed, found = (
        PRINTED.get(result["setting"]["data"], PRINTED["mnist"]),
        _means(result["rows"]),
    )
    theirs, ours = ([x for name in SCHEDULES for x in of[name]] for of in (printed, found))
    apart, matched = np.abs(np.subtract(theirs, ours)), agreement(theirs, ours)
    far = apart.max()
    if far <= 10:
        verdict = f"the table is reproduced within {far:.1f} points ({matched})"
    elif matched.endswith("15 of 15 orderings"):
        verdict = f"the ordering is reproduced ({matched})"
    else:
        cells = [(name, epsilon) for name in SCHEDULES for epsilon in EPSILONS]
        name, epsilon = cells[apart.argmax()]
        (row,) = (
            row for row in result["rows"] if (row["method"], row["epsilon"]) == (name, epsilon)
        )
        why = f"its global model ends at {percent(row['global'])}"
        if row["dropped"] > 0.05:
            why = f"it diverges, {100 * row['dropped']:.0f}% of its updates are not finite"
        near = max(gap for gap, (schedule, _) in zip(apart, cells, strict=True) if schedule != name)
        verdict = (
            f"the table is not reproduced ({matched}), because of {name} at ε {epsilon:g}: {why}. "
            f"The other schedule is within {near:.1f} points"
        )
    gains, claimed = (np.subtract(of["round-level"], of["fixed"]) for of in (found, printed))
    text = (
        f"Verdict: {verdict}. Round-level minus fixed, points: {_signed(gains)}; in the paper: "
        f"{_signed(claimed)}. Fixed minus its noise alone, points: "
        f"{_signed(np.subtract(found['fixed'], found[DEAF]))}."
    )
    return by_column(
        result, "epsilon", _beside(printed, {"paper": printed, "reproduced": found}), text
    )


def honest_markdown(result: Result) -> str:
    """Return the table, a comparison with the paper and the reproduction, and the clip bounds."""
    rows, printed = result["rows"], PRINTED.get(result["setting"]["data"], PRINTED["mnist"])
    columns = {
        "paper": printed,
        "reproduced": _reproduced(result["setting"]["data"]),
        "honest": _means(rows),
    }
    columns = {name: own for name, own in columns.items() if own}
    alone, own = 100 * np.mean(result["floors"]["alone"]["local"]), columns["honest"]
    gains = "; ".join(f"{name} {_signed(np.subtract(own[name], alone))}" for name in SCHEDULES)
    return by_column(
        result,
        "epsilon",
        _beside(printed, columns),
        _chosen(rows),
        f"Honest rows minus training alone, points: {gains}.",
    )


def _reproduced(data: str) -> dict[str, list[float]]:
    """Return the means of the stored table 2 by method, or an empty dict if it was not run."""
    path = HERE / "adp_pfl" / "results" / f"table_2{SUFFIXES.get(data, f'_{data}')}.json"
    return _means(json.loads(path.read_text())["rows"]) if path.exists() else {}


def _chosen(rows: Sequence[Row]) -> str:
    """Return the clip bounds of tuned rows as text."""
    tried = {"clip": [float(clip) for clip in rows[0]["validation"]]}
    chosen = [
        f"{row['method']} at {row['epsilon']:g} {starred({'clip': row['clip']}, tried)}"
        for row in rows
    ]
    return (
        "Clip bounds were chosen on held-out examples (a star marks an end of "
        f"{', '.join(rows[0]['validation'])}): {'; '.join(chosen)}."
    )


def honest_figures_markdown(result: Result) -> str:
    """Return the table, the clip bounds, and the differences to DP-FedAvg."""
    rows, at_5 = (
        result["rows"],
        {row["method"]: row["local"] for row in result["rows"] if row["epsilon"] == 5.0},
    )
    gains = [
        f"{name} {signed(np.subtract(scores, at_5['DP-FedAvg']))}"
        for name, scores in at_5.items()
        if name != "DP-FedAvg"
    ]
    return by_column(
        result,
        "epsilon",
        _chosen(rows),
        f"Differences to DP-FedAvg at ε 5, points by seed: {'; '.join(gains)}.",
    )


def _beside(names: Iterable[str], columns: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return a table whose cells have a number from each source, with slashes between them.

    Args:
        names: Rows of the table.
        columns: Numbers at `EPSILONS`, by source and row.
    """
    body = [
        [
            name,
            *(
                " / ".join(f"{x:.1f}" for x in cell)
                for cell in zip(*(own[name] for own in columns.values()))
            ),
        ]
        for name in names
    ]
    return markdown_table([" / ".join(columns), *(f"ε {epsilon:g}" for epsilon in EPSILONS)], body)


def _means(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Return the mean accuracies of local models in percent by method, one for each row."""
    return {
        name: [100 * float(np.mean(r["local"])) for r in rows if r["method"] == name]
        for name in _names(rows)
    }


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _signed(values: Sequence[float] | np.ndarray) -> str:
    return ", ".join(f"{value:+.1f}" for value in values)


def verdict(claims: Mapping[str, bool], why: str, where: str = "") -> str:
    """Return whether the paper's ordering is reproduced, and if not, why."""
    found = "is reproduced" if all(claims.values()) else f"is not reproduced, because {why}"
    return f"Verdict{where}: the ordering {found} ({yes_or_no(claims)})."


def _above(
    result: Result, name: str, others: Sequence[str], epsilons: Sequence[float]
) -> dict[str, bool]:
    """Return for each claim that a method is above another at an epsilon whether it holds."""
    found = {(row["method"], row["epsilon"]): np.mean(row["local"]) for row in result["rows"]}
    return {
        f"{name} above {other} at ε {epsilon:g}": bool(found[name, epsilon] > found[other, epsilon])
        for other in others
        for epsilon in epsilons
    }


def figure_3_markdown(result: Result) -> str:
    """Return the table of methods by epsilon, and the verdict."""
    free = 100 * float(np.mean(result["floors"]["without noise"]["local"]))
    claims = _above(result, "ADP-PFL", ("DP-FedAvg", "DP-LG"), FIGURE_EPSILONS)
    own = _means(result["rows"])["ADP-PFL"]
    lost = [f"{100 * row['dropped']:.0f}%" for row in result["rows"] if row["method"] == "ADP-PFL"]
    why = (
        f"ADP-PFL diverges with its clients' own noise, and {', '.join(lost)} of its updates at "
        "the three ε were dropped because they were not finite"
    )
    gap = (
        f"ADP-PFL at ε 10 is {free - own[-1]:.1f} points below FedAvg without noise. Models that "
        "have diverged count as 0, below chance."
    )
    return by_column(
        result, "epsilon", "![accuracy by epsilon](figure_3.png)", f"{verdict(claims, why)} {gap}"
    )


def figure_5_markdown(result: Result) -> str:
    """Return the table of masks by epsilon, and the verdict."""
    rows, claims = result["rows"], _above(result, "Fisher", ("top-k", "random"), FIGURE_EPSILONS)
    one = [
        f"{row['method']} {percent(row['local'])}"
        for row in rows
        if _names(rows).index(row["method"]) > 2
    ]
    (plain,) = (
        np.mean(row["local"]) for row in rows if row["method"] == "no mask, as little noise"
    )
    (own,) = (
        np.mean(row["local"]) for row in rows if (row["method"], row["epsilon"]) == ("Fisher", 5.0)
    )
    why = (
        "a mask gains through the noise that theorem 2 removes: at ε 5 the same reduced noise "
        f"without a mask gives {100 * plain:.1f}, {100 * (plain - own):+.1f} points from Fisher"
    )
    text = f"{verdict(claims, why)} Other accuracies at ε 5: {', '.join(one)}."
    return by_column(result, "epsilon", "![accuracy by epsilon](figure_5.png)", text)


def figure_6_markdown(result: Result) -> str:
    """Return the table of the mask's percentiles, and the verdicts."""
    found = {name: {} for name in _names(result["rows"])}
    for row in result["rows"]:
        found[row["method"]][row["percentile"]] = float(np.mean(row["local"]))
    claims = {
        name: {
            "every mask above none": min(of[p] for p in of if p) > of[0.0],
            "the 80th percentile best": max(of, key=of.__getitem__) == 80.0,
        }
        for name, of in found.items()
    }
    why = {}
    for name, of in found.items():
        far = 100 * max(abs(of[p] - of[0.0]) for p in of)
        best = max(of, key=of.__getitem__)
        why[name] = (
            f"masks are within {far:.1f} points of none, and the {best:g}th percentile is the best"
        )
    text = " ".join(verdict(claim, why[name], f" for {name}") for name, claim in claims.items())
    return by_column(result, "percentile", "![accuracy by percentile](figure_6.png)", text)


def figure_4_markdown(result: Result) -> str:
    """Return the table of budgets, claimed and honest, when accuracies were first reached."""
    head = ["accuracy of local models", *(f"{100 * level:g}%" for level in LEVELS), "at the end"]
    lines, needed = [], {}
    for row in result["rows"]:
        cells = []
        for level in LEVELS:
            reached = []
            for curve in row["curves"]:
                first = next((i for i, score in enumerate(curve["local"]) if score >= level), None)
                reached += (
                    [] if first is None else [(curve["claimed"][first], curve["honest"][first])]
                )
            claimed, honest = np.mean(reached, axis=0) if reached else (math.nan, math.nan)
            needed[row["method"], level], all_of = float(claimed), len(row["curves"])
            few = f", {len(reached)} of {all_of}" if len(reached) < all_of else ""
            cells.append(f"{number(claimed)} [{number(honest)}]{few}" if reached else "–")
        lines.append([row["method"], *cells, percent(row["local"])])
    claims = {
        f"adaptive above round-level at {100 * level:g}%": needed["adaptive", level]
        > needed["round-level", level]
        for level in LEVELS
        if math.isfinite(needed["adaptive", level] + needed["round-level", level])
    }
    floors = result["floors"]
    lines += [
        [name, *([""] * len(LEVELS)), percent(floors[floor]["local"])]
        for floor, name in FLOORS.items()
    ]
    course = {
        row["method"]: (
            100 * np.mean([curve["local"][0] for curve in row["curves"]]),
            100 * np.mean(row["local"]),
        )
        for row in result["rows"]
    }
    text = verdict(claims, "adaptive budgets reach these accuracies with no more")
    if all(end < 50 for _, end in course.values()):
        ends = "; ".join(f"{name} {start:.1f}, {end:.1f}" for name, (start, end) in course.items())
        text = (
            "Verdict: the ordering is not reproduced, because under this noise all methods end "
            "below chance of two labels. A level is met early, or by fluctuation. Accuracies at "
            f"the first and the last evaluation: {ends}."
        )
    return "\n\n".join([markdown_table(head, lines), text, _flat(floors["alone"]), source(result)])


def draw(column: str, result: Result, path: pathlib.Path) -> None:
    """Draw the accuracy of local models by epsilon or percentile into a PNG file.

    Points are means over seeds, and bars are their 95% intervals.
    """
    with plots.style():
        figure = plots.new_figure(plots.DOUBLE, 3.2)
        axes = figure.subplots()
        methods = _names(result["rows"])
        styles = looks([*methods, *FLOORS.values()])
        for method in methods:
            rows = [row for row in result["rows"] if row["method"] == method]
            scores = 100 * np.array([row["local"] for row in rows]).T
            horizontal = [row[column] for row in rows]
            mean, half = scores.mean(0), plots.interval(scores)
            axes.errorbar(horizontal, mean, half, label=method, **styles[method])
        for (floor, name), dash in zip(FLOORS.items(), (":", "--", "-.")):
            mean = 100 * np.mean(result["floors"][floor]["local"])
            axes.axhline(mean, color=styles[name]["color"], linestyle=dash, label=name)
        axes.set_xlabel("ε" if column == "epsilon" else column)
        axes.set_ylabel(f"local accuracy %{plots.MEAN}")
        plots.legend_beside(axes)
    plots.save(figure, path.with_suffix(".png"))


STUDIES = {
    **{
        f"{name}{suffix}": Study(functools.partial(run, data), markdown, minutes=minutes)
        for data, suffix in SUFFIXES.items()
        for name, run, markdown, minutes in (
            ("table_2", table_2, table_2_markdown, 240 if data == "cifar10" else 45),
            ("honest", honest, honest_markdown, 20),
        )
    },
    "honest_figures": Study(honest_figures, honest_figures_markdown, minutes=30),
    "figure_3": Study(figure_3, figure_3_markdown, functools.partial(draw, "epsilon"), 20),
    "figure_4": Study(figure_4, figure_4_markdown, minutes=10),
    "figure_5": Study(figure_5, figure_5_markdown, functools.partial(draw, "epsilon"), 20),
    "figure_6": Study(figure_6, figure_6_markdown, functools.partial(draw, "percentile"), 15),
}

if __name__ == "__main__":
    command("adp_pfl", __doc__, STUDIES)
