"""Partitions of examples by their labels: one list of example rows for each client.

A partition has int32 rows in ascending order, one array for each client. The arrays are disjoint,
except test rows of `classes_per_client` with `test="all"`. Each call draws from a generator of its
own, so the same arguments give the same partition.

Internally, a partition is one vector with the client of each example, or -1.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, overload

import numpy as np
from jaxtyping import Bool, Float, Int, Int32, Shaped

from jaxfl._support.checks import (
    check_arrays,
    check_count,
    check_counts,
    check_fraction,
    checked,
    count_from_0,
    not_empty,
    show,
)
from jaxfl.data.load import check_labels, check_rows, check_targets

Partition: TypeAlias = list[Int32[np.ndarray, "_"]]
"""Row numbers of each client's examples, one ascending vector for each client."""


@checked(labels=not_empty(check_targets), seed=count_from_0)
def iid(
    labels: Shaped[np.ndarray, "D ..."], clients: int, *, seed: int, size: int | None = None
) -> Partition:
    """Deal examples at random, in lists whose sizes differ by at most one.

    Args:
        labels: Labels `[D, ...]`, of which only the number D matters.
        clients: Number of clients, at most D.
        seed: Seed of the partition.
        size: Number of examples per client. None deals all examples.

    Returns:
        Row numbers of each client's examples, in ascending order.

    Raises:
        ValueError: There are fewer examples than `clients`, or than `clients * size`.

    Example:
        >>> [rows.tolist() for rows in iid(np.zeros(5, int), 2, seed=0)]
        [[1, 2, 3], [0, 4]]
    """
    if clients * (size or 1) > len(labels):
        raise ValueError(_too_few(len(labels), clients, size))
    dealt = len(labels)
    if size is not None:
        dealt = clients * size
    order = np.random.default_rng(seed).permutation(len(labels))
    owner = np.full(len(labels), -1)
    # Examples are dealt in turn, so that sizes differ by at most one.
    owner[order[:dealt]] = np.arange(dealt) % clients
    return lists_of(owner, clients)


def _too_few(examples: int, clients: int, size: int | None) -> str:
    """Return the message that there are too few examples for the clients."""
    got = f"{clients}"
    if size is not None:
        got = f"{clients} with size={size}"
    return (
        f"clients must be at most {examples // (size or 1)} for {examples} examples, got {got}. "
        "Give fewer or smaller clients."
    )


@checked(labels=check_targets, sizes=partial(check_counts, least=0, empty=False), seed=count_from_0)
def by_sizes(
    labels: Shaped[np.ndarray, "D ..."], sizes: Sequence[int] | Int[np.ndarray, "C"], *, seed: int
) -> Partition:
    """Deal `sizes[i]` examples at random to client i. The remaining examples have no client.

    Args:
        labels: Labels `[D, ...]`, of which only the number D matters.
        sizes: Number of examples of each client `[C]`. 0 gives a client no examples.
        seed: Seed of the partition.

    Returns:
        Row numbers of each client's examples, in ascending order.

    Raises:
        ValueError: There are no sizes, a size is no whole number from 0, or the sum of the sizes
            exceeds the number of examples.

    Example:
        >>> [len(rows) for rows in by_sizes(np.zeros(9, int), [5, 0, 3], seed=0)]
        [5, 0, 3]
    """
    sizes = np.asarray(sizes)
    if sizes.sum() > len(labels):
        raise ValueError(
            f"sizes must have a sum of at most {len(labels)}, the number of examples, got "
            f"{show(sizes)} with the sum {sizes.sum()}. Give smaller sizes."
        )
    order = np.random.default_rng(seed).permutation(len(labels))
    owner = np.full(len(labels), -1)
    owner[order[: sizes.sum()]] = np.repeat(np.arange(len(sizes)), sizes)
    return lists_of(owner, len(sizes))


