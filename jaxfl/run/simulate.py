"""A whole run, or a sweep of runs: rounds, evaluation, checkpoints, resume."""

import bisect
import contextlib
import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict, Unpack

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
from jaxfl.callbacks import Callback, EpsilonBudget, ask, check_callbacks, opened
from jaxfl.engine import processes
from jaxfl.engine.chunk import attempt, half
from jaxfl.engine.memo import described, key_of_arrays, key_of_method, remembered
from jaxfl.engine.mesh import everywhere
from jaxfl.engine.program import Points, over_points
from jaxfl.engine.resident import Resident
from jaxfl.engine.round import Center, Records
from jaxfl.engine.streamed import Stream
from jaxfl.privacy.audit import Canaries, Scores, audited, model_in, unaudited, with_final
from jaxfl.run import fingerprint, report, signals
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
from jaxfl.run.lock import Lock
from jaxfl.run.randomness import Streams, check_apart
from jaxfl.run.recorder import Journal, Plan, Recorded, Result
from jaxfl.types import Algorithm, Clients, Tree

_SEGMENT_SECONDS = 10.0
"""Duration of the rounds of one call: short enough for progress and signals."""

_SEGMENT_ROUNDS = 16
"""At most so many rounds of one call, however many a run has: the program of a longer run is the same."""

_CHECKPOINT_SECONDS = 30.0

_PICTURES = 20
"""Points of a sweep up to which each has a picture, which takes a third of a second."""

CHECKS = {
    "clients": check_clients,
    "chunk": check_chunk,
    "devices": check_devices,
    "folder": check_path,
    "rounds": functools.partial(check_count, most=2**31 - 1),  # programs count rounds in 32 bits
}
"""Checks of the arguments that `simulate` and `sweep` share."""


class RunOptions(TypedDict, total=False):
    """Options of `simulate` and `sweep`, by keyword.

    Args:
        eval_every: rounds between evaluations of all clients (default: a tenth of the rounds).
        chunk: clients vectorised at a time on each device; None: 1 on a CPU, "auto" elsewhere. "auto" measures a few
            sizes on a round of this run, once (see `jaxfl.engine.chunk.fastest`). Halved, with a warning, where memory
            does not hold it. Changes speed and memory, not results.
        devices: where to run (default: all devices).
        secret_noise: draw noise, cohorts and private local steps from 128 fresh bits of the system in place of `key`,
            whose seed may be small enough to guess. They lie only in the folder's `noise.key`, which its owner alone
            can read and a resumed run needs. A key that others can read, or that was made for another run, is an
            error. The run cannot be repeated. A sweep draws bits for each point.
        report: "public" leaves out what else follows from private data without noise: `train_loss`, `update_norm`,
            `clipped`, `participants`, `nonfinite` and the method's own infos in `metrics`, and how often each client
            took part in per_client.npz, and epsilons by client. All epsilons, of the statement too, are those of the
            plan, in which every client takes part in every round that it can: the rounds as they happened show who was
            drawn how often. Warnings name and count no clients. Test scores, checkpoints and the arrays that are
            returned remain.
        resume: "auto" resumes from the folder; "never" starts over and replaces its contents.
        progress: show a bar with round, headline metric and epsilon so far.
        audit: canaries that take part beside the clients; what an attacker tells of them bounds epsilon from below, in
            the statement and in audit.npz (see `jaxfl.privacy.audit`; extra `[audit]`). They disturb the model.
    """

    eval_every: int | None
    chunk: int | Literal["auto"] | None
    devices: list[jax.Device] | None
    secret_noise: bool
    report: Literal["full", "public"]
    resume: Literal["auto", "never"]
    progress: bool
    audit: Canaries | None


