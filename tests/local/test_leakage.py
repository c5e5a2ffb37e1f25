import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms_table import client_data

from jaxfl.local.leakage import _draw, client_risk, exact_risk, output_risk, probe_risk
from jaxfl.models import digits_cnn, lenet, mlp
from jaxfl.types import ClientData, Model

KEY = jax.random.key(0)
DIGITS = mlp((8, 8, 1), hidden=(16,))


def linear(pixels: int) -> Model:
    """Return a model with the logits (w.x, 0)."""
    model = mlp((1, 1, pixels), 2, hidden=())
    return model._replace(
        apply=lambda params, x: jnp.stack([x @ params["w"], jnp.zeros(len(x))], axis=1)
    )


def closed_form(w: np.ndarray, x: np.ndarray) -> float:
    """Return the norm of r I + s x w^T, for the first two derivatives r, s of the loss by w.x."""
    p = 1 / (1 + np.exp(-w @ x))
    r, s = p - 1, p * (1 - p)
    return float(np.sqrt(s**2 * (x @ x) * (w @ w) + 2 * r * s * (w @ x) + len(x) * r**2))


def points() -> tuple[Model, dict, np.ndarray, list[float]]:
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=5), rng.normal(size=(3, 5))
    inputs = x[:, None, None].astype(np.float32)
    return linear(5), {"w": jnp.asarray(w, jnp.float32)}, inputs, [closed_form(w, row) for row in x]


@pytest.mark.parametrize("by", ["columns", "jacrev"])
def test_exact_values_in_closed_form(by):
    model, params, inputs, expected = points()
    found = exact_risk(model, params, jnp.asarray(inputs), jnp.zeros(3, int), by=by, chunk=2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_probes_converge_to_the_closed_form():
    model, params, inputs, expected = points()
    errors = [
        np.abs(
            probe_risk(KEY, model, params, jnp.asarray(inputs), jnp.zeros(3, int), probes)
            / np.array(expected)
            - 1
        )
        for probes in (10, 10_000)
    ]
    assert errors[1].max() < 4 * np.sqrt(
        0.5 / 10_000
    )  # the square's relative variance is at most 2 per probe
    assert errors[0].max() > errors[1].max()


@pytest.mark.slow
@pytest.mark.parametrize("probes", [1, 2, 3])
def test_squares_of_probes_are_unbiased(probes):
    model, params, inputs, expected = points()
    keys = jax.random.split(KEY, 4000)
    risks = jax.vmap(
        lambda key: probe_risk(key, model, params, jnp.asarray(inputs), jnp.zeros(3, int), probes)
    )(keys)
    np.testing.assert_allclose((risks**2).mean(0), np.square(expected), rtol=4 * np.sqrt(2 / 4000))


@pytest.mark.slow
def test_a_jacobian_of_one_direction_is_exact_from_two_probes():
    model, params, inputs, _ = points()
    w = np.asarray(params["w"])
    across = 1e3 * (inputs - (inputs @ w)[..., None] * w / (w @ w))  # w.x = 0: s x w^T outgrows r I
    across = jnp.asarray(across, jnp.float32)
    exact = np.asarray(exact_risk(model, params, across, jnp.zeros(3, int)))
    keys = jax.random.split(KEY, 50)
    found = jax.vmap(lambda key: probe_risk(key, model, params, across, jnp.zeros(3, int), 2))(keys)
    assert (
        np.median(np.abs(np.asarray(found) / exact - 1)) < 1e-4
    )  # some first probes hardly see the direction
    plain = jax.vmap(lambda key: probe_risk(key, model, params, across, jnp.zeros(3, int), 1))(keys)
    assert np.median(np.abs(np.asarray(plain) / exact - 1)) > 0.1


@pytest.mark.slow
def test_several_probes_find_a_leading_direction_more_surely():
    """Three of six probes search for the direction, but only one of three."""
    model, params, inputs, _ = points()
    one = jnp.asarray(
        10 * inputs[:1], jnp.float32
    )  # the direction of s x w^T leads, that of r I is seen too
    exact = exact_risk(model, params, one, jnp.zeros(1, int))[0]
    keys = jax.random.split(KEY, 500)

    def spread(probes: int) -> float:
        found = jax.vmap(
            lambda key: probe_risk(key, model, params, one, jnp.zeros(1, int), probes)[0]
        )(keys)
        return float(np.std(found / exact))

    assert spread(3) > 0.1
    assert spread(6) < 0.3 * spread(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (mlp, (4, 4, 1)),
        (digits_cnn, (4, 4, 3)),
        (lenet, (16, 16, 1)),
    ],
)
def test_networks(build, shape):
    model = build(shape)
    inputs = jnp.asarray(np.random.default_rng(1).integers(0, 256, (3, *shape), np.uint8))
    params, labels = model.init(KEY), jnp.array([1, 0, 3])
    exact = jax.jit(lambda p: exact_risk(model, p, inputs, labels))(params)
    found = jax.jit(lambda p: probe_risk(KEY, model, p, inputs, labels, 600))(params)
    np.testing.assert_allclose(found, exact, rtol=0.08)


