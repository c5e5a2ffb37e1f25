"""Every public function with arguments that work, the kind of each argument, and what each kind must not or may be."""

import fractions
import functools
import math
import pathlib
import tempfile
import types
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from algorithms_table import MODEL, small_clients
from flax import nnx

import jaxfl
from jaxfl import LocalSGD, algorithms, callbacks, data, models, privacy, tasks
from jaxfl.algorithms.pdp_fl import Budgets
from jaxfl.privacy import (
    DPSGD,
    Canaries,
    Full,
    Mechanism,
    Poisson,
    PrivacyFilter,
    PrivateMask,
    Release,
)
from jaxfl.types import Terms

KEY = jax.random.key(0)
LOGGED = types.SimpleNamespace(log=print, log_metrics=print)

NAN, INF = math.nan, math.inf
NO_NUMBERS = [
    "1",
    None,
    True,
    [1.0],
    {},
    1j,
    object(),
    np.array([1.0, 2.0]),
    NAN,
    np.str_("1"),
    10**400,
]
NO_CLASSES = [None, "x", 0.5, object(), {}, [], np.zeros(3), print]
NO_NOISE = [
    "1",
    None,
    True,
    {},
    1j,
    object(),
    NAN,
    INF,
    -1.0,
    [-1.0],
    [NAN],
    [],
    ["a"],
    [[[1.0]]],
    jnp.array([-1.0]),
]
NO_LIST = [None, 3, "01", {}, object(), 0.5, {0}]
NO_SHAPE = [
    None,
    8,
    "8x8",
    (8, 0, 1),
    (8, -1, 1),
    (8, 8.5, 1),
    (8, "8", 1),
    {},
    [[8]],
    object(),
    (NAN, 8, 1),
    (True,),
]
NO_LABELS = [
    None,
    3,
    "012",
    [0.5, 1.0],
    [-1, 0],
    [[0], [1]],
    ["a", "b"],
    {},
    object(),
    [NAN, 1.0],
    [1j],
    [True, False],
]
MORE_LABELS = [[], np.zeros(0, int), range(0)]
NO_TARGETS = [
    None,
    3,
    "012",
    [-1, 0],
    ["a", "b"],
    {},
    object(),
    [NAN, 1.0],
    [[INF], [1.0]],
    [1j],
    [True, False],
    [[], []],
]
NO_INPUTS = [
    None, 3, "x", {}, object(), [["a"]], np.zeros(4), np.full((4, 2), NAN), np.full((4, 2), INF), np.zeros((4, 0, 2)),
    np.full((4, 2), 2**40), np.zeros((4, 2), complex), np.zeros((4, 2), bool), np.full((4, 2), 1e300), [[1, 2], [3]],
]  # fmt: skip
NO_NUMBER_LISTS = [
    None,
    3.0,
    "1",
    {},
    object(),
    [],
    [-1.0],
    [NAN],
    [INF],
    ["a"],
    [[[1.0]]],
    [True],
    [1j],
    [None],
]

PRIVATE_STEPS = DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.5, steps=1)


def of_pictures(pictures: np.ndarray) -> data.Dataset:
    """A dataset of pictures of class 0, the first of them for testing, too."""
    labels = np.zeros(len(pictures), int)
    return data.from_arrays(pictures, labels, pictures[:1], labels[:1])


NO_PICTURES = [
    of_pictures(np.zeros((4, 2))),
    of_pictures(np.zeros((4, 2, 2, 5))),
    of_pictures(np.full((4, 2, 2), 1.5)),
    of_pictures(np.zeros((4, 2, 2), int)),
]

