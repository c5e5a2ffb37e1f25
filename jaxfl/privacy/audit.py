r"""Empirical lower bounds on epsilon: an attacker guesses from the releases which canaries are in.

k canaries are extra clients. Coins decide which of them are in. Those participate at the rate of
the run's sampler, each with the longest update that the mechanism admits, :math:`C u_j`, along
nearly orthogonal directions

.. math:: u_j = D \, (h_j, h_j, \dots) / \sqrt{d}.

The columns h of a Hadamard matrix of :math:`K \ge k` rows are repeated over the d coordinates. Only
the auditor knows the random signs D. For two canaries,
:math:`|\langle u_i, u_j \rangle| \le K / (2d)`. No array has size k d: the canaries' sum, and all
scores :math:`x_j = \langle u_j, \text{released sum} \rangle / (C \max w)` for the weights w, take
O(d + K log K). Canaries have the largest weight. On a grid they are shorter, to leave room for
rounding.

The attacker sees every released sum. It scores a canary over all rounds in three ways: by the sum
of x, by the maximum of x, and by the sum of the log-likelihood ratios
:math:`\log(1 - q + q e^{(x - 1/2) / z^2})` under the stated noise. The scores of canaries in and
out yield a lower bound on epsilon at 95% confidence (Steinke, Nasr, Jagielski, Privacy Auditing
with One Training Run, NeurIPS 2023; Mahloujifar, Melis, Chaudhuri, Auditing f-Differential Privacy
in One Run, 2024). They also yield a Gaussian estimate (Andrew et al., One-shot Empirical Privacy
Estimation for Federated Learning, ICLR 2024).

An attacker that has the final model alone scores by
:math:`\langle u_j, \theta_T - \theta_0 \rangle`. Up to a factor, this is the sum again if the
server adds up aggregates of one scale, and another number under an adaptive optimizer. The score by
the final model has separate bounds.

A bound above the stated epsilon refutes the statement. A bound below it proves nothing.
"""

import dataclasses
import functools
import math
import statistics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Key, UInt32

from jaxfl._support.checks import check_count, checked, traced
from jaxfl._support.lazy import dp_accounting
from jaxfl.local.lanes import zeros_of
from jaxfl.privacy.mechanisms.gaussian import Cohort, Mechanism, Total
from jaxfl.privacy.noise import CANARY, derive, single
from jaxfl.privacy.sampling import Sampling
from jaxfl.privacy.sums import add
from jaxfl.types import Tree

_CONFIDENCE = 0.95
"""Confidence of the lower bounds."""

_CONFIDENCE_OF_HINTS = 0.99
"""Confidence of the least plausible estimate."""

_SCORES = ("likelihood", "sum", "most")
"""Fields of `Scores` with scores over all released sums, without that of the final model."""


@checked(count=functools.partial(check_count, least=16))
@dataclasses.dataclass(frozen=True)
class Canaries:
    """Canaries of an audit, for the argument `audit` of `simulate`.

    The mechanism must clip updates. If clients add the noise, cohorts must be fixed in size, and
    the mechanism must have no filter.

    Args:
        count: k, the number of canaries, at least 16, because smaller samples may all be in, or all
            out. The provable bound grows like log k. The disturbance grows too: at sampling rate q,
            a round's sum has about k q / 2 canaries of norm C each.
    """

    count: int = 1000


class Scores(NamedTuple):
    """Memory of the auditor. The docstring of this module defines a round's score x."""

    secret: UInt32[Array, "2"]
    """Seed of the signs."""
    taken: Bool[Array, "k"]
    """Whether each canary is in."""
    likelihood: Float[Array, "k"]
    """Sum of the log-likelihood ratios of each canary."""
    sum: Float[Array, "k"]
    """Sum of the x of each canary."""
    most: Float[Array, "k"]
    """Maximum of the x of each canary."""
    final: Float[np.ndarray, "k"] | None = None
    """Score by the final model, after a run whose server state holds one. None before that."""


class Drawn(NamedTuple):
    """Draw of a round's canaries. A drawn canary takes part if it is in (`Scores.taken`)."""

    sampled: Bool[Array, "k"]
    """Whether the sampler draws each canary."""
    rate: Float[Array, "#k"]
    """Probability that the sampler draws a canary."""


