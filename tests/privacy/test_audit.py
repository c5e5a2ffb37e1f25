"""Canaries: directions and scores, compared with dense algebra, and the audit's bounds."""

import dataclasses
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.linalg
from algorithms_table import ALGORITHMS, MODEL, small_clients
from dp_accounting import get_epsilon_gaussian
from jax.flatten_util import ravel_pytree

from jaxfl import simulate, sweep
from jaxfl.algorithms import dp_fedavg, fedadam, fedavg
from jaxfl.engine.mesh import place
from jaxfl.engine.program import compile_rounds, initialize
from jaxfl.privacy import (
    AdaptiveClip,
    BallsInBins,
    BandedNoise,
    Canaries,
    CyclicPoisson,
    FixedSize,
    Full,
    Mechanism,
    Median,
    MinSeparation,
    Poisson,
    PrivacyFilter,
    format_statement,
    planned_ledger,
    privacy_statement,
)
from jaxfl.privacy.audit import (
    Scores,
    _canary_signs,
    _distances,
    _fold,
    _hadamard,
    _power_of_two,
    _repeat,
    audit_report,
    check_audit,
    model_in,
    with_final,
)
from jaxfl.privacy.statement import with_audit
from jaxfl.types import Message

KEY = jax.random.key(4)
RUN = {"rounds": 2, "eval_every": 2, "progress": False, "audit": Canaries(60)}


def scores_of(mechanism, canaries=1000, rounds=1, size=20_000, update=None):
    """Return the canaries' scores after some rounds, and each round's aggregate."""
    update = jnp.zeros(size) if update is None else update
    algorithm = fedavg(MODEL, mechanism=mechanism)._replace(
        audit=Canaries(canaries),
        init=lambda key, number: (jnp.zeros((rounds, size)), ()),
        client_update=lambda key, server, client, data: (Message(update), client, {}),
        server_update=lambda server, aggregate: jnp.concatenate([server[1:], aggregate[None]]),
    )
    population = place(small_clients(), jax.devices()[:1])
    step = compile_rounds(algorithm, population, chunk=1, segment=rounds)
    center = step(KEY, 0, rounds, *initialize(KEY, KEY, algorithm, population))[0]
    return jax.device_get((center.scores, center.server))


