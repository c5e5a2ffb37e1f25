"""The studies of DP-pFedDSU, FedDPA and FedAvg: numbers, noise and verdicts."""

import math
from typing import Any

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import common
from experiments.dp_pfeddsu import __main__ as dp_pfeddsu
from experiments.dp_pfeddsu.setting import METHODS, Bench, sent_share
from experiments.fedavg import __main__ as fedavg
from experiments.feddpa import __main__ as feddpa
from experiments.study import Options
from jaxfl.algorithms import local_only
from jaxfl.algorithms.feddpa import paper_noise_multiplier
from jaxfl.data import from_arrays, make_clients
from jaxfl.engine.mesh import data_of
from jaxfl.local.train import fit_head
from jaxfl.models import mlp, resnet20


def test_the_papers_tables_agree_where_they_meet():
    table_2, centaur, sparse = (
        dp_pfeddsu.PAPER,
        METHODS.index("CENTAUR"),
        METHODS.index("DP-pFedDSU"),
    )
    for classes, parts in dp_pfeddsu.PAPER_PARTS.items():
        assert (parts[0], parts[-1]) == (table_2[classes][centaur], table_2[classes][sparse])
    of = {
        table: dict(zip(values, paper, strict=True))
        for table, (_, values, paper) in dp_pfeddsu.SWEPT.items()
    }
    assert of["table_5"][0.05] == of["table_6"][1]
    assert of["table_7"][0.2] == table_2[10][sparse]


def test_the_share_that_is_sent_counts_kernels_and_what_is_kept_whole():
    # ResNet-20's extractor has 269,072 weights; its last four convolutions, of 36,864, keep 1,844 each.
    assert sent_share(resnet20(), 0.05, 4) == pytest.approx(
        (269_072 - 4 * (36_864 - 1844)) / 269_072
    )
    assert sent_share(resnet20(), 1.0, 4) == 1


def test_clients_have_equal_sizes_and_validation_examples_are_not_trained_on():
    bench = Bench(Options(scale="smoke", seeds=(0,)))
    tested, held_out = bench.clients(5, 3), bench.held_out(5, 3)
    assert {*tested.train_size.tolist()} == {bench.setting.examples}
    labels = np.asarray(tested.labels)
    for own, kept, tests, validation in zip(
        tested.train, held_out.train, tested.test, held_out.test, strict=True
    ):
        assert {*labels[tests]} <= {*labels[own]}
        assert {*validation[:4]} == {*own} - {*kept}


def test_heads_on_an_untrained_extractor_send_nothing_but_zeros():
    bench = Bench(Options(scale="smoke", seeds=(0,)))
    method = bench.build("head alone", noise_multiplier=0.0, clip=1.0)
    server, states = method.init(jax.random.key(0), 1)
    data = data_of(jax.tree.map(jnp.asarray, bench.clients(5, 0)), 0, 0, bench.setting.examples)
    message, head, _ = method.client_update(
        jax.random.key(1), server, jax.tree.map(lambda leaf: leaf[0], states), data
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(message.update))
    assert any(
        np.any(a != b[0])
        for a, b in zip(jax.tree.leaves(head), jax.tree.leaves(states), strict=True)
    )


