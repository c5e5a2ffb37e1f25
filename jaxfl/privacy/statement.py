"""Privacy statement of a run: guarantees by observer, claims, and what no epsilon covers."""

import itertools
import logging
import math
import re
import textwrap
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxfl._support.checks import checked, show
from jaxfl.privacy.accounting.accountants import Accountant, default_delta, failure_probability
from jaxfl.privacy.accounting.ledgers import (
    BOTH,
    Epsilon,
    check_ledger,
    epsilons,
    example_epsilon,
    no_epsilon,
    tightest,
)
from jaxfl.privacy.accounting.observers import Observer
from jaxfl.privacy.dp_sgd import DPSGD
from jaxfl.privacy.mechanisms import Mechanism
from jaxfl.types import Ledger, Terms

Randomness = Literal["seed", "secret"]
"""Source of noise: a seed that may be known, or fresh secret bits of the system."""

_LINE_WIDTH = 80
"""Characters in a line of a statement."""

UNIT = "client: all of one client's data, over the whole run"
"""What an epsilon of a client protects."""

OBSERVERS: dict[Observer, tuple[str, str]] = {
    "aggregate": (
        "noisy sums and broadcasts (participation hidden)",
        "zero-out: the client's clipped update is replaced by zero, and the number of clients is "
        "public",
    ),
    "upload": (
        "every upload and every cohort (no amplification)",
        "replace-one: the client's data are replaced by any other data, and it still uploads",
    ),
}
"""What each observer sees, and the adjacency of the guarantee against it."""

NOT_COVERED = {
    "reported_scores": "reported accuracies and losses, and per-client results or personal parts "
    "that are published",
    "run_folder": "everything else in a run's folder: cohort sizes, update norms, shares clipped "
    "and training losses in metrics.jsonl, participations in per_client.npz "
    '(report="public" leaves these out), and checkpoints, which hold personal states and the key',
    "raw_uploads": "anyone who sees raw uploads, unless a guarantee is against an observer of "
    "every upload: that against an observer of sums requires a trusted server or secure "
    "aggregation",
    "other_clients": "several clients that pool what they know, and clients that deviate from the "
    "method",
    "tuning": "tuning: choosing settings by their results, over several runs on the same data",
    "chosen_round": "early stopping and choosing among rounds by results",
    "other_runs": "other runs on the same data: epsilons add up only over runs with different, "
    "secret keys, because two runs with the same key share their noise, which cancels in the "
    "difference of what they send",
    "timing": "timing: how long clients, rounds and runs take",
}
"""What no epsilon covers, whatever the method: sentences by their codes."""

PRECISION = {
    "float": {
        "float_noise": "finite precision: the noise is float32 Gaussian, whose rounding can "
        "distinguish neighbouring datasets, and whose tails are cut at about 5 standard deviations"
    },
    "grid": {
        "grid_noise": "the rest of finite precision: updates and noise lie on one grid, so that "
        "rounding is post-processing, but the noise is drawn by thresholds of 95 bits, from "
        "probabilities accurate to a relative 2^-50"
    },
}
"""What no epsilon covers, by `Mechanism.noise`: sentences by their codes."""

_STEPS_PRECISION = {
    "float_noise_of_steps": "finite precision of private local steps: their noise, on which the "
    "epsilon of one example rests, is float32 Gaussian and off the grid"
}
"""What no epsilon covers if only the noise on sums is on a grid."""

_SEED = (
    "noise from a known seed: this is a simulation, and must not be published for real data (small "
    "seeds can be brute-forced, and the run's folder holds the key)"
)
_SECRET = (
    "cohorts and noise come from 128 fresh bits of the system, kept in one file that only its "
    "owner can read, and expanded by Threefry-2x32, which is not a certified cryptographic "
    "generator"
)
_REFUTED = (
    "AUDIT: an attacker has shown epsilon to be at least {:.4g} at 95% confidence, but {:.4g} is "
    "stated: the run, its noise or its accounting is wrong, so do not publish any of it"
)
_HINT = (
    "the estimate is further above the stated {:.4g} than in 99 of 100 honest runs: a hint, not a "
    "proof, that there is less noise than accounted for, or that clients move sums by more than "
    "the bound (look for the fault, and audit again with more canaries)"
)
_LARGE_DELTA = (
    "delta {:g} is at least 1/{}: it allows publishing one {} outright, so this epsilon promises "
    "nothing (quote one at delta {:g})"
)
_CHOSEN = (
    'keep="best" chooses a round by test scores: no epsilon covers a choice by clients\' test '
    "examples, and the best score is optimistic, because it was chosen"
)
_PAIRED = (
    "the points of this sweep share their cohorts and noise: at most one of them may be published"
)


