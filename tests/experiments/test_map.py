"""The map of methods: its places, several scores of one run, and the texts about results."""

import math

import jax
import numpy as np
import optax
import pytest
from algorithms_table import MODEL, small_clients

from experiments.common import constant_scores
from experiments.map import methods, places, report, tuning
from experiments.map.__main__ import STUDIES, mixed_families
from experiments.map.places import PLACES
from jaxfl import LocalSGD, simulate
from jaxfl.algorithms import dp_fedavg, dp_fedavg_mixed, fine_tuned
from jaxfl.data import Dataset, make_clients
from jaxfl.privacy import Poisson

PLACE = places.Place("digits", "pixels", "5 classes", 40, rounds=2, passes=2, batch_size=8)
PRIVATE = {"clip": 0.5, "noise_multiplier": 1.0, "sampling": Poisson(0.6)}
LOCAL = LocalSGD(optax.sgd(0.1), 4)


def test_one_run_is_scored_as_each_way_would_score_it_alone():
    base = dp_fedavg(MODEL, local=LOCAL, **PRIVATE)
    ways = {
        "plain": methods.plain,
        "corrected": methods.corrected,
        "tuned": lambda method: fine_tuned(methods.corrected(method), local=LOCAL),
    }
    clients = small_clients()
    several = simulate(0, methods.scored(base, ways), clients, rounds=2, progress=False)
    for name, way in ways.items():
        alone = simulate(0, way(base), clients, rounds=2, progress=False)
        np.testing.assert_allclose(several.scores[name], alone.scores["accuracy"], atol=1e-6)
        for own, theirs in zip(*map(jax.tree.leaves, (several.server, alone.server)), strict=True):
            np.testing.assert_array_equal(own, theirs)


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("scaled_4", {"penalty": 4.0, "tuning": None}),
        ("fine_tuned_corrected", {"penalty": None, "smoothing": methods.SMOOTHING}),
    ],
)
def test_a_mixture_is_the_recipe_of_the_library(way, options):
    place = PLACE._replace(unseen=0.0)
    alone = {"linear": methods.Alone(0.2, 3), "perceptron": methods.Alone(0.1, 2)}
    model, linear = methods.networks(place, (8, 8, 1), 10)
    family = methods.families(place, model, linear, alone)["scaled linear DP-FedAvg"]
    numbers = {"rate": 0.1, "clip": 0.5, "tuning": 0.05, "train": 20.0}
    found = family.mixtures[way](**numbers, noise_multiplier=0.7)
    tuning = LocalSGD(optax.sgd(0.05), 8, methods.FINE_TUNING_PASSES)
    recipe = dp_fedavg_mixed(
        linear,
        clip=0.5,
        noise_multiplier=0.7,
        sampling=Poisson(place.share),
        local=LocalSGD(optax.sgd(0.1), 8, 1),
        train=20.0,
        alone=LocalSGD(optax.sgd(0.2), 8, 3),
        **{"tuning": tuning} | options,
    )
    clients = places.clients_of(place, 0)
    scores = [
        simulate(3, method, clients, rounds=2, progress=False).scores for method in (found, recipe)
    ]
    np.testing.assert_allclose(scores[0][f"mixed_{way}"], scores[1]["accuracy"], atol=1e-6)


def test_clients_that_never_take_part_leave_no_trace_in_the_model():
    clients = small_clients()
    method = methods.only_participants(dp_fedavg(MODEL, local=LOCAL, **PRIVATE), 3)
    labels = np.asarray(clients.labels).copy()
    rows = np.concatenate(
        [
            np.asarray(clients.train[i])[: clients.train_size[i]]
            for i in range(3, clients.num_clients)
        ]
    )
    labels[rows] = (labels[rows] + 1) % 10
    results = [
        simulate(0, method, own, rounds=3, progress=False)
        for own in (clients, clients._replace(labels=labels))
    ]
    for own, theirs in zip(*(jax.tree.leaves(result.server) for result in results), strict=True):
        np.testing.assert_array_equal(own, theirs)
    moved = simulate(0, dp_fedavg(MODEL, local=LOCAL, **PRIVATE), clients, rounds=3, progress=False)
    assert any(
        np.any(own != other)
        for own, other in zip(
            jax.tree.leaves(results[0].server), jax.tree.leaves(moved.server), strict=True
        )
    )


