"""Every public function with arguments that work, and what each argument must not or may be.

All of it follows from the checks of the arguments (`checked`). A row adds only what a check does not say: a value that
works where neither the check nor the default has one, and values that the function refuses for reasons of its own.
"""

import fractions
import functools
import importlib
import inspect
import math
import pathlib
import pkgutil
import tempfile
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from algorithms_table import MODEL, small_clients
from flax import nnx

import jaxfl
from jaxfl import LocalSGD, algorithms, callbacks, data, models, privacy, tasks
from jaxfl._support.checks import check_optional, unchecked
from jaxfl.algorithms.pdp_fl import Budgets
from jaxfl.models.saved import save_models
from jaxfl.privacy import DPSGD, Canaries, Full, Mechanism, Poisson
from jaxfl.run.trained import Origin
from jaxfl.tasks import Task
from jaxfl.types import Model, Terms

# Values that work.

KEY = jax.random.key(0)
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
LEAF = tempfile.mkdtemp()
pathlib.Path(LEAF, "all.json").write_text('{"user_data": {"a": {"x": [[0.5]], "y": [0]}}}')


class _Stored(dict):
    """A dataset on disk, of which only columns are read."""

    column_names = property(list)


STORED = _Stored(who=[1, 2], x=[[0.5], [1.0]], y=[0, 1])
RUN_FOLDER = tempfile.TemporaryDirectory()
(pathlib.Path(RUN_FOLDER.name) / "metrics.jsonl").write_text(
    '{"round": 1, "accuracy": 0.5, "loss": 1.0}\n'
)
MODEL_FILE = pathlib.Path(RUN_FOLDER.name) / "model.safetensors"
SAVED = jaxfl.TrainedModel(MODEL, MODEL.init(KEY), about={"clients": 2, "client": None})
save_models(MODEL_FILE, [SAVED], SAVED.about)


def of_pictures(pictures: np.ndarray) -> data.Dataset:
    """A dataset of pictures of class 0, the first of them for testing, too."""
    labels = np.zeros(len(pictures), int)
    return data.from_arrays(pictures, labels, pictures[:1], labels[:1])


BUILT = [
    MODEL, METHOD, MECHANISM, RESULT, MEANS, LEDGER, Full(), Poisson(0.5), optax.sgd(0.1), LocalSGD(optax.sgd(0.1), 4), Canaries(20),
    DPSGD(clip=1.0, noise_multiplier=1.0, rate=0.5, steps=1), nn.Dense(10), tasks.classification(), Terms(), "own", True,
    of_pictures(np.zeros((4, 2, 2), np.uint8)),
]  # fmt: skip
"""One object of each class that arguments have."""

# Values that do not work.

NAN, INF = math.nan, math.inf
TEXT = np.array(["a"])
NOTHING: dict = {}
ODD = [
    None, 1j, {1}, ..., NOTHING, {"a": 1}, object(), np.datetime64("2020-01-01"), TEXT, np.array([None, 1], object),
    np.array(NAN),
]  # fmt: skip
"""What no argument takes, unless its annotation has None."""

NO_NUMBERS = ["1", True, [1.0], np.array([1.0, 2.0]), NAN, np.str_("1"), 10**400]
NO_CLASSES = [
    "x", "yes", "sgd", "poisson", "lenet", b"x", 1, 5, 0.0, 0.5, [], ["x"], (), np.zeros(3), print, optax.sgd, models.lenet, tasks.classification, algorithms.fedavg,
    data.efficientnet_lite0, Model, Task, Mechanism, Poisson, LocalSGD, DPSGD, Canaries, nn.Dense, Terms, *BUILT,
]  # fmt: skip
NO_NOISE = ["1", True, NAN, INF, -1.0, [-1.0], [NAN], [], ["a"], [[[1.0]]], jnp.array([-1.0])]
NO_LIST = [3, "01", 0.5, {0}]
NO_SHAPE = [
    8, "8x8", (8, 0, 1), (8, -1, 1), (8, 8.5, 1), (8, "8", 1), [[8]], (NAN, 8, 1), (True,), (8, 8), (8, 8, 1, 1),
]  # fmt: skip
NO_LABELS = [3, "012", [0.5, 1.0], [-1, 0], [[0], [1]], ["a", "b"], [NAN, 1.0], [1j], [True, False]]
NO_OWNERS = [
    3, "012", [0.5, 1.0], [[0], [1]], [NAN, 1.0], [1j], [True, False], ["a", 1], [None, "a"], [b"a"],
]  # fmt: skip
NO_TARGETS = [
    3,
    "012",
    [-1, 0],
    ["a", "b"],
    [NAN, 1.0],
    [[INF], [1.0]],
    [1j],
    [[], []],
]
NO_INPUTS = [
    3, "x", [["a"]], np.zeros(4), np.full((4, 2), NAN), np.full((4, 2), INF), np.zeros((4, 0, 2)), np.full((4, 2), 2**40),
    np.zeros((4, 2), complex), np.full((4, 2), 1e300), [[1, 2], [3]],
]  # fmt: skip
NO_KEYS = [-1, 2**32, True, 0.0, "key", np.zeros(2, np.uint32), jnp.zeros(3), (0, 1), jnp.uint32(0)]


