"""Tasks: what outputs and labels mean, as a loss to train and metrics to evaluate.

Training takes the mean loss of a batch. Private steps and Fisher information take the loss of each
example. An evaluation merges a metric's sums over a client's batches.
"""

import contextlib
import dataclasses
import functools
import numbers
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from jaxfl._support.recipes import Recipe, with_recipe

Loss: TypeAlias = Callable[[Array, Array], Float[Array, "B"]]
"""Function from a batch's outputs and labels to the loss of each example."""

_Areas: TypeAlias = Float[np.ndarray, "C"]
"""Areas under ROC curves, or numbers of examples, by client."""

RESERVED = {
    "round",
    "epsilon",
    "epsilon_rdp",
    "epsilon_upload",
    "epsilon_example",
    "participants",
    "nonfinite",
    "update_norm",
    "clipped",
    "train_loss",
    "bytes_up",
    "bytes_down",
    "method",
    "seed",
    "chosen",
    "stated",
    "dropped",
    "run",
    "unseen",
}
"""Names in a row of metrics or of a comparison, besides those of the task and of the infos.

An info `loss` is shown as `train_loss`.
"""

CENTRAL = "central_"
"""Beginning of the names of scores on a central test set, in a row of metrics."""

_CHANGE = jax.make_user_context(None)

_BINS = 256
"""Number of thresholds for the area under an ROC curve of many examples."""

_EXACT = 256
"""Default number of test examples of a client up to which its area under an ROC curve is exact."""

_MOST_EXACT = 2**16 - 1
"""Largest value of `exact`. With more examples, twice the number of pairs may exceed an int32."""


def _ratio(sums: tuple[Array, Array]) -> Array:
    total, count = sums
    # A division by NaN marks a score without examples as undefined.
    return total / jnp.where(count > 0, count, jnp.nan)


def _added(first: Any, second: Any) -> Any:
    return jax.tree.map(jnp.add, first, second)


class Metric(NamedTuple):
    """A score of one client, computed from sums over its examples.

    - `sums(outputs, labels, weights)` returns the sums of a batch. Weights `[B]` are 1, or 0 for
      padding, which must not count.
    - `value(sums)` returns the score. By default sums are (sum, count), and the score is their
      ratio. An undefined score, such as one that needs a positive example, is NaN. The client is
      then left out of the mean over clients, unless its loss is NaN too.
    - `lower_is_better` says whether a smaller score is a better one.
    - `merge(first, second)` returns the sums of two batches together, and adds them by default.
      Zeros stand for a batch without examples. A variance needs another `merge`, because the
      difference of two large sums of squares loses digits.
    """

    sums: Callable[[Array, Array, Float[Array, "B"]], Any]
    value: Callable[[Any], Float[Array, ""]] = _ratio
    lower_is_better: bool = False
    merge: Callable[[Any, Any], Any] = _added


def average(score: Loss, *, lower_is_better: bool = False) -> Metric:
    """Return the metric that is the mean of a score over a client's examples.

    Args:
        score: Function from a batch's outputs and labels to a number for each example.
        lower_is_better: Whether a smaller mean is a better one.

    Raises:
        TypeError: The score cannot be called.

    >>> error = average(lambda outputs, labels: abs(outputs[:, 0] - labels), lower_is_better=True)
    >>> sums = error.sums(jnp.array([[1.0], [2.0]]), jnp.array([3.0, 2.0]), jnp.ones(2))
    >>> float(error.value(sums))
    1.0
    """
    _require_callable("score", score)

    def sums(outputs: Array, labels: Array, weights: Float[Array, "B"]) -> tuple[Array, Array]:
        # Scores may be booleans, or of a half precision whose sums would be inexact.
        scores = score(outputs, labels).astype(jnp.float32)
        return _weighted(scores, weights), jnp.sum(weights)

    return Metric(sums, lower_is_better=lower_is_better)


def _require_callable(name: str, function: Any) -> None:
    if not callable(function):
        raise TypeError(
            f"{name} must be a function of outputs and labels, got {function!r}. "
            "Give for instance jaxfl.tasks.cross_entropy."
        )


def _anything(outputs: jax.ShapeDtypeStruct, labels: np.ndarray) -> None:
    """Accept any outputs and labels."""


def _unchanged(outputs: Array) -> Array:
    """Return the outputs as they are."""
    return outputs


def _most_likely(logits: Float[Array, "... K"]) -> Int[Array, "..."]:
    """Return the class of the largest logit."""
    return jnp.argmax(logits, axis=-1)


