"""Every public function with arguments that work, and what its arguments take of one pool of values.

All of it follows from the checks of the arguments (`checked`). `KINDS` says a second time, as a predicate, what each check
may take. All else in the pool must be refused. A row of a function adds only what its checks do not say.
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
from jaxfl._support.checks import check_optional, plain, unchecked
from jaxfl.algorithms.pdp_fl import Budgets
from jaxfl.models.saved import save_models
from jaxfl.privacy import DPSGD, Canaries, Full, Mechanism, Poisson
from jaxfl.privacy.mechanisms.robust import Robust
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
    """A dataset on disk, of which only columns are read."""

    column_names = property(list)


STORED = _Stored(who=[1, 2], x=[[0.5], [1.0]], y=[0, 1])


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

# Values of which an argument takes some.

NOTHING: dict = {}
TEXT = np.array(["a"])
POOL = [
    # Numbers, and what looks like one.
    NAN, INF, -INF, -1.0, -0.5, -0.1, 0.0, 0.5, 1.0, 1.1, 1.5, 2.5, 3.0, 3.5, 100.0, -1, 0, 1, 3, 5, 8, 2**32, 10**400, 1j, True, "1", "01", "012", "0.5", "8x8", np.str_("1"),
    np.array(NAN),
    # Texts.
    "", "f", "x", "yes", "sgd", "poisson", "lenet", "head", "none", "../x", "a\0b", b"", b"x", b"sound", np.datetime64("2020-01-01"),
    # Lists and vectors.
    [], (), range(0), np.zeros(0, int), [NAN], [NAN, 1.0], [INF], [INF, 1.0], [-1], [-1.0], [-1, 0], [0], [0.0], [0.5], [0.5, 1.0], [0.5, 1.1], [1], [1.0],
    [1.5], [1.0, 1.0], [2.0, 1.0], [0.0, 1.0], [0, 0], [99], [True], [True, False], [1j], [None], [None, "a"], ["a"], ["x"], ["a", "b"], ["a", 1], ["a", "a"], ["none"], [b"a"],
    [print], np.zeros(2), np.zeros(3), np.array([1.0, 2.0]), np.array([None, 1], object), np.zeros(2, np.uint32), jnp.array([-1.0]),
    np.zeros(4), TEXT, {0}, {1}, {1.0}, jax.random.split(KEY),
    # Shapes.
    (3,), (8,), (True,), (8, 8), (8, 0, 1), (8, -1, 1), (8, 8.5, 1), (8, "8", 1), (NAN, 8, 1), (8, 8, 1, 1),
    # Tables.
    [[]], [[], []], [[1]], [[8]], [[0.5]], [[1.0]], [["a"]], [[0], [1]], [[0.5], [1]], [[-1], [1]], [["a"], [1]], [[0], [99]], [[INF], [1.0]], [None, [1]],
    [[1, 2], [3]], [[[0]], [1]], [[[1.0]]], np.zeros((0, 2), int), np.full((4, 2), NAN), np.full((4, 2), INF), np.full((4, 2), 2**40),
    np.full((4, 2), 1e300), np.zeros((4, 2), complex), np.zeros((4, 0, 2)),
    # Dicts.
    NOTHING, {"a": 1}, {"a": "x"}, {"a": None}, {"a": []}, {"a": [1]}, {"a": [NAN]}, {"a": [None]}, {"a": [[1]]}, {"a": ["x", "y"]},
    {"a": (1, 0)}, {"a": (0, INF)}, {"a": [1, 1]}, {"a": [1], "b": [1, 2]}, {"a": [{}]}, {"a/b": 1}, {3: [1]}, {"a": print},
    # Objects.
    None, ..., object(), print, optax.sgd, models.lenet, tasks.classification, algorithms.fedavg, data.efficientnet_lite0, Model, Task,
    Mechanism, Poisson, LocalSGD, DPSGD, Canaries, nn.Dense, Terms, *BUILT,
]  # fmt: skip

MISSING, OMITTED = object(), object()
"""Stand for a value that works: a row must give one, or the default does."""


class Kind(NamedTuple):
    """What arguments with one check take."""

    works: Any
    """A value that works."""
    takes: Callable[[Any], bool]
    """Whether the argument may take a value of the pool."""
    good: Sequence[Any] = ()
    """Values that must be taken."""
    bad: Sequence[Any] = ()
    """Values that must be refused, besides those of the pool."""


# Predicates.


def real(value: Any) -> bool:
    number = plain(value)
    if type(number) not in (int, float):
        return False
    return -(2**1000) < number < 2**1000 or number in (INF, -INF)


def whole(least: int, most: float = INF) -> Callable[[Any], bool]:
    return lambda value: real(value) and type(plain(value)) is int and least <= value <= most


def inside(low: float, high: float, *ends: float) -> Callable[[Any], bool]:
    """Numbers of an open interval, and ends that belong to it."""
    return lambda value: real(value) and (low < value < high or value in ends)


def boolean(value: Any) -> bool:
    return isinstance(value, bool)


def text(value: Any) -> bool:
    return isinstance(value, str)


def anything(value: Any) -> bool:
    return True


def nothing(value: Any) -> bool:
    return False


def no_entries(value: Any) -> bool:
    return isinstance(value, list | tuple | range) and not len(value)


def no_names(value: Any) -> bool:
    return value is NOTHING


def each(entry: Callable[[Any], bool], *axes: int, empty: bool = False) -> Callable[[Any], bool]:
    """Arrays with one of these numbers of axes, of which each entry is taken."""

    def takes(value: Any) -> bool:
        try:
            array = np.asarray(value)
        except Exception:
            return False
        if array.ndim not in axes or not (empty or array.size):
            return False
        return all(entry(one) for one in array.ravel().tolist())

    return takes


def entries(entry: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Sequences of which each entry is taken."""
    return lambda value: isinstance(value, list | tuple) and all(map(entry, value))


