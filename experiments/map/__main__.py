"""The map: methods at the same honest epsilons for 100 to 10,000 clients, all tuned equally.

python -m experiments.map cifar10_pretrained_5_classes_1000
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common import constant_scores
from experiments.map import counter, tuning
from experiments.map.methods import (
    POINTS,
    Family,
    corrected_average,
    families,
    networks,
    stopped,
    trained_alone,
)
from experiments.map.places import (
    EPSILONS,
    PLACES,
    SEEDS,
    Place,
    clients_of,
    dataset,
    earlier_place,
)
from experiments.map.report import WITHDRAWN, counter_run, draw, markdown, withdrawn
from experiments.study import Options, Result, Study, command, part

MIXED = 3
"""Number of the best families at each epsilon that are mixed with the local model."""

RECIPE = ("linear DP-FedAvg", "scaled linear DP-FedAvg")
"""Families of the recipe. At each epsilon the one that is best on validation examples is mixed."""


def run(place: Place, options: Options) -> Result:
    """Tune every method of a place, run the chosen points, and keep finished methods as parts.

    Returns:
        The described `place`, the `seeds`, the parts by name (`methods`), and the scores of
        constant predictions for each seed (`constant`).
    """
    seeds = SEEDS
    if options.smoke:
        place = place._replace(
            data="digits", seen="pixels", skew="5 classes", clients=40, rounds=3, passes=3
        )
        seeds = options.seeds
    data = dataset(place)
    model, linear = networks(place, data.train_inputs.shape[1:], data.classes)
    epsilons = EPSILONS[:1] if options.smoke else EPSILONS
    arguments = (place, epsilons, seeds)
    facts = place._asdict() | {"epsilons": epsilons, "seeds": seeds}

    def studied(name: str, family: Family) -> Result:
        make = functools.partial(tuning.study, family, *arguments)
        return _kept(place.name, name, facts=facts | facts_of(family), make=make, options=options)

    parts = {}
    for name, network in (("local-only", model), ("linear local-only", linear)):
        parts[name] = studied(name, trained_alone(place, network))
    alone = {
        "perceptron": stopped(parts["local-only"], place),
        "linear": stopped(parts["linear local-only"], place),
    }
    known = families(place, model, linear, alone)
    if options.smoke:
        known = {name: known[name] for name in RECIPE}
    for name, family in known.items():
        parts[name] = studied(name, family)
    for name in mixed_families({name: parts[name] for name in known}, epsilons):
        tuned = parts[name]["tuning"]
        make = functools.partial(tuning.mixtures, known[name], place, tuned, seeds, epsilons)
        ways = list(known[name].mixtures)
        of_mixture = facts | {"tuning": tuned, "alone": alone, "ways": ways}
        parts[f"{name}, mixed"] = _kept(
            place.name, f"{name}, mixed", facts=of_mixture, make=make, options=options
        )
    described = place._asdict() | {"title": place.title, "participants": place.participants}
    constant = [constant_scores(clients_of(place, seed), place.participants) for seed in seeds]
    of_all, of_own = zip(*constant, strict=True)
    return {
        "place": described,
        "seeds": list(seeds),
        "methods": parts,
        "constant": {"all": list(of_all), "own": list(of_own)},
    }


def run_withdrawn(options: Options) -> Result:
    """Measure plain and corrected DP-FedAvg at the places of an earlier map.

    Returns:
        The `seeds`, and the results by name of the place (`places`), with those of the earlier map.
    """
    seeds = options.seeds if options.smoke else SEEDS
    epsilons = EPSILONS[:1] if options.smoke else EPSILONS
    earlier = json.loads(WITHDRAWN.read_text())
    rows = {}
    for name, known in earlier.items():
        place = earlier_place(name)
        if options.smoke:
            place = place._replace(
                data="digits", seen="pixels", skew="5 classes", clients=40, rounds=3
            )
        data = dataset(place)
        model, _ = networks(place, data.train_inputs.shape[1:], data.classes)
        facts = place._asdict() | {"epsilons": epsilons, "seeds": seeds, "points": POINTS}
        make = functools.partial(
            tuning.study, corrected_average(place, model), place, epsilons, seeds
        )
        own = _kept("withdrawn", name, facts=facts, make=make, options=options)
        rows[name] = {"title": place.title, "earlier": known} | own
        dataset.cache_clear()
        if options.smoke:
            break
    return {"seeds": list(seeds), "places": rows}


def facts_of(family: Family) -> dict[str, Any]:
    """Return the settings of a family on which its results depend, in addition to the place's."""
    return {"grid": family.points, "ways": tuning.family_ways(family), "rounds": family.rounds}


def _kept(
    place: str, name: str, *, facts: Mapping[str, Any], make: Any, options: Options
) -> dict[str, Any]:
    """Return a method's `tuning`, `rows` and `seconds`, made now or stored before."""
    done = part("map", place, name, dict(facts) | {"method": name}, make, options)
    print(name, done["seconds"], "s", flush=True)
    return {field: done[field] for field in ("tuning", "rows", "seconds")}


def mixed_families(parts: Mapping[str, Mapping[str, Any]], epsilons: Sequence[float]) -> list[str]:
    """Return the names of families that are mixed: the best ones on validation, and the recipe's.

    At each epsilon they are the best `MIXED` families, and the better family of the recipe.
    """
    names = set()
    for epsilon in epsilons:
        best = {
            name: max(row["validation"] for row in part["tuning"] if row["epsilon"] == epsilon)
            for name, part in parts.items()
        }
        names |= set(sorted(best, key=lambda name: -best[name])[:MIXED])
        names.add(max(RECIPE, key=lambda name: best[name]))
    return [name for name in parts if name in names]


MINUTES = {"insteval": 240.0, "shakespeare": 170.0}
"""Expected minutes of a place on one core, by the name of its data. Others take 45 to 220."""

STUDIES = {
    place.name: Study(
        functools.partial(run, place), markdown, draw, minutes=MINUTES.get(place.data, 100.0)
    )
    for place in PLACES
}
STUDIES["counter"] = Study(counter.run_all, counter_run, minutes=70.0)
STUDIES["withdrawn"] = Study(run_withdrawn, withdrawn, minutes=15.0)
if __name__ == "__main__":
    command("map", __doc__, STUDIES)
