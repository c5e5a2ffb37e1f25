"""Files of models: they load as they were saved, and no other file is read or replaced."""

import json
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy
from algorithms_table import MODEL, small_clients

from jaxfl import LocalSGD, load_model, simulate
from jaxfl.algorithms import dp_fedavg, fine_tuned, prior_corrected
from jaxfl.models import (
    from_flax,
    frozen,
    gru,
    lenet,
    lora,
    mlp,
    transformer,
    with_precision,
)
from jaxfl.models.saved import save_models
from jaxfl.models.trained import TrainedModel
from jaxfl.privacy import Full
from jaxfl.tasks import Task, average, classification, next_token, regression

ABOUT = {
    "method": "own",
    "round": 3,
    "clients": 2,
    "client": None,
    "privacy": "",
    "statement": None,
}
CLIENTS = small_clients()
INPUTS = CLIENTS.inputs[:300]


def nudged(model, seed=0):
    """Return weights that differ from those of any builder."""
    params = model.init(jax.random.key(seed))
    return jax.tree.map(
        lambda leaf: leaf + 0.01 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), params
    )


def saved(model, path, **changes):
    trained = TrainedModel(model, nudged(model), about=ABOUT | changes)
    save_models(path, [trained], trained.about)
    return trained


def test_inputs_of_another_scale_than_in_the_run_are_named(tmp_path):
    pictures = np.full((2, 8, 8, 1), 200, np.uint8)
    network = mlp((8, 8, 1), 10)
    saved(network, tmp_path / "m", inputs="uint8")
    model = load_model(tmp_path / "m")
    assert model(pictures).shape == (2, 10)
    for wrong in (pictures / 127.5 - 1, pictures.astype(int)):
        with pytest.raises(ValueError, match=f"inputs must be uint8, .*got {wrong.dtype}. Give"):
            model.predict(wrong)
    of_floats = TrainedModel(network, nudged(network), about=ABOUT | {"inputs": "float32"})
    with pytest.raises(ValueError, match=r"inputs must be float32, .*got uint8\. Give"):
        of_floats(pictures)
    assert of_floats(pictures / 127.5 - 1).shape == (2, 10)
    with pytest.raises(ValueError, match="inputs must be finite"):
        of_floats(pictures * np.nan)
    # A file of an earlier version does not know, and tokens are not scaled.
    TrainedModel(network, nudged(network), about=ABOUT)(pictures)
    words = TrainedModel(gru(9, 6), nudged(gru(9, 6)), about=ABOUT | {"inputs": "int32"})
    assert words(np.ones((2, 6), np.uint8)).shape == words(np.ones((2, 6), np.int32)).shape


@pytest.fixture(scope="module")
def result():
    method = fine_tuned(
        prior_corrected(
            dp_fedavg(
                MODEL,
                clip=1.0,
                noise_multiplier=2.0,
                sampling=Full(),
                local=LocalSGD(optax.sgd(0.3), 4),
            )
        ),
        local=LocalSGD(optax.sgd(0.1), 4),
    )
    return simulate(5, method, CLIENTS, rounds=2, progress=False)


