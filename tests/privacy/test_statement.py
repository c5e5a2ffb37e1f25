import json
import math
import re
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfl._support.files import write_json
from jaxfl.privacy.accounting.ledgers import epsilon, planned_ledger
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import AdaptiveClip, Mechanism
from jaxfl.privacy.sampling import FixedSize, Full, Poisson
from jaxfl.privacy.statement import (
    format_statement,
    privacy_statement,
    split_clients,
    without_clients,
)
from jaxfl.types import Terms


def state(
    m: Mechanism, clients: int = 20, rounds: int = 100, *, dp_sgd: DPSGD | None = None, **terms: Any
) -> dict:
    ledger = planned_ledger(m, clients, rounds, dp_sgd)
    return privacy_statement(ledger, m, clients, terms=Terms(**terms), dp_sgd=dp_sgd)


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
    assert aggregate["rdp"]["total"] == epsilon(record, m, accountant="rdp").value
    assert upload["rdp"]["total"] == epsilon(record, m, observer="upload", accountant="rdp").value
    assert (aggregate["epsilon"], upload["epsilon"]) == (
        aggregate["pld"]["total"],
        upload["pld"]["total"],
    )
    assert aggregate["by"] == aggregate["pld"]["theorem"] == "Gaussian, zero-out; PLD"


def test_each_number_has_its_own_theorem():
    """For a fixed size only RDP has a theorem of sampling without replacement. PLD has another."""
    statement = state(
        Mechanism(clip=1.0, noise_multiplier=3.0, sampling=FixedSize(10)), clients=1000, rounds=50
    )
    seen = statement["honest"]["aggregate"]
    assert seen["epsilon"] == seen["rdp"]["total"] == pytest.approx(0.534, rel=1e-3)
    assert seen["by"] == seen["rdp"]["theorem"] == "sampling without replacement, replace-one; RDP"
    assert seen["pld"]["total"] == pytest.approx(
        get_epsilon_gaussian(3 / math.sqrt(50), 1e-5), rel=1e-6
    )
    assert seen["pld"]["theorem"] == "Gaussian, zero-out; PLD"
    # Replace-one of a client covers one of its examples: it was stated 60 times as large.
    assert seen["example"] == {"epsilon": seen["epsilon"], "by": seen["by"], "reason": None}
    text = format_statement(statement)
    assert f"epsilon {seen['epsilon']:.4g} in total" in text
    assert "also: 12.26 and 1.271 (Gaussian, zero-out; PLD)" in text
    kept = privacy_statement(
        planned_ledger(m := Mechanism(clip=1.0, noise_multiplier=3.0), 4, 2), m, 4, stateful=True
    )
    assert "clients keep no state" not in format_statement(kept)
    assert "stateless_clients" in statement["assumed"]


def test_one_example_may_move_the_whole_update_both_ways():
    # Twice the change that zero-out makes: 10 rounds at 4 are one Gaussian at 4 / sqrt(10), and 2 / sqrt(10) here.
    m = Mechanism(clip=1.0, noise_multiplier=4.0)
    found = state(m, rounds=10)["honest"]["aggregate"]
    assert found["pld"]["example"] == pytest.approx(
        get_epsilon_gaussian(2.0 / math.sqrt(10), 1e-5), rel=1e-3
    )
    # Sampling of clients amplifies it, since the client's coin does not depend on its examples: not 1,827.
    m = Mechanism(clip=1.0, noise_multiplier=0.8, sampling=Poisson(0.01))
    found = state(m, clients=100, rounds=500, delta=1e-6)["honest"]["aggregate"]
    assert found["example"]["epsilon"] == found["pld"]["example"] == pytest.approx(3.53, abs=5e-3)
    assert (
        found["epsilon"]
        < found["pld"]["example"]
        < found["rdp"]["example"]
        < 1.2 * found["pld"]["example"]
    )
    # Noise of the clients alone, everyone there: the sum shows what the uploads show, or less.
    honest = state(Mechanism(clip=1.0, client_noise=5.0, noise_multiplier=5.0))["honest"]
    for accountant in ("rdp", "pld"):
        assert honest["upload"][accountant]["example"] == honest["upload"][accountant]["total"]
        assert honest["aggregate"][accountant]["example"] < honest["upload"][accountant]["example"]


