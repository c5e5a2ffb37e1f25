"""Page about a run, a sweep or a comparison, made from the files in its folder.

The template `page.html` has the markup, and escapes what this module collects. Its parts that other
pages have too are in `shared.html`.
"""

import contextlib
import functools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np

from jaxfl._support.checks import check_path, checked, show
from jaxfl._support.files import is_regular, read, read_arrays, replacing
from jaxfl.privacy.statement import sentences_of, statement_lines
from jaxfl.report import layout, plots
from jaxfl.report.comparison import Comparison, Row, at_an_end
from jaxfl.report.facts import in_words

_CLIENTS = 1000
"""Largest number of clients that a page lists, so that the page stays small."""

_RERUN = "If a run wrote it, remove it and run again with the same settings."
"""Remedy of errors about a file that a run wrote."""

_VERSIONS = ("jaxfl", "jax", "jaxlib", "device", "devices")
"""Codes of the facts about versions and devices."""

Columns: TypeAlias = Mapping[str, list[Any]]
"""Columns of the user for the table of clients, by name."""

_FIRST = ("method", "model", "rounds", *_VERSIONS)
"""Codes of the facts that a page shows first."""


def _check_client_columns(name: str, value: Any) -> dict[str, list[Any]]:
    error = TypeError(
        f"{name} must be lists of texts or numbers by name, got {show(value)}. "
        'Give for instance {"hospital": ["north", "south"]}.'
    )
    if not isinstance(value, Mapping):
        raise error
    # Arrays of objects keep Python's types, so a list of texts and numbers stays as it is.
    columns = {title: np.asarray(column, object).tolist() for title, column in value.items()}
    for title, cells in columns.items():
        known = isinstance(title, str) and isinstance(cells, list)
        if not known or not all(isinstance(cell, str | int | float) for cell in cells):
            raise error
    return columns


@checked(folder=check_path, columns=_check_client_columns)
def write_report(
    folder: str | os.PathLike,
    columns: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
) -> pathlib.Path:
    """Write `report.html` into the folder of a run, a sweep or a comparison, and return its path.

    The page is one file without scripts, and needs no network. It shows what the folder holds: the
    privacy statement, curves, scores by client, an audit, settings and versions. The run need not
    be finished, but must have an evaluation. With matplotlib, the folder of a run or of a sweep's
    point also gets `curves.pdf`, for a paper.

    A sweep gets a page for each point, and one that lists the points. The page of a comparison has
    its table, picture, paired differences and tuning. `compare` writes this page itself.

    Args:
        folder: Folder of `simulate`, `sweep` or `compare`.
        columns: Columns of your own for the table of clients, by name, such as the clients' names
            or the intervals of their scores. Each has a text or a number for every client.

    Raises:
        ValueError: The folder holds no run, no sweep and no comparison, or a file in it is damaged.
            Or a column does not have one value for each client, or has the name of one of the run's
            own, or the folder has no scores by client.
        TypeError: A column has another type.
    """
    own_columns: dict[str, Any] = dict(columns or {})
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise ValueError(
            f"folder must be the folder of a run, a sweep or a comparison, got {str(folder)!r}, "
            "which is no folder. Give the folder of one that has begun."
        )
    points = [point for point in layout.points_of(path) if is_regular(point / layout.METRICS)]
    if is_regular(path / layout.COMPARISON):
        if own_columns:
            raise ValueError(
                f"columns must be None for a comparison, got {show(columns)}. Give the folder of a "
                "run, which has a table of clients."
            )
        values = _collect_comparison(path)
    elif is_regular(path / layout.METRICS):
        values = _collect_run(path, own_columns)
    elif points:
        values = _collect_sweep(path, points, own_columns)
    else:
        raise ValueError(
            f"folder must hold {layout.METRICS}, got {str(folder)!r} without it. "
            "Give the folder of a run, a sweep or a comparison."
        )
    with replacing(path / layout.PAGE) as temporary:
        temporary.write_text(load_template("page.html").render(values), encoding="utf-8")
    return path / layout.PAGE


