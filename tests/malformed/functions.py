"""Every public function with arguments that work, and with values that must raise an error.

Both follow from the checks of the arguments (`checked`). `malformed.checks` says which values of
`malformed.pool` a check may accept. All other values must raise an error. The tables below add only
what the checks do not say.
"""

import fractions
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import jaxfl
from jaxfl import algorithms, callbacks, data, models, privacy
from jaxfl._support.checks import check_optional, unchecked
from jaxfl.privacy.mechanisms.robust import Robust
from malformed import pool
from malformed.checks import (
    MISSING,
    NO_LABELS,
    Kind,
    anything,
    boolean,
    columns,
    each,
    either,
    entries,
    inside,
    kind_of,
    no_names,
    nothing,
    of_positive,
    positive,
    real,
    text,
    whole,
    zeros,
)
from malformed.pool import INF, NAN

OMITTED = object()
"""Stands for an argument that is left out, so that its default holds."""

ONES = [np.int64(1), np.uint8(1), jnp.int32(1), np.array(1)]
ROBUST = [rule.__name__ for rule in Robust.__subclasses__()]

VALUES: dict[str, Any] = {
    "accountant": "rdp",
    "clip": 1.0,
    "noise_multiplier": 1.0,
    "progress": False,
    "params": pool.MODEL.init(pool.KEY),
}
"""A value that works for each argument, instead of the default or of the value of its check."""

ROWS: dict[str, dict[str, Any]] = {
    "sweep": {"build": functools.partial(algorithms.fedprox, pool.MODEL)},
    "compare": {"epsilons": (1.0,), "seeds": (0,), "rounds": 1},
    "grid": {"rate": [0.1, 0.2], "clip": [1.0]},
    "spread": {"rate": (0.1, 0.2)},
    "mlflow": {"library": pool.LOGGED},
    "wandb": {"run": pool.LOGGED},
    "evaluate": {"server": pool.RESULT.server, "key": pool.KEY, "rounds": 1},
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
    "plan": {
        "clients": 4,
        "epsilon": 2.0,
        "noise_multiplier": None,
        "kinds": ("poisson", "separated"),
    },
    "most_rounds": {"epsilon": 2.0, "noise_multiplier": 2.0, "clients": 10, "most": 4},
    "largest_cohort": {"epsilon": 2.0, "noise_multiplier": 2.0, "clients": 4},
    "Release": {"low": 0.25, "high": 2.0, "noise": 1.0},
    "write_report": {"folder": pool.HERE},
    "plot_costs": {"path": pool.HERE / "costs.png"},
    "write_plan": {"path": pool.HERE / "plan.html"},
    "load_model": {"path": pool.HERE / "model.safetensors"},
    "from_frame": {"label": "sick"},
    "from_leaf": {"folder": pool.HERE},
    "from_huggingface": {"owner": "who", "input": "x", "label": "y"},
    "build": {"name": "mlp", "input_shape": (8, 8, 1)},
}
"""Values that work by function and argument, where the check has none or another one is needed."""

TAKES: dict[str, Callable[[Any], bool]] = {
    "grid.rate": either(entries(anything), each(real, 1)),
    "grid.clip": either(entries(anything), each(real, 1)),
    "spread.rate": each(inside(0, INF), 1),
    "from_arrays.test_inputs": each(inside(-1e38, 1e38), 2, 3, empty=True),
    "mlflow.library": nothing,
    "wandb.run": nothing,
    "params": nothing,
    "evaluate.server": lambda value: value is pool.RESULT,
    "evaluate.states": lambda value: type(value) is tuple and not value,
    "write_report.folder": nothing,
    "load_model.path": nothing,
    "from_frame.label": nothing,
    "from_frame.owner": nothing,
    **dict.fromkeys(
        [f"from_huggingface.{name}" for name in ("owner", "input", "label")],
        lambda value: text(value) and value in pool.STORED,
    ),
    "by_owner.test_owner": each(whole(-(2**63)), 1, empty=True),
    "by_sizes.labels": each(either(boolean, inside(-INF, INF)), 1, 2, 3, empty=True),
    **dict.fromkeys(
        ["label_share.test_labels", "matching.test_labels"], each(whole(0), 1, empty=True)
    ),
    "plan.noise_multiplier": nothing,
    "write_report.columns": either(no_names, columns),
    "AdaptiveClip.clip": positive,
    "Skellam.clip": positive,
    "Skellam.noise_multiplier": each(positive, 0, 1),
    "Skellam.client_noise": zeros,
    "TrimmedMean.share": inside(0, 0.5, 0),
    "Release.low": positive,
    **{
        f"{rule}.{noise}": zeros
        for rule in ROBUST
        for noise in ("noise_multiplier", "client_noise")
    },
}
"""Predicates of accepted values by argument, or by function and argument.

They replace those of the checks.
"""

