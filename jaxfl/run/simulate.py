"""Runs, and sweeps of runs, from the first round to the last, with checkpoints and resume."""

import contextlib
import functools
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Key

from jaxfl._support.checks import (
    check_accepts,
    check_count,
    check_counts,
    check_folder,
    check_instance,
    check_key,
    checked,
)
from jaxfl.data.clients import check_data
from jaxfl.data.load import Dataset
from jaxfl.engine.program import Points, over_points
from jaxfl.privacy.audit import Canaries
from jaxfl.privacy.dropouts import check_availability
from jaxfl.run.callbacks import Callback, check_callbacks
from jaxfl.run.check import (
    check_chunk,
    check_clients,
    check_devices,
    check_one_key,
    check_values,
)
from jaxfl.run.execute import execute
from jaxfl.run.flags import under_own_flags
from jaxfl.run.lock import Lock
from jaxfl.run.plan import Settings, make_plan
from jaxfl.run.randomness import check_apart
from jaxfl.run.recorder import Result
from jaxfl.types import Algorithm, Clients

CHECKS = {
    "clients": check_clients,
    "availability": check_availability,
    "chunk": check_chunk,
    "devices": check_devices,
    "folder": check_folder,
    # Programs count rounds in 32 bits.
    "rounds": functools.partial(check_count, most=2**31 - 1),
}
"""Checks of the arguments that `simulate` and `sweep` share."""


class RunOptions(TypedDict, total=False):
    """Options of `simulate` and `sweep`, by keyword.

    Args:
        eval_every: Number of rounds between evaluations of all clients. None stands for a tenth of
            the rounds, rounded down, and at least 1. The last round is always evaluated.
        chunk: Number of clients vectorised at a time on each device. None stands for 1 on a CPU,
            512 on a GPU and "auto" on a TPU. "auto" measures a few sizes once, on a round of this
            run (see `jaxfl.engine.chunk.fastest`). If the chunk does not fit in memory, a single
            process halves it with a warning. The chunk changes speed and memory, and results only
            by rounding.
        devices: Devices of the run. None stands for all devices.
        secret_noise: Whether noise, cohorts and private local steps come from 128 fresh bits of the
            system, and not from `key`. The seed of a key may be small enough to guess. The bits lie
            only in the folder's `noise.key`, which only its owner can read. A resumed run needs
            this file. A file that others can read, or that was made for another run, is an error.
            A run with fresh bits cannot be repeated. A sweep draws bits for each point, or with
            `paired_noise` for all points together.
        report: "full" by default. "public" leaves out columns that follow from private data without
            noise, except test scores. In `metrics` these are `train_loss`, `update_norm`,
            `clipped`, `participants`, `nonfinite` and the method's own infos. In per_client.npz
            these are epsilons by client, and how often each client took part. All epsilons, also in
            the statement, are then the epsilons of the plan, because the rounds as they happened
            show who was drawn how often. In the plan every client takes part in every round in
            which it can. Warnings name and count no clients. Test scores, checkpoints and the
            returned arrays remain.
        resume: "auto" resumes from the folder. "never" starts over and replaces the run in it.
        progress: Whether to show a bar with round, headline metric and epsilon so far.
        audit: Canaries that take part with the clients. An attacker's success on them bounds
            epsilon from below, in the statement and in audit.npz (see `jaxfl.privacy.audit`, which
            needs the extra `[audit]`). Canaries disturb the model.
        availability: Probability with which a drawn client returns its update, or one for each
            client `[C]`. A client that drops out contributes nothing, and its state does not
            change. Epsilon stays that of the drawn clients, or is larger where clients add noise. A
            method that reads its sampler, such as `scaffold`, takes `jaxfl.privacy.Dropouts` as its
            sampler instead. A method that sends nothing is unaffected.
    """

    eval_every: int | None
    chunk: int | Literal["auto"] | None
    devices: list[jax.Device] | None
    secret_noise: bool
    report: Literal["full", "public"]
    resume: Literal["auto", "never"]
    progress: bool
    audit: Canaries | None
    availability: float | Float[np.ndarray, "C"]