@functools.cache
def load_template(name: str) -> Any:
    """Return a template in this folder, with the functions that it calls."""
    # Most programs write no page, so they need not import jinja2.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    functions: dict[str, Any] = {
        "flattened": _flattened,
        "guarantees": _guarantees,
        "in_short": in_short,
        "is_finite": _is_finite,
        "plots": plots,
        "sentences_of": sentences_of,
        "statement_lines": statement_lines,
    }
    environment.globals.update(functions)
    return environment.get_template(name)


def _collect_run(folder: pathlib.Path, own_columns: Columns) -> dict[str, Any]:
    """Return the values that the page of a run shows, by their names in the template.

    The folder also gets curves.pdf if matplotlib is installed.
    """
    rows = _load_metrics(folder)
    statement = _load_json(folder / layout.PRIVACY)
    config = _load_json(folder / layout.CONFIG)
    facts = _newest_facts(folder)
    title = str(facts.get("method") or config.get("method") or folder.name)
    headline = _first_metric(rows)
    plots.draw_curves(folder / layout.PRINTED, title, rows, headline)
    panels = plots.panels(rows, headline)
    return {
        "title": title,
        "headline": headline,
        "last": rows[-1],
        "by_round": [row.values() for row in rows],
        "panels": {name: functools.partial(plots.alone, draw) for name, draw in panels.items()},
        # A public report lacks this column.
        "dropped": sum(row.get("nonfinite") or 0 for row in rows),
        "meanings": {name: text for name, text in layout.COLUMNS.items() if name in rows[-1]},
        "statement": statement,
        "canaries": _canary_scores(folder / layout.AUDIT),
        "clients": _client_scores(folder, rows[-1], headline, statement, own_columns),
        "config": config,
        "facts": {name: facts[name] for name in _FIRST if name in facts},
        "other_facts": _other_facts(facts),
    }