def directions(scores, count, size):
    """Return the canaries' directions u_j as rows, by a dense Hadamard matrix."""
    columns = scipy.linalg.hadamard(_power_of_two(count)).T
    tiled = np.tile(columns, (1, -(-size // len(columns))))[:count, :size]
    return tiled * np.asarray(_canary_signs(jnp.asarray(scores.secret), size)) / math.sqrt(size)


@pytest.mark.parametrize("count", [1, 5, 64])
def test_transforms_are_those_of_a_hadamard_matrix(count):
    rows, size = _power_of_two(count), 150
    matrix = scipy.linalg.hadamard(rows)
    values = np.random.default_rng(0).normal(size=rows).astype(np.float32)
    np.testing.assert_allclose(
        _hadamard(jnp.asarray(values)), matrix @ values, rtol=1e-4, atol=1e-4
    )
    tall = np.tile(matrix, (-(-size // rows), 1))[:size]
    np.testing.assert_allclose(_repeat(jnp.asarray(values), size), np.tile(values, 200)[:size])
    flat = np.random.default_rng(1).normal(size=size).astype(np.float32)
    np.testing.assert_allclose(
        _hadamard(_fold(jnp.asarray(flat), rows)), tall.T @ flat, rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("mechanism", [
    Mechanism(clip=0.5, noise_multiplier=1.0),
    Mechanism(clip=0.5, noise_multiplier=1.0, noise="grid"),
    Mechanism(clip=0.5, noise_multiplier=1.0, weights=np.linspace(1, 2, 11), denominator="participants"),
    Mechanism(clip=0.5, client_noise=0.1),
    AdaptiveClip(clip=0.5, noise_multiplier=1.0, bit_noise=2.0, rate=0.0),
], ids=["float", "grid", "weighted", "clients", "adaptive"])  # fmt: skip
def test_canaries_are_in_the_sum_and_scores_are_products(mechanism):
    size, count = 3000, 40
    scores, released = scores_of(mechanism, count, size=size)
    u = directions(scores, count, size)
    assert np.abs(u @ u.T - np.eye(count)).max() <= _power_of_two(count) / (2 * size) + 1e-6
    weight = 1.0 if mechanism.weights is None else 2.0
    denominator = 11 if mechanism.weights is None else mechanism.weights.sum()
    x = u @ released[0] * denominator / (0.5 * weight)
    np.testing.assert_allclose(scores.sum, x, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(scores.most, x, rtol=2e-4, atol=2e-4)
    plain, _ = scores_of(
        dataclasses.replace(mechanism, clip=0.25), count, size=size
    )  # the same noise over C
    assert 0.6 < x[scores.taken].mean() - x[~scores.taken].mean() < 1.4
    np.testing.assert_allclose(plain.sum, scores.sum, atol=0.02)


def test_scores_of_a_gaussian_are_gaussian():
    """At z = 2 scores differ by 1 with std 2. The estimate is the true epsilon."""
    scores, _ = scores_of(Mechanism(clip=1.0, noise_multiplier=2.0), 4000, size=200_000)
    inside, outside = scores.sum[scores.taken], scores.sum[~scores.taken]
    error = 2 * math.sqrt(4 / 4000)
    assert inside.mean() - outside.mean() == pytest.approx(1, abs=4 * error)
    assert outside.std() == pytest.approx(2, rel=4 / math.sqrt(4000))
    assert scores.taken.mean() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(4000))
    np.testing.assert_allclose(scores.likelihood, (scores.sum - 0.5) / 4, rtol=1e-4, atol=1e-5)
    report, exact = audit_report(scores, 1e-5), get_epsilon_gaussian(2.0, 1e-5)
    assert report["at_least"] <= exact
    assert report["estimate"] == pytest.approx(exact, rel=0.2)


def test_half_the_noise_is_caught():
    """The noise has z = 1, and the statement claims z = 2."""
    scores, _ = scores_of(Mechanism(clip=1.0, noise_multiplier=1.0), 30_000, size=2**19)
    assert audit_report(scores, 1e-5)["at_least"] > get_epsilon_gaussian(2.0, 1e-5)


def test_half_the_noise_shows_in_the_estimate_of_a_thousand_canaries(caplog):
    """A thousand canaries prove less than the stated epsilon, but their estimate exceeds it."""
    scores, _ = scores_of(Mechanism(clip=1.0, noise_multiplier=1.0))
    mechanism = Mechanism(clip=1.0, noise_multiplier=2.0)
    statement = privacy_statement(planned_ledger(mechanism, 20, 1), mechanism, 20)
    report = audit_report(scores, statement["delta"])
    stated = statement["honest"]["aggregate"]["epsilon"]
    assert report["at_least"] < stated < report["estimate_at_least"] < report["estimate"]
    hinted = with_audit(statement, report)
    assert hinted["warnings"] == statement["warnings"]
    text = " ".join(format_statement(hinted).split())
    said = f"estimate {report['estimate']:.4g} the estimate is further above the stated {stated:.4g} than"
    assert said in text
    assert "a hint, not a proof" in text
    assert "a hint, not a proof" in caplog.text


def test_one_honest_run_in_a_hundred_is_hinted_at():
    generator, runs, z = np.random.default_rng(0), 3000, 2.0
    hints = 0
    for _ in range(runs):
        inside = generator.normal(1.0, z, 480)
        outside = generator.normal(0.0, z, 520)
        hints += _distances(inside, outside)[1] > 1 / z
    assert abs(hints - 0.01 * runs) < 4 * math.sqrt(0.01 * runs)


def test_scores_without_spread_estimate_nothing_or_infinity():
    ones, zeros = np.ones(16), np.zeros(16)
    assert _distances(zeros, zeros) == _distances(zeros, ones) == (0, 0)
    assert _distances(ones, zeros) == (math.inf, math.inf)
    statement = {"honest": {"aggregate": {"epsilon": "inf"}}, "warnings": {}, "claim": None}
    audit = {"at_least": 1.0, "estimate": math.inf, "estimate_at_least": math.inf}
    stated = with_audit(statement, audit)
    assert json.loads(json.dumps(stated, allow_nan=False))["audit"]["estimate"] == "inf"
    assert audit["estimate"] == math.inf


@pytest.mark.parametrize(
    "sampling",
    [
        Poisson(0.3),
        BallsInBins(4),
        *(
            pytest.param(s, marks=pytest.mark.slow)
            for s in (Full(), FixedSize(4), CyclicPoisson(0.2, 3), MinSeparation(2, separation=3))
        ),
    ],
    ids=lambda sampling: type(sampling).__name__,
)
def test_canaries_take_part_as_often_as_clients(sampling):
    rounds, rate = 12, sampling.expected(11) / 11
    scores, _ = scores_of(
        Mechanism(clip=1.0, noise_multiplier=0.01, sampling=sampling), 2000, rounds, size=100_000
    )
    inside, outside = scores.sum[scores.taken], scores.sum[~scores.taken]
    expected = rounds * rate
    assert inside.mean() - outside.mean() == pytest.approx(expected, rel=0.1)
    if isinstance(sampling, BallsInBins):
        assert inside.std() < 0.5
    # As likely as it should be: the ratio of likelihoods tells most of those who took part.
    assert np.mean(scores.likelihood[scores.taken] > 0) > 0.8
    assert np.mean(scores.likelihood[~scores.taken] > 0) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp_fedavg", "feddpa", "padpfl", "dp_pfeddsu_paper"])
def test_an_audit_runs_with_many_methods_on_both_stores(name):
    algorithm = ALGORITHMS[name]()
    device, host = (
        simulate(KEY, algorithm, small_clients(), states=store, **RUN)
        for store in ("device", "host")
    )
    assert device.audit is not None
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        device.audit,
        host.audit,
    )
    assert device.statement["mechanism"] == type(algorithm.mechanism).__name__
    assert "audited from below with 60 canaries" in format_statement(device.statement)
    plain = simulate(KEY, algorithm, small_clients(), **{**RUN, "audit": None})
    assert device.statement["honest"] == plain.statement["honest"]
    jax.tree.map(
        np.testing.assert_array_equal, device.ledger.participants, plain.ledger.participants
    )
    assert jax.tree.structure(device.memory) == jax.tree.structure(plain.memory)


@pytest.mark.slow
def test_an_audit_is_swept_and_kept_in_its_folder(tmp_path):
    def build(noise_multiplier):
        return dp_fedavg(MODEL, clip=0.2, noise_multiplier=noise_multiplier, sampling=Poisson(0.6))

    runs = sweep(
        KEY, build, {"noise_multiplier": [0.5, 4.0]}, small_clients(), paired_noise=True, **RUN
    )
    alone = simulate(KEY, build(4.0), small_clients(), folder=tmp_path, **RUN)
    np.testing.assert_allclose(runs[1].audit.sum, alone.audit.sum, rtol=1e-3, atol=1e-3)
    assert runs[0].audit.sum.std() < runs[1].audit.sum.std()
    kept = np.load(tmp_path / "audit.npz")
    np.testing.assert_array_equal(kept["likelihood"], alone.audit.likelihood)
    np.testing.assert_array_equal(kept["taken"], alone.audit.taken)
    again = simulate(KEY, build(4.0), small_clients(), folder=tmp_path, **RUN)
    assert (again.restored, again.statement["audit"]) == (2, alone.statement["audit"])
    with pytest.raises(ValueError, match="holds another run"):
        simulate(KEY, build(4.0), small_clients(), folder=tmp_path, **{**RUN, "audit": None})


@pytest.mark.parametrize(
    ("optimizer", "linear"),
    [(fedadam(0.1), False), pytest.param(optax.sgd(0.5), True, marks=pytest.mark.slow)],
    ids=["adaptive", "plain"],
)
def test_the_final_model_is_scored_by_how_far_it_moved(optimizer, linear, tmp_path):
    """Scores of the move are those of the sum if the server is linear, and otherwise not."""
    options = {
        "clip": 0.3,
        "noise_multiplier": 0.5,
        "sampling": Poisson(0.6),
        "server_optimizer": optimizer,
    }
    algorithm = dp_fedavg(MODEL, **options)
    result = simulate(KEY, algorithm, small_clients(), folder=tmp_path, **RUN)
    first = algorithm.init(jax.random.split(KEY, 3)[0], 11)[0]
    before, after = (
        np.asarray(ravel_pytree(s.params)[0], np.float64) for s in (first, result.server)
    )
    expected = directions(result.audit, 60, len(before)) @ (after - before)
    np.testing.assert_allclose(result.audit.final, expected, rtol=1e-3, atol=1e-6)
    like_sum = result.audit.final * (0.6 * 11) / (0.3 * 0.5)
    assert np.allclose(like_sum, result.audit.sum, rtol=1e-3, atol=1e-4) == linear
    np.testing.assert_array_equal(np.load(tmp_path / "audit.npz")["final"], result.audit.final)
    told = result.statement["audit"]
    assert told["scores"].keys() == {"likelihood", "sum", "most", "final"}
    assert not told["by"].endswith("final")
    if linear:
        assert told["scores"]["final"] == pytest.approx(told["scores"]["sum"])


def test_the_model_is_the_first_part_with_the_shapes_of_an_update():
    update = {"a": jnp.zeros(3), "b": jnp.zeros(2)}
    first, last = ({"a": start + jnp.arange(3.0), "b": jnp.ones(2)} for start in (0, 5))
    np.testing.assert_array_equal(model_in((jnp.ones(()), [first, last]), update), [0, 1, 2, 1, 1])
    assert model_in({"c": jnp.zeros(3), "b": jnp.zeros(2)}, update) is None
    scores = Scores(
        jnp.zeros(2, jnp.uint32), jnp.arange(5) < 2, jnp.zeros(5), jnp.zeros(5), jnp.zeros(5)
    )
    assert with_final(scores, None, None).final is None


def test_correlated_noise_is_audited_by_its_sum():
    """If all clients take part, the sum over rounds has little noise, and its estimate is near."""
    mechanism = BandedNoise(clip=1.0, noise_multiplier=8.0, bands=4)
    scores, _ = scores_of(mechanism, 2000, rounds=8, size=100_000)
    matrix = np.sum([c * np.eye(8, k=-k) for k, c in enumerate(mechanism.strategy(8))], axis=0)
    noise = 8.0 * np.linalg.norm(np.ones(8) @ np.linalg.inv(matrix))
    assert scores.sum[~scores.taken].std() == pytest.approx(noise, rel=4 / math.sqrt(2000))


def test_a_refuted_statement_says_so(caplog):
    statement = {"honest": {"aggregate": {"epsilon": 1.0}}, "warnings": {"w": "text"}}
    audit = {"at_least": 1.2}
    claim = {"epsilon": 1.1, "status": "claimed, not verified"}
    refuted = with_audit(statement | {"claim": claim}, audit)
    assert list(refuted["warnings"]) == ["refuted_by_audit", "w"]
    text = refuted["warnings"]["refuted_by_audit"]
    assert "epsilon to be at least 1.2 at 95% confidence, but 1 is stated" in text
    assert refuted["claim"]["status"] == "claimed, and refuted at client level by the audit"
    assert "do not publish any of it" in caplog.text
    fine = with_audit(statement | {"claim": None}, {"at_least": 0.9, "estimate_at_least": 0.99})
    assert fine["warnings"] == {"w": "text"}
    assert "hint" not in fine["audit"]
    assert "hint" not in refuted["audit"]


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        (Mechanism(), "clips updates"),
        (Mechanism(clip=1.0, communicates=False), "clips updates"),
        (Median(clip=1.0), "adds nothing up"),
    ],
)
def test_what_cannot_be_audited_is_refused(mechanism, message):
    algorithm = fedavg(MODEL, mechanism=mechanism)
    with pytest.raises(ValueError, match=message):
        simulate(KEY, algorithm, small_clients(), **RUN)


def test_without_the_extra_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_privacy", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxfl\[audit\]'"):
        check_audit(Mechanism(clip=1.0, noise_multiplier=1.0))


@pytest.mark.parametrize(
    "mechanism",
    [
        Mechanism(clip=1.0, client_noise=2.0, sampling=Poisson(0.1)),
        PrivacyFilter(clip=1.0, client_noise=2.0, least_total=0.5),
    ],
)
def test_canaries_need_the_noise_that_clients_count_on(mechanism):
    with pytest.raises(ValueError, match="Canaries add no noise"):
        check_audit(mechanism)
    check_audit(Mechanism(clip=1.0, client_noise=2.0))