@under_own_flags
@checked(key=check_one_key, callbacks=check_callbacks, central=check_data, **CHECKS)
def simulate(
    key: Key[Array, ""] | int,
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    folder: str | os.PathLike | None = None,
    states: Literal["device", "host"] = "device",
    callbacks: Sequence[Callback] = (),
    central: Dataset | tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None,
    keep: Literal["last", "best"] = "last",
    **options: Unpack[RunOptions],
) -> Result:
    """Run an algorithm for some rounds and account for its privacy.

    With a folder, the run writes metrics.jsonl, per_client.npz, privacy.json, checkpoints and, with
    matplotlib, curves.png. A later call with the same arguments resumes where the run stopped, for
    whatever reason. It resumes bit-identically, unless `chunk="auto"` picks another size. A
    finished run is read, even from a read-only folder. A later call with more rounds continues the
    run, and its epsilon grows, because its noise stays the same. A call with fewer rounds raises an
    error. The folder is locked during the run.

    If the folder holds a run that differs in anything that affects results, an error names the
    difference. Data, partition, mechanism, key, versions, and what the method's functions compute
    are compared (see `jaxfl.run.fingerprint`).

    Args:
        key: Key of all randomness, or a seed, which stands for `jax.random.key(seed)`.
        algorithm: An algorithm from `jaxfl.algorithms`, or your own.
        clients: Clients from `jaxfl.data.make_clients`.
        rounds: T, the number of rounds.
        folder: The run's own folder (see `jaxfl.run.folder.run_folder`). None writes nothing.
        states: Place of the client states. "host" keeps them in memory-mapped files, for more
            clients than fit on a device. The files lie in the folder, or, if there is none, in the
            system's temporary folder. With "host" every device has all examples, and the rows of a
            cohort are sent ahead of its round. `states` of the result is mapped and read-only.
        callbacks: Functions that get a copy of all rows of metrics, the newest last. They are
            called at each evaluation, and before a resumed run continues. If one returns True, the
            run ends there (see `jaxfl.run.callbacks`). Each of several processes calls them. If one
            raises, the others are still called, a run of one process is saved, and then the
            exception is raised.
        central: Dataset, or its four arrays, on whose test examples the server scores the global
            model at each evaluation. The scores are `central_loss`, `central_accuracy` and so on in
            the rows. The method needs a global model (see `Result.model`). Such a score follows
            from the global model, which the statement covers, and from the server's own examples,
            which must be no client's.
        keep: "best" also keeps the states of the evaluation with the best mean over clients of the
            headline metric (`Task.headline`), as `Result.best`. `Result.model` then makes its
            models from them. If no client has test examples, the central score decides. No epsilon
            covers this choice by clients' test examples, and the best score is optimistic, because
            it was chosen. The other fields of the result are those of the last round, as with
            "last".
        options: Options of `RunOptions`, by keyword.

    Returns:
        Metrics, scores, states, ledger and privacy statement of the run (see `Result`).

    Raises:
        TypeError: An argument has another type.
        ValueError: An argument does not fit. Or the folder holds another run, is in use, or holds
            no intact checkpoint. If only the newest checkpoint is damaged, the run resumes from the
            previous one.
        FloatingPointError: The server's state turned non-finite, or no update counts any more. The
            message names the round and a remedy.
        KeyboardInterrupt: The run got Ctrl-C or SIGTERM. It ends after the running segment of
            rounds, which is saved if there is a folder, or at once on the next signal. The message
            names the round.

    >>> from jaxfl.algorithms import fedavg
    >>> from jaxfl.data import iid, load, make_clients, matching
    >>> from jaxfl.models import mlp
    >>> digits = load("digits")
    >>> rows = iid(digits.train_labels, 20, seed=0)
    >>> tests = matching(rows, digits.train_labels, digits.test_labels, seed=0)
    >>> clients = make_clients(digits, rows, tests)
    >>> result = simulate(0, fedavg(mlp((8, 8, 1), 10)), clients, rounds=2, progress=False)
    >>> [row["round"] for row in result.metrics]
    [1, 2]
    """
    # `checked` has replaced a seed by its key.
    assert isinstance(key, Array)
    if folder is not None:
        folder = pathlib.Path(folder)
    # `checked` has replaced arrays by their dataset.
    assert central is None or isinstance(central, Dataset)
    settings = Settings(rounds, states=states, central=central, keep=keep, **options)
    plan = make_plan(algorithm.name, key, [algorithm], None, clients, settings)
    # The plan comes first, so that most wrong arguments leave nothing in the folder.
    with contextlib.closing(Lock(folder)) as lock:
        return execute(plan, lock, [folder], callbacks)[0]