def test_every_method_has_as_many_points():
    model, linear = methods.networks(PLACE, (8, 8, 1), 10)
    families = methods.families(PLACE, model, linear, {})
    for family in families.values():
        assert {len(column) for column in family.points.values()} == {methods.POINTS}
        assert {len(set(column)) for column in family.points.values()} == {methods.POINTS}


def test_groups_of_clients_have_pictures_turned_alike_and_names_of_their_own():
    pictures = np.arange(8 * 9, dtype=np.uint8).reshape(8, 3, 3, 1)
    labels = np.arange(8, dtype=np.int32)
    data = Dataset(pictures, labels, pictures, labels, 10, "some")
    turned = places.rotated(data).train_inputs
    np.testing.assert_array_equal(turned[0], pictures[0])
    np.testing.assert_array_equal(turned[6], pictures[6, ::-1, ::-1])
    np.testing.assert_array_equal(turned[5, :, :, 0], np.rot90(pictures[5, :, :, 0]))
    renamed = places.permuted(
        data._replace(train_labels=np.repeat(np.arange(2, dtype=np.int32), 4))
    ).train_labels
    orders = [np.random.default_rng(group).permutation(10) for group in range(4)]
    np.testing.assert_array_equal(renamed, [order[label] for label in (0, 1) for order in orders])


def test_a_client_of_a_group_has_examples_of_that_group_alone():
    generator = np.random.default_rng(0)
    groups = generator.permutation(np.arange(10) % 4)
    train = places._dealt(101, groups, generator)
    test = places._drawn(40, groups, 3, generator)
    assert sorted(np.concatenate(train)) == list(range(101))
    for group, own, tested in zip(groups, train, test, strict=True):
        assert set(own % 4) == {group}
        assert set(tested % 4) == {group}
        assert len(set(tested)) == 3


def test_a_number_at_an_end_of_its_grid_is_tried_beyond_it():
    family = methods.Family(dp_fedavg, {"rate": [0.1, 0.2, 0.4], "density": [0.3, 0.8, 0.5]}, 1)
    point = tuning.as_point({"rate": 0.4, "density": 0.8}, 1.0)
    low = tuning.as_point({"rate": 0.2, "density": 0.3}, 1.0)
    scores = {point: {"plain": np.array([0.9])}, low: {"plain": np.array([0.1])}}
    place = PLACE._replace(clients=1, unseen=0.0)
    wider = {
        (dict(own)["rate"], dict(own)["density"])
        for own in tuning._wider(place, family, scores, "plain", 1.0)
    }
    # A density of 1.6 would be no share, so that rates alone go on, by factors of 2.
    assert wider == {(0.8, 0.8), (1.6, 0.8)}


def test_both_tuning_seeds_choose_a_point():
    points = [tuning.as_point({"rate": rate}, 1.0) for rate in (0.1, 0.2, 0.3)]
    first = {
        point: {"plain": np.array([score, math.nan, 0.0])}
        for point, score in zip(points, (0.9, 0.8, 0.99), strict=True)
    }
    second = {
        point: {"plain": np.array([score, math.nan, 0.0])}
        for point, score in zip(points[:2], (0.2, 0.9), strict=True)
    }
    place = PLACE._replace(clients=3, unseen=1 / 3)
    best, _, score = tuning._chosen(place, [first, second], "plain", 1.0)
    assert best == points[1]
    assert score == pytest.approx((0.8 + 0.9) / 2)


