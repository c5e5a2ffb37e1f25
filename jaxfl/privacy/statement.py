"""The privacy statement of a run: what is guaranteed to whom, what a paper claims, and what nothing covers."""

import math
from typing import Any

import numpy as np

from jaxfl._validate import checked, show
from jaxfl.privacy.accounting import Epsilon, Observer, check_ledger, epsilon, example_epsilon
from jaxfl.privacy.mechanism import FixedSize, Mechanism, Poisson, Sampling
from jaxfl.types import Ledger

_OBSERVERS: dict[Observer, tuple[str, str]] = {
    "aggregate": (
        "noisy sums and broadcasts only; not who took part",
        "zero-out: the client's clipped update is replaced by zero, the number of clients is public",
    ),
    "upload": (
        "every upload, and who took part: sampling amplifies nothing",
        "replace-one: the client's data are replaced by any other, it still uploads",
    ),
}

_NOT_COVERED = (
    "reported accuracies and losses, and per-client results or personal parts that are published",
    "tuning: choosing settings by their results, over several runs on the same data",
    "early stopping and choosing among rounds by results",
)


@checked(ledger=check_ledger)
def privacy_statement(ledger: Ledger, mechanism: Mechanism, clients: int) -> dict[str, Any]:
    """Account a ledger for both observers and by both accountants; ready for JSON (infinity is `"inf"`).

    Args:
        ledger: the rounds as they happened, or as planned.
        mechanism: what the engine ran.
        clients: number of clients.

    >>> from jaxfl.privacy.accounting import planned_ledger
    >>> mechanism = Mechanism(clip=1.0, noise_multiplier=10.0)
    >>> statement = privacy_statement(planned_ledger(mechanism, 4, 100), mechanism, 4)
    >>> [round(statement["honest"]["aggregate"][accountant]["total"], 2) for accountant in ("rdp", "pld")]
    [4.73, 4.38]
    >>> statement["honest"]["upload"]["rdp"]["total"]
    'inf'
    """
    if ledger.participants.shape[1] != clients:
        raise ValueError(f"clients={clients!r}: give the {ledger.participants.shape[1]} clients that the ledger has")
    claim = None
    if mechanism.claim is not None:
        claim = {"epsilon": _number(mechanism.claim[0]), "rule": mechanism.claim[1], "status": "claimed, not verified"}
    return {
        "unit": "client: all of one client's data, over the whole run",
        "delta": mechanism.delta,
        "clients": clients,
        "rounds": len(ledger.participants),
        "sampling": _sampling(mechanism.sampling),
        "denominator": mechanism.denominator,
        "communicates": mechanism.communicates,
        "clip": _number(float(mechanism.clip)),
        "noise_multiplier": _range(ledger.noise_multiplier),
        "client_noise": _range(ledger.client_noise),
        "release_noise": _range(ledger.release_noise),
        "least_total": mechanism.least_total,
        "honest": {observer: _observer(ledger, mechanism, observer) for observer in _OBSERVERS},
        "examples": None if mechanism.examples is None else _examples(ledger, mechanism),
        "claim": claim,
        "warnings": _warnings(mechanism, clients),
        "not_covered": list(_NOT_COVERED),
    }


