"""Where PADPFL's orderings hold: figures 2, 4, 6 and 8 without privacy, and the region of those with it.

python -m experiments.padpfl region
"""

import math
import pathlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import SymLogNorm

from experiments.common import sweep_each
from experiments.padpfl.setting import SCENARIOS, Setting, impacts, on_copy, sizes, split
from experiments.study import Options, Result, Study, command, markdown_table, source
from jaxfl import grid
from jaxfl.algorithms import padpfl, padpfl_paper
from jaxfl.data import load
from jaxfl.models import mlp
from jaxfl.run import plots
from jaxfl.types import Algorithm

WEAK = 100.0
"""The weaker level, as the paper's rule claims it."""
RATIOS = (1.0, 1.5, 2.5, 4.0)
"""Of the weaker level to the stronger one."""
DENSITIES = (0.25, 0.5, 0.75, 1.0)
PANELS = ((1, 5), (1, 20), (2, 20), (4, 20), (5, 20))
"""Scenario and rounds."""
FIGURES = {1: 2, 2: 4, 3: 6, 4: 8}
"""Without privacy, by scenario."""
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
) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """Test loss by point and seed, and the privacy statements; all points in one program.

    Args:
        scenario: 1 to 4.
        way: to weight the clients.
        setting: the rest.
        points: columns of `copy`, a position in `densities`, and `epsilon`, where there is noise.
        options: seeds and folder.
        densities: of the severe noise.
        classes: of a client; None: identical distributions.
    """
    own, data = SCENARIOS[scenario], load(setting.data)
    model = mlp(data.train_inputs.shape[1:], data.classes, hidden=(setting.hidden,))
    shared = {"rounds": setting.rounds, "impacts": impacts(own, setting, way), "local": setting.local(own)}
    noise = {"clip": setting.clip, "delta": setting.claimed_delta, "smallest": min(sizes(own, setting))}

    def build(copy: float, epsilon: float = math.inf) -> Algorithm:
        free = {"clip": math.inf, "delta": setting.delta}
        method = partial(padpfl_paper, **noise) if "epsilon" in points else partial(padpfl, **free)
        return on_copy(method(model, epsilon=epsilon, mu=setting.mu, **shared), own, setting, copy, len(densities))

    runs = sweep_each(
        f"scenario {scenario}, {way}",
        build,
        points,
        partial(split, own, setting, data, densities, classes),
        rounds=setting.rounds,
        seeds=options.seeds,
        out=options.out,
        config=setting._asdict() | {"densities": densities, "classes": classes},
        eval_every=setting.rounds,
    )
    return [[run.metrics[-1]["loss"] for run in point] for point in runs], [point[0].statement for point in runs]


def region(options: Options) -> Result:
    """Losses of the best way at stronger levels and of equal factors at the weaker one."""
    found = []
    for scenario, rounds in PANELS[:1] if options.smoke else PANELS:
        setting, how = Setting(rounds=rounds), partial(losses, scenario)
        if scenario in NAMES:
            setting, how = setting._replace(full_batch=False, epochs=2), partial(losses, scenario, classes=None)
        setting = setting.sized(smoke=options.smoke)
        copies = range(len(DENSITIES))
        points = grid(copy=copies, epsilon=[WEAK / ratio for ratio in RATIOS])
        best, stated = how(SCENARIOS[scenario].best, setting, points, options)
        even, _ = how("1-1-1", setting, grid(copy=copies, epsilon=[WEAK]), options)
        for copy, density in enumerate(DENSITIES):
            own = slice(copy * len(RATIOS), (copy + 1) * len(RATIOS))
            honest = [
                {who: row["honest"][who]["rdp"]["total"] for who in ("aggregate", "upload")} for row in stated[own]
            ]
            facts = {"scenario": scenario, "rounds": rounds, "density": density}
            found.append(facts | {"best": best[own], "equal": even[copy], "honest": honest})
    return {"setting": Setting()._asdict(), "weak": WEAK, "ratios": RATIOS, "cells": found}


def orderings(options: Options) -> Result:
    """Losses without noise and clip of the ways that the text names."""
    found = []
    for scenario in FIGURES:
        own = SCENARIOS[scenario]
        densities = (0.0,) if scenario == 3 else (0.5, 1.0)
        populations: list[tuple[int | None, bool]] = [(5, True), *([(None, False)] if scenario == 1 else [])]
        for classes, full_batch in populations[:1] if options.smoke else populations:
            setting = Setting(full_batch=full_batch).sized(smoke=options.smoke)
            how: dict[str, Any] = {"densities": densities, "classes": classes}
            points = {"copy": list(range(len(densities)))}
            ways = {way: losses(scenario, way, setting, points, options, **how)[0] for way in (own.best, *own.others)}
            for copy, density in enumerate(densities):
                facts = {"scenario": scenario, "classes": classes, "full_batch": full_batch, "density": density}
                found.append(facts | {"losses": {way: values[copy] for way, values in ways.items()}})
    return {"setting": Setting()._asdict(), "cells": found}


def gains(cell: Mapping[str, Any], index: int) -> np.ndarray:
    """Loss of the best way less that of equal factors, by seed; below 0 the paper's ordering holds."""
    return np.subtract(cell["best"][index], cell["equal"])


def panels(result: Result) -> list[tuple[int, int]]:
    """Scenario and rounds, in order."""
    return list(dict.fromkeys((cell["scenario"], cell["rounds"]) for cell in result["cells"]))