MISSING, OMITTED = object(), object()
"""Stand for a value that works: a row must give one, or the default does."""


class Kind(NamedTuple):
    """What arguments with one check take.

    Attributes:
        works: A value that works.
        bad: Values that must be refused, besides `ODD`.
        good: Values that must be taken.
    """

    works: Any
    bad: list[Any]
    good: Sequence[Any] = ()


def positive(zero: bool = False, infinite: bool = False) -> Kind:
    bad = [*NO_NUMBERS, -1.0, -INF, *([] if zero else [0.0]), *([] if infinite else [INF])]
    good = [
        np.float32(0.5), jnp.float32(0.5), jnp.bfloat16(0.5), np.array(0.5), fractions.Fraction(1, 2), 1, np.int64(1),
    ]  # fmt: skip
    return Kind(1.0, bad, [*good, *([0, np.float64(0.5), jnp.int32(0)] if zero else [])])


def count(least: int = 1, most: int | None = None) -> Kind:
    bad = [*NO_NUMBERS, *{-1, min(0, least - 1), least - 1}, *{1.5, least + 0.5}, INF]
    n = max(least, 2)
    good = [np.int64(n), np.uint8(n), jnp.int32(n), np.array(n)]
    return Kind(n, bad if most is None else [*bad, most + 1], good)


def fraction(zero: bool = False, one: bool = True) -> Kind:
    bad = [*NO_NUMBERS, -1.0, -0.1, 1.1, INF, *([] if zero else [0.0]), *([] if one else [1.0])]
    good = [np.float32(0.5), jnp.float32(0.5), np.array(0.5), *([1] if one else [])]
    return Kind(0.5, bad, good)


def noise(axes: Collection[int] = (0, 1)) -> Kind:
    good = [0, np.float32(2.0), jnp.float32(2.0), np.array(2.0)]
    return Kind(1.0, NO_NOISE if 2 in axes else [*NO_NOISE, [[1.0]]], good)


def choice(choices: Collection[Any]) -> Kind:
    first = next(iter(choices))
    bad = [
        "none",
        first.title(),
        f"../{first}",
        3,
        0.5,
        True,
        [],
        b"sound",
        "",
        NAN,
        np.zeros(2),
        np.zeros(3),
        print,
    ]
    return Kind(first, bad)


def instance(kinds: tuple[type, ...]) -> Kind:
    works = next((value for value in BUILT if isinstance(value, kinds)), MISSING)
    bad = [value for value in [*NO_CLASSES, *kinds] if not isinstance(value, kinds)]
    return Kind(works, bad, [np.bool_(False), np.array(False)] if kinds == (bool,) else [])


def numbers(
    axes: Collection[int] = (1,), zero: bool = False, negative: bool = False, infinite: bool = False
) -> Kind:
    bad = ["1", [], [NAN], [NAN, 1.0], ["a"], [[[1.0]]], [True], [1j], [None]]
    bad += [] if 0 in axes else [3.0]
    bad += [] if 2 in axes else [[[1.0]]]
    bad += [] if infinite else [[INF], [INF, 1.0]]
    bad += [] if negative else [[-1.0]]
    return Kind([1.0, 1.0], bad if zero or negative else [*bad, [0.0]])


