"""Result of a comparison of methods, with its tables, paired differences and picture."""

import functools
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxfl._support.checks import check_fraction, checked
from jaxfl._support.files import read, write_json
from jaxfl.report import plots

Row: TypeAlias = dict[str, Any]
"""Columns of a run, of a choice or of a missing run, by name."""

_LATEX = {sign: rf"\{sign}" for sign in "&%$#_{}"} | {
    "±": r"$\pm$", "∞": r"$\infty$", "–": "--", "<": "$<$", ">": "$>$", "ε": r"$\varepsilon$",
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
}  # fmt: skip
"""LaTeX of characters that LaTeX would interpret or lacks."""

ALL_DROPPED = "all updates dropped"
"""Reason why a run has no place in a table. Its model is untrained."""


def at_an_end(value: Any, tried: Sequence[Any]) -> bool:
    """Return whether a value is at an end of a grid, so that a wider grid may have a better value.

    Only grids of at least three different numbers have ends.
    """
    # Booleans are integers in Python, but make no grid.
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in tried)
    return numbers and len(set(tried)) > 2 and value in (min(tried), max(tried))


class Comparison(NamedTuple):
    """Result of `compare`: the scores of all runs, what tuning chose, and which runs are missing.

    `rows` has one row per method, epsilon and seed, with the columns:

    - `method`, `seed`, `chosen` (the point), and `epsilon`, the target. The target is infinite for
      a builder that takes no `noise_multiplier`, even if its method adds noise of its own.
    - `stated`: The privacy statement's epsilon for the observer of sums. It is 0 for methods that
      send nothing, and None if it is not finite.
    - The last row of the run's metrics, with `bytes_up` and `bytes_down`: what one participant
      sends and receives in one round.
    - `unseen`: The headline metric of the clients who took no part, if there were any.
    - `dropped`: The share of the updates that were not finite, if there were any. A public report
      has it only if all updates were dropped.
    - `run`: The run's folder, if it has one.

    `tuning` has one row per method and epsilon, with the points and their scores on validation
    examples. The scores are by round, for the rounds that may be chosen. `missing` has a row for
    each run without a result: `method`, `epsilon`, `seed` (None for tuning), `chosen` and `reason`.

    A run whose updates were all dropped has a row. However, the mean of its method at its epsilon
    is NaN, and differences and pictures leave this method out at this epsilon.
    """

    rows: list[Row]
    tuning: list[Row]
    headline: str
    lower_is_better: bool
    protocol: str
    """Description of the protocol, for a caption."""
    missing: list[Row] = []  # noqa: RUF012 (never written to)

    def mean(self, method: str, epsilon: float, column: str | None = None) -> tuple[float, float]:
        """Return mean and standard deviation over seeds of the headline metric, or of a column.

        Args:
            method: Name of a method of the comparison.
            epsilon: Target of the method's runs.
            column: Name of a column of the rows, for instance "unseen". None stands for the
                headline metric.

        Returns:
            Mean and standard deviation. The deviation is NaN for a single seed. Both are NaN if all
            updates of a run were dropped, or if there are no runs.

        Raises:
            ValueError: The comparison has no such method, or the rows have no such column of
                numbers.
        """
        # A method whose runs are all missing has no rows.
        tried = [*self.rows, *self.tuning, *self.missing]
        _check_method("method", method, {row["method"] for row in tried})
        values = self._values(method, epsilon, column)
        if not len(values):
            return math.nan, math.nan
        mean = float(np.mean(values))
        # NumPy would warn about the deviation of a single value.
        if len(values) < 2:
            return mean, math.nan
        return mean, float(np.std(values, ddof=1))

    @checked(confidence=functools.partial(check_fraction, one=False, example=0.95))
    def differences(self, reference: str, confidence: float = 0.95) -> list[Row]:
        """Return paired differences to a reference over seeds, with intervals of Student's t.

        Args:
            reference: Name of a method. Others are compared with it at the same epsilon, or at
                infinity if it has no run at this epsilon.
            confidence: Confidence of the interval, whose ends are None for a single seed.

        Returns:
            A row for each method and epsilon that has pairs of known scores: `method`, `epsilon`,
            the mean `difference` (method minus reference), and the ends `low` and `high` of the
            interval.

        Raises:
            ValueError: The comparison has no rows of the reference, or `confidence` is not in
                (0, 1).
        """
        _check_method("reference", reference, {method for method, _ in self.cells})
        found = []
        for method, epsilon in self.cells:
            if method == reference:
                continue
            gains = self._gains(method, epsilon, reference)
            # A run whose updates were all dropped has the score NaN.
            if not gains.size or np.isnan(gains).any():
                continue
            mean = float(gains.mean())
            row: Row = {"method": method, "epsilon": epsilon, "difference": mean}
            if len(gains) > 1:
                half = float(plots.interval(gains, confidence))
                row |= {"low": mean - half, "high": mean + half}
            else:
                row |= {"low": None, "high": None}
            found.append(row)
        return found

    def _gains(self, method: str, epsilon: float, reference: str) -> np.ndarray:
        """Return a method's scores minus those of a reference, for the seeds that both have.

        Without a run of the reference at this epsilon, its runs at infinity count.
        """
        other = epsilon
        if (reference, epsilon) not in self.cells:
            other = math.inf
        if (reference, other) not in self.cells:
            return np.array([])
        own = self._by_seed(method, epsilon)
        theirs = self._by_seed(reference, other)
        # Only seeds that both methods have make pairs.
        return np.array([own[seed] - theirs[seed] for seed in own if seed in theirs])

    def to_pandas(self) -> Any:
        """Return the rows as a DataFrame.

        Raises:
            ValueError: The package pandas is not installed.
        """
        try:
            import pandas  # pyrefly: ignore[missing-import]
        except ImportError:
            raise ValueError(
                "to_pandas() must have pandas, got none. Run `pip install pandas`."
            ) from None
        return pandas.DataFrame(self.rows)

    def to_markdown(self, column: str | None = None) -> str:
        """Return a Markdown table of methods by epsilon, with mean ± standard deviation.

        Brackets hold the cell's `notes`, and name each argument whose best value is the least or
        the greatest that was tried: "0.812 ± 0.004 (rate at an end)". Values beyond this end may
        score higher.

        Args:
            column: Name of a column of the rows. None stands for the headline metric.

        Raises:
            ValueError: The rows have no such column of numbers.
        """
        head, *lines = [[cell.replace("|", r"\|") for cell in line] for line in self._table(column)]
        rule = ["---"] * len(head)
        return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines])

    def to_latex(self, column: str | None = None) -> str:
        """Return the table of `to_markdown` as a `tabular` with the rules of booktabs.

        Args:
            column: Name of a column of the rows. None stands for the headline metric.

        Raises:
            ValueError: The rows have no such column of numbers.
        """
        table = self._table(column)
        head, *rows = [" & ".join(map(_latex, line)) + r" \\" for line in table]
        columns = "l" + "r" * (len(table[0]) - 1)
        lines = [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            head,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike) -> None:
        """Draw the headline metric against epsilon, with the 95% interval of its mean over seeds.

        Methods without a finite target are horizontal lines.

        Args:
            path: Path of the picture. Its suffix (png, pdf or svg) is the format. Without a suffix
                the picture is a png.

        Raises:
            ValueError: The path has another suffix, or matplotlib is not installed.
        """
        plots.save(self.figure(), path)

    def figure(self) -> Any:
        """Return the picture of `plot` as a figure of matplotlib.

        Raises:
            ValueError: Matplotlib is not installed.
        """
        # Only methods that send nothing state an epsilon of 0.
        sends = {row["method"] for row in self.rows if row["stated"] != 0}
        return plots.comparison(self.intervals(), self.headline, sends)

    def notes(self, method: str, epsilon: float) -> list[str]:
        """Return notes on dropped updates and missing runs, or an empty list.

        Args:
            method: Name of a method.
            epsilon: Target of the method's runs.
        """
        rows = _of_cell(self.rows, method, epsilon)
        missing = _of_cell(self.missing, method, epsilon)
        if not rows:
            if not missing:
                return []
            return [missing[-1]["reason"]]
        shares = [row.get("dropped", 0.0) for row in rows]
        # A share of 1 stands for a run whose updates were all dropped.
        untrained = shares.count(1.0)
        if untrained == len(rows):
            return [ALL_DROPPED]
        if untrained:
            return [f"{ALL_DROPPED} in {untrained} of {len(rows)} seeds"]
        found = []
        if any(shares):
            found.append(f"{100 * np.mean(shares):.2g}% of updates dropped")
        seeds = [row["reason"] for row in missing if row["seed"] is not None]
        if seeds:
            found.append(f"{len(seeds)} of {len(seeds) + len(rows)} seeds {seeds[0]}")
        points = [row["reason"] for row in missing if row["seed"] is None]
        if points:
            found.append(f"{len(points)} point{'s' * (len(points) > 1)} {points[0]}")
        return found

    def intervals(self) -> dict[str, dict[float, tuple[float, float]]]:
        """Return means over seeds with their 95% intervals, by method and epsilon.

        Returns:
            The mean of the headline metric, and half the width of its interval by Student's t. The
            width is NaN for a single seed. A method is left out at an epsilon at which a run has no
            score, or all of a run's updates were dropped.
        """
        found: dict[str, dict[float, tuple[float, float]]] = {}
        for method, epsilon in self.cells:
            values = self._values(method, epsilon)
            mean = float(np.mean(values))
            if not math.isnan(mean):
                half = float(plots.interval(values))
                found.setdefault(method, {})[epsilon] = mean, half
        return found

    def save(self, path: str | os.PathLike) -> None:
        """Write the comparison as JSON, with Infinity for an infinite epsilon."""
        write_json(pathlib.Path(path), self._asdict())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Comparison":
        """Return the comparison that `save` wrote into a file.

        Raises:
            ValueError: The file has other content.
            OSError: The file does not exist, or is no regular file.
        """
        try:
            # Python's JSON reads Infinity, which epsilons may be.
            return cls(**json.loads(read(pathlib.Path(path))))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"path must be a file that `save` wrote, got {str(path)!r}, which has other "
                f"content ({error}). Give another path, or run the comparison again."
            ) from None

    @property
    def cells(self) -> list[tuple[str, float]]:
        """Pairs of a method and an epsilon that have rows, in the order of the rows."""
        return list(dict.fromkeys((row["method"], row["epsilon"]) for row in self.rows))

    @property
    def unseen(self) -> bool:
        """Whether the rows have the column `unseen`, because some clients took no part."""
        return any("unseen" in row for row in self.rows)

    def _values(self, method: str, epsilon: float, column: str | None = None) -> list[float]:
        return list(self._by_seed(method, epsilon, column).values())

    def _by_seed(self, method: str, epsilon: float, column: str | None = None) -> dict[int, float]:
        """Return a column by seed, with NaN for a run whose updates were all dropped.

        None as `column` stands for the headline metric.
        """
        name = column
        if name is None:
            name = self.headline
        rows = _of_cell(self.rows, method, epsilon)
        if any(not isinstance(row.get(name), int | float) for row in rows):
            raise ValueError(
                f"column must be a column of numbers, got {name!r}. Give for instance "
                f"{self.headline!r}."
            )
        return {row["seed"]: math.nan if row.get("dropped") == 1 else row[name] for row in rows}

    def _table(self, column: str | None = None) -> list[list[str]]:
        """Return the cells of a table as text, with a line for the head and one for each method."""
        cells = [*self.cells, *((row["method"], row["epsilon"]) for row in self.missing)]
        epsilons = sorted({epsilon for _, epsilon in cells})
        head = [column or self.headline, *("∞" if math.isinf(e) else f"{e:g}" for e in epsilons)]
        # A method without any run has a line too, which says why.
        tuned = [row["method"] for row in self.tuning]
        methods = dict.fromkeys([*tuned, *(method for method, _ in cells)])
        lines = [[name, *(self._cell(name, e, column) for e in epsilons)] for name in methods]
        return [head, *lines]

    def _cell(self, method: str, epsilon: float, column: str | None) -> str:
        """Return mean and standard deviation with notes, or the reason why they are missing.

        A dash stands for a cell without a mean and without a reason.
        """
        ends = [
            f"{name} at an end"
            for row in _of_cell(self.tuning, method, epsilon)
            for name, value in row["chosen"].items()
            if at_an_end(value, row["points"][name])
        ]
        notes = ", ".join([*self.notes(method, epsilon), *ends])
        if not self._values(method, epsilon, column):
            return notes or "–"
        mean, std = self.mean(method, epsilon, column)
        if math.isnan(mean):
            return notes or "–"
        # Bytes are large, and have no decimals.
        digits = ",.0f" if mean >= 1000 else ".3f"
        text = f"{mean:{digits}}"
        if not math.isnan(std):
            text += f" ± {std:{digits}}"
        if notes:
            text += f" ({notes})"
        return text


def _check_method(name: str, method: str, known: set[str]) -> None:
    """Require the name of a method of the comparison, or raise a ValueError.

    Args:
        name: Name of the argument, for errors.
        method: The name that was given.
        known: Names of the comparison's methods.
    """
    if method not in known:
        raise ValueError(
            f"{name} must be a method of the comparison, got {method!r}. "
            f"Name one of {', '.join(sorted(known))}."
        )


def _of_cell(rows: Sequence[Row], method: str, epsilon: float) -> list[Row]:
    return [row for row in rows if (row["method"], row["epsilon"]) == (method, epsilon)]


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)
