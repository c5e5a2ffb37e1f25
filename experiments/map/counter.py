"""A counter-run: further settings of methods that lose on the map, tuned as they are there."""

import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.map import tuning
from experiments.map.methods import (
    Family,
    corrected,
    networks,
    only_participants,
    plain,
    scored,
    stopped,
)
from experiments.map.places import EPSILONS, PLACES, SEEDS, Place, dataset
from experiments.study import Options, Result, part
from jaxfl import LocalSGD, algorithms, spread
from jaxfl.models import mlp
from jaxfl.privacy import Full, Poisson
from jaxfl.types import Algorithm, Model

RESULTS = pathlib.Path(__file__).with_name("results")
CHOSEN = ("cifar10_pretrained_permuted_1000", "cifar10_pretrained_5_classes_100")
"""Places of the counter-run."""
_TUNED = {"tuning": [{"evaluation": 0, "chosen": {"rate": 0.1}}]}
_ALONE: Result = {"local-only": _TUNED, "linear local-only": _TUNED}
"""How clients train alone, for trials at a place without a result."""

TESTED = 2
"""Number of the best settings at an epsilon, on validation examples, that are mixed and tested."""

CORRECTED = ("corrected", "fine_tuned_corrected")
BARE = ("plain", "fine_tuned")
CLUSTERS = {"rate": (0.1, 0.8), "clip": (0.15, 2.0), "tuning": (0.005, 0.1)}
HEADS = {"rate": (0.5, 6.0), "clip": (0.2, 2.0), "personal": (0.4, 4.0), "tuning": (0.01, 0.2)}
CLIP = {"clip": (0.1, 2.0)}
RATE = CLIP | {"rate": (0.02, 0.3)}
RIDGE = {"ridge": (0.1, 30.0), "personal": (0.1, 10.0)}


class Setting(NamedTuple):
    """A method with the ranges of its numbers, and how clients are evaluated after the rounds."""

    method: Callable[..., Algorithm]
    """Function from numbers to the algorithm. `tuning`, the rate of fine-tuning, is left out."""
    ranges: Mapping[str, tuple[float, float]]
    """Smallest and largest value of each number that tuning varies."""
    fixed: Mapping[str, float] = {}
    """Numbers that stay the same."""
    ways: tuple[str, ...] = CORRECTED
    """Ways of evaluation."""
    rounds: int = 50
    passes: int = 5
    """Passes of fine-tuning."""
    points: int = 4
    parts: tuple[str, ...] | None = None
    """Layers that are fine-tuned. None stands for all."""


def seeing(model: Model, factor: Any) -> Model:
    """Return a model whose inputs are multiplied by one factor, or each by a factor of its own."""
    assert model.extract is not None
    extract = model.extract
    return model._replace(
        apply=lambda params, x, *key: model.apply(params, x * factor, *key),
        extract=lambda params, x: extract(params, x * factor),
        sum_grad_squared=None,
        ghost_norms=None,
        recipe=None,
    )