@dataclasses.dataclass(frozen=True)
class Task:
    """The meaning of a model's outputs and labels: a loss, and metrics.

    Args:
        name: Name of the task in reports.
        loss: Function from a batch's outputs and labels to the loss of each example. It must be
            finite for padding, whose inputs and labels are 0.
        metrics: Metrics by name. The first is the headline. Reports have the mean of each metric
            over clients, and over the worst tenth of them. A name must be an identifier of Python,
            because reports, files and trackers use it.
        check: Function that raises a ValueError where outputs do not fit the labels of all
            examples. Its first argument has the shape and dtype of the outputs for a batch of 2. A
            run puts the model and its inputs before the message. The default accepts everything.
        predict: Function from a batch's outputs to predictions. The default returns the outputs.

    Raises:
        ValueError: There are no metrics. A name is no identifier, begins with `central_`, or is
            taken by reports or by a statistic of another metric.
        TypeError: The loss cannot be called, or a metric is no `Metric`.

    >>> late = average(lambda outputs, labels: outputs[:, 0] > labels, lower_is_better=True)
    >>> task = Task("delay", lambda outputs, labels: (outputs[:, 0] - labels) ** 2, {"late": late})
    >>> task.headline
    'late'
    """

    name: str
    loss: Loss
    metrics: Mapping[str, Metric]
    check: Callable[[jax.ShapeDtypeStruct, np.ndarray], None] = _anything
    predict: Callable[[Array], Array] = _unchanged
    recipe: Recipe | None = dataclasses.field(default=None, repr=False, compare=False)
    """How a builder made the task (see `jaxfl._support.recipes`)."""

    def __post_init__(self) -> None:
        _require_callable(f"task={self.name!r}: loss", self.loss)
        if not isinstance(self.metrics, Mapping) or not self.metrics:
            raise ValueError(
                f"task={self.name!r}: metrics must have at least one metric by name, got "
                f"{self.metrics!r}. Give for instance {{'error': jaxfl.tasks.average(score)}}."
            )
        # The last two are names in a run's file of scores by client.
        reserved = RESERVED | {"loss", "test_size", "participations"}
        for name, metric in self.metrics.items():
            where = f"task={self.name!r}: metrics[{name!r}]"
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(
                    f"{where} must be named by an identifier, got {name!r}. "
                    "Use letters, digits and _."
                )
            if not isinstance(metric, Metric):
                raise TypeError(
                    f"{where} must be a Metric, got {metric!r}. Give jaxfl.tasks.average(score)."
                )
            if name.startswith(CENTRAL):
                raise ValueError(
                    f"{where} must not begin with {CENTRAL!r}, which is for scores on a central "
                    f"test set, got {name!r}. Choose another name."
                )
            own = _columns(name, headline=name == self.headline)
            if own & reserved:
                raise ValueError(
                    f"{where} must have a name of its own, got {name!r}, and reports have "
                    f"{min(own & reserved)!r} already. Choose another name."
                )
            reserved |= own

    @property
    def headline(self) -> str:
        """The name of the first metric."""
        return next(iter(self.metrics))

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller value of the headline metric is a better one."""
        return self.metrics[self.headline].lower_is_better

    @property
    def functions(self) -> tuple[Any, ...]:
        """The fields `loss`, `metrics` and `predict`, which hold the functions of the task."""
        return self.loss, self.metrics, self.predict

    def mean_loss(
        self, outputs: Array, labels: Array, weights: Float[Array, "B"]
    ) -> Float[Array, ""]:
        """Return the mean loss over the examples of weight 1, or 0 if all have weight 0."""
        return mean(self.loss(outputs, labels), weights)


def columns(task: Task) -> set[str]:
    """Return the names that the task's loss and metrics take in a row of a run's metrics."""
    by_metric = [_columns(name, headline=name == task.headline) for name in task.metrics]
    return {"loss"}.union(*by_metric)


def is_taken(task: Task, name: str) -> bool:
    """Return whether a name is reserved in rows of metrics, so that no info may have it."""
    # An info `loss` is shown as `train_loss`.
    return name.startswith(CENTRAL) or name in RESERVED | columns(task) - {"loss"}


def _columns(name: str, *, headline: bool) -> set[str]:
    """Return the names that a metric takes in a row: its own, and those of its statistics."""
    names = {name, f"{name}_std", f"{name}_worst10"}
    if headline:
        names.add(f"{name}_examples")
    return names


def mean(losses: Float[Array, "B"], weights: Float[Array, "B"]) -> Float[Array, ""]:
    """Return the mean over the examples of weight 1, or 0 if there are none."""
    # A loss is finite at padding (see `Task`), so that a weight of 0 removes it.
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def cross_entropy(outputs: Float[Array, "B K"], labels: Int[Array, "B"]) -> Float[Array, "B"]:
    """Return each example's -log softmax(outputs) at its label.

    Within `changed_logits`, the outputs are changed first.
    """
    change = _CHANGE.value
    logits = outputs
    if change is not None:
        logits = change(outputs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


class Change:
    """A function of logits, and whether a loss has applied it."""

    # Changes compare by identity, so JAX's caches distinguish one client's from another's.
    def __init__(self, function: Callable[[Array], Array]) -> None:
        self.function = function
        self.applied = False

    def __call__(self, logits: Float[Array, "B K"]) -> Float[Array, "B K"]:
        """Return the changed logits, and set `applied`."""
        self.applied = True
        return self.function(logits)


@contextlib.contextmanager
def changed_logits(function: Callable[[Array], Array]) -> Iterator[Change]:
    """Let `cross_entropy` change all logits in code that is traced inside the context.

    The context yields a `Change`, whose `applied` becomes True when a loss has used the function.
    A wrapper of a method cannot pass the function as an argument, because the method holds its
    model and the model's loss. Of nested contexts, the inner one changes the logits first.
    """
    around = _CHANGE.value
    change = Change(function if around is None else lambda logits: around(function(logits)))
    with _CHANGE(change):
        yield change


def one_hot_error(outputs: Float[Array, "B K"], labels: Int[Array, "B"]) -> Float[Array, "B"]:
    """Return the mean over classes of the squared error to 0.9 (the label) and -0.1 (others)."""
    targets = jax.nn.one_hot(labels, outputs.shape[-1]) - 0.1
    return jnp.mean((outputs - targets) ** 2, axis=-1)


@with_recipe
def classification(
    *metrics: str, exact: int = _EXACT, class_weights: Sequence[float] | None = None
) -> Task:
    r"""Return the task of predicting one of K classes, by cross-entropy.

    Outputs are logits `[B, K]`, and labels `[D]` are whole numbers below K.

    Args:
        metrics: Names of metrics: "accuracy", "f1" and "auc". "f1" is the mean of
            2 TP / (2 TP + FP + FN) over the classes that are seen or predicted, with the numbers of
            true positives, false positives and false negatives. "auc" is the mean over classes of
            P(p_k of an example of class k > p_k of an example of another class), where equal p_k
            count one half. Here p_k is the softmax of the logits at class k. A class that has none
            or all of a client's examples is left out of "auc". The default is accuracy.
        exact: Number of test examples of a client up to which "auc" is exact, from 1 to 65,535. For
            clients with more of them, 256 thresholds approximate it. For "auc", an evaluation keeps
            as many outputs of a client in memory.
        class_weights: Factor :math:`w_k` above 0 of the loss of each class, so that the loss of an
            example is :math:`-w_y \log p_y`. Means still divide by the number of examples. No
            epsilon covers weights that follow from clients' labels. None stands for factors of 1.

    Raises:
        ValueError: The name of a metric is unknown or given twice, `exact` is out of range, or
            `class_weights` is not a vector of finite numbers above 0.

    >>> classification("accuracy", "f1").metrics.keys()
    dict_keys(['accuracy', 'f1'])
    >>> task = classification("auc", class_weights=(1.0, 4.0))
    >>> task.loss(jnp.zeros((2, 2)), jnp.array([0, 1])).round(2).tolist()
    [0.6899999976158142, 2.7699999809265137]
    """
    _check_exact(exact)
    factors = _check_class_weights(class_weights)

    def loss(outputs: Float[Array, "B K"], labels: Int[Array, "B"]) -> Float[Array, "B"]:
        # An array that exists before a trace would start JAX when the task is made.
        return jnp.array(factors)[labels] * cross_entropy(outputs, labels)

    known = {
        "accuracy": average(lambda outputs, labels: jnp.argmax(outputs, axis=-1) == labels),
        "f1": Metric(_class_confusion, _macro_f1),
        "auc": _area(_class_outputs, exact),
    }

    own_loss = cross_entropy
    if factors:
        own_loss = loss
    chosen = _chosen(known, metrics or ("accuracy",))
    check = functools.partial(_check_logits, len(factors))
    return Task("classification", own_loss, chosen, check, _most_likely)


def _class_confusion(outputs: Array, labels: Array, weights: Array) -> tuple[Array, Array]:
    """Return the sums of "f1" in a classification."""
    predicted = _hot(_most_likely(outputs), outputs)
    return _confusion(predicted, _hot(labels, outputs), weights)


def _class_outputs(outputs: Array, labels: Array) -> tuple[Array, Array, Array]:
    """Return margins, probabilities and truths of all classes, for `_area`."""
    return _margins(outputs), jax.nn.softmax(outputs), _hot(labels, outputs)


def _check_logits(num_weights: int, outputs: jax.ShapeDtypeStruct, labels: np.ndarray) -> None:
    """Require logits [B, K] for labels below K, and K class weights if there are any."""
    if len(outputs.shape) != 2:
        raise ValueError(
            f"must give logits [B, classes], got {outputs.shape} for a batch of 2. "
            "Give one output for each class."
        )
    _check_labels(labels, 1, outputs.shape[1], "one whole number per example")
    if num_weights and num_weights != outputs.shape[1]:
        raise ValueError(
            f"must have an output for each of {num_weights} class_weights, got "
            f"{outputs.shape[1]} outputs. Give one weight for each class."
        )


@with_recipe
def multi_label(*metrics: str, exact: int = _EXACT) -> Task:
    """Return the task of predicting any of K labels, by the mean binary cross-entropy.

    Outputs are logits `[B, K]`, and labels `[D, K]` are 0 or 1.

    Args:
        metrics: Names of metrics: "f1", "auc" and "accuracy". "f1" and "auc" are means over labels,
            defined like those of `classification`. "accuracy" is the share of right labels. The
            default is all three.
        exact: Number of test examples of a client up to which "auc" is exact, as in
            `classification`.

    Raises:
        ValueError: The name of a metric is unknown or given twice, or `exact` is out of range.
    """
    _check_exact(exact)

    known = {
        # A logit above 0 is a probability above one half.
        "f1": Metric(lambda o, y, w: _confusion(o > 0, y > 0, w), _macro_f1),
        "auc": _area(_label_outputs, exact),
        "accuracy": average(lambda o, y: jnp.mean((o > 0) == (y > 0), axis=-1)),
    }

    chosen = _chosen(known, metrics or tuple(known))
    return Task("multi_label", _binary_loss, chosen, _check_binary, lambda outputs: outputs > 0)


def _label_outputs(outputs: Array, labels: Array) -> tuple[Array, Array, Array]:
    """Return margins, probabilities and truths of all labels, for `_area`."""
    # Logits have the order of their probabilities, and distinguish those that round to 1.
    return outputs, jax.nn.sigmoid(outputs), labels > 0


def _binary_loss(outputs: Float[Array, "B K"], labels: Array) -> Float[Array, "B"]:
    """Return the mean binary cross-entropy over the labels of each example."""
    return jnp.mean(optax.sigmoid_binary_cross_entropy(outputs, labels), axis=-1)


def _check_binary(outputs: jax.ShapeDtypeStruct, labels: np.ndarray) -> None:
    """Require logits [B, K] for labels [D, K] of 0 and 1."""
    if len(outputs.shape) != 2 or outputs.shape[1:] != labels.shape[1:]:
        raise ValueError(
            f"must give logits [B, K] for labels [D, K], got {outputs.shape} for a batch of 2, "
            f"and clients.labels of shape {labels.shape}. Give one output for each label."
        )
    known_values = np.isin(labels, (0, 1))
    if not known_values.all():
        raise ValueError(
            f"must have clients.labels of 0 and 1, got {labels[~known_values][0]}. "
            "Give 1 for the labels of an example, and 0 for others."
        )


@with_recipe
def regression(*metrics: str) -> Task:
    """Return the task of predicting numbers, by the mean squared error.

    Outputs `[B, ...]` and labels `[D, ...]` have the same axes after the first, or are `[B, 1]` and
    `[D]`. The loss of an example is the mean of the squared errors of its numbers.

    Args:
        metrics: Names of metrics: "mse", "mae" and "r2". "r2" is 1 - sum of squared errors / sum of
            squares about the client's own mean. It is NaN for a client whose labels are all equal.
            The default is all three.

    Raises:
        ValueError: The name of a metric is unknown or given twice.
    """
    known = {
        "mse": average(_square_error, lower_is_better=True),
        "mae": average(_absolute_error, lower_is_better=True),
        "r2": Metric(_moments, _r2, merge=_merged_moments),
    }
    chosen = _chosen(known, metrics or tuple(known))
    return Task("regression", _square_error, chosen, _check_same_shape, _in_label_shape)


def _errors(outputs: Array, labels: Array) -> Float[Array, "B F"]:
    """Return the errors of each example's numbers."""
    # The reshape gives outputs [B, 1] and labels [B] the same axes.
    difference = outputs.reshape(len(outputs), -1) - labels.reshape(len(labels), -1)
    return difference.astype(jnp.float32)


