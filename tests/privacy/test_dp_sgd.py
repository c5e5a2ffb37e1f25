import dataclasses
import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import MODEL, small_clients
from jax import lax
from reference import DIGITS, client, numpy_gradient

from jaxfl import simulate
from jaxfl.algorithms import fedavg
from jaxfl.data import make_clients
from jaxfl.engine.mesh import place
from jaxfl.engine.program import first_states
from jaxfl.engine.round import all_keys, one_round
from jaxfl.local.sam import sam
from jaxfl.local.train import LocalSGD
from jaxfl.models import lenet, mlp
from jaxfl.privacy import (
    Mechanism,
    dp_sgd,
    example_epsilon,
    planned_ledger,
    privacy_statement,
)
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.types import Message, StepNoise

KEY = jax.random.key(8)
ONE_BY_ONE = MODEL._replace(ghost_norms=None)


def fit(data, private, key=KEY, model=ONE_BY_ONE, params=None, **options):
    return private.train(
        key, model, MODEL.init(jax.random.key(0)) if params is None else params, data, **options
    )


def steps(number=1, **options):
    defaults: dict[str, Any] = {
        "clip": 0.5,
        "noise_multiplier": 0.0,
        "rate": 0.4,
        "optimizer": optax.sgd(1.0),
    }
    return DPSGD(**defaults | options, steps=number)


def test_equals_numpy_one_example_at_a_time():
    fitted, info = fit(client(9, 13), steps(3, chunk=2))
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), MODEL.init(jax.random.key(0)))
    clipped, own = 0, jax.random.split(KEY)[1]
    for step in range(3):
        batch_key, _ = jax.random.split(jax.random.fold_in(own, step))
        coins = np.asarray(jax.random.bits(batch_key, (13, 2)), np.float64)[:9] @ [
            2.0**-32,
            2.0**-64,
        ]
        drawn = 100 + np.flatnonzero(coins < 0.4)
        total = jax.tree.map(np.zeros_like, params)
        for row in drawn:
            slope = numpy_gradient(params, DIGITS.train_inputs[[row]], DIGITS.train_labels[[row]])
            norm = math.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(slope)))
            clipped += norm > 0.5
            total = jax.tree.map(lambda t, g, f=min(1, 0.5 / norm): t + f * g, total, slope)
        params = jax.tree.map(lambda p, t: p - t / (0.4 * 9), params, total)
    assert clipped > 3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), fitted, params
    )
    assert info["steps"] == 3


@pytest.mark.parametrize("private", [steps(4, chunk=1), steps(4, chunk=64)])
def test_chunk_and_padding_change_nothing(private):
    expected, found = fit(client(9, 9), steps(4, chunk=3)), fit(client(9, 40), private)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), expected, found
    )


@pytest.mark.slow
def test_convolutions_are_differentiated_one_by_one():
    # With everything in the batch and no example clipped, it is the mean gradient.
    model, data = lenet((8 * 4, 32, 1), 10), client(5, 5)
    data = dataclasses.replace(
        data, _inputs=jnp.repeat(jnp.repeat(data._inputs, 4, axis=1), 4, axis=2)
    )
    found, _ = fit(
        data,
        steps(rate=1.0, clip=1e6),
        model=model._replace(ghost_norms=None),
        params=model.init(KEY),
    )
    whole, _ = LocalSGD(optax.sgd(1.0), 5).train(KEY, model, model.init(KEY), data)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, whole)


def counting(data, private, key):
    """Return the move of a step whose gradients are -1: the batch over its expected size."""
    return fit(
        data,
        private,
        key,
        params=jnp.zeros(()),
        apply=lambda w, x, key: jnp.broadcast_to(w, (len(x), 1)),
        loss=lambda logits, labels, weights: -logits.mean(),
    )[0]


def test_batches_are_poisson():
    data, draws = client(60, 70), 400
    moved = jax.vmap(lambda key: counting(data, steps(rate=0.3, clip=1.0), key))(
        jax.random.split(KEY, draws)
    )
    sizes = np.asarray(moved) * 0.3 * 60
    np.testing.assert_allclose(sizes, np.rint(sizes), atol=1e-4)
    assert sizes.mean() == pytest.approx(18, abs=4 * math.sqrt(60 * 0.21 / draws))
    assert sizes.var() == pytest.approx(60 * 0.21, rel=4 * math.sqrt(2 / draws))


