"""The cases and copies of the studies of PDP-FL and PADPFL."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.padpfl import __main__ as padpfl
from experiments.padpfl.setting import SCENARIOS, Scenario, Setting, impacts, on_copy, split
from experiments.pdp_fl import __main__ as pdp_fl
from jaxfl.algorithms import fedavg
from jaxfl.data import load
from jaxfl.engine.mesh import data_of
from jaxfl.models import mlp
from jaxfl.types import Message


def test_budgets_are_preferences_times_the_logarithm_of_the_total():
    unit = math.log2(50)
    for case, preference, level in ((1, 3, 2), (2, 8, 8)):
        asked = pdp_fl.budgets(case, 4)
        np.testing.assert_allclose(asked.epsilon, preference * unit)
        assert asked.level.tolist() == [level] * 4
    for case in (3, 4):
        drawn, grade = pdp_fl.budgets(case, 500), pdp_fl.budgets(case, 500).epsilon / unit
        assert grade.min() == pytest.approx(1)
        np.testing.assert_array_equal(
            drawn.level, np.where(grade < 3.5, 2, np.where(grade < 6.5, 5, 8))
        )


def test_the_server_adds_noise_in_case_2_and_none_in_case_1():
    setting = pdp_fl.Setting(clients=20, examples=60)
    model = mlp((8, 8, 1), 10, hidden=(16,))
    least = [
        pdp_fl.printed(setting, model, pdp_fl.budgets(case, 20)).mechanism.noise_multiplier_table[0]
        for case in (1, 2)
    ]
    # (2c / (m n)) sqrt(1/5^2 - 1/8^2) on the mean of n = 2 participants; on their sum, over the weight, n times that.
    c = math.sqrt(2 * math.log(1.25e5))
    assert least == [0, pytest.approx(2 * c / 60 * math.sqrt(1 / 25 - 1 / 64), rel=1e-5)]


SMALL = Setting(data="digits", clients=6, examples=12, rounds=4)


def seen(scenario: Scenario, index: int, number: int, client: int):
    """Labels and inputs of a client in a round, on a density's copy."""
    data = load("digits")
    clients = split(scenario, SMALL, data, (0.0, 1.0), 5, 0)
    base = fedavg(mlp((8, 8, 1), 10, hidden=(16,)))._replace(
        client_update=lambda key, server, state, data: (
            Message(data.take(jnp.arange(data.padded))),
            data.size,
            {},
        )
    )
    method = on_copy(base, scenario, SMALL, index, 2)
    own = data_of(clients, client, client, len(clients.train[client]), index=number)
    message, size, _ = method.client_update(jax.random.key(0), (), (), own)
    assert size == 12
    return message.update


@pytest.mark.parametrize("client", [0, 3, 5])
def test_a_client_trains_on_the_copy_of_its_density_and_half(client):
    # Client 0 has the severe noise in the first half of scenario 4, client 5 in the second.
    clean, labels = seen(SCENARIOS[4], 0, 0, client)
    share = {}
    for number in (0, 1, 2, 3):
        noisy, same = seen(SCENARIOS[4], 1, number, client)
        np.testing.assert_array_equal(labels, same)
        share[number] = float(np.mean(noisy != clean))
        np.testing.assert_array_equal(seen(SCENARIOS[4], 0, number, client)[0], clean)
    first, second = {0: (1.0, 0.1), 3: (0.5, 0.5), 5: (0.1, 1.0)}[client]
    assert share[0] == share[1]
    assert share[2] == share[3]
    assert np.sign(share[0] - share[2]) == np.sign(first - second) or first == second
    assert share[0] <= first
    assert share[2] <= second


def test_factors_of_the_parts_sum_to_one_and_follow_the_halves():
    np.testing.assert_allclose(
        impacts(SCENARIOS[1], SMALL, "0-1-2"), np.array([0, 0, 1, 1, 2, 2]) / 6
    )
    rows = impacts(SCENARIOS[4], SMALL, "0-1-2>2-1-0")
    np.testing.assert_allclose(
        rows, np.array([[0, 0, 1, 1, 2, 2]] * 2 + [[2, 2, 1, 1, 0, 0]] * 2) / 6
    )


