"""Pictures of runs, comparisons and experiments in one style, which need `jaxfl[plot]`."""

import contextlib
import html
import importlib.util
import io
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import scipy

from jaxfl._support.files import replacing
from jaxfl.report.looks import COLORS, SERIES, Look, looks, series

Axes: TypeAlias = Any
Figure: TypeAlias = Any
MetricsRow: TypeAlias = Mapping[str, Any]

SINGLE = 3.5
"""Width of one column of a page, in inches."""

DOUBLE = 7.0
"""Width of two columns of a page, in inches."""

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
    # Names may have dollar signs.
    "text.parse_math": False,
    "svg.fonttype": "none",
    # Equal pictures are equal files.
    "svg.hashsalt": "jaxfl",
    "pdf.fonttype": 42,
}
"""Settings of matplotlib for all pictures."""

_FORMATS = ("png", "pdf", "svg")
"""Formats of pictures."""

MEAN = ", mean and 95% interval"
"""Text after the name of a metric on the axis of a picture over several seeds."""

MISSING = "pictures need matplotlib: pip install 'jaxfl[plot]'"
"""Message of an error or a page if matplotlib is not installed."""


def available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Set matplotlib's settings for all pictures within the block.

    Raises:
        ValueError: Matplotlib is not installed.
    """
    if not available():
        raise ValueError(MISSING)
    # Matplotlib is optional, and most programs draw nothing.
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        yield


def new_figure(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> Figure:
    """Return a figure that pyplot does not manage.

    Args:
        width: Width in inches.
        height: Height in inches.
        layout: Matplotlib's layout engine. None leaves margins to the caller.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def import_matplotlib() -> None:
    """Import matplotlib if it is installed, so that the first picture does not wait for it."""
    if available():
        with style():
            new_figure(1.0, 1.0, layout=None)


def save(figure: Figure, path: str | os.PathLike) -> None:
    """Write a figure completely or not at all. The path's suffix is the format: png, pdf or svg.

    At a path without a suffix, a png file has exactly this name.

    Raises:
        ValueError: The path has another suffix, or matplotlib is not installed.
    """
    path = pathlib.Path(path)
    kind = path.suffix.removeprefix(".").lower() or "png"
    if kind not in _FORMATS:
        raise ValueError(
            f"path must end with one of {', '.join(_FORMATS)}, got {str(path)!r}. "
            "Give for instance 'figure.pdf'."
        )
    # Dates would make equal pictures different files.
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with style(), replacing(path) as temporary:
        figure.savefig(temporary, format=kind, metadata=dates.get(kind))


def svg(figure: Figure, name: str) -> str:
    """Return a figure as an element of a page, with its own ids, and with texts in the page's font.

    Args:
        figure: Figure that was made within `style()`.
        name: Description of the figure, which also distinguishes its ids from those of others.
    """
    text = io.StringIO()
    metadata = {"Date": None, "Creator": None}
    with style():
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    prefix = re.sub(r"\W", "-", name)
    # The head of an XML file, its metadata and its comments have no place in a page.
    around = r"^.*?(?=<svg )|<metadata>.*?</metadata>|<!--.*?-->"
    element = re.sub(around, "", text.getvalue(), flags=re.DOTALL)
    element = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", element)
    # Matplotlib's style of all elements would apply to the rest of the page too.
    element = element.replace(">*{", ">svg *{", 1)
    # The page's style makes a figure as wide as its column, and the view box keeps its shape.
    element = re.sub(r'\b(width|height)="[^"]*pt" ', "", element, count=2)
    label = f'<svg role="img" aria-label="{html.escape(name)}" '
    return re.sub(r"^<svg ", label, element).strip()


def column(rows: Sequence[MetricsRow], name: str) -> np.ndarray:
    """Return a column of rows of metrics as floats, with NaN where a row lacks it or has None."""
    return np.array([math.nan if row.get(name) is None else row[name] for row in rows], float)