def test_a_new_process_loads_the_global_model_and_predicts_the_same_bits(result, tmp_path):
    path = result.save(tmp_path / "deep" / "model.safetensors")
    np.save(tmp_path / "inputs.npy", INPUTS)
    code = (
        "import sys, numpy, jaxfl; path, folder = sys.argv[1:]; model = jaxfl.load_model(path);"
        "inputs = numpy.load(folder + '/inputs.npy'); numpy.save(folder + '/outputs.npy', model(inputs));"
        "numpy.save(folder + '/classes.npy', model.predict(inputs)); print(model.model.name)"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # Without a client's own shares of classes, the network is the plain one.
    assert done.stdout.strip() == "mlp"
    model = result.model()
    np.testing.assert_array_equal(np.load(tmp_path / "outputs.npy"), model(INPUTS))
    np.testing.assert_array_equal(np.load(tmp_path / "classes.npy"), model.predict(INPUTS))
    loaded = load_model(path)
    assert loaded.about == json.loads(json.dumps(model.about))
    assert loaded.about["statement"]["honest"]["aggregate"]["epsilon"] < 10
    assert "'per_client'" not in str(loaded.about["statement"])
    assert "covers all data of one client" in loaded.about["privacy"]


def test_models_of_clients_come_back_by_their_number(result, tmp_path):
    network = result.origin.algorithm.model
    path = result.save(tmp_path / "all.safetensors", "all")
    single = result.save(tmp_path / "one.safetensors", 4)
    for client in (0, 4):
        loaded = load_model(path, model=network, client=client)
        np.testing.assert_array_equal(loaded(INPUTS), result.model(client)(INPUTS))
        assert loaded.about["client"] == client
        assert loaded.about["statement"] is None
        assert "No epsilon covers them" in loaded.about["privacy"]
    one = load_model(single, model=network)
    np.testing.assert_array_equal(one(INPUTS), result.model(4)(INPUTS))
    assert "client 4 without noise. No epsilon covers it" in one.about["privacy"]
    for wrong, given, words in [
        (path, None, "client must be an index of a client from 0 to 10 for .*, got None"),
        (path, 11, "client must be a whole number from 0 to 10, got 11"),
        (single, 3, "client must be 4 for .*, got 3"),
    ]:
        with pytest.raises(ValueError, match=words):
            load_model(wrong, model=network, client=given)
    # The log of a client's shares of classes belongs to no network of the zoo.
    with pytest.raises(ValueError, match="whose network 'mlp_log_prior' no builder of jaxfl makes"):
        load_model(single)
    with pytest.raises(ValueError, match="client must be a whole number from 0 to 10, got 11"):
        result.save(tmp_path / "none.safetensors", 11)


def small_lora():
    base = transformer(7, 5, width=8, blocks=1, heads=2)
    return lora(base, base.init(jax.random.key(1)), rank=2, where=("hidden",), train=("head",))


def part_frozen():
    base = with_precision(mlp((8, 8, 1), 10, hidden=(6, 5)), "bfloat16")
    return frozen(base, nudged(base, 1), train=("dense_1", "head"))


BUILT = {
    "linear": lambda: mlp((8, 8, 1), 10, hidden=()),
    "lenet": lambda: lenet((28, 28, 1), 7, form="im2col"),
    "gru": lambda: gru(9, 6, embedding=3, width=4),
    "lora": small_lora,
    "frozen": part_frozen,
    "scores": lambda: MODEL._replace(task=classification("accuracy", "f1")),
    "regression": lambda: mlp((3,), 1, hidden=(4,))._replace(task=regression("mae")),
    "ignore": lambda: gru(9, 6)._replace(task=next_token("perplexity", ignore=-7)),
}


@pytest.mark.parametrize("name", BUILT)
def test_what_the_library_builds_is_built_again_from_the_file(name, tmp_path):
    model = BUILT[name]()
    before = saved(model, tmp_path / "model.safetensors")
    after = load_model(tmp_path / "model.safetensors")
    shape = (300, *(model.input_shape or ()))
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, model.vocabulary or 200, shape).astype(np.uint8)
    np.testing.assert_array_equal(after(inputs), before(inputs))
    np.testing.assert_array_equal(after.predict(inputs), before.predict(inputs))
    assert after.model.name == model.name
    assert list(after.model.task.metrics) == list(model.task.metrics)
    jax.tree.map(np.testing.assert_array_equal, after.frozen, before.frozen)
    if name == "regression":
        assert after.predict(inputs).shape == (300,)
    if name == "ignore":
        labels = jnp.full((1, 6), -7)
        assert float(after.model.task.loss(jnp.zeros((1, 6, 9)), labels)[0]) == 0


class Own(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1))))


def test_a_network_of_ones_own_is_given_and_must_fit(tmp_path):
    path = tmp_path / "own.safetensors"
    before = saved(from_flax(Own(), (8, 8, 1)), path)
    after = load_model(path, model=from_flax(Own(), (8, 8, 1)))
    np.testing.assert_array_equal(after(INPUTS), before(INPUTS))
    with pytest.raises(ValueError, match=r"model must be given for .*, whose network 'Own' no"):
        load_model(path)
    for other, words in [
        (
            from_flax(Own(5), (8, 8, 1)),
            "Dense_0/kernel is float32(5, 3), and the file has float32(4, 3)",
        ),
        (MODEL, "params/dense_0/bias is float32(16,), and the file has none"),
    ]:
        with pytest.raises(ValueError, match="model must fit") as caught:
            load_model(path, model=other)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda model: model._replace(prepare=lambda x: model.prepare(x) / 7), "network 'mlp'"),
        (lambda model: model._replace(apply=lambda p, x: -model.apply(p, x)), "network 'mlp'"),
        (
            lambda model: model._replace(
                task=Task("rank", classification().loss, {"one": average(lambda o, y: o[:, 0])})
            ),
            "task 'rank'",
        ),
    ],
)
def test_a_network_that_was_changed_is_not_taken_for_the_builders(change, part, tmp_path):
    model = change(MODEL)
    before = saved(model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"whose {part} no builder of jaxfl makes"):
        load_model(tmp_path / "model.safetensors")
    after = load_model(tmp_path / "model.safetensors", model=model)
    np.testing.assert_array_equal(after(INPUTS), before(INPUTS))


