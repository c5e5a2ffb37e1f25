"""Studies, whose commands write results as JSON, from which the numbers of READMEs are rendered.

A package of experiments has a `__main__.py` with `STUDIES`, results in `results/STUDY.json`, and a
README. In the README, `<!-- STUDY -->` and `<!-- /STUDY -->` enclose the text that
`python -m experiments.render` writes.
"""

import dataclasses
import datetime
import importlib
import itertools
import json
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro

from experiments.common import Row, cli, percent, versions
from jaxfl._support.backend import compile_quickly
from jaxfl._support.checks import check_path, check_seeds, checked
from jaxfl._support.files import write_json
from jaxfl.report import plots
from jaxfl.report.looks import looks

HERE = pathlib.Path(__file__).parent
PACKAGES = ("jaxfl", "jax", "jaxlib", "optax", "numpy", "dp-accounting")
"""Packages whose versions every result stores."""
Result = Mapping[str, Any]


@checked(seeds=check_seeds, out=check_path)
@dataclasses.dataclass(frozen=True)
class Options:
    """Scale of a study, its seeds, and the folder of its runs."""

    scale: Literal["smoke", "paper"] = "paper"
    """Scale: "smoke" runs for seconds on digits without a result, "paper" makes the results."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the final runs. A smoke run has the first alone."""
    out: pathlib.Path = pathlib.Path("runs")
    """Folder of the runs, from which a stopped command resumes."""

    @property
    def smoke(self) -> bool:
        """Return whether the study only tests that everything runs, without a result."""
        return self.scale == "smoke"


class Study(NamedTuple):
    """A table or a figure, with the functions that compute its result and describe it.

    Args:
        run: Function from options to a result that `json` can write. The result has the settings,
            the points, and a row for every line of the table.
        markdown: Function from a result to the text of the README.
        draw: Function that draws a result to a path, which has no suffix. None draws nothing.
        minutes: Duration on one core, in minutes.
    """

    run: Callable[[Options], Result]
    markdown: Callable[[Result], str]
    draw: Callable[[Result, pathlib.Path], None] | None = None
    minutes: float = 1.0


def command(package: str, description: str | None, studies: Mapping[str, Study]) -> None:
    """Run the studies that the command line names, write each result, and update the README.

    A smoke run prints the README's text, and writes no result.

    Args:
        package: Folder of `experiments`.
        description: Text of `--help`.
        studies: Studies of the package by name. On the command line, "all" names all of them.
    """

    def main(
        study: tyro.conf.Positional[Any], options: tyro.conf.OmitArgPrefixes[Options] = Options()
    ) -> None:
        for name in studies if study == "all" else [study]:
            began = time.monotonic()
            print(f"{name}: about {studies[name].minutes:g} minutes of one core", flush=True)
            if options.smoke:
                compile_quickly()
            seeds = options.seeds[: 1 if options.smoke else None]
            result = dict(
                studies[name].run(
                    dataclasses.replace(options, out=options.out / package, seeds=seeds)
                )
            )
            facts = {"study": name, "seeds": list(seeds), "versions": versions(*PACKAGES)}
            result = facts | result | {"date": datetime.date.today().isoformat()}
            result["seconds"] = round(time.monotonic() - began)
            if options.smoke:
                print(studies[name].markdown(result))
            else:
                (HERE / package / "results").mkdir(exist_ok=True)
                write_json(HERE / package / "results" / f"{name}.json", result)
                # The result now contains the parts of a long study.
                shutil.rmtree(HERE / package / "results" / name, ignore_errors=True)
                print(*render(package, studies), sep="\n")

    names: Any = Literal["all", *studies]  # pyrefly: ignore
    main.__annotations__["study"] = tyro.conf.Positional[names]
    cli(main, description)


