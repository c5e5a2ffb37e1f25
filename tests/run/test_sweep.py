import functools
import json
from typing import Any

import jax
import numpy as np
import optax
import pytest
from algorithms_table import MODEL, SIZES, small_clients

from jaxfl import simulate, sweep
from jaxfl.algorithms import (
    adp_pfl,
    adp_pfl_paper,
    dp_fedavg,
    dp_fedsam,
    dp_pfeddsu,
    fedavg,
    feddpa_paper,
    fedprox,
    local_only,
)
from jaxfl.algorithms.adp_pfl import fisher_percentile
from jaxfl.local.train import LocalSGD
from jaxfl.privacy import AdaptiveClip, Full, Poisson

KEY = jax.random.key(1)
SETTING: dict[str, Any] = {"rounds": 3, "eval_every": 2, "progress": False}


SMALL = LocalSGD(optax.sgd(0.05), batch_size=4)


def sparse(rate, **values):
    local, head = (
        LocalSGD(optax.sgd(rate, momentum=0.9), 4),
        LocalSGD(optax.sgd(0.01, momentum=0.9), 4),
    )
    return dp_pfeddsu(
        MODEL, sampling=Poisson(0.7), local=local, head=head, sparse_layers=1, **values
    )


def scheduled(scale, percentile, **values):
    noise, mask = scale * np.array([3.0, 2.0, 1.0]), fisher_percentile(percentile)
    return adp_pfl(MODEL, sampling=Poisson(0.7), noise=noise, mask=mask, local=SMALL, **values)


def adaptive(**values):
    local = LocalSGD(optax.sgd(0.1), batch_size=4, epochs=2)
    return feddpa_paper(MODEL, clients=11, sampling=Full(), local=local, **values)


SWEEPS: dict[str, Any] = {
    "dp_pfeddsu": (
        sparse,
        {"rate": [0.1, 0.2], "density": [0.1, 0.7], "penalty_weight": [0.0, 0.5], "clip": [0.5, 0.1],
         "noise_multiplier": [1.0, 0.5]},
    ),
    "feddpa": (
        adaptive,
        {"lambda1": [0.0, 0.1], "lambda2": [0.2, 0.0], "threshold": [0.3, 0.5], "clip": [0.2, 0.4],
         "noise_multiplier": [0.5, 0.0]},
    ),
    "adp_pfl": (
        scheduled,
        {"scale": [1.0, 0.1], "percentile": [80.0, 20.0], "clip": [0.5, 0.1]},
    ),
    "dp_fedsam": (
        functools.partial(dp_fedsam, MODEL, clip=0.3, noise_multiplier=0.0, sampling=Full(), local=SMALL),
        {"radius": [0.0, 0.1]},
    ),
}  # fmt: skip


def _accounted(statement):
    """Return a statement without the parts on randomness, which points may share."""
    return {
        name: said
        for name, said in statement.items()
        if name not in ("paired", "warnings", "assumed")
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "dp_fedsam" else pytest.mark.slow) for name in SWEEPS],
)
def test_every_point_is_the_run_of_its_values(name):
    build, values = SWEEPS[name]
    sweeps = [sweep(KEY, build, values, small_clients(), paired_noise=True, **SETTING)]
    if name == "dp_pfeddsu":
        sweeps.append(
            sweep(KEY, build, values, small_clients(), paired_noise=True, batch=2, **SETTING)
        )
    for point in range(2):
        row = {name: column[point] for name, column in values.items()}
        alone = simulate(KEY, build(**row), small_clients(), **SETTING)
        for result in (results[point] for results in sweeps):
            trees = ((result.server, result.states), (alone.server, alone.states))
            for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            assert _accounted(result.statement) == _accounted(alone.statement)
            for a, b in zip(result.metrics, alone.metrics, strict=True):
                assert a == pytest.approx(b, rel=1e-3, abs=1e-5, nan_ok=True)


