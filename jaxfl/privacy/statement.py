"""The privacy statement of a run: what is guaranteed to whom, what a paper claims, and what nothing covers."""

import math
import textwrap
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jaxfl._validate import checked, show
from jaxfl.privacy.accounting import Accountant, Epsilon, Observer, check_ledger, epsilons, example_epsilon, tightest
from jaxfl.privacy.mechanism import FixedSize, Mechanism, Poisson, Sampling, default_delta
from jaxfl.types import Ledger

Randomness = Literal["seed", "secret"]

_WIDTH = 100

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
    "everything else in a run's folder: cohort sizes, update norms, shares clipped and training losses in "
    'metrics.jsonl, participations in per_client.npz (report="public" leaves these out); checkpoints, which hold '
    "personal states and the key",
    "who receives the raw uploads: against who sees sums alone, that is a trusted server or secure aggregation",
    "several clients that pool what they know, and clients that do not run the method as it is",
    "tuning: choosing settings by their results, over several runs on the same data",
    "early stopping and choosing among rounds by results",
    "other runs on the same data: epsilons add up over runs with different, secret keys only; two runs with one key "
    "share their noise, which a difference of what they send takes away",
    "timing: how long clients, rounds and runs take",
)
_PRECISION = {
    "float": "finite precision: float32 Gaussian noise, of which the sums that can be represented may tell neighbours "
    "apart, and which ends at some 5 standard deviations",
    "grid": "what is left of finite precision: updates and noise lie on one grid, so that rounding is post-processing, "
    "but the noise is drawn by thresholds of 64 bits",
}

_SEED = (
    "noise from a known seed: a simulation; not to be published for real data (a small seed is found by trying, and "
    "the key lies in the run's folder)"
)
_SECRET = (
    "the noise comes from 128 fresh bits of the system, kept in one file that only its owner can read, and expanded by "
    "Threefry-2x32, which is not a certified cryptographic generator"
)
_PAIRED = "the points of this sweep share their noise: at most one of them may be published"


@checked(ledger=check_ledger)
def privacy_statement(
    ledger: Ledger,
    mechanism: Mechanism,
    clients: int,
    *,
    randomness: Randomness = "seed",
    paired: bool = False,
    stateful: bool = False,
) -> dict[str, Any]:
    """Account a ledger for both observers and by both accountants; ready for JSON (infinity is `"inf"`).

    Each observer's `epsilon` is the smallest valid one, `by` its accountant and theorem; `rdp` and `pld` have what each
    says by its own theorem.

    Args:
        ledger: the rounds as they happened, or as planned.
        mechanism: what the engine ran.
        clients: number of clients.
        randomness: where the noise comes from: a seed that may be known, or fresh secret bits of the system.
        paired: the run is a point of a sweep whose points share their noise.
        stateful: clients keep a state from one round to the next, see `epsilon`.

    >>> from jaxfl.privacy.accounting import planned_ledger
    >>> mechanism = Mechanism(clip=1.0, noise_multiplier=10.0)
    >>> statement = privacy_statement(planned_ledger(mechanism, 4, 100), mechanism, 4)
    >>> [round(statement["honest"]["aggregate"][accountant]["total"], 2) for accountant in ("rdp", "pld")]
    [4.73, 4.38]
    >>> round(statement["honest"]["aggregate"]["epsilon"], 2), statement["honest"]["aggregate"]["by"]
    (4.38, 'Gaussian, zero-out; PLD')
    >>> statement["honest"]["upload"]["epsilon"]
    'inf'
    """
    if ledger.participants.shape[1] != clients:
        raise ValueError(f"clients={clients!r}: give the {ledger.participants.shape[1]} clients that the ledger has")
    claim = None
    if mechanism.claim is not None:
        claim = {"epsilon": _number(mechanism.claim[0]), "rule": mechanism.claim[1], "status": "claimed, not verified"}
    return {
        "unit": "client: all of one client's data, over the whole run",
        "delta": mechanism.failure_probability(clients),
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
        "randomness": randomness,
        "paired": paired,
        "honest": _honest(ledger, mechanism, stateful),
        "examples": None if mechanism.examples is None else _examples(ledger, mechanism),
        "claim": claim,
        "warnings": _warnings(mechanism, clients, randomness, paired),
        "assumed": _assumed(mechanism, randomness, stateful),
        "not_covered": [*_NOT_COVERED, _PRECISION[getattr(mechanism, "noise", "float")]],
    }


