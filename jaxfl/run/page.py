"""Page about a run, a sweep or a comparison, made from the files in its folder."""

import contextlib
import html
import json
import math
import os
import pathlib
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
"""Number of clients that a page lists without a click."""

_CLIENTS = 1000
"""Largest number of clients that a page lists, so that it stays below a megabyte."""

_RERUN = "Run again with the same settings, which writes it anew, or remove it."
"""Remedy of errors about a file that a run wrote."""

_VERSIONS = ("jaxfl", "jax", "jaxlib", "device", "devices")
"""Facts about versions and devices."""

_FIRST = ("method", "model", "rounds", *_VERSIONS)
"""Facts that a page shows first."""


@checked(folder=check_path)
def write_report(folder: str | os.PathLike) -> pathlib.Path:
    """Write `report.html` into the folder of a run, a sweep or a comparison, and return its path.

    The page is one file without scripts, and needs no network. It shows what the folder holds: the
    privacy statement, curves, scores by client, an audit, settings and versions. The run need not
    be finished. The folder of a run or of a sweep's point also gets `curves.pdf`, for a paper.

    A sweep gets a page for each point, and one that lists the points. The page of a comparison has
    its table, picture, paired differences and tuning. `compare` writes this page itself.

    Args:
        folder: Folder of `simulate`, `sweep` or `compare`.

    Raises:
        ValueError: The folder holds no run, no sweep and no comparison.
    """
    path = pathlib.Path(folder)
    points = []
    if path.is_dir():
        points = [point for point in points_of(path) if is_regular(point / METRICS)]
    if is_regular(path / COMPARISON):
        text = _comparison(path)
    elif is_regular(path / METRICS):
        text = _run(path)
    elif points:
        text = _sweep(path, points)
    else:
        raise ValueError(
            f"folder must hold {METRICS}, got {str(folder)!r} without it. "
            "Give the folder of a run, a sweep or a comparison."
        )
    with replacing(path / PAGE) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path / PAGE


class _Html(str):
    """Text that is already markup."""


def _run(folder: pathlib.Path) -> str:
    """Return the page of a run."""
    rows = _rows(folder)
    headline = _headline(rows)
    last = rows[-1] if rows else {}
    statement = _json(folder / PRIVACY)
    arrays = _arrays(folder / PER_CLIENT)
    config = _json(folder / CONFIG)
    facts = _facts(folder)
    title = str(facts.get("method") or config.get("method") or folder.name)
    if rows:
        plots.draw_curves(folder / PRINTED, title, rows, headline)
    panels = plots.panels(rows, headline) if rows else {}
    figures = {name: partial(plots.alone, draw) for name, draw in panels.items()}
    lead = [
        _state(last, facts, statement),
        f"{statement['clients']} clients" if statement else "",
        _score(last, headline),
    ]
    no_statement = _text("p", "No statement before the run's end.")
    all_rows = _table(list(last), (row.values() for row in rows))
    parts = [
        _text("p", ", ".join(filter(None, lead)), "lead"),
        _dropped(rows),
        _section("Privacy", _privacy(statement) if statement else no_statement),
        _section(
            "By round",
            _figures(figures),
            _details("All figures by round", all_rows, _costs(last)),
        ),
        _clients(arrays, rows, headline, statement),
        _section("Audit", _audit(statement["audit"], folder)) if statement.get("audit") else "",
        _section("Settings", _pairs(_flat(config))) if config else "",
        _section("How it was run", *_how(facts)),
    ]
    return _page(title, parts)


def _state(last: Mapping[str, Any], facts: Mapping[str, Any], statement: Mapping[str, Any]) -> str:
    """Return the number of rounds of a run, and whether it is finished."""
    if statement:
        rounds = statement["rounds"]
        if last.get("round") == rounds == facts.get("rounds", rounds):
            return f"{last['round']} rounds"
    of_all = f" of {facts['rounds']}" if "rounds" in facts else ""
    return f"{last.get('round', 0)}{of_all} rounds, not finished"