def _square_error(outputs: Array, labels: Array) -> Float[Array, "B"]:
    """Return the mean squared error of each example's numbers."""
    return jnp.mean(_errors(outputs, labels) ** 2, axis=-1)


def _absolute_error(outputs: Array, labels: Array) -> Float[Array, "B"]:
    """Return the mean absolute error of each example's numbers."""
    return jnp.mean(abs(_errors(outputs, labels)), axis=-1)


def _moments(outputs: Array, labels: Array, weights: Float[Array, "B"]) -> dict[str, Array]:
    """Return the sums of "r2": moments of the labels, and sums of squared errors."""
    flat = labels.reshape(len(labels), -1).astype(jnp.float32)
    each = weights[:, None]
    count = jnp.sum(weights)
    # A difference to a label of the batch is exact where labels are close, and 0 where all are
    # equal.
    origin = flat[jnp.argmax(weights > 0)]
    difference = flat - origin[None]
    offset = _weighted(difference, each, axis=0) / jnp.maximum(count, 1)
    return {
        "count": count,
        # The mean is origin + offset. One number for both would lose the digits of small
        # differences between large labels.
        "origin": jnp.where(count > 0, origin, 0),
        "offset": offset,
        "spread": _weighted((difference - offset[None]) ** 2, each, axis=0),
        "error": _weighted(_errors(outputs, labels) ** 2, each, axis=0),
    }


