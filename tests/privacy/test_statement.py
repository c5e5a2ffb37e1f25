import json
import math

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian

from jaxfl.privacy.accounting import epsilon, planned_ledger
from jaxfl.privacy.mechanism import FixedSize, Mechanism, PerExample, Poisson
from jaxfl.privacy.statement import format_statement, privacy_statement
from jaxfl.report import write_json


def state(m: Mechanism, clients: int = 20, rounds: int = 100) -> dict:
    return privacy_statement(planned_ledger(m, clients, rounds), m, clients)


def test_states_both_observers_by_both_accountants():
    m = Mechanism(clip=2.0, noise_multiplier=37.306, client_noise=37.306 / math.sqrt(20))
    statement = state(m)
    aggregate, upload = statement["honest"]["aggregate"], statement["honest"]["upload"]
    assert aggregate["pld"]["total"] == pytest.approx(1.0, rel=1e-3)
    assert upload["pld"]["total"] == pytest.approx(12.5, rel=1e-2)
    for seen in (aggregate, upload):
        assert seen["pld"]["total"] < seen["rdp"]["total"]
        assert seen["rdp"]["one_round"] < seen["rdp"]["total"]
        assert seen["rdp"]["reason"] is None
    assert "zero-out" in aggregate["adjacency"]
    assert "replace-one" in upload["adjacency"]
    record = planned_ledger(m, 20, 100)
    assert aggregate["rdp"]["total"] == epsilon(record, m).value
    assert upload["rdp"]["total"] == epsilon(record, m, observer="upload").value


def test_one_example_may_move_the_whole_update_both_ways():
    # No credit for sampling, and twice the change that zero-out makes: 10 rounds at 4 are one Gaussian at 4 / sqrt(10).
    found = state(Mechanism(clip=1.0, noise_multiplier=4.0, sampling=Poisson(0.1)), rounds=10)["honest"]["aggregate"][
        "pld"
    ]
    assert found["example"] == pytest.approx(get_epsilon_gaussian(2.0 / math.sqrt(10), 1e-5), rel=1e-3)
    # Noise of the clients alone, everyone there: the sum shows what the uploads show, or less.
    honest = state(Mechanism(clip=1.0, client_noise=5.0, noise_multiplier=5.0))["honest"]
    for accountant in ("rdp", "pld"):
        assert honest["upload"][accountant]["example"] == honest["upload"][accountant]["total"]
        assert honest["aggregate"][accountant]["example"] < honest["upload"][accountant]["example"]


def test_says_what_was_run():
    statement = state(Mechanism(clip=0.5, noise_multiplier=(3.0, 1.5), sampling=Poisson(0.1)), rounds=2)
    assert statement["sampling"] == {"kind": "poisson", "rate": 0.1}
    assert statement["noise_multiplier"] == {"min": 1.5, "max": 3.0}
    assert (statement["clip"], statement["denominator"], statement["rounds"]) == (0.5, "expected", 2)
    assert statement["unit"].startswith("client")
    assert any("accuracies" in item for item in statement["not_covered"])
    assert any("tuning" in item for item in statement["not_covered"])
    assert any("early stopping" in item for item in statement["not_covered"])
    assert state(Mechanism(clip=1.0, noise_multiplier=9.0, sampling=FixedSize(3)))["sampling"]["size"] == 3


def test_no_finite_epsilon_is_said_with_its_reason():
    statement = state(Mechanism(broken="noise is multiplied by a private mask"))
    for seen in statement["honest"].values():
        assert seen["rdp"]["total"] == seen["pld"]["one_round"] == "inf"
        assert seen["rdp"]["reason"] == "noise is multiplied by a private mask"
    text = format_statement(statement)
    assert text.count("no finite epsilon: noise is multiplied by a private mask") == 2
    assert json.loads(json.dumps(statement, allow_nan=False)) == statement


def test_a_claim_stays_a_claim():
    m = Mechanism(clip=1.0, noise_multiplier=0.5, claim=(1.0, "accounted per example"))
    statement = state(m)
    assert statement["claim"] == {"epsilon": 1.0, "rule": "accounted per example", "status": "claimed, not verified"}
    text = format_statement(statement)
    assert "claimed, not verified: epsilon 1 (accounted per example)" in text
    assert "honest, against" in text
    assert "in total" in text
    assert "one round alone" in text
    assert "claimed" not in format_statement(state(Mechanism(clip=1.0, noise_multiplier=0.5)))


def test_warns_of_a_delta_of_one_over_clients():
    loose = state(Mechanism(clip=1.0, noise_multiplier=1.0, delta=1 / 20), rounds=1)
    assert "delta 0.05" in loose["warnings"][0]
    assert "warning: delta 0.05" in format_statement(loose)
    assert state(Mechanism(clip=1.0, noise_multiplier=1.0, delta=0.04), rounds=1)["warnings"] == []
    assert state(Mechanism(communicates=False, delta=0.5), rounds=1)["warnings"] == []


def test_epsilons_by_client():
    m = Mechanism(clip=1.0, client_noise=np.array([[4.0, 8.0, 0.0]]), noise_multiplier=20.0)
    upload = state(m, clients=3, rounds=2)["honest"]["upload"]["rdp"]
    own = upload["per_client"]
    assert own["max"] == upload["total"] == "inf"
    assert 0 < own["min"] < own["median"] < math.inf
    assert "by client: " in format_statement(state(m, clients=3, rounds=2))
    assert "per_client" not in state(Mechanism(clip=1.0, noise_multiplier=9.0))["honest"]["aggregate"]["rdp"]


def test_examples_are_stated_beside_clients():
    steps = PerExample(clip=0.5, noise_multiplier=np.array([1.0, 2.0]), rate=0.1, steps=10)
    m = Mechanism(clip=1.0, noise_multiplier=9.0, examples=steps)
    statement = state(m, clients=2, rounds=10)
    own = statement["examples"]
    assert own["pld"]["total"] == pytest.approx(7.047, rel=1e-3)
    assert own["rdp"]["per_client"]["values"][1] < own["rdp"]["per_client"]["values"][0] == own["rdp"]["total"]
    assert (own["rate"], own["steps"], own["noise_multiplier"]) == (0.1, 10, {"min": 1.0, "max": 2.0})
    assert statement["honest"]["upload"]["rdp"]["total"] == "inf"  # of the whole client
    text = format_statement(statement)
    assert "of one example, against who sees every upload" in text
    assert f"epsilon {own['rdp']['total']:.4g} in total (RDP); 7.047 (PLD)" in text
    assert state(Mechanism(clip=1.0, noise_multiplier=9.0))["examples"] is None
    silent = state(Mechanism(examples=PerExample(clip=0.5, noise_multiplier=0.0, rate=0.1, steps=10)))
    assert "no finite epsilon: local steps add no noise" in format_statement(silent)


def test_nothing_communicated():
    statement = state(Mechanism(communicates=False))
    assert {seen["rdp"]["total"] for seen in statement["honest"].values()} == {0.0}


def test_write(tmp_path):
    statement = state(Mechanism(clip=1.0, noise_multiplier=9.0))
    path = tmp_path / "privacy.json"
    path.write_text("old")
    write_json(path, statement, allow_nan=False)
    assert json.loads(path.read_text()) == statement
    assert [file.name for file in tmp_path.iterdir()] == ["privacy.json"]


def test_clients_must_be_the_ledgers():
    m = Mechanism(clip=1.0, noise_multiplier=9.0)
    with pytest.raises(ValueError, match=r"clients=3: give the 4 clients"):
        privacy_statement(planned_ledger(m, 4, 2), m, 3)