def test_batches_follow_the_rate_of_each_client():
    rates, draws = np.array([0.1, 0.6]), 300
    private = steps(rate=rates, clip=1.0)
    for number, rate in enumerate(rates):
        data = dataclasses.replace(client(60, 70), id=jnp.int32(number))
        moved = jax.vmap(lambda key, data=data: counting(data, private, key))(
            jax.random.split(KEY, draws)
        )
        sizes = np.asarray(moved) * rate * 60
        np.testing.assert_allclose(sizes, np.rint(sizes), atol=1e-3)
        spread = 60 * rate * (1 - rate)
        assert sizes.mean() == pytest.approx(60 * rate, abs=4 * math.sqrt(spread / draws))


def test_each_client_has_the_epsilon_of_its_rate():
    rates, noise = np.array([0.1, 0.5, 0.1]), np.array([1.0, 2.0, 4.0])
    several = steps(rate=rates, noise_multiplier=noise)
    plan = planned_ledger(Mechanism(), 3, 4, several)
    for accountant in ("pld", "rdp"):
        found = example_epsilon(plan, several, accountant=accountant, delta=1e-5)
        for number in range(3):
            alone = steps(rate=rates[number], noise_multiplier=noise[number])
            own = planned_ledger(Mechanism(), 1, 4, alone)
            one = example_epsilon(own, alone, accountant=accountant, delta=1e-5)
            assert found.per_client[number] == pytest.approx(one.value, rel=1e-9)
        assert "rate 0.1 to 0.5" in found.theorem
    statement = privacy_statement(plan, Mechanism(), 3, dp_sgd=several)
    assert statement["examples"]["rate"] == {"min": 0.1, "max": 0.5}


def test_rates_of_a_run_are_those_of_its_clients():
    sizes = [4, 8, 16]
    rates = np.array([0.5, 0.25, 0.125])
    data: Any = np.ones((28, 1), np.float32), np.zeros(28, int)
    lists = np.split(np.arange(28), np.cumsum(sizes)[:-1])
    clients = make_clients((*data, data[0][:0], data[1][:0]), lists)
    private = dataclasses.replace(steps(rate=rates, clip=1.0), noise_multiplier=1e-6)
    method = fedavg(mlp((1,), 2, hidden=()), local=private)
    result = simulate(0, method, clients, rounds=1, progress=False)
    assert result.statement["examples"]["rate"] == {"min": 0.125, "max": 0.5}
    wrong = dataclasses.replace(private, rate=rates[:2])
    with pytest.raises(ValueError, match=r"dp_sgd\.rate must have one number for all 3 clients"):
        simulate(0, method._replace(dp_sgd=wrong), clients, rounds=1, progress=False)


def test_layers_draw_nothing_that_batches_and_noise_are_drawn_from(monkeypatch):
    met = []

    def spy(key, params, *arguments, drawing, **options):
        met.extend(
            [
                *jax.random.split(key),
                *(jax.random.fold_in(drawing, position) for position in range(8)),
            ]
        )
        return jnp.zeros(()), optax.tree.zeros_like(params)

    def loop(first, end, body, carry):
        return functools.reduce(
            lambda carry, i: body(jnp.int32(i), carry), range(first, int(end)), carry
        )

    monkeypatch.setattr(dp_sgd, "noisy_gradient", spy)
    monkeypatch.setattr(dp_sgd, "lax", types.SimpleNamespace(fori_loop=loop))  # keys can be read
    fit(client(5, 8), steps(8))
    assert len({tuple(jax.random.key_data(key).tolist()) for key in met}) == 8 * 10


