"""Warnings about updates, models and data that are not finite: who, how many, and a remedy that fits the cause."""

import functools
import logging
from collections.abc import Sequence

import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from jaxfl.engine.evaluate import PerClient
from jaxfl.engine.round import Records
from jaxfl.types import Algorithm, Clients

_LOG = logging.getLogger("jaxfl")

_SHARE = 0.1
"""Share of the updates since an evaluation: if more are dropped, a warning follows at once."""


class Watch:
    """Watches one run, or all points of a sweep together: warns of each problem once, when it first appears.

    Args:
        name: name of the run.
        clients: host arrays.
        algorithms: one for each point.
    """

    def __init__(self, name: str, clients: Clients, algorithms: Sequence[Algorithm]) -> None:
        self.name, self.clients, self.algorithms = name, clients, algorithms
        self.told: set[str] = set()

    def dropped(self, records: Sequence[Records], start: int, done: int) -> None:
        """Warn where more than a tenth of the updates of some rounds were dropped."""
        since = [jax.tree.map(lambda leaf: leaf[start:done], record) for record in records]
        dropped, made = _count(since)
        if dropped > _SHARE * made:
            self._warn("updates", self._dropped(since, start))

    def updates(self, records: Records, start: int, done: int) -> None:
        """The same of a single run, at an evaluation, where it may have to stop.

        Raises:
            FloatingPointError: all were, and no later round can change that.
        """
        since = jax.tree.map(lambda leaf: leaf[start:done], records)
        if self._stuck(records, since, done):
            text = f"{self.name}: {self._dropped([since], start)}; none would count from here on, so the run stops"
            raise FloatingPointError(text)
        self.dropped([records], start, done)

    def scores(self, scores: Sequence[PerClient], done: int) -> None:
        """Warn where models have no finite scores after some rounds."""
        tested = np.asarray(self.clients.test_size) > 0
        if not tested.any():
            self._warn("tests", "no client has a test example: scores are not known")
        lost = [tested & np.isnan(score["loss"]) for score in scores]
        mask = np.logical_or.reduce(lost)
        if not mask.any():
            return
        broken = np.logical_or(*self.broken_data)
        data, others = mask & broken, mask & ~broken
        causes = [f"NaN or infinite examples ({_names(data)}): clean them"] if data.any() else []
        if others.any():
            whose = "the others'" if causes else "their"
            model = "the shared model has" if others.sum() == tested.sum() else f"{whose} personal models have"
            causes.append(f"{model} diverged: {remedy(self.algorithms)}")
        where = f"in {sum(nan.any() for nan in lost)} of {len(lost)} points, " if len(lost) > 1 else ""
        who = f"{where}{mask.sum()} of {tested.sum()} tested clients ({_names(mask)})"
        text = f"{who} have no finite scores after round {done}, which count as 0"
        self._warn("scores", f"{text}; {'; '.join(causes)}")

    def end(self, records: Sequence[Records]) -> None:
        """Warn of all updates that were dropped; each point's `metrics.jsonl` has its own."""
        if _count(records)[0]:
            self._warn("end", self._dropped(records, 0))

    @functools.cached_property
    def broken_data(self) -> tuple[Bool[np.ndarray, "C"], Bool[np.ndarray, "C"]]:
        """Which clients have an example to train on, or to test on, that is not finite."""
        clients, nobody = self.clients, np.zeros(self.clients.number, bool)
        if not np.issubdtype(clients.inputs.dtype, np.inexact):
            return nobody, nobody
        # In parts: the store and the clients' rows may be files that are larger than memory.
        axes = tuple(range(1, clients.inputs.ndim))
        parts = range(0, len(clients.inputs), 4096)
        bad = np.concatenate([~np.isfinite(clients.inputs[i : i + 4096]).all(axis=axes) for i in parts])

        def owners(rows: Int[Array | np.ndarray, "C N"], sizes: Int[Array | np.ndarray, "C"]) -> Bool[np.ndarray, "C"]:
            owns, positions = nobody.copy(), np.arange(rows.shape[1])
            for i in range(0, len(rows) if bad.any() else 0, 4096):
                part = slice(i, i + 4096)
                owns[part] = (bad[rows[part]] & (positions < np.asarray(sizes[part])[:, None])).any(axis=1)
            return owns

        return owners(clients.train, clients.train_size), owners(clients.test, clients.test_size)

    def _stuck(self, records: Records, recent: Records, done: int) -> bool:
        """Whether all recent updates were dropped, and nothing moves the server to where later ones would count."""
        dropped, made = _count([recent])
        if not made or dropped < made:
            return False
        ever_dropped, ever = _count([jax.tree.map(lambda leaf: leaf[:done], records)])
        if ever_dropped < ever and (recent.ledger.server_noise.any() or recent.ledger.client_noise.any()):
            return False  # noise moves it, and updates have counted: a method may continue like this
        took_part, broken = recent.ledger.participants.any(axis=0), self.broken_data[0]
        nobody_else = (broken | (np.asarray(self.clients.train_size) == 0)).all()
        return bool((took_part & ~broken).any() or nobody_else)  # otherwise clients not drawn yet may count

    def _dropped(self, records: Sequence[Records], start: int) -> str:
        """How many updates of these rounds were dropped, and what to do."""
        dropped, made = _count(records)
        broken = self.broken_data[0]
        theirs = sum(int(record.ledger.participants[:, broken].sum()) for record in records)
        causes = [f"NaN or infinite training examples ({_names(broken)}): clean them"] if theirs else []
        if dropped > theirs:
            causes.append(f"{'others diverged: ' if causes else ''}{remedy(self.algorithms)}")
        since = f" since round {start}" if start else ""
        return f"{dropped} of {made} updates{since} were not finite and were dropped: {'; '.join(causes)}"

    def _warn(self, topic: str, text: str) -> None:
        if topic not in self.told and jax.process_index() == 0:
            _LOG.warning("%s: %s", self.name, text)
        self.told.add(topic)


def remedy(algorithms: Sequence[Algorithm]) -> str:
    """What helps against models that diverge."""
    noisy = any(method.mechanism.noisy or method.dp_sgd is not None for method in algorithms)
    return "lower the learning rate or the noise" if noisy else "lower the learning rate, or clip updates"


def _count(records: Sequence[Records]) -> tuple[int, int]:
    """Numbers of dropped updates, and of all."""
    dropped = sum(int(record.nonfinite.sum()) for record in records)
    return dropped, sum(int(record.info["participants"].sum(dtype=np.float64)) for record in records)


def _names(mask: Bool[np.ndarray, "C"]) -> str:
    """The first few clients of a mask."""
    clients = np.flatnonzero(mask)
    listed = ", ".join(map(str, clients[:5])) + (", ..." if len(clients) > 5 else "")
    return f"client{'s' if len(clients) > 1 else ''} {listed}"