def counts(least: int = 1, length: int | None = None, empty: bool = True) -> Kind:
    bad = [*NO_LIST, 3.5, [-1], [0.5], [1.5], ["a"], [[1]], [True], [NAN], (8, "8", 1), (NAN, 8, 1)]
    bad += [[0], (8, 0, 1)] if least else []
    bad += [] if empty else [[], ()]
    return Kind(
        [4], bad, [[np.int64(4)], np.array([4, 4]), *([()] if empty else [])] if least else []
    )


def optional(check: Callable) -> Kind:
    return kind_of(check)


def not_empty(check: Callable) -> Kind:
    kind = kind_of(check)
    return kind._replace(bad=[*kind.bad, [], (), np.zeros(0, int), range(0), np.zeros((0, 2), int)])


def same(works: Any, bad: list[Any], good: Sequence[Any] = ()) -> Callable[[], Kind]:
    """What arguments take whose check has no options."""
    return lambda: Kind(works, bad, good)


FORMS = [[32, 32, 3], np.array([32, 32, 3]), (np.int64(32), 32, 3)]
CLASSES = [[0, 1, 0, 1], np.array([0, 1, 0, 1], np.uint8), jnp.array([0, 1, 0, 1])]
WIDE = [np.zeros((4, 2), np.int64)]
NARROW = [
    np.zeros((4, 2), dtype) for dtype in ("int8", "uint8", "int16", "uint16", "int32", "int64", "uint32", "float16")
]  # fmt: skip
KINDS: dict[str, Callable[..., Kind]] = {
    "check_positive": positive, "check_budget": positive, "check_count": count, "check_fraction": fraction,
    "check_noise": noise, "check_choice": choice,
    "check_instance": instance, "check_numbers": numbers, "check_counts": counts, "check_optional": optional,
    "check_not_empty": not_empty,
    "check_callable": same(print, [3, "f", [], 0.5]),
    "check_layers": same(("head",), [3, "head", "layers_3", ("none",), (3,)]),
    "check_array": same([0], [*NO_LIST[1:2], {0}, ["a"]]),
    "check_arrays": same(LISTS, [
        *NO_LIST, [[-1], [1]], [[0.5], [1]], [["a"], [1]], [[0], [99]], [[[0]], [1]], [None, [1]],
    ]),
    "check_labels": same(LABELS, NO_LABELS, CLASSES),
    "check_targets": same(LABELS, NO_TARGETS, [
        [0, 1, 0, 1], [0.5, 1.0, -1.0, 0.0], jnp.array([[0.0], [1.0], [2.0], [-3.0]]),
    ]),
    "check_inputs": same(INPUTS, NO_INPUTS, NARROW),
    "_check_pixels": same(INPUTS, [*NO_INPUTS, *WIDE]),
    "check_key": same(KEY, NO_KEYS),
    "check_one_key": same(KEY, [*NO_KEYS, jax.random.split(KEY)]),
    "check_path": same("here", [3, 0.5, [], b"", "", "a\0b"]),
    "check_seeds": same((0,), [3, "01", [], [-1], [0.5], [None], [0, 0]]),
    "check_chunk": same(2, [0, -1, 1.5, "all", True, NAN, [1]]),
    "check_devices": same(jax.devices()[:1], [[], "cpu", 0, ["cpu"], 0.5, [None]]),
    "check_callbacks": same((), [3, "f", print, [None], ["f"]]),
    "check_clients": same(CLIENTS, NO_CLASSES),
    "_clients_in_lists": same(FEW, NO_CLASSES),
    "_check_population": same(CLIENTS, ["x", 0.5, [], np.zeros(3), MODEL]),
    "_check_validation": functools.partial(fraction, one=False),
    "check_methods": same({"one": jaxfl.Candidate(lambda: METHOD)}, [
        *NO_CLASSES, {"a": algorithms.fedavg}, {1: 2}, {"a/b": 1},
    ]),
    "_check_epsilons": same((1.0,), [8.0, "1", [], [0.0], [-1.0], [NAN], ["a"], [1.0, 1.0], [None]]),
    "check_values": same({"mu": [0.1, 0.2]}, [
        3, "clip", [], {"mu": 3}, {"mu": ["a", "b"]}, {3: [1.0, 2.0]}, {"mu": [NAN, 1.0]}, {"mu": None},
    ]),
    "check_ledger": same(LEDGER, [value for value in NO_CLASSES if value is not LEDGER]),
    "_check_statement": same(privacy.privacy_statement(LEDGER, MECHANISM, 2), [*NO_CLASSES, {"honest": 1}]),
    "check_data": same((INPUTS, LABELS, INPUTS, LABELS), [
        *(value for value in NO_CLASSES if not isinstance(value, data.Dataset)), (np.zeros((4, 2)),),
    ]),
    "_check_texts": same([], [3, "to be", [1], ["a", None]]),
    "_check_densities": same([0.5, 0.0], [3, "0.5", [-0.1, 0.5], [0.5, 1.1], [NAN, 0.0], ["a", 0.0], [0.5]]),
    "_check_nnx": same(lambda rngs: nnx.Linear(4, 10, rngs=rngs), ["x", 0.5, [], np.zeros(3), print, nn.Dense, MODEL]),
    "_check_shape": same((8, 8, 1), [*NO_SHAPE, (8,)], FORMS),
    "_check_vector_or_shape": same((8, 8, 1), NO_SHAPE),
    "_check_coefficients": same((1.0, 0.5), [0.5, "0.5", [-1.0], [NAN], [INF], ["a"], [1j]]),
    "_check_tuple": same((0.5,), ["0.5", [], [-1.0], [NAN], [INF], ["a"], [1j], [0.5, 0.5]]),
    "_check_decays": same((0.5,), ["0.5", [], [-1.0], [NAN], [INF], ["a"], [1j], [1.0], [0.5, 0.5]]),
    "_check_kinds": same(("poisson", "separated"), [3, "poisson", (), ("none",), [0.5], [None]]),
    "_check_noise": noise,
    "_check_budgets": same(Budgets(np.full(2, INF), np.ones(2)), [
        *NO_CLASSES, (1.0,), Budgets(np.zeros(2), np.ones(2)), Budgets(np.ones(2), np.ones(3)),
        Budgets(np.array([NAN]), np.ones(1)), Budgets(np.ones(1), np.array([INF])), Budgets(np.array(["a"]), np.ones(1)),
    ]),
    "_impacts": same([0.5, 0.5], [
        3.0, "1", [], [-1.0, 2.0], [NAN, 1.0], ["a"], [[[1.0]]], [0.5, 0.6], lambda t: "a",
    ]),
    "_check_risks": same([1.0], ["public", 3.0, [], [0.0], [-1.0], [NAN], [INF], ["a"], [[1.0]]]),
    "_check_bounds": same((1.0, 2.0), [3.0, "1", [], (1.0,), (2.0, 1.0), (0.0, 1.0), (1.0, INF), (NAN, 1.0), ("a", "b")]),
    "_check_percentile": same(50.0, [*NO_NUMBERS, -1.0, 100.0, INF]),
    "_check_threshold": same(0.5, [*NO_NUMBERS, 1.0, 2.0, INF]),
    "_steps": lambda length: Kind(None, ["1", 3.0, [], [NAN] * length, ["a"] * length, [1.0] * (length + 1)]),
    "check_owners": same(LABELS, NO_OWNERS, [[2**40, -1, 2**63, 0], np.array([1, 2**63, 0, 0], np.uint64)]),
    "_check_frame": same(FRAME, [*NO_CLASSES, {"a": 3}, {"a": "x"}, {3: [1]}, {"a": [1], "b": [1, 2]}, {"a": []}]),
    "_check_token_lists": same([[1, 2]] * 4, [
        3, "01", [], [[0.5]] * 4, [[-1]] * 4, [["a"]] * 4, [[[1]]] * 4, [[1, 2]] * 3,
    ]),
    "_check_vocabulary": same(None, [3, 0.5, [], [1], ["a", "a"], ""]),
    "_check_splits": same({"train": STORED}, [*NO_CLASSES, {"train": 3}]),
    "_check_tested": same(CLIENTS, [*(value for value in NO_CLASSES if not isinstance(value, data.Dataset))]),
    "_check_rates": same(0.5, ["1", True, NAN, 0.0, -0.5, 1.5, INF, [], [0.0], [1.5], [NAN], [[0.5]], ["a"]]),
    "_check_mechanisms": same({}, [3, "mine", {"mine": 3}, {3: Mechanism()}, {"poisson": Mechanism()}]),
    "_check_client_columns": same(None, [3, "age", [], {"age": 3}, {"age": "x"}, {"age": [None]}, {"age": [[1]]}, {3: [0]}]),
    "_check_plans": same(PLANS, [*NO_CLASSES, (), [None], "plan", [MODEL]]),
    "_check_input_names": same(None, [3, "age", [], [3], ["none"]]),
    "_check_test": same(None, ["x", [], print, 0.0, 1.0, 2, -0.5, NAN, {"a": 3}, {"a": [1], "b": [1, 2]}, {"a": [1]}]),
    "_check_limits": same(None, [3, "age", ["age"], {"age": 3}, {"age": (1, 0)}, {"age": (0, INF)}, {3: (0, 1)}]),
    "_check_categories": same(None, [3, "age", ["age"], {"age": 3}, {"age": []}, {"age": [1, 1]}, {3: [0]}]),
    "check_availability": same(0.8, ["1", True, NAN, 0.0, -0.5, 1.5, INF, [], [0.0], [1.5], [NAN], [[0.5]], ["a"]], [
        1, np.float32(0.5), jnp.float32(0.5), np.array(0.5),
    ]),
    "_check_staleness": same(1, ["1", True, NAN, -1, 1.5, INF, [], [-1], [0.5], [NAN], [[1]], ["a"]], [
        0, np.int64(2), jnp.int32(2), np.array([0, 2]),
    ]),
    "_check_speed": same(1.0, ["1", True, NAN, 0.0, -1.0, [], [0.0], [NAN], [[1.0]], ["a"]], [
        1, INF, np.float32(0.5), jnp.float32(0.5), [1.0, INF],
    ]),
    "_check_result": same(COSTED, NO_CLASSES),
    "_check_costs": same({"fedavg": COSTS}, [*NO_CLASSES, {}, COSTS, {"a": 3}, {"a": []}, {"a": [3]}, {"a": [{}]}]),
    "unchecked": same(MISSING, []),
}  # fmt: skip
"""By the name of a check, what its arguments take."""

