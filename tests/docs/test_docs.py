"""What the documentation needs no build for: names, pages and links."""

import contextlib
import functools
import importlib
import pathlib
import re
import runpy
import shlex

import pytest
from algorithms_table import ALGORITHMS

import jaxfl
from jaxfl import algorithms, callbacks, data, models, privacy, tasks
from jaxfl.cli import main as cli

ROOT = pathlib.Path(__file__).parents[2]
PAGES = runpy.run_path(str(ROOT / "docs/_ext/methods.py"))["PAGES"]
REFERENCE = "\n".join(path.read_text() for path in sorted((ROOT / "docs/reference").glob("*.md")))
LISTED = re.findall(r"^\.\. auto(?:function|class|data):: jaxfl\.(\S+)$", REFERENCE, re.MULTILINE)
PACKAGES = {"run.callbacks": callbacks, "data": data, "models": models, "privacy": privacy}
RESULTS = [*sorted(ROOT.glob("experiments/*/README.md")), ROOT / "benchmarks/README.md"]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("experiments/*/README.md")),
]
DOCUMENTS += [ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MADE = {"methods": {page.slug for page in PAGES}}
MADE["results"] = {path.parent.name for path in ROOT.glob("experiments/*/README.md")} | {"speed"}
WRITTEN = [
    path
    for path in DOCUMENTS
    if path.parent.parent != ROOT / "docs" or path.stem not in MADE.get(path.parent.name, ())
    if path.parent.parent != ROOT / "docs/reference"
]


def public():
    """Return the public names, written as in the reference."""
    packages = {name.rpartition(".")[2] for name in PACKAGES} | {"algorithms", "tasks"}
    names = set(jaxfl.__all__) - packages
    for package, module in PACKAGES.items():
        names |= {f"{package}.{name}" for name in module.__all__}
    own = (
        name
        for name, value in vars(tasks).items()
        if getattr(value, "__module__", "") == "jaxfl.tasks"
    )
    return names | {f"tasks.{name}" for name in own if name[0] != "_" and name not in jaxfl.__all__}


def test_the_reference_has_every_public_name_once():
    assert sorted(set(LISTED)) == sorted(LISTED)
    helpers = {
        "tasks.columns",
        "tasks.is_taken",
        "tasks.mean",
        "tasks.Change",
        "tasks.changed_logits",
    }  # not for users
    assert public() - helpers <= set(LISTED)


def test_the_reference_has_nothing_else():
    of_those = {
        "types.Lists",
        "run.simulate.MoreOptions",
        "run.simulate.RunOptions",
        "privacy.accounting.planning.Plan",
        "privacy.accounting.ledgers.Epsilon",
    }  # taken or given
    assert set(LISTED) <= public() | of_those


def test_pages_of_the_reference_have_different_names_in_every_file_system():
    assert len({name.lower() for name in LISTED}) == len(LISTED)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_a_page_of_results_begins_with_what_was_asked_and_found(path):
    title, question, answer, *_ = path.read_text().split("\n\n")
    assert title.startswith("# ")
    assert re.fullmatch(r"\*\*Question\.\*\* [A-Z].*\?", question, re.DOTALL)
    assert re.fullmatch(r"\*\*Answer\.\*\* [A-Z].*\.", answer, re.DOTALL)
    assert len(re.findall(r"\.\s", f"{answer} ".replace("**Answer.**", ""))) <= 7


def test_every_method_is_on_one_page():
    named = [name for page in PAGES for name in page.names]
    assert sorted(named) == sorted(algorithms.__all__)
    assert len({page.slug for page in PAGES}) == len(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.slug)
def test_a_page_names_what_exists(page):
    assert set(page.rows or ()) <= set(ALGORITHMS)
    assert set(page.measured) <= MADE["results"]


EXECUTED = [path for path in DOCUMENTS if "{code-cell}" in path.read_text()]
COMMANDS = [
    (path, words)
    for path in DOCUMENTS
    for words in re.findall(r"^(?:.*`)?jaxfl ((?:quickstart|run|compare|report|plan|data|doctor)\b[^`\n|]*)(?:$|`)",
                            path.read_text().replace("\\\n", " "), re.MULTILINE)
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "words"), COMMANDS, ids=lambda value: str(value).rpartition("/")[2]
)
def test_a_documented_command_fits(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "--config" in words:
        cells = re.findall(
            r"^```\{code-cell\}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE
        )
        exec(next(cell for cell in cells if ".yaml" in cell), {})
    cli.parse(shlex.split(words))


@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.stem)
def test_an_executed_cell_shows_all_that_it_prints_and_its_failure_ends_the_build(path):
    text = path.read_text()
    assert not re.findall(
        r"(?:remove|hide)-(?:cell|output|std)|raises-exc|skip-exec|--no-raise-error|%%capture", text
    )
    assert not re.findall(
        r"^ *!|os\.system|get_ipython", text, re.MULTILINE
    )  # their exit codes are lost
    settings = (ROOT / "docs/conf.py").read_text()
    assert "nb_execution_raise_on_error = True" in settings
    assert not re.findall(r"nb_output_stderr|nb_execution_allow_errors|nb_remove", settings)


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
    """Return whether a link leads to a page that is generated with the site."""
    where = (path.parent / target).resolve()
    return where.parent.parent == ROOT / "docs" and where.stem in MADE.get(where.parent.name, ())


def headings(path):
    """Return the anchors of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def resolved(name):
    """Return the value of a dotted name, by imports of modules and then by attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        module = ".".join(parts[:count])
        with contextlib.suppress(ModuleNotFoundError):
            return functools.reduce(getattr, parts[count:], importlib.import_module(module))
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("folder", ["tutorials", "guides"])
def test_the_readme_of_the_documents_lists_them(folder):
    listed = (ROOT / "docs/README.md").read_text()
    for path in (ROOT / "docs" / folder).glob("*.md"):
        title = path.read_text().partition("\n# ")[2] or path.read_text().removeprefix("# ")
        assert f"- [{title.partition(chr(10))[0]}]({folder}/{path.name})\n" in listed


def test_modules_of_the_reference_are_imported_by_the_names_that_it_gives():
    modules = re.findall(r"^\.\. py:module:: (\S+)$", REFERENCE, re.MULTILINE)
    assert "jaxfl.run.callbacks" in modules
    for module in modules:
        assert importlib.import_module(module).__name__ == module
    for name in LISTED:
        module, _, attribute = f"jaxfl.{name}".rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_import_and_name_what_exists(path):
    text = path.read_text()
    for module, several, one in re.findall(
        r"^ *from (jaxfl[\w.]*) import (?:\(([^)]*)\)|(.*))", text, re.MULTILINE
    ):
        for name in re.findall(r"\w+", several or one.partition("#")[0]):
            resolved(f"{module}.{name}")
    for name in re.findall(r"`(jaxfl(?:\.\w+)+)[`(]", text):
        resolved(name)
