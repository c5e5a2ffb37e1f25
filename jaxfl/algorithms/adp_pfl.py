"""ADP-PFL: budgets by round and by client, and updates on the coordinates of large Fisher information."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jaxtyping import Float, Key

from jaxfl._validate import (
    check_choice,
    check_noise,
    check_numbers,
    check_positive,
    checked,
    probability,
    show,
    traced,
    up_to_infinity,
)
from jaxfl.algorithms.fedavg import fedavg, sends_weights
from jaxfl.local.fisher import client_fisher, normalize_over_all, squared_gradient
from jaxfl.local.leakage import client_risk
from jaxfl.local.masks import sparsify, top_percentile_mask
from jaxfl.local.train import LocalSGD
from jaxfl.privacy.mechanisms import Mechanism, PrivacyFilter, Release
from jaxfl.privacy.sampling import FixedSize, Sampling
from jaxfl.privacy.schedule import ClientNoise, client_shares
from jaxfl.server import Server
from jaxfl.types import Algorithm, ClientData, Message, Model, Number, Params, Terms, Tree

_BROKEN = (
    "each client's noise scale follows from its leakage risk, an exact function of its private data that the server is "
    "told: neighbouring data give another scale, which a vector of many coordinates shows"
)

MaskFn: TypeAlias = Callable[[Key[Array, ""], Model, Params, Tree, ClientData], Tree]
"""From a key, the model, its trained parameters, an update and the client's data to the mask of what is sent."""
RiskFn: TypeAlias = Callable[[Key[Array, ""], Model, Params, ClientData], Float[Array, ""]]
Square: TypeAlias = Literal["examples", "mean"]
"""Fisher information: the mean of squared per-example gradients, or the square of their mean, as (13) is printed."""
_FISHER = {"examples": client_fisher, "mean": squared_gradient}


def _check_percentile(name: str, value: Any) -> Any:
    value = check_positive(name, value, zero=True)
    if not traced(value) and value >= 100:
        raise ValueError(f"{name}={value!r}: give a number in [0, 100)")
    return value


def _check_threshold(name: str, value: Any) -> Any:
    if traced(value):
        return value
    number = float(check_numbers(name, value, axes=(0,), negative=True))
    if number >= 1:
        raise ValueError(
            f"{name} must be below 1, got {number:g}. Give a number from 0; one below it selects all."
        )
    return number


@checked(percentile=_check_percentile)
def fisher_percentile(percentile: Number, square: Square = "examples") -> MaskFn:
    """Coordinates whose Fisher information in the trained model is above a percentile of all, per client."""
    fisher = _FISHER[square]
    return lambda key, model, params, sent, data: top_percentile_mask(
        fisher(model, params, data), percentile
    )


@checked(threshold=_check_threshold)
def fisher_threshold(threshold: Number, square: Square = "examples") -> MaskFn:
    """Select coordinates whose Fisher information, min-max scaled over all to [0, 1] (14), is above tau, below 1."""

    def select(
        key: Key[Array, ""], model: Model, params: Params, sent: Tree, data: ClientData
    ) -> Tree:
        return jax.tree.map(
            lambda f: f > threshold, normalize_over_all(_FISHER[square](model, params, data))
        )

    return select


@checked(percentile=_check_percentile)
def largest(percentile: Number) -> MaskFn:
    """The largest coordinates of what is sent, those above a percentile of all."""
    return lambda key, model, params, sent, data: top_percentile_mask(sent, percentile)


@checked(percentile=_check_percentile)
def random_share(percentile: Number) -> MaskFn:
    """Random coordinates, as many as are above a percentile of all."""

    def select(
        key: Key[Array, ""], model: Model, params: Params, sent: Tree, data: ClientData
    ) -> Tree:
        return top_percentile_mask(
            optax.tree.random_like(key, sent, jax.random.uniform), percentile
        )

    return select


def _check_noise(name: str, value: Any) -> Any:
    return value if isinstance(value, ClientNoise) else check_noise(name, value)


def _check_risks(name: str, value: Any) -> Any:
    return (
        check_choice(name, value, ("private",))
        if isinstance(value, str)
        else check_numbers(name, value)
    )


def _check_bounds(name: str, value: Any) -> tuple[float, ...]:
    bounds = tuple(check_numbers(name, value).tolist())
    if len(bounds) != 2 or bounds[1] <= bounds[0]:
        raise ValueError(f"{name}={show(value)}: give the least and the greatest risk")
    return bounds