def test_a_round_gives_private_steps_a_key_apart_from_the_clients_own():
    private = steps(2, noise_multiplier=1.0)
    method = fedavg(MODEL, local=private)

    def client_update(key, server, state, data):
        message, state, info = method.client_update(key, server, state, data)
        # Whoever splits the own key has none of the other's streams either.
        own, others = ([given, *jax.random.split(given, 8)] for given in (key, data.noise.key))
        same = [
            jnp.all(jax.random.key_data(a) == jax.random.key_data(b)) for a in own for b in others
        ]
        return message, state, info | {"same": jnp.any(jnp.array(same)).astype(jnp.float32)}

    run = {
        "rounds": 2,
        "eval_every": 1,
        "progress": False,
        "devices": jax.devices()[:1],
        "chunk": 1,
    }
    result = simulate(KEY, method._replace(client_update=client_update), small_clients(), **run)
    assert [row["same"] for row in result.metrics] == [0, 0]


def test_private_steps_take_the_noise_that_is_accounted():
    method = fedavg(MODEL, local=steps(2, noise_multiplier=100.0))
    quieter = steps(2, noise_multiplier=1e-6)

    def client_update(key, server, state, data):
        params, info = quieter.train(
            key, MODEL, server.params, dataclasses.replace(data, noise=None)
        )
        return Message(optax.tree.sub(params, server.params)), state, info

    with pytest.raises(ValueError, match="takes their noise from elsewhere than its data"):
        simulate(
            KEY,
            method._replace(client_update=client_update),
            small_clients(),
            rounds=1,
            progress=False,
        )


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        ((), "makes no private steps"),
        ((steps(2), steps(2)), "trains by private steps 2 times"),
        ((steps(3),), "makes other private steps"),
        ((steps(2, rate=0.5),), "makes other private steps"),
    ],
)
def test_a_round_makes_the_steps_that_are_accounted(trained, said):
    method = fedavg(MODEL, local=steps(2))

    def client_update(key, server, state, data):
        params, info = server.params, {}
        for private in trained:
            params, info = private.train(key, MODEL, params, data)
        return Message(optax.tree.sub(params, server.params)), state, info

    with pytest.raises(ValueError, match=f"client_update of 'fedavg' {said}.*Train by"):
        simulate(
            KEY,
            method._replace(client_update=client_update),
            small_clients(),
            rounds=1,
            progress=False,
        )


def test_private_steps_that_no_epsilon_counts_are_an_error():
    silent = fedavg(MODEL, local=steps(2))._replace(dp_sgd=None)
    with pytest.raises(ValueError, match="dp_sgd must be given, because client_update of 'fedavg'"):
        simulate(KEY, silent, small_clients(), rounds=1, progress=False)


def trained_inside(around):
    """Trace a round in which `around` gets the training function and its start."""
    method = fedavg(MODEL, local=steps(2, noise_multiplier=100.0))

    def client_update(key, server, state, data):
        train = lambda params, **options: steps(2).train(key, MODEL, params, data, **options)[0]  # noqa: E731
        return Message(optax.tree.sub(around(train, server.params), server.params)), state, {}

    method = method._replace(client_update=client_update)
    population = place(small_clients(), jax.devices()[:1])
    center, states = jax.eval_shape(functools.partial(first_states, method, KEY, KEY, population))
    return jax.eval_shape(
        functools.partial(one_round, method, population, 4, all_keys(KEY), jnp.int32(0)),
        center,
        states,
    )


def twice_compiled(train, start):
    compiled = jax.jit(train)
    return compiled(compiled(start))


def over_lanes(train, start):
    lanes = jax.vmap(train)(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), start))
    return jax.tree.map(lambda leaf: leaf[0], lanes)


def over_penalties(train, start):
    """Return the first of three vectorised trainings, which differ only in their penalties."""

    def penalised(weight):
        return train(start, penalty=lambda params: weight * jnp.sum(params["head"]["bias"]))

    return jax.tree.map(lambda leaf: leaf[0], jax.vmap(penalised)(jnp.ones(3)))


def mapped(train, start):
    return jax.tree.map(lambda leaf: leaf[0], lax.map(lambda i: train(start), jnp.arange(2)))


def perhaps(train, start):
    return lax.cond(start["head"]["bias"][0] > 0, train, lambda own: own, start)


