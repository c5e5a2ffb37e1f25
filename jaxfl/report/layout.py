"""Layout of the folders of runs: names of files, columns of metrics, points and checkpoints."""

import pathlib
import re

from jaxfl._support.files import kind

CONFIG = "config.json"
METRICS = "metrics.jsonl"
PER_CLIENT = "per_client.npz"
PRIVACY = "privacy.json"
CURVES = "curves.png"
AUDIT = "audit.npz"
CHECKPOINTS = "ckpt"
STATES = "states"
NOISE_KEY = "noise.key"
PRINTED = "curves.pdf"
PAGE = "report.html"
COMPARISON = "comparison.json"
LOCK = ".lock"

REPORTS = (METRICS, PER_CLIENT, PRIVACY, CURVES, AUDIT, PRINTED, PAGE)
"""Names of the files with reports of a run, or of each point of a sweep."""

FILES = (*REPORTS, CONFIG, CHECKPOINTS, STATES, NOISE_KEY, COMPARISON)
"""Names of files and folders that runs and comparisons use, except the lock file."""

_ROUNDS = re.compile("[1-9][0-9]{0,17}")
"""Names of checkpoints: the number of rounds after which they were made."""

_POINT_FOLDER = re.compile(r"[0-9]{1,9}(_[^\W\d]\w*=[^/]+)*")
"""Names of the folders of a sweep's points: their number, then values by argument."""

COLUMNS = {
    "epsilon": (
        "one client's epsilon so far, against an observer of noisy sums and broadcasts, as in the "
        "privacy statement"
    ),
    "epsilon_rdp": (
        "the same epsilon by Rényi divergences only, which is no smaller unless uploads bound it"
    ),
    "epsilon_upload": (
        "one client's epsilon so far, against an observer of every upload and every cohort"
    ),
    "epsilon_example": (
        "one example's epsilon so far, by private local steps, against either observer"
    ),
    "bytes_up": "bytes that a participant sends in a round",
    "bytes_down": "bytes that a participant receives in a round",
}
"""Meanings of columns of `metrics`: epsilons so far by the statement's bounds, and bytes."""


def points_of(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of a sweep's points in their order, without links."""
    points = [
        path
        for path in folder.iterdir()
        if _POINT_FOLDER.fullmatch(path.name) and kind(path) == "a folder"
    ]
    return sorted(points, key=lambda path: int(path.name.split("_")[0]))


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the folders of checkpoints in a folder, the newest last, without links.

    The list is empty if the folder does not exist.
    """
    if kind(folder) != "a folder":
        return []
    found = [
        path
        for path in folder.iterdir()
        if _ROUNDS.fullmatch(path.name) and kind(path) == "a folder"
    ]
    # As texts, 10 would come before 9.
    return sorted(found, key=lambda path: int(path.name))
