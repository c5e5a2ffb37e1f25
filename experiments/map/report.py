"""Tables, sentences and pictures of the map, made from committed results."""

import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.common import number, percent
from experiments.map.methods import SCALING
from experiments.map.places import passes_between
from experiments.study import Result, dated, listed, markdown_table, results_of
from jaxfl import Comparison
from jaxfl.report import plots
from jaxfl.report.looks import Look, looks

_WAYS = {
    "plain": "",
    "corrected": ", corrected",
    "own_classes": ", corrected",
    "fine_tuned": ", fine-tuned",
    "fine_tuned_corrected": ", fine-tuned and corrected",
    "head_fine_tuned": ", head fine-tuned",
    **{f"scaled_{penalty:g}": "" for penalty in SCALING},
    **{f"fine_tuned_scaled_{penalty:g}": ", fine-tuned" for penalty in SCALING},
}


def _and_mixed(text: str) -> str:
    """Return the ending of a method's name in tables if the method is also mixed.

    >>> _and_mixed(""), _and_mixed(", fine-tuned and corrected")
    (', mixed', ', fine-tuned, corrected and mixed')
    """
    return f"{text.replace(' and ', ', ')} and mixed" if text else ", mixed"


WAYS = _WAYS | {f"mixed_{way}": _and_mixed(text) for way, text in _WAYS.items()}
"""Ending of a method's name in tables, by the way in which it is evaluated.

If several ways have one name, tables have the way that is best on validation examples.
"""

WITHDRAWN = pathlib.Path(__file__).with_name("withdrawn.json")
"""Result of an earlier map: training alone, and the best private method on test examples."""

ALONE = ("local-only", "linear local-only")
RECIPE = "recipe"
RECIPE_PARTS = ("linear DP-FedAvg, mixed", "scaled linear DP-FedAvg, mixed")
PLAIN = "linear DP-FedAvg"
CORRECTED = "linear DP-FedAvg, corrected"
FINE_TUNED = "linear DP-FedAvg, fine-tuned"

TEXT = """{clients:,} clients, of whom {participants:,} may take part; {rounds} rounds with
{share:.0%} of the clients expected in each, batches of {batch_size}. The perceptron has
{width} units.

![accuracy against epsilon]({name}.png)"""


def comparison(result: Result) -> Comparison:
    """Return a place's final runs, with one method for each name in tables, see `WAYS`."""
    rows = []
    for method, own in result["methods"].items():
        shown = (row for row in own["rows"] if _is_shown(result["methods"], method, row))
        rows += [
            row | {"method": _label(method, row["way"]), "stated": row["epsilon"]} for row in shown
        ]
    return Comparison(rows=rows, tuning=[], headline="score", lower_is_better=False, protocol="")


def _label(method: str, way: str) -> str:
    """Return the name of a method in tables.

    The part of a method's mixtures has the method's name followed by ", mixed".
    The recipe has one name, however clients adapt, which is chosen on validation examples.
    """
    if method in RECIPE_PARTS:
        return RECIPE
    return method.removesuffix(", mixed") + WAYS[way]


def _is_shown(methods: Mapping[str, Any], method: str, row: Mapping[str, Any]) -> bool:
    """Return whether tables have a row: it is the best on validation among rows of its name."""
    label = _label(method, row["way"])
    return (method, row["way"]) == _best_way(methods, label, row["epsilon"])


def _best_way(methods: Mapping[str, Any], label: str, epsilon: float) -> tuple[str, str]:
    """Return the method and way that are best on validation, among those that have a label."""
    scores = {
        (method, row["way"]): row["validation"]
        for method, own in methods.items()
        for row in own["tuning"]
        if row["epsilon"] == epsilon and _label(method, row["way"]) == label
    }
    return max(scores, key=lambda found: (scores[found], found))


def validation(result: Result, epsilon: float) -> dict[str, float]:
    """Return the best validation score of each private method at an epsilon, by name in tables."""
    found: dict[str, float] = {}
    for method, own in result["methods"].items():
        for row in own["tuning"]:
            if row["epsilon"] == epsilon and method not in ALONE:
                label = _label(method, row["way"])
                found[label] = max(row["validation"], found.get(label, 0.0))
    return found