def _sweep(folder: pathlib.Path, points: Sequence[pathlib.Path]) -> str:
    """Return the page of a sweep, and write the pages of its points."""
    lines = []
    head = ["point"]
    for point in points:
        write_report(point)
        rows = _rows(point)
        statement = _json(point / PRIVACY)
        headline = _headline(rows)
        head = ["point", "round", headline, f"{headline}, worst 10%", "ε (sums)"]
        last = rows[-1] if rows else {}
        epsilon = statement["honest"]["aggregate"]["epsilon"] if statement else None
        address = html.escape(f"{point.name}/{PAGE}")
        link = _Html(f'<a href="{address}">{html.escape(point.name)}</a>')
        worst = last.get(f"{headline}_worst10")
        lines.append([link, last.get("round"), last.get(headline), worst, epsilon])
    return _page(f"{folder.name}: {len(points)} points", [_table(head, lines)])


def _comparison(folder: pathlib.Path) -> str:
    """Return the page of a comparison."""
    found = Comparison.load(folder / COMPARISON)
    methods = list(dict.fromkeys(method for method, _ in found.cells))
    parts = [_text("p", found.protocol, "lead"), _section("Results", *_results(found))]
    silent = [row["method"] for row in found.rows if row["stated"] == 0]
    without_noise = [method for method, epsilon in found.cells if epsilon == math.inf]
    # Every epsilon of the other methods has a difference to such a reference.
    reference = next(iter([*silent, *without_noise, *methods]), None)
    differences = found.differences(reference) if reference else []
    if differences:
        text = (
            "Differences are paired over seeds, with 95% intervals of Student's t. At an epsilon "
            f"without {reference}, methods are compared with its run without noise."
        )
        head = ["method", "ε", f"{found.headline} − {reference}", "low", "high"]
        names = ("method", "epsilon", "difference", "low", "high")
        table = _table(head, [[row[name] for name in names] for row in differences])
        parts.append(_section(f"Differences to {reference}", _text("p", text), table))
    if found.missing:
        head = ["method", "ε", "seed", "point", "reason"]
        lines = []
        for row in found.missing:
            point = "; ".join(f"{name} {_short(value)}" for name, value in row["chosen"].items())
            lines.append([row["method"], row["epsilon"], row["seed"], point, row["reason"]])
        note = _text("p", "Rows without a seed belong to tuning.")
        parts.append(_section("Missing", note, _table(head, lines)))
    if found.tuning:
        parts.append(_section("Tuning", *_tuning(found)))
    parts.append(_section("Privacy", *_statements(folder, found)))
    keys = list(dict.fromkeys(key for row in found.rows for key in row))
    runs = _table(keys, ([row.get(key) for key in keys] for row in found.rows))
    parts.append(_section("Runs", _details("All runs: their last row of metrics", runs)))
    facts = next((_facts(run.parent) for run in sorted(folder.glob(f"*/seed=*/*/{METRICS}"))), {})
    versions = {name: value for name, value in facts.items() if name in _VERSIONS}
    parts.append(_section("How it was run", _pairs(versions)))
    return _page(f"Comparison of {len(methods)} method{'s' * (len(methods) > 1)}", parts)


def _results(found: Comparison) -> list[str]:
    """Return the picture and the table of a comparison, and notes on its means."""
    better = "lower" if found.lower_is_better else "higher"
    head = ["method", "ε", "ε stated (sums)", found.headline, "std over seeds"]
    if found.unseen:
        head += ["unseen clients", "std over seeds"]
    lines = []
    notes = []
    for method, epsilon in found.cells:
        line = [method, epsilon, _stated(found, method, epsilon), *found.mean(method, epsilon)]
        if found.unseen:
            line += found.mean(method, epsilon, "unseen")
        lines.append(line)
        cell = f"{method}, ε {_plain(epsilon)}"
        for note in found.notes(method, epsilon):
            text = f"{cell}: {note}."
            notes.append(_text("p", text, "warning"))
    return [
        _text("p", f"{found.headline} on test examples, over seeds; {better} is better."),
        _figures({"comparison": found.figure}, wide=True) if found.rows else "",
        _table(head, lines),
        *notes,
    ]


def _tuning(found: Comparison) -> list[str]:
    """Return a table of the points that were tried and chosen, and a table for each method."""
    lines = []
    parts = []
    for row in found.tuning:
        tried = [f"{name}: {_range(column)}" for name, column in row["points"].items()]
        chosen = []
        for name, value in row["chosen"].items():
            mark = "*" if at_an_end(value, row["points"][name]) else ""
            chosen.append(f"{name} {_short(value)}{mark}")
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
            cell = f"{row['method']}, ε {_plain(row['epsilon'])}"
            parts.append(
                _details(f"{cell}: every point on validation examples", _table(head, body))
            )
    head = ["method", "ε", "tried", "chosen", "rounds"]
    note = ""
    if any("*" in str(line[3]) for line in lines):
        note = _text("p", "* at an end of what was tried: a wider range may hold a better point.")
    return [_table(head, lines), note, *parts]


