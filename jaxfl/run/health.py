"""Warnings about updates, models and data that are not finite: who, how many, and a remedy that fits the cause."""

import functools
import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from jaxfl.data.clients import rows_of
from jaxfl.engine.evaluate import PerClient
from jaxfl.engine.round import Records
from jaxfl.types import Algorithm, Clients, Lists

_LOG = logging.getLogger("jaxfl")

_SHARE = 0.1
"""Share of the updates since an evaluation: if more are dropped, a warning follows at once."""


_Flat: TypeAlias = np.ndarray | None

_FEW = 50
"""Fewer weights may have any direction by chance."""

_NEAR = 0.5, 2.0
"""Limits of the norm of an update over that of the weights, where it may consist of weights."""

_ALONG = 0.7
"""Least cosine between a server's step and its weights where clients may have sent weights."""


class Watch:
    """Watches one run, or all points of a sweep together: warns of each problem once, when it first appears.

    Args:
        name: name of the run.
        clients: host arrays.
        algorithms: one for each point.
        public: name and count no clients, since numbers and names follow from private data.
    """

    def __init__(
        self, name: str, clients: Clients, algorithms: Sequence[Algorithm], *, public: bool = False
    ) -> None:
        self.name, self.clients, self.algorithms, self.public = name, clients, algorithms, public
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
        causes = [f"NaN or infinite examples{self._names(data)}: clean them"] if data.any() else []
        if others.any():
            whose = "the others'" if causes else "their"
            model = (
                "the shared model has" if others.sum() == tested.sum() else f"{whose} models have"
            )
            causes.append(f"{model} diverged: {remedy(self.algorithms, self.clients)}")
        where = (
            f"in {sum(nan.any() for nan in lost)} of {len(lost)} points, " if len(lost) > 1 else ""
        )
        who = f"{where}{mask.sum()} of {tested.sum()} tested clients{self._names(mask)}"
        who = "some tested clients" if self.public else who
        text = f"{who} have no finite scores after round {done}, which count as 0"
        self._warn("scores", f"{text}; {'; '.join(causes)}")

    def sent(
        self, weights: Sequence[_Flat], after: Sequence[_Flat], lengths: Sequence[float]
    ) -> None:
        """Warn where clients seem to send weights in place of a difference of weights.

        Args:
            weights: of each point's server before the first round.
            after: the same after the first round.
            lengths: mean norm of each point's updates in that round.
        """
        for method, old, new, length in zip(self.algorithms, weights, after, lengths, strict=True):
            if (
                method.sends == "update"
                and old is not None
                and new is not None
                and _like_weights(old, new, length)
            ):
                self._warn(
                    "sent",
                    "the updates of the first round are as long as the weights, and move the server along them. Let "
                    "client_update send a difference, such as optax.tree.sub(trained, server.params), or make the "
                    'algorithm with sends="weights" if its server_update expects weights',
                )

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
        bad = np.concatenate(
            [~np.isfinite(clients.inputs[i : i + 4096]).all(axis=axes) for i in parts]
        )

        def owners(lists: Lists, sizes: Int[Array | np.ndarray, "C"]) -> Bool[np.ndarray, "C"]:
            owns = nobody.copy()
            for i in range(0, len(lists) if bad.any() else 0, 4096):
                size = np.asarray(sizes[i : i + 4096])
                broken = bad[rows_of(lists, size, slice(i, i + 4096))]
                owns[i + np.repeat(np.arange(len(size)), size)[broken]] = True
            return owns

        return owners(clients.train, clients.train_size), owners(clients.test, clients.test_size)

    def _stuck(self, records: Records, recent: Records, done: int) -> bool:
        """Whether all recent updates were dropped, and nothing moves the server to where later ones would count."""
        dropped, made = _count([recent])
        if not made or dropped < made:
            return False
        ever_dropped, ever = _count([jax.tree.map(lambda leaf: leaf[:done], records)])
        if ever_dropped < ever and (
            recent.ledger.server_noise.any() or recent.ledger.client_noise.any()
        ):
            return (
                False  # noise moves it, and updates have counted: a method may continue like this
            )
        took_part, broken = recent.ledger.participants.any(axis=0), self.broken_data[0]
        nobody_else = (broken | (np.asarray(self.clients.train_size) == 0)).all()
        return bool(
            (took_part & ~broken).any() or nobody_else
        )  # otherwise clients not drawn yet may count

    def _dropped(self, records: Sequence[Records], start: int) -> str:
        """How many updates of these rounds were dropped, and what to do."""
        dropped, made = _count(records)
        broken = self.broken_data[0]
        theirs = sum(int(record.ledger.participants[:, broken].sum()) for record in records)
        causes = (
            [f"NaN or infinite training examples{self._names(broken)}: clean them"]
            if theirs
            else []
        )
        if dropped > theirs:
            causes.append(
                f"{'others diverged: ' if causes else ''}{remedy(self.algorithms, self.clients)}"
            )
        since = f" since round {start}" if start else ""
        count = "some updates" if self.public else f"{dropped} of {made} updates"
        return f"{count}{since} were not finite and were dropped: {'; '.join(causes)}"

    def _names(self, mask: Bool[np.ndarray, "C"]) -> str:
        """Return the first few clients of a mask, in brackets."""
        if self.public:
            return ""
        clients = np.flatnonzero(mask)
        listed = ", ".join(map(str, clients[:5])) + (", ..." if len(clients) > 5 else "")
        return f" (client{'s' if len(clients) > 1 else ''} {listed})"

    def _warn(self, topic: str, text: str) -> None:
        if topic not in self.told and jax.process_index() == 0:
            _LOG.warning("%s: %s", self.name, text)
        self.told.add(topic)


def _like_weights(old: np.ndarray, new: np.ndarray, length: Any) -> bool:
    """Return whether updates of a mean norm, which move weights from old to new, look like weights themselves.

    A difference made by training is nearly orthogonal to the weights, in so many dimensions.
    """
    moved, norm = new - old, np.linalg.norm(old)
    size = norm * np.linalg.norm(moved)
    if (
        len(old) < _FEW
        or not np.isfinite(size)
        or size == 0
        or not _NEAR[0] < length / norm < _NEAR[1]
    ):
        return False
    return bool(np.dot(moved, old) > _ALONG * size)


def remedy(algorithms: Sequence[Algorithm], clients: Clients) -> str:
    """Return what helps against models that diverge."""
    noisy = any(method.mechanism.noisy or method.dp_sgd is not None for method in algorithms)
    rate = (
        "lower the learning rate or the noise"
        if noisy
        else "lower the learning rate, or clip updates"
    )
    dtype = np.dtype(clients.inputs.dtype)
    unchecked = any(method.model.vocabulary is None for method in algorithms)
    # Bytes are images, unless a model says otherwise. Flax gives NaN for an index outside its table.
    if dtype.kind in "iu" and dtype.itemsize > 1 and unchecked:
        return f"if clients.inputs index a table, give the model `vocabulary`, which checks them; otherwise {rate}"
    return rate


def _count(records: Sequence[Records]) -> tuple[int, int]:
    """Numbers of dropped updates, and of all."""
    dropped = sum(int(record.nonfinite.sum()) for record in records)
    return dropped, sum(
        int(record.info["participants"].sum(dtype=np.float64)) for record in records
    )
