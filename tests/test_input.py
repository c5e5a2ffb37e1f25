"""Inputs that raise an error before any computation, the words of errors, and valid inputs."""

import contextlib
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from algorithms_table import MODEL, small_clients
from flax import nnx
from malformed import functions
from reference import padded

import jaxfl
from experiments.common import cli
from jaxfl import Message, simulate
from jaxfl._support.checks import show
from jaxfl.algorithms import fedavg, fedrep
from jaxfl.cli.main import in_one_line
from jaxfl.cli.quickstart import Config
from jaxfl.data import from_arrays, make_clients
from jaxfl.local.train import LocalSGD, _shuffle
from jaxfl.models import from_flax, from_nnx, gru, lenet, lora, mlp, transformer
from jaxfl.privacy import Mechanism
from jaxfl.types import Lists

KEY = jax.random.key(0)
SOURCE = str(pathlib.Path(jaxfl.__file__).parent)


class Reached(Exception):  # noqa: N818
    """An exception that says that a run was about to start."""


@pytest.fixture
def never_runs(monkeypatch):
    """Let a run end before it places or compiles anything."""

    def start(*arguments):
        raise Reached

    monkeypatch.setattr("jaxfl.run.execute.Resident", start)
    monkeypatch.setattr("jaxfl.run.execute.Stream", start)


def refused(call, *, named, value=None):
    """Return a text on what is wrong with the error of a call, or None.

    None stands for a ValueError or TypeError of the library that has the argument's name and value.
    """
    try:
        call()
    except (ValueError, TypeError) as error:
        text, where = str(error), raised_in(error.__traceback__)
        if not where.startswith(SOURCE):
            return f"raised in {where}: {text}"
        names = re.search(rf"\b{re.escape(named)}\b", text)
        return None if names and tells(text, value) else f"unclear: {text}"
    except Exception as error:
        return f"crashed: {error!r}"
    return "accepted"


def raised_in(trace):
    """Return the file of the innermost call of a traceback."""
    while trace.tb_next:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename


def tells(text, value):
    """Return whether a text shows a value, its class, or the shape, length or a part of a list."""
    # An error about what a function returns shows this instead of the function.
    returns = getattr(value, "__name__", "") == "<lambda>"
    if show(value) in text or type(value).__name__ in text or returns:
        return True
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # keys, and rows of several lengths
        array = np.empty(getattr(value, "shape", len(value)), object)
    words = [str(array.shape), str(array.dtype)]
    words += [f" {len(array)} ", f"got {array.tolist()}"] if array.ndim else [str(value)]
    if array.dtype.kind == "f" and not np.all(np.abs(array) < 1e38):
        words.append("NaN or infinite")
    if any(word in text for word in words):
        return True
    parts = value.values() if isinstance(value, dict) else value
    several = isinstance(value, dict | list | tuple) or array.ndim
    return bool(several) and any(tells(text, part) for part in parts)


def test_the_table_names_what_there_is():
    arguments = {name: functions.arguments(name) for name in functions.FUNCTIONS}
    known = {f"{name}.{argument}" for name in arguments for argument in arguments[name]}
    known |= {argument for kinds in arguments.values() for argument in kinds}
    assert functions.PUBLIC.keys() >= functions.RECORDS
    assert functions.ROWS.keys() <= arguments.keys()
    assert {*functions.VALUES, *functions.TAKES, *functions.REFUSED, *functions.TAKEN} <= known


def test_lists_in_place_of_a_populations_arrays_are_refused_by_field(never_runs):
    for field, array in small_clients()._asdict().items():
        values: Any = (
            [own.tolist() for own in array] if isinstance(array, Lists) else array.tolist()
        )
        clients = small_clients()._replace(**{field: values})
        with pytest.raises(
            TypeError, match=f"clients.{field} must be an array, got .*numpy.asarray"
        ):
            simulate(KEY, fedavg(MODEL), clients, rounds=1, progress=False)


def test_the_table_has_160000_cases():
    kinds = [kind for name in functions.FUNCTIONS for kind in functions.arguments(name).values()]
    assert sum(len(kind.bad) for kind in kinds) >= 160_000


@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_malformed_arguments_are_refused(name, never_runs):
    found = {}
    for argument, kind in functions.arguments(name).items():
        for value in kind.bad:
            wrong = refused(
                lambda a=argument, v=value: functions.call(name, **{a: v}),
                named=argument,
                value=value,
            )
            if wrong:
                found[argument, show(value)] = wrong
    assert not found


