"""What a comparison of methods found: its tables, its paired differences, its picture."""

import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy

from jaxfl._validate import checked, probability
from jaxfl.files import read, write_json
from jaxfl.run import plots

Row: TypeAlias = dict[str, Any]

_LATEX = {sign: rf"\{sign}" for sign in "&%$#_{}"} | {
    "±": r"$\pm$", "∞": r"$\infty$", "–": "--", "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "ε": r"$\varepsilon$",
}  # fmt: skip


ALL_DROPPED = "all updates dropped"
"""Reason why a run has no place in a table: its model is the untrained one."""


def at_an_end(value: Any, tried: Sequence[Any]) -> bool:
    """Whether a wider grid might have had a better value; of two values, each is at an end. Only numbers have ends."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in tried)
    return numbers and len(set(tried)) > 2 and value in (min(tried), max(tried))


class Comparison(NamedTuple):
    """What `compare` found.

    `rows` has one row per method, epsilon and seed: `method`, `epsilon` (the target; infinite without noise),
    `stated` (the statement's for the observer of sums; 0 for methods that send nothing, None where there is none),
    `seed`, `chosen` (the point), the last row of the run's metrics, `unseen` (the headline metric of the
    clients who took no part, where there were any), `dropped` (the share of the updates that were not finite, where
    there were any), and `run` (the run's folder, if there is one). `tuning` has, for each method and epsilon, the
    points and, by the evaluated rounds that may be chosen, their scores on validation examples. `missing`
    has a row for each run that there is not: `method`, `epsilon`, `seed` (None: tuning), `chosen`, `reason`.

    A run all of whose updates were dropped has a row, but no place in means, differences and pictures.
    """

    rows: list[Row]
    tuning: list[Row]
    headline: str
    lower_is_better: bool
    protocol: str
    """For a caption."""
    missing: list[Row] = []  # noqa: RUF012 (never written to)

    def mean(self, method: str, epsilon: float, column: str | None = None) -> tuple[float, float]:
        """Return mean and standard deviation over seeds of the headline metric, or of a column.

        Args:
            method: a method of the comparison.
            epsilon: one of its targets.
            column: of the rows, for instance "unseen"; None: the headline metric.

        Raises:
            ValueError: the rows have no such column of numbers.
        """
        values = self._values(method, epsilon, column)
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(
            values
        ) > 1 else math.nan

    @checked(confidence=probability)
    def differences(self, reference: str, confidence: float = 0.95) -> list[Row]:
        """Paired differences to a reference over seeds: their mean, and the interval of Student's t.

        Args:
            reference: a method of the comparison, at the same epsilon, or its only one.
            confidence: of the interval, which is (None, None) for a single seed.
        """
        if reference not in (known := sorted({method for method, _ in self.cells})):
            raise ValueError(f"reference={reference!r}: name one of {', '.join(known)}")
        found = []
        for method, epsilon in self.cells:
            other = epsilon if (reference, epsilon) in self.cells else math.inf
            if method == reference or (reference, other) not in self.cells:
                continue
            own, theirs = self._by_seed(method, epsilon), self._by_seed(reference, other)
            gains = np.array([own[seed] - theirs[seed] for seed in own if seed in theirs])
            if not gains.size or np.isnan(gains).any():
                continue
            mean, half = float(gains.mean()), None
            if len(gains) > 1:
                error = gains.std(ddof=1) / math.sqrt(len(gains))
                half = float(scipy.stats.t.ppf((1 + confidence) / 2, len(gains) - 1) * error)
            interval = (None, None) if half is None else (mean - half, mean + half)
            found.append(
                {
                    "method": method,
                    "epsilon": epsilon,
                    "difference": mean,
                    "low": interval[0],
                    "high": interval[1],
                }
            )
        return found

    def to_pandas(self) -> Any:
        """The rows as a DataFrame (needs pandas)."""
        try:
            import pandas  # pyrefly: ignore[missing-import]
        except ImportError:
            raise ValueError("to_pandas() needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.rows)

    def to_markdown(self, column: str | None = None) -> str:
        """Return a table of methods by epsilon: `mean` of a column ± its standard deviation."""
        head, *lines = [[cell.replace("|", r"\|") for cell in line] for line in self._table(column)]
        return "\n".join(
            "| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines]
        )

    def to_latex(self, column: str | None = None) -> str:
        """The same as a `tabular` with the rules of booktabs."""
        head, *lines = self._table(column)
        rows = [" & ".join(map(_latex, line)) for line in [head, *lines]]
        body = [rf"{rows[0]} \\", r"\midrule", *(rf"{row} \\" for row in rows[1:])]
        columns = "l" + "r" * (len(head) - 1)
        return "\n".join(
            [
                rf"\begin{{tabular}}{{{columns}}}",
                r"\toprule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
            ]
        )

    def plot(self, path: str | os.PathLike) -> None:
        """The headline metric against epsilon, with methods without noise as lines; PNG, PDF or SVG by the name."""
        plots.save(self.figure(), path)

    def figure(self) -> Any:
        """The same as a figure of matplotlib."""
        means: dict[str, dict[float, tuple[float, float]]] = {}
        for method, epsilon in self.cells:
            found = self.mean(method, epsilon)
            if not math.isnan(found[0]):
                means.setdefault(method, {})[epsilon] = found
        return plots.comparison(
            means, self.headline, {row["method"] for row in self.rows if row["stated"] != 0}
        )

    def notes(self, method: str, epsilon: float) -> list[str]:
        """Return what was dropped or is missing of a method at an epsilon, for readers of its mean."""
        rows = _of_cell(self.rows, method, epsilon)
        missing = _of_cell(self.missing, method, epsilon)
        if not rows:
            return [missing[-1]["reason"]] if missing else []
        shares = [row.get("dropped", 0.0) for row in rows]
        untrained = shares.count(1.0)
        if untrained:
            return [
                ALL_DROPPED
                + (f" in {untrained} of {len(rows)} seeds" if untrained < len(rows) else "")
            ]
        found = [f"{100 * np.mean(shares):.2g}% of updates dropped"] if any(shares) else []
        seeds = [row["reason"] for row in missing if row["seed"] is not None]
        found += [f"{len(seeds)} of {len(seeds) + len(rows)} seeds {seeds[0]}"] if seeds else []
        points = [row["reason"] for row in missing if row["seed"] is None]
        return found + (
            [f"{len(points)} point{'s' * (len(points) > 1)} {points[0]}"] if points else []
        )

    def means(self) -> dict[str, dict[float, tuple[float, float]]]:
        """For each method, the mean and the standard deviation over seeds by epsilon."""
        return {
            method: {e: self.mean(method, e) for m, e in self.cells if m == method}
            for method, _ in self.cells
        }

    def save(self, path: str | os.PathLike) -> None:
        """Write all of it as JSON (an infinite epsilon as Infinity)."""
        write_json(pathlib.Path(path), self._asdict())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Comparison":
        """Read what `save` wrote."""
        return cls(**json.loads(read(pathlib.Path(path))))

    @property
    def cells(self) -> list[tuple[str, float]]:
        """Methods and epsilons, in order."""
        return list(dict.fromkeys((row["method"], row["epsilon"]) for row in self.rows))

    @property
    def unseen(self) -> bool:
        """Whether some clients took no part."""
        return any("unseen" in row for row in self.rows)

    def _values(self, method: str, epsilon: float, column: str | None = None) -> list[float]:
        return list(self._by_seed(method, epsilon, column).values())

    def _by_seed(self, method: str, epsilon: float, column: str | None = None) -> dict[int, float]:
        """Return a column (None: the headline metric) by seed; NaN where all updates were dropped."""
        name = self.headline if column is None else column
        rows = _of_cell(self.rows, method, epsilon)
        if any(not isinstance(row.get(name), int | float) for row in rows):
            raise ValueError(
                f"column must be one of numbers, got {name!r}. Give for instance {self.headline!r}."
            )
        return {row["seed"]: math.nan if row.get("dropped") == 1 else row[name] for row in rows}

    def _table(self, column: str | None = None) -> list[list[str]]:
        cells = [*self.cells, *((row["method"], row["epsilon"]) for row in self.missing)]
        epsilons = sorted({epsilon for _, epsilon in cells})
        head = [column or self.headline, *("∞" if math.isinf(e) else f"{e:g}" for e in epsilons)]
        methods = dict.fromkeys(
            [*(row["method"] for row in self.tuning), *(method for method, _ in cells)]
        )
        return [
            head,
            *(
                [method, *(self._cell(method, epsilon, column) for epsilon in epsilons)]
                for method in methods
            ),
        ]

    def _cell(self, method: str, epsilon: float, column: str | None) -> str:
        """Return mean and standard deviation, with notes, or why there is no mean."""
        notes = ", ".join(self.notes(method, epsilon))
        values = self._values(method, epsilon, column)
        mean, std = self.mean(method, epsilon, column) if values else (math.nan, math.nan)
        if math.isnan(mean):
            return notes or "–"
        text = f"{mean:.3f}" + ("" if math.isnan(std) else f" ± {std:.3f}")
        return f"{text} ({notes})" if notes else text


def _of_cell(rows: Sequence[Row], method: str, epsilon: float) -> list[Row]:
    return [row for row in rows if (row["method"], row["epsilon"]) == (method, epsilon)]


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)
