"""Measurements of an accelerator: the parts that run, the written file, and shares of one rate."""

import json
import math
import pathlib
from typing import Any

import pytest

from tools.turns import Part

RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "results" / "accelerator_h200.json"


def finds(**found: Any) -> Any:
    return found


def finds_a_device(platform: str) -> Any:
    return {"device": "none", "platform": platform, "tflop_per_s": 100.0}


def finds_nan() -> Any:
    return {"clients_per_s": 10.0, "tflop_per_s": 5.0, "gb_per_s": math.nan}


def raises() -> Any:
    raise ValueError("no device")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return a function that runs parts, and returns exit code and written results."""
    # The parts' processes import this module, and need neither JAX nor the library.
    from benchmarks import accelerator

    monkeypatch.setenv("JAXFL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    known = {
        "device": Part(finds_a_device, ("gpu",)),
        "speed": Part(finds_nan),
        "broken": Part(raises),
    }

    def call(parts: dict[str, Part] | None = None, **options: Any) -> tuple[int, list[Any]]:
        monkeypatch.setattr(accelerator, "parts", lambda tiny: parts or known)
        config = accelerator.Config(out=tmp_path / "out", at_once=1, **options)
        code = accelerator.main(config)
        files = sorted((tmp_path / "out").glob("*.json"))
        return code, [(path.name, json.loads(path.read_text())) for path in files]

    return call


def test_every_result_is_written_and_a_failed_part_shows(measured, capsys):
    code, ((name, written),) = measured()
    assert code == 1
    assert name.startswith("accelerator_2")
    (row,) = written["rows"]
    assert row["share_of_products"] == pytest.approx(0.05)
    assert written["parts"]["speed"]["gb_per_s"] is None
    assert "no device" in written["parts"]["broken"]["failed"]
    assert "part_s" not in written["machine"]
    summary = capsys.readouterr().out.split("\n\n")[1]
    assert [line.split(":")[0] for line in summary.splitlines()[1:]] == [
        "device",
        "speed",
        "broken",
    ]


def test_chosen_parts_have_the_device_and_no_earlier_file_is_replaced(measured, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "accelerator.json").write_text("{}")
    code, files = measured(only=("speed",))
    assert code == 0
    assert sorted(files[1][1]["parts"]) == ["device", "speed"]
    assert files[0] == ("accelerator.json", {})


def test_a_cpu_is_measured_in_a_trial_alone(measured):
    parts = {"device": Part(finds_a_device, ("cpu",)), "speed": Part(finds_nan)}
    with pytest.raises(SystemExit, match="must see an accelerator, got a CPU"):
        measured(parts)
    code, files = measured(parts, tiny=True)
    assert code == 0
    name, written = files[-1]
    assert name.startswith("accelerator_tiny_")
    assert written["headline"] == "trial on few clients, whose times mean nothing"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0.0}, "minutes must be above 0, got 0.0"),
        ({"minutes": math.nan}, "minutes must be above 0, got nan"),
        ({"only": ("lennet",)}, "only must name parts, got 'lennet'. Choose from device, lenet"),
        ({"at_once": 0}, "at_once must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(options, message, monkeypatch):
    from benchmarks import accelerator

    names = {"device": Part(finds), "lenet": Part(finds)}
    monkeypatch.setattr(accelerator, "parts", lambda tiny: names)
    with pytest.raises(ValueError, match=message):
        accelerator._chosen(accelerator.Config(**options))


def test_committed_shares_are_of_the_one_rate_that_the_file_has():
    from benchmarks.accelerator import _lenet, _of, report
    from benchmarks.workloads import round_flops

    written = json.loads(RESULTS.read_text())
    assert report(written["parts"])["rows"] == written["rows"]
    for name, found in written["parts"].items():
        if "tflop_per_s" not in found or name == "device":
            continue
        work = _lenet(2048) if "10,000" in name else _of(name.split(",")[0], 2048)
        flops = round_flops(work) / work.clients / work.steps
        rate = flops / found["us_per_client_step"] / 1e6
        assert found["tflop_per_s"] == pytest.approx(rate, rel=1e-6)
        assert found["gb_per_s"] < written["machine"]["gb_per_s"]
