import functools
import itertools
import logging
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms_table import ALGORITHMS, MODEL, small_clients
from jax._src.test_util import count_jit_compilation_cache_miss

from jaxfl._support.backend import backend
from jaxfl.algorithms import fedavg
from jaxfl.engine import chunk, memo, resident
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.engine.resident import Resident
from jaxfl.engine.streamed import Stream
from jaxfl.models import digits_cnn
from jaxfl.privacy import FixedSize, Mechanism, Poisson
from jaxfl.run.simulate import simulate

KEY = jax.random.key(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXFL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(chunk, "_REMEMBERED", {})
    monkeypatch.setattr(chunk, "of_mesh", lambda mesh: backend("cpu")._replace(chunks=(1, 4)))


@pytest.fixture
def compiled(monkeypatch):
    """Return the list of chunks that are compiled, in order."""
    made, original = [], chunk.compile_chunk

    def spy(build, chunk, *others):
        made.append(chunk)
        return original(build, chunk, *others)

    monkeypatch.setattr(chunk, "compile_chunk", spy)
    return made


def run(chunk, **options):
    return simulate(
        KEY,
        ALGORITHMS["dp_fedavg"](),
        small_clients(),
        rounds=2,
        chunk=chunk,
        progress=False,
        **options,
    )


def assert_same(a, b):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), a.server, b.server
    )


@pytest.mark.slow
def test_a_measured_chunk_is_said_and_remembered(compiled, caplog):
    caplog.set_level(logging.INFO, "jaxfl")
    first = run("auto")
    assert compiled == [1, 4]
    program = caplog.records[-1].program  # pyrefly: ignore[missing-attribute]
    assert program.memory > 0
    assert f"chunk {program.chunk} of 1: " in caplog.text
    assert "4: " in caplog.text
    assert "MB of temporary memory per client" in caplog.text
    assert_same(first, run("auto"))
    chunk._REMEMBERED.clear()  # another process finds it on disk
    run("auto")
    assert compiled == [1, 4, program.chunk, program.chunk]
    assert "from the cache" in caplog.records[-1].message
    fewer = small_clients((9, 4, 7))
    simulate(KEY, ALGORITHMS["dp_fedavg"](), fewer, rounds=2, chunk="auto", progress=False)
    assert len(compiled) > 4  # another cohort


def test_the_fastest_chunk_is_taken(compiled, monkeypatch, caplog):
    clock = iter(
        [0.0, 1.0, 1.0, 4.0, 4.0, 99.0, 99.0, 101.0]
    )  # second calls: 3 s at chunk 1, 2 s at chunk 4
    caplog.set_level(logging.INFO, "jaxfl")
    monkeypatch.setattr(chunk, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    step = jax.jit(lambda data, key, start, rounds, server, states: (server, states, start))
    build = lambda size: functools.partial(step, jnp.zeros(3))  # noqa: E731
    arguments = (KEY, jnp.int32(0), jnp.int32(1), jnp.zeros(2), jnp.zeros(2))
    mesh = jax.make_mesh((1,), ("clients",), devices=jax.devices()[:1])
    assert chunk.fastest(build, 11, arguments, mesh, ()).chunk == 4
    assert "chunk 4 of 1: 3 s, 4: 2 s" in caplog.text


FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate"


def breaking_above(most, monkeypatch, message=FULL, after=0, donated=2):
    """Make programs of chunks above `most` fail after some calls that donate arguments."""
    original = chunk.compile_chunk

    def compile_chunk(build, chunk, *others):
        program, calls = original(build, chunk, *others), itertools.count()

        def step(*arguments):
            results = program.step(*arguments)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(arguments[-donated:]))
            if next(calls) >= after and chunk > most:
                raise jax.errors.JaxRuntimeError(message)
            return results

        return program._replace(step=step)

    monkeypatch.setattr(chunk, "compile_chunk", compile_chunk)


@pytest.mark.slow
def test_a_chunk_that_memory_does_not_hold_is_halved(compiled, monkeypatch, caplog):
    expected = run(1)
    breaking_above(2, monkeypatch)
    assert_same(run(5), expected)
    assert compiled == [1, 5, 2]
    assert "chunk=5 does not fit the device's memory: continuing with chunk=2" in caplog.text


