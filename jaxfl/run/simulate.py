"""Runs, and sweeps of runs, from the first round to the last, with checkpoints and resume."""

import bisect
import contextlib
import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl._validate import (
    check_count,
    check_counts,
    check_instance,
    check_key,
    check_path,
    checked,
)
from jaxfl.backend import of_devices
from jaxfl.callbacks import Callback, EpsilonBudget, ask, check_callbacks, entered
from jaxfl.data.clients import check_data
from jaxfl.data.load import Dataset
from jaxfl.engine import processes
from jaxfl.engine.chunk import attempt, half
from jaxfl.engine.evaluate import PerClient
from jaxfl.engine.memo import described, first_made, key_of_arrays, key_of_method, remembered
from jaxfl.engine.mesh import everywhere
from jaxfl.engine.program import Points, over_points
from jaxfl.engine.resident import Resident
from jaxfl.engine.round import Center, Records
from jaxfl.engine.streamed import Stream
from jaxfl.privacy.audit import Canaries, Scores, check_audit, model_in, with_final
from jaxfl.run import fingerprint, report, signals
from jaxfl.run.central import Central
from jaxfl.run.check import (
    check_algorithm,
    check_chunk,
    check_clients,
    check_devices,
    check_mechanism,
    check_one_key,
    check_values,
)
from jaxfl.run.checkpoint import Checkpoints
from jaxfl.run.flags import scores_may_be_undefined, under_own_flags
from jaxfl.run.health import Watch
from jaxfl.run.kept import BestModels, check_kept
from jaxfl.run.lock import Lock
from jaxfl.run.randomness import Streams, check_apart
from jaxfl.run.recorder import EvaluationSchedule, Journal, Recorded, Result
from jaxfl.run.trained import Origin
from jaxfl.types import Algorithm, Clients, Tree

_SEGMENT_SECONDS = 10.0
"""Duration of the rounds of one call, in seconds, which progress and signals have to wait for."""

_SEGMENT_ROUNDS = 16
"""Maximum number of rounds of one call.

It is a constant, so that the length of a run does not change the compiled program.
"""

_CHECKPOINT_SECONDS = 30.0
"""Time after which a run writes the next checkpoint, in seconds."""

_PICTURES = 20
"""Number of points of a sweep up to which each has a picture. One takes a third of a second."""

CHECKS = {
    "clients": check_clients,
    "chunk": check_chunk,
    "devices": check_devices,
    "folder": check_path,
    # Programs count rounds in 32 bits.
    "rounds": functools.partial(check_count, most=2**31 - 1),
}
"""Checks of the arguments that `simulate` and `sweep` share."""


class RunOptions(TypedDict, total=False):
    """Options of `simulate` and `sweep`, by keyword.

    Args:
        eval_every: Number of rounds between evaluations of all clients. None stands for a tenth of
            the rounds.
        chunk: Number of clients vectorised at a time on each device. None stands for 1 on a CPU,
            and for "auto" elsewhere. "auto" measures a few sizes once, on a round of this run (see
            `jaxfl.engine.chunk.fastest`). If the chunk does not fit in memory, it is halved with a
            warning. The chunk changes speed and memory, but no results.
        devices: Devices of the run. None stands for all devices.
        secret_noise: Whether noise, cohorts and private local steps come from 128 fresh bits of the
            system, and not from `key`. The seed of a key may be small enough to guess. The bits lie
            only in the folder's `noise.key`, which only its owner can read. A resumed run needs
            this file. A file that others can read, or that was made for another run, is an error.
            A run with fresh bits cannot be repeated. A sweep draws bits for each point.
        report: "public" leaves out what else follows from private data without noise. In `metrics`
            these are `train_loss`, `update_norm`, `clipped`, `participants`, `nonfinite` and the
            method's own infos. In per_client.npz these are epsilons by client, and how often each
            client took part. All epsilons, also in the statement, are then the epsilons of the
            plan, because the rounds as they happened show who was drawn how often. In the plan
            every client takes part in every round in which it can. Warnings name and count no
            clients. Test scores, checkpoints and the returned arrays remain.
        resume: "auto" resumes from the folder. "never" starts over and replaces its contents.
        progress: Whether to show a bar with round, headline metric and epsilon so far.
        audit: Canaries that take part with the clients. An attacker's success on them bounds
            epsilon from below, in the statement and in audit.npz (see `jaxfl.privacy.audit`, which
            needs the extra `[audit]`). Canaries disturb the model.
    """

    eval_every: int | None
    chunk: int | Literal["auto"] | None
    devices: list[jax.Device] | None
    secret_noise: bool
    report: Literal["full", "public"]
    resume: Literal["auto", "never"]
    progress: bool
    audit: Canaries | None