@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_numpy_and_jax_values_are_taken(name, never_runs):
    if name == "minilm_classifier":
        pytest.importorskip("all_minilm_l6_v2", reason="the weights are in an optional package")
    good = {argument: kind.good for argument, kind in functions.arguments(name).items()}
    # The arguments of one call are all of the same form.
    for i in range(1 + max(map(len, good.values()), default=0)):
        changes = {argument: values[i] for argument, values in good.items() if i < len(values)}
        with contextlib.suppress(Reached):
            functions.call(name, **changes)


@pytest.mark.parametrize(
    ("function", "wrong", "meant"),
    [
        (LocalSGD, "batchsize", "batch_size"),
        (fedavg, "mech", "mechanism"),
        (simulate, "progres", "progress"),
    ],
)
def test_a_misspelt_argument_names_the_one_that_was_meant(function, wrong, meant, never_runs):
    given = {
        LocalSGD: [optax.sgd(0.1)],
        fedavg: [MODEL],
        simulate: [KEY, fedavg(MODEL), small_clients()],
    }
    words = rf"^{wrong} must be an argument of {function.__name__}\(\), .*Did you mean '{meant}'"
    with pytest.raises(TypeError, match=words):
        function(*given[function], **{wrong: 1} | ({"rounds": 1} if function is simulate else {}))


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (fedavg, [MODEL, 0.5], r"^local must be given by name, .*got .* 0\.5\. .*local="),
        (
            simulate,
            [KEY, fedavg(MODEL), small_clients(), 3],
            r"^rounds must be given by name, .*got .* 3\.",
        ),
        (fedavg, [], r"missing .* 'model'"),
    ],
)
def test_a_keyword_argument_given_by_position_is_named(function, given, message, never_runs):
    with pytest.raises(TypeError, match=message):
        function(*given)


INPUTS, LABELS = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
DATA = from_arrays(INPUTS, LABELS, INPUTS, LABELS)
LISTS = [[0, 1], [2, 3]]
CLIENTS = small_clients()
MATRIX = padded(CLIENTS.train)
TAKES = "model='mlp' with inputs uint8(8, 8, 1)"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train_inputs": np.full((4, 2), np.nan, np.float32)}, "train_inputs must be finite"),
        ({"test_inputs": np.full((4, 2), np.inf, np.float32)}, "test_inputs must be finite"),
        ({"train_labels": LABELS[:3]}, "train_labels must be a vector of 4 whole"),
        ({"test_labels": LABELS + 1}, "test_labels must be from 0 to classes - 1 = 1, got 2"),
        ({"train_inputs": np.zeros((4, 0), np.float32)}, "got shape (4, 0)"),
        ({"test_inputs": np.zeros((4, 3), np.float32)}, "test_inputs must have examples"),
        ({"classes": 1}, "train_labels must be from 0 to classes - 1 = 0, got 1"),
        ({"classes": "2"}, "classes must be a whole number of at least 1, got '2'"),
        ({"name": None}, "name must be of type str, got None"),
    ],
)
def test_a_dataset_with_something_replaced_is_checked(change, named):
    with pytest.raises((ValueError, TypeError), match=re.escape(named)):
        make_clients(DATA._replace(**change), LISTS, LISTS)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"inputs": np.full((9, 8, 8, 1), np.nan)}, "clients.inputs must be finite, got NaN"),
        ({"inputs": CLIENTS.inputs[:, :0]}, "clients.inputs must be examples [n, ...]"),
        ({"inputs": None}, "clients.inputs must be an array of numbers, got None"),
        ({"labels": CLIENTS.labels[:-1]}, "clients.labels must be a vector of 1797"),
        ({"labels": CLIENTS.labels - 1}, "clients.labels must be from 0 to 2147483647, got -1"),
        ({"labels": CLIENTS.labels + 1}, "clients.labels up to 10"),
        ({"train": [[0, 1], [2, 3]]}, "clients.train must be an array, got [[0, 1], [2, 3]]"),
        ({"train_size": [1, 2]}, "clients.train_size must be an array, got [1, 2]"),
        (
            {"train": Lists(CLIENTS.train.flat + 5000, CLIENTS.train.start)},
            "clients.train must be rows from 0 to 1796, got 5000",
        ),
        ({"train": Lists(CLIENTS.train.flat - 1, CLIENTS.train.start)}, "to 1796, got -1"),
        ({"train": MATRIX * 1.0}, "matrix of whole numbers, got float64 of shape"),
        ({"train": MATRIX - 1}, "clients.train must be rows from 0 to 1796, got -1"),
        (
            {"train": Lists(CLIENTS.train.flat * 1.0, CLIENTS.train.start)},
            "clients.train.flat must be a vector of whole numbers, got float64",
        ),
        (
            {"train": Lists(CLIENTS.train.flat, -CLIENTS.train.start)},
            "positions in clients.train.flat, got -",
        ),
        (
            {"train": Lists(CLIENTS.train.flat, CLIENTS.train.start + 5000)},
            "clients.train.start must be ascending positions in clients.train.flat, got 5000",
        ),
        ({"train": MATRIX[0]}, "matrix of whole numbers, got int32 of shape (9,)"),
        (
            {"train": MATRIX[:, :0], "train_size": CLIENTS.train_size * 0},
            "clients.train must have room for at least one row, got shape (11, 0)",
        ),
        ({"train_size": CLIENTS.train_size + 9}, "number of rows in clients.train, got 9 to 18"),
        ({"train_size": CLIENTS.train_size[:-1]}, "train_size must be 11 whole numbers, got int32"),
        (
            {"test": CLIENTS.test.flat.reshape(11, 5)[:-1]},
            "clients.test must hold lists of 11 clients, got 10. Give each client a list.",
        ),
        (
            {"test_size": -CLIENTS.test_size},
            "clients.test_size must be from 0 to the number of rows in clients.test, got -5",
        ),
    ],
)
def test_clients_with_something_replaced_are_checked(change, named, never_runs):
    with pytest.raises((ValueError, TypeError), match=re.escape(named)):
        simulate(KEY, fedavg(MODEL), CLIENTS._replace(**change), rounds=1, progress=False)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (mlp((8, 8, 1), 9, hidden=(4,)), "got 9 outputs for clients.labels up to 9"),
        (
            lenet((28, 28, 1)),
            "the shape of clients.inputs, got model='lenet' for shape (28, 28, 1)",
        ),
        (
            MODEL._replace(init=lambda key: jnp.zeros(3)),
            "model='mlp' with inputs uint8(8, 8, 1) must run, got ",
        ),
        (
            MODEL._replace(apply=lambda params, x: x[0]),
            "must map a batch of 2 to outputs [2, ...], got (64,)",
        ),
    ],
)
def test_a_model_that_does_not_fit_the_clients_is_refused(model, named, never_runs):
    with pytest.raises(ValueError, match=re.escape(named)):
        simulate(KEY, fedavg(model), CLIENTS, rounds=1, progress=False)


