"""A pool of values. An argument of a public function accepts some of them, or none."""

import math
import pathlib
import tempfile
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from algorithms_table import MODEL, small_clients

import jaxfl
from jaxfl import LocalSGD, algorithms, data, models, privacy, tasks
from jaxfl.models.saved import save_models
from jaxfl.privacy import DPSGD, Canaries, Full, Mechanism, Poisson
from jaxfl.run.trained import Origin
from jaxfl.tasks import Task
from jaxfl.types import Model, Terms

NAN, INF = math.nan, math.inf
KEY = jax.random.key(0)

# Objects that functions work with.

LABELS, INPUTS, LISTS = np.array([0, 1, 0, 1]), np.zeros((4, 2), np.float32), [[0, 1], [2, 3]]
CLIENTS = small_clients()
FEW = data.make_clients((INPUTS, LABELS, INPUTS, LABELS), LISTS, LISTS)
MECHANISM = Mechanism(clip=1.0, noise_multiplier=1.0)
LEDGER = privacy.planned_ledger(MECHANISM, 2, 2)
METHOD = algorithms.fedavg(MODEL)
RESULT: Any = jaxfl.Result(METHOD.init(KEY, 2)[0], (), [], {}, {}, LEDGER, {})
COSTED = RESULT._replace(
    metrics=[{"round": 2}],
    ledger=privacy.planned_ledger(MECHANISM, CLIENTS.num_clients, 2),
    origin=Origin(METHOD, CLIENTS, KEY),
)
COSTS = [{"total_up": 1, "total_down": 1, "accuracy": 0.5}]
LOGGED = types.SimpleNamespace(log=print, log_metrics=print)
MEANS = data.Encoder("means", "1", 3, dict, lambda weights, x: x.mean((1, 2)))
FRAME = {"age": [41.0, None, 60.0, 30.0], "ward": ["x", "y", "y", ""], "sick": [0, 1, 1, 0]}
PLANS = privacy.plan(clients=4, cohort=2, rounds=2, noise_multiplier=2.0, kinds=("poisson",))
FOLDER = tempfile.TemporaryDirectory()
HERE = pathlib.Path(FOLDER.name)
(HERE / "all.json").write_text('{"user_data": {"a": {"x": [[0.5]], "y": [0]}}}')
(HERE / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.5, "loss": 1.0}\n')
SAVED = jaxfl.TrainedModel(MODEL, MODEL.init(KEY), about={"clients": 2, "client": None})
save_models(HERE / "model.safetensors", [SAVED], SAVED.about)


class _Stored(dict):
    """Stand-in for a dataset of Hugging Face, of which only columns are read."""

    column_names = property(list)


STORED = _Stored(who=[1, 2], x=[[0.5], [1.0]], y=[0, 1])


def of_pictures(pictures: np.ndarray) -> data.Dataset:
    """Return a dataset of pictures of class 0. The first picture is also the test example."""
    labels = np.zeros(len(pictures), int)
    return data.from_arrays(pictures, labels, pictures[:1], labels[:1])


BUILT = [
    MODEL, METHOD, MECHANISM, RESULT, MEANS, LEDGER, Full(), Poisson(0.5), optax.sgd(0.1),
    LocalSGD(optax.sgd(0.1), 4), Canaries(20),
    DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.5, steps=1), nn.Dense(10), tasks.classification(),
    Terms(), "own", True,
    of_pictures(np.zeros((4, 2, 2), np.uint8)),
]  # fmt: skip
"""One object of each class that arguments have."""

# Values of which an argument accepts some.

NOTHING: dict = {}
TEXT = np.array(["a"])
ALL = [
    # Numbers, and what looks like one.
    NAN, INF, -INF, -1.0, -0.5, -0.1, 0.0, 0.5, 1.0, 1.1, 1.5, 2.5, 3.0, 3.5, 100.0, -1, 0, 1, 3,
    5, 8, 2**32, 10**400, 1j, True, "1", "01", "012", "0.5", "8x8", np.str_("1"),
    np.array(NAN),
    # Texts.
    "", "f", "x", "yes", "sgd", "poisson", "lenet", "head", "none", "../x", "a\0b", b"", b"x",
    b"sound", np.datetime64("2020-01-01"),
    # Lists and vectors.
    [], (), range(0), np.zeros(0, int), [NAN], [NAN, 1.0], [INF], [INF, 1.0], [-1], [-1.0],
    [-1, 0], [0], [0.0], [0.5], [0.5, 1.0], [0.5, 1.1], [1], [1.0],
    [1.5], [1.0, 1.0], [2.0, 1.0], [0.0, 1.0], [0, 0], [99], [True], [True, False], [1j], [None],
    [None, "a"], ["a"], ["x"], ["a", "b"], ["a", 1], ["a", "a"], ["none"], [b"a"],
    [print], np.zeros(2), np.zeros(3), np.array([1.0, 2.0]), np.array([None, 1], object),
    np.zeros(2, np.uint32), jnp.array([-1.0]),
    np.zeros(4), TEXT, {0}, {1}, {1.0}, jax.random.split(KEY),
    # Shapes.
    (3,), (8,), (True,), (8, 8), (8, 0, 1), (8, -1, 1), (8, 8.5, 1), (8, "8", 1), (NAN, 8, 1),
    (8, 8, 1, 1),
    # Tables.
    [[]], [[], []], [[1]], [[8]], [[0.5]], [[1.0]], [["a"]], [[0], [1]], [[0.5], [1]], [[-1], [1]],
    [["a"], [1]], [[0], [99]], [[INF], [1.0]], [None, [1]],
    [[1, 2], [3]], [[[0]], [1]], [[[1.0]]], np.zeros((0, 2), int), np.full((4, 2), NAN),
    np.full((4, 2), INF), np.full((4, 2), 2**40),
    np.full((4, 2), 1e300), np.zeros((4, 2), complex), np.zeros((4, 0, 2)),
    # Dicts.
    NOTHING, {"a": 1}, {"a": "x"}, {"a": None}, {"a": []}, {"a": [1]}, {"a": [NAN]}, {"a": [None]},
    {"a": [[1]]}, {"a": ["x", "y"]},
    {"a": (1, 0)}, {"a": (0, INF)}, {"a": [1, 1]}, {"a": [1], "b": [1, 2]}, {"a": [{}]},
    {"a/b": 1}, {3: [1]}, {"a": print},
    # Objects.
    None, ..., object(), print, optax.sgd, models.lenet, tasks.classification, algorithms.fedavg,
    data.efficientnet_lite0, Model, Task,
    Mechanism, Poisson, LocalSGD, DPSGD, Canaries, nn.Dense, Terms, *BUILT,
]  # fmt: skip