# Rows.

AXIS = [3, "01", b"01", {1.0}, [], [NAN], [1j], np.ones((2, 2)), lambda: 1]
COLUMNS = [3, "01", [], ["a"], [[1.0]], [NAN], [None], [1j]]
STATE = ["x", 3, 0.5, [], np.zeros(3), print, MODEL, {"params": np.zeros(3)}]
TOO_LARGE = [[0, 1, 0, 2**31 - 1], [0, 1, 0, 2**24]]
NO_PICTURES = [
    np.zeros((4, 2)),
    np.zeros((4, 2, 2, 5)),
    np.full((4, 2, 2), 1.5),
    np.zeros((4, 2, 2), int),
]
NO_COLUMN = [3, 0.5, [], "none"]
ONES = [np.int64(1), np.uint8(1), jnp.int32(1), np.array(1)]
ROBUST = "Median", "TrimmedMean", "Krum"

VALUES: dict[str, Any] = {
    "accountant": "rdp", "clip": 1.0, "noise_multiplier": 1.0, "progress": False, "params": MODEL.init(KEY),
}  # fmt: skip
"""By argument, values that are given instead of the default or of what the check says."""

ROWS: dict[str, dict[str, Any]] = {
    "sweep": {"build": functools.partial(algorithms.fedprox, MODEL)},
    "compare": {"epsilons": (1.0,), "seeds": (0,), "rounds": 1},
    "grid": {"rate": [0.1, 0.2], "clip": [1.0]},
    "spread": {"rate": (0.1, 0.2)},
    "mlflow": {"library": LOGGED},
    "wandb": {"run": LOGGED},
    "evaluate": {"server": RESULT.server, "key": KEY, "rounds": 1},
    "adp_pfl_paper": {"sensitivity": "C"},
    "dp_fedavg_mixed": {"penalty": None},
    "padpfl": {"epsilon": INF},
    "padpfl_paper": {"epsilon": INF},
    "pdp_fl": {"epsilon_max": INF},
    "pdp_fl_paper": {"epsilon_max": INF},
    "features": {"size": 2, "batch_size": 2},
    "by_sizes": {"sizes": [1, 2]},
    "lenet": {"input_shape": (28, 28, 1)},
    "lenet_groupnorm": {"input_shape": (28, 28, 1), "groups": 2},
    "gru": {"embedding": 2, "width": 2},
    "transformer": {"width": 4, "blocks": 1, "heads": 2},
    "AdaptiveClip": {"noise_multiplier": 0.0},
    "Extrapolated": {"cohort": 1, "population": 100},
    **{rule: {"noise_multiplier": 0.0} for rule in ROBUST},
    "CyclicPoisson": {"groups": 1},
    "Skellam": {"steps": 64},
    "plan": {"clients": 4, "epsilon": 2.0, "noise_multiplier": None, "kinds": ("poisson", "separated")},
    "most_rounds": {"epsilon": 2.0, "noise_multiplier": 2.0, "clients": 10, "most": 4},
    "largest_cohort": {"epsilon": 2.0, "noise_multiplier": 2.0, "clients": 4},
    "Release": {"low": 0.25, "high": 2.0, "noise": 1.0},
    "write_report": {"folder": RUN_FOLDER.name},
    "plot_costs": {"path": pathlib.Path(RUN_FOLDER.name) / "costs.png"},
    "write_plan": {"path": pathlib.Path(RUN_FOLDER.name) / "plan.html"},
    "load_model": {"path": MODEL_FILE},
    "from_frame": {"label": "sick"},
    "from_leaf": {"folder": LEAF},
    "from_huggingface": {"owner": "who", "input": "x", "label": "y"},
    "build": {"name": "mlp", "input_shape": (8, 8, 1)},
}  # fmt: skip
"""By function, values of arguments that must be others, or that no check has."""

