"""Render the numbers and pictures of all READMEs from the results.

python -m experiments.render
python -m experiments.render --check
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from experiments.common import cli
from experiments.map import report as the_map
from experiments.study import HERE, all_studies, fill, markdown_table, render, results_of

PEERS = {
    "torch, cpu": "PyTorch, 2 threads",
    "torch, 2 processes": "PyTorch, 2 processes",
    "bare local training": "bare training",
}
"""Names in the front page's table, by the `round` of a throughput benchmark's row."""
BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the command."""

    check: bool = False
    """Write nothing, and exit with 1 if a README does not match its results."""


def _in_words(name: str) -> str:
    """Return the name of a benchmark's column with spaces, and with units as they are written.

    >>> _in_words("us_per_client_step"), _in_words("temporary_mb")
    ('µs per client step', 'temporary MB')
    """
    units = {"us": "µs", "mb": "MB", "gb": "GB"}
    return " ".join(units.get(word, word) for word in name.split("_"))


def _cell(value: Any) -> str:
    """Format a value: a float with three digits, and None as a dash.

    >>> _cell(None), _cell(0.01234), _cell(98765.0), _cell("lenet")
    ('–', '0.0123', '98,800', 'lenet')
    """
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.3g}"
    return f"{float(short):,.0f}" if "e+" in short else short


def benchmark(result: dict[str, Any]) -> str:
    """Return the table of a benchmark, with its headline, the machine and the date."""
    rows, machine = result["rows"], result["machine"]
    names = ", ".join(f"{name} {machine[name]}" for name in ("jax", "jaxlib", "numpy"))
    where = (
        f"{machine['cores']} cores of {machine['cpu']}, "
        f"{machine['devices']} x {machine['device']}; {names}"
    )
    table = markdown_table(
        [_in_words(name) for name in rows[0]], [[*map(_cell, row.values())] for row in rows]
    )
    return f"{table}\n\n{result['headline']}. {where}; {result['date']}."


def speed(results: Mapping[str, dict[str, Any]]) -> str:
    """Return the front page's table of throughput benchmarks.

    The columns of PyTorch and of bare training have their time as a multiple of jaxfl's.
    """
    lines = []
    for name, result in results.items():
        if name.startswith("throughput_"):
            rows = {row["round"]: row for row in result["rows"]}
            ours, work = rows["jaxfl"], result["workload"]
            times = [f"{rows[peer]['over_jaxfl']:.1f}" if peer in rows else "–" for peer in PEERS]
            steps = f"{work['clients']} clients, {work['steps']} steps of {work['batch_size']}"
            facts = f"{ours['clients_per_s']:.0f}", *times, f"{100 * ours['share_of_peak']:.0f}%"
            lines.append([f"{result['settings']['workload']}: {steps}", *facts])
    head = [
        "workload",
        "clients/s",
        *(f"times {peer}" for peer in PEERS.values()),
        "of the matrix-product peak",
    ]
    return markdown_table(head, lines)


def main(config: Config) -> None:
    """Render the READMEs of every package, of the benchmarks and of the repository."""
    done = [
        path
        for package, studies in all_studies().items()
        for path in render(package, studies, check=config.check)
    ]
    blocks = {name: benchmark(result) for name, result in results_of(BENCHMARKS).items()}
    how = "Run `python -m benchmarks.run_all --vs torch --out benchmarks/results`"
    done += fill(BENCHMARKS / "README.md", blocks, how, check=config.check)
    of_map = results_of(HERE / "map")
    places = {name: result for name, result in of_map.items() if "place" in result}
    answer = the_map.answer(places, of_map.get("counter"))
    front = {"speed": speed(results_of(BENCHMARKS)), "answer": answer}
    done += fill(BENCHMARKS.parent / "README.md", front, how, check=config.check)
    if not config.check:
        the_map.draw_answer(places, HERE / "map/answer.png")
    print(*done, sep="\n")
    if config.check and done:
        sys.exit("The files above are not up to date. Run `python -m experiments.render`.")


if __name__ == "__main__":
    main(cli(Config, __doc__))