def alone(result: Result) -> str:
    """Return the name in `ALONE` that scores better on validation examples."""
    return max(ALONE, key=lambda name: result["methods"][name]["tuning"][0]["validation"])


def best(result: Result, epsilon: float) -> str:
    """Return the name of the private method that is best on validation examples at an epsilon."""
    scores = validation(result, epsilon)
    return max(scores, key=lambda name: (scores[name], name))


def differences(found: Comparison, reference: str, epsilon: float) -> dict[str, Any]:
    """Return the rows of `Comparison.differences` to a reference at an epsilon, by method."""
    rows = found.differences(reference)
    return {row["method"]: row for row in rows if row["epsilon"] == epsilon}


def not_below(found: Comparison, reference: str, epsilon: float) -> list[str]:
    """Return the methods whose interval of differences to a reference is not all below 0.

    A method without an interval counts as not below.
    """
    rows = differences(found, reference, epsilon)
    return [name for name, row in rows.items() if row["high"] is None or row["high"] >= 0]


def epsilons_of(found: Comparison) -> list[float]:
    """Return the finite target epsilons of a comparison in ascending order."""
    return sorted({epsilon for _, epsilon in found.cells if math.isfinite(epsilon)})


def markdown(result: Result) -> str:
    """Return the README's text for a place."""
    found, place = comparison(result), result["place"]
    name = result["study"]
    parts = [TEXT.format(**place, name=name)]
    constant = {whose: percent(scores) for whose, scores in result["constant"].items()}
    parts.append(
        f"Without training, the most frequent class of all participants scores {constant['all']}, "
        f"and each client's own most frequent class {constant['own']}."
    )
    parts += [summary(result, epsilon) for epsilon in epsilons_of(found)]
    private = [best(result, epsilon) for epsilon in epsilons_of(found)]
    shown = dict.fromkeys([alone(result), *SHOWN, *private])
    parts += [table(result, list(shown))]
    parts += [folded("All methods, the best at the smallest ε first", table(result))]
    parts += [folded("Chosen settings", settings(result))]
    hours = sum(own["seconds"] for own in result["methods"].values()) / 3600
    parts.append(f"{hours:.2f} core-hours. Seeds {listed(result['seeds'])}; {dated(result)}.")
    return "\n\n".join(parts)


def summary(result: Result, epsilon: float) -> str:
    """Return a text on the best private method at an epsilon, its equals, and the recipe."""
    found, first, own = comparison(result), best(result, epsilon), alone(result)
    private = validation(result, epsilon)
    equal = [name for name in not_below(found, first, epsilon) if name in private]
    gains = differences(found, own, epsilon)
    score = _cell(found, first, epsilon)
    text = f"**ε {number(epsilon)}.** Best on validation examples: {first}, {score}, "
    text += f"{_points(gains[first])} over training alone. "
    text += f"Not below it: {'; '.join(equal)}. " if equal else "All others are below it. "
    return f"{text}The recipe differs from training alone by {_points(gains[RECIPE])}."


def _points(row: Mapping[str, Any]) -> str:
    """Return a difference in points, with its interval where there are several seeds."""
    gain = f"{100 * row['difference']:+.1f}"
    return (
        gain
        if row["low"] is None
        else f"{gain} ({100 * row['low']:+.1f} to {100 * row['high']:+.1f})"
    )


def _cell(found: Comparison, method: str, epsilon: float, field: str = "score") -> str:
    """Format a method's mean ± standard deviation over seeds in percent, or a dash without runs."""
    values = [
        row[field]
        for row in found.rows
        if (row["method"], row["epsilon"]) == (method, epsilon) and field in row
    ]
    return percent(values) if values else "–"


