"""What the documentation needs no build for: names, pages and links."""

import pathlib
import re
import runpy

import pytest
from algorithms_table import ALGORITHMS

import jaxfl
from jaxfl import algorithms, callbacks, data, models, privacy, tasks

ROOT = pathlib.Path(__file__).parents[1]
PAGES = runpy.run_path(str(ROOT / "docs/_ext/methods.py"))["PAGES"]
REFERENCE = "\n".join(path.read_text() for path in sorted((ROOT / "docs/reference").glob("*.md")))
LISTED = re.findall(r"^\.\. auto(?:function|class|data):: jaxfl\.(\S+)$", REFERENCE, re.MULTILINE)
PACKAGES = {"callbacks": callbacks, "data": data, "models": models, "privacy": privacy}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("experiments/*/README.md"))]
DOCUMENTS += [ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE = {"methods": {page.slug for page in PAGES}}
MADE["results"] = {path.parent.name for path in ROOT.glob("experiments/*/README.md")} | {"speed"}
WRITTEN = [
    path for path in DOCUMENTS if path.parent.parent != ROOT / "docs" or path.stem not in MADE.get(path.parent.name, ())
]


def public():
    """Public names, as the reference has them."""
    packages = {*PACKAGES, "algorithms", "tasks"}
    names = set(jaxfl.__all__) - packages
    for package, module in PACKAGES.items():
        names |= {f"{package}.{name}" for name in module.__all__}
    own = (name for name, value in vars(tasks).items() if getattr(value, "__module__", "") == "jaxfl.tasks")
    return names | {f"tasks.{name}" for name in own if name[0] != "_" and name not in jaxfl.__all__}


def test_the_reference_has_every_public_name_once():
    assert sorted(set(LISTED)) == sorted(LISTED)
    helpers = {"tasks.columns", "tasks.mean"}  # the engine's
    assert public() - helpers <= set(LISTED)


def test_the_reference_has_nothing_else():
    of_those = {"run.simulate.RunOptions", "privacy.planning.Plan", "privacy.accounting.Epsilon"}  # taken or given
    assert set(LISTED) <= public() | of_those


def test_every_method_is_on_one_page():
    named = [name for page in PAGES for name in page.names]
    assert sorted(named) == sorted(algorithms.__all__)
    assert len({page.slug for page in PAGES}) == len(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.slug)
def test_a_page_names_what_exists(page):
    assert set(page.rows or ()) <= set(ALGORITHMS)
    assert set(page.measured) <= MADE["results"]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if "://" in link or made(path, target):
            continue
        found = (path.parent / target).resolve() if target else path
        assert found.exists(), link
        if anchor:
            assert anchor in headings(found), link


def made(path, target):
    """Whether a link leads to a page that is made with the site."""
    where = (path.parent / target).resolve()
    return where.parent.parent == ROOT / "docs" and where.stem in MADE.get(where.parent.name, ())


def headings(path):
    """Anchors of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
