from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfl.data import by_owner, from_arrays, hold_out, make_clients

OWNERS = st.lists(st.integers(0, 6), min_size=1, max_size=60).map(np.array)


def rows_of(clients):
    inputs = np.asarray(clients.inputs)[:, 0]
    splits = (clients.train, clients.train_size), (clients.test, clients.test_size)
    return tuple([inputs[rows[:size]].tolist() for rows, size in zip(*split)] for split in splits)


@given(OWNERS, OWNERS, st.integers(1, 4))
def test_clients_are_the_owners_of_enough_examples(owner, test_owner, least):
    kept = [name for name in sorted(set(owner.tolist())) if (owner == name).sum() >= least]
    if not kept:
        with pytest.raises(ValueError, match=rf"least must be at most .* owners, got {least}"):
            by_owner(owner, test_owner, least=least)
        return
    train, test = by_owner(owner, test_owner, least=least)
    assert [rows.tolist() for rows in train] == [
        np.flatnonzero(owner == name).tolist() for name in kept
    ]
    assert [rows.tolist() for rows in test] == [
        np.flatnonzero(test_owner == name).tolist() for name in kept
    ]
    assert all(rows.dtype == np.int32 for rows in (*train, *test))


def test_owners_stay_with_a_dataset_and_become_its_clients():
    inputs = np.arange(9, dtype=np.float32)[:, None]
    owner, test_owner = np.array([5, 5, 2, 5, 2, 9]), np.array([9, 5, 2])
    given = from_arrays(
        inputs[:6],
        np.zeros(6, int),
        inputs[6:],
        np.zeros(3, int),
        owner=owner,
        test_owner=test_owner,
    )
    data: Any = given
    clients = make_clients(data, *by_owner(data.owner, data.test_owner, least=2))
    assert rows_of(clients) == ([[2.0, 4.0], [0.0, 1.0, 3.0]], [[8.0], [7.0]])


def test_owners_without_test_examples_hold_out_their_last_ones():
    inputs, labels = np.arange(6, dtype=np.float32)[:, None], np.zeros(6, int)
    clients = make_clients(
        (inputs, labels, inputs[:0], labels[:0]), *by_owner(np.array([1, 0, 1, 1, 0, 1]))
    )
    assert rows_of(clients) == ([[1.0, 4.0], [0.0, 2.0, 3.0, 5.0]], [[], []])
    assert rows_of(hold_out(clients, 0.5)) == ([[1.0], [0.0, 2.0]], [[4.0], [3.0, 5.0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: by_owner(np.array([])), "owner must have at least one entry"),
        (
            lambda: by_owner(np.array([[1], [2]])),
            "owner must be a vector of names or of whole numbers",
        ),
        (
            lambda: by_owner(["a"], [1]),
            r"test_owner must be owners like \['a'\] of owner, got \[1\]",
        ),
        (lambda: by_owner(np.zeros(0, int)), "owner must have at least one entry"),
        (lambda: by_owner(np.zeros(1, int), least=0), "least must be .* got 0"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_owner_for_each_example():
    with pytest.raises(
        ValueError, match=r"^owner must have one owner for each of the 3 labels, got shape \(2,\)"
    ):
        from_arrays(
            np.zeros((3, 1)),
            np.zeros(3, int),
            np.zeros((0, 1)),
            np.zeros(0, int),
            owner=np.array([0, 1]),
        )


def test_a_test_owner_for_each_test_example():
    data: Any = np.zeros((3, 1)), np.zeros(3, int), np.zeros((1, 1)), np.zeros(1, int)
    with pytest.raises(
        ValueError,
        match=r"test_owner must have one owner for each of the 1 labels, got shape \(3,\)",
    ):
        from_arrays(*data, owner=np.zeros(3, int), test_owner=np.zeros(3, int))


def test_owners_may_be_names_or_ids_of_64_bits():
    owner = ["Chur", "Bern", "Chur", "Aarau"]
    train, test = by_owner(owner, ["Bern", "Davos"])
    assert [rows.tolist() for rows in train] == [[3], [1], [0, 2]]
    assert [rows.tolist() for rows in test] == [[], [0], []]
    ids = np.array([2**60 + 1, 2**60, 2**60 + 1, -(2**63)])
    assert [rows.tolist() for rows in by_owner(ids)[0]] == [[3], [1], [0, 2]]


def test_ids_without_a_sign_are_not_rounded():
    ids = np.array([2**64 - 1, 2**64 - 2, 2**64 - 1, 5], np.uint64)
    train, test = by_owner(ids, [2**64 - 2, 5, 6])
    assert [rows.tolist() for rows in train] == [[3], [1], [0, 2]]
    assert [rows.tolist() for rows in test] == [[1], [0], []]


@pytest.mark.parametrize("owner", [["a", None], ["a", 1], [0.5], [True], [b"a"], [float("nan")]])
def test_what_is_no_owner_is_named_with_its_row(owner):
    with pytest.raises(
        TypeError, match=r"owner must be all names, or all whole numbers, got .* in row"
    ):
        by_owner(owner)