REFUSED: dict[str, list[Any]] = {
    "grid.rate": AXIS, "grid.clip": AXIS, "spread.rate": COLUMNS,
    "mlflow.library": [3, "run"], "wandb.run": [3, "run"],
    "evaluate.server": STATE, "evaluate.states": STATE,
    "params": [3, "x", [], np.zeros(3), {"head": np.zeros(3)}, MODEL],
    "rows": [3, 0.5, [-1], [99], [0.5], [[0]]],
    "sparse_layers": [99],
    "delta": [1.0],
    "head": [()],
    "build.name": choice(["mlp"]).bad,
    "terms": [(1e-5, None, None)],
    "compare.seeds": [[100]],
    "from_arrays.train_labels": [*NO_LABELS, *TOO_LARGE], "from_arrays.test_labels": [*NO_LABELS, *TOO_LARGE],
    "features.data": [*map(of_pictures, NO_PICTURES)],
    "by_sizes.sizes": [[99, 99]],
    "lenet.input_shape": [(4, 4, 1), (7, 7, 1)], "lenet_groupnorm.input_shape": [(4, 4, 1), (7, 7, 1)],
    "plot_costs.metric": ["none"],
    "write_report.folder": ["/", "no/such/folder"],
    "load_model.path": ["/", "no/such/file"],
    "from_frame.label": NO_COLUMN, "from_frame.owner": NO_COLUMN,
    **{f"from_huggingface.{name}": NO_COLUMN for name in ("owner", "input", "label", "train")},
    "from_huggingface.test": [3, 0.5, []],
    "AdaptiveClip.clip": [INF],
    "TrimmedMean.share": [0.5, 1.0],
    "Release.low": [0.0],
    "Skellam.clip": [INF], "Skellam.noise_multiplier": [0.0], "Skellam.client_noise": [1.0],
    "plan.epsilon": [None], "plan.noise_multiplier": [*NO_NOISE, 1.0],
    **{f"{rule}.{noise}": [1.0] for rule in ROBUST for noise in ("noise_multiplier", "client_noise")},
}  # fmt: skip
"""By argument, or by function and argument, what must be refused besides what the check says."""