def panels(rows: Sequence[MetricsRow], headline: str) -> dict[str, Callable[[Axes], None]]:
    """Return, by each panel's name, the function that draws the panel against rounds.

    The panels are the headline metric, and, as far as the rows have them, loss, epsilon and dropped
    updates.

    Args:
        rows: Rows of metrics.jsonl.
        headline: Name of the headline metric.
    """
    found: dict[str, Callable[[Axes], None]] = {
        headline: lambda axes: _draw_score(axes, rows, headline)
    }
    losses = {"train_loss": "train, participants", "loss": "test, all clients"}
    if any(_is_known(rows, name) for name in losses):
        found["loss"] = lambda axes: _draw_columns(axes, rows, losses, "loss")
    epsilons = {"epsilon": "one client, sums", "epsilon_example": "one example"}
    known = {name: text for name, text in epsilons.items() if _is_known(rows, name)}
    if known:
        found["epsilon"] = lambda axes: _draw_epsilons(axes, rows, known)
    if (column(rows, "nonfinite") > 0).any():
        found["dropped"] = lambda axes: _draw_columns(
            axes, rows, {"nonfinite": ""}, "dropped updates"
        )
    return found


def _is_known(rows: Sequence[MetricsRow], name: str) -> bool:
    """Return whether a column has a finite value."""
    return bool(np.isfinite(column(rows, name)).any())


def curves(title: str, rows: Sequence[MetricsRow], headline: str = "accuracy") -> Figure:
    """Return a figure, two columns of a page wide, with all panels of a run.

    `headline` is the metric of the first panel (see `panels`).
    """
    drawn = panels(rows, headline).values()
    height = 2.6
    margins = _panel_margins(len(drawn), height)
    with style():
        # Every run draws these panels, and a layout engine would take half of the time.
        figure = new_figure(DOUBLE, height, layout=None)
        figure.suptitle(title, x=0.01, ha="left", fontsize=9)
        row = figure.subplots(1, len(drawn), squeeze=False, gridspec_kw=margins)[0]
        for axes, draw in zip(row, drawn, strict=True):
            draw(axes)
    return figure


def _panel_margins(count: int, height: float) -> dict[str, float]:
    """Return the margins of a row of panels as arguments of matplotlib's `GridSpec`.

    There is room above the panels for the title and three lines of a legend.

    Args:
        count: Number of panels.
        height: Height of the figure in inches.
    """
    left = 0.5
    right = 0.1
    gap = 0.65
    panel = (DOUBLE - left - right - gap * (count - 1)) / count
    return {
        "left": left / DOUBLE,
        "right": 1 - right / DOUBLE,
        "bottom": 0.42 / height,
        "top": 1 - 0.75 / height,
        "wspace": gap / panel,
    }


def draw_curves(
    path: pathlib.Path, title: str, rows: Sequence[MetricsRow], headline: str = "accuracy"
) -> None:
    """Write the figure of `curves` if matplotlib is installed. The path's suffix is the format."""
    if available():
        save(curves(title, rows, headline), path)


def alone(draw: Callable[[Axes], None], height: float = 2.4) -> Figure:
    """Return a figure with one panel, which is one column of a page wide.

    Args:
        draw: Function that draws into the panel.
        height: Height in inches.
    """
    with style():
        figure = new_figure(SINGLE, height)
        draw(figure.subplots())
    return figure


def distribution(values: np.ndarray, name: str) -> Figure:
    """Return a figure with the histogram of a metric over clients, and with a line at its mean.

    Args:
        values: Finite value of each client, at least one.
        name: Name of the metric.
    """

    def draw(axes: Axes) -> None:
        mean = values.mean()
        axes.hist(values, bins=_bins(values), color=COLORS[5])
        axes.axvline(mean, color=COLORS[6], linestyle="--", label=f"mean {mean:.3g}")
        _counts(axes, f"test {name} of a client", "clients")

    return alone(draw)


def overlaid(groups: Mapping[str, np.ndarray], name: str) -> Figure:
    """Return a figure with histograms of groups in one panel, in the same bins.

    Args:
        groups: Values of each group, by its text in the legend.
        name: Name of the horizontal axis.
    """

    def draw(axes: Axes) -> None:
        bins = _bins(np.concatenate([*groups.values()]))
        for i, (label, values) in enumerate(groups.items()):
            hatch = "///" if i % 2 else ""
            axes.hist(values, bins=bins, color=COLORS[i], alpha=0.5, hatch=hatch, label=label)
        _counts(axes, name, "number")

    return alone(draw)


def _bins(values: np.ndarray) -> np.ndarray:
    number = min(20, max(5, round(math.sqrt(values.size))))
    return np.histogram_bin_edges(values, bins=number)


