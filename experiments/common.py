"""Runs of several methods over seeds, choices on validation examples, and rows of tables."""

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
from jaxfl.cli.main import command_line
from jaxfl.data import Dataset, dirichlet, make_clients, matching
from jaxfl.engine.evaluate import compile_evaluation, summarize
from jaxfl.engine.mesh import place
from jaxfl.engine.program import Points
from jaxfl.engine.states import States
from jaxfl.local.penalties import proximal
from jaxfl.models import build, digits_cnn
from jaxfl.report.comparison import at_an_end
from jaxfl.run.folder import run_folder
from jaxfl.tasks import classification
from jaxfl.types import Algorithm, ClientData, Clients, Model, Params, Tree

Method = Callable[[Clients], Algorithm]
cli = command_line


def starred(chosen: Mapping[str, float], points: Mapping[str, Sequence[float]]) -> str:
    """Format a chosen point, with a star at each number that lies at an end of its grid."""
    return ", ".join(
        f"{name} {value:.3g}{'*' * at_an_end(value, points[name])}"
        for name, value in chosen.items()
    )


def validation_curve(tuning: Mapping[str, Any], passes: int = 1) -> dict[int, float]:
    """Return the validation scores of the chosen point, by passes over the data.

    Args:
        tuning: Row of `Comparison.tuning` whose points have one number.
        passes: Number of passes in each round.

    >>> points, scores = {"rate": [0.1, 0.3]}, {"1": [0.2, 0.4], "2": [0.3, 0.5]}
    >>> validation_curve({"points": points, "chosen": {"rate": 0.3}, "scores": scores}, passes=5)
    {5: 0.4, 10: 0.5}
    """
    ((name, column),) = tuning["points"].items()
    at = list(column).index(tuning["chosen"][name])
    return {passes * int(rounds): scores[at] for rounds, scores in tuning["scores"].items()}


def stopped(chosen: str, passes: int, curve: Mapping[Any, float], most: int = 10) -> str:
    r"""Describe how the validation score of training alone changed over its passes.

    Args:
        chosen: The chosen point, as text.
        passes: Passes after which training stops.
        curve: Scores by passes.
        most: Greatest number of evenly spaced scores in the text. The scores at `passes` and at the
            end are shown as well.

    >>> text = stopped("rate 0.1", 3, {1: 0.5, 2: 0.52, 3: 0.6, 4: 0.6}, most=2)
    >>> print(text.replace("; ", ";\n"))
    Local-only, rate 0.1, stops after 3 passes;
    % of held-out examples by pass: 2: 52.0, 3: 60.0, 4: 60.0.
    """
    every = math.ceil(len(curve) / most)
    shown = [
        at
        for index, at in enumerate(curve, 1)
        if index % every == 0 or int(at) == passes or index == len(curve)
    ]
    text = ", ".join(f"{at}: {100 * curve[at]:.1f}" for at in shown)
    return (
        f"Local-only, {chosen}, stops after {passes} passes; "
        f"% of held-out examples by pass: {text}."
    )


class Choice(NamedTuple):
    """Scores of a method's points on validation examples, and the best point."""

    points: Mapping[str, Sequence[float]]
    """Columns of numbers by argument, one entry for each point."""
    validation: list[float]
    """The score of each point at the best round."""
    chosen: dict[str, float]
    """Arguments of the best point."""
    rounds: int
    """Number of rounds after which the best point has its best score."""
    result: Result
    """Result of the best point."""

    @property
    def facts(self) -> dict[str, Any]:
        """Return what a study's result stores: `points`, `validation` and `chosen`."""
        return {"points": dict(self.points), "validation": self.validation, "chosen": self.chosen}