def _check_statement(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and {"honest", "warnings", "not_covered"} <= value.keys():
        return value
    raise TypeError(f"{name}={show(value)}: give what privacy_statement returns, or the `statement` of a result")


@checked(statement=_check_statement)
def format_statement(statement: dict[str, Any]) -> str:
    """Say the statement in lines of at most 100 characters.

    >>> from jaxfl.privacy.accounting import planned_ledger
    >>> mechanism = Mechanism(clip=1.0, noise_multiplier=10.0, claim=(1.0, "one round's epsilon"))
    >>> statement = privacy_statement(planned_ledger(mechanism, 4, 100), mechanism, 4)
    >>> print(format_statement(statement))  # doctest: +ELLIPSIS
    Privacy of one client (all of its data, 4 clients), delta 1e-05
      mechanism: clip 1, noise multiplier 10, client noise 0, sampling full, denominator expected, 100
        rounds
      honest, against who sees noisy sums and broadcasts only; not who took part:
        epsilon 4.377 in total, 0.3407 for one round alone
        by: Gaussian, zero-out; PLD
        beside it: 4.73 and 0.3753 (Gaussian, zero-out; RDP)
        zero-out: the client's clipped update is replaced by zero, the number of clients is public
        of one example replaced: 9.997 (Gaussian, replace-one; PLD)
      honest, against who sees every upload, and who took part: sampling amplifies nothing:
        no finite epsilon: the server sees uploads without noise
      claimed, not verified: epsilon 1 (one round's epsilon)
      warning: noise from a known seed: ...
      no epsilon covers:
        - reported accuracies and losses, ...
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
    for name, title in (("assumed", "assumed"), ("not_covered", "no epsilon covers")):
        if statement[name]:
            lines += [f"  {title}:", *(f"    - {item}" for item in statement[name])]
    return "\n".join(_wrap(line) for line in lines)


def _wrap(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _honest(ledger: Ledger, mechanism: Mechanism, stateful: bool) -> dict[Observer, dict[str, Any]]:
    """What each observer can be promised, of a client and of one example, over all rounds and in the worst alone."""
    found: dict[Observer, dict[str, Mapping[Accountant, Epsilon]]] = {}
    for observer in _OBSERVERS:
        options: dict[str, Any] = {"observer": observer, "stateful": stateful}
        total = epsilons(ledger, mechanism, **options)
        alone = epsilons(ledger, mechanism, one_round=True, **options)
        example = total  # of an upload they are one
        if observer == "aggregate":
            example = epsilons(ledger, mechanism, unit="example", **options)
        found[observer] = {"total": total, "one_round": alone, "example": example}
    result = {observer: _observer(observer, found) for observer in found}
    if np.any(ledger.client_noise) and mechanism.least_total is None and ledger.participants.shape[1] > 1:
        against = tightest(epsilons(ledger, mechanism, observer="client", stateful=stateful))
        result["aggregate"]["against_client"] = _headline(against)
    return result


def _observer(observer: Observer, found: Mapping[Observer, Mapping[str, Mapping[Accountant, Epsilon]]]) -> dict:
    """One observer's entry: the smallest valid bounds, then each accountant's own.

    Whatever is promised of uploads holds for the sums that follow from them, and replace-one bounds zero-out.
    """
    sees, adjacency = _OBSERVERS[observer]
    least = {key: tightest(own) for key, own in found[observer].items()}
    for key, own in found["upload"].items():
        if (uploads := tightest(own)).value < least[key].value:
            least[key] = uploads._replace(theorem=f"of the uploads, which bounds that of sums: {uploads.theorem}")
    result = {"sees": sees, "adjacency": adjacency} | _headline(least["total"])
    result |= {"one_round": _number(least["one_round"].value), "example": _headline(least["example"])}
    for accountant in ("rdp", "pld"):
        own = {key: found[observer][key][accountant] for key in least}
        parts = {key: _number(own[key].value) for key in ("one_round", "example")}
        result[accountant] = parts | _entry(own["total"])
    return result


def _headline(least: Epsilon) -> dict[str, Any]:
    return {"epsilon": _number(least.value), "by": least.theorem, "reason": least.reason}


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
    own: dict[Accountant, Epsilon] = {
        accountant: example_epsilon(ledger, mechanism, accountant=accountant) for accountant in ("pld", "rdp")
    }
    return result | _headline(tightest(own)) | {accountant: _entry(found) for accountant, found in own.items()}


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
    if seen["reason"]:
        return [f"    no finite epsilon: {seen['reason']}", *_spread(seen["rdp"], "RDP")]
    alone = f", {_show(seen['one_round'])} for one round alone" if "one_round" in seen else ""
    lines = [f"    epsilon {_show(seen['epsilon'])} in total{alone}", f"    by: {seen['by']}"]
    for accountant in ("rdp", "pld"):
        own = seen[accountant]
        if own["theorem"] != seen["by"]:
            alone = f" and {_show(own['one_round'])}" if "one_round" in own else ""
            lines.append(f"    beside it: {_show(own['total'])}{alone} ({own['theorem']})")
    lines.append(f"    {seen['adjacency']}")
    if other := seen.get("against_client"):
        lines.append(f"    against another client, who knows its own noise: {_show(other['epsilon'])} ({other['by']})")
    if example := seen.get("example"):
        lines.append(f"    of one example replaced: {_show(example['epsilon'])} ({example['by']})")
    return [*lines, *_spread(seen["pld"], "PLD")]


def _spread(entry: dict[str, Any], accountant: str) -> list[str]:
    own = entry.get("per_client")
    return [f"    by client: {_span(own)}, median {_show(own['median'])} ({accountant})"] if own else []


def _warnings(mechanism: Mechanism, clients: int, randomness: Randomness, paired: bool) -> list[str]:
    found, delta = [], mechanism.failure_probability(clients)
    if mechanism.communicates and delta >= 1 / clients:
        found.append(
            f"delta {delta:g} is at least 1/clients: it allows publishing one client outright, "
            f"so this epsilon promises nothing; quote one at delta {default_delta(clients):g}"
        )
    if randomness == "seed" and (mechanism.noisy or mechanism.examples is not None):
        found.append(_SEED)
    return [*found, _PAIRED] if paired else found


def _assumed(mechanism: Mechanism, randomness: Randomness, stateful: bool) -> list[str]:
    """What the numbers rest on, besides the theorems."""
    found = []
    if mechanism.clients_noisy:
        found.append("clients are honest, add the noise that they should, and pool nothing")
    if mechanism.weights is not None:
        found.append("weights are public: where they are numbers of examples, these are published")
    if isinstance(mechanism.sampling, FixedSize) and not stateful:
        found.append("clients keep no state from one round to the next, where sampling without replacement amplifies")
    return [*found, _SECRET] if randomness == "secret" else found


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