def _counts(axes: Axes, horizontal: str, vertical: str) -> None:
    """Set the labels and the legend of a panel whose vertical axis counts."""
    axes.yaxis.set_major_locator(_at_integers())
    axes.set(xlabel=horizontal, ylabel=vertical)
    legend_above(axes)


def interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> np.ndarray:
    """Return half the width of the interval of a mean over seeds, by Student's t.

    Args:
        values: Values `[S]` or `[S, R]` of S seeds. For a single seed the width is NaN.
        confidence: Confidence of the interval.

    >>> float(interval([0.0, 1.0, 2.0]).round(3))
    2.484
    """
    values = np.asarray(values, float)
    count = len(values)
    if count < 2:
        return np.full(values.shape[1:], math.nan)
    # The interval is the mean plus or minus t s / sqrt(S), with S - 1 degrees of freedom.
    error = values.std(0, ddof=1) / math.sqrt(count)
    return scipy.stats.t.ppf((1 + confidence) / 2, count - 1) * error


def comparison(
    found: Mapping[str, Mapping[float, tuple[float, float]]], headline: str, sends: Collection[str]
) -> Figure:
    """Return a figure of a metric against epsilon, with a curve for each method.

    A curve has means over seeds, and bars of their 95% intervals. A method without a finite epsilon
    is a horizontal line with a band. The line is dotted if the method sends nothing. A single seed
    has no interval. At most eight curves share a panel, and every panel has all lines. Labels
    follow the curves' order at their right end.

    Args:
        found: Mean and half the width of its interval by epsilon, for each method.
        headline: Name of the metric.
        sends: Names of the methods that send something.
    """
    lines, noisy = _by_noise(found)
    parts = [noisy[i : i + SERIES] for i in range(0, len(noisy), SERIES)] or [[]]
    with style():
        figure, panels_of_parts = _shared_panels(len(parts))
        for axes, names in zip(panels_of_parts, parts, strict=True):
            shown = {name: found[name] for name in [*names, *lines]}
            against_epsilon(axes, shown, sends, looks(found))
            legend_beside(axes)
        figure.supylabel(f"{headline}{MEAN}", fontsize="medium")
    return figure