def check_audit(mechanism: Mechanism) -> None:
    """Require a mechanism that can be audited, and the extra `[audit]`."""
    _auditor()
    if not mechanism.communicates or (not traced(mechanism.clip) and math.isinf(mechanism.clip)):
        raise ValueError(
            f"audit must have a mechanism that clips updates, got mechanism={mechanism!r}. "
            "Give a clip, or leave audit out."
        )
    if mechanism.clients_noisy and not mechanism.fixed_cohort:
        raise ValueError(
            "audit must have cohorts of a fixed size and no filter if clients add the noise, "
            f"got mechanism={mechanism!r}. Canaries add no noise, so a random cohort could fall "
            "short of the noise that accounting assumes. Give a sampler of fixed cohorts, "
            "or leave audit out."
        )


def first_scores(canaries: Canaries, key: Key[Array, "*S"]) -> Scores:
    """Return the auditor's first memory: which canaries are in, the signs' seed, and no scores."""
    canary_key = single(derive(key, CANARY))
    sign_key = jax.random.fold_in(canary_key, 0)
    member_key = jax.random.fold_in(canary_key, 1)
    zeros = jnp.zeros(canaries.count)
    return Scores(
        secret=jax.random.bits(sign_key, (2,), jnp.uint32),
        # The theorems of one-run auditing ask for fair and independent coins.
        taken=jax.random.bernoulli(member_key, 0.5, (canaries.count,)),
        likelihood=zeros,
        sum=zeros,
        most=zeros - math.inf,
    )