@checked(ledger=check_ledger)
def privacy_statement(
    ledger: Ledger,
    mechanism: Mechanism,
    clients: int,
    *,
    terms: Terms = Terms(),
    dp_sgd: DPSGD | None = None,
    examples: int | None = None,
    randomness: Randomness = "seed",
    paired: bool = False,
    stateful: bool = False,
) -> dict[str, Any]:
    """Return the epsilons of a ledger for both observers by both accountants, ready for JSON.

    Infinity is written as `"inf"`. `honest` has an entry for each observer. Its `epsilon` is the
    smallest valid one, and `by` names the theorem and the accountant, or is "none" if no epsilon is
    finite. Its `rdp` and `pld` hold each accountant's own epsilons.
    `warnings`, `assumed` and `not_covered` have sentences by their codes, such as `known_seed`. A
    code stays as it is, whereas a sentence may be written anew.

    Args:
        ledger: Rounds as they happened, or as planned.
        mechanism: Mechanism that the engine ran.
        clients: Number of clients.
        terms: Terms with delta, the paper's claim, and the reason if no epsilon exists.
        dp_sgd: Private local steps. None if there are none.
        examples: Number of training examples of all clients together, which sets the default delta
            of one example. With private local steps, the statement publishes this number. None
            stands for the number of clients.
        randomness: "seed" for a seed that may be known, "secret" for fresh secret bits of the
            system.
        paired: Whether the run is a point of a sweep whose points share their cohorts and noise.
        stateful: Whether clients keep a state from one round to the next (see `epsilon`).

    Raises:
        ValueError: `clients` is not the number of clients of the ledger, the ledger's tables do not
            fit one another, or a round's noise is below its `noise_multiplier`.
        TypeError: `ledger` is no ledger.

    >>> from jaxfl.privacy.accounting.ledgers import planned_ledger
    >>> mechanism = Mechanism(clip=1.0, noise_multiplier=10.0)
    >>> statement = privacy_statement(planned_ledger(mechanism, 4, 100), mechanism, 4)
    >>> sums = statement["honest"]["aggregate"]
    >>> [round(sums[accountant]["total"], 2) for accountant in ("rdp", "pld")]
    [4.73, 4.38]
    >>> round(sums["epsilon"], 2), sums["by"]
    (4.38, 'Gaussian, zero-out; PLD')
    >>> statement["honest"]["upload"]["epsilon"]
    'inf'
    """
    known = ledger.participants.shape[1]
    if clients != known:
        raise ValueError(
            f"clients must be {known}, the number of clients in the ledger, got {clients!r}. Give "
            f"clients={known}."
        )
    delta = failure_probability(terms.delta, clients)
    counted = examples
    if counted is None:
        counted = clients
    of_example = failure_probability(terms.delta, counted)
    noisy = mechanism.noisy or dp_sgd is not None
    warnings = {}
    # An example's own delta may be too large although that of a client is not.
    if dp_sgd is not None:
        warnings = _large_delta("large_delta_of_examples", of_example, counted, "example")
    if mechanism.communicates:
        warnings |= _large_delta("large_delta", delta, clients, "client")
    # A known seed matters only if there is noise, which it would allow to subtract.
    if noisy and randomness == "seed":
        warnings["known_seed"] = _SEED
    if paired:
        warnings["shared_noise"] = _PAIRED
    return {
        "unit": UNIT,
        "delta": delta,
        "clients": clients,
        **_mechanism_entries(ledger, mechanism),
        "randomness": randomness,
        "paired": paired,
        "honest": _honest(ledger, mechanism, terms.broken, delta, stateful),
        "examples": None if dp_sgd is None else _examples(ledger, dp_sgd, of_example, examples),
        "claim": _claim(terms),
        "warnings": warnings,
        "assumed": _assumed(mechanism, randomness, stateful) if noisy else {},
        "not_covered": _not_covered(mechanism, dp_sgd),
    }


