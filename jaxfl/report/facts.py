"""Facts of a fingerprint in words."""

import re

_WORDS = {
    "init": "the start (weights of the model, or first states)",
    "client_update": (
        "the clients' update (optimizer, learning rate, batch, epochs, penalty or model)"
    ),
    "server_update": "the server's update (its optimizer)",
    "personalize": "`personalize`, whose weights are evaluated",
    "constants": "arrays that the method's functions hold",
    "round": "the engine's round (sampling, clipping, noise)",
    "evaluation": "the evaluation",
    "clients.inputs": "inputs",
    "clients.labels": "labels",
    "clients.train": "the partition (rows of training examples)",
    "clients.train_size": "the clients' numbers of training examples",
    "clients.test": "rows of test examples",
    "clients.test_size": "the clients' numbers of test examples",
    "central.inputs": "inputs of the central test set",
    "central.labels": "labels of the central test set",
    "model.frozen": "the model's frozen weights",
    "keep": "the model that is kept (`keep`)",
    "noise_key": "the secret key of the noise",
    "cohort_key": "the cohorts of the points",
}
"""Facts in words, for messages and reports. Folders hold the codes, so that words may change."""


def in_words(code: str) -> str:
    """Return the meaning of a fact's code, or the code itself if it has no other words.

    >>> in_words("clients.labels"), in_words("values.clip"), in_words("point.2.mechanism.clip")
    ('labels', 'values of clip', 'point 2: mechanism.clip')
    """
    # The rest of the code is that of a single run's fact.
    if point := re.fullmatch(r"point\.(\d+)\.(.*)", code):
        return f"point {point[1]}: {in_words(point[2])}"
    if values := re.fullmatch(r"values\.(.*)", code):
        return f"values of {values[1]}"
    return _WORDS.get(code, code)