def accuracies(rows: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the accuracies in [0, 1], one for each row of a run's metrics."""
    return [row["accuracy"] for row in rows]


def choose(
    points: Mapping[str, Sequence[float]],
    results: Sequence[Result],
    score: Callable[[Sequence[Mapping[str, float]]], Sequence[float]] = accuracies,
) -> Choice:
    """Choose the point of a sweep with the highest score, and its best round.

    A score of NaN counts as -1.

    Args:
        points: Columns of numbers by argument, one entry for each point.
        results: Result of each point on validation examples.
        score: Function from the rows of metrics to scores of the last few rows. The default
            scores every row. If the scores of several rows are returned, the best row decides
            the number of rounds.
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
    """Make clients that train on the first `examples` of their rows.

    Args:
        data: Examples of all clients.
        rows: Training rows of each client.
        test: Test rows of each client.
        examples: Number of training examples of a client.
        held_out: Whether clients are tested on the rest of `rows`, instead of on `test`.
    """
    if held_out:
        data = data._replace(test_inputs=data.train_inputs, test_labels=data.train_labels)
        test = [own[examples:] for own in rows]
    return make_clients(data, [own[:examples] for own in rows], test)


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions by package name."""
    return {name: importlib.metadata.version(name) for name in packages}


class Row(NamedTuple):
    """A method in a table: accuracies in [0, 1] at the end, one for each seed."""

    method: str
    mean: list[float]
    """Mean accuracy over clients."""
    worst10: list[float]
    """Mean accuracy of the worst tenth of the clients."""
    statement: dict[str, Any]
    """Privacy statement of the first seed. Its epsilons are those of all seeds."""
    metrics: list[list[dict[str, float | int]]]
    """Metrics of each seed, one row for each evaluated round."""
    local: Sequence[float] = ()
    """Mean accuracy of local models. Empty if they are not tested."""


def model_for(name: str, dataset: Dataset) -> Model:
    """Build the named model for a dataset.

    Digits get `digits_cnn` for any name, because their images are small.
    """
    if dataset.name == "digits":
        return digits_cnn()
    return build(name, dataset.train_inputs.shape[1:], dataset.classes)


def fine_tuned(base: Algorithm, local: LocalSGD, penalty_weight: float = 0.0) -> Algorithm:
    """Return the method, evaluated after each client has trained the entire model on its own data.

    Args:
        base: Method that shares a model, `server.params`.
        local: A client's training before an evaluation. Nothing of it is sent.
        penalty_weight: Weight of a proximal term towards the server's model. 0 adds no term.
    """

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
    """Make clients with Dirichlet mixes of classes, each tested on the mix that it trains on.

    Args:
        dataset: Examples of all clients.
        clients: Number of clients.
        alpha: Concentration of the Dirichlet distribution.
        seed: Seed of the random part, the partition and the test split.
        minimum: Least number of training examples of a client.
        examples: Size of the random part of the training examples. None takes all of them.
    """
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
    """Run every method for every seed. All methods get the same clients for a seed.

    Each run has a folder of its own, from which it resumes.

    Args:
        methods: Builders by the name that tables show.
        make: Function from a seed to its clients.
        rounds: T, number of rounds.
        seeds: Seeds, each for one run of each method. A seed also draws the partition.
        out: Root of the run folders.
        config: Settings, whose hash is in the path of a run folder (see `run_folder`).
        eval_every: Rounds between evaluations, see `simulate`.
        options: Further arguments of `simulate`.

    Returns:
        Results by name, in the order of the seeds.
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
    """Run a method with several values of its numbers for every seed.

    All points get the same clients for a seed.

    Args:
        method: Name of the run folders.
        build: Function from keyword arguments to the algorithm.
        values: Columns of numbers by argument, one entry for each point.
        make: Function from a seed to its clients.
        rounds: T, number of rounds.
        seeds: Seeds, each for one sweep. A seed also draws the partition.
        out: Root of the run folders.
        config: Settings, whose hash is in the path of a run folder (see `run_folder`).
        options: Further arguments of `sweep`.

    Returns:
        A list for each point, with its results in the order of the seeds.
    """
    results = [
        sweep(
            jax.random.key(seed),
            build,
            values,
            make(seed),
            rounds=rounds,
            # Paired noise makes differences between points less noisy. Nothing here is private.
            paired_noise=True,
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
    """Run local-only at the learning rate and the passes that score best on held-out examples.

    Args:
        model: Model of every client.
        local: Function from a learning rate to the training of a round.
        rates: Learning rates to choose from.
        make: Function from a seed to its clients.
        rounds: Greatest number of rounds.
        seeds: Seeds of the rows.
        tuning_seed: Seed of the runs by which the choice is made. It must not be among `seeds`.
        out: Root of the run folders.
        config: Settings, whose hash is in the path of the run folder (see `run_folder`).

    Returns:
        A row of `Comparison.rows` for every seed, and the facts of the choice. The facts are
        `points`, `chosen`, `passes` (after which training stops), and `validation` (the chosen
        point's scores by passes).
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
    """Return each point's mean accuracy over clients, on the final states of earlier runs.

    Args:
        build: Function from keyword arguments to the algorithm that personalizes.
        values: Columns of numbers by argument, one entry for each point.
        clients: Clients of the earlier runs.
        seed: Seed of the earlier runs.
        left: Final states of server and clients, one pair for each point.
    """
    columns = {name: np.asarray(column, np.float32) for name, column in values.items()}
    # A run uses the keys 0 to 2.
    key = jax.random.fold_in(jax.random.key(seed), 3)
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
    """Return a method's row from its results, one for each seed."""
    final = [result.metrics[-1] for result in results]
    return Row(
        method=method,
        mean=[row["accuracy"] for row in final],
        worst10=[row["accuracy_worst10"] for row in final],
        statement=results[0].statement,
        metrics=[result.metrics for result in results],
    )


def constant_scores(clients: Clients, participants: int | None = None) -> tuple[float, float]:
    """Return the mean test accuracies of clients that predict one class for all examples.

    The first number is for the most frequent class of all participants' training examples. The
    second is for each client's own most frequent class, or for the first one if the client has no
    training examples. Clients without test examples do not count.

    Args:
        clients: The clients.
        participants: Only the first `participants` clients count. None counts all of them.
    """
    labels = np.asarray(clients.labels)
    train = _labels_of_each(labels, clients.train, clients.train_size, participants)
    test = _labels_of_each(labels, clients.test, clients.test_size, participants)
    common = _most_frequent(np.concatenate(train))
    tested = [(own, seen) for own, seen in zip(train, test, strict=True) if len(seen)]
    of_all = [np.mean(seen == common) for _, seen in tested]
    own_class = [_most_frequent(own) if len(own) else common for own, _ in tested]
    of_own = [np.mean(seen == one) for one, (_, seen) in zip(own_class, tested, strict=True)]
    return float(np.mean(of_all)), float(np.mean(of_own))


def _labels_of_each(
    labels: np.ndarray, lists: Any, sizes: Any, participants: int | None
) -> list[np.ndarray]:
    """Return an array for each participant with the labels of its examples, without padding."""
    listed = zip(lists, np.asarray(sizes)[:participants], strict=False)
    return [labels[np.asarray(rows)[:size]] for rows, size in listed]


def _most_frequent(labels: np.ndarray) -> int:
    return int(np.bincount(labels).argmax())


def percent(values: Sequence[float]) -> str:
    """Format shares as mean ± standard deviation in percent, or a dash if one of them is NaN.

    A single share has no standard deviation.
    """
    if np.isnan(values).any():
        return "–"
    text = f"{100 * np.mean(values):.1f}"
    return text if len(values) == 1 else f"{text} ± {100 * np.std(values, ddof=1):.1f}"


def number(value: float | str) -> str:
    """Format an epsilon with three digits. Infinity and "inf" become ∞."""
    return (
        "∞"
        if value == "inf" or (isinstance(value, float) and math.isinf(value))
        else f"{value:.3g}"
    )
