"""Warnings about a run, with remedies that fit the cause.

They are about values that are not finite, updates that are all clipped, missing test examples, and
weights that are sent as updates.
"""

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
"""Share of dropped updates, since an evaluation, above which a run warns before its end."""

_CLIPPED_ROUNDS = 3
"""Least number of rounds after which a run warns that all updates were clipped."""

_Flat: TypeAlias = np.ndarray | None
"""Weights as a flat vector, or None if the server's state holds none."""

_FEW = 50
"""Number of weights below which a step's direction says nothing, because it may be chance."""

_AT_ONCE = 4096
"""Number of examples, or of clients, that are read at a time."""

_NEAR = 0.5, 2.0
"""Range of an update's norm, over the norm of the weights, in which the update may be weights."""

_ALONG = 0.7
"""Cosine between a server's step and its weights above which clients may have sent weights."""


class Watch:
    """Warnings about one run, or about all points of a sweep together, each logged only once.

    Args:
        name: Name of the run.
        clients: The clients, as host arrays.
        algorithms: The algorithm of each point.
        public: Whether messages leave out names and numbers of clients, because these follow from
            private data.
        central: Whether the server scores the global model, so that clients need no test examples.
    """

    def __init__(
        self,
        name: str,
        clients: Clients,
        algorithms: Sequence[Algorithm],
        *,
        public: bool = False,
        central: bool = False,
    ) -> None:
        self.name = name
        self.clients = clients
        self.algorithms = algorithms
        self.public = public
        self.central = central
        self.warned: set[str] = set()

    def dropped(self, records: Sequence[Records], start: int, done: int) -> None:
        """Warn if more than a tenth of the updates of rounds start + 1 to `done` were dropped."""
        since = [jax.tree.map(lambda leaf: leaf[start:done], record) for record in records]
        dropped, participations = _count(since)
        if dropped > _SHARE * participations:
            self._warn("updates", self._dropped(since, start))

    def updates(self, records: Records, start: int, done: int) -> None:
        """Warn about dropped updates of a single run at an evaluation, or stop the run.

        Raises:
            FloatingPointError: Every update was dropped, and no later round can change that.
        """
        since = jax.tree.map(lambda leaf: leaf[start:done], records)
        if self._stuck(records, since, done):
            raise FloatingPointError(
                f"{self.name}: {self._dropped([since], start)}; none would count from here on, so "
                "the run stops"
            )
        self.dropped([records], start, done)

    def scores(self, scores: Sequence[PerClient], done: int) -> None:
        """Warn if models have no finite scores after round `done`, or if no client has tests."""
        tested = np.asarray(self.clients.test_size) > 0
        if not tested.any() and not self.central:
            self._warn(
                "tests",
                "no client has a test example, so scores are not known. Give test rows to "
                "make_clients, or a dataset as `central`",
            )
        # Clients without tests have NaN too, which is no reason for a warning.
        lost = [tested & np.isnan(score["loss"]) for score in scores]
        mask = np.logical_or.reduce(lost)
        if not mask.any():
            return
        who = f"{mask.sum()} of {tested.sum()} tested clients{self._names(mask)}"
        if len(lost) > 1:
            points = sum(nan.any() for nan in lost)
            who = f"in {points} of {len(lost)} points, {who}"
        if self.public:
            who = "some tested clients"
        task = self.algorithms[0].model.task
        effect = "which count as 0"
        if task.lower_is_better:
            effect = "so that means are NaN"
        text = f"{who} have no finite scores after round {done}, {effect}"
        self._warn("scores", f"{text}; {self._causes_of_nan(mask, tested.sum())}")

    def _causes_of_nan(self, lost: Bool[np.ndarray, "C"], num_tested: int) -> str:
        """Return the causes of scores that are not finite, with the remedies, as text."""
        # Bad examples explain the NaN of their owners, and divergence explains the rest.
        broken = np.logical_or(*self.broken_data)
        data = lost & broken
        others = lost & ~broken
        causes = []
        if data.any():
            causes.append(f"NaN or infinite examples{self._names(data)}: clean them")
        if others.any():
            if others.sum() == num_tested:
                models = "the shared model has"
            elif causes:
                models = "the others' models have"
            else:
                models = "their models have"
            causes.append(f"{models} diverged: {remedy(self.algorithms, self.clients)}")
        return "; ".join(causes)

    def sent(
        self, weights: Sequence[_Flat], after: Sequence[_Flat], lengths: Sequence[float]
    ) -> None:
        """Warn if clients seem to send weights, and not a difference of weights.

        Args:
            weights: Weights of each point's server before the first round.
            after: Weights of each point's server after the first round.
            lengths: Mean norm of each point's updates in the first round.
        """
        for method, old, new, length in zip(self.algorithms, weights, after, lengths, strict=True):
            if method.sends != "update" or old is None or new is None:
                continue
            if _like_weights(old, new, length):
                self._warn(
                    "sent",
                    "the updates of the first round are as long as the weights, and move the "
                    "server along them. Let client_update send a difference, such as "
                    "optax.tree.sub(trained, server.params), or make the algorithm with "
                    'sends="weights" if its server_update expects weights',
                )

    def end(self, records: Sequence[Records]) -> None:
        """Warn about all updates that were dropped, and about runs whose updates were all clipped.

        The warnings count over all points. Each point's `metrics.jsonl` has its own numbers.
        """
        if norms := [norm for record in records if (norm := _norm_if_all_clipped(record))]:
            length = ""
            if not self.public:
                length = f" (mean norm {np.mean(norms):.3g})"
            where = ""
            if len(records) > 1:
                where = f"in {len(norms)} of {len(records)} points, "
            self._warn(
                "clipped",
                f"{where}every client's update of every round was longer than its `clip`{length}, "
                "so that only directions count. If the model learns too slowly, raise `clip`: "
                "epsilon stays, and the noise grows in proportion. If noise hides what it learns, "
                "keep `clip`, and give more clients a round, fewer trained weights "
                "(jaxfl.models.lora, frozen) or more rounds",
            )
        dropped, _ = _count(records)
        if dropped:
            self._warn("end", self._dropped(records, 0))

    @functools.cached_property
    def broken_data(self) -> tuple[Bool[np.ndarray, "C"], Bool[np.ndarray, "C"]]:
        """Masks of the clients with training examples, or test examples, that are not finite."""
        clients = self.clients
        # Whole numbers are always finite.
        if not np.issubdtype(clients.inputs.dtype, np.inexact):
            nobody = np.zeros(clients.num_clients, bool)
            return nobody, nobody
        bad = _nonfinite(clients.inputs)
        train = _clients_with(bad, clients.train, clients.train_size)
        return train, _clients_with(bad, clients.test, clients.test_size)

    def _stuck(self, records: Records, recent: Records, done: int) -> bool:
        """Return whether all recent updates were dropped, and no later update can be finite.

        Args:
            records: Records of all rounds.
            recent: Records of the rounds since the previous evaluation.
            done: Number of rounds so far.
        """
        dropped, participations = _count([recent])
        if not participations or dropped < participations:
            return False
        so_far = jax.tree.map(lambda leaf: leaf[:done], records)
        ever_dropped, ever = _count([so_far])
        noise = recent.ledger.server_noise.any() or recent.ledger.client_noise.any()
        if ever_dropped < ever and noise:
            # Earlier updates were finite, and noise may move the server to where they are again.
            return False
        took_part = recent.ledger.participants.any(axis=0)
        broken, _ = self.broken_data
        nobody_else = (broken | (np.asarray(self.clients.train_size) == 0)).all()
        # If only clients with broken data took part, updates of others may still count.
        return bool((took_part & ~broken).any() or nobody_else)

    def _dropped(self, records: Sequence[Records], start: int) -> str:
        """Return the number of dropped updates, the causes and the remedies as text.

        Args:
            records: Records of the rounds, of each run.
            start: Round before the first of these rounds, for the text.
        """
        dropped, participations = _count(records)
        broken, _ = self.broken_data
        theirs = sum(int(record.ledger.participants[:, broken].sum()) for record in records)
        causes = []
        if theirs:
            causes.append(f"NaN or infinite training examples{self._names(broken)}: clean them")
        if dropped > theirs:
            advice = remedy(self.algorithms, self.clients)
            causes.append(f"others diverged: {advice}" if causes else advice)
        since = ""
        if start:
            since = f" since round {start}"
        count = f"{dropped} of {participations} updates"
        if self.public:
            count = "some updates"
        return f"{count}{since} were not finite and were dropped: {'; '.join(causes)}"

    def _names(self, mask: Bool[np.ndarray, "C"]) -> str:
        """Return the numbers of a mask's first five clients, in brackets, or "" if public."""
        if self.public:
            return ""
        clients = np.flatnonzero(mask)
        listed = ", ".join(map(str, clients[:5]))
        if len(clients) > 5:
            listed += ", ..."
        return f" (client{'s' if len(clients) > 1 else ''} {listed})"

    def _warn(self, topic: str, text: str) -> None:
        if topic not in self.warned and jax.process_index() == 0:
            _LOG.warning("%s: %s", self.name, text)
        self.warned.add(topic)


