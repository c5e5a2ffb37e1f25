"""Bytes, compared with counts by hand, hours, with a plain loop, and runs with dropouts."""

import functools
import json
import math

import jax
import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, MECHANISMS, MODEL, SIZES, small_clients, untrained

import jaxfl
from jaxfl import Clock, LocalSGD, deployment_cost, plot_costs, simulate, sweep, traffic
from jaxfl.algorithms import blur_lus, dp_fedavg, dp_pfeddsu, fed_smp, fedavg, fedbuff, local_only
from jaxfl.models import lora, mlp
from jaxfl.privacy import Dropouts, FixedSize, Full, Mechanism, Poisson, Skellam

KEY = jax.random.key(3)
CLIENTS = small_clients()
QUIET = {"rounds": 4, "eval_every": 2, "progress": False}
LOCAL = LocalSGD(optax.sgd(0.1), 4)
EXTRACTOR = 64 * 16 + 16
HEAD = 16 * 10 + 10
ALL = EXTRACTOR + HEAD
BITMAP = math.ceil(ALL / 8)
KEPT = math.ceil(0.1 * 64 * 16) + 16 + math.ceil(0.1 * 16 * 10) + 10
"""Number of weights that a mask of a tenth keeps, with all biases."""


def private(sampling=Poisson(0.6)):
    return dp_fedavg(MODEL, clip=1.0, noise_multiplier=2.0, sampling=sampling, local=LOCAL)