def folded(title: str, text: str) -> str:
    """Return HTML that shows a text after a click on its title."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def table(result: Result, methods: Sequence[str] | None = None) -> str:
    """Return a table of the scores of methods by epsilon, the best at the smallest one first.

    Args:
        result: Result of a place.
        methods: Names of the methods. None takes all.
    """
    found = comparison(result)
    finite = epsilons_of(found)
    private = {method for method, epsilon in found.cells if math.isfinite(epsilon)}

    def cells(method: str, field: str, epsilons: Sequence[float]) -> list[str]:
        silent = method not in private
        return [
            _cell(found, method, math.inf if silent else epsilon, field) for epsilon in epsilons
        ]

    def order(method: str) -> float:
        """Return a sort key: minus the score at the smallest epsilon, or infinity without one."""
        at = (method, finite[0] if method in private else math.inf)
        return -found.mean(*at)[0] if at in found.cells else math.inf

    methods = methods or list(dict.fromkeys(method for method, _ in found.cells))
    unseen = any("unseen" in row for row in found.rows)
    head = ["accuracy %", *(f"ε {number(epsilon)}" for epsilon in (*finite, math.inf))]
    head += [f"unseen, ε {number(epsilon)}" for epsilon in finite] if unseen else []
    lines = []
    for method in sorted(methods, key=order):
        line = [method, *cells(method, "score", finite), _cell(found, method, math.inf)]
        lines.append([*line, *(cells(method, "unseen", finite) if unseen else [])])
    return markdown_table(head, lines)


def settings(result: Result) -> str:
    """Return a table of the chosen points, with validation scores and numbers of points tried."""
    cells: dict[str, dict[float, str]] = {}
    for method, own in result["methods"].items():
        for row in own["tuning"]:
            if not _is_shown(result["methods"], method, row):
                continue
            point = {name: value for name, value in row["chosen"].items() if name != "epsilon"}
            if method in ALONE:
                point["pass"] = (row["evaluation"] + 1) * passes_between(result["place"]["passes"])
            text = ", ".join(f"{name} {value:.3g}" for name, value in point.items())
            if method in RECIPE_PARTS:
                text = f"{method.split()[0]}{WAYS[row['way']]}: {text}"
            if "scaled" in row["way"]:
                text = f"{text}, penalty {row['way'].rpartition('_')[2]}"
                text += ", fine-tuned" if "fine_tuned" in row["way"] else ""
            score = f"{100 * row['validation']:.1f}% of {row['points']}"
            cells.setdefault(_label(method, row["way"]), {})[row["epsilon"]] = f"{text} ({score})"
    epsilons = sorted({epsilon for own in cells.values() for epsilon in own})
    head = [
        "method",
        *(f"ε {number(epsilon)}: point (validation % of tried)" for epsilon in epsilons),
    ]
    lines = [
        [name, *(own.get(epsilon, "–") for epsilon in epsilons)] for name, own in cells.items()
    ]
    return markdown_table(head, lines)


SHOWN = (PLAIN, CORRECTED, FINE_TUNED, RECIPE)
"""Private methods in the pictures of all places."""

OTHER = "other method, highest on test"


def draw(result: Result, path: pathlib.Path) -> None:
    """Draw scores against epsilon into a PNG file, whose suffix replaces that of the path.

    The methods are training alone, those in `SHOWN`, and the best at each epsilon.
    """
    found = comparison(result)
    own = alone(result)
    scores = found.intervals()
    other = [best(result, epsilon) for epsilon in epsilons_of(found)]
    sends = list(dict.fromkeys([*SHOWN, *other]))
    shown = {"local-only": scores[own]} | {name: scores[name] for name in sends}
    with plots.style():
        figure = plots.new_figure(plots.DOUBLE, 2.6)
        axes = figure.subplots()
        plots.against_epsilon(axes, shown, sends, looks(shown))
        axes.set_ylabel(f"accuracy{plots.MEAN}")
        plots.legend_beside(axes)
    plots.save(figure, path.with_suffix(".png"))


def answer(results: Mapping[str, Result], counter: Result | None = None) -> str:
    """Return the front page's picture and its three numbered texts, with numbers of the results.

    Args:
        results: Results of the places, by name.
        counter: Result of the counter-run, if there is one.
    """
    places = list(results.values())
    if not places:
        return "No place is measured yet."
    targets = epsilons_of(comparison(places[0]))
    epsilons = (targets[0], targets[-1])
    sentences = [
        f"1. **Own labels.** {_own_labels(places, epsilons)}",
        f"2. **One recipe.** {_one_recipe(places, epsilons)}",
        f"3. **Others.** {_others(places, epsilons)}",
    ]
    if counter:
        sentences[-1] += _against_rivals(results, counter)
    count = f"{len(places)} place{'s' * (len(places) > 1)}"
    return "\n".join(
        [
            "![points over clients that each train alone](experiments/map/answer.png)",
            "",
            *sentences,
            "",
            f"The picture names the {count} that are measured so far. Its bars are 95% intervals "
            "of paired differences over seeds.",
        ]
    )


def _own_labels(places: Sequence[Result], epsilons: Sequence[float]) -> str:
    """Return sentences on what the correction changes, by the way in which clients differ."""
    by_labels = [place for place in places if place["place"]["skew"] in LABEL_SKEWS]
    by_others = [place for place in places if place["place"]["skew"] not in LABEL_SKEWS]
    few = [place for place in by_labels if place["place"]["clients"] <= FEW]
    text = (
        "Where clients differ in which classes they have, weighting linear DP-FedAvg's predictions "
        "by each client's own shares of classes (`prior_corrected`) changes accuracy by "
        f"{_at_both(CORRECTED, PLAIN, by_labels, epsilons)}, and costs no epsilon."
    )
    if few:
        corrected = _at_both(CORRECTED, None, few, epsilons)
        text += (
            f" At such places with {FEW} clients, the corrected model still differs from training "
            f"alone by {corrected}, and the fine-tuned one by "
            f"{_at_both(FINE_TUNED, None, few, epsilons)}."
        )
    if by_others:
        text += (
            " Where clients differ in other ways, the correction changes accuracy by "
            f"{_at_both(CORRECTED, PLAIN, by_others, epsilons)}."
        )
    return text


def _one_recipe(places: Sequence[Result], epsilons: Sequence[float]) -> str:
    """Return sentences on the recipe and training alone, by the number of clients."""
    few = [place for place in places if place["place"]["clients"] <= FEW]
    many = [place for place in places if place["place"]["clients"] > FEW]
    differences_by_size = [
        f"{_at_both(RECIPE, None, group, epsilons)} with {size}"
        for group, size in ((many, "1,000 clients or more"), (few, f"{FEW}"))
        if group
    ]
    least = min(many or few, key=lambda place: _gain(place, RECIPE, alone(place), epsilons[0]))
    score = 100 * comparison(least).mean(alone(least), math.inf)[0]
    constant = 100 * np.mean(least["constant"]["all"])
    return (
        "DP-FedAvg trains a shared linear model, with or without maps of logits. Each client may "
        "correct or fine-tune this model, and mixes it with a model that it trains alone "
        "(`dp_fedavg_mixed`). The mixture differs from training alone by "
        f"{', and by '.join(differences_by_size)}. With 1,000 clients or more, the "
        f"difference is least on {least['place']['title'].split(',')[0]}, where training alone "
        f"scores {score:.1f}% and always predicting the most frequent class {constant:.1f}%. "
        "Validation examples choose the form, from about twice as many points as other methods "
        "have, but the recipe always mixes."
    )


def _against_rivals(results: Mapping[str, Result], counter: Result) -> str:
    """Return two sentences on the counter-run's settings that validation examples chose."""
    places = counter["places"]
    private = [
        name
        for own in places.values()
        for name, rows in own["tried"].items()
        if any(math.isfinite(row["epsilon"]) for row in rows)
    ]
    settings = sum(not name.endswith(", mixed") for name in private)
    gains: dict[str, Mapping[str, Any]] = {}
    for name, own in places.items():
        where = own["title"].rpartition(", ")[2]
        tested = counter_gains(own, results[name])
        for epsilon in _tried_epsilons(own):
            methods = [method for method, at in tested if at == epsilon]
            scores = [_best_validation(own["tried"][method], epsilon) for method in methods]
            best = methods[int(np.argmax(scores))]
            named = f"{best}, {where}, ε {number(epsilon)}"
            gains[named] = tested[best, epsilon]
    highest = max(gains, key=lambda named: gains[named]["difference"])
    return (
        f" A [counter-run](experiments/map/README.md#a-counter-run) tried {settings} further "
        f"private settings at {len(places)} places, and tested those that validation examples "
        f"prefer. The highest of these differs from the recipe by {_points(gains[highest])} points "
        f"({highest})."
    )


