"""Page about a plan, for those who must judge a deployment before it runs.

The template `plan_page.html` has the markup, and escapes what this module collects.
"""

import importlib.metadata
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jaxfl._support.checks import check_folder, check_path, checked, show
from jaxfl._support.files import kind, opened, replacing
from jaxfl.privacy.accounting.planning import KINDS, Plan
from jaxfl.privacy.sampling import NEEDS
from jaxfl.privacy.statement import NOT_COVERED, OBSERVERS, PRECISION, UNIT
from jaxfl.report.page import in_short, load_template

_PACKAGES = ("jaxfl", "dp-accounting", "numpy", "scipy")
"""Packages on whose versions the numbers of a plan depend."""

_MARK = b'<meta name="generator" content="jaxfl plan">'
"""Text near the beginning of a page by which `write_plan` recognises its own pages."""


def _check_plans(name: str, value: Any) -> list[Plan]:
    plans: list[Any] = []
    if isinstance(value, Sequence):
        plans = list(value)
    if not plans or not all(isinstance(each, Plan) for each in plans):
        raise TypeError(
            f"{name} must be plans, got {show(value)}. Give the result of jaxfl.privacy.plan."
        )
    if len({_deployment(each) for each in plans}) > 1:
        raise ValueError(
            f"{name} must be of one deployment, got several. Give the result of one call of "
            "jaxfl.privacy.plan."
        )
    return plans


@checked(plans=_check_plans)
def write_plan(plans: Sequence[Plan], path: str | os.PathLike) -> pathlib.Path:
    """Write a plan as a page for a review board, and return the path of the page.

    The page is one file without scripts, and needs no network. It says what is protected against
    whom, which epsilon each mechanism has by which theorem, what each epsilon asks of the
    deployment, and what no epsilon covers.

    Args:
        plans: Result of `jaxfl.privacy.plan`.
        path: Path of the HTML file. An earlier page of a plan is replaced, and nothing else is.

    Raises:
        ValueError: The path belongs to something else, which stays unchanged, or its folder cannot
            be written. Or the plans are of several deployments.
        TypeError: The plans are no result of `jaxfl.privacy.plan`.
    """
    page = check_page("path", path)
    page.parent.mkdir(parents=True, exist_ok=True)
    with replacing(page) as temporary:
        text = load_template("plan_page.html").render(_collect(plans))
        temporary.write_text(text, encoding="utf-8")
    return page


def check_page(name: str, value: Any) -> pathlib.Path:
    """Require a path that can become the page of a plan, and return it.

    It must lead to no file, or to a page that `write_plan` wrote, in a folder that can be written.
    """
    page = pathlib.Path(check_path(name, value))
    check_folder(name, page.parent)
    # The folder may not exist yet, so its nearest parent that does is asked.
    folder = next(each for each in page.absolute().parents if each.exists())
    if not os.access(folder, os.W_OK):
        raise ValueError(
            f"{name} must be in a folder that can be written, got {str(page)!r}. "
            "Choose another path."
        )
    found = kind(page)
    if found is None or (found == "a regular file" and _is_of_plan(page)):
        return page
    raise ValueError(
        f"{name} must be free, or the page of a plan, got {str(page)!r}, {found} that `write_plan` "
        "did not write. Choose another path."
    )


def _is_of_plan(page: pathlib.Path) -> bool:
    with opened(page) as file:
        return _MARK in file.read(1000)


def _deployment(each: Plan) -> tuple:
    """Return the numbers that all plans of one call of `jaxfl.privacy.plan` share."""
    limits = each.participations, each.separation
    return each.clients, each.rounds, each.delta, each.stateful, *limits


def _collect(plans: Sequence[Plan]) -> dict[str, Any]:
    """Return the values that the page shows, by their names in the template."""
    first = plans[0]
    sees, adjacency = OBSERVERS["aggregate"]
    # Plans may share needs, which the page lists once, in their order.
    needed = dict.fromkeys(need for each in plans for need in each.needs)
    not_covered = dict(NOT_COVERED)
    for each in plans:
        # Each kind of noise has its own limits of precision.
        not_covered |= PRECISION[each.mechanism.noise]
    return {
        "title": f"Privacy plan for {first.clients:,} clients",
        "delta": first.delta,
        "rounds": first.rounds,
        "clients": first.clients,
        "cohort": _expected_cohort(first),
        "protected": {
            "unit": UNIT,
            # Whether participation must be hidden, each row's needs say.
            "observer": sees.removesuffix(" (participation hidden)"),
            "adjacency": adjacency,
        },
        "own": sorted({each.kind for each in plans}.difference(KINDS)),
        "facts": _deployment_facts(first),
        "rows": [_row(each) for each in plans],
        "needs": {need: NEEDS[need] for need in needed},
        "not_covered": list(not_covered.values()),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def _expected_cohort(each: Plan) -> float:
    """Return the expected number of participants of a round."""
    return each.mechanism.sampling.expected(each.clients)


def _deployment_facts(each: Plan) -> dict[str, Any]:
    """Return what a plan's deployment is, in words, without what the plan leaves open."""
    facts = {
        "clients": each.clients,
        "participants of a round, on average": _expected_cohort(each),
        "rounds": each.rounds,
        "most participations of a client": each.participations,
        "fewest rounds from one participation to the next": each.separation,
        "clients keep a state": "yes" if each.stateful else "no",
    }
    return {name: value for name, value in facts.items() if value is not None}


def _row(each: Plan) -> list[Any]:
    """Return a plan's line in the table of mechanisms.

    It has the kind, the needs, epsilon, its theorem, the noise multiplier, the error, and the
    mechanism with its sampling.
    """
    # Both are upper bounds, so the smaller one holds.
    tightest = min(each.pld, each.rdp, key=lambda bound: bound.value)
    kind, *numbers = each.mechanism.sampling.describe().items()
    sampling = ", ".join([str(kind[1]), *(f"{name} {in_short(value)}" for name, value in numbers)])
    return [
        each.kind,
        ", ".join(each.needs),
        tightest.value,
        tightest.theorem,
        each.noise_multiplier,
        each.error,
        f"{type(each.mechanism).__name__}; {sampling}",
    ]
