"""Pictures in one style: those of a run, of a comparison, and of experiments. They need matplotlib (`jaxfl[plot]`)."""

import contextlib
import html
import importlib.util
import io
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxfl.files import replacing

Axes: TypeAlias = Any
Figure: TypeAlias = Any
Row: TypeAlias = Mapping[str, Any]

SINGLE, DOUBLE = 3.5, 7.0
"""Widths of one column of a page and of two, in inches."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Of Okabe and Ito: told apart by colour-blind readers too."""
_MARKERS = "osD^vPX*"
_DASHES = ("-", "--", "-.", ":")
_SERIES = len(COLORS)
"""The most in one panel."""

_STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.linewidth": 0.6,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "errorbar.capsize": 2,
    "savefig.dpi": 200,
    "text.parse_math": False,  # names may hold dollar signs
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxfl",  # equal pictures are equal files
    "pdf.fonttype": 42,
}


MISSING = "pictures need matplotlib: pip install 'jaxfl[plot]'"


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Matplotlib's settings for all pictures, within the block only; raises ValueError without matplotlib."""
    if not available():
        raise ValueError(MISSING)
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def series(index: int) -> dict[str, Any]:
    """Colour, marker and line of a curve: without its line, or without colour, none of the first eight is like another.

    >>> [series(index)["color"] for index in (0, 8)], [series(index)["marker"] for index in (0, 8)]
    (['#0072B2', '#0072B2'], ['o', '^'])
    """
    turn, place = divmod(index, _SERIES)
    marker = _MARKERS[(place + 3 * turn) % _SERIES]
    return {"color": COLORS[place], "marker": marker, "linestyle": _DASHES[turn % len(_DASHES)]}


def new_figure(width: float, height: float) -> Figure:
    """A figure that belongs to nobody's pyplot, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: str | os.PathLike) -> None:
    """Write a figure, whole or not at all; the name ends in png, pdf or svg."""
    path = pathlib.Path(path)
    kind = path.suffix.removeprefix(".").lower() or "png"
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with style(), replacing(path) as temporary:
        figure.savefig(temporary, format=kind, metadata=dates.get(kind))


def svg(figure: Figure, name: str) -> str:
    """A figure as an element of a page, with its own ids and with texts in the page's font.

    Args:
        figure: made within `style()`.
        name: distinguishes the ids of several figures, and describes this one.
    """
    text = io.StringIO()
    with style():
        figure.savefig(
            text, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    prefix = re.sub(r"\W", "-", name)
    element = re.sub(
        r"^.*?(?=<svg )|<metadata>.*?</metadata>|<!--.*?-->", "", text.getvalue(), flags=re.DOTALL
    )
    element = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", element)
    element = element.replace(">*{", ">svg *{", 1)
    label = f'<svg role="img" aria-label="{html.escape(name)}" '
    return re.sub(
        r"^<svg ", label, re.sub(r'\b(width|height)="[^"]*pt" ', "", element, count=2)
    ).strip()


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    """A metric by evaluation; NaN where it is not known."""
    return np.array([math.nan if row.get(name) is None else row[name] for row in rows], float)


def panels(rows: Sequence[Row], headline: str) -> dict[str, Callable[[Axes], None]]:
    """How to draw what a run has by round: the headline metric, the loss, and, where there are any, the others.

    Args:
        rows: of metrics.jsonl.
        headline: name of the metric of that panel.
    """
    found: dict[str, Callable[[Axes], None]] = {headline: lambda axes: _score(axes, rows, headline)}
    losses = {"train_loss": "train, participants", "loss": "test, all clients"}
    if any(np.isfinite(column(rows, name)).any() for name in losses):
        found["loss"] = lambda axes: _lines(axes, rows, losses, "loss")
    costs = {"epsilon": "one client, sums", "epsilon_example": "one example"}
    costs = {name: text for name, text in costs.items() if np.isfinite(column(rows, name)).any()}
    if costs:
        label = "ε so far" if len(costs) > 1 else f"ε so far ({next(iter(costs.values()))})"
        texts = costs if len(costs) > 1 else dict.fromkeys(costs, "")
        found["epsilon"] = lambda axes: _lines(axes, rows, texts, label)
    if (column(rows, "nonfinite") > 0).any():
        found["dropped"] = lambda axes: _lines(axes, rows, {"nonfinite": ""}, "dropped updates")
    return found


def curves(title: str, rows: Sequence[Row], headline: str = "accuracy") -> Figure:
    """All panels of a run, side by side, two columns wide."""
    drawn = panels(rows, headline).values()
    with style():
        figure = new_figure(DOUBLE, 2.6)
        figure.suptitle(title, x=0.01, ha="left", fontsize=9)
        for axes, draw in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
            draw(axes)
    return figure


def draw_curves(
    path: pathlib.Path, title: str, rows: Sequence[Row], headline: str = "accuracy"
) -> None:
    """Write `curves`, unless matplotlib is missing; the path's suffix is the format."""
    if available():
        save(curves(title, rows, headline), path)


