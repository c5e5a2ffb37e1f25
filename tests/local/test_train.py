from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from algorithms_table import MODEL
from reference import DIGITS, client, numpy_gradient

from jaxfl.local.sam import ascend, sam
from jaxfl.local.train import LocalSGD, blocks_of, fit_head, train
from jaxfl.tasks import classification

KEY = jax.random.key(3)


def fit(
    data, key=KEY, params=None, optimizer=optax.sgd(0.1), batch=4, epochs=1, steps=None, **options
):
    local = LocalSGD(optimizer, batch, epochs, steps)
    defaults: dict[str, Any] = {
        "apply": MODEL.apply,
        "prepare": MODEL.prepare,
        "loss": MODEL.task.mean_loss,
    }
    return train(
        key, params or MODEL.init(jax.random.key(0)), data, local=local, **defaults | options
    )


def orders(key, epochs, padded, size):
    """Yield each epoch's documented order: the real examples by the rank of a uniform draw."""
    for epoch in range(epochs):
        place = np.asarray(jax.random.uniform(jax.random.fold_in(key, epoch), (padded,)))[:size]
        yield 100 + np.argsort(place, kind="stable")


@pytest.mark.parametrize(
    ("size", "padded", "batch"), [(9, 9, 4), (9, 13, 4), (3, 8, 32), (600, 700, 16)]
)
def test_equals_numpy_sgd(size, padded, batch):
    fitted, info = fit(client(size, padded), epochs=2, batch=batch)
    start = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), MODEL.init(jax.random.key(0)))
    params = start
    for order in orders(KEY, 2, padded, size):
        params = reference.fit(
            params, DIGITS.train_inputs, DIGITS.train_labels, order, batch, 0.1, numpy_gradient
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), fitted, params
    )
    assert info["steps"] == 2 * -(-size // batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"penalty": lambda p: optax.tree.norm(p, squared=True)}, {"gradient": sam(0.5)}]
)
def test_microbatches_change_nothing(options):
    data = client(11, 13)  # the last batch has three examples and three places of padding
    (whole, a), (parts, b) = (
        fit(data, epochs=2, batch=6, microbatch=m, **options) for m in (None, 4)
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), (whole, a), (parts, b)
    )