@checked(labels=not_empty(check_labels), seed=count_from_0, minimum=count_from_0)
def dirichlet(
    labels: Shaped[np.ndarray, "D"], clients: int, alpha: float, *, seed: int, minimum: int = 0
) -> Partition:
    """Split each class over the clients in proportions drawn from a symmetric Dirichlet(alpha).

    All examples are dealt. A small alpha gives few classes per client, very different sizes, and
    clients without examples. A large alpha gives nearly equal shares. The draw is made once and in
    logarithms, so that it terminates, without NaN, for every alpha. Clients below `minimum` then
    receive random examples from the largest clients, and the other lists stay as drawn.

    Args:
        labels: Class labels `[D]` from 0.
        clients: Number of clients.
        alpha: Concentration above 0.
        seed: Seed of the partition.
        minimum: Least number of examples per client. 0 allows clients without examples.

    Returns:
        Row numbers of each client's examples, in ascending order.

    Raises:
        ValueError: There are fewer than `clients * minimum` examples.

    Example:
        >>> lists = dirichlet(np.arange(1000) % 10, 20, 0.1, seed=0, minimum=5)
        >>> sum(map(len, lists)), min(map(len, lists)) >= 5
        (1000, True)

    References:
        Yurochkin et al. 2019, "Bayesian nonparametric federated learning of neural networks"; Li et
        al. 2022, "Federated learning on non-IID data silos". The code of both redraws until the
        smallest client is large enough, which need not terminate.
    """
    if clients * minimum > len(labels):
        raise ValueError(
            f"minimum must be at most {len(labels) // clients} for {len(labels)} examples and "
            f"{clients} clients, got {minimum}. Give a smaller minimum."
        )
    rng = np.random.default_rng(seed)
    owner = np.full(len(labels), -1)
    for k in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == k))
        cumulative = np.cumsum(_proportions(rng, clients, alpha))
        # Rounded ends deal every example once, which rounded sizes would not.
        ends = np.rint(cumulative * len(rows)).astype(int)
        owner[rows] = np.repeat(np.arange(clients), np.diff(ends, prepend=0))
    return lists_of(_top_up(rng, owner, clients, minimum), clients)


@checked(labels=not_empty(check_labels), size=check_count, seed=count_from_0)
def dirichlet_by_client(
    labels: Shaped[np.ndarray, "D"], clients: int, alpha: float, *, size: int, seed: int
) -> Partition:
    """Give each client `size` examples, with class proportions from a symmetric Dirichlet(alpha).

    Clients draw their own proportions, and then examples without replacement, one client after the
    other. A class that is used up gives no more examples. If most examples are dealt, the last
    clients therefore have other mixes of classes than alpha implies.

    Args:
        labels: Class labels `[D]` from 0.
        clients: Number of clients.
        alpha: Concentration above 0.
        size: Number of examples of each client.
        seed: Seed of the partition.

    Returns:
        Row numbers of each client's examples, in ascending order.

    Raises:
        ValueError: There are fewer than `clients * size` examples.

    Example:
        >>> lists = dirichlet_by_client(np.arange(1000) % 10, 20, 0.1, size=50, seed=0)
        >>> {len(rows) for rows in lists}
        {50}

    References:
        Hsu, Qi, Brown 2019, "Measuring the effects of non-identical data distribution for federated
        visual classification".
    """
    if clients * size > len(labels):
        raise ValueError(_too_few(len(labels), clients, size))
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(np.flatnonzero(labels == k)) for k in np.unique(labels)]
    left = np.array([len(own) for own in rows])
    owner = np.full(len(labels), -1)
    for client in range(clients):
        weights = _proportions(rng, len(rows), alpha)
        # A class that is used up gives less than its share, and further draws fill the gap.
        while missing := size - np.count_nonzero(owner == client):
            weights = _weights_of_left(weights, left)
            drawn = np.minimum(rng.multinomial(missing, weights / weights.sum()), left)
            for own, end, count in zip(rows, left, drawn, strict=True):
                # Rows that are left come first, so each draw takes the last ones of them.
                owner[own[end - count : end]] = client
            left -= drawn
    return lists_of(owner, clients)


