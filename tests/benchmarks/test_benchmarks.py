import importlib
import json

import jax
import jax.numpy as jnp
import pytest
import tyro

from benchmarks.common import apart
from benchmarks.run_all import jobs, run
from benchmarks.workloads import WORKLOADS, forward_flops, model_of, round_flops
from tools.footprint.ahead import products


def _residual(side: int, before: int, width: int) -> list[float]:
    """Return the FLOPs of the six convolutions of a ResNet20 stage. The first one may widen."""
    return [2.0 * side**2 * width * 9 * channels for channels in (before, *5 * (width,))]


# Multiply-adds as two operations: output pixels x output channels x taps of the kernel x input channels.
BY_HAND = {
    "lenet": [
        2.0 * n for n in (28**2 * 6 * 25 * 3, 10**2 * 16 * 25 * 6, 400 * 120, 120 * 84, 84 * 10)
    ],
    "mlp": [2.0 * n for n in (784 * 200, 200 * 200, 200 * 10)],
    "feddpa_cnn": [
        2.0 * n
        for n in (
            32**2 * 16 * 9 * 3,
            16**2 * 32 * 9 * 16,
            8**2 * 32 * 9 * 32,
            512 * 512,
            512 * 128,
            128 * 10,
        )
    ],
    "resnet20": [
        2.0 * 32**2 * 16 * 9 * 3,
        *_residual(32, 16, 16),
        *_residual(16, 16, 32),
        *_residual(8, 32, 64),
        2.0 * 64 * 10,
    ],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_forward_flops_are_those_of_the_layers(name):
    assert forward_flops(WORKLOADS[name]) == BY_HAND[name]


def test_flops_of_a_round_are_those_of_its_gradients():
    work = WORKLOADS["mlp"]  # no padding, whose zeros a gradient's products would count otherwise
    model = model_of(work)
    x = jnp.zeros((work.batch_size, *work.input_shape), jnp.uint8)

    def loss(params):
        return model.apply(params, model.prepare(x)).sum()

    gradient = jax.make_jaxpr(jax.grad(loss))(model.init(jax.random.key(0)))
    assert round_flops(work) == work.clients * work.steps * sum(products(gradient.jaxpr))


def test_a_feddpa_round_adds_a_gradient_of_each_example():
    plain, whole = WORKLOADS["feddpa_cnn"], WORKLOADS["feddpa"]
    gradients = plain.batch_size * plain.steps
    assert round_flops(whole) / round_flops(plain) == pytest.approx(
        (gradients + whole.examples) / gradients
    )


def test_one_failure_fails_the_whole_and_the_others_still_run(tmp_path, capfd):
    writes = """import pathlib, sys; pathlib.Path(sys.argv[-1], "fine.json").write_text('{"headline": "x1"}')"""
    fine, silent, broken = ["-c", writes], ["-c", ""], ["-c", "raise SystemExit(3)"]
    assert run({"fine": fine}, tmp_path) == 0
    (tmp_path / "silent.json").write_text(json.dumps({"headline": "of an older run"}))
    assert run({"broken": broken, "silent": silent, "fine": fine}, tmp_path) == 1
    printed = capfd.readouterr().out
    assert "failed: broken, silent" in printed
    assert "exit status 3" in printed
    assert "x1" in printed
    assert "of an older run" not in printed


@pytest.mark.slow
def test_a_workload_that_cannot_run_fails_its_benchmark(tmp_path):
    options = jobs(quick=True, vs=None)["throughput_lenet"]
    assert run({"throughput_lenet": [*options, "--repeats", "1"]}, tmp_path) == 1


@pytest.mark.slow
def test_a_process_of_its_own_gives_its_value_or_its_last_words():
    assert apart(json.dumps, [1, 2]) == "[1, 2]"
    with pytest.raises(RuntimeError, match=r"(?s)json.loads.*JSONDecodeError"):
        apart(json.loads, "{")


@pytest.mark.parametrize("quick", [True, False])
def test_every_job_has_options_that_its_benchmark_takes(quick, tmp_path):
    for _, module, *options in jobs(quick, vs=None).values():
        benchmark = importlib.import_module(module)
        assert tyro.cli(benchmark.Config, args=[*options, "--out", str(tmp_path)]).out == tmp_path