@under_own_flags
@checked(key=check_one_key, callbacks=check_callbacks, **CHECKS)
def simulate(
    key: Key[Array, ""] | int,
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    folder: str | os.PathLike | None = None,
    states: Literal["device", "host"] = "device",
    callbacks: Sequence[Callback] = (),
    **options: Unpack[RunOptions],
) -> Result:
    """Run an algorithm for some rounds and account for its privacy.

    With a folder, the run writes metrics.jsonl, per_client.npz, privacy.json, checkpoints and, with matplotlib,
    curves.png, and a later call with the same arguments resumes where it stopped, whatever stopped it:
    bit-identically, unless another chunk is measured. A finished run is read, even from a read-only folder; asked
    for more rounds, it goes on with the noise that it has, and its epsilon grows. The folder is locked meanwhile. A
    run that differs in anything that affects results is refused: in what the method's functions compute, in data,
    partition, mechanism, key, or versions (see `jaxfl.run.fingerprint`).

    Args:
        key: the whole run's randomness, or a seed, which stands for `jax.random.key(seed)`.
        algorithm: from `jaxfl.algorithms`, or your own.
        clients: from `jaxfl.data.make_clients`.
        rounds: T.
        folder: the run's own folder (see `jaxfl.run.report.run_folder`); None writes nothing.
        states: where client states are kept. "host": in memory-mapped files in the folder (without one: in the system's
            temporary folder), for more clients than a device holds; every device has all examples, and the rows of a
            cohort are sent ahead of its round. `states` of the result is then mapped and read-only.
        callbacks: called with a copy of all rows of metrics, the newest last, at each evaluation and before a resumed
            run goes on. If one returns True, the run ends there (see `jaxfl.callbacks`). Each of several processes
            calls them. All are called, even if one raises; the run is then saved, and the exception raised.
        options: see `RunOptions`.

    Raises:
        ValueError: an argument does not fit, or the folder holds another run, is in use, or holds no checkpoint that
            is intact (a damaged one is reported, and the previous one is used).
        FloatingPointError: the server's state turned non-finite, or no update counts any more; names the round and the
            remedy.
        KeyboardInterrupt: on Ctrl-C or SIGTERM, after the running segment of rounds is saved, or at once on the next
            signal; names the round.
    """
    assert isinstance(key, Array)  # seeds have become keys
    folder = None if folder is None else pathlib.Path(folder)
    settings = _Settings(rounds, states=states, **options)
    with contextlib.closing(Lock(folder)) as lock:
        run = _Run(key, [algorithm], None, clients, settings, lock, [folder])
        with opened(callbacks):
            return run.finish_after(algorithm.name, callbacks)[0]


