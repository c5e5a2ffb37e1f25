"""Tasks: what outputs and labels mean, as a loss to train and metrics to evaluate.

Nothing else in the library knows of classes or cross-entropy: training takes the mean loss of a batch, private steps
and Fisher information that of each example, and an evaluation merges a metric's sums over a client's batches.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

Loss: TypeAlias = Callable[[Array, Array], Float[Array, "B"]]
"""From a batch's outputs and labels to the loss of each example."""

RESERVED = {
    "round", "epsilon", "epsilon_rdp", "epsilon_upload", "epsilon_example", "participants", "nonfinite", "update_norm",
    "clipped", "train_loss", "unseen",
}  # fmt: skip
"""Names in a row of metrics besides the task's and an algorithm's infos; its `loss` is shown as `train_loss`."""

_OFFSET = jax.make_user_context(None)

_BINS = 256
"""Thresholds of the area under an ROC curve."""


def _ratio(sums: tuple[Array, Array]) -> Array:
    total, count = sums
    return total / jnp.where(count > 0, count, jnp.nan)


def _added(first: Any, second: Any) -> Any:
    return jax.tree.map(jnp.add, first, second)


class Metric(NamedTuple):
    """A score of one client: `value(sums)`, with `sums(outputs, labels, weights)` merged over its batches.

    Weights `[B]` are 1, or 0 for padding, which must not count. By default sums are (sum, count), and the value their
    ratio. A value that is not defined (no positive example) is NaN, and the client is left out of the mean.
    `merge(first, second)` makes the sums of two batches into those of both; zeros stand for no example. By default the
    sums are added. A spread needs another `merge`, because a difference of sums of squares loses its digits.
    """

    sums: Callable[[Array, Array, Float[Array, "B"]], Any]
    value: Callable[[Any], Float[Array, ""]] = _ratio
    lower_is_better: bool = False
    merge: Callable[[Any, Any], Any] = _added


def average(score: Loss, *, lower_is_better: bool = False) -> Metric:
    """The mean of a score of each example.

    >>> error = average(lambda outputs, labels: abs(outputs[:, 0] - labels), lower_is_better=True)
    >>> float(error.value(error.sums(jnp.array([[1.0], [2.0]]), jnp.array([3.0, 2.0]), jnp.ones(2))))
    1.0
    """

    def sums(outputs: Array, labels: Array, weights: Float[Array, "B"]) -> tuple[Array, Array]:
        return _weighted(score(outputs, labels).astype(jnp.float32), weights), jnp.sum(weights)

    return Metric(sums, lower_is_better=lower_is_better)


def _anything(outputs: jax.ShapeDtypeStruct, labels: np.ndarray) -> None:
    """No requirement."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a model's outputs are for.

    Args:
        name: for reports.
        loss: of each example, from a batch's outputs and labels.
        metrics: by name; the first is the headline, whose worst tenth of clients is reported. Names are identifiers
            of Python, because reports, files and trackers use them.
        check: raises a ValueError where outputs (shape and dtype, for a batch of 2) do not fit the labels of all
            examples.

    >>> late = average(lambda outputs, labels: outputs[:, 0] > labels, lower_is_better=True)
    >>> task = Task("delay", lambda outputs, labels: (outputs[:, 0] - labels) ** 2, {"late": late})
    >>> task.headline
    'late'
    """

    name: str
    loss: Loss
    metrics: Mapping[str, Metric]
    check: Callable[[jax.ShapeDtypeStruct, np.ndarray], None] = _anything

    def __post_init__(self) -> None:
        taken = RESERVED | {"loss", "test_size", "participations"}
        for name, metric in self.metrics.items():
            where = f"task={self.name!r}: metrics[{name!r}]"
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(
                    f"{where} must be named by an identifier, got {name!r}. Use letters, digits and _."
                )
            if not isinstance(metric, Metric):
                raise TypeError(
                    f"{where} must be a Metric, got {metric!r}. Give jaxfl.tasks.average(score)."
                )
            own = _columns(name, headline=name == self.headline)
            if own & taken:
                raise ValueError(
                    f"{where} must have a name of its own, got {name!r}, and reports have {min(own & taken)!r} "
                    "already. Choose another name."
                )
            taken |= own

    @property
    def headline(self) -> str:
        """Name of the first metric."""
        return next(iter(self.metrics))

    def mean_loss(
        self, outputs: Array, labels: Array, weights: Float[Array, "B"]
    ) -> Float[Array, ""]:
        """Mean loss over the examples of weight 1; weight 0 is padding."""
        return mean(self.loss(outputs, labels), weights)


