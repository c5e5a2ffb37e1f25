"""PADPFL's orderings without privacy, with the published noise, and with honest noise.

python -m experiments.padpfl region
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import SymLogNorm

from experiments.common import number, starred, sweep_each
from experiments.padpfl.setting import SCENARIOS, Setting, impacts, on_copy, sizes, split
from experiments.study import Options, Result, Study, command, markdown_table, source
from jaxfl import grid
from jaxfl.algorithms import padpfl, padpfl_paper
from jaxfl.data import load
from jaxfl.models import mlp
from jaxfl.report import plots
from jaxfl.types import Algorithm

WEAK = 100.0
"""The weaker level, an epsilon that the paper's rule claims."""
RATIOS = (1.0, 1.5, 2.5, 4.0)
"""Ratios of the weaker level to the stronger one."""
DENSITIES = (0.25, 0.5, 0.75, 1.0)
PANELS = ((1, 5), (1, 20), (2, 20), (3, 20), (4, 20), (5, 20))
"""Scenario and number of rounds of each panel."""
FIGURES = {1: 2, 2: 4, 3: 6, 4: 8}
"""Figure of each scenario without privacy."""
PRIVATE_FIGURES = {1: 3, 5: 3, 2: 5, 3: 7, 4: 9}
"""Figure of each scenario with privacy."""
HONEST_LEVELS, CLIPS = (8.0, 32.0, 128.0, math.inf), (0.03, 0.1, 0.3, 1.0, 3.0)
TUNING = 100
"""Seed of tuning runs. Results have other seeds."""
NAMES = {5: "1, heavier, identical clients, batches of 10"}


def losses(
    scenario: int,
    way: str,
    setting: Setting,
    points: Mapping[str, Sequence[float]],
    options: Options,
    *,
    densities: Sequence[float] = DENSITIES,
    classes: int | None = 5,
    tuning: bool = False,
) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """Return the test loss by point and seed, and each point's privacy statement.

    All points of a seed run in one program.

    Args:
        scenario: Key of `SCENARIOS`.
        way: Way to weight the clients, see `Scenario.best`.
        setting: Other settings.
        points: Columns of numbers. `copy` is an index into `densities`. With `epsilon`, the noise
            is the published one. Otherwise `noise` is the multiplier of the server's noise on
            updates, and `clip` their bound.
        options: Seeds and folder.
        densities: Densities of the severe noise.
        classes: Number of classes of a client. None stands for identical distributions.
        tuning: Whether to run only the tuning seed, and to test on examples that no client has.
    """
    own, data = SCENARIOS[scenario], load(setting.data)
    model = mlp(data.train_inputs.shape[1:], data.classes, hidden=(setting.hidden,))
    shared: dict[str, Any] = {
        "rounds": setting.rounds,
        "impacts": impacts(own, setting, way),
        "mu": setting.mu,
    }
    shared["local"] = setting.local(own)
    claimed: dict[str, Any] = {
        "clip": setting.clip,
        "delta": setting.claimed_delta,
        "smallest": min(sizes(own, setting)),
    }

    def build(
        copy: float, epsilon: Any = None, noise: Any = 0.0, clip: Any = math.inf
    ) -> Algorithm:
        if epsilon is None:
            free = padpfl(model, epsilon=math.inf, clip=math.inf, delta=setting.delta, **shared)
            mechanism = dataclasses.replace(free.mechanism, noise_multiplier=noise, clip=clip)
            method = free._replace(mechanism=mechanism)
        else:
            method = padpfl_paper(model, epsilon=epsilon, **claimed, **shared)
        return on_copy(method, own, setting, copy, len(densities))

    runs = sweep_each(
        f"scenario {scenario}, {way}",
        build,
        points,
        partial(split, own, setting, data, densities, classes, held_out=tuning),
        rounds=setting.rounds,
        seeds=(TUNING,) if tuning else options.seeds,
        out=options.out,
        config=setting._asdict() | {"densities": densities, "classes": classes, "tuning": tuning},
        eval_every=setting.rounds,
    )
    return [[run.metrics[-1]["loss"] for run in point] for point in runs], [
        point[0].statement for point in runs
    ]