@under_own_flags
@checked(
    key=check_key, values=check_values, numbers=functools.partial(check_counts, least=0), **CHECKS
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
    **options: Unpack[RunOptions],
) -> list[Result]:
    """Run one method with several values of its numbers, or several seeds, in one compiled program.

    The program is compiled once. Up to rounding, the first point of a key has the results of `simulate`, and so have
    points with keys of their own, and all points under `paired_noise`. All points advance together: a stopped sweep
    goes on where it was. With a folder, each point writes its reports into a folder below, of more than 20 points
    without curves.png (`jaxfl report` draws them).

    Args:
        key: one, or a seed, for all points, which then share all randomness but cohorts and noise (`paired_noise`), or
            one key per point `[P]`.
        build: keyword arguments to algorithm, for instance `functools.partial(dp_pfeddsu, model, ...)`. Values may be
            learning rates, clip bounds, noise multipliers, weights of penalties, densities: numbers that decide
            neither shapes nor Python branches.
        values: columns of P numbers, by argument; may be empty where keys differ.
        clients: the same for all points.
        rounds: T.
        folder: for the whole sweep; None writes nothing.
        batch: points vectorised at a time; None: one after the other, in the same program (best on a CPU).
        paired_noise: points of one key also share their cohorts, and their noise up to its scale. Differences between
            them are then less noisy, but any two of them reveal the clean updates: at most one may be published.
        keep_states: whether clients' states stay when all rounds are done, as many as points times clients. If not,
            results have none, and neither has the folder, which can be read then but not extended.
        numbers: of the points in a larger sweep of one key, of which this sweep is a part, from 0. Parts that run one
            after the other then draw the cohorts and the noise that the points have in the whole. None: 0, 1, 2, ...
            among the points of each key.
        options: see `RunOptions`.

    Raises:
        ValueError: also where a value cannot be an argument of a compiled program.

    >>> from functools import partial
    >>> from jaxfl.algorithms import fedprox
    >>> from jaxfl.data import iid, load, make_clients, matching
    >>> from jaxfl.models import mlp
    >>> digits = load("digits")
    >>> rows = iid(digits.train_labels, 20, seed=0)
    >>> clients = make_clients(digits, rows, matching(rows, digits.train_labels, digits.test_labels, seed=0))
    >>> method = partial(fedprox, mlp((8, 8, 1), 10, hidden=(16,)))
    >>> results = sweep(jax.random.key(0), method, {"mu": [0.0, 0.1]}, clients, rounds=1, progress=False)
    >>> len(results)
    2
    """
    assert isinstance(key, Array)
    count = _points(key, values)
    keys = jnp.broadcast_to(key, (count,))
    rows = [{name: float(column[p]) for name, column in values.items()} for p in range(count)]
    algorithms = [check_instance("build(...)", build(**row), (Algorithm,)) for row in rows]
    points = Points(
        build, {name: np.asarray(column, np.float32) for name, column in values.items()}, batch
    )
    _check_clipped(points, algorithms)
    root = None if folder is None else pathlib.Path(folder)
    folders = [None if root is None else root / name for name in names_of_points(values, count)]
    if numbers is not None and len(numbers) != count:
        raise ValueError(
            f"numbers must have one entry for each of the {count} points, got {len(numbers)}."
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
    """Number of points, where keys and columns agree on it."""
    if wrong := [
        name for name in values if not name.isidentifier()
    ]:  # a name is part of a folder's, too
        raise ValueError(f"values[{wrong[0]!r}]: give names of arguments of `build`")
    lengths = {name: len(column) for name, column in values.items()}
    if jnp.ndim(key):
        lengths["key"] = len(key)
    if len(set(lengths.values())) != 1 or not max(lengths.values()):
        raise ValueError(
            f"lengths {lengths!r} of the columns: give columns, or keys, of one length of at least 1"
        )
    return next(iter(lengths.values()))


def _check_clipped(points: Points, algorithms: Sequence[Algorithm]) -> None:
    """Require finite clip bounds where the points' one program adds noise, were it of size 0."""
    unclipped = [
        p for p, algorithm in enumerate(algorithms) if math.isinf(algorithm.mechanism.clip)
    ]
    if unclipped and noisy(points):
        raise ValueError(
            f"values of point {unclipped[0]}: clip=inf in a sweep with noise, which is in multiples of it: "
            "give a large number, or make that point a run of its own"
        )


def noisy(points: Points) -> bool:
    """Return whether the one program of points adds noise, were it of size 0; not where it leaves no number open."""
    found: list[bool] = []

    def note(built: Algorithm) -> Array:
        found.append(built.mechanism.noisy)
        return jnp.zeros(())

    if points.values:
        jax.eval_shape(over_points(note, points))
    return any(found)


class _Settings(NamedTuple):
    """Settings of `simulate` and `sweep` besides what to run, with their defaults."""

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

    @property
    def streams(self) -> Streams:
        """Where randomness comes from."""
        return Streams(self.secret_noise, self.paired_noise, self.numbers)


def _with_canaries(
    algorithms: list[Algorithm], points: Points | None, canaries: Canaries
) -> tuple[list[Algorithm], Points | None]:
    """The same methods, and how they are built, under audit."""

    def watched(algorithm: Algorithm) -> Algorithm:
        return algorithm._replace(mechanism=audited(algorithm.mechanism, canaries))

    if points is not None:
        build = points.build
        points = points._replace(build=lambda **values: watched(build(**values)))
    return [watched(algorithm) for algorithm in algorithms], points


class _Run:
    """The host's loop over rounds, of one run or of all points of a sweep, and their checkpoints."""

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
        first = algorithms[0]
        algorithms[0] = remembered(("method", key_of_method(first)), lambda: first)
        self.update = check_algorithm(algorithms[0], clients, rounds)
        for other in algorithms[
            1:
        ]:  # they differ only in numbers, which a mechanism may still refuse
            check_mechanism(other, clients, self.update)
        self.rounds, self.clients, self.points, self.progress = (
            rounds,
            clients,
            points,
            settings.progress,
        )
        every = settings.eval_every or max(1, rounds // 10)
        evaluations = sorted({*range(every, rounds + 1, every), rounds})
        folder = lock.folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            report.check_names(folder, [path for path in folders if path is not None])
            if settings.resume == "never":
                lock.take(shared=False)
                report.clear(folder, points is not None)
        plain = algorithms
        if settings.audit is not None:
            algorithms, points = _with_canaries(algorithms, points, settings.audit)
            self.points = points
        init_key, key_of_rounds, self.eval_key = self._each(
            lambda key: tuple(jax.random.split(key, 3))
        )(key)
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
        self.keeps = settings.keep_states or not self.runner.stateful
        plan = Plan(rounds, evaluations, self.keeps)
        public, told = (
            settings.report == "public",
            settings.streams.describe(key) | {"stateful": self.runner.stateful},
        )
        writes = jax.process_index() == 0 and folder is not None and os.access(folder, os.W_OK)
        options = {"public": public, "facts": told, "pictures": len(algorithms) <= _PICTURES}
        record = self.runner.record()  # once: it is the same for all points
        self.journals = [
            Journal(algorithm, clients, plan, record, path if writes else None, **options)
            for algorithm, path in zip(plain, folders, strict=True)
        ]
        self.first = self._models() if settings.audit is not None else []
        self.done, self.restored, self.saved_at, self.checkpoints = 0, 0, time.monotonic(), None
        facts: fingerprint.Facts = {}
        if folder is not None or jax.process_count() > 1:
            facts = self._fingerprint(
                key, init_key, method, algorithms, settings
            ) | settings.streams.facts(keys)
            processes.agree(
                {name: json.dumps(fact) for name, fact in (facts | plan._asdict()).items()}
            )
        if folder is not None:
            self.checkpoints = Checkpoints(folder / report.CHECKPOINTS, facts, plan)
            if settings.resume == "never":
                self.checkpoints.clear()
            else:
                self._restore(lock)
            if self.done == 0:
                bits.begin(facts)
        self.kept = self.done

    def finish_after(self, name: str, callbacks: Sequence[Callback]) -> list[Result]:
        """Run to the end, or until something stops it, and write the reports."""
        public = self.journals[0].public
        self.watch = Watch(
            name, self.clients, [journal.algorithm for journal in self.journals], public=public
        )
        shown = self.progress and jax.process_index() == 0
        if self.restored and self.checkpoints is not None:
            read = (
                f"{name}: round {self.done} of {self.rounds} read from {self.checkpoints.newest()}"
            )
            report.tell(
                f"{read}; {'nothing is computed' if self.done == self.rounds else 'going on'}",
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
                several = jax.process_count() > 1
                who = f"process {jax.process_index()} of {jax.process_count()} " if several else ""
                where = f"{who}stopped after round {self.done}; the last checkpoint is {self.checkpoints.newest()}"
                error.add_note(
                    f"{where}: start all processes again to go on from it" if several else where
                )
            raise
        finally:
            memories = self._memories()
            results = [
                journal.finish(self.done, memory)
                for journal, memory in zip(self.journals, memories)
            ]
            self.watch.end([journal.recorded.records for journal in self.journals])
        centers = self._centers()
        states = self._split(self.runner.all_states()) if self.keeps else [()] * len(results)
        return [
            result._replace(
                server=center.server,
                memory=unaudited(center.memory),
                states=rows,
                restored=self.restored,
            )
            for result, center, rows in zip(results, centers, states, strict=True)
        ]

    def _centers(self) -> list[Center]:
        """Each run's part of the shared state, on the devices."""
        center = self.runner.center
        if self.points is None or jax.process_count() > 1:
            return self._split(center)
        # By way of the host: to cut an array on a device takes a millisecond for each point.
        return everywhere(self.runner.population.mesh, self._split(jax.device_get(center)))

    def _memories(self) -> list[Tree]:
        """Each run's canary scores, on the host; nothing without an audit, or where an error has left none."""
        center = self.runner.center
        if not isinstance(center.memory, Scores) or any(
            leaf.is_deleted() for leaf in jax.tree.leaves(center)
        ):
            return self._split(())
        scores = self._split(jax.device_get(center.memory))
        return [with_final(*own) for own in zip(scores, self.first, self._models(), strict=True)]

    def _models(self) -> list[np.ndarray | None]:
        """Each run's model, on the host, where the server's state holds one."""
        server = jax.device_get(self.runner.center.server)
        return [model_in(own, self.update) for own in self._split(server)]

    def go(self, update: Callable, callbacks: Sequence[Callback], asked: Callable[[], int]) -> None:
        """Run, evaluate and save until all rounds are done, or a callback ends it."""
        pace, program = math.inf, None
        for budget in callbacks:
            if isinstance(budget, EpsilonBudget):
                budget.begin(self.journals[0].ahead, self.done)
        over = bool(self.journals[0].metrics) and self._call(callbacks)
        while self.done < self.rounds and not processes.largest(over)[0]:
            if program is None:
                update(
                    self.done, "measuring the chunk" if self.runner.chunk == "auto" else "compiling"
                )
                program = self.runner.compile(self._facts())
                update(self.done, "running")
            target = self.evaluations[bisect.bisect_right(self.evaluations, self.done)]
            count = int(min(target - self.done, _SEGMENT_ROUNDS, max(1, _SEGMENT_SECONDS // pace)))
            # The first call has one round. Its arguments are donated, so that its weights are read before.
            weights = self._models() if self.done == 0 and jax.process_count() == 1 else []
            start = time.monotonic()
            records = attempt(
                functools.partial(self.runner.rounds, self.done, count), program.chunk
            )
            if records is None:
                self._begin_again(half(program.chunk))
                program = None
                continue
            pace = (time.monotonic() - start) / count
            self._record(records, count)
            if weights and count == 1:
                lengths = [
                    float(journal.recorded.records.info["update_norm"][0])
                    for journal in self.journals
                ]
                self.watch.sent(weights, self._models(), lengths)
            if self.done == target:
                self._evaluate()
                over = self._call(callbacks)
            update(
                self.done, "running", f"{self._text(count, count * pace)}, chunk {program.chunk}"
            )
            late = time.monotonic() - self.saved_at > _CHECKPOINT_SECONDS
            pace, late, stop, over = processes.largest(pace, late, asked(), over)
            if self.checkpoints and (late or stop or over or self.done == self.rounds):
                self._save(self.checkpoints)
            if stop:
                raise KeyboardInterrupt

    def _begin_again(self, chunk: int) -> None:
        """Go back to the last checkpoint, or to the start: what a call that fails was given is lost."""
        self.runner.begin(chunk)
        for journal in self.journals:
            journal.restore(journal.blank(journal.plan), 0, journal.plan)
        self.done = (
            0 if self.checkpoints is None else self.checkpoints.restore(self._blank, self._take)
        )

    def _call(self, callbacks: Sequence[Callback]) -> bool:
        """Call all of them; whether one ends the run. If one fails, what was computed is kept."""
        try:
            return ask(callbacks, self.journals[0].metrics)
        except (Exception, SystemExit):
            if (
                self.checkpoints and jax.process_count() == 1
            ):  # others would not come to write their part
                self._save(self.checkpoints)
            raise

    @property
    def evaluations(self) -> list[int]:
        """Numbers of the rounds after which all clients are evaluated."""
        return self.journals[0].evaluations

    def _where(self) -> str:
        """The message of a run that a signal ends."""
        again = "nothing is kept without a folder"
        if self.checkpoints is not None:
            earlier = f"round {self.kept}" if self.kept else "the start"
            again = (
                f"the same command goes on from {'there' if self.kept == self.done else earlier}"
            )
        return f"stopped after round {self.done} of {self.rounds}; {again}"

    def _record(self, records: Records, count: int) -> None:
        for journal, part in zip(self.journals, self._split(records), strict=True):
            journal.record(part, self.done, count)
        if self.points is None:  # points of a sweep go on, and their scores tell
            self.journals[0].require_finite(self.done, self.done + count)
        self.done += count
        earlier = bisect.bisect_left(self.evaluations, self.done)
        evaluated = self.evaluations[earlier - 1] if earlier else 0
        self.watch.dropped(
            [journal.recorded.records for journal in self.journals], evaluated, self.done
        )

    def _evaluate(self) -> None:
        index = bisect.bisect_left(self.evaluations, self.done)
        if self.points is None:
            self.watch.updates(
                self.journals[0].recorded.records,
                self.evaluations[index - 1] if index else 0,
                self.done,
            )
        key = self._each(lambda key: jax.random.fold_in(key, self.done))(self.eval_key)
        with scores_may_be_undefined():
            scores = self._split(self.runner.evaluate(key, self.done - 1))
        self.watch.scores(scores, self.done)
        for journal, part in zip(self.journals, scores, strict=True):
            journal.evaluated(index, part)

    def _text(self, count: int, seconds: float) -> str:
        """Return headline metric and epsilon of the last evaluation, and clients per second, for the progress bar."""
        headline = self.journals[0].task.headline
        scores = [journal.metrics[-1][headline] for journal in self.journals if journal.metrics]
        known = sorted({value for value in scores if not math.isnan(value)})
        score = " to ".join(f"{value:.3f}" for value in dict.fromkeys(known[:1] + known[-1:]))
        last = slice(self.done - count, self.done)
        rate = (
            sum(
                journal.recorded.records.info["participants"][last].sum()
                for journal in self.journals
            )
            / seconds
        )
        figures = [f"{headline} {score}"] if known else []
        figures += (
            [report.shown_epsilon([journal.metrics[-1] for journal in self.journals])]
            if scores
            else []
        )
        return ", ".join([*figures, f"{rate:,.{0 if rate >= 10 else 1}f} clients/s"])

    def _state(self, made: Plan, recorded: list[Recorded]) -> dict[str, Tree]:
        """What a checkpoint keeps, with records of such a plan."""
        return (
            self.runner.saved() | ({} if made.states else {"states": ()}) | {"recorded": recorded}
        )

    def _blank(self, made: Plan) -> dict[str, Tree]:
        """Shapes of what one of such a plan has kept."""
        return self._state(made, [journal.blank(made) for journal in self.journals])

    def _save(self, checkpoints: Checkpoints) -> None:
        made = Plan(self.rounds, self.evaluations, self.keeps or self.done < self.rounds)
        recorded = [journal.recorded for journal in self.journals]
        self.runner.save(lambda: checkpoints.save(self.done, self._state(made, recorded), made))
        self.saved_at, self.kept = time.monotonic(), self.done

    def _restore(self, lock: Lock) -> None:
        """Resume from the folder, if it holds a state; a finished run is only read."""
        assert self.checkpoints is not None
        lock.take(shared=self.checkpoints.ends(self.rounds))
        self.done = self.restored = self.checkpoints.restore(self._blank, self._take)
        if self.done < self.rounds:  # the newest may have been damaged
            lock.take(shared=False)

    def _take(self, done: int, state: dict[str, Tree], made: Plan) -> None:
        """Resume from a state."""
        self.runner.restore(state)
        for journal, recorded in zip(self.journals, state["recorded"], strict=True):
            journal.restore(recorded, done, made)

    def _each(self, work: Callable) -> Callable:
        """`work` for one run, or for every point."""
        return jax.vmap(work) if self.points else work

    def _split(self, tree: Tree) -> list[Tree]:
        """A tree of each run."""
        if self.points is None:
            return [tree]
        return [jax.tree.map(lambda leaf, p=p: leaf[p], tree) for p in range(len(self.journals))]

    def _facts(self) -> tuple[str, ...]:
        """What the best chunk depends on besides shapes and devices."""
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
        population = self.runner.population
        values = self.points.values if self.points else {}
        facts: fingerprint.Facts = {"method": algorithms[0].name, "model": algorithms[0].model.name}
        facts |= {"states": settings.states}
        facts |= {f"values.{name}": column.tolist() for name, column in values.items()}
        for p, algorithm in enumerate(algorithms):
            prefix = f"point.{p}." if self.points else ""
            for part in ("mechanism", "dp_sgd"):
                facts |= fingerprint.of_value(f"{prefix}{part}", getattr(algorithm, part))
            facts |= fingerprint.of_terms(f"{prefix}terms", algorithm.terms)
        facts |= fingerprint.of_versions(population.mesh) | fingerprint.of_key(key)
        facts |= fingerprint.of_clients(self.clients) | fingerprint.of_frozen(algorithms[0].model)

        def of_programs() -> fingerprint.Facts:
            start = fingerprint.start(method, population.clients, init_key)
            programs = {"init": [start], **self.runner.programs(self.eval_key)}
            return fingerprint.of_programs(programs)

        # A program follows from the method and from the shapes and places of what it is given.
        shapes = key_of_arrays((init_key, self.eval_key))
        method_key = key_of_method(method)
        kind = type(self.runner).__name__
        key_of_programs = ("facts", kind, method_key, described(population), shapes)
        return facts | remembered(key_of_programs, of_programs)
