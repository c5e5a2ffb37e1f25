"""ADP-PFL: privacy budgets by round and by client, and updates masked by Fisher information."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._support.checks import (
    check_choice,
    check_delta,
    check_noise,
    check_numbers,
    check_positive,
    checked,
    show,
    traced,
    up_to_infinity,
)
from jaxfl.algorithms.fedavg import fedavg, sends_weights
from jaxfl.algorithms.server import Server
from jaxfl.local.fisher import client_fisher, normalize_over_all, squared_gradient
from jaxfl.local.leakage import client_risk
from jaxfl.local.masks import sparsify, top_percentile_mask
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.mechanisms import Mechanism, PrivacyFilter, Release
from jaxfl.privacy.sampling import FixedSize, Sampling
from jaxfl.privacy.schedule import ClientNoise, client_shares
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms, Tree

_REVEALED_RISK = (
    "each client's noise scale follows from its leakage risk, an exact function of its private "
    "data that the server receives: neighbouring data give another scale, which a vector of many "
    "coordinates reveals"
)
"""Reason why the published method with private risks has no finite epsilon."""

MaskFn: TypeAlias = Callable[[Key[Array, ""], Model, Params, Tree, ClientData], Tree]
"""Function that returns the mask of coordinates to send.

Its arguments are a key, the model, the trained parameters, the update (or weights) before masking,
and the client's data.
"""

RiskFn: TypeAlias = Callable[[Key[Array, ""], Model, Params, ClientData], Float[Array, ""]]
"""Function from a key, the model, the trained parameters and the client's data to its risk."""

Square: TypeAlias = Literal["examples", "mean"]
"""Estimate of the Fisher information.

"examples" is the mean of squared per-example gradients. "mean" is the square of the mean gradient,
as (13) is printed.
"""

_FISHER = {"examples": client_fisher, "mean": squared_gradient}
"""Functions that estimate a client's Fisher information, by the names in `Square`."""


def _check_percentile(name: str, value: Any) -> Any:
    value = check_positive(name, value, zero=True)
    # A sweep's traced number has no value to compare.
    if not traced(value) and value >= 100:
        raise ValueError(f"{name} must be in [0, 100), got {value!r}. Give a lower percentile.")
    return value


def _check_threshold(name: str, value: Any) -> Any:
    if traced(value):
        return value
    number = float(check_numbers(name, value, axes=(0,), negative=True))
    if number >= 1:
        raise ValueError(
            f"{name} must be below 1, got {number!r}. Give a number in [0, 1), or a negative one "
            "to select all coordinates."
        )
    return number


@checked(percentile=_check_percentile)
def fisher_percentile(percentile: Number, square: Square = "examples") -> MaskFn:
    """Return a function that selects coordinates of Fisher information above a percentile.

    Each client takes the percentile over all coordinates of its own trained model.

    Args:
        percentile: Percentile in [0, 100).
        square: Estimate of the Fisher information (see `Square`).
    """
    fisher = _FISHER[square]

    def select(
        key: Key[Array, ""], model: Model, params: Params, sent: Tree, data: ClientData
    ) -> Tree:
        return top_percentile_mask(fisher(model, params, data), percentile)

    return select


@checked(threshold=_check_threshold)
def fisher_threshold(threshold: Number, square: Square = "examples") -> MaskFn:
    r"""Return a function that selects coordinates of scaled Fisher information above :math:`\tau`.

    Each client scales its Fisher information to [0, 1] by the least and the greatest value over
    all coordinates (14).

    Args:
        threshold: :math:`\tau`, below 1. A negative number selects all coordinates.
        square: Estimate of the Fisher information (see `Square`).
    """
    fisher = _FISHER[square]

    def select(
        key: Key[Array, ""], model: Model, params: Params, sent: Tree, data: ClientData
    ) -> Tree:
        # Eq. (14) scales the information, and (15) compares it with tau.
        scaled = normalize_over_all(fisher(model, params, data))
        return jax.tree.map(lambda f: f > threshold, scaled)

    return select


