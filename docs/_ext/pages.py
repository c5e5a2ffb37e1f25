"""Sphinx extension that generates the pages of the methods, the reference and the results."""

import importlib
import inspect
import os
import pathlib
import re
from typing import Any

import jax
from algorithms_table import ALGORITHMS, SIZES
from methods import PAGES, Page
from sphinx.application import Sphinx

from jaxfl.privacy import planned_ledger, privacy_statement
from jaxfl.types import Algorithm

DOCS = pathlib.Path(__file__).parents[1]
ROOT = DOCS.parent
MADE = "made here; do not edit"
_ROUNDS = 4
_BLOCK = re.compile(r"```\{eval-rst\}\n(.*?)```\n", re.DOTALL)
_ENTRY = re.compile(r"^(\.\. auto\w+:: (\S+)\n(?:   .*\n)*)", re.MULTILINE)
_SUMMARY = re.compile(r"^\*\*(?:Question|Answer)\.\*\* (.+?)(?=\n\n)", re.DOTALL | re.MULTILINE)


def readmes() -> dict[str, pathlib.Path]:
    """Return the paths of READMEs with results, by the name of their page."""
    found = {path.parent.name: path for path in sorted(ROOT.glob("experiments/*/README.md"))}
    return found | {"speed": ROOT / "benchmarks/README.md"}


def relink(text: str, source: pathlib.Path, page: pathlib.Path) -> str:
    """Return a document's text with its links changed, so that they hold on the page.

    A link to a file outside the site becomes plain text.

    Args:
        text: Text of the document in Markdown.
        source: Path of the document, to which its links are relative.
        page: Path of the page that gets the text.
    """
    pages = {path.resolve(): DOCS / f"results/{name}.md" for name, path in readmes().items()}

    def target(match: re.Match) -> str:
        before, label, link, anchor = match.groups()
        if "://" in link or not link or link.startswith("/"):
            return match[0]
        path = (source.parent / link).resolve()
        inside = pages.get(path, path)
        if before or inside.is_relative_to(DOCS):
            return f"{before}[{label}]({os.path.relpath(inside, page.parent)}{anchor or ''})"
        return label if label.startswith("`") else f"{label} (`{path.relative_to(ROOT)}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)]*)?\)", target, text)


def against(label: str, algorithm: Algorithm) -> str:
    """Return a table's line with the theorems of a method for each observer.

    They come from the statement of a small planned run.

    Args:
        label: First cell of the line.
        algorithm: The method.
    """
    clients = len(SIZES)
    plan = planned_ledger(algorithm.mechanism, clients, _ROUNDS, algorithm.dp_sgd)
    _, states = jax.eval_shape(lambda key: algorithm.init(key, clients), jax.random.key(0))
    options = {
        "terms": algorithm.terms,
        "dp_sgd": algorithm.dp_sgd,
        "stateful": bool(jax.tree.leaves(states)),
    }
    statement = privacy_statement(plan, algorithm.mechanism, clients, **options)
    cells = [_cell(statement["honest"]["aggregate"]), _cell(statement["honest"]["upload"])]
    cells.append(_cell(statement["examples"] or statement["honest"]["aggregate"]["example"]))
    return f"| {label} | " + " | ".join(cells) + " |"


def _cell(seen: dict[str, Any]) -> str:
    if seen["epsilon"] == "inf":
        return f"no finite epsilon: {seen['reason']}"
    return f"{'epsilon 0: ' if seen['epsilon'] == 0 else ''}{seen['by']}"


def page(entry: Page) -> str:
    """Return the Markdown of a method's page."""
    rows = entry.rows
    if rows is None:
        rows = {name: f"`{name}`" for name in entry.names if name in ALGORITHMS}
    lines = [f"<!-- {MADE} -->", f"# {entry.title}", "", f"**When to use it.** {entry.use}", ""]
    lines += [f"**When not.** {entry.avoid}", ""]
    if rows:
        lines += [
            "**Observers and theorems.** The table has the accountant's theorems for a small "
            "planned run of each builder. Rates and numbers of steps are those of this run.",
            "",
            "| | sums and broadcasts | every upload | one example |",
            "| --- | --- | --- | --- |",
            *(against(label, ALGORITHMS[name]()) for name, label in rows.items()),
            "",
        ]
    if entry.note:
        lines += [entry.note, ""]
    links = ", ".join(
        f"[{title(readmes()[name])}](../results/{name}.md)" for name in entry.measured
    )
    lines += [f"**Measured.** {links}." if links else "**Measured.** Not yet.", ""]
    for name in entry.names:
        lines += ["```{eval-rst}", f".. autofunction:: jaxfl.algorithms.{name}", "```", ""]
    return "\n".join(lines)


