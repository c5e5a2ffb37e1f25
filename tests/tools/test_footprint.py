"""The cost of a program on a chip, read from its compiler's text."""

import json
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest
from algorithms_table import ALGORITHMS, small_clients

import tools.footprint.__main__ as command
from jaxfl import LocalSGD
from jaxfl.algorithms import fedavg
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.local.train import STEP
from jaxfl.models import mlp
from tools.footprint.ahead import Footprint, footprint, products
from tools.footprint.chips import CHIPS, device_of
from tools.footprint.hlo import step_cost

TEXT = """HloModule jit_run

%sliced (p0: f32[5,8,4], p1: s32[]) -> f32[8,4] {
  %p0 = f32[5,8,4]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %same = f32[5,8,4]{2,1,0} bitcast(%p0)
  %zero = s32[] constant(0)
  %slice = f32[1,8,4]{2,1,0} dynamic-slice(%same, %p1, %zero, %zero), dynamic_slice_sizes={1,8,4}
  ROOT %row = f32[8,4]{1,0} bitcast(%slice)
}

%part (carry: (s32[], f32[4])) -> (s32[], f32[4]) {
  %carry = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %w = f32[4]{0} get-tuple-element(%carry), index=1
  %halved = f32[4]{0} negate(%w), metadata={op_name="jit(run)/while/body/local_step/neg"}
  ROOT %out = (s32[], f32[4]{0}) tuple(%i, %halved)
}

%twice (carry: (s32[], f32[4])) -> pred[] {
  %carry = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %two = s32[] constant(2)
  ROOT %less = pred[] compare(%i, %two), direction=LT
}

%step (carry: (s32[], f32[5,8,4], f32[4])) -> (s32[], f32[5,8,4], f32[4]) {
  %carry = (s32[], f32[5,8,4]{2,1,0}, f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %data = f32[5,8,4]{2,1,0} get-tuple-element(%carry), index=1
  %w = f32[4]{0} get-tuple-element(%carry), index=2
  %batch = f32[8,4]{1,0} fusion(%data, %i), kind=kLoop, calls=%sliced, backend_config={"estimated_cycles":"70"}
  %new = f32[4]{0} dot(%batch, %w), metadata={op_name="jit(run)/while/body/local_step/dot_general"}
  %start = (s32[], f32[4]{0}) tuple(%i, %new)
  %parts = (s32[], f32[4]{0}) while(%start), condition=%twice, body=%part
  ROOT %out = (s32[], f32[5,8,4]{2,1,0}, f32[4]{0}) tuple(%i, %data, %new)
}

%more (carry: (s32[], f32[5,8,4], f32[4])) -> pred[] {
  %carry = (s32[], f32[5,8,4]{2,1,0}, f32[4]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (data: f32[5,8,4], w: f32[4]) -> f32[4] {
  %data = f32[5,8,4]{2,1,0} parameter(0)
  %w = f32[4]{0} parameter(1)
  %zero = s32[] constant(0)
  %laid = f32[5,8,4]{2,1,0} copy(%data)
  %start = (s32[], f32[5,8,4]{2,1,0}, f32[4]{0}) tuple(%zero, %laid, %w)
  %loop = (s32[], f32[5,8,4]{2,1,0}, f32[4]{0}) while(%start), condition=%more, body=%step
  ROOT %result = f32[4]{0} get-tuple-element(%loop), index=2
}
"""


def test_a_loop_that_runs_once_is_none():
    inner = TEXT.replace("while/body/local_step", "while/body/while/body/local_step")
    assert step_cost(inner, (5.0,)) == step_cost(TEXT)
    assert (
        step_cost(inner, (5.0, 1.0)) == step_cost(inner, (5.0, 1.0, 3.0)) == step_cost(TEXT, (5.0,))
    )


def test_a_step_counts_what_its_kernels_touch():
    sliced, product, halves = 2 * 128 + 4, 128 + 16 + 16, 2 * (16 + 16)
    cost = step_cost(TEXT)
    assert cost == (4, sliced + product + halves, 70)
    assert step_cost(TEXT, (5.0,)) == (4 + 1 / 5, sliced + product + halves + 2 * 640 / 5, 70)


