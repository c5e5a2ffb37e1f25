import heapq
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfl.data import (
    by_sizes,
    classes_per_client,
    dirichlet,
    dirichlet_by_client,
    iid,
    label_share,
    matching,
)

SEEDS = st.integers(0, 2**31)
quick = settings(deadline=None, max_examples=40)
LABELS = np.arange(600, dtype=np.int32) % 10
TEST_LABELS = np.arange(300, dtype=np.int32) % 10
ALL = {
    "iid": lambda seed: iid(LABELS, 7, seed=seed),
    "by_sizes": lambda seed: by_sizes(LABELS, [30, 0, 90], seed=seed),
    "dirichlet": lambda seed: dirichlet(LABELS, 7, 0.5, seed=seed, minimum=3),
    "dirichlet_by_client": lambda seed: dirichlet_by_client(LABELS, 7, 0.5, size=30, seed=seed),
    "classes_per_client": lambda seed: classes_per_client(LABELS, TEST_LABELS, 7, 3, seed=seed)[0],
    "label_share": lambda seed: label_share(LABELS, 7, 0.3, seed=seed),
    "matching": lambda seed: matching(iid(LABELS, 7, seed=0), LABELS, TEST_LABELS, seed=seed),
}


def dealt(lists, length, *, covers=True):
    """Check what all partitions promise; return the dealt rows."""
    for rows in lists:
        assert rows.dtype == np.int32
        assert (np.diff(rows) > 0).all()
    rows = np.concatenate(lists)
    assert len(np.unique(rows)) == len(rows)
    assert not rows.size or (rows.min() >= 0 and rows.max() < length)
    assert not covers or len(rows) == length
    return rows


def counts(lists, labels, classes):
    return np.array([np.bincount(labels[rows], minlength=classes) for rows in lists])


def random_labels(seed, classes, length):
    return np.random.default_rng(seed).integers(0, classes, length).astype(np.int32)


@pytest.mark.parametrize("name", ALL)
def test_seed_decides(name):
    one, same, other = ALL[name](1), ALL[name](1), ALL[name](2)
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@quick
@given(st.integers(1, 200), st.integers(1, 200), SEEDS)
def test_iid_deals_all_equally(length, clients, seed):
    if clients > length:
        with pytest.raises(ValueError, match=f"clients must be .* got {clients}"):
            iid(np.zeros(length, int), clients, seed=seed)
        return
    lists = iid(np.zeros(length, int), clients, seed=seed)
    dealt(lists, length)
    assert {len(rows) for rows in lists} <= {length // clients, -(-length // clients)}


def test_iid_of_given_size_is_a_random_subset():
    lists = iid(np.zeros(1000, int), 10, seed=0, size=20)
    rows = dealt(lists, 1000, covers=False)
    assert [len(one) for one in lists] == [20] * 10
    # The mean of 200 rows without replacement has a standard deviation of about 18.
    assert abs(rows.mean() - 499.5) < 90
    with pytest.raises(ValueError, match="got 10 with size=101"):
        iid(np.zeros(1000, int), 10, seed=0, size=101)


@quick
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(0, 50), SEEDS)
def test_by_sizes_gives_the_sizes(sizes, spare, seed):
    lists = by_sizes(np.zeros(sum(sizes) + spare, int), sizes, seed=seed)
    dealt(lists, sum(sizes) + spare, covers=False)
    assert [len(rows) for rows in lists] == sizes


@quick
@given(st.floats(1e-9, 1e6), st.integers(1, 60), st.integers(1, 12), st.integers(0, 5), SEEDS)
def test_dirichlet_deals_all_and_keeps_the_minimum(alpha, clients, classes, minimum, seed):
    labels = random_labels(seed, classes, 60 * 5)
    lists = dirichlet(labels, clients, alpha, seed=seed, minimum=minimum)
    assert len(lists) == clients
    dealt(lists, len(labels))
    assert min(map(len, lists)) >= minimum


