import logging
from typing import Any

import numpy as np
import pytest
from algorithms_table import MODEL, SIZES, small_clients

from jaxfl.algorithms import dp_fedavg, fedavg
from jaxfl.engine.round import Records
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.sampling import Full
from jaxfl.run.health import Watch
from jaxfl.types import Ledger

MAKE: Any = Records  # of host arrays, as a run reads them

C = len(SIZES)
PLAIN = fedavg(MODEL)
NOISY = dp_fedavg(MODEL, clip=1.0, noise_multiplier=1.0, sampling=Full())
NAMES = range(C)


def broken_clients(train=(), test=()):
    """Digits as floats; some clients have an example to train or to test on with a NaN or an infinity."""
    clients = small_clients()
    inputs = np.array(clients.inputs, np.float32)
    own = np.max(clients.train) + 1 + np.arange(C)  # rows of nobody else
    rows = np.array(clients.test)
    rows[list(test), -1] = own[list(test)]
    inputs[own[list(test)], 3] = np.inf
    inputs[[clients.train[i, clients.train_size[i] - 1] for i in train], 5] = np.nan
    return clients._replace(inputs=inputs, test=rows)


def records(dropped, participants, noise=0.0):
    """Rounds in which the first few clients take part."""
    dropped, participants = np.array(dropped), np.array(participants, np.float32)
    one = np.ones((len(dropped), 1), np.float32)
    ledger = Ledger(np.arange(C) < participants[:, None], 0 * one, one, noise * one[:, 0], one[:, 0])
    return MAKE(ledger, {"participants": participants}, dropped, np.ones(len(dropped), bool))


def watch(clients=None, *algorithms):
    return Watch("run", small_clients() if clients is None else clients, algorithms or [PLAIN])


def scores(*lost):
    accuracy = np.full(C, 0.5, np.float32)
    accuracy[list(lost)] = np.nan
    return {"accuracy": accuracy, "loss": accuracy}


def test_clients_with_broken_data_are_found():
    train, test = watch(broken_clients(train=(1, 7), test=(4,))).broken_data
    assert (np.flatnonzero(train).tolist(), np.flatnonzero(test).tolist()) == ([1, 7], [4])
    assert not np.any(watch().broken_data)  # bytes
    padding = broken_clients(train=(1, 7), test=(4,))
    inputs = np.array(padding.inputs)
    inputs[0] = np.nan  # where padding points: it is client 0's alone
    train, test = watch(padding._replace(inputs=inputs, test=padding.test + 50)).broken_data
    assert np.flatnonzero(train).tolist() == [0, 1, 7]


@pytest.mark.parametrize(
    ("dropped", "participants", "noise", "stops"),
    [
        ([0, 0, 4, 4], [4, 4, 4, 4], 0.0, True),  # nothing moves the server any more
        ([0, 0, 4, 4], [4, 4, 4, 4], 1.0, False),  # noise moves it, and methods go on like this
        ([4, 4, 4, 4], [4, 4, 4, 4], 1.0, True),  # no update has ever counted
        ([0, 0, 4, 3], [4, 4, 4, 4], 0.0, False),
        ([4, 4, 0, 0], [4, 4, 0, 0], 0.0, False),  # nobody took part
    ],
)
def test_a_run_stops_where_no_update_can_count(dropped, participants, noise, stops, caplog):
    own = records(dropped, participants, noise)
    if stops:
        with pytest.raises(FloatingPointError, match=r"8 of 8 updates since round 2 .* lower the learning rate"):
            watch().updates(own, 2, 4)
    else:
        watch().updates(own, 2, 4)
        assert bool(caplog.records) == (sum(dropped[2:]) > 0)


def test_a_cohort_of_broken_data_alone_stops_no_run():
    clients = broken_clients(train=(0, 1))
    watch(clients).updates(records([2, 2], [2, 2]), 0, 2)
    with pytest.raises(
        FloatingPointError, match=r"6 of 6 .*examples .clients 0, 1.: clean them; others diverged: lower the"
    ):
        watch(clients).updates(records([3, 3], [3, 3]), 0, 2)
    with pytest.raises(FloatingPointError, match=r"examples \(clients 0, 1, 3, 4, 5, \.\.\.\): clean them; none"):
        watch(broken_clients(train=[i for i in NAMES if SIZES[i]])).updates(records([1], [1]), 0, 1)


def test_more_than_a_tenth_of_the_updates_are_told_once_at_an_evaluation(caplog):
    found = watch()
    found.updates(records([1, 0], [10, 10]), 0, 2)
    assert not caplog.records
    for _ in range(2):
        found.updates(records([1, 2], [10, 10]), 0, 2)
    assert [r.getMessage() for r in caplog.records] == [
        "run: 3 of 20 updates were not finite and were dropped: lower the learning rate, or clip updates"
    ]
    found.end([records([1, 2], [10, 10])] * 2)
    assert "run: 6 of 40 updates were not finite" in caplog.text


def test_models_without_finite_scores_are_told_with_their_clients(caplog):
    found = watch(broken_clients(train=(1,), test=(4,)))
    found.scores([scores()], 10)
    assert not caplog.records
    for _ in range(2):
        found.scores([scores(1, 4, 7)], 20)
    assert [r.getMessage() for r in caplog.records] == [
        "run: 3 of 11 tested clients (clients 1, 4, 7) have no finite scores after round 20, which count as "
        "0; NaN or infinite examples (clients 1, 4): clean them; the others' personal models have "
        "diverged: lower the learning rate, or clip updates"
    ]
    caplog.clear()
    watch().scores([scores(), scores(*NAMES)], 20)
    assert "in 1 of 2 points, 11 of 11 tested clients (clients 0, 1, 2, 3, 4, ...)" in caplog.text
    assert "the shared model has diverged" in caplog.text


def test_no_test_example_is_told_once(caplog):
    clients = small_clients()
    found = watch(clients._replace(test_size=np.zeros_like(clients.test_size)))
    for _ in range(2):
        found.scores([scores(*NAMES)], 1)
    assert [r.getMessage() for r in caplog.records] == ["run: no client has a test example: scores are not known"]


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        (PLAIN, "lower the learning rate, or clip updates"),
        (NOISY, "lower the learning rate or the noise"),
        (
            fedavg(MODEL, local=DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.1, steps=1)),
            "lower the learning rate or the noise",
        ),
    ],
)
def test_remedies_fit_the_cause(algorithm, text, caplog):
    caplog.set_level(logging.WARNING)
    watch(None, PLAIN, algorithm).end([records([1], [3])])
    assert caplog.records[0].getMessage().endswith(f"dropped: {text}") or text in caplog.text


def test_dropped_updates_are_told_as_soon_as_they_are_a_tenth_and_once(caplog):
    own, found = records([0, 1, 1, 1], [4, 4, 40, 4]), watch()
    found.dropped([own], 0, 1)
    assert not caplog.records
    found.dropped([own], 0, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "run: 1 of 8 updates were not finite and were dropped: lower the learning rate, or clip updates"
    ]
    found.dropped([own], 0, 4)
    found.updates(own, 0, 4)
    assert len(caplog.records) == 1
    few = watch()
    few.dropped([own], 0, 3)  # 2 of 48
    assert len(caplog.records) == 1
