"""A run, a sweep or a comparison as one page, made of what its folder holds."""

import contextlib
import html
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxfl._validate import check_path, checked
from jaxfl.files import is_regular, read, read_arrays, replacing
from jaxfl.privacy.statement import statement_lines
from jaxfl.run import plots
from jaxfl.run.checkpoint import checkpoints
from jaxfl.run.comparison import Comparison, at_an_end
from jaxfl.run.fingerprint import in_words
from jaxfl.run.report import (
    AUDIT,
    CHECKPOINTS,
    COLUMNS,
    COMPARISON,
    CONFIG,
    METRICS,
    PAGE,
    PER_CLIENT,
    PRINTED,
    PRIVACY,
    points_of,
)

_WORST = 20
"""Clients that are listed at first sight."""

_CLIENTS = 1000
"""Clients that are listed at all: a page stays below a megabyte."""


_RERUN = "Run again with the same settings, which writes it anew, or remove it."

_VERSIONS = ("jaxfl", "jax", "jaxlib", "device", "devices")
_FIRST = ("method", "model", "rounds", *_VERSIONS)


@checked(folder=check_path)
def write_report(folder: str | os.PathLike) -> pathlib.Path:
    """Write `report.html` into the folder of a run, a sweep or a comparison, and return its path.

    The page is one file without scripts, and needs no network. It has what the folder holds, of a run that goes on or
    was stopped too: the privacy statement, curves, scores by client, an audit, settings, versions. For a run or a point
    of a sweep, `curves.pdf` is written beside it, for a paper. A sweep gets a page for each point, and one that lists
    them; a comparison, which writes its page itself, its table, picture, paired differences, and what was tuned.

    Args:
        folder: of `simulate`, `sweep` or `compare`.

    Raises:
        ValueError: the folder holds none of these.
    """
    path = pathlib.Path(folder)
    points = (
        [point for point in points_of(path) if is_regular(point / METRICS)] if path.is_dir() else []
    )
    if is_regular(path / COMPARISON):
        text = _comparison(path)
    elif is_regular(path / METRICS):
        text = _run(path)
    elif points:
        text = _sweep(path, points)
    else:
        raise ValueError(
            f"folder={str(folder)!r} holds no {METRICS}: give that of a run, a sweep or a comparison"
        )
    with replacing(path / PAGE) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path / PAGE


class _Html(str):
    """Text that is markup already."""


def _run(folder: pathlib.Path) -> str:
    rows = _rows(folder)
    headline, last = _headline(rows), rows[-1] if rows else {}
    statement, arrays = _json(folder / PRIVACY), _arrays(folder / PER_CLIENT)
    config, facts = _json(folder / CONFIG), _facts(folder)
    title = str(facts.get("method") or config.get("method") or folder.name)
    if rows:
        plots.draw_curves(folder / PRINTED, title, rows, headline)
    drawn = plots.panels(rows, headline) if rows else {}
    ended = bool(statement) and last.get("round") == statement["rounds"] == facts.get(
        "rounds", statement["rounds"]
    )
    of_all = f" of {facts['rounds']}" if "rounds" in facts else ""
    state = (
        f"{last['round']} rounds"
        if ended
        else f"{last.get('round', 0)}{of_all} rounds, not finished"
    )
    told = [state, f"{statement['clients']} clients" if statement else "", _score(last, headline)]
    parts = [
        _text("p", ", ".join(filter(None, told)), "lead"),
        _dropped(rows),
        _section(
            "Privacy",
            _privacy(statement) if statement else _text("p", "No statement before the run's end."),
        ),
        _section(
            "By round",
            _figures({name: partial(plots.alone, draw) for name, draw in drawn.items()}),
            _details(
                "All figures by round",
                _table(list(last), (row.values() for row in rows)),
                _costs(last),
            ),
        ),
        _clients(arrays, rows, headline, statement),
        _section("Audit", _audit(statement["audit"], folder)) if statement.get("audit") else "",
        _section("Settings", _pairs(_flat(config))) if config else "",
        _section("How it was run", *_how(facts)),
    ]
    return _page(title, parts)