class MoreOptions(RunOptions, total=False):
    """Options of `simulate` and `sweep` about the global model, besides those of `RunOptions`.

    Args:
        central: Dataset, or its four arrays, on whose test examples the server scores the global
            model at each evaluation. The scores are `central_loss`, `central_accuracy` and so on in
            the rows. The method needs a global model (see `Result.model`). Such a score follows
            from the global model, which the statement covers, and from the server's own examples,
            which must be no client's.
        keep: "best" also keeps the states of the evaluation with the best mean headline score, as
            `Result.best`, and `Result.model` makes its models from them. If no client has test
            examples, the central score decides. No epsilon covers this choice by clients' test
            examples, and the best score is optimistic, because it was chosen. The other fields of
            the result are those of the last round, as with "last".
    """

    central: Dataset | tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None
    keep: Literal["last", "best"]


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
    **options: Unpack[MoreOptions],
) -> Result:
    """Run an algorithm for some rounds and account for its privacy.

    With a folder, the run writes metrics.jsonl, per_client.npz, privacy.json, checkpoints and, with
    matplotlib, curves.png. A later call with the same arguments resumes where the run stopped, for
    whatever reason. It resumes bit-identically, unless it measures another chunk. A finished run is
    read, even from a read-only folder. With more rounds it continues, and its epsilon grows,
    because its noise stays the same. The folder is locked during the run.

    A run that differs in anything that affects results raises an error that names the difference.
    This covers the computations of the method's functions, data, partition, mechanism, key and
    versions (see `jaxfl.run.fingerprint`).

    Args:
        key: Key of all randomness, or a seed, which stands for `jax.random.key(seed)`.
        algorithm: An algorithm from `jaxfl.algorithms`, or your own.
        clients: Clients from `jaxfl.data.make_clients`.
        rounds: T, the number of rounds.
        folder: The run's own folder (see `jaxfl.run.report.run_folder`). None writes nothing.
        states: Place of the client states. "host" keeps them in memory-mapped files, for more
            clients than fit on a device. The files lie in the folder, or, if there is none, in the
            system's temporary folder. Every device has all examples, and the rows of a cohort are
            sent ahead of its round. `states` of the result is then mapped and read-only.
        callbacks: Functions of a copy of all rows of metrics, the newest last. They are called at
            each evaluation, and before a resumed run continues. If one returns True, the run ends
            there (see `jaxfl.callbacks`). Each of several processes calls them. If one raises, the
            others are still called, the run is saved, and then the exception is raised.
        options: Options of `RunOptions` and `MoreOptions`, by keyword.

    Raises:
        ValueError: An argument does not fit. Or the folder holds another run, is in use, or holds
            no intact checkpoint. If only the newest is damaged, the previous one is used.
        FloatingPointError: The server's state turned non-finite, or no update counts any more. The
            message has the round and a remedy.
        KeyboardInterrupt: The run got Ctrl-C or SIGTERM. It ends after the running segment of
            rounds is saved, or at once on the next signal. The message has the round.
    """
    # `checked` has replaced a seed by its key.
    assert isinstance(key, Array)
    folder = None if folder is None else pathlib.Path(folder)
    settings = _Settings(rounds, states=states, **options)
    with contextlib.closing(Lock(folder)) as lock:
        run = _Run(key, [algorithm], None, clients, settings, lock, [folder])
        with entered(callbacks):
            return run.finish_after(algorithm.name, callbacks)[0]


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
    **options: Unpack[MoreOptions],
) -> list[Result]:
    """Run one method with several values of its numbers, or several seeds, in one compiled program.

    The program is compiled once. Up to rounding, the first point of a key has the results of
    `simulate`. The same is true for points with keys of their own, and for all points under
    `paired_noise`. All points advance together, so that a stopped sweep resumes where it was. With
    a folder, each point writes its reports into a folder inside it. A sweep of more than 20 points
    draws no curves.png, but `jaxfl report` draws them.

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
        paired_noise: Whether points of one key also share their cohorts, and their noise up to its
            scale. Differences between the points are then less noisy. But any two of the points
            reveal the clean updates, so at most one may be published.
        keep_states: Whether clients' states stay when all rounds are done. They take the memory of
            points times clients. Otherwise results and folder have no states, so that the folder
            can be read, but not extended.
        numbers: Number of each point, from 0, in a larger sweep of one key, if this sweep is a part
            of it. Parts that run one after the other then draw the cohorts and the noise of the
            larger sweep. None stands for 0, 1, 2, ... among the points of each key.
        options: Options of `RunOptions` and `MoreOptions`, by keyword.

    Raises:
        ValueError: An argument does not fit (see `simulate`), or a value cannot be an argument of a
            compiled program.

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
    rows = [{name: float(column[p]) for name, column in values.items()} for p in range(count)]
    algorithms = [check_instance("build(...)", build(**row), (Algorithm,)) for row in rows]
    columns = {name: np.asarray(column, np.float32) for name, column in values.items()}
    points = Points(build, columns, batch)
    _check_clipped(points, algorithms)
    root = None if folder is None else pathlib.Path(folder)
    folders = [None if root is None else root / name for name in names_of_points(values, count)]
    if numbers is not None and len(numbers) != count:
        raise ValueError(
            f"numbers must have one entry for each of the {count} points, got {len(numbers)}. "
            "Number every point."
        )
    own = None if numbers is None else tuple(numbers)
    if own is not None and not paired_noise:
        check_apart(keys, own)
    settings = _Settings(
        rounds, paired_noise=paired_noise, keep_states=keep_states, numbers=own, **options
    )
    with contextlib.closing(Lock(root)) as lock:
        run = _Run(keys, algorithms, points, clients, settings, lock, folders)
        return run.finish_after(f"{algorithms[0].name}, {count} points", ())


def names_of_points(values: Mapping[str, Sequence[float]], count: int) -> list[str]:
    """Return the names of the folders of a sweep's points."""
    return [
        "_".join([str(p), *(f"{name}={column[p]:g}" for name, column in values.items())])
        for p in range(count)
    ]