def _merged_moments(first: dict[str, Array], second: dict[str, Array]) -> dict[str, Array]:
    """Return the moments of both batches (Chan, Golub and LeVeque 1979)."""
    count = first["count"] + second["count"]
    share = second["count"] / jnp.maximum(count, 1)
    # A first batch without examples has zeros, so the second one's mean is the mean of both.
    unless_empty = functools.partial(jnp.where, first["count"] > 0)
    between_origins = second["origin"] - first["origin"]
    between_means = unless_empty(between_origins + second["offset"] - first["offset"], 0)
    between = between_means**2 * first["count"] * share
    return {
        "count": count,
        "origin": unless_empty(first["origin"], second["origin"]),
        "offset": unless_empty(first["offset"] + between_means * share, second["offset"]),
        # The spread about the common mean is that within and that between the batches.
        "spread": first["spread"] + second["spread"] + between,
        "error": first["error"] + second["error"],
    }


def _r2(sums: dict[str, Array]) -> Float[Array, ""]:
    """Return 1 - sum of squared errors / sum of squares, or NaN if all labels are equal."""
    spread = jnp.sum(sums["spread"])
    return 1 - jnp.sum(sums["error"]) / jnp.where(spread > 0, spread, jnp.nan)


def _check_same_shape(outputs: jax.ShapeDtypeStruct, labels: np.ndarray) -> None:
    """Require outputs of the labels' shape, or one output for one number."""
    output_shape = outputs.shape[1:]
    label_shape = labels.shape[1:]
    one_number = output_shape == (1,) and label_shape == ()
    if output_shape != label_shape and not one_number:
        raise ValueError(
            f"must give outputs of the labels' shape, got {outputs.shape} for a batch of 2, "
            f"and clients.labels of shape {labels.shape}. "
            "Give outputs of that shape, or [B, 1] for labels [D]."
        )


