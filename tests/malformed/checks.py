"""Values that arguments accept, by the name of their check.

Each check is written once more here as a predicate, so that tests can compare the two.
"""

import fractions
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxfl
from jaxfl import algorithms, data, privacy
from jaxfl._support.checks import check_optional, plain
from jaxfl.algorithms.pdp_fl import Budgets
from jaxfl.privacy import Mechanism
from malformed import pool
from malformed.pool import INF, NAN

MISSING = object()
"""Mark of a kind without a value that works. `functions.ROWS` or `VALUES` must give a value."""


class Kind(NamedTuple):
    """Values that arguments with one check accept."""

    works: Any
    """A value that works."""
    takes: Callable[[Any], bool]
    """Predicate that says whether the argument may accept a value of the pool."""
    good: Sequence[Any] = ()
    """Values that the argument must accept."""
    bad: Sequence[Any] = ()
    """Values that must raise an error, in addition to those of the pool."""


# Predicates.


def real(value: Any) -> bool:
    number = plain(value)
    if type(number) not in (int, float):
        return False
    return -(2**1000) < number < 2**1000 or number in (INF, -INF)


def whole(least: int, most: float = INF) -> Callable[[Any], bool]:
    return lambda value: real(value) and type(plain(value)) is int and least <= value <= most


def inside(low: float, high: float, *ends: float) -> Callable[[Any], bool]:
    """Return a predicate of real numbers in an open interval, or among the `ends`."""
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
    return value is pool.NOTHING


def each(entry: Callable[[Any], bool], *axes: int, empty: bool = False) -> Callable[[Any], bool]:
    """Return a predicate of arrays whose entries all pass, with one of these numbers of axes.

    An array without entries passes only with `empty`.
    """

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
    """Return a predicate of lists and tuples whose entries all pass."""
    return lambda value: isinstance(value, list | tuple) and all(map(entry, value))


def either(*predicates: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(takes(value) for takes in predicates)


def lists(value: Any) -> bool:
    """Return whether a value is a dict from text to lists or tuples."""
    if not isinstance(value, dict) or not all(map(text, value)):
        return False
    return all(isinstance(one, list | tuple) for one in value.values())


def columns(value: Any) -> bool:
    """Return whether a value is a dict from text to lists or tuples of one length."""
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
NO_LABELS = [[-1, 0], [0.5, 1.0], [[0], [1]], [True, False], [0, 1, 0, 2**31 - 1], [0, 1, 0, 2**24]]
NO_KEYS = ["key", jnp.zeros(3), (0, 1), jnp.uint32(0)]
CLASSES = [[0, 1, 0, 1], np.array([0, 1, 0, 1], np.uint8), jnp.array([0, 1, 0, 1])]
NARROW = [
    np.zeros((4, 2), dtype)
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "int64", "uint32", "float16")
]


def of_positive(zero: bool = False, infinite: bool = False) -> Kind:
    ends = [*([0] if zero else []), *([INF] if infinite else [])]
    further = [0, np.float64(0.5), jnp.int32(0)] if zero else []
    return Kind(1.0, inside(0, INF, *ends), [*NUMBERS, *further])


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
    works = next((value for value in pool.BUILT if isinstance(value, kinds)), MISSING)
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
    """Return a function that returns the kind of a check without options."""
    return lambda: Kind(works, takes, good, bad)