def _points(key: Key[Array, "*P"], values: Mapping[str, Sequence[float]]) -> int:
    """Return the number of points, on which keys and columns must agree."""
    # The name of an argument is also a part of a folder's name.
    if wrong := [name for name in values if not name.isidentifier()]:
        raise ValueError(
            f"values must be columns by argument of `build`, got {wrong[0]!r}. "
            "Give names of arguments."
        )
    lengths = {name: len(column) for name, column in values.items()}
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
            "is in multiples of it, got clip=inf. Give a large number, or run that point alone."
        )


def noisy(points: Points) -> bool:
    """Return whether the program of points adds noise, even of size 0.

    It adds none if it leaves no number open.
    """
    found: list[bool] = []

    def note(built: Algorithm) -> Array:
        found.append(built.mechanism.noisy)
        return jnp.zeros(())

    if points.values:
        jax.eval_shape(over_points(note, points))
    return any(found)


class _Settings(NamedTuple):
    """Settings of `simulate` and `sweep` with their defaults, without methods and clients."""

    rounds: int
    states: Literal["device", "host"] = "device"
    paired_noise: bool = False
    keep_states: bool = True
    numbers: tuple[int, ...] | None = None
    eval_every: int | None = None
    chunk: int | Literal["auto"] | None = None
    devices: list[jax.Device] | None = None
    secret_noise: bool = False
    report: Literal["full", "public"] = "full"
    resume: Literal["auto", "never"] = "auto"
    progress: bool = True
    audit: Canaries | None = None
    central: Any = None
    keep: Literal["last", "best"] = "last"

    @property
    def streams(self) -> Streams:
        """Sources of the run's randomness."""
        return Streams(self.secret_noise, self.paired_noise, self.numbers)


