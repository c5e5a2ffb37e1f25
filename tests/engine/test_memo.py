"""Programs that a process keeps from one run to the next."""

import functools
import gc
import importlib
import pathlib

import algorithms_table
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import MODEL, small_clients
from jax._src.test_util import count_jit_compilation_cache_miss

import jaxfl
from jaxfl import LocalSGD, simulate, sweep
from jaxfl.algorithms import ditto, dp_fedavg, fedavg, fine_tuned
from jaxfl.engine import memo
from jaxfl.engine.mesh import place
from jaxfl.models import feddpa_cnn, lenet, mlp, transformer
from jaxfl.privacy import Full, Poisson
from jaxfl.types import Terms

QUIET = {"rounds": 2, "eval_every": 1, "progress": False}


def counted(method):
    """Return the method, and a list with an entry for each time that a client's update is traced."""
    traces = []

    def client_update(key, server, client, data):
        traces.append(1)
        return method.client_update(key, server, client, data)

    return method._replace(client_update=client_update), traces


def private(rate=0.1):
    return dp_fedavg(
        MODEL,
        clip=1.0,
        noise_multiplier=1.0,
        sampling=Poisson(0.5),
        local=LocalSGD(optax.sgd(rate), 4),
    )


@pytest.mark.parametrize("states", ["device", "host"])
def test_a_second_run_of_a_method_traces_nothing_and_equals_a_first_one(states):
    method, traces = counted(private())
    simulate(0, method, small_clients(), states=states, **QUIET)
    made = len(traces)
    again = simulate(1, method, small_clients(), states=states, **QUIET)
    assert len(traces) == made > 0
    memo.forget()
    alone = simulate(1, method, small_clients(), states=states, **QUIET)
    assert len(traces) > made
    jax.tree.map(np.testing.assert_array_equal, again.server, alone.server)
    assert again.metrics == alone.metrics


def built(rate, width=16, weight=0.5):
    """Build all parts of a method anew: its model, its optimizer, its functions."""
    model = mlp((8, 8, 1), 10, hidden=(width,))
    local = LocalSGD(optax.sgd(rate, momentum=0.9), 4)

    def penalty(params, center):
        return weight * jnp.sum((params["head"]["bias"] - center["head"]["bias"]) ** 2)

    return fine_tuned(fedavg(model, local=local, penalty=penalty), local=local)


@pytest.mark.parametrize("states", ["device", "host"])
def test_a_method_built_again_from_equal_arguments_makes_no_program(states):
    memo.forget()
    first = simulate(0, built(0.1), small_clients(), states=states, **QUIET)
    kept = [*memo._KEPT]
    with count_jit_compilation_cache_miss() as compiled:
        again = simulate(0, built(0.1), small_clients(), states=states, **QUIET)
    assert compiled() == 0
    assert {*memo._KEPT} == {*kept}
    jax.tree.map(np.testing.assert_array_equal, first.server, again.server)
    assert first.metrics == again.metrics
    for other in (built(0.2), built(0.1, width=17), built(0.1, weight=0.6)):
        found = simulate(0, other, small_clients(), states=states, **QUIET)
        assert len(memo._KEPT) > len(kept)
        assert found.metrics != first.metrics


class Settings:
    """An object in a user's module, whose attribute the user may set again."""

    rate = 1.0


CURRENT = Settings()
RATE = 1.0
TABLE = {"rate": 1.0}
LIST = [1.0]
ARRAY = np.ones(3)


def doubled(x):
    return RATE * x