@settings(max_examples=15, deadline=None)
@given(
    noise=st.lists(st.floats(0.5, 9.0), min_size=3, max_size=3),
    floor=st.sampled_from([0.0, 4.0, 30.0]),
    sampling=st.sampled_from([Full(), FixedSize(1), FixedSize(2), Poisson(0.1), Poisson(0.6)]),
    denominator=st.sampled_from(["expected", "participants"]),
)
def test_the_headline_is_never_above_a_bound_that_covers_it(noise, floor, sampling, denominator):
    """Sums follow from uploads, zero-out and one example from replace-one, and one round from all."""
    client_noise = np.array([noise])
    m = Mechanism(1.0, floor, client_noise=client_noise, sampling=sampling, denominator=denominator)
    honest = state(m, clients=3, rounds=5)["honest"]
    aggregate, upload = honest["aggregate"], honest["upload"]
    for seen in (aggregate, upload):
        for accountant in ("rdp", "pld"):
            assert seen["epsilon"] <= seen[accountant]["total"]
            assert seen["example"]["epsilon"] <= seen[accountant]["example"]
        assert seen["one_round"] <= seen["epsilon"] * (1 + 1e-3)
        assert seen["example"]["epsilon"] <= upload["epsilon"]
    assert aggregate["epsilon"] <= aggregate["example"]["epsilon"] * (1 + 1e-3)
    assert (
        aggregate["against_client"]["epsilon"] >= aggregate["pld"]["total"] * (1 - 1e-3)
        or sampling != Full()
    )


def test_sums_show_no_more_than_the_uploads_that_they_are_made_of():
    """Each of 10 clients took part once, as one Gaussian at 3 / 2. Sums count 10 rounds at 3."""
    m = Mechanism(clip=1.0, client_noise=3.0, sampling=Poisson(0.1))
    record = planned_ledger(m, 10, 10)._replace(participants=np.eye(10, dtype=bool))
    honest = privacy_statement(record, m, 10)["honest"]
    aggregate, once = honest["aggregate"], get_epsilon_gaussian(1.5, 1e-5)
    assert aggregate["pld"]["total"] == pytest.approx(
        get_epsilon_gaussian(3 / math.sqrt(10), 1e-5), rel=1e-6
    )
    assert aggregate["pld"]["total"] > once
    for least in (aggregate, aggregate["example"], honest["upload"]):
        assert least["epsilon"] == pytest.approx(once, rel=1e-6)
    assert aggregate["by"].startswith(
        "bound of the uploads, which holds for sums too: Gaussian, replace-one"
    )


def test_another_client_knows_its_own_noise():
    """Two clients add half of the variance each. Against either, only the other's protects."""
    m = Mechanism(clip=1.0, client_noise=2.25 / math.sqrt(2))
    seen = state(m, clients=2, rounds=1)["honest"]["aggregate"]
    assert seen["epsilon"] == pytest.approx(get_epsilon_gaussian(2.25, 1e-5), rel=1e-6)
    against = get_epsilon_gaussian(2.25 / math.sqrt(2), 1e-5)
    assert seen["against_client"]["epsilon"] == pytest.approx(against, rel=1e-6)
    statement = state(m, clients=2, rounds=1)
    assert f"against another client, which knows its own noise: {against:.4g}" in format_statement(
        statement
    )
    assert "pool nothing" in statement["assumed"]["honest_clients"]
    silent = state(Mechanism(clip=1.0, noise_multiplier=3.0))
    assert "against_client" not in silent["honest"]["aggregate"]
    assert silent["assumed"] == {}
    assert state(Mechanism(clip=1.0, sampling=FixedSize(5)))["assumed"] == {}


def test_where_the_noise_comes_from():
    m = Mechanism(clip=1.0, noise_multiplier=9.0)
    record = planned_ledger(m, 20, 2)
    seed, secret = (
        privacy_statement(record, m, 20, randomness=source) for source in ("seed", "secret")
    )
    known = "noise from a known seed: this is a simulation, and must not be published"
    assert known in seed["warnings"]["known_seed"]
    assert secret["warnings"] == {}
    assert "128 fresh bits" in secret["assumed"]["system_randomness"]
    assert "not a certified" in secret["assumed"]["system_randomness"]
    assert (seed["randomness"], secret["randomness"]) == ("seed", "secret")
    paired = privacy_statement(record, m, 20, randomness="secret", paired=True)
    warning = "the points of this sweep share their cohorts and noise: at most one of them may be published"
    assert paired["warnings"] == {"shared_noise": warning}
    assert warning in " ".join(format_statement(paired).split())
    assert state(Mechanism(communicates=False))["warnings"] == {}