def title(path: pathlib.Path) -> str:
    """Return the first heading of a document."""
    return next(line[2:] for line in path.read_text().splitlines() if line.startswith("# "))


def first_sentence(name: str) -> str:
    """Return the first line of a public name's docstring, for a cell of a table.

    It is empty for a value that cannot be called.
    """
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    # Instances of built-in classes have the docstring of their class.
    documented = callable(value) and inspect.getdoc(value)
    first = (documented or "").split("\n")[0]
    return re.sub(r":math:`([^`]*)`", r"$\1$", first).replace("|", r"\|")


def overview() -> str:
    """Return a table with a line for each builder: its name, its first sentence and its page."""
    lines = ["| builder | in a sentence | page |", "| --- | --- | --- |"]
    for entry in PAGES:
        for builder in entry.names:
            name = f"jaxfl.algorithms.{builder}"
            page_of = f"[{entry.title}](/methods/{entry.slug}.md)"
            lines.append(f"| {{py:func}}`~{name}` | {first_sentence(name)} | {page_of} |")
    return "\n".join(lines)


def builders() -> str:
    """Return the entries of the sidebar, which lists the pages of methods by their builders."""
    labels = {", ".join(entry.names): entry.slug for entry in PAGES}
    return "\n".join(f"{label} </methods/{slug}>" for label, slug in sorted(labels.items()))


def studies() -> str:
    """Return the entries of the sidebar for the pages of results, by the heads of their titles."""
    labels = {re.split("[:,]", title(path))[0]: name for name, path in readmes().items()}
    return "\n".join(f"{label} <{name}>" for label, name in sorted(labels.items()))


def summaries() -> str:
    """Return the question and the answer of each page of results, in the order of their titles."""
    found = {}
    for name, path in readmes().items():
        text = "\n\n".join(_SUMMARY.findall(path.read_text()))
        made = DOCS / "results/index.md"
        found[title(path)] = f"**[{title(path)}]({name}.md)**\n\n{relink(text, path, made)}"
    return "\n\n".join(found[name] for name in sorted(found))


def listed(block: re.Match) -> str:
    """Return a block of the reference with a table in place of its entries.

    Each entry has a page of its own.
    """
    entries = _ENTRY.findall(block[1])
    rest = _ENTRY.sub("", block[1]).strip()
    lines = [f"```{{eval-rst}}\n{rest}\n```\n"] if rest else []
    if entries:
        lines += ["| name | in a sentence |", "| --- | --- |"]
    lines += [f"| {{py:obj}}`~{name}` | {first_sentence(name)} |" for _, name in entries]
    return "\n".join([*lines, ""])


def reference(text: str, stem: str) -> str:
    """Return a page of the reference that lists its entries, and has their pages in the sidebar.

    Args:
        text: Text of the page in Markdown.
        stem: Name of the page's file without its suffix.
    """
    names = [name for _, name in _ENTRY.findall(text)]
    pages = "\n".join(f"{name.rpartition('.')[2]} <{stem}/{name}>" for name in names)
    tree = f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n" if names else ""
    return _BLOCK.sub(listed, text) + tree


def make(app: Sphinx) -> None:
    """Write the pages of methods, of the reference and of results that have changed."""
    for entry in PAGES:
        _write(DOCS / f"methods/{entry.slug}.md", page(entry))
    for source in DOCS.glob("reference/*.md"):
        for directive, name in _ENTRY.findall(source.read_text()):
            text = f"<!-- {MADE} -->\n# {name.rpartition('.')[2]}\n\n"
            text += f"```{{eval-rst}}\n{directive}```\n"
            _write(source.with_suffix("") / f"{name}.md", text)
    for name, path in readmes().items():
        made = DOCS / f"results/{name}.md"
        # Narrow columns must not part a mean from its deviation.
        text = relink(path.read_text(), path, made).replace(" ± ", "\u00a0±\u00a0")
        _write(made, f"<!-- {MADE} -->\n{text}")


def read(app: Sphinx, name: str, content: list[str]) -> None:
    """Change links of the written pages to other documents, and insert tables and summaries."""
    path = pathlib.Path(app.env.doc2path(name))
    text = relink(content[0], path, path)
    if path.parent == DOCS / "reference":
        text = reference(text, path.stem)
    for write in (answer, overview, builders, studies, summaries):
        mark = f"<!-- {write.__name__} -->"
        if mark in text:
            text = text.replace(mark, write())
    content[0] = text


def answer() -> str:
    """Return the answer on the front page of the repository, with links for the site's index."""
    readme = ROOT / "README.md"
    block = readme.read_text().partition("<!-- answer -->")[2].partition("<!-- /answer -->")[0]
    return relink(block.strip(), readme, DOCS / "index.md")


def _write(path: pathlib.Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension, and return its metadata."""
    app.connect("builder-inited", make)
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
