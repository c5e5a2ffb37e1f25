"""One epsilon per run: rows, bar, callbacks and reports show that of the privacy statement."""

import json
import math
from typing import Any

import jax
import numpy as np
import pytest
from algorithms_table import MECHANISMS, MODEL, SAMPLERS, SIZES, small_clients, untrained

from jaxfl import callbacks, simulate
from jaxfl.algorithms import fedavg
from jaxfl.privacy import (
    DPSGD,
    BandedNoise,
    FixedSize,
    Mechanism,
    Poisson,
    calibrate,
    example_epsilon,
    planned_ledger,
    privacy_statement,
)
from jaxfl.privacy.accounting.ledgers import first_rounds, running_epsilon
from jaxfl.report import layout, plots
from jaxfl.report.page import write_report
from jaxfl.run import bars
from jaxfl.types import Terms

KEY, C, ROUNDS = jax.random.key(3), len(SIZES), 6
STEPS = DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.2, steps=2)
NOISES: dict[str, dict[str, Any]] = {
    "server": {"noise_multiplier": 3.0},
    "schedule": {"noise_multiplier": np.linspace(2.0, 4.0, ROUNDS)},
    "clients": {"client_noise": 5.0},
    "both": {"noise_multiplier": 3.0, "client_noise": 2.0},
    "weights": {"noise_multiplier": 3.0, "weights": np.linspace(0.5, 1.0, C)},
}


def happened(mechanism, dp_sgd=None):
    """Return the ledger of a plan of which about half of the participations happened."""
    plan = planned_ledger(mechanism, C, ROUNDS, dp_sgd)
    drawn = np.random.default_rng(0).random((ROUNDS, C)) < 0.5
    made = plan.participants & drawn
    noise = np.sum(np.where(made, np.square(plan.client_noise * plan.weights), 0), axis=1)
    floor = np.square(plan.noise_multiplier * plan.weights.max(axis=1))
    return plan._replace(participants=made, server_noise=np.sqrt(np.maximum(floor - noise, 0)))


def agrees(ledger, mechanism, **options):
    """Check that running epsilons equal the statement's, after one, four and all rounds."""
    spent = running_epsilon(mechanism, C, **options)
    for done in (1, 4, ROUNDS):
        part = first_rounds(ledger, done)
        statement = privacy_statement(part, mechanism, C, **options)
        honest, found = statement["honest"], spent(part)
        assert found.epsilon == float(honest["aggregate"]["epsilon"])
        assert found.rdp == float(honest["aggregate"]["rdp"]["total"])
        if found.upload is None:
            assert honest["upload"]["epsilon"] in ("inf", 0.0)
        else:
            assert found.upload == float(honest["upload"]["epsilon"])
        if statement["examples"]:
            assert found.example == float(statement["examples"]["epsilon"])
    return found


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("noise", NOISES)
def test_epsilons_so_far_are_those_of_the_statement(noise, sampler):
    mechanism = Mechanism(clip=1.0, sampling=SAMPLERS[sampler], **NOISES[noise])
    agrees(happened(mechanism), mechanism)


def test_epsilons_so_far_are_those_of_the_statement_for_every_mechanism():
    for mechanism in MECHANISMS.values():
        agrees(planned_ledger(mechanism, C, ROUNDS), mechanism)
    banded = BandedNoise(clip=1.0, noise_multiplier=4.0, bands=3, sampling=Poisson(0.5))
    agrees(happened(banded), banded)
    plain = Mechanism(clip=1.0, noise_multiplier=3.0, sampling=FixedSize(3))
    agrees(happened(plain), plain, stateful=True)
    assert (
        agrees(happened(plain), plain, terms=Terms(broken="the support leaks")).epsilon == math.inf
    )
    found: Any = agrees(happened(plain, STEPS), plain, dp_sgd=STEPS, examples=60_000)
    assert found.example < math.inf


def run(method, folder=None, rounds=3, **options):
    defaults = {"eval_every": 1, "progress": False}
    return simulate(
        KEY, method, small_clients(), rounds=rounds, folder=folder, **defaults | options
    )