def draw_canaries(
    canaries: Canaries,
    key: Key[Array, "*S"],
    sampling: Sampling,
    index: Int[Array, ""],
    clients: int,
) -> Drawn:
    """Return the canaries of a round that `Sampling.sample_canaries` draws.

    Args:
        canaries: Canaries of the audit.
        key: Key of the run's cohorts.
        sampling: Sampler of the mechanism.
        index: Index of the round.
        clients: Number of clients, which sets the rate of some samplers.
    """
    # A purpose of its own keeps the clients' cohorts as they are without canaries.
    canary_key = single(derive(key, index // sampling.period, CANARY))
    return Drawn(*sampling.sample_canaries(canary_key, clients, canaries.count, index))


def audited_aggregate(
    mechanism: Mechanism,
    key: Key[Array, "*S"],
    memory: Tree,
    scores: Scores,
    cohort: Cohort,
    total: Total,
    mesh: Mesh,
) -> tuple[Tree, Float[Array, ""], Tree, Scores]:
    """Add the canaries to the sum, and score them by the mechanism's aggregate.

    Args:
        mechanism: Mechanism of the clients, whose guarantee is unaffected.
        key: Key of the round's noise.
        memory: Memory of the mechanism.
        scores: Memory of the auditor.
        cohort: Participants and canaries of the round, and its numbers.
        total: Sum of all that the participants send.
        mesh: Mesh of devices, on which noise is drawn.

    Returns:
        The results of `Mechanism.aggregate`, and the next memory of the auditor.
    """
    numbers = cohort.numbers
    drawn = cohort.canaries

    def aggregated(total: Total) -> tuple[Tree, Float[Array, ""], Tree]:
        return mechanism.aggregate(key, memory, cohort, total, mesh)

    # The sum may hold wide integers, or the bits of `AdaptiveClip`. Only the aggregate has the
    # shapes of an update.
    blank, unravel = ravel_pytree(zeros_of(jax.eval_shape(lambda: aggregated(total)[0])))
    size = blank.size
    weight = jnp.max(numbers.weights)
    signs = _canary_signs(scores.secret, size)
    length = mechanism.update_bound(memory)
    present = scores.taken & drawn.sampled
    canary_sum = _sum_of_directions(signs, present) * (length * size**-0.5)
    scale = weight / mechanism.unit(memory, numbers)
    if mechanism.noise == "grid":
        # Rounding may lengthen an update, so canaries leave room for it.
        scale *= jnp.maximum(0.0, 1 - (size**0.5 + 1) / (length * scale))
    count = jnp.sum(present.astype(jnp.float32))
    contribution = mechanism.contribute_canaries(memory, unravel(canary_sum), count)
    scaled = jax.tree.map(lambda leaf: leaf * scale, contribution)
    joined = add(total.update, mechanism.representation.encode(scaled))
    released, std, next_memory = aggregated(total._replace(update=joined))
    # The divisor undoes the mean, because x is a score of the released sum.
    x = _along_directions(signs, ravel_pytree(released)[0], len(present)) * (
        mechanism.divisor(numbers, total.weight) / (length * weight * size**0.5)
    )
    # Without noise the logarithms would be infinite, and their sum over rounds could be NaN.
    z = jnp.maximum(jnp.sqrt(std**2 + total.variance) / weight, 1e-3)
    return released, std, next_memory, _scored(scores, x, z, drawn.rate)


def _scored(
    scores: Scores,
    x: Float[Array, "k"],
    z: Float[Array, ""],
    rate: Float[Array, "#k"],
) -> Scores:
    """Return the scores after a round with the scores x, the noise z and the sampling rate."""
    taking_part = (x - 0.5) / z**2
    likelihood = jnp.logaddexp(jnp.log1p(-rate), jnp.log(rate) + taking_part)
    return scores._replace(
        # At a rate of 0 the round reveals nothing about a canary.
        likelihood=scores.likelihood + jnp.where(rate > 0, likelihood, 0.0),
        sum=scores.sum + x,
        most=jnp.maximum(scores.most, x),
    )


def audit_report(scores: Scores, delta: float) -> dict[str, Any]:
    r"""Return lower bounds on epsilon at 95% confidence, an estimate, and the attacks' accuracy.

    The entry `scores` has the bounds of each score by both theorems, and the area `auc` under its
    ROC curve. `at_least` is the largest bound over both theorems and the three scores of all
    releases, each at a sixth of the significance level. `at_least` leaves out the bounds by the
    final model alone, which have the same level: under a plain server they are those of the sum
    again. `estimate` is that of the sum.

    The estimate is the epsilon of one Gaussian whose means are as far apart as the means of the
    scores. This distance d is in standard deviations of the scores. With n scores of canaries in
    and m of canaries out, d has a standard error of
    :math:`\sqrt{1/n + 1/m + d^2 / (2 (n + m - 2))}`. `estimate_at_least` is the epsilon at d less
    2.33 standard errors. It exceeds the true epsilon in at most about 1 of 100 honest runs. A
    statement whose epsilon it exceeds says so.

    Args:
        scores: Memory after the last round, on the host.
        delta: Failure probability of the bounded epsilon.
    """
    taken = np.asarray(scores.taken)
    values = {name: np.asarray(getattr(scores, name), np.float64) for name in _names(scores)}
    bounds = {name: _attack_bounds(own[taken], own[~taken], delta) for name, own in values.items()}
    theorems = ("one_run", "one_run_fdp")
    found = [
        (bounds[name][theorem], f"{theorem} of {name}") for name in _SCORES for theorem in theorems
    ]
    # Each of the six bounds has a sixth of the level, so their maximum holds at the whole level.
    value, by = max(found)
    sums = values["sum"]
    distance, least_distance = _distances(sums[taken], sums[~taken])
    return {
        "canaries": len(taken),
        "inside": int(taken.sum()),
        "confidence": _CONFIDENCE,
        "delta": delta,
        "at_least": value,
        "by": by,
        "estimate": _of_gaussian(distance, delta),
        "estimate_at_least": _of_gaussian(least_distance, delta),
        "scores": bounds,
    }


def _attack_bounds(
    inside: Float[np.ndarray, "n"],
    outside: Float[np.ndarray, "m"],
    delta: float,
) -> dict[str, float]:
    """Return the bounds by both theorems at a sixth of the level, and the area under the curve."""
    attack = _auditor().CanaryScoreAuditor(inside, outside)
    significance = (1 - _CONFIDENCE) / 6
    return {
        "one_run": float(attack.epsilon_one_run(significance, delta)),
        "one_run_fdp": float(attack.epsilon_one_run_fdp(significance, delta)),
        "auc": float(attack.attack_auroc()),
    }


def _distances(
    inside: Float[np.ndarray, "n"], outside: Float[np.ndarray, "m"]
) -> tuple[float, float]:
    """Return the distance of the means of the scores in stds, and the least plausible distance.

    `audit_report` has the formula of the standard error. If the std is 0, both are infinite for
    a larger mean inside, and otherwise 0.
    """
    spread = math.sqrt((inside.var(ddof=1) + outside.var(ddof=1)) / 2)
    difference = float(inside.mean() - outside.mean())
    if not spread:
        distance = 0.0
        if difference > 0:
            distance = math.inf
        return distance, distance
    distance = difference / spread
    n = len(inside)
    m = len(outside)
    variance = 1 / n + 1 / m + distance**2 / (2 * (n + m - 2))
    errors = statistics.NormalDist().inv_cdf(_CONFIDENCE_OF_HINTS)
    return distance, distance - errors * math.sqrt(variance)


def _of_gaussian(distance: float, delta: float) -> float:
    """Return the epsilon of a Gaussian mechanism that moves the mean by `distance` stds.

    A distance of 0 or less gives 0.
    """
    if distance > 0:
        return float(dp_accounting.get_epsilon_gaussian(1 / distance, delta))
    return 0.0


def guesses_of(scores: Scores) -> dict[str, np.ndarray]:
    """Return membership (`taken`) and scores as arrays, by their fields in `Scores`."""
    return {name: np.asarray(getattr(scores, name)) for name in ("taken", *_names(scores))}


def model_in(server: Tree, update: Tree) -> Float[np.ndarray, "d"] | None:
    """Return the flat model in a server's state, or None if the state holds none.

    The model is the first part with the structure and the shapes of an update.
    """
    kind = jax.tree.map(np.shape, update)

    def fits(part: Tree) -> bool:
        return jax.tree.map(np.shape, part) == kind

    # `is_leaf` ends the descent at the outermost part that fits.
    parts = jax.tree.leaves(server, is_leaf=fits)
    model = next((part for part in parts if fits(part)), ())
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(model)]
    if not leaves:
        return None
    return np.concatenate(leaves)


def with_final(
    scores: Scores, first: Float[np.ndarray, "d"] | None, last: Float[np.ndarray, "d"] | None
) -> Scores:
    """Return the scores, with those of the final model if there is one.

    Args:
        scores: Scores of all releases.
        first: Flat model before the first round. None if the server's state holds none.
        last: Flat model after the last round. None if the server's state holds none.
    """
    if first is None or last is None:
        return scores
    size = len(first)
    signs = _canary_signs(jnp.asarray(scores.secret), size)
    products = _along_directions(signs, jnp.asarray(last - first), len(scores.taken))
    return scores._replace(final=np.asarray(products * size**-0.5))


def _names(scores: Scores) -> tuple[str, ...]:
    if scores.final is None:
        return _SCORES
    return (*_SCORES, "final")


def _auditor() -> Any:
    try:
        from jax_privacy import auditing
    except ImportError:
        raise ValueError(
            "audit must have the package jax-privacy, got none. "
            "Install it by `pip install 'jaxfl[audit]'`."
        ) from None
    return auditing


def _power_of_two(count: int) -> int:
    """Return K, the smallest power of two that is at least `count`, and at least 2."""
    return 1 << max(count - 1, 1).bit_length()


def _canary_signs(secret: UInt32[Array, "2"], size: int) -> Float[Array, "d"]:
    key = jax.random.wrap_key_data(secret, impl="threefry2x32")
    bits = jax.random.bits(key, (-(-size // 32),), jnp.uint32)
    # A word of random bits gives 32 signs.
    spread = (bits[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None]) & 1
    return 1.0 - 2.0 * spread.reshape(-1)[:size].astype(jnp.float32)


def _sum_of_directions(
    signs: Float[Array, "d"],
    present: Bool[Array, "k"],
) -> Float[Array, "d"]:
    r"""Return the sum of :math:`\sqrt{d} \, u_j` over the present canaries."""
    padding = _power_of_two(len(present)) - len(present)
    # A single transform adds up the directions of all present canaries.
    weights = jnp.pad(present.astype(jnp.float32), (0, padding))
    return signs * _repeat(_hadamard(weights), len(signs))


def _along_directions(
    signs: Float[Array, "d"],
    flat: Float[Array, "d"],
    count: int,
) -> Float[Array, "k"]:
    r"""Return :math:`\sqrt{d} \, \langle u_j, v \rangle` of a flat v for `count` canaries."""
    rows = _power_of_two(count)
    # Directions repeat every K coordinates, so a score needs the sum over blocks alone.
    return _hadamard(_fold(signs * flat, rows))[:count]


def _repeat(block: Float[Array, "K"], size: int) -> Float[Array, "d"]:
    return jnp.tile(block, -(-size // len(block)))[:size]


def _fold(flat: Float[Array, "d"], rows: int) -> Float[Array, "K"]:
    """Return the sum over blocks of K coordinates, of which the last is padded with zeros."""
    padded = jnp.pad(flat, (0, -len(flat) % rows))
    return jnp.sum(padded.reshape(-1, rows), axis=0)


def _hadamard(values: Float[Array, "K"]) -> Float[Array, "K"]:
    """Return the unnormalised Walsh-Hadamard transform. K must be a power of two."""
    half = 1
    while half < len(values):
        # Each pass doubles the length of the blocks that are transformed.
        pairs = values.reshape(-1, 2, half)
        sums = pairs[:, 0] + pairs[:, 1]
        differences = pairs[:, 0] - pairs[:, 1]
        values = jnp.stack([sums, differences], axis=1).reshape(-1)
        half *= 2
    return values
