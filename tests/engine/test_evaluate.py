import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms_table import MODEL, small_clients
from reference import padded

from jaxfl.algorithms import fedavg
from jaxfl.engine.evaluate import compile_evaluation, summarize
from jaxfl.engine.mesh import place
from jaxfl.engine.program import initialize
from jaxfl.tasks import classification
from jaxfl.types import Lists

KEY = jax.random.key(7)


def test_a_model_without_finite_outputs_has_no_score_and_no_other_client_notices():
    """Client 1's model is NaN, client 3's infinite, client 4 has a NaN to test on; row 0, where padding points, too."""
    clients = small_clients()
    test, inputs = padded(clients.test), np.array(clients.inputs, np.float32) / 255
    size = np.array(clients.test_size)
    size[6] = 2  # the rest of its row is padding
    test[6, 2:] = 0
    inputs[[0, test[4, 1]]] = np.nan
    clients = clients._replace(inputs=inputs, test=Lists.of(test), test_size=size)

    def personalize(key, server, client, data):
        factor = jnp.where(data.size == 4, jnp.nan, 1.0)
        factor = jnp.where(data.size == 7, jnp.inf, factor)
        return jax.tree.map(lambda leaf: factor * leaf, server.params)

    base = fedavg(MODEL)
    found = {}
    for name, algorithm in (("sound", base), ("broken", base._replace(personalize=personalize))):
        population = place(clients)
        (server, *_), states = initialize(KEY, KEY, algorithm, population)
        found[name] = jax.device_get(compile_evaluation(algorithm, population)(KEY, server, states))
    for scores, lost in ((found["sound"], [4]), (found["broken"], [1, 3, 4])):
        for values in scores.values():
            assert np.flatnonzero(np.isnan(values)).tolist() == lost
    others = np.isfinite(found["broken"]["accuracy"])
    np.testing.assert_array_equal(
        found["sound"]["accuracy"][others], found["broken"]["accuracy"][others]
    )


def test_a_lost_model_counts_as_wrong_in_every_mean():
    accuracy = np.array([0.4, np.nan, np.nan, 0.8], np.float32)
    row = summarize(
        {"accuracy": accuracy, "loss": accuracy},
        np.array([10, 30, 0, 20]),
        classification().metrics,
    )  # the third has no tests
    assert row["accuracy"] == pytest.approx(0.4)
    assert row["accuracy_std"] == pytest.approx(math.sqrt(0.32 / 3))
    assert row["accuracy_worst10"] == 0
    assert row["accuracy_examples"] == pytest.approx((4 + 0 + 16) / 60)
    assert math.isnan(row["loss"])


def test_without_test_examples_nothing_is_known():
    nothing = np.full(3, np.nan, np.float32)
    row = summarize(
        {"accuracy": nothing, "loss": nothing}, np.zeros(3, int), classification().metrics
    )
    assert row.keys() == {
        "accuracy",
        "accuracy_std",
        "accuracy_worst10",
        "accuracy_examples",
        "loss",
    }
    assert all(map(math.isnan, row.values()))