def _other_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that a page does not show first, in words, without hashes."""
    return {
        in_words(name): value
        for name, value in facts.items()
        if name not in _FIRST and not (isinstance(value, dict) and "sha256" in value)
    }


def _collect_sweep(
    folder: pathlib.Path,
    points: Sequence[pathlib.Path],
    own_columns: Columns,
) -> dict[str, Any]:
    """Return the values that the page of a sweep shows, and write the pages of its points."""
    lines = []
    headline = ""
    for point in points:
        write_report(point, own_columns)
        rows = _load_metrics(point)
        headline = _first_metric(rows)
        scores = [rows[-1].get(name) for name in ("round", headline, f"{headline}_worst10")]
        statement = _load_json(point / layout.PRIVACY)
        epsilon = None
        if statement:
            epsilon = statement["honest"]["aggregate"]["epsilon"]
        lines.append([point.name, *scores, epsilon])
    title = f"{folder.name}: {len(points)} points"
    return {"title": title, "headline": headline, "points": lines}


def _collect_comparison(folder: pathlib.Path) -> dict[str, Any]:
    """Return the values that the page of a comparison shows, by their names in the template."""
    found = Comparison.load(folder / layout.COMPARISON)
    methods = list(dict.fromkeys(method for method, _ in found.cells))
    reference = _reference(found, methods)
    differences = []
    if reference:
        differences = found.differences(reference)
    columns = list(dict.fromkeys(name for row in found.rows for name in row))
    notes = []
    statements = []
    for cell in found.cells:
        notes += [f"{_cell_name(*cell)}: {note}." for note in found.notes(*cell)]
        statement = _statement_of(_first_seed(found, cell), folder)
        statements.append((_cell_name(*cell), statement))
    runs = sorted(folder.glob(f"*/seed=*/*/{layout.METRICS}"))
    facts = next((_newest_facts(run.parent) for run in runs), {})
    return {
        "title": f"Comparison of {len(methods)} method{'s' * (len(methods) > 1)}",
        "found": found,
        "results": [_result(found, cell, columns) for cell in found.cells],
        "notes": notes,
        "reference": reference,
        "differences": [row.values() for row in differences],
        "missing": [_missing_run(row) for row in found.missing],
        "choices": [_choice(row) for row in found.tuning],
        "validated": [_tuning_table(row, found.headline) for row in found.tuning if row["scores"]],
        "statements": statements,
        "columns": columns,
        "runs": [[row.get(name) for name in columns] for row in found.rows],
        "facts": {name: value for name, value in facts.items() if name in _VERSIONS},
        "other_facts": {},
    }


def _reference(found: Comparison, methods: Sequence[str]) -> str | None:
    """Return the method to which a page shows the differences, or None without methods.

    It is one that sends nothing, one that adds no noise, or the first one.
    """
    silent = [row["method"] for row in found.rows if row["stated"] == 0]
    without_noise = [method for method, epsilon in found.cells if epsilon == math.inf]
    # Every epsilon of the other methods has a difference to such a reference.
    return next(iter([*silent, *without_noise, *methods]), None)


def _first_seed(found: Comparison, cell: tuple[str, float]) -> Row:
    """Return the first row of a method at an epsilon."""
    return next(row for row in found.rows if (row["method"], row["epsilon"]) == cell)


def _result(found: Comparison, cell: tuple[str, float], columns: Sequence[str]) -> list[Any]:
    """Return the line of a method at an epsilon in the table of results.

    It has the method, its epsilon, the stated one, the mean and its deviation, both of these for
    unseen clients if there are any, and bytes.
    """
    first_seed = _first_seed(found, cell)
    # The page's template names the columns in this order.
    line = [*cell, first_seed["stated"], *found.mean(*cell)]
    if found.unseen:
        line += found.mean(*cell, "unseen")
    # Comparisons of earlier versions have no bytes.
    sizes = [name for name in ("bytes_up", "bytes_down") if name in columns]
    return line + [first_seed[name] for name in sizes]


def _missing_run(row: Row) -> list[Any]:
    """Return a line about a run without a result: what it is, its point, and the reason."""
    point = "; ".join(f"{name} {in_short(value)}" for name, value in row["chosen"].items())
    return [row["method"], row["epsilon"], row["seed"], point, row["reason"]]


def _cell_name(method: str, epsilon: float) -> str:
    """Return the name of a method at an epsilon."""
    return f"{method}, ε {in_short(epsilon)}"


def _statement_of(row: Row, folder: pathlib.Path) -> dict[str, Any]:
    """Return the privacy statement of a row's run, or {} if the run is not inside the folder."""
    # The file of a comparison may name any path, but the page shows only what its folder holds.
    run = folder / str(row.get("run", ""))
    inside = run != folder and run.resolve().is_relative_to(folder.resolve())
    if not inside:
        return {}
    return _load_json(run / layout.PRIVACY)


def _choice(row: Row) -> list[Any]:
    """Return a line about tuning: method, epsilon, tried values, chosen values and rounds.

    A star marks a chosen value at an end of its grid.
    """
    grids = []
    for name, column in row["points"].items():
        values = list(dict.fromkeys(column))
        text = ", ".join(map(in_short, values))
        if all(map(_is_finite, values)):
            text = f"{len(values)} from {in_short(min(values))} to {in_short(max(values))}"
        grids.append(f"{name}: {text}")
    chosen = []
    for name, value in row["chosen"].items():
        mark = ""
        if at_an_end(value, row["points"][name]):
            mark = "*"
        chosen.append(f"{name} {in_short(value)}{mark}")
    return [row["method"], row["epsilon"], "; ".join(grids), "; ".join(chosen), row["rounds"]]


def _tuning_table(row: Row, headline: str) -> tuple[str, list[str], list[tuple]]:
    """Return the name, the head and the lines of a table with a line for each tried point.

    The columns are the point's arguments, its scores by round, and its share of dropped updates.
    """
    columns = dict(row["points"])
    columns |= {f"{headline}, round {at}": scores for at, scores in row["scores"].items()}
    if "dropped" in row:
        columns["share of updates dropped"] = row["dropped"]
    name = _cell_name(row["method"], row["epsilon"])
    return name, list(columns), list(zip(*columns.values(), strict=True))