def _in_label_shape(outputs: Array) -> Array:
    """Return the outputs as predictions, where a single number has no axis of its own."""
    # Labels of one number per example usually have the shape [D].
    if outputs.shape[1:] == (1,):
        return outputs[:, 0]
    return outputs


@with_recipe
def next_token(*metrics: str, ignore: int = -1) -> Task:
    """Return the task of predicting one of V tokens at each position, by cross-entropy.

    Outputs are logits `[B, L, V]` at L positions. Labels `[D, L]` are whole numbers from 0 to
    V - 1, or `ignore`. The loss of an example is the mean over its positions that count, or 0 if
    none does.

    Args:
        metrics: Names of metrics: "accuracy" and "perplexity", over all positions of a client that
            count. The default is both.
        ignore: Label of positions that do not count, such as padding.

    Raises:
        ValueError: The name of a metric is unknown or given twice.
    """
    sums = functools.partial(_token_sums, ignore)
    known = {
        "accuracy": Metric(functools.partial(sums, lambda o, y: _most_likely(o) == y)),
        # A mean of the perplexities of examples would be another number.
        "perplexity": Metric(
            functools.partial(sums, lambda o, y: _token_losses(ignore, o, y)[0]),
            lambda sums: jnp.exp(_ratio(sums)),
            lower_is_better=True,
        ),
    }
    loss = functools.partial(_mean_token_loss, ignore)
    chosen = _chosen(known, metrics or tuple(known))
    check = functools.partial(_check_tokens_and_logits, ignore)
    return Task("next_token", loss, chosen, check, _most_likely)


def _token_losses(
    ignore: int, outputs: Float[Array, "B L V"], labels: Int[Array, "B L"]
) -> tuple[Float[Array, "B L"], Bool[Array, "B L"]]:
    """Return the loss of each token, and which tokens count."""
    counts = labels != ignore
    # The label `ignore` may be no index, so token 0 takes its place. Its loss does not count.
    inside = jnp.where(counts, labels, 0)
    return optax.softmax_cross_entropy_with_integer_labels(outputs, inside), counts


def _mean_token_loss(ignore: int, outputs: Array, labels: Array) -> Float[Array, "B"]:
    """Return the mean loss of each example's tokens that count, or 0 if none does."""
    losses, counts = _token_losses(ignore, outputs, labels)
    total = jnp.sum(jnp.where(counts, losses, 0), axis=-1)
    return total / jnp.maximum(jnp.sum(counts, axis=-1), 1)


def _token_sums(
    ignore: int,
    score: Callable[[Array, Array], Array],
    outputs: Array,
    labels: Array,
    weights: Float[Array, "B"],
) -> tuple[Array, Array]:
    """Return the sum of a token's score over tokens that count, and their number."""
    counts = (labels != ignore) * weights[:, None]
    scores = score(outputs, labels).astype(jnp.float32)
    return _weighted(scores, counts), jnp.sum(counts)