def _check_statement(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and {"honest", "warnings", "not_covered"} <= value.keys():
        return value
    raise TypeError(f"{name}={show(value)}: give what privacy_statement returns, or the `statement` of a result")


@checked(statement=_check_statement)
def format_statement(statement: dict[str, Any]) -> str:
    """Say the statement in a few lines.

    >>> from jaxfl.privacy.accounting import planned_ledger
    >>> mechanism = Mechanism(clip=1.0, noise_multiplier=10.0, claim=(1.0, "one round's epsilon"))
    >>> statement = privacy_statement(planned_ledger(mechanism, 4, 100), mechanism, 4)
    >>> print(format_statement(statement))  # doctest: +ELLIPSIS
    Privacy of one client (all of its data, 4 clients), delta 1e-05
      mechanism: clip 1, noise multiplier 10, client noise 0, sampling full, denominator expected, 100 rounds
      honest, against who sees noisy sums and broadcasts only; not who took part:
        epsilon 4.73 in total, 0.3753 for one round alone (RDP); 4.377 and 0.3407 (PLD)
        zero-out: the client's clipped update is replaced by zero, the number of clients is public
        by: Gaussian, zero-out; RDP
        of one example replaced: 10.73 (RDP); 9.997 (PLD)
      honest, against who sees every upload, and who took part: sampling amplifies nothing:
        no finite epsilon: the server sees uploads without noise
      claimed, not verified: epsilon 1 (one round's epsilon)
      no epsilon covers: reported accuracies...
    """
    sampling = " ".join(str(value) for value in statement["sampling"].values())
    lines = [
        f"Privacy of one client (all of its data, {statement['clients']} clients), delta {statement['delta']:g}",
        f"  mechanism: clip {_show(statement['clip'])}, noise multiplier {_span(statement['noise_multiplier'])}, "
        f"client noise {_span(statement['client_noise'])}, sampling {sampling}, "
        f"denominator {statement['denominator']}, {statement['rounds']} rounds",
    ]
    if statement["least_total"] is not None:
        lines.append(
            f"  filter: all that a client sends adds up to a multiplier of at least {_show(statement['least_total'])}; "
            f"released numbers have noise {_span(statement['release_noise'])} of their range"
        )
    for seen in statement["honest"].values():
        lines += [f"  honest, against who sees {seen['sees']}:", *_observer_lines(seen)]
    if own := statement["examples"]:
        lines += [f"  of one example, against who sees {own['sees']}:", *_observer_lines(own)]
    if claim := statement["claim"]:
        lines.append(f"  {claim['status']}: epsilon {_show(claim['epsilon'])} ({claim['rule']})")
    lines += [f"  warning: {warning}" for warning in statement["warnings"]]
    return "\n".join([*lines, f"  no epsilon covers: {'; '.join(statement['not_covered'])}"])


def _observer(ledger: Ledger, mechanism: Mechanism, observer: Observer) -> dict[str, Any]:
    sees, adjacency = _OBSERVERS[observer]
    result: dict[str, Any] = {"sees": sees, "adjacency": adjacency}
    for accountant in ("rdp", "pld"):
        total = epsilon(ledger, mechanism, observer=observer, accountant=accountant)
        alone = epsilon(ledger, mechanism, observer=observer, accountant=accountant, one_round=True)
        example = total  # of an upload they are one; a sum hides less of an example that is replaced
        if observer == "aggregate":
            example = epsilon(ledger, mechanism, observer=observer, accountant=accountant, unit="example")
        result[accountant] = {"one_round": _number(alone.value), "example": _number(example.value)} | _entry(total)
    return result


def _examples(ledger: Ledger, mechanism: Mechanism) -> dict[str, Any]:
    private = mechanism.examples
    assert private is not None
    result: dict[str, Any] = {
        "unit": "example: one of a client's, over the whole run",
        "sees": "every upload and who took part, or sums and broadcasts alone",
        "adjacency": "zero-out: the example's clipped gradient is replaced by zero, numbers of examples are public",
        "clip": float(private.clip),
        "noise_multiplier": _range(private.noise_multiplier),
        "rate": float(private.rate),
        "steps": private.steps,
    }
    for accountant in ("rdp", "pld"):
        result[accountant] = _entry(example_epsilon(ledger, mechanism, accountant=accountant))
    return result


def _entry(total: Epsilon) -> dict[str, Any]:
    entry: dict[str, Any] = {"total": _number(total.value), "theorem": total.theorem, "reason": total.reason}
    own = total.per_client
    if own.min() < own.max():
        entry["per_client"] = {
            "min": _number(own.min()),
            "median": _median(own),
            "max": _number(own.max()),
            "values": [_number(value) for value in own],
        }
    return entry


def _observer_lines(seen: dict[str, Any]) -> list[str]:
    rdp, pld, lines = seen["rdp"], seen["pld"], []
    if rdp["reason"]:
        lines.append(f"    no finite epsilon: {rdp['reason']}")
    else:
        total, alone = f"    epsilon {_show(rdp['total'])} in total", ""
        if "one_round" in rdp:
            total += f", {_show(rdp['one_round'])} for one round alone"
            alone = f" and {_show(pld['one_round'])}"
        lines.append(f"{total} (RDP); {_show(pld['total'])}{alone} (PLD)")
        lines += [f"    {seen['adjacency']}", f"    by: {rdp['theorem']}"]
        if "example" in rdp:
            lines.append(f"    of one example replaced: {_show(rdp['example'])} (RDP); {_show(pld['example'])} (PLD)")
    if own := rdp.get("per_client"):
        lines.append(f"    by client: {_span(own)}, median {_show(own['median'])} (RDP)")
    return lines


def _warnings(mechanism: Mechanism, clients: int) -> list[str]:
    found = []
    if mechanism.communicates and mechanism.delta >= 1 / clients:
        found.append(
            f"delta {mechanism.delta:g} is at least 1/clients: it allows publishing one client outright, "
            "so this epsilon promises nothing; quote one at delta 1e-5"
        )
    return found


def _sampling(sampling: Sampling) -> dict[str, Any]:
    if isinstance(sampling, Poisson):
        return {"kind": "poisson", "rate": float(sampling.rate)}
    if isinstance(sampling, FixedSize):
        return {"kind": "fixed size", "size": sampling.size}
    return {"kind": "full"}


def _number(value: float) -> float | str:
    return float(value) if math.isfinite(value) else "inf"


def _median(values: np.ndarray) -> float | str:
    """The upper median: no average of infinities."""
    return _number(np.sort(values)[values.size // 2])


def _range(values: Any) -> dict[str, float | str]:
    values = np.asarray(values, np.float64)
    if not values.size:
        return {"min": 0.0, "max": 0.0}
    return {"min": _number(values.min()), "max": _number(values.max())}


def _show(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _span(values: dict[str, float | str]) -> str:
    low, high = _show(values["min"]), _show(values["max"])
    return low if low == high else f"{low} to {high}"
