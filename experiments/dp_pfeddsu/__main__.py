"""DP-pFedDSU's tables and figure with honest noise and as printed, and its clip bound's effect.

python -m experiments.dp_pfeddsu clip
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.common import number, percent, starred, stopped
from experiments.dp_pfeddsu.setting import (
    BY_EPSILON,
    METHODS,
    NO_CLIP,
    PRINTED,
    PUBLISHED,
    WHOLE,
    Bench,
    Row,
    sent_share,
)
from experiments.study import (
    Options,
    Result,
    Study,
    agreement,
    command,
    draw_curves,
    markdown_table,
    source,
    yes_or_no,
)
from jaxfl.models import resnet20

PAPER = {
    2: (83.70, 84.35, 83.34, 85.11, 86.29),
    5: (49.00, 53.00, 48.86, 53.92, 55.76),
    10: (36.98, 43.02, 36.29, 41.06, 43.92),
}
"""Accuracies of `METHODS` in table II in percent, CIFAR-10, epsilon 1, by classes of a client."""
PAPER_EPSILONS = {
    0.5: (48.84, 51.62, 48.76, 53.40, 55.71),
    1.0: PAPER[5],
    2.0: (53.13, 55.50, 52.94, 54.85, 55.94),
}
"""Accuracies of `METHODS` in table III by epsilon, with five classes of a client."""
PAPER_PARTS = {10: (41.06, 43.38, 43.92), 5: (53.92, 55.05, 55.76)}
"""Accuracies in table IV by classes of a client.

The parts are none, reparameterised training (RT), and RT with the dynamic adaptive norm (DAN).
"""
SWEPT: dict[str, tuple[str, tuple[float, ...], tuple[float, ...]]] = {
    "table_5": (
        "density",
        (0.01, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9),
        (42.1, 42.23, 41.25, 41.95, 41.32, 42.04, 42.18),
    ),
    "table_6": ("sparse_layers", (1, 2, 3, 4), (42.23, 41.56, 41.6, 43.4)),
    "table_7": (
        "penalty_weight",
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
        (43.38, 43.92, 43.41, 42.69, 42.72, 43.06, 43.35),
    ),
}
"""Varied number, its values, and the accuracies in tables V to VII, with ten classes of a client.

