r"""Empirical lower bounds on epsilon: in the run, an attacker guesses from the releases which canaries are in.

k canaries are extra clients. A coin decides which of them are in; those participate by the run's sampler, each with the
longest update the mechanism admits, :math:`C u_j`, along nearly orthogonal directions

.. math:: u_j = D \, (h_j, h_j, \dots) / \sqrt{d}

for the columns h of a Hadamard matrix of :math:`K \ge k` rows, repeated over the d coordinates, and random signs D that
only the auditor knows. :math:`|\langle u_i, u_j \rangle| \le K / 2d`. No array has size k d: the canaries' sum, and all
scores :math:`x_j = \langle u_j, \text{released sum} \rangle / C`, take O(d + K log K).

The attacker sees every released sum. It scores a canary over all rounds by the sum of x, the maximum of x, and the sum
of the log-likelihood ratios :math:`\log(1 - q + q e^{(x - 1/2) / z^2})` under the stated noise. The scores of canaries
in and out yield a lower bound on epsilon at 95% confidence (Steinke, Nasr, Jagielski, Privacy Auditing with One
Training Run, NeurIPS 2023; Mahloujifar, Melis, Chaudhuri, Auditing f-Differential Privacy in One Run, 2024), and a
Gaussian estimate (Andrew et al., One-shot Empirical Privacy Estimation for Federated Learning, ICLR 2024).

Who sees the final model alone scores by :math:`\langle u_j, \theta_T - \theta_0 \rangle`, the sum again if the server
adds aggregates up, and another number under an adaptive optimizer. It has bounds of its own beside the others.

A bound above the stated epsilon refutes the statement; one below it proves nothing.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Key, UInt32

from jaxfl._validate import check_count, checked, traced
from jaxfl.lazy import dp_accounting
from jaxfl.privacy.mechanisms.gaussian import Cohort, Mechanism, Participant, Total
from jaxfl.privacy.noise import CANARY, derive, single
from jaxfl.privacy.observers import Observer, View
from jaxfl.privacy.sums import add, widen
from jaxfl.types import Ledger, Message, Number, Tree

_CONFIDENCE = 0.95
_CONFIDENCE_OF_HINTS = 0.99
_SCORES = ("likelihood", "sum", "most")


@checked(count=functools.partial(check_count, least=16))
@dataclasses.dataclass(frozen=True)
class Canaries:
    """Argument `audit` of `simulate`. Where clients bring the noise, cohorts must be fixed in size, without a filter.

    Args:
        count: k, at least 16: of fewer, all may be in, or none. The provable bound grows like log k; the disturbance
            grows too: a round's sum has about k q / 2 canaries of norm C each.
    """

    count: int = 1000


class Scores(NamedTuple):
    """The auditor's memory beside the mechanism's."""

    mechanism: Tree
    secret: UInt32[Array, "2"]
    """Seed of the signs."""
    taken: Bool[Array, "k"]
    """Which are in."""
    likelihood: Float[Array, "k"]
    sum: Float[Array, "k"]
    most: Float[Array, "k"]
    final: Float[np.ndarray, "k"] | None = None
    """Of the final model, once the run has ended, if the server's state holds one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Audited(Mechanism):
    """A mechanism with canaries in its sums; clients and their guarantee are unaffected."""

    mechanism: Mechanism = dataclasses.field(default_factory=Mechanism)
    canaries: Canaries = Canaries()

    def init(self, key: Key[Array, "*S"], update: Callable[[], Tree], clients: int) -> Scores:
        """Draw membership and signs."""
        canary_key = single(derive(key, CANARY))
        zeros = jnp.zeros(self.canaries.count)
        return Scores(
            mechanism=self.mechanism.init(key, update, clients),
            secret=jax.random.bits(jax.random.fold_in(canary_key, 0), (2,), jnp.uint32),
            taken=jax.random.bernoulli(
                jax.random.fold_in(canary_key, 1), 0.5, (self.canaries.count,)
            ),
            likelihood=zeros,
            sum=zeros,
            most=zeros - math.inf,
        )

    def draw(
        self, key: Key[Array, "*S"], memory: Scores, index: Int[Array, ""], clients: int
    ) -> Cohort:
        """The mechanism's cohort, and the canaries'."""
        cohort = self.mechanism.draw(key, memory.mechanism, index, clients)
        canary_key = single(derive(key, index // self.sampling.period, CANARY))
        beside = self.sampling.beside(canary_key, clients, self.canaries.count, index)
        return cohort._replace(carried=(cohort.carried, beside))

    def contribution_bound(self, memory: Scores) -> Number:
        """Delegate."""
        return self.mechanism.contribution_bound(memory.mechanism)

    def bound(self, memory: Scores, update: Tree) -> tuple[Tree, Float[Array, ""], Number]:
        """Delegate."""
        return self.mechanism.bound(memory.mechanism, update)

    def contribute(
        self,
        key: Key[Array, "*S"],
        memory: Scores,
        client: Participant,
        sent: Message,
        norm: Float[Array, ""],
    ) -> tuple[Tree, Tree]:
        """Delegate."""
        return self.mechanism.contribute(key, memory.mechanism, client, sent, norm)

    def unit(self, memory: Scores, numbers: Any) -> Float[Array, ""]:
        """Delegate."""
        return self.mechanism.unit(memory.mechanism, numbers)

    def in_units(
        self, memory: Scores, contribution: Tree, norm: Float[Array, ""], scale: Float[Array, ""]
    ) -> Tree:
        """Delegate."""
        return self.mechanism.in_units(memory.mechanism, contribution, norm, scale)

    def aggregate(
        self, key: Key[Array, "*S"], memory: Scores, cohort: Cohort, total: Total, mesh: Mesh
    ) -> tuple[Tree, Float[Array, ""], Tree]:
        """Add the canaries to the sum, and score them by its aggregate."""
        carried, (drawn, rate) = cohort.carried
        cohort, inner, numbers = cohort._replace(carried=carried), self.mechanism, cohort.numbers
        shapes = jax.eval_shape(
            lambda: inner.aggregate(key, memory.mechanism, cohort, total, mesh)[0]
        )
        blank, unravel = ravel_pytree(
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        )
        size, weight = blank.size, jnp.max(numbers.weights)
        signs = _signs(memory.secret, size)
        length = inner.bound(memory.mechanism, unravel(blank))[2]
        present = memory.taken & drawn
        directions = (
            jnp.zeros(_rows(self.canaries.count))
            .at[: len(present)]
            .set(present.astype(jnp.float32))
        )
        canary_sum = signs * _repeat(_hadamard(directions), size) * (length * size**-0.5)
        scale = weight / inner.unit(memory.mechanism, numbers)
        if self.noise == "grid":  # rounding may lengthen an update by so much
            scale *= jnp.maximum(0.0, 1 - (size**0.5 + 1) / (length * scale))
        joined = inner.insert(
            memory.mechanism, unravel(canary_sum), jnp.sum(present.astype(jnp.float32))
        )
        joined = jax.tree.map(lambda leaf: leaf * scale, joined)
        if self.exact:
            joined = widen(joined)
        elif self.noise == "grid":
            joined = jax.tree.map(lambda leaf: jnp.round(leaf).astype(jnp.int32), joined)
        joined = total._replace(update=add(total.update, joined))
        released, std, inner_memory = inner.aggregate(key, memory.mechanism, cohort, joined, mesh)

        seen = _fold(signs * ravel_pytree(released)[0], _rows(self.canaries.count))
        x = _hadamard(seen)[: len(present)] * (
            inner.divisor(numbers, total.weight) / (length * weight * size**0.5)
        )
        z = jnp.maximum(jnp.sqrt(std**2 + total.variance) / weight, 1e-3)
        likelihood = jnp.logaddexp(jnp.log1p(-rate), jnp.log(rate) + (x - 0.5) / z**2)
        return (
            released,
            std,
            memory._replace(
                mechanism=inner_memory,
                likelihood=memory.likelihood + jnp.where(rate > 0, likelihood, 0.0),
                sum=memory.sum + x,
                most=jnp.maximum(memory.most, x),
            ),
        )

    def planned(self, clients: int, rounds: int) -> Ledger:
        """Delegate."""
        return self.mechanism.planned(clients, rounds)

    def view(
        self, ledger: Ledger, observer: Observer, *, replaced: bool = False, one_round: bool = False
    ) -> View:
        """Delegate."""
        return self.mechanism.view(ledger, observer, replaced=replaced, one_round=one_round)

    def describe(self, ledger: Ledger) -> list[str]:
        """Delegate."""
        return self.mechanism.describe(ledger)


@checked()
def audited(mechanism: Mechanism, canaries: Canaries) -> Audited:
    """The mechanism with canaries.

    Raises:
        ValueError: there is nothing to audit, or the extra `[audit]` is missing.
    """
    _auditor()
    if not mechanism.communicates or (not traced(mechanism.clip) and math.isinf(mechanism.clip)):
        raise ValueError(
            f"audit with mechanism={mechanism!r}: updates are not clipped; give a clip, or leave it out"
        )
    if not mechanism.covers_canaries:
        raise ValueError(
            f"audit with mechanism={mechanism!r}: canaries bring no noise, and cohorts may bring less than a client "
            "counts on, its own; give a sampler of fixed cohorts without a filter, or leave it out"
        )
    shared = {field.name: getattr(mechanism, field.name) for field in dataclasses.fields(Mechanism)}
    return Audited(**shared, mechanism=mechanism, canaries=canaries)


def audit_report(scores: Scores, delta: float) -> dict[str, Any]:
    r"""Lower bounds on epsilon at 95% confidence, an estimate, and the attacks' accuracy.

    `at_least` is the largest over two theorems and the three scores of all releases, each at a sixth of the
    significance level. The bounds by the final model alone, at the same level, are not in it: under a plain server it
    is the sum over again. The estimate is of the sum.

    The estimate is the epsilon of one Gaussian whose means are as far apart as those of the scores, in their standard
    deviations d. With n scores of canaries in and m of canaries out, d has a standard error of
    :math:`\sqrt{1/n + 1/m + d^2 / 2(n + m - 2)}`. `estimate_at_least` is the epsilon at d less 2.33 standard errors.
    It exceeds the true one in 1 of 100 honest runs, and a statement whose epsilon it exceeds says so.

    Args:
        scores: the memory after the last round, on the host.
        delta: of the bounded epsilon.
    """
    auditor, taken = _auditor(), np.asarray(scores.taken)
    significance = (1 - _CONFIDENCE) / 6
    bounds: dict[str, dict[str, float]] = {}
    for name in _names(scores):
        values = np.asarray(getattr(scores, name), np.float64)
        attack = auditor.CanaryScoreAuditor(values[taken], values[~taken])
        bounds[name] = {
            "one_run": float(attack.epsilon_one_run(significance, delta)),
            "one_run_fdp": float(attack.epsilon_one_run_fdp(significance, delta)),
            "auc": float(attack.attack_auroc()),
        }
    theorems = ("one_run", "one_run_fdp")
    value, by = max(
        (bounds[name][theorem], f"{theorem} of {name}") for name in _SCORES for theorem in theorems
    )
    sums = np.asarray(scores.sum, np.float64)
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


def _distances(
    inside: Float[np.ndarray, "n"], outside: Float[np.ndarray, "m"]
) -> tuple[float, float]:
    """Return how many stds the scores' means are apart, and the least plausible number (see `audit_report`)."""
    spread = math.sqrt((inside.var(ddof=1) + outside.var(ddof=1)) / 2)
    if not spread:
        return math.inf, math.inf
    distance = float(inside.mean() - outside.mean()) / spread
    variance = (
        1 / len(inside) + 1 / len(outside) + distance**2 / (2 * (len(inside) + len(outside) - 2))
    )
    least = distance - statistics.NormalDist().inv_cdf(_CONFIDENCE_OF_HINTS) * math.sqrt(variance)
    return distance, least


def _of_gaussian(distance: float, delta: float) -> float:
    """Return the epsilon of a Gaussian whose means are so many stds apart."""
    return float(dp_accounting.get_epsilon_gaussian(1 / distance, delta)) if distance > 0 else 0.0


def unaudited(memory: Tree) -> Tree:
    """The inner mechanism's memory."""
    return memory.mechanism if isinstance(memory, Scores) else memory


def told(scores: Scores) -> dict[str, np.ndarray]:
    """Arrays for a file: membership and scores."""
    return {name: np.asarray(getattr(scores, name)) for name in ("taken", *_names(scores))}


def model_in(server: Tree, update: Tree) -> Float[np.ndarray, "d"] | None:
    """The model in a server's state, flat: its first part with the structure and the shapes of an update, if any."""
    kind = jax.tree.map(np.shape, update)

    def fits(part: Tree) -> bool:
        return jax.tree.map(np.shape, part) == kind

    model = next((part for part in jax.tree.leaves(server, is_leaf=fits) if fits(part)), ())
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(model)]
    return np.concatenate(leaves) if leaves else None


def with_final(
    scores: Scores, first: Float[np.ndarray, "d"] | None, last: Float[np.ndarray, "d"] | None
) -> Scores:
    """The scores with those of the final model, from the first and the last; without models there are none."""
    if first is None or last is None:
        return scores
    count, size = len(scores.taken), len(first)
    seen = _fold(_signs(jnp.asarray(scores.secret), size) * jnp.asarray(last - first), _rows(count))
    return scores._replace(final=np.asarray(_hadamard(seen)[:count] * size**-0.5))


def _names(scores: Scores) -> tuple[str, ...]:
    return _SCORES if scores.final is None else (*_SCORES, "final")


def _auditor() -> Any:
    try:
        from jax_privacy import auditing
    except ImportError:
        raise ValueError("audit needs jax-privacy: pip install 'jaxfl[audit]'") from None
    return auditing


def _rows(count: int) -> int:
    """K, a power of two."""
    return 1 << max(count - 1, 1).bit_length()


def _signs(secret: UInt32[Array, "2"], size: int) -> Float[Array, "d"]:
    bits = jax.random.bits(
        jax.random.wrap_key_data(secret, impl="threefry2x32"), (-(-size // 32),), jnp.uint32
    )
    spread = (bits[:, None] >> jnp.arange(32, dtype=jnp.uint32)[None]) & 1
    return 1.0 - 2.0 * spread.reshape(-1)[:size].astype(jnp.float32)


def _repeat(block: Float[Array, "K"], size: int) -> Float[Array, "d"]:
    return jnp.tile(block, -(-size // len(block)))[:size]


def _fold(flat: Float[Array, "d"], rows: int) -> Float[Array, "K"]:
    """Sum of the blocks of K."""
    return jnp.sum(jnp.pad(flat, (0, -len(flat) % rows)).reshape(-1, rows), axis=0)


def _hadamard(values: Float[Array, "K"]) -> Float[Array, "K"]:
    """The unnormalised Walsh-Hadamard transform."""
    half = 1
    while half < len(values):
        pairs = values.reshape(-1, 2, half)
        values = jnp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(
            -1
        )
        half *= 2
    return values
