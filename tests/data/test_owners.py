from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfl.data import by_owner, from_arrays, hold_out, make_clients

OWNERS = st.lists(st.integers(0, 6), min_size=1, max_size=60).map(np.array)


def owned(owner, **options):
    inputs = np.arange(len(owner), dtype=np.float32)[:, None]
    return from_arrays(inputs, np.zeros(len(owner), int), inputs[:0], np.zeros(0, int), owner=owner, **options)


@given(OWNERS, OWNERS, st.integers(1, 4))
def test_clients_are_the_owners_of_enough_examples(owner, test_owner, least):
    kept = [name for name in sorted(set(owner.tolist())) if (owner == name).sum() >= least]
    if not kept:
        with pytest.raises(ValueError, match=rf"least={least}: the largest of .* owners has"):
            by_owner(owner, test_owner, least=least)
        return
    train, test = by_owner(owner, test_owner, least=least)
    assert [rows.tolist() for rows in train] == [np.flatnonzero(owner == name).tolist() for name in kept]
    assert [rows.tolist() for rows in test] == [np.flatnonzero(test_owner == name).tolist() for name in kept]
    assert all(rows.dtype == np.int32 for rows in (*train, *test))


@given(OWNERS, st.floats(0.01, 0.99), st.none() | st.integers(0, 3))
def test_each_owner_holds_out_a_share(owner, share, seed):
    held = hold_out(owned(owner), share, seed=seed)
    both = np.concatenate([held.train_inputs[:, 0], held.test_inputs[:, 0]])
    np.testing.assert_array_equal(np.sort(both), np.arange(len(owner)))  # each example once, with its owner
    np.testing.assert_array_equal(held.owner, owner[held.train_inputs[:, 0].astype(int)])
    np.testing.assert_array_equal(held.test_owner, owner[held.test_inputs[:, 0].astype(int)])
    for name in set(owner.tolist()):
        number = (owner == name).sum()
        tested = held.test_inputs[held.test_owner == name, 0]
        assert len(tested) == pytest.approx(share * number, abs=1)
        assert len(tested) <= share * number + 1e-6
        if seed is None and len(tested):
            assert tested.min() > held.train_inputs[held.owner == name, 0].max()


def test_shares_of_whole_numbers_are_exact():
    # 0.29 * 100 is a little less than 29 in floating point.
    assert len(hold_out(owned(np.zeros(100, int)), 0.29).test_labels) == 29


def test_a_seed_draws_what_is_held_out():
    data = owned(np.repeat([0, 1], 50))
    first, again, other = (hold_out(data, seed=seed).test_inputs[:, 0].tolist() for seed in (0, 0, 1))
    assert first == again != other
    assert first != hold_out(data).test_inputs[:, 0].tolist()


def test_owners_stay_with_a_dataset_and_become_its_clients():
    held: Any = hold_out(owned(np.array([5, 5, 2, 5, 2, 5, 9])), 0.5)
    clients = make_clients(held, *by_owner(held.owner, held.test_owner, least=2))
    inputs = np.asarray(clients.inputs)[:, 0]
    trained = [inputs[rows[:size]].tolist() for rows, size in zip(clients.train, clients.train_size)]
    tested = [inputs[rows[:size]].tolist() for rows, size in zip(clients.test, clients.test_size)]
    assert (trained, tested) == ([[0.0, 1.0]], [[3.0, 5.0]])  # the owner 2 keeps one example, and so does 9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: by_owner(np.array([0.5])), "owner"),
        (lambda: by_owner(np.array([-1])), "owner holds -1"),
        (lambda: by_owner(np.zeros(0, int)), "least=1: the largest of 0 owners has 0"),
        (lambda: by_owner(np.zeros(1, int), least=0), "least=0"),
        (lambda: owned(np.zeros(3, int), test_owner=np.zeros(1, int)), "test_owner.shape"),
        (lambda: hold_out(from_arrays(*(np.zeros((2, 1)), np.zeros(2, int)) * 2)), r"data.owner=None: .*owner="),
        (lambda: hold_out(owned(np.zeros(3, int)), 1.0), "share=1.0"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_owner_for_each_example():
    with pytest.raises(ValueError, match=r"owner.shape=\(2,\): give one owner for each of the 3 labels"):
        from_arrays(np.zeros((3, 1)), np.zeros(3, int), np.zeros((0, 1)), np.zeros(0, int), owner=np.array([0, 1]))
