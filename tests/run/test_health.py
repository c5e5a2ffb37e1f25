import logging
from typing import Any

import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, MODEL, SIZES, small_clients
from reference import padded

from jaxfl import simulate
from jaxfl.algorithms import dp_fedavg, fedavg
from jaxfl.engine.round import Records
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.sampling import Full
from jaxfl.run.health import Watch, _like_weights, remedy
from jaxfl.tasks import regression
from jaxfl.types import Ledger, Lists, Message

MAKE: Any = Records  # of host arrays, as a run reads them

C = len(SIZES)
PLAIN = fedavg(MODEL)
NOISY = dp_fedavg(MODEL, clip=1.0, noise_multiplier=1.0, sampling=Full())
NAMES = range(C)


def broken_clients(train=(), test=()):
    """Return clients of which some have a training example with NaN, or a test example with inf."""
    clients = small_clients()
    inputs = np.array(clients.inputs, np.float32)
    own = np.max(clients.train.flat) + 1 + np.arange(C)  # rows of nobody else
    rows = padded(clients.test)
    rows[list(test), -1] = own[list(test)]
    inputs[own[list(test)], 3] = np.inf
    inputs[[clients.train[i][-1] for i in train], 5] = np.nan
    return clients._replace(inputs=inputs, test=Lists.of(rows))


def records(dropped, participants, noise=0.0):
    """Return the records of rounds in which the first few clients take part."""
    dropped, participants = np.array(dropped), np.array(participants, np.float32)
    one = np.ones((len(dropped), 1), np.float32)
    ledger = Ledger(
        np.arange(C) < participants[:, None], 0 * one, one, noise * one[:, 0], one[:, 0]
    )
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
    moved = Lists(padding.test.flat + 50, padding.test.start)
    train, test = watch(padding._replace(inputs=inputs, test=moved)).broken_data
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
        with pytest.raises(
            FloatingPointError, match=r"8 of 8 updates since round 2 .* lower the learning rate"
        ):
            watch().updates(own, 2, 4)
    else:
        watch().updates(own, 2, 4)
        assert bool(caplog.records) == (sum(dropped[2:]) > 0)


def test_a_cohort_of_broken_data_alone_stops_no_run():
    clients = broken_clients(train=(0, 1))
    watch(clients).updates(records([2, 2], [2, 2]), 0, 2)
    with pytest.raises(
        FloatingPointError,
        match=r"6 of 6 .*examples .clients 0, 1.: clean them; others diverged: lower the",
    ):
        watch(clients).updates(records([3, 3], [3, 3]), 0, 2)
    with pytest.raises(
        FloatingPointError, match=r"examples \(clients 0, 1, 3, 4, 5, \.\.\.\): clean them; none"
    ):
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


def test_clients_without_finite_scores_do_not_count_as_0_if_lower_is_better(caplog):
    regressing = PLAIN._replace(model=MODEL._replace(task=regression()))
    watch(None, regressing).scores([scores(1)], 5)
    assert "no finite scores after round 5, so that means are NaN" in caplog.text