FEW = 100
"""Number of clients of the smallest places. All others have 1,000 clients or more."""

LABEL_SKEWS = ("2 classes", "5 classes", "Dirichlet 0.3")
"""Skews in which clients differ in their classes."""


def _gain(result: Result, method: str, reference: str, epsilon: float) -> float:
    """Return the mean over seeds of a method's score minus the reference's, in points."""
    return 100 * differences(comparison(result), reference, epsilon)[method]["difference"]


def _at_both(
    method: str, reference: str | None, places: Sequence[Result], epsilons: Sequence[float]
) -> str:
    """Format the least and the largest gain of a method over places, at two epsilons.

    Args:
        method: The method.
        reference: Method that the gain is over. None stands for training alone.
        places: Results of the places.
        epsilons: The two epsilons.
    """
    small, large = (
        _span([_gain(place, method, reference or alone(place), epsilon) for place in places])
        for epsilon in epsilons
    )
    return f"{small} points at ε {number(epsilons[0])} and {large} at ε {number(epsilons[1])}"


def _span(gains: Sequence[float]) -> str:
    """Format the least and the largest of some differences in points.

    >>> _span([0.5, -1.26]), _span([2.0])
    ('-1.3 to +0.5', '+2.0')
    """
    low, high = f"{min(gains):+.1f}", f"{max(gains):+.1f}"
    return low if low == high else f"{low} to {high}"