@pytest.mark.slow
def test_a_key_per_point_is_a_run_of_that_seed():
    build = functools.partial(
        dp_fedavg,
        MODEL,
        clip=0.3,
        noise_multiplier=1.0,
        sampling=Poisson(0.5),
        local=LocalSGD(optax.sgd(0.05), batch_size=4),
    )
    keys = jax.random.split(KEY, 2)
    for key, result in zip(keys, sweep(keys, build, {}, small_clients(), **SETTING), strict=True):
        alone = simulate(key, build(), small_clients(), **SETTING)
        np.testing.assert_array_equal(result.ledger.participants, alone.ledger.participants)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
            result.server,
            alone.server,
        )


@pytest.mark.slow
def test_more_points_trace_no_more():
    calls = []

    def build(mu):
        calls.append(mu)
        return fedprox(MODEL, mu=mu, local=LocalSGD(optax.sgd(0.05), batch_size=4))

    def traces(values):
        calls.clear()
        sweep(KEY, build, {"mu": values}, small_clients(), **SETTING)
        return sum(isinstance(mu, jax.core.Tracer) for mu in calls)

    assert traces([0.0, 0.1, 0.2, 0.3]) == traces([0.1])


@pytest.mark.slow
def test_a_stopped_sweep_goes_on_bit_identically(tmp_path, monkeypatch):
    build, values = (
        functools.partial(dp_fedavg, MODEL, clip=0.3, sampling=Full()),
        {"noise_multiplier": [1.0, 2.0]},
    )
    whole = sweep(KEY, build, values, small_clients(), folder=tmp_path / "whole", **SETTING)
    monkeypatch.setattr("jaxfl.run.followers._CHECKPOINT_SECONDS", -1.0)
    with monkeypatch.context() as patch:
        patch.setattr("jaxfl.run.recorder.Journal.evaluated", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            sweep(
                KEY,
                build,
                values,
                small_clients(),
                folder=tmp_path / "parts",
                **SETTING | {"eval_every": 3},
            )
    parts = sweep(
        KEY,
        build,
        values,
        small_clients(),
        folder=tmp_path / "parts",
        **SETTING | {"eval_every": 3},
    )
    for a, b in zip(whole, parts, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a.server, b.server)
    folder = tmp_path / "whole" / "1_noise_multiplier=2"
    assert {p.name for p in folder.iterdir()} == {
        "metrics.jsonl",
        "per_client.npz",
        "privacy.json",
        "curves.png",
    }
    assert json.loads((folder / "privacy.json").read_text()) == whole[1].statement
    with pytest.raises(ValueError, match="values"):
        sweep(
            KEY,
            build,
            {"noise_multiplier": [1.0, 3.0]},
            small_clients(),
            folder=tmp_path / "whole",
            **SETTING,
        )


def test_many_points_have_no_pictures(tmp_path, monkeypatch):
    build, values = (
        functools.partial(dp_fedavg, MODEL, clip=0.3, sampling=Full()),
        {"noise_multiplier": [1.0, 2.0]},
    )
    for most in (1, 2):
        monkeypatch.setattr("jaxfl.run.execute._PICTURES", most)
        sweep(KEY, build, values, small_clients(), folder=tmp_path / str(most), **SETTING)
    assert not list((tmp_path / "1").rglob("curves.png"))
    assert len(list((tmp_path / "2").rglob("curves.png"))) == 2


def test_clients_states_need_not_stay(tmp_path):
    build, values = functools.partial(local_only, MODEL), {"learning_rate": [0.1, 0.2]}
    runs = functools.partial(
        sweep, KEY, lambda learning_rate: build(local=LocalSGD(optax.sgd(learning_rate))), values
    )
    whole = runs(small_clients(), folder=tmp_path / "whole", **SETTING)
    lean = functools.partial(runs, small_clients(), folder=tmp_path / "lean", keep_states=False)
    bare = lean(**SETTING)
    size = sum(leaf.nbytes for result in whole for leaf in jax.tree.leaves(result.states))
    written = [
        sum(path.stat().st_size for path in folder.rglob("ckpt/*/state/**/*"))
        for folder in tmp_path.iterdir()
    ]
    assert abs(written[0] - written[1]) > 0.8 * size > 0
    read = lean(**SETTING)
    for a, b, c in zip(whole, bare, read, strict=True):
        assert a.metrics == b.metrics == c.metrics
        assert (b.states, c.states, c.restored) == ((), (), SETTING["rounds"])
        jax.tree.map(np.testing.assert_array_equal, a.server, c.server)
    for changes in ({"rounds": SETTING["rounds"] + 1}, {"keep_states": True}):
        with pytest.raises(ValueError, match="did not keep them"):
            lean(**SETTING | changes)


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_point_without_a_clip_bound_cannot_share_a_program_with_noise():
    def build(clip, noise_multiplier):
        return dp_fedavg(MODEL, clip=clip, noise_multiplier=noise_multiplier, sampling=Full())

    with pytest.raises(ValueError, match="values of point 1 must have a finite clip in a sweep"):
        sweep(
            KEY,
            build,
            {"clip": [1.0, np.inf], "noise_multiplier": [0.0, 0.0]},
            small_clients(),
            **SETTING,
        )


def test_numbers_that_a_mechanism_refuses_are_refused_at_every_point():
    def build(z):
        mechanism = AdaptiveClip(clip=1.0, noise_multiplier=z, bit_noise=1.0)
        return fedavg(MODEL, mechanism=mechanism, local=SMALL)

    with pytest.raises(
        ValueError, match=r"bit_noise must be above 1\.25, .* got 1 with noise_multiplier=2\.5"
    ):
        sweep(KEY, build, {"z": [0.5, 2.5]}, small_clients(), **SETTING)


def test_an_adaptive_bound_without_noise_is_that_of_its_own_run():
    def build(z):
        return fedavg(
            MODEL, mechanism=AdaptiveClip(clip=1.0, noise_multiplier=z, bit_noise=2.0), local=SMALL
        )

    point = sweep(KEY, build, {"z": [1.0, 0.0]}, small_clients(), **SETTING)[1]
    bound, alone = (
        np.asarray(run.ledger.notes["clip"])
        for run in (point, simulate(KEY, build(0.0), small_clients(), **SETTING))
    )
    np.testing.assert_allclose(bound, alone, rtol=1e-5)
    assert len(set(alone)) > 1


def test_numbers_that_python_must_know_are_named():
    def build(noise):
        risks = np.linspace(1.0, 2.0, len(SIZES))
        return adp_pfl_paper(
            MODEL, noise=noise, risks=risks, clip=1.0, sampling=Full(), sensitivity="C", local=SMALL
        )

    with pytest.raises(ValueError, match=r"\['noise'\].*Run `simulate`"):
        sweep(KEY, build, {"noise": [1.0, 2.0]}, small_clients(), **SETTING)


def test_points_whose_server_breaks_stop_no_others():
    def build(rate):
        return fedavg(MODEL, local=LocalSGD(optax.sgd(0.05)), server_optimizer=optax.sgd(rate))

    first, second = sweep(KEY, build, {"rate": [np.inf, 1.0]}, small_clients(), **SETTING)
    assert first.metrics[-1]["accuracy"] == 0
    assert 0 < second.metrics[-1]["loss"] < np.inf


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "Give columns"),
        ({"mu": []}, "Give columns"),
        ({"mu": [0.1, 0.2], "sam_radius": [0.1]}, "'mu': 2, 'sam_radius': 1"),
        ({"mu": [0.1, -0.2]}, "mu must be .* got -0.2"),
        ({"ratio": [1.0, 2.0]}, r"\['ratio'\].*Run `simulate`"),
    ],
)
def test_wrong_values_name_themselves(values, message):
    def build(ratio=0.0, **values):
        return fedprox(
            MODEL, **values, local=LocalSGD(optax.sgd(0.05), steps=1 if ratio > 1 else 2)
        )

    with pytest.raises(ValueError, match=message):
        sweep(KEY, build, values, small_clients(), **SETTING)


def test_a_column_names_an_argument_of_the_builder():
    with pytest.raises(
        TypeError, match=r"^clp must be an argument of build\(\), .*Did you mean 'clip'\?"
    ):
        sweep(0, lambda clip: fedavg(MODEL), {"clp": [1.0]}, small_clients(), rounds=1)