def region(options: Options) -> Result:
    """Measure the loss of the best way at each level, and of equal factors at the weaker level.

    The noise is the published one.
    """
    found = []
    for scenario, rounds in PANELS[:1] if options.smoke else PANELS:
        setting, how = Setting(rounds=rounds), partial(losses, scenario)
        if scenario in NAMES:
            setting, how = (
                setting._replace(full_batch=False, epochs=2),
                partial(losses, scenario, classes=None),
            )
        setting = setting.sized(smoke=options.smoke)
        densities = densities_of(scenario, DENSITIES)
        how, copies = partial(how, densities=densities), range(len(densities))
        points = grid(copy=copies, epsilon=[WEAK / ratio for ratio in RATIOS])
        best, stated = how(SCENARIOS[scenario].best, setting, points, options)
        even, _ = how("1-1-1", setting, grid(copy=copies, epsilon=[WEAK]), options)
        for copy, density in enumerate(densities):
            own = slice(copy * len(RATIOS), (copy + 1) * len(RATIOS))
            honest = [
                {who: row["honest"][who]["rdp"]["total"] for who in ("aggregate", "upload")}
                for row in stated[own]
            ]
            facts = {"scenario": scenario, "rounds": rounds, "density": density}
            found.append(facts | {"best": best[own], "equal": even[copy], "honest": honest})
    return {"setting": Setting()._asdict(), "weak": WEAK, "ratios": RATIOS, "cells": found}


def orderings(options: Options) -> Result:
    """Measure the loss of the ways that the paper names, without noise and without a clip bound."""
    found = []
    for scenario in FIGURES:
        own = SCENARIOS[scenario]
        densities = densities_of(scenario, (0.5, 1.0))
        populations: list[tuple[int | None, bool]] = [
            (5, True),
            *([(None, False)] if scenario == 1 else []),
        ]
        for classes, full_batch in populations[:1] if options.smoke else populations:
            setting = Setting(full_batch=full_batch).sized(smoke=options.smoke)
            how: dict[str, Any] = {"densities": densities, "classes": classes}
            points = {"copy": list(range(len(densities)))}
            ways = {
                way: losses(scenario, way, setting, points, options, **how)[0]
                for way in (own.best, *own.others)
            }
            for copy, density in enumerate(densities):
                facts = {
                    "scenario": scenario,
                    "classes": classes,
                    "full_batch": full_batch,
                    "density": density,
                }
                found.append(
                    facts | {"losses": {way: values[copy] for way, values in ways.items()}}
                )
    return {"setting": Setting()._asdict(), "cells": found}


def honest(options: Options) -> Result:
    """Measure the loss of the best way and of equal factors with honest noise.

    Each cell has the clip bound that is best on examples that no client has.
    """
    setting, rows = Setting().sized(smoke=options.smoke), []
    for scenario in (1,) if options.smoke else FIGURES:
        own = SCENARIOS[scenario]
        densities = densities_of(scenario, (0.5, 1.0))
        for way in (own.best, "1-1-1"):
            how = partial(losses, scenario, way, setting, options=options, densities=densities)
            noise = [
                honest_noise(setting, impacts(own, setting, way), epsilon)
                for epsilon in HONEST_LEVELS
            ]
            columns = grid(copy=range(len(densities)), noise=noise, clip=list(CLIPS))
            tried, _ = how(points=columns, tuning=True)
            scores = np.nan_to_num(np.reshape(tried, (-1, len(CLIPS))), nan=math.inf)
            best = {name: column[:: len(CLIPS)] for name, column in columns.items()}
            best["clip"] = [CLIPS[index] for index in scores.argmin(axis=1)]
            found, stated = how(points=best)
            for index, copy in enumerate(best["copy"]):
                facts = {"scenario": scenario, "way": way, "density": densities[int(copy)]}
                facts |= {
                    "epsilon": HONEST_LEVELS[index % len(HONEST_LEVELS)],
                    "clip": best["clip"][index],
                }
                seen = {
                    who: stated[index]["honest"][who]["pld"]["total"]
                    for who in ("aggregate", "upload")
                }
                rows.append(
                    facts
                    | {"validation": scores[index].tolist(), "loss": found[index], "honest": seen}
                )
    return {"setting": setting._asdict(), "clips": CLIPS, "rows": rows}