@under_own_flags
@checked(
    key=check_key,
    values=check_values,
    numbers=functools.partial(check_counts, least=0),
    central=check_data,
    **CHECKS,
)
def sweep(
    key: Key[Array, "*P"] | int,
    build: Callable[..., Algorithm],
    values: Mapping[str, Sequence[float]],
    clients: Clients,
    *,
    rounds: int,
    folder: str | os.PathLike | None = None,
    batch: int | None = None,
    paired_noise: bool = False,
    keep_states: bool = True,
    numbers: Sequence[int] | None = None,
    central: Dataset | tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None,
    keep: Literal["last", "best"] = "last",
    **options: Unpack[RunOptions],
) -> list[Result]:
    """Run one method with several values of its numbers, or several seeds, in one compiled program.

    The program is compiled once. Up to rounding, the first point of a key has the results of
    `simulate`, unless noise is secret. The same is true for points with keys of their own, and
    for all points under `paired_noise`. All points advance together, so that a stopped sweep
    resumes where it was. With a folder, each point writes its reports into a folder inside it. A
    sweep of more than 20 points writes no curves.png, but `jaxfl report` draws the curves. A point
    whose server's state turns non-finite continues, and its scores show the problem.

    Args:
        key: Key, or a seed, of all points, or one key per point `[P]`. Points of one key share all
            randomness except cohorts and noise (see `paired_noise`).
        build: Function from keyword arguments to an algorithm, for instance
            `functools.partial(dp_pfeddsu, model, ...)`. Values may be learning rates, clip bounds,
            noise multipliers, weights of penalties or densities. They must decide neither shapes
            nor Python branches.
        values: Columns of P numbers, by argument. There may be none if there are P keys.
        clients: Clients of all points.
        rounds: T, the number of rounds.
        folder: Folder of the sweep. None writes nothing.
        batch: Number of points vectorised at a time. None runs one after the other in the same
            program, which is best on a CPU.
        paired_noise: Whether points of one key, or with `secret_noise` all points, also share their
            cohorts, and their noise up to its scale. Differences between the points are then less
            noisy. But any two of the points reveal the clean updates, so at most one may be
            published.
        keep_states: Whether clients' states stay when all rounds are done. They take the memory of
            points times clients. Otherwise results and folder have no states, so that the folder
            can be read, but not extended.
        numbers: Number of each point, from 0, in a larger sweep of one key, if this sweep is a part
            of it. Parts that run one after the other then draw the cohorts and the noise of the
            larger sweep. None stands for 0, 1, 2, ... among the points of each key.
        central: Dataset on which each point's global model is scored (see `simulate`).
        keep: "best" also keeps the states of each point's best evaluation (see `simulate`).
        options: Options of `RunOptions`, by keyword.

    Returns:
        The result of each point, in the order of the values.

    Raises:
        ValueError: An argument does not fit (see `simulate`), or a value cannot be an argument of a
            compiled program.
        TypeError: An argument has another type.
        KeyboardInterrupt: As in `simulate`.

    >>> from functools import partial
    >>> from jaxfl.algorithms import fedprox
    >>> from jaxfl.data import iid, load, make_clients, matching
    >>> from jaxfl.models import mlp
    >>> digits = load("digits")
    >>> rows = iid(digits.train_labels, 20, seed=0)
    >>> tests = matching(rows, digits.train_labels, digits.test_labels, seed=0)
    >>> clients = make_clients(digits, rows, tests)
    >>> method = partial(fedprox, mlp((8, 8, 1), 10, hidden=(16,)))
    >>> results = sweep(0, method, {"mu": [0.0, 0.1]}, clients, rounds=1, progress=False)
    >>> len(results)
    2
    """
    assert isinstance(key, Array)
    count = _points(key, values)
    keys = jnp.broadcast_to(key, (count,))
    algorithms = _algorithms_of_points(build, values, count)
    columns = {name: np.asarray(column, np.float32) for name, column in values.items()}
    points = Points(build, columns, batch)
    _check_clipped(points, algorithms)
    # Each point has its own reports. Checkpoints, states and the lock are the sweep's.
    root: pathlib.Path | None = None
    folders: list[pathlib.Path | None] = [None] * count
    if folder is not None:
        root = pathlib.Path(folder)
        folders = [root / name for name in names_of_points(values, count)]
    assert central is None or isinstance(central, Dataset)
    settings = Settings(
        rounds,
        paired_noise=paired_noise,
        keep_states=keep_states,
        numbers=_numbers_of_points(numbers, keys, paired_noise),
        central=central,
        keep=keep,
        **options,
    )
    points_text = "1 point" if count == 1 else f"{count} points"
    name = f"{algorithms[0].name}, {points_text}"
    plan = make_plan(name, keys, algorithms, points, clients, settings)
    with contextlib.closing(Lock(root)) as lock:
        return execute(plan, lock, folders)