def _nonfinite(inputs: Any) -> Bool[np.ndarray, "N"]:
    """Return the mask of the examples that are not finite."""
    axes = tuple(range(1, inputs.ndim))
    # The store may be a file that is larger than memory.
    starts = range(0, len(inputs), _AT_ONCE)
    blocks = (inputs[i : i + _AT_ONCE] for i in starts)
    return np.concatenate([~np.isfinite(block).all(axis=axes) for block in blocks])


def _clients_with(
    bad: Bool[np.ndarray, "N"], lists: Lists, sizes: Int[Array | np.ndarray, "C"]
) -> Bool[np.ndarray, "C"]:
    """Return the mask of the clients whose lists have some of the bad examples."""
    owns = np.zeros(len(lists), bool)
    if not bad.any():
        return owns
    # The clients' rows may be a file that is larger than memory.
    for i in range(0, len(lists), _AT_ONCE):
        size = np.asarray(sizes[i : i + _AT_ONCE])
        broken = bad[rows_of(lists, size, slice(i, i + _AT_ONCE))]
        # Each row belongs to the client whose list holds it.
        owns[i + np.repeat(np.arange(len(size)), size)[broken]] = True
    return owns


def _norm_if_all_clipped(record: Records) -> float:
    """Return the mean L2 norm of the updates if all were clipped in all rounds, and otherwise 0.

    It is also 0 before the third round with participants.
    """
    ran = record.info["participants"] > 0
    clipped = record.info.get("clipped")
    # A share is a mean in single precision, so a share of 1 may come out a little smaller.
    if clipped is None or ran.sum() < _CLIPPED_ROUNDS or clipped[ran].min() < 0.9999:
        return 0.0
    return float(record.info["update_norm"][ran].mean())


