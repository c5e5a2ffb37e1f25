"""The page about a plan, which is parsed element by element."""

import pytest
from test_page import Page

from jaxfl import write_plan
from jaxfl.privacy import Mechanism, Poisson, plan

DEPLOYMENT = {"clients": 3_000_000, "cohort": 5000, "rounds": 720}


def test_a_plan_for_devices_that_check_in_once_a_day(tmp_path):
    """There is a round each hour for 30 days, and a device takes part at most once a day."""
    found = plan(
        **DEPLOYMENT,
        epsilon=2.0,
        separation=24,
        participations=30,
        kinds=("any cohort", "separated"),
    )
    page = Page(write_plan(found, tmp_path / "plan.html"))
    protected, facts, mechanisms, needs, versions = page.tables
    assert dict(facts)["clients"] == 3e6
    assert dict(facts)["fewest rounds from one participation to the next"] == 24
    assert [name for name, _ in protected] == ["unit", "observer", "adjacency"]
    assert needs == [["limits", needs[0][1]]]
    assert dict(versions)["jaxfl"]
    head, *rows = mechanisms
    assert [row[:3] for row in rows] == [
        [each.kind, "limits", pytest.approx(each.epsilon)] for each in found
    ]
    assert [row[head.index("noise in the model / C")] for row in rows] == [
        pytest.approx(each.error) for each in found
    ]
    assert rows[0][head.index("by")] == found[0].pld.theorem
    assert not page.addresses
    assert "script" not in page.texts


def test_a_name_is_text_and_no_markup(tmp_path):
    name = "<script>alert(1)</script>"
    own = Mechanism(sampling=Poisson(0.1))
    found = plan(
        clients=100,
        cohort=10,
        rounds=4,
        noise_multiplier=2.0,
        delta=0.02,
        kinds=("poisson",),
        mechanisms={name: own},
    )
    page = Page(write_plan(found, tmp_path / "plan.html"))
    assert name in [row[0] for row in page.tables[2]]
    assert "script" not in page.texts
    assert "at least one over the number of clients" in " ".join(page.texts["strong"][0].split())


def test_plans_of_several_deployments_are_refused(tmp_path):
    several = [
        plan(clients=100, cohort=10, rounds=n, noise_multiplier=2.0, kinds=("poisson",))[0]
        for n in (2, 3)
    ]
    with pytest.raises(ValueError, match="plans must be of one deployment"):
        write_plan(several, tmp_path / "plan.html")


def test_a_page_replaces_nothing_but_a_page(tmp_path):
    plans = plan(clients=100, cohort=10, rounds=5, noise_multiplier=2.0, kinds=("poisson",))
    page = write_plan(plans, tmp_path / "plan.html")
    write_plan(plans, page)
    page.write_text("<!doctype html>mine")
    with pytest.raises(ValueError, match="did not write"):
        write_plan(plans, page)
    assert page.read_text() == "<!doctype html>mine"


def test_a_path_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    plans = plan(clients=100, cohort=10, rounds=5, noise_multiplier=2.0, kinds=("poisson",))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"path must be the path of a folder, .*file' is a file"):
        write_plan(plans, tmp_path / "file" / "plan.html")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(
        ValueError, match=r"path must be in a folder that can be written, got .*new"
    ):
        write_plan(plans, tmp_path / "new" / "plan.html")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
