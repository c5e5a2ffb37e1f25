"""The layers of modules, which restrict imports, and signatures that name their arguments."""

import ast
import inspect
import pathlib
import subprocess
import sys

import pytest

from jaxfl import algorithms

ROOT = pathlib.Path(__file__).parents[1] / "jaxfl"
LAYERS = [
    [pathlib.PurePath(line.split()[0]).stem for line in layer.splitlines()]
    # The first paragraph is a comment.
    for layer in (ROOT.parent / "docs/layers.txt").read_text().split("\n\n")[1:]
]
"""Modules by layer, as `docs/design.md` shows them. A module imports from no later layer."""
MODULES = {
    ".".join(("jaxfl", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in ROOT.rglob("*.py")
}


def imports(module):
    """Yield the modules of the library that a module imports at its own import."""
    tree = ast.parse(MODULES[module].read_text())
    deferred = {
        node
        for part in ast.walk(tree)
        if isinstance(part, ast.FunctionDef)
        or (isinstance(part, ast.If) and "TYPE_CHECKING" in ast.unparse(part.test))
        for node in ast.walk(part)
    }
    for node in ast.walk(tree):
        if node in deferred:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxfl":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


def room(module):
    return module.split(".")[1] if "." in module else "__init__"


def layer(module):
    return next(number for number, rooms in enumerate(LAYERS) if room(module) in rooms)


def test_every_room_is_in_one_layer():
    listed = [name for rooms in LAYERS for name in rooms]
    assert sorted(listed) == sorted({room(module) for module in MODULES})


def test_no_room_imports_from_a_later_layer():
    wrong = [
        f"{module} imports {imported}"
        for module in MODULES
        for imported in imports(module)
        if layer(imported) > layer(module)
    ]
    assert not wrong


def test_no_module_imports_itself_by_way_of_others():
    arrows = {module: set(imports(module)) - {module} for module in MODULES}
    left = dict(arrows)
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    assert not left, "these import each other in a circle"


@pytest.mark.parametrize("name", algorithms.__all__)
def test_a_builder_names_all_of_its_arguments(name):
    """Editors complete the arguments of a signature, and the reference shows them."""
    parameters = inspect.signature(getattr(algorithms, name)).parameters.values()
    assert not [own.name for own in parameters if own.kind is own.VAR_KEYWORD]


def test_what_takes_long_to_import_waits_for_its_first_use():
    slow = (
        "dp_accounting",
        "jinja2",
        "orbax",
        "flax.nnx",
        "scipy.stats",
        "scipy.signal",
        "matplotlib",
        "sklearn",
        "tensorflow_datasets",
    )
    code = f"import sys, jaxfl; print([name for name in {slow} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