BASE: Any = fedavg(MODEL, local=LocalSGD(optax.sgd(0.05), batch_size=4))


def updates(change):
    """Return a method in which `change` maps a client's message, state and info."""
    return BASE._replace(client_update=lambda *given: change(*BASE.client_update(*given)))


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        (
            BASE._replace(init=lambda key, clients: BASE.init(key, clients)[0]._asdict()),
            "init must return a tuple of the server's state, client states, got {'optimizer'",
        ),
        (
            BASE._replace(
                init=lambda key, clients: (BASE.init(key, clients)[0], {"w": jnp.zeros(3)})
            ),
            "init must return client states['w'] of shape [11, ...], got (3,)",
        ),
        (
            BASE._replace(init=lambda key, clients: (BASE.init(key, clients)[0], jnp.zeros(()))),
            "init must return client states of shape [11, ...], got ()",
        ),
        (updates(lambda message, client, info: (message, client)), "info, got (Message("),
        (
            updates(lambda message, client, info: (message.update, client, info)),
            "client_update must return a jaxfl.Message first, got {'dense_0'",
        ),
        (
            updates(lambda message, client, info: (message, jnp.zeros(2), info)),
            "client_update must return the client's state like (), which init makes, got float32(2,)",
        ),
        (
            updates(lambda message, client, info: (message, client, {"own": jnp.zeros(2)})),
            "return info as a dict of single numbers, got {'own': float32(2,)}",
        ),
        (
            updates(lambda message, client, info: (Message({"w": jnp.zeros(3)}), client, info)),
            "server_update must run, got ",
        ),
        (
            updates(lambda message, client, info: (Message(jnp.zeros(3, int)), client, info)),
            "client_update must return floating numbers in message.update, got int32",
        ),
        (
            BASE._replace(
                server_update=lambda server, aggregate, *_: server._replace(
                    params=server.params["head"]
                )
            ),
            "which init makes, got Server(params={'bias'",
        ),
        (
            BASE._replace(personalize=lambda key, server, client, data: server),
            "which the model has, got Server(params={'dense_0'",
        ),
        (
            BASE._replace(client_update=lambda key, server: server),
            "client_update must run, got TypeError",
        ),
        (BASE._replace(mechanism=None), "algorithm.mechanism must be of type Mechanism, got None"),
        (BASE._replace(init=3), "algorithm.init must be a function, got 3"),
    ],
)
def test_an_own_algorithm_whose_functions_do_not_fit_is_refused(algorithm, named, never_runs):
    with pytest.raises((ValueError, TypeError), match=re.escape(named)):
        simulate(KEY, algorithm, CLIENTS, rounds=1, progress=False)