def _shared_panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure, and its panels in one or two columns that share a vertical axis."""
    columns = min(2, count)
    rows = math.ceil(count / columns)
    width = 1.3 * SINGLE
    if columns == 2:
        width = DOUBLE
    figure = new_figure(width, 2.6 * rows)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    places = list(grid.ravel())
    # An odd number of panels leaves the last place of two columns empty.
    for axes in places[count:]:
        axes.set_axis_off()
    return figure, places[:count]


def against_epsilon(
    axes: Axes,
    found: Mapping[str, Mapping[float, tuple[float, float]]],
    sends: Collection[str],
    styles: Mapping[str, Look],
) -> None:
    """Draw one panel of `comparison`, without its legend and the name of its metric.

    Args:
        axes: The panel.
        found: Mean and half the width of its interval by epsilon, for each method.
        sends: Names of the methods that send something.
        styles: The look of each method.
    """
    lines, noisy = _by_noise(found)
    epsilons = _epsilons_on_axis(found)
    places = {e: i for i, e in enumerate(epsilons)}
    for i, name in enumerate(noisy):
        # Curves are shifted so that their bars do not cover each other.
        shift = 0.05 * (i - (len(noisy) - 1) / 2)
        points = sorted(found[name].items())
        horizontal = [places[e] + shift for e, _ in points]
        mean, half = zip(*(value for _, value in points), strict=True)
        # A single seed has no interval, so its bar has length 0.
        axes.errorbar(horizontal, mean, np.nan_to_num(half), label=name, **styles[name])
    for name in lines:
        ((mean, half),) = found[name].values()
        dash = ":"
        if name in sends:
            dash = "--"
        color = styles[name]["color"]
        _draw_level(axes, mean, half, color=color, linestyle=dash, label=name)
    means = [mean for points in found.values() for mean, _ in points.values()]
    _limit_shares(axes, np.array(means))
    _label_epsilons(axes, epsilons)
    axes.set(xlabel="ε", xlim=(-0.4, len(epsilons) - 0.6))


def _epsilons_on_axis(found: Mapping[str, Mapping[float, Any]]) -> list[float]:
    """Return the epsilons that have a place on the axis of a panel, in order."""
    _, noisy = _by_noise(found)
    epsilons = sorted({e for points in found.values() for e in points if math.isfinite(e)})
    # Infinity needs a place if a curve reaches it, or if there are only lines.
    if not noisy or any(math.inf in found[name] for name in noisy):
        epsilons.append(math.inf)
    return epsilons


def _draw_level(axes: Axes, mean: float, half: float, *, color: str, **options: Any) -> None:
    """Draw a horizontal line at a mean, with a band of the half width unless that is NaN."""
    axes.axhline(mean, color=color, **options)
    if math.isfinite(half):
        axes.axhspan(mean - half, mean + half, color=color, alpha=0.12, linewidth=0)


def _label_epsilons(axes: Axes, epsilons: Sequence[float]) -> None:
    """Set ticks for epsilons at equal distances, from 0, and label them."""
    names = ["∞" if math.isinf(epsilon) else f"{epsilon:g}" for epsilon in epsilons]
    axes.set_xticks(range(len(epsilons)), names)


def _by_noise(found: Mapping[str, Mapping[float, Any]]) -> tuple[list[str], list[str]]:
    """Return the names of the methods without a finite epsilon, and of the other methods."""
    noisy = [name for name, points in found.items() if any(map(math.isfinite, points))]
    return [name for name in found if name not in noisy], noisy


def against_costs(found: Mapping[str, Sequence[MetricsRow]], metric: str) -> Figure:
    """Return a figure of a metric against megabytes, and against hours if the rows have them.

    Args:
        found: Rows of `jaxfl.deployment_cost`, by method.
        metric: Name of the metric.
    """
    styles = looks(found)
    drawn = _costs_by_panel(found)
    with style():
        figure = new_figure(SINGLE * len(drawn) + 0.8, 2.6)
        row = figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
        for axes, (label, costs) in zip(row, drawn.items(), strict=True):
            for name, rows in found.items():
                axes.plot(costs[name], column(rows, metric), label=name, **styles[name])
            axes.set(xlabel=label, xscale="log")
            _label_decades(axes)
        row[0].set_ylabel(f"test {metric.replace('_', ' ')}")
        legend_beside(row[-1])
    return figure


def _costs_by_panel(found: Mapping[str, Sequence[MetricsRow]]) -> dict[str, dict[str, np.ndarray]]:
    """Return the costs of methods by the text of a panel's axis, as far as the rows have them."""
    megabytes = {}
    for name, rows in found.items():
        # Clients both send and receive.
        total = column(rows, "total_up") + column(rows, "total_down")
        megabytes[name] = total / 1e6
    costs = {"megabytes of all clients": megabytes}
    if all("hours" in row for rows in found.values() for row in rows):
        costs["hours"] = {name: column(rows, "hours") for name, rows in found.items()}
    return costs


