"""Make the numbers and pictures of all READMEs from the results.

python -m experiments.render
python -m experiments.render --check
"""

import dataclasses
import pathlib
import sys
from typing import Any

from experiments.common import cli
from experiments.study import all_studies, fill, markdown_table, render, results_of

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@dataclasses.dataclass(frozen=True)
class Config:
    """What to do."""

    check: bool = False
    """Write nothing; end with 1 if a README is not what its results say."""


def benchmark(result: dict[str, Any]) -> str:
    """The table of a benchmark."""

    def cell(value: Any) -> str:
        return "–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)

    rows, machine = result["rows"], result["machine"]
    names = ", ".join(f"{name} {machine[name]}" for name in ("jax", "jaxlib", "numpy"))
    where = f"{machine['cores']} cores of {machine['cpu']}, {machine['devices']} x {machine['device']}; {names}"
    table = markdown_table([name.replace("_", " ") for name in rows[0]], [[*map(cell, row.values())] for row in rows])
    return f"{table}\n\n{result['headline']}. {where}; {result['date']}."


def main(config: Config) -> None:
    """Render every package, and the benchmarks."""
    done = [path for package, studies in all_studies().items() for path in render(package, studies, check=config.check)]
    blocks = {name: benchmark(result) for name, result in results_of(BENCHMARKS).items()}
    how = "run `python -m benchmarks.run_all --vs torch --out benchmarks/results`"
    done += fill(BENCHMARKS / "README.md", blocks, how, check=config.check)
    print(*done, sep="\n")
    if config.check and done:
        sys.exit("not up to date: run `python -m experiments.render`")


if __name__ == "__main__":
    main(cli(Config, __doc__))
