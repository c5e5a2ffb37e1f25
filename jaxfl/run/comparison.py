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
from jaxfl.files import write_json
from jaxfl.run import plots

Row: TypeAlias = dict[str, Any]

_LATEX = {sign: rf"\{sign}" for sign in "&%$#_{}"} | {
    "±": r"$\pm$", "∞": r"$\infty$", "–": "--", "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "ε": r"$\varepsilon$",
}  # fmt: skip


def at_an_end(value: float, tried: Sequence[float]) -> bool:
    """Whether a wider grid might have had a better value; of two values, each is at an end."""
    return len(set(tried)) > 2 and value in (min(tried), max(tried))


class Comparison(NamedTuple):
    """What `compare` found.

    `rows` has one row per method, epsilon and seed: `method`, `epsilon` (the target; infinite without noise),
    `stated` (the statement's for the observer of sums; 0 for methods that send nothing, None where there is none),
    `seed`, `chosen` (the point), and the last row of the run's metrics. `tuning` has, for each method and epsilon, the
    points and, by the evaluated rounds that may be chosen, their scores on validation examples.
    """

    rows: list[Row]
    tuning: list[Row]
    headline: str
    lower_is_better: bool
    protocol: str
    """For a caption."""

    def mean(self, method: str, epsilon: float) -> tuple[float, float]:
        """Mean and standard deviation over seeds of the headline metric."""
        values = self._values(method, epsilon)
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan

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
            gains = np.subtract(self._values(method, epsilon), self._values(reference, other))
            mean, half = float(gains.mean()), None
            if len(gains) > 1:
                error = gains.std(ddof=1) / math.sqrt(len(gains))
                half = float(scipy.stats.t.ppf((1 + confidence) / 2, len(gains) - 1) * error)
            interval = (None, None) if half is None else (mean - half, mean + half)
            found.append(
                {"method": method, "epsilon": epsilon, "difference": mean, "low": interval[0], "high": interval[1]}
            )
        return found

    def to_pandas(self) -> Any:
        """The rows as a DataFrame (needs pandas)."""
        try:
            import pandas  # pyrefly: ignore[missing-import]
        except ImportError:
            raise ValueError("to_pandas() needs pandas: pip install pandas") from None
        return pandas.DataFrame(self.rows)

    def to_markdown(self) -> str:
        """Methods by epsilon, mean ± standard deviation over seeds."""
        head, *lines = [[cell.replace("|", r"\|") for cell in line] for line in self._table()]
        return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])

    def to_latex(self) -> str:
        """The same as a `tabular` with the rules of booktabs."""
        head, *lines = self._table()
        rows = [" & ".join(map(_latex, line)) for line in [head, *lines]]
        body = [rf"{rows[0]} \\", r"\midrule", *(rf"{row} \\" for row in rows[1:])]
        columns = "l" + "r" * (len(head) - 1)
        return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}"])

    def plot(self, path: str | os.PathLike) -> None:
        """The headline metric against epsilon, with methods without noise as lines; PNG, PDF or SVG by the name."""
        plots.save(self.figure(), path)

    def figure(self) -> Any:
        """The same as a figure of matplotlib."""
        return plots.comparison(self.means(), self.headline, {row["method"] for row in self.rows if row["stated"] != 0})

    def means(self) -> dict[str, dict[float, tuple[float, float]]]:
        """For each method, the mean and the standard deviation over seeds by epsilon."""
        return {method: {e: self.mean(method, e) for m, e in self.cells if m == method} for method, _ in self.cells}

    def save(self, path: str | os.PathLike) -> None:
        """Write all of it as JSON (an infinite epsilon as Infinity)."""
        write_json(pathlib.Path(path), self._asdict())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Comparison":
        """Read what `save` wrote."""
        return cls(**json.loads(pathlib.Path(path).read_text()))

    @property
    def cells(self) -> list[tuple[str, float]]:
        """Methods and epsilons, in order."""
        return list(dict.fromkeys((row["method"], row["epsilon"]) for row in self.rows))

    def _values(self, method: str, epsilon: float) -> list[float]:
        return [row[self.headline] for row in self.rows if (row["method"], row["epsilon"]) == (method, epsilon)]

    def _table(self) -> list[list[str]]:
        epsilons = sorted({epsilon for _, epsilon in self.cells})
        head = [self.headline, *("∞" if math.isinf(e) else f"{e:g}" for e in epsilons)]
        lines = []
        for method in dict.fromkeys(method for method, _ in self.cells):
            line = [method]
            for epsilon in epsilons:
                mean, std = self.mean(method, epsilon) if (method, epsilon) in self.cells else (math.nan, math.nan)
                line.append("–" if math.isnan(mean) else f"{mean:.3f}" + ("" if math.isnan(std) else f" ± {std:.3f}"))
            lines.append(line)
        return [head, *lines]


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)