def part(
    package: str,
    study: str,
    name: str,
    facts: Mapping[str, Any],
    make: Callable[[], Result],
    options: Options,
) -> Result:
    """Compute a part of a long study's result, and store it, so that the study can resume.

    Args:
        package: Folder of `experiments`.
        study: Name of the study in the package.
        name: Name of the part.
        facts: Settings on which the part depends. A stored part with equal facts is reused.
        make: Function that computes the part as values that `json` can write.
        options: Options of the study. A smoke run stores its parts with its runs, and any other
            run in `results/STUDY/`.

    Returns:
        What `make` returns, with `facts`, `versions` and `date`.
    """
    folder = options.out if options.smoke else HERE / package / "results"
    path = folder / study / f"{file_name(name)}.json"
    facts = rounded(facts)
    done = json.loads(path.read_text()) if path.exists() else {}
    if rounded(done.get("facts")) != facts:
        done = {
            "facts": facts,
            **make(),
            "versions": versions(*PACKAGES),
            "date": datetime.date.today().isoformat(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, done)
    return done


def file_name(name: str) -> str:
    """Return a name of a part in letters, digits, dots, hyphens and underscores.

    >>> file_name("the deployment's noise, ε = 8")
    'the_deployment_s_noise_epsilon_8'
    """
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name.replace("ε", "epsilon")).strip("_")


def rounded(facts: Any) -> Any:
    """Return facts as JSON stores them, with six digits, because processors differ in the rest."""
    return json.loads(json.dumps(facts), parse_float=lambda number: float(f"{float(number):.6g}"))


def render(package: str, studies: Mapping[str, Study], *, check: bool = False) -> list[str]:
    """Write the results of a package into its README, and draw them.

    Args:
        package: Folder of `experiments`.
        studies: Studies of the package.
        check: Whether to write nothing.

    Returns:
        The files that were written, or with `check` the README if it is not up to date.

    Raises:
        ValueError: A result does not have exactly one place in the README, or a place has no
            result.
    """
    results = {
        name: result for name, result in results_of(HERE / package).items() if name in studies
    }
    blocks = {name: studies[name].markdown(result) for name, result in results.items()}
    how = f"Run `python -m experiments.{package} {{}}`"
    done = fill(HERE / package / "README.md", blocks, how, check=check)
    for name, result in results.items():
        draw = studies[name].draw
        if draw is not None and not check:
            draw(result, HERE / package / name)
            done.append(f"{HERE / package / name}.*")
    return done


def results_of(folder: pathlib.Path) -> dict[str, Any]:
    """Return the results in `results/*.json` of a folder, by study."""
    return {
        path.stem: json.loads(path.read_text())
        for path in sorted((folder / "results").glob("*.json"))
    }


def fill(
    path: pathlib.Path, blocks: Mapping[str, str], how: str, *, check: bool = False
) -> list[str]:
    """Write each block into its place in a document.

    Args:
        path: The document.
        blocks: Text of each block by name.
        how: Remedy for a place without a block, with {} for the block's name.
        check: Whether to write nothing.

    Returns:
        A list with the path. With `check`, the list is empty if the document is up to date.

    Raises:
        ValueError: A block does not have exactly one place, or a place has no block.
    """
    before = text = path.read_text()
    for name in re.findall(r"<!-- /(\w+) -->", text):
        if name not in blocks:
            raise ValueError(
                f"{path} must have a result for each place, got none for {name!r}. "
                f"{how.format(name)}."
            )
    for name, block in blocks.items():
        parts = re.split(rf"<!-- {name} -->.*?<!-- /{name} -->", text, flags=re.DOTALL)
        if len(parts) != 2:
            raise ValueError(
                f"{path} must have one place for {name!r}, got {len(parts) - 1}. "
                f"Write <!-- {name} --><!-- /{name} --> once."
            )
        text = f"<!-- {name} -->\n{block.strip()}\n<!-- /{name} -->".join(parts)
    if check:
        return [str(path)] if text != before else []
    path.write_text(text)
    return [str(path)]


def all_studies() -> dict[str, Mapping[str, Study]]:
    """Return the studies of every package with a `__main__.py`, by package and name."""
    names = sorted(path.parent.name for path in HERE.glob("*/__main__.py"))
    return {name: importlib.import_module(f"experiments.{name}.__main__").STUDIES for name in names}