def _check_tokens_and_logits(
    ignore: int, outputs: jax.ShapeDtypeStruct, labels: np.ndarray
) -> None:
    """Require logits [B, L, V] for labels [D, L] that are `ignore`, or below V."""
    if len(outputs.shape) != 3 or labels.ndim != 2 or outputs.shape[1] != labels.shape[1]:
        raise ValueError(
            f"must give logits [B, L, V] for labels [D, L], got {outputs.shape} for a batch of "
            f"2, and clients.labels of shape {labels.shape}. "
            "Give one output for each token, at each position of the labels."
        )
    counted = labels[labels != ignore]
    if counted.size and counted.dtype.kind == "i" and counted.min() < 0:
        least = counted.min()
        raise ValueError(
            f"must have clients.labels of at least 0, or of {ignore} where a position does not "
            f"count, got {least}. If {least} marks such positions, give the model "
            f"task=jaxfl.tasks.next_token(ignore={least}). Otherwise number the tokens from 0."
        )
    _check_labels(counted, 1, outputs.shape[2], "whole numbers")


def _chosen(known: dict[str, Metric], names: tuple[str, ...]) -> dict[str, Metric]:
    if unknown := [name for name in names if name not in known]:
        choices = ", ".join(map(repr, known))
        raise ValueError(
            f"metrics must be among {choices}, got {unknown[0]!r}. Give one of these names."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"metrics must be distinct, got {names}. Name each metric once.")
    return {name: known[name] for name in names}


def _check_labels(labels: np.ndarray, axes: int, classes: int, wanted: str) -> None:
    """Require whole-number labels with this number of axes, from 0 to below `classes`."""
    if labels.ndim != axes or labels.dtype.kind not in "iu":
        raise ValueError(
            f"must have clients.labels of {wanted}, got {labels.dtype} of shape {labels.shape}. "
            "Convert the labels, or give the model another task, such as jaxfl.tasks.regression()."
        )
    if labels.size and labels.min() < 0:
        raise ValueError(
            f"must have clients.labels of at least 0, got {labels.min()}. "
            "Number the classes from 0."
        )
    if labels.size and labels.max() >= classes:
        most = labels.max()
        raise ValueError(
            f"must have an output for each class, got {classes} outputs for clients.labels up to "
            f"{most}. Give a model of at least {most + 1} classes."
        )


def _weighted(values: Array, weights: Array, axis: int | None = None) -> Array:
    """Return the sum of the values whose weights are 1."""
    # A product with the weights would be NaN where the value of padding is NaN.
    return jnp.sum(jnp.where(weights > 0, values, 0), axis=axis)


def _hot(classes: Int[Array, "B"], outputs: Float[Array, "B K"]) -> Bool[Array, "B K"]:
    return classes[:, None] == jnp.arange(outputs.shape[-1])[None]


def _confusion(
    predicted: Bool[Array, "B K"], true: Bool[Array, "B K"], weights: Float[Array, "B"]
) -> tuple[Float[Array, "K"], Float[Array, "K"]]:
    """Return 2 TP, and 2 TP + FP + FN, by class."""
    right = 2.0 * _weighted(predicted & true, weights[:, None], axis=0)
    # A true positive counts in both terms, so that their sum is 2 TP + FP + FN.
    both = predicted.astype(jnp.float32) + true
    return right, _weighted(both, weights[:, None], axis=0)


def _macro_f1(sums: tuple[Float[Array, "K"], Float[Array, "K"]]) -> Float[Array, ""]:
    # A class that is neither seen nor predicted is 0 / 0, which `_ratio` makes NaN.
    return jnp.nanmean(_ratio(sums))


class _Outputs(NamedTuple):
    """Sums from which the area under an ROC curve is computed."""

    margins: Float[Array, "exact K"]
    """Numbers whose order is that of the classes' probabilities."""
    true: Bool[Array, "exact K"]
    count: Int[Array, ""]
    """Number of examples, of which the first `exact` are kept."""
    histograms: Float[Array, "2 K bins"]
    """Numbers of positive and of negative examples by class and bin of probabilities."""


_Ranking: TypeAlias = Callable[[Array, Array], tuple[Array, Array, Array]]
"""Function from outputs and labels to margins, probabilities and truths [B, K]."""


def _area(outputs_of: _Ranking, exact: int) -> Metric:
    """Return the metric of the mean area under the ROC curves of all classes.

    Args:
        outputs_of: Function that returns the numbers by which examples are ranked.
        exact: Number of examples up to which the area is exact.
    """

    def sums(outputs: Array, labels: Array, weights: Float[Array, "B"]) -> _Outputs:
        margins, scores, true = outputs_of(outputs, labels)
        # Padding moves behind the examples.
        order = jnp.argsort(weights <= 0, stable=True)[:exact]
        # All sums have `exact` rows, because shapes must not depend on the size of a batch.
        rest = ((0, exact - len(order)), (0, 0))
        return _Outputs(
            jnp.pad(margins[order].astype(jnp.float32), rest),
            jnp.pad(true[order], rest),
            # Batches add to this number, and float32 counts to 2**24 only.
            jnp.sum(weights > 0, dtype=jnp.int32),
            _histograms(scores, true, weights),
        )

    return Metric(sums, _area_of, merge=_merged_outputs)