@overload
def label_share(
    labels: np.ndarray, clients: int, share: float = 0.2, *, seed: int, test_labels: None = None
) -> Partition: ...
@overload
def label_share(
    labels: np.ndarray, clients: int, share: float = 0.2, *, seed: int, test_labels: np.ndarray
) -> tuple[Partition, Partition]: ...
@checked(
    labels=not_empty(check_labels),
    share=check_fraction,
    seed=count_from_0,
    test_labels=check_labels,
)
def label_share(
    labels: Shaped[np.ndarray, "D"],
    clients: int,
    share: float = 0.2,
    *,
    seed: int,
    test_labels: Shaped[np.ndarray, "M"] | None = None,
) -> Partition | tuple[Partition, Partition]:
    """Give each client a random share of the labels, and spread each label evenly over its owners.

    A client owns `share * K` labels, rounded, and at least one: 20 % of 10 labels are 2. Every
    example of a label that has an owner is dealt. Every label has an owner if the clients together
    own at least K labels.

    Args:
        labels: Class labels `[D]` from 0. K is the number of distinct labels.
        clients: Number of clients.
        share: Share of the labels per client, in (0, 1].
        seed: Seed of the partition.
        test_labels: Labels `[M]` of test examples, which are spread over the same owners by
            `matching`. None leaves test examples out.

    Returns:
        The training rows, or training rows and test rows if `test_labels` are given.

    Raises:
        ValueError: The share is outside (0, 1], or a label has fewer examples than owners.

    Example:
        >>> labels = np.arange(1000) % 10
        >>> {len(np.unique(labels[rows])) for rows in label_share(labels, 50, 0.2, seed=0)}
        {2}

    References:
        The set-up of ADP-PFL: "each client gets a random 20 % of the labels".
    """
    rng = np.random.default_rng(seed)
    classes = np.unique(labels)
    per_client = max(1, round(share * len(classes)))
    owned = _drawn_labels(rng, clients, len(classes), per_client)
    _check_shards("labels", labels, classes, owned.sum(0))
    train = _deal(rng, labels, classes, owned.astype(int))
    if test_labels is None:
        return train
    return train, matching(train, labels, test_labels, seed=seed)


@checked(labels=not_empty(check_labels), test_labels=not_empty(check_labels), seed=count_from_0)
def classes_per_client(
    labels: Shaped[np.ndarray, "D"],
    test_labels: Shaped[np.ndarray, "M"],
    clients: int,
    s: int,
    *,
    seed: int,
    distinct: bool = True,
    test: Literal["disjoint", "all"] = "disjoint",
) -> tuple[Partition, Partition]:
    """Give each client s classes, and each class as nearly as possible the same number of clients.

    There are `s * clients` slots. Each of the K classes gets `s * clients // K` of them, and the
    remainder goes to randomly chosen classes, one each. The slots are dealt at random, s to a
    client. Each class is split into one shard per slot, and sizes of its shards differ by at most
    one. With `test="disjoint"`, the test examples are split by the same slots. `s = K` with
    distinct classes gives every client equal shares of each class, up to one example.

    Args:
        labels: Class labels `[D]` from 0. K is the number of distinct labels.
        test_labels: Labels `[M]` of the test examples.
        clients: Number of clients.
        s: Number of classes per client, at most K if `distinct`.
        seed: Seed of the partition.
        distinct: Whether swaps repair the random deal until no client has a class twice. With False
            a client may get several shards of a class, as in FedRep's code ("at most s classes").
        test: Split of the test examples. `"disjoint"` gives clients disjoint shards, and `"all"`
            tests each client on all examples of its classes.

    Returns:
        Training rows and test rows of each client. Test rows of `"all"` overlap between clients.

    Raises:
        ValueError: s is too large, or a class has fewer examples than shards. Test examples count
            only with `test="disjoint"`.

    Example:
        >>> labels = np.arange(400) % 10
        >>> train, test = classes_per_client(labels, labels[:100], 20, 2, seed=0)
        >>> np.unique(labels[train[3]]).tolist() == np.unique(labels[test[3]]).tolist()
        True

    References:
        Collins et al. 2021, "Exploiting shared representations for personalized federated
        learning", whose code needs K to divide `s * clients`.
    """
    classes = np.unique(labels)
    check_count("s", s, most=len(classes) if distinct else None)
    rng = np.random.default_rng(seed)
    copies = _equal_shares(rng, s * clients, len(classes))
    _check_shards("labels", labels, classes, copies)
    if test == "disjoint":
        _check_shards("test_labels", test_labels, classes, copies, ', or test="all"')
    shards = np.repeat(np.arange(len(classes)), copies)
    deal = rng.permutation(shards).reshape(clients, s)
    # slots[i, k] is the number of shards of class k that client i gets.
    slots = (deal[:, :, None] == np.arange(len(classes))).sum(1)
    if distinct:
        slots = _make_distinct(rng, slots)
    train = _deal(rng, labels, classes, slots)
    if test == "disjoint":
        return train, _deal(rng, test_labels, classes, slots)
    return train, _all_of_own_classes(test_labels, classes, slots)