def _label_decades(axes: Axes) -> None:
    """Label 1, 2 and 5 of each decade of a logarithmic axis, in digits.

    An axis whose ends differ by less than a factor of 5 is linear, because few of these numbers
    would lie on it.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axes.get_xlim()
    if high < 5 * low:
        axes.set_xscale("linear")
        return
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    # The default labels are formulas, which `_STYLE` shows as texts.
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def by_round(
    axes: Axes, rounds: Sequence[int | float], values: np.ndarray, label: str, look: Look
) -> None:
    """Draw one method's curve by round.

    Args:
        axes: The panel.
        rounds: Numbers of R rounds.
        values: Values `[S, R]` of S seeds. The curve is their mean, and a band is the 95% interval
            of the mean. A single seed has no band.
        label: Name of the method in the legend.
        look: Look of the method.
    """
    mean = values.mean(0)
    axes.plot(rounds, mean, label=label, markevery=_every(rounds), **look)
    if len(values) > 1:
        half = interval(values)
        axes.fill_between(
            rounds, mean - half, mean + half, color=look["color"], alpha=0.15, linewidth=0
        )
    whole_rounds(axes)


def whole_rounds(axes: Axes) -> None:
    """Label the horizontal axis with rounds, at integers only."""
    axes.xaxis.set_major_locator(_at_integers())
    axes.set_xlabel("round")


def legend_beside(axes: Axes) -> None:
    """Draw a legend at the right of the panel, in the order in which its curves end there."""
    _legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))


def legend_above(axes: Axes) -> None:
    """Draw a legend above the panel, in the order of `legend_beside`."""
    _legend(
        axes, loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.1, handlelength=1.6
    )


def _legend(axes: Axes, **options: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    # The largest last value comes first, because it is at the top of the panel.
    order = sorted(range(len(labels)), key=lambda i: -_end(handles[i]))
    if labels:
        axes.legend([handles[i] for i in order], [labels[i] for i in order], **options)


def _end(handle: Any) -> float:
    """Return the vertical value of a curve's last finite point, or -infinity without a curve.

    Args:
        handle: Entry of a legend. That of a curve with error bars is a tuple.
    """
    line = handle
    if isinstance(handle, tuple):
        line = handle[0]
    # Bands and bars have no curve.
    if not hasattr(line, "get_ydata"):
        return -math.inf
    values = np.asarray(line.get_ydata(), float)
    known = values[np.isfinite(values)]
    if not known.size:
        return -math.inf
    return float(known[-1])


def _draw_score(axes: Axes, rows: Sequence[MetricsRow], headline: str) -> None:
    """Draw the panel of the headline metric."""
    rounds = column(rows, "round")
    mean = column(rows, headline)
    worst = column(rows, f"{headline}_worst10")
    spread = column(rows, f"{headline}_std")
    central = column(rows, f"central_{headline}")
    drawn = np.concatenate([mean, worst, central])
    ends = [mean - spread, mean + spread]
    if _are_shares(drawn):
        # A standard deviation may reach beyond 0 and 1, but a share cannot.
        ends = [np.clip(end, 0, 1) for end in ends]
    band = "± std over clients"
    axes.fill_between(rounds, *ends, color=COLORS[0], alpha=0.15, linewidth=0, label=band)
    lines = {"mean over clients": mean, "worst 10% of clients": worst}
    if np.isfinite(central).any():
        lines["global model, central test set"] = central
    for i, (label, values) in enumerate(lines.items()):
        axes.plot(rounds, values, label=label, markevery=_every(rounds), **series(i))
    _limit_shares(axes, drawn)
    axes.set_ylabel(f"test {headline}")
    legend_above(axes)
    whole_rounds(axes)


def _are_shares(values: np.ndarray) -> bool:
    """Return whether all known values are from 0 to 1."""
    return not np.any((values < 0) | (values > 1))


def _limit_shares(axes: Axes, values: np.ndarray) -> None:
    """Limit the vertical axis to just beyond 0 to 1 if all known values are shares.

    Intervals may exceed this range, but shares cannot.
    """
    if _are_shares(values):
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, -0.02), min(top, 1.02))


def _draw_columns(
    axes: Axes, rows: Sequence[MetricsRow], names: Mapping[str, str], label: str
) -> None:
    """Draw a panel with a curve for each column that has a finite value.

    Args:
        axes: The panel.
        rows: Rows of metrics.jsonl.
        names: Texts in the legend by name of a column. An empty text leaves the curve out of the
            legend.
        label: Name of the vertical axis.
    """
    rounds = column(rows, "round")
    for i, (name, text) in enumerate(names.items()):
        if _is_known(rows, name):
            values = column(rows, name)
            axes.plot(rounds, values, label=text or None, markevery=_every(rounds), **series(i))
    axes.set_ylabel(label)
    legend_above(axes)
    whole_rounds(axes)


def _draw_epsilons(axes: Axes, rows: Sequence[MetricsRow], names: Mapping[str, str]) -> None:
    """Draw the epsilons so far. Two curves get a legend, and a single one is named on the axis."""
    if len(names) > 1:
        _draw_columns(axes, rows, names, "ε so far")
        return
    # A single curve needs no legend, so the axis says whose epsilon it is.
    ((name, text),) = names.items()
    _draw_columns(axes, rows, {name: ""}, f"ε so far ({text})")


def _every(rounds: Sequence[int | float] | np.ndarray) -> int:
    """Return the distance between markers, of which a curve has at most a dozen."""
    return max(1, math.ceil(len(rounds) / 12))


def _at_integers() -> Any:
    """Return a locator of at most 7 ticks at integers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=6, integer=True, min_n_ticks=1)