The paper's table VI has up to eight layers.
"""
LETTERS = {"density": "S", "sparse_layers": "sparse layers", "penalty_weight": "λ"}
BOTH = ("DP-pFedDSU", PRINTED)
MEDIAN_EPSILONS = (1.0, 8.0, 64.0)
HEADS, CLIPS = (1, 5, 15), (0.01, 0.1, 1.0)
PASSES = (15, 100, 600)
"""Passes of a head on random features. The paper has 15 in a round."""


def result_of(
    bench: Bench, rows: Sequence[Row], classes: Sequence[int], **more: Any
) -> dict[str, Any]:
    """Return a result with the bench's `setting`, `floors` by number of classes, and `rows`.

    Args:
        bench: Bench that made the rows.
        rows: Rows of the tables.
        classes: Numbers of classes for which references run.
        more: Further entries of the result.
    """
    floors = {str(number): bench.floors(number) for number in classes}
    return {
        "setting": dataclasses.asdict(bench.setting),
        "floors": floors,
        "rows": list(rows),
    } | more


def by_classes(options: Options) -> Result:
    """Run all methods at epsilon 1, with two, five and ten classes of a client."""
    bench = Bench(options)
    rows = [
        row
        for classes in BY_EPSILON
        for row in bench.at_paper_clip(classes)
        if row["target"] == 1.0
    ]
    return result_of(bench, rows, tuple(BY_EPSILON))


def by_epsilon(options: Options) -> Result:
    """Run all methods with five classes of a client, at the epsilons 0.5, 1 and 2."""
    bench = Bench(options)
    return result_of(bench, bench.at_paper_clip(5), (5,))


def by_part(options: Options) -> Result:
    """Run CENTAUR, and sparse training without and with the adaptive norm."""
    bench, rows = Bench(options), []
    for classes in PAPER_PARTS:
        rows += [
            row | {"part": part}
            for method, part in {
                "CENTAUR": "none",
                "DP-pFedDSU": "RT + DAN",
                PRINTED: "RT + DAN",
            }.items()
            for row in bench.at_paper_clip(classes, (method,))
            if row["target"] == 1.0
        ]
        for method in BOTH:
            rows += [
                row | {"part": "RT"}
                for row in bench.rows(method, classes, {"epsilon": [1.0], "penalty_weight": [0.0]})
            ]
    return result_of(bench, rows, tuple(PAPER_PARTS))


def by_number(table: str, options: Options) -> Result:
    """Run DP-pFedDSU with ten classes of a client and one of its numbers varied, at epsilon 1.

    The paper names neither the number of sparse layers of its table V nor lambda in V and VI. With
    one layer and lambda = 0 its tables have equal accuracies where they overlap.
    """
    bench, (name, values, _) = Bench(options), SWEPT[table]
    values = values[:2] if options.smoke else values
    epsilons, rest = [1.0] * len(values), {"penalty_weight": [0.0] * len(values)}
    rows = []
    for method in BOTH:
        if name == "density":
            rows += bench.rows(
                method, 10, {"epsilon": epsilons, "density": values} | rest, sparse_layers=1
            )
        elif name == "penalty_weight":
            rows += bench.rows(method, 10, {"epsilon": epsilons, "penalty_weight": values})
        else:
            for layers in values:
                point = {"epsilon": [1.0], "penalty_weight": [0.0]}
                rows += bench.rows(method, 10, point, sparse_layers=int(layers))
    return result_of(bench, rows, (10,))


def figure_2(options: Options) -> Result:
    """Return the training loss by round, for the rows of table II with five classes."""
    rows = [row for row in Bench(options).at_paper_clip(5) if row["target"] == 1.0]
    return {
        "setting": dataclasses.asdict(Bench(options).setting),
        "rows": {row["method"]: row for row in rows},
    }


def clip(options: Options) -> Result:
    """Run methods at the paper's clip bound with and without noise, unbounded, and at a median."""
    bench, rows = Bench(options), []
    for method in (*METHODS, WHOLE):
        sparse = method == "DP-pFedDSU"
        # The penalty draws the norm to the bound, so it is 0 without a bound.
        free = {"penalty_weight": [bench.setting.penalty_weight, 0.0]} if sparse else {}
        noisy = (
            {"penalty_weight": [bench.setting.penalty_weight] * len(MEDIAN_EPSILONS)}
            if sparse
            else {}
        )
        if method == WHOLE:
            at_paper = bench.rows(method, 5, {"epsilon": [1.0]})
        else:
            at_paper = [row for row in bench.at_paper_clip(5, (method,)) if row["target"] == 1.0]
        points = {"epsilon": [math.inf] * 2, "clip": [bench.setting.clip, NO_CLIP]} | free
        bound, unbound = bench.rows(method, 5, points)
        median = float(np.median(unbound["update_norm"]))
        points = {"epsilon": MEDIAN_EPSILONS, "clip": [median] * len(MEDIAN_EPSILONS)} | noisy
        rows += [*at_paper, bound, unbound, *bench.rows(method, 5, points)]
    setting = bench.setting
    shares = {
        "this network": sent_share(bench.model, setting.density, setting.sparse_layers),
        "ResNet-20": sent_share(resnet20(), setting.density, 4),
    }
    return result_of(bench, rows, (5,), sent=shares)


def head(options: Options) -> Result:
    """Run each method at its best head passes and clip bound, with and without noise."""
    bench = Bench(options)
    heads, clips = (HEADS[:1], CLIPS[:2]) if options.smoke else (HEADS, CLIPS)
    rows = [
        row
        for method in (*METHODS, WHOLE)
        for row in bench.tuned(method, 5, (8.0, math.inf), heads, clips)
    ]
    return result_of(bench, rows, (5,))


def untrained(options: Options) -> Result:
    """Fit heads at the paper's size to an untrained ResNet-20."""
    bench = Bench(options, **PUBLISHED)
    passes = PASSES[:1] if options.smoke else PASSES
    rows = [row for classes in BY_EPSILON for row in bench.on_features(classes, passes)]
    return {"setting": dataclasses.asdict(bench.setting), "rows": rows}


def mean(row: Mapping[str, Any]) -> float:
    """Return the mean over seeds of a row's accuracy, in percent."""
    return 100 * float(np.mean(row["accuracy"]))


def found(result: Result, **facts: Any) -> Row:
    """Return the row whose entries equal `facts`. There must be exactly one."""
    (row,) = (
        row for row in result["rows"] if all(row[name] == value for name, value in facts.items())
    )
    return row