KINDS: dict[str, Callable[..., Kind]] = {
    "check_positive": of_positive,
    "check_budget": of_positive,
    "check_count": of_count,
    "check_fraction": of_fraction,
    "_check_rate": of_fraction,
    "check_noise": of_noise,
    "_check_noise": of_noise,
    "_check_multiplier": same(1.0, inside(0, 1e8, 0, 1e8), NUMBERS, [2e8]),
    "check_choice": of_choice,
    "check_instance": of_instance,
    "check_numbers": of_numbers,
    "check_counts": of_counts,
    "check_not_empty": of_not_empty,
    "_steps": of_steps,
    "_check_validation": same(0.5, either(callable, inside(0, 1)), SINGLES, [1.0]),
    "unchecked": same(MISSING, anything),
    "check_callable": same(print, callable),
    "check_layers": same(("head",), no_entries, bad=["layers_3", ("none",), (3,)]),
    "check_path": same("here", lambda value: text(value) and value not in ("", "a\0b")),
    "check_folder": same(
        "here", lambda value: text(value) and value not in ("", "a\0b"), bad=[f"{__file__}/run"]
    ),
    "check_key": same(
        pool.KEY, either(seed, lambda value: isinstance(value, type(pool.KEY))), bad=NO_KEYS
    ),
    "check_one_key": same(pool.KEY, seed, bad=NO_KEYS),
    "check_seeds": same((0,), each(whole(0), 1), bad=[[0, 0]]),
    "check_chunk": same(2, whole(1), bad=["all"]),
    "check_devices": same(jax.devices()[:1], nothing, bad=["cpu", ["cpu"]]),
    "check_callbacks": same((), either(no_entries, entries(callable)), bad=[["f"]]),
    # Arrays.
    "check_array": same([0], each(real, 1, 2, 3, empty=True)),
    "check_arrays": same(pool.LISTS, entries(vector)),
    "check_labels": same(pool.LABELS, each(whole(0), 1), CLASSES),
    "check_targets": same(
        pool.LABELS,
        each(either(boolean, inside(-INF, INF)), 1, 2, 3),
        [[0, 1, 0, 1], [0.5, 1.0, -1.0, 0.0], jnp.array([[0.0], [1.0], [2.0], [-3.0]])],
        [[-1, 0], [[], []]],
    ),
    "check_owners": same(
        pool.LABELS,
        either(each(whole(-(2**63), 2**64), 1), each(text, 1)),
        [[2**40, -1, 2**63, 0], np.array([1, 2**63, 0, 0], np.uint64)],
        [["a", 1], [None, "a"]],
    ),
    "check_inputs": same(pool.INPUTS, each(inside(-1e38, 1e38), 2, 3), NARROW),
    "_check_pixels": same(
        pool.INPUTS, each(inside(-1e38, 1e38), 2, 3), bad=[np.zeros((4, 2), np.int64)]
    ),
    "_check_shape": same((8, 8, 1), lambda value: shape(value) and len(value) == 3, FORMS),
    "_check_vector_or_shape": same((8, 8, 1), lambda value: shape(value) and len(value) in (1, 3)),
    "_check_coefficients": same((1.0, 0.5), each(inside(0, INF, 0), 1)),
    "_check_tuple": same((0.5,), each(inside(0, INF, 0), 1), bad=[[0.5, 0.5]]),
    "_check_decays": same((0.5,), each(inside(0, 1, 0), 1), bad=[[0.5, 0.5]]),
    "_check_densities": same(
        [0.5, 0.0],
        each(inside(0, 1, 0, 1), 1, 2, 3),
        bad=[[-0.1, 0.5], [NAN, 0.0], ["a", 0.0], [0.5]],
    ),
    "_check_epsilons": same((1.0,), each(inside(0, INF, INF), 1), bad=[8.0, [1.0, 1.0]]),
    "_impacts": same(
        [0.5, 0.5],
        either(callable, each(inside(0, INF, 0), 1, 2)),
        bad=[[-1.0, 2.0], [0.5, 0.6], lambda t: "a"],
    ),
    "_check_risks": same([1.0], each(positive, 1)),
    "_check_bounds": same(
        (1.0, 2.0),
        nothing,
        bad=[(1.0,), (2.0, 1.0), (0.0, 1.0), (1.0, INF), (NAN, 1.0), ("a", "b")],
    ),
    "_check_percentile": same(50.0, inside(0, 100, 0)),
    "_check_threshold": same(0.5, inside(-INF, 1), bad=[2.0]),
    "_check_rates": same(0.5, each(share, 0, 1)),
    "check_availability": same(0.8, each(share, 0, 1), [1, *SINGLES]),
    "_check_staleness": same(
        1, each(whole(0), 0, 1), [0, np.int64(2), jnp.int32(2), np.array([0, 2])]
    ),
    "_check_speed": same(1.0, each(inside(0, INF, INF), 0, 1), [1, INF, *SINGLES[:2], [1.0, INF]]),
    # Names.
    "_check_texts": same([], either(no_entries, entries(text)), bad=["to be", ["a", None]]),
    "_check_kinds": same(("poisson", "separated"), no_entries, bad=[("none",), ()]),
    "_check_vocabulary": same(
        None, either(each(text, 1), text), bad=["", [1], ["a", "a"], pool.TEXT]
    ),
    "_check_input_names": same(None, nothing, bad=["age", [3]]),
    # Objects of the library and of data.
    "check_clients": same(pool.CLIENTS, nothing),
    "_clients_in_lists": same(pool.FEW, nothing),
    "_check_population": same(pool.CLIENTS, either(whole(1), callable)),
    "check_methods": same(
        {"one": jaxfl.Candidate(lambda: pool.METHOD)},
        nothing,
        bad=[{"a": algorithms.fedavg}, {1: 2}],
    ),
    "check_values": same(
        {"mu": [0.1, 0.2]},
        columns,
        bad=[
            "clip",
            {3: [1.0, 2.0]},
            {"mu": 3},
            {"mu": ["a", "b"]},
            {"mu": [NAN, 1.0]},
            {"mu": None},
        ],
    ),
    "check_ledger": same(pool.LEDGER, lambda value: value is pool.LEDGER),
    "_check_statement": same(
        privacy.privacy_statement(pool.LEDGER, pool.MECHANISM, 2), nothing, bad=[{"honest": 1}]
    ),
    "check_data": same(
        (pool.INPUTS, pool.LABELS, pool.INPUTS, pool.LABELS), dataset, bad=[(np.zeros((4, 2)),)]
    ),
    "_check_tested": same(pool.CLIENTS, dataset),
    "_check_nnx": same(lambda rngs: nnx.Linear(4, 10, rngs=rngs), callable, bad=[print, nn.Dense]),
    "_check_budgets": same(
        Budgets(np.full(2, INF), np.ones(2)),
        nothing,
        bad=[
            (1.0,),
            Budgets(np.zeros(2), np.ones(2)),
            Budgets(np.ones(2), np.ones(3)),
            Budgets(np.array([NAN]), np.ones(1)),
            Budgets(np.ones(1), np.array([INF])),
            Budgets(pool.TEXT, np.ones(1)),
        ],
    ),
    "_check_plans": same(pool.PLANS, nothing, bad=["plan", [pool.MODEL]]),
    "_check_result": same(pool.COSTED, nothing),
    "_check_costs": same({"fedavg": pool.COSTS}, nothing, bad=[pool.COSTS, {"a": 3}, {"a": [3]}]),
    "_check_mechanisms": same(
        {}, no_names, bad=["mine", {"mine": 3}, {3: Mechanism()}, {"poisson": Mechanism()}]
    ),
    "_check_encoding": same(
        data.from_frame(pool.FRAME, label="sick").encoding, entries(nothing), bad=[(), [{}]]
    ),
    "_check_frame": same(pool.FRAME, columns, bad=[{"a": 3}, {"a": []}]),
    "_check_splits": same({"train": pool.STORED}, nothing, bad=[{"train": 3}]),
    "_check_token_lists": same(
        [[1, 2]] * 4,
        entries(vector),
        bad=[[], [[0.5]] * 4, [[-1]] * 4, [["a"]] * 4, [[[1]]] * 4, [[1, 2]] * 3],
    ),
    "_check_client_columns": same(
        None,
        no_names,
        bad=["age", [], {"age": 3}, {"age": "x"}, {"age": [None]}, {"age": [[1]]}, {3: [0]}],
    ),
    "_check_test": same(None, inside(0, 1), bad=[2, {"a": 3}]),
    "_check_limits": same(
        None,
        no_names,
        bad=["age", ["age"], {"age": 3}, {3: (0, 1)}, {"age": (1, 0)}, {"age": (0, INF)}],
    ),
    "_check_categories": same(
        None, lists, bad=["age", ["age"], {"age": 3}, {3: [0]}, {"age": []}, {"age": [1, 1]}]
    ),
}
"""Functions from the options of a check to the kind of its arguments, by the check's name."""


def kind_of(check: Callable) -> Kind:
    """Return the kind of arguments that have a check, which may be a partial with options.

    The kind of an optional check is that of the check inside, without None.
    """
    options: dict[str, Any] = {}
    while isinstance(check, functools.partial):
        if check.func is check_optional:
            return kind_of(check.keywords["check"])
        options = check.keywords | options
        check = check.func
    assert check.__name__ in KINDS, f"KINDS must say what arguments with {check.__name__} take"
    return KINDS[check.__name__](**options)
