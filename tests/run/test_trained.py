"""Trained models: their weights, their predictions, and the methods that have one."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, MODEL, small_clients

import jaxfl.run.trained
from jaxfl import LocalSGD, simulate
from jaxfl.algorithms import fedavg, fine_tuned
from jaxfl.run.trained import shared_params

NO_GLOBAL_MODEL = {
    "local_only": "clients send nothing",
    "fedrep": "the heads stay with the clients",
    "centaur": "the heads stay with the clients",
    "dp_pfeddsu": "the heads stay with the clients",
    "dp_pfeddsu_random": "the heads stay with the clients",
    "dp_pfeddsu_paper": "the heads stay with the clients",
    "dp_lg": "the extractors stay with the clients",
    "ifca": "there are several models",
}
FAST = ("dp_fedavg", "ifca", "mr_mtl", "centaur", "prior_corrected_released", "mixed", "apfl")


def by_hand(params, inputs):
    """Return the logits of the tests' network, in NumPy."""
    hidden, head = (jax.device_get(params[name]) for name in MODEL.layers)
    x = np.asarray(MODEL.prepare(inputs), np.float64).reshape(len(inputs), -1)
    x = np.maximum(x @ hidden["kernel"] + hidden["bias"], 0)
    return x @ head["kernel"] + head["bias"]


def examples_of(clients, client):
    rows = clients.test[client][: clients.test_size[client]]
    return clients.inputs[rows], clients.labels[rows]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in ALGORITHMS],
)
def test_every_method_has_an_honest_global_model_or_says_that_it_has_none(name):
    clients = small_clients()
    result = simulate(3, ALGORITHMS[name](), clients, rounds=2, progress=False)
    inputs = clients.inputs[:300]
    if name in NO_GLOBAL_MODEL:
        with pytest.raises(ValueError, match=r"got none\. Take a client's own model, by client=0"):
            result.model()
    else:
        model = result.model()
        server = result.server
        for part in ("current", "method"):
            server = getattr(server, part, server)
        np.testing.assert_allclose(model(inputs), by_hand(server.params, inputs), atol=1e-4)
        np.testing.assert_array_equal(model.predict(inputs), model(inputs).argmax(-1))
        assert (model.about["method"], model.about["client"]) == (
            result.origin.algorithm.name,
            None,
        )
        # Training moved the weights, but for the first rounds of one that trains no shared layer.
        first, _ = result.origin.algorithm.init(*starts(result))
        assert not np.array_equal(
            model.params["head"]["kernel"],
            shared_params(result.origin.algorithm, first, "")["head"]["kernel"],
        )
    for client in (0, 2, 8):
        model = result.model(client)
        own_inputs, labels = examples_of(clients, client)
        right = np.mean(model.predict(own_inputs) == labels)
        assert right == pytest.approx(result.scores["accuracy"][client])
        losses = MODEL.task.loss(model(own_inputs), labels)
        assert np.mean(losses) == pytest.approx(result.scores["loss"][client], rel=1e-3)
        assert model.about["statement"] is None
        if result.origin.algorithm.dp_sgd is None:
            assert f"client {client} without noise. No epsilon" in model.about["privacy"]
        else:
            expected = (
                f"Only client {client} may have this model. The private steps of clients have"
            )
            assert expected in model.about["privacy"]


def test_all_clients_share_one_program(monkeypatch):
    made = []
    compile_personal = jaxfl.run.trained._compile_personal

    def counted(*arguments):
        made.append(compile_personal(*arguments))
        return made[-1]

    monkeypatch.setattr(jaxfl.run.trained, "_compile_personal", counted)
    local = LocalSGD(optax.sgd(0.1), 4)
    method = fine_tuned(fedavg(MODEL, local=local), local=local)
    result = simulate(0, method, small_clients(), rounds=1, progress=False)
    for client in (0, 1, 2):
        result.model(client)
    (program,) = made
    compiled: Any = program.func
    assert compiled._cache_size() == 1


def starts(result):
    return jax.random.split(result.origin.key, 3)[0], result.origin.clients.num_clients
