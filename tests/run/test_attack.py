"""Membership by the loss: closed forms of scores, and the effect of clipping and noise."""

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxfl import LocalSGD, membership, simulate
from jaxfl.algorithms import dp_fedavg, local_only, padpfl_paper
from jaxfl.data import iid, load, make_clients, matching
from jaxfl.models import mlp
from jaxfl.privacy import DPSGD, Full, Mechanism
from jaxfl.run.attack import _auc, _tpr

KEY = jax.random.key(9)
MODEL = mlp((8, 8, 1), 10, hidden=(64,))


@pytest.fixture(scope="module")
def clients():
    digits = load("digits")
    rows = iid(digits.train_labels, 6, seed=0, size=20)
    return make_clients(
        digits, rows, matching(rows, digits.train_labels, digits.test_labels, seed=0)
    )


def test_scores_are_their_definitions():
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 9, 40).astype(float), rng.integers(2, 12, 300).astype(float)
    pairs = (inside[:, None] < outside).mean() + 0.5 * (inside[:, None] == outside).mean()
    assert _auc(inside, outside) == pytest.approx(pairs)
    assert np.isnan(_auc(inside, outside[:0]))
    threshold = np.sort(outside)[3]
    assert _tpr(inside, outside) == np.mean(inside < threshold)
    assert (outside < threshold).mean() <= 0.01


def test_an_overfitted_upload_tells_its_examples_and_noise_hides_them(clients):
    """All training is the same. Only the uploads differ."""
    aucs = []
    for clip, noise in ((float("inf"), 0.0), (1.0, 5.0)):
        local = LocalSGD(optax.sgd(0.5), 5, 60)
        method = dp_fedavg(MODEL, clip=clip, noise_multiplier=0.0, sampling=Full(), local=local)
        if noise:
            method = method._replace(mechanism=Mechanism(clip=clip, client_noise=noise))
        result = simulate(KEY, method, clients, rounds=1, progress=False)
        attack = membership(KEY, method, result, clients)
        assert attack.auc_by_client.shape == (6,)
        aucs.append(attack.auc)
    assert aucs[0] > 0.7
    assert aucs[1] == pytest.approx(0.5, abs=0.12)


def test_noise_in_local_steps_is_each_clients_own(clients):
    def method(noise):
        local = DPSGD(
            clip=1.0, noise_multiplier=noise, rate=0.25, steps=4, optimizer=optax.sgd(0.5)
        )
        return dp_fedavg(MODEL, clip=1.0, noise_multiplier=0.0, sampling=Full(), local=local)

    silent, loud = method(np.zeros(6)), method(np.array([0.0, 0, 0, 0, 0, 1e3]))
    result = simulate(KEY, silent, clients, rounds=1, progress=False)
    first, second = (
        membership(KEY, attacked, result, clients).auc_by_client for attacked in (silent, loud)
    )
    np.testing.assert_array_equal(first != second, np.arange(6) == 5)


def test_weights_are_no_update(clients):
    options: dict[str, Any] = {
        "rounds": 1,
        "clip": 5.0,
        "smallest": 20,
        "local": LocalSGD(optax.sgd(0.1), 5),
    }
    method = padpfl_paper(MODEL, epsilon=math.inf, **options)
    result = simulate(KEY, method, clients, rounds=1, progress=False)
    with pytest.raises(ValueError, match="which sends weights"):
        membership(KEY, method, result, clients)


@pytest.mark.slow
def test_personal_models_are_attacked_as_they_are_evaluated(clients):
    method = local_only(MODEL, local=LocalSGD(optax.sgd(0.5), 5, 60))
    result = simulate(KEY, method, clients, rounds=1, progress=False)
    assert membership(KEY, method, result, clients, of="personal").auc > 0.7
    with pytest.raises(ValueError, match="sends no update of all parameters"):
        membership(KEY, method, result, clients)