def honest_noise(setting: Setting, factors: np.ndarray, epsilon: float) -> float:
    """Return the noise multiplier that keeps the most exposed client's epsilon over all rounds.

    Args:
        setting: Settings of the study.
        factors: Impact factors, see `impacts`.
        epsilon: Epsilon against an observer of sums. Infinity gives 0.
    """
    run: dict[str, Any] = {
        "rounds": setting.rounds,
        "clip": 1.0,
        "impacts": factors,
        "delta": setting.delta,
    }
    return padpfl(mlp((1, 1, 1), 2), epsilon=epsilon, **run).mechanism.noise_multiplier


def densities_of(scenario: int, densities: Sequence[float]) -> Sequence[float]:
    """Return the given severe densities, or only 0 for the third scenario, which has no noise."""
    return densities if any(SCENARIOS[scenario].densities) else (0.0,)


def gains(cell: Mapping[str, Any], index: int) -> np.ndarray:
    """Return the loss of the best way minus that of equal factors, by seed.

    The paper's ordering holds if it is below 0.
    """
    return np.subtract(cell["best"][index], cell["equal"])


def panels(result: Result) -> list[tuple[int, int]]:
    """Return scenario and number of rounds of each panel, in order."""
    return list(dict.fromkeys((cell["scenario"], cell["rounds"]) for cell in result["cells"]))


def cells_of(result: Result, panel: tuple[int, int]) -> list[Mapping[str, Any]]:
    """Return the cells of a panel, (scenario, number of rounds), in the order of their density."""
    return [cell for cell in result["cells"] if (cell["scenario"], cell["rounds"]) == panel]


def mean_and_spread(values: Sequence[float] | np.ndarray) -> str:
    """Format a difference as its signed mean ± standard deviation over seeds."""
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):+.2f}{spread}"


def region_text(result: Result) -> str:
    """Return the picture, the verdict, and a table with a line for each panel and density.

    A difference is bold if the ordering holds in every seed.
    """
    head = [
        "scenario",
        "T",
        "severe density",
        *(f"ε {result['weak'] / ratio:.3g}" for ratio in result["ratios"]),
    ]
    lines: list[list[str]] = []
    held: dict[int, list[bool]] = {}
    for panel in panels(result):
        for cell in cells_of(result, panel):
            row = [gains(cell, index) for index in range(len(result["ratios"]))]
            text = [
                f"**{mean_and_spread(values)}**" if values.max() < 0 else mean_and_spread(values)
                for values in row
            ]
            name = NAMES.get(panel[0], str(panel[0]))
            lines.append(
                [
                    f"{name}: {SCENARIOS[panel[0]].best}",
                    str(panel[1]),
                    f"{cell['density']:g}",
                    *text,
                ]
            )
            held.setdefault(PRIVATE_FIGURES[panel[0]], []).extend(
                bool(values.max() < 0) for values in row[1:]
            )
    honest = [cell["honest"] for cell in result["cells"]]
    sums = [level["aggregate"] for row in honest for level in row]
    uploads = [level["upload"] for row in honest for level in row]
    verdict = (
        "At a stronger level the ordering is reproduced in every seed in these cells: "
        f"{_counts(held)}."
    )
    if not all(map(all, held.values())):
        verdict += (
            " Elsewhere it is not, because the server's noise grows as T max(p) / ε. At the same "
            "level this noise is up to twice as large as for equal factors, which costs more than "
            "the corruption of the data."
        )
    return "\n\n".join(
        [
            "![Where the private ordering holds](region.png)",
            "The table has the test loss of unequal factors at the claimed ε of the column, minus "
            f"that of equal factors at {result['weak']:g}. The paper's ordering holds below 0, and "
            "in every seed if the difference is bold.",
            markdown_table(head, lines),
            f"**{verdict}** The honest ε of these runs at delta 0.01 is {min(sums):.2g} to "
            f"{max(sums):.2g} against an observer of sums, and {min(uploads):.2g} to "
            f"{max(uploads):.2g} against the server.",
            source(result),
        ]
    )