def either(*predicates: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(takes(value) for takes in predicates)


def lists(value: Any) -> bool:
    """Lists by name."""
    if not isinstance(value, dict) or not all(map(text, value)):
        return False
    return all(isinstance(one, list | tuple) for one in value.values())


def columns(value: Any) -> bool:
    """Lists of one length by name."""
    return lists(value) and len({*map(len, value.values())}) == 1


def dataset(value: Any) -> bool:
    return isinstance(value, data.Dataset) or (type(value) is tuple and len(value) == 4)


share = inside(0, 1, 1)
positive = inside(0, INF)
zeros = each(inside(0, 0, 0), 0, 1)
rows = whole(0, 3)
vector = each(rows, 1, empty=True)
shape = each(whole(1), 1)
seed = whole(0, 2**32 - 1)

# Kinds.

SINGLES = [np.float32(0.5), jnp.float32(0.5), np.array(0.5)]
NUMBERS = [*SINGLES, jnp.bfloat16(0.5), fractions.Fraction(1, 2), 1, np.int64(1)]
FORMS = [[32, 32, 3], np.array([32, 32, 3]), (np.int64(32), 32, 3)]
NO_LABELS = [
    [-1, 0], [0.5, 1.0], [[0], [1]], [True, False], [0, 1, 0, 2**31 - 1], [0, 1, 0, 2**24],
]  # fmt: skip
NO_KEYS = ["key", jnp.zeros(3), (0, 1), jnp.uint32(0)]
CLASSES = [[0, 1, 0, 1], np.array([0, 1, 0, 1], np.uint8), jnp.array([0, 1, 0, 1])]
NARROW = [
    np.zeros((4, 2), dtype) for dtype in ("int8", "uint8", "int16", "uint16", "int32", "int64", "uint32", "float16")
]  # fmt: skip


def of_positive(zero: bool = False, infinite: bool = False) -> Kind:
    ends = [*([0] if zero else []), *([INF] if infinite else [])]
    zeros = [0, np.float64(0.5), jnp.int32(0)]
    return Kind(1.0, inside(0, INF, *ends), [*NUMBERS, *(zeros if zero else [])])


def of_count(least: int = 1, most: float = INF) -> Kind:
    n = max(least, 2)
    beyond = [least - 1, least + 0.5, *([] if most == INF else [most + 1])]
    return Kind(
        n, whole(least, most), [np.int64(n), np.uint8(n), jnp.int32(n), np.array(n)], beyond
    )


def of_fraction(zero: bool = False, one: bool = True, example: float = 0.5) -> Kind:
    ends = [*([0] if zero else []), *([1] if one else [])]
    return Kind(example, inside(0, 1, *ends), [*SINGLES, *([1] if one else [])])


def of_noise(axes: Collection[int] = (0, 1)) -> Kind:
    good = [0, np.float32(2.0), jnp.float32(2.0), np.array(2.0)]
    return Kind(1.0, each(inside(0, INF, 0), *axes), good)


def of_choice(choices: Collection[Any]) -> Kind:
    first = next(iter(choices))
    return Kind(
        first, lambda value: text(value) and value in choices, (), [first.title(), f"../{first}"]
    )


def of_instance(kinds: tuple[type, ...]) -> Kind:
    works = next((value for value in BUILT if isinstance(value, kinds)), MISSING)
    good = [np.bool_(False), np.array(False)] if kinds == (bool,) else []
    return Kind(works, lambda value: isinstance(value, kinds), good, kinds)


def of_numbers(
    axes: Collection[int] = (1,), zero: bool = False, negative: bool = False, infinite: bool = False
) -> Kind:
    ends = [*([0] if zero else []), *([INF] if infinite else [])]
    return Kind([1.0, 1.0], each(inside(-INF if negative else 0, INF, *ends), *axes))


def of_counts(least: int = 1, length: int | None = None, empty: bool = True) -> Kind:
    good = [[np.int64(4)], np.array([4, 4]), *([()] if empty else [])]
    return Kind([4], each(whole(least), 1, empty=empty), good if least else [])


def of_not_empty(check: Callable) -> Kind:
    kind = kind_of(check)
    return kind._replace(takes=lambda value: kind.takes(value) and len(value) > 0)


def of_steps(length: int) -> Kind:
    wrong = ([NAN] * length, ["a"] * length, [1.0] * (length + 1))
    return Kind(None, each(inside(0, INF, 0), 1), bad=wrong)


def same(
    works: Any, takes: Callable, good: Sequence = (), bad: Sequence = ()
) -> Callable[[], Kind]:
    """What arguments take whose check has no options."""
    return lambda: Kind(works, takes, good, bad)


KINDS: dict[str, Callable[..., Kind]] = {
    "check_positive": of_positive, "check_budget": of_positive, "check_count": of_count, "check_fraction": of_fraction, "_check_rate": of_fraction,
    "check_noise": of_noise, "_check_noise": of_noise, "check_choice": of_choice, "check_instance": of_instance,
    "check_numbers": of_numbers, "check_counts": of_counts, "check_not_empty": of_not_empty, "_steps": of_steps,
    "_check_validation": same(0.5, either(callable, inside(0, 1)), SINGLES, [1.0]),
    "unchecked": same(MISSING, anything),
    "check_callable": same(print, callable),
    "check_layers": same(("head",), no_entries, bad=["layers_3", ("none",), (3,)]),
    "check_path": same("here", lambda value: text(value) and value not in ("", "a\0b")),
    "check_folder": same("here", lambda value: text(value) and value not in ("", "a\0b"), bad=[f"{__file__}/run"]),
    "check_key": same(KEY, either(seed, lambda value: isinstance(value, type(KEY))), bad=NO_KEYS),
    "check_one_key": same(KEY, seed, bad=NO_KEYS),
    "check_seeds": same((0,), each(whole(0), 1), bad=[[0, 0]]),
    "check_chunk": same(2, whole(1), bad=["all"]),
    "check_devices": same(jax.devices()[:1], nothing, bad=["cpu", ["cpu"]]),
    "check_callbacks": same((), either(no_entries, entries(callable)), bad=[["f"]]),
    # Arrays.
    "check_array": same([0], each(real, 1, 2, 3, empty=True)),
    "check_arrays": same(LISTS, entries(vector)),
    "check_labels": same(LABELS, each(whole(0), 1), CLASSES),
    "check_targets": same(LABELS, each(either(boolean, inside(-INF, INF)), 1, 2, 3), [
        [0, 1, 0, 1], [0.5, 1.0, -1.0, 0.0], jnp.array([[0.0], [1.0], [2.0], [-3.0]]),
    ], [[-1, 0], [[], []]]),
    "check_owners": same(LABELS, either(each(whole(-(2**63), 2**64), 1), each(text, 1)), [
        [2**40, -1, 2**63, 0], np.array([1, 2**63, 0, 0], np.uint64),
    ], [["a", 1], [None, "a"]]),
    "check_inputs": same(INPUTS, each(inside(-1e38, 1e38), 2, 3), NARROW),
    "_check_pixels": same(INPUTS, each(inside(-1e38, 1e38), 2, 3), bad=[np.zeros((4, 2), np.int64)]),
    "_check_shape": same((8, 8, 1), lambda value: shape(value) and len(value) == 3, FORMS),
    "_check_vector_or_shape": same((8, 8, 1), lambda value: shape(value) and len(value) in (1, 3)),
    "_check_coefficients": same((1.0, 0.5), each(inside(0, INF, 0), 1)),
    "_check_tuple": same((0.5,), each(inside(0, INF, 0), 1), bad=[[0.5, 0.5]]),
    "_check_decays": same((0.5,), each(inside(0, 1, 0), 1), bad=[[0.5, 0.5]]),
    "_check_densities": same([0.5, 0.0], each(inside(0, 1, 0, 1), 1, 2, 3), bad=[[-0.1, 0.5], [NAN, 0.0], ["a", 0.0], [0.5]]),
    "_check_epsilons": same((1.0,), each(inside(0, INF, INF), 1), bad=[8.0, [1.0, 1.0]]),
    "_impacts": same([0.5, 0.5], either(callable, each(inside(0, INF, 0), 1, 2)), bad=[[-1.0, 2.0], [0.5, 0.6], lambda t: "a"]),
    "_check_risks": same([1.0], each(positive, 1)),
    "_check_bounds": same((1.0, 2.0), nothing, bad=[(1.0,), (2.0, 1.0), (0.0, 1.0), (1.0, INF), (NAN, 1.0), ("a", "b")]),
    "_check_percentile": same(50.0, inside(0, 100, 0)),
    "_check_threshold": same(0.5, inside(-INF, 1), bad=[2.0]),
    "_check_rates": same(0.5, each(share, 0, 1)),
    "check_availability": same(0.8, each(share, 0, 1), [1, *SINGLES]),
    "_check_staleness": same(1, each(whole(0), 0, 1), [0, np.int64(2), jnp.int32(2), np.array([0, 2])]),
    "_check_speed": same(1.0, each(inside(0, INF, INF), 0, 1), [1, INF, *SINGLES[:2], [1.0, INF]]),
    # Names.
    "_check_texts": same([], either(no_entries, entries(text)), bad=["to be", ["a", None]]),
    "_check_kinds": same(("poisson", "separated"), no_entries, bad=[("none",), ()]),
    "_check_vocabulary": same(None, either(each(text, 1), text), bad=["", [1], ["a", "a"], TEXT]),
    "_check_input_names": same(None, nothing, bad=["age", [3]]),
    # Objects of the library and of data.
    "check_clients": same(CLIENTS, nothing), "_clients_in_lists": same(FEW, nothing),
    "_check_population": same(CLIENTS, either(whole(1), callable)),
    "check_methods": same({"one": jaxfl.Candidate(lambda: METHOD)}, nothing, bad=[{"a": algorithms.fedavg}, {1: 2}]),
    "check_values": same({"mu": [0.1, 0.2]}, columns, bad=["clip", {3: [1.0, 2.0]}, {"mu": 3}, {"mu": ["a", "b"]}, {"mu": [NAN, 1.0]}, {"mu": None}]),
    "check_ledger": same(LEDGER, lambda value: value is LEDGER),
    "_check_statement": same(privacy.privacy_statement(LEDGER, MECHANISM, 2), nothing, bad=[{"honest": 1}]),
    "check_data": same((INPUTS, LABELS, INPUTS, LABELS), dataset, bad=[(np.zeros((4, 2)),)]),
    "_check_tested": same(CLIENTS, dataset),
    "_check_nnx": same(lambda rngs: nnx.Linear(4, 10, rngs=rngs), callable, bad=[print, nn.Dense]),
    "_check_budgets": same(Budgets(np.full(2, INF), np.ones(2)), nothing, bad=[
        (1.0,), Budgets(np.zeros(2), np.ones(2)), Budgets(np.ones(2), np.ones(3)), Budgets(np.array([NAN]), np.ones(1)),
        Budgets(np.ones(1), np.array([INF])), Budgets(TEXT, np.ones(1)),
    ]),
    "_check_plans": same(PLANS, nothing, bad=["plan", [MODEL]]), "_check_result": same(COSTED, nothing),
    "_check_costs": same({"fedavg": COSTS}, nothing, bad=[COSTS, {"a": 3}, {"a": [3]}]),
    "_check_mechanisms": same({}, no_names, bad=["mine", {"mine": 3}, {3: Mechanism()}, {"poisson": Mechanism()}]),
    "_check_encoding": same(data.from_frame(FRAME, label="sick").encoding, entries(nothing), bad=[(), [{}]]),
    "_check_frame": same(FRAME, columns, bad=[{"a": 3}, {"a": []}]),
    "_check_splits": same({"train": STORED}, nothing, bad=[{"train": 3}]),
    "_check_token_lists": same([[1, 2]] * 4, entries(vector), bad=[
        [], [[0.5]] * 4, [[-1]] * 4, [["a"]] * 4, [[[1]]] * 4, [[1, 2]] * 3,
    ]),
    "_check_client_columns": same(None, no_names, bad=[
        "age", [], {"age": 3}, {"age": "x"}, {"age": [None]}, {"age": [[1]]}, {3: [0]},
    ]),
    "_check_test": same(None, inside(0, 1), bad=[2, {"a": 3}]),
    "_check_limits": same(None, no_names, bad=["age", ["age"], {"age": 3}, {3: (0, 1)}, {"age": (1, 0)}, {"age": (0, INF)}]),
    "_check_categories": same(None, lists, bad=["age", ["age"], {"age": 3}, {3: [0]}, {"age": []}, {"age": [1, 1]}]),
}  # fmt: skip
"""By the name of a check, what its arguments take."""

# Rows.

ONES = [np.int64(1), np.uint8(1), jnp.int32(1), np.array(1)]
ROBUST = [rule.__name__ for rule in Robust.__subclasses__()]

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
    "write_report": {"folder": HERE},
    "plot_costs": {"path": HERE / "costs.png"},
    "write_plan": {"path": HERE / "plan.html"},
    "load_model": {"path": HERE / "model.safetensors"},
    "from_frame": {"label": "sick"},
    "from_leaf": {"folder": HERE},
    "from_huggingface": {"owner": "who", "input": "x", "label": "y"},
    "build": {"name": "mlp", "input_shape": (8, 8, 1)},
}  # fmt: skip
"""By function, values of arguments that must be others, or that no check has."""

