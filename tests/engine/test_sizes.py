"""A client's time and memory follow its own size, whatever the largest one is."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import MODEL
from reference import padded
from reference import run as run_plainly

from jaxfl.algorithms import dp_fedavg, dp_fedavg_fb
from jaxfl.data import hold_out, load, make_clients
from jaxfl.data.clients import packed
from jaxfl.engine.evaluate import compile_evaluation
from jaxfl.engine.mesh import capacities_of, data_of, place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.engine.round import all_keys
from jaxfl.engine.streamed import Stream
from jaxfl.local.train import LocalSGD
from jaxfl.models import mlp
from jaxfl.privacy import DPSGD, Full
from jaxfl.types import Clients, Lists

KEY = jax.random.key(4)
SMALL = (3, 5, 1, 4, 5, 0) * 2
LARGE = 3000


def clients_of(sizes, tests=2):
    """Make clients of these sizes from digits, and from noise if there are too few digits."""
    digits, rng = load("digits"), np.random.default_rng(0)
    more = max(0, sum(sizes) - len(digits.train_labels))
    inputs = np.concatenate([digits.train_inputs, rng.integers(0, 255, (more, 8, 8, 1), np.uint8)])
    labels = np.concatenate([digits.train_labels, rng.integers(0, 10, more)])
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    data = inputs, labels, digits.test_inputs, digits.test_labels
    return make_clients(data, rows, np.split(np.arange(tests * len(sizes)), len(sizes)))


@dataclasses.dataclass(frozen=True)
class AllButTheLast(Full):
    """A sampler of all clients except the last one."""

    def sample(self, key, clients, index):
        return super().sample(key, clients, index).at[-1].set(False)


def method(build, local, sampling):
    made = build(MODEL, clip=1.0, noise_multiplier=0.0, sampling=sampling, local=local)
    return made._replace(mechanism=dataclasses.replace(made.mechanism, denominator="participants"))


def computed(algorithm, clients, chunk, what):
    """Return the results of two rounds or of an evaluation, and the trace of the program."""
    population = place(clients, jax.devices()[:1])
    center, states = initialize(KEY, KEY, algorithm, population)
    if what == "rounds":
        made, arguments = (
            compile_rounds(algorithm, population, chunk=chunk, segment=2),
            (KEY, 0, 2, center, states),
        )
    else:
        made, arguments = (
            compile_evaluation(algorithm, population, chunk=chunk),
            (KEY, center.server, states),
        )
    program: Any = made
    trace = program.func.trace(*program.args, *arguments, **program.keywords).jaxpr
    found: Any = program(*arguments)
    return (found[0].server if what == "rounds" else found), trace.jaxpr


def jaxprs_in(equation):
    for value in jax.tree.leaves(
        tuple(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")
    ):
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
            yield inner


def equations_of(jaxpr):
    """Yield all operations of a program, including those in loops and branches."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in(equation):
            yield from equations_of(inner)


def longest_axis(jaxpr):
    """Return the length of the longest axis of all values that a program computes."""
    made = [var.aval.shape for equation in equations_of(jaxpr) for var in equation.outvars]
    return max(axis for shape in made for axis in (0, *shape))


@pytest.mark.parametrize(
    ("build", "local", "chunk", "what"),
    [
        (dp_fedavg, LocalSGD(optax.sgd(0.1), 4, epochs=2), 4, "rounds"),
        (dp_fedavg, DPSGD(clip=1.0, noise_multiplier=0.5, rate=0.4, steps=3), 1, "rounds"),
        (dp_fedavg_fb, LocalSGD(optax.sgd(0.1), 4), 4, "evaluation"),  # which trains heads
    ],
)
def test_beside_a_large_client_small_ones_compute_the_same_and_no_more(build, local, chunk, what):
    alone, _ = computed(method(build, local, Full()), clients_of(SMALL), chunk, what)
    several = clients_of((*SMALL, LARGE))
    beside, trace = computed(method(build, local, AllButTheLast()), several, chunk, what)
    if what == "evaluation":
        beside = jax.tree.map(lambda scores: scores[:-1], beside)
    jax.tree.map(np.testing.assert_array_equal, alone, beside)
    # Vectorised clients have an index in common: if each had its own, all branches would be computed.
    branches = [
        eqn.params["branches"] for eqn in equations_of(trace) if eqn.primitive.name == "cond"
    ]
    small, large = max(branches, key=lambda pair: longest_axis(pair[-1].jaxpr))
    assert longest_axis(small.jaxpr) < LARGE / 2  # there are 1,210 weights
    assert longest_axis(large.jaxpr) >= LARGE


def test_nobody_waits_for_padding():
    """12 participants in chunks of 5 leave 3 lanes empty, and 2 of the participants have no examples."""
    sizes = []
    base = method(dp_fedavg, LocalSGD(optax.sgd(0.1), 4), AllButTheLast())

    def client_update(key, server, client, data):
        jax.debug.callback(lambda size: sizes.append(int(size)), data.size)
        return base.client_update(key, server, client, data)

    several = clients_of((*SMALL, LARGE))
    computed(base._replace(client_update=client_update), several, 5, "rounds")
    jax.effects_barrier()
    assert sorted(sizes) == sorted([*SMALL, 0, 0, 0] * 2)