REPEATED: dict[str, tuple[Any, str]] = {
    "fori_loop": (
        lambda train, start: lax.fori_loop(0, 2, lambda i, own: train(own), start),
        "2 times",
    ),
    "open_loop": (
        lambda train, start: lax.while_loop(lambda own: own["head"]["bias"][0] < 1, train, start),
        "in a loop",
    ),
    "scan": (
        lambda train, start: lax.scan(lambda own, _: (train(own), None), start, None, length=3)[0],
        "3 times",
    ),
    "map": (mapped, "2 times"),
    "vmap": (over_lanes, "2 times"),
    "vmap_of_jit": (lambda train, start: over_lanes(jax.jit(train), start), "2 times"),
    "vmap_of_a_closure": (over_penalties, "3 times"),
    "jit": (twice_compiled, "2 times"),
    "jit_of_a_loop": (
        lambda train, start: jax.jit(
            lambda own: lax.fori_loop(0, 5, lambda i, own: train(own), own)
        )(start),
        "5 times",
    ),
    "checkpoint": (
        lambda train, start: jax.checkpoint(train)(jax.checkpoint(train)(start)),
        "2 times",
    ),
    "cond_and_after": (lambda train, start: train(perhaps(train, start)), "2 times"),
}


@pytest.mark.parametrize("kind", REPEATED)
def test_private_steps_that_repeat_their_noise_are_refused(kind):
    around, said = REPEATED[kind]
    with pytest.raises(
        ValueError, match=f"trains by private steps {said}. Train by the `train` of dp_sgd"
    ):
        trained_inside(around)


ONCE: dict[str, Any] = {
    "plain": lambda train, start: train(start),
    "jit": lambda train, start: jax.jit(train)(start),
    "jit_in_jit": lambda train, start: jax.jit(jax.jit(train))(start),
    "checkpoint": lambda train, start: jax.checkpoint(train)(start),
    "cond": perhaps,
    "either": lambda train, start: lax.cond(start["head"]["bias"][0] > 0, train, train, start),
    "scan_of_one": lambda train, start: lax.scan(
        lambda own, _: (train(own), None), start, None, length=1
    )[0],
}


@pytest.mark.parametrize("kind", ONCE)
def test_private_steps_inside_what_runs_them_once_are_accepted(kind):
    trained_inside(ONCE[kind])


def test_a_helper_that_was_compiled_before_is_counted_as_well():
    helper = jax.jit(lambda key, params, data: steps(2).train(key, MODEL, params, data)[0])
    method = fedavg(MODEL, local=steps(2))

    def client_update(key, server, state, data):
        after = helper(key, helper(key, server.params, data), data)
        return Message(optax.tree.sub(after, server.params)), state, {}

    for _ in range(2):  # the second time the helper is traced no more
        with pytest.raises(ValueError, match="trains by private steps 2 times"):
            simulate(
                KEY,
                method._replace(client_update=client_update),
                small_clients(),
                rounds=1,
                progress=False,
            )


def test_noise_has_the_stated_std():
    start = MODEL.init(jax.random.key(0))
    plain = client(9, 13)
    given = dataclasses.replace(plain, noise=StepNoise(jnp.float32(3.0), KEY))
    for data, z in ((plain, 3.0), (given, np.full(4, 7.0))):  # the engine's number counts
        noisy = fit(data, steps(noise_multiplier=z), params=start)[0]
        quiet = fit(plain, steps(noise_multiplier=0.0), params=start)[0]
        noise = np.concatenate(
            [leaf.ravel() for leaf in jax.tree.leaves(optax.tree.sub(noisy, quiet))]
        )
        assert noise.std() == pytest.approx(
            3.0 * 0.5 / (0.4 * 9), rel=4 / math.sqrt(2 * noise.size)
        )


def test_one_example_moves_a_step_by_at_most_the_bound():
    data = client(9, 9)
    moved = []
    for seed in range(8):
        other = dataclasses.replace(
            data, _labels=jnp.asarray(data._labels).at[104].set((data._labels[104] + 1) % 10)
        )
        a, b = (fit(each, steps(clip=0.1), jax.random.key(seed))[0] for each in (data, other))
        moved.append(float(optax.tree.norm(optax.tree.sub(a, b))) * 0.4 * 9)
    assert max(moved) <= 2 * 0.1 * (1 + 1e-4)  # replaced, not zeroed out
    assert max(moved) > 0.1
    assert min(moved) == 0  # not in the batch