def test_models_without_finite_scores_are_told_with_their_clients(caplog):
    found = watch(broken_clients(train=(1,), test=(4,)))
    found.scores([scores()], 10)
    assert not caplog.records
    for _ in range(2):
        found.scores([scores(1, 4, 7)], 20)
    assert [r.getMessage() for r in caplog.records] == [
        "run: 3 of 11 tested clients (clients 1, 4, 7) have no finite scores after round 20, which count as "
        "0; NaN or infinite examples (clients 1, 4): clean them; the others' models have "
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
    assert [r.getMessage() for r in caplog.records] == [
        "run: no client has a test example, so scores are not known. Give test rows to "
        "make_clients, or a dataset as `central`"
    ]


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


def sends_weights_by_mistake(method):
    """Return the method with weights in its messages, although its server adds updates."""

    def client_update(key, server, client, data):
        message, client, info = method.client_update(key, server, client, data)
        return Message(optax.tree.add(server.params, message.update)), client, info

    return method._replace(client_update=client_update)


MISTAKEN = {
    "fedavg": lambda: fedavg(MODEL, local=LocalSGD(optax.sgd(0.1), 4)),
    "clipped": lambda: dp_fedavg(MODEL, clip=1.0, noise_multiplier=0.0, sampling=Full()),
    "adam on the server": lambda: fedavg(MODEL, server_optimizer=optax.adam(0.01)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKEN)
def test_weights_in_place_of_a_difference_are_named(name, caplog):
    method = MISTAKEN[name]()
    simulate(0, method, small_clients(), rounds=1, progress=False)
    assert "as long as the weights" not in caplog.text
    simulate(0, sends_weights_by_mistake(method), small_clients(), rounds=1, progress=False)
    assert caplog.text.count("the updates of the first round are as long as the weights") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fedavg", "feddpa", "ditto", "dp_pfeddsu", "scaffold", "padpfl_paper", "ppsgd"]
)
@pytest.mark.parametrize("sgd", [0.1, 3.0])
def test_what_methods_send_is_not_taken_for_weights(name, sgd, caplog):
    simulate(0, ALGORITHMS[name](z=0.0, sgd=sgd), small_clients(), rounds=1, progress=False)
    assert "as long as the weights" not in caplog.text


def test_only_steps_along_the_weights_and_of_their_length_look_like_weights():
    rng = np.random.default_rng(0)
    old = rng.normal(size=500)
    other = rng.normal(size=500) * np.linalg.norm(old) / 500**0.5
    assert _like_weights(old, 2 * old + 0.3 * other, np.linalg.norm(old))
    assert not _like_weights(old, 2 * old, 0.01 * np.linalg.norm(old))  # growth of a trained model
    assert not _like_weights(old, old + other, np.linalg.norm(other))
    assert not _like_weights(old, 0 * old, np.linalg.norm(old))  # decay
    assert not _like_weights(0 * old, other, np.linalg.norm(other))
    assert not _like_weights(np.ones(2), 2 * np.ones(2), 2**0.5)


def test_the_remedy_of_lost_models_names_indices_that_nothing_has_checked():
    tokens = small_clients()._replace(inputs=np.zeros((10, 4), np.int32))
    assert "if clients.inputs index a table, give the model `vocabulary`" in remedy([PLAIN], tokens)
    known = PLAIN._replace(model=MODEL._replace(vocabulary=5))
    for method, clients in ((known, tokens), (PLAIN, small_clients())):
        assert remedy([method], clients) == "lower the learning rate, or clip updates"


def test_a_public_report_names_and_counts_no_client(caplog):
    found = Watch("run", broken_clients(train=(1,), test=(4,)), [PLAIN], public=True)
    found.scores([scores(1, 4, 7)], 20)
    found.dropped([records([3, 3], [4, 4])], 0, 2)
    with pytest.raises(FloatingPointError, match="some updates were not finite"):
        found.updates(records([3, 3], [3, 3]), 0, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "run: some tested clients have no finite scores after round 20, which count as 0; NaN or infinite examples: "
        "clean them; the others' models have diverged: lower the learning rate, or clip updates",
        "run: some updates were not finite and were dropped: NaN or infinite training examples: clean them; others "
        "diverged: lower the learning rate, or clip updates",
    ]


@pytest.mark.parametrize(
    ("clipped", "public", "expected"),
    [
        ([1, 1, 1, 0], False, "longer than its `clip` (mean norm 2)"),
        ([1, 1, 1, 0], True, "longer than its `clip`, so that"),
        ([1, 0.9, 1, 0], False, None),
        ([1, 1, 0, 0], False, None),
    ],
)
def test_runs_whose_updates_are_all_clipped_get_advice(caplog, clipped, public, expected):
    """The last round has not run, so its zeros do not count."""
    made = records([0] * 4, [10, 10, 10, 0] if clipped[2] else [10, 10, 0, 0])
    norms = {"clipped": np.array(clipped, float), "update_norm": np.array([1.0, 2.0, 3.0, 0.0])}
    made = made._replace(info=made.info | norms)
    caplog.set_level(logging.WARNING, "jaxfl")
    Watch("run", small_clients(), [NOISY], public=public).end([made])
    if expected is None:
        assert not caplog.messages
    else:
        assert expected in caplog.messages[0]
        assert "raise `clip`: epsilon stays" in caplog.messages[0]