def floors(result: Result, columns: Sequence[int]) -> list[list[str]]:
    """Return lines of chance, local-only and heads alone, with a cell for each of `columns`.

    The columns are numbers of classes of a client.
    """
    lines = [["chance", *(f"{100 / classes:.0f}" for classes in columns)]]
    for name, text in {
        "local-only": "local-only",
        "head alone": "heads on an untrained extractor",
    }.items():
        lines.append(
            [
                text,
                *(percent(result["floors"][str(classes)][name]["accuracy"]) for classes in columns),
            ]
        )
    return lines


def verdict(result: Result, paper: Sequence[float], rows: Sequence[Row]) -> str:
    """Return in words whether rows reproduce the paper's accuracies in percent, and if not, why."""
    matched = agreement(paper, [mean(row) for row in rows])
    far, held, total = (float(word) for word in matched.split() if word.replace(".", "").isdigit())
    if far <= 3:
        return f"the accuracies are reproduced within {far:.1f} points ({matched})"
    if held == total:
        return f"the ordering is reproduced ({matched})"
    from_head = max(
        abs(mean(row) - mean(result["floors"][str(row["classes"])]["head alone"])) for row in rows
    )
    why = "the network, the examples and the rounds are not the paper's"
    if from_head <= 3:
        why = (
            f"at this clip bound all rows are within {from_head:.1f} points of heads on an "
            "untrained extractor"
        )
    return f"accuracies and ordering are not reproduced, because {why} ({matched})"


def text(result: Result) -> list[str]:
    """Return the paragraphs below every table: setting, passes of local-only, and seeds."""
    own = result["setting"]
    facts = (
        "The data are {data} and the network is {model}. All {clients} clients have {examples} "
        "examples and take part in each of {rounds} rounds. C is {clip:g} unless another one is "
        "named. Accuracies are in percent. The noise for an epsilon is calibrated by PLD, at "
        "client level with delta {delta:g}."
    )
    alone = {classes: of["local-only"] for classes, of in result["floors"].items()}
    curves = [
        stopped(
            f"s = {classes}, {starred(of['chosen'], of['points'])}",
            of["passes"],
            of["validation"],
            most=8,
        )
        for classes, of in alone.items()
    ]
    return [facts.format(**own), " ".join(curves), source(result)]


def beside(paper: float, *rows: Row) -> str:
    """Format the paper's accuracy in percent and those of rows, with slashes between them."""
    return " / ".join([f"{paper:.1f}", *(percent(row["accuracy"]) for row in rows)])


def methods_markdown(result: Result, axis: str) -> str:
    """Return table II, by "classes", or III, by "target" epsilon, with a line for each method."""
    printed: Mapping[Any, Sequence[float]] = PAPER if axis == "classes" else PAPER_EPSILONS
    columns = [value for value in printed if any(row[axis] == value for row in result["rows"])]
    names = {"classes": "s = {:g}", "target": "ε = {:g}"}
    head = ["paper / here", *(names[axis].format(value) for value in columns), "honest ε"]
    classes = [value if axis == "classes" else 5 for value in columns]
    lines = [[*line, ""] for line in floors(result, [int(number) for number in classes])]
    for name in (*METHODS, PRINTED):
        at = METHODS.index("DP-pFedDSU" if name == PRINTED else name)
        rows = [found(result, method=name, **{axis: value}) for value in columns]
        told = dict.fromkeys(number(row["epsilon"]["aggregate"]["pld"]) for row in rows)
        cells = [beside(printed[value][at], row) for value, row in zip(columns, rows, strict=True)]
        lines.append([name, *cells, ", ".join(told)])
    told = []
    for last, how in ((BOTH[0], "honest noise"), (PRINTED, "as printed")):
        for value in columns:
            rows = [found(result, method=name, **{axis: value}) for name in (*METHODS[:-1], last)]
            told.append(
                f"{how}, {names[axis].format(value)}: {verdict(result, printed[value], rows)}"
            )
    return "\n\n".join(
        [markdown_table(head, lines), *(f"Verdict, {line}." for line in told), *text(result)]
    )


