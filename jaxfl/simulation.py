"""A whole run: rounds, evaluation, privacy statement, run folder, resume."""

import contextlib
import math
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Key

from jaxfl import report
from jaxfl._validate import check_count
from jaxfl.checkpoint import Checkpoints
from jaxfl.engine import Population, Records, compile_rounds, initialize, place
from jaxfl.evaluate import PerClient, compile_evaluation, summarize
from jaxfl.privacy.accounting import running_epsilon
from jaxfl.privacy.statement import privacy_statement
from jaxfl.types import Algorithm, Clients, Ledger, Tree

_SEGMENT_SECONDS = 10.0
"""Rounds between two looks at the host: short enough for progress and Ctrl-C."""

_CHECKPOINT_SECONDS = 30.0


class Result(NamedTuple):
    """What a run leaves behind.

    `metrics` has one row per evaluation; `scores` are per client at the last one, `history` at all of them.
    """

    server: Tree
    states: Tree
    metrics: list[dict[str, float | int]]
    scores: PerClient
    history: PerClient
    ledger: Ledger
    statement: dict[str, Any]


class _Recorded(NamedTuple):
    """Host arrays that grow with the run: by round, and by evaluation."""

    records: Records
    scores: PerClient


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
    check_count("rounds", rounds)
    eval_every = max(1, rounds // 10) if eval_every is None else eval_every
    check_count("eval_every", eval_every)
    if chunk not in (None, "auto"):
        check_count("chunk", chunk)
    algorithm.mechanism.check_fits(clients.number, rounds)
    folder = None if folder is None else pathlib.Path(folder)
    population = place(clients, devices)
    with report.tensorboard_writer(folder, tensorboard) as log:
        run = _Run(key, algorithm, population, clients, rounds, eval_every, folder)
        step = run.compile(chunk)
        try:
            with report.progress_bar(algorithm.name, rounds, progress) as update, _deferred_interrupt() as interrupted:
                run.go(step, update, log, interrupted)
        finally:
            result = run.finish()
    return result


class _Run:
    """The host's side of a run: what has been done, and where it is kept."""

    def __init__(
        self,
        key: Key[Array, ""],
        algorithm: Algorithm,
        population: Population,
        clients: Clients,
        rounds: int,
        eval_every: int,
        folder: pathlib.Path | None,
    ) -> None:
        init_key, self.key, self.eval_key = jax.random.split(key, 3)
        self.algorithm, self.population, self.folder = algorithm, population, folder
        self.test_size, self.rounds = np.asarray(clients.test_size), rounds
        self.evaluations = sorted({*range(eval_every, rounds + 1, eval_every), rounds})
        self.server, self.states = initialize(init_key, algorithm, population)
        self.evaluate = compile_evaluation(algorithm, population)
        self.epsilon = running_epsilon(algorithm.mechanism, population.number)
        self.done, self.saved_at, self.metrics = 0, time.monotonic(), []
        self.recorded = self._empty()
        self.checkpoints = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.checkpoints = Checkpoints(folder / report.CHECKPOINTS, self._fingerprint(key, clients))
            self._restore()

    def compile(self, chunk: int | Literal["auto"] | None) -> Callable:
        """The program of up to as many rounds as lie between two evaluations."""
        segment = max(np.diff([0, *self.evaluations]))
        if chunk is None:
            chunk = 1 if self.population.mesh.devices.flat[0].platform == "cpu" else "auto"
        if chunk == "auto":
            chunk = self._measure_chunk()
        return compile_rounds(self.algorithm, self.population, chunk=chunk, segment=int(segment))

    def go(self, step: Callable, update: Callable, log: Callable, interrupted: Callable[[], bool]) -> None:
        """Run, evaluate and save until all rounds are done."""
        pace = math.inf
        while self.done < self.rounds:
            target = next(r for r in self.evaluations if r > self.done)
            count = int(min(target - self.done, max(1, _SEGMENT_SECONDS // pace)))
            start = time.monotonic()
            self.server, self.states, records = step(self.key, self.done, count, self.server, self.states)
            records = jax.device_get(records)
            seconds = (time.monotonic() - start) / count
            pace = seconds if math.isfinite(pace) else 1.0  # the first call also compiles
            self._record(records, count)
            if self.done in self.evaluations:
                self._evaluate()
                log(self.metrics[-1])
            accuracy = f"accuracy {self.metrics[-1]['accuracy']:.3f}" if self.metrics else "accuracy -"
            update(self.done, f"{accuracy}  epsilon {self.epsilon(self.done):.3g}")
            late = time.monotonic() - self.saved_at > _CHECKPOINT_SECONDS
            if self.checkpoints and (late or self.done == self.rounds or interrupted()):
                self._save()
            if interrupted():
                raise KeyboardInterrupt

    def finish(self) -> Result:
        """Account for the rounds that were done and write the reports."""
        mechanism, count = self.algorithm.mechanism, self.population.number
        ledger = jax.tree.map(lambda leaf: leaf[: self.done], self.recorded.records.ledger)
        made = sum(r <= self.done for r in self.evaluations)
        history = jax.tree.map(lambda leaf: leaf[:made], self.recorded.scores)
        scores = jax.tree.map(lambda leaf: leaf[-1] if made else np.full(count, np.nan), history)
        statement = privacy_statement(ledger, mechanism, count) if self.done else {}
        if self.checkpoints is not None:
            self.checkpoints.close()
            self._write(history, ledger, statement)
        return Result(self.server, self.states, self.metrics, scores, history, ledger, statement)

    def _record(self, records: Records, count: int) -> None:
        new = slice(self.done, self.done + count)

        def put(all_: np.ndarray, segment: np.ndarray) -> None:
            all_[new] = segment[:count]

        jax.tree.map(put, self.recorded.records, records)
        self.done += count
        broken = np.flatnonzero(~records.server_finite[:count])
        if broken.size:
            self.done = new.start
            raise FloatingPointError(
                f"the server's state turned non-finite in round {new.start + int(broken[0]) + 1}: lower the learning "
                "rate, or clip updates; the last checkpoint is intact"
            )

    def _evaluate(self) -> None:
        index = self.evaluations.index(self.done)
        scores = self.evaluate(jax.random.fold_in(self.eval_key, self.done), self.server, self.states)
        for all_, new in zip(self.recorded.scores, jax.device_get(scores), strict=True):
            all_[index] = new
        self.metrics.append(self._row(index))
        if self.folder is not None:
            report.write_metrics(self.folder / report.METRICS, self.metrics)

    def _row(self, index: int) -> dict[str, float | int]:
        """One row of metrics: scores of all clients, and means over the rounds since the previous row."""
        done = self.evaluations[index]
        since = slice(self.evaluations[index - 1] if index else 0, done)
        scores = jax.tree.map(lambda leaf: leaf[index], self.recorded.scores)
        info = {f"train_{k}" if k == "loss" else k: v[since] for k, v in self.recorded.records.info.items()}
        row: dict[str, float | int] = {"round": done} | summarize(scores, self.test_size)
        row |= {name: float(values.mean()) for name, values in info.items()}
        row["nonfinite"] = int(self.recorded.records.nonfinite[since].sum())
        return row | {"epsilon": float(self.epsilon(done))}

    def _state(self) -> dict[str, Tree]:
        return {"server": self.server, "states": self.states, "recorded": self.recorded}

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
            self.recorded = jax.tree.map(np.array, state["recorded"])
            self.metrics = [self._row(i) for i, r in enumerate(self.evaluations) if r <= self.done]

    def _write(self, history: PerClient, ledger: Ledger, statement: dict[str, Any]) -> None:
        assert self.folder is not None
        report.write_metrics(self.folder / report.METRICS, self.metrics)
        if self.metrics:
            rounds = np.array([row["round"] for row in self.metrics])
            arrays = {"round": rounds, "test_size": self.test_size, "participations": ledger.participants.sum(0)}
            report.write_arrays(self.folder / report.PER_CLIENT, history._asdict() | arrays)
            report.draw_curves(self.folder / report.CURVES, self.algorithm.name, self.metrics)
        if statement:
            report.write_json(self.folder / report.PRIVACY, statement, allow_nan=False)

    def _empty(self) -> _Recorded:
        """Zeros for what the whole run will record."""
        probe = compile_rounds(self.algorithm, self.population, chunk=1, segment=1)
        shapes = probe.func.eval_shape(*probe.args, self.key, 0, 1, self.server, self.states)[2]  # pyrefly: ignore[missing-attribute]
        records = jax.tree.map(lambda leaf: np.zeros((self.rounds, *leaf.shape[1:]), leaf.dtype), shapes)
        blank = np.zeros((len(self.evaluations), self.population.number), np.float32)
        return _Recorded(records, PerClient(blank, blank.copy()))

    def _measure_chunk(self) -> int:
        """The fastest of a few chunk sizes for one round, by the second of two calls."""
        own = self.population.clients.number // self.population.mesh.size
        sizes = [size for size in (1, 8, 32, 128, 512) if size <= max(own, 1)]
        seconds = {}
        for size in sizes:
            step = compile_rounds(self.algorithm, self.population, chunk=size, segment=1)
            for _ in range(2):
                copies = jax.tree.map(jnp.copy, (self.server, self.states))
                start = time.monotonic()
                jax.block_until_ready(step(self.key, 0, 1, *copies))
                seconds[size] = time.monotonic() - start
        return min(seconds, key=seconds.__getitem__)

    def _fingerprint(self, key: Key[Array, ""], clients: Clients) -> dict[str, Any]:
        mechanism = self.algorithm.mechanism
        return {
            "method": self.algorithm.name,
            "model": self.algorithm.model.name,
            "key": np.asarray(jax.random.key_data(key)).tolist(),
            "rounds": self.rounds,
            "evaluations": self.evaluations,
            "clients": self.population.number,
            "examples": int(np.sum(clients.train_size)),
            "devices": self.population.mesh.size,
            "mechanism": repr(mechanism),
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