def cells_of(result: Result, panel: tuple[int, int]) -> list[Mapping[str, Any]]:
    """Of a panel, by density."""
    return [cell for cell in result["cells"] if (cell["scenario"], cell["rounds"]) == panel]


def mean_and_spread(values: Sequence[float] | np.ndarray) -> str:
    """Mean ± standard deviation of a difference."""
    spread = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):+.2f}{spread}"


def region_text(result: Result) -> str:
    """A line for each panel and density; bold where the ordering holds in every seed."""
    head = ["scenario", "T", "severe density", *(f"ε {result['weak'] / ratio:.3g}" for ratio in result["ratios"])]
    lines, held = [], []
    for panel in panels(result):
        for cell in cells_of(result, panel):
            row = [gains(cell, index) for index in range(len(result["ratios"]))]
            text = [f"**{mean_and_spread(values)}**" if values.max() < 0 else mean_and_spread(values) for values in row]
            name = NAMES.get(panel[0], str(panel[0]))
            lines.append([f"{name}: {SCENARIOS[panel[0]].best}", str(panel[1]), f"{cell['density']:g}", *text])
            held += [values.max() < 0 for values in row[1:]]
    honest = [cell["honest"] for cell in result["cells"]]
    sums = [level["aggregate"] for row in honest for level in row]
    uploads = [level["upload"] for row in honest for level in row]
    verdict = f"ordering reproduced in {sum(held)} of {len(held)} cells at a stronger level, in every seed"
    if not all(held):
        verdict += (
            ", elsewhere not, because the server's noise grows as T max(p) / ε: at one level it is up to twice as "
            "large as for equal factors, which costs more there than the corruption of the data"
        )
    return "\n\n".join(
        [
            "![Where the private ordering holds](region.png)",
            f"Test loss of the unequal factors at the claimed ε of the column, less that of equal ones at "
            f"{result['weak']:g}; below 0 the paper's ordering holds; bold: in every seed.",
            markdown_table(head, lines),
            f"**Figures 3, 5 and 9: {verdict}.** Honest ε of these runs, delta 0.01: {min(sums):.2g} to "
            f"{max(sums):.2g} against who sees sums, {min(uploads):.2g} to {max(uploads):.2g} against the server.",
            source(result),
        ]
    )


def draw_region(result: Result, path: pathlib.Path) -> None:
    """Mean difference by level and density, a panel for each scenario and number of rounds."""
    shown = panels(result)
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
            values = np.array([[gains(cell, index).mean() for index in range(len(result["ratios"]))] for cell in cells])
            x, y = np.arange(values.shape[1]), np.arange(values.shape[0])
            axes.imshow(values, origin="lower", cmap="PuOr_r", norm=scale, aspect="auto")
            axes.grid(visible=False)
            for i, j in np.ndindex(values.shape):
                color = "white" if abs(values[i, j]) > 0.3 else "black"
                axes.text(j, i, f"{values[i, j]:+.2f}", ha="center", va="center", fontsize=6, color=color)
            name = NAMES.get(panel[0], str(panel[0]))[:10]
            axes.set_title(f"scenario {name}, T = {panel[1]}")
            axes.set_xticks(x, [f"{ratio:g}" for ratio in result["ratios"]])
            axes.tick_params(labelbottom=True)
            axes.set_yticks(y, [f"{cell['density']:g}" for cell in cells])
        figure.supxlabel("weaker over stronger ε", fontsize="medium")
        figure.supylabel("density of severe noise", fontsize="medium")
        ticks = [-1, -0.1, 0, 0.1, 1]
        bar = figure.colorbar(ScalarMappable(scale, "PuOr_r"), ax=figure.axes, ticks=ticks, format="%g")
        bar.set_label("loss, unequal less equal factors")
    plots.save(figure, path.with_suffix(".png"))


def orderings_text(result: Result) -> str:
    """A line for each scenario, population and density, with whether the way that the text calls best is."""
    lines = []
    for cell in result["cells"]:
        best, *others = cell["losses"]
        for other in others:
            difference = np.subtract(cell["losses"][best], cell["losses"][other])
            seen = "every seed" if difference.max() < 0 else ("no seed" if difference.min() >= 0 else "some seeds")
            held = [f"{np.mean(cell['losses'][way]):.3f}" for way in (best, other)]
            kind = "identical" if cell["classes"] is None else f"{cell['classes']} classes"
            kind += ", full batch" if cell["full_batch"] else ", batches of 10"
            density = "sizes" if cell["scenario"] == 3 else f"{cell['density']:g}"
            names = [f"{FIGURES[cell['scenario']]}", kind, density, f"{best} < {other}"]
            lines.append([*names, *held, mean_and_spread(difference), seen])
    head = ["figure", "clients", "severe density", "ordering", "first", "second", "difference", "holds in"]
    told = []
    for figure in sorted({line[0] for line in lines}):
        own = [line[-1] == "every seed" for line in lines if line[0] == figure]
        told.append(f"{figure}: {sum(own)} of {len(own)}")
    verdict = (
        f"**Ordering reproduced in every seed in rows of figure {', '.join(told)}; elsewhere not, because who is "
        "weighted down takes examples and classes along that still help.**"
    )
    return "\n\n".join([markdown_table(head, lines), verdict, source(result)])


STUDIES = {
    "orderings": Study(orderings, orderings_text, minutes=6),
    "region": Study(region, region_text, draw_region, minutes=8),
}

if __name__ == "__main__":
    command("padpfl", __doc__, STUDIES)
