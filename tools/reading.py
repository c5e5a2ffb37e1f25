"""Count what makes the code and its prose hard to read, and let no count get worse.

python tools/reading.py            the counts, and the worst places
python tools/reading.py --check    fails where a count is worse than in tools/reading.json
python tools/reading.py --update   writes the counts into tools/reading.json
"""

import argparse
import ast
import collections
import io
import json
import pathlib
import re
import statistics
import sys
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
KEPT = pathlib.Path(__file__).with_suffix(".json")

COLUMNS = 100

OPENER = re.compile(
    r"(Of|To|By|As|With|Where|In|On|From|For|At|Within|Besides?|Beyond)\b",
)
"""Words that no docstring should begin with."""

AVOIDED = re.compile(
    r"\b(told|tells?|refus\w+|go(?:es)? on|went on|beside|apart|alike|likewise|who sees)\b", re.I
)
"""Words for which the field has plainer ones."""

EXCEPTIONS = re.compile(r"\b(far|b|drift) apart\b")
"""Uses of avoided words that say a distance, and have no plainer form."""

NO_VERB = re.compile(
    r"(An?|The|This|That|These|Those|Its?|All|Each|Every|Both|One|Two|Some|Many|None?|What|Whether"
    r"|Which|Who|How|When|If|Only|Also|Not|And|But|First|Last|Same|Other|Another|Numbers?|Whole"
    r"|Shapes?|Bytes|Seconds|Names|Hash|Hashes|Sizes?|Keys?|Clients?|Server|Rows?|Sums?|Noise"
    r"|Rounds|Programs?|Epsilon|Arrays?|Values?|States?|Examples?|Text|Lines?|Rest|Parts?)$"
)
"""First words of a function's docstring that are no verbs."""

IGNORED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}

ALL_TOKENS = "tokens of code"
"""The one count that is not checked, because it grows with what the code does."""

BETTER_HIGH = frozenset({"comments per 1,000 lines"})


class Place(NamedTuple):
    """A line that is hard to read, and why."""

    weight: float
    where: str
    why: str


class Module(NamedTuple):
    """A Python file with its lines and its syntax tree."""

    path: pathlib.Path
    lines: list[str]
    tree: ast.Module

    def where(self, line: int) -> str:
        """Return the path from `ROOT` and a line's number, as text."""
        return f"{self.path.relative_to(ROOT)}:{line}"


def main() -> None:
    """Print the counts, check them, or keep them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default="jaxfl")
    parser.add_argument(
        "--check", action="store_true", help="fail where a count is worse than kept"
    )
    parser.add_argument("--update", action="store_true", help="keep the counts")
    parser.add_argument("--worst", type=int, default=15, help="number of places to show")
    options = parser.parse_args()
    figures, places = counted(modules_of(ROOT / options.folder))
    if options.update:
        KEPT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if options.check:
        sys.exit("\n".join(worse(json.loads(KEPT.read_text(encoding="utf-8")), figures)) or None)
    for name, value in figures.items():
        print(f"{name:<48}{value:>10,g}")
    for place in sorted(places, reverse=True)[: options.worst]:
        print(f"  {place.where} {place.why}")


def modules_of(folder: pathlib.Path) -> list[Module]:
    """Return the Python files in a folder and below, in the order of their paths."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    return [Module(path, text.splitlines(), ast.parse(text)) for path, text in texts.items()]


def worse(kept: dict[str, float], figures: dict[str, float]) -> list[str]:
    """Return a line for each count that is worse than the one that was kept."""
    found = []
    for name, before in kept.items():
        now = figures[name]
        if name == ALL_TOKENS:
            continue
        if (now < before) if name in BETTER_HIGH else (now > before):
            found.append(f"{name}: {now:g}, and {before:g} before. Mend the lines of this change.")
    return found