def _claim(terms: Terms) -> dict[str, Any] | None:
    if terms.claim is None:
        return None
    value, rule = terms.claim
    return {"epsilon": _finite_or_inf(value), "rule": rule, "status": "claimed, not verified"}


def _mechanism_entries(ledger: Ledger, mechanism: Mechanism) -> dict[str, Any]:
    return {
        "rounds": len(ledger.participants),
        "mechanism": type(mechanism).__name__,
        "sampling": mechanism.sampling.describe(),
        "denominator": mechanism.denominator,
        "communicates": mechanism.communicates,
        "clip": _finite_or_inf(float(mechanism.clip)),
        "noise_multiplier": _extremes(ledger.noise_multiplier),
        "client_noise": _extremes(ledger.client_noise),
        "details": mechanism.describe(ledger),
    }


def _large_delta(
    code: str,
    delta: float,
    number: int,
    unit: str,
) -> dict[str, str]:
    """Return a warning by its code if delta is too large for this number of units, or none."""
    if delta < 1 / number:
        return {}
    return {code: _LARGE_DELTA.format(delta, f"{unit}s", unit, default_delta(number))}


def with_audit(statement: dict[str, Any], audit: dict[str, Any]) -> dict[str, Any]:
    """Return the statement with the result of an audit (`jaxfl.privacy.audit`) as `audit`.

    The stated epsilon is that against an observer of sums. A lower bound above it adds a warning,
    and one above the claim marks the claim as refuted. If only `estimate_at_least` is above the
    stated epsilon, the audit gets a `hint`. The warning and the hint are also logged.
    """
    lower_bound = audit["at_least"]
    warnings = statement["warnings"]
    stated = statement["honest"]["aggregate"]["epsilon"]
    # An infinite epsilon promises nothing, so no bound refutes it.
    if stated != "inf" and lower_bound > stated:
        refuted = _REFUTED.format(lower_bound, stated)
        warnings = {"refuted_by_audit": refuted} | warnings
        logging.getLogger("jaxfl").error(refuted)
    elif stated != "inf" and audit.get("estimate_at_least", 0.0) > stated:
        audit = audit | {"hint": _HINT.format(stated)}
        logging.getLogger("jaxfl").warning("audit: %s", audit["hint"])
    # JSON has no infinity. Scores without any spread estimate one.
    estimates = {name: value for name, value in audit.items() if name.startswith("estimate")}
    audit = audit | {name: _finite_or_inf(value) for name, value in estimates.items()}
    claim = _audited_claim(statement["claim"], lower_bound)
    return statement | {"audit": audit, "warnings": warnings, "claim": claim}


def _audited_claim(claim: dict[str, Any] | None, lower_bound: float) -> dict[str, Any] | None:
    """Return the claim of a statement, marked as refuted if the bound is above it."""
    if claim is not None and claim["epsilon"] != "inf" and lower_bound > claim["epsilon"]:
        return claim | {"status": "claimed, and refuted at client level by the audit"}
    return claim


def with_choice(statement: dict[str, Any]) -> dict[str, Any]:
    """Return the statement with a warning that a round was chosen by test scores."""
    return statement | {"warnings": statement["warnings"] | {"round_chosen_by_scores": _CHOSEN}}


def without_clients(statement: dict[str, Any]) -> dict[str, Any]:
    """Return the statement without epsilons by client, which show how often each took part."""
    return {
        name: without_clients(part) if isinstance(part, dict) else part
        for name, part in statement.items()
        if name != "per_client"
    }


