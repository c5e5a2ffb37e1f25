"""ADP-PFL: budgets by round and by client, and updates on the coordinates of large Fisher information."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

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
from jaxfl.algorithms.fedavg import fedavg, refuse_server_optimizer
from jaxfl.local.fisher import client_fisher, normalize_over_all
from jaxfl.local.leakage import client_risk
from jaxfl.local.masks import sparsify, top_percentile_mask
from jaxfl.privacy.mechanism import Mechanism, Release, Sampling
from jaxfl.privacy.schedule import ClientNoise, client_shares
from jaxfl.server import Server, init_account
from jaxfl.types import Account, Algorithm, ClientData, Message, Model, Number, Params, Tree

_BROKEN = (
    "each client's noise scale follows from its leakage risk, an exact function of its private data that the server is "
    "told: neighbouring data give another scale, which a vector of many coordinates shows"
)


class Accounted(NamedTuple):
    """A client whose account the engine keeps."""

    account: Account


def _check_noise(name: str, value: Any) -> Any:
    return value if isinstance(value, ClientNoise) else check_noise(name, value)


def _check_risks(name: str, value: Any) -> Any:
    return check_choice(name, value, ("private",)) if isinstance(value, str) else check_numbers(name, value)


def _check_bounds(name: str, value: Any) -> tuple[float, ...]:
    bounds = tuple(check_numbers(name, value).tolist())
    if len(bounds) != 2 or bounds[1] <= bounds[0]:
        raise ValueError(f"{name}={show(value)}: give the least and the greatest risk")
    return bounds


def _check_threshold(name: str, value: Any) -> Any:
    return value if traced(value) else float(check_numbers(name, value, axes=(0,), negative=True))


def _check_percentile(name: str, value: Any) -> Any:
    value = check_positive(name, value, zero=True)
    if not traced(value) and value >= 100:
        raise ValueError(f"{name}={value!r}: give a number in [0, 100)")
    return value


@checked(
    noise=_check_noise,
    risks=_check_risks,
    risk_bounds=_check_bounds,
    clip=up_to_infinity,
    percentile=_check_percentile,
    threshold=_check_threshold,
    delta=probability,
    claim=up_to_infinity,
)
def adp_pfl(
    model: Model,
    *,
    sampling: Sampling,
    noise: Number | Sequence[float] | np.ndarray | Float[Array, "T"] | ClientNoise,
    fidelity: Literal["sound", "paper"] = "sound",
    risks: Literal["private"] | Sequence[float] | np.ndarray | None = None,
    risk_bounds: tuple[float, float] | None = None,
    risk_fn: Callable[[Key[Array, ""], Model, Params, ClientData], Float[Array, ""]] = client_risk,
    clip: Number = 1.0,
    mask: Literal["fisher", "top_k", "random"] | None = "fisher",
    percentile: Number = 80.0,
    threshold: Number | None = None,
    upload: Literal["updates", "weights"] = "updates",
    optimizer: optax.GradientTransformation = optax.sgd(0.01, momentum=0.5),
    batch_size: int = 64,
    epochs: int = 5,
    server_optimizer: optax.GradientTransformation | None = None,
    delta: float | None = None,
    claim: float | None = None,
) -> Algorithm:
    r"""ADP-PFL: one global model; noise follows from budgets by round and, optionally, by client.

    In a round a client

    1. trains the broadcast model,
    2. measures its leakage risk :math:`R_i` (7), (8), for the rounds to come,
    3. keeps the coordinates :math:`M = [\hat F > \tau]` of large Fisher information, by (13)-(15),
    4. sends :math:`\mathrm{clip}_C(M \odot \Delta_i)`, with noise on **all** coordinates.

    One whose trained weights are not finite measures nothing, and its update is dropped, whatever a mask would keep.

    The noise is that of the round's budget (10), (11), and of the client's share of it,
    :math:`\epsilon_i^t = \epsilon^t \min_j R_j / R_i` (12): in the first round, and until its risk is known, all of it.
    `jaxfl.privacy.schedule` makes it of an epsilon: `round_noise`, `client_noise`, `paper_noise`.

    Args:
        model: the network.
        sampling: who takes part.
        noise: std over C, a number or one per round. `sound`: of the server's noise on the sum; `paper`: of what each
            client adds when it has the whole budget of the round; `sound` with `risks`: that, with a filter and
            the noise on a released risk (`client_noise`).
        fidelity: which of the two.
        risks: budgets by client: None: all alike; numbers above 0 `[C]`: public risks, fixed; "private": measured. Then
            `paper` uses the exact values, and `sound` clips them to `risk_bounds` and releases them with noise.
        risk_bounds: least and greatest risk that `sound` releases; the least above 0.
        risk_fn: how a client measures its risk; `functools.partial(client_risk, ...)` for other probes or readings.
        clip: C.
        mask: what is kept: coordinates of large Fisher information of the trained model, the largest of the update (of
            the weights, where these are sent), random ones, or all.
        percentile: keeps what is above this percentile of all coordinates, per client.
        threshold: tau, in place of the percentile: of the Fisher information, min-max scaled over all coordinates (14).
        upload: what is sent and averaged: updates, or (`paper` only) the masked weights of (16).
        optimizer: local optimizer, fresh in every round.
        batch_size: B.
        epochs: E, passes over the client's examples.
        server_optimizer: takes the negative averaged update as its gradient (default: SGD at 1); not where weights are
            sent.
        delta: failure probability of the statement; None: min(1e-5, 1 / (10 clients)).
        claim: the epsilon that the paper states for `noise`.

    Guarantee: client-level, sensitivity C: masks cut the update before it is clipped, noise is on all coordinates.
        `sound` without `risks`: zero-out, for the aggregate observer. `sound` with `risks`: replace-one, for the upload
        observer and so for the other, by a filter: given everything that was sent before, an update is a Gaussian
        mechanism with multiplier s / 2 and a released risk one with r; a client stops before they add up to less than
        `noise.least_total`, and fully adaptive composition gives the epsilon of that one Gaussian. `paper` without
        private risks: what the noise gives; with them: none.
    Deviations from the paper: updates are sent, not weights; the noise is not scaled by the sparsity (Theorems 1 and 2
        do not hold: supports differ between neighbours); uniform weights; Fisher information is the mean of squared
        per-example gradients, of which the paper squares the mean; of equal values at the percentile some are kept.
        The minimum in (12) is over the clients whose risk is known. A rule's noise for :math:`\epsilon_i^t` is
        that for :math:`\epsilon^t` over the share, which is exact for the classic rule.
    References: ADP-PFL: Differential Privacy Federated Learning Based on Privacy Budget Allocation and Sparsification.

    >>> from jaxfl.models import mlp
    >>> from jaxfl.privacy import Full
    >>> from jaxfl.privacy.schedule import client_noise, round_budgets
    >>> network, budgets = mlp((8, 8, 1), 10, hidden=(16,)), round_budgets(1.0, 4)
    >>> plan = client_noise(budgets, 1.0, participation=1.0, release_share=0.1)
    >>> adp_pfl(network, sampling=Full(), noise=plan, risks="private", risk_bounds=(0.1, 10.0)).mechanism.broken is None
    True
    >>> adp_pfl(network, sampling=Full(), noise=9.0, risks="private", fidelity="paper").mechanism.broken[:33]
    "each client's noise scale follows"
    """
    if threshold is not None and mask != "fisher":
        raise ValueError(
            f"threshold={threshold!r} with mask={mask!r}: it is one of Fisher information, give a percentile"
        )
    if upload == "weights" and fidelity == "sound":
        raise ValueError(
            f"upload={upload!r} with fidelity={fidelity!r}: their mean needs the cohort's number, so send updates"
        )
    if upload == "weights":
        refuse_server_optimizer({"server_optimizer": server_optimizer}, f"upload={upload!r}")
    base = fedavg(
        model,
        optimizer=optimizer,
        batch_size=batch_size,
        epochs=epochs,
        server_optimizer=server_optimizer or optax.sgd(1.0),
        mechanism=Mechanism(
            clip=clip,
            sampling=sampling,
            denominator="expected" if upload == "updates" else "participants",
            delta=delta,
            claim=None if claim is None else (claim, "budgets taken for epsilons that add up, or for their maximum"),
            **(_sound(noise, risks, risk_bounds) if fidelity == "sound" else _paper(noise, risks, risk_bounds)),
        ),
        name="adp_pfl",
    )

    def select(key: Key[Array, ""], params: Params, sent: Tree, data: ClientData) -> Tree:
        if mask == "fisher":
            fisher = client_fisher(model, params, data)
            if threshold is None:
                return top_percentile_mask(fisher, percentile)
            return jax.tree.map(lambda f: f > threshold, normalize_over_all(fisher))
        if mask == "top_k":
            return top_percentile_mask(sent, percentile)
        return top_percentile_mask(optax.tree.random_like(key, sent, jax.random.uniform), percentile)

    def init(key: Key[Array, ""], number: int) -> tuple[Server, Tree]:
        server, states = base.init(key, number)
        return server, Accounted(init_account(number)) if base.mechanism.adaptive else states

    def client_update(key: Key[Array, ""], server: Server, client: Tree, data: ClientData) -> tuple:
        message, client, info = base.client_update(key, server, client, data)
        params, risk = optax.tree.add(server.params, message.update), None
        lost = ~jnp.isfinite(optax.tree.sum(params))
        data = dataclasses.replace(data, size=jnp.where(lost, 0, data.size))  # no risk and mask of what is not counted
        masking, probing = jax.random.split(jax.random.fold_in(key, epochs))  # training took the numbers below
        if base.mechanism.release is not None:
            risk = risk_fn(probing, model, params, data)
            info |= {"risk": risk}
        sent = params if upload == "weights" else message.update
        if mask is not None:
            kept = select(masking, params, sent, data)
            sent = sparsify(kept, sent)
            info |= {"kept": optax.tree.sum(kept) / sum(leaf.size for leaf in jax.tree.leaves(kept))}
        return Message(sent, release=risk), client, info

    def replace(server: Server, aggregate: Tree) -> Server:
        return server._replace(params=aggregate)

    return base._replace(
        init=init,
        client_update=client_update,
        server_update=base.server_update if upload == "updates" else replace,
    )


def _sound(noise: Any, risks: Any, risk_bounds: tuple[float, float] | None) -> dict[str, Any]:
    """The mechanism's noise, where its scale follows from public or released numbers only."""
    if isinstance(noise, ClientNoise) != (risks is not None):
        raise ValueError(f"noise={noise!r} with risks={risks!r}: give a `client_noise` with risks, and only then")
    if isinstance(risks, str) != (risk_bounds is not None):
        raise ValueError(f"risk_bounds={risk_bounds!r} with risks={risks!r}: give (least, greatest) of private ones")
    if risks is None:
        by_round = not traced(noise) and np.ndim(noise) > 0
        return {"noise_multiplier": tuple(np.asarray(noise, float).tolist()) if by_round else noise}
    filtered = {"least_total": noise.least_total}
    if risk_bounds is None:
        return filtered | _public(noise.noise, risks)
    release = Release(client_shares, *risk_bounds, noise=noise.release_noise)
    return filtered | {"client_noise": np.asarray(noise.noise), "release": release}


def _paper(noise: Any, risks: Any, risk_bounds: tuple[float, float] | None) -> dict[str, Any]:
    """The mechanism's noise as published: added by clients, by private risks too."""
    if isinstance(noise, ClientNoise) or risk_bounds is not None:
        raise ValueError(f"noise={noise!r}, risk_bounds={risk_bounds!r}: the paper filters and releases nothing")
    own = noise if traced(noise) else np.asarray(noise)
    if isinstance(risks, str):
        return {"client_noise": own, "release": Release(client_shares), "broken": _BROKEN}
    return {"client_noise": own} if risks is None else _public(noise, risks)


def _public(noise: float | Sequence[float], risks: Sequence[float] | np.ndarray) -> dict[str, Any]:
    risks = np.asarray(risks, np.float64)
    return {"client_noise": np.atleast_1d(noise)[:, None] * (risks / risks.min())}