BAD: dict[str, list[Any]] = {
    "count": [*NO_NUMBERS, 0, -1, 1.5, INF],
    "canary count": [*NO_NUMBERS, 0, 15, 20.5, INF],
    "count from 0": [*NO_NUMBERS, -1, 1.5, INF],
    "fold count": [*NO_NUMBERS, -1, 0, 1, 2.5, INF],
    "layer count": [*NO_NUMBERS, -1, 1.5, INF, 99],
    "positive": [*NO_NUMBERS, 0.0, -1.0, INF, -INF],
    "bound": [*NO_NUMBERS, 0.0, -1.0, -INF],
    "at least 0": [*NO_NUMBERS, -1.0, INF],
    "finite": [*NO_NUMBERS, INF, -INF],
    "fraction": [*NO_NUMBERS, 0.0, -0.1, 1.1, INF],
    "fraction from 0": [*NO_NUMBERS, -0.1, 1.1, INF],
    "share below 1": [*NO_NUMBERS, -0.1, 1.0, INF],
    "probability": [*NO_NUMBERS, 0.0, 1.0, -1.0, INF],
    "noise": [*NO_NOISE, [[1.0]]],
    "client noise": NO_NOISE,
    "choice": ["none", 3, None, True, [], b"sound", "", NAN, np.zeros(2), object(), {}],
    "flag": [None, 1, 0.0, "yes", [], object()],
    "text": [None, 1, b"x", ["x"], object()],
    "model": [*NO_CLASSES, models.lenet, nn.Dense(10), "lenet"],
    "module": [*NO_CLASSES, nn.Dense, MODEL],
    "nnx module": [*NO_CLASSES, nn.Dense, MODEL],
    "task": [*NO_CLASSES, tasks.classification, "classification"],
    "optimizer": [*NO_CLASSES, optax.sgd, 0.1, "sgd"],
    "sampling": [*NO_CLASSES, Poisson, 0.1, "poisson", 5],
    "mechanism": [*NO_CLASSES, Mechanism, Poisson(0.5)],
    "local": [*NO_CLASSES, LocalSGD, optax.sgd(0.1), PRIVATE_STEPS],
    "steps": [*NO_CLASSES, LocalSGD, DPSGD, optax.sgd(0.1)],
    "dp_sgd": [*NO_CLASSES, DPSGD, Mechanism(), LocalSGD(optax.sgd(0.1))],
    "release": NO_CLASSES,
    "audit": [*NO_CLASSES, Canaries, 100],
    "result": [*NO_CLASSES, MODEL],
    "state": [*NO_CLASSES, 3, MODEL, {"params": np.zeros(3)}],
    "canaries": [*NO_CLASSES, Canaries, 100],
    "coefficients": [0.5, "0.5", {}, object(), [-1.0], [NAN], [INF], ["a"], [1j]],
    "scales": [None, "0.5", {}, object(), [], [-1.0], [NAN], [INF], ["a"], [1j], [0.5, 0.5]],
    "decays": [None, "0.5", {}, object(), [], [-1.0], [NAN], [INF], ["a"], [1.0], [0.5, 0.5]],
    "kinds": [None, 3, "poisson", {}, object(), (), ("none",), [0.5], [None]],
    "mechanisms": [None, 3, "mine", object(), {"mine": 3}, {3: Mechanism()}, {"poisson": Mechanism()}],
    "plans": [*NO_CLASSES, (), [None], "plan", [MODEL]],
    "liars": [None, 3.5, "01", {}, object(), [-1], [0.5], ["a"], [NAN]],
    "quiet": [*NO_NOISE, 1.0],
    "positive noise": [*NO_NOISE, [[1.0]], 0.0],
    "bits": [*NO_NUMBERS, 0, 7, 33, 20.5, INF],
    "function": [None, 3, "f", object(), [], 0.5],
    "callbacks": [None, 3, "f", print, {}, object(), [None], ["f"]],
    "logged": [None, 3, "run", object(), {}],
    "algorithm": [*NO_CLASSES, algorithms.fedavg, MODEL, Mechanism()],
    "shape": [*NO_SHAPE, (8, 8), (8,), (8, 8, 1, 1)],
    "large shape": [*NO_SHAPE, (8, 8), (8,), (8, 8, 1, 1), (4, 4, 1), (7, 7, 1)],
    "shape or vector": [*NO_SHAPE, (8, 8), (8, 8, 1, 1)],
    "any shape": [*NO_SHAPE, ()],
    "widths": [3, None, "16", (0,), (-1,), (1.5,), {}, ("a",), object(), [[3]]],
    "head": [3, "layers_3", ("none",), (), (3,), {}, object()],
    "layers": [3, "head", ("none",), (3,), {}, object()],
    "some layers": [3, "head", ("none",), (), (3,), {}, object()],
    "network weights": [None, 3, "x", object(), {}, [], np.zeros(3), {"head": np.zeros(3)}, MODEL],
    "labels": NO_LABELS,
    "some labels": [*NO_LABELS, *MORE_LABELS],
    "targets": NO_TARGETS,
    "some targets": [*NO_TARGETS, *MORE_LABELS],
    "class labels": [*NO_LABELS, [0, 1, 0, 2**31 - 1], [0, 1, 0, 2**24]],
    "some rows": [*NO_LIST, [], np.zeros((0, 2), int), [[-1], [1]], [[0.5], [1]], [["a"], [1]], [[0], [99]]],
    "inputs": NO_INPUTS,
    "rows": [*NO_LIST, [[-1], [1]], [[0.5], [1]], [["a"], [1]], [[0], [99]], [[[0]], [1]], [None, [1]]],
    "own rows": [*NO_LIST, [-1], [99], [0.5], ["a"], [[0]]],
    "sizes": [*NO_LIST, [], [-1], [0.5], ["a"], [[1]], [99, 99], [True]],
    "densities": [None, 3, "0.5", {}, object(), [-0.1, 0.5], [0.5, 1.1], [NAN, 0.0], ["a", 0.0], [0.5]],
    "pixels": [*NO_INPUTS, np.zeros((4, 2), np.int64)],
    "data": [*NO_CLASSES, (), (np.zeros((4, 2)),), MODEL],
    "pictures": [*NO_CLASSES, (), MODEL, *NO_PICTURES],
    "encoder": [*NO_CLASSES, data.efficientnet_lite0, "efficientnet_lite0", MODEL],
    "texts": [None, 3, "to be", {}, object(), [1], ["a", None]],
    "clients": [*NO_CLASSES, MODEL],
    "population": [None, "x", 0.5, object(), {}, [], np.zeros(3), MODEL],
    "methods": [*NO_CLASSES, {"a": 1}, {"a": algorithms.fedavg}, {1: 2}, {"a/b": 1}],
    "epsilons": [None, 8.0, "1", {}, object(), [], [0.0], [-1.0], [NAN], ["a"], [1.0, 1.0], [None]],
    "seeds": [None, 3, "01", {}, object(), [], [-1], [0.5], [None], [100]],
    "columns": [None, 3, "01", [], ["a"], [[1.0]], [NAN], [None], object(), [1j]],
    "axis": [None, 3, "01", b"01", {}, {1.0}, [], [NAN], [1j], object(), np.ones((2, 2)), lambda: 1],
    "shards": [3, "01", {}, object(), [-1], [0.5], ["a"]],
    "dataset": [*NO_CLASSES, "imagenet", "../digits", "Digits"],
    "path": [3, 0.5, [], {}, object(), b"", "", "a\0b"],
    "run folder": [None, 3, 0.5, [], {}, object(), b"", "", "/", "no/such/folder", "a\0b"],
    "number list": [*NO_NUMBER_LISTS, [0.0]],
    "weights": [3.0, "1", {}, object(), [], [-1.0], [NAN, 1.0], [INF, 1.0], ["a"], [[[1.0]]], [True]],
    "impacts": [3.0, "1", {}, object(), [], [-1.0, 2.0], [NAN, 1.0], ["a"], [[[1.0]]], [0.5, 0.6], lambda t: "a"],
    "budgets": [
        *NO_CLASSES, (1.0,), Budgets(np.zeros(2), np.ones(2)), Budgets(np.ones(2), np.ones(3)),
        Budgets(np.array([NAN]), np.ones(1)), Budgets(np.ones(1), np.array([INF])),
        Budgets(np.array(["a"]), np.ones(1)),
    ],
    "round noise": [*NO_NOISE, [[1.0]]],
    "risks": ["public", 3.0, {}, object(), [], [0.0], [-1.0], [NAN], [INF], ["a"], [[1.0]]],
    "risk bounds": [3.0, "1", {}, object(), [], (1.0,), (2.0, 1.0), (0.0, 1.0), (1.0, INF), (NAN, 1.0), ("a", "b")],
    "terms": [*NO_CLASSES, Terms, (1e-5, None, None)],
    "ledger": NO_CLASSES,
    "statement": [*NO_CLASSES, {"honest": 1}],
    "key": [None, -1, 2**32, True, 0.0, "key", object(), np.zeros(2, np.uint32), jnp.zeros(3), (0, 1), jnp.uint32(0)],
    "one key": [None, -1, 2**32, True, 0.0, "key", np.zeros(2, np.uint32), jnp.zeros(3), jax.random.split(KEY)],
    "chunk": [0, -1, 1.5, "all", True, NAN, [1], object()],
    "devices": [[], "cpu", 0, object(), ["cpu"], {}, 0.5, [None]],
    "values": [None, 3, "clip", [], {"mu": 3}, {"mu": ["a", "b"]}, {3: [1.0, 2.0]}, {"mu": [NAN, 1.0]}, {"mu": None}],
}  # fmt: skip
"""By kind, what must be refused; a kind with "?" also takes None."""