def result_of(changed=None):
    """Return a place's result with equal scores in both seeds, so that intervals have no width."""
    scores = {
        ("local-only", "plain", math.inf): 0.5,
        ("linear local-only", "plain", math.inf): 0.55,
        ("linear DP-FedAvg", "plain", 1.0): 0.4,
        ("linear DP-FedAvg", "own_classes", 1.0): 0.6,
        ("linear DP-FedAvg", "corrected", 1.0): 0.7,
        ("linear DP-FedAvg", "fine_tuned", 1.0): 0.65,
        ("Ditto", "plain", 1.0): 0.6,
    } | (changed or {})
    found = {}
    for (method, way, epsilon), score in scores.items():
        own = found.setdefault(method, {"tuning": [], "rows": [], "seconds": 36.0})
        own["rows"] += [
            {"way": way, "epsilon": epsilon, "seed": s, "score": score, "unseen": score}
            for s in (0, 1)
        ]
        tuned = {
            "way": way,
            "epsilon": epsilon,
            "chosen": {"rate": 0.1, "epsilon": epsilon},
            "validation": score,
        }
        own["tuning"].append(tuned | {"evaluation": 0, "points": 20})
    name = "mixed_fine_tuned_corrected"
    tuned = {
        "way": name,
        "epsilon": 1.0,
        "chosen": {"epsilon": 1.0},
        "validation": 0.68,
        "evaluation": 0,
        "points": 1,
    }
    mixture = [{"way": name, "epsilon": 1.0, "seed": s, "score": 0.68} for s in (0, 1)]
    found[report.RECIPE_PARTS[0]] = {"tuning": [tuned], "rows": mixture, "seconds": 36.0}
    place = PLACES[1]._asdict() | {"title": PLACES[1].title, "participants": PLACES[1].participants}
    facts = {"study": "place", "seeds": [0, 1], "date": "2026-01-01", "versions": {"jax": "1"}}
    constant = {"all": [0.1, 0.1], "own": [0.2, 0.2]}
    return {"place": place, "methods": found, "constant": constant} | facts


def test_one_class_for_all_examples_scores_its_share():
    labels = np.array([0, 0, 1, 2, 2, 1, 2, 1, 1, 0])
    # The third client never takes part. The most frequent class of the others is 0.
    train = [[0, 1, 2], [3, 4, 9], [5, 7, 8]]
    test = [[0, 2, 3, 4], [6], [5]]
    clients = make_clients((np.zeros((10, 2)), labels, np.zeros((10, 2)), labels), train, test)
    assert constant_scores(clients, 2) == ((1 / 4 + 0) / 2, (1 / 4 + 1) / 2)


def test_a_client_without_training_examples_has_the_most_frequent_class_of_all():
    labels = np.array([0, 0, 1, 0, 1])
    data = (np.zeros((5, 2)), labels, np.zeros((5, 2)), labels)
    clients = make_clients(data, [[0, 1, 2], []], [[4], [3]])
    assert constant_scores(clients) == (1 / 2, 1 / 2)


def test_what_is_above_the_best_on_validation_is_not_below_it():
    result = result_of()
    for row in result["methods"]["Ditto"]["rows"]:
        row["score"] = 0.95
    assert "Not below it: Ditto." in report.summary(result, 1.0)


def test_a_place_of_one_seed_has_no_intervals():
    result = result_of()
    for own in result["methods"].values():
        own["rows"] = [row for row in own["rows"] if row["seed"] == 0]
    assert "+15.0 over training alone" in report.markdown(result)


def test_a_run_without_updates_has_no_score(monkeypatch):
    point = tuning.as_point({"rate": 0.1}, 1.0)
    dropped = {point: {"plain": np.full(40, tuning.ALL_DROPPED, np.float32)}}
    monkeypatch.setattr(tuning, "_run", lambda *_, **__: dropped)
    family = methods.Family(dp_fedavg, {"rate": [0.1]}, 1)
    (row,) = tuning._scores(
        family, PLACE, {("plain", 1.0): (point, 0)}, places.clients_of(PLACE, 0), 0
    )
    assert math.isnan(row["score"])


def test_students_are_tested_on_the_same_ratings_for_every_seed():
    owners = np.repeat(np.arange(6), 10)
    tested = [places._by_owner(owners, np.random.default_rng(seed))[1] for seed in (0, 100)]
    assert {tuple(sorted(own)) for own in tested[0]} == {tuple(sorted(own)) for own in tested[1]}
    assert [own[0] for own in tested[0]] != [own[0] for own in tested[1]]


