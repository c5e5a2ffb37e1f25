"""What experiments share: methods x seeds, tables, and plots of several methods."""

import functools
import importlib.metadata
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfl import Candidate, LocalSGD, Result, compare, grid, simulate, sweep
from jaxfl.algorithms import local_only
from jaxfl.cli import command_line
from jaxfl.data import Dataset, dirichlet, make_clients, matching
from jaxfl.engine.evaluate import compile_evaluation, summarize
from jaxfl.engine.mesh import place
from jaxfl.engine.program import Points
from jaxfl.engine.states import States
from jaxfl.local.penalties import proximal
from jaxfl.models import build, digits_cnn
from jaxfl.run.comparison import at_an_end
from jaxfl.run.report import run_folder
from jaxfl.tasks import classification
from jaxfl.types import Algorithm, ClientData, Clients, Model, Params, Tree

Method = Callable[[Clients], Algorithm]
cli = command_line


def starred(chosen: Mapping[str, float], points: Mapping[str, Sequence[float]]) -> str:
    """A chosen point, with a star for each number at an end of its grid."""
    return ", ".join(
        f"{name} {value:.3g}{'*' * at_an_end(value, points[name])}"
        for name, value in chosen.items()
    )


def validation_curve(tuning: Mapping[str, Any], passes: int = 1) -> dict[int, float]:
    """Scores of the chosen point by passes, of a row of `Comparison.tuning` whose points have one number.

    >>> points, scores = {"rate": [0.1, 0.3]}, {"1": [0.2, 0.4], "2": [0.3, 0.5]}
    >>> validation_curve({"points": points, "chosen": {"rate": 0.3}, "scores": scores}, passes=5)
    {5: 0.4, 10: 0.5}
    """
    ((name, column),) = tuning["points"].items()
    at = list(column).index(tuning["chosen"][name])
    return {passes * int(rounds): scores[at] for rounds, scores in tuning["scores"].items()}


def stopped(chosen: str, passes: int, curve: Mapping[Any, float], most: int = 10) -> str:
    """How training alone went on at its rate, by some of its passes.

    >>> stopped("rate 0.1", 3, {1: 0.5, 2: 0.52, 3: 0.6, 4: 0.6}, most=2)
    'Local-only, rate 0.1, stops after 3 passes; % of held-out examples by pass: 2: 52.0, 3: 60.0, 4: 60.0.'
    """
    every = math.ceil(len(curve) / most)
    shown = [
        at
        for index, at in enumerate(curve, 1)
        if index % every == 0 or int(at) == passes or index == len(curve)
    ]
    text = ", ".join(f"{at}: {100 * curve[at]:.1f}" for at in shown)
    return f"Local-only, {chosen}, stops after {passes} passes; % of held-out examples by pass: {text}."


class Choice(NamedTuple):
    """What a method's points gave on validation examples, and the best of them."""

    points: Mapping[str, Sequence[float]]
    validation: list[float]
    """The score of each point at the best round."""
    chosen: dict[str, float]
    rounds: int
    result: Result
    """Of the best point."""

    @property
    def facts(self) -> dict[str, Any]:
        """What a study's result keeps of it."""
        return {"points": dict(self.points), "validation": self.validation, "chosen": self.chosen}