TAKES: dict[str, Callable[[Any], bool]] = {
    "grid.rate": either(entries(anything), each(real, 1)), "grid.clip": either(entries(anything), each(real, 1)),
    "spread.rate": each(inside(0, INF), 1),
    "from_arrays.test_inputs": each(inside(-1e38, 1e38), 2, 3, empty=True),
    "mlflow.library": nothing, "wandb.run": nothing,
    "params": nothing, "evaluate.server": lambda value: value is RESULT, "evaluate.states": lambda value: type(value) is tuple and not value,
    "write_report.folder": nothing, "load_model.path": nothing,
    "from_frame.label": nothing, "from_frame.owner": nothing,
    **dict.fromkeys([f"from_huggingface.{name}" for name in ("owner", "input", "label")], lambda value: text(value) and value in STORED),
    "by_owner.test_owner": each(whole(-(2**63)), 1, empty=True), "by_sizes.labels": each(either(boolean, inside(-INF, INF)), 1, 2, 3, empty=True),
    **dict.fromkeys(["label_share.test_labels", "matching.test_labels"], each(whole(0), 1, empty=True)),
    "plan.noise_multiplier": nothing, "write_report.columns": either(no_names, columns),
    "AdaptiveClip.clip": positive, "Skellam.clip": positive, "Skellam.noise_multiplier": each(positive, 0, 1),
    "Skellam.client_noise": zeros, "TrimmedMean.share": inside(0, 0.5, 0), "Release.low": positive,
    **{f"{rule}.{noise}": zeros for rule in ROBUST for noise in ("noise_multiplier", "client_noise")},
}  # fmt: skip
"""By argument, or by function and argument, what it may take, where its check does not say it."""