TAKEN: dict[str, list[Any]] = {
    "from_arrays.train_labels": [], "from_arrays.test_labels": [], "from_flax.input_shape": [], "from_nnx.input_shape": [],
    "dp_pfeddsu.sparse_layers": [1], "dp_pfeddsu_paper.sparse_layers": [1],
    "BandedNoise.client_noise": [0], "BLTNoise.client_noise": [0], "Extrapolated.client_noise": [0],
    "dp_fedavg_mixed.smoothing": [*[None] * 7, *positive(zero=True).good],  # either, or a penalty
    "load_model.client": [], "by_owner.least": ONES,
    "CyclicPoisson.groups": ONES, "plan.cohort": ONES,
    "TrimmedMean.share": [0, np.float32(0.25)], "plan.noise_multiplier": [], "personal_budgets.base": [3],
    "Skellam.noise_multiplier": [np.float32(2.0), np.array(2.0)], "Skellam.client_noise": [0],
    "Release.low": [np.float32(0.25), jnp.float32(0.25), np.array(0.25), fractions.Fraction(1, 4)],
    **{f"{rule}.{noise}": [0] for rule in ROBUST for noise in ("noise_multiplier", "client_noise")},
}  # fmt: skip
"""By function and argument, what must be taken, where it is less than what the check says."""