def draw_answer(results: Mapping[str, Result], path: pathlib.Path) -> None:
    """Draw each place's gains over training alone into a file, with a panel for each epsilon."""
    places = list(results.values())
    with plots.style():
        figure = plots.new_figure(plots.DOUBLE, 1.0 + 0.45 * len(places))
        epsilons = epsilons_of(comparison(places[0]))
        panels = figure.subplots(1, len(epsilons), sharex=True, sharey=True, squeeze=False)[0]
        for axes, epsilon in zip(panels, epsilons, strict=True):
            _draw_gains(axes, places, epsilon)
        titles = [re.sub("(,.*?,) ", r"\1\n", place["place"]["title"], count=1) for place in places]
        panels[0].set_yticks(range(len(places)), titles)
        panels[0].invert_yaxis()
        # Narrow screens show the left part of a picture, so that is where its legend must be.
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2)
    plots.save(figure, path)


def _draw_gains(axes: Any, places: Sequence[Result], epsilon: float) -> None:
    """Draw a panel of `draw_answer`, with a line for each place."""
    rows = {name: [_row(place, name, epsilon) for place in places] for name in SHOWN}
    rows[OTHER] = [_row(place, _rival(place, epsilon), epsilon) for place in places]
    styles = looks(rows)
    for index, (label, own) in enumerate(rows.items()):
        _dots(axes, own, label, styles[label], 0.12 * (index - 2))
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_title(f"ε {number(epsilon)}")
    axes.set_xlabel("points over training alone")


def _row(result: Result, method: str, epsilon: float) -> dict[str, Any]:
    """Return the row of a method's paired differences to training alone at an epsilon."""
    return differences(comparison(result), alone(result), epsilon)[method]


def _others(places: Sequence[Result], epsilons: Sequence[float]) -> str:
    """Return a sentence on how far above the recipe another method is at most, and where."""
    gains: dict[str, Mapping[str, Any]] = {}
    for place in places:
        where = ", ".join(place["place"]["title"].split(", ")[-2:])
        for epsilon in epsilons:
            rival = _rival(place, epsilon)
            difference = differences(comparison(place), RECIPE, epsilon)[rival]
            gains[f"{rival}, {where}, ε {number(epsilon)}"] = difference
    highest = max(gains, key=lambda named: gains[named]["difference"])
    return (
        "Even if test examples pick the best other private method of each place, it differs from "
        f"the recipe by at most {_points(gains[highest])} points ({highest})."
    )


def _rival(result: Result, epsilon: float) -> str:
    """Return the private method with the highest score on test examples, except the recipe.

    The choice by test examples favours the rival, so the recipe meets the hardest comparison.
    """
    found = comparison(result)
    private = validation(result, epsilon)
    rivals = [name for name in private if name != RECIPE]
    return max(rivals, key=lambda name: (found.mean(name, epsilon)[0], name))