def test_empty_batches_and_clients():
    start = MODEL.init(jax.random.key(0))
    jax.tree.map(
        np.testing.assert_array_equal, fit(client(0, 5), steps(3, noise_multiplier=1.0))[0], start
    )
    alone, _ = fit(client(1, 5), steps(rate=1e-6))
    jax.tree.map(np.testing.assert_array_equal, alone, start)
    noisy, _ = fit(client(1, 5), steps(rate=1e-6, noise_multiplier=1e-3))
    assert not np.array_equal(noisy["head"]["bias"], start["head"]["bias"])


def test_penalties_are_neither_clipped_nor_noised():
    start = MODEL.init(jax.random.key(0))
    pulled, _ = fit(
        client(1, 5), steps(rate=1e-6), penalty=lambda p: 0.5 * optax.tree.norm(p, squared=True)
    )
    jax.tree.map(
        lambda p, s: np.testing.assert_allclose(p, jnp.zeros_like(s), atol=1e-6), pulled, start
    )


def test_sharpness_aware_steps_are_refused():
    with pytest.raises(ValueError, match="gradient must be None with DPSGD"):
        fit(client(4, 4), steps(), gradient=sam(0.5))


def test_the_norms_of_a_model_are_its_own_networks():
    uncalled: Any = lambda *_: 1 / 0  # noqa: E731
    model = MODEL._replace(ghost_norms=uncalled)
    expected, found = (
        fit(client(9, 13), steps(2), model=model, apply=apply)
        for model, apply in ((ONE_BY_ONE, None), (model, MODEL.apply))
    )
    jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_noise_fits_the_clients():
    for noise, table in (
        (2.0, [2.0]),
        (np.array([2.0]), [2.0]),
        (np.array([1.0, 3.0]), [1.0, 3.0]),
    ):
        private = steps(noise_multiplier=noise)
        assert private.noise_table.tolist() == table
        private.check_fits(2)
    with pytest.raises(
        ValueError, match=r"dp_sgd\.noise_multiplier must .* all 3 clients, .* got shape \(2,\)"
    ):
        private.check_fits(3)


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_gradients_clipped_by_their_norms_are_the_same(chunk):
    expected, a = fit(client(9, 13), steps(3, chunk=1))
    found, b = fit(client(9, 13), steps(3, chunk=chunk), model=MODEL)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        (expected, a),
        (found, b),
    )


@pytest.mark.parametrize("model", [ONE_BY_ONE, MODEL])
def test_an_example_without_a_finite_gradient_contributes_nothing(model):
    # Dropping the client's whole update instead would let one example move all of it.
    data = client(9, 9)
    inputs = jnp.asarray(data._inputs, jnp.float32)
    data = dataclasses.replace(data, _inputs=inputs.at[103].set(jnp.inf))
    whole = steps(rate=1.0, chunk=4)
    found, info = fit(data, whole, model=model)
    rest = dataclasses.replace(
        data, _rows=jnp.delete(jnp.asarray(data._rows), 3), size=jnp.int32(8)
    )
    expected, _ = fit(rest, whole)
    start = MODEL.init(jax.random.key(0))
    eight_ninths = jax.tree.map(lambda s, e: s + (e - s) * 8 / 9, start, expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, eight_ninths
    )
    assert np.isfinite(info["loss"])


def test_private_steps_have_no_derivative():
    """Their noise is a constant, so a derivative would have no noise."""
    method = fedavg(MODEL, local=steps(2))

    def client_update(key, server, state, data):
        def sent(params):
            return method.client_update(key, server._replace(params=params), state, data)[0].update

        tangent = jax.jvp(sent, (server.params,), (server.params,))[1]
        return Message(tangent), state, {}

    with pytest.raises(ValueError, match="private steps must not be differentiated"):
        simulate(
            KEY,
            method._replace(client_update=client_update),
            small_clients(),
            rounds=1,
            progress=False,
        )