def _sweep(folder: pathlib.Path, points: Sequence[pathlib.Path]) -> str:
    lines, head = [], ["point"]
    for point in points:
        write_report(point)
        rows, statement = _rows(point), _json(point / PRIVACY)
        headline = _headline(rows)
        head = ["point", "round", headline, f"{headline}, worst 10%", "ε (sums)"]
        last = rows[-1] if rows else {}
        epsilon = statement["honest"]["aggregate"]["epsilon"] if statement else None
        link = _Html(
            f'<a href="{html.escape(f"{point.name}/{PAGE}")}">{html.escape(point.name)}</a>'
        )
        lines.append(
            [link, last.get("round"), last.get(headline), last.get(f"{headline}_worst10"), epsilon]
        )
    return _page(f"{folder.name}: {len(points)} points", [_table(head, lines)])


def _comparison(folder: pathlib.Path) -> str:
    found = Comparison.load(folder / COMPARISON)
    methods = list(dict.fromkeys(method for method, _ in found.cells))
    silent = [row["method"] for row in found.rows if row["stated"] == 0]
    without_noise = [method for method, epsilon in found.cells if epsilon == math.inf]
    # Others are compared with it at every epsilon.
    reference = next(iter([*silent, *without_noise, *methods]), None)
    better = "lower" if found.lower_is_better else "higher"
    results = [
        [method, epsilon, _stated(found, method, epsilon), *found.mean(method, epsilon)]
        + (list(found.mean(method, epsilon, "unseen")) if found.unseen else [])
        for method, epsilon in found.cells
    ]
    head = ["method", "ε", "ε stated (sums)", found.headline, "std over seeds"]
    head += ["unseen clients", "std over seeds"] if found.unseen else []
    parts = [
        _text("p", found.protocol, "lead"),
        _section(
            "Results",
            _text("p", f"{found.headline} on test examples, over seeds; {better} is better."),
            _figures({"comparison": found.figure}, wide=True) if found.rows else "",
            _table(head, results),
            *(
                _text("p", f"{method}, ε {_plain(epsilon)}: {note}.", "warning")
                for method, epsilon in found.cells
                for note in found.notes(method, epsilon)
            ),
        ),
    ]
    lines = [
        [row["method"], row["epsilon"], row["difference"], row["low"], row["high"]]
        for row in (found.differences(reference) if reference else [])
    ]
    if lines:
        text = f"Paired over seeds, with 95% intervals of Student's t; epsilons without {reference} take its only one."
        head = ["method", "ε", f"{found.headline} − {reference}", "low", "high"]
        parts.append(_section(f"Differences to {reference}", _text("p", text), _table(head, lines)))
    if found.missing:
        head = ["method", "ε", "seed", "point", "reason"]
        lines = []
        for row in found.missing:
            point = "; ".join(f"{name} {_short(value)}" for name, value in row["chosen"].items())
            lines.append([row["method"], row["epsilon"], row["seed"], point, row["reason"]])
        parts.append(
            _section("Missing", _text("p", "Without a seed: tuning."), _table(head, lines))
        )
    if found.tuning:
        parts.append(_section("Tuning", *_tuning(found)))
    parts.append(_section("Privacy", *_statements(folder, found)))
    keys = list(dict.fromkeys(key for row in found.rows for key in row))
    every = ([row.get(key) for key in keys] for row in found.rows)
    parts.append(
        _section("Runs", _details("All runs: their last row of metrics", _table(keys, every)))
    )
    facts = next((_facts(run.parent) for run in sorted(folder.glob(f"*/seed=*/*/{METRICS}"))), {})
    told = {name: value for name, value in facts.items() if name in _VERSIONS}
    parts.append(_section("How it was run", _pairs(told)))
    return _page(f"Comparison of {len(methods)} method{'s' * (len(methods) > 1)}", parts)


def _tuning(found: Comparison) -> list[str]:
    """What was tried, and what was chosen."""
    lines, parts = [], []
    for row in found.tuning:
        columns = row["points"].items()
        tried = [f"{name}: {_range(column)}" for name, column in columns]
        ends = [
            name for name, value in row["chosen"].items() if at_an_end(value, row["points"][name])
        ]
        chosen = [
            f"{name} {_short(value)}{'*' * (name in ends)}" for name, value in row["chosen"].items()
        ]
        lines.append(
            [row["method"], row["epsilon"], "; ".join(tried), "; ".join(chosen), row["rounds"]]
        )
        if row["scores"]:
            head = [*row["points"], *(f"{found.headline}, round {at}" for at in row["scores"])]
            columns = [*row["points"].values(), *row["scores"].values()]
            if "dropped" in row:
                head.append("share of updates dropped")
                columns.append(row["dropped"])
            body = zip(*columns, strict=True)
            title = (
                f"{row['method']}, ε {_plain(row['epsilon'])}: every point on validation examples"
            )
            parts.append(_details(title, _table(head, body)))
    note = _text("p", "* at an end of what was tried: a wider range may hold a better point.")
    head = ["method", "ε", "tried", "chosen", "rounds"]
    return [_table(head, lines), note if any("*" in str(line[3]) for line in lines) else "", *parts]