@pytest.mark.parametrize("alpha", [5e-324, 1e-3, 0.01, 1e308])
def test_dirichlet_ends_for_thousands_of_clients(alpha):
    labels = random_labels(0, 10, 50_000)
    start = time.perf_counter()
    lists = dirichlet(labels, 5000, alpha, seed=0, minimum=10)
    assert time.perf_counter() - start < 10
    dealt(lists, 50_000)
    assert min(map(len, lists)) == 10


def test_dirichlet_shares_have_the_moments_of_the_distribution():
    clients, alpha = 8, 0.5
    labels = np.zeros(4000, np.int32)
    shares = (
        np.array(
            [[len(rows) for rows in dirichlet(labels, clients, alpha, seed=s)] for s in range(400)]
        )
        / 4000
    )
    # A share is Beta(alpha, alpha (clients - 1)).
    mean = 1 / clients
    variance = mean * (1 - mean) / (clients * alpha + 1)
    assert np.allclose(shares.mean(0), mean, atol=5 * np.sqrt(variance / 400))
    assert shares.var() == pytest.approx(variance, rel=0.15)


def test_dirichlet_is_even_for_large_alpha_and_one_client_per_class_for_small():
    even = counts(dirichlet(LABELS, 6, 1e9, seed=0), LABELS, 10)
    assert (even == 10).all()
    lonely = counts(dirichlet(LABELS, 6, 1e-6, seed=0), LABELS, 10)
    assert (lonely.max(0) == 60).all()


@quick
@given(st.floats(1e-9, 1e6), st.integers(1, 60), st.integers(1, 12), st.integers(1, 5), SEEDS)
def test_clients_with_classes_of_their_own_have_as_many_examples(
    alpha, clients, classes, size, seed
):
    labels = random_labels(seed, classes, 60 * 5)
    lists = dirichlet_by_client(labels, clients, alpha, size=size, seed=seed)
    dealt(lists, len(labels), covers=False)
    assert [len(rows) for rows in lists] == [size] * clients


def test_classes_of_a_client_have_the_moments_of_the_dirichlet_multinomial():
    alpha, size, classes = 0.3, 20, 10
    labels = np.arange(100_000, dtype=np.int32) % classes
    shares = (
        counts(dirichlet_by_client(labels, 500, alpha, size=size, seed=0), labels, classes) / size
    )
    mean = 1 / classes
    variance = mean * (1 - mean) * (1 / size + (1 - 1 / size) / (classes * alpha + 1))
    assert np.allclose(shares.mean(0), mean, atol=5 * np.sqrt(variance / 500))
    assert shares.var() == pytest.approx(variance, rel=0.1)


@quick
@given(st.integers(1, 12), SEEDS)
def test_minimum_is_taken_from_the_largest_and_leaves_the_rest(minimum, seed):
    labels = random_labels(seed, 5, 300)
    before = dirichlet(labels, 20, 0.1, seed=seed)
    after = dirichlet(labels, 20, 0.1, seed=seed, minimum=minimum)
    sizes = np.array([len(rows) for rows in before])
    heap = [-size for size in sizes]
    heapq.heapify(heap)
    for _ in range(np.maximum(minimum - sizes, 0).sum()):
        heapq.heapreplace(heap, heap[0] + 1)
    kept = sorted(max(-size, minimum) for size in heap)
    assert sorted(map(len, after)) == kept
    for old, new in zip(before, after, strict=True):
        small, large = sorted((old, new), key=len)
        assert np.isin(small, large).all()


