"""Pictures: nothing covers the data, rounds are whole, and labels have the curves' order."""

import math

import matplotlib
import numpy as np
import pytest

from jaxfl import algorithms
from jaxfl.report import plots
from jaxfl.report.comparison import Comparison
from jaxfl.report.looks import METHODS, looks, series


def rows(count, *, noisy=True, every=10):
    """Return the metrics of a run with rising scores, falling losses and growing epsilons."""
    made = []
    for i in range(1, count + 1):
        mean = 0.6 + 0.3 * i / count
        row = {
            "round": every * i,
            "accuracy": mean,
            "accuracy_std": 0.08,
            "accuracy_worst10": mean - 0.2,
        }
        row |= {
            "loss": 2.0 / i,
            "train_loss": 1.5 / i,
            "nonfinite": 0,
            "epsilon": math.sqrt(i) if noisy else None,
        }
        made.append(row)
    return made


def drawn(figure):
    figure.canvas.draw()
    return figure


def covered(figure):
    """Return the boxes of legends and titles that cover a part of a panel's inside."""
    renderer = figure.canvas.get_renderer()
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    boxes = [
        box.get_window_extent(renderer) for box in (*legends, *filter(None, [figure._suptitle]))
    ]
    inner = [axes.get_window_extent(renderer).padded(-1) for axes in figure.axes]
    return [box for box in boxes for own in inner if box.overlaps(own)]


def outside(figure):
    """Return the boxes of legends that reach beyond the picture."""
    renderer = figure.canvas.get_renderer()
    boxes = [
        axes.get_legend().get_window_extent(renderer) for axes in figure.axes if axes.get_legend()
    ]
    return [
        b
        for b in boxes
        if b.x0 < -1 or b.y0 < -1 or b.x1 > figure.bbox.x1 + 1 or b.y1 > figure.bbox.y1 + 1
    ]


@pytest.mark.parametrize(("count", "every"), [(1, 1), (3, 1), (7, 3), (50, 10), (500, 1)])
def test_rounds_are_whole_and_nothing_covers_the_data(count, every):
    figure = drawn(plots.curves("dp_fedavg", rows(count, every=every)))
    assert not covered(figure)
    assert not outside(figure)
    assert figure.get_figwidth() == plots.DOUBLE
    for axes in figure.axes:
        ticks = [
            tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]
        ]
        assert ticks
        assert all(tick == round(tick) for tick in ticks)
        assert len(ticks) <= 8
        for line in axes.lines:
            assert len(range(0, count, line.get_markevery())) <= 12