def test_a_calibrated_run_ends_at_its_target_in_every_place(tmp_path):
    sampling, delta = Poisson(0.3), 1e-6
    z = calibrate(2.0, clients=C, rounds=3, sampling=sampling, delta=delta)
    method = untrained(Mechanism(clip=1.0, noise_multiplier=z, sampling=sampling))._replace(
        terms=Terms(delta)
    )
    table = tmp_path / "rows.csv"
    options = [callbacks.epsilon_budget(2.0), callbacks.csv(table)]
    result = run(method, tmp_path / "run", callbacks=options)
    last = result.metrics[-1]
    assert last["round"] == 3
    stated = result.statement["honest"]["aggregate"]["epsilon"]
    assert last["epsilon"] == stated
    assert 1.995 < stated <= 2.0 < last["epsilon_rdp"]
    head, *lines = (line.split(",") for line in table.read_text().splitlines())
    row = json.loads((tmp_path / "run" / layout.METRICS).read_text().splitlines()[-1])
    assert float(lines[-1][head.index("epsilon")]) == row["epsilon"] == stated
    assert bars.shown_epsilon(result.metrics[-1:]) == "epsilon 2"
    write_report(tmp_path / "run")
    text = (tmp_path / "run" / layout.PAGE).read_text()
    assert layout.COLUMNS["epsilon"].replace("'", "&#39;") in text
    assert str(stated) in text


def test_the_epsilon_of_examples_is_shown_where_it_alone_is_finite(tmp_path):
    method = fedavg(MODEL, local=STEPS)
    result = run(method, tmp_path, callbacks=[callbacks.epsilon_budget(1e3, unit="example")])
    last, own = result.metrics[-1], result.statement["examples"]
    assert (last["round"], last["epsilon"]) == (3, math.inf)
    assert last["epsilon_example"] == own["epsilon"] < math.inf
    assert bars.shown_epsilon([last]) == f"epsilon {own['epsilon']:.3g} (example)"
    assert "epsilon" in plots.panels(result.metrics, "accuracy")
    write_report(tmp_path)
    text = (tmp_path / layout.PAGE).read_text()
    assert text.index("one example, by local steps") < text.index("a client, all of its data")


@pytest.mark.parametrize(("examples", "delta"), [(460, 1e-5), (46_000, 1 / 460_000)])
def test_examples_have_a_delta_of_their_own(examples, delta):
    ledger = planned_ledger(Mechanism(), 12, 3, STEPS)
    own = privacy_statement(ledger, Mechanism(), 12, dp_sgd=STEPS, examples=examples)
    assert own["delta"] == 1e-5
    assert own["examples"]["delta"] == pytest.approx(delta)
    assert own["examples"]["number"] == examples
    assert own["examples"]["epsilon"] == example_epsilon(ledger, STEPS, delta=delta).value
    given = privacy_statement(
        ledger, Mechanism(), 12, dp_sgd=STEPS, examples=examples, terms=Terms(1e-3)
    )
    large = "large_delta_of_examples" in given["warnings"]
    assert large == (examples == 46_000)


def test_noise_too_faint_to_account_for_is_stated():
    faint = DPSGD(clip=1.0, noise_multiplier=1e-9, rate=0.2, steps=2)
    ledger = planned_ledger(Mechanism(), C, 3, faint)
    for terms in (Terms(), Terms(1e-300)):
        found = privacy_statement(ledger, Mechanism(), C, dp_sgd=faint, terms=terms)["examples"]
        assert 1e17 < float(found["epsilon"]) < math.inf
        assert (
            running_epsilon(Mechanism(), C, dp_sgd=faint, terms=terms)(3).example
            == found["epsilon"]
        )
    z = calibrate(2.0, clients=C, rounds=10, sampling=Poisson(0.1), delta=1e-300)
    assert 1 < z < 1e4


def test_a_public_run_publishes_the_plan_alone(tmp_path):
    """The rounds as they happened reveal how often the most frequent client was drawn."""
    mechanism = Mechanism(clip=1.0, client_noise=4.0, sampling=Poisson(0.4))
    steps = DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.2, steps=1)
    method = fedavg(MODEL, local=steps, mechanism=mechanism)
    planned = planned_ledger(mechanism, C, 2, steps)
    result = run(method, tmp_path, rounds=2, report="public")
    stated = json.loads((tmp_path / layout.PRIVACY).read_text())
    assert result.statement == stated
    wanted = privacy_statement(planned, mechanism, C, dp_sgd=steps, examples=sum(SIZES))
    assert result.ledger.participants.sum(0).max() < 2 or not result.ledger.participants.all()
    for name in ("aggregate", "upload"):
        assert stated["honest"][name]["epsilon"] == pytest.approx(
            wanted["honest"][name]["epsilon"], rel=1e-6
        )
    assert stated["examples"]["epsilon"] == pytest.approx(wanted["examples"]["epsilon"], rel=1e-6)
    assert result.metrics[-1]["epsilon"] == stated["honest"]["aggregate"]["epsilon"]
    assert "'per_client':" not in str(stated)