def _dots(
    axes: Any, rows: Sequence[Mapping[str, Any]], label: str, look: Look, shift: float
) -> None:
    """Draw a dot with its interval for each place, shifted so that dots do not cover each other."""
    style = look | {"linestyle": "none"}
    gains = 100 * np.array([row["difference"] for row in rows])
    low = gains - 100 * np.array([row["low"] for row in rows])
    high = 100 * np.array([row["high"] for row in rows]) - gains
    heights = np.arange(len(rows)) + shift
    axes.errorbar(gains, heights, xerr=[low, high], label=label, **style)


def counter_run(result: Result) -> str:
    """Return tables of the counter-run's settings, with tests of the best against the recipe."""
    places = results_of(pathlib.Path(__file__).parent)
    parts = []
    for name, own in result["places"].items():
        epsilons = _tried_epsilons(own)
        gains = counter_gains(own, places[name]) if name in places else {}
        head = [f"validation %, ε {number(epsilon)}" for epsilon in epsilons]
        head += [f"test score minus the recipe's, ε {number(epsilon)}" for epsilon in epsilons]
        lines = []
        for method, rows in own["tried"].items():
            scores = [f"{100 * _best_validation(rows, epsilon):.1f}" for epsilon in epsilons]
            found = [gains.get((method, epsilon)) for epsilon in epsilons]
            lines.append([method, *scores, *(_points(row) if row else "" for row in found)])
        parts += [f"**{own['title']}**", markdown_table(["setting", *head], lines)]
    hours = sum(own["seconds"] for own in result["places"].values()) / 3600
    note = f"{hours:.2f} core-hours of tuning. Seeds {listed(result['seeds'])}; {dated(result)}."
    return "\n\n".join([*parts, note])


def counter_gains(own: Result, place: Result) -> dict[tuple[str, float], Mapping[str, Any]]:
    """Return the paired differences of tested settings to the recipe, by setting and epsilon."""
    recipe = [row for row in comparison(place).rows if row["method"] == RECIPE]
    found: dict[tuple[str, float], list[Any]] = {}
    for row in own["tested"]:
        # Clients that train alone have an infinite epsilon, and count at each one.
        for epsilon in _tried_epsilons(own) if math.isinf(row["epsilon"]) else [row["epsilon"]]:
            scored = row | {"epsilon": epsilon, "stated": epsilon}
            found.setdefault((row["method"], epsilon), []).append(scored)
    return {
        key: Comparison([*recipe, *rows], [], "score", False, "").differences(RECIPE)[0]
        for key, rows in found.items()
    }


def _tried_epsilons(own: Result) -> list[float]:
    """Return the finite epsilons at which settings were tried."""
    tried = {float(row["epsilon"]) for rows in own["tried"].values() for row in rows}
    return sorted(tried - {math.inf})


def _best_validation(rows: Sequence[Mapping[str, Any]], epsilon: float) -> float:
    """Return a setting's best score on validation examples at an epsilon."""
    return max(row["validation"] for row in rows if row["epsilon"] in (epsilon, math.inf))


def withdrawn(result: Result) -> str:
    """Return a table of the withdrawn map's winners, and of DP-FedAvg, plain and corrected."""
    lines = []
    for own in result["places"].values():
        for epsilon in sorted({row["epsilon"] for row in own["rows"]}):
            known = own["earlier"][str(epsilon)]
            _, corrected = _best_way({"DP-FedAvg": own}, "DP-FedAvg, corrected", epsilon)
            scores = [
                percent(
                    [
                        row["score"]
                        for row in own["rows"]
                        if (row["way"], row["epsilon"]) == (way, epsilon)
                    ]
                )
                for way in ("plain", corrected)
            ]
            best = f"{known['best'].replace(', ', ' ')} {percent(known['scores'])}"
            alone_scores = percent(own["earlier"]["alone"])
            lines.append([own["title"], number(epsilon), alone_scores, best, *scores])
    head = [
        "accuracy %",
        "ε",
        "trained alone, then",
        "best private method, then",
        "DP-FedAvg, now",
        "corrected, now",
    ]
    hours = sum(own["seconds"] for own in result["places"].values()) / 3600
    note = (
        "The withdrawn map picked its best method on test examples, over 3 seeds of 10 points. "
        f"{hours:.2f} core-hours for the last two columns. "
        f"Seeds {listed(result['seeds'])}; {dated(result)}."
    )
    return f"{markdown_table(head, lines)}\n\n{note}"
