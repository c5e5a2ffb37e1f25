"""Sphinx extension that generates the pages of the methods and of the results."""

import inspect
import os
import pathlib
import re
from typing import Any

import jax
from algorithms_table import ALGORITHMS, SIZES
from methods import PAGES, Page
from sphinx.application import Sphinx

from jaxfl import algorithms
from jaxfl.privacy import planned_ledger, privacy_statement
from jaxfl.types import Algorithm

DOCS = pathlib.Path(__file__).parents[1]
ROOT = DOCS.parent
MADE = "made here; do not edit"
_ROUNDS = 4


def readmes() -> dict[str, pathlib.Path]:
    """Return the READMEs with results by name."""
    found = {path.parent.name: path for path in sorted(ROOT.glob("experiments/*/README.md"))}
    return found | {"speed": ROOT / "benchmarks/README.md"}


def relink(text: str, source: pathlib.Path, page: pathlib.Path) -> str:
    """Return the text of a document with its links changed for its page."""
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
    """Return the theorems of a method for each observer, by the statement of a planned run."""
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


def overview() -> str:
    """Return a table of all methods."""
    lines = ["| builder | in a sentence | page |", "| --- | --- | --- |"]
    for entry in PAGES:
        for name in entry.names:
            first = (inspect.getdoc(getattr(algorithms, name)) or "").split("\n")[0]
            first = re.sub(r":math:`([^`]*)`", r"$\1$", first).replace("|", r"\|")
            lines.append(
                f"| {{py:func}}`~jaxfl.algorithms.{name}` | {first} | "
                f"[{entry.title}](/methods/{entry.slug}.md) |"
            )
    return "\n".join(lines)


def make(app: Sphinx) -> None:
    """Write the pages that changed."""
    for entry in PAGES:
        _write(DOCS / f"methods/{entry.slug}.md", page(entry))
    for name, path in readmes().items():
        made = DOCS / f"results/{name}.md"
        _write(made, f"<!-- {MADE} -->\n" + relink(path.read_text(), path, made))


def read(app: Sphinx, name: str, content: list[str]) -> None:
    """Change links of the written pages to other documents, and insert the table of methods."""
    path = pathlib.Path(app.env.doc2path(name))
    content[0] = relink(content[0], path, path).replace("<!-- methods -->", overview())


def _write(path: pathlib.Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension."""
    app.connect("builder-inited", make)
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