def _range(column: Sequence[Any]) -> str:
    """Return the values that were tried, in a few words."""
    values = list(dict.fromkeys(column))
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return f"{len(values)} from {_short(min(values))} to {_short(max(values))}"
    return ", ".join(map(_short, values))


def _short(value: Any) -> str:
    """Return a number with four digits, or text."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.4g}" if is_number else str(value)


def _statements(folder: pathlib.Path, found: Comparison) -> list[str]:
    """Return the statement of the first seed of each method and epsilon, if its folder exists."""
    parts = []
    for method, epsilon in found.cells:
        row = _first_row(found, method, epsilon)
        run = folder / str(row.get("run", ""))
        inside = run != folder and run.resolve().is_relative_to(folder.resolve())
        statement = _json(run / PRIVACY) if inside else {}
        if statement:
            parts.append(_details(f"{method}, ε {_plain(epsilon)}", _privacy(statement)))
    missing = (
        "No row names a folder of its run: there was no folder, or an earlier version wrote the "
        "comparison."
    )
    return parts or [_text("p", missing)]


def _privacy(statement: Mapping[str, Any]) -> str:
    """Return a table of guarantees by observer, and the complete statement."""
    lines = []
    client = "a client, all of its data"
    for seen in statement["honest"].values():
        lines.append([client, seen["sees"], seen["epsilon"], seen["reason"] or seen["by"]])
        if other := seen.get("against_client"):
            lines.append([client, "another client", other["epsilon"], other["by"]])
        if example := seen.get("example"):
            cause = example["reason"] or example["by"]
            lines.append(["one example", seen["sees"], example["epsilon"], cause])
    if own := statement.get("examples"):
        protects = "one example, by local steps"
        delta = own.get("delta", statement["delta"])
        if delta != statement["delta"]:
            protects += f", at delta {delta:g}"
        lines.append([protects, own["sees"], own["epsilon"], own["reason"] or own["by"]])
    # Finite epsilons come first.
    lines.sort(key=lambda line: line[2] == "inf")
    if audit := statement.get("audit"):
        bound = _Html(f"≥ {_cell(audit['at_least'])}")
        lines.append(["a canary", "audited from below", bound, audit["by"]])
        if hint := audit.get("hint"):
            lines.append(["a canary", "estimated by the audit", audit["estimate"], hint])
    if claim := statement["claim"]:
        lines.append([claim["status"], "the paper's own rule", claim["epsilon"], claim["rule"]])
    warnings = "".join(_text("p", warning, "warning") for warning in statement["warnings"])
    table = _table(["protects", "observer", f"ε at delta {statement['delta']:g}", "by"], lines)
    return table + warnings + _details("The complete statement", _outline(statement), opened=True)


def _outline(statement: Any) -> str:
    """Return the statement as nested lists."""
    text = ""
    depth = 0
    for line in statement_lines(statement):
        text += "<ul>" * (line.depth - depth) + "</li></ul>" * (depth - line.depth)
        text += "</li>" if 0 < line.depth <= depth else ""
        text += f"<li>{html.escape(line.text)}" if line.depth else _text("p", line.text)
        depth = line.depth
    return text + "</li></ul>" * depth


def _clients(
    arrays: Mapping[str, np.ndarray], rows: Sequence[dict], headline: str, statement: Mapping
) -> str:
    """Return the distribution over clients at the last evaluation, and the clients, worst first."""
    if headline not in arrays or not len(arrays[headline]):
        return ""
    scores = {name: arrays[name][-1] for name in arrays if np.ndim(arrays[name]) == 2}
    tested = arrays["test_size"] > 0
    values = np.where(tested, scores[headline], np.nan)
    last = rows[-1]
    higher_is_better = (last.get(f"{headline}_worst10") or 0) <= (last.get(headline) or 0)
    # Clients with NaN come last.
    order = np.argsort(values if higher_is_better else -values, kind="stable")
    columns: dict[str, Any] = {"client": np.arange(len(values))} | scores
    columns["test examples"] = arrays["test_size"]
    if "participations" in arrays:
        columns["rounds"] = arrays["participations"]
    for seen, name in ((statement or {}).get("honest") or {}).items():
        own = arrays.get(f"epsilon_{seen}_pld", name["pld"].get("per_client", {}).get("values"))
        if own is not None:
            columns[f"ε ({seen})"] = own
    lines = [[column[i] for column in columns.values()] for i in order[:_CLIENTS]]
    note = f"Round {last['round']}; the worst first."
    if not tested.all():
        note = f"{int((~tested).sum())} of {len(values)} clients have no test example. {note}"
    finite = values[np.isfinite(values)]
    figures = {"clients": partial(plots.distribution, finite, headline)} if finite.size else {}
    more = ""
    if len(lines) > _WORST:
        listed = "all" if len(values) <= _CLIENTS else f"the worst {_CLIENTS} of {len(values)}"
        more = _details(f"Clients: {listed}", _table(list(columns), lines))
    return _section(
        "Over clients",
        _text("p", note),
        _figures(figures),
        _table(list(columns), lines[:_WORST]),
        more,
    )


def _audit(audit: Mapping[str, Any], folder: pathlib.Path) -> str:
    """Return the audit of a statement, with the scores of the canaries if the folder has them."""
    pairs = _pairs(_flat(audit))
    arrays = _arrays(folder / AUDIT)
    if {"taken", "sum"} - arrays.keys():
        return pairs
    inside = arrays["taken"].astype(bool)
    groups = {"took part": arrays["sum"][inside], "left out": arrays["sum"][~inside]}
    return _figures({"canaries": partial(plots.overlaid, groups, "score of a canary")}) + pairs


def _dropped(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a warning with the number of updates that were not finite, if there are any."""
    count = sum(row.get("nonfinite") or 0 for row in rows)
    if not count:
        return ""
    updates = f"{count} updates were" if count > 1 else f"{count} update was"
    text = f"{updates} not finite and dropped; metrics.jsonl has the rounds."
    return _text("p", text, "warning")


