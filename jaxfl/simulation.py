"""A whole run, or a sweep of runs: rounds, evaluation, checkpoints, resume."""

import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl import hosts, report, signals
from jaxfl._validate import check_choice, check_count
from jaxfl.backend import of_devices
from jaxfl.checkpoint import Checkpoints
from jaxfl.chunks import Program
from jaxfl.engine import Points, Population, Records
from jaxfl.evaluate import PerClient
from jaxfl.health import Watch
from jaxfl.journal import Journal, Result
from jaxfl.randomness import Streams
from jaxfl.report import tensorboard_writer
from jaxfl.resident import Resident
from jaxfl.stream import Stream
from jaxfl.types import Algorithm, Clients, Tree

_SEGMENT_SECONDS = 10.0
"""Rounds between two looks at the host: short enough for progress and signals."""

_CHECKPOINT_SECONDS = 30.0


def simulate(
    key: Key[Array, ""],
    algorithm: Algorithm,
    clients: Clients,
    *,
    rounds: int,
    eval_every: int | None = None,
    chunk: int | Literal["auto"] | None = None,
    devices: list[jax.Device] | None = None,
    store: Literal["device", "host"] = "device",
    folder: str | os.PathLike | None = None,
    secret_noise: bool = False,
    report: Literal["full", "public"] = "full",
    progress: bool = True,
    tensorboard: bool = False,
) -> Result:
    """Run an algorithm for some rounds and account for it.

    With a folder, the run writes metrics.jsonl, per_client.npz, privacy.json, curves.png and checkpoints, and a
    later call with the same arguments goes on where it stopped, whatever stopped it: bit-identically, unless another
    chunk is measured.

    Args:
        key: the whole run's randomness.
        algorithm: from `jaxfl.algorithms`, or your own.
        clients: from `jaxfl.data.make_clients`.
        rounds: T.
        eval_every: rounds between evaluations of all clients (default: a tenth of the rounds).
        chunk: clients vectorised at a time on each device; None: 1 on a CPU, "auto" elsewhere. "auto" measures a few
            sizes on a round of this run, once (see `jaxfl.chunks.fastest`). Halved, with a warning, where memory does
            not hold it. Changes speed and memory, not results.
        devices: where to run (default: all devices).
        store: where client states are kept. "host": in memory-mapped files in the folder (without one: in the system's
            temporary folder), for more clients than a device holds; every device has all examples, and the rows of a
            cohort are sent ahead of its round. `states` of the result is then mapped and read-only.
        folder: the run's own folder (see `jaxfl.report.run_folder`); None writes nothing.
        secret_noise: draw 128 fresh bits of the system for noise, cohorts and private local steps, in place of `key`,
            from which a small seed can be found by trying. They lie in the folder's `noise.key` alone, which only its
            owner can read and a resumed run needs. The run cannot be repeated.
        report: "public" leaves out what else follows from private data without noise: `train_loss`, `update_norm`,
            `clipped`, `participants`, `nonfinite` and what the method reports by itself in `metrics`, and how often
            each client took part in per_client.npz. Accuracies, checkpoints and the returned ledger remain.
        progress: show a bar with round, accuracy and epsilon so far.
        tensorboard: also write event files into the folder (extra `[tb]`).

    Raises:
        ValueError: an argument does not fit, or the folder holds another run.
        FloatingPointError: the server's state turned non-finite, or no update counts any more; names the round and the
            remedy.
        KeyboardInterrupt: on Ctrl-C or SIGTERM, after the running segment of rounds is saved, and at once on the next
            one; says after which round.
    """
    folder = None if folder is None else pathlib.Path(folder)
    with tensorboard_writer(folder, tensorboard) as log:
        streams = Streams(secret=secret_noise)
        run = _Run(
            key,
            streams,
            [algorithm],
            None,
            clients,
            rounds,
            eval_every,
            chunk,
            devices,
            store,
            folder,
            [folder],
            report,
        )
        return run.finish_after(algorithm.name, progress, log)[0]


