"""The ports of `docs/guides/coming_from.md` compute the same as the originals."""

import ast
import pathlib
import re
from typing import Any

import numpy as np
import pytest

from jaxfl.privacy import FixedSize, Mechanism, Poisson, planned_ledger, privacy_statement

PAGE = (pathlib.Path(__file__).parents[2] / "docs/guides/coming_from.md").read_text()
SHOWN = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
CELLS = re.findall(r"^```\{code-cell\}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
LOOP = "\nfor _ in range(ROUNDS):"


def cells_of_pytorch():
    """Return the cells of the first port, which ends with its run."""
    last = next(i for i, cell in enumerate(CELLS) if "simulate(" in cell and "import" not in cell)
    return CELLS[: last + 1]


def as_arrays(net):
    return {name: value.numpy().copy() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("code", SHOWN, ids=range(len(SHOWN)))
def test_code_of_other_libraries_is_python(code):
    ast.parse(code)


def test_the_loop_of_pytorch_and_its_port_have_the_same_weights(tmp_path, monkeypatch):
    """Full batches of all clients leave nothing to draw."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    setup, loop = SHOWN[0].split(LOOP)
    settings = {"ROUNDS": 3, "COHORT": 40, "EPOCHS": 2, "BATCH": 10_000, "RATE": 0.1}
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {"rng": np.random.default_rng(0), **settings}
    first, *cells = cells_of_pytorch()
    exec(first, ours)
    ours |= settings
    torch.manual_seed(0)
    exec(setup, theirs)
    for cell in cells:
        exec(cell, ours)
        if "\nstate = " in cell:
            ours["state"] = as_arrays(theirs["net"])
    data = ours["data"]
    for name, split in (("x", "train"), ("test_x", "test")):
        bytes_ = getattr(data, f"{split}_inputs").transpose(0, 3, 1, 2)
        theirs[name] = torch.tensor(bytes_ / np.float32(127.5) - 1)
    theirs["y"], theirs["test_y"] = (
        torch.tensor(labels, dtype=torch.long) for labels in (data.train_labels, data.test_labels)
    )
    with torch.no_grad():
        logits = theirs["net"](theirs["test_x"][:100]).numpy()
    np.testing.assert_allclose(ours["found"], logits, rtol=1e-5, atol=1e-6)

    exec(LOOP + loop, theirs)
    ours["state"] = as_arrays(theirs["net"])
    expected = {
        "Conv_0": ours["convolution"]("0"),
        "Conv_1": ours["convolution"]("3"),
        "Dense_0": ours["dense"]("7", height=2, width=2),
        "Dense_1": ours["dense"]("9"),
    }
    trained = ours["result"].model().params
    for layer, weights in expected.items():
        for name, weight in weights.items():
            np.testing.assert_allclose(trained[layer][name], weight, atol=1e-5)
            assert abs(weight - ours["params"][layer][name]).max() > 1e-3
    central = ours["result"].metrics[-1]["central_accuracy"]
    assert central == pytest.approx(float(theirs["accuracy"]))


def test_the_epsilons_of_the_port_of_flower_are_those_of_the_page():
    stated = re.search(r"lowers epsilon from (\S+) to (\S+) at the same noise", PAGE)
    assert stated is not None
    for sampling, epsilon in zip((FixedSize(10), Poisson(0.1)), stated.groups(), strict=True):
        mechanism = Mechanism(clip=0.3, noise_multiplier=1.0, sampling=sampling)
        ledger = planned_ledger(mechanism, 100, 30)
        statement = privacy_statement(ledger, mechanism, 100)
        assert f"{statement['honest']['aggregate']['epsilon']:.1f}" == epsilon