def split_clients(
    statement: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Float[np.ndarray, "C"]]]:
    """Return the statement without each client's epsilon, and these epsilons as arrays by name.

    The statement keeps their minimum, median and maximum. A name has the observer, or `examples`
    for epsilons of one example, and the accountant, for instance `epsilon_upload_pld`. A file of a
    million clients is a tenth of the size with arrays.
    """
    arrays: dict[str, Float[np.ndarray, "C"]] = {}

    def without_values(part: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        entries = {}
        for name, value in part.items():
            if name == "values":
                # `float` also reads the text "inf".
                arrays["_".join(("epsilon", *path))] = np.array([float(own) for own in value])
            elif isinstance(value, dict):
                inner = path
                if name not in ("honest", "per_client"):
                    inner = (*path, name)
                entries[name] = without_values(value, inner)
            else:
                entries[name] = value
        return entries

    return without_values(statement, ()), arrays


def _check_statement(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and {"honest", "warnings", "not_covered"} <= value.keys():
        return value
    raise TypeError(
        f"{name} must be a privacy statement, got {show(value)}. "
        "Give the result of privacy_statement, or the `statement` of a run's result."
    )


@checked(statement=_check_statement)
def format_statement(statement: dict[str, Any], *, markdown: bool = False) -> str:
    """Return a statement as text in lines of 80 characters, or as a nested list in Markdown.

    Args:
        statement: Result of `privacy_statement`, or the `statement` of a run's result.
        markdown: Whether to format for a document. Lines are then not wrapped, and what Markdown
            would read as markup is escaped. Otherwise only a longer word exceeds 80 characters.

    Raises:
        TypeError: `statement` is no privacy statement.

    >>> from jaxfl.privacy.accounting.ledgers import planned_ledger
    >>> mechanism = Mechanism(clip=1.0, noise_multiplier=10.0)
    >>> terms = Terms(claim=(1.0, "one round's epsilon"))
    >>> statement = privacy_statement(planned_ledger(mechanism, 4, 100), mechanism, 4, terms=terms)
    >>> print(format_statement(statement))  # doctest: +ELLIPSIS
    Privacy of one client (all of its data, 4 clients), delta 1e-05
      mechanism: clip 1, noise multiplier 10, client noise 0, sampling full,
        denominator expected, 100 rounds
      guarantee for one client, against an observer of noisy sums and broadcasts
        (participation hidden):
        epsilon 4.377 in total, 0.3407 for one round alone
        by: Gaussian, zero-out; PLD
        also: 4.73 and 0.3753 (Gaussian, zero-out; RDP)
        zero-out: the client's clipped update is replaced by zero, and the number of
          clients is public
        with one example replaced: 9.997 (Gaussian, replace-one; PLD)
      guarantee for one client, against an observer of every upload and every cohort
        (no amplification):
        no finite epsilon: the server sees uploads without noise
      claimed, not verified: epsilon 1 (one round's epsilon)
      warning: noise from a known seed: ...
      no epsilon covers:
        - reported accuracies and losses, ...
    >>> print(format_statement(statement, markdown=True))  # doctest: +ELLIPSIS
    **Privacy of one client (all of its data, 4 clients), delta 1e-05**
    <BLANKLINE>
    - mechanism: clip 1, noise multiplier 10, client noise 0, sampling full, ...
    - guarantee for one client, against an observer of noisy sums and broadcasts ...
      - epsilon 4.377 in total, 0.3407 for one round alone
      ...
    """
    title, *rest = statement_lines(statement)
    if not markdown:
        lines = [f"{'  ' * depth}{'- ' * item}{text}" for depth, text, item in (title, *rest)]
        return "\n".join(_wrap(line) for line in lines)
    # The title stands outside of the list, whose first level is therefore 1.
    items = [f"{'  ' * (depth - 1)}- {re.sub(_MARKUP, _ESCAPED, text)}" for depth, text, _ in rest]
    return "\n".join([f"**{re.sub(_MARKUP, _ESCAPED, title.text)}**", "", *items])


_MARKUP = r"([\\`*_\[\]<>|#~])"
"""Pattern of a character that Markdown would read as markup."""

_ESCAPED = r"\\\1"
"""Replacement of a match of `_MARKUP`: the same character behind a backslash."""


class Line(NamedTuple):
    """Line of a statement."""

    depth: int
    """Depth: 0 for the title, 1 for what belongs to it, 2 for details of the last line at 1."""
    text: str
    item: bool = False
    """Whether the line is an item of a list."""


def statement_lines(statement: dict[str, Any]) -> list[Line]:
    """Return the lines of a statement, title first.

    A statement of an older version has fewer lines, because it lacks some entries.
    """
    of_clients = any(seen["epsilon"] != "inf" for seen in statement["honest"].values())
    parts = [_client_lines(statement), _example_lines(statement)]
    # A finite guarantee comes first.
    if not of_clients:
        parts.reverse()
    lines = [Line(0, _title(statement, of_clients)), *itertools.chain(*parts)]
    if audit := statement.get("audit"):
        lines += _audit_lines(audit)
    if claim := statement["claim"]:
        text = f"{claim['status']}: epsilon {_four_digits(claim['epsilon'])} ({claim['rule']})"
        lines.append(Line(1, text))
    lines += [Line(1, f"warning: {warning}") for warning in sentences_of(statement, "warnings")]
    for name, heading in (("assumed", "assumed"), ("not_covered", "no epsilon covers")):
        if sentences := sentences_of(statement, name):
            lines.append(Line(1, f"{heading}:"))
            lines += [Line(2, sentence, item=True) for sentence in sentences]
    return lines


def _title(statement: dict[str, Any], of_clients: bool) -> str:
    """Return the title, which names a unit of protection and its delta."""
    examples = statement.get("examples")
    delta = statement["delta"]
    unit = "one client (all of its data, "
    # The title names the unit that has a finite guarantee, and the client if both or none have.
    if not of_clients and examples and examples["epsilon"] != "inf":
        delta = examples.get("delta", delta)
        unit = "one example ("
    return f"Privacy of {unit}{statement['clients']} clients), delta {delta:g}"


def _client_lines(statement: dict[str, Any]) -> list[Line]:
    """Return the lines on the mechanism, and on one client's guarantee against each observer."""
    sampling = " ".join(str(value) for value in statement["sampling"].values())
    mechanism = (
        f"mechanism: clip {_four_digits(statement['clip'])}, "
        f"noise multiplier {_span(statement['noise_multiplier'])}, "
        f"client noise {_span(statement['client_noise'])}, sampling {sampling}, "
        f"denominator {statement['denominator']}, {statement['rounds']} rounds"
    )
    lines = [Line(1, text) for text in (mechanism, *statement.get("details", ()))]
    for seen in statement["honest"].values():
        lines.append(Line(1, f"guarantee for one client, against an observer of {seen['sees']}:"))
        lines += _observer_lines(seen)
    return lines


def _audit_lines(audit: dict[str, Any]) -> list[Line]:
    text = (
        f"audited from below with {audit['canaries']} canaries: epsilon is at least "
        f"{_four_digits(audit['at_least'])} (95% confidence, {audit['by'].replace('_', ' ')}); "
        f"estimate {_four_digits(audit['estimate'])}"
    )
    lines = [Line(1, text)]
    if "hint" in audit:
        lines.append(Line(2, audit["hint"]))
    return lines


def sentences_of(statement: Mapping[str, Any], name: str) -> list[str]:
    """Return the sentences of the entry `name`, without their codes.

    In a statement of an older version the entry is a list without codes, or is missing.
    """
    sentences = statement.get(name, [])
    if isinstance(sentences, dict):
        return list(sentences.values())
    return sentences


def _example_lines(statement: dict[str, Any]) -> list[Line]:
    """Return the lines on one example, or none without private local steps."""
    examples = statement.get("examples")
    if not examples:
        return []
    text = f"guarantee for one example, against an observer of {examples['sees']}:"
    lines = [Line(1, text)]
    if examples.get("number"):
        text = (
            f"delta {examples['delta']:g}, for {examples['number']} training examples in all, "
            "a public number"
        )
        lines.append(Line(2, text))
    return lines + _observer_lines(examples)


def _wrap(line: str) -> str:
    # Wrapped lines get two more blanks, by which they differ from new entries.
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(
        line, _LINE_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _honest(
    ledger: Ledger, mechanism: Mechanism, broken: str | None, delta: float, stateful: bool
) -> dict[Observer, dict[str, Any]]:
    """Return each observer's entry, with epsilons of a client and of one example.

    Epsilons of a client are for all rounds, and for the worst round alone. All are infinite if
    `broken` gives a reason. If clients add noise, the entry on sums may have an epsilon against
    another client too.
    """

    def account(**options: Any) -> Mapping[Accountant, Epsilon]:
        if broken is None:
            return epsilons(ledger, mechanism, delta=delta, stateful=stateful, **options)
        return dict.fromkeys(BOTH, no_epsilon(ledger.participants.shape[1], broken))

    bounds: dict[Observer, dict[str, Mapping[Accountant, Epsilon]]] = {
        observer: {
            "total": account(observer=observer),
            "one_round": account(observer=observer, one_round=True),
        }
        for observer in OBSERVERS
    }
    bounds["aggregate"]["example"] = account(observer="aggregate", unit="example")
    # An example may change all of an upload, so that client and example have one epsilon.
    bounds["upload"]["example"] = bounds["upload"]["total"]
    result = {observer: _observer(observer, bounds) for observer in bounds}
    # A view of the run as a whole does not depend on what a client knows of the noise.
    several = ledger.participants.shape[1] > 1
    if np.any(ledger.client_noise) and several and not mechanism.view(ledger, "client").whole:
        result["aggregate"]["against_client"] = _headline_entry(
            tightest(account(observer="client"))
        )
    return result


def _observer(
    observer: Observer, bounds: Mapping[Observer, Mapping[str, Mapping[Accountant, Epsilon]]]
) -> dict:
    """Return an observer's entry: the smallest valid bounds, then each accountant's own.

    Sums are post-processing of uploads and inherit their guarantees. A replace-one bound also
    bounds zero-out.
    """
    sees, adjacency = OBSERVERS[observer]
    least = {
        key: _or_uploads(tightest(both), tightest(bounds["upload"][key]))
        for key, both in bounds[observer].items()
    }
    result = {"sees": sees, "adjacency": adjacency} | _headline_entry(least["total"])
    result |= {
        "one_round": _finite_or_inf(least["one_round"].value),
        "example": _headline_entry(least["example"]),
    }
    for accountant in ("rdp", "pld"):
        alone = {key: bounds[observer][key][accountant] for key in least}
        parts = {key: _finite_or_inf(alone[key].value) for key in ("one_round", "example")}
        result[accountant] = parts | _entry(alone["total"])
    return result


def _or_uploads(sums: Epsilon, uploads: Epsilon) -> Epsilon:
    """Return the smaller of a bound of sums and one of uploads, which also holds for sums."""
    # `running_epsilon` takes the same minimum.
    # On a tie the theorem about the sums themselves stays.
    if uploads.value < sums.value:
        theorem = f"bound of the uploads, which holds for sums too: {uploads.theorem}"
        return uploads._replace(theorem=theorem)
    return sums


def _headline_entry(least: Epsilon) -> dict[str, Any]:
    return {"epsilon": _finite_or_inf(least.value), "by": least.theorem, "reason": least.reason}


def _examples(ledger: Ledger, dp_sgd: DPSGD, delta: float, number: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "unit": "example: one of a client's, over the whole run",
        "delta": delta,
        "number": number,
        "sees": "every upload and every cohort, or of sums and broadcasts alone",
        "adjacency": "zero-out: the example's clipped gradient is replaced by zero, and numbers of "
        "examples are public",
        "clip": float(dp_sgd.clip),
        "noise_multiplier": _extremes(dp_sgd.noise_multiplier),
        "rate": _rate_or_extremes(dp_sgd),
        "steps": dp_sgd.steps,
    }
    bounds: dict[Accountant, Epsilon] = {
        accountant: example_epsilon(ledger, dp_sgd, accountant=accountant, delta=delta)
        for accountant in ("pld", "rdp")
    }
    entries = {accountant: _entry(bound) for accountant, bound in bounds.items()}
    return result | _headline_entry(tightest(bounds)) | entries


def _rate_or_extremes(dp_sgd: DPSGD) -> Any:
    rates = dp_sgd.rate_table
    if len(rates) == 1:
        return float(rates[0])
    return _extremes(rates)


def _entry(total: Epsilon) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "total": _finite_or_inf(total.value),
        "theorem": total.theorem,
        "reason": total.reason,
    }
    values = total.per_client
    # Equal epsilons need no entry by client, which would be long.
    if values.min() < values.max():
        entry["per_client"] = {
            "min": _finite_or_inf(values.min()),
            "median": _median(values),
            "max": _finite_or_inf(values.max()),
            "values": [_finite_or_inf(value) for value in values],
        }
    return entry


def _observer_lines(seen: dict[str, Any]) -> list[Line]:
    if seen["reason"]:
        lines = [f"no finite epsilon: {seen['reason']}", *_spread(seen["rdp"], "RDP")]
        return [Line(2, text) for text in lines]
    # The entry of one example has no epsilon of one round.
    alone = ""
    if "one_round" in seen:
        alone = f", {_four_digits(seen['one_round'])} for one round alone"
    lines = [f"epsilon {_four_digits(seen['epsilon'])} in total{alone}", f"by: {seen['by']}"]
    # The accountant of the headline is left out, because its bound has been stated.
    others = [seen[name] for name in ("rdp", "pld") if seen[name]["theorem"] != seen["by"]]
    for bound in others:
        alone = ""
        if "one_round" in bound:
            alone = f" and {_four_digits(bound['one_round'])}"
        lines.append(f"also: {_four_digits(bound['total'])}{alone} ({bound['theorem']})")
    lines.append(seen["adjacency"])
    if other := seen.get("against_client"):
        lines.append(
            "against another client, which knows its own noise: "
            f"{_four_digits(other['epsilon'])} ({other['by']})"
        )
    if example := seen.get("example"):
        lines.append(
            f"with one example replaced: {_four_digits(example['epsilon'])} ({example['by']})"
        )
    return [Line(2, text) for text in [*lines, *_spread(seen["pld"], "PLD")]]


def _spread(entry: dict[str, Any], accountant: str) -> list[str]:
    values = entry.get("per_client")
    if not values:
        return []
    return [f"by client: {_span(values)}, median {_four_digits(values['median'])} ({accountant})"]


def _assumed(mechanism: Mechanism, randomness: Randomness, stateful: bool) -> dict[str, str]:
    """Return what epsilons assume of clients, weights, sampling and random bits.

    The result has sentences by their codes.
    """
    assumed = {}
    if mechanism.clients_noisy:
        assumed["honest_clients"] = (
            "clients are honest, add the noise that they should, and pool nothing"
        )
    if mechanism.weights is not None:
        assumed["public_weights"] = (
            "weights are public: if they are numbers of examples, these are published"
        )
    assumed |= mechanism.sampling.assumed(stateful)
    if randomness == "secret":
        assumed["system_randomness"] = _SECRET
    return assumed


def _not_covered(mechanism: Mechanism, dp_sgd: DPSGD | None) -> dict[str, str]:
    """Return what no epsilon covers, by codes."""
    sentences = NOT_COVERED | PRECISION[mechanism.noise]
    # With noise in single precision on sums, the sentence on that noise suffices.
    if dp_sgd is not None and mechanism.noise == "grid":
        return sentences | _STEPS_PRECISION
    return sentences


def _finite_or_inf(value: float) -> float | str:
    if math.isfinite(value):
        return float(value)
    return "inf"


def _median(values: np.ndarray) -> float | str:
    """Return the upper median, which averages no infinities."""
    return _finite_or_inf(np.sort(values)[values.size // 2])


def _extremes(values: Any) -> dict[str, float | str]:
    values = np.asarray(values, np.float64)
    # An empty ledger has no rounds, and so no noise.
    if not values.size:
        return {"min": 0.0, "max": 0.0}
    return {"min": _finite_or_inf(values.min()), "max": _finite_or_inf(values.max())}


def _four_digits(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.4g}"


def _span(values: dict[str, float | str]) -> str:
    low = _four_digits(values["min"])
    high = _four_digits(values["max"])
    # Numbers that differ beyond four digits are shown as one.
    if low == high:
        return low
    return f"{low} to {high}"