def flipped(content):
    """Return the bytes of a file with one bit of the last byte flipped."""
    return content[:-1] + bytes([content[-1] ^ 1])


def of_another_program():
    return safetensors.numpy.save({"weights": np.zeros(3, np.float32)})


DAMAGED = {
    "cut": lambda content: content[:-3],
    "empty": lambda content: b"",
    "text": lambda content: b"accuracy: 0.9",
    "flipped": flipped,
    "longer": lambda content: content + b"0",
    "other method": lambda content: content.replace(b'\\"own\\"', b'\\"owl\\"'),
    "no json": lambda content: content.replace(b'"jaxfl":"{', b'"jaxfl":"('),
    "another program": lambda content: of_another_program(),
    "huge header": lambda content: b"\xff" * 8 + content[8:],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_or_foreign_file_is_an_error_that_names_it(name, tmp_path):
    path = tmp_path / "model.safetensors"
    saved(MODEL, path)
    changed = DAMAGED[name](path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=r"path must be .*model\.safetensors"):
        load_model(path)


@pytest.mark.parametrize(
    "change",
    [
        {"builder": "exec"},
        {"arguments": {"hidden": ["wide"]}},
        {"arguments": {"model": {"builder": "mlp", "arguments": {}}, "rank": 2}, "builder": "lora"},
        {"arguments": {"colour": 3}},
    ],
)
def test_a_text_that_asks_for_something_else_builds_nothing(change, tmp_path):
    from jaxfl.models import saved as module

    path = tmp_path / "model.safetensors"
    saved(MODEL, path)
    content, arrays = module._read(path)
    content["model"]["recipe"] |= change
    content["sha256"] = module._digest(content, arrays)
    safetensors.numpy.save_file(arrays, path, {"jaxfl": json.dumps(content)})
    with pytest.raises(ValueError, match="path must be a file whose network can be built"):
        load_model(path)


def test_nothing_that_is_not_ours_is_replaced_or_followed(result, tmp_path):
    others = {
        "notes.txt": b"mine",
        "theirs.safetensors": of_another_program(),
    }
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=r"path must be free, or a file that `Result.save`"):
            result.save(tmp_path / name)
        assert (tmp_path / name).read_bytes() == content
    (tmp_path / "folder").mkdir()
    own = result.save(tmp_path / "model.safetensors")
    (tmp_path / "link.safetensors").symlink_to(own)
    for name, kind in {"folder": "a folder", "link.safetensors": "a symbolic link"}.items():
        for touch in (result.save, load_model):
            with pytest.raises(ValueError, match=f"{name}', {kind}. Choose another"):
                touch(tmp_path / name)
    with pytest.raises(
        ValueError, match=r"must be a file that .* or foreign file .*Choose another file"
    ):
        load_model(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match=r"none', which is missing\. Choose another file"):
        load_model(tmp_path / "none")
    before = own.read_bytes()
    assert result.save(own) == own
    assert own.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == [
        "folder",
        "link.safetensors",
        "model.safetensors",
        "notes.txt",
        "theirs.safetensors",
    ]


def test_predictions_do_not_depend_on_the_number_of_inputs_at_once(result):
    model = result.model()
    one_by_one = np.concatenate([model(INPUTS[i : i + 1]) for i in range(4)])
    np.testing.assert_array_equal(model(INPUTS)[:4], one_by_one)
    np.testing.assert_allclose(model.apply(model.params, INPUTS), model(INPUTS), atol=1e-5)
    assert model(INPUTS[:0]).shape == (0, 10)
    for wrong, words in [
        (INPUTS[0], r"inputs must be examples \[B, 8, 8, 1\], got shape \(8, 8, 1\)"),
        (INPUTS * np.nan, r"inputs must be uint8, .* got float64"),
    ]:
        with pytest.raises(ValueError, match=words):
            model(wrong)
    with pytest.raises(ValueError, match=r"inputs must be whole numbers in \[0, 9\).*got 9 in row"):
        TrainedModel(gru(9, 6), nudged(gru(9, 6)))(np.full((2, 6), 9))