@quick
@given(st.integers(1, 15), st.integers(1, 25), st.data(), SEEDS)
def test_classes_per_client_for_any_numbers(classes, clients, data, seed):
    s = data.draw(st.integers(1, classes))
    labels = (
        np.random.default_rng(seed).permutation(np.arange(classes * 27) % classes).astype(np.int32)
        + 3
    )
    test_labels = np.arange(classes * 26, dtype=np.int32) % classes + 3
    train, test = classes_per_client(labels, test_labels, clients, s, seed=seed)
    dealt(train, len(labels), covers=s * clients >= classes)
    dealt(test, len(test_labels), covers=s * clients >= classes)
    table, test_table = counts(train, labels - 3, classes), counts(test, test_labels - 3, classes)
    assert ((table > 0).sum(1) == s).all()
    assert ((table > 0) == (test_table > 0)).all()
    slots = (table > 0).sum(0)
    assert set(slots) <= {s * clients // classes, -(-s * clients // classes)}
    for k in np.flatnonzero(slots):
        assert table[:, k].sum() == 27
        assert np.ptp(table[:, k][table[:, k] > 0]) <= 1


def test_all_classes_are_an_even_label_split():
    train, test = classes_per_client(LABELS, TEST_LABELS, 15, 10, seed=0)
    assert (counts(train, LABELS, 10) == 4).all()
    assert (counts(test, TEST_LABELS, 10) == 2).all()


def test_leftover_slots_go_to_random_classes():
    def owners(seed):
        train, _ = classes_per_client(LABELS, TEST_LABELS, 7, 2, seed=seed)
        return (counts(train, LABELS, 10) > 0).sum(0)

    tables = np.array([owners(seed) for seed in range(60)])
    assert (np.sort(tables, 1) == [1] * 6 + [2] * 4).all()
    assert (tables == 2).any(0).all()


def test_distinct_classes_stay_random():
    train, _ = classes_per_client(np.arange(20_000) % 10, np.arange(20_000) % 10, 1000, 2, seed=0)
    owned = counts(train, np.arange(20_000) % 10, 10) > 0
    pairs = owned.astype(int).T @ owned
    # 1000 clients over 45 pairs: 22.2 each, with a standard deviation below 4.8.
    assert (np.abs(pairs[np.triu_indices(10, 1)] - 1000 / 45) < 5 * 4.8).all()


def test_classes_may_repeat_where_asked():
    labels = np.arange(4000) % 10
    train, test = classes_per_client(labels, labels, 100, 4, seed=0, distinct=False)
    table = counts(train, labels, 10)
    dealt(train, 4000)
    dealt(test, 4000)
    assert (table % 10 == 0).all()
    assert (table.sum(1) == 40).all()
    assert table.max() > 10
    lists, _ = classes_per_client(labels, labels, 5, 12, seed=0, distinct=False)
    dealt(lists, 4000)


def test_all_test_examples_of_own_classes():
    train, test = classes_per_client(LABELS, TEST_LABELS, 12, 2, seed=3, test="all")
    for own, rows in zip(train, test, strict=True):
        assert rows.dtype == np.int32
        assert np.array_equal(rows, np.flatnonzero(np.isin(TEST_LABELS, LABELS[own])))


@quick
@given(st.integers(1, 12), st.integers(1, 30), st.floats(0.01, 1), SEEDS)
def test_label_share(classes, clients, share, seed):
    labels = np.random.default_rng(seed).permutation(np.arange(classes * 31) % classes)
    test_labels = np.arange(classes * 5) % classes
    train, test = label_share(labels, clients, share, seed=seed, test_labels=test_labels)
    each = max(1, round(share * classes))
    table, test_table = counts(train, labels, classes), counts(test, test_labels, classes)
    owners = (table > 0).sum(0)
    assert ((table > 0).sum(1) == each).all()
    assert (owners > 0).all() or clients * each < classes
    assert (table.sum(0) == np.where(owners > 0, 31, 0)).all()
    assert (test_table.sum(0) == np.where(owners > 0, 5, 0)).all()
    assert (table[test_table > 0] > 0).all()
    assert all(np.ptp(table[:, k][table[:, k] > 0]) <= 1 for k in np.flatnonzero(owners))
    dealt(train, len(labels), covers=False)
    dealt(test, len(test_labels), covers=False)
    for one, two in zip(train, label_share(labels, clients, share, seed=seed), strict=True):
        assert np.array_equal(one, two)


@quick
@given(st.integers(1, 8), st.integers(1, 30), st.integers(0, 200), st.floats(0.01, 10), SEEDS)
def test_matching_is_proportional(classes, clients, length, alpha, seed):
    labels, test_labels = (
        random_labels(seed, classes, 250),
        random_labels(seed + 1, classes + 1, length),
    )
    train = dirichlet(labels, clients, alpha, seed=seed)[: max(1, clients // 2)]
    test = matching(train, labels, test_labels, seed=seed)
    dealt(test, length, covers=False)
    have, got = counts(train, labels, classes + 1), counts(test, test_labels, classes + 1)
    total, pool = have.sum(0), np.bincount(test_labels, minlength=classes + 1)
    assert (got.sum(0) == np.where(total > 0, pool, 0)).all()
    exact = pool * have / np.maximum(total, 1)
    assert (np.abs(got - exact) < 1).all()
    assert (got[have == 0] == 0).all()


def test_matching_balances_totals():
    labels, test_labels = np.arange(50_000) % 10, np.arange(10_000) % 10
    train = iid(labels, 5000, seed=0)
    sizes = [len(rows) for rows in matching(train, labels, test_labels, seed=0)]
    # Each client's fair total is 2, in up to ten shares of less than one; rounding them apart from each
    # other would give totals from 0 to about 7.
    assert min(sizes) >= 1
    assert max(sizes) <= 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid(LABELS, 0, seed=0), "clients must be .* got 0"),
        (lambda: iid(LABELS, 2, seed=-1), "seed must be .* got -1"),
        (lambda: by_sizes(LABELS, [1, -1], seed=0), "sizes"),
        (lambda: by_sizes(LABELS, [600, 1], seed=0), "601"),
        (lambda: by_sizes(LABELS, [], seed=0), "sizes"),
        (lambda: dirichlet(LABELS, 4, 0.0, seed=0), "alpha must be .* got 0"),
        (lambda: dirichlet(LABELS, 4, float("nan"), seed=0), "alpha must be .* got nan"),
        (lambda: dirichlet(LABELS, 4, 1.0, seed=0, minimum=151), "minimum must .* got 151"),
        (lambda: dirichlet(LABELS - 1, 4, 1.0, seed=0), "labels must be .* got -1"),
        (lambda: dirichlet(LABELS / 1, 4, 1.0, seed=0), r"labels must be .* got float64.*astype"),
        (lambda: dirichlet(LABELS[:0], 4, 1.0, seed=0), "labels must have at least one entry"),
        (lambda: classes_per_client(LABELS, TEST_LABELS, 5, 11, seed=0), "s must be .* got 11"),
        (
            lambda: classes_per_client(LABELS, TEST_LABELS, 5, 2, seed=0, test="none"),  # pyrefly: ignore[bad-argument-type]
            "test must be .* got 'none'",
        ),
        (
            lambda: classes_per_client(LABELS, TEST_LABELS, 301, 2, seed=0),
            "labels must have an example of class .* got 60",
        ),
        (
            lambda: classes_per_client(LABELS, TEST_LABELS, 151, 2, seed=0),
            'test_labels must .* got 30.*test="all"',
        ),
        (lambda: dirichlet_by_client(LABELS, 4, 0.0, size=1, seed=0), "alpha must be .* got 0"),
        (
            lambda: dirichlet_by_client(LABELS, 4, 1.0, size=151, seed=0),
            "clients must .* got 4 with size=151",
        ),
        (lambda: label_share(LABELS, 5, 0.0, seed=0), "share must be .* got 0"),
        (lambda: label_share(LABELS, 5, 1.5, seed=0), "share must be .* got 1.5"),
        (
            lambda: label_share(LABELS, 61, 1.0, seed=0),
            "class 0 for each of the 61 clients that get this class, got 60",
        ),
        (lambda: matching([np.array([600])], LABELS, TEST_LABELS, seed=0), "600"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