BY_HAND = {
    # All layers, and for Ditto those of the global model alone.
    "fedavg": (4 * ALL, 4 * ALL, 4 * ALL),
    "ditto": (4 * ALL, 4 * ALL, 0),
    # Heads stay with the clients, or are all that they send.
    "fedrep": (4 * EXTRACTOR, 4 * EXTRACTOR, 4 * EXTRACTOR),
    "dp_lg": (4 * HEAD, 4 * HEAD, 4 * HEAD),
    # Weights and control variates.
    "scaffold": (8 * ALL, 8 * ALL, 4 * ALL),
    # Every cluster's model comes down, and one update goes up to each of them.
    "ifca": (3 * 4 * ALL, 3 * 4 * ALL, 3 * 4 * ALL),
    # Second moments of 16 features with a constant, and their products with 10 labels.
    "dp_ridge": (4 * (17 * 17 + 17 * 10), 4 * EXTRACTOR, 4 * ALL),
    # Prototypes and shares of classes. A client needs the kernel, from which the bias follows.
    "dp_prototypes": (4 * (10 * 16 + 10), 4 * EXTRACTOR, 4 * (ALL - 10)),
    # A released number.
    "adp_pfl_released": (4 * ALL + 4, 4 * ALL, 4 * ALL),
    "local_only": (0, 0, 0),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_are_those_of_a_count_by_hand(name):
    assert tuple(traffic(ALGORITHMS[name](), CLIENTS)) == BY_HAND[name]


def test_a_masked_update_is_sent_as_its_values():
    options = {"clip": 1.0, "noise_multiplier": 1.0, "sampling": Full(), "local": LOCAL}
    # All know a public mask, whose bits come down with the weights.
    public = traffic(fed_smp(MODEL, density=0.1, **options), CLIENTS)
    assert (public.up, public.down) == (4 * KEPT, 4 * ALL + BITMAP)
    # A private mask is sent with the values.
    found = traffic(blur_lus(MODEL, density=0.1, **options), CLIENTS)
    assert found.up == math.ceil((32 * KEPT + ALL) / 8)
    # All values are shorter than a bitmap and nearly all values.
    assert traffic(blur_lus(MODEL, density=0.99, **options), CLIENTS).up == 4 * ALL
    # Noise of clients leaves no zeros.
    noisy = Mechanism(clip=1.0, client_noise=1.0)
    dense = blur_lus(MODEL, density=0.1, **options)._replace(mechanism=noisy)
    assert traffic(dense, CLIENTS).up == 4 * ALL


@pytest.mark.parametrize("source", ["broadcast", "local_step"])
def test_a_count_of_masked_values_is_that_of_a_message(source):
    method = dp_pfeddsu(
        MODEL, sampling=Full(), noise_multiplier=0.0, density=0.25, mask_source=source, local=LOCAL
    )
    server, client = method.init(KEY, 1)
    own = jax.tree.map(lambda leaf: leaf[0], client)
    population = jaxfl.engine.mesh.place(CLIENTS, jax.devices()[:1])
    data = jaxfl.engine.mesh.data_of(population.clients, 0, 0, 9)
    message, *_ = method.client_update(KEY, server, own, data)
    sent = sum(np.count_nonzero(leaf) for leaf in jax.tree.leaves(message.update))
    assert method.sparse is not None
    values = method.sparse.values(message.update)
    assert values == 64 * 16 / 4 + 16
    # Pixels that are always 0 have weights that do not move.
    assert 0.7 * values < sent <= values


@pytest.mark.parametrize(("name", "further"), [("adaptive clip", 1), ("krum", 0), ("skellam", 0)])
def test_bytes_of_a_mechanism(name, further):
    linear = 64 * 10 + 10
    assert traffic(untrained(MECHANISMS[name]), CLIENTS).up == 4 * (linear + further)


def test_a_modulus_has_fewer_bits():
    shares = Skellam(clip=0.2, noise_multiplier=2.0, sampling=FixedSize(8), steps=64, bits=13)
    assert traffic(untrained(shares), CLIENTS).up == math.ceil(13 * 650 / 8)


def test_a_stale_client_receives_one_state():
    assert traffic(fedbuff(private(), staleness=5), CLIENTS) == traffic(private(), CLIENTS)


def test_frozen_weights_are_not_sent():
    network = mlp((8, 8, 1), 10, hidden=(16,))
    adapted = lora(network, network.init(KEY), rank=2)
    trained = sum(leaf.size for leaf in jax.tree.leaves(adapted.init(KEY)))
    assert trained < ALL
    assert traffic(fedavg(adapted, local=LOCAL), CLIENTS) == (4 * trained,) * 3


def test_rows_of_a_run_and_of_a_sweep_have_the_bytes(tmp_path):
    result = simulate(KEY, private(), CLIENTS, folder=tmp_path, **QUIET)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for row in (*result.metrics, *map(json.loads, lines)):
        assert (row["bytes_up"], row["bytes_down"]) == (4 * ALL, 4 * ALL)
    page = jaxfl.write_report(tmp_path).read_text()
    assert "bytes that a participant sends in a round" in page
    options = {"clip": 1.0, "noise_multiplier": 1.0, "sampling": Full(), "local": LOCAL}
    build = functools.partial(fed_smp, MODEL, **options)
    few, many = sweep(KEY, build, {"density": [0.1, 0.5]}, CLIENTS, **QUIET)
    assert few.metrics[-1]["bytes_up"] == 4 * KEPT
    assert many.metrics[-1]["bytes_up"] == 4 * (512 + 16 + 80 + 10)


def test_a_comparison_has_the_bytes_of_its_methods(tmp_path):
    candidate = jaxfl.Candidate(private, {"sampling": [Poisson(0.6)]})
    options = {"rounds": 1, "seeds": (0,), "folder": tmp_path, "progress": False}
    found = jaxfl.compare({"dp_fedavg": candidate}, CLIENTS, **options)
    assert found.mean("dp_fedavg", math.inf, "bytes_up")[0] == 4 * ALL
    assert "| dp_fedavg | 4,840 |" in found.to_markdown("bytes_down")
    page = (tmp_path / "report.html").read_text()
    assert "Bytes are those of one participant in one round" in page


def test_hours_and_bytes_so_far_are_those_of_a_plain_loop():
    generator = np.random.default_rng(0)
    speed = generator.lognormal(1.0, 1.0, len(SIZES))
    upload = generator.lognormal(8.0, 1.0, len(SIZES))
    clock = Clock(speed, upload=upload, download=1e4, passes=3)
    result = simulate(KEY, private(), CLIENTS, **QUIET)
    rows = deployment_cost(result, clock)
    assert [row["round"] for row in rows] == [2, 4]
    for row in rows:
        seconds, messages = 0.0, 0
        for cohort in result.ledger.participants[: row["round"]]:
            ends = [0.0]
            for i in np.flatnonzero(cohort):
                ends.append(4 * ALL / 1e4 + 3 * SIZES[i] / speed[i] + 4 * ALL / upload[i])
                messages += 1
            seconds += max(ends)
        assert row["hours"] == pytest.approx(seconds / 3600)
        assert row["total_up"] == messages * 4 * ALL
        assert row["total_down"] == messages * 4 * ALL + len(SIZES) * 4 * ALL
    assert rows[-1].items() >= result.metrics[-1].items()
    assert "hours" not in deployment_cost(result)[0]
    assert deployment_cost(result, period=90.0)[-1]["hours"] == pytest.approx(0.1)


@pytest.mark.parametrize(("sampling", "drawn"), [(FixedSize(4), 4), (Poisson(0.5), None)])
def test_clients_that_drop_out_received_the_broadcast(sampling, drawn):
    """Their number is known for cohorts of a fixed size, and otherwise estimated."""
    result = simulate(KEY, private(sampling), CLIENTS, availability=0.5, **QUIET)
    row = deployment_cost(result)[-1]
    arrived = result.ledger.participants.sum()
    assert row["total_up"] == arrived * 4 * ALL
    received = arrived / 0.5 if drawn is None else drawn * len(result.ledger.participants)
    assert row["total_down"] == (received + len(SIZES)) * 4 * ALL


def test_a_run_without_dropouts_is_the_run_to_the_bit():
    plain = simulate(KEY, private(), CLIENTS, **QUIET)
    full = simulate(KEY, private(), CLIENTS, availability=1.0, **QUIET)
    jax.tree.map(np.testing.assert_array_equal, plain.server, full.server)
    assert plain.metrics == full.metrics
    assert plain.statement == full.statement


def test_a_fifth_that_drops_out_leaves_epsilon_and_is_stated(tmp_path):
    availability = {"availability": 0.8, "folder": tmp_path}
    plain = simulate(KEY, private(), CLIENTS, **QUIET)
    lossy = simulate(KEY, private(), CLIENTS, **availability, **QUIET)
    assert not np.any(lossy.ledger.participants & ~plain.ledger.participants)
    assert lossy.ledger.participants.sum() < plain.ledger.participants.sum()
    honest = [result.statement["honest"]["aggregate"]["epsilon"] for result in (plain, lossy)]
    assert honest[0] == honest[1]
    text = " ".join(jaxfl.privacy.format_statement(lossy.statement).split())
    assert "poisson 0.6 of whom 80% return" in text
    assert "independent_dropouts" in lossy.statement["assumed"]
    again = simulate(KEY, private(), CLIENTS, **availability, **QUIET)
    assert again.restored == 4
    with pytest.raises(ValueError, match="availability"):
        simulate(KEY, private(), CLIENTS, folder=tmp_path, availability=0.7, **QUIET)


def test_a_sampler_of_the_builder_is_the_option_of_a_run_and_of_a_sweep():
    availability = np.linspace(0.5, 1.0, len(SIZES))
    option = {"availability": availability, **QUIET}
    first = simulate(KEY, private(), CLIENTS, **option)
    second = simulate(KEY, private(Dropouts(Poisson(0.6), availability)), CLIENTS, **QUIET)
    jax.tree.map(np.testing.assert_array_equal, first.server, second.server)
    build = functools.partial(dp_fedavg, MODEL, clip=1.0, sampling=Poisson(0.6), local=LOCAL)
    (point,) = sweep(KEY, build, {"noise_multiplier": [2.0]}, CLIENTS, **option)
    np.testing.assert_array_equal(point.ledger.participants, first.ledger.participants)


def test_dropouts_that_a_plan_cannot_cover_are_an_error():
    shares = untrained(MECHANISMS["skellam"])
    with pytest.raises(ValueError, match="report must be 'full' for Skellam with availability"):
        simulate(KEY, shares, CLIENTS, availability=0.8, report="public", **QUIET)
    with pytest.raises(ValueError, match="availability must have one probability, or one for each"):
        simulate(KEY, private(), CLIENTS, availability=np.full(3, 0.5), **QUIET)
    for wrong in (0.0, 1.5, math.nan, "0.8"):
        with pytest.raises((ValueError, TypeError), match="availability must be"):
            simulate(KEY, private(), CLIENTS, availability=wrong, **QUIET)


def test_a_method_that_sends_nothing_trains_whoever_would_drop_out():
    alone = local_only(MODEL, local=LOCAL)
    found = [
        simulate(KEY, alone, CLIENTS, availability=availability, **QUIET).scores["loss"]
        for availability in (1.0, 0.3)
    ]
    np.testing.assert_array_equal(*found)


def test_costs_are_drawn_against_bytes_and_hours(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    assert matplotlib
    result = simulate(KEY, private(), CLIENTS, **QUIET)
    rows = deployment_cost(result, Clock(10.0))
    figure = jaxfl.report.plots.against_costs({"dp_fedavg": rows}, "accuracy")
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert labels == ["megabytes of all clients", "hours"]
    line = figure.axes[0].get_lines()[0]
    expected = [(row["total_up"] + row["total_down"]) / 1e6 for row in rows]
    np.testing.assert_allclose(line.get_xdata(), expected)
    plot_costs({"dp_fedavg": rows}, tmp_path / "costs.svg")
    assert (tmp_path / "costs.svg").read_text().startswith("<?xml")
    with pytest.raises(ValueError, match="metric must be a column of all rows, got 'f1'"):
        plot_costs({"dp_fedavg": rows}, tmp_path / "costs.svg", metric="f1")
    timed = [row | {"hours": 1.0} for row in rows]
    without = [{name: value for name, value in row.items() if name != "hours"} for row in rows]
    with pytest.raises(ValueError, match=r"hours in the rows of all .* got hours of \['timed'\]"):
        plot_costs({"timed": timed, "others": without}, tmp_path / "costs.svg")
    untested = [row | {"accuracy": np.nan} for row in rows]
    with pytest.raises(ValueError, match="'accuracy', which is NaN in all rows of 'dp_fedavg'"):
        plot_costs({"dp_fedavg": untested}, tmp_path / "costs.svg")


def test_a_clock_fits_the_clients():
    clock = Clock(np.ones(3))
    with pytest.raises(ValueError, match="speed must have one number, or one for each of 11"):
        clock.seconds(private(), CLIENTS)
