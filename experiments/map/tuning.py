"""The protocol of the map: two tuning seeds try points, and other seeds run the chosen ones."""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.map.methods import Family
from experiments.map.places import Place, clients_for_tuning, clients_of, passes_between
from jaxfl import sweep
from jaxfl.privacy import Sampling, calibrate
from jaxfl.types import Algorithm, Clients

TUNING_SEEDS = (100, 101)
SHORT_LIST = 5
"""Number of best points of a way and an epsilon that the second tuning seed tries as well."""

BEYOND = 2.0
"""Factor between values that are tried beyond the end of a grid."""

MEMORY = 2**31
"""Bytes of clients' states that one program may hold."""

Point = tuple[tuple[str, float], ...]
"""Numbers of a point by name, and its epsilon."""

Scores = dict[Point, dict[str, np.ndarray]]
"""Scores of all clients by point and way: [C], or [rounds, C] if several rounds are evaluated."""

Row = dict[str, Any]

Choices = Mapping[tuple[str, float], tuple[Point, int]]
"""The chosen point and the index of its evaluated round, by way and epsilon."""

ALL_DROPPED = -1.0
"""Score of every client in a run that dropped all updates, so that no way chooses its point."""

SHARES = ("density", "threshold")
"""Numbers that must stay below 1."""


def study(
    family: Family, place: Place, epsilons: Sequence[float], seeds: Sequence[int]
) -> dict[str, Any]:
    """Tune a family at every epsilon, and run the chosen points on the final seeds.

    Every way of evaluation chooses its own point, by the mean over participants and tuning seeds.

    Args:
        family: Method and its points.
        place: Place on the map.
        epsilons: Target epsilons of a private method. Other methods are tuned once, without one.
        seeds: Final seeds. Without seeds there are no final runs.

    Returns:
        `tuning`, a row for each way and epsilon, `rows` (see `final_rows`), and `seconds` of
        processor time.
    """
    began = time.process_time()
    levels = [*epsilons, *([math.inf] if family.ceiling else [])] if family.private else [math.inf]
    first, second = (
        functools.partial(_run, family, place, clients=clients_for_tuning(place, seed), seed=seed)
        for seed in TUNING_SEEDS
    )
    tried = first(points=[_point(family, i, level) for level in levels for i in _indices(family)])
    ways = family_ways(family)
    wider = [_wider(place, family, tried, way, level) for way in ways for level in levels]
    tried |= first(points=sorted(set().union(*wider) - tried.keys()))
    listed = {
        point
        for way in ways
        for level in levels
        for point in _best(place, tried, way, level)[:SHORT_LIST]
    }
    again = second(points=sorted(listed))
    best = {
        (way, level): _chosen(place, [tried, again], way, level) for way in ways for level in levels
    }
    tuning = [
        {
            "way": way,
            "epsilon": level,
            "chosen": dict(point),
            "evaluation": at,
            "validation": score,
            "points": sum(dict(one)["epsilon"] == level for one in tried),
        }
        for (way, level), (point, at, score) in best.items()
    ]
    choices = {key: (point, at) for key, (point, at, _) in best.items()}
    rows = final_rows(family, place, choices, seeds)
    return {"tuning": tuning, "rows": rows, "seconds": round(time.process_time() - began, 1)}


def mixtures(
    family: Family,
    place: Place,
    tuning: Sequence[Row],
    seeds: Sequence[int],
    epsilons: Sequence[float],
) -> dict[str, Any]:
    """Score and run a family's mixtures with the local model.

    At each epsilon the way that is best on validation is mixed, at the point that it chose.

    Args:
        family: Method and its points.
        place: Place on the map.
        tuning: Rows of the family's `tuning`, see `study`.
        seeds: Final seeds.
        epsilons: Target epsilons.

    Returns:
        `tuning`, `rows` and `seconds`, as in `study`.
    """
    began = time.process_time()
    found: dict[str, list[Row]] = {"tuning": [], "rows": []}
    chosen: dict[str, list[Row]] = {}
    for epsilon in epsilons:
        known = [
            row for row in tuning if row["epsilon"] == epsilon and row["way"] in family.mixtures
        ]
        best = max(known, key=lambda row: row["validation"])
        chosen.setdefault(best["way"], []).append(best)
    for way, rows in chosen.items():
        whole = family._replace(build=family.mixtures[way])
        name = f"mixed_{way}"
        choices = {
            (name, row["epsilon"]): (as_point(row["chosen"], row["epsilon"]), 0) for row in rows
        }
        scores = [
            _scores(whole, place, choices, clients_for_tuning(place, seed), seed)
            for seed in TUNING_SEEDS
        ]
        for row in rows:
            own = [
                one["score"]
                for of_seed in scores
                for one in of_seed
                if one["epsilon"] == row["epsilon"]
            ]
            found["tuning"].append(
                {**row, "way": name, "validation": float(np.mean(own)), "points": 1}
            )
        found["rows"] += final_rows(whole, place, choices, seeds)
    return found | {"seconds": round(time.process_time() - began, 1)}


