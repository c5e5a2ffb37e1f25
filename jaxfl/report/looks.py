"""One colour, marker and line style for each method, in all pictures."""

import collections
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from jaxfl import algorithms

Look: TypeAlias = dict[str, Any]
"""Colour, marker and line style of a curve, as arguments of matplotlib's `plot`."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
"""Colours of Okabe and Ito, which colour-blind readers can distinguish."""

SERIES = len(COLORS)
"""Largest number of curves in one panel."""

_MARKERS = "osD^vPX*"
_DASHES = ("-", "--", "-.", ":")
_LOOKS = SERIES * len(_MARKERS)
"""Number of different pairs of a colour and a marker."""

_FIRST = (
    # The eight of each block have different colours, because pictures compare them.
    "dp_fedavg", "prior_corrected", "fine_tuned", "dp_fedavg_mixed",
    "ditto", "dp_fedavg_fb", "local_only", "fedavg",

    "ppsgd", "pmtl_ft", "centaur", "dp_pfeddsu",
    "dp_pfeddsu_paper", "ifca", "scaffold", "fedprox",

    "apfl", "adp_pfl", "dp_lg", "fedrep",
    "feddpa", "matrix_scaled", "pfedme", "per_fedavg",

    "mr_mtl", "adp_pfl_paper", "dp_prototypes", "fedrod",
    "feddpa_paper", "dp_ridge", "fedadam", "mixed",

    "fedyogi", "pmtl", "ppsgd_centaur", "dp_fedsam",
    "fed_smp", "blur_lus", "fedbuff", "fedadagrad",

    "padpfl", "padpfl_paper", "pdp_fl", "pdp_fl_paper", "byzantine",
)  # fmt: skip
"""Builders whose place in the order is fixed, so that earlier pictures stay as they are."""

METHODS = (*_FIRST, *sorted(set(algorithms.__all__).difference(_FIRST)))
"""Builders of `jaxfl.algorithms`, in the order of their looks (`series`)."""

_ALIASES = {
    "trained_alone": "local_only",
    "recipe": "dp_fedavg_mixed",
    "fedavg_without_noise": "fedavg",
    "dp_fedavg_corrected": "prior_corrected",
    "dp_fedavg_fine_tuned": "fine_tuned",
    "linear_dp_fedavg_corrected": "prior_corrected",
    "linear_dp_fedavg_fine_tuned": "fine_tuned",
    "dp_fedavg_head_fine_tuned": "dp_fedavg_fb",
    "scaled_linear_dp_fedavg": "matrix_scaled",
    "dp_pfeddsu_as_printed": "dp_pfeddsu_paper",
}
"""Builders by other names that pictures have for their methods."""


def series(index: int) -> Look:
    """Return colour, marker and line style of the curve with an index from 0.

    The first eight have different colours and different markers, so that either distinguishes them.

    >>> [series(index)["color"] for index in (0, 8)], [series(index)["marker"] for index in (0, 8)]
    (['#0072B2', '#0072B2'], ['o', '^'])
    """
    turn, place = divmod(index, SERIES)
    # Steps of 3 reach all 8 markers, so a pair of colour and marker recurs only after 8 turns.
    marker = _MARKERS[(place + 3 * turn) % len(_MARKERS)]
    return {"color": COLORS[place], "marker": marker, "linestyle": _DASHES[turn % len(_DASHES)]}


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Return the look of each curve of a picture, by its name.

    A name of a method (`METHODS`) has the look of this method in every picture, in any spelling
    such as "DP-FedAvg" or "dp_fedavg". A variant such as "linear IFCA, corrected" has the look of
    its method, unless another curve of the picture has it. Other names have looks that are left,
    first in the colours that the picture has least of.

    Args:
        names: Names of the curves, in the order of their appearance.

    >>> looks(["mine", "DP-FedAvg"])["DP-FedAvg"] == looks(["dp_fedavg"])["dp_fedavg"]
    True
    """
    # The names are read several times, which some iterables do not allow.
    names = list(dict.fromkeys(names))
    known = {name: method for name in names if (method := _method(name)) in METHODS}
    for name in names:
        method = _method(_without_variant(name))
        if name not in known and method in METHODS and method not in known.values():
            known[name] = method
    found = {name: series(METHODS.index(method)) for name, method in known.items()}
    for name in names:
        if name not in found:
            found[name] = _left(list(found.values()))
    return {name: found[name] for name in names}


def _method(name: str) -> str:
    """Return the builder that a name stands for, or the name in lower case if it is of none.

    >>> _method("PMTL-FT"), _method("trained alone"), _method("case 3")
    ('pmtl_ft', 'local_only', 'case_3')
    """
    word = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return _ALIASES.get(word, word)


def _without_variant(name: str) -> str:
    """Return a method's name without the kind of its network and the ways of its evaluation.

    >>> _without_variant("linear IFCA, fine-tuned and corrected")
    'IFCA'
    """
    return name.partition(",")[0].removeprefix("linear ")


def _left(looks_in_use: list[Look]) -> Look:
    """Return an unused look, in the first of the colours that are used least often.

    If all are used, return a look that another curve has.
    """
    often = collections.Counter(look["color"] for look in looks_in_use)
    free = [look for look in map(series, range(_LOOKS)) if look not in looks_in_use]
    return min(free, key=lambda look: often[look["color"]], default=series(len(looks_in_use)))