def _costs(row: Mapping[str, Any]) -> str:
    """Return the meanings of the row's columns of epsilons, with their observers."""
    return _pairs({name: text for name, text in COLUMNS.items() if name in row})


def _rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    def load(path: pathlib.Path) -> list[Any]:
        return [json.loads(line) for line in read(path).splitlines()]

    rows = _read(folder / METRICS, load, list)
    if not rows or not all(isinstance(row, dict) and "round" in row for row in rows):
        raise ValueError(
            f"{str(folder / METRICS)!r} must hold a row of metrics on each line, got other "
            f"content. {_RERUN}"
        )
    return rows


def _headline(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of a row's first metric, which follows the round."""
    last = rows[-1] if rows else {}
    return next((name for name in last if name != "round"), "accuracy")


def _json(path: pathlib.Path) -> dict[str, Any]:
    return _read(path, lambda path: json.loads(read(path)), dict) if is_regular(path) else {}


def _arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    if not is_regular(path):
        return {}
    return _read(path, read_arrays, dict)


def _read(path: pathlib.Path, load: Callable[[pathlib.Path], Any], kind: type) -> Any:
    """Return the content of a run's file.

    Args:
        path: Path of the file.
        load: Function that reads the file.
        kind: Type that the content must have.

    Raises:
        ValueError: The file cannot be read, or its content has another type.
    """
    problem = ""
    try:
        found = load(path)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, MemoryError) as error:
        problem = f" ({type(error).__name__})"
    else:
        if isinstance(found, kind):
            return found
    raise ValueError(
        f"{str(path)!r} must be a file as a run wrote it, got a damaged one{problem}. {_RERUN}"
    )


def _facts(folder: pathlib.Path) -> dict[str, Any]:
    """Return the plan and the fingerprint in the newest checkpoint of a run, or of its sweep."""
    for root in (folder, folder.parent):
        found = [path / "manifest.json" for path in checkpoints(root / CHECKPOINTS)]
        found = [path for path in found if is_regular(path)]
        if found:
            manifest: dict[str, Any] = {}
            # The reports may be intact even if the checkpoint is damaged.
            with contextlib.suppress(ValueError):
                manifest = _json(found[-1])
            return manifest.get("plan", {}) | manifest.get("fingerprint", {})
    return {}


def _how(facts: Mapping[str, Any]) -> list[str]:
    """Return versions and devices, then all other facts that decide the numbers."""
    plain = {
        name: value
        for name, value in facts.items()
        if not (isinstance(value, dict) and "sha256" in value)
    }
    first = {name: plain[name] for name in _FIRST if name in plain}
    rest = _flat({in_words(name): value for name, value in plain.items() if name not in first})
    details = _details("Everything that decides the numbers", _pairs(rest)) if rest else ""
    return [_pairs(first), details]