def draw_region(result: Result, path: pathlib.Path) -> None:
    """Draw the mean difference by level and density into a PNG file.

    Each scenario and number of rounds has a panel, if it has several densities.
    """
    shown = [panel for panel in panels(result) if len(cells_of(result, panel)) > 1]
    scale = SymLogNorm(0.1, vmin=-2, vmax=2)
    with plots.style():
        columns = min(3, len(shown))
        lines = math.ceil(len(shown) / columns)
        figure = plots.new_figure(plots.DOUBLE, 2.3 * lines)
        places = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axes in places[len(shown) :]:
            axes.remove()
        for axes, panel in zip(places, shown, strict=False):
            cells = cells_of(result, panel)
            values = np.array(
                [
                    [gains(cell, index).mean() for index in range(len(result["ratios"]))]
                    for cell in cells
                ]
            )
            x, y = np.arange(values.shape[1]), np.arange(values.shape[0])
            axes.imshow(values, origin="lower", cmap="PuOr_r", norm=scale, aspect="auto")
            axes.grid(visible=False)
            for i, j in np.ndindex(values.shape):
                color = "white" if abs(values[i, j]) > 0.3 else "black"
                axes.text(
                    j, i, f"{values[i, j]:+.2f}", ha="center", va="center", fontsize=6, color=color
                )
            name = NAMES.get(panel[0], str(panel[0]))[:10]
            axes.set_title(f"scenario {name}, T = {panel[1]}")
            axes.set_xticks(x, [f"{ratio:g}" for ratio in result["ratios"]])
            axes.tick_params(labelbottom=True)
            axes.set_yticks(y, [f"{cell['density']:g}" for cell in cells])
        figure.supxlabel("weaker over stronger ε", fontsize="medium")
        figure.supylabel("density of severe noise", fontsize="medium")
        ticks = [-1, -0.1, 0, 0.1, 1]
        bar = figure.colorbar(
            ScalarMappable(scale, "PuOr_r"), ax=figure.axes, ticks=ticks, format="%g"
        )
        bar.set_label("loss, unequal less equal factors")
    plots.save(figure, path.with_suffix(".png"))


def orderings_text(result: Result) -> str:
    """Return a table with a line for each scenario, population and density.

    A line says in how many seeds the paper's best way has a lower loss than another.
    """
    lines = []
    for cell in result["cells"]:
        best, *others = cell["losses"]
        for other in others:
            difference = np.subtract(cell["losses"][best], cell["losses"][other])
            seen = (
                "every seed"
                if difference.max() < 0
                else ("no seed" if difference.min() >= 0 else "some seeds")
            )
            held = [f"{np.mean(cell['losses'][way]):.3f}" for way in (best, other)]
            kind = "identical" if cell["classes"] is None else f"{cell['classes']} classes"
            kind += ", full batch" if cell["full_batch"] else ", batches of 10"
            density = "sizes" if cell["scenario"] == 3 else f"{cell['density']:g}"
            names = [f"{FIGURES[cell['scenario']]}", kind, density, f"{best} < {other}"]
            lines.append([*names, *held, mean_and_spread(difference), seen])
    head = [
        "figure",
        "clients",
        "severe density",
        "ordering",
        "first",
        "second",
        "difference",
        "holds in",
    ]
    told = []
    for figure in sorted({line[0] for line in lines}):
        own = [line[-1] == "every seed" for line in lines if line[0] == figure]
        told.append(f"figure {figure}: {sum(own)} of {len(own)}")
    verdict = (
        "**The ordering is reproduced in every seed in these rows: "
        f"{', '.join(told)}. Elsewhere it is not, because clients with a lower weight have "
        "examples and classes that still help.**"
    )
    return "\n\n".join([markdown_table(head, lines), verdict, source(result)])