@checked(
    train_lists=not_empty(check_arrays),
    labels=not_empty(check_labels),
    test_labels=check_labels,
    seed=count_from_0,
)
def matching(
    train_lists: Sequence[np.ndarray],
    labels: Shaped[np.ndarray, "D"],
    test_labels: Shaped[np.ndarray, "M"],
    *,
    seed: int,
) -> Partition:
    """Split the test examples so that each client is tested on the label mix it trains on.

    Client i has `n_ik` of the `n_k` owned training examples of class k. It gets `m_k n_ik / n_k` of
    the class's `m_k` test examples, rounded up or down. Rounding up goes to clients that have
    received too little so far, so that each client's total is near its fair share as well. All test
    examples of a class that some client owns are dealt. Those of other classes are left out.

    Args:
        train_lists: Training rows of each client.
        labels: Training labels `[D]` from 0.
        test_labels: Test labels `[M]` from 0.
        seed: Seed of the split.

    Returns:
        Row numbers of each client's test examples, in ascending order.

    Raises:
        ValueError: Labels are not whole numbers from 0, there is no client, or a training row is
            outside `labels`.

    Example:
        >>> labels, test_labels = np.array([0, 0, 0, 1]), np.array([1, 0, 0, 0])
        >>> matching([np.array([0, 1]), np.array([2, 3])], labels, test_labels, seed=0)[1].size
        2
    """
    clients = len(train_lists)
    train_lists = check_rows("train_lists", train_lists, len(labels))
    if not clients:
        raise ValueError("train_lists must have at least one client, got []. Give its rows.")
    client = np.repeat(np.arange(clients), [len(rows) for rows in train_lists])
    rows = np.concatenate([np.zeros(0, np.int32), *train_lists])
    rng = np.random.default_rng(seed)
    # Test examples of a class that nobody trains on keep -1.
    owner = np.full(len(test_labels), -1)
    # Client i has received short[i] test examples fewer than its fair share so far.
    short = np.zeros(clients)
    for k in np.unique(labels[rows]):
        counts = np.bincount(client[labels[rows] == k], minlength=clients)
        pool = rng.permutation(np.flatnonzero(test_labels == k))
        dealt = _dealt(rng, len(pool), counts, short)
        # The class's test examples are in random order, so the clients get random ones.
        owner[pool] = np.repeat(np.arange(clients), dealt)
    return lists_of(owner, clients)


def _dealt(
    rng: np.random.Generator,
    number: int,
    counts: Int[np.ndarray, "C"],
    short: Float[np.ndarray, "C"],
) -> Int[np.ndarray, "C"]:
    """Return how many of a class's test examples each client gets.

    Args:
        rng: Source of the randomness.
        number: Number of test examples of the class.
        counts: Number of training examples of the class that each client has, at least one in all.
        short: Number of test examples by which a client has received too few. It is changed.
    """
    # A client has an example of the class, so counts do not sum to 0.
    dealt, rest = np.divmod(number * counts, counts.sum())
    short += rest / counts.sum()
    # Only fair shares with a fraction are rounded up, and ties are broken at random.
    order = np.lexsort((rng.random(len(counts)), -short, rest == 0))
    up = order[: number - dealt.sum()]
    dealt[up] += 1
    short[up] -= 1
    return dealt