def _score(row: Mapping[str, Any], headline: str) -> str:
    """Return the headline metric over clients as text, or an empty text if it is not known."""
    values = [row.get(name) for name in (headline, f"{headline}_std", f"{headline}_worst10")]
    if None in values:
        return ""
    mean, spread, worst = map(_plain, values)
    return f"{headline} {mean} ± {spread} over clients, worst 10% {worst}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their path, whose names are joined by dots."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{path}.")
        else:
            found[path] = value
    return found


def _stated(found: Comparison, method: str, epsilon: float) -> float | None:
    return _first_row(found, method, epsilon)["stated"]


def _first_row(found: Comparison, method: str, epsilon: float) -> Mapping[str, Any]:
    """Return the row of the first seed of a method at an epsilon."""
    cell = (method, epsilon)
    return next(row for row in found.rows if (row["method"], row["epsilon"]) == cell)


def _page(title: str, parts: Iterable[str]) -> str:
    """Return a page with a title and some sections."""
    name = html.escape(title)
    body = "\n".join(filter(None, parts))
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{_CSS}</style></head>\n"
        f"<body><main>\n<h1>{name}</h1>\n{body}\n</main></body>\n</html>\n"
    )


def _section(title: str, *parts: str) -> str:
    body = "\n".join(filter(None, parts))
    return f"<section><h2>{html.escape(title)}</h2>\n{body}\n</section>" if body else ""


def _details(title: str, *parts: str, opened: bool = False) -> str:
    body = "\n".join(filter(None, parts))
    return f"<details{' open' * opened}><summary>{html.escape(title)}</summary>\n{body}\n</details>"


def _text(tag: str, text: str, kind: str = "") -> str:
    attribute = f" class={kind}" if kind else ""
    return f"<{tag}{attribute}>{html.escape(text)}</{tag}>"


def _figures(figures: Mapping[str, Callable[[], Any]], *, wide: bool = False) -> str:
    """Return pictures as markup, in rows with as many of them as there is room for.

    Args:
        figures: Functions that draw the pictures, by name.
        wide: Whether each picture has a row of its own.
    """
    if not figures:
        return ""
    if not plots.available():
        return _text("p", plots.MISSING)
    elements = []
    for name, draw in figures.items():
        figure = draw()
        width = f"{9 * figure.get_figwidth():g}rem"
        picture = plots.svg(figure, name)
        elements.append(f'<figure style="max-width: {width}">{picture}</figure>')
    kind = "wide" if wide else "figures"
    body = "\n".join(elements)
    return f'<div class="{kind}">\n{body}\n</div>'


def _pairs(values: Mapping[str, Any]) -> str:
    return _table(["", ""], values.items(), head=False)


def _table(names: Sequence[str], lines: Iterable[Iterable[Any]], *, head: bool = True) -> str:
    """Return a table, which can be scrolled if it is too wide."""
    top = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = ["".join(f"<td>{_cell(value)}</td>" for value in line) for line in lines]
    if not rows:
        return ""
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    first = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{first}<tbody>\n{body}\n</tbody></table></div>'


def _cell(value: Any) -> str:
    """Return a value as markup. A rounded number has all of its digits as the element's value."""
    if isinstance(value, _Html):
        return value
    plain = value.item() if isinstance(value, np.generic) else value
    is_number = isinstance(plain, int | float) and not isinstance(plain, bool)
    if is_number and math.isfinite(plain):
        return f'<data value="{plain!r}">{_plain(plain)}</data>'
    return html.escape(_plain(plain))


def _plain(value: Any) -> str:
    """Return a value as short text.

    >>> [_plain(value) for value in (0.123456, 1e-05, 12, None, "inf", float("inf"), "a_b")]
    ['0.1235', '1e-05', '12', '–', '∞', '∞', 'a_b']
    >>> _plain({"rate": 0.1})
    '{"rate": 0.1}'
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
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
table { margin: .5rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; }
th, td { border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
td:has(data) { white-space: nowrap; }
details { margin: .5rem 0; } summary { cursor: pointer; }
ul { padding-left: 1.2rem; font-size: .9rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 18rem), 1fr)); }
.figures { gap: 1rem; }
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