@pytest.mark.parametrize(
    "words",
    [
        "accuracies", "tuning", "early stopping", "cohort sizes", "update norms", "clipped", "training losses",
        "participations", 'report="public"', "checkpoints", "personal states and the key", "trusted server or secure",
        "pool what they know", "epsilons add up", "same key share their noise", "timing", "finite precision",
    ],
)  # fmt: skip
def test_what_no_epsilon_covers(words):
    statement = state(Mechanism(clip=1.0, noise_multiplier=9.0))
    assert any(words in sentence for sentence in statement["not_covered"].values())
    assert words in " ".join(format_statement(statement).split())


def test_noise_on_a_grid_leaves_less_uncovered():
    m = Mechanism(clip=1.0, noise_multiplier=9.0, noise="grid")
    assert "float32" not in format_statement(state(m))
    covered = state(m)["not_covered"]["grid_noise"]
    assert (
        f"{95} bits" in covered
    )  # a first word of 32, then 31 of a word whose last bit is the sign, then 32


def test_private_steps_keep_their_warning_of_single_precision_under_a_grid():
    steps = DPSGD(clip=0.5, noise_multiplier=1.0, rate=0.1, steps=10)
    for noise in ("grid", "float"):
        statement = state(Mechanism(clip=1.0, noise_multiplier=9.0, noise=noise), dp_sgd=steps)
        codes = statement["not_covered"].keys()
        assert ("float_noise" in codes, "float_noise_of_steps" in codes) == (
            noise == "float",
            noise == "grid",
        )


def test_an_adaptive_bound_says_what_updates_and_bits_get():
    """z covers both, because 1/z^2 is 1/y^2 of the updates plus 1/(2 s)^2 of the bits."""
    m = AdaptiveClip(clip=2.0, noise_multiplier=3.0, quantile=0.7, bit_noise=2.0)
    moves, split = state(m)["details"]
    assert "2 in the first round" in moves
    assert "quantile 0.7" in moves
    assert f"updates get {1 / math.sqrt(1 / 9 - 1 / 16):.4g} times" in split
    assert "a std of 2" in split
    assert "noise multiplier 3 covers update and bit together" in " ".join(
        format_statement(state(m)).split()
    )
    found = planned_ledger(m, 20, 3)._replace(notes={"clip": np.array([2.0, 0.5, 1.0])})
    assert "here from 0.5 to 2" in m.describe(found)[0]
    default = AdaptiveClip(clip=2.0, noise_multiplier=1.0)
    assert (
        "a std of 5" in state(default, clients=100)["details"][1]
    )  # a 20th of the expected cohort
    assert len(state(AdaptiveClip(clip=2.0))["details"]) == 1


def test_weights_are_said_to_be_public():
    weighted = state(Mechanism(clip=1.0, noise_multiplier=9.0, weights=np.arange(1.0, 21.0)))
    assert "numbers of examples" in weighted["assumed"]["public_weights"]


def test_a_statement_of_an_older_version_has_the_same_lines():
    """The sentences of older versions have no codes."""
    statement = state(Mechanism(clip=1.0, noise_multiplier=9.0, sampling=FixedSize(5)))
    parts = ("warnings", "assumed", "not_covered")
    older = statement | {name: list(statement[name].values()) for name in parts}
    assert format_statement(older) == format_statement(statement)


def test_lines_are_short():
    steps = DPSGD(clip=0.5, noise_multiplier=1.0, rate=0.1, steps=10)
    m = Mechanism(1.0, 9.0, client_noise=3.0, sampling=Poisson(0.1))
    statement = state(m, rounds=3, dp_sgd=steps, claim=(1.0, "long " * 40))
    assert max(map(len, format_statement(statement).splitlines())) <= 80


def test_the_same_is_accounted_once(monkeypatch):
    """Seeds and points of a sweep repeat a run. Each would take 10 s for many levels."""
    m = Mechanism(clip=1.0, noise_multiplier=tuple(np.linspace(5, 9, 4)), sampling=Poisson(0.1))
    first = state(m, rounds=4)
    monkeypatch.setattr(dp_accounting.pld, "PLDAccountant", None)
    monkeypatch.setattr(dp_accounting.rdp, "RdpAccountant", None)
    assert state(m, rounds=4) == first