def columns(task: Task) -> set[str]:
    """Return the names that the task's metrics take in a row of a run's metrics."""
    return {"loss"}.union(
        *(_columns(name, headline=name == task.headline) for name in task.metrics)
    )


def _columns(name: str, *, headline: bool) -> set[str]:
    """Return the names that a metric takes in a row."""
    return {name, f"{name}_std", f"{name}_worst10"} | ({f"{name}_examples"} if headline else set())


def mean(losses: Float[Array, "B"], weights: Float[Array, "B"]) -> Float[Array, ""]:
    """Mean over the examples of weight 1, and 0 without any."""
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def cross_entropy(outputs: Float[Array, "B K"], labels: Int[Array, "B"]) -> Float[Array, "B"]:
    """Return -log softmax(outputs) at the label; `logits_offset` may add to the outputs."""
    return optax.softmax_cross_entropy_with_integer_labels(_with_offset(outputs), labels)


class Offset:
    """Numbers that are added to logits, and whether a loss has read them."""

    # Compared by identity: JAX's caches must tell a client's numbers from those of any other.
    def __init__(self, values: Float[Array, "K"]) -> None:
        self.values = values
        self.read = False


@contextlib.contextmanager
def logits_offset(values: Float[Array, "K"]) -> Iterator[Offset]:
    """Let `cross_entropy` add numbers to all logits, in whatever is traced within.

    A method holds its model, and with it the loss: a wrapper reaches neither by arguments.
    """
    offset = Offset(values)
    with _OFFSET(offset):
        yield offset


def _with_offset(outputs: Float[Array, "B K"]) -> Float[Array, "B K"]:
    offset = _OFFSET.value
    if offset is None:
        return outputs
    offset.read = True
    return outputs + offset.values.astype(outputs.dtype)[None]


def one_hot_error(outputs: Float[Array, "B K"], labels: Int[Array, "B"]) -> Float[Array, "B"]:
    """Mean over classes of the squared error to the targets 0.9 (the label) and -0.1 (others)."""
    return jnp.mean((outputs - (jax.nn.one_hot(labels, outputs.shape[-1]) - 0.1)) ** 2, axis=-1)


def classification(*metrics: str) -> Task:
    """One of K classes: outputs are logits `[B, K]`, labels `[D]` whole numbers below K.

    Args:
        metrics: any of "accuracy"; "f1", the mean over classes, seen or predicted, of 2 TP / (2 TP + FP + FN); "auc",
            the mean over classes of P(p_k of an example of class k > p_k of another), by 256 thresholds. Default:
            accuracy.

    >>> classification("accuracy", "f1").metrics.keys()
    dict_keys(['accuracy', 'f1'])
    """
    known = {
        "accuracy": average(lambda outputs, labels: jnp.argmax(outputs, axis=-1) == labels),
        "f1": Metric(
            lambda o, y, w: _confusion(_hot(jnp.argmax(o, -1), o), _hot(y, o), w), _macro_f1
        ),
        "auc": Metric(lambda o, y, w: _histograms(jax.nn.softmax(o), _hot(y, o), w), _mean_auc),
    }

    def check(outputs: jax.ShapeDtypeStruct, labels: np.ndarray) -> None:
        if len(outputs.shape) != 2:
            raise ValueError(f"gives {outputs.shape} for a batch of 2: give logits [B, classes]")
        _check_labels(labels, 1, outputs.shape[1], "one whole number per example")

    return Task("classification", cross_entropy, _chosen(known, metrics or ("accuracy",)), check)


def multi_label(*metrics: str) -> Task:
    """Any of K labels: outputs are logits `[B, K]`, labels `[D, K]` of 0 and 1; the mean binary cross-entropy.

    Args:
        metrics: any of "f1" and "auc" (as for `classification`, by label) and "accuracy" (share of right labels).
            Default: all three.
    """
    known = {
        "f1": Metric(lambda o, y, w: _confusion(o > 0, y > 0, w), _macro_f1),
        "auc": Metric(lambda o, y, w: _histograms(jax.nn.sigmoid(o), y > 0, w), _mean_auc),
        "accuracy": average(lambda o, y: jnp.mean((o > 0) == (y > 0), axis=-1)),
    }

    def loss(outputs: Float[Array, "B K"], labels: Array) -> Float[Array, "B"]:
        return jnp.mean(optax.sigmoid_binary_cross_entropy(outputs, labels), axis=-1)

    def check(outputs: jax.ShapeDtypeStruct, labels: np.ndarray) -> None:
        if len(outputs.shape) != 2 or outputs.shape[1:] != labels.shape[1:]:
            raise ValueError(
                f"gives {outputs.shape} for a batch of 2, and clients.labels have shape {labels.shape}: give logits "
                f"[B, K] and labels [D, K]"
            )
        if not np.isin(labels, (0, 1)).all():
            raise ValueError(
                f"clients.labels hold {labels[~np.isin(labels, (0, 1))][0]}: give 0 and 1"
            )

    return Task("multi_label", loss, _chosen(known, metrics or tuple(known)), check)