def settings_of(place: Place, model: Model, linear: Model) -> dict[str, Setting]:
    """Return the settings that are tried at a place, by name.

    Args:
        place: Place on the map.
        model: The perceptron.
        linear: The linear model.
    """
    assert linear.input_shape is not None
    width = linear.input_shape[0]
    zero = linear._replace(init=lambda key: jax.tree.map(jnp.zeros_like, linear.init(key)))
    wide = {units: mlp((width,), hidden=(units,)) for units in (16, 64, 128, 512)}
    first = jnp.arange(width) < 64

    def local(rate: float, passes: int = 1) -> LocalSGD:
        return LocalSGD(optax.sgd(rate), place.batch_size, passes)

    def of(method: Any, model: Model, share: float = 1.0, *, passes: int = 1, **more: Any) -> Any:
        """Return the builder of a method, with an expected share of the clients in a round."""
        sampling = Full() if share == 1 else Poisson(share)

        def build(rate: float, head: float | None = None, **numbers: float) -> Algorithm:
            options = {} if head is None else {"head": local(head, 5)}
            options |= {"local": local(rate, passes), "sampling": sampling, **more}
            return method(model, **options, **numbers)

        return build

    def balanced(model: Model, server: float | None = None, **options: Any) -> Algorithm:
        """Return DP-FedAvg whose clients add logarithms of class shares to logits in rounds."""
        optimizer = optax.sgd(1.0) if server is None else optax.adam(server, b2=0.99)
        base = algorithms.dp_fedavg(model, server_optimizer=optimizer, **options)
        through = algorithms.prior_corrected(base, smoothing=0.0, train=True)
        return base._replace(client_update=through.client_update)

    def on_first(model: Model, **options: Any) -> Algorithm:
        """Return balanced DP-FedAvg that learns weights of only the first 64 features."""
        base = balanced(seeing(model, first), **options)

        def step(server: Any, aggregate: Any) -> Any:
            head = aggregate["head"]
            kernel = jnp.where(first[:, None], head["kernel"], 0)
            return base.server_update(server, {"head": head | {"kernel": kernel}})

        return base._replace(model=model, server_update=step)

    def ifca(model: Model, clusters: int, **options: Any) -> Algorithm:
        """Return IFCA whose server takes steps as large as with four clusters."""
        step = optax.sgd(4 / clusters)
        return algorithms.ifca(model, clusters=clusters, server_optimizer=step, **options)

    def ppsgd(model: Model, share: float) -> Any:
        """Return the builder of PPSGD, with an expected share of the clients in a round."""
        given = {
            "batch_size": 50,
            "loss": None,
            "sampling": Full() if share == 1 else Poisson(share),
        }
        return lambda rate, personal, **numbers: algorithms.ppsgd(
            model, server_learning_rate=rate, personal_learning_rate=personal, **given, **numbers
        )

    def ridge(model: Model) -> Any:
        return functools.partial(algorithms.dp_ridge, seeing(model, 0.1))

    def of_one(model: Model) -> Any:
        return lambda rate: algorithms.local_only(model, local=local(rate))

    if place.skew == "permuted":
        heads: dict[str, Any] = {
            "ranges": {"rate": (1.0, 6.0), "clip": (0.3, 3.0)},
            "ways": ("fine_tuned",),
        }
        heads |= {"fixed": {"personal": 2.0, "tuning": 0.17}, "parts": model.head}
        few = {"rate": (0.1, 0.6), "clip": (0.2, 2.0)}
        return {
            "linear IFCA, 8 clusters": Setting(
                of(ifca, linear, 0.1, clusters=8), CLUSTERS, ways=BARE, points=8
            ),
            "linear PPSGD": Setting(ppsgd(linear, 0.1), HEADS, ways=BARE),
            "linear IFCA, 16 clusters": Setting(
                of(ifca, linear, 0.1, clusters=16), few, {"tuning": 0.05}, BARE
            ),
            "PPSGD, 50% of clients": Setting(ppsgd(model, 0.5), **heads),
            "CENTAUR, 30% of clients, 20 rounds": Setting(
                of(algorithms.centaur, model, 0.3), few, {"head": 0.03}, ("plain",), 20, points=3
            ),
            "CENTAUR, 30% of clients, 20 rounds, 16 units": Setting(
                of(algorithms.centaur, wide[16], 0.3), few, {"head": 0.03}, ("plain",), 20, points=3
            ),
            "FedRoD, 30% of clients, 15 rounds": Setting(
                of(algorithms.fedrod, model, 0.3), few, {"tuning": 0.05}, BARE[1:], 15, points=3
            ),
            "PPSGD, 128 units": Setting(ppsgd(wide[128], 0.1), points=3, **heads),
            "linear PPSGD, 20% of clients": Setting(
                ppsgd(linear, 0.2), points=3, **heads | {"parts": None}
            ),
            "PPSGD, 100 rounds": Setting(ppsgd(model, 0.1), rounds=100, points=3, **heads),
        }
    fine: dict[str, Any] = {"ranges": CLIP | {"tuning": (0.005, 0.15)}, "fixed": {"rate": 0.1}}
    cheap = fine | {"ways": CORRECTED[1:], "points": 3, "rounds": 10}
    return {
        "alone, linear, from zero": Setting(of_one(zero), {"rate": (0.003, 0.1)}, rounds=40),
        "alone, 128 units": Setting(
            of_one(wide[128]), {"rate": (0.002, 0.03)}, rounds=20, points=3
        ),
        "linear DP-FedAvg, balanced, from zero, all clients, 10 rounds": Setting(
            of(balanced, zero), rounds=10, passes=10, **fine
        ),
        "the same, on 64 features": Setting(of(on_first, zero), **cheap),
        "DP ridge, inputs of norm 1": Setting(
            ridge(linear), RIDGE, {"clip": 0.5}, CORRECTED[:1], 1, points=3
        ),
        "DP ridge, 512 random units": Setting(
            ridge(wide[512]), RIDGE, {"clip": 0.5}, CORRECTED[:1], 1, points=3
        ),
        "CENTAUR, 64 units, all clients, 10 rounds": Setting(
            of(algorithms.centaur, wide[64]), RATE, {"head": 0.02}, ("plain",), 10, points=3
        ),
        "linear FedRoD, from zero, all clients, 10 rounds": Setting(
            of(algorithms.fedrod, zero), **cheap
        ),
        "linear DP-FedAvg, balanced, from zero": Setting(
            of(balanced, zero, 0.2), **cheap | {"rounds": 50}
        ),
        "linear MR-MTL, from zero, all clients, 10 rounds": Setting(
            of(algorithms.pmtl, zero, passes=2),
            CLIP | {"penalty_weight": (0.03, 1.0)},
            {"rate": 0.03, "tuning": 0.01},
            CORRECTED[1:],
            10,
            points=3,
        ),
        "linear DP-FedAvg, balanced, from zero, Adam": Setting(
            of(balanced, zero, 0.2),
            {"server": (0.003, 0.1), "clip": (0.03, 1.0)},
            {"rate": 0.1, "tuning": 0.03},
            CORRECTED[1:],
            points=3,
        ),
        "DP-FedAvg, balanced, 64 units, all clients, 10 rounds": Setting(
            of(balanced, wide[64]), **cheap
        ),
    }


