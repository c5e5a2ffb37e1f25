"""Texts of users: lists of tokens of any length become examples of one length."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from jaxfl._support.checks import check_array, check_count, checked, not_empty, show
from jaxfl.data.load import Dataset, check_owners, check_targets, from_arrays
from jaxfl.data.owners import places

UNKNOWN = 0
"""Number that stands for padding, and for tokens that a vocabulary does not have."""


def _check_token_lists(name: str, value: Any) -> Sequence[Any]:
    """Require a sequence of texts, or of lists of tokens."""
    if isinstance(value, str | bytes | Mapping) or not _is_list(value):
        raise TypeError(
            f"{name} must be a sequence of lists of tokens, got {show(value)}. "
            "Give one list for each of the users."
        )
    if not len(value):
        raise ValueError(
            f"{name} must have at least one list, got {show(value)}. Give the users' lists."
        )
    return value


def _is_list(value: Any) -> bool:
    """Return whether a value has a length, as lists, texts, columns and arrays with an axis do."""
    has_length = hasattr(value, "__len__") and not isinstance(value, type)
    return has_length and getattr(value, "ndim", 1) > 0


def _check_vocabulary(name: str, value: Any) -> dict[str, int]:
    """Require different tokens of type str, and return the number of each token, from 1."""
    listed = isinstance(value, str) or (isinstance(value, Sequence) and len(value))
    if not listed or not all(isinstance(token, str) for token in value):
        raise TypeError(
            f"{name} must be tokens of type str, got {show(value)}. Give for instance ['to', 'be']."
        )
    numbers = {token: number for number, token in enumerate(value, 1)}
    if len(numbers) < len(value) or not numbers:
        raise ValueError(
            f"{name} must have one or more different tokens, got {show(value)}. "
            "Give each token once."
        )
    return numbers


@checked(
    users=not_empty(check_owners),
    tokens=_check_token_lists,
    length=check_count,
    labels=check_targets,
    vocabulary=_check_vocabulary,
    most=functools.partial(check_count, least=1),
)
def from_lists(
    users: Shaped[np.ndarray, "n"] | Sequence[str] | Sequence[int],
    tokens: Sequence[Any],
    *,
    length: int,
    labels: np.ndarray | None = None,
    vocabulary: Sequence[str] | None = None,
    most: int | None = None,
    name: str = "lists",
) -> Dataset:
    """Make a dataset of users' texts, such as messages, each a list of tokens.

    All examples are training examples (see `hold_out`).

    Without `labels` the examples are for a language model, whose task is
    `jaxfl.tasks.next_token()`. A list is cut into windows of L tokens, and the labels of a window
    are the tokens that follow each of its positions. A position without a next token has the input
    0, and the label -1, which does not count. A list with fewer than two tokens makes no example.

    With `labels`, each list is one example of a classification or a regression. Only its first L
    tokens count. A shorter list has zeros in front of it, so that the last position, after which
    models with `every=False` predict, is the last token.

    The embedding of a model needs one row more than the largest number of a token. With
    `vocabulary`, `len(vocabulary) + 1` rows are enough.

    Args:
        users: User `[n]` of each list: names, or whole numbers. They become the owners of the
            examples, for `by_owner`.
        tokens: Lists of tokens of any length: whole numbers from 0, or str with a `vocabulary`. A
            text counts as the list of its characters.
        length: L, the number of tokens of an example.
        labels: Label `[n]` of each list. None lets every position predict the next token.
        vocabulary: Tokens that are known, numbered from 1. Others become 0. None requires numbers.
        most: Largest number of examples of a user, of which the first ones are kept. None keeps
            all. A bound keeps users with long texts from slowing down their rounds. The epsilon of
            a user does not depend on the bound, because updates are clipped.
        name: Name of the dataset in reports.

    Guarantee:
        No epsilon covers a vocabulary that follows from the users' texts. Take a public one, such
        as characters, or the words of a dictionary.

    Raises:
        ValueError: Numbers of users, lists and labels differ. A token is not a whole number of at
            least 0, is a str without `vocabulary`, or is a number above the size of `vocabulary`. A
            vocabulary has a token twice. No list makes an example.
        TypeError: An argument has the wrong type.

    Example:
        >>> texts = ["abcabc", "b", "ca"]
        >>> data = from_lists(["ann", "bob", "ann"], texts, length=4, vocabulary="abc")
        >>> data.train_inputs.tolist(), data.owner.tolist()
        ([[1, 2, 3, 1], [2, 0, 0, 0], [3, 0, 0, 0]], ['ann', 'ann', 'ann'])
        >>> data.train_labels.tolist()
        [[2, 3, 1, 2], [3, -1, -1, -1], [1, -1, -1, -1]]
    """
    for argument, entries in (("tokens", tokens), ("labels", labels)):
        if entries is not None and len(entries) != len(users):
            raise ValueError(
                f"{argument} must have one entry for each of the {len(users)} users, got "
                f"{len(entries)} in {show(entries)}. Give a user for each list."
            )
    # The decorator has made a dict of a given vocabulary, with the number of each token.
    known: Any = vocabulary
    numbers = [_numbers_of(f"tokens[{i}]", text, known) for i, text in enumerate(tokens)]
    if labels is None:
        inputs, targets, owner = _windows_of_users(users, numbers, length)
    else:
        inputs = np.stack([_padded_in_front(own, length) for own in numbers])
        targets = labels
        owner = np.asarray(users)
    if most is None:
        most = len(inputs)
    rows = _first_of_each(owner, most)
    train = (inputs[rows], targets[rows])
    test = (inputs[:0], targets[:0])
    return from_arrays(*train, *test, name=name, owner=owner[rows])


def _numbers_of(
    where: str, text: Any, vocabulary: Mapping[str, int] | None
) -> Int[np.ndarray, "t"]:
    """Return the numbers of a list's tokens in int32. Unknown tokens of a vocabulary become 0.

    Args:
        where: Name of the list, for errors.
        text: A text, or a list of tokens.
        vocabulary: Number of each known token. None requires whole numbers from 0.
    """
    words = _is_list(text) and len(text) > 0 and isinstance(text[0], str)
    if isinstance(text, str) or words:
        return _numbers_of_words(where, text, vocabulary)
    array = check_array(where, text)
    # An empty list is valid, although NumPy makes floats of it.
    wrong = array.size and (array.dtype.kind not in "iu" or array.min() < 0)
    if array.ndim != 1 or wrong or array.max(initial=0) >= 2**31:
        raise ValueError(
            f"{where} must be a list of whole numbers from 0, got {show(text)}. "
            "Number the tokens from 0."
        )
    if vocabulary is not None and array.max(initial=0) > len(vocabulary):
        raise ValueError(
            f"{where} must be numbers up to {len(vocabulary)}, the size of the vocabulary, got "
            f"{array.max()}. Leave out `vocabulary`, or give words."
        )
    return array.astype(np.int32)


def _numbers_of_words(
    where: str, words: Sequence[Any], vocabulary: Mapping[str, int] | None
) -> Int[np.ndarray, "t"]:
    """Return the numbers in a vocabulary of words, or of a text's characters."""
    if vocabulary is None:
        raise ValueError(
            f"{where} must be whole numbers if there is no vocabulary, got {show(words)}. "
            "Give a public `vocabulary`, such as string.printable or a list of words."
        )
    for word in words:
        if not isinstance(word, str):
            raise ValueError(
                f"{where} must be a text, or a list of words alone, got {show(word)} in it. "
                "Write every token as a text."
            )
    return np.array([vocabulary.get(word, UNKNOWN) for word in words], np.int32)