def test_honest_noise_keeps_its_epsilon_for_the_client_with_the_largest_factor():
    # A client of factor p moves the sum by p C, as all do at most by max(p) C: one Gaussian of z / sqrt(T).
    for way in ("1-1-1", "0-1-2"):
        z = padpfl.honest_noise(SMALL, impacts(SCENARIOS[1], SMALL, way), 8.0)
        of_all = z / math.sqrt(SMALL.rounds)
        assert dp_accounting.get_epsilon_gaussian(of_all, SMALL.delta) == pytest.approx(
            8.0, rel=2e-3
        )
    halves = impacts(SCENARIOS[4], SMALL, "0-1-2>2-1-0")
    # Then no client has the largest factor in all rounds: 0 or 2 in either half, 1 in both.
    exposed = padpfl.honest_noise(SMALL, halves, 8.0) / math.sqrt(2 * max(1.0, 0.5))
    assert dp_accounting.get_epsilon_gaussian(exposed, SMALL.delta) == pytest.approx(8.0, rel=2e-3)


def test_tuning_examples_of_padpfl_belong_to_no_client():
    clients = split(SCENARIOS[1], SMALL, load("digits"), (0.0,), 5, 0, held_out=True)
    inputs = np.asarray(clients.inputs)
    trained = {row.tobytes() for rows in clients.train for row in inputs[rows]}
    tested = inputs[
        np.concatenate([rows[:n] for rows, n in zip(clients.test, clients.test_size, strict=True)])
    ]
    assert len(tested) > 500
    assert not trained & {row.tobytes() for row in tested}


def cell(scenario, best, equal):
    honest = [{"aggregate": 1.0, "upload": 2.0}] * 2
    return {
        "scenario": scenario,
        "rounds": 20,
        "density": 1.0,
        "best": best,
        "equal": equal,
        "honest": honest,
    }


def test_the_region_counts_cells_by_figure():
    held, not_held = [[0.9, 0.9], [0.4, 0.4]], [[0.9, 0.9], [0.4, 0.6]]
    cells = [cell(1, held, [0.5, 0.5]), cell(2, not_held, [0.5, 0.5]), cell(3, held, [0.5, 0.5])]
    result = {
        "cells": cells,
        "weak": 100.0,
        "ratios": [1.0, 4.0],
        "seeds": [0, 1],
        "date": "",
        "versions": {},
    }
    assert (
        "in these cells: figure 3: 1 of 1, figure 5: 0 of 1, figure 7: 1 of 1. Elsewhere it is not"
        in (padpfl.region_text(result))
    )


def test_honest_rows_compare_stronger_levels_with_the_weakest_of_equal_factors():
    def row(way, epsilon, loss):
        facts = {"scenario": 2, "density": 1.0, "way": way, "epsilon": epsilon, "clip": 0.1}
        return facts | {"loss": loss}

    rows = [
        row("0-2-1", 8.0, [0.6, 0.6]),
        row("0-2-1", 32.0, [0.4, 0.4]),
        row("0-2-1", 128.0, [0.1, 0.1]),
    ]
    rows += [
        row("0-2-1", math.inf, [0.1, 0.1]),
        row("1-1-1", 8.0, [0.3, 0.3]),
        row("1-1-1", 32.0, [0.3, 0.3]),
    ]
    rows += [row("1-1-1", 128.0, [0.5, 0.5]), row("1-1-1", math.inf, [0.2, 0.2])]
    result = {"rows": rows, "clips": [0.1, 0.3, 1.0], "setting": {"rounds": 4}}
    text = padpfl.honest_text(result | {"seeds": [0, 1], "date": "", "versions": {}})
    assert "equal factors at 128 in every seed in these cells: figure 5: 1 of 2. " in text
    assert "equal factors at the same level in these cells: figure 5: 1 of 3." in text
    assert "| 5 | 0-2-1 | 1 | 0.60 ± 0.00 (C 0.1*) | 0.40 ± 0.00 (C 0.1*) |" in text