def test_client_states_of_another_shape_name_both_shapes(never_runs):
    states = {"w": jnp.zeros((CLIENTS.num_clients, 3))}
    own = BASE._replace(
        init=lambda key, clients: (BASE.init(key, clients)[0], states),
        client_update=lambda key, server, client, data: (
            Message(server.params),
            {"w": client["w"][:2]},
            {},
        ),
    )
    message = "return the client's state['w'] as float32(3,), which init makes, got float32(2,)."
    with pytest.raises(ValueError, match=re.escape(message)):
        simulate(KEY, own, CLIENTS, rounds=1, progress=False)


class Tokens(nn.Module):
    """A classifier of tokens: the mean of rows of a table of 200, and a dense layer."""

    @nn.compact
    def __call__(self, x):
        assert jnp.issubdtype(x.dtype, jnp.integer)
        return nn.Dense(3)(nn.Embed(200, 4)(x).mean(axis=1))


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint16])
def test_tokens_reach_the_module_as_they_are(dtype):
    tokens = np.arange(24, dtype=dtype).reshape(6, 4) + 150
    data = from_arrays(tokens, np.arange(6) % 3, tokens, np.arange(6) % 3)
    model = from_flax(Tokens(), (4,))
    np.testing.assert_array_equal(model.prepare(jnp.asarray(data.train_inputs)), tokens)
    assert data.train_inputs.dtype.itemsize <= 4


def test_tokens_in_bytes_reach_the_module_through_prepare():
    tokens = np.arange(24, dtype=np.uint8).reshape(6, 4) + 150
    model = from_flax(Tokens(), (4,), prepare=lambda x: x.astype(jnp.int32))
    np.testing.assert_array_equal(model.prepare(jnp.asarray(tokens)), tokens.astype(int))
    pixels = from_flax(nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(3)]), (4,))
    np.testing.assert_allclose(
        pixels.prepare(jnp.array([[0, 51, 204, 255]], jnp.uint8)), [[-1, -0.6, 0.6, 1]], atol=1e-6
    )


def test_tokens_are_learned():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 60)
    tokens = (labels[:, None] * 60 + rng.integers(0, 60, (60, 4))).astype(np.int64)
    clients = make_clients(
        (tokens, labels, tokens, labels), np.split(np.arange(60), 4), np.split(np.arange(60), 4)
    )
    method = fedavg(
        from_flax(Tokens(), (4,)), local=LocalSGD(optax.adam(0.05), batch_size=15, epochs=10)
    )
    result = simulate(KEY, method, clients, rounds=2, progress=False)
    assert result.metrics[-1]["accuracy"] > 0.9  # a third by guessing


@pytest.mark.parametrize("padded", [40, 600])
def test_real_rows_come_before_padding_in_64_bits(padded):
    expected = np.asarray(_shuffle(KEY, padded, jnp.int32(30)))
    with jax.enable_x64(True):
        found = _shuffle(KEY, padded, jnp.int32(30))
    assert sorted(expected[:30].tolist()) == list(range(30))
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == jnp.int32


@contextlib.contextmanager
def flags(**values):
    """Set flags of JAX for a while."""
    before = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