def _check_shards(
    name: str, labels: np.ndarray, classes: np.ndarray, shards: np.ndarray, remedy: str = ""
) -> None:
    """Require at least as many examples of each class as it has shards, or raise a ValueError."""
    counts = np.array([(labels == k).sum() for k in classes])
    k = (counts - shards).argmin()
    if counts[k] < shards[k]:
        raise ValueError(
            f"{name} must have an example of class {classes[k]} for each of the {shards[k]} "
            f"clients that get this class, got {counts[k]}. Give fewer clients or fewer classes "
            f"per client{remedy}."
        )


def _weights_of_left(
    weights: Float[np.ndarray, "K"], left: Int[np.ndarray, "K"]
) -> Float[np.ndarray, "K"]:
    """Return a client's weights of the classes that are not used up.

    Args:
        weights: Weights of all classes.
        left: Number of examples of each class that no client has yet, at least one in all.
    """
    # A class that is used up gives no more examples.
    of_left = weights * (left > 0)
    if of_left.any():
        return of_left
    # All classes with a weight are used up, so the client draws from what is left.
    return left / left.sum()


def _drawn_labels(
    rng: np.random.Generator, clients: int, labels: int, per_client: int
) -> Bool[np.ndarray, "C K"]:
    """Draw which labels each client owns, so that every label has an owner if possible.

    Args:
        rng: Source of the randomness.
        clients: Number of clients.
        labels: Number of labels.
        per_client: Number of labels of each client.
    """
    # The smallest random numbers of a client choose its labels.
    order = np.argsort(rng.random((clients, labels)), axis=1)
    rank = np.argsort(order, axis=1)
    owned = rank < per_client
    # There are enough places, so a label has several owners while another one has none.
    while clients * per_client >= labels and not owned.any(0).all():
        orphan = owned.sum(0).argmin()
        client, label = _pick(rng, np.argwhere(owned & (owned.sum(0) > 1)))
        owned[client, orphan] = True
        owned[client, label] = False
    return owned


def _equal_shares(rng: np.random.Generator, number: int, classes: int) -> Int[np.ndarray, "K"]:
    """Divide a number of slots among classes, and draw which classes get the remainder."""
    base, more = divmod(number, classes)
    shares = np.full(classes, base)
    shares[rng.permutation(classes)[:more]] += 1
    return shares


def _pick(rng: np.random.Generator, options: np.ndarray) -> Any:
    return options[rng.integers(len(options))]


def lists_of(owner: Int[np.ndarray, "D"], clients: int) -> Partition:
    """Return the ascending rows of each client.

    Args:
        owner: Client of each example. -1 stands for an example of no client.
        clients: Number of clients.
    """
    # A stable sort keeps the rows of a client in ascending order.
    rows = np.argsort(owner, kind="stable").astype(np.int32)
    sizes = np.bincount(owner + 1, minlength=clients + 1)
    # The first part has the examples of no client.
    return np.split(rows, np.cumsum(sizes)[:-1])[1:]


def _proportions(rng: np.random.Generator, clients: int, alpha: float) -> Float[np.ndarray, "C"]:
    """Draw proportions with the sum 1 from a symmetric Dirichlet distribution.

    The logarithm of a Gamma(a) variable is drawn as that of a Gamma(a + 1) variable minus an
    exponential variable divided by a. For a small a, the Gamma(a) variable itself would underflow.
    """
    # Outside of these bounds, logarithms may be infinite, and their differences NaN.
    alpha = float(np.clip(alpha, 1e-300, 1e300))
    gamma = rng.standard_gamma(alpha + 1, clients)
    exponential = rng.standard_exponential(clients)
    logs = np.log(gamma) - exponential / alpha
    # The largest weight is 1, so the sum is not 0.
    weights = np.exp(logs - logs.max())
    return weights / weights.sum()