def _range(column: Sequence[Any]) -> str:
    """Return the values that were tried, in a few words."""
    values = list(dict.fromkeys(column))
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return f"{len(values)} from {_short(min(values))} to {_short(max(values))}"
    return ", ".join(map(_short, values))


def _short(value: Any) -> str:
    """Return a number with four digits, or text."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.4g}" if number else str(value)


def _statements(folder: pathlib.Path, found: Comparison) -> list[str]:
    """The statement of each method and epsilon, of its first seed, where the runs' folders are there."""
    parts = []
    for method, epsilon in found.cells:
        row = next(
            row for row in found.rows if (row["method"], row["epsilon"]) == (method, epsilon)
        )
        run = folder / str(row.get("run", ""))
        inside = run != folder and run.resolve().is_relative_to(folder.resolve())
        statement = _json(run / PRIVACY) if inside else {}
        if statement:
            parts.append(_details(f"{method}, ε {_plain(epsilon)}", _privacy(statement)))
    none = "No row names a folder of its run: there was no folder, or an earlier version wrote the comparison."
    return parts or [_text("p", none)]


def _privacy(statement: Mapping[str, Any]) -> str:
    """Who is protected against whom, in a table, then the whole statement."""
    lines = []
    for seen in statement["honest"].values():
        lines.append(
            [
                "a client, all of its data",
                seen["sees"],
                seen["epsilon"],
                seen["reason"] or seen["by"],
            ]
        )
        if other := seen.get("against_client"):
            lines.append(
                ["a client, all of its data", "another client", other["epsilon"], other["by"]]
            )
        if example := seen.get("example"):
            lines.append(
                [
                    "one example",
                    seen["sees"],
                    example["epsilon"],
                    example["reason"] or example["by"],
                ]
            )
    if own := statement.get("examples"):
        delta = own.get("delta", statement["delta"])
        protects = "one example, by local steps" + (
            f", at delta {delta:g}" if delta != statement["delta"] else ""
        )
        lines.append([protects, own["sees"], own["epsilon"], own["reason"] or own["by"]])
    lines.sort(key=lambda line: line[2] == "inf")  # the epsilons that count come first
    if audit := statement.get("audit"):
        lines.append(
            ["a canary", "audited from below", _Html(f"≥ {_cell(audit['at_least'])}"), audit["by"]]
        )
        if hint := audit.get("hint"):
            lines.append(["a canary", "estimated by the audit", audit["estimate"], hint])
    if claim := statement["claim"]:
        lines.append([claim["status"], "the paper's own rule", claim["epsilon"], claim["rule"]])
    warnings = "".join(_text("p", warning, "warning") for warning in statement["warnings"])
    table = _table(
        ["protects", "against who sees", f"ε at delta {statement['delta']:g}", "by"], lines
    )
    return table + warnings + _details("The whole statement", _outline(statement), opened=True)


def _outline(statement: Any) -> str:
    """The statement as nested lists."""
    text, depth = "", 0
    for line in statement_lines(statement):
        text += "<ul>" * (line.depth - depth) + "</li></ul>" * (depth - line.depth)
        text += "</li>" if 0 < line.depth <= depth else ""
        text += f"<li>{html.escape(line.text)}" if line.depth else _text("p", line.text)
        depth = line.depth
    return text + "</li></ul>" * depth