@checked(percentile=_check_percentile)
def largest(percentile: Number) -> MaskFn:
    """Return a function that selects the coordinates whose magnitude is above a percentile.

    Args:
        percentile: Percentile in [0, 100) of all magnitudes in what a client would send.
    """

    def select(
        key: Key[Array, ""], model: Model, params: Params, sent: Tree, data: ClientData
    ) -> Tree:
        return top_percentile_mask(sent, percentile)

    return select


@checked(percentile=_check_percentile)
def random_share(percentile: Number) -> MaskFn:
    """Return a function that selects random coordinates, as many as are above a percentile.

    Args:
        percentile: Percentile in [0, 100). For example, 80 keeps about a fifth of the coordinates.
    """

    def select(
        key: Key[Array, ""], model: Model, params: Params, sent: Tree, data: ClientData
    ) -> Tree:
        # The largest of independent draws are a random choice of coordinates.
        drawn = optax.tree.random_like(key, sent, jax.random.uniform)
        return top_percentile_mask(drawn, percentile)

    return select


def _check_noise(name: str, value: Any) -> Any:
    if isinstance(value, ClientNoise):
        return value
    return check_noise(name, value)


def _check_risks(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return check_choice(name, value, ("private",))
    return check_numbers(name, value)


def _check_bounds(name: str, value: Any) -> tuple[float, ...]:
    bounds = tuple(check_numbers(name, value).tolist())
    if len(bounds) != 2 or bounds[1] <= bounds[0]:
        raise ValueError(
            f"{name} must be the least and the greatest risk, got {show(value)}. Give two numbers "
            "above 0, the smaller one first."
        )
    return bounds


@checked(
    noise=_check_noise,
    risks=_check_risks,
    risk_bounds=_check_bounds,
    clip=up_to_infinity,
    delta=check_delta,
)
def adp_pfl(
    model: Model,
    *,
    sampling: Sampling,
    noise: Number | Sequence[float] | np.ndarray | Float[Array, "T"] | ClientNoise,
    risks: Literal["private"] | Sequence[float] | np.ndarray | None = None,
    risk_bounds: tuple[float, float] | None = None,
    risk_fn: RiskFn = client_risk,
    clip: Number = 1.0,
    mask: MaskFn | None = fisher_percentile(80.0),
    local: LocalSGD = LocalSGD(optax.sgd(0.01, momentum=0.5), 64, 5),
    server_optimizer: optax.GradientTransformation = optax.sgd(1.0),
    delta: float | None = None,
) -> Algorithm:
    r"""Build ADP-PFL: one global model, with budgets by round and, optionally, by client.

    In a round a client

    1. trains the broadcast model,
    2. measures its leakage risk :math:`R_i` (7), (8), for the rounds to come, if risks are private,
    3. keeps the coordinates :math:`M = [\hat F > \tau]` of large Fisher information, by (13)-(15),
    4. sends :math:`\mathrm{clip}_C(M \odot \Delta_i)`, with noise on **all** coordinates.

    If a client's trained weights are not finite, it measures no risk, and its update is dropped
    whatever the mask keeps.

    The noise follows from the round's budget (10), (11) and from the client's share of this budget,
    :math:`\epsilon_i^t = \epsilon^t \min_j R_j / R_i` (12). A client whose risk is not known yet
    has the full budget. `jaxfl.privacy.schedule` derives the noise from an epsilon by `round_noise`
    and `client_noise`.

    Args:
        model: The network.
        sampling: The sampler, which draws the participants of each round.
        noise: Standard deviation of the server's noise on the sum, divided by C: one number, or one
            per round `[T]`. With `risks`, the result of `client_noise`: noise by round of a client
            with the full budget, the filter's bound, and the noise on released risks.
        risks: Leakage risks, which set the clients' budgets. None gives all clients the same
            budget. Numbers above 0 `[C]` are public and fixed risks. With "private" each client
            measures its risk, clips it to `risk_bounds`, and releases it with noise.
        risk_bounds: The least and the greatest risk that is released, both above 0. Give them for
            "private" risks only.
        risk_fn: Function that measures a client's risk. Use `functools.partial(client_risk, ...)`
            to change the number of probes or the reading of (8).
        clip: C, the L2 bound on a client's full update.
        mask: Function that selects the coordinates to send: `fisher_percentile`,
            `fisher_threshold`, `largest`, `random_share`, or your own. None sends all.
        local: Local training of a client in one round.
        server_optimizer: Optimizer of the server, whose gradient is the negative averaged update.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.

    Guarantee: Client-level privacy, where the clipped update has norm at most C. The mask cuts the
        update before it is clipped, and the noise is on all coordinates.

        Without `risks` the adjacency is zero-out, for the aggregate observer. With `risks` it is
        replace-one, for the upload observer and therefore for the aggregate observer too. Given all
        earlier messages, an update with noise of std s C is a Gaussian mechanism with multiplier
        s / 2. A released risk with noise of std r times the width of `risk_bounds` is one with
        multiplier r. A filter stops each client before its messages compose to a
        multiplier below `noise.least_total`. Fully adaptive composition then gives the epsilon of
        one Gaussian mechanism with this multiplier.
    Deviations from the paper: Clients send updates, not weights. The noise is not scaled by the
        sparsity, because Theorems 1 and 2 do not hold: masks of neighbouring data have different
        supports. Weights are uniform, or public ones by
        `dataclasses.replace(method.mechanism, weights=...)`. The Fisher information is the mean of
        squared per-example gradients, unless the mask is `fisher_percentile(80.0, square="mean")`.
        Ties at the percentile go to the lower index. The minimum in (12) is over the clients whose
        risk is known. The noise for :math:`\epsilon_i^t` is the rule's noise for :math:`\epsilon^t`
        over the client's share, which is exact for the classic rule.
    References: ADP-PFL: Differential Privacy Federated Learning Based on Privacy Budget Allocation
        and Sparsification.

    Raises:
        ValueError: `noise` or `risk_bounds` does not fit `risks`, or a number is out of range.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Full
    >>> from jaxfl.privacy.schedule import client_noise, round_budgets
    >>> plan = client_noise(round_budgets(1.0, 4), 1.0, participation=1.0, release_share=0.1)
    >>> network = mlp((8, 8, 1), 10, hidden=(16,))
    >>> options = {"noise": plan, "risks": "private", "risk_bounds": (0.1, 10.0)}
    >>> adp_pfl(network, sampling=Full(), **options).mechanism.release.high
    10.0
    """
    if isinstance(noise, ClientNoise) != (risks is not None):
        raise ValueError(
            "noise must be the result of `client_noise` with risks, and plain numbers without, got "
            f"{noise!r} with risks={risks!r}. Give noise=client_noise(...), or leave risks out."
        )
    if isinstance(risks, str) != (risk_bounds is not None):
        raise ValueError(
            "risk_bounds must be (least, greatest) with risks='private', and None otherwise, got "
            f"{risk_bounds!r} with risks={risks!r}. Give for instance risk_bounds=(0.1, 10.0) with "
            "private risks, and leave it out otherwise."
        )
    base = fedavg(
        model,
        local=local,
        server_optimizer=server_optimizer,
        mechanism=_mechanism(noise, risks, risk_bounds, clip=clip, sampling=sampling),
        terms=Terms(delta),
        name="adp_pfl",
    )
    # Risks are measured only if clients release them.
    measure = None
    if isinstance(risks, str):
        measure = risk_fn
    return _masked(base, local, mask, measure)


@checked(
    noise=check_noise,
    risks=_check_risks,
    clip=up_to_infinity,
    delta=check_delta,
    claim=up_to_infinity,
)
def adp_pfl_paper(
    model: Model,
    *,
    sampling: Sampling,
    noise: Number | Sequence[float] | np.ndarray | Float[Array, "T"],
    sensitivity: Literal["C/m", "C"] = "C/m",
    risks: Literal["private"] | Sequence[float] | np.ndarray | None = None,
    risk_fn: RiskFn = client_risk,
    clip: Number = 1.0,
    mask: MaskFn | None = fisher_percentile(80.0),
    upload: Literal["updates", "weights"] = "updates",
    local: LocalSGD = LocalSGD(optax.sgd(0.01, momentum=0.5), 64, 5),
    delta: float | None = None,
    claim: float | None = None,
) -> Algorithm:
    """Build ADP-PFL as published: clients add noise by their budgets and their exact risks.

    Args:
        model: The network.
        sampling: The sampler, which draws the participants of each round.
        noise: Standard deviation of the noise that a client with the full budget of the round adds,
            divided by the sensitivity: one number, or one per round `[T]`. `paper_noise` of
            `jaxfl.privacy.schedule` gives this noise, with the `sparsity` of theorem 2.
        sensitivity: The sensitivity that scales the noise. "C/m" bounds how far one of m
            participants moves their mean (22), but the client adds this noise to an upload that it
            moves by C. "C" is the sensitivity of an upload. With "C/m", `sampling` must be a
            `FixedSize(m)`.
        risks: Leakage risks, which set the clients' budgets. None gives all clients the same
            budget. Numbers above 0 `[C]` are public and fixed risks. With "private" each client
            measures its risk and sends it to the server unchanged.
        risk_fn: Function that measures a client's risk.
        clip: C, the L2 bound on a client's full update.
        mask: Function that selects the coordinates to send, as in `adp_pfl`. None sends all.
        upload: What clients send and the server averages: updates, or the masked weights of (16).
        local: Local training of a client in one round.
        delta: Failure probability of the privacy statement. None means min(1e-5, 1 / (10 N)) for N
            clients.
        claim: The epsilon that the paper states for `noise`. None means no claim.

    Guarantee: Client-level privacy by the noise that is drawn, and none with private risks. The
        statement has the epsilon of this noise. With "C/m" this noise is an m-th of the noise that
        the rule asks for an upload.
    Deviations from the paper: Those of `adp_pfl`, except for what is sent. "C/m" is the paper's
        (22) and gives accuracies like those of its table 2, but its line 15 has C. Theorem 2 is
        part of `noise`: if the share of masked coordinates followed from data (`fisher_threshold`),
        the noise would too.
    References: ADP-PFL: Differential Privacy Federated Learning Based on Privacy Budget Allocation
        and Sparsification.

    Raises:
        ValueError: `sensitivity` is "C/m", and `sampling` is no `FixedSize`.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import FixedSize
    >>> method = adp_pfl_paper(mlp((8, 8, 1), 10), sampling=FixedSize(10), noise=9.0)
    >>> float(method.mechanism.client_noise)
    0.9
    """
    divisor = _divisor(sensitivity, sampling)
    denominator = "expected"
    # Models are averaged over those present, because another divisor would change their scale.
    if upload == "weights":
        denominator = "participants"
    bounded: dict[str, Any] = {"clip": clip, "sampling": sampling, "denominator": denominator}
    stds: Any = noise
    # NumPy cannot read a sweep's traced number, which division takes as it is.
    if not traced(noise):
        stds = np.asarray(noise, np.float64)
    measure = None
    broken = None
    client_noise = stds / divisor
    if isinstance(risks, str):
        # The server receives the exact risks, so there is no finite epsilon.
        measure = risk_fn
        broken = _REVEALED_RISK
        release = Release(client_shares)
        mechanism = PrivacyFilter(client_noise=client_noise, release=release, **bounded)
    elif risks is None:
        mechanism = Mechanism(client_noise=client_noise, **bounded)
    else:
        mechanism = Mechanism(client_noise=_public(client_noise, risks), **bounded)
    rule = (
        f"sensitivity {sensitivity}, with budgets taken for epsilons that add up, "
        "or for their maximum"
    )
    claimed = None
    if claim is not None:
        claimed = (claim, rule)
    terms = Terms(delta, claimed, broken)
    base = fedavg(model, local=local, mechanism=mechanism, terms=terms, name="adp_pfl_paper")
    return _masked(base, local, mask, measure, weights=upload == "weights")


def _mechanism(
    noise: Any, risks: Any, risk_bounds: tuple[float, float] | None, **bounded: Any
) -> Mechanism:
    """Return the mechanism of `adp_pfl`, whose arguments it takes.

    `bounded` holds the clip bound and the sampler.
    """
    if not isinstance(noise, ClientNoise):
        multiplier: Any = noise
        if not traced(noise) and np.ndim(noise) > 0:
            multiplier = tuple(np.asarray(noise, float).tolist())
        # Without risks, all clients have the same budget, and the server adds the noise.
        return Mechanism(noise_multiplier=multiplier, **bounded)
    if risk_bounds is None:
        return PrivacyFilter(
            # Public risks fix the noise of each client before the first round.
            client_noise=_public(noise.noise, risks),
            least_total=noise.least_total,
            **bounded,
        )
    return PrivacyFilter(
        # Released risks set each client's noise in the rounds that follow.
        client_noise=np.asarray(noise.noise),
        least_total=noise.least_total,
        release=Release(client_shares, *risk_bounds, noise=noise.release_noise),
        **bounded,
    )


def _divisor(sensitivity: str, sampling: Sampling) -> int:
    """Return the number by which the published sensitivity divides C."""
    # An upload moves by up to C itself.
    if sensitivity == "C":
        return 1
    if isinstance(sampling, FixedSize):
        # By (22), one of m participants moves their mean by at most C / m.
        return sampling.size
    raise ValueError(
        f"sampling must be a FixedSize with sensitivity='C/m', got {sampling!r}. "
        "Give FixedSize(m), or sensitivity='C'."
    )


def _masked(
    base: Algorithm,
    local: LocalSGD,
    mask: MaskFn | None,
    risk_fn: RiskFn | None,
    *,
    weights: bool = False,
) -> Algorithm:
    """Return `base` with clients that measure a risk and mask their updates.

    Args:
        base: FedAvg with a mechanism.
        local: Local training of `base`.
        mask: Function that selects the coordinates to send. None sends all.
        risk_fn: Function that measures the risk. None measures and sends no risk.
        weights: Whether clients send masked weights and not masked updates.
    """
    model = base.model
    method = base
    if weights:
        method = sends_weights(base)

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        (sent, _), client, info = method.client_update(key, server, client, data)
        params = sent
        if not weights:
            params = optax.tree.add(server.params, sent)
        # One sum suffices, because NaN and infinity persist in sums.
        lost = ~jnp.isfinite(optax.tree.sum(params))
        # An update that will be dropped needs neither a risk nor a mask.
        data = dataclasses.replace(data, size=jnp.where(lost, 0, data.size))
        masking, probing = jax.random.split(_unused_key(key, local))
        risk = None
        if risk_fn is not None:
            # Eq. (7) and (8): the risk is that of the trained model.
            risk = risk_fn(probing, model, params, data)
            info |= {"risk": risk}
        if mask is not None:
            # What is sent is cut first, so the engine clips only what the mask keeps.
            upload_mask = mask(masking, model, params, sent, data)
            sent = sparsify(upload_mask, sent)
            size = sum(leaf.size for leaf in jax.tree.leaves(upload_mask))
            info |= {"kept": optax.tree.sum(upload_mask) / size}
        return Message(sent, risk), client, info

    return method._replace(client_update=client_update)


def _unused_key(key: Key[Array, ""], local: LocalSGD) -> Key[Array, ""]:
    """Return a key whose draws are independent of those of the local training with `key`."""
    # Training folds smaller numbers than this one into the key.
    unused = local.epochs
    if local.steps is not None:
        unused = local.steps
    return jax.random.fold_in(key, unused)


def _public(noise: Any, risks: Any) -> Float[np.ndarray, "#T C"]:
    """Return noise by round and client, in proportion to public risks.

    The client with the least risk gets `noise` itself.
    """
    # By (12), a client's share of the budget is inverse to its risk.
    risks = np.asarray(risks, np.float64)
    return np.atleast_1d(noise)[:, None] * (risks / risks.min())