def _like_weights(old: np.ndarray, new: np.ndarray, length: Any) -> bool:
    """Return whether updates look like weights, because the server moved along its weights.

    A difference made by training is nearly orthogonal to the weights, which have many dimensions.

    Args:
        old: Weights before the first round.
        new: Weights after the first round.
        length: Mean norm of the updates.
    """
    moved = new - old
    norm = np.linalg.norm(old)
    size = norm * np.linalg.norm(moved)
    # A vector of zeros has no direction.
    if len(old) < _FEW or not np.isfinite(size) or size == 0:
        return False
    least, most = _NEAR
    if not least < length / norm < most:
        return False
    return bool(np.dot(moved, old) > _ALONG * size)


def remedy(algorithms: Sequence[Algorithm], clients: Clients) -> str:
    """Return advice against models that diverge, as a text without a full stop."""
    noisy = any(method.mechanism.noisy or method.dp_sgd is not None for method in algorithms)
    rate = "lower the learning rate, or clip updates"
    if noisy:
        rate = "lower the learning rate or the noise"
    dtype = np.dtype(clients.inputs.dtype)
    unchecked = any(method.model.vocabulary is None for method in algorithms)
    # Bytes are images unless a model has a vocabulary. Flax returns NaN for an index outside of the
    # table.
    if dtype.kind in "iu" and dtype.itemsize > 1 and unchecked:
        return (
            "if clients.inputs index a table, give the model `vocabulary`, which checks them; "
            f"otherwise {rate}"
        )
    return rate


def _count(records: Sequence[Records]) -> tuple[int, int]:
    """Return the number of dropped updates, and the number of all updates, over all records."""
    dropped = sum(int(record.nonfinite.sum()) for record in records)
    participations = sum(
        # A sum in single precision is not exact beyond 2^24 updates.
        int(record.info["participants"].sum(dtype=np.float64))
        for record in records
    )
    return dropped, participations