@checked(
    noise=_check_noise,
    risks=_check_risks,
    risk_bounds=_check_bounds,
    clip=up_to_infinity,
    delta=probability,
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
    r"""ADP-PFL: one global model; noise follows from budgets by round and, optionally, by client.

    In a round a client

    1. trains the broadcast model,
    2. measures its leakage risk :math:`R_i` (7), (8), for the rounds to come,
    3. keeps the coordinates :math:`M = [\hat F > \tau]` of large Fisher information, by (13)-(15),
    4. sends :math:`\mathrm{clip}_C(M \odot \Delta_i)`, with noise on **all** coordinates.

    A client whose trained weights are not finite measures nothing, and its update is dropped, whatever the mask keeps.

    The noise is that of the round's budget (10), (11), and of the client's share of it,
    :math:`\epsilon_i^t = \epsilon^t \min_j R_j / R_i` (12): until its risk is known, all of it.
    `jaxfl.privacy.schedule` derives the noise from an epsilon: `round_noise`, `client_noise`.

    Args:
        model: the network.
        sampling: who takes part.
        noise: std over C of the server's noise on the sum, a number or one per round; with `risks`, what each client
            adds when it has the whole budget of the round, with a filter and the noise on a released risk
            (`client_noise`).
        risks: budgets by client: None: equal; numbers above 0 `[C]`: public risks, fixed; "private": measured,
            clipped to `risk_bounds`, and released with noise.
        risk_bounds: least and greatest risk that is released; the least above 0.
        risk_fn: how a client measures its risk; `functools.partial(client_risk, ...)` for other probes or readings.
        clip: C, L2 bound on a client's whole update.
        mask: what is sent of an update: `fisher_percentile`, `fisher_threshold`, `largest`, `random_share`, or a
            function of your own; None: all.
        local: how a client trains in a round.
        server_optimizer: takes the negative averaged update as its gradient.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).

    Guarantee: client-level, sensitivity C: masks cut the update before it is clipped, noise is on all coordinates.
        Without `risks`: zero-out, for the aggregate observer. With `risks`: replace-one, for the upload observer and so
        for the other, by a filter: given everything that was sent before, an update is a Gaussian mechanism with
        multiplier s / 2 and a released risk one with r; a client stops before they add up to less than
        `noise.least_total`, and fully adaptive composition gives the epsilon of that one Gaussian.
    Deviations from the paper: updates are sent, not weights; the noise is not scaled by the sparsity (Theorems 1 and 2
        do not hold: supports differ between neighbours); uniform weights, or public ones by
        `dataclasses.replace(method.mechanism, weights=...)`; Fisher information is the mean of squared per-example
        gradients unless `fisher_percentile(80.0, square="mean")`; of equal values at the percentile some are kept.
        The minimum in (12) is over the clients whose risk is known. A rule's noise for :math:`\epsilon_i^t` is
        that for :math:`\epsilon^t` over the share, which is exact for the classic rule.
    References: ADP-PFL: Differential Privacy Federated Learning Based on Privacy Budget Allocation and Sparsification.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Full
    >>> from jaxfl.privacy.schedule import client_noise, round_budgets
    >>> plan = client_noise(round_budgets(1.0, 4), 1.0, participation=1.0, release_share=0.1)
    >>> network = mlp((8, 8, 1), 10, hidden=(16,))
    >>> method = adp_pfl(network, sampling=Full(), noise=plan, risks="private", risk_bounds=(0.1, 10.0))
    >>> method.mechanism.release.high
    10.0
    """
    if isinstance(noise, ClientNoise) != (risks is not None):
        raise ValueError(
            f"noise={noise!r} with risks={risks!r}: give a `client_noise` with risks, and only then"
        )
    if isinstance(risks, str) != (risk_bounds is not None):
        raise ValueError(
            f"risk_bounds={risk_bounds!r} with risks={risks!r}: give (least, greatest) of private ones"
        )
    bounded: dict[str, Any] = {"clip": clip, "sampling": sampling}
    if not isinstance(noise, ClientNoise):
        by_round = not traced(noise) and np.ndim(noise) > 0
        z: Any = tuple(np.asarray(noise, float).tolist()) if by_round else noise
        mechanism = Mechanism(noise_multiplier=z, **bounded)
    elif risk_bounds is None:
        mechanism = PrivacyFilter(
            client_noise=_public(noise.noise, risks), least_total=noise.least_total, **bounded
        )
    else:
        bounded["release"] = Release(client_shares, *risk_bounds, noise=noise.release_noise)
        mechanism = PrivacyFilter(
            client_noise=np.asarray(noise.noise), least_total=noise.least_total, **bounded
        )
    base = fedavg(
        model,
        local=local,
        server_optimizer=server_optimizer,
        mechanism=mechanism,
        terms=Terms(delta),
        name="adp_pfl",
    )
    return _masked(base, local, mask, risk_fn if isinstance(risks, str) else None)


@checked(
    noise=check_noise,
    risks=_check_risks,
    clip=up_to_infinity,
    delta=probability,
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
    """ADP-PFL as published: each client adds noise by its share of the round's budget, and of its exact risk.

    Args:
        model: the network.
        sampling: who takes part.
        noise: std over the sensitivity of what each client adds when it has the whole budget of the round, a number or
            one per round (`jaxfl.privacy.paper_noise`, with the `sparsity` of theorem 2).
        sensitivity: "C/m": what one of m participants moves their mean by, at most (22), though it adds this noise to
            an upload that it moves by C; `sampling` must fix m. "C": of an upload.
        risks: budgets by client: None: equal; numbers above 0 `[C]`: public risks, fixed; "private": measured, and
            sent to the server unchanged.
        risk_fn: as in `adp_pfl`.
        clip: C, L2 bound on a client's whole update.
        mask: as in `adp_pfl`.
        upload: what is sent and averaged: updates, or the masked weights of (16).
        local: as in `adp_pfl`.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).
        claim: the epsilon that the paper states for `noise`.

    Guarantee: client-level, what the noise gives without private risks; with them: none. The statement has the epsilon
        of the noise that is drawn: with "C/m" that is an m-th of what the rule asks for an upload.
    Deviations from the paper: those of `adp_pfl`, but for what is sent. "C/m" is the paper's (22), and gives
        accuracies like those of its table 2; its line 15 has C. Theorem 2 is in the noise that you give: a share p of
        masked coordinates that follows from data (`fisher_threshold`) would make the noise follow from it.
    References: as for `adp_pfl`.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import FixedSize
    >>> method = adp_pfl_paper(mlp((8, 8, 1), 10), sampling=FixedSize(10), noise=9.0)
    >>> float(method.mechanism.client_noise)
    0.9
    """
    m = 1 if sensitivity == "C" else sampling.size if isinstance(sampling, FixedSize) else None
    if m is None:
        raise ValueError(
            f"sampling={sampling!r} with sensitivity='C/m': give FixedSize(m), or sensitivity='C'"
        )
    denominator, private = (
        "expected" if upload == "updates" else "participants",
        isinstance(risks, str),
    )
    bounded: dict[str, Any] = {"clip": clip, "sampling": sampling, "denominator": denominator}
    stds: Any = noise if traced(noise) else np.asarray(noise, np.float64)
    added = stds / m
    if private:
        mechanism = PrivacyFilter(client_noise=added, release=Release(client_shares), **bounded)
    else:
        mechanism = Mechanism(
            client_noise=added if risks is None else _public(added, risks), **bounded
        )
    rule = (
        f"sensitivity {sensitivity}; budgets taken for epsilons that add up, or for their maximum"
    )
    terms = Terms(delta, None if claim is None else (claim, rule), _BROKEN if private else None)
    base = fedavg(model, local=local, mechanism=mechanism, terms=terms, name="adp_pfl_paper")
    return _masked(base, local, mask, risk_fn if private else None, weights=upload == "weights")


def _masked(
    base: Algorithm,
    local: LocalSGD,
    mask: MaskFn | None,
    risk_fn: RiskFn | None,
    *,
    weights: bool = False,
) -> Algorithm:
    """FedAvg whose clients measure a risk (None: none), and send masked updates or weights."""
    model, sends = base.model, sends_weights(base) if weights else base

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        (sent, _), client, info = sends.client_update(key, server, client, data)
        params, risk = sent if weights else optax.tree.add(server.params, sent), None
        lost = ~jnp.isfinite(optax.tree.sum(params))
        data = dataclasses.replace(
            data, size=jnp.where(lost, 0, data.size)
        )  # no risk or mask of a dropped update
        unused = (
            local.epochs if local.steps is None else local.steps
        )  # training used the numbers below
        masking, probing = jax.random.split(jax.random.fold_in(key, unused))
        if risk_fn is not None:
            risk = risk_fn(probing, model, params, data)
            info |= {"risk": risk}
        if mask is not None:
            kept = mask(masking, model, params, sent, data)
            sent = sparsify(kept, sent)
            info |= {
                "kept": optax.tree.sum(kept) / sum(leaf.size for leaf in jax.tree.leaves(kept))
            }
        return Message(sent, risk), client, info

    return sends._replace(client_update=client_update)


def _public(noise: Any, risks: Any) -> Float[np.ndarray, "#T C"]:
    """Noise by round and client, in proportion to public risks."""
    risks = np.asarray(risks, np.float64)
    return np.atleast_1d(noise)[:, None] * (risks / risks.min())