def family_of(setting: Setting, place: Place, known: Mapping[str, Any]) -> Family:
    """Return a setting as a family of the map, which the map's protocol tunes.

    Args:
        setting: The setting.
        place: Place on the map.
        known: The `methods` of the place's result, for how clients train alone.
    """

    def build(*, mix: str | None = None, **numbers: Any) -> Algorithm:
        numbers = {**setting.fixed, **numbers}
        rate = numbers.pop("tuning", 0.0)
        base = setting.method(**numbers)
        if not private:
            return scored(base, {"plain": plain})
        base = only_participants(base, place.participants)
        local = LocalSGD(optax.sgd(rate), place.batch_size, setting.passes)
        again = functools.partial(algorithms.fine_tuned, local=local, parts=setting.parts)
        ways = {"plain": plain, "corrected": corrected, "fine_tuned": again}
        ways["fine_tuned_corrected"] = lambda base: again(corrected(base))
        if mix is None:
            return scored(base, {way: ways[way] for way in setting.ways})
        linear = base.model.head == base.model.layers
        alone = stopped(known["linear local-only" if linear else "local-only"], place)
        own = LocalSGD(optax.sgd(alone.rate), place.batch_size, alone.passes)
        mixture = functools.partial(algorithms.mixed, local=own)
        return scored(base, {}, {f"mixed_{mix}": lambda base: mixture(ways[mix](base))})

    points = spread(setting.points, **setting.ranges)
    private = list(points) != ["rate"]
    mixtures = {way: functools.partial(build, mix=way) for way in setting.ways}
    return Family(build, points, setting.rounds, private, mixtures=mixtures)


def tested(
    family: Family, place: Place, row: Mapping[str, Any], seeds: Sequence[int]
) -> dict[str, Any]:
    """Run a chosen point on the final seeds, and return its `rows`.

    Args:
        family: The setting as a family.
        place: Place on the map.
        row: Row of the tuning with the chosen point and way.
        seeds: The final seeds.
    """
    way = row["way"].removeprefix("mixed_")
    if way != row["way"]:
        family = family._replace(build=family.mixtures[way])
    point = tuning.as_point(row["chosen"], row["epsilon"])
    choices = {(row["way"], row["epsilon"]): (point, row["evaluation"])}
    return {"rows": tuning.final_rows(family, place, choices, seeds)}


