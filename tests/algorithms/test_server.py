"""A server's adaptive optimizers, compared with their paper in NumPy, and methods with one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import MODEL, SEND_WEIGHTS, small_clients
from malformed import functions

from jaxfl import algorithms, simulate, sweep
from jaxfl.algorithms import dp_fedavg, fedadagrad, fedadam, fedavg, fedyogi
from jaxfl.privacy import Poisson

KEY = jax.random.key(47)
PRIVATE: dict[str, Any] = {"clip": 0.2, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
BETA2 = 0.9
SECOND = {
    "fedadagrad": lambda v, d: v + d**2,
    "fedyogi": lambda v, d: v - (1 - BETA2) * d**2 * np.sign(v - d**2),
    "fedadam": lambda v, d: BETA2 * v + (1 - BETA2) * d**2,
}
"""Second moments from v and d, by lines 10 to 12 of Algorithm 2."""


@pytest.mark.parametrize("name", SECOND)
def test_equals_algorithm_2_in_numpy(name):
    eta, beta1, tau = 0.3, 0.7, 0.05
    memory = {} if name == "fedadagrad" else {"beta2": BETA2}
    optimizer = getattr(algorithms, name)(eta, beta1=beta1, tau=tau, **memory)
    x = np.array([1.0, -2.0, 0.5])
    params, state = jnp.asarray(x, jnp.float32), optimizer.init(jnp.asarray(x, jnp.float32))
    m, v = np.zeros(3), np.full(3, tau**2)
    for delta in np.random.default_rng(0).normal(0, [0.01, 0.1, 1.0], (6, 3)):
        m = beta1 * m + (1 - beta1) * delta
        v = SECOND[name](v, delta)
        x = x + eta * m / (np.sqrt(v) + tau)
        updates, state = optimizer.update(jnp.asarray(-delta, jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(np.asarray(params), x, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("build", [fedadagrad, fedadam, fedyogi])
def test_large_tau_is_fedavg_with_half_the_rate_over_tau(build):
    tau, memory = 1e4, {"beta1": 0.0}
    found = run(fedavg(MODEL, server_optimizer=build(2 * tau, tau=tau, **memory))).server.params
    expected = run(fedavg(MODEL)).server.params
    drift = {fedadagrad: 0, fedadam: 0.02, fedyogi: 0}[
        build
    ]  # v decays from tau^2 by beta2 where updates are small
    start, _ = fedavg(MODEL).init(jax.random.split(KEY, 3)[0], 11)
    error, moved = (
        optax.tree.norm(optax.tree.sub(other, expected)) for other in (found, start.params)
    )
    assert float(error / moved) <= drift + 1e-3


def run(algorithm):
    return simulate(KEY, algorithm, small_clients(), rounds=3, progress=False)


def test_a_step_is_after_the_noise_and_costs_nothing():
    one, other = (
        run(dp_fedavg(MODEL, server_optimizer=fedadam(0.01), **PRIVATE)),
        run(dp_fedavg(MODEL, **PRIVATE)),
    )
    assert one.statement["honest"] == other.statement["honest"]
    assert not np.array_equal(
        one.server.params["head"]["bias"], other.server.params["head"]["bias"]
    )


@pytest.mark.slow
def test_its_rate_may_be_swept():
    rates = [0.01, 0.1]
    build = lambda rate: fedavg(MODEL, server_optimizer=fedadam(rate))  # noqa: E731
    points = sweep(KEY, build, {"rate": rates}, small_clients(), rounds=2, progress=False)
    norms = [float(optax.tree.norm(point.server.params)) for point in points]
    assert norms[0] != norms[1]


BUILDERS = [name for name in algorithms.__all__ if name not in SECOND]
USERS = [name for name in BUILDERS if "server_optimizer" in functions.arguments(name)]


def test_who_sends_weights_or_has_a_step_of_its_own_refuses_a_servers_optimizer():
    others = {*BUILDERS} - {*USERS}
    assert {*SEND_WEIGHTS, "adp_pfl_paper", "local_only", "ppsgd"} <= others
    for name in others:
        with pytest.raises(TypeError, match="server_optimizer"):
            functions.call(name, server_optimizer=fedadam(0.1))


@pytest.mark.slow
@pytest.mark.parametrize("name", USERS)
def test_who_takes_one_uses_it(name):
    frozen = functions.call(name, server_optimizer=optax.sgd(0.0))
    server, _ = frozen.init(KEY, 2)
    update = jax.tree.map(jnp.ones_like, _sent(frozen, server))
    after = frozen.server_update(server, update)
    jax.tree.map(np.testing.assert_array_equal, after.params, server.params)
    moves = functions.call(name, server_optimizer=fedadam(0.1))
    server, _ = moves.init(KEY, 2)
    assert (
        optax.tree.norm(optax.tree.sub(moves.server_update(server, update).params, server.params))
        > 0
    )


def _sent(algorithm, server):
    return (server.params, server.params) if algorithm.name == "scaffold" else server.params