def _merged_outputs(first: _Outputs, second: _Outputs) -> _Outputs:
    """Append the second batch's examples while there is room, and add counts and histograms."""
    exact = len(first.true)
    # The examples of `second` follow those of `first`, as far as there is room.
    place = jnp.arange(exact)[:, None] - first.count

    def appended(one: Array, other: Array) -> Array:
        within = jnp.clip(place[:, 0], 0, exact - 1)
        moved = jnp.take(other, within, axis=0)
        return jnp.where(place < 0, one, moved)

    return _Outputs(
        appended(first.margins, second.margins),
        appended(first.true, second.true),
        first.count + second.count,
        first.histograms + second.histograms,
    )


def _area_of(found: _Outputs) -> Float[Array, ""]:
    """Return the mean area, which is exact if all examples are kept."""
    exact = len(found.true)
    real = jnp.arange(exact) < found.count
    # Both forms are computed, because vectorised clients may need either.
    areas = jax.vmap(_rank_area, (1, 1, None))(found.margins, found.true, real)
    by_bins = _mean_auc(found.histograms)
    return jnp.where(found.count <= exact, jnp.nanmean(areas), by_bins)


def _margins(logits: Float[Array, "B K"]) -> Float[Array, "B K"]:
    """Return log(p / (1 - p)) of each class, which orders probabilities that round to 1."""
    if logits.shape[-1] == 2:
        # Of two classes, log(p / (1 - p)) is the difference of the logits.
        return logits - logits[:, ::-1]
    largest = _hot(jnp.argmax(logits, -1), logits)
    of_all = jax.nn.logsumexp(logits, -1, keepdims=True)
    of_others = jax.nn.logsumexp(jnp.where(largest, -jnp.inf, logits), -1, keepdims=True)
    # The probability of the largest logit may round to 1, for which `log1p(-1)` is infinite.
    small = jnp.where(largest, 0, jnp.exp(logits - of_all))
    return logits - jnp.where(largest, of_others, of_all + jnp.log1p(-small))


def _rank_area(
    scores: Float[Array, "n"], true: Bool[Array, "n"], real: Bool[Array, "n"]
) -> Float[Array, ""]:
    """Return the share of pairs whose positive example has the larger score (Mann-Whitney).

    A tie counts one half. Without a positive or a negative example, the result is NaN.
    """
    positive = true & real
    negative = ~true & real
    count = jnp.sum(negative, dtype=jnp.int32)
    sorted_scores = jnp.sort(jnp.where(negative, scores, jnp.inf))
    below = jnp.searchsorted(sorted_scores, scores, side="left")
    up_to = jnp.searchsorted(sorted_scores, scores, side="right")
    # Whole numbers are exact. The infinities behind the scores do not count.
    doubled = jnp.minimum(below, count) + jnp.minimum(up_to, count)
    ordered_pairs = jnp.sum(jnp.where(positive, doubled, 0), dtype=jnp.int32)
    return _ratio((ordered_pairs / 2, jnp.sum(positive, dtype=jnp.int32) * count))


def _histograms(
    scores: Float[Array, "B K"], true: Shaped[Array, "B K"], weights: Float[Array, "B"]
) -> Float[Array, "2 K bins"]:
    """Count the positive and the negative examples, by class, in each bin of scores in [0, 1]."""
    # The clip puts a probability of 1 into the last bin.
    bin_of_score = jnp.clip((scores * _BINS).astype(jnp.int32), 0, _BINS - 1)
    bins = jax.nn.one_hot(bin_of_score, _BINS)
    split = jnp.stack([true, ~true]) * weights[None, :, None]
    return jnp.einsum("sbk,bkt->skt", split.astype(jnp.float32), bins)


def _mean_auc(histograms: Float[Array, "2 K bins"]) -> Float[Array, ""]:
    positive, negative = histograms
    # Half of the negative examples in the same bin count as below.
    below = jnp.cumsum(negative, axis=-1) - negative / 2
    pairs = jnp.sum(positive, -1) * jnp.sum(negative, -1)
    ordered_pairs = jnp.sum(positive * below, axis=-1)
    return jnp.nanmean(_ratio((ordered_pairs, pairs)))


def _check_exact(exact: int) -> None:
    # True is an instance of int, but no number of examples.
    if type(exact) is not int or not 1 <= exact <= _MOST_EXACT:
        raise ValueError(
            f"exact must be a whole number from 1 to {_MOST_EXACT}, got {exact!r}. "
            "Give the largest number of test examples of a client."
        )