@pytest.mark.parametrize("states", ["device", pytest.param("host", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kept", "starts"), [(False, [0, 1, 0, 1]), (True, [0, 1, 1])])
def test_a_run_whose_memory_ends_goes_on_with_half_the_chunk(
    states, kept, starts, monkeypatch, tmp_path, caplog
):
    runner = Resident if states == "device" else Stream
    expected, rounds, seen = run(1, eval_every=1), runner.rounds, []
    donated = 2 if states == "device" else 1
    breaking_above(2, monkeypatch, after=2, donated=donated)  # to see whether it fits, and round 1
    monkeypatch.setattr("jaxfl.run.followers._CHECKPOINT_SECONDS", -1.0)
    monkeypatch.setattr(
        runner,
        "rounds",
        lambda self, start, count: seen.append(start) or rounds(self, start, count),
    )
    found = run(4, eval_every=1, states=states, folder=tmp_path / "run" if kept else None)
    assert_same(found, expected)
    assert seen == starts
    assert [row["round"] for row in found.metrics] == [1, 2]
    assert "chunk=4 does not fit the device's memory: continuing with chunk=2" in caplog.text


def test_an_evaluation_that_memory_does_not_hold_is_halved(monkeypatch, caplog):
    expected, original = run(1), resident.compile_evaluation

    def compile_evaluation(algorithm, population, *, chunk):
        if chunk > 2:
            raise jax.errors.JaxRuntimeError(FULL)
        return original(algorithm, population, chunk=chunk)

    monkeypatch.setattr(resident, "compile_evaluation", compile_evaluation)
    found = run(4)
    assert_same(found, expected)
    assert found.metrics[-1]["accuracy"] == expected.metrics[-1]["accuracy"]
    assert caplog.text.count("continuing with chunk=") == 1


def test_other_work_is_done_while_xla_compiles_but_not_while_it_measures():
    step = jax.jit(lambda data, key, start, rounds, server, states: (server, states, start))
    build = functools.partial(functools.partial, step, jnp.zeros(3))
    arguments = (KEY, jnp.int32(0), jnp.int32(1), jnp.zeros(2), jnp.zeros(2))
    mesh = jax.make_mesh((1,), ("clients",), devices=jax.devices()[:1])
    calls: list[int] = []

    def chosen(size):
        return chunk.choose(lambda _: build(), size, 4, arguments, mesh, (), calls.append)

    chosen("auto")
    assert calls == []
    memo.forget()
    assert chosen(1).chunk == 1
    assert calls == [1]
    # The program is cached now.
    chosen(1)
    assert calls == [1]


def test_the_first_evaluation_compiles_nothing(monkeypatch):
    counts = []
    original = Resident.evaluate

    def evaluate(self, key, last):
        with count_jit_compilation_cache_miss() as compiled:
            scores = original(self, key, last)
        counts.append(compiled())
        return scores

    memo.forget()
    monkeypatch.setattr(Resident, "evaluate", evaluate)
    run(1, eval_every=1)
    assert counts == [0, 0]


@pytest.mark.slow
def test_measuring_stops_where_memory_ends(compiled, monkeypatch, caplog):
    breaking_above(2, monkeypatch)
    assert np.isfinite(run("auto").metrics[-1]["accuracy"])
    assert compiled == [1, 4]
    assert "chunk=4 does not fit the device's memory: 1 is the largest tried" in caplog.text


@pytest.mark.parametrize(
    ("chunk", "message"), [(1, "RESOURCE_EXHAUSTED: Out of memory"), (4, "INTERNAL: bad")]
)
def test_other_failures_are_not_answered(chunk, message, monkeypatch):
    breaking_above(0, monkeypatch, message)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run(chunk)


def test_rounds_move_nothing_by_themselves(monkeypatch):
    arguments = Resident._arguments

    def implicit(self, start, count):
        key, _, _, server, states = arguments(self, start, count)
        return key, np.int32(start), np.int32(count), server, states

    monkeypatch.setattr(Resident, "_arguments", implicit)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        run(1)


@pytest.mark.parametrize(
    ("seconds", "limit", "tried", "best"),
    [
        (
            {8: 4.0, 32: 3.0, 128: 3.5, 512: 1.0},
            math.inf,
            [8, 32, 128],
            32,
        ),  # slower again: no larger one
        ({8: 4.0, 32: 3.0, 128: 2.0, 512: 1.0}, 40.0, [8, 32], 32),  # each client takes a byte
        ({1: 1.0, 8: 4.0, 32: 3.0}, math.inf, [1, 8, 32], 1),  # one alone is other code
    ],
)
def test_measuring_goes_on_while_time_falls_and_memory_holds(
    seconds, limit, tried, best, monkeypatch
):
    mesh = jax.make_mesh((1,), ("clients",), devices=jax.devices()[:1])
    monkeypatch.setattr(chunk, "_memory", lambda mesh: limit)
    monkeypatch.setattr(
        chunk, "of_mesh", lambda mesh: backend("cpu")._replace(chunks=tuple(seconds))
    )
    made = []

    def trial(build, size, arguments, calls):
        made.append(size)
        return chunk.Program(lambda: (), size, 1.0), seconds[size]

    monkeypatch.setattr(chunk, "_tried", trial)
    build: Any = lambda size: functools.partial(print)  # noqa: E731
    assert chunk.fastest(build, 1000, (), mesh, ()).chunk == best
    assert made == tried


def test_a_chunk_is_no_larger_than_a_usual_cohort():
    """Rounds of 3 clients have one program for chunks of 3 and of 8. Coins get some room."""

    def program(sampling, chunk):
        algorithm = fedavg(digits_cnn(), mechanism=Mechanism(sampling=sampling))
        population = place(small_clients((4,) * 12), jax.devices()[:1])
        step: Any = compile_rounds(algorithm, population, chunk=chunk, segment=1)
        state = initialize(KEY, KEY, algorithm, population)
        return str(step.func.trace(*step.args, KEY, 0, 1, *state, **step.keywords).jaxpr)

    assert program(FixedSize(3), 8) == program(FixedSize(3), 3) != program(FixedSize(3), 2)
    # 12 coins of 1/4 have a mean of 3, and two standard deviations of at most 3.5 above it.
    assert program(Poisson(0.25), 8) == program(Poisson(0.25), 7) != program(Poisson(0.25), 6)


def test_no_chunk_above_a_usual_cohort_is_tried(compiled):
    """Chunks of 1 and 4 are candidates. A chunk of 4 suits cohorts of 4, but not of 3."""
    for size, tried in ((3, [1]), (4, [1, 4])):
        compiled.clear()
        method = fedavg(MODEL, mechanism=Mechanism(sampling=FixedSize(size)))
        simulate(
            KEY,
            method,
            small_clients(),
            rounds=1,
            chunk="auto",
            devices=jax.devices()[:1],
            progress=False,
        )
        assert compiled == tried