def sweep(
    key: Key[Array, "*P"],
    build: Callable[..., Algorithm],
    values: Mapping[str, Sequence[float]],
    clients: Clients,
    *,
    rounds: int,
    eval_every: int | None = None,
    batch: int | None = None,
    chunk: int | Literal["auto"] | None = None,
    devices: list[jax.Device] | None = None,
    folder: str | os.PathLike | None = None,
    paired_noise: bool = False,
    secret_noise: bool = False,
    report: Literal["full", "public"] = "full",
    progress: bool = True,
) -> list[Result]:
    """Run one method with several values of its numbers, or several seeds, in one compiled program.

    Results are those of `simulate`, up to rounding; the program is compiled once. All points advance together: a
    stopped sweep goes on where it was. With a folder, each point writes its reports into a folder below.

    Args:
        key: one for all points, which then share all randomness but the noise (`paired_noise`), or one per point `[P]`.
        build: keyword arguments to algorithm, for instance `functools.partial(dp_pfeddsu, model, ...)`. Values may be
            learning rates, clip bounds, noise multipliers, weights of penalties, densities: numbers that decide
            neither shapes nor Python branches.
        values: columns of P numbers, by argument; may be empty where keys differ.
        clients: the same for all points.
        rounds: T.
        eval_every: as in `simulate`.
        batch: points vectorised at a time; None: one after the other, in the same program (best on a CPU).
        chunk: clients vectorised at a time, as in `simulate`.
        devices: as in `simulate`.
        folder: of the whole sweep; None writes nothing.
        paired_noise: points of one key also share their noise, up to its scale. Differences between them are then less
            noisy, but from two of them everyone can tell the clean updates: at most one may be published.
        secret_noise: as in `simulate`, for each point anew.
        report: as in `simulate`.
        progress: as in `simulate`.

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
    count = _points(key, values)
    keys = jnp.broadcast_to(key, (count,))
    if batch is not None:
        check_count("batch", batch)
    rows = [{name: float(column[p]) for name, column in values.items()} for p in range(count)]
    algorithms = [build(**row) for row in rows]
    points = Points(build, {name: np.asarray(column, np.float32) for name, column in values.items()}, batch)
    root = None if folder is None else pathlib.Path(folder)
    names = ["_".join([str(p), *(f"{name}={value:g}" for name, value in row.items())]) for p, row in enumerate(rows)]
    folders = [None if root is None else root / name for name in names]
    streams = Streams(secret=secret_noise, paired=paired_noise)
    run = _Run(
        keys, streams, algorithms, points, clients, rounds, eval_every, chunk, devices, "device", root, folders, report
    )
    return run.finish_after(f"{algorithms[0].name}, {count} points", progress, lambda row: None)


def _points(key: Key[Array, "*P"], values: Mapping[str, Sequence[float]]) -> int:
    """Number of points, where keys and columns agree on it."""
    lengths = {name: len(column) for name, column in values.items()}
    if jnp.ndim(key):
        lengths["key"] = len(key)
    if len(set(lengths.values())) != 1 or not max(lengths.values()):
        raise ValueError(f"lengths {lengths!r} of the columns: give columns, or keys, of one length of at least 1")
    return next(iter(lengths.values()))


class Runner(Protocol):
    """State of a run, and the programs that advance it: on the devices (`Resident`), or streamed to them (`Stream`)."""

    server: Tree
    population: Population

    def record(self) -> Records:
        """Shapes of what one round of one run reports."""
        ...

    def compile(self, facts: tuple[str, ...]) -> Program:
        """Choose the chunk, and compile for it; `facts` is what a remembered choice depends on besides shapes."""
        ...

    def rounds(self, start: int, count: int) -> Records:
        """Some rounds, from the one of number `start`; what they report, on the host, in at least `count` rows."""
        ...

    def evaluate(self, key: Key[Array, "*P"]) -> PerClient:
        """Scores of all clients, on the host."""
        ...

    def saved(self) -> dict[str, Tree]:
        """What a checkpoint keeps."""
        ...

    def save(self, write: Callable[[], Any]) -> None:
        """Let `write` write a checkpoint."""
        ...

    def restore(self, saved: dict[str, Tree]) -> None:
        """Go on from what a checkpoint kept."""
        ...

    def all_states(self) -> Tree:
        """Client states."""
        ...


class _Run:
    """The host's loop over rounds, of one run or of all points of a sweep, and their checkpoints."""

    def __init__(
        self,
        key: Key[Array, "*P"],
        streams: Streams,
        algorithms: list[Algorithm],
        points: Points | None,
        clients: Clients,
        rounds: int,
        eval_every: int | None,
        chunk: int | Literal["auto"] | None,
        devices: list[jax.Device] | None,
        store: Literal["device", "host"],
        folder: pathlib.Path | None,
        folders: list[pathlib.Path | None],
        shown: Literal["full", "public"],
    ) -> None:
        check_count("rounds", rounds)
        check_choice("store", store, ("device", "host"))
        check_choice("report", shown, ("full", "public"))
        if chunk not in (None, "auto"):
            check_count("chunk", chunk)
        eval_every = max(1, rounds // 10) if eval_every is None else eval_every
        check_count("eval_every", eval_every)
        for algorithm in algorithms:
            algorithm.mechanism.check_fits(clients.number, rounds)
        self.rounds, self.clients, self.points = rounds, clients, points
        self.evaluations = sorted({*range(eval_every, rounds + 1, eval_every), rounds})
        init_key, key_of_rounds, self.eval_key = self._each(lambda key: tuple(jax.random.split(key, 3)))(key)
        keys, self.streams = streams.keys(key_of_rounds, folder), streams
        chunk = of_devices(devices).chunk if chunk is None else chunk
        if store == "host":
            states = None if folder is None else folder / report.STATES
            self.runner: Runner = Stream(init_key, keys, algorithms[0], clients, devices, chunk, states)
        else:
            segment = int(max(np.diff([0, *self.evaluations])))
            what = points or algorithms[0]
            self.runner = Resident(init_key, keys, what, clients, devices, chunk, segment)
        blank = jax.tree.map(lambda leaf: np.zeros((rounds, *leaf.shape), leaf.dtype), self.runner.record())
        writes = jax.process_index() == 0
        self.journals = [
            Journal(algorithm, clients, self.evaluations, blank, own if writes else None, public=shown == "public")
            for algorithm, own in zip(algorithms, folders, strict=True)
        ]
        self.done, self.saved_at, self.checkpoints = 0, time.monotonic(), None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            fingerprint = self._fingerprint(key, algorithms, store)
            self.checkpoints = Checkpoints(folder / report.CHECKPOINTS, fingerprint)
            self._restore()
        self.kept = self.done

    def finish_after(self, name: str, progress: bool, log: Callable) -> list[Result]:
        """Run to the end, or until something stops it, and write the reports."""
        self.watch = Watch(name, self.clients, [journal.algorithm.mechanism for journal in self.journals])
        try:
            shown = progress and jax.process_index() == 0
            with report.progress_bar(name, self.rounds, shown) as update, signals.deferred() as asked:
                try:
                    self.go(update, log, asked)
                except KeyboardInterrupt:
                    raise signals.stopped(asked(), self._where()) from None
        except Exception as error:
            if jax.process_count() > 1 and self.checkpoints is not None:
                error.add_note(
                    f"process {jax.process_index()} of {jax.process_count()} stopped after round {self.done}; "
                    f"the last checkpoint is {self.checkpoints.newest()}: start all processes again to go on from it"
                )
            raise
        finally:
            if self.checkpoints is not None:
                self.checkpoints.close()
            results = [journal.finish(self.done) for journal in self.journals]
            self.watch.end([journal.recorded.records for journal in self.journals])
        servers, states = self._split(self.runner.server), self._split(self.runner.all_states())
        parts = zip(results, servers, states, strict=True)
        return [result._replace(server=server, states=own) for result, server, own in parts]

    def go(self, update: Callable, log: Callable, asked: Callable[[], int]) -> None:
        """Run, evaluate and save until all rounds are done."""
        pace, program = math.inf, None
        while self.done < self.rounds:
            program = program or self.runner.compile(self._facts())
            target = next(r for r in self.evaluations if r > self.done)
            count = int(min(target - self.done, max(1, _SEGMENT_SECONDS // pace)))
            start = time.monotonic()
            records = self.runner.rounds(self.done, count)
            pace = (time.monotonic() - start) / count
            self._record(records, count)
            if self.done in self.evaluations:
                self._evaluate()
                log(self.journals[0].metrics[-1])
            update(self.done, f"{self._text()}  chunk {program.chunk}")
            late = time.monotonic() - self.saved_at > _CHECKPOINT_SECONDS
            pace, late, stop = hosts.largest(pace, late, asked())
            if self.checkpoints and (late or stop or self.done == self.rounds):
                self._save(self.checkpoints)
                self.kept = self.done
            if stop:
                raise KeyboardInterrupt

    def _where(self) -> str:
        """What is said where a signal ends the run."""
        again = "nothing is kept without a folder"
        if self.checkpoints is not None:
            place = "there" if self.kept == self.done else f"round {self.kept}" if self.kept else "the start"
            again = f"the same command goes on from {place}"
        return f"stopped after round {self.done} of {self.rounds}; {again}"

    def _record(self, records: Records, count: int) -> None:
        for journal, own in zip(self.journals, self._split(records), strict=True):
            journal.record(own, self.done, count)
        self.done += count

    def _evaluate(self) -> None:
        index = self.evaluations.index(self.done)
        records = [journal.recorded.records for journal in self.journals]
        self.watch.updates(records, self.evaluations[index - 1] if index else 0, self.done)
        key = self._each(lambda key: jax.random.fold_in(key, self.done))(self.eval_key)
        scores = self._split(self.runner.evaluate(key))
        self.watch.scores(scores, self.done)
        for journal, own in zip(self.journals, scores, strict=True):
            journal.evaluated(index, own)

    def _text(self) -> str:
        """Accuracy and epsilon so far, for the progress bar."""
        scores = [journal.metrics[-1]["accuracy"] for journal in self.journals if journal.metrics]
        known = [value for value in scores if not math.isnan(value)]
        ends = sorted({min(known), max(known)}) if known else []
        accuracy = " to ".join(f"{value:.3f}" for value in ends) or "-"
        epsilon = max(journal.epsilon(self.done) for journal in self.journals)
        return f"accuracy {accuracy}  epsilon {epsilon:.3g}"

    def _state(self) -> dict[str, Tree]:
        return self.runner.saved() | {"recorded": [journal.recorded for journal in self.journals]}

    def _save(self, checkpoints: Checkpoints) -> None:
        self.runner.save(lambda: checkpoints.save(self.done, self._state()))
        self.saved_at = time.monotonic()

    def _restore(self) -> None:
        assert self.checkpoints is not None
        found = self.checkpoints.restore(self._state())
        if found is not None:
            self.done, state = found
            self.runner.restore(state)
            for journal, recorded in zip(self.journals, state["recorded"], strict=True):
                journal.restore(recorded, self.done)

    def _each(self, work: Callable) -> Callable:
        """Of one run, or of every point."""
        return jax.vmap(work) if self.points else work

    def _split(self, tree: Tree) -> list[Tree]:
        """A tree of each run."""
        if self.points is None:
            return [tree]
        return [jax.tree.map(lambda leaf, p=p: leaf[p], tree) for p in range(len(self.journals))]

    def _facts(self) -> tuple[str, ...]:
        """What a good chunk depends on, besides shapes and devices."""
        algorithm = self.journals[0].algorithm
        return algorithm.name, algorithm.model.name, repr(algorithm.mechanism.sampling)

    def _fingerprint(self, key: Key[Array, "*P"], algorithms: list[Algorithm], store: str) -> dict[str, Any]:
        values = {name: column.tolist() for name, column in self.points.values.items()} if self.points else {}
        return {
            "method": algorithms[0].name,
            "model": algorithms[0].model.name,
            "key": np.asarray(jax.random.key_data(key)).tolist(),
            "rounds": self.rounds,
            "evaluations": self.evaluations,
            "clients": self.clients.number,
            "examples": int(np.sum(self.clients.train_size)),
            "devices": self.runner.population.mesh.size,
            "store": store,
            "values": values,
            "mechanism": [repr(algorithm.mechanism) for algorithm in algorithms],
        }