ODD = [
    1j,
    {1},
    ...,
    {"a": 1},
    np.datetime64("2020-01-01"),
    np.array(["a"]),
    np.array([None, 1], object),
    np.array(NAN),
]
"""What no argument takes."""

GOOD: dict[str, list[Any]] = {
    "count": [np.int64(2), np.uint8(2), jnp.int32(2), np.array(2)],
    "canary count": [np.int64(16), np.uint8(20), jnp.int32(16), np.array(16)],
    "positive": [
        np.float32(0.5),
        jnp.float32(0.5),
        np.array(0.5),
        fractions.Fraction(1, 2),
        1,
        np.int64(1),
    ],
    "bound": [
        np.float32(0.5),
        jnp.float32(0.5),
        jnp.bfloat16(0.5),
        np.int64(1),
        fractions.Fraction(1, 2),
    ],
    "at least 0": [0, np.float64(0.5), jnp.float32(0.5), jnp.int32(0)],
    "finite": [-1, np.float32(-0.5), jnp.float32(0.5)],
    "fraction": [1, np.float32(0.5), jnp.float32(0.5), np.array(0.5)],
    "probability": [np.float32(0.5), jnp.float32(0.5)],
    "noise": [0, np.float32(2.0), jnp.float32(2.0), np.array(2.0)],
    "shape": [[32, 32, 3], np.array([32, 32, 3]), (np.int64(32), 32, 3)],
    "widths": [[np.int64(4)], np.array([4, 4]), ()],
    "labels": [[0, 1, 0, 1], np.array([0, 1, 0, 1], np.uint8), jnp.array([0, 1, 0, 1])],
    "targets": [[0, 1, 0, 1], [0.5, 1.0, -1.0, 0.0], jnp.array([[0.0], [1.0], [2.0], [-3.0]])],
    "inputs": [
        np.zeros((4, 2), dtype)
        for dtype in ("int8", "uint8", "int16", "uint16", "int32", "int64", "uint32", "float16")
    ],
    "flag": [np.bool_(False), np.array(False)],
    "choice": [],
}
"""By kind, what must be taken."""