REFUSED: dict[str, list[Any]] = {
    **{
        f"grid.{name}": [{1.0}, "01", b"01", [], [NAN], [1j], np.ones((2, 2)), lambda: 1]
        for name in ("rate", "clip")
    },
    "sparse_layers": [99],
    "delta": [1.0],
    "head": [()],
    "build.name": ["", "none", "Mlp", "../mlp"],
    "write_report.folder": ["/", "no/such/folder"],
    "load_model.path": ["/", "no/such/file"],
    "from_huggingface.train": ["none"],
    "mlflow.library": ["run"],
    "wandb.run": ["run"],
    "risks": ["public"],
    "from_arrays.owner": [pool.TEXT],
    "from_arrays.test_owner": [pool.TEXT],
    "from_lists.users": [pool.TEXT],
    "from_arrays.test_inputs": [np.zeros((4, 0, 2)), np.zeros((4, 2), np.int64)],
    "from_arrays.train_inputs": [np.zeros((4, 2), np.int64)],
    "terms": [(1e-5, None, None)],
    "compare.seeds": [[100]],
    **{f"from_arrays.{part}_labels": NO_LABELS for part in ("train", "test")},
    "features.data": [
        *map(
            pool.of_pictures,
            [
                np.zeros((4, 2)),
                np.zeros((4, 2, 2, 5)),
                np.full((4, 2, 2), 1.5),
                np.zeros((4, 2, 2), int),
            ],
        )
    ],
    "by_sizes.sizes": [[99, 99]],
    "lenet.input_shape": [(4, 4, 1), (7, 7, 1)],
    "lenet_groupnorm.input_shape": [(4, 4, 1), (7, 7, 1)],
    "plot_costs.metric": ["none"],
    "rows": [[-1], [99], [0.5], [[0]]],
    "plan.epsilon": [None],
    "params": [{"head": np.zeros(3)}],
    "evaluate.server": [{"params": np.zeros(3)}],
    "evaluate.states": [[], {"params": np.zeros(3)}],
}
"""Further values that must raise an error, by argument, or by function and argument."""

TAKEN: dict[str, list[Any]] = {
    "from_arrays.train_labels": [],
    "from_arrays.test_labels": [],
    "from_flax.input_shape": [],
    "from_nnx.input_shape": [],
    "dp_pfeddsu.sparse_layers": [1],
    "dp_pfeddsu_paper.sparse_layers": [1],
    "BandedNoise.client_noise": [0],
    "BLTNoise.client_noise": [0],
    "Extrapolated.client_noise": [0],
    "dp_fedavg_mixed.smoothing": [
        # A call gets the values of all arguments at one position. The penalty's seven come first,
        # because a method takes a penalty or shares.
        *[None] * 7,
        *of_positive(zero=True).good,
    ],
    "load_model.client": [],
    "by_owner.least": ONES,
    "CyclicPoisson.groups": ONES,
    "plan.cohort": ONES,
    "TrimmedMean.share": [0, np.float32(0.25)],
    "plan.noise_multiplier": [],
    "personal_budgets.base": [3],
    "Skellam.noise_multiplier": [np.float32(2.0), np.array(2.0)],
    "Skellam.client_noise": [0],
    "Release.low": [np.float32(0.25), jnp.float32(0.25), np.array(0.25), fractions.Fraction(1, 4)],
    **{f"{rule}.{noise}": [0] for rule in ROBUST for noise in ("noise_multiplier", "client_noise")},
}
"""Values that an argument must accept, instead of those of the check, by function and argument."""

RECORDS = {
    *("Algorithm", "Candidate", "ClientData", "Clients", "ColumnEncoding", "Comparison", "Dataset"),
    *("Encoder", "Ledger", "Message", "Metric", "Model", "NAMES", "Result", "Sampling", "Task"),
    *("Terms", "TrainedModel"),
}
"""Public names that accept anything, because their contents are checked where they are used."""


def public() -> dict[str, Any]:
    """Return all public values by name, and the checked functions of the methods' modules."""
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


def of(table: dict[str, Any], name: str, argument: str, default: Any) -> Any:
    """Return a table's entry for a function's argument, for any such argument, or `default`."""
    return table.get(f"{name}.{argument}", table.get(argument, default))


@functools.cache
def arguments(name: str) -> dict[str, Kind]:
    """Return the kind of each argument of a function. All values in `bad` must raise an error."""
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
        # Arguments of a `TypedDict` have no default, but all of them may be left out.
        default = defaults.get(argument, OMITTED)
        works = kind.works if default is inspect.Parameter.empty else OMITTED
        works = values.get(argument, works)
        assert works is not MISSING, f"ROWS must give {name} a value of {argument} that works"
        optional = default is None or getattr(check, "func", None) is check_optional
        bad = [*kind.bad, *of(REFUSED, name, argument, [])]
        bad += [value for value in pool.ALL if not (takes(value) or (optional and value is None))]
        assert bad, f"TAKES must say what {name} takes of {argument}, which has no check"
        good = TAKEN.get(f"{name}.{argument}", kind.good)
        kinds[argument] = kind._replace(works=works, takes=takes, good=good, bad=bad)
    return kinds


def call(name: str, /, **changes: Any) -> Any:
    """Call a public function with arguments that work, except for the changed ones."""
    works = {argument: kind.works for argument, kind in arguments(name).items()} | changes
    return FUNCTIONS[name](
        **{argument: value for argument, value in works.items() if value is not OMITTED}
    )