def _clients(
    arrays: Mapping[str, np.ndarray], rows: Sequence[dict], headline: str, statement: Mapping
) -> str:
    """The distribution over clients at the last evaluation, and the clients, the worst first."""
    if headline not in arrays or not len(arrays[headline]):
        return ""
    scores = {name: arrays[name][-1] for name in arrays if np.ndim(arrays[name]) == 2}
    tested = arrays["test_size"] > 0
    values = np.where(tested, scores[headline], np.nan)
    last = rows[-1]
    high = (last.get(f"{headline}_worst10") or 0) <= (last.get(headline) or 0)
    order = np.argsort(values if high else -values, kind="stable")  # NaN is last
    columns: dict[str, Any] = {"client": np.arange(len(values))} | scores
    columns |= {"test examples": arrays["test_size"]}
    columns |= {"rounds": arrays["participations"]} if "participations" in arrays else {}
    for seen, name in ((statement or {}).get("honest") or {}).items():
        own = arrays.get(f"epsilon_{seen}_pld", name["pld"].get("per_client", {}).get("values"))
        if own is not None:
            columns[f"ε ({seen})"] = own
    lines = [[column[i] for column in columns.values()] for i in order[:_CLIENTS]]
    told = "all" if len(values) <= _CLIENTS else f"the worst {_CLIENTS} of {len(values)}"
    note = (
        ""
        if tested.all()
        else f"{int((~tested).sum())} of {len(values)} clients have no test example. "
    )
    finite = values[np.isfinite(values)]
    return _section(
        "Over clients",
        _text("p", f"{note}Round {last['round']}; the worst first."),
        _figures({"clients": partial(plots.distribution, finite, headline)} if finite.size else {}),
        _table(list(columns), lines[:_WORST]),
        _details(f"Clients: {told}", _table(list(columns), lines)) if len(lines) > _WORST else "",
    )


def _audit(audit: Mapping[str, Any], folder: pathlib.Path) -> str:
    pairs = _pairs(_flat(audit))
    arrays = _arrays(folder / AUDIT)
    if {"taken", "sum"} - arrays.keys():
        return pairs
    inside = arrays["taken"].astype(bool)
    groups = {"took part": arrays["sum"][inside], "left out": arrays["sum"][~inside]}
    return _figures({"canaries": partial(plots.overlaid, groups, "score of a canary")}) + pairs


def _dropped(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many updates were not finite."""
    count = sum(row.get("nonfinite") or 0 for row in rows)
    text = f"{count} update{'s were' if count > 1 else ' was'} not finite and dropped; metrics.jsonl has the rounds."
    return _text("p", text, "warning") if count else ""


def _costs(row: Mapping[str, Any]) -> str:
    """Return what the columns of epsilons mean, the observer among it."""
    return _pairs({name: text for name, text in COLUMNS.items() if name in row})


def _rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    rows = _read(
        folder / METRICS, lambda path: [json.loads(line) for line in read(path).splitlines()], list
    )
    if not rows or not all(isinstance(row, dict) and "round" in row for row in rows):
        raise ValueError(
            f"{str(folder / METRICS)!r} must hold a row of metrics on each line. {_RERUN}"
        )
    return rows


def _headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first metric of a row, after the round."""
    return next((name for name in (rows[-1] if rows else {}) if name != "round"), "accuracy")


def _json(path: pathlib.Path) -> dict[str, Any]:
    return _read(path, lambda path: json.loads(read(path)), dict) if is_regular(path) else {}


def _arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    if not is_regular(path):
        return {}
    return _read(path, read_arrays, dict)


def _read(path: pathlib.Path, load: Callable[[pathlib.Path], Any], kind: type) -> Any:
    """Return what a file of a run holds.

    Raises:
        ValueError: it cannot be read, or holds something of another kind.
    """
    problem = ""
    try:
        found = load(path)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, MemoryError) as error:
        problem = f" ({type(error).__name__})"
    else:
        if isinstance(found, kind):
            return found
    raise ValueError(f"{str(path)!r} must be as a run wrote it, and is damaged{problem}. {_RERUN}")


def _facts(folder: pathlib.Path) -> dict[str, Any]:
    """What the newest checkpoint says of the run: of its own folder, or of the sweep's."""
    for root in (folder, folder.parent):
        found = [path / "manifest.json" for path in checkpoints(root / CHECKPOINTS)]
        found = [path for path in found if is_regular(path)]
        if found:
            manifest: dict[str, Any] = {}
            with contextlib.suppress(ValueError):  # the page is of the reports, which may be whole
                manifest = _json(found[-1])
            return manifest.get("plan", {}) | manifest.get("fingerprint", {})
    return {}


def _how(facts: Mapping[str, Any]) -> list[str]:
    """Versions and devices, then all else that decided the numbers."""
    plain = {
        name: value
        for name, value in facts.items()
        if not (isinstance(value, dict) and "sha256" in value)
    }
    first = {name: plain[name] for name in _FIRST if name in plain}
    rest = _flat({in_words(name): value for name, value in plain.items() if name not in first})
    return [
        _pairs(first),
        _details("Everything that decides the numbers", _pairs(rest)) if rest else "",
    ]


