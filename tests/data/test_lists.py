"""Texts of users, compared with windows that are cut by hand."""

import re
from typing import Any

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfl import LocalSGD, simulate
from jaxfl.algorithms import fedavg
from jaxfl.data import by_owner, from_lists, hold_out, make_clients
from jaxfl.models import gru

TEXTS = st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=6)


@given(TEXTS, st.integers(1, 5))
def test_every_token_but_the_first_is_a_label_once(texts, length):
    if all(len(text) < 2 for text in texts):
        with pytest.raises(ValueError, match="tokens must have a list of two tokens or more"):
            from_lists(range(len(texts)), texts, length=length)
        return
    data: Any = from_lists(list(range(len(texts))), texts, length=length)
    for user, text in enumerate(texts):
        rows = data.owner == user
        inputs, labels = data.train_inputs[rows], data.train_labels[rows]
        assert inputs.shape[1:] == labels.shape[1:] == (length,)
        counted = labels >= 0
        assert labels[counted].tolist() == text[1:]
        assert inputs[counted].tolist() == text[: len(text[1:])]
        assert not inputs[~counted].any()


def test_lists_with_labels_end_at_the_last_position():
    data = from_lists(["a", "b"], [[5, 6, 7, 8], [9]], length=3, labels=np.array([1, 0]))
    assert data.train_inputs.tolist() == [[5, 6, 7], [0, 0, 9]]
    assert data.train_labels.tolist() == [1, 0]
    assert data.classes == 2


def test_users_contribute_at_most_their_first_examples():
    texts = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 8]]
    data: Any = from_lists(["x", "y", "x"], texts, length=2, most=2)
    assert data.owner.tolist() == ["x", "x", "y"]
    assert data.train_inputs.tolist() == [[1, 2], [3, 4], [6, 0]]


def test_tokens_are_numbered_from_one_by_the_vocabulary():
    words = ["to", "be"]
    data = from_lists([3, 4], [["be", "or", "to"], ["to", "to"]], length=2, vocabulary=words)
    assert data.train_inputs.tolist() == [[2, 0], [1, 0]]
    assert data.train_labels.tolist() == [[0, 1], [1, -1]]


def test_users_become_clients_of_a_language_model():
    texts = ["abab", "bcbc" * 3, "cc"]
    data: Any = from_lists(["ann", "bob", "eve"], texts, length=3, vocabulary="abc")
    clients = hold_out(make_clients(data, by_owner(data.owner)[0]), 0.3)
    assert clients.train_size.tolist() == [1, 3, 1]
    model = gru(4, 3, embedding=4, width=4)
    method = fedavg(model, local=LocalSGD(optax.sgd(0.1)))
    row = simulate(0, method, clients, rounds=1, progress=False).metrics[-1]
    assert 1 < row["perplexity"] < 6


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (["ab"], {}, "tokens[0] must be whole numbers if there is no vocabulary, got 'ab'"),
        (
            [["a", []]],
            {"vocabulary": "abc"},
            "tokens[0] must be a text, or a list of words alone, got [] in it",
        ),
        (
            [[5, 6, 7]],
            {"vocabulary": "ab"},
            "tokens[0] must be numbers up to 2, the size of the vocabulary, got 7",
        ),
        ([[1.5]], {}, "tokens[0] must be a list of whole numbers from 0, got [1.5]"),
        ([[1], [2]], {}, "tokens must have one entry for each of the 1 users, got 2"),
        ([[1, 2]], {"labels": [0, 1]}, "labels must have one entry for each of the 1 users, got 2"),
    ],
)
def test_what_makes_no_example_is_named(tokens, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        from_lists(["a"], tokens, length=2, **options)