def _check_class_weights(weights: Sequence[float] | None) -> tuple[float, ...]:
    """Require a sequence of one or more finite numbers above 0, and return them as a tuple.

    None becomes an empty tuple.
    """
    if weights is None:
        return ()
    try:
        found = np.asarray(weights)
    except ValueError:
        # NumPy makes no array of rows that differ in length. An empty one fails below.
        found = np.zeros(0)
    is_vector = found.dtype.kind in "iuf" and found.ndim == 1 and found.size
    if not is_vector or not np.all((found > 0) & np.isfinite(found)):
        raise ValueError(
            "class_weights must be a vector of finite numbers above 0, got "
            f"{weights!r}. Give one for each class, for instance (1.0, 4.0)."
        )
    return tuple(found.astype(np.float64).tolist())


def auc_interval(
    auc: Float[np.ndarray, "C"] | float,
    positive: Int[np.ndarray, "C"] | int,
    negative: Int[np.ndarray, "C"] | int,
    *,
    level: float = 0.95,
) -> tuple[Float[np.ndarray, "C"], Float[np.ndarray, "C"]]:
    r"""Return a confidence interval of the area under an ROC curve, from numbers of examples.

    The limits are the two :math:`\theta` with :math:`|A - \theta| = z \sqrt{V(\theta)}`, where

    .. math::
        V(\theta) = \frac{\theta (1 - \theta)}{m n} \Big(
            1 + k \frac{1 - \theta}{2 - \theta} + k \frac{\theta}{1 + \theta} \Big),
        \qquad k = \frac{m + n}{2} - 1.

    Here :math:`z` is the normal quantile of (1 + `level`) / 2, which is 1.96 for 0.95. The interval
    covers the random draw of the test examples. It does not cover the choice of a model, nor the
    noise of its training.

    Args:
        auc: Areas A from 0 to 1 of one class, such as each client's "auc" in a task with two
            classes. NaN gives NaN.
        positive: Numbers m of test examples of the class, at least 1.
        negative: Numbers n of other test examples, at least 1.
        level: Nominal probability with which an interval contains the true area.

    Returns:
        Lower and upper limits, each of the common shape of the areas and numbers.

    Raises:
        ValueError: `level` is not in (0, 1), an area is not in [0, 1], or a known area has no
            examples of a kind.

    References: Newcombe 2006, "Confidence intervals for an effect size measure based on the
        Mann-Whitney statistic. Part 2" (method 5).

    >>> low, high = auc_interval(0.8, 20, 30)
    >>> round(float(low), 2), round(float(high), 2)
    (0.64, 0.89)
    """
    _check_areas(auc, positive, negative, level)
    # The upper quantile would need 1 + level, which is rounded to 2 for the largest levels.
    z = -statistics.NormalDist().inv_cdf((1 - level) / 2)
    area, m, n = np.broadcast_arrays(
        *(np.asarray(x, np.float64) for x in (auc, positive, negative))
    )

    def outside(theta: _Areas) -> Bool[np.ndarray, "C"]:
        # Both sides of the docstring's equation are squared.
        return (area - theta) ** 2 > z**2 * _area_variance(theta, m, n)

    return _limit_towards(0.0, area, outside), _limit_towards(1.0, area, outside)


def _check_areas(auc: Any, positive: Any, negative: Any, level: float) -> None:
    """Require areas, numbers of examples and a level for which there is an interval."""
    if not isinstance(level, numbers.Real) or not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level!r}. Give for instance 0.95.")
    if np.any((np.asarray(auc) < 0) | (np.asarray(auc) > 1)):
        raise ValueError(
            f"auc must have areas in [0, 1], got {auc!r}. "
            "Give for instance result.scores['auc'] of a run."
        )
    for name, counts in (("positive", positive), ("negative", negative)):
        if np.any((np.asarray(counts) < 1) & ~np.isnan(auc)):
            raise ValueError(
                f"{name} must be at least 1 where an area is known, got {counts!r}. "
                "Give NaN as the area of a client without both kinds of examples."
            )


def _area_variance(theta: _Areas, m: _Areas, n: _Areas) -> _Areas:
    """Return the variance V of an estimated area whose true value is theta (`auc_interval`)."""
    k = (m + n) / 2 - 1
    spread = 1 + k * ((1 - theta) / (2 - theta) + theta / (1 + theta))
    return theta * (1 - theta) * spread / (m * n)


def _limit_towards(
    far: float,
    area: _Areas,
    outside: Callable[[_Areas], Bool[np.ndarray, "C"]],
) -> _Areas:
    """Return the limit between the area and `far`, which is 0 or 1, by bisection."""
    # The area itself is inside, so `inner` is inside at every step.
    inner = np.array(area)
    outer = np.full_like(area, far)
    # After 60 halvings, the distance of at most 1 is below 1e-18.
    for _ in range(60):
        middle = (inner + outer) / 2
        inner = np.where(outside(middle), inner, middle)
        outer = np.where(outside(middle), middle, outer)
    return np.where(np.isnan(area), np.nan, inner)