def run_all(options: Options) -> Result:
    """Tune the settings of each place, mix the best, and test the best on the map's seeds.

    A trial (`options.smoke`) has one small place, one setting, and the seeds of the options.

    Returns:
        The `seeds`, and the result of `run` by name of the place (`places`).
    """
    if options.smoke:
        place = PLACES[0]._replace(
            data="digits", seen="pixels", clients=40, rounds=3, passes=3, test=10
        )
        of_one = functools.partial(run, place, options, seeds=options.seeds, settings=1)
        return {"seeds": list(options.seeds), "places": {place.name: of_one()}}
    chosen = [place for place in PLACES if place.name in CHOSEN]
    places = {place.name: run(place, options) for place in chosen}
    return {"seeds": list(SEEDS), "places": places}


def run(
    place: Place, options: Options, seeds: Sequence[int] = SEEDS, settings: int | None = None
) -> Result:
    """Return what was tried at a place, and the final scores of the best.

    Args:
        place: The place.
        options: Options of the study.
        seeds: Seeds of the final runs.
        settings: Number of the first settings that are tried. None stands for all.

    Returns:
        The place's `title`, the rows of the tuning by setting (`tried`), a row for each final run
        (`tested`), and `seconds` of tuning.
    """
    data = dataset(place)
    networks_of_place = networks(place, data.train_inputs.shape[1:], data.classes)
    path = RESULTS / f"{place.name}.json"
    committed = json.loads(path.read_text()) if path.exists() else {"methods": _ALONE}
    known = [*settings_of(place, *networks_of_place).items()][:settings]
    families = {name: family_of(setting, place, committed["methods"]) for name, setting in known}

    def kept(name: str, facts: Mapping[str, Any], make: Callable[[], Any]) -> Result:
        """Return a part of the result, which is made now or was stored before."""
        done = part("map", "counter", f"{place.name} {name}", facts, make, options)
        for row in done.get("tuning", []):
            print(f"{row['validation']:.4f} {row['epsilon']:g} {name}: {row['way']}", flush=True)
        return done

    tried: dict[str, list[dict[str, Any]]] = {}
    seconds = 0.0
    for name, setting in known:
        family = families[name]
        facts = {"points": family.points, "rounds": family.rounds}
        facts |= {"fixed": setting.fixed} if setting.fixed else {}
        done = kept(name, facts, functools.partial(tuning.study, family, place, EPSILONS, ()))
        tried[name] = done["tuning"]
        seconds += done["seconds"]

    def leading(epsilon: float) -> list[tuple[str, dict[str, Any]]]:
        """Return the `TESTED` best settings at an epsilon, each with the row of its best way."""
        found = [(name, row) for name in tried for row in tried[name] if row["epsilon"] == epsilon]
        found.sort(key=lambda one: -one[1]["validation"])
        first = {name: (name, row) for name, row in reversed(found)}
        return sorted(first.values(), key=lambda one: -one[1]["validation"])[:TESTED]

    for name in sorted({name for epsilon in EPSILONS for name, _ in leading(epsilon)}):
        mix = functools.partial(tuning.mixtures, families[name], place, tried[name], (), EPSILONS)
        done = kept(f"{name}, mixed", {"tuning": tried[name]}, mix)
        tried[f"{name}, mixed"] = done["tuning"]
        seconds += done["seconds"]
    rows = []
    for epsilon in (*EPSILONS, math.inf):
        for name, row in leading(epsilon):
            family = families[name.removesuffix(", mixed")]
            make = functools.partial(tested, family, place, row, seeds)
            done = kept(f"{name} at {epsilon:g}, tested", {"row": row}, make)
            rows += [one | {"method": name} for one in done["rows"]]
    return {"title": place.title, "tried": tried, "tested": rows, "seconds": seconds}