def test_axes_fit_the_data_and_say_what_a_band_is():
    (axes, *_), found = (figure := drawn(plots.curves("m", rows(10)))).axes, rows(10)
    bottom, top = axes.get_ylim()
    low = min(row["accuracy_worst10"] for row in found)
    high = max(row["accuracy"] + row["accuracy_std"] for row in found)
    assert bottom < low < high < top <= 1.02
    assert (high - low) / (top - bottom) > 0.85
    assert "± std over clients" in [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(figure.axes) == 3


def test_there_is_no_panel_without_numbers():
    assert list(plots.panels(rows(3), "accuracy")) == ["accuracy", "loss", "epsilon"]
    assert list(plots.panels(rows(3, noisy=False), "accuracy")) == ["accuracy", "loss"]
    dropped = [row | {"nonfinite": 2} for row in rows(3)]
    assert list(plots.panels(dropped, "accuracy")) == ["accuracy", "loss", "epsilon", "dropped"]
    untested = [
        row | dict.fromkeys(("accuracy", "accuracy_std", "accuracy_worst10")) for row in rows(3)
    ]
    drawn(plots.curves("m", untested))


def test_labels_have_the_order_of_the_curves():
    figure = drawn(plots.curves("m", rows(10)))
    order = [
        [text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes[:2]
    ]
    assert order[0][:2] == ["mean over clients", "worst 10% of clients"]
    assert order[1] == ["test, all clients", "train, participants"]


def test_wide_intervals_of_shares_do_not_stretch_the_panel():
    axes = drawn(plots.comparison({"a": {1.0: (0.95, 0.6)}}, "accuracy", {"a"})).axes[0]
    assert axes.get_ylim()[1] <= 1.02
    axes = drawn(plots.comparison({"a": {1.0: (3.0, 0.6)}}, "loss", {"a"})).axes[0]
    assert axes.get_ylim()[1] > 3.6


def found(count):
    """Return scores by method and epsilon: `count` methods in rising order, and two references."""
    noisy = {f"method {k}": dict.fromkeys((1.0, 8.0), (0.3 + 0.04 * k, 0.01)) for k in range(count)}
    return noisy | {"FedAvg": {math.inf: (0.9, 0.01)}, "local": {math.inf: (0.32, math.nan)}}


@pytest.mark.parametrize("count", [0, 1, 5, 8, 9, 17])
def test_at_most_eight_curves_share_a_panel(count):
    figure = drawn(plots.comparison(found(count), "accuracy", {"FedAvg"}))
    shown = [axes for axes in figure.axes if axes.axison]
    assert len(shown) == max(1, math.ceil(count / 8))
    assert not covered(figure)
    assert not outside(figure)
    seen = []
    for axes in shown:
        names = [text.get_text() for text in axes.get_legend().get_texts()]
        ends = [
            next(iter(reversed([value for value, _ in found(count)[name].values()])))
            for name in names
        ]
        assert ends == sorted(ends, reverse=True)
        assert {"FedAvg", "local"} <= {*names}
        seen += [name for name in names if name.startswith("method")]
        ticks = [text.get_text() for text in axes.get_xticklabels()]
        assert ticks == (["1", "8"] if count else ["∞"])  # infinity only where a curve reaches it
    assert sorted(seen) == sorted(f"method {k}" for k in range(count))
    assert figure.get_figwidth() <= plots.DOUBLE


def test_series_differ_in_more_than_colour():
    made = [series(i) for i in range(32)]
    assert len({(look["color"], look["marker"]) for look in made}) == 32  # points have no line
    assert (
        len({look["marker"] for look in made[:8]}) == len({look["color"] for look in made[:8]}) == 8
    )


def pair(look):
    return look["color"], look["marker"]


def test_every_builder_has_a_look_of_its_own():
    assert sorted(METHODS) == sorted(algorithms.__all__)
    assert len({pair(look) for look in looks(METHODS).values()}) == len(METHODS)
    assert all(looks([name])[name] == look for name, look in looks(METHODS).items())


@pytest.mark.parametrize(
    ("name", "builder"),
    [
        ("DP-FedAvg-fb", "dp_fedavg_fb"),
        ("local only", "local_only"),
        ("trained alone", "local_only"),
        ("recipe", "dp_fedavg_mixed"),
        ("DP-FedAvg, corrected", "prior_corrected"),
        ("linear IFCA, fine-tuned and corrected", "ifca"),
        ("DP-pFedDSU as printed", "dp_pfeddsu_paper"),
    ],
)
def test_a_method_has_one_look_in_every_picture(name, builder):
    others = ["mine", "FedAvg", "case 1", "SCAFFOLD"]
    for names in ([name], [name, *others], [*others, name]):
        assert looks(names)[name] == looks([builder])[builder]
        assert list(looks(names)) == names


def test_other_curves_have_looks_that_are_left():
    names = [f"case {i}" for i in range(7)]
    found = looks([*names[:3], "DP-FedAvg", *names[3:]])
    assert len({look["color"] for look in found.values()}) == 8
    assert looks(names) == {name: series(i) for i, name in enumerate(names)}
    # A variant leaves the look to its method, and a picture of many curves never ends in an error.
    both = looks(["linear IFCA", "IFCA"])
    assert both["IFCA"] == looks(["ifca"])["ifca"] != both["linear IFCA"]
    assert len({pair(look) for look in looks(map(str, range(64))).values()}) == 64
    assert len(looks(map(str, range(100)))) == 100


def test_bands_are_t_intervals_of_the_mean():
    # Four seeds: t(0.975, 3) is 3.1824, and the standard error is the deviation over 2.
    values = np.array([[0.1, 0.5], [0.2, 0.5], [0.4, 0.5], [0.5, 0.5]])
    half = 3.182446 * math.sqrt((0.04 + 0.01 + 0.01 + 0.04) / 3) / 2
    assert plots.interval(values) == pytest.approx([half, 0.0], rel=1e-6)
    assert plots.interval(values[:, 0], 0.5) == pytest.approx(half * 0.764892 / 3.182446, rel=1e-5)
    assert np.isnan(plots.interval([0.3]))

    def draw(axes):
        plots.by_round(axes, [1, 2], values, "m", series(0))

    (band,) = plots.alone(draw).axes[0].collections
    corners = band.get_paths()[0].vertices
    assert corners[corners[:, 0] == 1][:, 1].min() == pytest.approx(0.3 - half, abs=1e-6)
    assert corners[corners[:, 0] == 1][:, 1].max() == pytest.approx(0.3 + half, abs=1e-6)


def test_a_comparison_has_intervals_of_its_seeds():
    rows = [
        {"method": "DP-FedAvg", "epsilon": 1.0, "seed": seed, "stated": 1.0, "accuracy": score}
        for seed, score in enumerate([0.1, 0.2, 0.4, 0.5])
    ]
    rows += [{"method": "one seed", "epsilon": 1.0, "seed": 0, "stated": 1.0, "accuracy": 0.3}]
    made = Comparison(rows, [], "accuracy", False, "")
    half = 3.182446 * math.sqrt(0.1 / 3) / 2
    (mean, width) = made.intervals()["DP-FedAvg"][1.0]
    assert (mean, width) == pytest.approx((0.3, half), rel=1e-6)
    assert math.isnan(made.intervals()["one seed"][1.0][1])
    (axes,) = (figure := made.figure()).axes
    assert figure.get_supylabel() == "accuracy, mean and 95% interval"
    ends = sorted(
        y for bar in axes.containers[0][2] for part in bar.get_segments() for _, y in part
    )
    assert ends == pytest.approx([0.3 - half, 0.3 + half], abs=1e-6)


def test_matplotlib_keeps_the_users_settings(tmp_path):
    before = dict(matplotlib.rcParams)
    plots.draw_curves(tmp_path / "a.png", "cost $1 or $2", rows(3))
    plots.svg(plots.distribution(np.linspace(0, 1, 30), "accuracy"), "a")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_equal_pictures_are_equal_files(kind, tmp_path):
    for name in ("a", "b"):
        plots.draw_curves(tmp_path / f"{name}.{kind}", "$a_b$ & <c>", rows(3))
    first = (tmp_path / f"a.{kind}").read_bytes()
    assert first == (tmp_path / f"b.{kind}").read_bytes()
    assert first.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[kind])