def test_forms_of_a_convolution_agree():
    inputs = jnp.asarray(np.random.default_rng(1).integers(0, 256, (3, 4, 4, 1), np.uint8))
    models = [digits_cnn((4, 4, 1), form=form) for form in ("winograd", "lax", "grouped", "blocks")]
    params, labels = models[0].init(KEY), jnp.array([1, 0, 3])
    fast, *others = (
        jax.jit(lambda p, m=m: probe_risk(KEY, m, p, inputs, labels, 3))(params) for m in models
    )
    for found in others:
        np.testing.assert_allclose(found, fast, rtol=1e-4)


def test_outputs_of_a_linear_model():
    """The logits of the model have the slopes w and 0."""
    model, params, inputs, _ = points()
    expected = np.linalg.norm(params["w"]) / 2
    np.testing.assert_allclose(
        output_risk(model, params, jnp.asarray(inputs)), [expected] * 3, rtol=1e-6
    )
    found = client_risk(KEY, model, params, data_of(inputs, 3), reading="output")
    assert found == pytest.approx(expected, rel=1e-6)


def data_of(inputs: np.ndarray, size: int) -> ClientData:
    return ClientData(
        jnp.asarray(inputs), jnp.zeros(len(inputs), int), jnp.arange(len(inputs)), jnp.int32(size)
    )


@pytest.mark.slow
def test_a_clients_mean_is_over_its_own_examples():
    model, params, inputs, expected = points()
    wild = np.concatenate(
        [inputs, np.full((4, 1, 1, 5), 1e6, np.float32)]
    )  # padding that must not count
    for batch in (1, 2, 64):
        found = client_risk(KEY, model, params, data_of(wild, 3), probes=4000, batch_size=batch)
        assert found == pytest.approx(np.mean(expected), rel=0.04)
    assert client_risk(KEY, model, params, data_of(wild, 0)) == 0


def test_draws_are_in_proportion_to_weights():
    """Weights 1, 0, 3 and four draws give one of the first, three of the last, and no padding."""
    for seed in range(5):
        drawn, factors = _draw(
            jax.random.key(seed), jnp.array([1.0, 0.0, 3.0, 0.0]), 4, jnp.int32(3)
        )
        np.testing.assert_array_equal(drawn, [2, 2, 2, 0])
        np.testing.assert_allclose(
            factors, np.array([4 / 3, 4 / 3, 4 / 3, 4.0]) / 3
        )  # sum w / (3 w)


@pytest.mark.slow
def test_a_mean_over_drawn_examples_is_unbiased():
    model, params, inputs, expected = points()
    wild = np.concatenate([inputs, np.full((4, 1, 1, 5), 1e6, np.float32)])
    several = jax.vmap(
        lambda key: client_risk(key, model, params, data_of(wild, 3), probes=300, examples=1)
    )
    values = np.asarray(several(jax.random.split(KEY, 300)))
    assert values.mean() == pytest.approx(np.mean(expected), abs=4 * values.std() / np.sqrt(300))
    whole = client_risk(
        KEY, model, params, data_of(wild, 3), probes=4000, examples=5
    )  # of 7 rows, 3 are real
    assert whole == pytest.approx(np.mean(expected), rel=0.04)


@pytest.mark.slow
def test_vmapped_clients_equal_single_ones():
    params = DIGITS.init(KEY)
    several = [client_data(i) for i in (0, 1, 2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *several)
    together = jax.jit(jax.vmap(lambda data: client_risk(KEY, DIGITS, params, data, batch_size=4)))(
        stacked
    )
    alone = [client_risk(KEY, DIGITS, params, data, batch_size=4) for data in several]
    np.testing.assert_allclose(together, alone, rtol=1e-5)
    assert alone[2] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": 0}, "probes must be .* got 0"),
        ({"examples": 0}, "examples must be .* got 0"),
        ({"batch_size": 0}, "batch_size must be .* got 0"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        client_risk(KEY, DIGITS, DIGITS.init(KEY), client_data(), **options)