REFUSED: dict[str, list[Any]] = {
    **{f"grid.{name}": [{1.0}, "01", b"01", [], [NAN], [1j], np.ones((2, 2)), lambda: 1] for name in ("rate", "clip")},
    "sparse_layers": [99],
    "delta": [1.0],
    "head": [()],
    "build.name": ["", "none", "Mlp", "../mlp"],
    "write_report.folder": ["/", "no/such/folder"], "load_model.path": ["/", "no/such/file"],
    "from_huggingface.train": ["none"], "mlflow.library": ["run"], "wandb.run": ["run"], "risks": ["public"],
    "from_arrays.owner": [TEXT], "from_arrays.test_owner": [TEXT], "from_lists.users": [TEXT],
    "from_arrays.test_inputs": [np.zeros((4, 0, 2)), np.zeros((4, 2), np.int64)],
    "from_arrays.train_inputs": [np.zeros((4, 2), np.int64)],
    "terms": [(1e-5, None, None)],
    "compare.seeds": [[100]],
    **{f"from_arrays.{part}_labels": NO_LABELS for part in ("train", "test")},
    "features.data": [
        *map(of_pictures, [np.zeros((4, 2)), np.zeros((4, 2, 2, 5)), np.full((4, 2, 2), 1.5), np.zeros((4, 2, 2), int)])
    ],
    "by_sizes.sizes": [[99, 99]],
    "lenet.input_shape": [(4, 4, 1), (7, 7, 1)], "lenet_groupnorm.input_shape": [(4, 4, 1), (7, 7, 1)],
    "plot_costs.metric": ["none"],
    "rows": [[-1], [99], [0.5], [[0]]],
    "plan.epsilon": [None],
    "params": [{"head": np.zeros(3)}], "evaluate.server": [{"params": np.zeros(3)}], "evaluate.states": [[], {"params": np.zeros(3)}],
}  # fmt: skip
"""By argument, or by function and argument, what must be refused besides."""