def test_a_head_on_features_is_the_untrained_networks():
    bench = Bench(Options(scale="smoke", seeds=(0,)))
    features = bench.features(0)
    clients = bench.clients(5, 0)
    data = data_of(jax.tree.map(jnp.asarray, clients), 0, 0, bench.setting.examples)
    weights = bench.model.init(jax.random.split(jax.random.key(0), 3)[0])
    local = bench.local(3, head=True)  # whole batches, which have no order
    head = mlp(features.shape[1:], bench.data.classes, hidden=())
    start = {"head": weights[bench.model.head[0]]}
    seen = data_of(
        jax.tree.map(jnp.asarray, clients._replace(inputs=features)), 0, 0, bench.setting.examples
    )
    fitted, _ = local.train(jax.random.key(1), head, start, seen)
    expected, _ = fit_head(jax.random.key(1), bench.model, weights, data, local=local)
    for name, leaf in expected[bench.model.head[0]].items():
        np.testing.assert_allclose(fitted["head"][name], leaf, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sigma", [0.5, 4.0])
def test_epsilons_of_feddpas_noise_are_those_of_one_gaussian(sigma):
    # Every client takes part in all 15 rounds with std sigma C / sqrt(10): one Gaussian of sigma / sqrt(15) for sums.
    found = feddpa.bounds(sigma, feddpa.Setting())
    of_sums = sigma / math.sqrt(15)
    exact = {
        "honest": (of_sums, 1e-5), "same_delta": (of_sums, 0.1), "replace_one": (of_sums / 2, 1e-5),
        "upload": (of_sums / math.sqrt(10) / 2, 1e-5),
    }  # fmt: skip
    for name, (multiplier, delta) in exact.items():
        assert found[name] == pytest.approx(
            dp_accounting.get_epsilon_gaussian(multiplier, delta), rel=1e-2
        ), name


def test_the_published_rule_claims_what_it_was_asked_for():
    setting = feddpa.Setting()
    sigma = paper_noise_multiplier(1.0, delta=setting.claimed_delta, **setting.rule)
    found = feddpa.bounds(sigma, setting)
    assert found["claim"] == pytest.approx(1.0, abs=0.02)
    assert found["same_delta"] > 30 * found["claim"]
    assert found["honest"] > found["same_delta"]
    assert feddpa.bounds(feddpa.needed(setting, 1e-5), setting)["honest"] == pytest.approx(
        1.0, abs=0.02
    )


def test_states_that_runs_left_are_tested_as_they_are():
    inputs, labels = np.eye(4, dtype=np.float32).reshape(4, 2, 2, 1), np.arange(4) % 2
    clients = make_clients(
        from_arrays(inputs, labels, inputs, labels), [[0, 1], [2, 3]], [[0, 1, 2], [3]]
    )
    model = mlp((2, 2, 1), 2, hidden=())

    def build(shift: Any) -> Any:
        right = lambda key, server, client, data: jax.tree.map(lambda leaf: leaf + shift, client)  # noqa: E731
        return local_only(model)._replace(personalize=right)

    weights = jax.tree.map(np.zeros_like, model.init(jax.random.key(0)))
    (layer,) = (name for name in weights if "kernel" in weights[name])
    weights[layer]["kernel"] = np.stack([1.0 - labels, 1.0 * labels], 1).astype(np.float32)
    states = jax.tree.map(lambda leaf: np.stack([leaf, -leaf]), weights)
    found = common.evaluated(build, {"shift": [0.0, 1.0]}, clients, 0, [((), states)] * 2)
    assert found == [
        0.5,
        0.5,
    ]  # the first client is always right, the second never; a shift of all weights decides nothing


def measured(accuracies, head):
    row = {"accuracy": [head], "classes": 5}
    result = {"floors": {"5": {"head alone": row}}}
    return result, [{"accuracy": [value], "classes": 5} for value in accuracies]


@pytest.mark.parametrize(
    ("accuracies", "text"),
    [
        (
            (0.51, 0.59, 0.72),
            "the accuracies are reproduced within 2.0 points (within 2.0 points; 3 of 3 orderings)",
        ),
        ((0.31, 0.32, 0.33), "the ordering is reproduced (within 37.0 points; 3 of 3 orderings)"),
        (
            (0.32, 0.33, 0.31),
            "accuracies and ordering are not reproduced, because at this clip bound all rows are within 3.0 points of heads",
        ),
        (
            (0.32, 0.39, 0.31),
            "accuracies and ordering are not reproduced, because the network, the examples and the rounds are not the paper's",
        ),
    ],
)
def test_a_verdict_names_its_reason(accuracies, text):
    result, rows = measured(accuracies, 0.30)
    assert dp_pfeddsu.verdict(result, (50, 60, 70), rows).startswith(text)


@pytest.mark.parametrize(
    ("accuracy", "text"),
    [
        (
            0.46,
            "do not explain the published accuracies. The best heads are below these by 40.3 (s = 2), 9.8 (s = 5), -2.1",
        ),
        (
            {2: 0.85, 5: 0.54, 10: 0.46},
            "heads on random features explain the published accuracies. The best heads are below these by 1.3 (s = 2), ",
        ),
    ],
)
def test_heads_on_random_features_explain_what_they_come_near(accuracy, text):
    own = accuracy if isinstance(accuracy, dict) else dict.fromkeys((2, 5, 10), accuracy)
    rows = [
        {"classes": classes, "accuracy": [value - less]}
        for classes, value in own.items()
        for less in (0.1, 0.0)
    ]
    assert text in dp_pfeddsu.explained({"rows": rows})


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        (
            {"CENTAUR": [2.0, 1.5], "DP-pFedDSU": [2.0, 1.0]},
            "Verdict: the figure is reproduced (falls for all: yes; ",
        ),
        (
            {"CENTAUR": [2.0, 2.5], "DP-pFedDSU": [2.0, 1.0]},
            "Verdict: the figure is not reproduced, because at this clip bound noise exceeds what is sent: the loss does not",
        ),
    ],
)
def test_figure_2_has_a_verdict(losses, told):
    rows = {name: {"train_loss": [curve]} for name, curve in losses.items()}
    assert told in dp_pfeddsu.figure_markdown(
        {"rows": rows, "seeds": [0], "date": "", "versions": {}}
    )


def test_fedavgs_readme_has_the_first_round_at_the_target():
    curves = [[0.2, 0.9, 0.96, 0.94], [0.2, 0.5, 0.6, 0.7]]
    row = {"rounds": [5, 10, 15, 20], "accuracy_by_round": curves}
    result = {
        "setting": fedavg.Setting()._asdict(),
        "rows": {"FedAvg": row},
        "seeds": [0, 1],
        "date": "",
        "versions": {},
    }
    text = fedavg.markdown(result)
    assert "at least 95%, by seed: 15, –." in text
    assert "| round | 5 | 10 | 20 |" in text