def facts_of(row: Row) -> dict[str, Any]:
    """Return what a result stores of a method's runs.

    The final scores have a number for every seed, and the scores by round a list for every seed.
    Honest epsilons are by observer and accountant, and the claimed one may be None.
    """
    honest, claim = row.statement["honest"], row.statement["claim"]
    facts = {
        "accuracy": row.mean,
        "worst10": row.worst10,
        "loss": [metrics[-1]["loss"] for metrics in row.metrics],
        "rounds": [entry["round"] for entry in row.metrics[0]],
        "accuracy_by_round": [[entry["accuracy"] for entry in metrics] for metrics in row.metrics],
        "loss_by_round": [[entry["loss"] for entry in metrics] for metrics in row.metrics],
        "epsilon": {
            who: {how: honest[who][how]["total"] for how in ("rdp", "pld")}
            for who in ("aggregate", "upload")
        },
        "claimed": None if claim is None else claim["epsilon"],
    }
    return facts | ({"local": list(row.local)} if row.local else {})


def draw_curves(
    result: Result,
    path: pathlib.Path,
    *,
    values: str = "accuracy_by_round",
    label: str = "accuracy %",
    scale: float = 100.0,
) -> None:
    """Draw a number by round: the mean over seeds, and a band of its 95% interval.

    Args:
        result: Result with a row for each method.
        path: Path of the PNG file, without its suffix.
        values: Entry of the rows to draw, with a list by round for every seed.
        label: Label of the vertical axis.
        scale: Factor on the values.
    """
    with plots.style():
        figure = plots.new_figure(plots.DOUBLE, 3.2)
        axes = figure.subplots()
        styles = looks(result["rows"])
        for name, row in result["rows"].items():
            plots.by_round(axes, row["rounds"], scale * np.array(row[values]), name, styles[name])
        axes.set_ylabel(label + plots.MEAN * (len(result["seeds"]) > 1))
        if scale == 100:
            # Intervals of few seeds may leave the range of a share.
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -2), min(high, 102))
        plots.legend_beside(axes)
    plots.save(figure, path.with_suffix(".png"))


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table from the texts of its head and of its lines."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def agreement(printed: Sequence[float], measured: Sequence[float]) -> str:
    """Describe the largest difference from a paper's numbers, and how many pairs keep their order.

    Pairs that are equal in the paper do not count.

    >>> agreement([50.0, 60.0, 70.0], [52.0, 59.0, 55.0])
    'within 15.0 points; 2 of 3 orderings'
    """
    pairs = [
        (printed[i] - printed[j]) * (measured[i] - measured[j]) > 0
        for i, j in itertools.combinations(range(len(printed)), 2)
        if printed[i] != printed[j]
    ]
    far = np.abs(np.subtract(printed, measured)).max()
    return f"within {far:.1f} points; {sum(pairs)} of {len(pairs)} orderings"


def signed(gains: Sequence[float] | np.ndarray) -> str:
    """Format differences of shares as signed percentage points.

    >>> signed([0.05, -0.002])
    '+5.0, -0.2'
    """
    return ", ".join(f"{100 * gain:+.1f}" for gain in gains)


def yes_or_no(claims: Mapping[str, bool]) -> str:
    """Format for each claim whether it holds.

    >>> yes_or_no({"a above b": True, "b above c": False})
    'a above b: yes; b above c: no'
    """
    return "; ".join(f"{claim}: {'yes' if found else 'no'}" for claim, found in claims.items())


def source(result: Result) -> str:
    """Return the line below a table: seeds, the form of several seeds' numbers, date, versions."""
    seeds = result["seeds"]
    if len(seeds) == 1:
        return f"Seed {seeds[0]}; {dated(result)}."
    return f"Seeds {listed(seeds)}, mean ± standard deviation; {dated(result)}."


def dated(result: Result) -> str:
    """Return the date of a result and the versions of the packages that made it."""
    installed = listed(f"{name} {version}" for name, version in result["versions"].items())
    return f"{result['date']}; {installed}"


def listed(values: Iterable[Any]) -> str:
    """Join values with commas.

    >>> listed([0, 1, 2])
    '0, 1, 2'
    """
    return ", ".join(map(str, values))


__all__ = [
    "PACKAGES", "Options", "Result", "Study", "agreement", "all_studies", "command", "dated",
    "draw_curves", "facts_of", "listed", "markdown_table", "part", "percent", "render", "signed",
    "source", "yes_or_no",
]  # fmt: skip