def test_says_what_was_run():
    statement = state(
        Mechanism(clip=0.5, noise_multiplier=(3.0, 1.5), sampling=Poisson(0.1)), rounds=2
    )
    assert statement["sampling"] == {"kind": "poisson", "rate": 0.1}
    assert statement["noise_multiplier"] == {"min": 1.5, "max": 3.0}
    assert (statement["clip"], statement["denominator"], statement["rounds"]) == (
        0.5,
        "expected",
        2,
    )
    assert statement["unit"].startswith("client")
    assert (
        state(Mechanism(clip=1.0, noise_multiplier=9.0, sampling=FixedSize(3)))["sampling"]["size"]
        == 3
    )


def test_no_finite_epsilon_is_said_with_its_reason():
    statement = state(Mechanism(clip=1.0), broken="noise is multiplied by a private mask")
    for seen in statement["honest"].values():
        assert seen["rdp"]["total"] == seen["pld"]["one_round"] == "inf"
        assert seen["rdp"]["reason"] == "noise is multiplied by a private mask"
    text = format_statement(statement)
    assert text.count("no finite epsilon: noise is multiplied by a private mask") == 2
    assert json.loads(json.dumps(statement, allow_nan=False)) == statement


def test_a_claim_stays_a_claim():
    statement = state(
        Mechanism(clip=1.0, noise_multiplier=0.5), claim=(1.0, "accounted per example")
    )
    assert statement["claim"] == {
        "epsilon": 1.0,
        "rule": "accounted per example",
        "status": "claimed, not verified",
    }
    text = format_statement(statement)
    assert "claimed, not verified: epsilon 1 (accounted per example)" in text
    assert "guarantee for one client, against an observer of" in text
    assert "in total" in text
    assert "one round alone" in text
    assert "claimed" not in format_statement(state(Mechanism(clip=1.0, noise_multiplier=0.5)))


def test_warns_of_a_delta_of_one_over_clients():
    loose = state(Mechanism(clip=1.0, noise_multiplier=1.0), rounds=1, delta=1 / 20)
    assert "delta 0.05" in loose["warnings"]["large_delta"]
    assert "quote one at delta 1e-05" in loose["warnings"]["large_delta"]
    assert "warning: delta 0.05" in format_statement(loose)
    fine = state(Mechanism(clip=1.0, noise_multiplier=1.0), rounds=1, delta=0.04)["warnings"]
    assert "large_delta" not in fine
    assert state(Mechanism(communicates=False), rounds=1, delta=0.5)["warnings"] == {}


def test_delta_follows_from_the_number_of_clients():
    m = Mechanism(clip=1.0, noise_multiplier=9.0)
    assert [state(m, clients=n, rounds=1)["delta"] for n in (20, 10_000, 1_000_000)] == [
        1e-5,
        1e-5,
        1e-7,
    ]
    many = state(m, clients=1_000_000, rounds=1)["honest"]["aggregate"]["epsilon"]
    assert many == pytest.approx(get_epsilon_gaussian(9.0, 1e-7), rel=1e-6)
    loose = state(m, clients=1_000_000, rounds=1, delta=1e-5)
    assert "delta 1e-05 is at least 1/clients" in loose["warnings"]["large_delta"]
    assert "quote one at delta 1e-07" in loose["warnings"]["large_delta"]


def test_epsilons_by_client():
    m = Mechanism(clip=1.0, client_noise=np.array([[4.0, 8.0, 0.0]]), noise_multiplier=20.0)
    upload = state(m, clients=3, rounds=2)["honest"]["upload"]["rdp"]
    own = upload["per_client"]
    assert own["max"] == upload["total"] == "inf"
    assert 0 < own["min"] < own["median"] < math.inf
    assert "by client: " in format_statement(state(m, clients=3, rounds=2))
    assert (
        "per_client"
        not in state(Mechanism(clip=1.0, noise_multiplier=9.0))["honest"]["aggregate"]["rdp"]
    )