def _token_windows(
    numbers: Int[np.ndarray, "t"], length: int
) -> tuple[Int[np.ndarray, "n L"], Int[np.ndarray, "n L"]]:
    """Return consecutive windows of `length` tokens, and the next token of each position or -1.

    Positions without a next token have the input 0. A list of one token or none has no window.
    """
    # The last token has no next one, so it predicts nothing.
    positions = max(len(numbers) - 1, 0)
    count = -(-positions // length)
    # The last window may extend beyond the list, where -1 stands for no token.
    padded = np.pad(numbers, (0, length + 1), constant_values=-1)
    rows = padded[np.arange(count)[:, None] * length + np.arange(length + 1)]
    labels = rows[:, 1:]
    # A position without a next token is padding, even if it has a token.
    return np.where(labels < 0, UNKNOWN, rows[:, :-1]), labels


def _windows_of_users(
    users: Any, lists: Sequence[Int[np.ndarray, "_"]], length: int
) -> tuple[Int[np.ndarray, "n L"], Int[np.ndarray, "n L"], Shaped[np.ndarray, "n"]]:
    """Return the windows of all lists, the next tokens, and the owner of each window.

    Raises:
        ValueError: No list has a window.
    """
    parts = [_token_windows(own, length) for own in lists]
    inputs, targets = (np.concatenate(part) for part in zip(*parts, strict=True))
    if not len(inputs):
        raise ValueError(
            "tokens must have a list of two tokens or more, got shorter ones. "
            "Join the texts of a user."
        )
    # A list may have several windows, or none.
    return inputs, targets, np.repeat(users, [len(part[0]) for part in parts])


def _padded_in_front(numbers: Int[np.ndarray, "t"], length: int) -> Int[np.ndarray, "L"]:
    first = numbers[:length]
    return np.pad(first, (length - len(first), 0), constant_values=UNKNOWN)


def _first_of_each(owner: Shaped[np.ndarray, "n"], most: int) -> Int[np.ndarray, "k"]:
    """Return the rows of the first `most` examples of each owner, in ascending order."""
    own = np.unique(owner, return_inverse=True)[1]
    # A stable sort keeps the examples of an owner in their order.
    order = np.argsort(own, kind="stable")
    return np.flatnonzero(places(own, order) < most)