def _top_up(rng: np.random.Generator, owner: np.ndarray, clients: int, minimum: int) -> np.ndarray:
    """Give clients below `minimum` random examples of the largest clients.

    `owner`, the client of each example, is changed and returned.
    """
    sizes = np.bincount(owner, minlength=clients)
    give = np.maximum(minimum - sizes, 0)
    take = _cut_of_largest(sizes, give.sum(), minimum)
    # Each client has its rows in random order, of which it gives the first ones.
    order = rng.permutation(len(owner))
    order = order[np.argsort(owner[order], kind="stable")]
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = order[rank < take[owner[order]]]
    owner[moved] = np.repeat(np.arange(clients), give)
    return owner


def _cut_of_largest(sizes: Int[np.ndarray, "C"], needed: int, minimum: int) -> Int[np.ndarray, "C"]:
    """Return how many examples the largest clients give, `needed` in all.

    No client is left with fewer than `minimum`.
    """

    def yields_too_little(cut: int) -> bool:
        return bool(np.maximum(sizes - cut, 0).sum() < needed)

    # The level is the highest size such that cutting all larger clients down to it yields enough.
    cuts = range(minimum, int(sizes.max()) + 1)
    level = cuts[bisect_left(cuts, True, key=yields_too_little) - 1]
    take = np.maximum(sizes - level, 0)
    # The surplus is less than the number of givers: a higher level yields too little.
    take[np.flatnonzero(take)[: take.sum() - needed]] -= 1
    return take


def _make_distinct(
    rng: np.random.Generator, slots: Int[np.ndarray, "C K"]
) -> Int[np.ndarray, "C K"]:
    """Swap slots between clients until no client has a class twice, in `slots`, and return it.

    A client i with class a twice swaps one slot of a with a client j that lacks a. Such a client
    exists, because a has at most as many slots as there are clients. Client j gives a class b that
    i lacks, or one that j has twice. Client j has such a class, because i has at most s - 2 classes
    other than a. Either way the number of (client, class) pairs grows, so the loop ends.
    """
    while len(twice := np.argwhere(slots > 1)):
        for i, a in twice:
            while slots[i, a] > 1:
                j = _pick(rng, np.flatnonzero(slots[:, a] == 0))
                new = np.flatnonzero((slots[j] > 0) & (slots[i] == 0))
                if not len(new):
                    new = np.flatnonzero(slots[j] > 1)
                b = _pick(rng, new)
                slots[i, [a, b]] += (-1, 1)
                slots[j, [a, b]] += (1, -1)
    return slots


def _all_of_own_classes(
    labels: np.ndarray, classes: np.ndarray, slots: Int[np.ndarray, "C K"]
) -> Partition:
    """Return for each client the rows of all examples of its classes."""
    rows = [np.flatnonzero(labels == k).astype(np.int32) for k in classes]
    found = []
    for client_slots in slots:
        # Several slots of one class give its rows once.
        own_rows = [rows[k] for k in np.flatnonzero(client_slots)]
        found.append(np.sort(np.concatenate(own_rows)))
    return found


def _deal(
    rng: np.random.Generator, labels: np.ndarray, classes: np.ndarray, slots: Int[np.ndarray, "C K"]
) -> Partition:
    """Deal the examples of each class at random, in shards that differ by one example at most.

    Args:
        rng: Source of the randomness.
        labels: Labels of all examples.
        classes: The K classes.
        slots: Number of shards of each class that a client gets. Nobody owns the examples of a
            class without slots.
    """
    owner = np.full(len(labels), -1)
    for k, label in enumerate(classes):
        owners = rng.permutation(np.repeat(np.arange(len(slots)), slots[:, k]))
        if len(owners):
            rows = rng.permutation(np.flatnonzero(labels == label))
            # Owners take turns in random order, so chance decides who has the larger shards.
            owner[rows] = owners[np.arange(len(rows)) % len(owners)]
    return lists_of(owner, len(slots))