@pytest.mark.parametrize(
    "padded", [40, 600]
)  # orders of more than 512 rows are sorted in another way
def test_padding_changes_nothing(padded):
    for a, b in zip(jax.tree.leaves(fit(client(9, 9))), jax.tree.leaves(fit(client(9, padded)))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_steps_take_as_many_passes_as_needed():
    by_steps, info = fit(client(8, 8), steps=4)
    by_epochs, _ = fit(client(8, 8), epochs=2)
    assert info["steps"] == 4
    jax.tree.map(np.testing.assert_array_equal, by_steps, by_epochs)
    assert fit(client(8, 8), steps=3)[1]["steps"] == 3


def test_weights_that_are_lost_take_no_further_blocks():
    # All losses are NaN. An optimizer may pass over such gradients, and then goes on.
    def steps_taken(breaks):
        def update(updates, state, params=None):
            return {"weight": jnp.where(breaks, jnp.nan, 0.0), "steps": jnp.ones(())}, state

        fitted, info = fit(
            client(600, 600),
            batch=16,
            epochs=2,
            params={"weight": jnp.ones(()), "steps": jnp.zeros(())},
            apply=lambda params, x, key: jnp.full((len(x), 10), jnp.nan) * params["weight"],
            optimizer=optax.GradientTransformation(lambda params: optax.EmptyState(), update),
        )
        assert jnp.isnan(info["loss"])
        return int(fitted["steps"])

    assert steps_taken(breaks=True) == blocks_of(600, 16)[1]
    assert steps_taken(breaks=False) == 2 * -(-600 // 16)


@pytest.mark.parametrize(("size", "epochs"), [(0, 3), (5, 0)])
def test_without_examples_or_epochs_parameters_stay(size, epochs):
    fitted, info = fit(client(size, 5), epochs=epochs)
    jax.tree.map(np.testing.assert_array_equal, fitted, MODEL.init(jax.random.key(0)))
    assert info == {"loss": 0.0, "steps": 0.0}


def test_masked_coordinates_keep_their_bits_under_weight_decay():
    start = MODEL.init(jax.random.key(0))
    mask = jax.tree.map(
        lambda leaf: jax.random.bernoulli(jax.random.key(1), 0.5, leaf.shape), start
    )
    fitted, _ = fit(client(9, 9), mask=mask, optimizer=optax.adamw(0.1, weight_decay=0.5), epochs=2)
    for m, a, b in zip(*map(jax.tree.leaves, (mask, fitted, start))):
        np.testing.assert_array_equal(np.where(m, 0, a), np.where(m, 0, b))
        assert np.any(np.where(m, a, 0) != np.where(m, b, 0))


def test_penalty_enters_the_gradient():
    # A penalty whose gradient is -g at the start turns one step of SGD around.
    start = MODEL.init(jax.random.key(0))
    data = client(4, 4)
    inputs, labels = data.take(jnp.arange(4))
    x = MODEL.prepare(inputs)
    g = jax.grad(lambda p: MODEL.task.mean_loss(MODEL.apply(p, x), labels, jnp.ones(4)))(start)
    with_penalty, _ = fit(data, penalty=lambda p: -2 * optax.tree.vdot(g, p))
    jax.tree.map(
        lambda a, s, g: np.testing.assert_allclose(a, s + 0.1 * g, rtol=1e-4, atol=1e-6),
        with_penalty,
        start,
        g,
    )


def sam_step(optimizer=optax.sgd(1.0), start=(3.0, 4.0), **options):
    """Return the weights after a step on |w|^2 / 2. At rho = 0.5 the gradient is (3.3, 4.4)."""
    fitted, _ = train(
        KEY,
        {"w": jnp.array(start)},
        client(4, 4),
        apply=lambda params, x, key: jnp.zeros((4, 10)),
        prepare=MODEL.prepare,
        loss=MODEL.task.mean_loss,
        local=LocalSGD(optimizer, 4),
        penalty=lambda params: 0.5 * optax.tree.norm(params, squared=True),
        gradient=sam(0.5),
        **options,
    )
    return fitted["w"]


def test_sharpness_aware_step_on_a_parabola():
    np.testing.assert_allclose(sam_step(), [3 - 3.3, 4 - 4.4], rtol=1e-5)
    # Only what moves is moved uphill.
    np.testing.assert_allclose(
        sam_step(mask={"w": jnp.array([True, False])}), [3 - 3.5, 4], rtol=1e-5
    )


def test_where_the_gradient_is_zero_nothing_goes_uphill():
    np.testing.assert_array_equal(sam_step(start=(0.0, 0.0)), [0, 0])
    np.testing.assert_array_equal(ascend({"w": jnp.ones(2)}, {"w": jnp.zeros(2)}, 0.5)["w"], [1, 1])


def test_fit_head_equals_training_the_head_in_place():
    params = MODEL.init(jax.random.key(0))
    cached, _ = fit_head(KEY, MODEL, params, client(9, 12), local=LocalSGD(optax.sgd(0.1), 4, 3))
    mask = {
        name: jax.tree.map(lambda leaf, n=name: jnp.full(leaf.shape, n in MODEL.head), params[name])
        for name in params
    }
    in_place, _ = fit(client(9, 12), mask=mask, epochs=3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), cached, in_place
    )


def test_cross_entropy_ignores_padding():
    logits, labels = jnp.array([[2.0, 0.0], [5.0, 1.0], [9.0, 9.0]]), jnp.array([0, 1, 0])
    mean_loss = classification().mean_loss
    expected = np.mean([np.log(1 + np.exp(-2)), np.log(1 + np.exp(4))])
    assert mean_loss(logits, labels, jnp.array([1.0, 1.0, 0.0])) == pytest.approx(
        expected, rel=1e-5
    )
    assert mean_loss(logits, labels, jnp.zeros(3)) == 0


@pytest.mark.slow
def test_a_local_value_trains_by_the_models_own_network_or_another_around_it():
    local, start = LocalSGD(optax.sgd(0.1), 4, 2), MODEL.init(jax.random.key(0))
    by_value, info = local.train(KEY, MODEL, start, client(9, 12))
    expected, told = fit(client(9, 12), epochs=2)
    jax.tree.map(np.testing.assert_array_equal, (by_value, info), (expected, told))
    still, _ = local.train(
        KEY, MODEL, start, client(9, 12), apply=lambda params, x, key: jnp.zeros((len(x), 10))
    )
    jax.tree.map(np.testing.assert_array_equal, still, start)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"batch_size": 0}, "batch_size must be .* got 0"),
        ({"epochs": -1}, "epochs must be .* got -1"),
        ({"steps": 0}, "steps must be .* got 0"),
        ({"optimizer": 0.1}, "optimizer must be .* got 0.1. Give an optimizer of optax"),
    ],
)
def test_wrong_arguments_name_themselves(wrong, name):
    with pytest.raises((ValueError, TypeError), match=name):
        LocalSGD(**{"optimizer": optax.sgd(0.1)} | wrong)