def _guarantees(statement: Mapping[str, Any]) -> list[list[Any]]:
    """Return lines of a table of a statement's guarantees, those of finite epsilons first.

    A line has the protected unit, the observer, epsilon, delta, and the theorem or the reason for
    an infinite epsilon.
    """
    delta = statement["delta"]
    bounds = [(*bound, delta) for bound in _honest_bounds(statement)]
    if steps := statement.get("examples"):
        own_delta = steps.get("delta", delta)
        bounds.append(("one example, by local steps", steps["sees"], steps, own_delta))
    lines = [
        [protects, observer, bound["epsilon"], at_delta, bound.get("reason") or bound["by"]]
        for protects, observer, bound, at_delta in bounds
        if bound
    ]
    # Finite epsilons come first.
    return sorted(lines, key=lambda line: line[2] == "inf")


def _honest_bounds(statement: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the protected unit, the observer and the bound of each guarantee by noise on sums.

    The bound is None or missing where a statement has none.
    """
    client = "a client, all of its data"
    for seen in statement["honest"].values():
        yield client, seen["sees"], seen
        yield client, "another client", seen.get("against_client")
        example = seen.get("example")
        # Where private local steps protect an example, noise on sums need not.
        if not statement.get("examples") or (example and example["epsilon"] != "inf"):
            yield "one example", seen["sees"], example


def _client_scores(
    folder: pathlib.Path,
    last: Row,
    headline: str,
    statement: Mapping[str, Any],
    own_columns: Columns,
) -> dict[str, Any]:
    """Return the values of a page's table of clients, or {} without scores by client.

    The first 1,000 lines are kept, the worst client first, with scores of the last evaluation.
    """
    arrays = _load_arrays(folder / layout.PER_CLIENT)
    if not len(arrays.get(headline, ())):
        _check_lengths(own_columns, 0)
        return {}
    _check_lengths(own_columns, len(arrays["test_size"]))
    # Scores have an axis of evaluations, of which the last one counts.
    scores = {name: values[-1] for name, values in arrays.items() if np.ndim(values) == 2}
    tested = arrays["test_size"] > 0
    values = np.where(tested, scores[headline], np.nan)
    of_run = {**scores, **_columns_of_run(arrays, statement)}
    _check_titles(own_columns, {"client", *of_run})
    columns = {"client": np.arange(len(values)), **own_columns, **of_run}
    columns = {name: column for name, column in columns.items() if column is not None}
    # Arrays of objects hold Python's own numbers, whatever the type of a column.
    lines = np.column_stack([np.asarray(column, object) for column in columns.values()])
    order = _worst_first(values, last, headline)
    finite = values[np.isfinite(values)]
    histogram = functools.partial(plots.distribution, finite, headline)
    return {
        "count": len(values),
        "untested": int((~tested).sum()),
        "histogram": {"clients": histogram} if finite.size else {},
        "columns": list(columns),
        "lines": lines[order[:_CLIENTS]].tolist(),
    }


def _worst_first(values: np.ndarray, last: Row, headline: str) -> np.ndarray:
    """Return the clients in the order of their scores, the worst first.

    Args:
        values: Score of each client.
        last: Last row of the run's metrics.
        headline: Name of the score.
    """
    # The files do not say which direction is better, but the worst tenth is on the worse side.
    higher_is_better = (last.get(f"{headline}_worst10") or 0) <= (last.get(headline) or 0)
    # Clients with NaN come last.
    return np.argsort(values if higher_is_better else -values, kind="stable")


def _columns_of_run(arrays: Mapping[str, Any], statement: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that follow the scores in the table of clients, or None for a missing one.

    They are test examples, rounds, and epsilons of clients and of examples.
    """
    columns = {"test examples": arrays["test_size"], "rounds": arrays.get("participations")}
    for name, seen in statement.get("honest", {}).items():
        epsilons = seen["pld"].get("per_client", {}).get("values")
        columns[f"ε ({name})"] = arrays.get(f"epsilon_{name}_pld", epsilons)
    return columns | {"ε (example)": arrays.get("epsilon_examples_pld")}


def _check_titles(own_columns: Columns, reserved: Set[str]) -> None:
    """Require that no column of the user has the name of a column of the run."""
    for name in own_columns:
        if name in reserved:
            raise ValueError(
                f"columns must have other names than those of the run, {sorted(reserved)}, got "
                f"{name!r}. Rename the column."
            )


def _check_lengths(own_columns: Columns, clients: int) -> None:
    """Require that each column of the user has one value for each client."""
    for name, column in own_columns.items():
        if len(column) != clients:
            raise ValueError(
                f"columns[{name!r}] must have a value for each of {clients} clients with scores, "
                f"got {len(column)}. Give one value for each client, in their order."
            )


def _canary_scores(path: pathlib.Path) -> dict[str, Callable[[], Any]]:
    """Return a dict from "canaries" to a function that plots their scores, or {} without scores."""
    arrays = _load_arrays(path)
    if {"taken", "sum"} - arrays.keys():
        return {}
    inside = arrays["taken"].astype(bool)
    groups = {"took part": arrays["sum"][inside], "left out": arrays["sum"][~inside]}
    return {"canaries": functools.partial(plots.overlaid, groups, "score of a canary")}


def _newest_facts(folder: pathlib.Path) -> dict[str, Any]:
    """Return plan and fingerprint, as one dict, of the newest checkpoint with a readable manifest.

    The checkpoint is the run's own or, for a point, that of its sweep. Without one the dict is
    empty.
    """
    own = layout.checkpoints(folder / layout.CHECKPOINTS)
    # In reverse, the run's own checkpoints come before those of its sweep.
    for path in reversed([*layout.checkpoints(folder.parent / layout.CHECKPOINTS), *own]):
        # The reports may be intact even if a checkpoint is damaged.
        with contextlib.suppress(ValueError):
            if manifest := _load_json(path / "manifest.json"):
                return manifest.get("plan", {}) | manifest.get("fingerprint", {})
    return {}


def _load_metrics(folder: pathlib.Path) -> list[Row]:
    """Return the rows of a run's metrics, of which there is at least one."""

    def parse(path: pathlib.Path) -> list[Row]:
        rows = [json.loads(line) for line in read(path).splitlines()]
        if not rows or not all(isinstance(row, dict) and "round" in row for row in rows):
            # The caller turns this error into one that names the file.
            raise LookupError("round")
        return rows

    return _load(folder / layout.METRICS, parse)


def _first_metric(rows: Sequence[Row]) -> str:
    """Return the name of the last row's first metric, or "accuracy" if the row has only a round."""
    return next((name for name in rows[-1] if name != "round"), "accuracy")


def _load_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the JSON object in a run's file, or {} if there is no such file."""
    if not is_regular(path):
        return {}
    # The stars raise an error unless the content is an object.
    return _load(path, lambda path: {**json.loads(read(path))})


def _load_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the arrays in a run's file by name, or {} if there is no such file."""
    if not is_regular(path):
        return {}
    return _load(path, read_arrays)


def _load(path: pathlib.Path, parse: Callable[[pathlib.Path], Any]) -> Any:
    """Return the content of a run's file as `parse` reads it.

    Raises:
        ValueError: The file cannot be read or parsed. The message names the file.
    """
    try:
        return parse(path)
    # A damaged file may have any content, and raise any of these.
    except (OSError, ValueError, LookupError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{str(path)!r} must be a file as a run wrote it, got a damaged one "
            f"({type(error).__name__}). {_RERUN}"
        ) from None


def _flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested settings as pairs of a path and a value. Dots join the names of a path."""
    pairs = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            pairs += _flattened(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}", value))
    return pairs


def _is_finite(value: Any) -> bool:
    """Return whether a value is a finite number, and no boolean."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def in_short(value: Any) -> str:
    """Return a value as short text, with a dash for None and NaN and four digits for floats.

    >>> [in_short(value) for value in (0.123456, 1e-05, 12, None, "inf", float("inf"), "a_b")]
    ['0.1235', '1e-05', '12', '–', '∞', '∞', 'a_b']
    >>> in_short({"rate": 0.1})
    '{"rate": 0.1}'
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if value in ("inf", math.inf):
        return "∞"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return value
    return json.dumps(value)