def test_epsilons_by_client_are_arrays_and_the_rest_of_the_statement_stays():
    m = Mechanism(clip=1.0, client_noise=np.array([[4.0, 8.0, 0.0]]), noise_multiplier=20.0)
    whole = state(m, clients=3, rounds=2)
    rest, arrays = split_clients(whole)
    assert arrays.keys() >= {"epsilon_upload_pld", "epsilon_upload_rdp"}
    own = whole["honest"]["upload"]["pld"]["per_client"]
    assert arrays["epsilon_upload_pld"].tolist() == [float(value) for value in own["values"]]
    assert rest["honest"]["upload"]["pld"]["per_client"] == {
        name: own[name] for name in ("min", "median", "max")
    }
    assert {name: rest[name] for name in rest if name != "honest"} == {
        name: whole[name] for name in whole if name != "honest"
    }


def test_examples_are_stated_beside_clients():
    steps = DPSGD(clip=0.5, noise_multiplier=np.array([1.0, 2.0]), rate=0.1, steps=10)
    m = Mechanism(clip=1.0, noise_multiplier=9.0)
    statement = state(m, clients=2, rounds=10, dp_sgd=steps)
    own = statement["examples"]
    assert own["pld"]["total"] == pytest.approx(7.047, rel=1e-3)
    assert (
        own["rdp"]["per_client"]["values"][1]
        < own["rdp"]["per_client"]["values"][0]
        == own["rdp"]["total"]
    )
    assert (own["rate"], own["steps"], own["noise_multiplier"]) == (
        0.1,
        10,
        {"min": 1.0, "max": 2.0},
    )
    assert statement["honest"]["upload"]["rdp"]["total"] == "inf"  # of the whole client
    text = format_statement(statement)
    assert "guarantee for one example, against an observer of every upload" in text
    assert text.startswith("Privacy of one client (all of its data, 2 clients), delta")
    assert text.index("guarantee for one client") < text.index("guarantee for one example")
    silent = Mechanism(clip=1.0, noise_multiplier=0.0)
    alone = format_statement(state(silent, clients=2, rounds=10, dp_sgd=steps))
    assert alone.startswith("Privacy of one example (2 clients), delta")
    assert alone.index("guarantee for one example") < alone.index("mechanism: clip")
    assert alone.index("mechanism: clip") < alone.index("guarantee for one client")
    assert own["epsilon"] == own["pld"]["total"]
    assert (
        "epsilon 7.047 in total\n    by: Poisson-sampled Gaussian, rate 0.1, zero-out, 10 steps per round; PLD"
        in text
    )
    assert f"also: {own['rdp']['total']:.4g} (Poisson-sampled Gaussian" in text
    assert state(Mechanism(clip=1.0, noise_multiplier=9.0))["examples"] is None
    silent = state(Mechanism(), dp_sgd=DPSGD(clip=0.5, noise_multiplier=0.0, rate=0.1, steps=10))
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
    with pytest.raises(
        ValueError, match="clients must be 4, the number of clients in the ledger, got 3"
    ):
        privacy_statement(planned_ledger(m, 4, 2), m, 3)


def test_markdown_says_the_same_in_nested_lists():
    m = Mechanism(clip=1.0, noise_multiplier=9.0, client_noise=2.0)
    statement = state(m, claim=(1.0, "a_rule of <b>*ours*</b> [1] | 2"))
    text, plain = format_statement(statement, markdown=True), format_statement(statement)
    title, blank, *items = text.splitlines()
    assert title == f"**{plain.splitlines()[0]}**"
    assert not blank
    assert all(re.fullmatch(r"( {2})?- \S.*", item) for item in items)
    assert r"a\_rule of \<b\>\*ours\*\</b\> \[1\] \| 2" in text

    def words(said):
        return re.sub(
            r"\\(?=\W|_)|\*\*(?=Priv|$)",
            "",
            " ".join(said.replace("\n", " ").replace("- ", " ").split()),
        )

    assert words("\n".join([title[2:-2], *items])) == words(plain)


def test_a_public_statement_tells_of_no_client():
    full = state(Mechanism(clip=1.0, client_noise=np.array([[3.0, 4.0, 5.0, 6.0]])), clients=4)
    public = without_clients(full)
    assert "'per_client':" in str(full)
    assert "'per_client':" not in str(public)
    assert public["honest"]["upload"]["epsilon"] == full["honest"]["upload"]["epsilon"]