def honest_text(result: Result) -> str:
    """Return a table with a line for each scenario, density and way, and the ordering's verdict."""
    levels = list(dict.fromkeys(row["epsilon"] for row in result["rows"]))
    weak = levels[-2]
    lines = [["", "chance", "", *[f"{math.log(10):.2f}"] * len(levels)]]
    stronger: dict[int, list[bool]] = {}
    same: dict[int, list[bool]] = {}
    for scenario, density in dict.fromkeys(
        (row["scenario"], row["density"]) for row in result["rows"]
    ):
        here = [
            row
            for row in result["rows"]
            if (row["scenario"], row["density"]) == (scenario, density)
        ]
        figure = PRIVATE_FIGURES[scenario]
        for way in dict.fromkeys(row["way"] for row in here):
            rows = [row for row in here if row["way"] == way]
            cells = [
                f"{loss_of(row)} ({starred({'C': row['clip']}, {'C': result['clips']})})"
                for row in rows
            ]
            lines.append([str(figure), way, f"{density:g}", *cells])
        equal = {row["epsilon"]: row["loss"] for row in here if row["way"] == "1-1-1"}
        for row in here:
            if row["way"] != "1-1-1" and math.isfinite(row["epsilon"]):
                below = {
                    at: bool(np.subtract(row["loss"], equal[at]).max() < 0)
                    for at in (weak, row["epsilon"])
                }
                same.setdefault(figure, []).append(below[row["epsilon"]])
                stronger.setdefault(figure, []).extend(
                    [below[weak]] if row["epsilon"] < weak else []
                )
    head = ["figure", "factors", "severe density", *(f"ε {number(level)}" for level in levels)]
    told = (
        f"**Unequal factors at a stronger level have a lower loss than equal factors at {weak:g} "
        f"in every seed in these cells: {_counts(stronger)}. They have a lower loss than equal "
        f"factors at the same level in these cells: {_counts(same)}.**"
    )
    facts = (
        "The table has the test loss. ε is for a client over the "
        f"{result['setting']['rounds']} rounds, zero-out, against an observer of sums. It does not "
        "cover an observer of uploads. The bound C on updates is chosen for every cell on examples "
        "that no client has. A star marks an end of the bounds "
        f"{', '.join(f'{clip:g}' for clip in result['clips'])}. No epsilon covers the choice."
    )
    return "\n\n".join([markdown_table(head, lines), told, facts, source(result)])


def loss_of(row: Mapping[str, Any]) -> str:
    """Format a row's loss as its mean ± standard deviation over seeds."""
    return mean_and_spread(row["loss"]).lstrip("+")


def _counts(held: Mapping[int, Sequence[bool]]) -> str:
    return ", ".join(
        f"figure {figure}: {sum(found)} of {len(found)}" for figure, found in sorted(held.items())
    )


STUDIES = {
    "orderings": Study(orderings, orderings_text, minutes=6),
    "region": Study(region, region_text, draw_region, minutes=8),
    "honest": Study(honest, honest_text, minutes=8),
}

if __name__ == "__main__":
    command("padpfl", __doc__, STUDIES)