LABELS, INPUTS = np.array([0, 1, 0, 1]), np.zeros((4, 2), np.float32)
LISTS = [[0, 1], [2, 3]]
PICTURES = of_pictures(np.zeros((4, 2, 2), np.uint8))
MEANS = data.Encoder("means", "1", 3, dict, lambda weights, x: x.mean((1, 2)))
CLIENTS = small_clients()
FEW = data.make_clients((INPUTS, LABELS, INPUTS, LABELS), LISTS, LISTS)
METHOD = {"algorithm": (algorithms.fedavg(MODEL), "algorithm")}
LOCAL = {"local": (LocalSGD(optax.sgd(0.1), 4), "local")}
HEAD = {"head": (LocalSGD(optax.sgd(0.1), 4), "local")}
PERSONAL = {"personal": (LocalSGD(optax.sgd(0.1), 4), "local")}
ADAPTIVE = {
    "learning_rate": (0.1, "positive"),
    "beta1": (0.9, "share below 1"),
    "tau": (1e-3, "positive"),
}
SERVER = {"server_optimizer": (optax.sgd(1.0), "optimizer")}
PRIVATE = {
    "clip": (1.0, "bound"),
    "noise_multiplier": (1.0, "noise"),
    "sampling": (Full(), "sampling"),
}
ONE_SHOT = {
    "radius": (1.0, "positive"),
    "personal": (1.0, "positive?"),
    "scale": (10.0, "positive"),
}
DELTA, MODELS = {"delta": (1e-5, "probability?")}, {"model": (MODEL, "model")}
GRADIENT = {"gradient": (None, "function?")}
PENALTY = {"penalty": (None, "function?")} | GRADIENT
FEDAVG = MODELS | SERVER | {"local": (LocalSGD(optax.sgd(0.1), 4), "steps")}
NAMED = {
    "mechanism": (Mechanism(), "mechanism"),
    "terms": (Terms(), "terms"),
    "name": ("own", "text"),
}
WEIGHT = {"penalty_weight": (0.1, "at least 0")}
PUBLISHED = {"clients": (2, "count"), "claim": (None, "bound?")}
SEED = {"seed": (0, "count from 0")}
IMAGES = {"input_shape": ((8, 8, 1), "shape"), "classes": (10, "count")}
FORM = {"form": (None, "choice?")}
WEIGHTS = {"model": (MODEL, "model"), "params": (MODEL.init(jax.random.key(0)), "network weights")}
TOKENS = {
    "vocabulary": (5, "count"), "length": (4, "count"), "outputs": (None, "count?"), "every": (True, "flag"),
}  # fmt: skip
MECHANISM = Mechanism(clip=1.0, noise_multiplier=1.0)
LEDGER = privacy.planned_ledger(MECHANISM, 2, 2)
PLANS = privacy.plan(clients=4, cohort=2, rounds=2, noise_multiplier=2.0, kinds=("poisson",))
PLAN = {"delta": (1e-5, "probability?"), "accountant": ("rdp", "choice")}
TARGETED = {"clip": (1.0, "bound"), "sampling": (Full(), "sampling")}
IMPACTS = {
    "epsilon": (INF, "bound"), "rounds": (2, "count"), "impacts": (None, "impacts?"), "mu": (0.1, "at least 0"),
}  # fmt: skip
BUDGETS = Budgets(np.full(2, INF), np.ones(2))
RUN = {
    "clients": (CLIENTS, "clients"),
    "rounds": (1, "count"),
    "eval_every": (None, "count?"),
    "chunk": (None, "chunk?"),
}
RUN |= {"devices": (None, "devices?"), "folder": (None, "path?"), "progress": (False, "flag")}
RUN |= {"report": ("full", "choice"), "resume": ("auto", "choice"), "secret_noise": (False, "flag")}
RUN |= {"audit": (None, "audit?")}
RUN_FOLDER = tempfile.TemporaryDirectory()
(pathlib.Path(RUN_FOLDER.name) / "metrics.jsonl").write_text(
    '{"round": 1, "accuracy": 0.5, "loss": 1.0}\n'
)
RESULT: Any = jaxfl.Result(
    algorithms.fedavg(MODEL).init(KEY, 2)[0],
    (),
    [],
    {},
    {},
    privacy.planned_ledger(MECHANISM, 2, 1),
    {},
)
SWEPT = functools.partial(algorithms.fedprox, MODEL)
FEDDPA = MODELS | LOCAL | PRIVATE | DELTA | {
    "threshold": (0.4, "at least 0"), "lambda1": (0.1, "at least 0"), "lambda2": (0.1, "at least 0"),
}  # fmt: skip
DP_PFEDDSU = MODELS | LOCAL | HEAD | PRIVATE | DELTA | WEIGHT | {
    "density": (0.1, "fraction"), "sparse_layers": (1, "layer count?"), "evaluation_epochs": (None, "count from 0?"),
}  # fmt: skip
ADP_PFL = MODELS | LOCAL | DELTA | {
    "sampling": (Full(), "sampling"), "noise": (1.0, "round noise"), "risks": (None, "risks?"),
    "risk_fn": (print, "function"), "clip": (1.0, "bound"), "mask": (None, "function?"),
}  # fmt: skip
PUBLISHED_STEPS = MODELS | TARGETED | DELTA | {
    "local": (LocalSGD(optax.sgd(0.1), 4), "steps"), "smallest": (2, "count"),
}  # fmt: skip
NOISED = PRIVATE | {
    "client_noise": (0.0, "client noise"), "weights": (None, "weights?"), "denominator": ("expected", "choice"),
    "communicates": (True, "flag"), "noise": ("float", "choice"),
}  # fmt: skip
CLIPPED = {
    "clip": (1.0, "positive"),
    "noise_multiplier": (0.0, "noise"),
    "client_noise": (0.0, "client noise"),
}
SHARED = {
    "client_noise": (0.0, "quiet"),
    "noise": ("grid", "choice"),
    "noise_multiplier": (1.0, "positive noise"),
    "clip": (1.0, "positive"),
}
QUIET = {"noise_multiplier": (0.0, "quiet"), "client_noise": (0.0, "quiet")}