READERS = {
    "a number": (lambda x: RATE * x, "RATE", 2.0),
    "through a function": (lambda x: doubled(x) + 1, "RATE", 2.0),
    "inside a function": (lambda x: [RATE * y for y in x], "RATE", 2.0),
    "a dict": (lambda x: TABLE["rate"] * x, "TABLE", {"rate": 2.0}),
    "an array": (lambda x: ARRAY.sum() * x, "ARRAY", np.full(3, 2.0)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_global_that_is_set_anew_is_another_key(name, monkeypatch):
    """A user of a notebook may run a cell again, which sets a global anew."""
    read, variable, value = READERS[name]

    def built_again():
        def use(params):
            return read(params)

        return use

    before = memo.key_of_value(built_again())
    assert memo.key_of_value(built_again()) == before
    monkeypatch.setitem(globals(), variable, value)
    assert memo.key_of_value(built_again()) != before


@pytest.mark.parametrize(
    "read",
    [
        lambda x: CURRENT.rate * x,
        lambda x: Settings.rate * x,
        lambda x: LIST[0] * x,
        lambda x: algorithms_table.CLIP * x,
        functools.partial(lambda own, x: own.rate * x, CURRENT),
        nn.Sequential([nn.Dense(3)]),
    ],
)
def test_what_holds_an_object_that_may_change_is_compared_by_identity(read):
    def built_again():
        def use(params):
            return read(params)

        return use

    one = built_again()
    assert memo.key_of_value(one) == memo.key_of_value(one)
    assert memo.key_of_value(one) != memo.key_of_value(built_again())


def scaled(factor, *, shift=0, power=lambda x: x):
    def value(x, by=factor, *, plus=shift):
        return by * power(x) + plus + later()

    def later():
        return 0

    return value


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lambda: 1, lambda: 1.0),
        (lambda: 1, lambda: True),
        (lambda: 0.0, lambda: -0.0),
        (lambda: float("nan"), lambda: 0.0),
        (lambda: scaled(2.0), lambda: scaled(3.0)),
        (lambda: scaled(2.0), lambda: scaled(2)),
        (lambda: scaled(2.0), lambda: scaled(2.0, shift=1)),
        (lambda: scaled(2.0), lambda: scaled(2.0, power=lambda x: x**2)),
        (lambda: functools.partial(scaled, 1), lambda: functools.partial(scaled, shift=1)),
        (lambda: Terms(1e-5), lambda: Terms(1e-6)),
        (lambda: (1e-5, None, None), lambda: Terms(1e-5)),
        (lambda: {"a": 1, "b": 2}, lambda: {"a": 1, "b": 3}),
        (lambda: LocalSGD(optax.adam(0.1), 4), lambda: LocalSGD(optax.adam(0.1), 5)),
        (lambda: LocalSGD(optax.adam(0.1)), lambda: LocalSGD(optax.adam(0.1, b1=0.8))),
        (lambda: mlp((8, 8, 1), 10), lambda: mlp((8, 8, 1), 10, hidden=(3,))),
        (lambda: nn.Dense(3), lambda: nn.Dense(3, use_bias=False)),
        (lambda: Poisson(0.5), lambda: Poisson(0.6)),
        (lambda: Poisson, lambda: Full),
        (lambda: np.ones(3), lambda: np.ones(3, np.float32)),
        (lambda: np.ones(3), lambda: np.ones((3, 1))),
        (lambda: np.ones(3), lambda: np.array([1.0, 1.0, 2.0])),
        (lambda: jax.ShapeDtypeStruct((3,), np.int32), lambda: jax.ShapeDtypeStruct((3,), bool)),
        (feddpa_cnn, lambda: feddpa_cnn("svhn_cropped")),
        (lenet, lambda: lenet((28, 28, 1))),
        (lambda: transformer(60), lambda: transformer(61)),
    ],
)
def test_keys_are_equal_for_what_is_made_alike_alone(make, other):
    assert memo.key_of_value(make()) == memo.key_of_value(make())
    assert hash(memo.key_of_value(make())) == hash(memo.key_of_value(make()))
    assert memo.key_of_value(make()) != memo.key_of_value(other())


def test_an_array_that_changed_has_another_key():
    numbers = np.ones(100_000)
    before = memo.key_of_value(lambda: numbers)
    numbers[-1] = 2
    assert memo.key_of_value(lambda: numbers) != before


def test_a_dict_that_changed_has_another_key():
    numbers = {"rate": 0.1}
    before = memo.key_of_value(lambda: numbers)
    numbers["rate"] = 0.2
    assert memo.key_of_value(lambda: numbers) != before


@pytest.mark.parametrize("states", ["device", "host"])
def test_other_clients_have_their_own_data_in_the_same_program(states):
    method, traces = counted(ditto(MODEL))
    clients = small_clients()
    simulate(0, method, clients, states=states, **QUIET)
    made = len(traces)
    moved = clients._replace(labels=(clients.labels + 1) % 10)
    found = simulate(0, method, moved, states=states, **QUIET)
    assert len(traces) == made
    memo.forget()
    alone = simulate(0, method, moved, states=states, **QUIET)
    jax.tree.map(np.testing.assert_array_equal, found.server, alone.server)
    jax.tree.map(np.testing.assert_array_equal, found.states, alone.states)


def test_another_method_or_number_is_another_program():
    one, two = private(0.1), private(0.2)
    first = simulate(0, one, small_clients(), **QUIET).server.params["head"]["kernel"]
    second = simulate(0, two, small_clients(), **QUIET).server.params["head"]["kernel"]
    assert not np.array_equal(first, second)
    results = [
        sweep(0, private, {"rate": rates}, small_clients(), **QUIET)
        for rates in ([0.1, 0.2], [0.1, 0.3])
    ]
    ends = [found[1].server.params["head"]["kernel"] for found in results]
    assert not np.array_equal(*ends)