def final_rows(family: Family, place: Place, choices: Choices, seeds: Sequence[int]) -> list[Row]:
    """Run chosen points on every final seed, and return a row for each choice and seed.

    A row has `way`, `epsilon`, `seed`, the mean `score` of participants on test examples, and
    `worst10`, the mean of their worst tenth. If some clients never take part, `unseen` is the mean
    of these clients. Scores are NaN if a run dropped all updates.
    """
    return [
        row
        for seed in seeds
        for row in _scores(family, place, choices, clients_of(place, seed), seed)
    ]


def _scores(
    family: Family,
    place: Place,
    choices: Choices,
    clients: Clients,
    seed: int,
) -> list[Row]:
    """Run chosen points on the clients of a seed, and return their rows, see `final_rows`."""
    points = sorted({point for point, _ in choices.values()})
    scores = _run(family, place, points=points, clients=clients, seed=seed)
    rows = []
    for (way, level), (point, at) in choices.items():
        values = scores[point][way] if family.private else scores[point][way][at]
        if np.all(values == ALL_DROPPED):
            values = np.full_like(values, math.nan)
        known = values[: place.participants]
        tested = np.sort(known[~np.isnan(known)])
        row = {"way": way, "epsilon": level, "seed": seed, "score": _mean_of(tested)}
        row["worst10"] = _mean_of(tested[: max(1, len(tested) // 10)])
        if place.participants < place.clients:
            unseen = values[place.participants :]
            row["unseen"] = _mean_of(unseen[~np.isnan(unseen)])
        rows.append(row)
    return rows


def _mean_of(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _run(
    family: Family, place: Place, *, points: Sequence[Point], clients: Clients, seed: int
) -> Scores:
    """Run points in as few programs as possible, and return the scores of all clients.

    The client states of a program's points need at most `MEMORY`, unless a single point needs more.
    """
    if not points:
        return {}
    group = max(1, MEMORY // max(1, _state_bytes(place, family)))
    found: Scores = {}
    for start in range(0, len(points), group):
        part = points[start : start + group]
        found |= _run_together(family, place, points=part, clients=clients, seed=seed)
    return found


def _run_together(
    family: Family, place: Place, *, points: Sequence[Point], clients: Clients, seed: int
) -> Scores:
    """Run points in one program, which holds the states of all of them."""
    numbers = [dict(point) for point in points]
    columns = {name: [own[name] for own in numbers] for name in family.points}
    if family.private:
        levels = {own["epsilon"] for own in numbers}
        noise = {level: _noise(place, family, level) for level in levels}
        columns["noise_multiplier"] = [noise[own["epsilon"]] for own in numbers]
    results = sweep(
        jax.random.key(seed),
        family.build,
        columns,
        clients,
        rounds=family.rounds,
        eval_every=family.rounds if family.private else passes_between(family.rounds),
        # Differences between points are less noisy then, and nothing here is private.
        paired_noise=True,
        keep_states=False,
        devices=jax.devices()[:1],
        chunk=1,
        progress=False,
    )
    ways = list(family_ways(family))
    found: Scores = {}
    for point, result in zip(points, results, strict=True):
        scores = result.scores if family.private else result.history
        found[point] = {way: np.asarray(scores[way], np.float32) for way in ways}
        if result.dropped == 1:
            found[point] = {
                way: np.full_like(values, ALL_DROPPED) for way, values in found[point].items()
            }
    return found


def family_ways(family: Family) -> tuple[str, ...]:
    """Return the names of the ways in which a family is evaluated."""
    return tuple(_example_of(family).model.task.metrics)


def _example_of(family: Family) -> Algorithm:
    """Return the method at the first point, with noise of 1 if it is private."""
    first = {name: column[0] for name, column in family.points.items()}
    noise = {"noise_multiplier": 1.0} if family.private else {}
    return family.build(**first, **noise)


def _states(place: Place, method: Algorithm) -> Any:
    """Return the shapes of what all clients keep from one round to the next."""
    return jax.eval_shape(lambda: method.init(jax.random.key(0), place.clients))[1]


def _state_bytes(place: Place, family: Family) -> int:
    """Return the bytes of what all clients keep from round to round, for one point."""
    leaves = jax.tree.leaves(_states(place, _example_of(family)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _noise(place: Place, family: Family, epsilon: float) -> float:
    """Return the noise multiplier for an epsilon, which is 0 for infinity."""
    if math.isinf(epsilon):
        return 0.0
    method = _example_of(family)
    sampling = method.mechanism.sampling
    stateful = bool(jax.tree.leaves(_states(place, method)))
    return _calibrated(epsilon, place.clients, family.rounds, sampling, stateful)


@functools.cache
def _calibrated(
    epsilon: float, clients: int, rounds: int, sampling: Sampling, stateful: bool
) -> float:
    return calibrate(epsilon, clients=clients, rounds=rounds, sampling=sampling, stateful=stateful)


def _indices(family: Family) -> range:
    return range(len(next(iter(family.points.values()))))


def _point(family: Family, index: int, epsilon: float) -> Point:
    return as_point({name: column[index] for name, column in family.points.items()}, epsilon)


def as_point(numbers: Mapping[str, float], epsilon: float) -> Point:
    """Return numbers and an epsilon as a point."""
    return tuple(sorted({**numbers, "epsilon": epsilon}.items()))


def _mean(place: Place, values: np.ndarray) -> np.ndarray:
    """Return the mean of scores [..., C] over participants with test examples."""
    return np.nanmean(values[..., : place.participants], axis=-1)


def _best(place: Place, tried: Scores, way: str, epsilon: float) -> list[Point]:
    """Return the points of an epsilon, ordered by their best round's score, the best first."""
    scores = {
        point: np.max(_mean(place, own[way]))
        for point, own in tried.items()
        if dict(point)["epsilon"] == epsilon
    }
    return sorted(scores, key=lambda point: (-np.nan_to_num(scores[point], nan=-1.0), point))


def _chosen(
    place: Place, tried: Sequence[Scores], way: str, epsilon: float
) -> tuple[Point, int, float]:
    """Return the best point over both tuning seeds, the index of its best round, and its score.

    Only points that both seeds tried count.
    """
    both = [point for point in tried[1] if dict(point)["epsilon"] == epsilon]
    scores = {
        point: np.mean([np.atleast_1d(_mean(place, own[point][way])) for own in tried], axis=0)
        for point in both
    }
    best = max(scores, key=lambda point: (np.nan_to_num(scores[point].max(), nan=-1.0), point))
    at = int(scores[best].argmax())
    return best, at, float(scores[best][at])


def _wider(place: Place, family: Family, tried: Scores, way: str, epsilon: float) -> set[Point]:
    """Return up to two points beyond the grid for each number of the best point at an end."""
    best = dict(_best(place, tried, way, epsilon)[0])
    found = set()
    for name, factor in _ends(family, best):
        for power in (1, 2):
            changed = float(f"{best[name] * factor**power:.6g}")
            if name not in SHARES or 0 < changed < 1:
                found.add(as_point({**best, name: changed}, epsilon))
    return found


def _ends(family: Family, point: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return names of a point's numbers at an end of their grid, with factors that lead beyond."""
    found = []
    for name, column in family.points.items():
        if point[name] <= min(column):
            found.append((name, 1 / BEYOND))
        if point[name] >= max(column):
            found.append((name, BEYOND))
    return found