def test_another_stage_is_no_part_of_what_is_around_a_step():
    two = TEXT.replace(
        "%more (carry",
        """%other (carry: (s32[], f32[5,8,4], f32[4])) -> (s32[], f32[5,8,4], f32[4]) {
  %carry = (s32[], f32[5,8,4]{2,1,0}, f32[4]{0}) parameter(0)
  %w = f32[4]{0} get-tuple-element(%carry), index=2
  %halved = f32[4]{0} negate(%w), metadata={op_name="jit(run)/while/body/local_step/neg"}
  ROOT %out = (s32[], f32[5,8,4]{2,1,0}, f32[4]{0}) tuple(%carry)
}

%more (carry""",
    ).replace(
        "  ROOT %result",
        """  %again = (s32[], f32[4]{0}) while(%loop), condition=%twice, body=%other
  ROOT %result""",
    )
    assert "body=%other" in two
    assert step_cost(two, (5.0,)) == step_cost(TEXT, (5.0,))


def test_a_text_without_local_steps_costs_nothing():
    assert step_cost("HloModule empty") == (0, 0, 0)


def test_products_are_those_of_one_batch():
    model = mlp((8, 8, 1), 10, hidden=(16,))
    population = place(small_clients())
    algorithm = fedavg(model, local=LocalSGD(optax.sgd(0.1), batch_size=4))
    key = jax.random.key(0)
    step: Any = compile_rounds(algorithm, population, chunk=1, segment=1)
    traced = step.func.trace(
        *step.args, key, 0, 1, *initialize(key, key, algorithm, population), **step.keywords
    )
    # Forward, and backward by weights and, of the second layer, by inputs.
    assert sum(products(traced.jaxpr.jaxpr, STEP)) == 2 * 4 * (2 * 64 * 16 + 3 * 16 * 10)


def test_an_unknown_chip_is_refused():
    with pytest.raises(ValueError, match=r"chip must be .* got 'v1'"):
        footprint("v1", ALGORITHMS["fedavg"](), small_clients(), chunk=4)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_an_absent_compiler_says_what_to_install(platform, monkeypatch):
    def absent(**_described):
        raise NotImplementedError("no such compiler")

    monkeypatch.setattr("tools.footprint.chips.topologies.get_topology_desc", absent)
    chip = next(name for name, sheet in CHIPS.items() if sheet.platform == platform)
    with pytest.raises(ValueError, match=rf"got '{chip}'.*pip install 'jaxfl\[plan-"):
        device_of(chip)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_is_exported_for_accelerators(name):
    algorithm, clients = ALGORITHMS[name](), small_clients()
    population = place(clients, jax.devices()[:1])
    key = jax.random.key(0)
    step: Any = compile_rounds(algorithm, population, chunk=4, segment=1)
    arguments = (
        *step.args,
        key,
        np.int32(0),
        np.int32(1),
        *initialize(key, key, algorithm, population),
    )
    exported = jax.export.export(step.func, platforms=("cuda", "tpu"))(*arguments, **step.keywords)
    assert "callback" not in exported.mlir_module()


def test_the_command_prints_a_runs_footprint(monkeypatch, capsys, tmp_path):
    seen = {}

    def counted(chip, algorithm, clients, *, chunk, trips):
        seen.update(
            chip=chip, method=algorithm.name, clients=clients.num_clients, chunk=chunk, trips=trips
        )
        return Footprint(chip, chunk, 12.5, 9, 2e6, 3e6, 4e6, 5e9, 1000, math.nan)

    monkeypatch.setattr(command, "footprint", counted)
    monkeypatch.setattr(command, "run_here", lambda: None)
    config = tmp_path / "run.yaml"
    config.write_text(
        "method: fedavg\npopulation: {clients: 20, partition: iid}\n"
        "local: {batch_size: 8, epochs: 3}\n"
    )
    command.main("h100", chunk=64, config=config, as_json=True)
    # 72 of the digits each: 9 batches of 8 in one block, 3 times.
    assert seen == {
        "chip": "h100",
        "method": "fedavg",
        "clients": 20,
        "chunk": 64,
        "trips": (9, 1, 3),
    }
    found = json.loads(capsys.readouterr().out)
    assert found["MB moved, per client"] == 2
    assert found["us as its compiler expects"] is None
    command.main("h100", chunk=64, config=config)
    assert "kernels of a step of all    12.5" in capsys.readouterr().out
