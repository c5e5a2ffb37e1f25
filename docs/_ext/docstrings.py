"""Sphinx extension for signatures as in the source, sections of docstrings, and links to names."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.parsers.rst import roles
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

_LOG = logging.getLogger(__name__)
_LETTER = re.compile(r"^(\s+\w+: )([A-Za-z])\.")
_SECTION = re.compile(r"^(Guarantee|Deviations from the paper|References): (.+)$")


def sections(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert sections such as `Guarantee: text` to Napoleon's form, and escape initials.

    The lines of the docstring are changed in place.
    """
    found: list[str] = []
    for line in lines:
        match = _SECTION.match(line)
        found += (
            ["", f"{match[1]}:", f"    {match[2]}"] if match else [_LETTER.sub(r"\1\\\2.", line)]
        )
    lines[:] = found


def signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, text: str | None, result: str | None
) -> tuple[str, str | None] | None:
    """Return arguments and result as the source writes them, or None to keep Sphinx's signature.

    A class with fields has its fields as arguments.
    """
    if inspect.isclass(obj) and (fields := _fields(obj)):
        return f"({', '.join(fields)})", None
    function = inspect.unwrap(getattr(obj, "__func__", obj))
    if not inspect.isfunction(function):
        return None
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    if not isinstance(tree, ast.FunctionDef):
        return None
    arguments = tree.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        del arguments.args[0]
    return f"({ast.unparse(arguments)})", ast.unparse(tree.returns) if tree.returns else None


def _fields(kind: type) -> list[str]:
    """Return the source of each field of a dataclass or a named tuple. Other classes have none."""
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    else:
        names = list(getattr(kind, "_fields", ()))
    written: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        if base.__module__.startswith("jaxfl"):
            written |= dict(_annotated(base))
    return [written[name] for name in names]


def _annotated(kind: type) -> Iterator[tuple[str, str]]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, ast.AnnAssign):
            default = f" = {ast.unparse(node.value)}" if node.value else ""
            name = ast.unparse(node.target)
            yield name, f"{name}: {ast.unparse(node.annotation)}{default}"


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Return True to skip a field whose docstring adds nothing to the signature, or else None."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


def name_role(
    role: str,
    rawtext: str,
    text: str,
    line: int,
    inliner: Any,
    options: Any = None,
    content: Any = (),
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Render `text` in a docstring as code, with a link if it is a documented name."""
    if re.fullmatch(r"[A-Za-z_][\w.]*", text):
        return roles.role("py:obj", inliner.language, line, inliner.reporter)[0](
            "py:obj", rawtext, text, line, inliner, {}, []
        )
    return [nodes.literal(rawtext, text)], []


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Node | None:
    """Return a link from a short name to the only public object with it, or None.

    Warn of a name that begins with `jaxfl.` and does not exist.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    last, kinds = target.rsplit(".", 1)[-1], ("class", "function", "data", "exception")
    objects = env.domains.python_domain.objects
    found = [
        name
        for name, entry in objects.items()
        if name.rsplit(".", 1)[-1] == last and entry.objtype in kinds
    ]
    if len(found) == 1 and (target == last or target.startswith("jaxfl.")):
        entry = objects[found[0]]
        return make_refnode(
            app.builder, node["refdoc"], entry.docname, entry.node_id, content, found[0]
        )
    if target.startswith("jaxfl.") and not _exists(target):
        _LOG.warning("%s does not exist", target, location=node)
    return None


def _exists(target: str) -> bool:
    parts = target.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        try:
            for part in parts[end:]:
                found = getattr(found, part)
        except AttributeError:
            return part in getattr(found, "__annotations__", {})
        return True
    return False


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension, and return its metadata."""
    roles.register_local_role("name", name_role)
    # This priority runs before Napoleon.
    app.connect("autodoc-process-docstring", sections, priority=100)
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-skip-member", skip)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