FLAGS: dict[str, dict[str, Any]] = {
    "NaN and infinity are errors": {"jax_debug_nans": True, "jax_debug_infs": True},
    "strict promotion": {"jax_numpy_dtype_promotion": "strict"},
    "no transfers": {"jax_transfer_guard": "disallow"},
    "no compilation": {"jax_disable_jit": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("states", ["device", "host"])
def test_a_run_is_the_same_under_flags_of_jax(name, states, caplog):
    def run():
        model = mlp((8, 8, 1), 10, hidden=(4,))
        method = fedrep(
            model,
            local=LocalSGD(optax.sgd(0.1), 4),
            mechanism=Mechanism(clip=1.0, client_noise=0.1),
        )
        return simulate(0, method, clients, rounds=2, states=states, progress=False)

    clients = small_clients()  # one has no training example, another no test
    clients = clients._replace(
        test_size=np.where(np.arange(len(clients.test_size)) == 3, 0, clients.test_size)
    )
    expected = run()
    with flags(**FLAGS[name]):
        found = run()
    jax.tree.map(
        np.testing.assert_array_equal,
        (found.server, found.scores),
        (expected.server, expected.scores),
    )
    assert np.flatnonzero(np.isnan(found.scores["loss"])).tolist() == [3]
    assert ("jax_disable_jit does not apply" in caplog.text) == (name == "no compilation")


def test_models_are_built_without_a_transfer_to_a_device():
    with flags(jax_transfer_guard="disallow"):
        for model in (mlp((8, 8, 1)), gru(7, 6), from_flax(nn.Dense(3), (4,))):
            assert model.layers


class Positions(nn.Module):
    """A network with a table of 17 tokens, and a table of 6 positions."""

    @nn.compact
    def __call__(self, tokens):
        where = nn.Embed(6, 4, name="where")(jnp.broadcast_to(jnp.arange(6), tokens.shape))
        return nn.Dense(17)(nn.Embed(17, 4, name="what")(tokens) + where)


class Rows(nn.Module):
    """A network that reads a table of 17 tokens in one of several ways."""

    way: str

    @nn.compact
    def __call__(self, tokens):
        if self.way == "parameters":
            found = self.param("rows", nn.initializers.normal(), (17, 4))[tokens]
        elif self.way == "array":
            embed = nn.Embed(17, 4)
            embed(jnp.zeros_like(tokens))
            found = embed.embedding[tokens]
        elif self.way == "integers":
            found = nn.Embed(17, 4)(tokens.astype(jnp.int16))
        elif self.way == "columns":
            embed = nn.Embed(17, 4)
            found = jnp.stack([embed(tokens[:, i]) for i in range(6)], axis=1)
        else:
            found = nn.remat(nn.Embed)(17, 4)(tokens)
        return nn.Dense(17)(found)


class Looked(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.out = nnx.Embed(17, 4, rngs=rngs), nnx.Linear(4, 17, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.embed(tokens))


class Clamped(nn.Module):
    """A network whose table has a further row for the padding -1."""

    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(17)(nn.Embed(18, 4)(jnp.where(tokens < 0, 17, tokens)))


NEXT: dict[str, Any] = {"task": jaxfl.tasks.next_token()}
INDEXED: dict[str, Any] = {
    "gru": lambda: gru(17, 6),
    "transformer": lambda: transformer(17, 6, width=8, blocks=1, heads=2),
    "an embedding of linen": lambda: from_flax(Positions(), (6,), **NEXT),
    "an embedding of bytes": lambda: from_flax(
        Positions(), (6,), prepare=lambda x: x.astype(jnp.int32), **NEXT
    ),
    "an embedding of nnx": lambda: from_nnx(Looked, (6,), **NEXT),
    "a table of parameters": lambda: from_flax(Rows("parameters"), (6,), **NEXT),
    "an embedding's own array": lambda: from_flax(Rows("array"), (6,), **NEXT),
    "an embedding of other integers": lambda: from_flax(Rows("integers"), (6,), **NEXT),
    "an embedding by columns": lambda: from_flax(Rows("columns"), (6,), **NEXT),
    "an embedding made again": lambda: from_flax(Rows("again"), (6,), **NEXT),
    "an adapted gru": lambda: lora(gru(17, 6), gru(17, 6).init(KEY), rank=1),
}


@pytest.mark.parametrize("name", INDEXED)
def test_tokens_outside_the_models_table_are_refused_before_anything_compiles(name, never_runs):
    model = INDEXED[name]()
    assert model.vocabulary == 17
    tokens = np.full((5_000, 6), 16)
    rows = [*np.arange(5_000).reshape(5, -1)]

    def run(inputs):
        labels = np.zeros((5_000, 6), int)
        clients = make_clients((inputs, labels, inputs[:0], labels[:0]), rows, [[]] * 5)
        simulate(KEY, fedavg(model), clients, rounds=1, progress=False)

    for wrong in (17, 22, 200, -1):
        inputs = np.where(np.arange(5_000)[:, None] == 4_321, wrong, tokens)
        inputs = inputs.astype(np.uint8 if name == "an embedding of bytes" else np.int64)
        found = 255 if wrong < 0 and inputs.dtype == np.uint8 else wrong
        words = rf"clients.inputs must be whole numbers in \[0, 17\), .*got {found} in row 4321. Correct the data"
        with pytest.raises(ValueError, match=words):
            run(inputs)
    with pytest.raises(Reached):
        run(tokens)


@pytest.mark.parametrize("wrong", [200.0, -1.0, 3.5])
def test_tokens_that_are_stored_as_floats_are_checked_too(wrong, never_runs):
    tokens = np.full((10, 6), 16.0, np.float32)
    labels = np.zeros((10, 6), int)

    def run(inputs):
        clients = make_clients((inputs, labels, inputs[:0], labels[:0]), [np.arange(10)], [[]])
        simulate(KEY, fedavg(gru(17, 6)), clients, rounds=1, progress=False)

    with pytest.raises(Reached):
        run(tokens)
    tokens[3, 2] = wrong
    with pytest.raises(
        ValueError, match=rf"must be whole numbers in \[0, 17\), .*got {wrong} in row 3"
    ):
        run(tokens)


def test_inputs_that_index_nothing_are_not_checked(never_runs):
    prepared = from_flax(Positions(), (6,), prepare=lambda x: x - 100, **NEXT)
    assert prepared.vocabulary is None
    clamped = from_flax(Clamped(), (6,), **NEXT)
    assert clamped.vocabulary is None
    assert from_flax(nn.Dense(3), (6,)).vocabulary is None


PROGRAM = """
import jax, numpy as np, optax
from algorithms_table import ALGORITHMS, small_clients
from jaxfl import simulate
for name in ("dp_fedavg", "dp_pfeddsu", "pdp_fl_examples"):
    result = simulate(jax.random.key(1), ALGORITHMS[name](), small_clients(), rounds=2, progress=False)
    for leaf in jax.tree.leaves((result.server, result.states, result.history)):
        print(name, np.asarray(leaf).dtype, np.asarray(leaf).tobytes().hex()[:400])
    print(result.metrics)
"""


@pytest.mark.slow
def test_a_run_in_64_bits_is_the_same_run():
    here = str(pathlib.Path(__file__).parent)
    paths = f"{pathlib.Path(SOURCE).parent}:{here}"
    outputs = []
    for wide in ("0", "1"):
        found = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            check=False,
            env={**os.environ, "JAX_ENABLE_X64": wide, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stderr
        outputs.append(found.stdout)
    assert outputs[0] == outputs[1]
    assert "float64" not in outputs[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--rounds", "0"], "rounds must be a whole number of at least 1, got 0"),
        (["--seed", "-1"], "seed must be a whole number from 0 to 4294967295, got -1"),
        (["--clients", "-1"], "clients must be a whole number of at least 1, got -1"),
        (["--rate", "0"], "rate must be a number in (0, 1], got 0.0"),
        (["--delta", "nan"], "delta must be a number in (0, 1), got nan"),
        (["--epsilon", "inf"], "epsilon must be a finite number above 0, got inf"),
        (["--scale", "huge"], "scale must be one of its choices, got 'huge'"),
    ],
)
def test_a_command_line_that_does_not_fit_is_told_in_words(options, named, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quickstart", *options])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as ended:
        cli(Config, None)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1


def test_errors_of_a_command_are_one_line_where_they_are_checks(capsys):
    try:
        from_arrays(INPUTS, LABELS, INPUTS, LABELS, classes=0)
    except ValueError as error:
        with pytest.raises(SystemExit, match="2"):
            in_one_line(ValueError, error, error.__traceback__)
    assert (
        capsys.readouterr().err
        == "error: classes must be a whole number of at least 1, got 0. Give for instance 1.\n"
    )
    try:
        np.zeros(2).reshape(3)
    except ValueError as error:
        in_one_line(ValueError, error, error.__traceback__)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.polyak_sgd(),
        optax.lbfgs(),
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    ],
    ids=["polyak_sgd", "lbfgs", "reduce_on_plateau"],
)
def test_optimizers_that_need_the_loss_are_named_before_the_shapes(optimizer, never_runs):
    method = fedavg(MODEL, local=LocalSGD(optimizer))
    with pytest.raises(ValueError, match="whose step follows from gradients alone") as caught:
        simulate(KEY, method, small_clients(), rounds=1, progress=False)
    text = str(caught.value)
    assert text.startswith("client_update must run, got TypeError: ")
    assert text.index("missing") < 120
    assert text.index("optax.sgd") < text.index("It ran with")