def _with_canaries(
    algorithms: list[Algorithm], points: Points | None, canaries: Canaries
) -> tuple[list[Algorithm], Points | None]:
    """Return the methods, and the points that build them, with canaries."""
    for algorithm in algorithms:
        check_audit(algorithm.mechanism)
    if points is not None:
        build = points.build
        points = points._replace(build=lambda **values: build(**values)._replace(audit=canaries))
    return [algorithm._replace(audit=canaries) for algorithm in algorithms], points


class _Run:
    """Loop of the host over the rounds of a run, or of all points of a sweep.

    Args:
        key: Key of the run, or of each point.
        algorithms: Algorithm of the run, or of each point.
        points: Points of a sweep, or None for one run.
        clients: The C clients.
        settings: Settings of the run.
        lock: Lock of the run's folder.
        folders: Folder of the reports of the run, or of each point. None writes nothing.
    """

    def __init__(
        self,
        key: Key[Array, "*P"],
        algorithms: list[Algorithm],
        points: Points | None,
        clients: Clients,
        settings: _Settings,
        lock: Lock,
        folders: list[pathlib.Path | None],
    ) -> None:
        rounds = settings.rounds
        # JAX knows the functions of a method that was built from equal arguments before.
        algorithms[0] = first_made(algorithms[0])
        self.update = check_algorithm(algorithms[0], clients, rounds)
        # The others differ only in numbers, for which a mechanism may still raise an error.
        for other in algorithms[1:]:
            check_mechanism(other, clients, self.update)
        self.rounds = rounds
        self.key = key
        self.clients = clients
        self.points = points
        self.progress = settings.progress
        every = settings.eval_every or max(1, rounds // 10)
        evaluations = sorted({*range(every, rounds + 1, every), rounds})
        folder = lock.folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            report.check_names(folder, [path for path in folders if path is not None])
            if settings.resume == "never":
                lock.take(shared=False)
                report.clear(folder, points is not None)
        if settings.audit is not None:
            algorithms, points = _with_canaries(algorithms, points, settings.audit)
            self.points = points
        split = self._each(lambda key: tuple(jax.random.split(key, 3)))
        init_key, key_of_rounds, self.eval_key = split(key)
        bits = settings.streams.bits(key, folder)
        keys = settings.streams.keys(key_of_rounds, bits)
        method = fingerprint.marked(points or algorithms[0])
        chunk = of_devices(settings.devices).chunk if settings.chunk is None else settings.chunk
        if settings.states == "host":
            states = None if folder is None else folder / report.STATES
            self.runner = Stream(init_key, keys, method, clients, settings.devices, chunk, states)
        else:
            self.runner = Resident(
                init_key, keys, method, clients, settings.devices, chunk, _SEGMENT_ROUNDS
            )
        self.central: Central | None = None
        if settings.central is not None:
            scored = points or algorithms[0]
            self.central = Central(scored, algorithms[0], settings.central, settings.devices)
        self.keeps = settings.keep_states or not self.runner.stateful
        plan = EvaluationSchedule(rounds, evaluations, self.keeps)
        writes = jax.process_index() == 0 and folder is not None and os.access(folder, os.W_OK)
        options = {
            "public": settings.report == "public",
            "facts": settings.streams.describe(key) | {"stateful": self.runner.stateful},
            "pictures": len(algorithms) <= _PICTURES,
            "central": self.central is not None,
            "best": settings.keep == "best",
        }
        # All points have the same shapes of records.
        record = self.runner.record()
        self.journals = [
            Journal(algorithm, clients, plan, record, path if writes else None, **options)
            for algorithm, path in zip(algorithms, folders, strict=True)
        ]
        self.first = self._models() if settings.audit is not None else []
        self.best: BestModels | None = None
        if settings.keep == "best":
            check_kept(self.runner.stateful, settings.states)
            self.best = BestModels(self.journals[0].task, *self._now())
        self.done = 0
        self.restored = 0
        self.saved_at = time.monotonic()
        self.checkpoints: Checkpoints | None = None
        facts: fingerprint.Facts = {}
        if folder is not None or jax.process_count() > 1:
            facts = self._fingerprint(key, init_key, method, algorithms, settings)
            facts |= settings.streams.facts(keys)
            facts |= {} if self.central is None else self.central.facts()
            facts |= {} if self.best is None else {"keep": "best"}
            shared = facts | plan._asdict()
            processes.agree({name: json.dumps(fact) for name, fact in shared.items()})
        if folder is not None:
            self.checkpoints = Checkpoints(folder / report.CHECKPOINTS, facts, plan)
            if settings.resume == "never":
                self.checkpoints.clear()
            else:
                self._restore(lock)
            if self.done == 0:
                bits.begin(facts)
        self.saved = self.done

    def finish_after(self, name: str, callbacks: Sequence[Callback]) -> list[Result]:
        """Run until the last round, or until something stops the run, and write the reports."""
        public = self.journals[0].public
        methods = [journal.algorithm for journal in self.journals]
        self.watch = Watch(name, self.clients, methods, public=public)
        shown = self.progress and jax.process_index() == 0
        if self.restored and self.checkpoints is not None:
            path = self.checkpoints.newest()
            what_follows = "nothing is computed" if self.done == self.rounds else "resuming"
            report.tell(
                f"{name}: round {self.done} of {self.rounds} read from {path}; {what_follows}",
                shown,
            )
        try:
            shown &= self.done < self.rounds
            bar = report.progress_bar(name, self.rounds, shown, self.done)
            with bar as update, signals.deferred() as asked:
                try:
                    self.go(update, callbacks, asked)
                except KeyboardInterrupt:
                    raise signals.stopped(asked(), self._where()) from None
        except Exception as error:
            if self.checkpoints is not None:
                path = self.checkpoints.newest()
                note = f"stopped after round {self.done}; the last checkpoint is {path}"
                if jax.process_count() > 1:
                    process = f"process {jax.process_index()} of {jax.process_count()}"
                    note = f"{process} {note}: start all processes again to resume from it"
                error.add_note(note)
            raise
        finally:
            pairs = zip(self.journals, self._canary_scores())
            results = [journal.finish(self.done, scores) for journal, scores in pairs]
            self.watch.end([journal.recorded.records for journal in self.journals])
        best = [None] * len(results) if self.best is None else self.best.snapshots()
        centers = self._centers()
        states = self._split(self.runner.all_states()) if self.keeps else [()] * len(results)
        return [
            result._replace(
                server=center.server,
                memory=center.memory,
                states=rows,
                restored=self.restored,
                origin=origin,
                best=kept,
            )
            for result, center, rows, origin, kept in zip(
                results, centers, states, self._origins(), best, strict=True
            )
        ]

    def _origins(self) -> list[Origin]:
        """Return what each run's models are made from, besides its states."""
        keys = self._split(self.key)
        pairs = zip(self.journals, keys, strict=True)
        return [Origin(journal.algorithm, self.clients, key) for journal, key in pairs]

    def _centers(self) -> list[Center]:
        """Return each run's part of the shared state, on the devices."""
        center = self.runner.center
        if self.points is None or jax.process_count() > 1:
            return self._split(center)
        # The host splits the arrays, because a device takes a millisecond for each point.
        return everywhere(self.runner.population.mesh, self._split(jax.device_get(center)))

    def _canary_scores(self) -> list[Scores | None]:
        """Return each run's canary scores, on the host.

        They are None without an audit, and if an error has deleted the scores.
        """
        center = self.runner.center
        audited = self.journals[0].algorithm.audit is not None
        if not audited or any(leaf.is_deleted() for leaf in jax.tree.leaves(center)):
            return [None] * len(self.journals)
        scores = self._split(jax.device_get(center.scores))
        return [with_final(*own) for own in zip(scores, self.first, self._models(), strict=True)]

    def _models(self) -> list[np.ndarray | None]:
        """Return each run's model, on the host, or None if the server's state holds none."""
        server = jax.device_get(self.runner.center.server)
        return [model_in(own, self.update) for own in self._split(server)]

    def go(self, update: Callable, callbacks: Sequence[Callback], asked: Callable[[], int]) -> None:
        """Run, evaluate and save until all rounds are done, or until a callback ends the run.

        Args:
            update: Progress function (see `report.Update`).
            callbacks: Callbacks of the run.
            asked: Function that returns the number of a signal, or 0 before the first one.
        """
        pace = math.inf
        program = None
        for budget in callbacks:
            if isinstance(budget, EpsilonBudget):
                budget.begin(self.journals[0].ahead, self.done)
        over = bool(self.journals[0].metrics) and self._call(callbacks)
        while self.done < self.rounds and not processes.maximum(over)[0]:
            if program is None:
                measured = self.runner.chunk == "auto"
                update(self.done, "measuring the chunk" if measured else "compiling")
                program = self.runner.compile(self._facts())
                update(self.done, "running")
            target = self.evaluations[bisect.bisect_right(self.evaluations, self.done)]
            count = int(min(target - self.done, _SEGMENT_ROUNDS, max(1, _SEGMENT_SECONDS // pace)))
            # The first call has one round. It donates the weights, so they are read before it.
            weights = self._models() if self.done == 0 and jax.process_count() == 1 else []
            start = time.monotonic()
            call = functools.partial(self.runner.rounds, self.done, count)
            records = attempt(call, program.chunk)
            if records is None:
                self._begin_again(half(program.chunk))
                program = None
                continue
            pace = (time.monotonic() - start) / count
            self._record(records, count)
            if weights and count == 1:
                infos = [journal.recorded.records.info for journal in self.journals]
                lengths = [float(info["update_norm"][0]) for info in infos]
                self.watch.sent(weights, self._models(), lengths)
            if self.done == target:
                self._evaluate()
                over = self._call(callbacks)
            figures = f"{self._text(count, count * pace)}, chunk {program.chunk}"
            update(self.done, "running", figures)
            late = time.monotonic() - self.saved_at > _CHECKPOINT_SECONDS
            pace, late, stop, over = processes.maximum(pace, late, asked(), over)
            if self.checkpoints and (late or stop or over or self.done == self.rounds):
                self._save(self.checkpoints)
            if stop:
                raise KeyboardInterrupt

    def _begin_again(self, chunk: int) -> None:
        """Return to the last checkpoint, or to the start, because a failed call loses its state."""
        self.runner.begin(chunk)
        for journal in self.journals:
            journal.restore(journal.blank(journal.plan), 0, journal.plan)
        if self.best is not None:
            self.best.kept = self.best.blank()
        done = 0
        if self.checkpoints is not None:
            done = self.checkpoints.restore(self._blank, self._take)
        self.done = done

    def _call(self, callbacks: Sequence[Callback]) -> bool:
        """Call all callbacks, and return whether one ends the run. Save the run if one raises."""
        try:
            return ask(callbacks, self.journals[0].metrics)
        except (Exception, SystemExit):
            # Other processes would not take part in writing a checkpoint.
            if self.checkpoints and jax.process_count() == 1:
                self._save(self.checkpoints)
            raise

    @property
    def evaluations(self) -> list[int]:
        """Numbers of the rounds after which all clients are evaluated."""
        return self.journals[0].evaluations

    def _where(self) -> str:
        """Return the message of a run that a signal ends."""
        if self.checkpoints is None:
            again = "nothing is kept without a folder"
        elif self.saved == self.done:
            again = "the same command resumes from there"
        elif self.saved:
            again = f"the same command resumes from round {self.saved}"
        else:
            again = "the same command resumes from the start"
        return f"stopped after round {self.done} of {self.rounds}; {again}"

    def _record(self, records: Records, count: int) -> None:
        """Add the records of the last `count` rounds to the journals, and warn about problems."""
        for journal, part in zip(self.journals, self._split(records), strict=True):
            journal.record(part, self.done, count)
        # Points of a sweep continue, and their scores show the problem.
        if self.points is None:
            self.journals[0].require_finite(self.done, self.done + count)
        self.done += count
        recorded = [journal.recorded.records for journal in self.journals]
        self.watch.dropped(recorded, self._previous_evaluation(), self.done)

    def _previous_evaluation(self) -> int:
        """Return the round of the last evaluation before the current round, or 0."""
        index = bisect.bisect_left(self.evaluations, self.done)
        return self.evaluations[index - 1] if index else 0

    def _evaluate(self) -> None:
        """Evaluate all clients, and add their scores to the journals."""
        index = bisect.bisect_left(self.evaluations, self.done)
        if self.points is None:
            recorded = self.journals[0].recorded.records
            self.watch.updates(recorded, self._previous_evaluation(), self.done)
        key = self._each(lambda key: jax.random.fold_in(key, self.done))(self.eval_key)
        with scores_may_be_undefined():
            scores = self._split(self.runner.evaluate(key, self.done - 1))
            central = self._central_scores()
        self.watch.scores(scores, self.done)
        for journal, part, score in zip(self.journals, scores, central, strict=True):
            journal.evaluated(index, part, score)
        if self.best is not None:
            self._keep_best(self.best)

    def _keep_best(self, best: BestModels) -> None:
        """Keep the states of the runs whose last evaluation is their best one."""
        rows = [journal.metrics[-1] for journal in self.journals]
        better = best.better(rows)
        # Client states take long to fetch.
        servers, states = self._now() if better else ([], [])
        for i in better:
            best.keep(i, rows[i], servers[i], states[i])

    def _now(self) -> tuple[list[Tree], list[Tree]]:
        """Return each run's present states of the server and, if they are kept, of the clients."""
        servers = self._split(jax.device_get(self.runner.center.server))
        states = self._split(self.runner.all_states()) if self.keeps else [()] * len(servers)
        return servers, states

    def _central_scores(self) -> list[PerClient]:
        """Return each run's scores on the central test set, which are empty without one."""
        if self.central is None:
            return [{}] * len(self.journals)
        server = self.runner.center.server
        return self._split(self.central.evaluate(self.eval_key, server))

    def _text(self, count: int, seconds: float) -> str:
        """Return the figures of the progress bar.

        The figures are headline metric and epsilon of the last evaluation, and clients per second.

        Args:
            count: Number of rounds of the last call.
            seconds: Duration of these rounds.
        """
        headline = self.journals[0].task.headline
        scores = [journal.metrics[-1][headline] for journal in self.journals if journal.metrics]
        known = sorted({value for value in scores if not math.isnan(value)})
        figures = []
        if known:
            ends = dict.fromkeys(known[:1] + known[-1:])
            score = " to ".join(f"{value:.3f}" for value in ends)
            figures.append(f"{headline} {score}")
        if scores:
            rows = [journal.metrics[-1] for journal in self.journals]
            figures.append(report.shown_epsilon(rows))
        last = slice(self.done - count, self.done)
        infos = [journal.recorded.records.info for journal in self.journals]
        rate = sum(info["participants"][last].sum() for info in infos) / seconds
        digits = 0 if rate >= 10 else 1
        return ", ".join([*figures, f"{rate:,.{digits}f} clients/s"])

    def _state(self, made: EvaluationSchedule, recorded: list[Recorded]) -> dict[str, Tree]:
        """Return the state that a checkpoint holds.

        Args:
            made: Plan of the checkpoint, which says whether it holds client states.
            recorded: Records of the run, or of each point.
        """
        state = self.runner.saved()
        if not made.states:
            state = state | {"states": ()}
        if self.best is not None:
            state = state | {"best": self.best.kept}
        return state | {"recorded": recorded}

    def _blank(self, made: EvaluationSchedule) -> dict[str, Tree]:
        """Return a state with the shapes of a checkpoint that was made by this plan."""
        return self._state(made, [journal.blank(made) for journal in self.journals])

    def _save(self, checkpoints: Checkpoints) -> None:
        """Write a checkpoint of the current round."""
        made = EvaluationSchedule(
            self.rounds, self.evaluations, self.keeps or self.done < self.rounds
        )
        recorded = [journal.recorded for journal in self.journals]
        self.runner.save(lambda: checkpoints.save(self.done, self._state(made, recorded), made))
        self.saved_at = time.monotonic()
        self.saved = self.done

    def _restore(self, lock: Lock) -> None:
        """Resume from the folder if it holds a state. A finished run is only read."""
        assert self.checkpoints is not None
        lock.take(shared=self.checkpoints.ends(self.rounds))
        self.restored = self.checkpoints.restore(self._blank, self._take)
        self.done = self.restored
        # A run may be unfinished because its newest checkpoint is damaged.
        if self.done < self.rounds:
            lock.take(shared=False)

    def _take(self, done: int, state: dict[str, Tree], made: EvaluationSchedule) -> None:
        """Resume from a checkpoint's state (see `Checkpoints.restore`)."""
        self.runner.restore(state)
        if self.best is not None:
            self.best.kept = state["best"]
        for journal, recorded in zip(self.journals, state["recorded"], strict=True):
            journal.restore(recorded, done, made)

    def _each(self, work: Callable) -> Callable:
        """Return `work` for a single run, or its vectorised form for all points."""
        return jax.vmap(work) if self.points else work

    def _split(self, tree: Tree) -> list[Tree]:
        """Return the part of each run, as a list of trees."""
        if self.points is None:
            return [tree]
        return [jax.tree.map(lambda leaf, p=p: leaf[p], tree) for p in range(len(self.journals))]

    def _facts(self) -> tuple[str, ...]:
        """Return names on which the best chunk depends, in addition to shapes and devices."""
        algorithm = self.journals[0].algorithm
        return algorithm.name, algorithm.model.name, repr(algorithm.mechanism.sampling)

    def _fingerprint(
        self,
        key: Key[Array, "*P"],
        init_key: Key[Array, "*P"],
        method: Algorithm | Points,
        algorithms: list[Algorithm],
        settings: _Settings,
    ) -> fingerprint.Facts:
        """Return the facts that identify the run (see `jaxfl.run.fingerprint`)."""
        population = self.runner.population
        values = self.points.values if self.points else {}
        model = algorithms[0].model
        facts: fingerprint.Facts = {
            "method": algorithms[0].name,
            "model": model.name,
            "states": settings.states,
        }
        facts |= {f"values.{name}": column.tolist() for name, column in values.items()}
        for p, algorithm in enumerate(algorithms):
            prefix = f"point.{p}." if self.points else ""
            parts = ["mechanism", "dp_sgd"]
            if algorithm.audit is not None:
                parts.append("audit")
            for part in parts:
                facts |= fingerprint.of_value(f"{prefix}{part}", getattr(algorithm, part))
            facts |= fingerprint.of_terms(f"{prefix}terms", algorithm.terms)
        facts |= fingerprint.of_versions(population.mesh) | fingerprint.of_key(key)
        facts |= fingerprint.of_clients(self.clients) | fingerprint.of_frozen(model)

        def of_programs() -> fingerprint.Facts:
            start = fingerprint.start(method, population.clients, init_key)
            programs = {"init": [start], **self.runner.programs(self.eval_key)}
            return fingerprint.of_programs(programs)

        # A program follows from the method, and from the shapes and places of its arguments.
        shapes = key_of_arrays((init_key, self.eval_key))
        method_key = key_of_method(method)
        kind = type(self.runner).__name__
        key_of_programs = ("facts", kind, method_key, described(population), shapes)
        return facts | remembered(key_of_programs, of_programs)