def accuracies(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """A score of every evaluated round."""
    return [row["accuracy"] for row in rows]


def choose(
    points: Mapping[str, Sequence[float]],
    results: Sequence[Result],
    score: Callable[[Sequence[Mapping[str, float]]], Sequence[float]] = accuracies,
) -> Choice:
    """The best point of a sweep and its best round.

    Args:
        points: columns of numbers.
        results: of each point, on validation examples.
        score: rows of metrics to a number for each of the last of them; with several, the best one is the last round.
    """
    scores = np.array([score(result.metrics) for result in results], float)
    best, at = divmod(int(np.argmax(np.nan_to_num(scores, nan=-1.0))), scores.shape[1])
    chosen = {name: column[best] for name, column in points.items()}
    rounds = results[best].metrics[at - scores.shape[1]]["round"]
    return Choice(points, scores[:, at].tolist(), chosen, int(rounds), results[best])


def split_clients(
    data: Dataset,
    rows: Sequence[np.ndarray],
    test: Sequence[np.ndarray],
    examples: int,
    *,
    held_out: bool,
) -> Clients:
    """Clients that train on the first `examples` of their rows, tested on the rest of those or on test examples."""
    if held_out:
        data = data._replace(test_inputs=data.train_inputs, test_labels=data.train_labels)
        test = [own[examples:] for own in rows]
    return make_clients(data, [own[:examples] for own in rows], test)


def versions(*packages: str) -> dict[str, str]:
    """Of what a result depends on."""
    return {name: importlib.metadata.version(name) for name in packages}


class Row(NamedTuple):
    """One method of a table: accuracies over seeds, and its privacy statement (the same for all seeds)."""

    method: str
    mean: list[float]
    worst10: list[float]
    statement: dict[str, Any]
    metrics: list[list[dict[str, float | int]]]
    local: Sequence[float] = ()
    """Mean accuracy of local models at the end, where they are tested too."""


def model_for(name: str, dataset: Dataset) -> Model:
    """The named model for a dataset; digits are too small for any but their own."""
    if dataset.name == "digits":
        return digits_cnn()
    return build(name, dataset.train_inputs.shape[1:], dataset.classes)


def fine_tuned(base: Algorithm, local: LocalSGD, penalty_weight: float = 0.0) -> Algorithm:
    """The method, evaluated after each client has trained its whole model on its own data, near the server's or not."""

    def personalize(key: jax.Array, server: Any, client: Any, data: ClientData) -> Params:
        penalty = functools.partial(proximal, center=server.params, mu=penalty_weight)
        return local.train(
            key, base.model, base.personalize(key, server, client, data), data, penalty=penalty
        )[0]

    return base._replace(name=f"{base.name}, fine-tuned", personalize=personalize)


def dirichlet_clients(
    dataset: Dataset,
    clients: int,
    alpha: float,
    *,
    seed: int,
    minimum: int,
    examples: int | None = None,
) -> Clients:
    """Dirichlet clients over a random part of the training examples (None: all), with matching test splits."""
    if examples is not None and examples < len(dataset.train_labels):
        rows = np.random.default_rng(seed).permutation(len(dataset.train_labels))[:examples]
        dataset = dataset._replace(
            train_inputs=dataset.train_inputs[rows], train_labels=dataset.train_labels[rows]
        )
    lists = dirichlet(dataset.train_labels, clients, alpha, seed=seed, minimum=minimum)
    return make_clients(
        dataset, lists, matching(lists, dataset.train_labels, dataset.test_labels, seed=seed)
    )


def run_each(
    methods: Mapping[str, Method],
    make: Callable[[int], Clients],
    *,
    rounds: int,
    seeds: Sequence[int],
    out: pathlib.Path,
    config: Mapping[str, Any],
    eval_every: int | None = None,
    **options: Any,
) -> dict[str, list[Result]]:
    """Run every method on the same clients for every seed; each run has a folder of its own and resumes.

    Args:
        methods: by the name that tables show.
        make: clients of a seed.
        rounds: T.
        seeds: one run of each method per seed; the seed also draws the partition.
        out: root of the run folders.
        config: the resolved settings, written beside the results.
        eval_every: as in `simulate`, like all that follow.
        options: more of them.
    """
    clients, results = {seed: make(seed) for seed in seeds}, {}
    for name, builder in methods.items():
        results[name] = []
        for seed in seeds:
            algorithm = builder(clients[seed])._replace(name=name)
            folder = run_folder(out, name, config, seed)
            key = jax.random.key(seed)
            told = {"rounds": rounds, "eval_every": eval_every, "folder": folder, **options}
            results[name].append(simulate(key, algorithm, clients[seed], **told))
    return results


def sweep_each(
    method: str,
    build: Callable[..., Algorithm],
    values: Mapping[str, Sequence[float]],
    make: Callable[[int], Clients],
    *,
    rounds: int,
    seeds: Sequence[int],
    out: pathlib.Path,
    config: Mapping[str, Any],
    **options: Any,
) -> list[list[Result]]:
    """Run a method with several values of its numbers on the same clients for every seed: by value, over seeds.

    Args:
        method: names the run folders.
        build: keyword arguments to algorithm.
        values: columns of numbers by argument.
        make: as in `run_each`, like all that follow.
        rounds: T.
        seeds: one sweep per seed.
        out: root of the run folders.
        config: the resolved settings.
        options: as in `sweep`.
    """
    results = [
        sweep(
            jax.random.key(seed),
            build,
            values,
            make(seed),
            rounds=rounds,
            paired_noise=True,  # less noisy differences between points; nothing here is private
            folder=run_folder(
                out, f"{method} by {', '.join(values)}", {**config, "values": dict(values)}, seed
            ),
            **options,
        )
        for seed in seeds
    ]
    return [list(of_point) for of_point in zip(*results, strict=True)]


def trained_alone(
    model: Model,
    local: Callable[[Any], LocalSGD],
    rates: Sequence[float],
    make: Callable[[int], Clients],
    *,
    rounds: int,
    seeds: Sequence[int],
    tuning_seed: int,
    out: pathlib.Path,
    config: Mapping[str, Any],
) -> tuple[list[Any], dict[str, Any]]:
    """Local-only, at the learning rate and the number of passes that are best on held-out examples.

    Args:
        model: of every client.
        local: a learning rate to the passes of a round.
        rates: to choose from.
        make: as in `run_each`, like all that follow.
        rounds: at most.
        seeds: of the rows.
        tuning_seed: another one, of the runs that the choice is made by.
        out: root of the run folders.
        config: the resolved settings.

    Returns:
        A row of metrics for every seed; and what was tried, what was chosen, after how many passes it stops, and
        how it scored by passes.
    """
    passes = local(rates[0]).epochs
    found = compare(
        {
            "local-only": Candidate(
                lambda rate: local_only(model, local=local(rate)), grid(rate=list(rates))
            )
        },
        make,
        rounds=rounds,
        seeds=seeds,
        tuning_seed=tuning_seed,
        folder=run_folder(
            out, "local-only", {**config, "rates": list(rates), "most": rounds}, tuning_seed
        ),
        devices=jax.devices()[:1],
        chunk=1,
        progress=False,
    )
    (tuning,) = found.tuning
    facts = {
        "points": tuning["points"],
        "chosen": tuning["chosen"],
        "passes": tuning["rounds"] * passes,
    }
    return found.rows, facts | {"validation": validation_curve(tuning, passes)}


def evaluated(
    build: Callable[..., Algorithm],
    values: Mapping[str, Sequence[float]],
    clients: Clients,
    seed: int,
    left: Sequence[tuple[Tree, Tree]],
) -> list[float]:
    """Accuracy of each point as `build` has its clients tested, from states of server and clients that runs left."""
    columns = {name: np.asarray(column, np.float32) for name, column in values.items()}
    key = jax.random.fold_in(jax.random.key(seed), 3)  # a run takes 0 to 2
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *[(key, server, States.of(own)) for server, own in left]
    )
    devices = jax.devices()[:1]
    scores = compile_evaluation(Points(build, columns), place(clients, devices))(
        *jax.device_put(stacked, devices[0])
    )
    metrics, sizes = classification().metrics, np.asarray(clients.test_size)
    of_each = (
        {name: np.asarray(value)[p] for name, value in scores.items()} for p in range(len(left))
    )
    return [summarize(score, sizes, metrics)["accuracy"] for score in of_each]


def row_of(method: str, results: Sequence[Result]) -> Row:
    """A method's results over seeds, as a row."""
    final = [result.metrics[-1] for result in results]
    return Row(
        method=method,
        mean=[row["accuracy"] for row in final],
        worst10=[row["accuracy_worst10"] for row in final],
        statement=results[0].statement,
        metrics=[result.metrics for result in results],
    )


def percent(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds, in percent; a dash where there was nothing to test."""
    if np.isnan(values).any():
        return "–"
    text = f"{100 * np.mean(values):.1f}"
    return text if len(values) == 1 else f"{text} ± {100 * np.std(values, ddof=1):.1f}"


def number(value: float | str) -> str:
    """An epsilon; infinity says that none is finite."""
    return (
        "∞"
        if value == "inf" or (isinstance(value, float) and math.isinf(value))
        else f"{value:.3g}"
    )