def alone(draw: Callable[[Axes], None], height: float = 2.4) -> Figure:
    """One panel, one column wide."""
    with style():
        figure = new_figure(SINGLE, height)
        draw(figure.subplots())
    return figure


def distribution(values: np.ndarray, name: str) -> Figure:
    """Histogram of a metric over clients, and its mean."""

    def draw(axes: Axes) -> None:
        axes.hist(values, bins=_bins(values), color=COLORS[5])
        axes.axvline(
            values.mean(), color=COLORS[6], linestyle="--", label=f"mean {values.mean():.3g}"
        )
        _counts(axes, f"test {name} of a client", "clients")

    return alone(draw)


def overlaid(groups: Mapping[str, np.ndarray], name: str) -> Figure:
    """Histograms of two groups in one panel, in the same bins."""

    def draw(axes: Axes) -> None:
        bins = _bins(np.concatenate([*groups.values()]))
        for i, (label, values) in enumerate(groups.items()):
            axes.hist(
                values, bins=bins, color=COLORS[i], alpha=0.5, hatch=("", "///")[i % 2], label=label
            )
        _counts(axes, name, "number")

    return alone(draw)


def _bins(values: np.ndarray) -> np.ndarray:
    return np.histogram_bin_edges(values, bins=min(20, max(5, round(math.sqrt(values.size)))))


def _counts(axes: Axes, horizontal: str, vertical: str) -> None:
    axes.yaxis.set_major_locator(_whole())
    axes.set(xlabel=horizontal, ylabel=vertical)
    legend_above(axes)


def comparison(
    found: Mapping[str, Mapping[float, tuple[float, float]]], headline: str, sends: Collection[str]
) -> Figure:
    """A metric against epsilon, each method a curve of means with bars of one standard deviation over seeds.

    A method without noise is a horizontal line, dotted where it sends nothing. At most eight curves share a panel;
    every panel has all lines. Labels follow the curves' order at their right end.

    Args:
        found: for each method, (mean, standard deviation) by epsilon.
        headline: name of the metric.
        sends: methods that send something.
    """
    lines, noisy = _by_noise(found)
    parts = [noisy[i : i + _SERIES] for i in range(0, len(noisy), _SERIES)] or [[]]
    columns = min(2, len(parts))
    rows = math.ceil(len(parts) / columns)
    with style():
        figure = new_figure((0, 1.3 * SINGLE, DOUBLE)[columns], 2.6 * rows)
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
        for axes in grid.ravel()[len(parts) :]:
            axes.set_axis_off()
        for axes, names in zip(grid.ravel(), parts, strict=False):
            against_epsilon(axes, {name: found[name] for name in [*names, *lines]}, sends)
            legend_beside(axes)
        for axes in grid[:, 0]:
            axes.set_ylabel(f"{headline}, mean ± std over seeds")
    return figure