TAKEN: dict[str, list[Any]] = {
    "from_arrays.train_labels": [], "from_arrays.test_labels": [], "from_flax.input_shape": [], "from_nnx.input_shape": [],
    "dp_pfeddsu.sparse_layers": [1], "dp_pfeddsu_paper.sparse_layers": [1],
    "BandedNoise.client_noise": [0], "BLTNoise.client_noise": [0], "Extrapolated.client_noise": [0],
    "dp_fedavg_mixed.smoothing": [*[None] * 7, *of_positive(zero=True).good],  # either, or a penalty
    "load_model.client": [], "by_owner.least": ONES,
    "CyclicPoisson.groups": ONES, "plan.cohort": ONES,
    "TrimmedMean.share": [0, np.float32(0.25)], "plan.noise_multiplier": [], "personal_budgets.base": [3],
    "Skellam.noise_multiplier": [np.float32(2.0), np.array(2.0)], "Skellam.client_noise": [0],
    "Release.low": [np.float32(0.25), jnp.float32(0.25), np.array(0.25), fractions.Fraction(1, 4)],
    **{f"{rule}.{noise}": [0] for rule in ROBUST for noise in ("noise_multiplier", "client_noise")},
}  # fmt: skip
"""By function and argument, what must be taken, where it is less than what the check says."""