def regression(*metrics: str) -> Task:
    """Numbers: outputs `[B, ...]` and labels `[D, ...]` of one shape (or `[B, 1]` and `[D]`); the squared error.

    Args:
        metrics: any of "mse", "mae", and "r2", 1 - sum of squared errors / sum of squares about the client's own mean,
            which is NaN for a client whose labels are all equal. Default: all three.
    """

    def errors(outputs: Array, labels: Array) -> Float[Array, "B F"]:
        return (outputs.reshape(len(outputs), -1) - labels.reshape(len(labels), -1)).astype(
            jnp.float32
        )

    def loss(outputs: Array, labels: Array) -> Float[Array, "B"]:
        return jnp.mean(errors(outputs, labels) ** 2, axis=-1)

    def moments(outputs: Array, labels: Array, weights: Float[Array, "B"]) -> dict[str, Array]:
        flat = labels.reshape(len(labels), -1).astype(jnp.float32)
        each = weights[:, None]
        count = jnp.sum(weights)
        # Differences to a label of the batch are exact where labels are close, and 0 where all are equal.
        origin = flat[jnp.argmax(weights > 0)]
        apart = flat - origin[None]
        offset = _weighted(apart, each, axis=0) / jnp.maximum(count, 1)
        return {
            "count": count,
            # The mean in two parts: their sum would lose the digits of small differences between large labels.
            "origin": jnp.where(count > 0, origin, 0),
            "offset": offset,
            "spread": _weighted((apart - offset[None]) ** 2, each, axis=0),
            "error": _weighted(errors(outputs, labels) ** 2, each, axis=0),
        }

    def merged(first: dict[str, Array], second: dict[str, Array]) -> dict[str, Array]:
        """Return the moments of both batches (Chan, Golub and LeVeque 1979)."""
        count = first["count"] + second["count"]
        share = second["count"] / jnp.maximum(count, 1)
        either = functools.partial(jnp.where, first["count"] > 0)
        between_origins = second["origin"] - first["origin"]
        apart = either(between_origins + second["offset"] - first["offset"], 0)
        between = apart**2 * first["count"] * share
        return {
            "count": count,
            "origin": either(first["origin"], second["origin"]),
            "offset": either(first["offset"] + apart * share, second["offset"]),
            "spread": first["spread"] + second["spread"] + between,
            "error": first["error"] + second["error"],
        }

    def r2(sums: dict[str, Array]) -> Float[Array, ""]:
        spread = jnp.sum(sums["spread"])
        return 1 - jnp.sum(sums["error"]) / jnp.where(spread > 0, spread, jnp.nan)

    known = {
        "mse": average(loss, lower_is_better=True),
        "mae": average(lambda o, y: jnp.mean(abs(errors(o, y)), axis=-1), lower_is_better=True),
        "r2": Metric(moments, r2, merge=merged),
    }

    def check(outputs: jax.ShapeDtypeStruct, labels: np.ndarray) -> None:
        of_one = (outputs.shape[1:], labels.shape[1:])
        if of_one[0] != of_one[1] and of_one != ((1,), ()):
            raise ValueError(
                f"gives {outputs.shape} for a batch of 2, and clients.labels have shape {labels.shape}: give outputs "
                f"of the labels' shape, or [B, 1] for labels [D]"
            )

    return Task("regression", loss, _chosen(known, metrics or tuple(known)), check)