NOT_ODD = {
    "write_report.columns": NOTHING,
    "by_owner.owner": TEXT,
    "plan.mechanisms": NOTHING,
    "from_frame.bounds": NOTHING,
    "from_frame.categories": NOTHING,
}
"""By function and argument, what works although it is in `ODD`."""

RECORDS = {
    "Algorithm", "Candidate", "ClientData", "Clients", "Comparison", "Dataset", "Encoder", "Ledger",
    "Message", "Metric", "Model", "NAMES", "Result", "Sampling", "Task", "Terms", "TrainedModel",
}  # fmt: skip
"""Public names that take anything: what is in them is checked where they are used."""


def public() -> dict[str, Any]:
    """Return what has a public name, and the functions that make arguments of a method and stand in its module."""
    packages = (jaxfl, algorithms, callbacks, data, models, privacy)
    found = {name: getattr(package, name) for package in packages for name in package.__all__}
    for listed in pkgutil.iter_modules(algorithms.__path__, "jaxfl.algorithms."):
        found |= {
            name: value
            for name, value in vars(importlib.import_module(listed.name)).items()
            if hasattr(value, "argument_checks") and value.__module__ == listed.name
        }
    return found


PUBLIC = public()
FUNCTIONS = {
    name: value for name, value in PUBLIC.items() if callable(value) and name not in RECORDS
}


def kind_of(check: Callable) -> Kind:
    """Return what arguments with a check take."""
    options: dict[str, Any] = {}
    while isinstance(check, functools.partial):
        options = check.keywords | options
        check = check.func
    assert check.__name__ in KINDS, f"KINDS must say what arguments with {check.__name__} take"
    return KINDS[check.__name__](**options)


@functools.cache
def arguments(name: str) -> dict[str, Kind]:
    """Return what each argument of a function takes."""
    function: Any = FUNCTIONS[name]
    call = function.__init__ if isinstance(function, type) else function
    checks = call.argument_checks() if hasattr(call, "argument_checks") else {}
    parameters = inspect.signature(function).parameters.values()
    defaults = {own.name: own.default for own in parameters if own.kind is not own.VAR_KEYWORD}
    values = VALUES | ROWS.get(name, {})
    kinds = {}
    for argument in defaults | checks | ROWS.get(name, {}):
        check = checks.get(argument, unchecked)
        works, bad, good = kind_of(check)
        bad = [*bad, *REFUSED.get(argument, []), *REFUSED.get(f"{name}.{argument}", [])]
        assert bad, f"REFUSED must say what {name} refuses of {argument}, which has no check"
        # Arguments of a `TypedDict` have no default in the signature, but all of them may be left out.
        default = defaults.get(argument, OMITTED)
        if default is not inspect.Parameter.empty:
            works = OMITTED
        works = values.get(argument, works)
        assert works is not MISSING, f"ROWS must give {name} a value of {argument} that works"
        optional = default is None or getattr(check, "func", None) is check_optional
        taken: list[Any] = [None] if optional else []
        taken.append(NOT_ODD.get(f"{name}.{argument}", MISSING))
        bad += [value for value in ODD if all(value is not own for own in taken)]
        kinds[argument] = Kind(works, bad, TAKEN.get(f"{name}.{argument}", good))
    return kinds


def call(name: str, /, **changes: Any) -> Any:
    """Call a public function with arguments that work, but for these."""
    works = {argument: kind.works for argument, kind in arguments(name).items()} | changes
    return FUNCTIONS[name](
        **{argument: value for argument, value in works.items() if value is not OMITTED}
    )