def parts_markdown(result: Result) -> str:
    """Return table IV, whose columns are the parts of the method, with references and verdicts."""
    names, lines, told = ("none", "RT", "RT + DAN"), [], []
    for classes, paper in PAPER_PARTS.items():
        rows = {}
        for method in BOTH:
            base = found(result, method="CENTAUR", classes=classes)
            parts = [found(result, method=method, classes=classes, part=part) for part in names[1:]]
            rows[method] = [base, *parts]
            told.append(
                f"Verdict, {method}, s = {classes}: {verdict(result, paper, rows[method])}."
            )
        pairs = zip(paper, *rows.values(), strict=True)
        lines.append([f"s = {classes}", *(beside(first, *own) for first, *own in pairs)])
    head = ["paper / honest / as printed", "none (CENTAUR)", *names[1:]]
    below = [
        " ".join(line)
        for line in ([name, *cells] for name, *cells in floor_lines(result, tuple(PAPER_PARTS)))
    ]
    return "\n\n".join([markdown_table(head, lines), *below, *told, *text(result)])


def floor_lines(result: Result, classes: Sequence[int]) -> list[list[str]]:
    """Return a pair of texts for each reference of `floors`: its name, and its accuracies.

    A client has as many classes as an entry of `classes` says.
    """
    return [
        [
            f"{name}:",
            ", ".join(f"{cell} (s = {number})" for cell, number in zip(cells, classes, strict=True))
            + ".",
        ]
        for name, *cells in floors(result, classes)
    ]


def number_markdown(table: str, result: Result) -> str:
    """Return one of the tables V to VII, a key of `SWEPT`, with references and verdicts."""
    name, values, paper = SWEPT[table]
    rows = {method: [row for row in result["rows"] if row["method"] == method] for method in BOTH}
    values = values[: len(rows[PRINTED])]
    lines = [["paper", *(f"{value:g}" for value in paper[: len(values)])]]
    lines += [
        [
            "honest" if method == BOTH[0] else "as printed",
            *(percent(row["accuracy"]) for row in own),
        ]
        for method, own in rows.items()
    ]
    told = []
    for method, own in rows.items():
        accuracies = np.array([row["accuracy"] for row in own])
        within = (
            100 * float(accuracies.std(axis=1, ddof=1).max())
            if accuracies.shape[1] > 1
            else math.nan
        )
        apart = 100 * float(np.ptp(accuracies.mean(axis=1)))
        told.append(
            f"Verdict, {method}: {verdict(result, paper[: len(values)], own)}. Cells differ by at "
            f"most {apart:.1f} points, with a standard deviation over seeds of up to {within:.1f}."
        )
    below = [" ".join(line) for line in floor_lines(result, (10,))]
    head = [LETTERS[name], *(f"{value:g}" for value in values)]
    return "\n\n".join([markdown_table(head, lines), *told, *below, *text(result)])


def figure_markdown(result: Result) -> str:
    """Return the picture, the losses of the last rounds, and the verdict."""
    rows = result["rows"]
    losses = {name: [curve[-1] for curve in row["train_loss"]] for name, row in rows.items()}
    lines = [
        [name, f"{np.mean(own):.3f}", f"{min(own):.3f} to {max(own):.3f}"]
        for name, own in losses.items()
    ]
    lowest = [
        min(rows, key=lambda name: losses[name][seed]) for seed in range(len(result["seeds"]))
    ]
    falls = [
        name
        for name, row in rows.items()
        if all(curve[-1] < curve[0] for curve in row["train_loss"])
    ]
    seen = sum(name in BOTH for name in lowest)
    claims = {
        "falls for all": len(falls) == len(rows),
        "DP-pFedDSU's is the lowest": seen == len(lowest),
    }
    told = "the figure is reproduced"
    if not all(claims.values()):
        still = ", ".join(name for name in rows if name not in falls)
        told = (
            "the figure is not reproduced, because at this clip bound noise exceeds what is sent: "
            f"the loss does not fall in every seed for {still}"
        )
    verdicts = [
        f"Verdict: {told} ({yes_or_no(claims)}; the lowest in {seen} of {len(lowest)} seeds)."
    ]
    table = markdown_table(["training loss in the last rounds", "mean", "least to largest"], lines)
    return "\n\n".join(
        ["![Training loss by round](figure_2.png)", table, *verdicts, source(result)]
    )


