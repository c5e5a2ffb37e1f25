"""DP-pFedDSU against simple computations, and its statement about private masks."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms_table import CLIP, SIZES, client_data, small_clients

from jaxfl import simulate
from jaxfl.algorithms import centaur, dp_pfeddsu, dp_pfeddsu_paper, fedrep
from jaxfl.local.train import LocalSGD
from jaxfl.models import mlp
from jaxfl.privacy import Full, Mechanism

KEY = jax.random.key(3)
MODEL = mlp((8, 8, 1), 10, hidden=(12, 11))
LOCAL: dict[str, Any] = {
    "local": LocalSGD(optax.sgd(0.2, momentum=0.9), 4, 2),
    "head": LocalSGD(optax.sgd(0.01, momentum=0.9), 4, 2),
}
PRIVATE: dict[str, Any] = {"clip": CLIP, "noise_multiplier": 1.0, "sampling": Full()}


def run(algorithm, rounds=2):
    return simulate(KEY, algorithm, small_clients(), rounds=rounds, progress=False)


def update_of(algorithm, index=0):
    server, heads = algorithm.init(KEY, len(SIZES))
    head = jax.tree.map(lambda leaf: leaf[index], heads)
    message = algorithm.client_update(KEY, server, head, client_data(index))[0]
    return server, message


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"density": 1.0}, {"sparse_layers": 0}])
def test_dense_without_penalty_is_centaur_bit_for_bit(options):
    expected = run(centaur(MODEL, **PRIVATE, **LOCAL))
    found = run(dp_pfeddsu(MODEL, penalty_weight=0.0, **options, **PRIVATE, **LOCAL))
    assert_same(found.server.params, expected.server.params)
    assert_same(found.states, expected.states)


@pytest.mark.slow
def test_dense_without_penalty_noise_and_clip_is_fedrep():
    expected = run(fedrep(MODEL, mechanism=Mechanism(denominator="participants"), **LOCAL))
    free: dict[str, Any] = {"clip": float("inf"), "noise_multiplier": 0.0, "sampling": Full()}
    found = run(dp_pfeddsu(MODEL, penalty_weight=0.0, density=1.0, **free, **LOCAL))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        found.server.params,
        expected.server.params,
    )


@pytest.mark.slow
def test_random_masks_change_from_round_to_round():
    algorithm = dp_pfeddsu(MODEL, mask_source="public_random", density=0.1, **PRIVATE, **LOCAL)
    masks = [
        np.asarray(run(algorithm, rounds).server.mask["dense_1"]["kernel"]) for rounds in (1, 2)
    ]
    assert masks[0].sum() == masks[1].sum() == 14
    assert (masks[0] != masks[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["broadcast", "public_random"])
def test_off_the_public_mask_nothing_moves(source):
    algorithm = dp_pfeddsu(
        MODEL, mask_source=source, density=0.1, sparse_layers=1, **PRIVATE, **LOCAL
    )
    init_key = jax.random.split(KEY, 3)[0]
    before, _ = algorithm.init(init_key, len(SIZES))
    after = run(algorithm, rounds=1).server
    kept = before.support["dense_1"]["kernel"]
    assert int(kept.sum()) == 14  # ceil(0.1 * 132)
    moved = np.asarray(before.params["dense_1"]["kernel"]) != np.asarray(
        after.params["dense_1"]["kernel"]
    )
    np.testing.assert_array_equal(moved, kept)
    assert np.all(
        np.asarray(before.params["dense_0"]["kernel"])
        != np.asarray(after.params["dense_0"]["kernel"])
    )


def test_public_masks_are_the_same_for_all_clients_and_updates_live_on_them():
    algorithm = dp_pfeddsu(MODEL, density=0.1, **PRIVATE, **LOCAL)
    for index in (0, 4):
        server, message = update_of(algorithm, index)
        assert message.extra is None
        off = jax.tree.map(
            lambda m, u: np.asarray(u)[~np.asarray(m)], server.support, message.update
        )
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(off))
        assert optax.tree.norm(message.update) > 0


def test_private_masks_differ_between_clients_and_carry_the_noise():
    algorithm = dp_pfeddsu_paper(MODEL, clients=len(SIZES), density=0.1, **PRIVATE, **LOCAL)
    (_, one), (_, other) = (update_of(algorithm, index) for index in (0, 4))
    assert not all(
        np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (one.extra, other.extra)), strict=True)
    )
    for message in (one, other):
        assert_same(
            jax.tree.map(lambda u, m: jnp.where(m, u, 0), message.update, message.extra),
            message.update,
        )


@pytest.mark.slow
def test_the_statement_of_private_masks_is_infinite_and_says_why():
    found = run(
        dp_pfeddsu_paper(MODEL, clients=len(SIZES), claim=1.0, density=0.1, **PRIVATE, **LOCAL)
    ).statement
    for observer in ("aggregate", "upload"):
        assert found["honest"][observer]["rdp"]["total"] == "inf"
        assert "private weights" in found["honest"][observer]["rdp"]["reason"]
    assert found["claim"]["epsilon"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"mask_source": "public_random"}, {"mask_source": "local_step"}]
)
def test_the_sound_statement_is_finite(options):
    found = run(dp_pfeddsu(MODEL, density=0.1, **options, **PRIVATE, **LOCAL)).statement
    assert found["honest"]["aggregate"]["rdp"]["total"] != "inf"


@pytest.mark.slow
def test_sound_private_masks_have_noise_everywhere():
    algorithm = dp_pfeddsu(
        MODEL,
        density=0.1,
        mask_source="local_step",
        **PRIVATE,
        **LOCAL | {"local": LocalSGD(optax.sgd(0.0), 4)},
    )
    before, _ = algorithm.init(jax.random.split(KEY, 3)[0], len(SIZES))
    after = run(algorithm, rounds=1).server
    moved = jax.tree.map(
        lambda a, b: np.mean(np.asarray(a) != np.asarray(b)), before.params, after.params
    )
    assert min(jax.tree.leaves(moved)) > 0.98


def test_a_wider_backward_pass_moves_more_than_the_forward_mask():
    _, narrow = update_of(dp_pfeddsu(MODEL, density=0.1, **PRIVATE, **LOCAL))
    server, wide = update_of(
        dp_pfeddsu(MODEL, density=0.1, backward_density=0.5, **PRIVATE, **LOCAL)
    )
    count = [int((np.asarray(u.update["dense_0"]["kernel"]) != 0).sum()) for u in (narrow, wide)]
    assert count[0] < count[1] <= int(server.support["dense_0"]["kernel"].sum()) == 384


def test_the_first_forward_pass_is_on_masked_weights():
    algorithm = dp_pfeddsu(MODEL, density=0.1, **PRIVATE, **LOCAL)
    server, heads = algorithm.init(KEY, len(SIZES))
    params = algorithm.personalize(KEY, server, jax.tree.map(lambda a: a[0], heads), client_data())
    kept = jax.tree.map(lambda m, p: jnp.where(m, p, 0), server.mask, server.params)
    assert_same({name: params[name] for name in server.params}, kept)


@pytest.mark.parametrize("build", [dp_pfeddsu, partial(dp_pfeddsu_paper, clients=len(SIZES))])
def test_passes_before_evaluation_are_their_own_and_a_round_is_the_same(build):
    usual, none = (
        build(MODEL, density=0.1, evaluation_epochs=n, **PRIVATE, **LOCAL) for n in (None, 0)
    )
    server, heads = usual.init(KEY, len(SIZES))
    head = jax.tree.map(lambda leaf: leaf[0], heads)
    tested = [method.personalize(KEY, server, head, client_data()) for method in (usual, none)]
    moved = [np.any(params["head"]["kernel"] != head["head"]["kernel"]) for params in tested]
    assert moved == [True, False]
    assert_same(
        *(method.client_update(KEY, server, head, client_data())[:2] for method in (usual, none))
    )


def test_wrong_arguments_name_themselves():
    good: dict[str, Any] = {"sampling": Full(), "noise_multiplier": 1.0}
    wrongs: dict[str, dict[str, Any]] = {
        "density": {"density": 0.0},
        "backward_density": {"density": 0.5, "backward_density": 0.1},
        "sparse_layers": {"sparse_layers": -1},
        "penalty_weight": {"penalty_weight": -1.0},
        "clip": {"clip": float("inf")},
    }
    layers = sum(name not in MODEL.head for name in MODEL.layers)  # each of an mlp's has a kernel
    assert dp_pfeddsu(MODEL, **good, sparse_layers=layers).name == "dp_pfeddsu"
    wrongs["sparse_layers must be at most"] = {"sparse_layers": layers + 1}
    for name, wrong in wrongs.items():
        with pytest.raises(ValueError, match=name):
            dp_pfeddsu(MODEL, **good, **wrong)
