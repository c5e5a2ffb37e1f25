"""Docstrings as the site reads them, without a build of the site."""

import importlib
import inspect
import io
import pathlib
import pkgutil
import runpy
from typing import Any

import pytest

import jaxfl

pytest.importorskip("sphinx")  # the packages of the extra `docs`
from docutils import nodes
from docutils.core import publish_doctree
from docutils.parsers.rst import roles
from sphinx.ext import napoleon

EXTENSION = pathlib.Path(__file__).parents[2] / "docs" / "_ext" / "docstrings.py"
convert_sections = runpy.run_path(str(EXTENSION))["sections"]
SECTIONS: Any = napoleon.Config(
    napoleon_custom_sections=["Guarantee", "Deviations from the paper"], napoleon_use_rtype=False
)


def documented():
    """Yield the path and the value of every function, class and method that has a docstring."""
    for found in pkgutil.walk_packages(jaxfl.__path__, "jaxfl."):
        if not found.name.endswith("__main__"):
            yield from own(found.name, vars(importlib.import_module(found.name)), found.name)


def own(path, members, module):
    """Yield those of `members` that `module` defines, and what its classes define."""
    for name, member in members.items():
        value = getattr(member, "fget", getattr(member, "__func__", member))
        if not (inspect.isclass(value) or inspect.isfunction(value)) or value.__module__ != module:
            continue
        if value.__doc__:
            yield f"{path}.{name}", value
        if inspect.isclass(value):
            yield from own(f"{path}.{name}", vars(value), module)


def complaints(name, value):
    """Return the warnings of docutils about the docstring of `value`."""
    lines = inspect.cleandoc(value.__doc__).split("\n")
    kind = "class" if inspect.isclass(value) else "function"
    convert_sections(None, kind, name, value, None, lines)
    text = str(napoleon.GoogleDocstring(lines, SECTIONS, what=kind, obj=value))
    stream = io.StringIO()
    settings = {"warning_stream": stream, "report_level": 2, "default_role": "name"}
    publish_doctree(text, settings_overrides=settings)
    return stream.getvalue()


def test_docutils_reads_every_docstring_without_a_warning():
    roles.register_generic_role("name", nodes.literal)
    found = {name: complaints(name, value) for name, value in documented()}
    assert len(found) > 1000
    assert {name: text for name, text in found.items() if text} == {}