def test_what_is_kept_is_bounded_and_can_be_cleared(monkeypatch):
    monkeypatch.setattr(memo, "_MOST_PROGRAMS", 3)
    for rate in (0.1, 0.2, 0.3):
        simulate(0, private(rate), small_clients(), **QUIET)
        assert len(memo._KEPT) <= 3
    jaxfl.clear_caches()
    assert not memo._KEPT


def test_a_further_method_leaves_nothing_once_it_is_forgotten():
    """It would leave 20,000 objects if JAX's own functions were traced again for it."""
    for rate in (0.1, 0.2):
        simulate(0, private(rate), small_clients(), **QUIET)
    memo.forget()
    gc.collect()
    before = len(gc.get_objects())
    simulate(0, private(0.3), small_clients(), **QUIET)
    memo.forget()
    gc.collect()
    assert len(gc.get_objects()) - before < 4000


@pytest.mark.slow
def test_memory_does_not_grow_with_runs_of_one_method():
    """JAX keeps every traced function, which would be 18,000 objects for each run."""
    method = private()
    for seed in range(2):
        simulate(seed, method, small_clients(), **QUIET)
    gc.collect()
    before = len(gc.get_objects())
    for seed in range(5):
        simulate(seed, method, small_clients(), **QUIET)
    gc.collect()
    assert len(gc.get_objects()) - before < 5 * 1000


def test_numbers_have_keys_by_their_kind():
    assert memo.key_of_arrays((0, 1.0)) == memo.key_of_arrays((7, 2.0))
    assert memo.key_of_arrays((0, 1.0)) != memo.key_of_arrays((0.0, 1.0))


def test_the_benchmarks_round_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2]))
    workloads = importlib.import_module("benchmarks.workloads")
    population = place(small_clients())
    workloads.compile_round(private(), population, 1).run()


def test_a_sweep_reads_what_its_builder_reads_anew(monkeypatch):
    """The builder is the same object, and a list that it reads has changed."""
    weights = [0.0]

    def build(rate):
        local = LocalSGD(optax.sgd(rate), 4)
        pull = lambda params, center: weights[0] * jnp.sum(params["head"]["bias"] ** 2)  # noqa: E731
        return fedavg(MODEL, local=local, penalty=pull)

    def swept():
        (result,) = sweep(0, build, {"rate": [0.1]}, small_clients(), **QUIET)
        return result.server.params["head"]["bias"]

    first = swept()
    weights[0] = 5.0
    second = swept()
    memo.forget()
    np.testing.assert_array_equal(second, swept())
    assert np.any(first != second)


def test_an_array_that_a_former_method_holds_may_change():
    """Another trace of the former method's functions would read the array's new values."""

    def held(array):
        local = LocalSGD(optax.sgd(0.1), 4)
        pull = lambda params, center: jnp.sum(array * params["head"]["bias"])  # noqa: E731
        return fedavg(MODEL, local=local, penalty=pull)

    array = np.zeros(10, np.float32)
    zeros = simulate(0, held(array), small_clients(), **QUIET)
    array[:] = 5
    again = simulate(0, held(np.zeros(10, np.float32)), small_clients(), **QUIET)
    jax.tree.map(np.testing.assert_array_equal, zeros.server, again.server)


def wrapped_reader():
    @functools.wraps(optax.global_norm)
    def read(x):
        return RATE * x

    return read


def test_a_function_that_says_it_is_a_librarys_is_none(monkeypatch):
    before = memo.key_of_value(wrapped_reader())
    monkeypatch.setitem(globals(), "RATE", 3.0)
    assert memo.key_of_value(wrapped_reader()) != before


def importing(x):
    from algorithms_table import CLIP

    return CLIP * x


@pytest.mark.parametrize(
    "value",
    [
        importing,
        lambda x: globals()["RATE"] * x,
        optax.inject_hyperparams(optax.sgd)(learning_rate=lambda n: RATE),
        jax.tree_util.Partial(lambda own, x: own.rate * x, CURRENT),
    ],
)
def test_what_reads_in_other_ways_is_compared_by_identity(value):
    """An object of a library may hold a function of the user, and an import shows no value."""
    assert isinstance(memo.key_of_value((value,)), memo.Same)


def test_arrays_of_any_kind_have_keys():
    for dtype in (jnp.bfloat16, "datetime64[s]", [("a", "f4"), ("b", "f4")]):
        array = np.zeros(3, dtype)
        assert memo.key_of_value(array) == memo.key_of_value(array.copy())
    one, other = (np.zeros(2, [(name, "f4")]) for name in "ab")
    assert memo.key_of_value(one) != memo.key_of_value(other)


def test_what_holds_itself_is_compared_by_identity():
    table = {}
    table["table"] = table
    assert isinstance(memo.key_of_value(table), memo.Same)