def test_a_place_shows_the_best_first_and_says_what_is_not_below():
    text = report.markdown(result_of({("Ditto", "corrected", 1.0): 0.7}))
    lines = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| ")]
    assert lines[2] == ["| linear DP-FedAvg, corrected", "70.0 ± 0.0"]
    assert ["| linear local-only", "55.0 ± 0.0"] in lines
    assert (
        "Best on validation examples: linear DP-FedAvg, corrected, 70.0 ± 0.0, +15.0 (+15.0 to +15.0) over"
        in text
    )
    assert "Not below it: Ditto, corrected." in text
    assert "The recipe differs from training alone by +13.0 (+13.0 to +13.0)." in text
    assert "0.05 core-hours" in text


def test_the_correction_without_smoothing_is_shown_where_validation_prefers_it():
    text = report.table(result_of({("linear DP-FedAvg", "own_classes", 1.0): 0.75}))
    assert "| linear DP-FedAvg, corrected | 75.0 ± 0.0" in text
    assert "| 70.0" not in text


def test_the_front_page_has_three_sentences_of_the_results():
    other = {
        ("linear DP-FedAvg", "corrected", 1.0): 0.62,
        ("linear DP-FedAvg", "own_classes", 1.0): 0.5,
    }
    lines = report.answer({"a": result_of(), "b": result_of(other)}).splitlines()
    assert "changes accuracy by +22.0 to +30.0 points at ε 1" in lines[2]
    assert "differs from training alone by +13.0 points at ε 1" in lines[3]
    where = "(linear DP-FedAvg, corrected, 1,000 clients, 5 classes each, ε 1)"
    assert f"differs from the recipe by at most +2.0 (+2.0 to +2.0) points {where}." in lines[4]


def test_the_front_page_has_what_the_counter_run_found():
    """The best on validation examples counts, even if another one is better on test examples."""
    tuned = {"way": "plain", "epsilon": 1.0, "validation": 0.66}
    tried = {"X": [tuned], "Y": [tuned | {"validation": 0.5}]}
    tried["alone"] = [tuned | {"epsilon": math.inf, "validation": 0.6}]
    tested = [
        {"method": method, "epsilon": tried[method][0]["epsilon"], "seed": seed, "score": score}
        for method, score in (("X", 0.72), ("Y", 0.9), ("alone", 0.58))
        for seed in (0, 1)
    ]
    own = {
        "title": "digits, 4 clients, permuted",
        "tried": tried,
        "tested": tested,
        "seconds": 36.0,
    }
    counter = {
        "places": {"a": own},
        "seeds": [0, 1],
        "date": "2026-01-01",
        "versions": {"jax": "1"},
    }
    gains = report.counter_gains(own, result_of())
    found = {method: row["difference"] for (method, _), row in gains.items()}
    assert found == pytest.approx({"X": 0.04, "Y": 0.22, "alone": -0.1})
    text = report.answer({"a": result_of()}, counter)
    assert "tried 2 further private settings at 1 places" in text
    assert (
        "The highest of these differs from the recipe by +4.0 (+4.0 to +4.0) points (X, permuted, ε 1)."
        in text
    )
    assert "| alone | 60.0 |  |" in report.counter_run(counter)


def test_the_best_families_on_validation_examples_are_mixed_and_one_of_the_recipe():
    scores = {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6, "linear DP-FedAvg": 0.1}
    scores["scaled linear DP-FedAvg"] = 0.2
    parts = {
        name: {"tuning": [{"epsilon": 1.0, "validation": score}]} for name, score in scores.items()
    }
    assert mixed_families(parts, [1.0]) == ["a", "b", "c", "scaled linear DP-FedAvg"]


def test_the_recipe_is_what_is_best_on_validation_examples():
    result = result_of()
    part = result["methods"][report.RECIPE_PARTS[0]]
    better = {"way": "mixed_scaled_4", "validation": 0.69}
    result["methods"][report.RECIPE_PARTS[1]] = {
        "tuning": [part["tuning"][0] | better],
        "rows": [row | {"way": "mixed_scaled_4", "score": 0.66} for row in part["rows"]],
        "seconds": 1.0,
    }
    assert "The recipe differs from training alone by +11.0 (+11.0 to +11.0)." in report.markdown(
        result
    )


def test_all_places_have_a_study_of_their_own():
    assert {"counter", "withdrawn", *(place.name for place in PLACES)} == STUDIES.keys()
    assert all(name.isascii() and name.replace("_", "").isalnum() for name in STUDIES)