def _algorithms_of_points(
    build: Callable[..., Algorithm], values: Mapping[str, Sequence[float]], count: int
) -> list[Algorithm]:
    """Return the algorithm of each point, which accountants and reports read.

    The program of the points builds its own from their columns.
    """
    # Python's own error about an unknown argument would have no remedy.
    check_accepts("build", build, values)
    rows = [{name: float(column[p]) for name, column in values.items()} for p in range(count)]
    return [check_instance("build(...)", build(**row), (Algorithm,)) for row in rows]


def _numbers_of_points(
    numbers: Sequence[int] | None, keys: Key[Array, "P"], paired_noise: bool
) -> tuple[int, ...] | None:
    """Return the numbers of a sweep's points, or None if they follow from the order of the points.

    Raises:
        ValueError: Not every point has a number. Or two points would share their noise, although
            they are not paired.
    """
    if numbers is None:
        return None
    if len(numbers) != len(keys):
        raise ValueError(
            f"numbers must have one entry for each of the {len(keys)} points, got {len(numbers)}. "
            "Give one whole number for each point."
        )
    own = tuple(numbers)
    # Paired points share their noise anyway, so they may have equal numbers.
    if not paired_noise:
        check_apart(keys, own)
    return own


def names_of_points(values: Mapping[str, Sequence[float]], count: int) -> list[str]:
    """Return the name of each point's folder: its number, then each argument with its value."""
    # The number of a point makes its name unique, because six digits of its values may not.
    return [
        "_".join([str(p), *(f"{name}={column[p]:g}" for name, column in values.items())])
        for p in range(count)
    ]


def _points(key: Key[Array, "*P"], values: Mapping[str, Sequence[float]]) -> int:
    """Return the number of points, which is the length of every column and of several keys.

    Raises:
        ValueError: The lengths differ or are 0, or a column's name is no identifier.
    """
    # The name of an argument is also a part of a folder's name.
    if wrong := [name for name in values if not name.isidentifier()]:
        raise ValueError(
            f"values must be columns by argument of `build`, got {wrong[0]!r}. "
            "Give names of arguments, for instance {'clip': [0.5, 1.0]}."
        )
    lengths = {name: len(column) for name, column in values.items()}
    # A single key serves any number of points.
    if jnp.ndim(key):
        lengths["key"] = len(key)
    if len(set(lengths.values())) != 1 or not max(lengths.values()):
        raise ValueError(
            f"values and key must have one length of at least 1, got {lengths!r}. "
            "Give columns, or keys, of one length."
        )
    return next(iter(lengths.values()))


def _check_clipped(points: Points, algorithms: Sequence[Algorithm]) -> None:
    """Require finite clip bounds if the program of the points adds noise, even of size 0."""
    clips = [algorithm.mechanism.clip for algorithm in algorithms]
    unclipped = [p for p, clip in enumerate(clips) if math.isinf(clip)]
    if unclipped and noisy(points):
        raise ValueError(
            f"values of point {unclipped[0]} must have a finite clip in a sweep with noise, which "
            "is in multiples of it, got clip=inf. Give a large number, such as 1e6, or run the "
            "point alone."
        )


def noisy(points: Points) -> bool:
    """Return whether a program whose points differ in numbers adds noise, even of size 0.

    The result is False for points that differ in their keys alone. Then the builder has compared
    their clip and noise already.
    """
    found: list[bool] = []

    def note(built: Algorithm) -> Array:
        found.append(built.mechanism.noisy)
        return jnp.zeros(())

    # Numbers are unknown under a trace, where even a multiplier of 0 counts as noise.
    if points.values:
        jax.eval_shape(over_points(note, points))
    return any(found)