def _score(row: Mapping[str, Any], headline: str) -> str:
    values = [row.get(name) for name in (headline, f"{headline}_std", f"{headline}_worst10")]
    if None in values:
        return ""
    mean, spread, worst = map(_plain, values)
    return f"{headline} {mean} ± {spread} over clients, worst 10% {worst}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their path."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        found |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found


def _first(text: str) -> str:
    """The first number in a name; 0 if there is none."""
    return next(iter(re.findall(r"\d+", text)), "0")


def _stated(found: Comparison, method: str, epsilon: float) -> float | None:
    return next(
        row["stated"] for row in found.rows if (row["method"], row["epsilon"]) == (method, epsilon)
    )


def _page(title: str, parts: Iterable[str]) -> str:
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    )
    name = html.escape(title)
    body = "\n".join(filter(None, parts))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>{head}<title>{name}</title><style>{_CSS}</style></head>\n'
        f"<body><main>\n<h1>{name}</h1>\n{body}\n</main></body>\n</html>\n"
    )


def _section(title: str, *parts: str) -> str:
    body = "\n".join(filter(None, parts))
    return f"<section><h2>{html.escape(title)}</h2>\n{body}\n</section>" if body else ""


def _details(title: str, *parts: str, opened: bool = False) -> str:
    body = "\n".join(filter(None, parts))
    return f"<details{' open' * opened}><summary>{html.escape(title)}</summary>\n{body}\n</details>"


def _text(tag: str, text: str, kind: str = "") -> str:
    return f"<{tag}{f' class={kind}' if kind else ''}>{html.escape(text)}</{tag}>"


def _figures(figures: Mapping[str, Callable[[], Any]], *, wide: bool = False) -> str:
    """Pictures side by side where there is room; a wide one by itself, in proportion to its inches."""
    if figures and not plots.available():
        return _text("p", plots.MISSING)
    made = "\n".join(
        f'<figure style="max-width: {9 * figure.get_figwidth():g}rem">{plots.svg(figure, name)}</figure>'
        for name, figure in ((name, draw()) for name, draw in figures.items())
    )
    return f'<div class="{"wide" if wide else "figures"}">\n{made}\n</div>' if made else ""


def _pairs(values: Mapping[str, Any]) -> str:
    return _table(["", ""], values.items(), head=False)


def _table(names: Sequence[str], lines: Iterable[Iterable[Any]], *, head: bool = True) -> str:
    """A table that scrolls by itself where it is too wide."""
    top = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in line) + "</tr>" for line in lines
    )
    first = f"<thead><tr>{top}</tr></thead>" if head else ""
    return (
        f'<div class="scroll"><table>{first}<tbody>\n{body}\n</tbody></table></div>' if body else ""
    )


def _cell(value: Any) -> str:
    """A value, escaped; a number in short, with all of its digits as the element's value."""
    if isinstance(value, _Html):
        return value
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
        return f'<data value="{number!r}">{_plain(number)}</data>'
    return html.escape(_plain(number))


def _plain(value: Any) -> str:
    """A value in short.

    >>> [_plain(value) for value in (0.123456, 1e-05, 12, None, "inf", float("inf"), {"rate": 0.1}, "a_b")]
    ['0.1235', '1e-05', '12', '–', '∞', '∞', '{"rate": 0.1}', 'a_b']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if value in ("inf", math.inf):
        return "∞"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


_CSS = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
p { margin: .5rem 0; max-width: 46rem; }
.lead { color: color-mix(in srgb, currentColor 75%, transparent); }
.warning { border-left: 3px solid #D55E00; padding: .1rem .7rem; background: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
td:has(data) { white-space: nowrap; }
details { margin: .5rem 0; } summary { cursor: pointer; }
ul { padding-left: 1.2rem; font-size: .9rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr)); gap: 1rem; }
figure { margin: 0; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: system-ui, sans-serif !important; }
@media (prefers-color-scheme: dark) { svg { filter: invert(.92) hue-rotate(180deg); } }
@media print {
  :root { color-scheme: light; } body { font-size: 10pt; } main { max-width: none; padding: 0; }
  section, figure, tr { break-inside: avoid; } section:has(details[open]) { break-inside: auto; }
  h2 { break-after: avoid; } .scroll { overflow: visible; } details:not([open]) { display: none; }
}
"""