ROWS: dict[str, tuple[Callable, dict[str, tuple[Any, str]]]] = {
    "simulate": (jaxfl.simulate, RUN | {
        "key": (KEY, "one key"), "algorithm": (algorithms.fedavg(MODEL), "algorithm"), "states": ("device", "choice"),
        "callbacks": ((), "callbacks"),
    }),
    "clear_caches": (jaxfl.clear_caches, {}),
    "configure": (jaxfl.configure, {}),
    "sweep": (jaxfl.sweep, RUN | {
        "key": (KEY, "key"), "build": (SWEPT, "function"), "values": ({"mu": [0.1, 0.2]}, "values"),
        "batch": (None, "count?"), "paired_noise": (False, "flag"), "keep_states": (True, "flag"),
        "numbers": (None, "shards?"),
    }),
    "compare": (jaxfl.compare, RUN | {
        "methods": ({"one": jaxfl.Candidate(lambda: algorithms.fedavg(MODEL))}, "methods"),
        "clients": (CLIENTS, "population"), "epsilons": ((1.0,), "epsilons"), "seeds": ((0,), "seeds"),
        "validation": (0.2, "probability"), "tuning_seed": (100, "count from 0"),
        "unseen": (0.0, "share below 1"),
    }),
    "grid": (jaxfl.grid, {"rate": ([0.1, 0.2], "axis"), "clip": ([1.0], "axis")}),
    "spread": (jaxfl.spread, {"number": (3, "count"), "rate": ((0.1, 0.2), "columns")}),
    "early_stopping": (callbacks.early_stopping, {
        "metric": ("loss", "text"), "patience": (3, "count"), "mode": ("min", "choice"),
    }),
    "epsilon_budget": (callbacks.epsilon_budget, {
        "epsilon": (2.0, "positive"), "observer": ("upload", "choice"), "unit": ("example", "choice"),
    }),
    "csv": (callbacks.csv, {"path": ("rows.csv", "path")}),
    "tensorboard": (callbacks.tensorboard, {"folder": ("events", "path")}),
    "mlflow": (callbacks.mlflow, {"library": (LOGGED, "logged"), "run_id": (None, "text?")}),
    "wandb": (callbacks.wandb, {"run": (LOGGED, "logged")}),
    "evaluate": (jaxfl.evaluate, {
        "algorithm": (algorithms.fedavg(MODEL), "algorithm"), "server": (RESULT.server, "state"),
        "clients": (CLIENTS, "clients"), "key": (KEY, "one key"), "states": (None, "state?"), "rounds": (1, "count"),
        "chunk": (None, "count?"), "devices": (None, "devices?"),
    }),
    "membership": (jaxfl.membership, {
        "key": (KEY, "one key"), "algorithm": (algorithms.fedavg(MODEL), "algorithm"), "result": (RESULT, "result"),
        "clients": (CLIENTS, "clients"), "of": ("upload", "choice"),
    }),
    "LocalSGD": (LocalSGD, {
        "optimizer": (optax.sgd(0.1), "optimizer"), "batch_size": (4, "count"), "epochs": (1, "count from 0"),
        "steps": (None, "count?"), "decay": (None, "function?"),
    }),
    "local_only": (algorithms.local_only, MODELS | LOCAL | {"sampling": (Full(), "sampling")}),
    "fedavg": (algorithms.fedavg, FEDAVG | PENALTY | NAMED),
    "fedprox": (algorithms.fedprox, FEDAVG | GRADIENT | {
        "mu": (0.1, "at least 0"), "mechanism": (Mechanism(), "mechanism"), "terms": (Terms(), "terms"),
    }),
    "dp_fedavg": (algorithms.dp_fedavg, FEDAVG | PRIVATE | DELTA | PENALTY),
    "dp_fedavg_fb": (algorithms.dp_fedavg_fb, FEDAVG | PENALTY | PRIVATE | DELTA | HEAD),
    "dp_fedsam": (algorithms.dp_fedsam, FEDAVG | {"penalty": (None, "function?")} | PRIVATE | DELTA | {"radius": (0.1, "at least 0")}),
    "fed_smp": (algorithms.fed_smp, FEDAVG | PENALTY | PRIVATE | DELTA | {"density": (0.5, "fraction")}),
    "blur_lus": (algorithms.blur_lus, FEDAVG | GRADIENT | PRIVATE | DELTA | WEIGHT | {"density": (0.5, "fraction")}),
    "pmtl": (
        algorithms.pmtl,
        FEDAVG | PRIVATE | DELTA | WEIGHT | {"start": ("own", "choice"), "send": ("difference", "choice")},
    ),
    "pmtl_ft": (algorithms.pmtl_ft, FEDAVG | GRADIENT | PRIVATE | DELTA | WEIGHT | HEAD),
    "mr_mtl": (algorithms.mr_mtl, FEDAVG | WEIGHT | DELTA | {"sampling": (Full(), "sampling")}),
    "ditto": (algorithms.ditto, FEDAVG | PENALTY | PRIVATE | DELTA | WEIGHT | PERSONAL),
    "scaffold": (algorithms.scaffold, MODELS | SERVER | PRIVATE | DELTA | {
        "learning_rate": (0.1, "positive"), "batch_size": (4, "count"), "epochs": (1, "count"),
        "steps": (None, "count?"),
    }),
    "apfl": (algorithms.apfl, MODELS | LOCAL | SERVER | PRIVATE | DELTA | {
        "alpha": (0.5, "fraction from 0"), "alpha_learning_rate": (0.1, "at least 0"),
    }),
    "ifca": (algorithms.ifca, MODELS | LOCAL | SERVER | PRIVATE | DELTA | {"clusters": (2, "count")}),
    "pfedme": (algorithms.pfedme, MODELS | LOCAL | SERVER | PRIVATE | DELTA | {
        "penalty_weight": (1.0, "positive"), "inner_learning_rate": (0.1, "positive"), "inner_steps": (2, "count"),
    }),
    "per_fedavg": (algorithms.per_fedavg, MODELS | LOCAL | SERVER | PRIVATE | DELTA | PERSONAL | {
        "inner_learning_rate": (0.1, "at least 0"),
    }),
    "fedadam": (algorithms.fedadam, ADAPTIVE | {"beta2": (0.99, "share below 1")}),
    "fedyogi": (algorithms.fedyogi, ADAPTIVE | {"beta2": (0.99, "share below 1")}),
    "fedadagrad": (algorithms.fedadagrad, ADAPTIVE),
    "dp_lg": (algorithms.dp_lg, MODELS | LOCAL | SERVER | PRIVATE | DELTA),
    "fedrep": (algorithms.fedrep, MODELS | LOCAL | HEAD | SERVER | NAMED | {
        "evaluation_epochs": (None, "count from 0?"), "parts": (None, "release?"),
    }),
    "centaur": (algorithms.centaur, MODELS | LOCAL | HEAD | SERVER | PRIVATE | DELTA | {
        "parts": (None, "release?"), "evaluation_epochs": (None, "count from 0?"),
    }),
    "dp_fedavg_mixed": (algorithms.dp_fedavg_mixed, MODELS | LOCAL | PRIVATE | DELTA | {
        "tuning": (LOCAL["local"][0], "local?"), "alone": LOCAL["local"], "folds": (3, "fold count"),
        "train": (40.0, "positive?"), "penalty": (None, "positive?"), "smoothing": (None, "at least 0?"),
    }),
    "fedrod": (algorithms.fedrod, MODELS | LOCAL | SERVER | PRIVATE | DELTA),
    "ppsgd": (algorithms.ppsgd, MODELS | PRIVATE | DELTA | {
        "batch_size": (4, "count"), "server_learning_rate": (0.1, "at least 0"),
        "personal_learning_rate": (0.1, "at least 0"), "loss": (lambda *batch: 0.0, "function?"),
    }),
    "dp_ridge": (algorithms.dp_ridge, MODELS | PRIVATE | DELTA | ONE_SHOT | {"ridge": (0.01, "positive")}),
    "dp_prototypes": (algorithms.dp_prototypes, MODELS | PRIVATE | DELTA | ONE_SHOT | {
        "least_share": (0.01, "positive"),
    }),
    "ppsgd_centaur": (algorithms.ppsgd_centaur, MODELS | LOCAL | HEAD | SERVER | PRIVATE | DELTA | {
        "head_decay": (1e-4, "at least 0"), "evaluation_epochs": (1, "count from 0"),
    }),
    "feddpa": (algorithms.feddpa, FEDDPA | {"evaluate": ("stored", "choice")}),
    "feddpa_paper": (algorithms.feddpa_paper, FEDDPA | PUBLISHED | {"reg": ("active", "choice")}),
    "dp_pfeddsu": (algorithms.dp_pfeddsu, DP_PFEDDSU | {
        "mask_source": ("broadcast", "choice"), "backward_density": (None, "fraction?"),
    }),
    "dp_pfeddsu_paper": (algorithms.dp_pfeddsu_paper, DP_PFEDDSU | PUBLISHED),
    "adp_pfl": (algorithms.adp_pfl, ADP_PFL | SERVER | {"risk_bounds": (None, "risk bounds?")}),
    "adp_pfl_paper": (algorithms.adp_pfl_paper, ADP_PFL | {
        "sensitivity": ("C", "choice"), "upload": ("updates", "choice"), "claim": (None, "bound?"),
    }),
    "padpfl": (algorithms.padpfl, FEDAVG | GRADIENT | TARGETED | PLAN | IMPACTS | {"upload_epsilon": (INF, "bound")}),
    "padpfl_paper": (algorithms.padpfl_paper, PUBLISHED_STEPS | IMPACTS | {"exposures": (1, "count")}),
    "pdp_fl": (algorithms.pdp_fl, FEDAVG | PENALTY | TARGETED | PLAN | {
        "budgets": (BUDGETS, "budgets"), "epsilon_max": (INF, "bound"), "rounds": (2, "count"),
    }),
    "pdp_fl_paper": (algorithms.pdp_fl_paper, PUBLISHED_STEPS | {
        "budgets": (BUDGETS, "budgets"), "epsilon_max": (INF, "bound"), "aggregation": ("normalised", "choice"),
        "top_up": ("variances", "choice"),
    }),
    "fedbuff": (algorithms.fedbuff, METHOD | {"staleness": (1, "count from 0")}),
    "byzantine": (algorithms.byzantine, METHOD | {
        "liars": ([0], "liars"), "attack": ("sign", "choice"), "scale": (1.0, "at least 0"),
    }),
    "fine_tuned": (algorithms.fine_tuned, METHOD | LOCAL | {"parts": (None, "some layers?")}),
    "prior_corrected": (algorithms.prior_corrected, METHOD | {
        "smoothing": (0.1, "at least 0"), "train": (False, "flag"), "released": (0.0, "share below 1"),
    }),
    "matrix_scaled": (algorithms.matrix_scaled, METHOD | {
        "penalty": (40.0, "positive"), "train": (None, "positive?"), "steps": (20, "count"),
    }),
    "mixed": (algorithms.mixed, METHOD | LOCAL | {
        "folds": (3, "fold count"), "pick": (False, "flag"),
    }),
    "load": (data.load, {"name": ("digits", "dataset"), "data_dir": (None, "path?")}),
    "from_arrays": (data.from_arrays, {
        "train_inputs": (INPUTS, "inputs"), "train_labels": (LABELS, "class labels"), "test_inputs": (INPUTS, "inputs"),
        "test_labels": (LABELS, "class labels"), "classes": (None, "count?"), "name": ("mine", "text"),
        "owner": (None, "labels?"), "test_owner": (None, "labels?"),
    }),
    "features": (data.features, {
        "data": (PICTURES, "pictures"), "encoder": (MEANS, "encoder"), "size": (2, "count"),
        "batch_size": (2, "count"), "progress": (False, "flag"),
    }),
    "minilm": (data.minilm, {}),
    "minilm_tokens": (data.minilm_tokens, {"texts": ([], "texts"), "length": (8, "fold count")}),
    "efficientnet_lite0": (data.efficientnet_lite0, {"width": (None, "count?")}),
    "by_owner": (data.by_owner, {
        "owner": (LABELS, "some labels"), "test_owner": (None, "labels?"), "least": (1, "count"),
    }),
    "make_clients": (data.make_clients, {
        "data": ((INPUTS, LABELS, INPUTS, LABELS), "data"), "train_lists": (LISTS, "rows"),
        "test_lists": (LISTS, "rows"),
    }),
    "shard": (data.shard, {"clients": (FEW, "clients"), "shards": (1, "count"), "own": (None, "shards?")}),
    "hold_out": (data.hold_out, {
        "clients": (FEW, "clients"), "share": (0.5, "probability"), "seed": (None, "count from 0?"),
    }),
    "leave_out": (data.leave_out, {
        "clients": (FEW, "clients"), "share": (0.5, "probability"), "seed": (0, "count from 0"),
    }),
    "describe": (data.describe, {"clients": (FEW, "clients")}),
    "iid": (data.iid, SEED | {"labels": (LABELS, "some targets"), "clients": (2, "count"), "size": (None, "count?")}),
    "by_sizes": (data.by_sizes, SEED | {"labels": (LABELS, "targets"), "sizes": ([1, 2], "sizes")}),
    "dirichlet": (data.dirichlet, SEED | {
        "labels": (LABELS, "some labels"), "clients": (2, "count"), "alpha": (0.5, "positive"),
        "minimum": (0, "count from 0"),
    }),
    "dirichlet_by_client": (data.dirichlet_by_client, SEED | {
        "labels": (LABELS, "some labels"), "clients": (2, "count"), "alpha": (0.5, "positive"), "size": (1, "count"),
    }),
    "label_share": (data.label_share, SEED | {
        "labels": (LABELS, "some labels"), "clients": (2, "count"), "share": (0.5, "fraction"),
        "test_labels": (None, "labels?"),
    }),
    "classes_per_client": (data.classes_per_client, SEED | {
        "labels": (LABELS, "some labels"), "test_labels": (LABELS, "some labels"), "clients": (2, "count"),
        "s": (1, "count"), "distinct": (True, "flag"), "test": ("disjoint", "choice"),
    }),
    "matching": (data.matching, SEED | {
        "train_lists": (LISTS, "some rows"), "labels": (LABELS, "some labels"), "test_labels": (LABELS, "labels"),
    }),
    "salt_and_pepper": (data.salt_and_pepper, SEED | {
        "inputs": (INPUTS, "pixels"), "rows": ([0], "own rows"), "density": (0.5, "fraction from 0"),
    }),
    "corrupt_clients": (data.corrupt_clients, SEED | {
        "inputs": (INPUTS, "pixels"), "lists": (LISTS, "some rows"), "densities": ([0.5, 0.0], "densities"),
    }),
    "flip_labels": (data.flip_labels, {
        "labels": (LABELS, "some labels"), "rows": ([0], "own rows"), "classes": (2, "count"),
    }),
    "mlp": (models.mlp, IMAGES | {
        "input_shape": ((8, 8, 1), "shape or vector"), "hidden": ((4,), "widths"),
    }),
    "lenet": (models.lenet, IMAGES | FORM | {"input_shape": ((28, 28, 1), "large shape")}),
    "lenet_groupnorm": (models.lenet_groupnorm, IMAGES | FORM | {
        "input_shape": ((28, 28, 1), "large shape"), "groups": (2, "count"),
    }),
    "resnet20": (models.resnet20, IMAGES | FORM | {"groups": (2, "count")}),
    "digits_cnn": (models.digits_cnn, IMAGES | FORM),
    "feddpa_cnn": (models.feddpa_cnn, FORM | {"dataset": ("mnist", "dataset"), "classes": (None, "count?")}),
    "build": (models.build, IMAGES | {"name": ("mlp", "choice")}),
    "from_flax": (models.from_flax, {
        "module": (nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(10)]), "module"),
        "input_shape": ((8, 8, 1), "any shape"), "head": (None, "head?"), "name": (None, "text?"),
        "prepare": (lambda x: x, "function"), "task": (tasks.classification(), "task"), "form": (None, "choice?"),
        "vocabulary": (None, "count?"),
    }),
    "from_nnx": (models.from_nnx, {
        "module": (lambda rngs: nnx.Linear(4, 10, rngs=rngs), "nnx module"), "input_shape": ((4,), "any shape"),
        "head": (None, "head?"), "name": (None, "text?"), "prepare": (lambda x: x, "function"),
        "task": (tasks.classification(), "task"), "form": (None, "choice?"), "vocabulary": (None, "count?"),
    }),
    "frozen": (models.frozen, WEIGHTS | {"train": (("head",), "layers?")}),
    "lora": (models.lora, WEIGHTS | {
        "rank": (2, "count"), "where": (("dense_0",), "layers?"), "alpha": (None, "positive?"),
        "train": (("head",), "layers?"), "train_a": (False, "flag"), "seed": (0, "count from 0"),
    }),
    "gru": (models.gru, TOKENS | {"embedding": (2, "count"), "width": (2, "count")}),
    "transformer": (models.transformer, TOKENS | {
        "width": (4, "count"), "blocks": (1, "count"), "heads": (2, "count"),
    }),
    "with_precision": (models.with_precision, MODELS | {"precision": ("tf32", "choice")}),
    "Full": (Full, {}),
    "Poisson": (Poisson, {"rate": (0.5, "fraction")}),
    "FixedSize": (privacy.FixedSize, {"size": (2, "count")}),
    "CyclicPoisson": (privacy.CyclicPoisson, {"rate": (0.5, "fraction"), "groups": (1, "count")}),
    "MinSeparation": (privacy.MinSeparation, {"size": (2, "count"), "separation": (2, "count")}),
    "BallsInBins": (privacy.BallsInBins, {"bins": (2, "count")}),
    "DPSGD": (DPSGD, {
        "clip": (1.0, "positive"), "noise_multiplier": (1.0, "noise"), "rate": (0.5, "fraction"), "steps": (1, "count"),
        "optimizer": (optax.sgd(0.1), "optimizer"), "chunk": (None, "count?"), "decay": (None, "function?"),
    }),
    "Mechanism": (Mechanism, NOISED),
    "AdaptiveClip": (privacy.AdaptiveClip, NOISED | CLIPPED | {
        "quantile": (0.5, "fraction"), "rate": (0.2, "at least 0"), "bit_noise": (None, "positive?"),
    }),
    "BandedNoise": (privacy.BandedNoise, NOISED | {
        "bands": (2, "count"), "coefficients": (None, "coefficients?"),
    }),
    "BLTNoise": (privacy.BLTNoise, NOISED | {"scales": ((0.5,), "scales"), "decays": ((0.5,), "decays")}),
    "Extrapolated": (privacy.Extrapolated, NOISED | {
        "cohort": (1, "count"), "population": (100, "count"), "delta": (None, "probability?"),
    }),
    "Skellam": (privacy.Skellam, NOISED | SHARED | {
        "steps": (64, "count"), "bits": (32, "bits"), "dropout": (0.1, "share below 1"),
        "lost": (0.1, "share below 1"),
    }),
    "Median": (privacy.Median, NOISED | QUIET),
    "TrimmedMean": (privacy.TrimmedMean, NOISED | QUIET | {"share": (0.1, "share below 1")}),
    "Krum": (privacy.Krum, NOISED | QUIET | {"byzantine": (1, "count from 0"), "keep": (1, "count")}),
    "Canaries": (Canaries, {"count": (20, "canary count")}),
    "blt": (privacy.blt, {"buffers": (1, "count"), "rounds": (4, "count"), "separation": (1, "count"),
        "participations": (None, "count?"),
    }),
    "plan": (privacy.plan, {
        "clients": (4, "count"), "cohort": (2, "count"), "rounds": (2, "count"), "epsilon": (2.0, "positive"),
        "noise_multiplier": (None, "quiet?"), "delta": (None, "probability?"),
        "kinds": (("poisson", "separated"), "kinds"), "mechanisms": ({}, "mechanisms"),
        "stateful": (False, "flag"), "participations": (None, "count?"), "separation": (None, "count?"),
        "progress": (False, "flag"),
    }),
    "most_rounds": (privacy.most_rounds, {
        "epsilon": (2.0, "positive"), "noise_multiplier": (2.0, "at least 0"), "clients": (10, "count"),
        "cohort": (2, "count"), "delta": (None, "probability?"), "most": (4, "count"),
    }),
    "largest_cohort": (privacy.largest_cohort, {
        "epsilon": (2.0, "positive"), "noise_multiplier": (2.0, "at least 0"), "clients": (4, "count"),
        "rounds": (2, "count"), "delta": (None, "probability?"),
    }),
    "PrivateMask": (PrivateMask, NOISED),
    "PrivacyFilter": (PrivacyFilter, NOISED | {
        "least_total": (0.0, "at least 0"), "release": (None, "release?"),
    }),
    "Release": (Release, {
        "shares": (print, "function"), "low": (0.25, "positive"), "high": (2.0, "bound"),
        "noise": (1.0, "at least 0"),
    }),
    "calibrate": (privacy.calibrate, PLAN | {
        "epsilon": (1.0, "positive"), "clients": (2, "count"), "rounds": (2, "count"), "sampling": (Full(), "sampling"),
        "shape": (None, "number list?"), "mechanism": (None, "mechanism?"), "stateful": (False, "flag"),
        "participations": (None, "count?"), "separation": (None, "count?"),
    }),
    "calibrate_upload": (privacy.calibrate_upload, PLAN | {
        "epsilon": (1.0, "positive"), "participations": (2, "count"), "clients": (None, "count?"),
    }),
    "calibrate_examples": (privacy.calibrate_examples, PLAN | {
        "epsilon": (1.0, "positive"), "rate": (0.5, "fraction"), "steps": (1, "count"), "participations": (2, "count"),
        "examples": (None, "count?"),
    }),
    "epsilon": (privacy.epsilon, {
        "ledger": (LEDGER, "ledger"), "mechanism": (MECHANISM, "mechanism"), "observer": ("upload", "choice"),
        "accountant": ("rdp", "choice"), "delta": (None, "probability?"), "one_round": (False, "flag"),
        "unit": ("client", "choice"), "stateful": (False, "flag"),
    }),
    "example_epsilon": (privacy.example_epsilon, {
        "examples": (None, "count?"),
        "ledger": (LEDGER, "ledger"), "dp_sgd": (None, "dp_sgd?"), "accountant": ("rdp", "choice"),
        "delta": (None, "probability?"),
    }),
    "planned_ledger": (privacy.planned_ledger, {
        "mechanism": (MECHANISM, "mechanism"), "clients": (2, "count"), "rounds": (2, "count"),
        "dp_sgd": (None, "dp_sgd?"),
    }),
    "privacy_statement": (privacy.privacy_statement, {
        "examples": (None, "count?"),
        "ledger": (LEDGER, "ledger"), "mechanism": (MECHANISM, "mechanism"), "clients": (2, "count"),
        "terms": (Terms(), "terms"), "dp_sgd": (None, "dp_sgd?"), "randomness": ("seed", "choice"),
        "paired": (False, "flag"), "stateful": (False, "flag"),
    }),
    "write_plan": (jaxfl.write_plan, {"plans": (PLANS, "plans"), "path": ("plan.html", "path")}),
    "write_report": (jaxfl.write_report, {"folder": (RUN_FOLDER.name, "run folder")}),
    "format_statement": (privacy.format_statement, {
        "statement": (privacy.privacy_statement(LEDGER, MECHANISM, 2), "statement"), "markdown": (False, "flag"),
    }),
    "fixed_budgets": (privacy.fixed_budgets, {"epsilon": (1.0, "positive"), "rounds": (2, "count")}),
    "round_budgets": (privacy.round_budgets, {
        "epsilon": (1.0, "positive"), "rounds": (2, "count"), "beta": (1.0, "at least 0"), "form": ("exact", "choice"),
    }),
    "round_noise": (privacy.round_noise, PLAN | {
        "budgets": ([1.0, 1.0], "number list"), "epsilon": (1.0, "positive"), "clients": (2, "count"),
        "sampling": (Full(), "sampling"),
    }),
    "client_noise": (privacy.client_noise, PLAN | {
        "budgets": ([1.0, 1.0], "number list"), "epsilon": (1.0, "positive"), "participation": (0.5, "fraction"),
        "release_share": (0.1, "share below 1"),
        "clients": (None, "count?"),
    }),
    "paper_noise": (privacy.paper_noise, {
        "delta": (1e-5, "probability"),
        "budgets": ([1.0, 1.0], "number list"), "rule": ("classic", "choice"), "sparsity": (0.5, "share below 1"),
    }),
}  # fmt: skip

RECORDS = {
    "Algorithm", "Candidate", "ClientData", "Clients", "Comparison", "Dataset", "Encoder", "Ledger",
    "Message", "Metric", "Model", "NAMES", "Result", "Sampling", "Task", "Terms",
}  # fmt: skip
"""Public names that take anything: what is in them is checked where they are used."""


def bad_values(kind: str) -> list[Any]:
    """What must be refused of an argument."""
    values = [*BAD[kind.removesuffix("?")], *ODD]
    return [value for value in values if value is not None] if kind.endswith("?") else values


def call(name: str, /, **changes: Any) -> Any:
    """A public function with arguments that work, but for these."""
    function, arguments = ROWS[name]
    return function(**{argument: valid for argument, (valid, _) in arguments.items()} | changes)