def against_epsilon(
    axes: Axes, found: Mapping[str, Mapping[float, tuple[float, float]]], sends: Collection[str]
) -> None:
    """One panel of `comparison`, without its legend and the name of its metric."""
    lines, noisy = _by_noise(found)
    finite = sorted({e for points in found.values() for e in points if math.isfinite(e)})
    reached = [math.inf] if not noisy or any(math.inf in found[name] for name in noisy) else []
    places = {e: i for i, e in enumerate([*finite, *reached])}
    for i, name in enumerate(noisy):
        points = sorted(found[name].items())
        aside = 0.05 * (i - (len(noisy) - 1) / 2)  # so that bars do not cover each other
        mean, spread = zip(*(value for _, value in points), strict=True)
        axes.errorbar(
            [places[e] + aside for e, _ in points],
            mean,
            np.nan_to_num(spread),
            label=name,
            **series(i),
        )
    for i, name in enumerate(lines):
        ((mean, _),) = found[name].values()
        dash = "--" if name in sends else ":"
        axes.axhline(mean, color=str(0.25 + 0.15 * (i % 4)), linestyle=dash, label=name)
    axes.set_xticks(list(places.values()), ["∞" if math.isinf(e) else f"{e:g}" for e in places])
    axes.set(xlabel="ε", xlim=(-0.4, len(places) - 0.6))


def _by_noise(found: Mapping[str, Mapping[float, Any]]) -> tuple[list[str], list[str]]:
    """Methods without noise, and those with some."""
    noisy = [name for name, points in found.items() if any(map(math.isfinite, points))]
    return [name for name in found if name not in noisy], noisy


def by_round(
    axes: Axes, rounds: Sequence[int | float], values: np.ndarray, label: str, index: int
) -> None:
    """One method's curve: the mean over seeds `[S, R]`, in a band from the least to the largest."""
    look = series(index)
    axes.plot(rounds, values.mean(0), label=label, markevery=_every(rounds), **look)
    if len(values) > 1:
        axes.fill_between(
            rounds, values.min(0), values.max(0), color=look["color"], alpha=0.15, linewidth=0
        )
    whole_rounds(axes)


def whole_rounds(axes: Axes) -> None:
    """Rounds are whole numbers."""
    axes.xaxis.set_major_locator(_whole())
    axes.set_xlabel("round")


def legend_beside(axes: Axes) -> None:
    """A legend at the right of the panel, in the order in which its curves end there."""
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))


def legend_above(axes: Axes) -> None:
    """A legend above the panel, in the same order."""
    _legend(
        axes, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.1, handlelength=1.6
    )


def _legend(axes: Axes, **options: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: -_end(handles[i]))
    if labels:
        axes.legend([handles[i] for i in order], [labels[i] for i in order], **options)


def _end(handle: Any) -> float:
    """Height of a curve's last known point; bands and bars come last."""
    line = handle[0] if isinstance(handle, tuple) else handle
    values = np.asarray(line.get_ydata(), float) if hasattr(line, "get_ydata") else np.zeros(0)
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else -math.inf


def _score(axes: Axes, rows: Sequence[Row], headline: str) -> None:
    rounds, mean = column(rows, "round"), column(rows, headline)
    spread, worst = column(rows, f"{headline}_std"), column(rows, f"{headline}_worst10")
    share = not np.any((np.append(mean, worst) < 0) | (np.append(mean, worst) > 1))
    low, high = (np.clip(edge, 0, 1) if share else edge for edge in (mean - spread, mean + spread))
    axes.fill_between(
        rounds, low, high, color=COLORS[0], alpha=0.15, linewidth=0, label="± std over clients"
    )
    for i, (values, label) in enumerate(
        [(mean, "mean over clients"), (worst, "worst 10% of clients")]
    ):
        axes.plot(rounds, values, label=label, markevery=_every(rounds), **series(i))
    if share:
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, -0.02), min(top, 1.02))
    axes.set_ylabel(f"test {headline}")
    legend_above(axes)
    whole_rounds(axes)


def _lines(axes: Axes, rows: Sequence[Row], names: Mapping[str, str], label: str) -> None:
    rounds = column(rows, "round")
    for i, (name, text) in enumerate(names.items()):
        if np.isfinite(values := column(rows, name)).any():
            axes.plot(rounds, values, label=text or None, markevery=_every(rounds), **series(i))
    axes.set_ylabel(label)
    legend_above(axes)
    whole_rounds(axes)


def _every(rounds: Sequence[int | float] | np.ndarray) -> int:
    """A dozen markers at most."""
    return max(1, math.ceil(len(rounds) / 12))


def _whole() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=6, integer=True, min_n_ticks=1)