def clip_markdown(result: Result) -> str:
    """Return the table of methods by clip bound and noise."""
    head = ["", "C = {clip:g}, ε = 1", "C = {clip:g}, no noise", "neither"]
    head = [name.format(**result["setting"]) for name in head]
    head += [f"C of the median, ε = {epsilon:g}" for epsilon in MEDIAN_EPSILONS] + ["that C"]
    lines = [[name, *[cell] * 6, ""] for name, cell in floors(result, (5,))]
    for method in (*METHODS, WHOLE):
        rows = [row for row in result["rows"] if row["method"] == method]
        lines.append(
            [method, *(percent(row["accuracy"]) for row in rows), f"{rows[-1]['clip']:.2g}"]
        )
    shares = "; ".join(f"{name} {100 * share:.1f}%" for name, share in result["sent"].items())
    density = result["setting"]["density"]
    note = (
        "The bound in the last three columns of accuracies is the median, over rounds and seeds, "
        "of the mean norm of updates in the third column. No epsilon covers this choice."
    )
    sent = f"Share of the extractor that S = {density:g} sends: {shares}."
    return "\n\n".join([markdown_table(head, lines), note, sent, *text(result)])


def head_markdown(result: Result) -> str:
    """Return the table of methods tuned at epsilon 8 and without noise."""
    lines = [[name, *[cell, ""] * 2] for name, cell in floors(result, (5,))]
    for method in (*METHODS, WHOLE):
        rows = [found(result, method=method, target=epsilon) for epsilon in (8.0, math.inf)]
        lines.append(
            [method, *(cell for row in rows for cell in (percent(row["accuracy"]), row["chosen"]))]
        )
    points = max(len(row["validation"]) for row in result["rows"])
    note = (
        f"Each method has {points} points at each epsilon. Each point runs once, and is scored on "
        "a held-out fifth of the training examples. A star marks an end of the points. No epsilon "
        "covers the choice."
    )
    return "\n\n".join(
        [markdown_table(["", "ε = 8", "chosen", "no noise", "chosen"], lines), note, *text(result)]
    )


def untrained_markdown(result: Result) -> str:
    """Return the table with a line for each number of passes, and the paper's line."""
    lines = [["chance", *(f"{100 / classes:.0f}" for classes in BY_EPSILON)]]
    for passes in dict.fromkeys(row["passes"] for row in result["rows"]):
        rows = [found(result, passes=passes, classes=classes) for classes in BY_EPSILON]
        lines.append([f"heads, {passes} passes", *(percent(row["accuracy"]) for row in rows)])
    lines.append(
        ["DP-pFedDSU as published, ε = 1", *(f"{PAPER[classes][-1]:.1f}" for classes in BY_EPSILON)]
    )
    table = markdown_table(["", *(f"s = {classes}" for classes in BY_EPSILON)], lines)
    facts = (
        "The data are {data}. Each of {clients} clients has {examples} examples, and fits a head "
        "to an untrained {model} by SGD with rate {learning_rate:g}, momentum {momentum:g} and "
        "batches of {head_batch}. Accuracies are in percent."
    )
    return "\n\n".join(
        [table, explained(result), facts.format(**result["setting"]), source(result)]
    )


def explained(result: Result) -> str:
    """Return the verdict that compares heads on random features with published accuracies."""
    gaps = {}
    for classes in BY_EPSILON:
        best = max(mean(row) for row in result["rows"] if row["classes"] == classes)
        gaps[classes] = PAPER[classes][-1] - best
    near = max(map(abs, gaps.values())) <= 3
    below = ", ".join(f"{gap:.1f} (s = {classes})" for classes, gap in gaps.items())
    claim = "explain" if near else "do not explain"
    return (
        f"Verdict: heads on random features {claim} the published accuracies. The best heads are "
        f"below these by {below} points."
    )


draw_losses = functools.partial(draw_curves, values="train_loss", label="training loss", scale=1.0)
STUDIES = {
    "clip": Study(clip, clip_markdown, minutes=25),
    "table_2": Study(by_classes, functools.partial(methods_markdown, axis="classes"), minutes=20),
    "table_3": Study(by_epsilon, functools.partial(methods_markdown, axis="target"), minutes=10),
    "table_4": Study(by_part, parts_markdown, minutes=4),
    **{
        table: Study(
            functools.partial(by_number, table),
            functools.partial(number_markdown, table),
            minutes=6,
        )
        for table in SWEPT
    },
    "figure_2": Study(figure_2, figure_markdown, draw_losses, minutes=10),
    "head": Study(head, head_markdown, minutes=22),
    "untrained": Study(untrained, untrained_markdown, minutes=12),
}

if __name__ == "__main__":
    command("dp_pfeddsu", __doc__, STUDIES)