def counted(modules: list[Module]) -> tuple[dict[str, float], list[Place]]:
    """Return the counts by name, and the places that they count."""
    total = sum(len(module.lines) for module in modules)
    per_line = [tokens for module in modules for tokens in tokens_of(module)]
    bodies = sorted([body for module in modules for body in body_sizes(module)] or [0])
    comments = sum(comment_count(module) for module in modules)
    conditionals = sum(
        isinstance(node, ast.IfExp) for module in modules for node in ast.walk(module.tree)
    )
    places: dict[str, list[Place]] = collections.defaultdict(list)
    for module in modules:
        for kind, place in (*places_in(module), *prose_places(module)):
            places[kind].append(place)

    def per_thousand(count: int) -> float:
        return round(1000 * count / total, 1)

    figures = {
        ALL_TOKENS: sum(per_line),
        "tokens per line of code": round(sum(per_line) / len(per_line), 2),
        "tokens of a function's body, median": statistics.median(bodies),
        "tokens of a function's body, 90th percentile": bodies[len(bodies) * 9 // 10],
        "lines over 100 columns": len(places["long"]),
        "packed assignments": len(places["packed"]),
        "conditional expressions per 1,000 lines": per_thousand(conditionals),
        "comments per 1,000 lines": per_thousand(comments),
        "docstrings that open with a preposition": len(places["opener"]),
        "docstrings of fewer than four words": len(places["short"]),
        "docstrings of functions without a verb first": len(places["verb"]),
        "avoided words in docstrings": len(places["avoided"]),
        "errors of another form": len(places["error"]),
        "names in several modules": len(shared_names(modules)),
    }
    return figures, [place for found in places.values() for place in found]


def tokens_of(module: Module) -> list[int]:
    """Return the number of tokens of each line of code, without docstrings."""
    prose = {line for node in documented(module.tree) for line in docstring_lines(node)}
    found: collections.Counter[int] = collections.Counter()
    for token in tokens_in(module):
        if token.type not in IGNORED and token.start[0] not in prose:
            found[token.start[0]] += 1
    return list(found.values())


def tokens_in(module: Module) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of a module."""
    return tokenize.generate_tokens(io.StringIO("\n".join(module.lines) + "\n").readline)


def comment_count(module: Module) -> int:
    """Return the number of comments, without those for tools."""
    comments = (token.string for token in tokens_in(module) if token.type == tokenize.COMMENT)
    return sum(not re.match(r"# (noqa|pyrefly|fmt)", text) for text in comments)


def body_sizes(module: Module) -> list[int]:
    """Return the number of tokens in the body of each function, with the functions inside."""
    by_line: collections.Counter[int] = collections.Counter()
    for token in tokens_in(module):
        if token.type not in IGNORED:
            by_line[token.start[0]] += 1
    sizes = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = range(body[0].lineno, (body[-1].end_lineno or 0) + 1) if body else ()
            sizes.append(sum(by_line[line] for line in lines))
    return sizes


def places_in(module: Module) -> Iterator[tuple[str, Place]]:
    """Yield long lines, packed assignments, and errors without "must" or "got", with their kind."""
    for number, line in enumerate(module.lines, 1):
        if len(line) > COLUMNS:
            yield "long", Place(1, module.where(number), f"has {len(line)} columns")
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.stmt):
            continue
        if is_packed(node):
            text = module.lines[node.lineno - 1].strip()[:80]
            yield "packed", Place(4, module.where(node.lineno), f"packs two thoughts: {text}")
        text = message_of(node)
        if text is not None and not (re.search(r"\bmust\b", text) and re.search(r"\bgot\b", text)):
            yield "error", Place(2, module.where(node.lineno), f"is an error: {text[:80]}")


def is_packed(node: ast.AST) -> bool:
    """Return whether a node assigns several values to several targets in one statement."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return isinstance(node.targets[0], ast.Tuple)


def message_of(node: ast.AST) -> str | None:
    """Return the text of a ValueError or TypeError that is written where it is raised, or None."""
    call = node.exc if isinstance(node, ast.Raise) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or not call.args:
        return None
    if call.func.id not in ("ValueError", "TypeError"):
        return None
    parts = [part for part in ast.walk(call.args[0]) if isinstance(part, ast.Constant)]
    text = "".join(part.value for part in parts if isinstance(part.value, str))
    names = any(isinstance(part, ast.Name) for part in ast.walk(call.args[0]))
    is_literal = isinstance(call.args[0], ast.JoinedStr | ast.Constant | ast.BinOp)
    return text if is_literal and (len(text) > 20 or not names) else None


def prose_places(module: Module) -> Iterator[tuple[str, Place]]:
    """Yield the docstrings that break a rule, with the kind of the rule."""
    for node in documented(module.tree):
        text = ast.get_docstring(node) or ""
        first = text.splitlines()[0]
        words = first.split()
        where = module.where(node.body[0].lineno)
        if OPENER.match(first):
            yield "opener", Place(9, where, f"opens with a preposition: {first[:80]}")
        if len(words) < 4:
            yield "short", Place(5, where, f"has fewer than four words: {first}")
        for match in AVOIDED.finditer(EXCEPTIONS.sub("", text)):
            yield "avoided", Place(3, where, f"says {match[0]!r}: {first[:80]}")
        if is_function(node) and not begins_with_verb(words[0]):
            yield "verb", Place(6, where, f"has no verb first: {first[:80]}")


def begins_with_verb(word: str) -> bool:
    """Return whether a first word may be a verb: capitalized, only letters, no known other word."""
    plain = word.strip("`:,.")
    if not (plain[:1].isupper() and plain.isalpha()):
        return False
    return not NO_VERB.match(plain) and not OPENER.match(plain)


def is_function(node: ast.AST) -> bool:
    """Return whether a node is a function, but no property."""
    if not isinstance(node, ast.FunctionDef):
        return False
    marks = {ast.unparse(mark) for mark in node.decorator_list}
    return not any("property" in mark for mark in marks)


def documented(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """Yield the nodes that have a docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            yield node


def docstring_lines(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> range:
    """Return the numbers of the lines of a docstring."""
    text = node.body[0]
    return range(text.lineno, (text.end_lineno or text.lineno) + 1)


def shared_names(modules: list[Module]) -> list[str]:
    """Return the names of classes and functions that several modules define."""
    names: collections.Counter[str] = collections.Counter()
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name != "_":
                names[node.name] += 1
    return [name for name, count in names.items() if count > 1]


if __name__ == "__main__":
    main()
