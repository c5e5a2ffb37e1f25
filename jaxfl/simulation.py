"""A whole run, or a sweep of runs: rounds, evaluation, checkpoints, resume."""

import contextlib
import math
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl import hosts, report
from jaxfl._validate import check_count
from jaxfl.checkpoint import Checkpoints
from jaxfl.engine import Points, Records, compile_rounds, initialize, place
from jaxfl.evaluate import compile_evaluation
from jaxfl.journal import Journal, Result
from jaxfl.types import Algorithm, Clients, Tree

_SEGMENT_SECONDS = 10.0
"""Rounds between two looks at the host: short enough for progress and Ctrl-C."""

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
    folder: str | os.PathLike | None = None,
    progress: bool = True,
    tensorboard: bool = False,
) -> Result:
    """Run an algorithm for some rounds and account for it.

    With a folder, the run writes metrics.jsonl, per_client.npz, privacy.json, curves.png and checkpoints, and a
    later call with the same arguments goes on where it stopped, bit-identically, whatever stopped it.

    Args:
        key: the whole run's randomness.
        algorithm: from `jaxfl.algorithms`, or your own.
        clients: from `jaxfl.data.make_clients`.
        rounds: T.
        eval_every: rounds between evaluations of all clients (default: a tenth of the rounds).
        chunk: clients vectorised at a time on each device; None: 1 on a CPU, measured elsewhere;
            "auto": measured. Changes speed and memory, not results.
        devices: where to run (default: all devices).
        folder: the run's own folder (see `jaxfl.report.run_folder`); None writes nothing.
        progress: show a bar with round, accuracy and epsilon so far.
        tensorboard: also write event files into the folder (extra `[tb]`).

    Raises:
        ValueError: an argument does not fit, or the folder holds another run.
        FloatingPointError: the server's state turned non-finite; names the round and the remedy.
        KeyboardInterrupt: on Ctrl-C, after the running segment of rounds is saved.
    """
    folder = None if folder is None else pathlib.Path(folder)
    with report.tensorboard_writer(folder, tensorboard) as log:
        run = _Run(key, [algorithm], None, clients, rounds, eval_every, chunk, devices, folder, [folder])
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
    progress: bool = True,
) -> list[Result]:
    """Run one method with several values of its numbers, or several seeds, in one compiled program.

    Results are those of `simulate`, up to rounding; the program is compiled once. All points advance together: a
    stopped sweep goes on where it was. With a folder, each point writes its reports into a folder below.

    Args:
        key: one for all points, which then share their randomness, or one per point `[P]`.
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
    run = _Run(keys, algorithms, points, clients, rounds, eval_every, chunk, devices, root, folders)
    return run.finish_after(f"{algorithms[0].name}, {count} points", progress, lambda row: None)


def _points(key: Key[Array, "*P"], values: Mapping[str, Sequence[float]]) -> int:
    """Number of points, where keys and columns agree on it."""
    lengths = {name: len(column) for name, column in values.items()}
    if jnp.ndim(key):
        lengths["key"] = len(key)
    if len(set(lengths.values())) != 1 or not max(lengths.values()):
        raise ValueError(f"lengths {lengths!r} of the columns: give columns, or keys, of one length of at least 1")
    return next(iter(lengths.values()))


class _Run:
    """The host's loop over rounds, of one run or of all points of a sweep, and their checkpoints."""

    def __init__(
        self,
        key: Key[Array, "*P"],
        algorithms: list[Algorithm],
        points: Points | None,
        clients: Clients,
        rounds: int,
        eval_every: int | None,
        chunk: int | Literal["auto"] | None,
        devices: list[jax.Device] | None,
        folder: pathlib.Path | None,
        folders: list[pathlib.Path | None],
    ) -> None:
        check_count("rounds", rounds)
        if chunk not in (None, "auto"):
            check_count("chunk", chunk)
        eval_every = max(1, rounds // 10) if eval_every is None else eval_every
        check_count("eval_every", eval_every)
        for algorithm in algorithms:
            algorithm.mechanism.check_fits(clients.number, rounds)
        self.what, self.points = points or algorithms[0], points
        self.rounds, self.population = rounds, place(clients, devices)
        self.evaluations = sorted({*range(eval_every, rounds + 1, eval_every), rounds})
        init_key, self.key, self.eval_key = self._each(lambda key: tuple(jax.random.split(key, 3)))(key)
        self.server, self.states = initialize(init_key, self.what, self.population)
        self.evaluate = compile_evaluation(self.what, self.population)
        self.step = self._compile(chunk)
        blank = self._blank()
        writes = jax.process_index() == 0
        self.journals = [
            Journal(algorithm, clients, self.evaluations, blank, own if writes else None)
            for algorithm, own in zip(algorithms, folders, strict=True)
        ]
        self.done, self.saved_at, self.checkpoints = 0, time.monotonic(), None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.checkpoints = Checkpoints(folder / report.CHECKPOINTS, self._fingerprint(key, clients, algorithms))
            self._restore()

    def finish_after(self, name: str, progress: bool, log: Callable) -> list[Result]:
        """Run to the end, or until something stops it, and write the reports."""
        try:
            shown = progress and jax.process_index() == 0
            with report.progress_bar(name, self.rounds, shown) as update, _deferred_interrupt() as interrupted:
                self.go(update, log, interrupted)
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
        parts = zip(results, self._split(self.server), self._split(self.states), strict=True)
        return [result._replace(server=server, states=states) for result, server, states in parts]

    def go(self, update: Callable, log: Callable, interrupted: Callable[[], bool]) -> None:
        """Run, evaluate and save until all rounds are done."""
        pace = math.inf
        while self.done < self.rounds:
            target = next(r for r in self.evaluations if r > self.done)
            count = int(min(target - self.done, max(1, _SEGMENT_SECONDS // pace)))
            start = time.monotonic()
            self.server, self.states, records = self.step(self.key, self.done, count, self.server, self.states)
            records = jax.device_get(records)
            seconds = (time.monotonic() - start) / count
            pace = seconds if math.isfinite(pace) else 1.0  # the first call also compiles
            self._record(records, count)
            if self.done in self.evaluations:
                self._evaluate()
                log(self.journals[0].metrics[-1])
            update(self.done, self._text())
            late = time.monotonic() - self.saved_at > _CHECKPOINT_SECONDS
            pace, late, stop = hosts.largest(pace, late, interrupted())
            if self.checkpoints and (late or stop or self.done == self.rounds):
                self._save()
            if stop:
                raise KeyboardInterrupt

    def _record(self, records: Records, count: int) -> None:
        for journal, own in zip(self.journals, self._split(records), strict=True):
            journal.record(own, self.done, count)
        self.done += count

    def _evaluate(self) -> None:
        key = self._each(lambda key: jax.random.fold_in(key, self.done))(self.eval_key)
        scores = jax.device_get(self.evaluate(key, self.server, self.states))
        for journal, own in zip(self.journals, self._split(scores), strict=True):
            journal.evaluated(self.evaluations.index(self.done), own)

    def _text(self) -> str:
        """Accuracy and epsilon so far, for the progress bar."""
        scores = [journal.metrics[-1]["accuracy"] for journal in self.journals if journal.metrics]
        ends = sorted({min(scores), max(scores)}) if scores else []
        accuracy = " to ".join(f"{value:.3f}" for value in ends) or "-"
        epsilon = max(journal.epsilon(self.done) for journal in self.journals)
        return f"accuracy {accuracy}  epsilon {epsilon:.3g}"

    def _state(self) -> dict[str, Tree]:
        recorded = [journal.recorded for journal in self.journals]
        return {"server": self.server, "states": self.states, "recorded": recorded}

    def _save(self) -> None:
        assert self.checkpoints is not None
        self.checkpoints.save(self.done, self._state())
        self.saved_at = time.monotonic()

    def _restore(self) -> None:
        assert self.checkpoints is not None
        found = self.checkpoints.restore(self._state())
        if found is not None:
            self.done, state = found
            self.server, self.states = state["server"], state["states"]
            for journal, recorded in zip(self.journals, state["recorded"], strict=True):
                journal.restore(recorded, self.done)

    def _each(self, work: Callable) -> Callable:
        """Of one run, or of every point."""
        return jax.vmap(work) if self.points else work

    def _split(self, tree: Tree) -> list[Tree]:
        """A tree of each run."""
        if self.points is None:
            return [tree]
        return [jax.tree.map(lambda leaf, p=p: leaf[p], tree) for p in range(len(self.key))]

    def _compile(self, chunk: int | Literal["auto"] | None) -> Callable:
        """The program of up to as many rounds as lie between two evaluations."""
        segment = max(np.diff([0, *self.evaluations]))
        if chunk is None:
            chunk = 1 if self.population.mesh.devices.flat[0].platform == "cpu" else "auto"
        if chunk == "auto":
            chunk = self._measure_chunk()
        return compile_rounds(self.what, self.population, chunk=chunk, segment=int(segment))

    def _blank(self) -> Records:
        """Zeros for what a whole run will record; the program is traced here, and not again when it is called."""
        step = self.step
        shapes = step.func.eval_shape(*step.args, self.key, 0, 1, self.server, self.states)[2]  # pyrefly: ignore[missing-attribute]
        own = 2 if self.points else 1
        return jax.tree.map(lambda leaf: np.zeros((self.rounds, *leaf.shape[own:]), leaf.dtype), shapes)

    def _measure_chunk(self) -> int:
        """The fastest of a few chunk sizes for one round, by the second of two calls."""
        own = self.population.clients.number // self.population.mesh.size
        sizes = [size for size in (1, 8, 32, 128, 512) if size <= max(own, 1)]
        seconds = {}
        for size in sizes:
            step = compile_rounds(self.what, self.population, chunk=size, segment=1)
            for _ in range(2):
                copies = jax.tree.map(jnp.copy, (self.server, self.states))
                start = time.monotonic()
                jax.block_until_ready(step(self.key, 0, 1, *copies))
                seconds[size] = time.monotonic() - start
        return sizes[int(np.argmin(hosts.largest(*seconds.values())))]

    def _fingerprint(self, key: Key[Array, "*P"], clients: Clients, algorithms: list[Algorithm]) -> dict[str, Any]:
        values = {name: column.tolist() for name, column in self.points.values.items()} if self.points else {}
        return {
            "method": algorithms[0].name,
            "model": algorithms[0].model.name,
            "key": np.asarray(jax.random.key_data(key)).tolist(),
            "rounds": self.rounds,
            "evaluations": self.evaluations,
            "clients": self.population.number,
            "examples": int(np.sum(clients.train_size)),
            "devices": self.population.mesh.size,
            "values": values,
            "mechanism": [repr(algorithm.mechanism) for algorithm in algorithms],
        }


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag, so that a running program ends and is saved; the second one acts at once."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    previous = signal.getsignal(signal.SIGINT)

    def handler(number: int, frame: Any) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