def next_token(*metrics: str, ignore: int = -1) -> Task:
    """One of V tokens at each position: outputs are logits `[B, L, V]`, labels `[D, L]` whole numbers below V.

    The loss of an example is the mean over its positions.

    Args:
        metrics: any of "accuracy" and "perplexity", over all positions of a client. Default: both.
        ignore: a label that does not count, for padding.
    """

    def tokens(outputs: Array, labels: Array) -> tuple[Float[Array, "B L"], Bool[Array, "B L"]]:
        counts = labels != ignore
        return optax.softmax_cross_entropy_with_integer_labels(
            outputs, jnp.where(counts, labels, 0)
        ), counts

    def loss(outputs: Array, labels: Array) -> Float[Array, "B"]:
        losses, counts = tokens(outputs, labels)
        return jnp.sum(jnp.where(counts, losses, 0), axis=-1) / jnp.maximum(
            jnp.sum(counts, axis=-1), 1
        )

    def added(
        part: Callable[[Array, Array], Array],
    ) -> Callable[[Array, Array, Array], tuple[Array, Array]]:
        def sums(outputs: Array, labels: Array, weights: Float[Array, "B"]) -> tuple[Array, Array]:
            counts = (labels != ignore) * weights[:, None]
            return _weighted(part(outputs, labels).astype(jnp.float32), counts), jnp.sum(counts)

        return sums

    known = {
        "accuracy": Metric(added(lambda o, y: jnp.argmax(o, axis=-1) == y)),
        "perplexity": Metric(
            added(lambda o, y: tokens(o, y)[0]),
            lambda sums: jnp.exp(_ratio(sums)),
            lower_is_better=True,
        ),
    }

    def check(outputs: jax.ShapeDtypeStruct, labels: np.ndarray) -> None:
        if len(outputs.shape) != 3 or labels.ndim != 2 or outputs.shape[1] != labels.shape[1]:
            raise ValueError(
                f"gives {outputs.shape} for a batch of 2, and clients.labels have shape {labels.shape}: give logits "
                f"[B, L, V] and labels [D, L]"
            )
        counted = labels[labels != ignore]
        if counted.size and counted.dtype.kind == "i" and counted.min() < 0:
            raise ValueError(
                f"needs clients.labels of at least 0, or of {ignore} where a position does not count, got "
                f"{counted.min()}. If {counted.min()} marks such positions, give the model "
                f"task=jaxfl.tasks.next_token(ignore={counted.min()}), otherwise number the tokens from 0."
            )
        _check_labels(counted, 1, outputs.shape[2], "whole numbers")

    return Task("next_token", loss, _chosen(known, metrics or tuple(known)), check)


def _chosen(known: dict[str, Metric], names: tuple[str, ...]) -> dict[str, Metric]:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"metrics={unknown[0]!r}: choose from {', '.join(map(repr, known))}")
    if len(set(names)) < len(names):
        raise ValueError(f"metrics must be different ones, got {names}. Leave the second one out.")
    return {name: known[name] for name in names}


def _check_labels(labels: np.ndarray, axes: int, classes: int, wanted: str) -> None:
    if labels.ndim != axes or labels.dtype.kind not in "iu":
        raise ValueError(
            f"fits no clients.labels of {labels.dtype} and shape {labels.shape}: give {wanted}"
        )
    if labels.size and labels.min() < 0:
        raise ValueError(f"fits no clients.labels of {labels.min()}: give labels from 0")
    if labels.size and labels.max() >= classes:
        most = labels.max()
        raise ValueError(
            f"has {classes} outputs, and clients.labels go up to {most}: give a model of at least {most + 1} classes"
        )


def _weighted(values: Array, weights: Array, axis: int | None = None) -> Array:
    """Sum where weights are 1: NaN times 0 would be NaN."""
    return jnp.sum(jnp.where(weights > 0, values, 0), axis=axis)


def _hot(classes: Int[Array, "B"], outputs: Float[Array, "B K"]) -> Bool[Array, "B K"]:
    return classes[:, None] == jnp.arange(outputs.shape[-1])[None]


def _confusion(
    predicted: Bool[Array, "B K"], true: Bool[Array, "B K"], weights: Float[Array, "B"]
) -> tuple[Float[Array, "K"], Float[Array, "K"]]:
    """2 TP, and 2 TP + FP + FN, by class."""
    right = 2.0 * _weighted(predicted & true, weights[:, None], axis=0)
    both = predicted.astype(jnp.float32) + true
    return right, _weighted(both, weights[:, None], axis=0)


def _macro_f1(sums: tuple[Float[Array, "K"], Float[Array, "K"]]) -> Float[Array, ""]:
    return jnp.nanmean(_ratio(sums))


def _histograms(
    scores: Float[Array, "B K"], true: Shaped[Array, "B K"], weights: Float[Array, "B"]
) -> Float[Array, "2 K bins"]:
    """Numbers of positive and of negative examples by score in [0, 1]."""
    bins = jax.nn.one_hot(jnp.clip((scores * _BINS).astype(jnp.int32), 0, _BINS - 1), _BINS)
    split = jnp.stack([true, ~true]) * weights[None, :, None]
    return jnp.einsum("sbk,bkt->skt", split.astype(jnp.float32), bins)


def _mean_auc(histograms: Float[Array, "2 K bins"]) -> Float[Array, ""]:
    positive, negative = histograms
    below = jnp.cumsum(negative, axis=-1) - negative / 2
    pairs = jnp.sum(positive, -1) * jnp.sum(negative, -1)
    return jnp.nanmean(_ratio((jnp.sum(positive * below, axis=-1), pairs)))