@pytest.mark.parametrize("chunk", [1, 4])
def test_clients_of_all_sizes_train_like_their_plain_twins(chunk):
    sizes = (2, 3, 1, 2, 3, 600) + (2,) * 20
    clients = clients_of(sizes)
    algorithm = dp_fedavg(
        MODEL,
        clip=1.0,
        noise_multiplier=0.0,
        sampling=Full(),
        local=LocalSGD(optax.sgd(0.1), 16, epochs=2),
    )
    population = place(clients, jax.devices()[:1])
    assert population.capacities == (3, 600)
    init_key, run_key, _ = jax.random.split(KEY, 3)
    center, states = initialize(init_key, run_key, algorithm, population)
    center, _, records = compile_rounds(algorithm, population, chunk=chunk, segment=1)(
        run_key, 0, 1, center, states
    )
    expected, *_ = run_plainly(KEY, algorithm, clients, 1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), center.server, expected
    )
    assert records.info["steps"][0] * len(sizes) == 2 * (len(sizes) - 1 + -(-600 // 16))


def test_each_client_has_the_least_capacity_and_further_ones_pay():
    assert capacities_of(np.full(50, 9_000)) == (9_000,)
    assert capacities_of(np.array([0, 0])) == (1,)
    assert capacities_of(np.arange(513)) == (512,)
    assert capacities_of(np.array([3] * 2_000 + [50_000])) == (3, 50_000)
    # Half of the clients are large: the others' padding is at most half of the work.
    assert capacities_of(np.array([3] * 50 + [50_000] * 50)) == (50_000,)
    spread = np.exp(np.random.default_rng(0).uniform(1, 11, 3_000)).astype(int)
    found = capacities_of(spread)
    assert 2 <= len(found) <= 4
    assert found[-1] == spread.max()


def bytes_of(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("where", ["host", "device", "tuning", "block"])
def test_index_memory_is_at_most_twice_the_rows(where):
    sizes = np.full(2_001, 3)
    sizes[700] = 50_000
    count = sizes.sum()
    inputs = np.zeros((count, 1, 1, 1), np.float32)
    data = inputs, np.zeros(count, int), inputs[:2], np.zeros(2, int)
    clients = make_clients(
        data, np.split(np.arange(count), np.cumsum(sizes)[:-1]), [[0, 1]] * len(sizes)
    )
    if where == "device":
        clients = place(clients, jax.devices()[:1]).clients
    if where == "tuning":
        clients = hold_out(clients, 0.5, seed=1)
    if where == "block":
        algorithm = dp_fedavg(
            mlp((1, 1, 1), 2, hidden=()), clip=1.0, noise_multiplier=1.0, sampling=Full()
        )
        stream = Stream(KEY, all_keys(KEY), algorithm, clients, jax.devices()[:1], 1, None)
        clients = stream._load(np.arange(len(sizes)), tests=True)[1]
    fields = clients.train, clients.train_size, clients.test, clients.test_size
    real = clients.train_size.sum() + clients.test_size.sum()
    assert 4 * real <= bytes_of(fields) <= 2 * 4 * real


def test_a_matrix_of_rows_with_padding_stands_for_lists():
    clients = clients_of((3, 1, 4))
    padded_rows: Any = padded(clients.train, extra=2)
    old = clients._replace(train=padded_rows)
    given, kept = place(old, jax.devices()[:1]), place(clients, jax.devices()[:1])
    jax.tree.map(np.testing.assert_array_equal, given.clients, kept.clients)
    lists = Lists.of(padded_rows)
    assert np.shares_memory(lists.flat, padded_rows)
    for i, own in enumerate(padded_rows):
        np.testing.assert_array_equal(lists[i], own)


def test_rows_in_a_file_are_not_copied(tmp_path):
    rows = np.memmap(tmp_path / "rows", np.int32, "w+", shape=(40, 3))
    size = np.full(40, 3)
    assert np.shares_memory(packed(Lists.of(rows), size).flat, rows)
    np.testing.assert_array_equal(packed(Lists.of(rows), size - 1)[7], rows[7, :2])


def test_held_out_examples_are_those_that_a_number_for_each_place_of_a_matrix_chooses():
    sizes = np.array([4, 0, 9, 1, 9])
    clients = clients_of(sizes)
    found = hold_out(clients, 0.3, seed=5)
    numbers = np.random.default_rng(5).random((5, 9))
    for i, size in enumerate(sizes):
        own = clients.train[i][np.argsort(numbers[i, :size])]
        left = size - min(max(round(0.3 * size), 1), max(size - 1, 0))
        np.testing.assert_array_equal(found.train[i][: found.train_size[i]], own[:left])
        np.testing.assert_array_equal(found.test[i][: found.test_size[i]], own[left:])


def test_a_part_of_a_client_is_its_own_rows():
    clients: Any = jax.tree.map(jnp.asarray, clients_of((4, 6)))
    assert isinstance(clients, Clients)
    own = data_of(clients, 1, 1, 8)
    assert own.padded == 8
    part = own.part(2, 5)
    assert part.padded == 5
    np.testing.assert_array_equal(part.take(jnp.arange(5))[1], [*clients.labels[6:10], 0])