RECORDS = {
    "Algorithm", "Candidate", "ClientData", "Clients", "ColumnEncoding", "Comparison", "Dataset", "Encoder", "Ledger",
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
        if check.func is check_optional:
            return kind_of(check.keywords["check"])
        options = check.keywords | options
        check = check.func
    assert check.__name__ in KINDS, f"KINDS must say what arguments with {check.__name__} take"
    return KINDS[check.__name__](**options)


def of(table: dict[str, Any], name: str, argument: str, default: Any) -> Any:
    """Return what a table says of a function's argument."""
    return table.get(f"{name}.{argument}", table.get(argument, default))


@functools.cache
def arguments(name: str) -> dict[str, Kind]:
    """Return what each argument of a function takes. `bad` has all that it must refuse."""
    function: Any = FUNCTIONS[name]
    call = function.__init__ if isinstance(function, type) else function
    checks = call.argument_checks() if hasattr(call, "argument_checks") else {}
    parameters = inspect.signature(function).parameters.values()
    defaults = {own.name: own.default for own in parameters if own.kind is not own.VAR_KEYWORD}
    values = VALUES | ROWS.get(name, {})
    kinds = {}
    for argument in defaults | checks | ROWS.get(name, {}):
        check = checks.get(argument, unchecked)
        kind = kind_of(check)
        takes = of(TAKES, name, argument, kind.takes)
        # Arguments of a `TypedDict` have no default in the signature, but all of them may be left out.
        default = defaults.get(argument, OMITTED)
        works = kind.works if default is inspect.Parameter.empty else OMITTED
        works = values.get(argument, works)
        assert works is not MISSING, f"ROWS must give {name} a value of {argument} that works"
        optional = default is None or getattr(check, "func", None) is check_optional
        bad = [*kind.bad, *of(REFUSED, name, argument, [])]
        bad += [value for value in POOL if not (takes(value) or (optional and value is None))]
        assert bad, f"TAKES must say what {name} takes of {argument}, which has no check"
        good = TAKEN.get(f"{name}.{argument}", kind.good)
        kinds[argument] = kind._replace(works=works, takes=takes, good=good, bad=bad)
    return kinds


def call(name: str, /, **changes: Any) -> Any:
    """Call a public function with arguments that work, but for these."""
    works = {argument: kind.works for argument, kind in arguments(name).items()} | changes
    return FUNCTIONS[name](
        **{argument: value for argument, value in works.items() if value is not OMITTED}
    )
